"""`chunkrt compile`: write an engine directory, which runs without its checkpoint, on this machine or a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from chunkrt.backends.qnn.htp_options import HtpOptions
from chunkrt.cli.command import GroupedCommand, json_option, model_argument, option
from chunkrt.cli.shared_options import (
    QUANTISATION_FIELDS,
    engine_fields,
    refuse_without,
    settings_option,
    verbose_option,
)
from chunkrt.engine.options import DEFAULT_CHUNK_LENGTH, EngineOptions
from chunkrt.errors import ConfigError
from chunkrt.graph.placement import Placement
from chunkrt.progress import ShownProgress

_ATTENTION = ("attention", "npu_window", "npu_graph", "npu_sinks", "context_length", "cache_dtype")


@click.command(
    cls=GroupedCommand,
    first="output soc chunk_length scheme attention npu_window context_length placement for_host as_json",
)
@model_argument
@option("-o", "--output", group="Output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@option("--soc", group="Devices", help="SoCs to compile for, e.g. SM8650,SM8750.  [default: none, for the CPU only]")
@option("--chunk", "chunk_length", group="Execution", help="Chunk lengths for the NPU, e.g. 1,32,128.  [default: 32]")
@engine_fields("adapter", "adapters", *QUANTISATION_FIELDS, "placement", "npu_strict", *_ATTENTION)
@option(
    "--for-host",
    group="Output",
    is_flag=True,
    help="Write the files that a C++ program without chunkrt needs, and no others.",
)
@json_option("Print a summary as JSON.")
@engine_fields("htp")
@verbose_option
@settings_option(
    "soc", "chunk_length", "adapter", "adapters", *QUANTISATION_FIELDS, "placement", "npu_strict", *_ATTENTION, "htp"
)
def compile(
    model: str,
    output: Path,
    soc: str | None,
    chunk_length: str | int | None,
    for_host: bool,
    as_json: bool,
    placement: Path | Placement | None,
    npu_strict: bool,
    htp: HtpOptions,
    **settings: Any,
) -> None:
    """Compile MODEL, a catalogue name, a GGUF file, a Hugging Face folder, an ONNX decoder or an engine directory.

    Compiled parts are cached, so an interrupted compilation continues where it stopped. The folder is written
    completely or not at all.

    The folder keeps --attention, --npu-window, --npu-graph, --npu-sinks, --context and --cache-type q8_0, which
    `chunkrt run` then uses.
    If all layers are on the NPU, --for-host writes only the files for a C++ program on a phone; see docs/phones.md.

    From a settings file, soc, chunk_length (with a SoC), adapter, placement, htp, attention and quantisation are used.
    Other settings, e.g. policy and chunks_in_flight, are not compiled: give the same file to `chunkrt run` or `bench`.
    """
    from chunkrt.engine.deploy import compile_engine

    if soc is None:
        refuse_without("--soc", *_ATTENTION, "for_host")
    elif settings["attention"] != "npu" and placement is None:
        refuse_without("--attention npu", "npu_window", "npu_graph", "npu_sinks", "context_length", "cache_dtype")
    is_chunk_given = click.get_current_context().get_parameter_source("chunk_length") is ParameterSource.COMMANDLINE
    if is_chunk_given and soc is None:
        raise ConfigError("--chunk needs an NPU to compile for; name its SoC with --soc")
    options = EngineOptions(
        npu="qnn" if soc is not None else "native",
        placement=placement,
        npu_strict=npu_strict,
        htp=htp,
        **settings,
    )
    with ShownProgress() as progress:
        written = compile_engine(
            model,
            output,
            options,
            socs=[] if soc is None else [name.strip() for name in soc.split(",")],
            chunk_lengths=[DEFAULT_CHUNK_LENGTH] if chunk_length is None else _chunk_lengths(str(chunk_length)),
            for_host=for_host,
            progress=progress,
        )
        progress("", 0, 0)
    if as_json:
        click.echo(json.dumps(written, indent=1))
        return
    peak = written["peak_memory_bytes"] / 1e6
    click.echo(f"{output}: {written['bytes'] / 1e6:.0f} MB, scheme {written['scheme']}; peak memory {peak:.0f} MB")
    for target in written["npu"]:
        click.echo(f"  {target['soc']}, chunks of {target['chunk_length']}: {target['contexts']} contexts")


def _chunk_lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--chunk is {text!r}, expected whole numbers separated by commas, e.g. 1,32,128") from error
    if any(length < 1 for length in lengths):
        raise ConfigError(f"--chunk is {text!r}, expected numbers of at least 1")
    return list(dict.fromkeys(lengths))
