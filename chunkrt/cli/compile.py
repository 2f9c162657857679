"""`chunkrt compile`: an engine directory that runs without its checkpoint, here or on a device."""

from __future__ import annotations

import json
from pathlib import Path

import click

from chunkrt.backends.qnn.options import HtpOptions
from chunkrt.cli.options import htp_option, progress_bar, verbose_option
from chunkrt.errors import ConfigError
from chunkrt.options import DEFAULT_CHUNK_LENGTH, EngineOptions
from chunkrt.quant.scheme import SCHEMES


@click.command()
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to write.")
@click.option("--soc", "socs", help="SoCs to compile for, as in SM8650,SM8750.  [default: none, CPU only]")
@click.option("--chunk", "chunks", help="Chunk lengths for the NPU, as in 1,32,128.  [default: 32]")
@click.option("--scheme", type=click.Choice(list(SCHEMES)), help="Quantisation.  [default: w8a16 with --soc]")
@click.option("--calibration", type=click.Path(path_type=Path), help="What `chunkrt calibrate` wrote.")
@click.option("--place", "placement", type=click.Path(path_type=Path), help="TOML file that places modules.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@htp_option
@verbose_option
def compile(
    model: str,
    output: Path,
    socs: str | None,
    chunks: str | None,
    as_json: bool,
    scheme: str | None,
    calibration: Path | None,
    placement: Path | None,
    htp: HtpOptions,
) -> None:
    """Compile MODEL: a catalogue name, a GGUF file, a Hugging Face folder, or an engine directory.

    What was compiled is cached: an interrupted compilation goes on where it stopped. The folder is written whole or
    not at all.
    """
    from chunkrt.deploy import compile_engine

    if chunks is not None and socs is None:
        raise ConfigError("--chunk says what an NPU is compiled for; name its SoC with --soc")
    options = EngineOptions(
        npu="qnn" if socs is not None else "native",
        scheme=scheme,
        calibration=calibration,
        placement=placement,
        htp=htp,
    )
    with progress_bar() as progress:
        written = compile_engine(
            model,
            output,
            options,
            socs=[] if socs is None else [name.strip() for name in socs.split(",")],
            chunk_lengths=[DEFAULT_CHUNK_LENGTH] if chunks is None else _chunk_lengths(chunks),
            progress=progress,
        )
        progress("", 0, 0)
    if as_json:
        click.echo(json.dumps(written, indent=1))
        return
    click.echo(f"{output}: {written['bytes'] / 1e6:.0f} MB, scheme {written['scheme']}")
    for target in written["npu"]:
        click.echo(f"  {target['soc']}, chunks of {target['chunk_length']}: {target['contexts']} contexts")


def _chunk_lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--chunk is {text!r}, expected whole numbers with commas between, as in 1,32,128") from error
    if any(length < 1 for length in lengths):
        raise ConfigError(f"--chunk is {text!r}, expected numbers of at least 1")
    return list(dict.fromkeys(lengths))
