"""Residual scaling: chosen by calibration, exact in every family, and without effect if float16 suffices."""

import re
from dataclasses import replace

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from folding_models import Model, equalised, random_model, rotated, unusual_model
from relative_error import relative_error
from wide_gemma import EXPONENT, PEAK, wide_gemma, wide_logits

import chunkrt
from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.compile import compiler
from chunkrt.compile.calibrate import calibrate
from chunkrt.errors import QuantizationError
from chunkrt.graph import ops
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.decoders.llama import Layer
from chunkrt.quant.residual_scaling import LARGEST_EXPONENT, residual_scaling

FAMILIES = (
    "gemma3_scaled",
    "lfm2_biased",
    "llama_biased",
    "llama_tied",
    "mistral_window_5",
    "phi3_window_5",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_next",
    "qwen3_next_experts",
)
EMBEDDINGS = "model.embed_tokens.weight"
MOST_ERROR = 0.04
"""Tolerance of w8a16's logits against float (root mean square)."""


def calibration_of(model, load=None, plan=None):
    """Calibrate on the model's own text, by mse: limits are not at peaks."""
    tokens = np.random.default_rng(5).integers(0, model.plan.vocab_size, 64)
    return calibrate(plan or model.plan, load or model.load, tokens, model="model")


def with_peak(calibration, peak):
    """Return the same calibration, with another peak of the embeddings in the stream."""
    return replace(calibration, peaks={**calibration.peaks, "model.embed_tokens.output": peak})


def model_of(name):
    source = open_checkpoint(checkpoint(name))
    return Model(build_decoder(source), source)


def scaled_model(model, scaling):
    """Return the same decoder after scaling: its plan has other epsilons."""
    other = Model.__new__(Model)
    other.__dict__.update(model.__dict__, plan=scaling.plan(model.plan))
    return other


@pytest.mark.parametrize("name", FAMILIES)
def test_scaled_decoder_computes_the_same_bits(name):
    model = model_of(name)
    calibration = calibration_of(model)
    scaling = residual_scaling(model.plan, with_peak(calibration, 1e5))
    assert (scaling.exponent, scaling.obstacle) == (2, "")
    scaled, load = scaled_model(model, scaling), model.folded(scaling.folding(model.plan))
    tokens = np.random.default_rng(1).integers(0, model.plan.vocab_size, 24)
    expected, peaks = model.run(tokens=tokens)
    found, scaled_peaks = scaled.run(load, tokens)
    np.testing.assert_array_equal(found, expected)
    assert {name for name, each in peaks.items() if (scaled_peaks[name] != each).any()} == set(scaling.values)
    np.testing.assert_array_equal(load(EMBEDDINGS), model.load(EMBEDDINGS) / 4)
    np.testing.assert_array_equal(load("lm_head.weight"), model.load("lm_head.weight"))


@pytest.mark.parametrize("name", ["gemma3_scaled", "llama_biased"])
def test_calibration_equals_that_of_the_scaled_decoder(name):
    model = model_of(name)
    before = calibration_of(model)
    scaling = residual_scaling(model.plan, with_peak(before, 1e5))
    found = scaling.calibration(model.plan, before)
    expected = calibration_of(model, model.folded(found.folding), scaling.plan(model.plan))
    for field in ("peaks", "limits", "shadow_limits", "column_peaks", "channel_peaks", "shadowed_column_peaks"):
        ours, theirs = getattr(found, field), getattr(expected, field)
        assert ours.keys() == theirs.keys()
        for value in ours:
            np.testing.assert_array_equal(ours[value], theirs[value], err_msg=f"{field} of {value}")
    assert {value for value in before.peaks if found.peaks[value] != before.peaks[value]} == set(scaling.values)


def test_foldings_come_first():
    """The stream of an equalised or rotated decoder is scaled like any other."""
    for changes, make in (({}, equalised), ({}, rotated)):
        model = random_model(**changes)
        folding = make(model)
        load = model.folded(folding)
        before = replace(calibration_of(model, load), folding=folding)
        scaling = residual_scaling(model.plan, with_peak(before, 1e5))
        both = scaling.calibration(model.plan, before).folding
        found, _ = scaled_model(model, scaling).run(model.folded(both))
        np.testing.assert_array_equal(found, model.run(load)[0])


@pytest.mark.parametrize(
    ("peak", "exponent"),
    [(25_750, 0), (32_752, 0), (32_753, 1), (65_504, 1), (65_505, 2), (104_060, 2), (2.0**24, 10)],
)
def test_scale_leaves_room_for_twice_the_peak(peak, exponent):
    model = model_of("llama_mha")
    scaling = residual_scaling(model.plan, with_peak(calibration_of(model), peak))
    assert (scaling.exponent, scaling.peak, scaling.obstacle) == (exponent, peak, "")
    assert 2 * peak * 2.0**-exponent <= 65_504


def test_stream_within_float16_is_unchanged():
    model = model_of("gemma3_scaled")
    calibration = calibration_of(model)
    scaling = residual_scaling(model.plan, calibration)
    assert str(scaling).endswith(f"{scaling.peak:.6g} and keeps its scale (float16's largest value is 65504)")
    assert scaling.plan(model.plan) is model.plan
    assert scaling.calibration(model.plan, calibration) is calibration


class SquashedLayer(Layer):
    """A layer whose stream passes through a sigmoid."""

    def forward(self, hidden):
        return ops.sigmoid(super().forward(hidden), name="squashed")


class SquaredLayer(Layer):
    """A layer whose stream is multiplied by itself."""

    def forward(self, hidden):
        hidden = super().forward(hidden)
        return ops.mul(hidden, hidden, name="squared")


class UnnormedLayer(Layer):
    """A layer whose feed-forward reads the stream directly."""

    def forward(self, hidden):
        hidden = ops.add(hidden, self.self_attn(self.input_layernorm(hidden)), name="attention_residual")
        return ops.add(hidden, self.mlp(hidden), name="output")


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (SquashedLayer, "node 'model.layers.0.squashed' (Sigmoid) reads it, and is not invariant to its scale"),
        (SquaredLayer, "node 'model.layers.0.squared' (Mul) multiplies two parts of it"),
    ],
)
def test_obstacles_to_scaling_are_reported(layer, reason):
    model = unusual_model(layer)
    calibration = calibration_of(model)
    scaling = residual_scaling(model.plan, with_peak(calibration, 1e6))
    assert scaling.exponent == 0
    assert scaling.obstacle == f"it cannot be scaled: {reason}"


def test_stream_within_float16_has_no_obstacle():
    model = unusual_model(SquashedLayer)
    assert residual_scaling(model.plan, calibration_of(model)).obstacle == ""


def test_linears_that_read_the_stream_undo_the_scale():
    model = unusual_model(UnnormedLayer)
    scaling = residual_scaling(model.plan, with_peak(calibration_of(model), 1e5))
    assert set(scaling.readers) == {f"model.layers.{layer}.mlp.gate_up_proj.weight" for layer in (0, 1)}
    found, _ = scaled_model(model, scaling).run(model.folded(scaling.folding(model.plan)))
    np.testing.assert_array_equal(found, model.run()[0])


def test_stream_too_large_for_every_scale():
    model = model_of("llama_mha")
    scaling = residual_scaling(model.plan, with_peak(calibration_of(model), 1e9))
    assert (scaling.exponent, scaling.obstacle) == (0, f"it would need a scale below 2^-{LARGEST_EXPONENT}")


def test_calibration_of_another_decoder_is_refused():
    message = (
        "the calibration has no entry for 'model.layers.0.post_feedforward_layernorm.output'; "
        "calibrate this model again"
    )
    with pytest.raises(QuantizationError, match="^" + re.escape(message)):
        residual_scaling(model_of("gemma3_scaled").plan, calibration_of(model_of("llama_mha")))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return wide_gemma(tmp_path_factory.mktemp("wide"))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16", "w8a8"])
def test_engines_of_static_schemes_are_scaled_and_compute_the_same(wide, scheme, monkeypatch, caplog):
    """On the CPU, whose float32 holds the stream, logits are the same bits with and without scaling."""
    model, calibration = wide
    options = {
        "npu": "native",
        "scheme": scheme,
        "calibration": calibration,
        "chunk_length": 32,
        "cache_dtype": "float32",
    }
    expected, tokens = wide_logits()
    caplog.set_level("INFO", "chunkrt.compile.compiler")
    with chunkrt.load(model, **options) as engine:
        epsilons = epsilons_of(engine.plan)
        found = engine.session().prefill(tokens, logits="all").logits
    assert f"the residual stream reaches {PEAK:g} and is scaled by 2^-{EXPONENT}" in caplog.text
    monkeypatch.setattr(compiler, "residual_scaling", unscaled)
    monkeypatch.setenv("CHUNKRT_HOME", str(model.parent / f"unscaled-{scheme}"))
    with chunkrt.load(model, **options) as engine:
        assert epsilons_of(engine.plan) == {name: epsilon * 4**EXPONENT for name, epsilon in epsilons.items()}
        np.testing.assert_array_equal(engine.session().prefill(tokens, logits="all").logits, found)
    if scheme == "w8a16":
        assert relative_error(found, expected) < MOST_ERROR


def epsilons_of(plan):
    """Return the epsilons of the stream's norms."""
    norms = (node for s in plan.subgraphs for node in s.nodes if node.op == "RMSNormalization")
    behind = ("post_attention_layernorm", "post_feedforward_layernorm")
    return {n.name: n.attributes["epsilon"] for n in norms if not any(name in n.name for name in behind)}


def unscaled(plan, calibration):
    """Return the scaling without an effect."""
    return replace(residual_scaling(plan, calibration), exponent=0)
