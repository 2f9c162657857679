"""`chunkrt run`: answer one or many prompts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from chunkrt.cli.command import GroupedCommand, json_option, model_argument, option
from chunkrt.cli.generation_options import generation_options, refuse_idle, split_options, stream_answer
from chunkrt.cli.prompts import answer_prompts, read_prompt, read_prompts
from chunkrt.cli.shared_options import engine_options, open_engine, refuse_without, trace_option, written_trace
from chunkrt.tokenizer.chat_template import prepare


@click.command(
    cls=GroupedCommand,
    first="prompt files messages_file system max_new_tokens temperature npu scheme context_length as_json",
)
@model_argument
@option(
    "-p", "--prompt", group="Prompt", metavar="TEXT", help="Prompt; - reads it from standard input, @FILE from a file."
)
@option(
    "-f",
    "--file",
    "files",
    group="Prompt",
    multiple=True,
    metavar="FILE",
    help="File whose text is put before the prompt; - is standard input.",
)
@option(
    "--messages",
    "messages_file",
    group="Prompt",
    metavar="FILE",
    help="Continue the chat in FILE, a JSON list of messages.",
)
@option(
    "--prompts",
    "prompts_file",
    group="Prompt",
    metavar="FILE",
    help="Answer the prompts in FILE, JSON lines, and print one JSON line per answer.",
)
@option("--prefill-answer", group="Prompt", metavar="TEXT", help="Begin the answer with this text.")
@option("--raw", group="Prompt", is_flag=True, help="Continue the prompt without the model's chat template.")
@json_option("Print the answer and its statistics as one JSON object.")
@trace_option
@generation_options
@engine_options
def run(
    model: str,
    prompt: str | None,
    files: tuple[str, ...],
    messages_file: str | None,
    prompts_file: str | None,
    prefill_answer: str | None,
    raw: bool,
    as_json: bool,
    trace: Path | None,
    **options: Any,
) -> None:
    """Answer a prompt with MODEL: a catalogue name, a hub id (org/name or org/name:Q4_0), a GGUF file, a Hugging Face
    folder, an ONNX decoder or an engine directory.

    Without -p, -f and --messages, the prompt is read from standard input. The answer is printed on stdout, and
    statistics on stderr. For a conversation, use `chunkrt chat MODEL`.
    """
    engine_settings, sampling, generation = split_options(options)
    refuse_idle(sampling)
    system, template_options = generation.pop("system"), generation.pop("template_options")
    if prompts_file is not None:
        if prompt is not None or files or messages_file or prefill_answer or trace:
            raise click.UsageError("--prompts excludes -p, -f, --messages, --prefill-answer and --trace")
        prompts = read_prompts(prompts_file)
        with open_engine(model, engine_settings) as engine:
            answer_prompts(
                engine,
                prompts,
                raw=raw,
                system=system,
                template_options=template_options,
                sampling=sampling,
                **generation,
            )
        return
    refuse_without("--prompts", "batcher", "queue", "cache_memory")
    asked = read_prompt(prompt, files, messages_file, prefill_answer)
    if not raw:
        prepare()
    if engine_settings.get("prefix_cache") is None and engine_settings.get("prefix_cache_memory") is None:
        engine_settings["prefix_cache"] = "off"  # nothing follows that could use it
    begin = time.perf_counter()
    with written_trace(trace, model) as traced, open_engine(model, engine_settings) as engine:
        load_seconds = time.perf_counter() - begin
        tokenizer = engine.tokenizer
        tokens = asked.tokens(tokenizer, raw=raw, system=system, template_options=template_options)
        session = engine.session()
        session.on_run = traced.records.append if trace else None
        emit = _ignore if as_json else _print
        emit(asked.prefill_answer)
        answer = stream_answer(session, tokens, sampling=sampling, **generation, emit=emit)
        traced.end(engine)
        if as_json:
            result = answer.as_dict() | {"text": asked.prefill_answer + answer.text}
            click.echo(
                json.dumps(
                    {"model": model, "attention_math": engine.attention_math, **result, "load_s": load_seconds},
                    ensure_ascii=False,
                )
            )
        else:
            click.echo()
            click.echo(f"[load {load_seconds:.2f} s, {answer.figures()}]", err=True)


def _print(piece: str) -> None:
    click.echo(piece, nl=False)


def _ignore(piece: str) -> None:
    """Discard a piece; the complete answer is printed as JSON at the end."""
