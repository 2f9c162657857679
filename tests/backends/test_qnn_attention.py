"""Attention over a static window on the emulated NPU: compared with float64, and engines compared with the CPU's."""

import functools
import json
import logging

import numpy as np
import pytest
from calibrated import calibrated
from constants import Constants
from fixture_checkpoints import checkpoint, input_ids
from float64_llama import float64_logits, sliding_mask
from relative_error import relative_error
from states import saved_arrays

import chunkrt
from chunkrt.backends.native.backend import NativeBackend
from chunkrt.backends.qnn import QnnBackend, find_soc, open_htp
from chunkrt.backends.qnn.executable import BoundBuffers
from chunkrt.checkpoints.source import weights_digest
from chunkrt.compile.calibrate import calibrate
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.npu_attention import near_plans
from chunkrt.engine.options import EngineOptions
from chunkrt.engine_directory.figures import subgraph_figures
from chunkrt.engine_directory.manifest import CONTEXTS
from chunkrt.errors import BackendError, CompileError, ConfigError
from chunkrt.graph.plan import DOMAIN, Node, Plan, Subgraph, Tensor, linear_weights
from chunkrt.quant.merging import merge
from chunkrt.quant.scheme import find_scheme
from chunkrt.runtime.request import Request

pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
if not open_htp().is_emulated:
    pytest.skip("this machine has an NPU, and a compiler for that NPU alone", allow_module_level=True)

ROWS, CHUNK, VOCABULARY = 32, 16, 48
TOLERANCE = 2.0**-8
"""Tolerance of attention's output (root mean square): float16 in the scores, the shares and both sums, 2^-11 each."""
LOGIT_TOLERANCE = 2.0**-6
"""Tolerance of logits, against attention on the CPU under the same scheme; it includes values that move to another
step."""
FAMILIES = [
    "gemma2",
    "gemma3_scaled",
    "gemma3_window_5",
    "gemma4",
    "gpt_oss_plain",
    "lfm2",
    "llama_biased",
    "llama_gqa",
    "mistral_window_5",
    "phi3_longrope_short",
    "qwen2_window",
    "qwen3",
    "qwen3_5",
    "qwen3_next",
]


class OneAttention:
    """One node over a number of past slots: its plan, its state and its result in float64."""

    def __init__(
        self,
        heads,
        kv_heads,
        dim,
        past,
        *,
        rotary=None,
        window=0,
        capacity=2200,
        soft_cap=0.0,
        sinks=(),
        kept=None,
        is_int8=False,
        seed=0,
    ):
        rng = np.random.default_rng(seed)
        rotary = rotary or dim
        self.heads, self.kv_heads, self.dim, self.rotary, self.window = heads, kv_heads, dim, rotary, window
        self.past, self.kept, self.is_int8 = past, kept, is_int8
        symbol = "W" if window and kept is None else "P"
        slots = past if symbol == "W" else capacity
        angles = np.outer(np.arange(capacity), 10000.0 ** (-np.arange(0, rotary, 2) / rotary))
        self.tables = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
        self.soft_cap, self.sinks = soft_cap, np.array(sinks or [-np.inf] * heads)
        if sinks:
            self.tables["sinks"] = np.float32(sinks)
        form = (kv_heads, slots, dim + 4 * -(-dim // 32)), np.int8
        form = form if is_int8 else ((kv_heads, slots, dim), np.float16)
        self.caches = {name: np.zeros(*form) for name in ("keys", "values")}
        self.history = {name: rng.normal(size=(kv_heads, capacity, dim)) for name in self.caches}
        columns = (heads + 2 * kv_heads) * dim
        tensors = [
            Tensor(name="qkv", dtype="float32", shape=("T", columns)),
            Tensor(name="position", dtype="int64", shape=(1,)),
            Tensor(name="out", dtype="float32", shape=("T", heads * dim)),
            *(
                Tensor(name=name, dtype="float32", shape=table.shape, kind="weight")
                for name, table in self.tables.items()
            ),
            *(Tensor(name=name, dtype="float32", shape=(kv_heads, symbol, dim), kind="state") for name in self.caches),
        ]
        node = Node(
            name="attention",
            op="CachedAttention",
            domain=DOMAIN,
            inputs=("qkv", "position", "position", "cos", "sin", "keys", "values", *(["sinks"] if sinks else [])),
            outputs=("out",),
            attributes={
                "num_heads": heads,
                "num_kv_heads": kv_heads,
                "head_dim": dim,
                "rotary_dim": rotary,
                "scale": dim**-0.5,
                "window": window,
                "past_slots": past,
                **({"soft_cap": soft_cap} if soft_cap else {}),
                **({} if kept is None else {"kept_slots": kept}),
                **({"int8_caches": 1} if is_int8 else {}),
            },
        )
        self.subgraph = Subgraph(
            name="dynamic.0",
            device="npu",
            is_static=False,
            rows="T",
            nodes=(node,),
            inputs=("qkv", "position"),
            outputs=("out",),
            weights=tuple(self.tables),
            state=("keys", "values"),
        )
        self.plan = Plan(
            family="attention",
            subgraphs=(self.subgraph,),
            tensors={tensor.name: tensor for tensor in tensors},
            inputs=("position",),
            output="out",
            vocab_size=columns,
            context_length=capacity,
        )

    def compile(self, folder, rows=ROWS):
        backend = QnnBackend(find_soc("SM8650"), contexts=folder)
        return backend.compile(self.subgraph, self.plan, rows, find_scheme("w8a16"), Constants(self.tables))

    def append(self, position, num_rows):
        """Write the history's values at some positions into the caches."""
        for name, cache in self.caches.items():
            for place in range(position, position + num_rows):
                row = self.history[name][:, place]
                cache[:, place % cache.shape[1]] = in_int8(row) if self.is_int8 else row

    def read(self, rows):
        """Return the values of rows of a cache, in float64."""
        return from_int8(rows, self.dim) if self.is_int8 else rows.astype(np.float64)

    def remember(self, position):
        """Fill the caches with the history before a position, each slot with its last; other slots hold values that
        must not be read."""
        for cache in self.caches.values():
            cache[...] = 100 if self.is_int8 else 1000
        self.append(0, position)

    def expected(self, qkv, position):
        """Return output [T, heads * dim], new keys and values [kv_heads, T, dim], in float64."""
        rows = len(qkv)
        by_head = qkv.astype(np.float64).reshape(rows, -1, self.dim).transpose(1, 0, 2)
        q, k, v = np.split(by_head, [self.heads, self.heads + self.kv_heads])
        q, k = (self._rotated(x, position) for x in (q, k))
        past = {name: values[:, :position] for name, values in self.history.items()}
        past = {name: self.read(in_int8(x) if self.is_int8 else x.astype(np.float16)) for name, x in past.items()}
        keys, values = (
            np.concatenate([past[name], new], axis=1).repeat(self.heads // self.kv_heads, axis=0)
            for name, new in (("keys", k), ("values", v))
        )
        scores = q @ keys.transpose(0, 2, 1) * self.dim**-0.5
        place, row = np.arange(position + rows), np.arange(rows)[:, None] + position
        sees = place <= row
        if self.window:
            sees &= place > row - self.window
        elif self.kept is not None:
            sees &= (place < self.kept) | (place > row - (self.past - self.kept))
        if self.soft_cap:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        scores = np.where(sees, scores, -np.inf)
        sinks = self.sinks[:, None, None]
        largest = np.maximum(scores.max(-1, keepdims=True), sinks)
        shares = np.exp(scores - largest)
        shares /= shares.sum(-1, keepdims=True) + np.exp(sinks - largest)
        return (shares @ values).transpose(1, 0, 2).reshape(rows, -1), k, v

    def _rotated(self, x, position):
        half = self.rotary // 2
        cos, sin = (
            table[position : position + x.shape[1]].astype(np.float64)
            for table in (self.tables["cos"], self.tables["sin"])
        )
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    def learn(self, position, num_rows):
        """Copy the values that a run has written into the history."""
        for name, cache in self.caches.items():
            places = np.arange(position, position + num_rows)
            self.history[name][:, places] = self.read(cache[:, places % cache.shape[1]])

    def rows(self, num_rows, seed=1):
        columns = (self.heads + 2 * self.kv_heads) * self.dim
        return np.random.default_rng(seed).normal(size=(num_rows, columns)).astype(np.float32)

    def run(self, executable, qkv, position, history=None):
        found = np.full((len(qkv), self.heads * self.dim), np.nan, np.float32)
        inputs = {"qkv": qkv, "position": np.array([position]), **self.caches}
        executable.run_after(inputs, {"out": found}, history)
        return found

    def check(self, executable, position, num_rows, history=None):
        qkv = self.rows(num_rows)
        if history is None:
            self.remember(position)
        before = {name: cache.copy() for name, cache in self.caches.items()}
        found = self.run(executable, qkv, position, history)
        output, *new = self.expected(qkv, position)
        assert relative_error(found, output) < TOLERANCE
        places = np.arange(position, position + num_rows) % self.caches["keys"].shape[1]
        others = np.setdiff1d(np.arange(self.caches["keys"].shape[1]), places)
        for (name, cache), rows in zip(self.caches.items(), new, strict=True):
            written = self.read(cache[:, places])
            if self.is_int8:
                steps = in_int8(rows)
                steps[..., : self.dim] = 1
                steps = from_int8(steps, self.dim)
                in_float16 = 127 * 3 * 2.0**-11  # three roundings of the largest value of a group
                assert (np.abs(written - rows) <= (0.5 + in_float16) * steps).all()
            else:
                assert relative_error(written, rows) < 2.0**-10
            np.testing.assert_array_equal(cache[:, others], before[name][:, others])


def in_int8(values):
    """Return rows of an int8 cache: the integers of a row, then the float32 scale of each 32 values."""
    parts = np.split(values.astype(np.float64), range(32, values.shape[-1], 32), axis=-1)
    scales = [np.float32(np.abs(part).max(-1, keepdims=True) / 127) for part in parts]
    integers = [np.rint(part / scale).astype(np.int8) for part, scale in zip(parts, scales, strict=True)]
    return np.concatenate([*integers, *(scale.view(np.int8) for scale in scales)], axis=-1)


def from_int8(rows, dim):
    """Return the values of rows of an int8 cache, in float64."""
    scales = np.ascontiguousarray(rows[..., dim:]).view(np.float32).astype(np.float64)
    return rows[..., :dim] * scales.repeat(32, axis=-1)[..., :dim]


SIZES = {
    "smollm2": (9, 3, 64, 64),
    "gemma3-270m": (4, 1, 256, 256),
    "qwen2.5-0.5b": (14, 2, 64, 64),
    "qwen3-0.6b": (16, 8, 128, 128),
    "llama3.2-1b": (32, 8, 64, 64),
    "llama3.1-8b": (32, 8, 128, 128),
    "phi3": (32, 32, 96, 96),
    "qwen3.5": (8, 2, 256, 64),
    "odd": (4, 2, 10, 10),
    "partly-rotated": (6, 2, 16, 8),
}
"""Heads, heads of keys and values, head dim, rotated columns."""
QUICK = [("partly-rotated", 512)]


@pytest.mark.parametrize(
    ("model", "past"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in ((model, past) for model in SIZES for past in (512, 2048))
    ],
)
def test_attention_equals_float64(model, past, tmp_path):
    heads, kv_heads, dim, rotary = SIZES[model]
    one = OneAttention(heads, kv_heads, dim, past, rotary=rotary)
    executable = one.compile(tmp_path)
    for position in (0, 1, 31, 32, past - 1, past):
        for num_rows in (1, ROWS):
            one.check(executable, position, num_rows)
    with pytest.raises(BackendError, match=f"{past} positions of history, but has {past + 1}"):
        one.check(executable, past + 1, 1)


@pytest.mark.parametrize(
    ("window", "soft_cap", "sinks"),
    [
        (0, 1.5, []),
        (5, 0.0, [0.5, 9.0, -2.0, 100.0]),
        pytest.param(5, 1.5, [2.0, -1.0, 0.0, 3.0], marks=pytest.mark.slow),
    ],
)
def test_soft_caps_and_sinks_equal_float64(window, soft_cap, sinks, tmp_path):
    one = OneAttention(4, 2, 16, 64, window=window, soft_cap=soft_cap, sinks=sinks)
    executable = one.compile(tmp_path)
    for position in (0, 33, 64):
        one.check(executable, position, ROWS)


@pytest.mark.parametrize(
    ("window", "slots"),
    [(5, 64), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(64, 128), (33, 64)])],
)
def test_ring_is_read_by_its_window(window, slots, tmp_path):
    one = OneAttention(4, 2, 16, slots, window=window)
    executable = one.compile(tmp_path)
    for position in (0, 1, window - 1, window, slots - 1, slots, slots + 7, 5 * slots + 3):
        for num_rows in (1, 7, ROWS):
            one.check(executable, position, num_rows)


@pytest.mark.parametrize(
    ("model", "window", "kept"),
    [
        ("partly-rotated", 0, None),
        *(
            pytest.param(model, window, kept, marks=pytest.mark.slow)
            for model, window, kept in [("smollm2", 0, None), ("odd", 0, None), ("phi3", 40, None), ("qwen3.5", 0, 4)]
        ),
    ],
)
def test_attention_over_int8_caches_equals_float64(model, window, kept, tmp_path):
    heads, kv_heads, dim, rotary = SIZES[model]
    one = OneAttention(heads, kv_heads, dim, 64, rotary=rotary, window=window, kept=kept, is_int8=True)
    executable = one.compile(tmp_path)
    for position in (0, 1, 31, 32, 64, *([200] if window or kept is not None else [])):
        for num_rows in (1, 7, ROWS):
            one.check(executable, position, num_rows)


def test_int8_caches_have_the_bits_of_the_native_backend(tmp_path):
    """The values are exact in float16, and the keys are not rotated."""
    one = OneAttention(4, 2, 40, 64, is_int8=True)
    one.tables["cos"][...], one.tables["sin"][...] = 1, 0
    npu = one.compile(tmp_path)
    native = NativeBackend(1).compile(one.subgraph, one.plan, ROWS, find_scheme("w8a16"), Constants(one.tables))
    qkv = one.rows(20).astype(np.float16).astype(np.float32)
    qkv[3] = 0
    one.run(npu, qkv, 5)
    found = {name: cache.copy() for name, cache in one.caches.items()}
    for cache in one.caches.values():
        cache[...] = 0
    native.run({"qkv": qkv, "position": np.array([5]), **one.caches}, {"out": np.empty((20, 160), np.float32)})
    for name, cache in one.caches.items():
        assert cache.any()
        np.testing.assert_array_equal(found[name], cache)


def test_shorter_chunk_is_padded_inside(tmp_path):
    one = OneAttention(4, 2, 16, 64)
    executable = one.compile(tmp_path, rows=8)
    for num_rows in range(1, 9):
        one.check(executable, 20, num_rows)


def entered_keys(monkeypatch):
    """Return a list that is filled with the slots of keys that enter the NPU's buffers."""
    entered, enter_at = [], BoundBuffers.enter_at

    def noted(place, name, slots, array):
        entered.extend(slots if name == "keys" else [])
        enter_at(place, name, slots, array)

    monkeypatch.setattr(BoundBuffers, "enter_at", noted)
    return entered


@pytest.mark.parametrize("window", [0, pytest.param(40, marks=pytest.mark.slow)])
def test_only_new_history_enters(window, tmp_path, monkeypatch):
    one = OneAttention(4, 2, 16, 128, window=window)
    executable = one.compile(tmp_path)
    entered = entered_keys(monkeypatch)
    for position, num_rows, history, missing in [
        (0, 32, 1, 0),
        (32, 20, 1, 0),  # the graph's results are in the buffers
        (52, 1, 1, 0),
        (60, 3, 1, 7),  # another processor continued
        (63, 1, 1, 0),
        (60, 4, 2, 60),  # the state was rewound, and continued
        (20, 5, 3, 20),
        (25, 32, 3, 0),
        (90, 32, 3, 33),
        (127, 1, 3, 5),
    ]:
        one.append(position - missing, missing)
        entered.clear()
        one.check(executable, position, num_rows, history)
        assert len(entered) == missing + num_rows
        one.learn(position, num_rows)
    last = one.run(executable, one.rows(1), 128, history=3)
    for cache in one.caches.values():
        cache[...] = 0
    one.run(executable, one.rows(1), 0, history=4)
    assert np.any(one.run(executable, one.rows(1), 128, history=3) != last), "what it keeps is another history's"


@pytest.mark.parametrize(
    ("past", "kept"), [(64, 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(64, 0), (48, 1), (33, 31)])]
)
def test_window_slides_over_longer_histories(past, kept, tmp_path):
    """Each row sees the first positions and the last ones up to its own, at their true positions."""
    one = OneAttention(4, 2, 16, past, kept=kept)
    executable = one.compile(tmp_path)
    for position in (0, 1, kept, past - 1, past, past + 1, 2 * past - kept, 3 * past + 5, 2000):
        for num_rows in (1, 7, ROWS):
            one.check(executable, position, num_rows)


@pytest.mark.parametrize("npu_window", [8, 64])
def test_layer_sees_its_own_window_while_others_slide(npu_window, tmp_path):
    """In Gemma 4, later layers read the cache of a layer with a window of 9, so that the cache holds all positions."""
    options = EngineOptions(npu="qnn", attention="npu", npu_window=npu_window, npu_sinks=2)
    plan = plan_checkpoint(checkpoint("gemma4"), {}).plan
    (near,) = near_plans(plan, {}, options, plan.context_length)
    nodes = {
        node.name: node.attributes for s in near.plan.subgraphs for node in s.nodes if "past_slots" in node.attributes
    }
    whole = [name for name, attributes in nodes.items() if not attributes["window"]]
    assert whole
    assert all((nodes[name]["past_slots"], nodes[name]["kept_slots"]) == (npu_window, 2) for name in whole)
    of_layer = nodes["model.layers.1.self_attn.attention"]
    assert of_layer["window"] == 9
    one = OneAttention(4, 2, 16, of_layer["past_slots"], window=9, kept=of_layer["kept_slots"])
    executable = one.compile(tmp_path)
    for position in (0, 7, 8, 9, 63, 64, 65, 300):
        for num_rows in (1, 7, ROWS):
            one.check(executable, position, num_rows)


def test_only_new_history_enters_a_window_that_slides(tmp_path, monkeypatch):
    one = OneAttention(4, 2, 16, 64, kept=4)
    executable = one.compile(tmp_path)
    entered = entered_keys(monkeypatch)
    for position, num_rows, history, missing, num_entered in [
        (0, 32, 1, 0, 32),
        (32, 32, 1, 0, 32),
        (64, 32, 1, 0, 32),
        (96, 1, 1, 0, 1),
        (100, 3, 1, 3, 6),  # another processor continued
        (303, 1, 1, 200, 61),  # for longer than the window
        (50, 5, 2, 50, 55),  # the state was rewound, and continued
        (90, 5, 3, 90, 69),
    ]:
        one.append(position - missing, missing)
        entered.clear()
        one.check(executable, position, num_rows, history)
        assert len(entered) == num_entered
        one.learn(position, num_rows)


@pytest.fixture(scope="module")
def load(own_home):
    """Return a function that loads a tiny checkpoint with a calibration of its own prompt."""

    def load(name, **options):
        path = own_home / f"{name}.npz"
        if not path.exists():
            calibrated(name, path, input_ids(name))
        given = {"npu": "qnn", "scheme": "w8a16", "calibration": path, "chunk_length": CHUNK, "threads": 2}
        return chunkrt.load(checkpoint(name), **(given | {"prefix_cache": "off"} | options))

    return load


def tokens_of(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, num_tokens)


FEW_OR_MANY = pytest.mark.parametrize(
    ("num_tokens", "num_decoded"), [(80, 2), pytest.param(100, 4, marks=pytest.mark.slow)], ids=["few", "many"]
)
"""Numbers of tokens: of a prompt, and of single tokens after it."""


def tell(engine, num_tokens=80, num_decoded=2):
    """Return logits of a prompt, longer than most windows, and of some single tokens after it."""
    session, tokens = engine.session(), tokens_of(num_tokens + num_decoded)
    logits = session.prefill(tokens[:num_tokens], logits="all").logits
    return np.vstack([logits, *(session.prefill([int(token)]).logits for token in tokens[num_tokens:])])


@pytest.fixture(scope="module")
def with_attention_on_the_cpu(load):
    """Return a function from a checkpoint's name to the results with attention on the CPU."""

    @functools.cache
    def told(name, *numbers):
        with load(name, attention_math="float32") as engine:  # the default depends on the processor
            return tell(engine, *numbers)

    return told


def num_on_npu(executor):
    return sum(subgraph.device == "npu" for subgraph in executor.plan.subgraphs)


@pytest.mark.sampled(every=5, num_tokens=[80], name=["phi3_longrope_short"])
@FEW_OR_MANY
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "how",
    [
        {"npu_window": 64},
        {"npu_window": "32,64,4096"},
        {"npu_window": 128, "weights": "npu-only"},
        {"npu_window": 48, "npu_graph": "layers=1", "decode_on": "npu"},
    ],
)
def test_every_family_attends_on_the_npu(load, with_attention_on_the_cpu, name, how, num_tokens, num_decoded):
    with load(name, attention="npu", **how) as engine:
        found = tell(engine, num_tokens, num_decoded)
        fewer = num_tokens - 7  # and still beyond the point where phi3's tables change
        np.testing.assert_array_equal(tell(engine, fewer, 0), found[:fewer])
    assert relative_error(found, with_attention_on_the_cpu(name, num_tokens, num_decoded)) < LOGIT_TOLERANCE


@pytest.mark.parametrize("options", [{}, {"weights": "npu-only"}, {"npu_graph": "layers=1", "chunk_length": "1,8,32"}])
@pytest.mark.parametrize("sinks", [4, pytest.param(0, marks=pytest.mark.slow)])
def test_sliding_decoder_equals_float64(load, tmp_path, options, sinks):
    """The prompt is three times as long as the window; chunk lengths do not matter. The reference is a decoder in
    float64, with the same integers as weights, whose rows see the same positions.
    """
    decoder, path = plan_checkpoint(checkpoint("llama_gqa"), {}), tmp_path / "same tokens.npz"
    digest = weights_digest(decoder.source)
    # Rows that do not see the first tokens have larger activations, as the first rows of other prompts have.
    prompts = [tokens_of(96)[start:] for start in range(0, 96, 8)]
    record = functools.partial(calibrate, decoder.plan, decoder.load, model="same tokens", weights=digest)
    merge({str(len(prompt)): record(prompt) for prompt in prompts}).save(path)
    options = {**options, "npu_window": "16,32", "npu_sinks": sinks, "calibration": path, "decode_on": "npu"}
    with load("llama_gqa", attention="npu", **options) as engine:
        assert engine.loaded.scheduler.executors.prompts in engine.loaded.scheduler.executors.near
        found = tell(engine, 96, 0)
        stored = {name: engine.loaded.weights.linear(name) for name in linear_weights(engine.plan)}
    tensors = decoder.plan.tensors.values()
    weights = {t.name: decoder.load(t.name).astype(np.float64) for t in tensors if t.kind == "weight"}
    weights |= {name: integers * scale.astype(np.float64) for name, (integers, scale) in stored.items()}
    config, tokens = json.loads((checkpoint("llama_gqa") / "config.json").read_text()), tokens_of(96)
    expected = float64_logits(config, weights, tokens, sliding_mask(96, 32, sinks))
    whole = float64_logits(config, weights, tokens)
    assert relative_error(found, expected) < LOGIT_TOLERANCE
    assert relative_error(found[32:], whole[32:]) > 4 * relative_error(found[32:], expected[32:])


def test_sliding_window_needs_no_other_contexts(load):
    """Masks are inputs, so the graphs of a window are the same whether it slides or not."""
    given = {"attention": "npu", "npu_window": 32, "npu_graph": "layers=1", "decode_on": "npu"}
    load("llama_gqa", **given).close()
    with load("llama_gqa", npu_sinks=4, **given) as engine:
        assert engine.loaded.npu_backend.num_compiled == 0


def test_layers_with_a_window_do_not_see_the_first_tokens(load, with_attention_on_the_cpu):
    """Every layer has a window, in a ring that the graph reads completely, so nothing is approximated."""
    with load("mistral_window_5", attention="npu", npu_window=32, npu_sinks=4) as engine:
        found = tell(engine)
    assert relative_error(found, with_attention_on_the_cpu("mistral_window_5")) < LOGIT_TOLERANCE


def test_windows_that_slide_need_decode_on_the_npu(load):
    """The CPU would see all positions, so that a text would depend on the processor that decodes it."""
    given = {"attention": "npu", "npu_window": 32, "npu_sinks": 4}
    expected = (
        "with `npu_sinks=4` prompts on the NPU see 32 positions, but tokens that the CPU decodes would see all; choose "
        "`decode_on='npu'`, or compile without `npu_sinks`"
    )
    for decode_on in ("cpu", "auto"):
        with pytest.raises(ConfigError) as error:
            load("llama_gqa", decode_on=decode_on, **given)
        assert str(error.value) == expected
    load("llama_gqa", context_length=32, **given).close()  # the window holds the context, so it does not slide
    with load("llama_gqa", decode_on="npu", **given) as engine, engine.session() as session:
        prompt = tokens_of(64)
        session.prefill(prompt[:63])
        decoded = session.prefill(prompt[63:]).logits  # a single token
        whole = engine.session().prefill(prompt, logits="all").logits
    assert relative_error(decoded, whole[-1:]) < LOGIT_TOLERANCE


def test_layer_with_a_window_computes_the_same_as_on_the_cpu_while_it_slides(load, with_attention_on_the_cpu):
    """Only this layer of Gemma 4 is on the NPU, whose window is shorter than the layer's."""
    placement = {"model.layers.1.self_attn": "npu"}
    with load("gemma4", placement=placement, npu_window=8, npu_sinks=2, decode_on="npu") as engine:
        assert num_on_npu(engine.loaded.scheduler.executors.near[-1])
        found = tell(engine)
    assert relative_error(found, with_attention_on_the_cpu("gemma4")) < LOGIT_TOLERANCE


def test_complete_decoder_is_one_graph(load):
    with load("llama_gqa", attention="npu", npu_window=128) as engine:
        lanes = engine.loaded.scheduler.executors
        assert [subgraph.name for subgraph in lanes.prompts.plan.subgraphs][0::2] == ["embedding", "head"]
        assert num_on_npu(lanes.prompts) == 1
        result = engine.session().prefill(tokens_of(33))
        assert sum(event.processor == "npu" for event in result.events) == result.num_chunks == 3
    with load("llama_gqa", attention="npu", npu_window=128, npu_graph="layers=1") as engine:
        nodes = [node for subgraph in engine.plan.subgraphs for node in subgraph.nodes]
        num_layers = sum(node.op == "CachedAttention" for node in nodes)
        assert num_on_npu(engine.loaded.scheduler.executors.prompts) == num_layers > 1


def test_failed_run_leaves_the_state_unchanged(load, monkeypatch):
    with load("llama_gqa", attention="npu", npu_window=48) as engine:
        session = engine.session()
        session.prefill(tokens_of(20))
        before = saved_arrays(session)
        executable = engine.loaded.scheduler.executors.near[0].subgraphs[1]
        monkeypatch.setattr(executable, "run", fails)
        with pytest.raises(BackendError, match="it is gone"):
            session.prefill(tokens_of(40, seed=2))
        monkeypatch.undo()
        assert session.position == 20
        for name, array in saved_arrays(session).items():
            np.testing.assert_array_equal(array, before[name])


def fails(*_):
    raise BackendError("it is gone")


def test_npu_only_keeps_no_cpu_copy_of_weights(load, monkeypatch):
    compiled = []
    from chunkrt.backends.native.backend import NativeBackend

    compile_on_cpu = NativeBackend.compile

    def noted(self, subgraph, *arguments):
        compiled.append(subgraph)
        return compile_on_cpu(self, subgraph, *arguments)

    monkeypatch.setattr(NativeBackend, "compile", noted)
    with load("llama_gqa", weights="npu-only") as engine:
        engine.session().prefill(tokens_of(20))
    linears = [node for subgraph in compiled for node in subgraph.nodes if node.op == "MatMul"]
    assert [node.inputs[1] for node in linears] == ["lm_head.weight"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "gpu"}, "attention"),
        ({"attention": "npu", "npu": "native"}, "contradict"),
        ({"attention": "npu", "context_shift": True}, "`attention='cpu'`"),
        ({"attention": "npu", "attention_math": "bfloat16"}, "is supported for attention on the CPU only"),
        ({"npu_window": 0}, "`npu_window` is 0"),
        ({"npu_window": "512,512"}, "npu_window"),
        ({"npu_window": "512;4"}, "npu_window"),
        ({"npu_graph": "layers=0"}, "npu_graph"),
        ({"npu_graph": "2"}, "npu_graph"),
        ({"npu_sinks": -1}, "`npu_sinks` is -1"),
        ({"npu_sinks": 1.5}, r"`npu_sinks` is 1\.5"),
        ({"npu_sinks": 64, "npu_window": "32,64"}, "must be smaller than the longest `npu_window`, 64"),
        ({"weights": "npu"}, "npu-only"),
        ({"weights": "npu-only", "npu": "native"}, "contradict"),
        ({"weights": "npu-only", "on_npu_failure": "fallback"}, "the CPU cannot take over"),
    ],
)
def test_invalid_options_are_refused(load, options, message):
    with pytest.raises(ConfigError, match=message):
        load("llama_gqa", **options)


@pytest.mark.slow
def test_layers_are_placed_one_by_one(load, with_attention_on_the_cpu):
    placement = {"model.layers.1.self_attn": "npu"}
    with load("llama_gqa", placement=placement, npu_window=64) as engine:
        near, far = engine.loaded.scheduler.executors.near[0], engine.loaded.scheduler.executors.prompts
        names = [[node.name for node in s.nodes if node.op == "CachedAttention"] for s in near.plan.subgraphs]
        devices = {name: s.device for s, found in zip(near.plan.subgraphs, names, strict=True) for name in found}
        assert {name.split(".")[2]: device for name, device in devices.items()} == {"0": "cpu", "1": "npu"} | {
            str(layer): "cpu" for layer in range(2, len(devices))
        }
        assert all(s.device == "cpu" for s in far.plan.subgraphs if s.state)
        found = tell(engine)
    assert relative_error(found, with_attention_on_the_cpu("llama_gqa")) < LOGIT_TOLERANCE


def test_options_for_qualcomms_npu_are_reported_without_one(load, caplog):
    with caplog.at_level(logging.WARNING), load("llama_gqa", npu="auto", attention="npu", weights="npu-only"):
        assert "`attention='npu'` has no effect, because the CPU serves as the NPU" in caplog.text
        assert "`weights='npu-only'` has no effect" in caplog.text


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama_gqa", {"npu_window": "32,64"}),
        pytest.param("qwen3", {"npu_window": 128, "weights": "npu-only"}, marks=pytest.mark.slow),
        pytest.param("gemma3_window_5", {"npu_window": 48, "decode_on": "npu"}, marks=pytest.mark.slow),
        pytest.param("lfm2", {"npu_window": 64}, marks=pytest.mark.slow),
    ],
)
def test_int8_caches_on_the_npu_equal_those_on_the_cpu(load, name, options):
    with load(name, attention="npu", cache_dtype="int8", **options) as engine:
        assert engine.cache_dtype == "int8"
        assert engine.loaded.scheduler.executors.near
        found = tell(engine)
    with load(name, attention="cpu", cache_dtype="int8") as engine:
        assert relative_error(found, tell(engine)) < 2 * LOGIT_TOLERANCE  # integers that move to another step


def test_int8_caches_take_half_the_bytes_of_a_window(load):
    histories = {}
    for cache_dtype in ("float16", "int8"):
        with load("llama_gqa", attention="npu", npu_window=64, cache_dtype=cache_dtype) as engine:
            plan = engine.loaded.scheduler.executors.near[0].plan
            figures = subgraph_figures(plan, find_scheme("w8a16"), chunk_length=CHUNK)
            histories[cache_dtype] = sum(each.history_bytes for each in figures)
    shapes = [tensor.shape for tensor in plan.tensors.values() if tensor.kind == "state"]
    assert histories["float16"] == sum(2 * heads * 64 * dim for heads, _, dim in shapes)
    assert histories["int8"] == sum(heads * 64 * (dim + 2 * -(-dim // 32)) for heads, _, dim in shapes)


def test_attention_over_int8_caches_without_biases_of_keys_is_refused(load):
    with pytest.raises(ConfigError, match="int8 caches hold the keys of this model without their biases"):
        load("qwen2", attention="npu", cache_dtype="int8")


def test_prompts_and_decoding_sequences_take_turns(load):
    """With "auto", prompts and single tokens may use the same only executor with the NPU."""
    with load("llama_gqa", attention="npu", npu_window=128, decode_on="auto") as engine:
        lanes = engine.loaded.scheduler.executors
        of_prompt, decoding = (Request(tokens_of(count), engine.loaded.make_state()) for count in (50, 1))
        for request in (of_prompt, decoding):
            request.begin(engine.plan, 1)
        for last in (None, lanes.few, *lanes.near):
            taken = lanes.for_thread([decoding, of_prompt], last)
            assert taken is not None
            requests, lane = taken
            assert of_prompt in requests or lane is lanes.few
            after = lanes.for_thread([decoding, of_prompt], lane)
            assert of_prompt in requests or of_prompt in after[0]


def test_placed_attention_satisfies_strict_mode(load):
    placement = {"model.layers.1.self_attn": "npu"}
    with load("llama_gqa", placement=placement, npu_window=64, npu_strict=True) as engine:
        assert len(engine.loaded.scheduler.executors.near) == 1


def test_far_plan_without_the_npu_continues_after_the_near_plan(load):
    linears = dict.fromkeys(("model.layers.*.self_attn.qkv_proj", "model.layers.*.self_attn.o_proj"), "cpu")
    placement = {"": "cpu", "model.layers.*.self_attn": "npu", **linears}
    with load("llama_gqa", placement=placement, npu_window=32) as engine:
        assert all(s.device == "cpu" for s in engine.loaded.scheduler.executors.prompts.plan.subgraphs)
        found = tell(engine)
    with load("llama_gqa", npu="native") as engine:
        assert relative_error(found, tell(engine)) < LOGIT_TOLERANCE


def test_switched_off_operator_is_named(load):
    with pytest.raises(ConfigError, match=r"runs silu_mul .*omit `attention='npu'`"):
        load("llama_gqa", attention="npu", ops="-silu_mul")


@pytest.mark.slow
def test_engine_directory_has_the_graphs_of_all_plans_once(load, tmp_path, own_home):
    from chunkrt.engine.deploy import compile_engine
    from chunkrt.engine.options import EngineOptions

    load("lfm2").close()  # makes the calibration
    asked = {"scheme": "w8a16", "calibration": own_home / "lfm2.npz", "attention": "npu", "npu_window": "32,64"}
    options = EngineOptions(npu="qnn", **asked)
    folder = tmp_path / "out"
    written = compile_engine(str(checkpoint("lfm2")), folder, options, socs=["SM8650"], chunk_lengths=[CHUNK])
    contexts = [path for path in (folder / CONTEXTS).iterdir() if path.is_dir()]
    assert written["npu"][0]["contexts"] == len(contexts) == len(set(contexts))
    with chunkrt.load(folder, npu="qnn", threads=2, prefix_cache="off", attention="npu", npu_window="32,64") as engine:
        assert engine.loaded.npu_backend.num_compiled == 0
        found = tell(engine)
    with load("lfm2", attention="npu", npu_window="32,64") as engine:
        np.testing.assert_array_equal(tell(engine), found)


def test_engine_directory_keeps_int8_caches(tmp_path, load, own_home, monkeypatch):
    from chunkrt.engine.deploy import compile_engine

    load("llama_gqa").close()  # makes the calibration
    asked = {"scheme": "w8a16", "calibration": own_home / "llama_gqa.npz", "attention": "npu", "npu_window": 64}
    options = EngineOptions(npu="qnn", cache_dtype="int8", **asked)
    folder = tmp_path / "out"
    compile_engine(str(checkpoint("llama_gqa")), folder, options, socs=["SM8650"], chunk_lengths=[CHUNK])
    with chunkrt.load(folder, npu="qnn", threads=2, prefix_cache="off") as engine:
        assert (engine.cache_dtype, engine.loaded.npu_backend.num_compiled) == ("int8", 0)
        found = tell(engine)
    with load("llama_gqa", attention="npu", npu_window=64, cache_dtype="int8") as engine:
        np.testing.assert_array_equal(tell(engine), found)
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))  # without the contexts of other tests
    with pytest.raises(CompileError, match="`cache_dtype=float16` in place of int8"):
        chunkrt.load(folder, npu="qnn", threads=2, cache_dtype="float16")


def test_int8_caches_are_refused_for_a_host(tmp_path):
    from chunkrt.engine.deploy import compile_engine

    options = EngineOptions(npu="qnn", scheme="w8a16", attention="npu", context_length=64, cache_dtype="int8")
    with pytest.raises(ConfigError, match=r"reads int8 caches, which host\.json cannot describe; omit `cache_dtype`"):
        compile_engine(
            str(checkpoint("llama_gqa")), tmp_path / "out", options, socs=["SM8650"], chunk_lengths=[8], for_host=True
        )
