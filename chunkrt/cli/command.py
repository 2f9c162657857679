"""A command as all of them are: MODEL by position or as -m, and options in groups in --help, the most used first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from chunkrt.checkpoints.hub import cached_models, parse_hub_id
from chunkrt.cli.peers import hidden_options
from chunkrt.errors import ChunkrtError, ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])

STATUS_OF_NO = 3
"""Exit status of a command that was asked whether something is so, and found that it is not."""

FEW = 10
"""Options that need no groups."""

GROUPS: dict[str, tuple[str, ...]] = {
    "What is measured": ("both", "depths", "prompt_file", "parallel"),
    "Prompt": (
        "prompt",
        "files",
        "messages_file",
        "prompts_file",
        "system",
        "template_options",
        "prefill_answer",
        "raw",
    ),
    "Answer": (
        "max_new_tokens",
        "min_new_tokens",
        "ignore_eos",
        "stop",
        "as_json",
        "markdown",
        "trace",
        "format_name",
        "plot",
    ),
    "Sampling": (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
    ),
    "Model": ("model_option", "more_models", "revision", "settings_file"),
    "Quantisation": ("scheme", "calibration", "shadow", "budget", "outputs", "equalisation", "rotation"),
    "Where it runs": (
        "npu",
        "soc",
        "htp",
        "on_npu_failure",
        "decode_on",
        "attention",
        "npu_window",
        "npu_graph",
        "weights",
        "placement",
        "npu_strict",
        "ops",
    ),
    "How it runs": (
        "threads",
        "affinity",
        "chunk_length",
        "attention_math",
        "policy",
        "chunks_in_flight",
        "batcher",
        "queue",
    ),
    "Context and memory": (
        "context_length",
        "context_shift",
        "context_keep",
        "cache_dtype",
        "cache_memory",
        "prefix_cache",
        "prefix_cache_memory",
        "prefix_cache_disk",
    ),
}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


class GroupedCommand(click.Command):
    """Shows its options in groups.

    Args:
        first: names of the options that stand first, the most used.
    """

    def __init__(self, *arguments: Any, first: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._first = tuple(first)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Its own, and what peers have that it has not, so that it can be refused by name."""
        own = super().get_params(ctx)
        names = {name for parameter in own for name in parameter.opts}
        return [*own, *(option for option in hidden_options() if option.opts[0] not in names)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, each with its group; what has none comes last."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        records = {p.name: record for p in options if (record := p.get_help_record(ctx)) is not None}
        if len(records) <= FEW or not self._first:
            super().format_options(ctx, formatter)
            return
        sections: dict[str, list[tuple[str, str]]] = {group: [] for group in ("Most used", *GROUPS, "Other")}
        for name in (*self._first, *(name for name in records if name not in self._first)):
            group = "Most used" if name in self._first else _GROUP_OF.get(str(name), "Other")
            sections[group].append(records[name])
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class ModelName(click.ParamType[str]):
    """A model by any of its names; the shell completes those that are known, and files."""

    name = "model"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Any text may be one."""
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The catalogue, the hub's cache, and files."""
        from chunkrt.checkpoints.catalogue import entries

        try:
            names = [*entries(), *(name for name, _ in cached_models())]
        except ChunkrtError:
            names = []
        known = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return [*known, CompletionItem(incomplete, type="file")]


_MODEL = ModelName()
_MODEL_HELP = "The same as MODEL: a name of the catalogue or the hub, a file or a folder."


def model_argument(command: Command) -> Command:
    """Give a command MODEL, also as -m, and --revision; the model's name arrives as the keyword argument `model`."""

    @wraps(command)
    def with_model(
        *arguments: Any, model: str | None, model_option: str | None, revision: str | None, **options: Any
    ) -> Any:
        if model is not None and model_option is not None:
            raise click.UsageError(f"MODEL is {model!r} and -m is {model_option!r}; give one of them")
        if (name := model if model is not None else model_option) is None:
            raise click.MissingParameter(ctx=click.get_current_context(), param_hint="'MODEL'", param_type="argument")
        return command(*arguments, model=with_revision(name, revision), **options)

    wrapped = click.option("--revision", help="Branch, tag or commit of a model of the hub.")(with_model)
    wrapped = click.option("-m", "-hf", "--model", "model_option", type=_MODEL, metavar="MODEL", help=_MODEL_HELP)(
        wrapped
    )
    return cast(Command, click.argument("model", type=_MODEL, required=False)(wrapped))


def with_revision(model: str, revision: str | None) -> str:
    """A model's name with a revision. Raises ConfigError if it is no id of the hub, or has another already."""
    if revision is None:
        return model
    if parse_hub_id(named := f"{model}@{revision}") is None:
        raise ConfigError(f"--revision is {revision!r}, but {model} is no id of the hub, as org/name is; leave it away")
    return named
