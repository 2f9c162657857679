"""Load a model by name, on this rank and on all other ranks."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from chunkrt.backends.dispatch import check_switches, registered_operators
from chunkrt.backends.link import Communicator, ranks_of
from chunkrt.backends.switches import Switches
from chunkrt.engine.arguments import shows_fields
from chunkrt.engine.capability import check_plan
from chunkrt.engine.engine import Engine
from chunkrt.engine.loaded import LoadedModel
from chunkrt.engine.options import DECLARED, EngineOptions, LoadOptions
from chunkrt.engine.resolve import engine_folder
from chunkrt.errors import ConfigError, OutOfMemoryError, cause_of, unknown_name
from chunkrt.files import Progress, no_progress
from chunkrt.progress import find_progress
from chunkrt.runtime import windows_processors
from chunkrt.runtime.affinity import available_cpus, find_cpus
from chunkrt.runtime.ranks.launch import connect

if TYPE_CHECKING:
    from chunkrt.engine.ranks.leader import EngineMirror
    from chunkrt.runtime.ranks.messages import MessageCommunicator

log = logging.getLogger(__name__)


@shows_fields({name: (LoadOptions.__annotations__[name], default) for name, (_, default, _) in DECLARED.items()})
def load(
    model: str | os.PathLike[str],
    *,
    progress: Progress | bool | None = None,
    communicator: Communicator | None = None,
    **options: Unpack[LoadOptions],
) -> Engine:
    """Load a model, compiling it first if necessary.

    If mpiexec started several processes, they share the model (docs/parallel.md). On rank 0 the function returns an
    engine. On all other ranks it does not return: it computes with rank 0 until rank 0 ends, and then raises
    SystemExit.

    Args:
        model: a catalogue name, an id of the Hugging Face hub ("org/name", "org/name:Q4_0", "org/name@revision"), a
            GGUF file, a Hugging Face folder, or an engine directory.
        progress: called during downloads, calibration and compilation; True displays it.
        communicator: connection to the other ranks, if several ranks share the model; see `chunkrt/runtime/ranks/`. All
            ranks must load the model with the same chunk length, and execute the same runs. By default the ranks are
            the processes that mpiexec started together.
        options: the fields of `EngineOptions`.

    Raises:
        ConfigError: an unknown option or model name, a value out of range, or CPUs that are not available.
        ModelError: the checkpoint is missing, damaged or unsupported.
        BackendError: a backend is not available or cannot compile the model.
        PartitionError: a backend does not support the operators that were placed on it.
        DeviceLostError: another rank has ended.
        OutOfMemoryError: the memory is not sufficient.
    """
    try:
        if not isinstance(model, str | os.PathLike):
            raise ConfigError(f"model is {model!r}, expected a name or a path")
        return _load(os.fspath(model), find_progress(progress), communicator, options)
    except MemoryError as error:
        if isinstance(error, OutOfMemoryError):
            raise
        raise OutOfMemoryError(
            f"there is too little memory to load {model} ({error or 'no more can be had'}); close other programs, or "
            "choose a smaller model or a shorter context"
        ) from error
    except OSError as error:  # errors of files that `load` reads or writes: digests, caches, folders
        where = f" {error.filename}" if error.filename else ""
        raise ConfigError(f"cannot load {model!s:.200}:{where}: {cause_of(error)}") from error


def _load(model: str, tell: Progress, communicator: Communicator | None, options: LoadOptions) -> Engine:
    """Load a model. The arguments are those of `load`."""
    known = EngineOptions.__dataclass_fields__
    for name in options:
        if name not in known:
            raise unknown_name("option", name, known)
    chosen = EngineOptions(**options)
    if windows_processors.is_emulated_on_arm():
        log.warning("%s", windows_processors.EMULATED)
    find_cpus(chosen.affinity)  # report errors in the options before a model is compiled
    check_switches(Switches.parse(chosen.ops), registered_operators())
    if communicator is None and (launch := connect([model, repr(chosen.comparable())])) is not None:
        if launch.rank > 0:
            sys.exit(follow(launch))
        from chunkrt.engine.ranks.leader import leader

        mirror = leader(launch).open(model, chosen)
        loaded = load_part(model, chosen, launch, tell, mirror)
        mirror.check_loaded(loaded.identity)
        return Engine(loaded)
    folder = engine_folder(model, chosen, tell, ranks_of(communicator), check=check_plan)
    return Engine(LoadedModel(folder, chosen, progress=tell, communicator=communicator))


def follow(launch: MessageCommunicator) -> int:
    """Compute with rank 0 until rank 0 ends, and return the exit status. All other ranks of mpiexec call this
    function."""
    from chunkrt.engine.ranks.follower import Follower

    return Follower(launch, load_part).serve()


def load_part(
    model: str,
    options: EngineOptions,
    launch: MessageCommunicator,
    progress: Progress = no_progress,
    mirror: EngineMirror | None = None,
) -> LoadedModel:
    """Load this rank's share of a model. Ranks on one machine divide its CPUs."""
    folder = engine_folder(model, options, progress, ranks_of(launch), check=check_plan)
    if options.threads is None:
        options = replace(options, threads=launch.share_of(find_cpus(options.affinity) or available_cpus()))
    return LoadedModel(folder, options, progress=progress, communicator=launch, mirror=mirror)
