"""Tests of LoRA adapters that sessions choose at run time."""

import gc
import json
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from safetensors.numpy import load_file, save_file

import chunkrt
from chunkrt.errors import ConfigError, ModelError, UnsupportedModelError

FOLDER = Path(__file__).parents[1] / "data" / "adapters"
BIASED, PHI3, GQA = (FOLDER / name for name in ("llama_biased", "phi3_window_120", "llama_gqa"))
MODEL = checkpoint("llama_biased")
IDS = input_ids("llama_biased")
WEIGHTS = "adapter_model.safetensors"


def load(model=MODEL, **options):
    return chunkrt.load(model, **{"npu": "native", "scheme": "w8a8-dynamic", "adapters": True, **options})


def logits_of(engine, adapter=None, ids=IDS):
    with engine.session(adapter=adapter) as session:
        return session.prefill(ids, logits="all").logits


@pytest.mark.parametrize(("name", "is_transposed"), [("gpt2", True), ("gpt_bigcode", False), ("gpt2_gguf", True)])
def test_adapter_of_a_gpt_has_the_logits_of_its_merged_weights(tmp_path, name, is_transposed):
    """PEFT adds B A to a linear's weight, and its transpose to a `Conv1D` of GPT-2 (`fan_in_fan_out`)."""
    rng, tensor = np.random.default_rng(8), "h.1.mlp.c_fc.weight"
    a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((2, 24), (96, 2)))
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["c_fc"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"fan_in_fan_out": is_transposed}))
    prefix = "base_model.model.transformer.h.1.mlp.c_fc"
    save_file({f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}, adapter / WEIGHTS)
    folder = name.removesuffix("_gguf")
    shutil.copytree(checkpoint(folder), merged)
    tensors = {key: values.astype(np.float32) for key, values in load_file(merged / "model.safetensors").items()}
    key = next(each for each in tensors if each.endswith(tensor))
    tensors[key] = tensors[key] + 2 * ((b @ a).T if is_transposed else b @ a)
    save_file(tensors, merged / "model.safetensors")
    options = {"npu": "reference", "scheme": "float", "cache_dtype": "float32"}
    with load(merged, **options, adapters=False) as engine:
        expected = logits_of(engine, ids=input_ids(name))
    with load(checkpoint(name), **options) as engine:
        found = logits_of(engine, engine.load_adapter(adapter), input_ids(name))
    with load(checkpoint(name), **options, adapters=False, adapter=adapter) as engine:
        compiled = logits_of(engine, ids=input_ids(name))
    for logits in (found, compiled):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def variants(tmp_path, count):
    """Write adapters with other values: every second one has another rank, and some change other modules."""
    generator = np.random.default_rng(5)
    for index in range(count):
        folder = tmp_path / f"variant{index}"
        shutil.copytree(BIASED, folder)
        rank = 4 + index % 2
        tensors = {}
        for name, values in load_file(BIASED / WEIGHTS).items():
            shape = (rank, values.shape[1]) if ".lora_A." in name else (len(values), rank)
            if index % 3 != 2 or "q_proj" in name:
                tensors[name] = generator.normal(0, 0.1, shape).astype(np.float32)
        config = json.loads((folder / "adapter_config.json").read_text()) | {"r": rank}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / WEIGHTS)
        yield folder


@pytest.mark.parametrize("npu", ["reference", "onnxrt"])
@pytest.mark.parametrize(
    ("model", "adapter", "expected"),
    [
        ("llama_biased", BIASED, BIASED),
        ("llama_biased_gguf", BIASED, BIASED),
        ("llama_biased", FOLDER / "llama_biased.gguf", BIASED),
        ("llama_biased_gguf", FOLDER / "llama_biased.gguf", BIASED),
        ("phi3_window_120", PHI3, PHI3),
    ],
)
def test_logits_with_an_adapter_are_those_of_peft(npu, model, adapter, expected):
    ids, expected = input_ids(model), np.load(expected / "expected.npz")["logits"]
    with load(checkpoint(model), npu=npu, scheme="float", cache_dtype="float32") as engine:
        name = engine.load_adapter(adapter)
        found, plain = logits_of(engine, name, ids), logits_of(engine, None, ids)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    right = expected_logits(model)
    np.testing.assert_allclose(plain, right, atol=1e-4 * np.abs(right).max())


@pytest.mark.parametrize("name", ["llama_biased", "qwen2", "granite", "gemma3_scaled", "glm4"])
def test_sessions_without_an_adapter_have_the_bits_of_a_plain_engine(name):
    ids = input_ids(name)
    with load(checkpoint(name)) as engine, load(checkpoint(name), adapters=False) as plain:
        np.testing.assert_array_equal(logits_of(engine, ids=ids), logits_of(plain, ids=ids))


def test_packed_adapters_have_the_bits_of_each_alone(tmp_path):
    with load(chunk_length=16) as engine:
        names = [None, *(engine.load_adapter(folder) for folder in variants(tmp_path, 4))]
        prompts = [IDS[: 20 + 3 * index] for index in range(len(names))]
        alone = [logits_of(engine, name, prompt) for name, prompt in zip(names, prompts, strict=True)]
        assert all((left[:5] != right[:5]).any() for left, right in pairwise(alone))

        def work(index):
            with engine.session(adapter=names[index]) as session:
                return session.prefill(prompts[index], logits="all").logits

        before = engine.stats().shared_chunks
        with engine.loaded.scheduler.sharing(), ThreadPoolExecutor(len(names)) as pool:
            packed = list(pool.map(work, range(len(names))))
        assert engine.stats().shared_chunks > before
    for found, expected in zip(packed, alone, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "w8a8-dynamic"},
        {"scheme": "w8a16"},
        {"scheme": "w8a8"},  # is equalised
        {"scheme": "w8a8", "rotation": True},
        {"scheme": "w8a8", "shadow": "all", "npu": "reference"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_quantised_model_with_an_adapter_is_near_the_adapted_checkpoint(options):
    expected = np.load(BIASED / "expected.npz")["logits"]
    right = expected_logits("llama_biased_gguf")
    with load(checkpoint("llama_biased_gguf"), **options) as engine:
        error = np.square(logits_of(engine, engine.load_adapter(BIASED)) - expected).mean() / np.square(expected).mean()
        plain = np.square(logits_of(engine) - right).mean() / np.square(right).mean()
    assert error < 4 * plain  # only the weights of the model are quantised, in both cases


def test_npu_takes_adapters_without_another_context(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    expected = np.load(BIASED / "expected.npz")["logits"]
    right = expected_logits("llama_biased_gguf")
    with load(checkpoint("llama_biased_gguf"), npu="qnn", soc="SM8650", scheme="w8a16") as engine:
        plain = logits_of(engine)
        contexts = sorted((tmp_path / "contexts").rglob("*"))
        found = logits_of(engine, engine.load_adapter(BIASED))
        assert sorted((tmp_path / "contexts").rglob("*")) == contexts
        np.testing.assert_array_equal(logits_of(engine), plain)
        nodes = [(node.op, s.device) for s in engine.loaded.plan.subgraphs for node in s.nodes]
    devices = {op: {device for name, device in nodes if name == op} for op in ("MatMul", "LowRankSum")}
    assert devices["LowRankSum"] == {"cpu"}
    assert "npu" in devices["MatMul"]
    error = np.square(found - expected).mean() / np.square(expected).mean()
    assert error < 4 * np.square(plain - right).mean() / np.square(right).mean()


def test_generated_tokens_are_those_of_an_engine_with_the_adapter_in_its_weights():
    with (
        load(npu="reference", scheme="float") as engine,
        load(npu="reference", scheme="float", adapters=False, adapter=BIASED) as merged,
    ):
        name = engine.load_adapter(BIASED, name="mine")
        assert (name, engine.adapters) == ("mine", ("mine",))
        with engine.session(adapter="mine") as session, merged.session() as other:
            assert session.adapter == "mine"
            for each in (session, other):
                each.prefill(IDS[:8])
            copy = session.fork()
            tokens = [[piece.token_id for piece in each.generate(max_tokens=8)] for each in (session, other, copy)]
    assert tokens[0] == tokens[1] == tokens[2]


def test_prefix_cache_separates_adapters():
    with load(prefix_cache="memory", chunk_length=8) as engine:
        engine.load_adapter(BIASED, name="a")
        engine.load_adapter(FOLDER / "llama_biased.gguf", name="b")
        expected = {name: logits_of(engine, name) for name in (None, "a")}
        found, num_cached = {}, {}
        for name in (None, "a", None, "a", "b"):
            with engine.session(adapter=name) as session:
                result = session.prefill(IDS)
                found[name], num_cached[name] = result.logits, result.num_cached
        for name, logits in expected.items():
            np.testing.assert_array_equal(found[name], logits[-1])
            assert num_cached[name] > 0
        assert num_cached["b"] == 0


def test_session_file_belongs_to_its_adapter(tmp_path):
    with load() as engine:
        engine.load_adapter(BIASED, name="a")
        with engine.session(adapter="a") as session:
            session.prefill(IDS[:9])
            session.save(tmp_path / "file")
            logits = session.prefill(IDS[9:12]).logits
        with engine.load_session(tmp_path / "file", adapter="a") as session:
            np.testing.assert_array_equal(session.prefill(IDS[9:12]).logits, logits)
        with pytest.raises(ModelError, match="another adapter"):
            engine.load_session(tmp_path / "file")


def test_scale_multiplies_the_scale_of_an_adapter(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(BIASED, other)
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": -2.5 * config["lora_alpha"]}))
    with load(prefix_cache="memory", chunk_length=8) as engine:
        engine.load_adapter(BIASED, name="own")
        engine.load_adapter(BIASED, name="scaled", scale=-2.5)
        engine.load_adapter(BIASED, name="none", scale=0)
        engine.load_adapter(other)
        logits = {name: logits_of(engine, name) for name in (None, "own", "scaled", "none", "other")}
        with engine.session(adapter="own") as session:
            assert session.prefill(IDS).num_cached > 0
        with engine.session(adapter="none") as session:
            assert session.prefill(IDS[:12]).num_cached > 0
        for scale in (float("nan"), "2", True, 1e300):
            with pytest.raises(ConfigError, match="scale is"):
                engine.load_adapter(BIASED, name="wrong", scale=scale)
    np.testing.assert_array_equal(logits["scaled"], logits["other"])
    np.testing.assert_array_equal(logits["none"], logits[None])
    assert (logits["scaled"][5:] != logits["own"][5:]).any()


def test_open_session_keeps_an_unloaded_adapter():
    with load() as engine:
        engine.load_adapter(BIASED, name="a")
        expected = logits_of(engine, "a")
        with engine.session(adapter="a") as session:
            engine.unload_adapter("a")
            assert engine.adapters == ()
            np.testing.assert_array_equal(session.prefill(IDS, logits="all").logits, expected)
        with pytest.raises(ConfigError, match="no adapter is loaded"):
            engine.session(adapter="a")
        engine.load_adapter(FOLDER / "llama_biased.gguf", name="a")
        np.testing.assert_array_equal(logits_of(engine, "a"), expected)


def test_methods_for_many_prompts_take_an_adapter():
    with load(checkpoint("llama_biased_gguf")) as engine:
        engine.load_adapter(BIASED, name="a")
        prompts, options = ["a b c", "d e", "f"], {"max_tokens": 6}
        plain, adapted = engine.generate(prompts, **options), engine.generate(prompts, adapter="a", **options)
        assert plain != adapted
        assert adapted == [engine.generate(prompt, adapter="a", **options) for prompt in prompts]
        pair = ([1, 2, 3], [4, 5])
        assert engine.score([pair], adapter="a")[0] != engine.score([pair])[0]
        with pytest.raises(ConfigError, match="adapter 'b'"):
            engine.generate("a", adapter="b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"npu": "qnn", "soc": "SM8650", "scheme": "w8a8-dynamic"}, "does not support"),
        ({"adapters": "yes"}, "adapters"),
    ],
)
def test_option_that_excludes_adapters_is_refused(options, message):
    with pytest.raises(chunkrt.ChunkrtError, match=message):
        load(checkpoint("llama_biased_gguf"), **options)


def test_adapter_that_does_not_fit_is_refused(tmp_path):
    with load() as engine:
        with pytest.raises(ModelError, match=r"as \[48, 48\], and the model has \[32, 32\]"):
            engine.load_adapter(GQA)
        with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
            engine.load_adapter(tmp_path)
        engine.load_adapter(BIASED)
        with pytest.raises(ConfigError, match="'llama_biased' is already loaded"):
            engine.load_adapter(BIASED)
        with pytest.raises(ConfigError, match="adapter 'other'"):
            engine.unload_adapter("other")
        with pytest.raises(ConfigError, match="name is 5"):
            engine.load_adapter(BIASED, name=5)
    with (
        load(checkpoint("llama_gqa")) as engine,
        pytest.raises(UnsupportedModelError, match=r"lm_head\.weight, which no linear"),
    ):
        engine.load_adapter(GQA)
    with load(adapters=False) as engine, pytest.raises(ConfigError, match="takes no adapters; load the model with"):
        engine.load_adapter(BIASED)


def test_engine_directory_takes_adapters_if_it_was_compiled_for_them(command, tmp_path):
    for name, flags in (("with", ["--adapters"]), ("without", [])):
        assert command("compile", MODEL, "-o", tmp_path / name, *flags).status == 0
    with load(tmp_path / "with", scheme=None) as engine:
        found = logits_of(engine, engine.load_adapter(BIASED))
    with load() as engine:
        np.testing.assert_array_equal(found, logits_of(engine, engine.load_adapter(BIASED)))
    with pytest.raises(ConfigError, match="compiled without `adapters`"):
        load(tmp_path / "without", scheme=None)


def test_memory_of_an_unloaded_adapter_is_freed():
    from chunkrt.backends.low_rank import LoadedAdapter

    with load() as engine:
        engine.load_adapter(BIASED, name="a")
        logits_of(engine, "a")
        found = [weakref.ref(each) for each in gc.get_objects() if isinstance(each, LoadedAdapter)]
        engine.unload_adapter("a")
        gc.collect()
        assert all(reference() is None for reference in found)
