"""Memory of exporting, loading and running a random decoder of more than 2 GB with external data.

    python bench/onnx_large.py --gigabytes 2.4

Its weights are generated on writing, so that no checkpoint of that size is needed. Export and run are separate
processes. A process's own memory excludes mapped files.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path

import click
import numpy as np
import psutil

from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.ops import trace
from chunkrt.graph.partition import Planned, partition
from chunkrt.onnx.exporting import WindowSettings, save_model, window_model
from chunkrt.onnx.window_session import OnnxSession
from chunkrt.testing.random_decoders import CONFIG, RandomCheckpoint

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
LAYER_BYTES = 4 * 1024 * (1024 + 2 * 256 + 1024 + 3 * 4096)
VOCABULARY = 32000


class PeakMemory:
    """The most memory of its own that this process held, sampled every 10 ms."""

    def __enter__(self) -> PeakMemory:
        self.num_bytes, self._is_over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.01):
            memory = psutil.Process().memory_info()
            self.num_bytes = max(self.num_bytes, memory.rss - memory.shared)


def export(path: str, num_layers: int, results: multiprocessing.Queue[str]) -> None:
    """Write the model."""
    config = {**CONFIG, **SIZES, "head_dim": 64, "vocab_size": VOCABULARY, "num_hidden_layers": num_layers}
    source = RandomCheckpoint({**config, "attention_bias": False})
    decoder = build_decoder(source)
    planned = Planned(source=source, decoder=decoder, plan=partition(trace(decoder), family=source.architecture))
    started = time.perf_counter()
    with PeakMemory() as peak:
        model = window_model(planned, WindowSettings(window=8, sequence=64, context=64, dtype="fp32"))
        save_model(model, Path(path), external_data=True)
    results.put(json.dumps({"bytes": peak.num_bytes, "seconds": time.perf_counter() - started}))


def run(path: str, results: multiprocessing.Queue[str]) -> None:
    """Load the model and run a prompt."""
    started = time.perf_counter()
    with PeakMemory() as peak:
        logits = OnnxSession(path).run(range(20))
    assert np.isfinite(logits).all()
    results.put(json.dumps({"bytes": peak.num_bytes, "seconds": time.perf_counter() - started}))


@click.command()
@click.option("--gigabytes", type=float, default=2.4, show_default=True, help="Of weights, at least.")
def onnx_large(gigabytes: float) -> None:
    """Export, load and run."""
    num_layers = -(-int(gigabytes * 1e9) // LAYER_BYTES)
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.onnx"
        for target, arguments in ((export, (str(path), num_layers)), (run, (str(path),))):
            results = processes.Queue()
            process = processes.Process(target=target, args=(*arguments, results))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{target.__name__} failed with status {process.exitcode}")
            measured = json.loads(results.get())
            size = path.with_name(path.name + ".data").stat().st_size
            own, seconds = measured["bytes"] / 1e9, measured["seconds"]
            click.echo(f"{target.__name__}: {size / 1e9:.2f} GB of weights, {own:.2f} GB of memory, {seconds:.0f} s")


if __name__ == "__main__":
    onnx_large()
