"""Calibration: run a decoder in float over some text and note how large its values get.

Subgraph after subgraph, each over the whole text before the next: every weight is read once, and a model of any size
needs the memory of its largest subgraph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.reference import operators
from chunkrt.errors import ConfigError, QuantizationError
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.quant.calibration import Calibration
from chunkrt.quant.ranges import Method, Range
from chunkrt.quant.weights import linear_nodes

Float32 = NDArray[np.float32]
Progress = Callable[[int, int], None]

WINDOW_LENGTH = 512
"""Tokens that attend to one another; each window starts at position 0."""

DEFAULT_NUM_TOKENS = 2048


def shipped_text() -> str:
    """The text that comes with chunkrt, for those who have none at hand."""
    return resources.files("chunkrt").joinpath("calibration_text.txt").read_text("utf-8")


def calibrate(
    plan: Plan,
    load: Callable[[str], Float32],
    token_ids: NDArray[np.int64],
    *,
    model: str,
    method: Method = "absmax",
    progress: Progress = lambda done, total: None,
) -> Calibration:
    """Run a decoder over tokens and keep the limits of its values.

    Args:
        load: a weight's float32 values by its plan name; called once a weight.
        token_ids: int64 [n], n at least 1; cut into windows of WINDOW_LENGTH, the context permitting.
        model: what the model is called.
        progress: told (subgraphs done, subgraphs in all).

    Raises:
        ConfigError: there are no tokens.
        QuantizationError: a value is not finite.
    """
    if not token_ids.size:
        raise ConfigError("the calibration text has no tokens; give a longer one")
    length = min(WINDOW_LENGTH, plan.context_length)
    windows = [_Window(plan, token_ids[start : start + length]) for start in range(0, token_ids.size, length)]
    observer = _Observer(plan, method)
    for done, subgraph in enumerate(plan.subgraphs):
        progress(done, len(plan.subgraphs))
        constants = {name: load(name) for name in subgraph.weights}
        for window in windows:
            window.run(subgraph, constants, observer)
    progress(len(plan.subgraphs), len(plan.subgraphs))
    return Calibration(
        model=model,
        text=hashlib.sha256(token_ids.tobytes()).hexdigest(),
        method=method,
        num_tokens=token_ids.size,
        limits={name: found.limit for name, found in observer.ranges.items()},
        column_limits=observer.column_limits,
    )


class _Observer:
    """Notes every float value that a node computes."""

    def __init__(self, plan: Plan, method: Method) -> None:
        self.ranges: dict[str, Range] = {}
        self.column_limits: dict[str, Float32] = {}
        self._method = method
        self._linear_outputs = {node.outputs[0] for node in linear_nodes(plan).values()}

    def see(self, name: str, values: NDArray[np.float32]) -> None:
        largest = np.abs(values).max(axis=0)
        if not np.isfinite(largest).all():
            raise QuantizationError(f"{name} is not finite on the calibration text; is the checkpoint damaged?")
        self.ranges.setdefault(name, Range(self._method)).update(values)
        if name in self._linear_outputs:
            self.column_limits[name] = np.maximum(self.column_limits.get(name, np.float32(0)), largest)


class _Window:
    """Some consecutive tokens on their way through the decoder: the values that later subgraphs read."""

    def __init__(self, plan: Plan, token_ids: NDArray[np.int64]) -> None:
        self._plan = plan
        self._length = len(token_ids)
        self._values: dict[str, NDArray[np.generic]] = {
            "input_ids": token_ids,
            "position": np.zeros(1, np.int64),
            "logit_rows": np.arange(len(token_ids)),
        }
        self._last_use = {name: s.name for s in plan.subgraphs for name in s.inputs}

    def run(self, subgraph: Subgraph, constants: dict[str, Float32], observer: _Observer) -> None:
        shapes = {name: self._plan.tensors[name].shape for name in subgraph.state}
        caches = {n: np.zeros([self._length if d == "P" else int(d) for d in s], np.float32) for n, s in shapes.items()}
        values = {**self._values, **constants, **caches}
        for node in subgraph.nodes:
            results = operators.find(node)(*(values[name] for name in node.inputs), **node.attributes)
            results = results if isinstance(results, tuple) else (results,)
            for name, result in zip(node.outputs, results, strict=True):
                observer.see(name, result)
                values[name] = result
        self._values |= {name: values[name] for name in subgraph.outputs}
        for name in subgraph.inputs:
            if self._last_use[name] == subgraph.name and name not in self._plan.inputs:
                del self._values[name]


def calibration_tokens(token_ids: Sequence[int], num_tokens: int | None) -> NDArray[np.int64]:
    """The first tokens of a text. Raises ConfigError if fewer than asked for are there."""
    if num_tokens is not None and len(token_ids) < num_tokens:
        raise ConfigError(f"the calibration text has {len(token_ids)} tokens, fewer than the {num_tokens} asked for")
    return np.array(token_ids[: num_tokens or DEFAULT_NUM_TOKENS], np.int64)
