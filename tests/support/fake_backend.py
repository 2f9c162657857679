"""A toy decoder and a backend for it, for tests of the runtime: small, exact, and sensitive to every mistake.

Rows are float32 [tag, a, b, c]. The tag is the token id and is never changed, so it identifies the rows that a task
reads. The other columns are arithmetic modulo 97, which is exact in float32. A dynamic subgraph appends to its cache
and sums the complete cache or a window, or keeps a running value. A chunk out of order, a padding row in the state or
an overwritten buffer therefore changes the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.base import Executable
from chunkrt.graph.plan import ALL_REDUCE_OP, Device, Node, Plan, Subgraph, Tensor, resolve
from chunkrt.runtime.batcher import BATCHERS
from chunkrt.runtime.executor import Executor, ExecutorSet
from chunkrt.runtime.policy import Policy, find_policy
from chunkrt.runtime.request import Request
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.scheduler import Scheduler
from chunkrt.runtime.tasks import Processor

Array = NDArray[Any]
Result = TypeVar("Result")
Hook = Callable[[str, int, Mapping[str, Array]], None]

WIDTH = 4
CONTEXT = 128
VOCABULARY = 160
MODULUS = 97
WINDOW = 5
STATE_SHAPES = {"cache": (1, "P", WIDTH - 1), "ring": (1, "W", WIDTH - 1), "recurrent": (1, WIDTH - 1)}
HEAD_WEIGHT = (np.arange(WIDTH * VOCABULARY).reshape(WIDTH, VOCABULARY) * 7 % MODULUS).astype(np.float32)
STATIC_KINDS = ("static", "linear", "shadow", "join")
NUM_RANKS = 2
TIMEOUT = 60.0
"""Seconds after which a waiting test counts as deadlocked."""
LOOK_S = 0.1


def make_plan(
    layers: int = 2,
    *,
    split_head: bool = False,
    shadowed: int = 0,
    kinds: Sequence[str] = ("cache",),
    long_context_from: int | None = None,
) -> Plan:
    """Return the plan: embedding, static.0, dynamic.0, ..., static.layers, head.

    `split_head` splits the head into two subgraphs. The first `shadowed` static subgraphs, up to layers + 1, fork and
    join: static.i is followed by linear.i on the NPU and shadow.i on the CPU, which read the same value, and by join.i,
    which reads both results. The layers use the `kinds` of state in turn; kinds are keys of STATE_SHAPES, and state
    tensors are named after them. With `long_context_from`, cached values depend on the row in the rotary tables.
    """
    places = ("position",) if long_context_from is None else ("position", "rope_position")
    rows = [value("hidden.embedding")]
    subgraphs = [subgraph("embedding", "cpu", ["input_ids"], ["hidden.embedding"])]
    hidden = "hidden.embedding"
    for i in range(layers + 1):
        inputs = [hidden] if i == 0 else [hidden, f"attention.{i - 1}"]
        outputs = [f"hidden.{i}"] if i == layers else [f"hidden.{i}", f"qkv.{i}"]
        rows += [value(name) for name in outputs]
        if i < shadowed:
            subgraphs += [
                subgraph(f"static.{i}", "npu", inputs, [f"residual.{i}", f"narrow.{i}"]),
                subgraph(f"linear.{i}", "npu", [f"narrow.{i}"], [f"main.{i}"]),
                subgraph(f"shadow.{i}", "cpu", [f"narrow.{i}"], [f"outliers.{i}"]),
                subgraph(f"join.{i}", "npu", [f"residual.{i}", f"main.{i}", f"outliers.{i}"], outputs),
            ]
            rows += [value(f"{name}.{i}") for name in ("residual", "narrow", "main", "outliers")]
        else:
            subgraphs.append(subgraph(f"static.{i}", "npu", inputs, outputs))
        hidden = f"hidden.{i}"
        if i < layers:
            reads, kind = (f"qkv.{i}", *places), kinds[i % len(kinds)]
            part = subgraph(f"dynamic.{i}", "cpu", reads, [f"attention.{i}"], state=[f"{kind}.{i}"])
            if kind == "ring":
                part = replace(part, nodes=(_windowed(reads, f"attention.{i}"),))
            subgraphs.append(part)
            rows.append(value(f"attention.{i}"))
    states = [
        Tensor(name=name, dtype="float32", shape=STATE_SHAPES[name.partition(".")[0]], kind="state")
        for part in subgraphs
        for name in part.state
    ]
    if split_head:
        subgraphs.append(subgraph("gather", "cpu", [hidden, "logit_rows"], ["wanted"], rows="R"))
        subgraphs.append(subgraph("head", "npu", ["wanted"], ["logits"], rows="R"))
    else:
        subgraphs.append(subgraph("head", "cpu", [hidden, "logit_rows"], ["logits"], rows="R"))
    tensors = [
        Tensor(name="input_ids", dtype="int64", shape=("T",)),
        *(Tensor(name=name, dtype="int64", shape=(1,)) for name in places),
        Tensor(name="logit_rows", dtype="int64", shape=("R",)),
        Tensor(name="wanted", dtype="float32", shape=("R", WIDTH)),
        Tensor(name="logits", dtype="float32", shape=("R", VOCABULARY)),
        *rows,
        *states,
    ]
    return Plan(
        family="toy",
        subgraphs=tuple(subgraphs),
        tensors={tensor.name: tensor for tensor in tensors},
        inputs=("input_ids", *places, "logit_rows"),
        output="logits",
        vocab_size=VOCABULARY,
        context_length=CONTEXT,
        long_context_from=long_context_from,
    )


def with_second_start(plan: Plan, reader: int) -> Plan:
    """Add a second subgraph without dependencies; subgraph number `reader`, a static.i, adds its values."""
    part = plan.subgraphs[reader]
    again = subgraph("embedding.again", "cpu", ["input_ids"], ["hidden.again"])
    part = replace(part, inputs=(*part.inputs, "hidden.again"))
    subgraphs = (*plan.subgraphs[:reader], again, part, *plan.subgraphs[reader + 1 :])
    return replace(plan, subgraphs=subgraphs, tensors={**plan.tensors, "hidden.again": value("hidden.again")})


def with_links(plan: Plan) -> Plan:
    """Add a sum over ranks, link.i, of the output of each dynamic.i."""
    subgraphs: list[Subgraph] = []
    tensors = dict(plan.tensors)
    for part in plan.subgraphs:
        renamed = tuple(name.replace("attention.", "summed.") for name in part.inputs)
        subgraphs.append(replace(part, inputs=renamed))
        if part.name.startswith("dynamic."):
            (partial,), total = part.outputs, part.outputs[0].replace("attention.", "summed.")
            names = {"inputs": (partial, "position"), "outputs": (total,)}
            node = Node(name=total, op=ALL_REDUCE_OP, domain="chunkrt", attributes={}, **names)
            link = subgraph(part.name.replace("dynamic.", "link."), "link", names["inputs"], names["outputs"])
            subgraphs.append(replace(link, nodes=(node,)))
            tensors[total] = value(total)
    return replace(plan, subgraphs=tuple(subgraphs), tensors=tensors)


def _windowed(inputs: tuple[str, ...], output: str) -> Node:
    """Return a node that declares the window of a ring."""
    attributes = {"window": WINDOW}
    return Node(name=output, op="CachedAttention", domain="", inputs=inputs, outputs=(output,), attributes=attributes)


def value(name: str) -> Tensor:
    return Tensor(name=name, dtype="float32", shape=("T", WIDTH))


def subgraph(
    name: str,
    device: Device,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    state: Sequence[str] = (),
    rows: Any = "T",
) -> Subgraph:
    return Subgraph(
        name=name,
        device=device,
        is_static=device == "npu",
        rows=rows,
        nodes=(),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        weights=(),
        state=tuple(state),
    )


def compute(subgraph: Subgraph, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
    """Compute the toy decoder's arithmetic for a subgraph of a plan from `make_plan`."""
    kind = subgraph.name.partition(".")[0]
    if kind == "embedding":
        ids = inputs["input_ids"]
        outputs[subgraph.outputs[0]][:] = np.stack([ids, ids * 3 % 97, ids * 5 % 97, ids * 7 % 97], axis=1)
    elif kind in STATIC_KINDS:
        total = sum(inputs[name] for name in subgraph.inputs) + STATIC_KINDS.index(kind)
        for number, name in enumerate(subgraph.outputs):
            outputs[name][:] = (np.roll(total, 1 + number, axis=1) * 3 + 5 + number) % MODULUS
            outputs[name][:, 0] = inputs[subgraph.inputs[0]][:, 0]
    elif kind == "dynamic":
        (qkv,) = (inputs[name] for name in subgraph.inputs if not name.endswith("position"))
        start = int(inputs["position"][0])
        rows = (qkv[:, 1:] + int(inputs.get("rope_position", [start])[0]) - start) % MODULUS
        outputs[subgraph.outputs[0]][:, 1:] = update(subgraph.state[0], inputs[subgraph.state[0]], rows, start)
        outputs[subgraph.outputs[0]][:, 0] = qkv[:, 0]
    elif kind == "link":  # all ranks of the toy have the same partial sum
        outputs[subgraph.outputs[0]][:] = inputs[subgraph.inputs[0]] * NUM_RANKS
    elif kind == "gather":
        outputs["wanted"][:] = inputs[subgraph.inputs[0]][inputs["logit_rows"]]
    else:
        rows = inputs[subgraph.inputs[0]]
        outputs["logits"][:] = (rows[inputs["logit_rows"]] if "logit_rows" in inputs else rows) @ HEAD_WEIGHT


def update(name: str, state: Array, rows: Array, start: int) -> Array:
    """Write rows from position `start` on into a state, in place, and return the result for each row."""
    kind, end = name.partition(".")[0], start + len(rows)
    if kind == "recurrent":
        made = np.empty_like(rows)
        for row, result in zip(rows, made, strict=True):
            state[0] = result[:] = (state[0] * 3 + row) % MODULUS
        return made
    state[0, np.arange(start, end) % state.shape[1]] = rows
    if kind == "ring":
        seen = [np.arange(max(0, p - WINDOW + 1), p + 1) % state.shape[1] for p in range(start, end)]
        return np.stack([state[0, slots].sum(axis=0) for slots in seen]) % MODULUS
    return np.cumsum(state[0, :end].astype(np.float64), axis=0)[start:] % MODULUS


def expected_logits(plan: Plan, token_ids: Array) -> Array:
    """Return the expected logits, float32 [n, V]: each subgraph runs once over all tokens, without an executor."""
    num_tokens = len(token_ids)
    values: dict[str, Array] = {
        "input_ids": token_ids,
        "position": np.zeros(1, np.int64),
        "rope_position": np.full(1, plan.rope_offset(num_tokens)),
        "logit_rows": np.arange(num_tokens),
    }
    for tensor in plan.state_tensors:
        values[tensor.name] = np.zeros(resolve(tensor.shape, {"P": num_tokens, "W": num_tokens}), np.float32)
    for part in plan.subgraphs:
        for name in part.outputs:
            width = plan.tensors[name].shape[1]
            assert isinstance(width, int)
            values[name] = np.zeros((num_tokens, width), np.float32)
        compute(part, values, values)
    return values["logits"]


@dataclass
class FakeExecutable:
    """Executable of one subgraph; `before` and `after` are called with (subgraph, tag of row 0, inputs)."""

    subgraph: Subgraph
    fixed_length: int | None = None
    before: Hook | None = None
    after: Hook | None = None
    calls: list[int] = field(default_factory=list)
    """Tag of row 0 for each call."""

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        first = inputs[self.subgraph.inputs[0]]
        tag = int(first.flat[0])
        self.calls.append(tag)
        assert all(a.flags.c_contiguous for a in (*inputs.values(), *outputs.values()))
        assert inputs.keys() == {*self.subgraph.inputs, *self.subgraph.state}
        assert outputs.keys() == set(self.subgraph.outputs)
        if self.before is not None:
            self.before(self.subgraph.name, tag, inputs)
        compute(self.subgraph, inputs, outputs)
        if self.after is not None:
            self.after(self.subgraph.name, tag, inputs)


def make_executables(
    plan: Plan,
    *,
    fixed_lengths: Mapping[str, int] | None = None,
    before: Hook | None = None,
    after: Hook | None = None,
) -> dict[str, FakeExecutable]:
    """Return an executable per subgraph; only subgraphs in `fixed_lengths` have a fixed number of rows."""
    fixed = fixed_lengths or {}
    return {s.name: FakeExecutable(s, fixed.get(s.name), before, after) for s in plan.subgraphs}


def npu_and_cpu(cpu_workers: int = 1) -> list[Processor]:
    return [
        Processor(name="npu", devices=frozenset({"npu"}), workers=1),
        Processor(name="cpu", devices=frozenset({"cpu"}), workers=cpu_workers),
    ]


def shared_cpu(workers: int) -> list[Processor]:
    return [Processor(name="cpu", devices=frozenset({"npu", "cpu"}), workers=workers)]


def make_schedule(
    plan: Plan,
    num_chunks: int,
    *,
    policy: str | Policy = "in_order",
    in_flight: int = 8,
    all_logits: bool = False,
    processors: Sequence[Processor] | None = None,
    durations: Sequence[Sequence[int]] | None = None,
) -> Schedule:
    """Return a schedule of chunks, of which the last, or all, have logits."""
    return Schedule(
        plan,
        routes=plan.flow.routes(num_chunks, range(0 if all_logits else num_chunks - 1, num_chunks)),
        chunks_in_flight=in_flight,
        processors=processors or npu_and_cpu(),
        policy=find_policy(policy),
        durations=durations,
    )


def tokens(num_tokens: int, start: int = 0) -> NDArray[np.int64]:
    """Return distinct token ids, so that tag // chunk length is the chunk."""
    return np.arange(start, start + num_tokens, dtype=np.int64)


def happens(look: Callable[[float], object]) -> bool:
    """Return True as soon as `look`, which waits for a number of seconds, returns a true value; False after TIMEOUT.

    The waits are short, and only their number counts. So the time in which the system stops the process is not counted.
    """
    return any(look(LOOK_S) for _ in range(round(TIMEOUT / LOOK_S)))


def wait_for(event: Event) -> None:
    """Wait for an event of another thread; fail after TIMEOUT seconds."""
    assert happens(event.wait), "deadlock: the event never came"


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that another thread causes; fail after TIMEOUT seconds."""

    def look(seconds: float) -> bool:
        latest = monotonic() + seconds
        while not (holds := condition()) and monotonic() < latest:
            sleep(0.001)
        return holds

    assert happens(look), "deadlock: it never became so"


def finish(call: Callable[[], Result]) -> Result:
    """Call a function in a new thread, return its result or raise its error, and fail if it does not return."""
    outcome: list[Any] = []

    def target() -> None:
        try:
            outcome.append((True, call()))
        except BaseException as error:
            outcome.append((False, error))

    thread = Thread(target=target, daemon=True)
    thread.start()

    def look(seconds: float) -> bool:
        thread.join(seconds)
        return bool(outcome)

    assert happens(look), "deadlock: the call never returned"
    is_well, result = outcome[0]
    if not is_well:
        raise result
    return cast(Result, result)


class LoneExecutor(Executor):
    """Executor with a scheduler of its own."""

    _scheduler: Scheduler | None = None

    def __init__(
        self,
        plan: Plan,
        executables: Mapping[str, Executable] | None = None,
        *,
        chunk_length: int = 8,
        processors: Sequence[Processor] | None = None,
        policy: str | Policy = "in_order",
        **options: Any,
    ) -> None:
        chosen, policy = npu_and_cpu() if processors is None else processors, find_policy(policy)
        options |= {"chunk_length": chunk_length, "processors": chosen, "policy": policy}
        super().__init__(plan, executables or make_executables(plan), **options)

    def run(self, request: Request) -> Request:
        """Compute a request, and return it."""
        if self._scheduler is None:
            self._scheduler = Scheduler(ExecutorSet.of_one(self), BATCHERS["packed"])
        return self._scheduler.run(request)
