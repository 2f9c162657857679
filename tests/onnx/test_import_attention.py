"""ONNX's forms of attention, in a decoder of one layer; the reference is ONNX Runtime's own run of it."""

from functools import partial

import numpy as np
import pytest
from small_onnx import CONTRIB, HEADS, HIDDEN, PAST, PRESENT, SmallDecoder, by_head, by_row, causal_mask, rotated

from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import UnsupportedModelError
from chunkrt.onnx.importing import import_decoder, verify


def attributes(decoder_file):
    """Return the only attention node's attributes, after comparing the import with the original."""
    planned = plan_checkpoint(decoder_file, {})
    assert verify(planned.source, planned.plan, planned.load) < 1e-4
    (node,) = (n for s in planned.plan.subgraphs for n in s.nodes if n.op == "CachedAttention")
    return node.attributes


def grouped(decoder, q, k, v, **options):
    one = decoder.constant("one_1d", np.array([1]))
    lengths = decoder.node("ReduceSum", ["attention_mask", one], keepdims=0)
    last = decoder.node("Cast", [decoder.node("Sub", [lengths, one])], to=6)
    total = decoder.node("Cast", [decoder.node("Squeeze", [decoder.node("Shape", ["attention_mask"], start=1)])], to=6)
    inputs = [q, k, v, *PAST, last, total]
    options = {"num_heads": HEADS, "kv_num_heads": decoder.kv_heads, **options}
    name = f"attended_{len(decoder.nodes)}"
    return decoder.node("GroupQueryAttention", inputs, domain=CONTRIB, outputs=[name, *PRESENT], **options)


def standard(mask_of, **options):
    """Return a maker of standard attention over rotated rows, with the mask that `mask_of(decoder)` makes."""

    def attention(decoder, q, k, v):
        inputs = [rotated(decoder, q, HEADS), rotated(decoder, k, 1), v, mask_of(decoder), *PAST]
        given = {"q_num_heads": HEADS, "kv_num_heads": 1, **options}
        return decoder.node("Attention", inputs, outputs=["attended", *PRESENT], **given)

    return attention


def test_group_query_attention_over_rotated_rows(tmp_path):
    def attention(decoder, q, k, v):
        return grouped(decoder, rotated(decoder, q, HEADS), rotated(decoder, k, 1), v, local_window_size=7)

    found = attributes(SmallDecoder(attention).save(tmp_path))
    assert (found["num_heads"], found["num_kv_heads"], found["window"]) == (2, 1, 7)


def test_multi_head_attention(tmp_path):
    def attention(decoder, q, k, v):
        inputs = [rotated(decoder, q, HEADS), rotated(decoder, k, HEADS), v, "", "", "", *PAST]
        options = {"num_heads": HEADS, "unidirectional": 1}
        return decoder.node("MultiHeadAttention", inputs, domain=CONTRIB, outputs=["attended", *PRESENT], **options)

    found = attributes(SmallDecoder(attention, kv_heads=HEADS).save(tmp_path))
    assert (found["num_heads"], found["num_kv_heads"], found["window"]) == (2, 2, 0)


@pytest.mark.parametrize("window", [0, 5, 40])  # 64 positions, and 33 tokens to compare with
def test_standard_attention_with_a_mask(tmp_path, window):
    attention = standard(lambda decoder: causal_mask(decoder, window), scale=0.3)
    found = attributes(SmallDecoder(attention).save(tmp_path))
    assert (found["window"], found["scale"]) == (window, 0.3)


def test_standard_attention_by_head(tmp_path):
    """Rows are split into heads and transposed before; the rotation is the standard operator's."""

    def attention(decoder, q, k, v):
        heads = [by_head(decoder, value) for value in (q, k, v)]
        turned = [decoder.node("RotaryEmbedding", [x, "cos", "sin", "position_ids"]) for x in heads[:2]]
        inputs = [*turned, heads[2], causal_mask(decoder), *PAST]
        return by_row(decoder, decoder.node("Attention", inputs, outputs=["attended", *PRESENT]))

    found = attributes(SmallDecoder(attention).save(tmp_path))
    assert (found["num_heads"], found["num_kv_heads"]) == (2, 1)


def inverted_mask(decoder):
    return decoder.node("Not", [causal_mask(decoder)])


def mask_with_a_sink(window, decoder):
    """Show the first key always: an attention sink in addition to a window."""
    first = decoder.constant("first", np.arange(64) == 0)
    total = decoder.node("Shape", ["attention_mask"], start=1, end=2)
    sink = decoder.node("Slice", [first, decoder.constant("start", np.array([0])), total])
    return decoder.node("Or", [causal_mask(decoder, window), sink])


@pytest.mark.parametrize(
    ("mask_of", "message"),
    [
        (inverted_mask, r"operator Attention .* its mask .* not causal"),
        (partial(mask_with_a_sink, 1), r"its mask .* is not a causal mask"),
        (partial(mask_with_a_sink, 5), r"its mask .* is not a causal mask"),
        (lambda decoder: "", "it is not causal"),
    ],
    ids=["inverted", "a sink in addition to the row itself", "a sink in addition to a window", "no mask"],
)
def test_attention_without_a_causal_mask_is_refused(tmp_path, mask_of, message):
    with pytest.raises(UnsupportedModelError, match=message):
        import_decoder(SmallDecoder(standard(mask_of)).save(tmp_path))


def test_keys_appended_before_attention_need_a_mask(tmp_path):
    """With is_causal row r sees keys 0 .. r, regardless of the past: tokens after others would not see themselves."""

    def attention(decoder, q, k, v):
        heads = [by_head(decoder, x) for x in (rotated(decoder, q, HEADS), rotated(decoder, k, 1), v)]
        both = [
            decoder.node("Concat", [past, new], outputs=[present], axis=2)
            for past, new, present in zip(PAST, heads[1:], PRESENT, strict=True)
        ]
        return by_row(decoder, decoder.node("Attention", [heads[0], *both], is_causal=1))

    with pytest.raises(UnsupportedModelError, match=r"operator Attention .* is_causal counts rows from the first key"):
        import_decoder(SmallDecoder(attention).save(tmp_path))


def test_non_consecutive_positions_are_refused(tmp_path):
    def attention(decoder, q, k, v):
        twice = decoder.node("Add", ["position_ids", "position_ids"])
        inputs = [decoder.node("RotaryEmbedding", [x, twice, "cos", "sin"], domain=CONTRIB) for x in (q, k)]
        return grouped(decoder, *inputs, v)

    with pytest.raises(UnsupportedModelError, match=r"operator RotaryEmbedding .* its positions .* are \[0, 2, 4, 6\]"):
        import_decoder(SmallDecoder(attention).save(tmp_path))


def test_known_operators_with_another_meaning_are_refused(tmp_path):
    def attention(decoder, q, k, v):
        return grouped(decoder, rotated(decoder, q, HEADS), rotated(decoder, k, 1), v)

    def gelu(decoder, x):
        return decoder.node("Gelu", [x], approximate="none")

    def first_row(decoder, x):
        return decoder.node("Gather", [x, decoder.constant("first", np.array([0]))], axis=1)

    def square(decoder, x):
        return decoder.node("MatMul", [x, decoder.node("Transpose", [x], perm=[0, 2, 1])])

    def by_row_number(decoder, x):
        floats = decoder.node("Cast", ["position_ids"], to=1)
        return decoder.node("Mul", [x, decoder.node("Unsqueeze", [floats, decoder.constant("axis", np.array([2]))])])

    for change in (gelu, first_row, square, by_row_number):
        file = SmallDecoder(attention, before_head=change).save(tmp_path)
        with pytest.raises(UnsupportedModelError, match=r"node 'node_\d+', an operator \w+ of the domain ai\.onnx"):
            import_decoder(file)


def test_norms_may_be_decomposed_around_fused_attention(tmp_path):
    class WithNormsWrittenOut(SmallDecoder):
        def norm(self, value):
            last = self.constant(f"last_{len(self.nodes)}", np.array([-1]))
            epsilon = self.constant(f"epsilon_{len(self.nodes)}", np.float32(1e-6))
            weight = self.constant(f"norm_{len(self.nodes)}", self.rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
            mean = self.node("ReduceMean", [self.node("Mul", [value, value]), last])
            root = self.node("Sqrt", [self.node("Add", [mean, epsilon])])
            return self.node("Mul", [self.node("Div", [value, root]), weight])

    def attention(decoder, q, k, v):
        return grouped(decoder, rotated(decoder, q, HEADS), rotated(decoder, k, 1), v)

    assert attributes(WithNormsWrittenOut(attention).save(tmp_path))["num_heads"] == HEADS
