"""`chunkrt compare`: compare a decoder with Transformers, value by value."""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.cli.command import STATUS_OF_NO, GroupedCommand, json_option, model_argument, option
from chunkrt.cli.shared_options import engine_fields, verbose_option
from chunkrt.compile.compiler import prepare_checkpoint
from chunkrt.engine.resolve import find_checkpoint
from chunkrt.errors import ConfigError, ModelError
from chunkrt.progress import ShownProgress
from chunkrt.quant.scheme import SCHEMES, Recipe, find_scheme
from chunkrt.testing.comparison import Expected, compare_decoder
from chunkrt.testing.transformers_values import expected_values, random_tokens
from chunkrt.tokenizer import Tokenizer

DEFAULT_NUM_TOKENS = 24


@click.command(cls=GroupedCommand, first="against reference text num_tokens scheme chunk_length dump as_json")
@model_argument
@option(
    "--against",
    group="Measurement",
    metavar="transformers|FILE",
    default="transformers",
    show_default=True,
    help="Transformers, which runs the checkpoint now, or a file of chunkrt.testing.make_expected.",
)
@option(
    "--reference",
    group="Measurement",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder that Transformers loads.  [default: MODEL]",
)
@option("--text", group="Measurement", help=f"Text to compute.  [default: {DEFAULT_NUM_TOKENS} random tokens]")
@option("--tokens", "num_tokens", group="Measurement", type=int, help="Maximum number of tokens.")
@option(
    "--scheme",
    group="Measurement",
    type=click.Choice(list(SCHEMES)),
    default="float",
    show_default=True,
    help="Quantisation of the linears. Under another scheme than float the largest errors are shown.",
)
@option("--chunk", "chunk_length", group="Measurement", type=int, help="Tokens computed at once.  [default: all]")
@option(
    "--dump",
    group="Measurement",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write all compared values to .npy files in this folder.",
)
@json_option("Print all figures as JSON.")
@engine_fields("adapter")
@verbose_option
def compare(
    model: str,
    against: str,
    reference: Path | None,
    text: str | None,
    num_tokens: int | None,
    scheme: str,
    chunk_length: int | None,
    dump: Path | None,
    as_json: bool,
    adapter: Path | None,
) -> None:
    """Compare the values in MODEL with those in Transformers, and show the first one that differs.

    Each value is computed from Transformers' values before it, so a mistake in a decoder, or in the way in which its
    weights are read, shows where it is made. MODEL is a Hugging Face folder; for a GGUF file or an ONNX decoder, name
    the folder that it was made from with --reference. With --adapter, PEFT merges the adapter in Transformers.

    The exit status is 0 if all values are equal, 3 if one differs, 1 if MODEL cannot be compared.
    """
    with ShownProgress() as progress:
        checkpoint, _ = find_checkpoint(model, progress)
        if against != "transformers":
            if text is not None or num_tokens is not None or reference is not None:
                raise ConfigError("a file of expected values fixes the tokens; omit --text, --tokens and --reference")
            expected = Expected.load(Path(against))
        else:
            folder = reference or checkpoint
            if not folder.is_dir():
                raise ConfigError(f"Transformers cannot load {folder}; name a folder with --reference")
            if adapter is not None and not adapter.is_dir():
                raise ConfigError(f"PEFT cannot load {adapter}; name a folder of PEFT, or compare --against FILE")
            expected = expected_values(folder, _tokens(folder, text, num_tokens), adapter=adapter)
        recipe = Recipe(scheme=find_scheme(scheme))
        name = Path(model).name
        prepared = prepare_checkpoint(checkpoint, recipe, {}, model=name, adapter=adapter, progress=progress)
        found = compare_decoder(
            prepared,
            expected,
            chunk_length=chunk_length,
            dump=dump,
            progress=lambda done, total: progress("comparing", done, total),
        )
    click.echo(json.dumps(found.to_dict(), indent=1) if as_json else "\n".join(found.lines()))
    if scheme == "float" and not found.is_equal:
        raise click.exceptions.Exit(STATUS_OF_NO)


def _tokens(folder: Path, text: str | None, num_tokens: int | None) -> NDArray[np.int64]:
    if num_tokens is not None and num_tokens < 1:
        raise ConfigError(f"--tokens is {num_tokens}, expected at least 1")
    if text is None:
        return random_tokens(folder, num_tokens or DEFAULT_NUM_TOKENS)
    tokenizer = Tokenizer.from_source(open_checkpoint(folder))
    if tokenizer is None:
        raise ModelError(f"{folder} has no tokenizer; omit --text to compare random tokens")
    ids = tokenizer.encode(text, add_special=True, parse_special=False)
    if not ids:
        raise ConfigError("--text has no tokens")
    return np.array(ids[:num_tokens], np.int64)
