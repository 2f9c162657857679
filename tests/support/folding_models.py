"""Small decoders with uneven channels, run by the reference operators, and their folded transformations."""

import numpy as np

from chunkrt.compile.calibrate import run_operator
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.decoders.config import read_config
from chunkrt.graph.decoders.llama import Attention, CausalDecoder, FeedForward, Layer, llama
from chunkrt.graph.ops import trace
from chunkrt.graph.partition import partition
from chunkrt.graph.plan import resolve
from chunkrt.quant.equalisation import equalise
from chunkrt.quant.rotation import rotation
from chunkrt.testing.random_decoders import CONFIG, RandomCheckpoint

TOKENS = np.random.default_rng(3).integers(0, 61, 24)
LAYER = "model.layers.0"
QKV, O_PROJ = f"{LAYER}.self_attn.qkv_proj.weight", f"{LAYER}.self_attn.o_proj.weight"
GATE_UP, DOWN = f"{LAYER}.mlp.gate_up_proj.weight", f"{LAYER}.mlp.down_proj.weight"


class Model:
    """Plan and weights of a decoder, computed by the reference operators."""

    def __init__(self, decoder, source):
        self.plan = partition(trace(decoder), family="llama")
        self.parameters = {parameter.name: parameter for parameter in decoder.parameters()}
        self.source = source

    def load(self, name):
        """Scale norms and rows of linears by factors from 1/30 to 30, so that channels are uneven."""
        weight = self.parameters[name].load(self.source)
        if isinstance(self.source, RandomCheckpoint) and "rope" not in name:
            spread = np.random.default_rng(len(name)).uniform(-1.5, 1.5, weight.shape[0])
            spread[:2] = 0, 1.5
            weight = (weight.T * 10**spread / np.sqrt(np.mean(100**spread))).T.astype(np.float32)
        return weight

    def folded(self, folding):
        return lambda name: folding.apply(name, self.load(name))

    def run(self, load=None, tokens=TOKENS):
        """Return the logits [T, V], and the largest magnitude of each channel of each value."""
        load = load or self.load
        plan, peaks, tokens = self.plan, {}, tokens % self.plan.vocab_size
        values = {
            "": None,
            "input_ids": tokens,
            "position": np.zeros(1, np.int64),
            "logit_rows": np.arange(len(tokens)),
        }
        values["rope_position"] = np.array([plan.rope_offset(len(tokens))])
        for subgraph in plan.subgraphs:
            values |= {name: load(name) for name in subgraph.weights}
            symbols = dict.fromkeys("PW", len(tokens))
            values |= {n: np.zeros(resolve(plan.tensors[n].shape, symbols), np.float32) for n in subgraph.state}
            for node in subgraph.nodes:
                results = run_operator(node, [values[name] for name in node.inputs])
                results = results if isinstance(results, tuple) else (results,)
                values |= dict(zip(node.outputs, results, strict=True))
                peaks |= {name: np.abs(values[name]).max(axis=0) for name in node.outputs}
        return values[plan.output], peaks


def random_model(**changes):
    source = RandomCheckpoint({**CONFIG, **changes})
    return Model(build_decoder(source), source)


def equalised(model, alpha=0.5):
    return equalise(model.plan, model.load, model.run()[1], alpha)


def rotated(model):
    return rotation(model.plan, model.load)


def both(model):
    first = rotated(model)
    load = model.folded(first)
    return first.then(equalise(model.plan, load, model.run(load)[1], 0.5))


def assert_same(found, expected):
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


class AnyTensors(RandomCheckpoint):
    """Has every requested tensor; its parameters know the shapes."""

    def __init__(self, decoder):
        super().__init__(CONFIG)
        self.shapes = {name: shape for p in decoder.parameters() for name, shape in p.checkpoint_tensors.items()}


def unusual_model(layer=Layer, feed_forward=FeedForward, decoder=CausalDecoder):
    """Return a Llama of two layers with other modules."""
    config = read_config(RandomCheckpoint(CONFIG))
    body = llama(config).model
    has_bias = CONFIG["attention_bias"]

    def attention():
        return Attention(config, body.rope, bias=(has_bias, has_bias))

    body.layers = [layer(config, attention(), feed_forward(config)) for _ in range(2)]
    decoder = decoder(config, body).named()
    return Model(decoder, AnyTensors(decoder))
