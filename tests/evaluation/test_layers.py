"""`chunkrt eval --per-layer`: every figure against independent computations, the picture, and refused options."""

import json
import sys

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

import chunkrt
from chunkrt.compile.calibrate import cached_calibration, run_operator
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.compile.trials import LOSS_EVERY
from chunkrt.errors import ConfigError
from chunkrt.evaluation.layers import NUM_LAYER_WINDOWS, NUM_SHOWN, draw_layers, evaluate_layers
from chunkrt.graph.plan import linear_nodes, resolve
from chunkrt.quant.arithmetic import (
    BlockWeight,
    DynamicWeight,
    StaticWeight,
    quantize_to_blocks,
    quantize_weight,
    quantize_weight_in_blocks,
)
from chunkrt.quant.folding import Folding
from chunkrt.quant.grid import grids_of

GGUF = checkpoint("llama_biased_gguf")
STORY = "Es war einmal eine kleine Geschichte, die niemand zu Ende erzählte. " * 20
WINDOWS = [np.random.default_rng(seed).integers(0, 128, length).tolist() for seed, length in ((0, 41), (1, 24))]
KINDS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
DOWN = "model.layers.0.mlp.down_proj.weight"


class Tiny:
    """The checkpoint, and the settings of its engine."""

    def __init__(self, **options):
        with chunkrt.load(GGUF, npu="reference", **options) as engine:
            self.scheme = engine.scheme
        planned = plan_checkpoint(GGUF, {})
        self.plan, self.calibration, folding = planned.plan, None, Folding()
        if self.scheme.is_static:
            equalisation = self.scheme.equalisation
            self.calibration, _ = cached_calibration(planned, GGUF, model="tiny", equalisation=equalisation)
            folding = self.calibration.folding
        self.load = lambda name: folding.apply(name, planned.load(name))

    def evaluate(self, windows=WINDOWS, **options):
        return evaluate_layers(self.plan, self.load, self.scheme, self.calibration, windows, **options)

    def grids(self, name):
        _, scale = quantize_weight(self.load(name))
        return grids_of(linear_nodes(self.plan)[name], self.scheme, self.calibration, scale)

    def multiply(self, name, x):
        """Computes nodes like the reference backend."""
        if self.scheme.has_blocks(name):
            return BlockWeight(quantize_to_blocks(self.load(name))).multiply(x)
        quantize = quantize_weight_in_blocks if self.scheme.weight_bits_of(name) == 4 else quantize_weight
        integers, scale, *_ = quantize(self.load(name))
        if not self.scheme.is_static:
            return DynamicWeight(integers, scale).multiply(x)
        grids = grids_of(linear_nodes(self.plan)[name], self.scheme, self.calibration, scale)
        bits = self.scheme.activation_bits_of(name)
        weight = StaticWeight(integers, scale, bits=bits, input_step=grids.input_step, output_step=grids.output_step)
        return weight.multiply(x) + (weight.multiply_excess(x) if self.scheme.is_shadowed(name) else 0)

    def values(self, tokens, *, is_rounded=False):
        """Return every value of the decoder for a window, [T, N] each, by name."""
        values = {
            "input_ids": np.array(tokens),
            "position": np.zeros(1, np.int64),
            "logit_rows": np.arange(0, len(tokens), LOSS_EVERY),
        }
        for subgraph in self.plan.subgraphs:
            values |= {name: self.load(name) for name in subgraph.weights}
            shapes = {name: resolve(self.plan.tensors[name].shape, {"P": len(tokens)}) for name in subgraph.state}
            values |= {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
            for node in subgraph.nodes:
                arguments = [values[name] for name in node.inputs]
                if node.op == "MatMul" and is_rounded:
                    results = self.multiply(node.inputs[1], arguments[0])
                else:
                    results = run_operator(node, arguments)
                values |= zip(node.outputs, results if isinstance(results, tuple) else (results,), strict=True)
        return values


def relative(pairs):
    """Return the root mean square of the differences, relative to that of the expected values, over all windows
    together.
    """
    found, expected = (np.concatenate([array.ravel() for array in arrays]) for arrays in zip(*pairs, strict=True))
    return np.linalg.norm(np.float64(found) - expected) / np.linalg.norm(np.float64(expected))


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "w8a8", "outputs": "grid", "equalisation": "off"},
        {"scheme": "w8a8", "outputs": "float", "shadow": "*.down_proj.weight,*.0.*.qkv_proj.weight"},
        {"scheme": "w8a16"},
        {"scheme": "w4a16"},
        {"scheme": "w8a8-dynamic"},
        {"scheme": "w4a8-dynamic"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_every_figure_by_hand(options):
    tiny = Tiny(**options)
    run, nodes = tiny.evaluate(), linear_nodes(tiny.plan)
    floats, rounded = ([tiny.values(tokens, is_rounded=r) for tokens in WINDOWS] for r in (False, True))
    assert (run.windows, run.tokens) == (2, 65)
    assert [linear.weight for linear in run.linears] == list(nodes)
    for linear in run.linears:
        name, node = linear.weight, nodes[linear.weight]
        inputs, outputs = ([values[n] for values in floats] for n in (node.inputs[0], node.outputs[0]))
        expected = relative([(tiny.multiply(name, x), y) for x, y in zip(inputs, outputs, strict=True)])
        assert linear.error == pytest.approx(expected, rel=1e-3)
        x = np.abs(np.concatenate(inputs))
        assert linear.input_peak == x.max()
        assert linear.outlier_ratio == pytest.approx(x.max() / np.median(x.max(axis=0)))
        if tiny.scheme.is_static:
            levels = {8: 127, 16: 32639}[linear.activation_bits]
            beyond = (np.rint(x / tiny.grids(name).input_step) > levels).mean()
            assert linear.share_beyond_grid == beyond
        else:
            assert linear.share_beyond_grid is None
        assert linear.weight_bits == tiny.scheme.weight_bits_of(name)
        assert linear.activation_bits == tiny.scheme.activation_bits_of(name)
        assert linear.has_shadow == tiny.scheme.is_shadowed(name) == (linear.error_unshadowed is not None)
    assert [layer.layer for layer in run.layers] == [0, 1]
    for layer in run.layers:
        name = f"model.layers.{layer.layer}.output"
        pairs = [(found[name], expected[name]) for found, expected in zip(rounded, floats, strict=True)]
        # One value that a last bit moves to the next level is a thousandth of the error.
        assert layer.error == pytest.approx(relative(pairs), rel=0.02)


def test_linear_kind_and_layer_follow_from_the_name():
    run = Tiny(scheme="w8a8").evaluate()
    expected = [(kind, layer) for layer in (0, 1) for kind in KINDS]
    assert [(linear.kind, linear.layer) for linear in run.linears] == [*expected, ("lm_head", None)]


def test_without_its_shadow_a_linear_has_the_grid_that_it_would_have_then():
    """The figures equal those of the same linear under the same scheme without shadows."""
    shadowed, plain = Tiny(scheme="w8a8", shadow="all"), Tiny(scheme="w8a8")
    without = {linear.weight: linear.error for linear in plain.evaluate().linears}
    for linear in shadowed.evaluate().linears:
        assert linear.error_unshadowed == (without[linear.weight] if linear.activation_bits == 8 else None)


def test_an_outlier_shows_and_its_shadow_takes_it():
    """One channel of the feed-forward is a thousand times as large; the calibration does not cover it."""
    seen = {}
    for shadow in ("none", "*.down_proj.weight"):
        tiny = Tiny(scheme="w8a8", shadow=shadow, equalisation="off")
        load = tiny.load

        def scaled(name, load=load):
            weight = load(name)
            if name == DOWN.replace("down", "gate_up"):
                weight = weight.copy()
                weight[:, 64 + 5] *= 1000  # up's channel 5
            return weight

        tiny.load = scaled
        seen[shadow] = next(linear for linear in tiny.evaluate().linears if linear.weight == DOWN)
    bare, beside = seen["none"], seen["*.down_proj.weight"]
    assert bare.outlier_ratio == beside.outlier_ratio > 100
    assert bare.share_beyond_grid > 0
    assert bare.error > 0.5 > 0.05 > beside.error
    assert beside.error_unshadowed == bare.error


def test_a_scheme_that_rounds_nothing_is_refused():
    with pytest.raises(ConfigError, match="the scheme 'float' quantises nothing, so layers have no errors"):
        Tiny(scheme="float").evaluate()


def test_progress_is_reported_by_subgraph():
    told, tiny = [], Tiny(scheme="w8a16")
    tiny.evaluate(progress=lambda done, total: told.append((done, total)))
    number = len(tiny.plan.subgraphs)
    assert told == [(done, number) for done in range(number + 1)]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(STORY, "utf-8")
    return path


def test_json_has_it_all_and_the_table_the_worst(command, text):
    arguments = (
        "eval",
        GGUF,
        "--text",
        text,
        "--npu",
        "reference",
        "--scheme",
        "w8a8",
        "--shadow",
        "*.down_proj.weight",
    )
    arguments += ("--window", 32, "--windows", 9, "--base", "none", "--per-layer")
    finished = command(*arguments, "--json")
    assert (finished.status, finished.err) == (0, "")
    found = json.loads(finished.out)["layers"]
    assert found["windows"] == NUM_LAYER_WINDOWS
    assert found["tokens"] == NUM_LAYER_WINDOWS * 32
    assert len(found["linears"]) == 9
    assert [linear["has_shadow"] for linear in found["linears"]] == [False, False, False, True] * 2 + [False]
    lines = command(*arguments).out.splitlines()
    title = f"by layer, {NUM_LAYER_WINDOWS} windows, {found['tokens']} tokens; errors are relative, root mean square"
    start = lines.index(title)
    worst = sorted(found["linears"], key=lambda linear: -linear["error"])
    rows = [line.split()[0] for line in lines[start + 2 : start + 2 + len(worst)]]
    assert rows == [linear["weight"].removesuffix(".weight") for linear in worst]
    assert f"{100 * worst[0]['error']:.3g} %" in lines[start + 2]
    cells = [f"{layer['layer']}: {100 * layer['error']:.3g} %" for layer in found["layers"]]
    assert lines[-1].split() == " ".join(cells).split()


def test_long_table_reports_omitted_linears():
    run = Tiny(scheme="w8a8").evaluate()
    many = type(run)(windows=1, tokens=8, layers=run.layers, linears=[*run.linears] * 3)
    assert f"  ... and {27 - NUM_SHOWN} more; --json has all" in list(many.lines())


def test_evaluation_as_an_npu_has_outputs_on_grids(command, text):
    def figures(*options):
        finished = command("eval", GGUF, "--text", text, "--window", 32, "--npu", "reference", "--json", *options)
        assert (finished.status, finished.err) == (0, "")
        found = json.loads(finished.out)
        measured = found["text"]["figures"]
        return found["run"]["scheme"], measured["perplexity"], measured["comparison"]

    w8a8 = ("--scheme", "w8a8")
    assert figures("--as-npu", *w8a8) == figures("--outputs", "grid", *w8a8) != figures(*w8a8)
    assert figures("--as-npu") == figures("--scheme", "w8a16")


def test_report_has_no_layers_without_per_layer(command, text):
    finished = command("eval", GGUF, "--text", text, "--npu", "reference", "--window", 32, "--base", "none", "--json")
    assert json.loads(finished.out)["layers"] is None


@pytest.mark.parametrize(
    ("ending", "head"),
    [("png", b"\x89PNG\r\n"), pytest.param("svg", b"<?xml", marks=pytest.mark.slow), ("SVG", b"<?xml")],
)
def test_the_picture_is_drawn(command, text, tmp_path, ending, head):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    path = tmp_path / f"layers.{ending}"
    options = ("--scheme", "w8a8", "--shadow", "all", "--base", "none", "--per-layer", "--plot", path)
    finished = command("eval", GGUF, "--text", text, "--npu", "reference", "--window", 32, *options)
    assert (finished.status, finished.err) == (0, "")
    assert path.read_bytes().startswith(head)
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".txt"] == [path.name]


def test_picture_has_labels_and_legend(tmp_path, monkeypatch):
    """Texts of the picture, which SVG keeps as text when configured so."""
    matplotlib = pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    run = Tiny(scheme="w8a8", shadow="*.down_proj.weight").evaluate()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_layers(run, tmp_path / "a.svg", "tiny & small")
    drawn = (tmp_path / "a.svg").read_text("utf-8")
    for word in (*KINDS, "lm_head", "head", "tiny &amp; small", "8-bit input", "16-bit input", "has a shadow"):
        assert f">{word}<" in drawn
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_layers(Tiny(scheme="w8a16").evaluate(), tmp_path / "b.svg", "all in 16 bits")
    drawn = (tmp_path / "b.svg").read_text("utf-8")
    assert ">16-bit input<" in drawn
    assert ">8-bit input<" not in drawn
    assert ">has a shadow<" not in drawn


def test_wrong_options_are_refused_before_the_evaluation(command, text, tmp_path, monkeypatch):
    monkeypatch.setattr("chunkrt.cli.eval.open_engine", lambda *_: pytest.fail("a model was loaded"))
    (tmp_path / "folder.png").mkdir()
    cases = [
        (["--lambada", text, "--per-layer"], "--per-layer needs a text; give --text FILE"),
        (
            ["--text", text, "--as-npu", "--scheme", "w8a8-dynamic"],
            "--as-npu needs a scheme that NPUs run (w8a16, w8a8,",
        ),
        (["--text", text, "--as-npu", "--scheme", "w8a8", "--outputs", "float"], "--outputs is float; omit one of"),
        (["--text", text, "--plot", "a.png"], "--plot draws the errors of --per-layer; give that option, too"),
        (["--text", text, "--per-layer", "--plot", "a.jpg"], "its name must end with one of .png, .svg"),
        (
            ["--text", text, "--per-layer", "--plot", tmp_path / "folder.png"],
            "folder.png: it is not a file; name a file",
        ),
    ]
    for arguments, message in cases:
        expect_one_line(command("eval", GGUF, *arguments), message, 1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    finished = command("eval", GGUF, "--text", text, "--per-layer", "--plot", "a.png")
    assert finished.err == 'chunkrt: --plot needs matplotlib, which is not installed; run pip install "chunkrt[plot]"\n'


def test_an_engine_directory_is_refused(command, text, tmp_path):
    assert command("compile", GGUF, "-o", tmp_path / "engine").status == 0
    expect_one_line(
        command("eval", tmp_path / "engine", "--text", text, "--per-layer", "--base", "none"),
        "is compiled and holds no float weights for --per-layer; give the checkpoint",
        1,
    )


def test_a_picture_that_cannot_be_written_prints_one_line(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot draw .*a\.png: "):
        draw_layers(Tiny(scheme="w8a16").evaluate(), tmp_path / "file" / "a.png", "nowhere")
