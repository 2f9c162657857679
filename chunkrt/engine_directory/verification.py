"""Large files of an engine directory are held against the manifest while the rest of a model is loaded.

Small ones have been before; these would keep a start waiting. Nothing is computed from them until they have proved
whole: the first run waits for the end.
"""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

from chunkrt.engine_directory.manifest import HASHED_WHEN_READ, Manifest, digest
from chunkrt.errors import ModelError
from chunkrt.gate import Gate


class Verification:
    """Reads files in a thread of its own, from construction on. As a context it is stopped where the body fails.

    Args:
        folder, manifest: an engine directory and what it says of itself; the sizes of the files are known to be right.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        large = {name: found for name, (size, found) in manifest.files.items() if size > HASHED_WHEN_READ}
        self._error: BaseException | None = None
        self._is_stopped = Event()
        self._end = Gate()  # joining a thread would not do: in Python 3.11 an interrupt of it makes it seem over
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
        """Whether `wait` would come back at once."""
        return self._end.is_open

    def wait(self) -> None:
        """Come back when all files have proved whole. Raises ModelError if one is not, or cannot be read."""
        self._end.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End it early; `wait` then says nothing of what was left."""
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
        """Hold one file against what was recorded of it, unless all has been stopped."""
        try:
            found = digest(path, recorded.partition(":")[0], self._is_stopped.is_set)
        except OSError as error:
            raise ModelError(f"{path} cannot be read ({error.strerror or error}); compile the model again") from error
        if found != recorded and not self._is_stopped.is_set():
            raise ModelError(f"{path} is not what was written when the model was compiled; compile it again")
