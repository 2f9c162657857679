"""Loss of a trial: compared with engines of the reference backend, and with a run written by hand."""

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from threadpoolctl import threadpool_info

import chunkrt
from chunkrt.compile import trials as losses_module
from chunkrt.compile.calibrate import cached_calibration, run_operator
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.compile.trials import LOSS_EVERY, Loss, Losses, RoundedLinears
from chunkrt.errors import QuantizationError
from chunkrt.graph.plan import linear_nodes, resolve
from chunkrt.quant.arithmetic import (
    BlockWeight,
    DynamicWeight,
    StaticWeight,
    quantize_to_blocks,
    quantize_weight,
    quantize_weight_in_blocks,
)
from chunkrt.quant.grid import grids_of
from chunkrt.quant.scheme import SCHEMES, Scheme, find_scheme

GGUF = checkpoint("llama_biased_gguf")
WINDOWS = [np.random.default_rng(seed).integers(0, 128, length) for seed, length in ((0, 41), (1, 24))]
QKV, DOWN = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.1.mlp.down_proj.weight"
W8A8 = Scheme(name="w8a8", weight_bits=8, activations="static")


class Tiny:
    """The checkpoint, planned and calibrated for a scheme."""

    def __init__(self, scheme):
        self.planned = plan_checkpoint(GGUF, {})
        self.plan = self.planned.plan
        self.calibration, _ = cached_calibration(self.planned, GGUF, model="tiny", equalisation=scheme.equalisation)

    def load(self, name):
        return self.calibration.folding.apply(name, self.planned.load(name))

    def load_as_stored(self, name):
        """Return weights with float16 embeddings, as in an engine; even this difference moves values to other
        levels."""
        weight = self.load(name)
        return weight.astype(np.float16).astype(np.float32) if "embed_tokens" in name else weight

    def losses(self, windows=WINDOWS):
        return Losses(self.plan, self.load, self.calibration, windows)

    def run(self, tokens, linear=lambda node, x, weight: x @ weight):
        """Compute logits [T, V], node after node, with linears computed by `linear`."""
        values = {"input_ids": tokens, "position": np.zeros(1, np.int64), "logit_rows": np.arange(len(tokens))}
        for subgraph in self.plan.subgraphs:
            values |= {name: self.load(name) for name in subgraph.weights}
            shapes = {name: resolve(self.plan.tensors[name].shape, {"P": len(tokens)}) for name in subgraph.state}
            values |= {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
            for node in subgraph.nodes:
                arguments = [values[name] for name in node.inputs]
                results = linear(node, *arguments) if node.op == "MatMul" else run_operator(node, arguments)
                values |= zip(node.outputs, results if isinstance(results, tuple) else (results,), strict=True)
        return values[self.plan.output]


def loss_of(pairs):
    """Return mean KL and ratio of perplexities of (float logits, logits, tokens), in float64 and by the formula."""
    kl, surprise = [], []
    for base, logits, tokens in pairs:
        log_p, log_q = (
            x - np.log(np.exp(x).sum(axis=1, keepdims=True))
            for x in (base.astype(np.float64), logits.astype(np.float64))
        )
        for row in range(0, len(tokens) - 1, LOSS_EVERY):
            kl.append((np.exp(log_p[row]) * (log_p[row] - log_q[row])).sum())
            surprise.append((log_p - log_q)[row, tokens[row + 1]])
    return Loss(kl=np.mean(kl), perplexity_ratio=np.exp(np.mean(surprise)))


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "w8a8", "outputs": "grid"},
        {"scheme": "w8a8", "outputs": "float", "shadow": "*"},
        {"scheme": "w8a8", "outputs": "grid", "shadow": "*.down_proj.weight", "equalisation": "off"},
        {"scheme": "w8a16"},
        {"scheme": "w4a16", "rounding": "nearest", "rotation": False},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_trial_has_the_loss_of_an_engine(options):
    with chunkrt.load(GGUF, npu="reference", **options) as engine:
        scheme = engine.scheme
        found = [engine.session().prefill(tokens, logits="all").logits for tokens in WINDOWS]
    with chunkrt.load(GGUF, npu="reference", scheme="float") as engine:
        base = [engine.session().prefill(tokens, logits="all").logits for tokens in WINDOWS]
    expected = loss_of(zip(base, found, WINDOWS, strict=True))
    tiny = Tiny(scheme)
    trial = Losses(tiny.plan, tiny.load_as_stored, tiny.calibration, WINDOWS).of(scheme)
    assert trial.kl == pytest.approx(expected.kl, rel=0.03, abs=1e-7)
    assert trial.perplexity_ratio == pytest.approx(expected.perplexity_ratio, abs=0.01 * np.sqrt(expected.kl))


@pytest.mark.parametrize("chosen", [[QKV], [DOWN], [DOWN, "lm_head.weight"], ["lm_head.weight"]], ids=str)
def test_unselected_linears_stay_in_float(chosen):
    """The grid's formula is computed by hand, in a complete run."""
    tiny = Tiny(W8A8)

    def linear(node, x, weight):
        if node.inputs[1] not in chosen:
            return x @ weight
        step = np.float32(tiny.calibration.limits[node.inputs[0]]) / np.float32(127)
        kept = np.clip(np.rint(x / step), -127, 127) * step
        scale = np.abs(weight).max(axis=0) / np.float32(127)
        product = kept @ (np.rint(weight / scale) * scale)
        step = np.float32(1.25) * np.float32(tiny.calibration.peaks[node.outputs[0]]) / np.float32(127)
        return (np.clip(np.rint(product / step), -127, 127) * step).astype(np.float32)

    expected = loss_of((tiny.run(tokens), tiny.run(tokens, linear), tokens) for tokens in WINDOWS)
    trial = tiny.losses().of(W8A8, chosen)
    assert trial.kl == pytest.approx(expected.kl, rel=0.03, abs=1e-7)
    assert trial.kl > 1e-6, "nothing was quantised"
    assert trial.perplexity_ratio == pytest.approx(expected.perplexity_ratio, abs=0.01 * np.sqrt(expected.kl))


def test_run_from_the_first_change_equals_a_complete_run():
    tiny = Tiny(W8A8)
    losses, whole = tiny.losses(), tiny.losses()
    whole.home_of = dict.fromkeys(whole.home_of, 0)
    for chosen in ([QKV], [DOWN], ["lm_head.weight"], [DOWN, QKV], None):
        assert losses.of(W8A8, chosen) == whole.of(W8A8, chosen)
    assert losses.home_of["lm_head.weight"] > losses.home_of[DOWN] > losses.home_of[QKV] > 0


def test_unchanged_scheme_has_no_loss():
    losses = Tiny(W8A8).losses()
    assert losses.of(W8A8, []) == Loss(kl=0.0, perplexity_ratio=1.0)
    losses.of(W8A8)
    assert losses.of(W8A8, [QKV]) == losses.of(W8A8, [QKV]), "an earlier trial changed what a later one is given"


def test_tiny_divergences_are_not_lost_in_rounding(monkeypatch):
    """Logits differ in the last bits of float32: the KL is far below the resolution of p log(p / q) in float32."""
    tiny, tokens = Tiny(W8A8), WINDOWS[0]
    base = tiny.run(tokens)[: len(tokens) - 1 : LOSS_EVERY]
    moved = (base * np.float32(1 + 1e-4)).astype(np.float32)
    losses = tiny.losses([tokens])

    def run_subgraph(plan, index, live, weights, run):
        return {plan.output: moved}

    monkeypatch.setattr(losses_module, "run_subgraph", run_subgraph)
    log_p, log_q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in map(np.float64, (base, moved)))
    expected = (np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean()
    assert 0 < expected < 1e-7
    assert losses.of(W8A8, ["lm_head.weight"]).kl == pytest.approx(expected, rel=0.5)


def test_windows_run_on_one_thread_each(monkeypatch):
    """Results then depend neither on the cores nor on other load."""
    losses, seen = Tiny(W8A8).losses(), []
    real = losses_module.run_subgraph

    def run_subgraph(*arguments):
        seen.extend(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")
        return real(*arguments)

    before = [pool["num_threads"] for pool in threadpool_info()]
    monkeypatch.setattr(losses_module, "run_subgraph", run_subgraph)
    losses.of(W8A8, ["lm_head.weight"])
    assert set(seen) == {1}
    assert [pool["num_threads"] for pool in threadpool_info()] == before


def test_non_finite_logits_are_an_error(monkeypatch):
    tiny, tokens = Tiny(W8A8), WINDOWS[0]
    losses, logits = tiny.losses([tokens]), np.full_like(tiny.run(tokens)[: len(tokens) - 1 : LOSS_EVERY], np.nan)
    monkeypatch.setattr(losses_module, "run_subgraph", lambda plan, *_: {plan.output: logits})
    with pytest.raises(QuantizationError, match="logits under the scheme 'w8a8' are not finite"):
        losses.of(W8A8, [QKV])


def test_reach_is_in_steps_of_the_grid_with_a_shadow():
    tiny = Tiny(W8A8)
    losses, node = tiny.losses(), linear_nodes(tiny.plan)[DOWN]
    shadowed = Scheme(name="w8a8", weight_bits=8, activations="static", shadowed=("*",))
    scale = np.ones(resolve(tiny.plan.tensors[DOWN].shape, {})[1], np.float32)
    step = grids_of(node, shadowed, tiny.calibration, scale).input_step[0]
    assert losses.reach(DOWN) == pytest.approx(tiny.calibration.peaks[node.inputs[0]] / step)
    tiny.calibration.shadow_limits[node.inputs[0]] = 0.0  # 99.5 % of the values are 0: the grid ends at 1
    assert losses.reach(DOWN) == pytest.approx(127 * tiny.calibration.peaks[node.inputs[0]])


def test_multiply_adds_are_sizes_of_weights():
    tiny = Tiny(W8A8)
    expected = {name: tiny.load(name).size for name in linear_nodes(tiny.plan)}
    assert tiny.losses().multiply_adds == expected


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "float"])
@pytest.mark.parametrize("weight", [QKV, DOWN, "lm_head.weight"])
def test_rounded_linears_equal_the_reference_operators(name, weight):
    """They are equal bit for bit if sums of integers stay below 2^24, otherwise within a step of the output's grid.

    Results with another order of rounding are near: rows with outliers to 2^-22, blocks to 2^-16.
    """
    scheme = find_scheme(name)
    tiny = Tiny(scheme)
    node, bits = linear_nodes(tiny.plan)[weight], scheme.activation_bits_of(weight)
    x = np.random.default_rng(2).standard_normal((9, tiny.load(weight).shape[0]), np.float32)
    x[3] = 0
    x[5, 2], x[7, [1, 30]] = 4000.7, (-2000, 2400)
    quantize = quantize_weight_in_blocks if scheme.weight_bits_of(weight) == 4 else quantize_weight
    integers, scale, *_ = quantize(tiny.load(weight))
    if scheme.has_blocks(weight):
        truth = BlockWeight(quantize_to_blocks(tiny.load(weight)))
        error = 2.0**-16 * np.abs(truth.multiply(x)).max()
    elif scheme.is_static:
        grids = grids_of(node, scheme, tiny.calibration, scale)
        steps = {"input_step": grids.input_step, "output_step": grids.output_step}
        truth = StaticWeight(integers, scale, bits=bits, **steps)
        error = 0 if bits == 8 or grids.output_step is None else grids.output_step
    else:
        truth = DynamicWeight(integers, scale)
        error = (
            2.0**-22
            * np.abs(truth.multiply(x)).max(axis=1, keepdims=True)
            * (np.abs(x) > 1000).any(axis=1, keepdims=True)
        )
    found = RoundedLinears({weight: tiny.load(weight)}, tiny.calibration).multiply(node, x, scheme)
    assert (found.dtype, found.shape) == (np.float32, (9, len(scale)))
    assert (np.abs(found - truth.multiply(x)) <= np.multiply(1.001, error)).all()


def test_shadow_adds_the_excess_over_the_grid():
    tiny = Tiny(W8A8)
    scheme = Scheme(name="w8a8", weight_bits=8, activations="static", shadowed=("*",), float_outputs=("*",))
    node, weight = linear_nodes(tiny.plan)[DOWN], tiny.load(DOWN)
    limit = tiny.calibration.shadow_limits[node.inputs[0]]
    x = np.random.default_rng(5).uniform(-limit, limit, (6, len(weight))).astype(np.float32)
    x[2, 3], x[4, 0] = 1000 * limit, -77 * limit
    found = RoundedLinears({DOWN: weight}, tiny.calibration).multiply(node, x, scheme)
    step = limit / 127
    rounded = np.rint(x.astype(np.float64) / step) * step
    beyond = np.abs(x) > limit * 1.01
    expected = np.where(beyond, x, rounded) @ weight.astype(np.float64)
    # The error of a weight is at most half a step.
    allowed = np.abs(x).sum(axis=1, keepdims=True) * np.abs(weight).max(axis=0) / 127 * 0.51
    assert (np.abs(found - expected) <= allowed).all()
