"""Import of an ONNX file as a decoder that chunkrt can compile, by an ordered list of passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx

from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.modules import Module
from chunkrt.graph.rope import LONGEST_CONTEXT
from chunkrt.onnx.importing.decoder_settings import read_settings
from chunkrt.onnx.importing.decomposed import compose, is_written_out
from chunkrt.onnx.importing.draft import Draft
from chunkrt.onnx.importing.evaluation import Evaluator, Lengths, reason_of
from chunkrt.onnx.importing.exported import PLAN_KEY, metadata_of, refuse_other_exports, replay_plan
from chunkrt.onnx.importing.identity_nodes import without_identities
from chunkrt.onnx.importing.names import name_nodes
from chunkrt.onnx.importing.onnx_source import OnnxSource
from chunkrt.onnx.importing.passes.attention import raise_attention
from chunkrt.onnx.importing.passes.columns import raise_columns, separate_columns
from chunkrt.onnx.importing.passes.convolution import raise_convolutions
from chunkrt.onnx.importing.passes.delta_rule import raise_decays, raise_delta_rules, raise_gated_norms
from chunkrt.onnx.importing.passes.elementwise import drop_identities, raise_activations, raise_constants
from chunkrt.onnx.importing.passes.embedding_and_head import pick_rows, raise_embedding
from chunkrt.onnx.importing.passes.linears import raise_integer_linears, raise_linears
from chunkrt.onnx.importing.passes.norms import raise_head_norms, raise_norms
from chunkrt.onnx.importing.preparing import prepare
from chunkrt.onnx.importing.projections import merge_gates
from chunkrt.onnx.importing.reading import check_claims, find_model, read_proto, to_graph
from chunkrt.onnx.importing.recorded_decoder import build_tree
from chunkrt.onnx.importing.signature import Signature, find_signature, fixed_window, inputs_of

PASSES: tuple[Callable[[Draft], None], ...] = (
    raise_integer_linears,
    drop_identities,
    raise_linears,
    raise_constants,
    raise_embedding,
    raise_activations,
    raise_norms,
    raise_columns,
    raise_decays,
    raise_delta_rules,
    raise_gated_norms,
    raise_head_norms,
    raise_attention,
    Draft.prune,
    raise_convolutions,
    merge_gates,
    Draft.prune,
    separate_columns,
    Draft.prune,
)
"""Passes in order; each requires no more than the earlier ones ensure."""

UNKNOWN_CONTEXT = 4096
"""Context length if no file states one."""

MALFORMED = (KeyError, IndexError, ValueError, TypeError, AttributeError, AssertionError, MemoryError)
"""Exceptions that passes raise for nodes without required inputs or attributes, because not all cases are checked one
by one.
"""

log = logging.getLogger(__name__)


def import_decoder(path: Path) -> tuple[OnnxSource, Module]:
    """Read an ONNX decoder.

    Args:
        path: the file, or the folder that holds it.

    Returns:
        Its weights, and its module tree.

    Raises:
        ModelError: it is damaged or inconsistent.
        UnsupportedModelError: an operator, or a use of an operator, is not supported; the message names the node.
    """
    file = find_model(path)
    try:
        source, decoder = _import(file)
        source.keep({name for parameter in decoder.parameters() for name in parameter.checkpoint_tensors})
        return source, decoder
    except MALFORMED as error:
        raise ModelError(
            f"{file} is damaged: a node lacks inputs or attributes of its operator "
            f"({type(error).__name__}: {reason_of(error)})"
        ) from error


def _import(file: Path) -> tuple[OnnxSource, Module]:
    proto = read_proto(file)
    check_claims(proto, file)
    refuse_other_exports(proto, file.name)
    signature = find_signature(proto, file.name)
    family, config = read_settings(file.parent)
    is_exported = PLAN_KEY in metadata_of(proto)
    if not is_exported:
        prepare(proto, signature, file)
    context = _context_length(config)
    evaluator = Evaluator(proto, signature, context)
    if not is_exported:
        lengths = _lengths(proto, signature, file)
        context = lengths.longest(context)
        evaluator = Evaluator(proto, signature, context, lengths)
        _refuse_rounding(evaluator, file)
        plain = without_identities(evaluator, file, runs=is_written_out(proto))
        evaluator = Evaluator(plain, signature, context, lengths) if plain is not proto else evaluator
        if is_written_out(plain):
            composed = compose(evaluator, file)
            signature = find_signature(composed, file.name)
            evaluator = Evaluator(composed, signature, context)
    model = to_graph(evaluator.proto, file)
    draft = Draft(
        where=file.name,
        model=model,
        evaluator=evaluator,
        source=OnnxSource(file, family, config, proto),
        logits_index=[value.name for value in model.graph.outputs].index(signature.logits),
    )
    if is_exported:
        return draft.source, replay_plan(draft)
    for one_pass in PASSES:
        one_pass(draft)
    logit_rows = pick_rows(draft)
    if unread := draft.signature.states.keys() - _read_states(draft):
        raise ModelError(f"{file.name}: the state {min(unread)!r} is an input that no layer reads")
    log.info("%s is an export of %s with %d states", file, signature.exporter, len(signature.states))
    return draft.source, build_tree(draft, name_nodes(draft), logit_rows)


def _lengths(proto: onnx.ModelProto, signature: Signature, file: Path) -> Lengths:
    """Return the numbers of tokens that a decoder takes.

    Raises:
        UnsupportedModelError: attention is an operator in a fixed window or in a decoder without states; only attention
            that is written as small operators is recognised there.
    """
    window = fixed_window(inputs_of(proto), signature, file.name)
    is_usual = window is None and signature.states
    if not is_usual and not is_written_out(proto):
        what = "no past and present states" if window is None else f"a fixed window of {window.length} tokens"
        raise UnsupportedModelError(f"{file.name} has {what}; export the decoder with its cache and dynamic axes")
    return Lengths(window, has_past=bool(signature.states))


def _refuse_rounding(evaluator: Evaluator, file: Path) -> None:
    """Raise UnsupportedModelError for activations that are rounded to a grid that was fixed at the export."""
    for node in evaluator.proto.graph.node:
        if node.op_type == "QuantizeLinear" and not evaluator.is_positional(node.output[0]):
            raise UnsupportedModelError(
                f"{file.name}: node {node.name!r}, an operator QuantizeLinear of the domain "
                f"{node.domain or 'ai.onnx'}, cannot be imported: it rounds the activations {node.input[0]!r} to "
                "the file's own grid; export the decoder with only its weights quantised, and choose a static scheme"
            )


def _context_length(config: Mapping[str, Any]) -> int:
    """Return the number of positions for the tables of a decoder that computes them at run time."""
    found = config.get("max_position_embeddings", UNKNOWN_CONTEXT)
    if not isinstance(found, int) or not 0 < found <= LONGEST_CONTEXT:
        raise ModelError(f"max_position_embeddings is {found!r:.40}, expected 1 to {LONGEST_CONTEXT}")
    return found


def _read_states(draft: Draft) -> set[str]:
    return {v.name or "" for node in draft.graph for v in node.inputs if v is not None}
