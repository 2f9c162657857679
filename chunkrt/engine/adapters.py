"""LoRA adapters of an engine, which sessions choose by name at run time."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.low_rank import MAX_RANK, Factors, LoadedAdapter
from chunkrt.checkpoints.adapters import Adapter, LowRank, adapter_files, read_adapter
from chunkrt.checkpoints.safetensors import tensors_of_other_halves
from chunkrt.engine.arguments import require_path
from chunkrt.engine.declaration import is_number
from chunkrt.engine_directory.adapter_targets import AdapterTargets, Target
from chunkrt.engine_directory.content import file_digest
from chunkrt.errors import ConfigError, ModelError, UnsupportedModelError, unknown_name
from chunkrt.quant.folding import Folding

if TYPE_CHECKING:
    from chunkrt.engine.ranks.leader import EngineMirror

Float32 = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class _BaseProperties:
    """Properties of the checkpoint on which the reading of an adapter depends."""

    path: Path
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]


class EngineAdapters:
    """Adapters that are loaded, by name.

    Args:
        folder: the engine directory, for messages.
        targets: the linears that adapters may change; None if the engine takes no adapters.
        folding: transformations of the weights of these linears.
        mirror: the engines of the other ranks, which load the same adapters.
    """

    def __init__(
        self, folder: Path, targets: AdapterTargets | None, folding: Folding, mirror: EngineMirror | None = None
    ) -> None:
        self._folder, self._targets, self._folding, self._mirror = folder, targets, folding, mirror
        self._loaded: dict[str, LoadedAdapter] = {}
        self._lock = Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaded adapters, in the order in which they were loaded."""
        return tuple(self._loaded)

    def load(self, path: str | os.PathLike[str], name: str | None, scale: float) -> str:
        """Load an adapter and return its name, by default that of its file or folder. See `Engine.load_adapter`."""
        path = Path(require_path("path", path))
        name = path.stem if name is None else name
        if isinstance(name, str) and name in self._loaded:
            raise ConfigError(f"an adapter {name!r} is already loaded; unload it, or choose another name")
        loaded = self.read(path, name, scale)
        if self._mirror is not None:
            self._mirror.load_adapter(loaded, path.absolute(), scale)
        with self._lock:
            if name in self._loaded:
                raise ConfigError(f"an adapter {name!r} is already loaded; unload it, or choose another name")
            self._loaded[name] = loaded
        return name

    def read(self, path: Path, name: str, scale: float) -> LoadedAdapter:
        """Return an adapter that no session can choose yet. The errors are those of `Engine.load_adapter`."""
        if self._targets is None:
            raise ConfigError("this engine takes no adapters; load the model with `adapters=True`")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"name is {name!r}, expected a non-empty text")
        if not is_number(scale) or not math.isfinite(scale):
            raise ConfigError(f"scale is {scale!r}, expected a finite number")
        metadata = {"general.architecture": self._targets.architecture} if self._targets.architecture else {}
        adapter = read_adapter(path, _BaseProperties(path=self._folder, config=self._targets.config, metadata=metadata))
        content = "".join(map(file_digest, adapter_files(path))) + ("" if scale == 1 else f" scale {float(scale)!r}")
        digest = hashlib.sha256(content.encode()).hexdigest()
        factors = {
            weight: Factors(*self._folding.apply_to_product(weight, *pair))
            for weight, pair in _factors(adapter, self._targets, scale).items()
        }
        return LoadedAdapter(name, digest, factors)

    def unload(self, name: str) -> None:
        """Forget an adapter. Raise ConfigError if there is none of that name."""
        with self._lock:
            self._find(name)
            del self._loaded[name]

    def find(self, name: str | None) -> LoadedAdapter | None:
        """Return the adapter of a name; None for None. Raise ConfigError if there is none of that name."""
        return None if name is None else self._find(name)

    def _find(self, name: str) -> LoadedAdapter:
        if not isinstance(name, str) or name not in self._loaded:
            if isinstance(name, str) and self._loaded:
                raise unknown_name("adapter", name, tuple(self._loaded))
            raise ConfigError(f"adapter is {name!r:.80}, but no adapter is loaded; call engine.load_adapter")
        return self._loaded[name]


def _factors(adapter: Adapter, targets: AdapterTargets, scale: float) -> dict[str, Factors]:
    """Return the factors of each linear that an adapter changes, with its products multiplied by `scale`.

    Raises:
        ConfigError: the scale is too large for float32.
        ModelError: the adapter belongs to another model.
        UnsupportedModelError: it changes a weight that cannot be adapted at run time.
    """
    if any(abs(scale * product.scale) > float(np.finfo(np.float32).max) for product in adapter.products.values()):
        raise ConfigError(
            f"scale is {scale!r}, which is too large for the adapter {adapter.path}; choose a smaller one"
        )
    ignored = tensors_of_other_halves(adapter.products, adapter.path)
    left = {name: product for name, product in adapter.products.items() if name not in ignored}
    factors = {}
    for weight, target in targets.linears.items():
        parts: list[LowRank | None] = []
        for tensor in target.tensors:
            name = next((name for name in tensor.names if name in left), None)
            part = None if name is None else left.pop(name)
            if part is not None and part.shape != (tensor.num_rows, target.num_inputs):
                raise ModelError(
                    f"the adapter {adapter.path} changes {name} as {list(part.shape)}, and the model has "
                    f"{[tensor.num_rows, target.num_inputs]}; is it for another model?"
                )
            if part is not None and part.base is not None:
                raise UnsupportedModelError(
                    f"the adapter {adapter.path} replaces {name}; load the model with `adapter`"
                )
            parts.append(part)
        if (rank := sum(len(part.a) for part in parts if part is not None)) > MAX_RANK:
            raise UnsupportedModelError(
                f"the adapter {adapter.path} has rank {rank} for {weight}, and at run time at most {MAX_RANK} is "
                "supported; load the model with `adapter`"
            )
        if any(part is not None for part in parts):
            factors[weight] = _joined(parts, target, scale)
    if not factors and not left:
        raise ModelError(f"the adapter {adapter.path} changes no tensor of the decoder")
    if left:
        raise UnsupportedModelError(
            f"the adapter {adapter.path} changes {next(iter(left))}, which no linear of the layers reads at run time; "
            "load the model with `adapter`, or use the adapter of this model"
        )
    return factors


def _joined(parts: list[LowRank | None], target: Target, scale: float) -> Factors:
    """Return the factors [K, r] and [r, N] of a linear from the products of its tensors; r is the sum of the ranks."""
    rank = sum(len(part.a) for part in parts if part is not None)
    a = np.zeros((target.num_inputs + 1, rank), np.float32)  # the last row and column are zeros, for padding
    b = np.zeros((rank, sum(tensor.num_rows for tensor in target.tensors) + 1), np.float32)
    first_rank = first_row = 0
    for tensor, part in zip(target.tensors, parts, strict=True):
        if part is not None:
            ranks = slice(first_rank, first_rank + len(part.a))
            a[:-1, ranks] = part.a.T
            b[ranks, first_row : first_row + tensor.num_rows] = np.float32(scale * part.scale) * part.b.T
            first_rank = ranks.stop
        first_row += tensor.num_rows
    a = a[:-1] if target.inputs is None else a[target.inputs]
    b = b[:, :-1] if target.columns is None else b[:, target.columns]
    return Factors(a, np.ascontiguousarray(b * np.asarray(target.factor, np.float32)))
