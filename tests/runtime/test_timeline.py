"""Contents of a timeline: every task and every gap, at its time."""

import xml.etree.ElementTree as ElementTree
from itertools import combinations, pairwise

import pytest
from fake_backend import make_plan, npu_and_cpu
from hypothesis import given
from hypothesis import strategies as st
from virtual_record import virtual_record

from chunkrt.runtime.trace.idle import idle_gaps
from chunkrt.runtime.trace.timeline.picture import COLOURS, LABELS, Bar, in_lanes, ink, make_picture
from chunkrt.runtime.trace.timeline.vector import to_html, to_svg

RECORD = virtual_record(npu_and_cpu(2), duration=1_000_000)


def test_workers_show_every_task_and_gap() -> None:
    picture = make_picture(RECORD)
    assert [name for name, _ in picture.workers] == ["NPU", "CPU worker 0", "CPU worker 1"]
    num_bars = sum(len(bars) for _, bars in picture.workers)
    assert num_bars == len(RECORD.events) + len(idle_gaps(RECORD))
    for _, bars in picture.workers:
        at = 0.0
        for bar in bars:
            assert bar.start == pytest.approx(at)
            at = bar.end
        assert at == pytest.approx(picture.milliseconds)


def test_chunks_show_their_tasks_in_order() -> None:
    picture = make_picture(RECORD)
    assert [len(bars) for _, bars in picture.chunks] == [5, 5, 5, 7]
    for name, bars in picture.chunks:
        starts = [bar.start for bar in bars]
        assert starts == sorted(starts)
        assert all(bar.text.split(",")[0].endswith(name) for bar in bars)


def test_tasks_of_a_chunk_that_run_at_once_share_its_height() -> None:
    record = virtual_record(npu_and_cpu(), plan=make_plan(layers=1, shadowed=1), num_chunks=1)
    ((_, bars),) = make_picture(record).chunks
    lanes = {bar.text.split(" ")[0]: (bar.lane, bar.lanes) for bar in bars if bar.end > bar.start}
    assert lanes == {
        "static.0": (0, 1),
        "linear.0": (0, 2),
        "shadow.0": (1, 2),
        "join.0": (0, 1),
        "dynamic.0": (0, 1),
        "static.1": (0, 1),
        "head": (0, 1),
    }
    text = to_svg(make_picture(record))
    heights = {
        path.find("{*}title").text.split(" ")[0]: float(path.attrib["d"].split("v")[1].split("h")[0])  # type: ignore[union-attr]
        for path in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}path")
        if path.find("{*}title") is not None
    }
    assert heights["linear.0"] == heights["shadow.0"] == pytest.approx(heights["join.0"] / 2, abs=0.1)


@given(spans=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=12))
def test_bars_in_one_lane_never_overlap_and_lanes_are_no_more_than_needed(spans: list[tuple[int, int]]) -> None:
    bars = in_lanes([Bar(start, start + length, "linears", "") for start, length in spans])
    assert sorted((bar.start, bar.end - bar.start) for bar in bars) == sorted(spans)
    for bar in bars:
        assert 0 <= bar.lane < bar.lanes <= len(bars)
    for one, other in combinations(bars, 2):
        if one.start < other.end and other.start < one.end:
            assert one.lanes == other.lanes
            assert one.lane != other.lane
    if all(one.end <= other.start for one, other in pairwise(sorted(bars))):
        assert {bar.lanes for bar in bars} <= {1}


def test_shares_fill_a_hundred_percent() -> None:
    for _, bars in make_picture(RECORD).shares:
        assert bars[0].start == 0
        assert bars[-1].end == pytest.approx(100)


def test_every_kind_has_a_label_and_readable_ink() -> None:
    assert COLOURS.keys() == LABELS.keys()
    assert (ink("linears"), ink("idle: start")) == ("#fff", "#000")


def test_long_run_makes_a_small_file() -> None:
    """Adjacent bars of a fraction of a pixel are drawn as one."""
    picture = make_picture(virtual_record(npu_and_cpu(2), num_chunks=600, slots=32))
    assert sum(len(bars) for _, bars in picture.workers) > 3000
    text = to_svg(picture)
    assert len(text) < 1_000_000
    assert text.count("<path class=") < sum(len(bars) for _, bars in (*picture.workers, *picture.chunks))


def test_names_are_escaped() -> None:
    picture = make_picture(RECORD)
    odd = ('a<b>&"\x07\ud800', [Bar(0, 1, "linears", "</title><script>")])
    strange = type(picture)(title="<i>", milliseconds=1, workers=[odd], chunks=[odd], shares=[odd])
    text = to_svg(strange)
    assert any(e.text == 'a<b>&"\ufffd\ufffd' for e in ElementTree.fromstring(text).iter())
    assert "<script>" not in to_html(strange)
    to_html(strange).encode("utf-8")


def test_run_of_zero_duration_is_drawn() -> None:
    record = virtual_record(npu_and_cpu(), duration=0)
    assert ElementTree.fromstring(to_svg(make_picture(record))) is not None
