"""`chunkrt compile`: an engine directory for devices that is complete or absent, and self-contained."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil
import pytest
from calibrated import calibrated
from damaged_files import flip_a_bit
from fixture_checkpoints import checkpoint, input_ids
from random_folders import write_folder

import chunkrt
from chunkrt import files
from chunkrt.backends.qnn import SOCS, HtpOptions, backend, library
from chunkrt.checkpoints.checkpoint import sampled_digest
from chunkrt.cli import doctor
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine import compile_workers, deploy
from chunkrt.engine.deploy import compile_engine
from chunkrt.engine.model_options import compiled_chunk_length
from chunkrt.engine.options import EngineOptions
from chunkrt.engine_directory.manifest import FORMAT, NpuTarget, read_manifest
from chunkrt.errors import CompileError, ConfigError, ModelError
from chunkrt.quant.scheme import SCHEMES

pytest.importorskip("onnxruntime_qnn", reason="contexts are compiled by onnxruntime-qnn")

CHECKPOINT = checkpoint("llama_biased_gguf")
TOKENS = input_ids("llama_biased_gguf")[:20]
COMPILED_FOR = [("SM8650", 16), ("SM8650", 32), ("SM8750", 16), ("SM8750", 32)]
STATIC = ("static.0", "static.1", "static.2")
FILES = {"engine.json", "plan.json", "weights.safetensors", "tokenizer.json", "text.json"}
CONTEXT = {"context.json", "context.onnx", "context_qnn.bin"}


def compile_into(output, model=CHECKPOINT, socs=("SM8650",), chunk_lengths=(8,)):
    options = EngineOptions(npu="qnn" if socs else "native")
    return compile_engine(str(model), output, options, socs=socs, chunk_lengths=chunk_lengths)


def run(model, **options):
    """Return the logits of the prompt on the emulated NPU, and the number of contexts that had to be compiled."""
    with chunkrt.load(model, npu="qnn", **options) as engine:
        logits = engine.session().prefill(TOKENS, logits="all").logits
        return logits, getattr(engine.loaded.npu_backend, "num_compiled", None)


def files_of(folder):
    """Return the SHA-256 of every file below a folder, except hidden files and folders, by path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path: path.relative_to(folder).parts for path in paths}
    return {
        "/".join(names[path]): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if not any(part.startswith(".") for part in names[path])
    }


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """An engine directory for two SoCs and two chunk lengths, which share their graphs, and its description."""
    output = tmp_path_factory.mktemp("deployed") / "output"
    return output, compile_into(output, socs=("SM8650", "SM8750"), chunk_lengths=(16, 32))


@pytest.fixture
def device(deployed, tmp_path, monkeypatch):
    """A copy of it at another path, which may be damaged, with an empty cache."""
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    return shutil.copytree(deployed[0], tmp_path / "copied" / "engine")


@pytest.fixture
def without_onnx(monkeypatch):
    """Simulate a missing onnx-ir."""
    monkeypatch.setitem(sys.modules, "chunkrt.backends.qnn.model", None)


def test_engine_directory_holds_exactly_these_files(deployed):
    output, written = deployed
    assert [path.name for path in output.parent.iterdir()] == ["output"]
    assert {path.name for path in output.iterdir()} == FILES | {"npu"}
    contexts = list((output / "npu").iterdir())
    names = sorted(path.name.rpartition("-")[0] for path in contexts)
    assert names == sorted(f"{soc}-w8a16-r32-{static}" for soc in ("SM8650", "SM8750") for static in STATIC)
    assert all({path.name for path in context.iterdir()} == CONTEXT for context in contexts)
    peak = written.pop("peak_memory_bytes")
    assert peak >= psutil.Process().memory_info().rss / 2  # the rest of this process may have grown since then
    assert written == {
        "model": str(CHECKPOINT),
        "scheme": "w8a16",
        "bytes": sum(path.stat().st_size for path in output.rglob("*") if path.is_file()),
        "npu": [
            {"soc": soc, "chunk_length": chunk, "library": version("onnxruntime-qnn"), "contexts": len(STATIC)}
            for soc, chunk in COMPILED_FOR
        ],
    }


def test_manifest_contains_versions_hashes_and_targets(deployed):
    output, _ = deployed
    digests = files_of(output)
    assert json.loads((output / "engine.json").read_text()) == {
        "format": FORMAT,
        "chunkrt": version("chunkrt"),
        "model": str(CHECKPOINT),
        "scheme": json.loads(json.dumps(asdict(SCHEMES["w8a16"]))),
        "files": {name: [(output / name).stat().st_size, digests[name]] for name in sorted(FILES - {"engine.json"})},
        "npu": [
            {"soc": soc, "chunk_length": chunk, "library": version("onnxruntime-qnn")} for soc, chunk in COMPILED_FOR
        ],
        "placement": {},
        "ranks": {"rank": 0, "size": 1},
        "checkpoint": sampled_digest(CHECKPOINT),
        "num_parameters": plan_checkpoint(CHECKPOINT, {}).num_parameters,
        "npu_attention": {},
        "npu_settings": {},
    }


def test_weights_are_stored_once_for_all_chunk_lengths(tmp_path):
    """A further length adds only contexts of other shapes and a line of the manifest."""
    one = compile_into(tmp_path / "one", chunk_lengths=(32,))
    two = compile_into(tmp_path / "two", chunk_lengths=(32, 128))
    first, second = files_of(tmp_path / "one"), files_of(tmp_path / "two")
    added = {name for name in second if name not in first}
    assert {name: digest for name, digest in second.items() if name not in added | {"engine.json"}} == {
        name: digest for name, digest in first.items() if name != "engine.json"
    }
    assert {name.split("-")[2] for name in added} == {"r128"}
    size = (tmp_path / "two" / "engine.json").stat().st_size - (tmp_path / "one" / "engine.json").stat().st_size
    assert two["bytes"] - one["bytes"] == size + sum((tmp_path / "two" / name).stat().st_size for name in added)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint with one layer of SmolLM2-135M's shape, and its calibration."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    path = write_folder(folder / "wide", num_hidden_layers=1, max_position_embeddings=256, **sizes)
    return calibrated(path, folder / "wide.npz"), folder / "wide.npz"


def test_contexts_of_several_chunk_lengths_store_weights_once_per_soc(wide, tmp_path, monkeypatch):
    path, calibration = wide
    options = EngineOptions(npu="qnn", scheme="w8a16", calibration=calibration)

    def compiled(name, chunk_lengths):
        compile_engine(str(path), tmp_path / name, options, socs=["SM8650", "SM8750"], chunk_lengths=chunk_lengths)
        return sum(path.stat().st_size for path in (tmp_path / name / "npu").rglob("*") if path.is_file())

    assert compiled("several", [1, 32, 128]) < 1.1 * compiled("one", [32])
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    tokens = np.arange(3)
    for soc, length in (("SM8750", 128), ("SM8650", 1)):
        with chunkrt.load(tmp_path / "several", npu="qnn", soc=soc, chunk_length=length) as engine:
            assert engine.loaded.npu_backend.num_compiled == 0
            found = engine.session().prefill(tokens).logits
        with chunkrt.load(path, npu="qnn", scheme="w8a16", calibration=calibration, chunk_length=length) as engine:
            np.testing.assert_array_equal(found, engine.session().prefill(tokens).logits)
    again = EngineOptions(npu="qnn")
    compile_engine(str(tmp_path / "several"), tmp_path / "again", again, socs=["SM8750"], chunk_lengths=[128])
    with chunkrt.load(tmp_path / "again", npu="qnn") as engine:
        assert engine.loaded.npu_backend.num_compiled == 0


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("soc", "chunk"), COMPILED_FOR)
def test_engine_directory_equals_the_checkpoint_and_compiles_nothing(device, tmp_path, soc, chunk):
    found, num_compiled = run(device, soc=soc, chunk_length=chunk)
    assert num_compiled == 0
    assert not (tmp_path / "home").exists()
    expected, num_compiled = run(CHECKPOINT, soc=soc, chunk_length=chunk)
    assert num_compiled == len(STATIC)
    np.testing.assert_array_equal(found, expected)
    renamed = device.rename(tmp_path / "renamed")
    np.testing.assert_array_equal(run(renamed, soc=soc, chunk_length=chunk)[0], expected)


def test_default_options_are_those_of_the_compilation(device):
    with chunkrt.load(device, npu="qnn") as engine:
        assert (engine.loaded.npu_backend.soc.name, engine.chunk_length) == COMPILED_FOR[1] == ("SM8650", 32)


@pytest.mark.parametrize(("lengths", "chosen"), [([], 32), ([8], 8), ([1, 32, 128], 32), ([1, 128, 64], 128)])
def test_usual_or_longest_chunk_length_is_the_default(deployed, lengths, chosen):
    targets = [NpuTarget(soc="SM8650", chunk_length=length, library="") for length in lengths]
    assert compiled_chunk_length(replace(read_manifest(deployed[0]), npu=targets)) == chosen


WITHOUT_ONNX = """
import json, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"onnx", "onnx_ir", "gguf", "ml_dtypes", "safetensors"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import chunkrt
from chunkrt.errors import CompileError
try:
    with chunkrt.load(sys.argv[1], npu="qnn", **json.loads(sys.argv[2])) as engine:
        result = engine.session().prefill(json.loads(sys.argv[3]), logits="all")
        assert engine.session().prefill("some text").logits is not None
        print(json.dumps([result.logits.tobytes().hex(), engine.loaded.npu_backend.num_compiled]))
except CompileError as error:
    sys.exit(str(error))
"""


def run_without_onnx(folder, tmp_path, **options):
    """Run in another process, with another working folder, an empty cache, and without the packages for compiling."""
    arguments = [str(folder), json.dumps(options), json.dumps(TOKENS)]
    environment = os.environ | {"CHUNKRT_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-P", "-c", WITHOUT_ONNX, *arguments]
    return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)


def test_engine_directory_runs_without_onnx_and_checkpoint(device, tmp_path):
    finished = run_without_onnx(device, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == [run(device)[0].tobytes().hex(), 0]
    assert not (tmp_path / "home").exists()


def test_missing_onnx_prints_one_line(device, tmp_path):
    finished = run_without_onnx(device, tmp_path, chunk_length=48, recompile=True)
    assert finished.returncode == 1
    line = finished.stderr.splitlines()[-1]
    assert line.startswith(f"{device / 'npu'} contains no usable context of static.0 for SM8650, chunks of 48 and ")
    assert line.endswith("needs onnx-ir; pip install onnx-ir, or recompile the model")


OTHERS = pytest.mark.parametrize(
    ("options", "lacks"),
    [
        ({"chunk_length": 48}, "for SM8650, chunks of 48 and "),
        ({"soc": "SM8850"}, "for SM8850, chunks of 32 and "),
        ({"attention": "npu", "npu_window": "24"}, " with `attention=npu` in place of auto;"),
        ({"htp": HtpOptions(vtcm_mb=4)}, " with vtcm_mb=4;"),
    ],
    ids=str,
)


@OTHERS
def test_missing_contexts_are_an_error_before_anything_is_compiled(device, tmp_path, options, lacks):
    with pytest.raises(CompileError) as raised:
        run(device, **options)
    told = str(raised.value)
    assert told.startswith(f"{device} was compiled for SM8650, chunks of 16; SM8650, chunks of 32; ")
    assert lacks in told
    assert told.endswith("; choose a compiled target, or compile here with `recompile=True`")
    assert not list((tmp_path / "home").glob("contexts/*"))


@OTHERS
def test_missing_contexts_are_compiled_into_the_cache_on_request(device, tmp_path, options, lacks, caplog):
    before = files_of(device)
    _, num_compiled = run(device, recompile=True, **options)
    (told,) = [message for message in caplog.messages if "was compiled for" in message]
    assert lacks in f"{told};"
    assert told.endswith(f"missing contexts are compiled into {tmp_path / 'home' / 'contexts'}")
    assert num_compiled == len(list((tmp_path / "home" / "contexts").iterdir())) > 0
    assert run(device, **options)[1] == 0
    assert files_of(device) == before


def test_missing_contexts_with_fallback_leave_all_work_to_the_cpu(device, caplog):
    with chunkrt.load(device, npu="qnn", soc="SM8850", on_npu_failure="fallback") as engine:
        assert engine.loaded.npu_backend is engine.loaded.cpu_backend
    (told,) = [message for message in caplog.messages if "was compiled for" in message]
    assert told.endswith("compile here with `recompile=True`; the CPU takes over")


def test_command_names_the_flag_that_compiles(device, command):
    finished = command("run", device, "--npu", "qnn", "--soc", "SM8850", "-p", "hello")
    assert (finished.status, finished.out) == (1, "")
    (line,) = [line for line in finished.err.splitlines() if "was compiled for" in line]
    assert line.endswith("or compile here with --recompile")
    assert command("run", device, "--npu", "qnn", "--soc", "SM8850", "--recompile", "-p", "hello", "-n", 1).status == 0


def test_engine_directory_keeps_the_attention_options(tmp_path, monkeypatch, command):
    options = EngineOptions(npu="qnn", attention="npu", npu_window="8,16", npu_graph="layers=1", context_length=24)
    output = tmp_path / "output"
    compile_engine(str(CHECKPOINT), output, options, socs=["SM8650"], chunk_lengths=[8])
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    with chunkrt.load(output, npu="qnn") as engine:
        assert engine.context_length == 24
        assert (engine.loaded.npu_backend.num_compiled, engine.options.npu_window) == (0, "8,16")
    with pytest.raises(CompileError, match=r"with `npu_window=12` in place of 8,16; choose"):
        chunkrt.load(output, npu="qnn", npu_window="12")
    with chunkrt.load(output, npu="native") as engine:
        assert engine.options.attention == "auto"
    for arguments in (("plan", output, "--npu", "qnn"), ("fit", output, "--soc", "SM8650")):
        finished = command(*arguments, "--json")
        assert "of 8" in finished.out or "at most 8 tokens before them" in finished.err
    again = compile_engine(
        str(output), tmp_path / "again", EngineOptions(npu="qnn"), socs=["SM8650"], chunk_lengths=[8]
    )
    assert again["npu"][0]["contexts"] == len(list((output / "npu").iterdir()))
    assert read_manifest(tmp_path / "again").npu_attention == read_manifest(output).npu_attention


def findings_of(command, folder):
    finished = command("doctor", folder, "--json")
    assert finished.status == 0, finished.err
    return {finding["what"]: finding for finding in json.loads(finished.out) if finding["what"] in DIRECTORY_CHECKS}


DIRECTORY_CHECKS = ("directory", "contexts", "library", "SoC", "driver", "glibc", "ADSP_LIBRARY_PATH")


def test_doctor_checks_an_engine_directory(device, command, tmp_path, monkeypatch):
    found = findings_of(command, device)
    assert list(found) == ["directory", "contexts", "library", "SoC"]
    assert all(finding["ok"] for finding in found.values())
    assert found["contexts"]["found"] == "; ".join(f"{soc}, chunks of {chunk}" for soc, chunk in COMPILED_FOR)
    (context,) = (device / "npu").glob("SM8650-w8a16-r32-static.1-*")
    flip_a_bit(context / "context_qnn.bin")
    manifest = json.loads((device / "engine.json").read_text())
    for target in manifest["npu"]:
        target["library"] = "2.6.0"
    (device / "engine.json").write_text(json.dumps(manifest))
    found = findings_of(command, device)
    assert [what for what, finding in found.items() if not finding["ok"]] == ["contexts", "library"]
    assert found["contexts"]["found"] == f"{context.name} is damaged"
    assert found["library"]["advice"] == "pip install onnxruntime-qnn==2.6.0"
    (device / "plan.json").write_text("{}")
    assert "plan.json has changed" in findings_of(command, device)["directory"]["found"]


def test_doctor_reports_missing_contexts(device, command):
    (device / "npu" / ".DS_Store").touch()  # macOS leaves it in copied folders
    assert findings_of(command, device)["contexts"]["ok"]
    shutil.rmtree(device / "npu")
    found = findings_of(command, device)["contexts"]
    assert (found["ok"], found["found"]) == (False, "those of {}, chunks of {}, are missing".format(*COMPILED_FOR[0]))


@pytest.mark.skipif(sys.platform != "linux", reason="these parts are those of Linux and Android")
def test_doctor_checks_the_parts_that_a_device_needs(device, command, tmp_path, monkeypatch):
    monkeypatch.setattr(library, "is_emulating", lambda: False)
    monkeypatch.setattr(doctor.qnn, "is_emulating", lambda: False)
    monkeypatch.setattr(library, "LINUX_DEVICES", tmp_path / "devices")
    (tmp_path / "devices" / "soc0").mkdir(parents=True)
    (tmp_path / "devices" / "soc0" / "machine").write_text("SM8850\n")
    monkeypatch.setenv("ADSP_LIBRARY_PATH", f"{tmp_path}/none;{tmp_path}")
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: ("glibc", "2.31"))
    found = findings_of(command, device)
    assert [what for what, finding in found.items() if not finding["ok"]] == list(DIRECTORY_CHECKS[3:])
    assert found["SoC"]["advice"] == "compile the model with --soc SM8850"
    (tmp_path / "libQnnHtpV75Skel.so").touch()
    (tmp_path / "devices" / "soc0" / "machine").write_text("SM8650\n")
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: ("glibc", "2.35"))
    found = findings_of(command, device)
    assert [what for what, finding in found.items() if not finding["ok"]] == ["driver"]


def test_contexts_of_another_version_are_reported(device, without_onnx, tmp_path):
    shutil.copytree(device, tmp_path / "other")
    manifest = tmp_path / "other" / "engine.json"
    data = json.loads(manifest.read_text())
    for target in data["npu"]:
        target["library"] = "2.6.0"
    manifest.write_text(json.dumps(data))
    with pytest.raises(
        CompileError, match=r"pip install onnxruntime-qnn==2\.6\.0, which compiled the existing contexts, or choose"
    ):
        run(tmp_path / "other", chunk_length=48)
    with pytest.raises(CompileError, match=r"or pip install onnx-ir, or recompile the model$"):
        run(tmp_path / "other", chunk_length=48, recompile=True)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.fixture(params=[truncate, flip_a_bit])
def damaged_context(device, request):
    """The folder of a context with a damaged binary."""
    (context,) = (device / "npu").glob("SM8650-w8a16-r32-static.1-*")
    request.param(context / "context_qnn.bin")
    return context


def test_damaged_context_is_compiled_again_into_the_cache(device, damaged_context, deployed, caplog):
    before = files_of(device)
    logits, num_compiled = run(device)
    assert num_compiled == 1
    warnings = [record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()]
    assert warnings == [f"{damaged_context} is damaged (context_qnn.bin differs from the written file); it is not used"]
    np.testing.assert_array_equal(logits, run(deployed[0])[0])
    assert run(device)[1] == 0
    assert files_of(device) == before


def test_damaged_context_without_onnx_is_an_error_or_falls_back_to_the_cpu(
    device, damaged_context, without_onnx, caplog
):
    with pytest.raises(CompileError, match=r"npu contains no usable context of static.1 for SM8650, chunks of 32"):
        run(device)
    with chunkrt.load(device, npu="qnn", on_npu_failure="fallback") as engine:
        assert engine.loaded.npu_backend is engine.loaded.cpu_backend
        found = engine.session().prefill(TOKENS).logits
    assert caplog.records[-1].getMessage().endswith("; the CPU takes over")
    with chunkrt.load(device, npu="native") as engine:
        np.testing.assert_array_equal(found, engine.session().prefill(TOKENS).logits)


@pytest.mark.parametrize("name", sorted(FILES - {"engine.json"}))
@pytest.mark.parametrize("damage", [truncate, flip_a_bit])
def test_damaged_file_is_reported(device, name, damage):
    damage(device / name)
    with pytest.raises(ModelError, match=f"{name} has changed since the model was compiled"):
        run(device)
    with pytest.raises(ModelError, match=f"{name} has changed since the model was compiled"):
        compile_into(device.with_name("again"), device)


def test_compile_extends_an_engine_directory(device, tmp_path):
    written = compile_into(tmp_path / "output", device, socs=("SM8750", "SM8850", "SM8750"), chunk_lengths=(16,))
    assert [(target["soc"], target["chunk_length"]) for target in written["npu"]] == [("SM8750", 16), ("SM8850", 16)]
    compiled = {path.name.partition("-")[0] for path in (tmp_path / "home" / "contexts").iterdir()}
    assert compiled == {"SM8850"}
    (tmp_path / "home").rename(tmp_path / "nobody's")
    assert [run(tmp_path / "output", soc=soc)[1] for soc in ("SM8750", "SM8850")] == [0, 0]


def test_compile_without_socs_is_for_the_cpu(tmp_path):
    written = compile_into(tmp_path / "output", socs=())
    assert (written["scheme"], written["npu"]) == ("w8a8-dynamic", [])
    assert {path.name for path in (tmp_path / "output").iterdir()} == FILES


@pytest.mark.parametrize("make", ["mkdir", "touch"])
def test_existing_output_is_not_overwritten(tmp_path, make):
    getattr(tmp_path / "output", make)()
    with pytest.raises(ConfigError, match="output exists already; choose another folder, or delete it"):
        compile_into(tmp_path / "output")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"socs": ("SM8650", "SM9999")}, f"unknown SoC 'SM9999'; .*there are: {', '.join(SOCS)}"),
        ({"chunk_lengths": (8, 129)}, "chunk length 129 is longer than the model's context of 128"),
    ],
)
def test_impossible_targets_are_rejected_before_anything_is_written(tmp_path, targets, message):
    with pytest.raises(ConfigError, match=message):
        compile_into(tmp_path / "output", **targets)
    assert not any(tmp_path.iterdir())


def test_compile_to_a_full_disk_reports_one_line_and_leaves_no_files(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(deploy.shutil, "copytree", full)
    with pytest.raises(ModelError, match=r"^cannot write the engine directory \S+[/\\]output: the disk is full$"):
        compile_into(tmp_path / "output")
    assert not any(tmp_path.iterdir())


def test_peak_memory_includes_memory_that_was_released(tmp_path):
    program = "import runpy; block = b'x' * 1_500_000_000; del block; runpy.run_module('chunkrt', run_name='__main__')"
    arguments = ["compile", CHECKPOINT, "--soc", "SM8650", "--chunk", "8", "-o", tmp_path / "made", "--json"]
    finished = subprocess.run([sys.executable, "-P", "-c", program, *map(str, arguments)], stdout=subprocess.PIPE)
    assert 1_500_000_000 < json.loads(finished.stdout)["peak_memory_bytes"] < 1_700_000_000


def test_command_reports_its_output(command, tmp_path):
    arguments = ("compile", CHECKPOINT, "--soc", "8 Gen 3, sm8750", "--chunk", "16,32,16")
    finished = command(*arguments, "-o", tmp_path / "text")
    size = sum(path.stat().st_size for path in (tmp_path / "text").rglob("*") if path.is_file())
    assert (finished.status, finished.err) == (0, "")
    first, *targets = finished.out.splitlines()
    assert first.startswith(f"{tmp_path / 'text'}: {size / 1e6:.0f} MB, scheme w8a16; peak memory ")
    assert targets == [
        *(f"  {soc}, chunks of {chunk}: 3 contexts" for soc, chunk in COMPILED_FOR),
    ]
    finished = command(*arguments, "-o", tmp_path / "json", "--json")
    assert [(target["soc"], target["chunk_length"]) for target in json.loads(finished.out)["npu"]] == COMPILED_FOR
    assert files_of(tmp_path / "json") == files_of(tmp_path / "text")
    answers = [
        command("run", model, "-p", "hello", "-n", 4, "--npu", "qnn", *options)
        for model, options in [(tmp_path / "text", ()), (CHECKPOINT, ("--chunk", 32, "--soc", "SM8650"))]
    ]
    assert answers[0].out == answers[1].out != ""


def test_vtcm_setting_is_compiled_into_the_contexts(command, tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    arguments = ("compile", CHECKPOINT, "-o", tmp_path / "output", "--soc", "SM8650", "--htp", "vtcm_mb=4")
    assert command(*arguments).status == 0
    (tmp_path / "home").rename(tmp_path / "nobody's")
    assert run(tmp_path / "output", htp=HtpOptions(vtcm_mb=4))[1] == 0
    assert run(tmp_path / "output")[1] == 0
    assert run(tmp_path / "output", htp=HtpOptions(vtcm_mb=2), recompile=True)[1] == len(STATIC)


def test_ctrl_c_leaves_no_output_and_the_next_call_continues(command, tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    (tmp_path / "outputs").mkdir()
    open_session, compiled = backend.open_session, []

    def interrupted(*arguments, **options):
        open_session(*arguments, **options)
        compiled.append(options["write_context"])
        if len(compiled) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(backend, "open_session", interrupted)
    arguments = ("compile", CHECKPOINT, "-o", tmp_path / "outputs" / "output", "--soc", "SM8650,SM8750")
    finished = command(*arguments)
    assert (finished.status, finished.out, finished.err.strip()) == (130, "", "interrupted")
    assert not any((tmp_path / "outputs").iterdir())
    assert len(list((tmp_path / "home" / "contexts").iterdir())) == 4
    assert command(*arguments).status == 0
    assert len(compiled) == 5 + 6 - 4
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["output"]


COMPILE = """
import sys
import chunkrt.backends.qnn.backend, chunkrt.compile.compiler, chunkrt.engine.deploy
from chunkrt.cli import main
print("ready", flush=True)
main()
"""


def compilation(place):
    """Return the arguments of `chunkrt`."""
    return ["compile", str(CHECKPOINT), "-o", str(place / "output"), "--soc", "SM8650", "--chunk", "8"]


def compile_here(command, monkeypatch, place):
    """Compile without interruption."""
    with monkeypatch.context() as patch:
        patch.setenv("CHUNKRT_HOME", str(place / "home"))
        assert command(*compilation(place)).status == 0


def start_compiling(place):
    """Compile in another process, which has imported everything when this returns."""
    environment = os.environ | {"CHUNKRT_HOME": str(place / "home")}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", COMPILE, *compilation(place)], env=environment, stdout=subprocess.PIPE
    )
    assert process.stdout.readline().strip() == b"ready"
    return process


def listing(place):
    """Return the visible files of each folder."""
    folders = [place / "output", *(place / "output" / "npu").glob("*"), *(place / "home").glob("*/*")]
    return {
        str(folder.relative_to(place)): {path.name for path in folder.glob("[!.]*")}
        for folder in folders
        if folder.exists() and not folder.name.startswith(".")
    }


@pytest.mark.parametrize("num_kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_compile_killed_at_any_moment_leaves_nothing_that_loads_wrongly(command, tmp_path, monkeypatch, num_kills):
    began = time.monotonic()
    compile_here(command, monkeypatch, tmp_path / "clean")
    duration = time.monotonic() - began
    clean = listing(tmp_path / "clean")
    assert len(clean) == 1 + len(STATIC) + 3 + len(STATIC)  # the output, a calibration, an engine, a digest
    expected, _ = run(tmp_path / "clean" / "output")

    place, rng, num_started, num_killed = tmp_path / "killed", random.Random(20240607), 0, 0
    while num_killed < num_kills:
        num_started += 1
        if num_killed % 2 == 0 or (place / "output").exists():  # otherwise it continues where the last one was killed
            shutil.rmtree(place, ignore_errors=True)
        process = start_compiling(place)
        try:
            process.communicate(timeout=duration * (num_killed + rng.random()) / num_kills)
            duration *= 0.9  # it ended before it could be killed
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            num_killed += 1
        assert listing(place).items() <= clean.items()
        if (place / "output").exists():
            logits, num_compiled = run(place / "output")
            assert num_compiled == 0
            np.testing.assert_array_equal(logits, expected)
        if listing(place):  # missing files are copied from the uninterrupted run, so that nothing has to be compiled
            home = shutil.copytree(tmp_path / "clean" / "home", tmp_path / f"home-{num_started}")
            shutil.copytree(place / "home", home, dirs_exist_ok=True)
            monkeypatch.setenv("CHUNKRT_HOME", str(home))
            logits, num_compiled = run(CHECKPOINT, soc="SM8650", chunk_length=8)
            assert num_compiled == 0
            np.testing.assert_array_equal(logits, expected)

    shutil.rmtree(place / "output", ignore_errors=True)
    compile_here(command, monkeypatch, place)
    assert listing(place) == clean
    np.testing.assert_array_equal(run(place / "output")[0], expected)
    locks = {".calibrations.lock", ".contexts.lock", ".engines.lock"}  # Windows removes them
    assert {path.name for path in place.rglob(".*")} == (set() if sys.platform == "win32" else locks)


def test_second_compilation_into_one_folder_is_an_error(tmp_path, waiting):
    """Each process has a cache of its own; the lock file is next to the folder."""
    output, writing = tmp_path / "out", threading.Event()

    def first():
        with files.written_aside(output) as aside:
            aside.mkdir()
            (aside / "engine.json").write_text("{}")
            writing.set()
            assert waiting.wait(60)

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(first)
        assert writing.wait(60)
        with pytest.raises(ConfigError, match="out exists already"):
            compile_engine(str(checkpoint("llama_mha")), output, EngineOptions(npu="native"), socs=[], chunk_lengths=[])
        other.result()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in output.iterdir()] == ["engine.json"]


def test_contexts_are_compiled_in_several_processes(tmp_path, monkeypatch):
    """The parent compiles none, and the directory computes the same as one that was compiled in one process."""
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(compile_workers, "CONTEXTS_OF_A_WORKER", 1)
    told, in_parent = [], []
    make = backend.ContextFolder.make
    monkeypatch.setattr(
        backend.ContextFolder, "make", lambda folder, key, write: in_parent.append(key) or make(folder, key, write)
    )
    options = EngineOptions(npu="qnn", threads=2)
    compile_engine(
        str(CHECKPOINT),
        tmp_path / "several",
        options,
        socs=["SM8650", "SM8750"],
        chunk_lengths=[8],
        progress=lambda *news: told.append(news),
    )
    assert not in_parent
    assert [news for news in told if news[0] == "compiling for the NPU"] == [
        ("compiling for the NPU", done, 2 * len(STATIC)) for done in range(1, 2 * len(STATIC) + 1)
    ]
    found, num_compiled = run(tmp_path / "several", soc="SM8750", chunk_length=8)
    assert num_compiled == 0
    shutil.rmtree(tmp_path / "home" / "contexts")
    monkeypatch.setattr(compile_workers, "CONTEXTS_OF_A_WORKER", 100)
    compile_engine(str(CHECKPOINT), tmp_path / "one", options, socs=["SM8650", "SM8750"], chunk_lengths=[8])
    assert len(in_parent) == 2 * len(STATIC)
    np.testing.assert_array_equal(found, run(tmp_path / "one", soc="SM8750", chunk_length=8)[0])


@pytest.mark.parametrize("contexts_of_a_worker", [1, 100], ids=["workers", "one process"])
def test_the_key_of_a_context_is_computed_once(tmp_path, monkeypatch, contexts_of_a_worker):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(compile_workers, "CONTEXTS_OF_A_WORKER", contexts_of_a_worker)
    computed = []
    key = backend.QnnBackend.key

    def counted(self, *arguments):
        computed.append(key(self, *arguments))
        return computed[-1]

    monkeypatch.setattr(backend.QnnBackend, "key", counted)
    options = EngineOptions(npu="qnn", threads=2)
    compile_engine(str(CHECKPOINT), tmp_path / "out", options, socs=["SM8650"], chunk_lengths=[8])
    assert sorted(computed) == sorted(path.name for path in (tmp_path / "home" / "contexts").iterdir())
    assert len(computed) == len(STATIC)


def test_folder_of_workers_is_removed_after_a_kill(tmp_path, monkeypatch):
    """The next compilation removes the folder of a killed one, but not that of one that still runs."""
    home = tmp_path / "home"
    monkeypatch.setenv("CHUNKRT_HOME", str(home))
    program = """if True:
        import sys, time
        from pathlib import Path
        from chunkrt.engine.compile_workers import WORKERS_FOLDER
        from chunkrt.files import own_folder

        with own_folder(Path(sys.argv[1]), WORKERS_FOLDER) as folder:
            (folder / "context").write_text("half")
            print(folder, flush=True)
            time.sleep(600)
        """
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(home)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        killed, living = (Path(process.stdout.readline().strip()) for process in started)
        started[0].kill()
        started[0].wait(60)
        assert (killed / "context").exists()
        options = EngineOptions(npu="qnn", threads=2)
        compile_engine(str(CHECKPOINT), tmp_path / "out", options, socs=["SM8650"], chunk_lengths=[8])
        assert (living / "context").exists()
        left = {path.name for path in home.glob(f"{compile_workers.WORKERS_FOLDER}*")}
        assert left == {living.name, f"{living.name}.lock"}
    finally:
        for process in started:
            process.kill()
            process.communicate()


def die(*_):
    """Serve as the start of a worker process that is ended, for example for lack of memory."""
    os._exit(1)


def test_contexts_are_compiled_in_one_process_if_the_others_die(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(compile_workers, "CONTEXTS_OF_A_WORKER", 1)
    monkeypatch.setattr(compile_workers, "_start", die)
    options = EngineOptions(npu="qnn", threads=2)
    compile_engine(str(CHECKPOINT), tmp_path / "out", options, socs=["SM8650"], chunk_lengths=[8])
    expected = "a process that compiles contexts died; the others are compiled one after another"
    assert [record.getMessage() for record in caplog.records if record.name.endswith("workers")] == [expected]
    assert run(tmp_path / "out", chunk_length=8)[1] == 0
