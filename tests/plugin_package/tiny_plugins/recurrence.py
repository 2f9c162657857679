"""A decoder family with its own operator that has state: a decaying running sum, instead of attention."""

from chunkrt.graph import ops
from chunkrt.graph.decoders.llama import CausalDecoder, norm
from chunkrt.graph.modules import Embedding, Module, Parameter
from chunkrt.graph.operators import Operator, register_operator
from chunkrt.graph.parallel import ReplicatedLinear

EXPANSION = """Recurrence (x, decay, state) => (output, new_state)
{
    new_state, output = Scan <num_scan_inputs = 1, body = row
        (float[n] s, float[n] x_t) => (float[n] new_s, float[n] o_t)
    {
        decayed = Mul (s, decay)
        new_s = Add (decayed, x_t)
        o_t = Identity (new_s)
    }> (state, x)
}"""

register_operator(
    "tiny",
    "Recurrence",
    Operator(
        num_inputs=3,
        weights=(1,),
        is_dynamic=True,
        output=lambda attributes, shapes: shapes[0],
        flops=lambda attributes, shapes: 2 * shapes[0][1],
        expansion=EXPANSION,
    ),
)


class Recurrence(Module):
    """Running sum s_t = decay * s_(t-1) + x_t, column by column."""

    def __init__(self, width):
        super().__init__()
        self.width = width

    def declare(self):
        name = self.sibling("decay")
        self.decay = Parameter(
            shape=(self.width,), checkpoint_tensors={name: (self.width,)}, combine=lambda tensor: tensor
        )

    def forward(self, x):
        return ops.apply("tiny", "Recurrence", [x, self.decay.value()], states={"sum": (self.width,)})


class Body(Module):
    """Embedding, one layer, the final norm."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.in_proj = ReplicatedLinear(config.hidden_size, config.hidden_size)
        self.recurrence = Recurrence(config.hidden_size)
        self.out_proj = ReplicatedLinear(config.hidden_size, config.hidden_size)
        self.norm = norm(config)

    def forward(self, token_ids):
        hidden = self.embed_tokens(token_ids)
        mixed = self.out_proj(self.recurrence(self.in_proj(hidden)))
        return self.norm(ops.add(hidden, mixed, name="residual"))


def tiny_recurrent(config):
    """Build the module tree of a checkpoint."""
    return CausalDecoder(config, Body(config))


class RunningSum:
    """The sums of one node, whose decay is prepared."""

    def __init__(self, node):
        (_, self.width), *_ = node.input_shapes

    def prepare(self, decay):
        """Keep the decay float32 [H]."""
        assert decay.shape == (self.width,)
        self.decay = decay

    def __call__(self, x, state):
        """Compute the sums of x float32 [T, H], with state [H], which is updated in place."""
        output = x.copy()
        for row in output:
            row += self.decay * state
            state[:] = row
        return output
