"""Remove the formats of strings in JSON schemas that llguidance does not support.

`format` is an annotation unless a schema's dialect says otherwise, so an unknown format must not fail a schema. Source:
JSON Schema 2020-12, Validation, section 7. Schema generators write many such formats: Pydantic writes "path" and
"password", and OpenAPI uses "byte".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are not schemas."""
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values map arbitrary names to schemas; a name may equal a keyword."""


def without_unknown_formats(schema: Any, is_known: Callable[[str], bool]) -> Any:
    """Return a schema without its unknown formats.

    Args:
        schema: decoded JSON; not modified.
        is_known: called for each format.

    Raises:
        RecursionError: the schema is nested too deeply.
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
    """Return a schema, as JSON text, that allows strings of one format."""
    return json.dumps({"type": "string", "format": name})
