"""Overflows of float16 are found before a model is written, although ONNX Runtime computes float16 in float32 on a
CPU."""

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from onnx_models import FAMILIES, Window, planned

from chunkrt.cli import export as command
from chunkrt.errors import QuantizationError
from chunkrt.graph.partition import Planned
from chunkrt.onnx.exporting import DynamicSettings, SubgraphSettings, WindowSettings, check_float16, window_model
from chunkrt.onnx.exporting.checks import NUM_ROWS, evaluate
from chunkrt.onnx.exporting.export_settings import OPSETS

SIZES = {"window": 8, "sequence": 24, "context": 32}


def loud(weight, factor, name="llama_gqa"):
    """Return a decoder that multiplies the weights of one name by a factor."""
    decoder = planned(name)

    class Loud(Planned):
        def load(self, name):
            return super().load(name) * np.float32(factor if name.endswith(weight) else 1)

    return Loud(source=decoder.source, decoder=decoder.decoder, plan=decoder.plan)


@pytest.mark.sampled(every=11)
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_next_experts", "gemma3_scaled"])
def test_check_evaluates_the_decoder(name, opset):
    """Evaluated in float16, step by step, results are near ONNX Runtime's float32, and no fixture is refused."""
    settings = WindowSettings(window=8, sequence=8, context=8, opset=opset)
    model = window_model(planned(name), settings)
    feeds = {v.name: np.zeros(v.shape.numpy(), v.dtype.numpy()) for v in model.graph.inputs}
    feeds |= {"input_ids": np.array([input_ids(name)[:8]]), "attention_mask": np.ones((1, 8), np.int64)}
    told = []
    outputs = evaluate(model, feeds, lambda done, total: told.append((done, total)))
    assert outputs["logits"].dtype == np.float16
    expected = expected_logits(name)[:8]
    np.testing.assert_allclose(outputs["logits"][0], expected, rtol=0, atol=2e-2 * np.abs(expected).max())
    assert outputs.keys() == {value.name for value in model.graph.outputs}
    assert told[-1] == (len(list(model.graph)),) * 2
    check_float16(planned(name), settings)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize(
    ("weight", "factor", "value"),
    [
        ("mlp.down_proj.weight", 1e5, "model.layers.0.mlp.down_proj.output"),
        ("embed_tokens.weight", 1e6, "model.embed_tokens.weight"),
        ("gate_up_proj.weight", 2e4, "model.layers.0.mlp"),
        ("qkv_proj.weight", 1e4, "model.layers.0.self_attn"),
        ("lm_head.weight", 1e5, "logits"),
    ],
)
def test_overflow_is_named_with_its_magnitude(weight, factor, value, opset):
    with pytest.raises(
        QuantizationError, match=rf"^{value}\S* (reaches|holds) [\d.e+]+.*which exceeds float16's 65504"
    ) as raised:
        check_float16(loud(weight, factor), WindowSettings(**SIZES, opset=opset))
    assert "\n" not in str(raised.value)
    check_float16(loud(weight, factor), WindowSettings(**SIZES, opset=opset, dtype="fp32"))


def test_onnx_runtime_does_not_detect_overflow():
    """This is why it is not used: the residual stream exceeds float16, and its CPU provider returns finite logits."""
    decoder = loud("down_proj.weight", 1e4)
    assert np.isfinite(Window(decoder, **SIZES, dtype="fp16").run(input_ids("llama_gqa")[:8])).all()
    with pytest.raises(QuantizationError, match="exceeds float16"):
        check_float16(decoder, WindowSettings(**SIZES))


@pytest.mark.parametrize("settings", [DynamicSettings(context=64), SubgraphSettings(window=4)])
def test_other_forms_are_checked_by_a_window(settings):
    with pytest.raises(QuantizationError, match=r"down_proj\.output reaches"):
        check_float16(loud("down_proj.weight", 1e5), settings)


def test_check_costs_one_short_window_for_any_export(monkeypatch):
    made = []

    def short(planned, settings):
        made.append(settings)
        return window_model(planned, settings)

    monkeypatch.setattr("chunkrt.onnx.exporting.checks.window_model", short)
    check_float16(planned("llama_gqa"), WindowSettings(window=100, sequence=128, context=2000))
    assert [(each.window, each.sequence, each.context) for each in made] == [(NUM_ROWS,) * 3]


def test_memory_holds_one_weight_at_a_time(monkeypatch):
    alive, most = 0, 0
    numpy = ir.LazyTensor.numpy

    class Counted(np.ndarray):
        def __del__(self):
            nonlocal alive
            alive -= self.base is not None and self.nbytes > 1024

    def counting(self):
        nonlocal alive, most
        array = numpy(self).view(Counted)
        alive += array.nbytes > 1024
        most = max(most, alive)
        return array

    monkeypatch.setattr(ir.LazyTensor, "numpy", counting)
    check_float16(planned("llama_gqa"), WindowSettings(**SIZES))
    assert 1 <= most <= 2


@pytest.mark.parametrize("form", ["-o", "--static-subgraphs"])
def test_command_refuses_in_one_line_and_writes_no_file(tmp_path, monkeypatch, form):
    decoder = loud("down_proj.weight", 1e5)
    monkeypatch.setattr("chunkrt.compile.compiler.plan_checkpoint", lambda *arguments, **options: decoder)
    target = tmp_path / ("d.onnx" if form == "-o" else "parts")
    arguments = [str(checkpoint("llama_gqa")), form, str(target), "--context", "32"]
    result = CliRunner().invoke(command.export, arguments)
    assert isinstance(result.exception, QuantizationError)
    assert "down_proj.output reaches" in str(result.exception)
    assert not list(tmp_path.iterdir())
    result = CliRunner().invoke(command.export, [*arguments, "--dtype", "fp32"])
    assert result.exit_code == 0, result.output
    assert list(tmp_path.iterdir())
