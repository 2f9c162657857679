"""The backends satisfy the contract, and the conformance suite detects backends that do not."""

from dataclasses import dataclass, replace
from threading import Event, main_thread
from threading import current_thread as thread

import numpy as np
import pytest

from chunkrt.backends import BACKENDS, Support, make_backend
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.errors import ConfigError, PartitionError
from chunkrt.quant.scheme import SCHEMES
from chunkrt.testing import ConformanceError, check_backend, conformance
from chunkrt.testing.random_decoders import random_decoder


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", BACKENDS)
def test_builtin_backends_conform(name):
    check_backend(make_backend(name, threads=2))


class OddBackend(ReferenceBackend):
    """The reference, with wrapped executables."""

    name = "odd"
    wrapper = None

    def compile(self, subgraph, plan, chunk_length, scheme, weights):
        executable = super().compile(subgraph, plan, chunk_length, scheme, weights)
        return self.wrapper(executable, subgraph, chunk_length, scheme) if self.wrapper else executable


@dataclass
class Odd:
    """An executable like that of the reference."""

    inner: object
    subgraph: object
    chunk_length: int
    scheme: object
    fixed_length = None

    def __post_init__(self):
        """Let subclasses set a fixed length."""

    def run(self, inputs, outputs):
        self.inner.run(inputs, outputs)

    @property
    def is_static(self):
        return self.subgraph.is_static

    @property
    def is_attention(self):
        return bool(self.subgraph.state)

    @property
    def caches(self):
        """Return the states that hold every position, if the executable has any."""
        is_plain = not self.subgraph.window and any(node.op == "CachedAttention" for node in self.subgraph.nodes)
        return self.subgraph.state if is_plain else ()


CASES = []


def breaks(clause):
    """Register an executable, or a complete backend, under the clause it violates."""

    def add(kind):
        backend = kind() if issubclass(kind, ReferenceBackend) else type("", (OddBackend,), {"wrapper": kind})()
        CASES.append(pytest.param(clause, backend, id=f"{clause}-{kind.__name__}"))
        return kind

    return add


@breaks("description")
class Nameless(OddBackend):
    name = ""


@breaks("description")
class WithoutConcurrency(OddBackend):
    concurrency = 0


@breaks("description")
class WithoutCaches(OddBackend):
    cache_dtypes = ()


@breaks("description")
class WithUnknownCaches(OddBackend):
    cache_dtypes = ("float64",)


@breaks("support")
class SupportsNothing(OddBackend):
    def supports(self, subgraph, plan, scheme):
        return Support(ok=False, node=subgraph.nodes[-1].name, reason="it is lazy")

    def compile(self, *arguments):
        raise PartitionError("it is lazy")


@breaks("support")
class SupportsWhatItCannotCompile(OddBackend):
    def compile(self, subgraph, *rest):
        if subgraph.rows == "R":
            raise PartitionError("not logits")
        return super().compile(subgraph, *rest)


@breaks("refusal")
class TakesUnknownOperators(OddBackend):
    def supports(self, subgraph, plan, scheme):
        return Support(ok=True)


@breaks("refusal")
class BlamesNoNode(OddBackend):
    def supports(self, *arguments):
        return replace(super().supports(*arguments), node="")


@breaks("refusal")
class GivesNoReason(OddBackend):
    def supports(self, *arguments):
        return replace(super().supports(*arguments), reason="")


@breaks("refusal")
class CompilesWhatItRefuses(OddBackend):
    def supports(self, subgraph, plan, scheme):
        if scheme.name == "float":
            return Support(ok=False, node=subgraph.nodes[-1].name, reason="only 8 bits")
        return super().supports(subgraph, plan, scheme)

    def compile(self, *arguments):
        return ReferenceBackend().compile(*arguments)


@breaks("refusal")
class RefusesWithAnotherError(OddBackend):
    def compile(self, subgraph, *rest):
        try:
            return super().compile(subgraph, *rest)
        except PartitionError as error:
            raise KeyError("operator") from error


@breaks("length")
class FixedAttention(Odd):
    def __post_init__(self):
        self.fixed_length = self.chunk_length if self.is_attention else None


@breaks("length")
class FixedToHalfAChunk(Odd):
    def __post_init__(self):
        self.fixed_length = self.chunk_length // 2 if self.is_static else None


@breaks("length")
class LogitRowsThatDoNotDivide(Odd):
    def __post_init__(self):
        self.fixed_length = 3 if self.subgraph.rows == "R" else None


@breaks("rows")
class EvenRowsOnly(Odd):
    def run(self, inputs, outputs):
        if len(next(iter(outputs.values()))) % 2:
            raise ValueError("an odd number of rows")
        super().run(inputs, outputs)


@breaks("inputs")
class NormalisesInPlace(Odd):
    def run(self, inputs, outputs):
        super().run(inputs, outputs)
        if self.is_static:
            inputs[self.subgraph.inputs[0]][0, 0] += 1


@breaks("inputs")
class WritesThePositionAfter(Odd):
    def run(self, inputs, outputs):
        super().run(inputs, outputs)
        for name in self.caches:
            inputs[name][:, inputs["position"][0] + len(inputs[self.subgraph.inputs[0]])] = 0


@breaks("inputs")
class RotatesOldKeysAgain(Odd):
    def run(self, inputs, outputs):
        super().run(inputs, outputs)
        for name in self.caches:
            inputs[name][:, : inputs["position"][0]] *= -1


@breaks("outputs")
class LeavesTheLastColumn(Odd):
    def run(self, inputs, outputs):
        kept = {name: output[:, -1].copy() for name, output in outputs.items()}
        super().run(inputs, outputs)
        for name, output in outputs.items():
            output[:, -1] = kept[name]


@breaks("outputs")
class WritesARowTooMany(Odd):
    def run(self, inputs, outputs):
        super().run(inputs, outputs)
        for output in outputs.values():
            longer = np.lib.stride_tricks.as_strided(output, (len(output) + 1, output.shape[1]), output.strides)
            longer[-1] = 0


@breaks("outputs")
class ForgetsTheCache(Odd):
    def run(self, inputs, outputs):
        caches = {name: inputs[name].copy() for name in self.caches}
        super().run({**inputs, **caches}, outputs)


@breaks("outputs")
class ReadsBeyondThePosition(Odd):
    """Attends to positions that have not been written yet."""

    def run(self, inputs, outputs):
        beyond = sum(float(inputs[name][0, -1, 0]) for name in self.caches)
        super().run(inputs, outputs)
        for output in outputs.values():
            output += beyond


@breaks("values")
class AThousandthOff(Odd):
    def run(self, inputs, outputs):
        super().run(inputs, outputs)
        for output in outputs.values():
            output *= 1.001


@breaks("values")
class FirstLogitRowsOnly(Odd):
    def run(self, inputs, outputs):
        if "logit_rows" in inputs:
            inputs = {**inputs, "logit_rows": np.arange(len(inputs["logit_rows"]))}
        super().run(inputs, outputs)


@breaks("values")
class TruncatesActivations(Odd):
    """Rounds towards zero, whereas int8 activations round to the nearest."""

    def run(self, inputs, outputs):
        if self.scheme.weight_bits and self.is_static:
            name = self.subgraph.inputs[-1]
            step = np.abs(inputs[name]).max(axis=1, keepdims=True) / 127
            inputs = {**inputs, name: np.trunc(inputs[name] / step) * step}
        super().run(inputs, outputs)


@breaks("values")
class ForgetsTheShadow(Odd):
    def run(self, inputs, outputs):
        super().run(inputs, outputs)
        if self.subgraph.nodes[0].op == "ShadowLinear":
            for output in outputs.values():
                output[...] = 0


@breaks("values")
class PutsFloatOutputsOnAGrid(Odd):
    """Has a 4-bit error: an 8-bit one is too small to show in a layer, and is covered by the clause `linears`."""

    def run(self, inputs, outputs):
        super().run(inputs, outputs)
        if self.scheme.float_outputs and self.is_static:
            for output in outputs.values():
                step = np.abs(output).max() / 7
                output[...] = np.rint(output / step) * step


@breaks("chunks")
class PositionsOfTheChunk(Odd):
    """Rounds the position down to a complete chunk, which only a comparison of two chunk lengths can show."""

    def run(self, inputs, outputs):
        super().run(inputs, outputs)
        if self.is_static and self.chunk_length == 16:
            for output in outputs.values():
                output[8:] = output[8:][::-1]


class ReadsAnotherState(Odd):
    """Reads states that differ from those after the previous call."""

    def run(self, inputs, outputs):
        for name in self.subgraph.state:
            if name.endswith(self.state):
                self.change(inputs[name])
        super().run(inputs, outputs)


@breaks("values")
class ForgetsTheConvolution(ReadsAnotherState):
    state = ".conv_state"

    def change(self, state):
        state[...] = 0


@breaks("values")
class SharesTheRecurrentStateOfHeads(ReadsAnotherState):
    state = ".recurrent_state"

    def change(self, state):
        state[1:] = state[0]


@breaks("values")
class KeepsTheStateFromBefore(Odd):
    """Returns correct outputs; the next call would be wrong."""

    def run(self, inputs, outputs):
        names = [name for name in self.subgraph.state if name.endswith("recurrent_state")]
        before = {name: inputs[name].copy() for name in names}
        super().run(inputs, outputs)
        for name, state in before.items():
            inputs[name][...] = state


class ChangesAnOperator(OddBackend):
    """An executable of the hybrid decoder, whose subgraphs differ from Llama's in the changed parts."""

    def compile(self, subgraph, *rest):
        nodes = tuple(self.changed(node) if node.op == self.op else node for node in subgraph.nodes)
        return super().compile(replace(subgraph, nodes=nodes), *rest)

    def changed(self, node):
        return replace(node, attributes={**node.attributes, **self.attributes(node.attributes)})


@breaks("values")
class SeesOnePositionTooMany(ChangesAnOperator):
    op = "CachedAttention"

    def attributes(self, given):
        return {"window": given["window"] + bool(given["window"])}


@breaks("values")
class PicksOneExpertLess(ChangesAnOperator):
    op = "RoutedExperts"

    def attributes(self, given):
        return {"top_k": given["top_k"] - 1}


@breaks("values")
class NormsHeadsWithALargerEpsilon(ChangesAnOperator):
    op = "HeadNorm"

    def attributes(self, given):
        return {"epsilon": 0.01}


@breaks("inputs")
class WritesRingsFromTheirBegin(Odd):
    """Treats the ring as a cache that restarts when it is full."""

    def run(self, inputs, outputs):
        super().run(inputs, outputs)
        for name in self.subgraph.state:
            if self.subgraph.window and inputs["position"][0] + len(inputs[self.subgraph.inputs[0]]) > 20:
                inputs[name][:, :8] = 0


@breaks("values")
class LosesWhatGoesOverTheEndOfARing(Odd):
    def run(self, inputs, outputs):
        super().run(inputs, outputs)
        for name in self.subgraph.state if self.subgraph.window else ():
            num_over = inputs["position"][0] + len(inputs[self.subgraph.inputs[0]]) - inputs[name].shape[1]
            if num_over > 0:
                inputs[name][:, :num_over] = 0


@breaks("repetition")
class CountsItsCalls(Odd):
    calls = 0

    def run(self, inputs, outputs):
        super().run(inputs, outputs)
        self.calls += 1
        for output in outputs.values():
            np.nextafter(output, np.float32(self.calls % 2), out=output, where=output != 0)  # shadows add exact zeros


class RunsSegments(Odd):
    """Runs one segment after another."""

    def run_segments(self, inputs, outputs, segments):
        first = 0
        for segment in segments:
            rows = slice(first, first := first + segment.num_rows)
            own = self.of_segment(segment, segments)
            self.run({**{n: x[rows] for n, x in inputs.items()}, **own}, {n: y[rows] for n, y in outputs.items()})

    def of_segment(self, segment, segments):
        return segment.inputs


@breaks("inputs")
class TakesOnePositionForAll(RunsSegments):
    def of_segment(self, segment, segments):
        places = {name: array for name, array in segments[0].inputs.items() if name.endswith("position")}
        return {**segment.inputs, **places}


@breaks("segments")
class TakesOneStateForAll(RunsSegments):
    def of_segment(self, segment, segments):
        return {**segment.inputs, **{name: segments[0].inputs[name] for name in self.subgraph.state}}


@breaks("segments")
class RunsOneSegmentOnly(RunsSegments):
    def run_segments(self, inputs, outputs, segments):
        (segment,) = segments
        super().run_segments(inputs, outputs, [segment])


@breaks("outputs")
class LeavesTheLastSegmentUnwritten(RunsSegments):
    def run_segments(self, inputs, outputs, segments):
        super().run_segments(inputs, outputs, segments[:-1])


class KeepsTheState(Odd):
    """Keeps the state where it computes; writes the additions of a call into the caller's state."""

    kept, held = None, None

    def run_after(self, inputs, outputs, history):
        if "position" not in inputs:
            return self.run(inputs, outputs)
        state, position = {name: inputs[name] for name in self.subgraph.state}, int(inputs["position"][0])
        is_known = self.knows(history, position) and self.kept and state.keys() == self.kept.keys()
        self.kept = self.kept if is_known else {name: array.copy() for name, array in state.items()}
        self.run({**inputs, **self.kept}, outputs)
        end = position + len(next(iter(outputs.values())))
        for name, array in state.items():
            slots = np.arange(position, end) % array.shape[1]
            array[:, slots] = self.kept[name][:, slots]
        self.held = history, end

    def knows(self, history, position):
        return self.held == (history, position)


@breaks("history")
class KeepsOneStateForAll(KeepsTheState):
    def knows(self, history, position):
        return True


@breaks("threads")
class SharesItsScratch(Odd):
    """The first call in another thread reads the results of the second thread."""

    scratch = None
    overwritten = None

    def run(self, inputs, outputs):
        if thread() is main_thread():
            return super().run(inputs, outputs)
        self.overwritten = self.overwritten or Event()
        is_first, self.scratch = self.scratch is None, inputs
        if not is_first:
            self.overwritten.set()
        self.overwritten.wait(timeout=10)
        other = {name: np.resize(value, inputs[name].shape) for name, value in self.scratch.items()}
        super().run({**other, **{name: inputs[name] for name in self.subgraph.state}}, outputs)


@breaks("linears")
class RoundsHalvesUp(OddBackend):
    """Rounds ties away from zero if the suite runs a linear alone; a decoder's values rarely lie on a tie."""

    def compile(self, subgraph, plan, chunk_length, scheme, weights):
        executable = super().compile(subgraph, plan, chunk_length, scheme, weights)
        alone = subgraph.name.startswith("linear ") and subgraph.nodes[0].op == "MatMul"
        return HalvesUp(executable, subgraph, chunk_length, scheme) if alone else executable


class HalvesUp(Odd):
    def run(self, inputs, outputs):
        super().run({name: np.trunc(x + np.copysign(0.5, x)) for name, x in inputs.items()}, outputs)


@pytest.mark.slow
@pytest.mark.parametrize(("clause", "backend"), CASES)
def test_suite_detects_broken_clause(clause, backend):
    check_is_noticed(clause, backend)


@pytest.fixture(scope="module")
def few_schemes():
    """Return one dynamic and one static scheme with shadows; and float, for the other decoder alone."""
    few = [scheme for scheme in conformance.TRIED if scheme.name in ("w8a8-dynamic", "w8a8-shadowed")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conformance, "TRIED", few)
        patch.setattr(conformance, "TRIED_HYBRID", conformance.TRIED_HYBRID[:1])
        conformance.tried_decoders.cache_clear()
        yield
    conformance.tried_decoders.cache_clear()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("clause", "backend"), {case.values[0]: case for case in reversed(CASES)}.values())
def test_suite_detects_broken_clause_under_few_schemes(few_schemes, clause, backend):
    check_is_noticed(clause, backend)


def check_is_noticed(clause, backend):
    with pytest.raises(ConformanceError) as raised:
        check_backend(backend)
    assert raised.value.clause == clause
    assert f"breaks the clause {clause!r}" in str(raised.value)


class FixedLength(Odd):
    """An executable in the style of an NPU: chunks of one length on static subgraphs, four rows of logits at a time."""

    def __post_init__(self):
        self.fixed_length = None if self.is_attention else 4 if self.subgraph.rows == "R" else self.chunk_length

    def run(self, inputs, outputs):
        assert {len(o) for o in outputs.values()} == {self.fixed_length or len(next(iter(outputs.values())))}
        super().run(inputs, outputs)


CONFORM = [
    type("Packed", (OddBackend,), {"wrapper": RunsSegments})(),
    type("Keeper", (OddBackend,), {"wrapper": KeepsTheState})(),
    type("Npu", (OddBackend,), {"wrapper": FixedLength, "name": "npu", "concurrency": 1})(),
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", CONFORM, ids=lambda backend: type(backend).__name__)
def test_unusual_executables_conform(backend):
    """Executables that run segments one by one, keep the state, or take chunks of one length like an NPU."""
    check_backend(backend)


class PacksAndKeeps(RunsSegments, KeepsTheState):
    """Runs one segment after another, with a state of its own."""


@pytest.mark.slow
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("wrapper", [PacksAndKeeps, FixedLength])
def test_unusual_executables_conform_under_few_schemes(few_schemes, wrapper):
    name, concurrency = ("npu", 1) if wrapper is FixedLength else ("odd", None)
    check_backend(
        type(wrapper.__name__, (OddBackend,), {"wrapper": wrapper, "name": name, "concurrency": concurrency})()
    )


class StaticOnly(OddBackend):
    """Refuses dynamic subgraphs, as an NPU may."""

    def supports(self, subgraph, plan, scheme):
        if subgraph.is_static:
            return super().supports(subgraph, plan, scheme)
        return Support(ok=False, node=subgraph.nodes[0].name, reason="it depends on the position")

    def compile(self, subgraph, plan, *rest):
        if not subgraph.is_static:
            raise PartitionError(f"{subgraph.name} depends on the position")
        return super().compile(subgraph, plan, *rest)


def test_backend_for_some_subgraphs_conforms(few_schemes):
    check_backend(StaticOnly())


@pytest.mark.slow
def test_backend_for_some_subgraphs_conforms_under_every_scheme():
    check_backend(StaticOnly())


@pytest.mark.parametrize("name", BACKENDS)
def test_unknown_operator_is_refused_by_name(name):
    decoder = random_decoder([SCHEMES["w8a8-dynamic"]])
    subgraph = decoder.plan.subgraphs[0]
    odd = replace(subgraph, nodes=(replace(subgraph.nodes[0], op="Gater", domain="elsewhere"),))
    backend = make_backend(name, threads=1)
    arguments = (odd, decoder.plan, 8, SCHEMES["w8a8-dynamic"], decoder.weights["w8a8-dynamic"])
    with pytest.raises(PartitionError, match=r"elsewhere::Gater"):
        backend.compile(*arguments)


def test_unknown_backend_error_offers_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'native'"):
        make_backend("nativ", threads=1)
