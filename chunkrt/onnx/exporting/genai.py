"""`genai_config.json`, which ONNX Runtime GenAI needs to load a dynamic export."""

from __future__ import annotations

import json
from typing import Any

from chunkrt.graph.partition import Planned
from chunkrt.onnx.exporting.beside import Files
from chunkrt.onnx.exporting.settings import DynamicSettings
from chunkrt.tokenizer import Tokenizer


def genai_config(planned: Planned, settings: DynamicSettings, filename: str) -> Files:
    """Return the configuration of a dynamic export whose file is called `filename`.

    Raises:
        ModelError: the checkpoint's tokenizer is damaged.
        UnsupportedModelError: the tokenizer's kind is not implemented.
    """
    config = _config(planned, settings, filename, Tokenizer.from_source(planned.source))
    return {"genai_config.json": json.dumps(config, indent=1).encode()}


def _config(planned: Planned, settings: DynamicSettings, filename: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the configuration. Source: ONNX Runtime GenAI's genai_config.json, as its model builder writes it."""
    config, plan = planned.source.config, planned.plan
    nodes = [node for subgraph in plan.subgraphs for node in subgraph.nodes]
    attention = next(node for node in nodes if node.op == "CachedAttention")
    (width,) = (plan.tensors[node.outputs[0]].shape[-1] for node in nodes[:1])
    eos = list(tokenizer.settings.eos_ids) if tokenizer else _ids(config.get("eos_token_id"))
    bos = tokenizer.settings.bos_id if tokenizer else config.get("bos_token_id")
    end: int | list[int] = eos[0] if len(eos) == 1 else eos
    pad = config.get("pad_token_id")
    return {
        "model": {
            **({} if bos is None else {"bos_token_id": bos}),
            "eos_token_id": end,
            "pad_token_id": pad if isinstance(pad, int) else next(iter(eos), 0),
            "context_length": settings.context,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": filename,
                "head_size": attention.attributes["head_dim"],
                "hidden_size": width,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": attention.attributes["num_heads"],
                "num_hidden_layers": sum(node.op == "CachedAttention" for node in nodes),
                "num_key_value_heads": attention.attributes["num_kv_heads"],
            },
            "type": plan.family,
            "vocab_size": plan.vocab_size,
        },
        "search": {
            "do_sample": False,
            "max_length": settings.context,
            "num_beams": 1,
            "past_present_share_buffer": True,
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
        },
    }


def _ids(value: object) -> list[int]:
    """Return an eos_token_id, which may be one or several, as a list; empty if there is none."""
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]
