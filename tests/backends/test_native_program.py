"""Programs: checks of the builder and of a run, and independence of thread count."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter_ns

import numpy as np
import pytest

from chunkrt._native import Program, ProgramBuilder, StepTimes, ThreadPool
from chunkrt.engine_directory.store import pack

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 40, 56, 4, 2, 8, 64
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
MAX_ROWS = 33


def decoder_layer(threads: int, times: StepTimes | None = None, *, math: str = "float32") -> Program:
    """A program with every operator at least once: a small decoder with random weights from a fixed seed."""
    rng = np.random.default_rng(0)
    builder = ProgramBuilder(ThreadPool(threads), MAX_ROWS, times)

    def constant(*shape: int) -> int:
        return builder.constant(rng.standard_normal(shape, np.float32))

    def linear(value: int, depth: int, columns: int, residual: int | None = None) -> int:
        packed = builder.constant(pack(rng.integers(-127, 128, (depth, columns)).astype(np.int8)))
        return builder.linear(value, packed, builder.constant(np.full(columns, 2e-3, np.float32)), None, residual)

    ids = builder.input("input_ids", "int64", ["T"])
    position = builder.input("position", "int64", [1])
    logit_rows = builder.input("logit_rows", "int64", ["R"])
    caches = [builder.state(name, [KV_HEADS, "P", HEAD_DIM]) for name in ("keys", "values")]
    table = rng.standard_normal((50, HIDDEN)).astype(np.float16)
    table[::3, 7] = 1000  # linears get rows with outliers and rows without
    hidden = builder.gather(builder.constant(table), ids)
    qkv = linear(builder.rms_norm(hidden, constant(HIDDEN), 1e-5), HIDDEN, QKV)
    tables = constant(CONTEXT, HEAD_DIM // 2), constant(CONTEXT, HEAD_DIM // 2)
    attended = builder.attention(
        *(qkv, position, position, *tables, *caches),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        scale=0.3,
        math=math,
    )
    hidden = linear(attended, HEADS * HEAD_DIM, HIDDEN, hidden)
    gate_up = linear(builder.rms_norm(hidden, constant(HIDDEN), 1e-5), HIDDEN, 2 * INNER)
    gate, up = builder.columns(gate_up, 0, INNER), builder.columns(gate_up, INNER, INNER)
    unfused = builder.mul(builder.mul(gate, builder.sigmoid(gate)), up)
    inner = builder.add(builder.silu_mul(gate_up), builder.add(unfused, constant(INNER)))
    hidden = linear(inner, INNER, HIDDEN, hidden)
    builder.output("logits", linear(builder.gather(hidden, logit_rows), HIDDEN, 50))
    return builder.build()


def caches(dtype: str = "float32", capacity: int = CONTEXT) -> list[np.ndarray]:
    return [np.zeros((KV_HEADS, capacity, HEAD_DIM), dtype) for _ in range(2)]


def run(program: Program, rows: int, *, position: int = 0, state: list[np.ndarray] | None = None) -> np.ndarray:
    ids = (position + np.arange(rows)) * 7 % 50
    logits = np.full((rows, 50), np.nan, np.float32)
    state = state or caches()
    program.run([ids, np.array([position]), np.arange(rows), *state], [logits])
    return logits


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33])
def test_thread_count_changes_no_bit(threads: int, rows: int) -> None:
    alone = run(decoder_layer(1), rows)
    assert np.isfinite(alone).all()
    np.testing.assert_array_equal(run(decoder_layer(threads), rows), alone)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_chunks_change_no_bit(dtype: str) -> None:
    program = decoder_layer(2)
    whole_state, parts_state = caches(dtype), caches(dtype)
    whole = run(program, 33, state=whole_state)
    starts = [0, 1, 14, 30]
    parts = [
        run(program, end - start, position=start, state=parts_state)
        for start, end in zip(starts, [*starts[1:], 33], strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(parts_state, whole_state)


def test_program_is_thread_safe() -> None:
    program = decoder_layer(2)
    truth = [run(program, rows) for rows in range(1, 9)]
    with ThreadPoolExecutor(4) as executor:
        found = list(executor.map(lambda i: run(program, i % 8 + 1), range(64)))
    for i, logits in enumerate(found):
        np.testing.assert_array_equal(logits, truth[i % 8])


def test_chunk_without_logits() -> None:
    program, state = decoder_layer(2), caches()
    empty = np.empty((0, 50), np.float32)
    program.run([np.arange(5), np.array([0]), np.empty(0, np.int64), *state], [empty])
    assert np.abs(state[0][:, :5]).min(axis=(0, 2)).all()
    assert not state[0][:, 5:].any()


def test_temporaries_share_memory() -> None:
    builder = ProgramBuilder(ThreadPool(1), 16)
    value = builder.input("x", "float32", ["T", 16])
    for _ in range(50):
        value = builder.gather(value, builder.input("rows", "int64", ["T"]))  # each in a separate loop
    builder.output("y", value)
    assert builder.build().arena_bytes <= 3 * 16 * 16 * 4


def test_row_wise_operators_share_a_loop() -> None:
    builder = ProgramBuilder(ThreadPool(1), 16)
    value = builder.input("x", "float32", ["T", 16])
    builder.output("y", builder.mul(builder.sigmoid(value), builder.add(value, value)))
    assert builder.build().num_loops == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_step_times_add_up_and_change_no_bit(threads: int) -> None:
    times = StepTimes()
    timed = decoder_layer(threads, times)
    assert times.take() == (0, {})
    start = perf_counter_ns()
    found = run(timed, 33)
    wall = perf_counter_ns() - start
    callers, steps = times.take()
    assert 0 < callers <= wall
    assert callers <= sum(steps.values()) <= threads * wall
    assert threads > 1 or callers == sum(steps.values())
    named = {name for loop in timed.step_names for name in loop}
    assert steps.keys() <= {*named, "between_steps", "add_outliers"}
    assert {"linear", "add_outliers", "attention", "rms_norm", "quantize", "silu_mul"} <= steps.keys()
    assert found.tobytes() == run(decoder_layer(threads), 33).tobytes()


def test_steps_are_named_after_their_operation() -> None:
    builder = ProgramBuilder(ThreadPool(1), 4)

    def floats(*shape: int) -> int:
        return builder.constant(np.ones(shape, np.float32))

    def bytes_of(kind: type[np.generic], *shape: int) -> int:
        return builder.constant(np.zeros(shape, kind))

    x = builder.input("x", "float32", ["T", 32])
    weight = bytes_of(np.int8, 2, 8, 16, 4)
    blocks = bytes_of(np.uint8, 2, 1, 4, 16, 4), bytes_of(np.float16, 2, 1, 2, 16)
    convolution = floats(32, 1, 3), None, builder.state("taps", [32, 2])
    experts = [bytes_of(np.int8, 3, 4, 8, 16, 4), floats(3, 64), bytes_of(np.int8, 3, 2, 8, 16, 4), floats(3, 32)]
    wide = builder.float_linear(x, floats(32, 96))
    made = [
        *(getattr(builder, name)(x) for name in ("sigmoid", "gelu", "softplus", "tanh", "silu_mul", "gelu_mul")),
        builder.head_norm(x, floats(2, 8), 1e-5),
        builder.round_to_grid(x, floats(1), 7),
        builder.block_linear(x, *blocks, 32),
        builder.linear(x, weight, floats(32), input_step=1.0, num_digits=2),
        builder.shadow_linear(x, weight, floats(32), 1.0, builder.constant(np.zeros(1, np.int32))),
        builder.short_conv(wide, *convolution),
        builder.routed_experts(x, builder.columns(x, 0, 3), *experts, top_k=2, norm_topk_prob=True),
    ]
    for place, value in enumerate(made):
        builder.output(str(place), value)
    names = [name for loop in builder.build().step_names for name in loop]
    unique = [name for name in dict.fromkeys(names) if name != "arrange_rows"]  # only some processors' kernels need it
    assert unique == [
        *("float_linear", "sigmoid", "gelu", "softplus", "tanh", "silu_mul", "gelu_mul", "head_norm", "round_to_grid"),
        *("take_outliers", "quantize", "sum_blocks", "block_linear", "linear", "mul", "find_outliers", "shadow_linear"),
        *("causal_convolution", "columns", "route", "routed_experts", "add_experts"),
    ]


def test_failed_run_has_no_times() -> None:
    times = StepTimes()
    program = decoder_layer(1, times)
    with pytest.raises(IndexError):
        run(program, 33, position=CONTEXT)
    assert times.take() == (0, {})


@pytest.mark.parametrize(("rows", "width"), [(2**61, 8), (2**44, 8), (2**64 - 1, 1), (1, 2**62)])
def test_impossible_sizes_are_refused(rows: int, width: int) -> None:
    """Their product must not be computed modulo 2^64: 2^61 rows of 8 floats would then need no memory."""
    builder = ProgramBuilder(ThreadPool(1), rows)
    with pytest.raises(ValueError, match=rf"float32 \[T, {width}\] with up to {rows} rows is more than .* bytes"):
        builder.output("y", builder.sigmoid(builder.sigmoid(builder.input("x", "float32", ["T", width]))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(ids=np.array([3, 50])), "input 'input_ids': index 50 at row 1 is outside 0..49"),
        (lambda a: a.update(ids=np.array([-1, 3])), "input 'input_ids': index -1 at row 0 is outside 0..49"),
        (lambda a: a.update(logit_rows=np.array([2])), "input 'logit_rows': index 2 at row 0 is outside 0..1"),
        (
            lambda a: a.update(position=np.array([CONTEXT - 1])),
            "2 rows from 63 on do not fit: the cache holds 64 positions",
        ),
        (lambda a: a.update(position=np.array([-1])), "2 rows from -1 on do not fit"),
        (
            lambda a: a.update(position=np.array([2]), keys=caches(capacity=3)[0], values=caches(capacity=3)[1]),
            "2 rows from 2 on do not fit: the cache holds 3 positions",
        ),
    ],
)
def test_indices_out_of_range(change: Callable[[dict[str, np.ndarray]], None], message: str) -> None:
    """They are refused before anything is written."""
    arrays = arguments()
    change(arrays)
    with pytest.raises(IndexError, match=message):
        run_arrays(arrays)
    assert not arrays["keys"].any()
    assert (arrays["logits"] == 5).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a: a.update(ids=np.arange(2, dtype=np.int32)),
            r"input 'input_ids': expected int64 \[T\], got int32 \[2\]",
        ),
        (lambda a: a.update(ids=np.arange(4)[::2]), "input 'input_ids' is not contiguous"),
        (lambda a: a.update(ids=np.empty(0, np.int64)), r"expected int64 \[T\], got int64 \[0\]"),
        (lambda a: a.update(ids=np.zeros(34, np.int64)), "T = 34 rows, but the program was compiled for at most 33"),
        (
            lambda a: a.update(logits=np.zeros((2, 50), np.float32)),
            r"output 'logits': expected float32 \[R, 50\] with R = 1, got float32 \[2, 50\]",
        ),
        (lambda a: a["logits"].setflags(write=False), "output 'logits' is written to, but read-only"),
        (lambda a: a["keys"].setflags(write=False), "input 'keys' is written to, but read-only"),
        (
            lambda a: a.update(keys=a["keys"].astype(np.float16)),
            "the key and value caches must be of one type, got float16 and float32",
        ),
        (
            lambda a: a.update(keys=a["keys"].astype(np.float64)),
            r"input 'keys': expected int8 \[2, P, 12\], float16 or float32 \[2, P, 8\], got float64 \[2, 64, 8\]",
        ),
        (
            lambda a: a.update(values=caches(capacity=9)[0]),
            r"input 'values': expected int8 \[2, P, 12\], float16 or float32 \[2, P, 8\] with P = 64, got float32",
        ),
        (
            lambda a: a.update(logits=np.zeros((1, 50), ">f4")),
            r"output 'logits': expected float32 \[R, 50\] with R = 1, got big-endian",
        ),
    ],
)
def test_wrong_arrays_are_refused(change: Callable[[dict[str, np.ndarray]], None], message: str) -> None:
    arrays = arguments()
    change(arrays)
    with pytest.raises(ValueError, match=message):
        run_arrays(arrays)


def tiled(slots: int, width: int = 32) -> list[np.ndarray]:
    return [np.zeros((KV_HEADS, slots, width), np.uint16) for _ in range(2)]


def test_tiled_caches_require_bfloat16_attention() -> None:
    program = decoder_layer(2, math="bfloat16")
    np.testing.assert_array_equal(run(program, 33, state=tiled(64)), run(program, 33))
    with pytest.raises(ValueError, match="caches in tiles need a multiple of 64 slots, got 63"):
        run(program, 3, state=tiled(63))
    with pytest.raises(
        ValueError, match=r"expected uint16 \[2, P, 32\], int8 \[2, P, 12\], .*, got uint16 \[2, 64, 8\]"
    ):
        run(program, 3, state=tiled(64, 8))
    with pytest.raises(ValueError, match="the key and value caches must be of one type"):
        run(program, 3, state=[tiled(64)[0], caches()[1]])
    with pytest.raises(ValueError, match=r"'keys': expected int8 \[2, P, 12\], float16 or float32 .*, got uint16"):
        run(decoder_layer(2), 3, state=tiled(64))


def arguments() -> dict[str, np.ndarray]:
    keys, values = caches()
    return {
        "ids": np.arange(2),
        "position": np.array([0]),
        "logit_rows": np.array([1]),
        "keys": keys,
        "values": values,
        "logits": np.full((1, 50), 5, np.float32),
    }


def run_arrays(arrays: dict[str, np.ndarray]) -> None:
    inputs = [arrays[name] for name in ("ids", "position", "logit_rows", "keys", "values")]
    decoder_layer(2).run(inputs, [arrays["logits"]])


def test_failed_run_leaves_the_program_usable() -> None:
    program = decoder_layer(2)
    truth = run(program, 4)
    with pytest.raises(IndexError):
        run(program, 4, position=CONTEXT)
    with pytest.raises(ValueError, match="expected 5 inputs, got 1"):
        program.run([np.arange(4)], [])
    np.testing.assert_array_equal(run(program, 4), truth)


def test_builder_checks_operands() -> None:
    builder = ProgramBuilder(ThreadPool(1), 4)
    x = builder.input("x", "float32", ["T", 6])
    other = builder.input("other", "float32", ["R", 6])
    weight = builder.constant(np.ones(5, np.float32))
    with pytest.raises(ValueError, match=r"rms_norm's weight: expected a constant float32 \[6\], got float32 \[5\]"):
        builder.rms_norm(x, weight, 1e-5)
    with pytest.raises(ValueError, match=r"add: expected the right side to be float32 \[T, 6\] or a constant"):
        builder.add(x, other)
    with pytest.raises(ValueError, match=r"columns: 3 columns from 4 on are not inside float32 \[T, 6\]"):
        builder.columns(x, 4, 3)
    with pytest.raises(ValueError, match=r"linear's packed weight: expected a constant int8 \[1, 2, 16, 4\]"):
        builder.linear(x, builder.constant(pack(np.ones((9, 5), np.int8))), weight)
    packed = builder.constant(pack(np.ones((6, 5), np.int8)))
    with pytest.raises(ValueError, match="on a grid the bias and the residual are added afterwards; use add"):
        builder.linear(x, packed, weight, weight, input_step=0.1)
    with pytest.raises(ValueError, match="expected 1 digit of activations, or up to 2 on a grid, got 2"):
        builder.linear(x, packed, weight, num_digits=2)
    with pytest.raises(ValueError, match=r"round_to_grid's step: expected a constant float32 \[6\], got float32 \[5\]"):
        builder.round_to_grid(x, weight, 127)
    with pytest.raises(ValueError, match="round_to_grid: expected 1 to 8388608 levels, got 0"):
        builder.round_to_grid(x, builder.constant(np.ones(1, np.float32)), 0)
    with pytest.raises(ValueError, match="there is no value 99"):
        builder.sigmoid(99)
    with pytest.raises(ValueError, match="output 'y' is not the result of an operator"):
        builder.output("y", x)
    with pytest.raises(ValueError, match="unknown dimension 'Q'; expected a size, T, R, P or W"):
        builder.input("q", "float32", ["Q"])
    with pytest.raises(ValueError, match="a program cannot use values of type float64"):
        builder.constant(np.ones(3))
    with pytest.raises(ValueError, match="a constant must be contiguous"):
        builder.constant(np.ones((3, 3), np.float32).T)
    with pytest.raises(ValueError, match="the program has no output"):
        builder.build()
    builder.output("y", builder.sigmoid(x))
    builder.build()
    with pytest.raises(ValueError, match="the program has been built"):
        builder.sigmoid(x)


def test_pool_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="at least 1 thread, got 0"):
        ThreadPool(0)


def test_constants_live_as_long_as_the_program() -> None:
    builder = ProgramBuilder(ThreadPool(1), 4)
    x = builder.input("x", "float32", ["T", 2048])
    builder.output("y", builder.add(x, builder.constant(np.full(2048, 3, np.float32))))
    program = builder.build()
    del builder
    _ = [np.full(2048, 9, np.float32) for _ in range(50)]  # would be allocated in the place of a freed constant
    out = np.empty((1, 2048), np.float32)
    program.run([np.zeros((1, 2048), np.float32)], [out])
    assert (out == 3).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_share_of_a_table_has_zeros_for_other_rows(dtype: str) -> None:
    """The table holds rows 4 to 6 of 9; the indices include both neighbours and both ends."""
    builder = ProgramBuilder(ThreadPool(1), 16)
    table = np.arange(1, 10, dtype=dtype).reshape(3, 3)
    ids = builder.input("ids", "int64", ["T"])
    builder.output("y", builder.gather_share(builder.constant(table), ids, first=4, all_rows=9))
    program, found = builder.build(), np.full((7, 3), 99, np.float32)
    program.run([np.array([0, 3, 4, 5, 6, 7, 8])], [found])
    np.testing.assert_array_equal(found, np.concatenate([np.zeros((2, 3)), table, np.zeros((2, 3))]))
    for wrong in (-1, 9):
        with pytest.raises(IndexError, match=r"outside 0\.\.8"):
            program.run([np.array([wrong])], [found[:1]])


def test_picked_columns_past_the_last_are_zeros() -> None:
    builder = ProgramBuilder(ThreadPool(1), 16)
    value = builder.input("x", "float32", ["T", 5])
    with pytest.raises(ValueError, match="expected ranges inside or outside of 5 columns"):
        builder.pick_columns(value, [(4, 6)])
    builder.output("y", builder.pick_columns(value, [(3, 5), (0, 1), (5, 7), (4, 5)]))
    x, found = np.arange(1, 11, dtype=np.float32).reshape(2, 5), np.full((2, 6), 99, np.float32)
    builder.build().run([x], [found])
    np.testing.assert_array_equal(found, [[4, 5, 1, 0, 0, 5], [9, 10, 6, 0, 0, 10]])
