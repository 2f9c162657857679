"""Messages that waiting threads carry themselves, and interrupts that are deferred meanwhile."""

import signal
from types import SimpleNamespace

import numpy as np
import pytest

from chunkrt.errors import DeviceLostError
from chunkrt.runtime.ranks.carrier import Carrier
from chunkrt.runtime.ranks.interrupts import Interrupts
from chunkrt.runtime.ranks.mailbox import Channel, Envelope, Mailbox


@pytest.fixture
def interrupts():
    before = signal.getsignal(signal.SIGINT)
    yield Interrupts()
    signal.signal(signal.SIGINT, before)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_interrupts_defer_to_the_end_of_the_outermost_block(interrupts):
    steps = []

    def hold():
        with interrupts:
            with interrupts:
                interrupt()
                steps.append("inner")
            steps.append("outer")

    with pytest.raises(KeyboardInterrupt):
        hold()
    assert steps == ["inner", "outer"]
    with interrupts:
        steps.append("it is raised once")
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_interrupts_cannot_be_held_with_a_foreign_handler(interrupts):
    assert interrupts.can_be_held
    signal.signal(signal.SIGINT, lambda number, frame: None)
    assert not interrupts.can_be_held
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert interrupts.can_be_held


def test_mailbox_reports_if_take_would_wait():
    mailbox, envelope = Mailbox(), Envelope(Channel.SUM, 1)
    assert not mailbox.is_settled(envelope, (1, 2))
    mailbox.deliver(envelope, 1, memoryview(b"x"))
    assert not mailbox.is_settled(envelope, (1, 2))
    mailbox.deliver(envelope, 2, memoryview(b"x"))
    assert mailbox.is_settled(envelope, (1, 2))
    mailbox.abort(1, "rank 1: no")
    assert mailbox.is_settled(Envelope(Channel.DONE, 1), (1,))
    assert not mailbox.is_settled(Envelope(Channel.REPLY, 2), (1,))
    mailbox.fail(DeviceLostError("rank 2 was lost"))
    assert mailbox.is_settled(Envelope(Channel.REPLY, 2), (1,))


def test_mailbox_keeps_the_order_of_messages_on_one_subject():
    """Without a leader, one rank may have come to the next sum while another still has to take the last."""
    mailbox, envelope = Mailbox(), Envelope(Channel.SUM)
    for source, payload in ((1, b"a"), (2, b"c"), (1, b"b"), (2, b"d")):
        mailbox.deliver(envelope, source, memoryview(payload))
    taken = [{source: bytes(data) for source, data in mailbox.take(envelope, (1, 2)).items()} for _ in range(2)]
    assert taken == [{1: b"a", 2: b"c"}, {1: b"b", 2: b"d"}]
    assert not mailbox.is_settled(envelope, (1,))


class Slow:
    """A request that has ended when it is tested for the second time, or later if its message is longer."""

    def __init__(self, data):
        self.num_left = data.size // 8 + 1

    def Test(self):  # noqa: N802
        self.num_left -= 1
        return self.num_left < 0


class Loop:
    """A world of one rank, which receives its own messages."""

    def __init__(self):
        self.sent = []

    def Isend(self, message, dest):  # noqa: N802
        self.sent.append(message[0])
        return Slow(message[0])

    def Improbe(self, status):  # noqa: N802
        if not self.sent:
            return None
        data = self.sent.pop(0)
        status.Get_count, status.Get_source = lambda kind: data.size, lambda: 0

        def receive(message):
            message[0][:] = data
            return Slow(data)

        return SimpleNamespace(Irecv=receive)


def test_any_thread_carries_messages_one_at_a_time():
    came, deeper = [], []

    def deliver(source, data):
        came.append((source, bytes(data)))
        deeper.append(carrier.carry(blocking=False))

    carrier = Carrier(deliver)
    carrier.open(SimpleNamespace(BYTE=None, Status=SimpleNamespace), Loop())
    carrier.post(np.frombuffer(b"one", np.uint8), [0])
    assert carrier.has_mail
    assert not carrier.is_done
    assert [carrier.carry() for _ in range(3)] == [True, True, False]
    assert came == [(0, b"one")]
    assert deeper == [False]
    assert carrier.is_done


def test_messages_of_a_rank_arrive_in_sending_order():
    """The message that withdraws chunks must arrive before the sums that come after it."""
    came = []
    carrier = Carrier(lambda source, data: came.append(bytes(data)))
    carrier.open(SimpleNamespace(BYTE=None, Status=SimpleNamespace), Loop())
    messages = [b"long" * 16, b"short", b"longer" * 16, b"x"]
    for message in messages:
        carrier.post(np.frombuffer(message, np.uint8), [0])
    while len(came) < len(messages):
        carrier.carry()
    assert came == messages
