"""A tiny checkpoint that an NPU can run, with its calibration on random or given tokens."""

from pathlib import Path

import numpy as np
from fixture_checkpoints import checkpoint

from chunkrt.checkpoints.source import weights_digest
from chunkrt.compile.calibrate import calibrate
from chunkrt.compile.compiler import plan_checkpoint


def calibrated(name: str | Path, path: Path, tokens: object = None) -> Path:
    """Write a calibration to a path and return its checkpoint; random tokens do not contain the ids 0 to 2."""
    model = checkpoint(name) if isinstance(name, str) else name
    planned = plan_checkpoint(model, {})
    drawn = np.random.default_rng(1).integers(3, planned.plan.vocab_size, 128)
    text = drawn if tokens is None else np.asarray(tokens)
    weights = weights_digest(planned.source)
    calibrate(planned.plan, planned.load, text, model="toy", weights=weights).save(path)
    return model
