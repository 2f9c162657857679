"""What lies beside a model: the tokenizer, and `genai_config.json`, by which ONNX Runtime GenAI finds its way."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from chunkrt.compiler import Planned
from chunkrt.errors import ConfigError
from chunkrt.onnx_export.settings import DynamicSettings
from chunkrt.tokenizer import Tokenizer

CONFIG = "genai_config.json"
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Of a Hugging Face folder."""

Files = dict[str, bytes]


def genai_files(planned: Planned, settings: DynamicSettings, filename: str) -> Files:
    """The configuration of a dynamic export called `filename`, and its tokenizer, by name.

    Raises:
        ModelError: the checkpoint's tokenizer is damaged.
        UnsupportedModelError: it is of a kind that is not implemented.
    """
    tokenizer = Tokenizer.from_source(planned.source)
    files = _tokenizer_files(planned.source.path, tokenizer)
    files[CONFIG] = json.dumps(_config(planned, settings, filename, tokenizer), indent=1).encode()
    return files


def check_beside(folder: Path, files: Files) -> None:
    """Raises ConfigError if there is another file under one of the names."""
    for name, content in files.items():
        path = folder / name
        if path.exists() and (not path.is_file() or path.read_bytes() != content):
            raise ConfigError(f"{path} exists already and belongs to another model; write to a folder of its own")


def write_beside(folder: Path, files: Files) -> None:
    """Write what is not there yet, each aside and then renamed. Raises ConfigError if that fails."""
    for name, content in files.items():
        aside = folder / f".{name}.part"
        try:
            aside.write_bytes(content)
            aside.replace(folder / name)
        except OSError as error:
            raise ConfigError(f"cannot write {folder / name}: {error.strerror or error}") from error
        finally:
            aside.unlink(missing_ok=True)


def _config(planned: Planned, settings: DynamicSettings, filename: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Source: ONNX Runtime GenAI's genai_config.json, as its model builder writes it."""
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
    """An eos_token_id, which may be one or several; none if there is none."""
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]


def _tokenizer_files(source: Path, tokenizer: Tokenizer | None) -> Files:
    """A folder's own; of a GGUF file what chunkrt reads from it."""
    if source.is_dir():
        return {name: (source / name).read_bytes() for name in TOKENIZER_FILES if (source / name).is_file()}
    if tokenizer is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    settings = tokenizer.settings
    names = {"bos_token": settings.bos_id, "eos_token": next(iter(settings.eos_ids), None)}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": settings.add_bos}
    config |= {
        key: tokenizer.token_bytes[index].decode(errors="replace") for key, index in names.items() if index is not None
    }
    if settings.chat_template is not None:
        config["chat_template"] = settings.chat_template
    return {**files, "tokenizer_config.json": json.dumps(config, indent=1).encode()}
