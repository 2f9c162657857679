"""What a plan costs, counted again by hand."""

import pytest

from chunkrt.quant.figures import attention_figures, subgraph_figures, weight_bytes
from chunkrt.quant.scheme import SCHEMES
from chunkrt.testing.decoder import random_decoder

DECODER = random_decoder(list(SCHEMES.values()))
HIDDEN, INNER, VOCABULARY, QKV, ATTENDED = 36, 52, 61, 80, 40
STATIC_1 = HIDDEN * ATTENDED + HIDDEN * 2 * INNER + INNER * HIDDEN + HIDDEN * QKV


def figures(scheme, chunk_length=8):
    return {f.name: f for f in subgraph_figures(DECODER.plan, SCHEMES[scheme], chunk_length=chunk_length)}


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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_of_weights_are_those_of_the_store(scheme):
    stored = weight_bytes(DECODER.plan, SCHEMES[scheme])
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
