"""Plans with fewer subgraphs: those of one processor are fused, and keep their inputs and outputs."""

import pytest
from fixture_checkpoints import checkpoint

from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.graph.plan import ALONE, Plan, Ranks
from chunkrt.graph.rewrites import merged_on_cpu

NAMES = ("llama_gqa", "gemma3_window_5", "qwen3_next", "qwen3_next_experts")


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_one_subgraph_and_the_head_another(name: str) -> None:
    plan = plan_checkpoint(checkpoint(name), {}).plan
    merged = merged_on_cpu(plan)
    assert [(s.device, s.rows) for s in merged.subgraphs] == [("cpu", "T"), ("cpu", "R")]
    layers, head = merged.subgraphs
    assert set(layers.inputs) == {n for s in plan.subgraphs if s.rows == "T" for n in s.inputs} & set(plan.inputs)
    assert set(layers.outputs) == set(head.inputs) - set(plan.inputs)
    assert head.outputs == (plan.output,)


@pytest.mark.parametrize(("name", "ranks"), [*((name, ALONE) for name in NAMES), ("llama_gqa", Ranks(0, 2))])
def test_nodes_weights_and_state_are_those_of_the_plan(name: str, ranks: Ranks) -> None:
    plan = plan_checkpoint(checkpoint(name), {}, ranks=ranks).plan
    merged = merged_on_cpu(plan)
    assert Plan.from_json(merged.to_json()) == merged  # checks that every name exists before it is read
    assert [n for s in merged.subgraphs for n in s.nodes] == [n for s in plan.subgraphs for n in s.nodes]
    assert {n for s in merged.subgraphs for n in s.weights} == {n for s in plan.subgraphs for n in s.weights}
    assert merged.state_tensors == plan.state_tensors


def test_sums_over_ranks_keep_their_place() -> None:
    plan = plan_checkpoint(checkpoint("llama_gqa"), {}, ranks=Ranks(0, 2)).plan
    merged = merged_on_cpu(plan)
    sums = [s for s in plan.subgraphs if s.device == "link"]
    assert [s for s in merged.subgraphs if s.device == "link"] == sums
    assert [s.device for s in merged.subgraphs] == [*(("cpu", "link") * len(sums)), "cpu", "cpu"]
