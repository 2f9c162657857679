"""Schemas of answers: unsatisfiable, too large or too deep ones, and interrupted answers."""

import json
import re

import httpx
import numpy as np
import pytest
from server_of_tests import events_of, serving

from chunkrt.errors import ConstraintError
from chunkrt.server.constraints import without_unknown_formats
from chunkrt.server.satisfiable import allows_nothing

pytest.importorskip("llguidance")
MESSAGES = [{"role": "user", "content": "hi"}]


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def closed(properties, *required):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def ask(url, schema, **more):
    body = {"messages": MESSAGES, "response_format": form(schema), "max_tokens": 60, "temperature": 0, **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


A = {"$ref": "#/$defs/A"}
B = {"$ref": "#/$defs/B"}
NOTHING = [
    {"$defs": {"A": A}, "$ref": "#/$defs/A"},
    {"$defs": {"A": closed({"x": B}, "x"), "B": closed({"x": A}, "x")}, **A},
    {"$defs": {"A": closed({"x": A}, "x")}, **closed({"y": A}, "y")},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2},
    {"$defs": {"A": {"anyOf": [closed({"x": A}, "x"), B]}, "B": {"allOf": [A]}}, **A},
    {"definitions": {"a/b~": closed({"x": {"$ref": "#/definitions/a~1b~0"}}, "x")}, "$ref": "#/definitions/a~1b~0"},
]
SOMETHING = [
    {},
    closed({"x": {"$ref": "#"}}),
    closed({"x": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "x"),
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1},
    {"$defs": {"A": closed({"x": A}, "x")}, **closed({"y": A})},
    {"$defs": {"A": closed({"x": A}, "x")}, "anyOf": [A, {"type": "null"}]},
    {"type": ["object", "null"], "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    {"properties": {"x": {"$ref": "#"}}, "required": ["x"]},  # a number satisfies it
    {"$ref": "https://example.com/other"},
    {"$ref": "#/nowhere"},
    {"$defs": {"A": {"$id": "other", **A}}, **A},  # refers to the definitions of another document
]


@pytest.mark.parametrize("schema", NOTHING)
def test_allows_nothing_finds_values_without_end(schema):
    assert allows_nothing(schema)


@pytest.mark.parametrize("schema", SOMETHING)
def test_allows_nothing_spares_schemas_that_have_a_value_or_may(schema):
    assert not allows_nothing(schema)


def test_allows_nothing_takes_long_chains():
    chain = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(20_000)}
    assert not allows_nothing({"$defs": {**chain, "20000": {"type": "null"}}, "$ref": "#/$defs/0"})
    assert allows_nothing({"$defs": {**chain, "20000": {"$ref": "#/$defs/0"}}, "$ref": "#/$defs/0"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("schema", NOTHING)
def test_a_schema_that_allows_nothing_is_refused(served, schema, stream):
    answer = ask(served[1], schema, stream=stream)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


@pytest.mark.parametrize("number", [500, 501])
def test_a_schema_beyond_the_grammars_size_is_refused(served, number):
    answer = ask(served[1], closed({f"p{i}": {"type": "null"} for i in range(number)}), max_tokens=3)
    if number == 500:
        assert answer.json()["choices"][0]["message"]["content"].startswith("{")
    else:
        assert answer.status_code == 400
        assert "grammar is too large" in answer.json()["error"]["message"]


def large_later():
    """A large object that only follows one of two values, so that its size is found during the answer."""
    large = closed({f"p{i}": {"type": "null"} for i in range(501)})
    return closed({"a": {"enum": [False, True]}, "b": large}, "a", "b")


def test_an_answer_that_its_grammar_cannot_finish_is_an_error(served):
    answer = ask(served[1], large_later())
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("constraint_failed", "response_format")
    assert "grammar is too large" in error["message"]


def test_a_stream_that_its_grammar_cannot_finish_ends_with_an_error(served):
    answer = ask(served[1], large_later(), stream=True)
    assert answer.status_code == 200
    *events, last = events_of(answer.text)
    assert last["error"]["code"] == "constraint_failed"
    assert not any(choice["finish_reason"] for event in events for choice in event["choices"])
    assert answer.text.splitlines()[-2] == "data: [DONE]"


@pytest.mark.parametrize("levels", [30, 61, 62, 64, 300, 490, 950])
@pytest.mark.parametrize(("begin", "end"), [('{"properties":{"x":', "}}"), ('{"allOf":[', "]}")])
def test_a_deep_schema_is_followed_or_refused(served, levels, begin, end):
    # as text, because Python's encoder does not support this depth
    schema = levels * begin + '{"type":"null"}' + levels * end
    form = '{"type":"json_schema","json_schema":{"name":"x","schema":' + schema + "}}"
    body = '{"messages":[{"role":"user","content":"hi"}],"max_tokens":2,"response_format":' + form + "}"
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{served[1]}/v1/chat/completions", content=body, headers=headers, timeout=60)
    assert answer.status_code in ((200,) if levels <= 30 else (200, 400))
    if answer.status_code == 400:
        assert "\n" not in answer.json()["error"]["message"]


def test_generate_raises_where_a_constraint_allows_nothing(engine):
    class Two:
        """Allows two tokens, then none."""

        num = 0

        def allowed(self):
            return np.full(engine.plan.vocab_size, self.num < 2)

        def accept(self, token_id):
            self.num += 1

    pieces = []
    with engine.session() as session:
        session.prefill("hello")
        with pytest.raises(ConstraintError, match="allows no token after 2 tokens"):
            pieces.extend(session.generate(max_new_tokens=9, constraint=Two()))
        pieces = list(session.generate(max_new_tokens=1))  # the session is usable again
    assert len(pieces) == 1


@pytest.mark.parametrize("mask", [np.ones(3, np.bool_), np.ones(128), None])
def test_generate_raises_where_a_constraint_returns_no_mask(engine, mask):
    class Wrong:
        def allowed(self):
            return mask

        def accept(self, token_id): ...

    with engine.session() as session:
        session.prefill("hello")
        with pytest.raises(ConstraintError, match=r"return bool of shape \[128\]"):
            list(session.generate(max_new_tokens=2, constraint=Wrong()))


@pytest.mark.parametrize("temperature", [1e30, 1e38, 1e300])
def test_no_temperature_breaks_a_schema(engine, temperature):
    schema = closed({"a": {"enum": ["e", "t"]}}, "a")
    with serving(engine) as (_, url):
        answer = ask(url, schema, temperature=temperature, seed=3).json()["choices"][0]
    assert json.loads(answer["message"]["content"])["a"] in ("e", "t")
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["path", "password", "byte", "int64", "", "x" * 5000])
def test_a_format_that_is_unknown_is_an_annotation(served, name):
    """JSON Schema 2020-12, Validation, 7.2.3: an unknown format must not fail a schema."""
    schema = closed({"a": {"anyOf": [{"type": "string", "maxLength": 3, "format": name}, {"type": "null"}]}}, "a")
    answer = ask(served[1], schema)
    assert answer.status_code == 200
    assert json.loads(answer.json()["choices"][0]["message"]["content"]).keys() == {"a"}


def test_a_format_that_is_known_is_followed(served):
    answer = ask(served[1], {"type": "string", "format": "date"}, temperature=2)
    assert re.fullmatch(r'"\d{4}-\d\d-\d\d"', answer.json()["choices"][0]["message"]["content"])


def test_without_unknown_formats_leaves_names_and_values_as_they_are():
    value = {"format": "path"}
    schema = {
        "properties": {"format": {"type": "string", "format": "path"}, "const": {"format": "path", "items": [value]}},
        "allOf": [{"const": value}, {"enum": [value]}, {"default": value, "examples": [value]}, {"format": "date"}],
        "format": {"type": "string"},
    }
    assert without_unknown_formats(schema, "date".__eq__) == {
        "properties": {"format": {"type": "string"}, "const": {"items": [{}]}},
        "allOf": [{"const": value}, {"enum": [value]}, {"default": value, "examples": [value]}, {"format": "date"}],
        "format": {"type": "string"},
    }


def test_ambiguous_one_of_is_refused_with_advice(served):
    answer = ask(served[1], {"oneOf": [{"type": "integer"}, {"type": "number"}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "response_format: oneOf is supported only if no value can satisfy two of its alternatives; use anyOf"
    )


def test_alternatives_of_a_discriminated_union_are_followed(served):
    """Schema that Pydantic writes for `Field(discriminator="kind")`."""
    kinds = [closed({"kind": {"const": kind, "type": "string"}}, "kind") for kind in ("cat", "dog")]
    pet = {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "discriminator": {"propertyName": "kind"}}
    answer = ask(served[1], {"$defs": dict(zip(("Cat", "Dog"), kinds, strict=True)), **closed({"pet": pet}, "pet")})
    found = json.loads(answer.json()["choices"][0]["message"]["content"])
    assert found in ({"pet": {"kind": "cat"}}, {"pet": {"kind": "dog"}})
