"""Linear attention: the reference and the standard-ONNX form of each kind agree with ONNX Runtime's own operators.

A kind that is defined here joins both without any change to shared code.
"""

import ctypes
import json
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnx_models import Window
from safetensors.numpy import save_file

import chunkrt
from chunkrt.backends.dispatch import Dispatcher, registered_operators
from chunkrt.backends.onnx.functions import has_expansion
from chunkrt.backends.onnx.onnxrt import OnnxRuntimeBackend
from chunkrt.backends.recurrences import register
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.backends.switches import Switches
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import ConfigError, PartitionError, UnsupportedModelError
from chunkrt.graph import decoders, ops
from chunkrt.graph.decoders.llama import CausalDecoder
from chunkrt.graph.linear_attention import Variant, find_variant, register_variant
from chunkrt.graph.modules import Constant, DepthwiseWeights, Embedding, Module
from chunkrt.graph.ops import current_trace, trace
from chunkrt.graph.parallel import ReplicatedLinear
from chunkrt.graph.partition import partition
from chunkrt.quant.scheme import SCHEMES

LENGTHS = [1, 2, 31, 32, 33, 95]
K_HEADS, V_HEADS, K_DIM, V_DIM, TAPS = 2, 6, 8, 5, 4
CHANNELS = {"short_conv": V_HEADS * V_DIM}
CHANNELS |= dict.fromkeys(("gated_delta_rule", "mamba2"), 2 * K_HEADS * K_DIM + V_HEADS * V_DIM)
COLUMNS = {**CHANNELS, "short_conv": 3 * CHANNELS["short_conv"]}
BACKENDS = {"reference": ReferenceBackend, "onnxrt": OnnxRuntimeBackend}


class Case:
    """A plan of one operator, its weights, and inputs for the longest of LENGTHS."""

    def __init__(self, attn_type, *, has_bias=False, l2norm=True, seed=0):
        rng = np.random.default_rng(seed)
        channels, columns = CHANNELS[attn_type], COLUMNS[attn_type]

        def draw(*shape):
            return rng.standard_normal(shape).astype(np.float32)

        self.is_recurrent = find_variant(attn_type).is_recurrent
        self.has_skip = find_variant(attn_type).has_skip
        self.l2norm = l2norm
        self.weights = {"conv_weight": draw(channels, 1, TAPS), "conv_bias": draw(channels), "skip": draw(V_HEADS)}
        self.qkv = draw(max(LENGTHS), columns)
        self.gate, self.beta = rng.random((2, max(LENGTHS), V_HEADS), np.float32)
        self.gate = -self.gate
        self.states = {"conv_state": draw(channels, TAPS - 1)}
        if self.is_recurrent:
            self.states["recurrent_state"] = draw(V_HEADS, K_DIM, V_DIM)
        self.has_bias = has_bias

        def decoder(token_ids, logit_rows):
            record = current_trace()
            tables = {"qkv": columns, "gate": V_HEADS, "beta": V_HEADS}
            qkv, gate, beta = (
                ops.gather_rows(record.weight(name, (max(LENGTHS), width)), token_ids, name=f"{name}_rows")
                for name, width in tables.items()
            )
            bias = record.weight("conv_bias", (channels,)) if has_bias else None
            output = ops.linear_attention(
                qkv,
                gate if self.is_recurrent else None,
                beta if self.is_recurrent else None,
                record.weight("conv_weight", (channels, 1, TAPS)),
                bias,
                attn_type=attn_type,
                num_k_heads=K_HEADS,
                num_v_heads=V_HEADS,
                head_k_dim=K_DIM,
                head_v_dim=V_DIM,
                use_qk_l2norm=l2norm,
                skip=record.weight("skip", (V_HEADS,)) if self.has_skip else None,
            )
            return ops.gather_rows(output, logit_rows, name="logits")

        plan = partition(trace(decoder), family="operator")
        (self.subgraph,) = (s for s in plan.subgraphs if s.state)
        self.plan = plan
        tables = {"qkv": self.qkv, "gate": self.gate, "beta": self.beta}
        self.store = SimpleNamespace(array=(tables | self.weights).__getitem__)

    def run(self, backend, lengths):
        """Return the output of consecutive calls, and the final states."""
        executable = BACKENDS[backend]().compile(self.subgraph, self.plan, max(LENGTHS), SCHEMES["float"], self.store)
        states = {name: state.copy() for name, state in self.states.items()}
        outputs, start = [], 0
        for length in lengths:
            (name,) = self.subgraph.outputs
            outputs.append(np.empty((length, V_HEADS * V_DIM), np.float32))
            rows = np.arange(start, start + length)
            executable.run({"input_ids": rows, **states}, {name: outputs[-1]})
            start += length
        return np.concatenate(outputs), states

    def by_contrib(self, length):
        """Compute the same with ONNX Runtime's operators of the domain com.microsoft."""
        qkv = self.qkv[:length]
        before, after, x = np.split(qkv, 3, axis=1) if not self.is_recurrent else (None, None, qkv)
        conv_input = x if before is None else before * x
        bias = [self.weights["conv_bias"]] if self.has_bias else [None]
        activation = "silu" if self.is_recurrent else "none"
        inputs = [conv_input.T[None], self.weights["conv_weight"], *bias, self.states["conv_state"][None]]
        convolved, conv_state = contrib("CausalConvWithState", inputs, 2, activation=activation)
        convolved, states = convolved[0].T, {"conv_state": conv_state[0]}
        if not self.is_recurrent:
            return after * convolved, states
        all_k = K_HEADS * K_DIM
        q, k, v = np.split(convolved, [all_k, 2 * all_k], axis=1)
        q, k = (np.repeat(part.reshape(length, K_HEADS, K_DIM), V_HEADS // K_HEADS, axis=1) for part in (q, k))
        if self.has_skip:
            return self.state_space_by_contrib(q, k, v, states)
        if self.l2norm:
            q, k = (part / np.sqrt(np.square(part).sum(axis=-1, keepdims=True) + 1e-6) for part in (q, k))
        inputs = [q.reshape(length, -1), k.reshape(length, -1), v]
        inputs += [self.states["recurrent_state"], self.gate[:length], self.beta[:length]]
        output, state = contrib(
            "LinearAttention",
            [value[None] for value in inputs],
            2,
            q_num_heads=V_HEADS,
            kv_num_heads=V_HEADS,
            update_rule="gated_delta",
        )
        return output[0], states | {"recurrent_state": state[0]}

    def state_space_by_contrib(self, c, b, x, states):
        """The rule without a correction takes the step as a factor of x."""
        length = len(x)
        heads = x.reshape(length, V_HEADS, V_DIM)
        stepped = (heads * self.beta[:length, :, None]).reshape(length, -1)
        inputs = [c.reshape(length, -1), b.reshape(length, -1), stepped, self.states["recurrent_state"]]
        output, state = contrib(
            "LinearAttention",
            [value[None] for value in (*inputs, self.gate[:length])],
            2,
            q_num_heads=V_HEADS,
            kv_num_heads=V_HEADS,
            update_rule="gated",
            scale=1.0,
        )
        skipped = (heads * self.weights["skip"][:, None]).reshape(length, -1)
        return output[0] + skipped, states | {"recurrent_state": state[0]}


def contrib(op, inputs, num_outputs, **attributes):
    names = [f"i{index}" if value is not None else "" for index, value in enumerate(inputs)]
    outputs = [f"o{index}" for index in range(num_outputs)]
    node = helper.make_node(op, names, outputs, domain="com.microsoft", **attributes)
    feeds = {name: np.ascontiguousarray(value, np.float32) for name, value in zip(names, inputs, strict=True) if name}
    described = [helper.make_tensor_value_info(n, TensorProto.FLOAT, v.shape) for n, v in feeds.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph([node], "contrib", described, results)
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return ort.InferenceSession(model.SerializeToString()).run(None, feeds)


KINDS = [
    ("short_conv", {}),
    ("short_conv", {"has_bias": True}),
    ("gated_delta_rule", {}),
    ("gated_delta_rule", {"has_bias": True}),
    ("gated_delta_rule", {"l2norm": False}),
    ("mamba2", {}),
    ("mamba2", {"has_bias": True}),
]


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("attn_type", "options"), KINDS)
def test_every_kind_equals_onnx_runtimes_own_operators(attn_type, options, length, backend):
    case = Case(attn_type, **options)
    output, states = case.run(backend, [length])
    expected, expected_states = case.by_contrib(length)
    assert_close(output, expected)
    for name, state in states.items():
        assert_close(state, expected_states[name])


def assert_close(found, expected):
    """Compare sums over the state's rows, which are rounded a few times per step and grow without unit keys."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=128 * 2.0**-23 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", [[1] * 33, [8, 8, 8, 8, 1], [32, 1], [1, 32], [2, 31]])
@pytest.mark.parametrize("attn_type", CHANNELS)
def test_chunked_equals_unchunked(attn_type, split, backend):
    case = Case(attn_type)
    output, states = case.run(backend, split)
    at_once, states_at_once = case.run(backend, [33])
    assert_close(output, at_once)
    for name, state in states.items():
        assert_close(state, states_at_once[name])


def test_unknown_kind_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="attn_type 'wkv' is unknown; known: gated_delta_rule, mamba2, sh"):
        find_variant("wkv")
    assert not has_expansion("chunkrt", "LinearAttention", "wkv")
    with pytest.raises(ConfigError, match="'short_conv' is already registered"):
        register_variant("short_conv", find_variant("short_conv"))
    with pytest.raises(ConfigError, match="'short_conv' is already registered with the reference"):
        register("short_conv")(None)


def test_kind_without_implementation_is_named_by_each_backend(monkeypatch):
    register_variant("bare", Variant(columns_per_channel=1, is_recurrent=False))
    monkeypatch.setitem(CHANNELS, "bare", V_HEADS * V_DIM)
    monkeypatch.setitem(COLUMNS, "bare", V_HEADS * V_DIM)
    case = Case("bare")
    for name, message in {"reference": "has no linear attention of", "onnxrt": "chunkrt::LinearAttention of"}.items():
        support = BACKENDS[name]().supports(case.subgraph, case.plan, SCHEMES["float"])
        assert not support
        assert support.node == "linear_attention"
        assert f"{message} attn_type 'bare'" in support.reason
        found = Dispatcher(case.plan, SCHEMES["float"], registered_operators(), Switches())
        with pytest.raises(PartitionError, match=f"{message} attn_type 'bare'"):
            found.compile(case.subgraph, BACKENDS[name](), 8, case.store)


# Retention (Sun et al., 2023, equation 6): S <- gamma S + k v^T, o = S^T q, with one decay a head.
HEADS, DIM, HIDDEN, VOCAB, CONTEXT = 2, 4, 12, 29, 64
RETENTION = """{
    convolved, new_conv_state = chunkrt.CausalConvolution (qkv, conv_weight, conv_bias, conv_state)
    q_flat, k_flat, v_flat = Split <axis = 1, num_outputs = 3> (convolved)
    one = Constant <value_ints = [1]> ()
    minus_one = Constant <value_ints = [-1]> ()
    num_scalar = Constant <value_int: int = @num_v_heads> ()
    num = Reshape (num_scalar, one)
    dim_scalar = Constant <value_int: int = @head_v_dim> ()
    dim = Reshape (dim_scalar, one)
    by_head = Concat <axis = 0> (minus_one, num, dim)
    q = Reshape (q_flat, by_head)
    k = Reshape (k_flat, by_head)
    v = Reshape (v_flat, by_head)
    decay = Exp (gate)
    new_recurrent_state, outputs = Scan <num_scan_inputs = 4, body = row
        (float[h, m, n] s, float[h, m] q_t, float[h, m] k_t, float[h, n] v_t, float[h] decay_t)
        => (float[h, m, n] new_s, float[h, n] o_t)
    {
        first = Constant <value_ints = [1]> ()
        second = Constant <value_ints = [2]> ()
        both = Constant <value_ints = [1, 2]> ()
        decay_b = Unsqueeze (decay_t, both)
        decayed = Mul (s, decay_b)
        k_column = Unsqueeze (k_t, second)
        v_row = Unsqueeze (v_t, first)
        written = MatMul (k_column, v_row)
        new_s = Add (decayed, written)
        q_row = Unsqueeze (q_t, first)
        read = MatMul (q_row, new_s)
        o_t = Squeeze (read, first)
    }> (recurrent_state, q, k, v, decay)
    flat = Constant <value_ints = [0, -1]> ()
    output = Reshape (outputs, flat)
}"""


class RetentionBody(Module):
    """Embedding, and one layer of retention added to it; decays come from the hidden rows."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = Embedding(VOCAB, HIDDEN)
        self.qkv_proj = ReplicatedLinear(HIDDEN, 3 * HEADS * DIM)
        self.decay_proj = ReplicatedLinear(HIDDEN, HEADS)
        self.minus_one = Constant(np.full(HEADS, -1, np.float32))
        self.conv = DepthwiseWeights(3 * HEADS * DIM, 2)
        self.out_proj = ReplicatedLinear(HEADS * DIM, HIDDEN)

    def forward(self, token_ids):
        hidden = self.embed_tokens(token_ids)
        mixed = ops.linear_attention(
            self.qkv_proj(hidden),
            ops.mul(ops.softplus(self.decay_proj(hidden)), self.minus_one(), name="gate"),
            None,
            self.conv.weight.value(),
            attn_type="retention",
            num_k_heads=HEADS,
            num_v_heads=HEADS,
            head_k_dim=DIM,
            head_v_dim=DIM,
        )
        return ops.add(hidden, self.out_proj(mixed), name="residual")


@pytest.fixture(scope="module")
def retention(tmp_path_factory):
    """Register the kind as an external package would, and write a checkpoint of a decoder with it."""
    register_variant("retention", Variant(columns_per_channel=1, is_recurrent=True, expansion=RETENTION))

    @register("retention")
    def _retention(qkv, gate, beta, convolve, recurrent_state, **sizes):
        q, k, v = (part.reshape(len(qkv), HEADS, DIM) for part in np.split(convolve(qkv), 3, axis=1))
        output = np.empty_like(v)
        for t in range(len(qkv)):
            recurrent_state *= np.exp(gate[t])[:, None, None]
            recurrent_state += k[t, :, :, None] * v[t, :, None, :]
            output[t] = np.einsum("hmn,hm->hn", recurrent_state, q[t])
        return output.reshape(len(qkv), -1)

    folder = tmp_path_factory.mktemp("retention") / "tiny"
    folder.mkdir()
    config = {"model_type": "retention", "hidden_size": HIDDEN, "intermediate_size": 1, "num_hidden_layers": 1}
    config |= {"num_attention_heads": HEADS, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    rng = np.random.default_rng(0)
    shapes = {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "qkv_proj.weight": (3 * HEADS * DIM, HIDDEN),
        "decay_proj.weight": (HEADS, HIDDEN),
        "conv.weight": (3 * HEADS * DIM, 1, 2),
        "out_proj.weight": (HIDDEN, HEADS * DIM),
    }
    weights = {f"model.{name}": rng.standard_normal(s).astype(np.float32) / 2 for name, s in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        family = decoders.Family(build=lambda config: CausalDecoder(config, RetentionBody()))
        patch.setitem(decoders.FAMILIES, "retention", family)
        yield folder, {name.removeprefix("model."): weight.astype(np.float64) for name, weight in weights.items()}


def retention_logits(weights, tokens):
    """Compute the closed form without a state: every row weights all earlier rows by the decays between them."""
    hidden = weights["embed_tokens.weight"][tokens]
    projected = hidden @ weights["qkv_proj.weight"].T
    taps = weights["conv.weight"][:, 0].T
    convolved = np.vstack([np.zeros_like(projected[:1]), projected[:-1]]) * taps[0] + projected * taps[1]
    q, k, v = (part.reshape(len(tokens), HEADS, DIM) for part in np.split(convolved, 3, axis=1))
    log_decay = np.cumsum(-np.logaddexp(hidden @ weights["decay_proj.weight"].T, 0), axis=0).T
    between = np.exp(np.minimum(log_decay[:, :, None] - log_decay[:, None, :], 0)) * np.tri(len(tokens))
    mixed = np.einsum("thm,shm,hts,shn->thn", q, k, between, v).reshape(len(tokens), -1)
    return (hidden + mixed @ weights["out_proj.weight"].T) @ weights["embed_tokens.weight"].T


@pytest.mark.parametrize("npu", ["reference", "onnxrt"])
@pytest.mark.parametrize("chunk_length", [1, 8, 64])
def test_external_kind_runs_in_a_decoder(retention, chunk_length, npu):
    folder, weights = retention
    tokens = np.random.default_rng(1).integers(0, VOCAB, 33)
    expected = retention_logits(weights, tokens)
    with chunkrt.load(folder, npu=npu, scheme="float", chunk_length=chunk_length) as engine:
        session = engine.session()
        found = [session.prefill(tokens[:30].tolist(), logits="all").logits]
        found += [session.prefill([token]).logits[None] for token in tokens[30:].tolist()]
    np.testing.assert_allclose(np.vstack(found), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("window", [1, 8])
def test_external_kind_is_exported_by_its_expansion(retention, window):
    """33 tokens in windows of 8 begin with 7 rows of padding."""
    folder, weights = retention
    tokens = np.random.default_rng(1).integers(0, VOCAB, 33)
    expected = retention_logits(weights, tokens)
    decoder = plan_checkpoint(folder, {})
    found = Window(decoder, window=window, sequence=40, context=40, dtype="fp32", opset=23).run(tokens.tolist())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_kind_that_native_lacks_runs_in_reference_with_one_warning(retention, caplog):
    folder, _ = retention
    tokens, logits = np.random.default_rng(1).integers(0, VOCAB, 33).tolist(), {}
    for npu in ("native", "reference"):
        with chunkrt.load(folder, npu=npu, scheme="w8a8-dynamic", cache_dtype="float32", chunk_length=8) as engine:
            logits[npu] = engine.session().prefill(tokens, logits="all").logits
    (record,) = (record for record in caplog.records if record.name == "chunkrt.backends.dispatch")
    assert (
        "the reference, which is slow, runs the operator linear_attention: native has no form: " in record.getMessage()
    )
    assert "of attn_type 'retention'; it has: gated_delta_rule, mamba2, short_conv" in record.getMessage()
    np.testing.assert_allclose(
        logits["native"], logits["reference"], rtol=0, atol=0.02 * np.abs(logits["native"]).max()
    )


RETENTION_KERNEL = r"""
#include <cmath>
#include <cstring>
#include <vector>

extern "C" void retention(const float* qkv, const float* gate, const float* taps, float* before, float* state,
                          float* output, long rows, long heads, long size) {
  const long channels = 3 * heads * size, inner = heads * size;
  std::vector<float> mixed(channels);
  for (long row = 0; row < rows; ++row, qkv += channels, gate += heads, output += inner) {
    for (long c = 0; c < channels; ++c) mixed[c] = taps[2 * c] * before[c] + taps[2 * c + 1] * qkv[c];
    std::memcpy(before, qkv, channels * sizeof(float));
    for (long h = 0; h < heads; ++h) {
      const float *q = &mixed[h * size], *k = q + inner, *v = k + inner;
      float* sum = output + h * size;
      std::memset(sum, 0, size * sizeof(float));
      for (long m = 0; m < size; ++m) {
        float* kept = state + (h * size + m) * size;
        for (long n = 0; n < size; ++n) sum[n] += q[m] * (kept[n] = std::exp(gate[h]) * kept[n] + k[m] * v[n]);
      }
    }
  }
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("npu", "scheme", "tolerance"), [("onnxrt", "float", 1e-5), ("native", "w8a8-dynamic", 0.02)])
@pytest.mark.parametrize("chunk_length", [1, 8])
def test_external_kind_runs_in_a_cpp_kernel_of_its_package(
    retention, chunk_length, npu, scheme, tolerance, tmp_path, monkeypatch
):
    """The kernel updates both states in the runtime's own buffers."""
    folder, weights = retention
    (tmp_path / "kernel.cc").write_text(RETENTION_KERNEL)
    built = tmp_path / "kernel.so"
    subprocess.run(["c++", "-O2", "-shared", "-fPIC", "-o", built, tmp_path / "kernel.cc"], check=True)
    kernel = ctypes.CDLL(str(built)).retention
    floats = np.ctypeslib.ndpointer(np.float32, flags="C_CONTIGUOUS")
    kernel.argtypes, kernel.restype = [floats] * 6 + [ctypes.c_long] * 3, None

    def compute(qkv, gate, beta, taps, bias, conv_state, recurrent_state, skip=None, **sizes):
        result = np.empty((len(qkv), HEADS * DIM), np.float32)
        kernel(qkv, gate, taps, conv_state, recurrent_state, result, len(qkv), HEADS, DIM)
        return result

    def refuses(node):
        return None if node.attributes["attn_type"] == "retention" else "it is another kind"

    registry = registered_operators().copy()
    for user in ("loaded", "loading", "capability", "roles"):
        monkeypatch.setattr(f"chunkrt.engine.{user}.registered_operators", lambda: registry)
    with registry.from_distribution("acme-kinds"):
        registry.register("linear_attention", "cpp", refuses=refuses)(compute)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 33).tolist()
    with chunkrt.load(folder, npu=npu, scheme=scheme, chunk_length=chunk_length) as engine:
        session = engine.session()
        found = np.vstack(
            [session.prefill(tokens[:20], logits="all").logits, session.prefill(tokens[20:], logits="all").logits]
        )
        session.rewind(7)
        again = session.prefill(tokens[7:], logits="all").logits
    expected = retention_logits(weights, np.array(tokens))
    atol = tolerance * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
    np.testing.assert_allclose(again, expected[7:], rtol=0, atol=atol)


def test_unknown_kind_imports_families_of_plugins(monkeypatch):
    """A compiled model from the cache runs without the family that built it."""
    imported = []

    def load_all():
        imported.append("families")
        register_variant("late", Variant(columns_per_channel=1, is_recurrent=False))

    monkeypatch.setattr(decoders.PLUGINS, "load_all", load_all)
    find_variant("short_conv")
    assert imported == []
    assert find_variant("late").columns_per_channel == 1
    assert imported == ["families"]
