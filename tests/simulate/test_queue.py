"""The queue of the search: its times are those of queueing theory, of an event loop and of the simulated server."""

from __future__ import annotations

from bisect import bisect_left
from math import exp, factorial, floor
from random import Random
from statistics import mean, stdev

import pytest
from small_shape import SMALL_SHAPE as SMALL

from chunkrt.simulate import find_device, simulate
from chunkrt.simulate.arrivals import draw
from chunkrt.simulate.queue import NUM_ARRIVALS, Queue
from chunkrt.simulate.serving import simulate_serving

SERVICE_MS = 40.0


def md1_share(wait: float, load: float) -> float:
    """Return the share of requests that wait at most some service times in an M/D/1 queue (Erlang, 1909)."""
    terms = ((-load * (wait - k)) ** k / factorial(k) * exp(load * (wait - k)) for k in range(floor(wait) + 1))
    return (1 - load) * sum(terms)


def md1_p95_ms(load: float) -> float:
    """Return the 95th percentile of waiting and service, by bisection."""
    waits = [step / 1000 for step in range(20_000)]
    return SERVICE_MS * (1 + waits[bisect_left(waits, 0.95, key=lambda wait: md1_share(wait, load))])


def event_loop_ms(rate: float, random: Random) -> list[float]:
    """Return the times in an M/D/1 queue, one request after another."""
    now_ms = free_ms = 0.0
    times = []
    for _ in range(NUM_ARRIVALS):
        now_ms += 1e3 * random.expovariate(rate)
        free_ms = max(now_ms, free_ms) + SERVICE_MS
        times.append(free_ms - now_ms)
    return times


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
def test_queue_of_equal_prompts_is_md1(load: float) -> None:
    """The mean and the percentile are within 4 standard deviations of the theory; these are those of event loops."""
    rate = load / (SERVICE_MS / 1e3)
    loops = [sorted(event_loop_ms(rate, Random(seed))) for seed in range(20)]
    queue = Queue(arrivals=f"poisson:{rate}", seed=1)
    expected = SERVICE_MS * (1 + load / (2 * (1 - load)))
    assert float(queue.times_ms([SERVICE_MS]).mean()) == pytest.approx(expected, abs=4 * stdev(map(mean, loops)))
    p95_of_loops = [times[round(0.95 * NUM_ARRIVALS) - 1] for times in loops]
    p95_ms = queue.p95_ms([SERVICE_MS])
    assert p95_ms == pytest.approx(md1_p95_ms(load), abs=4 * stdev(p95_of_loops))
    assert queue.load([SERVICE_MS]) == pytest.approx(load)


def test_queue_without_load_has_the_service_times_and_one_with_full_load_has_no_percentile() -> None:
    assert Queue(arrivals="poisson:1e-6").p95_ms([SERVICE_MS]) == pytest.approx(SERVICE_MS)
    assert Queue(arrivals="poisson:25").p95_ms([SERVICE_MS]) is None
    assert Queue(arrivals="poisson:24.9").p95_ms([SERVICE_MS]) is not None


def test_prompts_of_a_queue_are_equally_frequent_and_repeatable() -> None:
    queue = Queue(arrivals="poisson:1", seed=5, num_prompts=4)
    for prompt in range(4):
        share = float((queue.prompts == prompt).mean())
        assert share == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / NUM_ARRIVALS) ** 0.5)
    again, other = (Queue(arrivals="poisson:1", seed=seed, num_prompts=4).times_ms([1, 2, 3, 4]) for seed in (5, 6))
    assert (again == queue.times_ms([1, 2, 3, 4])).all()
    assert (other != again).any()


def test_queue_waits_as_a_simulated_server_with_one_session() -> None:
    device, plan = find_device("sd8gen3"), SMALL.plan()
    options = {"chunk_length": 32, "policy": "look_ahead", "scheme": "w8a16"}
    alone = simulate(plan, device, prompt_length=64, **options)
    rate = 0.6 / (alone.time_to_first_token_ms / 1e3)
    load = draw(f"poisson:{rate}", "64", "1", requests=500, context_length=512, seed=2)
    served = simulate_serving(plan, device, load, sessions=1, **options)
    queue = Queue(arrivals=f"poisson:{rate}", seed=2)
    times = queue.times_ms([alone.time_to_first_token_ms])[:500]
    assert float(times.mean()) == pytest.approx(served.time_to_first_token_ms.mean, rel=1e-6)
