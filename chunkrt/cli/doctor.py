"""`chunkrt doctor`: check this machine, and report missing parts with a remedy."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from chunkrt import backends
from chunkrt.backends import dispatch, qnn
from chunkrt.backends.qnn.contexts import ContextFolder
from chunkrt.backends.qnn.htp_support import graph_rows
from chunkrt.checkpoints import catalogue
from chunkrt.cli.command import STATUS_OF_NO, GroupedCommand
from chunkrt.cli.shared_options import verbose_option
from chunkrt.engine_directory.manifest import CONTEXTS, HASHED_WHEN_READ, Manifest, read_manifest, read_plan
from chunkrt.errors import INSTALL_COMPILE, ChunkrtError
from chunkrt.files import bytes_below
from chunkrt.plugins import Plugin, PluginGroup
from chunkrt.runtime import batcher, policy, windows_processors
from chunkrt.runtime.affinity import available_cores, big_cores, cpu_list
from chunkrt.runtime.windows_processors import EMULATED

LEAST_GLIBC = (2, 34)
"""Version for which the wheels of onnxruntime-qnn for Linux on Arm are built."""

PARTS = {
    "gguf": f"reads GGUF files; {INSTALL_COMPILE}",
    "onnx": f"reads and writes ONNX models; {INSTALL_COMPILE}",
    "onnx_ir": f"builds graphs when a model is compiled; {INSTALL_COMPILE}",
    "onnxruntime": f"runs the onnxrt backend; {INSTALL_COMPILE}",
    "huggingface_hub": 'pulls catalogue entries from Hugging Face; pip install "chunkrt[hub]"',
}
if sys.platform != "win32":
    PARTS["mpi4py"] = 'lets ranks share a decoder; pip install "chunkrt[mpi]"'


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check, with advice if there is a problem."""

    what: str
    ok: bool
    found: str
    advice: str = ""
    part_of: str = ""


@click.command(cls=GroupedCommand)
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@verbose_option
def doctor(folder: Path | None, as_json: bool) -> None:
    """Check the processors and packages of this machine, and advise on missing ones.

    With FOLDER, an engine directory, also check whether its files are intact and its NPU contexts fit this machine.

    The exit status is 3 if no model can run.
    """
    findings = [_machine(), _big_cores(), *_kernels(), _npu(), *map(_part, PARTS), *_plugins(), _cache()]
    if folder is not None:
        findings += check_directory(folder)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        names = {id(finding): f"{'  ' if finding.part_of else ''}{finding.what}" for finding in findings}
        width = max(map(len, names.values()))
        for finding in findings:
            mark = "ok  " if finding.ok else "lack"
            advice = f"\n{'':{width + 6}}{finding.advice}" if finding.advice else ""
            click.echo(f"{mark} {names[id(finding)]:{width}} {finding.found}{advice}")
    if not all(f.ok for f in findings if f.what == "native kernels"):
        raise click.exceptions.Exit(STATUS_OF_NO)


def _machine() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    found = (
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {available_cores()} cores, "
        f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB memory available"
    )
    is_emulated = windows_processors.is_emulated_on_arm()
    return Finding(what="machine", ok=not is_emulated, found=found, advice=EMULATED if is_emulated else "")


def _big_cores() -> Finding:
    if not hasattr(os, "sched_getaffinity"):
        return _efficiency_classes()
    allowed, big = os.sched_getaffinity(0), big_cores()
    found = f"CPUs {cpu_list(big)} of {cpu_list(allowed)}" if big != allowed else f"all CPUs alike, {cpu_list(big)}"
    advice = "--affinity big uses only these" if big != allowed else ""
    return Finding(what="big cores", ok=True, found=found, advice=advice)


def _efficiency_classes() -> Finding:
    classes = windows_processors.efficiency_classes()
    if not classes:
        return Finding(what="big cores", ok=False, found=f"not known: {platform.system()} does not report them")
    big = {cpu for cpu, efficiency in classes.items() if efficiency == max(classes.values())}
    if len(big) == len(classes):
        return Finding(what="big cores", ok=True, found=f"all CPUs alike, {cpu_list(big)}")
    advice = f"--affinity is not supported on {platform.system()}, whose scheduler prefers these for busy threads"
    return Finding(
        what="big cores", ok=True, found=f"CPUs {cpu_list(big)} of {cpu_list(classes.keys())}", advice=advice
    )


_ATTENTION = {
    "float32": "attend_f32_f32_cache",
    "bfloat16": "attend_f32_bf16_cache",
    "int8": "attend_f32_s8_bf16_cache",
}
"""Kernels of attention by arithmetic."""


def _kernels() -> list[Finding]:
    try:
        from chunkrt.backends.native.cpu import cpu_info, fastest_attention
    except ImportError as error:
        advice = "run `pip install .` in the source folder, with a C++20 compiler"
        return [Finding(what="native kernels", ok=False, found=str(error), advice=advice)]
    info = cpu_info()
    best = ", ".join(sorted(set(info["selected"].values())))
    findings = [Finding(what="native kernels", ok=True, found=f"{info['processor']}; in use: {best}")]
    attention = f"in {fastest_attention()} by {info['selected'][_ATTENTION[fastest_attention()]]}"
    findings.append(
        Finding(what="attention", part_of="native kernels", ok=True, found=f"{attention} (--attention-math auto)")
    )
    for isa in info["isas"]:
        if not isa["built"]:
            continue  # for another architecture
        found = "built, supported" if isa["supported"] else "built, not supported by this processor"
        if isa["present"] and not isa["supported"]:
            found = "built, supported by this processor, but not enabled by the operating system"
        findings.append(Finding(what=isa["name"], part_of="native kernels", ok=isa["supported"], found=found))
    return findings


def _npu() -> Finding:
    if not qnn.is_installed():
        advice = f"{qnn.INSTALL} for Qualcomm's NPU or, on x86-64, its emulator; without it, the CPU serves as the NPU"
        return Finding(what="npu", ok=False, found="onnxruntime-qnn is not installed", advice=advice)
    try:
        htp = qnn.open_htp()
        if htp.is_emulated:
            found = f"none on {platform.machine()}; onnxruntime-qnn {htp.version} compiles for it and emulates it"
            advice = f"--npu auto uses the CPU, --npu qnn the emulator; SoCs: {', '.join(qnn.SOCS)}"
            return Finding(what="npu", ok=False, found=found, advice=advice)
        if not qnn.has_npu():
            found = f"onnxruntime-qnn {htp.version} finds no Hexagon NPU on this {platform.machine()} machine"
            advice = "check that its driver is installed and that this user may open it (on Linux, /dev/fastrpc-*)"
            return Finding(what="npu", ok=False, found=found, advice=advice)
        soc = qnn.this_soc()
    except ChunkrtError as error:
        return Finding(what="npu", ok=False, found=str(error))
    return Finding(what="npu", ok=True, found=f"Hexagon of {soc.name if soc else '?'}, onnxruntime-qnn {htp.version}")


def check_directory(folder: Path) -> list[Finding]:
    """Check an engine directory: its files, and its contexts against the library and the SoC of this machine."""
    try:
        manifest = read_manifest(folder)
    except ChunkrtError as error:
        return [Finding(what="directory", ok=False, found=str(error))]
    found = f"{manifest.model}, scheme {manifest.scheme.name}; all files up to {HASHED_WHEN_READ >> 20} MiB are intact"
    findings = [Finding(what="directory", ok=True, found=found)]
    if not manifest.npu:
        return [*findings, Finding(what="contexts", part_of="directory", ok=True, found="none; it is for the CPU")]
    contexts = ContextFolder(folder / CONTEXTS)
    paths = sorted(path for path in contexts.path.glob("*") if not path.name.startswith("."))
    problems = [f"{path.name} is damaged" for path in paths if not contexts.is_intact(path.name)]
    if any(subgraph.device == "npu" for subgraph in read_plan(folder).subgraphs):
        for target in manifest.npu:
            prefix = f"{target.soc}-{manifest.scheme.name}-r{graph_rows(target.chunk_length, manifest.scheme)}-"
            if not any(path.name.startswith(prefix) for path in paths):
                problems.append(f"those of {target.soc}, chunks of {target.chunk_length}, are missing")
    targets = "; ".join(f"{target.soc}, chunks of {target.chunk_length}" for target in manifest.npu)
    compiled = {**manifest.npu_attention, **manifest.npu_settings}
    options = ", ".join(f"{name}={value}" for name, value in compiled.items())
    findings.append(
        Finding(
            what="contexts",
            part_of="directory",
            ok=not problems,
            found=problems[0] if problems else f"{targets}{', ' * bool(options)}{options}",
            advice="copy the directory again, or recompile the model" if problems else "",
        )
    )
    return [*findings, *(_library(manifest), _soc(manifest), *_driver(manifest))]


def _library(manifest: Manifest) -> Finding:
    libraries = sorted({target.library for target in manifest.npu})
    installed = qnn.library_version() if qnn.is_installed() else "none"
    return Finding(
        what="library",
        part_of="directory",
        ok=installed in libraries,
        found=f"contexts of onnxruntime-qnn {', '.join(libraries)}; installed: {installed}",
        advice="" if installed in libraries else f"pip install {qnn.PACKAGE}=={libraries[0]}",
    )


def _soc(manifest: Manifest) -> Finding:
    socs = list(dict.fromkeys(target.soc for target in manifest.npu))
    try:
        soc = qnn.this_soc()
    except ChunkrtError as error:
        return Finding(what="SoC", part_of="directory", ok=False, found=str(error))
    fits = soc is None or soc.name in socs
    found = f"contexts for {', '.join(socs)}; this machine: {'emulates all SoCs' if soc is None else soc.name}"
    advice = "" if fits else f"compile the model with --soc {soc.name if soc else ''}"
    return Finding(what="SoC", part_of="directory", ok=fits, found=found, advice=advice)


def _driver(manifest: Manifest) -> list[Finding]:
    """Check the parts of Linux for Arm that a Hexagon NPU needs; empty on other machines."""
    if sys.platform != "linux" or not qnn.is_installed() or qnn.is_emulating():
        return []
    devices = [Path("/dev", name) for name in qnn.LINUX_NPU_DEVICES]
    usable = [path for path in devices if os.access(path, os.R_OK)]
    version = platform.libc_ver()[1]
    is_new = tuple(map(int, re.findall(r"\d+", version)[:2])) >= LEAST_GLIBC
    skeletons = {f"libQnnHtpV{qnn.find_soc(target.soc).htp_arch}Skel.so" for target in manifest.npu}
    folders = [Path(part) for part in re.split(r"[;:]", os.environ.get("ADSP_LIBRARY_PATH", "")) if part]
    has_skeleton = any((folder / name).exists() for folder in folders for name in skeletons)
    return [
        Finding(
            what="driver",
            part_of="directory",
            ok=bool(usable),
            found=str(usable[0]) if usable else f"no readable {' or '.join(map(str, devices))}",
            advice="" if usable else "install the vendor's kernel, or give this user read access",
        ),
        Finding(
            what="glibc",
            part_of="directory",
            ok=is_new,
            found=version or "unknown",
            advice="" if is_new else f"onnxruntime-qnn needs glibc {'.'.join(map(str, LEAST_GLIBC))} or later",
        ),
        Finding(
            what="ADSP_LIBRARY_PATH",
            part_of="directory",
            ok=has_skeleton,
            found=os.environ.get("ADSP_LIBRARY_PATH", "not set"),
            advice=(
                ""
                if has_skeleton
                else f"if contexts do not load, set it to the folder of {', '.join(sorted(skeletons))}"
            ),
        ),
    ]


def _part(module: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(what=module, ok=False, found="not installed", advice=PARTS[module])
    try:
        found = str(getattr(importlib.import_module(module), "__version__", "installed"))
    except Exception as error:  # a broken installation raises any type
        return Finding(what=module, ok=False, found=f"does not import: {error}", advice=PARTS[module])
    return Finding(what=module, ok=True, found=found)


def _plugins() -> list[Finding]:
    dispatch.registered_operators()  # raises errors of plug-ins, which are then reported
    groups: list[PluginGroup[Any]] = [dispatch.PLUGINS, backends.PLUGINS, policy.PLUGINS, batcher.PLUGINS]
    if importlib.util.find_spec("gguf"):
        from chunkrt.checkpoints import gguf_names

        groups.append(gguf_names.PLUGINS)
    if importlib.util.find_spec("onnx_ir"):
        from chunkrt.graph import decoders

        groups.append(decoders.PLUGINS)
    # Decoder families may add operators, so they are loaded before the names of operators are checked.
    checked = {plugin: check_plugin(plugin) for group in reversed(groups) for plugin in group.plugins}
    return [checked[plugin] for group in groups for plugin in group.plugins]


def check_plugin(plugin: Plugin[Any]) -> Finding:
    what, found = f"{plugin.group} {plugin.name}", f"{plugin.distribution} {plugin.version}"
    try:
        plugin.load()
        if plugin.group == backends.PLUGINS.name:
            backends.make_backend(plugin.name, threads=1)
        if plugin.group == dispatch.PLUGINS.name:
            dispatch.registered_operators().check_plugins(plugin.distribution)
    except ChunkrtError as error:
        return Finding(what=what, ok=False, found=found, advice=str(error))
    return Finding(what=what, ok=True, found=found)


def _cache() -> Finding:
    home = catalogue.home()
    return Finding(
        what="cache", ok=True, found=f"{home} ({bytes_below(home) / 1e6:.0f} MB; set CHUNKRT_HOME to move it)"
    )
