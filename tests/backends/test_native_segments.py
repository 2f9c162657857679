"""Rows of several sequences in one native call: bit for bit the same as each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from fixture_checkpoints import NAMES, checkpoint

import chunkrt
from chunkrt.backends.base import SegmentExecutable, SegmentOperands
from chunkrt.backends.native.backend import NativeBackend
from chunkrt.errors import BackendError
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.graph.rewrites import merged_on_cpu
from chunkrt.testing.calls import ExecutableCall, Recording

NUM_TOKENS, MOST_ROWS = 100, 40
CUTS = ([(0, 1), (70, 1), (33, 1), (5, 1), (70, 1)], [(40, 21), (7, 1), (0, 9), (66, 5)], [(9, 40)])
"""First positions and numbers of rows of sequences that share a chunk."""


@pytest.fixture(scope="module", autouse=True)
def engines():
    """Keep loaded engines open while their weights are used."""
    with ExitStack() as stack:
        load.stack = stack
        yield
    load.cache_clear()


@cache
def load(name: str) -> Any:
    return load.stack.enter_context(chunkrt.load(checkpoint(name), npu="native", scheme="w8a8-dynamic", threads=1))


@cache
def recording(name: str, is_merged: bool = False, *, has_raw_keys: bool = False) -> Recording:
    engine = load(name)
    plan = merged_on_cpu(engine.plan) if is_merged else engine.plan
    plan = plan.with_raw_keys() if has_raw_keys else plan
    return Recording(plan, engine.scheme, engine.loaded.weights, min(NUM_TOKENS, plan.context_length), MOST_ROWS)


def with_state(plan: Plan) -> list[Subgraph]:
    """Return one subgraph of each kind: those with equal nodes, shapes and windows behave the same."""
    kinds = {}
    for subgraph in plan.subgraphs:
        if subgraph.state:
            nodes = [(node.op, str(node.attributes)) for node in subgraph.nodes]
            kinds[str((nodes, [plan.tensors[n].shape for n in subgraph.state]))] = subgraph
    return list(kinds.values())


def compiled(of: Recording, subgraph: Subgraph, threads: int) -> SegmentExecutable:
    executable = NativeBackend(threads).compile(subgraph, of.plan, 4 * MOST_ROWS, of.scheme, of.weights)
    assert isinstance(executable, SegmentExecutable)
    return executable


def sequences(of: Recording, subgraph: Subgraph, cut: Sequence[tuple[int, int]]) -> list[ExecutableCall]:
    """Make one call for each sequence, with its own state; the types of caches alternate."""
    most = min(NUM_TOKENS, of.plan.context_length)
    return [
        of.call(subgraph, at % most, min(rows, most - at % most), cache_dtype=("float32", "float16")[i % 2])
        for i, (at, rows) in enumerate(cut)
    ]


def assert_same(found: ExecutableCall, expected: ExecutableCall, where: str) -> None:
    for name, bits in expected.result_bits().items():
        assert found.result_bits()[name] == bits, f"{where}: {name}"
    assert found.other_position_bits() == expected.other_position_bits()


def check_together(of: Recording, subgraph: Subgraph, cut: Sequence[tuple[int, int]], threads: int = 2) -> None:
    executable = compiled(of, subgraph, threads)
    alone, packed = sequences(of, subgraph, cut), sequences(of, subgraph, cut)
    for call in alone:
        call.run(executable)
    chunk = of.pack(packed)
    guards = chunk.guard_bits()
    chunk.run(executable)
    assert chunk.guard_bits() == guards
    for found, expected in zip(packed, alone, strict=True):
        assert np.isfinite(np.concatenate([output.ravel() for output in expected.outputs.values()])).all()
        assert_same(found, expected, f"{subgraph.name}, {expected}, among {cut}")


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("name", NAMES)
def test_every_family(name: str) -> None:
    of = recording(name)
    for subgraph in with_state(of.plan):
        for cut in CUTS:
            check_together(of, subgraph, cut)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(
    "name",
    [
        "llama_gqa",
        "gemma3_window_5",
        "lfm2",
        "qwen3_next_experts",
        "qwen3_next",
        "mamba2",
        "falcon_h1",
        "granite_hybrid_mamba_experts",
    ],
)
def test_merged_subgraphs(name: str, threads: int) -> None:
    of = recording(name, is_merged=True)
    (layers,) = with_state(of.plan)
    assert len(layers.nodes) > 20
    for cut in CUTS:
        check_together(of, layers, cut, threads)


def test_raw_keys() -> None:
    of = recording("llama_gqa", has_raw_keys=True)
    (attention,) = with_state(of.plan)
    assert any(node.op == "RawKeyAttention" for node in attention.nodes)
    for cut in CUTS:
        check_together(of, attention, cut)


def test_int8_caches_and_separate_capacities() -> None:
    of = recording("llama_gqa")
    (attention,) = with_state(of.plan)

    def with_int8(capacity: int) -> ExecutableCall:
        call = of.call(attention, 0, 5)
        states = {n: np.zeros((len(s), capacity, s.shape[2] + 4), np.int8) for n, s in call.states.items()}
        return replace(call, inputs={**call.inputs, **states}, states=states)

    executable = compiled(of, attention, 2)
    alone, packed = [with_int8(5), with_int8(77)], [with_int8(5), with_int8(77)]
    for call in alone:
        call.run(executable)
    of.pack([*packed, *sequences(of, attention, [(9, 3)])]).run(executable)
    for found, expected in zip(packed, alone, strict=True):
        assert_same(found, expected, str(found.states))


def three(of: Recording, subgraph: Subgraph) -> list[ExecutableCall]:
    return sequences(of, subgraph, [(4, 3), (70, 1), (0, 2)])


def change(segments: list[SegmentOperands], index: int, **arrays: Any) -> None:
    segments[index] = segments[index]._replace(inputs={**segments[index].inputs, **arrays})


CHANGES = {
    "segment 1: input 'position': 1 rows from 9999 on do not fit": lambda s: change(s, 1, position=np.array([9999])),
    "segment 2: input 'position': 2 rows from -1 on do not fit": lambda s: change(s, 2, position=np.array([-1])),
    r"segment 0: input 'position': expected int64 \[1\], got int32 \[1\]": lambda s: change(
        s, 0, position=np.zeros(1, np.int32)
    ),
    "the segments have 4 rows together, the chunk has 6": lambda s: s.pop(),
    "expected at least 1 segment, got 0": lambda s: s.clear(),
    "segment 1: expected at least 1 row, got 0": lambda s: s.__setitem__(1, s[1]._replace(num_rows=0)),
    "segments 0 and 2 share the memory of": lambda s: change(s, 2, **s[0].inputs),
    "no array was passed for 'position'": lambda s: s.__setitem__(1, s[1]._replace(inputs={})),
}


@pytest.mark.parametrize("message", CHANGES)
def test_invalid_segment_is_a_backend_error_and_nothing_is_written(message: str) -> None:
    of = recording("llama_gqa")
    (attention,) = with_state(of.plan)
    calls = three(of, attention)
    chunk = of.pack(calls)
    segments = chunk.segments
    CHANGES[message](segments)
    before = [{name: state.tobytes() for name, state in call.states.items()} for call in calls]
    with pytest.raises(BackendError, match=rf"^native, {attention.name}: .*{message}"):
        compiled(of, attention, 2).run_segments(chunk.inputs, chunk.outputs, segments)
    assert before == [{name: state.tobytes() for name, state in call.states.items()} for call in calls]
    assert all(np.isnan(buffer).all() for buffer in chunk.buffers.values())


def test_chunk_inputs_are_checked_too() -> None:
    of = recording("llama_gqa")
    (attention,) = with_state(of.plan)
    chunk = of.pack(three(of, attention))
    too_wide = {name: np.concatenate([rows, rows], axis=1) for name, rows in chunk.inputs.items()}
    executable = compiled(of, attention, 2)
    with pytest.raises(BackendError, match=r"expected float32 \[T, "):
        executable.run_segments(too_wide, chunk.outputs, chunk.segments)
    with pytest.raises(BackendError, match="no array was passed for"):
        executable.run_segments({}, chunk.outputs, chunk.segments)
