"""Plug-ins of each kind, from a package that pip installs, and the treatment of broken ones."""

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir
import pytest
import tokenizers
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from installed import entry
from safetensors.numpy import save_file

import chunkrt
from chunkrt import backends, plugins
from chunkrt.backends import Support
from chunkrt.backends.dispatch import registered_operators
from chunkrt.backends.qnn.htp_support import npu_support
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.cli import doctor
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.roles import default_npu_scheme, linear_refusal
from chunkrt.engine_directory.content import cache_key
from chunkrt.errors import ConfigError, UnsupportedModelError
from chunkrt.graph import decoders
from chunkrt.graph.operators import Operator, register_operator
from chunkrt.onnx.window_session import OnnxSession
from chunkrt.plugins import PluginGroup
from chunkrt.quant.scheme import SCHEMES
from chunkrt.runtime import policy

PACKAGE = Path(__file__).parent / "plugin_package"
DISTRIBUTION = "chunkrt-tiny-plugins 0.3"
GGUF = checkpoint("llama_biased_gguf")
FAMILY = "llama_gqa"
WARNING = "the plug-in 'broken' of chunkrt-tiny-plugins 0.3 (chunkrt.operators) is broken: ModuleNotFoundError"
TAKEN = (
    "the plug-in 'in_order' of chunkrt-tiny-plugins 0.3 (chunkrt.policies) is not used: chunkrt has 'in_order' itself"
)


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """Install the package and return the folder."""
    for needed in ("pip", "setuptools"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: the plug-ins cannot be, without the network")
    source, target = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("site-packages")
    shutil.copytree(PACKAGE, source)  # pip builds it in place
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--target", target]
    install = [sys.executable, "-m", "pip", "install", *options, source]
    finished = subprocess.run(install, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return target


FORKING = """
import json, os, runpy, sys
import chunkrt.cli.run, chunkrt.compile.compiler
for line in sys.stdin:
    *files, option, code, arguments = json.loads(line)
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
for number, file in enumerate(files):
    os.dup2(os.open(file, os.O_RDWR), number)
sys.argv = [option, *arguments]
if option == "-c":
    exec(code, {"__name__": "__main__"})
else:
    runpy.run_module(code, run_name="__main__", alter_sys=True)
"""


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("forked", marks=pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")),
        pytest.param("started", marks=[pytest.mark.slow] if hasattr(os, "fork") else []),
    ],
)
def python(installed, request, tmp_path_factory):
    """Return a function that runs Python with the package installed and returns exit status, stdout and stderr.

    Each call starts a process, or forks one that has imported chunkrt but has not searched for plug-ins.
    """
    path = [str(installed), str(Path(chunkrt.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "COLUMNS": "200"}
    options = {"stdout": subprocess.PIPE, "text": True, "encoding": "utf-8", "env": environment}
    start = [sys.executable, "-P"]

    def run(*arguments):
        finished = subprocess.run([*start, *map(str, arguments)], stderr=subprocess.PIPE, **options)
        return finished.returncode, finished.stdout, finished.stderr

    def fork(option, code, *arguments):
        out, err = (tmp_path_factory.mktemp("forked") / name for name in ("out", "err"))
        for file in (out, err):
            file.touch()
        line = [os.devnull, str(out), str(err), option, code, [*map(str, arguments)]]
        forking.stdin.write(json.dumps(line) + "\n")
        forking.stdin.flush()
        return int(forking.stdout.readline()), out.read_text("utf-8"), err.read_text("utf-8")

    if request.param == "started":
        yield run
    else:
        with subprocess.Popen([*start, "-c", FORKING], stdin=subprocess.PIPE, **options) as forking:
            yield fork


@pytest.fixture(scope="session")
def cli(python):
    """Return a function that runs the command line with the package installed."""
    return lambda *arguments: python("-m", "chunkrt", *arguments)


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """Return a checkpoint of the plug-in's family, without the key that has a default."""
    folder = tmp_path_factory.mktemp("tiny_llama") / "checkpoint"
    shutil.copytree(checkpoint(FAMILY), folder)
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("rms_norm_eps") == 1e-5
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "tiny_llama"}))
    return folder


def succeeded(finished):
    """Return stdout and stderr of a finished process."""
    status, *told = finished
    assert status == 0, told
    return told


def run_answer(finished):
    return json.loads(succeeded(finished)[0])


def test_doctor_lists_plugins_and_reports_faults(cli):
    found = {f["what"]: f for f in run_answer(cli("doctor", "--json")) if f["what"].startswith("chunkrt.")}
    assert {what: f["ok"] for what, f in found.items()} == {
        "chunkrt.operators broken": False,
        "chunkrt.operators tiny": True,
        "chunkrt.backends broken": False,
        "chunkrt.backends tiny": True,
        "chunkrt.backends tiny_float": True,
        "chunkrt.backends tiny_npu": True,
        "chunkrt.decoders broken_llama": False,
        "chunkrt.decoders tiny_llama": True,
        "chunkrt.decoders tiny_recurrent": True,
        "chunkrt.gguf lalma": True,
        "chunkrt.gguf llama": False,
        "chunkrt.policies broken": False,
        "chunkrt.policies in_order": False,
        "chunkrt.policies latest_chunk": True,
        "chunkrt.policies misnamed": False,
        "chunkrt.batchers last_first": True,
        "chunkrt.batchers packed": False,
    }
    assert {f["found"] for f in found.values()} == {DISTRIBUTION}
    assert not any(f["advice"] for f in found.values() if f["ok"])
    cause = "ModuleNotFoundError: No module named 'library_that_nobody_has'"
    assert all(cause in f["advice"] for what, f in found.items() if "broken" in what)
    assert "is named 'latest_chunk', not 'misnamed'" in found["chunkrt.policies misnamed"]["advice"]
    assert "chunkrt has 'in_order' itself" in found["chunkrt.policies in_order"]["advice"]


class Broken(ReferenceBackend):
    """Reference backend with other attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def plugin_of(name, group, load=lambda: print):
    return SimpleNamespace(name=name, group=group.name, distribution=name, version="1", conflict="", load=load)


@pytest.mark.parametrize(
    "attributes", [{"concurrency": 0}, {"concurrency": "2"}, {"cache_dtypes": ()}, {"supports": None}]
)
def test_doctor_reports_invalid_attributes_of_a_backend(monkeypatch, attributes):
    plugin = plugin_of("toy", backends.PLUGINS, lambda: lambda threads: Broken(**attributes))
    monkeypatch.setattr(backends.PLUGINS, "plugins", [plugin])
    finding = doctor.check_plugin(plugin)
    assert not finding.ok
    assert next(iter(attributes)) in finding.advice


def finding_of_forms(monkeypatch, *forms, package="one"):
    """Return the doctor's finding for a plug-in, where forms are registered: operator, name, package, backends."""
    registry = registered_operators().copy()
    for operator, name, *others in forms:
        owner, backend_names = others or ("one", ())
        with registry.from_distribution(owner):
            registry.register(operator, name, backends=backend_names)(lambda *inputs: inputs[0])
    monkeypatch.setattr(doctor.dispatch, "registered_operators", lambda: registry)
    return doctor.check_plugin(plugin_of(package, doctor.dispatch.PLUGINS))


def test_doctor_reports_operators_that_are_registered_twice(monkeypatch):
    forms = (("rms_norm", "fast", "one", ()), ("rms_norm", "quick", "two", ()))
    for package in ("one", "two"):
        finding = finding_of_forms(monkeypatch, *forms, package=package)
        assert not finding.ok
        assert "'rms_norm' is registered by" in finding.advice
        assert "choose one by `ops='rms_norm=NAME'`" in finding.advice


def test_doctor_reports_operators_that_do_not_exist(monkeypatch):
    finding = finding_of_forms(monkeypatch, ("rms_norm", "fast"), ("silu_mull", "fast"))
    assert not finding.ok
    assert finding.advice.startswith(
        f"the form 'fast' of one ({__name__}) never runs, because no operator has the name"
    )
    assert "'silu_mull'; did you mean 'silu_mul'? correct the name" in finding.advice


def test_doctor_accepts_operators_that_packages_add(monkeypatch):
    """The package has the reference of one operator, and another package's decoder has the row of the other one."""
    forms = (("one_mixer", "reference"), ("one_mixer", "fast"), ("other_gate", "fast"), ("sampler", "greedy"))
    assert not finding_of_forms(monkeypatch, *forms).ok
    register_operator("other", "Gate", Operator(num_inputs=1, output=lambda attributes, shapes: shapes[0]))
    assert finding_of_forms(monkeypatch, *forms).ok


@pytest.mark.parametrize(
    "forms",
    [
        (("rms_norm", "fast", "one", ("native",)), ("rms_norm", "quick", "two", ("onnxrt",))),
        (("rms_norm", "fast"), ("rms_norm", "exact")),
    ],
)
def test_doctor_accepts_forms_for_different_backends_and_several_of_one_package(monkeypatch, forms):
    assert finding_of_forms(monkeypatch, *forms).ok


def test_policy_check_refuses_a_class():
    assert "is a class" in policy.PLUGINS.check("sequential", policy.SequentialPolicy)
    assert policy.PLUGINS.check("sequential", policy.SequentialPolicy()) == ""


def test_backend_of_a_plugin_can_serve_as_the_npu(cli):
    options = ("-p", "a b c d e f g h i j k l m n", "-n", "6", "--json", "--chunk", "4")
    expected = run_answer(cli("run", GGUF, *options, "--npu", "reference"))
    finished = cli("run", GGUF, *options, "--npu", "tiny")
    assert run_answer(finished)["text"] == expected["text"]
    assert [line for line in finished[2].splitlines() if "broken" in line] == [
        f"chunkrt.plugins: {WARNING}: No module named 'library_that_nobody_has'; repair it, or uninstall "
        "chunkrt-tiny-plugins; it is skipped"
    ]
    assert finished[2].count(TAKEN) == 1
    _, shown, _ = cli("run", "--help-all")
    assert "tiny_npu" in shown
    assert "latest_chunk" in shown


def test_operator_of_a_plugin_replaces_ours_and_can_be_switched_off(cli):
    def norm(*switches):
        report = run_answer(cli("ops", GGUF, "--npu", "native", "--json", *switches))
        (row,) = {(r["form"], r["origin"]) for r in report["operators"] if r["operator"] == "rms_norm"}
        return row

    assert norm() == ("tiny", "chunkrt-tiny-plugins (tiny_plugins.operators)")
    for switch in ("-rms_norm", "rms_norm=reference"):
        assert norm("--ops", switch) == ("reference", "chunkrt.backends.reference")
    assert norm("--ops", "rms_norm=native") == ("native", "chunkrt.backends.native.operators")


OPERATOR_RUNS = """
import sys
import chunkrt, numpy as np
from tiny_plugins import operators
calls, logits = [], []
for ops in (None, "-rms_norm", "none"):
    operators.num_calls = 0
    with chunkrt.load(sys.argv[1], npu="native", chunk_length=8, ops=ops) as engine:
        logits.append(engine.session().prefill(range(3, 20), logits="all").logits)
    calls.append(operators.num_calls)
norms = 2 * 2 + 1
assert calls == [3 * norms, 0, 0], calls
np.testing.assert_array_equal(logits[0], logits[1])
"""


def test_operator_of_a_plugin_runs_once_per_chunk_if_enabled(python):
    succeeded(python("-c", OPERATOR_RUNS, checkpoint("llama_mha")))


PREPARED_RUNS = """
import sys
import chunkrt, numpy as np
from tiny_plugins import operators
logits = []
for ops, num_prepared in ((None, 0), ("logits=tiny", 1)):
    with chunkrt.load(sys.argv[1], npu="reference", chunk_length=8, ops=ops) as engine:
        session = engine.session()
        prompt, token = session.prefill(range(3, 20)), session.prefill([5])
        logits.append(np.stack([prompt.logits, token.logits]))
    assert operators.num_prepared == num_prepared, operators.num_prepared
assert 0 < np.abs(logits[0] - logits[1]).max() < 2e-2 * np.abs(logits[0]).max()
"""


def test_operator_of_a_plugin_prepares_its_weight_once(python):
    succeeded(python("-c", PREPARED_RUNS, checkpoint("llama_mha")))


OBJECTS_BESIDE_AN_NPU = """
import sys
import chunkrt, numpy as np
from chunkrt.backends.dispatch import registered_operators

made, prepared = [], []


class Linear:
    def __init__(self, node):
        assert (node.scheme, node.device) == ("w8a16", "npu")
        made.append(node.name)

    def prepare(self, weight):
        self.weight = weight
        prepared.append(weight)

    def __call__(self, left):
        return self.weight.multiply(left)


with registered_operators().from_distribution("acme-ops"):
    registered_operators().register("linear", "acme")(Linear)
logits = []
for ops in ("linear=tiny_npu/native", "linear=acme"):
    with chunkrt.load(sys.argv[1], npu="tiny_npu", chunk_length=8, ops=ops) as engine:
        session = engine.session()
        logits.append(np.stack([session.prefill(tokens).logits for tokens in (range(3, 30), [5])]))
assert len(made) == len(set(made)) == len(prepared) == 8, made
assert np.abs(logits[0] - logits[1]).max() < 1e-2 * np.abs(logits[0]).max()
"""


def test_object_serves_the_npu_and_the_cpu(python):
    """Both compile the static subgraphs; the weights of a linear are prepared once."""
    succeeded(python("-c", OBJECTS_BESIDE_AN_NPU, checkpoint("llama_biased_gguf")))


BACKENDS_CONFORM = """
from chunkrt.backends import make_backend
from chunkrt.testing import check_backend
for name in ("tiny", "tiny_npu", "tiny_float"):
    check_backend(make_backend(name, threads=1))
"""


@pytest.mark.slow
def test_backends_of_plugins_conform(python):
    succeeded(python("-c", BACKENDS_CONFORM))


ROLES = """
import sys
import chunkrt, numpy as np
from chunkrt.errors import ConfigError
with chunkrt.load(sys.argv[1], npu="tiny", chunk_length=8) as engine:
    assert engine.loaded.npu_backend is engine.loaded.cpu_backend and engine.loaded.npu_backend.name == "tiny"
    assert engine.scheme.name == "w8a8-dynamic" and engine.cache_dtype == "float32"
    both = engine.session().prefill(range(3, 30)).logits
with chunkrt.load(sys.argv[1], npu="tiny_npu", chunk_length=8) as engine:
    assert (engine.loaded.npu_backend.name, engine.loaded.cpu_backend.name) == ("tiny_npu", "native")
    assert engine.scheme.name == "w8a16" and engine.cache_dtype == "float16"
    session = engine.session()
    prefill = session.prefill(range(3, 30))
    beside = prefill.logits
    device = [s.device for s in engine.plan.subgraphs]
    assert {(device[e.task.subgraph], e.processor) for e in prefill.events} == {("npu", "npu"), ("cpu", "cpu")}
    assert {e.processor for e in session.prefill([5]).events} == {"cpu"}
with chunkrt.load(sys.argv[1], npu="reference", chunk_length=8) as engine:
    np.testing.assert_array_equal(engine.session().prefill(range(3, 30)).logits, both)
with chunkrt.load(sys.argv[1], npu="native", scheme="w8a16", chunk_length=8) as engine:
    native = engine.session().prefill(range(3, 30)).logits
assert np.abs(native - beside).max() < 1e-2 * np.abs(native).max()
try:
    chunkrt.load(sys.argv[1], npu="tiny", cache_dtype="int8")
except ConfigError as error:
    assert str(error) == "tiny does not support int8 caches; choose float32 or float16, or another npu", error
else:
    raise AssertionError("int8 caches that no backend has")
"""


def test_backend_of_a_plugin_serves_as_npu_and_cpu_or_as_npu_only(python):
    succeeded(python("-c", ROLES, checkpoint("llama_biased_gguf")))


FLOAT_ROLES = """
import sys
import chunkrt, numpy as np
logits = []
for npu in ("reference", "tiny_float"):
    with chunkrt.load(sys.argv[1], npu=npu, scheme="float", chunk_length=8) as engine:
        session = engine.session()
        prefill, token = session.prefill(range(3, 30)), session.prefill([5])
        logits.append(np.stack([prefill.logits, token.logits]))
        backends = engine.loaded.npu_backend.name, engine.loaded.cpu_backend.name
assert backends == ("tiny_float", "onnxrt"), backends
device = [s.device for s in engine.plan.subgraphs]
assert {(device[e.task.subgraph], e.processor) for e in prefill.events} == {("npu", "npu"), ("cpu", "cpu")}
assert {e.processor for e in token.events} == {"cpu"}
np.testing.assert_allclose(*logits, rtol=0, atol=1e-4)
"""


def test_onnxrt_serves_as_cpu_if_the_npu_supports_only_float(python, cli):
    _, err = succeeded(python("-c", FLOAT_ROLES, checkpoint(FAMILY)))
    assert err.count("onnxrt serves as the CPU: native does not support linear layers under the scheme float") == 1
    report = run_answer(cli("ops", checkpoint(FAMILY), "--npu", "tiny_float", "--json"))
    assert (report["scheme"], report["npu"], report["cpu"]) == ("float", "tiny_float", "onnxrt")


DECODER = """
import sys
import chunkrt, numpy as np
logits = []
for model in sys.argv[2:]:
    with chunkrt.load(model, npu="reference", scheme="float", chunk_length=8) as engine:
        assert engine.plan.family in model, (engine.plan.family, model)
        logits.append(engine.session().prefill(np.load(sys.argv[1]), logits="all").logits)
np.testing.assert_array_equal(*logits)
np.save(sys.argv[1], logits[0])
"""


def test_decoder_family_of_a_plugin_equals_llama(python, cli, family, tmp_path):
    path = tmp_path / "logits.npy"
    np.save(path, np.array(input_ids(FAMILY)))
    succeeded(python("-c", DECODER, path, family, checkpoint(FAMILY)))
    np.testing.assert_allclose(np.load(path), expected_logits(FAMILY), atol=1e-4, rtol=1e-3)
    report = run_answer(cli("plan", family, "--npu", "tiny_npu", "--json"))
    assert (report["plan"]["family"], report["scheme"]) == ("tiny_llama", "w8a16")
    status, out, err = cli("support", family)
    assert status == 0, out + err
    assert "tiny_llama, tiny_plugins/decoder.py" in out


COSTS = """
import sys
from dataclasses import replace
from pathlib import Path
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.graph import operators
from chunkrt.quant.scheme import find_scheme
from chunkrt.runtime.tasks import Task
from chunkrt.simulate.profile import find_device
from chunkrt.simulate.work import ChunkWork, ModelledWork
plan = plan_checkpoint(Path(sys.argv[1]), {}).plan
index = next(i for i, s in enumerate(plan.subgraphs) if s.state)
row = operators.find_operator("tiny", "Recurrence")
heavy = lambda attributes, shapes: 1_000_000 * row.flops(attributes, shapes)
operators.register_operator("tiny", "Heavy", replace(row, flops=heavy))
chunks = [ChunkWork(num_tokens=32, num_rows=0, position=0)]
for op in ("Recurrence", "Heavy"):
    subgraph = plan.subgraphs[index]
    changed = replace(subgraph, nodes=tuple(replace(node, op=op) for node in subgraph.nodes))
    subgraphs = tuple(changed if s is subgraph else s for s in plan.subgraphs)
    plan_of_op = replace(plan, subgraphs=subgraphs)
    work = ModelledWork(plan_of_op, find_scheme("w8a8"), find_device("sd8gen3"), chunk_length=32, chunks=chunks)
    print(work(Task(index, 0)).ns, work(Task(index, 0)).num_bytes)
"""


KEYS = """
import os, sys
from pathlib import Path
import tiny_plugins
from chunkrt.engine_directory.content import cache_key
file = Path(tiny_plugins.__file__)
times = file.stat()
print(*map(cache_key, map(Path, sys.argv[1:])))
os.utime(file, ns=(1, 1))
print(*map(cache_key, map(Path, sys.argv[1:])))
os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
"""


def test_gguf_architecture_of_a_plugin_equals_llama(python, cli, tmp_path):
    """The file is Llama's, except for the name of its architecture."""
    data, own = GGUF.read_bytes(), tmp_path / "tiny_llama.gguf"
    head, key, rest = data.partition(b"general.architecture")
    own.write_bytes((head + key + rest.replace(b"llama", b"lalma", 1)).replace(b"llama.", b"lalma."))
    path = tmp_path / "logits.npy"
    np.save(path, np.array(input_ids("llama_biased_gguf")))
    succeeded(python("-c", DECODER, path, own, GGUF))
    _, out, err = cli("support", own)
    assert "GGUF, architecture lalma: tiny_llama, tiny_plugins/decoder.py" in out, err
    out, _ = succeeded(python("-c", KEYS, own, GGUF))
    (mine, theirs), (mine_after, theirs_after) = (line.split() for line in out.splitlines())
    assert mine != mine_after
    assert theirs == theirs_after


RECURRENT = """
import sys
import chunkrt, numpy as np
from chunkrt.quant.calibration import Calibration
from chunkrt.compile.calibrate import cached_calibration
from chunkrt.compile.compiler import plan_checkpoint
from pathlib import Path
folder, out = map(Path, sys.argv[1:])
ids = np.load(out / "ids.npy")
found, _ = cached_calibration(plan_checkpoint(folder, {}), folder, model="toy", token_ids=ids)
peak = found.peaks["model.recurrence.output"]
logits = {}
runs = [("reference", "float"), ("tiny_float", "float"), ("onnxrt", "float")]
for npu, scheme in (*runs, ("tiny_npu", "w8a16"), ("reference", "w8a16"), ("native", "w8a8-dynamic")):
    with chunkrt.load(folder, npu=npu, scheme=scheme, chunk_length=4) as engine:
        logits[f"{npu} {scheme}"] = engine.session().prefill(ids, logits="all").logits
np.savez(out / "found.npz", peak=peak, **logits)
"""


@pytest.fixture(scope="session")
def recurrent(tmp_path_factory):
    """Return a checkpoint of the family with its own operator, 24 token ids, the recurrence's values and the logits."""
    folder, rng = tmp_path_factory.mktemp("tiny_recurrent"), np.random.default_rng(3)
    width, vocabulary = 32, 256
    shapes = {"embed_tokens": (vocabulary, width), "in_proj": (width, width), "out_proj": (width, width)}
    tensors = {f"model.{n}.weight": rng.standard_normal(s, np.float32) / s[-1] ** 0.5 for n, s in shapes.items()}
    tensors |= {"model.decay": rng.uniform(0.5, 0.9, width).astype(np.float32), "model.norm.weight": np.ones(width)}
    tensors["lm_head.weight"] = rng.standard_normal((vocabulary, width), np.float32) / width**0.5
    tensors = {name: values.astype(np.float32) for name, values in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    sizes = {"hidden_size": width, "intermediate_size": width, "vocab_size": vocabulary, "head_dim": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = {"model_type": "tiny_recurrent", "max_position_embeddings": 64, "rms_norm_eps": 1e-6, **sizes, **heads}
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    words.save(str(folder / "tokenizer.json"))
    ids = rng.integers(0, vocabulary, 24)
    hidden = tensors["model.embed_tokens.weight"][ids].astype(np.float64)
    rows = hidden @ tensors["model.in_proj.weight"].T
    for row in range(1, len(rows)):
        rows[row] += tensors["model.decay"] * rows[row - 1]
    hidden = hidden + rows @ tensors["model.out_proj.weight"].T
    hidden /= np.sqrt(np.mean(hidden**2, axis=-1, keepdims=True) + 1e-6)
    return folder, ids, rows, hidden @ tensors["lm_head.weight"].T


def found_by(python, program, folder, ids, tmp_path):
    """Run a program on a checkpoint and token ids; return the arrays that it saves, and its errors."""
    np.save(tmp_path / "ids.npy", ids)
    _, err = succeeded(python("-c", program, folder, tmp_path))
    return np.load(tmp_path / "found.npz"), err


def test_new_operator_of_a_plugin_is_calibrated_and_runs_under_static_schemes(python, recurrent, tmp_path):
    folder, ids, rows, logits = recurrent
    found, err = found_by(python, RECURRENT, folder, ids, tmp_path)
    assert found["peak"] == pytest.approx(np.abs(rows).max(), rel=1e-5)
    for npu in ("reference", "tiny_float", "onnxrt"):
        np.testing.assert_allclose(found[f"{npu} float"], logits, atol=1e-4)
    for run in ("tiny_npu w8a16", "reference w8a16", "native w8a8-dynamic"):
        assert np.abs(found[run] - logits).max() < 0.05 * np.abs(logits).max()
    assert "slow" not in err


ON_RANKS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import chunkrt, numpy as np
from chunkrt.runtime.ranks.messages import local_communicators
folder, out = map(Path, sys.argv[1:])
ids, logits = np.load(out / "ids.npy"), {}

def run(communicator, scheme):
    options = {"npu": "reference", "scheme": scheme, "chunk_length": 4, "threads": 1}
    with chunkrt.load(folder, communicator=communicator, **options) as engine:
        return engine.session().prefill(ids, logits="all").logits

for scheme in ("float", "w8a16"):
    logits[f"{scheme} 1"] = run(None, scheme)
    for size in (2, 3):
        with ThreadPoolExecutor(size) as pool:
            found = list(pool.map(run, local_communicators(size), [scheme] * size))
        assert all(np.array_equal(found[0], each) for each in found)
        logits[f"{scheme} {size}"] = found[0]
np.savez(out / "found.npz", **logits)
"""


def test_family_of_a_plugin_runs_on_ranks(python, recurrent, tmp_path):
    """Its 32 columns are padded on 3 ranks; under a static scheme all ranks have the integers of one rank."""
    folder, ids, _, logits = recurrent
    found, _ = found_by(python, ON_RANKS, folder, ids, tmp_path)
    for size in (2, 3):
        np.testing.assert_allclose(found[f"float {size}"], logits, atol=1e-4)
        np.testing.assert_array_equal(found[f"w8a16 {size}"], found["w8a16 1"])


def test_new_operator_of_a_plugin_is_exported_by_its_expansion(cli, recurrent, tmp_path):
    """The first windows contain padding, which must not change the running sum."""
    folder, ids, _, logits = recurrent
    options = ("--window", "5", "--sequence", "10", "--opset", "23")
    for dtype, tolerance in (("fp32", 1e-5), ("fp16", 0.01)):
        path = tmp_path / f"{dtype}.onnx"
        succeeded(cli("export", folder, "-o", path, *options, "--dtype", dtype))
        assert {node.domain for node in onnx_ir.load(path).graph.all_nodes()} == {""}
        np.testing.assert_allclose(OnnxSession(path).run(ids), logits, rtol=0, atol=tolerance * np.abs(logits).max())
    status, _, err = cli("export", folder, "-o", tmp_path / "old.onnx", "--window", "5", "--opset", "18")
    assert (status, err.splitlines()[-1]) == (
        1,
        "chunkrt: the expansion of tiny::Recurrence is in opset 23; use --opset 23",
    )


def test_cost_of_a_new_operator_is_simulated(python, recurrent):
    """The second plan has an operator of a million times the FLOPs. Each reads and writes the state of 32 floats, and
    moves 32 rows of 32 floats from and to the NPU.
    """
    folder, *_ = recurrent
    out, _ = succeeded(python("-c", COSTS, folder))
    (once, num_bytes), (often, _) = (map(float, line.split()) for line in out.splitlines())
    assert often > 100 * once
    assert num_bytes == 2 * 4 * (32 + 32 * 32)


def test_new_operator_of_a_plugin_is_evaluated_per_layer(cli, recurrent, tmp_path):
    folder, *_ = recurrent
    text = tmp_path / "text.txt"
    text.write_text("a running sum that decays " * 20)
    options = ("--per-layer", "--context", "32", "--windows", "2", "--json")
    for scheme in ("w8a8-dynamic", "w8a16"):
        out, _ = succeeded(cli("eval", folder, "--text", text, "--npu", "reference", "--scheme", scheme, *options))
        assert "model.in_proj" in out
    succeeded(cli("calibrate", folder, "-o", tmp_path / "c.npz", "--text", text))
    succeeded(cli("run", folder, "-p", "a b", "-n", "2", "--npu", "reference"))


POLICY = """
import sys
import chunkrt, numpy as np
logits, orders = [], []
for policy in ("in_order", "latest_chunk"):
    with chunkrt.load(sys.argv[1], npu="native", chunk_length=4, threads=1, policy=policy) as engine:
        result = engine.session().prefill(range(3, 40))
        logits.append(result.logits)
        orders.append([e.task for e in sorted(result.events, key=lambda e: e.start_ns)])
np.testing.assert_array_equal(*logits)
assert orders[0] != orders[1]
assert sorted(orders[0]) == sorted(orders[1])
"""


def test_policy_of_a_plugin_changes_the_order_and_no_bit(python, cli):
    succeeded(python("-c", POLICY, GGUF))
    out, _ = succeeded(cli("simulate", "gemma-2b", "--device", "sd8gen3", "-p", "64", "--policy", "latest_chunk"))
    assert "latest_chunk" in out


BATCHER = """
import sys
import chunkrt
prompts = [range(3, 3 + n) for n in (1, 9, 30)]
options = dict(npu="native", chunk_length=4, threads=1)
with chunkrt.load(sys.argv[1], **options) as engine:
    expected = [engine.generate([prompt], max_new_tokens=5) for prompt in prompts]
with chunkrt.load(sys.argv[1], batcher="last_first", **options) as engine:
    done = [index for index, piece in engine.stream(prompts, max_new_tokens=5) if piece.finish_reason]
    assert engine.stats().shared_rows / engine.stats().shared_chunks <= 4
    assert [[text] for text in engine.generate(prompts, max_new_tokens=5)] == expected
print(done)
"""


def test_batcher_of_a_plugin_changes_chunks_and_no_answer(python):
    out, _ = succeeded(python("-c", BATCHER, GGUF))
    assert sorted(json.loads(out)) == [0, 1, 2]


def test_selected_broken_plugin_is_an_error(cli, tmp_path):
    cause = "is broken: ModuleNotFoundError: No module named 'library_that_nobody_has'"
    config = {"model_type": "broken_llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(checkpoint(FAMILY) / "model.safetensors", tmp_path)
    for arguments, group in (
        ((GGUF, "--npu", "broken"), "chunkrt.backends"),
        ((GGUF, "--policy", "broken"), "chunkrt.policies"),
        ((tmp_path,), "chunkrt.decoders"),
    ):
        status, out, err = cli("run", *arguments, "-p", "a b", "-n", "1")
        assert (status, out) == (1, "")
        assert err.splitlines()[-1].startswith("chunkrt: the plug-in 'broken")
        assert f"({group}) {cause}" in err.splitlines()[-1]
        assert "Traceback" not in err


def test_unknown_name_is_refused_with_names_of_plugins(python):
    script = "import chunkrt; chunkrt.load('x', {}='tiny_n')"
    for option, known in (("npu", "did you mean 'tiny_npu'"), ("policy", "latest_chunk"), ("batcher", "last_first")):
        status, _, err = python("-c", script.format(option))
        assert status == 1
        assert known in err.splitlines()[-1]


# The following tests need no installation: they replace the entry points that importlib.metadata finds.


@pytest.fixture
def found(monkeypatch):
    """Return the list of installed entry points, for a test to extend."""
    entries = []
    monkeypatch.setattr(plugins, "entry_points", lambda group: [e for e in entries if e.group == group])
    return entries


def group_of(**options):
    return PluginGroup("toy", error=ConfigError, **options)


def test_plugin_group_imports_a_plugin_when_it_is_used(found):
    found += [entry("b", "module_that_nobody_has:x"), entry("a", "math:sqrt", "two")]
    group = group_of()
    assert group.names == ("a", "b")
    assert group.find("c") is None
    assert group.find("a").load()(9.0) == 3
    assert (group.find("a").distribution, group.find("a").version) == ("two", "1.0")


def test_plugin_group_reports_and_skips_a_broken_plugin_once(found, caplog):
    found += [entry("good", "math:sqrt"), entry("bad", "math:no_such_function"), entry("odd", "math:pi")]
    group = group_of()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert list(group.load_all()) == ["good"]
    assert len(caplog.records) == 2
    assert "the plug-in 'bad' of one 1.0 (toy) is broken: AttributeError" in caplog.text
    assert "the plug-in 'odd' of one 1.0 (toy) is broken: TypeError: math:pi cannot be called" in caplog.text
    with pytest.raises(ConfigError, match=r"'bad' of one 1.0 .*; repair it, or uninstall one") as raised:
        group.find("bad").load()
    assert isinstance(raised.value.__cause__, AttributeError)


def test_plugin_group_reports_and_skips_names_that_are_taken(found, caplog):
    found += [entry("mine", "math:sqrt"), entry("twice", "math:sin"), entry("twice", "math:cos", "two")]
    group = group_of(own=("mine",))
    with caplog.at_level(logging.WARNING):
        assert group.names == ()
        assert group.load_all() == {}
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "the plug-in 'mine' of one 1.0 (toy) is not used: chunkrt has 'mine' itself",
        "the plug-in 'twice' of one 1.0 (toy) is not used: 2 entry points have that name; uninstall all but one",
        "the plug-in 'twice' of two 1.0 (toy) is not used: 2 entry points have that name; uninstall all but one",
    ]
    assert group.find("mine") is None
    with pytest.raises(ConfigError, match="2 entry points have that name"):
        group.find("twice").load()


def test_plugin_group_treats_an_exit_at_import_as_broken(found, tmp_path, monkeypatch, caplog):
    (tmp_path / "module_that_exits.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    found.append(entry("bad", "module_that_exits:x"))
    assert group_of().load_all() == {}
    assert "the plug-in 'bad' of one 1.0 (toy) is broken: SystemExit: 3" in caplog.text


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda config: {}["hidden"], "KeyError: 'hidden'; repair it"),
        (lambda config: None, "TypeError: it returned None, expected a Module"),
    ],
)
def test_error_in_a_family_names_the_plugin(found, family, monkeypatch, build, message):
    found.append(entry("tiny_llama", "plugin_of_this_test:build"))
    monkeypatch.setitem(sys.modules, "plugin_of_this_test", SimpleNamespace(build=build))
    monkeypatch.setattr(decoders, "PLUGINS", PluginGroup("toy", error=UnsupportedModelError))
    with pytest.raises(UnsupportedModelError, match=f"'tiny_llama' of one 1.0 .* build this checkpoint: {message}"):
        plan_checkpoint(family, {})


def test_plugin_group_is_empty_if_distributions_cannot_be_read(monkeypatch, caplog):
    def damaged(group):
        raise ValueError("no such section")

    monkeypatch.setattr(plugins, "entry_points", damaged)
    assert group_of().names == ()
    assert "no toy are used: the installed distributions cannot be read (ValueError: no such section)" in caplog.text


def test_cache_key_changes_with_the_files_of_a_family(found, tmp_path, monkeypatch):
    """The key depends on the plug-in's files; the key of another family's checkpoint does not change."""
    package, folders = tmp_path / "package_of_a_family", {}
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("llama", "mine"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "config.json").write_text(json.dumps({"model_type": name}))

    def keys():
        return [cache_key(folder) for folder in folders.values()]

    without = keys()
    found.append(entry("mine", "package_of_a_family:build", group="chunkrt.decoders"))
    before = keys()
    os.utime(package / "__init__.py", ns=(1, 1))
    after = keys()
    assert without[0] == before[0] == after[0]
    assert len({without[1], before[1], after[1]}) == 3
    assert keys() == after


@pytest.mark.parametrize(
    ("taken", "default", "scheme"),
    [
        (SCHEMES, "w4a8-dynamic", "w4a8-dynamic"),
        (("w8a8-dynamic", "w8a16"), "w4a8-dynamic", "w8a8-dynamic"),
        (("w8a16", "w8a8"), "w8a8-dynamic", "w8a16"),
        (("w4a16",), "w8a8-dynamic", "w4a16"),
        ((), "w8a8-dynamic", "w8a8-dynamic"),
    ],
)
def test_default_scheme_of_an_npu_follows_its_supports(taken, default, scheme):
    def supports(subgraph, plan, scheme):
        return Support(ok=scheme.name in taken, node="linear", reason="" if scheme.name in taken else "not that")

    assert default_npu_scheme(supports, default) == scheme


def test_default_scheme_of_hexagon_follows_its_supports():
    refused = [name for name, scheme in SCHEMES.items() if linear_refusal(npu_support, scheme)]
    assert refused == ["float", "w8a8-dynamic", "w4a8-dynamic"]
    assert default_npu_scheme(npu_support, "w4a8-dynamic") == "w8a16"
