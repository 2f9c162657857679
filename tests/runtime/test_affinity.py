"""CPU affinity: the meaning of a list and of "big", the CPUs that threads really have, and the restored affinity of the
caller."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fixture_checkpoints import checkpoint, input_ids
from one_line import expect_one_line

import chunkrt
from chunkrt.backends.native.backend import NativeBackend, NativeExecutable
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.settings import read_settings
from chunkrt.errors import BackendError, ConfigError
from chunkrt.runtime import affinity
from chunkrt.runtime.affinity import available_cores, big_cores, cpu_list, cpu_quota, find_cpus, running_on

if not hasattr(os, "sched_setaffinity"):
    pytest.skip(f"{sys.platform} has no affinity", allow_module_level=True)

GGUF = checkpoint("llama_biased_gguf")
TOKENS = input_ids("llama_biased_gguf")[:40]
MASK = os.sched_getaffinity(0)
FIRST, LAST = min(MASK), max(MASK)
TASKS = Path("/proc/self/task")

Masks = Callable[[], dict[int, str]]


def mask(thread: int | str) -> str:
    """Return the CPUs that a thread may use, as Linux reports them."""
    lines = (TASKS / str(thread) / "status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:"))


@pytest.fixture(autouse=True)
def caller() -> Iterator[None]:
    """Restore the affinity of the thread that runs a test."""
    yield
    assert os.sched_getaffinity(0) == MASK


@pytest.fixture
def new_masks() -> Masks:
    """A function that returns the masks of the threads that have started since the test began."""
    before = {path.name for path in TASKS.iterdir()}
    return lambda: {int(path.name): mask(path.name) for path in TASKS.iterdir() if path.name not in before}


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """A dictionary of the masks of the threads that call native programs, as they are during the call."""
    seen: dict[int, str] = {}
    run = NativeExecutable.run

    def noting(self, inputs, outputs) -> None:
        thread = threading.get_native_id()
        seen[thread] = mask(thread)
        run(self, inputs, outputs)

    monkeypatch.setattr(NativeExecutable, "run", noting)
    return seen


def load(affinity: str, **options: object) -> chunkrt.Engine:
    return chunkrt.load(GGUF, npu="native", chunk_length=8, affinity=affinity, **options)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that simulates a machine with one CPU for each speed, all of which this process may use."""

    def make(**speeds: list[int | None]) -> None:
        monkeypatch.setattr(affinity, "CPU_FOLDER", tmp_path)
        [num_cpus] = {len(values) for values in speeds.values()}
        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(num_cpus)))
        for kind, values in speeds.items():
            for cpu, value in enumerate(values):
                path = tmp_path / f"cpu{cpu}" / {"capacity": "cpu_capacity", "khz": "cpufreq/cpuinfo_max_freq"}[kind]
                path.parent.mkdir(parents=True, exist_ok=True)
                if value is not None:
                    path.write_text(f"{value}\n")

    return make


@pytest.mark.parametrize(
    ("speeds", "big"),
    [
        ({"capacity": [325] * 4 + [820] * 3 + [1024]}, {4, 5, 6, 7}),
        ({"capacity": [1024] * 8}, set(range(8))),
        ({"capacity": [1024, 250, 1024, 250], "khz": [2_000_000] * 4}, {0, 2}),
        ({"khz": [5_200_000] * 4 + [3_900_000] * 4}, {0, 1, 2, 3}),
        ({"khz": [5_700_000, 5_700_000, 5_450_000, 5_450_000]}, {0, 1, 2, 3}),
        ({"capacity": [1024, None], "khz": [1_800_000, 2_400_000]}, {1}),
        ({"capacity": [None, None]}, {0, 1}),
        ({"capacity": [0, 0]}, {0, 1}),
    ],
    ids=["little, middle, prime", "alike", "capacity first", "efficient", "boost", "a gap", "nothing known", "zeros"],
)
def test_big_cores_are_found_by_their_speed(machine, speeds, big) -> None:
    machine(**speeds)
    assert big_cores() == find_cpus("big") == big
    assert EngineOptions(affinity="big").num_threads == len(big)
    assert EngineOptions(affinity="big", threads=3).num_threads == 3


def test_big_cores_are_limited_to_the_mask(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(capacity=[300, 300, 1024])
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0, 1})
    assert big_cores() == {0, 1}


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", {0}), ("0,2,4-7", {0, 2, 4, 5, 6, 7}), (" 3 , 1-1,1", {1, 3}), ("0-7", set(range(8)))]
)
def test_find_cpus_parses_lists(machine, text: str, cpus: set[int]) -> None:
    machine(capacity=[1024] * 8)
    assert find_cpus(text) == cpus
    assert find_cpus(cpu_list(cpus)) == cpus
    assert EngineOptions(affinity=text).num_threads == len(cpus)


@pytest.mark.parametrize(
    "text", ["", "0,", ",", "1-", "-1", "3-1", "0-1-2", "bigg", "0;1", "0x1", "1.0", "²", "10000", "0-99999999999"]
)
def test_find_cpus_rejects_other_text(text: str) -> None:
    with pytest.raises(ConfigError, match="expected none, big, or CPUs such as 0,2,4-7"):
        EngineOptions(affinity=text)


@pytest.mark.parametrize("value", [0, None, True, ["0"]])
def test_affinity_of_another_type_is_rejected(value: object) -> None:
    with pytest.raises(ConfigError, match=r"`affinity` is .*, expected text"):
        EngineOptions(affinity=value)


def test_find_cpus_rejects_missing_or_masked_cpus(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(capacity=[1024] * 4)
    with pytest.raises(ConfigError, match=r"`affinity` is '2-4', but CPU 4 is not present; choose among 0-3"):
        find_cpus("2-4")
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0, 2})
    with pytest.raises(ConfigError, match=r"CPU 1 is outside this process's mask; choose among 0,2"):
        find_cpus("0-2")


def test_affinity_is_rejected_on_systems_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(os, "sched_setaffinity")
        patch.setattr("platform.system", lambda: "Darwin")
        assert find_cpus("none") is None
        for choice in ("big", "0"):
            with pytest.raises(
                ConfigError,
                match=f"`affinity` is '{choice}', but Darwin does not support CPU affinity; use `affinity='no",
            ):
                find_cpus(choice)


@pytest.mark.parametrize(("affinity", "cpus"), [(str(LAST), {LAST}), ("big", find_cpus("big")), ("none", MASK)])
def test_pool_threads_stay_on_their_cpus(affinity: str, cpus: set[int], new_masks: Masks) -> None:
    with load(affinity, threads=4):
        assert list(new_masks().values()) == [cpu_list(cpus)] * 3
        assert os.sched_getaffinity(0) == MASK


def test_workers_stay_on_their_cpus(computing: dict[int, str]) -> None:
    with load(str(LAST), threads=4, policy="in_order") as engine:
        engine.session().prefill(TOKENS)
        assert threading.get_native_id() not in computing
        assert set(computing.values()) == {str(LAST)}


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_caller_is_pinned_only_while_it_computes(computing: dict[int, str], num_tokens: int) -> None:
    with load(str(FIRST), policy="sequential") as engine:
        assert engine.options.num_threads == 1
        engine.session().prefill(TOKENS[:num_tokens])
        assert computing == {threading.get_native_id(): str(FIRST)}
        assert os.sched_getaffinity(0) == MASK


def test_results_do_not_depend_on_affinity() -> None:
    with load("none", threads=2) as free, load(str(LAST), threads=2) as pinned, load("big") as big:
        logits = [engine.session().prefill(TOKENS, logits="all").logits for engine in (free, pinned, big)]
        assert logits[0].tobytes() == logits[1].tobytes() == logits[2].tobytes()


def test_engines_have_separate_cpus(computing: dict[int, str], new_masks: Masks) -> None:
    if len(MASK) < 2:
        pytest.skip("this process has one CPU; two engines cannot have different ones")
    options = {"threads": 2, "policy": "in_order"}
    with load(str(FIRST), **options) as first, load(str(LAST), **options) as last:
        assert sorted(new_masks().values()) == sorted([str(FIRST), str(LAST)])
        for _ in range(2):
            for engine, cpu in ((first, FIRST), (last, LAST)):
                computing.clear()
                engine.session().prefill(TOKENS)
                assert set(computing.values()) == {str(cpu)}


@pytest.mark.parametrize("policy", ["sequential", "in_order"])
def test_failed_run_leaves_no_thread_pinned(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self, inputs, outputs) -> None:
        assert os.sched_getaffinity(0) == {LAST}
        raise ValueError("no")

    monkeypatch.setattr(NativeExecutable, "run", fail)
    with load(str(LAST), threads=2, policy=policy) as engine, pytest.raises(BackendError, match="no"):
        engine.session().prefill(TOKENS)
    assert os.sched_getaffinity(0) == MASK


def test_failed_load_leaves_no_thread_pinned(monkeypatch: pytest.MonkeyPatch, new_masks: Masks) -> None:
    def fail(self, *_: object) -> None:
        assert os.sched_getaffinity(0) == {FIRST}
        raise ConfigError("no pool")

    monkeypatch.setattr(NativeBackend, "__init__", fail)
    with pytest.raises(ConfigError, match="no pool"):
        load(str(FIRST))
    assert new_masks() == {}


@pytest.mark.parametrize("policy", ["sequential", "in_order"])
def test_run_fails_when_its_cpus_are_removed(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if len(MASK) < 2:
        pytest.skip("this process has one CPU, which all of it is on already")

    def refuse(thread: int, cpus: object) -> None:
        if cpus != MASK:
            raise OSError(22, "Invalid argument")

    with load(str(LAST), threads=2, policy=policy) as engine:
        session = engine.session()
        with monkeypatch.context() as patch:
            patch.setattr(os, "sched_setaffinity", refuse)
            with pytest.raises(
                ConfigError, match=f"cannot run on CPUs {LAST}: Invalid argument; load the model with other CPUs"
            ):
                session.prefill(TOKENS)
        session.prefill(TOKENS)


def test_load_rejects_an_affinity_before_compiling(command, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    expect_one_line(
        command("run", GGUF, "-p", "hello", "--scheme", "float", "--affinity", "9999"),
        "CPU 9999 is not present; choose among",
        1,
    )
    assert not list(tmp_path.iterdir())


def test_command_line_respects_the_process_mask() -> None:
    if len(MASK) < 2:
        pytest.skip("this process has one CPU; its mask cannot be narrower")
    call = (sys.executable, "-m", "chunkrt", "run", str(GGUF), "-p", "hello", "--affinity", f"{FIRST},{LAST}")
    with running_on({FIRST}):
        finished = subprocess.run(call, capture_output=True, text=True)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert f"CPU {LAST} is outside this process's mask; choose among {FIRST}\n" in finished.stderr


def test_affinity_is_set_by_settings_file_and_flag(command, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f'affinity = "{LAST}"\n')
    assert read_settings(path) == {"affinity": str(LAST)}
    bench = ("bench", GGUF, "-p", "20", "-n", "0", "-r", "1", "-o", "json", "--settings", path)
    assert f'"affinity": "{LAST}"' in command(*bench).out
    assert '"affinity": "big"' in command(*bench, "--affinity", "big").out
    path.write_text('affinity = "4-2"\n')
    finished = command(*bench)
    assert finished.status == 1
    assert "settings.toml: affinity is '4-2', expected none, big" in finished.err


def test_doctor_lists_the_big_cores(command, machine) -> None:
    machine(capacity=[300, 300, 1024, 1024])
    assert "ok big cores CPUs 2-3 of 0-3" in _lines(command("doctor").out)
    machine(capacity=[1024] * 3)
    assert "ok big cores all CPUs alike, 0-2" in _lines(command("doctor").out)


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Set the simulated control groups of this process: the text of /proc/self/cgroup, and files by path."""

    def set_up(own: str, **files: str) -> None:
        root = tmp_path / "cgroup"
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "own").write_text(own)
        monkeypatch.setattr(affinity, "CGROUP_FOLDER", root)
        monkeypatch.setattr(affinity, "OWN_CGROUPS", tmp_path / "own")

    return set_up


V1 = "5:cpu,cpuacct:/docker/c0ffee\n1:name=systemd:/docker/c0ffee\n"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "400000 100000\n"}, 1),
        ("0::/host/path\n", {"cpu.max": "50000 100000\n"}, 0.5),
        (V1, {"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.5),
        (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        (
            V1,
            {
                "cpu,cpuacct/docker/c0ffee/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/docker/c0ffee/cpu.cfs_period_us": "25000",
            },
            2,
        ),
        ("0::/\n", {"cpu.max": "nonsense"}, None),
        ("", {}, None),
    ],
)
def test_cpu_quota_is_the_smallest_of_the_control_groups(
    own: str, files: dict[str, str], cores: float | None, cgroup: Callable[..., None]
) -> None:
    cgroup(own, **files)
    assert cpu_quota() == cores


@pytest.mark.parametrize(("quota", "cores"), [("200000", 2), ("150000", 2), ("10000", 1), ("900000", 8), ("max", 8)])
def test_available_cores_are_bounded_by_the_quota(quota: str, cores: int, cgroup: Callable[..., None]) -> None:
    cgroup("0::/", **{"cpu.max": f"{quota} 100000"})
    assert available_cores(range(8)) == cores


def test_quota_bounds_default_threads_but_not_explicit_threads(cgroup: Callable[..., None]) -> None:
    cgroup("0::/", **{"cpu.max": "100000 100000"})
    assert EngineOptions().num_threads == 1
    assert EngineOptions(threads=5).num_threads == 5
