"""Partition experiments: simulations of one model over a grid of choices, on all cores.

rows = chunkrt.experiment(
    "gemma-2b",
    devices=["sd8gen3", "sd8elite"],
    placements={"natural": {}, "down_proj on cpu": {"model.layers.*.mlp.down_proj": "cpu"}},
    schemes=["w8a8", "w8a16"],
    attentions=["cpu", "npu"],
    prompt_lengths=[256, 1024],
    chunk_lengths=[64, 128],
    policies=["in_order", "look_ahead"],
)
rows.plot("study.png")
best, frame = rows.best(), rows.to_pandas()

The worker processes import the calling script, so a script has to call `experiment` under `if __name__ == "__main__":`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from importlib import import_module
from inspect import getsource
from itertools import product
from multiprocessing import active_children, get_context
from operator import index
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, Literal, TypeGuard, TypeVar, get_args

from chunkrt import __version__
from chunkrt.engine.capability import plan_by_capability
from chunkrt.engine.npu_attention import near_by_reach
from chunkrt.engine.options import DEFAULT_NPU_WINDOW, EngineOptions, lengths_of
from chunkrt.engine.resolve import choose_recipe, find_checkpoint
from chunkrt.engine_directory.manifest import is_engine_directory, read_manifest, read_plan
from chunkrt.engine_directory.weights import check_shadowed
from chunkrt.errors import ConfigError, PartitionError, cause_of, unknown_name
from chunkrt.files import Progress, locked, remove
from chunkrt.graph.placement import Placed, Placement, check_placement, placed_by_name
from chunkrt.graph.plan import Place, Plan
from chunkrt.graph.static_attention import can_be_static
from chunkrt.pictures import Panel, PlotPoint, draw_panels, html_table
from chunkrt.progress import find_progress
from chunkrt.quant.scheme import DEFAULT_NPU_SCHEME, SCHEMES, Scheme
from chunkrt.runtime.affinity import available_cores
from chunkrt.runtime.chunk_slots import MOST_SLOTS
from chunkrt.runtime.policy import Policy, find_policy
from chunkrt.simulate import DeviceProfile, MeasuredProfile, Shape, find_device, shapes, simulate
from chunkrt.simulate.dask_cluster import run_on_dask
from chunkrt.simulate.models import is_weightless, plan_weightless
from chunkrt.simulate.simulator import graphs_text, known_scheme

T = TypeVar("T")

ROWS_FORMAT = 3
"""Version of the file of rows, raised when rows have other fields or simulations other results."""

POINTS_OF_A_WORKER = 100
"""Number of simulations that take about as long as the start of a worker process."""


@dataclass(frozen=True, kw_only=True)
class GridRow:
    """One point of the grid and its results, as in `chunkrt.simulate.Simulation`.

    Attributes:
        device: name of the device as in the call; for a profile its own name.
        scheme: name of the scheme as in the call.
        placement_name: name of the placement, if `experiment` was called with names; otherwise its text.
        attention: processor of attention, as in the call.
        graphs: lengths of the NPU's graphs if there are several, such as "1,8,32"; otherwise empty.
        chunks_in_flight: the simulated number, which is at most the number of chunks of the prompt.
        energy_joules: None if the profile has no power figures.
        origin: source of the figures, which distinguishes these rows from those of `chunkrt bench`.
    """

    model: str
    device: str
    placement_name: str
    placement: Placement
    scheme: str
    attention: str
    prompt_length: int
    chunk_length: int
    graphs: str
    policy: str
    chunks_in_flight: int
    time_to_first_token_ms: float
    tokens_per_s: float
    makespan_ms: float
    npu_busy: float
    cpu_busy: float
    overlap: float
    peak_memory_bytes: int
    energy_joules: float | None
    origin: Literal["predicted"] = "predicted"


class Rows(list[GridRow]):
    """The rows of an experiment, in the order of its grid."""

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Rows:
        """Return the rows of a file that `experiment` wrote, in the order in which they were finished.

        Raises:
            ConfigError: the file cannot be read, or contains something else.
        """
        if not Path(path).is_file():
            raise ConfigError(f"there is no file {path}")
        try:
            return Rows(_read_rows(Path(path))[0].values())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {cause_of(error)}") from error

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with the fields of `GridRow` as columns. Placements are texts: "lm_head=npu,
        model.norm=cpu".

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ConfigError("a data frame needs pandas, which is not installed: pip install pandas") from error
        records = [asdict(row) | {"placement": placement_text(row.placement)} for row in self]
        return pandas.DataFrame(records, columns=[field.name for field in fields(GridRow)])

    def best(self, figure: str = "time_to_first_token_ms") -> GridRow:
        """Return the row with the least time, memory or energy, or the highest rate; the first of several.

        Args:
            figure: name of a field of `GridRow` with numbers.

        Raises:
            ConfigError: there are no rows, or no row has the figure.
        """
        if not self:
            raise ConfigError("there are no rows; an experiment has to finish one first")
        known = [row for row in self if _figure_of(row, figure) is not None]
        if not known:
            raise ConfigError(f"no row has the figure {figure!r}")
        sign = -1 if figure in HIGHER_IS_BETTER else 1
        return min(known, key=lambda row: sign * (_figure_of(row, figure) or 0.0))

    def pareto(self, *figures: str) -> Rows:
        """Return the rows that no other row of the same device and prompt length exceeds in one figure without being
        worse in another one, in their order.

        Args:
            figures: names of fields; by default time to first token, peak memory, and energy if it is known.

        Raises:
            ConfigError: a figure does not exist, or some row lacks it.
        """
        names = figures or ("time_to_first_token_ms", "peak_memory_bytes")
        if not figures and all(row.energy_joules is not None for row in self):
            names = (*names, "energy_joules")
        points = []
        for row in self:
            values = [_figure_of(row, name) for name in names]
            if None in values:
                raise ConfigError(f"a row on {row.device} has no {names[values.index(None)]}; name other figures")
            signs = (-1 if name in HIGHER_IS_BETTER else 1 for name in names)
            points.append(tuple(sign * (value or 0.0) for sign, value in zip(signs, values, strict=True)))
        groups: dict[tuple[str, int], set[tuple[float, ...]]] = {}
        for row, point in zip(self, points, strict=True):
            groups.setdefault((row.device, row.prompt_length), set()).add(point)
        return Rows(
            row
            for row, point in zip(self, points, strict=True)
            if not _is_exceeded(point, groups[row.device, row.prompt_length])
        )

    def plot(self, path: str | os.PathLike[str], x: str = "prompt_length", y: str = "tokens_per_s") -> None:
        """Draw one figure over a field, with a line for each combination of the other choices.

        Args:
            path: the picture, a .png or .svg file.
            x: field with numbers of the horizontal axis.
            y: figure of the vertical axis.

        Raises:
            ConfigError: there are no rows, a field does not exist, matplotlib is missing, or the file cannot be
                written.
        """
        if not self:
            raise ConfigError("there are no rows to draw")
        for name in (x, y):
            _figure_of(self[0], name)
        choices = [name for name in CHOICES if name != x and len({getattr(row, name) for row in self}) > 1]
        if len({(getattr(row, x), *(getattr(row, name) for name in choices)) for row in self}) < len(self):
            choices.append("chunks_in_flight")
        lines: dict[str, list[PlotPoint]] = {}
        values: dict[str, tuple[object, ...]] = {}
        for row in self:
            across, up = _figure_of(row, x), _figure_of(row, y)
            if across is not None and up is not None:
                name = ", ".join(_label(choice, getattr(row, choice)) for choice in choices) or row.model
                lines.setdefault(name, []).append(PlotPoint(across, up))
                values[name] = tuple(getattr(row, choice) for choice in choices) or (name,)
        if not lines:
            raise ConfigError(f"no row has the figures {x!r} and {y!r}")
        panel = Panel(x.replace("_", " "), y.replace("_", " "), lines, values)
        models, devices = ({getattr(row, name) for row in self} for name in ("model", "device"))
        models = {Path(model).name if Path(model).exists() else model for model in models}
        draw_panels([panel], Path(path), f"{', '.join(sorted(models))} on {', '.join(sorted(devices))}, simulated")

    def __repr__(self) -> str:
        """Return the number of rows, and the highest speed."""
        fastest = max((row.tokens_per_s for row in self), default=0.0)
        return f"Rows({len(self)} rows, at most {fastest:.1f} tokens/s)"

    def _repr_html_(self) -> str:
        shown = ("model", *CHOICES)
        figures = ("time_to_first_token_ms", "tokens_per_s")
        lines = [
            [
                *(str(getattr(row, n)) for n in shown),
                *(f"{getattr(row, n):.1f}" for n in figures),
                f"{row.npu_busy:.0%}",
            ]
            for row in self
        ]
        return html_table("simulated prefill", (*shown, *figures, "npu_busy"), lines)


CHOICES = ("device", "placement_name", "scheme", "attention", "prompt_length", "chunk_length", "graphs", "policy")
"""Fields of `GridRow` that distinguish the lines of a picture. If these do not suffice, the chunks in flight do too."""
HIGHER_IS_BETTER = ("tokens_per_s", "npu_busy", "cpu_busy", "overlap")


def _figure_of(row: GridRow, name: str) -> float | None:
    """Return a field with numbers. Raise ConfigError if a row has no such field."""
    names = [field.name for field in fields(GridRow)]
    if name not in names:
        raise unknown_name("figure", name, names)
    value = getattr(row, name)
    if value is not None and not isinstance(value, int | float):
        raise ConfigError(f"{name} is not a number; choose a figure such as tokens_per_s")
    return value


def _is_exceeded(point: tuple[float, ...], others: Iterable[tuple[float, ...]]) -> bool:
    return any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in others)


def _label(choice: str, value: object) -> str:
    if choice in ("device", "scheme", "policy", "placement_name"):
        return str(value) or "natural"
    if choice == "graphs":
        return f"graphs of {value}" if value else "one graph"
    short = {"prompt_length": "prompt", "chunk_length": "chunk", "chunks_in_flight": "in flight"}
    return f"{short.get(choice, choice)} {value}"


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """Data that every worker holds. Points refer to the plans and devices by index.

    Attributes:
        near: plans with attention on the NPU, by placement and attention.
    """

    model: str
    names: list[str]
    placements: list[Placement]
    plans: list[Plan]
    devices: list[DeviceProfile | MeasuredProfile]
    device_names: list[str]
    policies: Mapping[str, str | Policy]
    schemes: Mapping[str, Scheme]
    near: Mapping[tuple[int, str], Mapping[int, Plan]]

    @cached_property
    def digests(self) -> tuple[list[str], list[str]]:
        """SHA-256 of every plan with the shadows of the schemes, and of every device, in hexadecimal."""
        shadowed = sorted(repr(scheme.shadowed) for scheme in self.schemes.values())
        plans = [_digest(f"{plan.to_json()}{shadowed}") for plan in self.plans]
        return plans, [_digest(repr(asdict(device))) for device in self.devices]

    def named(self, point: _Point, row: GridRow) -> GridRow:
        """Return the row of an equal point of another grid, with the names of this grid."""
        return replace(row, **self.labels(point))

    def labels(self, point: _Point) -> dict[str, Any]:
        """Return the fields of a row that the caller has named."""
        device, placement, scheme, attention, *_ = point
        return {
            "model": self.model,
            "device": self.device_names[device],
            "placement_name": self.names[placement],
            "placement": self.placements[placement],
            "scheme": scheme,
            "attention": attention,
        }

    def key(self, point: _Point) -> str:
        """Return a text that is equal for equal points of different grids."""
        plans, devices = self.digests
        *others, policy, flight = point[2:]
        return _digest(json.dumps([devices[point[0]], plans[point[1]], *others, self.code_of[str(policy)], flight]))

    @cached_property
    def code_of(self) -> dict[str, str]:
        """Name of each policy; for an object also a digest of its class and its attributes.

        Raises:
            ConfigError: the source text of an object's class is not available.
        """
        return {
            name: name if isinstance(policy, str) else _code_of(name, policy) for name, policy in self.policies.items()
        }


def _code_of(name: str, policy: Policy) -> str:
    try:
        return f"{name} {_digest(getsource(type(policy)) + repr(sorted(vars(policy).items())))}"
    except (OSError, TypeError) as error:
        raise ConfigError(
            f"the source of the policy {name!r} is not available, so its rows cannot be distinguished from those of "
            "another one; omit output, or define the policy in a file"
        ) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class RowFile:
    """A file of finished rows: a header, then a line for each row with its key. Only one process at a time has it.

    Attributes:
        known: the rows of the file by key.

    Raises:
        ConfigError: the file exists and is not such a file, was written by another version of chunkrt, or cannot be
            written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with ExitStack() as stack:
                # Without a buffer, each row is written at once, and an error leaves nothing that `close` would write.
                self._file = stack.enter_context(path.open("ab", buffering=0))
                self.known: dict[str, GridRow] = {}
                whole = 0
                if path.is_file():
                    stack.enter_context(_only_user(path))
                    self.known, whole = _read_rows(path)
                    self._file.truncate(whole)  # an interrupted run may have left a part of a line
                if not whole:
                    self._put({"chunkrt": __version__, "format": ROWS_FORMAT})
                self._resources = stack.pop_all()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {cause_of(error)}") from error

    def __enter__(self) -> RowFile:
        """Return the file."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self._resources.close()

    def write(self, key: str, row: GridRow) -> None:
        """Append a row."""
        try:
            self._put({"key": key, "row": asdict(row)})
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {cause_of(error)}") from error

    def _put(self, value: Mapping[str, object]) -> None:
        line = f"{json.dumps(value)}\n".encode()
        while line:
            line = line[self._file.write(line) :]


@contextmanager
def _only_user(path: Path) -> Iterator[None]:
    lock = path.with_name(f".{path.name}.lock")
    with locked(lock, f"simulating into {path}"):
        try:
            yield
        finally:
            remove(lock)  # while it is locked; see `written_aside`


def _read_rows(path: Path) -> tuple[dict[str, GridRow], int]:
    """Return the rows of a file by key, and the number of bytes of its complete lines.

    Raises:
        ConfigError: the file is not a file of rows, or was written by another version of chunkrt.
        OSError: the file cannot be read.
    """
    content = path.read_bytes()
    *lines, rest = content.split(b"\n")
    if not content:
        return {}, 0
    try:
        head, *entries = [json.loads(line) for line in lines]
        if head["format"] != ROWS_FORMAT or head["chunkrt"] != __version__:
            raise ConfigError(f"{path} contains rows of chunkrt {head['chunkrt']}; name another file, or remove it")
        return {entry["key"]: GridRow(**entry["row"]) for entry in entries}, len(content) - len(rest)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is not a file of rows of an experiment; name another file") from error


_Point = tuple[int, int, str, str, int, tuple[int, ...], str, int | None]
"""Coordinates of a point: device, placement, scheme, attention, prompt length, lengths of graphs (the last is that of
chunks), policy, chunks in flight."""


def experiment(
    model: str | os.PathLike[str] | Shape,
    *,
    devices: Iterable[str | os.PathLike[str] | DeviceProfile | MeasuredProfile],
    chunk_lengths: Iterable[int | str],
    policies: Iterable[str | Policy],
    schemes: Iterable[str],
    prompt_lengths: Iterable[int],
    placements: Iterable[Placement | Placed | str] | Mapping[str, Placement | Placed | str] = ({},),
    attentions: Iterable[str] = ("cpu",),
    shadow: str | None = None,
    chunks_in_flight: Iterable[int | None] = (None,),
    workers: int | None = None,
    dask: str | Any = None,
    output: str | os.PathLike[str] | None = None,
    progress: Progress | bool | None = None,
) -> Rows:
    """Simulate the prefill of a model at every point of a grid.

    Args:
        model: a shape, its name or its TOML file; a config.json without weights; otherwise a catalogue name, a GGUF
            file, a Hugging Face folder, or an engine directory.
        devices: profiles, or names and files of profiles.
        chunk_lengths: numbers of tokens, 1 to the model's context; or texts such as "1,8,32" for several graphs on the
            NPU, as in `chunkrt.load`.
        policies: policies, or their names. Worker processes need policies that can be pickled.
        schemes: names of schemes.
        prompt_lengths: numbers of tokens, 1 to the model's context.
        placements: devices by patterns of module paths, trees of `chunkrt.graph.load_module`, or texts such as
            "layers=0,15" for layers on the NPU; as a list or by names. By default every module is on its default
            device.
        attentions: processor of attention over caches: "cpu"; "npu", for chunks with at most the default window's
            tokens before them; or "npu:WINDOWS" with other windows, e.g. "npu:512,2048". With ":sinks=N" after them,
            the longest window slides, as with `npu_sinks` of `chunkrt.load`.
        shadow: patterns of 8-bit linears with shadows, separated by commas, or "all", as in `chunkrt.load`; the schemes
            have to be static with 8-bit activations.
        chunks_in_flight: 1 to 256; None for the executor's default.
        workers: number of processes, at least 1; by default one for each POINTS_OF_A_WORKER simulations, but at most
            the number of cores of this machine. With 1, simulations run in this process.
        dask: the address of a Dask scheduler, or a `distributed.Client`, whose workers replace the processes.
        output: file of finished rows as JSON lines, which `Rows.read` reads. If it exists, its rows are not simulated
            again, provided that the same version of chunkrt wrote them for the same model and devices.
        progress: function that is called during downloads and after every simulation; True shows a bar.

    Returns:
        A row for each point, in an order that does not depend on the workers: devices vary slowest, then placements,
        schemes, attentions, prompt lengths, chunk lengths, policies, and chunks in flight fastest.

    Raises:
        ConfigError: an axis is empty or has an unknown name or a value out of range; a profile was measured under other
            conditions; or the Dask cluster cannot be used.
        ModelError: the checkpoint is missing, damaged or unsupported.
    """
    report = find_progress(progress)
    named_devices = [(_device_name(device), _device(device)) for device in _axis("devices", devices)]
    device_names, found_devices = [name for name, _ in named_devices], [device for _, device in named_devices]
    by_name = placements if isinstance(placements, Mapping) else None
    if by_name is not None and any(value in get_args(Place) for value in by_name.values() if isinstance(value, str)):
        raise ConfigError(f"placements is {dict(by_name)}, expected a list of placements; put it in brackets")
    axis = _axis("placements", placements if by_name is None else by_name.values())
    found_placements = [check_placement(placement, "placements") for placement in axis]
    placement_names = [*by_name] if by_name else [placement_text(placement) for placement in found_placements]
    if is_compiled(model):
        found_placements = [placement or read_manifest(Path(model)).placement for placement in found_placements]
    found_schemes = {name: scheme_of(model, name, shadow) for name in _names("schemes", schemes)}
    modes = _axis("attentions", attentions)
    for mode in modes:
        attention_options(mode)
    found_policies: dict[str, str | Policy] = {}
    for policy in _axis("policies", policies):
        name = find_policy(policy).name
        if found_policies.setdefault(name, policy) != policy:
            raise ConfigError(f"policies: two of them are named {name!r}; rename one")
    prompts, chunks = _axis("prompt_lengths", prompt_lengths), _axis("chunk_lengths", chunk_lengths)
    flights = _axis("chunks_in_flight", chunks_in_flight)
    flights = [None if flight is None else _whole("chunks_in_flight", flight, MOST_SLOTS, "") for flight in flights]
    if workers is not None:
        workers = _whole("workers", workers)
    plans = plans_of(model, found_placements, report, next(iter(found_schemes.values())))
    context = plans[0].context_length
    prompts = [_whole("prompt_lengths", length, context) for length in prompts]
    lengths = [_graph_lengths(entry, context) for entry in chunks]
    label = model.source if isinstance(model, Shape) else os.fspath(model)
    grid = _Grid(
        model=label,
        names=placement_names,
        placements=found_placements,
        plans=plans,
        devices=found_devices,
        device_names=device_names,
        policies=found_policies,
        schemes=found_schemes,
        near={
            (index, mode): near_plans_of(plan, found_placements[index], mode)
            for (index, plan), mode in product(enumerate(plans), modes)
            if mode != "cpu"
        },
    )
    places = range(len(found_devices)), range(len(plans))
    of_grid = list(map(_simulated, product(*places, found_schemes, modes, prompts, lengths, found_policies, flights)))
    points = list(dict.fromkeys(of_grid))
    found: dict[_Point, GridRow] = {}
    with ExitStack() as stack:
        file = stack.enter_context(RowFile(Path(output))) if output is not None else None
        if file is not None:
            keys = {point: grid.key(point) for point in points}
            found = {point: grid.named(point, file.known[key]) for point, key in keys.items() if key in file.known}
        left = [point for point in points if point not in found]

        def keep(point: _Point, row: GridRow) -> None:
            found[point] = row
            if file is not None:
                file.write(keys[point], row)

        def finish(point: _Point, row: GridRow) -> None:
            keep(point, row)
            report("simulating", len(found), len(points))

        workers = min(workers or min(available_cores(), -(-len(left) // POINTS_OF_A_WORKER)), len(left))
        if not left:
            pass
        elif dask is not None:
            known = len(found)
            rows = run_on_dask(dask, _row, grid, left, lambda done: report("simulating", known + done, len(points)))
            for point, row in zip(left, rows, strict=True):
                keep(point, row)
        elif workers == 1:
            for point in left:
                finish(point, _row(grid, point))
        else:
            _run_on(workers, grid, left, finish)
    return Rows(found[point] for point in of_grid)


def placement_text(placement: Placement) -> str:
    """Return a placement as one line of text."""
    return ", ".join(f"{pattern}={device}" for pattern, device in placement.items())


def _simulated(point: _Point) -> _Point:
    """Return the equivalent point whose chunks in flight do not exceed the prompt's chunks."""
    *others, prompt_length, lengths, policy, chunks_in_flight = point
    chunks_in_flight = chunks_in_flight and min(chunks_in_flight, -(-prompt_length // lengths[-1]))
    return (*others, prompt_length, lengths, policy, chunks_in_flight)  # type: ignore[return-value]


def _run_on(workers: int, grid: _Grid, points: list[_Point], keep: Callable[[_Point, GridRow], None]) -> None:
    """Run on worker processes. These are spawned, because a fork would copy locks that threads of this process hold."""
    others = set(active_children())
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (grid,)) as pool:
        try:
            with _interrupts_held_back():
                futures = [pool.submit(_row_of_worker, point) for point in points]
            for point, future in zip(points, futures, strict=True):
                keep(point, future.result())
        except BrokenProcessPool as error:
            raise ConfigError(
                "a worker process of the experiment died; call it under `if __name__ == '__main__':` if it is called "
                "from a script, or with workers=1"
            ) from error
        except BaseException:
            for process in set(active_children()) - others:
                process.terminate()  # some processes may not have started yet
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Delay Ctrl-C until the block ends, so that no process that is being started is orphaned.

    Processes that are started within the block never receive the signal; their parent ends them.
    """
    before = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or before is None:  # no KeyboardInterrupt will be raised here
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


_worker_grid: _Grid
"""Grid of this worker process; it is set when the process starts."""


def _start_worker(grid: _Grid) -> None:
    global _worker_grid
    _worker_grid = grid
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the workers


def _row_of_worker(point: _Point) -> GridRow:
    return _row(_worker_grid, point)


def _row(grid: _Grid, point: _Point) -> GridRow:
    device, placement, scheme, attention, prompt_length, lengths, policy, chunks_in_flight = point
    simulation = simulate(
        grid.plans[placement],
        grid.devices[device],
        prompt_length=prompt_length,
        chunk_length=lengths[-1],
        graph_lengths=lengths,
        policy=grid.policies[policy],
        scheme=grid.schemes[scheme],
        near=grid.near.get((placement, attention), {}),
        chunks_in_flight=chunks_in_flight,
    )
    own = grid.labels(point) | {"graphs": graphs_text(simulation.graph_lengths), "origin": "predicted"}
    return GridRow(**own, **{f.name: getattr(simulation, f.name) for f in fields(GridRow) if f.name not in own})


def near_plans_of(plan: Plan, placement: Placement, attention: str) -> Mapping[int, Plan]:
    """Return plans with attention on the NPU by the last position at which a chunk may begin.

    Raises:
        ConfigError: the NPU cannot compute any attention of the plan.
    """
    options = attention_options(attention)
    return near_by_reach(plan, placement, options, plan.context_length)


def attention_options(attention: str) -> EngineOptions:
    """Return the engine's options of one entry of `attentions`. Raise ConfigError if the entry is unknown."""
    if attention == "cpu":
        return EngineOptions()
    if not (found := _ON_NPU.fullmatch(str(attention))):
        raise ConfigError(
            f"attentions: {attention!r}, expected 'cpu', 'npu', or 'npu:WINDOWS' as in 'npu:512,2048', also with sinks "
            "as in 'npu:512:sinks=4'"
        )
    windows, sinks = found["windows"], found["sinks"]
    return EngineOptions(
        npu="qnn",
        attention="npu",
        npu_window=windows or DEFAULT_NPU_WINDOW,
        npu_sinks=None if sinks is None else int(sinks),
    )


_ON_NPU = re.compile(r"npu(:(?P<windows>(?!sinks)[^:]*))?(:sinks=(?P<sinks>[0-9]{1,18}))?")
"""Form of attention on the NPU: "npu", with windows after a colon, and with the number of first tokens that stay in
sight when the longest window slides."""


def is_compiled(model: str | os.PathLike[str] | Shape) -> TypeGuard[str | os.PathLike[str]]:
    """Return True if a model is an engine directory."""
    return isinstance(model, str | os.PathLike) and is_engine_directory(Path(model))


def scheme_of(model: str | os.PathLike[str] | Shape, name: str, shadow: str | None) -> Scheme:
    """Return a scheme, with shadows if some are given. If an engine directory has this scheme, it has the directory's
    own shadows and bits of each layer.
    """
    if is_compiled(model) and shadow in (None, "none"):
        own = read_manifest(Path(model)).scheme
        if own.name == name:
            return own
    return with_shadow(name, shadow)


def with_shadow(name: str, shadow: str | None) -> Scheme:
    """Return a scheme, with shadows if some are given."""
    if shadow in (None, "none"):
        return known_scheme(name)
    if shadow == "auto":
        raise ConfigError("shadow is 'auto', which a search over weights decides; name the layers, or use 'all'")
    return choose_recipe(EngineOptions(npu="qnn", scheme=name, shadow=shadow), name).scheme


def plans_of(
    model: str | os.PathLike[str] | Shape,
    placements: Sequence[Placement],
    progress: Progress,
    scheme: Scheme = SCHEMES[DEFAULT_NPU_SCHEME],
) -> list[Plan]:
    """Return the plan of every placement. Arguments and errors are those of `experiment`; all schemes have the shadows
    of `scheme`. Attention that a placement puts on the NPU is on the CPU in these plans, and on the NPU in those of
    `near_plans_of`, as in an engine.
    """
    if is_compiled(model):
        placements = [placement or read_manifest(Path(model)).placement for placement in placements]
    found = _plans_of(model, placements, progress, scheme)
    return [with_attention_on_cpu(plan, each, scheme) for plan, each in zip(found, placements, strict=True)]


def places_attention(plan: Plan, placement: Placement) -> bool:
    """Return True if a placement puts attention or a short convolution on the NPU, so that an engine runs it there."""
    nodes = (node for subgraph in plan.subgraphs for node in subgraph.nodes if can_be_static(node))
    return any(placed_by_name(placement, node.name) == "npu" for node in nodes)


def with_attention_on_cpu(plan: Plan, placement: Placement, scheme: Scheme) -> Plan:
    """Return the plan for chunks beyond the NPU's windows, whose attention the CPU computes under every placement."""
    if not places_attention(plan, placement):
        return plan
    try:
        return plan_by_capability(plan, scheme, attention_options("npu"), placement)[0]
    except PartitionError:  # the NPU does not support another operator
        return plan


def _plans_of(
    model: str | os.PathLike[str] | Shape, placements: Sequence[Placement], progress: Progress, scheme: Scheme
) -> list[Plan]:
    if not isinstance(model, str | os.PathLike | Shape):
        raise ConfigError(f"model is {model!r:.80}, expected a name, a path or a shape")
    if isinstance(model, Shape) or (not is_engine_directory(Path(model)) and is_weightless(model)):
        return [plan_weightless(model, placement, scheme)[0] for placement in placements]
    name = os.fspath(model)
    if is_engine_directory(Path(name)):
        manifest = read_manifest(Path(name))
        is_shadowed = bool(scheme.shadowed) and scheme != manifest.scheme
        if is_shadowed or any(placement != manifest.placement for placement in placements):
            raise ConfigError(
                f"{name} is compiled, so its modules are placed already; give its checkpoint, or no placements and no "
                "shadow"
            )
        if not (ranks := manifest.ranks).are_alone:
            raise ConfigError(
                f"{name} is for {ranks}, and grids take complete decoders; run `chunkrt simulate {name} --ranks "
                f"{ranks.size} --link 1GbE`"
            )
        return [read_plan(Path(name))] * len(placements)
    try:
        checkpoint, _ = find_checkpoint(name, progress)
    except ConfigError as error:
        raise ConfigError(f"{error}; available shapes: {', '.join(shapes())}") from error
    from chunkrt.compile.compiler import plan_checkpoint  # other commands need no parts of the compiler

    planned = [plan_checkpoint(checkpoint, placement, scheme).plan for placement in placements]
    check_shadowed(planned[0], scheme)
    return planned


def _axis(name: str, values: Iterable[T]) -> list[T]:
    """Return one axis of the grid as a list."""
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise ConfigError(f"{name} is {values!r}, expected a list; put it in brackets")
    found = list(values)
    if not found:
        raise ConfigError(f"{name} is empty, expected at least one entry")
    return found


def _names(name: str, values: Iterable[str]) -> list[str]:
    """Return one axis of names as a list."""
    found = _axis(name, values)
    for value in found:
        if not isinstance(value, str):
            raise ConfigError(f"{name}: {value!r}, expected a name in quotes")
    return found


def _device(device: str | os.PathLike[str] | DeviceProfile | MeasuredProfile) -> DeviceProfile | MeasuredProfile:
    if isinstance(device, DeviceProfile | MeasuredProfile):
        return device
    if not isinstance(device, str | os.PathLike):
        raise ConfigError(f"devices: {device!r}, expected a profile, or a name or file in quotes")
    return find_device(device)


def _device_name(device: str | os.PathLike[str] | DeviceProfile | MeasuredProfile) -> str:
    """Return the name that the caller gave; for a profile its own name."""
    return os.fspath(device) if isinstance(device, str | os.PathLike) else getattr(device, "name", "")


def _graph_lengths(entry: Any, context: int) -> tuple[int, ...]:
    """Return the lengths of an entry of `chunk_lengths`, shortest first: a number, or numbers as text."""
    if not isinstance(entry, str):
        return (_whole("chunk_lengths", entry, context),)
    lengths = lengths_of(entry)
    if not lengths or lengths[-1] > context:
        raise ConfigError(
            f"chunk_lengths: {entry!r}, expected numbers of 1 to {context}, the model's context, with commas between"
        )
    return lengths


def _whole(name: str, value: Any, most: int | None = None, limit: str = ", the model's context") -> int:
    """Check and return an integer of at least 1, and at most `most` if that is given; `limit` explains it."""
    try:
        number = 0 if isinstance(value, bool) else index(value)
    except TypeError:
        number = 0
    if number < 1 or (most is not None and number > most):
        expected = "at least 1" if most is None else f"1 to {most}{limit}"
        raise ConfigError(f"{name}: {value!r}, expected a whole number of {expected}")
    return number
