"""Runs whose parameters and results lie in memory that coordinator and workers have together: the bits are those of one
process, whatever a worker, a link or the other side does; where memory cannot be shared the link carries the bytes."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from tests.support import jobs, reference
from tests.support.cluster import QUICK_WORKER, Commits, all_gone, settings
from tests.support.scripted import said, scripted, settle
from torch import nn

from w5xde_async.compute.engine import Engine
from w5xde_async.compute.program import sandbox
from w5xde_async.coordinator.parameters import aggregator
from w5xde_async.coordinator.parameters.publisher import LivePublisher
from w5xde_async.coordinator.run import strategy
from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.coordinator.sync import verification
from w5xde_async.errors import UsageError
from w5xde_async.hub.members import roster
from w5xde_async.hub.members.session import Session
from w5xde_async.job import Job
from w5xde_async.net.link import Link
from w5xde_async.params.flat import FlatState, ResultVector, named_digest
from w5xde_async.params.reducer import VectorPool
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.segments import Opened, Segment, Unshared, unsupported
from w5xde_async.telemetry.events import Bus, Event, ResultHeld, WorkerJoined
from w5xde_async.updates import sync
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.on_device import OnDevice
from w5xde_async.updates.sync import SyncRule
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import Params
from w5xde_async.worker import service, sharing
from w5xde_async.worker.connection.handshake import Joined
from w5xde_async.worker.connection.leases import Leases
from w5xde_async.worker.service import Departure, Worker

pytestmark = pytest.mark.skipif(unsupported() != "", reason=unsupported())


@pytest.fixture(autouse=True)
def what_may_be_written_again_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector that a worker may use again holds no result from then on: nobody may be reading one there."""
    give = VectorPool.give

    def giving(pool: VectorPool, vector: ResultVector) -> None:
        if 0 <= vector.slot < len(pool._lent) and pool._lent[vector.slot] is vector:  # else it is of an ended link
            vector.memory.fill_(0xFF)  # not a number
        give(pool, vector)

    monkeypatch.setattr(VectorPool, "give", giving)


@pytest.fixture(autouse=True, params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of small models, and as of those whose results are weighed and divided as they come, in the other thread."""
    if request.param == "large":
        monkeypatch.setattr(aggregator, "_INLINE_UPDATE_BYTES", 0)
        monkeypatch.setattr(aggregator, "_INLINE_ADD_BYTES", 0)
        monkeypatch.setattr(verification, "INLINE_WEIGH_BYTES", 0)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Neither descriptors nor mappings, once nobody has them any more."""
    yield
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in maps if "memfd:w5xde-shared-" in line]
    assert not [name for name in map(_target, os.listdir("/proc/self/fd")) if "memfd:w5xde-shared-" in name]


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


class Model(nn.Module):
    """Buffers, dropout, several buckets; with ``max_norm`` forward itself rescales rows in place."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.rows = nn.Embedding(16, 64, max_norm=max_norm)
        self.body = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x + self.rows((x[:, :4].abs() * 15).long() % 16).sum(1)))


def job(**changes: Any) -> Job:
    given = {"model": Model, "batch_size": 32, "microbatch_size": 4, "max_steps": 12, "drop_last": True, **changes}
    return replace(jobs.mlp_adamw(), **given)


class Seen:
    """What a run has shown of its links."""

    def __init__(self) -> None:
        self.bus = Bus()
        self.links: list[str] = []
        self.bus.subscribe(self._see)

    def _see(self, event: Event) -> None:
        if isinstance(event, WorkerJoined):
            self.links.append(event.link)


async def trained(made: Job, link: str = "auto", *, workers: int = 2, **config: Any) -> tuple[RunResult, list[str]]:
    seen = Seen()
    async with Coordinator(made, config=settings(min_workers=workers, **config), bus=seen.bus) as coordinator:
        given = replace(QUICK_WORKER, link=link)
        running = [
            asyncio.create_task(Worker(coordinator.address, job=made, config=given).run()) for _ in range(workers)
        ]
        try:
            result = await coordinator.wait()
        finally:
            departures = await asyncio.gather(*running, return_exceptions=True)
        assert departures == [Departure.FINISHED] * workers
    return result, seen.links


@pytest.mark.slow
@pytest.mark.parametrize("norm_gate", [0.0, 6.0])
async def test_the_bits_are_those_of_one_process_and_nothing_travels(norm_gate: float) -> None:
    result, links = await trained(job(), norm_gate=norm_gate)
    assert links == ["shm", "shm"]
    assert result.digest == named_digest(reference.train(job())[0])
    over_tcp, links = await trained(job(), "tcp", norm_gate=norm_gate)
    assert links == ["tcp", "tcp"]
    assert over_tcp.digest == result.digest
    # Results and parameters do not travel; the samples do.
    for name in ("bytes_sent", "bytes_received"):
        shared, all_bytes = (sum(getattr(share, name) for share in one.shares) for one in (result, over_tcp))
        assert shared < all_bytes / 10
    assert [sum(share.encoded_bytes for share in one.shares) > 0 for one in (result, over_tcp)]


@pytest.mark.parametrize(
    "make",
    [jobs.odd, *(pytest.param(make, marks=pytest.mark.slow) for make in (jobs.cnn_sgd, jobs.gpt_sgd)), jobs.accumulated,
     jobs.fp16, jobs.words],
)  # fmt: skip
async def test_every_kind_of_model(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Job]) -> None:
    """Frozen, unused and tied parameters, other dtypes, integer buffers, a loss scale; however small the model is."""
    monkeypatch.setattr("w5xde_async.params.layout._SMALL_BYTES", 0)
    result, links = await trained(make())
    assert links == ["shm", "shm"]
    assert result.digest == named_digest(reference.train(make(), result.step)[0])


@pytest.mark.parametrize("kind", ["TLS", "a Unix socket"])
async def test_on_other_connections_within_this_machine_too(tmp_path: Path, kind: str) -> None:
    made, seen = job(max_steps=3), Seen()
    given = replace(QUICK_WORKER, link="shm")
    config = settings(join_file=tmp_path / "join") if kind == "TLS" else settings()
    async with Coordinator(made, config=config, bus=seen.bus) as coordinator:
        if kind == "TLS":
            departure = await Worker(coordinator.local_join, job=made, config=given).run()
        else:
            server = await asyncio.start_unix_server(coordinator.handle, tmp_path / "socket")
            departure = await Worker(job=made, config=given).run(
                *await asyncio.open_unix_connection(tmp_path / "socket")
            )
            server.close()
        result = await coordinator.wait()
    assert departure is Departure.FINISHED
    assert seen.links == ["shm"]
    assert result.digest == named_digest(reference.train(made)[0])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(sandbox.unsupported(torch.device("cpu")) != "", reason="no sandbox here")
async def test_a_sandboxed_program_has_the_same_bits_and_memory() -> None:
    made, seen = job(max_steps=6), Seen()
    given = replace(QUICK_WORKER, link="shm", sandbox="on")
    async with Coordinator(made, config=settings(code_free=True), bus=seen.bus) as coordinator:
        running = asyncio.create_task(Worker(coordinator.address, config=given).run())
        result = await coordinator.wait()
        assert await running is Departure.FINISHED
    assert seen.links == ["shm"]
    assert result.digest == named_digest(reference.train(made)[0])
    assert result.shares[0].bytes_sent < 10_000


async def test_a_step_that_writes_into_its_model_does_no_harm_and_starts_anew_at_each_version() -> None:
    made = job(model=lambda: Model(max_norm=0.5), microbatch_size=32)
    digests = {link: (await trained(made, link, workers=1))[0].digest for link in ("shm", "tcp")}
    assert digests["shm"] == digests["tcp"] != named_digest(reference.train(job(microbatch_size=32))[0])


@pytest.mark.parametrize("link", ["auto", "shm"])
@pytest.mark.parametrize("side", ["coordinator", "worker"])
async def test_where_it_cannot_be_the_link_carries_the_bytes_and_shm_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, link: str, side: str
) -> None:
    def refuses(*_: Any) -> Any:
        raise Unshared("there is no memory for this")

    caplog.set_level("INFO")
    where = (roster, "SharedResults") if side == "coordinator" else (sharing, "Opened")
    monkeypatch.setattr(*where, refuses)
    made = job()
    if link == "auto":
        result, links = await trained(made, link)
        assert links == ["tcp", "tcp"]
        assert result.digest == named_digest(reference.train(made)[0])
        assert "there is no memory for this" in caplog.text
        assert "link=tcp" in caplog.text
        return
    async with Coordinator(made, config=settings()) as coordinator:
        with pytest.raises(UsageError, match=r"--link shm: .*(its log says why|no memory for this)"):
            await Worker(coordinator.address, job=made, config=replace(QUICK_WORKER, link=link)).run()


async def test_a_coordinator_that_can_start_no_thread_takes_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(ThreadPoolExecutor):
        is_full = False

        def submit(self, *args: Any, **kwargs: Any) -> Any:
            if self.is_full:
                raise RuntimeError("can't start new thread")
            return super().submit(*args, **kwargs)

    monkeypatch.setattr(Link, "same_host", True)
    pool = Full(1)
    asyncio.get_running_loop().set_default_executor(pool)
    async with scripted() as run:
        members, layout = run.training.roster, run.prepared.spec.layout
        segment = Segment("parameters", FlatState.nbytes(layout), bytes(32))
        members._greeting = replace(members._greeting, segment=segment)
        worker = await run.worker("a", ready=False)
        pool.is_full = True
        await worker.link.send(encode(structs.replace(said(run), memory=(1, 2, 3))))
        await settle()
        pool.is_full = False
        assert members.sessions == {"a": worker.session}
        assert worker.session.kind == "tcp"
        segment.close()


@pytest.mark.parametrize("link_ends", [True, False])
async def test_a_coordinator_that_has_ended_since_it_offered_memory_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, link_ends: bool
) -> None:
    """Its memory has gone with it, its link perhaps a moment later; the worker is there for the next one."""
    loop, made, opened = asyncio.get_running_loop(), job(), list[int]()

    class Ended(Opened):
        def __init__(self, *given: Any) -> None:
            opened.append(len(opened))
            if len(opened) > 1:
                super().__init__(*given)
                return
            assert worker._connection is not None
            worker._not_opened = (worker._connection.welcome.run_id, 0)  # of a coordinator before this one, too
            if link_ends:
                loop.call_soon_threadsafe(worker._connection.link.abort)
            raise Unshared("there is no such process here")

    caplog.set_level("INFO")
    monkeypatch.setattr(sharing, "Opened", Ended)
    async with Coordinator(made, config=settings()) as coordinator:
        worker = Worker(coordinator.address, job=made, config=replace(QUICK_WORKER, link="shm"))
        running = asyncio.create_task(worker.run())
        result = await coordinator.wait()
        assert await running is Departure.FINISHED
    assert result.digest == named_digest(reference.train(made)[0])
    assert "link=shm" in caplog.text
    assert len(opened) == 2


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        ({"codec": "bf16"}, {}, "rule or codec"),
        ({}, {"model": lambda: nn.Linear(64, 10)}, "small"),
    ],
    ids=["codec", "small"],
)
async def test_shm_where_nothing_is_offered_says_why(config: dict[str, Any], changes: Any, reason: str) -> None:
    given = {"update": UpdateConfig(**config)} if config else {}
    async with Coordinator(job(**changes), config=settings(**given)) as coordinator:
        with pytest.raises(UsageError, match=f"--link shm: .*{reason}"):
            await Worker(coordinator.address, job=job(**changes), config=replace(QUICK_WORKER, link="shm")).run()


@pytest.mark.slow
async def test_a_link_that_ends_while_memory_is_being_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compute thread goes on with it; the next link carries the bytes, and they are what is computed with."""
    loop, ends, made = asyncio.get_running_loop(), threading.Event(), job()
    seen = list[bool]()
    share, of_worker, unshare = service.share, Worker._share, Worker._unshare

    def cut(*arguments: Any) -> Segment:
        segment = share(*arguments)
        assert worker._connection is not None
        loop.call_soon_threadsafe(worker._connection.link.abort)
        assert ends.wait(10.0)
        return segment

    async def next_link(self: Worker, engine: Engine, joined: Joined) -> tuple[int, ...]:
        seen.append(engine._transfer.window is not None and engine._transfer.window.shows)
        self.config = replace(self.config, link="auto" if len(seen) == 2 else "tcp")
        return await of_worker(self, engine, joined)

    async def link_ends(self: Worker) -> None:
        if len(seen) == 2:
            ends.set()
        await unshare(self)

    def first_link_ends(answer: Callable[..., None]) -> Callable[..., None]:
        """When it has the whole version that the coordinator is at, which is not sent again."""

        def answering(self: Leases, *arguments: Any) -> None:
            if len(seen) == 1 and self.whole_version >= 3:
                assert worker._connection is not None
                worker._connection.link.abort()
            else:
                answer(self, *arguments)

        return answering

    monkeypatch.setattr(Leases, "result", first_link_ends(Leases.result))
    monkeypatch.setattr(Leases, "done", first_link_ends(Leases.done))
    monkeypatch.setattr(service, "share", cut)
    monkeypatch.setattr(Worker, "_share", next_link)
    monkeypatch.setattr(Worker, "_unshare", link_ends)
    async with Coordinator(made, config=settings()) as coordinator:
        worker = Worker(coordinator.address, job=made, config=QUICK_WORKER)
        running = asyncio.create_task(worker.run())
        result = await coordinator.wait()
        await running
    assert seen == [False, False, False]
    assert result.digest == named_digest(reference.train(made)[0])


@pytest.mark.slow
@pytest.mark.parametrize("norm_gate", [0.0, 6.0])
@pytest.mark.parametrize("link", ["shm", "tcp"])
async def test_links_that_break_cost_no_bit(monkeypatch: pytest.MonkeyPatch, link: str, norm_gate: float) -> None:
    """The next link has memory of its own: what is still read of the last one is never written again. The second link
    of each worker is of the other kind."""
    made, commits, kinds = job(max_steps=30), Commits(), ["shm", "tcp"]
    if link == "tcp":
        kinds.reverse()
    opened: list[int] = []

    class Counting(Opened):
        def __init__(self, *given: Any) -> None:
            opened.append(len(opened))
            if kinds[(len(opened) - 1) // 2 % 2] == "tcp":
                raise Unshared("not this time")
            super().__init__(*given)

    monkeypatch.setattr(sharing, "Opened", Counting)
    config = settings(min_workers=2, norm_gate=norm_gate)
    async with Coordinator(made, config=config, bus=commits.bus) as coordinator:
        workers = [Worker(coordinator.address, job=made, config=QUICK_WORKER) for _ in range(2)]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        for step in range(3, 24, 3):
            await commits.reach(step)
            assert coordinator._training is not None
            for session in list(coordinator._training.roster.sessions.values())[: 1 + step % 2]:
                session.link.abort()
        result = await coordinator.wait()
        await all_gone(workers, running)
    assert len(opened) > 6
    assert result.digest == named_digest(reference.train(made)[0])


@pytest.mark.parametrize("update_device", [None, torch.device("cpu")])
@pytest.mark.parametrize("norm_gate", [0.0, 6.0])
async def test_a_step_of_one_block_is_updated_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, norm_gate: float, update_device: torch.device | None
) -> None:
    """The whole step is one lease's, and links break: whatever was expected of an earlier lease, the bits are right."""
    made, commits, seen = job(max_steps=20, gradient_clip_val=0.5), Commits(), {"expected": 0, "used": 0}
    expect, divided, bring, apply = SyncRule.expect, sync._divided, OnDevice._bring, SyncRule.apply
    done: list[int] = []

    def expecting(rule: SyncRule, *given: Any) -> float | None:
        seen["expected"] += 1
        return expect(rule, *given)

    def dividing(*given: Any) -> Any:
        done.append(1)
        return divided(*given)

    def bringing(*given: Any) -> None:
        done.append(1)
        bring(*given)

    def applying(rule: SyncRule, *given: Any, **named: Any) -> Any:
        done.clear()
        applied = apply(rule, *given, **named)
        seen["used"] += not done
        return applied

    monkeypatch.setattr(SyncRule, "expect", expecting)
    monkeypatch.setattr(sync, "_divided", dividing)
    monkeypatch.setattr(OnDevice, "_bring", bringing)
    monkeypatch.setattr(SyncRule, "apply", applying)
    monkeypatch.setattr(strategy, "update_device", lambda _: update_device)
    pacing = PacingConfig(target_lease_s=1e6, short_steps="workers")
    config = settings(norm_gate=norm_gate, pacing=pacing)
    async with Coordinator(made, config=config, bus=commits.bus) as coordinator:
        running = asyncio.create_task(Worker(coordinator.address, job=made, config=QUICK_WORKER).run())
        for step in range(4, 20, 4):
            await commits.reach(step)
            assert coordinator._training is not None
            for session in coordinator._training.roster.sessions.values():
                session.link.abort()
        result = await coordinator.wait()
        assert await running is Departure.FINISHED
    assert result.digest == named_digest(reference.train(made)[0])
    if verification.INLINE_WEIGH_BYTES == 0:
        assert seen["expected"] > 20
        assert seen["used"] > 5
    else:
        assert seen["expected"] == 0


@pytest.mark.parametrize("update_device", [None, pytest.param(torch.device("cpu"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("audit_fraction", [0.0, 1.0])
@pytest.mark.parametrize("scale", [3.0, pytest.param(1e6, marks=pytest.mark.slow), math.nan])
async def test_a_result_that_was_another_when_it_was_weighed(
    monkeypatch: pytest.MonkeyPatch, scale: float, audit_fraction: float, update_device: torch.device | None
) -> None:
    """A worker shows one result when its buckets are weighed and another when it is compared: what is applied is what
    was judged, so nothing beyond the gate's bound, and with every block compared nothing but the right one."""
    made, vectors = job(max_steps=20), dict[int, Any]()
    share, expect, steps = Engine.share, SyncRule.expect, []
    held, lies = list[str](), list[int]()

    def sharing_(engine: Engine, parameters: Any, given: Any = ()) -> None:
        vectors.update({id(vector): vector for vector in given})
        share(engine, parameters, given)

    def expecting(rule: SyncRule, bucket: int, summed: torch.Tensor, samples: int) -> float | None:
        steps.append(1)
        if len(steps) < 40 or len(steps) % 7:
            return expect(rule, bucket, summed, samples)
        for vector in list(vectors.values()):
            piece = vector.buckets[bucket]
            if torch.equal(piece, summed) and _is_seen(piece, summed):  # its worker is in this process
                honest = piece.clone()
                piece.mul_(scale)
                norm = expect(rule, bucket, summed, samples)
                piece.copy_(honest)
                lies.append(1)
                return norm
        return expect(rule, bucket, summed, samples)

    monkeypatch.setattr(Engine, "share", sharing_)
    monkeypatch.setattr(SyncRule, "expect", expecting)
    monkeypatch.setattr(strategy, "update_device", lambda _: update_device)
    commits = Commits()
    commits.bus.subscribe(lambda event: held.append(event.why) if isinstance(event, ResultHeld) else None)
    pacing = PacingConfig(whole_step_s=1e6, short_steps="workers")
    config = settings(norm_gate=6.0, audit_fraction=audit_fraction, min_workers=2, pacing=pacing)
    async with Coordinator(made, config=config, bus=commits.bus) as coordinator:
        running = [
            asyncio.create_task(Worker(coordinator.address, job=made, config=QUICK_WORKER).run()) for _ in range(2)
        ]
        result = await coordinator.wait()
        assert await asyncio.gather(*running) == [Departure.FINISHED] * 2
    vectors.clear()
    if audit_fraction == 1.0 or scale != 3.0:  # a factor that the gate allows is found by comparing alone
        assert result.digest == named_digest(reference.train(made)[0])
    if verification.INLINE_WEIGH_BYTES == 0:
        assert len(lies) > 3
        assert held or scale == 3.0


def _is_seen(piece: torch.Tensor, elsewhere: torch.Tensor) -> bool:
    """Whether both are the same pages."""
    before = elsewhere[0].clone()
    piece[0] += 1.0
    seen = not torch.equal(elsewhere[0], before)
    piece[0] -= 1.0
    piece[0] = before
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("audit_fraction", [0.0, 1.0])
async def test_every_vector_comes_back(monkeypatch: pytest.MonkeyPatch, audit_fraction: float) -> None:
    """Of leases that were applied, that failed, that were computed for nothing and that were computed to compare."""
    made, engines, shares = job(max_steps=20), set(), []
    share, tried = Engine.share, [0]
    loss = made.loss

    def sharing_(engine: Engine, parameters: Any, vectors: Any = ()) -> None:
        if parameters is not None:
            engines.add(engine)
            shares.append(len(vectors))
        share(engine, parameters, vectors)

    def fails(output: Any, target: Any) -> Any:
        tried[0] += 1
        if tried[0] % 40 == 0:
            raise ValueError("not this time")
        return loss(output, target)

    monkeypatch.setattr(Engine, "share", sharing_)
    left: list[int] = []
    close = Leases.aclose

    async def closing(leases: Leases) -> Any:
        found = await close(leases)
        if leases.shared:
            held = {vector.slot for vectors in leases._lent.values() for vector in vectors}
            left.append(len(held))
        return found

    monkeypatch.setattr(Leases, "aclose", closing)
    result, links = await trained(replace(made, loss=fails), workers=2, audit_fraction=audit_fraction)
    assert links == ["shm", "shm"]
    assert tried[0] > 60
    assert result.digest == named_digest(reference.train(made)[0])
    assert shares == [16, 16]
    assert max(left) <= 4, "vectors of the last step alone are out at the end"
    engines.clear()


async def test_without_a_free_vector_results_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = 2
    for module in ("w5xde_async.worker.sharing", "w5xde_async.hub.members.sharing"):
        monkeypatch.setattr(f"{module}.SHARED_SLOTS", slots)
    result, links = await trained(job(), workers=1)
    assert links == ["shm"]
    assert result.digest == named_digest(reference.train(job())[0])
    assert sum(share.bytes_sent for share in result.shares) > 100_000


@pytest.mark.parametrize("shared", [(10**6,), (0,)])
async def test_parameters_that_are_not_where_they_are_said_to_be_end_the_link(
    monkeypatch: pytest.MonkeyPatch, shared: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """A coordinator that lies: buckets that the model has not, or memory that nobody shares."""

    def lies(publisher: LivePublisher, session: Session) -> None:
        session.current_version = publisher._version
        session.outbox.post(encode(Params(publisher._version, 0, 0, 1.0, shared=shared)))

    monkeypatch.setattr(LivePublisher, "_queue_on", lies)
    link = "tcp" if shared == (0,) else "shm"
    async with Coordinator(job(), config=settings()) as coordinator:
        running = asyncio.create_task(
            Worker(coordinator.address, job=job(), config=replace(QUICK_WORKER, link=link)).run()
        )
        while "PARAMS tells of shared memory that this worker has not" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
