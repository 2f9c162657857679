"""Engine directories for devices: a model that is compiled for chosen SoCs and chunk lengths, in a folder that can be
copied.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chunkrt.backends.qnn import QnnBackend, find_soc
from chunkrt.engine.capability import plan_to_run
from chunkrt.engine.host import HostTarget, check_host, write_host
from chunkrt.engine.model_options import choose_context_length
from chunkrt.engine.npu_attention import compiled_attention, npu_plans
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import engine_folder
from chunkrt.engine.roles import contexts_folder
from chunkrt.engine_directory.manifest import (
    CONTEXTS,
    Manifest,
    NpuTarget,
    open_weights,
    read_manifest,
    write_manifest,
)
from chunkrt.errors import ConfigError, ModelError, cause_of
from chunkrt.files import Progress, check_writable, only_writer, written_aside


def compile_engine(
    model: str,
    output: Path,
    options: EngineOptions,
    *,
    socs: Sequence[str],
    chunk_lengths: Sequence[int],
    for_host: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Write an engine directory for chosen SoCs and chunk lengths to a temporary folder, and rename it.

    All parts are first compiled into the cache, so an interrupted compilation can be continued.

    Args:
        model: a catalogue name, a GGUF file, a Hugging Face folder, or an engine directory.
        output: path that must not exist.
        options: scheme, placement, calibration, NPU settings, and the options of attention on the NPU.
        for_host: also write the files with which a program without chunkrt can run the model (`engine/host.py`).
        progress: called with (description, amount done, total).

    Returns:
        Mapping that describes the directory: model, scheme, bytes, and a list of SoCs and chunk lengths with their
        contexts.

    Raises:
        ConfigError: the folder already exists, a SoC is unknown, or `for_host` is set without a SoC; see `check_host`.
        ModelError, QuantizationError, PartitionError, BackendError: see `chunkrt.load`.
    """
    if for_host and not socs:
        raise ConfigError("no SoC is given, but the files for a program without chunkrt need one; set `soc`")
    _check_absent(output)
    targets = list(dict.fromkeys((find_soc(soc), length) for soc in socs for length in chunk_lengths))
    engine = engine_folder(model, options, progress)
    manifest = read_manifest(engine)
    plan = plan_to_run(engine, manifest, options)
    scheme = manifest.scheme
    if too_long := [length for _, length in targets if length > plan.context_length]:
        raise ConfigError(f"chunk length {too_long[0]} is longer than the model's context of {plan.context_length}")
    compiled: dict[NpuTarget, list[Path]] = {}
    hosts: list[HostTarget] = []
    npu_attention: dict[str, str | int] = {}
    context_length = choose_context_length(plan, options)
    plan = plan.within(context_length)
    weights = open_weights(engine).with_tables(plan)
    for soc, chunk_length in targets:
        backend = QnnBackend(soc, contexts=contexts_folder(), compiled=engine / CONTEXTS, options=options.htp)
        plans = npu_plans(plan, manifest.placement, options, context_length, chunk_length)
        longest = plans[context_length]
        if longest is not plan or len(plans) > 1:
            npu_attention = compiled_attention(options, context_length)
        if for_host:
            check_host(longest, context_length)
        subgraphs = [(s, of) for of in plans.values() for s in of.subgraphs if s.device == "npu"]
        paths = []
        for done, (subgraph, of) in enumerate(subgraphs):
            progress(f"compiling for {soc.name}, chunks of {chunk_length}", done, len(subgraphs))
            paths.append(backend.prepare(subgraph, of, chunk_length, scheme, weights).parent)
        target = NpuTarget(soc=soc.name, chunk_length=chunk_length, library=backend.htp.version)
        # several plans contain the subgraphs that are not fused with attention
        compiled[target] = list(dict.fromkeys(paths))
        if for_host:
            of_longest = {s.name: path for (s, of), path in zip(subgraphs, paths, strict=True) if of is longest}
            hosts.append(HostTarget(target=target, plan=longest, contexts=of_longest))

    def add_host(folder: Path) -> None:
        if hosts:
            write_host(folder, manifest, weights, hosts, context_length)

    try:
        _assemble(engine, manifest, compiled, output, add_host, npu_attention)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise ModelError(f"cannot write the engine directory {output}: {reason}") from error
    return {
        "model": manifest.model,
        "scheme": scheme.name,
        "bytes": sum(p.stat().st_size for p in output.rglob("*") if p.is_file()),
        "npu": [{**asdict(target), "contexts": len(paths)} for target, paths in compiled.items()],
    }


def _check_absent(output: Path) -> None:
    if output.exists():
        raise ConfigError(f"{output} exists already; choose another folder, or delete it")
    try:
        check_writable(output)
    except OSError as error:
        raise ModelError(f"cannot write the engine directory {output}: {cause_of(error)}") from error


def _assemble(
    engine: Path,
    manifest: Manifest,
    compiled: Mapping[NpuTarget, Sequence[Path]],
    output: Path,
    add_host: Callable[[Path], None],
    npu_attention: Mapping[str, str | int],
) -> None:
    with only_writer(contexts_folder(), "compiling for the NPU"), written_aside(output) as aside:
        _check_absent(output)  # another process may have written the folder in the meantime
        aside.mkdir()
        for name in manifest.files:
            shutil.copyfile(engine / name, aside / name)
        for path in dict.fromkeys(path for paths in compiled.values() for path in paths):  # targets may share contexts
            shutil.copytree(path, aside / CONTEXTS / path.name)
        add_host(aside)
        write_manifest(
            aside,
            model=manifest.model,
            scheme=manifest.scheme,
            npu=list(compiled),
            placement=manifest.placement,
            ranks=manifest.ranks,
            checkpoint=manifest.checkpoint,
            num_parameters=manifest.num_parameters,
            npu_attention=npu_attention,
        )
