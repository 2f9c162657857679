"""Options of an engine, each declared once."""

from __future__ import annotations

from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from chunkrt.backends import BACKENDS, PLUGINS
from chunkrt.backends.base import AttentionMath
from chunkrt.backends.qnn.options import HtpOptions
from chunkrt.backends.qnn.socs import find_soc
from chunkrt.backends.switches import Switches
from chunkrt.engine.declaration import Declaration, declared_option, is_number, is_whole
from chunkrt.errors import ConfigError, unknown_name
from chunkrt.graph.placement import Placement, check_placement
from chunkrt.quant.scheme import DEFAULT_BUDGETS, SCHEME_NAMES, find_scheme
from chunkrt.runtime.affinity import NO_AFFINITY, available_cores, check_affinity, find_cpus
from chunkrt.runtime.batcher import DEFAULT_BATCHER, batcher_names, find_batcher
from chunkrt.runtime.chunk_slots import check_chunks_in_flight
from chunkrt.runtime.lanes import DecodeOn
from chunkrt.runtime.policy import DEFAULT_POLICY, find_policy, policy_names
from chunkrt.runtime.state_tensors import CACHE_DTYPES, CacheDtype

NPU_CHOICES = ("auto", "qnn", *BACKENDS, "off")
DEFAULT_CHUNK_LENGTH = 32
"""Default chunk length with an NPU."""
CPU_CHUNK_LENGTH = 128
"""Default chunk length without an NPU: a processor reads weights once for all rows of a chunk, and pads none."""
MOST_THREADS = 256

DEFAULT_PREFIX_CACHE = "memory"
"""Default prefix cache without ranks."""

Outputs = Literal["grid", "float"]
OnNpuFailure = Literal["fallback", "fail"]
AttentionOn = Literal["auto", "cpu", "npu"]
KeptWeights = Literal["both", "npu-only"]
DEFAULT_NPU_WINDOW = "512"


def npu_choices() -> tuple[str, ...]:
    """Return the names of the backends that can serve as the NPU, including plug-ins."""
    return (*NPU_CHOICES, *PLUGINS.names)


def _check_npu(name: str) -> None:
    if PLUGINS.find(name) is None and name not in NPU_CHOICES:
        raise unknown_name("NPU choice", name, npu_choices())


def _check_threads(number: int) -> None:
    if number > MOST_THREADS:
        raise ConfigError(f"threads is {number}, expected at most {MOST_THREADS}")


MOST_DIGITS = 18
"""Longest number that an option takes, well within Python's own limit for text."""


def _windows(value: object) -> tuple[int, ...]:
    """Parse whole numbers separated by commas, each once and sorted; empty if the value is anything else."""
    parts = value.split(",") if isinstance(value, str) else [str(value)] if is_whole(value) else []
    numbers = {int(part) for part in parts if part.strip().isdecimal() and len(part) <= MOST_DIGITS}
    return tuple(sorted(numbers)) if len(parts) == len(numbers) and 0 not in numbers else ()


def _graph_layers(value: object) -> int | None:
    """Parse a number of layers: None for "all", 0 for anything except "all" and layers=N."""
    if not isinstance(value, str):
        return 0
    number = value.removeprefix("layers=")
    is_number = number.isdecimal() and len(number) <= MOST_DIGITS and number != value
    return None if value == "all" else int(number) if is_number else 0


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs a model.

    Where they are declared they say what they are, in the words of `--help`. Beyond that:

    scheme: by default what an engine directory was compiled with, else the catalogue's or "w8a8-dynamic"; "w8a16" on
        an NPU that does not have those.
    shadow: "mixed" chooses by itself. A list is patterns of weight names with commas between.
    cache_memory: bytes; a session counts with all that is reserved for it.
    prefix_cache: several processes may share a folder. With ranks only "off" is possible.
    prefix_cache_memory, prefix_cache_disk: bytes.
    chunk_length: of several lengths that an engine directory was compiled for 32, or else the longest.
    chunks_in_flight: 1 to 256, each with buffers of its own; as many as help, and fit into 64 MiB.
    threads: for workers and kernel threads together.
    placement: devices by patterns of module paths, or a file of them; see `graph/placement.py`.
    soc: in emulation by default what an engine directory was compiled for.
    context_shift: keys are then cached before RoPE, which costs time at every use.
    context_keep: 0 to the context length less 2.
    """

    npu: str = declared_option(
        "--npu",
        "Who plays the NPU. auto: a Hexagon NPU if there is one, else native; qnn: that NPU, or its emulator; "
        "off: no partition, all on the CPU; or a plug-in.",
        default="auto",
        choices=npu_choices,
        check=_check_npu,
    )
    scheme: str | None = declared_option(
        "--scheme", "Quantisation.  [default: the model's]", choices=lambda: SCHEME_NAMES, check=find_scheme
    )
    calibration: Path | None = declared_option(
        "--calibration",
        "What `chunkrt calibrate` wrote.  [default: made]",
        must=(lambda value: isinstance(value, Path), "a pathlib.Path"),
    )
    shadow: str | None = declared_option(
        "--shadow none|all|auto|LIST",
        "8-bit linears whose largest inputs are computed in float beside them; auto: the fewest within --budget.  "
        "[default: none]",
    )
    budget: float | None = declared_option(
        "--budget kl=NATS",
        "Mean KL divergence from the float model allowed to --shadow auto and --scheme mixed.  "
        f"[default: kl={DEFAULT_BUDGETS['shadow']} and kl={DEFAULT_BUDGETS['mixed']}]",
        must=(lambda value: is_number(value) and value > 0, "a number of nats above 0"),
    )
    outputs: Outputs | None = declared_option(
        "--outputs",
        "Of static linears: rounded to a grid, as an NPU does, or float.  "
        "[default: float for w8a8 on a CPU, else grid]",
        choices=lambda: get_args(Outputs),
        noun="kind of outputs",
    )
    equalisation: float | Literal["off"] | None = declared_option(
        "--equalise 0..1|off",
        "Unevenness of activations that static schemes move into the weights.  [default: the scheme's]",
        must=(
            lambda value: (isinstance(value, str) and value == "off") or (is_number(value) and 0 <= value <= 1),
            "0 to 1, or 'off'",
        ),
    )
    rotation: bool = declared_option(
        "--rotate/--no-rotate", "Rotate the residual stream before a static scheme quantises.", default=False
    )
    ops: tuple[str, ...] | str | None = declared_option(
        "--ops all|none|+NAME|-NAME",
        "Operators in the form of their backend or a plug-in, the others in the reference's; several with commas "
        "or repeated. `chunkrt ops` lists them.  [default: all; none for --npu reference]",
        check=Switches.parse,
    )
    chunk_length: int | None = declared_option(
        "--chunk", "Tokens of a chunk.  [default: as compiled, else 32 with an NPU, 128 without]"
    )
    policy: str = declared_option(
        "--policy", "Order of tasks.", default=DEFAULT_POLICY, choices=policy_names, check=find_policy
    )
    batcher: str = declared_option(
        "--batcher",
        "Which rows share a chunk when several sequences wait.",
        default=DEFAULT_BATCHER,
        choices=batcher_names,
        check=find_batcher,
    )
    decode_on: DecodeOn = declared_option(
        "--decode-on",
        "Where single tokens run, beside an NPU; auto: a lone one on the CPU, those of several sequences where they "
        "are expected to take less time.",
        default="cpu",
        choices=lambda: get_args(DecodeOn),
        noun="place to decode on",
    )
    cache_memory: int | None = declared_option(
        "--cache-memory SIZE",
        "What the caches of all sessions may take together, such as 2GB or 512MiB.  [default: no limit]",
    )
    queue: int = declared_option(
        "--queue", "Sequences that may wait for room in --cache-memory before further ones are refused.", default=64
    )
    prefix_cache: str | Path | None = declared_option(
        "--prefix-cache memory|disk|off|FOLDER",
        "Where to keep what was computed of prompts, for those that begin alike; disk: a folder in chunkrt's own, with "
        "memory before it.  [default: memory; off with ranks]",
        must=(
            lambda value: isinstance(value, str | Path) and bool(str(value).strip()),
            "memory, disk, off or a folder",
        ),
    )
    prefix_cache_memory: int | None = declared_option(
        "--prefix-cache-memory SIZE",
        "What it may take in memory.  [default: an eighth of what is free, at most 2GiB]",
    )
    prefix_cache_disk: int | None = declared_option(
        "--prefix-cache-disk SIZE", "What its folder may take, files of all models together.  [default: 8GiB]"
    )
    chunks_in_flight: int | None = declared_option(
        "--in-flight", "Chunks under way at once.  [default: as many as help]", check=check_chunks_in_flight
    )
    threads: int | None = declared_option(
        "--threads", "Thread budget.  [default: the cores, or those of --affinity]", check=_check_threads
    )
    affinity: str = declared_option(
        "--affinity none|big|LIST",
        "CPUs to run on: big for the fast cores, or a list such as 0,2,4-7. On Linux.",
        default=NO_AFFINITY,
        check=check_affinity,
    )
    context_length: int | None = declared_option("--context", "Positions to hold.  [default: the model's]")
    placement: Path | Placement | None = declared_option(
        "--place",
        "TOML file that places modules.",
        check=lambda value: isinstance(value, Path) or check_placement(value, "placement"),
    )
    npu_strict: bool = declared_option(
        "--npu-strict/--no-npu-strict",
        "Refuse a model of which the NPU cannot compile a part.  [default: that part goes to the CPU]",
        default=False,
    )
    attention: AttentionOn = declared_option(
        "--attention",
        "Where attention runs beside an NPU, as long as no more than --npu-window tokens come before a chunk; auto: "
        "where --place puts it, else on the CPU.",
        default="auto",
        choices=lambda: get_args(AttentionOn),
        noun="place of attention",
    )
    attention_math: AttentionMath = declared_option(
        "--attention-math",
        "What attention on the CPU multiplies in; bfloat16, on native alone, is meant for processors with tiles of it "
        "(AMX), and rounds more.",
        default="float32",
        choices=lambda: get_args(AttentionMath),
        noun="arithmetic of attention",
    )
    npu_window: str | int = declared_option(
        "--npu-window TOKENS[,TOKENS...]",
        "Tokens before a chunk that attention on the NPU sees: a graph each.",
        default=DEFAULT_NPU_WINDOW,
        must=(
            lambda value: bool(_windows(value)),
            "numbers of tokens, at least 1, with commas between, as in 512,2048",
        ),
    )
    npu_graph: str = declared_option(
        "--npu-graph all|layers=N",
        "Layers with attention on the NPU that make one graph; all: as many as there are, up to 1 GiB of weights.",
        default="all",
        must=(lambda value: _graph_layers(value) != 0, "'all' or layers=N with N at least 1"),
    )
    weights: KeptWeights = declared_option(
        "--weights",
        "Who keeps the weights of what the NPU computes; npu-only: no CPU does, so decoding runs on the NPU too, and "
        "nobody takes over when it fails.",
        default="both",
        choices=lambda: get_args(KeptWeights),
        noun="choice of weights",
    )
    soc: str | None = declared_option(
        "--soc", "The SoC whose NPU is used or emulated.  [default: this one, or SM8650]", check=find_soc
    )
    on_npu_failure: OnNpuFailure | None = declared_option(
        "--on-npu-failure",
        "Go on on the CPU, or fail.  [default: fallback for auto, else fail]",
        choices=lambda: get_args(OnNpuFailure),
        noun="answer to an NPU's failure",
    )
    htp: HtpOptions = declared_option(
        "--htp NAME=VALUE",
        "A setting of the NPU, such as performance_mode, vtcm_mb, context_priority, profiling_level; see docs/npu.md.",
        default=HtpOptions(),
    )
    context_shift: bool = declared_option(
        "--context-shift/--no-context-shift",
        "When the context is full, drop the older half of its tokens and go on.  [default: end there]",
        default=False,
    )
    context_keep: int = declared_option(
        "--keep",
        "First tokens that --context-shift never drops.",
        default=4,
        must=(lambda value: is_whole(value) and value >= 0, "a whole number, 0 or more"),
    )
    cache_dtype: CacheDtype | None = declared_option(
        "--cache-type",
        "Of keys and values: f32, f16, q8_0 or bf16; int8, which is q8_0, on native alone, has a scale for each 32 "
        "of a head's values; bfloat16 is for --attention-math bfloat16, and its default.  "
        "[default: float16 on native, else float32]",
        choices=lambda: CACHE_DTYPES,
        noun="type of the cache",
    )

    def __post_init__(self) -> None:
        for name, (kind, default, declared) in DECLARED.items():
            value = getattr(self, name)
            if value is not None or default is not None:
                declared.require(name, kind, value)
        if self.npu == "off" and self.placement is not None:
            raise ConfigError("a placement and npu 'off' contradict each other; give one of them")
        if self.cache_dtype == "int8" and self.npu in BACKENDS and self.npu != "native":
            raise ConfigError(f"npu {self.npu!r} has no caches of int8; choose float32 or float16, or another npu")
        if self.cache_dtype == "bfloat16":
            if self.attention_math != "bfloat16":
                raise ConfigError(
                    "caches of bfloat16 are for attention in bfloat16; choose attention_math 'bfloat16' too"
                )
            if self.context_shift:
                raise ConfigError("caches of bfloat16 do not shift; choose float16, or leave context_shift away")
        if self.attention_math == "bfloat16" and self.npu in BACKENDS and self.npu != "native":
            raise ConfigError(f"npu {self.npu!r} has no attention in bfloat16; choose float32, or another npu")

        self._check_npu_only()
        if self.attention == "npu":
            if self.npu not in ("auto", "qnn"):
                raise ConfigError(f"attention 'npu' and npu {self.npu!r} contradict each other; try npu 'qnn'")
            if self.context_shift:
                raise ConfigError("the NPU cannot attend to keys of a context that shifts; choose attention 'cpu'")

    def _check_npu_only(self) -> None:
        if self.weights == "npu-only":
            if self.npu not in ("auto", "qnn"):
                raise ConfigError(f"weights 'npu-only' and npu {self.npu!r} contradict each other; try npu 'qnn'")
            if self.on_npu_failure == "fallback":
                raise ConfigError("with weights 'npu-only' nobody takes over from the NPU; leave on_npu_failure away")

    @property
    def npu_windows(self) -> tuple[int, ...]:
        """Windows of `npu_window`, shortest first."""
        return _windows(self.npu_window)

    @property
    def graph_layers(self) -> int | None:
        """Largest number of layers of a graph; None for all."""
        return _graph_layers(self.npu_graph)

    @property
    def decodes_on(self) -> DecodeOn:
        """Processor of single tokens."""
        return "npu" if self.weights == "npu-only" else self.decode_on

    @property
    def num_threads(self) -> int:
        """Number of threads. Raises ConfigError like `find_cpus`."""
        return self.threads or available_cores(find_cpus(self.affinity))

    @property
    def falls_back(self) -> bool:
        """True if the CPU takes over when the NPU fails."""
        default = "fallback" if self.npu == "auto" and self.weights == "both" else "fail"
        return (self.on_npu_failure or default) == "fallback"


def _kind(option: Field[Any]) -> str:
    return "str" if option.metadata["option"].noun else str(option.type).split(" | ")[0]


DECLARED: dict[str, tuple[str, Any, Declaration]] = {
    option.name: (_kind(option), option.default, option.metadata["option"]) for option in fields(EngineOptions)
}
"""Options by name: the first type of the annotation, the default, and the declaration."""
