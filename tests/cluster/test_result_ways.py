"""What a coordinator promises of a result, whichever way it comes: as bytes on the link, or as a place in memory that
the worker shares with it. The worker writes there again as soon as it is told what became of its lease."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

import pytest
from msgspec import structs
from tests.support.scripted import WAYS, Run, Scripted, scripted, settle

from w5xde_async.params.slots import SHARED_SLOTS
from w5xde_async.wire.frame import BufferSpec, encode
from w5xde_async.wire.messages import Failed, Lease, Refusal, Result

BUCKETS = range(4)  # of the scripted job
VERIFIED = {"norm_gate": 6.0}


@pytest.fixture(autouse=True, params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Run, "shares", request.param == "memory")
    return str(request.param)


async def refused(worker: Scripted) -> str:
    """Why the coordinator ended its link. The last that it has sent may come later than the end is known here."""
    await worker.run.until(lambda: worker.all(Refusal))
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


async def test_steps_are_applied_once() -> None:
    async with scripted() as run:
        worker = await run.worker("ada")
        await work(worker, worker.compute, versions=3)
        assert run.applied() == {3.0}


async def test_buckets_come_in_any_order_and_each_in_its_own_way() -> None:
    async with scripted() as run:
        worker = await run.worker("ada")

        async def answer(lease: Lease) -> None:
            await worker.send(lease, 3, 1, as_bytes=True)  # which is allowed at any time
            await worker.send(lease, 2, 0)
            await worker.done(lease)

        await work(worker, answer)
        assert run.applied() == {1.0}


async def test_a_second_arrival_is_dropped() -> None:
    async with scripted() as run:
        worker = await run.worker("ada")

        async def answer(lease: Lease) -> None:
            await worker.send(lease, 0, 0, *BUCKETS, 0, 3)
            await worker.done(lease)

        await work(worker, answer)
        assert run.applied() == {1.0}
        assert not worker.ended()


@pytest.mark.parametrize("config", [{}, VERIFIED], ids=["unverified", "verified"])
async def test_what_a_failed_lease_had_sent_is_read_no_more_once_it_is_told(config: dict[str, float]) -> None:
    async with scripted(**config) as run:
        worker, failed = await run.worker("ada"), []

        async def answer(lease: Lease) -> None:
            await worker.send(lease, *set(BUCKETS[:2]).difference(lease.there))
            if len(failed) < 2:
                failed.append(lease)
                await worker.link.send(encode(Failed(lease.lease, lease.start, "ValueError: no", "")))
                await settle()
                return
            await worker.send(lease, *BUCKETS[2:])
            await worker.done(lease)

        await work(worker, answer, versions=2)
        assert run.applied() == {2.0}


async def test_done_without_a_bucket_ends_the_link() -> None:
    async with scripted() as run:
        worker = await run.worker("ada")
        lease = await worker.lease()
        await worker.send(lease, 1, 2, 3)
        await worker.done(lease)
        await run.until(worker.ended)
        assert "without bucket 0" in await refused(worker)


async def test_results_of_a_lease_that_nobody_gave_are_dropped() -> None:
    async with scripted() as run:
        worker = await run.worker("ada")
        lease = await worker.lease()
        await worker.send(structs.replace(lease, lease=9_999), *BUCKETS)
        await worker.send(lease, *BUCKETS)
        await worker.done(lease)
        await worker.lease(1)  # it counts, and the next one came


@pytest.mark.parametrize("config", [{}, VERIFIED], ids=["unverified", "verified"])
async def test_one_that_writes_where_it_must_not_spoils_its_step_and_no_other(config: dict[str, float]) -> None:
    """What it shares is read when it is added, after it was measured. Bytes are the coordinator's own."""
    async with scripted(**config) as run:
        worker = await run.worker("ada")

        async def answer(lease: Lease) -> None:
            await worker.compute(lease)
            if lease.version == 0 and worker.shared:
                worker.shared[worker.slot(lease)].memory.fill_(0xFF)  # not a number

        await work(worker, answer, versions=3)
        assert run.applied() == {2.0 if worker.shared else 3.0}
        assert not worker.ended()


@pytest.mark.parametrize("config", [{}, VERIFIED], ids=["unverified", "verified"])
@pytest.mark.parametrize("whole", [False, True])
async def test_what_came_before_the_worker_died_stays(whole: bool, config: dict[str, float]) -> None:
    """A part of a block, and one that is whole, with nobody left who has that memory but the coordinator."""
    async with scripted(**config) as run:
        worker = await run.worker("ada")
        lease = await worker.lease()
        await worker.send(lease, *(BUCKETS if whole else [0]))
        if whole:
            await worker.done(lease)
        worker.link.abort()
        worker.unshare()
        await run.until(worker.ended)
        other, there = await run.worker("grace"), []

        async def answer(lease: Lease) -> None:
            there.append(lease.there)
            await other.send(lease, *set(BUCKETS).difference(lease.there))
            await other.done(lease)

        await work(other, answer)
        assert run.applied() == {1.0}
        assert ((0,) in there) is not whole
        gc.collect()
        assert of_results() == 2 * bool(other.shared), "memory of the dead is kept"


def of_results() -> int:
    """Mappings of memory for results: its owner's and its reader's."""
    maps = Path("/proc/self/maps")
    return maps.read_text().count("memfd:w5xde-shared-results") if maps.exists() else 0


@pytest.mark.parametrize(("bucket", "slot"), [(0, SHARED_SLOTS + 1), (4, 1), (1 << 40, 1), (0, 1 << 40)])
async def test_a_place_that_is_none_ends_the_link_and_another_worker_goes_on(bucket: int, slot: int) -> None:
    """Of one that shares nothing every place is none."""
    async with scripted() as run:
        worker = await run.worker("ada")
        lease = await worker.lease()
        await worker.link.send(encode(Result(lease.lease, bucket, slot)))
        await run.until(worker.ended)
        said = "of the shared memory" if worker.shared else "without its buffer"
        assert said in await refused(worker)
        other = await run.worker("grace")
        await work(other, other.compute)
        assert run.applied() == {1.0}


async def test_bytes_that_are_said_to_lie_in_memory_end_the_link() -> None:
    async with scripted() as run:
        worker = await run.worker("ada")
        lease = await worker.lease()
        payload = bytes(4 * run.prepared.spec.layout.result_buckets[0].numel)
        spec = BufferSpec("", "float32", (len(payload) // 4,), "raw", len(payload))
        await worker.link.send(encode(Result(lease.lease, 0, 1), [(spec, payload)]))
        await run.until(worker.ended)
        assert "says lies in shared memory" in await refused(worker)
