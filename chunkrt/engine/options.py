"""Options of an engine. Each option is declared once."""

from __future__ import annotations

import os
import re
import textwrap
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_args

from chunkrt.backends import BACKENDS, PLUGINS
from chunkrt.backends.base import AttentionMath
from chunkrt.backends.qnn.htp_options import HtpOptions
from chunkrt.backends.qnn.socs import find_soc
from chunkrt.backends.switches import Switches
from chunkrt.engine.declaration import (
    Declaration,
    Need,
    declared_option,
    is_number,
    is_whole,
    number_flag,
    path,
    size,
    word_or_path,
)
from chunkrt.errors import ConfigError, unknown_name
from chunkrt.graph.placement import LAYERS, Placed, Placement, check_placement, layers_placement
from chunkrt.quant.scheme import DEFAULT_BUDGETS, SCHEME_NAMES, Rounding, find_scheme
from chunkrt.runtime.affinity import NO_AFFINITY, available_cores, check_affinity, find_cpus
from chunkrt.runtime.batcher import DEFAULT_BATCHER, Batcher, batcher_names, find_batcher
from chunkrt.runtime.chunk_slots import check_chunks_in_flight
from chunkrt.runtime.executor import DecodeOn
from chunkrt.runtime.policy import DEFAULT_POLICY, Policy, find_policy, policy_names
from chunkrt.runtime.state_tensors import CACHE_DTYPES, CacheDtype

NPU_CHOICES = ("auto", "qnn", *BACKENDS, "off")
DEFAULT_CHUNK_LENGTH = 32
"""Default chunk length with an NPU."""
CPU_CHUNK_LENGTH = 128
"""Default chunk length without an NPU. A CPU reads weights once for all rows of a chunk, and pads no rows."""
MOST_THREADS = 256

MOST_SECONDS = 86_400
"""Longest time limit, a day."""

DEFAULT_PREFIX_CACHE = "memory"
"""Default prefix cache without ranks."""

Outputs = Literal["grid", "float"]
OnNpuFailure = Literal["fallback", "fail"]
AttentionOn = Literal["auto", "cpu", "npu"]
AttentionMathChoice = Literal["auto", AttentionMath]
KeptWeights = Literal["both", "npu-only"]
DEFAULT_NPU_WINDOW = "512"


_NAME_OR_OBJECT = (lambda value: isinstance(value, str) or hasattr(value, "name"), "a name, or an object with a name")
"""Allowed values of options that name a plug-in or hold an object of its kind."""


def npu_choices() -> tuple[str, ...]:
    """Return the names of the backends that can serve as the NPU, including plug-ins."""
    return (*NPU_CHOICES, *PLUGINS.names)


def _check_npu(name: str) -> None:
    if PLUGINS.find(name) is None and name not in NPU_CHOICES:
        raise unknown_name("NPU choice", name, npu_choices())


def _check_threads(number: int) -> None:
    if number > MOST_THREADS:
        raise ConfigError(f"`threads` is {number}, expected at most {MOST_THREADS}")


MOST_DIGITS = 18
"""Longest number that an option takes, well within Python's own limit for text."""


def _placement(name: str, value: Any) -> Any:
    """Return a list of layers and a module tree as a placement, a path as a Path, and other values unchanged."""
    if isinstance(value, str | os.PathLike):
        is_list = os.fspath(value).startswith(LAYERS)
        return layers_placement(os.fspath(value)) if is_list else path(name, value)
    return check_placement(value, name)


def lengths_of(value: object) -> tuple[int, ...]:
    """Parse different positive whole numbers separated by commas, and return them sorted. Return an empty tuple if the
    value has another form.
    """
    parts = value.split(",") if isinstance(value, str) else [str(value)] if is_whole(value) else []
    numbers = {int(part) for part in parts if part.strip().isdecimal() and len(part) <= MOST_DIGITS}
    return tuple(sorted(numbers)) if len(parts) == len(numbers) and 0 not in numbers else ()


def _graph_layers(value: object) -> int | None:
    """Parse a number of layers. Return None for "all", N for "layers=N", and 0 for any other value."""
    if not isinstance(value, str):
        return 0
    number = value.removeprefix("layers=")
    is_number = number.isdecimal() and len(number) <= MOST_DIGITS and number != value
    return None if value == "all" else int(number) if is_number else 0


_CACHE_TYPES = {"f32": "float32", "f16": "float16", "q8_0": "int8", "bf16": "bfloat16"}
"""Names of llama.cpp for types of the cache, on the command line."""

_NPU: Need = (lambda options: options.get("npu") not in ("off", *BACKENDS), "an NPU (--npu is {npu})")
_NPU_ATTENTION: Need = (
    lambda options: options.get("attention") == "npu" or options.get("placement") is not None,
    "--attention npu",
)


class LoadOptions(TypedDict, total=False):
    """The fields of `EngineOptions` as keyword arguments, with all types that they take."""

    npu: str
    scheme: str | None
    calibration: str | os.PathLike[str] | None
    adapter: str | os.PathLike[str] | None
    adapters: bool
    shadow: str | None
    budget: float | None
    outputs: Outputs | None
    equalisation: float | Literal["off"] | None
    rotation: bool | None
    rounding: Rounding | None
    ops: tuple[str, ...] | str | None
    chunk_length: str | int | None
    policy: str | Policy
    batcher: str | Batcher
    decode_on: DecodeOn
    cache_memory: int | str | None
    prefix_cache: str | os.PathLike[str] | None
    prefix_cache_memory: int | str | None
    prefix_cache_disk: int | str | None
    queue: int
    chunks_in_flight: int | None
    threads: int | None
    affinity: str
    context_length: int | None
    placement: str | os.PathLike[str] | Placement | Placed | None
    npu_strict: bool
    attention: AttentionOn
    attention_math: AttentionMathChoice
    npu_window: str | int
    npu_graph: str
    npu_sinks: int | None
    weights: KeptWeights
    soc: str | None
    on_npu_failure: OnNpuFailure | None
    npu_timeout: float | None
    recompile: bool
    htp: HtpOptions
    context_shift: bool
    context_keep: int
    cache_dtype: CacheDtype | None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine.

    Sizes are numbers of bytes, or text such as "2GB" or "512MiB". Paths are text or path objects. The budget is in
    nats.

    Raises:
        ConfigError: a value is not allowed, or two values contradict each other.
    """

    npu: str = declared_option(
        "--npu",
        "Backend for the NPU's part of the model. auto: a Hexagon NPU if one is found, else native; qnn: the Hexagon "
        "NPU or its emulator; native, onnxrt, reference: CPU backends; off: run everything on the CPU, without a "
        "partition. The name of a plug-in is also accepted.",
        group="Devices",
        default="auto",
        choices=npu_choices,
        check=_check_npu,
        is_planned=True,
    )
    scheme: str | None = declared_option(
        "--scheme",
        "Quantisation of weights and activations (docs/quantisation.md).  [default: the engine directory's, else the "
        "model's]",
        group="Quantisation",
        choices=lambda: SCHEME_NAMES,
        check=find_scheme,
        is_planned=True,
    )
    calibration: Path | None = declared_option(
        "--calibration",
        "Calibration file from `chunkrt calibrate`.  [default: calibrate when needed]",
        group="Quantisation",
        must=(lambda value: isinstance(value, Path), "a path"),
        is_planned=True,
        reads=path,
    )
    adapter: Path | None = declared_option(
        "--adapter",
        "LoRA adapter to add to the weights before they are quantised: a folder of PEFT, or a GGUF file "
        "(docs/models.md).",
        group="Model",
        must=(lambda value: isinstance(value, Path), "a path"),
        is_planned=True,
        reads=path,
        aliases=("--lora",),
    )
    adapters: bool = declared_option(
        "--adapters/--no-adapters",
        "Prepare the model for LoRA adapters that sessions and requests choose at run time, on the CPU.",
        group="Model",
        default=False,
        is_planned=True,
    )
    shadow: str | None = declared_option(
        "--shadow none|all|auto|LIST",
        "8-bit linear layers whose outlier activations are computed in float on the CPU; LIST: patterns of weight "
        "names, separated by commas; auto: as few layers as --budget needs.  [default: none]",
        group="Quantisation",
        is_planned=True,
    )
    budget: float | None = declared_option(
        "--budget kl=NATS",
        "Mean KL divergence from the float model that a search may cause.  "
        f"[default: kl={DEFAULT_BUDGETS['shadow']} for --shadow auto, "
        f"kl={DEFAULT_BUDGETS['mixed']} for --scheme mixed]",
        group="Quantisation",
        must=(lambda value: is_number(value) and value > 0, "a number of nats above 0"),
        is_planned=True,
        reads_flag=number_flag("--budget", "kl=NATS, as in kl=0.01", prefix="kl="),
    )
    outputs: Outputs | None = declared_option(
        "--outputs",
        "Outputs of static linear layers: quantised (grid), as on an NPU, or float.  [default: float for w8a8 on a "
        "CPU, else grid]",
        group="Quantisation",
        choices=lambda: get_args(Outputs),
        noun="kind of outputs",
        is_planned=True,
    )
    equalisation: float | Literal["off"] | None = declared_option(
        "--equalise 0..1|off",
        "Degree to which static schemes move outliers of activations into the weights; 0: not at all, 1: all.  "
        "[default: the scheme's]",
        group="Quantisation",
        must=(
            lambda value: (isinstance(value, str) and value == "off") or (is_number(value) and 0 <= value <= 1),
            "0 to 1, or 'off'",
        ),
        is_planned=True,
        reads_flag=number_flag("--equalise", "0 to 1, or off", word="off"),
    )
    rotation: bool | None = declared_option(
        "--rotate/--no-rotate",
        "Rotate the residual stream before a static scheme quantises it.  [default: under w4a16, if the decoder "
        "permits it]",
        group="Quantisation",
        is_planned=True,
    )
    rounding: Rounding | None = declared_option(
        "--rounding",
        "Rounding of weights to 4 bits: nearest, or gptq, which corrects errors by later weights and takes minutes.  "
        "[default: gptq]",
        group="Quantisation",
        choices=lambda: get_args(Rounding),
        noun="rounding",
        is_planned=True,
    )
    ops: tuple[str, ...] | str | None = declared_option(
        "--ops all|none|+NAME|-NAME|NAME=FORM",
        "Forms of operators: +NAME runs an operator in the form of a plug-in or of its backend, -NAME in the "
        "reference, NAME=FORM in the named form. A pattern of modules may precede the name: model.layers.0.NAME. "
        "Separate several by commas or repeat the option; `chunkrt ops` lists them.  [default: all; none for --npu "
        "reference]",
        group="Devices",
        check=Switches.parse,
        is_planned=True,
        reads_flag=lambda given: given or None,
        is_repeatable=True,
    )
    chunk_length: str | int | None = declared_option(
        "--chunk TOKENS[,TOKENS...]",
        "Tokens per chunk. Of several lengths, as in 1,8,32, the longest is that of chunks; the NPU runs fewer rows "
        "with the smallest graph that holds them.  [default: 32 with an NPU, else 128; for an engine directory 32 if "
        "it was compiled, else the longest compiled length, with the graphs of all shorter ones]",
        group="Execution",
        must=(
            lambda value: bool(lengths_of(value)),
            "numbers of tokens, at least 1, with commas between, as in 1,8,32",
        ),
        is_planned=True,
    )
    policy: str | Policy = declared_option(
        "--policy",
        "Scheduling policy, which selects the next task.",
        group="Execution",
        default=DEFAULT_POLICY,
        choices=policy_names,
        must=_NAME_OR_OBJECT,
        check=find_policy,
    )
    batcher: str | Batcher = declared_option(
        "--batcher",
        "Rule for putting rows of several sequences into a chunk.",
        group="Execution",
        default=DEFAULT_BATCHER,
        choices=batcher_names,
        must=_NAME_OR_OBJECT,
        check=find_batcher,
    )
    decode_on: DecodeOn = declared_option(
        "--decode-on",
        "Processor for decoding when an NPU is present. auto: the CPU for a single sequence; for several, the one "
        "that is predicted to be faster.",
        group="Execution",
        default="cpu",
        choices=lambda: get_args(DecodeOn),
        noun="place to decode on",
        needs=(_NPU, (lambda options: options.get("weights") != "npu-only", "--weights both")),
    )
    cache_memory: int | None = declared_option(
        "--cache-memory SIZE",
        "Memory limit for the KV caches of all sessions, e.g. 2GB or 512MiB. Each session counts with all the memory "
        "reserved for it.  [default: no limit]",
        group="Context and memory",
        reads=size,
    )
    queue: int = declared_option(
        "--queue",
        "Maximum number of sequences that wait for cache memory; further ones are refused.",
        group="Execution",
        default=64,
        needs=((lambda options: options.get("cache_memory") is not None, "--cache-memory"),),
    )
    prefix_cache: str | Path | None = declared_option(
        "--prefix-cache memory|disk|off|FOLDER",
        "Storage of computed prompt prefixes, for reuse by later prompts. disk: chunkrt's own folder, cached in "
        "memory; several processes may share a folder.  [default: memory; off with ranks, and in `chunkrt run` with "
        "one prompt]",
        group="Context and memory",
        must=(
            lambda value: isinstance(value, str | Path) and bool(str(value).strip()),
            "memory, disk, off or a folder",
        ),
        reads=word_or_path,
    )
    prefix_cache_memory: int | None = declared_option(
        "--prefix-cache-memory SIZE",
        "Memory limit of the prefix cache.  [default: an eighth of the free memory, at most 2GiB]",
        group="Context and memory",
        reads=size,
        needs=((lambda options: options.get("prefix_cache") != "off", "a prefix cache (--prefix-cache is off)"),),
    )
    prefix_cache_disk: int | None = declared_option(
        "--prefix-cache-disk SIZE",
        "Disk limit of the prefix cache's folder, for all models together.  [default: 8GiB]",
        group="Context and memory",
        reads=size,
        needs=(
            (
                lambda options: options.get("prefix_cache") not in (None, "memory", "off"),
                "--prefix-cache disk, or a folder",
            ),
        ),
    )
    chunks_in_flight: int | None = declared_option(
        "--in-flight",
        "Number of chunks in flight, 1 to 256, each with separate buffers.  [default: as many as improve speed, "
        "within 64 MiB of buffers]",
        group="Execution",
        check=check_chunks_in_flight,
    )
    threads: int | None = declared_option(
        "--threads",
        "Number of threads, for workers and kernels together.  [default: the number of cores, or of CPUs in "
        "--affinity]",
        group="Execution",
        check=_check_threads,
        aliases=("-t",),
    )
    affinity: str = declared_option(
        "--affinity none|big|LIST",
        "CPUs to run on (Linux): big selects the fast cores; LIST is e.g. 0,2,4-7.",
        group="Execution",
        default=NO_AFFINITY,
        check=check_affinity,
    )
    context_length: int | None = declared_option(
        "--context",
        "Context length in tokens.  [default: the model's]",
        group="Context and memory",
        is_planned=True,
        aliases=("-c", "--ctx-size"),
    )
    placement: Path | Placement | None = declared_option(
        "--place",
        "TOML file that assigns modules to devices; or layers=N,N,... to put only these decoder layers on the NPU.",
        group="Devices",
        check=lambda value: isinstance(value, Path) or check_placement(value, "placement"),
        is_planned=True,
        reads=_placement,
    )
    npu_strict: bool = declared_option(
        "--npu-strict/--no-npu-strict",
        "Refuse a model with parts that the NPU cannot compile.  [default: run these parts on the CPU]",
        group="Devices",
        default=False,
        is_planned=True,
        needs=(_NPU,),
    )
    attention: AttentionOn = declared_option(
        "--attention",
        "Processor for attention when an NPU is present. npu: the NPU, for chunks with at most --npu-window tokens "
        "before them; auto: the CPU, unless a placement assigns attention to the NPU.",
        group="Devices",
        default="auto",
        choices=lambda: get_args(AttentionOn),
        noun="place of attention",
        is_planned=True,
        needs=(_NPU,),
    )
    attention_math: AttentionMathChoice = declared_option(
        "--attention-math",
        "Arithmetic of attention on the CPU. bfloat16 (native only) is less precise, and faster on processors with "
        "fast products of bfloat16; int8 computes the scores from int8 integers, for long prompts. auto: the fastest "
        "one on this processor that is as close to float; `chunkrt doctor` shows it (docs/quantisation.md).",
        group="Execution",
        default="auto",
        choices=lambda: ("auto", *get_args(AttentionMath)),
        noun="arithmetic of attention",
    )
    npu_window: str | int = declared_option(
        "--npu-window TOKENS[,TOKENS...]",
        "Context lengths for which attention on the NPU is compiled, with one graph for each.",
        group="Devices",
        default=DEFAULT_NPU_WINDOW,
        must=(
            lambda value: bool(lengths_of(value)),
            "numbers of tokens, at least 1, with commas between, as in 512,2048",
        ),
        is_planned=True,
        needs=(_NPU, _NPU_ATTENTION),
    )
    npu_graph: str = declared_option(
        "--npu-graph all|layers=N",
        "Layers per NPU graph when attention runs on the NPU. all: as many as possible, up to 1 GiB of weights.",
        group="Devices",
        default="all",
        must=(lambda value: _graph_layers(value) != 0, "'all' or layers=N with N at least 1"),
        is_planned=True,
        needs=(_NPU, _NPU_ATTENTION),
    )
    npu_sinks: int | None = declared_option(
        "--npu-sinks",
        "When the history exceeds the longest --npu-window of W tokens, attention on the NPU sees this number of first "
        "tokens and the last ones up to W. An approximation, which needs --decode-on npu.  [default: the CPU attends "
        "to longer histories]",
        group="Devices",
        must=(lambda value: is_whole(value) and value >= 0, "a whole number, 0 or more"),
        is_planned=True,
        needs=(_NPU, _NPU_ATTENTION),
    )
    weights: KeptWeights = declared_option(
        "--weights",
        "Processors that keep the weights of NPU subgraphs. npu-only: the CPU keeps no copy, so decoding runs on the "
        "NPU, and the CPU cannot take over.",
        group="Devices",
        default="both",
        choices=lambda: get_args(KeptWeights),
        noun="choice of weights",
        needs=(_NPU,),
    )
    soc: str | None = declared_option(
        "--soc",
        "SoC whose NPU is used or emulated.  [default: this machine's, else the one compiled for, else SM8650]",
        group="Devices",
        check=find_soc,
        is_planned=True,
        needs=(_NPU,),
    )
    on_npu_failure: OnNpuFailure | None = declared_option(
        "--on-npu-failure",
        "Action if the NPU fails: continue on the CPU, or fail.  [default: fallback for auto, else fail]",
        group="Devices",
        choices=lambda: get_args(OnNpuFailure),
        noun="answer to an NPU's failure",
        needs=(_NPU,),
    )
    npu_timeout: float | None = declared_option(
        "--npu-timeout SECONDS",
        "Time limit of one call to the NPU, after which the NPU counts as failed.  [default: 10; 600 in emulation]",
        group="Devices",
        must=(lambda value: is_number(value) and 0 < value <= MOST_SECONDS, f"seconds above 0, at most {MOST_SECONDS}"),
        reads_flag=number_flag("--npu-timeout", "a number of seconds"),
        needs=(_NPU,),
    )
    recompile: bool = declared_option(
        "--recompile/--no-recompile",
        "Compile contexts that an engine directory lacks, e.g. for another SoC, chunk length or version of "
        "onnxruntime-qnn.  [default: refuse to run]",
        group="Devices",
        default=False,
        needs=(_NPU,),
    )
    htp: HtpOptions = declared_option(
        "--htp NAME=VALUE",
        "Setting of the NPU, e.g. performance_mode, vtcm_mb, context_priority or profiling_level (docs/npu.md).",
        group="Devices",
        default=HtpOptions(),
        is_planned=True,
        reads_flag=HtpOptions.parse,
        is_repeatable=True,
        needs=(_NPU,),
    )
    context_shift: bool = declared_option(
        "--context-shift/--no-context-shift",
        "When the context is full, drop the older half of its tokens and continue. Keys are then cached before RoPE, "
        "which costs time.  [default: stop]",
        group="Context and memory",
        default=False,
    )
    context_keep: int = declared_option(
        "--keep",
        "Number of first tokens that --context-shift never drops.",
        group="Context and memory",
        default=4,
        must=(lambda value: is_whole(value) and value >= 0, "a whole number, 0 or more"),
        needs=((lambda options: bool(options.get("context_shift")), "--context-shift"),),
    )
    cache_dtype: CacheDtype | None = declared_option(
        "--cache-type",
        "Data type of the KV cache: float32, float16, int8 or bfloat16; on the command line also f32, f16, q8_0 or "
        "bf16. int8 (native, and attention on an NPU) has one scale per 32 values. bfloat16 needs --attention-math "
        "bfloat16 or int8, where it is the default.  [default: float16 on native, else float32]",
        group="Context and memory",
        choices=lambda: CACHE_DTYPES,
        noun="type of the cache",
        is_planned=True,
        reads_flag=lambda text: _CACHE_TYPES.get(text, text),
        aliases=("-ctk", "--cache-type-k"),
    )

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[LoadOptions]) -> None: ...

    def __post_init__(self) -> None:
        for name, (kind, default, declared) in DECLARED.items():
            value = getattr(self, name)
            if value is not None and declared.reads is not None:
                value = declared.reads(name, value)
                object.__setattr__(self, name, value)
            if value is not None or default is not None:
                declared.require(name, kind, value)
        if self.npu == "off" and self.placement is not None:
            raise ConfigError("`placement` and `npu='off'` contradict each other; give one of them")
        if self.cache_dtype == "int8" and self.npu in BACKENDS and self.npu != "native":
            raise ConfigError(
                f"`npu={self.npu!r}` does not support `cache_dtype='int8'`; use float32, float16, or another `npu`"
            )
        if self.cache_dtype == "bfloat16":
            if self.attention_math not in ("bfloat16", "int8"):
                raise ConfigError("`cache_dtype='bfloat16'` needs an `attention_math` of bfloat16 or int8")
            if self.context_shift:
                raise ConfigError("bfloat16 caches cannot shift; choose float16, or omit `context_shift`")
        if self.attention_math == "int8":
            if self.cache_dtype not in (None, "bfloat16"):
                raise ConfigError(
                    f"`attention_math='int8'` needs bfloat16 caches; omit `cache_dtype={self.cache_dtype!r}`"
                )
            if self.context_shift:
                raise ConfigError("caches of `attention_math='int8'` cannot shift; omit `context_shift`")
        if self.attention_math in ("bfloat16", "int8") and self.npu in BACKENDS and self.npu != "native":
            raise ConfigError(
                f"`npu={self.npu!r}` does not support `attention_math={self.attention_math!r}`; use float32, or "
                "another `npu`"
            )

        self._check_npu_only()
        if self.npu_sinks is not None and self.npu_sinks >= self.npu_windows[-1]:
            raise ConfigError(
                f"`npu_sinks` is {self.npu_sinks}, but must be smaller than the longest `npu_window`, "
                f"{self.npu_windows[-1]}"
            )
        if self.attention == "npu":
            if self.npu not in ("auto", "qnn"):
                raise ConfigError(f"`attention='npu'` and `npu={self.npu!r}` contradict each other; try `npu='qnn'`")
            if self.context_shift:
                raise ConfigError("the NPU cannot attend to keys of a context that shifts; choose `attention='cpu'`")

    def __repr__(self) -> str:
        """Return the options that differ from the defaults."""
        given = {name: getattr(self, name) for name in DECLARED}
        texts = [f"{name}={value!r:.80}" for name, value in given.items() if value != DECLARED[name][1]]
        return f"EngineOptions({', '.join(texts)})"

    def comparable(self) -> dict[str, Any]:
        """Return all fields, with names in place of objects, so that ranks can compare their options."""
        objects = {"policy": find_policy(self.policy).name, "batcher": find_batcher(self.batcher).name}
        return vars(self) | objects

    def _check_npu_only(self) -> None:
        if self.weights == "npu-only":
            if self.npu not in ("auto", "qnn"):
                raise ConfigError(f"`weights='npu-only'` and `npu={self.npu!r}` contradict each other; try `npu='qnn'`")
            if self.on_npu_failure == "fallback":
                raise ConfigError("with `weights='npu-only'` the CPU cannot take over; omit `on_npu_failure`")

    @property
    def chunk_lengths(self) -> tuple[int, ...]:
        """Lengths of `chunk_length` in tokens, shortest first; empty if none is given."""
        return lengths_of(self.chunk_length)

    @property
    def npu_windows(self) -> tuple[int, ...]:
        """Windows of `npu_window` in tokens, shortest first."""
        return lengths_of(self.npu_window)

    @property
    def graph_layers(self) -> int | None:
        """Maximum number of layers of a graph; None for no limit."""
        return _graph_layers(self.npu_graph)

    @property
    def decodes_on(self) -> DecodeOn:
        """Processor that computes single tokens."""
        return "npu" if self.weights == "npu-only" else self.decode_on

    @property
    def num_threads(self) -> int:
        """Number of threads; see `find_cpus` for the errors."""
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
"""Maps field names to declarations: the first type of the annotation, the default, and the other properties."""


def python_help() -> dict[str, str]:
    """Return the help text of each field, with fields in backquotes in place of flags."""
    fields_of_flags = {declared.main_flag: f"`{name}`" for name, (_, _, declared) in DECLARED.items()}
    return {
        name: re.sub(r"--[a-z-]+[a-z]", lambda flag: fields_of_flags.get(flag[0], flag[0]), declared.help)
        for name, (_, _, declared) in DECLARED.items()
    }


def _documentation() -> str:
    """Return the docstring of EngineOptions, with a description of each field."""
    entries = []
    for name, text in python_help().items():
        entries += textwrap.wrap(f"{name}: {text}", 112, initial_indent="    ", subsequent_indent=" " * 8)
    head, _, rest = (EngineOptions.__doc__ or "").partition("\n\n")
    return "\n".join([head, "", "Args:", *entries, "", textwrap.dedent(rest)])


EngineOptions.__doc__ = _documentation()
