"""Answers of a newly installed package: a line of JSON, with the bits of its logits.

Run by the Python that has it, without pytest: `make wheels`, `make test-arm-package` and cibuildwheel use it.
"""

import contextlib
import hashlib
import io
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import numpy as np

import chunkrt
from chunkrt import _native
from chunkrt.backends.native.cpu import cpu_info
from chunkrt.cli import main

FIXTURES = Path(__file__).resolve().parents[1] / "parity" / "fixtures"
TOLERANCE = 1e-4  # from tests/engine/test_parity.py


def answer(model: str, *options: str) -> str:
    """Return the output of `chunkrt run`."""
    sys.argv = ["chunkrt", "run", model, "--json", *options]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    return json.loads(out.getvalue())["text"]


def float_logits_are_those_of_transformers() -> None:
    name = "llama_gqa"
    expected = np.load(FIXTURES / name / "expected.npz")
    with chunkrt.load(FIXTURES / name, scheme="float", npu="onnxrt") as engine, engine.session() as session:
        found = session.prefill(expected["input_ids"].tolist(), logits="all").logits
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=TOLERANCE)


def digest_of_logits(name: str) -> str:
    """Return bits of the int8 kernels: integers are exact, so they are equal on every processor."""
    tokens = np.load(FIXTURES / name / "expected.npz")["input_ids"].tolist()
    with (
        chunkrt.load(FIXTURES / name / "model.gguf", prefix_cache="off", attention_math="float32") as engine,
        engine.session() as session,
    ):
        return hashlib.sha256(session.prefill(tokens, logits="all").logits.tobytes()).hexdigest()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        os.environ["CHUNKRT_HOME"] = home
        float_logits_are_those_of_transformers()
        found = {
            "machine": platform.machine(),
            "kernels": sorted(set(cpu_info()["selected"].values())),
            "module": _native.__file__,
            "text": answer(str(FIXTURES / "llama_biased_gguf" / "model.gguf"), "-p", "Hello, world", "-n", "8"),
            "logits": digest_of_logits("llama_biased_gguf"),
        }
    print(json.dumps(found))
