"""What is told of the likeliest tokens."""

import asyncio

import numpy as np
import pytest
from fixture_checkpoints import checkpoint

import chunkrt
from chunkrt.engine.scoring import likeliest, log_softmax


@pytest.mark.parametrize("number", [0, 1, 5, 20, 50])
@pytest.mark.parametrize("num_values", [1, 2, 7, 1000], ids="of {} different".format)
def test_the_likeliest_are_those_of_a_stable_sort(num_values, number):
    """Of equally likely ones the lower id comes first, where the last place is shared as well."""
    logits = np.random.default_rng(number).integers(0, num_values, 50).astype(np.float32)
    found = log_softmax(logits[None])[0]
    expected = [(int(i), float(found[i])) for i in np.argsort(-found, kind="stable")[:number]]
    told = likeliest(logits, 3, number)
    assert told.top == expected
    assert told.own == found[3]


@pytest.mark.parametrize("act", ["ascore", "atell"])
def test_what_is_told_of_a_run_may_use_the_session_beside_the_event_loop_too(act):
    """Steps that are taken in a thread are the task's."""
    told = []

    async def use(engine):
        async with await engine.asession() as session:
            session._sequence.on_run = lambda record: told.append(session.fork().position)
            return await (session.ascore([1, 2], [3, 4]) if act == "ascore" else session.atell([1, 2, 3], 2))

    with chunkrt.load(checkpoint("llama_gqa"), npu="native") as engine:
        assert asyncio.run(use(engine))
    assert told
