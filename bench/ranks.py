"""One decoder on several ranks: measured on this machine, and predicted for several machines.

    python bench/ranks.py smollm2-135m-instruct --rounds 5 --json ranks.json

Measured: prefill on one rank and on two, which mpiexec starts, on the same cores; and the share of the time of the sums
over ranks that other work hid. Processes live through all rounds and take turns within each. Predicted: `chunkrt
simulate` for machines that are connected by links. See `bench/README.md`.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
from peers.report import describe_machine
from peers.shapes import SHAPES, write_random_model

import chunkrt
from chunkrt.backends.native.cpu import cpu_info
from chunkrt.engine.options import CPU_CHUNK_LENGTH
from chunkrt.engine.resolve import DEFAULT_SCHEME, find_checkpoint
from chunkrt.graph.plan import Ranks
from chunkrt.runtime.policy import DEFAULT_POLICY
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.trace.utilisation import link_time
from chunkrt.simulate import LinkProfile, Shape, Simulation, find_device, find_link, find_shape, simulate

RANDOM_SHAPE = "qwen2.5-0.5b"
PREDICTED_SHAPES = {"0.5B": "qwen2.5-0.5b", "1.8B": "qwen1.5-1.8b", "7B": "llama-2-7b"}
PREDICTED_LINKS = ("1GbE", "10GbE", "USB4")
PREDICTED_RANKS = (1, 2, 4)
SERVE = "--serve"


@dataclass(frozen=True)
class Contender:
    """Number of ranks, and threads of each."""

    ranks: int
    threads: int

    def __str__(self) -> str:
        return f"{_plural(self.ranks, 'rank')}{' of' if self.ranks > 1 else ','} {_plural(self.threads, 'thread')}"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prefill, reported by rank 0. The link's times are from its record; 0 on one rank."""

    seconds: float
    tokens: int
    link_busy_ns: int
    link_hidden_ns: int
    num_sums: int


class Launch:
    """The processes of a contender, which wait for prompts."""

    def __init__(self, contender: Contender, model: Path, chunk: int) -> None:
        self.contender = contender
        command = [sys.executable, __file__, SERVE, str(model), str(contender.threads), str(chunk)]
        if contender.ranks > 1:
            command = [_mpiexec(), "-n", str(contender.ranks), *command]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()  # after loading

    def prefill(self, num_tokens: int, seed: int) -> Sample:
        """Prefill `count` random tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([num_tokens, seed]) + "\n")
        self._process.stdin.flush()
        return Sample(**self._answer())

    def close(self) -> None:
        """End the processes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise click.ClickException(f"{self.contender} ended with {self._process.wait()}; its output is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve(model: str, threads: int, chunk: int) -> None:
    """Prefill the requests from stdin, and answer on stdout. On all ranks except the first, `load` does not return."""
    options = {
        "scheme": DEFAULT_SCHEME,
        "npu": "native",
        "threads": threads,
        "chunk_length": chunk,
        "prefix_cache": "off",
    }
    with chunkrt.load(model, **options) as engine, engine.session() as session:
        records: list[RunRecord] = []
        session.on_run = records.append
        print(json.dumps({}), flush=True)
        for line in sys.stdin:
            num_tokens, seed = json.loads(line)
            tokens = np.random.default_rng(seed).integers(0, engine.plan.vocab_size, num_tokens).tolist()
            session.rewind(0)
            records.clear()
            begin = time.perf_counter()
            session.prefill(tokens)
            seconds = time.perf_counter() - begin
            link = link_time(records)
            sample = Sample(
                seconds=seconds,
                tokens=num_tokens,
                link_busy_ns=int(link["busy_ns"]) if link else 0,
                link_hidden_ns=int(link["hidden_ns"]) if link else 0,
                num_sums=int(link["num_sums"]) if link else 0,
            )
            print(json.dumps(asdict(sample)), flush=True)


def measure(
    model: Path, contenders: Sequence[Contender], num_tokens: int, chunk: int, rounds: int
) -> dict[str, list[Sample]]:
    """Collect samples of every contender, which take turns. A first round warms up."""
    launches: list[Launch] = []
    samples: dict[str, list[Sample]] = {str(contender): [] for contender in contenders}
    try:
        for contender in contenders:
            launches.append(Launch(contender, model, chunk))
        for number in range(rounds + 1):
            for launch in launches:
                sample = launch.prefill(num_tokens, seed=number)
                if number:
                    samples[str(launch.contender)].append(sample)
    finally:
        for launch in launches:
            launch.close()
    return samples


def predict(device_name: str, num_tokens: int, chunk: int) -> list[dict[str, Any]]:
    """Return a row for every shape, link and number of ranks; one rank has no link."""
    device = find_device(device_name)
    rows = []

    def simulated(shape: Shape, ranks: int, link: LinkProfile | None) -> Simulation:
        return simulate(
            shape.plan(ranks=Ranks(0, ranks)).on_cpu(),
            device,
            prompt_length=num_tokens,
            chunk_length=chunk,
            policy=DEFAULT_POLICY,
            scheme=DEFAULT_SCHEME,
            ranks=ranks,
            link=link,
        )

    for size, name in PREDICTED_SHAPES.items():
        shape = find_shape(name)
        alone = simulated(shape, 1, None)
        rows.append({"size": size, "shape": name, "speed_up": 1.0} | alone.to_dict())
        for link in map(find_link, PREDICTED_LINKS):
            for ranks in PREDICTED_RANKS[1:]:
                row = simulated(shape, ranks, link)
                ratio = row.tokens_per_s / alone.tokens_per_s
                rows.append({"size": size, "shape": name, "speed_up": ratio} | row.to_dict())
    return rows


@click.command()
@click.argument("model", default="smollm2-135m-instruct")
@click.option("-p", "--prompt-length", "num_tokens", type=int, default=512, show_default=True)
@click.option("--chunk", type=int, default=CPU_CHUNK_LENGTH, show_default=True, help="Tokens of a chunk.")
@click.option("--rounds", type=int, default=5, show_default=True, help="0 measures nothing.")
@click.option(
    "--threads", type=int, default=2, show_default=True, help="Threads of all ranks together; an even number."
)
@click.option("--random/--no-random", default=True, help=f"Also measure random weights of {RANDOM_SHAPE}'s shape.")
@click.option("--device", default="sdxelite", show_default=True, help="Device of the predictions.")
@click.option("--folder", type=click.Path(path_type=Path), default="build/ranks", help="Folder for the random weights.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything here.")
def main(
    model: str,
    num_tokens: int,
    chunk: int,
    rounds: int,
    threads: int,
    random: bool,
    device: str,
    folder: Path,
    json_path: Path | None,
) -> None:
    """Measure MODEL on one rank and on two, and predict more ranks on other machines."""
    if threads < 2 or threads % 2:
        raise click.BadParameter(f"{threads}, expected an even number: two ranks share them", param_hint="--threads")
    contenders = [Contender(1, threads // 2), Contender(1, threads), Contender(2, threads // 2)]
    measured: dict[str, dict[str, list[Sample]]] = {}
    loads = [psutil.cpu_percent(interval=0.5)]
    if rounds:
        checkpoint, _ = find_checkpoint(model, lambda what, done, total: None)
        models = {checkpoint.stem: checkpoint}
        if random:
            path = folder / f"{RANDOM_SHAPE}-random.gguf"
            if not path.exists():
                click.echo(f"making {path}", err=True)
                folder.mkdir(parents=True, exist_ok=True)
                write_random_model(SHAPES[RANDOM_SHAPE], checkpoint, path)
            models[f"{RANDOM_SHAPE}, random weights"] = path
        for name, path in models.items():
            click.echo(f"measuring {name}", err=True)
            measured[name] = measure(path, contenders, num_tokens, chunk, rounds)
            loads.append(psutil.cpu_percent(interval=0.5))
    conditions = describe_machine() | {
        "processor": cpu_info()["processor"],
        "others": f"used {', '.join(f'{load:.0f} %' for load in loads)} of the processors before and after each model",
        "test": f"pp{num_tokens}, {rounds} rounds in turns, chunks of {chunk}, scheme {DEFAULT_SCHEME}",
    }
    predicted = predict(device, num_tokens, chunk)
    click.echo(_markdown(conditions, measured, predicted))
    if json_path is not None:
        samples = {name: {who: list(map(asdict, s)) for who, s in by.items()} for name, by in measured.items()}
        links = [asdict(find_link(name)) for name in PREDICTED_LINKS]
        report = {"conditions": conditions, "measured": samples, "links": links, "predicted": predicted}
        part = json_path.with_name(f".{json_path.name}.part")
        part.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        part.replace(json_path)


def _markdown(
    conditions: dict[str, str], measured: dict[str, dict[str, list[Sample]]], predicted: list[dict[str, Any]]
) -> str:
    lines = [f"- {key}: {value}" for key, value in conditions.items()]
    if measured:
        lines += ["", "Measured: median (least - most). Ratios are within a round.", ""]
        lines += ["| model | on | tokens/s | over the first | link busy | of that hidden | sums |"]
        lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, by_contender in measured.items():
        first = next(iter(by_contender.values()))
        for contender, samples in by_contender.items():
            rates = [s.tokens / s.seconds for s in samples]
            ratios = [of.seconds / s.seconds for s, of in zip(samples, first, strict=True)]
            link = ["", "", ""]
            if samples[0].num_sums:
                busy = [100 * s.link_busy_ns / 1e9 / s.seconds for s in samples]
                hidden = [100 * s.link_hidden_ns / max(s.link_busy_ns, 1) for s in samples]
                link = [_spread(busy, ".0f", " %"), _spread(hidden, ".0f", " %"), str(samples[0].num_sums)]
            cells = [name, contender, _spread(rates, ".1f"), _spread(ratios, ".2f"), *link]
            lines.append(f"| {' | '.join(cells)} |")
    device = predicted[0]["device"]
    lines += [
        "",
        f"Predicted, on the CPU of {device}: tokens/s, over one rank, and the share of the link's time hidden.",
        "",
    ]
    lines += [f"| model | link | {' | '.join(_plural(n, 'rank') for n in PREDICTED_RANKS)} |"]
    lines += [f"| --- | --- |{' ---: |' * len(PREDICTED_RANKS)}"]
    for size in PREDICTED_SHAPES:
        (alone,) = (row for row in predicted if row["size"] == size and row["link"] is None)
        for link_name in (find_link(name).name for name in PREDICTED_LINKS):
            cells = [f"{size} ({alone['shape']})", link_name, f"{alone['tokens_per_s']:.1f}"]
            for row in predicted:
                if row["size"] == size and row["link"] is not None and row["link"]["name"] == link_name:
                    figures = f"{row['speed_up']:.2f}x, {row['link']['hidden']:.0%} hidden"
                    cells.append(f"{row['tokens_per_s']:.1f} ({figures})")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], form: str, unit: str = "") -> str:
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:{form}} ({least:{form}} - {most:{form}}){unit}"


def _plural(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number > 1 else ''}"


def _mpiexec() -> str:
    """Return the mpiexec next to this interpreter, else the first on the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise click.ClickException('two ranks need mpiexec, which was not found: pip install "chunkrt[mpi]"')
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        main()
