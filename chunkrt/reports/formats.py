"""Outputs of commands with --json: the fields that a report shows, and their conversion to tables and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from chunkrt.reports.results import Result, short_name
from chunkrt.reports.tables import Column, Row, Table, Value
from chunkrt.runtime.record import Origin, RunRecord
from chunkrt.runtime.trace.groups import Group
from chunkrt.simulate.experiments import placement_text

Kind = TypeVar("Kind")

Figure = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
"""A finite number."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


@dataclass(frozen=True, kw_only=True)
class ReportSource:
    """The content of one source.

    Attributes:
        kind: name of the kind for readers, e.g. "trace".
        num_entries: number of runs or rows.
        results: prefills in common terms.
        tables: further tables.
        groups: groups of the runs of a trace.
    """

    name: str
    kind: str
    model: str
    num_entries: int
    origins: Sequence[Origin]
    results: Sequence[Result] = ()
    tables: Sequence[Table] = ()
    groups: Sequence[Group] = ()
    records: Sequence[RunRecord] = field(default=(), repr=False)


def reader_of(data: Any) -> Callable[[Any, str], ReportSource] | None:
    """Return the function that reads a kind of output, recognised by its keys."""
    first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else None
    if isinstance(data, dict):
        if {"run", "text", "layers"} <= data.keys():
            return _evaluation
        if {"choices", "best", "default"} <= data.keys():
            return _tuned
        if data.keys() == {"chunkrt", "format"}:  # a file of rows without a row
            return None
        return reader_of([data])
    if first is None:
        return None
    for keys, reader in (
        ({"test", "avg_ts"}, _bench),
        ({"pp", "tg", "pl"}, _parallel),
        ({"placement_name", "prompt_length"}, experiment),
        ({"arrivals", "requests"}, _serving),
        ({"makespan_ms", "prompt_length"}, simulations),
    ):
        if keys <= first.keys():
            return reader
    return None


def _convert(data: Any, kind: type[Kind]) -> Kind:
    return msgspec.convert(data, kind)


class _Setup(msgspec.Struct, kw_only=True):
    model: str
    backend: str
    scheme: str
    chunk: Count
    policy: str
    threads: Count
    origin: Literal["measured", "emulated", "unknown"] = "unknown"


class _BenchRow(_Setup, kw_only=True):
    test: str
    n_prompt: Count
    n_gen: Count
    n_depth: Count
    avg_ts: Figure
    stddev_ts: Figure
    samples_ts: list[Figure]
    ttft_ms: Figure | None
    peak_memory_bytes: Count
    npu_busy: Figure | None
    cpu_busy: Figure
    overlap: Figure | None


def _texts(*names: str) -> list[Column]:
    return [Column(name=name, form="text") for name in names]


def _settings(*names: str) -> list[Column]:
    return [Column(name=name, form="setting") for name in names]


def _figures(*names: str) -> list[Column]:
    return [Column(name=name) for name in names]


def _shares(*names: str) -> list[Column]:
    return [Column(name=name, form="share") for name in names]


_OF_SETUP = [*_texts("model", "backend", "scheme", "policy"), *_settings("chunk", "threads")]


def _setup(row: _Setup) -> list[Value]:
    return [short_name(row.model), row.backend, row.scheme, row.policy, row.chunk, row.threads]


def source_with(name: str, kind: str, model: Iterable[str], origins: Iterable[Origin], **content: Any) -> ReportSource:
    """Return a source with an entry for each of `origins`."""
    found = list(origins)
    models = ", ".join(dict.fromkeys(map(short_name, model)))
    return ReportSource(
        name=name, kind=kind, model=models, num_entries=len(found), origins=list(dict.fromkeys(found)), **content
    )


def _bench(data: Any, name: str) -> ReportSource:
    rows = _convert(data if isinstance(data, list) else [data], list[_BenchRow])
    columns = [
        *_OF_SETUP,
        *_texts("test"),
        *_figures("tokens/s", "± standard deviation"),
        *_settings("runs"),
        *_figures("time to first token, ms"),
        *_shares("NPU busy", "CPU busy", "overlap"),
        Column(name="peak memory of the process, MB", scale=1e-6),
    ]
    lines = [
        Row(
            origin=row.origin,
            values=(
                *_setup(row),
                *(row.test, row.avg_ts, row.stddev_ts, len(row.samples_ts), row.ttft_ms),
                *(row.npu_busy, row.cpu_busy, row.overlap, row.peak_memory_bytes),
            ),
        )
        for row in rows
    ]
    results = [
        Result(
            source=name,
            origin=row.origin,
            model=row.model,
            place=row.backend,
            scheme=row.scheme,
            prompt_length=row.n_prompt,
            chunk_length=row.chunk,
            policy=row.policy,
            threads=row.threads,
            ttft_ms=row.ttft_ms,
            tokens_per_s=row.avg_ts,
            npu_busy=row.npu_busy,
            cpu_busy=row.cpu_busy,
            overlap=row.overlap,
        )
        for row in rows
        if row.n_prompt and not row.n_gen and not row.n_depth
    ]
    table = Table(caption="Tests", columns=columns, rows=lines).narrowed()
    return source_with(
        name, "bench", (r.model for r in rows), (r.origin for r in rows), results=results, tables=[table]
    )


class _ParallelRow(_Setup, kw_only=True):
    pp: Count
    tg: Count
    pl: Count
    t_pp: Figure
    speed_pp: Figure
    t_tg: Figure
    speed_tg: Figure
    speed: Figure


def _parallel(data: Any, name: str) -> ReportSource:
    rows = _convert(data if isinstance(data, list) else [data], list[_ParallelRow])
    columns = [
        *_OF_SETUP,
        *_settings("sequences", "prompt tokens", "new tokens"),
        *_figures("prefill, s", "prefill, tokens/s", "decode, s", "decode, tokens/s", "both, tokens/s"),
    ]
    lines = [
        Row(
            origin=row.origin,
            values=(*_setup(row), row.pl, row.pp, row.tg, row.t_pp, row.speed_pp, row.t_tg, row.speed_tg, row.speed),
        )
        for row in rows
    ]
    table = Table(caption="Parallel sequences", columns=columns, rows=lines).narrowed()
    return source_with(name, "bench --parallel", (r.model for r in rows), (r.origin for r in rows), tables=[table])


class _Predicted(msgspec.Struct, kw_only=True):
    model: str
    device: str
    scheme: str
    policy: str
    prompt_length: Count
    chunk_length: Count
    chunks_in_flight: Count | None
    time_to_first_token_ms: Figure
    tokens_per_s: Figure
    npu_busy: Figure | None
    cpu_busy: Figure
    overlap: Figure | None
    peak_memory_bytes: Count
    energy_joules: Figure | None
    origin: Literal["predicted"] = "predicted"
    graph_lengths: list[Count] = []

    def result(self, source: str, partition: str = "") -> Result:
        """Return the prediction in common terms."""
        return Result(
            source=source,
            origin=self.origin,
            model=self.model,
            place=self.device,
            scheme=self.scheme,
            partition=partition,
            prompt_length=self.prompt_length,
            chunk_length=self.chunk_length,
            policy=self.policy,
            chunks_in_flight=self.chunks_in_flight,
            ttft_ms=self.time_to_first_token_ms,
            tokens_per_s=self.tokens_per_s,
            npu_busy=self.npu_busy,
            cpu_busy=self.cpu_busy,
            overlap=self.overlap,
            memory_bytes=self.peak_memory_bytes,
            energy_joules=self.energy_joules,
        )


class _GridRow(_Predicted, kw_only=True):
    placement_name: str
    placement: dict[str, str]
    attention: str
    graphs: str = ""


def _partition(name: str, placement: Mapping[str, Any], attention: str, graphs: str) -> str:
    """Return a name such as "natural, attention npu, graphs of 1,8,32"."""
    parts = [name or placement_text(placement) or "natural"]
    if attention != "cpu":
        parts.append(f"attention {attention}")
    return ", ".join([*parts, *_graphs(graphs)])


def _graphs(graphs: str) -> list[str]:
    return [f"graphs of {graphs}"] if graphs else []


def experiment(data: Any, name: str) -> ReportSource:
    """Return the rows of an experiment, as dictionaries, in common terms."""
    rows = _convert(data if isinstance(data, list) else [data], list[_GridRow])
    results = [
        row.result(name, _partition(row.placement_name, row.placement, row.attention, row.graphs)) for row in rows
    ]
    return source_with(name, "experiment", (r.model for r in rows), (r.origin for r in rows), results=results)


class _Shares(msgspec.Struct):
    busy: Figure
    idle: dict[str, Figure]


class _Simulated(_Predicted, kw_only=True):
    processors: dict[str, _Shares]


def simulations(data: Any, name: str) -> ReportSource:
    """Return simulated prompts, as dictionaries, in common terms."""
    rows = _convert(data if isinstance(data, list) else [data], list[_Simulated])
    causes = list(dict.fromkeys(cause for row in rows for shares in row.processors.values() for cause in shares.idle))
    columns = [
        *_texts("model", "device", "scheme", "policy"),
        *_settings("prompt tokens", "chunk"),
        *_texts("processor"),
        *_shares("busy", *(f"idle: {cause}" for cause in causes)),
    ]
    lines = [
        Row(
            origin=row.origin,
            values=(
                *(short_name(row.model), row.device, row.scheme, row.policy, row.prompt_length, row.chunk_length),
                *(processor.upper(), shares.busy, *(shares.idle.get(cause) for cause in causes)),
            ),
        )
        for row in rows
        for processor, shares in row.processors.items()
    ]
    table = Table(caption="Causes of idle time, in percent of each processor's time", columns=columns, rows=lines)
    results = [row.result(name, *_graphs(",".join(map(str, row.graph_lengths)))) for row in rows]
    return source_with(
        name,
        "simulate",
        (r.model for r in rows),
        (r.origin for r in rows),
        results=results,
        tables=[table.narrowed()],
    )


class _Spread(msgspec.Struct):
    mean: Figure
    p50: Figure
    p95: Figure


class _ServingRow(msgspec.Struct, kw_only=True):
    model: str
    device: str
    scheme: str
    policy: str
    batcher: str
    decode_on: str
    arrivals: str
    sessions: Count
    chunk_length: Count
    requests: Count
    requests_per_s: Figure
    prompt_tokens_per_s: Figure
    generated_tokens_per_s: Figure
    time_to_first_token_ms: _Spread
    queue_ms: _Spread
    gap_ms: _Spread | None
    packed: Figure
    padding: Figure | None
    busy: dict[str, Figure]
    origin: Literal["predicted"] = "predicted"


def _serving(data: Any, name: str) -> ReportSource:
    rows = _convert(data if isinstance(data, list) else [data], list[_ServingRow])
    columns = [
        *_texts("model", "device", "scheme", "policy", "batcher", "decode on", "arrivals"),
        *_settings("sessions", "chunk", "requests"),
        *_figures("requests/s", "prompt tokens/s", "new tokens/s"),
        *_figures("time to first token, ms (median)", "time to first token, ms (95 %)"),
        *_figures("queued, ms (median)", "queued, ms (95 %)", "gap, ms (median)", "gap, ms (95 %)"),
        *_shares("packed chunks", "padding", "NPU busy", "CPU busy"),
    ]
    lines = [
        Row(
            origin=row.origin,
            values=(
                *(short_name(row.model), row.device, row.scheme, row.policy, row.batcher, row.decode_on, row.arrivals),
                *(row.sessions, row.chunk_length, row.requests),
                *(row.requests_per_s, row.prompt_tokens_per_s, row.generated_tokens_per_s),
                *(row.time_to_first_token_ms.p50, row.time_to_first_token_ms.p95, row.queue_ms.p50, row.queue_ms.p95),
                *((None, None) if row.gap_ms is None else (row.gap_ms.p50, row.gap_ms.p95)),
                *(row.packed, row.padding, row.busy.get("npu"), row.busy.get("cpu")),
            ),
        )
        for row in rows
    ]
    table = Table(caption="Simulated servers", columns=columns, rows=lines).narrowed()
    return source_with(name, "simulate --arrivals", (r.model for r in rows), (r.origin for r in rows), tables=[table])


class _TunedChoice(msgspec.Struct, kw_only=True):
    partition: str
    attention: str
    chunk_length: Count
    policy: str
    chunks_in_flight: Count | None
    time_ms: Figure
    peak_memory_bytes: Count
    energy_joules: Figure | None
    quantisation: dict[str, Any] = {}
    graphs: str = ""


class _Tuned(msgspec.Struct, kw_only=True):
    model: str
    device: str
    scheme: str
    prompt_lengths: list[Count]
    best: _TunedChoice
    default: _TunedChoice
    choices: list[_TunedChoice]
    origin: Literal["predicted"] = "predicted"


def _tuned(data: Any, name: str) -> ReportSource:
    tuned = _convert(data, _Tuned)
    choices = list(tuned.choices)
    choices += [choice for choice in (tuned.best, tuned.default) if choice not in choices]
    (length,) = tuned.prompt_lengths if len(tuned.prompt_lengths) == 1 else (None,)
    several = "" if length is not None else f", mean of {', '.join(map(str, tuned.prompt_lengths))} tokens"
    results = [
        Result(
            source=name,
            origin=tuned.origin,
            model=tuned.model,
            place=tuned.device + several,
            scheme=str(choice.quantisation.get("scheme", tuned.scheme)),
            partition=_partition(choice.partition, {}, choice.attention, choice.graphs),
            prompt_length=length,
            chunk_length=choice.chunk_length,
            policy=choice.policy,
            chunks_in_flight=choice.chunks_in_flight,
            ttft_ms=choice.time_ms,
            tokens_per_s=None if length is None or not choice.time_ms else 1000 * length / choice.time_ms,
            memory_bytes=choice.peak_memory_bytes,
            energy_joules=choice.energy_joules,
            mark=", ".join(mark for mark, own in (("chosen", tuned.best), ("default", tuned.default)) if choice == own),
        )
        for choice in choices
    ]
    return source_with(name, "tune", [tuned.model], [tuned.origin] * len(results), results=results)


class _EvaluationRun(msgspec.Struct, kw_only=True):
    model: str
    scheme: str
    npu: str
    cpu: str
    origin: Literal["measured", "emulated", "unknown"] = "unknown"


class _Comparison(msgspec.Struct, kw_only=True):
    perplexity: Figure
    ratio: Figure | None
    mean_kl: Figure
    kl_99: Figure
    largest_kl: Figure
    top_1: Figure


class _TextFigures(msgspec.Struct, kw_only=True):
    perplexity: Figure
    num_tokens: Count
    tokens_per_second: Figure
    comparison: _Comparison | None


class _Text(msgspec.Struct, kw_only=True):
    file: str
    figures: _TextFigures


class _Accuracy(msgspec.Struct, kw_only=True):
    value: Figure


class _TaskFigures(msgspec.Struct, kw_only=True):
    num_items: Count
    accuracy: _Accuracy
    normalised_accuracy: _Accuracy | None = None
    perplexity: Figure | None = None


class _Task(msgspec.Struct, kw_only=True):
    file: str
    figures: _TaskFigures


class _Linear(msgspec.Struct, kw_only=True):
    weight: str
    weight_bits: Count | None
    activation_bits: Count | None
    error: Figure
    error_unshadowed: Figure | None
    outlier_ratio: Figure | None
    share_beyond_grid: Figure | None


class _Layer(msgspec.Struct, kw_only=True):
    layer: Count
    error: Figure


class _Layers(msgspec.Struct, kw_only=True):
    linears: list[_Linear]
    layers: list[_Layer]


class _Evaluation(msgspec.Struct, kw_only=True):
    run: _EvaluationRun
    text: _Text | None
    layers: _Layers | None
    hellaswag: _Task | None
    lambada: _Task | None


QUALITY = [
    *_texts("source", "model", "scheme", "backend", "text"),
    *_settings("tokens"),
    *_figures("perplexity", "base perplexity", "perplexity ratio", "mean KL, nats", "99 % of KL below, nats"),
    *_figures("largest KL, nats"),
    *_shares("top-1 agreement"),
    *_figures("tokens/s with all logits"),
    *_shares("HellaSwag accuracy", "HellaSwag, length-normalised", "LAMBADA accuracy"),
    *_figures("LAMBADA perplexity"),
]
"""Columns of the table of all evaluations, which has a row for each source."""


def _evaluation(data: Any, name: str) -> ReportSource:
    found = _convert(data, _Evaluation)
    run, text = found.run, found.text
    base = text.figures.comparison if text else None
    hellaswag, lambada = (task.figures if task else None for task in (found.hellaswag, found.lambada))
    normalised = hellaswag.normalised_accuracy if hellaswag else None
    values: list[Value] = [
        *(short_name(name), short_name(run.model), run.scheme),
        run.npu if run.npu == run.cpu else f"{run.npu} and {run.cpu}",
        *((short_name(text.file), text.figures.num_tokens, text.figures.perplexity) if text else ("", None, None)),
        *((base.perplexity, base.ratio, base.mean_kl, base.kl_99, base.largest_kl, base.top_1) if base else [None] * 6),
        text.figures.tokens_per_second if text else None,
        hellaswag.accuracy.value if hellaswag else None,
        normalised.value if normalised else None,
        *((lambada.accuracy.value, lambada.perplexity) if lambada else (None, None)),
    ]
    tables = [Table(caption="Quality", columns=QUALITY, rows=[Row(origin=run.origin, values=values)])]
    if found.layers:
        tables += _layer_tables(found.layers, run.origin)
    return source_with(name, "eval", [run.model], [run.origin], tables=tables)


def _layer_tables(layers: _Layers, origin: Origin) -> list[Table]:
    columns = [
        *_texts("linear layer", "bits"),
        *_shares("error", "error without shadow"),
        *_figures("outlier ratio"),
        *_shares("beyond the grid"),
    ]
    linears = [
        Row(
            origin=origin,
            values=(
                linear.weight.removesuffix(".weight"),
                f"w{linear.weight_bits}a{linear.activation_bits}",
                *(linear.error, linear.error_unshadowed, linear.outlier_ratio, linear.share_beyond_grid),
            ),
        )
        for linear in layers.linears
    ]
    streams = [Row(origin=origin, values=(layer.layer, layer.error)) for layer in layers.layers]
    return [
        Table(caption="Error of each linear layer, relative", columns=columns, rows=linears).narrowed(),
        Table(
            caption="Error of the residual stream after each layer, relative",
            columns=[*_settings("layer"), *_shares("error")],
            rows=streams,
        ),
    ]
