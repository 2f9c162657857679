"""Processors of Windows: records of efficiency classes, and the lines of `doctor` and `run`."""

import os
import struct
from pathlib import Path

import pytest

import chunkrt
from chunkrt.runtime import windows_processors
from chunkrt.runtime.windows_processors import EMULATED, parse_cpu_sets

TINY = Path(__file__).resolve().parents[1] / "parity" / "fixtures" / "llama_biased_gguf" / "model.gguf"


def record(processor: int, efficiency: int, *, group: int = 0, size: int = 32, kind: int = 0) -> bytes:
    """Return a SYSTEM_CPU_SET_INFORMATION of winnt.h."""
    start = struct.pack("<IIIH", size, kind, 256 + processor, group)  # Size, Type, Id, Group
    core = bytes([processor, processor, 0, 0, efficiency, 0])  # the last one: flags
    return (start + core + bytes(12)).ljust(size, b"\0")


def test_parse_cpu_sets_returns_the_class_of_each_processor():
    assert parse_cpu_sets(record(0, 0) + record(1, 1) + record(2, 1)) == {0: 0, 1: 1, 2: 1}


def test_parse_cpu_sets_numbers_processors_across_groups():
    assert parse_cpu_sets(record(63, 1) + record(0, 0, group=1)) == {63: 1, 64: 0}


def test_parse_cpu_sets_accepts_longer_records_and_skips_other_types():
    """A later Windows may add fields and types."""
    assert parse_cpu_sets(record(0, 2, size=48) + record(9, 9, kind=1) + record(1, 3, size=48)) == {0: 2, 1: 3}


def test_parse_cpu_sets_ends_at_an_incomplete_record():
    assert parse_cpu_sets(record(0, 1) + record(1, 1)[:20]) == {0: 1}
    assert parse_cpu_sets(b"") == {}


@pytest.fixture
def doctor(monkeypatch, command):
    """Return a function that calls `doctor` as on Windows, with efficiency classes of cores."""

    def call(classes):
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        monkeypatch.setattr(windows_processors, "efficiency_classes", lambda: classes)
        return [" ".join(line.split()) for line in command("doctor").out.splitlines()]

    return call


@pytest.mark.parametrize(
    ("classes", "line"),
    [
        (dict.fromkeys(range(12), 0), "ok big cores all CPUs alike, 0-11"),  # Snapdragon X
        ({0: 1, 1: 1, 2: 0, 3: 0}, "ok big cores CPUs 0-1 of 0-3"),
        ({0: 0, 1: 1, 2: 2}, "ok big cores CPUs 2 of 0-2"),
    ],
)
def test_doctor_lists_the_efficiency_classes_of_windows(doctor, classes, line):
    assert line in doctor(classes)


def test_doctor_says_if_efficiency_classes_are_not_known(doctor):
    (line,) = (line for line in doctor({}) if " big cores " in line)
    assert line.startswith("lack big cores not known: ")


def test_doctor_and_load_name_the_native_python_if_windows_emulates(monkeypatch, command, caplog):
    assert EMULATED not in command("doctor").out
    monkeypatch.setattr(windows_processors, "is_emulated_on_arm", lambda: True)
    assert EMULATED in command("doctor").out
    with chunkrt.load(TINY):
        pass
    # Another test process may be compiling the same model, which a warning reports, too.
    assert [record.message for record in caplog.records].count(EMULATED) == 1
