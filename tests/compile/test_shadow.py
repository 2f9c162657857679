"""Linears with shadows in the plan: their subgraphs, the dependencies, and the options that request them."""

from dataclasses import asdict, replace
from fnmatch import fnmatchcase

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from fixture_checkpoints import checkpoint, input_ids

import chunkrt
from chunkrt.backends.onnx.plan_models import to_onnx
from chunkrt.backends.onnx.scheme_models import initializer_values, quantize_linears
from chunkrt.checkpoints.source import weights_digest
from chunkrt.compile import compiler
from chunkrt.compile.calibrate import cached_calibration, calibrate
from chunkrt.compile.compiler import compile_checkpoint, plan_checkpoint
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import choose_recipe
from chunkrt.engine_directory.figures import weight_bytes
from chunkrt.engine_directory.manifest import open_weights, read_manifest, read_plan
from chunkrt.engine_directory.weights import check_shadowed
from chunkrt.errors import ConfigError, QuantizationError
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.ops import trace
from chunkrt.graph.partition import cut_shadowed, partition, place
from chunkrt.graph.placement import ALL_ON_CPU
from chunkrt.graph.plan import Plan, linear_nodes
from chunkrt.quant.calibration import num_hot_channels
from chunkrt.quant.scheme import DEFAULT_BUDGETS, SCHEMES, Recipe, find_scheme
from chunkrt.simulate import find_device, simulate
from chunkrt.testing.random_decoders import CONFIG, RandomCheckpoint, random_decoder

LAYER = "model.layers.0"
QKV, O_PROJ, DOWN = (f"{LAYER}.{name}.weight" for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj"))
SHADOWED = replace(SCHEMES["w8a8"], name="w8a8-shadowed", shadowed=("*",))
GGUF = checkpoint("llama_biased_gguf")
TOKENS = input_ids("llama_biased_gguf")[:20]


def plan_of(pattern, placement=None, **changes):
    decoder = build_decoder(RandomCheckpoint({**CONFIG, "num_hidden_layers": 1, **changes}))
    place(decoder, placement or {})
    graph = trace(decoder)
    cut_shadowed(graph, lambda weight: fnmatchcase(weight, pattern))
    return partition(graph, family="llama")


def rows(plan):
    """Return name, device, operators and dependencies of every subgraph."""
    names = [subgraph.name for subgraph in plan.subgraphs]
    return [
        (s.name, s.device, " ".join(node.op for node in s.nodes), [names[i] for i in plan.flow.waits_for[index]])
        for index, s in enumerate(plan.subgraphs)
    ]


def ops(plan):
    return [node.op for subgraph in plan.subgraphs for node in subgraph.nodes]


def test_shadow_and_its_linear_wait_for_the_same_subgraph_and_meet_in_a_sum():
    plan = plan_of(DOWN)
    assert rows(plan)[3:] == [
        ("static.1", "npu", "MatMul Add Add RMSNormalization MatMul Split Sigmoid Mul Mul", ["dynamic.0"]),
        ("static.2", "npu", "MatMul", ["static.1"]),
        ("shadow.0", "cpu", "ShadowLinear", ["static.1"]),
        ("static.3", "npu", "Add Add RMSNormalization", ["static.2", "shadow.0"]),
        ("head", "cpu", "Gather MatMul", ["static.3"]),
    ]
    _, _, _, _, main, shadow, both, _ = plan.subgraphs
    (gated,) = main.inputs
    assert (main.inputs, main.weights, main.state) == ((gated,), (DOWN,), ())
    assert (shadow.inputs, shadow.weights, shadow.state) == ((gated,), (DOWN,), ())
    assert main.outputs == (f"{LAYER}.mlp.down_proj.output.main",)
    assert shadow.outputs == (f"{LAYER}.mlp.down_proj.output.shadow",)
    assert both.nodes[0].inputs == (*main.outputs, *shadow.outputs)
    assert both.nodes[0].outputs == (f"{LAYER}.mlp.down_proj.output",)
    assert (main.is_static, shadow.is_static, both.is_static) == (True, False, True)
    assert not plan.flow.is_chain


def test_bias_is_added_once_to_the_sum():
    plan = plan_of(QKV)
    assert rows(plan)[1:5] == [
        ("static.0", "npu", "RMSNormalization", ["embedding"]),
        ("static.1", "npu", "MatMul", ["static.0"]),
        ("shadow.0", "cpu", "ShadowLinear", ["static.0"]),
        ("static.2", "npu", "Add Add", ["static.1", "shadow.0"]),
    ]
    total, biased = plan.subgraphs[4].nodes
    assert total.outputs == (f"{LAYER}.self_attn.qkv_proj.product",)
    assert biased.inputs[0] == total.outputs[0]
    assert biased.inputs[1] == f"{LAYER}.self_attn.qkv_proj.bias"
    assert biased.outputs == (f"{LAYER}.self_attn.qkv_proj.output",)


def test_linear_on_the_cpu_has_its_sum_there():
    plan = plan_of(DOWN, {f"{LAYER}.mlp.down_proj": "cpu"})
    assert rows(plan)[4:8] == [
        ("static.2", "cpu", "MatMul", ["static.1"]),
        ("shadow.0", "cpu", "ShadowLinear", ["static.1"]),
        ("static.3", "cpu", "Add", ["static.2", "shadow.0"]),
        ("static.4", "npu", "Add RMSNormalization", ["static.3"]),
    ]


def test_shadow_is_a_separate_task_on_the_cpu():
    plan = plan_of(DOWN, ALL_ON_CPU)
    assert [(name, device) for name, device, _, _ in rows(plan)] == [
        (name, "cpu") for name in ("dynamic.0", "static.0", "shadow.0", "static.1", "head")
    ]
    assert [waits for *_, waits in rows(plan)][1:4] == [["dynamic.0"], ["dynamic.0"], ["static.0", "shadow.0"]]


def test_shadow_without_placement_is_on_the_cpu_if_the_decoder_is_on_the_npu():
    plan = plan_of(DOWN, {"model.layers.*.mlp*": "npu"})
    assert {s.name: s.device for s in plan.subgraphs}["shadow.0"] == "cpu"


@pytest.mark.parametrize("layers", [1, 3])
def test_every_linear_of_every_layer_can_have_one(layers):
    plan = plan_of("model.layers.*", num_hidden_layers=layers)
    names = [subgraph.name for subgraph in plan.subgraphs]
    assert [name for name in names if name.startswith("shadow")] == [f"shadow.{i}" for i in range(4 * layers)]
    assert [name for name in names if name.startswith("static")] == [f"static.{i}" for i in range(8 * layers + 1)]
    without = plan_of("nothing", num_hidden_layers=layers)
    assert sorted(ops(plan)) == sorted([*ops(without), *["Add", "ShadowLinear"] * 4 * layers])
    assert linear_nodes(plan).keys() == linear_nodes(without).keys()
    assert plan.tensors.keys() - without.tensors.keys() == {
        f"{node.outputs[0]}.{half}" for name, node in linear_nodes(without).items() for half in ("main", "shadow")
        if name != "lm_head.weight"
    }  # fmt: skip


def test_plan_without_shadows_is_unchanged():
    decoder = build_decoder(RandomCheckpoint(CONFIG))
    graph = trace(decoder)
    cut_shadowed(graph, SCHEMES["w8a8"].is_shadowed)
    assert partition(graph, family="llama") == random_decoder([]).plan


def test_plan_with_shadows_round_trips_through_json():
    plan = plan_of("model.layers.*", num_hidden_layers=2)
    assert Plan.from_json(plan.to_json()) == plan


def test_float_decoder_with_zero_shadows_equals_the_decoder():
    """A wrong name or order would run on other values."""
    decoder = random_decoder([SCHEMES["float"]])
    logits = {}
    for name, plan in (("whole", decoder.plan), ("cut", cut_plan())):
        values = {
            "input_ids": np.arange(9),
            "position": np.zeros(1, np.int64),
            "logit_rows": np.arange(9),
            **{t.name: np.zeros((t.shape[0], 9, t.shape[2]), np.float32) for t in plan.state_tensors},
        }
        for subgraph in plan.subgraphs:
            outputs = {n: np.empty((9, *plan.tensors[n].shape[1:]), np.float32) for n in subgraph.outputs}
            if subgraph.name.startswith("shadow"):
                for output in outputs.values():
                    output[...] = 0
            else:
                backend = chunkrt.backends.make_backend("reference", threads=1)
                executable = backend.compile(subgraph, plan, 9, SCHEMES["float"], decoder.weights["float"])
                executable.run({n: values[n] for n in (*subgraph.inputs, *subgraph.state)}, outputs)
            values |= outputs
        logits[name] = values[plan.output]
    np.testing.assert_array_equal(logits["cut"], logits["whole"])


def cut_plan():
    return random_decoder([SHADOWED]).plans[SHADOWED.name]


def test_both_halves_share_a_weight_in_one_onnx_model():
    decoder = random_decoder([SHADOWED])
    plan, weights = decoder.plans[SHADOWED.name], decoder.weights[SHADOWED.name]
    model = to_onnx(plan, plan.subgraphs, name="decoder")
    quantize_linears(model, SHADOWED)
    values = initializer_values(plan, SHADOWED, weights, list(model.graph.initializers))
    for name, value in model.graph.initializers.items():
        value.const_value = ir.tensor(values[name], name=name)
    shadows = [node for node in model.graph if node.op_type == "ShadowLinear"]
    assert len(shadows) == 8
    for node in shadows:
        _, weight, step, scale = (value.name for value in node.inputs)
        assert {user.op_type for user, _ in model.graph.initializers[weight].uses()} == {
            "DequantizeLinear",
            "ShadowLinear",
        }
        np.testing.assert_array_equal(values[step], weights.array(f"{weight}.input_step"))
        np.testing.assert_array_equal(values[scale], weights.array(f"{weight}.scale"))
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    empty = {t.name: np.zeros((t.shape[0], 0, t.shape[2]), np.float32) for t in plan.state_tensors}
    feed = {"input_ids": np.arange(9), "position": np.zeros(1, np.int64), "logit_rows": np.arange(9)}
    (logits,) = session.run([plan.output], feed | empty)
    assert np.isfinite(logits).all()


def test_shadows_start_at_the_calibrated_limits(tmp_path):
    """A compiled model has the calibration's hot channels and grids with the weights that they belong to."""
    path = tmp_path / "ranges.npz"
    planned = plan_checkpoint(GGUF, {})
    weights = weights_digest(planned.source)
    found = calibrate(planned.plan, planned.load, np.arange(100) % 128, model="toy", weights=weights)
    found.save(path)
    scheme = replace(SHADOWED, equalisation=None, shadowed=("*.down_proj.weight", QKV))
    plan = compile_checkpoint(GGUF, Recipe(scheme=scheme), {}, tmp_path / "engine", model="toy", calibration=path)
    assert read_plan(tmp_path / "engine") == plan
    assert read_manifest(tmp_path / "engine").scheme == scheme
    store = open_weights(tmp_path / "engine")
    num_shadows = 0
    for name, node in linear_nodes(planned.plan).items():
        source, result = node.inputs[0], node.outputs[0]
        if name == QKV or "down_proj" in name:
            num_shadows += 1
            np.testing.assert_array_equal(store.array(f"{name}.hot_channels"), found.hot_channels[source])
            limit, columns = found.shadow_limits[source], found.shadowed_column_peaks[result]
        elif name != "lm_head.weight":
            limit, columns = found.limits[source], found.column_peaks[result]
        else:
            continue
        np.testing.assert_allclose(store.array(f"{name}.input_step"), [limit / 127], rtol=1e-6)
        steps = np.where(columns > 0, 1.25 * columns, 1) / 127  # other texts have larger outputs
        np.testing.assert_allclose(store.array(f"{name}.output_step"), steps, 1e-6)
    assert num_shadows == ops(plan).count("ShadowLinear") == 3


def recipe(default="w8a8-dynamic", **options):
    return choose_recipe(EngineOptions(**{"npu": "native"} | options), default)


def test_schemes_from_options():
    w8a8, floats = SCHEMES["w8a8"], replace(SCHEMES["w8a8"], float_outputs=("*",))
    assert recipe() == Recipe(scheme=SCHEMES["w8a8-dynamic"])
    assert recipe(npu="qnn") == Recipe(scheme=SCHEMES["w8a16"])
    assert recipe(scheme="w8a8") == recipe(scheme="w8a8", shadow="none") == Recipe(scheme=floats)
    assert recipe(scheme="w8a8", npu="qnn") == recipe(scheme="w8a8", outputs="grid") == Recipe(scheme=w8a8)
    assert recipe(scheme="w8a16") == Recipe(scheme=SCHEMES["w8a16"])
    assert recipe(scheme="w8a16", outputs="float").scheme.float_outputs == ("*",)
    assert recipe(scheme="w8a8", shadow="all") == Recipe(scheme=replace(floats, shadowed=("*",)))
    assert recipe(scheme="w8a8", shadow=f" {DOWN} , *.o_proj.weight").scheme.shadowed == (DOWN, "*.o_proj.weight")
    assert recipe(scheme="w8a8", shadow="auto") == Recipe(
        scheme=floats, search="shadow", budget=DEFAULT_BUDGETS["shadow"]
    )
    assert recipe(scheme="w8a8", shadow="auto", budget=0.5).budget == 0.5
    assert recipe(scheme="mixed", budget=0.5) == Recipe(scheme=find_scheme("mixed"), search="mixed", budget=0.5)
    assert recipe(scheme="mixed", npu="qnn").budget == DEFAULT_BUDGETS["mixed"]
    assert recipe(scheme="w8a8", equalisation="off").scheme.equalisation is None
    assert recipe(scheme="w8a8", equalisation=0).scheme.equalisation == 0
    assert recipe(scheme="w8a16", equalisation=1).scheme.equalisation == 1
    assert recipe(scheme="w8a8", rotation=True).scheme.is_rotated


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shadow": "all"}, r"'w8a8-dynamic' is not static and does not use `shadow`"),
        ({"scheme": "float", "shadow": "auto"}, r"'float' is not static and does not use `shadow`"),
        ({"budget": 0.1}, r"'w8a8-dynamic' is not static and does not use `budget`"),
        ({"outputs": "float"}, r"'w8a8-dynamic' is not static and does not use `outputs`"),
        ({"equalisation": 0.5}, r"'w8a8-dynamic' is not static and does not use `equalisation`"),
        ({"equalisation": 0}, r"'w8a8-dynamic' is not static and does not use `equalisation`"),
        ({"rotation": True}, r"'w8a8-dynamic' is not static and does not use `rotation`"),
        (
            {"scheme": "w8a16", "shadow": "all"},
            r"'w8a16' use 16-bit inputs and need no shadow; use the scheme 'w8a8' or 'mixed'",
        ),
        ({"scheme": "w4a16", "shadow": "auto"}, r"'w4a16' use 16-bit inputs and need no shadow"),
        ({"scheme": "w8a16", "shadow": DOWN}, r"'w8a16' use 16-bit inputs and need no shadow"),
        ({"scheme": "mixed", "shadow": "all"}, r"'mixed' selects shadows itself"),
        ({"scheme": "w8a8", "budget": 0.1}, r"`budget` has no effect without `shadow='auto'` or `scheme='mixed'`"),
        ({"scheme": "w8a8", "shadow": "all", "budget": 0.1}, r"`budget` has no effect without `shadow='auto'`"),
        ({"scheme": "w8a16", "budget": 0.1}, r"`budget` has no effect without `shadow='auto'`"),
        ({"budget": 0}, r"`budget` is 0, expected a number of nats above 0"),
        ({"budget": -0.01}, r"`budget` is -0.01, expected"),
        ({"budget": float("nan")}, r"`budget` is nan, expected"),
        ({"budget": "0.01"}, r"`budget` is '0.01', expected"),
        ({"budget": True}, r"`budget` is True, expected"),
        ({"equalisation": 2}, r"`equalisation` is 2, expected 0 to 1, or 'off'"),
        ({"equalisation": -0.1}, r"`equalisation` is -0.1, expected 0 to 1"),
        ({"equalisation": float("nan")}, r"`equalisation` is nan, expected 0 to 1"),
        ({"equalisation": "on"}, r"`equalisation` is 'on', expected 0 to 1, or 'off'"),
        ({"outputs": "flot"}, r"unknown kind of outputs 'flot'; did you mean 'float'"),
        ({"shadow": 1}, r"`shadow` is 1, expected text"),
        ({"scheme": "mixd"}, r"unknown scheme 'mixd'; did you mean 'mixed'"),
    ],
)
def test_invalid_options_are_reported_in_one_line(options, message):
    with pytest.raises(ConfigError, match=message) as raised:
        recipe(**options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("shadow", "nearest"),
    [
        (f"{DOWN},model.layers.0.mlp.dwn_proj.weight", DOWN),
        ("model.layers.0.mlp.down_proj", DOWN),
        ("model.layer.*.weight", None),
        ("lm_head.weight", None),
        ("", None),
        (f"{DOWN},", None),
    ],
)
def test_shadow_for_an_unknown_linear_offers_the_nearest(shadow, nearest):
    """It fails before anything is calibrated. The LM head has 16 bits, and no shadow."""
    with pytest.raises(
        ConfigError, match=r"^unknown 8-bit linear layer '.*'; .*`chunkrt plan` lists linear layers"
    ) as raised:
        chunkrt.load(GGUF, npu="native", scheme="w8a8", shadow=shadow)
    assert nearest is None or f"did you mean {nearest!r}?" in str(raised.value)


def test_matching_patterns_are_accepted():
    plan = random_decoder([]).plan
    for patterns in ((), ("*",), (DOWN,), ("*.o_proj.weight", "model.layers.1.*")):
        check_shadowed(plan, replace(SHADOWED, shadowed=patterns))
    with pytest.raises(ConfigError, match="unknown 8-bit linear layer"):
        check_shadowed(plan, replace(SHADOWED, wide=("*",)))


@pytest.mark.parametrize(
    "options",
    [
        {"shadow": "all"},
        {"shadow": "none"},
        {"budget": 0.1},
        {"outputs": "float"},
        {"equalisation": 0.5},
        {"equalisation": 0},
        {"equalisation": "off"},
        {"rotation": True},
    ],
    ids=str,
)
def test_compiled_model_keeps_its_quantisation_options(tmp_path, options):
    compile_checkpoint(GGUF, Recipe(scheme=SCHEMES["w8a8-dynamic"]), {}, tmp_path / "engine", model="toy")
    (name,) = options
    with pytest.raises(
        ConfigError, match=rf"engine is compiled and does not accept {name} any more; pass the checkpoint"
    ):
        chunkrt.load(tmp_path / "engine", **options)


def test_compiled_model_reports_its_quantisation():
    options = {"npu": "native", "scheme": "w8a8", "shadow": f"{DOWN},*.o_proj.weight", "equalisation": 0.25}
    with chunkrt.load(GGUF, **options) as engine:
        expected = engine.session().prefill(TOKENS).logits
        assert asdict(engine.scheme) == asdict(recipe(**options).scheme)
        assert ops(engine.plan).count("ShadowLinear") == 3
        folder = engine.folder
    with chunkrt.load(folder) as again:
        np.testing.assert_array_equal(again.session().prefill(TOKENS).logits, expected)


def test_two_lists_of_shadows_are_two_engines_and_one_is_compiled_once(monkeypatch):
    def folder(shadow):
        with chunkrt.load(GGUF, npu="native", scheme="w8a8", shadow=shadow) as engine:
            return engine.folder

    folders = [folder(shadow) for shadow in ("all", "none", DOWN, O_PROJ)]
    assert len(set(folders)) == 4
    monkeypatch.setattr(compiler, "prepare_checkpoint", lambda *_, **__: pytest.fail("compiled again"))
    assert [folder(shadow) for shadow in ("all", "none", DOWN, O_PROJ)] == folders


def test_calibration_of_another_model_is_refused_even_for_its_text(tmp_path):
    """Equalisation recalibrates on a calibration's tokens, which stand for different text in another model."""
    planned = plan_checkpoint(GGUF, {})
    ranges, _ = cached_calibration(planned, GGUF, model="toy")
    name = next(iter(ranges.column_peaks))
    wider = replace(ranges, column_peaks={**ranges.column_peaks, name: np.zeros(7, np.float32)})
    unknown = replace(ranges, column_peaks={n: peaks for n, peaks in ranges.column_peaks.items() if n != name})
    for wrong, message in ((wider, "another model: it has 7 columns"), (unknown, "has no entry for")):
        wrong.save(tmp_path / "cal.npz")
        with pytest.raises(QuantizationError, match=message):
            chunkrt.load(GGUF, npu="native", scheme="w8a8", calibration=tmp_path / "cal.npz")


def test_simulator_refuses_mixed_without_a_search():
    settings = {"prompt_length": 8, "chunk_length": 4, "policy": "in_order"}
    with pytest.raises(ConfigError, match="the scheme 'mixed' depends on a search over a model's weights"):
        simulate(plan_checkpoint(GGUF, {}).plan, find_device("sd8gen3"), scheme="mixed", **settings)


def test_rows_kept_by_shadows_count_as_memory():
    plan = plan_checkpoint(GGUF, {}).plan
    shadowed = replace(SCHEMES["w8a8"], shadowed=(DOWN,))
    with_shadow, without = weight_bytes(plan, shadowed), weight_bytes(plan, SCHEMES["w8a8"])
    depth, columns = plan.tensors[DOWN].shape
    assert {n: with_shadow[n] - without[n] for n in without if with_shadow[n] != without[n]} == {
        DOWN: num_hot_channels(depth) * 4 * (columns + 1)
    }
