"""A contender's process, as its controller sees it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from peers.contenders import Contender

BENCH = Path(__file__).parents[1]


class ContenderError(Exception):
    """A contender, or a form of the model, is unavailable; the message is one line."""


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a child process: modules of this folder, the number of OpenMP threads, and no network.

    Modules of the working folder are excluded: the source folder's chunkrt has no native module, and would hide the
    installed one.
    """
    paths = [str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])]
    pools = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return os.environ | pools | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


class ContenderProcess:
    """Starts a contender and sends it requests; as a context manager it ends it. Raises ContenderError on every
    failure.
    """

    def __init__(
        self, contender: Contender, *, python: str, model: Path, threads: int, context_length: int, log: Path
    ) -> None:
        arguments = [contender.engine, str(model), str(threads), str(context_length)]
        self._log = log
        with log.open("w", encoding="utf-8") as stderr:
            self._process = subprocess.Popen(
                [python, "-m", "peers.worker", *arguments, json.dumps(dict(contender.options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                encoding="utf-8",
                env=environment(threads),
            )
        try:
            found = self._answer()
        except BaseException:  # Ctrl-C too, while it loads
            self.kill()
            raise
        self.versions: Mapping[str, str] = found["versions"]
        self.settings: str = found["settings"]

    def ask(self, do: str, tokens: list[int]) -> dict[str, Any]:
        """Send one request of `worker`; return its answer."""
        return self._ask({"do": do, "tokens": tokens})

    def serve(self, prompts: list[list[int]], arrivals: list[float], new_tokens: int) -> list[dict[str, Any]]:
        """Let it answer prompts: the `tokens` of each answer, and their `times`."""
        request = {"do": "serve", "prompts": prompts, "arrivals": arrivals, "new_tokens": new_tokens}
        answers: list[dict[str, Any]] = self._ask(request)["answers"]
        return answers

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
        """Let it score pairs: the `scores`, the `rows` computed, those with padding (`padded`), and the `seconds`."""
        return self._ask({"do": "score", "pairs": pairs})

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and so the answer is missing
        return self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def close(self) -> None:
        """Let the process end, and wait for it."""
        try:
            self._process.communicate(timeout=60)
        except BaseException as error:
            self.kill()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise

    def kill(self) -> None:
        """Kill the process: its current result is not needed any more."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ContenderError(f"its process ended with status {self._process.wait()}: {last_line(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContenderError(answer["error"])
        return answer


def convert(engine: str, source: Path, target: Path, options: Mapping[str, Any], *, python: str) -> None:
    """Make one form of the model under a temporary name; then rename it. Raise ContenderError."""
    part, log = target.with_name(f"part-{target.name}"), target.with_name(f"{target.name}.log")
    shutil.rmtree(part, ignore_errors=True)  # remains of an interrupted conversion
    command = [python, "-m", "peers.convert", engine, str(source), str(part), json.dumps(dict(options))]
    with log.open("w", encoding="utf-8") as output:
        ended = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(os.cpu_count() or 1), check=False
        )
    if ended.returncode:
        raise ContenderError(f"{target.name} cannot be made: {last_line(log)}")
    part.rename(target)
