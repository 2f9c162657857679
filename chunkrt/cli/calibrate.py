"""`chunkrt calibrate`: measure the range of a model's values on a text, for the static schemes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.core import ParameterSource

from chunkrt.cli.calibration_files import opened_files, tokens_of_files
from chunkrt.cli.command import GroupedCommand, json_option, model_argument, option
from chunkrt.cli.shared_options import QUANTISATION_FIELDS, engine_fields, verbose_option
from chunkrt.compile.calibrate import cached_calibration
from chunkrt.compile.calibration_tokens import DEFAULT_NUM_TOKENS
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.compile.scheme_search import Choice, cached_choice
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import choose_recipe, find_checkpoint
from chunkrt.engine_directory.manifest import is_engine_directory
from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import check_writable
from chunkrt.graph.plan import Node, Plan, linear_nodes
from chunkrt.progress import ShownProgress
from chunkrt.quant.calibration import METHODS, Calibration, Method
from chunkrt.quant.merging import merge
from chunkrt.quant.residual_scaling import ResidualScaling, residual_scaling
from chunkrt.quant.scheme import DEFAULT_NPU_SCHEME

NUM_SHOWN = 5
_FILE = click.Path(path_type=Path)


@click.command(
    cls=GroupedCommand,
    first="texts chats ids method num_tokens scheme shadow output is_merge as_json",
)
@model_argument
@click.argument("further", metavar="", nargs=-1)
@option(
    "--text",
    "texts",
    group="Measurement",
    multiple=True,
    type=_FILE,
    help="UTF-8 text to measure on. May be given several times.  [default: a built-in text]",
)
@option(
    "--chats",
    group="Measurement",
    multiple=True,
    type=_FILE,
    help='Chats to measure on, as JSON lines {"messages": [...]}, in the model\'s chat template.',
)
@option(
    "--ids",
    group="Measurement",
    multiple=True,
    type=_FILE,
    help="Token ids to measure on, as .npy or as lines of numbers or JSON lists. They need no tokenizer.",
)
@option(
    "--method",
    group="Measurement",
    type=click.Choice(METHODS),
    default="mse",
    show_default=True,
    help="How the clipping range of 8-bit activations is chosen. absmax: the largest magnitude; percentile: the "
    "magnitude that 99.99 % of the values stay below; mse: the least square error. 16-bit ranges are never clipped.",
)
@option(
    "--tokens",
    "num_tokens",
    group="Measurement",
    type=int,
    help=f"Number of tokens to use. Several files share them equally.  [default: up to {DEFAULT_NUM_TOKENS}]",
)
@option(
    "--dask",
    group="Measurement",
    help="Address of a Dask scheduler whose workers share the tokens. Each worker needs MODEL at the same path.",
)
@option(
    "-o", "--output", group="Output", type=click.Path(path_type=Path), help="Write a copy of the result to this file."
)
@option(
    "--merge",
    "is_merge",
    group="Output",
    is_flag=True,
    help="Merge the calibrations of one model that are given in place of MODEL, e.g. A.npz B.npz, into the file of -o.",
)
@json_option("Print the summary as JSON.")
@engine_fields("adapter", *QUANTISATION_FIELDS)
@verbose_option
def calibrate(
    model: str,
    further: tuple[str, ...],
    is_merge: bool,
    texts: tuple[Path, ...],
    chats: tuple[Path, ...],
    ids: tuple[Path, ...],
    method: Method,
    num_tokens: int | None,
    dask: str | None,
    output: Path | None,
    as_json: bool,
    adapter: Path | None,
    **quantisation: Any,
) -> None:
    """Measure the activation ranges of MODEL: a catalogue name, a GGUF file, a Hugging Face folder or an ONNX decoder.

    Static schemes derive the grids of their activations from the ranges. For a model tuned for chat, the paragraphs of
    a text become turns of a conversation. Files are read only as far as --tokens needs. The result is cached; the
    default calibration is made when a static scheme first needs it. A model without a tokenizer needs --ids.

    With --scheme w8a8 --shadow auto, or --scheme mixed, the command also searches a scheme within --budget, and prints
    the choice and its reasons. Other commands find the choice under the same options. Commands that use an NPU need
    --outputs grid for w8a8 here. A calibration on your own files is passed to them as the file of -o.

    If the residual stream comes near the largest float16, it is scaled by a power of two when a model is compiled under
    a static scheme; the command prints the power.

    With --dask the tokens are divided among the workers of a Dask cluster, and the parts are merged: the ranges are
    those of one machine. Measurements for shadows are made when a model is compiled.

    --merge combines calibrations that were made with the same options on different files, also on different machines.
    The ranges are those of one calibration on all files.

    percentile is for models without massive values. Many decoders keep single values of thousands of times the median,
    and stop working if these are clipped.
    """
    if is_merge:
        _refuse_other_options()
        _merge([Path(model), *map(Path, further)], output, as_json=as_json)
        return
    if further:
        raise click.UsageError(
            f"MODEL is {model!r}, and {further[0]!r} is a second argument; give one model, or --merge for calibrations"
        )
    if num_tokens is not None and num_tokens < 1:
        raise ConfigError(f"--tokens is {num_tokens}, expected at least 1")
    if is_engine_directory(Path(model)):
        raise ConfigError(f"{model} is compiled and has fixed grids; give its checkpoint to calibrate again")
    if quantisation["calibration"]:
        raise ConfigError("this command makes a calibration; omit --calibration")
    if output:
        _check_writable(output)
    recipe = choose_recipe(EngineOptions(npu="native", **quantisation), DEFAULT_NPU_SCHEME)
    if not recipe.scheme.is_static:
        raise ConfigError(f"the scheme {recipe.scheme.name!r} measures ranges at run time; choose a static scheme")
    with opened_files(texts, chats, ids) as files, ShownProgress() as progress:
        checkpoint, _ = find_checkpoint(model, progress)
        planned = plan_checkpoint(checkpoint, {}, adapter=adapter)
        elsewhere = None
        if dask is not None:
            from chunkrt.cli.calibration_shards import measure_on_cluster

            elsewhere = measure_on_cluster(
                dask, planned, model=model, adapter=adapter, method=method, progress=progress
            )
        calibration, path = cached_calibration(
            planned,
            checkpoint,
            model=model,
            token_ids=tokens_of_files(planned, files, num_tokens),
            method=method,
            equalisation=recipe.scheme.equalisation,
            is_rotated=recipe.scheme.is_rotated,
            elsewhere=elsewhere,
            progress=lambda done, total: progress("calibrating", done, total),
        )
        if recipe.search:
            choice, choice_path = cached_choice(
                planned,
                checkpoint,
                recipe,
                calibration,
                progress=lambda done, total: progress("choosing schemes", done, total),
            )
    if output:
        calibration.save(output)
    scaling = residual_scaling(planned.plan, calibration)
    summary = _summary(planned.plan, calibration, scaling, output or path)
    if recipe.search:
        summary["choice"] = choice.to_dict() | {"path": str(choice_path)}
    if as_json:
        click.echo(json.dumps(summary, indent=1, ensure_ascii=False))
        return
    _print(summary, scaling)
    if recipe.search:
        click.echo("\n" + "\n".join(choice_lines(choice)) + f"\nsaved to {choice_path}")


def _check_writable(output: Path) -> None:
    try:
        check_writable(output)
    except OSError as error:
        raise ConfigError(f"cannot write the calibration {output}: {cause_of(error)}") from error


_OF_MERGE = ("model", "further", "is_merge", "output", "as_json", "verbose")


def _refuse_other_options() -> None:
    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is ParameterSource.COMMANDLINE and parameter.name not in _OF_MERGE:
            raise ConfigError(f"{parameter.opts[-1]} has no effect with --merge; omit it")


def _merge(paths: Sequence[Path], output: Path | None, *, as_json: bool) -> None:
    """Write the merged calibration of files, and print its summary."""
    if output is None:
        raise ConfigError("--merge needs a file to write; give it with -o FILE")
    if len(set(paths)) < len(paths) or len(paths) < 2:
        raise ConfigError(f"--merge got {' '.join(map(str, paths))}, expected at least two different files")
    _check_writable(output)
    found = {str(path): Calibration.load(path) for path in paths}
    merged = merge(found)
    merged.save(output)
    summary = _measurements(merged, output)
    summary["merged"] = [{"path": name, "tokens": each.token_ids.size} for name, each in found.items()]
    if as_json:
        click.echo(json.dumps(summary, indent=1, ensure_ascii=False))
        return
    for row in summary["merged"]:
        click.echo(f"{row['path']}: {row['tokens']} tokens")
    _print_measurements(summary)
    click.echo(f"saved to {output}")


def _measurements(calibration: Calibration, path: Path) -> dict[str, Any]:
    widest = max(calibration.peaks, key=lambda name: calibration.peaks[name])
    return {
        "model": calibration.model,
        "method": calibration.method,
        "tokens": calibration.token_ids.size,
        "values": len(calibration.peaks),
        "widest": {"name": widest, "peak": calibration.peaks[widest]},
        "path": str(path),
    }


def _summary(plan: Plan, calibration: Calibration, scaling: ResidualScaling, path: Path) -> dict[str, Any]:
    linears = [_linear(weight, node, calibration) for weight, node in linear_nodes(plan).items()]
    linears.sort(key=lambda row: row["ratio"] or 0, reverse=True)
    return _measurements(calibration, path) | {
        "residual_stream": {"peak": scaling.peak, "exponent": scaling.exponent, "obstacle": scaling.obstacle or None},
        "most_uneven": linears[:NUM_SHOWN],
    }


def _linear(weight: str, node: Node, calibration: Calibration) -> dict[str, Any]:
    columns = calibration.column_peaks[node.outputs[0]]
    largest, median = float(columns.max()), float(np.median(columns))
    return {
        "linear": weight.removesuffix(".weight"),
        "input": calibration.peaks[node.inputs[0]],
        "input_limit": calibration.limits[node.inputs[0]],
        "largest_column": largest,
        "median_column": median,
        "ratio": largest / median if median else None,
    }


def _print_measurements(summary: dict[str, Any]) -> None:
    widest = summary["widest"]
    click.echo(
        f"{summary['tokens']} tokens, {summary['values']} values, limits by {summary['method']}\n"
        f"widest: {widest['name']}, {widest['peak']:.5g} (float16 ends at 65504)"
    )


def _print(summary: dict[str, Any], scaling: ResidualScaling) -> None:
    _print_measurements(summary)
    click.echo(f"{scaling}\n")
    rows = [("linear layers with the most uneven outputs", "input", "8-bit limit", "largest column", "median", "ratio")]
    for row in summary["most_uneven"]:
        numbers = (row[key] for key in ("input", "input_limit", "largest_column", "median_column", "ratio"))
        rows.append((row["linear"], *("-" if number is None else f"{number:.4g}" for number in numbers)))
    width = max(len(name) for name, *_ in rows)
    for name, *cells in rows:
        click.echo("  ".join([name.ljust(width), *(cell.rjust(14) for cell in cells)]))
    click.echo(f"\nsaved to {summary['path']}")


NUM_RANKED = 12


def choice_lines(choice: Choice) -> Iterator[str]:
    """Return the linear layers that 8 bits hurt most, the frontier, and the cost and loss of the choice."""
    loss = choice.loss
    width = max(len(linear.weight) for linear in choice.linears) - len(".weight")
    yield f"{'linear':{width}}  {'reach':>8}  {'KL at 8 bits':>12}  {'with shadow':>12}  chosen"
    ranking = sorted(choice.linears, key=lambda linear: -linear.kl)
    for linear in ranking[:NUM_RANKED]:
        shadowed = "-" if linear.kl_shadowed is None else f"{linear.kl_shadowed:.6f}"
        chosen = f"w{linear.weight_bits}a{linear.activation_bits}{', shadow' if linear.has_shadow else ''}"
        name = linear.weight.removesuffix(".weight")
        yield f"{name:{width}}  {linear.reach:8.0f}  {linear.kl:12.6f}  {shadowed:>12}  {chosen}"
    if len(ranking) > NUM_RANKED:
        yield f"... and {len(ranking) - NUM_RANKED} more; --json has all"
    yield ""
    yield f"{'multiply-adds at 8 bits':>23}  {'shadows':>7}  {'4-bit':>5}  {'mean KL':>9}  {'perplexity':>10}"
    for point in choice.frontier:
        share = f"{100 * point.share_in_8_bits:.1f} %"
        mark = "  <- chosen" if (point.kl, point.perplexity_ratio) == (loss.kl, loss.perplexity_ratio) else ""
        measured = f"{point.kl:9.5f}  {point.perplexity_ratio:9.4f}x"
        yield f"{share:>23}  {point.num_shadows:7}  {point.num_with_4_bits:5}  {measured}{mark}"
    shadows = [linear for linear in choice.linears if linear.has_shadow]
    work = sum(linear.shadow_multiply_adds for linear in shadows) / sum(
        linear.multiply_adds for linear in choice.linears
    )
    yield ""
    yield (
        f"{choice.scheme.name}: mean KL {loss.kl:.5f} of at most {choice.budget:g} on the calibration text, "
        f"perplexity {loss.perplexity_ratio:.4f} of float's"
    )
    yield (
        f"shadows: {len(shadows)} of {len(choice.linears)} linear layers, "
        f"{sum(linear.shadow_bytes for linear in shadows) / 1e6:.2f} MB of rows in float32, "
        f"{100 * work:.2f} % of the linear layers' multiply-adds"
    )
