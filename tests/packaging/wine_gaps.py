"""pytest plug-in of `make test-windows`: tests that Wine cannot run, with their reasons."""

from fnmatch import fnmatch

import pytest

GAPS: dict[str, str] = {}
"""Reasons by a pattern of the test's name, such as tests/cli/test_serve.py::test_*."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, reason in GAPS.items():
            if fnmatch(item.nodeid, pattern):
                item.add_marker(pytest.mark.skip(reason=f"Wine: {reason}"))
