"""Engine directories for devices: a model that is compiled for chosen SoCs and chunk lengths, in a folder that can be
copied.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from chunkrt.backends.qnn import find_soc
from chunkrt.backends.qnn.contexts import store_difference
from chunkrt.engine.capability import plan_by_capability
from chunkrt.engine.compile_workers import Contexts, compile_in_workers
from chunkrt.engine.host import HOST_FILES, check_host, write_host
from chunkrt.engine.model_options import choose_context_length, usual_chunk_length, warn_of_equal_graphs
from chunkrt.engine.npu_attention import as_compiled, compiled_attention, npu_plans
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.peak_memory import peak_memory_bytes
from chunkrt.engine.resolve import engine_folder, options_placement, plan_model
from chunkrt.engine.roles import contexts_folder
from chunkrt.engine_directory.manifest import (
    CONTEXTS,
    NpuTarget,
    is_engine_directory,
    read_manifest,
    write_manifest,
)
from chunkrt.errors import ConfigError, ModelError, cause_of
from chunkrt.files import Progress, check_writable, only_writer, written_aside

Compiled = dict[NpuTarget, dict[tuple[int, str], Path]]
"""Folders of the contexts of each target, by the reach of the plan and the name of the subgraph."""


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
        for_host: write only the files with which a program without chunkrt can run the model (`engine/host.py`).
        progress: called with (description, amount done, total).

    Returns:
        Mapping that describes the directory: model, scheme, bytes, the largest peak memory of a process, which
        includes that of the NPU's compiler, and a list of SoCs and chunk lengths with their contexts.

    Raises:
        ConfigError: the folder already exists, a SoC is unknown, or `for_host` is set without a SoC; see `check_host`.
        ModelError, QuantizationError, PartitionError, BackendError: see `chunkrt.load`.
    """
    if for_host and not socs:
        raise ConfigError("no SoC is given, but the files for a program without chunkrt need one; set `soc`")
    _check_absent(output)
    targets = list(dict.fromkeys((find_soc(soc), length) for soc in socs for length in chunk_lengths))
    if for_host and not is_engine_directory(Path(model)):
        _check_host_first(model, options, progress)
    engine = engine_folder(model, options, progress)
    manifest = read_manifest(engine)
    if socs:
        options = as_compiled(options, manifest)
    opened = Contexts(engine, options)
    plan, weights, scheme, context_length = opened.plan, opened.weights, opened.scheme, opened.context_length
    if too_long := [length for _, length in targets if length > plan.context_length]:
        raise ConfigError(f"chunk length {too_long[0]} is longer than the model's context of {plan.context_length}")
    if socs:
        warn_of_equal_graphs(chunk_lengths, scheme)
    compiled: Compiled = {}
    npu_attention: dict[str, str | int] = {}
    plans = opened.plans if targets else {context_length: plan}
    longest = plans[context_length]
    if longest is not plan or len(plans) > 1:
        npu_attention = compiled_attention(options, context_length)
    if for_host:
        check_host(longest, context_length)
    on_npu = [(reach, s.name) for reach, of in plans.items() for s in of.subgraphs if s.device == "npu"]
    jobs = {(soc, length): [(soc.name, length, reach, name) for reach, name in on_npu] for soc, length in targets}
    of_workers = compile_in_workers(
        opened, [job for of_target in jobs.values() for job in of_target], partial(progress, "compiling for the NPU")
    )
    for soc, chunk_length in targets:
        library = opened.backend(soc.name).htp.version
        target = NpuTarget(soc=soc.name, chunk_length=chunk_length, library=library)
        contexts = compiled[target] = {}
        for done, job in enumerate(jobs[soc, chunk_length]):
            progress(f"compiling for {soc.name}, chunks of {chunk_length}", done, len(on_npu))
            _, _, reach, name = job
            contexts[reach, name] = opened.prepare(job)

    def finish(folder: Path) -> None:
        if for_host:
            of_longest = {
                target: {name: path for (reach, name), path in contexts.items() if reach == context_length}
                for target, contexts in compiled.items()
            }
            write_host(folder, manifest, weights, longest, of_longest, context_length)
            return
        write_manifest(
            folder,
            model=manifest.model,
            scheme=manifest.scheme,
            npu=list(compiled),
            placement=manifest.placement,
            ranks=manifest.ranks,
            checkpoint=manifest.checkpoint,
            num_parameters=manifest.num_parameters,
            npu_attention=npu_attention,
            npu_settings=options.htp.compiled_settings if socs else {},
        )

    files = HOST_FILES if for_host else manifest.files
    try:
        _assemble(
            engine,
            [name for name in manifest.files if name in files],
            [path for contexts in compiled.values() for path in contexts.values()],
            {} if for_host else _bases(compiled),
            output,
            finish,
        )
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise ModelError(f"cannot write the engine directory {output}: {reason}") from error
    return {
        "model": manifest.model,
        "scheme": scheme.name,
        "bytes": sum(p.stat().st_size for p in output.rglob("*") if p.is_file()),
        "peak_memory_bytes": max(of_workers, peak_memory_bytes()),
        "npu": [{**asdict(target), "contexts": len({*contexts.values()})} for target, contexts in compiled.items()],
    }


def _check_absent(output: Path) -> None:
    if output.exists():
        raise ConfigError(f"{output} exists already; choose another folder, or delete it")
    try:
        check_writable(output)
    except OSError as error:
        raise ModelError(f"cannot write the engine directory {output}: {cause_of(error)}") from error


def _check_host_first(model: str, options: EngineOptions, progress: Progress) -> None:
    """Check that a host can run a checkpoint, before it is calibrated and compiled. The errors are those of
    `check_host`.
    """
    plan, scheme = plan_model(model, options, progress)
    placement = options_placement(options)
    context_length = choose_context_length(plan, options)
    plan, _ = plan_by_capability(plan.within(context_length), scheme, options, placement)
    check_host(npu_plans(plan, placement, options, context_length)[context_length], context_length)


def _bases(compiled: Compiled) -> dict[Path, Path]:
    """Return, for contexts that contain the weights of another context of the SoC, this other context. It is that of
    the chunk length that runs use by default.
    """
    bases: dict[Path, Path] = {}
    for soc in {target.soc for target in compiled}:
        by_length = {target.chunk_length: contexts for target, contexts in compiled.items() if target.soc == soc}
        usual = by_length[usual_chunk_length(by_length)]
        for contexts in by_length.values():
            bases |= {path: usual[name] for name, path in contexts.items() if name in usual}
    return {path: base for path, base in bases.items() if path != base}


def _assemble(
    engine: Path,
    files: Sequence[str],
    contexts: Sequence[Path],
    bases: Mapping[Path, Path],
    output: Path,
    finish: Callable[[Path], None],
) -> None:
    """Write files and contexts into a temporary folder, finish it, and rename it. The keys of `bases` are stored as
    differences from the values.
    """
    with only_writer(contexts_folder(), "compiling for the NPU"), written_aside(output) as aside:
        _check_absent(output)  # another process may have written the folder in the meantime
        aside.mkdir()
        for name in files:
            shutil.copyfile(engine / name, aside / name)
        for path in dict.fromkeys(contexts):  # targets may share contexts
            shutil.copytree(path, aside / CONTEXTS / path.name)
        for path, base in bases.items():
            store_difference(aside / CONTEXTS / path.name, aside / CONTEXTS / base.name)
        finish(aside)
