"""Chunk buffers: alignment, sharing by liveness, views and padding."""

from __future__ import annotations

import numpy as np
import pytest
from fake_backend import WIDTH, make_plan, subgraph, value
from hypothesis import given
from hypothesis import strategies as st

from chunkrt.errors import ModelError
from chunkrt.graph.plan import Plan, Tensor
from chunkrt.runtime.buffers import BufferLayout, ChunkBuffers, aligned_zeros

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


@pytest.mark.parametrize("layers", [1, 2, 30])
def test_values_that_live_at_the_same_time_never_share(layers: int) -> None:
    plan = make_plan(layers)
    layout = BufferLayout(plan, CHUNK)
    written = dict.fromkeys(plan.inputs, 0) | {name: i for i, s in enumerate(plan.subgraphs) for name in s.outputs}
    last_read = {name: i for i, s in enumerate(plan.subgraphs) for name in (*s.outputs, *s.inputs)}
    names = list(layout.buffer_of)
    for one in names:
        for other in names:
            if one < other and layout.buffer_of[one] == layout.buffer_of[other]:
                apart = last_read[one] < written[other] or last_read[other] < written[one]
                assert apart, f"{one} and {other} share a buffer while both live"


def test_memory_does_not_grow_with_the_layers() -> None:
    small, large = (BufferLayout(make_plan(layers), CHUNK) for layers in (3, 30))
    assert small.num_bytes == large.num_bytes
    graph_inputs = CHUNK * 8 + 8 + CHUNK * 8
    most_alive_at_once = 4
    assert small.num_bytes == graph_inputs + most_alive_at_once * ROWS_BYTES


def test_logits_have_no_buffer() -> None:
    layout = BufferLayout(make_plan(), CHUNK)
    assert "logits" not in layout.buffer_of


def test_views_cut_rows_and_leave_the_position_whole() -> None:
    plan = make_plan()
    buffers = ChunkBuffers(BufferLayout(plan, CHUNK))
    buffers.load(np.array([7, 8, 9]), 40, range(2, 3))
    views = buffers.views(["input_ids", "position", "logit_rows"], slice(3), slice(1))
    assert {name: array.tolist() for name, array in views.items()} == {
        "input_ids": [7, 8, 9],
        "position": [40],
        "logit_rows": [2],
    }
    assert buffers.views(["qkv.0"], slice(3))["qkv.0"].shape == (3, WIDTH)


def test_clearing_padding_leaves_tokens_and_the_position() -> None:
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


def changed(plan: Plan, **changes: object) -> Plan:
    return Plan(**vars(plan) | changes)


def test_a_value_that_is_read_before_it_is_written_is_refused() -> None:
    plan = make_plan()
    with pytest.raises(ModelError, match=r"static\.0 reads 'hidden\.embedding' before"):
        BufferLayout(changed(plan, subgraphs=plan.subgraphs[1:]), CHUNK)


def test_a_value_without_rows_is_refused() -> None:
    plan = make_plan()
    odd = Tensor(name="qkv.0", dtype="float32", shape=(WIDTH, "T"))
    with pytest.raises(ModelError, match=r"'qkv\.0' has shape \(4, 'T'\)"):
        BufferLayout(changed(plan, tensors={**plan.tensors, "qkv.0": odd}), CHUNK)


def test_an_unknown_graph_input_is_refused() -> None:
    plan = make_plan()
    odd = changed(
        plan,
        inputs=(*plan.inputs, "mask"),
        subgraphs=(subgraph("mask", "cpu", ["mask"], ["m"]), *plan.subgraphs),
        tensors={**plan.tensors, "mask": value("mask"), "m": value("m")},
    )
    with pytest.raises(ModelError, match="input 'mask' is none of input_ids, position, logit_rows"):
        BufferLayout(odd, CHUNK)
