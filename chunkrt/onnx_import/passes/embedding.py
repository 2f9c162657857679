"""Looking tokens up: Gather of a constant table, with the number that a family multiplies the result by."""

from __future__ import annotations

from chunkrt.onnx_import.constants import is_constant, stored
from chunkrt.onnx_import.draft import Draft, Weight, int_attribute


def raise_embedding(draft: Draft) -> None:
    """Requires: constants of Mul are weights. Ensures: the embedding is Gather(w, input_ids) with w [V, H] among
    `draft.weights`; a Mul by one number after it is in w.
    """
    for node in list(draft.graph):
        if (node.domain, node.op_type) != ("", "Gather") or node.inputs[1] is None or node.inputs[0] is None:
            continue
        table, tokens = node.inputs
        if tokens.name != draft.signature.tokens or not is_constant(draft, table) or int_attribute(node, "axis"):
            continue
        tensor = stored(draft, table)
        if len(tensor.shape) != 2:
            raise draft.unsupported(node, f"its table has the shape {list(tensor.shape)}, expected a row a token")
        scale, result = 1.0, node.outputs[0]
        users = [user for user, _ in result.uses()]
        if len(users) == 1 and users[0].op_type == "Mul" and (factor := users[0].inputs[1]) in draft.weights:
            assert factor is not None
            if draft.shape(factor) == (1,):
                scale = float(draft.source.read(draft.weights[factor].tensors[0])[0])
                result = users[0].outputs[0]
        weight = Weight(tensors=(draft.keep(table.name or "", tensor),), layout="as it is", scale=scale)
        (output,) = draft.insert(node, "Gather", [draft.add_weight(weight), tokens])
        draft.replace(result, output)
