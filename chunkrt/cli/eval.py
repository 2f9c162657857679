"""`chunkrt eval`: measure the quality of a model, and its distance from a base, on texts and tasks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import click

from chunkrt.cli.command import GroupedCommand, json_option, model_argument, option, plot_option
from chunkrt.cli.shared_options import engine_options, open_engine
from chunkrt.engine.engine import Engine
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import find_checkpoint
from chunkrt.engine_directory.manifest import is_engine_directory
from chunkrt.errors import ConfigError, cause_of
from chunkrt.evaluation import hellaswag, lambada
from chunkrt.evaluation.baseline import Baseline, base_options, check_base
from chunkrt.evaluation.evaluation_report import BaseRun, EvaluationRun, Report, TaskRun, TextRun
from chunkrt.evaluation.layers import NUM_LAYER_WINDOWS, LayersRun, draw_layers, evaluate_layers
from chunkrt.evaluation.text import (
    DEFAULT_NUM_WINDOWS,
    DEFAULT_WINDOW_LENGTH,
    TextPart,
    cut_windows,
    evaluate_text,
    spread,
)
from chunkrt.files import Progress
from chunkrt.pictures import check_picture
from chunkrt.progress import ShownProgress
from chunkrt.quant.folding import Folding
from chunkrt.quant.scheme import DEFAULT_NPU_SCHEME, MIXED, SCHEMES, STATIC_SCHEMES, Recipe

NO_BASE = "none"
DEFAULT_CACHE_GB = 4.0
_FILE = click.Path(path_type=Path)


@click.command(
    "eval",
    cls=GroupedCommand,
    first="text_file hellaswag_file lambada_file scheme base_scheme window_length windows per_layer npu as_json",
)
@model_argument
@option(
    "--text",
    "text_file",
    group="Measurement",
    type=_FILE,
    help="UTF-8 text for perplexity and divergence from the base.",
)
@option("--hellaswag", "hellaswag_file", group="Measurement", type=_FILE, help="HellaSwag as JSON lines, for accuracy.")
@option(
    "--lambada",
    "lambada_file",
    group="Measurement",
    type=_FILE,
    help="LAMBADA as JSON lines, for accuracy and perplexity.",
)
@option("--limit", group="Measurement", type=int, help="Number of items per task.  [default: all]")
@option(
    "--base",
    "base_scheme",
    group="Measurement",
    type=click.Choice([*SCHEMES, NO_BASE]),
    default="float",
    show_default=True,
    help="Scheme of the model to compare with. It runs on onnxrt for float, else on native.",
)
@option("--base-model", group="Measurement", metavar="MODEL", help="Checkpoint of the base model.  [default: MODEL]")
@option(
    "--window",
    "window_length",
    group="Measurement",
    type=int,
    help=f"Tokens per window of the text.  [default: {DEFAULT_WINDOW_LENGTH}, at most the context length]",
)
@option(
    "--windows",
    group="Measurement",
    metavar="N|all",
    help=f"Number of windows, spread over the part.  [default: {DEFAULT_NUM_WINDOWS}]",
)
@option(
    "--part",
    group="Measurement",
    default="1/1",
    show_default=True,
    metavar="K/N",
    help="Use the K-th of N parts of the text.",
)
@option(
    "--cache-limit",
    "cache_gb",
    group="Measurement",
    type=float,
    default=DEFAULT_CACHE_GB,
    show_default=True,
    help="Disk limit in GB for cached logits of the base; 0 caches none.",
)
@option(
    "--as-npu",
    group="Measurement",
    is_flag=True,
    help=f"Quantise on the CPU as an NPU does: under a static scheme, by default {DEFAULT_NPU_SCHEME}, with outputs on "
    "grids.",
)
@option(
    "--per-layer",
    group="Measurement",
    is_flag=True,
    help=f"Measure errors per layer and linear layer, on up to {NUM_LAYER_WINDOWS} windows.",
)
@plot_option("Draw the errors of --per-layer as .png or .svg (needs matplotlib).", "picture")
@json_option("Print the figures as JSON.")
@engine_options
def eval(
    model: str,
    text_file: Path | None,
    hellaswag_file: Path | None,
    lambada_file: Path | None,
    limit: int | None,
    base_scheme: str,
    base_model: str | None,
    window_length: int | None,
    windows: str | None,
    part: str,
    cache_gb: float,
    as_npu: bool,
    per_layer: bool,
    picture: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Measure the quality of MODEL on a text, in comparison with its base, and on tasks.

    The text is split into windows that do not overlap; each window starts at position 0. All tokens of a window count
    except the first, which is the model's beginning token if it has one. The KL divergence is from the base to the
    model, over the same tokens.

    An engine directory holds no float weights: name its checkpoint with --base-model, or give --base none. The base has
    the adapter of --adapter, unless --base-model names the base.

    --as-npu measures the loss of an NPU's integers at the speed of the CPU; values between linear layers stay float32.

    --per-layer needs the checkpoint as MODEL. It shows the error of each linear layer alone, and the growth of errors
    from layer to layer, computed by the reference backend.
    """
    if as_npu:
        settings = _as_npu(model, settings)
    if text_file is None and hellaswag_file is None and lambada_file is None:
        raise ConfigError("nothing to evaluate; give --text FILE, --hellaswag FILE or --lambada FILE")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit is {limit}, expected at least 1")
    if not isfinite(cache_gb) or cache_gb < 0:
        raise ConfigError(f"--cache-limit is {cache_gb:g}, expected a number of GB, 0 or more")
    if per_layer and text_file is None:
        raise ConfigError("--per-layer needs a text; give --text FILE")
    if picture is not None:
        if not per_layer:
            raise ConfigError("--plot draws the errors of --per-layer; give that option, too")
        check_picture(picture)
    if per_layer and is_engine_directory(Path(model)):
        raise ConfigError(
            f"{model} is compiled and holds no float weights for --per-layer; give the checkpoint that "
            "it was made from, with the same options"
        )
    text = _TextOptions(
        path=text_file,
        part=TextPart.parse(part),
        window_length=window_length,
        windows=_number(windows),
        base_model=base_model or model,
        base=None if base_scheme == NO_BASE else _base_options(base_scheme, settings, base_model),
        cache_limit=int(cache_gb * 1e9),
    )
    content = text.read()
    hellaswag_items = hellaswag.read(hellaswag_file, limit) if hellaswag_file else None
    lambada_items = lambada.read(lambada_file, limit) if lambada_file else None
    with open_engine(model, settings) as engine, ShownProgress() as progress:
        text_run = hellaswag_run = lambada_run = layers_run = None
        if content is not None:
            available = text.cut(engine, content)
            chosen = available if isinstance(text.windows, str) else spread(available, text.windows)
            if per_layer:
                few = chosen if len(chosen) <= NUM_LAYER_WINDOWS else spread(chosen, NUM_LAYER_WINDOWS)
                layers_run = _evaluate_layers(engine, model, few, progress)
            text_run = text.evaluate(engine, chosen, len(available), progress)
        if hellaswag_items:
            endings = hellaswag.evaluate(engine, hellaswag_items, partial(progress, "HellaSwag"))
            hellaswag_run = TaskRun(file=str(hellaswag_file), figures=endings)
        if lambada_items:
            words = lambada.evaluate(engine, lambada_items, partial(progress, "LAMBADA"))
            lambada_run = TaskRun(file=str(lambada_file), figures=words)
        report = Report(
            run=EvaluationRun.of(engine, model),
            text=text_run,
            layers=layers_run,
            hellaswag=hellaswag_run,
            lambada=lambada_run,
        )
    if layers_run and picture:
        draw_layers(
            layers_run, picture, f"{Path(model).name}, {report.run.scheme}: error of each linear layer against float"
        )
    click.echo(json.dumps(asdict(report), indent=1, ensure_ascii=False) if as_json else "\n".join(report.lines()))


def _as_npu(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the scheme and the outputs of an NPU."""
    if is_engine_directory(Path(model)):
        raise ConfigError(f"{model} is compiled, with outputs of its own; omit --as-npu, or give its checkpoint")
    scheme = settings["scheme"] or DEFAULT_NPU_SCHEME
    if scheme not in (*STATIC_SCHEMES, MIXED):
        choices = ", ".join((*STATIC_SCHEMES, MIXED))
        raise ConfigError(f"--as-npu needs a scheme that NPUs run ({choices}), and --scheme is {scheme}")
    if settings["outputs"] == "float":
        raise ConfigError("--as-npu puts outputs on grids, and --outputs is float; omit one of them")
    return {**settings, "scheme": scheme, "outputs": "grid"}


@dataclass(frozen=True, kw_only=True)
class _TextOptions:
    """Options on the text. Lengths and `windows` are None for their defaults; `cache_limit` is in bytes."""

    path: Path | None
    part: TextPart
    window_length: int | None
    windows: int | Literal["all"] | None
    base_model: str
    base: EngineOptions | None
    cache_limit: int

    def read(self) -> str | None:
        """Return the text, if one is given; errors are reported before a model is loaded."""
        if self.path is None:
            return None
        if self.base is not None:
            check_base(self.base_model, self.base)
        try:
            return self.path.read_text("utf-8-sig")
        except OSError as error:
            raise ConfigError(f"cannot read the text from {self.path}: {cause_of(error)}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the text in {self.path} is not UTF-8: {error}") from error

    def window_of(self, engine: Engine) -> int:
        """Return the number of tokens per window; the default is at most the context length."""
        if self.window_length is None:
            return min(DEFAULT_WINDOW_LENGTH, engine.context_length)
        return self.window_length

    def cut(self, engine: Engine, content: str) -> list[list[int]]:
        """Return all windows of the part."""
        window_length = self.window_of(engine)
        if window_length > engine.context_length:
            raise ConfigError(
                f"--window is {window_length}, more than the context length of {engine.context_length}; shorten it"
            )
        tokenizer = engine.tokenizer
        tokens = tokenizer.encode(content, add_special=False, parse_special=False)
        return cut_windows(self.part.of(tokens), window_length, bos_id=_bos_id(engine))

    def evaluate(self, engine: Engine, chosen: list[list[int]], num_available: int, progress: Progress) -> TextRun:
        """Run the chosen windows."""
        base_run = None
        if self.base is None:
            figures = evaluate_text(engine, chosen, None, partial(progress, "windows"))
        else:
            base = Baseline(self.base_model, self.base, chosen, cache_limit=self.cache_limit, progress=progress)
            with base:
                figures = evaluate_text(engine, chosen, base, partial(progress, "windows"))
            base_run = BaseRun.of(base)
        return TextRun(
            file=str(self.path),
            part=str(self.part),
            windows=len(chosen),
            windows_available=num_available,
            window_length=self.window_of(engine),
            has_bos=_bos_id(engine) is not None,
            base=base_run,
            figures=figures,
        )


def _bos_id(engine: Engine) -> int | None:
    """Return the beginning token of each window, if the model has one."""
    settings = engine.tokenizer.settings
    return settings.bos_id if settings.add_bos else None


def _evaluate_layers(engine: Engine, model: str, windows: list[list[int]], progress: Progress) -> LayersRun:
    from chunkrt.compile.compiler import calibrate_scheme, plan_checkpoint

    checkpoint, _ = find_checkpoint(model, progress)
    planned = plan_checkpoint(checkpoint, {}, adapter=engine.options.adapter)
    ranges = None
    if engine.scheme.is_static:
        recipe = Recipe(scheme=engine.scheme)
        _, ranges = calibrate_scheme(
            planned, checkpoint, recipe, engine.options.calibration, model=model, progress=progress
        )
    folding = ranges.folding if ranges else Folding()
    planned = planned.within(max(map(len, windows)))
    return evaluate_layers(
        planned.plan,
        lambda name: folding.apply(name, planned.load(name)),
        engine.scheme,
        ranges,
        windows,
        load_blocks=planned.load_blocks,
        progress=partial(progress, "layers"),
    )


def _number(windows: str | None) -> int | Literal["all"] | None:
    if windows is None or windows == "all":
        return None if windows is None else "all"
    if not windows.isdecimal() or int(windows) < 1:
        raise ConfigError(f"--windows is {windows!r}, expected a number, at least 1, or all")
    return int(windows)


def _base_options(scheme: str, settings: dict[str, Any], base_model: str | None) -> EngineOptions:
    """Return the options of the base, which has the adapter unless --base-model names the base."""
    names = ("threads", "affinity", "context_length", "calibration")
    adapter = settings["adapter"] if base_model is None else None
    return base_options(scheme, adapter=adapter, **{name: settings[name] for name in names})
