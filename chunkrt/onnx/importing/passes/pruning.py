"""Removal of unread nodes: masks, positions, shapes, and nodes that other passes have replaced."""

from __future__ import annotations

from chunkrt.onnx.importing.draft import Draft


def prune(draft: Draft) -> None:
    """Remove nodes on which the logits do not depend.

    Requires: nothing. Ensures: the only outputs are the logits, and they depend on every node.
    """
    logits = draft.logits
    draft.graph.outputs[:] = [logits]
    draft.logits_index = 0
    for node in reversed(list(draft.graph)):
        if not any(output.uses() or output is logits for output in node.outputs):
            draft.graph.remove(node, safe=True)
