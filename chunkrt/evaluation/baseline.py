"""The base: the reference model of a comparison, usually the same checkpoint in float.

The logits of the base are read from the disk if an earlier evaluation stored them, and are otherwise computed. The
engine is loaded only if logits have to be computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from chunkrt.checkpoints import catalogue
from chunkrt.engine.engine import Engine
from chunkrt.engine.loaded import LoadedModel
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import engine_folder
from chunkrt.engine.scoring import Float16, Float32, Float64, log_softmax, row_blocks, score_tokens
from chunkrt.engine.session import Session
from chunkrt.engine_directory.manifest import PLAN, WEIGHTS, is_engine_directory, read_manifest, read_plan
from chunkrt.errors import ConfigError
from chunkrt.evaluation.logit_cache import BasePiece, LogitCache
from chunkrt.files import Progress
from chunkrt.quant.scheme import find_scheme
from chunkrt.runtime.affinity import NO_AFFINITY

FORMAT = 2
"""Version of the entries on disk. Raise it when the form of entries or the computation of a scheme changes."""

FLOAT_CHUNK_LENGTH = 128
"""Chunk length of the base: the fastest of 64, 128 and 512 on `onnxrt`. It affects values only by float32 rounding."""


def base_options(
    scheme: str,
    *,
    threads: int | None = None,
    affinity: str = NO_AFFINITY,
    context_length: int | None = None,
    calibration: Path | None = None,
    adapter: Path | None = None,
) -> EngineOptions:
    """Return the options of a base: the fastest backend that supports its scheme.

    The backend is `native` for integers. `native` has no float linears; of the other backends, `onnxrt` takes 1.3 s for
    512 tokens of SmolLM2-135M, and `reference` takes 2.1 s (two cores).
    """
    found = find_scheme(scheme)
    return EngineOptions(
        npu="onnxrt" if found.weight_bits is None else "native",
        scheme=scheme,
        threads=threads,
        affinity=affinity,
        context_length=context_length,
        calibration=calibration if found.is_static else None,
        adapter=adapter,
    )


class Baseline:
    """A base for some windows. Close it after use.

    Args:
        model: a catalogue name, a checkpoint, or an engine directory of the base's scheme.
        options: see `base_options`.
        windows: all windows that will be requested; the cache keeps these windows and may drop others.
        cache_limit: maximum number of bytes on disk.
        progress: called during downloads and compilation.

    Raises:
        ConfigError: an engine directory of another scheme.
        ConfigError, ModelError: see `engine_folder`.
    """

    def __init__(
        self,
        model: str,
        options: EngineOptions,
        windows: Sequence[Sequence[int]],
        *,
        cache_limit: int,
        progress: Progress,
    ) -> None:
        check_base(model, options)
        self.model = model
        self.options = options
        self.folder = engine_folder(model, options, progress)
        plan = read_plan(self.folder)
        self.vocab_size = plan.vocab_size
        if options.scheme == "float":
            chunk_length = min(FLOAT_CHUNK_LENGTH, options.context_length or plan.context_length)
            self.options = replace(options, chunk_length=chunk_length)
        files = read_manifest(self.folder).files
        self._made_from = [files[PLAN], files[WEIGHTS], self.options.npu]
        self._engine: Engine | None = None
        self._cache = LogitCache(catalogue.home() / "logits", cache_limit, map(self._key, windows))
        self.num_read = 0
        """Number of windows that were read from the disk."""
        self.num_computed = 0
        self.num_not_kept = 0
        """Number of windows that were computed, but not kept for lack of room."""

    def pieces(self, window: Sequence[int], lengths: Sequence[int]) -> Iterator[BasePiece]:
        """Yield the rows of a window in pieces, except the row of its last token, which no token follows.

        Raises:
            ConfigError: the window does not fit the context, or the cache cannot be written.
            ModelError: a logit is not finite.
            BackendError: a subgraph failed.
        """
        key, shape = self._key(window), (len(window) - 1, self.vocab_size)
        stored = self._cache.open(key, *shape)
        if stored is not None:
            self.num_read += 1
        else:
            self.num_computed += 1
            if not self._cache.write(key, *shape, self._compute(window, lengths)):
                self.num_not_kept += 1
            stored = self._cache.open(key, *shape)
        if stored is None:
            yield from self._compute(window, lengths)
            return
        with stored:
            yield from stored.pieces(lengths)

    def close(self) -> None:
        """Close the engine if it was loaded."""
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> Baseline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compute(self, window: Sequence[int], lengths: Sequence[int]) -> Iterator[BasePiece]:
        if self._engine is None:
            self._engine = Engine(LoadedModel(self.folder, self.options))
        following, start = np.array(window[1:], np.int64), 0
        with self._engine.session() as session:
            for logits, _ in logit_pieces(session, window[:-1], lengths):
                log_probabilities, _ = score_tokens(logits, following[start : start + len(logits)])
                surprisals = (-log_probabilities).astype(np.float32)
                yield BasePiece(logits=rounded(logits), surprisals=surprisals)
                start += len(logits)

    def _key(self, window: Sequence[int]) -> str:
        """Return the key of a window. It depends on the prepared weights, the plan, the backend, and the window's
        tokens."""
        made_from: list[Any] = [FORMAT, *self._made_from, list(map(int, window))]
        return f"{self.options.scheme}-{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]}"


def rounded(logits: Float32) -> Float16:
    """Return logits [R, V] minus the largest logit of each row, in float16; values below the range of float16 are
    clamped."""
    relative = logits - logits.max(axis=1, keepdims=True)
    kept: Float32 = np.maximum(relative, np.float32(np.finfo(np.float16).min), out=relative)
    return kept.astype(np.float16)


def check_base(model: str, options: EngineOptions) -> None:
    """Refuse an engine directory as its own base, unless it was compiled under the base's scheme.

    Raises:
        ConfigError: it was compiled under another scheme; a compiled model does not contain its checkpoint.
        ModelError: it is damaged.
    """
    if is_engine_directory(Path(model)):
        manifest = read_manifest(Path(model))
        if manifest.scheme.name != options.scheme:
            raise ConfigError(
                f"{model} is compiled under {manifest.scheme.name!r} and holds no {options.scheme!r} weights to "
                f"compare with; give its original checkpoint with --base-model (it was called "
                f"{manifest.model!r}), or measure it alone with --base none"
            )


def logit_pieces(session: Session, tokens: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[Float32, float]]:
    """Prefill tokens with all their logits, piece by piece; `lengths` add up to the tokens.

    Yields:
        Logits, float32 [piece, V], and the seconds that they took.

    Raises:
        ConfigError, BackendError: see `Session.prefill`.
    """
    start = 0
    for length in lengths:
        result = session.prefill(tokens[start : start + length], logits="all")
        assert result.logits is not None
        yield result.logits, result.seconds
        start += length


def divergences(base: Float16 | Float32, logits: Float32) -> Float64:
    """Return the Kullback-Leibler divergence from the base to the model for each row.

    The divergence is the sum over V of p_base log(p_base / p_model).

    Args:
        base, logits: logits of the base and of the model, [R, V].

    Returns:
        Divergences, float64 [R], in nats, all at least zero.

    Raises:
        ModelError: a logit is not finite.

    Numerics: the computation uses float64. A token whose probability in the base underflows to zero adds nothing.
    """
    found = np.empty(len(logits), np.float64)
    for rows in row_blocks(*logits.shape):
        expected = log_softmax(base[rows])
        difference = expected - log_softmax(logits[rows])
        difference *= np.exp(expected, out=expected)
        found[rows] = difference.sum(axis=1)
    return np.maximum(found, 0.0)
