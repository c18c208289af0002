"""A worker on one link, with a compute thread that runs when the test says so: what it holds, and what ends it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs
from tests.simulator.loop import VirtualLoop
from tests.support.jobs import mlp_sgd
from tests.support.memory_links import MemoryLink, memory_pair

from w5xde_async.codecs.registry import codec
from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import ComputedBlock
from w5xde_async.compute.engine import Engine, LeafError
from w5xde_async.errors import DeviceLost, IslandBroken, LinkLost, MalformedFrame, RemoteError, UsageError
from w5xde_async.net.link import Received
from w5xde_async.net.outbox import Outbox
from w5xde_async.parallel.engine import LoneLeafError
from w5xde_async.params.flat import ResultVector, bytes_of
from w5xde_async.wire.frame import SESSION_CAPS, BufferSpec, encode
from w5xde_async.wire.messages import (
    Bye,
    ByeCode,
    Done,
    Failed,
    Heartbeat,
    Lease,
    Message,
    Params,
    Ready,
    Revoke,
    Verdict,
    VerdictCode,
    Welcome,
)
from w5xde_async.worker.connection import connection as connection_module
from w5xde_async.worker.connection.compute_queue import ComputeThread
from w5xde_async.worker.connection.connection import Connection, Departure, RunFailed
from w5xde_async.worker.connection.dialing import _LONGEST_PAUSE_S, _pause_s
from w5xde_async.worker.connection.handshake import Receive, fetch_program
from w5xde_async.worker.connection.leases import Leases
from w5xde_async.worker.executors.coded import CodedExecutor
from w5xde_async.worker.executors.executor import HeldLease, LeaseExecutor, Unsent
from w5xde_async.worker.executors.in_place import InPlaceExecutor
from w5xde_async.worker.uplink.result_encoder import ResultEncoder


class Held(Executor):
    """Runs nothing until it is let go."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: call(*args, **kwargs)))
        return future

    def let_go(self) -> None:
        while self.waiting:
            future, call = self.waiting.pop(0)
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)


class Coordinator:
    """The other end."""

    def __init__(self, link: MemoryLink, connection: Connection, engine: Engine, compute: Held) -> None:
        self.link, self.connection, self.engine, self.compute = link, connection, engine, compute
        self.seen: list[Message] = []
        link.caps = SESSION_CAPS

    async def say(self, message: Message, *buffers: tuple[BufferSpec, Any]) -> None:
        await self.link.send(encode(message, buffers))

    async def publish(self, version: int) -> None:
        buckets, state = self.engine.layout.buckets, self.engine.incoming
        for bucket in buckets:
            data = state.bucket_bytes[bucket.index]
            spec = BufferSpec("", "float32", (bucket.numel,), "raw", len(data))
            await self.say(Params(version, bucket.index, len(buckets), 1.0), (spec, data))

    async def lease(self, number: int, version: int = 0) -> None:
        structure, tensors = flatten(
            tuple(torch.stack(column) for column in zip(*[self.sample(i) for i in (0, 1)], strict=True))
        )
        buffers = []
        for tensor in tensors:
            data = bytes_of(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            buffers.append((BufferSpec("", dtype, tuple(tensor.shape), "raw", len(data)), data))
        await self.say(Lease(number, version, version, 0, (2,), 60.0, True, structure), *buffers)

    def sample(self, index: int) -> Any:
        return tuple(torch.as_tensor(value) for value in mlp_sgd().dataset[index])

    async def read(self) -> None:
        with suppress(LinkLost):
            while True:
                received = await self.link.recv(lambda _, specs: [memoryview(bytearray(s.nbytes)) for s in specs])
                self.seen.append(received.message)

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)

    def all(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.seen if isinstance(message, kind)]

    @property
    def held_bytes(self) -> int:
        return self.leases.held_bytes

    @property
    def leases(self) -> Leases:
        assert self.connection.leases is not None
        return self.connection.leases


@asynccontextmanager
async def served(
    *,
    coded: bool = False,
    update: str = "sync",
    limit: int = 1 << 30,
    ends: type[BaseException] | None = None,
    clock: Callable[[], float] = time.monotonic,
    pool: Executor | None = None,
    patience_s: float | None = None,
) -> AsyncIterator[Coordinator]:
    """A worker that has joined; ``ends``: what its ``run`` raises, once the test is through. ``pool`` computes.
    ``patience_s``: it is a rank of an island."""
    near, far = memory_pair()
    near.caps = SESSION_CAPS
    engine = Engine(mlp_sgd(), bucket_bytes=64 << 10)
    layout, compute = engine.layout, Held()
    welcome = Welcome("0" * 16, "served", 1, 0, "fp32", 2, 1, 64 << 10, layout.fingerprint, 1e6, 2e6)
    welcome = structs.replace(welcome, update=update)
    connection = Connection(near, welcome, ComputeThread(pool=pool or compute, clock=clock, patience_s=patience_s))

    async def prepare(*_: Any) -> tuple[LeaseExecutor, Ready]:
        executor: LeaseExecutor = InPlaceExecutor(engine, capacity_bytes=limit)
        if coded:
            encoder = ResultEncoder(layout, codec("raw"), feedback=False)
            executor = CodedExecutor(engine, welcome, b"", encoder, capacity_bytes=limit)
        return executor, Ready(layout.fingerprint, "cpu", "test", 1, "0")

    running = asyncio.create_task(connection.run(prepare))
    made = Coordinator(far, connection, engine, compute)
    reading = asyncio.create_task(made.read())
    await made.settle()
    try:
        yield made
        if ends is None:
            await made.say(Bye(ByeCode.FINISHED, ""))
            assert await running is Departure.FINISHED
        else:
            with pytest.raises(ends):
                await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        far.abort()
        await reading
        engine.close()


async def test_a_coordinator_that_never_stops_talking_keeps_nothing_else_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What has been read ahead is there at once, and so is what comes meanwhile."""
    said, turns = 0, 0

    async def served_at_once(accept: Any) -> Received:
        nonlocal said
        said += 1
        if said > 10_000:
            return Received(Bye(ByeCode.FINISHED, ""), (), ())
        return Received(Heartbeat("x"), (), ())

    async with served() as coordinator:
        monkeypatch.setattr(coordinator.connection, "_receive", served_at_once)
        await coordinator.say(Heartbeat("from here on"))
        while said <= 10_000:
            turns += 1
            await asyncio.sleep(0)
    assert turns > 10


@pytest.mark.parametrize("coded", [False, True])
async def test_batches_count_until_their_lease_is_done(coded: bool) -> None:
    """Waiting for their version, for the compute thread, in it: only DONE, FAILED or REVOKE lets go of them."""
    async with served(coded=coded) as coordinator:
        await coordinator.lease(1)
        await coordinator.settle()
        one = coordinator.held_bytes
        assert one > 0
        await coordinator.publish(0)
        await coordinator.lease(2)
        await coordinator.lease(3)
        await coordinator.settle()
        assert coordinator.held_bytes == 3 * one  # queued for the thread
        await coordinator.say(Revoke(3, ""))
        await coordinator.settle()
        coordinator.compute.let_go()
        await coordinator.settle()
        assert sorted(done.lease for done in coordinator.all(Done)) == [1, 2, 3]
        assert coordinator.held_bytes == 0


async def test_a_lease_is_computed_at_the_newest_version_that_has_come() -> None:
    """Under async: one that stands before a newer version in the queue too, or leases ahead would add staleness."""
    async with served(coded=True, update="async") as coordinator:
        await coordinator.publish(0)
        await coordinator.lease(1)
        await coordinator.lease(2)
        await coordinator.settle()
        await coordinator.publish(1)
        await coordinator.publish(2)
        await coordinator.lease(3, version=2)
        await coordinator.settle()
        coordinator.compute.let_go()
        await coordinator.settle()
        assert [(done.lease, done.version) for done in coordinator.all(Done)] == [(1, 2), (2, 2), (3, 2)]


async def test_a_worker_without_data_of_its_own_is_named_no_samples() -> None:
    """Not even where what they are is said as it should be."""
    async with served(ends=MalformedFrame) as coordinator:
        indices = BufferSpec("", "int64", (2,), "raw", 16)
        message = Lease(1, 0, 0, 0, (2,), 60.0, False, b"", local=True)
        await coordinator.say(message, (indices, bytes(16)))
        await coordinator.settle()
        assert not coordinator.all(Done)


@pytest.mark.parametrize("coded", [False, True])
async def test_void_leases_do_not_count(coded: bool) -> None:
    async with served(coded=coded) as coordinator:
        await coordinator.publish(0)
        await coordinator.lease(1)
        await coordinator.lease(2)  # both in the queue when the next version comes
        await coordinator.settle()
        await coordinator.publish(1)
        await coordinator.lease(3, 2)
        await coordinator.settle()
        await coordinator.publish(3)  # lease 3 is void before it is taken
        await coordinator.settle()
        coordinator.compute.let_go()
        await coordinator.settle()
        assert coordinator.held_bytes == 0


@pytest.mark.parametrize("coded", [False, True])
async def test_a_limit_that_holds_no_lease_ends_the_worker_with_a_goodbye(coded: bool) -> None:
    async with served(coded=coded, limit=8, ends=UsageError) as coordinator:
        await coordinator.lease(1)
        await coordinator.settle()
        (bye,) = coordinator.all(Bye)
        assert bye.code == ByeCode.LEAVING
        assert "--memory-limit" in bye.reason


async def test_a_lease_that_comes_twice_is_an_error() -> None:
    async with served(ends=RemoteError) as coordinator:
        await coordinator.lease(1)
        await coordinator.lease(1)
        await coordinator.settle()


@pytest.mark.parametrize("bucket", [0, 1 << 40])
async def test_parameters_without_their_buffer_are_an_error(bucket: int) -> None:
    async with served(ends=RemoteError) as coordinator:
        await coordinator.say(Params(0, bucket, 1, 1.0))
        await coordinator.settle()
        coordinator.compute.let_go()


async def test_applied_leases_are_counted() -> None:
    async with served() as coordinator:
        await coordinator.say(Verdict((1, 2), VerdictCode.APPLIED, ""))
        await coordinator.say(Verdict((3,), VerdictCode.STALE, ""))
        await coordinator.settle()
        assert (coordinator.leases.num_applied, coordinator.leases.num_stale) == (2, 1)


async def test_what_was_in_vain_is_said_once_a_minute_for_each_code(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    caplog.set_level("INFO")
    async with served(clock=lambda: now) as coordinator:
        for lease in range(40):  # two seconds apart
            await coordinator.say(Verdict((lease,), VerdictCode.DUPLICATE, "it was computed to compare"))
            await coordinator.settle()
            now += 2.0
        await coordinator.say(Verdict((99,), VerdictCode.STALE, "it took too long"))
        await coordinator.settle()
        assert coordinator.leases.num_stale == 41
    told = [record.getMessage() for record in caplog.records if "not applied" in record.getMessage()]
    assert told == [
        "leases not applied leases=[0] reason=it was computed to compare",
        "leases not applied leases=[30] reason=it was computed to compare (29 more since that was said last)",
        "leases not applied leases=[99] reason=it took too long",
    ]


@pytest.mark.parametrize("coded", [False, True])
async def test_after_standing_still_it_reads_what_came_before_it_goes_on(
    coded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, now = asyncio.get_running_loop(), 0.0
    async with served(coded=coded, clock=lambda: now) as coordinator:
        monkeypatch.setattr(
            "w5xde_async.worker.connection.compute_queue._LISTEN_S", 0.5
        )  # however busy this machine is
        compute = type(coordinator.engine).compute

        def stopped(engine: Engine, *arguments: Any) -> Any:
            nonlocal now
            outcome = compute(engine, *arguments)
            now += 0.1 if not coordinator.all(Done) else 60.0
            if now > 1.0:  # said while the process stood still: the loop finds it as it wakes
                asyncio.run_coroutine_threadsafe(coordinator.say(Revoke(3, "")), loop)
            return outcome

        monkeypatch.setattr(Engine, "compute", stopped)
        await coordinator.publish(0)
        await coordinator.lease(1)
        await coordinator.settle()
        await asyncio.to_thread(coordinator.compute.let_go)
        await coordinator.settle()
        await coordinator.lease(2)
        await coordinator.lease(3)
        await coordinator.settle()
        await asyncio.to_thread(coordinator.compute.let_go)
        await coordinator.settle()
        done = {message.lease: message.losses for message in coordinator.all(Done)}
        assert sorted(done) == [1, 2, 3]
        assert done[2]
        assert not done[3]  # never begun
        await coordinator.say(Verdict((2, 3), VerdictCode.STALE, "it took too long"))
        await coordinator.settle()
        assert coordinator.leases.num_stale == 1
        coordinator.compute.let_go()


async def test_an_answer_that_cannot_be_given_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody would ever hear of the lease."""
    compute = Engine.compute

    def of_one_name(self: Engine, *arguments: Any) -> ComputedBlock:
        return replace(compute(self, *arguments), metric_names=("a", "a"), metrics=(1.0, 2.0))

    monkeypatch.setattr(Engine, "compute", of_one_name)
    with ThreadPoolExecutor(1) as pool:
        async with served(pool=pool, ends=MalformedFrame) as coordinator:
            await coordinator.publish(0)
            await coordinator.lease(1)


async def test_a_revoke_looks_at_a_queue_that_the_compute_thread_takes_from() -> None:
    async with served() as coordinator:
        queue = coordinator.leases._queue._items

        class Taking:
            """A lease; looking at it lets the compute thread take another."""

            def __init__(self, number: int) -> None:
                self.number = number

            @property
            def lease(self) -> int:
                queue.popleft()
                return self.number

        for number in range(3):
            queue.append(HeldLease(Taking(number), (), 0))  # type: ignore[arg-type]
        coordinator.leases.revoke(Revoke(2, ""))
        assert coordinator.leases.is_revoked(2)
        assert not queue


class Built(Exception):
    """There is a model."""


@pytest.mark.parametrize(("asks", "ends"), [(True, LinkLost), (False, Built)])
def test_a_silent_coordinator_is_given_up_before_there_is_a_model(asks: bool, ends: type[Exception]) -> None:
    """As soon as it is waited for: for its program. Nobody listens while a model is being built."""

    async def join() -> None:
        near, far = memory_pair()
        near.caps = far.caps = SESSION_CAPS
        loop = asyncio.get_running_loop()
        welcome = Welcome("0" * 16, "served", 1, 0, "fp32", 2, 1, 64 << 10, bytes(32), 3.0, 12.0)
        connection = Connection(near, welcome, ComputeThread(pool=Held(), clock=loop.time))

        async def prepare(receive: Receive, outbox: Outbox) -> Any:
            if asks:
                return await fetch_program(receive, outbox, b"")
            await receive(lambda *_: [])
            await asyncio.sleep(60.0)
            raise Built

        running = asyncio.create_task(connection.run(prepare))
        for _ in range(10 if asks else 1):  # while it makes its program
            await asyncio.sleep(3.0)
            await far.send(encode(Heartbeat("")))
        begun = loop.time()
        with pytest.raises(ends):
            await running
        assert loop.time() - begun == pytest.approx(12.0 if asks else 60.0, abs=2.0)
        far.abort()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(join())


def test_a_coordinator_whose_frames_do_not_end_is_given_up() -> None:
    """A length was damaged on its way: all that follows is taken for the rest of that frame."""

    async def join() -> None:
        near, far = memory_pair()
        near.caps = far.caps = SESSION_CAPS
        loop = asyncio.get_running_loop()
        welcome = Welcome("0" * 16, "served", 1, 0, "fp32", 2, 1, 64 << 10, bytes(32), 3.0, 12.0)
        connection = Connection(near, welcome, ComputeThread(pool=Held(), clock=loop.time))

        async def prepare(receive: Receive, outbox: Outbox) -> Any:
            return await fetch_program(receive, outbox, b"")

        async def beat(damaged: bytes) -> None:
            with suppress(LinkLost):
                await far.send([damaged])
                while True:
                    await asyncio.sleep(3.0)
                    await far.send(encode(Heartbeat("step 9 of 10")))

        begun = loop.time()
        whole = bytes(encode(Heartbeat("step 9 of 10"))[0])
        beating = asyncio.create_task(beat(bytes([0, 4, *whole[2:]])))
        with pytest.raises(LinkLost, match="the coordinator was silent"):
            await connection.run(prepare)
        assert loop.time() - begun == pytest.approx(12.0, abs=3.0)
        far.abort()
        await beating

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(join())


def test_pauses_grow_and_have_a_limit() -> None:
    jitter = random.Random(0)
    pauses = [_pause_s(links, jitter) for links in range(1, 100)]
    assert 0.05 <= pauses[0] <= 0.1
    assert all(pause <= _LONGEST_PAUSE_S for pause in pauses)
    assert min(pauses[10:]) >= _LONGEST_PAUSE_S / 2
    assert len(set(pauses)) == len(pauses)


async def test_a_worker_that_loses_its_device_says_which_leaf_it_was_and_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this order: the lease is answered, and the goodbye gives back the others."""
    async with served(ends=DeviceLost) as coordinator:

        def lost(*_: Any) -> None:
            raise LeafError(1, RuntimeError("device-side assert"), device_lost=True)

        monkeypatch.setattr(coordinator.engine, "compute", lost)
        monkeypatch.setattr(coordinator.engine, "counted", lost)
        await coordinator.publish(0)
        await coordinator.lease(1)
        await coordinator.lease(2)
        await coordinator.settle()
        coordinator.compute.let_go()
        await coordinator.settle()
        said = [message for message in coordinator.seen if isinstance(message, Failed | Done | Bye)]
        assert [type(message) for message in said] == [Failed, Bye]
        assert (said[0].lease, said[0].leaf) == (1, 1)
        assert said[1].code == ByeCode.LEAVING


@pytest.mark.parametrize("stops", [False, True], ids=["the link is lost", "the coordinator stops"])
async def test_a_device_that_is_lost_after_the_link_has_ended_is_not_taken_to_another(
    stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def lost(*_: Any) -> None:
        begun.set()
        go_on.wait()
        raise LeafError(1, RuntimeError("device-side assert"), device_lost=True)

    with ThreadPoolExecutor(1) as pool:
        async with served(ends=DeviceLost, pool=pool) as coordinator:
            monkeypatch.setattr(coordinator.leases._executor, "compute", lost)
            await coordinator.publish(0)
            await coordinator.lease(1)
            await asyncio.to_thread(begun.wait)
            if stops:
                await coordinator.say(Bye(ByeCode.STOPPING, ""))
            else:
                coordinator.link.cut()
            await coordinator.settle()
            go_on.set()


async def test_what_breaks_first_is_what_a_worker_ends_with_and_nothing_is_computed_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(ends=DeviceLost) as coordinator:

        def compute(*_: Any) -> None:
            pytest.fail("a block was begun")

        monkeypatch.setattr(coordinator.leases._executor, "compute", compute)
        await coordinator.publish(0)
        await coordinator.lease(1)
        await coordinator.settle()
        for error in (DeviceLost("cuda:0", "an assert"), RuntimeError("every call fails now")):
            coordinator.connection._failed(error)
        coordinator.compute.let_go()


@pytest.mark.parametrize("ended", [True, False], ids=["the run ends over it", "the run goes on"])
async def test_a_rank_whose_leaf_breaks_its_island_says_which_and_waits_for_the_coordinators_word(
    monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    monkeypatch.setattr(connection_module, "_WORD_S", 30.0 if ended else 0.0)
    async with served(ends=RunFailed if ended else IslandBroken, patience_s=0.0) as coordinator:

        def alone(*_: Any) -> None:
            raise LoneLeafError(1, ValueError("a bug of the job"))

        monkeypatch.setattr(coordinator.engine, "compute", alone)
        monkeypatch.setattr(coordinator.engine, "counted", alone)
        await coordinator.publish(0)
        await coordinator.lease(1)
        await coordinator.lease(2)
        await coordinator.settle()
        coordinator.compute.let_go()
        await coordinator.settle()
        if ended:
            await coordinator.lease(3)  # it was a member still, and begins nothing
            await coordinator.say(Bye(ByeCode.FAILED, "step 0, leaf 1: ValueError: a bug of the job"))
            await coordinator.settle()
        assert not coordinator.compute.waiting
        said = [message for message in coordinator.seen if isinstance(message, Failed | Done | Bye)]
        assert [type(message) for message in said] == [Failed, Bye]
        assert (said[0].lease, said[0].leaf, said[0].error) == (1, 1, "ValueError: a bug of the job")
        assert ended or said[1].reason.startswith("step 0, leaf 1: ValueError: a bug of the job; not all ranks")


async def test_a_rank_whose_neighbour_has_left_at_the_runs_end_has_finished_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its compute thread breaks off before its own link has brought the last message."""
    monkeypatch.setattr(connection_module, "_WORD_S", 30.0)
    async with served(patience_s=0.0) as coordinator:

        def gone(*_: Any) -> None:
            raise RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer")

        monkeypatch.setattr(coordinator.engine, "compute", gone)
        monkeypatch.setattr(coordinator.engine, "counted", gone)
        await coordinator.publish(0)
        await coordinator.lease(1)
        await coordinator.settle()
        coordinator.compute.let_go()
        await coordinator.settle()


async def test_the_memory_of_a_failed_leaf_is_free_where_its_link_is_lost_before_that_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(ends=LinkLost) as coordinator:
        vector, released = ResultVector(coordinator.engine.layout), list[ResultVector]()

        def fails(*_: Any) -> None:
            coordinator.link.abort()
            raise LeafError.told(0, "ValueError: x", "ValueError: x", (vector,), device_lost=False)

        monkeypatch.setattr(coordinator.engine, "counted", fails)
        monkeypatch.setattr(coordinator.engine, "release", released.append)
        await coordinator.publish(0)
        await coordinator.lease(1)
        await coordinator.settle()
        coordinator.compute.let_go()
        await coordinator.settle()
        assert released == [vector]


def without_room(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> ResultVector:
    """Its engine has none until this is released."""
    engine = coordinator.engine
    vector, release = ResultVector(engine.layout), engine.release

    def makes_room(released: ResultVector) -> None:
        if released is vector:
            monkeypatch.setattr(engine, "has_room", True)
        else:
            release(released)

    monkeypatch.setattr(engine, "has_room", False)
    monkeypatch.setattr(engine, "release", makes_room)
    return vector


async def test_a_lease_for_whose_results_there_is_no_room_waits_in_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as coordinator:
        vector, pool = without_room(coordinator, monkeypatch), coordinator.compute
        await coordinator.publish(0)
        await coordinator.lease(1)
        await coordinator.settle()
        pool.let_go()
        await coordinator.lease(2)
        await coordinator.settle()
        assert not pool.waiting
        assert coordinator.leases.activity == "waiting for results to leave"
        coordinator.leases._release([vector])
        pool.let_go()
        await coordinator.settle()
        assert [done.lease for done in coordinator.all(Done)] == [1, 2]


async def test_what_an_earlier_link_has_left_keeps_no_lease_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as coordinator:
        other = Lease(9, 0, 0, 6, (2,), 60.0, True, b"")
        done = Done(9, (0.0, 0.0), (), (), (), (), 0, 0.0, 0.0)
        coordinator.leases._earlier.append(Unsent(other, (), done, (without_room(coordinator, monkeypatch),)))
        await coordinator.publish(0)
        await coordinator.lease(1)
        await coordinator.settle()
        coordinator.compute.let_go()
        await coordinator.settle()
        assert [done.lease for done in coordinator.all(Done)] == [1]


@pytest.mark.parametrize(
    ("code", "ends", "parts"),
    [(ByeCode.FINISHED, None, True), (ByeCode.FAILED, RunFailed, True), (None, LinkLost, False)],
    ids=["finished", "failed", "lost"],
)
async def test_a_block_that_hangs_is_waited_for_only_where_another_link_may_want_it(
    monkeypatch: pytest.MonkeyPatch, code: ByeCode | None, ends: type[BaseException] | None, parts: bool
) -> None:
    monkeypatch.setattr(connection_module, "_BLOCK_S", 0.0)
    async with served(ends=ends) as coordinator:
        await coordinator.publish(0)
        await coordinator.lease(1)
        await coordinator.settle()
        assert coordinator.compute.waiting
        if code is None:
            coordinator.link.abort()
        else:
            await coordinator.say(Bye(code, "why"))
        await coordinator.settle()
        assert coordinator.connection._parted.is_set() is parts
        assert isinstance(coordinator.connection.error, ends or type(None))
        coordinator.compute.let_go()
