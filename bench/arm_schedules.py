"""Multiply-adds a cycle of the Arm kernels' inner loops, by llvm-mca's models of processors.

No Arm machine is needed: the kernels are cross-compiled to assembly with the build's flags, and each innermost loop is
given to the analyser, with all data in the first-level cache. On Debian: apt-get install g++-aarch64-linux-gnu llvm-19.

With --model, a second table predicts the prefill of a model on one core of the first processor: the time of all
multiply-adds at the rates of the best loops, divided by --share, the share of such a bound that chunkrt reaches on
processors where it was measured.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import click
from roofline_work import tasks_of, work_of

import chunkrt
from chunkrt.simulate.work import cut

KERNELS = Path(__file__).resolve().parent.parent / "csrc" / "kernels"
PROCESSORS = ("oryon-1", "cortex-x4", "neoverse-v2", "neoverse-n2")
ITERATIONS = 400
PROMPTS = (512, 4096)
FLOATS = 4
"""Products of one float32 instruction."""


class Case(NamedTuple):
    """Loops of one file: compiled with `flags`, made of `instruction`, each of which computes `products`."""

    file: str
    flags: str
    instruction: str
    products: int


CASES = (
    Case("gemm/neon_i8mm.cc", "-march=armv8.2-a+dotprod+i8mm", "smmla", 32),
    Case("gemm/neon_dotprod.cc", "-march=armv8.2-a+dotprod", "sdot", 16),
    Case("block_gemm/neon_i8mm.cc", "-march=armv8.2-a+dotprod+i8mm", "smmla", 32),
    Case("block_gemm/neon_dotprod.cc", "-march=armv8.2-a+dotprod", "sdot", 16),
    Case("attention/neon_bf16.cc", "-march=armv8.2-a+bf16+i8mm", "bfmmla", 16),
    Case("attention/neon_bf16.cc", "-march=armv8.2-a+bf16+i8mm", "smmla", 32),
    Case("attention/neon.cc", "-march=armv8-a -fno-tree-coalesce-vars", "fmla", FLOATS),
)


def assembly(case: Case, compiler: str) -> list[str]:
    """Return the lines of a file's assembly."""
    options = ["-O3", "-DNDEBUG", "-std=c++20", *case.flags.split(), f"-I{KERNELS.parent}"]
    command = [compiler, *options, "-S", "-o", "-"]
    return subprocess.run(
        [*command, str(KERNELS / case.file)], check=True, capture_output=True, text=True
    ).stdout.splitlines()


def innermost_loops(lines: list[str], instruction: str) -> list[list[str]]:
    """Return the instructions of each innermost loop that has `instruction`, the largest number first."""
    labels, loops = dict[str, int](), []
    for number, line in enumerate(lines):
        if label := re.match(r"(\.L\d+):", line):
            labels[label[1]] = number
        elif (jump := re.match(r"\t(?:b|cb|tb)\S*\t.*?(\.L\d+)$", line)) and jump[1] in labels:
            body = lines[labels[jump[1]] + 1 : number]
            if not any(each.startswith(".L") for each in body):
                loops.append([each for each in body if each.startswith("\t") and not each.startswith("\t.")])
    found = [loop for loop in loops if count(loop, instruction)]
    return sorted(found, key=lambda loop: -count(loop, instruction))


def count(loop: list[str], instruction: str) -> int:
    return sum(line.split()[0] == instruction for line in loop)


def cycles(loop: list[str], processor: str, analyser: str) -> float | None:
    """Return the cycles of one iteration; None if the analyser's model lacks an instruction."""
    with tempfile.NamedTemporaryFile("w", suffix=".s") as file:
        file.write("\n".join(loop) + "\n")
        file.flush()
        command = [analyser, "-march=aarch64", f"-mcpu={processor}", "-mattr=+i8mm,+dotprod,+bf16"]
        told = subprocess.run(
            [*command, f"-iterations={ITERATIONS}", file.name], check=False, capture_output=True, text=True
        )
    if "unsupported instruction" in told.stderr:
        return None
    total = re.search(r"Total Cycles:\s+(\d+)", told.stdout)
    if total is None:
        raise click.ClickException(f"{analyser}: {told.stderr.strip()}")
    return int(total[1]) / ITERATIONS


def rate(loop: list[str], case: Case, processor: str, analyser: str) -> float | None:
    """Return the multiply-adds a cycle."""
    taken = cycles(loop, processor, analyser)
    return count(loop, case.instruction) * case.products / taken if taken else None


def alone(case: Case) -> list[str]:
    """Return a loop of the instruction, into more registers than its latency in cycles."""
    lanes = {"fmla": "4s", "bfmmla": "8h"}.get(case.instruction, "16b")
    return [f"\t{case.instruction}\tv{n}.4s, v30.{lanes}, v31.{lanes}" for n in range(24)]


def predict(model: str, linear: float, attention: dict[str, float], gigahertz: float, share: float) -> None:
    """Print the predicted rates of a prefill, given the multiply-adds a cycle of linears and of attention."""
    click.echo(f"\nPredicted prefill of {model} on one core at {gigahertz:g} GHz, tokens/s:\n")
    click.echo(f"| attention | prompt | all products at these rates | at {share:.0%} of them |")
    click.echo("| --- | ---: | ---: | ---: |")
    with chunkrt.load(model, scheme="w8a8-dynamic", npu="native") as engine:
        for name, of_attention in attention.items():
            for length in PROMPTS:
                chunks = cut(length, engine.chunk_length)
                work = work_of(engine.plan, engine.scheme, chunks, tasks_of(engine.plan, chunks))
                cycles_taken = work.digit_macs / linear + work.attention_macs / of_attention
                rate_at_peak = length / (cycles_taken / (gigahertz * 1e9))
                click.echo(f"| {name} | {length} | {rate_at_peak:,.0f} | {share * rate_at_peak:,.0f} |")


@click.command(help=__doc__)
@click.option("--compiler", default="aarch64-linux-gnu-g++", show_default=True)
@click.option("--analyser", default="llvm-mca-19", show_default=True)
@click.option("--most", default=3, show_default=True, help="Loops of each file.")
@click.option("--model", help="Predict the prefill of this model.")
@click.option("--gigahertz", default=3.4, show_default=True, help="Clock of the predicted core; X1E-80-100, all cores.")
@click.option("--share", default=0.65, show_default=True, help="Share of the bound that is predicted.")
def main(compiler: str, analyser: str, most: int, model: str | None, gigahertz: float, share: float) -> None:
    best: dict[tuple[str, str], float] = {}
    click.echo("Multiply-adds a cycle (share of the instruction's own peak):\n")
    click.echo("| kernel | products in the loop | instructions | " + " | ".join(PROCESSORS) + " |")
    click.echo("| --- | ---: | ---: |" + " ---: |" * len(PROCESSORS))
    for case in CASES:
        peaks = [rate(alone(case), case, processor, analyser) for processor in PROCESSORS]
        for loop in innermost_loops(assembly(case, compiler), case.instruction)[:most]:
            row = [case.file.removesuffix(".cc"), f"{count(loop, case.instruction)} {case.instruction}", str(len(loop))]
            for processor, peak in zip(PROCESSORS, peaks, strict=True):
                found = rate(loop, case, processor, analyser)
                row.append("not in the model" if found is None or peak is None else f"{found:.0f} ({found / peak:.0%})")
                if processor == PROCESSORS[0]:
                    key = case.file, case.instruction
                    best[key] = max(best.get(key, 0.0), found or 0.0)
            click.echo("| " + " | ".join(row) + " |")
    if model is not None and (absent := [" ".join(key) for key, found in best.items() if not found]):
        raise click.ClickException(f"{analyser} has no rate of {', '.join(absent)} on {PROCESSORS[0]}")
    if model is not None:
        products, scores = (best["attention/neon_bf16.cc", name] for name in ("bfmmla", "smmla"))
        attention = {
            "float32": best["attention/neon.cc", "fmla"],
            "bfloat16": products,
            "int8 scores": 2 / (1 / scores + 1 / products),
        }
        predict(model, best["gemm/neon_i8mm.cc", "smmla"], attention, gigahertz, share)


if __name__ == "__main__":
    main()
