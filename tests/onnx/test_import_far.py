"""Positions, lengths and sizes are checked far from the start, not only for the first few tokens."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from small_onnx import CONTRIB, HEADS, PAST, PRESENT, SmallDecoder, rotated, scale_far_from_the_start

from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import UnsupportedModelError
from chunkrt.onnx.importing import import_decoder

CONTEXT, CHANGE = 128, 100
"""Number of positions of these decoders, and the position at which something changes."""


def stopping(decoder, value, last, dtype=np.int64):
    return decoder.node("Min", [value, decoder.constant(f"last_{len(decoder.nodes)}", np.array(last, dtype))])


def wrapping(decoder, value, last):
    return decoder.node("Mod", [value, decoder.constant(f"period_{len(decoder.nodes)}", np.array(last))])


def grouped(decoder, q, k, v, *, positions=lambda value: value, length=lambda value: value):
    """Add GroupQueryAttention with changed positions or lengths."""
    told = positions("position_ids")
    q, k = (decoder.node("RotaryEmbedding", [x, told, "cos", "sin"], domain=CONTRIB) for x in (q, k))
    one = decoder.constant("one_1d", np.array([1]))
    lengths = decoder.node("ReduceSum", ["attention_mask", one], keepdims=0)
    last = decoder.node("Cast", [length(decoder.node("Sub", [lengths, one]))], to=6)
    total = decoder.node("Cast", [decoder.node("Squeeze", [decoder.node("Shape", ["attention_mask"], start=1)])], to=6)
    options = {"num_heads": HEADS, "kv_num_heads": 1}
    inputs = [q, k, v, *PAST, last, total]
    return decoder.node("GroupQueryAttention", inputs, domain=CONTRIB, outputs=["attended", *PRESENT], **options)


def test_consistent_decoder_is_imported(tmp_path):
    file = SmallDecoder(grouped, context=CONTEXT).save(tmp_path)
    assert plan_checkpoint(file, {}).plan.context_length == CONTEXT


@pytest.mark.parametrize("change", [stopping, wrapping])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("positions", r"RotaryEmbedding .* its positions .* from number 10[01] for 128 tokens"),
        ("length", r"its length .* for 128 tokens after 0, expected \[127\]"),
    ],
)
def test_positions_and_lengths_that_change_far_from_the_start_are_refused(tmp_path, change, changed, message):
    def attention(decoder, q, k, v):
        return grouped(decoder, q, k, v, **{changed: lambda value: change(decoder, value, CHANGE)})

    with pytest.raises(UnsupportedModelError, match=message):
        import_decoder(SmallDecoder(attention, context=CONTEXT).save(tmp_path))


def with_mask_of_keys(keys, decoder, q, k, v):
    """Add standard attention, whose mask is as large as `keys(decoder)` and the rotated rows together."""
    turned = rotated(decoder, q, HEADS)
    sizes = [decoder.node("Shape", [keys(decoder)], start=2, end=3), decoder.node("Shape", [turned], start=1, end=2)]
    total = decoder.node("Squeeze", [decoder.node("Add", sizes)])
    zero, one = decoder.constant("zero", np.int64(0)), decoder.constant("one", np.int64(1))
    columns = decoder.node("Range", [zero, total, one])
    rows = decoder.node("Unsqueeze", ["position_ids", decoder.constant("axes", np.array([1, 3]))])
    mask = decoder.node("LessOrEqual", [columns, rows])
    inputs = [turned, rotated(decoder, k, 1), v, mask, *PAST]
    return decoder.node("Attention", inputs, outputs=["attended", *PRESENT], q_num_heads=HEADS, kv_num_heads=1)


def all_keys(decoder):
    return PAST[0]


def first_keys(decoder):
    bounds = [decoder.constant(name, np.array([value])) for name, value in (("from", 0), ("to", CHANGE), ("axis", 2))]
    return decoder.node("Slice", [PAST[0], *bounds])


@pytest.mark.parametrize("context", [CONTEXT, None])
def test_sizes_of_data_are_checked_far_from_the_start(tmp_path, context):
    """A mask as large as a constant slice of the keys is refused: its size is not a sum of past and length.

    If no file states the context length, sizes are checked as far as the tables let the decoder run.
    """
    if context is not None:
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": context}))

    def decoder(keys):
        return SmallDecoder(lambda *operands: with_mask_of_keys(keys, *operands), context=CONTEXT)

    import_decoder(decoder(all_keys).save(tmp_path))
    with pytest.raises(UnsupportedModelError, match=r"operator Attention .* its mask .* is not a causal mask"):
        import_decoder(decoder(first_keys).save(tmp_path))


@pytest.mark.parametrize("far", [CHANGE, 1000])  # the second exceeds the 128 positions of this decoder
def test_computed_numbers_that_change_far_from_the_start_are_no_constants(tmp_path, far):
    """The factor is 1 up to some length and 2 from there on, in a decoder with decomposed attention."""
    folder = Path(__file__).parents[1] / "data" / "onnx" / "optimum_llama_fp32"
    model = onnx.load(folder / "model.onnx")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    head = next(node for node in model.graph.node if "logits" in node.output)
    scale_far_from_the_start(model, head, far)
    onnx.save(model, tmp_path / "model.onnx")
    if far > CONTEXT:
        import_decoder(tmp_path)
        return
    with pytest.raises(UnsupportedModelError, match=r"an operator ReduceSum of the domain ai\.onnx"):
        import_decoder(tmp_path)
