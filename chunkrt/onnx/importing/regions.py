"""Evaluation of parts of a foreign graph on chosen values, to test the meaning of small operators instead of parsing
them.

Every exporter without an operator for attention writes attention in its own way, which changes between releases. All
variants compute the same function of queries, keys and values. The part between queries, keys and values and the result
is therefore run on random values, and is accepted as attention only if it computes the values of attention.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from chunkrt.errors import ModelError
from chunkrt.onnx.importing.evaluation import Evaluator, open_session, reason_of
from chunkrt.onnx.importing.signature import Probe

Array = NDArray[Any]

PROBE = Probe(5, 13)
"""Sizes at which parts are run: the numbers of past and new tokens, which differ from any decoder's number of heads."""


class Regions:
    """The part of a decoder that depends on tokens and states, with everything else frozen at one probe.

    Args:
        evaluator: evaluates the decoder's values.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        proto = evaluator.proto
        self.proto, self.evaluator, self.context, self.lengths = proto, evaluator, evaluator.context, evaluator.lengths
        self.probe = self.lengths.window or (PROBE if self.lengths.has_past else Probe(0, PROBE.length))
        self._nodes = list(proto.graph.node)
        self._writers = {name: i for i, node in enumerate(self._nodes) for name in node.output if name}
        self._initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
        self._readers: dict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(self._nodes):
            for name in {n for n in node.input if n}:
                self._readers[name].append(index)
        named = {n for node in self._nodes for n in (*node.input, *node.output) if n}
        self.data = frozenset(n for n in named if not evaluator.is_positional(n))
        """Names of values that depend on tokens or states."""

    @cached_property
    def _at_probe(self) -> dict[str, Array]:
        return self.evaluator.run(sorted(self.data), self.probe)

    @cached_property
    def frozen(self) -> dict[str, Array]:
        """Values at the probe of positional values (sizes, masks, positions) that other values read."""
        return self._frozen[0]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the sizes at the probe of a value that depends on tokens or states."""
        return self._at_probe[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the type of a value that depends on tokens or states."""
        return self._at_probe[name].dtype

    def random(self, name: str, rng: np.random.Generator) -> Array:
        """Return normal random numbers in the shape and type of a value that depends on tokens or states."""
        like = self._at_probe[name]
        return rng.standard_normal(like.shape).astype(like.dtype)

    def writer(self, name: str) -> onnx.NodeProto:
        """Return the node that makes a value; for inputs and initializers, a node without an operator."""
        return self._nodes[self._writers[name]] if name in self._writers else onnx.NodeProto()

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """Return the nodes that read a value."""
        return [self._nodes[index] for index in self._readers[name]]

    def above(self, name: str) -> Iterator[str]:
        """Return `name` and its dominators: the earlier values through which all paths to `name` lead, the nearest
        first.
        """
        yield name
        frontier = {name}
        while made := [n for n in frontier if n in self._writers]:
            node = self._nodes[max(self._writers[n] for n in made)]
            frontier = (frontier - set(node.output)) | {n for n in node.input if n in self.data}
            if len(frontier) == 1:
                yield next(iter(frontier))

    def below(self, name: str) -> Iterator[str]:
        """Return `name` and its post-dominators: the later values through which all paths from `name` lead, the nearest
        first.
        """
        yield name
        waiting = Counter({name: len(self._readers[name])})
        pending = list(self._readers[name])
        heapify(pending)
        done: set[int] = set()
        while pending:
            if (index := heappop(pending)) in done:
                continue
            done.add(index)
            node = self._nodes[index]
            for read in {n for n in node.input if n in waiting}:
                waiting[read] -= 1
                if not waiting[read]:
                    del waiting[read]
            for made in node.output:
                if made in self.data and self._readers[made]:
                    waiting[made] = len(self._readers[made])
                    for reader in self._readers[made]:
                        heappush(pending, reader)
            if len(waiting) == 1:
                yield next(iter(waiting))

    def positional_inputs(self, target: str, roots: set[str]) -> list[str]:
        """Return the frozen values that the part between `roots` and `target` reads."""
        return sorted({n for node in self._between(target, roots) for n in node.input if n in self.frozen})

    def is_between(self, target: str, roots: set[str]) -> bool:
        """Return whether `target` depends on `roots` and on no other values that depend on tokens or states."""
        outside = self.data - roots - self._writers.keys()
        return not any(name in outside for node in self._between(target, roots) for name in node.input)

    @cached_property
    def fixed(self) -> dict[str, Array]:
        """Values of `frozen` that are the same at other probes: sizes that are computed but fixed."""
        others = self._frozen[1:]
        return {
            name: value
            for name, value in self.frozen.items()
            if all(np.array_equal(value, other[name]) for other in others)
        }

    @cached_property
    def _frozen(self) -> list[dict[str, Array]]:
        """Values of `frozen` at the probe, at another probe near it, and at the context's end. A fixed window has other
        positions instead.
        """
        read = {n for node in self._nodes if self.data.intersection(node.output) for n in node.input if n}
        past, length = self.probe.past, self.probe.length
        if self.lengths.window is not None:
            others = [Probe(past, length, past + 1)]
        elif not self.lengths.has_past:
            others = [Probe(0, length + 6), Probe(0, self.context)]
        else:
            near, last = Probe(past + 2, length + 6), Probe(self.context - 1, 1)
            others = [near, *([last] if last.past > near.past else [])]
        return self.evaluator.runs(sorted(read - self.data - self.evaluator.constants), [self.probe, *others])

    def is_size(self, name: str) -> bool:
        """Return whether a frozen value consists of whole numbers that grow with the number of tokens, up to the
        context's end. In a fixed window they are constant.
        """
        if not np.issubdtype(self.frozen[name].dtype, np.integer):
            return False
        if self.lengths.window is not None:
            return name in self.fixed
        here, *others, last = (values[name] for values in (self.frozen, *self._sizes))
        if any(other.shape != here.shape for other in (*others, last)):
            return False
        end = self._size_probes[-1]
        growths = [other - here for other in others]  # by one past token, if there are any, and by one new token
        steps = [end.past - self.probe.past, end.length - self.probe.length][-len(growths) :]
        return np.array_equal(last, here + sum(step * growth for step, growth in zip(steps, growths, strict=True)))

    @cached_property
    def _sizes(self) -> list[dict[str, Array]]:
        """Frozen whole numbers at `_size_probes`."""
        names = [name for name, value in self.frozen.items() if np.issubdtype(value.dtype, np.integer)]
        return self.evaluator.runs(names, self._size_probes)

    @property
    def _size_probes(self) -> tuple[Probe, ...]:
        """Probes with one more past token, with one more new token, and with the context's last token alone. Without
        past tokens, the last two: with one more token, and with the complete context.
        """
        past, length = self.probe.past, self.probe.length
        if not self.lengths.has_past:
            return Probe(0, length + 1), Probe(0, self.context)
        return Probe(past + 1, length), Probe(past, length + 1), Probe(self.context - 1, 1)

    def part(
        self, target: str, roots: Mapping[str, Array], given: Mapping[str, Array] | None = None
    ) -> Callable[[Mapping[str, Array]], Array]:
        """Return a function that computes `target` from values of `roots`.

        Args:
            roots: values of the types that will be passed.
            given: replacements for frozen values, for sizes other than the probe's.

        Raises:
            ModelError: `target` depends on other values, or ONNX Runtime cannot compute it.
        """
        nodes = self._between(target, set(roots))
        known = {**self.frozen, **(given or {})}
        graph = onnx.GraphProto(name="part")
        graph.node.extend(nodes)
        for name in dict.fromkeys(n for node in nodes for n in node.input if n and n not in roots):
            if name in known:
                graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(known[name]), name))
            elif name in self._initializers:
                graph.initializer.append(self._initializers[name])
        for name, value in roots.items():
            kind = helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value.dtype), None)
            graph.input.append(onnx.ValueInfoProto(name=name, type=kind))
        graph.output.append(onnx.ValueInfoProto(name=target))
        model = onnx.ModelProto(ir_version=self.proto.ir_version, graph=graph)
        model.opset_import.extend(self.proto.opset_import)
        try:
            session = open_session(model)
        except Exception as error:  # onnxruntime raises a dozen unrelated types
            raise ModelError(f"ONNX Runtime cannot compute {target!r} of this model: {reason_of(error)}") from error

        def run(values: Mapping[str, Array]) -> Array:
            try:
                result: Array = session.run([target], dict(values))[0]
            except Exception as error:
                raise ModelError(f"ONNX Runtime cannot compute {target!r} of this model: {reason_of(error)}") from error
            return result

        return run

    def run(self, target: str, roots: Mapping[str, Array]) -> Array:
        """Return `target` at the probe for the given values of `roots`. Raises ModelError as `part` does."""
        return roots[target] if target in roots else self.part(target, roots)(roots)

    def _between(self, target: str, roots: set[str]) -> list[onnx.NodeProto]:
        """Return the nodes that compute `target` from `roots`, frozen values and constants, in order."""
        needed: set[int] = set()
        pending = [target]
        while pending:
            name = pending.pop()
            if name in roots or name in self.frozen or name not in self._writers:
                continue
            if (index := self._writers[name]) not in needed:
                needed.add(index)
                pending += [n for n in self._nodes[index].input if n]
        return [self._nodes[index] for index in sorted(needed)]
