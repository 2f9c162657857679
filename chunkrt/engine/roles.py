"""Choice of the backends for both roles. The NPU, its emulator, a plug-in or the CPU serves as the NPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

from chunkrt.backends import BACKENDS, Backend, Support, make_backend, qnn
from chunkrt.backends.base import AttentionMath
from chunkrt.backends.dispatch import Dispatcher, default_base, registered_operators
from chunkrt.backends.qnn import CompiledFor, QnnBackend, Soc, find_soc, has_npu, this_soc
from chunkrt.backends.qnn.htp_support import npu_support
from chunkrt.backends.switches import Switches
from chunkrt.checkpoints import catalogue
from chunkrt.engine.model_options import graph_lengths, warn_of_equal_graphs, with_cached_keys
from chunkrt.engine.npu_attention import changed_options
from chunkrt.engine.options import NPU_CHOICES, EngineOptions
from chunkrt.engine_directory.manifest import CONTEXTS, Manifest
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Device, Node, Plan, Subgraph, Tensor
from chunkrt.quant.scheme import DEFAULT_NPU_SCHEME, DEFAULT_SCHEME, SCHEMES, Scheme, find_scheme

DEFAULT_EMULATED_SOC = "SM8650"

Supports = Callable[[Subgraph, Plan, Scheme], Support]

log = logging.getLogger(__name__)


def open_backends(
    manifest: Manifest, folder: Path, options: EngineOptions, math: AttentionMath
) -> tuple[Backend, Backend]:
    """Return the backends that serve as the NPU and as the CPU for an engine directory, with this arithmetic of
    attention. The two may be the same backend.

    Raises:
        BackendUnavailableError: a backend that was requested is not available on this machine.
        ConfigError: the SoC is unknown, or the CPU's backend does not support the type of caches or the arithmetic of
            attention.
    """
    threads = options.num_threads
    if options.npu in ("auto", "qnn", "off"):
        cpu = make_backend("native", threads=threads, attention_math=math)
        npu = open_npu(manifest, folder, options) or cpu
    else:
        npu = make_backend(options.npu, threads=threads, attention_math=math)
        cpu = npu if npu.concurrency is None else _beside_npu(manifest.scheme, threads, math)
        if cpu.name != "native" and cpu is not npu:
            log.warning(
                "%s serves as the CPU: native does not support linear layers under the scheme %s",
                cpu.name,
                manifest.scheme.name,
            )
        _mind_settings(options)
    if options.cache_dtype not in (None, *cpu.cache_dtypes):
        raise ConfigError(
            f"{cpu.name} does not support {options.cache_dtype} caches; choose "
            f"{' or '.join(cpu.cache_dtypes)}, or another npu"
        )
    if math != "float32" and cpu.name != "native":
        raise ConfigError(
            f"{cpu.name} does not support {math} attention; choose `attention_math='float32'`, or another `npu`"
        )
    return npu, cpu


def asked_npu(options: EngineOptions) -> Supports | None:
    """Return the support function of the NPU; None if the CPU serves as both.

    Raises:
        BackendUnavailableError: the NPU was requested by name, but is not available.
    """
    if runs_on_qnn(options):
        return npu_support
    if options.npu in NPU_CHOICES:
        return None
    backend = make_backend(options.npu, threads=options.num_threads)
    return None if backend.concurrency is None else backend.supports


def runs_on_qnn(options: EngineOptions) -> bool:
    """Return True if Qualcomm's NPU or its emulator is requested by name, or used because it is available."""
    return options.npu == "qnn" or (options.npu == "auto" and has_npu())


def check_npu(options: EngineOptions) -> None:
    """Check that a backend requested by name is available, before a model is downloaded or compiled for it. The errors
    are those of `asked_npu`.
    """
    if options.npu == "qnn":
        qnn.open_htp()
    asked_npu(options)


def supports_by_role(options: EngineOptions, scheme: Scheme) -> dict[Device, tuple[str, Supports]]:
    """Map each role to the name of its backend for a scheme, and its support function. The errors are those of
    `asked_npu`.
    """
    npu = npu_under(options, scheme)
    if options.npu in ("auto", "qnn", "off"):
        cpu = make_backend("native", threads=1)
    else:
        cpu = _beside_npu(scheme, 1) if npu else make_backend(options.npu, threads=1)
    on_cpu = cpu.name, cpu.supports
    return {"npu": on_cpu if npu is None else ("qnn" if options.npu == "auto" else options.npu, npu), "cpu": on_cpu}


def npu_under(options: EngineOptions, scheme: Scheme) -> Supports | None:
    """Return the result of `asked_npu`, or None if the NPU was not requested by name and does not support linear layers
    under the scheme.
    """
    npu = asked_npu(options)
    return None if npu and options.npu == "auto" and linear_refusal(npu, scheme) else npu


def check_runs(plan: Plan, scheme: Scheme, options: EngineOptions) -> None:
    """Check that an engine could compile a plan. The check needs no weights.

    Raises:
        PartitionError: no backend supports an operator of the plan in its place.
        ConfigError: an operator is switched off that cannot be switched off; see also `asked_npu`.
        BackendUnavailableError: see `asked_npu`.
    """
    roles = supports_by_role(options, scheme)
    plan = with_cached_keys(plan, options)
    switches = Switches.parse(options.ops)
    dispatcher = Dispatcher(
        plan, scheme, registered_operators(), switches, default=default_base(options.npu), warns=False
    )
    for subgraph in (s for s in plan.subgraphs if s.device != "link"):
        # The CPU compiles every subgraph: it decodes, and takes over from an NPU that was not requested by name.
        takes_over = options.npu == "auto" and not options.npu_strict
        devices: set[Device] = {"cpu"} if takes_over else {"cpu", subgraph.device}
        for name, supports in (roles[device] for device in sorted(devices)):
            for section in dispatcher.sections(subgraph, name):
                dispatcher.check(section, name, supports)


def _beside_npu(scheme: Scheme, threads: int, attention_math: AttentionMath = "float32") -> Backend:
    """Return the CPU's backend for use with an NPU of a plug-in: native, or the next backend that supports linear
    layers under the scheme.
    """
    backends = (make_backend(name, threads=threads, attention_math=attention_math) for name in BACKENDS)
    return next(backend for backend in backends if not linear_refusal(backend.supports, scheme))


def default_npu_scheme(npu: Supports, default: str) -> str:
    """Return the first scheme under which the NPU supports linear layers. The order is: the model's own scheme,
    w8a8-dynamic, w8a16, and all others.
    """
    names = (default, DEFAULT_SCHEME, DEFAULT_NPU_SCHEME, *SCHEMES)
    return next((name for name in names if not linear_refusal(npu, find_scheme(name))), default)


def linear_refusal(npu: Supports, scheme: Scheme) -> str:
    """Return the NPU's reason for refusing a linear layer of typical size under a scheme. Return an empty string if it
    supports the layer, or supports linear layers under no scheme.
    """
    (subgraph,) = _ONE_LINEAR.subgraphs
    if not any(npu(subgraph, _ONE_LINEAR, each) for each in SCHEMES.values()):
        return ""
    return npu(subgraph, _ONE_LINEAR, scheme).reason


def _one_linear(width: int) -> Plan:
    x, weight, y = "x", "linear.weight", "y"
    tensors = (
        Tensor(name=x, dtype="float32", shape=("T", width), kind="value"),
        Tensor(name=weight, dtype="float32", shape=(width, width), kind="weight"),
        Tensor(name=y, dtype="float32", shape=("T", width), kind="value"),
    )
    subgraph = Subgraph(
        name="linear",
        device="npu",
        is_static=True,
        rows="T",
        nodes=(Node(name="linear", op="MatMul", domain="", inputs=(x, weight), outputs=(y,), attributes={}),),
        inputs=(x,),
        outputs=(y,),
        weights=(weight,),
        state=(),
    )
    return Plan(
        family="linear",
        subgraphs=(subgraph,),
        tensors={tensor.name: tensor for tensor in tensors},
        inputs=(x,),
        output=y,
        vocab_size=width,
        context_length=width,
    )


_ONE_LINEAR = _one_linear(1024)


def open_npu(manifest: Manifest, folder: Path, options: EngineOptions) -> QnnBackend | None:
    """Return Qualcomm's NPU for an engine directory, or None if the CPU serves as the NPU.

    Raises:
        BackendUnavailableError: the NPU was requested by name, but onnxruntime-qnn is not available.
        ConfigError: the SoC is unknown.
    """
    if not runs_on_qnn(options):
        _mind_settings(options)
        return None
    if options.npu == "auto" and not manifest.scheme.is_static:
        log.warning(
            "the NPU does not run the scheme %s, so the CPU runs it; try `scheme='w8a16'`", manifest.scheme.name
        )
        return None
    try:
        soc = choose_soc(options.soc, manifest)
    except ConfigError as error:
        if options.npu != "auto":
            raise
        log.warning("%s; the CPU serves as the NPU", error)
        return None
    warn_of_equal_graphs(options.chunk_lengths, manifest.scheme)
    compiled = folder / CONTEXTS
    origin = None
    if manifest.npu:
        origin = CompiledFor(
            folder=folder,
            targets=[f"{target.soc}, chunks of {target.chunk_length}" for target in manifest.npu],
            libraries=sorted({target.library for target in manifest.npu}),
            changes=changed_options(options, manifest),
            recompiles=options.recompile,
        )
    backend = QnnBackend(
        soc,
        contexts=contexts_folder(),
        compiled=compiled if compiled.is_dir() else None,
        origin=origin,
        options=options.htp,
        limit_s=options.npu_timeout,
        shorter_lengths=graph_lengths(options, manifest),
    )
    if backend.htp.is_emulated:
        _tell_of_emulation()
    return backend


def _mind_settings(options: EngineOptions) -> None:
    """Warn about settings that only Qualcomm's NPU uses."""
    what = "another backend" if options.npu not in NPU_CHOICES else "the CPU"
    given = {
        f"`soc={options.soc!r}`": options.soc is not None,
        "`attention='npu'`": options.attention == "npu",
        "`weights='npu-only'`": options.weights == "npu-only",
        f"`chunk_length={options.chunk_length!r}` with several lengths": len(options.chunk_lengths) > 1,
    }
    for setting in (setting for setting, is_given in given.items() if is_given):
        log.warning("%s has no effect, because %s serves as the NPU; try `npu='qnn'`", setting, what)


def choose_soc(name: str | None, manifest: Manifest | None = None) -> Soc:
    """Return the SoC to run on or to emulate: the requested SoC, that of this machine, that of the compiled contexts,
    or a common one.
    """
    return (
        find_soc(name)
        if name
        else this_soc() or find_soc(manifest.npu[0].soc if manifest and manifest.npu else DEFAULT_EMULATED_SOC)
    )


def contexts_folder() -> Path:
    """Return the folder of the compiled contexts of all models."""
    return catalogue.home() / "contexts"


@cache
def _tell_of_emulation() -> None:
    log.warning("no Hexagon NPU is available, so it is emulated: values match a device, speed does not")
