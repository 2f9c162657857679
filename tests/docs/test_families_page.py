"""Tests that docs/families.md shows the current stages of every family."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_families_page_is_current():
    spec = importlib.util.spec_from_file_location("families_page", ROOT / "docs" / "site" / "families.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "families.md").read_text(encoding="utf-8") == module.page(), "run `make docs`"
