"""A Hugging Face folder in float32, converted from a GGUF file by transformers; several runtimes start from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def convert(source: Path, target: Path, options: Mapping[str, Any]) -> None:
    """Dequantise a GGUF file. It has no options."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**checkpoint, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are plain float32 by now, and may be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**checkpoint).save_pretrained(target)
