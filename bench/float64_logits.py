"""Logits of a Hugging Face folder in float64, the reference of `onnx_import.py`.

    python bench/float64_logits.py FOLDER TOKENS.npy LOGITS.npy

Needs torch and Transformers. TOKENS: int64 [T]. LOGITS: float64 [T, V]. Rotary frequencies are the family's own, which
Transformers computes in float32.
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

if __name__ == "__main__":
    folder, tokens, logits = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.no_grad():
        found = model(torch.tensor(np.load(tokens)[None])).logits[0].numpy()
    np.save(logits, found)
