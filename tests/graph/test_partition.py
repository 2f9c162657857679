"""Cuts of a decoder: by rule, and by the placement of its modules."""

import pytest

from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.ops import trace
from chunkrt.graph.partition import partition, place
from chunkrt.graph.placement import ALL_ON_CPU
from chunkrt.testing.random_decoders import CONFIG, RandomCheckpoint


def plan_of(placement=None, **changes):
    source = RandomCheckpoint({**CONFIG, **changes})
    decoder = build_decoder(source)
    defaults = {module.path: module.device for module in decoder.modules()}
    place(decoder, placement or {})
    return partition(trace(decoder), family="llama", defaults=defaults)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_l_layers_make_l_plus_1_static_and_l_dynamic_subgraphs(layers):
    plan = plan_of(num_hidden_layers=layers)
    expected = ["embedding", "static.0"]
    for layer in range(layers):
        expected += [f"dynamic.{layer}", f"static.{layer + 1}"]
    assert [subgraph.name for subgraph in plan.subgraphs] == [*expected, "head"]
    assert len(plan.static_subgraphs) == layers + 1
    assert {s.name: s.device for s in plan.subgraphs} == {
        name: "npu" if name.startswith("static") else "cpu" for name in [*expected, "head"]
    }


def test_static_subgraph_reaches_from_one_attention_to_the_next():
    (middle,) = (s for s in plan_of().subgraphs if s.name == "static.1")
    layers = "model.layers"
    assert [node.name for node in middle.nodes if node.op == "MatMul"] == [
        f"{layers}.0.self_attn.o_proj.product",
        f"{layers}.0.mlp.gate_up_proj.output",
        f"{layers}.0.mlp.down_proj.output",
        f"{layers}.1.self_attn.qkv_proj.product",
    ]
    assert middle.inputs == (f"{layers}.0.self_attn.attention", "model.embed_tokens.output")
    assert middle.outputs == (f"{layers}.0.output", f"{layers}.1.self_attn.qkv_proj.output")
    assert middle.state == ()


def test_dynamic_subgraph_is_the_attention_with_its_caches():
    plan = plan_of()
    (dynamic,) = (s for s in plan.subgraphs if s.name == "dynamic.1")
    assert [(node.domain, node.op) for node in dynamic.nodes] == [("chunkrt", "CachedAttention")]
    assert dynamic.state == ("model.layers.1.self_attn.key_cache", "model.layers.1.self_attn.value_cache")
    assert dynamic.weights == ("model.rope.cos", "model.rope.sin")
    assert [tensor.shape for tensor in plan.state_tensors] == [(2, "P", 10)] * 4
    assert dynamic.nodes[0].attributes == {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 10,
        "rotary_dim": 10,
        "scale": pytest.approx(10**-0.5),
        "window": 0,
    }


def test_head_runs_on_rows_of_logits_alone():
    plan = plan_of()
    assert [s.rows for s in plan.subgraphs] == ["T"] * 6 + ["R"]
    assert plan.subgraphs[-1].inputs == ("model.norm.output", "logit_rows")
    assert plan.subgraphs[-1].outputs == (plan.output,)
    assert plan.tensors[plan.output].shape == ("R", 61)
    assert (plan.vocab_size, plan.context_length) == (61, 64)


def test_subgraphs_only_read_outputs_of_earlier_ones():
    plan = plan_of()
    known = set(plan.inputs)
    assert known == {"input_ids", "position", "logit_rows"}
    for subgraph in plan.subgraphs:
        assert set(subgraph.inputs) <= known
        known |= set(subgraph.outputs)


def test_every_node_and_every_weight_is_in_the_plan_once():
    plan = plan_of()
    nodes = [node.name for s in plan.subgraphs for node in s.nodes]
    assert len(nodes) == len(set(nodes))
    assert nodes == [node.name for node in trace(build_decoder(RandomCheckpoint())).graph]
    weights = {name for s in plan.subgraphs for name in s.weights}
    assert weights == {p.name for p in build_decoder(RandomCheckpoint()).parameters()}


def test_one_module_on_the_cpu_splits_its_subgraph_in_three():
    plan = plan_of({"model.layers.0.mlp.down_proj": "cpu"})
    by_device = [(s.device, [n.name for n in s.nodes]) for s in plan.subgraphs]
    index = next(i for i, (_, nodes) in enumerate(by_device) if "model.layers.0.mlp.down_proj.output" in nodes)
    assert by_device[index] == ("cpu", ["model.layers.0.mlp.down_proj.output"])
    assert by_device[index - 1][0] == by_device[index + 1][0] == "npu"
    assert by_device[index - 1][1][-1] == "model.layers.0.mlp.gated"
    assert by_device[index + 1][1][0] == "model.layers.0.output"
    assert plan.subgraphs[index].inputs == ("model.layers.0.mlp.gated",)
    assert len(plan.subgraphs) == len(plan_of().subgraphs) + 2
    assert plan.subgraphs[index].is_static


def test_module_next_to_attention_is_fused_with_it():
    plan = plan_of({"model.layers.0.self_attn.o_proj": "cpu"})
    assert len(plan.subgraphs) == len(plan_of().subgraphs)
    (dynamic,) = (s for s in plan.subgraphs if s.name == "dynamic.0")
    assert [node.op for node in dynamic.nodes] == ["CachedAttention", "MatMul", "Add"]


def test_decoder_on_the_cpu_is_fused():
    plan = plan_of(ALL_ON_CPU)
    # The LM head runs on rows of logits, so it stays a separate subgraph; so does a module with its own placement.
    assert [(s.name, s.device, s.rows) for s in plan.subgraphs] == [("dynamic.0", "cpu", "T"), ("head", "cpu", "R")]
    assert len(plan.subgraphs[0].state) == 4


def test_layer_is_placed_with_all_below_it():
    plan = plan_of({"model.layers.1": "cpu"})
    devices = {node.name: s.device for s in plan.subgraphs for node in s.nodes}
    assert all(device == "cpu" for name, device in devices.items() if name.startswith("model.layers.1"))
    assert devices["model.layers.0.mlp.gated"] == "npu"
    assert devices["model.norm.output"] == "npu"


def test_module_may_set_its_own_device():
    decoder = build_decoder(RandomCheckpoint())
    assert decoder.model.layers[0].mlp.down_proj.to("cpu") is decoder.model.layers[0].mlp.down_proj
    plan = partition(trace(decoder), family="llama")
    placed = plan_of({"model.layers.0.mlp.down_proj": "cpu"})
    assert [(s.device, s.nodes) for s in plan.subgraphs] == [(s.device, s.nodes) for s in placed.subgraphs]


LAYER = "model.layers.1"


@pytest.mark.parametrize(
    ("placement", "pieces"),
    [
        ({f"{LAYER}.mlp.down_proj": "cpu"}, ["static.2", "static.2.down_proj", "static.2.output"]),
        ({f"{LAYER}.mlp": "cpu"}, ["static.2", "static.2.gate_up_proj", "static.2.output"]),
        ({f"{LAYER}.self_attn": "cpu"}, ["static.2.attention_residual"]),
        ({f"{LAYER}.self_attn.qkv_proj": "cpu"}, ["static.2"]),
        ({"model.layers.2.input_layernorm": "cpu"}, ["static.2", "static.2.input_layernorm", "static.2.qkv_proj"]),
    ],
)
def test_names_of_subgraphs_do_not_depend_on_the_placement_of_other_modules(placement, pieces):
    default, placed = (plan_of(each, num_hidden_layers=5) for each in ({}, placement))
    names = [subgraph.name for subgraph in placed.subgraphs]
    assert len(set(names)) == len(names)
    assert [name for name in names if name.startswith("static.2")] == pieces
    others = [s for s in default.subgraphs if not s.name.startswith(("static.1", "static.2", "dynamic.1"))]
    by_name = {subgraph.name: subgraph for subgraph in placed.subgraphs}
    assert [by_name[subgraph.name] for subgraph in others] == others


def test_equal_subgraphs_of_two_placements_have_one_name():
    down, gate, attention = f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp.gate_up_proj", f"{LAYER}.self_attn"
    both, mixed = {gate: "cpu", down: "cpu"}, {attention: "cpu", down: "cpu"}
    names = {}
    for placement in ({}, {down: "cpu"}, both, mixed, {"": "cpu", gate: "npu"}):
        for subgraph in plan_of(placement, num_hidden_layers=3).subgraphs:
            nodes = tuple(node.name for node in subgraph.nodes)
            assert names.setdefault(nodes, subgraph.name) == subgraph.name
