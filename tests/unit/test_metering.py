"""A worker's meter counts what passes a link, lease by lease, and changes nothing of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from w5xde_async.compute.block import ComputedBlock
from w5xde_async.net.link import Received
from w5xde_async.net.outbox import Outbox
from w5xde_async.wire.frame import HANDSHAKE_CAPS, Buffer, BufferSpec, encode
from w5xde_async.wire.messages import Done, Heartbeat, Lease, Result, Revoke
from w5xde_async.worker.connection.compute_queue import ComputeThread
from w5xde_async.worker.connection.leases import Leases
from w5xde_async.worker.connection.metering import Meter, Traffic
from w5xde_async.worker.executors.executor import Computed, HeldLease
from w5xde_async.worker.hooks import LeaseAnswered
from w5xde_async.worker.uplink.result_encoder import BucketResult

SIZES = (200, 80, 400, 4, 12, 0)  # of each bucket as it lies in memory


class Wire:
    """A link that remembers what it sent and gives what it is told to."""

    def __init__(self, incoming: Sequence[tuple[Any, int]] = ()) -> None:
        self.caps, self.peer, self.certificate, self.figures = HANDSHAKE_CAPS, "peer", b"cert", None
        self.bytes_sent, self.bytes_received = 100, 40  # the handshake
        self.sends: list[bytes] = []
        self._incoming = list(incoming)

    def send_now(self, chunks: Sequence[Buffer]) -> None: ...

    async def send(self, chunks: Sequence[Buffer]) -> None:
        self.sends.append(b"".join(bytes(chunk) for chunk in chunks))
        self.bytes_sent += len(self.sends[-1])

    async def recv(self, accept: Any = None) -> Received:
        message, nbytes = self._incoming.pop(0)
        self.bytes_received += nbytes
        specs = (BufferSpec("", "uint8", (nbytes,), "raw", nbytes),) if nbytes else ()
        return Received(message, specs, accept(message, specs) if specs else ())

    async def aclose(self) -> None: ...

    def abort(self) -> None: ...


class Metered:
    """Leases over a wire, with a meter that sees a second pass between two looks at the clock."""

    def __init__(self, *incoming: tuple[Any, int]) -> None:
        ticks = itertools.count()
        self.wire = Wire(incoming)
        self.answers: list[LeaseAnswered] = []
        self.outbox = Outbox(self.wire, clock=lambda: float(next(ticks)))
        self.meter = Meter(self.wire, self.outbox, self.answers.append, lambda: float(next(ticks)))
        layout = SimpleNamespace(result_buckets=range(len(SIZES)), result_nbytes=SIZES.__getitem__)
        executor: Any = SimpleNamespace(
            layout=layout,
            parameters=None,
            capacity_bytes=1 << 20,
            exact=True,
            repeatable=True,
            has_room=True,
            release=lambda vectors: None,
        )
        thread = ComputeThread(pool=None)  # type: ignore[arg-type]
        self.leases = Leases(executor, thread, self.outbox, self.meter, on_failure=lambda error: None)

    async def receive(self) -> None:
        await self.meter.recv(lambda message, specs: [memoryview(bytearray(spec.nbytes)) for spec in specs])

    def result(self, number: int, bucket: int, nbytes: int | None = None) -> list[Buffer]:
        """One bucket's sum, raw or in so many bytes of a codec."""
        spec = BufferSpec("", "float32", (SIZES[bucket] // 4,), "raw", SIZES[bucket])
        if nbytes is not None:
            spec = BufferSpec("", "uint8", (nbytes,), "lz4", nbytes)
        data = bytes(spec.nbytes)
        self.leases.result(number, BucketResult(bucket, ((spec, data),)))
        return encode(Result(number, bucket), [(spec, data)])

    def done(self, given: Lease, losses: tuple[float, ...], encode_s: float = 0.0) -> list[Buffer]:
        outcome = ComputedBlock(
            losses=losses, metric_names=(), metrics=(), untouched=(), absent=(), splits=0, compute_s=0.0, vectors=()
        )
        self.leases.done(HeldLease(given, (), 0), Computed(outcome, encode_s=encode_s), 0.0)
        return encode(Done(given.lease, losses, (), (), (), (), 0, 0.0, 0.0, encode_s=encode_s))

    async def send(self) -> None:
        sending = asyncio.create_task(self.outbox.run())
        for _ in range(5):
            await asyncio.sleep(0)
        assert self.outbox.idle
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


def lease(number: int, step: int, start: int, samples: tuple[int, ...]) -> Lease:
    return Lease(number, step, step, start, samples, 60.0, True, b"")


def size(*frames: Sequence[Buffer]) -> int:
    return sum(len(chunk) for frame in frames for chunk in frame)


async def test_every_number_of_an_answer() -> None:
    first, second = lease(7, 3, 4, (10, 30)), lease(8, 4, 0, (5,))
    metered = Metered((first, 500), (second, 60), (Heartbeat("no buffers"), 0))
    for _ in range(3):
        await metered.receive()
    beat = encode(Heartbeat("busy"))
    metered.outbox.post(beat)
    raw = metered.result(7, 0)
    await metered.send()
    coded = metered.result(7, 1, 33)
    done = metered.done(first, (1.0, 2.0), 0.25)
    await metered.send()
    last = metered.done(second, (0.5,))
    await metered.send()
    answers = metered.answers
    assert [(a.step, a.start, a.samples, a.loss) for a in answers] == [(3, 4, (10, 30), 1.75), (4, 0, (5,), 0.5)]
    assert answers[0].sent_bytes == 100 + size(beat, raw, coded, done)
    assert answers[1].sent_bytes == size(last)
    assert [answer.received_bytes for answer in answers] == [40 + 500 + 60, 0]
    assert [answer.gradient_bytes for answer in answers] == [280, 0]
    assert [answer.encoded_bytes for answer in answers] == [233, 0]
    assert [answer.encode_s for answer in answers] == [0.25, 0.0]
    assert [answer.network_s for answer in answers] == pytest.approx([4.0, 1.0])


async def test_frames_that_go_together_have_their_share_of_the_time() -> None:
    metered = Metered()
    metered.result(1, 2)
    metered.done(lease(1, 0, 0, (1,)), (1.0,))
    metered.result(2, 3)
    metered.done(lease(2, 0, 1, (1,)), (1.0,))
    await metered.send()
    answers = metered.answers
    assert len(metered.wire.sends) == 1
    assert sum(answer.network_s for answer in answers) == pytest.approx(1.0)
    assert answers[0].network_s / answers[1].network_s == pytest.approx(
        (answers[0].sent_bytes - 100) / answers[1].sent_bytes
    )
    assert [answer.gradient_bytes for answer in answers] == [400, 4]  # what was posted before each DONE


async def test_a_lease_that_was_revoked_in_time_is_no_answer() -> None:
    metered = Metered()
    given = lease(1, 0, 0, (4,))
    metered.leases._inbox.lease(given)
    metered.leases.revoke(Revoke(1, ""))
    await metered.send()
    assert len(metered.wire.sends) == 1
    assert not metered.answers


async def test_the_frames_are_those_without_a_meter() -> None:
    metered = Metered()
    frames = [metered.result(1, 4), metered.result(1, 5), metered.done(lease(1, 0, 0, (1,)), (1.0,))]
    await metered.send()
    assert metered.wire.sends == [b"".join(bytes(chunk) for frame in frames for chunk in frame)]


async def test_what_a_hook_raises_ends_the_sending() -> None:
    wire = Wire()
    outbox = Outbox(wire)

    def fail(answered: LeaseAnswered) -> None:
        raise ValueError("mine")

    meter = Meter(wire, outbox, fail, lambda: 0.0)
    given = lease(1, 0, 0, (1,))
    outbox.post(encode(Heartbeat("")), sent=meter.answered(given, Done(1, (1.0,), (), (), (), (), 0, 0.0, 0.0)))
    with pytest.raises(ValueError, match="mine"):
        await outbox.run()


def test_traffic_adds_up_over_links() -> None:
    traffic, first, second = Traffic(), Wire(), Wire()
    assert (traffic.bytes_sent, traffic.bytes_received) == (0, 0)
    traffic.add(first)
    first.bytes_sent = 1000
    traffic.add(second)
    second.bytes_received = 7
    assert (traffic.bytes_sent, traffic.bytes_received) == (1100, 47)
