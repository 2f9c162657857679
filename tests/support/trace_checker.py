"""Strict checks of Chrome's Trace Event Format, as Perfetto's importer reads it.

Perfetto's Python package downloads its trace processor when it is used, so tests cannot load it. These checks find
everything that the importer would drop or count as an error: unknown phases, missing or mistyped fields, tasks of a
track that overlap after times are truncated to nanoseconds, and flow events outside all tasks.
"""

import json
import math
from collections import defaultdict
from itertools import pairwise

REQUIRED = {
    "X": {"name": str, "cat": str, "ts": float, "dur": float, "pid": int, "tid": int, "args": dict},
    "M": {"name": str, "pid": int, "args": dict},
    "C": {"name": str, "ts": float, "pid": int, "tid": int, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "ts": float, "pid": int, "tid": int},
    "t": {"name": str, "cat": str, "id": int, "ts": float, "pid": int, "tid": int, "bp": str},
    "f": {"name": str, "cat": str, "id": int, "ts": float, "pid": int, "tid": int, "bp": str},
}
METADATA = {"process_name": ("name", str), "thread_name": ("name", str), "thread_sort_index": ("sort_index", int)}


def nanoseconds(microseconds):
    """Convert like the importer: truncate, do not round."""
    return int(microseconds * 1000)


class CheckedTrace:
    """Contents of a trace file that passed all checks.

    `tracks`: names by tid. `slices`: (start, end, name, args) by track name. `flows`: names of the tasks that an arrow
    connects, by its name and id. `counters`: (time, value) by counter.
    """

    def __init__(self, path):
        text = path.read_text("utf-8")
        assert text.startswith('{"')  # the importer detects a JSON trace by this
        data = json.loads(text, parse_constant=lambda word: 1 / 0)
        assert set(data) <= {"traceEvents", "otherData", "displayTimeUnit", "systemTraceEvents", "metadata"}
        self.events = data["traceEvents"]
        for event in self.events:
            check_fields(event)
        self.process = next(e["args"]["name"] for e in self.events if e["name"] == "process_name")
        self.tracks = {e["tid"]: e["args"]["name"] for e in self.events if e["name"] == "thread_name"}
        assert len(set(self.tracks.values())) == len(self.tracks)
        assert 0 not in self.tracks  # the kernel's idle task
        assert all(e["tid"] in self.tracks for e in self.events if "tid" in e)
        self.slices, self.parts = defaultdict(list), defaultdict(list)
        for event in self.events:
            if event["ph"] == "X":
                start = nanoseconds(event["ts"])
                end = start + nanoseconds(event["dur"])
                found = self.parts if event["cat"] == "span" else self.slices
                found[self.tracks[event["tid"]]].append((start, end, event["name"], event["args"]))
        for slices in (*self.slices.values(), *self.parts.values()):
            slices.sort(key=lambda s: s[:2])
            for (_, end, *_), (start, *_) in pairwise(slices):
                assert start >= end, "tasks of one track overlap"
        for track, parts in self.parts.items():
            for start, end, *_ in parts:
                around = [s for s in self.slices[track] if s[0] <= start and end <= s[1]]
                assert around, "what a task did lies outside of it"
        self.flows = self._flows()
        self.counters = defaultdict(list)
        for event in self.events:
            if event["ph"] == "C":
                for key, value in event["args"].items():
                    assert type(value) in (int, float)
                    self.counters[f"{event['name']} {key}"].append((nanoseconds(event["ts"]), value))

    def _flows(self):
        flows = defaultdict(list)
        for event in self.events:
            if event["ph"] in "stf":
                flows[event["name"], event["id"]].append(event)
        found = {}
        for key, points in flows.items():
            assert [p["ph"] for p in points] == ["s", *["t"] * (len(points) - 2), "f"]
            assert [p["ts"] for p in points] == sorted(p["ts"] for p in points)
            found[key] = [self._enclosing(point) for point in points]
        return found

    def _enclosing(self, point):
        time = nanoseconds(point["ts"])
        (name,) = [n for start, end, n, _ in self.slices[self.tracks[point["tid"]]] if start <= time < end]
        return name


def check_fields(event):
    fields = REQUIRED[event["ph"]]
    assert set(event) - {"ph"} <= {*fields, "tid"}
    for name, kind in fields.items():
        assert type(event[name]) is kind, (name, event)
    for name in ("ts", "dur"):
        if name in event:
            assert math.isfinite(event[name])
            assert event[name] >= 0
    if event["ph"] == "M":
        key, kind = METADATA[event["name"]]
        assert type(event["args"][key]) is kind
    assert event.get("bp", "e") == "e"
