"""One verdict a lease, when the fate of all of it is known; said again to a worker that comes back and asks."""

from __future__ import annotations

import json

import pytest

from w5xde_async.hub.work import verdicts as module
from w5xde_async.hub.work.verdicts import Counted, Verdicts
from w5xde_async.wire.messages import Verdict, VerdictCode

APPLIED, STALE, DUPLICATE, REJECTED = VerdictCode


class Book:
    """Verdicts of a training at version 3, and what was said."""

    def __init__(self, *, lasting: bool = True) -> None:
        self.said: list[tuple[str, tuple[int, ...], int, tuple[int, ...]]] = []
        self.counted = Counted()
        self.verdicts = Verdicts(self._post, lasting=lasting, version=3, counted=self.counted)

    def _post(self, worker: str, verdict: Verdict) -> None:
        self.said.append((worker, verdict.leases, verdict.code, verdict.buckets))

    def take(self) -> list[tuple[str, tuple[int, ...], int, tuple[int, ...]]]:
        said, self.said = self.said, []
        return said


@pytest.fixture
def book() -> Book:
    return Book()


def test_whole_leases_of_a_worker_are_told_together(book: Book) -> None:
    verdicts = book.verdicts
    for lease, worker in ((1, "a"), (2, "b"), (3, "a")):
        verdicts.received(lease, worker, 0)
        verdicts.finished(lease, worker)
    assert not book.said
    verdicts.committed(4)
    assert book.take() == [("a", (1, 3), APPLIED, ()), ("b", (2,), APPLIED, ())]


def test_what_was_turned_away_is_not_named(book: Book) -> None:
    verdicts = book.verdicts
    verdicts.received(1, "a", 0)
    verdicts.turned_away(2, "b")  # bucket 0
    verdicts.received(2, "b", 1)
    verdicts.finished(2, "b")
    verdicts.committed(4)
    assert book.take() == [("b", (2,), APPLIED, (1,))]
    verdicts.answered(1, "a", STALE, "the lease had ended")
    assert book.take() == [("a", (1,), APPLIED, (0,))]


def test_of_a_lease_whose_buckets_were_all_turned_away_nothing_counts(book: Book) -> None:
    book.verdicts.turned_away(1, "a")
    book.verdicts.finished(1, "a")
    book.verdicts.committed(4)
    assert book.take() == [("a", (1,), DUPLICATE, ())]


def test_a_lease_that_ended_waits_for_the_fate_of_what_it_left_behind(book: Book) -> None:
    verdicts = book.verdicts
    verdicts.received(1, "a", 0)
    verdicts.answered(1, "a", STALE, "it failed")
    assert verdicts.owed("a")
    assert not book.said
    verdicts.dropped(1, 0)
    assert book.take() == [("a", (1,), STALE, ())]
    assert not verdicts.owed("a")


def test_a_discarded_block_is_told_at_once(book: Book) -> None:
    verdicts = book.verdicts
    verdicts.received(1, "a", 0)
    verdicts.finished(1, "a")
    verdicts.dropped(1, 0)
    assert not book.said
    verdicts.decided(1, REJECTED, "it is odd")
    assert book.take() == [("a", (1,), REJECTED, ())]


def test_who_comes_back_hears_what_it_names(book: Book) -> None:
    verdicts = book.verdicts
    verdicts.received(1, "a", 0)
    verdicts.finished(1, "a")
    verdicts.received(2, "a", 0)
    verdicts.left("a")
    verdicts.committed(4)
    book.take()
    verdicts.received(3, "a", 0)  # of the next step
    verdicts.left("a")
    verdicts.returned("a", (1, 2, 3, 99))
    assert book.take() == [("a", (1,), APPLIED, ()), ("a", (2,), APPLIED, (0,)), ("a", (99,), STALE, ())]
    verdicts.committed(5)
    assert book.take() == [("a", (3,), APPLIED, (0,))]


def test_who_comes_back_is_told_of_leases_alike_together() -> None:
    """A session ends for whom too many messages wait."""
    book, many = Book(), range(1, 601)
    for lease in many:
        book.verdicts.received(lease, "a", 0)
        book.verdicts.finished(lease, "a")
        if lease % 2:
            book.verdicts.turned_away(lease, "a")
    book.verdicts.committed(4)
    book.verdicts.left("a")
    book.take()
    whole, partly = tuple(many[1::2]), tuple(many[::2])
    for _ in range(2):
        book.verdicts.returned("a", (*many, 999))
        assert book.take() == [("a", partly, APPLIED, (0,)), ("a", whole, APPLIED, ()), ("a", (999,), STALE, ())]


@pytest.mark.parametrize("leaves", [True, False])
def test_leases_alike_are_told_of_together_when_their_step_ends_or_their_worker_leaves(leaves: bool) -> None:
    book, many = Book(), range(1, 601)
    for lease in many:
        book.verdicts.received(lease, "a", 0)
        book.verdicts.finished(lease, "a")
        if lease % 2:
            book.verdicts.turned_away(lease, "a")
    if leaves:
        book.verdicts.presume("a")
    else:
        book.verdicts.committed(4)
    partly, whole = ("a", tuple(many[::2]), APPLIED, (0,)), ("a", tuple(many[1::2]), APPLIED, ())
    assert book.take() == [partly, whole]


def test_what_counts_is_written_while_the_event_loop_goes_on() -> None:
    """A checkpoint's thread asks for it."""
    counted = Counted()

    class Version(int):
        def __ge__(self, other: int) -> bool:  # as another thread's turn would come in the middle
            counted.note(3, (), 7)
            return super().__ge__(other)

    counted.note(1, (), Version(5))
    counted.note(2, (0,), Version(6))
    assert counted.records(0, 9) == [[1], [2, 0]]


def test_another_workers_leases_tell_nothing(book: Book) -> None:
    verdicts = book.verdicts
    verdicts.received(1, "a", 0)
    verdicts.returned("b", (1,))
    verdicts.answered(1, "b", STALE, "the lease had ended")
    assert book.take() == [("b", (1,), STALE, ())] * 2
    verdicts.finished(1, "a")
    verdicts.committed(4)
    assert book.take() == [("a", (1,), APPLIED, ())]


def test_what_a_worker_has_shown_to_have_read_is_forgotten(book: Book) -> None:
    verdicts = book.verdicts
    verdicts.received(1, "a", 0)
    verdicts.finished(1, "a")
    verdicts.committed(4)
    verdicts.answered(2, "a", DUPLICATE, "its step had been computed")  # between versions 4 and 5
    verdicts.confirmed("a", 4)
    book.take()
    verdicts.returned("a", (1, 2))
    assert book.take() == [("a", (1,), STALE, ()), ("a", (2,), DUPLICATE, ())]


def test_leases_that_never_were_take_no_memory(book: Book) -> None:
    """A worker that lies may be done with any number of them."""
    verdicts = book.verdicts
    for lease in range(10**9, 10**9 + 1000):
        verdicts.answered(lease, "a", STALE, "the lease had ended")
    assert book.take() == [("a", (lease,), STALE, ()) for lease in range(10**9, 10**9 + 1000)]
    assert sum(map(len, verdicts._told.values())) == 0
    verdicts.returned("a", (10**9,))
    assert book.take() == [("a", (10**9,), STALE, ())]


def test_what_was_said_last_counts(book: Book) -> None:
    verdicts = book.verdicts
    verdicts.answered(1, "a", DUPLICATE, "its step had been computed")
    verdicts.answered(1, "a", STALE, "the lease had ended")
    book.take()
    verdicts.returned("a", (1,))
    assert book.take() == [("a", (1,), STALE, ())]


def test_nothing_is_kept_where_no_codec_leaves_anything_out() -> None:
    book = Book(lasting=False)
    book.verdicts.received(1, "a", 0)
    book.verdicts.finished(1, "a")
    book.verdicts.committed(4)
    book.take()
    book.verdicts.returned("a", (1,))
    assert book.take() == [("a", (1,), STALE, ())]


def test_the_next_coordinator_says_what_had_counted(book: Book) -> None:
    """This one was killed before its workers had read it: what it said is in the journal, or in a checkpoint."""
    verdicts = book.verdicts
    verdicts.received(1, "a", 0)
    verdicts.finished(1, "a")
    verdicts.turned_away(2, "b")  # bucket 0
    verdicts.received(2, "b", 1)
    verdicts.finished(2, "b")
    verdicts.answered(3, "b", REJECTED, "not finite")
    verdicts.committed(4)
    verdicts.received(5, "c", 0)
    verdicts.finished(5, "c")
    kept = json.loads(json.dumps(book.counted.records(4, 4)))
    assert kept == [[1], [2, 1]]
    later = Book()
    later.counted.restore(kept, 4)
    later.verdicts.returned("a", [1])
    later.verdicts.returned("b", [2, 3])
    later.verdicts.returned("c", [5])
    assert later.take() == [
        ("a", (1,), APPLIED, ()), ("b", (2,), APPLIED, (1,)), ("b", (3,), STALE, ()), ("c", (5,), STALE, ()),
    ]  # fmt: skip
    assert later.counted.records(0, 9) == kept  # until it is known that they have read it
    later.verdicts.confirmed("a", 4)
    assert later.counted.records(0, 9) == [[2, 1]]


def test_what_was_promised_is_no_part_of_a_version_before_its_step_is(book: Book) -> None:
    verdicts = book.verdicts
    verdicts.received(1, "a", 0)
    verdicts.finished(1, "a")
    verdicts.presume("a")
    assert book.take() == [("a", (1,), APPLIED, ())]
    assert book.counted.records(0, 3) == []
    verdicts.committed(4)
    assert book.counted.records(4, 4) == [[1]]


def test_what_nobody_asks_for_is_forgotten_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_COUNTED", 3)
    counted = Counted()
    counted.restore([[lease] for lease in range(5)], 1)
    assert counted.records(0, 1) == [[2], [3], [4]]
    with pytest.raises((TypeError, ValueError)):
        counted.restore([["x"]], 1)  # type: ignore[list-item]


def test_where_codecs_leave_nothing_out_nothing_is_kept() -> None:
    book = Book(lasting=False)
    book.verdicts.received(1, "a", 0)
    book.verdicts.finished(1, "a")
    book.verdicts.committed(4)
    assert book.counted.records(0, 9) == []
