"""Operations and bytes of operators other than linears and plain attention, counted again by hand."""

from dataclasses import replace

import pytest

from chunkrt.engine_directory.figures import attention_figures, subgraph_figures, weight_bytes
from chunkrt.graph.operators import attended_pairs
from chunkrt.graph.plan import Node
from chunkrt.quant.scheme import SCHEMES
from chunkrt.runtime.costs import Costs
from chunkrt.runtime.tasks import Task
from chunkrt.simulate import find_device
from chunkrt.simulate.profile import OperatorCost
from chunkrt.simulate.work import ChunkWork, ModelledWork
from chunkrt.testing.random_decoders import HYBRID_CONFIG, hybrid, random_decoder

WINDOW, HIDDEN, INNER, EXPERTS, TOP = 7, 36, 22, 5, 2
ATTENDED = 4 * 10  # heads, head_dim
SHORT_CONV = 2 * HIDDEN * 3
DELTA_RULE = 2 * (2 * 2 * 6 + 4 * 10) * 4 + 7 * 4 * 6 * 10
PICKED = 2 * TOP * (HIDDEN * 2 * INNER + INNER * HIDDEN)
OPERATIONS = {"short_conv": SHORT_CONV, "gated_delta_rule": DELTA_RULE, "RoutedExperts": PICKED}
PLAN = random_decoder([], HYBRID_CONFIG, hybrid).plan


def find(kind):
    """Return the plan with only the subgraph and node that has the operator, or the attn_type; and the node."""
    for subgraph in PLAN.subgraphs:
        for node in subgraph.nodes:
            if kind in (node.op, node.attributes.get("attn_type")):
                return replace(PLAN, subgraphs=(replace(subgraph, nodes=(node,)),)), node
    raise AssertionError(kind)


@pytest.mark.parametrize("window", [0, 1, 7, 8, 100])
def test_pairs_equal_those_of_the_mask(window):
    for position in (0, 1, 5, 6, 7, 30):
        for num_tokens in (1, 2, 8):
            rows = range(position, position + num_tokens)
            expected = sum(1 for row in rows for p in range(row + 1) if not window or p > row - window)
            assert attended_pairs(position, num_tokens, window) == expected


def test_rows_cost_their_own_experts_and_states():
    for kind, operations in OPERATIONS.items():
        plan, _ = find(kind)
        assert Costs(plan).flops([8, 3], [0, 1], position=10).tolist() == [[8 * operations, 3 * operations]]


def test_attention_over_a_window_costs_the_pairs_within_it():
    plan, _ = find("CachedAttention")
    flops = Costs(plan).flops([8, 8, 3], [0, 0, 1], position=0)
    pairs = [sum(min(t + 1, WINDOW) for t in range(*span)) for span in ((0, 8), (8, 16), (16, 19))]
    assert flops.tolist() == [[4 * ATTENDED * count for count in pairs]]


def unlike(node: Node, **attributes):
    return replace(node, attributes={**node.attributes, **attributes})


def test_layers_of_both_kinds_count_their_own_pairs():
    plan, node = find("CachedAttention")
    (subgraph,) = plan.subgraphs
    both = replace(subgraph, nodes=(unlike(node, window=0), node))
    flops = Costs(replace(plan, subgraphs=(both,))).flops([4], [0], position=20)
    assert flops.tolist() == [[4 * ATTENDED * (sum(range(21, 25)) + 4 * WINDOW)]]
    assert (both.window, subgraph.window) == (0, WINDOW)


def modelled(kind, scheme, chunk, *, gops=1.0, gb_per_s=1e9):
    """Return an operator's work on a CPU on which everything else takes no time."""
    plan, _ = find(kind)
    device = find_device("sd8gen3")
    cost = OperatorCost(fixed_us=0.0, gb_per_s=gb_per_s, gops=gops)
    cpu = replace(device.processor_cost("cpu"), task_us=0.0, operators=dict.fromkeys(device.cpu.operators, cost))
    (subgraph,) = plan.subgraphs
    alone = replace(plan, subgraphs=(replace(subgraph, device="cpu", inputs=(), outputs=()),))
    work = ModelledWork(alone, SCHEMES[scheme], replace(device, cpu=cpu), chunk_length=8, chunks=[chunk])
    return work(Task(0, 0))


def test_simulator_uses_the_same_operations():
    chunk = ChunkWork(num_tokens=8, num_rows=0, position=16)
    for kind, operations in OPERATIONS.items():
        assert modelled(kind, "w8a8-dynamic", chunk).ns == 8 * operations
    assert modelled("CachedAttention", "w8a8-dynamic", chunk).ns == 8 * WINDOW * 4 * ATTENDED


@pytest.mark.parametrize("scheme", ["float", "w8a8-dynamic"])
def test_simulator_reads_the_picked_experts(scheme):
    _, node = find("RoutedExperts")
    stored = weight_bytes(PLAN, SCHEMES[scheme])
    all_bytes = sum(stored[name] for name in node.inputs[2:])
    if scheme == "float":
        assert all_bytes == 4 * EXPERTS * (HIDDEN * 2 * INNER + INNER * HIDDEN)
    else:
        assert all_bytes == EXPERTS * (3 * 16 * 36 + 3 * 16 * 24 + 4 * (2 * INNER + HIDDEN))
    for rows, share in ((1, TOP / EXPERTS), (2, 1 - 0.6**2), (8, 1 - 0.6**8)):
        work = modelled(
            "RoutedExperts", scheme, ChunkWork(num_tokens=rows, num_rows=0, position=0), gops=1e9, gb_per_s=1.0
        )
        assert work.num_bytes == pytest.approx(share * all_bytes)
        assert work.ns == round(share * all_bytes)


def test_simulator_reads_and_writes_states_and_reads_the_slots_of_a_ring():
    chunk = ChunkWork(num_tokens=8, num_rows=0, position=200)
    conv, recurrent = 64 * 3, 4 * 6 * 10
    assert modelled("gated_delta_rule", "float", chunk).num_bytes == 2 * 4 * (conv + recurrent)
    assert modelled("short_conv", "float", chunk).num_bytes == 2 * 4 * HIDDEN * 2
    assert modelled("CachedAttention", "float", chunk).num_bytes == 2 * 2 * (2 * 64 * 10)


def test_figures_of_a_prompt_omit_positions_outside_windows():
    found = attention_figures(PLAN, chunk_length=8, prompt_length=20)
    assert found.chunked_flops == 4 * ATTENDED * (8 * 8 + 8 * (16 - 2) + 4 * (20 - 10))
    assert found.unchunked_flops == 4 * ATTENDED * 20**2


def test_figures_of_linears_count_the_picked_experts():
    plan, _ = find("RoutedExperts")
    (figures,) = subgraph_figures(plan, SCHEMES["float"], chunk_length=8)
    assert figures.linear_flops == 8 * PICKED


@pytest.mark.parametrize("kind", ["short_conv", "gated_delta_rule"])
def test_figures_of_linears_count_linear_attention(kind):
    plan, _ = find(kind)
    (figures,) = subgraph_figures(plan, SCHEMES["float"], chunk_length=8)
    assert figures.linear_flops == 8 * OPERATIONS[kind]


def test_figures_of_linears_omit_attention_that_depends_on_the_position():
    plan, _ = find("CachedAttention")
    (figures,) = subgraph_figures(plan, SCHEMES["float"], chunk_length=8)
    assert figures.linear_flops == 0
