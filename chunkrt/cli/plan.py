"""`chunkrt plan`: show the subgraphs of a model and their costs."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from chunkrt.cli.command import GroupedCommand, json_option, model_argument, option
from chunkrt.cli.output import in_flags
from chunkrt.cli.shared_options import planning_options, ranks_options
from chunkrt.engine.capability import Moved, plan_by_capability, told
from chunkrt.engine.model_options import choose_context_length
from chunkrt.engine.npu_attention import as_compiled, near_plans
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import engine_folder, options_placement
from chunkrt.engine.roles import check_runs, npu_under, runs_on_qnn
from chunkrt.engine_directory.figures import (
    AttentionFigures,
    SubgraphFigures,
    attention_figures,
    linears_by_weight_bits,
    subgraph_figures,
)
from chunkrt.engine_directory.manifest import is_engine_directory, open_weights, read_manifest, read_plan
from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import check_writable
from chunkrt.graph.placement import Placement
from chunkrt.graph.plan import ALL_GATHER_OP, ALONE, Plan, Ranks
from chunkrt.progress import ShownProgress
from chunkrt.quant.scheme import Scheme
from chunkrt.simulate.models import plan_model

DEFAULT_PROMPT_LENGTH = 512


@click.command(
    cls=GroupedCommand,
    first="scheme npu placement attention ops chunk_length context_length prompt_length save_onnx as_json",
)
@model_argument
@option(
    "--prompt-length",
    group="Measurement",
    type=int,
    help="Prompt length for the attention's FLOPs.  [default: 512, at most the context length]",
)
@option(
    "--save-onnx",
    group="Output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write each subgraph as ONNX to this folder.",
)
@json_option("Print the plan and its figures as JSON.")
@ranks_options
@planning_options
def plan(
    model: str,
    prompt_length: int | None,
    save_onnx: Path | None,
    as_json: bool,
    size: int | None,
    rank: int | None,
    **settings: Any,
) -> None:
    """Show the subgraphs of MODEL: device, weights, bytes across the boundary, FLOPs, state.

    With attention on the NPU, the plan for the shortest --npu-window is shown.

    cpu* marks subgraphs that the NPU cannot compile; a line gives the reason.

    A plan that --npu and --ops cannot run is refused, except with --save-onnx, as other tools may run the files.
    """
    options = compiled_options(model, EngineOptions(**settings))
    ranks = chosen_ranks(model, rank, size)
    if save_onnx is not None:
        try:
            check_writable(save_onnx / "subgraph.onnx")
        except OSError as error:
            raise ConfigError(f"cannot write ONNX files to {save_onnx}: {cause_of(error)}") from error
    found, scheme, chunk_length = read_model(model, options, ranks)
    context_length = choose_context_length(found, options)
    if prompt_length is None:
        prompt_length = min(DEFAULT_PROMPT_LENGTH, context_length)
    if not 1 <= prompt_length <= context_length:
        raise ConfigError(f"--prompt-length is {prompt_length}, expected 1 to {context_length}, the context length")
    moved: list[Moved] = []
    if save_onnx is None:
        found, moved = plan_by_capability(found, scheme, options, placement_of(model, options))
        check_runs(found, scheme, options)
        has_htp = npu_under(options, scheme) is not None and options.npu in ("auto", "qnn")
        if has_htp and (near := near_plans(found, placement_of(model, options), options, context_length)):
            found = near[0].plan
            click.echo(f"for chunks with at most {near[0].reach} tokens before them:", err=True)
    figures = subgraph_figures(found.within(context_length), scheme, chunk_length=chunk_length)
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
            "moved": [dict(zip(("operator", "node", "reason"), each, strict=True)) for each in moved],
            "plan": json.loads(found.to_json()),
        }
        click.echo(json.dumps(summary, indent=1))
    else:
        nodes = {node for _, node, _ in moved}
        marked = {s.name for s in found.subgraphs if any(node.name in nodes for node in s.nodes)}
        gathers = {s.name for s in found.subgraphs if any(node.op == ALL_GATHER_OP for node in s.nodes)}
        _print(figures, attention, ranks, chunk_length, prompt_length, marked, gathers)
        if moved:
            click.echo(f"* {in_flags(told(moved))}")
        if scheme.weight_bits == 4:
            counts = linears_by_weight_bits(found, scheme)
            click.echo(f"weights of {counts[4]} linear layers have 4 bits, and weights of {counts[8]} have 8 bits")


def placement_of(model: str, options: EngineOptions) -> Placement:
    """Return the placement of an engine directory, or else the placement of the options."""
    return read_manifest(Path(model)).placement if is_engine_directory(Path(model)) else options_placement(options)


def compiled_options(model: str, options: EngineOptions) -> EngineOptions:
    """Return the options of an engine, with those of an engine directory if an NPU runs it."""
    if not is_engine_directory(Path(model)) or not runs_on_qnn(options):
        return options
    return as_compiled(options, read_manifest(Path(model)))


def chosen_ranks(model: str, rank: int | None, size: int | None) -> Ranks:
    """Return the ranks of the command line, or else those of an engine directory."""
    if rank is not None and size is None:
        raise ConfigError(f"--rank {rank} needs --ranks, the number of ranks")
    if size is None and is_engine_directory(Path(model)):
        return read_manifest(Path(model)).ranks
    return Ranks(rank or 0, 1 if size is None else size)


def read_model(model: str, options: EngineOptions, ranks: Ranks = ALONE) -> tuple[Plan, Scheme, int]:
    """Return the result of `plan_model`, and show progress meanwhile."""
    with ShownProgress() as progress:
        return plan_model(model, options, ranks, progress)


def _save_onnx(model: str, options: EngineOptions, folder: Path, ranks: Ranks) -> None:
    from chunkrt.backends.onnx.scheme_models import save_subgraphs

    with ShownProgress() as progress:
        engine = engine_folder(model, options, progress, ranks)
        scheme, plan = read_manifest(engine).scheme, read_plan(engine)
        plan = plan.within(choose_context_length(plan, options))
        weights = open_weights(engine).with_tables(plan)
        num_files = save_subgraphs(plan, scheme, weights, folder, lambda d, t: progress("writing ONNX", d, t))
    click.echo(f"{num_files} ONNX files written to {folder}", err=True)


def _print(
    figures: list[SubgraphFigures],
    attention: AttentionFigures,
    ranks: Ranks,
    chunk_length: int,
    prompt_length: int,
    marked: Container[str],
    gathers: Container[str],
) -> None:
    width = max(14, *(len(f.name) for f in figures))
    row = f"{{:{width}}} {{:4}} {{:8}} {{:>6}} {{:>12}} {{:>13}} {{:>14}} {{:>6}}"
    click.echo(row.format("subgraph", "on", "kind", "nodes", "weights MB", "boundary KB", "linear MFLOP", "state"))
    for f in figures:
        kind = "static" if f.is_static else "dynamic"
        if f.device == "link":
            kind = "gather" if f.name in gathers else "sum"
        weights, crossing = f"{f.weight_bytes / 1e6:.2f}", f"{(f.crossing_bytes + f.window_bytes) / 1e3:.1f}"
        flops = f"{f.linear_flops / 1e6:.1f}"
        device = f"{f.device}*" if f.name in marked else f.device
        click.echo(row.format(f.name, device, kind, f.num_nodes, weights, crossing, flops, len(f.state_slots)))
    for device in ("npu", "cpu"):
        mine = [f for f in figures if f.device == device]
        total_flops, total_bytes = sum(f.linear_flops for f in mine), sum(f.weight_bytes for f in mine)
        click.echo(
            f"{device}: {len(mine)} subgraphs, {total_flops / 1e9:.2f} GFLOP per chunk, "
            f"weights {total_bytes / 1e6:.1f} MB"
        )
    if of_link := [f for f in figures if f.device == "link"]:
        num_gathers = sum(f.name in gathers for f in of_link)
        click.echo(
            f"link: sums {len(of_link) - num_gathers}, gathers {num_gathers} over {ranks.size} ranks, with results "
            f"of {sum(f.sum_bytes for f in of_link) / 1e6:.2f} MB per chunk; this is {ranks}"
        )
    moved_bytes = sum(f.crossing_bytes for f in figures) // 2 + sum(f.window_bytes for f in figures)
    ratio = attention.chunked_flops / attention.unchunked_flops if attention.unchunked_flops else 1.0
    click.echo(f"a chunk of {chunk_length} tokens moves {moved_bytes / 1e6:.2f} MB between the devices")
    if history_bytes := sum(f.history_bytes for f in figures):
        click.echo(
            f"attention on the npu keeps {history_bytes / 1e6:.2f} MB of caches in buffers: each chunk converts its "
            "new rows (all rows if sequences alternate)"
        )
    if converted_bytes := sum(f.converted_bytes for f in figures):
        entering_bytes = sum(f.entering_bytes for f in figures)
        click.echo(
            f"an NPU converts {converted_bytes / 1e6:.2f} MB of float16 from and to float32 per chunk: "
            f"{entering_bytes / 1e6:.2f} MB enter it, {(converted_bytes - entering_bytes) / 1e6:.2f} MB leave it"
        )
        driver_bytes = sum(f.driver_bytes for f in figures)
        click.echo(f"its driver copies {driver_bytes / 1e6:.2f} MB per chunk, unless CPU and NPU share the memory")
    click.echo(
        f"attention over {prompt_length} tokens: {attention.chunked_flops / 1e9:.2f} GFLOP in chunks, "
        f"{attention.unchunked_flops / 1e9:.2f} GFLOP at once (ratio {ratio:.3f})"
    )
