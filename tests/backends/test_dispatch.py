"""Dispatch: the runner of each operator under switches and plug-ins, and the results of subgraphs in sections."""

import logging
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from fixture_checkpoints import checkpoint, expected_logits, input_ids

import chunkrt
from chunkrt.backends import make_backend
from chunkrt.backends.dispatch import Dispatcher, registered_operators
from chunkrt.backends.function_executable import FunctionExecutable
from chunkrt.backends.native.backend import NativeExecutable
from chunkrt.backends.reference import cached_attention, rotate_half
from chunkrt.backends.sections import SectionedExecutable
from chunkrt.backends.switches import Switches
from chunkrt.engine.sampling import Sampler
from chunkrt.errors import BackendError, CompileError, ConfigError, PartitionError
from chunkrt.graph.operators import Operator, register_operator
from chunkrt.graph.uses import uses
from chunkrt.quant.arithmetic import BlockWeight, DynamicWeight, StaticWeight, quantize_rows
from chunkrt.quant.scheme import SCHEMES
from chunkrt.testing.random_decoders import HYBRID_CONFIG, hybrid, random_decoder

DYNAMIC, FLOAT = SCHEMES["w8a8-dynamic"], SCHEMES["float"]
FAMILIES = {"llama": "llama_gqa", "gemma3": "gemma3_window_5", "lfm2": "lfm2", "qwen3_next": "qwen3_next_experts"}
PARTS = {"cached_attention": "rope", "linear": "quantize", "logits": "quantize", "routed_experts": "quantize"}
BACKENDS = ("native", "reference", "onnxrt", "qnn")


@pytest.fixture(scope="module")
def decoder():
    """A decoder with every kind of layer."""
    return random_decoder([DYNAMIC, FLOAT], HYBRID_CONFIG, hybrid)


@pytest.fixture
def registry():
    return registered_operators().copy()


def add_plugin(registry, operator, name, function, *, package="acme-ops", **options):
    """Register a form of a package."""
    with registry.from_distribution(package):
        registry.register(operator, name, **options)(function)


def dispatcher(decoder, registry, ops=None, *, scheme=DYNAMIC, **options):
    return Dispatcher(decoder.plan, scheme, registry, Switches.parse(ops), **options)


def all_choices(decoder, found, backend):
    return [choice for subgraph in decoder.plan.subgraphs for _, choice in found.runners(subgraph, backend)]


def expected_place(operator, backend, ops, plugged):
    """Return where an operator with these switches and plug-ins should run; an independent copy of the rule."""
    is_off = ops == "none" or ops == f"-{operator}"
    if is_off:
        return "reference"
    return "toy" if plugged in ("all", backend) else backend


@pytest.mark.sampled(every=11)
@pytest.mark.parametrize("plugged", [None, "all", "native", "reference", "onnxrt"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dispatch_of_all_operators_devices_switches_and_plugins(decoder, backend, plugged):
    operators = {use.operator for subgraph in decoder.plan.subgraphs for use in uses(subgraph, decoder.plan)}
    assert len(operators) > 12
    for operator, switch in product(sorted(operators), (None, "all", "none", "-{}", "none,+{}", "none,-{}")):
        registry = registered_operators().copy()
        if plugged:
            backends = () if plugged == "all" else (plugged,)
            add_plugin(registry, operator, "toy", lambda *inputs: inputs[0], backends=backends)
        ops = switch and switch.format(operator)
        simple = "none" if ops and ops.startswith("none,-") else "all" if ops and ops.startswith("none,+") else ops
        found = all_choices(decoder, dispatcher(decoder, registry, ops), backend)
        mine = [choice for choice in found if choice.operator == operator]
        places = {choice.name for choice in mine}
        assert places == {expected_place(operator, backend, simple, plugged)}, (operator, ops)
        is_called = places != {backend}
        assert all((choice.form is not None) == is_called for choice in mine)
        assert all(choice.reason and choice.origin for choice in mine)
        others = {choice.name for choice in found if choice.operator != operator}
        assert others == {"reference" if ops and ops.startswith("none") else backend}, (operator, ops)


@pytest.mark.parametrize("backend", ["native", "reference", "onnxrt"])
@pytest.mark.parametrize("operator", PARTS)
def test_parts_are_fused_called_or_replaced(decoder, backend, operator):
    part, own = PARTS[operator], {"rope": rotate_half, "quantize": quantize_rows}[PARTS[operator]]

    def theirs(*inputs):
        return own(*inputs)

    def choice(ops, *, is_plugged):
        registry = registered_operators().copy()
        if is_plugged:
            add_plugin(registry, part, "toy", theirs)
        found = all_choices(decoder, dispatcher(decoder, registry, ops), backend)
        return next(choice for choice in found if choice.operator == operator)

    assert choice("all", is_plugged=False).name == backend
    assert choice(f"none,+{operator}", is_plugged=False).name == backend  # a part follows its operator
    for ops, is_plugged, called in [
        (f"-{part}", False, own),
        (f"-{part}", True, own),
        ("all", True, theirs),
        (f"none,+{operator}", True, theirs),
        (f"none,+{part}", True, theirs),
        (f"-{operator},+{part}", True, theirs),
        ("none", True, own),
    ]:
        found = choice(ops, is_plugged=is_plugged)
        assert found.name == "reference", ops
        if found.form is None:
            assert (backend, called) == ("reference", own), ops
        else:
            assert found.parts[part].form.function is called, ops
            assert found.parts[part].is_plugin == (called is theirs)


def test_runner_reports_reason(decoder, registry):
    add_plugin(registry, "rope", "toy", rotate_half)
    add_plugin(registry, "rms_norm", "toy", lambda *inputs: inputs[0])
    found = dispatcher(decoder, registry, "-add")
    reasons = {choice.operator: choice.reason for choice in all_choices(decoder, found, "native")}
    assert reasons["add"] == "switched off by `ops='-add'`"
    assert reasons["rms_norm"] == "form of plug-in acme-ops"
    assert reasons["cached_attention"] == "plug-in acme-ops has its part rope"
    assert reasons["linear"] == "native form"


def test_subgraph_of_backend_operators_uses_the_backends_executable(decoder, registry):
    backend, weights = make_backend("native", threads=1), decoder.weights[DYNAMIC.name]
    plan = decoder.plan
    kinds = {
        ops: {type(dispatcher(decoder, registry, ops).compile(s, backend, 4, weights)) for s in plan.static_subgraphs}
        for ops in ("all", "none", "-rms_norm")
    }
    assert kinds == {
        "all": {NativeExecutable},
        "none": {FunctionExecutable},
        "-rms_norm": {SectionedExecutable},
    }


def test_operator_that_backend_lacks_runs_in_reference_with_one_warning(decoder, registry, caplog):
    found = dispatcher(decoder, registry.copy(without=[("rms_norm", "native")]))
    with caplog.at_level(logging.WARNING):
        choices = all_choices(decoder, found, "native")
    mine = [choice for choice in choices if choice.operator == "rms_norm"]
    assert len(mine) > 2
    assert {choice.name for choice in mine} == {"reference"}
    (record,) = caplog.records
    assert (
        "the reference, which is slow, runs the operator rms_norm: native has no form: native has no"
        in record.getMessage()
    )


@pytest.mark.parametrize(
    ("is_required", "ops", "message"),
    [(True, "-rope", "'rope' requires its form 'toy'"), (lambda node: True, "rope=native", "toy")],
)
def test_required_part_remains_the_plugins(decoder, registry, is_required, ops, message):
    add_plugin(registry, "rope", "toy", rotate_half, is_required=is_required)
    choices = all_choices(decoder, dispatcher(decoder, registry, "none"), "native")
    (attention,) = {c.parts["rope"].name for c in choices if c.operator == "cached_attention"}
    assert attention == "toy"
    with pytest.raises(ConfigError, match=message):
        all_choices(decoder, dispatcher(decoder, registry, ops), "native")


INTERRUPTED = """
from chunkrt.backends import dispatch

calls = []

def interrupted(registry):
    registry.register("add", "toy")(print)
    calls.append(registry)
    if len(calls) == 1:
        raise KeyboardInterrupt

dispatch.load_operators = interrupted
try:
    dispatch.registered_operators()
except KeyboardInterrupt:
    print(calls[0].find("add", "toy"))
for _ in range(2):
    assert dispatch.registered_operators().find("add", "toy")
print(len(calls))
"""


def test_ctrl_c_while_loading_plugins_is_retried_at_next_call():
    command = [sys.executable, "-P", "-c", INTERRUPTED]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "None\n2\n"


def test_operator_without_implementation_is_refused_by_node(decoder, registry):
    forms = [("rms_norm", "native"), ("rms_norm", "reference")]
    found = dispatcher(decoder, registry.copy(without=forms))
    with pytest.raises(
        PartitionError, match=r"no form of RMSNormalization can run: native has no form: .* 'rms_norm'"
    ) as refused:
        all_choices(decoder, found, "native")
    assert "switch it on" not in str(refused.value)  # it is on


def test_required_operator_stays_on(decoder, registry):
    registry = registry.copy(without=[("rms_norm", "native")])
    function = registry.find("rms_norm", "reference").function
    registry.register("rms_norm", "native", is_required=True)(function)
    choices = all_choices(decoder, dispatcher(decoder, registry, "none"), "native")
    assert {choice.name for choice in choices if choice.operator == "rms_norm"} == {"native"}
    with pytest.raises(ConfigError, match="'rms_norm' requires its form"):
        dispatcher(decoder, registry, "-rms_norm")


def norms(decoder, registry, backend="native", ops=None):
    """Return the runners of norms by node."""
    found = dispatcher(decoder, registry, ops)
    uses_of = [each for s in decoder.plan.subgraphs for each in found.runners(s, backend)]
    return {use.node.name: runner for use, runner in uses_of if use.operator == "rms_norm"}


def is_inner(node):
    return "input_layernorm" in node


def only_inner(node):
    return "" if is_inner(node.name) else "it is no input norm"


def test_forms_of_two_packages_for_one_node_are_refused(decoder, registry):
    add_plugin(registry, "rms_norm", "fast", np.add)
    add_plugin(registry, "rms_norm", "quick", np.add, package="other-ops")
    message = (
        r"node 'model\.layers\.0\.input_layernorm\.output': forms of 2 packages accept it: 'fast' of acme-ops .* and "
        r"'quick' of other-ops .*; choose one by `ops='rms_norm=fast'` or `ops='rms_norm=quick'`"
    )
    with pytest.raises(ConfigError, match=message):
        norms(decoder, registry)
    assert {runner.name for runner in norms(decoder, registry, ops="rms_norm=quick").values()} == {"quick"}


def test_forms_of_one_package_run_in_the_order_of_their_registration(decoder, registry):
    add_plugin(registry, "rms_norm", "fast", np.add, refuses=only_inner)
    add_plugin(registry, "rms_norm", "exact", np.add, refuses=lambda node: "too many" if "mlp" in node.name else None)
    add_plugin(registry, "rms_norm", "slow", np.add)
    for name, runner in norms(decoder, registry).items():
        assert runner.name == ("fast" if is_inner(name) else "exact")
        refusal = "" if is_inner(name) else "; fast (acme-ops) refuses it: it is no input norm"
        assert runner.reason == f"form of plug-in acme-ops{refusal}"


def test_node_refused_by_all_plugin_forms_runs_in_ours(decoder, registry):
    for name in ("fast", "exact"):
        add_plugin(registry, "rms_norm", name, np.add, refuses=lambda node, name=name: f"not for {name}")
    (runner, *_), names = (found := norms(decoder, registry)).values(), {each.name for each in found.values()}
    assert names == {"native"}
    assert runner.reason == (
        "native form; fast (acme-ops) refuses it: not for fast; exact (acme-ops) refuses it: not for exact"
    )


def test_form_for_one_backend_leaves_other_backends_alone(decoder, registry):
    add_plugin(registry, "rms_norm", "toy", np.add, backends=("native",))
    for backend in ("native", "onnxrt"):
        expected = "toy" if backend == "native" else backend
        assert {runner.name for runner in norms(decoder, registry, backend).values()} == {expected}
    message = r"as 'toy': toy \(acme-ops\) is for native, not onnxrt; limit .* `ops='rms_norm=toy/onnxrt'`"
    with pytest.raises(ConfigError, match=message):
        norms(decoder, registry, "onnxrt", "rms_norm=toy")
    assert {runner.name for runner in norms(decoder, registry, "onnxrt", "rms_norm=toy/onnxrt").values()} == {"onnxrt"}


def test_form_is_chosen_by_name_and_module(decoder, registry):
    add_plugin(registry, "rms_norm", "fast", np.add)
    add_plugin(registry, "rms_norm", "exact", np.add)
    layers = [f"model.layers.{index}.{norm}.output" for index in range(3) for norm in NORMS]
    names = [*layers, "model.norm.output"]

    def chosen(ops):
        found = norms(decoder, registry, ops=ops)
        return [found[name].name for name in names]

    assert chosen(None) == ["fast"] * 7
    assert chosen("rms_norm=exact") == ["exact"] * 7
    assert chosen("rms_norm=native") == ["native"] * 7
    assert chosen("model.layers.1.rms_norm=reference") == ["fast"] * 2 + ["reference"] * 2 + ["fast"] * 3
    assert chosen("-model.layers.*.input_layernorm.rms_norm") == ["reference", "fast"] * 3 + ["fast"]
    assert chosen(["none", "+model.layers.2.rms_norm"]) == ["reference"] * 4 + ["fast"] * 2 + ["reference"]
    # A pattern precedes a name alone; the last of several patterns decides.
    assert chosen("model.norm.rms_norm=exact,rms_norm=native") == ["native"] * 6 + ["exact"]
    assert chosen("model.layers.*.rms_norm=exact,model.layers.0.rms_norm=native") == ["native"] * 2 + ["exact"] * 4 + [
        "fast"
    ]


NORMS = ("input_layernorm", "post_attention_layernorm")


def test_first_named_form_that_accepts_the_node_runs(decoder, registry):
    add_plugin(registry, "rms_norm", "fast", np.add, refuses=only_inner)
    for name, runner in norms(decoder, registry, ops="rms_norm=fast/reference").items():
        assert runner.name == ("fast" if is_inner(name) else "reference")
        assert runner.reason.startswith("chosen by `ops='rms_norm=fast/reference'`")
    message = (
        r"ops: rms_norm=fast: node 'model\.layers\.0\.post_attention_layernorm\.output' cannot run rms_norm as 'fast': "
        r"fast \(acme-ops\) refuses it: it is no input norm; limit the switch to other modules, or name another form "
        r"for such nodes: `ops='rms_norm=fast/native'`"
    )
    with pytest.raises(ConfigError, match=message):
        norms(decoder, registry, ops="rms_norm=fast")


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ("rms_norm=fsat", "unknown form of rms_norm 'fsat'; did you mean 'fast'"),
        ("layers.1.rms_norm=fast", r"matches no rms_norm; write \*\.layers\.1\.rms_norm=fast, because"),
        (
            "model.layers.7.rms_norm=fast",
            r"matches no rms_norm; a pattern matches .* 'model\.layers\.0\.input_layernorm'",
        ),
        ("model.layers.7.sampler=reference", "matches no sampler; the model has none"),
        ("rms_norm=fast,rms_norm=native", "rms_norm=fast and rms_norm=native contradict each other"),
        ("+rms_norm,-rms_norm", r"\+rms_norm and -rms_norm contradict"),
        ("rms_norm=onnxrt", "onnxrt does not run the node, but native does"),
        ("rms_norm=fast/", "names the forms 'fast/'; separate different names by one '/'"),
        ("rms_norm=", "'rms_norm=' is not a switch"),
        ("+rms_norm=fast", r"'\+rms_norm=fast' is not a switch"),
        (".rms_norm=fast", "'.rms_norm=fast' is not a switch"),
    ],
)
def test_invalid_choice_is_one_line(decoder, registry, ops, message):
    add_plugin(registry, "rms_norm", "fast", np.add)
    with pytest.raises(ConfigError, match=message) as refused:
        norms(decoder, registry, ops=ops)
    assert "\n" not in str(refused.value)


def test_requirement_may_depend_on_the_node(decoder, registry):
    add_plugin(registry, "rms_norm", "fast", np.add, is_required=lambda node: is_inner(node.name))
    for name, runner in norms(decoder, registry, ops="none").items():
        assert (runner.name, runner.reason) == (
            ("fast", "required by plug-in acme-ops")
            if is_inner(name)
            else ("reference", "switched off by `ops='none'`")
        )
    message = r"requires the form 'fast' of acme-ops .*, which -rms_norm rules out; limit the switch to other modules"
    with pytest.raises(ConfigError, match=message):
        norms(decoder, registry, ops="-rms_norm")
    outer = [f"-model.layers.*.{norm}.rms_norm" for norm in NORMS[1:]]
    assert {runner.name for runner in norms(decoder, registry, ops=outer).values()} == {"fast", "reference"}


def test_node_has_the_sizes_of_its_operands(decoder, registry):
    seen = []
    for operator in ("rms_norm", "linear"):
        add_plugin(registry, operator, "toy", np.add, refuses=lambda node: seen.append(node) or "never")
    all_choices(decoder, dispatcher(decoder, registry), "native")
    for node in seen:
        rows, width = node.input_shapes[0]
        assert (rows, node.device, node.scheme) == ("T", "npu", "w8a8-dynamic")
        if node.operator == "linear":
            assert node.input_shapes[1] == (width, node.output_shapes[0][1])
        else:
            assert node.input_shapes[1] == (width,)
            assert node.attributes["epsilon"] > 0
    assert {node.operator for node in seen} == {"rms_norm", "linear"}


def test_part_is_chosen_by_module(decoder, registry):
    add_plugin(registry, "rope", "toy", rotate_half)
    found = dispatcher(decoder, registry, "model.layers.2.rope=toy,rope=reference")
    (attention,) = [c for c in all_choices(decoder, found, "native") if c.operator == "cached_attention"]
    assert (attention.name, attention.parts["rope"].name) == ("reference", "toy")


def test_part_runs_in_the_first_named_form_that_accepts_the_node(decoder, registry):
    refused = {"backends": ("reference",)}
    add_plugin(registry, "rope", "toy", rotate_half, **refused)
    for ops, expected in (("rope=toy/native", "native"), ("rope=toy/reference", "reference")):
        found = dispatcher(decoder, registry, ops)
        (attention,) = {c.name for c in all_choices(decoder, found, "native") if c.operator == "cached_attention"}
        assert attention == expected


def test_value_that_a_row_declares_as_weight_is_named(decoder, registry):
    row = Operator(num_inputs=2, output=lambda attributes, shapes: shapes[0], weights=(0,))
    register_operator("acme", "MisdeclaredNorm", row)

    class Norm:
        def __init__(self, node):
            pass

        def prepare(self, x):
            pass

        def __call__(self, weight):
            return weight

    plan, subgraph, _ = with_foreign_norm(decoder, "MisdeclaredNorm")
    add_plugin(registry, "acme_misdeclared_norm", "acme", Norm)
    chosen = Dispatcher(plan, DYNAMIC, registry, Switches.parse(None))
    message = r"input 0 of acme::MisdeclaredNorm is no weight but 'model.*'; correct `weights` in the operator's row"
    with pytest.raises(PartitionError, match=message):
        chosen.compile(subgraph, make_backend("native", threads=1), 4, decoder.weights[DYNAMIC.name])


def with_foreign_norm(decoder, op):
    """Return the decoder's plan with a norm of the domain acme in place of its first, its subgraph, and the node."""
    norm = next(node for s in decoder.plan.subgraphs for node in s.nodes if node.op == "RMSNormalization")
    foreign = replace(norm, op=op, domain="acme", attributes={})
    subgraph = next(s for s in decoder.plan.subgraphs if norm in s.nodes)
    renamed = replace(subgraph, nodes=tuple(foreign if node is norm else node for node in subgraph.nodes))
    subgraphs = tuple(renamed if s is subgraph else s for s in decoder.plan.subgraphs)
    return replace(decoder.plan, subgraphs=subgraphs), renamed, foreign


@pytest.mark.parametrize("ops", [None, "none"])
def test_operator_of_plugin_alone_is_on_under_none(decoder, registry, ops):
    """`--npu reference` and `none` mean chunkrt's own reference, which has no form of the operator."""
    plan, renamed, norm = with_foreign_norm(decoder, "WideNorm")
    add_plugin(registry, "acme_wide_norm", "acme", np.multiply)
    chosen = Dispatcher(plan, DYNAMIC, registry, Switches.parse(ops), default="none")
    runners = {use.node.name: runner for use, runner in chosen.runners(renamed, "reference")}
    assert runners[norm.name].form.function is np.multiply
    off = Dispatcher(plan, DYNAMIC, registry, Switches.parse("-acme_wide_norm"), default="none")
    message = r"node 'model.* cannot run acme_wide_norm as 'reference': the reference has no .*; switch it on with"
    with pytest.raises(ConfigError, match=message):
        off.runners(renamed, "reference")


def run_model(name, ops, *, npu="native", scheme="w8a8-dynamic", tokens=5, **options):
    """Return the logits of a prompt in chunks of 5, the next tokens, and the operators and nodes of the plan."""
    path = checkpoint(name)
    with chunkrt.load(path, npu=npu, scheme=scheme, ops=ops, chunk_length=5, threads=2, **options) as engine:
        session = engine.session()
        logits = session.prefill(input_ids(name), logits="all").logits
        generated = [piece.token_id for piece in session.generate(max_new_tokens=tokens)]
        operators = {use.operator for subgraph in engine.plan.subgraphs for use in uses(subgraph, engine.plan)}
        num_nodes = sum(len(subgraph.nodes) for subgraph in engine.plan.subgraphs)
        return logits, generated, operators, num_nodes


def rms(values):
    return np.sqrt(np.mean(values**2))


def quantisation_error(name, logits):
    """Return the relative error of the logits from those that Transformers computes in float."""
    return rms(logits - expected_logits(name))


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES)
def test_each_operator_can_be_switched_off_in_float(name):
    """ONNX Runtime and the reference alternate; each operator rounds sums of up to 64 products differently."""
    whole, generated, operators, num_nodes = run_model(name, "all", npu="onnxrt", scheme="float")
    tolerance = num_nodes * 64 * 2.0**-24 * np.abs(whole).max()
    for operator in (*sorted(operators), "rope"):
        found, its_tokens, *_ = run_model(name, f"-{operator}", npu="onnxrt", scheme="float")
        np.testing.assert_allclose(found, whole, rtol=0, atol=tolerance, err_msg=operator)
        assert its_tokens == generated, operator


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES)
def test_native_alternates_with_each_operator_of_the_reference(name):
    """Values between linears differ only by rounding. If one moves to another step, or is no longer an outlier, its row
    is quantised differently, which changes logits less than quantising all rows does."""
    whole, generated, operators, _ = run_model(name, "all")
    tolerance = quantisation_error(name, whole)
    for operator in (*sorted(operators), "rope", "quantize", "none"):
        ops = operator if operator == "none" else f"-{operator}"
        found, its_tokens, *_ = run_model(name, ops)
        assert rms(found - whole) < tolerance, operator
        assert its_tokens == generated, operator


def test_switches_work_with_shifted_contexts_and_without_npu():
    for options in ({"npu": "off"}, {"context_shift": True}, {"cache_dtype": "float32"}):
        whole, tokens, *_ = run_model("llama_gqa", "all", **options)
        found, its_tokens, *_ = run_model("llama_gqa", "-rope,-silu_mul", **options)
        assert rms(found - whole) < quantisation_error("llama_gqa", whole)
        assert its_tokens == tokens


@pytest.mark.parametrize(
    ("options", "what"),
    [({"cache_dtype": "int8"}, "int8 caches are"), ({"attention_math": "bfloat16"}, "bfloat16 attention is")],
)
def test_int8_caches_and_bfloat16_require_native_attention(options, what):
    run_model("llama_gqa", "-rms_norm", **options)
    for ops in ("none", "-cached_attention", "-rope"):
        with pytest.raises(ConfigError, match=rf"{what} .* but reference runs cached_attention"):
            run_model("llama_gqa", ops, **options)


def test_executable_in_sections_is_thread_safe(decoder, registry):
    backend, weights, plan = make_backend("native", threads=2), decoder.weights[DYNAMIC.name], decoder.plan
    subgraph = next(s for s in plan.static_subgraphs if len(s.nodes) > 8)
    executable = dispatcher(decoder, registry, "-rms_norm,-add").compile(subgraph, backend, 8, weights)
    random = np.random.default_rng(0)

    def call(num_rows, seed):
        random = np.random.default_rng(seed)
        inputs = {
            n: random.standard_normal((num_rows, *plan.tensors[n].shape[1:]), np.float32) for n in subgraph.inputs
        }
        outputs = {n: np.empty((num_rows, *plan.tensors[n].shape[1:]), np.float32) for n in subgraph.outputs}
        executable.run(inputs, outputs)
        return outputs

    cases = [(int(random.integers(1, 9)), seed) for seed in range(24)]
    alone, together = [call(*case) for case in cases], {}
    threads = [threading.Thread(target=lambda c=case: together.update({c: call(*c)})) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for case, expected in zip(cases, alone, strict=True):
        for name, value in expected.items():
            np.testing.assert_array_equal(together[case][name], value)


@pytest.fixture
def plugged(registry, monkeypatch):
    """Return a function that installs a plug-in for engines."""
    for module in ("capability", "loaded", "loading", "roles"):
        monkeypatch.setattr(f"chunkrt.engine.{module}.registered_operators", lambda: registry)

    def add(operator, device, function, **options):
        add_plugin(registry, operator, device, function, **options)

    return add


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w4a8-dynamic", "w8a16"])
def test_plugin_linear_may_use_float_weights(plugged, scheme):
    """Activations are then not rounded, so the error is smaller."""
    name = "llama_biased_gguf"
    whole, *_ = run_model(name, "-linear", scheme=scheme)
    plugged("linear", "toy", lambda left, right: left @ right.dequantise())
    found, *_ = run_model(name, "all", scheme=scheme)
    assert rms(found - expected_logits(name)) < 2 * quantisation_error(name, whole)


KINDS = {"w8a8-dynamic": DynamicWeight, "w4a8-dynamic": BlockWeight, "w8a16": StaticWeight, "float": np.ndarray}


@pytest.mark.parametrize("scheme", KINDS)
def test_object_of_each_node_is_made_and_prepared_once(plugged, scheme):
    made, calls = [], []

    class Linear:
        def __init__(self, node):
            self.node, self.weight = node, None
            made.append(self)

        def prepare(self, weight):
            assert isinstance(weight, KINDS[scheme])
            assert self.weight is None
            assert weight.shape == self.node.input_shapes[1]
            self.weight = weight

        def __call__(self, left):
            calls.append(self)
            assert left.shape[1] == self.weight.shape[0]
            return left @ self.weight if scheme == "float" else self.weight.multiply(left)

    options = {"scheme": scheme, "npu": "onnxrt" if scheme == "float" else "native"}
    whole, *_ = run_model("llama_biased_gguf", "-linear", **options)
    plugged("linear", "toy", Linear)
    found, *_ = run_model("llama_biased_gguf", "all", **options)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-4 * np.abs(whole).max())
    names = [each.node.name for each in made]
    assert len(names) == len(set(names)) == 8
    assert set(map(id, calls)) == set(map(id, made))
    assert len(calls) > len(made)


@pytest.mark.parametrize(
    ("name", "operator", "num_weights"),
    [
        ("llama_gqa", "rms_norm", 1),
        ("llama_gqa", "embedding", 1),
        ("llama_gqa", "cached_attention", 2),
        ("qwen3_next_experts", "routed_experts", 2),
        ("lfm2", "linear_attention", 2),
        ("llama_gqa", "add", 0),
    ],
)
def test_object_gets_weights_once_and_other_inputs_at_each_call(plugged, registry, name, operator, num_weights):
    """The object calls chunkrt's reference with the arguments in the order of a function."""
    own, places = registry.find(operator, "reference").function, {}

    class Wrapped:
        def __init__(self, node):
            self.node = node

        def prepare(self, *weights):
            assert len(weights) == num_weights
            if operator == "routed_experts":  # a list of experts
                assert {type(expert) for experts in weights for expert in experts} == {DynamicWeight}
            self.weights = weights

        def __call__(self, *others):
            arguments, weights, others = [], list(self.weights), list(others)
            for place in range(len(self.node.inputs)):
                is_weight = place in WEIGHTS.get(operator, ())
                arguments.append((weights if is_weight else others).pop(0))
            assert not weights
            assert not others
            places[self.node.name] = len(arguments)
            return own(*arguments, **self.node.attributes)

    expected, tokens, *_ = run_model(name, f"-{operator}")
    plugged(operator, "toy", Wrapped)
    found, its_tokens, *_ = run_model(name, None)
    assert places
    np.testing.assert_array_equal(found, expected)
    assert its_tokens == tokens


WEIGHTS = {
    "rms_norm": (1,),
    "embedding": (0,),
    "cached_attention": (3, 4),
    "routed_experts": (2, 3),
    "linear_attention": (3, 4),
}


def test_object_gets_its_parts_when_it_is_made(plugged):
    """The part is a class too, of which each node that calls it has an object."""
    ropes = []

    class Rope:
        def __init__(self, node):
            ropes.append(node.name)

        def __call__(self, x, cos, sin):
            return rotate_half(x, cos, sin)

    class Attention:
        def __init__(self, node, *, rope):
            self.attributes, self.rope = node.attributes, rope

        def __call__(self, *arrays):
            return cached_attention(*arrays, **self.attributes, rope=self.rope)

    expected, *_ = run_model("llama_gqa", "-cached_attention")
    plugged("rope", "toy", Rope)
    plugged("cached_attention", "toy", Attention, parts=("rope",))
    found, *_ = run_model("llama_gqa", None)
    np.testing.assert_array_equal(found, expected)
    assert len(ropes) == len(set(ropes)) == 3


def num_bytes(weight):
    """Return the size in bytes of the arrays in an object of one of KINDS."""
    held = vars(getattr(weight, "blocks", weight))
    return sum(array.nbytes for array in held.values() if isinstance(array, np.ndarray))


@pytest.mark.parametrize("scheme", [name for name in KINDS if name != "float"])
def test_weights_of_functions_stay_integers_of_one_byte(plugged, scheme):
    seen = {}

    def linear(left, right):
        seen[id(right)] = right
        return right.multiply(left)

    plugged("linear", "toy", linear)
    run_model("llama_biased_gguf", "all", scheme=scheme)
    for weight in seen.values():
        depth, columns = weight.shape
        beside = depth // 8 if scheme == "w4a8-dynamic" else 4 + 4  # scales and minima of blocks; scales and grids
        assert num_bytes(weight) <= columns * (depth + beside) + 4


class Full:
    def __init__(self, node):
        pass

    def prepare(self, weight):
        raise ValueError("no room on the GPU")

    def __call__(self, left):
        return left


class Picky:
    def __init__(self):
        pass

    def __call__(self, left):
        return left


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (Full, "prepare the weights of 'linear' for node '.*': ValueError: no room on the GPU"),
        (Picky, "make 'linear' for node '.*': TypeError: .*__init__.*"),
    ],
)
def test_failing_class_is_reported(plugged, made, what):
    plugged("linear", "toy", made)
    message = rf"acme-ops \(\S*test_dispatch\): form 'toy' cannot {what}; repair it or use `ops='-linear'`"
    with pytest.raises(CompileError, match=message):
        run_model("llama_gqa", "all")


@pytest.mark.parametrize("npu", ["native", "reference"])
def test_functions_get_contiguous_arrays_of_the_plans_types(plugged, npu):
    """This holds for outputs of any earlier function, here ones that return other types."""
    seen = []

    def look(*arrays):
        seen.extend((array.dtype.name, array.flags.c_contiguous) for array in arrays)
        return arrays

    def add(left, right):
        look(left, right)
        return np.asfortranarray(left + right, dtype=np.float64)

    plugged("add", "toy", add)
    plugged("rope", "toy", lambda *inputs: rotate_half(*look(*inputs)))
    whole, *_ = run_model("llama_gqa", "all", npu=npu, context_shift=True)
    assert set(seen) == {("float32", True)}
    found, *_ = run_model("llama_gqa", "none", npu=npu, context_shift=True)
    assert rms(found - whole) < quantisation_error("llama_gqa", whole)


def test_plugin_sampler_chooses_tokens(plugged):
    class Last:
        def __init__(self, options):
            self.options = options

        def next(self, logits, history=()):
            return len(logits) - 1

    plugged("sampler", "toy", Last)
    with chunkrt.load(checkpoint("llama_gqa")) as engine, engine.session() as session:
        vocab_size = engine.plan.vocab_size
        session.prefill([1, 2, 3])
        assert [piece.token_id for piece in session.generate(max_new_tokens=3)] == [vocab_size - 1] * 3
    with chunkrt.load(checkpoint("llama_gqa"), ops="-sampler") as engine:
        assert engine.loaded.make_sampler is Sampler


def test_sampler_is_chosen_by_name(plugged):
    for token, package in enumerate(("acme-ops", "other-ops")):
        make = lambda options, token=token: SimpleNamespace(next=lambda logits, history: token)  # noqa: E731
        plugged("sampler", f"always_{token}", make, package=package)
    with pytest.raises(ConfigError, match="node 'sampler': forms of 2 packages accept it: 'always_0' of acme-ops"):
        chunkrt.load(checkpoint("llama_gqa"))
    for token in range(2):
        with chunkrt.load(checkpoint("llama_gqa"), ops=f"sampler=always_{token}") as engine:
            session = engine.session()
            session.prefill([1, 2, 3])
            assert [piece.token_id for piece in session.generate(max_new_tokens=2)] == [token] * 2


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (
            lambda logits: 1 / 0,
            r"the sampler of acme-ops \(\S*test_dispatch\) failed: ZeroDivisionError: division by zero",
        ),
        (lambda logits: logits.sort(), "failed: ValueError: sort array is read-only"),
        (lambda logits: len(logits), r"chose \d+, expected a token from 0 to \d+"),
        (lambda logits: -1, "chose -1, expected a token"),
        (lambda logits: 1.5, "chose 1.5, expected a token"),
        (lambda logits: None, "chose None, expected a token"),
        (None, r"the sampler of acme-ops \(\S*test_dispatch\) failed: TypeError"),
    ],
)
def test_error_in_plugin_sampler_is_reported(plugged, token, message):
    """Without `token` the sampler cannot be made."""
    make = token and (lambda options: SimpleNamespace(next=lambda logits, history: token(logits)))
    plugged("sampler", "toy", make or (lambda: None))
    with chunkrt.load(checkpoint("llama_gqa")) as engine:
        session = engine.session()
        session.prefill([1, 2, 3])
        with pytest.raises(BackendError, match=message):
            list(session.generate(max_new_tokens=2))
        assert session.tokens == (1, 2, 3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x, weight, **_: 1 / 0,
            "RMSNormalization by .*lambda.* of acme-ops failed: ZeroDivisionError: ",
        ),
        (lambda x, weight: x, "failed: TypeError: .* unexpected keyword argument 'axis'"),
        (lambda x, weight, **_: x[:, :-1], r"returned '.*' of shape \[3, 47\], expected \[3, 48\]"),
        (lambda x, weight, **_: x[:1], r"returned '.*' of shape \[1, 48\], expected \[3, 48\]"),
        (lambda x, weight, **_: None, "failed: TypeError: it returned None, expected the array 'model.layers.0"),
        (lambda x, weight, **_: x.astype(np.complex64), r"returned '.*' of type complex\d+, expected float32"),
        (lambda x, weight, **_: x.astype(np.int64), r"returned '.*' of type int64, expected float32"),
        (lambda x, weight, **_: np.full(x.shape, "1"), r"returned '.*' of type <U1, expected float32"),
        (lambda x, weight, **_: np.multiply(x, 2, out=x), "failed: ValueError: output array is read-only"),
        (lambda x, weight, **_: (x, x), "failed: ValueError: it returned 2 outputs, expected 1"),
    ],
)
def test_error_in_plugin_function_names_the_plugin(plugged, function, message):
    plugged("rms_norm", "toy", function)
    with chunkrt.load(checkpoint("llama_gqa")) as engine, pytest.raises(BackendError, match=message):
        engine.session().prefill([1, 2, 3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda self, x, weight: 1 / 0, r"RMSNormalization by \S*test_dispatch\.\S+Norm of acme-ops failed: ZeroDivi"),
        (lambda self, x: x, "Norm of acme-ops failed: TypeError: .* takes 2 positional arguments but 3 were given"),
        (lambda self, x, weight: x[:1], r"Norm of acme-ops failed: ValueError: it returned '.*' of shape \[1, 48\]"),
    ],
)
def test_error_in_an_object_names_its_class(plugged, call, message):
    class Norm:
        def __init__(self, node):
            pass

        __call__ = call

    plugged("rms_norm", "toy", Norm)
    with chunkrt.load(checkpoint("llama_gqa")) as engine, pytest.raises(BackendError, match=message):
        engine.session().prefill([1, 2, 3])


def test_unknown_operators_are_refused_before_compilation(tmp_path):
    with pytest.raises(ConfigError, match="unknown operator 'rmsnorm'; did you mean 'rms_norm'"):
        chunkrt.load(tmp_path / "nowhere", ops="-rmsnorm")


@pytest.mark.parametrize("backend", ["native", "reference", "onnxrt"])
def test_node_refused_by_plugin_runs_as_without_it(decoder, registry, backend):
    nodes = [node.name for s in decoder.plan.subgraphs for node in s.nodes if node.op == "RMSNormalization"]
    taken = nodes[1]
    add_plugin(registry, "rms_norm", "toy", np.add, refuses=lambda node: "" if node.name == taken else "another one")
    where = norms(decoder, registry, backend, "all")
    assert where.keys() == set(nodes)
    assert {name for name, choice in where.items() if choice.name == "toy"} == {taken}
    for name in set(nodes) - {taken}:
        assert where[name].name == backend
        assert where[name].reason == "native form; toy (acme-ops) refuses it: another one"


def test_required_form_that_refuses_its_node_is_an_error(decoder, registry):
    add_plugin(registry, "rms_norm", "toy", np.add, is_required=True, refuses=lambda node: "not\ntoday")
    for ops in (None, "none"):
        with pytest.raises(ConfigError, match=r"requires the form 'toy' of acme-ops .*, which refuses it: not today; "):
            all_choices(decoder, dispatcher(decoder, registry, ops), "native")
    both = registered_operators().copy()
    add_plugin(both, "rms_norm", "toy", np.add, is_required=True, backends=("reference",))
    assert {choice.name for choice in all_choices(decoder, dispatcher(decoder, both), "native")} >= {"native"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refuses": lambda node: True}, "refuses= of form 'toy' of 'rms_norm' returned True for node"),
        ({"refuses": lambda node: node.absent}, "failed to decide whether it accepts node .*AttributeError"),
        ({"is_required": lambda node: node.absent}, "failed to decide whether it is required for node .*Attribute"),
    ],
)
def test_invalid_answer_about_a_node_is_named(decoder, registry, options, message):
    add_plugin(registry, "rms_norm", "toy", np.add, **options)
    with pytest.raises(PartitionError, match=f"acme-ops .*{message}"):
        norms(decoder, registry)


def test_operator_without_parts_takes_none(registry):
    with pytest.raises(ConfigError, match=r"with the part 'rope'; 'silu_mul' takes no parts"):
        add_plugin(registry, "silu_mul", "toy", np.add, parts=("rope",))
