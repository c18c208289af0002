"""Blocks that are held and computed a second time, frame by frame: who gets which lease, and what counts in the end.

The first block of a run is always compared, which is what most of these tests wait for. Nothing is recomputed here.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.support.scripted import WAYS, Run, Scripted, scripted, settle

from w5xde_async.coordinator.sync import verification
from w5xde_async.coordinator.sync.recomputation import ReferenceResult
from w5xde_async.params.flat import ResultVector
from w5xde_async.plan.membership import Standing
from w5xde_async.plan.tree import Block
from w5xde_async.telemetry.events import Audited, Warned, WorkerQuarantined
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import Failed, Lease, Verdict, VerdictCode


@pytest.fixture(autouse=True, params=["on the loop", "in the thread"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks are weighed and compared on the loop, big ones in the aggregator's thread."""
    monkeypatch.setattr(verification, "_PATIENCE_S", 0.0)  # the clock stands: no first result is waited for
    if request.param == "in the thread":
        monkeypatch.setattr(verification, "INLINE_WEIGH_BYTES", 0)


@pytest.fixture(autouse=True, params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "shares", request.param == "memory")


@asynccontextmanager
async def judged(**config: Any) -> AsyncIterator[Run]:
    async with scripted(norm_gate=6.0, **config) as run:
        yield run


async def send(worker: Scripted, lease: Lease, bucket: int, value: float) -> None:
    """One bucket, all of it ``value`` for each sample."""
    await worker.link.send(worker.result(lease, bucket, value))
    await settle()


async def work(*workers: Scripted, until: Callable[[], bool]) -> None:
    """Have every open lease of the current step computed, until then."""
    async with asyncio.timeout(5):
        while not until():
            for worker in workers:
                training = worker.run.training
                for lease in worker.all(Lease):
                    if lease.step == training.version and training.ledger.get(lease.lease) and not worker.ended():
                        await worker.compute(lease)
            await asyncio.sleep(0.001)  # the loader's and the aggregator's threads have no event here


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the aggregator's thread has no event here
            await asyncio.sleep(0.001)


async def audit_of(lease: Lease, *workers: Scripted) -> tuple[Scripted, Lease]:
    """Who was given the same block again."""
    async with asyncio.timeout(5):
        while True:
            for worker in workers:
                for other in worker.all(Lease):
                    if same_block(other, lease) and other.lease != lease.lease:
                        return worker, other
            await asyncio.sleep(0.001)


def verdicts(worker: Scripted) -> dict[int, VerdictCode]:
    return {lease: VerdictCode(verdict.code) for verdict in worker.all(Verdict) for lease in verdict.leases}


def audits(run: Run) -> list[Audited]:
    return [event for event in run.events if isinstance(event, Audited)]


def same_block(one: Lease, other: Lease) -> bool:
    return (one.step, one.start, one.samples) == (other.step, other.start, other.samples)


async def test_a_held_block_goes_to_another_worker_and_counts_once_when_both_agree():
    async with judged(min_workers=2) as run:
        a, b = await run.worker("a"), await run.worker("b")
        mine, theirs = await a.lease(), await b.lease()
        await a.compute(mine)
        assert run.training.verification.holding
        _, again = await audit_of(mine, b)
        await a.lease(1)  # who waits for a ruling is not kept idle
        await b.compute(theirs)
        await b.compute(again)
        await until(lambda: bool(audits(run)))
        assert [event.agreed for event in audits(run)] == [True]
        assert not run.training.store.supplied_by(b.worker_id)  # an audit's buckets are no part of the step
        assert await freed(run)
        await work(a, b, until=lambda: run.training.version >= 2)
        assert verdicts(a)[mine.lease] is VerdictCode.APPLIED
        assert verdicts(b)[again.lease] is VerdictCode.DUPLICATE
        assert run.training.results.leaves_audited == len(mine.samples)
        assert run.applied() == {float(run.training.version)}


async def freed(run: Run) -> bool:
    """The memory of audits is given back at the next look at the leases."""
    run.training.schedule()
    await settle()
    return run.training.store.num_audits == 0


async def test_whoever_was_to_compare_leaves_and_a_third_does():
    async with judged(min_workers=3) as run:
        a, b, c = await run.worker("a"), await run.worker("b"), await run.worker("c")
        mine = await a.lease()
        await a.compute(mine)
        asked, again = await audit_of(mine, b, c)
        other = c if asked is b else b
        await asked.send(again, 0)  # a part of it, then it is gone
        await asked.link.aclose()
        await settle()
        await audit_of(mine, other)
        await work(a, other, until=lambda: run.training.version >= 1)
        assert [event.second_id for event in audits(run)] == [other.worker_id]
        assert run.applied() == {float(run.training.version)}
        assert await freed(run)


async def test_who_could_not_compare_is_not_asked_again():
    async with judged(min_workers=3) as run:
        a, b, c = await run.worker("a"), await run.worker("b"), await run.worker("c")
        mine = await a.lease()
        await a.compute(mine)
        able = [b, c]
        while able:
            failing, again = await audit_of(mine, *able)
            able.remove(failing)
            await failing.link.send(encode(Failed(again.lease, again.start, "no", "no")))
            await settle()
        await work(a, b, c, until=lambda: run.training.version >= 1)
        assert audits(run) == []
        for worker in (b, c):
            assert sum(same_block(lease, mine) for lease in worker.all(Lease)) == 1
        assert run.applied() == {float(run.training.version)}


class Nobody:
    """The coordinator could compute it, and fails to."""

    asked = 0

    async def recompute(self, plan: Any, block: Any, splits: int) -> None:
        self.asked += 1


@pytest.mark.parametrize("standing", [Standing.DRAINING, Standing.LATE])
async def test_an_odd_block_is_recomputed_here_where_the_other_worker_takes_no_work(standing: Standing):
    """At once where that has not answered for a lease that was taken from it: it may hang, and stay for minutes."""
    recomputation = Nobody()
    async with judged(min_workers=2, recomputation=recomputation) as run:
        a, b = await run.worker("a"), await run.worker("b")
        mine = await a.lease()
        run.training.roster.membership.members[b.worker_id].standing = standing
        await odd(a, mine)
        if standing is Standing.DRAINING:
            await until(lambda: bool(run.training.verification._held))
            for _ in range(9):
                await run.pass_time(1.0)
                await a.beat()
                await b.beat()
            assert mine.lease not in verdicts(a)
            assert recomputation.asked == 0
            await run.pass_time(2.0)
            await a.beat()
            await b.beat()
        await until(lambda: mine.lease in verdicts(a))
        assert recomputation.asked == 1
        assert verdicts(a)[mine.lease] is VerdictCode.REJECTED
        run.training.roster.membership.members[b.worker_id].standing = Standing.READY
        await work(a, b, until=lambda: run.training.version >= 1)
        assert run.applied() == {float(run.training.version)}
        assert not any(isinstance(event, WorkerQuarantined) for event in run.events)


async def test_an_odd_block_waits_for_one_that_may_hang_where_nobody_else_can_judge():
    async with judged(min_workers=2) as run:
        a, b = await run.worker("a"), await run.worker("b")
        mine = await a.lease()
        run.training.roster.membership.members[b.worker_id].standing = Standing.LATE
        await odd(a, mine)
        await until(lambda: bool(run.training.verification._held))
        await run.pass_time(5.0)
        assert run.training.verification._held
        assert mine.lease not in verdicts(a)


async def test_what_a_worker_had_sent_of_a_lease_that_failed_does_not_count():
    """Buckets that had left may be wrong, or of whole microbatches where the next attempt halves them."""
    async with judged(min_workers=2) as run:
        a, b = await run.worker("a"), await run.worker("b")
        mine = await a.lease()
        await send(a, mine, 0, 7.0)
        await a.link.send(encode(Failed(mine.lease, mine.start, "TypeError: two gradients", "")))
        await settle()
        assert not run.training.store.supplied_by(a.worker_id)
        await work(a, b, until=lambda: run.training.version >= 1)
        assert run.applied() == {float(run.training.version)}
        assert not any(isinstance(event, WorkerQuarantined) for event in run.events)


class Own:
    """What the coordinator computes itself: the right result."""

    raised = refused = ""
    run: Run
    asked = threads = 0

    async def recompute(self, plan: Any, block: Block, splits: int = 0) -> ReferenceResult:
        self.asked += 1
        vector = ResultVector(self.run.prepared.spec.layout)
        for piece in vector.buckets:
            piece.fill_(float(plan.samples_in(*block)))
        losses = tuple(1.0 for _ in range(block.num_leaves))
        return ReferenceResult(vector, frozenset(range(len(vector.buckets))), losses, ())


async def test_what_the_coordinator_computes_itself_has_the_threads_of_workers():
    """As many as a worker's have its bits; a GPU's worker says nothing of a CPU's."""
    own = Own()
    async with judged(recomputation=own) as run:
        own.run = run
        await run.worker("a")  # says that it has one
        assert own.threads == 1


@pytest.mark.parametrize("value", [math.nan, 1e6])
async def test_what_a_worker_sent_before_it_died_is_judged_though_one_alone_is_left(value: float):
    """Who finishes a block vouches for its own part of it."""
    own = Own()
    async with judged(min_workers=2, recomputation=own) as run:
        own.run = run
        a, b = await run.worker("a"), await run.worker("b")
        await work(a, b, until=lambda: run.training.version >= 2)
        await until(lambda: any(is_open(run, lease) for lease in a.all(Lease)))
        mine = next(lease for lease in a.all(Lease) if is_open(run, lease))
        await send(a, mine, 0, value)
        await a.link.aclose()
        await settle()
        await work(b, until=lambda: run.training.version >= 4)
        assert own.asked
        assert run.applied() == {float(run.training.version)}
        assert not b.ended()


def is_open(run: Run, lease: Lease) -> bool:
    """Of the step under way, and not ended."""
    return lease.step == run.training.version and run.training.ledger.get(lease.lease) is not None


async def test_what_the_coordinator_computes_itself_counts_in_place_of_what_had_come():
    own = Own()
    async with judged(min_workers=2, recomputation=own, max_leaf_failures=1) as run:
        own.run = run
        a, b = await run.worker("a"), await run.worker("b")
        mine = await a.lease()
        await send(a, mine, 0, 7.0)
        await a.link.aclose()
        await settle()
        await b.compute(await b.lease())
        _, again = await audit_of(mine, b)
        assert again.there == (0,)
        await b.link.send(encode(Failed(again.lease, again.start, "no", "no")))
        await settle()
        await work(b, until=lambda: run.training.version >= 1)
        assert run.applied() == {1.0}


async def test_what_completes_the_step_while_it_is_computed_who_is_wrong_is_not_missed():
    """Meanwhile that worker breaks the protocol, and another has computed all that lacked: the step is complete, and
    nothing comes any more that would tell of it."""
    own, began, done = Own(), asyncio.Event(), asyncio.Event()

    async def recompute(plan: Any, block: Block, splits: int = 0) -> ReferenceResult:
        began.set()
        await done.wait()
        return await Own.recompute(own, plan, block, splits)

    own.recompute = recompute  # type: ignore[method-assign]
    async with judged(min_workers=2, recomputation=own) as run:
        own.run = run
        a, b = await run.worker("a"), await run.worker("b")
        mine = await a.lease()
        await odd(a, mine)
        await b.compute((await audit_of(mine, b))[1])
        await asyncio.wait_for(began.wait(), 5)
        await a.link.send([b"\xff" * 8])  # no length that a frame may have
        await until(a.ended)
        await work(b, until=lambda: run.training.ledger.complete(0))
        assert not run.training.version
        done.set()
        await until(lambda: run.training.version == 1)
        assert run.applied() == {1.0}


@pytest.mark.parametrize(("at", "who"), [("first", "a"), ("second", "a"), ("second", "b")])
async def test_who_breaks_the_protocol_while_a_block_is_compared_here_changes_nothing(
    at: str, who: str, monkeypatch: pytest.MonkeyPatch
):
    """Of big blocks that is done in the aggregator's thread: what is said there of a block that is done again counts
    for nothing."""
    monkeypatch.setattr(verification, "INLINE_WEIGH_BYTES", 0)
    own, reached, go_on, distances = Own(), threading.Event(), threading.Event(), []
    distance = verification.Verification._distance

    def in_the_middle(self: Any, *args: Any) -> Any:
        distances.append(args)
        if len(distances) == (1 if at == "first" else 2):
            reached.set()
            assert go_on.wait(5)
        return distance(self, *args)

    monkeypatch.setattr(verification.Verification, "_distance", in_the_middle)
    async with judged(min_workers=3, recomputation=own) as run:
        own.run = run
        a, b, c = await run.worker("a"), await run.worker("b"), await run.worker("c")
        mine = await a.lease()
        await odd(a, mine)
        second, again = await audit_of(mine, b, c)
        third = c if second is b else b
        await second.compute(again)
        await until(reached.is_set)
        culprit = a if who == "a" else second
        await culprit.link.send([b"\xff" * 8])  # no length that a frame may have
        await until(culprit.ended)
        go_on.set()
        await work(*({a, second, third} - {culprit}), until=lambda: run.training.version >= 1)
        assert run.applied() == {float(run.training.version)}
        assert [event.worker_id for event in run.events if isinstance(event, WorkerQuarantined)] == (
            [] if who == "a" else [a.worker_id]
        )
        run.training.ledger.validate()


async def test_nobody_is_left_to_compare_and_the_block_counts():
    async with judged(min_workers=2) as run:
        a, b = await run.worker("a"), await run.worker("b")
        mine = await a.lease()
        await a.compute(mine)
        assert run.training.verification.holding
        await b.link.aclose()
        await settle()
        await work(a, until=lambda: run.training.version >= 1)
        assert audits(run) == []
        assert run.applied() == {float(run.training.version)}


async def test_what_a_dying_worker_had_sent_counts_with_what_another_adds():
    async with judged(min_workers=3) as run:
        a, b, c = await run.worker("a"), await run.worker("b"), await run.worker("c")
        mine = await a.lease()
        await a.send(mine, 0)
        await a.link.aclose()
        await settle()
        await work(b, c, until=lambda: run.training.version >= 1)
        assert run.applied() == {float(run.training.version)}
        assert all(event.agreed for event in audits(run))


@pytest.mark.parametrize("again_as_bytes", [False, True])
async def test_two_that_differ_without_a_recomputation_are_nobodys_fault_and_the_block_is_done_again(
    again_as_bytes: bool,
):
    async with judged(min_workers=3) as run:
        a, b, c = await run.worker("a"), await run.worker("b"), await run.worker("c")
        mine = await a.lease()
        await odd(a, mine)
        for worker in (a, b, c):
            worker.sends_bytes = again_as_bytes
        await work(a, b, c, until=lambda: run.training.version >= 2)
        assert verdicts(a)[mine.lease] is VerdictCode.REJECTED
        assert run.applied() == {float(run.training.version)}
        assert any(isinstance(event, Warned) and "differ" in event.text for event in run.events)
        assert not any(isinstance(event, WorkerQuarantined) for event in run.events)
        assert await freed(run)


async def odd(worker: Scripted, lease: Lease) -> None:
    """All of it is one, but for the first bucket."""
    await send(worker, lease, 0, math.inf)
    await worker.send(lease, *range(1, len(worker.run.prepared.spec.layout.result_buckets)))
    await worker.done(lease)


async def test_a_result_that_is_not_finite_counts_where_two_workers_come_to_it():
    """Training diverges: the step is skipped, as with one worker, and nobody is to blame."""
    async with judged(min_workers=2) as run:
        a, b = await run.worker("a"), await run.worker("b")
        mine = await a.lease()
        await odd(a, mine)
        await odd(*await audit_of(mine, b))
        await work(a, b, until=lambda: run.training.version >= 1)
        assert [event.agreed for event in audits(run)][:1] == [True]
        assert run.applied() == {float(run.training.version - 1)}
        assert not any(isinstance(event, WorkerQuarantined) for event in run.events)


async def test_a_worker_alone_is_not_held_up():
    async with judged() as run:
        a = await run.worker("a")
        await work(a, until=lambda: run.training.version >= 3)
        assert audits(run) == []
        assert run.applied() == {float(run.training.version)}


async def test_a_step_waits_for_an_audit_no_longer_than_for_a_lease_that_is_late():
    """The second worker's line is slow: nobody backs its audit up."""
    async with judged(min_workers=2, audit_fraction=1.0) as run:
        a, b = await run.worker("a"), await run.worker("b")
        pacing = run.training.pacing
        for _ in range(10):
            pacing.observe(a.worker_id, 1, 0.1, taken_s=0.2)
            pacing.observe(b.worker_id, 1, 0.1, taken_s=40.0)  # a version takes so long on its way there
        mine = await a.lease()
        await a.compute(mine)
        _, again = await audit_of(mine, b)
        assert pacing.deadline_s(b.worker_id, len(mine.samples)) > 300
        assert again.deadline_s == 5.0


async def test_a_block_that_is_compared_by_chance_waits_for_nobody_who_has_never_delivered():
    async with judged(audit_fraction=1.0) as run:
        a = await run.worker("a")
        await work(a, until=lambda: run.training.version >= 1)
        b = await run.worker("b")  # it may hang, and another like it may come after it
        theirs = len(b.all(Lease))
        mine = await a.lease(len(a.all(Lease)) - 1)
        await a.compute(mine)
        await until(lambda: verdicts(a).get(mine.lease) is not None or not run.training.verification.holding)
        assert not any(same_block(lease, mine) for lease in b.all(Lease)[theirs:])
        assert audits(run) == []
