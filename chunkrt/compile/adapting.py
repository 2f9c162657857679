"""Application of a LoRA adapter to a checkpoint, before the checkpoint is compiled."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from chunkrt.checkpoints.adapters import AdaptedSource, Adapter, LowRank, read_adapter
from chunkrt.checkpoints.safetensors import tensors_of_other_halves
from chunkrt.checkpoints.source import TensorSource
from chunkrt.engine_directory.adapter_targets import AdapterTargets, CombinedTensor, Target
from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.decoders import BODY_PREFIXES, stored_names
from chunkrt.graph.modules import Share
from chunkrt.graph.parallel import LinearWeight
from chunkrt.graph.partition import Planned
from chunkrt.graph.plan import linear_nodes

log = logging.getLogger(__name__)


def adapted(source: TensorSource, path: Path) -> AdaptedSource:
    """Return a checkpoint whose weights contain an adapter's products.

    The adapter may name the decoder's tensors with another prefix than the checkpoint, for example if it was trained
    on a model with images. Products of other parts than the decoder are ignored with a warning.

    Raises:
        ModelError: the adapter is damaged, or belongs to another model.
        UnsupportedModelError: the adapter, or a tensor that it changes, is not supported.
    """
    adapter = read_adapter(path, source)
    stored, present = stored_names(source), set(source.names())
    ignored = tensors_of_other_halves(adapter.products, path)
    products: dict[str, LowRank] = {}
    for name, product in adapter.products.items():
        if name in ignored:
            continue
        target = next((stored[each] for each in _names(name) if each in stored), None)
        if target is None or target not in present:
            raise ModelError(
                f"the adapter {path} changes {name}, which {source.path.name} lacks; is it for another model, or does "
                "the model share this tensor with its embedding?"
            )
        if ".embed_tokens" in f".{target}":
            raise UnsupportedModelError(f"the adapter {path} changes an embedding ({name}), which is not supported")
        if (shape := source.info(target).shape) != product.shape:
            raise ModelError(
                f"the adapter {path} changes {name} as {list(product.shape)}, and {source.path.name} has "
                f"{list(shape)}; is it for another model?"
            )
        products[target] = product
    if not products:
        raise ModelError(f"the adapter {path} changes no tensor of the decoder")
    log.info("%s: %d weights are adapted by %s", source.path.name, len(products), path)
    return AdaptedSource(source, Adapter(path=path, products=products))


def targets_of(planned: Planned) -> AdapterTargets:
    """Return the linears of a plan that adapters may change at run time: those that all rows of a chunk pass through
    and that combine the rows of tensors.
    """
    aliases: dict[str, list[str]] = {}
    for name, stored in stored_names(planned.source).items():
        aliases.setdefault(stored, []).append(name)
        if name.startswith("model."):
            aliases[stored] += (f"{prefix}{name.removeprefix('model.')}" for prefix in BODY_PREFIXES if prefix)
    linears = {}
    for name, node in linear_nodes(planned.plan).items():
        parameter = planned.parameters[name]
        if not isinstance(parameter, LinearWeight) or planned.plan.tensors[node.outputs[0]].shape[0] != "T":
            continue
        tensors = parameter.checkpoint_tensors
        factor = parameter.factor
        linears[name] = Target(
            tensors=[CombinedTensor(names=aliases[each], num_rows=shape[0]) for each, shape in tensors.items()],
            num_inputs=next(iter(tensors.values()))[1],
            columns=_indices(parameter.rows),
            inputs=_indices(parameter.depth),
            factor=factor if isinstance(factor, float) else factor.tolist(),
        )
    plain = (bool, int, float, str)
    config = {key: value for key, value in planned.source.config.items() if isinstance(value, plain)}
    metadata = getattr(planned.source, "metadata", {})
    return AdapterTargets(linears=linears, config=config, architecture=str(metadata.get("general.architecture", "")))


def _indices(share: Share) -> list[int] | None:
    """Return the indices of a share; None if it is the complete axis."""
    is_whole = np.array_equal(share.indices, np.arange(share.size))
    return None if is_whole else [int(index) for index in share.indices]


def _names(name: str) -> list[str]:
    """Return the names under which a tensor may be known: its own, and those in a causal text decoder."""
    inner = (name.removeprefix(prefix) for prefix in BODY_PREFIXES if prefix and name.startswith(prefix))
    return [name, *(each if each.startswith("lm_head.") else f"model.{each}" for each in inner)]
