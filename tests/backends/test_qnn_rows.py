"""Engines with NPU graphs of several numbers of rows: the choice of the graph for every chunk."""

import json
import re
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from calibrated import calibrated
from fixture_checkpoints import checkpoint
from gates import asked_before_any_is_computed

import chunkrt
from chunkrt.backends.qnn import open_htp
from chunkrt.backends.qnn.library import open_session
from chunkrt.engine.deploy import compile_engine
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import CompileError, ConfigError

pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
if not open_htp().is_emulated:
    pytest.skip("this machine has an NPU, and a compiler for that NPU alone", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("own_home")

NAME, VOCABULARY, CONTEXT = "llama_gqa", 128, 128
ON_NPU = [{"decode_on": "npu"}, {"weights": "npu-only", "attention": "npu", "npu_window": CONTEXT}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny checkpoint, and its calibration."""
    path = tmp_path_factory.mktemp("calibration") / "tiny.npz"
    return calibrated(NAME, path), path


@pytest.fixture
def rows_run(monkeypatch):
    """The numbers of rows of the graphs that sessions run: a counter, which the test clears."""
    counted = Counter()

    class Counting:
        def __init__(self, session, rows):
            self.io_binding = session.io_binding
            self._session, self._rows = session, rows

        def run_with_iobinding(self, binding):
            counted[self._rows] += 1
            self._session.run_with_iobinding(binding)

    def opened(htp, soc, graph, **options):
        session = open_session(htp, soc, graph, **options)
        if "write_context" in options:
            return session
        return Counting(session, int(re.search(r"-r(\d+)-", Path(graph).parent.name)[1]))

    monkeypatch.setattr("chunkrt.backends.qnn.backend.open_session", opened)
    return counted


def load(model, **options):
    checkpoint, calibration = model
    given = {"npu": "qnn", "scheme": "w8a16", "calibration": calibration, "threads": 2, "prefix_cache": "off"}
    return chunkrt.load(checkpoint, **(given | options))


def tokens_of(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(3, VOCABULARY, num_tokens)


def graphs_per_chunk(engine):
    """Return the number of NPU graphs that a chunk with logits passes through."""
    plan = engine.loaded.scheduler.executors.prompts.plan
    return sum(subgraph.device == "npu" for subgraph in plan.subgraphs)


@pytest.mark.parametrize("how", ON_NPU, ids=["linears", "decoder"])
def test_each_chunk_runs_the_smallest_graph_that_holds_its_rows(model, rows_run, how):
    """Tails of prompts, drafts, single tokens, and tokens of several sequences, all with the bits of large graphs."""
    with load(model, chunk_length="1,8,32", **how) as engine, load(model, chunk_length=32, **how) as whole:
        assert engine.chunk_length == 32
        num_graphs = graphs_per_chunk(engine)
        for num_tokens, expected in [(32, 32), (9, 32), (8, 8), (3, 8), (2, 2), (1, 2)]:
            rows_run.clear()
            found = engine.session().prefill(tokens_of(num_tokens), logits="all").logits
            assert rows_run == {expected: num_graphs}
            np.testing.assert_array_equal(found, whole.session().prefill(tokens_of(num_tokens), logits="all").logits)
        session, other = engine.session(), whole.session()
        rows_run.clear()
        session.prefill(tokens_of(37))
        assert {rows for rows, count in rows_run.items() if count} == {32, 8}
        other.prefill(tokens_of(37))
        drafts = tokens_of(5, seed=1)  # a speculative decoder verifies them at once
        rows_run.clear()
        found = session.prefill(drafts, logits="all").logits
        assert rows_run == {8: num_graphs}
        np.testing.assert_array_equal(found, other.prefill(drafts, logits="all").logits)
        rows_run.clear()
        found = [piece.token_id for piece in session.generate(max_new_tokens=4)]
        assert set(rows_run) == {2}
        assert found == [piece.token_id for piece in other.generate(max_new_tokens=4)]


def test_tokens_of_several_sequences_share_a_graph_of_eight_rows(model, rows_run):
    with load(model, chunk_length="1,8,32", decode_on="npu") as engine:
        num_graphs = graphs_per_chunk(engine)
        sessions = [engine.session() for _ in range(3)]
        for index, session in enumerate(sessions):
            session.prefill(tokens_of(5 + index))
        alone = [session.fork().prefill(tokens_of(1)).logits for session in sessions]
        rows_run.clear()
        calls = [partial(session.prefill, tokens_of(1)) for session in sessions]
        together = asked_before_any_is_computed(engine, calls)
        assert rows_run == {8: num_graphs}
    for found, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(found.logits, expected)


@pytest.mark.parametrize("how", ON_NPU, ids=["linears", "decoder"])
def test_directory_of_several_lengths_runs_all_of_them(model, rows_run, tmp_path, how):
    checkpoint, calibration = model
    attention = {name: value for name, value in how.items() if name in ("attention", "npu_window")}
    options = EngineOptions(npu="qnn", scheme="w8a16", calibration=calibration, **attention)
    written = compile_engine(str(checkpoint), tmp_path / "sky", options, socs=["SM8650"], chunk_lengths=[1, 8, 32, 64])
    assert [target["chunk_length"] for target in written["npu"]] == [1, 8, 32, 64]
    given = {name: value for name, value in how.items() if name not in attention} | {"prefix_cache": "off"}
    for chosen, chunk_length, graphs in [(None, 32, {2, 8, 32}), ("8,64", 64, {8, 64}), (8, 8, {8})]:
        rows_run.clear()
        with chunkrt.load(tmp_path / "sky", npu="qnn", chunk_length=chosen, **given) as engine:
            assert engine.chunk_length == chunk_length
            assert engine.loaded.npu_backend.num_compiled == 0
            for num_tokens in (chunk_length, 5, 1):
                engine.session().prefill(tokens_of(num_tokens))
            assert set(rows_run) == graphs
    with pytest.raises(CompileError, match="chunks of 96"):
        chunkrt.load(tmp_path / "sky", npu="qnn", chunk_length="8,96", **given)


def test_directory_of_several_lengths_runs_layers_with_windows(tmp_path):
    """Rings for chunks of 1 and of 96 tokens have different numbers of slots, but the graphs read the same number."""
    folder, path = tmp_path / "windows", tmp_path / "windows.npz"
    shutil.copytree(checkpoint("mistral_window_95"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 64, "max_position_embeddings": 256}))
    calibrated(folder, path)
    given = {"scheme": "w8a16", "calibration": path, "attention": "npu", "npu_window": 256}
    options = EngineOptions(npu="qnn", **given)
    compile_engine(str(folder), tmp_path / "sky", options, socs=["SM8650"], chunk_lengths=[1, 8, 96])
    tokens = tokens_of(250) % 48
    with load((folder, path), npu="native", attention_math="float32") as engine:
        expected = engine.session().prefill(tokens, logits="all").logits
    with chunkrt.load(tmp_path / "sky", npu="qnn", decode_on="npu", prefix_cache="off") as engine:
        assert (engine.chunk_length, engine.loaded.npu_backend.num_compiled) == (96, 0)
        session = engine.session()
        parts = np.split(tokens, (97, 98, 105, 201, 202))
        found = np.vstack([session.prefill(part, logits="all").logits for part in parts])
    assert np.sqrt(np.mean((found - expected) ** 2)) < np.sqrt(np.mean(expected**2)) / 50


@pytest.mark.parametrize("name", ["lfm2", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_other_decoders_have_the_bits_of_large_graphs(tmp_path, name):
    """Short convolutions and norms of heads, in prompts with a tail and in single tokens."""
    path = tmp_path / "other.npz"
    model = calibrated(name, path), path
    found = []
    for lengths in ("1,8,32", 32):
        with load(model, chunk_length=lengths, **ON_NPU[1]) as engine:
            session, tokens = engine.session(), tokens_of(45) % engine.plan.vocab_size
            rows = [session.prefill(part, logits="all").logits for part in (tokens[:37], tokens[37:43])]
            found.append(np.vstack([*rows, *(session.prefill(tokens[[i]]).logits for i in (43, 44))]))
    np.testing.assert_array_equal(*found)


def test_failing_graphs_of_all_rows_are_restored(model):
    with load(model, chunk_length="1,8,32", decode_on="npu", on_npu_failure="fallback") as engine:
        expected = [engine.session().prefill(tokens_of(count)).logits for count in (20, 5, 1)]
        engine.loaded.npu_backend.restore()
        for count, logits in zip((20, 5, 1), expected, strict=True):
            np.testing.assert_array_equal(engine.session().prefill(tokens_of(count)).logits, logits)


@pytest.mark.parametrize("lengths", ["", "1,,8", "8,8", "0,32", "1;8", "x", 0, -1, 1.5, True])
def test_lengths_that_are_no_numbers_are_refused(lengths):
    with pytest.raises(ConfigError, match=r"`chunk_length` is .*, expected numbers of tokens, at least 1") as error:
        EngineOptions(chunk_length=lengths)
    assert "\n" not in str(error.value)


def test_several_lengths_without_an_npu_are_reported(model, caplog):
    with load(model, npu="native", chunk_length="1,8") as engine:
        assert engine.chunk_length == 8
    assert "`chunk_length='1,8'` with several lengths has no effect, because the CPU serves as the NPU" in caplog.text


SHARED = (
    "with 8-bit activations (w8a8) graphs on the NPU have multiples of 32 rows: chunks of 1, 8, 32 tokens share a "
    "graph of 32 rows; smaller graphs need a scheme with 16-bit activations"
)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "share a graph" in record.getMessage()]


def test_lengths_that_share_a_graph_with_8_bit_activations_are_reported_once(model, caplog, tmp_path):
    checkpoint, calibration = model
    with load(model, scheme="w8a8", chunk_length="1,8,32") as engine:
        assert engine.loaded.scheduler.executors.prompts.pipeline.graph_lengths == ()
    assert warnings_of(caplog) == [SHARED]
    caplog.clear()
    options = EngineOptions(npu="qnn", scheme="w8a8", calibration=calibration)
    compile_engine(str(checkpoint), tmp_path / "sky", options, socs=["SM8650", "SM8750"], chunk_lengths=[1, 8, 32])
    assert warnings_of(caplog) == [SHARED]
    caplog.clear()
    for scheme, lengths in [("w8a8", 32), ("w8a8", "32,64"), ("w8a16", "1,8,32")]:
        load(model, scheme=scheme, chunk_length=lengths).close()
    assert not warnings_of(caplog)
