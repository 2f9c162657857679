"""Compiled contexts on disk: found by a hash of their sources, complete or absent, written by one process."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from damaged_files import flip_a_bit, make_empty, truncate
from fixture_checkpoints import checkpoint

from chunkrt.backends.qnn import HtpOptions, QnnBackend, backend, find_soc
from chunkrt.backends.qnn.contexts import ContextFolder, store_difference
from chunkrt.backends.qnn.library import Htp
from chunkrt.compile.compiler import compile_checkpoint
from chunkrt.engine_directory.manifest import open_weights, read_plan
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import CompileError
from chunkrt.quant.scheme import SCHEMES, Recipe

CHECKPOINT = checkpoint("llama_biased_gguf")
SCHEME = SCHEMES["w8a16"]
KEY = "SM8650-w8a16-r32-static.0-0123456789abcdef"
FILES = {"context.json", "context.onnx", "context_qnn.bin"}


def write(wrapper):
    """Write files like the NPU's compiler: a wrapper, and a binary next to it."""
    wrapper.write_bytes(b"wrapper" * 100)
    wrapper.with_name("context_qnn.bin").write_bytes(bytes(range(256)) * 100)


def refuse(wrapper):
    pytest.fail("compiled again")


@pytest.fixture
def contexts(tmp_path):
    return ContextFolder(tmp_path / "home" / "contexts")


@pytest.fixture
def context(contexts):
    """A context that may be damaged."""
    return contexts.make(KEY, write).parent


def test_missing_context_is_not_found(contexts):
    assert contexts.find(KEY) is None
    assert not contexts.path.exists()


def test_written_context_is_found_and_not_written_again(contexts):
    wrapper = contexts.make(KEY, write)
    assert wrapper == contexts.path / KEY / "context.onnx"
    assert {path.name for path in wrapper.parent.iterdir()} == FILES
    assert contexts.find(KEY) == wrapper
    assert contexts.make(KEY, refuse) == wrapper
    assert [path.name for path in contexts.path.iterdir()] == [KEY]


def test_context_folder_can_be_moved_and_copied(contexts, context, tmp_path):
    shutil.copytree(context, tmp_path / "npu" / KEY)
    assert ContextFolder(tmp_path / "npu").find(KEY) == tmp_path / "npu" / KEY / "context.onnx"


BASE_CONTENT = np.random.default_rng(5).integers(0, 256, 200 * 1024, np.uint8).tobytes()
CONTENTS = {
    "equal": BASE_CONTENT,
    "other header": b"x" * 1000 + BASE_CONTENT[1000:],
    "moved by a page": bytes(4096) + BASE_CONTENT,
    "other length": BASE_CONTENT[:-777] + bytes(range(100)),
    "shorter": BASE_CONTENT[: 150 * 1024 + 1],
}


@pytest.fixture
def differing(contexts):
    """Return a function that makes a context, and stores it as a difference from another one."""

    def make(content):
        def write_content(content):
            def write(wrapper):
                wrapper.write_bytes(b"wrapper of " + content[:5])
                wrapper.with_name("context_qnn.bin").write_bytes(content)

            return write

        base, made = (
            contexts.make(key, write_content(text)).parent for key, text in (("base", BASE_CONTENT), ("made", content))
        )
        store_difference(made, base)
        return made

    return make


@pytest.mark.parametrize("case", CONTENTS)
def test_difference_of_a_context_restores_all_bytes(contexts, differing, tmp_path, case):
    made, cache = differing(CONTENTS[case]), ContextFolder(tmp_path / "cache")
    assert {path.name for path in made.iterdir()} == {*FILES - {"context_qnn.bin"}, "context_qnn.bin.difference"}
    assert sum(path.stat().st_size for path in made.iterdir()) < 0.1 * len(BASE_CONTENT)
    assert contexts.find("made") is None
    assert contexts.has("made")
    wrapper = contexts.assemble("made", cache)
    assert wrapper == cache.find("made")
    assert {path.name for path in wrapper.parent.iterdir()} == FILES
    assert wrapper.with_name("context_qnn.bin").read_bytes() == CONTENTS[case]
    assert wrapper.read_bytes() == b"wrapper of " + CONTENTS[case][:5]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists the mapped files of a process")
def test_binary_is_not_mapped_when_it_is_removed(differing, monkeypatch):
    """Windows refuses to remove a mapped file."""
    removed = []

    unlink = Path.unlink

    def unlink_unmapped(path, missing_ok=False):
        assert str(path) not in Path("/proc/self/maps").read_text()
        removed.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_unmapped)
    differing(CONTENTS["equal"])
    assert "context_qnn.bin" in removed


def test_difference_with_any_damaged_byte_of_its_directory_is_never_restored(contexts, differing, tmp_path, caplog):
    path = differing(CONTENTS["other header"]) / "context_qnn.bin.difference"
    content = path.read_bytes()
    for place in range(content.rindex(b"steps.npy") - 46, len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        contexts.assemble("made", ContextFolder(tmp_path / "cache"))  # it may be intact: not all bytes matter
    assert "is damaged" in caplog.text


def test_context_without_common_pieces_is_stored_whole(contexts, differing, tmp_path):
    made = differing(np.random.default_rng(6).bytes(len(BASE_CONTENT)))
    assert contexts.find("made") == made / "context.onnx"
    assert contexts.assemble("made", ContextFolder(tmp_path / "cache")) is None
    assert contexts.assemble("absent", ContextFolder(tmp_path / "cache")) is None


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(
            (name, damage)
            for name in ("made/context_qnn.bin.difference", "made/context.onnx", "base/context_qnn.bin")
            for damage in (truncate, flip_a_bit, make_empty, Path.unlink)
        ),
        *(
            ("made/context.json", lambda path, base=base: change_record(base=base)(path))
            for base in ("missing", "../base", "made", 3)
        ),
    ],
)
def test_damaged_difference_is_never_restored(contexts, differing, tmp_path, caplog, name, damage):
    differing(CONTENTS["other header"])
    damage(contexts.path / name)
    assert contexts.assemble("made", ContextFolder(tmp_path / "cache")) is None
    assert not (tmp_path / "cache").exists()
    assert caplog.records[-1].getMessage().startswith(f"{contexts.path / 'made'} is damaged (")


def unlink(path):
    path.unlink()


def make_a_folder(path):
    path.unlink()
    path.mkdir()


def change_record(**changes):
    def change(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def without_the_wrapper(path):
    record = json.loads(path.read_text())
    del record["files"]["context.onnx"]
    path.write_text(json.dumps(record))


def with_a_file_outside(path):
    """Make the record name another context's binary, which is intact."""
    record = json.loads(path.read_text())
    other = shutil.copytree(path.parent, path.parent.with_name("other"))
    record["files"][f"../{other.name}/context_qnn.bin"] = record["files"]["context_qnn.bin"]
    path.write_text(json.dumps(record))


DAMAGES = [
    *((name, damage) for name in sorted(FILES) for damage in (truncate, flip_a_bit, make_empty, unlink, make_a_folder)),
    ("context.json", change_record(format=0)),
    ("context.json", change_record(files={})),
    ("context.json", change_record(files=[])),
    ("context.json", change_record(files={"context.onnx": None})),
    ("context.json", lambda path: path.write_text("[]")),
    ("context.json", lambda path: path.write_text("[" * 100_000)),
    ("context.json", without_the_wrapper),
    ("context.json", with_a_file_outside),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_damaged_context_is_never_found_and_is_rebuilt(contexts, context, caplog, name, damage):
    damage(context / name)
    assert contexts.find(KEY) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"{context} is damaged (")
    written = []
    wrapper = contexts.make(KEY, lambda path: (write(path), written.append(path)))
    assert len(written) == 1
    assert {path.name for path in context.iterdir()} == FILES
    assert contexts.find(KEY) == wrapper


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_interrupted_write_leaves_no_files(contexts, error):
    def interrupt(wrapper):
        write(wrapper)
        raise error

    with pytest.raises(error):
        contexts.make(KEY, interrupt)
    assert not any(contexts.path.iterdir())
    contexts.make(KEY, write)


def test_leftovers_of_a_dead_process_are_ignored_and_removed_later(contexts, context):
    other = contexts.path / f".{KEY}x.part"
    shutil.copytree(context, other)
    assert contexts.find(other.name.strip(".")) is None
    contexts.make("another", write)
    assert {path.name for path in contexts.path.iterdir()} == {KEY, "another"}


MAKE = """
import sys
from pathlib import Path
from chunkrt.backends.qnn.contexts import ContextFolder, store_difference
def write(wrapper):
    print("writing", flush=True)
    wrapper.write_text(sys.stdin.readline())
wrapper = ContextFolder(Path(sys.argv[1])).make("key", write)
print(wrapper.read_text(), end="")
"""


@pytest.fixture
def process(tmp_path):
    """Return a function that starts a process that makes a context; it writes the text, or waits for another writer."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    started = []

    def start(text=""):
        started.append(subprocess.Popen([sys.executable, "-P", "-c", MAKE, str(tmp_path)], text=True, **pipes))
        started[-1].stdin.write(text)
        started[-1].stdin.flush()
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def test_second_process_waits_for_the_writer(process, tmp_path):
    first = process()
    assert first.stdout.readline() == "writing\n"
    second = process("the second\n")
    assert second.stderr.readline() == "another process is compiling for the NPU; waiting for it\n"
    assert first.communicate("the first\n", timeout=60) == ("the first\n", "")
    assert second.communicate(timeout=60) == ("the first\n", "")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["key"]


def test_waiting_process_writes_after_the_writer_is_killed(process, tmp_path):
    first = process()
    assert first.stdout.readline() == "writing\n"
    second = process("the second\n")
    assert second.stderr.readline() == "another process is compiling for the NPU; waiting for it\n"
    first.kill()
    assert second.communicate(timeout=60) == ("writing\nthe second\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


# The parts of a key; these tests need no library.


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """An engine directory."""
    folder = tmp_path_factory.mktemp("engine") / "engine"
    compile_checkpoint(CHECKPOINT, Recipe(scheme=SCHEME), {}, folder, model="toy")
    return folder


@pytest.fixture
def qnn(monkeypatch, tmp_path):
    """Return a function that makes the backend with some version of the library."""

    def make(soc="SM8650", version="2.7.0", **options):
        htp = Htp(version=version, is_emulated=True, device=None, backend_path="")
        monkeypatch.setattr(backend, "open_htp", lambda: htp)
        return QnnBackend(find_soc(soc), contexts=tmp_path / "contexts", options=HtpOptions(**options))

    return make


def static(plan, index=0):
    return [subgraph for subgraph in plan.subgraphs if subgraph.device == "npu"][index]


def test_key_depends_on_all_sources(engine, qnn, tmp_path):
    plan, weights = read_plan(engine), open_weights(engine)
    subgraph = static(plan)
    keys = [
        qnn().key(subgraph, plan, 32, SCHEME, weights),
        qnn().key(subgraph, plan, 33, SCHEME, weights),
        qnn().key(subgraph, plan, 32, SCHEMES["w8a8"], weights),
        qnn().key(static(plan, 1), plan, 32, SCHEME, weights),
        qnn(soc="SM8750").key(subgraph, plan, 32, SCHEME, weights),
        qnn(version="2.7.1").key(subgraph, plan, 32, SCHEME, weights),
        qnn(vtcm_mb=4).key(subgraph, plan, 32, SCHEME, weights),
        *(qnn().key(subgraph, plan, 32, SCHEME, changed) for changed in changed_weights(subgraph, weights)),
        qnn().key(replace(subgraph, nodes=changed_norm(subgraph)), plan, 32, SCHEME, weights),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0].startswith("SM8650-w8a16-r32-static.0-")
    assert keys[0] == qnn().key(subgraph, plan, 9, SCHEME, weights)  # also a graph of 32 rows
    few = [qnn().key(subgraph, plan, length, SCHEME, weights) for length in (1, 2, 3, 8)]
    assert [key.split("-")[2] for key in few] == ["r2", "r2", "r8", "r8"]
    assert len({*few, keys[0]}) == 3


def changed_weights(subgraph, weights):
    """Yield stores with one changed bit, in each array of the subgraph."""
    for name in subgraph.weights:
        for suffix, array in weights.parts(name):
            changed = array.copy()
            changed.view(np.uint8).reshape(-1)[0] ^= 1
            logical_shapes = {name: ()}
            parts = {n + s: a for n in subgraph.weights for s, a in weights.parts(n)}
            yield WeightStore(parts | {name + suffix: changed}, logical_shapes)


def changed_norm(subgraph):
    norm, *others = subgraph.nodes
    return (replace(norm, attributes={**norm.attributes, "epsilon": 0.5}), *others)


def test_key_is_independent_of_path_and_run_options(engine, qnn, tmp_path):
    copy = shutil.copytree(engine, tmp_path / "elsewhere")
    keys = {
        options.key(static(plan := read_plan(folder)), plan, 32, SCHEME, open_weights(folder))
        for folder in (engine, copy)
        for options in (qnn(), qnn(performance_mode="balanced"), qnn(rpc_control_latency_us=100))
    }
    assert len(keys) == 1


def test_unwritable_folder_is_a_compile_error(engine, qnn, tmp_path):
    (tmp_path / "contexts").write_text("a file in the way")
    plan = read_plan(engine)
    with pytest.raises(
        CompileError, match=r"^cannot write the context of static.0 to [^\n]+; set CHUNKRT_HOME to move it$"
    ):
        qnn().prepare(static(plan), plan, 32, SCHEME, open_weights(engine))


def test_contexts_of_another_library_version_are_not_loaded(engine, tmp_path):
    pytest.importorskip("onnxruntime_qnn", reason="contexts are compiled by onnxruntime-qnn")
    plan, weights = read_plan(engine), open_weights(engine)

    def prepare(version=None, **folders):
        qnn = QnnBackend(find_soc("SM8650"), **folders)
        qnn.htp = replace(qnn.htp, version=version or qnn.htp.version)
        return qnn.prepare(static(plan), plan, 8, SCHEME, weights), qnn.num_compiled

    old, _ = prepare("2.6.0", contexts=tmp_path / "contexts")
    assert prepare("2.6.0", contexts=tmp_path / "contexts") == (old, 0)
    new, num_compiled = prepare(contexts=tmp_path / "contexts")
    assert (num_compiled, new == old) == (1, False)
    assert prepare(contexts=tmp_path / "more", compiled=tmp_path / "contexts") == (new, 0)
    assert prepare("2.8.0", contexts=tmp_path / "more", compiled=tmp_path / "contexts")[1] == 1
