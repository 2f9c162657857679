"""Mistakes in a plug-in's decoder family: each is reported with the plug-in, the module and the operator."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
from fixture_checkpoints import NAMES, checkpoint
from installed import entry

from chunkrt import plugins
from chunkrt.backends.dispatch import registered_operators
from chunkrt.backends.onnx.onnxrt import OnnxRuntimeBackend
from chunkrt.compile.calibrate import run_operator
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.compile.support_report import check_support
from chunkrt.errors import BackendError, ConfigError, ModelError, UnsupportedModelError
from chunkrt.graph import decoders, ops
from chunkrt.graph.decoders.llama import llama
from chunkrt.graph.modules import Constant, Module, Parameter, RMSNorm
from chunkrt.graph.operators import Operator, register_operator, require
from chunkrt.graph.ops import current_trace
from chunkrt.graph.partition import plan_decoder
from chunkrt.graph.plan import Node
from chunkrt.graph.rope import rotary_tables
from chunkrt.plugins import PluginGroup

FAMILY = "llama_gqa"
PLUGIN = r"the plug-in 'mine' of mine 1\.0 \(toy\) "


@pytest.fixture
def plugged(monkeypatch, tmp_path):
    """Return a function that installs a builder as the family "mine" and returns a checkpoint of that family."""

    def plug(build, fixture=FAMILY):
        found = [entry("mine", "plugin_of_this_test:build", "mine")]
        monkeypatch.setattr(plugins, "entry_points", lambda group: found if group == "toy" else [])
        monkeypatch.setitem(sys.modules, "plugin_of_this_test", SimpleNamespace(build=build))
        monkeypatch.setattr(decoders, "PLUGINS", PluginGroup("toy", error=UnsupportedModelError))
        folder = tmp_path / "checkpoint"
        shutil.copytree(checkpoint(fixture), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "mine"}))
        return folder

    return plug


def changed_layer(forward):
    """Return a builder of Llama whose first layer has another forward."""

    def build(config):
        decoder = llama(config)
        layer = decoder.model.layers[0]
        layer.forward = lambda hidden: forward(layer, hidden)
        return decoder

    return build


def without_feed_forward(layer, hidden):
    return ops.add(hidden, layer.self_attn(layer.input_layernorm(hidden)), name="output")


def test_plan_refuses_a_module_that_is_never_called(plugged):
    folder = plugged(changed_layer(without_feed_forward))
    message = (
        PLUGIN + r"builds module 'model\.layers\.0\.post_attention_layernorm', but no operator reads its parameter "
        r"'weight' \(and 2 more\); call the module in a forward, or do not build it"
    )
    with pytest.raises(ModelError, match=message):
        plan_checkpoint(folder, {})


def test_plan_refuses_a_constant_that_is_never_used(plugged):
    def build(config):
        decoder = llama(config)
        decoder.model.cap = Constant(np.ones(8, np.float32))
        return decoder

    with pytest.raises(ModelError, match=PLUGIN + r"builds module 'model\.cap', but no operator reads"):
        plan_checkpoint(plugged(build), {})


def test_support_reports_a_module_that_is_never_called(plugged):
    """The checkpoint has two layers of nine tensors, an embedding, a norm and a head; one layer loses four."""
    report = check_support(plugged(changed_layer(without_feed_forward)), backends=[])
    tensors = report.tensors
    assert tensors.num_needed == tensors.num_found - 4
    layer = "model.layers.0"
    assert list(tensors.unused) == [
        f"{layer}.{name}.weight" for name in ("post_attention_layernorm", "mlp.gate_up_proj", "mlp.down_proj")
    ]
    unread = ("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm")
    assert sorted(tensors.unread) == [f"{layer}.{name}.weight" for name in unread]
    assert any("plug-in 'mine'" in gap and "model.layers.0.mlp" in gap for gap in report.gaps)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", NAMES)
def test_own_families_use_all_modules_that_they_build(name):
    assert check_support(checkpoint(name), backends=[]).tensors.unused == []


@pytest.mark.parametrize("kinds", [["sliding_attention"], ["full_attention"]])
def test_plan_accepts_rotary_tables_without_layers_of_their_kind(tmp_path, kinds):
    """A Gemma 3 with layers of only one kind still has tables for the other kind."""
    folder = tmp_path / "gemma"
    shutil.copytree(checkpoint("gemma3_window_5"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = kinds * config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    assert check_support(folder, backends=[]).tensors.unused == []
    assert plan_checkpoint(folder, {}).plan.family == "gemma3_text"


def narrow(layer, hidden):
    """Apply a norm to gate and up, whose width differs from the norm's weight."""
    both = layer.mlp.gate_up_proj(hidden)
    return ops.rms_normalization(both, layer.input_layernorm.weight.value(), epsilon=1e-5, name="output")


def uneven(layer, hidden):
    return ops.split_columns(hidden, names=["a", "b", "c", "d", "e"])[0]


def unknown(layer, hidden):
    return {}["hidden"]


def namesake(layer, hidden):
    """Multiply by a weight; a scheme would quantise it like a linear of chunkrt."""
    weight = layer.mlp.down_proj.weight.value()
    trace = current_trace()
    return trace.node("MatMul", [hidden, weight], [("output", ops.shape_of(hidden))], attributes={}, domain="mine")[0]


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (narrow, r"operator RMSNormalization 'output': it cannot normalise \['T', \d+\] with \[\d+\]"),
        (uneven, r"operator Split 'a': it cannot split \d+ columns in 5 along axis -1"),
        (unknown, r"KeyError: 'hidden'"),
        (namesake, r"operator MatMul 'output': chunkrt has its own MatMul; rename that of mine"),
    ],
)
@pytest.mark.parametrize(
    "look", [lambda path: plan_checkpoint(path, {}), lambda path: check_support(path, backends=[])]
)
def test_error_in_a_forward_names_its_module(plugged, forward, message, look):
    expected = PLUGIN + rf"cannot be traced: module 'model\.layers\.0', {message}; correct its forward, or the config"
    with pytest.raises(ModelError, match=expected) as raised:
        look(plugged(changed_layer(forward)))
    assert "damaged" not in str(raised.value)


def test_error_in_a_shape_names_the_innermost_module(plugged):
    """The error names a linear whose input rows are too wide."""

    def forward(layer, hidden):
        return layer.mlp.down_proj(hidden)

    with pytest.raises(ModelError, match=r"module 'model\.layers\.0\.mlp\.down_proj', operator MatMul"):
        plan_checkpoint(plugged(changed_layer(forward)), {})


def test_error_about_two_windows_names_the_plugin(plugged):
    def build(config):
        decoder = llama(config)
        for layer, window in zip(decoder.model.layers, (3, 5), strict=False):
            layer.self_attn.window = window
        return decoder

    with pytest.raises(
        ModelError, match=PLUGIN + r"makes an invalid plan: its layers have windows of \{3, 5\}; one window"
    ):
        plan_checkpoint(plugged(build), {})


class Scaled(Module):
    """Module that multiplies hidden by a vector, which `combine` computes from the checkpoint's vector."""

    def __init__(self, width, combine):
        super().__init__()
        self.width, self.combine = width, combine

    def declare(self):
        tensors = {"model.norm.weight": (self.width,)}
        self.weight = Parameter(shape=(self.width,), checkpoint_tensors=tensors, combine=self.combine)

    def forward(self, hidden: ir.Value) -> ir.Value:
        return ops.mul(hidden, self.weight.value(), name="output")


@pytest.mark.parametrize(
    ("combine", "message"),
    [
        (lambda norm: norm[:5], r"it returns \[5\], expected \[\d+\]"),
        (lambda norm: norm.reshape(3, -1, 7), "cannot reshape array"),
        (lambda norm: norm["a"], "IndexError: "),
    ],
)
def test_error_in_a_parameter_names_it(plugged, combine, message):
    def build(config):
        decoder = llama(config)
        decoder.model.norm = Scaled(config.hidden_size, combine)
        return decoder

    planned = plan_checkpoint(plugged(build), {})
    name = r"parameter model\.norm\.weight cannot be made from model\.norm\.weight: "
    with pytest.raises(ModelError, match=f"{name}{message}.*; the decoder is built by {PLUGIN.strip()}"):
        planned.load("model.norm.weight")


def test_error_in_an_own_decoder_names_its_family():
    source = plan_checkpoint(checkpoint(FAMILY), {}).source
    decoder, _ = decoders.make_decoder(source)
    decoder.model.layers[0].spare = Constant(np.ones(3, np.float32)).named("model.layers.0.spare")
    with pytest.raises(ModelError, match=r"the family 'llama' builds module 'model\.layers\.0\.spare'"):
        plan_decoder(source, decoder, {})


def passes_a_parameter(layer, hidden):
    return ops.mul(hidden, layer.input_layernorm.weight, name="output")


def calls_a_stray_module(layer, hidden):
    return RMSNorm(8, 1e-5)(hidden)


def reads_stray_tables(layer, hidden):
    return ops.mul(hidden, rotary_tables({"rope_theta": 1e4}, 8, 16, may_be_partial=False).cos.value())


def updates_a_state_by_another_operator(layer, hidden):
    trace = current_trace()
    state = trace.state("memory", (8,))
    trace.update_state(state, ops.add(hidden, hidden))
    return hidden


def applies_without_a_row(layer, hidden):
    return ops.apply("mine", "Unknown", [hidden])


def applies_too_few_inputs(layer, hidden):
    return ops.apply("mine", "Pair", [hidden])


def applies_a_wrong_shape(layer, hidden):
    return ops.apply("mine", "Pair", [hidden, layer.mlp.gate_up_proj(hidden)])


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (passes_a_parameter, r"operator Mul 'output': an operand is a Parameter, expected .*; pass its value\(\)"),
        (calls_a_stray_module, "a RMSNorm is called that is not in the module tree; assign it, or a list of modules"),
        (reads_stray_tables, "AttributeError: 'RotaryTables' object has no attribute 'cos': it is not in the module"),
        (updates_a_state_by_another_operator, r"'model\.layers\.0\.add' cannot update the state"),
        (applies_without_a_row, "the operator mine::Unknown has no row; call register_operator first"),
        (applies_too_few_inputs, "operator Pair 'output': its output fails with IndexError"),
        (applies_a_wrong_shape, r"operator Pair 'output': it cannot pair \d+ with \d+ columns"),
    ],
)
def test_mistake_in_a_forward_names_module_and_package(plugged, pair, forward, message):
    expected = PLUGIN + rf"cannot be traced: module 'model\.layers\.0', {message}"
    with pytest.raises(ModelError, match=expected) as raised:
        plan_checkpoint(plugged(changed_layer(forward)), {})
    assert "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def pair():
    """Register an operator of two values with the same number of columns."""

    def output(attributes, shapes):
        require(shapes[0][1] == shapes[1][1], f"it cannot pair {shapes[0][1]} with {shapes[1][1]} columns")
        return shapes[0]

    register_operator("mine", "Pair", Operator(num_inputs=2, output=output))


@pytest.mark.parametrize("domain", ["", "chunkrt", "chunkrt.mine"])
def test_operator_of_a_plugin_has_its_own_domain_and_name(pair, domain):
    row = Operator(num_inputs=1, output=lambda attributes, shapes: shapes[0])
    with pytest.raises(ConfigError, match="is not free; register Pair in a domain of your own"):
        register_operator(domain, "Pair", row)
    with pytest.raises(ConfigError, match="mine::Pair is already registered"):
        register_operator("mine", "Pair", row)
    with pytest.raises(ConfigError, match="chunkrt has its own MatMul; rename that of mine"):
        register_operator("mine", "MatMul", row)


def with_module(make):
    """Return a builder of Llama whose final norm is another module."""

    def build(config):
        decoder = llama(config)
        decoder.model.norm = make(config)
        return decoder

    return build


class Undeclared(Module):
    def declare(self):
        self.weight = Parameter(shape=(self.width,), checkpoint_tensors={}, combine=None)


def lacking(config):
    """Return a norm that reads a tensor that no checkpoint has."""
    scaled = Scaled(config.hidden_size, lambda norm: norm)
    scaled.declare = lambda: setattr(
        scaled,
        "weight",
        Parameter(shape=(8,), checkpoint_tensors={f"{scaled.path}.gate": (8,)}, combine=lambda gate: gate),
    )
    return scaled


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda config: Undeclared(),
            r"module 'model\.norm' \(Undeclared\) cannot declare its parameters: AttributeError",
        ),
        (lacking, r"tensor model\.norm\.gate is missing, needed by model\.norm\.weight"),
        (
            lambda config: Scaled(5, None),
            r"tensor model\.norm\.weight is \[\d+\], expected \[5\] by model\.norm\.weight",
        ),
    ],
)
def test_mistake_in_a_declaration_names_module_and_package(plugged, make, message):
    with pytest.raises(ModelError, match=f"{message}.*; the decoder is built by {PLUGIN.strip()}") as raised:
        plan_checkpoint(plugged(with_module(make)), {})
    assert "\n" not in str(raised.value)


def test_decoder_without_logits_names_the_package(plugged):
    def build(config):
        decoder = llama(config)
        decoder.forward = lambda token_ids, logit_rows: None
        return decoder

    with pytest.raises(ModelError, match=PLUGIN + "cannot be traced: its forward returns None, expected the logits"):
        plan_checkpoint(plugged(build), {})


SHIFT = """Shift (x) => (y)
{
    y = Identity (x)
}"""


@pytest.mark.parametrize(
    ("name", "expansion", "message"),
    [
        ("Other", SHIFT, "the expansion of mine::Other is no ONNX function of that name: it defines 'Shift'"),
        ("Shift", SHIFT.replace("Identity", "Identify"), "mine::Shift .*: ONNX has no operator 'Identify'"),
        ("Torn", SHIFT.replace("Shift (", "Torn "), r"mine::Torn .*: \[ParseError at position"),
    ],
)
def test_faulty_expansion_is_reported_before_a_run(plugged, name, expansion, message):
    register_operator("mine", name, Operator(num_inputs=1, output=lambda a, shapes: shapes[0], expansion=expansion))

    def forward(layer, hidden):
        return ops.apply("mine", name, [type(layer).forward(layer, hidden)], name="shifted")

    folder = plugged(changed_layer(forward))
    report = check_support(folder, backends=[OnnxRuntimeBackend()])
    for stage in ("onnxrt", "export"):
        assert re.search(message, report.stages[stage])


def test_function_with_a_wrong_result_is_named_where_nodes_run_alone():
    """Calibration, comparisons and statistics by layer run nodes one by one."""
    register_operator("mine", "Short", Operator(num_inputs=1, output=lambda attributes, shapes: shapes[0]))
    with registered_operators().from_distribution("acme-ops"):
        registered_operators().register("mine_short", "mine")(lambda x: x[1:])
    node = Node(name="model.short", op="Short", domain="mine", inputs=("x",), outputs=("y",), attributes={})
    message = (
        r"node 'model\.short': mine::Short by .* of acme-ops failed: ValueError: it returned the shape \[2, 4\], "
        r"expected \[3, 4\]"
    )
    with pytest.raises(BackendError, match=message):
        run_operator(node, [np.ones((3, 4), np.float32)])
