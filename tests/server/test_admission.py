"""Admission of requests: one queue for places and for the memory of caches."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from collector import without_collector
from server_of_tests import Raw, occupancy, serving, wait_until
from states import state_bytes

import chunkrt
from chunkrt.errors import BusyError, ClosedError
from chunkrt.server.service import ServerOptions, Service

BODY = {"prompt": "hello there", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
STREAM = BODY | {"stream": True}


def post(url, **body):
    return httpx.post(f"{url}/v1/completions", json=BODY | body, timeout=60)


def texts(answer):
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


@pytest.fixture(scope="module")
def tight(chat_folder, engine):
    """An engine with memory for the caches of three sequences."""
    with chunkrt.load(chat_folder, npu="native", chunk_length=8, threads=2, cache_memory=3 * state_bytes(engine)) as it:
        yield it


def test_choices_wait_until_the_caches_of_all_fit(engine, tight):
    with serving(engine) as (_, url):
        expected = texts(post(url, n=2))
    with serving(tight) as (_, url), ThreadPoolExecutor(4) as threads:
        with tight.loaded.scheduler.held():
            answers = [threads.submit(post, url, n=2)]
            wait_until(lambda: occupancy(url) == (2, 0))
            answers.append(threads.submit(post, url, n=2))
            wait_until(lambda: occupancy(url) == (2, 1))  # one place is free, which is not enough
            answers.append(threads.submit(post, url))
            wait_until(lambda: occupancy(url) == (2, 2))
        assert [texts(answer.result()) for answer in answers] == [expected, expected, expected[:1]]
        wait_until(lambda: occupancy(url) == (0, 0))


@pytest.mark.parametrize("stream", [False, True])
def test_choices_that_never_fit_are_refused_at_once(tight, stream):
    with serving(tight) as (_, url), tight.loaded.scheduler.held():
        answer = post(url, n=4, stream=stream)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        text = "n is 4, but at most 3 sequences run at a time (--max-sessions, --cache-memory)"
        assert answer.json()["error"]["message"] == text
        assert occupancy(url) == (0, 0)


def test_choices_without_new_tokens_need_one_place(tight):
    with serving(tight) as (_, url):
        assert texts(post(url, n=4, max_tokens=0)) == [""] * 4


@pytest.mark.parametrize("max_sessions", [3, 16])
def test_request_waits_in_one_queue(tight, max_sessions):
    with serving(tight, max_sessions=max_sessions, queue=2) as (_, url):
        with tight.loaded.scheduler.held():
            raws = [Raw(url, STREAM) for _ in range(5)]
            for raw in raws:
                raw.read_until(b": ping\n\n")
            assert occupancy(url) == (3, 2)
            assert tight.stats().waiting_sessions == 2
            assert b"chunkrt_waiting_requests 2.0" in httpx.get(f"{url}/metrics").content
            for body in (BODY, STREAM):
                answer = httpx.post(f"{url}/v1/completions", json=body)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                message = answer.json()["error"]["message"]
                assert message.startswith("3 of 3 places for sequences (`cache_memory`) and 2 of ")
        for raw in raws:
            assert b"data: [DONE]" in raw.read_all()


def test_client_that_disconnects_while_it_waits_frees_its_place_in_the_queue(engine):
    with serving(engine, max_sessions=1, queue=1) as (_, url):
        with engine.loaded.scheduler.held():
            raws = [Raw(url, STREAM)]
            wait_until(lambda: occupancy(url) == (1, 0))
            for _ in range(3):
                raws.append(Raw(url, STREAM))
                raws[-1].read_until(b": ping")
                assert occupancy(url) == (1, 1)
                raws.pop().close()
                wait_until(lambda: occupancy(url) == (1, 0))
        assert b"data: [DONE]" in raws[0].read_all()
        wait_until(lambda: occupancy(url) == (0, 0))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY | {"prompt": ["hello", "there", "you"]}),
        ("/v1/completions", BODY | {"prompt": ["hello", "there"], "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/v1/embeddings", {"input": ["hello", "there", "you"]}),
        ("/v1/score", {"text_1": ["hello", "there", "you"], "text_2": ["a", "b", "c"]}),
    ],
)
def test_request_with_many_prompts_counts_as_one_waiting(engine, path, body):
    with serving(engine, max_sessions=1, queue=2, embeddings="last") as (_, url), ThreadPoolExecutor(2) as threads:
        with engine.loaded.scheduler.held():
            many = threads.submit(httpx.post, f"{url}{path}", json=body, timeout=60)
            wait_until(lambda: occupancy(url) == (1, 1))
            one = threads.submit(post, url)
            wait_until(lambda: occupancy(url) == (1, 2))
            assert post(url).status_code == 503
        assert (many.result().status_code, one.result().status_code) == (200, 200)
        wait_until(lambda: occupancy(url) == (0, 0))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failing", ["fork_state", "make_sampler"])
def test_failed_choices_keep_no_places(engine, monkeypatch, failing, stream):
    """A reference cycle would keep the places until a garbage collection, so later requests would wait forever."""

    def fail(_):
        raise BusyError("made to fail")

    with serving(engine, max_sessions=2) as (_, url), without_collector():
        with monkeypatch.context() as patch:
            patch.setattr(engine.loaded, failing, fail)
            for prompt in ("hello", ["hello", "there"]):
                for _ in range(2):
                    assert "made to fail" in post(url, prompt=prompt, n=2, stream=stream).text
        assert len(texts(post(url, n=2))) == 2
        wait_until(lambda: occupancy(url) == (0, 0))


def in_loop(engine, test, **options):
    """Run a test of a service in an event loop."""
    asyncio.run(asyncio.wait_for(test(Service(engine, "toy", ServerOptions(**options))), 60))
    assert engine.stats().sessions == 0


async def settle():
    for _ in range(20):
        await asyncio.sleep(0.001)


def begin(service, num_works=1):
    """Return a task of a request, a list of its works that have begun, and one event for each that ends it."""
    begun, ends = [], [asyncio.Event() for _ in range(num_works)]

    async def work(index, session):
        begun.append(index)
        await ends[index].wait()

    works = [partial(work, index) for index in range(num_works)]
    return asyncio.create_task(service.in_sessions(works, cache_salt=None, adapter=None)), begun, ends


def test_simultaneous_requests_do_not_exceed_the_queue(engine):
    async def test(service):
        tasks, events = zip(*((task, ends[0]) for task, _, ends in (begin(service) for _ in range(5))), strict=True)
        await settle()
        assert [task.done() for task in tasks] == [False, False, True, True, True]
        for event in events:
            event.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [type(None)] * 2 + [BusyError] * 3

    in_loop(engine, test, max_sessions=1, queue=1)


def test_close_ends_waiting_requests_and_end_the_others(engine):
    async def test(service):
        several, begun, ends = begin(service, 3)
        waits, nothing, _ = begin(service)
        await settle()
        assert (begun, nothing) == ([0, 1], [])
        service.close()
        with pytest.raises(ClosedError):
            await waits
        with pytest.raises(ClosedError):
            await begin(service)[0]
        ends[0].set()  # its request has begun, so the third work begins
        await settle()
        assert (begun, nothing) == ([0, 1, 2], [])
        service.close(ends_all=True)
        service.close(ends_all=True)
        with pytest.raises(ClosedError, match="the server is shutting down"):
            await several

    in_loop(engine, test, max_sessions=2)


def test_failed_work_ends_the_others_and_their_wait(engine):
    async def test(service):
        async def fail(session):
            raise TimeoutError("too late")

        ended = threading.Event()

        async def go_on(session):
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        with pytest.raises(TimeoutError, match="too late"):
            await service.in_sessions([go_on, fail, go_on], cache_salt=None, adapter=None)
        assert ended.is_set()

    in_loop(engine, test, max_sessions=2)
