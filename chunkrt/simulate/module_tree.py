"""Module trees for partition studies: modules as attributes, which are placed by `to` and planned by `plan`.

tree = chunkrt.graph.load_module("gemma-2b")
for layer in tree.model.layers:
    layer.mlp.down_proj.to("cpu")
rows = chunkrt.experiment("gemma-2b", placements={"natural": {}, "down_proj on cpu": tree}, ...)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self, get_args

from chunkrt.checkpoints.config_only import ConfigSource, find_config
from chunkrt.engine.resolve import find_checkpoint
from chunkrt.engine_directory.manifest import is_engine_directory
from chunkrt.errors import ConfigError
from chunkrt.files import Progress
from chunkrt.graph.modules import Module, ModuleView
from chunkrt.graph.placement import Placement
from chunkrt.graph.plan import ALONE, Place, Plan
from chunkrt.progress import find_progress
from chunkrt.quant.scheme import DEFAULT_NPU_SCHEME
from chunkrt.simulate.experiments import plans_of, with_shadow
from chunkrt.simulate.models import find_model_shape
from chunkrt.simulate.shape import Shape


class PlacedModule(ModuleView):
    """A module of a decoder. Attributes with modules, and lists of them, are those of the decoder's tree."""

    def __init__(self, tree: ModuleTree, module: Module) -> None:
        super().__init__(module)
        self._tree = tree

    def _view(self, module: Module) -> PlacedModule:
        return PlacedModule(self._tree, module)

    def to(self, device: Place) -> Self:
        """Place this module and all modules below it on "npu" or "cpu". A later call overrides earlier ones.

        Raises:
            ConfigError: the device is another one.
        """
        if device not in get_args(Place):
            raise ConfigError(f"a module can be placed on 'npu' or 'cpu', not {device!r}")
        self._tree.placed.pop(self.path, None)
        self._tree.placed[self.path] = device
        return self


class ModuleTree(PlacedModule):
    """The module tree of a decoder, without weights.

    `chunkrt.load(placement=...)` and `chunkrt.experiment(placements=...)` take a tree in place of a placement.

    Attributes:
        placed: devices by the paths of the modules that were placed, in the order of the calls.
    """

    def __init__(self, model: str | os.PathLike[str] | Shape, decoder: Module, progress: Progress) -> None:
        super().__init__(self, decoder)
        self.placed: dict[str, Place] = {}
        self._model, self._progress = model, progress

    @property
    def placement(self) -> Placement:
        """Devices by module paths, as in a placement file."""
        return dict(self.placed)

    def modules(self) -> list[str]:
        """Return the paths of all modules."""
        return [module.path for module in self._module.modules()]

    def plan(self, scheme: str = DEFAULT_NPU_SCHEME, *, shadow: str | None = None) -> Plan:
        """Return the plan of the decoder with its modules on their devices.

        Args:
            scheme: name of the scheme, which may add shadows.
            shadow: patterns of 8-bit linears with shadows, as in `chunkrt.experiment`.

        Raises:
            ConfigError: the scheme is unknown, or a shadow names nothing.
            ModelError: the decoder cannot be planned.
        """
        return plans_of(self._model, [self.placement], self._progress, with_shadow(scheme, shadow))[0]


def load_module(model: str | os.PathLike[str] | Shape, *, progress: Progress | bool | None = None) -> ModuleTree:
    """Return the module tree of a model, in which modules can be placed. No weights are read.

    Args:
        model: a shape, its name or its TOML file; a config.json without weights; otherwise a catalogue name, an id of
            the Hugging Face hub, a GGUF file or a Hugging Face folder.
        progress: function that is called during downloads; True shows a bar.

    Raises:
        ConfigError: the model was not found, or is compiled.
        ModelError: the checkpoint is missing, damaged or unsupported.
    """
    if not isinstance(model, str | os.PathLike | Shape):
        raise ConfigError(f"model is {model!r:.80}, expected a name, a path or a shape")
    tell = find_progress(progress)
    if not isinstance(model, Shape) and is_engine_directory(Path(model)):
        raise ConfigError(f"{os.fspath(model)} is compiled, so its modules are placed already; give its checkpoint")
    return ModuleTree(model, _decoder(model, tell), tell)


def _decoder(model: str | os.PathLike[str] | Shape, progress: Progress) -> Module:
    from chunkrt.compile.compiler import open_decoder
    from chunkrt.graph.decoders import make_decoder

    if (shape := find_model_shape(model)) is not None:
        return shape.decoder()
    assert not isinstance(model, Shape)
    if (config := find_config(Path(model))) is not None:
        return make_decoder(ConfigSource(config), ALONE)[0]
    checkpoint, _ = find_checkpoint(os.fspath(model), progress)
    return open_decoder(checkpoint)[1]
