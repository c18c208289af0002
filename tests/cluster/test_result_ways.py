"""What a coordinator promises of a result, whichever way it comes: as bytes on the link, or as a place in memory that
the worker shares with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from itertools import count
from typing import Any

import pytest
from msgspec import structs
from tests.support.scripted import Run, Scripted, scripted, settle

from w5xde_async.hub.members.sharing import SharedResults, witness
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.params.slots import SHARED_SLOTS, slot_bytes, slots_in
from w5xde_async.segments import Segment, unsupported
from w5xde_async.wire.frame import BufferSpec, encode
from w5xde_async.wire.messages import Lease, Refusal, Result

WAYS = ("bytes", pytest.param("memory", marks=pytest.mark.skipif(unsupported() != "", reason=unsupported())))
pytestmark = pytest.mark.parametrize("kind", WAYS)
BUCKETS = range(4)  # of the scripted job
NONCE = b"a link's own nonce, of 32 bytes!"


class Way:
    """Sends a worker's results in one way. ``shared``: its vectors, where it has memory with the coordinator."""

    def __init__(self, run: Run, worker: Scripted, kind: str) -> None:
        self.worker, self.kind = worker, kind
        self.shared: list[ResultVector] = []
        self._layout = run.prepared.spec.layout

    def open(self, parameters: Segment) -> Segment:
        results = Segment("results", SHARED_SLOTS * slot_bytes(self._layout), witness(parameters.secret, NONCE))
        self.shared = slots_in(self._layout, results.payload, SHARED_SLOTS)
        self.worker.session.shared = SharedResults(parameters, results.told, NONCE, self._layout)
        return results

    def frame(self, lease: Lease, bucket: int, slot: int = 0) -> list[Any]:
        if self.kind == "bytes":
            return self.worker.result(lease, bucket)
        self.shared[slot].buckets[bucket].fill_(float(sum(lease.samples)))
        return encode(Result(lease.lease, bucket, slot + 1))

    async def send(self, lease: Lease, *buckets: int, slot: int = 0) -> None:
        for bucket in buckets:
            await self.worker.link.send(self.frame(lease, bucket, slot))
        await settle()


@asynccontextmanager
async def met(kind: str) -> AsyncIterator[tuple[Run, Way]]:
    async with scripted() as run:
        way = Way(run, await run.worker("ada"), kind)
        with ExitStack() as opened:
            if kind == "memory":
                parameters = Segment("parameters", FlatState.nbytes(run.prepared.spec.layout), bytes(range(32)))
                opened.enter_context(closing(parameters))
                opened.enter_context(closing(await asyncio.to_thread(way.open, parameters)))
            yield run, way


def refused(worker: Scripted) -> str:
    """Why the coordinator ended its link."""
    (refusal,) = worker.all(Refusal)
    return refusal.reason


async def work(worker: Scripted, answer: Callable[[Lease], Awaitable[None]], versions: int = 1) -> None:
    """Answer its leases until so many steps are over."""
    for number in count():
        lease = await worker.lease(number)
        if lease.version == versions:
            await worker.run.commits(versions)
            return
        await worker.version(lease.version)
        await answer(lease)


async def test_steps_are_applied_once(kind: str) -> None:
    async with met(kind) as (run, way):

        async def answer(lease: Lease) -> None:
            await way.send(lease, *BUCKETS, slot=lease.lease % SHARED_SLOTS)
            await way.worker.done(lease)

        await work(way.worker, answer, versions=3)
        assert run.applied() == {3.0}


async def test_buckets_come_in_any_order_and_each_in_its_own_way(kind: str) -> None:
    async with met(kind) as (run, way):

        async def answer(lease: Lease) -> None:
            await way.worker.send(lease, 3, 1)  # as bytes, which is allowed at any time
            await way.send(lease, 2, 0)
            await way.worker.done(lease)

        await work(way.worker, answer)
        assert run.applied() == {1.0}


async def test_a_second_arrival_is_dropped(kind: str) -> None:
    async with met(kind) as (run, way):

        async def answer(lease: Lease) -> None:
            await way.send(lease, 0, 0, *BUCKETS, 0, 3)
            await way.worker.done(lease)

        await work(way.worker, answer)
        assert run.applied() == {1.0}
        assert not way.worker.ended()


async def test_what_is_written_after_it_was_sent_does_not_count(kind: str) -> None:
    async with met(kind) as (run, way):

        async def answer(lease: Lease) -> None:
            await way.send(lease, *BUCKETS)
            for vector in way.shared:
                vector.memory.fill_(7)
            await way.worker.done(lease)

        await work(way.worker, answer)
        assert run.applied() == {1.0}


async def test_done_without_a_bucket_ends_the_link(kind: str) -> None:
    async with met(kind) as (run, way):
        lease = await way.worker.lease()
        await way.send(lease, 1, 2, 3)
        await way.worker.done(lease)
        await run.until(way.worker.ended)
        assert "without bucket 0" in refused(way.worker)


async def test_results_of_a_lease_that_nobody_gave_are_dropped(kind: str) -> None:
    async with met(kind) as (_, way):
        lease = await way.worker.lease()
        await way.send(structs.replace(lease, lease=9_999), *BUCKETS)
        await way.send(lease, *BUCKETS)
        await way.worker.done(lease)
        await way.worker.lease(1)  # it counts, and the next one came


async def test_what_came_before_the_link_broke_stays(kind: str) -> None:
    async with met(kind) as (run, way):
        lease = await way.worker.lease()
        await way.send(lease, 0)
        way.worker.link.abort()
        await run.until(way.worker.ended)
        for vector in way.shared:
            vector.memory.fill_(7)  # of a link that ended: nothing of it is read again
        other, there = await run.worker("grace"), []

        async def answer(lease: Lease) -> None:
            there.append(lease.there)
            await other.send(lease, *set(BUCKETS).difference(lease.there))
            await other.done(lease)

        await work(other, answer)
        assert run.applied() == {1.0}
        assert (0,) in there


@pytest.mark.parametrize(("bucket", "slot"), [(0, SHARED_SLOTS + 1), (4, 1), (1 << 40, 1), (0, 1 << 40)])
async def test_a_place_that_is_none_ends_the_link_and_another_worker_goes_on(kind: str, bucket: int, slot: int) -> None:
    async with met(kind) as (run, way):
        """Of one that shares nothing every place is none."""
        lease = await way.worker.lease()
        await way.worker.link.send(encode(Result(lease.lease, bucket, slot)))
        await run.until(way.worker.ended)
        said = "of the shared memory" if way.shared else "without its buffer"
        assert said in refused(way.worker)
        other = await run.worker("grace")
        await work(other, other.compute)
        assert run.applied() == {1.0}


async def test_bytes_that_are_said_to_lie_in_memory_end_the_link(kind: str) -> None:
    async with met(kind) as (run, way):
        lease = await way.worker.lease()
        payload = bytes(4 * run.prepared.spec.layout.result_buckets[0].numel)
        spec = BufferSpec("", "float32", (len(payload) // 4,), "raw", len(payload))
        await way.worker.link.send(encode(Result(lease.lease, 0, 1), [(spec, payload)]))
        await run.until(way.worker.ended)
        assert "says lies in shared memory" in refused(way.worker)
