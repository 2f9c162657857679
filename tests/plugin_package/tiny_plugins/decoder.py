"""A decoder family: Llama under another name, whose configs omit keys that all its checkpoints share."""

from chunkrt.checkpoints.gguf_names import LAYER, MODEL, Architecture
from chunkrt.graph.decoders.llama import llama


def tiny_llama(config):
    """Build the module tree of a checkpoint."""
    return llama(config)


tiny_llama.defaults = {"rms_norm_eps": 1e-5}

LALMA = Architecture(
    model_type="tiny_llama",
    model=MODEL,
    layer=LAYER,
    permuted={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
    refused=(),
)
