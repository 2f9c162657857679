"""Files with which a program without chunkrt runs a compiled model, for example on a phone: `host/` and the contexts.

The NPU computes all layers, including attention; the host provides masks, rows of tables, and caches. `host.json`
describes the inputs and outputs of every graph, in the order in which they run; docs/phones.md explains their use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chunkrt.backends.qnn.contexts import RECORD, WRAPPER
from chunkrt.backends.qnn.executable import FLOAT16_SUFFIX, HIDDEN, NEW_SUFFIX, ROWS_SUFFIX, WindowEdges
from chunkrt.backends.qnn.htp_support import graph_rows
from chunkrt.engine.resolve import HOST_DESCRIPTION
from chunkrt.engine_directory.manifest import CONTEXTS, Manifest, NpuTarget
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.graph.static_attention import has_int8_caches, is_convolution, kept_slots
from chunkrt.tokenizer.text_settings import SETTINGS_FILE
from chunkrt.tokenizer.tokenizer import VOCABULARY_FILE

FORMAT = 1
HOST, DESCRIPTION = HOST_DESCRIPTION.split("/")
BINARY = ".bin"
HOST_FILES = (VOCABULARY_FILE, SETTINGS_FILE)
"""Files of an engine directory that a host needs, in addition to contexts."""


LARGEST_GRAPH = 2**31 - 2**24
"""Maximum size of the weights in an ONNX file, because a protobuf message is limited to 2 GiB. Larger weights are
stored in a file next to it.
"""


def check_host(plan: Plan, context_length: int) -> None:
    """Check that a host can run a plan with `host.json` alone.

    Args:
        plan: the plan whose window is the complete context.

    Raises:
        ConfigError: the plan has no LM head, contains convolutions, or keeps state on the CPU; the NPU would have to
            select rows of logits; or the rotary tables change with the position.
    """
    if not plan.has_head:
        raise ConfigError(
            "the checkpoint has no LM head, so a host would get no logits; run this model with chunkrt itself"
        )
    left = [s.name for s in plan.subgraphs if (s.all_state if s.device == "cpu" else s.rows == "R")]
    if left:
        raise ConfigError(
            f"a program without chunkrt needs all layers on the NPU, but {left[0]} is not on the NPU; choose "
            "`attention='npu'`, and a `context_length` that is no longer than the longest `npu_window`"
        )
    if sliding := [node.name for s in plan.subgraphs for node in s.nodes if kept_slots(node) is not None]:
        raise ConfigError(
            f"the window of {sliding[0]} slides, which host.json cannot describe; omit `npu_sinks`, and choose a "
            "`context_length` that is no longer than the longest `npu_window`"
        )
    if convolutions := [node.name for s in plan.subgraphs for node in s.nodes if is_convolution(node)]:
        raise ConfigError(
            f"{convolutions[0]} keeps the state of a convolution, which host.json cannot describe; run this model with "
            "chunkrt itself"
        )
    if int8 := [node.name for s in plan.subgraphs for node in s.nodes if has_int8_caches(node)]:
        raise ConfigError(
            f"{int8[0]} reads int8 caches, which host.json cannot describe; omit `cache_dtype`, or run this model with "
            "chunkrt itself"
        )
    if plan.rope_offset(context_length):
        raise ConfigError(
            f"the rotary tables of this model change after {plan.long_context_from} tokens; choose a "
            "`context_length` up to that length"
        )


def write_host(
    folder: Path,
    manifest: Manifest,
    weights: WeightStore,
    plan: Plan,
    contexts: Mapping[NpuTarget, Mapping[str, Path]],
    context_length: int,
) -> None:
    """Write `host/` into a folder with contexts: the CPU's graphs, rotary tables and the description. Remove the
    records with which chunkrt finds contexts.

    Args:
        plan: the plan whose window is the complete context.
        contexts: for each SoC and chunk length the folder of each compiled subgraph.

    Raises:
        OSError: the files cannot be written.
    """
    from chunkrt.backends.onnx.scheme_models import DATA_SUFFIX, save_subgraph

    (folder / HOST).mkdir()
    for subgraph in (s for s in plan.subgraphs if s.device == "cpu"):
        path = folder / _cpu_file(subgraph)
        save_subgraph(plan, subgraph, manifest.scheme, weights, path, keeps_float16=True, most_in_file=LARGEST_GRAPH)
    tables = {}
    for subgraph in (s for s in plan.subgraphs if s.device == "npu"):
        for name in WindowEdges(subgraph, plan, 1).tables:
            table = weights.array(name)[:context_length].astype("<f2")
            file = f"{HOST}/{name}.f16"
            (folder / file).write_bytes(table.tobytes())
            tables[name] = {"file": file, "shape": list(table.shape)}
    targets: list[dict[str, Any]] = [
        {
            "soc": target.soc,
            "library": target.library,
            "chunk_length": target.chunk_length,
            "rows": (rows := graph_rows(target.chunk_length, manifest.scheme)),
            "graphs": [_graph(subgraph, plan, rows, of_target) for subgraph in plan.subgraphs],
        }
        for target, of_target in contexts.items()
    ]
    graphs = [graph for target in targets for graph in target["graphs"]]
    files = {graph[key] for graph in graphs for key in ("file", "binary") if key in graph}
    files |= {path.relative_to(folder).as_posix() for path in (folder / HOST).glob(f"*{DATA_SUFFIX}")}
    files |= {f"{HOST}/{DESCRIPTION}", *(table["file"] for table in tables.values())}
    files |= {name for name in HOST_FILES if (folder / name).exists()}
    description = {
        "format": FORMAT,
        "files": sorted(files),
        "model": manifest.model,
        "scheme": manifest.scheme.name,
        "context_length": context_length,
        "vocabulary": plan.vocab_size,
        "hidden_slot": float(HIDDEN),
        "tables": tables,
        "targets": targets,
    }
    for record in (folder / CONTEXTS).glob(f"*/{RECORD}"):
        record.unlink()
    (folder / HOST / DESCRIPTION).write_text(json.dumps(description, indent=1), encoding="utf-8", newline="\n")


def _cpu_file(subgraph: Subgraph) -> str:
    return f"{HOST}/{subgraph.name}.onnx"


def _graph(subgraph: Subgraph, plan: Plan, rows: int, contexts: Mapping[str, Path]) -> dict[str, Any]:
    if subgraph.device == "cpu":
        tensors = {name: plan.tensors[name] for name in (*subgraph.inputs, *subgraph.outputs)}

        def edge(name: str) -> dict[str, Any]:
            return {"name": name, "holds": name, "dtype": tensors[name].dtype, "shape": list(tensors[name].shape)}

        inputs, outputs = ([edge(name) for name in names] for names in (subgraph.inputs, subgraph.outputs))
        return {"device": "cpu", "file": _cpu_file(subgraph), "inputs": inputs, "outputs": outputs}
    edges = WindowEdges(subgraph, plan, rows)
    kinds: dict[str, dict[str, Any]] = {
        **{name: {"holds": name} for name in (*edges.values, *subgraph.outputs)},
        **{name: {"cache": name, "ring": _is_ring(plan, name)} for name in edges.caches},
        **{name + NEW_SUFFIX: {"rows_of": name} for name in edges.caches},
        **{name + ROWS_SUFFIX: {"rows_of": name} for name in edges.tables},
        **{name: {"mask": int(str(node.attributes["window"]))} for name, node in edges.masks.items()},
    }
    inputs, outputs = (
        [
            {"name": name + FLOAT16_SUFFIX, **kinds[name], "dtype": "float16", "shape": list(shape)}
            for name, (shape, _) in forms.items()
        ]
        for forms in (edges.inputs, edges.outputs)
    )
    context = contexts[subgraph.name]
    (binary,) = [path.name for path in context.iterdir() if path.suffix == BINARY]
    where = f"{CONTEXTS}/{context.name}"
    files = {"file": f"{where}/{WRAPPER}", "binary": f"{where}/{binary}"}
    return {"device": "npu", **files, "inputs": inputs, "outputs": outputs}


def _is_ring(plan: Plan, cache: str) -> bool:
    return "W" in plan.tensors[cache].shape
