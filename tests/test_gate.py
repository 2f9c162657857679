"""Gates: a waiting thread continues when the gate opens, or when any thread gets an interrupt."""

import signal
import threading

import pytest
from fake_backend import TIMEOUT
from gates import wait_until_waiting

from chunkrt.gate import Gate


def test_wait_returns_at_once_if_the_gate_is_open() -> None:
    gate = Gate()
    gate.open()
    gate.wait()
    gate.wait()


def test_open_wakes_all_waiting_threads() -> None:
    gate = Gate()
    threads = [threading.Thread(target=gate.wait, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
        wait_until_waiting(thread.ident)
    gate.open()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system cannot send a signal to a chosen thread")
def test_wait_ends_if_another_thread_gets_an_interrupt() -> None:
    gate, has_left = Gate(), threading.Event()
    here = threading.get_ident()
    opened_late = []

    def interrupt_here() -> None:
        wait_until_waiting(here)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        if not has_left.wait(TIMEOUT):
            opened_late.append(True)
            gate.open()

    thread = threading.Thread(target=interrupt_here)

    def be_interrupted() -> None:
        thread.start()
        gate.wait()

    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    has_left.set()
    thread.join()
    assert not opened_late
    gate.open()
    gate.wait()
