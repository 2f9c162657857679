"""`chunkrt export`: write a decoder as ONNX, for other tools."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from chunkrt.cli.command import GroupedCommand, json_option, model_argument, option
from chunkrt.cli.shared_options import engine_fields, verbose_option
from chunkrt.engine.resolve import find_checkpoint
from chunkrt.engine_directory.manifest import is_engine_directory
from chunkrt.errors import ChunkrtError, ConfigError
from chunkrt.progress import ShownProgress

if TYPE_CHECKING:
    from onnx_ir import Model

    from chunkrt.graph.partition import Planned
    from chunkrt.onnx.exporting import WindowSettings
    from chunkrt.onnx.exporting.save import Files

DEFAULT_WINDOW = 32
LONGEST_DEFAULT_CONTEXT = 2048
WINDOW_OPTIONS = ("logits", "batch", "sinks", "no_cache")
"""Options that only a fixed window has."""


class Windows(click.ParamType[tuple[int, ...]]):
    """Different numbers of rows, separated by commas."""

    name = "rows"

    def convert(
        self, value: str | tuple[int, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers, or fail."""
        if isinstance(value, tuple):
            return value
        try:
            windows = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a whole number, or several separated by commas.", param, ctx)
        if len(set(windows)) < len(windows):
            self.fail(f"{value!r} names a window twice.", param, ctx)
        return windows


@click.command(
    cls=GroupedCommand,
    first="output window sequence context dtype keys dynamic external_data static_subgraphs as_json",
)
@model_argument
@option("-o", "--output", group="Output", type=click.Path(path_type=Path), help="ONNX file to write.")
@option(
    "--window",
    group="Model",
    type=Windows(),
    default=str(DEFAULT_WINDOW),
    show_default=True,
    help="Rows per run (W). Several, such as 32,1, become one model each, with shared external data.",
)
@option("--sequence", group="Model", type=int, help="Positions that attention sees (T).  [default: the context length]")
@option(
    "--context",
    group="Model",
    type=int,
    help=f"Positions of the caches (M).  [default: the model's, at most {LONGEST_DEFAULT_CONTEXT}]",
)
@option(
    "--dtype",
    group="Model",
    type=click.Choice(["fp16", "fp32"]),
    default="fp16",
    show_default=True,
    help="Data type of weights and caches.",
)
@option(
    "--opset",
    group="Model",
    type=click.Choice(["14", "18", "21", "23"]),
    default="18",
    show_default=True,
    help="Version of ONNX's operator set.",
)
@option(
    "--keys",
    group="Model",
    type=click.Choice(["pre-rope", "post-rope"]),
    help="Cache keys before or after RoPE.  [default: pre-rope; post-rope with --dynamic]",
)
@option(
    "--logits",
    group="Model",
    type=click.Choice(["all", "last"]),
    default="all",
    show_default=True,
    help="Compute the logits of all W rows, or of the last row only.",
)
@option(
    "--weights",
    group="Model",
    type=click.Choice(["float", "int8", "int4"]),
    default="float",
    show_default=True,
    help="Storage of the linears' weights: floats of --dtype, int8 (DequantizeLinear) or int4 (MatMulNBits).",
)
@option(
    "--batch",
    group="Model",
    type=int,
    default=1,
    show_default=True,
    help="Number of sequences per run, each with its own mask, positions and caches.",
)
@option(
    "--sinks",
    group="Model",
    type=int,
    default=0,
    show_default=True,
    help="First tokens that stay in the caches when they are full.",
)
@option("--no-cache", group="Model", is_flag=True, help="Take a whole sequence of T tokens, without caches.")
@option("--external-data", group="Output", is_flag=True, help="Write the weights to a separate file, OUTPUT.data.")
@option(
    "--dynamic",
    group="Model",
    is_flag=True,
    help="Accept any number of rows, as ONNX Runtime GenAI needs, and write its genai_config.json.",
)
@option(
    "--static-subgraphs",
    group="Output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write each static subgraph of the plan, with W rows, to this folder.",
)
@engine_fields("adapter")
@json_option("Print a summary as JSON.")
@verbose_option
def export(
    model: str, output: Path | None, static_subgraphs: Path | None, dynamic: bool, as_json: bool, **settings: Any
) -> None:
    """Write MODEL, a catalogue name, a GGUF file or a Hugging Face folder, as an ONNX decoder in float.

    The fixed-window form has static shapes, and caches as inputs and outputs; docs/onnx.md describes it. The
    tokenizer's files are written next to the model. For fp16, a short window is computed first, and a model with values
    beyond float16 is refused.
    """
    if output is None and static_subgraphs is None:
        raise ConfigError("nothing to write; name a file with -o, or a folder with --static-subgraphs")
    if dynamic:
        _check_dynamic(output, settings["keys"])
    elif output is None:
        _check_subgraphs()
    if settings["no_cache"]:
        for name in ("window", "context", "static_subgraphs"):
            if _is_given(name):
                raise ConfigError(f"--no-cache runs whole sequences; omit {_flag(name)}")
    windows: tuple[int, ...] = settings["window"]
    if static_subgraphs is not None and len(windows) > 1:
        raise ConfigError(f"--static-subgraphs has one window; choose one of {', '.join(map(str, windows))}")
    if is_engine_directory(Path(model)):
        raise ConfigError(f"{model} is compiled and has quantised weights; give its checkpoint")
    from chunkrt.compile.compiler import plan_checkpoint
    from chunkrt.onnx import exporting as onnx_export

    if output is not None:
        onnx_export.check_output(output, windows)
    written: list[Path] = []
    with ShownProgress() as progress:
        checkpoint, _ = find_checkpoint(model, progress)
        planned = plan_checkpoint(checkpoint, {}, adapter=settings["adapter"])

        def told(done: int, total: int) -> None:
            progress("writing ONNX", done, total)

        def tried(done: int, total: int) -> None:
            progress("checking float16", done, total)

        chosen = onnx_export.SubgraphSettings(
            window=windows[0], dtype=settings["dtype"], opset=int(settings["opset"]), weights=settings["weights"]
        )
        if output is not None:
            exported, files = (_dynamic if dynamic else _windows)(planned, output, settings)
            files |= onnx_export.tokenizer_files(planned)
            onnx_export.check_beside(output.parent, files)
        if static_subgraphs is not None:
            onnx_export.check_subgraph_outputs(planned, static_subgraphs)
        onnx_export.check_float16(planned, chosen, tried)
        if output is not None:
            if len(exported) > 1:
                onnx_export.save_windows(exported, output, progress=told)
            else:
                (only,) = exported.values()
                onnx_export.save_model(only, output, external_data=settings["external_data"], progress=told)
            written += [path for path in onnx_export.model_files(output, windows) if path.exists()]
            if settings["weights"] != "float" and not dynamic:
                progress("checking integer weights", 0, 0)
                _check_integers(planned, settings, written)
            onnx_export.write_beside(output.parent, files)
            click.echo(f"{output}: {sum(path.stat().st_size for path in written) / 1e6:.0f} MB", err=True)
            written += [output.parent / name for name in files]
        if static_subgraphs is not None:
            parts = onnx_export.save_static_subgraphs(
                planned, static_subgraphs, chosen, external_data=settings["external_data"], progress=told
            )
            click.echo(f"{len(parts)} ONNX files written to {static_subgraphs}", err=True)
            written += [path for path in sorted(static_subgraphs.iterdir()) if path.is_file()]
        progress("", 0, 0)
    if as_json:
        rows = [{"path": str(path), "bytes": path.stat().st_size} for path in written]
        click.echo(json.dumps({"model": model, "files": rows}, indent=1))


def _windows(planned: Planned, output: Path, asked: dict[str, Any]) -> tuple[dict[int, Model], Files]:
    from chunkrt.onnx import exporting as onnx_export

    settings = _window_settings(planned, asked)
    if asked["no_cache"]:
        return {settings.window: onnx_export.window_model(planned, settings)}, {}
    return {n: onnx_export.window_model(planned, replace(settings, window=n)) for n in asked["window"]}, {}


def _window_settings(planned: Planned, asked: dict[str, Any]) -> WindowSettings:
    from chunkrt.onnx import exporting as onnx_export

    context = _context(planned, asked)
    sequence = context if asked["sequence"] is None else asked["sequence"]
    if asked["no_cache"]:
        context = sequence
    return onnx_export.WindowSettings(
        window=sequence if asked["no_cache"] else max(asked["window"]),
        sequence=sequence,
        context=context,
        dtype=asked["dtype"],
        opset=int(asked["opset"]),
        weights=asked["weights"],
        keys=asked["keys"] or "pre-rope",
        logits=asked["logits"],
        batch=asked["batch"],
        sinks=asked["sinks"],
        cache=not asked["no_cache"],
    )


def _check_integers(planned: Planned, asked: dict[str, Any], written: list[Path]) -> None:
    """Run the written models, and remove them if they fail."""
    from chunkrt.onnx import exporting as onnx_export

    models = [path for path in written if path.suffix == ".onnx"]
    try:
        onnx_export.check_integers(planned, _window_settings(planned, asked), models)
    except ChunkrtError:
        for path in written:
            path.unlink()
        raise


def _dynamic(planned: Planned, output: Path, asked: dict[str, Any]) -> tuple[dict[int, Model], Files]:
    from chunkrt.onnx import exporting as onnx_export

    settings = onnx_export.DynamicSettings(
        context=_context(planned, asked), dtype=asked["dtype"], opset=int(asked["opset"]), weights=asked["weights"]
    )
    return {0: onnx_export.dynamic_model(planned, settings)}, onnx_export.genai_config(planned, settings, output.name)


def _context(planned: Planned, asked: dict[str, Any]) -> int:
    context: int | None = asked["context"]
    return min(planned.plan.plain_context, LONGEST_DEFAULT_CONTEXT) if context is None else context


def _check_dynamic(output: Path | None, keys: str | None) -> None:
    """Raise ConfigError for options that need a fixed window."""
    if output is None:
        raise ConfigError("--dynamic needs -o; name a file")
    if keys == "pre-rope":
        raise ConfigError("--dynamic caches keys after RoPE; omit --keys or --dynamic")
    for name in ("window", "sequence"):
        if _is_given(name):
            raise ConfigError(f"--dynamic accepts any number of rows; omit --{name}")
    for name in WINDOW_OPTIONS:
        if _is_given(name):
            raise ConfigError(f"{_flag(name)} needs a fixed window; omit {_flag(name)} or --dynamic")


def _check_subgraphs() -> None:
    """Raise ConfigError for options that need a decoder in one file."""
    for name in WINDOW_OPTIONS:
        if _is_given(name):
            raise ConfigError(f"{_flag(name)} needs -o; name a file")


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
