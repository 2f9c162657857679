"""Costs of a plan, counted independently."""

import pytest

from chunkrt.engine.npu_attention import near_plans
from chunkrt.engine.options import EngineOptions
from chunkrt.engine_directory.figures import attention_figures, subgraph_figures, weight_bytes
from chunkrt.quant.scheme import SCHEMES
from chunkrt.simulate import find_shape
from chunkrt.testing.random_decoders import random_decoder

DECODER = random_decoder(list(SCHEMES.values()))
HIDDEN, INNER, VOCABULARY, QKV, ATTENDED = 36, 52, 61, 80, 40
STATIC_1 = HIDDEN * ATTENDED + HIDDEN * 2 * INNER + INNER * HIDDEN + HIDDEN * QKV


def figures(scheme, chunk_length=8):
    return {f.name: f for f in subgraph_figures(DECODER.plan, DECODER.schemes[scheme], chunk_length=chunk_length)}


def test_linear_flops_are_two_a_weight_and_row():
    found = figures("float", 8)
    assert found["static.0"].linear_flops == 2 * 8 * HIDDEN * QKV
    assert found["static.1"].linear_flops == 2 * 8 * STATIC_1
    assert found["head"].linear_flops == 2 * HIDDEN * VOCABULARY
    assert found["dynamic.0"].linear_flops == found["embedding"].linear_flops == 0


def test_bytes_that_cross_are_those_of_values_between_devices():
    found = figures("float", 8)
    row = 8 * 4
    assert found["embedding"].crossing_bytes == row * HIDDEN
    assert found["static.0"].crossing_bytes == row * (HIDDEN + QKV)
    assert found["dynamic.0"].crossing_bytes == row * (QKV + ATTENDED)
    assert found["static.1"].crossing_bytes == row * (ATTENDED + HIDDEN + QKV)
    assert found["static.2"].crossing_bytes == row * (ATTENDED + HIDDEN)
    assert found["head"].crossing_bytes == row * HIDDEN


def test_an_npu_converts_all_that_it_takes_and_gives():
    found = figures("w8a16", 8)
    row = 8 * 2  # float16
    assert {name: f.converted_bytes for name, f in found.items() if f.converted_bytes} == {
        "static.0": row * (HIDDEN + QKV),
        "static.1": row * (HIDDEN + ATTENDED + HIDDEN + QKV),  # the residual stream passes from NPU to NPU
        "static.2": row * (HIDDEN + ATTENDED + HIDDEN),
    }
    assert not any(
        f.converted_bytes for scheme in ("float", "w8a8-dynamic", "w4a8-dynamic") for f in figures(scheme).values()
    )


def test_bytes_of_weights_under_static_schemes():
    columns = HIDDEN, 2 * INNER, HIDDEN, QKV  # input edges of o_proj, gate_up_proj, down_proj, the next qkv_proj
    depths = ATTENDED, HIDDEN, INNER, HIDDEN
    packed = sum(-(-n // 16) * 16 * -(-k // 4) * 4 for k, n in zip(depths, columns, strict=True))
    norms_and_biases = 4 * (2 * HIDDEN + HIDDEN + QKV)  # o_proj and qkv_proj have biases
    beside = 4 * sum(columns) + norms_and_biases
    found = {scheme: figures(scheme)["static.1"].weight_bytes for scheme in ("w8a16", "w8a8", "w4a16")}
    assert found["w8a16"] == packed + beside + 4 * (4 + 3 + HIDDEN)
    assert found["w8a8"] == packed + beside + 4 * (4 + sum(columns))
    blocks = sum(-(-n // 16) * 16 * -(-k // 32) for k, n in zip(depths, columns, strict=True))
    assert found["w4a16"] == found["w8a16"] - packed + 17 * blocks  # 32 integers of 4 bits, and a multiplier


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_of_weights_are_those_of_the_store(scheme):
    stored = weight_bytes(DECODER.plan, DECODER.schemes[scheme])
    assert sum(stored.values()) == DECODER.weights[scheme].num_bytes
    assert sum(f.weight_bytes for f in figures(scheme).values()) == sum(stored.values())


def test_attention_in_chunks_costs_about_half():
    heads, head_dim, layers = 4, 10, 2
    for length, chunk in ((64, 8), (30, 8), (5, 8), (17, 1)):
        pairs = 0
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            pairs += (end - start) * end
        found = attention_figures(DECODER.plan, chunk_length=chunk, prompt_length=length)
        assert found.chunked_flops == 4 * heads * head_dim * layers * pairs
        assert found.unchunked_flops == 4 * heads * head_dim * layers * length**2
    ratio = attention_figures(DECODER.plan, chunk_length=8, prompt_length=64)
    assert ratio.chunked_flops / ratio.unchunked_flops == (1 + 8 / 64) / 2


def test_state_and_kinds_are_those_of_the_plan():
    found = figures("float")
    assert [name for name, f in found.items() if f.is_static] == ["static.0", "static.1", "static.2"]
    assert len(found["dynamic.1"].state_slots) == 2
    assert found["static.1"].device == "npu"
    assert found["static.1"].num_nodes == 14


def test_driver_bytes_are_all_buffers_of_the_npu_graphs():
    """An 8B decoder with 32 layers of 8 key heads of 128 columns, with attention over 4096 slots."""
    layers, kv_heads, head_dim, slots, rows, hidden, width = 32, 8, 128, 4096, 32, 4096, 2
    plan = find_shape("llama-3.1-8b").plan().within(slots)
    options = EngineOptions(npu="qnn", attention="npu", npu_window=slots, context_length=slots)
    (near,) = near_plans(plan, {}, options, slots)
    found = subgraph_figures(near.plan, SCHEMES["w4a16"], chunk_length=rows)
    history = 2 * layers * kv_heads * head_dim * slots * width
    assert history == 536_870_912
    graphs = [f for f in found if f.device == "npu"]
    # The residual stream enters and leaves each graph; graphs are cut after attention, whose result also crosses.
    num_values = 2 * len(graphs) + 2 * (len(graphs) - 1)
    values = num_values * rows * hidden * width
    inputs = (rows * (slots + rows) + rows * head_dim) * width  # mask, and rows of two tables of half a head
    new_rows = 2 * layers * kv_heads * head_dim * rows * width
    assert sum(f.driver_bytes for f in graphs) == history + new_rows + values + inputs * len(graphs)
    assert not any(f.driver_bytes for f in figures("w8a8-dynamic").values())
