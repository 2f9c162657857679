"""Layouts that other tools give a decoder's checkpoint: the logits are those of the plain one."""

import json
import shutil

import gguf
import numpy as np
import pytest
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from safetensors.numpy import load_file, save_file

import chunkrt
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.compile.support_report import check_support
from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.onnx.exporting import WindowSettings, window_model

FAMILIES = ("gemma3_window_5", "lfm2", "llama_gqa", "llama_tied", "mistral_window_5", "phi3_longrope_short", "qwen2")
FAMILIES += ("qwen3_layer_types", "qwen3_5", "qwen3_next_experts")
COMPOSITES = {
    "gemma3_window_5": "gemma3",
    "gemma4": "gemma4",
    "gemma4_unified": "gemma4_unified",
    "mistral_window_5": "mistral3",
    "qwen3_5": "qwen3_5",
}
COMPOSITES |= {"qwen3_5_moe": "qwen3_5_moe"}
OTHER_HALVES = {
    "vision_tower.a.weight": np.ones(3, np.float32),
    "multi_modal_projector.b": np.ones(2, np.float32),
    "visual.c": np.ones(1, np.float32),
}


def write(folder, name, rename=lambda tensor: tensor, more=(), config=lambda config: config):
    """Write a fixture whose tensors have other names, with additional tensors and another config."""
    shutil.copytree(checkpoint(name), folder)
    tensors = {rename(n): value for n, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors | dict(more), folder / "model.safetensors")
    settings = config(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def expect_logits(path, name):
    report = check_support(path)
    assert (report.tensors.missing, report.tensors.unread, report.tensors.misfits) == ([], [], [])
    with chunkrt.load(path, npu="reference", scheme="float", cache_dtype="float32") as engine:
        found = engine.session().prefill(input_ids(name), logits="all").logits
    np.testing.assert_allclose(found, expected_logits(name), rtol=0, atol=1e-4)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", FAMILIES)
def test_load_takes_tensors_without_the_models_prefix(tmp_path, name):
    """`AutoModel.save_pretrained` writes them so; here the LM head is stored with them."""
    expect_logits(write(tmp_path / "m", name, lambda tensor: tensor.removeprefix("model.")), name)


def composite_config(model_type):
    def change(config):
        whole = {key: config.pop(key) for key in ("bos_token_id", "eos_token_id") if key in config}
        return {"model_type": model_type, "vision_config": {"hidden_size": 4}, "text_config": config} | whole

    return change


@pytest.mark.parametrize("name", COMPOSITES)
@pytest.mark.parametrize(
    ("body", "head"),
    [
        ("model.language_model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
        ("language_model.", "lm_head."),
    ],
)
def test_load_reads_the_text_half_of_a_composite_checkpoint(tmp_path, caplog, name, body, head):
    def rename(tensor):
        is_head = tensor.startswith("lm_head.")
        return head + tensor.removeprefix("lm_head.") if is_head else body + tensor.removeprefix("model.")

    prefix = "model." if body.startswith("model.") else ""
    more = {prefix + tensor: value for tensor, value in OTHER_HALVES.items()}
    folder = write(tmp_path / "m", name, rename, more, composite_config(COMPOSITES[name]))
    check_support(folder)
    parts = ", ".join(f"{prefix}{part}.*" for part in ("multi_modal_projector", "vision_tower", "visual"))
    assert caplog.messages == [f"m: only text is read; ignoring 3 tensors: {parts}"]
    expect_logits(folder, name)


def test_load_takes_keys_and_values_of_layers_that_share_caches(tmp_path, caplog):
    """Published Gemma 4 folders contain these tensors, which Transformers ignores (`Gemma4TextModel.__init__`)."""
    more = {
        f"model.layers.5.self_attn.{part}.weight": np.ones(2, np.float32) for part in ("k_proj", "v_proj", "k_norm")
    }
    more |= {f"model.embed_{half}.embedding_projection.weight": np.ones(2, np.float32) for half in ("audio", "vision")}
    folder = write(tmp_path / "m", "gemma4", more=more, config=composite_config("gemma4"))
    check_support(folder)
    assert caplog.messages == ["m: only text is read; ignoring 2 tensors: model.embed_audio.*, model.embed_vision.*"]
    expect_logits(folder, "gemma4")


def test_support_takes_keys_that_a_published_gemma_omits(tmp_path):
    """Gemma 3 4B's config leaves the vocabulary and the heads to Transformers' `Gemma3TextConfig`."""
    given = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 1}
    folder = write(tmp_path / "m", "gemma3_window_5", config=lambda c: {"model_type": "gemma3", "text_config": given})
    assert check_support(folder).tensors.misfits[0].endswith("expected [262208, 2560]")


def test_load_refuses_a_composite_with_an_unsupported_text_half(tmp_path):
    """Ministral 3 scales queries by position, which no family here does."""
    text = {"model_type": "ministral3"}
    folder = write(tmp_path / "m", "llama_gqa", config=lambda c: {"model_type": "mistral3", "text_config": text})
    with pytest.raises(UnsupportedModelError, match="architecture 'ministral3' is not supported"):
        chunkrt.load(folder, npu="reference", scheme="float")


def test_load_refuses_a_composite_without_a_text_half(tmp_path):
    folder = write(tmp_path / "m", "llama_gqa", config=lambda config: {"model_type": "gemma3"})
    with pytest.raises(ModelError, match=r"has no text_config, which the model_type 'gemma3' needs"):
        chunkrt.load(folder, npu="reference", scheme="float")


@pytest.mark.parametrize("name", ["llama_tied", "gemma3_window_5", "lfm2"])
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_load_reads_a_tied_table_under_the_heads_name(tmp_path, name, prefix):
    def rename(tensor):
        return "lm_head.weight" if "embed_tokens" in tensor else prefix + tensor.removeprefix("model.")

    expect_logits(write(tmp_path / "m", name, rename), name)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_load_ignores_multi_token_prediction_with_one_line(tmp_path, name, caplog):
    more = {"mtp.fc.weight": np.ones((2, 2), np.float32), "mtp.layers.0.mlp.gate.weight": np.ones(2, np.float32)}
    expect_logits(write(tmp_path / "m", name, more=more), name)
    said = "m: one token at a time is predicted; ignoring 2 tensors of multi-token prediction: mtp.*"
    assert caplog.messages == [said]


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_load_ignores_layers_that_predict_more_tokens_with_one_line(tmp_path, name, caplog):
    num_layers = json.loads((checkpoint(name) / "config.json").read_text())["num_hidden_layers"]
    tensors = ("eh_proj", "shared_head.norm", "mlp.gate")
    more = {f"model.layers.{num_layers}.{tensor}.weight": np.ones(2, np.float32) for tensor in tensors}
    folder = write(tmp_path / "m", name, more=more)
    with pytest.raises(ModelError, match=f"tensor model.layers.{num_layers}.eh_proj.weight is in the checkpoint"):
        chunkrt.load(folder, npu="reference", scheme="float")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    expect_logits(folder, name)
    ignored = f"ignoring 3 tensors of multi-token prediction: model.layers.{num_layers}.* and later"
    assert caplog.messages == [f"m: one token at a time is predicted; {ignored}"]


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("gpt2", ""), ("gpt_bigcode", "transformer.")])
def test_load_takes_names_and_masks_of_published_gpts(tmp_path, name, prefix):
    """The first checkpoints contain causal masks, and the later ones a copy of the tied LM head."""

    def rename(tensor):
        return prefix + tensor.removeprefix("transformer.")

    masks = {"attn.bias": np.tril(np.ones((1, 1, 128, 128), np.float32)), "attn.masked_bias": np.float32([-1e4])}
    more = {f"{prefix}h.{layer}.{mask}": values for layer in range(3) for mask, values in masks.items()}
    expect_logits(write(tmp_path / "m", name, rename, more), name)


@pytest.mark.parametrize("prefix", ["model.decoder.", "decoder."])
def test_load_takes_both_prefixes_of_published_opts(tmp_path, prefix):
    def rename(tensor):
        return prefix + tensor.removeprefix("model.decoder.")

    expect_logits(write(tmp_path / "m", "opt", rename), "opt")


def test_fatrelu_of_a_tiny_threshold_is_relu(tmp_path):
    """MiniCPM-S has the activation fatrelu, which Transformers lacks."""
    changes = {"fat": {"hidden_act": "fatrelu", "hidden_act_param": 1e-30}, "plain": {"hidden_act": "relu"}}
    changes["wide"] = {"hidden_act": "fatrelu", "hidden_act_param": 0.5}
    found = {}
    for name, change in changes.items():
        folder = write(tmp_path / name, "minicpm", config=lambda config, change=change: config | change)
        with chunkrt.load(folder, npu="native", scheme="w8a8-dynamic") as engine:
            found[name] = engine.session().prefill(input_ids("minicpm"), logits="all").logits
    np.testing.assert_array_equal(found["fat"], found["plain"])
    assert np.abs(found["wide"] - found["plain"]).max() > 0.1


def test_dual_chunk_attention_changes_nothing_in_the_first_chunk(tmp_path, caplog):
    """The config is that of Qwen2.5-1M, with smaller numbers; `tests/engine/test_dual_chunks.py` has longer prompts."""
    sizes = {"chunk_size": 112, "local_size": 16, "original_max_position_embeddings": 96}

    def config(known):
        return known | {"max_position_embeddings": 4096, "dual_chunk_attention_config": sizes}

    folder = write(tmp_path / "m", "qwen2", config=config)
    for length in (96, 4096):
        with chunkrt.load(
            folder, npu="reference", scheme="float", cache_dtype="float32", context_length=length
        ) as engine:
            assert bool(engine.plan.rope_period) == (length > 96)
            found = engine.session().prefill(input_ids("qwen2"), logits="all").logits
        np.testing.assert_allclose(found, expected_logits("qwen2"), rtol=0, atol=1e-4)
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["gemma3_window_5", "mamba", "smollm3", "youtu"])
def test_families_without_dual_chunk_attention_refuse_it_by_name(tmp_path, name):
    sizes = {"chunk_size": 112, "local_size": 16, "original_max_position_embeddings": 96}
    folder = write(tmp_path / "m", name, config=lambda config: config | {"dual_chunk_attention_config": sizes})
    with pytest.raises(
        UnsupportedModelError, match=r"dual_chunk_attention_config = .* is not supported in this family"
    ):
        chunkrt.load(folder, npu="reference", scheme="float")


def write_predicting_gguf(path, name, nextn):
    """Write a GGUF fixture with one more layer, as llama.cpp's converter writes Qwen's multi-token prediction."""
    reader = gguf.GGUFReader(checkpoint(name))
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    num_layers = int(reader.fields[f"{architecture}.block_count"].contents())
    changed = {f"{architecture}.block_count": num_layers + 1, f"{architecture}.nextn_predict_layers": nextn}
    for key, found in reader.fields.items():
        if key not in changed and key != "general.architecture" and not key.startswith("GGUF."):
            writer.add_key_value(key, found.contents(), found.types[0], found.types[-1] if found.types[1:] else None)
    for key, value in changed.items():
        writer.add_uint32(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    for tensor in ("attn_norm.weight", "nextn.eh_proj.weight", "ffn_gate.weight"):
        writer.add_tensor(f"blk.{num_layers}.{tensor}", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["qwen3_5_gguf", "qwen3_next_gguf"])
def test_load_ignores_multi_token_prediction_layers_of_a_gguf(tmp_path, name, caplog):
    path = write_predicting_gguf(tmp_path / "m.gguf", name, 1)
    check_support(path)
    (said,) = caplog.messages
    assert said.startswith("m.gguf: one token at a time is predicted; ignoring 3 tensors of multi-token prediction: ")
    expect_logits(path, name)


def test_load_refuses_a_gguf_that_has_no_other_layers(tmp_path):
    path = write_predicting_gguf(tmp_path / "m.gguf", "qwen3_5_gguf", 4)
    with pytest.raises(ModelError, match="nextn_predict_layers = 4, expected less than block_count = 4"):
        chunkrt.load(path, npu="reference", scheme="float")


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_window_5", "qwen3_5", "qwen3_next_experts"])
def test_checkpoint_without_head_yields_hidden_states_only(tmp_path, caplog, name):
    """`AutoModel.save_pretrained` writes no LM head; hidden states times the original one are the logits."""
    folder = write(tmp_path / "m", name, lambda tensor: tensor.removeprefix("model."))
    tensors = load_file(folder / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors")
    report = check_support(folder)
    assert (report.tensors.missing, report.tensors.unread, report.tensors.misfits) == ([], [], [])
    assert caplog.messages == ["m has no LM head (lm_head.weight): it computes embeddings, and no logits"]
    with chunkrt.load(folder, npu="reference", scheme="float", cache_dtype="float32") as engine:
        session, ids = engine.session(), input_ids(name)
        hidden = session.prefill(ids, logits="hidden").hidden
        np.testing.assert_allclose(hidden @ head.T, expected_logits(name), rtol=0, atol=1e-4)
        assert engine.embed([ids], pooling="last").shape == (1, hidden.shape[1])
        for refused in (
            lambda: session.prefill(ids),
            lambda: session.prefill(ids, logits="all"),
            lambda: next(session.generate()),
            lambda: engine.generate([ids]),
            lambda: engine.score([(ids[:2], ids[2:4])]),
        ):
            with pytest.raises(ModelError, match="has no LM head"):
                refused()
        assert session.position == len(ids)
    with pytest.raises(UnsupportedModelError, match="m has no LM head"):
        window_model(plan_checkpoint(folder, {}), WindowSettings(window=2, sequence=4, context=8))


@pytest.mark.parametrize("section", ["text_config", None])
def test_tie_that_is_neither_true_nor_false_is_refused(tmp_path, section):
    def change(config):
        config = composite_config("gemma3")(config)
        (config[section] if section else config)["tie_word_embeddings"] = "no"
        return config

    folder = write(tmp_path / "m", "gemma3_window_5", config=change)
    with pytest.raises(ModelError, match="tie_word_embeddings is 'no', expected true or false"):
        check_support(folder)


def test_folder_with_only_an_adapter_is_reported(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds only an adapter; give its base model"):
        check_support(tmp_path)
