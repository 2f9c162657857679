"""Run a single node in float, for calibration, the search for schemes and the report by layers.

chunkrt's reference runs the node if it supports the operator and accepts the node; otherwise a plug-in's implementation
runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from chunkrt.backends.dispatch import registered_operators
from chunkrt.backends.function_executable import function_name
from chunkrt.backends.registry import REFERENCE, Implementation, OperatorRegistry, qualified
from chunkrt.errors import BackendError, ChunkrtError, PartitionError
from chunkrt.graph.plan import Node
from chunkrt.graph.uses import Use, use_of


def run_operator(node: Node, inputs: Sequence[Any]) -> Any:
    """Return the output of a node, or a tuple of outputs.

    Raises:
        PartitionError: no implementation on this machine supports the operator or accepts the node.
        ConfigError: several plug-ins' implementations accept the node.
        BackendError: the function of a plug-in failed.
    """
    use = use_of(node)
    found = _form(use, registered_operators())
    if not found.is_plugin:
        return found.function(*inputs, **use.node.attributes)
    return _call_plugin(found, use, inputs)


def _form(use: Use, registry: OperatorRegistry) -> Implementation:
    own = registry.find_own(use.operator, REFERENCE)
    if own is not None and registry.own_takes(use):
        return own
    plugin, refusal = registry.pick_plugin(use.operator, REFERENCE, use.node)
    if plugin is None:
        reason = registry.missing(use, REFERENCE) + refusal
        raise PartitionError(f"node {use.node.name!r}: {reason}; install the plug-in that provides the operator")
    return plugin


def _call_plugin(plugin: Implementation, use: Use, inputs: Sequence[Any]) -> Any:
    """Call a plug-in's function with chunkrt's own parts, and convert its float outputs to float32, as in a run."""
    registry, node = registered_operators(), use.node
    own_parts = {part: registry.find_own(part, REFERENCE) for part in plugin.parts}
    parts = {part: own.function for part, own in own_parts.items() if own is not None}
    function = partial(plugin.function, **parts) if parts else plugin.function
    try:
        results = function(*inputs, **node.attributes)
        results = results if isinstance(results, tuple) else (results,)
        if len(results) != len(node.outputs):
            raise ValueError(f"it returned {len(results)} outputs, expected {len(node.outputs)}")
        return tuple(np.ascontiguousarray(result, np.float32) for result in results)
    except ChunkrtError:
        raise
    except Exception as error:  # a plug-in's function may raise any exception
        what, who = qualified(node.domain, node.op), function_name(plugin.function)
        reason = f"{type(error).__name__}: {error}"
        raise BackendError(f"node {node.name!r}: {what} by {who} failed: {reason}") from error
