"""What a timeline shows: every task and every gap, at its time."""

import xml.etree.ElementTree as ElementTree

import pytest
from fake_backend import npu_and_cpu
from test_trace import virtual_record

from chunkrt.runtime.idle import idle_gaps
from chunkrt.timeline.picture import COLOURS, LABELS, Bar, Row, ink, make_picture
from chunkrt.timeline.vector import to_html, to_svg

RECORD = virtual_record(npu_and_cpu(2), duration=1_000_000)


def test_workers_show_every_task_and_gap() -> None:
    picture = make_picture(RECORD)
    assert [row.name for row in picture.workers] == ["NPU", "CPU worker 0", "CPU worker 1"]
    num_bars = sum(len(row.bars) for row in picture.workers)
    assert num_bars == len(RECORD.events) + len(idle_gaps(RECORD))
    for row in picture.workers:
        at = 0.0
        for bar in row.bars:
            assert bar.start == pytest.approx(at)
            at = bar.end
        assert at == pytest.approx(picture.milliseconds)


def test_chunks_show_their_tasks_in_order() -> None:
    picture = make_picture(RECORD)
    assert [len(row.bars) for row in picture.chunks] == [5, 5, 5, 7]
    for row in picture.chunks:
        starts = [bar.start for bar in row.bars]
        assert starts == sorted(starts)
        assert all(bar.text.split(",")[0].endswith(row.name) for bar in row.bars)


def test_shares_fill_a_hundred_percent() -> None:
    for row in make_picture(RECORD).shares:
        assert row.bars[0].start == 0
        assert row.bars[-1].end == pytest.approx(100)


def test_every_kind_has_a_label_and_ink_that_can_be_read() -> None:
    assert COLOURS.keys() == LABELS.keys()
    assert (ink("linears"), ink("idle: start")) == ("#fff", "#000")


def test_a_long_run_makes_no_large_file() -> None:
    """Neighbours of a fraction of a pixel are drawn together."""
    picture = make_picture(virtual_record(npu_and_cpu(2), num_chunks=600, slots=32))
    assert sum(len(row.bars) for row in picture.workers) > 3000
    text = to_svg(picture)
    assert len(text) < 1_000_000
    assert text.count("<path class=") < sum(len(row.bars) for row in (*picture.workers, *picture.chunks))


def test_names_are_escaped() -> None:
    picture = make_picture(RECORD)
    odd = Row('a<b>&"\x07\ud800', [Bar(0, 1, "linears", "</title><script>")])
    strange = type(picture)(title="<i>", milliseconds=1, workers=[odd], chunks=[odd], shares=[odd])
    text = to_svg(strange)
    assert any(e.text == 'a<b>&"\ufffd\ufffd' for e in ElementTree.fromstring(text).iter())
    assert "<script>" not in to_html(strange)
    to_html(strange).encode("utf-8")


def test_a_run_of_no_time_is_drawn() -> None:
    record = virtual_record(npu_and_cpu(), duration=0)
    assert ElementTree.fromstring(to_svg(make_picture(record))) is not None
