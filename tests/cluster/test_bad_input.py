"""What goes wrong between one coordinator and its workers: the run ends with the reference's bits, or says why not."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import random
import re
import shutil
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import msgpack
import pytest
import torch
from msgspec import structs
from tests.support import reference
from tests.support.cluster import QUICK_WORKER, settings
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from w5xde_async.compute.engine import Engine
from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.coordinator.training import NonFinite
from w5xde_async.errors import (
    CheckpointMismatch,
    ExitCode,
    JobError,
    LeafFailed,
    LinkLost,
    RefusalCode,
    Refused,
    UsageError,
)
from w5xde_async.hub.members import roster
from w5xde_async.job import Job
from w5xde_async.net.endpoint import connect
from w5xde_async.net.link import Link
from w5xde_async.store.filesystem import Filesystem
from w5xde_async.store.rundir import RunDir
from w5xde_async.telemetry.events import (
    Bus,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    StepCommitted,
    Warned,
    WorkerJoined,
    WorkerLeft,
)
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.wire.frame import SESSION_CAPS, BufferSpec, encode
from w5xde_async.wire.handshake import prove
from w5xde_async.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Bye,
    ByeCode,
    Challenge,
    Done,
    Failed,
    Heartbeat,
    Hello,
    Introduction,
    Lease,
    Message,
    Params,
    Proof,
    Ready,
    Refusal,
    Result,
    Submit,
    Verdict,
    VerdictCode,
    Welcome,
)
from w5xde_async.worker.connection.connection import Connection
from w5xde_async.worker.connection.dialing import Dialer
from w5xde_async.worker.service import Departure, RunFailed, Worker

_M = TypeVar("_M", bound=Message)
TOKEN = "swordfish"
STEPS = 6


# -- a job of two result buckets and more, and its reference


class Points(Dataset[tuple[Tensor, Tensor]]):
    """48 points; ``bad`` raises when it is read."""

    def __init__(self, bad: int | None = None) -> None:
        self.x = torch.randn(48, 10, generator=torch.Generator().manual_seed(0))
        self.bad = bad

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.bad:
            raise OSError("this sample is unreadable")
        return self.x[index], self.x[index, :4].argmax()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def tiny(**changes: Any) -> Job:
    """Six leaves of four samples a step."""
    defaults: dict[str, Any] = {
        "model": model, "dataset": Points(), "optimizer": sgd, "loss": nn.CrossEntropyLoss(), "batch_size": 24,
        "microbatch_size": 4, "max_steps": STEPS, "seed": 1,
    }  # fmt: skip
    return Job(**{**defaults, **changes})


@cache
def expected(steps: int = STEPS) -> str:
    return reference.digest(tiny(), steps)


class Events(list[Event]):
    """What the bus has published, and a way to wait for more."""

    def __init__(self) -> None:
        super().__init__()
        self._came = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.append(event)
        self._came.set()

    def how_many(self, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) for event in self)

    async def until(self, kind: type[Event], count: int) -> None:
        while self.how_many(kind) < count:
            self._came.clear()
            await self._came.wait()


# -- a worker by hand


class Peer:
    """Says frames as the test wants them, and reads what is said to it."""

    def __init__(self, link: Link) -> None:
        self.link = link

    async def send(self, message: Message, *buffers: tuple[BufferSpec, bytes]) -> None:
        await self.link.send(encode(message, buffers))

    async def expect(self, kind: type[_M]) -> _M:
        """The next message of this kind; others are passed over, but a REFUSED that was not expected fails."""
        while True:
            message = (await self.link.recv(lambda _, specs: [memoryview(bytearray(s.nbytes)) for s in specs])).message
            if isinstance(message, kind):
                return message
            assert not isinstance(message, Refusal), message

    async def greet(self, *, worker_id: str = "bad", token: str = "", protocol: int = PROTOCOL_VERSION) -> None:
        nonce = os.urandom(32)
        await self.send(Hello(protocol, nonce, "", "", ""))
        if protocol != PROTOCOL_VERSION:
            return
        challenge = await self.expect(Challenge)
        proof = prove(token.encode(), "worker", nonce, challenge.nonce) if token else b""
        await self.send(Proof(proof))
        await self.expect(Accepted)
        await self.send(Introduction(worker_id, "bad peer", "0"))
        self.link.caps = SESSION_CAPS

    async def join(self, *, worker_id: str = "bad") -> Welcome:
        await self.greet(worker_id=worker_id)
        welcome = await self.expect(Welcome)
        await self.send(Ready(welcome.fingerprint, "cpu", "by hand", 1, ""))
        return welcome

    async def lease(self) -> Lease:
        await self.join()
        return await self.expect(Lease)


async def peer_of(coordinator: Coordinator) -> Peer:
    return Peer(await connect(coordinator.host, coordinator.port, timeout_s=5))


def result_spec(coordinator: Coordinator, bucket: int) -> BufferSpec:
    training = coordinator._training
    assert training is not None
    numel = training.context.layout.result_buckets[bucket].numel
    kind = training.context.layout.groups[training.context.layout.result_buckets[bucket].group].result_dtype
    return BufferSpec("", str(kind).removeprefix("torch."), (numel,), "raw", numel * kind.itemsize)


def done(lease: Lease, **changes: Any) -> Done:
    losses = (0.0,) * len(lease.samples)
    return structs.replace(Done(lease.lease, losses, (), (), (), (), 0, 0.001, 0.0), **changes)


async def finish(coordinator: Coordinator, job: Callable[[], Job] = tiny, workers: int = 1) -> RunResult:
    """Honest workers do the rest."""
    tasks = [
        asyncio.create_task(Worker(coordinator.address, job=job(), config=QUICK_WORKER).run()) for _ in range(workers)
    ]
    result = await coordinator.wait()
    assert await asyncio.gather(*tasks) == [Departure.FINISHED] * workers
    return result


def started(job: Job | None = None, events: Events | None = None, **kwargs: Any) -> Coordinator:
    bus = Bus()
    if events is not None:
        bus.subscribe(events)
    run_dir = kwargs.pop("run_dir", None)
    return Coordinator(job or tiny(), run_dir=run_dir, config=settings(**{"heartbeat_s": 0.05, **kwargs}), bus=bus)


def texts(events: Events, kind: type[Warned] = Warned) -> str:
    return "\n".join(event.text for event in events if isinstance(event, kind))


# -- before a peer is let in

Misbehaviour = Callable[[Peer], Awaitable[None]]


async def garbage(peer: Peer) -> None:
    await peer.link.send([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])


async def noise(peer: Peer) -> None:
    await peer.link.send([(60).to_bytes(4, "big"), random.Random(0).randbytes(60)])


async def oversized_header(peer: Peer) -> None:
    await peer.link.send([(4097).to_bytes(4, "big"), bytes(64)])


async def hello_with_a_buffer(peer: Peer) -> None:
    spec = BufferSpec("x", "uint8", (8,), "raw", 8)
    await peer.send(Hello(PROTOCOL_VERSION, bytes(32), "bad", "bad", "0"), (spec, bytes(8)))


async def short_nonce(peer: Peer) -> None:
    await peer.send(Hello(PROTOCOL_VERSION, bytes(8), "bad", "bad", "0"))


async def proof_first(peer: Peer) -> None:
    await peer.send(Proof(b""))


async def result_before_joining(peer: Peer) -> None:
    await peer.send(Heartbeat("idle"))


async def another_protocol(peer: Peer) -> None:
    await peer.greet(protocol=PROTOCOL_VERSION + 1)


STRANGERS = [
    (garbage, RefusalCode.PROTOCOL_ERROR, "header"),
    (noise, RefusalCode.PROTOCOL_ERROR, "malformed"),
    (oversized_header, RefusalCode.PROTOCOL_ERROR, "4097 bytes is over the limit of 4096"),
    (hello_with_a_buffer, RefusalCode.PROTOCOL_ERROR, "buffer count"),
    (short_nonce, RefusalCode.PROTOCOL_ERROR, "nonce"),
    (proof_first, RefusalCode.PROTOCOL_ERROR, "Proof is not allowed in state greeting"),
    (result_before_joining, RefusalCode.PROTOCOL_ERROR, "Heartbeat is not allowed in state greeting"),
    (another_protocol, RefusalCode.PROTOCOL_VERSION, f"the worker {PROTOCOL_VERSION + 1}"),
]


@pytest.mark.parametrize(("misbehave", "code", "reason"), STRANGERS, ids=lambda value: getattr(value, "__name__", ""))
async def test_a_stranger_is_refused(misbehave: Misbehaviour, code: RefusalCode, reason: str) -> None:
    async with started() as coordinator:
        peer = await peer_of(coordinator)
        await misbehave(peer)
        refusal = await peer.expect(Refusal)
        assert (refusal.code, reason in refusal.reason) == (code, True), refusal
        with pytest.raises(LinkLost):
            await peer.expect(Heartbeat)
        await peer.link.aclose()
        result = await finish(coordinator)
    assert result.digest == expected()


@pytest.mark.parametrize("token", ["", "salmon"], ids=["missing", "wrong"])
async def test_a_peer_without_the_token_learns_nothing(token: str) -> None:
    async with started(token=TOKEN) as coordinator:
        peer = await peer_of(coordinator)
        nonce = os.urandom(32)
        await peer.send(Hello(PROTOCOL_VERSION, nonce, "", "", ""))
        challenge = await peer.expect(Challenge)
        await peer.send(Proof(prove(token.encode(), "worker", nonce, challenge.nonce) if token else b""))
        refusal = await peer.expect(Refusal)  # and no proof of the coordinator's, which could be guessed at
        assert refusal.code == RefusalCode.AUTHENTICATION
        assert "W5XDE_TOKEN" in refusal.hint
        await peer.link.aclose()


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        (TOKEN, "", "this worker has none"),
        (TOKEN, "salmon", "the token is missing or wrong"),
        ("", TOKEN, "asks for none"),
    ],
)
async def test_a_worker_says_whose_token_is_wrong(theirs: str, ours: str, reason: str) -> None:
    async with started(token=theirs) as coordinator:
        worker = Worker(coordinator.address, job=tiny(), config=replace(QUICK_WORKER, token=ours))
        with pytest.raises(Refused, match=reason) as refused:
            await worker.run()
    assert refused.value.exit_code == ExitCode.AUTHENTICATION


async def test_peers_that_vanish_with_a_lease_end_no_run_while_one_that_delivered_is_there() -> None:
    """Twenty identities of one host, each gone as soon as it has work: a leaf that kills looks like that, and so does
    one peer. A worker that has delivered tries it before the leaf is blamed. Who broke the protocol died of nothing."""
    events, busy, release = Events(), threading.Event(), threading.Event()
    cross_entropy = nn.CrossEntropyLoss()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if busy.is_set():  # the honest worker is at its leaf for as long as the others come and go
            release.wait(60)
        return cross_entropy(output, target)

    async with started(events=events, min_workers=1) as coordinator:
        worker = Worker(coordinator.address, job=tiny(loss=loss), config=QUICK_WORKER)
        honest = asyncio.create_task(worker.run())
        await events.until(StepCommitted, 1)
        busy.set()
        try:
            for number in range(20):
                peer = await peer_of(coordinator)
                await peer.join(worker_id=f"bad-{number}")
                lease = await peer.expect(Lease)
                if number % 2:
                    await peer.send(Result(lease.lease, 0), (BufferSpec("", "float32", (1,), "raw", 4), bytes(4)))
                peer.link.abort()
                await events.until(WorkerLeft, number + 1)
        finally:
            release.set()  # else all that computes in this process waits a minute for each leaf
        result = await coordinator.wait()
        assert await honest is Departure.FINISHED
    assert result.outcome == "finished"
    assert result.digest == expected()


@pytest.mark.parametrize("breaks_the_protocol", [False, True])
async def test_who_comes_and_goes_for_ever_fills_no_disk(
    breaks_the_protocol: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each coming and going is a line of the log and two records; honest workers are let in again by and by."""
    monkeypatch.setattr(roster, "_MOST_VAIN", 5)
    monkeypatch.setattr(roster, "_VAIN_S", 5.0)
    events = Events()
    async with started(max_workers=2, events=events) as coordinator:
        refused = 0
        for number in range(20):
            peer = await peer_of(coordinator)
            await peer.greet(worker_id=f"bad {number}")
            try:
                welcome = await peer.expect(Welcome)
            except AssertionError as error:
                assert "workers of 127.0.0.1 have come and gone 8 times without a result" in str(error)  # noqa: PT017
                refused += 1
            else:
                await peer.send(Ready(welcome.fingerprint, "cpu", "by hand", 1, ""))
                await peer.send(Submit(1, ()) if breaks_the_protocol else Bye(ByeCode.LEAVING, "x" * 1000))
                with suppress(LinkLost):
                    while True:
                        await peer.link.recv(lambda _, specs: [memoryview(bytearray(s.nbytes)) for s in specs])
            await peer.link.aclose()
        assert refused >= 10
        joined = [event for event in events if isinstance(event, WorkerJoined)]
        assert len(joined) == 20 - refused
        assert coordinator._run is not None
        members, gone = coordinator._run.training.roster, cast(Any, SimpleNamespace(place=("127.0.0.1",), identity=""))
        for _ in range(20):  # a fleet that is cut off, all of which had been let in
            members._note_vain(gone)
        assert members._vain_of(gone) <= 8  # nor is it kept out for longer
        assert (await finish(coordinator)).digest == expected()  # after a second or so


async def test_with_the_same_token_on_both_sides_the_run_is_done() -> None:
    async with started(token=TOKEN) as coordinator:
        worker = Worker(coordinator.address, job=tiny(), config=replace(QUICK_WORKER, token=TOKEN))
        assert await worker.run() is Departure.FINISHED
        assert (await coordinator.wait()).digest == expected()


async def test_a_silent_stranger_is_dropped() -> None:
    events = Events()
    async with started(handshake_s=0.05, events=events) as coordinator:
        reader, writer = await asyncio.open_connection(coordinator.host, coordinator.port)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        result = await finish(coordinator)
    assert result.digest == expected()


async def test_a_worker_that_builds_its_model_for_long_is_kept_and_one_that_went_silent_is_not() -> None:
    async with started(heartbeat_s=0.02, silence_s=0.1, max_workers=1) as coordinator:
        building, second = await peer_of(coordinator), await peer_of(coordinator)
        await building.greet()
        welcome = await building.expect(Welcome)
        await second.greet(worker_id="other")
        assert (await second.expect(Refusal)).code == RefusalCode.RUN_FULL  # the one that builds counts
        loop = asyncio.get_running_loop()
        ends = loop.time() + 2 * welcome.silence_s
        while loop.time() < ends:  # each side hears the other
            await building.expect(Heartbeat)
            await building.send(Heartbeat("building the model"))
        with pytest.raises(LinkLost):
            await building.expect(Bye)
        for peer in (building, second):
            await peer.link.aclose()
        assert (await finish(coordinator)).digest == expected()


# -- once it is in: each of them holds a lease


async def result_without_a_buffer(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    await peer.send(Result(lease.lease, 0))


async def result_of_the_wrong_size(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    await peer.send(Result(lease.lease, 0), (BufferSpec("", "float32", (1,), "raw", 4), bytes(4)))


async def result_of_the_wrong_dtype(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    spec = result_spec(coordinator, 0)
    await peer.send(Result(lease.lease, 0), (spec._replace(dtype="int32"), bytes(spec.nbytes)))


async def bucket_out_of_range(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    await peer.send(Result(lease.lease, 3), (result_spec(coordinator, 0), bytes(result_spec(coordinator, 0).nbytes)))


async def buffers_on_done(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    await peer.send(done(lease, absent=(0, 1, 2)), (BufferSpec("", "uint8", (4,), "raw", 4), bytes(4)))


async def done_without_buckets(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    await peer.send(done(lease))


async def done_with_some_absent(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    await peer.send(done(lease, absent=(0, 2)))  # what it says of 0 and 2 must not count


async def absent_out_of_range(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    await peer.send(done(lease, absent=(0, 1, 2, 3)))


async def too_many_losses(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    await peer.send(done(lease, losses=(0.0,) * 9, absent=(0, 1, 2)))


async def zeros_and_then_too_many_losses(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    """What it has sent before is worth no more than what it says then."""
    for bucket in range(3):
        spec = result_spec(coordinator, bucket)
        await peer.send(Result(lease.lease, bucket), (spec, bytes(spec.nbytes)))
    await peer.send(done(lease, losses=(0.0,) * 99))


async def too_few_metrics(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    await peer.send(done(lease, metric_names=("accuracy",), absent=(0, 1, 2)))


async def done_in_nan_seconds(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    await peer.send(done(lease, compute_s=math.nan, absent=(0, 1, 2)))


async def done_in_infinite_seconds(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    await peer.send(done(lease, compute_s=math.inf, absent=(0, 1, 2)))


async def done_ahead_of_its_version(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    while lease.step == 0:
        lease = await peer.expect(Lease)
    await peer.send(done(lease, absent=(0, 1, 2)))


async def hello_again(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    await peer.send(Hello(PROTOCOL_VERSION, bytes(32), "bad", "bad", "0"))


async def welcome_from_a_worker(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    await peer.send(Params(0, 0, 0, 1.0))


async def noise_later(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    await noise(peer)


async def a_header_of_two_megabytes(peer: Peer, coordinator: Coordinator, lease: Lease) -> None:
    await peer.link.send([(2 << 20).to_bytes(4, "big")])


MEMBERS = [
    (result_without_a_buffer, "without its buffer"),
    (result_of_the_wrong_size, "bucket 0 is float32"),
    (result_of_the_wrong_dtype, "bucket 0 is int32"),
    (bucket_out_of_range, "bucket 3 of 3"),
    (buffers_on_done, "Done came with 1 buffers"),
    (done_without_buckets, "without bucket 0"),
    (done_with_some_absent, "without bucket 1"),
    (absent_out_of_range, "bucket 3 of 3 as absent"),
    (zeros_and_then_too_many_losses, "99 losses for lease"),
    (too_many_losses, "9 losses"),
    (too_few_metrics, "0 metrics for"),
    (done_in_nan_seconds, "Done.compute_s"),
    (done_in_infinite_seconds, "Done.compute_s"),
    (hello_again, "Hello is not allowed in state ready"),
    (welcome_from_a_worker, "Params is not allowed in state ready"),
    (noise_later, "malformed"),
    (a_header_of_two_megabytes, "over the limit"),
]


@pytest.mark.parametrize(("misbehave", "reason"), MEMBERS, ids=lambda value: getattr(value, "__name__", ""))
async def test_a_member_that_breaks_the_protocol_is_dropped(
    misbehave: Callable[[Peer, Coordinator, Lease], Awaitable[None]], reason: str
) -> None:
    events = Events()
    async with started(events=events) as coordinator:
        peer = await peer_of(coordinator)
        await misbehave(peer, coordinator, await peer.lease())
        refusal = await peer.expect(Refusal)
        assert (refusal.code, reason in refusal.reason) == (RefusalCode.PROTOCOL_ERROR, True), refusal
        await peer.link.aclose()
        result = await finish(coordinator)
    assert result.digest == expected()
    left = next(event for event in events if isinstance(event, WorkerLeft))
    assert (left.name, left.clean, left.leases_returned > 0) == ("bad peer", False, True)
    assert reason in left.reason


async def test_a_lease_of_a_later_step_is_not_taken_before_its_version() -> None:
    async with started(tiny(batch_size=4, max_steps=12)) as coordinator:
        peer = await peer_of(coordinator)
        await done_ahead_of_its_version(peer, coordinator, await peer.lease())
        assert "before that version was published" in (await peer.expect(Refusal)).reason
        await peer.link.aclose()


async def test_results_that_no_lease_explains_are_dropped_and_answered() -> None:
    async with started() as coordinator:
        peer = await peer_of(coordinator)
        lease = await peer.lease()
        spec = result_spec(coordinator, 0)
        poison = torch.full((spec.nbytes // 4,), math.nan).numpy().tobytes()
        await peer.send(Result(lease.lease + 1000, 0), (spec, poison))
        await peer.send(structs.replace(done(lease), lease=lease.lease + 1000))
        verdict = await peer.expect(Verdict)
        assert (verdict.leases, verdict.code) == ((lease.lease + 1000,), VerdictCode.STALE)
        await peer.send(Bye(ByeCode.LEAVING, "enough"))
        assert (await finish(coordinator)).digest == expected()
        await peer.link.aclose()


@pytest.mark.parametrize("written", ["raw", "int8"])
@pytest.mark.parametrize(
    "update",
    [
        {}, {"codec": "int8"}, {"codec": "lz4"}, {"rule": "async"}, {"rule": "local", "codec": "int8"},
        {"rule": "streaming", "codec": "int4"}, {"rule": "async-local", "codec": "sparseloco"},
    ],
    ids=lambda update: "-".join(update.values()) or "sync",
)  # fmt: skip
async def test_no_memory_is_taken_for_a_result_too_large(update: dict[str, str], written: str) -> None:
    """A header alone, of 32 TiB and of no lease: its peer is dropped, and the run goes on."""
    async with started(update=UpdateConfig(**update)) as coordinator:
        peer = await peer_of(coordinator)
        await peer.join()
        spec = BufferSpec("", "uint8", (1 << 45,), written, 1 << 45)
        header = msgpack.packb((Result.TYPE, structs.astuple(Result(10**6, 0)), [spec]))
        await peer.link.send([len(header).to_bytes(4, "big"), header])
        assert (await peer.expect(Refusal)).code == RefusalCode.PROTOCOL_ERROR
        await peer.link.aclose()
        assert coordinator._training is not None
        assert coordinator._training.lifecycle.failure is None


async def test_a_peer_that_keeps_sending_garbage_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("w5xde_async.hub.members.session._GARBAGE_BYTES", 0)
    async with started() as coordinator:
        peer = await peer_of(coordinator)
        await peer.lease()
        spec = result_spec(coordinator, 0)
        with suppress(LinkLost):
            for _ in range(80):
                await peer.send(Result(10**6, 0), (spec, bytes(spec.nbytes)))
        assert "no lease authorizes" in (await peer.expect(Refusal)).reason
        await peer.link.aclose()


async def test_a_worker_that_connects_anew_takes_its_own_place() -> None:
    events = Events()
    async with started(events=events) as coordinator:
        first = await peer_of(coordinator)
        await first.lease()
        others = [await peer_of(coordinator) for _ in range(2)]
        welcomes = []
        for peer in others:
            await peer.greet()
            welcomes.append(await peer.expect(Welcome))
        for peer, welcome in zip(others, welcomes, strict=True):  # both ask for the same place at once
            await peer.send(Ready(welcome.fingerprint, "cpu", "by hand", 1, ""))
        with pytest.raises(LinkLost):
            await first.expect(Refusal)
        await events.until(WorkerJoined, 3)
        assert coordinator.num_workers == 1
        for peer in (first, *others):
            peer.link.abort()
        result = await finish(coordinator)
    assert result.digest == expected()
    assert sum(event.leases_returned > 0 for event in events if isinstance(event, WorkerLeft)) == 3


async def test_a_worker_whose_link_breaks_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    async with started(tiny(max_steps=40), events=events) as coordinator:
        worker = Worker(coordinator.address, job=tiny(), config=QUICK_WORKER)
        task = asyncio.create_task(worker.run())
        for times in (1, 2):
            await events.until(StepCommitted, 4 * times)
            assert worker._connection is not None
            worker._connection.heard = "step 4 of 40"
            worker._connection.link.abort()
            await events.until(WorkerLeft, times)
        result = await coordinator.wait()
        assert await task is Departure.FINISHED
    assert events.how_many(WorkerJoined) == 3
    assert result.digest == expected(40)
    # What the coordinator has done since, the worker cannot know.
    assert [line for line in caplog.messages if "lost" in line and "it was last heard of at step 4 of 40" in line]


async def test_a_worker_whose_links_fail_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    serve, lost, pauses = Connection.run, iter(range(3)), []

    async def unlucky(self: Connection, prepare: Any) -> Departure | None:
        if next(lost, None) is not None:
            raise LinkLost("", "planted")
        return await serve(self, prepare)

    monkeypatch.setattr(Connection, "run", unlucky)
    monkeypatch.setattr("w5xde_async.worker.connection.dialing._pause_s", lambda links, _: pauses.append(links) or 0.0)
    async with started() as coordinator:
        await finish(coordinator)
    assert pauses == [1, 2, 3]


async def test_a_coordinator_that_is_not_there_is_looked_for_at_growing_intervals_up_to_a_second_or_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[int] = []
    monkeypatch.setattr("w5xde_async.worker.connection.dialing._pause_s", lambda links, _: pauses.append(links) or 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    task = asyncio.create_task(Worker(address, job=tiny(), config=QUICK_WORKER).run())
    async with asyncio.timeout(30):
        while len(pauses) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert pauses[:8] == [1, 2, 3, 4, 5, 5, 5, 5]


async def test_a_link_that_ended_with_its_coordinator_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    serve, lost, pauses = Connection.run, iter(range(1, 6)), []

    async def unlucky(self: Connection, prepare: Any) -> Departure | None:
        number = next(lost, 0)
        if not number:
            return await serve(self, prepare)
        if number == 3:  # the next one is of a later term than the worker has seen
            worker._dialer._terms = dict.fromkeys(worker._dialer._terms, 0)
        raise LinkLost("", "planted")

    monkeypatch.setattr(Connection, "run", unlucky)
    monkeypatch.setattr("w5xde_async.worker.connection.dialing._pause_s", lambda links, _: pauses.append(links) or 0.0)
    async with started() as coordinator:
        worker = Worker(coordinator.address, job=tiny(), config=QUICK_WORKER)
        task = asyncio.create_task(worker.run())
        await coordinator.wait()
        assert await task is Departure.FINISHED
    assert pauses == [1, 2, 3, 1, 2]


async def test_a_worker_whose_memory_limit_holds_no_lease_leaves_and_harms_nobody() -> None:
    events = Events()
    async with started(events=events) as coordinator:
        config = replace(QUICK_WORKER)
        object.__setattr__(config, "memory_limit_bytes", 8)  # less than anyone may choose
        with pytest.raises(UsageError, match="raise --memory-limit") as caught:
            await Worker(coordinator.address, job=tiny(), config=config).run()
        assert caught.value.exit_code == ExitCode.USAGE
        assert (await finish(coordinator)).digest == expected()
    left = next(event for event in events if isinstance(event, WorkerLeft))
    assert (left.clean, "--memory-limit" in left.reason) == (True, True)


async def test_a_worker_cancelled_as_it_joins_closes_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    join, joins = Dialer.join, []

    async def cancelled_meanwhile(self: Dialer, given: Any) -> Any:
        joins.append(await join(self, given))
        asyncio.get_running_loop().call_soon(task.cancel)  # between the end of joining and whoever waits for it
        return joins[0]

    monkeypatch.setattr(Dialer, "join", cancelled_meanwhile)
    async with started() as coordinator:
        task = asyncio.create_task(Worker(coordinator.address, job=tiny(), config=QUICK_WORKER).run())
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(LinkLost):
            await joins[0].link.recv()


@pytest.mark.slow
async def test_a_coordinator_that_restarts_finds_its_worker_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as picked:
        port = picked.getsockname()[1]
    job = tiny(max_steps=30)
    worker = Worker(f"127.0.0.1:{port}", job=tiny(), config=QUICK_WORKER)
    task = asyncio.create_task(worker.run())
    events = Events()
    async with started(job, events, run_dir=tmp_path / "run", port=port) as coordinator:
        await events.until(StepCommitted, 5)
        coordinator.request_stop()
        first = await coordinator.wait()
    assert (first.outcome, task.done()) == ("stopped", False)
    async with started(job, run_dir=tmp_path / "run", port=port) as coordinator:
        assert coordinator.step == first.step
        result = await coordinator.wait()
        assert await task is Departure.FINISHED
    assert result.digest == expected(30)


async def test_a_stop_while_the_next_step_is_leased_is_clean(caplog: pytest.LogCaptureFixture) -> None:
    """Results of a step that was leased ahead may come when there is no step any more."""
    async with started(tiny(batch_size=4, max_steps=12)) as coordinator:
        peer = await peer_of(coordinator)
        lease = await peer.lease()
        ahead = await peer.expect(Lease)
        assert (lease.step, ahead.step) == (0, 1)
        coordinator.request_stop()
        await peer.send(done(lease, absent=(0, 1, 2)))
        spec = result_spec(coordinator, 0)
        await peer.expect(Verdict)  # the step is over, and so is the run
        with suppress(LinkLost):
            await peer.send(Result(ahead.lease, 0), (spec, bytes(spec.nbytes)))
            await peer.send(done(ahead, absent=(1, 2)))
            await peer.send(Bye(ByeCode.LEAVING, ""))
        result = await coordinator.wait()
        await peer.link.aclose()
    assert (result.outcome, result.step) == ("stopped", 1)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# -- the job's own errors


class Trouble:
    """A step that raises, or worse, for one sample; counts how often, and in which worker's thread."""

    def __init__(self, index: int, times: float = math.inf) -> None:
        self.marked, self.times, self.raised = Points().x[index], times, 0

    def __call__(self, module: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        if self.raised < self.times and bool((x == self.marked).all(1).any()):
            self.raised += 1
            raise ValueError("this sample is bad")
        return nn.functional.cross_entropy(module(x), y)


async def test_a_leaf_that_raises_once_is_computed_again() -> None:
    trouble, events = Trouble(7, times=1), Events()
    job = tiny(loss=None, step=trouble)
    async with started(job, events) as coordinator:
        result = await finish(coordinator, lambda: job)
    assert (trouble.raised, result.digest) == (1, expected())
    assert re.search(r"this sample is bad \(test_bad_input.py:\d+\); trying again", texts(events))


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_leaf_that_always_raises_ends_the_run(workers: int) -> None:
    trouble, events = Trouble(7), Events()
    job = tiny(loss=None, step=trouble)
    async with started(job, events, min_workers=workers) as coordinator:
        runs = [Worker(coordinator.address, job=job, config=replace(QUICK_WORKER, name=f"w{i}")) for i in range(2)]
        tasks = [asyncio.create_task(worker.run()) for worker in runs[:workers]]
        with pytest.raises(LeafFailed) as caught:
            await coordinator.wait()
        for failed in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(failed, RunFailed)
    failure = caught.value
    # Three times on workers, and once here.
    assert (7 in failure.indices, len(failure.indices), failure.attempts, trouble.raised) == (True, 4, 3, 4)
    first, _, rest = str(failure).partition("\n")
    where = rf"step {failure.step}, leaf {failure.leaf}"
    raised = r"ValueError: this sample is bad \(test_bad_input.py:\d+\)"
    assert re.fullmatch(rf"{where}: {raised}, samples \d+, \d+, \d+, \d+", first), first
    assert rest.splitlines()[2].startswith(f'  File "{__file__}"')  # no frame of the engine before
    assert 'raise ValueError("this sample is bad")' in failure.traceback
    told = [event.text for event in events if isinstance(event, Warned) and "this sample is bad" in event.text]
    assert len(told) == 1, told  # one cause, though every worker tried
    assert re.fullmatch(rf"w[01] failed on {where}: {raised}; trying again", told[0])
    assert {event.reason for event in events if isinstance(event, WorkerLeft)} == {"the run failed"}


async def test_a_sample_that_cannot_be_read_ends_the_run() -> None:
    job = tiny(dataset=Points(bad=7))
    async with started(job) as coordinator:
        with pytest.raises(LeafFailed, match="while reading the dataset") as caught:
            await coordinator.wait()
    assert 7 in caught.value.indices
    assert str(caught.value).splitlines()[0].endswith(", sample 7")
    assert caught.value.traceback.splitlines()[2].startswith(f'  File "{__file__}"')


async def test_a_worker_with_another_model_is_told_the_first_difference() -> None:
    def other() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))

    events = Events()
    async with started(events=events) as coordinator:
        worker = Worker(coordinator.address, job=tiny(model=other), config=QUICK_WORKER)
        with pytest.raises(Refused, match=r"tensor '2.weight' has shape \[4, 8\] there and \[5, 8\] here") as refused:
            await worker.run()
        assert refused.value.exit_code == ExitCode.MISMATCH
        assert (await finish(coordinator)).digest == expected()


async def test_a_peer_with_another_fingerprint_is_refused() -> None:
    async with started() as coordinator:
        peer = await peer_of(coordinator)
        await peer.greet()
        await peer.expect(Welcome)
        await peer.send(Ready(bytes(32), "cpu", "by hand", 1, ""))
        assert (await peer.expect(Refusal)).code == RefusalCode.MODEL_MISMATCH
        await peer.link.aclose()


async def test_what_fails_on_workers_and_not_here_ends_no_run() -> None:
    """Three names under one secret report failures, of leaves that are not theirs too: the coordinator computes it."""
    events = Events()
    async with started(events=events) as coordinator:
        for number in range(3):
            peer = await peer_of(coordinator)
            await peer.join(worker_id=f"bad-{number}")
            lease = await peer.expect(Lease)
            leaf = lease.start if number < 2 else 10**6  # far outside: it is taken for one inside
            await peer.send(Failed(lease.lease, leaf, "nonsense", f"nonsense {'abc'[number]}"))
            await events.until(Warned, number + 1)
            await peer.link.aclose()
        result = await finish(coordinator)
    assert result.digest == expected()
    assert "failed" in texts(events)


async def test_a_stop_while_the_coordinator_computes_a_leaf_itself_is_no_failure() -> None:
    """The grace ends first: what is given up then says nothing of the leaf."""
    computing, let_go, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()
    loss = tiny().loss
    assert loss is not None

    def hanging(output: Tensor, target: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            loop.call_soon_threadsafe(computing.set)
            let_go.wait(60.0)
        return loss(output, target)

    data = TensorDataset(
        Points().x, torch.zeros(48, dtype=torch.int64)
    )  # whose reads do not wait for their turn to draw
    try:
        async with started(tiny(loss=hanging, dataset=data), max_leaf_failures=1, grace_s=0.1) as coordinator:
            peer = await peer_of(coordinator)
            lease = await peer.lease()
            await peer.send(Failed(lease.lease, lease.start, "CUDA out of memory", "Traceback\nCUDA out of memory"))
            await asyncio.wait_for(computing.wait(), 30.0)
            await peer.link.aclose()
            coordinator.request_stop("Ctrl-C")
            result = await asyncio.wait_for(coordinator.wait(), 30.0)
    finally:
        let_go.set()
    assert (result.outcome, result.reason, result.step) == ("stopped", "Ctrl-C", 0)


async def test_one_name_that_fails_all_it_is_given_ends_no_run() -> None:
    events = Events()
    async with started(max_leaf_failures=1, events=events) as coordinator:
        peer = await peer_of(coordinator)
        lease = await peer.lease()
        said = "AcceleratorError: the CUDA of this machine\nFor debugging consider passing LAUNCH_BLOCKING=1"
        await peer.send(Failed(lease.lease, 10**6, said, f"Traceback (most recent call last):\n{said}\n"))
        await events.until(Warned, 1)
        await peer.link.aclose()
        result = await finish(coordinator)
    assert result.digest == expected()
    last = lease.start + len(lease.samples) - 1
    assert f"leaf {last} failed 1 time(s) on workers and not here" in texts(events)
    assert "the last of them said: AcceleratorError: the CUDA of this machine" in texts(events)


async def test_a_failure_before_its_version_is_no_failure() -> None:
    async with started(tiny(batch_size=4, max_steps=12), max_leaf_failures=1) as coordinator:
        peer = await peer_of(coordinator)
        lease = await peer.lease()
        while lease.step == 0:
            lease = await peer.expect(Lease)
        await peer.send(Failed(lease.lease, 0, "nonsense", ""))
        assert "before that version was published" in (await peer.expect(Refusal)).reason
        await peer.link.aclose()


async def test_a_bug_in_the_compute_thread_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("our own bug")

    monkeypatch.setattr(Engine, "compute", broken)
    async with started() as coordinator:
        with pytest.raises(AssertionError, match="our own bug"):
            await Worker(coordinator.address, job=tiny(), config=QUICK_WORKER).run()


# -- gradients that are not finite


def nan_at(steps: set[int]) -> tuple[Job, list[int]]:
    """A job whose loss is NaN in those steps (0-based); every leaf counts itself."""
    seen: list[int] = []

    def step(module: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        seen.append(len(seen) // 6)
        loss = nn.functional.cross_entropy(module(x), y)
        return loss * math.nan if seen[-1] in steps else loss

    return tiny(loss=None, step=step), seen


async def test_a_step_with_a_gradient_that_is_not_finite_is_skipped() -> None:
    job, _ = nan_at({STEPS - 1})
    events = Events()
    async with started(job, events) as coordinator:
        result = await finish(coordinator, lambda: job)
    assert result.digest == expected(STEPS - 1)  # as if that step had not been
    assert [event.skipped for event in events if isinstance(event, StepCommitted)] == [False] * (STEPS - 1) + [True]
    losses = [event.loss for event in events if isinstance(event, StepCommitted)]
    assert math.isnan(losses[-1])
    assert result.loss == losses[-2]  # the last one that is a loss
    assert f"step {STEPS} was skipped" in texts(events)


@pytest.mark.parametrize("codec", ["raw", "sign"])
async def test_too_many_such_steps_in_a_row_end_the_run(codec: str) -> None:
    job, _ = nan_at({0, 2, 3, 4})
    async with started(job, max_nonfinite_steps=2, update=UpdateConfig(codec=codec)) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=job, config=QUICK_WORKER).run())
        with pytest.raises(NonFinite) as caught:
            await coordinator.wait()
        with pytest.raises(RunFailed, match="training diverges"):
            await worker
    assert (caught.value.step, caught.value.count) == (4, 2)
    assert ("(--codec sign bears less of it" in str(caught.value)) is (codec == "sign")


# -- checkpoints, evaluation, ends


async def train(job: Job | None = None, **kwargs: Any) -> RunResult:
    async with started(job, **kwargs) as coordinator:
        return await finish(coordinator)


def plus_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 4))


def half_frozen() -> nn.Module:
    made = model()
    made[0].weight.requires_grad_(False)
    return made


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 9), *plus_bias()[1:])


FROZEN = "tensor '0.weight' is a trainable parameter there and a frozen parameter here"


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch_size": 12}, "batch_size was 24"),
        ({"seed": 2}, "seed was 1"),
        ({"microbatch_size": 6}, "microbatch_size was 4"),
        ({"accumulate_grad_batches": 2, "microbatch_size": 2}, "accumulate_grad_batches was 1"),  # the other follows
        ({"shuffle": False}, "shuffle was True"),
        ({"precision": "bf16"}, "precision was 'fp32'"),
        ({"optimizer": adam}, "optimizer was 'SGD'"),
        ({"model": plus_bias}, "tensor '0.bias' there is '1.weight' here"),
        ({"model": half_frozen}, FROZEN),
        ({"model": wider}, "tensor '0.weight' has shape"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_another_job_is_not_resumed_and_nothing_is_lost(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    run = tmp_path / "run"
    await train(max_steps=2, run_dir=run)
    before = sorted(path.name for path in run.rglob("*"))
    with pytest.raises(CheckpointMismatch) as caught:
        await started(tiny(**change), run_dir=run).start()
    assert named in str(caught.value)
    assert "--resume never" in str(caught.value)
    same_tensors = change.get("model") in (None, half_frozen)
    assert ("--init-from" in str(caught.value)) == same_tensors  # which takes what has these names and shapes
    assert sorted(path.name for path in run.rglob("*")) == before
    assert (await train(run_dir=run)).digest == expected()


@pytest.mark.parametrize("later", [10, 60])
async def test_a_dataset_that_changes_its_length_is_that_of_the_runs_beginning(tmp_path: Path, later: int) -> None:
    """As a folder that fills, or is emptied, while it is trained on."""

    class Rows(Dataset[Any]):
        length = 48

        def __len__(self) -> int:
            return self.length

        def __getitem__(self, index: int) -> Any:
            return torch.full((10,), float(index)), index % 4

    run, dataset = tmp_path / "run", Rows()
    async with started(tiny(dataset=dataset), max_steps=4, run_dir=run) as coordinator:
        dataset.length = later  # its order was made
        await finish(coordinator, lambda: tiny(dataset=dataset))
    with pytest.raises(CheckpointMismatch, match=f"dataset length was 48 when its .* and is {later} now"):
        await started(tiny(dataset=dataset), run_dir=run).start()
    dataset.length = 48
    assert (await train(tiny(dataset=dataset), max_steps=6, run_dir=run)).step == 6


async def test_more_samples_than_can_be_put_in_order_are_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless(Dataset[Any]):
        def __len__(self) -> int:
            return 1 << 40

        def __getitem__(self, index: int) -> Any:
            return torch.zeros(10), index % 4

    def lacking(*_: Any) -> Any:  # as numpy does on most machines; others would be busy for long
        raise MemoryError("Unable to allocate 8.00 TiB")

    monkeypatch.setattr("w5xde_async.plan.sampler.epoch_order", lacking)
    for run in (None, tmp_path / "run"):
        with pytest.raises(JobError, match=r"order of its 1,099,511,627,776 samples.*shuffle=False, or a stream"):
            await started(tiny(dataset=Endless()), run_dir=run).start()
    await asyncio.to_thread(lambda: RunDir.open(tmp_path / "run", resume=True).close())  # nobody has it


@pytest.mark.parametrize("batch_size", [1, 8, 23, 48])
async def test_another_batch_size_is_named_where_the_microbatches_were_chosen(tmp_path: Path, batch_size: int) -> None:
    """A step of the run that lies there may be one leaf, of more samples than a batch has now."""
    run = tmp_path / "run"
    await train(tiny(microbatch_size=None), max_steps=2, run_dir=run)
    with pytest.raises(
        CheckpointMismatch, match=f"batch_size was 24 when its checkpoint was written and is {batch_size}"
    ):
        await started(tiny(microbatch_size=None, batch_size=batch_size), run_dir=run).start()


async def test_a_finished_run_says_so(tmp_path: Path) -> None:
    await train(run_dir=tmp_path / "run")
    async with started(run_dir=tmp_path / "run") as coordinator:
        result = await coordinator.wait()
    assert (result.outcome, result.digest) == ("finished", expected())
    assert "complete already" in result.reason


async def test_max_time_ends_the_run() -> None:
    async with started(max_time_s=0.1) as coordinator:
        result = await coordinator.wait()  # without any worker
    assert (result.outcome, result.step) == ("stopped", 0)
    assert "max_time" in result.reason


async def test_a_disk_that_fails_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Filesystem.rename
    fails = iter([True])

    def full(self: Filesystem, source: Path, target: Path) -> None:
        if target.name.startswith("step-") and next(fails, False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(self, source, target)

    monkeypatch.setattr(Filesystem, "rename", full)
    events = Events()
    result = await train(run_dir=tmp_path / "run", checkpoint_every=2, events=events)
    assert (result.outcome, result.digest) == ("finished", expected())
    failed = [event for event in events if isinstance(event, CheckpointFailed)]
    assert ["disk is full" in event.reason for event in failed] == [True]
    assert [event.step for event in events if isinstance(event, CheckpointSaved)][-1] == STEPS


@pytest.mark.parametrize("gone", [False, True])
async def test_no_step_is_named_to_go_back_to_whose_checkpoint_is_gone(
    gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, names = Filesystem.rename, list[str]()

    def fails(self: Filesystem, source: Path, target: Path) -> None:
        if target.name.startswith("step-"):
            names.append(target.name)
            if len(names) == 2:
                if gone:
                    shutil.rmtree(target.with_name(names[0]))
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(self, source, target)

    monkeypatch.setattr(Filesystem, "rename", fails)
    events = Events()
    await train(run_dir=tmp_path / "run", checkpoint_every=2, max_steps=60, events=events)
    (failed,) = [event for event in events if isinstance(event, CheckpointFailed)]
    assert failed.safe_step == (None if gone else int(names[0].removeprefix("step-")))


async def test_an_evaluation_that_raises_does_not_end_the_run() -> None:
    def evaluate(module: nn.Module) -> dict[str, float]:
        raise KeyError("accuracy")

    events = Events()
    result = await train(tiny(evaluate=evaluate, evaluate_every=2), events=events)
    assert (result.outcome, result.digest, result.metrics) == ("finished", expected(), {})
    said = re.findall(r"evaluate raised KeyError: 'accuracy' \(test_bad_input.py:\d+\); the run goes on", texts(events))
    assert len(said) == 1  # of three evaluations


async def test_closing_twice_and_waiting_after_it(tmp_path: Path) -> None:
    coordinator = started(run_dir=tmp_path / "run")
    await coordinator.aclose()  # before it began
    await coordinator.start()
    await asyncio.gather(coordinator.aclose(), coordinator.aclose())
    await coordinator.aclose()
    assert (await coordinator.wait()).outcome == "stopped"


async def test_cancelled_anywhere_it_leaves_nothing_behind(tmp_path: Path) -> None:
    turns = random.Random(5)
    for attempt in range(12):
        coordinator = started(run_dir=tmp_path / "run", grace_s=0.0)
        serving = asyncio.create_task(coordinator.serve_forever())
        worker: asyncio.Task[Departure] | None = None
        for _ in range(turns.randrange(60)):
            if worker is None and coordinator._main is not None and not serving.done():
                worker = asyncio.create_task(Worker(coordinator.address, job=tiny(), config=QUICK_WORKER).run())
            await asyncio.sleep(0 if attempt % 2 else 0.001)
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        if worker is not None:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
        async with started(run_dir=tmp_path / "run") as again:  # nobody holds the directory
            assert again.step <= STEPS


async def test_cancelling_wait_leaves_the_run_alone() -> None:
    async with started() as coordinator:
        waiting = asyncio.create_task(coordinator.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await finish(coordinator)).digest == expected()
