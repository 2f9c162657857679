"""What peers have and chunkrt has not, or has elsewhere: what to use instead, for who types it by habit."""

from __future__ import annotations

_SCHEMA = "answers by a schema are the server's: chunkrt serve MODEL, with response_format (docs/server.md)"
INSTEAD = {
    "tokenize": "in Python: chunkrt.load(MODEL).tokenizer.encode(TEXT)",
    "--lora": "adapters are not applied; merge it into the checkpoint first, as peft's merge_and_unload does",
    "--adapter-path": "adapters are not applied; merge it into the checkpoint first, as mlx_lm.fuse does",
    "--grammar": _SCHEMA,
    "--json-schema": _SCHEMA,
    "--model-draft": "there is no speculation with a second model; run MODEL alone",
    "--draft-model": "there is no speculation with a second model; run MODEL alone",
}
