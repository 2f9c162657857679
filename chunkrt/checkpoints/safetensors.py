"""A Hugging Face folder as a `TensorSource`: config.json, and safetensors or pickled files, memory-mapped.

Source: the safetensors format (huggingface/safetensors, README): 8 bytes of header length, JSON header, data.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints import older_layouts
from chunkrt.checkpoints.catalogue import how_to_fetch
from chunkrt.checkpoints.checkpoint import WEIGHT_FILES, map_file
from chunkrt.checkpoints.source import INT4, BlockTensor, QuantisedWeight, StoredTensor, TensorInfo
from chunkrt.errors import ModelError, UnsupportedModelError, cause_of
from chunkrt.files import check_regular

MAX_DIMENSIONS = 8

QUANTISATION_KEYS = ("quantization_config", "quantization")
"""Keys of config.json with the settings of a quantisation."""

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}


@dataclass(frozen=True, kw_only=True)
class FileTensor(StoredTensor):
    """A tensor and the file that stores it."""

    file: Path


class SafetensorsSource:
    """A folder with config.json and model.safetensors, or model.safetensors.index.json and its shards.

    Without these, pytorch_model.bin or its index and shards are read (`pickled.py`).

    For a multimodal model, the source contains only the text half: its config and its tensors. Weights that another
    library quantised (`quantised.py`) appear under the names and with the shapes of ordinary weights.

    Raises:
        ModelError: a file is missing, truncated or contradicts itself or another.
        UnsupportedModelError: a tensor has an unknown data type, or the quantisation is not supported.
    """

    path: Path
    architecture: str
    config: Mapping[str, Any]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = read_json_object(self.path / "config.json")
        model_type = self.config.get("model_type")
        if not isinstance(model_type, str):
            raise ModelError(f"{self.path / 'config.json'} has no model_type; is it a Transformers model?")
        self.architecture = model_type
        self._tensors: dict[str, FileTensor] = {}
        for name in WEIGHT_FILES:
            whole, index = self.path / name, self.path / f"{name}.index.json"
            if whole.exists():
                self._tensors = read_tensors(whole)
                break
            if index.exists():
                self._read_shards(index)
                break
        else:
            raise ModelError(f"{self.path} has no weights: expected {' or '.join(WEIGHT_FILES)}, or an index of shards")
        if (text := text_half(self.config, self.path / "config.json")) is not None:
            self.config, self.architecture = text, text["model_type"]
            for name in tensors_of_other_halves(self._tensors, self.path):
                del self._tensors[name]
        self._is_older = self.architecture in older_layouts.FAMILIES
        if self._is_older:
            self.config = older_layouts.with_later_keys(self.config)
        self._quantised: dict[str, QuantisedWeight] = {}
        if any(self.config.get(key) for key in QUANTISATION_KEYS):
            self._find_quantised()

    def names(self) -> Sequence[str]:
        """Return the names of all tensors, in the order of the headers."""
        return [*self._tensors, *self._quantised]

    def info(self, name: str) -> TensorInfo:
        """Return the shape and safetensors' type, e.g. "BF16". Raises ModelError if there is no tensor of that name."""
        if (weight := self._quantised.get(name)) is not None:
            return TensorInfo(shape=weight.shape, stored_as=weight.stored_as)
        tensor = self._find(name)
        is_readable = tensor.dtype == "BF16" or tensor.dtype in _FLOATS
        shape = tensor.shape[::-1] if self._is_transposed(name) else tensor.shape
        return TensorInfo(shape=shape, stored_as=tensor.dtype, is_readable=is_readable)

    def read(self, name: str) -> NDArray[np.float32]:
        """Return one tensor as float32; a read-only view of the file if it is stored as float32.

        Raises:
            ModelError: the checkpoint has no tensor of that name, or a float64 value exceeds the range of float32.
            UnsupportedModelError: the tensor is not stored as F64, F32, F16 or BF16.
        """
        if (weight := self._quantised.get(name)) is not None:
            return np.require(weight.read(), np.float32, ["C", "ALIGNED"])
        values = tensor_values(name, self._find(name))
        return np.ascontiguousarray(values.T) if self._is_transposed(name) else values

    def read_blocks(self, name: str) -> BlockTensor | None:
        """See `TensorSource`. Only quantised weights have blocks."""
        if (weight := self._quantised.get(name)) is not None:
            return weight.read_blocks()
        self._find(name)
        return None

    def stored(self, name: str) -> NDArray[np.uint8]:
        """See `TensorSource`. The bytes of a quantised weight are those of all of its parts."""
        if (weight := self._quantised.get(name)) is not None:
            return np.concatenate([self._parts[part].stored.reshape(-1) for part in weight.parts])
        return self._find(name).stored

    def _find_quantised(self) -> None:
        """Find quantised weights, remove their parts from the tensors, and log one line about the weights."""
        from chunkrt.checkpoints.quantised import of_activations, quantised_weights

        self._quantised = quantised_weights(self.config, self._tensors, self.path.name)
        if not self._quantised:
            return
        self._parts = self._tensors
        self.config = {key: value for key, value in self.config.items() if key not in QUANTISATION_KEYS}
        parts = {part for weight in self._quantised.values() for part in weight.parts}
        parts |= of_activations(self._tensors)
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if name not in parts}
        kinds = sorted({weight.stored_as for weight in self._quantised.values()})
        kept = f"; the scheme w4a8-dynamic keeps the integers of {INT4}" if INT4 in kinds else ""
        log.warning(
            "%s: %d weights are quantised (%s); they are converted to float%s",
            self.path.name,
            len(self._quantised),
            ", ".join(kinds),
            kept,
        )

    def _is_transposed(self, name: str) -> bool:
        return self._is_older and older_layouts.is_transposed(self.architecture, name)

    def _find(self, name: str) -> FileTensor:
        if name not in self._tensors:
            raise ModelError(f"{self.path} has no tensor {name}")
        return self._tensors[name]

    def _read_shards(self, index: Path) -> None:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map")
        for shard in dict.fromkeys(weight_map.values()):
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise ModelError(f"{index} names the file {shard!r}, which is not a plain file name next to it")
            for name, tensor in read_tensors(self.path / shard).items():
                if name in self._tensors:
                    raise ModelError(f"{name} is in two files: {self._tensors[name].file} and {tensor.file}")
                self._tensors[name] = tensor
        for name, shard in weight_map.items():
            if name not in self._tensors or self._tensors[name].file.name != shard:
                raise ModelError(f"{index} maps {name} to {shard}, which does not hold it")


def tensor_values(name: str, tensor: FileTensor) -> NDArray[np.float32]:
    """Return a tensor as float32; a read-only view of the file if it is stored as float32.

    Raises:
        ModelError: a float64 value exceeds the range of float32.
        UnsupportedModelError: the tensor is not stored as F64, F32, F16 or BF16.
    """
    if tensor.dtype == "BF16":
        words = tensor.stored.view("<u2").astype(np.uint32)
        words <<= 16  # in place, because tables of embeddings may have several GB
        return words.view(np.float32).reshape(tensor.shape)
    if tensor.dtype not in _FLOATS:
        raise UnsupportedModelError(
            f"{tensor.file}: {name} is stored as {tensor.dtype}, which is not supported for weights; "
            f"expected {', '.join(_FLOATS)} or BF16 (an already quantised checkpoint?)"
        )
    values = tensor.stored.view(_FLOATS[tensor.dtype]).reshape(tensor.shape)
    try:
        with np.errstate(over="raise", invalid="ignore"):
            return np.require(values, np.float32, ["C", "ALIGNED"])
    except FloatingPointError as error:
        raise ModelError(f"{tensor.file}: {name} holds float64 values that exceed float32's range") from error


def read_tensors(path: Path) -> dict[str, FileTensor]:
    """Read the table of tensors of one file, and check every entry."""
    if path.suffix == ".bin":
        from chunkrt.checkpoints.pickled import read_pickled

        found = read_pickled(path).items()
        return {name: FileTensor(file=path, shape=t.shape, dtype=t.dtype, stored=t.stored) for name, t in found}
    data = np.frombuffer(map_file(path), np.uint8)
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if header_bytes > data.size - 8:
        raise _damaged(path, f"its header claims {header_bytes} bytes, the file has {data.size}")
    header = _parse(data[8 : 8 + header_bytes].tobytes(), path)
    header.pop("__metadata__", None)
    payload = data[8 + header_bytes :]
    spans = {name: _span(entry, name, path, payload.size) for name, entry in header.items()}
    in_order = sorted(spans, key=lambda name: spans[name])
    for left, right in pairwise(in_order):
        if spans[left][1] > spans[right][0]:
            raise _damaged(path, f"tensors {left} and {right} overlap at data offset {spans[right][0]}")
    return {
        name: FileTensor(
            file=path,
            shape=tuple(entry["shape"]),
            dtype=entry["dtype"],
            stored=payload[slice(*spans[name])],
        )
        for name, entry in header.items()
    }


def _span(entry: Any, name: str, path: Path, payload_bytes: int) -> tuple[int, int]:
    """Return the location of a tensor's data, after checking its entry {dtype, shape, data_offsets}."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _damaged(path, f"the header's entry of {name} is not {{dtype, shape, data_offsets}}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise UnsupportedModelError(f"{path}: {name} has the data type {dtype!r}; known: {', '.join(_BITS)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise _damaged(path, f"{name} has an impossible shape")
    if not _are_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= payload_bytes:
        raise _damaged(path, f"{name} claims data outside the file's {payload_bytes} data bytes")
    start, end = offsets
    if (end - start) * 8 != prod(shape) * _BITS[dtype]:
        raise _damaged(
            path,
            f"{name} has {end - start} bytes, but {dtype} {shape} needs {prod(shape) * _BITS[dtype] // 8}",
        )
    return start, end


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file. Raise ModelError if it cannot be read, or repeats a name."""
    try:
        check_regular(path)
        return _parse(path.read_bytes(), path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {cause_of(error)}") from error


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its JSON cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise _damaged(path, "its JSON is not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse repeated names in an object: JSON permits them, and readers differ in the value that they use."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice")
    return result


def _damaged(path: Path, found: str) -> ModelError:
    return ModelError(f"{path} is truncated or damaged: {found}; {how_to_fetch(path)}")


log = logging.getLogger(__name__)

SECTION = "text_config"


@dataclass(frozen=True, kw_only=True)
class Composite:
    """Transformers' defaults for a composite model_type: the model_type of its text half, and whether the LM head is
    tied.
    """

    text_type: str
    is_tied: bool


COMPOSITES = {
    "gemma3": Composite(text_type="gemma3_text", is_tied=True),
    "gemma4": Composite(text_type="gemma4_text", is_tied=True),
    "gemma4_unified": Composite(text_type="gemma4_unified_text", is_tied=True),
    "mistral3": Composite(text_type="mistral", is_tied=True),
    "qwen3_5": Composite(text_type="qwen3_5_text", is_tied=False),
    "qwen3_5_moe": Composite(text_type="qwen3_5_moe_text", is_tied=False),
}

_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "quantization")
"""Keys of the complete model that apply to its text half."""

_OTHER_HALVES = re.compile(
    r"(model\.)?(audio_tower|embed_audio|embed_vision|multi_modal_projector|vision_embedder|vision_tower|visual)\."
)


def text_half(config: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """Return the config of the text half, under its own `model_type`; None if the model is not composite.

    Raises:
        ModelError: the config has no section for text, the section's model_type is not a word, or a flag is neither
            true nor false.
    """
    if (composite := COMPOSITES.get(config["model_type"])) is None:
        return None
    text = config.get(SECTION)
    if not isinstance(text, Mapping):
        raise ModelError(f"{path} has no {SECTION}, which the model_type {config['model_type']!r} needs")
    text_type = text.get("model_type", composite.text_type)
    if not isinstance(text_type, str):
        raise ModelError(f"{path}: the model_type of its {SECTION} is {text_type!r}, expected a word")
    ties = [half["tie_word_embeddings"] for half in (config, text) if half.get("tie_word_embeddings") is not None]
    if odd := [tie for tie in ties if not isinstance(tie, bool)]:
        raise ModelError(f"{path}: tie_word_embeddings is {odd[0]!r:.80}, expected true or false")
    whole = {key: config[key] for key in _WHOLE if config.get(key) is not None}
    return {**text, **whole, "model_type": text_type, "tie_word_embeddings": any(ties) if ties else composite.is_tied}


def tensors_of_other_halves(names: Iterable[str], path: Path) -> set[str]:
    """Return the names of tensors that the text half does not read, and log one line about them."""
    found = {name: match[0] for name in names if (match := _OTHER_HALVES.match(name))}
    if found:
        parts = ", ".join(f"{part}*" for part in sorted(set(found.values())))
        log.warning("%s: only text is read; ignoring %d tensors: %s", path.name, len(found), parts)
    return set(found)
