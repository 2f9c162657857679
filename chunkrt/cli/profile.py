"""`chunkrt profile`: measure a model's subgraphs on this machine, for the simulator."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import numpy as np
import psutil

from chunkrt.backends.qnn import QnnBackend
from chunkrt.cli.bench_tests import Case, measure, measure_parallel
from chunkrt.cli.command import GroupedCommand, json_option, model_argument, option
from chunkrt.cli.shared_options import engine_options, measured, open_engine
from chunkrt.engine.engine import Engine
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import check_writable, written_aside
from chunkrt.progress import ShownProgress
from chunkrt.runtime.record import RunRecord
from chunkrt.simulate.learn import learn_budget
from chunkrt.simulate.measured import MeasuredProfile, ThreadsCost, write_measured

LONGEST_PROMPT = 1024
"""Length of the measured prompt. Attention's time is nearly linear in the position, so longer prompts follow."""

NEW_TOKENS = 16
"""Number of tokens that every sequence decodes in a run."""

LEAST_CONTEXT = NEW_TOKENS + 2

SEQUENCES = 8
"""Number of sequences that decode together. Costs of fewer sequences are between those of one and of this number."""


@click.command(
    cls=GroupedCommand,
    first="output budgets repetitions npu scheme chunk_length threads affinity context_length as_json",
)
@model_argument
@option(
    "-o",
    "--output",
    group="Output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="TOML file to write.",
)
@option(
    "--budgets",
    group="Measurement",
    help="Numbers of threads to measure, separated by commas.  [default: 1 and --threads]",
)
@option(
    "-r",
    "--repetitions",
    group="Measurement",
    type=int,
    default=7,
    show_default=True,
    help="Number of measured runs of each kind.",
)
@json_option("Print the file's path and the conditions of the measurement as JSON.")
@engine_options
def profile(model: str, output: Path, budgets: str | None, repetitions: int, as_json: bool, **settings: Any) -> None:
    """Measure the subgraphs of MODEL on this machine, and write a device profile for `chunkrt simulate`.

    Prompts, and the decode of one and of several sequences are measured. Run no other work on the machine meanwhile.
    """
    if repetitions < 1:
        raise ConfigError(f"--repetitions is {repetitions}, expected at least 1")
    if output.suffix != ".toml":
        raise ConfigError(f"-o is {output}, expected a name that ends in .toml")
    threads = EngineOptions(**settings).num_threads
    del settings["threads"]
    try:
        check_writable(output)
        found, _ = measure_profile(model, _budgets(budgets, threads), repetitions, settings)
        with written_aside(output) as aside:
            aside.write_text(write_measured(found), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {cause_of(error)}") from error
    if as_json:
        facts = {"path": str(output), "name": found.name, "model": found.model, "scheme": found.scheme}
        figures = {"chunk_length": found.chunk_length, "threads": sorted(found.budgets), "conditions": found.conditions}
        click.echo(json.dumps(facts | figures, indent=1))
        return
    click.echo(f"wrote {output}: {found.conditions}", err=True)


def measure_profile(
    model: str,
    budgets: list[int],
    repetitions: int,
    settings: dict[str, Any],
    *,
    also: Mapping[str, Callable[[Engine], float]] = MappingProxyType({}),
) -> tuple[MeasuredProfile, Mapping[tuple[int, str], list[float]]]:
    """Run the model with every number of threads, interleaved, and fit its costs.

    Args:
        budgets: numbers of threads.
        repetitions: number of measured runs of each kind, after one warm-up run.
        settings: fields of `EngineOptions` except the threads; `policy` is the policy to predict.
        also: further measurements by name, which do not enter the profile.

    Returns:
        The profile, and the results of the further measurements by number of threads and name.
    """
    with ExitStack() as stack:
        engines = {
            (threads, policy): stack.enter_context(
                open_engine(model, {**measured(settings), "threads": threads, "policy": policy, "decode_on": "cpu"})
            )
            for threads in budgets
            for policy in dict.fromkeys(("sequential", settings["policy"]))
        }
        engine = next(iter(engines.values()))
        backend = engine.loaded.npu_backend
        if isinstance(backend, QnnBackend) and backend.htp.is_emulated:
            raise ConfigError("the NPU is emulated on this machine, so its times are meaningless; profile on a device")
        chunk_length = engine.chunk_length
        num_chunks = min(LONGEST_PROMPT, engine.context_length) // chunk_length
        if num_chunks < 2:
            raise ConfigError(
                f"chunks of {chunk_length} in {min(LONGEST_PROMPT, engine.context_length)} tokens: expected at least "
                "two, to fit how time grows with the position; use shorter chunks"
            )
        if engine.context_length < LEAST_CONTEXT:
            raise ConfigError(
                f"the context has {engine.context_length} tokens; expected at least {LEAST_CONTEXT}, to measure decode"
            )
        graph_lengths = engine.loaded.scheduler.executors.prompts.pipeline.graph_lengths
        shorter = [n for n in graph_lengths if 1 < n < chunk_length]  # a prompt of one token is decoded
        prompts = [n for n in (num_chunks * chunk_length, chunk_length // 2, *shorter) if n > 0]
        records: dict[tuple[int, str], list[RunRecord]] = {key: [] for key in engines}
        apart: dict[tuple[int, str], list[float]] = {}
        decoded: dict[int, list[list[RunRecord]]] = {threads: [] for threads in budgets}
        loads = []
        progress = stack.enter_context(ShownProgress())
        for repetition in range(repetitions + 1):
            progress("measuring", repetition, repetitions + 1)
            loads.append(psutil.cpu_percent(interval=0.2))
            for key, each in engines.items():
                is_predicted = key[1] == settings["policy"]
                runs = [run(each, prompt) for prompt in prompts]
                tokens = _decode(each, model) if is_predicted else []
                others = {name: measurement(each) for name, measurement in also.items()} if is_predicted else {}
                if repetition:
                    records[key] += runs
                    decoded[key[0]] += tokens
                    for name, result in others.items():
                        apart.setdefault((key[0], name), []).append(result)
        progress("", 0, 0)
        learnt = [_learn(engine, n, settings["policy"], records, decoded[n]) for n in budgets]
        profile = MeasuredProfile(
            name=f"{platform.node() or 'this machine'} ({platform.machine()})",
            model=model,
            scheme=engine.scheme.name,
            chunk_length=chunk_length,
            has_npu=engine.loaded.npu_backend.concurrency is not None,
            conditions=f"{datetime.now(UTC):%Y-%m-%d}, {engine.loaded.npu_backend.name}, {repetitions} repetitions of "
            f"{prompts[0]} tokens, {os.cpu_count()} cores, affinity {engine.options.affinity}, "
            f"other load {statistics.median(loads):.0f} %",
            budgets={budget.threads: budget for budget in learnt},
            graph_lengths=graph_lengths,
        )
        return profile, apart


def _learn(
    engine: Engine,
    threads: int,
    policy: str,
    records: dict[tuple[int, str], list[RunRecord]],
    decoded: Sequence[Sequence[RunRecord]],
) -> ThreadsCost:
    longest = max(record.num_tokens for record in records[threads, policy])
    crowded = [record for record in records[threads, policy] if record.num_tokens == longest]
    alone = records[threads, "sequential"]
    return learn_budget(engine.plan, threads=threads, alone=alone, crowded=crowded, decoded=decoded)


def _decode(engine: Engine, model: str) -> list[list[RunRecord]]:
    """Return the records of tokens of one sequence, after a short and a long history, and of several sequences; none if
    only the NPU has weights.
    """
    if engine.options.decodes_on == "npu":
        return []
    most = min(LONGEST_PROMPT, engine.context_length) - NEW_TOKENS - 1
    runs: list[list[RunRecord]] = []
    for depth in (min(NEW_TOKENS, most), most):
        runs.append([])
        measure(Case(n_gen=NEW_TOKENS, n_depth=depth), engine, model, 1, runs[-1])
    runs.append([])
    measure_parallel(SEQUENCES, min(NEW_TOKENS, most), NEW_TOKENS, engine, model, 1, runs[-1])
    return runs


def run(engine: Engine, num_tokens: int) -> RunRecord:
    """Return the record of one prompt of random tokens, in a new session."""
    tokens = np.random.default_rng(0).integers(0, engine.plan.vocab_size, num_tokens).tolist()
    records: list[RunRecord] = []
    session = engine.session()
    session.on_run = records.append
    session.prefill(tokens)
    return records[0]


def _budgets(text: str | None, threads: int) -> list[int]:
    if text is None:
        return sorted({1, threads})
    try:
        budgets = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"--budgets is {text!r}, expected numbers separated by commas, e.g. 1,2") from error
    if budgets[0] < 1:
        raise ConfigError(f"--budgets is {text!r}, expected numbers of at least 1")
    return budgets
