"""Calibration: run a decoder in float over some text, and record the magnitudes of its values.

Each subgraph runs over the complete text before the next one runs. Every weight is therefore read once, and the memory
needed is that of the largest subgraph plus the values that pass between subgraphs.

chunkrt's reference runs a node if it supports the operator and accepts the node; otherwise a plug-in's implementation
runs it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.function_executable import read_only
from chunkrt.checkpoints import catalogue
from chunkrt.checkpoints.adapters import adapter_of
from chunkrt.checkpoints.source import weights_digest
from chunkrt.compile.calibration_tokens import TokenIds, calibration_tokens, check_vocabulary, shipped_text
from chunkrt.engine_directory.content import cache_key, keyed_path
from chunkrt.errors import ConfigError, ModelError, QuantizationError, cause_of
from chunkrt.files import Count, cached_entry
from chunkrt.graph.operators import find_operator
from chunkrt.graph.plan import DOMAIN, Node, Plan, Subgraph, linear_nodes, resolve
from chunkrt.quant.calibration import FORMAT, SHADOW_SHARE, Calibration, Histogram, Method, Range, num_hot_channels
from chunkrt.quant.equalisation import MOST_FOR_PRODUCTS, equalise
from chunkrt.quant.folding import Folding
from chunkrt.quant.rotation import rotation

if TYPE_CHECKING:
    from chunkrt.graph.partition import Planned
from collections.abc import Sequence
from functools import partial

from chunkrt.backends.dispatch import registered_operators
from chunkrt.backends.function_executable import NodeObject, function_name
from chunkrt.backends.registry import REFERENCE, OperatorForm, qualified
from chunkrt.errors import BackendError, ChunkrtError, PartitionError
from chunkrt.graph.uses import OperatorNode, Use, use_of, weight_places

Float32 = NDArray[np.float32]
Values = Mapping[str, Any]
RunNode = Callable[[Node, Values], Any]
"""A function that evaluates one operator from all values computed so far, and returns its output or a tuple of
outputs.
"""

Measure = Callable[[Folding, TokenIds], Calibration]
"""A function that calibrates on tokens with transformed weights. The calibration does not record the transformations.
"""

log = logging.getLogger(__name__)

WINDOW_LENGTH = 512
"""Number of tokens in a window. Tokens attend only within their window, which starts at position 0."""


def cached_calibration(
    planned: Planned,
    checkpoint: Path,
    *,
    model: str,
    token_ids: TokenIds | None = None,
    method: Method = "mse",
    equalisation: float | None = None,
    is_rotated: bool = False,
    elsewhere: Measure | None = None,
    progress: Count = lambda done, total: None,
) -> tuple[Calibration, Path]:
    """Return the calibration of a checkpoint on some tokens, from the cache if it is stored there; otherwise make and
    store it.

    Args:
        planned: the checkpoint, opened and planned, without placement and shadows.
        model: the model's name.
        token_ids: int64 [n]; by default those of a text that is part of chunkrt.
        equalisation, is_rotated: settings of the scheme that the calibration is for; see `quant/scheme.py`.
        elsewhere: measures in place of this process, e.g. on other machines; its calibrations may lack measurements
            for shadows, so they are cached apart from others.
        progress: called with (subgraphs done, total) unless the calibration is cached.

    Returns:
        The calibration, and the file that holds it.

    Raises:
        ModelError: the checkpoint has no tokenizer or is damaged; the file cannot be written.
        QuantizationError: a value is not finite, or the decoder cannot be rotated.
    """
    if token_ids is None:
        token_ids = calibration_tokens(planned, shipped_text(), None)
    planned = planned.within(WINDOW_LENGTH)
    settings: dict[str, Any] = {"method": method, "equalisation": equalisation, "is_rotated": is_rotated}
    if elsewhere is not None:
        settings["elsewhere"] = True
    adapter = adapter_of(planned.source)
    key = cache_key(checkpoint, adapter=adapter, format=FORMAT, text=text_digest(token_ids), **settings)
    path = keyed_path(catalogue.home() / "calibrations", checkpoint, key, suffix=".npz")
    weights = weights_digest(planned.source)
    before = None
    if equalisation is not None:
        before, _ = cached_calibration(
            planned,
            checkpoint,
            model=model,
            token_ids=token_ids,
            method=method,
            is_rotated=is_rotated,
            elsewhere=elsewhere,
            progress=progress,
        )

    folding = before.folding if before else Folding()

    def load(name: str) -> Float32:
        return folding.apply(name, load_finite(planned, name))

    try:
        with cached_entry(path, "calibrating", Calibration.load) as found:
            if found is None:
                if before and equalisation is not None:
                    head = [name for s in planned.plan.subgraphs if s.rows == "R" for name in s.weights]
                    factors = equalise(
                        planned.plan,
                        load,
                        before.channel_peaks,
                        equalisation,
                        most_for_products=MOST_FOR_PRODUCTS,
                        left_alone=head,
                    )
                    folding = folding.then(factors)
                elif is_rotated:
                    folding = rotation(planned.plan, load)
                found = (
                    elsewhere(folding, token_ids)
                    if elsewhere is not None
                    else calibrate(
                        planned.plan, load, token_ids, model=model, weights=weights, method=method, progress=progress
                    )
                )
                found = replace(found, equalisation=equalisation, is_rotated=is_rotated, folding=folding)
                found.save(path)
    except OSError as error:
        raise ModelError(f"cannot write the calibration {path}: {cause_of(error)}") from error
    return replace(found, model=model), path


def load_finite(planned: Planned, name: str) -> Float32:
    """Return a weight. If it is not finite, raise a QuantizationError that names the checkpoint's tensor."""
    values = planned.load(name)
    if not np.isfinite(values).all():
        source, tensors = planned.source, planned.parameters[name].checkpoint_tensors
        wrong = next((each for each in tensors if not np.isfinite(source.read(each)).all()), name)
        raise QuantizationError(f"{source.path}: {wrong} holds values that are not finite; the checkpoint is damaged")
    return values


def text_digest(token_ids: TokenIds) -> str:
    """Return the SHA-256 of a text's tokens, in hexadecimal."""
    return hashlib.sha256(token_ids.astype("<i8").tobytes()).hexdigest()


def calibrate(
    plan: Plan,
    load: Callable[[str], Float32],
    token_ids: TokenIds,
    *,
    model: str,
    weights: str = "",
    method: Method = "mse",
    progress: Count = lambda done, total: None,
) -> Calibration:
    """Run a decoder over tokens and record the limits of its values.

    Args:
        load: returns a weight's float32 values by its plan name; called once per weight. The caller records folded
            transformations.
        token_ids: int64 [n], n at least 1; cut into windows of WINDOW_LENGTH, if the context permits.
        model: the model's name.
        weights: the checkpoint's `weights_digest`; a calibration without a digest matches no checkpoint.
        progress: called with (subgraphs done, total).

    Raises:
        ConfigError: there are no tokens, or a token is outside the vocabulary.
        QuantizationError: a value is not finite.
    """
    if not token_ids.size:
        raise ConfigError("the calibration text has no tokens; use a longer text")
    check_vocabulary(token_ids, plan.vocab_size)
    length = min(WINDOW_LENGTH, plan.context_length)
    parts = (token_ids[start : start + length] for start in range(0, token_ids.size, length))
    windows: list[Values] = [first_values(part, np.arange(part.size)) for part in parts]
    observer = _Observer(plan, method)
    held: dict[str, Float32] = {}
    for done, subgraph in enumerate(plan.subgraphs):
        progress(done, len(plan.subgraphs))
        held |= {name: load(name) for name in subgraph.weights if name not in held}
        windows = [run_subgraph(plan, done, live, held, observer.run) for live in windows]
        observer.finish(subgraph, held)
        for name in held.keys() - {name for s in plan.subgraphs[done + 1 :] for name in s.weights}:
            del held[name]
    progress(len(plan.subgraphs), len(plan.subgraphs))
    return Calibration(
        model=model,
        weights=weights,
        token_ids=token_ids,
        method=method,
        equalisation=None,
        is_rotated=False,
        folding=Folding(),
        peaks=observer.peaks,
        limits=observer.limits,
        shadow_limits=observer.shadow_limits,
        column_peaks=observer.column_peaks,
        channel_peaks=observer.channel_peaks,
        shadowed_column_peaks=observer.shadowed_column_peaks,
        hot_channels=observer.hot_channels,
        histograms=observer.histograms,
    )


def first_values(token_ids: TokenIds, logit_rows: NDArray[np.int64]) -> dict[str, Any]:
    """Return a decoder's inputs for tokens that start at position 0."""
    return {"input_ids": token_ids, "position": np.zeros(1, np.int64), "logit_rows": logit_rows}


def run_subgraph(plan: Plan, index: int, live: Values, weights: Mapping[str, Float32], run: RunNode) -> dict[str, Any]:
    """Run one subgraph of a plan on a window. It takes the values that are live before the subgraph, and returns those
    that are live after it.
    """
    subgraph = plan.subgraphs[index]
    of_weights = {name: read_only(weights[name]) for name in subgraph.weights}
    values = {**live, **of_weights, **values_beside(plan, index, len(live["input_ids"]))}
    for node in subgraph.nodes:
        results = run(node, values)
        results = results if isinstance(results, tuple) else (results,)
        values.update(zip(node.outputs, map(read_only, results), strict=True))
    later = live_after(plan, index)
    return {name: values[name] for name in (*live, *subgraph.outputs, *subgraph.state) if name in later}


def live_after(plan: Plan, index: int) -> set[str]:
    """Return the names of the values and caches that later subgraphs may read, and of the logits."""
    read = {name for s in plan.subgraphs[index + 1 :] for name in (*s.inputs, *s.shared_state)}
    return read | {plan.output, "input_ids"}


def values_beside(plan: Plan, index: int, num_tokens: int) -> dict[str, Any]:
    """Return the values that a subgraph takes in addition to live ones and weights, for a window from position 0 on:
    the row of the rotary tables, and the empty state that it updates.
    """
    sizes = {"P": num_tokens, "W": num_tokens}
    state = {n: np.zeros(resolve(plan.tensors[n].shape, sizes), np.float32) for n in plan.subgraphs[index].state}
    return {"": None, "rope_position": np.array([plan.rope_offset(num_tokens)]), **state}


def run_node(node: Node, values: Values) -> Any:
    """Evaluate one operator in float."""
    return run_operator(node, [values[name] for name in node.inputs])


class _Observer:
    """Recorder of the magnitudes of all values that nodes compute."""

    def __init__(self, plan: Plan, method: Method) -> None:
        self.peaks: dict[str, float] = {}
        self.limits: dict[str, float] = {}
        self.shadow_limits: dict[str, float] = {}
        self.column_peaks: dict[str, Float32] = {}
        self.channel_peaks: dict[str, Float32] = {}
        self.shadowed_column_peaks: dict[str, Float32] = {}
        self.hot_channels: dict[str, NDArray[np.int32]] = {}
        self.histograms: dict[str, Histogram] = {}
        linears = linear_nodes(plan).values()
        self._method: Method = method
        self._inputs: dict[str, list[Float32]] = {node.inputs[0]: [] for node in linears}
        """Inputs of linears that linears will still read, window by window."""
        self._readers = Counter(node.inputs[0] for node in linears)
        """Number of linears that will still read each input."""
        self._outputs = {node.outputs[0] for node in linears}
        self._ranges: dict[str, Range] = {}

    def run(self, node: Node, values: Values) -> Any:
        """Evaluate one operator and record its outputs."""
        # Values that are not finite raise an error when they are recorded.
        with np.errstate(over="ignore", invalid="ignore"):
            results = run_node(node, values)
            for name, result in zip(node.outputs, results if isinstance(results, tuple) else (results,), strict=True):
                self.see(name, result)
        return results

    def see(self, name: str, values: Float32) -> None:
        """Record rows of a value. Raises QuantizationError if an element is not finite."""
        if name not in self._ranges:
            self._ranges[name] = Range(self._method if name in self._inputs else "absmax", counts=name in self._inputs)
        found = self._ranges[name]
        found.update(values)
        if not np.isfinite(found.largest):
            raise QuantizationError(f"{name} is not finite on the calibration text; is the checkpoint damaged?")
        if name in self._outputs:
            self.column_peaks[name] = np.maximum(self.column_peaks.get(name, np.float32(0)), _largest(values))
        if name in self._inputs:
            self.channel_peaks[name] = np.maximum(self.channel_peaks.get(name, np.float32(0)), _largest(values))
            self._inputs[name].append(values)

    def finish(self, subgraph: Subgraph, weights: dict[str, Float32]) -> None:
        """Finish a subgraph's values: keep their peaks and limits, and drop the values.

        The LM head gets no shadow.
        """
        for name, found in self._ranges.items():
            self.peaks[name] = float(found.largest)
            if name in self._inputs:
                self.limits[name], self.shadow_limits[name] = found.limit, found.quantile(1 - SHADOW_SHARE)
                self.hot_channels[name] = self._hot_channels(name)
                self.histograms[name] = found.histogram
        self._ranges.clear()
        for node in subgraph.nodes:
            if node.outputs[0] in self._outputs:
                if subgraph.rows == "T":
                    limit = np.float32(self.shadow_limits[node.inputs[0]])
                    products = (x.clip(-limit, limit) @ weights[node.inputs[1]] for x in self._inputs[node.inputs[0]])
                    peaks = [_largest(product) for product in products]
                    self.shadowed_column_peaks[node.outputs[0]] = np.max(peaks, axis=0)
                self._readers[node.inputs[0]] -= 1
                if not self._readers[node.inputs[0]]:
                    self._inputs[node.inputs[0]].clear()

    def _hot_channels(self, name: str) -> NDArray[np.int32]:
        """Return the channels that exceed the grid of a shadowed linear most often; of equally frequent channels, the
        first.
        """
        limit = self.shadow_limits[name]
        times = sum((np.abs(x) > limit).sum(axis=0) for x in self._inputs[name])
        ranking = np.argsort(-np.asarray(times), kind="stable")
        return np.sort(ranking[: num_hot_channels(len(ranking))]).astype(np.int32)


def _largest(values: Float32) -> Float32:
    """Return the largest magnitude of each column."""
    largest: Float32 = np.maximum(values.max(axis=0), -values.min(axis=0))
    return largest


def run_operator(node: Node, inputs: Sequence[Any]) -> Any:
    """Return the output of a node, or a tuple of outputs.

    An object of a plug-in's class is made for this call, with the shapes of the inputs.

    Raises:
        PartitionError: no form on this machine supports the operator or accepts the node.
        ConfigError: forms of several plug-ins accept the node.
        BackendError: the function of a plug-in failed.
        CompileError: the class of a plug-in failed.
    """
    use, registry = use_of(node), registered_operators()
    own = registry.find_own(use.operator, REFERENCE)
    if own is not None and registry.own_takes(use):
        return own.function(*inputs, **use.node.attributes)
    declared = OperatorNode(
        **vars(use.node),
        operator=use.operator,
        input_shapes=tuple(None if each is None else np.shape(each) for each in inputs),
        output_shapes=(),
        device="cpu",
        scheme="float",
    )
    plugin, refusals = registry.pick_plugin(use.operator, declared, REFERENCE)
    plugin = plugin or registry.find(use.operator, REFERENCE)
    if plugin is None or not plugin.is_plugin or plugin.refusal(declared):
        reason = "; ".join([registry.missing(use, REFERENCE), *refusals])
        raise PartitionError(f"node {use.node.name!r}: {reason}; install the plug-in that provides the operator")
    return _call_plugin(plugin, use, declared, inputs)


def _call_plugin(plugin: OperatorForm, use: Use, declared: OperatorNode, inputs: Sequence[Any]) -> Any:
    """Call a plug-in's form with chunkrt's own parts, and convert its float outputs to float32, as in a run."""
    own_parts = {part: registered_operators().find_own(part, REFERENCE) for part in plugin.parts}
    parts = {part: own.function for part, own in own_parts.items() if own is not None}
    node, function, given, attributes = use.node, plugin.function, inputs, use.node.attributes
    if plugin.is_class:
        places = weight_places(use) if plugin.prepares else ()
        function = NodeObject(plugin, declared, parts, lambda: [inputs[place] for place in places])
        given, attributes = [each for place, each in enumerate(inputs) if place not in places], {}
    elif parts:
        function = partial(function, **parts)
    try:
        results = function(*given, **attributes)
        results = results if isinstance(results, tuple) else (results,)
        if len(results) != len(node.outputs):
            raise ValueError(f"it returned {len(results)} outputs, expected {len(node.outputs)}")
        row = find_operator(node.domain, node.op) if node.domain != DOMAIN else None
        if row is not None:
            expected = row.output(node.attributes, declared.input_shapes)
            if np.shape(results[0]) != expected:
                raise ValueError(f"it returned the shape {list(np.shape(results[0]))}, expected {list(expected)}")
        return tuple(np.ascontiguousarray(result, np.float32) for result in results)
    except ChunkrtError:
        raise
    except Exception as error:  # a plug-in's function may raise any exception
        what, who = qualified(node.domain, node.op), function_name(function, plugin.distribution)
        reason = f"{type(error).__name__}: {error}"
        raise BackendError(f"node {node.name!r}: {what} by {who} failed: {reason}") from error
