"""Mutators: small random changes of a valid file's content. Each takes a Random."""

from __future__ import annotations

import copy
import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

SIZES = (*(0, 1, 2, 7, 8, 31, 127, 128, 255, 256), *(2**n for n in (15, 16, 31, 32, 53, 61)), 2**31 - 1, 2**63 - 1)
FLOATS = (0.5, -0.0, 1e-300, 1e308, math.nan, math.inf, -math.inf)
NUMBERS = (*SIZES, *(-n for n in SIZES[1:]), 2**63, 10**30, 10**400, *FLOATS)
TEXTS = ("", "a", "0", "T", "../x", "/", "\0", "\n", "é" * 40, "x" * 5000, "\ud800", "__class__", "npu", "float32")


def hostile(random: Random) -> Any:
    """Return a value to replace an expected one."""
    pick = random.randrange(8)
    if pick < 3:
        return random.choice(NUMBERS)
    if pick < 5:
        return random.choice(TEXTS)
    if pick == 5:
        return random.choice([None, True, False, [], {}])
    if pick == 6:
        return [random.choice(NUMBERS)] * random.choice([1, 2, 3, 1000])
    deep: Any = []
    for _ in range(random.choice([2, 50, 5000])):
        deep = [deep] if random.random() < 0.5 else {"a": deep}
    return deep


def mutate_tree(random: Random, tree: Any) -> Any:
    """Return a copy of JSON data with one to three changes."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        places = _places(tree)
        if not places:
            return hostile(random)
        holder, key = random.choice(places)
        action = random.randrange(7)
        if action == 0:
            del holder[key]
        elif action == 1:
            other, other_key = random.choice(places)
            holder[key] = copy.deepcopy(other[other_key])
        elif action == 2 and type(holder[key]) is int:
            holder[key] += random.choice([-1, 1, 31, -holder[key] * 2])
        elif action == 3 and isinstance(holder, dict):
            holder[random.choice([*holder, str(key) + "x"])] = holder.pop(key)
        elif action == 4 and isinstance(holder, list):
            holder.insert(random.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        elif action == 5 and isinstance(holder[key], str):
            holder[key] = str(mutate_bytes(random, holder[key].encode("utf-8", "replace")), "latin-1")
        else:
            holder[key] = hostile(random)
            break  # it may be deeper than can be copied
    return tree


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return every container of a tree with each of its keys."""
    found, pending = [], [tree]
    while pending:
        holder = pending.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            found.append((holder, key))
            pending.append(holder[key])
    return found


def mutate_json(random: Random, text: bytes) -> bytes:
    """Return JSON text with another tree, or, one time in eight, with other bytes."""
    if random.random() < 0.125:
        return mutate_bytes(random, text)
    return dump(mutate_tree(random, json.loads(text)))


def dump(tree: Any) -> bytes:
    """Return JSON text of any depth; values that JSON cannot hold (NaN, lone surrogates) as Python's parser accepts
    them.
    """
    pieces: list[str] = []
    pending: list[Any] = [tree]
    while pending:
        item = pending.pop()
        if isinstance(item, _Raw):
            pieces.append(item.text)
        elif isinstance(item, dict):
            parts: list[Any] = [_Raw("{")]
            for index, (key, value) in enumerate(item.items()):
                parts += [_Raw(("," if index else "") + json.dumps(str(key)) + ":"), value]
            pending += reversed([*parts, _Raw("}")])
        elif isinstance(item, list | tuple):
            parts = [_Raw("[")]
            for index, value in enumerate(item):
                parts += [_Raw("," if index else ""), value]
            pending += reversed([*parts, _Raw("]")])
        else:
            pieces.append(json.dumps(item))
    return "".join(pieces).encode()


class _Raw:
    def __init__(self, text: str) -> None:
        self.text = text


def mutate_bytes(random: Random, content: bytes, end: int | None = None) -> bytes:
    """Return bytes that are flipped, cut, doubled, or replaced by boundary numbers; before `end`, if given."""
    data = bytearray(content)
    for _ in range(random.choice([1, 1, 2, 4])):
        if not data:
            break
        at = random.randrange(min(len(data), end or len(data)))
        length = random.choice([1, 2, 4, 8, 16, 100])
        action = random.randrange(6)
        if action == 0:
            data[at] ^= 1 << random.randrange(8)
        elif action == 1:
            del data[at : at + length]
        elif action == 2:
            data[at:at] = data[at : at + length]
        elif action == 3:
            del data[at:]
        elif action == 4:
            data[at : at + 8] = struct.pack("<Q", random.choice(SIZES))
        else:
            data[at : at + 4] = struct.pack("<I", random.choice(SIZES) & 0xFFFFFFFF)
    return bytes(data)


_TOML_VALUES = (
    "0", "-1", "1", "2.5", "nan", "inf", "-inf", "1e400", "9" * 400, "true", '""', '"x"', "[]", "{}", "[1, 'a']",
    "1979-05-27", "{ a = { b = 1 } }", "[" * 3000 + "]" * 3000, '"' + "y" * 3000 + '"', '"\\u0000"', "'npu'",
)  # fmt: skip


def mutate_toml(random: Random, text: bytes) -> bytes:
    """Return TOML with another value, another key, or its lines in another order."""
    lines = text.decode().splitlines()
    for _ in range(random.choice([1, 1, 2])):
        at = random.randrange(len(lines))
        key, equals, _ = lines[at].partition("=")
        action = random.randrange(6)
        if action == 0:
            del lines[at]
        elif action == 1:
            lines.insert(random.randrange(len(lines)), lines[at])
        elif action == 2:
            return mutate_bytes(random, text)
        elif action == 3 and equals:
            lines[at] = re.sub(r"\w", random.choice(["x", "_", "9"]), key, count=1) + lines[at][len(key) :]
        elif equals:
            lines[at] = f"{key}= {random.choice(_TOML_VALUES)}"
        if not lines:
            return b""
    return "\n".join(lines).encode("utf-8", "replace")


def mutate_archive(random: Random, members: dict[str, bytes]) -> dict[str, bytes]:
    """Return members of a .npz archive, one of which has other bytes, another header or content, or is missing."""
    members = dict(members)
    name = random.choice(list(members))
    action = random.randrange(5)
    if action == 0:
        del members[name]
    elif action == 1:
        members[name] = members[random.choice(list(members))]
    elif action == 2:
        members[random.choice(list(members)) + "x"] = members.pop(name)
    elif action == 3:
        members[name] = mutate_bytes(random, members[name], 130)
    else:
        header_length = 10 + int.from_bytes(members[name][8:10], "little")
        header = members[name][10:header_length].decode("latin-1")
        header = re.sub(r"\d+", lambda m: str(random.choice(SIZES)) if random.random() < 0.5 else m[0], header)
        header = header.replace("f4", random.choice(["f4", "f8", "O", "U9", "V0", "i8", "<c16", "m8"]))
        data = header.encode("latin-1")
        members[name] = members[name][:8] + struct.pack("<H", len(data)) + data + members[name][header_length:]
    return members


def mutate_message(random: Random, message: Any) -> None:
    """Change a protobuf message in place: a field of it, or of one that it holds."""
    fields = message.ListFields()
    if not fields:
        return
    field, value = random.choice(fields)
    is_many = field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
    if field.type == field.TYPE_MESSAGE and random.random() < 0.85:
        mutate_message(random, random.choice(value) if is_many else value)
        return
    if is_many:
        _mutate_many(random, field, value)
    elif random.random() < 0.2:
        message.ClearField(field.name)
    else:
        _try(lambda: setattr(message, field.name, _scalar(random, field, value)))


def _mutate_many(random: Random, field: Any, values: Any) -> None:
    at = random.randrange(len(values))
    action = random.randrange(3)
    if action == 0:
        del values[at]
    elif action == 1:
        extra = copy.deepcopy(values[at])
        values.append(extra)
    elif field.type != field.TYPE_MESSAGE:
        _try(lambda: values.__setitem__(at, _scalar(random, field, values[at])))


def _scalar(random: Random, field: Any, value: Any) -> Any:
    if isinstance(value, bytes):
        return mutate_bytes(random, value)
    if isinstance(value, str):
        return random.choice([*TEXTS[:7], value + "x", value[:-1], "MatMul", "Reshape", "Add", "Loop"])
    return random.choice([*NUMBERS, value + 1, value - 1])


def _try(change: Callable[[], object]) -> None:
    """Set a value; protobuf refuses one that does not fit a field's type."""
    with suppress(TypeError, ValueError, OverflowError):
        change()


def mutate_text(random: Random, text: str, snippets: Sequence[str]) -> str:
    """Return text with snippets inserted, doubled and cut."""
    for _ in range(random.choice([1, 2, 3])):
        at, length = random.randrange(len(text) + 1), random.randrange(40)
        text = random.choice(
            [
                text[:at] + random.choice(snippets) + text[at:],
                text[:at] + text[at + length :],
                text[:at] + text[at - length :],
            ]
        )
    return text


_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def gguf_fields(content: bytes) -> list[tuple[int, int]]:
    """Return the locations of the fields of a GGUF header: offset and size of each number, length and text."""
    fields, at = [(4, 4), (8, 8), (16, 8)], 24

    def number(size: int) -> int:
        nonlocal at
        fields.append((at, size))
        at += size
        return int.from_bytes(content[at - size : at], "little")

    def text() -> None:
        nonlocal at
        length = number(8)
        fields.append((at, length))
        at += length

    def value(kind: int) -> None:
        if kind == 8:
            text()
        elif kind == 9:
            element, count = number(4), number(8)
            for _ in range(count):
                value(element)
        else:
            number(_GGUF_SIZES[kind])

    num_tensors, num_keys = (int.from_bytes(content[start : start + 8], "little") for start in (8, 16))
    for _ in range(num_keys):
        text()
        value(number(4))
    for _ in range(num_tensors):
        text()
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
    return fields


def mutate_gguf(random: Random, content: bytes, fields: Sequence[tuple[int, int]]) -> bytes:
    """Return a GGUF file with changes in one to three fields of its header."""
    data = bytearray(content)
    for _ in range(random.choice([1, 1, 2, 3])):
        at, size = random.choice(fields)
        if size in (1, 2, 4, 8) and random.random() < 0.8:
            old = int.from_bytes(data[at : at + size], "little")
            new = random.choice([*SIZES, old + 1, old - 1, old ^ (1 << random.randrange(8 * size))])
            data[at : at + size] = (new % (1 << (8 * size))).to_bytes(size, "little")
        elif size:
            data[at + random.randrange(size)] = random.randrange(256)
    return mutate_bytes(random, bytes(data)) if random.random() < 0.1 else bytes(data)
