"""A mixture of experts: each row gets the weighted sum of its best experts, on every backend that has them."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from native_isas import isa_parameters

from chunkrt._native import ProgramBuilder, ThreadPool
from chunkrt.backends.native.backend import NativeBackend
from chunkrt.backends.onnx.onnxrt import OnnxRuntimeBackend
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.engine_directory.store import WeightStore
from chunkrt.engine_directory.weights import stored_weights, write_weights
from chunkrt.errors import ModelError
from chunkrt.graph import ops
from chunkrt.graph.ops import current_trace, trace
from chunkrt.graph.partition import partition
from chunkrt.quant.scheme import SCHEMES

ROWS, WIDTH, INNER, EXPERTS, TOP = 10, 6, 4, 6, 2
BIASES = ("selection_bias", "gate_up_bias", "down_bias")


def plan_of(*, norm_topk_prob, rows=ROWS, width=WIDTH, inner=INNER, experts=EXPERTS, top_k=TOP, biases=(), **rule):
    """Return the plan of a mixture; `biases` names the weights that it adds: BIASES, or some of them."""

    def decoder(token_ids, logit_rows):
        record = current_trace()
        tables = {"hidden": (rows, width), "router": (rows, experts)}
        hidden, router = (
            ops.gather_rows(record.weight(n, shape), token_ids, name=f"{n}_rows") for n, shape in tables.items()
        )
        gate_up = record.weight("gate_up", (experts, width, 2 * inner))
        down = record.weight("down", (experts, inner, width))
        shapes = {"selection_bias": (experts,), "gate_up_bias": (experts, 2 * inner), "down_bias": (experts, width)}
        added = {name: record.weight(name, shapes[name]) for name in biases}
        mixed = ops.routed_experts(
            hidden, router, gate_up, down, **added, top_k=top_k, norm_topk_prob=norm_topk_prob, **rule
        )
        return ops.gather_rows(mixed, logit_rows, name="logits")

    return partition(trace(decoder), family="operator")


def draw(biases=()):
    rng = np.random.default_rng(0)
    shapes = {"hidden": (ROWS, WIDTH), "router": (ROWS, EXPERTS), "gate_up": (EXPERTS, WIDTH, 2 * INNER)}
    shapes["down"] = (EXPERTS, INNER, WIDTH)
    shapes |= {"gate_up_bias": (EXPERTS, 2 * INNER), "down_bias": (EXPERTS, WIDTH)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    weights["selection_bias"] = np.float32([0.0, 0.5, -0.5, 0.25, 0.0, -0.25])
    return {name: values for name, values in weights.items() if name in biases or name not in BIASES}


def row_by_row(
    weights,
    norm_topk_prob,
    before_down=lambda activated: activated,
    *,
    use_sigmoid=False,
    norm_epsilon=0.0,
    swiglu_alpha=1.0,
    swiglu_limit=0.0,
    num_groups=1,
    top_groups=1,
    best_of_group=1,
):
    """Compute the definition in float64; the selection bias takes part in the choice of experts alone."""
    hidden, router, gate_up, down = (weights[n].astype(np.float64) for n in ("hidden", "router", "gate_up", "down"))
    output = np.zeros_like(hidden)
    for row in range(ROWS):
        probabilities = np.exp(router[row]) / np.exp(router[row]).sum()
        if use_sigmoid:
            probabilities = 1 / (1 + np.exp(-router[row]))
        values = probabilities + weights.get("selection_bias", 0)
        groups = np.split(np.arange(EXPERTS), num_groups)
        ranks = [sum(sorted(values[group])[-best_of_group:]) for group in groups]
        best = sorted(range(num_groups), key=lambda group: -ranks[group])[:top_groups]
        picked = sorted(np.concatenate([groups[group] for group in best]), key=lambda expert: -values[expert])[:TOP]
        total = probabilities[picked].sum() + norm_epsilon if norm_topk_prob else 1
        for expert in picked:
            both = hidden[row] @ gate_up[expert]
            gate, up = np.split(both + weights["gate_up_bias"][expert] if "gate_up_bias" in weights else both, 2)
            if swiglu_limit:
                gate, up = np.minimum(gate, swiglu_limit), np.clip(up, -swiglu_limit, swiglu_limit) + 1
            result = before_down(gate / (1 + np.exp(-swiglu_alpha * gate)) * up) @ down[expert]
            output[row] += (
                probabilities[expert] / total * (result + weights.get("down_bias", np.zeros(EXPERTS))[expert])
            )
    return output


@pytest.mark.parametrize("backend", [ReferenceBackend, OnnxRuntimeBackend])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_row_gets_the_weighted_sum_of_its_best_experts(norm_topk_prob, backend):
    plan, weights = plan_of(norm_topk_prob=norm_topk_prob), draw()
    (subgraph,) = (s for s in plan.subgraphs if any(node.op == "RoutedExperts" for node in s.nodes))
    assert subgraph.device == "cpu"
    store = SimpleNamespace(array=weights.__getitem__)
    executable = backend().compile(subgraph, plan, ROWS, SCHEMES["float"], store)
    (name,) = subgraph.outputs
    outputs = {name: np.empty((ROWS, WIDTH), np.float32)}
    executable.run({"input_ids": np.arange(ROWS)}, outputs)
    expected = row_by_row(weights, norm_topk_prob)
    np.testing.assert_allclose(outputs[name], expected, rtol=0, atol=1e-6 * np.abs(expected).max())


RULES = [
    {"use_sigmoid": True},
    {"biases": ["selection_bias"]},
    {"use_sigmoid": True, "biases": ["selection_bias"], "norm_epsilon": 0.25},
    {"biases": ["gate_up_bias", "down_bias"], "swiglu_alpha": 1.75, "swiglu_limit": 0.75},
    {"num_groups": 3, "top_groups": 1},
    {"num_groups": 3, "top_groups": 2, "best_of_group": 2},
    {"use_sigmoid": True, "biases": ["selection_bias"], "num_groups": 2, "top_groups": 1, "best_of_group": 2},
    {"use_sigmoid": True, "biases": ["selection_bias"], "num_groups": 6, "top_groups": 3},
]


@pytest.mark.parametrize("backend", [ReferenceBackend, OnnxRuntimeBackend])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_rules_of_routers_and_activations(rule, norm_topk_prob, backend):
    plan, weights = plan_of(norm_topk_prob=norm_topk_prob, **rule), draw(rule.get("biases", ()))
    subgraph = experts_of(plan)
    executable = backend().compile(subgraph, plan, ROWS, SCHEMES["float"], SimpleNamespace(array=weights.__getitem__))
    found = run(executable, subgraph, range(ROWS), WIDTH)
    expected = row_by_row(weights, norm_topk_prob, **{key: rule[key] for key in rule if key != "biases"})
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


QUANTIZED = [SCHEMES["w8a8-dynamic"], SCHEMES["w4a8-dynamic"], SCHEMES["w8a16"]]
BACKENDS = [ReferenceBackend, OnnxRuntimeBackend, partial(NativeBackend, threads=3)]


def experts_of(plan):
    (subgraph,) = (s for s in plan.subgraphs if any(node.op == "RoutedExperts" for node in s.nodes))
    return subgraph


def store_of(plan, scheme, weights, folder):
    """A store of weights on disk. NaN stands for a computed value; a checkpoint cannot hold it, so it is inserted
    later."""
    path = folder / "weights.safetensors"
    write_weights(plan, scheme, lambda name: np.nan_to_num(weights[name], nan=0), path)
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    for name, values in weights.items():
        if (places := np.isnan(values)).any():
            assert header[name]["dtype"] == "F16"
            begin = 8 + size + header[name]["data_offsets"][0]
            np.memmap(path, np.float16, "r+", offset=begin, shape=values.shape)[places] = np.nan
    store = WeightStore.open(path)
    store.check(entry for weight in stored_weights(plan, scheme).values() for entry in weight.entries)
    return store


def run(executable, subgraph, rows, width):
    (name,) = subgraph.outputs
    outputs = {name: np.full((len(rows), width), np.nan, np.float32)}
    executable.run({"input_ids": np.array(rows, np.int64)}, outputs)
    return outputs[name]


def quantised(x):
    scale = np.abs(x).max() / 127
    return np.rint(x / scale) * scale if scale else x


@pytest.mark.parametrize("scheme", QUANTIZED, ids=lambda scheme: scheme.name)
def test_experts_are_stored_in_8_bits_for_each_column_of_each_expert(scheme, tmp_path):
    plan, weights = plan_of(norm_topk_prob=True), draw()
    weights["gate_up"][2, :, 3] = 0
    store = store_of(plan, scheme, weights, tmp_path)
    for name in ("gate_up", "down"):
        integers, scale = store.experts(name)
        packed, _ = store.packed_linear(name)
        assert packed.ctypes.data % 64 == 0
        assert packed.nbytes == EXPERTS * -(-weights[name].shape[2] // 16) * -(-weights[name].shape[1] // 4) * 64
        np.testing.assert_array_equal(scale, np.abs(weights[name]).max(axis=1) / np.float32(127))
        np.testing.assert_array_equal(np.abs(integers).max(axis=1), np.where(scale > 0, 127, 0))
        assert (np.abs(integers * scale[:, None] - weights[name]) <= scale[:, None] * 0.5001).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("scheme", QUANTIZED, ids=lambda scheme: scheme.name)
def test_quantised_schemes_multiply_8_bit_integers(scheme, norm_topk_prob, backend, tmp_path):
    plan, weights = plan_of(norm_topk_prob=norm_topk_prob), draw()
    weights["hidden"] = np.rint(weights["hidden"] * 30).clip(-126, 126)
    weights["hidden"][:, 1] = 127  # a row's integers are its values
    store = store_of(plan, scheme, weights, tmp_path)
    executable = backend().compile(experts_of(plan), plan, ROWS, scheme, store)
    dequantised = {name: store.array(name) for name in ("hidden", "router")}
    for name in ("gate_up", "down"):
        integers, scale = store.experts(name)
        dequantised[name] = integers.astype(np.float64) * scale[:, None]
    expected = row_by_row(dequantised, norm_topk_prob, before_down=quantised)
    found = run(executable, experts_of(plan), range(ROWS), WIDTH)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6 * np.abs(expected).max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_quantised_schemes_apply_the_rules(rule, norm_topk_prob, backend, tmp_path):
    plan, weights = plan_of(norm_topk_prob=norm_topk_prob, **rule), draw(rule.get("biases", ()))
    scheme = SCHEMES["w8a8-dynamic"]
    weights["hidden"] = np.rint(weights["hidden"] * 30).clip(-126, 126)
    weights["hidden"][:, 1] = 127  # a row's integers are its values
    store = store_of(plan, scheme, weights, tmp_path)
    executable = backend().compile(experts_of(plan), plan, ROWS, scheme, store)
    dequantised = {name: store.array(name) for name in weights if name not in ("gate_up", "down")}
    for name in ("gate_up", "down"):
        integers, scale = store.experts(name)
        dequantised[name] = integers.astype(np.float64) * scale[:, None]
    given = {key: rule[key] for key in rule if key != "biases"}
    expected = row_by_row(dequantised, norm_topk_prob, before_down=quantised, **given)
    found = run(executable, experts_of(plan), range(ROWS), WIDTH)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6 * np.abs(expected).max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_first_of_equal_experts_are_picked(backend, tmp_path):
    plan, weights, scheme = plan_of(norm_topk_prob=False), draw(), SCHEMES["w8a8-dynamic"]
    weights["router"][:] = [0, 1, 1, 0, 1, 0]
    store = store_of(plan, scheme, weights, tmp_path)
    executable = backend().compile(experts_of(plan), plan, ROWS, scheme, store)
    found = run(executable, experts_of(plan), range(ROWS), WIDTH)
    weights["router"][:] = [0, 1, 1, 0, 0.9375, 0]
    (tmp_path / "others").mkdir()
    others = store_of(plan, scheme, weights, tmp_path / "others")
    executable = backend().compile(experts_of(plan), plan, ROWS, scheme, others)
    expected = run(executable, experts_of(plan), range(ROWS), WIDTH)
    ratio = np.exp([0, 1, 1, 0, 0.9375, 0]).sum() / np.exp([0, 1, 1, 0, 1, 0]).sum()
    np.testing.assert_allclose(found, expected * ratio, rtol=0, atol=1e-6 * np.abs(expected).max())


WIDE = {"width": 200, "inner": 72, "experts": 12, "top_k": 5}
"""Sizes with more than one block of columns, pieces and panels of them; some experts get one row, some many."""

ZERO, NOT_A_NUMBER = 11, 12


def draw_wide():
    rng = np.random.default_rng(1)
    shapes = {"hidden": (40, 200), "router": (40, 12), "gate_up": (12, 200, 144), "down": (12, 72, 200)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    weights["router"][:, 3] += 4
    weights["router"][1:, 7] -= 9
    weights["hidden"][5:9, 17] = 300
    weights["hidden"][ZERO] = 0
    weights["hidden"][NOT_A_NUMBER, 4] = np.nan
    return weights


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_native_equals_the_reference(norm_topk_prob, tmp_path):
    plan, scheme = plan_of(norm_topk_prob=norm_topk_prob, rows=40, **WIDE), SCHEMES["w8a8-dynamic"]
    store = store_of(plan, scheme, draw_wide(), tmp_path)
    subgraph = experts_of(plan)
    native, reference = (
        backend.compile(subgraph, plan, 40, scheme, store) for backend in (NativeBackend(threads=2), ReferenceBackend())
    )
    rows = [row for row in range(40) if row != NOT_A_NUMBER]
    found, expected = (run(executable, subgraph, rows, 200) for executable in (native, reference))
    # An activation between two integers may round to either side.
    assert np.sqrt(np.mean((found - expected) ** 2)) <= np.sqrt(np.mean(expected**2)) / 2000
    assert not found[ZERO].any()
    together = run(native, subgraph, range(40), 200)
    np.testing.assert_array_equal(together[rows], found)
    assert np.isnan(together[NOT_A_NUMBER]).all()


@pytest.mark.parametrize("isa", isa_parameters())
def test_native_is_independent_of_threads_chunks_and_instruction_sets(isa, tmp_path, monkeypatch):
    plan, scheme = plan_of(norm_topk_prob=True, rows=40, **WIDE), SCHEMES["w8a8-dynamic"]
    store, subgraph = store_of(plan, scheme, draw_wide(), tmp_path), experts_of(plan)
    expected = run(NativeBackend(threads=1).compile(subgraph, plan, 40, scheme, store), subgraph, range(40), 200)
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    for threads, chunk in ((1, 1), (2, 7), (4, 40), (3, 33)):
        executable = NativeBackend(threads=threads).compile(subgraph, plan, chunk, scheme, store)
        parts = [run(executable, subgraph, range(40)[at : at + chunk], 200) for at in range(0, 40, chunk)]
        np.testing.assert_array_equal(np.concatenate(parts), expected)


@pytest.mark.parametrize("isa", isa_parameters())
def test_native_picks_from_the_best_groups_on_every_instruction_set(isa, tmp_path, monkeypatch):
    rule = {"num_groups": 4, "top_groups": 2, "best_of_group": 2}
    plan, scheme = plan_of(norm_topk_prob=True, rows=40, **WIDE, **rule), SCHEMES["w8a8-dynamic"]
    store, subgraph = store_of(plan, scheme, draw_wide(), tmp_path), experts_of(plan)
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    native, reference = (
        backend.compile(subgraph, plan, 40, scheme, store) for backend in (NativeBackend(threads=2), ReferenceBackend())
    )
    rows = [row for row in range(40) if row != NOT_A_NUMBER]
    found, expected = (run(executable, subgraph, rows, 200) for executable in (native, reference))
    assert np.sqrt(np.mean((found - expected) ** 2)) <= np.sqrt(np.mean(expected**2)) / 2000
    together = run(native, subgraph, range(40), 200)
    np.testing.assert_array_equal(together[rows], found)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"num_groups": 5, "top_groups": 2}, "6 experts cannot form 5 groups"),
        ({"num_groups": 3, "top_groups": 4}, "it cannot pick 4 of 3 groups"),
        ({"num_groups": 3, "top_groups": 1, "best_of_group": 3}, "cannot rank groups of 2 experts by their 3 best"),
        ({"num_groups": 6, "top_groups": 1}, "it cannot pick 2 of the 1 experts of 1 groups"),
        ({"num_groups": 3, "top_groups": 0}, "its groups of experts .* are invalid"),
    ],
)
def test_groups_that_do_not_fit_are_refused(rule, message):
    with pytest.raises(ModelError, match=message):
        plan_of(norm_topk_prob=True, **rule)


def test_native_refuses_experts_in_float_by_name():
    plan = plan_of(norm_topk_prob=True)
    support = NativeBackend(threads=1).supports(experts_of(plan), plan, SCHEMES["float"])
    assert not support
    assert "these experts are not int8 by int8" in support.reason


def test_native_refuses_mismatched_operands():
    builder = ProgramBuilder(ThreadPool(1), 8)
    hidden, logits = builder.input("x", "float32", ["T", 8]), builder.input("r", "float32", ["T", 3])
    gate_up, down = (builder.constant(np.zeros((3, 1, 2, 16, 4), np.int8)) for _ in range(2))
    scales, down_scales = (builder.constant(np.ones((3, n), np.float32)) for n in (16, 8))

    def experts(*operands, top_k=2):
        builder.routed_experts(*operands, top_k=top_k, norm_topk_prob=True)

    with pytest.raises(ValueError, match="4 of 3 experts cannot be picked"):
        experts(hidden, logits, gate_up, scales, down, down_scales, top_k=4)
    with pytest.raises(ValueError, match="differ from the input in their rows"):
        experts(hidden, builder.input("s", "float32", ["R", 3]), gate_up, scales, down, down_scales)
    with pytest.raises(ValueError, match=r"8 of down, got 16 and 16"):
        experts(hidden, logits, gate_up, scales, down, scales)
    with pytest.raises(ValueError, match=r"expected a constant int8 \[3, 1, 2, 16, 4\]"):
        experts(hidden, logits, scales, scales, down, down_scales)
    with pytest.raises(ValueError, match=r"selection bias"):
        experts(hidden, logits, gate_up, scales, down, down_scales, builder.constant(np.ones(4, np.float32)))
    experts(hidden, logits, gate_up, scales, down, down_scales)
