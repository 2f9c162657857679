"""A tiny Gemma 3 whose residual stream exceeds float16, like that of Gemma 3 270M."""

import json
import shutil
from pathlib import Path

import numpy as np
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from safetensors.numpy import load_file, save_file

from chunkrt.checkpoints.source import weights_digest
from chunkrt.compile.calibrate import calibrate
from chunkrt.compile.compiler import plan_checkpoint

NAME, FACTOR = "gemma3_scaled", 8192
PEAK, EXPONENT = 112_461, 2
"""Peak of the stream, which is 13.7 in the fixture. The embedding table stays within float16, its storage: 35,937."""


def wide_gemma(folder: Path) -> tuple[Path, Path]:
    """Write a checkpoint to a new folder; return it and its calibration.

    The embeddings and all values that are added to them are FACTOR times those of the fixture, because weights of the
    norms after the linears are FACTOR times larger. Norms of the stream therefore have the same results, except for
    epsilon. The head is tied to the embeddings, so logits are FACTOR times those of the fixture.
    """
    model = shutil.copytree(checkpoint(NAME), folder / "model")
    weights = {name: array.astype(np.float32) for name, array in load_file(model / "model.safetensors").items()}
    for name, array in weights.items():
        if name == "model.embed_tokens.weight":
            weights[name] = array * np.float32(FACTOR)
        elif name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            weights[name] = np.float32(FACTOR) * (1 + array) - 1
    save_file(weights, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    planned = plan_checkpoint(model, {})
    found = calibrate(
        planned.plan, planned.load, np.array(input_ids(NAME)), model="wide", weights=weights_digest(planned.source)
    )
    found.save(folder / "calibration.npz")
    return model, folder / "calibration.npz"


def wide_logits():
    """Return Transformers' logits of the fixture, float32 [T, V], times FACTOR, and the prompt."""
    return FACTOR * expected_logits(NAME), np.array(input_ids(NAME))
