"""A program without chunkrt runs the output of `compile --for-host`: here in NumPy and ONNX Runtime, by
docs/phones.md."""

import json

import numpy as np
import onnx
import pytest
from calibrated import calibrated
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

import chunkrt
from chunkrt.engine import host
from chunkrt.engine.deploy import compile_engine
from chunkrt.engine.options import EngineOptions

pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
from chunkrt.backends.qnn import open_htp

if not open_htp().is_emulated:
    pytest.skip("this machine has an NPU, and a compiler for that NPU alone", allow_module_level=True)

CONTEXT, CHUNK, VOCABULARY = 96, 16, 48


class Host:
    """A host that follows docs/phones.md, and uses only the library's handle of chunkrt."""

    def __init__(self, folder, chunk_length):
        import onnxruntime as ort

        self.folder = folder
        self.told = json.loads((folder / "host" / "host.json").read_text())
        (self.target,) = [t for t in self.told["targets"] if t["chunk_length"] == chunk_length]
        self.tables = {
            name: np.fromfile(folder / table["file"], "<f2").reshape(table["shape"])
            for name, table in self.told["tables"].items()
        }
        self.sessions = [self._session(ort, graph) for graph in self.target["graphs"]]
        self.caches = {
            edge["cache"]: np.zeros(edge["shape"], np.float16)
            for graph in self.target["graphs"]
            for edge in graph["inputs"]
            if "cache" in edge
        }
        self.rings = {
            edge["cache"]
            for graph in self.target["graphs"]
            for edge in graph["inputs"]
            if "cache" in edge and edge["ring"]
        }
        self.position = 0

    def _session(self, ort, graph):
        path = str(self.folder / graph["file"])
        options = ort.SessionOptions()
        if graph["device"] == "cpu":
            options.add_session_config_entry("session.disable_quant_qdq", "1")
            return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        htp = open_htp()
        target = {"soc_model": "57", "htp_arch": "75", "enable_block_quant_weight_optimization": "1"}
        options.add_provider_for_devices([htp.device], {"backend_path": htp.backend_path, **target})
        return ort.InferenceSession(path, options)

    def run(self, tokens):
        """Return the logits of all tokens, at most as many as a chunk has."""
        values = {"input_ids": np.array(tokens, np.int64), "logit_rows": np.arange(len(tokens))}
        for graph, session in zip(self.target["graphs"], self.sessions, strict=True):
            feeds = {edge["name"]: self._enter(edge, values, len(tokens)) for edge in graph["inputs"]}
            outputs = session.run([edge["name"] for edge in graph["outputs"]], feeds)
            for edge, output in zip(graph["outputs"], outputs, strict=True):
                if "holds" in edge:
                    values[edge["holds"]] = output[: len(tokens)].astype(np.float32)
                else:
                    cache = self.caches[edge["rows_of"]]
                    for row in range(len(tokens)):
                        slot = self.position + row
                        cache[:, slot % cache.shape[1] if edge["rows_of"] in self.rings else slot] = output[:, row]
            last = graph["outputs"][-1]
        self.position += len(tokens)
        return values[last["holds"]]

    def _enter(self, edge, values, count):
        if "cache" in edge:
            return self.caches[edge["cache"]]
        if "mask" in edge:
            return self._mask(edge, count)
        if "rows_of" in edge:
            rows = np.zeros(edge["shape"], np.float16)
            rows[:count] = self.tables[edge["rows_of"]][self.position : self.position + count]
            return rows
        value = values[edge["holds"]]
        if edge["dtype"] != "float16":
            return value
        rows = np.zeros(edge["shape"], np.float16)
        rows[:count] = value
        return rows

    def _mask(self, edge, count):
        rows, columns = edge["shape"]
        past, window = columns - rows, edge["mask"]
        mask = np.full((rows, columns), self.told["hidden_slot"], np.float16)
        for row in range(rows):
            at = self.position + min(row, count - 1)
            for slot in range(past):
                held = slot
                if window:  # the last position before this chunk that was written into the slot
                    held = slot + (self.position - 1 - slot) // past * past
                if 0 <= held < self.position and (not window or held > at - window):
                    mask[row, slot] = 0
            for other in range(rows):
                held = self.position + other
                if held <= at and (not window or held > at - window):
                    mask[row, past + other] = 0
        return mask


@pytest.fixture(scope="module")
def calibrations(tmp_path_factory):
    """Calibration of a tiny checkpoint, on tokens of its own."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("CHUNKRT_HOME", str(home))

        def made(name):
            path = home / f"{name}.npz"
            if not path.exists():
                calibrated(name, path, tokens_of(64))
            return path

        yield made


def tokens_of(count):
    return np.random.default_rng(3).integers(0, VOCABULARY, count)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mistral_window_5", {"npu_graph": "layers=1"}),
        ("llama_gqa", {}),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("gemma3_scaled", "qwen3")),
    ],
)
def test_host_gets_the_logits_of_chunkrt(name, settings, calibrations, tmp_path):
    options = {"npu": "qnn", "scheme": "w8a16", "context_length": CONTEXT}
    options |= {"attention": "npu", "npu_window": str(CONTEXT), **settings}
    folder, whole = tmp_path / "phone", tmp_path / "engine"
    compiled = EngineOptions(**options, calibration=calibrations(name))
    for output, for_host in ((folder, True), (whole, False)):
        compile_engine(
            str(checkpoint(name)), output, compiled, socs=["SM8650"], chunk_lengths=[CHUNK], for_host=for_host
        )
    tokens = tokens_of(CONTEXT)
    with chunkrt.load(whole, npu="qnn", threads=1, prefix_cache="off") as engine:
        expected = engine.session().prefill(tokens, logits="all").logits
    assert files_below(folder) == json.loads((folder / "host" / "host.json").read_text())["files"]
    host = Host(folder, CHUNK)
    tables = [i for p in (folder / "host").glob("*.onnx") for i in onnx.load(p).graph.initializer if len(i.dims) == 2]
    assert onnx.TensorProto.FLOAT16 in {table.data_type for table in tables}
    found = np.concatenate([host.run(tokens[start : start + CHUNK]) for start in range(0, CONTEXT, CHUNK)])
    # the same bits except for the LM head's norm, after which a value may fall to the other side of a 16-bit grid
    assert np.sqrt(np.mean((found - expected) ** 2)) < 2.0**-10 * np.sqrt(np.mean(expected**2))
    assert np.mean(found == expected) > 1 / 2


def files_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_weights_that_exceed_an_onnx_file_are_stored_separately(calibrations, tmp_path, monkeypatch, command):
    options = EngineOptions(
        npu="qnn", scheme="w8a16", context_length=32, attention="npu", calibration=calibrations("llama_gqa")
    )

    def compiled(name):
        folder = tmp_path / name
        compile_engine(
            str(checkpoint("llama_gqa")), folder, options, socs=["SM8650"], chunk_lengths=[CHUNK], for_host=True
        )
        return folder

    within = compiled("within")
    monkeypatch.setattr(host, "LARGEST_GRAPH", 1000)
    beside = compiled("beside")
    files = json.loads((beside / "host" / "host.json").read_text())["files"]
    assert files == files_below(beside)
    assert set(files) - set(files_below(within)) == {f"host/{name}.onnx.data" for name in ("embedding", "head")}
    tokens = tokens_of(CHUNK)
    np.testing.assert_array_equal(Host(beside, CHUNK).run(tokens), Host(within, CHUNK).run(tokens))
    expect_one_line(command("run", beside, "-p", "hello"), "compile it without --for-host")


def test_models_that_a_host_cannot_run_are_rejected_before_they_are_compiled(
    command, calibrations, tmp_path, monkeypatch
):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    asked = ("compile", checkpoint("llama_gqa"), "-o", tmp_path / "engine", "--for-host")
    expect_one_line(command(*asked), "--for-host has no effect without --soc")
    asked = (*asked, "--soc", "SM8650", "--scheme", "w8a16", "--calibration", calibrations("llama_gqa"))
    expect_one_line(command(*asked), "needs all layers on the NPU, but dynamic.0 is not on the NPU")
    short = ("--attention", "npu", "--npu-window", "32", "--context", "96")
    expect_one_line(command(*asked, *short), "a --context that is no longer than the longest --npu-window")
    assert not (tmp_path / "engine").exists()
    assert not list((tmp_path / "home").glob("engines/*"))
