"""Take an idea of a paper through simulation and measurement to a report: only the widest linears run on the NPU.

python examples/partition_report.py [MODEL]      writes partitions.png and partitions.html
"""

import sys

import chunkrt


def main(model: str) -> None:
    tokens = list(range(3, 67))
    tree = chunkrt.graph.load_module(model).to("cpu")
    for layer in tree.model.layers:
        layer.mlp.gate_up_proj.to("npu")
    partitions = {"natural": {}, "gate and up on the NPU": tree}
    rows = chunkrt.experiment(
        model,
        devices=["sd8gen3", "sd8elite"],
        placements=partitions,
        **{"schemes": ["w8a16"], "chunk_lengths": [32], "policies": ["look_ahead"]},
        prompt_lengths=[32, len(tokens)],
    )
    rows.plot("partitions.png")
    told = (f"{r.device}, {r.placement_name}, {r.prompt_length} tokens: {r.tokens_per_s:.0f}" for r in rows)
    print("predicted tokens/s:", *told, sep="\n  ")
    runs = {"simulation": rows}
    for name, placement in partitions.items():
        for npu, scheme in (("native", "w8a8-dynamic"), ("qnn", "w8a16")):
            records = runs[f"{name}, {npu}"] = []
            options = {"npu": npu, "scheme": scheme, "placement": placement, "chunk_length": 32}
            with chunkrt.load(model, **options) as engine, engine.session() as session:
                session.on_run = records.append
                session.prefill(tokens)
    chunkrt.report(runs, "partitions.html", title=f"Partitions of {model}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["smollm2-135m-instruct"])
