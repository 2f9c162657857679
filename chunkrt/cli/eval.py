"""`chunkrt eval`: how good a model is, and how far from its base, on texts and tasks of one's own."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import click

from chunkrt.cli.command import GroupedCommand, model_argument
from chunkrt.cli.options import engine_options, open_engine
from chunkrt.engine.engine import Engine
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import find_checkpoint
from chunkrt.engine_directory.manifest import is_engine_directory
from chunkrt.errors import ConfigError
from chunkrt.evaluation import hellaswag, lambada
from chunkrt.evaluation.base import Base, base_options, check_base
from chunkrt.evaluation.layers import NUM_LAYER_WINDOWS, LayersRun, evaluate_layers
from chunkrt.evaluation.layers_picture import draw_layers
from chunkrt.evaluation.report import BaseRun, Report, Run, TaskRun, TextRun
from chunkrt.evaluation.text import evaluate_text
from chunkrt.evaluation.windows import DEFAULT_NUM_WINDOWS, DEFAULT_WINDOW_LENGTH, Part, cut_windows, spread
from chunkrt.files import Progress
from chunkrt.pictures import check_picture
from chunkrt.progress import ShownProgress
from chunkrt.quant.folding import Folding
from chunkrt.quant.scheme import SCHEMES, Recipe

NO_BASE = "none"
DEFAULT_CACHE_GB = 4.0
_FILE = click.Path(path_type=Path)


@click.command("eval", cls=GroupedCommand, first=("text_file", "scheme", "windows", "as_json", "npu"))
@model_argument
@click.option("--text", "text_file", type=_FILE, help="UTF-8 text: perplexity, and divergence from the base.")
@click.option("--hellaswag", "hellaswag_file", type=_FILE, help="HellaSwag's JSON lines: accuracy.")
@click.option("--lambada", "lambada_file", type=_FILE, help="LAMBADA's JSON lines: accuracy and perplexity.")
@click.option("--limit", type=int, help="Items of each task.  [default: all]")
@click.option(
    "--base",
    "base_scheme",
    type=click.Choice([*SCHEMES, NO_BASE]),
    default="float",
    show_default=True,
    help="Scheme of the base, which runs on onnxrt if it is float, else on native.",
)
@click.option("--base-model", metavar="MODEL", help="The base's checkpoint.  [default: MODEL]")
@click.option(
    "--window",
    "window_length",
    type=int,
    help=f"Tokens that attend to one another.  [default: {DEFAULT_WINDOW_LENGTH}, or the context]",
)
@click.option("--windows", metavar="N|all", help=f"How many, spread over the part.  [default: {DEFAULT_NUM_WINDOWS}]")
@click.option("--part", default="1/1", show_default=True, metavar="K/N", help="The K-th of N parts of the text.")
@click.option(
    "--cache-limit",
    "cache_gb",
    type=float,
    default=DEFAULT_CACHE_GB,
    show_default=True,
    help="GB of disk for the base's logits; 0 keeps none.",
)
@click.option(
    "--per-layer", is_flag=True, help=f"Errors by layer and by linear, on up to {NUM_LAYER_WINDOWS} of the windows."
)
@click.option("--plot", "picture", type=_FILE, metavar="FILE", help="Draw them: a .png or .svg; needs matplotlib.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
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
    per_layer: bool,
    picture: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Measure how good MODEL is: on a text, beside its base, and on tasks.

    The text is cut into windows that do not overlap; each is run from position 0. All tokens of a window count but the
    first, which is the beginning token where the model wants one. The KL divergence is that of the base to the model,
    over the same tokens.

    An engine directory holds no float weights: name the checkpoint that it was made from with --base-model, or give
    --base none.

    --per-layer needs the checkpoint as MODEL. It shows how far every linear is from float by itself, and how errors
    grow from layer to layer, as the reference backend computes them: whatever backend runs, the scheme is the same.
    """
    if text_file is None and hellaswag_file is None and lambada_file is None:
        raise ConfigError("there is nothing to evaluate; give --text FILE, --hellaswag FILE or --lambada FILE")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit is {limit}, expected at least 1")
    if not isfinite(cache_gb) or cache_gb < 0:
        raise ConfigError(f"--cache-limit is {cache_gb:g}, expected GB, at least 0")
    if per_layer and text_file is None:
        raise ConfigError("--per-layer runs over a text; give --text FILE")
    if picture is not None:
        if not per_layer:
            raise ConfigError("--plot draws the errors of layers; give --per-layer")
        check_picture(picture)
    if per_layer and is_engine_directory(Path(model)):
        raise ConfigError(
            f"{model} is compiled and holds no float weights for --per-layer to compare with; give the checkpoint that "
            "it was made from, with the same options"
        )
    text = _Text(
        path=text_file,
        part=Part.parse(part),
        window_length=window_length,
        windows=_number(windows),
        base_model=base_model or model,
        base=None if base_scheme == NO_BASE else _base_options(base_scheme, settings),
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
                layers_run = _evaluate_layers(engine, model, settings["calibration"], few, progress)
            text_run = text.evaluate(engine, chosen, len(available), progress)
        if hellaswag_items:
            endings = hellaswag.evaluate(engine, hellaswag_items, partial(progress, "HellaSwag"))
            hellaswag_run = TaskRun(file=str(hellaswag_file), figures=endings)
        if lambada_items:
            words = lambada.evaluate(engine, lambada_items, partial(progress, "LAMBADA"))
            lambada_run = TaskRun(file=str(lambada_file), figures=words)
        report = Report(
            run=Run.of(engine, model), text=text_run, layers=layers_run, hellaswag=hellaswag_run, lambada=lambada_run
        )
    if layers_run and picture:
        draw_layers(layers_run, picture, f"{Path(model).name}, {report.run.scheme}: error of each linear against float")
    click.echo(json.dumps(asdict(report), indent=1, ensure_ascii=False) if as_json else "\n".join(report.lines()))


@dataclass(frozen=True, kw_only=True)
class _Text:
    """What the command line said of the text. Lengths and `windows`: None for the default. `cache_limit`: bytes."""

    path: Path | None
    part: Part
    window_length: int | None
    windows: int | Literal["all"] | None
    base_model: str
    base: EngineOptions | None
    cache_limit: int

    def read(self) -> str | None:
        """The text, if there is one; what is wrong is told before a model is loaded."""
        if self.path is None:
            return None
        if self.base is not None:
            check_base(self.base_model, self.base)
        try:
            return self.path.read_text("utf-8-sig")
        except OSError as error:
            raise ConfigError(f"cannot read the text from {self.path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the text in {self.path} is not UTF-8: {error}") from error

    def window_of(self, engine: Engine) -> int:
        """Tokens of a window; by default no more than the context takes."""
        if self.window_length is None:
            return min(DEFAULT_WINDOW_LENGTH, engine.context_length)
        return self.window_length

    def cut(self, engine: Engine, content: str) -> list[list[int]]:
        """All windows of the part."""
        window_length = self.window_of(engine)
        if window_length > engine.context_length:
            raise ConfigError(
                f"--window is {window_length}, longer than the context of {engine.context_length}; choose a shorter one"
            )
        tokenizer = engine.require_tokenizer()
        tokens = tokenizer.encode(content, add_special=False, parse_special=False)
        return cut_windows(self.part.of(tokens), window_length, bos_id=_bos_id(engine))

    def evaluate(self, engine: Engine, chosen: list[list[int]], num_available: int, progress: Progress) -> TextRun:
        """Run the windows that were chosen."""
        base_run = None
        if self.base is None:
            figures = evaluate_text(engine, chosen, None, partial(progress, "windows"))
        else:
            base = Base(self.base_model, self.base, chosen, cache_limit=self.cache_limit, progress=progress)
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
    """What each window begins with, if the model wants that."""
    settings = engine.require_tokenizer().settings
    return settings.bos_id if settings.add_bos else None


def _evaluate_layers(
    engine: Engine, model: str, calibration: Path | None, windows: list[list[int]], progress: Progress
) -> LayersRun:
    from chunkrt.compile.compiler import plan_checkpoint, prepare

    checkpoint, _ = find_checkpoint(model, progress)
    planned = plan_checkpoint(checkpoint, {})
    ranges = None
    if engine.scheme.is_static:
        recipe = Recipe(scheme=engine.scheme)
        _, ranges = prepare(planned, checkpoint, recipe, calibration, model=model, progress=progress)
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


def _base_options(scheme: str, settings: dict[str, Any]) -> EngineOptions:
    names = ("threads", "affinity", "context_length", "calibration")
    return base_options(scheme, **{name: settings[name] for name in names})
