"""Files of an export, which are complete or absent: the model, tokenizer files in Hugging Face's format, and
`genai_config.json`, which ONNX Runtime GenAI needs to load a dynamic export. A model's external data is written tensor
by tensor, with one in memory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from chunkrt.backends.onnx.scheme_models import DATA_SUFFIX
from chunkrt.errors import ChunkrtError, ConfigError, cause_of
from chunkrt.files import check_writable, remove, written_aside
from chunkrt.graph.partition import Planned
from chunkrt.onnx.exporting.export_settings import DynamicSettings
from chunkrt.tokenizer import Tokenizer
from chunkrt.tokenizer.tokenizer import VOCABULARY_FILE

LARGEST_FILE = 2**31 - 2**24
"""Largest number of bytes of weights in one ONNX file: protobuf's limit is 2 GiB, which includes the graph."""

SMALLEST_EXTERNAL = 1024
"""Size in bytes below which a tensor stays in the model, where shape inference finds it."""


def model_files(path: Path, windows: Sequence[int] = ()) -> tuple[Path, ...]:
    """Return the paths of an export's files, models first. The last one holds the weights if they are separate.

    With several windows, each has its own model, such as `decoder.window32.onnx`; all models share the weights.
    """
    models = [path] if len(windows) < 2 else [path.with_name(f"{path.stem}.window{n}{path.suffix}") for n in windows]
    return *models, path.with_name(path.name + DATA_SUFFIX)


def check_output(path: Path, windows: Sequence[int] = ()) -> None:
    """Raise ConfigError if a model, or one model for each window, cannot be written to a path.

    Reasons are that a model's or the weights' file already exists, or that the name is not valid for a model.
    """
    if path.suffix != ".onnx":
        raise ConfigError(f"--output is {path}, expected a name that ends with .onnx")
    for file in model_files(path, windows):
        try:
            check_writable(file)
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {cause_of(error)}") from error
        if file.exists():
            raise ConfigError(f"{file} exists already; remove it, or write to another name")


def save_model(
    model: ir.Model,
    path: Path,
    *,
    external_data: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write a model; with `external_data` its weights go to a file next to it, with ".data" added to its name.

    Args:
        progress: called with (tensors written, total).

    Raises:
        ConfigError: the file exists already, cannot be written, or would be too large.
        QuantizationError: a weight exceeds the range of the written type.
    """
    check_output(path)
    num_bytes = sum(tensor.nbytes for tensor in _tensors(model))
    if not external_data and num_bytes > LARGEST_FILE:
        raise ConfigError(
            f"the weights are {num_bytes / 1e9:.1f} GB, and one ONNX file holds 2 GB; use --external-data"
        )
    _save({path: model}, path.name + DATA_SUFFIX if external_data else None, progress)


def save_windows(
    models: Mapping[int, ir.Model], path: Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write windows of one decoder to the paths of `model_files`. Weights that several windows use are stored once.

    Args:
        models: the model of each window, in the order of the files.
        progress: called with (tensors written, total).

    Raises:
        ConfigError: a file exists already, or cannot be written.
        QuantizationError: a weight exceeds the range of the written type.
    """
    check_output(path, tuple(models))
    *paths, data = model_files(path, tuple(models))
    _save(dict(zip(paths, models.values(), strict=True)), data.name, progress)


def _save(models: Mapping[Path, ir.Model], data: str | None, progress: Callable[[int, int], None]) -> None:
    """Write models to paths in one folder, and their large weights to a file `data` next to them, if it has a name."""
    first = next(iter(models))
    aside = first.with_name(f".{first.name}.part")
    values = [v for model in models.values() for graph in model.graphs() for v in graph.initializers.values()]
    before = [value.const_value for value in values]
    remove(aside)
    try:
        aside.mkdir(parents=True)
        if data is not None:
            _move_weights(values, aside, data, progress)
        for path, model in models.items():
            ir.save(model, aside / path.name)
        for file in sorted(aside.iterdir(), key=lambda file: file.name != data):  # the models' files last
            file.rename(first.with_name(file.name))
    except ir.serde.SerdeError as error:  # the exception of reading a weight is wrapped several times
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ChunkrtError):
            cause = cause.__cause__
        raise cause or error from None
    except OSError as error:
        raise ConfigError(f"cannot write {first}: {cause_of(error)}") from error
    finally:
        for value, tensor in zip(values, before, strict=True):
            value.const_value = tensor
        remove(aside)


def _move_weights(values: Sequence[ir.Value], folder: Path, data: str, progress: Callable[[int, int], None]) -> None:
    """Write large initializers to a file, with one in memory at a time, and make them refer to it. Weights of a plan
    that have the same name and type in several models are written once.
    """
    groups: dict[object, list[ir.Value]] = {}
    for value in values:
        tensor = value.const_value
        if tensor is not None and tensor.nbytes > SMALLEST_EXTERNAL:
            is_weight = isinstance(tensor, ir.LazyTensor)
            key = (tensor.name, tensor.dtype, tuple(tensor.shape)) if is_weight else id(tensor)
            groups.setdefault(key, []).append(value)
    tensors = [group[0].const_value for group in groups.values()]
    written = ir.external_data.convert_tensors_to_external(
        [tensor for tensor in tensors if tensor is not None],
        folder,
        data,
        callback=lambda tensor, info: progress(info.index + 1, info.total),
    )
    for group, tensor in zip(groups.values(), written, strict=True):
        for value in group:
            value.const_value = tensor


def _tensors(model: ir.Model) -> list[ir.TensorProtocol]:
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    return [value.const_value for value in values if value.const_value is not None]


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
"""Names of the tokenizer files in a Hugging Face folder."""

Files = dict[str, bytes]


def tokenizer_files(planned: Planned) -> Files:
    """Map file names to contents: a folder's own tokenizer files or, for a GGUF file, files made from its tokenizer.

    Raises:
        ModelError: the checkpoint's tokenizer is damaged.
        UnsupportedModelError: the tokenizer's kind is not implemented.
    """
    source = planned.source.path
    if source.is_dir():
        return {name: (source / name).read_bytes() for name in TOKENIZER_FILES if (source / name).is_file()}
    tokenizer = Tokenizer.from_source(planned.source)
    if tokenizer is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        vocabulary = (Path(folder) / VOCABULARY_FILE).read_bytes()
    settings = tokenizer.settings
    tokens = {"bos_token": settings.bos_id, "eos_token": next(iter(settings.eos_ids), None)}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": settings.add_bos}
    config |= {
        key: tokenizer.token_bytes[index].decode(errors="replace") for key, index in tokens.items() if index is not None
    }
    if settings.suffix_ids:
        config["add_eos_token"] = True
    named = {"default": settings.chat_template, "tool_use": settings.tool_template}
    templates = {name: _as_folders_have_it(t, settings.chat_adds_bos) for name, t in named.items() if t is not None}
    if len(templates) > 1:
        config["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()]
    elif templates:
        (config["chat_template"],) = templates.values()
    generation = {"bos_token_id": settings.bos_id, "eos_token_id": list(settings.eos_ids)}
    return {
        VOCABULARY_FILE: vocabulary,
        "tokenizer_config.json": json.dumps(config, indent=1).encode(),
        "generation_config.json": json.dumps(generation, indent=1).encode(),
    }


def _as_folders_have_it(template: str, chat_adds_bos: bool) -> str:
    """Return a GGUF file's chat template, preceded by the beginning token if the tokenizer would add this token."""
    return "{{- bos_token }}" + template if chat_adds_bos and "bos_token" not in template else template


def check_beside(folder: Path, files: Files) -> None:
    """Raise ConfigError if a different file exists under one of the names."""
    for name, content in files.items():
        path = folder / name
        if path.exists() and (not path.is_file() or path.read_bytes() != content):
            raise ConfigError(f"{path} exists already and belongs to another model; write to another folder")


def write_beside(folder: Path, files: Files) -> None:
    """Write missing files, each to a temporary name that is then renamed. Raises ConfigError if writing fails."""
    for name, content in files.items():
        if (folder / name).exists():
            continue
        try:
            with written_aside(folder / name) as aside:
                aside.write_bytes(content)
        except OSError as error:
            raise ConfigError(f"cannot write {folder / name}: {cause_of(error)}") from error


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
