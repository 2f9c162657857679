"""The plan is plain data: it survives JSON, and other data is refused."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from fixture_checkpoints import NAMES, checkpoint
from safetensors.numpy import load_file

from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import ModelError
from chunkrt.graph.flow import Flow
from chunkrt.graph.plan import Plan, Tensor, resolve
from chunkrt.quant.scheme import SCHEMES
from chunkrt.testing.random_decoders import random_decoder


@pytest.fixture(scope="module")
def plan():
    return random_decoder([SCHEMES["float"]]).plan


def test_json_and_back_is_the_same_plan(plan):
    assert Plan.from_json(plan.to_json()) == plan


def test_shorter_context_changes_only_rotary_tables(plan):
    plan = replace(plan, tensors={**plan.tensors, "one": Tensor(name="one", dtype="float32", shape=(), kind="weight")})
    found = plan.within(5)
    changed = {name for name, tensor in plan.tensors.items() if found.tensors[name] != tensor}
    assert changed == {name for name, tensor in plan.tensors.items() if tensor.rotary}
    assert {found.tensors[name].shape[0] for name in changed} == {5}


def test_json_holds_only_json(plan):
    data = json.loads(plan.to_json())
    assert {type(v) for v in data.values()} <= {str, int, bool, list, dict, type(None)}
    assert data["subgraphs"][1]["nodes"][0]["op"] == "RMSNormalization"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("subgraphs"),
        lambda data: data.update(surprise=1),
        lambda data: data["subgraphs"][0].pop("rows"),
        lambda data: data["subgraphs"][0]["nodes"][0].pop("inputs"),
        lambda data: data.update(tensors=[]),
        lambda data: data["tensors"]["input_ids"].update(shape=None),
        lambda data: data["tensors"]["input_ids"].update(shape=["N"]),
        lambda data: data["tensors"]["lm_head.weight"].update(shape=[36, -61]),
        lambda data: data["tensors"]["lm_head.weight"].update(dtype="float64"),
        lambda data: data["tensors"].pop("lm_head.weight"),
        lambda data: data["subgraphs"][0].update(device="gpu"),
        lambda data: data["subgraphs"][0].update(rows="P"),
        lambda data: data["subgraphs"][1].update(weights=["model.embed_tokens.output"]),
        lambda data: data["subgraphs"][1].update(outputs=["model.norm.output"]),
        lambda data: data["subgraphs"][1].update(inputs=["model.norm.output"]),
        lambda data: data["subgraphs"][1]["nodes"][0].update(inputs=["model.norm.output"]),
        lambda data: data["subgraphs"][1]["nodes"][0].update(op=["Add"]),
        lambda data: data["subgraphs"][1]["nodes"][0].update(attributes=[]),
        lambda data: data["subgraphs"][1]["nodes"][0].update(name=data["subgraphs"][0]["nodes"][0]["name"]),
        lambda data: data["subgraphs"].reverse(),
        lambda data: data.update(output="model.tail"),
        lambda data: data.update(vocab_size="61"),
    ],
)
def test_plan_with_something_missing_or_unknown_is_damaged(plan, damage):
    data = json.loads(plan.to_json())
    damage(data)
    with pytest.raises(ModelError, match=r"the plan is damaged \(.*recompile the model"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "damage",
    [
        lambda parts: parts[2]["outputs"].append("position"),
        lambda parts: parts[4]["state"].append(parts[2]["state"][0]),
    ],
)
def test_two_subgraphs_with_the_same_output_are_damaged(plan, damage):
    data = json.loads(plan.to_json())
    damage(data["subgraphs"])
    with pytest.raises(ModelError, match=r"writes a tensor that another subgraph writes\); recompile the model"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" + "0" * 400])
def test_number_that_no_float_holds_is_damaged(plan, number):
    data = json.loads(plan.to_json())
    node = next(node for part in data["subgraphs"] for node in part["nodes"] if "epsilon" in node["attributes"])
    node["attributes"]["epsilon"] = "EPSILON"
    with pytest.raises(ModelError, match="its attribute 'epsilon' is not a finite number"):
        Plan.from_json(json.dumps(data).replace('"EPSILON"', number))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"plan"', "{}"])
def test_other_json_is_damaged(text):
    with pytest.raises(ModelError, match="the plan is damaged"):
        Plan.from_json(text)


def test_half_a_file_is_damaged(plan):
    with pytest.raises(ModelError, match="the plan is damaged"):
        Plan.from_json(plan.to_json()[:1000])


def test_bytes_follow_from_shape_dtype_and_symbols():
    cache = Tensor(name="cache", dtype="float16", shape=(3, "P", 64), kind="state")
    assert cache.num_bytes(P=100) == 3 * 100 * 64 * 2
    assert resolve(("T", 5), {"T": 7}) == (7, 5)
    with pytest.raises(KeyError, match="P"):
        cache.num_bytes(T=1)


def test_decoder_is_a_chain(plan):
    size = len(plan.subgraphs)
    assert plan.flow.is_chain
    assert plan.flow.waits_for == ((), *((i,) for i in range(size - 1)))
    assert plan.flow.with_logits.subgraphs == tuple(range(size))
    last_state = max(i for i, subgraph in enumerate(plan.subgraphs) if subgraph.state)
    assert plan.flow.without_logits.subgraphs == tuple(range(last_state + 1))


def test_dependencies_with_forks_and_joins():
    """0 is read by 1 and 2, and these by 3, which reads 0 as well; 4 has no readers; 3 owns state."""
    flow = Flow([(), (0,), (0,), (2, 0, 1), (1,)], [False, False, False, True, False])
    assert flow.waits_for == ((), (0,), (0,), (1, 2), (1,))
    assert flow.ancestors == (0b0, 0b1, 0b1, 0b111, 0b11)
    assert flow.with_logits == ((0, 1, 2, 3, 4), (0,), ((1, 2), (3, 4), (3,), (), ()))
    assert flow.without_logits == ((0, 1, 2, 3), (0,), ((1, 2), (3,), (3,), (), ()))
    assert not flow.is_chain


def test_stateless_chunk_without_logits_is_the_first_subgraph():
    assert Flow([(), (0,)], [False, False]).without_logits.subgraphs == (0,)


def test_names_are_readable_paths(plan):
    for subgraph in plan.subgraphs:
        for node in subgraph.nodes:
            assert all(part.isidentifier() or part.isdigit() for part in node.name.split(".")), node.name
            assert node.outputs[0] == node.name


def test_reading_a_plan_needs_no_onnx():
    code = "import sys, chunkrt.graph.plan; print(*[m for m in ('onnx', 'onnx_ir', 'numpy') if m in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert loaded == []


def test_raw_keys_change_only_attention(plan: Plan) -> None:
    raw = plan.with_raw_keys()
    assert (plan.has_raw_keys, raw.has_raw_keys) == (False, True)
    assert Plan.from_json(raw.to_json()) == raw.with_raw_keys() == raw
    assert raw.to_json().replace("RawKeyAttention", "CachedAttention") == plan.to_json()


@pytest.mark.parametrize("name", NAMES)
def test_compiled_plan_is_read(name):
    """The table of operators accepts those of all decoders."""
    plan = plan_checkpoint(checkpoint(name), {}).plan
    for made in (plan, plan.with_raw_keys()):
        assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize("name", [name for name in NAMES if checkpoint(name).is_dir()])
def test_num_parameters_counts_the_checkpoints_values_once(name):
    """The file's values count once, including a tied table; RoPE's buffers and the scales of MXFP4 are not parameters,
    and a byte of MXFP4 holds two.
    """
    folder = checkpoint(name)
    tensors = load_file(folder / "model.safetensors")
    is_tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings")
    names = [n for n in tensors if not n.endswith("inv_freq") and not (is_tied and n == "lm_head.weight")]
    values = {"_blocks": 2, "_scales": 0}
    counted = sum(tensors[n].size * values.get(n[-7:], 1) for n in names)
    assert plan_checkpoint(folder, {}).num_parameters == counted
