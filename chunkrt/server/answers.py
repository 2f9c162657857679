"""Answers to prompts: concurrent sessions, and their events in order of arrival."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from chunkrt.engine.generation import Constraint, Piece
from chunkrt.engine.sampling import SamplingOptions
from chunkrt.engine.scoring import TokenLogProbabilities, by_beginning
from chunkrt.engine.session import Session, prompt_log_probabilities
from chunkrt.server.errors import RequestError
from chunkrt.server.service import Service


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Settings of a prompt's choices.

    Attributes:
        max_new_tokens: maximum length of an answer; None for the rest of the context.
        sampling: sampling options of each choice.
        likeliest: number of tokens whose log-probabilities are reported; None for none.
        constraint: function that makes the constraint of a choice.
        echo: if log-probabilities are reported, report those of the prompt, too.
        progress: report the progress of the prompt.
        follows_text: the answer continues the text of the prompt instead of beginning a text.
        cache_salt, adapter: see `Engine.session`.
    """

    max_new_tokens: int | None
    sampling: Sequence[SamplingOptions]
    stop: Sequence[str] = ()
    likeliest: int | None = None
    constraint: Callable[[], Constraint] | None = None
    echo: bool = False
    progress: bool = False
    follows_text: bool = False
    cache_salt: str | None = None
    adapter: str | None = None

    @property
    def is_of_prompts(self) -> bool:
        """True if the request asks only for log-probabilities of prompts."""
        return self.echo and self.likeliest is not None and self.max_new_tokens == 0


@dataclass(frozen=True)
class Admitted:
    """Event: the request has been accepted. It runs, or waits in the queue."""


@dataclass(frozen=True, kw_only=True)
class PromptProgress:
    """Event: `num_done` of `num_tokens` tokens of a prompt have been run."""

    num_done: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """Event: a prompt has been run. If it is echoed, `log_probabilities` are those of its tokens from the second on."""

    prompt: int
    num_tokens: int
    num_cached: int
    log_probabilities: Sequence[TokenLogProbabilities] = ()


@dataclass(frozen=True, kw_only=True)
class Said:
    """Event: a piece of a choice. Choices are numbered across all prompts."""

    choice: int
    piece: Piece


Event = Admitted | PromptProgress | Prefilled | Said


async def answers(service: Service, prompts: Sequence[Sequence[int]], wanted: Wanted) -> AsyncGenerator[Event]:
    """Answer prompts, all at the same time.

    The first event, `Admitted`, comes when the request runs or waits in the queue. Closing the iterator ends all
    answers at the next chunk.

    Raises:
        RequestError: a prompt does not fit the context.
        BusyError: the queue is full.
        ClosedError: the server shuts down.
        ChunkrtError: a sequence failed; the other sequences are ended.
    """
    for prompt in prompts:
        check_fits(service, len(prompt), wanted.max_new_tokens)
    num_choices = 1 if wanted.max_new_tokens == 0 else len(wanted.sampling)  # without new tokens, nothing is copied
    events: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()
    tell = events.put_nowait
    if wanted.is_of_prompts:
        groups = [{index: prompts[index] for index in indices} for indices in by_beginning(prompts)]
        parts = [partial(_tell, service, group, wanted, tell) for group in groups]
    else:
        parts = [partial(_answer, service, index, prompt, wanted, tell) for index, prompt in enumerate(prompts)]

    async def answer_all() -> None:
        try:
            await service.in_sessions(
                parts,
                num_choices=num_choices,
                cache_salt=wanted.cache_salt,
                adapter=wanted.adapter,
                on_entry=lambda: tell(Admitted()),
            )
        except Exception as error:
            tell(error)
        else:
            tell(None)

    task = asyncio.create_task(answer_all())
    try:
        while (event := await events.get()) is not None:
            if isinstance(event, BaseException):
                try:
                    raise event
                finally:
                    del event  # the traceback of the error refers to this frame, and the frame refers to states
            yield event
    finally:
        await end([task])


async def end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended. A task keeps its exception for the code that awaits the task
    later."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        # Until its exception is retrieved, a task keeps the exception, the frames of the traceback, and their states.
        if task.cancelled():
            with suppress(asyncio.CancelledError):
                task.result()


def check_fits(service: Service, num_tokens: int, max_new_tokens: int | None) -> None:
    """Raise RequestError if a prompt and its answer do not fit the context."""
    length = service.engine.context_length
    if not num_tokens:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    if service.engine.options.context_shift:
        return
    if num_tokens > length:  # even an answer of 0 tokens would not fit
        raise RequestError(
            f"this model's context holds {length} tokens, and the prompt has {num_tokens}; shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    if num_tokens + (max_new_tokens or 1) > length + 1:
        raise RequestError(
            f"this model's context holds {length} tokens, but the prompt has {num_tokens} and the answer may have "
            f"{max_new_tokens}; shorten the prompt or lower max_tokens (-1: as many as the context holds)",
            param="max_tokens",
            code="context_length_exceeded",
        )


async def _answer(
    service: Service, index: int, prompt: Sequence[int], wanted: Wanted, tell: Callable[[Event], None], first: Session
) -> None:
    """Answer one prompt: run it once, and continue each choice from a copy of its state."""
    async with AsyncExitStack() as stack:
        begin = time.perf_counter()
        prefilled = await _prefill(service, first, index, prompt, wanted, tell)
        service.metrics.first_token.observe(time.perf_counter() - begin)
        sessions = [first]
        if wanted.max_new_tokens != 0:
            for _ in range(1, len(wanted.sampling)):
                sessions.append(await stack.enter_async_context(await first.afork()))
        tell(prefilled)  # after the copies have succeeded
        if wanted.max_new_tokens == 0:
            return
        async with asyncio.TaskGroup() as group:
            for number, session in enumerate(sessions):
                group.create_task(_say(service, session, index * len(wanted.sampling) + number, number, wanted, tell))


async def _tell(
    service: Service,
    prompts: Mapping[int, Sequence[int]],
    wanted: Wanted,
    tell: Callable[[Event], None],
    session: Session,
) -> None:
    """Score prompts with a common prefix one after the other in one session, which runs the prefix only once."""
    assert wanted.likeliest is not None
    told: Sequence[TokenLogProbabilities] = ()
    for index, prompt in prompts.items():
        told, num_cached = await prompt_log_probabilities(session, prompt, wanted.likeliest, told)
        _count(service, prompt, num_cached)
        tell(Prefilled(prompt=index, num_tokens=len(prompt), num_cached=num_cached, log_probabilities=told))


async def _prefill(
    service: Service,
    session: Session,
    index: int,
    prompt: Sequence[int],
    wanted: Wanted,
    tell: Callable[[Event], None],
) -> Prefilled:
    loop = asyncio.get_running_loop()

    def progress(what: str, num_done: int, num_tokens: int) -> None:
        if num_tokens:
            loop.call_soon_threadsafe(tell, PromptProgress(num_done=num_done, num_tokens=num_tokens))

    told: Sequence[TokenLogProbabilities] = ()
    if wanted.echo and wanted.likeliest is not None:
        told, num_cached = await prompt_log_probabilities(session, prompt, wanted.likeliest)
    else:
        result = await session.aprefill(
            prompt, progress=progress if wanted.progress else None, follows_text=wanted.follows_text
        )
        num_cached = result.num_cached
    _count(service, prompt, num_cached)
    return Prefilled(prompt=index, num_tokens=len(prompt), num_cached=num_cached, log_probabilities=told)


def _count(service: Service, prompt: Sequence[int], num_cached: int) -> None:
    service.metrics.prompt_tokens.inc(len(prompt))
    service.metrics.cached_tokens.inc(num_cached)


async def _say(
    service: Service, session: Session, choice: int, number: int, wanted: Wanted, tell: Callable[[Event], None]
) -> None:
    last = time.perf_counter()
    pieces = session.agenerate(
        max_new_tokens=wanted.max_new_tokens or service.engine.context_length,
        sampling=wanted.sampling[number],
        stop=wanted.stop,
        log_probabilities=wanted.likeliest,
        constraint=await service.beside(wanted.constraint) if wanted.constraint else None,
    )
    async for piece in pieces:
        now = time.perf_counter()
        service.metrics.token_gap.observe(now - last)
        service.metrics.generated_tokens.inc()
        last = now
        tell(Said(choice=choice, piece=piece))
