"""Blocks that are held and computed a second time, frame by frame: who gets which lease, and what counts in the end.

The first block of a run is always compared, which is what most of these tests wait for. Nothing is recomputed here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support import scripted as scripted_workers
from tests.support.scripted import LEAVES, WAYS, Run, Scripted, _Readable, scripted, settle

from w5xde_async.coordinator.sync import verification
from w5xde_async.coordinator.sync.recomputation import ReferenceResult
from w5xde_async.job import Job
from w5xde_async.params.flat import ResultVector
from w5xde_async.plan.audit import Auditor, HeldBlock, Why
from w5xde_async.plan.membership import Standing
from w5xde_async.plan.tree import Block
from w5xde_async.telemetry.events import Audited, Warned, WorkerQuarantined
from w5xde_async.updates.config import UpdateConfig
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


def quarantined(run: Run) -> list[str]:
    return [event.worker_id for event in run.events if isinstance(event, WorkerQuarantined)]


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


async def test_those_who_come_and_go_switch_off_no_comparison_for_those_who_stay(monkeypatch: pytest.MonkeyPatch):
    """What is known of how a member computes is kept for as long as it is one."""
    monkeypatch.setattr(verification, "_REMEMBERED", 4)
    monkeypatch.setattr(Auditor, "draw", lambda *_: True)
    async with judged(min_workers=2, audit_fraction=1.0) as run:
        a, b = await run.worker("a"), await run.worker("b")
        judging = run.training.verification
        for number in range(6):
            judging.joined(f"guest-{number}", judging._machines["b"], "", "far")
            judging._unusual[f"guest-{number - 1}"] = [1, 1]  # judged after it had left
            judging.left(f"guest-{number}")
        await work(a, b, until=lambda: run.training.version >= 1)
        assert {event.worker_id for event in audits(run)} == {"a", "b"}
        assert (len(judging._seen), len(judging._unusual)) == (6, 4)


async def test_of_a_step_that_overflows_everywhere_one_block_is_confirmed():
    """Whatever the others hold, nothing is applied: nobody computes them again."""
    own = Own()
    async with judged(min_workers=3, recomputation=own) as run:
        own.run = run
        workers = [await run.worker(name) for name in "abc"]
        await work(*workers, until=lambda: run.training.version >= 2)
        audited, num_buckets = run.training.results.leaves_audited, len(run.prepared.spec.layout.result_buckets)
        async with asyncio.timeout(5):
            while run.training.version < 3:
                for worker in workers:
                    for lease in worker.all(Lease):
                        if run.training.ledger.get(lease.lease) and lease.step == 2 == run.training.version:
                            await worker.send(lease, *range(num_buckets), value=math.inf)
                            await worker.done(lease)
                await asyncio.sleep(0.001)
        assert 1 <= run.training.results.leaves_audited - audited <= 2
        assert not [event for event in run.events if isinstance(event, WorkerQuarantined)]
        await work(*workers, until=lambda: run.training.version >= 4)
        assert run.applied() == {3.0}


async def test_nobody_is_looked_for_while_as_many_blocks_are_compared_as_may_be(monkeypatch: pytest.MonkeyPatch):
    """Where many are held, each message that comes would else look through all workers for each of them."""
    async with judged() as run:
        await (await run.worker("a")).lease()
        judging, ledger = run.training.verification, run.training.ledger
        for leaf in range(LEAVES):
            held = HeldBlock(0, Block(leaf, leaf + 1), "a", Why.NORM, {0: "a"})
            if leaf < 2:
                held.lease = ledger.audit(0, held.block, "a", now=run.now, deadline_s=9.0).lease
            block: Any = SimpleNamespace(held=held, other=None)
            judging._held.append(block)
        asked = list[str]()
        monkeypatch.setattr(judging, "_numerics", asked.append)
        assert judging.leases(["a"]) == []
        assert not asked
        judging._held.clear()


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
    halved = 1.0  # of a sample, in smaller pieces of a microbatch

    async def recompute(self, plan: Any, block: Block, splits: int = 0) -> ReferenceResult:
        self.asked += 1
        vector = ResultVector(self.run.prepared.spec.layout)
        for piece in vector.buckets:
            piece.fill_(float(plan.samples_in(*block)) * (self.halved if splits else 1.0))
        losses = tuple(1.0 for _ in range(block.num_leaves))
        return ReferenceResult(vector, frozenset(range(len(vector.buckets))), losses, (), splits=splits)


@pytest.mark.parametrize("left", [False, True], ids=["is here", "has left"])
async def test_a_name_that_is_put_out_leaves_nothing_in_the_sum_and_comes_back_by_no_other_id(
    left: bool, monkeypatch: pytest.MonkeyPatch
):
    """Of its other workers too, which are cut off, and also where the one that was found has left."""
    named = property(lambda self: "alice" if self.name.startswith("a") else "", lambda self, value: None)
    monkeypatch.setattr(_Readable, "identity", named, raising=False)
    told, own = list[str](), Own()
    async with judged(min_workers=3, recomputation=own) as run:
        own.run = run
        monkeypatch.setattr(run.training.roster, "_on_quarantine", lambda name, reason: told.append(name))
        first, second, honest = await run.worker("a1"), await run.worker("a2"), await run.worker("b")
        await work(first, second, honest, until=lambda: run.training.version >= 2)
        found, other = await open_lease(first), await open_lease(second)
        await second.send(other, 0, value=-1.5)  # of usual size
        await first.send(found, 0, 1, 2, 3, value=1e6)
        await first.done(found)
        if left:
            await first.link.aclose()
            await until(first.ended)
        await work(honest, until=lambda: bool(told))
        await until(second.ended)
        assert not run.training.store.supplied_by("a2")
        await work(honest, until=lambda: run.training.version >= 3)
        assert run.applied() == {float(run.training.version)}
        assert told == ["alice"]


async def open_lease(worker: Scripted) -> Lease:
    """One that it holds of the step under way."""
    training = worker.run.training

    def held() -> list[Lease]:
        return [one for one in worker.all(Lease) if training.ledger.get(one.lease) and one.step == training.version]

    await until(lambda: bool(held()))
    return held()[0]


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


@pytest.mark.parametrize("words", ["loss", "untouched"])
async def test_who_finishes_a_block_answers_for_what_it_says_of_it(words: str, monkeypatch: pytest.MonkeyPatch):
    """Losses and untouched parameters are its words, though another has sent a part of the sums."""
    own = Own()
    async with judged(min_workers=3, recomputation=own) as run:
        own.run = run
        a, b, c = [await run.worker(name) for name in "abc"]
        await work(a, b, c, until=lambda: run.training.version >= 2)
        liar, again = await begun_by(a, b, c)
        monkeypatch.setattr(Auditor, "draw", lambda *_: True)
        liar.loss, liar.untouched = (math.nan, ()) if words == "loss" else (1.0, (0,))
        await liar.compute(again)
        liar.loss, liar.untouched = 1.0, ()
        a = await run.worker("a")
        await work(a, b, c, until=lambda: run.training.version >= 3)
        assert quarantined(run) == [liar.worker_id]
        assert run.applied() == {float(run.training.version)}


def of_pairs() -> Job:
    """Microbatches that can be halved."""
    return dataclasses.replace(scripted_workers.job(), batch_size=8, microbatch_size=2)


@pytest.mark.parametrize("said", [False, True], ids=["it never said so", "it said so before"])
@pytest.mark.parametrize("returns", [False, True], ids=["it stays away", "it is back"])
async def test_who_lacks_memory_and_loses_its_line_in_the_middle_of_a_block_is_not_put_out(
    said: bool, returns: bool, monkeypatch: pytest.MonkeyPatch
):
    """Smaller pieces have other sums (batch norm), and how often it had halved them this time is not known."""
    job = of_pairs()
    monkeypatch.setattr(scripted_workers, "job", lambda: job)
    own = Own()
    own.halved = 1.5
    async with judged(min_workers=3, recomputation=own) as run:
        own.run = run
        a, b, c = [await run.worker(name) for name in "abc"]
        a.splits, a.value = (1, 1.5) if said else (0, 1.0)
        await work(a, b, c, until=lambda: run.training.version >= 2)
        a.value = 1.5
        finisher, again = await begun_by(a, b, c)
        monkeypatch.setattr(Auditor, "draw", lambda *_: True)
        here = [b, c]
        if returns:
            here.append(await run.worker("a"))
            here[-1].splits, here[-1].value = a.splits, 1.5 if said else 1.0
        await finisher.compute(again)
        await work(*here, until=lambda: run.training.version >= 3)
        assert [event.agreed for event in audits(run) if event.worker_id == finisher.worker_id].count(False) == 1
        assert quarantined(run) == []
        if not said:
            assert run.applied() == {float(run.training.version)}


async def test_who_has_said_that_it_halves_microbatches_hides_no_lie_that_another_finishes(
    monkeypatch: pytest.MonkeyPatch,
):
    job = of_pairs()
    monkeypatch.setattr(scripted_workers, "job", lambda: job)
    own = Own()
    async with judged(min_workers=3, recomputation=own) as run:
        own.run = run
        a, b, c = [await run.worker(name) for name in "abc"]
        a.splits = 1
        await work(a, b, c, until=lambda: run.training.version >= 2)
        a.value = -1.5
        finisher, again = await begun_by(a, b, c)
        drawn: list[set[str]] = []
        monkeypatch.setattr(Auditor, "draw", lambda *given: drawn.append({*given[4:]}) or True)
        await finisher.compute(again)
        await work(b, c, until=lambda: run.training.version >= 3)
        assert {"a", finisher.worker_id} in drawn, "it is drawn as often as a block of either"
        assert quarantined(run) == ["a"]
        assert run.applied() == {float(run.training.version)}


@pytest.mark.parametrize("value", [1e6, math.nan])
async def test_who_sends_far_too_much_of_blocks_and_leaves_them_to_others_is_put_out(value: float):
    """By a lossy codec three results that are far larger than the gradient are proof: of who has sent them, though it
    is gone each time. One that is not finite is proof at once."""
    own = Own()
    async with judged(min_workers=3, recomputation=own, update=UpdateConfig(codec="topk:0.1")) as run:
        own.run = run
        a, b, c = [await run.worker(name) for name in "abc"]
        await work(a, b, c, until=lambda: run.training.version >= 1)
        for number in range(3 if math.isfinite(value) else 1):
            assert quarantined(run) == []
            if number:
                a = await run.worker("a")
            a.value = value
            finisher, again = await begun_by(a, b, c)
            await finisher.compute(again)
            await until(lambda lease=again.lease, by=finisher: verdicts(by).get(lease) is VerdictCode.REJECTED)
        await work(b, c, until=lambda: run.training.version >= 5)
        assert quarantined(run) == ["a"]
        assert run.applied() == {float(run.training.version)}


@pytest.mark.parametrize("codec", ["topk:0.1", ""])
async def test_who_halves_for_lack_of_memory_and_loses_its_line_is_not_put_out_for_what_pieces_give(
    codec: str, monkeypatch: pytest.MonkeyPatch
):
    """In smaller pieces the job gives NaN, as a deviation over single samples is; also where no two are compared."""
    job = of_pairs()
    monkeypatch.setattr(scripted_workers, "job", lambda: job)
    own = Own()
    own.halved = math.nan
    async with judged(min_workers=3, recomputation=own, update=UpdateConfig(codec=codec or "raw")) as run:
        own.run = run
        a, b, c = [await run.worker(name) for name in "abc"]
        await work(a, b, c, until=lambda: run.training.version >= 1)
        a.splits, a.value = 1, math.nan
        finisher, again = await begun_by(a, b, c)
        await finisher.compute(again)
        await work(b, c, until=lambda: run.training.version >= 2)
        assert verdicts(finisher)[again.lease] is VerdictCode.REJECTED
        assert quarantined(run) == []
        assert run.applied() == {float(run.training.version)}


@pytest.mark.parametrize("off", [1e-6, 3e-5, 3e-4])
async def test_of_what_one_halved_and_an_equal_one_finished_nobody_says_that_bits_differ(
    off: float, monkeypatch: pytest.MonkeyPatch
):
    job = of_pairs()
    monkeypatch.setattr(scripted_workers, "job", lambda: job)
    own = Own()
    own.halved = 1.0 + off
    async with judged(min_workers=3, recomputation=own) as run:
        own.run = run
        a, b, c = [await run.worker(name) for name in "abc"]
        await work(a, b, c, until=lambda: run.training.version >= 1)
        a.splits, a.value = 1, own.halved
        finisher, again = await begun_by(a, b, c)
        monkeypatch.setattr(Auditor, "draw", lambda *_: True)
        await finisher.compute(again)
        await work(b, c, until=lambda: run.training.version >= 2)
        assert quarantined(run) == []
        said = [event.text for event in run.events if isinstance(event, Warned)]
        assert not [text for text in said if "differ" in text or "other last bits" in text or "something else" in text]


async def test_a_steps_small_last_leaf_is_computed_in_all_pieces_that_its_worker_may_have_made(
    monkeypatch: pytest.MonkeyPatch,
):
    """It is the job's microbatch that is halved: once leaves two samples together, and twice does not."""
    job = dataclasses.replace(scripted_workers.job(), batch_size=6, microbatch_size=4)
    monkeypatch.setattr(scripted_workers, "job", lambda: job)
    tried: list[int] = []

    class Twice(Own):
        async def recompute(self, plan: Any, block: Block, splits: int = 0) -> ReferenceResult:
            tried.append(splits)
            self.halved = 1.5 if splits == 2 else 1.0
            return await super().recompute(plan, block, splits)

    own = Twice()
    async with judged(min_workers=2, recomputation=own) as run:
        own.run = run
        block = SimpleNamespace(other=None)
        block.held = SimpleNamespace(block=Block(1, 2))
        monkeypatch.setattr(run.training.verification, "_is_held", lambda *_: True)
        a = await run.worker("a")
        await until(lambda: run.training.aggregator.step is not None)
        assert a is not None
        pieces = run.training.verification._in_other_pieces(block, 0)  # type: ignore[arg-type]
        assert [found.splits async for found in pieces if found is not None] == tried == [1, 2]


async def test_who_sent_what_is_too_large_is_told_by_what_is_beyond_and_not_by_what_is_large():
    """One large bucket as it is to be, and many small ones of another worker, each ninety times as large."""
    async with judged() as run:
        judge, many = run.training.verification, 199
        judge._roles = dict.fromkeys(range(many + 1), "grad")
        suppliers = {number: "liar" if number else "honest" for number in range(many + 1)}
        held = HeldBlock(1, Block(0, 1), "honest", Why.NORM, suppliers)
        sent = {number: 0.9 if number else 1.0 for number in suppliers}
        block = SimpleNamespace(held=held, hands={"liar", "honest"}, norms=sent, samples=1)
        sizes = {"grad": verification.Size(math.hypot(*sent.values()), None)}
        gives = {number: 0.01 if number else 1.0 for number in suppliers}
        assert judge._who_sent_more(block, sizes, gives) == "liar"  # type: ignore[arg-type]


async def begun_by(worker: Scripted, *others: Scripted) -> tuple[Scripted, Lease]:
    """``worker`` sends one bucket of an open lease, and is gone. Who of the others is to finish it, by which lease."""
    run = worker.run
    await work(*others, until=lambda: any(is_open(run, lease) for lease in worker.all(Lease)))
    mine = next(lease for lease in worker.all(Lease) if is_open(run, lease))
    await worker.send(mine, 0, value=worker.value)
    await worker.link.aclose()
    await until(worker.ended)
    async with asyncio.timeout(5):
        while True:
            for other in others:
                for lease in [lease for lease in other.all(Lease) if is_open(run, lease)]:
                    if same_block(lease, mine):
                        assert lease.there == (0,)
                        return other, lease
                    await other.compute(lease)
            await asyncio.sleep(0.001)


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
