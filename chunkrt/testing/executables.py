"""Clauses about executables: the memory that a call writes, and its values, which must not depend on other calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.base import Array, Executable, HistoryExecutable, SegmentExecutable
from chunkrt.graph.plan import EXPERTS_OP, Subgraph
from chunkrt.graph.static_attention import num_static
from chunkrt.testing.calls import ExecutableCall, PackedCall, Recording


class ConformanceError(AssertionError):
    """A backend broke a clause of the contract. `clause` is the name of the clause, and the message reports the
    violation."""

    def __init__(self, backend: str, clause: str, detail: str) -> None:
        super().__init__(f"backend {backend!r} breaks the clause {clause!r}: {detail}")
        self.clause = clause


Results = dict[str, NDArray[np.float64]]

START = 5
"""A position at which no chunk begins by default."""
ROUNDS = 16
"""Number of concurrent pairs of calls."""

NUM_OPERATORS = 16
"""Approximate number of consecutive operators in a subgraph."""

FLOAT_TOLERANCE = NUM_OPERATORS * 64 * 2.0**-23
HALF_ROUNDING = 2.0**-11
QUANTIZED_TOLERANCE = 1 / 256
COARSE_TOLERANCE = 1 / 64
"""Tolerance of linears with static grids of 8 bits, whose steps are coarse, and of NPUs. The tolerance of both is twice
as large."""


@dataclass(frozen=True, kw_only=True)
class CompiledSubgraph:
    """A subgraph under a recording's scheme, compiled for chunks of `chunk_length` and of twice as many rows."""

    backend: str
    subgraph: Subgraph
    recording: Recording
    chunk_length: int
    executable: Executable
    of_two_chunks: Executable

    @property
    def cache_dtypes(self) -> Sequence[str]:
        """Dtypes that the subgraph's caches may have."""
        return ("float32", "float16") if self.shortest_and_longest()[0].caches else ("float32",)

    @property
    def has_quantized_linears(self) -> bool:
        """True if linears or experts quantise values."""
        has_products = any(node.op in ("MatMul", EXPERTS_OP) for node in self.subgraph.nodes)
        return self.recording.scheme.weight_bits is not None and has_products

    @property
    def quantized_tolerance(self) -> float:
        """Largest root mean square error, relative to the output's, if values are quantised."""
        scheme = self.recording.scheme
        linears = [node.inputs[1] for node in self.subgraph.nodes if node.op == "MatMul"]
        has_coarse_grids = scheme.is_static and any(scheme.activation_bits_of(name) == 8 for name in linears)
        num_reasons = has_coarse_grids + self.is_in_float16
        return num_reasons * COARSE_TOLERANCE if num_reasons else QUANTIZED_TOLERANCE

    def float_tolerance(self, cache_dtype: str) -> float:
        """Return the largest error, relative to the largest value, if values are not quantised."""
        num_half = 2 * (cache_dtype == "float16") + NUM_OPERATORS * self.is_in_float16
        return FLOAT_TOLERANCE + num_half * HALF_ROUNDING

    @property
    def has_rings(self) -> bool:
        """True if all caches of the subgraph have a window."""
        return any("W" in self.recording.plan.tensors[name].shape for name in self.subgraph.state)

    @property
    def is_in_float16(self) -> bool:
        """True for an NPU, which computes in float16 between linears; a fixed length or static attention indicates an
        NPU."""
        return self.executable.fixed_length is not None or num_static(self.subgraph) > 0

    def calls(self, cache_dtype: str = "float32") -> list[ExecutableCall]:
        """Return calls with every supported number of rows, the fewest rows first. Tokens are at position 0, at a
        position within a chunk, and where a ring buffer wraps.
        """
        return [make() for make in self._makers(cache_dtype)]

    def shortest_and_longest(self) -> list[ExecutableCall]:
        """Return the first and the last of `calls`."""
        makers = self._makers("float32")
        return [makers[0](), makers[-1]()]

    def _makers(self, cache_dtype: str) -> list[Callable[[], ExecutableCall]]:
        fixed = self.executable.fixed_length
        lengths = range(1, self.chunk_length + 1) if fixed is None else (fixed,)
        call = partial(self.recording.call, self.subgraph)
        if self.subgraph.rows == "T":
            places = [0, START]
            if self.has_rings:
                places.append(self.recording.ring - self.chunk_length // 2)
            return [partial(call, at, length, cache_dtype=cache_dtype) for length in lengths for at in places]
        last_first = range(self.chunk_length)[::-1]
        makers: list[Callable[[], ExecutableCall]] = [
            partial(call, START, self.chunk_length, logit_rows=last_first[:length]) for length in lengths
        ]
        if fixed is None:
            makers += [partial(call, 0, length, logit_rows=[length - 1]) for length in lengths]
        return makers

    def fail(self, clause: str, detail: str, cause: BaseException | None = None) -> NoReturn:
        """Raise ConformanceError for a clause that this subgraph breaks."""
        where = f"subgraph {self.subgraph.name} under {self.recording.scheme.name}"
        raise ConformanceError(self.backend, clause, f"{where}: {detail}") from cause


def check_values(subgraph: CompiledSubgraph) -> None:
    """Check the clauses length, rows, inputs, outputs and values; see `check_backend`."""
    _check_length(subgraph, subgraph.executable.fixed_length, subgraph.chunk_length)
    _check_length(subgraph, subgraph.of_two_chunks.fixed_length, 2 * subgraph.chunk_length)
    for cache_dtype in subgraph.cache_dtypes:
        _check_values(subgraph, cache_dtype)


def _check_length(subgraph: CompiledSubgraph, fixed: int | None, chunk_length: int) -> None:
    if fixed is None:
        return
    if subgraph.subgraph.all_state:
        subgraph.fail("length", f"it keeps state and always takes {fixed} rows, so padding changes the state")
    if subgraph.subgraph.rows == "T" and fixed != chunk_length:
        subgraph.fail("length", f"it always takes {fixed} rows, and was compiled for chunks of {chunk_length}")
    if fixed < 1 or chunk_length % fixed:
        subgraph.fail("length", f"it always takes {fixed} rows of logits, which do not divide {chunk_length}")


def _check_values(subgraph: CompiledSubgraph, cache_dtype: str) -> None:
    found, expected = subgraph.calls(cache_dtype), subgraph.calls(cache_dtype)
    reference = subgraph.recording.reference(subgraph.subgraph)
    for call, by_reference in zip(found, expected, strict=True):
        _run(subgraph, subgraph.executable, call)
        reference.run(by_reference.inputs, by_reference.outputs)
    _compare("values", subgraph, _all_results(found), _all_results(expected), cache_dtype)


def check_chunks(subgraph: CompiledSubgraph) -> None:
    """Check the clause chunks."""
    for cache_dtype in () if subgraph.subgraph.rows == "R" else subgraph.cache_dtypes:
        _check_chunks(subgraph, cache_dtype)


def _check_chunks(subgraph: CompiledSubgraph, cache_dtype: str) -> None:
    length = subgraph.chunk_length
    whole = _stream_results(_in_parts(subgraph, [2 * length], cache_dtype))
    splits = [[length, length]]
    if subgraph.of_two_chunks.fixed_length is None:
        splits.append([1, 2 * length - 1])
    for split in splits:
        parts = _stream_results(_in_parts(subgraph, split, cache_dtype))
        _compare("chunks", subgraph, parts, whole, cache_dtype)


def check_segments(subgraph: CompiledSubgraph) -> None:
    """Check the clause segments."""
    executable = subgraph.of_two_chunks
    if not subgraph.subgraph.all_state or not isinstance(executable, SegmentExecutable):
        return
    for cache_dtype in subgraph.cache_dtypes:
        alone, packed = _sequences(subgraph, cache_dtype), _sequences(subgraph, cache_dtype)
        for call in alone:
            _run(subgraph, executable, call)
        chunk = subgraph.recording.pack(packed)
        _watch(subgraph, "segments", chunk, partial(chunk.run, executable))
        for found, expected in zip(packed, alone, strict=True):
            _compare("segments", subgraph, _all_results([found]), _all_results([expected]), cache_dtype)


def _sequences(subgraph: CompiledSubgraph, cache_dtype: str) -> list[ExecutableCall]:
    """Return rows of up to three sequences that fill two chunks together; a ring buffer of the last sequence wraps."""
    recording, length = subgraph.recording, subgraph.chunk_length
    last = recording.ring - length // 2 if subgraph.has_rings else START + 1
    places = [(START, max(2 * length - 4, 1)), (0, 1), (last, min(3, length))][: 2 * length]
    return [recording.call(subgraph.subgraph, *place, cache_dtype=cache_dtype) for place in places]


def check_history(subgraph: CompiledSubgraph) -> None:
    """Check the clause history."""
    executable, lengths = subgraph.executable, [subgraph.chunk_length, 1, 2]
    if not isinstance(executable, HistoryExecutable):
        return
    one, other = (_After(executable, history) for history in (1, 2))
    for cache_dtype in subgraph.cache_dtypes:
        expected = _in_parts(subgraph, lengths, cache_dtype)
        between = _in_parts(subgraph, [2], cache_dtype, past=0.5)
        found = _in_parts(subgraph, lengths, cache_dtype, one)
        found += _in_parts(subgraph, [2], cache_dtype, other, past=0.5)
        found += _in_parts(subgraph, lengths, cache_dtype, one)
        for call, same in zip(found, expected + between + expected, strict=True):
            _expect_same_bits("history", subgraph, call, same)


def _in_parts(
    subgraph: CompiledSubgraph,
    lengths: Sequence[int],
    cache_dtype: str,
    executable: Executable | None = None,
    *,
    past: float = 1,
) -> list[ExecutableCall]:
    """Run consecutive calls, each on the state after the previous call. The first state is multiplied by `past`."""
    if executable is None:
        executable = subgraph.executable if max(lengths) <= subgraph.chunk_length else subgraph.of_two_chunks
    calls: list[ExecutableCall] = []
    position = START
    for length in lengths:
        call = subgraph.recording.call(subgraph.subgraph, position, length, cache_dtype=cache_dtype)
        for name, state in call.states.items():
            state[...] = calls[-1].states[name] if calls else state * past
        _run(subgraph, executable, call)
        calls.append(call)
        position += length
    return calls


class _After:
    """An executable whose calls all belong to one history."""

    def __init__(self, executable: HistoryExecutable, history: int) -> None:
        self.fixed_length, self._executable, self._history = executable.fixed_length, executable, history

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """See `Executable.run`."""
        self._executable.run_after(inputs, outputs, self._history)


def check_repetition(subgraph: CompiledSubgraph) -> None:
    """Check the clause repetition."""
    for first, second in zip(subgraph.calls(), subgraph.calls(), strict=True):
        _run(subgraph, subgraph.executable, first)
        _run(subgraph, subgraph.executable, second)
        _expect_same_bits("repetition", subgraph, first, second)


def check_threads(subgraph: CompiledSubgraph) -> None:
    """Check the clause threads."""
    alone = subgraph.shortest_and_longest()
    for call in alone:
        _run(subgraph, subgraph.executable, call)
    rounds = [subgraph.shortest_and_longest() for _ in range(ROUNDS)]
    for error in _at_once(partial(_run, subgraph, subgraph.executable), rounds):
        subgraph.fail("threads", f"two calls at once: {error}", error)
    for together in rounds:
        for call, expected in zip(together, alone, strict=True):
            _expect_same_bits("threads", subgraph, call, expected)


def _run(subgraph: CompiledSubgraph, executable: Executable, call: ExecutableCall) -> None:
    _watch(subgraph, "rows", call, partial(call.run, executable))


def _watch(subgraph: CompiledSubgraph, clause: str, call: ExecutableCall | PackedCall, act: Callable[[], None]) -> None:
    """Run one call and check its writes. `clause` is the clause that is broken if the call raises."""
    where = str(call)
    inputs, guards, other_positions = call.input_bits(), call.guard_bits(), call.other_position_bits()
    try:
        act()
    except Exception as error:
        subgraph.fail(clause, f"{where}: {error!r}", error)
    if changed := _first_difference(inputs, call.input_bits()):
        subgraph.fail("inputs", f"{where}: the input {changed!r} was written")
    if changed := _first_difference(other_positions, call.other_position_bits()):
        subgraph.fail("inputs", f"{where}: the cache {changed!r} was written at positions of other calls")
    if changed := _first_difference(guards, call.guard_bits()):
        subgraph.fail("outputs", f"{where}: something was written before or after {changed!r}")
    for name, result in call.results().items():
        if count := np.isnan(result).sum():
            subgraph.fail("outputs", f"{where}: {count} of {result.size} values of {name!r} are unwritten, or NaN")


def _compare(clause: str, subgraph: CompiledSubgraph, found: Results, expected: Results, cache_dtype: str) -> None:
    for name, y in expected.items():
        difference = np.abs(found[name] - y)
        if subgraph.has_quantized_linears:
            kind, off = "in root mean square", np.sqrt(np.mean(difference**2))
            allowed = subgraph.quantized_tolerance * np.sqrt(np.mean(y**2))
        else:
            kind, off = "at most", difference.max()
            allowed = subgraph.float_tolerance(cache_dtype) * np.abs(y).max()
        if off > allowed:
            subgraph.fail(clause, f"{name!r} is off by {off:.3g} {kind}; the tolerance is {allowed:.3g}")


def _expect_same_bits(clause: str, subgraph: CompiledSubgraph, first: ExecutableCall, second: ExecutableCall) -> None:
    if changed := _first_difference(first.result_bits(), second.result_bits()):
        subgraph.fail(clause, f"{changed!r} differs in bits from an earlier call with the same inputs")


def _all_results(calls: Sequence[ExecutableCall]) -> Results:
    """Join the results of independent calls."""
    return {name: np.concatenate([_by_row(call.results()[name]) for call in calls]) for name in calls[0].results()}


def _stream_results(calls: Sequence[ExecutableCall]) -> Results:
    """Join the results of consecutive calls: the rows of all calls, and the state without rows of the last call."""
    recurrent = calls[0].states.keys() - calls[0].caches
    return _all_results(calls) | {name: _by_row(calls[-1].results()[name]) for name in recurrent}


def _by_row(result: Array) -> NDArray[np.float64]:
    """Return an array with its rows first. Outputs are [rows, N], caches are [kv_heads, rows, D], and other state may
    have any axes."""
    return (result if result.ndim == 2 else result.swapaxes(0, 1)).astype(np.float64)


def _at_once(act: Callable[[ExecutableCall], None], rounds: Sequence[Sequence[ExecutableCall]]) -> list[BaseException]:
    """Run each call of a round in a separate thread; all threads start every round together. Return their errors; the
    first error ends all threads.
    """
    barrier, errors = threading.Barrier(len(rounds[0])), list[BaseException]()

    def work(calls: Sequence[ExecutableCall]) -> None:
        try:
            for call in calls:
                barrier.wait()
                act(call)
        except threading.BrokenBarrierError:
            return
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=[calls]) for calls in zip(*rounds, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def _first_difference(before: dict[str, bytes], after: dict[str, bytes]) -> str | None:
    return next((name for name in before if before[name] != after[name]), None)
