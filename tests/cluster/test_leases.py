"""What becomes of leases: backups, deadlines, late results, links that stall. The coordinator is real, the workers do
what the test says, frame by frame, on a clock that only the test moves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs
from tests.support.scripted import LEAVES, WAYS, Run, Scripted, ready, said, scripted, settle

from w5xde_async.errors import LinkLost
from w5xde_async.hub.members.session import Session
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.telemetry.events import Waiting, Warned, WorkerLeft
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import (
    Bye,
    ByeCode,
    Done,
    Drain,
    Failed,
    Heartbeat,
    Lease,
    Params,
    Ready,
    Revoke,
    Verdict,
    VerdictCode,
)

BUCKETS = 4
TWO_LEASES = PacingConfig(leases_ahead=2, target_lease_s=0.0, min_lease_s=0.0, whole_step_s=0.0)  # of a leaf each


@pytest.fixture(autouse=True, params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "shares", request.param == "memory")


async def first_step(run: Run, *workers: Scripted, leaf_s: float = 0.01) -> None:
    """Every worker gets to know its pace: step 0 is computed in turn, ``leaf_s`` a leaf."""
    turn = {worker: 0 for worker in workers}
    while run.training.version == 0 and not run.training.ledger.complete(0):
        for worker, number in turn.items():
            leases = [lease for lease in worker.all(Lease) if lease.step == 0]
            if number < len(leases):
                run.now += leaf_s * len(leases[number].samples)
                await worker.compute(leases[number], compute_s=leaf_s * len(leases[number].samples))
                turn[worker] += 1
                if 0 not in run.training.ledger.open_steps or run.training.ledger.complete(0):
                    break
        await settle(2)
        if 0 not in run.training.ledger.open_steps:
            break
    await run.commits(1)
    for worker in workers:
        await worker.version(1)


def held(worker: Scripted, step: int) -> list[Lease]:
    """Its open leases of a step."""
    return [lease for lease in worker.all(Lease) if lease.step == step and worker.run.training.ledger.get(lease.lease)]


async def finish(run: Run, worker: Scripted, step: int) -> None:
    """Compute whatever this worker holds of a step until it holds nothing."""
    while mine := held(worker, step):
        await worker.compute(mine[0])


async def stuck_and_idle(run: Run) -> tuple[Scripted, Scripted, Lease]:
    """Two workers; of step 1 there is one lease left, which the first holds and does not compute."""
    stuck, idle = await run.worker("stuck"), await run.worker("idle")
    await first_step(run, stuck, idle)
    await run.until(lambda: held(stuck, 1))

    def left() -> int:
        """Leaves of step 1 that nobody has been given yet: the loader's thread makes them ready."""
        given = [lease for worker in (stuck, idle) for lease in worker.all(Lease) if lease.step == 1]
        return LEAVES - sum(len(lease.samples) for lease in given)

    while left() or held(idle, 1):
        await run.until(lambda: held(idle, 1))
        await finish(run, idle, 1)
    (lease,) = held(stuck, 1)
    assert not held(idle, 1)
    return stuck, idle, lease


async def test_a_late_lease_is_backed_up_by_a_worker_without_work():
    async with scripted() as run:
        stuck, idle, lease = await stuck_and_idle(run)
        await run.pass_time(0.01)
        assert not held(idle, 1)  # not late yet
        await run.pass_time(2.0)
        (backup,) = held(idle, 1)
        assert (backup.start, backup.samples, run.training.ledger.num_backups) == (lease.start, lease.samples, 1)
        await idle.compute(backup)
        await run.commits(2)
        assert run.applied() == {2.0}
        assert stuck.revoked()[0] == lease.lease
        assert not held(stuck, 2)  # it owes an answer: no step waits for it again
        await stuck.compute(lease)  # too late, and harmless
        (verdict,) = [v for v in stuck.all(Verdict) if lease.lease in v.leases]
        assert verdict.code == VerdictCode.DUPLICATE
        assert run.applied() == {2.0}
        assert run.training.phase.leaves_wasted == len(lease.samples)
        assert not stuck.ended()
        await idle.compute(held(idle, 2)[0])
        assert held(stuck, 2)  # it has answered


async def test_both_halves_of_a_contested_block_count_once():
    """The first sends one bucket, the backup the other: the block is done with the first DONE that finds it whole."""
    async with scripted() as run:
        stuck, idle, lease = await stuck_and_idle(run)
        await stuck.send(lease, 0)
        await run.pass_time(2.0)
        (backup,) = held(idle, 1)
        await idle.send(backup, *range(BUCKETS))  # bucket 0 is there already
        await stuck.done(lease)
        await run.commits(2)
        assert run.applied() == {2.0}
        assert backup.lease in idle.revoked()


async def test_the_first_complete_copy_of_a_bucket_counts():
    """The first worker's line collapses in the middle of a bucket. The backup finishes the step, whatever still comes
    over that line, which is not cut."""
    async with scripted() as run:
        stuck, idle, lease = await stuck_and_idle(run)
        chunks = stuck.result(lease, 0, as_bytes=True)
        await stuck.link.send([chunks[0], memoryview(chunks[1])[:1000]])
        await settle()
        assert stuck.session.receiving == lease.lease
        await run.pass_time(2.0)
        (backup,) = held(idle, 1)
        await idle.compute(backup)
        await run.commits(2)
        await settle()
        assert run.applied() == {2.0}
        assert [v.code for v in idle.all(Verdict) if backup.lease in v.leases] == [VerdictCode.APPLIED]
        await stuck.link.send([b"\x7f" * (len(chunks[1]) - 1000)])  # it is nobody's any more
        await settle()
        assert stuck.session.receiving is None
        await stuck.done(lease)
        for worker in (idle, stuck):
            await finish(run, worker, 2)
        await run.commits(3)
        assert run.applied() == {3.0}
        assert not stuck.ended()
        (verdict,) = [v for v in stuck.all(Verdict) if lease.lease in v.leases]
        assert verdict.code == VerdictCode.DUPLICATE
        assert run.training.store.num_vectors <= LEAVES


async def test_of_two_copies_on_their_way_the_second_is_dropped():
    """The first worker's bucket is whole while the backup's is still on its way."""
    async with scripted() as run:
        stuck, idle, lease = await stuck_and_idle(run)
        theirs = stuck.result(lease, 0, as_bytes=True)
        await stuck.link.send([theirs[0], memoryview(theirs[1])[:1000]])
        await run.pass_time(2.0)
        (backup,) = held(idle, 1)
        ours = idle.result(backup, 0, as_bytes=True)
        await idle.link.send([ours[0], memoryview(ours[1])[:1000]])
        await settle()
        await stuck.link.send([memoryview(theirs[1])[1000:]])
        await settle()
        await idle.link.send([b"\x7f" * (len(ours[1]) - 1000)])
        await idle.send(backup, *range(1, BUCKETS))
        await idle.done(backup)
        await run.commits(2)
        assert run.applied() == {2.0}


async def test_nothing_is_absent_that_another_is_sending():
    """The first stops in the middle of a bucket, the backup says that this bucket is nothing: that finishes nothing."""
    async with scripted() as run:
        stuck, idle, lease = await stuck_and_idle(run)
        chunks = stuck.result(lease, 0, as_bytes=True)
        await stuck.link.send([chunks[0], memoryview(chunks[1])[:1000]])
        await settle()
        await run.pass_time(2.0)
        (backup,) = held(idle, 1)
        await idle.send(backup, *range(1, BUCKETS))
        await idle.done(backup, absent=(0,))
        assert not [v for v in idle.all(Verdict) if backup.lease in v.leases]
        assert run.training.version == 1
        await stuck.link.send([memoryview(chunks[1])[1000:]])  # what it sends still has its place
        await settle()
        await stuck.done(lease)
        await run.commits(2)
        assert run.applied() == {2.0}
        assert not stuck.ended()


async def test_an_overdue_lease_goes_to_another_and_its_result_is_stale():
    """A worker that was stopped for longer than its deadline costs that one lease."""
    async with scripted(pacing=PacingConfig(leases_ahead=1, backup_factor=1e6), silence_s=60.0) as run:
        stuck, idle, lease = await stuck_and_idle(run)
        await run.pass_time(4.9)
        assert held(stuck, 1) == [lease]
        await run.pass_time(0.2)
        assert stuck.revoked() == [lease.lease]
        assert not held(stuck, 1)  # it costs one lease, not one after the other
        await finish(run, idle, 1)
        await run.commits(2)
        assert not held(stuck, 2)
        await stuck.compute(lease)
        assert [v.code for v in stuck.all(Verdict) if lease.lease in v.leases] == [VerdictCode.STALE]
        assert run.applied() == {2.0}
        assert run.training.phase.refused == {VerdictCode.STALE: 1}
        await run.until(lambda: held(stuck, 2))  # it has shown that it lives


@pytest.mark.parametrize(("workers", "ahead", "nap_s"), [(2, 2, 20.0), (3, 1, 20.0), (3, 2, 300.0), (5, 2, 60.0)])
async def test_a_leaf_that_takes_whoever_has_it_long_is_done(workers: int, nap_s: float, ahead: int) -> None:
    """After others that took a hundredth of a second: a compiler is at work, a file is fetched. Everybody has it done
    after its deadline, and is asked to do it again: so it has to have more time each time."""
    pacing = PacingConfig(leases_ahead=ahead, target_lease_s=0.0, min_lease_s=0.0, whole_step_s=0.0)
    async with scripted(pacing=pacing, silence_s=1e6) as run:
        all_of_them = [await run.worker("one"), await run.worker("two")]
        await first_step(run, *all_of_them)
        all_of_them += [await run.worker(f"worker-{number}") for number in range(2, workers)]
        for worker in all_of_them:
            for _ in range(run.config.pacing.window):  # they have been at work for a while
                run.training.pacing.observe(worker.worker_id, 1, 0.01, taken_s=0.01)
        until: dict[Scripted, tuple[Lease, float]] = {}  # what each is at
        answered: set[int] = set()
        began, tries = run.now, 0
        while run.training.version < 2:
            assert run.now - began < 4 * nap_s, told(run, "overdue")
            for worker in all_of_them:
                if worker in until:
                    lease, end = until[worker]
                    if run.now < end:
                        continue
                    del until[worker]
                    await worker.compute(lease)
                dead = set(worker.revoked())
                for one in worker.all(Lease):
                    if one.lease in dead and one.lease not in answered:  # it had not begun it
                        answered.add(one.lease)
                        await worker.done(one, absent=tuple(range(BUCKETS)))
                mine = [one for one in worker.all(Lease) if one.step == 1 and one.lease not in answered]
                begun = next(iter(mine), None)
                if begun is not None:
                    slow = begun.start <= 2 < begun.start + len(begun.samples)
                    tries += slow
                    until[worker] = begun, run.now + (nap_s if slow else 0.01)
                    answered.add(begun.lease)
            await run.pass_time(nap_s / 40)
        assert run.training.phase.refused.keys() <= {VerdictCode.STALE, VerdictCode.DUPLICATE}
        assert tries <= 8
        if workers > 2:
            assert any("times as long as usual" in text for text in told(run, "overdue"))
        assert not run.training.ledger._overran  # the step is over


async def test_one_that_never_answers_for_an_overdue_lease_is_cut_off():
    """It lives, as far as its link says: whoever started it sees that it does not come back."""
    async with scripted(pacing=PacingConfig(leases_ahead=1, backup_factor=1e6), silence_s=1e6) as run:
        stuck, idle, lease = await stuck_and_idle(run)
        await run.pass_time(5.1)
        assert stuck.revoked() == [lease.lease]
        await finish(run, idle, 1)
        await run.pass_time(290.0)
        assert len(run.training.roster.sessions) == 2
        await run.pass_time(15.0)
        assert len(run.training.roster.sessions) == 1


async def test_one_that_is_to_begin_anew_is_told_why():
    """Else it would look for somebody between who has cut it off."""
    async with scripted(silence_s=1e6) as run:
        worker = await run.worker("one")
        worker.session.dismiss("its lease's deadline passed")
        await settle()
        assert worker.all(Bye) == [Bye(ByeCode.STOPPING, "its lease's deadline passed")]
        assert [event.reason for event in run.events if isinstance(event, WorkerLeft)] == [
            "its lease's deadline passed"
        ]
        assert not run.training.roster.sessions


async def test_one_in_the_middle_of_a_frame_is_ended_without_a_word():
    async with scripted(silence_s=1e6) as run:
        worker = await run.worker("one", limit_bytes=1000)
        worker.session.outbox.post([bytes(5000)])  # no frame: it is to be seen that nothing comes behind it
        await settle(3)
        worker.session.dismiss("its lease's deadline passed")
        await settle()
        assert not worker.said_goodbye()
        assert not run.training.roster.sessions


async def test_a_lease_has_come_when_all_that_left_before_is_acknowledged():
    """However much is sent after it: a line that is never empty would keep its time from beginning for ever."""
    async with scripted(silence_s=1e6) as run:
        session = (await run.worker("one")).session
        link, line = session.link, SimpleNamespace(acked_bytes=40, sent_through=100)
        session.link = cast(Any, line)
        assert not session.has_taken(7)
        line.acked_bytes, line.sent_through = 99, 500
        assert not session.has_taken(7)
        line.acked_bytes = 100
        assert session.has_taken(7)
        assert session.has_taken(7)
        assert not session.has_taken(8)
        line.acked_bytes = 500
        assert session.has_taken(8)
        line.acked_bytes = line.sent_through = None  # nobody says
        assert session.has_taken(9)
        session.link = link


def told(run: Run, word: str) -> list[str]:
    return [event.text for event in run.events if isinstance(event, Warned) and word in event.text]


async def test_the_only_worker_may_take_its_time():
    """Nobody else could do it sooner, and what it takes is learned: a deadline too short is no livelock."""
    async with scripted(silence_s=1e6) as run:
        lone = await run.worker("lone")
        await first_step(run, lone)
        (lease,) = held(lone, 1)
        await run.pass_time(1000.0)
        assert held(lone, 1) == [lease]
        assert told(run, "overdue") == []  # a moment of nothing is no reason to worry anybody
        for _ in range(3):
            await run.pass_time(50.0)
        (text,) = told(run, "overdue")  # once
        assert "lone" in text
        assert "no other worker is here" in text
        other = await run.worker("other")
        await run.pass_time(0.1)
        assert lone.revoked() == [lease.lease]
        await lone.compute(lease)
        deadline_s, computing_s = run.training.pacing.deadline_s("lone", len(lease.samples)), 0.01 * len(lease.samples)
        assert 10.0 <= deadline_s <= 10.0 + 8 * computing_s  # twice what it was, and what its leaves take
        assert other


async def test_a_result_in_the_middle_at_its_deadline_is_dropped_and_its_link_stays():
    async with scripted(pacing=PacingConfig(leases_ahead=1, backup_factor=1e6), silence_s=60.0) as run:
        stuck, idle, lease = await stuck_and_idle(run)
        chunks = stuck.result(lease, 1, as_bytes=True)
        await stuck.link.send([chunks[0], memoryview(chunks[1])[:1000]])
        await settle()
        await run.pass_time(6.0)
        assert stuck.revoked() == [lease.lease]
        (again,) = held(idle, 1)
        await idle.compute(again)
        await run.commits(2)
        await stuck.link.send([b"\x7f" * (len(chunks[1]) - 1000)])  # nobody's any more
        await settle()
        await stuck.done(lease)
        assert run.applied() == {2.0}
        assert not stuck.ended()
        assert [v.code for v in stuck.all(Verdict) if lease.lease in v.leases] == [VerdictCode.STALE]


async def test_a_repeated_done_is_a_duplicate():
    """A submission is idempotent: the same frames again change nothing."""
    async with scripted() as run:
        worker = await run.worker("a")
        lease = await worker.lease()
        for _ in range(3):
            await worker.compute(lease)
        assert run.training.phase.refused == {VerdictCode.DUPLICATE: 2}
        done = number = 1
        while done < LEAVES:
            following = await worker.lease(number)
            await worker.compute(following)
            done, number = done + len(following.samples), number + 1
        await run.commits(1)
        assert run.applied() == {1.0}
        await settle()
        verdicts = [v for v in worker.all(Verdict) if lease.lease in v.leases]
        assert [(v.code, v.buckets) for v in verdicts] == [(VerdictCode.APPLIED, ())]  # one a lease


async def test_work_that_nobody_had_asked_for_is_none_in_vain():
    """A worker may say what it likes of leases that never were, and of its own that have ended."""
    async with scripted() as run:
        worker = await run.worker("a")
        lease, phase = await worker.lease(), run.training.phase
        losses = (1.0,) * 5000
        await worker.link.send(encode(Done(987654321, losses, (), (), (), (), 0, 0.0, 0.0)))
        await worker.compute(lease)
        assert (phase.leaves_wasted, phase.refused) == (0, {})
        await worker.link.send(encode(Done(lease.lease, losses, (), (), (), (), 0, 0.0, 0.0)))
        await settle()
        assert (phase.leaves_wasted, phase.refused) == (len(lease.samples), {VerdictCode.DUPLICATE: 1})


async def test_leases_of_another_term_have_other_numbers():
    numbers = []
    for term in (1, 2):
        async with scripted(term=term) as run:
            numbers.append((await (await run.worker("a")).lease()).lease)
    assert numbers == [(1 << 32) + 1, (2 << 32) + 1]
    async with scripted(term=3) as run:
        worker = await run.worker("a")
        await worker.link.send(encode(Done(numbers[0], (1.0,), (), (), (), (), 0, 0.0, 0.0)))
        await settle()
        assert [v.code for v in worker.all(Verdict)] == [VerdictCode.STALE]


async def test_a_worker_that_takes_nothing_gets_no_more_and_is_dropped(monkeypatch: pytest.MonkeyPatch):
    """It joins and reads no byte from then on, but goes on sending heartbeats."""
    monkeypatch.setattr(Run, "shares", False)  # what lies in shared memory need not be taken
    async with scripted(credit_bytes=0) as run:
        deaf = await run.worker("deaf", ready=False, limit_bytes=4096)
        deaf.link.freeze()
        await deaf.link.send(ready(run))
        await settle()
        assert run.training.ledger.num_held(deaf.worker_id) == 1
        for _ in range(12):
            await deaf.beat()
            await run.pass_time(1.0)
        assert not deaf.ended()
        await deaf.beat()
        await run.pass_time(1.5)
        assert deaf.ended()
        (left,) = [event for event in run.events if isinstance(event, WorkerLeft)]
        assert "taken nothing" in left.reason
        assert run.training.ledger.free_leaves(0) == LEAVES


async def test_a_slow_reader_is_not_a_dead_one():
    async with scripted() as run:
        slow = await run.worker("slow", ready=False, limit_bytes=1024)
        slow.link.freeze()
        await slow.link.send(ready(run))
        await settle()
        for _ in range(40):
            await slow.beat()
            await run.pass_time(1.0)
            slow.link._memory.inbound.data.clear()  # a kilobyte has got through
            slow.link._memory.inbound.changed()
            await settle()
        assert not slow.ended()


async def test_a_worker_that_floods_and_reads_nothing_is_dropped():
    """Every DONE of a lease that it never had is answered; the answers do not pile up."""
    async with scripted() as run:
        deaf = await run.worker("deaf", ready=False, limit_bytes=4096)
        deaf.link.freeze()
        await deaf.link.send(ready(run))

        async def flood() -> None:
            for number in range(600):
                await deaf.link.send(encode(Done(number, (1.0,), (), (), (), (), 0, 0.0, 0.0)))
                await settle(2)
                assert deaf.session.outbox.num_messages <= 257

        with pytest.raises(LinkLost):
            await flood()
        await settle()
        assert deaf.ended()


async def test_a_worker_that_holds_hundreds_of_leases_is_told_at_once_that_all_are_taken_from_it():
    """As when it drains, or one of them is overdue, with --leases-ahead 256."""
    async with scripted() as run:
        worker = await run.worker("a")
        for number in range(2 * 256):
            worker.session.post(Revoke(number, "draining"))
        worker.session.post(Heartbeat(""))
        await settle()
        assert not worker.ended()
        assert worker.revoked() == list(range(2 * 256))
        for _ in range(2 * 256):
            worker.session.post(Heartbeat(""))
        await run.until(worker.ended)


async def test_a_late_connection_does_not_push_out_a_newer_one():
    """The same worker connected twice; the older connection's READY comes last."""
    async with scripted() as run:
        older = await run.worker("a", ready=False)
        newer = await run.worker("a")
        await older.ready()
        assert older.ended()
        assert not newer.ended()
        assert run.training.roster.sessions["a"] is newer.session


async def test_a_newer_connection_takes_the_place_of_a_half_open_one():
    async with scripted() as run:
        older = await run.worker("a")
        lease = await older.lease()
        newer = await run.worker("a")
        assert older.ended()
        again = await newer.lease()
        assert (again.start, again.lease != lease.lease) == (lease.start, True)


async def test_of_two_connections_that_are_shared_with_at_once_the_newer_one_stays(monkeypatch: pytest.MonkeyPatch):
    """Memory is opened in a thread, which may take its time."""
    async with scripted() as run:
        opened = asyncio.Event()

        async def share(session: Session, said: Ready) -> None:
            await opened.wait()

        monkeypatch.setattr(run.training.roster, "share", share)
        older, newer = [await run.worker("a", ready=False) for _ in range(2)]
        for one in (older, newer):
            await one.ready()
        assert not run.training.roster.sessions
        opened.set()
        await settle()
        assert older.ended()
        assert run.training.roster.sessions == {"a": newer.session}
        assert [grant.lease for grant in run.training.ledger.held("a")] == [(await newer.lease()).lease]


async def test_an_older_connection_that_ends_takes_nothing_of_the_newer_one():
    async with scripted() as run:
        older, newer = [await run.worker("a", ready=False) for _ in range(2)]
        await newer.link.send(encode(structs.replace(said(run), shards=(7, 8))))
        await settle()
        older.link.abort()
        await settle()
        assert (older.ended(), newer.ended()) == (True, False)
        assert run.training.context.loader._members == {"a": (7, 8)}


async def test_who_never_becomes_ready_loses_the_place():
    async with scripted(join_s=30.0) as run:
        slow = await run.worker("slow", ready=False)
        for _ in range(29):
            await slow.beat()
            await run.pass_time(1.0)
        assert not slow.ended()
        await slow.beat()
        await run.pass_time(1.0)
        assert slow.ended()


async def test_a_drain_keeps_the_lease_under_way_and_returns_the_other():
    async with scripted(pacing=PacingConfig(leases_ahead=2, target_lease_s=0.0, min_lease_s=0.0)) as run:
        worker = await run.worker("a")
        first, second = await worker.lease(0), await worker.lease(1)
        await worker.send(first, *range(BUCKETS))
        await worker.link.send(encode(Drain("spot notice", 0.0)))
        await settle()
        assert worker.revoked() == [second.lease]
        assert run.training.ledger.get(first.lease) is not None
        await worker.done(first)
        assert worker.said_goodbye()
        assert (run.training.ledger.num_open, run.training.phase.leaves_wasted) == (0, 0)


async def test_a_drain_takes_back_no_short_lease_that_may_have_been_begun():
    """Before it hears what the coordinator takes back, a worker is at its second lease."""
    async with scripted(pacing=TWO_LEASES) as run:
        worker, other = await run.worker("a"), await run.worker("b")
        await first_step(run, worker, other)
        await run.until(lambda: len(held(worker, 1)) == 2)
        first, second = held(worker, 1)
        await drain(worker)
        await worker.compute(first)
        assert not worker.said_goodbye()
        await worker.compute(second)
        assert worker.said_goodbye()
        await finish(run, other, 1)
        await run.commits(2)
        assert (run.training.phase.leaves_wasted, run.applied()) == (0, {2.0})


@pytest.mark.parametrize("leaf_s", [0.01, 1.0])
async def test_a_drain_takes_back_long_leases_and_those_of_the_next_step(leaf_s: float):
    """The worker would be long in leaving, or cannot have begun them."""
    async with scripted(pacing=TWO_LEASES) as run:
        worker, other = await run.worker("a"), await run.worker("b")
        await first_step(run, worker, other, leaf_s=leaf_s)
        if leaf_s < 1.0:
            await worker.compute(held(worker, 1)[0])
            await run.until(lambda: held(worker, 2))
        await run.until(lambda: len(held(worker, 1)) + len(held(worker, 2)) == 2)
        first, second = held(worker, 1) + held(worker, 2)
        assert (second.step == 1) == (leaf_s == 1.0)
        await drain(worker)
        assert worker.revoked() == [second.lease]
        await worker.compute(first)
        assert worker.said_goodbye()


async def test_all_may_drain_though_one_holds_a_lease_of_the_next_step():
    """Whoever could have finished this step leaves as well: the next one's parameters would never come."""
    async with scripted(pacing=TWO_LEASES) as run:
        worker, other = await run.worker("a"), await run.worker("b")
        await first_step(run, worker, other)
        while not held(worker, 2):
            await run.until(lambda: held(worker, 1) or held(worker, 2))
            await finish(run, worker, 1)
        assert held(other, 1)
        assert not held(worker, 1)
        ahead = [lease.lease for lease in held(worker, 2)]
        await worker.link.send(encode(Drain("spot notice", 25.0)))
        await settle()
        assert worker.revoked() == ahead
        assert worker.said_goodbye()
        assert run.training.phase.leaves_wasted == 0


async def test_a_drain_takes_back_what_was_not_sent_and_keeps_what_was():
    """The oldest lease waits for its data still: the next one is what its worker is at."""
    async with scripted(pacing=TWO_LEASES) as run:
        worker, other = await run.worker("a"), await run.worker("b")
        await first_step(run, worker, other, leaf_s=1.0)
        await run.until(lambda: len(held(worker, 1)) == 2)
        first, second = held(worker, 1)
        grant = run.training.ledger.get(first.lease)
        assert grant is not None
        run.training.scheduler.unread[first.lease] = grant
        await drain(worker)
        assert (held(worker, 1), worker.revoked()) == ([second], [])
        await worker.compute(second)
        assert worker.said_goodbye()


async def drain(worker: Scripted) -> None:
    await worker.link.send(encode(Drain("spot notice", 0.0)))
    await settle()
    assert not worker.said_goodbye()


async def test_who_drains_and_fails_is_let_go():
    async with scripted() as run:
        worker = await run.worker("a")
        lease = await worker.lease()
        await drain(worker)
        await worker.link.send(encode(Failed(lease.lease, lease.start, "ValueError", "")))
        await settle()
        assert len(worker.all(Bye)) == 1


async def test_who_drains_and_is_overtaken_by_a_backup_is_let_go():
    async with scripted() as run:
        stuck, idle, _ = await stuck_and_idle(run)
        await run.pass_time(2.0)
        await drain(stuck)
        await finish(run, idle, 1)
        assert len(stuck.all(Bye)) == 1


async def test_who_drains_and_is_overdue_is_let_go():
    async with scripted(pacing=PacingConfig(leases_ahead=1, backup_factor=1e6), silence_s=600.0) as run:
        stuck, _, _ = await stuck_and_idle(run)
        await drain(stuck)
        await run.pass_time(300.0)
        assert len(stuck.all(Bye)) == 1


@pytest.mark.parametrize("factor", [2.0, 4.0])
async def test_a_backup_waits_for_its_factor(factor: float):
    async with scripted(pacing=PacingConfig(leases_ahead=1, backup_factor=factor, min_backup_s=0.001)) as run:
        _, idle, lease = await stuck_and_idle(run)
        late_s = run.training.pacing.late_s("stuck", len(lease.samples))
        assert late_s is not None
        began = run.training.ledger.began_at(run.training.ledger.get(lease.lease))
        await run.pass_time(began + late_s - run.now - 0.0005)
        assert not held(idle, 1)
        await run.pass_time(0.001)
        assert len(held(idle, 1)) == 1


async def test_a_hung_worker_gives_back_what_it_has_not_begun_as_well():
    pacing = PacingConfig(leases_ahead=2, backup_factor=1e6, target_lease_s=0.0, min_lease_s=0.0)
    async with scripted(pacing=pacing, silence_s=60.0) as run:
        stuck, idle = await run.worker("stuck"), await run.worker("idle")
        await first_step(run, stuck, idle)
        both = held(stuck, 1)
        assert len(both) == 2
        await run.pass_time(30.0)
        assert stuck.revoked()[:2] == [lease.lease for lease in both]
        await finish(run, idle, 1)
        await run.commits(2)
        assert run.applied() == {2.0}


async def test_workers_that_are_given_up_blame_no_leaf():
    """Peers that take a lease and do nothing are dropped one after the other; the run goes on."""
    async with scripted(silence_s=5.0) as run:
        for number in range(12):
            idler = await run.worker(f"idler-{number}")
            assert (await idler.lease()).start == 0
            for _ in range(6):
                await run.pass_time(1.0)
            assert idler.ended()
        worker = await run.worker("good")
        await first_step(run, worker)
        assert run.applied() == {1.0}


@pytest.mark.parametrize("why", ["quarantined", "other sums"])
async def test_workers_that_are_put_out_blame_no_leaf(why: str):
    """They did not die of what they had."""
    async with scripted() as run:
        out = await run.worker("out")
        await out.lease()
        roster = run.training.roster
        if why == "quarantined":
            roster.quarantine("out", out.session, "it lied")
        else:
            assert roster.keep_to("other") == ["out"]
        await settle()
        assert not run.training.ledger.held("out")
        await out.link.aclose()
        await run.until(out.ended)
        assert not run.training.ledger._deaths


async def test_why_nothing_is_leased_is_said_once_not_at_every_look() -> None:
    async with scripted(min_workers=2) as run:
        for _ in range(3):
            await run.pass_time(1.0)
        await run.worker("builds", ready=False)
        for _ in range(3):
            await run.pass_time(1.0)
        await run.worker("first")
        for _ in range(3):
            await run.pass_time(1.0)
        said = [event.reason for event in run.events if isinstance(event, Waiting)]
        assert said[0] == "0 of 2 workers"
        assert said[-1] == "1 of 2 workers, 1 joining"
        assert len(set(said)) == len(said)


async def test_who_has_no_work_is_sent_no_parameters_and_that_is_said_once():
    """Six workers on four leaves a step: two are there in vain, until one that has work leaves."""
    async with scripted() as run:
        workers = [await run.worker(f"w{number}") for number in range(LEAVES + 2)]

        def leaves_of(step: int) -> int:
            """That are with the workers: the loader's thread makes them ready."""
            return sum(len(lease.samples) for worker in workers for lease in held(worker, step))

        for version in range(1, 4):
            await run.pass_time(1.0)
            await run.until(lambda: leaves_of(version - 1) == LEAVES)  # noqa: B023
            for worker in workers:
                await finish(run, worker, version - 1)
            await run.commits(version)
            await settle()
        for worker in workers:
            told = {params.version for params in worker.all(Params)}
            had = {lease.version for lease in worker.all(Lease)}
            assert told <= had | {0}, "a version that it has no lease of"
        warned = [event.text for event in run.events if isinstance(event, Warned)]
        assert [text for text in warned if "without work" in text] == warned
        assert len(warned) == 1
        assert f"{LEAVES + 2} workers share steps of {LEAVES} leaves: 2 without work" in warned[0]

        await run.until(lambda: leaves_of(3) == LEAVES)
        gone = next(worker for worker in workers if held(worker, 3))
        gone.link.abort()
        await settle()
        stayed = [worker for worker in workers if worker is not gone]
        while 3 in run.training.ledger.open_steps and not run.training.ledger.complete(3):
            await run.until(lambda: any(held(worker, 3) for worker in stayed))
            for worker in stayed:
                await finish(run, worker, 3)
        await run.commits(4)
        assert run.applied() == {4.0}
