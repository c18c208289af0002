"""A member that lies ends its own session and nothing else: the others' run has the bits that it has without it."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from tests.simulator.loop import VirtualLoop
from tests.support import lying, reference
from tests.support.cluster import QUICK_WORKER, Commits, settings
from tests.support.memory_links import memory_pair
from tests.support.scripted import Run, Scripted, scripted, settle
from tests.support.scripted import said as told
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async.compute.program.form import FORM
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import RefusalCode, Refused, Unreachable
from w5xde_async.hub.members.credentials import Credentials
from w5xde_async.hub.members.session import Session
from w5xde_async.job import Job
from w5xde_async.net.endpoint import connect
from w5xde_async.net.join import worker_secret
from w5xde_async.net.link import Link
from w5xde_async.params.shard import Shard
from w5xde_async.telemetry.events import Event, Warned, WorkerLeft, WorkerQuarantined
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.wire.frame import BufferSpec, encode
from w5xde_async.wire.messages import (
    PROTOCOL_VERSION,
    Challenge,
    Done,
    Hello,
    Introduction,
    Lease,
    Message,
    ProgramRequest,
    Proof,
    Ready,
    Refusal,
    Volunteer,
    Welcome,
)
from w5xde_async.worker.connection.handshake import ask, join, meet
from w5xde_async.worker.service import Departure, Worker


def job(**changes: Any) -> Job:
    """Six leaves of four samples a step."""
    x = torch.randn(48, 10, generator=torch.Generator().manual_seed(0))
    named: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
        "dataset": TensorDataset(x, x[:, :4].argmax(1)),
        "optimizer": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        "loss": nn.functional.cross_entropy, "batch_size": 24, "microbatch_size": 4, "max_steps": 100_000, "seed": 1,
    }  # fmt: skip
    return Job(**{**named, **changes})


def slow_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same, on a machine on which time passes: the run is short, however long the lies take."""
    time.sleep(0.002)
    return nn.functional.cross_entropy(outputs, targets)


@cache
def expected(steps: int) -> str:
    return reference.digest(job(), steps)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", lying.SAID, ids=lambda kind: kind.__name__)
async def test_whatever_a_member_says_the_others_run_is_the_same(
    kind: type[Message], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pytestconfig: pytest.Config
) -> None:
    """Every field of every message that a worker may send, at every extreme, beside an honest worker."""
    monkeypatch.setattr("w5xde_async.worker.connection.dialing._pause_s", lambda links, _: 0.0)
    told = list(lying.lies(kind, everything=pytestconfig.getoption("--every-lie")))
    commits, events = Commits(), list[Event]()
    commits.bus.subscribe(events.append)
    config = settings(heartbeat_s=0.05, max_time_s=170.0, code_free=False)
    async with Coordinator(job(), config=config, bus=commits.bus) as coordinator:
        slow = job(loss=slow_loss)
        honest = asyncio.create_task(Worker(coordinator.address, job=slow, config=QUICK_WORKER).run())
        said = await asyncio.create_task(lying.tell(told, coordinator.address, slow, QUICK_WORKER))
        await commits.reach(commits.step + 2)  # the run goes on
        coordinator.request_stop()
        result = await coordinator.wait()
        honest.cancel()
        left = await asyncio.gather(honest, return_exceptions=True)
    assert said == told
    assert (result.outcome, result.digest) == ("stopped", expected(result.step))
    assert isinstance(left[0], asyncio.CancelledError) or left[0] is Departure.FINISHED
    faults = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert [text for text in faults if not text.startswith("leaf failed")] == []
    for event in events:  # nothing of it drives a terminal
        if isinstance(event, Warned | WorkerLeft):
            assert "\x1b" not in str(event)
            assert len(str(event)) < 5000


# -- how sums are made

TP = "tp=2 1f2e3d4c"


async def commit(run: Run, worker: Scripted, version: int, *, done: int = 0) -> None:
    """Have one worker compute all that is left up to a version; of its leases it has ``done`` so many."""
    while run.training.version < version:
        await run.until(lambda known=done: run.training.version >= version or len(worker.all(Lease)) > known)
        if run.training.version < version:
            lease = await worker.lease(done)
            await worker.version(lease.version)
            await worker.compute(lease)
            done += 1


@pytest.mark.parametrize("numerics", ["evil", "exact evil", "exact 1f2e3d4c", TP])
async def test_who_makes_sums_as_no_worker_can_is_put_out_and_decides_nothing(numerics: str) -> None:
    async with scripted() as run:
        liar = await run.worker("liar", ready=False)
        await liar.link.send(encode(structs.replace(told(run), numerics=numerics)))
        await run.until(liar.ended)
        honest = await run.worker("honest")
        await commit(run, honest, 1)
        assert run.training.context.numerics.past == ["exact"]
        assert run.training.roster.asked == "exact"


@pytest.mark.parametrize("stays", [True, False])
async def test_what_a_member_says_of_its_sums_decides_nothing_before_its_result_counts(stays: bool) -> None:
    async with scripted() as run:
        liars = await run.island("liar", numerics=TP)
        assert len(run.training.roster.sessions) == 1
        if not stays:
            await liars[0].link.aclose()
            await run.until(lambda: not run.training.roster.sessions)
        honest = await run.worker("honest")
        await honest.version(0)
        await honest.compute(await honest.lease())
        (refused,) = liars[0].all(Refusal) if stays else [None]
        assert refused is None or (refused.code, "(tp=2" in refused.reason) == (RefusalCode.NUMERICS, True)
        assert list(run.training.roster.present) == ["honest"]
        await commit(run, honest, 2, done=1)  # what the liar held is there for whoever is left
        assert run.training.context.numerics.past == ["exact"]


async def test_members_of_an_island_whose_result_counts_first_stay_and_the_others_leave() -> None:
    async with scripted() as run:
        ranks, single = await run.island("island", numerics=TP), await run.worker("single")
        for rank in ranks:
            await rank.version(0)
            await rank.compute(await rank.lease())
        assert [one.code for one in single.all(Refusal)] == [RefusalCode.NUMERICS]
        assert list(run.training.roster.present) == ["island"]
        assert run.training.roster.asked == TP


@pytest.mark.parametrize("rule", ["sync", "async", "local", "streaming", "async-local"])
async def test_an_island_that_never_computes_and_comes_first_keeps_nobody_out(rule: Any) -> None:
    short, config = job(max_steps=6), settings(update=UpdateConfig(rule=rule), max_time_s=60.0)
    async with Coordinator(short, config=config) as coordinator:
        links = []
        for rank in range(2):
            link = await connect(coordinator.host, coordinator.port, timeout_s=5)
            links.append(link)
            joined = await join(link, key="eve", name="eve", token="", terms={}, rank=rank, ranks=2)
            runs = [(g.index, rank * (g.numel // 2), (g.numel // 2, g.numel)[rank]) for g in joined.layout.groups]
            shard = Shard.of(joined.layout, runs)
            print_ = joined.layout.fingerprint
            await link.send(encode(Ready(print_, "cpu", "eve", 1, "0", shape="tp=2", shard=shard.packed, numerics=TP)))
        while not coordinator.num_workers:  # noqa: ASYNC110 - joining has no event here
            await asyncio.sleep(0.01)
        honest = asyncio.create_task(Worker(coordinator.address, job=job(max_steps=6), config=QUICK_WORKER).run())
        if rule != "sync":  # there it is put out with the first result that counts
            while coordinator.num_workers < 2:  # noqa: ASYNC110 - joining has no event here
                await asyncio.sleep(0.01)
            for link in links:
                await link.aclose()
        result = await coordinator.wait()
        assert await honest is Departure.FINISHED
        for link in links:
            await link.aclose()
    assert (result.outcome, result.step) == ("finished", 6)
    assert rule != "sync" or result.digest == expected(6)


# -- who is who


def worker(where: str, **changes: Any) -> Worker:
    return Worker(where, job=job(loss=slow_loss), config=replace(QUICK_WORKER, **changes))


async def test_nobody_takes_the_place_of_an_invited_worker(tmp_path: Path) -> None:
    """Somebody with the run's secret says her key and her name, and is put out: she stays."""
    commits = Commits()
    config = settings(join_file=tmp_path / "join", max_time_s=60.0)
    async with Coordinator(job(), config=config, bus=commits.bus) as coordinator:
        invited, told = coordinator.invite("alice"), coordinator.invitation
        assert invited is not None
        assert told is not None
        alice = worker(invited.reveal())
        working = asyncio.create_task(alice.run())
        await commits.reach(2)
        false = worker(told.reveal(), name="alice")
        false._dialer._key = alice._dialer._key  # as if it had been overheard
        lying_ = asyncio.create_task(false.run())
        while coordinator.num_workers < 2:
            await commits.reach(commits.step + 1)
        training = coordinator._training
        assert training is not None
        assert len(training.roster.sessions) == 2  # two, not one in the other's place
        assert not working.done()
        put_out = next(one for one in training.roster.sessions.values() if not one.identity)
        training.roster.quarantine(put_out.worker_id, put_out, "it lied")
        with pytest.raises(Refused):
            await lying_
        await commits.reach(commits.step + 2)
        assert not working.done()
        # Nor is her own secret made of the run's.
        forged = replace(invited, secret=worker_secret(told.secret, "alice"))
        with pytest.raises(Refused, match="token"):
            await worker(forged.reveal()).run()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def test_who_is_put_out_after_it_has_left_is_named() -> None:
    commits, events = Commits(), list[Event]()
    commits.bus.subscribe(events.append)
    async with Coordinator(job(), config=settings(max_time_s=60.0), bus=commits.bus) as coordinator:
        working = asyncio.create_task(worker(coordinator.address, name="eve").run())
        await commits.reach(2)
        training = coordinator._training
        assert training is not None
        (gone,) = training.roster.sessions
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        while training.roster.sessions:  # noqa: ASYNC110 - leaving has no event here
            await asyncio.sleep(0.01)
        training.roster.quarantine(gone, None, "it had lied")
    assert [event.name for event in events if isinstance(event, WorkerQuarantined)] == ["eve"]


async def test_a_name_that_is_put_out_goes_on_by_no_other_link(tmp_path: Path) -> None:
    commits, events = Commits(), list[Event]()
    commits.bus.subscribe(events.append)
    config = settings(join_file=tmp_path / "join", max_time_s=60.0)
    async with Coordinator(job(), config=config, bus=commits.bus) as coordinator:
        invited, bob = coordinator.invite("alice"), coordinator.invite("bob")
        assert invited is not None
        assert bob is not None
        honest = asyncio.create_task(worker(bob.reveal()).run())
        both = [asyncio.create_task(worker(invited.reveal()).run()) for _ in range(2)]
        while coordinator.num_workers < 3:  # noqa: ASYNC110 - joining has no event here
            await asyncio.sleep(0.01)
        training = coordinator._training
        assert training is not None
        first = next(one for one in training.roster.sessions.values() if one.identity == "alice")
        training.roster.quarantine(first.worker_id, first, "it lied")
        for task in both:
            with pytest.raises(Refused, match="it lied"):
                await task
        await commits.reach(commits.step + 2)
        assert [one.identity for one in training.roster.sessions.values()] == ["bob"]
        honest.cancel()
        await asyncio.gather(honest, return_exceptions=True)


async def test_one_name_has_its_share_of_the_places(tmp_path: Path) -> None:
    config = settings(join_file=tmp_path / "join", max_workers=10, min_workers=10, max_time_s=60.0)
    async with Coordinator(job(), config=config) as coordinator:
        invited, bob = coordinator.invite("alice"), coordinator.invite("bob")
        assert invited is not None
        assert bob is not None
        many = [asyncio.create_task(worker(invited.reveal()).run()) for _ in range(8)]
        while coordinator.num_workers < 8:  # noqa: ASYNC110 - joining has no event here
            await asyncio.sleep(0.01)
        with pytest.raises(Unreachable, match="has its 8 workers of alice"):
            await worker(invited.reveal(), connect_timeout_s=0.1).run()
        other = asyncio.create_task(worker(bob.reveal()).run())
        while coordinator.num_workers < 9:  # noqa: ASYNC110 - joining has no event here
            await asyncio.sleep(0.01)
        for task in (*many, other):
            task.cancel()
        await asyncio.gather(*many, other, return_exceptions=True)


@pytest.mark.parametrize(
    ("field", "value"), [("compute_s", 1e9), ("compute_s", 0.0), ("wait_s", 1e9), ("encode_s", 1e9)]
)
async def test_who_lies_about_time_drives_no_deadline(field: str, value: float) -> None:
    """On a clock that only the test moves, leases take as long as the coordinator saw."""
    async with scripted() as run:
        liar, honest = await run.worker("liar"), await run.worker("honest")
        for number in range(3):
            for one in (liar, honest):
                lease = await one.lease(number)
                await one.version(lease.version)
                await one.send(lease, *range(len(run.prepared.spec.layout.result_buckets)))
                done = Done(lease.lease, tuple(1.0 for _ in lease.samples), (), (), (), (), 0, 0.01, 0.0)
                await one.link.send(encode(structs.replace(done, **{field: value}) if one is liar else done))
                await settle()
            run.now += 0.01
        deadlines = [run.training.pacing.deadline_s(one.worker_id, 1) for one in (liar, honest)]
        assert deadlines == [run.config.pacing.min_deadline_s] * 2
        member = run.training.roster.membership.members[liar.worker_id]
        assert max(member.compute_s, member.wait_s, member.encode_s) <= run.now - member.joined_at + 1e-9


async def test_a_stranger_is_given_no_proof_to_try_tokens_on() -> None:
    async with Coordinator(job(), config=settings(token="swordfish")) as coordinator:
        link = await connect(coordinator.host, coordinator.port, timeout_s=5)
        await link.send(encode(Hello(PROTOCOL_VERSION, bytes(32), "", "", "")))
        challenge = (await link.recv()).message
        assert isinstance(challenge, Challenge)
        assert (challenge.auth, challenge.proof) == (True, b"")
        await link.send(encode(Proof(bytes(32))))
        assert isinstance((await link.recv()).message, Refusal)
        await link.aclose()


@pytest.mark.parametrize(("name", "code"), [("eve", RefusalCode.AUTHENTICATION), ("mallory", RefusalCode.QUARANTINED)])
async def test_who_is_locked_out_meets_nobody_and_is_told_nothing(name: str, code: RefusalCode) -> None:
    held = Credentials("swordfish")
    held.revoke("eve")
    held.quarantine("mallory", "it lied")
    async with scripted() as run:

        def serves() -> Link:
            near, far = memory_pair()
            roster = run.training.roster
            run.task(Session(near, roster, run.training, token=held, handshake_s=10.0, incarnation=1).run())
            return far

        for say in (partial(meet, volunteer=Volunteer("dp=2", 2, "host", 1)), ask):
            with pytest.raises(Refused) as caught:
                await say(serves(), token=held.invited(name), identity=name)
            assert caught.value.code is code
        assert not run.training.roster._meeting.num_waiting("dp=2", 2)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (0, "silent for 10 s before it had proved itself"),
        (1, "silent for 10 s before it had proved itself"),
        (2, "silent for 10 s before it had said what it wants"),
        (3, "the description of the run (WELCOME) had not left for it within 10 s"),
    ],
)
def test_why_a_handshake_takes_too_long_is_said(said: int, why: str) -> None:
    told = []

    class Members(SimpleNamespace):
        def left(self, session: Session, reason: str, *, clean: bool) -> None:
            told.append(reason)

    async def greets() -> None:
        near, far = memory_pair(limit_bytes=64)
        near.greeted_s = 4.0  # for TLS
        began = asyncio.get_running_loop().time()
        welcome = Welcome("r", "run", 1, 0, "fp32", 1, 1, 1 << 16, bytes(32), 1.0, 12.0)
        members: Any = Members(admit=lambda session: None, welcome=lambda session: (welcome, []))
        session = Session(near, members, members, token="", handshake_s=10.0, incarnation=1)
        running = asyncio.create_task(session.run())
        for number, message in enumerate((Hello(PROTOCOL_VERSION, bytes(32), "", "", ""), Proof(b""))):
            if number < said:
                await far.send(encode(message))
                await far.recv()
        if said == 3:
            await far.send(encode(Introduction("key", "slow", "1")))
        await running
        assert asyncio.get_running_loop().time() - began == pytest.approx(6.0, abs=0.1)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(greets())
    assert len(told) == 1
    assert told[0].startswith(why)


async def test_the_program_is_sent_once_on_a_link() -> None:
    async with Coordinator(job(), config=settings(code_free=True)) as coordinator:
        link = await connect(coordinator.host, coordinator.port, timeout_s=5)
        await join(link, key="k", name="k", token="", terms={})
        for _ in range(2):
            await link.send(encode(ProgramRequest(FORM, b"")))
        while not isinstance(said := (await link.recv(_anything)).message, Refusal):
            pass
        assert "twice" in said.reason
        await link.aclose()


def _anything(message: Message, specs: tuple[BufferSpec, ...]) -> list[memoryview]:
    return [memoryview(bytearray(spec.nbytes)) for spec in specs]
