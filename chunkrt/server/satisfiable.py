"""Detection of JSON schemas that no finite value satisfies, because each value would have to contain another one.

A value of `{"$ref": "#/$defs/A"}` needs a value of A, a schema with `required` needs a value of each required property,
a schema with `minItems` needs values of its first items, and so on. The schemas that have values are the least fixpoint
of these rules. Keywords without a rule count as satisfiable, so some unsatisfiable schemas are not detected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

MOST_ROUNDS = 8
"""Maximum number of rounds of the fixpoint iteration over all reachable schemas. Without recursion, one round suffices.
If this number does not suffice, the result is undecided.
"""


def allows_nothing(root: Any) -> bool:
    """Return True if it is certain that no value satisfies a schema."""
    nodes = _in_reach(root)
    satisfiable: set[int] = set()
    for _ in range(MOST_ROUNDS):
        before = len(satisfiable)
        for key, node in nodes.items():
            if key not in satisfiable and _has_value(node, root, satisfiable):
                satisfiable.add(key)
        if id(root) in satisfiable:
            return False
        if len(satisfiable) == before:
            return True
    return False


def _in_reach(root: Any) -> dict[int, Any]:
    """Return the schemas that a schema depends on by their identities, dependencies first."""
    seen: dict[int, Any] = {}
    ended: dict[int, Any] = {}
    path: list[tuple[Any, Iterator[Any]]] = []

    def enter(node: Any) -> None:
        if id(node) not in seen:
            seen[id(node)] = node
            path.append((node, _leads_to(node, root)))

    enter(root)
    while path:
        node, rest = path[-1]
        following = next(rest, None)
        if following is not None:
            enter(following)
        else:
            ended[id(node)] = node
            path.pop()
    return ended


def _leads_to(node: Any, root: Any) -> Iterator[Any]:
    for all_of, any_of in _needs(node, root):
        yield from all_of
        yield from any_of


def _has_value(node: Any, root: Any, satisfiable: set[int]) -> bool:
    """Return True if all conditions of a schema are known to be satisfiable."""
    return node is not False and all(
        all(id(one) in satisfiable for one in all_of) and (not any_of or any(id(one) in satisfiable for one in any_of))
        for all_of, any_of in _needs(node, root)
    )


def _needs(node: Any, root: Any) -> Iterator[tuple[Sequence[Any], Sequence[Any]]]:
    """Yield conditions of a schema: groups of schemas that all need a value, or of which at least one needs a value."""
    if not isinstance(node, dict) or (node is not root and "$id" in node):  # `$id` changes the meaning of `$ref`
        return
    if "$ref" in node:  # before draft 2019-09 the other keywords are ignored
        target = _resolve(node["$ref"], root)
        if target is not None:
            yield (target,), ()
        return
    yield _schemas(node.get("allOf")), ()
    for name in ("anyOf", "oneOf"):
        yield (), _schemas(node.get(name))
    if node.get("type") in ("object", ["object"]):
        properties = node.get("properties")
        required = node.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            yield [properties[name] for name in required if isinstance(name, str) and name in properties], ()
    if node.get("type") in ("array", ["array"]):
        yield _first_items(node), ()


def _first_items(node: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of the items that an array must have."""
    number = node.get("minItems")
    if not isinstance(number, int | float) or number < 1:
        return []
    prefix = node.get("prefixItems")
    first = list(prefix[: int(number)]) if isinstance(prefix, list) else []
    if number > len(first) and isinstance(node.get("items"), dict | bool):
        first.append(node["items"])
    return first


def _schemas(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolve(reference: Any, root: Any) -> Any:
    """Return the schema that a reference of the form `#/...` names; None for other forms and unknown names."""
    if reference == "#":
        return root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    node = root
    for part in unquote(reference[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node and (node is root or "$id" not in node):
            node = node[name]
        else:
            return None
    return node
