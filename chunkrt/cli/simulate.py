"""`chunkrt simulate`: how fast a model would prefill on a device that is not here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product

import click

from chunkrt.cli.options import verbose_option
from chunkrt.cli.plan import read_model
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.options import EngineOptions
from chunkrt.quant.scheme import SCHEMES, Scheme, find_scheme
from chunkrt.runtime.policy import ALL, DEFAULT_POLICY, PLUGINS, POLICIES
from chunkrt.simulate import DEVICES, Simulation, find_device, find_shape, shapes
from chunkrt.simulate import simulate as simulate_prompt
from chunkrt.simulate.measured import MeasuredProfile

DEFAULT_DEVICE_SCHEME = "w8a16"

LEAST_SHARE = 0.0005
"""Of idle time that is worth a word."""


@click.command()
@click.argument("model")
@click.option(
    "--device", "device_name", required=True, help=f"{', '.join(DEVICES)}, or a file that `chunkrt profile` wrote."
)
@click.option("-p", "--prompt-lengths", default="64,256,1024", show_default=True, help="Tokens of a prompt.")
@click.option("--chunk", "chunk_lengths", help="Tokens of a chunk.  [default: 32,128,256, or as profiled]")
@click.option(
    "--policy", default=DEFAULT_POLICY, show_default=True, help=f"{', '.join(POLICIES)}, a plug-in's, or all."
)
@click.option("--scheme", type=click.Choice(list(SCHEMES)), help="Quantisation.  [default: w8a16, or as profiled]")
@click.option("--threads", type=int, help="Of those profiled.  [default: the most]")
@click.option("--in-flight", "chunks_in_flight", type=int, help="Chunks in flight.  [default: as many as an engine's]")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@verbose_option
def simulate(
    model: str,
    device_name: str,
    prompt_lengths: str,
    chunk_lengths: str | None,
    policy: str,
    scheme: str | None,
    threads: int | None,
    chunks_in_flight: int | None,
    as_json: bool,
) -> None:
    """Simulate the prefill of MODEL, or of a shape without weights, on a device by its profile."""
    device = find_device(device_name)
    scheme = scheme or (device.scheme if isinstance(device, MeasuredProfile) else DEFAULT_DEVICE_SCHEME)
    if chunk_lengths is None:
        chunk_lengths = str(device.chunk_length) if isinstance(device, MeasuredProfile) else "32,128,256"
    policies = [*POLICIES, *PLUGINS.load_all()] if policy == ALL else policy.split(",")
    prompts, chunks = _lengths("-p", prompt_lengths), _lengths("--chunk", chunk_lengths)
    plan, settled = _plan(model, scheme)
    rows = [
        simulate_prompt(
            plan,
            device,
            prompt_length=prompt,
            chunk_length=chunk,
            policy=name,
            scheme=settled,
            chunks_in_flight=chunks_in_flight,
            threads=threads,
        )
        for prompt, chunk, name in product(prompts, chunks, policies)
    ]
    if as_json:
        click.echo(json.dumps([{"model": model} | row.to_dict() for row in rows], indent=1))
    else:
        _print(model, rows)


def _lengths(option: str, text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"{option} is {text!r}, expected numbers of at least 1 with commas between, as in 64,256")
    return lengths


def _plan(model: str, scheme: str) -> tuple[Plan, Scheme]:
    """The plan of a shape, else of a model; and the scheme as its checkpoint lets it be."""
    if model in shapes():
        return find_shape(model).plan(), find_scheme(scheme)
    try:
        plan, settled, _ = read_model(model, EngineOptions(scheme=scheme))
    except ConfigError as error:
        raise ConfigError(f"{error}; shapes are: {', '.join(shapes())}") from error
    # Without an NPU here, a static scheme would be given what it does on CPUs.
    return plan, find_scheme(scheme) if settled.is_static else settled


def _print(model: str, rows: Sequence[Simulation]) -> None:
    click.echo(f"{model} on {rows[0].device}, scheme {rows[0].scheme}")
    line = "{:>6} {:>5}  {:13} {:>9} {:>9} {:>8} {:>8} {:>7} {:>7} {:>7}  {}"
    head = ("prompt", "chunk", "policy", "ttft ms", "tokens/s", "npu busy", "cpu busy", "overlap", "MB", "joules")
    click.echo(line.format(*head, "most idle for"))
    for row in rows:
        figures = (f"{row.time_to_first_token_ms:.1f}", f"{row.tokens_per_s:.1f}")
        shares = (f"{share:.1%}" for share in (row.npu_busy, row.cpu_busy, row.overlap))
        joules = "" if row.energy_joules is None else f"{row.energy_joules:.2f}"
        memory = f"{row.peak_memory_bytes / 1e6:.0f}"
        names = (row.prompt_length, row.chunk_length, row.policy)
        click.echo(line.format(*names, *figures, *shares, memory, joules, _most_idle(row)).rstrip())


def _most_idle(row: Simulation) -> str:
    """The largest cause of every processor's idle time."""
    parts = []
    for name, shares in row.processors.items():
        if idle := {cause: share for cause, share in shares.idle.items() if share >= LEAST_SHARE}:
            cause = max(idle, key=idle.__getitem__)
            parts.append(f"{name}: {cause} {idle[cause]:.1%}")
    return ", ".join(parts)
