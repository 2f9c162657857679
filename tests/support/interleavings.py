"""Random interleavings of sessions in threads, batched into the same chunks; each must get the bits as when alone.

    python tests/support/interleavings.py 10000
    python tests/support/interleavings.py 1000 --context 1024 --longest 400 --fault-every 400
    python tests/support/interleavings.py 1000 --context 512 --longest 200 --prefix-cache 500000
    python tests/support/interleavings.py 50 --model smollm2-135m-instruct --npu qnn --sessions 4 --longest 24

checks this number of interleavings, of all tiny checkpoints in turn or of one model, and prints those that differ.
"""

from __future__ import annotations

import faulthandler
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np
from fixture_checkpoints import NAMES, checkpoint, input_ids
from states import saved_arrays

import chunkrt
from chunkrt.engine.engine import Engine
from chunkrt.engine.session import Session
from chunkrt.errors import BackendError, ClosedError, DeviceLostError
from chunkrt.runtime.executor import Executor
from chunkrt.runtime.request import Logits

CONTEXT = 128
LENGTHS = (8, 32, 100)
"""Chunk lengths."""
VARIETY = 3
"""Number of different prompts per step; it is small, so that sessions find prefixes that others have computed."""
Step = tuple[str, int]
TEXT = range(1000, 9000, 13)
"""Tokens of a real model's vocabulary."""
FAULT = "injected fault"
"""Message of the error that a task raises instead of computing."""
WAIT_S = 600
"""Limit for a thread that waits only for its turn, on an emulator too."""
MOST_FAULTS = 20
"""Limit per interleaving: if every repetition of a run failed, it would never end."""


class Faults:
    """Injector of faults: every `every`-th task of all decoders fails, in any thread. `num` counts the failures."""

    def __init__(self, every: int) -> None:
        self.num = 0
        self._every, self._num_tasks = every, 0
        self._lock = threading.Lock()

    @contextmanager
    def injected(self) -> Iterator[None]:
        """Inject faults while the block runs."""
        run_task, most = Executor.run_task, self.num + MOST_FAULTS

        def run_or_fail(executor: Executor, *task: Any) -> Any:
            with self._lock:
                self._num_tasks += 1
                if fails := self._num_tasks % self._every == 0 and self.num < most:
                    self.num += 1
            if fails:
                raise RuntimeError(FAULT)
            return run_task(executor, *task)

        Executor.run_task = run_or_fail  # type: ignore[method-assign]
        try:
            yield
        finally:
            Executor.run_task = run_task  # type: ignore[method-assign]


def make_story(random: Random, longest: int = 60) -> list[Step]:
    """Return the steps of a session: first a prompt, then perhaps rewinds, forks and cancelled prompts."""
    story = [("prefill", random.randint(1, longest))]
    for _ in range(random.randint(0, 5)):
        kind = random.choice(["prefill", "all", "hidden", "decode", "decode", "rewind", "fork", "cancelled"])
        story.append((kind, random.randint(1, 12)))
    return story


def tell(
    session: Session,
    story: Sequence[Step],
    vocabulary: Sequence[int],
    came_too_late: set[int],
    *,
    is_alone: bool,
    is_saved: bool = True,
) -> list[Any]:
    """Return the logits or tokens of each step, and the final contents of the session's file if `is_saved`.

    A random cancellation may come too late. These steps are added to `came_too_late`, and the session that runs alone
    computes them. A step with an injected fault leaves the session unchanged, and is repeated.
    """
    found: list[Any] = []
    context = session.context_length
    for index, (kind, number) in enumerate(story):
        ids = [vocabulary[(7 * index + 3 * i + number % VARIETY) % len(vocabulary)] for i in range(number)]
        if kind in ("prefill", "all", "hidden") and session.position + number < context - 20:
            found.append(prefill(session, ids, logits="last" if kind == "prefill" else kind))
        elif kind == "decode" and session.position + number < context:
            found.append(generate(session, number))
        elif kind == "rewind":
            session.rewind(max(session.position - number, 1))
        elif kind == "fork":
            session = session.fork()
        elif kind == "cancelled" and not is_alone:
            if not cancel_in_the_middle(session, ids):
                came_too_late.add(index)
        elif kind == "cancelled" and index in came_too_late:
            position = session.position
            prefill(session, ids)
            session.rewind(position)
    found.append(prefill(session, ids[:1]))
    return [*found, *saved_arrays(session).values()] if is_saved else found


def prefill(session: Session, ids: list[int], *, logits: Logits = "last") -> Any:
    """Return the logits or hidden states of a prompt; repeat it after each injected fault."""
    position = session.position
    while True:
        try:
            result = session.prefill(ids, logits=logits)
            return result.hidden if logits == "hidden" else result.logits
        except BackendError as error:
            expect_fault(error, session, position)


def expect_fault(error: BackendError, session: Session, position: int) -> None:
    """Check that an error was injected, and that the session is unchanged."""
    assert FAULT in str(error)
    assert not isinstance(error, DeviceLostError)  # a rank that has ended
    assert session.position == position


def generate(session: Session, number: int) -> list[int | None]:
    """Return generated tokens; continue after each injected fault."""
    found: list[int | None] = []
    is_finished = False
    while not is_finished and len(found) < number:
        position = session.position
        try:
            for piece in session.generate(max_new_tokens=number - len(found)):
                found.append(piece.token_id)
                position, is_finished = session.position, piece.finish_reason is not None
        except BackendError as error:
            expect_fault(error, session, position)
    return found


def cancel_in_the_middle(session: Session, ids: list[int]) -> bool:
    """Cancel a prompt while it runs, restore the session, and return True if the cancellation was in time."""
    position, is_cancelled = session.position, False
    timer = threading.Timer(0.002, session.cancel)
    timer.start()
    try:
        session.prefill(ids)
    except ClosedError:
        assert session.position == position
        is_cancelled = True
    except BackendError as error:
        expect_fault(error, session, position)
        is_cancelled = True
    else:
        session.rewind(position)
    timer.join()
    return is_cancelled


def check_interleaving(
    engine: Engine,
    seed: int,
    vocabulary: Sequence[int],
    *,
    most: int = 12,
    longest: int = 60,
    faults: Faults | None = None,
    plain: Engine | None = None,
    has_ranks: bool = False,
) -> None:
    """Request 2 to `most` sessions at once, then each alone; raise AssertionError if one got other bits.

    The first prompt of each has up to `longest` tokens. If `plain` is given, an engine without a prefix cache, sessions
    that run alone use it. Sessions of ranks cannot be saved, so their states are not compared.
    """
    random = Random(seed)
    stories = [make_story(random, longest) for _ in range(random.randint(2, most))]
    found: list[list[Any]] = [[] for _ in stories]
    too_late: list[set[int]] = [set() for _ in stories]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            found[index] = tell(
                engine.session(), stories[index], vocabulary, too_late[index], is_alone=False, is_saved=not has_ranks
            )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(stories))]
    with faults.injected() if faults else nullcontext():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            if thread.is_alive():
                faulthandler.dump_traceback(all_threads=True)
                raise AssertionError(f"deadlock, after {errors}")
    assert not errors, errors
    for story, late, one in zip(stories, too_late, found, strict=True):
        alone = tell((plain or engine).session(), story, vocabulary, late, is_alone=True, is_saved=not has_ranks)
        assert len(alone) == len(one)
        for here, there in zip(one, alone, strict=True):
            np.testing.assert_array_equal(here, there, err_msg=f"seed {seed}, story {story}")


def load_for_interleavings(
    model: str | Path,
    chunk_length: int,
    context_length: int = CONTEXT,
    prefix_cache_memory: int | None = None,
    **options: Any,
) -> Engine:
    """Load a model for these tests; without `prefix_cache_memory` it has no prefix cache."""
    kept = {"prefix_cache": "memory", "prefix_cache_memory": prefix_cache_memory} if prefix_cache_memory else {}
    chosen = {"npu": "native", "context_length": context_length, "threads": 2, "prefix_cache": "off"} | kept | options
    return chunkrt.load(model, chunk_length=chunk_length, **chosen)


def with_longer_context(name: str, length: int, folder: Path) -> Path:
    """Copy a tiny checkpoint and set its context length; a GGUF file is returned unchanged, with a length of 128."""
    original = checkpoint(name)
    if original.is_file():
        return original
    copy = folder / name
    if not copy.exists():
        shutil.copytree(original, copy)
        config = json.loads((copy / "config.json").read_text())
        config["max_position_embeddings"] = length
        (copy / "config.json").write_text(json.dumps(config))
    return copy


@click.command()
@click.argument("number", type=click.IntRange(1))
@click.option("--context", type=click.IntRange(128), default=CONTEXT, show_default=True)
@click.option("--sessions", type=click.IntRange(2), default=12, show_default=True, help="Largest number of sessions.")
@click.option(
    "--longest",
    type=click.IntRange(1),
    default=60,
    show_default=True,
    help="Largest number of tokens in a first prompt.",
)
@click.option("--fault-every", type=click.IntRange(2), help="Inject a fault after this number of tasks.")
@click.option("--prefix-cache", type=click.IntRange(1), help="Bytes of the prefix cache of concurrent sessions.")
@click.option("--model", help="Model to use instead of all tiny checkpoints.")
@click.option("--npu", default="native", show_default=True)
def main(
    number: int,
    context: int,
    sessions: int,
    longest: int,
    fault_every: int | None,
    prefix_cache: int | None,
    model: str | None,
    npu: str,
) -> None:
    """Check NUMBER random interleavings."""
    engines: dict[tuple[str, int], tuple[Engine, Engine]] = {}
    faults = Faults(fault_every) if fault_every else None
    failed, start = 0, time.monotonic()
    names = [model] if model else NAMES
    with tempfile.TemporaryDirectory() as folder:
        for count in range(number):
            seed, name = count // len(names), names[count % len(names)]
            key = name, 32 if model else LENGTHS[seed % len(LENGTHS)]
            if key not in engines:
                path = model or with_longer_context(name, context, Path(folder))
                most = 128 if isinstance(path, Path) and path.is_file() else context
                plain = load_for_interleavings(path, key[1], most, npu=npu)
                cached = prefix_cache and load_for_interleavings(path, key[1], most, prefix_cache, npu=npu)
                engines[key] = cached or plain, plain
            engine, plain = engines[key]
            vocabulary = TEXT if model else input_ids(name)
            fits = min(longest, plain.context_length // 2)
            try:
                check_interleaving(engine, seed, vocabulary, most=sessions, longest=fits, faults=faults, plain=plain)
            except AssertionError as error:
                failed += 1
                click.echo(f"{name}, chunks of {key[1]}, seed {seed}: {error}")
            if (count + 1) % (10 if model else 500) == 0 or count + 1 == number:
                told = f", {faults.num} faults injected" if faults else ""
                if prefix_cache:
                    told += f", {sum(each.stats().cached_tokens for each, _ in engines.values())} tokens from the cache"
                seconds = time.monotonic() - start
                click.echo(f"{count + 1} interleavings in {seconds:.0f} s, {failed} failed{told}")
        for pair in engines.values():
            for engine in pair:
                engine.close()
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
