"""The conformance suite: what every backend keeps to, plug-ins too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from chunkrt.backends.base import Array, Backend, Executable
from chunkrt.errors import CompileError, PartitionError
from chunkrt.graph.plan import Node, Plan, Subgraph
from chunkrt.quant.scheme import SCHEMES, Scheme
from chunkrt.testing.calls import Call, Recording
from chunkrt.testing.decoder import random_decoder
from chunkrt.testing.exact_linear import exact_linear

CHUNK_LENGTH = 8
START = 5
"""A position at which chunks do not begin by themselves."""
ROUNDS = 16
"""How often two threads are sent in at once."""

FLOAT_TOLERANCE = 16 * 64 * 2.0**-23
HALF_TOLERANCE = 2.0**-10
INT8_TOLERANCE = 1 / 256
LINEAR_TOLERANCE = 4 * 2.0**-23


class ConformanceError(AssertionError):
    """A backend broke a clause of the contract; `clause` is its name, the message says where and how."""

    def __init__(self, backend: str, clause: str, detail: str) -> None:
        super().__init__(f"backend {backend!r} breaks the clause {clause!r}: {detail}")
        self.clause = clause


def check_backend(backend: Backend) -> None:
    """Check that a backend keeps the contract of `chunkrt/backends/base.py`.

    A small Llama decoder with random weights is cut into subgraphs; each that the backend supports, under each
    scheme that it supports, is compiled for chunks of 8 and of 16 rows and compared with the backend `reference`.

    Clauses:
        description: `name` is text, `concurrency` None or at least 1.
        support: at least one subgraph is supported; one that is supported compiles.
        refusal: one that is not is refused by `supports` with a node of it and a reason, and by `compile` with
            PartitionError or CompileError; an operator that nobody has is refused so.
        length: `fixed_length` is None or the chunk length; on rows of logits, where it may be shorter, a divisor of
            it; with state, None.
        rows: any number of rows, 1 to the chunk length, runs (or exactly `fixed_length`); logits of any of them.
        inputs: only caches are written, and of these only the rows at position to position + T - 1.
        outputs: written in full, and nothing beside them.
        values: as the reference has them. With m the largest magnitude of an output: within 16 * 64 * 2^-23 * m,
            for 16 operators whose sums of at most 64 products lose a float32 step a product; 2^-10 * m more where
            caches are float16. With 8-bit linears a value between two int8 steps may fall to either side, so there
            the root mean square of the difference, over all rows of an output, is at most 1/256 of the output's.
        linears: an 8-bit linear of multiples of 1/2 with 127 in every row is exact to 4 * 2^-23 of the sum of its
            products' magnitudes: rounding is half to even, sums of products are exact; a row of zeros gives zeros.
        chunks: 16 rows at once give, within the tolerance of `values`, what twice 8 rows or 1 and 15 do.
        repetition: the same call gives the same bits.
        threads: so do two calls of one executable at once, in two threads.

    Raises:
        ConformanceError: an AssertionError that names the first clause that was broken.
    """
    _Suite(backend).run()


@dataclass(frozen=True, kw_only=True)
class _Compiled:
    """A subgraph under a scheme that the backend compiled, for chunks of one and of two chunk lengths."""

    subgraph: Subgraph
    recording: Recording
    executable: Executable
    of_two_chunks: Executable

    @property
    def cache_dtypes(self) -> Sequence[str]:
        return ("float32", "float16") if self.subgraph.state else ("float32",)

    def calls(self, cache_dtype: str) -> list[Call]:
        """Every number of rows at position 0 and at one within a chunk."""
        fixed = self.executable.fixed_length
        lengths = range(1, CHUNK_LENGTH + 1) if fixed is None else (fixed,)
        calls = []
        for length in lengths:
            if self.subgraph.rows == "R":
                rows = range(CHUNK_LENGTH)[::-1][:length]
                calls.append(self.recording.call(self.subgraph, START, CHUNK_LENGTH, logit_rows=rows))
            else:
                for position in (0, START):
                    calls.append(self.recording.call(self.subgraph, position, length, cache_dtype=cache_dtype))
        return calls


class _Suite:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.schemes = tuple(SCHEMES.values())
        self.decoder = random_decoder(self.schemes)

    def run(self) -> None:
        self._check_description()
        compiled = [c for scheme in self.schemes for c in self._compile_all(scheme)]
        if not compiled:
            self._break("support", f"it supports none of {len(self.decoder.plan.subgraphs)} subgraphs under any scheme")
        for case in compiled:
            self._check_length(case)
            self._check_calls(case)
            self._check_chunks(case)
            self._check_repetition(case)
            self._check_threads(case)
        for scheme in self.schemes:
            if scheme.weight_bits == 8:
                self._check_linears(scheme)

    def _break(self, clause: str, detail: str, cause: BaseException | None = None) -> NoReturn:
        raise ConformanceError(str(getattr(self.backend, "name", "?")), clause, detail) from cause

    def _check_description(self) -> None:
        name, concurrency = self.backend.name, self.backend.concurrency
        if not isinstance(name, str) or not name:
            self._break("description", f"name is {name!r}, expected text")
        if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):
            self._break("description", f"concurrency is {concurrency!r}, expected None or at least 1")

    def _compile_all(self, scheme: Scheme) -> list[_Compiled]:
        plan, weights = self.decoder.plan, self.decoder.weights[scheme.name]
        recording = Recording(plan, scheme, weights, 3 * CHUNK_LENGTH)
        compiled = []
        for subgraph in plan.subgraphs:
            if not self.backend.supports(subgraph, plan, scheme):
                self._check_refusal(subgraph, recording)
                continue
            self._check_refusal(_with_unknown_operator(subgraph), recording)
            try:
                one, two = (
                    self.backend.compile(subgraph, plan, length, scheme, weights)
                    for length in (CHUNK_LENGTH, 2 * CHUNK_LENGTH)
                )
            except Exception as error:
                self._break("support", f"{_where(subgraph, scheme)} is supported, but: {_text(error)}", error)
            compiled.append(_Compiled(subgraph=subgraph, recording=recording, executable=one, of_two_chunks=two))
        return compiled

    def _check_refusal(self, subgraph: Subgraph, recording: Recording) -> None:
        plan, scheme = recording.plan, recording.scheme
        support, where = self.backend.supports(subgraph, plan, scheme), _where(subgraph, scheme)
        unknown = [node.name for node in subgraph.nodes if node.op == UNKNOWN_OPERATOR]
        if support:
            self._break("refusal", f"{where} is said to be supported with an operator that nobody has")
        if support.node not in (unknown or [node.name for node in subgraph.nodes]):
            self._break("refusal", f"{where} is refused for the node {support.node!r}, which is not the one to blame")
        if not support.reason:
            self._break("refusal", f"{where} is refused without a reason")
        try:
            self.backend.compile(subgraph, plan, CHUNK_LENGTH, scheme, recording.weights)
        except (PartitionError, CompileError):
            return
        except Exception as error:
            self._break("refusal", f"{where}: compile raised {_text(error)}, expected PartitionError", error)
        self._break("refusal", f"{where} is refused by supports, and compiled nevertheless")

    def _check_length(self, case: _Compiled) -> None:
        for executable, chunk_length in ((case.executable, CHUNK_LENGTH), (case.of_two_chunks, 2 * CHUNK_LENGTH)):
            fixed, where = executable.fixed_length, _where(case.subgraph, case.recording.scheme)
            if fixed is None:
                continue
            if case.subgraph.state:
                self._break("length", f"{where} keeps state and is fixed to {fixed} rows, so padding reaches the state")
            if case.subgraph.rows == "T" and fixed != chunk_length:
                self._break("length", f"{where} is fixed to {fixed} rows for chunks of {chunk_length}")
            if fixed < 1 or chunk_length % fixed:
                self._break("length", f"{where} is fixed to {fixed} rows, which do not divide {chunk_length}")

    def _check_calls(self, case: _Compiled) -> None:
        reference = case.recording.reference(case.subgraph)
        for cache_dtype in case.cache_dtypes:
            found, expected = case.calls(cache_dtype), case.calls(cache_dtype)
            for call, by_reference in zip(found, expected, strict=True):
                self._run(case, case.executable, call)
                reference.run(by_reference.inputs, by_reference.outputs)
            self._compare("values", case, found, expected, cache_dtype)

    def _run(self, case: _Compiled, executable: Executable, call: Call) -> None:
        """One call, watched: what it may not write, and what it must."""
        where = f"{_where(case.subgraph, case.recording.scheme)}, {call.num_tokens} tokens at {call.position}"
        inputs, guards, old = call.untouchable(), call.guards(), call.old_positions()
        try:
            executable.run(call.inputs, call.outputs)
        except Exception as error:
            self._break("rows", f"{where}: {_text(error)}", error)
        if changed := _first_difference(inputs, call.untouchable()):
            self._break("inputs", f"{where}: the input {changed!r} was written")
        if changed := _first_difference(old, call.old_positions()):
            self._break("inputs", f"{where}: the cache {changed!r} was written outside of the call's own positions")
        if changed := _first_difference(guards, call.guards()):
            self._break("outputs", f"{where}: something was written before or after {changed!r}")
        for name, result in call.results().items():
            if np.isnan(result).any():
                count = np.isnan(result).sum()
                self._break("outputs", f"{where}: {count} of {result.size} values of {name!r} were not written, or NaN")

    def _compare(
        self, clause: str, case: _Compiled, found: Sequence[Call], expected: Sequence[Call], cache_dtype: str
    ) -> None:
        scheme, is_int8 = case.recording.scheme, _has_int8_linears(case)
        for name in expected[0].results():
            x, y = (np.concatenate([_by_row(call.results()[name]) for call in calls]) for calls in (found, expected))
            difference, where = np.abs(x - y), f"{_where(case.subgraph, scheme)}: {name!r}"
            if is_int8:
                allowed = INT8_TOLERANCE * np.sqrt(np.mean(y**2))
                off = float(np.sqrt(np.mean(difference**2)))
            else:
                half = HALF_TOLERANCE if cache_dtype == "float16" else 0
                allowed = (FLOAT_TOLERANCE + half) * np.abs(y).max()
                off = float(difference.max())
            if not off <= allowed:
                kind = "root mean square" if is_int8 else "largest difference"
                self._break(clause, f"{where} is off by {off:.3g} ({kind}), allowed is {allowed:.3g}")

    def _check_chunks(self, case: _Compiled) -> None:
        if case.subgraph.rows == "R":
            return
        for cache_dtype in case.cache_dtypes:
            whole = self._in_parts(case, case.of_two_chunks, [2 * CHUNK_LENGTH], cache_dtype)
            splits = [[CHUNK_LENGTH, CHUNK_LENGTH]]
            if case.of_two_chunks.fixed_length is None:
                splits.append([1, 2 * CHUNK_LENGTH - 1])
            for split in splits:
                executable = case.executable if max(split) <= CHUNK_LENGTH else case.of_two_chunks
                parts = self._in_parts(case, executable, split, cache_dtype)
                self._compare("chunks", case, parts, whole, cache_dtype)

    def _in_parts(
        self, case: _Compiled, executable: Executable, lengths: Sequence[int], cache_dtype: str
    ) -> list[Call]:
        """Consecutive calls, each of which finds the caches as the one before has left them."""
        calls: list[Call] = []
        position = START
        for length in lengths:
            call = case.recording.call(case.subgraph, position, length, cache_dtype=cache_dtype)
            for name, cache in call.caches.items():
                if calls:
                    cache[:, START:position] = calls[-1].caches[name][:, START:position]
            self._run(case, executable, call)
            calls.append(call)
            position += length
        return calls

    def _check_repetition(self, case: _Compiled) -> None:
        for cache_dtype in case.cache_dtypes:
            for first, second in zip(case.calls(cache_dtype), case.calls(cache_dtype), strict=True):
                self._run(case, case.executable, first)
                self._run(case, case.executable, second)
                self._expect_same_bits("repetition", case, first, second)

    def _check_threads(self, case: _Compiled) -> None:
        calls = case.calls("float32")
        pair = (calls[-1], calls[0])
        for call in pair:
            self._run(case, case.executable, call)
        for _ in range(ROUNDS):
            again = [case.calls("float32")[-1], case.calls("float32")[0]]
            for error in _at_once([lambda call=call: self._run(case, case.executable, call) for call in again]):
                self._break("threads", f"{_where(case.subgraph, case.recording.scheme)}: {_text(error)}", error)
            for call, alone in zip(again, pair, strict=True):
                self._expect_same_bits("threads", case, call, alone)

    def _expect_same_bits(self, clause: str, case: _Compiled, first: Call, second: Call) -> None:
        bits = [{name: result.tobytes() for name, result in call.results().items()} for call in (first, second)]
        if changed := _first_difference(*bits):
            self._break(clause, f"{_where(case.subgraph, case.recording.scheme)}: {changed!r} differs")

    def _check_linears(self, scheme: Scheme) -> None:
        for node in _linears(self.decoder.plan):
            weights = self.decoder.weights[scheme.name]
            case = exact_linear(node, self.decoder.plan, scheme, weights, CHUNK_LENGTH)
            if not self.backend.supports(case.subgraph, case.plan, scheme):
                continue
            executable = self.backend.compile(case.subgraph, case.plan, CHUNK_LENGTH, scheme, weights)
            if executable.fixed_length not in (None, CHUNK_LENGTH):
                continue
            found = np.empty_like(case.expected, np.float32)
            executable.run({case.subgraph.inputs[0]: case.values}, {case.subgraph.outputs[0]: found})
            off = np.abs(found - case.expected) > LINEAR_TOLERANCE * case.magnitude
            if off.any():
                row, column = np.argwhere(off)[0]
                self._break(
                    "linears",
                    f"{node.name} under {scheme.name}: row {row}, column {column} is {found[row, column]!r}, "
                    f"expected {case.expected[row, column]!r}",
                )


UNKNOWN_OPERATOR = "OperatorThatNobodyHas"


def _with_unknown_operator(subgraph: Subgraph) -> Subgraph:
    *before, last = subgraph.nodes
    return replace(subgraph, nodes=(*before, replace(last, op=UNKNOWN_OPERATOR, domain="chunkrt.testing")))


def _has_int8_linears(case: _Compiled) -> bool:
    return case.recording.scheme.weight_bits == 8 and any(node.op == "MatMul" for node in case.subgraph.nodes)


def _linears(plan: Plan) -> list[Node]:
    return [node for subgraph in plan.subgraphs for node in subgraph.nodes if node.op == "MatMul"]


def _by_row(result: Array) -> Array:
    """Rows first, float64: outputs are [rows, N], caches [kv_heads, rows, D]."""
    rows_first = result if result.ndim == 2 else result.swapaxes(0, 1)
    return rows_first.astype(np.float64)


def _at_once(actions: Sequence[Callable[[], None]]) -> list[BaseException]:
    """Run actions in threads that start together; what they raised."""
    barrier, errors = threading.Barrier(len(actions)), list[BaseException]()

    def act(action: Callable[[], None]) -> None:
        barrier.wait()
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=act, args=[action]) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def _first_difference(before: dict[str, bytes], after: dict[str, bytes]) -> str | None:
    return next((name for name in before if before[name] != after[name]), None)


def _where(subgraph: Subgraph, scheme: Scheme) -> str:
    return f"subgraph {subgraph.name} under {scheme.name}"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
