"""Rewritten plans: fused subgraphs keep their inputs and outputs, and attention adds biases of keys."""

from pathlib import Path

import pytest
from fixture_checkpoints import checkpoint

from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import ModelError
from chunkrt.graph.ops import trace
from chunkrt.graph.partition import cut_shadowed, partition
from chunkrt.graph.plan import ALONE, ATTENTION_OPS, Plan, Ranks
from chunkrt.graph.rewrites import has_key_biases, merged_on_cpu, without_key_biases
from chunkrt.runtime.state import State

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
    assert [s.device for s in merged.subgraphs] == [*(("cpu", "link") * (len(sums) - 1)), "cpu", "cpu", "link"]


EXPORTS = Path(__file__).parents[1] / "data" / "onnx"
BIASED = ["gpt_oss", "qwen2", "qwen2_gguf", "qwen2_window", "llama_biased", "genai_qwen2_int4", "optimum_qwen2_fp32"]
OTHERS = ["llama_gqa", "qwen3", "gemma3_window_5", "lfm2_biased", "qwen3_next", "phi3_gguf", "genai_qwen3_fp32"]


def plan_of(name: str) -> Plan:
    path = EXPORTS / name if (EXPORTS / name).exists() else checkpoint(name)
    return plan_checkpoint(path, {}).plan


def biases(plan: Plan) -> list[str]:
    return [node.inputs[8] for s in plan.subgraphs for node in s.nodes if node.op == "RawKeyAttention"]


def sinks(plan: Plan) -> list[str]:
    attention = [node for s in plan.subgraphs for node in s.nodes if node.op in ATTENTION_OPS]
    return ["".join(node.inputs[7:8]) for node in attention]


@pytest.mark.parametrize("name", BIASED)
def test_attention_gets_the_bias_of_its_keys(name: str) -> None:
    plan = plan_of(name)
    found = without_key_biases(plan)
    assert found.key_form == 2
    assert found.has_raw_keys
    layers = sum(node.op == "CachedAttention" for s in plan.subgraphs for node in s.nodes)
    assert sinks(found) == sinks(plan)
    assert biases(found) == [f"model.layers.{index}.self_attn.qkv_proj.bias" for index in range(layers)]
    assert Plan.from_json(found.to_json()) == found
    assert without_key_biases(plan.with_raw_keys()) == found


@pytest.mark.parametrize("name", OTHERS)
def test_decoders_without_a_key_bias_or_with_a_norm_after_it_are_unchanged(name: str) -> None:
    plan = plan_of(name)
    assert without_key_biases(plan) == plan
    assert plan.key_form == 0


def test_bias_is_found_with_a_shadow() -> None:
    planned = plan_checkpoint(checkpoint("qwen2"), {})
    graph = trace(planned.decoder)
    cut_shadowed(graph, lambda name: "qkv" in name)
    plan = partition(graph, family="qwen2")
    assert any(node.op == "ShadowLinear" for s in plan.subgraphs for node in s.nodes)
    assert biases(without_key_biases(plan)) == biases(without_key_biases(planned.plan))


def test_states_with_and_without_biases_are_incompatible(tmp_path: Path) -> None:
    plan = plan_of("qwen2").with_raw_keys()
    State(plan, 8, "int8").save(tmp_path / "with")
    with pytest.raises(
        ModelError, match="its keys were not cached before RoPE and without their biases, unlike those of"
    ):
        State(without_key_biases(plan), 8, "int8").load(tmp_path / "with")


@pytest.mark.parametrize("name", [*BIASED, "glm4_moe_lite", "glm4_moe", "olmo2", "lfm3_bare"])
def test_biases_of_keys_are_found_also_behind_latents_and_norms(name: str) -> None:
    assert has_key_biases(plan_of(name))


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3", "deepseek_v2", "deepseek_v3", "minicpm3", "youtu", "gemma4"])
def test_weights_outside_of_attention_are_no_biases_of_keys(name: str) -> None:
    assert not has_key_biases(plan_of(name))
