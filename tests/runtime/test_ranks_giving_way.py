"""A single prompt that gives way on several ranks: no rank has begun a chunk that the first one withdraws.

All ranks have one policy, because they are started with the same arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random

import pytest
from fake_backend import make_plan, npu_and_cpu, shared_cpu, with_links
from hypothesis import given
from hypothesis import strategies as st

from chunkrt.graph.plan import Plan
from chunkrt.runtime.policy import POLICIES, find_policy
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.tasks import Processor, Task, with_link


class Rank:
    """One rank's schedule, driven by hand; for ranks other than the first, `inbox` has the first rank's messages, in
    order."""

    def __init__(self, plan: Plan, routes: Sequence[object], slots: int, processors: Sequence[Processor], policy: str):
        self.plan = plan
        self.schedule = Schedule(
            plan,
            routes=routes,
            chunks_in_flight=slots,
            processors=with_link(processors, plan, slots),
            policy=find_policy(policy),
        )
        self.is_concurrent = find_policy(policy).is_concurrent
        self.free = {processor.name: processor.workers for processor in self.schedule.processors}
        self.running: list[tuple[Task, str]] = []
        self.inbox: deque[Task | int] = deque()
        self.given: set[Task] = set()
        """Sums to which the first rank has contributed, as far as this one knows."""
        self.kept: int | None = None

    def read(self, random: Random) -> None:
        """Take some messages from the inbox."""
        for _ in range(random.randint(0, len(self.inbox))):
            message = self.inbox.popleft()
            if isinstance(message, Task):
                self.given.add(message)
            else:
                self.kept = message

    def give_way(self) -> None:
        """Give way, as a follower does before every claim."""
        if self.kept is not None:
            assert self.schedule.withdraw(self.kept) == self.kept

    def claim(self, random: Random) -> Task | None:
        """Claim a task for some idle processor; a single thread claims for all of them in their order."""
        processors = self.schedule.processors
        if self.is_concurrent:
            processors = random.sample(processors, len(processors))
        for processor in processors:
            if self.free[processor.name] and (task := self.schedule.claim(processor)) is not None:
                self.free[processor.name] -= 1
                self.running.append((task, processor.name))
                return task
        return None

    def complete(self, task: Task, name: str) -> None:
        """Complete a task."""
        self.running.remove((task, name))
        self.free[name] += 1
        self.schedule.complete(task)


@given(
    st.integers(0, 10**9),
    st.sampled_from(list(POLICIES)),
    st.integers(1, 4),
    st.integers(2, 12),
    st.integers(1, 3),
    st.sampled_from(["last", "all", "none"]),
)
def test_withdrawn_chunks_have_not_begun_on_any_rank(
    seed: int, policy: str, slots: int, num_chunks: int, layers: int, logits: str
) -> None:
    random, plan = Random(seed), with_links(make_plan(layers=layers))
    wanted = {"last": {num_chunks - 1}, "all": set(range(num_chunks)), "none": set()}[logits]
    flow = plan.flow
    first = Rank(plan, flow.routes(num_chunks, wanted), slots, shared_cpu(1), policy)
    routes = [flow.with_sums if chunk in wanted else flow.without_logits for chunk in range(num_chunks)]
    processors = [shared_cpu(1), shared_cpu(2), *([npu_and_cpu(2)] if first.is_concurrent else [])]
    others = [Rank(plan, routes, slots, random.choice(processors), policy) for _ in range(random.randint(1, 2))]
    ranks = [first, *others]
    handed_out: dict[Rank, set[Task]] = {rank: set() for rank in ranks}
    gives_way_at, num_steps = random.randint(0, 40), 0

    def may_end(rank: Rank, task: Task) -> bool:
        if task.subgraph not in flow.sums:
            return True
        return all(
            task in (rank.given if other is first and rank is not first else handed_out[other]) for other in ranks
        )

    while not all(rank.schedule.is_finished for rank in ranks):
        num_steps += 1
        assert num_steps < 20_000, "the ranks wait for each other"
        rank = random.choice(ranks)
        rank.read(random)
        if rank is first and num_steps > gives_way_at:
            before = first.schedule.num_chunks
            if (left := first.schedule.withdraw()) < before:
                for other in others:
                    other.inbox.append(left)
        rank.give_way()
        if random.random() < 0.5 and (task := rank.claim(random)) is not None:
            handed_out[rank].add(task)
            if rank is first and task.subgraph in flow.sums:
                for other in others:
                    other.inbox.append(task)
        elif ending := [one for one in rank.running if may_end(rank, one[0])]:
            rank.complete(*random.choice(ending))
    assert {rank.schedule.chunks_done for rank in ranks} == {first.schedule.num_chunks}


@pytest.mark.parametrize(("num_chunks", "left"), [(1, 1), (3, 3), (4, 3), (9, 3)])
def test_withdraw_keeps_the_chunks_that_others_may_have_begun(num_chunks: int, left: int) -> None:
    """Before the first sum, as many chunks stay as there are slots."""
    plan = with_links(make_plan())
    rank = Rank(plan, plan.flow.routes(num_chunks, [num_chunks - 1]), 3, shared_cpu(1), "in_order")
    assert rank.schedule.withdraw() == left


def test_withdraw_without_sums_keeps_all_chunks() -> None:
    """In this plan of one layer only state is requested, which every rank computes by itself, at its own speed."""
    plan = with_links(make_plan(layers=1))
    assert not plan.flow.sums.intersection(plan.flow.without_logits.subgraphs)
    rank = Rank(plan, plan.flow.routes(9, []), 1, shared_cpu(1), "in_order")
    assert rank.schedule.withdraw() == 9
