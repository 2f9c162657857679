"""Classification of an exported decoder's inputs and outputs, and of its exporter.

| exporter | recognised by |
| --- | --- |
| ONNX Runtime GenAI's builder | producer "onnxruntime-genai", or attention of the domain com.microsoft |
| Optimum, torch | past and present states, with another producer |
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.errors import ModelError, UnsupportedModelError

log = logging.getLogger(__name__)

_STATE = re.compile(r"past_key_values|past_key_value|past_|past|present_|present")
_LAYER = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """One tensor that persists between runs, with its input, its output, and the layer and the kind that their names
    state.

    `kind` is the name without the prefix for past or present: "key", "value" or "conv".
    """

    past: str
    present: str
    layer: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The names of a decoder's inputs and outputs. `mask` and `positions` are empty if the decoder has no such input.

    `states` maps the name of each state's input to the state, layer after layer; some layers may have no state. A
    decoder without states takes whole sequences.
    """

    exporter: str
    tokens: str
    mask: str
    positions: str
    logits: str
    states: Mapping[str, StateTensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Probe:
    """Sizes of a run: the number of past tokens, the number of new tokens, and the position of the first new token if
    it differs from the number of past tokens, because some slots of a fixed window are empty.
    """

    past: int
    length: int
    start: int | None = None

    @property
    def position(self) -> int:
        """Position of the first new token."""
        return self.past if self.start is None else self.start


def inputs_of(proto: onnx.ModelProto) -> dict[str, ir.Value]:
    """Return the inputs of a model by name, with their types and shapes. Raises ModelError if an input has an invalid
    type.
    """
    try:
        values = [ir.serde.deserialize_value_info_proto(v, None) for v in proto.graph.input]
    except Exception as error:  # onnx_ir raises many types of exceptions
        raise ModelError(f"the model's inputs are damaged: {error}; fetch it again") from error
    return {v.name or "": v for v in values}


def find_signature(proto: onnx.ModelProto, where: str) -> Signature:
    """Classify the inputs and outputs of a model.

    Raises:
        UnsupportedModelError: the model takes no token ids, returns no logits, has an unknown input, or has a state
            without its counterpart.
    """
    graph = proto.graph
    initializers = {tensor.name for tensor in graph.initializer}
    inputs = [v.name for v in graph.input if v.name not in initializers]
    outputs = [v.name for v in graph.output]
    if "input_ids" not in inputs:
        raise UnsupportedModelError(
            f"{where} has no input 'input_ids' (it has {', '.join(inputs[:4])}); expected a decoder of token ids"
        )
    if "logits" not in outputs:
        raise UnsupportedModelError(f"{where} has no output 'logits' (it has {', '.join(outputs[:4])})")
    presents = {_STATE.sub("", name): name for name in outputs if name != "logits"}
    states = {}
    for name in inputs:
        if name in ("input_ids", "attention_mask", "position_ids"):
            continue
        key = _STATE.sub("", name)
        layer = _LAYER.search(key)
        if not _STATE.search(name) or layer is None or key not in presents:
            raise UnsupportedModelError(
                f"{where}: its input {name!r} is neither tokens, a mask, positions nor a state with an output for its "
                "new value"
            )
        kind = _LAYER.sub("", key, count=1).strip("._")
        states[name] = StateTensor(past=name, present=presents.pop(key), layer=int(layer.group()), kind=kind)
    if unread := [name for name in presents.values() if _STATE.search(name)]:
        raise UnsupportedModelError(
            f"{where}: its output {unread[0]!r} is a state without a counterpart among the inputs"
        )
    if presents:
        log.warning("%s: ignoring the outputs %s; logits and states are read", where, ", ".join(presents.values()))
    in_order = sorted(states.values(), key=lambda state: (state.layer, state.kind))
    is_builder = "onnxruntime-genai" in proto.producer_name or any(n.domain == "com.microsoft" for n in graph.node)
    return Signature(
        exporter="onnxruntime-genai" if is_builder else "optimum",
        tokens="input_ids",
        mask="attention_mask" if "attention_mask" in inputs else "",
        positions="position_ids" if "position_ids" in inputs else "",
        logits="logits",
        states={state.past: state for state in in_order},
    )


def fixed_window(inputs: Mapping[str, ir.Value], signature: Signature, where: str) -> Probe | None:
    """Return the sizes of a fixed window; None if a decoder takes any number of tokens.

    Args:
        inputs: as `inputs_of` returns them.

    Raises:
        UnsupportedModelError: only some of the tokens, the mask, the positions, keys and values have a fixed length, or
            the batch is fixed to several sequences.
    """
    by_rows = (signature.tokens, signature.mask, signature.positions)
    axes = {name: (-2, -1) for name in by_rows if name in inputs}
    axes |= {s.past: (0, 2) for s in signature.states.values() if re.search("key|value", s.kind) and s.past in inputs}
    lengths: dict[str, int | None] = {}
    for name, (batch, length) in axes.items():
        shape = inputs[name].shape or ()
        if len(shape) < (2 if name in by_rows else 4):
            continue
        size = shape[length]
        lengths[name] = size if isinstance(size, int) else None
        if isinstance(shape[batch], int) and shape[batch] != 1:
            raise UnsupportedModelError(
                f"{where}: {name} has a fixed batch of {shape[batch]}; export it with a batch of 1 or dynamic axes"
            )
    fixed = {name: length for name, length in lengths.items() if length is not None}
    if not fixed:
        return None
    window = fixed.get(signature.tokens, 0)
    past = {length for name, length in fixed.items() if name not in by_rows}
    expected = {signature.tokens: window, signature.positions: window, signature.mask: max(past, default=0) + window}
    wrong = [name for name in lengths if name not in fixed or fixed[name] != expected.get(name, max(past, default=0))]
    if wrong or not signature.mask or not signature.positions:
        name = next(iter(fixed))
        reason = f"that of {wrong[0]} does not match it" if wrong else "it has no attention_mask or no position_ids"
        raise UnsupportedModelError(
            f"{where}: {name} has a fixed length of {fixed[name]}, and {reason}; export it with dynamic axes"
        )
    return Probe(max(past, default=0), window)


def feeds(
    signature: Signature, inputs: Mapping[str, ir.Value], probe: Probe, widths: Mapping[str, int] | None = None
) -> dict[str, NDArray[np.generic]]:
    """Return some inputs for a probe: token 0, no masked tokens, the probe's positions, zero states.

    Args:
        widths: last sizes of states, by name, that the model leaves open; 1 for states that are not listed.
    """
    total = probe.past + probe.length
    values: dict[str, NDArray[np.generic]] = {signature.tokens: np.zeros((1, probe.length), np.int64)}
    if signature.mask:
        values[signature.mask] = np.ones((1, total), np.int64)
    if signature.positions:
        rows = inputs[signature.positions].shape if signature.positions in inputs else None
        streams = rows[0] if rows is not None and len(rows) == 3 else None  # M-RoPE's three are the same for text
        positions = np.arange(probe.position, probe.position + probe.length)[None]
        values[signature.positions] = np.stack([positions] * streams) if isinstance(streams, int) else positions
    for name in signature.states:
        if name in inputs:
            shape = _state_shape(inputs[name], probe, (widths or {}).get(name, 1))
            values[name] = np.zeros(shape, _numpy(inputs[name]))
    return {name: v.astype(_numpy(inputs[name]), copy=False) for name, v in values.items() if name in inputs}


def _state_shape(value: ir.Value, probe: Probe, width: int) -> list[int]:
    """Resolve open sizes: the batch is 1, the last size is the width, and a size between them is the past's."""
    if not value.shape:
        raise ModelError(f"the input {value.name!r}, which the model keeps between calls, has no shape")
    *sizes, last = (d if isinstance(d, int) else None for d in value.shape)
    return [1, *(probe.past if size is None else size for size in sizes[1:]), width if last is None else last]


def _numpy(value: ir.Value) -> np.dtype[np.generic]:
    if value.dtype in (None, ir.DataType.UNDEFINED, ir.DataType.STRING):
        raise ModelError(f"the input {value.name!r} does not have a numeric type")
    return np.dtype(value.dtype.numpy())
