"""Import the package `peers` of bench/ for tests; `tests/bench/conftest.py` adds it to the path."""

import importlib
from pathlib import Path

BENCH = str(Path(__file__).parents[2] / "bench")


def peers(module):
    return importlib.import_module(f"peers.{module}")
