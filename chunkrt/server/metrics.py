"""Counts and times for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from chunkrt.engine.engine import Engine

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


class Metrics:
    """Metrics that /metrics reports, under names that begin with `chunkrt_`."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter("chunkrt_requests", "Requests answered.", ["path", "status"], registry=self._registry)
        self.client_requests = Counter(
            "chunkrt_client_requests", "Requests by the name of the client's key.", ["client"], registry=self._registry
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens reused from the prefix cache.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens of answers.")
        self.first_token = self._times("first_token_seconds", "Time from the start of a prompt to its logits.")
        self.token_gap = self._times("token_gap_seconds", "Time between consecutive tokens of an answer.")
        self._gauge("active_sequences", "Sequences in progress.", lambda: engine.loaded.admission.num_taken)
        self._gauge("waiting_requests", "Requests that wait.", lambda: engine.loaded.admission.num_waiting)
        self._gauge("cache_bytes", "Reserved for caches.", lambda: engine.stats().cache_bytes)
        self._gauge(
            "shared_chunks", "Chunks computed with rows of several sequences.", lambda: engine.stats().shared_chunks
        )
        self._gauge("shared_rows", "Rows in these chunks.", lambda: engine.stats().shared_rows)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"chunkrt_{name}", what, registry=self._registry)

    def _times(self, name: str, what: str) -> Histogram:
        return Histogram(f"chunkrt_{name}", what, buckets=SECONDS, registry=self._registry)

    def _gauge(self, name: str, what: str, value: Callable[[], float]) -> None:
        Gauge(f"chunkrt_{name}", what, registry=self._registry).set_function(value)
