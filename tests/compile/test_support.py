"""`chunkrt support`: the report agrees with the backends, and names missing parts, for any file."""

import json
import re
import shutil
from contextlib import suppress
from math import inf

import gguf
import numpy as np
import pytest
from fixture_checkpoints import NAMES, checkpoint
from one_line import expect_one_line
from safetensors.numpy import load_file, save_file

from chunkrt.backends import Support, make_backend
from chunkrt.backends.dispatch import registered_operators
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.checkpoints.gguf import GgufSource
from chunkrt.checkpoints.gguf_names import ARCHITECTURES
from chunkrt.checkpoints.safetensors import SafetensorsSource
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.compile.support_report import check_support
from chunkrt.errors import BackendUnavailableError, ModelError
from chunkrt.graph.decoders import FAMILIES
from chunkrt.quant.scheme import find_scheme
from chunkrt.tokenizer import Tokenizer

HIDDEN, INNER, HEADS, VOCAB = 32, 64, 2, 8
LLAMA_KEYS = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
LLAMA_SHAPES = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "blk.0.attn_norm.weight": (HIDDEN,),
    **{f"blk.0.attn_{part}.weight": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")},
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (INNER, HIDDEN),
    "blk.0.ffn_up.weight": (INNER, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INNER),
    "output_norm.weight": (HIDDEN,),
}
LLAMA_TENSORS = {name: np.zeros(shape, np.float32) for name, shape in LLAMA_SHAPES.items()}
RWKV_CONFIG = {"model_type": "rwkv", "num_hidden_layers": 2, "hidden_size": 8, "state_size": 16}


def write_gguf(path, architecture="llama", keys=None, tensors=None, **metadata):
    writer = gguf.GGUFWriter(path, architecture)
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in (LLAMA_KEYS | (keys or {})).items():
        add[type(value)](f"{architecture}.{key}", value)
    for key, value in metadata.items():
        add[type(value)](f"tokenizer.ggml.{key}", value)
    for name, values in (LLAMA_TENSORS if tensors is None else tensors).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_rwkv(folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(RWKV_CONFIG))
    names = ["backbone.layers.0.mixer.A_log", "backbone.layers.1.mixer.A_log", "model.norm.weight"]
    save_file({name: np.zeros(8, np.float32) for name in names}, folder / "model.safetensors")
    return folder


def altered(tmp_path, name, tensors=lambda tensors: None, **config):
    """Return a copy of a fixture with another config, and with its tensors changed in place."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(name), folder)
    given = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(given))
    weights = load_file(folder / "model.safetensors")
    tensors(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


class WithoutSplit(ReferenceBackend):
    """A backend that lacks an operator."""

    name = "fake"

    def supports(self, subgraph, plan, scheme):
        bad = [node.name for node in subgraph.nodes if node.op == "Split"]
        return Support(ok=False, node=bad[0], reason="fake cannot split") if bad else Support(ok=True)


def features(report):
    return {feature.name: feature.asked for feature in report.features}


def refused(report):
    return {feature.name: feature.reason for feature in report.features if feature.reason}


@pytest.mark.parametrize("name", NAMES)
def test_fixtures_are_supported_as_by_the_backends(name):
    """The only missing operators are those that a backend refuses for complete subgraphs."""
    path = checkpoint(name)
    report, plan = check_support(path), plan_checkpoint(path, {}).plan
    assert report.model_type == plan.family
    module = FAMILIES[plan.family].build.__module__
    assert report.module == module.replace(".", "/") + ".py"
    assert refused(report) == {}
    tensors = report.tensors
    assert tensors.num_found >= tensors.num_needed
    assert (*tensors.missing, *tensors.unread, *tensors.misfits, *tensors.unreadable) == ()
    assert report.tokenizer.reason == ""
    assert report.refused_subgraphs == []
    nodes = [node for subgraph in plan.subgraphs for node in subgraph.nodes]
    assert sum(operator.num_nodes for operator in report.operators) == len(nodes)
    for backend in (make_backend(name, threads=1) for name in ("reference", "native", "onnxrt")):
        takes_all = all(backend.supports(s, plan, find_scheme("w8a8-dynamic")) for s in plan.subgraphs)
        lacks = [operator.name for operator in report.operators if operator.refusals[backend.name]]
        assert takes_all == (not lacks)
    assert all(gap.endswith((" on native", " on onnxrt")) for gap in report.gaps)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lfm2", {"layer_types": r"\d attention, \d short_conv"}),
        ("gemma3_window_5", {"sliding_window": "5 tokens in 5 layers", "hidden_act": "gelu_tanh"}),
        ("gemma3_scaled", {"rope_scaling": "linear"}),
        ("phi3_longrope_gguf", {"rope_scaling": "longrope"}),
        ("llama_rope_llama3_gguf", {"rope_scaling": "rope_freqs.weight"}),
        ("llama_tied", {"tie_word_embeddings": "yes"}),
        ("qwen2", {"biases": "q_proj, k_proj, v_proj"}),
        ("qwen3_next_experts", {"num_experts": r"\d of \d"}),
        ("granitemoe", {"num_experts": "2 of 6"}),
        ("falcon_h1", {"layer_types": "2 attention, 2 mamba2"}),
    ],
)
def test_supported_features_are_reported(name, expected):
    found = features(check_support(checkpoint(name)))
    for key, pattern in expected.items():
        assert re.fullmatch(pattern, found[key]), found


def test_unknown_gguf_architecture(tmp_path, command):
    tensors = {"token_embd.weight": np.zeros((8, 32), np.float32), "blk.0.ssm_thing.weight": np.zeros(32, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "lama", tensors=tensors)
    report = check_support(path)
    assert (report.architecture, report.model_type, report.module) == ("lama", "", "")
    assert report.known[0] == "llama"
    assert sorted(report.known) == sorted(ARCHITECTURES)
    assert report.sizes == {"layers": 1, "hidden size": 32, "heads": 2, "context": 64}
    assert report.tensors.unread == ["blk.0.ssm_thing.weight"]
    assert (report.tensors.num_found, report.tensors.num_needed) == (2, None)
    finished = command("support", path)
    assert (finished.status, finished.err) == (3, "")
    assert "architecture lama: not known\nknown, nearest first: llama, " in finished.out


def test_unknown_hugging_face_folder(tmp_path, command):
    folder = write_rwkv(tmp_path / "rwkv")
    report = check_support(folder)
    assert (report.format, report.architecture, report.module) == ("safetensors", "rwkv", "")
    assert sorted(report.known) == sorted(FAMILIES)
    assert report.sizes == {"layers": 2, "hidden size": 8}
    assert report.tensors.unread == ["backbone.layers.0.mixer.A_log", "backbone.layers.1.mixer.A_log"]
    assert report.gaps[0] == "architecture 'rwkv'"
    assert command("support", folder).status == 3


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path, command):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.extra.weight"] = np.zeros(3, np.float32)
        tensors["model.layers.0.input_layernorm.weight"] = np.zeros(3, np.float32)

    folder = altered(tmp_path, "llama_gqa", change)
    report = check_support(folder)
    assert report.tensors.missing == ["model.norm.weight"]
    assert report.tensors.unread == ["model.extra.weight"]
    assert "tensor model.layers.0.input_layernorm.weight is [3], expected" in report.tensors.misfits[0]
    assert len(report.tensors.misfits) == 1
    assert report.operators, "the plan is told nevertheless"
    finished = command("support", folder)
    assert finished.status == 3
    assert "missing: in the checkpoint: model.norm.weight\n" in finished.out
    assert "missing: a part that reads model.extra.weight\n" in finished.out


def test_gguf_tensor_outside_the_mapping_is_named(tmp_path):
    tensors = LLAMA_TENSORS | {"blk.0.attn_sinks": np.zeros(2, np.float32)}
    report = check_support(write_gguf(tmp_path / "m.gguf", tensors=tensors))
    assert report.tensors.unread == ["blk.0.attn_sinks"]
    assert report.tensors.num_found == report.tensors.num_needed + 1
    assert report.gaps == ["a part that reads blk.0.attn_sinks"]


def test_type_that_cannot_be_dequantised_is_named(tmp_path):
    tensors = LLAMA_TENSORS | {"blk.0.attn_q.weight": np.zeros((HIDDEN, HIDDEN), np.int32)}
    report = check_support(write_gguf(tmp_path / "m.gguf", tensors=tensors))
    assert report.tensors.types == {"F32": len(tensors) - 1, "I32": 1}
    assert report.tensors.unreadable == ["I32"]
    assert report.gaps == ["dequantisation of I32"]


def test_quantised_folder_is_named(tmp_path):
    def change(tensors):
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors[name] = tensors[name].astype(np.uint8)

    report = check_support(altered(tmp_path, "llama_gqa", change, quantization_config={"quant_method": "gptq"}))
    assert "another library" in refused(report)["quantization_config"]
    assert report.tensors.unreadable == ["U8"]


@pytest.mark.parametrize(
    ("metadata", "gap"),
    [
        ({"model": "gpt2", "pre": "martian"}, "tokenizer gpt2 martian"),
        ({"model": "bert"}, "tokenizer bert"),
    ],
)
def test_unknown_tokenizer_is_named(tmp_path, metadata, gap):
    report = check_support(write_gguf(tmp_path / "m.gguf", **metadata))
    assert report.gaps == [gap]
    assert "is not implemented" in report.tokenizer.reason


def test_all_refused_keys_of_a_gguf_are_named_at_once(tmp_path):
    keys = {"expert_count": 8, "attention.max_alibi_bias": 8.0}
    report = check_support(write_gguf(tmp_path / "m.gguf", keys=keys))
    assert sorted(refused(report)) == ["llama.attention.max_alibi_bias", "llama.expert_count"]
    assert features(report)["llama.expert_count"] == "8"
    assert report.operators


def test_gguf_without_a_valid_config_is_incomplete(tmp_path):
    factors = {f"rope_factors_{kind}.weight": np.ones(HIDDEN // HEADS // 2, np.int32) for kind in ("long", "short")}
    report = check_support(write_gguf(tmp_path / "m.gguf", "phi3", tensors=LLAMA_TENSORS | factors))
    assert report.module
    assert "rope_factors_long.weight is stored as I32" in refused(report)["config"]
    assert report.gaps[0] == "feature config"
    assert (report.tensors.num_needed, report.operators) == (None, ())


@pytest.mark.parametrize(
    ("name", "config", "names"),
    [
        ("llama_gqa", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {"rope_scaling"}),
        ("llama_gqa", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, {"rope_scaling"}),
        ("llama_gqa", {"sliding_window": 5, "hidden_act": "mish"}, {"sliding_window", "hidden_act"}),
        ("gemma3_window_5", {"use_bidirectional_attention": True}, {"use_bidirectional_attention"}),
        ("gemma3_window_5", {"layer_types": ["chunked_attention"] * 6}, {"layer_types"}),
    ],
)
def test_unsupported_features_are_named(tmp_path, command, name, config, names):
    """All of them are named, and the rest is checked as if the config did not have them."""
    folder = altered(tmp_path, name, **config)
    report = check_support(folder)
    assert set(refused(report)) == names
    assert report.gaps == [f"feature {feature}" for feature in refused(report)]
    assert report.tensors.missing == []
    assert report.operators
    assert command("support", folder).status == 3


def test_backend_that_lacks_an_operator_is_named():
    report = check_support(checkpoint("llama_gqa"), backends=[ReferenceBackend(), WithoutSplit()])
    (split,) = (operator for operator in report.operators if operator.refusals["fake"])
    assert split.name == "Split"
    assert split.refusals == {"reference": "", "fake": "fake cannot split", "npu": ""}
    assert report.gaps == ["Split on fake"]


def test_operator_that_a_plug_in_has_is_not_missing(monkeypatch):
    registry = registered_operators().copy()
    with registry.from_distribution("toy"):
        registry.register("split", "fake")(lambda x: x)
    monkeypatch.setattr("chunkrt.backends.coverage.registered_operators", lambda: registry)
    report = check_support(checkpoint("llama_gqa"), backends=[WithoutSplit()])
    assert report.gaps == []


@pytest.mark.parametrize("tables", [{}, {"tokens": ["a"] * VOCAB}])
def test_tokenizer_without_its_tables_is_refused_as_at_a_load(tmp_path, tables):
    path = write_gguf(tmp_path / "m.gguf", model="gpt2", pre="default", **tables)
    with pytest.raises(ModelError) as at_load:
        Tokenizer.from_source(open_checkpoint(path))
    with pytest.raises(ModelError, match=re.escape(str(at_load.value))):
        check_support(path)


def test_subgraphs_that_the_npu_refuses_are_named(monkeypatch, command):
    monkeypatch.setattr(
        "chunkrt.backends.qnn.htp_support.OPERATORS", ("Add", "MatMul", "Mul", "RMSNormalization", "Split")
    )
    report = check_support(checkpoint("gemma3_window_5"))
    assert [subgraph.name for subgraph in report.refused_subgraphs] == [f"static.{i}" for i in range(1, 7)]
    assert all("the NPU does not support Gelu" in subgraph.reason for subgraph in report.refused_subgraphs)
    assert report.gaps == ["Gelu on npu", "on the NPU: static.1, static.2, static.3 and 3 more"]
    finished = command("support", checkpoint("gemma3_window_5"))
    assert finished.status == 3
    assert "not for the NPU" in finished.out


def test_unavailable_backend_does_not_count_as_missing(monkeypatch, command):
    def make(name, *, threads):
        if name == "native":
            raise BackendUnavailableError("not built")
        return make_backend(name, threads=threads)

    monkeypatch.setattr("chunkrt.backends.coverage.make_backend", make)
    report = check_support(checkpoint("llama_gqa"))
    assert (report.unavailable, report.gaps) == ({"native": "not built"}, [])
    assert "native was not checked: not built" in command("support", checkpoint("llama_gqa")).out


def test_json_has_the_complete_report(command, tmp_path):
    finished = command("support", checkpoint("lfm2"), "--json")
    assert finished.status == 0
    found = json.loads(finished.out)
    assert found == json.loads(json.dumps(check_support(checkpoint("lfm2")).to_dict()))
    assert found["gaps"] == []
    assert {operator["name"] for operator in found["operators"]} >= {"LinearAttention[short_conv]", "CachedAttention"}
    finished = command("support", write_rwkv(tmp_path / "rwkv"), "--json")
    assert finished.status == 3
    assert json.loads(finished.out)["gaps"][0] == "architecture 'rwkv'"


def test_no_weight_is_read(monkeypatch):
    def read(*arguments):
        raise AssertionError("a weight is read")

    for source in (GgufSource, SafetensorsSource):
        monkeypatch.setattr(source, "read", read)
        monkeypatch.setattr(source, "read_blocks", read)
    assert check_support(checkpoint("llama_biased_gguf")).operators
    assert check_support(checkpoint("llama_gqa")).operators


def test_damaged_file_prints_one_line(tmp_path, command):
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.gguf").write_text("not a model")
    folder = altered(tmp_path, "llama_gqa")
    (folder / "tokenizer.json").write_text("{")
    for path in (tmp_path / "cut.gguf", tmp_path / "text.gguf", folder, tmp_path / "nothing.gguf", "no-such-model"):
        finished = command("support", path)
        expect_one_line(finished, "chunkrt: ", 1)
        assert "unexpected" not in finished.err


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama_gqa", "hidden_size"),
        ("llama_gqa", "num_attention_heads"),
        ("llama_gqa", "vocab_size"),
        ("gemma3_window_5", "head_dim"),
        ("phi3_longrope_long", "rope_scaling"),
        ("gemma3_window_5", "rope_scaling"),
        ("lfm2", "full_attn_idxs"),
        ("qwen3_next_experts", "mlp_only_layers"),
        ("qwen3_next_experts", "num_experts"),
        ("qwen3_next_experts", "linear_key_head_dim"),
        ("qwen3_next_experts", "linear_num_value_heads"),
        ("llama_gqa", "norm_offset"),
        ("ernie4_5_moe", "moe_layer_end_index"),
        ("ernie4_5_moe", "moe_num_experts"),
        ("ernie4_5_moe", "moe_num_shared_experts"),
        ("exaone4_hybrid", "sliding_window_pattern"),
        ("gemma4", "hidden_size_per_layer_input"),
        ("gemma4", "num_kv_shared_layers"),
        ("gemma4_alike", "per_layer_config"),
        ("granite", "residual_multiplier"),
        ("granite_hybrid", "layer_types"),
        ("granitemoeshared", "shared_intermediate_size"),
        ("gpt_oss", "swiglu_limit"),
        ("lfm2_moe", "num_dense_layers"),
        ("lfm3", "rope_parameters"),
        ("minicpm", "dim_model_base"),
        ("olmo3", "rope_scaling"),
        ("smollm3_window", "no_rope_layer_interval"),
        ("smollm3_window", "no_rope_layers"),
        ("smollm3_window", "rope_scaling"),
    ],
)
@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("value", [-1, 2**31, 2**62, 10**30, 0.5, inf, "x", "", [1], ["x"], {}, {"a": {}}, True])
def test_hostile_config_is_reported_or_refused_at_once(tmp_path, name, key, value):
    folder = altered(tmp_path, name, **{key: value})
    with suppress(ModelError):
        assert check_support(folder, backends=[ReferenceBackend()]).model_type


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama_gqa", "dense"),
        ("glm4_moe", "mixture"),
        ("olmoe", "mixture"),
        ("lfm2", "hybrid"),
        ("qwen3_next_experts", "hybrid mixture"),
    ],
)
def test_support_report_names_the_kind_of_decoder(name, kind):
    report = check_support(checkpoint(name))
    assert report.kind == kind
    works = {stage for stage, reason in report.stages.items() if not reason}
    assert works >= {"config", "tensors", "graph", "reference", "native", "export"}
    assert report.stages["tokenizer"] == "the model has none"


def test_support_stages_name_missing_parts(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama_gqa"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}))
    report = check_support(folder)
    assert "dynamic" in report.stages["config"]
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))
    report = check_support(folder)
    assert (report.kind, report.stages["config"], report.stages["graph"]) == ("new", "not known", "not built")
