"""`chunkrt calibrate`: how large a model's values get on some text, for the static schemes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

from chunkrt.cli.choice import choice_lines
from chunkrt.cli.command import GroupedCommand, model_argument
from chunkrt.cli.options import QUANTISATION_FIELDS, engine_fields, verbose_option
from chunkrt.compile.calibrate import DEFAULT_NUM_TOKENS, cached_calibration, calibration_tokens, shipped_text
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.compile.search import cached_choice
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import choose_recipe, find_checkpoint
from chunkrt.engine_directory.manifest import is_engine_directory
from chunkrt.errors import ConfigError
from chunkrt.files import check_writable
from chunkrt.graph.plan import Node, Plan, linear_nodes
from chunkrt.progress import ShownProgress
from chunkrt.quant.calibration import Calibration
from chunkrt.quant.ranges import METHODS, Method
from chunkrt.quant.residual_scaling import ResidualScaling, residual_scaling
from chunkrt.quant.scheme import DEFAULT_NPU_SCHEME

NUM_SHOWN = 5


@click.command(cls=GroupedCommand, first=("text_file", "method", "num_tokens", "output", "as_json"))
@model_argument
@click.option("--text", "text_file", type=click.Path(path_type=Path), help="UTF-8 text.  [default: one that ships]")
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="mse",
    show_default=True,
    help="Where 8-bit grids end. absmax: at the largest magnitude; percentile: at what 99.99 % stay below; "
    "mse: where the square error is least. 16-bit grids always hold the largest.",
)
@click.option("--tokens", "num_tokens", type=int, help=f"Tokens to use.  [default: up to {DEFAULT_NUM_TOKENS}]")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a copy to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@engine_fields(*QUANTISATION_FIELDS)
@verbose_option
def calibrate(
    model: str,
    text_file: Path | None,
    method: Method,
    num_tokens: int | None,
    output: Path | None,
    as_json: bool,
    **quantisation: Any,
) -> None:
    """Measure how large the values of MODEL get: a catalogue name, a GGUF file, a Hugging Face folder or an ONNX
    decoder.

    Static schemes take the grids of their activations from it. A model tuned for chat reads the text's paragraphs as
    the turns of a conversation. The result is cached; the default one is made when a static scheme first needs it.

    With --scheme w8a8 --shadow auto, or --scheme mixed, it also searches for what keeps within --budget, and prints
    what was chosen and why. The other commands find that again under the same options; those
    that use an NPU need --outputs grid for w8a8 here, and a text of one's own goes to them as the file that -o writes.

    A residual stream that comes near to the end of float16, or leaves it, is scaled by a power of two when a model is
    compiled under a static scheme; which one is printed.

    percentile is for models without massive values: many decoders keep single values thousands of times the median,
    and stop working when these are cut off.
    """
    if num_tokens is not None and num_tokens < 1:
        raise ConfigError(f"--tokens is {num_tokens}, expected at least 1")
    if is_engine_directory(Path(model)):
        raise ConfigError(f"{model} is compiled, its grids are fixed; give the checkpoint to calibrate it anew")
    if quantisation["calibration"]:
        raise ConfigError("a calibration is what this command makes; leave --calibration away")
    if output:
        try:
            check_writable(output)
        except OSError as error:
            raise ConfigError(f"cannot write the calibration {output}: {error.strerror or error}") from error
    text = _read(text_file) if text_file else shipped_text()
    recipe = choose_recipe(EngineOptions(npu="native", **quantisation), DEFAULT_NPU_SCHEME)
    if not recipe.scheme.is_static:
        raise ConfigError(f"the scheme {recipe.scheme.name!r} measures values as they pass; calibrate for a static one")
    with ShownProgress() as progress:
        checkpoint, _ = find_checkpoint(model, progress)
        planned = plan_checkpoint(checkpoint, {})
        calibration, path = cached_calibration(
            planned,
            checkpoint,
            model=model,
            token_ids=calibration_tokens(planned, text, num_tokens),
            method=method,
            equalisation=recipe.scheme.equalisation,
            is_rotated=recipe.scheme.is_rotated,
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


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the text from {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the text in {path} is not UTF-8: {error}") from error


def _summary(plan: Plan, calibration: Calibration, scaling: ResidualScaling, path: Path) -> dict[str, Any]:
    widest = max(calibration.peaks, key=lambda name: calibration.peaks[name])
    linears = [_linear(weight, node, calibration) for weight, node in linear_nodes(plan).items()]
    linears.sort(key=lambda row: row["ratio"] or 0, reverse=True)
    return {
        "model": calibration.model,
        "method": calibration.method,
        "tokens": calibration.token_ids.size,
        "values": len(calibration.peaks),
        "widest": {"name": widest, "peak": calibration.peaks[widest]},
        "residual_stream": {"peak": scaling.peak, "exponent": scaling.exponent, "obstacle": scaling.obstacle or None},
        "most_uneven": linears[:NUM_SHOWN],
        "path": str(path),
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


def _print(summary: dict[str, Any], scaling: ResidualScaling) -> None:
    widest = summary["widest"]
    click.echo(
        f"{summary['tokens']} tokens, {summary['values']} values, limits by {summary['method']}\n"
        f"widest: {widest['name']}, {widest['peak']:.5g} (float16 ends at 65504)\n"
        f"{scaling}\n"
    )
    rows = [("linears with the most uneven outputs", "input", "8-bit limit", "largest column", "median", "ratio")]
    for row in summary["most_uneven"]:
        numbers = (row[key] for key in ("input", "input_limit", "largest_column", "median_column", "ratio"))
        rows.append((row["linear"], *("-" if number is None else f"{number:.4g}" for number in numbers)))
    width = max(len(name) for name, *_ in rows)
    for name, *cells in rows:
        click.echo("  ".join([name.ljust(width), *(cell.rjust(14) for cell in cells)]))
    click.echo(f"\nsaved to {summary['path']}")
