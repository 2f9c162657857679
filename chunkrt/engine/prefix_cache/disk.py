"""Disk storage of the prefix cache: files of up to 256 tokens, named by their contents.

The name of a file is the SHA-256 of the preceding file's name and of the file's tokens. The name of the first file
depends on everything that can change an engine's results. So a file with the right name was computed from the same
tokens by the same model in the same way. A separate thread writes the files. A damaged file counts as a miss, is
reported in one line, and is removed. Errors in reading or writing are reported once, and the cache continues in memory;
for the next prompt the disk is tried again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple

import msgspec
import numpy as np

from chunkrt.engine.prefix_cache.block_file import Header, block_bytes, read_block, write_block
from chunkrt.engine.prefix_cache.folder import path_of, write_file
from chunkrt.engine.prefix_cache.tree import STEP, Addition, Root, TreeNode
from chunkrt.errors import cause_of
from chunkrt.runtime.buffers import Array
from chunkrt.runtime.prefix import PrefixPiece, StateForms

log = logging.getLogger(__name__)

BLOCK = 8 * STEP
"""Maximum number of tokens of a file."""
MOST_WAITING_BYTES = 256 * 2**20
"""Maximum number of bytes that are queued for writing. Beyond this limit further prompts, and further parts of a prompt
that is added in parts, are not written. The limit does not apply while nothing is queued.
"""
SECONDS_TO_CLOSE = 5.0
"""Seconds to wait for the lock, which threads hold for microseconds."""
MOST_NAMES = 1 << 14
"""Number of files whose contents are remembered."""


class _NodeContents(NamedTuple):
    """Contents of a node at the time when its writing was requested."""

    tokens: tuple[int, ...]
    piece: PrefixPiece
    recurrent: dict[int, tuple[Array, ...]]


class _Save(NamedTuple):
    """Consecutive steps that are to be written, starting with the first token."""

    forms: StateForms
    root: Root
    steps: tuple[_NodeContents, ...]
    num_bytes: int


class DiskStore:
    """Store of files in a folder that other processes may use at the same time.

    Args:
        folder: folder of the files; it is created when the first file is written.
        budget: maximum number of bytes of all files in the folder.
        model, scheme: names of the engine's model and scheme.
        identity: everything that can change the engine's results, as data for JSON.
    """

    def __init__(self, folder: Path, budget: int, *, model: str, scheme: str, identity: Mapping[str, object]) -> None:
        self._folder, self._budget = folder, budget
        self._model, self._scheme, self._identity = model, scheme, identity
        self._written: dict[str, frozenset[object]] = {}
        """Contents of written or read files by name, because recurrent tensors and rings may be added later than
        caches.
        """
        self._queue: SimpleQueue[_Save | None] = SimpleQueue()
        self._num_waiting_bytes = 0
        self._thread: Thread | None = None
        self._starting = Lock()
        """Lock for starting the thread, for the count of waiting bytes, and for the record of written contents."""
        self._told: set[str] = set()

    def load(self, forms: StateForms, tokens: Sequence[int], root: Root, known: int) -> Iterator[Addition]:
        """Yield the stored parts for some tokens, except for the first `known` tokens, one file at a time."""
        engine = parent = self._digest(forms, root)
        for start in range(0, len(tokens), BLOCK):
            whole = tuple(tokens[start : start + BLOCK])
            if start + BLOCK > known:
                for length in range(len(whole) // STEP * STEP, 0, -STEP):
                    part = whole[:length]
                    if start + length > known and (found := self._read(forms, engine, parent, start, part)):
                        yield found
                        break
                else:
                    return
                if length < BLOCK:
                    return
            parent = chained(parent, whole)

    def save(self, forms: StateForms, root: Root, nodes: Sequence[TreeNode]) -> None:
        """Schedule the writing of consecutive nodes, starting with the first token."""
        whole = [node for node in nodes if len(node.tokens) == STEP]
        if not whole:
            return
        steps = tuple(_NodeContents(node.tokens, node.piece, dict(node.recurrent)) for node in whole)
        save = _Save(forms, root, steps, sum(node.num_bytes for node in whole))
        with self._starting:
            if self._num_waiting_bytes and self._num_waiting_bytes + save.num_bytes > MOST_WAITING_BYTES:
                return
            self._num_waiting_bytes += save.num_bytes
            self._queue.put(save)
            self._have_written()

    def close(self) -> None:
        """Wait until all scheduled nodes are written. Do not wait in a signal handler that interrupted this thread
        while it used the store.
        """
        if not self._starting.acquire(timeout=SECONDS_TO_CLOSE):
            return
        try:
            if not self._queue.empty():
                self._have_written()  # an interrupt may have occurred before the thread started
            thread, queue = self._thread, self._queue
            self._thread, self._queue = None, SimpleQueue()  # a session may save nodes meanwhile
        finally:
            self._starting.release()
        if thread is not None and thread.is_alive():
            queue.put(None)
            thread.join()

    def _have_written(self) -> None:
        """Start the writing thread unless it is running."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=self._write_all, args=(self._queue,), name="chunkrt prefix cache", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no further thread can be started
                self._tell("write to", error)

    def _read(
        self, forms: StateForms, engine: str, parent: str, start: int, tokens: tuple[int, ...]
    ) -> Addition | None:
        name = chained(parent, tokens)
        path = path_of(self._folder, name)
        expected = self._header(engine, parent, start, tokens, (), ())
        try:
            found = read_block(path, forms, expected)
        except FileNotFoundError:
            return None
        except (ValueError, msgspec.ValidationError) as error:
            what = str(error) or type(error).__name__
            log.warning("the prefix cache cannot use %s (%s); the file is removed", path, " ".join(what.split()))
            with self._starting:
                self._written.pop(name, None)
            _remove(path)
            return None
        except OSError as error:  # not an error of the file: for example, too many files are open
            self._tell("read from", error)
            return None
        with suppress(OSError):
            os.utime(path)  # record the use
        self._note(name, found)
        return found

    def _tell(self, what: str, error: Exception) -> None:
        """Report an error to the user, once."""
        reason = cause_of(error)
        line = f"the prefix cache cannot {what} {self._folder} ({reason}); it continues in memory"
        if line not in self._told:
            self._told.add(line)
            log.warning("%s", line)

    def _note(self, name: str, found: Addition) -> None:
        """Record the contents of a file."""
        with self._starting:  # other threads do the same
            self._written[name] = _parts(found)
            while len(self._written) > MOST_NAMES:
                del self._written[next(iter(self._written))]

    def _write_all(self, queue: SimpleQueue[_Save | None]) -> None:
        while (save := queue.get()) is not None:
            try:
                self._write(save.forms, save.root, save.steps)
            except Exception as error:  # the rest of this prompt is not written; the next prompt may be
                self._tell("write to", error)
            finally:
                with self._starting:
                    self._num_waiting_bytes -= save.num_bytes
        queue.put(None)  # an interrupt while the thread was started may have left another one

    def _write(self, forms: StateForms, root: Root, steps: Sequence[_NodeContents]) -> None:
        engine = parent = self._digest(forms, root)
        for first in range(0, len(steps), BLOCK // STEP):
            several = steps[first : first + BLOCK // STEP]
            tokens = tuple(token for step in several for token in step.tokens)
            recurrent = {position: kept for step in several for position, kept in sorted(step.recurrent.items())}
            found = Addition(pieces=tuple(step.piece for step in several), recurrent=recurrent)
            name = chained(parent, tokens)
            is_known = _parts(found) <= self._written.get(name, frozenset({None}))
            if not is_known or not path_of(self._folder, name).exists():
                rings = tuple(piece.rings is not None for piece in found.pieces)
                header = self._header(engine, parent, first * STEP, tokens, rings, tuple(recurrent))
                size = block_bytes(header, found)
                write = partial(write_block, header=header, addition=found)
                if not write_file(self._folder, name, size, self._budget, write):
                    return  # later files of the prompt would never be found
                self._note(name, found)
            parent = name

    def _digest(self, forms: StateForms, root: Root) -> str:
        """Return the hexadecimal SHA-256 of everything that the files depend on, including the salt."""
        salt, rope_offset = root
        key = json.dumps([self._identity, forms.describe(), rope_offset, salt], sort_keys=True, default=list)
        return hashlib.sha256(key.encode()).hexdigest()

    def _header(
        self,
        engine: str,
        parent: str,
        start: int,
        tokens: tuple[int, ...],
        rings: tuple[bool, ...],
        recurrent: tuple[int, ...],
    ) -> Header:
        return Header(
            model=self._model,
            scheme=self._scheme,
            engine=engine,
            parent=parent,
            start=start,
            tokens=tokens,
            rings=rings,
            recurrent=recurrent,
        )


def chained(parent: str, tokens: Sequence[int]) -> str:
    """Return the name of the file that contains some tokens after those of the file `parent`."""
    return hashlib.sha256(parent.encode() + np.array(tokens, np.int64).tobytes()).hexdigest()


def _parts(addition: Addition) -> frozenset[object]:
    """Return keys of the contents that may be added to a file later."""
    rings = [("rings", piece.start) for piece in addition.pieces if piece.rings is not None]
    return frozenset({None, *rings, *addition.recurrent})


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        log.debug("%s cannot be removed", path, exc_info=True)
