"""One rank of several, simulated: cost of sums and their hidden part, against numbers worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from fake_backend import CONTEXT, VOCABULARY, WIDTH, make_schedule, subgraph, value
from fixture_checkpoints import checkpoint
from measured_profiles import toy_profile
from small_shape import SMALL_SHAPE
from trace_checker import CheckedTrace
from virtual_record import make_record

from chunkrt.cli import cli
from chunkrt.compile.compiler import compile_checkpoint
from chunkrt.errors import ConfigError
from chunkrt.graph.operators import node_flops
from chunkrt.graph.plan import ATTENTION_OPS, Plan, Ranks, Tensor
from chunkrt.quant.scheme import Recipe, find_scheme
from chunkrt.runtime.ranks.messages import exchange_of
from chunkrt.runtime.ranks.mpi import MpiCommunicator
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.tasks import Processor, Task, TaskEvent, with_link
from chunkrt.runtime.trace.file import read_trace, write_trace
from chunkrt.runtime.trace.idle import where_time_went
from chunkrt.runtime.trace.timeline.picture import make_picture
from chunkrt.runtime.trace.utilisation import link_time
from chunkrt.runtime.virtual_clock import run_on_virtual_clock
from chunkrt.simulate import LINKS, DeviceProfile, LinkProfile, find_device, find_link, simulate
from chunkrt.simulate.experiments import plans_of
from chunkrt.simulate.link_profile import read_link
from chunkrt.simulate.speeds import link_speeds
from chunkrt.simulate.work import Work

SHAPE = replace(SMALL_SHAPE, num_heads=8, num_kv_heads=4, head_dim=8)
"""4 ranks divide its heads and its feed-forward."""

LINK = find_link("gb_per_s=1,latency_us=10")
SCHEME = "w8a8-dynamic"


def share(rank: int, size: int) -> Plan:
    return SHAPE.plan(ranks=Ranks(rank, size))


@pytest.fixture(scope="module")
def device() -> DeviceProfile:
    found = find_device("sd8gen3")
    assert isinstance(found, DeviceProfile)
    return found


@pytest.mark.parametrize(
    ("num_bytes", "size", "steps", "sent_bytes"),
    [
        (1_000_000, 2, 1, 1_000_000),  # both send everything
        (8_192, 4, 1, 3 * 8_192),  # 16 KiB more than in parts
        (8_196, 4, 2, 12_294),  # two steps, in each three quarters
        (1_000_000, 4, 2, 1_500_000),
        (900, 3, 1, 1_800),
    ],
)
def test_sum_sends_the_bytes_of_its_exchange(num_bytes: int, size: int, steps: int, sent_bytes: float) -> None:
    assert exchange_of(num_bytes, size) == (steps, sent_bytes)
    assert LINK.sum_us(num_bytes, size) == pytest.approx(10 * steps + sent_bytes / 1000)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("numbers", [12, 12 * 1024])
def test_the_communicator_sends_as_much(size: int, numbers: int) -> None:
    class Counted(MpiCommunicator):
        """Rank 0 without the others, whose messages are zeros."""

        def __init__(self) -> None:
            self.rank, self.size, self._run = 0, size, 0
            self.others = list(range(1, size))
            self.sent_bytes = self.steps = 0

        def send(self, envelope, payload=b"", *, to=None):
            self.sent_bytes += payload.nbytes * len(self.others if to is None else to)
            self.part_bytes = payload.nbytes

        def take(self, envelope, sources):
            self.steps += 1
            return {source: memoryview(bytes(self.part_bytes)) for source in sources}

    communicator = Counted()
    communicator.all_reduce(np.ones(numbers, np.float32), np.empty(numbers, np.float32), key=(0, 0))
    assert exchange_of(4 * numbers, size) == (communicator.steps, communicator.sent_bytes)


def test_one_chunk_waits_for_every_sum(device: DeviceProfile) -> None:
    options = {"prompt_length": 32, "chunk_length": 32, "policy": "in_order", "scheme": SCHEME, "ranks": 2}
    free = simulate(share(0, 2), device, link=find_link("gb_per_s=1e9,latency_us=0"), **options)
    found = simulate(share(0, 2), device, link=LINK, **options)
    sum_bytes = 32 * SHAPE.hidden_size * 4
    num_sums = 1 + 2 * SHAPE.num_layers
    logit_bytes = SHAPE.vocab_size // 2 * 4
    sums_us = num_sums * (10 + sum_bytes / 1000) + 10 + logit_bytes / 1000
    assert found.makespan_ms - free.makespan_ms == pytest.approx(sums_us / 1000, abs=1e-5)
    assert found.link is not None
    assert found.link.sent_bytes == num_sums * sum_bytes + logit_bytes
    assert found.link.busy_ms == pytest.approx(sums_us / 1000, abs=1e-5)
    assert found.link.busy == pytest.approx(found.link.busy_ms / found.makespan_ms)
    assert found.link.hidden == 0
    of_logits = (10 + logit_bytes / 1000) / 1000 / found.makespan_ms  # after the CPU's last task
    assert found.processors["cpu"].idle["sums"] == pytest.approx(found.link.busy - of_logits, abs=1e-6)
    assert set(found.processors) == {"cpu"}
    assert found.energy_joules is None
    assert found.npu_busy == found.overlap == 0


def make_plan() -> Plan:
    """embedding, link.0, dynamic.0, head: a sum before attention."""
    parts = (
        subgraph("embedding", "cpu", ["input_ids"], ["partial"]),
        subgraph("link.0", "link", ["partial", "position"], ["sum"]),
        subgraph("dynamic.0", "cpu", ["sum", "position"], ["attention"], state=["cache.0"]),
        subgraph("head", "cpu", ["attention", "logit_rows"], ["logits"], rows="R"),
    )
    tensors = [
        Tensor(name="input_ids", dtype="int64", shape=("T",)),
        Tensor(name="position", dtype="int64", shape=(1,)),
        Tensor(name="logit_rows", dtype="int64", shape=("R",)),
        Tensor(name="logits", dtype="float32", shape=("R", VOCABULARY)),
        *map(value, ("partial", "sum", "attention")),
        Tensor(name="cache.0", dtype="float32", shape=(1, "P", WIDTH - 1), kind="state"),
    ]
    return Plan(
        family="toy",
        subgraphs=parts,
        tensors={tensor.name: tensor for tensor in tensors},
        inputs=("input_ids", "position", "logit_rows"),
        output="logits",
        vocab_size=VOCABULARY,
        context_length=CONTEXT,
    )


PLAN, DURATIONS = make_plan(), (10, 30, 20, 5)


def two_chunks(run: Callable[[Schedule], list[TaskEvent]]) -> RunRecord:
    cpu = Processor(name="cpu", devices=frozenset(("npu", "cpu")), workers=1)
    processors = with_link([cpu], PLAN, 2)
    schedule = make_schedule(PLAN, 2, in_flight=2, processors=processors)
    return make_record(run(schedule), processors, PLAN, num_tokens=8, slots=2, chunk_length=4)


def spans(record: RunRecord) -> dict[Task, tuple[int, int]]:
    return {event.task: (event.start_ns, event.end_ns) for event in record.events}


@pytest.fixture(scope="module")
def record() -> RunRecord:
    return two_chunks(lambda schedule: run_on_virtual_clock(schedule, lambda task: DURATIONS[task.subgraph]))


def test_second_chunk_hides_sums(record: RunRecord) -> None:
    assert spans(record) == {
        Task(0, 0): (0, 10),
        Task(0, 1): (10, 20),
        Task(1, 0): (10, 40),
        Task(1, 1): (20, 50),
        Task(2, 0): (40, 60),
        Task(2, 1): (60, 80),
        Task(3, 1): (80, 85),
    }
    found = link_time([record])
    assert found is not None
    # sums from 10 to 50; in parallel the embedding of chunk 1 until 20, and attention of chunk 0 from 40
    assert found == {"busy_ns": 40, "hidden_ns": 20, "num_sums": 2, "hidden": 0.5}
    (cpu,) = (time for time in where_time_went([record]) if time.name == "cpu")
    assert cpu.idle_ns == {"sums": 20}


def test_sums_that_share_a_link_take_twice_as_long() -> None:
    def work(task: Task) -> Work:
        ns = DURATIONS[task.subgraph]
        return Work(ns, 0.0, float(ns) if task.subgraph == 1 else 0.0)

    record = two_chunks(
        lambda schedule: run_on_virtual_clock(schedule, lambda task: work(task).ns, link_speeds(1.0, work))
    )
    # alone until 20; half of the link each until 60; the second one's last third alone
    assert {task: span for task, span in spans(record).items() if task.subgraph == 1} == {
        Task(1, 0): (10, 60),
        Task(1, 1): (20, 70),
    }
    found = link_time([record])
    assert found is not None
    assert (found["busy_ns"], found["hidden_ns"]) == (60, 20)


def test_a_run_without_ranks_has_no_link_time(record: RunRecord) -> None:
    stages = tuple(stage._replace(device="cpu") for stage in record.pipeline.stages)
    assert link_time([replace(record, pipeline=replace(record.pipeline, stages=stages))]) is None


def test_traces_and_pictures_show_the_link(record: RunRecord, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [record], "toy")
    assert "LINK worker 1" in CheckedTrace(path).slices
    (read,) = read_trace(path)
    assert spans(read) == spans(record)
    told = CliRunner().invoke(cli, ["trace", str(path)], catch_exceptions=False).output
    rows = {line[:36].strip(): line[36:].split() for line in told.splitlines()}
    assert told.splitlines()[1].split() == ["cpu", "link"]
    assert rows["busy"] == ["76.5", "%", "47.1", "%"]
    assert rows["sums, hidden by other work"] == rows["sums, not hidden"] == ["-", "23.5", "%"]
    assert rows["idle: waiting for other ranks"] == ["23.5", "%", "-"]
    assert rows["idle: no sum in progress"] == ["-", "52.9", "%"]
    assert "2 sums over ranks were in progress for 0.0 ms; other work hid 50.0% of that" in told
    as_json = CliRunner().invoke(cli, ["trace", str(path), "--json"], catch_exceptions=False).output
    assert json.loads(as_json)["groups"][0]["link"] == {"busy_ns": 40, "hidden_ns": 20, "num_sums": 2, "hidden": 0.5}
    picture = make_picture(record)
    assert [name for name, _ in picture.workers] == ["CPU worker 0", "LINK"]
    assert [(bar.lane, bar.lanes) for bar in picture.workers[1][1]] == [(0, 2), (1, 2)]
    assert [bar.kind for bar in picture.shares[-1][1]] == ["sums", "bare sums"]
    assert picture.shares[-1][1][-1].end == pytest.approx(100 * 40 / 85)


def operations(plan: Plan) -> tuple[int, int]:
    """Operations of all linears except the LM head, which every rank has, for a token; and of attention, for a pair."""
    nodes = [node for part in plan.subgraphs for node in part.nodes]
    linears = [n for n in nodes if n.op == "MatMul" and n.inputs[1] != "lm_head.weight"]
    attention = [n for n in nodes if n.op in ATTENTION_OPS]
    assert linears
    assert attention
    return sum(node_flops(n, plan) for n in linears), sum(node_flops(n, plan) for n in attention)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_do_the_work_of_one(size: int) -> None:
    parts = [operations(share(rank, size)) for rank in range(size)]
    assert tuple(map(sum, zip(*parts, strict=True))) == operations(SHAPE.plan())


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_rank_has_the_same_subgraphs(size: int) -> None:
    shape = replace(SMALL_SHAPE, intermediate_size=96)  # 4 heads and 2 KV heads: padded where necessary
    first, *others = (shape.plan(ranks=Ranks(rank, size)) for rank in range(size))
    for rank, other in enumerate(others, 1):  # the embedding names the first of the rank's rows
        num_rows = first.tensors["model.embed_tokens.weight"].shape[0]
        assert other.to_json().replace(f'"first": {rank * num_rows}', '"first": 0') == first.to_json()


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_a_link_without_end_ranks_gain_up_to_their_number(device: DeviceProfile, ranks: int) -> None:
    # so that the start of tasks is negligible
    shape = replace(SHAPE, hidden_size=1024, intermediate_size=4096, head_dim=128)
    free = find_link("gb_per_s=1e9,latency_us=0")
    options = {"prompt_length": 256, "chunk_length": 32, "policy": "in_order", "scheme": SCHEME}
    alone = simulate(shape.plan().on_cpu(), device, **options)
    found = simulate(shape.plan(ranks=Ranks(0, ranks)), device, ranks=ranks, link=free, **options)
    assert alone.makespan_ms / ranks < found.makespan_ms < 1.2 * alone.makespan_ms / ranks
    assert found.cpu_busy == pytest.approx(1.0)
    assert found.peak_memory_bytes < alone.peak_memory_bytes


@pytest.mark.parametrize("name", LINKS)
def test_every_link_has_sources(name: str) -> None:
    link = find_link(name)
    assert set(link.sources) == {"nominal_gbit_per_s", "gb_per_s", "latency_us"}
    assert 8 * link.gb_per_s < link.nominal_gbit_per_s
    assert not link.sources["gb_per_s"].is_guess


def test_a_link_from_a_file_and_from_numbers(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        'name = "own"\nnominal_gbit_per_s = { value = 2.5, source = "x" }\n'
        'gb_per_s = { value = 0.29, source = "iperf3" }\nlatency_us = { value = 50, source = "ping", guess = true }\n'
    )
    link = find_link(str(path))
    assert (link.name, link.gb_per_s, link.latency_us) == ("own", 0.29, 50)
    assert isinstance(find_link("latency_us=50, gb_per_s=1.25"), LinkProfile)
    path.write_text(path.read_text().replace("0.29", "0"))
    with pytest.raises(ConfigError, match="gb_per_s is 0, expected a speed above 0"):
        read_link(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1gbe", r"unknown link '1gbe'; did you mean '1GbE'\?"),
        ("gb_per_s=1.25", "lacks latency_us; write both numbers, as in gb_per_s=1.25,latency_us=50"),
        ("gb_per_s=1.25,latency=50", "unknown number of a link 'latency'"),
        ("gb_per_s=0,latency_us=50", "has gb_per_s '0', expected a number above 0"),
        ("gb_per_s=1,latency_us=-1", "has latency_us '-1', expected a number of at least 0"),
        ("gb_per_s=nan,latency_us=1", "has gb_per_s 'nan', expected a number above 0"),
        ("gb_per_s=1,gb_per_s=2,latency_us=1", "gives gb_per_s twice"),
        ("nowhere.toml", "cannot read nowhere.toml"),
    ],
)
def test_malformed_links_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_link(text)


@pytest.mark.parametrize(
    ("plan", "ranks", "link", "message"),
    [
        (share(0, 2), 2, None, "2 ranks need a link; choose one"),
        (SHAPE.plan(), 1, LINK, "a link needs several ranks, found 1"),
        (share(0, 2), 1, None, "the plan is one rank's share of a decoder"),
        (SHAPE.plan(), 2, LINK, "that of a complete decoder, expected the share of one of 2 ranks"),
        (SHAPE.plan(), 0, None, "0 ranks, expected 1 to 1024"),
    ],
)
def test_inconsistent_ranks_links_and_plans_are_refused(
    device: DeviceProfile, plan: Plan, ranks: int, link: LinkProfile | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(
            plan,
            device,
            prompt_length=32,
            chunk_length=32,
            policy="in_order",
            scheme=SCHEME,
            ranks=ranks,
            link=link,
        )


def test_static_schemes_and_measured_profiles_are_refused(device: DeviceProfile) -> None:
    options = {"prompt_length": 32, "chunk_length": 32, "policy": "in_order", "ranks": 2, "link": LINK}
    with pytest.raises(ConfigError, match="'w8a16' is static, and the simulation of 2 ranks has no NPU"):
        simulate(share(0, 2), device, scheme="w8a16", **options)
    measured = replace(toy_profile(SHAPE.plan()), scheme=SCHEME)
    with pytest.raises(ConfigError, match="toy was measured on a complete decoder"):
        simulate(share(0, 2), measured, scheme=SCHEME, **options)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli, ["simulate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_command_reports_ranks() -> None:
    arguments = ("qwen2.5-0.5b", "--device", "sd8gen3", "-p", 64, "--chunk", 32, "--policy", "in_order")
    text = run(*arguments, "--ranks", 4, "--link", "1GbE")
    assert "on 4 x Snapdragon 8 Gen 3, CPU alone, scheme w8a8-dynamic, joined by 1 Gbit/s Ethernet (0.1176 GB/s" in text
    assert "One rank is simulated; all have equal shares." in text
    (row,) = json.loads(run(*arguments, "--ranks", 4, "--link", "1GbE", "--json"))
    (alone,) = json.loads(run(*arguments, "--ranks", 1, "--scheme", SCHEME, "--json"))
    assert alone["link"] is None
    assert "speed_up" not in alone
    assert row["link"]["ranks"] == 4
    assert 0 < row["link"]["hidden"] < 1
    assert row["link"]["busy"] <= 1
    assert row["speed_up"] > 0
    assert f"{row['speed_up']:.2f}x" in text
    assert f"{row['link']['hidden']:.1%}" in text


@pytest.fixture(scope="module")
def one_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "engine"
    recipe = Recipe(scheme=find_scheme(SCHEME))
    compile_checkpoint(checkpoint("llama_biased_gguf"), recipe, {}, folder, model="tiny", ranks=Ranks(0, 2))
    return folder


def test_an_engine_directory_of_one_rank(one_of_two: Path) -> None:
    arguments = (one_of_two, "--device", "sd8gen3", "-p", 32, "--chunk", 16, "--ranks", 2, "--link", "USB4", "--json")
    for row in json.loads(run(*arguments)):
        assert row["speed_up"] is None
        assert row["link"]["sent_bytes"] > 0


def test_grids_are_of_whole_decoders(one_of_two: Path) -> None:
    with pytest.raises(ConfigError, match="is for rank 0 of 2, and grids take complete decoders"):
        plans_of(one_of_two, [{}], lambda what, done, total: None)
