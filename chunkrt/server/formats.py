"""Formats of strings in JSON schemas: those that the library does not know are removed.

`format` is an annotation unless a schema's dialect says otherwise, and no schema fails for an unknown one. Source: JSON
Schema 2020-12, Validation, section 7. Generators of schemas write many: Pydantic "path" and "password", OpenAPI "byte".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas."""
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by any names, also by those of keywords."""


def without_unknown_formats(schema: Any, is_known: Callable[[str], bool]) -> Any:
    """Return a schema without its unknown formats.

    Args:
        schema: as JSON has it; not changed.
        is_known: called for each format.

    Raises:
        RecursionError: it is nested too deeply.
    """
    if isinstance(schema, list):
        return [without_unknown_formats(each, is_known) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DATA:
            found[key] = value
        elif key in _BY_NAME and isinstance(value, dict):
            found[key] = {name: without_unknown_formats(each, is_known) for name, each in value.items()}
        elif key != "format" or not isinstance(value, str) or is_known(value):
            found[key] = without_unknown_formats(value, is_known)
    return found


def format_schema(name: str) -> str:
    """Return a schema, as JSON text, of the strings of one format."""
    return json.dumps({"type": "string", "format": name})
