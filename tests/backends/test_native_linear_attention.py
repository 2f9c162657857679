"""Native linear attention and head norms against NumPy in float64, row by row from the definitions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from native_cases import W8A8, Case, make_case, node, random_rows, run, tensor
from native_isas import isa_parameters
from native_linear_attention_cases import (
    SHAPES,
    Inputs,
    Shape,
    assert_near,
    convolve,
    delta_rule_program,
    expected_delta_rule,
    random_inputs,
    run_delta_rule,
)

from chunkrt._native import ProgramBuilder, ThreadPool
from chunkrt.backends.native.backend import NativeBackend

LENGTHS = [1, 2, 31, 32, 33, 64, 95]
ISAS = isa_parameters("reference", "neon", "avx2", "avx512vnni")


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", LENGTHS)
def test_delta_rule_against_float64(isa: str, name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    shape = SHAPES[name]
    inputs = random_inputs(shape, rows)
    found = run_delta_rule(delta_rule_program(inputs, shape), inputs, [rows])
    for array, expected in zip(found, expected_delta_rule(inputs, shape), strict=True):
        assert_near(array, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64])
def test_any_chunks_give_the_same_rows(isa: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks include single rows, which use the single step."""
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    shape = SHAPES["shared k heads"]
    inputs = random_inputs(shape, 95)
    program = delta_rule_program(inputs, shape)
    whole = run_delta_rule(program, inputs, [95])
    parts = run_delta_rule(program, inputs, [*range(length, 95, length), 95])
    np.testing.assert_array_equal(parts[1], whole[1])
    for part, array in zip(parts, whole, strict=True):
        np.testing.assert_allclose(part, array, rtol=0, atol=1e-5 * np.abs(array).max())


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("rows", [1, 33])
def test_thread_count_changes_no_bit(threads: int, rows: int) -> None:
    shape = SHAPES["shared k heads"]
    inputs = random_inputs(shape, rows)
    alone = run_delta_rule(delta_rule_program(inputs, shape, 1), inputs, [rows])
    for found, expected in zip(
        run_delta_rule(delta_rule_program(inputs, shape, threads), inputs, [rows]), alone, strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def forget_all(inputs: Inputs) -> None:
    inputs.gate[:] = -1e4


def forget_now_and_then(inputs: Inputs) -> None:
    inputs.gate[:] = -0.01
    inputs.gate[::7] = -1e4
    inputs.gate[3::7] = -90


def forget_nothing(inputs: Inputs) -> None:
    inputs.gate[:] = 0


def learn_nothing(inputs: Inputs) -> None:
    """Set gates as in padded rows, which do not change the state."""
    inputs.gate[:], inputs.beta[:] = 0, 0


def zero_rows(inputs: Inputs) -> None:
    """Set rows to zero for the length of the convolution, so that rows of q and k are zero too."""
    inputs.qkv[::2] = 0
    inputs.qkv[10:20] = 0


def only_zeros(inputs: Inputs) -> None:
    inputs.qkv[:], inputs.conv_state[:] = 0, 0


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "change", [forget_all, forget_now_and_then, forget_nothing, learn_nothing, zero_rows, only_zeros]
)
@pytest.mark.parametrize("rows", [1, 2, 33, 95])
def test_extreme_rows(isa: str, change: object, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    assert callable(change)
    shape = SHAPES["shared k heads"]
    inputs = random_inputs(shape, rows)
    change(inputs)
    found = run_delta_rule(delta_rule_program(inputs, shape), inputs, [rows])
    for array, expected in zip(found, expected_delta_rule(inputs, shape), strict=True):
        assert_near(array, expected)
    if change is learn_nothing:
        np.testing.assert_array_equal(found[2], inputs.recurrent_state)


def test_strong_decay_keeps_precision_of_later_rows() -> None:
    """Differences of summed logarithms would lose it: next to 1e4, a float32 resolves 0.1 to a hundredth."""
    shape = SHAPES["odd sizes"]
    inputs = random_inputs(shape, 32)
    inputs.gate[:], inputs.gate[0] = -0.1, -1e4
    found = run_delta_rule(delta_rule_program(inputs, shape), inputs, [32])
    assert_near(found[0][-1:], expected_delta_rule(inputs, shape)[0][-1:])


def test_non_finite_values_reach_no_earlier_row() -> None:
    shape = SHAPES["shared k heads"]
    inputs = random_inputs(shape, 33)
    program = delta_rule_program(inputs, shape)
    clean = run_delta_rule(program, inputs, [33])[0]
    inputs.qkv[20, :] = np.nan
    found = run_delta_rule(program, inputs, [33])[0]
    np.testing.assert_array_equal(found[:20], clean[:20])
    assert np.isnan(found[20:]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("channels", [1, 17, 64, 130])
@pytest.mark.parametrize(("taps", "has_bias"), [(2, False), (3, False), (3, True), (5, True)])
def test_short_convolution(isa: str, channels: int, taps: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    rng = np.random.default_rng(channels)
    bcx = rng.standard_normal((95, 3 * channels)).astype(np.float32)
    weight = rng.standard_normal((channels, 1, taps)).astype(np.float32)
    bias = rng.standard_normal(channels).astype(np.float32)
    first_state = rng.standard_normal((channels, taps - 1)).astype(np.float32)
    before, after, x = np.split(bcx, 3, axis=1)
    y, new_state = convolve(before * x, weight, first_state)
    expected = after * (y + bias if has_bias else y)

    builder = ProgramBuilder(ThreadPool(2), 128)
    value = builder.input("bcx", "float32", ["T", 3 * channels])
    state = builder.state("conv_state", [channels, taps - 1])
    biases = builder.constant(bias) if has_bias else None
    builder.output("out", builder.short_conv(value, builder.constant(weight), biases, state))
    program = builder.build()
    bits = set()
    for cuts in ([95], [1, 2, 33, 95], list(range(1, 96))):
        conv_state, parts = first_state.copy(), []
        for begin, end in pairwise([0, *cuts]):
            parts.append(np.empty((end - begin, channels), np.float32))
            program.run([bcx[begin:end], conv_state], [parts[-1]])
        found = np.concatenate(parts)
        np.testing.assert_allclose(found, expected, rtol=0, atol=(taps + 4) * 2**-24 * np.abs(expected).max() * taps)
        np.testing.assert_array_equal(conv_state, new_state.astype(np.float32))
        bits.add(found.tobytes())
    assert len(bits) == 1


def test_convolution_bias_before_the_delta_rule() -> None:
    """Taps that pick a constant column stand for the bias."""
    shape = SHAPES["odd sizes"]
    inputs = random_inputs(shape, 5)
    bias = np.random.default_rng(5).standard_normal(shape.channels).astype(np.float32)
    inputs.weight[:, 0, 0] = 0
    inputs.weight[:, 0, 1] = 1
    shifted = Inputs(**{**vars(inputs), "qkv": inputs.qkv + bias})
    found = run_delta_rule(delta_rule_program(inputs, shape, bias=bias), inputs, [5])[0]
    assert_near(found, expected_delta_rule(shifted, shape)[0])


@pytest.mark.parametrize(("heads", "width"), [(3, 16), (1, 5), (4, 128)])
def test_head_norm(heads: int, width: int) -> None:
    """The columns after the heads pass through."""
    x, weight = random_rows(9, heads * width + 7), random_rows(heads, width, 1)
    builder = ProgramBuilder(ThreadPool(2), 128)
    value = builder.input("x", "float32", ["T", x.shape[1]])
    builder.output("out", builder.head_norm(value, builder.constant(weight), 1e-6))
    out = np.empty_like(x)
    builder.build().run([x], [out])
    parts = x[:, : heads * width].reshape(9, heads, width).astype(np.float64)
    normed = parts / np.sqrt((parts**2).mean(axis=2, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(out[:, : heads * width], normed.reshape(9, -1), rtol=16 * 2**-24)
    np.testing.assert_array_equal(out[:, heads * width :], x[:, heads * width :])


def test_builder_checks_operands() -> None:
    shape = SHAPES["odd sizes"]
    builder = ProgramBuilder(ThreadPool(1), 4)
    x = builder.input("x", "float32", ["T", shape.channels])
    gate = builder.input("gate", "float32", ["T", shape.num_v_heads])
    narrow = builder.input("narrow", "float32", ["T", 2])
    weight = builder.constant(np.ones((shape.channels, 1, 2), np.float32))
    one_tap = builder.constant(np.ones((shape.channels, 1, 1), np.float32))
    conv_state = builder.state("conv_state", [shape.channels, 1])
    state = builder.state("state", [shape.num_v_heads, shape.head_k_dim, shape.head_v_dim])

    def delta_rule(*operands: int | None, **changes: int) -> None:
        sizes = {"num_k_heads": 1, "num_v_heads": 3, "head_k_dim": 7, "head_v_dim": 5, "use_qk_l2norm": True}
        builder.gated_delta_rule(*operands, **{**sizes, **changes})  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="number of v heads to be a multiple of that of k heads, got 3 and 2"):
        delta_rule(x, gate, gate, weight, None, conv_state, state, num_k_heads=2)
    with pytest.raises(ValueError, match=r"q and k of 1 heads of 7 and v of 3 heads of 6, got float32 \[T, 29\]"):
        delta_rule(x, gate, gate, weight, None, conv_state, state, head_v_dim=6)
    with pytest.raises(ValueError, match=r"expected gate and beta float32 \[T, 3\], got float32 \[T, 2\]"):
        delta_rule(x, gate, narrow, weight, None, conv_state, state)
    with pytest.raises(
        ValueError, match=r"recurrent state: expected a state float32 \[3, 7, 5\], got float32 \[29, 1\]"
    ):
        delta_rule(x, gate, gate, weight, None, conv_state, conv_state)
    with pytest.raises(ValueError, match=r"convolution's state: expected a state float32 \[29, 1\]"):
        delta_rule(x, gate, gate, weight, None, state, state)
    with pytest.raises(ValueError, match="2 taps or more"):
        delta_rule(x, gate, gate, one_tap, None, conv_state, state)
    with pytest.raises(ValueError, match="expected 3 equal parts, got a width of 29"):
        builder.short_conv(x, weight, None, conv_state)
    with pytest.raises(ValueError, match=r"head_norm: expected a weight \[heads, columns\] that fits"):
        builder.head_norm(narrow, builder.constant(np.ones((1, 3), np.float32)), 1e-6)


def test_fixed_shape_state_is_float32() -> None:
    shape = SHAPES["odd sizes"]
    inputs = random_inputs(shape, 2)
    states = [inputs.conv_state, inputs.recurrent_state.astype(np.float16)]
    before = inputs.conv_state.copy()
    with pytest.raises(ValueError, match=r"'recurrent_state': expected float32 \[3, 7, 5\], got float16 \[3, 7, 5\]"):
        delta_rule_program(inputs, shape).run([*inputs.rows(0, 2), *states], [np.empty((2, 15), np.float32)])
    np.testing.assert_array_equal(inputs.conv_state, before)


def test_backend_runs_the_delta_rule() -> None:
    shape = SHAPES["shared k heads"]
    inputs = random_inputs(shape, 33)
    case = linear_attention_case("gated_delta_rule", shape)
    case[2].array("weight")[...] = inputs.weight
    states = {"conv_state": inputs.conv_state.copy(), "recurrent_state": inputs.recurrent_state.copy()}
    values = {name: getattr(inputs, name) for name in ("qkv", "gate", "beta")}
    found = run(NativeBackend(2), case, {**values, **states}, 33)
    expected = run_delta_rule(delta_rule_program(inputs, shape), inputs, [33])
    for array, truth in zip([found["out"], *states.values()], expected, strict=True):
        np.testing.assert_array_equal(array, truth)


def test_backend_runs_a_short_convolution() -> None:
    shape = Shape(num_k_heads=1, num_v_heads=1, head_k_dim=1, head_v_dim=20, taps=3)
    case = linear_attention_case("short_conv", shape)
    bcx, state = random_rows(33, 60), np.zeros((20, 2), np.float32)
    before, after, x = np.split(bcx, 3, axis=1)
    expected, _ = convolve(before * x, case[2].array("weight"), state.copy())
    found = run(NativeBackend(2), case, {"qkv": bcx, "conv_state": state}, 33)
    np.testing.assert_allclose(found["out"], after * expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    np.testing.assert_array_equal(state, (before * x)[-2:].T)


def test_unknown_kind_is_refused_by_name() -> None:
    subgraph, plan, _ = linear_attention_case("gated_linear_attention", SHAPES["odd sizes"])
    support = NativeBackend(1).supports(subgraph, plan, W8A8)
    assert not support
    assert support.node == "out"
    assert support.reason == (
        "native has no linear attention of attn_type 'gated_linear_attention'; it has: gated_delta_rule, mamba2, "
        "short_conv, silu_conv"
    )


def linear_attention_case(kind: str, shape: Shape) -> Case:
    """Make one node; any kind other than short convolution has a delta rule's operands."""
    is_short = kind == "short_conv"
    channels = shape.num_v_heads * shape.head_v_dim if is_short else shape.channels
    tensors = [
        tensor("qkv", "T", 3 * channels if is_short else channels),
        tensor("gate", "T", shape.num_v_heads),
        tensor("beta", "T", shape.num_v_heads),
        tensor("weight", channels, 1, shape.taps, kind="weight"),
        tensor("conv_state", channels, shape.taps - 1, kind="state"),
        tensor("recurrent_state", shape.num_v_heads, shape.head_k_dim, shape.head_v_dim, kind="state"),
        tensor("out", "T", shape.num_v_heads * shape.head_v_dim),
    ]
    names = "qkv - - weight - conv_state -" if is_short else "qkv gate beta weight - conv_state recurrent_state"
    made = node(
        "LinearAttention",
        names,
        "out",
        domain="chunkrt",
        attn_type=kind,
        num_k_heads=shape.num_k_heads,
        num_v_heads=shape.num_v_heads,
        head_k_dim=shape.head_k_dim,
        head_v_dim=shape.head_v_dim,
        use_qk_l2norm=int(shape.use_qk_l2norm),
    )
    return make_case([made], tensors, "out")
