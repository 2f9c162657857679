"""The prefix cache: after any earlier prefills a session gets the same bits as without the cache."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest
from fake_backend import wait_for, wait_until
from fixture_checkpoints import NAMES, ONE_OF_EACH_STATE, checkpoint
from states import make_state

import chunkrt
from chunkrt.backends.fallback import NpuHealth
from chunkrt.engine.engine import Engine
from chunkrt.engine.prefix_cache.cache import PrefixCache
from chunkrt.engine.prefix_cache.folder import entries
from chunkrt.engine.prefix_cache.opening import open_cache
from chunkrt.errors import ConfigError, DeviceLostError
from chunkrt.runtime.prefix import Prefix
from chunkrt.runtime.request import Request
from chunkrt.runtime.state import State

CONTEXT = 120
LENGTHS = (8, 32, 40)
"""Chunk lengths."""
SMALL, LARGE = 200_000, 10**8
"""Limits in bytes: with the first, most prefixes are evicted before they are needed."""
CACHES_ONLY, WINDOW, CONVOLUTION, DELTA_RULE = "llama_gqa", "mistral_window_5", "lfm2", "qwen3_next"
MAMBA, MAMBA_ALONE = "bamba", "mamba2"
LEARNED_POSITIONS = ("gpt2", "gpt_bigcode", "opt")
"""Beginnings of the names of decoders whose context cannot shift."""


def load(name: str, chunk_length: int, **options: object) -> Engine:
    options = {"npu": "native", "scheme": "w8a8-dynamic", "context_length": CONTEXT, "threads": 1, **options}
    return chunkrt.load(checkpoint(name), chunk_length=chunk_length, **options)


class Prompts:
    """A random tree of prompts: most begin like an earlier one."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.random, self._vocab_size = Random(seed), vocab_size
        self.known: list[list[int]] = [self._tokens(100)]

    def next(self) -> list[int]:
        begin = self.random.choice(self.known)
        prompt = begin[: self.random.randint(0, len(begin))] + self._tokens(self.random.randint(1, 50))
        self.known.append(prompt[: CONTEXT - 20])
        return self.known[-1]

    def _tokens(self, number: int) -> list[int]:
        return [self.random.randrange(self._vocab_size) for _ in range(number)]


def follow_story(seed: int, cached: Engine, plain: Engine, prompts: list[list[int]]) -> int:
    """Make the same calls on two engines, compare the bits, and return the number of tokens from the first one's
    cache."""
    random, num_cached = Random(seed), 0
    for prompt in prompts:
        with cached.session() as session, plain.session() as expected:
            parted = random.choice([0, 0, random.randrange(len(prompt))])
            for part in filter(None, (prompt[:parted], prompt[parted:])):
                logits = random.choice(["last", "last", "all", "none"]) if part == prompt[parted:] else "last"
                found, truth = session.prefill(part, logits=logits), expected.prefill(part, logits=logits)
                num_cached += found.num_cached
                if logits != "none":
                    np.testing.assert_array_equal(found.logits, truth.logits, err_msg=f"{found.num_cached} cached")
            if random.random() < 0.5:
                new = random.randint(1, 8)
                answers = [
                    [piece.token_id for piece in one.generate(max_new_tokens=new)] for one in (session, expected)
                ]
                assert answers[0] == answers[1]
            if random.random() < 0.3:
                back = random.randrange(session.position)
                for one in (session, expected):
                    one.rewind(back)
                again = prompt[back : back + 20] or [1]
                np.testing.assert_array_equal(session.prefill(again).logits, expected.prefill(again).logits)
            if random.random() < 0.3:
                with session.fork() as fork, expected.fork() as expected_fork:
                    again = prompt[:10]
                    np.testing.assert_array_equal(fork.prefill(again).logits, expected_fork.prefill(again).logits)
    return num_cached


@pytest.mark.sampled(every=3, name=ONE_OF_EACH_STATE)
@pytest.mark.parametrize("limit", [SMALL, LARGE])
@pytest.mark.parametrize("name", NAMES)
def test_random_trees_of_prompts_give_the_same_bits(name: str, limit: int) -> None:
    chunk_length = LENGTHS[NAMES.index(name) % 3]
    with (
        load(name, chunk_length, prefix_cache="memory", prefix_cache_memory=limit) as cached,
        load(name, chunk_length) as plain,
    ):
        prompts = Prompts(1, plain.plan.vocab_size)
        for seed in range(4):
            follow_story(seed, cached, plain, [prompts.next() for _ in range(6)])
            assert cached.stats().prefix_bytes <= limit
        assert cached.stats().cached_tokens > 0


TIGHT = {
    "memory": (120_000, LARGE),
    "disk": (LARGE, 40_000),
    "both": (40_000, 40_000),
    "neither holds anything": (1, 1),
}
"""Bytes in memory and on disk."""


def follow_stories_in_threads(cached: Engine, plain: Engine, prompts: Prompts, number: int, seed: int) -> None:
    """Request several at once on the first engine, whose sessions share chunks; on the other each call is computed
    alone."""
    stories = [[prompts.next() for _ in range(4)] for _ in range(number)]
    with ThreadPoolExecutor(number) as pool:
        ended = [pool.submit(follow_story, seed + i, cached, plain, story) for i, story in enumerate(stories)]
        for one in ended:
            one.result()


def follow_stories_on_disk(name: str, chunk_length: int, tight: str, folder: Path, rounds: int) -> None:
    """Request each round on an engine of its own, like another process."""
    memory, disk = TIGHT[tight]
    budgets = {"prefix_cache": folder, "prefix_cache_memory": memory, "prefix_cache_disk": disk}
    with load(name, chunk_length) as plain:
        prompts, run, alone = Prompts(8, plain.plan.vocab_size), plain.loaded.run, threading.Lock()

        def run_alone(wanted: Request) -> Request:
            with alone:
                return run(wanted)

        plain.loaded.run = run_alone  # type: ignore[method-assign]
        long = prompts.known[0]
        for seed in range(rounds):
            with load(name, chunk_length, threads=2, **budgets) as cached:
                found = cached.session().prefill(long)
                np.testing.assert_array_equal(found.logits, plain.session().prefill(long).logits)
                if seed and tight == "memory":
                    assert found.num_cached > 0
                if tight == "neither holds anything":
                    assert found.num_cached == 0
                follow_stories_in_threads(cached, plain, prompts, 3, 10 * seed)
                assert cached.stats().prefix_bytes <= memory
                assert sum(stat.st_size for stat in entries(folder).values()) <= disk
            files = entries(folder)
            assert sum(stat.st_size for stat in files.values()) <= disk
            assert bool(files) == (disk == LARGE) or 1 < disk < LARGE


@pytest.mark.sampled(every=5, name=ONE_OF_EACH_STATE)
@pytest.mark.parametrize("tight", TIGHT)
@pytest.mark.parametrize("name", NAMES)
def test_random_trees_in_threads_with_tight_budgets_in_memory_and_on_disk(
    name: str, tight: str, tmp_path: Path
) -> None:
    follow_stories_on_disk(name, LENGTHS[NAMES.index(name) % 3], tight, tmp_path, 2)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("npu", ["reference", "onnxrt"])
@pytest.mark.parametrize("name", [CACHES_ONLY, WINDOW, CONVOLUTION, DELTA_RULE, MAMBA, MAMBA_ALONE])
def test_other_backends_hit_at_chunk_boundaries(name: str, npu: str) -> None:
    options = {"npu": npu, "scheme": "float"}
    with load(name, 8, prefix_cache="memory", **options) as cached, load(name, 8, **options) as plain:
        prompts = Prompts(2, plain.plan.vocab_size)
        assert follow_story(1, cached, plain, [prompts.next() for _ in range(12)]) > 0
        tokens = prompts.known[0][:30]
        cached.session().prefill(tokens)
        assert cached.session().prefill(tokens).num_cached == 24


@pytest.mark.parametrize(
    ("decode_on", "tokens_differ"), [("cpu", True), pytest.param("npu", False, marks=pytest.mark.slow)]
)
def test_prefix_cache_on_an_emulated_npu(decode_on: str, tokens_differ: bool) -> None:
    """The CPU rounds single tokens differently, so the state after them is not kept."""
    pytest.importorskip("onnxruntime_qnn", reason="contexts are compiled by onnxruntime-qnn")
    options = {"npu": "qnn", "scheme": "w8a16", "decode_on": decode_on}
    name = "llama_biased_gguf"
    with load(name, 32, prefix_cache="memory", **options) as cached, load(name, 32, **options) as plain:
        assert cached.loaded.prefix_cache is not None
        assert cached.loaded.prefix_cache.tokens_differ == tokens_differ
        tokens = Prompts(2, plain.plan.vocab_size).known[0]
        for num_cached, prompt in ((0, tokens[:60]), (58, tokens[:60]), (40, [*tokens[:40], *tokens[:9]])):
            with cached.session() as session, plain.session() as expected:
                found = session.prefill(prompt)
                assert found.num_cached == num_cached + (num_cached == 58 and not tokens_differ)
                np.testing.assert_array_equal(found.logits, expected.prefill(prompt).logits)
                said = [[piece.token_id for piece in one.generate(max_new_tokens=3)] for one in (session, expected)]
                assert said[0] == said[1]
                again = list(session.tokens)
        assert cached.session().prefill([*again, 1, 2, 3]).num_cached == 49 + (0 if tokens_differ else 2)


@pytest.mark.parametrize("cache_dtype", ["float32", "float16", "int8"])
def test_prefix_cache_with_types_of_caches(cache_dtype: str) -> None:
    with (
        load(WINDOW, 8, prefix_cache="memory", cache_dtype=cache_dtype) as cached,
        load(WINDOW, 8, cache_dtype=cache_dtype) as plain,
    ):
        prompts = Prompts(3, plain.plan.vocab_size)
        assert follow_story(1, cached, plain, [prompts.next() for _ in range(12)]) > 0


@pytest.mark.parametrize("name", [CACHES_ONLY, WINDOW, CONVOLUTION, MAMBA, MAMBA_ALONE])
def test_turn_of_a_chat_runs_only_its_new_tokens(name: str) -> None:
    """Each turn is in a session of its own, as in a server: earlier turns are not run again."""
    with load(name, 8, prefix_cache="memory") as engine:
        said: list[int] = []
        for turn in range(5):
            said += [(7 * turn + i) % engine.plan.vocab_size for i in range(10)]
            with engine.session() as session:
                result = session.prefill(said)
                assert (result.num_cached, result.num_tokens) == (len(said) - 10 - (turn > 0), 10 + (turn > 0))
                list(session.generate(max_new_tokens=4))
                said = list(session.tokens)


def test_divergence_of_two_prompts_becomes_a_hit_for_the_third() -> None:
    """A recurrent state is not kept everywhere, but after the second prompt at its divergence from the first."""
    with load(DELTA_RULE, 32, prefix_cache="memory") as engine:
        begin = [i % engine.plan.vocab_size for i in range(40)]
        ends = [[i + j for j in range(60)] for i in range(3)]
        assert [engine.session().prefill(begin + end).num_cached for end in ends] == [0, 0, 32]


def test_prefix_cache_with_a_context_that_shifts() -> None:
    """Moved tokens are not a prefix any more; tokens that are prefilled into a new session are."""
    options = {"context_shift": True, "context_length": 40}
    with load(WINDOW, 8, prefix_cache="memory", **options) as cached, load(WINDOW, 8, **options) as plain:
        for number in (30, 60, 38, 90, 30):
            prompt = [(3 * i) % plain.plan.vocab_size for i in range(number)]
            with cached.session() as session, plain.session() as expected:
                for one in (prompt, prompt[:15], [1, 2]):
                    np.testing.assert_array_equal(session.prefill(one).logits, expected.prefill(one).logits)
        assert cached.stats().cached_tokens > 0


class Failing:
    """Makes an engine's runs fail from the n-th on."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run, self.runs_left = engine.loaded.run, 10**9
        monkeypatch.setattr(engine.loaded, "run", self)

    def __call__(self, run: Request) -> Request:
        self.runs_left -= 1
        if self.runs_left < 0:
            raise ConfigError("on purpose")
        return self._run(run)


@pytest.mark.parametrize("name", [CACHES_ONLY, WINDOW, CONVOLUTION, MAMBA, MAMBA_ALONE])
def test_prompt_that_fails_after_a_shift_uses_nothing_from_the_cache(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier contents of the session are exact again, and kept when it is closed."""
    with load(name, 8, prefix_cache="memory", context_shift=True, context_length=40) as engine:
        failing, tokens = Failing(engine, monkeypatch), list(range(30))
        with engine.session() as session:
            session.prefill(tokens)
            failing.runs_left = 2
            with pytest.raises(ConfigError, match="on purpose"):
                session.prefill([*tokens, *tokens, *tokens])
            failing.runs_left = 10**9
            assert session.prefill([7]).num_tokens == 1
        assert engine.session().prefill([*tokens, 7, 8]).num_cached == 31


@pytest.mark.sampled(name=ONE_OF_EACH_STATE)
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(LEARNED_POSITIONS)])
def test_prefix_cache_with_shifts_and_failing_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contents of a session after shifts are not exact, and a failing prompt does not make them exact."""
    options, random = {"context_shift": True, "context_length": 40}, Random(7)
    with load(name, 8, prefix_cache="memory", **options) as cached, load(name, 8, **options) as plain:
        failing = Failing(cached, monkeypatch)
        prompt = [random.randrange(plain.plan.vocab_size) for _ in range(100)]
        for _ in range(12):
            with cached.session() as session, plain.session() as expected:
                for _ in range(4):
                    start = random.choice([0, 0, 3])
                    part = prompt[start : start + random.randint(1, 70)]
                    before, failing.runs_left = session.tokens, random.choice([0, 1, 2, 10**9])
                    try:
                        found = session.prefill(part).logits
                    except ConfigError:
                        assert session.tokens == before
                        continue
                    np.testing.assert_array_equal(found, expected.prefill(part).logits)
                failing.runs_left = 10**9


def test_prompt_too_long_for_the_cache_keeps_its_beginning_there() -> None:
    """Its own first tokens are kept as far as they fit, and the prefix that it continues is not evicted."""
    with load(CACHES_ONLY, 8, prefix_cache="memory") as engine:
        engine.session().prefill(range(64))
        for_64 = engine.stats().prefix_bytes
    limit = for_64 * 5 // 4
    with load(CACHES_ONLY, 8, prefix_cache="memory", prefix_cache_memory=limit) as engine:
        for first in (0, 100, 0):
            prompt = [(first + i) % 128 for i in range(110)]
            engine.session().prefill(prompt[:40])
            engine.session().prefill(prompt)
            assert engine.session().prefill(prompt).num_cached >= 64
            assert engine.stats().prefix_bytes <= limit


def test_prompts_of_equal_length_have_separate_recurrent_tensors() -> None:
    """They diverge within the tokens of one node."""
    with load(CONVOLUTION, 8, prefix_cache="memory") as engine:
        for first in (1, 2):
            prompt = [5, 5, 5, first, 7, 8]
            engine.session().prefill(prompt)
            assert engine.session().prefill([*prompt, 9, 9]).num_cached == len(prompt)


def test_part_lengths_never_leave_a_single_token_that_is_computed_elsewhere() -> None:
    with load(CONVOLUTION, 8) as engine:
        prompt = list(range(20))
        state = make_state(engine)
        for num_known in range(1, 20):
            cache = PrefixCache(1, True, 1, LARGE)
            cache.add(prompt[:num_known], make_state(engine, [*prompt[:num_known], 60], logits="last"))
            lengths = cache.part_lengths(prompt, state)
            assert sum(lengths) == len(prompt)
            assert min(lengths) > 1
            assert len(lengths) > 1 or num_known in (1, 19)


@pytest.mark.parametrize("name", [CACHES_ONLY, WINDOW, CONVOLUTION, DELTA_RULE, MAMBA, MAMBA_ALONE])
def test_failed_prefill_leaves_the_session_unchanged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails after a hit, and in the second part of a split run."""
    with load(name, 8, prefix_cache="memory") as engine, load(name, 8) as plain:
        tokens = [(5 * i) % plain.plan.vocab_size for i in range(100)]
        engine.session().prefill(tokens[:64])
        session, expected = engine.session(), plain.session()
        for one in (session, expected):
            one.prefill(tokens[:8])
        run, num_tokens = engine.loaded.run, list[int]()

        def fails_at_the_end(wanted: Request) -> Request:
            num_tokens.append(wanted.token_ids.size)
            if wanted.wanted == "last":
                raise ConfigError("on purpose")
            return run(wanted)

        with monkeypatch.context() as patch:
            patch.setattr(engine.loaded, "run", fails_at_the_end)
            with pytest.raises(ConfigError, match="on purpose"):
                session.prefill(tokens[8:90])
        assert session.position == 8
        assert len(num_tokens) == (1 if name in (CACHES_ONLY, WINDOW) else 2)
        assert sum(num_tokens) < 82
        found, truth = session.prefill(tokens[50:70]), expected.prefill(tokens[50:70])
        np.testing.assert_array_equal(found.logits, truth.logits)


def test_nothing_is_kept_when_switched_off() -> None:
    with load(CACHES_ONLY, 8, prefix_cache="off") as engine:
        assert [engine.session().prefill(range(1, 60)).num_cached for _ in range(2)] == [0, 0]
        assert engine.stats().prefix_bytes == 0


@pytest.mark.parametrize("value", ["", 3, True])
def test_invalid_place_is_rejected(value: object) -> None:
    with pytest.raises(ConfigError, match="`prefix_cache` is"):
        load(CACHES_ONLY, 8, prefix_cache=value)


def test_ranks_have_no_prefix_cache_and_reject_one() -> None:
    with load(CACHES_ONLY, 8) as engine:
        for place in ("memory", "disk", "/somewhere"):
            engine.loaded.options = replace(engine.options, prefix_cache=place)
            with pytest.raises(ConfigError, match="ranks do not support the prefix cache"):
                open_cache(engine.loaded, has_ranks=True, npu_health=None)
        for place in (None, "off"):
            engine.loaded.options = replace(engine.options, prefix_cache=place)
            assert open_cache(engine.loaded, has_ranks=True, npu_health=None) is None


def test_prefix_cache_is_off_while_the_npu_is_lost() -> None:
    """Results of the NPU differ from those that the CPU computes."""
    restored = threading.Event()
    health = NpuHealth(lambda: wait_for(restored))
    with load(CACHES_ONLY, 8, prefix_cache="memory") as engine:
        engine.loaded.prefix_cache = open_cache(engine.loaded, has_ranks=False, npu_health=health)
        prompt = range(1, 40)
        found = [engine.session().prefill(prompt).num_cached for _ in range(2)]
        health.report(DeviceLostError("gone"), 0, in_background=True)
        found.append(engine.session().prefill(prompt).num_cached)
        restored.set()
        wait_until(lambda: health.state.status == "ok")
        found.append(engine.session().prefill(prompt).num_cached)
        assert found == [0, 38, 0, 38]
    health.close()


def test_prompt_that_the_cpu_computed_in_part_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    health = NpuHealth()
    with load(CACHES_ONLY, 8, prefix_cache="memory") as engine:
        engine.loaded.prefix_cache = open_cache(engine.loaded, has_ranks=False, npu_health=health)
        run, fallbacks = engine.loaded.run, [1, 0, 0]

        def run_with_fallback(request: Request) -> Request:
            if fallbacks.pop(0):
                health.report_fallback()
            return run(request)

        monkeypatch.setattr(engine.loaded, "run", run_with_fallback)
        assert [engine.session().prefill(range(1, 40)).num_cached for _ in range(3)] == [0, 0, 38]


def abandon(engine: Engine, prompt: list[int]) -> None:
    """Leave a session in a generator that only the garbage collector can end."""

    def suspended() -> Iterator[object]:
        with engine.session() as session:
            session.prefill(prompt)
            yield cycle

    cycle: list[object] = []
    generator = suspended()
    next(generator)
    cycle.append(generator)


def test_session_that_is_collected_during_a_search_is_closed_without_a_wait() -> None:
    class Collecting(list[int]):
        """Tokens whose comparison runs the garbage collector."""

        def __getitem__(self, key: object) -> object:
            gc.collect()
            return super().__getitem__(key)  # type: ignore[call-overload]

    with load(CACHES_ONLY, 32, prefix_cache="memory") as engine, engine.session() as session:
        cache = engine.loaded.prefix_cache
        assert cache is not None
        state = make_state(engine)
        abandon(engine, list(range(1, 41)))
        searching = threading.Thread(target=cache.find, args=(Collecting(range(1, 41)), state, 39), daemon=True)
        searching.start()
        searching.join(60)
        assert not searching.is_alive()
        session.prefill(list(range(1, 41)))


def test_session_that_is_collected_late_keeps_its_own_memory() -> None:
    first, second = [3, 5, 7] * 20, [2, 4, 6] * 20
    with load(CACHES_ONLY, 32, prefix_cache="memory") as engine, load(CACHES_ONLY, 32, prefix_cache="off") as plain:
        answers: list[object] = []

        async def answer() -> AsyncIterator[int]:
            async with await engine.asession() as session:
                await session.aprefill(first)
                yield session.position

        async def main() -> None:
            asking = answer()
            await anext(asking)
            answers.append(asking)
            answers.append(answers)
            answers.clear()
            del asking
            gc.collect()
            with engine.session() as session:
                session.prefill(second)
                await asyncio.sleep(0.2)

        asyncio.run(main())
        with engine.session() as session, plain.session() as expected:
            found, truth = session.prefill([*first, 1]), expected.prefill([*first, 1])
            np.testing.assert_array_equal(found.logits, truth.logits)


def test_asynchronous_close_keeps_the_prefix_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    async def main() -> None:
        async with await engine.asession() as session:
            await session.aprefill(list(range(1, 41)))
            async for _ in session.agenerate(max_new_tokens=30, ignore_eos=True):
                pass
            threads.clear()

    with load(CACHES_ONLY, 32, prefix_cache="memory") as engine:
        cache = engine.loaded.prefix_cache
        assert cache is not None
        add = cache.add
        monkeypatch.setattr(cache, "add", lambda *given: (threads.append(threading.get_ident()), add(*given)))
        asyncio.run(main())
    assert threads
    assert threading.get_ident() not in threads


def caches_of(state: State, position: int) -> dict[str, np.ndarray]:
    return {name: array[:, :position].copy() for name, array in state.tensors.items()}


@contextmanager
def engine_that_computed(tokens: list[int]) -> Iterator[tuple[Engine, PrefixCache]]:
    """Yield an engine in which a closed session computed some tokens, and the engine's prefix cache."""
    with load(CACHES_ONLY, 8, prefix_cache="memory", cache_dtype="float32") as engine:
        cache = engine.loaded.prefix_cache
        assert cache is not None
        with engine.session() as session:
            session.prefill(tokens)
        yield engine, cache


def found_prefix(cache: PrefixCache, tokens: list[int], state: State) -> Prefix:
    """Return the prefix of 64 tokens."""
    prefix = cache.find(tokens, state, 64)
    assert prefix is not None
    assert prefix.position == 64
    return prefix


def test_next_session_of_a_conversation_copies_only_changed_pieces() -> None:
    """The memory of a closed session serves the next one; zeros that the test writes there remain if nothing is
    copied."""
    tokens = list(range(1, 71))
    with engine_that_computed(tokens) as (engine, cache):
        state = make_state(engine)
        prefix = found_prefix(cache, tokens, state)
        state.take(prefix)
        expected = caches_of(state, 64)
        for array in state.tensors.values():
            array[:, :48] = 0

        del state, array
        gc.collect()
        state = make_state(engine)  # in the same memory
        state.take(prefix)
        for name, array in caches_of(state, 64).items():
            assert not array[:, :48].any(), name
            np.testing.assert_array_equal(array[:, 48:], expected[name][:, 48:])

        state.rewind(40)
        state.begin(8)  # a run may write from position 40 on, which is in the second piece of 32 positions
        for array in state.tensors.values():
            array[:, 40:] = 5
        state.roll_back()
        state.rewind(0)
        state.take(prefix)
        for name, array in caches_of(state, 64).items():
            assert not array[:, :32].any(), name
            np.testing.assert_array_equal(array[:, 32:], expected[name][:, 32:])

        del state, array
        other = make_state(engine)
        del other
        state = make_state(engine)
        cache.clear()
        del prefix  # the pieces no longer exist, so nothing is known of the contents
        with engine.session() as session:
            session.prefill(tokens)
        state.take(cache.find(tokens, state, 64))
        for name, array in caches_of(state, 64).items():
            np.testing.assert_array_equal(array, expected[name])


def interrupt_at(number: int, function: str, act: Callable[[], object]) -> bool:
    """Call a function, and interrupt it before the given instruction of all calls of `function`. Return True if there
    was such an instruction."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal left
        if frame.f_code.co_name != function:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_interrupt_while_pieces_are_noted_leaves_no_stale_piece() -> None:
    tokens = list(range(1, 71))
    with engine_that_computed(tokens) as (engine, cache):
        state = make_state(engine)
        prefix = found_prefix(cache, tokens, state)
        state.take(prefix)
        expected = caches_of(state, 64)
        number, was_interrupted = 0, True
        while was_interrupted:
            state = State(engine.plan, engine.context_length, "float32", chunk_length=8)
            was_interrupted = interrupt_at(number, "note_piece", partial(state.take, prefix))
            state.rewind(0)
            state.begin(64)
            for array in state.tensors.values():
                array[:, :64] = 5
            state.advance(64)
            state.rewind(0)
            state.take(prefix)
            for name, array in caches_of(state, 64).items():
                np.testing.assert_array_equal(array, expected[name], err_msg=f"{number} {name}")
            number += 1
    assert number > 20


def test_memory_of_a_state_is_not_shared_while_another_state_uses_it() -> None:
    tokens = list(range(1, 71))
    with load(CACHES_ONLY, 8, prefix_cache="memory") as engine:
        logits = []
        with engine.session() as first:
            logits.append(first.prefill(tokens).logits)
            with engine.session() as second, engine.session() as third:
                logits += [one.prefill(tokens).logits for one in (second, third)]
                second.rewind(10)
                second.prefill([5] * 40)
                logits += [one.prefill([9]).logits for one in (first, third)]
        for _ in range(3):
            with engine.session() as session, engine.session() as beside:
                beside.prefill(tokens[:40])
                logits.append(session.prefill(tokens).logits)
                logits.append(session.prefill([9]).logits)
    for found in (*logits[1:3], *logits[5::2]):
        np.testing.assert_array_equal(found, logits[0])
    for found in (logits[4], *logits[6::2]):
        np.testing.assert_array_equal(found, logits[3])
