"""Verification of an engine directory's large files against the manifest, while the rest of a model is loaded.

Small files are verified earlier; large ones would delay the start. No result is computed from unverified files: the
first run waits for the end of the verification.
"""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

from chunkrt.engine_directory.manifest import HASHED_WHEN_READ, Manifest, digest
from chunkrt.errors import ModelError, cause_of
from chunkrt.gate import Gate


class Verification:
    """Verifies files in a separate thread, from construction on. As a context manager, it stops if the body fails.

    Args:
        folder, manifest: an engine directory and its manifest; the sizes of the files have been verified.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        large = {name: found for name, (size, found) in manifest.files.items() if size > HASHED_WHEN_READ}
        self._error: BaseException | None = None
        self._is_stopped = Event()
        # used instead of joining the thread: in Python 3.11 an interrupted join marks the thread as finished
        self._end = Gate()
        if large:
            Thread(target=self._work, args=(folder, large), name="verification", daemon=True).start()
        else:
            self._end.open()

    def __enter__(self) -> Verification:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.stop()

    @property
    def is_done(self) -> bool:
        """True if `wait` would return at once."""
        return self._end.is_open

    def wait(self) -> None:
        """Wait until all files are verified. Raise ModelError if a file has changed or cannot be read."""
        self._end.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop early; `wait` then ignores the remaining files."""
        self._is_stopped.set()
        self._end.wait()

    def _work(self, folder: Path, expected: dict[str, str]) -> None:
        try:
            for name, recorded in expected.items():
                self._verify(folder / name, recorded)
        except BaseException as error:
            self._error = error
        finally:
            self._end.open()

    def _verify(self, path: Path, recorded: str) -> None:
        """Compare one file with its recorded digest, unless the verification is stopped."""
        try:
            found = digest(path, recorded.partition(":")[0], self._is_stopped.is_set)
        except OSError as error:
            raise ModelError(f"{path} cannot be read ({cause_of(error)}); compile the model again") from error
        if found != recorded and not self._is_stopped.is_set():
            raise ModelError(f"{path} has changed since the model was compiled; compile it again")
