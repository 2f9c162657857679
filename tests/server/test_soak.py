"""Many clients at once, a third of which disconnect: other answers are unaffected, and no state is left."""

import asyncio
import sys

import pytest
from server_soak import MOST_GROWTH, WARM_UP, server, soak

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server's memory is read from /proc")


def soaked(chat_folder, **load):
    with server(chat_folder, "--npu", "native", "--threads", "2", "-c", "128") as (url, process_id):
        return asyncio.run(soak(url, process_id, new_tokens=24, **load))


@pytest.mark.parametrize("seconds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_disconnecting_clients_do_not_affect_others(chat_folder, seconds):
    found = soaked(chat_folder, clients=16, seconds=seconds)
    assert found.complaints == []


@pytest.mark.slow
def test_memory_does_not_grow(chat_folder):
    found = soaked(chat_folder, clients=64, seconds=120, warm_up=WARM_UP)
    assert found.complaints == []
    assert abs(found.growth) <= MOST_GROWTH
