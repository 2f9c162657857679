"""A running server, measured over HTTP with many clients: any that implements OpenAI's completions.

Requests arrive at the times of a Poisson process, regardless of earlier answers, so that the figures reveal a server
that is too slow for the rate. Each event of the stream that has a choice counts as a token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np

from peers.command import writable

WORDS = ("river", "old", "quiet", "stone", "green", "bird", "carries", "morning", "light", "bridges", "people", "home")
PERCENTILES = (50, 95, 99)
TIMEOUT_S = 600.0


@dataclass
class Asked:
    """A request: its due time, and the time of each token, in seconds from the first; `error`: reason of a failure."""

    arrival: float
    times: list[float] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits in seconds of a good answer: to its first token, and from each token to the next on average."""

    first_s: float
    gap_s: float

    def hold(self, asked: Asked) -> bool:
        """Return True if an answer is complete and in time."""
        if asked.error or not asked.times:
            return False
        mean_gap = (asked.times[-1] - asked.times[0]) / max(len(asked.times) - 1, 1)
        return asked.times[0] - asked.arrival <= self.first_s and mean_gap <= self.gap_s


def figures(requests: Sequence[Asked], bounds: Bounds) -> dict[str, Any]:
    """Return the figures of a round. Rates count from the first arrival to the last token; without answers all are
    missing.
    """
    answered = [asked for asked in requests if asked.times and not asked.error]
    errors = sorted({asked.error for asked in requests if asked.error})
    found: dict[str, Any] = {"requests": len(requests), "answered": len(answered), "errors": errors}
    if not answered:
        return found
    seconds = max(asked.times[-1] for asked in answered) - min(asked.arrival for asked in requests)
    first = [asked.times[0] - asked.arrival for asked in answered]
    gaps = [later - earlier for asked in answered for earlier, later in pairwise(asked.times)]
    found["tokens/s"] = sum(len(asked.times) for asked in answered) / seconds
    found["requests/s"] = len(answered) / seconds
    found["goodput, requests/s"] = sum(map(bounds.hold, answered)) / seconds
    for name, values in (("first token", first), ("gap", gaps)):
        for percentile in PERCENTILES:
            value = float(np.percentile(values, percentile)) if values else None
            found[f"{name} p{percentile}, s"] = value
    return found


async def ask_all(
    url: str, model: str | None, prompts: Sequence[str], arrivals: Sequence[float], new_tokens: int, api_key: str
) -> list[Asked]:
    """Request all answers from a server, each at its time.

    Raises:
        ClickException: the server does not exist, or serves no model.
    """
    headers = {"Authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, timeout=TIMEOUT_S, limits=limits) as http:
        try:
            listed = await http.get("/models")
            listed.raise_for_status()
            name = model or listed.json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise click.ClickException(f"{url}/models: {error}; give the URL up to and including /v1") from error
        start = time.perf_counter()
        one_by_one = (
            _ask(http, name, prompt, arrival, new_tokens, start)
            for prompt, arrival in zip(prompts, arrivals, strict=True)
        )
        return await asyncio.gather(*one_by_one)


async def _ask(
    http: httpx.AsyncClient, model: str, prompt: str, arrival: float, new_tokens: int, start: float
) -> Asked:
    asked = Asked(arrival)
    await asyncio.sleep(max(start + arrival - time.perf_counter(), 0))
    body = {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True}
    try:
        async with http.stream("POST", "/completions", json=body) as answer:
            if answer.status_code != 200:
                asked.error = f"status {answer.status_code}"
                return asked
            async for line in answer.aiter_lines():
                if not line.startswith("data:") or (data := line.removeprefix("data:").strip()) == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    asked.error = str(event["error"])
                elif event.get("choices"):
                    asked.times.append(time.perf_counter() - start)
    except (httpx.HTTPError, ValueError) as error:
        asked.error = f"{type(error).__name__}: {error}"
    if not asked.times and not asked.error:
        asked.error = "no token"
    return asked


def poisson_arrivals(random: np.random.Generator, rate: float, number: int) -> list[float]:
    """Return arrival times in seconds, the first at 0."""
    gaps = random.exponential(1 / rate, number)
    times: list[float] = (np.cumsum(gaps) - gaps[0]).tolist()
    return times


@click.command()
@click.option(
    "--url",
    "urls",
    multiple=True,
    required=True,
    help="URL of a server, up to and including /v1; several servers take turns.",
)
@click.option("--model", help="Model to request; by default the first that the server lists.")
@click.option("--api-key-file", type=click.Path(exists=True, path_type=Path), help="API key of the servers.")
@click.option("--requests", "number", type=click.IntRange(1), default=64, show_default=True, help="Of a round.")
@click.option(
    "--rate", "rates", type=click.FloatRange(0, min_open=True), multiple=True, default=(1.0,), help="Requests a second."
)
@click.option("-p", "--prompt-words", type=click.IntRange(1), default=256, show_default=True)
@click.option("-n", "--new-tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option("--first-bound", type=click.FloatRange(0), default=2.0, show_default=True, help="Seconds, for goodput.")
@click.option("--gap-bound", type=click.FloatRange(0), default=0.2, show_default=True, help="Seconds, for goodput.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random words and arrivals.")
@click.option("--json", "json_file", callback=writable, help="Write the figures to this file.")
def remote(
    urls: Sequence[str],
    model: str | None,
    api_key_file: Path | None,
    number: int,
    rates: Sequence[float],
    prompt_words: int,
    new_tokens: int,
    first_bound: float,
    gap_bound: float,
    seed: int,
    json_file: Path | None,
) -> None:
    """Measure running servers: time to first token, gaps between tokens, and goodput within bounds."""
    random, bounds = np.random.default_rng(seed), Bounds(first_s=first_bound, gap_s=gap_bound)
    api_key = "none" if api_key_file is None else api_key_file.read_text("utf-8").strip()
    rows = []
    for rate in rates:
        prompts = [" ".join(random.choice(WORDS, prompt_words)) for _ in range(number)]
        arrivals = poisson_arrivals(random, rate, number)
        for url in urls:
            asyncio.run(ask_all(url, model, [" ".join(random.choice(WORDS, 8))], [0.0], 2, api_key))  # warm-up
            requests = asyncio.run(ask_all(url, model, prompts, arrivals, new_tokens, api_key))
            rows.append({"server": url, "rate, requests/s": rate, **figures(requests, bounds)})
    columns = [name for name in max(rows, key=len) if name != "errors"]
    click.echo(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for row in rows:
        click.echo(f"| {' | '.join(_cell(row.get(name)) for name in columns)} |")
    for row in rows:
        for error in row["errors"]:
            click.echo(f"{row['server']} at {row['rate, requests/s']:g}/s: {error}", err=True)
    if json_file:
        json_file.write_text(json.dumps(rows, indent=1), "utf-8")


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
