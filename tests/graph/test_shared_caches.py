"""A layer that reads the KV cache of an earlier layer: its plan, its place in the schedule, and its values."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fixture_checkpoints import checkpoint

from chunkrt.backends.native.backend import NativeBackend
from chunkrt.backends.onnx.onnxrt import OnnxRuntimeBackend
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import ModelError
from chunkrt.graph import ops
from chunkrt.graph.operators import check_plan
from chunkrt.graph.ops import current_trace, trace
from chunkrt.graph.partition import partition
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import SCHEMES

HEADS, KV_HEADS, DIM, ROTARY, CONTEXT = 4, 2, 6, 4, 30
SIZES = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "scale": 0.4}
CHUNKS = (7, 1, 12)
BACKENDS = {"native": lambda: NativeBackend(1), "reference": ReferenceBackend, "onnxrt": OnnxRuntimeBackend}


def plan_of(window=0, caches_of="first", is_reversed=False):
    """Plan two layers of attention; the query of the second does not depend on the result of the first."""

    def decoder(token_ids, logit_rows):
        record = current_trace()
        weight = record.weight
        cos, sin = (weight(name, (CONTEXT, ROTARY // 2)) for name in ("cos", "sin"))
        shared = {**SIZES, "window": window}

        def first():
            with record.scope("first", None):
                rows = ops.gather_rows(weight("qkv", (CONTEXT, (HEADS + 2 * KV_HEADS) * DIM)), token_ids)
                ops.cached_attention(rows, cos, sin, **shared, keeps_all=True)

        if not is_reversed:
            first()
        queries = ops.gather_rows(weight("queries", (CONTEXT, HEADS * DIM)), token_ids, name="query_rows")
        queries = ops.add(queries, weight("bias", (HEADS * DIM,)), name="biased")  # on the NPU, between the layers
        found = ops.cached_attention(queries, cos, sin, **shared, caches_of=caches_of, name="second")
        return ops.gather_rows(found, logit_rows, name="logits")

    return partition(trace(decoder), family="operator")


def draw():
    rng = np.random.default_rng(0)
    angles = np.outer(np.arange(CONTEXT), [1.0, 0.3])
    columns = {"qkv": (CONTEXT, (HEADS + 2 * KV_HEADS) * DIM), "queries": (CONTEXT, HEADS * DIM), "bias": HEADS * DIM}
    drawn = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in columns.items()}
    return drawn | {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


def rotated(heads):
    """Rotate [T, heads, D] by position, in float64."""
    half, angles = ROTARY // 2, np.outer(np.arange(len(heads)), [1.0, 0.3])[:, None]
    first, second = heads[..., :half], heads[..., half:ROTARY]
    parts = (first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles))
    return np.concatenate([*parts, heads[..., ROTARY:]], axis=-1)


def expected_rows(weights, num_tokens, window):
    qkv = weights["qkv"][:num_tokens].astype(np.float64).reshape(num_tokens, -1, DIM)
    keys, values = rotated(qkv[:, HEADS : HEADS + KV_HEADS]), qkv[:, HEADS + KV_HEADS :]
    queries = rotated((weights["queries"][:num_tokens].astype(np.float64) + weights["bias"]).reshape(-1, HEADS, DIM))
    found = np.zeros((num_tokens, HEADS, DIM))
    for row in range(num_tokens):
        seen = slice(max(0, row + 1 - window) if window else 0, row + 1)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = keys[seen, kv_head] @ queries[row, head] * SIZES["scale"]
            shares = np.exp(scores - scores.max())
            found[row, head] = shares / shares.sum() @ values[seen, kv_head]
    return found.reshape(num_tokens, -1)


@pytest.mark.parametrize("has_raw_keys", [False, True])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_reader_attends_to_the_keys_of_the_other_layer(backend, window, has_raw_keys):
    plan, weights = plan_of(window), draw()
    plan = plan.with_raw_keys() if has_raw_keys else plan
    store = SimpleNamespace(array=weights.__getitem__)
    executables = [BACKENDS[backend]().compile(s, plan, CONTEXT, SCHEMES["float"], store) for s in plan.subgraphs]
    caches = {t.name: np.zeros((KV_HEADS, CONTEXT, DIM), np.float32) for t in plan.state_tensors}
    found, start = [], 0
    for length in CHUNKS:
        values = {"input_ids": np.arange(start, start + length), "position": np.array([start])}
        values |= {"logit_rows": np.arange(length)}
        for subgraph, executable in zip(plan.subgraphs, executables, strict=True):
            outputs = {n: np.zeros((length, plan.tensors[n].shape[1]), np.float32) for n in subgraph.outputs}
            taken = {n: values[n] for n in subgraph.inputs} | {n: caches[n] for n in subgraph.all_state}
            executable.run(taken, outputs)
            values |= outputs
        found.append(values[plan.output])
        start += length
    np.testing.assert_allclose(np.vstack(found), expected_rows(weights, start, window), rtol=0, atol=2e-6)


def test_reader_waits_for_the_rows_of_its_chunk_and_takes_no_turns():
    """A chunk without logits needs no reader, so a later chunk must not wait for the reader's turn."""
    plan = plan_of()
    first, between, reader, head = range(4)
    assert [s.state for s in plan.subgraphs] == [("first.key_cache", "first.value_cache"), (), (), ()]
    assert plan.subgraphs[reader].shared_state == plan.subgraphs[first].state
    assert plan.state_tensors == tuple(plan.tensors[name] for name in plan.subgraphs[first].state)
    assert plan.flow.ancestors[reader] >> first & 1
    assert plan.flow.has_state == (True, False, False, False)
    assert plan.flow.without_logits.subgraphs == (first,)
    assert plan.flow.with_logits.subgraphs == (first, between, reader, head)
    assert Plan.from_json(plan.to_json()) == plan


def test_chunks_without_logits_skip_the_last_layers_of_gemma_4():
    """Half of the layers read caches: only the last chunk of a prompt passes through them."""
    plan = plan_checkpoint(checkpoint("gemma4"), {}).plan
    readers = [index for index, subgraph in enumerate(plan.subgraphs) if subgraph.shared_state]
    assert len(readers) == 3
    assert max(plan.flow.without_logits.subgraphs) < min(readers)
    assert {plan.tensors[name].shape[1] for index in readers for name in plan.subgraphs[index].shared_state} == {"P"}
    assert sum("W" in tensor.shape for tensor in plan.state_tensors) == 2  # the ring of the layer that is not shared


def test_caches_that_no_earlier_layer_fills_are_refused():
    with pytest.raises(ModelError, match=r"no earlier module has the state 'third.key_cache'; call the module"):
        plan_of(caches_of="third")
    with pytest.raises(ModelError, match=r"no earlier module has the state 'first.key_cache'"):
        plan_of(is_reversed=True)


def changed(plan, **attributes_or_inputs):
    """Return the plan with another reader."""
    *before, reader, head = plan.subgraphs
    (node,) = reader.nodes
    return replace(plan, subgraphs=(*before, replace(reader, nodes=(replace(node, **attributes_or_inputs),)), head))


def test_damaged_plans_with_shared_caches_are_refused():
    plan = plan_of()
    (node,) = plan.subgraphs[2].nodes
    swapped = (*node.inputs[:3], "sin", "cos", *node.inputs[5:])
    with pytest.raises(ValueError, match="rotates its keys unlike"):
        check_plan(changed(plan, inputs=swapped))
    with pytest.raises(ValueError, match=r"names .* as caches to read"):
        check_plan(changed(plan, attributes={**node.attributes, "appends": 1}))
    first, *others = plan.subgraphs
    gathers = tuple(node for node in first.nodes if node.inputs[0] == "queries")
    first = replace(first, nodes=gathers, inputs=("input_ids",), weights=("queries",), state=())
    with pytest.raises(ValueError, match="reads caches that no earlier subgraph has written"):
        check_plan(replace(plan, subgraphs=(first, *others)))
