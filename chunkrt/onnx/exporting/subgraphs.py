"""The plan's static subgraphs, each as a separate model with a fixed number of rows, for an NPU's compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from chunkrt.errors import ConfigError
from chunkrt.files import remove
from chunkrt.graph.partition import Planned
from chunkrt.graph.plan import Subgraph
from chunkrt.onnx.exporting.export_settings import SubgraphSettings
from chunkrt.onnx.exporting.forms import emit_node, make_emitter, with_shapes
from chunkrt.onnx.exporting.save import check_output, save_model

SUBGRAPH_KEY = "chunkrt.subgraph"
"""Key of a model's metadata for the name of its subgraph."""


def subgraph_model(planned: Planned, subgraph: Subgraph, settings: SubgraphSettings) -> ir.Model:
    """Build a static subgraph; its inputs and outputs [1, window, columns] have the plan's names.

    Raises:
        UnsupportedModelError: an operator has no form for export.
    """
    plan = planned.plan
    e = make_emitter(planned, opset=settings.opset, dtype=settings.tensor_type)
    for name in subgraph.inputs:
        e.input(name, e.dtype, [1, settings.window, e.width(name)])
    for node in subgraph.nodes:
        emit_node(e, node)
    later = plan.subgraphs[plan.subgraphs.index(subgraph) + 1 :]
    wanted = {plan.output, *(name for s in later for name in s.inputs)}
    for name in subgraph.outputs:
        if name in wanted:
            e.output(e.read(name, e.dtype), name, [1, settings.window, e.width(name)])
    return with_shapes(e.model(metadata={SUBGRAPH_KEY: subgraph.name}, name=subgraph.name))


def check_subgraph_outputs(planned: Planned, folder: Path) -> None:
    """Raise ConfigError if `save_static_subgraphs` could not write its files."""
    for name in _static_files(planned):
        check_output(folder / name)


def save_static_subgraphs(
    planned: Planned,
    folder: Path,
    settings: SubgraphSettings,
    *,
    external_data: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Write all subgraphs or none, with names that begin with the index in the plan: "03_static.1.onnx".

    Returns:
        The paths of the files.

    Raises:
        ConfigError: a file exists already or cannot be written.
    """
    static = _static_files(planned)
    check_subgraph_outputs(planned, folder)
    aside = folder / ".subgraphs.part"
    remove(aside)
    try:
        for done, (name, subgraph) in enumerate(static.items()):
            progress(done, len(static))
            save_model(subgraph_model(planned, subgraph, settings), aside / name, external_data=external_data)
        for file in sorted(aside.iterdir()):
            file.rename(folder / file.name)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from error
    finally:
        remove(aside)
    progress(len(static), len(static))
    return [folder / name for name in static]


def _static_files(planned: Planned) -> dict[str, Subgraph]:
    subgraphs = planned.plan.subgraphs
    digits = len(str(len(subgraphs)))
    return {f"{i:0{digits}}_{s.name}.onnx": s for i, s in enumerate(subgraphs) if s.is_static}
