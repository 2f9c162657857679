"""Sampling options of `run` and `chat`, and streaming of an answer with its figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from chunkrt.cli.command import option
from chunkrt.cli.shared_options import CONTEXT_FIELDS, engine_fields, refuse_without
from chunkrt.engine.generation import FinishReason
from chunkrt.engine.keywords import MAX_NEW_TOKENS
from chunkrt.engine.sampling import GREEDY, SamplingOptions
from chunkrt.engine.session import Session
from chunkrt.files import parse_json
from chunkrt.progress import ShownProgress

Command = TypeVar("Command", bound=Callable[..., Any])

UNLIMITED = 2**62
"""Number of new tokens that stands for no limit."""


def none_if(unset: int) -> Callable[[click.Context, click.Parameter, int | None], int | None]:
    """Return a callback that maps the number by which other tools unset an option to None."""
    return lambda context, parameter, value: None if value == unset else value


def parse_template_options(given: Sequence[str]) -> dict[str, Any]:
    """Return variables of a chat template from NAME=VALUE pairs; a value that is not JSON is text.

    Raises:
        BadParameter: a pair has no name or no value.
    """
    found: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{each!r} is not NAME=VALUE, e.g. enable_thinking=false")
        try:
            found[name] = parse_json(value)
        except ValueError:
            found[name] = value
    return found


def template_option(note: str) -> Callable[[Command], Command]:
    """Give a command --template-option, whose help ends with a note. It arrives as `template_options`, a dictionary."""
    return option(
        "--template-option",
        "template_options",
        group="Prompt",
        metavar="NAME=VALUE",
        multiple=True,
        callback=lambda context, parameter, value: parse_template_options(value),
        help=f"Set a variable of the model's chat template, e.g. enable_thinking=false; {note}.",
    )


_TYPES: dict[str, type] = {"float": float, "int": int, "bool": bool}


def _sampling_option(
    name: str, help: str, *aliases: str, group: str = "Sampling", unset: int | None = None
) -> Callable[[Command], Command]:
    """Return the option of a field of `SamplingOptions`; `unset` is the number by which other tools unset it."""
    field = SamplingOptions.__dataclass_fields__[name]
    kind = _TYPES[str(field.type).partition(" ")[0]]
    return option(
        *aliases,
        f"--{name.replace('_', '-')}",
        name,
        group=group,
        type=kind,
        is_flag=kind is bool,
        default=field.default,
        show_default=kind is float,
        callback=None if unset is None else none_if(unset),
        help=help,
    )


_OPTIONS = (
    option(
        "-n",
        "--max-new-tokens",
        group="Answer",
        type=int,
        default=MAX_NEW_TOKENS,
        show_default=True,
        callback=lambda context, parameter, value: UNLIMITED if value == -1 else value,
        help="Generate at most this number of tokens; -1 sets no limit.",
    ),
    _sampling_option("temperature", "Sampling temperature; 0 always takes the likeliest token.", "--temp"),
    _sampling_option("top_k", "Sample from this number of likeliest tokens; 0: all.", unset=0),
    _sampling_option(
        "top_p", "Sample from the smallest set of likeliest tokens whose total probability is at least this."
    ),
    _sampling_option(
        "min_p",
        "Exclude tokens whose probability is less than this factor times that of the likeliest token.",
    ),
    _sampling_option("repetition_penalty", "Reduce logits of earlier tokens by this factor; 1 has no effect."),
    _sampling_option("presence_penalty", "Subtract this from logits of tokens in the answer; 0 has no effect."),
    _sampling_option(
        "frequency_penalty", "Subtract this from logits, once per occurrence in the answer; 0 has no effect."
    ),
    _sampling_option("seed", "Random seed; -1 draws one.", "-s", unset=-1),
    _sampling_option("ignore_eos", "Continue after end tokens, up to -n tokens.", group="Answer"),
    _sampling_option(
        "min_new_tokens", "Generate at least this number of tokens before the answer may end.", group="Answer"
    ),
    option("--stop", group="Answer", multiple=True, help="End the answer before this text; may be repeated."),
    option("--system", group="Prompt", help="Put a system message before the prompt."),
    template_option("may be repeated"),
)
SAMPLING = tuple(name for name in SamplingOptions.__dataclass_fields__ if name != "logit_bias")
"""Fields of SamplingOptions that are command-line options."""
RANDOM = ("top_k", "top_p", "min_p")
"""Sampling options without effect at temperature 0."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer and its figures. Times are in seconds, rates in tokens per second.

    Attributes:
        prompt_tokens: number of prompt tokens that were computed.
        cached_tokens: number of prompt tokens that came from the prefix cache.
    """

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    prefill_tokens_per_second: float
    time_to_first_token_s: float
    decode_tokens_per_second: float | None

    def figures(self) -> str:
        """Return the figures as one line."""
        cached = f" and {self.cached_tokens} cached" if self.cached_tokens else ""
        decode = f"{self.decode_tokens_per_second:.1f}" if self.decode_tokens_per_second else "-"
        return (
            f"prompt {self.prompt_tokens} tokens{cached}, prefill {self.prefill_tokens_per_second:.1f} tokens/s, "
            f"time to first token {self.time_to_first_token_s:.3f} s, "
            f"decode {self.new_tokens} tokens at {decode} tokens/s ({self.finish_reason})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


def generation_options(command: Command) -> Command:
    """Give a command the options of sampling, answers and context shift; they arrive as keyword arguments."""
    command = engine_fields(*CONTEXT_FIELDS)(command)
    for decorate in reversed(_OPTIONS):
        command = decorate(command)
    return command


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], SamplingOptions, dict[str, Any]]:
    """Split a command's keyword arguments into engine options, sampling options and other generation options.

    Raises:
        ConfigError: a sampling option is out of range.
    """
    sampling = SamplingOptions(**{name: options.pop(name) for name in SAMPLING})
    generation = {name: options.pop(name) for name in ("max_new_tokens", "stop", "system", "template_options")}
    return options, sampling, generation


def refuse_idle(sampling: SamplingOptions) -> None:
    """Raise ConfigError if a sampling option was given that has no effect at temperature 0."""
    if sampling.temperature == 0:
        idle = [name for name in RANDOM if getattr(sampling, name) != getattr(GREEDY, name)]
        refuse_without("--temperature above 0", *idle)


def as_advised(sampling: SamplingOptions, advised: Mapping[str, float]) -> SamplingOptions:
    """Return sampling options in which the model's advised values replace options that were not given.

    At temperature 0, other advised values are ignored.

    Raises:
        ConfigError: an advised value is out of range.
    """
    source = click.get_current_context().get_parameter_source
    taken = {name: value for name, value in advised.items() if source(name) is ParameterSource.DEFAULT}
    if (taken if "temperature" in taken else vars(sampling))["temperature"] == 0:
        taken = {name: value for name, value in taken.items() if name not in RANDOM}
    return replace(sampling, **taken)  # type: ignore[arg-type]


def stream_answer(
    session: Session,
    tokens: Sequence[int],
    *,
    sampling: SamplingOptions,
    max_new_tokens: int,
    stop: Sequence[str],
    emit: Callable[[str], None],
) -> Answer:
    """Prefill tokens, generate, and pass each piece of text to `emit` as soon as it is final."""
    begin = time.perf_counter()
    with ShownProgress() as progress:
        prefill = session.prefill(tokens, progress=progress)
    first: float | None = None
    pieces = []
    last = begin
    for piece in session.generate(max_new_tokens=max_new_tokens, sampling=sampling, stop=stop):
        last = time.perf_counter()
        first = first or last
        emit(piece.text)
        pieces.append(piece)
    assert first is not None
    decoding = last - first
    return Answer(
        text="".join(piece.text for piece in pieces),
        finish_reason=pieces[-1].finish_reason or "stop",
        prompt_tokens=prefill.num_tokens,
        cached_tokens=prefill.num_cached,
        new_tokens=len(pieces),
        prefill_tokens_per_second=prefill.num_tokens / prefill.seconds,
        time_to_first_token_s=first - begin,
        decode_tokens_per_second=(len(pieces) - 1) / decoding if len(pieces) > 1 else None,
    )
