"""What waits to be sent: order, what is overtaken, what is taken back."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.memory_links import memory_pair

from w5xde_async.errors import LinkLost
from w5xde_async.net.outbox import Outbox
from w5xde_async.wire.frame import BufferSpec, encode
from w5xde_async.wire.messages import Heartbeat, Result


def frame(text: str) -> list[bytes]:
    return encode(Heartbeat(text))  # type: ignore[return-value]


async def test_an_unsent_lease_can_be_taken_back():
    near, far = memory_pair()
    outbox = Outbox(near)
    outbox.post(frame("before"))
    outbox.post(frame("lease 7"), lease=7)
    outbox.post(frame("lease 8"), lease=8)
    assert outbox.lease_bytes == 2 * len(frame("lease 7")[0])
    assert outbox.num_messages == 1
    assert outbox.withdraw(7)
    assert not outbox.withdraw(7)
    sending = asyncio.create_task(outbox.run())
    texts = [(await far.recv()).message.activity for _ in range(2)]  # type: ignore[attr-defined]
    assert texts == ["before", "lease 8"]
    assert (outbox.lease_bytes, outbox.num_messages, outbox.withdraw(8), outbox.idle) == (0, 0, False, True)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    near.abort()
    far.abort()


async def test_what_is_being_sent_still_counts():
    """A peer that reads nothing leaves the outbox busy although its queue is empty."""
    near, far = memory_pair(limit_bytes=8)
    outbox = Outbox(near)
    outbox.post(frame("much longer than the pipe"), lease=1)
    sending = asyncio.create_task(outbox.run())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not outbox.idle
    assert 0 < near.bytes_sent < len(frame("much longer than the pipe")[0])
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    near.abort()
    far.abort()


async def test_what_the_kernel_takes_at_once_says_nothing_of_the_line(monkeypatch: pytest.MonkeyPatch):
    """A second for each send: of three, the first fits, half of the second does, and the rest waits for the line."""
    monkeypatch.setattr("w5xde_async.net.outbox.BUFFER_BYTES", 3 << 19)
    ticks = itertools.count()

    async def send(chunks: list[bytes]) -> None:
        await asyncio.sleep(0)

    link: Any = SimpleNamespace(send=send, send_now=lambda chunks: None)
    outbox = Outbox(link, clock=lambda: float(next(ticks)))
    sending = asyncio.create_task(outbox.run())
    for turn in (1, 2):
        for _ in range(3):
            outbox.post([bytes(1 << 20)])
        for _ in range(20):
            await asyncio.sleep(0)
        assert outbox.idle
        assert (outbox.paced_bytes, outbox.paced_s, outbox.sending_s) == (turn * (3 << 19), 2.0 * turn, 3.0 * turn)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


async def test_versions_overtake_each_other():
    near, far = memory_pair()
    outbox = Outbox(near)
    for version in (1, 2):
        outbox.supersede(version)
        outbox.post(frame(f"version {version}"), version=version)
        outbox.post(frame(f"other {version}"))
    sending = asyncio.create_task(outbox.run())
    texts = [(await far.recv()).message.activity for _ in range(3)]  # type: ignore[attr-defined]
    assert texts == ["other 1", "version 2", "other 2"]
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    near.abort()
    far.abort()


async def test_without_gathering_every_frame_is_a_write_and_the_bytes_are_the_same():
    frames = [encode(Result(1, 4), [(BufferSpec("", "float32", (3,), "raw", 12), bytes(12))]), frame("idle"), frame("")]
    writes: dict[bool, list[bytes]] = {True: [], False: []}
    for gather, sends in writes.items():

        async def send(chunks: list[bytes], sends: list[bytes] = sends) -> None:
            sends.append(b"".join(bytes(chunk) for chunk in chunks))

        ticks = itertools.count()
        outbox = Outbox(
            SimpleNamespace(send=send, send_now=lambda chunks: None),
            gather=gather,
            clock=lambda ticks=ticks: float(next(ticks)),
        )  # type: ignore[arg-type]
        told: list[tuple[int, float]] = []

        def note(outbox: Outbox = outbox, told: list[tuple[int, float]] = told) -> None:
            told.append((outbox.sent_bytes, outbox.sending_s))

        for chunks in frames:
            outbox.post(chunks, sent=note)
        sending = asyncio.create_task(outbox.run())
        for _ in range(5):
            await asyncio.sleep(0)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        sizes = list(itertools.accumulate(sum(map(len, chunks)) for chunks in frames))
        assert [sent for sent, _ in told] == sizes
        shares = [at / sizes[-1] for at in sizes] if gather else [1.0, 2.0, 3.0]
        assert [seconds for _, seconds in told] == pytest.approx(shares)
    assert (len(writes[True]), len(writes[False])) == (1, 3)
    assert b"".join(writes[False]) == writes[True][0]


async def test_what_is_flushed_leaves_without_a_turn_of_the_loop():
    near, far = memory_pair()
    outbox, left = Outbox(near), list[str]()
    sending = asyncio.create_task(outbox.run())
    await asyncio.sleep(0)
    outbox.post(frame("one"), lease=1, sent=lambda: left.append("one"))
    outbox.post(frame("two"), sent=lambda: left.append("two"))
    assert (near.bytes_sent, left) == (0, [])
    outbox.flush()
    assert (left, outbox.idle, outbox.lease_bytes, outbox.num_messages) == (["one", "two"], True, 0, 0)
    assert near.bytes_sent == outbox.sent_bytes == len(b"".join(frame("one") + frame("two")))
    outbox.post(frame("three"), sent=lambda: left.append("three"))
    await asyncio.sleep(0)  # nobody flushes: it leaves at the loop's next turn
    assert left == ["one", "two", "three"]
    assert [(await far.recv()).message.activity for _ in range(3)] == left  # type: ignore[attr-defined]
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    near.abort()
    far.abort()


async def test_what_does_not_fit_leaves_later_and_in_order():
    near, far = memory_pair(limit_bytes=8)
    outbox, left = Outbox(near), list[str]()
    sending = asyncio.create_task(outbox.run())
    outbox.post(frame("the first of them"), sent=lambda: left.append("first"))
    outbox.flush()
    assert near.bytes_sent == 8
    assert (left, outbox.idle) == ([], False)
    outbox.post(frame("the second"), sent=lambda: left.append("second"))
    outbox.flush()  # the line is not free
    assert near.bytes_sent == 8
    texts = [(await far.recv()).message.activity for _ in range(2)]  # type: ignore[attr-defined]
    assert texts == ["the first of them", "the second"]
    assert left == ["first", "second"]
    assert outbox.sent_bytes == near.bytes_sent
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    near.abort()
    far.abort()


async def test_a_callback_that_raises_ends_the_sender_and_not_who_posts():
    near, far = memory_pair()
    outbox = Outbox(near)
    sending = asyncio.create_task(outbox.run())
    outbox.post(frame("told"), sent=lambda: 1 / 0)
    outbox.flush()
    with pytest.raises(ZeroDivisionError):
        await sending
    near.abort()
    far.abort()


async def test_a_lost_line_is_told_by_the_sender():
    near, far = memory_pair()
    outbox = Outbox(near)
    sending = asyncio.create_task(outbox.run())
    near.cut()
    outbox.post(frame("nobody hears it"), sent=lambda: pytest.fail("it has not left"))
    outbox.flush()
    with pytest.raises(LinkLost):
        await sending
    near.abort()
    far.abort()


@pytest.mark.parametrize("wait", [True, False])
async def test_much_is_left_to_the_sender(wait: bool):
    """A send of many bytes is not to hold up whoever posts; nor are frames to share one where they must not."""
    near, far = memory_pair(limit_bytes=1 << 20)
    outbox = Outbox(near, gather=wait)
    sending = asyncio.create_task(outbox.run())
    outbox.post([bytes(200 << 10) if wait else bytes(10)])
    outbox.flush()
    assert near.bytes_sent == 0
    for _ in range(5):
        await asyncio.sleep(0)
    assert outbox.idle
    assert near.bytes_sent == (200 << 10 if wait else 10)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    near.abort()
    far.abort()
