"""Canonical names of operators, and the registry of implementations."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fixture_checkpoints import NAMES, checkpoint

from chunkrt.backends.dispatch import registered_operators
from chunkrt.backends.onnx.functions import has_expansion
from chunkrt.backends.onnx.lowering import FUNCTIONS, STANDARD
from chunkrt.backends.registry import OperatorRegistry
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Node, Plan, Subgraph, Tensor
from chunkrt.graph.uses import canonical_name, use_of, uses

OPS = {
    "add": {"Add"},
    "add_positions": {"AddPositions"},
    "cached_attention": {"CachedAttention", "RawKeyAttention"},
    "concat": {"Concat"},
    "embedding": {"Gather"},
    "float_linear": {"FloatLinear"},
    "gelu": {"Gelu"},
    "gather_rows": {"Gather"},
    "gelu_mul": {"GeluMul"},
    "head_norm": {"HeadNorm"},
    "layer_norm": {"LayerNormalization"},
    "linear": {"MatMul"},
    "linear_attention": {"LinearAttention"},
    "logits": {"MatMul"},
    "mul": {"Mul"},
    "quick_gelu": {"QuickGelu"},
    "relu": {"Relu"},
    "rms_norm": {"RMSNormalization"},
    "routed_experts": {"RoutedExperts"},
    "selective_scan": {"SelectiveScan"},
    "sigmoid": {"Sigmoid"},
    "silu_mul": {"SiluMul"},
    "softplus": {"Softplus"},
    "split": {"Split"},
    "tanh": {"Tanh"},
    "thresholded_relu": {"ThresholdedRelu"},
    "xielu": {"Xielu"},
}
"""ONNX operators of each name's uses; both products of a gate stand for several nodes."""


@pytest.mark.parametrize("name", NAMES)
def test_each_node_of_a_decoder_is_in_one_use_of_a_known_operator(name):
    plan = plan_checkpoint(checkpoint(name), {}).plan
    for whole in (plan, plan.with_raw_keys()):
        for subgraph in whole.subgraphs:
            found = uses(subgraph, whole)
            assert sorted(n.name for use in found for n in use.nodes) == sorted(n.name for n in subgraph.nodes)
            known = {*subgraph.inputs, *subgraph.weights, *subgraph.all_state, ""}
            for use in found:  # its inputs exist when it runs
                assert use.node.op in OPS[use.operator] | {"CachedAttention"}
                assert known.issuperset(use.node.inputs)
                known.update(use.node.outputs)
    everywhere = [use.operator for subgraph in plan.subgraphs for use in uses(subgraph, plan)]
    num_tables = 2 if name in ("gemma4", "gemma4_gguf") else 1  # with per-layer embeddings
    assert [everywhere.count(use) for use in ("embedding", "gather_rows", "logits")] == [num_tables, 1, 1]


def test_raw_key_attention_is_marked_by_an_attribute():
    node = Node(name="a", op="RawKeyAttention", domain="chunkrt", inputs=(), outputs=(), attributes={"window": 0})
    use = use_of(node)
    assert (use.operator, use.node.op, use.nodes) == ("cached_attention", "CachedAttention", (node,))
    assert use.node.attributes == {"window": 0, "has_raw_keys": 1}


@pytest.mark.parametrize(
    ("domain", "op", "name"),
    [
        ("", "RMSNormalization", "rms_norm"),
        ("", "LayerNormalization", "layer_norm"),
        ("", "GroupNormalization", "group_normalization"),
        ("chunkrt", "AllReduce", "all_reduce"),
        ("chunkrt", "HeadNorm", "head_norm"),
        ("chunkrt.native", "Linear", "linear"),
        ("acme", "MatMul", "acme_mat_mul"),
        ("acme.layers", "FastMixer2", "acme_layers_fast_mixer2"),
    ],
)
def test_names(domain, op, name):
    assert canonical_name(domain, op) == name


def tensor(name, kind="value"):
    return Tensor(name=name, dtype="float32", shape=(8, 8) if kind == "weight" else ("T", 8), kind=kind)


def gated(*, outputs):
    """Build x -> Split -> Sigmoid, Mul, Mul -> y -> MatMul by a computed value and by a weight."""
    steps = [
        ("Split", ("x",), ("gate", "up")),
        ("Sigmoid", ("gate",), ("sig",)),
        ("Tanh", ("x",), ("other",)),
        ("Mul", ("gate", "sig"), ("silu",)),
        ("Mul", ("silu", "up"), ("y",)),
        ("MatMul", ("y", "other"), ("z",)),
        ("MatMul", ("z", "w"), ("hidden",)),
    ]
    nodes = tuple(
        Node(name=made[0], op=op, domain="", inputs=read, outputs=made, attributes={}) for op, read, made in steps
    )
    subgraph = Subgraph(
        name="static.0",
        device="npu",
        is_static=True,
        rows="T",
        nodes=nodes,
        inputs=("x",),
        outputs=outputs,
        weights=("w",),
        state=(),
    )
    names = {name for node in nodes for name in (*node.inputs, *node.outputs)}
    plan = Plan(
        family="toy",
        subgraphs=(subgraph,),
        tensors={name: tensor(name, "weight" if name == "w" else "value") for name in names},
        inputs=("x",),
        output="logits",
        vocab_size=8,
        context_length=8,
    )
    return subgraph, plan


def test_gate_is_one_operator_in_the_place_of_its_last_node():
    found = uses(*gated(outputs=("hidden",)))
    assert [use.operator for use in found] == ["tanh", "silu_mul", "matmul", "linear"]
    silu = found[1]
    assert [node.name for node in silu.nodes] == ["gate", "sig", "silu", "y"]
    assert (silu.node.inputs, silu.node.outputs) == (("x",), ("y",))


@pytest.mark.parametrize("inner", ["gate", "up", "sig", "silu"])
def test_gate_with_a_needed_inner_result_is_not_fused(inner):
    found = [use.operator for use in uses(*gated(outputs=("hidden", inner)))]
    assert found == ["split", "sigmoid", "tanh", "mul", "mul", "matmul", "linear"]


def make(registry, operator="add", name="reference", **options):
    def function(*inputs):
        return inputs

    function.__module__ = options.pop("module", "chunkrt.toy")
    registry.register(operator, name, **options)(function)
    return function


def test_form_is_registered_once():
    registry = OperatorRegistry()
    function = make(registry)
    assert registry.find("add", "reference").function is function
    assert registry.find("add", "native") is None
    with pytest.raises(
        ConfigError,
        match=r"registers the form 'reference' of 'add', which chunkrt.toy already has; choose another name",
    ):
        make(registry, module="acme.ops")
    make(registry, name="fast", module="acme.ops")
    for module, hint in (("acme.ops", "register it once"), ("other.ops", "uninstall one of them")):
        with pytest.raises(ConfigError, match=f"which acme.ops already has; {hint}"):
            make(registry, name="fast", module=module)
    assert registry.find("add", "reference").function is function


def test_forms_of_plugins_are_listed_in_the_order_of_registration():
    registry = OperatorRegistry()
    make(registry)
    with registry.from_distribution("acme-ops"):
        functions = [make(registry, name=name, module="acme.ops") for name in ("fast", "exact")]
    assert [form.function for form in registry.plugin_forms("add")] == functions
    assert [form.origin for form in registry.plugin_forms("add")] == ["acme-ops (acme.ops)"] * 2
    assert not registry.find_own("add", "fast")


def test_operator_of_a_plugin_may_have_a_reference():
    registry = OperatorRegistry()
    function = make(registry, "acme_mixer", module="acme.ops")
    assert registry.find("acme_mixer", "reference").function is function
    assert registry.plugin_forms("acme_mixer") == []


class Uncallable:
    """A class that forgets `__call__`."""


@pytest.mark.parametrize(
    ("operator", "name", "options", "message"),
    [
        ("add", "native", {}, r"acme.ops registers the form 'native' of 'add', a name that is reserved .* backends="),
        ("add", "qnn", {}, "'qnn' of 'add', a name that is reserved"),
        ("add", "a/b", {}, "'a/b' of 'add', a name that is reserved or malformed"),
        ("add", "toy", {"backends": "native"}, r"with backends='native', expected names such as \('native',\)"),
        ("add", "toy", {"backends": ("nativ",)}, "for unknown backend 'nativ'; did you mean 'native'"),
        ("add", "toy", {"refuses": "no"}, "with refuses='no', expected a function of a node"),
        ("add", "toy", {"is_required": "yes"}, "with is_required='yes', expected a function of a node"),
        ("add", "toy", {"parts": ("rap",)}, "with the part 'rap'; known parts: quantize, rope"),
        ("rope", "toy", {"parts": ("rope",)}, "with the part 'rope'; 'rope' takes no parts"),
    ],
)
def test_registration_that_would_never_be_called_is_refused(operator, name, options, message):
    registry = OperatorRegistry()
    with pytest.raises(ConfigError, match=message):
        make(registry, operator, name, module="acme.ops", **options)
    for found in (3, Uncallable):
        with pytest.raises(
            ConfigError, match=r"of 'add' as .*, expected a function, or a class with a method __call__"
        ):
            registry.register("add", "toy")(found)
    assert registry.names() == []


def test_failed_plugin_leaves_no_registrations():
    registry = OperatorRegistry()
    make(registry)

    def install():
        with registry.from_distribution("acme-ops"):
            make(registry, "mul", "torch")
            make(registry)

    with pytest.raises(ConfigError, match="already has"):
        install()
    assert registry.names() == ["add"]
    assert make(registry, "mul", "torch").__module__ == "chunkrt.toy"
    assert not registry.find("mul", "torch").is_plugin


def test_every_native_and_npu_form_has_a_reference():
    registry = registered_operators()
    for device in ("native", "npu"):
        own = [name for name in registry.names() if registry.find_own(name, device)]
        assert len(own) > 15
        assert all(registry.find_own(name, "reference") for name in own)


FRESH = """
from chunkrt.backends.dispatch import registered_operators
found = registered_operators()
of_link = ("all_gather", "all_reduce")
assert all(found.find_own(name, "reference") for name in found.names() if name not in of_link), found.names()
"""


def test_registry_is_complete_regardless_of_imports():
    finished = subprocess.run([sys.executable, "-P", "-c", FRESH], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_lowerings_are_standard_or_functions():
    """A function's name in ONNX is the canonical one in CamelCase."""
    as_op = {name: "".join(word.capitalize() for word in name.split("_")) for name in (*STANDARD, *FUNCTIONS)}
    kinds = {"linear_attention": "short_conv"}
    assert all(has_expansion("chunkrt", as_op[name], kinds.get(name, "")) for name in FUNCTIONS)
    assert not any(has_expansion("chunkrt", as_op[name]) for name in STANDARD)


def test_page_on_operators_lists_all_names():
    page = (Path(__file__).parents[2] / "docs" / "operators.md").read_text(encoding="utf-8")
    table = page.partition("\n## Names\n")[2].partition("\n## ")[0]
    listed = {name for row in table.splitlines() for name in re.findall("`(.*?)`", row.partition(" | ")[0])}
    registry = registered_operators()
    forms = ("reference", "native", "npu", "link")
    assert {name for name in registry.names() if any(registry.find_own(name, form) for form in forms)} <= listed
