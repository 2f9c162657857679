"""`chunkrt plan`: how a model is cut into subgraphs, and what each costs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from chunkrt.cli.options import engine_options, progress_bar, ranks_options
from chunkrt.engine.options import DEFAULT_CHUNK_LENGTH, EngineOptions
from chunkrt.engine.resolve import check_compiled, choose_recipe, engine_folder, find_checkpoint, options_placement
from chunkrt.engine.roles import compiled_chunk_length
from chunkrt.engine_directory.figures import (
    AttentionFigures,
    SubgraphFigures,
    attention_figures,
    linears_by_weight_bits,
    subgraph_figures,
)
from chunkrt.engine_directory.manifest import is_engine_directory, open_weights, read_manifest, read_plan
from chunkrt.engine_directory.weights import check_shadowed, settle
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.graph.ranks import ALONE, Ranks
from chunkrt.quant.scheme import Scheme, check_scheme_of_ranks


@click.command()
@click.argument("model")
@click.option("--prompt-length", type=int, default=512, show_default=True, help="Tokens, for the attention's FLOPs.")
@click.option("--save-onnx", type=click.Path(path_type=Path, file_okay=False), help="Write each subgraph as ONNX here.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan and its figures as JSON.")
@ranks_options
@engine_options
def plan(
    model: str,
    prompt_length: int,
    save_onnx: Path | None,
    as_json: bool,
    size: int | None,
    rank: int | None,
    **settings: Any,
) -> None:
    """Show the subgraphs of MODEL: device, weights, bytes across the boundary, FLOPs, state."""
    options = EngineOptions(**settings)
    if prompt_length < 1:
        raise ConfigError(f"--prompt-length is {prompt_length}, expected at least 1")
    ranks = chosen_ranks(model, rank, size)
    found, scheme, chunk_length = read_model(model, options, ranks)
    figures = subgraph_figures(found, scheme, chunk_length=chunk_length)
    attention = attention_figures(found, chunk_length=chunk_length, prompt_length=prompt_length)
    if save_onnx:
        _save_onnx(model, options, save_onnx, ranks)
    if as_json:
        summary = {
            "chunk": chunk_length,
            "scheme": scheme.name,
            "ranks": asdict(ranks),
            "linears_by_weight_bits": linears_by_weight_bits(found, scheme),
            "prompt_length": prompt_length,
            "subgraphs": [asdict(f) for f in figures],
            "attention": asdict(attention),
            "plan": json.loads(found.to_json()),
        }
        click.echo(json.dumps(summary, indent=1))
    else:
        _print(figures, attention, ranks, chunk_length, prompt_length)
        if scheme.weight_bits == 4:
            counts = linears_by_weight_bits(found, scheme)
            click.echo(f"weights of {counts[4]} linears have 4 bits, of {counts[8]} 8 bits")


def chosen_ranks(model: str, rank: int | None, size: int | None) -> Ranks:
    """The ranks of the command line, or else those that an engine directory is for."""
    if rank is not None and size is None:
        raise ConfigError(f"--rank {rank} needs --ranks, how many there are")
    if size is None and is_engine_directory(Path(model)):
        return read_manifest(Path(model)).ranks
    return Ranks(rank or 0, 1 if size is None else size)


def read_model(model: str, options: EngineOptions, ranks: Ranks = ALONE) -> tuple[Plan, Scheme, int]:
    """A model's plan, and the scheme and the chunk length that an engine would take.

    No weight is read, unless a scheme has to be searched for.

    Raises:
        ConfigError, ModelError: as `chunkrt.load`.
    """
    if is_engine_directory(Path(model)):
        check_compiled(Path(model), options, ranks)
        manifest = read_manifest(Path(model))
        found, scheme = read_plan(Path(model)), manifest.scheme
        compiled_for = compiled_chunk_length(manifest)
    else:
        from chunkrt.compile.compiler import open_decoder, prepare
        from chunkrt.graph.partition import plan_decoder

        with progress_bar() as progress:
            checkpoint, default_scheme = find_checkpoint(model, progress)
            recipe = choose_recipe(options, default_scheme)
            scheme = recipe.scheme
            check_scheme_of_ranks(scheme, ranks.size)
            source, decoder = open_decoder(checkpoint, ranks)
            if recipe.search:
                plain = plan_decoder(source, decoder, {})
                scheme, _ = prepare(plain, checkpoint, recipe, options.calibration, model=model, progress=progress)
        planned = plan_decoder(source, decoder, options_placement(options), scheme.is_shadowed)
        found, scheme = planned.plan, settle(planned, scheme)
        check_shadowed(found, scheme)
        compiled_for = DEFAULT_CHUNK_LENGTH
    chunk_length = options.chunk_length or compiled_for
    if chunk_length > found.context_length:
        raise ConfigError(f"--chunk is {chunk_length}, longer than the model's context of {found.context_length}")
    return found, scheme, chunk_length


def _save_onnx(model: str, options: EngineOptions, folder: Path, ranks: Ranks) -> None:
    from chunkrt.backends.onnx.scheme import save_subgraphs

    with progress_bar() as progress:
        engine = engine_folder(model, options, progress, ranks)
        scheme = read_manifest(engine).scheme
        num_files = save_subgraphs(
            read_plan(engine), scheme, open_weights(engine), folder, lambda d, t: progress("writing ONNX", d, t)
        )
    click.echo(f"{num_files} ONNX files written to {folder}", err=True)


def _print(
    figures: list[SubgraphFigures],
    attention: AttentionFigures,
    ranks: Ranks,
    chunk_length: int,
    prompt_length: int,
) -> None:
    row = "{:14} {:4} {:8} {:>6} {:>12} {:>13} {:>14} {:>6}"
    click.echo(row.format("subgraph", "on", "kind", "nodes", "weights MB", "boundary KB", "linear MFLOP", "state"))
    for f in figures:
        kind = "sum" if f.device == "link" else "static" if f.is_static else "dynamic"
        weights, crossing = f"{f.weight_bytes / 1e6:.2f}", f"{f.crossing_bytes / 1e3:.1f}"
        flops = f"{f.linear_flops / 1e6:.1f}"
        click.echo(row.format(f.name, f.device, kind, f.num_nodes, weights, crossing, flops, len(f.state_slots)))
    for device in ("npu", "cpu"):
        mine = [f for f in figures if f.device == device]
        total_flops, total_bytes = sum(f.linear_flops for f in mine), sum(f.weight_bytes for f in mine)
        click.echo(
            f"{device}: {len(mine)} subgraphs, {total_flops / 1e9:.2f} GFLOP a chunk, "
            f"weights {total_bytes / 1e6:.1f} MB"
        )
    if sums := [f for f in figures if f.device == "link"]:
        link_bytes = sum(f.sum_bytes for f in sums)
        click.echo(
            f"link: {len(sums)} sums over {ranks.size} ranks, of {link_bytes / len(sums) / 1e3:.1f} KB each and "
            f"{link_bytes / 1e6:.2f} MB a chunk, from every rank; this is {ranks}"
        )
    moved_bytes = sum(f.crossing_bytes for f in figures) // 2
    ratio = attention.chunked_flops / attention.unchunked_flops if attention.unchunked_flops else 1.0
    click.echo(f"a chunk of {chunk_length} tokens moves {moved_bytes / 1e6:.2f} MB between the devices")
    if converted_bytes := sum(f.converted_bytes for f in figures):
        click.echo(f"an NPU converts {converted_bytes / 1e6:.2f} MB of float16 from and to float32 a chunk")
    click.echo(
        f"attention over {prompt_length} tokens: {attention.chunked_flops / 1e9:.2f} GFLOP in chunks, "
        f"{attention.unchunked_flops / 1e9:.2f} GFLOP at once (ratio {ratio:.3f})"
    )
