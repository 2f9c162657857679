"""Large files of an engine directory are held against the manifest while the rest of a model is loaded.

Small ones have been before; these would keep a start waiting. Nothing is computed from them until they have proved
whole: the first run waits for the end.
"""

from __future__ import annotations

import threading
from pathlib import Path

from chunkrt.engine_directory.manifest import HASHED_WHEN_READ, Manifest, digest
from chunkrt.errors import ModelError


class Verification:
    """Reads files in a thread of its own, from construction on.

    Args:
        folder, manifest: an engine directory and what it says of itself; the sizes of the files are known to be right.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        large = {name: found for name, (size, found) in manifest.files.items() if size > HASHED_WHEN_READ}
        self._error: ModelError | None = None
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._verify, args=(folder, large), name="verification", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would come back at once."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Come back when all files have proved whole. Raises ModelError if one is not, or cannot be read."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End it early; `wait` then says nothing of what was left."""
        self._is_stopped.set()
        self._thread.join()

    def _verify(self, folder: Path, expected: dict[str, str]) -> None:
        for name, recorded in expected.items():
            path = folder / name
            try:
                found = digest(path, recorded.partition(":")[0], self._is_stopped.is_set)
            except OSError as error:
                self._error = ModelError(f"{path} cannot be read ({error.strerror or error}); compile the model again")
                return
            if self._is_stopped.is_set():
                return
            if found != recorded:
                self._error = ModelError(
                    f"{path} is not what was written when the model was compiled; compile it again"
                )
                return
