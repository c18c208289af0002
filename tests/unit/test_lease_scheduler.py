"""Who gets which block, with real books in virtual time: a step lasts as long as its leaves dealt out evenly do."""

from __future__ import annotations

import heapq
import math
from collections import deque
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from w5xde_async.data.loader import Loader
from w5xde_async.hub.work.lease_scheduler import TURN_S, LeaseScheduler
from w5xde_async.plan.ledger import BlockGrant, Ledger
from w5xde_async.plan.pacing import Pacing, PacingConfig
from w5xde_async.plan.sharing import Cost, finish_s
from w5xde_async.plan.tree import Block

LEAF_S = 0.5


class Data(NamedTuple):
    samples: tuple[int, ...]
    packed: bool = False
    structure: bytes = b""
    buffers: tuple[Any, ...] = ()
    step_samples: int = 1
    too_large: bool = False
    local: bool = False


class InMemory:
    """A loader that has everything."""

    max_block_leaves = 1 << 20

    def data(self, step: int, block: Block, worker: str) -> Data:
        return Data((1,) * block.num_leaves)


class Farm:
    """Workers that compute what they hold one lease after the other, and send its result while they compute the next.

    ``late``: when each of them comes. ``lines``: seconds that a result is on the line of each.
    """

    def __init__(
        self, leaves: int, late: list[float], speeds: list[float], *, leases_ahead: int = 2,
        lines: list[float] | None = None, whole_step_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.lines = {f"w{i}": seconds for i, seconds in enumerate(lines or [0.0] * len(speeds))}
        self.sending: dict[str, deque[tuple[float, float, int]]] = {}  # to leave from, until, of which lease
        self.computed: set[int] = set()
        self.owes: dict[str, int] = {}  # worker -> a lease that was taken from it
        self.results: list[int] = []  # of each step: how many were sent
        self.leaves, self.leaf_s = leaves, {f"w{i}": LEAF_S / speed for i, speed in enumerate(speeds)}
        self.now, self.ticked, self.step = 0.0, 0.0, 0
        self.ledger = Ledger(allowed_s=lambda grant: math.inf)
        self.scheduler = LeaseScheduler(
            self.ledger, Pacing(PacingConfig(leases_ahead=leases_ahead, whole_step_s=whole_step_s)),
            cast(Loader, InMemory()),
        )  # fmt: skip
        self.coming = [(at, f"w{i}") for i, at in enumerate(late)]
        heapq.heapify(self.coming)
        self.goes: tuple[float, str] = (math.inf, "")  # who leaves, and when
        self.held: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[float, int]] = {}  # of the lease that each is at
        self.seconds: list[float] = []  # of each step
        self.most_held: list[dict[str, int]] = []  # of each step: leaves by worker

    def run(self, steps: int) -> None:
        self.ledger.open(0, self.leaves, self.now)
        self.ledger.open(1, self.leaves, self.now)
        began = self.now
        self.most_held.append({})
        self.results.append(0)
        while len(self.seconds) < steps:
            if self.ledger.complete(self.step):
                self.seconds.append(self.now - began)
                self.ledger.close(self.step)
                self.step, began = self.step + 1, self.now
                self.ledger.open(self.step + 1, self.leaves, self.now)
                self.ledger.begin(self.step, self.now)
                self.most_held.append({})
                self.results.append(0)
                self.schedule(again=True)
                continue
            comes = self.coming[0][0] if self.coming else math.inf
            done = min(((at, worker) for worker, (at, _) in self.ends.items()), default=(math.inf, ""))
            sent = min(((line[0][1], worker) for worker, line in self.sending.items() if line), default=(math.inf, ""))
            looks = self.scheduler.look_again_at
            tick = self.ticked + 1.0 if self.ledger.free_leaves(self.step) else math.inf
            self.now = max(self.now, min(comes, done[0], sent[0], looks, tick, self.goes[0]))
            assert self.now < math.inf, "nobody has anything to do"
            if self.goes[0] <= self.now:
                self.leave(self.goes[1])
                self.goes = math.inf, ""
                self.schedule(again=True)
            elif done[0] <= self.now:
                self.send(done[1])
            elif sent[0] <= self.now:
                self.finish(sent[1])
                self.schedule()
            elif comes <= self.now:
                self.arrive(heapq.heappop(self.coming)[1])
                self.schedule(again=True)
            else:
                self.ticked = self.now
                self.schedule(again=self.now >= tick)

    def arrive(self, worker: str) -> None:
        self.held[worker], self.sending[worker] = [], deque()
        self.scheduler.takes_work(worker, True)

    def leave(self, worker: str) -> None:
        self.scheduler.takes_work(worker, False)
        self.scheduler.left(worker)
        self.ends.pop(worker, None)
        self.sending.pop(worker)
        for lease in self.held.pop(worker):
            if self.ledger.get(lease) is not None:
                self.ledger.give_back(lease)

    def send(self, worker: str) -> None:
        """What is computed is sent, whether or not anybody waits for it."""
        _, lease = self.ends.pop(worker)
        self.computed.add(lease)
        line = self.sending[worker]
        begins = line[-1][1] if line else self.now
        line.append((begins, begins + self.lines[worker], lease))
        self.results[-1] += 1
        self.begin(worker)

    def finish(self, worker: str) -> None:
        *_, lease = self.sending[worker].popleft()
        grant = self.ledger.get(lease)
        with suppress(ValueError):
            self.held[worker].remove(lease)
        if grant is None and (past := self.ledger.past(worker, lease)) is not None:
            compute_s = past.block.num_leaves * self.leaf_s[worker]
            self.scheduler.observe_late(past, compute_s, self.now, result_s=self.lines[worker])
            if self.owes.get(worker) == lease:
                del self.owes[worker]
                self.scheduler.takes_work(worker, True)
        if grant is not None:  # else another had its block done before
            self.most_held[-1][worker] = self.most_held[-1].get(worker, 0) + grant.block.num_leaves
            other = cast(BlockGrant | None, self.ledger.finish(lease))
            compute_s = grant.block.num_leaves * self.leaf_s[worker]
            self.scheduler.observe(grant, compute_s, self.now, result_s=self.lines[worker])
            if other is not None:
                self.scheduler.overtaken(other, self.now)
                self.await_answer(other)
        self.begin(worker)

    def await_answer(self, grant: BlockGrant) -> None:
        """A lease was taken from its worker, which gets no other until it has answered (``hub.members.liveness``)."""
        self.owes[grant.worker] = grant.lease
        self.scheduler.takes_work(grant.worker, False)
        for held in self.ledger.held(grant.worker):
            self.ledger.give_back(held.lease)

    def schedule(self, *, again: bool = False) -> None:
        steps = self.ledger.open_steps
        for worker, lease in self.scheduler.leases(steps, self.now, has_credit=lambda worker: True, again=again):
            self.held[worker].append(lease.message.lease)
        for worker in self.held:
            self.begin(worker)

    def begin(self, worker: str) -> None:
        if worker in self.ends:
            return
        for lease in self.held[worker].copy():
            if lease in self.computed:
                continue
            grant = self.ledger.get(lease)
            if grant is None:
                self.held[worker].remove(lease)
            elif grant.step == self.step:
                self.ends[worker] = self.now + grant.block.num_leaves * self.leaf_s[worker], lease
                return


def test_a_worker_that_is_early_leaves_the_next_step_to_others_as_well() -> None:
    """A leaf each, and not the whole of every other step."""
    farm = Farm(2, [0.0, 0.0], [1.0, 1.0])
    farm.run(8)
    assert farm.seconds[2:] == pytest.approx([LEAF_S] * 6)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equal_workers_have_equal_shares_whenever_they_came(data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, 6), "workers")
    each = data.draw(st.sampled_from([1, 2, 3, 9]), "leaves a worker")
    late = data.draw(st.lists(st.floats(0, 6 * LEAF_S), min_size=workers, max_size=workers), "late")
    ahead = data.draw(st.integers(1, 4), "leases ahead")
    farm = Farm(workers * each, late, [1.0] * workers, leases_ahead=ahead)
    farm.run(24)
    more = 1 if ahead <= 2 else 2  # who holds more leases may have one of the next step before the last of this one
    assert max(farm.seconds[16:]) <= (each + more) * LEAF_S + 1e-6, farm.seconds
    if each == 1:
        assert farm.seconds[16:] == pytest.approx([LEAF_S] * 8)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_unequal_workers_are_done_at_about_the_same_time(data: st.DataObject) -> None:
    speeds = data.draw(st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=5), "speeds")
    leaves = data.draw(st.integers(1, 40), "leaves")
    farm = Farm(leaves, [0.0] * len(speeds), speeds)
    farm.run(24)
    fair_s = leaves * LEAF_S / sum(speeds)
    slowest_s = LEAF_S / min(speeds)
    assert max(farm.seconds[16:]) <= fair_s + 2 * slowest_s + 1e-6, farm.seconds


def spread(steps: list[float]) -> float:
    return max(steps[16:])


@pytest.mark.parametrize("speeds", [[1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [1.0, 3.0]])
def test_short_steps_are_not_shared_out_and_workers_take_turns(speeds: list[float]) -> None:
    farm = Farm(8, [0.0] * len(speeds), [1000 * speed for speed in speeds], whole_step_s=10 * 8 * LEAF_S / 1000)
    farm.run(1000)
    steps = list(zip(farm.most_held, farm.seconds, strict=False))[8:-1]
    assert all(list(held.values()) == [8] for held, _ in steps)
    spent = dict.fromkeys(farm.leaf_s, 0.0)
    for held, seconds in steps:
        spent[next(iter(held))] += seconds
    assert max(spent.values()) - min(spent.values()) <= 2 * TURN_S  # a turn is a time, the same for all
    turns = [next(iter(held)) for held, _ in steps]
    changes = sum(one != other for one, other in pairwise(turns))
    assert len(speeds) - 1 <= changes <= sum(spent.values()) / TURN_S  # else a step lies with who made the last


def test_a_turn_ends_with_the_worker_that_has_it() -> None:
    farm = Farm(8, [0.0, 0.0], [1000.0, 1000.0], whole_step_s=10 * 8 * LEAF_S / 1000)
    farm.goes = 0.25, "w0"
    farm.run(200)
    whose = [next(iter(held)) for held in farm.most_held[:200]]
    left = 1 + max(number for number, worker in enumerate(whose) if worker == "w0")
    assert set(whose[:left]) == {"w0", "w1"}
    assert len(whose[left:]) > 100
    assert sum(farm.seconds[:left]) < 0.3  # it had gone in its turn: nobody waits for the turn's end
    assert max(farm.seconds[left:]) < 2 * min(farm.seconds[left:])


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 12])
@pytest.mark.parametrize("leaves", [8, 16, 27])
def test_a_step_over_slow_lines_sends_one_gradient_a_worker(workers: int, leaves: int) -> None:
    farm = Farm(leaves, [0.0] * workers, [1.0] * workers, lines=[40 * LEAF_S] * workers)
    farm.run(24)
    assert max(farm.results[2:23]) <= workers, farm.results
    assert spread(farm.seconds) <= (40 + 2 * -(-leaves // workers)) * LEAF_S, farm.seconds


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_over_slow_lines_a_step_takes_a_gradient_a_worker_and_no_longer_than_it_must(data: st.DataObject) -> None:
    """Lines of any rate at which a result takes longer than a leaf to compute, or much longer."""
    workers = data.draw(st.integers(1, 8), "workers")
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=workers, max_size=workers), "speeds")
    lines = data.draw(st.lists(st.sampled_from([1.5, 4.0, 20.0, 100.0]), min_size=workers, max_size=workers), "lines")
    lines = [seconds / min(speeds) * LEAF_S for seconds in lines]
    leaves = data.draw(st.integers(2 * workers, 48), "leaves")  # every line is measured soon
    farm = Farm(leaves, [0.0] * workers, speeds, lines=lines)
    farm.run(32)
    assert sum(farm.results[10:31]) <= 1.1 * workers * 21, farm.results
    costs = [Cost(LEAF_S / speed, line) for speed, line in zip(speeds, lines, strict=True)]
    even_s = finish_s(costs, leaves)  # as if shares could be cut as one likes
    assert spread(farm.seconds) <= 2 * even_s + 2 * LEAF_S / min(speeds), (farm.seconds, even_s)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_over_fast_lines_results_cost_no_time(data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, 6), "workers")
    leaves = data.draw(st.integers(1, 40), "leaves")
    lines = data.draw(st.lists(st.floats(0, 0.5), min_size=workers, max_size=workers), "lines")
    alone, farm = (
        Farm(leaves, [0.0] * workers, [1.0] * workers, lines=seconds)
        for seconds in ([0.0] * workers, [seconds * LEAF_S for seconds in lines])
    )
    alone.run(24)
    farm.run(24)
    assert spread(farm.seconds) <= spread(alone.seconds) + 2 * LEAF_S, (farm.seconds, alone.seconds)


class Desk:
    """The scheduler by itself: two steps of ``leaves`` leaves, and workers of whom some are ``known``: they have
    finished a lease before."""

    def __init__(self, leaves: int, known: list[str], loader: Any = None, **callbacks: Any) -> None:
        waits = lambda grant: grant.lease in self.scheduler.unread  # noqa: E731
        self.ledger, self.now = Ledger(allowed_s=lambda grant: 1e6, waits=waits), 0.0
        self.pacing = Pacing(PacingConfig())
        self.scheduler = LeaseScheduler(self.ledger, self.pacing, cast(Loader, loader or InMemory()), **callbacks)
        for worker in known:
            self.pacing.observe(worker, 1, 0.01, taken_s=0.01)
        for step in range(2):
            self.ledger.open(step, leaves, self.now)
        self.ledger.begin(0, self.now)

    def lease(self, now: float = 0.0) -> list[tuple[str, int]]:
        """(worker, step) of what is leased now."""
        self.now = now
        sent = self.scheduler.leases(self.ledger.open_steps, now, has_credit=lambda worker: True, again=True)
        return [(worker, lease.message.step) for worker, lease in sent]


def test_what_strangers_hold_is_backed_up_by_those_who_have_finished_leases() -> None:
    """A hundred that never answer: a backup given to one of them would wait as long again."""
    desk = Desk(4, known=["able"])
    for number in range(50):
        desk.scheduler.takes_work(f"mute-{number}", True)
    assert {worker for worker, _ in desk.lease()} <= {f"mute-{number}" for number in range(50)}
    for number in range(50, 100):
        desk.scheduler.takes_work(f"mute-{number}", True)
    desk.scheduler.takes_work("able", True)
    desk.lease(1.0)
    backed = [grant for grant in desk.ledger.leases_on(0) if grant.worker == "able"]
    assert len(backed) == 1
    assert not [worker for worker, step in desk.lease(2.0) if step == 0]  # the others wait for it, as it works
    for _ in range(3):
        (grant,) = [grant for grant in desk.ledger.leases_on(0) if grant.worker == "able"]
        desk.ledger.finish(grant.lease)
        desk.scheduler.observe(grant, 0.01, desk.now)
        desk.lease(desk.now + 0.01)
    (grant,) = [grant for grant in desk.ledger.leases_on(0) if grant.worker == "able"]
    desk.ledger.finish(grant.lease)
    assert desk.ledger.complete(0)


def test_a_step_that_is_not_shared_out_does_not_stand_where_it_has_failed_on_whose_turn_it_is() -> None:
    """Its leaf is for another, who waits for a turn: whatever comes meanwhile, and where nothing does."""
    desk = Desk(1, known=[])
    for worker in "ab":
        desk.pacing.observe(worker, 1, 0.001, taken_s=0.001)
        desk.scheduler.takes_work(worker, True)
    assert desk.lease()[0] == ("a", 0)
    (grant,) = desk.ledger.leases_on(0)
    desk.ledger.fail(grant.lease, 0)
    assert desk.lease(0.01) == []
    assert desk.scheduler.look_again_at <= 0.01 + TURN_S
    assert desk.lease(0.02) == [("b", 0)]


def test_a_stranger_backs_up_the_only_one_that_is_known() -> None:
    desk = Desk(1, known=["able"])
    desk.scheduler.takes_work("able", True)
    assert ("able", 0) in desk.lease()
    desk.scheduler.takes_work("new", True)
    desk.lease(0.01)
    assert ("new", 0) in desk.lease(1.0)


def test_who_is_gone_leaves_nothing_behind() -> None:
    farm = Farm(16, [0.0] * 4, [1.0] * 4)
    farm.run(3)
    for worker in list(farm.held):
        farm.leave(worker)
    scheduler = farm.scheduler
    queues = (scheduler._refused, scheduler._timed, *scheduler._current, *scheduler._known, *scheduler._any)
    assert [queue for queue in queues if queue] == []


def test_where_nothing_is_to_be_leased_nobody_looks_again() -> None:
    """As where the coordinator computes short steps itself: a time that is past would be asked for for ever."""
    desk = Desk(1, known=["able", "other"])
    for worker in ("able", "other"):
        desk.scheduler.takes_work(worker, True)
        desk.lease()
    assert math.isfinite(desk.scheduler.look_again_at)
    assert not list(desk.scheduler.leases([], 1.0, has_credit=lambda worker: True))
    assert desk.scheduler.look_again_at == math.inf


def test_a_lease_of_one_that_takes_no_work_any_more_is_backed_up() -> None:
    """It has not answered for another lease."""
    desk = Desk(1, known=["able", "hung"])
    desk.scheduler.takes_work("hung", True)
    assert ("hung", 0) in desk.lease()
    desk.scheduler.takes_work("hung", False)
    desk.scheduler.takes_work("able", True)
    assert ("able", 0) in [*desk.lease(0.01), *desk.lease(1.0)]


def test_a_lease_behind_one_of_a_later_step_is_backed_up() -> None:
    """It was given back by another, to a worker that had a lease of the next step already."""
    desk = Desk(1, known=["able", "hung"])
    desk.ledger.grant("gone", 0, 1, now=0.0, deadline_s=math.inf)
    desk.ledger.grant("hung", 1, 1, now=0.0, deadline_s=math.inf)
    desk.ledger.lose("gone", died=False)
    desk.ledger.grant("hung", 0, 1, now=0.0, deadline_s=math.inf)
    assert [grant.step for grant in desk.ledger.held("hung")] == [1, 0]
    desk.scheduler.takes_work("hung", True)
    desk.scheduler.takes_work("able", True)
    assert ("able", 0) in [*desk.lease(0.01), *desk.lease(1.0)]


def test_who_comes_back_has_no_more_leases_again_than_a_worker_may_have() -> None:
    desk = Desk(4, known=["back"])
    ledger, ahead = desk.ledger, desk.scheduler._pacing.config.leases_ahead
    had = []
    for _ in range(4):
        grant = ledger.grant("back", 0, 1, now=0.0, deadline_s=math.inf)
        assert grant is not None
        had.append(grant)
    ledger.lose("back", died=False)
    for grant in had:
        desk.scheduler.grant_again("back", grant.lease, 1.0)
    assert [grant.block for grant in ledger.held("back")] == [grant.block for grant in had[:ahead]]


class Unread(InMemory):
    """A loader that has nothing until ``there``."""

    def __init__(self) -> None:
        self.there = False
        self.asked: dict[tuple[int, Block], None] = {}

    def data(self, step: int, block: Block, worker: str) -> Any:
        if not self.there:
            self.asked[step, block] = None
        return super().data(step, block, worker) if self.there else None

    def came(self) -> list[tuple[int, Block]]:
        came, self.asked = list(self.asked), {}
        return came


def test_a_lease_that_waits_for_its_data_is_not_late_before_that_has_come() -> None:
    """To back it up would be to wait for the same data twice."""
    loader = Unread()
    desk = Desk(1, known=["able", "other"], loader=loader)
    desk.scheduler.takes_work("able", True)
    assert desk.lease() == []
    desk.scheduler.takes_work("other", True)
    for now in (1.0, 5.0, 50.0):
        assert desk.lease(now) == []
    assert [grant.worker for grant in desk.ledger.leases_on(0)] == ["able"]
    assert desk.ledger.overdue(1e9) == []
    loader.there = True
    assert [worker for worker, lease in desk.scheduler.read(60.0) if lease.message.step == 0] == ["able"]
    desk.lease(60.01)
    assert [grant.worker for grant in desk.ledger.leases_on(0)] == ["able"]
    desk.lease(65.0)
    assert [grant.worker for grant in desk.ledger.leases_on(0)] == ["able", "other"]


def test_what_its_worker_has_been_told_of_is_taken_back_too_where_its_data_is_too_large() -> None:
    class Large(InMemory):
        read = False

        def data(self, step: int, block: Block, worker: str) -> Data:
            return super().data(step, block, worker)._replace(local=not self.read, too_large=self.read)

        def unread(self, worker: str, step: int, block: Block) -> None:
            self.read = True

    revoked: list[int] = []
    desk = Desk(4, known=["able"], loader=Large(), revoke=lambda grant: revoked.append(grant.lease))
    desk.scheduler.takes_work("able", True)
    assert ("able", 0) in desk.lease()
    (grant, *_) = desk.ledger.held("able")
    assert list(desk.scheduler.send_data(grant, 1.0)) == []
    assert (revoked, desk.scheduler.gave_back()) == ([grant.lease], True)
    assert desk.ledger.get(grant.lease) is None


@pytest.mark.parametrize("workers", [31, 32, 40])
def test_what_waits_for_data_among_many_is_sent_though_others_left_before(workers: int) -> None:
    """Leases that ended are cleared away; the same blocks have been leased again, and wait for the same data."""
    loader = Unread()
    desk = Desk(128, known=[], loader=loader)
    for number in range(workers):
        desk.scheduler.takes_work(f"w{number}", True)
    assert desk.lease() == []
    for number in range(4):
        gone = f"w{number}"
        desk.scheduler.takes_work(gone, False)
        desk.scheduler.left(gone)
        desk.ledger.lose(gone, died=False)
        desk.scheduler.takes_work(f"new-{number}", True)
        assert desk.lease(1.0 + number) == []
    held = {grant.lease for step in (0, 1) for grant in desk.ledger.leases_on(step)}
    loader.there = True
    assert {lease.message.lease for _, lease in desk.scheduler.read(10.0)} == held
    assert not desk.scheduler.unread
