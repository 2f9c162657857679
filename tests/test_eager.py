"""Tests of `chunkrt.eager`: modules called on arrays, compared with the values that Transformers computed."""

from pathlib import Path

import numpy as np
import pytest
from fixture_checkpoints import NAMES, ONE_OF_EACH_STATE, checkpoint, expected_logits, input_ids

import chunkrt
from chunkrt import eager
from chunkrt.errors import ConfigError, PartitionError

DATA = Path(__file__).parent / "data"
TOLERANCE = 1e-5
"""Largest error relative to the largest magnitude; float32 sums of this depth stay below 1e-6 of it at each step."""


def assert_close(found, expected):
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.fixture(scope="module", params=["llama_gqa", "gemma3_window_5"])
def compared(request):
    """Return a tree, and the inputs and outputs of Transformers' modules."""
    with np.load(DATA / f"{request.param}.values.npz") as values:
        return eager.load(checkpoint(request.param)), dict(values)


def test_module_gives_the_values_of_transformers(compared):
    tree, values = compared
    called = set()
    for path in tree.modules():
        if path and f"input:{path}" in values and f"output:{path}" in values:
            hidden = values[f"input:{path}"]
            found = tree.module(path)(hidden, state=tree.state(len(hidden)))
            assert_close(found, values[f"output:{path}"])
            called.add(path.rpartition(".")[2])
    assert {"input_layernorm", "self_attn", "o_proj", "mlp", "down_proj", "0"} <= called


def logits_by_layer(tree, tokens, state):
    hidden = tree.model.embed_tokens(tokens)
    for layer in tree.model.layers:
        hidden = layer(hidden, state=state)
    norm = tree.model.embedding_norm if tree.plan.family == "lfm2" else tree.model.norm
    return tree.lm_head(norm(hidden))


@pytest.mark.parametrize("name", ONE_OF_EACH_STATE)
def test_layers_in_pieces_give_the_logits_of_transformers(name):
    tree, tokens = eager.load(checkpoint(name)), input_ids(name)
    state, pieces = tree.state(len(tokens)), []
    for piece in (tokens[:7], tokens[7:8], tokens[8:]):
        pieces.append(logits_by_layer(tree, piece, state))
        state.advance(len(piece))
    assert_close(np.concatenate(pieces), expected_logits(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_decoder_gives_the_logits_of_transformers(name):
    tree, tokens = eager.load(checkpoint(name)), input_ids(name)
    state, half = tree.state(len(tokens)), len(tokens) // 2
    first = tree(tokens[:half], np.arange(half), state=state)
    state.advance(half)
    second = tree(tokens[half:], np.arange(len(tokens) - half), state=state)
    assert_close(np.concatenate([first, second]), expected_logits(name))


def distance(found, expected):
    """Return the root mean square of the difference relative to that of the expected values."""
    return np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))


@pytest.mark.parametrize("name", ONE_OF_EACH_STATE)
def test_compiled_modules_give_the_bits_of_an_engine(name):
    tokens, options = input_ids(name), {"scheme": "w8a8-dynamic"}
    tree = eager.load(checkpoint(name), backend="native", **options)
    pieces, state = [], tree.state(len(tokens))
    for piece in (tokens[:7], tokens[7:8], tokens[8:]):
        pieces.append(logits_by_layer(tree, piece, state))
        state.advance(len(piece))
    whole = tree(tokens, np.arange(len(tokens)), state=tree.state(len(tokens)))
    options |= {"npu": "native", "cache_dtype": "float32", "attention_math": "float32"}
    with chunkrt.load(checkpoint(name), **options) as engine:
        expected = engine.session().prefill(tokens, logits="all").logits
    np.testing.assert_array_equal(whole, expected)
    assert distance(np.concatenate(pieces), expected) < 0.02  # the delta rule sums the rows of a piece in another order


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3_next"])
def test_modules_compiled_in_float_give_the_logits_of_transformers(name):
    tree, tokens = eager.load(checkpoint(name), backend="onnxrt", scheme="float"), input_ids(name)
    found = tree(tokens, np.arange(len(tokens)), state=tree.state(len(tokens)))
    assert_close(found, expected_logits(name))


def test_hook_on_compiled_modules_sees_and_replaces_values():
    name = "llama_gqa"
    tree, reference = eager.load(checkpoint(name), backend="native"), eager.load(checkpoint(name))
    tokens = input_ids(name)

    def outputs(tree, pattern, change):
        seen = {}

        def see(name, array):
            seen[name] = array
            return change(array)

        with tree.hook(pattern, see):
            return seen, tree(tokens, [len(tokens) - 1], state=tree.state(len(tokens)))

    for change in (lambda array: None, np.zeros_like):
        seen, logits = outputs(tree, "*.mlp.down_proj.output", change)
        expected_seen, expected = outputs(reference, "*.mlp.down_proj.output", change)
        assert list(seen) == list(expected_seen)
        for name, array in seen.items():
            assert distance(array, expected_seen[name]) < 0.05
        assert distance(logits, expected) < 0.05


def test_error_of_a_hook_restores_the_state_of_compiled_modules():
    tree = eager.load(checkpoint("qwen3_next"), backend="native")
    tokens, state = input_ids("qwen3_next")[:9], tree.state(9)

    def fail(name, array):
        raise RuntimeError(name)

    with tree.hook("lm_head.output", fail), pytest.raises(RuntimeError, match=r"lm_head\.output"):
        tree(tokens, [8], state=state)
    assert not any(tensor.any() for tensor in state.tensors.values())
    first = tree(tokens, [8], state=state)
    np.testing.assert_array_equal(first, tree(tokens, [8], state=tree.state(9)))


def test_wrong_backends_and_schemes_are_refused():
    for options, message in [
        ({"backend": "qnn"}, "qnn"),
        ({"backend": None}, "unknown backend 'None'"),
        ({"context_length": 2.5}, "context_length is 2.5, expected a whole number of at least 1"),
        ({"scheme": "w8a16"}, "scheme is 'w8a16', and the reference computes without one; choose backend='native'"),
        ({"backend": "native", "scheme": "w9"}, "w9"),
    ]:
        with pytest.raises(ConfigError, match=message):
            eager.load(checkpoint("llama_gqa"), **options)
    with pytest.raises(PartitionError, match=r"native cannot run subgraph static\.0 .*`backend='onnxrt'`"):
        eager.load(checkpoint("llama_gqa"), backend="native", scheme="float")
    tree = eager.load(checkpoint("llama_gqa"), backend="native")
    inside = next(name for name in tree.plan.tensors if ".mlp." in name and "sigmoid" in name.lower())
    hidden = np.ones((3, 48), np.float32)
    with tree.hook(inside, print), pytest.raises(ConfigError, match="native computes inside of an operator"):
        tree.model.layers[0](hidden, state=tree.state(3))


def test_hook_sees_and_replaces_values():
    """Without its feed-forward, a layer adds attention's result to its input."""
    tree, path = eager.load(checkpoint("llama_gqa")), "model.layers.1"
    with np.load(DATA / "llama_gqa.values.npz") as values:
        hidden = values[f"input:{path}"]
        attended, projected = values[f"output:{path}.self_attn"], values[f"output:{path}.mlp.down_proj"]
    layer, seen = tree.model.layers[1], {}

    def remove(name, array):
        seen[name] = array
        return np.zeros_like(array)

    with tree.hook("*.mlp.down_proj.output", remove):
        changed = layer(hidden, state=tree.state(12))
    assert_close(changed, hidden + attended)
    assert list(seen) == [f"{path}.mlp.down_proj.output"]
    assert_close(seen[f"{path}.mlp.down_proj.output"], projected)
    assert not np.allclose(layer(hidden, state=tree.state(12)), changed)


def test_error_restores_the_state():
    tree = eager.load(checkpoint("qwen3_next"))
    tokens, state = input_ids("qwen3_next")[:9], tree.state(9)

    def fail(name, array):
        raise RuntimeError(name)

    with tree.hook("lm_head.output", fail), pytest.raises(RuntimeError, match=r"lm_head\.output"):
        tree(tokens, [8], state=state)
    assert not any(tensor.any() for tensor in state.tensors.values())
    assert_close(tree(tokens, [8], state=state), expected_logits("qwen3_next")[8:9])


def test_wrong_calls_are_refused():
    tree, short = eager.load(checkpoint("llama_gqa")), eager.load(checkpoint("llama_gqa"), context_length=8)
    layer, hidden = tree.model.layers[0], np.zeros((3, 48), np.float32)
    for call, message in [
        (lambda: layer(hidden), r"model\.layers\.0 keeps a state or reads positions; pass state="),
        (lambda: layer(hidden, state=tree.state(2)), "3 tokens at position 0 exceed the 2 positions"),
        (lambda: layer(hidden, state=eager.load(checkpoint("llama_gqa")).state(8)), "made by another tree"),
        (lambda: layer(hidden[:, :5], state=tree.state(8)), r"cannot be c.* with float32 \[3, 5\]|from these arrays"),
        (lambda: layer(hidden, hidden, state=tree.state(8)), "cannot be called with"),
        (lambda: layer(hidden, hidden[:1], state=tree.state(8)), "the inputs have 1 and 3 rows"),
        (lambda: layer(hidden[0]), r"an input is float32 \[48\], expected"),
        (lambda: tree.model.embed_tokens([1, -1]), "the number -1, expected 0 or more"),
        (lambda: tree.model.embed_tokens([1, 128]), "cannot be computed from these arrays"),
        (lambda: tree.hook("*.mlp.down.output", print).__enter__(), r"pattern '\*.mlp.down.output' matches no value"),
        (lambda: tree.state(0), "the state has 0 positions"),
        (lambda: short.state(9), r"the state has 9 positions, expected 1 to 8 \(`context_length`\)"),
        (lambda: tree.state(8).advance(9), "cannot advance by 9 tokens, expected a whole number, 0 to 8"),
        (lambda: tree.state(8).advance(-1), "cannot advance by -1 tokens"),
        (lambda: tree.state(8).advance(1.5), "cannot advance by 1.5 tokens"),
        (lambda: layer(hidden, state={}), "the state was made by another tree"),
        (lambda: layer(hidden[:0], state=tree.state(8)), "an input has no rows; give at least one"),
        (lambda: tree("Hello", [0], state=tree.state(8)), "an input is text, expected token ids; encode it with"),
        (lambda: tree.hook("*", 1).__enter__(), "the hook is 1, expected a function"),
        (lambda: tree.module("model.layers.9"), "has no module 'model.layers.9'"),
        (lambda: eager.load(checkpoint("llama_gqa"), context_length=0), "context_length is 0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()
    with pytest.raises(AttributeError, match=r"has no module 'layer'; there are: embed_tokens, layers, norm, rope"):
        tree.model.layer  # noqa: B018
    text = tree.hook("*.input_layernorm.output", lambda name, array: "x")
    with text, pytest.raises(ConfigError, match=r"returns 'x', expected an array of numbers"):
        layer(hidden, state=tree.state(8))
    shorter = tree.hook("*.input_layernorm.output", lambda name, array: array[:1])
    with shorter, pytest.raises(ConfigError, match=r"returns the shape \[1, 48\], expected \[3, 48\]"):
        layer(hidden, state=tree.state(8))
