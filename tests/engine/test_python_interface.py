"""Tests of the Python interface: signatures, texts and reprs."""

import inspect
import re
import typing

import pytest
from fixture_checkpoints import checkpoint

import chunkrt
from chunkrt.engine.generation import Piece
from chunkrt.engine.load_options import LoadOptions
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import ModelError

GGUF = checkpoint("llama_biased_gguf")


def test_load_signature_names_every_option_with_its_type():
    fields = EngineOptions.__dataclass_fields__
    hints = typing.get_type_hints(LoadOptions)
    assert hints == typing.get_type_hints(EngineOptions)
    parameters = inspect.signature(chunkrt.load).parameters
    assert list(parameters) == ["model", "progress", "communicator", *fields]
    assert {name: parameters[name].default for name in fields} == {n: f.default for n, f in fields.items()}


def test_reprs_are_short():
    with chunkrt.load(GGUF) as engine, engine.session() as session:
        result = session.prefill("hello")
        assert repr(session) == "Session(7 of 128 tokens)"
        assert re.fullmatch(
            r"PrefillResult\(7 tokens in 1 chunks, position 7, [\d.]+ s, [\d.]+ tokens/s, logits float32 \[\d+\], "
            r"\d+ events\)",
            repr(result),
        )
        how = "scheme w8a8-dynamic, on native, chunks of 128, context of 128"
        assert repr(engine) == f"Engine({str(GGUF)!r}, {how})"
    assert repr(engine).endswith(", closed)")
    assert repr(session) == "Session(closed)"


def test_rewind_to_the_result_position_forgets_only_the_answer():
    """Also if the prefix cache supplied most of the prompt, so that few tokens were computed."""
    prompt = [(5 * i) % 40 for i in range(60)]
    with chunkrt.load(GGUF, prefix_cache="memory") as engine:
        for num_cached in (0, 59):
            with engine.session() as session:
                result = session.prefill(prompt)
                assert (result.position, result.num_cached) == (60, num_cached)
                assert ("59 cached" in repr(result)) == bool(num_cached)
                first = [piece.token_id for piece in session.generate(max_new_tokens=4)]
                session.rewind(result.position)
                assert session.tokens == tuple(prompt)
                assert [piece.token_id for piece in session.generate(max_new_tokens=4)] == first


def test_pieces_and_tokens_have_a_plain_form():
    assert str(Piece(text="hi", token_id=3)) == "hi"
    with chunkrt.load(GGUF) as engine:
        tokenizer = engine.tokenizer
        assert tokenizer.encode("hello") == tokenizer.encode("hello", add_special=True, parse_special=False)
        with pytest.raises(ModelError, match="no chat template"):
            engine.chat([{"role": "user", "content": "hi"}])


def test_plan_is_a_table_in_a_notebook():
    with chunkrt.load(GGUF) as engine:
        html = engine.plan._repr_html_()
        assert html.count("<tr>") == 1 + len(engine.plan.subgraphs)
        assert "<td>static.0</td><td>npu</td><td>static</td>" in html


def test_record_of_a_run_is_a_table_in_a_notebook():
    records = []
    with chunkrt.load(GGUF, chunk_length=4) as engine, engine.session() as session:
        session.on_run = records.append
        session.prefill([1, 2, 3, 4, 5, 6])
    html = records[0]._repr_html_()
    assert "<caption>prefill 6 tokens: " in html
    rows = [re.findall(r"<td>([\d.]+) %</td>", row) for row in html.split("<tr>")[2:]]
    assert len(rows) > 2
    assert sum(float(row[0]) for row in rows) == pytest.approx(100, abs=0.1 * len(rows))
