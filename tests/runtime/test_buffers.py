"""Chunk buffers: alignment, sharing by liveness, views and padding."""

from __future__ import annotations

import mmap
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_backend import CONTEXT, VOCABULARY, WIDTH, make_plan, subgraph, value
from hypothesis import given
from hypothesis import strategies as st

from chunkrt.errors import ModelError
from chunkrt.graph.plan import Plan, Tensor
from chunkrt.runtime.buffers import BufferLayout, ChunkBuffers, aligned_zeros
from chunkrt.runtime.request import Logits, Request, Segment
from chunkrt.runtime.state import State

CHUNK = 8
ROWS_BYTES = CHUNK * WIDTH * 4


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=3), dtype=st.sampled_from(["float16", "int64"]))
def test_allocations_are_aligned_and_zero(shape: list[int], dtype: str) -> None:
    array = aligned_zeros(tuple(shape), dtype)
    assert array.ctypes.data % 64 == 0 or array.size == 0
    assert array.shape == tuple(shape)
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    assert not array.any()


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_reused_memory_is_committed_only_where_it_is_written() -> None:
    """Arrays of a cache's size, as sessions are opened and closed."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * mmap.PAGESIZE

    def make() -> list[Any]:
        return [aligned_zeros((3 * 2**20,), np.uint8) for _ in range(64)]

    larger = np.ones(16 * 2**20, np.uint8)
    del larger  # from now on glibc reuses smaller blocks itself
    before = resident()
    for _ in range(3):
        arrays = make()
        for array in arrays:
            array[:4096] = 1
        assert resident() - before < 64 * 2**20 / 4
        for array in arrays[::2]:
            array[:] = 1
        del array, arrays
    assert resident() - before < 64 * 2**20 / 4


def alive_at_once(plan: Plan) -> set[frozenset[str]]:
    """Return the pairs of values that may be alive at the same time in some order of the graph.

    Walk over all sets of ended subgraphs and possible next ones. A value is alive from the start of the subgraph that
    writes it (graph inputs: always) until its readers have ended.
    """
    parts = plan.subgraphs
    writers = {name: i for i, part in enumerate(parts) for name in part.outputs}
    users = {name: {i for i, p in enumerate(parts) if name in (*p.inputs, *p.outputs)} for name in plan.tensors}
    pairs: set[frozenset[str]] = set()
    seen: set[tuple[frozenset[int], frozenset[int]]] = set()
    moments = [(frozenset[int](), frozenset[int]())]
    while moments:
        ended, running = moments.pop()
        if (ended, running) in seen:
            continue
        seen.add((ended, running))
        started = ended | running
        alive = [n for n, by in users.items() if by - ended and (n in plan.inputs or writers.get(n, -1) in started)]
        pairs |= {frozenset(pair) for pair in combinations(alive, 2)}
        moments += [(ended | {i}, running - {i}) for i in running]
        for i, part in enumerate(parts):
            if i not in started and all(name in plan.inputs or writers[name] in ended for name in part.inputs):
                moments.append((ended, running | {i}))
    return pairs


def check_sharing(plan: Plan) -> None:
    layout = BufferLayout(plan, CHUNK)
    for one, other in map(sorted, alive_at_once(plan)):
        if plan.output not in (one, other):
            shared = layout.buffer_of[one] == layout.buffer_of[other]
            assert not shared, f"{one} and {other} share a buffer while both live"


@pytest.mark.parametrize("shadowed", [0, 1, 3])
@pytest.mark.parametrize("layers", [1, 2, 30])
def test_values_alive_at_the_same_time_never_share_memory(layers: int, shadowed: int) -> None:
    check_sharing(make_plan(layers, shadowed=shadowed))


@given(data=st.data())
def test_values_alive_at_the_same_time_never_share_memory_in_any_graph(data: st.DataObject) -> None:
    """Up to 6 subgraphs that read anything before them, or graph inputs; each writes one or two values."""
    plan = make_plan(1)
    known = ["input_ids", "position"]
    parts = []
    for i in range(data.draw(st.integers(1, 6))):
        inputs = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
        outputs = [f"{i}.{k}" for k in range(data.draw(st.integers(1, 2)))]
        parts.append(subgraph(str(i), "cpu", inputs, outputs))
        known += outputs
    values = {name: value(name) for name in known[2:]}
    check_sharing(replace(plan, subgraphs=tuple(parts), tensors={**plan.tensors, **values}))


def test_memory_does_not_grow_with_the_layers() -> None:
    small, large = (BufferLayout(make_plan(layers), CHUNK) for layers in (3, 30))
    assert small.num_bytes == large.num_bytes
    graph_inputs = 3 * CHUNK * 8  # tokens, rows of logits, a position for each segment
    most_alive_at_once = 4
    assert small.num_bytes == graph_inputs + most_alive_at_once * ROWS_BYTES
    small, large = (BufferLayout(make_plan(layers, shadowed=layers), CHUNK) for layers in (3, 30))
    assert small.num_bytes == large.num_bytes == graph_inputs + (most_alive_at_once + 1) * ROWS_BYTES


def test_logits_have_no_buffer() -> None:
    layout = BufferLayout(make_plan(), CHUNK)
    assert "logits" not in layout.buffer_of


def test_views_cut_rows_and_leave_each_segment_its_position() -> None:
    plan = make_plan()
    buffers = ChunkBuffers(BufferLayout(plan, CHUNK))
    buffers.load([segment([7, 8, 9], 40), segment([4, 5], 2, logits="all"), segment([6], 9, logits="none")])
    names = ["input_ids", "position", "logit_rows"]
    views = [buffers.views(names, slice(6), slice(3), segment=i) for i in range(3)]
    for view, position in zip(views, ([40], [2], [9]), strict=True):
        assert {name: array.tolist() for name, array in view.items()} == {
            "input_ids": [7, 8, 9, 4, 5, 6],
            "position": position,
            "logit_rows": [2, 3, 4],
        }
    assert buffers.views(["qkv.0"], slice(3))["qkv.0"].shape == (3, WIDTH)


def segment(token_ids: list[int], position: int, logits: Logits = "last") -> Segment:
    """Return all tokens of a run as a segment."""
    state = State(make_plan(), CONTEXT)
    state.advance(position)
    request = Request(np.array(token_ids, np.int64), state, logits=logits)
    request.begin(state.plan, 1)
    return request.take(CHUNK)


def test_small_room_for_shared_logits_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = ChunkBuffers(BufferLayout(make_plan(), CHUNK))
    monkeypatch.setattr("chunkrt.runtime.buffers.KEPT_LOGIT_BYTES", 2 * 4 * VOCABULARY)
    kept = buffers.logits(2)
    assert np.shares_memory(kept, buffers.logits(1))
    large = buffers.logits(3)
    assert large.shape == (3, VOCABULARY)
    assert not np.shares_memory(large, buffers.logits(3))
    assert np.shares_memory(kept, buffers.logits(2))


def test_clear_padding_keeps_tokens_and_the_position() -> None:
    plan = make_plan()
    buffers = ChunkBuffers(BufferLayout(plan, CHUNK))
    whole = buffers.views(["qkv.0", "position"], slice(CHUNK))
    whole["qkv.0"][:] = 1
    whole["position"][:] = 40
    buffers.clear_padding(["qkv.0", "position"], 3)
    assert whole["qkv.0"].sum(axis=1).tolist() == [4, 4, 4, 0, 0, 0, 0, 0]
    assert whole["position"].tolist() == [40]


def test_slots_do_not_share_memory() -> None:
    layout = BufferLayout(make_plan(), CHUNK)
    one, other = ChunkBuffers(layout), ChunkBuffers(layout)
    names = list(layout.buffer_of)
    for name in names:
        for other_name in names:
            views = one.views([name], slice(CHUNK)), other.views([other_name], slice(CHUNK))
            assert not np.shares_memory(views[0][name], views[1][other_name])


def changed(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, **changes)


def test_layout_rejects_a_value_read_before_it_is_written() -> None:
    plan = make_plan()
    with pytest.raises(ModelError, match=r"static\.0 reads 'hidden\.embedding' before"):
        BufferLayout(changed(plan, subgraphs=plan.subgraphs[1:]), CHUNK)


def test_layout_rejects_a_value_without_rows() -> None:
    plan = make_plan()
    odd = Tensor(name="qkv.0", dtype="float32", shape=(WIDTH, "T"))
    with pytest.raises(ModelError, match=r"'qkv\.0' has shape \(4, 'T'\)"):
        BufferLayout(changed(plan, tensors={**plan.tensors, "qkv.0": odd}), CHUNK)


def test_layout_rejects_an_unknown_graph_input() -> None:
    plan = make_plan()
    odd = changed(
        plan,
        inputs=(*plan.inputs, "mask"),
        subgraphs=(subgraph("mask", "cpu", ["mask"], ["m"]), *plan.subgraphs),
        tensors={**plan.tensors, "mask": value("mask"), "m": value("m")},
    )
    with pytest.raises(ModelError, match="input 'mask' is not one of input_ids, position, rope_position, logit_rows"):
        BufferLayout(odd, CHUNK)
