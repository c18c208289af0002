"""Large results that a codec wrote are decoded in a thread: the loop goes on, and the slot into which the thread writes
is nobody else's until it has ended, whatever becomes of the lease or the session meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.scripted import PATIENCE_S, Run, Scripted, scripted, settle

from w5xde_async.codecs.registry import codec
from w5xde_async.coordinator.parameters.receive_buffers import ReceiveBuffers
from w5xde_async.coordinator.sync import results
from w5xde_async.params.flat import ResultVector
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.wire.frame import BufferSpec, encode
from w5xde_async.wire.messages import Lease, Refusal, Result
from w5xde_async.worker.uplink.result_encoder import ResultEncoder

BUCKETS = range(4)  # of the scripted job
CODED = UpdateConfig(codec="lz4")


class Gate:
    """Decoding waits until it is open. ``threads``: in which buckets were decoded."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.began, self._open = threading.Semaphore(0), threading.Event()
        self.open()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def entered(self) -> None:
        """Return when a thread stands at it."""
        await asyncio.to_thread(self.began.acquire)

    def __call__(self) -> None:
        self.threads.append(threading.current_thread())
        self.began.release()
        if threading.current_thread() is not threading.main_thread():
            self._open.wait()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    real = ReceiveBuffers._decode

    def decode(self: ReceiveBuffers, *args: Any) -> None:
        made()
        real(self, *args)

    monkeypatch.setattr(ReceiveBuffers, "_decode", decode)
    monkeypatch.setattr(results, "INLINE_CODED_BYTES", -1)
    yield made
    made.open()


def coded(run: Run, lease: Lease, bucket: int, value: float = 1.0) -> list[Any]:
    layout = run.prepared.spec.layout
    vector = ResultVector(layout)
    vector.buckets[bucket].fill_(value * sum(lease.samples))
    encoder = ResultEncoder(layout, codec("lz4"), feedback=False)
    return encode(Result(lease.lease, bucket), encoder.encode(1, bucket, vector).buffers)


async def send(worker: Scripted, lease: Lease, *buckets: int, value: float = 1.0) -> None:
    for bucket in buckets:
        await worker.link.send(coded(worker.run, lease, bucket, value))
    await settle()


async def work(run: Run, *workers: Scripted, version: int = 1, answered: frozenset[int] = frozenset()) -> None:
    """Have them answer their leases, but those ``answered`` already, until there is that version."""
    known = set(answered)
    async with asyncio.timeout(PATIENCE_S):
        while run.training.version < version:
            for worker in workers:
                for lease in [lease for lease in worker.all(Lease) if lease.lease not in known]:
                    known.add(lease.lease)
                    if lease.version < version:
                        await worker.version(lease.version)
                        await send(worker, lease, *BUCKETS)
                        await worker.done(lease)
            await asyncio.sleep(0.001)


async def test_a_large_bucket_is_decoded_in_a_thread_and_a_small_one_on_the_loop(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted(update=CODED) as run:
        worker = await run.worker("ada")
        await work(run, worker)
        assert len(gate.threads) >= len(BUCKETS)
        assert threading.main_thread() not in gate.threads
        gate.threads.clear()
        sizes = [run.prepared.spec.layout.result_nbytes(one) for one in run.prepared.spec.layout.result_buckets]
        monkeypatch.setattr(results, "INLINE_CODED_BYTES", max(sizes))  # as large as that is not large
        await work(run, worker, version=2)
        assert set(gate.threads) == {threading.main_thread()}
        assert run.applied() == {2.0}


async def test_others_are_served_meanwhile(gate: Gate) -> None:
    async with scripted(update=CODED) as run:
        ada, eve = await run.worker("ada"), await run.worker("eve")
        gate.shut()
        lease = await ada.lease()
        await send(ada, lease, 0)
        await gate.entered()
        assert ada.session.is_receiving(lease.lease)  # nobody takes the lease from it now
        await eve.beat()
        assert eve.session.last_message == "here"
        gate.open()
        await send(ada, lease, *BUCKETS[1:])
        await ada.done(lease)
        await work(run, ada, eve, answered=frozenset({lease.lease}))
        assert run.applied() == {1.0}


async def test_a_session_that_ends_meanwhile_has_ended_when_the_thread_has(gate: Gate) -> None:
    async with scripted(update=CODED) as run:
        ada = await run.worker("ada")
        gate.shut()
        lease = await ada.lease()
        await send(ada, lease, 0)
        await gate.entered()
        ada.session.abort("a test")
        for _ in range(2):  # a second one is no reason to go either
            ada.serving.cancel()
            await settle()
        assert not ada.ended()  # else its slot would be somebody else's
        eve = await run.worker("eve")
        gate.open()
        await run.until(ada.ended)
        await work(run, eve)
        assert run.applied() == {1.0}


async def test_what_comes_whole_after_its_session_was_given_up_does_not_count(gate: Gate) -> None:
    async with scripted(update=CODED) as run:
        ada = await run.worker("ada")
        gate.shut()
        lease = await ada.lease()
        await send(ada, lease, 0, value=100.0)
        await gate.entered()
        ada.session.abort("it lies")
        gate.open()
        await run.until(ada.ended)
        await work(run, await run.worker("eve"))
        assert run.applied() == {1.0}


async def test_a_lease_that_ends_meanwhile_leaves_its_slot_empty(gate: Gate) -> None:
    async with scripted(update=CODED) as run:
        ada, eve = await run.worker("ada"), await run.worker("eve")
        gate.shut()
        lease = await ada.lease()
        await send(ada, lease, 0, value=100.0)
        await gate.entered()
        assert not ada.session.divert()  # a thread writes there
        run.training.ledger.give_back(lease.lease)
        run.training.schedule()
        assert ada.session.receiving == lease.lease
        gate.open()
        await run.until(lambda: ada.session.receiving is None)
        await work(run, ada, eve, answered=frozenset({lease.lease}))
        assert run.applied() == {1.0}


async def test_what_cannot_be_read_ends_its_session_and_leaves_the_slot_empty(gate: Gate) -> None:
    async with scripted(update=CODED) as run:
        ada = await run.worker("ada")
        lease = await ada.lease()
        junk = bytes(range(64))
        spec = BufferSpec("", "uint8", (len(junk),), "lz4", len(junk))
        await ada.link.send(encode(Result(lease.lease, 0), [(spec, junk)]))
        await run.until(lambda: ada.ended() and ada.all(Refusal))
        (refusal,) = ada.all(Refusal)
        assert "over the limit" in refusal.reason
        assert threading.main_thread() not in gate.threads
        await work(run, await run.worker("eve"))
        assert run.applied() == {1.0}
