"""Comparison of a decoder with Transformers, value by value.

Both compute the same tokens. Values correspond by the names of modules: the output of the linear or norm that reads
`model.layers.3.mlp.down_proj.weight` is compared with the output of Transformers' module
`model.layers.3.mlp.down_proj`, and its input with the input of that module.

The decoder is computed twice. In the first run every compared value is then replaced by Transformers' value, so the
error of a value is that of the operators since the last compared values, and a mistake shows at its own place only. In
the second run errors accumulate.

chunkrt may fold factors and the order of columns into the weights of a linear. The output of such a linear differs from
Transformers' in that way only, which is reported and is no difference.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf, sqrt
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.function_executable import read_only
from chunkrt.compile.calibrate import first_values, live_after, run_node, values_beside
from chunkrt.compile.compiler import Prepared
from chunkrt.compile.trials import RelativeError, RoundedLinears
from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import Count, written_aside
from chunkrt.graph.partition import Planned
from chunkrt.graph.plan import Node, Plan, linear_nodes

Float32 = NDArray[np.float32]
Array = NDArray[Any]

NORM_TOLERANCE = 2e-6
"""Largest error of the output of a norm, relative to the root mean square. float32 arithmetic stays below 3e-7, and an
epsilon of 1e-5 in place of 1e-6 causes 4.5e-6 if the input's variance is 1."""

TOLERANCE = 2e-5
"""Largest error of other values. float32 arithmetic stays below 3e-6."""

LOGITS_TOLERANCE = 1e-4
"""Largest error of logits, with accumulated errors."""

NUM_SHOWN = 12

_IN_LAYER = re.compile(r"\D*\.(\d+)\.")
"""Path of a module inside a layer: the first number in it is the layer's index, e.g. in "rwkv.blocks.3.attention"."""
_OF_EXPERT = re.compile(r"(.*\.experts)\.\d+\.")
"""Tensor of a single expert; Transformers holds the weights of all experts in the module before the index."""
_NORMS = {"RMSNormalization", "LayerNormalization", "HeadNorm"}
_NAMED = {"MatMul", "Gather", *_NORMS}
"""Operators whose weight names a module of Transformers."""


@dataclass(frozen=True, kw_only=True)
class ModuleValues:
    """Values of a module in Transformers.

    Attributes:
        input, output: the first input and the first output, float32 [T, n]; None if it has none of this form.
        has_weights: True if the module itself has weights.
    """

    input: Float32 | None
    output: Float32 | None
    has_weights: bool = False


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Values of a model in Transformers for some tokens.

    Attributes:
        token_ids: int64 [T].
        logits: float32 [T, V]; of a model without LM head, its hidden states.
        modules: values by the path of the module.
    """

    token_ids: NDArray[np.int64]
    logits: Float32
    modules: Mapping[str, ModuleValues]

    def save(self, path: Path) -> None:
        """Write the values to an .npz file."""
        arrays: dict[str, Array] = {"token_ids": self.token_ids, "logits": self.logits}
        for name, values in self.modules.items():
            kinds = {"input": values.input, "output": values.output}
            arrays |= {f"{kind}:{name}": array for kind, array in kinds.items() if array is not None}
        arrays["with_weights"] = np.array([name for name, values in self.modules.items() if values.has_weights], str)
        with written_aside(path) as aside, aside.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> Expected:
        """Read the values from a file of `save`. Raise ConfigError if the file cannot be read, or is another file."""
        try:
            if path.exists() and not is_zipfile(path):
                raise ValueError("it is not an .npz file")
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
            names = dict.fromkeys(name.partition(":")[2] for name in arrays if ":" in name)
            weighted, num_tokens = set(arrays["with_weights"].tolist()), arrays["token_ids"].size
            if arrays["token_ids"].dtype != np.int64 or arrays["token_ids"].shape != (num_tokens,) or not num_tokens:
                raise ValueError("its token ids are not a list of whole numbers")
            for name, array in arrays.items():
                if ":" in name and (array.dtype != np.float32 or array.shape[:1] != (num_tokens,) or array.ndim != 2):
                    raise ValueError(f"{name} is not a row of values for each token")
            modules = {
                name: ModuleValues(
                    input=arrays.get(f"input:{name}"), output=arrays.get(f"output:{name}"), has_weights=name in weighted
                )
                for name in names
            }
            return cls(token_ids=arrays["token_ids"], logits=arrays["logits"], modules=modules)
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile, zlib.error) as error:
            raise ConfigError(
                f"cannot read expected values from {path}: {cause_of(error)}; write it with make_expected"
            ) from error


@dataclass(frozen=True, kw_only=True)
class ValueFigures:
    """Comparison of one value.

    Attributes:
        value: name of the value in chunkrt's plan.
        module: the value of Transformers, such as "input of model.layers.0.mlp.down_proj".
        operator: operator that computes the value.
        layer: index of its layer; None outside all layers.
        error: root mean square of the error, relative to that of the expected value, if all earlier values are exact.
        accumulated: the same, if errors accumulate.
        folded: change that chunkrt folds into the weights, such as "0.5 times"; empty if there is none.
        is_equal: True if the error is within the tolerance for float arithmetic.
    """

    value: str
    module: str
    operator: str
    layer: int | None
    error: float
    accumulated: float
    folded: str
    is_equal: bool


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of a decoder with Transformers.

    Attributes:
        scheme: scheme of the linears.
        values: all compared values, in the decoder's order.
        unmatched: modules of Transformers with weights that no value of the decoder corresponds to.
        logits_error: relative error of the logits, with accumulated errors.
    """

    model: str
    scheme: str
    num_tokens: int
    chunk_length: int
    values: Sequence[ValueFigures]
    unmatched: Sequence[str]
    logits_error: float

    @property
    def first_difference(self) -> ValueFigures | None:
        """The first value that differs; None if all values are equal."""
        return next((value for value in self.values if not value.is_equal), None)

    @property
    def is_equal(self) -> bool:
        """True if all values and the logits are equal within float arithmetic, and all weights are read."""
        return self.first_difference is None and not self.unmatched and self.logits_error <= LOGITS_TOLERANCE

    def to_dict(self) -> dict[str, Any]:
        """Return all figures for JSON, with None for errors that are not finite."""
        first = self.first_difference
        figures = {**asdict(self), "first_difference": None if first is None else asdict(first)}
        for part in (figures, *figures["values"], figures["first_difference"] or {}):
            for name in ("error", "accumulated", "logits_error"):
                if part.get(name) == inf:
                    part[name] = None
        return figures

    def lines(self) -> Iterator[str]:
        """Return a readable report."""
        yield (
            f"{self.model} ({self.scheme}): {len(self.values)} values over {self.num_tokens} tokens in chunks of "
            f"{self.chunk_length}, compared with Transformers"
        )
        yield f"  logits differ by {self.logits_error:.2g} (relative, root mean square)"
        wrong = [value for value in self.values if not value.is_equal]
        folded = [value for value in self.values if value.folded]
        if self.scheme != "float":
            shown = sorted(self.values, key=lambda value: -value.error)[:NUM_SHOWN]
            yield "  largest errors"
            yield from _table(shown)
        elif wrong:
            first = wrong[0]
            place = "outside all layers" if first.layer is None else f"in layer {first.layer}"
            yield f"  first difference {place}: {first.value} ({first.operator}), {first.module}"
            yield from _table(wrong[:NUM_SHOWN])
            if len(wrong) > NUM_SHOWN:
                yield f"  ... and {len(wrong) - NUM_SHOWN} more; --json has all"
        elif self.is_equal:
            yield "  all values are equal within float arithmetic"
        elif self.logits_error > LOGITS_TOLERANCE:
            yield "  all compared values are equal, but the logits differ: look behind the last norm and the LM head"
        if folded:
            changes = dict.fromkeys(f"{value.value} ({value.folded})" for value in folded)
            yield f"  folded into weights: {', '.join(list(changes)[:4])}{', ...' if len(changes) > 4 else ''}"
        for name in self.unmatched:
            yield f"  Transformers' module {name} corresponds to no value of the decoder"


def _table(values: Sequence[ValueFigures]) -> Iterator[str]:
    width = max(len(value.value) for value in values)
    yield f"    {'value':{width}}  {'operator':18}  {'error':>8}  {'accumulated':>11}  module of Transformers"
    for value in values:
        folded = f", {value.folded}" if value.folded else ""
        yield (
            f"    {value.value:{width}}  {value.operator:18}  {value.error:8.1e}  {value.accumulated:11.1e}  "
            f"{value.module}{folded}"
        )


def compare_decoder(
    prepared: Prepared,
    expected: Expected,
    *,
    chunk_length: int | None = None,
    dump: Path | None = None,
    progress: Count = lambda done, total: None,
) -> Comparison:
    """Compare a decoder with expected values.

    Args:
        prepared: the checkpoint, planned without placement; its linears are computed under its scheme.
        expected: values of Transformers for the same checkpoint.
        chunk_length: number of tokens that are computed at once; by default all.
        dump: folder for an .npy file of every compared value of both runs and of Transformers.
        progress: called with (subgraphs done, total).

    Raises:
        ConfigError: the tokens do not fit the context, the expected values have another vocabulary, or a file cannot be
            written.
    """
    planned, scheme = prepared.planned, prepared.scheme
    num_tokens, plan = expected.token_ids.size, planned.plan
    if not 1 <= num_tokens <= plan.context_length:
        raise ConfigError(f"there are {num_tokens} tokens; the model takes 1 to {plan.context_length}")
    if (outside := expected.token_ids[(expected.token_ids < 0) | (expected.token_ids >= plan.vocab_size)]).size:
        raise ConfigError(f"token id {outside[0]} is outside the vocabulary of {plan.vocab_size}")
    if chunk_length is not None and chunk_length < 1:
        raise ConfigError(f"the chunk length is {chunk_length}, expected at least 1")
    size = int(plan.tensors[plan.output].shape[-1])
    if expected.logits.shape != (num_tokens, size):
        found = list(expected.logits.shape)
        raise ConfigError(
            f"Transformers' logits have shape {found}, expected {[num_tokens, size]}; this is another model"
        )
    prepared = replace(prepared, planned=planned.within(num_tokens))
    planned = prepared.planned
    plan, chunk = planned.plan, min(chunk_length or num_tokens, num_tokens)
    places = _counterparts(planned, expected)
    runs = _Values(places, dump is not None), _Values(places, dump is not None)
    live: list[dict[str, Any]] = [dict(first_values(expected.token_ids, np.arange(num_tokens))) for _ in runs]
    quantised = linear_nodes(plan) if scheme.weight_bits is not None else {}
    for index, subgraph in enumerate(plan.subgraphs):
        progress(index, len(plan.subgraphs))
        weights = {name: prepared.load(name) for name in subgraph.weights}
        linears = RoundedLinears(weights, prepared.ranges, planned.load_blocks)

        def compute(node: Node, values: Mapping[str, Any], linears: RoundedLinears = linears) -> Any:
            if node.op == "MatMul" and node.inputs[1] in quantised:
                return linears.multiply(node, values[node.inputs[0]], scheme)
            return run_node(node, values)

        for run, (seen, replaces) in enumerate(zip(runs, (True, False), strict=True)):
            live[run] = _run_subgraph(plan, index, live[run], weights, compute, chunk, seen, replaces=replaces)
    progress(len(plan.subgraphs), len(plan.subgraphs))
    exact, accumulated = runs
    if dump is not None:
        _dump(dump, {"exact": exact, "accumulated": accumulated})
    figures = (_figures(place, exact, accumulated) for several in places.values() for place in several)
    logits = live[1][plan.output]
    return Comparison(
        model=prepared.model,
        scheme=scheme.name,
        num_tokens=num_tokens,
        chunk_length=chunk,
        values=[value for value in figures if value is not None],
        unmatched=_unread(planned, expected),
        logits_error=_relative(logits, expected.logits),
    )


@dataclass(frozen=True, kw_only=True)
class _Counterpart:
    """A value of the decoder, and the value of Transformers that corresponds to it."""

    value: str
    operator: str
    module: str
    expected: Float32
    may_be_folded: bool
    tolerance: float


def _relative(found: Float32, expected: Float32) -> float:
    error = RelativeError()
    error.see(found, expected)
    return error.relative


@dataclass
class _Change:
    """Change of a linear's output that is folded into its weight: a factor, and an order of columns."""

    factor: float = 1.0
    order: NDArray[np.int64] | None = None

    def apply(self, expected: Float32) -> Float32:
        ordered = expected if self.order is None else expected[:, self.order]
        return ordered if self.factor == 1 else (ordered * np.float32(self.factor)).astype(np.float32)

    def __str__(self) -> str:
        parts = [] if self.factor == 1 else [f"{self.factor:.6g} times"]
        return ", ".join([*parts, *([] if self.order is None else ["columns in another order"])])


@dataclass
class _Values:
    """Errors of one run."""

    places: Mapping[str, Sequence[_Counterpart]]
    keeps: bool
    errors: dict[tuple[str, str], RelativeError] = field(default_factory=dict)
    changes: dict[tuple[str, str], _Change] = field(default_factory=dict)
    found: dict[str, list[Float32]] = field(default_factory=dict)

    def see(self, name: str, found: Float32, rows: slice) -> Float32 | None:
        """Record rows of a value. Return the value that chunkrt should have, if Transformers has one."""
        exact: Float32 | None = None
        for place in self.places.get(name, ()):
            key, expected = (name, place.module), place.expected[rows]
            if found.shape != expected.shape:
                continue
            if key not in self.changes:
                self.changes[key] = _change(found, expected, place.tolerance) if place.may_be_folded else _Change()
            expected = self.changes[key].apply(expected)
            self.errors.setdefault(key, RelativeError()).see(found, expected)
            exact = expected if exact is None else exact
        if self.keeps and name in self.places:
            self.found.setdefault(name, []).append(found)
        return exact


def _change(found: Float32, expected: Float32, tolerance: float) -> _Change:
    """Return the factor and the order of columns by which two arrays differ; no change if they differ otherwise."""
    if _relative(found, expected) <= tolerance:
        return _Change()
    sizes = [sqrt(float(np.square(array, dtype=np.float64).sum())) for array in (found, expected)]
    if not all(sizes) or not np.isfinite(sizes).all():
        return _Change()
    factor = sizes[0] / sizes[1]
    factor = 1.0 if abs(factor - 1) <= tolerance else factor
    order = _order(found, (expected * np.float32(factor)).astype(np.float32), tolerance)
    if order is None:
        signed = factor * float(np.sign(np.vdot(found, expected)) or 1)
        change = _Change(signed)
    else:
        change = _Change(factor, None if (order == np.arange(len(order))).all() else order)
    return change if _relative(found, change.apply(expected)) <= tolerance else _Change()


def _order(found: Float32, expected: Float32, tolerance: float) -> NDArray[np.int64] | None:
    """Return the column of `expected` that equals each column of `found`; None if one has no equal."""
    sorted_found, sorted_expected = (np.lexsort(array[::-1]) for array in (found, expected))
    order = np.empty(found.shape[1], np.int64)
    order[sorted_found] = sorted_expected
    limit = tolerance * 30 * max(float(np.abs(expected).max()), 1e-30)
    odd = np.flatnonzero(np.abs(found - expected[:, order]).max(axis=0) > limit)
    if len(odd) > max(64, found.shape[1] // 50):  # rounding exchanges few columns of almost equal first values
        return None
    left = order[odd].tolist()
    for column in odd:
        best = min(left, key=lambda other: float(np.abs(found[:, column] - expected[:, other]).max()))
        if np.abs(found[:, column] - expected[:, best]).max() > limit:
            return None
        order[column] = best
        left.remove(best)
    return order


def _counterparts(planned: Planned, expected: Expected) -> dict[str, list[_Counterpart]]:
    """Map the names of values to the values of Transformers that correspond to them."""
    found = dict[str, list[_Counterpart]]()

    def add(value: str, operator: str, kind: str, paths: Sequence[str], tolerance: float, *, may_fold: bool) -> None:
        modules = [_same_path(path, expected.modules) for path in paths]
        arrays = [getattr(expected.modules[module], kind) for module in modules if module is not None]
        if not paths or len(arrays) < len(paths) or any(array is None for array in arrays):
            return
        place = _Counterpart(
            value=value,
            operator=operator,
            module=f"{kind} of {', '.join(filter(None, modules))}",
            expected=np.concatenate(arrays, axis=1),
            may_be_folded=may_fold,
            tolerance=tolerance,
        )
        if all(other.module != place.module for other in found.get(value, ())):
            found.setdefault(value, []).append(place)

    nodes = [node for subgraph in planned.plan.subgraphs for node in subgraph.nodes]
    makers = {name: node for node in nodes for name in node.outputs}
    biased = {node.inputs[0]: node for node in nodes if node.op == "Add" and node.inputs[1] in planned.parameters}
    for node in nodes:
        weight = next((name for name in node.inputs if name in planned.parameters), None)
        if node.op in _NAMED and weight is not None:
            paths = [name.removesuffix(".weight") for name in planned.parameters[weight].checkpoint_tensors]
            value = node.inputs[0]
            if value in makers:
                add(value, makers[value].op, "input", paths[:1], _tolerance(makers[value]), may_fold=False)
            last = biased.get(node.outputs[0], node)
            add(last.outputs[0], last.op, "output", paths, _tolerance(node), may_fold=node.op not in _NORMS)
        for output in node.outputs:
            path, is_linear = output.removesuffix(".output"), node.op == "MatMul"  # a tied LM head is found by its path
            add(output, node.op, "output", [path], _tolerance(node), may_fold=is_linear)
    return found


def _tolerance(node: Node) -> float:
    return NORM_TOLERANCE if node.op in _NORMS else TOLERANCE


def _same_path(path: str, modules: Mapping[str, ModuleValues]) -> str | None:
    """Return the module with a path, possibly below other modules, as in a decoder that is part of another model."""
    if path in modules:
        return path
    longer = [name for name in modules if name.endswith(f".{path.removeprefix('model.')}")]
    return longer[0] if len(longer) == 1 else None


def _unread(planned: Planned, expected: Expected) -> list[str]:
    """Return the modules of Transformers whose weights no parameter of the decoder reads."""
    tensors = [name for parameter in planned.parameters.values() for name in parameter.checkpoint_tensors]
    stacked = [match[1] for name in tensors if (match := _OF_EXPERT.match(name))]
    paths = {*(name.rpartition(".")[0] for name in tensors), *stacked}
    read = {_same_path(path, expected.modules) for path in paths}
    return [name for name, values in expected.modules.items() if values.has_weights and name not in read]


def _run_subgraph(
    plan: Plan,
    index: int,
    live: Mapping[str, Any],
    weights: Mapping[str, Float32],
    compute: Callable[[Node, Mapping[str, Any]], Any],
    chunk_length: int,
    seen: _Values,
    *,
    replaces: bool,
) -> dict[str, Any]:
    """Run one subgraph on all chunks, and return the values that are live after it.

    Args:
        live: values that are live before the subgraph, for all tokens.
        replaces: True if every compared value is replaced by Transformers' value.
    """
    subgraph, num_tokens = plan.subgraphs[index], len(live["input_ids"])
    beside = values_beside(plan, index, num_tokens)
    parts: dict[str, list[Array]] = {name: [] for name in subgraph.outputs}
    for start in range(0, num_tokens, chunk_length):
        rows = slice(start, start + chunk_length)
        values: dict[str, Any] = {**weights, **beside}
        values |= {n: array if n in subgraph.shared_state else array[rows] for n, array in live.items()}
        values["position"] = np.array([start], np.int64)
        values["rope_position"] = beside["rope_position"] + start
        values["logit_rows"] = np.arange(len(values["input_ids"]))
        for node in subgraph.nodes:
            results = compute(node, values)
            results = results if isinstance(results, tuple) else (results,)
            for name, result in zip(node.outputs, results, strict=True):
                exact = seen.see(name, result, rows)
                values[name] = read_only(exact if replaces and exact is not None else result)
        for name, part in parts.items():
            part.append(values[name])
    later = live_after(plan, index)
    after = {name: np.concatenate(part) for name, part in parts.items()} | {n: beside[n] for n in subgraph.state}
    return {name: array for name, array in {**live, **after}.items() if name in later}


def _figures(place: _Counterpart, exact: _Values, accumulated: _Values) -> ValueFigures | None:
    """Return the figures of a value; None if its form differs from that of Transformers."""
    key = place.value, place.module
    if key not in exact.errors:
        return None
    in_layer, error = _IN_LAYER.match(place.value), exact.errors[key].relative
    return ValueFigures(
        value=place.value,
        module=place.module,
        operator=place.operator,
        layer=int(in_layer[1]) if in_layer else None,
        error=error,
        accumulated=accumulated.errors[key].relative,
        folded=str(exact.changes[key]),
        is_equal=error <= place.tolerance,
    )


def _dump(folder: Path, runs: Mapping[str, _Values]) -> None:
    """Write every compared value of each run, and of Transformers."""
    try:
        for name, run in runs.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            for value, parts in run.found.items():
                np.save(folder / name / f"{value}.npy", np.concatenate(parts))
        (folder / "transformers").mkdir(exist_ok=True)
        for places in runs["exact"].places.values():
            np.save(folder / "transformers" / f"{places[0].value}.npy", places[0].expected)
    except OSError as error:
        raise ConfigError(f"cannot write values to {folder}: {cause_of(error)}") from error
