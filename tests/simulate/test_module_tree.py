"""Module trees: modules are placed as objects, and the plan follows."""

import copy

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from small_shape import SMALL_SHAPE

import chunkrt
from chunkrt.errors import ConfigError
from chunkrt.simulate import find_device, find_shape, simulate, simulate_serving
from chunkrt.simulate.arrivals import draw

GGUF = checkpoint("llama_biased_gguf")
POINT = {
    "devices": ["sd8gen3"],
    "schemes": ["w8a16"],
    "prompt_lengths": [16],
    "chunk_lengths": [8],
    "policies": ["in_order"],
    "workers": 1,
}


def devices(plan, part):
    """Return the devices of the linears of a plan whose names contain a text."""
    return {s.device for s in plan.subgraphs for node in s.nodes if node.op == "MatMul" and part in node.name}


@pytest.mark.parametrize("model", [GGUF, checkpoint("llama_gqa"), SMALL_SHAPE, "qwen2.5-0.5b"])
def test_modules_are_placed_in_the_order_of_the_calls(model):
    tree = chunkrt.graph.load_module(model)
    assert tree.placement == {}
    assert devices(tree.plan(), "mlp.down_proj") == {"npu"}
    first, *others = tree.model.layers
    assert first.mlp.down_proj.to("cpu").path == "model.layers.0.mlp.down_proj"
    assert devices(tree.plan(), "layers.0.mlp.down_proj") == {"cpu"}
    assert devices(tree.plan(), "layers.1.mlp.down_proj") == {"npu"}
    others[0].mlp.to("cpu")
    others[0].mlp.down_proj.to("npu")
    plan = tree.plan()
    assert (devices(plan, "layers.1.mlp.gate_up"), devices(plan, "layers.1.mlp.down")) == ({"cpu"}, {"npu"})
    tree.to("cpu")
    assert {subgraph.device for subgraph in tree.plan().subgraphs} == {"cpu"}
    assert "model.layers.1.mlp" in tree.modules()


def test_tree_serves_as_a_placement_of_engines_and_experiments():
    tree = chunkrt.graph.load_module(GGUF)
    for layer in tree.model.layers:
        layer.mlp.down_proj.to("cpu")
    written = {layer.mlp.down_proj.path: "cpu" for layer in tree.model.layers}
    rows = chunkrt.experiment(GGUF, placements={"natural": {}, "as a tree": tree, "written": written}, **POINT)
    assert [row.placement_name for row in rows] == ["natural", "as a tree", "written"]
    assert rows[1].placement == written
    assert rows[1].makespan_ms == rows[2].makespan_ms != rows[0].makespan_ms
    with chunkrt.load(GGUF, placement=tree) as engine, engine.session() as session:
        assert engine.plan.subgraphs == tree.plan("w8a8-dynamic").subgraphs
        assert np.isfinite(session.prefill([1, 2, 3]).logits).all()


def test_copy_of_a_tree_is_placed_by_itself():
    tree = chunkrt.graph.load_module(GGUF)
    other = copy.deepcopy(tree)
    other.model.layers[0].mlp.down_proj.to("cpu")
    assert (tree.placement, other.placement) == ({}, {"model.layers.0.mlp.down_proj": "cpu"})


def test_wrong_trees_and_modules_are_one_clear_line(tmp_path):
    tree = chunkrt.graph.load_module(GGUF)
    with pytest.raises(ConfigError, match="'npu' or 'cpu', not 'gpu'"):
        tree.to("gpu")
    with pytest.raises(AttributeError, match="has no module 'mpl'; there are: "):
        _ = tree.model.layers[0].mpl
    with pytest.raises(ConfigError, match="no-such-model"):
        chunkrt.graph.load_module("no-such-model")
    with pytest.raises(ConfigError, match="model is 3, expected a name"):
        chunkrt.graph.load_module(3)
    with pytest.raises(AttributeError, match="load_modules"):
        _ = chunkrt.graph.load_modules


def test_simulations_are_tables_in_notebooks():
    plan, device = find_shape("qwen2.5-0.5b").plan(), find_device("sd8gen3")
    one = simulate(plan, device, prompt_length=64, chunk_length=32, policy="in_order", scheme="w8a16")
    html = one._repr_html_()
    assert html.startswith("<table><caption>predicted: 64 tokens on Snapdragon 8 Gen 3")
    assert "<th>NPU</th><th>CPU</th>" in html
    assert f"<td>{one.processors['npu'].busy:.1%}</td>" in html
    load = draw("closed", "32", "2", requests=2, context_length=plan.context_length)
    served = simulate_serving(plan, device, load, sessions=2, chunk_length=32, policy="in_order", scheme="w8a16")
    assert f"<td>{served.time_to_first_token_ms.p95:.1f}</td>" in served._repr_html_()
