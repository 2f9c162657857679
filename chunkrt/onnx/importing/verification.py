"""Verification of an import: one run of the original on ONNX Runtime, compared with the imported decoder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from chunkrt.backends.onnx.onnxrt import OnnxRuntimeExecutable
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import ModelError
from chunkrt.graph.plan import Plan, resolve
from chunkrt.onnx.importing.evaluation import open_session, reason_of
from chunkrt.onnx.importing.exact import is_exact, without_rounding
from chunkrt.onnx.importing.exported import export_settings
from chunkrt.onnx.importing.preparing import is_prepared
from chunkrt.onnx.importing.signature import Probe, feeds, find_signature, inputs_of
from chunkrt.onnx.importing.source import OnnxSource
from chunkrt.quant.scheme import SCHEMES

NUM_TOKENS = 33
BEYOND_WINDOW, LARGEST_WINDOW = 9, 1024
"""Number of tokens by which a run exceeds a window, so that the window moves, and the largest window to which this
applies.
"""

TOLERANCE, FLOAT16_TOLERANCE = 1e-4, 2e-2
"""Tolerances relative to the largest logit. An original that computes in float16 differs from float32 by that much."""

HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)

Load = Callable[[str], NDArray[np.float32]]
log = logging.getLogger(__name__)


def verify(source: OnnxSource, plan: Plan, load: Load) -> float:
    """Compare an imported decoder with its original on random tokens. This works only once, because it releases the
    original.

    Args:
        source: from `import_decoder`.
        plan: of the import, without shadows.
        load: returns a weight's values, by its plan name.

    Returns:
        The largest difference of two logits, relative to the largest logit.

    Raises:
        ModelError: the difference exceeds the tolerance, or ONNX Runtime cannot run the original.
    """
    file, proto, source.original = source.file, source.original, None
    assert proto is not None, "it was verified before"
    window = plan.window or 0
    wanted = max(NUM_TOKENS, window + BEYOND_WINDOW) if window <= LARGEST_WINDOW else NUM_TOKENS
    num_tokens = min(wanted, plan.context_length)
    tokens = np.random.default_rng(0).integers(0, plan.vocab_size, num_tokens)
    exported = export_settings(proto)
    if exported.get("form") == "window":
        tokens = tokens[: int(exported["sequence"])]
        expected = _by_windows(file, tokens)
    else:
        expected = original_logits(file, proto, tokens, plan)
    context = int(exported.get("context") or num_tokens)
    found = imported_logits(plan, load, tokens[: len(expected)], context)
    difference = float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30))
    tolerance = FLOAT16_TOLERANCE if _has_halves(proto) else TOLERANCE
    if not (isfinite(difference) and difference <= tolerance):
        raise ModelError(
            f"{file}: the imported decoder differs from the original on ONNX Runtime by {difference:.2g} of the "
            f"largest logit, over {len(tokens)} tokens; expected at most {tolerance:g}; please report this model"
        )
    log.info("%s: the import agrees with the original to %.2g of the largest logit", file, difference)
    return difference


def original_logits(file: Path, proto: onnx.ModelProto, tokens: NDArray[np.int64], plan: Plan) -> NDArray[np.float32]:
    """Compute the original's logits [T, V] of a prompt.

    Activations are not rounded to integers, even if the original does so: see `exact.py`.

    Args:
        plan: the import's plan, whose states, in the same order, have the widths that the original may leave open.

    Raises:
        ModelError: ONNX Runtime cannot run it.
    """
    signature = find_signature(proto, file.name)
    widths = {name: int(tensor.shape[-1]) for name, tensor in zip(signature.states, plan.state_tensors, strict=True)}
    inputs = feeds(signature, inputs_of(proto), Probe(0, len(tokens)), widths)
    inputs[signature.tokens] = tokens[None].astype(inputs[signature.tokens].dtype)
    try:
        session = original_session(file, proto)
        (logits,) = session.run([signature.logits], inputs)
    except Exception as error:  # onnxruntime raises a dozen unrelated types
        raise ModelError(f"ONNX Runtime cannot run {file} to compare with: {reason_of(error)}") from error
    flat: NDArray[np.float32] = logits.reshape(-1, logits.shape[-1]).astype(np.float32)
    return flat


def original_session(file: Path, proto: onnx.ModelProto) -> Any:
    """Open an ONNX Runtime session of a model that does not round activations. The file itself is opened if it rounds
    no activations and contains its weights.
    """
    if (
        is_exact(proto)
        and not is_prepared(proto)
        and not any(tensor.external_data for tensor in proto.graph.initializer)
    ):
        return open_session(file)
    return open_session(without_rounding(proto))


def _has_halves(proto: onnx.ModelProto) -> bool:
    """Return whether a model has weights in float16 or bfloat16, and therefore computes in these types."""
    return any(tensor.data_type in HALVES for tensor in proto.graph.initializer)


def _by_windows(file: Path, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Compute the logits of an exported fixed window, run as intended."""
    from chunkrt.onnx.session import OnnxSession

    return OnnxSession(file).run(tokens.tolist()).astype(np.float32)


def imported_logits(plan: Plan, load: Load, tokens: NDArray[np.int64], context: int) -> NDArray[np.float32]:
    """Compute an imported decoder's logits [T, V] of a prompt, in float; memory holds one subgraph's weights at a time.

    Args:
        context: number of tokens that selects between rotary tables.
    """
    length = len(tokens)
    values: dict[str, NDArray[np.generic]] = {
        "input_ids": tokens.astype(np.int64),
        "logit_rows": np.arange(length),
        "position": np.zeros(1, np.int64),
        "rope_position": np.full(1, plan.rope_offset(context)),
    }
    sizes = {"T": length, "R": length, **plan.slots(length, length)}
    for subgraph in plan.subgraphs:
        arrays = {name: np.ascontiguousarray(load(name)) for name in subgraph.weights}
        executable = OnnxRuntimeExecutable((subgraph,), plan, SCHEMES["float"], WeightStore(arrays, {}))
        states = {n: np.zeros(resolve(plan.tensors[n].shape, sizes), np.float32) for n in subgraph.state}
        outputs = {n: np.empty(resolve(plan.tensors[n].shape, sizes), np.float32) for n in subgraph.outputs}
        executable.run({n: values[n] for n in subgraph.inputs} | states, outputs)
        values |= outputs
    logits: NDArray[np.float32] = values[plan.output].astype(np.float32, copy=False)
    return logits
