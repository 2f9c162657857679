"""Convert tool calls in a model's text to the form of OpenAI's API.

Two formats are supported. The models of Hermes and Qwen write text and then any number of calls of the form
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Llama 3's models answer only `{"name": ..., "parameters":
{...}}`. Text that has neither format, or that names an unknown tool, remains text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any
from uuid import uuid4

from chunkrt.server.errors import RequestError

MARK = "<tool_call>"
_BEGIN = re.compile(r"<tool_call>\s*")
_END = re.compile(r"\s*(?:</tool_call>|\Z)")

Call = dict[str, Any]


def tool_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of tools. Raise RequestError if one is not a function with a name."""
    names = set()
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not name:
            raise RequestError('tools: expected {"type": "function", "function": {"name": ...}}', param="tools")
        names.add(name)
    return frozenset(names)


class CallReader:
    """Splits an answer into text and calls as it arrives.

    Args:
        names: names of the tools.
    """

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._held = ""
        self._has_told = False

    def push(self, text: str) -> str:
        """Add text; return the part that cannot belong to a call."""
        self._held += text
        if not self._has_told and self._held.lstrip()[:1] in ("", "{"):
            return ""
        place = self._held.find(MARK)
        if place < 0:
            lengths = range(min(len(MARK) - 1, len(self._held)), 0, -1)
            place = len(self._held) - next((n for n in lengths if self._held.endswith(MARK[:n])), 0)
        certain, self._held = self._held[:place], self._held[place:]
        if not certain.strip() and not self._has_told:  # spaces before a call are dropped
            self._held = certain + self._held
            return ""
        self._has_told = True
        return certain

    def finish(self) -> tuple[str, list[Call]]:
        """Return the rest of the text, and the calls, at the end of the answer."""
        rest, self._held = self._held, ""
        try:
            text, described = _divide(rest)
            if described:
                return text.strip(), [_call(one, "arguments", self._names) for one in described]
            if not self._has_told:
                return "", [_call(_DECODER.decode(rest), "parameters", self._names)]
        except (ValueError, RecursionError):  # not a call; it stays text
            pass
        return rest, []


def with_arguments_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have arguments as objects, as templates expect, instead of JSON strings.

    Raises:
        RequestError: the arguments are not JSON, or the calls are not a list of functions.
    """
    calls = message.get("tool_calls")
    if calls is None:
        return dict(message)
    if not isinstance(calls, list):
        raise RequestError("messages: tool_calls: expected a list", param="messages")
    return {**message, "tool_calls": [_with_arguments_read(call) for call in calls]}


def _with_arguments_read(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            'messages: malformed call; expected {"function": {"name": ..., "arguments": ...}}', param="messages"
        )
    arguments = function.get("arguments")
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments.strip() or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"messages: the arguments of a call are not JSON: {error}", param="messages") from error
    function = {**function, "arguments": {} if arguments is None else arguments}  # a call without arguments
    return {**{name: value for name, value in call.items() if value is not None}, "function": function}


def _divide(text: str) -> tuple[str, list[Any]]:
    """Split text into the text around marked calls and their decoded JSON.

    A call ends where its JSON ends, because its strings may contain the marks. Raises ValueError if a call is not JSON.
    """
    around, described, place = "", [], 0
    while (begin := _BEGIN.search(text, place)) is not None:
        found, stop = _DECODER.raw_decode(text, begin.end())
        end = _END.match(text, stop)
        if end is None:
            raise ValueError("found text after the JSON of a call")
        around += text[place : begin.start()]
        described.append(found)
        place = end.end()
    return around + text[place:], described


def _call(found: Any, key: str, names: Set[str]) -> Call:
    """Return the call that decoded JSON describes. Raise ValueError if it does not describe a call."""
    name = found.get("name") if isinstance(found, dict) else None
    given = found.get(key) if isinstance(found, dict) else None
    if isinstance(given, str):  # some models write the arguments as JSON in a string
        given = _DECODER.decode(given)
    if not isinstance(name, str) or name not in names or not isinstance(given, dict):
        raise ValueError("the JSON does not describe a call of a known tool")
    arguments = json.dumps(given, ensure_ascii=False)
    arguments.encode()  # a string may contain half a character, which raises ValueError
    return {"id": f"call_{uuid4().hex}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
