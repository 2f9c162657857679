"""An engine: a loaded model with its sessions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Unpack, get_args, overload

import numpy as np

from chunkrt.backends.base import AttentionMath
from chunkrt.engine.arguments import as_token_ids, checked_salt, listed, require_whole
from chunkrt.engine.embedding import Float32, Pooling, pooled
from chunkrt.engine.generation import Piece
from chunkrt.engine.keywords import GenerationOptions, read_generation_options, shows_generation_options
from chunkrt.engine.loaded import EngineStats, LoadedModel
from chunkrt.engine.many import MOST_AT_ONCE, in_sessions
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.scoring import Score, by_context, check_pair, encode_pair, num_shared
from chunkrt.engine.session import Session, answer
from chunkrt.errors import BusyError, ConfigError, unknown_name
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.state_tensors import CacheDtype
from chunkrt.tokenizer import Tokenizer

Result = TypeVar("Result")
Prompts = Sequence[str | Sequence[int]]
Chat = Sequence[Mapping[str, Any]]

LEAST_AWAITED = 32
"""Minimum number of shared tokens at the beginning of two contexts for which one context waits until the other is in
the prefix cache.
"""


class _Beginnings:
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


class Engine:
    """A model that is ready to run, which `chunkrt.load` returns. Any number of sessions may be opened on it.

    Args:
        loaded: the model. Its attributes are no public interface, and may change.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    @property
    def options(self) -> EngineOptions:
        """Options of the engine."""
        return self.loaded.options

    @property
    def plan(self) -> Plan:
        """Subgraphs of the model, with the device of each. A notebook shows them as a table."""
        return self.loaded.plan

    @property
    def scheme(self) -> Scheme:
        """Quantisation of weights and activations."""
        return self.loaded.scheme

    @property
    def folder(self) -> Path:
        """Engine directory, which contains the compiled model."""
        return self.loaded.folder

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ModelError: the checkpoint contains no tokenizer.
        """
        return self.loaded.require_tokenizer()

    @property
    def context_length(self) -> int:
        """Maximum number of tokens in the context of a session."""
        return self.loaded.context_length

    @property
    def chunk_length(self) -> int:
        """Maximum number of tokens of a chunk."""
        return self.loaded.chunk_length

    @property
    def attention_math(self) -> AttentionMath:
        """Arithmetic of attention on the CPU; if the option is "auto", the arithmetic that was chosen."""
        return self.loaded.attention_math

    @property
    def cache_dtype(self) -> CacheDtype:
        """Data type of keys and values in the caches."""
        return self.loaded.cache_dtype

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return self.loaded.adapters.names

    def load_adapter(self, path: str | os.PathLike[str], *, name: str | None = None, scale: float = 1.0) -> str:
        """Load a LoRA adapter, which sessions then choose by its name. The engine needs the option `adapters`.

        Args:
            path: a folder of PEFT, or a GGUF file.
            name: the name; by default that of the folder or file, without its suffix.
            scale: factor of the adapter's products, in addition to the adapter's own scale.

        Returns:
            The name.

        Raises:
            ConfigError: the engine takes no adapters, the name is in use, or the scale is not a finite number.
            ModelError: the adapter is damaged, or belongs to another model.
            UnsupportedModelError: the adapter uses a feature that is not supported.
        """
        self.loaded.check_open()
        return self.loaded.adapters.load(path, name, scale)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Open sessions keep it, and its memory is freed with the last of them.

        Raises:
            ConfigError: no adapter has this name.
        """
        self.loaded.adapters.unload(name)

    def session(self, *, cache_salt: str | None = None, adapter: str | None = None) -> Session:
        """Open a new, empty session.

        Args:
            adapter: name of a loaded adapter; None for the model alone.
            cache_salt: a string that separates users of the prefix cache. The session shares prefixes only with
                sessions that use the same salt. Sessions without a salt (None) share prefixes with each other.

        Raises:
            ClosedError: the engine is closed.
            BusyError: the memory for caches is exhausted (`EngineOptions.cache_memory`), or requests wait for it; on a
                served engine also if the server's maximum number of sequences is in progress.
            ConfigError: the salt is not a string, or is empty; or no adapter has this name.
        """
        salt, chosen = checked_salt(cache_salt), self.loaded.adapters.find(adapter)
        self.loaded.check_open()
        state = self.loaded.admission.open(self.loaded.make_state)
        return Session(self.loaded, state, cache_salt=salt, adapter=chosen)

    async def asession(self, *, cache_salt: str | None = None, adapter: str | None = None) -> Session:
        """Open a session like `session`, but wait until there is room for it, in order of arrival.

        Raise BusyError if the queue is full (`EngineOptions.queue`).
        """
        salt, chosen = checked_salt(cache_salt), self.loaded.adapters.find(adapter)
        self.loaded.check_open()
        state = await self.loaded.admission.await_room(self.loaded.make_state)
        return Session(self.loaded, state, cache_salt=salt, adapter=chosen)

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: str,
        *,
        max_sessions: int = ...,
        cache_salt: str | None = ...,
        adapter: str | None = ...,
        **options: Unpack[GenerationOptions],
    ) -> str: ...
    @overload
    def generate(
        self,
        prompts: Prompts,
        *,
        max_sessions: int = ...,
        cache_salt: str | None = ...,
        adapter: str | None = ...,
        **options: Unpack[GenerationOptions],
    ) -> list[str]: ...
    @shows_generation_options
    def generate(
        self,
        prompts: str | Prompts,
        *,
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> str | list[str]:
        """Answer prompts, many at a time.

        Args:
            prompts: one text, or a list of prompts, which are texts or lists of token ids as for `Session.prefill`.
            max_sessions: maximum number of prompts in progress; the memory for caches may lower it.
            cache_salt, adapter: see `Engine.session`.
            options: `max_new_tokens`, `stop`, `temperature` and others; see `Session.generate`.

        Returns:
            The answer, or for a list of prompts a list of answers in the same order.

        Raises:
            ChunkrtError: an error of `Session.prefill` or `Session.generate`. No answer is returned in this case.
        """
        several = [prompts] if isinstance(prompts, str) else listed("prompts", prompts)
        texts = _texts(self._answers(several, max_sessions, cache_salt, adapter, options), len(several))
        return texts[0] if isinstance(prompts, str) else texts

    @overload
    def chat(
        self,
        messages: Chat,
        *,
        stream: Literal[False] = ...,
        template_options: Mapping[str, Any] | None = ...,
        max_sessions: int = ...,
        cache_salt: str | None = ...,
        adapter: str | None = ...,
        **options: Unpack[GenerationOptions],
    ) -> str: ...
    @overload
    def chat(
        self,
        messages: Sequence[Chat],
        *,
        stream: Literal[False] = ...,
        template_options: Mapping[str, Any] | None = ...,
        max_sessions: int = ...,
        cache_salt: str | None = ...,
        adapter: str | None = ...,
        **options: Unpack[GenerationOptions],
    ) -> list[str]: ...
    @overload
    def chat(
        self,
        messages: Chat,
        *,
        stream: Literal[True],
        template_options: Mapping[str, Any] | None = ...,
        max_sessions: int = ...,
        cache_salt: str | None = ...,
        adapter: str | None = ...,
        **options: Unpack[GenerationOptions],
    ) -> Iterator[Piece]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Chat],
        *,
        stream: Literal[True],
        template_options: Mapping[str, Any] | None = ...,
        max_sessions: int = ...,
        cache_salt: str | None = ...,
        adapter: str | None = ...,
        **options: Unpack[GenerationOptions],
    ) -> Iterator[tuple[int, Piece]]: ...
    @shows_generation_options
    def chat(
        self,
        messages: Chat | Sequence[Chat],
        *,
        stream: bool = False,
        template_options: Mapping[str, Any] | None = None,
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> str | list[str] | Iterator[Piece] | Iterator[tuple[int, Piece]]:
        """Answer a chat, or several chats at a time.

        Args:
            messages: mappings with "role" and "content", for example [{"role": "user", "content": "Hello"}]; or a list
                of such lists, one for each chat.
            stream: True to yield pieces as soon as they are generated.
            template_options: additional variables of the chat template, for example {"enable_thinking": False}.
            max_sessions: maximum number of chats in progress; the memory for caches may lower it.
            cache_salt, adapter: see `Engine.session`.
            options: `max_new_tokens`, `stop`, `temperature` and others; see `Session.generate`.

        Returns:
            The answer, or for several chats a list of answers in the same order. With `stream` an iterator over the
            pieces of the answer, or for several chats over pairs of the index of a chat and a piece.

        Raises:
            ConfigError: the messages or options are malformed.
            ModelError: the model has no chat template, or its template rejects them.
        """
        if not isinstance(stream, bool):
            raise ConfigError(f"stream is {stream!r:.80}, expected True or False")
        tokenizer, chats, is_single = self.tokenizer, _as_chats(messages), _is_chat(messages)
        tokens = [tokenizer.encode_chat(chat, template_options=template_options) for chat in chats]
        pieces = self._answers(tokens, max_sessions, cache_salt, adapter, options, "stream", "template_options")
        if stream:
            return (piece for _, piece in pieces) if is_single else pieces
        texts = _texts(pieces, len(tokens))
        return texts[0] if is_single else texts

    @shows_generation_options
    def stream(
        self,
        prompts: Prompts,
        *,
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Iterator[tuple[int, Piece]]:
        """Answer prompts like `generate`, and yield each piece as soon as it is generated, with the index of its
        prompt.
        """
        if isinstance(prompts, str):
            raise ConfigError(
                "prompts is a single text, expected a list; pass a list of texts, or pass the text to generate"
            )
        return self._answers(listed("prompts", prompts), max_sessions, cache_salt, adapter, options)

    def _answers(
        self,
        prompts: Prompts,
        max_sessions: int,
        cache_salt: str | None,
        adapter: str | None,
        options: GenerationOptions,
        *others: str,
    ) -> Iterator[tuple[int, Piece]]:
        """Check the options, and answer prompts; `others` are further keywords of the method."""
        read_generation_options(options, "max_sessions", "cache_salt", "adapter", *others)

        def answering(session: Session, index: int) -> Iterator[Piece]:
            return answer(session, prompts[index], options)

        return self._in_sessions(len(prompts), answering, max_sessions, cache_salt, adapter)

    def score(
        self,
        pairs: Sequence[tuple[str, str] | tuple[Sequence[int], Sequence[int]]],
        *,
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> list[Score]:
        """Compute the log-probabilities of continuations after their contexts, many at a time.

        Args:
            pairs: pairs of a context and its continuation, both as texts or both as token ids. Texts are tokenised as
                in lm-evaluation-harness. If several pairs have the same context, it is run once.
            max_sessions: maximum number of contexts in progress; the memory for caches may lower it.
            cache_salt, adapter: see `Engine.session`.

        Returns:
            A list with the result of `Session.score` for each pair, in the same order.

        Raises:
            ConfigError: a context or continuation is empty, or both together exceed the context length.
            BackendError: a subgraph failed.
        """
        found = dict(self.scores(pairs, max_sessions=max_sessions, cache_salt=cache_salt, adapter=adapter))
        return [found[index] for index in range(len(found))]

    def scores(
        self,
        pairs: Sequence[tuple[str, str] | tuple[Sequence[int], Sequence[int]]],
        *,
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
        adapter: str | None = None,
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
        ran = _Beginnings()

        def scoring(session: Session, index: int) -> Iterator[Score]:
            for pair in groups[index]:
                yield session.score(*tokens[pair])

        def may_begin(index: int) -> bool:
            """Return False if a context in progress has the same beginning, because the prefix cache will contain the
            shared tokens afterwards. Tokens that the cache already contains do not count.
            """
            context = contexts[index]
            least = max(len(context) // 2, ran.num_known(context) + LEAST_AWAITED)
            if self.loaded.prefix_cache is not None and any(
                num_shared(context, contexts[other]) >= least for other in beginning - {index}
            ):
                return False
            beginning.add(index)
            return True

        for index, score in self._in_sessions(len(groups), scoring, max_sessions, cache_salt, adapter, may_begin):
            if index in beginning:
                beginning.discard(index)
                ran.add(contexts[index])
            yield next(left[index]), score

    def embed(
        self,
        texts: str | Prompts,
        *,
        pooling: Pooling | None = None,
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Float32:
        """Compute the embeddings of texts from their hidden states after the last norm, many at a time.

        Args:
            texts: one text, or a list of texts or lists of token ids. The special tokens that the model expects are
                added to texts; token ids are used unchanged.
            pooling: "last" for the hidden state of the last token, "mean" for the mean of all hidden states, None for
                the choice in the model's files. Embeddings of a model that was not trained for embeddings are not
                reliable.
            max_sessions: maximum number of texts in progress; the memory for caches may lower it.
            cache_salt, adapter: see `Engine.session`.

        Returns:
            float32 [N, H], or [H] for one text. Every embedding has length 1.

        Raises:
            ConfigError: a text is empty or exceeds the context length, the scheme rotates hidden states, or `pooling`
                is None and the model's files do not name one.
            BackendError: a subgraph failed.
        """
        if pooling is None and self.loaded.tokenizer is not None:
            pooling = self.loaded.tokenizer.settings.pooling
        if pooling is None:
            raise ConfigError("the model's files do not name a pooling for embeddings; pass pooling='last' or 'mean'")
        if not isinstance(pooling, str):
            raise ConfigError(f"pooling is {pooling!r:.80}, expected one of: {', '.join(get_args(Pooling))}")
        if pooling not in get_args(Pooling):
            raise unknown_name("pooling", pooling, get_args(Pooling))
        several = [texts] if isinstance(texts, str) else listed("texts", texts)
        if not several:
            raise ConfigError("texts is empty; pass at least one text")

        def embedding(session: Session, index: int) -> Iterator[Float32]:
            text = several[index]
            tokens = self.tokenizer.encode_for_embedding(text) if isinstance(text, str) else as_token_ids(text)
            if len(tokens) > self.context_length:  # even if the context shifts
                raise ConfigError(f"a text of {len(tokens)} tokens does not fit the context of {self.context_length}")
            result = session.prefill(tokens, logits="hidden")
            assert result.hidden is not None
            yield pooled(result.hidden, pooling)

        rows = dict(self._in_sessions(len(several), embedding, max_sessions, cache_salt, adapter))
        return rows[0] if isinstance(texts, str) else np.stack([rows[index] for index in range(len(several))])

    def _in_sessions(
        self,
        number: int,
        work: Callable[[Session, int], Iterator[Result]],
        most: int,
        cache_salt: str | None,
        adapter: str | None,
        may_begin: Callable[[int], bool] = lambda index: True,
    ) -> Iterator[tuple[int, Result]]:
        """Do work in sessions; see `in_sessions`. A part begins as soon as `may_begin` allows it."""
        if require_whole("max_sessions", most) < 1:
            raise ConfigError(f"max_sessions is {most}, expected at least 1")
        salt, chosen = checked_salt(cache_salt), self.loaded.adapters.find(adapter)

        def open_session(index: int, waits: bool) -> Session | None:
            if not may_begin(index):
                return None
            if waits:
                state = self.loaded.admission.wait(self.loaded.make_state)
                return Session(self.loaded, state, cache_salt=salt, adapter=chosen)
            with suppress(BusyError):
                self.loaded.check_open()
                state = self.loaded.admission.open(self.loaded.make_state)
                return Session(self.loaded, state, cache_salt=salt, adapter=chosen)
            return None

        self.loaded.check_ready()
        scheduler = self.loaded.scheduler
        return in_sessions(number, open_session, work, 1 if scheduler.takes_turns else most, scheduler)

    def load_session(
        self, path: str | os.PathLike[str], *, cache_salt: str | None = None, adapter: str | None = None
    ) -> Session:
        """Open a session with the contents of a file that `Session.save` wrote. For `cache_salt` and `adapter`, see
        `session`.

        Raises:
            ClosedError, BusyError: see `session`.
            ConfigError: the engine is one of several ranks.
            ModelError: the file is missing, damaged, or does not fit; see `Session.load`.
        """
        session = self.session(cache_salt=cache_salt, adapter=adapter)
        try:
            session.load(path)
        except BaseException:
            session.close()
            raise
        return session

    def stats(self) -> EngineStats:
        """Return the engine's current activity and memory."""
        return self.loaded.stats()

    def close(self) -> None:
        """Release the executables. Sessions cannot be used afterwards.

        Runs in other threads complete the chunks that have begun, and then raise ClosedError. Repeated calls are
        allowed. In a forked process the method has no effect.
        """
        self.loaded.close()

    def __repr__(self) -> str:
        """Return the model's name with its scheme, backend and lengths."""
        loaded = self.loaded
        how = f"scheme {self.scheme.name}, on {loaded.npu_backend.name}, chunks of {self.chunk_length}"
        name, end = loaded.manifest.model, ", closed" * loaded.is_closed
        return f"Engine({name!r}, {how}, context of {self.context_length}{end})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode_pair(self, pair: tuple[str | Sequence[int], str | Sequence[int]]) -> tuple[list[int], list[int]]:
        if isinstance(pair, str) or len(parts := listed("a pair", pair)) != 2:
            raise ConfigError(f"a pair is {pair!r}, expected a context and its continuation")
        context, continuation = parts
        if isinstance(context, str) and isinstance(continuation, str):
            return encode_pair(self.tokenizer, context, continuation)
        return as_token_ids(context), as_token_ids(continuation)


def _texts(pieces: Iterator[tuple[int, Piece]], number: int) -> list[str]:
    """Return the texts of a number of answers."""
    parts: list[list[str]] = [[] for _ in range(number)]
    for index, piece in pieces:
        parts[index].append(piece.text)
    return ["".join(part) for part in parts]


def _is_chat(messages: object) -> bool:
    """Return False for several chats, which are a list whose items are lists."""
    return not (isinstance(messages, Sequence) and messages and isinstance(messages[0], list | tuple))


def _as_chats(messages: Any) -> list[Chat]:
    """Return the chats of one or several chats. Raise ConfigError if an item of several chats is not a list."""
    if _is_chat(messages):
        return [messages]
    for index, chat in enumerate(messages):
        if not isinstance(chat, list | tuple):
            raise ConfigError(f"messages: item {index} is of type {type(chat).__name__}, expected a list like item 0")
    return list(messages)
