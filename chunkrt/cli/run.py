"""`chunkrt run`: a prompt and its answer, or many."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from chunkrt.cli.batch import answer_prompts
from chunkrt.cli.command import GroupedCommand, model_argument
from chunkrt.cli.generation import generation_options, refuse_idle, split_options, stream_answer
from chunkrt.cli.options import engine_options, open_engine, refuse_without, trace_option, written_trace
from chunkrt.cli.prompts import read_prompt, read_prompts


@click.command(cls=GroupedCommand, first=("prompt", "files", "max_new_tokens", "temperature", "as_json"))
@model_argument
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt; - is standard input, @FILE a file's text.")
@click.option(
    "-f", "--file", "files", multiple=True, metavar="FILE", help="Text that comes before -p; - is standard input."
)
@click.option("--messages", "messages_file", metavar="FILE", help="A chat so far, as a JSON list of messages.")
@click.option(
    "--prompts", "prompts_file", metavar="FILE", help="Many prompts as JSON lines; their answers are JSON lines too."
)
@click.option("--prefill-answer", metavar="TEXT", help="What the answer begins with.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer and figures as one JSON object.")
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
    """Answer a prompt with MODEL: a catalogue name, an id of the hub (org/name, org/name:Q4_0), a GGUF file, a Hugging
    Face folder, an ONNX decoder or an engine directory.

    Without -p, -f and --messages the prompt is read from standard input. The answer streams to stdout, figures go to
    stderr. Of many prompts (--prompts FILE.jsonl) a line each is a text, or an object with "prompt" or "messages", and
    perhaps an "id"; they share chunks.
    """
    engine_settings, sampling, generation = split_options(options)
    refuse_idle(sampling)
    system, template_options = generation.pop("system"), generation.pop("template_options")
    if prompts_file is not None:
        if prompt is not None or files or messages_file or prefill_answer or trace:
            raise click.UsageError("--prompts goes without -p, -f, --messages, --prefill-answer and --trace")
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
    begin = time.perf_counter()
    with written_trace(trace, model) as records, open_engine(model, engine_settings) as engine:
        load_seconds = time.perf_counter() - begin
        tokenizer = engine.require_tokenizer()
        tokens = asked.tokens(tokenizer, raw=raw, system=system, template_options=template_options)
        session = engine.session()
        session.on_run = records.append if trace else None
        emit = _ignore if as_json else _print
        emit(asked.prefill_answer)
        answer = stream_answer(session, tokens, sampling=sampling, **generation, emit=emit)
        if as_json:
            result = answer.as_dict() | {"text": asked.prefill_answer + answer.text}
            click.echo(json.dumps({"model": model, **result, "load_s": load_seconds}, ensure_ascii=False))
        else:
            click.echo()
            click.echo(f"[load {load_seconds:.2f} s, {answer.figures()}]", err=True)


def _print(piece: str) -> None:
    click.echo(piece, nl=False)


def _ignore(piece: str) -> None:
    """The answer is printed whole, as JSON, at the end."""
