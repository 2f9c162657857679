"""The page of a report, as one file of HTML with its own style and script."""

from __future__ import annotations

import base64
import colorsys
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from chunkrt import __version__
from chunkrt.reports.charts import fronts, rates
from chunkrt.reports.formats import QUALITY, ReportSource
from chunkrt.reports.results import results_table, short_name
from chunkrt.reports.tables import MARKS, MEANINGS, Column, Row, Table
from chunkrt.reports.timelines import (
    KINDS,
    ShareBar,
    Timeline,
    share_bars,
    subgraphs_table,
    timelines_of,
    times_table,
)
from chunkrt.runtime.record import ORIGINS, Origin, origin_of
from chunkrt.runtime.trace.timeline.picture import COLOURS, IDLE, LABELS, ink


@dataclass(frozen=True, kw_only=True)
class _Section:
    """The section of one source."""

    id: str
    title: str
    origin: Origin
    tables: Sequence[Table] = ()
    details: Sequence[tuple[str, Table]] = ()
    timelines: Sequence[Timeline] = ()
    shares: Sequence[ShareBar] = ()
    kinds: Sequence[str] = field(default=())
    note: str = ""


def page_of(sources: Sequence[ReportSource], title: str) -> str:
    """Return the page. Equal sources give identical pages."""
    results = [result for source in sources for result in source.results]
    evaluations = [
        row for source in sources for table in source.tables if table.columns is QUALITY for row in table.rows
    ]
    quality = Table(caption="Evaluations", columns=QUALITY, rows=evaluations).narrowed() if evaluations else None
    parts = [part for number, source in enumerate(sources) if (part := _part(number, source)) is not None]
    charts, fronts_note = fronts(results)
    sections = [("sources", "Sources")]
    of_rates = rates(results)
    sections += [("rates", "Prefill rates")] if of_rates else []
    sections += [("fronts", "Pareto fronts")] if charts else []
    sections += [("prefills", "Prefills")] if results else []
    sections += [("quality", "Quality")] if quality else []
    sections += [(part.id, part.title) for part in parts]
    script = _text("page.js")
    found = {origin for source in sources for origin in source.origins}
    environment = Environment(
        loader=DictLoader({"page": _text("page.html")}), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page: str = environment.get_template("page").render(
        title=title,
        version=__version__,
        policy=_policy(script),
        style=Markup(_text("page.css") + _kinds()),
        script=Markup(script),
        marks=MARKS,
        meanings=MEANINGS,
        labels=LABELS,
        number={kind: index for index, kind in enumerate(KINDS)},
        origins=[origin for origin in ORIGINS if origin in found],
        sections=sections,
        overview=_overview(sources),
        rates=of_rates,
        fronts=charts,
        fronts_note=fronts_note,
        prefills=results_table(results) if results else None,
        quality=quality,
        parts=[_for_template(part) for part in parts],
    )
    return page


def _for_template(part: _Section) -> dict[str, Any]:
    """Return a part's fields, with the data of its timelines as JSON that may stand in a script element."""
    timelines = [vars(timeline) | {"data": Markup(_json(timeline.data))} for timeline in part.timelines]
    return vars(part) | {"timelines": timelines}


def _overview(sources: Sequence[ReportSource]) -> Table:
    columns = [Column(name=name, form="text") for name in ("source", "kind", "model")]
    columns += [Column(name="runs or rows", form="setting"), Column(name="origin", form="text")]
    rows = [
        Row(
            origin=source.origins[0],
            values=(source.name, source.kind, source.model, source.num_entries, ", ".join(source.origins)),
        )
        for source in sources
    ]
    return Table(caption="Sources of this report", columns=columns, rows=rows)


def _part(number: int, source: ReportSource) -> _Section | None:
    """Return the section of a source; None if the common tables contain everything."""
    tables = [table for table in source.tables if table.columns is not QUALITY]
    name = f"{source.kind}: {short_name(source.name)}" if source.name != source.kind else source.name
    if not source.groups:
        if not tables:
            return None
        return _Section(id=f"part-{number}", title=name, origin=source.origins[0], tables=tables)
    timelines, note = timelines_of(source.groups, source.records)
    bars = share_bars(source.groups)
    used = {kind for bar in bars for kind, _ in bar.parts}
    longest = max(source.records, key=lambda record: (record.num_tokens, record.end_ns - record.start_ns))
    return _Section(
        id=f"part-{number}",
        title=name,
        origin=origin_of(source.records),
        tables=[times_table(source.groups), *tables],
        details=[(f"Time of each subgraph in {longest.name}", subgraphs_table(longest))],
        timelines=timelines,
        shares=bars,
        kinds=[kind for kind in KINDS if kind in used],
        note=note,
    )


def _kinds() -> str:
    """Return rules with the colours of work and of causes of idle time. Those of idle time are dim in a dark scheme."""
    rules = []
    for index, (kind, colour) in enumerate(COLOURS.items()):
        shade = f"light-dark({colour}, {_dim(colour)})" if kind.startswith(IDLE) else colour
        text = f"light-dark({ink(kind)}, {'#fff' if kind.startswith(IDLE) else ink(kind)})"
        rules.append(f".k{index}{{background:{shade};fill:{shade};color:{text}}}")
    return "\n".join(rules)


def _dim(colour: str) -> str:
    """Return a colour of the same hue for a dark page. Dark grey becomes light grey."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    parts = colorsys.hls_to_rgb(hue, 0.6 if lightness < 0.35 else 0.3 * lightness + 0.06, 0.85 * saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _policy(script: str) -> str:
    """Return a policy under which a browser runs only the page's own script, and loads nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = ("default-src 'none'", "img-src data:", "style-src 'unsafe-inline'", f"script-src 'sha256-{digest}'")
    return "; ".join((*rules, "base-uri 'none'", "form-action 'none'"))


def _json(data: dict[str, Any]) -> str:
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(name: str) -> str:
    return files("chunkrt.reports").joinpath(name).read_text("utf-8")
