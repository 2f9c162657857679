"""Short convolutions on the emulated NPU: compared with the reference, and engines compared with the CPU's."""

from typing import ClassVar

import numpy as np
import pytest
from calibrated import calibrated
from constants import Constants
from relative_error import relative_error
from states import saved_arrays

import chunkrt
from chunkrt.backends.qnn import QnnBackend, find_soc, open_htp
from chunkrt.backends.qnn.executable import Context
from chunkrt.backends.recurrences import linear_attention
from chunkrt.engine.deploy import compile_engine
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import BackendError, ClosedError, ConfigError
from chunkrt.graph.plan import DOMAIN, Node, Plan, Subgraph, Tensor
from chunkrt.quant.scheme import find_scheme

pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
if not open_htp().is_emulated:
    pytest.skip("this machine has an NPU, and a compiler for that NPU alone", allow_module_level=True)

ROWS, CHUNK = 32, 16
TOLERANCE = 2.0**-9
"""Tolerance of an output (root mean square) with as few as 16 values: three inputs, taps, three products and a sum are
rounded to float16, at most 2^-11 each."""
LOGIT_TOLERANCE = 2.0**-6
"""Tolerance of logits against the CPU under the same scheme, as with attention on the NPU."""
ON_NPU = {"placement": {"model.layers.*.conv": "npu"}}


def gone_after(number):
    """Return a replacement of `Context.compute` that computes `number` times, and then fails."""
    calls, compute = [], Context.compute

    def fails_later(context, place):
        calls.append(1)
        if len(calls) > number:
            raise BackendError("it is gone")
        return compute(context, place)

    return fails_later


class OneConvolution:
    """One node: its plan, its state on the NPU and in the reference."""

    sizes: ClassVar = {"num_k_heads": 1, "num_v_heads": 1, "use_qk_l2norm": 0}

    def __init__(self, channels, taps=3, *, has_bias=False, seed=0):
        self.rng = np.random.default_rng(seed)
        self.channels = channels
        self.weights = {"taps": self.rng.normal(size=(channels, 1, taps)).astype(np.float32)}
        if has_bias:
            self.weights["bias"] = self.rng.normal(size=channels).astype(np.float32)
        self.state, self.expected_state = np.zeros((2, channels, taps - 1), np.float32)
        attributes = {"attn_type": "short_conv", **self.sizes, "head_k_dim": channels, "head_v_dim": channels}
        tensors = [
            Tensor(name="qkv", dtype="float32", shape=("T", 3 * channels)),
            Tensor(name="out", dtype="float32", shape=("T", channels)),
            Tensor(name="state", dtype="float32", shape=self.state.shape, kind="state"),
            *(Tensor(name=n, dtype="float32", shape=w.shape, kind="weight") for n, w in self.weights.items()),
        ]
        node = Node(
            name="convolution",
            op="LinearAttention",
            domain=DOMAIN,
            inputs=("qkv", "", "", "taps", "bias" if has_bias else "", "state", ""),
            outputs=("out",),
            attributes={**attributes, "past_slots": taps - 1},
        )
        self.subgraph = Subgraph(
            name="dynamic.0",
            device="npu",
            is_static=False,
            rows="T",
            nodes=(node,),
            inputs=("qkv",),
            outputs=("out",),
            weights=tuple(self.weights),
            state=("state",),
        )
        self.plan = Plan(
            family="convolution",
            subgraphs=(self.subgraph,),
            tensors={tensor.name: tensor for tensor in tensors},
            inputs=(),
            output="out",
            vocab_size=channels,
            context_length=64,
        )

    def compile(self, folder, rows=ROWS):
        backend = QnnBackend(find_soc("SM8650"), contexts=folder)
        return backend.compile(self.subgraph, self.plan, rows, find_scheme("w8a16"), Constants(self.weights))

    def run(self, executable, qkv):
        found = np.full((len(qkv), self.channels), np.nan, np.float32)
        executable.run_after({"qkv": qkv, "state": self.state}, {"out": found}, 1)
        return found

    def check(self, executable, num_rows):
        qkv = self.rng.normal(size=(num_rows, 3 * self.channels)).astype(np.float32)
        taps, bias = self.weights["taps"], self.weights.get("bias")
        named = {"attn_type": "short_conv", **self.sizes, "head_k_dim": self.channels, "head_v_dim": self.channels}
        expected = linear_attention(qkv, None, None, taps, bias, self.expected_state, None, **named)
        assert relative_error(self.run(executable, qkv), expected) < TOLERANCE
        assert relative_error(self.state, self.expected_state) < TOLERANCE


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("channels", "taps", "has_bias"),
    [(16, 3, False), (1000, 3, True), (1024, 3, False), (2048, 3, False), (64, 4, True)],
)
def test_convolution_equals_the_reference(channels, taps, has_bias, tmp_path):
    one = OneConvolution(channels, taps, has_bias=has_bias)
    executable = one.compile(tmp_path)
    for num_rows in (ROWS, 1, 1, 7, 2, ROWS):  # fewer rows than the state has keep some of it
        one.check(executable, num_rows)


def test_shorter_chunk_is_padded_inside(tmp_path):
    one = OneConvolution(16)
    executable = one.compile(tmp_path, rows=8)
    for num_rows in range(8, 0, -1):
        one.check(executable, num_rows)


@pytest.mark.parametrize("place", ["rows", "state"])
def test_value_that_exceeds_float16_leaves_the_state_unchanged(place, tmp_path):
    one = OneConvolution(16)
    executable = one.compile(tmp_path)
    one.check(executable, 5)
    qkv = np.ones((4, 48), np.float32)
    if place == "rows":
        qkv[:, [0, 32]] = 300  # their product is 90,000
    else:
        one.state[3, 1] = 70_000
    before = one.state.copy()
    with pytest.raises(BackendError, match="float16"):
        one.run(executable, qkv)
    np.testing.assert_array_equal(one.state, before)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Return a function that loads a tiny LFM2 with its calibration."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("CHUNKRT_HOME", str(folder))
        models = {name: calibrated(name, folder / f"{name}.npz") for name in ("lfm2", "lfm2_biased")}

        def load(name="lfm2", **options):
            given = {"npu": "qnn", "scheme": "w8a16", "chunk_length": CHUNK, "threads": 2, "prefix_cache": "off"}
            return chunkrt.load(models[name], **(given | {"calibration": folder / f"{name}.npz"} | options))

        yield load


def tokens_of(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(3, 48, num_tokens)


def tell(engine, num_tokens=72, num_decoded=2):
    """Return logits of a prompt, longer than most windows, and of some single tokens after it."""
    session, tokens = engine.session(), tokens_of(num_tokens + num_decoded)
    logits = session.prefill(tokens[:num_tokens], logits="all").logits
    return np.vstack([logits, *(session.prefill([int(token)]).logits for token in tokens[num_tokens:])])


def graphs(executor):
    """Return the NPU's layers, graph by graph: "conv" or "self_attn"."""
    return [
        [node.name.split(".")[3] for node in subgraph.nodes if "past_slots" in node.attributes]
        for subgraph in executor.plan.subgraphs
        if subgraph.device == "npu"
    ]


@pytest.mark.sampled(every=14)
@pytest.mark.parametrize("name", ["lfm2", "lfm2_biased"])
@pytest.mark.parametrize(
    "how",
    [
        ON_NPU,
        ON_NPU | {"cache_dtype": "int8"},
        ON_NPU | {"decode_on": "npu"},
        {"placement": {"model.layers.0.conv": "npu"}, "npu_strict": True},
        {"attention": "npu", "npu_window": "32,64,4096", "weights": "npu-only"},
        {"attention": "npu", "npu_window": 32},
        {"attention": "npu", "npu_window": 48, "npu_graph": "layers=1", "decode_on": "npu"},
    ],
)
def test_logits_equal_those_of_convolutions_on_the_cpu(load, name, how):
    with load(name, cache_dtype=how.get("cache_dtype")) as engine:
        expected = tell(engine)
    with load(name, **how) as engine:
        found = tell(engine)
        np.testing.assert_array_equal(tell(engine, 20, 0), found[:20])
    assert relative_error(found, expected) < LOGIT_TOLERANCE


def test_adjacent_subgraphs_are_fused_with_convolutions(load):
    with load() as engine:
        assert not engine.loaded.scheduler.executors.near
    with load(attention="npu", npu_window=32) as engine:
        near, far = engine.loaded.scheduler.executors.near
        assert graphs(near) == [["conv", "self_attn", "conv", "self_attn"]]
        assert graphs(far) == [["conv"], ["conv"], []]
        assert engine.loaded.scheduler.executors.prompts is far
        assert (near.reach, far.reach) == (32, engine.plan.context_length)
        result = engine.session().prefill(tokens_of(33))
        assert sum(event.processor == "npu" for event in result.events) == result.num_chunks == 3
    with load(attention="npu", npu_window=4096, npu_graph="layers=1") as engine:
        assert [graphs(near) for near in engine.loaded.scheduler.executors.near] == [
            [["conv"], ["self_attn"], ["conv"], ["self_attn"]]
        ]


def test_convolutions_are_placed_one_by_one(load):
    with load(placement={"model.layers.2.conv": "npu"}) as engine:
        (near,) = engine.loaded.scheduler.executors.near
        static = [n.name for s in near.plan.subgraphs for n in s.nodes if "past_slots" in n.attributes]
        assert static == ["model.layers.2.conv.linear_attention"]
        assert near.reach == engine.plan.context_length
    with load(attention="npu", placement={"model.layers.2.conv": "cpu", "model.layers.*.self_attn": "cpu"}) as engine:
        (near,) = engine.loaded.scheduler.executors.near
        static = [n.name for s in near.plan.subgraphs for n in s.nodes if "past_slots" in n.attributes]
        assert static == ["model.layers.0.conv.linear_attention"]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("how", [ON_NPU, {"attention": "npu", "npu_window": 32}])
def test_failed_or_cancelled_run_leaves_the_state_unchanged(load, how, monkeypatch):
    with load(**how) as engine:
        session = engine.session()
        session.prefill(tokens_of(10))
        before = saved_arrays(session)
        expected = session.fork().prefill(tokens_of(70, seed=3)).logits
        last = engine.loaded.scheduler.executors.near[-1]
        run_task = last.run_task

        def cancelled(*task):
            session.cancel()
            return run_task(*task)

        for broken, name, breaks, error in [
            (Context, "compute", gone_after(3), BackendError),
            (last, "run_task", cancelled, ClosedError),
        ]:
            monkeypatch.setattr(broken, name, breaks)
            with pytest.raises(error):
                session.prefill(tokens_of(70, seed=3))
            monkeypatch.undo()
            assert session.position == 10
            for name_of_array, array in saved_arrays(session).items():
                np.testing.assert_array_equal(array, before[name_of_array])
        np.testing.assert_array_equal(session.prefill(tokens_of(70, seed=3)).logits, expected)


def test_fallback_starts_with_the_chunk_that_failed(load, monkeypatch, caplog):
    with load() as engine:
        expected = tell(engine)
    with load(**ON_NPU, on_npu_failure="fallback") as engine:
        monkeypatch.setattr(Context, "compute", gone_after(5))
        found = tell(engine)
        assert "it is gone; the CPU takes over" in caplog.text
    assert relative_error(found, expected) < LOGIT_TOLERANCE


def test_export_for_host_refuses_convolution_state(load, tmp_path):
    path = tmp_path / "calibration.npz"
    model = calibrated("lfm2", path)
    options = EngineOptions(npu="qnn", scheme="w8a16", calibration=path, attention="npu", npu_window=4096)
    with pytest.raises(ConfigError, match="state of a convolution"):
        compile_engine(str(model), tmp_path / "out", options, socs=["SM8650"], chunk_lengths=[CHUNK], for_host=True)
