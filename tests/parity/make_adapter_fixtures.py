"""Write tests/data/adapters: LoRA adapters that PEFT saved, and the logits of PEFT's models.

Run it with torch, transformers, peft and gguf:

    python tests/parity/make_adapter_fixtures.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

FIXTURES = Path(__file__).parent / "fixtures"
FOLDER = Path(__file__).parents[1] / "data" / "adapters"
SETTINGS: dict[str, dict[str, Any]] = {
    "llama_gqa": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"down_proj": 3},
    },
    "phi3_window_120": {
        "r": 3,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": ["qkv_proj", "gate_up_proj"],
        "layers_to_transform": [1],
    },
    "llama_biased": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "o_proj", "down_proj"]},
}
GGUF_NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "o_proj": "attn_output", "down_proj": "ffn_down"}


def write_gguf(path: Path, folder: Path, config: dict[str, Any]) -> None:
    """Write an adapter of the Llama family in the form of llama.cpp's convert_lora_to_gguf.py."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", json.loads((folder / "adapter_config.json").read_text())["lora_alpha"])
    counts = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in load_file(folder / "adapter_model.safetensors").items():
        layer, module = name.split(".")[4], name.split(".")[6]
        part = "a" if ".lora_A." in name else "b"
        if part == "b" and module in counts:
            values = values.reshape(counts[module], 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"blk.{layer}.{GGUF_NAMES[module]}.weight.lora_{part}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    for name, settings in SETTINGS.items():
        torch.manual_seed(sum(map(ord, name)))
        base = AutoModelForCausalLM.from_pretrained(FIXTURES / name, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(init_lora_weights=False, **settings)).eval()
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "README.md").unlink(missing_ok=True)
        path = FOLDER / name / "adapter_config.json"
        path.write_text(path.read_text().replace(f"{FIXTURES}/", ""))
        input_ids = np.load(FIXTURES / name / "expected.npz")["input_ids"]
        with torch.no_grad():
            logits = model(torch.from_numpy(input_ids)[None]).logits[0].numpy()
        np.savez_compressed(FOLDER / name / "expected.npz", logits=logits)
    config = json.loads((FIXTURES / "llama_biased" / "config.json").read_text())
    write_gguf(FOLDER / "llama_biased.gguf", FOLDER / "llama_biased", config)
