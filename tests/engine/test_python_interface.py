"""The Python interface: signatures, texts, reprs, and the code blocks of docs/python.md."""

import inspect
import re
import typing
from pathlib import Path

import pytest
from fixture_checkpoints import checkpoint
from pulled_models import MODELS

import chunkrt
from chunkrt.engine.generation import Piece
from chunkrt.engine.load_options import LoadOptions
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import ModelError

GGUF = checkpoint("llama_biased_gguf")
PAGE = Path(__file__).parents[2] / "docs" / "python.md"


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


@pytest.mark.skipif(MODELS["smollm2-135m-instruct"] is None, reason="the model is not pulled")
def test_code_blocks_of_the_page_run(capsys, tmp_path, monkeypatch):
    """They run one after the other, in one namespace."""
    pulled = MODELS["smollm2-135m-instruct"]
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    place = tmp_path / "models" / "smollm2-135m-instruct" / pulled.name
    place.parent.mkdir(parents=True)
    place.symlink_to(pulled)
    names = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 8
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    written = capsys.readouterr().out
    assert "Engine('smollm2-135m-instruct', " in written
    assert "Paris" in written
