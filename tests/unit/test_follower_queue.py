"""A rank that is not the head does what the head announces, whatever has come on its own link by then."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from w5xde_async.compute.block import ComputedBlock
from w5xde_async.compute.engine import LeafError
from w5xde_async.errors import UsageError
from w5xde_async.parallel.engine import LoneLeafError
from w5xde_async.wire.messages import Lease, Params, Submit, Verdict, VerdictCode
from w5xde_async.worker.connection.compute_queue import ComputeThread, Item
from w5xde_async.worker.connection.follower_queue import FollowerQueue
from w5xde_async.worker.connection.inbox import Inbox
from w5xde_async.worker.connection.leases import Leases
from w5xde_async.worker.executors.executor import Computed, HeldLease, Send, Version
from w5xde_async.worker.executors.island import IslandExecutor, Turn

NOTHING = ComputedBlock(
    losses=(), metric_names=(), metrics=(), untouched=(), absent=(), splits=0, compute_s=0.0, vectors=()
)  # fmt: skip


class Rank:
    """An executor that notes what it does, and the head."""

    def __init__(self, *, exact: bool) -> None:
        self.exact, self.did, self.said = exact, list[Any](), queue.Queue[tuple[int, int]]()
        self._done = threading.Condition()

    def hear(self) -> tuple[int, int]:
        return self.said.get(timeout=30)

    def announce(self, turn: Turn, number: int = 0) -> None:
        self.said.put((turn, number))

    def has_done(self, count: int) -> None:
        with self._done:
            assert self._done.wait_for(lambda: len(self.did) >= count, 30), self.did

    def _did(self, *what: Any) -> None:
        with self._done:
            self.did.append(what)
            self._done.notify()

    def load(self, version: Version) -> None:
        self._did("load", version.number, version.buckets)

    def compute(self, held: HeldLease, send: Send) -> Computed:
        self._did("compute", held.message.lease)
        return Computed(NOTHING)

    def submit(self, asked: Submit) -> Computed:
        self._did("submit", asked.lease)
        return Computed(NOTHING)

    def settle(self, verdict: Verdict) -> None:
        self._did("settle", *verdict.leases)


class Answers:
    def __init__(self) -> None:
        self.voided: list[int] = []

    def void(self, lease: int) -> None:
        self.voided.append(lease)

    def done(self, *_: Any) -> None:
        pass

    submitted = result = done


@asynccontextmanager
async def following(*, exact: bool) -> AsyncIterator[tuple[Rank, FollowerQueue, Answers]]:
    rank, answers, failed = Rank(exact=exact), Answers(), list[BaseException]()
    with ThreadPoolExecutor(1) as pool:
        follower = FollowerQueue(
            cast(IslandExecutor, rank), ComputeThread(pool=pool, patience_s=30.0), cast(Leases, answers),
            on_failure=failed.append,
        )  # fmt: skip
        try:
            yield rank, follower, answers
        finally:
            rank.announce(Turn.END)
            await follower.aclose()
    assert not failed


def lease(number: int, version: int) -> Lease:
    return Lease(number, version, version, 0, (1,), 1.0, False, b"")


def held(number: int, version: int) -> HeldLease:
    return HeldLease(lease(number, version), (), 0)


def version(number: int, *buckets: int) -> Version:
    return Version(number, 1.0, buckets)


async def until(rank: Rank, count: int) -> list[Any]:
    """What it has done, once that is so much; what comes of it has been answered then."""
    await asyncio.to_thread(rank.has_done, count)
    await asyncio.sleep(0)
    return rank.did


async def test_a_version_that_the_heads_link_has_overtaken_is_loaded_with_the_next() -> None:
    async with following(exact=True) as (rank, follower, _):
        follower.put([version(5, 0, 1), version(6, 1, 2)])
        rank.announce(Turn.LOAD, 6)
        assert await until(rank, 1) == [("load", 6, (0, 1, 2))]


async def test_a_version_that_this_ranks_link_has_overtaken_keeps_nobody_waiting() -> None:
    """The head has version 5 and a lease of it; here 6 has come in its place."""
    async with following(exact=True) as (rank, follower, _):
        follower.put([version(6, 0, 1), held(1, 5)])
        rank.announce(Turn.LOAD, 5)
        rank.announce(Turn.COMPUTE, 1)
        rank.announce(Turn.LOAD, 6)
        assert await until(rank, 3) == [("load", 5, ()), ("compute", 1), ("load", 6, (0, 1))]


@pytest.mark.parametrize(
    ("exact", "come", "last"),
    [
        (True, lambda: [version(5), held(1, 5), version(6), held(2, 6)], 6),  # of a version that is past
        (False, lambda: [version(0), held(1, 0), held(2, 0)], 0),  # these rules do leases in their order
    ],
    ids=["exact", "in order"],
)
async def test_a_lease_that_the_head_does_not_come_to_is_not_kept_for_good(
    exact: bool, come: Callable[[], Sequence[Item]], last: int
) -> None:
    """One that was revoked is never announced."""
    async with following(exact=exact) as (rank, follower, answers):
        follower.put(come())
        rank.announce(Turn.LOAD, last)
        rank.announce(Turn.COMPUTE, 2)
        await until(rank, 2)
        assert answers.voided == [1]


async def test_people_are_told_of_steps_counted_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    async with following(exact=True) as (rank, follower, _):
        compute = rank.compute

        def noted(held: HeldLease, send: Send) -> Computed:
            seen.append(follower.activity)
            return compute(held, send)

        monkeypatch.setattr(rank, "compute", noted)
        follower.put([version(6), held(1, 6)])
        rank.announce(Turn.LOAD, 6)
        rank.announce(Turn.COMPUTE, 1)
        await until(rank, 2)
    assert seen == ["step 7, leaves 0 to 0"]


async def test_requests_and_verdicts_are_done_in_the_heads_order() -> None:
    async with following(exact=False) as (rank, follower, _):
        follower.put([Verdict((7,), VerdictCode.APPLIED, ""), Verdict((8,), VerdictCode.APPLIED, ""), Submit(9, (0,))])
        for turn, number in ((Turn.SETTLE, 0), (Turn.SUBMIT, 9), (Turn.SETTLE, 0)):
            rank.announce(turn, number)
        assert await until(rank, 3) == [("settle", 7), ("submit", 9), ("settle", 8)]


async def test_verdicts_that_were_not_announced_are_settled_when_the_link_has_ended() -> None:
    async with following(exact=False) as (rank, follower, _):
        follower.put([Verdict((7,), VerdictCode.APPLIED, "")])
    assert rank.did == [("settle", 7)]


def inbox() -> Inbox:
    class Receiver(SimpleNamespace):
        def arrived(self) -> None:
            pass

        def take(self) -> Sequence[Any]:
            return ()

    return Inbox(cast(Any, Receiver()), 1 << 20, exact=True, follows=True)


def test_a_lease_whose_version_was_overtaken_on_this_link_is_kept_for_the_head() -> None:
    waits = inbox()
    waits.lease(lease(1, 5))
    waits.lease(lease(2, 7))
    waits.params(Params(6, 0, 0, 1.0))
    assert [item.message.lease for item in waits.take() if isinstance(item, HeldLease)] == [1]
    waits.params(Params(7, 0, 0, 1.0))
    assert [item.message.lease for item in waits.take() if isinstance(item, HeldLease)] == [2]


@pytest.mark.parametrize("error", [
    LoneLeafError(0, ValueError("a bug")), UsageError("use dp"), RuntimeError("of a rank alone"),
    LeafError(0, ValueError("on all ranks")), None,
])  # fmt: skip
def test_a_head_announces_no_end_after_what_ends_the_island(error: Exception | None) -> None:
    """The others have gone, or wait in the middle of a block: what ended it would give way to a lost neighbour."""
    announced: list[int] = []

    def compute(*_: Any) -> Computed:
        if error is not None:
            raise error
        return Computed(NOTHING)

    own: Any = SimpleNamespace(**dict.fromkeys(
        ("layout", "device", "capacity_bytes", "exact", "newest_first", "parameters")), compute=compute)  # fmt: skip
    lockstep = SimpleNamespace(announce=lambda turn, *_: announced.append(turn))
    executor = IslandExecutor(own, cast(Any, SimpleNamespace(rank=0, lockstep=lockstep)))
    with suppress(LeafError, UsageError, RuntimeError):
        executor.compute(held(1, 0), cast(Any, None))
    executor.end()
    assert announced == [Turn.COMPUTE] + [Turn.END] * (error is None or type(error) is LeafError)
