"""Methods of an engine for many prompts at once, on top of its sessions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, TypeVar, get_args

import numpy as np

from chunkrt.engine.arguments import as_token_ids, listed, require_whole
from chunkrt.engine.embedding import Float32, Pooling
from chunkrt.engine.generation import Piece
from chunkrt.engine.many import MOST_AT_ONCE, Part, Runs, drive_many
from chunkrt.engine.prefix_cache.cache import PrefixCache
from chunkrt.engine.sampling import GREEDY, SamplingOptions
from chunkrt.engine.scoring import Score, by_context, check_pair, encode_pair, num_shared
from chunkrt.engine.session import Session
from chunkrt.errors import BusyError, ConfigError, unknown_name
from chunkrt.graph.plan import Plan
from chunkrt.tokenizer import Tokenizer

Result = TypeVar("Result")

LEAST_AWAITED = 32
"""Minimum number of shared tokens at the beginning of two contexts for which one context waits until the other is in
the prefix cache.
"""


class Beginnings:
    """Record of the beginnings of computed contexts, in steps of LEAST_AWAITED tokens."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def add(self, context: Sequence[int]) -> None:
        self._known.update(self._keys(context))

    def num_known(self, context: Sequence[int]) -> int:
        """Return the number of tokens at the beginning of a context that it shares with a recorded context."""
        keys = self._keys(context)
        return LEAST_AWAITED * sum(1 for _ in takewhile(self._known.__contains__, keys))

    def _keys(self, context: Sequence[int]) -> Iterator[int]:
        """Yield keys of the first step of a context, the first two steps, and so on. A collision of keys only adds or
        omits a wait.
        """
        key = 0
        for start in range(0, len(context) - LEAST_AWAITED + 1, LEAST_AWAITED):
            key = hash((key, *context[start : start + LEAST_AWAITED]))
            yield key


class ManyPrompts(ABC):
    """Base class of engines with the methods for many prompts. Each prompt runs in a separate session, and all share
    chunks.
    """

    plan: Plan
    context_length: int
    prefix_cache: PrefixCache | None
    tokenizer: Tokenizer | None

    @abstractmethod
    def session(self, *, cache_salt: str | None = None) -> Session:
        """Return a session immediately. Raise BusyError if the memory for caches is exhausted."""

    @abstractmethod
    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raise ModelError if the model has none."""

    @abstractmethod
    def check_ready(self) -> None:
        """Raise ClosedError if the engine is closed, or ModelError if its files are damaged."""

    @abstractmethod
    def _open_waiting(self, cache_salt: str | None) -> Session:
        """Return a session as soon as memory for its caches is available."""

    @property
    @abstractmethod
    def _runs(self) -> Runs:
        """Object that computes the concurrent runs of sessions."""

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int = 256,
        sampling: SamplingOptions = GREEDY,
        stop: Sequence[str] = (),
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
    ) -> str | list[str]:
        """Answer prompts, many at a time.

        Args:
            prompts: one text, or a list of prompts, which are texts or lists of token ids as for `Session.prefill`.
            max_new_tokens, sampling, stop: see `Session.generate`.
            max_sessions: maximum number of prompts in progress; the memory for caches may lower it.
            cache_salt: see `Engine.session`.

        Returns:
            The answer, or for a list of prompts a list of answers in the same order.

        Raises:
            ChunkrtError: an error of `Session.prefill` or `Session.generate`. No answer is returned in this case.
        """
        several = [prompts] if isinstance(prompts, str) else listed("prompts", prompts)
        texts = [""] * len(several)
        pieces = self.stream(
            several,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            max_sessions=max_sessions,
            cache_salt=cache_salt,
        )
        for index, piece in pieces:
            texts[index] += piece.text
        return texts[0] if isinstance(prompts, str) else texts

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int = 256,
        sampling: SamplingOptions = GREEDY,
        stop: Sequence[str] = (),
        template_options: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> str:
        """Return the answer to a chat.

        Args:
            messages: mappings with "role" and "content", for example [{"role": "user", "content": "Hello"}].
            max_new_tokens, sampling, stop: see `Session.generate`.
            template_options: additional variables of the chat template, for example {"enable_thinking": False}.
            cache_salt: see `Engine.session`.

        Raises:
            ConfigError: the messages or options are malformed.
            ModelError: the model has no chat template, or its template rejects them.
        """
        tokens = self.require_tokenizer().encode_chat(messages, template_options=template_options)
        pieces = self.stream(
            [tokens], max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, cache_salt=cache_salt
        )
        return "".join(piece.text for _, piece in pieces)

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int = 256,
        sampling: SamplingOptions = GREEDY,
        stop: Sequence[str] = (),
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
    ) -> Iterator[tuple[int, Piece]]:
        """Answer prompts like `generate`, and yield each piece as soon as it is generated, with the index of its
        prompt.
        """
        if isinstance(prompts, str):
            raise ConfigError(
                "prompts is a single text, expected a list; pass a list of texts, or pass the text to generate"
            )
        several = listed("prompts", prompts)

        def answer(session: Session, index: int) -> Part[Piece | None]:
            return session.answer(several[index], max_new_tokens=max_new_tokens, sampling=sampling, stop=stop)

        for index, piece in self._drive_many(len(several), answer, max_sessions, cache_salt):
            if piece is not None:
                yield index, piece

    def score(
        self,
        pairs: Sequence[tuple[str, str] | tuple[Sequence[int], Sequence[int]]],
        *,
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
    ) -> list[Score]:
        """Compute the log-probabilities of continuations after their contexts, many at a time.

        Args:
            pairs: pairs of a context and its continuation, both as texts or both as token ids. Texts are tokenised as
            in
                lm-evaluation-harness. If several pairs have the same context, it is run once.
            max_sessions: maximum number of contexts in progress; the memory for caches may lower it.
            cache_salt: see `Engine.session`.

        Returns:
            A list with the result of `Session.score` for each pair, in the same order.

        Raises:
            ConfigError: a context or continuation is empty, or both together exceed the context length.
            BackendError: a subgraph failed.
        """
        found = dict(self.scores(pairs, max_sessions=max_sessions, cache_salt=cache_salt))
        return [found[index] for index in range(len(found))]

    def scores(
        self,
        pairs: Sequence[tuple[str, str] | tuple[Sequence[int], Sequence[int]]],
        *,
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
    ) -> Iterator[tuple[int, Score]]:
        """Score pairs like `score`, and yield each score as soon as it is computed, with the index of its pair."""
        tokens = [self._encode_pair(pair) for pair in listed("pairs", pairs)]
        for pair in tokens:
            check_pair(*pair, self.plan.vocab_size, self.context_length)
        groups = by_context(tokens)
        contexts = [tokens[group[0]][0] for group in groups]
        left = [iter(group) for group in groups]
        beginning: set[int] = set()
        """Groups of pairs whose context is in progress."""
        ran = Beginnings()

        def scoring(session: Session, index: int) -> Part[Score]:
            for pair in groups[index]:
                yield session.scoring(*tokens[pair])

        def may_begin(index: int) -> bool:
            """Return False if a context in progress has the same beginning, because the prefix cache will contain the
            shared tokens afterwards. Tokens that the cache already contains do not count.
            """
            context = contexts[index]
            least = max(len(context) // 2, ran.num_known(context) + LEAST_AWAITED)
            if self.prefix_cache is not None and any(
                num_shared(context, contexts[other]) >= least for other in beginning - {index}
            ):
                return False
            beginning.add(index)
            return True

        for index, score in self._drive_many(len(groups), scoring, max_sessions, cache_salt, may_begin):
            if index in beginning:
                beginning.discard(index)
                ran.add(contexts[index])
            yield next(left[index]), score

    def embed(
        self,
        texts: str | Sequence[str | Sequence[int]],
        *,
        pooling: Pooling | None = None,
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
    ) -> Float32:
        """Compute the embeddings of texts from their hidden states after the last norm, many at a time.

        Args:
            texts: one text, or a list of texts or lists of token ids. The special tokens that the model expects are
            added to
                texts; token ids are used unchanged.
            pooling: "last" for the hidden state of the last token, "mean" for the mean of all hidden states, None for
            the
                choice in the model's files. Embeddings of a model that was not trained for embeddings are not reliable.
            max_sessions: maximum number of texts in progress; the memory for caches may lower it.
            cache_salt: see `Engine.session`.

        Returns:
            float32 [N, H], or [H] for one text. Every embedding has length 1.

        Raises:
            ConfigError: a text is empty or exceeds the context length, the scheme rotates hidden states, or `pooling`
            is None
                and the model's files do not name one.
            BackendError: a subgraph failed.
        """
        if pooling is None and self.tokenizer is not None:
            pooling = self.tokenizer.settings.pooling
        if pooling is None:
            raise ConfigError("the model's files do not name a pooling for embeddings; pass pooling='last' or 'mean'")
        if not isinstance(pooling, str):
            raise ConfigError(f"pooling is {pooling!r:.80}, expected one of: {', '.join(get_args(Pooling))}")
        if pooling not in get_args(Pooling):
            raise unknown_name("pooling", pooling, get_args(Pooling))
        several = [texts] if isinstance(texts, str) else listed("texts", texts)
        if not several:
            raise ConfigError("texts is empty; pass at least one text")

        def embedding(session: Session, index: int) -> Part[Float32]:
            yield session.embedding(several[index], pooling)

        rows = dict(self._drive_many(len(several), embedding, max_sessions, cache_salt))
        return rows[0] if isinstance(texts, str) else np.stack([rows[index] for index in range(len(several))])

    def _drive_many(
        self,
        number: int,
        part: Callable[[Session, int], Part[Result]],
        most: int,
        cache_salt: str | None,
        may_begin: Callable[[int], bool] = lambda index: True,
    ) -> Iterator[tuple[int, Result]]:
        """Execute parts to their end, each in a separate session. A part begins as soon as `may_begin` allows it."""
        if require_whole("max_sessions", most) < 1:
            raise ConfigError(f"max_sessions is {most}, expected at least 1")

        def in_session(session: Session, index: int) -> Part[Result]:
            with session:
                yield from part(session, index)

        def open_part(index: int, waits: bool) -> Part[Result] | None:
            if not may_begin(index):
                return None
            if waits:
                return in_session(self._open_waiting(cache_salt), index)
            with suppress(BusyError):
                return in_session(self.session(cache_salt=cache_salt), index)
            return None

        self.check_ready()
        return drive_many(number, open_part, self._runs, most)

    def _encode_pair(self, pair: tuple[str | Sequence[int], str | Sequence[int]]) -> tuple[list[int], list[int]]:
        if isinstance(pair, str) or len(parts := listed("a pair", pair)) != 2:
            raise ConfigError(f"a pair is {pair!r}, expected a context and its continuation")
        context, continuation = parts
        if isinstance(context, str) and isinstance(continuation, str):
            return encode_pair(self.require_tokenizer(), context, continuation)
        return as_token_ids(context), as_token_ids(continuation)
