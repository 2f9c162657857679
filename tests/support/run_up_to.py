"""Values of a chunk up to a subgraph, from the reference backend."""

import numpy as np

from chunkrt.backends.reference import ReferenceBackend
from chunkrt.graph.plan import resolve


def run_up_to(engine, subgraph, tokens):
    """Return every value of a chunk before a subgraph, from the reference; and after it."""
    plan, symbols = engine.plan, dict.fromkeys(("T", "P", "W"), len(tokens))
    values = {"input_ids": tokens, "position": np.zeros(1, np.int64)}
    values["rope_position"] = np.array([plan.rope_offset(len(tokens))])
    for part in plan.subgraphs[: plan.subgraphs.index(subgraph) + 1]:
        for name in (*part.state, *part.outputs):
            values[name] = np.zeros(resolve(plan.tensors[name].shape, symbols), np.float32)
        executable = ReferenceBackend().compile(part, plan, len(tokens), engine.scheme, engine.loaded.weights)
        inputs = {name: values[name] for name in (*part.inputs, *part.all_state)}
        executable.run(inputs, {name: values[name] for name in part.outputs})
    return values
