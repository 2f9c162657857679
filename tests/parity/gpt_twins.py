"""GGUF files of GPT-2 and GPT-BigCode, in the form of llama.cpp's converter.

Source: llama.cpp's conversion/gpt2.py (GPT2Model) and starcoder.py (StarCoderModel).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[Any]]
ARCHITECTURES = {"gpt2": "gpt2", "gpt_bigcode": "starcoder"}


def write_gguf(path: Path, known: Any, weights: Weights) -> None:
    """Write the weights of a checkpoint with the config `known`; GPT-2's linears become rows of outputs."""
    import gguf

    family, num_layers = known.model_type, known.n_layer
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == ARCHITECTURES[family])
    writer = gguf.GGUFWriter(path, ARCHITECTURES[family])
    writer.add_name(path.parent.name)
    writer.add_vocab_size(known.vocab_size)
    writer.add_context_length(known.n_positions)
    writer.add_embedding_length(known.n_embd)
    writer.add_feed_forward_length(4 * known.n_embd)
    writer.add_block_count(num_layers)
    writer.add_head_count(known.n_head)
    if family == "gpt_bigcode":
        writer.add_head_count_kv(1)
    writer.add_layer_norm_eps(known.layer_norm_epsilon)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    names = gguf.get_tensor_name_map(architecture, num_layers)
    for tensor, stored in weights.items():
        converted = stored
        if family == "gpt2" and tensor.endswith((".c_attn.weight", ".c_fc.weight", ".c_proj.weight")):
            converted = stored.T
        converted = converted if converted.ndim > 1 else converted.astype(np.float32)
        found = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        assert found is not None, tensor
        writer.add_tensor(found, np.ascontiguousarray(converted))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
