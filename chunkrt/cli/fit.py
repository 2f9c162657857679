"""`chunkrt fit`: check whether a model fits a device, by its plan, before it is compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from chunkrt.backends.qnn.socs import GB, find_soc
from chunkrt.cli.command import STATUS_OF_NO, GroupedCommand, json_option, model_argument, option
from chunkrt.cli.plan import chosen_ranks, compiled_options, read_model
from chunkrt.cli.shared_options import engine_fields, ranks_options, refuse_without, settings_option, verbose_option
from chunkrt.engine.model_options import graph_lengths
from chunkrt.engine.options import EngineOptions
from chunkrt.engine_directory.manifest import is_engine_directory, read_manifest
from chunkrt.errors import ConfigError
from chunkrt.quant.scheme import DEFAULT_NPU_SCHEME, STATIC_SCHEMES
from chunkrt.simulate import shapes
from chunkrt.simulate.fit import USABLE_RAM, Fit, find_remedy, fit_plan
from chunkrt.simulate.models import find_model_shape
from chunkrt.simulate.simulator import chunk_text

FITTED_SETTINGS = (
    *("scheme", "chunk_length", "context_length", "placement", "shadow"),
    *("attention", "npu_window", "npu_graph", "npu_sinks", "weights"),
)
"""Settings of an engine on which its memory depends."""


@click.command(
    cls=GroupedCommand,
    first="soc_name ram_gb scheme chunk_length context_length attention npu_window npu_graph weights as_json",
    epilog=f"Built-in shapes: {', '.join(shapes())}.",
)
@model_argument
@option(
    "--soc",
    "--device",
    "soc_name",
    group="Devices",
    help="SoC of the device, e.g. SM8650, 8gen3 or sd8gen3.  [default: the settings' SoC]",
)
@option(
    "--scheme",
    group="Quantisation",
    type=click.Choice(STATIC_SCHEMES),
    help="Quantisation of weights and activations.  [default: w8a16, or as compiled]",
)
@option(
    "--chunk",
    "chunk_length",
    group="Execution",
    metavar="TOKENS[,TOKENS...]",
    help="Tokens per chunk; several lengths, as in 1,8,32, for a graph on the NPU for each.  [default: 32, or as "
    "compiled]",
)
@engine_fields("context_length", "placement", "shadow", "attention", "npu_window", "npu_graph", "npu_sinks", "weights")
@ranks_options
@option("--ram", "ram_gb", group="Devices", type=float, help="RAM of the device in GB.  [default: typical for the SoC]")
@json_option("Print a JSON object.")
@settings_option(*FITTED_SETTINGS, soc_name="soc")
@verbose_option
def fit(
    model: str,
    soc_name: str | None,
    scheme: str | None,
    chunk_length: str | int | None,
    context_length: int | None,
    ram_gb: float | None,
    as_json: bool,
    rank: int | None,
    size: int | None,
    **settings: Any,
) -> None:
    """Check whether MODEL fits a device: the NPU's address space, and the RAM.

    MODEL may also be a config.json without weights, or the name of a built-in shape.

    With --ranks, the share of one of several devices is checked.

    The exit status is 3 if it does not fit.
    """
    if soc_name is None:
        raise click.UsageError("Missing option '--soc' / '--device'. A settings file may name the SoC as well.")
    soc = find_soc(soc_name)
    if ram_gb is not None and not 0 < ram_gb < float("inf"):
        raise ConfigError(f"--ram is {ram_gb:g}, expected a number of GB above 0")
    ranks = chosen_ranks(model, rank, size)
    if not ranks.are_alone and settings["attention"] == "npu":
        raise ConfigError("--attention npu is not supported with several ranks; omit it")
    if settings["attention"] != "npu":
        refuse_without("--attention npu", "npu_window", "npu_graph", "npu_sinks")
    if scheme is None and find_model_shape(model) is not None:
        scheme = DEFAULT_NPU_SCHEME
    options = EngineOptions(
        npu="qnn", scheme=scheme, chunk_length=chunk_length, context_length=context_length, **settings
    )
    options = compiled_options(model, options)
    plan, found_scheme, longest = read_model(model, options, ranks)
    is_compiled = is_engine_directory(Path(model))
    context_length = options.context_length or plan.context_length
    result = fit_plan(
        plan,
        found_scheme,
        soc,
        chunk_length=longest,
        graph_lengths=graph_lengths(options, read_manifest(Path(model))) if is_compiled else options.chunk_lengths,
        context_length=context_length,
        ram_bytes=int(ram_gb * GB) if ram_gb else soc.typical_ram_bytes,
        options=options,
    )
    remedy = ""
    if result.problems:
        remedy = find_remedy(plan, found_scheme, result, is_compiled=is_compiled, options=options)
    if as_json:
        click.echo(json.dumps(result.to_dict() | {"remedy": remedy}, indent=1))
    else:
        _print(result, remedy, is_ram_guessed=ram_gb is None)
    if result.problems:
        raise click.exceptions.Exit(STATUS_OF_NO)


def _print(fit: Fit, remedy: str, *, is_ram_guessed: bool) -> None:
    products = f" ({', '.join(fit.soc.products)})" if fit.soc.products else ""
    click.echo(
        f"{fit.soc.name}{products}, scheme {fit.scheme}, chunks of {chunk_text(fit.chunk_length, fit.graph_lengths)}, "
        f"context of {fit.context_length}"
    )
    weights = sum(c.weight_bytes for c in fit.contexts)
    contexts = sum(c.context_bytes for c in fit.contexts)
    ram = f"{fit.ram_bytes / GB:g} GB" + (", a guess" if is_ram_guessed else "")
    rows = [
        ("weights of NPU linear layers", weights, ""),
        ("the rest of its contexts", contexts - weights, "estimated"),
        ("spilled from VTCM", sum(c.spill_bytes for c in fit.contexts), "estimated"),
        ("their float16 inputs and outputs", sum(c.edge_bytes for c in fit.contexts), ""),
        ("NPU", fit.npu_bytes, f"a session has {fit.soc.npu_window_bytes / 1e6:.0f}"),
        ("weights for the CPU", fit.cpu_weight_bytes, "a mapped file"),
        ("keys, values and states", fit.cache_bytes, "float16, recurrent ones float32, one conversation"),
        ("chunks in flight", fit.chunk_bytes, f"on {fit.soc.num_cores} cores"),
        ("RAM", fit.total_bytes, f"usable {fit.usable_ram_bytes / 1e6:.0f}: {USABLE_RAM:.0%} of {ram}"),
    ]
    click.echo(f"{'':32} {'MB':>10}")
    for name, num_bytes, note in rows:
        click.echo(f"{name:32} {num_bytes / 1e6:>10.1f}  {note}".rstrip())
    sizes = {context.name: context.num_bytes for context in fit.contexts}
    for number, names in enumerate(fit.sessions, 1):
        num_bytes = sum(sizes[name] for name in names)
        click.echo(f"NPU session {number}: {names[0]} to {names[-1]}, {num_bytes / 1e6:.1f} MB")
    if fit.problems:
        click.echo(f"does not fit: {'; '.join(fit.problems)}; try {remedy or 'a smaller model'}")
    else:
        click.echo("fits")
