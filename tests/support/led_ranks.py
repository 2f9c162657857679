"""Ranks in one process, of which the first leads, as under mpiexec; the followers run in threads.

    python tests/support/led_ranks.py 1000

checks this number of random interleavings on 2 and 4 ranks, of all tiny checkpoints in turn, and prints those that
differ.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

from fake_backend import finish
from fixture_checkpoints import NAMES, checkpoint, input_ids
from interleavings import CONTEXT, LENGTHS, check_interleaving

from chunkrt.engine.engine import Engine
from chunkrt.engine.loaded import LoadedModel
from chunkrt.engine.loading import load_part
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.ranks.follower import Follower
from chunkrt.engine.ranks.leader import Leader
from chunkrt.runtime.ranks.messages import MessageCommunicator, local_communicators


@dataclass
class Led:
    """Engines and communicators of all ranks; `engine` belongs to the leader."""

    communicators: Sequence[MessageCommunicator]
    leader: Leader
    engine: Engine
    of_followers: dict[int, LoadedModel] = field(default_factory=dict)


@contextmanager
def led(name: str | Path, size: int, *, of_others: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Led]:
    """Load a model on `size` ranks, and end all ranks at exit; `of_others` changes options of all except the first."""
    chosen = EngineOptions(**{"npu": "native", "threads": 1, "context_length": CONTEXT} | options)
    communicators, of_followers = local_communicators(size), dict[int, LoadedModel]()

    def load(model: str, options: EngineOptions, communicator: Any) -> LoadedModel:
        engine = load_part(model, replace(options, **of_others or {}), communicator)
        of_followers[communicator.rank] = engine
        return engine

    threads = [Thread(target=Follower(c, load).serve, name=f"rank-{c.rank}", daemon=True) for c in communicators[1:]]
    for thread in threads:
        thread.start()
    try:
        path, leader = checkpoint(name) if isinstance(name, str) else name, Leader(communicators[0])
        mirror = leader.open(str(path), chosen)
        engine = Engine(load_part(str(path), chosen, communicators[0], mirror=mirror))
        with engine:
            mirror.check_loaded(engine.loaded.identity)
            yield Led(communicators, leader, engine, of_followers)
    finally:
        communicators[0].close()
        for thread in threads:
            finish(thread.join)


def main(number: int) -> int:
    """Check a number of interleavings, and return the number of failures."""
    failed = 0
    for turn, name in enumerate(NAMES):
        size, length = (2, 4)[turn % 2], LENGTHS[turn % 3]
        with led(name, size, chunk_length=length, chunks_in_flight=(2, 16)[turn % 2]) as ranks:
            for seed in range(turn, number, len(NAMES)):
                try:
                    check_interleaving(ranks.engine, seed, input_ids(name), has_ranks=True)
                except AssertionError as error:
                    failed += 1
                    print(f"{name} on {size} ranks, chunks of {length}, seed {seed}: {error}", flush=True)
    print(f"{number} interleavings, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(int(sys.argv[1])), 1))
