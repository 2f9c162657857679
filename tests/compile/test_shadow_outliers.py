"""Cost of outliers with and without a shadow, on every CPU backend; no other bit changes.

A synthetic model looks up tokens in a table and multiplies them by one linear, whose weights are multiples of a scale,
so that only activations are rounded. It is calibrated, quantised and cut like any decoder.
"""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from calibrated import calibrated
from hypothesis import given, settings
from native_cases import make_case, node, tensor

import chunkrt
from chunkrt.backends import BACKENDS, make_backend
from chunkrt.compile.calibrate import calibrate
from chunkrt.engine_directory.store import WeightStore, pack
from chunkrt.engine_directory.weights import write_weights
from chunkrt.graph.modules import Embedding, Module
from chunkrt.graph.ops import trace
from chunkrt.graph.parallel import ReplicatedLinear
from chunkrt.graph.partition import cut_shadowed, partition
from chunkrt.quant.scheme import SCHEMES
from chunkrt.runtime.policy import POLICIES

W8A8 = SCHEMES["w8a8"]
FLOAT, GRID = replace(W8A8, float_outputs=("*",)), W8A8
DEPTH, COLUMNS, NUM_TOKENS = 256, 48, 128
TABLE, WEIGHT = "embed.weight", "proj.weight"
outputs = pytest.mark.parametrize("scheme", [FLOAT, GRID], ids=["float outputs", "outputs on grids"])
backends = pytest.mark.parametrize("backend", BACKENDS)


class OneLinear(Module):
    """Rows of a table times a weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.proj = Embedding(NUM_TOKENS, DEPTH), ReplicatedLinear(DEPTH, COLUMNS)

    def forward(self, input_ids, _):
        return self.proj(self.embed(input_ids))


def as_stored(values):
    """Round values as in tables, which are stored in float16."""
    return values.astype(np.float16).astype(np.float32)


def drawn(seed):
    """Return a table that float16 holds, and a weight that int8 holds with a scale for each column."""
    rng = np.random.default_rng(seed)
    table = as_stored(rng.standard_normal((NUM_TOKENS, DEPTH)))
    integers = rng.integers(-127, 128, (DEPTH, COLUMNS))
    integers[0] = 127
    return table, integers.astype(np.float32) * np.float32(2.0**-9)


def error(backend, scheme, table, weight, folder):
    """Return the error of every token's row against exact products (root mean square)."""
    arrays, tokens = {TABLE: table, WEIGHT: weight}, np.arange(NUM_TOKENS)
    decoder = OneLinear().named()
    natural = replace(partition(trace(decoder), family="synthetic"), vocab_size=NUM_TOKENS, context_length=NUM_TOKENS)
    calibration = calibrate(natural, arrays.__getitem__, tokens, model="synthetic")
    graph = trace(decoder)
    cut_shadowed(graph, scheme.is_shadowed)
    plan = replace(partition(graph, family="synthetic"), vocab_size=NUM_TOKENS, context_length=NUM_TOKENS)
    assert sum(s.name.startswith("shadow") for s in plan.subgraphs) == bool(scheme.shadowed)
    path = folder / "weights"
    write_weights(plan, scheme, arrays.__getitem__, path, calibration=calibration)
    store, runner = WeightStore.open(path), make_backend(backend, threads=2)
    values = {"input_ids": tokens}
    for subgraph in plan.subgraphs:
        results = {n: np.empty((NUM_TOKENS, *plan.tensors[n].shape[1:]), np.float32) for n in subgraph.outputs}
        executable = runner.compile(subgraph, plan, NUM_TOKENS, scheme, store)
        executable.run({name: values[name] for name in subgraph.inputs}, results)
        values |= results
    path.unlink()
    return np.sqrt(np.mean((values[plan.output] - table.astype(np.float64) @ weight) ** 2))


@pytest.mark.sampled(every=9)
@backends
@outputs
@pytest.mark.parametrize("tokens", [slice(None), slice(3, 4), slice(0, None, 16)], ids=["all", "one", "some"])
@pytest.mark.parametrize("channel", [0, 100, DEPTH - 1])
def test_channel_a_thousand_times_larger_less_than_doubles_the_error(backend, scheme, tokens, channel, tmp_path):
    """Without a shadow the same channel costs ten times as much, and far more if it is large in every token."""
    table, weight = drawn(seed=channel)
    shadowed = replace(scheme, shadowed=("*",))
    before = error(backend, scheme, table, weight, tmp_path)
    table[tokens, channel] = as_stored(1000 * table[tokens, channel])
    with_shadow, without = (error(backend, s, table, weight, tmp_path) for s in (shadowed, scheme))
    assert with_shadow <= 2 * before
    assert without >= 10 * before


@backends
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=settings().max_examples // 6, deadline=None)
def test_channels_and_tokens_at_any_place(backend, data, seed, tmp_path_factory):
    """Their number is the shadow's share: half a hundredth of the values."""
    table, weight = drawn(seed)
    scheme, shadowed = GRID, replace(GRID, shadowed=("*",))
    folder = tmp_path_factory.mktemp("outliers", numbered=True)
    before = error(backend, scheme, table, weight, folder)
    place = st.tuples(st.integers(0, NUM_TOKENS - 1), st.integers(0, DEPTH - 1))
    for at in data.draw(st.sets(place, min_size=1, max_size=NUM_TOKENS * DEPTH // 200)):
        table[at] = as_stored(1000 * table[at])
    assert error(backend, shadowed, table, weight, folder) <= 2 * before


STEP, SCALE = 2.0**-5, 2.0**-9
NODES = [
    node("MatMul", "x w", "main"),
    node("ShadowLinear", "x w", "shadow", "chunkrt"),
    node("Add", "main shadow", "y"),
]
THRESHOLDS = [sign * steps for sign in (1, -1) for steps in (126.5, 127.0, 127.5, 128.0, 128.5)]


def linear_with_shadow(depth, columns, seed=0):
    """Return both halves and their sum in one subgraph, with powers of 2 as steps and scales; and the weight,
    float64."""
    names = [tensor(name, "T", columns) for name in ("main", "shadow", "y")]
    tensors = [tensor("x", "T", depth), tensor("w", depth, columns, kind="weight"), *names]
    scheme = replace(FLOAT, shadowed=("*",))
    subgraph, plan, _ = make_case(NODES, tensors, "y", scheme=scheme)
    integers = np.random.default_rng(seed).integers(-127, 128, (depth, columns)).astype(np.int8)
    arrays = {
        "w": pack(integers),
        "w.scale": np.full(columns, SCALE, np.float32),
        "w.input_step": np.float32([STEP]),
        "w.hot_channels": np.arange(0, depth, 5, dtype=np.int32),
    }
    return scheme, subgraph, plan, WeightStore(arrays, {"w": (depth, columns)}), integers * SCALE


def run(backend, case, x):
    scheme, subgraph, plan, weights, weight = case
    found = np.full((len(x), weight.shape[1]), np.nan, np.float32)
    make_backend(backend, threads=2).compile(subgraph, plan, 33, scheme, weights).run({"x": x}, {"y": found})
    return found


def check_error(backend, case, x):
    """Check the error: at most half a step of each input, as without outliers, plus float32's rounding of sums."""
    found, weight = run(backend, case, x), case[-1]
    x = x.astype(np.float64)
    is_beyond = np.abs(np.rint(x / STEP)) > 127
    rounded = np.where(is_beyond, 0, np.abs(x - np.rint(x / STEP) * STEP))
    size = (np.abs(x) + 127 * STEP * is_beyond) @ np.abs(weight)
    allowed = rounded @ np.abs(weight) + (len(weight) + 4) * 2.0**-23 * size
    assert (np.abs(found - x @ weight) <= allowed).all()
    assert (rounded <= STEP / 2).all()


elements = (
    st.sampled_from([steps * STEP for steps in THRESHOLDS])
    | st.sampled_from(
        [np.nextafter(np.float32(s * STEP), np.float32(to)).item() for s in THRESHOLDS for to in (0, 1e9)]
    )
    | st.floats(-130 * STEP, 130 * STEP, width=32)
    | st.floats(-1e6, 1e6, width=32)
    | st.just(0.0)
)


@backends
@given(data=st.data(), seed=st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_excess_over_the_grid_is_not_rounded(backend, data, seed):
    depth, columns, num_rows = (data.draw(st.sampled_from(sizes)) for sizes in ([1, 5, 33, 70], [1, 17], [1, 2, 33]))
    x = np.random.default_rng(seed).standard_normal((num_rows, depth)).astype(np.float32)
    places = st.tuples(st.integers(0, num_rows - 1), st.integers(0, depth - 1))
    for place, value in data.draw(st.lists(st.tuples(places, elements), max_size=60)):
        x[place] = value
    check_error(backend, linear_with_shadow(depth, columns, seed), x)


@backends
@pytest.mark.parametrize("steps", THRESHOLDS)
@pytest.mark.parametrize("to", [None, 0, np.inf], ids=["at", "below", "above"])
def test_both_halves_agree_on_the_threshold(backend, steps, to):
    """A value that the main half clips and the shadow skips, or that both count, has an error of one step instead of
    half."""
    value = np.float32(steps * STEP)
    if to is not None:
        value = np.nextafter(value, np.float32(np.copysign(to, value)))
    x = np.zeros((3, 33), np.float32)
    x[0, 4], x[1], x[2, ::2] = value, value, value
    check_error(backend, linear_with_shadow(33, 17), x)


@backends
@pytest.mark.parametrize("signs", [1, -1, 0], ids=["positive", "negative", "both"])
@pytest.mark.parametrize("factor", [1, 1000])
def test_every_channel_an_outlier(backend, signs, factor):
    rng = np.random.default_rng(0)
    x = rng.uniform(128, 1000, (33, 70)) * STEP * factor * (signs or rng.choice([-1, 1], (33, 70)))
    x = x.astype(np.float32)
    assert (np.abs(np.rint(x / STEP)) > 127).all()
    check_error(backend, linear_with_shadow(70, 41), x)


@backends
def test_chunk_of_zeros_gives_zeros(backend):
    assert (run(backend, linear_with_shadow(70, 41), np.zeros((33, 70), np.float32)) == 0).all()
    x = np.zeros((33, 70), np.float32)
    x[5, 6] = 1000
    found = run(backend, linear_with_shadow(70, 41), x)
    assert (np.delete(found, 5, axis=0) == 0).all()
    assert (found[5] != 0).any()


NAME, CHUNK, PROMPT = "llama_gqa", 8, np.random.default_rng(0).integers(0, 128, 45).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return an engine in which every linear except the LM head has a shadow."""
    path = tmp_path_factory.mktemp("ranges") / "ranges.npz"
    model = calibrated(NAME, path, np.random.default_rng(1).integers(0, 128, 128))
    return {"model": model, "scheme": "w8a8", "shadow": "all", "calibration": path}


def logits(model, **options):
    with chunkrt.load(**({"npu": "native", "threads": 2, "chunk_length": CHUNK} | model | options)) as engine:
        assert sum(s.name.startswith("shadow.") for s in engine.plan.subgraphs) == 12
        return engine.session().prefill(PROMPT, logits="all").logits


@pytest.fixture(scope="module")
def expected(model):
    return logits(model, threads=1, policy="sequential")


@pytest.mark.sampled(every=7)
@outputs
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_neither_policy_nor_threads_change_a_bit(model, expected, policy, threads, scheme):
    options = {"outputs": "float" if scheme is FLOAT else "grid"}
    truth = expected if scheme is FLOAT else logits(model, threads=1, policy="sequential", **options)
    np.testing.assert_array_equal(logits(model, policy=policy, threads=threads, **options), truth)


@pytest.mark.parametrize("chunk_length", [1, 7, 32, 64])
def test_chunks_change_no_bit(model, expected, chunk_length):
    np.testing.assert_array_equal(logits(model, chunk_length=chunk_length), expected)


def test_single_tokens_and_prefill_are_the_same(model, expected):
    """Decode takes the tokens one by one; prefill in chunks."""
    with chunkrt.load(npu="native", chunk_length=CHUNK, **model) as engine:
        session = engine.session()
        found = [session.prefill([token]).logits for token in PROMPT]
    np.testing.assert_array_equal(np.vstack(found), expected)


@pytest.mark.parametrize("backend", ["reference", "onnxrt"])
def test_backends_agree(model, backend):
    """Values between two steps may round to either side; see `check_backend`."""
    found, native = logits(model, npu=backend), logits(model, cache_dtype="float32")
    assert np.sqrt(np.mean((found - native) ** 2)) <= np.sqrt(np.mean(native**2)) / 32
