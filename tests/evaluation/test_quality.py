"""Cost of quantisation on a real model: SmolLM2-135M-Instruct, native integers against ONNX Runtime in float32."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

import chunkrt
from chunkrt.checkpoints.catalogue import find, pulled

NAME = "smollm2-135m-instruct"
MODEL = pulled(find(NAME))
NUM_TOKENS = 512
MOST_PERPLEXITY = 1.04
LEAST_AGREEMENT = 0.90
TEXTS = {
    "harbour": Path(__file__).parents[1] / "data" / "evaluation_text.txt",
    "wikitext": Path(__file__).parents[3] / "shared" / "data" / "wikitext-2-valid.txt",
}

pytestmark = pytest.mark.skipif(MODEL is None, reason=f"{NAME} is not here: chunkrt pull {NAME}")


@pytest.fixture(scope="module")
def native():
    with chunkrt.load(MODEL, npu="native") as engine:
        yield engine


@pytest.fixture(scope="module")
def native_in_blocks():
    with chunkrt.load(MODEL, npu="native", scheme="w4a8-dynamic") as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle():
    """Load in a temporary cache: the float weights take half a gigabyte."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        patch.setenv("CHUNKRT_HOME", folder)
        with chunkrt.load(MODEL, npu="onnxrt", scheme="float", chunk_length=128) as engine:
            patch.undo()
            yield engine


def perplexity(logits, tokens):
    """Return surprisals of tokens 1.. given all before; logits float32 [T, V]."""
    shifted = logits[:-1].astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    chosen = shifted[np.arange(len(tokens) - 1), tokens[1:]]
    return np.exp(np.mean(np.log(np.exp(shifted).sum(axis=1)) - chosen))


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("engine", ["native", "native_in_blocks"])
def test_integers_are_close_to_float(request, engine, oracle, text):
    native = request.getfixturevalue(engine)
    if not TEXTS[text].exists():
        pytest.skip(f"{TEXTS[text].name} is not here")
    tokens = native.tokenizer.encode(TEXTS[text].read_text("utf-8")[:8000], add_special=False, parse_special=False)
    tokens = tokens[:NUM_TOKENS]
    assert len(tokens) == NUM_TOKENS
    quantised, exact = (engine.session().prefill(tokens, logits="all").logits for engine in (native, oracle))
    ratio = perplexity(quantised, tokens) / perplexity(exact, tokens)
    agreement = np.mean(quantised.argmax(axis=1) == exact.argmax(axis=1))
    figures = f"{perplexity(exact, tokens):.2f} in float, {ratio:.4f} times that in integers, agreement {agreement:.3f}"
    assert ratio <= MOST_PERPLEXITY, figures
    assert agreement >= LEAST_AGREEMENT, figures


def test_the_capital_of_france(command):
    finished = command("run", MODEL, "-p", "What is the capital of France?", "-n", 32, "--json")
    assert finished.status == 0
    assert "Paris" in json.loads(finished.out)["text"]


@pytest.mark.slow
def test_the_quantised_model_takes_a_quarter_of_the_bytes(native, oracle):
    """Linears are int8, the table is float16."""
    assert native.loaded.weights.num_bytes < 0.31 * oracle.loaded.weights.num_bytes


@pytest.mark.slow
def test_blocks_of_4_bits_take_less(native, native_in_blocks):
    """The layers' linears take 5 bits a weight instead of 8; LM head and table are unchanged."""
    assert native_in_blocks.loaded.weights.num_bytes < 0.8 * native.loaded.weights.num_bytes
