"""The comparison of predictions with runs, on a small model and a fake NPU: its cases, not its figures."""

from __future__ import annotations

from types import ModuleType

import pytest
from fixture_checkpoints import checkpoint

import chunkrt

GGUF = str(checkpoint("llama_biased_gguf"))


def test_the_fake_npu_computes_the_logits_of_the_native_backend(fake_npu: ModuleType) -> None:
    found = {}
    for npu in ("native", fake_npu.NAME, fake_npu.SEVERAL):
        options = {"npu": npu, "chunk_length": 8, "threads": 1, "attention_math": "float32"}
        with chunkrt.load(GGUF, **options) as engine, engine.session() as session:
            found[npu] = session.prefill(list(range(3, 24))).logits
            assert engine.loaded.npu_backend.name == npu
    assert (found["native"] == found[fake_npu.NAME]).all()
    assert (found["native"] == found[fake_npu.SEVERAL]).all()


def test_every_case_is_measured_and_predicted(fake_npu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    import predict

    options = ("--rounds", "1", "-r", "1", "-p", "24,64", "--budgets", "1", "--chunk", "8")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:  # the figures of so short runs mean nothing
        predict.predict.main([GGUF, *options])
    assert stopped.value.code in (0, 1)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith(("| native", "| fake"))]
    cases = ["pp24", "pp64", "tg32 @ d64", "4 sequences, tg32"]
    assert [(row[1].strip(), row[3].strip()) for row in rows] == [(n, c) for n in ("native", "fake") for c in cases]
    assert all(float(row[column]) > 0 for row in rows for column in (4, 5, 6))
