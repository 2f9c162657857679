"""`chunkrt tune`: search the best settings for a model on a device, by simulation."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import get_args

import click

from chunkrt.cli.command import GroupedCommand, json_option, model_argument, option, plot_option
from chunkrt.cli.plots import draw_tuned
from chunkrt.cli.shared_options import DEFAULT_UNIT, engine_fields, verbose_option
from chunkrt.cli.simulate import accuracy_of, device_option, graph_lengths
from chunkrt.engine.arguments import read_size
from chunkrt.engine.declaration import number_flag
from chunkrt.errors import ConfigError
from chunkrt.files import write_text
from chunkrt.graph.placement import read_placement
from chunkrt.pictures import check_picture
from chunkrt.progress import ShownProgress
from chunkrt.quant.scheme import SCHEMES
from chunkrt.simulate import MeasuredProfile, find_device
from chunkrt.simulate.arrivals import CLOSED, MOST_TOKENS, draw
from chunkrt.simulate.partition_search import Objective
from chunkrt.simulate.quality import read_quality
from chunkrt.simulate.simulator import chunk_text, graphs_text
from chunkrt.simulate.tune import Setup, Tuned
from chunkrt.simulate.tune import tune as search

NUM_SHOWN = 12

MOST_COLUMNS = 6
"""Largest number of prompt lengths whose times are printed."""

NUM_DRAWN = 20
"""Number of prompt lengths that are drawn from a distribution."""


@click.command(
    cls=GroupedCommand,
    first="device_name output prompt_lengths chunk_lengths scheme quality_files budget_text memory pareto as_json",
)
@model_argument
@device_option
@option(
    "-o",
    "--output",
    group="Output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="TOML file to write, for --settings of other commands.",
)
@option(
    "-p",
    "--prompt-lengths",
    group="Workload",
    default="512",
    show_default=True,
    help="Prompt lengths in tokens, ranked by the geometric mean of the times to first token (a length that occurs "
    "several times counts several times); or a mix: uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA, of which 20 are drawn, "
    "or a file with one number a line.",
)
@option(
    "--chunk",
    "chunk_lengths",
    group="Search",
    multiple=True,
    metavar="TOKENS[,TOKENS...]",
    help="Chunk length to search, or several lengths of graphs on the NPU, as in 1,8,32; repeat the option to search "
    "several.  [default: 32 to 512, or as profiled]",
)
@option(
    "--npu-sinks",
    "npu_sinks",
    group="Search",
    type=click.IntRange(min=0),
    help="Let the longest window of attention on the NPU slide, with this number of first tokens in sight. An "
    "approximation, whose quality is not searched.  [default: the CPU attends to longer histories]",
)
@option(
    "--place",
    "placements",
    group="Search",
    multiple=True,
    type=click.Path(path_type=Path),
    help="TOML file of a placement to search, in addition to the default one, or layers=N,N,... to put only these "
    "decoder layers on the NPU; may be repeated.",
)
@option(
    "--scheme",
    group="Quantisation",
    type=click.Choice(list(SCHEMES)),
    help="Quantisation of weights and activations.  [default: those of --quality; else w8a16, or as profiled]",
)
@engine_fields("shadow")
@option(
    "--quality",
    "quality_files",
    group="Quantisation",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Output of `chunkrt eval --as-npu --json`; repeat it to search its scheme and shadows with others. The "
    "divergence becomes an axis of --pareto.",
)
@option(
    "--budget",
    "budget_text",
    group="Quantisation",
    metavar="kl=NATS",
    help="Largest mean KL divergence from the base. It needs --quality.  [default: no limit]",
)
@option(
    "--objective",
    group="Search",
    type=click.Choice(get_args(Objective)),
    default="time",
    show_default=True,
    help="Minimise time to first token (1 % of it is worth 10 % of the energy), energy, their product (edp), or the "
    "95th percentile of the times to first token of all prompts, or of all requests of --arrivals (p95).",
)
@option(
    "--arrivals",
    group="Workload",
    metavar="poisson:RATE",
    help="For --objective p95: prompts arrive at RATE per second on average, and wait for each other.  [default: no "
    "prompt waits]",
)
@option("--seed", "arrival_seed", group="Workload", type=int, help="Random seed of the arrivals.  [default: 0]")
@option("--memory", group="Search", help="Memory limit, e.g. 2GB or 800MB.  [default: no limit]")
@option(
    "--dask",
    group="Search",
    help="Address of a Dask scheduler whose workers run the simulations.  [default: this machine]",
)
@option(
    "--pareto",
    group="Output",
    is_flag=True,
    help="Print the choices that no other one exceeds in time, memory, energy or divergence, in place of the fastest.",
)
@plot_option("Draw time over memory as .png or .svg (needs matplotlib).")
@json_option("Print the best, the default and all simulated settings as JSON.")
@verbose_option
def tune(
    model: str,
    device_name: str,
    output: Path,
    prompt_lengths: str,
    chunk_lengths: tuple[str, ...],
    npu_sinks: int | None,
    placements: tuple[Path, ...],
    scheme: str | None,
    shadow: str | None,
    quality_files: tuple[Path, ...],
    budget_text: str | None,
    objective: Objective,
    arrivals: str | None,
    arrival_seed: int | None,
    memory: str | None,
    dask: str | None,
    pareto: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Search the best settings for MODEL, or a built-in shape without weights, on a device.

    All combinations of chunk length, partition, policy and chunks in flight are simulated, with attention on the CPU
    and on the NPU, under each scheme that --quality measures. Then an optimiser cuts the graph module by module. Among
    the choices within the limits of memory and divergence and within 1 % of the best objective, the one with the least
    memory is taken. The result is a file for --settings of run, chat, bench and compile.
    """
    _check_output(output)
    if plot is not None:
        check_picture(plot)
    if budget_text is not None and not quality_files:
        raise ConfigError("--budget needs measured divergences; give --quality FILE, or omit it")
    if arrivals is None and arrival_seed is not None:
        raise ConfigError("--seed is for random arrivals; give --arrivals, e.g. poisson:1, or omit it")
    budget = None if budget_text is None else _nats(budget_text)
    device = find_device(device_name)
    prompts = _prompts(prompt_lengths)
    chunks: list[int | str] = []
    for lengths in (graph_lengths("--chunk", text) for text in chunk_lengths):
        chunks.append(graphs_text(lengths) if len(lengths) > 1 else lengths[0])
    memory_bytes = None if memory is None else read_size("--memory", memory, unit=DEFAULT_UNIT)
    with ShownProgress() as progress:
        tuned = search(
            model,
            device_name,
            prompt_lengths=prompts,
            scheme=scheme,
            chunk_lengths=chunks or None,
            npu_sinks=npu_sinks,
            placements={str(path): read_placement(path) for path in placements},
            shadow=shadow,
            qualities=[read_quality(path) for path in quality_files],
            budget=budget,
            memory_bytes=memory_bytes,
            objective=objective,
            arrivals=arrivals,
            seed=arrival_seed or 0,
            dask=dask,
            progress=progress,
        )
        progress("", 0, 0)
    write_text(output, tuned.to_toml())
    if isinstance(device, MeasuredProfile):
        click.echo(
            f"{device.name} was measured with scheme {device.scheme}, chunks of "
            f"{chunk_text(device.chunk_length, device.graph_lengths)} and one partition; only policy and chunks in "
            "flight were searched",
            err=True,
        )
    for name, reason in tuned.left_out.items():
        click.echo(f"skipped {name}: {reason}", err=True)
    if plot is not None:
        draw_tuned(tuned, plot)
    if as_json:
        click.echo(json.dumps(_summary(tuned), indent=1))
    else:
        _print(tuned, tuned.pareto if pareto else None)
        _print_searched(tuned)
        click.echo(accuracy_of(tuned.device))
        click.echo(f"wrote {output}", err=True)


def _check_output(path: Path) -> None:
    """Raise ConfigError, before the search, if the output file cannot be written."""
    if path.suffix != ".toml":
        raise ConfigError(f"-o is {path}, expected a name that ends in .toml")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: {path.parent} is not writable")


def _prompts(text: str) -> list[int]:
    """Return the prompt lengths of -p: numbers, or a mix as `chunkrt simulate --prompt` takes it."""
    is_file = "," not in text and Path(text).is_file()
    if not (is_file or text.startswith(("uniform:", "lognormal:"))):
        others = "uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, or a file; there is no such file"
        return _numbers("-p", text, f"; {others}" if "," not in text else "")
    number = max(1, len(Path(text).read_bytes().split())) if is_file else NUM_DRAWN
    load = draw(CLOSED, text, "1", requests=number, context_length=2 * MOST_TOKENS)
    return [request.prompt for request in load.requests]


def _nats(text: str) -> float:
    read = number_flag("--budget", "kl=NATS, as in kl=0.01", prefix="kl=")
    nats = float(read(text))
    if not 0 < nats < inf:
        raise ConfigError(f"--budget is {text!r}, expected a number of nats above 0, as in kl=0.01")
    return nats


def _numbers(option: str, text: str, others: str = "") -> list[int]:
    """Return the numbers of an option; `others` names its other forms in an error."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(
            f"{option} is {text!r}, expected numbers of at least 1, separated by commas, e.g. 64,256{others}"
        )
    return numbers


def _summary(tuned: Tuned) -> dict[str, object]:
    return {
        "model": tuned.model,
        "origin": "predicted",
        "device": tuned.device.name,
        "scheme": tuned.scheme,
        "prompt_lengths": tuned.prompt_lengths,
        "shadow": tuned.shadow,
        "memory_bytes": tuned.memory_bytes,
        "objective": tuned.objective,
        "budget": tuned.budget,
        "arrivals": None if tuned.queue is None else tuned.queue.arrivals,
        "seed": None if tuned.queue is None else tuned.queue.seed,
        "settings": tuned.settings,
        "best": asdict(tuned.best),
        "default": asdict(tuned.default),
        "bound": tuned.bound,
        "gap": tuned.gap,
        "searched": [
            asdict(each) | {"rule_cut": each.rule_cut._asdict(), "found_cut": each.found_cut._asdict()}
            for each in tuned.searched
        ],
        "pareto": [asdict(choice) for choice in tuned.pareto],
        "choices": [asdict(choice) for choice in tuned.choices],
        "left_out": tuned.left_out,
    }


def _print(tuned: Tuned, front: Sequence[Setup] | None) -> None:
    prompts = list(dict.fromkeys(tuned.prompt_lengths))
    lengths = ", ".join(map(str, prompts)) if len(prompts) <= MOST_COLUMNS else f"{min(prompts)} to {max(prompts)}"
    waiting = "" if tuned.queue is None else f" with arrivals {tuned.queue.arrivals} (seed {tuned.queue.seed})"
    click.echo(
        f"{tuned.model} on {tuned.device.name}, {_schemes(tuned)}, prompts of {lengths} tokens, "
        f"objective {tuned.objective}{waiting}; {tuned.num_simulated} choices simulated"
    )
    fitting = [choice for choice in tuned.choices if tuned.fits(choice)]
    if tuned.memory_bytes is not None:
        click.echo(
            f"{len(fitting)} of the {len(tuned.choices)} that differ stay within {tuned.memory_bytes / 1e6:.0f} MB"
        )
    is_several = 1 < len(prompts) <= MOST_COLUMNS
    each = [f"ms {length}" for length in prompts] if is_several else []
    each += ["p95"] if tuned.objective == "p95" else []
    has_quality = tuned.best.mean_kl is not None
    quality = ["KL", "shadows"] if has_quality else []
    names = ["scheme"] if has_quality else []
    head = [
        "ms",
        *each,
        "gain",
        "MB",
        "joules",
        *quality,
        "chunk",
        "in flight",
        *names,
        "policy",
        "attention",
        "partition",
        "",
    ]
    shown = fitting[:NUM_SHOWN] if front is None else [*front]
    shown += [choice for choice in (tuned.best, tuned.default) if choice not in shown]
    _print_table(
        [head, *(_cells(choice, tuned, is_several=is_several) for choice in shown)], len(head) - 4 - len(names)
    )


def _schemes(tuned: Tuned) -> str:
    """Return the searched schemes as text."""
    names = list(dict.fromkeys(str(choice.quantisation["scheme"]) for choice in tuned.choices))
    limit = "" if tuned.budget is None else f" within kl={tuned.budget:g}"
    return f"scheme{'s' if len(names) > 1 else ''} {', '.join(names)}{limit}"


def _print_searched(tuned: Tuned) -> None:
    """Print the partitions of the searches next to those of the rule, and the gap to the lower bound."""
    if tuned.searched:
        click.echo("partitions by the rule and by the optimiser, before the search of policies:")
        has_quality = tuned.best.mean_kl is not None
        names = ["scheme"] if has_quality else []
        head = ["chunk", "npu", "cpu", "values", "ms", "joules", "MB", "above bound", *names]
        head += ["attention", "partition", ""]
        table = [head]
        for each in tuned.searched:
            exact = "no partition is better" if each.is_exact else f"{each.num_simulated} simulated"
            for setup, cut, how in ((each.rule, each.rule_cut, ""), (each.found, each.found_cut, exact)):
                if setup is None:
                    continue
                figures = [f"{setup.time_ms:.1f}", _joules(setup), f"{setup.peak_memory_bytes / 1e6:.1f}"]
                above = f"{setup.cost(tuned.objective) / each.bound - 1:.1%}"
                if tuned.queue is not None and setup.p95_ms is None:
                    above = "overloaded"
                sizes = [each.graphs or str(each.chunk_length), *map(str, cut)]
                names = [str(setup.quantisation["scheme"])] if has_quality else []
                table.append([*sizes, *figures, above, *names, setup.attention, setup.partition, how])
        _print_table(table, 8)
    if tuned.gap is not None:
        limit = "" if tuned.memory_bytes is None else ", without the memory limit"
        click.echo(
            f"the objective of the choice is within {max(0.0, tuned.gap):.1%} of a lower bound over all partitions, "
            f"policies and chunks in flight{limit}"
        )


def _print_table(table: Sequence[Sequence[str]], num_right: int) -> None:
    """Print rows in columns, of which the first are aligned on the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [c.rjust(w) if i < num_right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        click.echo("  ".join(cells).rstrip())


def _p95(choice: Setup) -> str:
    return "overloaded" if choice.p95_ms is None else f"{choice.p95_ms:.1f}"


def _joules(choice: Setup) -> str:
    return "" if choice.energy_joules is None else f"{choice.energy_joules:.2f}"


def _cells(choice: Setup, tuned: Tuned, *, is_several: bool) -> list[str]:
    marks = ["chosen"] if choice == tuned.best else []
    if choice == tuned.default:
        marks.append("default" if tuned.fits(choice) else "default, exceeds the memory limit")
    return [
        f"{choice.time_ms:.1f}",
        *(
            f"{time:.1f}"
            for time in dict(zip(tuned.prompt_lengths, choice.times_ms, strict=True)).values()
            if is_several
        ),
        *([_p95(choice)] if tuned.objective == "p95" else []),
        f"{tuned.default.time_ms / choice.time_ms:.2f}x",
        f"{choice.peak_memory_bytes / 1e6:.1f}",
        _joules(choice),
        *([] if choice.mean_kl is None else [f"{choice.mean_kl:.4f}", str(choice.num_shadows)]),
        choice.graphs or str(choice.chunk_length),
        "auto" if choice.chunks_in_flight is None else str(choice.chunks_in_flight),
        *([] if choice.mean_kl is None else [str(choice.quantisation["scheme"])]),
        choice.policy,
        choice.attention,
        choice.partition,
        ", ".join(marks),
    ]
