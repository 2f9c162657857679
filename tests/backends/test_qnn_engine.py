"""Engines with an emulated NPU: compiled graphs, placement of work, and NPU failures."""

import hashlib
import json
import logging
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from calibrated import calibrated
from fixture_checkpoints import checkpoint, input_ids
from gates import at_once
from relative_error import relative_error

import chunkrt
from chunkrt.backends import qnn
from chunkrt.backends.native.backend import NativeBackend
from chunkrt.backends.qnn import QnnBackend, find_soc
from chunkrt.backends.qnn.library import open_session
from chunkrt.engine import roles
from chunkrt.errors import CompileError, DeviceLostError, NumberRangeError, PartitionError
from chunkrt.graph.rewrites import merged_on_cpu
from chunkrt.quant.scheme import find_scheme

pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
if not qnn.open_htp().is_emulated:
    pytest.skip("this machine has an NPU, and a compiler for that NPU alone", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("own_home")

NUM_GRAPHS = 3
"""Number of static subgraphs: one for each of two layers, and one more."""
CONTEXT, CHUNK, NUM_TOKENS = 640, 8, 33
NUM_NPU_RUNS = 11
"""Number of graph runs in five chunks: two each, and a third in the last, which has logits."""
TOLERANCES = {"w8a16": 2.0**-8, "w4a16": 2.0**-8, "w8a8": 2.0**-3.5}
"""Tolerance of logits (root mean square): some 2^-11 a linear for float16 on both sides and a 16-bit grid, 2^-6 for
8-bit inputs and outputs of which one in ten moves to another step; nine linears, whose errors add up like random ones,
and their amplification by the layers between."""
FALLBACK = "chunkrt.backends.fallback"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny checkpoint with a long context and a calibration, which it cannot make because it has no tokenizer."""
    folder = shutil.copytree(checkpoint("llama_mha"), tmp_path_factory.mktemp("long") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    path = folder.parent / "tiny.npz"
    calibrated(folder, path, prompt(CONTEXT, seed=1))
    return folder, path


def prompt(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 128, num_tokens)


def load(model, **options):
    folder, calibration = model
    wanted = {"npu": "qnn", "scheme": "w8a16", "chunk_length": CHUNK, "threads": 2, "calibration": calibration}
    wanted |= {"attention_math": "float32"}  # exact enough for the tolerances on every processor
    return chunkrt.load(folder, **(wanted | options))


def logits_of(engine, tokens):
    return engine.session().prefill(tokens, logits="all").logits


def num_contexts(home):
    return sum(path.is_dir() and not path.name.startswith(".") for path in (home / "contexts").iterdir())


def warnings_of(caplog, logger):
    return [r.getMessage() for r in caplog.records if r.name == logger and r.levelno == logging.WARNING]


@pytest.fixture(scope="module")
def native(model):
    with load(model, npu="native") as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(model):
    with load(model) as engine:
        yield engine


@pytest.mark.parametrize("most_tokens", [65, pytest.param(512, marks=pytest.mark.slow)])
def test_graphs_are_compiled_once_for_all_prompts(model, tmp_path, monkeypatch, most_tokens):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    with load(model) as first:
        assert len(first.plan.static_subgraphs) == NUM_GRAPHS
        for num_tokens in (1, 33, most_tokens):
            session = first.session()
            session.prefill(prompt(num_tokens))
            assert session.position == num_tokens
            assert first.loaded.npu_backend.num_compiled == num_contexts(tmp_path) == NUM_GRAPHS
        expected = logits_of(first, prompt(33))
    with load(model) as second:
        np.testing.assert_array_equal(logits_of(second, prompt(33)), expected)
        assert second.loaded.npu_backend.num_compiled == 0
    assert num_contexts(tmp_path) == NUM_GRAPHS


def test_progress_covers_every_graph(model, tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    told = []
    load(model, progress=lambda *step: told.append(step)).close()
    assert [step for step in told if step[0] == "compiling for the NPU"] == [
        ("compiling for the NPU", done, NUM_GRAPHS) for done in range(NUM_GRAPHS + 1)
    ]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("scheme", TOLERANCES)
@pytest.mark.parametrize("num_tokens", [2, 33, pytest.param(512, marks=pytest.mark.slow)])
def test_logits_equal_the_reference(model, scheme, num_tokens):
    tokens = prompt(num_tokens)
    check_against_reference(model, tokens, scheme=scheme)


def check_against_reference(model, tokens, **options):
    """Check that logits on the NPU equal the reference's under the same scheme, and are no further from float."""
    with (
        load(model, cache_dtype="float32", **options) as engine,
        load(model, npu="reference", outputs="grid", **options) as exact,
        load(model, npu="reference", scheme="float", calibration=None) as unrounded,
    ):
        assert engine.scheme == exact.scheme
        found, expected, in_float = (logits_of(each, tokens) for each in (engine, exact, unrounded))
    assert relative_error(found, expected) < TOLERANCES[options["scheme"]]
    assert relative_error(found, in_float) < 1.1 * relative_error(expected, in_float)


@pytest.mark.sampled(shadow=["*.down_proj.weight"])
@pytest.mark.parametrize("shadow", ["all", "*.down_proj.weight"])
def test_shadows_run_on_the_cpu_while_their_linears_run_on_the_npu(model, shadow):
    """Main halves have 8-bit outputs by column; five chunks are pipelined."""
    tokens, options = prompt(NUM_TOKENS), {"scheme": "w8a8", "shadow": shadow}
    check_against_reference(model, tokens, **options)
    with load(model, **options) as engine, load(model, threads=1, policy="sequential", **options) as other:
        result = engine.session().prefill(tokens)
        np.testing.assert_array_equal(logits_of(other, tokens), logits_of(engine, tokens))
        plan = engine.plan
    shadows = [index for index, subgraph in enumerate(plan.subgraphs) if subgraph.name.startswith("shadow.")]
    assert len(shadows) == (8 if shadow == "all" else 2)
    ran_on = {
        index: {e.processor for e in result.events if e.task.subgraph == index} for index in range(len(plan.subgraphs))
    }
    for index in shadows:
        (node,) = plan.subgraphs[index].nodes
        both = [i for i, s in enumerate(plan.subgraphs) if any(n.inputs == node.inputs for n in s.nodes)]
        (main,) = set(both) - {index}
        assert [node.op for node in plan.subgraphs[main].nodes] == ["MatMul"]
        assert (ran_on[index], ran_on[main]) == ({"cpu"}, {"npu"})
        assert plan.flow.waits_for[index] == plan.flow.waits_for[main]


def test_engine_compiled_with_float_outputs_is_refused_by_the_npu(model):
    """It was compiled for a CPU; the message names the linear and the remedy."""
    with load(model, npu="native", scheme="w8a8") as compiled:
        folder = compiled.folder
    with pytest.raises(PartitionError, match=r"qnn .*qkv_proj.*into float32.*outputs='grid'") as raised:
        chunkrt.load(folder, npu="qnn")
    assert "\n" not in str(raised.value)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("options", [{"policy": "sequential"}, {"threads": 1}, {"threads": 4}], ids=str)
def test_neither_policy_nor_threads_change_a_bit(model, engine, options):
    tokens = prompt(45)
    with load(model, **options) as other:
        np.testing.assert_array_equal(logits_of(other, tokens), logits_of(engine, tokens))


def test_npu_has_a_processor_of_its_own(engine):
    result = engine.session().prefill(prompt(NUM_TOKENS))
    devices = {subgraph: s.device for subgraph, s in enumerate(engine.plan.subgraphs)}
    assert {event.processor for event in result.events} == {"npu", "cpu"}
    assert all(event.processor == devices[event.task.subgraph] for event in result.events)
    assert sum(event.processor == "npu" for event in result.events) == NUM_NPU_RUNS


def test_single_tokens_run_on_the_cpu(engine, native):
    session = engine.session()
    first = session.prefill(prompt(1))
    assert {event.processor for event in first.events} == {"cpu"}
    assert len(first.events) == len(merged_on_cpu(engine.plan).subgraphs) == 2
    np.testing.assert_array_equal(first.logits, native.session().prefill(prompt(1)).logits)
    session.prefill(prompt(9))
    assert session.position == 10
    assert len(list(session.generate(max_new_tokens=4))) == 4


@dataclass
class Hooked:
    """An executable that reports each call, with the number of earlier ones."""

    inner: object
    name: str
    before: object
    num_calls: int = 0

    def __post_init__(self):
        self.fixed_length = self.inner.fixed_length

    def run(self, inputs, outputs):
        self.num_calls += 1
        self.before(self.name, self.num_calls - 1)
        self.inner.run(inputs, outputs)


@pytest.fixture
def hook(monkeypatch):
    """Return a function that installs a callback before every task of engines that are loaded later."""

    def install(before):
        for backend in (QnnBackend, NativeBackend):

            def compile_hooked(self, subgraph, *rest, compile=backend.compile):
                return Hooked(compile(self, subgraph, *rest), f"{self.name} {subgraph.name}", before)

            monkeypatch.setattr(backend, "compile", compile_hooked)

    return install


def test_cpu_and_npu_work_at_the_same_time(model, hook):
    """Each of two tasks waits, while it runs, for the other to run: the first attention, and the NPU at the next chunk.

    There is one CPU thread, so that chunks are embedded, and reach the NPU, in order.
    """
    meeting = threading.Barrier(2, timeout=60)
    pair = {("native dynamic.0", 0), ("qnn static.0", 1)}

    def before(name, call):
        if (name, call) in pair:
            meeting.wait()

    hook(before)
    with load(model, threads=1) as engine:
        assert [s.name for s in engine.plan.subgraphs][:3] == ["embedding", "static.0", "dynamic.0"]
        events = {event.task: event for event in engine.session().prefill(prompt(2 * CHUNK)).events}
    on_npu, on_cpu = events[1, 1], events[2, 0]
    assert (on_npu.processor, on_cpu.processor) == ("npu", "cpu")
    assert max(on_npu.start_ns, on_cpu.start_ns) < min(on_npu.end_ns, on_cpu.end_ns)


class FailingNpu:
    """Sessions whose runs fail from the k-th on, counted over all of them, until recovery. Until then no session can be
    opened either.
    """

    def __init__(self):
        self.fails_at = None
        self.num_runs = 0

    def open(self, *arguments, **options):
        if self.fails_at is not None and self.num_runs >= self.fails_at:
            raise RuntimeError("SSR: no DSP")
        npu, session = self, open_session(*arguments, **options)

        class Session:
            io_binding = session.io_binding

            def run_with_iobinding(self, binding):
                npu.num_runs += 1
                if npu.fails_at is not None and npu.num_runs >= npu.fails_at:
                    raise RuntimeError("SSR: subsystem restart")
                session.run_with_iobinding(binding)

        return Session()


@pytest.fixture
def failing_npu(monkeypatch):
    made = FailingNpu()
    monkeypatch.setattr("chunkrt.backends.qnn.backend.open_session", made.open)
    return made


AT_RUN = pytest.mark.parametrize(
    "k",
    [*(pytest.param(k, marks=pytest.mark.slow) for k in (1, 6)), NUM_NPU_RUNS],
    ids=["first", "middle", "last"],
)


@AT_RUN
def test_fallback_finishes_on_the_cpu(model, native, failing_npu, caplog, k):
    tokens = prompt(NUM_TOKENS)
    expected = logits_of(native, tokens)[-1]
    with load(model, on_npu_failure="fallback") as engine:
        failing_npu.fails_at = k
        session = engine.session()
        found = session.prefill(tokens)
        assert session.position == NUM_TOKENS
        assert relative_error(found.logits, expected) < TOLERANCES["w8a16"]
        if k == 1:
            np.testing.assert_array_equal(found.logits, expected)
        (told,) = warnings_of(caplog, FALLBACK)
        assert "SSR: subsystem restart; the CPU takes over" in told
        runs = failing_npu.num_runs
        np.testing.assert_array_equal(logits_of(engine, tokens), logits_of(native, tokens))
        assert len(list(session.generate(max_new_tokens=4))) == 4
        assert failing_npu.num_runs == runs
        assert runs in (k, k + 1)  # the other call in progress also gets its turn
    assert len(warnings_of(caplog, FALLBACK)) == 1


@AT_RUN
def test_failure_leaves_everything_unchanged(model, engine, failing_npu, k):
    tokens = prompt(NUM_TOKENS)
    expected = engine.session().prefill(tokens).logits
    with load(model, on_npu_failure="fail") as other:
        session = other.session()
        session.prefill(tokens[:5])
        answer = [piece.token_id for piece in session.fork().generate(max_new_tokens=3)]
        failing_npu.num_runs, failing_npu.fails_at = 0, k
        with pytest.raises(DeviceLostError, match=r"subgraph (static\.\d) failed on chunk \d: .*subgraph \1: SSR"):
            session.prefill(tokens)
        assert session.position == 5
        assert [piece.token_id for piece in session.fork().generate(max_new_tokens=3)] == answer
        failing_npu.fails_at = None
        again = other.session()
        np.testing.assert_array_equal(again.prefill(tokens).logits, expected)
        assert session.prefill(tokens).num_tokens == NUM_TOKENS
        assert session.position == 5 + NUM_TOKENS


def test_explicit_npu_fails_by_default(model, failing_npu):
    with load(model) as engine:
        failing_npu.fails_at = 1
        with pytest.raises(DeviceLostError, match=r"subgraph static\.0 failed on chunk \d"):
            engine.session().prefill(prompt(NUM_TOKENS))


def test_chunk_that_exceeds_float16_runs_on_the_cpu_and_no_other(model, native, hook, caplog):
    calls = []

    def before(name, call):
        calls.append((name, call))
        if (name, call) == ("qnn static.1", 1):
            raise NumberRangeError("hidden left the range of float16 on the NPU")

    hook(before)
    with load(model, on_npu_failure="fallback") as engine:
        found = engine.session().prefill(prompt(NUM_TOKENS)).logits
        num_calls = len(calls)
        again = engine.session().prefill(prompt(NUM_TOKENS, seed=1)).logits
    assert relative_error(found, logits_of(native, prompt(NUM_TOKENS))[-1]) < TOLERANCES["w8a16"]
    assert relative_error(again, logits_of(native, prompt(NUM_TOKENS, seed=1))[-1]) < TOLERANCES["w8a16"]
    on_npu = [name for name, _ in calls[num_calls:] if name.startswith("qnn ")]
    assert len(on_npu) == len([name for name, _ in calls[:num_calls] if name.startswith("qnn ")]) > 0
    (told,) = [record.message for record in caplog.records if record.name == FALLBACK]
    assert told.startswith("hidden left the range of float16 on the NPU; the CPU computes each chunk")


@pytest.fixture
def damaged(model, engine, own_home):
    """Corrupt static.1's context, while its record still matches; it is restored afterwards."""
    (folder,) = (own_home / "contexts").glob("SM8650-w8a16-r8-static.1-*")
    (binary,) = folder.glob("*.bin")
    record = folder / "context.json"
    kept = binary.read_bytes(), record.read_text()
    binary.write_bytes(bytes(len(kept[0])))
    content = json.loads(kept[1])
    content["files"][binary.name][1] = hashlib.sha256(binary.read_bytes()).hexdigest()
    record.write_text(json.dumps(content))
    yield folder
    binary.write_bytes(kept[0])
    record.write_text(kept[1])


def no_session(htp, soc, model, **options):
    raise RuntimeError("no VTCM left")


@pytest.fixture(params=["no session", "damaged"])
def refused(request, monkeypatch):
    """Let the NPU refuse contexts when an engine is loaded."""
    if request.param == "damaged":
        request.getfixturevalue("damaged")
    else:
        monkeypatch.setattr("chunkrt.backends.qnn.backend.open_session", no_session)


def test_npu_failure_at_start_is_an_error(model, engine, refused):
    with pytest.raises(DeviceLostError, match=r"the NPU refuses the context of static\.[01]: "):
        load(model)


def test_fallback_at_start_runs_on_the_cpu(model, engine, native, caplog, refused):
    with load(model, on_npu_failure="fallback") as other:
        assert other.loaded.npu_backend is other.loaded.cpu_backend
        np.testing.assert_array_equal(logits_of(other, prompt(NUM_TOKENS)), logits_of(native, prompt(NUM_TOKENS)))
        assert {event.processor for event in other.session().prefill(prompt(NUM_TOKENS)).events} == {"cpu"}
    (told,) = warnings_of(caplog, FALLBACK)
    assert told.startswith("the NPU refuses the context of static.")
    assert told.endswith("; the CPU takes over")


def test_failing_compiler_leaves_no_files(model, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    monkeypatch.setattr("chunkrt.backends.qnn.backend.open_session", no_session)
    with pytest.raises(CompileError, match=r"the NPU's compiler refuses static.0 for SM8650: no VTCM left"):
        load(model)
    assert num_contexts(tmp_path) == 0
    with load(model, on_npu_failure="fallback") as engine:
        assert engine.loaded.npu_backend.name == "native"
    assert len(warnings_of(caplog, FALLBACK)) == 1


@pytest.fixture
def with_npu(monkeypatch):
    """A machine that reports a Snapdragon 8 Gen 3."""
    monkeypatch.setattr(qnn, "has_npu", lambda: True)
    monkeypatch.setattr(roles, "has_npu", lambda: True)
    monkeypatch.setattr(roles, "this_soc", lambda: find_soc("SM8650"))


def test_auto_uses_an_available_npu(model, native, with_npu, failing_npu, caplog):
    with load(model, npu="auto", scheme=None) as engine:
        assert engine.loaded.npu_backend.name == "qnn"
        assert engine.loaded.npu_backend.soc.name == "SM8650"
        assert engine.scheme.name == "w8a16"
        assert engine.options.falls_back
        failing_npu.fails_at = 1
        np.testing.assert_array_equal(logits_of(engine, prompt(NUM_TOKENS)), logits_of(native, prompt(NUM_TOKENS)))
    assert len(warnings_of(caplog, FALLBACK)) == 1


def test_auto_without_an_npu_is_native(model):
    with load(model, npu="auto") as engine:
        assert engine.loaded.npu_backend.name == "native"


def test_soc_option_without_effect_is_reported(model, caplog):
    for choice in ("auto", "native"):
        load(model, npu=choice, soc="SM8750").close()
    told = "`soc='SM8750'` has no effect, because the CPU serves as the NPU; try `npu='qnn'`"
    assert warnings_of(caplog, "chunkrt.engine.roles") == [told, told]


def test_auto_runs_a_dynamic_model_on_the_cpu(model, with_npu, caplog):
    with load(model, npu="native", scheme="w8a8-dynamic", calibration=None) as compiled:
        folder = compiled.folder
    with chunkrt.load(folder, npu="auto") as engine:
        assert engine.loaded.npu_backend.name == "native"
        assert engine.loaded.manifest.scheme == find_scheme("w8a8-dynamic")
    (told,) = warnings_of(caplog, "chunkrt.engine.roles")
    assert told == "the NPU does not run the scheme w8a8-dynamic, so the CPU runs it; try `scheme='w8a16'`"


TWICE = """
import sys
import chunkrt

for _ in range(2):
    chunkrt.load(sys.argv[1], npu="qnn", calibration=sys.argv[2], context_length=8, chunk_length=8).close()
"""


def test_emulation_is_reported_once_a_process(model):
    command = [sys.executable, "-P", "-c", TWICE, *map(str, model)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert told.count("no Hexagon NPU is available, so it is emulated") == 1


@pytest.mark.slow
def test_npu_alternates_with_switched_off_operators(model):
    with load(model) as whole, load(model, ops="-rms_norm,-silu_mul") as engine:
        expected, found = (logits_of(e, prompt(NUM_TOKENS)) for e in (whole, engine))
        last = [e.session() for e in (whole, engine)]
        tokens = []
        for session in last:
            session.prefill(prompt(NUM_TOKENS))
            tokens.append([piece.token_id for piece in session.generate(max_new_tokens=4)])
    assert 0 < relative_error(found, expected) < TOLERANCES["w8a16"]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("k", [1, 6])
def test_sequences_finish_after_the_npu_fails(model, native, failing_npu, k):
    """The fallback starts in the middle: the next run has the CPU's results."""
    prompts = [prompt(length, seed=length) for length in (9, 17, 30)]
    with load(model, on_npu_failure="fallback") as engine:
        failing_npu.fails_at = k
        found = at_once(*[partial(engine.session().prefill, ids) for ids in prompts])
        again = at_once(*[partial(engine.session().prefill, ids) for ids in prompts])
    for one, other, ids in zip(found, again, prompts, strict=True):
        expected = native.session().prefill(ids).logits
        assert relative_error(one.logits, expected) < TOLERANCES["w8a16"]
        np.testing.assert_array_equal(other.logits, expected)


def test_npu_failure_fails_running_sequences_and_no_later_ones(model, failing_npu):
    prompts = [prompt(length, seed=length) for length in (9, 17, 30)]
    with load(model, on_npu_failure="fail") as engine:
        expected = [engine.session().prefill(ids).logits for ids in prompts]
        sessions = [engine.session() for _ in prompts]
        failing_npu.num_runs, failing_npu.fails_at = 0, 2
        for result in at_once(*[partial(s.prefill, ids) for s, ids in zip(sessions, prompts, strict=True)]):
            assert isinstance(result, DeviceLostError)
        failing_npu.fails_at = None
        again = at_once(*[partial(s.prefill, ids) for s, ids in zip(sessions, prompts, strict=True)])
    for result, logits in zip(again, expected, strict=True):
        np.testing.assert_array_equal(result.logits, logits)


def test_listed_layers_alone_run_on_the_npu(tmp_path):
    path, tokens = tmp_path / "tiny.npz", input_ids("llama_gqa")[:20]
    model = calibrated("llama_gqa", path)
    logits = {}
    for npu, placement in (("qnn", "layers=1"), ("native", None)):
        with chunkrt.load(
            model, npu=npu, scheme="w8a16", calibration=path, placement=placement, context_length=32
        ) as engine:
            logits[npu] = engine.session().prefill(tokens).logits
            if npu == "qnn":
                nodes = [node.name for s in engine.plan.subgraphs if s.device == "npu" for node in s.nodes]
    layers = {name.split(".")[2] for name in nodes if name.startswith("model.layers.")}
    assert layers == {"1"}
    np.testing.assert_allclose(logits["qnn"], logits["native"], rtol=0, atol=0.02 * np.abs(logits["native"]).max())
