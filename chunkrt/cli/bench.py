"""`chunkrt bench`: measure prefill and decode speed, in llama-bench's terms."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from chunkrt.cli.bench_tests import FORMATS, MOST_SEQUENCES, BenchSetup, Case, measure, measure_parallel
from chunkrt.cli.command import (
    GroupedCommand,
    ModelName,
    json_option,
    option,
    plot_option,
    revision_option,
    with_revision,
)
from chunkrt.cli.plots import draw_bench
from chunkrt.cli.prompts import read_text
from chunkrt.cli.shared_options import engine_options_but, measured, open_engine, trace_option, written_trace
from chunkrt.engine.engine import Engine
from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import check_writable, write_text
from chunkrt.pictures import check_picture
from chunkrt.progress import ShownProgress
from chunkrt.runtime.record import RunRecord

DEFAULT_PROMPTS, DEFAULT_NEW = (128, 512), 32


@click.command(
    cls=GroupedCommand,
    first="prompt_lengths new_tokens depths parallel repetitions threads npu scheme output as_json",
)
@click.argument("models", nargs=-1, type=ModelName(), metavar="MODEL...")
@option(
    "-m",
    "-hf",
    "--model",
    "more_models",
    group="Model",
    multiple=True,
    type=ModelName(),
    metavar="MODEL",
    help="Model to measure, in place of the argument MODEL; may be repeated.",
)
@revision_option
@option(
    "-p",
    "--prompt-lengths",
    group="Measurement",
    metavar="NUMBERS",
    help="Prompt lengths of prefill tests: a list (128,512), or a range with a step (16-64+16) or a factor (1-8*2); 0: "
    "none.  [default: those of 128,512 that fit the context]",
)
@option(
    "-n",
    "--new-tokens",
    group="Measurement",
    metavar="NUMBERS",
    help="Numbers of new tokens of decode tests; 0 for none.  [default: 32]",
)
@option(
    "-pg", "both", group="Measurement", multiple=True, metavar="P,N", help="Prefill P tokens and decode N in one test."
)
@option(
    "-d",
    "--n-depth",
    "depths",
    group="Measurement",
    default="0",
    metavar="NUMBERS",
    help="Tokens in the context before each test.  [default: 0]",
)
@option(
    "-t",
    "--threads",
    group="Execution",
    metavar="NUMBERS",
    help="Numbers of threads, e.g. 1,2,4.  [default: the cores]",
)
@option(
    "--prompt-file",
    group="Measurement",
    metavar="FILE",
    help="Prefill the text of a file instead of random tokens; - reads standard input.",
)
@option(
    "--parallel",
    group="Measurement",
    metavar="NUMBERS",
    help="Prefill and decode this number of sequences at the same time, e.g. 1,2,4,8, for every combination of prompt "
    "length and number of new tokens.",
)
@option(
    "-r",
    "--repetitions",
    group="Measurement",
    type=int,
    default=5,
    show_default=True,
    help="Number of measured runs per test.",
)
@option(
    "-o",
    "--output",
    group="Output",
    metavar="FORMAT|FILE",
    help=f"Output format ({', '.join(FORMATS)}), or a file whose suffix names the format.",
)
@option(
    "--format",
    "format_name",
    group="Output",
    type=click.Choice(list(FORMATS)),
    help="Output format.  [default: md]",
)
@plot_option("Draw the rates as .png or .svg (needs matplotlib).")
@json_option("Print JSON, like --format json.")
@trace_option
@engine_options_but("threads")
def bench(
    models: tuple[str, ...],
    more_models: tuple[str, ...],
    revision: str | None,
    prompt_lengths: str | None,
    new_tokens: str | None,
    both: tuple[str, ...],
    depths: str,
    threads: str | int | None,
    prompt_file: str | None,
    parallel: str | None,
    repetitions: int,
    output: str | None,
    format_name: str | None,
    as_json: bool,
    plot: Path | None,
    trace: Path | None,
    **settings: Any,
) -> None:
    """Measure prefill and decode speed of each MODEL. Prompts are random tokens, each test has one warm-up run, and the
    prefix cache is off by default.

    A trace holds the last repetition of every test. Rows have llama-bench's columns, with its names, and further ones.
    """
    if not (names := [with_revision(name, revision) for name in (*models, *more_models)]):
        raise click.MissingParameter(ctx=click.get_current_context(), param_hint="'MODEL...'", param_type="argument")
    if repetitions < 1:
        raise ConfigError(f"--repetitions is {repetitions}, expected at least 1")
    if parallel is not None and (both or depths != "0" or prompt_file):
        raise ConfigError("--parallel excludes -pg, -d and --prompt-file; omit them")
    if plot is not None:
        check_picture(plot)
    form, path = _output(output, "json" if as_json else format_name)
    asked = _Asked(
        prompts=None if prompt_lengths is None else read_numbers("-p", prompt_lengths),
        new=None if new_tokens is None else read_numbers("-n", new_tokens),
        both=[_pair(text) for text in both],
        depths=read_numbers("-d", depths),
        parallel=None if parallel is None else read_numbers("--parallel", parallel, least=1, most=MOST_SEQUENCES),
        prompt=None if prompt_file is None else read_text(prompt_file),
    )
    budgets = [None] if threads is None else read_numbers("--threads", str(threads), least=1)
    rows: list[BenchSetup] = []
    with written_trace(trace, ", ".join(names)) as traced:
        for name, budget in itertools.product(names, budgets):
            with open_engine(name, {**measured(settings), "threads": budget}) as engine, ShownProgress() as progress:
                tests = asked.tests(engine)
                for done, test in enumerate(tests):
                    progress(test.name, done, len(tests))
                    rows.append(test.measure(engine, name, repetitions, traced.records if trace else None))
                progress("", len(tests), len(tests))
                traced.end(engine)
    if plot is not None:
        draw_bench(rows, plot)
    if path is None:
        click.echo(FORMATS[form](rows), nl=False)
    else:
        write_text(path, FORMATS[form](rows))
        click.echo(f"wrote {path}", err=True)


class _Measured(NamedTuple):
    """A test and the function that runs it."""

    name: str
    num_tokens: int
    measure: Callable[[Engine, str, int, list[RunRecord] | None], BenchSetup]


class _Asked(NamedTuple):
    """Measurements of the command line; None for defaults."""

    prompts: list[int] | None
    new: list[int] | None
    both: list[tuple[int, int]]
    depths: list[int]
    parallel: list[int] | None
    prompt: str | None

    def tests(self, engine: Engine) -> list[_Measured]:
        """Return all tests of an engine; default lengths are limited to its context length."""
        room = engine.context_length - max(self.depths)
        tokens = None if self.prompt is None else _tokens(engine, self.prompt)
        prompts, new = self.prompts, self.new
        if prompts is None and tokens is not None:
            prompts = [len(tokens) - max(self.depths)]
        if prompts is None and not self.both:
            prompts = list(dict.fromkeys(min(length, max(room - 1, 1)) for length in DEFAULT_PROMPTS))
        if new is None and not self.both:
            new = [max(min(DEFAULT_NEW, room - 1, len(tokens or range(DEFAULT_NEW))), 1)]
        prompts, new = ([number for number in numbers or () if number] for numbers in (prompts, new))
        tests = self._of_many(prompts, new) if self.parallel else self._of_one(prompts, new, tokens)
        if not tests:
            raise ConfigError("nothing to measure: both -p and -n are 0; give one of them, e.g. -p 512")
        for test in tests:
            if test.num_tokens > engine.context_length:
                raise ConfigError(
                    f"{test.num_tokens} tokens do not fit the context of {engine.context_length}; take fewer"
                )
            if tokens is not None and test.num_tokens > len(tokens):
                raise ConfigError(f"{test.name} takes {test.num_tokens} tokens, but the prompt file has {len(tokens)}")
        return tests

    def _of_one(self, prompts: list[int], new: list[int], tokens: list[int] | None) -> list[_Measured]:
        kinds = [{"n_prompt": n} for n in prompts] + [{"n_gen": n} for n in new]
        kinds += [{"n_prompt": prompt, "n_gen": count} for prompt, count in self.both]
        tests = [Case(**kind, n_depth=depth) for depth in self.depths for kind in kinds]
        return [_Measured(test.name, test.num_tokens, partial(measure, test, prompt=tokens)) for test in tests]

    def _of_many(self, prompts: list[int], new: list[int]) -> list[_Measured]:
        combinations = itertools.product(prompts or [0], new or [0], self.parallel or ())
        return [
            _Measured(
                f"pp{prompt}+tg{count} x {number}", prompt + count, partial(measure_parallel, number, prompt, count)
            )
            for prompt, count, number in combinations
            if prompt or count
        ]


def _tokens(engine: Engine, text: str) -> list[int]:
    if not text.strip():
        raise ConfigError("the prompt file is empty; give one with text")
    tokens = engine.tokenizer.encode(text, add_special=True, parse_special=False)
    return tokens[: engine.context_length]


def _pair(text: str) -> tuple[int, int]:
    numbers = text.split(",")
    if len(numbers) != 2 or not all(number.isdecimal() and int(number) for number in numbers):
        raise ConfigError(f"-pg is {text!r}, expected two numbers above 0, e.g. 512,128")
    return int(numbers[0]), int(numbers[1])


def _output(output: str | None, format_name: str | None) -> tuple[str, Path | None]:
    """Return the format, and the file if one is written."""
    if output is None or output in FORMATS:
        if output is not None and format_name not in (None, output):
            raise ConfigError(f"-o is {output} and --format is {format_name}; give one of them")
        return output or format_name or "md", None
    path = Path(output)
    form = format_name or path.suffix.removeprefix(".")
    if form not in FORMATS:
        raise ConfigError(
            f"-o is {output!r}, expected one of {', '.join(FORMATS)}, or a file with such a suffix, e.g. rows.json"
        )
    try:
        check_writable(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {cause_of(error)}") from error
    return form, path


MOST_NUMBERS = 1000
_PART = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)(?:(?P<by>[+*])(?P<step>\d+))?)?")


def read_numbers(option: str, text: str, *, least: int = 0, most: int | None = None) -> list[int]:
    """Return whole numbers from a list of numbers and ranges, separated by commas, in order and without duplicates.

    Args:
        option: flag, for messages.
        text: the list; a range is FIRST-LAST, FIRST-LAST+STEP or FIRST-LAST*FACTOR.
        least, most: the smallest and the largest allowed number.

    Raises:
        ConfigError: the text is no such list, or a number is not allowed.
    """
    numbers: list[int] = []
    for part in text.split(","):
        if re.fullmatch(r"\s*-\d+\s*", part):
            raise ConfigError(f"{option} is {text!r}, expected no {'number below 1' if least else 'negative number'}")
        if not (found := _PART.fullmatch(part.strip())) or len(part) > 40:
            raise ConfigError(
                f"{option} is {text!r}, expected whole numbers separated by commas, e.g. 128,512, or ranges, e.g. "
                "16-64+16 or 1-8*2"
            )
        numbers += _range(option, text, found)
    if min(numbers) < least:
        raise ConfigError(f"{option} is {text!r}, expected no {'number below 1' if least else 'negative number'}")
    if most is not None and max(numbers) > most:
        raise ConfigError(f"{option} is {text!r}, expected at most {most}")
    return list(dict.fromkeys(numbers))


def _range(option: str, text: str, found: re.Match[str]) -> list[int]:
    first = int(found["first"])
    if found["last"] is None:
        return [first]
    last, step, factor = int(found["last"]), 1, 1
    if found["by"] == "*":
        step, factor = 0, int(found["step"])
    elif found["by"] == "+":
        step = int(found["step"])
    if first * factor + step <= first:
        raise ConfigError(f"{option} is {text!r}, whose steps never reach the end; write 16-64+16 or 1-8*2")
    numbers, number = [], first
    while number <= last:
        numbers.append(number)
        number = number * factor + step
        if len(numbers) > MOST_NUMBERS:
            raise ConfigError(f"{option} is {text!r}, more than {MOST_NUMBERS} numbers; take larger steps")
    if not numbers:
        raise ConfigError(f"{option} is {text!r}, which ends before it begins; write {last}-{first}")
    return numbers
