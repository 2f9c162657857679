"""`chunkrt support`: check whether a checkpoint is supported, and list missing features."""

from __future__ import annotations

import json
from itertools import groupby

import click

from chunkrt.backends.coverage import NPU
from chunkrt.cli.command import STATUS_OF_NO, GroupedCommand, model_argument
from chunkrt.cli.output import in_flags
from chunkrt.cli.shared_options import verbose_option
from chunkrt.compile.support_report import SupportReport, check_support, first_few
from chunkrt.engine.resolve import find_checkpoint
from chunkrt.progress import ShownProgress


@click.command(cls=GroupedCommand)
@model_argument
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@verbose_option
def support(model: str, as_json: bool) -> None:
    """Show the architecture of MODEL, and check whether chunkrt supports it. Only headers are read.

    MODEL is a GGUF file, a Hugging Face folder or an ONNX decoder of any architecture, or a name of the catalogue.

    The exit status is 0 if everything is supported, 3 if something is missing, 1 if MODEL cannot be read.
    """
    with ShownProgress() as progress:
        checkpoint, _ = find_checkpoint(model, progress)
    report = check_support(checkpoint)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=1))
    else:
        _print(report)
    if report.gaps:
        raise click.exceptions.Exit(STATUS_OF_NO)


def _print(report: SupportReport) -> None:
    family = f"{report.model_type}, {report.module}" if report.module else "not known"
    click.echo(f"{report.format}, architecture {report.architecture}: {family}")
    if not report.module:
        click.echo(f"known, nearest first: {', '.join(report.known)}")
    click.echo(", ".join(f"{name} {value}" for name, value in report.sizes.items()) or "no sizes are given")
    click.echo(f"kind: {report.kind}")
    for feature in report.features:
        click.echo(f"{_mark(feature.reason)} {feature.name:24} {feature.asked}".rstrip())
        _reason(feature.reason)
    _print_tensors(report)
    tokenizer = report.tokenizer
    kind = ", ".join(filter(None, (tokenizer.model, tokenizer.pre_tokenizer))) or "none; it runs on token ids"
    click.echo(f"{_mark(tokenizer.reason)} {'tokenizer':24} {kind}")
    _reason(tokenizer.reason)
    _print_operators(report)
    for reason, refused in groupby(report.refused_subgraphs, key=lambda subgraph: subgraph.reason):
        click.echo(f"{_mark(reason)} {'not for the NPU':24} {first_few([subgraph.name for subgraph in refused])}")
        _reason(reason)
    click.echo(f"stages that work: {', '.join(name for name, reason in report.stages.items() if not reason) or 'none'}")
    if without := [f"{name} ({reason})" for name, reason in report.stages.items() if reason]:
        click.echo(f"stages that do not: {', '.join(without)}")
    for gap in report.gaps:
        click.echo(f"missing: {gap}")
    if not report.gaps:
        click.echo("everything is there")


def _print_tensors(report: SupportReport) -> None:
    tensors = report.tensors
    needed = "" if tensors.num_needed is None else f", {tensors.num_needed} needed"
    ok = not (tensors.missing or tensors.unread or tensors.misfits or tensors.unused)
    click.echo(f"{_mark('' if ok else 'no')} {'tensors':24} {tensors.num_found} found{needed}")
    unread = "unread" if report.module else "of no known mapping"
    lists = {"missing": tensors.missing, unread: tensors.unread, "wrong": tensors.misfits, "unused": tensors.unused}
    for label, names in lists.items():
        _reason(f"{label}: {first_few(names)}" if names else "")
    for kind, count in sorted(tensors.types.items()):
        reason = "not dequantised" if kind in tensors.unreadable else ""
        click.echo(f"{_mark(reason)} {f'{count} of {kind}':24} {reason}".rstrip())


def _print_operators(report: SupportReport) -> None:
    if not report.operators:
        return
    backends = list(dict.fromkeys(backend for operator in report.operators for backend in operator.refusals))
    backends = [*(backend for backend in backends if backend != NPU), NPU]
    widest = max(len(operator.name) for operator in report.operators)
    row = f"     {{:{widest}}} {{:>6}}" + " {:>9}" * len(backends)
    click.echo(row.format("operator", "nodes", *backends))
    for operator in report.operators:
        verdicts = (_verdict(operator.refusals.get(backend)) for backend in backends)
        click.echo(row.format(operator.name, operator.num_nodes, *verdicts))
    for operator in report.operators:
        for backend, reason in operator.refusals.items():
            _reason(f"{operator.name} on {backend}: {reason}" if reason else "")
    for backend, reason in report.unavailable.items():
        click.echo(f"     {backend} was not checked: {reason}")


def _verdict(refusal: str | None) -> str:
    return "-" if refusal is None else "no" if refusal else "yes"


def _mark(reason: str) -> str:
    return "lack" if reason else "ok  "


def _reason(reason: str) -> None:
    if reason:
        click.echo(f"     {in_flags(reason)}")
