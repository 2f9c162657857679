"""The backend: subgraphs that PyTorch supports, and their execution.

It serves as the NPU: static subgraphs run here, one at a time, while the native backend computes attention on the CPU.
PyTorch releases the GIL while it computes and while it waits for the GPU, so the two overlap.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from chunkrt.backends import Support
from chunkrt.backends.base import Array
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import BackendError, CompileError
from chunkrt.graph.plan import Node, Plan, Subgraph
from chunkrt.quant.scheme import Scheme
from chunkrt_torch.linears import Linear, make_linear
from chunkrt_torch.operators import OPERATORS
from chunkrt_torch.products import multiplies_exactly

log = logging.getLogger(__name__)


class TorchBackend:
    """Runs static subgraphs on one device of PyTorch, under every scheme with int8 products."""

    name = "torch"
    concurrency = 1
    cache_dtypes = ()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._has_int8_products = multiplies_exactly(device)
        if not self._has_int8_products:
            log.info("PyTorch has no exact int8 products on this %s: using float64, which is slower", device)

    def supports(self, subgraph: Subgraph, plan: Plan, scheme: Scheme) -> Support:
        """Accept a subgraph if every operator is known and every linear is a product of int8."""
        for node in subgraph.nodes:
            if reason := _refusal(node, plan, scheme):
                return Support(ok=False, node=node.name, reason=reason)
        return Support(ok=True)

    def compile(
        self, subgraph: Subgraph, plan: Plan, chunk_length: int, scheme: Scheme, weights: WeightStore
    ) -> TorchExecutable:
        """Copy the weights to the device, and look up the operators.

        Raises:
            PartitionError: see `supports`.
            CompileError: the device has no memory left for the weights.
        """
        self.supports(subgraph, plan, scheme).require(self.name, subgraph)
        linears = {node.inputs[1] for node in subgraph.nodes if node.op == "MatMul"}
        try:
            constants = {
                name: make_linear(name, scheme, weights, self.device, self._has_int8_products)
                if name in linears
                else torch.tensor(weights.array(name), device=self.device)
                for name in subgraph.weights
            }
        except RuntimeError as error:
            raise CompileError(f"torch cannot copy {subgraph.name} to {self.device}: {error}") from error
        return TorchExecutable(subgraph, constants, self.device)


class TorchExecutable:
    """Runs the nodes one after another."""

    fixed_length: int | None = None

    def __init__(
        self, subgraph: Subgraph, constants: Mapping[str, torch.Tensor | Linear], device: torch.device
    ) -> None:
        self._name = subgraph.name
        self._inputs = subgraph.inputs
        self._steps = [(node, OPERATORS[node.op]) for node in subgraph.nodes]
        self._constants = constants
        self._device = device

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """See `chunkrt.backends.Executable.run`."""
        try:
            with torch.inference_mode():
                values: dict[str, Any] = dict(self._constants)
                values |= {name: torch.from_numpy(_writable(inputs[name])).to(self._device) for name in self._inputs}
                for node, operator in self._steps:
                    results = operator(*(values[name] for name in node.inputs), **node.attributes)
                    values |= zip(node.outputs, results, strict=True)
                for name, buffer in outputs.items():
                    torch.from_numpy(buffer).copy_(values[name])  # waits for the device
        except RuntimeError as error:
            raise BackendError(f"torch, {self._name} on {self._device}: {error}") from error


def _writable(array: Array) -> Array:
    """Silence PyTorch's warning about read-only arrays, which are never written here."""
    return array if array.flags.writeable else np.array(array)


def _refusal(node: Node, plan: Plan, scheme: Scheme) -> str:
    if node.domain or node.op not in OPERATORS:
        return f"torch has no operator {node.op}; it has: {', '.join(sorted(OPERATORS))}"
    for name in (*node.inputs, *node.outputs):
        if plan.tensors[name].dtype != "float32":
            return f"{node.op} has the {plan.tensors[name].dtype} operand {name!r}; torch takes float32"
    if node.op != "MatMul":
        return ""
    weight = plan.tensors[node.inputs[1]]
    if weight.kind != "weight":
        return f"MatMul by {weight.name!r}, which is computed: torch multiplies by weights only"
    if scheme.weight_bits is None or scheme.has_blocks(weight.name):
        return f"MatMul under the scheme {scheme.name!r} is not a product of int8; use w8a8-dynamic or a static scheme"
    return ""
