"""Tests that docs/options.md and the documentation of EngineOptions cover all options."""

import importlib.util
import re
from pathlib import Path

import chunkrt

ROOT = Path(__file__).parents[2]


def test_options_page_is_current():
    spec = importlib.util.spec_from_file_location("options_page", ROOT / "docs" / "site" / "options.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == module.page(), "run `make docs`"


def test_engine_options_docstring_explains_every_field():
    explained = re.findall(r"^    (\w+): [A-Z8]", chunkrt.EngineOptions.__doc__, re.MULTILINE)
    assert explained == list(chunkrt.EngineOptions.__dataclass_fields__)
    assert "--" not in chunkrt.EngineOptions.__doc__
