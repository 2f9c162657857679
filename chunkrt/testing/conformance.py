"""The conformance suite: the contract of every backend, including plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from chunkrt.backends.base import Backend
from chunkrt.errors import CompileError, PartitionError
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.modules import Module
from chunkrt.graph.plan import RING_STEP, SHADOW_OP, Plan, Subgraph, linear_nodes
from chunkrt.graph.static_attention import (
    attention_nodes,
    convolution_nodes,
    num_static,
    with_static_attention,
)
from chunkrt.quant.scheme import DOWN_PROJ, HEAD, SCHEMES, Scheme
from chunkrt.runtime.state_tensors import CACHE_DTYPES
from chunkrt.testing.calls import UNWRITTEN, Recording
from chunkrt.testing.exact_linear import ExactLinear, exact_linears, exact_shadow
from chunkrt.testing.executables import (
    CompiledSubgraph,
    ConformanceError,
    check_chunks,
    check_history,
    check_repetition,
    check_segments,
    check_threads,
    check_values,
)
from chunkrt.testing.random_decoders import CONFIG, CONFIG_IN_BLOCKS, HYBRID_CONFIG, hybrid, random_decoder

UNKNOWN_OPERATOR = "OperatorThatNobodyHas"

_W8A8 = SCHEMES["w8a8"]
TRIED = (
    *SCHEMES.values(),
    replace(_W8A8, name="w8a8-float-outputs", float_outputs=("*",)),
    replace(_W8A8, name="w8a8-shadowed", shadowed=("*",)),
    replace(
        _W8A8,
        name="mixed",
        weight_bits=4,
        weights_of_8_bits=("*.o_proj.weight", "*.gate_up_proj.weight", HEAD),
        wide=(DOWN_PROJ, "*.qkv_proj.weight", HEAD),
        shadowed=("*.o_proj.weight",),
    ),
)
"""Schemes in addition to the named schemes, of kinds that options and searches create."""

TRIED_HYBRID = (SCHEMES["float"], SCHEMES["w8a8-dynamic"])


def check_backend(backend: Backend, *, chunk_length: int = 8) -> None:
    """Check that a backend satisfies the contract of `chunkrt/backends/base.py`.

    A small Llama decoder with random weights is cut into subgraphs. Each subgraph that the backend supports, under each
    scheme of TRIED that it supports, is compiled for chunks of `chunk_length` and of twice as many rows, and compared
    with the backend `reference`. No vector width divides the decoder's sizes. The static schemes are repeated with
    sizes that are multiples of 32, for hardware that requires such sizes, and so are the schemes with 4-bit blocks,
    whose depth is 32. Finally, the schemes of TRIED_HYBRID are checked on a decoder with the parts that Llama lacks:
    both kinds of linear attention, norms of heads, attention over a window with a ring buffer that wraps, and routed
    experts. Under one scheme of each decoder, attention is repeated in its static form for NPUs
    (`graph/static_attention.py`).

    Args:
        chunk_length: number of tokens of a chunk. An NPU's compiler decides for every length separately, so check the
            backend with all lengths in use.

    A clause is checked on all subgraphs before the next clause, roughly in the order below; slow clauses come last.

    Clauses:
        description: `name` is a text, and `concurrency` is None or at least 1. If it is None, `cache_dtypes` is not
            empty.
        support: at least one subgraph is supported; every supported subgraph compiles.
        refusal: `supports` refuses an unsupported subgraph with one of its nodes and a reason, and `compile` refuses it
            with PartitionError or CompileError. Both also refuse an operator that does not exist.
        length: `fixed_length` is None or the chunk length. For a subgraph on rows of logits, it may be shorter, and
            then divides the chunk length. For a subgraph with state, it is None.
        rows: calls with any number of rows from 1 to the chunk length succeed (or with exactly `fixed_length` rows),
            with logits of any of these rows.
        inputs: no input except state is written, and in caches only the slots of position to position + T - 1.
        outputs: outputs are written completely, and no memory outside them is written.
        values: values equal those of the reference within a tolerance. If m is the largest magnitude of an output, the
            tolerance is 16 * 64 * 2^-23 * m, for 16 operators whose sums of at most 64 products lose a float32 step per
            product; float16 caches add 2^-10 * m. With quantised linears, a value between two integers may be rounded
            in either direction. Therefore the root mean square of the difference, over all rows of an output, is at
            most 1/256 of that of the output; 1/64 if linears have static grids of 8 bits, or with a `fixed_length`; and
            1/32 with both. With a `fixed_length`, the tolerance of a subgraph without linears is larger by 16 * 2^-11 *
            m, for 16 operators in float16; so is that of static attention.
        linears: a single linear is checked. The inputs of a dynamic linear are multiples of 1/2, with 127 in every row,
            and with two outliers of 40 times that value in every other row. The error is at most 4 * 2^-23 of the sum
            of the magnitudes of the products: outliers are multiplied without rounding, other values are rounded half
            to even, and sums of products are exact; a row of zeros gives zeros. With a weight in blocks the error is at
            most (K + 4) * 2^-24 of that sum, in which an integer times its scale and the minimum are two products. A
            static linear is within one step of its output's grid of the exact sum of the integers, where ties of the
            input are rounded to even. A value beyond a grid becomes the last level, or any value from there to the end
            of the integer type; if the linear has a shadow, it becomes the last level. A float output is within (K + 4)
            * 2^-24 of the sum of the magnitudes of its K products. A `fixed_length` indicates an NPU, whose inputs and
            outputs are float16. In this case a tie may be rounded in either direction, and a result may have an
            additional error of 2^-10 of the sum of the magnitudes of its products plus 2^-9 of the limit of the output
            grid.
        shadows: the shadow of a single linear is checked on steps and half steps. Inputs that are at most 127 steps
            from zero after rounding (ties to even) contribute exactly nothing. Of all other inputs, the part that
            exceeds 127 steps is multiplied, within the bound of a float output.
        repetition: the same call gives bit-identical results.
        chunks: within the tolerance of `values`, two chunks in one call give the same results as two calls, one per
            chunk, and as a call with one row followed by a call with the rest.
        segments: if an executable with state has `run_segments`, rows of three sequences in one call give, within that
            tolerance, the same results as separate calls for each sequence.
        history: if an executable has `run_after`, chunks of one history, then of another history, and then of the first
            history again give results that are bit-identical to those of `run`.
        threads: two concurrent calls of one executable, in two threads, give results that are bit-identical to those of
            consecutive calls.

    Raises:
        ConformanceError: an AssertionError that names the first broken clause.
    """
    _check_description(backend)
    decoders = tried_decoders(chunk_length)
    suites = [_Suite(backend, decoder) for decoder in decoders]
    compiled = [subgraph for suite in suites for subgraph in suite.compile_all()]
    if not compiled:
        subgraphs = len(decoders[0].decoder.plan.subgraphs)
        detail = f"it supports none of {subgraphs} subgraphs under any scheme"
        raise ConformanceError(backend.name, "support", detail)
    for subgraph in compiled:
        check_values(subgraph)
    for suite in suites:
        suite.check_linears()
    for check in (check_repetition, check_chunks, check_segments, check_history, check_threads):
        for subgraph in compiled:
            check(subgraph)


def check_linears(backend: Backend, *, chunk_length: int = 8) -> None:
    """Check only the clauses linears and shadows; see `check_backend`. The check takes a fraction of a second."""
    for decoder in tried_decoders(chunk_length):
        _Suite(backend, decoder).check_linears()


def _check_description(backend: Backend) -> None:
    """Check the clause description."""

    def fail(detail: str) -> NoReturn:
        raise ConformanceError(backend.name, "description", detail)

    name, concurrency, dtypes = backend.name, backend.concurrency, backend.cache_dtypes
    if not isinstance(name, str) or not name:
        fail(f"name is {name!r}, expected text")
    if concurrency is not None and concurrency < 1:
        fail(f"concurrency is {concurrency}, expected None or at least 1")
    if not set(dtypes) <= set(CACHE_DTYPES) or (concurrency is None and not dtypes):
        fail(f"cache_dtypes is {dtypes!r}, expected some of {', '.join(CACHE_DTYPES)}")


@lru_cache(maxsize=1)
def tried_decoders(chunk_length: int) -> Sequence[_TriedDecoder]:
    """Return the decoders for the checks of every backend; they are immutable and cached."""
    static_or_in_blocks = [scheme for scheme in TRIED if scheme.is_static or scheme.weight_bits == 4]
    return [
        _TriedDecoder(TRIED_HYBRID, HYBRID_CONFIG, chunk_length, hybrid),
        _TriedDecoder(TRIED, CONFIG, chunk_length),
        _TriedDecoder(static_or_in_blocks, CONFIG_IN_BLOCKS, chunk_length),
    ]


class _TriedDecoder:
    """A decoder under some schemes, with the reference's results. `recordings` contains these by the name of the
    scheme."""

    def __init__(
        self,
        schemes: Sequence[Scheme],
        config: Mapping[str, Any],
        chunk_length: int,
        family: Callable[[DecoderConfig], Module] | None = None,
    ) -> None:
        self.chunk_length = chunk_length
        room = 3 * chunk_length if family is None else 2 * RING_STEP + 3 * chunk_length
        context = max(config["max_position_embeddings"], room)
        self.decoder = random_decoder(schemes, {**config, "max_position_embeddings": context}, family)
        plan = self.decoder.plan
        ring = plan.slots(context, 2 * chunk_length)["W"] if plan.window else 0
        num_tokens = max(3 * chunk_length, ring + chunk_length)
        self.recordings = {
            name: Recording(
                self.decoder.plans[name], scheme, self.decoder.weights[name], num_tokens, most_rows=2 * chunk_length
            )
            for name, scheme in self.decoder.schemes.items()
        }


class _Suite:
    """Checks of the clauses on one decoder."""

    def __init__(self, backend: Backend, tried: _TriedDecoder) -> None:
        self.backend = backend
        self.chunk_length = tried.chunk_length
        self.recordings = tried.recordings

    def compile_all(self) -> list[CompiledSubgraph]:
        """Return all compiled subgraphs that the backend supports; check the clauses support and refusal."""
        recordings = list(self.recordings.values())
        compiled = [s for each in recordings for s in self._compile(each, each.plan, each.plan.subgraphs)]
        static = _with_static_attention(recordings[0])
        return compiled + self._compile(recordings[0], static, [s for s in static.subgraphs if num_static(s)])

    def check_linears(self) -> None:
        """Check the clauses linears and shadows."""
        for recording in self.recordings.values():
            if recording.scheme.weight_bits is not None:
                self._check_linears(recording)

    def _break(self, clause: str, detail: str, cause: BaseException | None = None) -> NoReturn:
        raise ConformanceError(self.backend.name, clause, detail) from cause

    def _compile(self, recording: Recording, plan: Plan, subgraphs: Iterable[Subgraph]) -> list[CompiledSubgraph]:
        scheme, weights = recording.scheme, recording.weights
        compiled = []
        for subgraph in subgraphs:
            self._check_refusal(_with_unknown_operator(subgraph), recording)
            if not self.backend.supports(subgraph, plan, scheme):
                self._check_refusal(subgraph, recording)
                continue
            try:
                one, two = (
                    self.backend.compile(subgraph, plan, length, scheme, weights)
                    for length in (self.chunk_length, 2 * self.chunk_length)
                )
            except Exception as error:
                detail = f"subgraph {subgraph.name} under {scheme.name} is supported, but does not compile: {error!r}"
                self._break("support", detail, error)
            compiled.append(
                CompiledSubgraph(
                    backend=self.backend.name,
                    subgraph=subgraph,
                    recording=recording,
                    chunk_length=self.chunk_length,
                    executable=one,
                    of_two_chunks=two,
                )
            )
        return compiled

    def _check_refusal(self, subgraph: Subgraph, recording: Recording) -> None:
        plan, scheme = recording.plan, recording.scheme
        support, where = self.backend.supports(subgraph, plan, scheme), f"subgraph {subgraph.name} under {scheme.name}"
        if support:
            self._break("refusal", f"{where} is reported as supported with an operator that does not exist")
        names = [node.name for node in subgraph.nodes]
        if support.node not in names:
            self._break(
                "refusal", f"{where} is refused for {support.node!r}, expected one of its nodes, e.g. {names[-1]!r}"
            )
        if not support.reason:
            self._break("refusal", f"{where} is refused without a reason")
        try:
            self.backend.compile(subgraph, plan, self.chunk_length, scheme, recording.weights)
        except (PartitionError, CompileError):
            return
        except Exception as error:
            self._break("refusal", f"{where}: compile raised {error!r}, expected PartitionError", error)
        self._break("refusal", f"{where} is refused by supports, but compiles")

    def _check_linears(self, recording: Recording) -> None:
        plan, scheme, weights = recording.plan, recording.scheme, recording.weights
        shadows = {n.inputs[1]: n for s in plan.subgraphs for n in s.nodes if n.op == SHADOW_OP}
        one_of_each_kind = {
            (plan.tensors[name].shape, scheme.has_blocks(name), scheme.activation_bits_of(name), name in shadows): node
            for name, node in linear_nodes(plan).items()
        }
        for node in one_of_each_kind.values():
            for case in exact_linears(node, plan, scheme, weights, self.chunk_length):
                self._check_linear("linears", case, scheme)
            if shadow := shadows.get(node.inputs[1]):
                self._check_linear("shadows", exact_shadow(shadow, plan, weights, self.chunk_length), scheme)

    def _check_linear(self, clause: str, case: ExactLinear, scheme: Scheme) -> None:
        if not self.backend.supports(case.subgraph, case.plan, scheme):
            return
        executable = self.backend.compile(case.subgraph, case.plan, self.chunk_length, scheme, case.weights)
        if executable.fixed_length not in (None, self.chunk_length):
            return
        found = np.full_like(case.exact.least, UNWRITTEN, np.float32)
        executable.run({case.subgraph.inputs[0]: case.values}, {case.subgraph.outputs[0]: found})
        least, most = case.exact if executable.fixed_length is None else case.in_float16
        is_off = ~((least <= found) & (found <= most))
        if is_off.any():
            row, column = np.argwhere(is_off)[0]
            self._break(
                clause,
                f"{case.subgraph.weights[0]} under {scheme.name}: row {row}, column {column} is "
                f"{found[row, column]:.8g}, expected {least[row, column]:.8g} to {most[row, column]:.8g}",
            )


def _with_static_attention(recording: Recording) -> Plan:
    """Return a recording's plan with convolutions and attention over all cache slots and complete rings."""
    plan = recording.plan
    slots = {"P": plan.context_length, "W": recording.ring}
    nodes = [*attention_nodes(plan), *convolution_nodes(plan)]
    return with_static_attention(plan, nodes, slots, fits=lambda _: False)


def _with_unknown_operator(subgraph: Subgraph) -> Subgraph:
    *before, last = subgraph.nodes
    return replace(subgraph, nodes=(*before, replace(last, op=UNKNOWN_OPERATOR, domain="chunkrt.testing")))
