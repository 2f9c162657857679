"""Random interleavings: sessions in threads of their own share chunks; each gets the bits that it gets alone.

    python tests/interleavings.py 10000

tries so many, over all tiny checkpoints in turn, and tells those that differ.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
from fixture_checkpoints import NAMES, checkpoint, input_ids

import chunkrt
from chunkrt.engine.engine import Engine
from chunkrt.engine.session import Session
from chunkrt.errors import ClosedError

CONTEXT = 128
LENGTHS = (8, 32, 100)
"""Of chunks."""
Step = tuple[str, int]


def make_story(random: Random) -> list[Step]:
    """What one session does: begins with a prompt, and may go back, part, and be cancelled on its way."""
    story = [("prefill", random.randint(1, 60))]
    for _ in range(random.randint(0, 5)):
        kind = random.choice(["prefill", "all", "decode", "decode", "rewind", "fork", "cancelled"])
        story.append((kind, random.randint(1, 12)))
    return story


def tell(
    session: Session, story: Sequence[Step], vocabulary: Sequence[int], came_too_late: set[int], *, is_alone: bool
) -> list[Any]:
    """Every step's logits or tokens, and at the end what later tokens see of the state.

    Cancelling by chance may come too late: where it did is noted, and alone the same is done.
    """
    found: list[Any] = []
    for index, (kind, number) in enumerate(story):
        ids = [vocabulary[(7 * index + 3 * i + number) % len(vocabulary)] for i in range(number)]
        if kind in ("prefill", "all") and session.position + number < CONTEXT - 20:
            found.append(session.prefill(ids, logits="all" if kind == "all" else "last").logits)
        elif kind == "decode" and session.position + number < CONTEXT:
            found.append([piece.token_id for piece in session.generate(max_new_tokens=number)])
        elif kind == "rewind":
            session.rewind(max(session.position - number, 1))
        elif kind == "fork":
            session = session.fork()
        elif kind == "cancelled" and not is_alone:
            if not cancel_in_the_middle(session, ids):
                came_too_late.add(index)
        elif kind == "cancelled" and index in came_too_late:
            position = session.position
            session.prefill(ids)
            session.rewind(position)
    found.append(session.prefill(ids[:1]).logits)
    state = session._sequence.state
    return [*found, *(array.copy() for array in state._tensors.seen(state.position).values())]


def cancel_in_the_middle(session: Session, ids: list[int]) -> bool:
    """Cancel a prompt while it runs; whether that was in time, and the session is as if it had not been."""
    position, is_cancelled = session.position, False
    timer = threading.Timer(0.002, session.cancel)
    timer.start()
    try:
        session.prefill(ids)
    except ClosedError:
        assert session.position == position
        is_cancelled = True
    else:
        session.rewind(position)
    timer.join()
    return is_cancelled


def check_interleaving(engine: Engine, seed: int, vocabulary: Sequence[int]) -> None:
    random = Random(seed)
    stories = [make_story(random) for _ in range(random.randint(2, 12))]
    found: list[list[Any]] = [[] for _ in stories]
    too_late: list[set[int]] = [set() for _ in stories]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            found[index] = tell(engine.session(), stories[index], vocabulary, too_late[index], is_alone=False)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(stories))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "deadlock"
    assert not errors, errors
    for story, late, one in zip(stories, too_late, found, strict=True):
        alone = tell(engine.session(), story, vocabulary, late, is_alone=True)
        assert len(alone) == len(one)
        for here, there in zip(one, alone, strict=True):
            np.testing.assert_array_equal(here, there, err_msg=f"seed {seed}, story {story}")


def load_for_interleavings(name: str, chunk_length: int) -> Engine:
    return chunkrt.load(checkpoint(name), npu="native", chunk_length=chunk_length, context_length=CONTEXT, threads=2)


def main(number: int) -> int:
    """Try so many; how many failed."""
    engines: dict[tuple[str, int], Engine] = {}
    failed = 0
    for count in range(number):
        seed, name = count // len(NAMES), NAMES[count % len(NAMES)]
        key = name, LENGTHS[seed % len(LENGTHS)]
        if key not in engines:
            engines[key] = load_for_interleavings(*key)
        try:
            check_interleaving(engines[key], seed, input_ids(name))
        except AssertionError as error:
            failed += 1
            print(f"{name}, chunks of {key[1]}, seed {seed}: {error}", flush=True)
        if (count + 1) % 500 == 0:
            print(f"{count + 1} interleavings, {failed} failed", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(int(sys.argv[1])), 1))
