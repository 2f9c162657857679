"""Compilation: complete or absent, once, and the result is self-contained."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from damaged_files import flip_a_bit, make_empty, truncate
from fixture_checkpoints import checkpoint, input_ids

import chunkrt
from chunkrt.checkpoints.checkpoint import sampled_digest
from chunkrt.compile import compiler
from chunkrt.compile.compiler import compile_checkpoint, plan_checkpoint
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import choose_recipe
from chunkrt.engine_directory import content
from chunkrt.engine_directory import manifest as engine_directory
from chunkrt.engine_directory.manifest import (
    FORMAT,
    cached_folder,
    is_engine_directory,
    read_manifest,
    write_manifest,
)
from chunkrt.engine_directory.weights import WeightWriter
from chunkrt.errors import ConfigError, ModelError, QuantizationError
from chunkrt.quant.scheme import SCHEMES, Recipe

CHECKPOINT = checkpoint("llama_biased_gguf")
TOKENS = input_ids("llama_biased_gguf")[:20]
W8A8 = Recipe(scheme=SCHEMES["w8a8-dynamic"])
FILES = {"engine.json", "plan.json", "weights.safetensors", "tokenizer.json", "text.json"}


def compile_into(folder, **options):
    return compile_checkpoint(CHECKPOINT, W8A8, {}, folder, model="toy", **options)


def as_json(scheme):
    """Return a scheme as in a manifest."""
    return json.loads(json.dumps(asdict(scheme)))


def logits(model, **options):
    with chunkrt.load(model, **options) as engine:
        return engine.session().prefill(TOKENS).logits


@pytest.fixture
def engine_folder(tmp_path):
    """Return a compiled engine directory that may be damaged."""
    compile_into(tmp_path / "engine")
    return tmp_path / "engine"


def test_engine_directory_holds_these_files_and_no_others(engine_folder):
    assert {path.name for path in engine_folder.iterdir()} == FILES
    assert json.loads((engine_folder / "engine.json").read_text()) == {
        "format": FORMAT,
        "chunkrt": version("chunkrt"),
        "model": "toy",
        "scheme": as_json(W8A8.scheme),
        "placement": {},
        "ranks": {"rank": 0, "size": 1},
        "checkpoint": sampled_digest(CHECKPOINT),
        "num_parameters": plan_checkpoint(CHECKPOINT, {}).num_parameters,
        "npu": [],
        "npu_attention": {},
        "npu_settings": {},
        "files": {
            name: [len(data := (engine_folder / name).read_bytes()), hashlib.sha256(data).hexdigest()]
            for name in sorted(FILES - {"engine.json"})
        },
    }


def test_progress_counts_weights(tmp_path):
    steps = []
    plan = compile_into(tmp_path / "engine", progress=lambda *step: steps.append(step))
    num_weights = sum(tensor.kind == "weight" for tensor in plan.tensors.values())
    assert steps == [("compiling", done, num_weights) for done in range(num_weights + 1)]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_interruption_leaves_no_files(tmp_path, error):
    def interrupt(what, done, total):
        if done == 3:
            assert any(tmp_path.iterdir())
            raise error

    with pytest.raises(error):
        compile_into(tmp_path / "engine", progress=interrupt)
    assert not any(tmp_path.iterdir())


def test_weight_that_cannot_be_quantised_leaves_no_files(tmp_path, monkeypatch):
    def refuse(*_, name):
        raise QuantizationError(f"{name} is not finite")

    monkeypatch.setattr("chunkrt.quant.arithmetic.quantize_weight", refuse)
    with pytest.raises(QuantizationError, match="is not finite"):
        compile_into(tmp_path / "engine")
    assert not any(tmp_path.iterdir())


def test_full_disk_prints_one_line_and_leaves_no_files(tmp_path, monkeypatch):
    def full(self, array):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(WeightWriter, "write", full)
    with pytest.raises(ModelError, match=r"^cannot write the engine directory \S+[/\\]engine: the disk is full[^\n]*$"):
        compile_into(tmp_path / "engine")
    assert not any(tmp_path.iterdir())


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot write the engine directory"):
        compile_into(tmp_path / "file" / "engine")


def test_tensor_of_the_wrong_shape_leaves_no_files(tmp_path):
    folder = shutil.copytree(checkpoint("llama_mha"), tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 65}))
    with pytest.raises(ModelError, match=r"tensor model\S+ is \[\d+, \d+\], expected \[\d+, \d+\]"):
        compile_checkpoint(folder, W8A8, {}, tmp_path / "engines" / "engine", model="toy")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_second_thread_waits_for_the_compilation(tmp_path, monkeypatch, waiting):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    path = shutil.copy(CHECKPOINT, tmp_path / "model.gguf")
    compiling, compiled = threading.Event(), []

    def progress(what, done, total):
        compiling.set()
        assert waiting.wait(60)
        compiled.append(done)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(logits, path, progress=progress)
        assert compiling.wait(60)
        second = threads.submit(logits, path, progress=lambda *_: compiled.append("again"))
        np.testing.assert_array_equal(first.result(), second.result())
    assert compiled == list(range(len(compiled)))


COMPILE = """
import sys
import chunkrt
def wait(what, done, total):
    if done == 1:
        print("compiling", flush=True)
        sys.stdin.readline()
with chunkrt.load(sys.argv[1], progress=wait) as engine:
    print(engine.session().prefill([1, 2, 3]).logits.tobytes().hex())
"""


def test_second_process_waits_for_the_compilation(tmp_path):
    environment = os.environ | {"CHUNKRT_HOME": str(tmp_path)}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-P", "-c", COMPILE, str(CHECKPOINT)]
    with subprocess.Popen(command, env=environment, text=True, **pipes) as first:
        assert first.stdout.readline() == "compiling\n"
        with subprocess.Popen(command, env=environment, text=True, **pipes) as second:
            second.stdin.write("go on\n")
            second.stdin.flush()
            assert second.stderr.readline() == "another process is compiling a model; waiting for it\n"
            answers = [first.communicate("go on\n", timeout=120)[0], second.communicate(timeout=120)[0]]
    assert (first.returncode, second.returncode) == (0, 0)
    assert answers[0] == answers[1] != ""
    (engine,) = (tmp_path / "engines").iterdir()
    assert {path.name for path in engine.iterdir()} == FILES


def test_leftovers_of_a_dead_process_are_removed_by_the_next_compilation(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    engines = tmp_path / "engines"
    (engines / ".another-model.part").mkdir(parents=True)
    (engines / ".another-model.part" / "plan.json").write_text("{")
    logits(CHECKPOINT)
    (engine,) = engines.iterdir()
    assert {path.name for path in engine.iterdir()} == FILES


@pytest.mark.parametrize("name", sorted(FILES))
def test_damaged_engine_in_the_cache_is_recompiled(tmp_path, monkeypatch, caplog, name):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    expected = logits(CHECKPOINT)
    (engine,) = (tmp_path / "engines").iterdir()
    truncate(engine / name)
    np.testing.assert_array_equal(logits(CHECKPOINT), expected)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{engine} is damaged ({engine}")
    assert record.getMessage().endswith("compile it again); compiling a model again") or name == "engine.json"
    read_manifest(engine)
    np.testing.assert_array_equal(logits(CHECKPOINT), expected)
    assert len(caplog.records) == 1


def test_unwritable_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ModelError, match=r"^cannot write \S+engines: Not a directory; set CHUNKRT_HOME to move it$"):
        logits(CHECKPOINT)


def test_engine_directory_runs_anywhere_without_its_checkpoint(engine_folder, tmp_path):
    before = logits(engine_folder)
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    engine_folder.rename(moved)
    np.testing.assert_array_equal(logits(moved), before)
    np.testing.assert_array_equal(logits(CHECKPOINT), before)


def test_second_load_compiles_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    path = shutil.copy(CHECKPOINT, tmp_path / "model.gguf")
    expected = logits(path)

    def refuse(*arguments, **options):
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "prepare_checkpoint", refuse)
    np.testing.assert_array_equal(logits(path), expected)
    with pytest.raises(AssertionError, match="compiled again"):
        logits(path, scheme="float")


HIT = """
import sys
import chunkrt
with chunkrt.load(sys.argv[1]) as engine:
    engine.session().prefill("one two three")
loaded = {name.partition(".")[0] for name in sys.modules}
print(*sorted(loaded & {"onnx", "onnx_ir", "onnxruntime", "gguf", "safetensors", "torch"}))
"""


def test_cache_hit_imports_nothing_of_the_compile_half():
    logits(CHECKPOINT)
    run = subprocess.run([sys.executable, "-P", "-c", HIT, str(CHECKPOINT)], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_key_depends_on_text_files_in_the_folder(tmp_path):
    path = Path(shutil.copytree(checkpoint("llama_mha"), tmp_path / "model"))

    def folder():
        return cached_folder(tmp_path, path, recipe=W8A8, placement={})

    found = [folder()]
    for name in ("1_Pooling/config.json", "additional_chat_templates/tool_use.jinja"):
        (path / name).parent.mkdir()
        (path / name).write_text("{}")
        found.append(folder())
    assert len(set(found)) == 3


def test_key_depends_on_files_scheme_and_placement(tmp_path):
    path = shutil.copy(CHECKPOINT, tmp_path / "model.gguf")

    static = SCHEMES["w8a8"]
    searched = Recipe(scheme=static, search="shadow")

    def folder(recipe=Recipe(scheme=SCHEMES["float"]), **placement):  # noqa: B008
        return cached_folder(tmp_path, path, recipe=recipe, placement=placement)

    folders = [
        folder(),
        folder(W8A8),
        *(
            folder(Recipe(scheme=scheme))
            for scheme in (
                static,
                replace(static, float_outputs=("*",)),
                replace(static, shadowed=("*",)),
                replace(static, shadowed=("*.down_proj.weight",)),
                replace(static, equalisation=None),
                replace(static, equalisation=0.0),
                replace(static, is_rotated=True),
            )
        ),
        folder(searched),
        folder(replace(searched, search="mixed")),
        folder(replace(searched, budget=0.02)),
        folder(lm_head="cpu"),
        folder(a="cpu", b="npu"),
        folder(b="npu", a="cpu"),
    ]
    assert len(set(folders)) == len(folders)
    assert folder() == folders[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content, "__version__", "99.0")
        assert folder() not in folders
    path.write_bytes(path.read_bytes() + b"\0")
    assert folder() != folders[0]


@pytest.mark.parametrize("is_kept", [False, True], ids=["as read", "as kept"])
def test_checkpoint_is_identified_by_its_content(tmp_path, monkeypatch, is_kept):
    """A moved, renamed, touched or linked one keeps its key; one changed byte makes another, regardless of its time."""
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(content, "SETTLED_SECONDS", -1e9 if is_kept else 1e9)
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(10_000))
    key = content.cache_key(path)
    assert content.cache_key(path) == key
    assert len(list((tmp_path / "home").rglob("*.json"))) == is_kept
    os.utime(path, ns=(5, 5))
    assert content.cache_key(path) == key
    (tmp_path / "other").mkdir()
    path = path.rename(tmp_path / "other" / "name.gguf")
    assert content.cache_key(path) == key
    (tmp_path / "link.gguf").symlink_to(path)
    assert content.cache_key(tmp_path / "link.gguf") == key
    with path.open("rb+") as file:
        file.seek(5000)
        file.write(b"x")
    os.utime(path, ns=(5, 5))
    assert content.cache_key(path) != key


@pytest.mark.parametrize("damaged", ["", "[]", '{"file": 1}', '{"file": {}, "digest": "x"}'])
def test_damaged_digest_is_rebuilt(tmp_path, monkeypatch, damaged):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(content, "SETTLED_SECONDS", -1e9)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"12345")
    digest = content.file_digest(path)
    (kept,) = (tmp_path / "home" / "digests").iterdir()
    whole = kept.read_text()
    kept.write_text(damaged)
    assert content.file_digest(path) == digest
    assert kept.read_text() == whole


def test_engine_is_found_after_its_checkpoint_is_renamed(tmp_path):
    path = shutil.copy(CHECKPOINT, tmp_path / "before.gguf")
    made = cached_folder(tmp_path / "engines", Path(path), recipe=W8A8, placement={})
    made.mkdir(parents=True)
    other = Path(path).rename(tmp_path / "after.gguf")
    assert cached_folder(tmp_path / "engines", other, recipe=W8A8, placement={}) == made


def test_single_file_is_not_an_engine_directory(tmp_path):
    assert not is_engine_directory(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    assert not is_engine_directory(tmp_path)


def of_another_model(path):
    other = path.parent.with_name("other")
    compile_checkpoint(checkpoint("llama_gqa"), W8A8, {}, other, model="other")
    shutil.copy(other / path.name, path)


@pytest.mark.parametrize("name", sorted(FILES - {"engine.json"}))
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, make_empty])
def test_modified_file_is_reported(engine_folder, name, damage):
    damage(engine_folder / name)
    with pytest.raises(ModelError, match=rf"^\S+[/\\]{name} has changed since the model was compiled; compile it"):
        logits(engine_folder)


@pytest.mark.parametrize("text", [b"", b"\xff", b"[1]", b"{}", b"null", b"[" * 100_000])
def test_damaged_manifest_is_reported(engine_folder, text):
    (engine_folder / "engine.json").write_bytes(text)
    with pytest.raises(ModelError, match=r"is not an engine directory \(.*\); compile the model again") as raised:
        logits(engine_folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", sorted(FILES - {"engine.json"}))
def test_missing_file_is_reported(engine_folder, name):
    (engine_folder / name).unlink()
    with pytest.raises(ModelError, match=f"{name} cannot be read .*compile the model again"):
        logits(engine_folder)


@pytest.mark.parametrize("name", ["plan.json", "weights.safetensors"])
def test_file_of_another_model_is_reported_even_if_the_manifest_lists_it(engine_folder, name):
    of_another_model(engine_folder / name)
    write_manifest(engine_folder, model="toy", scheme=W8A8.scheme)
    with pytest.raises(ModelError, match="the stored weights do not belong to the plan"):
        logits(engine_folder)


def test_only_the_size_of_a_large_file_is_compared(engine_folder, monkeypatch):
    """Hashing gigabytes at every load would take longer than loading the model."""
    monkeypatch.setattr(engine_directory, "HASHED_WHEN_READ", 1000)
    flip_a_bit(engine_folder / "weights.safetensors")
    read_manifest(engine_folder)
    truncate(engine_folder / "weights.safetensors")
    with pytest.raises(ModelError, match=r"weights\.safetensors has changed since"):
        read_manifest(engine_folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1}, rf"engine format 1, this chunkrt reads {FORMAT}; compile the model again"),
        ({"surprise": 1}, "is not an engine directory .*surprise"),
        ({"scheme": as_json(SCHEMES["float"])}, "the stored weights do not belong to the plan"),
        ({"scheme": as_json(SCHEMES["w8a8"])}, "the stored weights do not belong to the plan"),
        ({"scheme": "float"}, "is not an engine directory"),
        ({"scheme": 8}, "is not an engine directory"),
        ({"scheme": {}}, "is not an engine directory"),
        ({"scheme": as_json(SCHEMES["float"]) | {"surprise": 1}}, "is not an engine directory .*surprise"),
        ({"files": {}}, "plan.json has changed since"),
        ({"files": {"../plan.json": [1, ""]}}, "is not an engine directory .*values of the wrong type"),
        ({"npu": [{"soc": "SM8650", "chunk_length": "32", "library": "2.7.0"}]}, r"Expected `int`.*chunk_length"),
        ({"npu": [{"soc": "SM8650"}]}, "is not an engine directory"),
    ],
)
def test_contradictory_manifest_is_reported(engine_folder, changes, message):
    path = engine_folder / "engine.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        logits(engine_folder)


def test_compiled_model_keeps_its_scheme_and_its_placement(engine_folder, tmp_path):
    with pytest.raises(ConfigError, match="was compiled under 'w8a8-dynamic', not 'float'"):
        chunkrt.load(engine_folder, scheme="float")
    (tmp_path / "placement.toml").write_text('lm_head = "npu"')
    with pytest.raises(ConfigError, match="its placement is fixed; pass the checkpoint"):
        chunkrt.load(engine_folder, placement=tmp_path / "placement.toml")


def test_another_checkpoint_has_another_digest(tmp_path):
    """A sampled byte, a byte of the size, or another name changes it; the location of the files does not."""
    paths = [tmp_path / name / "model.gguf" for name in ("one", "same", "odd_byte", "longer")]
    data = bytes(range(256)) * 2000
    contents = [data, data, data[:-1] + b"\x00", data + b"\x00"]
    for path, written in zip(paths, contents, strict=True):
        path.parent.mkdir()
        path.write_bytes(written)
    one, same, odd_byte, longer = map(sampled_digest, paths)
    assert one == same
    assert len({one, odd_byte, longer, sampled_digest(tmp_path / "one")}) == 3
    renamed = paths[0].rename(tmp_path / "one" / "other.gguf")
    assert sampled_digest(renamed) != one


ONNX = Path(__file__).parents[1] / "data" / "onnx"
QUANTISATIONS = [
    {"scheme": "w8a8-dynamic"},
    {"scheme": "w8a16"},
    {"scheme": "w8a8", "shadow": "auto", "budget": 1.0},
]

_opened: Counter[str] | None = None


def _count(event, arguments):
    if _opened is not None and event == "open" and isinstance(arguments[0], str):
        _opened[arguments[0]] += 1


sys.addaudithook(_count)


def opened_by_compiling(path, tmp_path, options):
    """Count how often each file is opened while a checkpoint is compiled."""
    global _opened
    recipe = choose_recipe(EngineOptions(npu="native", **options), "w8a8-dynamic")
    _opened = Counter()
    try:
        compile_checkpoint(path, recipe, {}, tmp_path / "engine", model="toy")
        return _opened
    finally:
        _opened = None


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", QUANTISATIONS, ids=lambda options: options["scheme"])
def test_gguf_file_is_opened_once(tmp_path, monkeypatch, options):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    path = checkpoint("qwen3_gguf")
    opened = opened_by_compiling(path, tmp_path, options)
    keys = options["scheme"] != "w8a8-dynamic"
    assert opened[str(path)] == 3 + keys, "its first bytes, its map, its digest, and the key of its calibration"


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("options", QUANTISATIONS, ids=lambda options: options["scheme"])
@pytest.mark.parametrize("name", ["genai_llama_fp32", "optimum_llama_fp32"])
def test_onnx_decoder_is_read_and_imported_once(tmp_path, monkeypatch, name, options):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    graphs, from_proto = [], ir.from_proto
    monkeypatch.setattr(ir, "from_proto", lambda proto: graphs.append(proto) or from_proto(proto))
    opened = opened_by_compiling(ONNX / name, tmp_path, options)
    keys = options["scheme"] != "w8a8-dynamic"
    assert opened[str(ONNX / name / "model.onnx")] == 2 + keys, "its graph, its digest, the key of its calibration"
    assert len([proto for proto in graphs if type(proto).__name__ == "ModelProto"]) == 1
