"""Rings and recurrent tensors: their size, their reach backwards, and exact bits after every way of moving a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_backend import (
    CONTEXT,
    VOCABULARY,
    WINDOW,
    LoneExecutor,
    expected_logits,
    make_plan,
    shared_cpu,
    tokens,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunkrt.errors import ConfigError, ModelError
from chunkrt.graph.plan import Plan, Tensor
from chunkrt.runtime.request import Request
from chunkrt.runtime.state import MOST_KEPT, State

ALL_KINDS = ("cache", "ring", "recurrent")
PLAN = make_plan(3, kinds=ALL_KINDS)
RING_PLAN = make_plan(2, kinds=("cache", "ring"))
CHUNK = 8
SLOTS = 64
"""Number of slots of a ring: window and chunk rounded up."""


def make_executor(plan: Plan) -> LoneExecutor:
    return LoneExecutor(plan, processors=shared_cpu(1), policy="sequential")


def make_state(plan: Plan = PLAN, num_tokens: int = 0) -> State:
    """Return a state that has seen `num_tokens` tokens."""
    state = State(plan, CONTEXT, chunk_length=CHUNK)
    if num_tokens:
        make_executor(plan).run(Request(tokens(num_tokens), state))
    return state


def logits_after(state: State, prefix: Sequence[int], new: Sequence[int]) -> np.ndarray:
    """Return the logits of new tokens after a prefix, checked against all tokens run at once."""
    result = make_executor(state.plan).run(Request(np.array(new, np.int64), state, logits="all"))
    truth = expected_logits(state.plan, np.array([*prefix, *new], np.int64))
    assert result.logits is not None
    np.testing.assert_array_equal(result.logits, truth[len(prefix) :])
    return result.logits


@pytest.mark.parametrize(
    ("window", "capacity", "chunk_length", "slots"),
    [(5, 128, 8, 64), (57, 128, 8, 64), (58, 128, 8, 128), (5, 40, 8, 40), (5, 128, 128, 128), (1, 128, 64, 64)],
)
def test_a_ring_has_room_for_the_window_and_a_chunk(window: int, capacity: int, chunk_length: int, slots: int) -> None:
    plan = with_window(window)
    state = State(plan, capacity, "float16", chunk_length=chunk_length)
    assert state.tensors["ring.0"].shape == (1, slots, 3)
    assert state.tensors["ring.0"].dtype == np.float16


def with_window(window: int) -> Plan:
    plan = make_plan(1, kinds=("ring",))
    parts = [
        replace(part, nodes=tuple(replace(node, attributes={"window": window}) for node in part.nodes))
        for part in plan.subgraphs
    ]
    return replace(plan, subgraphs=tuple(parts))


def test_a_ring_does_not_grow_with_the_context() -> None:
    plan = replace(make_plan(1, kinds=("ring",)), context_length=2**20)
    sizes = [State(plan, capacity, chunk_length=CHUNK).num_bytes for capacity in (128, 2**20)]
    assert sizes == [SLOTS * 3 * 4] * 2
    assert State(plan, 2**20, chunk_length=CHUNK).position_bytes == 0


def test_recurrent_tensors_are_float32_and_zero_with_any_caches() -> None:
    state = State(PLAN, CONTEXT, "float16", chunk_length=CHUNK)
    assert state.tensors["recurrent.2"].dtype == np.float32
    assert not state.tensors["recurrent.2"].any()
    assert state.position_bytes == 3 * 2


@pytest.mark.parametrize("chunk_length", [0, 21])
def test_chunk_longer_than_the_capacity_is_rejected(chunk_length: int) -> None:
    with pytest.raises(ConfigError, match=f"chunk length {chunk_length} is outside 1..20, the capacity of the state"):
        State(PLAN, 20, chunk_length=chunk_length)


def test_ring_without_a_window_is_rejected() -> None:
    ring = Tensor(name="cache.0", dtype="float32", shape=(1, "W", 3), kind="state")
    plan = make_plan(1)
    with pytest.raises(ModelError, match=r"'cache\.0' is a ring, but no layer of the plan has a window"):
        State(replace(plan, tensors={**plan.tensors, "cache.0": ring}), 20)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("num_tokens", [1, 30, 64, 65, 100])
def test_ring_rewinds_as_far_as_it_holds_a_window(num_tokens: int) -> None:
    for position in range(num_tokens + 1):
        state = make_state(RING_PLAN, num_tokens)
        first = max(0, num_tokens - SLOTS)
        is_held = first <= max(0, position - WINDOW + 1)
        assert state.rewind(position) == state.position == (position if is_held else 0)
        logits_after(state, range(state.position), range(100, 110))


def test_positions_overwritten_before_a_rewind_stay_lost() -> None:
    state = make_state(RING_PLAN, 100)
    assert state.rewind(50) == 50
    logits_after(state, range(50), [1, 2, 3])
    assert state.rewind(41) == 41
    assert state.rewind(40) == 40  # sees 36, the first of the 64 remaining positions
    assert state.rewind(39) == 0


def test_recurrent_tensors_rewind_to_snapshots_or_the_beginning() -> None:
    state = make_state(PLAN)
    executor = make_executor(PLAN)
    for position in range(0, 100, 20):
        executor.run(Request(tokens(20, position), state))
        state.keep_snapshot()
    assert MOST_KEPT == 2
    assert state.rewind(100) == 100
    assert state.rewind(99) == 80
    logits_after(state, range(80), range(30))
    assert state.rewind(80) == 80
    logits_after(state, range(80), range(110, 120))
    assert state.rewind(79) == 0
    assert not state.tensors["recurrent.2"].any()
    logits_after(state, [], range(50, 80))


def test_snapshot_of_forgotten_tokens_is_forgotten() -> None:
    state = make_state(PLAN, 40)
    state.keep_snapshot()
    assert state.rewind(30) == 0
    logits_after(state, [], range(50))
    assert state.rewind(45) == 0


def test_reset_state_shows_none_of_its_earlier_contents() -> None:
    state = make_state(PLAN, 100)
    state.reset()
    logits_after(state, [], range(60, 90))


@given(position=st.integers(0, 300), num_tokens=st.integers(1, 200))
def test_overwritten_part_of_a_ring_is_restored_at_any_wrap(position: int, num_tokens: int) -> None:
    state = State(replace(RING_PLAN, context_length=512), 512, chunk_length=CHUNK)
    ring = state.tensors["ring.1"]
    ring[:] = np.arange(ring.size).reshape(ring.shape)
    state.advance(position)
    held = ring[:, np.arange(max(0, position - SLOTS), position) % SLOTS].copy()
    state.begin(num_tokens)
    ring[:, np.arange(position, position + num_tokens) % SLOTS] = -1
    state.roll_back()
    np.testing.assert_array_equal(ring[:, np.arange(max(0, position - SLOTS), position) % SLOTS], held)


def test_rotary_tables_follow_a_snapshot_and_a_fork() -> None:
    state = State(make_plan(long_context_from=20), CONTEXT)
    state.reset(CONTEXT)
    snapshot = state.snapshot()
    assert state.fork().rope_offset == CONTEXT
    state.reset()
    state.restore(snapshot)
    assert state.rope_offset == CONTEXT


def test_run_left_with_writing_tasks_is_undone_after_they_end() -> None:
    state = make_state(PLAN, 70)
    before = state.tensors["recurrent.2"].copy()

    def last_write() -> None:
        state.tensors["recurrent.2"][:] = 77

    state.begin(10)
    state.tensors["recurrent.2"][:] = 55
    state.roll_back(wait=last_write)
    assert state.tensors["recurrent.2"][0, 0] == 55
    fork = state.fork()
    for one in (state, fork):
        np.testing.assert_array_equal(one.tensors["recurrent.2"], before)
        logits_after(one, range(70), range(5))


@pytest.mark.parametrize("num_tokens", [0, 3, 70, 128])
def test_file_fits_another_chunk_length(tmp_path: Path, num_tokens: int) -> None:
    saved = make_state(PLAN, num_tokens)
    saved.save(tmp_path / "state")
    for chunk_length in (CHUNK, 60, None):
        state = State(PLAN, CONTEXT, chunk_length=chunk_length)
        make_executor(PLAN).run(Request(tokens(13, 100), state))
        state.load(tmp_path / "state")
        assert state.position == num_tokens
        np.testing.assert_array_equal(state.tensors["recurrent.2"], saved.tensors["recurrent.2"])
        if num_tokens < CONTEXT:
            logits_after(state, range(num_tokens), [7])


def test_file_with_keys_before_rope_or_other_tables_is_rejected(tmp_path: Path) -> None:
    make_state(RING_PLAN, 20).save(tmp_path / "rotated")
    with pytest.raises(ModelError, match="its keys were not cached before RoPE, unlike those of the state"):
        make_state(RING_PLAN.with_raw_keys(), 3).load(tmp_path / "rotated")
    long = make_plan(long_context_from=20)
    state = State(long, CONTEXT)
    state.reset(CONTEXT)
    state.save(tmp_path / "long")
    again = State(long, CONTEXT)
    again.load(tmp_path / "long")
    assert again.rope_offset == CONTEXT
    with pytest.raises(ModelError, match="its rotary tables begin at row 128"):
        State(make_plan(), CONTEXT).load(tmp_path / "long")


def test_snapshot_of_another_kind_of_state_is_rejected() -> None:
    snapshot = make_state(PLAN, 20).snapshot()
    for other in (State(PLAN, CONTEXT), State(PLAN, CONTEXT, "float16", chunk_length=CHUNK), make_state(RING_PLAN)):
        with pytest.raises(ConfigError, match="the snapshot does not fit this state"):
            other.restore(snapshot)


def test_keys_after_rope_cannot_shift() -> None:
    with pytest.raises(ConfigError, match="keys are cached after RoPE and cannot move"):
        make_state(RING_PLAN, 20).shift(4, 8)
    with pytest.raises(ConfigError, match="cannot keep -1 positions and drop 8"):
        make_state(RING_PLAN.with_raw_keys(), 20).shift(-1, 8)


@given(num_tokens=st.integers(1, CONTEXT), keep=st.integers(0, 20), drop=st.integers(0, 100))
def test_shift_moves_the_remaining_tokens(num_tokens: int, keep: int, drop: int) -> None:
    """Cached rows carry tags of their tokens: with one layer each depends on its own token alone."""
    plan = make_plan(1, kinds=("ring",)).with_raw_keys()
    ring = make_state(plan, num_tokens)
    old = [*range(num_tokens)]
    rest = [*old[:keep], *old[keep + drop :]]
    position = ring.shift(keep, drop)
    assert position in (len(rest), min(keep, num_tokens), 0)
    is_whole = keep + drop <= num_tokens and (num_tokens <= SLOTS or len(rest) - WINDOW + 1 >= keep)
    assert position == len(rest) or not is_whole
    new = [*rest[position:], 140, 141]
    if len(rest) + 2 <= CONTEXT:
        logits_after(ring, rest[:position], new)


def test_recurrent_tensors_do_not_change_in_a_shift() -> None:
    plan = PLAN.with_raw_keys()
    state = make_state(plan, 20)
    state.keep_snapshot()
    make_executor(plan).run(Request(tokens(20, 20), state))
    before = state.tensors["recurrent.2"].copy()
    assert state.shift(4, 10) == state.position == 30
    np.testing.assert_array_equal(state.tensors["recurrent.2"], before)
    assert state.rewind(29) == 0  # the kept snapshot was of other positions


Operation = tuple[str, float]


@settings(
    deadline=None, max_examples=settings().max_examples, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    kinds=st.sampled_from([("cache",), ("ring",), ("recurrent",), ALL_KINDS]),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["run", "run", "keep", "rewind", "fork", "snapshot", "restore", "save", "load", "fail"]),
            st.floats(0, 1),
        ),
        max_size=14,
    ),
    seed=st.integers(0, 100),
)
def test_state_after_any_operations_gives_the_logits_of_its_tokens(
    tmp_path: Path, kinds: tuple[str, ...], operations: list[Operation], seed: int
) -> None:
    """The model keeps only the tokens, and runs them all at once."""
    plan, random = make_plan(3, kinds=kinds), np.random.default_rng(seed)
    executor, state = make_executor(plan), State(plan, CONTEXT, chunk_length=CHUNK)
    seen: list[int] = []
    snapshot, in_snapshot, in_file = state.snapshot(), list[int](), list[int]()
    state.save(tmp_path / "state")
    for name, amount in operations:
        size = int(amount * (CONTEXT - len(seen)))
        if name == "run" and size:
            new = random.integers(0, VOCABULARY, size).tolist()
            logits_after(state, seen, new)
            seen += new
        elif name == "keep":
            state.keep_snapshot()
        elif name == "rewind":
            position = int(amount * len(seen))
            reached = state.rewind(position)
            assert reached <= position
            del seen[reached:]
        elif name == "fork":
            other = state.fork()
            if size:
                executor.run(Request(random.integers(0, VOCABULARY, size), state))  # the fork does not change
            state = other
        elif name == "snapshot":
            snapshot, in_snapshot = state.snapshot(), seen.copy()
        elif name == "restore":
            state.restore(snapshot)
            seen = in_snapshot.copy()
        elif name == "save":
            state.save(tmp_path / "state")
            in_file = seen.copy()
        elif name == "load":
            state.load(tmp_path / "state")
            seen = in_file.copy()
        elif size:
            state.begin(size)
            for tensor, array in state.tensors.items():
                last = slice(len(seen), len(seen) + size)
                slots = np.arange(len(seen), len(seen) + size) % array.shape[1]
                array[:, {"cache": last, "ring": slots}.get(tensor.partition(".")[0], slice(None))] = 88
            state.roll_back()
        assert state.position == len(seen)
    if len(seen) < CONTEXT:
        logits_after(state, seen, [5])
