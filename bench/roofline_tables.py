"""The report of bench/roofline.py as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def markdown(report: dict[str, Any]) -> Iterator[str]:
    """Return the lines of a report; `report` is the content of the --json file."""
    machine = report["machine"]
    counts = sorted({1, machine["threads"]})
    sizes = ", ".join(f"L{level} {size >> 10} KiB" for level, size in sorted(machine["cache_bytes"].items()))
    yield f"{machine['processor']}, {machine['cores']} cores, {sizes or 'caches unknown'}; {machine['rounds']} rounds."
    yield "Peaks and bandwidths: the best sample. Others: median (least - most). Shares: of the median (of the best)."
    yield ""
    cores = [f"{count} core{'s' if count > 1 else ''}" for count in counts]
    yield from _table(
        ["instruction set", "products", "instructions", "best mix", *(f"GMAC/s, {c}" for c in cores)],
        [
            [row["isa"], row["kind"], row["instructions"], row["mix"], *(_giga(row["macs_per_s"], t) for t in counts)]
            for row in _best_mixes(report["peaks"], str(counts[-1]))
        ],
    )
    yield from _table(
        ["bandwidth of", *(f"GB/s, {c}" for c in cores)],
        [[row["level"], *(_giga(row["bytes_per_s"], t) for t in counts)] for row in report["bandwidth"]],
    )
    heads = [head for c in cores for head in (f"rate, {c}", "of peak", "of roofline")]
    kernels = report["kernels"]
    yield from _table(
        ["kernel", "case", "unit", *heads],
        [_kernel_cells(kernels[i : i + len(counts)]) for i in range(0, len(kernels), len(counts))],
    )
    if "prefill" in report:
        yield from _model_markdown(report)


def parts_markdown(bars: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Return the lines of one table: parts by test and number of threads; `bars` is the report's "parts"."""
    yield "Time breakdown by steps of the native programs: ms of each thread (medians), shares of the sum,"
    yield "and the bound, the longer of arithmetic and memory at their peaks."
    yield ""
    found = [{row["part"]: row for row in bar["parts"]} for bar in bars]
    names = dict.fromkeys(row["part"] for bar in bars for row in bar["parts"])
    heads = [f"{bar['test']}, {bar['threads']} thread{'s' if bar['threads'] > 1 else ''}" for bar in bars]
    yield from _table(
        ["part", *(head for bar in heads for head in (bar, "share", "at best"))],
        [[name, *(cell for of_bar in found for cell in _part_cells(of_bar.get(name)))] for name in names],
    )


def _kernel_cells(rows: Sequence[dict[str, Any]]) -> list[str]:
    first = rows[0]
    cells = [f"{first['kernel']} ({first['isa']})", f"{first['case']}, from {first['reads_from']}", first["unit"]]
    for row in rows:
        best = row["rate"]["most"] / row["rate"]["median"]
        cells += [_spread(row["rate"]), _shares(row["share_of_peak"], best), _shares(row["share_of_roofline"], best)]
    return cells


def _model_markdown(report: dict[str, Any]) -> Iterator[str]:
    model, start, memory = (report[key] for key in ("model", "start", "memory"))
    yield f"{model['name']}, native, {model['scheme']}, chunks of {model['chunk']}. In GMAC: linears, their work on the"
    yield "integer units (16-bit grids count twice), and attention. Bounds in ms: arithmetic (linears and attention"
    yield "at their peaks) and memory (every chunk reads its weights once)."
    yield ""
    rows = []
    for row in report["prefill"]:
        work, bounds = row["work"], row["bounds"]
        macs = [f"{work[key] / 1e9:.2f}" for key in ("linear_macs", "digit_macs", "attention_macs")]
        times = _spread({key: 1e3 * value for key, value in row["seconds"].items()})
        shares = ["-"] * 5
        if bounds:
            shares = [f"{1e3 * bounds[key]:.1f}" for key in ("arithmetic_s", "memory_s")]
            best = row["seconds"]["median"] / row["seconds"]["least"]
            shares += [_shares(bounds[f"share_of_{name}"], best) for name in ("arithmetic", "memory")]
            shares.append(bounds["nearer"])
        rows.append([f"pp{row['tokens']}", str(row["threads"]), *macs, times, *shares])
    yield from _table(
        [
            *("test", "threads", "linears", "digits", "attention", "ms", "arithmetic", "memory"),
            *("share of arithmetic", "share of memory", "nearer bound"),
        ],
        rows,
    )
    yield from parts_markdown(report["parts"])
    milliseconds = {name: _spread({key: 1e3 * value for key, value in times.items()}) for name, times in start.items()}
    yield from _table(
        [f"warm start, {model['start_threads']} threads", "ms to the first token"],
        [
            ["from the start of `chunkrt run`", milliseconds["process_to_first_token_s"]],
            ["from `chunkrt.load` in a fresh process", milliseconds["load_to_first_token_s"]],
        ],
    )
    stored = memory["weight_bytes"] + memory["cache_bytes"]
    peak = memory["peak_bytes"]
    yield from _table(
        [f"memory, {memory['tokens']} tokens", "MiB"],
        [
            ["packed weights", _mib(memory["weight_bytes"])],
            ["KV cache", _mib(memory["cache_bytes"])],
            ["peak of the process", _mib(peak)],
            ["of which before `chunkrt.load`", _mib(memory["before_bytes"])],
            ["peak over weights and cache", f"{peak / stored:.2f} times" if peak else "-"],
        ],
    )


def _part_cells(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["-"] * 3
    bound = row["bound_s"]
    return [_ms(row["seconds"]["median"]), f"{row['share']:.1%}", "-" if bound is None else _ms(bound)]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.{1 if seconds >= 0.01 else 2 if seconds >= 0.001 else 3}f}"


def _best_mixes(peaks: Sequence[dict[str, Any]], threads: str) -> list[dict[str, Any]]:
    """Return for each instruction sequence the mix that is fastest on all cores, with the best rate of any for each
    count.
    """
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in peaks:
        key, rates = (row["isa"], row["instructions"]), row["macs_per_s"]
        known = best.setdefault(key, row)
        faster = row if rates[threads] > known["macs_per_s"][threads] else known
        best[key] = faster | {"macs_per_s": {t: max(rate, known["macs_per_s"][t]) for t, rate in rates.items()}}
    return list(best.values())


def _giga(values: dict[str, float], threads: int) -> str:
    return f"{values[str(threads)] / 1e9:.0f}"


def _spread(values: dict[str, float]) -> str:
    digits = 0 if values["median"] >= 100 else 1 if values["median"] >= 10 else 2
    median, least, most = (f"{values[key]:.{digits}f}" for key in ("median", "least", "most"))
    return f"{median} ({least} - {most})"


def _shares(share: float | None, best: float) -> str:
    """Return the shares of the median and, with `best` as its speed-up, of the best sample."""
    return "-" if share is None else f"{share:.0%} ({share * best:.0%})"


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / (1 << 20):.1f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Return a Markdown table, and an empty line."""
    yield "| " + " | ".join(heads) + " |"
    yield "|" + " --- |" * len(heads)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""
