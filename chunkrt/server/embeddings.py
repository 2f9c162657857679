"""POST /v1/embeddings: embed texts as vectors of length 1, with the pooling of the server's settings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.engine.embedding import Pooling, pooled
from chunkrt.engine.session import Session
from chunkrt.server.errors import RequestError
from chunkrt.server.requests import EmbeddingRequest
from chunkrt.server.service import Service

Float32 = NDArray[np.float32]


async def embeddings(service: Service, request: EmbeddingRequest, cache_salt: str | None) -> dict[str, Any]:
    """Return a vector for each text; the answer reports the pooling.

    Raises:
        RequestError: the server has no embeddings, a text is empty or too long, or fewer dimensions are requested.
        BusyError: the queue is full.
    """
    adapter = service.check_model(request)
    if (pooling := service.pooling) is None:
        raise RequestError(
            f"{service.name} is not served for embeddings; start the server with --embeddings last, or mean, as the "
            "model was trained",
            code="no_embeddings",
        )
    texts = await service.encode_all(request.inputs, "input", service.tokenizer.encode_for_embedding, shifts=False)
    length = service.engine.context_length
    for tokens in texts:
        if not tokens:
            raise RequestError("input: a text is empty; give at least one token", param="input")
        if len(tokens) > length:
            raise RequestError(
                f"this model's context holds {length} tokens, and the text has {len(tokens)}; split it",
                param="input",
                code="context_length_exceeded",
            )
    width = _width(service)
    if request.dimensions not in (None, width):
        raise RequestError(
            f"dimensions: {request.dimensions}, but the model gives {width} and they cannot be truncated; omit it",
            param="dimensions",
        )
    rows = await _rows(service, texts, pooling, cache_salt, adapter)
    number = sum(map(len, texts))
    return {
        "object": "list",
        "model": adapter or service.name,
        "pooling": pooling,
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(row, request.encoding_format)}
            for index, row in enumerate(rows)
        ],
        "usage": {"prompt_tokens": number, "total_tokens": number},
    }


def _width(service: Service) -> int:
    plan = service.engine.plan
    if plan.hidden is None:
        raise RequestError(f"{service.name} does not provide hidden states", code="no_embeddings")
    return int(plan.tensors[plan.hidden].shape[-1])


async def _rows(
    service: Service, texts: Sequence[Sequence[int]], pooling: Pooling, cache_salt: str | None, adapter: str | None
) -> list[Float32]:
    found: dict[int, Float32] = {}

    async def work(index: int, tokens: Sequence[int], session: Session) -> None:
        result = await session.aprefill(tokens, logits="hidden")
        assert result.hidden is not None
        found[index] = pooled(result.hidden, pooling)
        service.metrics.prompt_tokens.inc(len(tokens))

    parts = [partial(work, index, tokens) for index, tokens in enumerate(texts)]
    await service.in_sessions(parts, cache_salt=cache_salt, adapter=adapter)
    return [found[index] for index in range(len(texts))]


def _encoded(row: Float32, encoding: str) -> list[float] | str:
    """Encode a vector as numbers, or as the base64 of its float32 bytes, little-endian."""
    return base64.b64encode(row.astype("<f4").tobytes()).decode() if encoding == "base64" else row.tolist()
