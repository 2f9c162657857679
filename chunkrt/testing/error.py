"""The error of the conformance suite."""

from __future__ import annotations


class ConformanceError(AssertionError):
    """A backend broke a clause of the contract. `clause` is the name of the clause, and the message reports the
    violation."""

    def __init__(self, backend: str, clause: str, detail: str) -> None:
        super().__init__(f"backend {backend!r} breaks the clause {clause!r}: {detail}")
        self.clause = clause
