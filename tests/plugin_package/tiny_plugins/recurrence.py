"""A decoder family with its own operator that has state: a decaying running sum, instead of attention."""

from chunkrt.graph import ops
from chunkrt.graph.decoders.llama import CausalDecoder, norm
from chunkrt.graph.modules import Embedding, Module, Parameter
from chunkrt.graph.ops import current_trace
from chunkrt.graph.parallel import ReplicatedLinear


class Recurrence(Module):
    """Running sum s_t = decay * s_(t-1) + x_t, column by column. Runs on the CPU unless placed."""

    def __init__(self, width):
        super().__init__()
        self.device = "cpu"
        self.width = width

    def declare(self):
        name = self.sibling("decay")
        self.decay = Parameter(
            shape=(self.width,), checkpoint_tensors={name: (self.width,)}, combine=lambda tensor: tensor
        )

    def forward(self, x):
        trace = current_trace()
        state = trace.state("sum", (self.width,))
        output, new_state = trace.node(
            "Recurrence",
            [x, self.decay.value(), state],
            [("output", ops.shape_of(x)), ("new_sum", (self.width,))],
            attributes={},
            domain="tiny",
        )
        trace.update_state(state, new_state)
        return output


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


def recurrence(x, decay, state):
    """Compute the sums of x float32 [T, H], with decay [H] and state [H], which is updated in place."""
    output = x.copy()
    for row in output:
        row += decay * state
        state[:] = row
    return output, state
