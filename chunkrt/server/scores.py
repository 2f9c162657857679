"""POST /v1/score and /v1/rerank: log-probabilities of given texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from chunkrt.engine.scoring import Score, by_context, encode_pair
from chunkrt.engine.session import Session
from chunkrt.server.errors import RequestError
from chunkrt.server.requests import RerankRequest, ScoreRequest
from chunkrt.server.service import Service

Pair = tuple[list[int], list[int]]


async def score(service: Service, request: ScoreRequest, cache_salt: str | None) -> dict[str, Any]:
    """Return the log-probability of each `text_2` after its `text_1`, and whether greedy decoding would produce it."""
    adapter = service.check_model(request)
    first = [request.text_1] if isinstance(request.text_1, str) else request.text_1
    second = [request.text_2] if isinstance(request.text_2, str) else request.text_2
    if len(first) not in (1, len(second)):
        raise RequestError(
            f"text_1 has {len(first)} texts and text_2 {len(second)}; give the same number of both, or one text_1",
            param="text_1",
        )
    if not all(second):
        raise RequestError("text_2: found an empty text; give at least one token to score", param="text_2")
    await service.beside(_check_lengths, service, {"text_1": first, "text_2": second})
    firsts = first * len(second) if len(first) == 1 else first
    pairs = [
        await service.beside(encode_pair, service.tokenizer, one, other)
        for one, other in zip(firsts, second, strict=True)
    ]
    found = await _scores(service, pairs, cache_salt, adapter)
    return {
        "id": f"score-{uuid4().hex}",
        "object": "list",
        "model": adapter or service.name,
        "data": [
            {"index": i, "object": "score", "score": s.log_probability, "is_greedy": s.is_greedy, "tokens": len(p[1])}
            for i, (s, p) in enumerate(zip(found, pairs, strict=True))
        ],
        "usage": _usage(pairs),
    }


async def rerank(service: Service, request: RerankRequest, cache_salt: str | None) -> dict[str, Any]:
    """Rank documents by the likelihood of the query after each: the mean log-probability of its tokens."""
    adapter = service.check_model(request)
    texts = [document if isinstance(document, str) else document.get("text") for document in request.documents]
    if not request.query:
        raise RequestError("query: found an empty text; give a text to score after each document", param="query")
    if not all(isinstance(text, str) and text for text in texts):
        raise RequestError("documents: expected texts, or objects with a text, none empty", param="documents")
    await service.beside(_check_lengths, service, {"documents": texts, "query": [request.query]})
    pairs = [await service.beside(encode_pair, service.tokenizer, f"{text}\n\n", request.query) for text in texts]
    found = await _scores(service, pairs, cache_salt, adapter)
    means = [one.log_probability / len(pair[1]) for one, pair in zip(found, pairs, strict=True)]
    order = sorted(range(len(means)), key=lambda index: -means[index])[: request.top_n]
    return {
        "id": f"rerank-{uuid4().hex}",
        "model": adapter or service.name,
        "results": [
            {
                "index": index,
                "relevance_score": means[index],
                **({"document": {"text": texts[index]}} if request.return_documents else {}),
            }
            for index in order
        ],
        "usage": _usage(pairs),
    }


def _check_lengths(service: Service, texts: Mapping[str, Sequence[Any]]) -> None:
    """Check texts by field. Raise RequestError if one has too many bytes for the context."""
    for param, several in texts.items():
        for text in several:
            service.check_length(text, param, shifts=False)


async def _scores(service: Service, pairs: Sequence[Pair], cache_salt: str | None, adapter: str | None) -> list[Score]:
    """Return the scores of pairs. Pairs with the same context share a session, which runs it once."""
    found: dict[int, Score] = {}

    async def work(indices: list[int], session: Session) -> None:
        for index in indices:
            found[index] = await session.ascore(*pairs[index])

    parts = [partial(work, indices) for indices in by_context(pairs)]
    await service.in_sessions(parts, cache_salt=cache_salt, adapter=adapter)
    return [found[index] for index in range(len(pairs))]


def _usage(pairs: Sequence[Pair]) -> dict[str, int]:
    number = sum(len(context) + len(continuation) for context, continuation in pairs)
    return {"prompt_tokens": number, "completion_tokens": 0, "total_tokens": number}
