"""Policies and batchers of a caller: objects in place of names, in engines, simulations and experiments."""

import json

import pytest
from fixture_checkpoints import checkpoint

import chunkrt
from chunkrt.errors import ConfigError
from chunkrt.runtime.batcher import BATCHERS
from chunkrt.runtime.policy import POLICIES
from chunkrt.simulate import find_device, find_shape, simulate

GGUF = checkpoint("llama_biased_gguf")
POINT = {
    "devices": ["sd8gen3"],
    "schemes": ["w8a16"],
    "prompt_lengths": [16],
    "chunk_lengths": [8],
    "workers": 1,
}


class LatestChunk:
    """Policy that runs the latest chunk first, and counts its choices."""

    name = "latest_chunk"
    is_concurrent = True

    def __init__(self):
        self.asked = 0

    def select(self, ready, schedule):
        self.asked += 1
        return max(ready, key=lambda task: (task.chunk, -task.subgraph))


class Alone:
    """Batcher that takes one token at a time of the first sequence."""

    name = "alone"

    def __init__(self):
        self.asked = 0

    def next_chunk(self, waiting, chunk_length):
        self.asked += 1
        return [(0, min(waiting[0].num_tokens, chunk_length))]


def test_engine_uses_the_policy_and_the_batcher_of_its_caller():
    policy, batcher, records = LatestChunk(), Alone(), []
    with chunkrt.load(GGUF, threads=2, chunk_length=4) as usual:
        expected = usual.generate(["a b c d e f", "c d"], max_new_tokens=3)
    with chunkrt.load(GGUF, threads=2, chunk_length=4, policy=policy, batcher=batcher) as engine:
        assert engine.generate(["a b c d e f", "c d"], max_new_tokens=3) == expected
        with engine.session() as session:
            session.on_run = records.append
            session.prefill(list(range(3, 19)))
    assert policy.asked > 0
    assert batcher.asked > 0
    assert records[0].pipeline.policy == "latest_chunk"


def test_simulation_and_experiment_take_policies_as_objects():
    policy = LatestChunk()
    simulation = simulate(
        find_shape("qwen2.5-0.5b").plan(),
        find_device("sd8gen3"),
        prompt_length=64,
        chunk_length=32,
        policy=policy,
        scheme="w8a16",
    )
    assert (simulation.policy, simulation.records[0].pipeline.policy) == ("latest_chunk", "latest_chunk")
    rows = chunkrt.experiment(GGUF, policies=["in_order", policy, POLICIES["look_ahead"]], **POINT)
    assert [row.policy for row in rows] == ["in_order", "latest_chunk", "look_ahead"]
    same = chunkrt.experiment(GGUF, policies=["look_ahead"], **POINT)
    assert rows[2].makespan_ms == same[0].makespan_ms


def test_rows_of_a_policy_are_kept_until_its_attributes_change(tmp_path):
    output = tmp_path / "rows.jsonl"
    policy = LatestChunk()
    for asked, expected in ((0, 1), (0, 1), (7, 2)):
        policy.asked = asked
        chunkrt.experiment(GGUF, policies=[policy], output=output, **POINT)
        assert len(output.read_text().splitlines()) == 1 + expected


def test_experiment_names_devices_and_schemes_as_the_caller_did(tmp_path):
    grid = POINT | {"devices": ["SM8650", "sd8gen3", find_device("sd8elite")]}
    rows = chunkrt.experiment(GGUF, policies=["in_order"], output=tmp_path / "rows.jsonl", **grid)
    assert [row.device for row in rows] == ["SM8650", "sd8gen3", "Snapdragon 8 Elite"]
    assert [row.scheme for row in rows] == ["w8a16"] * 3
    again = chunkrt.experiment(GGUF, policies=["in_order"], output=tmp_path / "rows.jsonl", **grid)
    assert again == rows
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])["format"] == 3


class Nameless:
    """Object without a name."""


class Impostor(LatestChunk):
    """Policy with the name of another one."""

    name = "in_order"


class Idle:
    """Object with a name that chooses nothing."""

    name = "idle"


@pytest.mark.parametrize("wrong", [3, None, Nameless(), LatestChunk, Impostor(), Idle(), BATCHERS["packed"]])
def test_objects_that_are_no_policies_are_refused(wrong):
    with pytest.raises(ConfigError, match="polic"):
        chunkrt.experiment(GGUF, policies=[wrong], **POINT)
    with pytest.raises(ConfigError, match="polic"):
        chunkrt.load(GGUF, policy=wrong)


def test_two_policies_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two of them are named 'latest_chunk'"):
        chunkrt.experiment(GGUF, policies=[LatestChunk(), LatestChunk()], **POINT)
