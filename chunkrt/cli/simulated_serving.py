"""`chunkrt simulate --arrivals`: predict the speed of a server whose sequences share chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path

import click

from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.batcher import DEFAULT_BATCHER
from chunkrt.runtime.executor import DecodeOn
from chunkrt.runtime.trace.file import write_trace
from chunkrt.simulate import DeviceProfile, MeasuredProfile
from chunkrt.simulate.arrivals import Load, draw
from chunkrt.simulate.partition_search import Lengths
from chunkrt.simulate.serving import Serving, Spread, simulate_serving


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Options that need --arrivals; None if not given."""

    arrivals: str | None
    prompt: str | None
    generate: str | None
    sessions: int | None
    requests: int | None
    seed: int | None
    batcher: str | None
    decode_on: DecodeOn | None

    def check(self, prompt_lengths: str | None, ranks: int, link_name: str | None) -> None:
        """Raise ConfigError for options of the other kind of simulation."""
        if self.arrivals is None:
            for field in fields(self):
                if getattr(self, field.name) is not None:
                    raise ConfigError(
                        f"{_option(field.name)} is for a simulated server; give --arrivals, e.g. poisson:1"
                    )
            return
        if prompt_lengths is not None:
            raise ConfigError("-p is for single prompts; use --prompt with --arrivals")
        if ranks != 1 or link_name is not None:
            raise ConfigError("a server with several ranks cannot be simulated; omit --ranks and --link")
        for name in ("prompt", "generate"):
            if getattr(self, name) is None:
                raise ConfigError(f"--arrivals needs {_option(name)}, e.g. {_option(name)} 128")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def simulate_served(
    model: str,
    plan: Plan,
    device: DeviceProfile | MeasuredProfile,
    options: ServingOptions,
    *,
    chunks: Sequence[Lengths],
    policies: Sequence[str],
    scheme: Scheme,
    chunks_in_flight: int | None,
    threads: int | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Simulate a server with every chunk length and policy, and print its figures."""
    assert options.arrivals is not None
    assert options.prompt is not None
    assert options.generate is not None
    load = draw(
        options.arrivals,
        options.prompt,
        options.generate,
        requests=256 if options.requests is None else options.requests,
        context_length=plan.context_length,
        seed=options.seed or 0,
    )
    rows = [
        simulate_serving(
            plan,
            device,
            load,
            sessions=8 if options.sessions is None else options.sessions,
            chunk_length=lengths[-1],
            graph_lengths=lengths,
            policy=policy,
            scheme=scheme,
            batcher=options.batcher or DEFAULT_BATCHER,
            decode_on=options.decode_on or "auto",
            chunks_in_flight=chunks_in_flight,
            threads=threads,
        )
        for lengths, policy in product(chunks, policies)
    ]
    if trace is not None:
        write_trace(trace, rows[0].records(), f"chunkrt simulate {model}")
    if as_json:
        asked = {name: getattr(options, name) for name in ("arrivals", "prompt", "generate")}
        seed = {"seed": options.seed or 0}
        click.echo(
            json.dumps(
                [{"model": model, "origin": "predicted"} | asked | seed | row.to_dict() for row in rows], indent=1
            )
        )
    else:
        _print(model, options, load, rows)


def _print(model: str, options: ServingOptions, load: Load, rows: Sequence[Serving]) -> None:
    first = rows[0]
    click.echo(
        f"{model} on {first.device}, scheme {first.scheme}, batcher {first.batcher}: {first.requests} requests, "
        f"{options.arrivals}, at most {first.sessions} at once"
    )
    click.echo(
        f"prompts of {options.prompt}: {first.prompt_tokens} tokens; answers of {options.generate}: "
        f"{first.generated_tokens} tokens"
    )
    if load.num_cut:
        click.echo(f"{load.num_cut} requests were cut to the context length")
    width = max(5, *(len(row.chunks_text) for row in rows))
    line = "{:>" + str(width) + "}  {:13} {:>9} {:>9} {:>15} {:>15} {:>13} {:>6} {:>7} {:>7}  {}"
    head = ("chunk", "policy", "prompt/s", "new/s", "ttft ms", "queued ms", "gap ms", "rows", "packed", "padding")
    click.echo(line.format(*head, "busy"))
    for row in rows:
        padding = "-" if row.padding is None else f"{row.padding:.1%}"
        busy = ", ".join(f"{name} {share:.1%}" for name, share in row.busy.items())
        speeds = (f"{row.prompt_tokens_per_s:.1f}", f"{row.generated_tokens_per_s:.1f}")
        times = (_words(row.time_to_first_token_ms), _words(row.queue_ms), _words(row.gap_ms))
        fill = (f"{row.rows_per_chunk:.1f}", f"{row.packed:.1%}", padding)
        click.echo(line.format(row.chunks_text, row.policy, *speeds, *times, *fill, busy))
    click.echo(
        "Rates are tokens per second of prompts and of answers; times are the median and the 95th percentile; rows are "
        "the mean number of tokens per chunk."
    )


def _words(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.p50:.1f} {spread.p95:.1f}"
