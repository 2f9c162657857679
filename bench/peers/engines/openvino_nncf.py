"""A model for OpenVINO GenAI with activations and weights in int8, quantised by NNCF from a GGUF file in float16."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CALIBRATION = Path(__file__).parents[3] / "docs" / "architecture.md"
"""Its text provides the ranges of activations: number of samples, and their length in tokens."""
NUM_SAMPLES, SAMPLE_TOKENS = 16, 128
STAYS_FLOAT = ("Add", "Broadcast", "Concat", "Divide", "Gather", "Multiply", "Power", "ReduceMean")
STAYS_FLOAT += ("ScaledDotProductAttention", "Subtract", "Swish")
"""Operations that are not products of weights. OpenVINO cannot run statistics outputs within attention."""


def convert(source: Path, target: Path, options: Mapping[str, Any]) -> None:
    """Quantise OpenVINO GenAI's conversion of a GGUF file. It has no options."""
    import nncf
    import numpy as np
    import openvino
    import openvino_genai

    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        file = Path(folder) / source.name
        shutil.copy(source, file)  # the model is written next to it
        tokenizer = openvino_genai.LLMPipeline(str(file), "CPU", enable_save_ov_model=True).get_tokenizer()
        ids = tokenizer.encode(CALIBRATION.read_text("utf-8")).input_ids.data.reshape(-1)

        def inputs(sample: int) -> dict[str, Any]:
            tokens = ids[None, sample * SAMPLE_TOKENS : (sample + 1) * SAMPLE_TOKENS]
            return {
                "input_ids": tokens,
                "attention_mask": np.ones_like(tokens),
                "position_ids": np.arange(SAMPLE_TOKENS)[None],
                "beam_idx": np.zeros(1, np.int32),
            }

        quantised = nncf.quantize(
            openvino.Core().read_model(file.with_name("openvino_model.xml")),
            nncf.Dataset(range(NUM_SAMPLES), inputs),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=NUM_SAMPLES,
            ignored_scope=nncf.IgnoredScope(types=list(STAYS_FLOAT), validate=False),
        )
        target.mkdir()
        openvino.save_model(quantised, target / "openvino_model.xml")
        for part in file.parent.glob("openvino_*tokenizer.*"):
            shutil.copy(part, target)
