"""Tests of the Python interface: signatures, texts and reprs."""

import inspect
import os
import re
import typing
from collections import deque
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType

import pytest
from chat_model import write_chat_model
from fixture_checkpoints import checkpoint

import chunkrt
from chunkrt.engine.generation import Piece
from chunkrt.engine.keywords import GenerationOptions
from chunkrt.engine.options import EngineOptions, LoadOptions
from chunkrt.engine.sampling import SamplingOptions
from chunkrt.engine.settings import read_settings
from chunkrt.errors import ConfigError, ModelError
from chunkrt.graph.placement import Placed
from chunkrt.simulate import find_device, find_shape, simulate, simulate_serving
from chunkrt.simulate.arrivals import draw
from chunkrt.simulate.tune import tune

ROOT = Path(__file__).parents[2]
GGUF = checkpoint("llama_biased_gguf")


def test_load_signature_names_every_option_with_its_type():
    fields = EngineOptions.__dataclass_fields__
    stored, taken = typing.get_type_hints(EngineOptions), typing.get_type_hints(LoadOptions)
    assert set(stored) == set(taken)
    for name, kind in stored.items():
        is_size = name in ("cache_memory", "prefix_cache_memory", "prefix_cache_disk")
        kinds = set(typing.get_args(kind))
        expected = kinds - {Path} | {str, os.PathLike[str]} if Path in kinds else kinds | {str} if is_size else None
        if name == "placement":
            expected |= {Placed}  # a module tree, of which the placement is stored
        assert taken[name] == kind if expected is None else set(typing.get_args(taken[name])) == expected, name
    parameters = inspect.signature(chunkrt.load).parameters
    assert list(parameters) == ["model", "progress", "communicator", *fields]
    assert {name: parameters[name].default for name in fields} == {n: f.default for n, f in fields.items()}


class Place:
    """A path object of a user's own class."""

    def __init__(self, path):
        self._path = str(path)

    def __fspath__(self):
        return self._path


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [(7, 7), ("2GB", 2 * 10**9), ("512MiB", 512 * 2**20), ("1.5 gib", 3 * 2**29), ("64kB", 64_000), ("1TiB", 2**40)],
)
@pytest.mark.parametrize("name", ["cache_memory", "prefix_cache_memory", "prefix_cache_disk"])
def test_engine_options_take_sizes_as_numbers_or_text(name, given, num_bytes, tmp_path):
    assert getattr(EngineOptions(**{name: given}), name) == num_bytes
    file = tmp_path / "settings.toml"
    file.write_text(f"{name} = {given!r}\n")
    for path in (file, str(file), Place(file)):
        assert read_settings(path) == {name: num_bytes}


@pytest.mark.parametrize("given", [0, -1, "2", "2 parsecs", "0GB", "", True, 2.5, "-1GB", "1e3MB"])
def test_engine_options_refuse_other_sizes(given):
    with pytest.raises(ConfigError, match=re.escape(f"`cache_memory` is {given!r}, expected a size above 0, e.g. 2GB")):
        EngineOptions(cache_memory=given)


@pytest.mark.parametrize("name", ["calibration", "placement", "prefix_cache"])
def test_engine_options_take_paths_as_text_or_objects(name, tmp_path):
    path = tmp_path / "file"
    for given in (path, Place(path)):
        assert getattr(EngineOptions(**{name: given}), name) == path
    kept = getattr(EngineOptions(**{name: str(path)}), name)
    assert Path(kept) == path
    if name != "prefix_cache":
        with pytest.raises(ConfigError, match=f"`{name}` is '', expected a path"):
            EngineOptions(**{name: ""})


def test_load_takes_paths_as_text_or_objects(tmp_path):
    placement = tmp_path / "places.toml"
    placement.write_text('"lm_head" = "cpu"\n')
    for given in (str, Place):
        with chunkrt.load(given(GGUF), placement=given(placement), cache_memory="1GiB") as engine:
            assert engine.options.cache_memory == 2**30
            assert engine.generate("hello", max_tokens=2) is not None


def test_simulations_take_paths_as_text_or_objects():
    path = Path(chunkrt.simulate.__file__).parent / "devices" / "sd8gen3.toml"
    assert path.is_file()
    grid = {"chunk_lengths": [64], "policies": ["in_order"], "schemes": ["w8a16"], "prompt_lengths": [64], "workers": 1}
    expected = chunkrt.experiment(GGUF, devices=["sd8gen3"], **grid)
    for given in (str, Path, Place):
        rows = chunkrt.experiment(given(GGUF), devices=[given(path)], **grid)
        assert [row.tokens_per_s for row in rows] == [row.tokens_per_s for row in expected]
    tuned = {"prompt_lengths": [64], "chunk_lengths": [32], "workers": 1}
    found = [tune(Place(GGUF), Place(path), memory_bytes=limit, **tuned) for limit in (10**10, "10GB")]
    assert found[0].memory_bytes == found[1].memory_bytes == 10**10


def test_engine_and_session_show_the_names_of_the_reference():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for shown in (chunkrt.Engine, chunkrt.Session):
        listed = re.search(rf"::: chunkrt\.{shown.__name__}\n.*?members: \[(.*?)\]", page, re.DOTALL)[1]
        names = {name for name in dir(shown) if not name.startswith("_")}
        assert names == set(re.findall(r"\w+", listed))
    with chunkrt.load(GGUF) as engine, engine.session() as session:
        assert {name for name in vars(engine) if not name.startswith("_")} == {"loaded"}
        assert not {name for name in vars(session) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *product([chunkrt.Engine], ["generate", "chat", "stream"]),
        *product([chunkrt.Session], ["generate", "agenerate"]),
    ],
)
def test_signature_names_every_generation_option(kind, method):
    parameters, fields = inspect.signature(getattr(kind, method)).parameters, SamplingOptions.__dataclass_fields__
    assert parameters["max_new_tokens"].default == 256
    assert parameters["sampling"].default == SamplingOptions()
    options = SamplingOptions(**{name: parameters[name].default for name in fields})
    assert options == SamplingOptions()


def test_generation_options_include_the_sampling_options_with_their_types():
    of_sampling, all_options = typing.get_type_hints(SamplingOptions), typing.get_type_hints(GenerationOptions)
    assert {name: all_options.get(name) for name in of_sampling} == of_sampling
    assert all_options.keys() - of_sampling.keys() == {"max_new_tokens", "max_tokens", "sampling", "stop"}


def test_sampling_fields_as_keywords_equal_sampling_options():
    options = {"temperature": 0.9, "top_k": 20, "seed": 7}
    prompts = ["hello", [1, 2, 3]]
    with chunkrt.load(GGUF) as engine, engine.session() as session:
        expected = engine.generate(prompts, max_new_tokens=6, sampling=SamplingOptions(**options))
        assert engine.generate(prompts, max_tokens=6, **options) == expected
        assert engine.generate(prompts, max_tokens=6) != expected, "the options change the answers"
        assert expected[0] == engine.generate("hello", max_tokens=6, **options)
        session.prefill("hello")
        assert "".join(map(str, session.generate(max_tokens=6, **options))) == expected[0]
        texts = ["", ""]
        for index, piece in engine.stream(prompts, max_tokens=6, **options):
            texts[index] += piece.text
        assert texts == expected


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temprature": 1.0}, "unknown option 'temprature'; did you mean 'temperature'"),
        ({"max_session": 1}, "did you mean 'max_sessions'"),
        ({"max_tokens": 3, "max_new_tokens": 3}, "max_new_tokens and max_tokens are two names of one option"),
        ({"sampling": SamplingOptions(), "top_p": 0.5}, "sampling and top_p are both given"),
        ({"max_tokens": 0}, "max_new_tokens is 0, expected at least 1"),
        ({"max_new_tokens": None}, "max_new_tokens is None, expected a whole number"),
        ({"top_p": 2}, r"top_p: found 2, expected a number in \[0, 1\]"),
        ({"sampling": None}, "sampling is None, expected SamplingOptions"),
    ],
)
def test_wrong_generation_options_are_one_clear_error(options, error):
    with chunkrt.load(GGUF) as engine:
        for method in (engine.generate, engine.stream):
            with pytest.raises(ConfigError, match=error) as found:
                method(["hello"], **options)
            assert "\n" not in str(found.value)


def test_chat_answers_several_chats_and_streams(template_engine):
    chats = [[{"role": "user", "content": text}] for text in ("hello", "one two")]
    expected = [template_engine.chat(chat, max_tokens=5) for chat in chats]
    assert template_engine.chat(chats, max_tokens=5) == expected
    assert template_engine.chat(chats[:1], max_tokens=5) == expected[:1]
    pieces = list(template_engine.chat(chats[0], max_tokens=5, stream=True))
    assert "".join(piece.text for piece in pieces) == expected[0]
    assert [piece.finish_reason is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    texts = ["", ""]
    for index, piece in template_engine.chat(chats, max_tokens=5, stream=True):
        texts[index] += piece.text
    assert texts == expected
    assert template_engine.chat(deque(map(MappingProxyType, chats[0])), max_tokens=5) == expected[0]
    with pytest.raises(ConfigError, match="stream is 'no', expected True or False"):
        template_engine.chat(chats[0], stream="no")
    with pytest.raises(ConfigError, match="item 1 is of type dict, expected a list"):
        template_engine.chat([chats[0], chats[1][0]])


@pytest.fixture
def template_engine(tmp_path):
    with chunkrt.load(write_chat_model(tmp_path / "toy"), threads=1) as engine:
        yield engine


def test_repr_of_sampling_options_shows_those_that_differ_from_the_defaults():
    assert repr(SamplingOptions()) == "SamplingOptions()"
    assert repr(SamplingOptions(temperature=0.5, seed=3)) == "SamplingOptions(temperature=0.5, seed=3)"
    assert len(repr(SamplingOptions(logit_bias=dict.fromkeys(range(300), 1)))) < 150


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
        assert repr(engine.tokenizer) == "Tokenizer(128 tokens)"
        settings = replace(engine.tokenizer.settings, chat_template="x" * 999, tool_template="x" * 999)
        assert "xx" not in repr(settings)
    assert repr(engine).endswith(", closed)")
    assert repr(session) == "Session(closed)"


def test_reprs_of_plans_records_and_simulations_are_short_and_informative():
    records = []
    with chunkrt.load(GGUF, chunk_length=4, cache_memory="1GB") as engine, engine.session() as session:
        session.on_run = records.append
        session.prefill([1, 2, 3, 4, 5, 6])
        plan, options = engine.plan, engine.options
    assert repr(options) == "EngineOptions(chunk_length=4, cache_memory=1000000000)"
    shape, setting = find_shape("gemma-2b"), {"chunk_length": 64, "policy": "in_order", "scheme": "w8a16"}
    big, device = shape.plan(), find_device("sd8gen3")
    simulation = simulate(big, device, prompt_length=128, **setting)
    load = draw("closed", "16", "2", requests=2, context_length=256)
    serving = simulate_serving(big, device, load, sessions=2, **setting)
    rows = chunkrt.experiment(
        shape,
        devices=["sd8gen3"],
        chunk_lengths=[64],
        policies=["in_order"],
        schemes=["w8a16"],
        prompt_lengths=[64, 128],
        workers=1,
    )
    record = records[0]
    shown = [
        (plan, ["'llama'", f"{len(plan.subgraphs)} subgraphs", "vocabulary of 128", "context of 128"]),
        (plan.subgraphs[0], ["'embedding'", "on cpu", "1 nodes"]),
        (big, [f"{len(big.subgraphs)} subgraphs"]),
        (record, ["prefill 6 tokens", "2 chunks", f"{len(record.events)} events", f"policy {record.pipeline.policy}"]),
        (record.pipeline, [f"{len(record.pipeline.stages)} stages", "chunks of 4"]),
        (simulation, [simulation.device, "in_order", "tokens/s"]),
        (serving, ["2 requests", "generated tokens/s", "in_order"]),
        (rows, ["2 rows", f"{max(row.tokens_per_s for row in rows):.1f} tokens/s"]),
        (device, [repr(device.name)]),
        (shape, [str(shape.hidden_size)]),
        (load, ["num_cut=0"]),
    ]
    for value, parts in shown:
        text = repr(value)
        assert text.startswith(f"{type(value).__name__}(")
        assert len(text) < 500
        assert not [part for part in parts if part not in text], text


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
