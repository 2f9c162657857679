"""GGUF files: written by the gguf package, compared with its reader and llama.cpp, damaged; layouts are restored."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as BlockType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunkrt.checkpoints.checkpoint import checkpoint_files, open_checkpoint
from chunkrt.checkpoints.gguf import GgufSource
from chunkrt.checkpoints.gguf_names import (
    DEPTHWISE,
    LOGARITHM,
    SINGLE_ROW,
    Layout,
    rotate_half_rows,
    tiled_value_heads,
)
from chunkrt.checkpoints.source import BlockTensor
from chunkrt.errors import ModelError, QuantizationError, UnsupportedModelError
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.partition import plan_decoder

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 256, 512, 8, 2, 32, 2, 11
ALLOCATION_BOUND_BYTES = 4 << 20
DAMAGE = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4)

LAYER_SHAPES = {
    "attn_norm.weight": (HIDDEN,),
    "attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "attn_q.bias": (HEADS * HEAD_DIM,),
    "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_norm.weight": (HIDDEN,),
    "ffn_gate.weight": (INNER, HIDDEN),
    "ffn_up.weight": (INNER, HIDDEN),
    "ffn_down.weight": (HIDDEN, INNER),
}
TOKENS = ["<s>", "é", "\u2581the", "x" * 300, *(f"t{i}" for i in range(VOCAB - 4))]


def metadata_writer(path, *, arch="llama", **changes):
    """Return a writer with the metadata of a small llama; `changes` override keys (None omits one)."""
    writer = gguf.GGUFWriter(path, arch)
    values = {
        "block_count": LAYERS,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in (values | changes).items():
        if value is not None:
            add[type(value)](f"{arch}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", TOKENS)
    writer.add_array("tokenizer.ggml.token_type", [1, 2, 3])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    return writer


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_tensor(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def model_tensors():
    tensors = {"token_embd.weight": random_tensor((VOCAB, HIDDEN))}
    for layer in range(LAYERS):
        for seed, (name, shape) in enumerate(LAYER_SHAPES.items()):
            tensors[f"blk.{layer}.{name}"] = random_tensor(shape, 100 * layer + seed)
    return tensors | {"output_norm.weight": random_tensor((HIDDEN,), 7)}


def write_model(path, extra=(), **changes):
    writer = metadata_writer(path, **changes)
    for name, values in (model_tensors() | dict(extra)).items():
        writer.add_tensor(name, values)
    finish(writer)
    return path


def permute(weights, num_heads):
    """Permute q and k as llama.cpp's convert_hf_to_gguf.py does."""
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def test_names_shapes_and_values_are_hugging_faces(tmp_path):
    source = open_checkpoint(write_model(tmp_path / "m.gguf"))
    written = model_tensors()
    assert source.architecture == "llama"
    assert len(source.names()) == len(written)
    assert source.names()[0] == "model.embed_tokens.weight"
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.1.self_attn.o_proj.weight": "blk.1.attn_output.weight",
        "model.layers.1.post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
        "model.layers.1.mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
        "model.layers.1.mlp.up_proj.weight": "blk.1.ffn_up.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }
    for name, stored_name in pairs.items():
        assert source.info(name).shape == written[stored_name].shape
        np.testing.assert_array_equal(source.read(name), written[stored_name])
        assert source.read(name).dtype == np.float32


@pytest.mark.parametrize(
    ("name", "stored_name", "num_heads"),
    [
        ("q_proj.weight", "attn_q.weight", HEADS),
        ("q_proj.bias", "attn_q.bias", HEADS),
        ("k_proj.weight", "attn_k.weight", KV_HEADS),
    ],
)
def test_rows_permuted_for_interleaved_rope_are_restored(tmp_path, name, stored_name, num_heads):
    wanted = random_tensor(LAYER_SHAPES[stored_name], seed=5)
    path = write_model(tmp_path / "m.gguf", {f"blk.0.{stored_name}": permute(wanted, num_heads)})
    np.testing.assert_array_equal(GgufSource(path).read(f"model.layers.0.self_attn.{name}"), wanted)


def test_metadata_becomes_config(tmp_path):
    config = GgufSource(write_model(tmp_path / "m.gguf")).config
    assert dict(config) == {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,
        "rms_norm_eps": pytest.approx(1e-5),
        "rope_theta": 10000.0,
        "gguf.rope.dimension_count": HEAD_DIM,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": False,
    }


BIASES = {
    f"blk.{layer}.attn_{name}.bias": np.zeros(size, np.float32)
    for layer in range(LAYERS)
    for name, size in (("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM), ("output", HIDDEN))
}
"""Tensors that complete the small model."""


@pytest.mark.parametrize("length", [4_194_304, 2**24])
def test_contexts_of_up_to_2_to_the_24_are_accepted(tmp_path, length):
    source = GgufSource(write_model(tmp_path / "model.gguf", BIASES, context_length=length))
    assert plan_decoder(source, build_decoder(source), {}).plan.context_length == length
    longer = write_model(tmp_path / "longer.gguf", BIASES, context_length=2**24 + 1)
    with pytest.raises(ModelError, match="context_length = 16777217; expected at most 16777216"):
        GgufSource(longer)


def test_num_parameters_of_a_file_with_an_untied_head_counts_it(tmp_path):
    found = []
    for name, extra in (("tied", {}), ("untied", {"output.weight": random_tensor((VOCAB, HIDDEN))})):
        source = GgufSource(write_model(tmp_path / f"{name}.gguf", BIASES | extra))
        found.append(plan_decoder(source, build_decoder(source), {}).num_parameters)
    assert found[1] - found[0] == VOCAB * HIDDEN


def test_optional_metadata_is_read(tmp_path):
    changes = {
        "attention.head_count_kv": None,
        "feed_forward_length": [INNER] * LAYERS,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.sliding_window": 4096,
        "rope.dimension_count": 8,
        "rope.freq_base": 5e5,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 2048,
    }
    extra = {"output.weight": random_tensor((VOCAB, HIDDEN)), "rope_freqs.weight": random_tensor((4,))}
    source = GgufSource(write_model(tmp_path / "m.gguf", extra, **changes))
    config = source.config
    assert config["num_key_value_heads"] == HEADS
    assert config["head_dim"] == 16
    assert config["gguf.rope.dimension_count"] == 8
    assert config["sliding_window"] == 4096
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
    }
    assert config["tie_word_embeddings"] is False
    assert source.info("lm_head.weight").shape == (VOCAB, HIDDEN)
    np.testing.assert_array_equal(source.read("rope_freqs.weight"), extra["rope_freqs.weight"])


def test_tokenizer_metadata_equals_the_gguf_packages(tmp_path):
    path = write_model(tmp_path / "m.gguf")
    metadata = GgufSource(path).metadata
    fields = {k: f for k, f in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}
    assert {key: metadata[key] for key in metadata} == {k: f.contents() for k, f in fields.items()}
    assert metadata["tokenizer.ggml.tokens"] == TOKENS


@pytest.mark.parametrize("block_type", BlockType, ids=lambda t: t.name)
def test_every_block_type_is_read_or_refused_by_name(tmp_path, block_type):
    row_bytes = gguf.quant_shape_to_byte_shape((INNER,), block_type)[0]
    rng = np.random.default_rng(3)
    stored = rng.integers(0, 255, (HIDDEN, row_bytes), np.uint8)
    writer = metadata_writer(tmp_path / "m.gguf")
    for name, values in model_tensors().items():
        if name == "blk.0.ffn_down.weight":
            writer.add_tensor(name, stored, raw_dtype=block_type)
        else:
            writer.add_tensor(name, values)
    finish(writer)
    source = GgufSource(tmp_path / "m.gguf")
    name = "model.layers.0.mlp.down_proj.weight"
    assert source.info(name).stored_as == block_type.name
    assert source.info(name).shape == (HIDDEN, INNER)
    try:
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(stored, block_type)
    except NotImplementedError:
        with pytest.raises(UnsupportedModelError, match=block_type.name):
            source.read(name)
    else:
        np.testing.assert_array_equal(source.read(name), expected)


def test_unknown_tensor_is_named(tmp_path):
    with pytest.raises(ModelError, match="no tensor nothing"):
        GgufSource(write_model(tmp_path / "m.gguf")).read("nothing.weight")


@pytest.mark.parametrize(
    ("changes", "extra", "message"),
    [
        ({"arch": "rwkv6"}, {}, "'rwkv6' is not implemented; supported: .*llama"),
        ({"expert_count": 8}, {}, "llama.expert_count = 8"),
        ({"attention.scale": 0.5}, {}, "llama.attention.scale = 0.5"),
        ({"attention.value_length": 64}, {}, "different length"),
        ({"attention.head_count_kv": [2, 4]}, {}, r"head_count_kv differs between layers: \[2, 4\]"),
        ({}, {"blk.0.ffn_gate_inp.weight": np.ones((4, HIDDEN), np.float32)}, "blk.0.ffn_gate_inp.weight"),
        ({}, {"blk.0.token_embd.weight": np.ones((4, HIDDEN), np.float32)}, "blk.0.token_embd.weight"),
    ],
)
def test_unsupported_feature_is_named(tmp_path, changes, extra, message):
    with pytest.raises(UnsupportedModelError, match=message):
        GgufSource(write_model(tmp_path / "m.gguf", extra, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count": None}, "attention.head_count must be a positive integer, found None"),
        ({"embedding_length": 0}, "embedding_length must be a positive integer, found 0"),
        ({"feed_forward_length": "many"}, "feed_forward_length must be a positive integer, found 'many'"),
        ({"attention.layer_norm_rms_epsilon": -1.0}, "must be a positive number, found -1.0"),
        ({"block_count": 4_000_000_000}, "block_count = 4000000000; expected at most 16777216"),
        ({"attention.head_count": 4096}, "attention.key_length must be a positive integer"),
        ({"attention.head_count": 7}, "7 heads"),
        ({"rope.dimension_count": 64}, "exceeds the head length 32"),
        ({"embedding_length": 128}, "token_embd.weight has shape"),
    ],
)
def test_contradictory_metadata_is_a_model_error(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        GgufSource(write_model(tmp_path / "m.gguf", **changes))


def header(num_tensors=0, num_fields=0, body=b"", version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, num_tensors, num_fields) + body


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def tensor_row(name="t", shape=(4,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


STRING, ARRAY, UINT32 = 8, 9, 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGU", "not a GGUF file"),
        (b"GGUF", "the version at byte 4 needs 4 bytes, 0 are left of 4"),
        (header(version=1), "version 1"),
        (header(version=3 << 24), "big-endian"),
        (header(num_tensors=10**18), "claims 1000000000000000000 tensors"),
        (header(num_fields=10**18), "claims 1000000000000000000 metadata fields"),
        (header(num_fields=1, body=struct.pack("<Q", 2**63) + bytes(64)), "needs 9223372036854775808 bytes"),
        (header(num_fields=1, body=text("k") + struct.pack("<I", 99)), "unknown value type 99"),
        (header(num_fields=1, body=text("x" * 70_000)), "has 70000 bytes, more than 65535"),
        (header(num_fields=1, body=text("a\nb") + bytes(8)), "not a name"),
        (
            header(num_fields=1, body=text("k") + struct.pack("<IQ", STRING, 2**40)),
            "k at byte .* needs 1099511627776 bytes",
        ),
        (
            header(num_fields=1, body=text("k") + struct.pack("<IIQ", ARRAY, UINT32, 2**62)),
            "claims 4611686018427387904 items in k",
        ),
        (
            header(num_fields=1, body=text("k") + struct.pack("<IIQQQ", ARRAY, STRING, 2, 2**63, 0)),
            "strings of k reach past",
        ),
        (
            header(num_fields=1, body=text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + bytes(64)),
            "array of arrays",
        ),
        (header(num_fields=2, body=(text("k") + struct.pack("<II", UINT32, 0)) * 2), "k appears twice"),
        (
            header(num_fields=1, body=text("general.alignment") + struct.pack("<II", UINT32, 24)),
            "general.alignment is 24",
        ),
        (header(num_tensors=1, body=tensor_row(shape=(1,) * 5)), "claims 5 dimensions, expected 1 to 4"),
        (header(num_tensors=1, body=text("t") + struct.pack("<I", 2**32 - 1) + bytes(64)), "dimensions"),
        (header(num_tensors=1, body=tensor_row(shape=(2**60, 2**60)) + bytes(64)), "ends at byte"),
        (header(num_tensors=1, body=tensor_row(shape=(0,))), "impossible shape"),
        (header(num_tensors=1, body=tensor_row(shape=(33,), kind=8)), "Q8_0 has the impossible shape"),
        (header(num_tensors=1, body=tensor_row(kind=77)), "block type 77"),
        (header(num_tensors=1, body=tensor_row(offset=2**50)), "ends at byte"),
        (header(num_tensors=1, body=tensor_row(offset=3) + bytes(64)), "not a multiple of 32"),
        (header(num_tensors=2, body=tensor_row() * 2 + bytes(64)), "appears twice"),
        (header(num_tensors=2, body=tensor_row("a") + tensor_row("b") + bytes(64)), "a and b overlap"),
        (header(), "architecture None is not implemented"),
    ],
)
def test_hostile_header_is_a_model_error_at_once(tmp_path, data, message):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message):
        GgufSource(path)


def test_missing_and_empty_files_are_model_errors(tmp_path):
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelError, match="empty"):
        GgufSource(tmp_path / "empty.gguf")
    with pytest.raises(ModelError, match="cannot read"):
        GgufSource(tmp_path / "absent.gguf")


def test_one_part_of_a_split_file_is_refused(tmp_path):
    writer = metadata_writer(tmp_path / "m.gguf")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("token_embd.weight", model_tensors()["token_embd.weight"])
    finish(writer)
    with pytest.raises(UnsupportedModelError, match="one of 3 parts"):
        GgufSource(tmp_path / "m.gguf")


def split_model(folder, *, counts=(3, 3, 3), numbers=(0, 1, 2), is_doubled=False):
    """Write a small llama in three parts, as llama-gguf-split does; the last part has the last layer's norms."""
    folder.mkdir(exist_ok=True)
    tensors = list(model_tensors().items())
    cuts = [tensors[:3], tensors[3:10], tensors[9 if is_doubled else 10 :]]
    paths = [folder / f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for path, part, count, number in zip(paths, cuts, counts, numbers, strict=True):
        writer = metadata_writer(path) if path == paths[0] else gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.count", count)
        writer.add_uint16("split.no", number)
        writer.add_int32("split.tensors.count", len(tensors))
        for name, values in part:
            writer.add_tensor(name, values)
        finish(writer)
    return paths


def test_parts_of_a_split_file_are_joined(tmp_path):
    whole = GgufSource(write_model(tmp_path / "m.gguf"))
    paths = split_model(tmp_path / "parts")
    for path in paths:
        source = GgufSource(path)
        assert source.path == paths[0]
        assert source.config == whole.config
        assert sorted(source.names()) == sorted(whole.names())
        for name in whole.names():
            np.testing.assert_array_equal(source.read(name), whole.read(name))
            assert source.stored(name).tobytes() == whole.stored(name).tobytes()
    assert checkpoint_files(paths[1]) == paths


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": (3, 4, 3)}, "number 1 of 4 from 0, expected part 2 of 3"),
        ({"numbers": (0, 0, 2)}, "number 0 of 3 from 0, expected part 2 of 3"),
        ({"is_doubled": True}, "which an earlier part has too"),
    ],
)
def test_parts_of_different_files_are_refused(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        GgufSource(split_model(tmp_path, **changes)[0])


def test_missing_part_is_named(tmp_path):
    paths = split_model(tmp_path)
    paths[2].unlink()
    with pytest.raises(ModelError, match=r"cannot read \S+m-00003-of-00003\.gguf"):
        GgufSource(paths[0])


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Return an intact file's content, as a view so that a failing example is not printed in full."""
    return memoryview(write_model(tmp_path_factory.mktemp("sound") / "m.gguf").read_bytes())


@pytest.fixture(scope="module")
def header_bytes(tmp_path_factory):
    """Return the size of its header."""
    return gguf.GGUFReader(write_model(tmp_path_factory.mktemp("sound") / "m.gguf")).data_offset


def read_everything(path: Path) -> None:
    source = GgufSource(path)
    for key in source.metadata:
        source.metadata[key]
    for name in source.names():
        source.read(name)


@given(kept=st.floats(0, 1, exclude_max=True))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_truncated_file_is_a_model_error(tmp_path, sound, kept):
    path = tmp_path / "m.gguf"
    path.write_bytes(sound[: int(kept * len(sound))])
    with pytest.raises(ModelError):
        read_everything(path)


@given(damage=DAMAGE)
@settings(
    max_examples=settings().max_examples * 2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_flipped_bytes_give_values_or_a_model_error_and_bounded_memory(tmp_path, sound, header_bytes, damage):
    damaged = bytearray(sound)
    for place, value in damage:
        damaged[place % header_bytes] = value
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"  # Windows does not replace a mapped file
    path.write_bytes(damaged)
    tracemalloc.start()
    try:
        read_everything(path)
    except ModelError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < ALLOCATION_BOUND_BYTES


def write_quantized(path, kind, change=lambda stored: stored):
    """Write the model with its linears in `kind`; `change` modifies the stored bytes of every linear."""
    writer = metadata_writer(path)
    for name, values in model_tensors().items():
        if values.ndim == 2 and name.startswith("blk."):
            writer.add_tensor(name, change(gguf.quants.quantize(values, kind)), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    finish(writer)
    return path


@pytest.mark.parametrize("kind", [BlockType.Q4_0, BlockType.Q4_1])
def test_blocks_equal_the_gguf_packages_values(tmp_path, kind):
    """Rows of q and k are returned in Hugging Face's order, with their scales."""
    source = GgufSource(write_quantized(tmp_path / "m.gguf", kind))
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj"):
        tensor = f"model.layers.1.{name}.weight"
        blocks, values = source.read_blocks(tensor), source.read(tensor)
        assert (blocks.integers.dtype, blocks.integers.shape) == (np.uint8, values.shape)
        assert blocks.scales.shape == blocks.minima.shape == (len(values), values.shape[1] // 32)
        assert (blocks.scales.dtype, blocks.minima.dtype) == (np.float16, np.float16)
        assert blocks.integers.max() == 15
        np.testing.assert_array_equal(blocks.dequantise(), values)


@pytest.mark.parametrize("kind", [BlockType.Q8_0, BlockType.Q5_1, BlockType.F16])
def test_other_types_have_no_blocks_of_4_bits(tmp_path, kind):
    source = GgufSource(write_quantized(tmp_path / "m.gguf", kind))
    assert source.read_blocks("model.layers.0.mlp.down_proj.weight") is None
    assert source.read_blocks("model.norm.weight") is None
    with pytest.raises(ModelError, match=r"has no tensor nowhere"):
        source.read_blocks("nowhere")


@pytest.mark.parametrize(
    ("kind", "start", "value"),
    [(BlockType.Q4_0, 0, 1e4), (BlockType.Q4_0, 0, np.nan), (BlockType.Q4_1, 0, np.inf), (BlockType.Q4_1, 2, np.nan)],
    ids=["-8 * scale overflows", "Q4_0 scale", "Q4_1 scale", "Q4_1 minimum"],
)
def test_blocks_that_float16_cannot_hold_are_refused(tmp_path, kind, start, value):
    def damage(stored):
        changed = stored.copy()
        changed[1, start : start + 2] = np.float16([value]).view(np.uint8)
        return changed

    source = GgufSource(write_quantized(tmp_path / "m.gguf", kind, damage))
    with pytest.raises(QuantizationError, match=r"tensor blk.1.ffn_up.weight has scales or minima that float16 cannot"):
        source.read_blocks("model.layers.1.mlp.up_proj.weight")


CONFIG = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 32,
}
GROUPED = [(key_head, share) for key_head in range(2) for share in range(3)]
TILED = [(key_head, share) for share in range(3) for key_head in range(2)]


def blocks(num_rows, num_columns):
    rng = np.random.default_rng(0)
    scales, minima = rng.standard_normal((2, num_rows, num_columns // 32)).astype(np.float16)
    integers = rng.integers(0, 16, (num_rows, num_columns)).astype(np.uint8)
    return BlockTensor(integers=integers, scales=scales, minima=minima)


def test_value_heads_of_one_key_head_are_grouped():
    layouts = tiled_value_heads(CONFIG)
    stored = np.array([100 * key_head + share for key_head, share in TILED], np.float32)
    expected = [100 * key_head + share for key_head, share in GROUPED]
    assert layouts["ssm_dt"].restore(stored).tolist() == expected
    np.testing.assert_allclose(layouts["ssm_a"].restore(-np.exp(stored / 100)), np.array(expected) / 100, atol=1e-6)
    keys = -np.arange(16, dtype=np.float32)[:, None]
    qkv = np.concatenate([keys, np.repeat(stored, 32)[:, None]])
    wanted = np.concatenate([keys, np.repeat(np.float32(expected), 32)[:, None]])
    np.testing.assert_array_equal(layouts["attn_qkv"].restore(qkv), wanted)
    np.testing.assert_array_equal(layouts["ssm_conv1d"].restore(qkv), wanted[:, None])
    np.testing.assert_array_equal(layouts["ssm_out"].restore(qkv[16:].T), wanted[16:].T)


@pytest.mark.parametrize("module", ["ssm_out", "attn_gate"])
def test_blocks_move_with_their_values(module):
    layout = tiled_value_heads(CONFIG)[module]
    stored = blocks(3, 192) if module == "ssm_out" else blocks(192, 64)
    restored = layout.restore_blocks(stored)
    np.testing.assert_array_equal(restored.dequantise(), layout.restore(stored.dequantise()))


def test_orders_that_split_blocks_are_refused():
    layout = tiled_value_heads(CONFIG | {"linear_value_head_dim": 16})["ssm_out"]
    with pytest.raises(QuantizationError, match="order of its columns splits blocks of 32"):
        layout.restore_blocks(blocks(2, 96))


def test_axis_of_another_length_than_its_order_is_refused():
    with pytest.raises(ModelError, match=r"it is \[5, 2\], and axis 0 should have the length 6"):
        Layout(rows=np.arange(6)).shape((5, 2))
    with pytest.raises(ModelError, match=r"it is \[\], and axis -1 should have the length 6"):
        Layout(columns=np.arange(6)).shape(())
    with pytest.raises(ModelError, match="5 value heads of linear attention cannot share 2 key heads evenly"):
        tiled_value_heads(CONFIG | {"linear_num_value_heads": 5})


def test_pairs_of_interleaved_rope_become_halves():
    stored = np.arange(8, dtype=np.float32)[:, None]
    assert rotate_half_rows(2, 8).restore(stored)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_shapes_become_those_of_hugging_face():
    assert DEPTHWISE.shape((6, 3)) == (6, 1, 3)
    assert DEPTHWISE.shape((6,)) == (6,)
    assert SINGLE_ROW.shape((6,)) == SINGLE_ROW.shape((1, 6)) == (1, 6)
    np.testing.assert_allclose(LOGARITHM.restore(np.float32([-1, -np.e])), [0, 1], atol=1e-6)
