"""`chunkrt doctor`: check this machine, and report missing parts with a remedy."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import click

from chunkrt import backends
from chunkrt.backends import dispatch, qnn
from chunkrt.checkpoints import catalogue
from chunkrt.cli.command import STATUS_OF_NO, GroupedCommand
from chunkrt.cli.shared_options import verbose_option
from chunkrt.errors import INSTALL_COMPILE, ChunkrtError
from chunkrt.files import bytes_below
from chunkrt.plugins import Plugin, PluginGroup
from chunkrt.runtime import batcher, policy, windows_processors
from chunkrt.runtime.affinity import available_cores, big_cores, cpu_list
from chunkrt.runtime.windows_processors import EMULATED

PARTS = {
    "gguf": f"reads GGUF files; {INSTALL_COMPILE}",
    "onnx": f"reads and writes ONNX models; {INSTALL_COMPILE}",
    "onnx_ir": f"builds graphs when a model is compiled; {INSTALL_COMPILE}",
    "onnxruntime": f"runs the onnxrt backend; {INSTALL_COMPILE}",
    "mpi4py": "lets ranks share a decoder; pip install 'chunkrt[mpi]'",
    "huggingface_hub": "pulls catalogue entries from Hugging Face; pip install 'chunkrt[hub]'",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check, with advice if there is a problem."""

    what: str
    ok: bool
    found: str
    advice: str = ""
    part_of: str = ""


@click.command(cls=GroupedCommand)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@verbose_option
def doctor(as_json: bool) -> None:
    """Check the processors and packages of this machine, and advise on missing ones.

    The exit status is 3 if no model can run.
    """
    findings = [_machine(), _big_cores(), *_kernels(), _npu(), *map(_part, PARTS), *_plugins(), _cache()]
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


_ATTENTION = {"float32": "attend_f32_f32_cache", "bfloat16": "attend_f32_bf16_cache"}
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
    return [check_plugin(plugin) for group in groups for plugin in group.plugins]


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
