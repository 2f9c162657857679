"""What `run` and `chat` share: sampling options, and streaming an answer with figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from chunkrt.cli.options import CONTEXT_FIELDS, engine_fields, refuse_without
from chunkrt.engine.generation import FinishReason
from chunkrt.engine.sampling import GREEDY, SamplingOptions
from chunkrt.engine.session import Session
from chunkrt.files import parse_json
from chunkrt.progress import ShownProgress

Command = TypeVar("Command", bound=Callable[..., Any])

UNLIMITED = 2**62
"""New tokens that nobody sees the end of."""


def none_if(unset: int) -> Callable[[click.Context, click.Parameter, int | None], int | None]:
    """Takes the number by which peers say that an option is not set."""
    return lambda context, parameter, value: None if value == unset else value


def parse_template_options(given: Sequence[str]) -> dict[str, Any]:
    """Variables of a chat template, each given as NAME=VALUE; a value that is not JSON is text.

    Raises BadParameter if one has no name or no value.
    """
    found: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{each!r} is not NAME=VALUE, as in enable_thinking=false")
        try:
            found[name] = parse_json(value)
        except ValueError:
            found[name] = value
    return found


def template_option(note: str) -> Callable[[Command], Command]:
    """Give a command --template-option, whose help ends with a note. It arrives as `template_options`, a dictionary."""
    return click.option(
        "--template-option",
        "template_options",
        metavar="NAME=VALUE",
        multiple=True,
        callback=lambda context, parameter, value: parse_template_options(value),
        help=f"Set a variable of the model's chat template, as in enable_thinking=false; {note}.",
    )


_OPTIONS = (
    click.option(
        "-n",
        "--max-new-tokens",
        type=int,
        default=256,
        show_default=True,
        callback=lambda context, parameter, value: UNLIMITED if value == -1 else value,
        help="Tokens to generate at most; -1: until the model ends.",
    ),
    click.option(
        "--temp", "--temperature", "temperature", type=float, default=0.0, show_default=True, help="0: greedy."
    ),
    click.option("--top-k", type=int, callback=none_if(0), help="Keep the k likeliest tokens; 0: all."),
    click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep tokens up to this probability."),
    click.option("--min-p", type=float, default=0.0, show_default=True, help="Keep tokens this likely at least."),
    click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="1: none."),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True, help="0: none."),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True, help="0: none."),
    click.option("-s", "--seed", type=int, callback=none_if(-1), help="Of the random numbers; -1: a fresh one."),
    click.option("--ignore-eos", is_flag=True, help="Let no end token end the answer; -n does."),
    click.option("--min-new-tokens", type=int, default=0, help="Tokens before which nothing ends the answer."),
    click.option("--stop", multiple=True, help="End before this text; may be given several times."),
    click.option("--system", help="A system message before the prompt."),
    template_option("may be given several times"),
)
SAMPLING = tuple(name for name in SamplingOptions.__dataclass_fields__ if name != "logit_bias")
"""Fields that are options."""
RANDOM = ("top_k", "top_p", "min_p")
"""Those of them that greedy answers do not ask."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer and its figures. Times in seconds; rates in tokens per second. `prompt_tokens`: that were run;
    `cached_tokens`: that were not, since the prefix cache had them."""

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    prefill_tokens_per_second: float
    time_to_first_token_s: float
    decode_tokens_per_second: float | None

    def figures(self) -> str:
        """One line for a person."""
        cached = f" and {self.cached_tokens} cached" if self.cached_tokens else ""
        decode = f"{self.decode_tokens_per_second:.1f}" if self.decode_tokens_per_second else "-"
        return (
            f"prompt {self.prompt_tokens} tokens{cached}, prefill {self.prefill_tokens_per_second:.1f} tokens/s, "
            f"time to first token {self.time_to_first_token_s:.3f} s, "
            f"decode {self.new_tokens} tokens at {decode} tokens/s ({self.finish_reason})"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def generation_options(command: Command) -> Command:
    """Give a command the sampling options, -n, --stop, --system, and those of a context that shifts.

    They arrive as keyword arguments.
    """
    command = engine_fields(*CONTEXT_FIELDS)(command)
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], SamplingOptions, dict[str, Any]]:
    """Sort a command's keyword arguments into the engine's, the sampler's, and the rest of the generation's.

    Raises:
        ConfigError: a sampling option is out of range.
    """
    sampling = SamplingOptions(**{name: options.pop(name) for name in SAMPLING})
    generation = {name: options.pop(name) for name in ("max_new_tokens", "stop", "system", "template_options")}
    return options, sampling, generation


def refuse_idle(sampling: SamplingOptions) -> None:
    """Raises ConfigError if the present command was given a sampling option that does nothing."""
    if sampling.temperature == 0:
        idle = [name for name in RANDOM if getattr(sampling, name) != getattr(GREEDY, name)]
        refuse_without("--temperature above 0", *idle)


def as_advised(sampling: SamplingOptions, advised: Mapping[str, float]) -> SamplingOptions:
    """The sampling options of the present command, with what a model's makers advise for those that nobody gave.

    A temperature of 0 is greedy, whatever else is advised.

    Raises:
        ConfigError: an advised number is out of range.
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
    """Prefill tokens, generate, and hand each piece of text to `emit` as soon as it is certain."""
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
