"""Predict how prefill speed changes as more layers move from the NPU to the CPU, and plot it.

python examples/partition_study.py [MODEL] [PLOT.png]
"""

import sys

import matplotlib.pyplot as plt

import chunkrt

DEVICE, TOKENS = "sd8gen3", 512
COUNTS = (0, 4, 8, 12, 16, 20, 24, 28)


def main(model: str, plot: str) -> None:
    placements = [{f"model.layers.{layer}": "cpu" for layer in range(count)} for count in COUNTS]
    rows = chunkrt.experiment(
        model,
        devices=[DEVICE],
        placements=placements,
        schemes=["w8a16"],
        prompt_lengths=[TOKENS],
        chunk_lengths=[32, 128],
        policies=["look_ahead"],
    )
    for length in (32, 128):
        rates = [row.tokens_per_s for row in rows if row.chunk_length == length]
        print(f"chunk {length}:", *(f"{rate:.0f}" for rate in rates), "tokens/s")
        plt.plot(COUNTS, rates, marker="o", label=f"chunk {length}")
    plt.xlabel("layers on the CPU")
    plt.ylabel("tokens per second, simulated")
    plt.title(f"{model} on {DEVICE}, {TOKENS} tokens")
    plt.legend()
    plt.savefig(plot)


if __name__ == "__main__":
    main(*[*sys.argv[1:], *("smollm2-135m-instruct", "partition.png")[len(sys.argv) - 1 :]])
