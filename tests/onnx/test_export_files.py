"""Exported files: valid at every opset, complete or absent, written with one weight in memory at a time."""

import json
import weakref

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from onnx_models import FAMILIES, open_model, planned
from random_folders import write_folder

from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import ConfigError, QuantizationError, UnsupportedModelError
from chunkrt.graph.decoders import FAMILIES as DECODERS
from chunkrt.graph.decoders.config import read_config
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, Layer
from chunkrt.graph.ops import trace
from chunkrt.graph.partition import Planned, partition
from chunkrt.graph.plan import Plan
from chunkrt.graph.rope import RotaryTables
from chunkrt.onnx.exporting import (
    DynamicSettings,
    SubgraphSettings,
    WindowSettings,
    dynamic_model,
    save_model,
    save_static_subgraphs,
    window_model,
)
from chunkrt.onnx.exporting import save as save_module
from chunkrt.onnx.exporting.export_settings import OPSETS
from chunkrt.onnx.exporting.forms import PLAN_KEY, ROPE_KEY, SETTINGS_KEY
from chunkrt.onnx.window_session import OnnxSession
from chunkrt.testing.random_decoders import CONFIG, RandomCheckpoint

SIZES = {"window": 8, "sequence": 24, "context": 32}
STANDARD_SINCE_23 = {"RMSNormalization", "RotaryEmbedding", "Attention"}


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_next_experts", "gemma3_scaled"])
def test_models_are_valid_at_every_opset(name, opset, dtype):
    model = window_model(planned(name), WindowSettings(**SIZES, opset=opset, dtype=dtype))
    shapes = [value.shape for node in model.graph for value in node.outputs]
    assert all(shape is not None and all(isinstance(size, int) for size in shape) for shape in shapes)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    assert {each.domain: each.version for each in proto.opset_import} == {"": opset}
    ops = {node.op_type for node in proto.graph.node}
    assert (opset >= 23) == bool(STANDARD_SINCE_23 & ops)
    assert proto.graph.node[-1].output[0] == "logits" or "logits" not in {
        node.output[0] for node in proto.graph.node if node.op_type == "Cast"
    }


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", FAMILIES)
def test_onnx_runtime_computes_the_same_at_every_opset(name, opset):
    tokens = np.array([input_ids(name)[:8]])
    outputs = []
    for version in {opset, 23}:
        session = open_model(window_model(planned(name), WindowSettings(**SIZES, opset=version, dtype="fp32")))
        states = {v.name: np.zeros(v.shape, np.float32) for v in session.get_inputs() if v.name.startswith("past")}
        mask = (np.arange(24) >= 16).astype(np.int64)[None]
        outputs.append(session.run(None, {"input_ids": tokens, "attention_mask": mask, **states}))
    for one, other in zip(outputs[0], outputs[-1], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(1, np.abs(other).max()))
    np.testing.assert_allclose(outputs[0][0][0], expected_logits(name)[:8], rtol=0, atol=1e-4)


def test_float16_keeps_norms_and_softmax_in_float32_and_casts_no_logits():
    for opset in OPSETS:
        model = window_model(planned("llama_gqa"), WindowSettings(**SIZES, opset=opset))
        wide = {"ReduceMean", "Softmax", "RMSNormalization"}
        nodes = [node for node in model.graph if node.op_type in wide]
        assert nodes
        assert {node.outputs[0].dtype for node in nodes} == {ir.DataType.FLOAT}
        attention = [node for node in model.graph if node.op_type == "Attention"]
        assert all(node.attributes["softmax_precision"].as_int() == ir.DataType.FLOAT for node in attention)
        logits = model.graph.outputs[0]
        assert logits.producer().op_type == "MatMul"
        assert logits.dtype == ir.DataType.FLOAT16


def test_tied_head_is_stored_once():
    model = window_model(planned("llama_tied"), WindowSettings(**SIZES))
    assert "lm_head.weight" not in model.graph.initializers
    scaled = window_model(planned("gemma3_window_5"), WindowSettings(**SIZES))
    assert "lm_head.weight" in scaled.graph.initializers  # the embedding's table is multiplied


@pytest.mark.parametrize(
    "names",
    [("layers.4", "layers.5", "layers.6"), ("stem", "blocks.7", "top"), ("layers.3.a", "layers.3.b", "layers.9")],
)
def test_states_are_numbered_regardless_of_layer_names(names):
    decoder = planned("llama_gqa")
    text = decoder.plan.to_json()
    for index, name in enumerate(names):
        text = text.replace(f"layers.{index}.self_attn.key_cache", f"{name}.key_cache")
        text = text.replace(f"layers.{index}.self_attn.value_cache", f"{name}.value_cache")
    renamed = Planned(source=decoder.source, decoder=decoder.decoder, plan=Plan.from_json(text))
    states = [f"{number}.{kind}" for number in range(3) for kind in ("key", "value")]
    for model in (window_model(renamed, WindowSettings(**SIZES)), window_model(decoder, WindowSettings(**SIZES))):
        assert [v.name for v in model.graph.inputs[2:]] == [f"past_key_values.{state}" for state in states]
        assert [v.name for v in model.graph.outputs[1:]] == [f"present.{state}" for state in states]


def test_metadata_holds_plan_settings_and_frequencies():
    decoder = planned("phi3_longrope_long")
    model = window_model(decoder, WindowSettings(**SIZES))
    assert model.producer_name == "chunkrt"
    assert Plan.from_json(model.metadata_props[PLAN_KEY]) == decoder.plan
    settings = json.loads(model.metadata_props[SETTINGS_KEY])
    assert settings == {
        "form": "window",
        "dtype": "fp16",
        "opset": 18,
        "weights": "float",
        **SIZES,
        "keys": "pre-rope",
        "logits": "all",
        "batch": 1,
        "sinks": 0,
        "cache": True,
    }
    rope = json.loads(model.metadata_props[ROPE_KEY])["model.rope"]
    positions = np.arange(decoder.plan.context_length)
    tables = [rope["magnitude"] * np.cos(np.outer(positions, f)) for f in np.array(rope["frequencies"])]
    np.testing.assert_array_equal(np.concatenate(tables).astype(np.float32), decoder.load("model.rope.cos"))


def test_weights_keep_their_names_and_values():
    decoder = planned("llama_gqa")
    model = window_model(decoder, WindowSettings(**SIZES, dtype="fp32"))
    weights = [t.name for t in decoder.plan.tensors.values() if t.kind == "weight" and ".rope." not in t.name]
    assert len(weights) > 10
    for name in weights:
        np.testing.assert_array_equal(model.graph.initializers[name].const_value.numpy(), decoder.load(name))


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3_next"])
def test_external_data_is_loaded_again(tmp_path, name):
    model = window_model(planned(name), WindowSettings(**SIZES, dtype="fp32"))
    told = []
    save_model(model, tmp_path / "a.onnx", external_data=True, progress=lambda done, total: told.append((done, total)))
    save_model(model, tmp_path / "b.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "a.onnx.data", "b.onnx"]
    onnx.checker.check_model(str(tmp_path / "a.onnx"), full_check=True)
    assert told[-1][0] == told[-1][1] > 5
    (tmp_path / "elsewhere").mkdir()
    for file in ("a.onnx", "a.onnx.data"):
        (tmp_path / file).rename(tmp_path / "elsewhere" / file)
    apart, alone = (OnnxSession(tmp_path / path, threads=1) for path in ("elsewhere/a.onnx", "b.onnx"))
    tokens = input_ids(name)[:11]
    np.testing.assert_array_equal(apart.run(tokens), alone.run(tokens))


@pytest.mark.parametrize("external_data", [True, False])
def test_weights_are_read_when_the_model_is_written_and_dropped_at_once(tmp_path, external_data):
    """With external data at most two arrays live at a time: the loaded one and the written one."""
    alive, most, loaded = set(), 0, []

    class Counting(Planned):
        def load(self, name):
            nonlocal most
            weight = super().load(name) + np.float32(0)  # a private array, not a map of the checkpoint
            alive.add(id(weight))
            weakref.finalize(weight, alive.discard, id(weight))
            most = max(most, len(alive))
            loaded.append(name)
            return weight

    decoder = planned("llama_gqa")
    counting = Counting(source=decoder.source, decoder=decoder.decoder, plan=decoder.plan)
    model = window_model(counting, WindowSettings(**SIZES))
    assert not alive
    assert not [name for name in loaded if "proj" in name or "lm_head" in name or "embed" in name]
    loaded.clear()
    save_model(model, tmp_path / "decoder.onnx", external_data=external_data)
    assert most <= 2
    assert not alive
    weights = {t.name for t in decoder.plan.tensors.values() if t.kind == "weight"}
    assert set(loaded) == weights
    assert all(loaded.count(name) == 1 for name in weights if ".rope." not in name)


def test_model_that_exceeds_one_file_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(save_module, "LARGEST_FILE", 10_000)
    model = window_model(planned("llama_gqa"), WindowSettings(**SIZES))
    with pytest.raises(ConfigError, match="one ONNX file holds 2 GB; use --external-data"):
        save_model(model, tmp_path / "decoder.onnx")
    assert not list(tmp_path.iterdir())
    save_model(model, tmp_path / "decoder.onnx", external_data=True)


@pytest.mark.parametrize("external_data", [True, False])
def test_failed_export_leaves_no_files(tmp_path, external_data):
    decoder = planned("llama_gqa")

    class Failing(Planned):
        def load(self, name):
            return super().load(name) * np.float32(1e9 if name.endswith("down_proj.weight") else 1)

    failing = Failing(source=decoder.source, decoder=decoder.decoder, plan=decoder.plan)
    with pytest.raises(QuantizationError, match=r"down_proj.weight holds .*which exceeds float16's 65504"):
        save_model(window_model(failing, WindowSettings(**SIZES)), tmp_path / "d.onnx", external_data=external_data)
    assert not list(tmp_path.iterdir())


def test_static_subgraphs_equal_the_plans(tmp_path):
    """Each computes the same as the reference's operators for the same inputs."""
    decoder = planned("llama_gqa")
    files = save_static_subgraphs(decoder, tmp_path, SubgraphSettings(window=8, dtype="fp32"))
    static = [s.name for s in decoder.plan.static_subgraphs]
    assert [path.stem.partition("_")[2] for path in files] == static
    rng = np.random.default_rng(0)
    for path, subgraph in zip(files, decoder.plan.static_subgraphs, strict=True):
        onnx.checker.check_model(str(path), full_check=True)
        session = ort.InferenceSession(str(path))
        assert [value.name for value in session.get_inputs()] == list(subgraph.inputs)
        feeds = {value.name: rng.standard_normal(value.shape, np.float32) for value in session.get_inputs()}
        results = dict(zip([v.name for v in session.get_outputs()], session.run(None, feeds), strict=True))
        expected = reference(decoder, subgraph, {name: array[0] for name, array in feeds.items()})
        assert set(results) == set(subgraph.outputs)
        for name, result in results.items():
            np.testing.assert_allclose(result[0], expected[name], rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match="exists already"):
        save_static_subgraphs(decoder, tmp_path, SubgraphSettings(window=8))


def test_static_subgraphs_are_written_all_or_none(tmp_path):
    """An interruption (here Ctrl-C, at the second one) leaves no files."""
    done = []

    def interrupt(number, total):
        done.append(number)
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_static_subgraphs(planned("llama_gqa"), tmp_path, SubgraphSettings(window=8), progress=interrupt)
    assert done == [0, 1]
    assert not list(tmp_path.iterdir())


def reference(decoder, subgraph, inputs):
    """Return its outputs from the operators of the reference backend."""
    from chunkrt.compile.calibrate import run_node

    values = {"": None, **inputs, **{name: decoder.load(name) for name in subgraph.weights}}
    for node in subgraph.nodes:
        results = run_node(node, values)
        values.update(zip(node.outputs, results if isinstance(results, tuple) else (results,), strict=True))
    return values


def dynamic_decoder(folder, **config):
    """Return a decoder whose heads have a number of dimensions that ONNX Runtime's attention supports."""
    config = {"head_dim": 16, **config}
    if config.get("model_type") not in ("gemma2", "gpt_oss"):
        return plan_checkpoint(write_folder(folder, **config), {})
    source, family = RandomCheckpoint({**CONFIG, **config}), DECODERS[config["model_type"]]
    decoder = family.build(read_config(source, family.defaults)).named()
    shapes = {name: shape for p in decoder.parameters() for name, shape in p.checkpoint_tensors.items()}
    random = RandomCheckpoint(source.config, shapes=shapes)
    return Planned(source=random, decoder=decoder, plan=partition(trace(decoder), family=config["model_type"]))


@pytest.mark.parametrize("opset", [14, 23])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"model_type": "mistral", "sliding_window": 5},
        {"model_type": "smollm3", "no_rope_layers": [1, 0], "attention_bias": False},
        {"model_type": "gemma2", "sliding_window": 5, "attn_logit_softcapping": 0.75},
        {"model_type": "gpt_oss", "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    ],
    ids=["all", "window", "no_rope", "soft_cap", "sinks"],
)
def test_dynamic_form_equals_a_window_of_the_context(tmp_path, sizes, dtype, opset):
    decoder = dynamic_decoder(tmp_path / "tiny", **sizes)
    model = dynamic_model(decoder, DynamicSettings(context=64, dtype=dtype, opset=opset))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    session = open_model(model)
    tokens = np.random.default_rng(0).integers(0, decoder.plan.vocab_size, 33)
    kind = np.float16 if dtype == "fp16" else np.float32
    states = {
        v.name: np.zeros((1, v.shape[1], 0, v.shape[3]), kind)
        for v in session.get_inputs()
        if v.name.startswith("past_key_values.")
    }
    logits, done = [], 0
    for count in (9, 1, 1, 22):
        mask = np.ones((1, done + count), np.int64)
        feeds = {"input_ids": tokens[None, done : done + count], "attention_mask": mask, **states}
        names = [value.name for value in session.get_outputs()]
        results = dict(zip(names, session.run(names, feeds), strict=True))
        logits.append(results.pop("logits")[0])
        states = {name.replace("present.", "past_key_values."): state for name, state in results.items()}
        done += count
    whole = OnnxSession(
        saved(decoder, tmp_path / "w.onnx", window=33, sequence=33, context=33, dtype="fp32"), threads=1
    )
    expected = whole.run(tokens)
    atol = 1e-4 if dtype == "fp32" else 2e-2 * np.abs(expected).max()
    np.testing.assert_allclose(np.concatenate(logits), expected, rtol=0, atol=atol)


def saved(decoder, path, **settings):
    """Save a window to a file."""
    save_model(window_model(decoder, WindowSettings(**settings)), path)
    return path


def test_unsupported_dynamic_form_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"lfm2 has layers of linear attention.*fixed window"):
        dynamic_model(planned("lfm2"), DynamicSettings(context=64))
    with pytest.raises(UnsupportedModelError, match=r"its heads have \d+ dimensions"):
        dynamic_model(planned("qwen3"), DynamicSettings(context=64))


def test_dynamic_form_of_rotations_that_onnx_runtime_lacks_is_refused():
    """Its GroupQueryAttention checks that the tables have a multiple of 8 columns."""
    source = RandomCheckpoint({**CONFIG, "head_dim": 16})
    config, rope = read_config(source), RotaryTables(np.ones(4), 64)
    layer = Layer(config, Attention(config, rope), FeedForward(config))
    decoder = CausalDecoder(config, Body(config, rope, [layer])).named()
    partial = Planned(source=source, decoder=decoder, plan=partition(trace(decoder), family="llama"))
    with pytest.raises(UnsupportedModelError, match="its RoPE rotates 8 dimensions of each head"):
        dynamic_model(partial, DynamicSettings(context=64))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 0}, "--window is 0, expected at least 1"),
        ({"window": 25}, "--window is 25 and --sequence 24"),
        ({"sequence": 33}, "--sequence is 33 and --context 32; the caches cannot hold the sequence"),
        ({"dtype": "bf16"}, "--dtype is 'bf16', expected fp16 or fp32"),
        ({"opset": 17}, "--opset is 17, expected one of 14, 18, 21, 23"),
        ({"keys": "roped"}, "--keys is 'roped', expected pre-rope or post-rope"),
    ],
)
def test_invalid_settings(wrong, message):
    with pytest.raises(ConfigError, match=message):
        WindowSettings(**SIZES | wrong)


def test_sequence_that_exceeds_the_models_context():
    with pytest.raises(ConfigError, match="--sequence is 129, longer than the model's context of 128"):
        window_model(planned("llama_gqa"), WindowSettings(window=1, sequence=129, context=200))
    window_model(planned("llama_gqa"), WindowSettings(window=1, sequence=128, context=200))
    assert checkpoint("llama_gqa").is_dir()
