"""The conformance suite: what every backend keeps to, plug-ins too."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import numpy as np

from chunkrt.backends.base import Backend
from chunkrt.errors import CompileError, PartitionError
from chunkrt.graph.plan import Subgraph
from chunkrt.quant.scheme import SCHEMES, Scheme
from chunkrt.testing.calls import Recording
from chunkrt.testing.decoder import random_decoder
from chunkrt.testing.error import ConformanceError
from chunkrt.testing.exact_linear import exact_linear
from chunkrt.testing.executables import CHUNK_LENGTH, CompiledSubgraph, check_executable

LINEAR_TOLERANCE = 4 * 2.0**-23
UNKNOWN_OPERATOR = "OperatorThatNobodyHas"


def check_backend(backend: Backend) -> None:
    """Check that a backend keeps the contract of `chunkrt/backends/base.py`.

    A small Llama decoder with random weights is cut into subgraphs; each that the backend supports, under each
    scheme that it supports, is compiled for chunks of 8 and of 16 rows and compared with the backend `reference`.

    Clauses:
        description: `name` is text, `concurrency` None or at least 1.
        support: at least one subgraph is supported; one that is supported compiles.
        refusal: one that is not is refused by `supports` with a node of it and a reason, and by `compile` with
            PartitionError or CompileError; an operator that nobody has is refused so.
        length: `fixed_length` is None or the chunk length; on rows of logits, where it may be shorter, a divisor of
            it; with state, None.
        rows: any number of rows, 1 to the chunk length, runs (or exactly `fixed_length`); logits of any of them.
        inputs: only caches are written, and of these only the rows at position to position + T - 1.
        outputs: written in full, and nothing beside them.
        values: as the reference has them. With m the largest magnitude of an output: within 16 * 64 * 2^-23 * m,
            for 16 operators whose sums of at most 64 products lose a float32 step a product; 2^-10 * m more where
            caches are float16. With 8-bit linears a value between two int8 steps may fall to either side, so there
            the root mean square of the difference, over all rows of an output, is at most 1/256 of the output's.
        linears: an 8-bit linear of multiples of 1/2 with 127 in every row is exact to 4 * 2^-23 of the sum of its
            products' magnitudes: rounding is half to even, sums of products are exact; a row of zeros gives zeros.
        chunks: 16 rows at once give, within the tolerance of `values`, what twice 8 rows or 1 and 15 do.
        repetition: the same call gives the same bits.
        threads: so do two calls of one executable at once, in two threads.

    Raises:
        ConformanceError: an AssertionError that names the first clause that was broken.
    """
    _Suite(backend).run()


class _Suite:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.schemes = tuple(SCHEMES.values())
        self.decoder = random_decoder(self.schemes)

    def run(self) -> None:
        self._check_description()
        compiled = [c for scheme in self.schemes for c in self._compile_all(scheme)]
        if not compiled:
            self._break("support", f"it supports none of {len(self.decoder.plan.subgraphs)} subgraphs under any scheme")
        for subgraph in compiled:
            check_executable(subgraph)
        for scheme in self.schemes:
            if scheme.weight_bits == 8:
                self._check_linears(scheme)

    def _break(self, clause: str, detail: str, cause: BaseException | None = None) -> NoReturn:
        raise ConformanceError(self.backend.name, clause, detail) from cause

    def _check_description(self) -> None:
        name, concurrency = self.backend.name, self.backend.concurrency
        if not isinstance(name, str) or not name:
            self._break("description", f"name is {name!r}, expected text")
        if concurrency is not None and concurrency < 1:
            self._break("description", f"concurrency is {concurrency}, expected None or at least 1")

    def _compile_all(self, scheme: Scheme) -> list[CompiledSubgraph]:
        plan, weights = self.decoder.plan, self.decoder.weights[scheme.name]
        recording = Recording(plan, scheme, weights, 3 * CHUNK_LENGTH)
        compiled = []
        for subgraph in plan.subgraphs:
            self._check_refusal(_with_unknown_operator(subgraph), recording)
            if not self.backend.supports(subgraph, plan, scheme):
                self._check_refusal(subgraph, recording)
                continue
            try:
                one, two = (
                    self.backend.compile(subgraph, plan, length, scheme, weights)
                    for length in (CHUNK_LENGTH, 2 * CHUNK_LENGTH)
                )
            except Exception as error:
                detail = f"subgraph {subgraph.name} under {scheme.name} is supported, but does not compile: {error!r}"
                self._break("support", detail, error)
            compiled.append(
                CompiledSubgraph(
                    backend=self.backend.name,
                    subgraph=subgraph,
                    recording=recording,
                    executable=one,
                    of_two_chunks=two,
                )
            )
        return compiled

    def _check_refusal(self, subgraph: Subgraph, recording: Recording) -> None:
        plan, scheme = recording.plan, recording.scheme
        support, where = self.backend.supports(subgraph, plan, scheme), f"subgraph {subgraph.name} under {scheme.name}"
        if support:
            self._break("refusal", f"{where} is said to be supported with an operator that nobody has")
        names = [node.name for node in subgraph.nodes]
        if support.node not in names:
            self._break("refusal", f"{where} is refused for {support.node!r}, expected a node of it, as {names[-1]!r}")
        if not support.reason:
            self._break("refusal", f"{where} is refused without a reason")
        try:
            self.backend.compile(subgraph, plan, CHUNK_LENGTH, scheme, recording.weights)
        except (PartitionError, CompileError):
            return
        except Exception as error:
            self._break("refusal", f"{where}: compile raised {error!r}, expected PartitionError", error)
        self._break("refusal", f"{where} is refused by supports, and compiled nevertheless")

    def _check_linears(self, scheme: Scheme) -> None:
        weights = self.decoder.weights[scheme.name]
        linears = [node for s in self.decoder.plan.subgraphs for node in s.nodes if node.op == "MatMul"]
        for node in linears:
            case = exact_linear(node, self.decoder.plan, scheme, weights, CHUNK_LENGTH)
            if not self.backend.supports(case.subgraph, case.plan, scheme):
                continue
            executable = self.backend.compile(case.subgraph, case.plan, CHUNK_LENGTH, scheme, weights)
            if executable.fixed_length not in (None, CHUNK_LENGTH):
                continue
            found = np.empty_like(case.expected, np.float32)
            executable.run({case.subgraph.inputs[0]: case.values}, {case.subgraph.outputs[0]: found})
            is_off = ~(np.abs(found - case.expected) <= LINEAR_TOLERANCE * case.magnitude)
            if is_off.any():
                row, column = np.argwhere(is_off)[0]
                self._break(
                    "linears",
                    f"{node.inputs[1]} under {scheme.name}: row {row}, column {column} is {found[row, column]:.8g}, "
                    f"expected {case.expected[row, column]:.8g}",
                )


def _with_unknown_operator(subgraph: Subgraph) -> Subgraph:
    *before, last = subgraph.nodes
    return replace(subgraph, nodes=(*before, replace(last, op=UNKNOWN_OPERATOR, domain="chunkrt.testing")))
