"""Leases: every leaf is applied exactly once, whatever workers do."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from w5xde_async.plan.leases import FailedWork, LeaseTerms
from w5xde_async.plan.ledger import COORDINATOR, BlockGrant, Ledger
from w5xde_async.plan.tree import Block, Frontier

WORKERS = ("a", "b", "c")
workers = st.sampled_from(WORKERS)
BUCKETS = 2


class Book(Ledger):
    """With a store of what has come beside it, as far as the ledger asks one."""

    def __init__(
        self, buckets: int = BUCKETS, *, first_lease: int = 1,
        waits: Callable[[BlockGrant], bool] = lambda grant: False,
        allowed_s: Callable[[BlockGrant], float] = lambda grant: grant.deadline_s, **terms: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            LeaseTerms(first_lease=first_lease, **terms), has_come=self._has_come_yet, waits=waits, allowed_s=allowed_s
        )
        self.buckets = buckets
        self.came: dict[tuple[int, Block], set[int]] = {}
        self.came_again: dict[int, set[int]] = {}  # by audit

    def _has_come_yet(self, step: int, block: Block) -> bool:
        return bool(self.came.get((step, block)))

    def _of(self, lease: int) -> set[int]:
        grant = self._grants[lease]
        if self.is_audit(lease):
            return self.came_again.setdefault(lease, set())
        return self.came.setdefault((grant.step, grant.block), set())

    def fill(self, lease: int, bucket: int) -> bool:
        """A bucket comes. False where it is there."""
        known = self._of(lease)
        if bucket in known:
            return False
        known.add(bucket)
        return True

    def missing(self, lease: int) -> list[int]:
        return [bucket for bucket in range(self.buckets) if bucket not in self._of(lease)]

    def finish(self, lease: int) -> BlockGrant | None:
        """Only what is whole is finished."""
        assert not self.missing(lease)
        grant = self._grants[lease]
        if not self.is_audit(lease):
            del self.came[grant.step, grant.block]
        return super().finish(lease)

    def unfill(self, step: int, block: Block, buckets: Collection[int]) -> None:
        self.came[step, block] -= set(buckets)
        self.emptied(step, block.start)


def unbacked(book: Ledger, step: int, worker: str) -> list[BlockGrant]:
    """What ``worker`` could back up."""
    return [grant for grant in book.leases_on(step) if book.may_back_up(grant.lease, worker)]


class ExactlyOnce(RuleBasedStateMachine):
    """The ledger under any order of events, with an integer model beside it: leaf i of step s is worth 2^i.

    A sum in which a leaf is lost or counted twice is another number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Book(max_failures=3, max_deaths=4)
        self.now = 0.0
        self.next_step = 0
        self.granted: dict[int, BlockGrant] = {}  # all that were ever granted
        self.ended: set[int] = set()
        self.sums: dict[int, list[int]] = {}  # step -> what each bucket's reducer holds
        self.frontiers: dict[int, list[Frontier]] = {}
        self.leaves: dict[int, int] = {}
        self.failed: dict[tuple[int, int], int] = {}

    def _open_leases(self) -> list[BlockGrant]:
        return [grant for lease, grant in self.granted.items() if lease not in self.ended]

    @precondition(lambda self: len(self.ledger.open_steps) < 2)
    @rule(leaves=st.integers(1, 20))
    def open(self, leaves: int) -> None:
        self.ledger.open(self.next_step, leaves, self.now)
        self.sums[self.next_step] = [0] * BUCKETS
        self.frontiers[self.next_step] = [Frontier(leaves) for _ in range(BUCKETS)]
        self.leaves[self.next_step] = leaves
        self.next_step += 1

    @precondition(lambda self: self.ledger.open_steps)
    @rule(worker=workers, most=st.sampled_from([1, 1, 2, 4, 7, 32]), data=st.data(), others=st.sets(workers))
    def grant(self, worker: str, most: int, data: st.DataObject, others: set[str]) -> None:
        step = data.draw(st.sampled_from(self.ledger.open_steps))
        free = self.ledger.free_leaves(step)
        grant = self.ledger.grant(worker, step, most, now=self.now, deadline_s=5.0, others=others)
        if grant is None:
            assert not free or self.failed, "free leaves and nobody who failed on them"
            return
        assert (grant.worker, grant.step) == (worker, step)
        assert grant.lease not in self.granted
        assert self.ledger.free_leaves(step) == free - grant.block.num_leaves
        self.granted[grant.lease] = grant

    @precondition(lambda self: self._open_leases())
    @rule(data=st.data(), bucket=st.integers(0, BUCKETS - 1))
    def fill(self, data: st.DataObject, bucket: int) -> None:
        grant = data.draw(st.sampled_from(self._open_leases()))
        known = bucket not in self.ledger.missing(grant.lease)
        assert self.ledger.fill(grant.lease, bucket) is not known
        if not known:
            self.sums[grant.step][bucket] += sum(1 << leaf for leaf in range(*grant.block))
            self.frontiers[grant.step][bucket].fill(grant.block)
        assert bucket not in self.ledger.missing(grant.lease)

    @precondition(lambda self: self._open_leases())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self._open_leases()))
        if not self.ledger.missing(grant.lease):
            self._finish(grant)

    def _finish(self, grant: BlockGrant) -> None:
        """The block's other lease, if there is one, ends with it."""
        others = [g for g in self._open_leases() if (g.step, g.block) == (grant.step, grant.block) and g != grant]
        other = self.ledger.finish(grant.lease)
        assert others == ([] if other is None else [other])
        self.ended |= {grant.lease, *(g.lease for g in others)}

    @precondition(lambda self: self.ledger.open_steps)
    @rule(worker=workers, data=st.data())
    def back_up(self, worker: str, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(self.ledger.open_steps))
        candidates = unbacked(self.ledger, step, worker)
        if not candidates:
            return
        first = data.draw(st.sampled_from(candidates))
        second = self.ledger.back_up(first.lease, worker, now=self.now, deadline_s=5.0)
        assert (second.block, second.step, second.worker) == (first.block, step, worker)
        assert second.worker != first.worker
        assert second.lease not in self.granted
        assert self.ledger.contested(first.lease)
        self.granted[second.lease] = second

    @precondition(lambda self: self._open_leases())
    @rule(data=st.data())
    def finish_whole(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self._open_leases()))
        for bucket in self.ledger.missing(grant.lease):
            self.ledger.fill(grant.lease, bucket)
            self.sums[grant.step][bucket] += sum(1 << leaf for leaf in range(*grant.block))
            self.frontiers[grant.step][bucket].fill(grant.block)
        self._finish(grant)

    @precondition(lambda self: self._open_leases())
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self._open_leases()))
        assert self.ledger.give_back(grant.lease) == grant
        self.ended.add(grant.lease)

    @precondition(lambda self: self._open_leases())
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self._open_leases()))
        leaf = data.draw(st.integers(grant.block.start, grant.block.stop - 1))
        self.failed[grant.step, leaf] = times = self.failed.get((grant.step, leaf), 0) + 1
        failed_work = self.ledger.fail(grant.lease, leaf)
        assert failed_work == (FailedWork(grant.step, leaf, times, died=False) if times >= 3 else None)
        self.ended.add(grant.lease)

    @rule(worker=workers)
    def lose(self, worker: str) -> None:
        held = self.ledger.held(worker)
        lost, _ = self.ledger.lose(worker)
        assert lost == held
        self.ended.update(grant.lease for grant in lost)
        assert self.ledger.num_held(worker) == 0

    @rule(seconds=st.floats(0, 10))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        current = self.ledger.open_steps[:1]
        late = [g for g in self._open_leases() if [g.step] == current and g.granted_at + 5.0 <= self.now]
        assert {g.lease for g in self.ledger.overdue(self.now)} <= {g.lease for g in late}
        for grant in self.ledger.overdue(self.now):
            self.ledger.give_back(grant.lease)
            self.ended.add(grant.lease)

    @precondition(lambda self: self.ledger.open_steps)
    @rule()
    def close(self) -> None:
        """Commit the current step if it is complete: then each of its leaves counts exactly once."""
        step = self.ledger.open_steps[0]
        if self.ledger.complete(step):
            self._check_and_close(step)

    def _check_and_close(self, step: int) -> None:
        assert self.sums[step] == [(1 << self.leaves[step]) - 1] * BUCKETS
        assert all(frontier.complete for frontier in self.frontiers[step])
        self.ledger.close(step)
        self.ended.update(lease for lease, grant in self.granted.items() if grant.step == step)
        if self.ledger.open_steps:
            self.ledger.begin(self.ledger.open_steps[0], self.now)

    @invariant()
    def holds(self) -> None:
        self.ledger.validate()
        assert self.ledger.num_open == len(self._open_leases())
        for lease, grant in self.granted.items():
            assert self.ledger.get(lease) == (None if lease in self.ended else grant)
        for step in self.ledger.open_steps:
            blocks = {g.block for g in self._open_leases() if g.step == step}
            leased = sum(block.num_leaves for block in blocks)
            assert self.ledger.free_leaves(step) + leased <= self.leaves[step]

    def teardown(self) -> None:
        """One more worker does what is left: every step can be completed."""
        for worker in WORKERS:
            self.lose(worker)
        for step in self.ledger.open_steps:
            while (grant := self.ledger.grant("last", step, 8, now=self.now, deadline_s=5.0)) is not None:
                self.granted[grant.lease] = grant
                for bucket in self.ledger.missing(grant.lease):
                    self.ledger.fill(grant.lease, bucket)
                    self.sums[step][bucket] += sum(1 << leaf for leaf in range(*grant.block))
                    self.frontiers[step][bucket].fill(grant.block)
                self.ledger.finish(grant.lease)
                self.ended.add(grant.lease)
            assert self.ledger.complete(step)
            self._check_and_close(step)
        assert self.ledger.num_open == 0


TestExactlyOnce = ExactlyOnce.TestCase
TestExactlyOnce.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


# -- by hand


def ledger(leaves: int = 8, **changes: Any) -> Book:
    made = Book(**changes)
    made.open(0, leaves, 0.0)
    return made


def grant(book: Book, worker: str = "a", most: int = 8, **kwargs: object) -> BlockGrant:
    made = book.grant(worker, 0, most, now=0.0, deadline_s=10.0, **kwargs)  # type: ignore[arg-type]
    assert made is not None
    book.validate()
    return made


def test_a_duplicate_is_told_from_the_first() -> None:
    book = ledger()
    lease = grant(book).lease
    assert [book.fill(lease, 0), book.fill(lease, 0), book.fill(lease, 1)] == [True, False, True]


def test_a_step_that_is_not_open_is_not_complete() -> None:
    """Whoever is late may ask while no step is: after the last one, and while the next one's order is computed."""
    book = ledger()
    assert not book.complete(0)
    book.close(0)
    assert not book.complete(0)
    assert not book.complete(1)


def test_what_was_returned_is_stale_for_ever() -> None:
    book = ledger()
    lease = grant(book).lease
    book.give_back(lease)
    assert book.get(lease) is None
    assert grant(book).lease != lease
    for use in (book.finish, book.give_back, book.missing):
        with pytest.raises(KeyError):
            use(lease)


def test_a_half_filled_block_is_leased_again_whole_and_first() -> None:
    book = ledger()
    first = grant(book, most=4)
    book.fill(first.lease, 1)
    book.give_back(first.lease)
    again = grant(book, "b", most=1)
    assert again.block == first.block
    assert book.missing(again.lease) == [0]


def test_an_empty_block_is_cut_anew() -> None:
    book = ledger()
    book.give_back(grant(book, most=4).lease)
    assert grant(book, "b", most=2).block == Block(0, 2)
    assert grant(book, "c", most=8).block == Block(2, 4)  # alignment, not greed


def test_a_failed_leaf_is_isolated_and_given_to_another_worker() -> None:
    book = ledger()
    assert book.fail(grant(book, "a", 4).lease, 2) is None
    blocks = [grant(book, "b", 8, others=("a", "b")).block for _ in range(2)]
    assert blocks == [Block(0, 2), Block(2, 3)]  # the suspect alone
    assert book.fail(book.held("b")[1].lease, 2) is None
    assert grant(book, "a", 8, others=("a", "c")).block.start == 3  # a leaves it to c
    assert grant(book, "c", 8, others=("a", "c")).block == Block(2, 3)
    failed_work = book.fail(book.held("c")[0].lease, 2)
    assert failed_work == FailedWork(0, 2, 3, died=False)


def test_a_worker_alone_tries_again() -> None:
    book = ledger(max_failures=3)
    assert [book.fail(grant(book, most=1, others=("a",)).lease, 0) is None for _ in range(3)] == [True, True, False]


def test_with_all_having_failed_anyone_tries_again() -> None:
    book = ledger(1, max_failures=9)
    for worker in "abab":
        assert book.fail(grant(book, worker, others=("a", "b")).lease, 0) is None


def test_a_leaf_on_which_workers_die_is_isolated_and_named() -> None:
    book = ledger(max_deaths=4)
    culprits = []
    for worker in "abcd":
        block = grant(book, worker, 8).block
        while not block.start <= 5 < block.stop:  # others do the rest
            lease = book.held(worker)[0].lease
            for bucket in book.missing(lease):
                book.fill(lease, bucket)
            book.finish(lease)
            block = grant(book, worker, 8).block
        culprits.append(book.lose(worker)[1])
        book.validate()
    assert culprits == [None, None, None, FailedWork(0, 5, 4, died=True)]


def test_a_half_filled_block_on_which_workers_die_is_named_too() -> None:
    """It cannot be cut any more; its buckets had left with its last leaf."""
    book = ledger(max_deaths=3)
    book.fill(grant(book).lease, 0)
    deaths = [book.lose("a")[1]]
    for worker in "bc":
        grant(book, worker)
        deaths.append(book.lose(worker)[1])
    assert deaths == [None, None, FailedWork(0, 7, 3, died=True)]


def test_a_worker_that_loses_its_link_time_and_again_blames_no_leaf() -> None:
    book = ledger(1, max_deaths=2)
    for _ in range(20):
        grant(book)
        assert book.lose("a")[1] is None
    grant(book, "b")
    assert book.lose("b")[1] == FailedWork(0, 0, 2, died=True)


def test_who_comes_back_did_not_die() -> None:
    book = ledger(1, max_deaths=2)
    for worker in "abababab":
        grant(book, worker)
        assert book.lose(worker)[1] is None
        book.returned(worker)
    assert grant(book, "c").block == Block(0, 1)


def test_no_leaf_is_to_blame_while_a_place_is_there_that_has_not_tried_it() -> None:
    book = ledger(1, max_failures=3, max_deaths=2, present=lambda: "abcde")
    for worker, place in zip("abcde", ("here", "here", "here", "here", "there"), strict=True):
        book.places.joined(worker, place)
    for worker in "abc":
        assert book.fail(grant(book, worker).lease, 0) is None
        assert book.lose(worker)[1] is None
    for worker in "de":
        grant(book, worker)
        assert book.lose(worker)[1] == (None if worker == "d" else FailedWork(0, 0, 2, died=True))
    assert book.grant("d", 0, 1, now=0.0, deadline_s=1.0, others="abcde") is None  # its place has failed: e's turn
    assert book.fail(grant(book, "e").lease, 0) == FailedWork(0, 0, 4, died=False)


@pytest.mark.parametrize("delivered", ["h", "abch"])
def test_workers_that_fail_on_everything_end_no_run_while_one_that_delivers_has_not_tried(delivered: str) -> None:
    """All at one place. Three that have delivered are believed at once."""
    book = ledger(1, max_failures=3, present=lambda: "abch")
    for worker in "abch":
        book.places.joined(worker, "here")
    for worker in delivered:
        book.places.delivered(worker)
    for worker in "ab":
        assert book.fail(grant(book, worker).lease, 0) is None
    third = book.fail(grant(book, "c").lease, 0)
    if delivered == "abch":
        assert third == FailedWork(0, 0, 3, died=False)
        return
    assert third is None
    assert book.grant("a", 0, 1, now=0.0, deadline_s=1.0, others="abch") is None
    assert book.fail(grant(book, "h").lease, 0) == FailedWork(0, 0, 4, died=False)


def test_the_coordinator_takes_over_a_leaf_that_nobody_is_at() -> None:
    book = ledger(allowed_s=lambda grant: min(grant.deadline_s, 5.0))  # as the pacing, which knows no such worker
    held = grant(book, "a", 2)
    assert book.take_over(0, 1, now=0.0) is None
    taken = book.take_over(0, 5, now=0.0)
    assert taken is not None
    assert (taken.block, taken.worker, taken.deadline_s) == (Block(5, 6), COORDINATOR, math.inf)
    assert book.overdue(1e9) == [held]  # what it computes itself is never overdue, and nobody backs it up
    assert (book.unbacked(held.lease), book.unbacked(taken.lease)) == (True, False)
    assert not book.may_back_up(taken.lease, "b")
    with pytest.raises(ValueError, match="cannot be backed up by b"):
        book.back_up(taken.lease, "b", now=0.0, deadline_s=1.0)
    book.fill(held.lease, 0)
    book.give_back(held.lease)
    filled = book.take_over(0, 0, now=0.0)
    assert filled is not None
    assert (filled.block, book.missing(filled.lease)) == (Block(0, 2), [1])
    book.validate()
    assert [grant(book, "b", 8).block for _ in range(2)] == [Block(2, 4), Block(4, 5)]
    for lease in (taken.lease, filled.lease):
        for bucket in book.missing(lease):
            book.fill(lease, bucket)
        book.finish(lease)
    assert book.take_over(0, 5, now=0.0) is None
    book.validate()


def test_leases_not_yet_begun_do_not_count_as_deaths() -> None:
    book = ledger(2, max_deaths=1)
    first, second = grant(book, most=1), grant(book, most=1)
    lost, failed_work = book.lose("a")
    assert ([g.lease for g in lost], failed_work) == ([first.lease, second.lease], FailedWork(0, 0, 1, died=True))
    book.open(1, 1, 0.0)
    book.grant("b", 1, 1, now=0.0, deadline_s=1.0)
    assert book.lose("b")[1] is None  # a later step's


def test_deadlines_of_leases_given_ahead_begin_with_their_step() -> None:
    book = ledger(1)
    book.open(1, 1, 0.0)
    ahead = book.grant("a", 1, 1, now=1.0, deadline_s=10.0)
    current = grant(book)
    assert [g.lease for g in book.overdue(10.0)] == [current.lease]
    assert book.overdue(9.9) == []
    book.close(0)
    book.begin(1, 50.0)
    assert book.overdue(59.9) == []
    assert book.overdue(60.0) == [ahead]


def test_what_was_overdue_may_take_twice_as_long_each_time() -> None:
    """In whatever block its leaf is the next time; other leaves, and those of other steps, may not."""
    book = ledger(4)
    first = grant(book, most=1)
    assert book.overran(first) == 2.0
    book.give_back(first.lease)
    wider, beside = grant(book, most=2), grant(book, most=2)
    assert (wider.block, beside.block) == (Block(0, 2), Block(2, 4))
    assert book.overdue(19.9) == [beside]
    assert book.overdue(20.0) == [wider, beside]
    assert book.overran(wider) == 4.0
    book.give_back(wider.lease)
    (other,) = [grant(book, most=1) for _ in range(2)][1:]
    assert other.block == Block(1, 2)
    assert other not in book.overdue(19.9)
    assert other in book.overdue(20.0)
    for _ in range(100):  # what nobody ever answers for
        assert book.overran(other) <= 2.0**32
    book.close(0)
    book.open(0, 4, 0.0)
    again = grant(book, most=4)
    assert book.overdue(10.0) == [again]


def test_the_time_of_a_lease_begins_when_its_data_is_there() -> None:
    unread = {1}
    book = ledger(2, waits=lambda grant: grant.lease in unread)
    first, second = grant(book, most=1), grant(book, most=1)
    assert first.lease in unread
    assert book.overdue(1e9) == [second]
    unread.clear()
    book.data_came(first.lease, 100.0)
    assert book.began_at(first) == 100.0
    assert book.overdue(109.9) == [second]
    assert book.overdue(110.0) == [first, second]
    book.give_back(first.lease)
    again = grant(book, most=1)
    assert book.began_at(again) == 0.0


def test_whoever_has_a_contested_block_done_first_is_paid() -> None:
    for winner in (0, 1):
        book = ledger()
        leases = [first := grant(book), book.back_up(first.lease, "b", now=1.0, deadline_s=10.0)]
        assert not unbacked(book, 0, "c")
        assert [book.fill(leases[0].lease, 0), book.fill(leases[1].lease, 0)] == [True, False]  # one slot for both
        assert book.missing(leases[winner].lease) == [1]
        book.fill(leases[winner].lease, 1)
        assert book.finish(leases[winner].lease) == leases[1 - winner]
        assert (book.get(leases[1 - winner].lease), book.num_open, book.complete(0)) == (None, 0, True)


def test_a_backup_takes_over_when_the_first_is_lost() -> None:
    book = ledger()
    first = grant(book)
    second = book.back_up(first.lease, "b", now=1.0, deadline_s=10.0)
    book.lose("a")
    assert (book.get(second.lease), book.free_leaves(0)) == (second, 0)
    assert unbacked(book, 0, "c") == []  # once is enough: now its deadline counts
    book.lose("b")
    assert book.free_leaves(0) == 8
    again = grant(book, "a")
    assert unbacked(book, 0, "c") == [again]
    book.validate()


def test_nobody_backs_up_himself_or_what_failed_on_him() -> None:
    book = ledger(1)
    book.fail(grant(book, "a").lease, 0)
    first = grant(book, "b", others=("a", "b"))
    assert [unbacked(book, 0, worker) for worker in "abc"] == [[], [], [first]]
    with pytest.raises(ValueError, match="backed up"):
        book.back_up(first.lease, "b", now=0.0, deadline_s=1.0)
    book.back_up(first.lease, "c", now=0.0, deadline_s=1.0)
    with pytest.raises(ValueError, match="backed up"):
        book.back_up(first.lease, "d", now=0.0, deadline_s=1.0)


def test_what_ended_is_remembered_by_worker() -> None:
    book = Book(first_lease=7 << 32)
    book.open(0, 8, 0.0)
    lease = grant(book).lease
    assert lease == 7 << 32
    assert book.past("a", lease) is None  # it is open
    ended = book.give_back(lease)
    assert [book.past("a", lease), book.past("b", lease)] == [ended, None]
    for _ in range(5000):
        book.give_back(grant(book).lease)
    assert book.past("a", lease) is None  # long ago


def test_closing_a_step_voids_its_leases() -> None:
    book = ledger()
    lease = grant(book).lease
    book.close(0)
    assert (book.get(lease), book.num_open, book.open_steps, book.overdue(1e9)) == (None, 0, [], [])


def test_two_steps_are_open_at_once_and_no_more() -> None:
    book = ledger()
    with pytest.raises(ValueError, match="step 0"):
        book.open(0, 1, 0.0)
    book.open(1, 1, 0.0)
    with pytest.raises(ValueError, match="step 2"):
        book.open(2, 1, 0.0)


def test_held_leases_by_step() -> None:
    book = ledger()
    book.open(1, 4, 0.0)
    book.grant("a", 1, 4, now=0.0, deadline_s=1.0)
    grant(book)
    assert (book.num_held("a"), book.num_held_up_to("a", 0), book.num_held("b")) == (2, 1, 0)


# -- audits


def finished(ledger: Book, worker: str = "a") -> BlockGrant:
    """A block of two leaves that ``worker`` has finished."""
    grant = ledger.grant(worker, 0, 2, now=0.0, deadline_s=5.0)
    assert grant is not None
    for bucket in range(ledger.buckets):
        ledger.fill(grant.lease, bucket)
    ledger.finish(grant.lease)
    return grant


def test_an_audit_finishes_nothing_and_is_never_backed_up():
    ledger = Book(2)
    ledger.open(0, 4, 0.0)
    mine = finished(ledger)
    audit = ledger.audit(0, mine.block, "b", now=1.0, deadline_s=5.0)
    assert ledger.is_audit(audit.lease)
    assert not ledger.is_audit(mine.lease)
    assert ledger.missing(audit.lease) == [0, 1]
    assert unbacked(ledger, 0, "c") == []
    assert ledger.overdue(6.0) == [audit]
    assert ledger.num_held("b") == 1
    assert ledger.free_leaves(0) == 2
    for bucket in range(2):
        assert ledger.fill(audit.lease, bucket)
    assert ledger.finish(audit.lease) is None
    ledger.validate()
    assert ledger.is_duplicate(audit.lease)
    assert not ledger.complete(0)
    assert ledger.free_leaves(0) == 2


def test_an_audit_that_is_given_back_or_whose_step_closes_leaves_nothing():
    ledger = Book(1)
    ledger.open(0, 4, 0.0)
    block = finished(ledger).block
    first, second = (ledger.audit(0, block, worker, now=0.0, deadline_s=5.0) for worker in "bc")
    ledger.give_back(first.lease)
    assert ledger.free_leaves(0) == 2
    ledger.validate()
    ledger.close(0)
    assert ledger.get(second.lease) is None
    ledger.validate()


@pytest.mark.parametrize("dies", [False, True])
def test_nobody_who_fails_on_an_audit_blames_its_leaf_which_is_finished(dies: bool):
    book = Book(1, max_failures=2, max_deaths=2)
    book.open(0, 4, 0.0)
    mine = grant(book, "a", 1)
    book.fill(mine.lease, 0)
    book.finish(mine.lease)
    for worker in "bcde":
        audit = book.audit(0, mine.block, worker, now=0.0, deadline_s=5.0)
        grant(book, worker, 1)  # not begun
        failed_work = book.lose(worker)[1] if dies else book.fail(audit.lease, 0)
        assert failed_work is None
        book.lose(worker, died=False)
        book.validate()


def test_a_block_that_did_not_hold_is_for_others_first():
    ledger = Book(1)
    ledger.open(0, 2, 0.0)
    block = finished(ledger, "a").block
    assert ledger.complete(0)
    ledger.reopen(0, block, "a")
    ledger.validate()
    assert not ledger.complete(0)
    assert ledger.grant("a", 0, 2, now=0.0, deadline_s=5.0, others=["a", "b"]) is None
    again = ledger.grant("b", 0, 2, now=0.0, deadline_s=5.0, others=["a", "b"])
    assert again is not None
    assert ledger.missing(again.lease) == [0]


def test_what_is_not_believed_is_missing_again():
    ledger = Book(2)
    ledger.open(0, 2, 0.0)
    grant = ledger.grant("a", 0, 2, now=0.0, deadline_s=5.0)
    assert grant is not None
    ledger.fill(grant.lease, 0)
    ledger.give_back(grant.lease)
    again = ledger.grant("b", 0, 2, now=0.0, deadline_s=5.0)
    assert again is not None
    ledger.unfill(0, again.block, [0])
    assert ledger.missing(again.lease) == [0, 1]
    assert ledger.contested(again.lease)  # b may have had bucket 0 turned away: its DONE without it is no offence
    ledger.give_back(again.lease)
    ledger.validate()
    assert ledger.free_leaves(0) == 2


def test_a_block_is_leased_again_to_whoever_had_it_where_it_is_free_as_it_was() -> None:
    come: set[Block] = set()
    ledger = Ledger(has_come=lambda step, block: block in come)
    ledger.open(0, 8, 0.0)
    ledger.grant("b", 0, 2, now=0.0, deadline_s=9.0)
    had = ledger.grant("a", 0, 2, now=0.0, deadline_s=9.0)
    assert had is not None
    assert ledger.grant_again(had, now=1.0, deadline_s=9.0) is None, "it is leased"
    for begun in (False, True):
        if begun:
            come.add(had.block)
        ledger.lose("a", died=False)
        ledger.validate()
        had = ledger.grant_again(had, now=1.0, deadline_s=9.0)
        assert had is not None
        assert (had.worker, had.block) == ("a", Block(2, 4))
        ledger.validate()
    ledger.give_back(had.lease)
    ledger.grant("b", 0, 8, now=2.0, deadline_s=9.0)
    assert ledger.grant_again(had, now=2.0, deadline_s=9.0) is None, "it was given away"
    ledger.close(0)
    assert ledger.grant_again(had, now=3.0, deadline_s=9.0) is None, "its step is over"
