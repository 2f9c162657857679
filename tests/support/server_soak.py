"""Soak test of a server: many clients send requests, and a third of the requests are dropped before they end.

    python tests/support/server_soak.py smollm2-135m-instruct --clients 64 --seconds 120

runs `chunkrt serve` as a process, checks its answers and its memory, and prints a line of JSON. The exit status is 1 if
a check fails. Unknown options are passed to `chunkrt serve`. For example, two clients of an emulated NPU are

    python tests/support/server_soak.py smollm2-135m-instruct --clients 2 --npu qnn --soc SM8650 --context 512
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

MOST_GROWTH = 0.02
"""Largest growth of the server's memory, as a share of its memory after the warm-up."""
WARM_UP = 1200
"""Number of requests after which memory stays the same. They fill caches and pools, and a slow machine needs more time
for them.
"""
SETTLES_SECONDS = 30.0
PROMPTS = ["hello there " * (1 + i % 5) + "good day" * (i % 3) + " " + "you" * i for i in range(12)]
"""Prompts of several lengths; some have the same beginning."""


@dataclass
class Soaked:
    """Result of a soak test. `wrong` has pairs of an expected and an actual answer. Memory is resident, in MiB."""

    answered: int = 0
    dropped: int = 0
    refused: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    memory_before: float = 0.0
    memory_after: float = 0.0
    sequences_left: int = 0

    @property
    def num_requests(self) -> int:
        """Number of requests so far, with any outcome."""
        return self.answered + self.dropped + self.refused + self.failed.total()

    @property
    def growth(self) -> float:
        """Growth of memory as a share of the memory before."""
        return self.memory_after / self.memory_before - 1

    @property
    def complaints(self) -> list[str]:
        """Failed checks, as sentences."""
        found = [f"{count} times {what}" for what, count in self.failed.items()]
        if self.wrong:
            found.append(f"{len(self.wrong)} answers differ from those of single requests; the first: {self.wrong[0]}")
        if self.sequences_left:
            found.append(f"{self.sequences_left} sequences remain")
        if not self.answered or not self.dropped:
            found.append(f"{self.answered} were answered and {self.dropped} dropped; expected some of both")
        return found


@contextmanager
def server(model: str | Path, *options: str) -> Iterator[tuple[str, int]]:
    """Run a server as a process, yield its URL and process id, and check that it ends without an error."""
    place = str(Path(model).resolve()) if Path(model).exists() else str(model)
    command = [sys.executable, "-m", "chunkrt", "serve", place, "--port", "0", *options]
    elsewhere = tempfile.gettempdir()  # not in a folder that may contain the package's source
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=elsewhere)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"served at (http://\S+)", line):
                break
        else:
            raise RuntimeError("".join(lines))
        yield found[1], process.pid
    finally:
        process.terminate()
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 0, (process.returncode, said)
        assert "Traceback" not in said, said


def resident_mib(process_id: int) -> float:
    """Return the resident memory of a process, in MiB. Linux only."""
    status = Path(f"/proc/{process_id}/status").read_text("ascii")
    (kib,) = re.findall(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    return int(kib) / 1024


def body(prompt: str, new_tokens: int, **more: Any) -> dict[str, Any]:
    """Return a greedy request, whose answer is known."""
    return {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, **more}


async def soak(
    url: str,
    process_id: int,
    *,
    clients: int,
    seconds: float,
    new_tokens: int,
    warm_up: int = 0,
    prompts: Sequence[str] = PROMPTS,
) -> Soaked:
    """Run clients for `seconds`, after a warm-up of a fifth of that time, and at least `warm_up` requests."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        alone = {p: await _whole(http, body(p, new_tokens)) for p in prompts}
        soaked = Soaked()
        for share, least in ((0.2, warm_up), (1.0, 0)):
            soaked = Soaked(memory_before=soaked.memory_after)
            until = time.monotonic() + share * seconds
            asking = (_client(http, index, until, least, alone, new_tokens, soaked) for index in range(clients))
            await asyncio.gather(*asking)
            soaked.sequences_left = await _left(http)
            soaked.memory_after = resident_mib(process_id)
        for prompt, text in alone.items():
            if (again := await _whole(http, body(prompt, new_tokens))) != text:
                soaked.wrong.append((text, again))
        return soaked


async def _whole(http: httpx.AsyncClient, request: dict[str, Any]) -> str:
    answer = await http.post("/v1/completions", json=request)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


async def _client(
    http: httpx.AsyncClient,
    index: int,
    until: float,
    least: int,
    alone: dict[str, str],
    new_tokens: int,
    soaked: Soaked,
) -> None:
    """Send requests one after another, until that time and until all clients together have sent `least`; drop a third
    of them before the answer is complete.
    """
    chance = random.Random(index)
    while time.monotonic() < until or soaked.num_requests < least:
        prompt = chance.choice(list(alone))
        goes, streams = chance.random() < 1 / 3, chance.random() < 0.5
        request = body(prompt, new_tokens, stream=streams)
        try:
            if goes:
                await _go(http, request | {"n": chance.choice((1, 1, 2))}, chance)
                soaked.dropped += 1
                continue
            text = await (_streamed(http, request) if streams else _whole(http, request))
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 503:
                soaked.failed[f"status {error.response.status_code}"] += 1
            soaked.refused += 1
            await asyncio.sleep(0.2)
        except httpx.HTTPError as error:
            soaked.failed[type(error).__name__] += 1
        else:
            soaked.answered += 1
            if text != alone[prompt]:
                soaked.wrong.append((alone[prompt], text))


async def _go(http: httpx.AsyncClient, request: dict[str, Any], chance: random.Random) -> None:
    """Send a request and close the connection at a random time, before or after the first tokens."""
    num_events = chance.randrange(4)
    try:
        async with asyncio.timeout(chance.choice((0.01, 0.1, 1.0, 10.0))):
            async with http.stream("POST", "/v1/completions", json=request) as answer:
                answer.raise_for_status()
                async for _ in answer.aiter_lines():
                    num_events -= 1
                    if num_events < 0:
                        return
    except TimeoutError:
        pass


async def _streamed(http: httpx.AsyncClient, request: dict[str, Any]) -> str:
    text = ""
    async with http.stream("POST", "/v1/completions", json=request) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                text += event["choices"][0]["text"] if event.get("choices") else ""
    return text


async def _left(http: httpx.AsyncClient) -> int:
    """Return the number of sequences that remain after the server has had time to detect closed connections."""
    latest = time.monotonic() + SETTLES_SECONDS
    while True:
        stats = (await http.get("/stats")).json()
        left: int = stats["sessions"] + stats["active_sequences"] + stats["waiting_requests"]
        if not left or time.monotonic() > latest:
            return left
        await asyncio.sleep(0.1)


def main() -> int:
    """Run the soak test on a model, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="A catalogue name, a checkpoint or an engine directory.")
    parser.add_argument("--clients", type=int, default=64, help="Number of concurrent clients (64).")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="Duration, after a warm-up of at least a fifth of it (120)."
    )
    parser.add_argument("--new-tokens", type=int, default=24, help="Tokens per answer (24).")
    given, options = parser.parse_known_args()
    with server(given.model, *options) as (url, process_id):
        soaked = asyncio.run(
            soak(
                url,
                process_id,
                clients=given.clients,
                seconds=given.seconds,
                new_tokens=given.new_tokens,
                warm_up=WARM_UP,
            )
        )
    complaints = soaked.complaints
    if abs(soaked.growth) > MOST_GROWTH:
        complaints.append(f"memory changed by {soaked.growth:+.1%}")
    print(json.dumps(asdict(soaked) | {"growth": soaked.growth, "complaints": complaints}))
    return len(complaints) > 0


if __name__ == "__main__":
    sys.exit(main())
