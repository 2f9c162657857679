"""Memory of closed sessions, which new sessions use again."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from fixture_checkpoints import ONE_OF_EACH_STATE, checkpoint, input_ids
from states import make_state

import chunkrt
from chunkrt.engine.engine import Engine
from chunkrt.runtime.request import Request
from chunkrt.runtime.state import State

CONTEXT = 120


def load(name: str, cache_dtype: str) -> Engine:
    return chunkrt.load(
        checkpoint(name), chunk_length=16, threads=1, npu="native", context_length=CONTEXT, cache_dtype=cache_dtype
    )


def addresses(state: State) -> dict[str, int]:
    return {name: array.ctypes.data for name, array in state.tensors.items()}


@pytest.mark.parametrize("cache_dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("name", ONE_OF_EACH_STATE)
def test_state_in_the_memory_of_another_gives_the_same_logits(name: str, cache_dtype: str) -> None:
    tokens = np.array((input_ids(name) * 3)[:100], np.int64)
    with load(name, cache_dtype) as engine, load(name, cache_dtype) as fresh:
        state = make_state(engine, tokens[::-1])
        before = addresses(state)
        del state
        gc.collect()
        state, expected = engine.loaded.make_state(), make_state(fresh)
        assert addresses(state) == before
        for part in (tokens[:37], tokens[37:38], tokens[38:70]):
            found = engine.loaded.run(Request(part.copy(), state)).logits
            truth = fresh.loaded.run(Request(part.copy(), expected)).logits
            assert found is not None
            np.testing.assert_array_equal(found, truth)


def test_fork_does_not_share_memory_with_a_state_that_is_in_use() -> None:
    name = ONE_OF_EACH_STATE[0]
    with load(name, "float16") as engine:
        states = [make_state(engine, input_ids(name)[:20])]
        states += [states[0].fork() for _ in range(3)]
        del states[1]
        states += [states[0].fork(), make_state(engine)]
        found = [address for state in states for address in addresses(state).values()]
        assert len(set(found)) == len(found)


def test_memory_of_closed_sessions_is_free_when_the_engine_is_closed() -> None:
    name = ONE_OF_EACH_STATE[0]
    engine = load(name, "float16")
    memory = [weakref.ref(array.base) for array in make_state(engine).tensors.values() if array.base is not None]
    assert memory
    assert all(reference() is not None for reference in memory)
    engine.close()
    gc.collect()
    assert all(reference() is None for reference in memory)
