"""ONNX decoder of one layer, whose parts a test chooses: a small version of the graphs that exporters write."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 40, 32, 2, 1, 16, 64
CONTRIB = "com.microsoft"


class SmallDecoder:
    """Decoder of embedding, norm, q, k and v, attention, o, residual, norm and head, with random weights.

    `attention(decoder, q, k, v)` adds nodes and returns the result [1, T, heads * head_dim]; `before_head(decoder, x)`
    adds nodes before the head and returns its input. `context` is the number of rows of the rotary tables.
    """

    def __init__(self, attention, *, kv_heads=KV_HEADS, before_head=None, context=CONTEXT):
        self.nodes, self.initializers = [], []
        self.kv_heads = kv_heads
        self.rng = np.random.default_rng(0)
        angles = np.outer(np.arange(context), 100.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
        self.constant("cos", np.cos(angles).astype(np.float32))
        self.constant("sin", np.sin(angles).astype(np.float32))
        hidden = self.node("Gather", [self.weight("embedding", VOCAB, HIDDEN), "input_ids"])
        normed = self.norm(hidden)
        widths = {"q": HEADS * HEAD_DIM, "k": kv_heads * HEAD_DIM, "v": kv_heads * HEAD_DIM}
        q, k, v = (self.linear(normed, name, HIDDEN, width) for name, width in widths.items())
        attended = self.linear(attention(self, q, k, v), "o", HEADS * HEAD_DIM, HIDDEN)
        last = self.norm(self.node("Add", [hidden, attended]))
        last = before_head(self, last) if before_head else last
        self.linear(last, "head", HIDDEN, VOCAB, output="logits")

    def node(self, op, inputs, *, domain="", outputs=None, **attributes):
        outputs = outputs or [f"value_{len(self.nodes)}"]
        name = f"node_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, outputs, name, domain=domain, **attributes))
        return outputs[0]

    def constant(self, name, values):
        self.initializers.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def weight(self, name, *shape):
        values = self.rng.standard_normal(shape, np.float32) * np.float32(shape[0] ** -0.5)
        return self.constant(name, values)

    def norm(self, value):
        weight = self.constant(f"norm_{len(self.nodes)}", self.rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
        return self.node("SimplifiedLayerNormalization", [value, weight], axis=-1, epsilon=1e-6, stash_type=1)

    def linear(self, value, name, depth, columns, output=None):
        return self.node("MatMul", [value, self.weight(name, depth, columns)], outputs=[output] if output else None)

    @property
    def model(self):
        cache = ["batch", self.kv_heads, "past", HEAD_DIM]
        present = ["batch", self.kv_heads, "total", HEAD_DIM]
        inputs = {
            "input_ids": (TensorProto.INT64, ["batch", "length"]),
            "attention_mask": (TensorProto.INT64, ["batch", "total"]),
            "position_ids": (TensorProto.INT64, ["batch", "length"]),
            "past_key_values.0.key": (TensorProto.FLOAT, cache),
            "past_key_values.0.value": (TensorProto.FLOAT, cache),
        }
        outputs = {
            "logits": (TensorProto.FLOAT, ["batch", "length", VOCAB]),
            "present.0.key": (TensorProto.FLOAT, present),
            "present.0.value": (TensorProto.FLOAT, present),
        }
        graph = helper.make_graph(
            self.nodes,
            "decoder",
            [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
            [helper.make_tensor_value_info(name, *kind) for name, kind in outputs.items()],
            self.initializers,
        )
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def save(self, folder):
        onnx.save(self.model, folder / "decoder.onnx")
        return folder / "decoder.onnx"


PAST = ["past_key_values.0.key", "past_key_values.0.value"]
PRESENT = ["present.0.key", "present.0.value"]


def causal_mask(decoder, window=0):
    """Return a mask, bool [1, 1, T, total]: the last `window` keys at or before a row's position (0: all of them)."""
    total = decoder.node("Shape", ["attention_mask"], start=1, end=2)
    scalar = decoder.node("Squeeze", [total])
    zero, one = decoder.constant("zero", np.int64(0)), decoder.constant("one", np.int64(1))
    keys = decoder.node("Range", [zero, scalar, one])
    rows = decoder.node("Unsqueeze", ["position_ids", decoder.constant("axes", np.array([1, 3]))])
    visible = decoder.node("LessOrEqual", [keys, rows])
    if window:
        first = decoder.node("Sub", [rows, decoder.constant("window", np.int64(window))])
        visible = decoder.node("And", [visible, decoder.node("Greater", [keys, first])])
    return visible


def rotated(decoder, value, num_heads):
    """Add com.microsoft's RotaryEmbedding of rows."""
    inputs = [value, "position_ids", "cos", "sin"]
    return decoder.node("RotaryEmbedding", inputs, domain=CONTRIB, num_heads=num_heads)


def by_head(decoder, value):
    """Reshape [1, T, heads * D] to [1, heads, T, D]."""
    shape = decoder.constant(f"shape_{len(decoder.nodes)}", np.array([0, 0, -1, HEAD_DIM]))
    return decoder.node("Transpose", [decoder.node("Reshape", [value, shape])], perm=[0, 2, 1, 3])


def by_row(decoder, value):
    """Reshape [1, heads, T, D] to [1, T, heads * D]."""
    turned = decoder.node("Transpose", [value], perm=[0, 2, 1, 3])
    return decoder.node("Reshape", [turned, decoder.constant("rows", np.array([0, 0, -1]))])


def scale_far_from_the_start(model, reader, far):
    """Multiply the first input of a node by 1, and by 2 if there are `far` tokens or more."""
    for name, value in (("far", np.int64(far)), ("one", np.float32(1)), ("two", np.float32(2)), ("axes", [0, 1])):
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    made = [
        helper.make_node("ReduceSum", ["attention_mask", "axes"], ["total"], keepdims=0),
        helper.make_node("Less", ["total", "far"], ["is near"]),
        helper.make_node("Where", ["is near", "one", "two"], ["factor"]),
        helper.make_node("Mul", [reader.input[0], "factor"], ["changed"], "the change"),
    ]
    reader.input[0] = "changed"
    index = list(model.graph.node).index(reader)
    for node in reversed(made):
        model.graph.node.insert(index, node)
