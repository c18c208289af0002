"""One suite for every kind of link, on both event loops: what ``net.link.Link`` promises."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
import sys
import tempfile
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import NamedTuple

import pytest
import trustme
from tests.support.memory_links import MemoryLink, memory_pair

from w5xde_async.errors import FrameTooLarge, LinkLost, LocalError, MalformedFrame, RemoteError
from w5xde_async.net import endpoint, sockets
from w5xde_async.net.link import CLOSED_BY_PEER, CLOSED_HERE, CLOSED_MID_FRAME, Link
from w5xde_async.net.sockets import BULK_BYTES
from w5xde_async.net.stream import CUT_OFF, READ_AHEAD_BYTES, TURN_BYTES
from w5xde_async.wire.frame import SESSION_CAPS, Buffer, BufferSpec, encode
from w5xde_async.wire.messages import Heartbeat, Message, Params, Result, Verdict

KINDS = ("memory", "tcp", "tcp+bulk", "transport", "tls", "transport tls", "stock tcp", "stock tls", "stock unix")
NETWORK = KINDS[1:]
pytestmark = pytest.mark.both_loops


class Pair(NamedTuple):
    near: Link
    far: Link


@pytest.fixture(scope="module")
def authority() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    made = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    made.issue_cert("localhost").configure_cert(server)
    made.configure_trust(client)
    return server, client


@asynccontextmanager
async def connected(kind: str, authority: tuple[ssl.SSLContext, ssl.SSLContext], patch: pytest.MonkeyPatch):
    if kind == "memory":
        near, far = memory_pair(limit_bytes=64 * 1024)
        near.caps = far.caps = SESSION_CAPS
        yield Pair(near, far)
        near.abort()
        far.abort()
        return
    if kind.startswith("stock"):
        async with stock_pair(kind, authority) as made:
            yield made
        return
    if kind.startswith("transport"):  # where a loop watches no descriptors
        patch.setattr(endpoint, "_watches_descriptors", lambda loop: False)
    server, client = authority if kind.endswith("tls") else (None, None)
    pool = ThreadPoolExecutor(4) if kind == "tcp+bulk" else None
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def on_link(link: Link) -> None:
        accepted.set_result(link)
        await over.wait()

    host = "localhost" if kind.endswith("tls") else "127.0.0.1"
    listener = await endpoint.listen("127.0.0.1", 0, on_link, ssl=server, bulk=pool)
    near = await endpoint.connect(host, listener.port, timeout_s=5, ssl=client, bulk=pool)
    far = await accepted
    near.caps = far.caps = SESSION_CAPS
    try:
        yield Pair(near, far)
    finally:
        near.abort()
        far.abort()
        over.set()
        await listener.aclose()
        await asyncio.sleep(0)
        if pool is not None:
            pool.shutdown(wait=True)


@asynccontextmanager
async def stock_pair(kind: str, authority: tuple[ssl.SSLContext, ssl.SSLContext]):
    """Both ends are what asyncio itself gives to an application."""
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(Link(reader, writer))

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        if kind == "stock unix":
            server = await asyncio.start_unix_server(on_connection, path)
            streams = await asyncio.open_unix_connection(path)
        else:
            theirs, ours = authority if kind == "stock tls" else (None, None)
            server = await asyncio.start_server(on_connection, "127.0.0.1", 0, ssl=theirs)
            port = server.sockets[0].getsockname()[1]
            streams = await asyncio.open_connection("localhost" if ours else "127.0.0.1", port, ssl=ours)
        near, far = Link(*streams), await accepted
        near.caps = far.caps = SESSION_CAPS
        try:
            yield Pair(near, far)
        finally:
            near.abort()
            far.abort()
            server.close()
            await server.wait_closed()
            for _ in range(3):
                await asyncio.sleep(0)


@pytest.fixture(params=KINDS)
async def pair(request, authority, monkeypatch) -> AsyncIterator[Pair]:
    async with connected(request.param, authority, monkeypatch) as made:
        yield made


@pytest.fixture(params=NETWORK)
async def network(request, authority, monkeypatch) -> AsyncIterator[Pair]:
    async with connected(request.param, authority, monkeypatch) as made:
        yield made


def pattern(nbytes: int, seed: int = 1) -> bytes:
    unit = bytes((i * 7 + seed) % 251 for i in range(251 * 64))
    return (unit * (nbytes // len(unit) + 1))[:nbytes]


def frame(*payloads: Buffer, lease: int = 3) -> list[Buffer]:
    specs = [BufferSpec(f"b{i}", "uint8", (len(data),), "raw", len(data)) for i, data in enumerate(payloads)]
    return encode(Result(lease, 0), list(zip(specs, payloads, strict=True)))


def allocate(message: Message, specs: tuple[BufferSpec, ...]) -> list[memoryview]:
    return [memoryview(bytearray(spec.nbytes)) for spec in specs]


async def send_pieces(link: Link, data: bytes, cuts: Sequence[int]) -> None:
    edges = [0, *sorted(cuts), len(data)]
    for start, end in pairwise(edges):
        if end > start:
            await link.send([data[start:end]])
            await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the state of a real socket has no event
            await asyncio.sleep(0)


# -- frames


async def test_messages_arrive_in_order_both_ways(pair: Pair):
    for sender, receiver in (pair, reversed(pair)):
        for i in range(5):
            await sender.send(encode(Heartbeat(f"beat {i}")))
        assert [(await receiver.recv()).message for _ in range(5)] == [Heartbeat(f"beat {i}") for i in range(5)]


async def test_results_and_versions_without_bytes_keep_their_place_among_those_with_them(pair: Pair):
    """Where both ends have memory together, both kinds come on one link."""
    payload, version = pattern(READ_AHEAD_BYTES + 13), Params(7, 0, 0, 1.0, shared=(0, 2, 5))
    sending = asyncio.create_task(
        pair.near.send(
            [*encode(Result(1, 0, 16)), *frame(payload, lease=1), *encode(version), *encode(Result(1, 2, 3))]
        )
    )
    received = [await pair.far.recv(allocate) for _ in range(4)]
    assert [one.message for one in received] == [Result(1, 0, 16), Result(1, 0), version, Result(1, 2, 3)]
    assert [len(one.buffers) for one in received] == [0, 1, 0, 0]
    assert bytes(received[1].buffers[0]) == payload
    await sending


async def test_any_cut_of_the_stream_gives_the_same_frames(pair: Pair):
    payload = pattern(700)
    chunks = [*encode(Heartbeat("a")), *frame(payload, b"", b"x" * 3), *encode(Verdict((1, 2), 0, "b"))]
    data = b"".join(chunks)
    for cuts in ([i] for i in range(1, len(data), 13)):
        sending = asyncio.create_task(send_pieces(pair.near, data, cuts))
        first = await pair.far.recv()
        second = await pair.far.recv(allocate)
        third = await pair.far.recv()
        await sending
        assert first.message == Heartbeat("a")
        assert [bytes(view) for view in second.buffers] == [payload, b"", b"xxx"]
        assert third.message == Verdict((1, 2), 0, "b")
    every_byte = asyncio.create_task(send_pieces(pair.near, data, range(len(data))))
    assert (await pair.far.recv()).message == Heartbeat("a")
    assert bytes((await pair.far.recv(allocate)).buffers[0]) == payload
    assert (await pair.far.recv()).message == Verdict((1, 2), 0, "b")
    await every_byte


@pytest.mark.parametrize("nbytes", [1, READ_AHEAD_BYTES - 40, READ_AHEAD_BYTES + 1, BULK_BYTES + 13, 9_000_001])
async def test_big_frames_arrive_whole(pair: Pair, nbytes: int):
    payloads = [pattern(nbytes, seed) for seed in range(3)]

    async def send() -> None:
        for i, payload in enumerate(payloads):
            await pair.near.send(frame(payload, b"tail", lease=i))

    sending = asyncio.create_task(send())
    for i, payload in enumerate(payloads):
        message, _, views = await pair.far.recv(allocate)
        assert message == Result(i, 0)
        assert bytes(views[0]) == payload
        assert bytes(views[1]) == b"tail"
    await sending
    assert pair.near.bytes_sent >= 3 * nbytes
    assert pair.far.bytes_received >= 3 * nbytes


async def test_a_peer_is_heard_by_whole_frames_and_by_much_of_a_long_one(pair: Pair):
    """Heartbeats that vanish in a frame whose length was damaged say nothing: else the link would hang for ever."""
    beat = b"".join(encode(Heartbeat("idle")))
    assert not pair.far.heard(1.0, 3.0)
    await pair.near.send([beat])
    await pair.far.recv()
    assert pair.far.heard(1.0, 3.0)
    assert not pair.far.heard(1.0, 3.0)
    damaged = bytes([beat[0], beat[1] | 0x04, *beat[2:]])
    receiving = asyncio.create_task(pair.far.recv())
    for sent in range(len(beat), 2000, len(beat)):
        await pair.near.send([damaged])
        await until(lambda sent=sent: pair.far.bytes_received >= len(beat) + sent)
        assert not pair.far.heard(1.0, 3.0)
        damaged = beat
    await pair.near.send([bytes(4096)])
    await until(lambda: pair.far.heard(1.0, 3.0))
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)


async def test_what_comes_while_nobody_receives_is_heard(pair: Pair):
    await pair.near.send(encode(Heartbeat("idle")))
    await pair.far.recv()
    assert pair.far.heard(1.0, 3.0)
    await pair.near.send([*encode(Heartbeat("one")), *encode(Heartbeat("two"))])
    await pair.far.recv()
    assert pair.far.heard(1.0, 3.0)
    await pair.far.recv()


async def test_both_directions_at_once(pair: Pair):
    payload = pattern(3_000_000)
    results = await asyncio.gather(
        pair.near.send(frame(payload)),
        pair.far.send(frame(payload)),
        pair.near.recv(allocate),
        pair.far.recv(allocate),
    )
    assert all(bytes(received.buffers[0]) == payload for received in results[2:])


async def test_header_longer_than_the_read_ahead(pair: Pair):
    leases = tuple(range(1 << 40, (1 << 40) + READ_AHEAD_BYTES // 8))
    sending = asyncio.create_task(pair.near.send([*encode(Verdict(leases, 0, "")), *encode(Heartbeat("after"))]))
    assert (await pair.far.recv()).message == Verdict(leases, 0, "")
    assert (await pair.far.recv()).message == Heartbeat("after")
    await sending


async def test_many_small_frames_in_one_send(pair: Pair):
    count = 3000  # above IOV_MAX
    chunks = [chunk for i in range(count) for chunk in encode(Verdict((i,), 0, ""))]
    sending = asyncio.create_task(pair.near.send(chunks))
    for i in range(count):
        assert (await pair.far.recv()).message == Verdict((i,), 0, "")
    await sending


async def test_a_frame_read_ahead_does_not_suspend(pair: Pair):
    await pair.near.send(encode(Heartbeat("1")) * 2)
    await pair.far.recv()
    receiving = pair.far.recv()
    with pytest.raises(StopIteration) as done:  # a coroutine that ends in its first step
        receiving.send(None)
    assert done.value.value.message == Heartbeat("1")


# -- sending


async def test_buffers_may_be_overwritten_after_send(pair: Pair):
    payload = bytearray(pattern(6_000_000))
    expected = bytes(payload)
    receiving = asyncio.create_task(pair.far.recv(allocate))
    await pair.near.send(frame(payload))
    payload[:] = bytes(len(payload))
    assert bytes((await receiving).buffers[0]) == expected


async def test_send_waits_for_a_reader(pair: Pair):
    payload = pattern(24_000_000)
    sending = asyncio.create_task(pair.near.send(frame(payload)))
    done, _ = await asyncio.wait((sending,), timeout=0.05)
    assert not done
    assert bytes((await pair.far.recv(allocate)).buffers[0]) == payload
    await sending


async def test_a_slow_reader_does_not_hold_up_the_loop(pair: Pair):
    sending = asyncio.create_task(pair.near.send(frame(pattern(24_000_000))))
    turns = 0
    async with asyncio.timeout(5):
        while turns < 50:
            await asyncio.sleep(0)
            turns += 1
    pair.near.abort()
    with pytest.raises(LinkLost):
        await sending


@pytest.mark.parametrize("kind", ["tcp", "transport", "tls", "transport tls"])
async def test_a_big_frame_lets_others_have_their_turn(kind: str, authority, monkeypatch):
    """A loop that moves 24 MB, encryption and all, moves no more than a turn's worth at a time."""
    async with connected(kind, authority, monkeypatch) as (near, far):
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count())
        await asyncio.gather(near.send(frame(pattern(24_000_000))), far.recv(allocate))
        counting.cancel()
        assert turns >= 24_000_000 // TURN_BYTES


# -- ends


async def test_closed_by_peer_between_frames(pair: Pair):
    await pair.near.send(encode(Heartbeat("last")))
    closing = asyncio.create_task(pair.near.aclose())
    assert (await pair.far.recv()).message == Heartbeat("last")
    with pytest.raises(LinkLost) as lost:
        await pair.far.recv()
    assert lost.value.reason == CLOSED_BY_PEER
    await closing
    await pair.near.aclose()
    await pair.far.aclose()


async def test_what_was_sent_before_aclose_arrives_though_nobody_read_the_peers(network: Pair):
    """Closing over unread bytes resets the connection, and what the peer has not fetched yet would be gone."""
    await network.far.send(encode(Heartbeat("unread")))
    payload = pattern(400_000)  # more than the peer's kernel takes unread, less than both kernels hold
    async with asyncio.timeout(5):
        await network.near.send(frame(payload))
    closing = asyncio.create_task(network.near.aclose())
    await asyncio.sleep(0.01)
    assert bytes((await network.far.recv(allocate)).buffers[0]) == payload
    with pytest.raises(LinkLost):
        await network.far.recv()
    await closing


async def test_what_was_sent_before_aclose_arrives_though_this_side_still_reads(network: Pair):
    """A link that is closed mostly waits for its peer's next frame. What is sent may wait in a transport."""
    reading, payload = asyncio.create_task(network.near.recv()), pattern(250_000)
    taking = asyncio.Event()

    async def take() -> bytes:
        await taking.wait()
        return bytes((await network.far.recv(allocate)).buffers[0])

    took = asyncio.create_task(take())
    async with asyncio.timeout(5):
        await network.near.send(frame(payload))
        closing = asyncio.create_task(network.near.aclose())
        await asyncio.sleep(0)
        taking.set()
        assert await took == payload
    await closing
    with pytest.raises(LinkLost, match=CLOSED_HERE):
        await reading


@pytest.mark.parametrize("keep", [2, 8, 60])
async def test_end_in_the_middle_of_a_frame(pair: Pair, keep: int):
    data = b"".join(frame(pattern(100)))
    await pair.near.send([data[:keep]])
    closing = asyncio.create_task(pair.near.aclose())
    with pytest.raises(LinkLost) as lost:
        await pair.far.recv(allocate)
    assert lost.value.reason == CLOSED_MID_FRAME
    await closing


async def test_reset_by_peer(network: Pair):
    receiving = asyncio.create_task(network.far.recv(allocate))
    await network.near.send([b"".join(frame(pattern(1000)))[:500]])
    network.near.abort()
    with pytest.raises(LinkLost):
        await receiving
    with pytest.raises(LinkLost):
        await network.far.recv()


async def test_after_a_reset_every_send_says_that_the_link_is_lost_and_its_end_is_quiet(network: Pair):
    """Also where the loop has closed the transport beneath by then."""
    sending = asyncio.create_task(network.near.send(frame(pattern(24_000_000))))
    await asyncio.sleep(0.01)
    network.far.abort()
    with pytest.raises(LinkLost):
        await sending
    for _ in range(2):
        with pytest.raises(LinkLost):
            await network.near.send(encode(Heartbeat("x")))
    await network.near.aclose()


async def test_the_end_of_a_link_that_was_reset_unnoticed_is_quiet(network: Pair):
    sock = network.far._writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    network.far.abort()
    await asyncio.sleep(0.01)
    await network.near.aclose()
    with pytest.raises(LinkLost, match=CLOSED_HERE):
        await network.near.recv()


async def test_the_peer_hears_of_an_end_though_another_process_has_the_descriptor_too(network: Pair):
    """As a child has that the job's step has forked."""
    held = socket.dup(network.near._writer.get_extra_info("socket").fileno())
    try:
        network.near.abort()
        with pytest.raises(LinkLost):
            async with asyncio.timeout(5):
                await network.far.recv()
    finally:
        os.close(held)


@pytest.mark.parametrize("tls", [False, True])
async def test_the_end_of_a_link_in_a_tunnel_is_not_the_tunnels(tls: bool):
    class Stream(asyncio.Transport):
        """One of several over one socket, of which it tells."""

        aborted = False

        def abort(self) -> None:
            self.aborted = True

        def is_closing(self) -> bool:
            return self.aborted

        def write(self, data: bytes) -> None:
            """Nobody answers."""

    ours, theirs = socket.socketpair()
    with ours, theirs:
        tunnel, loop = Stream({"socket": ours}), asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol, transport = asyncio.StreamReaderProtocol(reader), tunnel
        if tls:
            inner = SSLProtocol(loop, protocol, ssl.create_default_context(), loop.create_future(), False, "tunnel")
            inner.connection_made(tunnel)
            transport = inner._get_app_transport()
        Link(reader, asyncio.StreamWriter(transport, protocol, reader, loop)).abort()
        assert tunnel.aborted
        ours.send(b"of another stream")


async def test_own_close_says_so(pair: Pair):
    receiving = asyncio.create_task(pair.near.recv())
    await asyncio.sleep(0)
    closing = asyncio.create_task(pair.near.aclose())
    with pytest.raises(LinkLost) as lost:
        await receiving
    assert lost.value.reason == CLOSED_HERE
    await closing
    for again in (pair.near.recv(), pair.near.send(encode(Heartbeat("x")))):
        with pytest.raises(LinkLost) as lost:
            await again
        assert lost.value.reason == CLOSED_HERE


async def test_abort_ends_pending_calls(pair: Pair):
    sending = asyncio.create_task(pair.near.send(frame(pattern(24_000_000))))
    receiving = asyncio.create_task(pair.near.recv())
    await asyncio.sleep(0.01)
    pair.near.abort()
    pair.near.abort()
    for pending in (sending, receiving):
        with pytest.raises(LinkLost) as lost:
            await pending
        assert lost.value.reason == CLOSED_HERE


async def test_abort_forgets_what_was_read_ahead(pair: Pair):
    await pair.near.send(encode(Heartbeat("1")) * 2)
    await pair.far.recv()
    pair.far.abort()
    with pytest.raises(LinkLost):
        await pair.far.recv()


@pytest.mark.parametrize("moved", [0, 5_000_000])
async def test_cancelled_receive_aborts(pair: Pair, moved: int):
    sending = asyncio.create_task(pair.near.send([frame(pattern(30_000_000))[0], pattern(moved)]))
    receiving = asyncio.create_task(pair.far.recv(allocate))
    await until(sending.done)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    with pytest.raises(LinkLost) as lost:
        await pair.far.recv()
    assert lost.value.reason == CLOSED_HERE
    with suppress(LinkLost):
        await sending


async def test_cancelled_send_aborts(pair: Pair):
    sending = asyncio.create_task(pair.near.send(frame(pattern(24_000_000))))
    await asyncio.sleep(0.01)
    assert not sending.done()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    with pytest.raises(LinkLost) as lost:
        await pair.near.send(encode(Heartbeat("x")))
    assert lost.value.reason == CLOSED_HERE
    with pytest.raises(LinkLost):
        await pair.far.recv(allocate)


async def test_a_refusal_sent_before_the_end_is_still_read(pair: Pair):
    """A peer that says why it leaves is heard, even by a side whose own send just failed."""
    await pair.far.send(encode(Heartbeat("the reason")))
    closing = asyncio.create_task(pair.far.aclose())
    with suppress(LinkLost):
        async with asyncio.timeout(0.2):
            await pair.near.send(encode(Heartbeat("x")))
    assert (await pair.near.recv()).message == Heartbeat("the reason")
    pair.near.abort()
    await closing


# -- refusals and misuse


async def test_oversized_header_is_refused(pair: Pair):
    await pair.near.send([(SESSION_CAPS.header_bytes + 1).to_bytes(4, "big")])
    with pytest.raises(FrameTooLarge):
        await pair.far.recv()
    with pytest.raises(LinkLost, match="protocol error"):
        await pair.far.recv()
    await pair.far.send(encode(Heartbeat("why")))  # a last word is still possible
    assert (await pair.near.recv()).message == Heartbeat("why")


async def test_header_that_is_no_message_is_refused(pair: Pair):
    await pair.near.send([b"\x00\x00\x00\x04abcd"])
    with pytest.raises(MalformedFrame):
        await pair.far.recv()


async def test_buffers_that_nobody_expects_are_refused(pair: Pair):
    await pair.near.send(frame(b"payload"))
    with pytest.raises(RemoteError, match="none is expected"):
        await pair.far.recv()


async def test_accept_is_asked_before_a_payload_byte_moves(pair: Pair):
    seen = []

    def refuse(message: Message, specs: tuple[BufferSpec, ...]) -> list[memoryview]:
        seen.append((message, specs[0].nbytes))
        raise RemoteError("not for you")

    await pair.near.send(frame(b"x" * (1 << 20))[:1])  # the header alone is here
    with pytest.raises(RemoteError, match="not for you"):
        await pair.far.recv(refuse)
    assert seen == [(Result(3, 0), 1 << 20)]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
async def test_what_the_other_machine_has_acknowledged_is_known_over_tcp(pair: Pair):
    before = pair.near.acked_bytes
    if before is None:
        assert pair.near.figures is None  # no TCP: memory, a Unix socket
        return
    await pair.near.send(frame(b"x" * 1000))
    await until(lambda: (pair.near.acked_bytes or 0) >= before + 1000)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
async def test_it_is_known_until_when_all_that_was_sent_is_acknowledged(pair: Pair):
    """Also where the system has taken it long before."""
    before = pair.near.sent_through
    if before is None:
        assert pair.near.acked_bytes is None  # no TCP: memory, a Unix socket
        return
    for _ in range(3):
        await pair.near.send(frame(b"x" * 10_000))
        through = pair.near.sent_through
        assert through is not None
        assert through >= before + 10_000
        await until(lambda through=through: (pair.near.acked_bytes or 0) >= through)
        before = through
    assert pair.near.sent_through == pair.near.acked_bytes


@pytest.mark.parametrize("nbytes", [40_000, 3 << 20])
async def test_what_is_diverted_is_written_where_it_began_no_more(pair: Pair, nbytes: int):
    header, payload = frame(pattern(nbytes))
    lent, elsewhere = bytearray(nbytes), bytearray(nbytes)
    asked = []

    def accept(message: Message, specs: tuple[BufferSpec, ...]) -> list[memoryview]:
        asked.append(message)
        return [memoryview(lent)]

    receiving = asyncio.create_task(pair.far.recv(accept))
    at = nbytes // 3
    await pair.near.send([header, memoryview(payload)[:at]])
    await until(lambda: bool(asked) and pair.far.bytes_received >= len(header) + at)
    async with asyncio.timeout(5):
        while not pair.far.divert(memoryview(elsewhere)):  # noqa: ASYNC110 - until a thread leaves it
            await asyncio.sleep(0)
    before = bytes(lent)
    sending = asyncio.create_task(pair.near.send([memoryview(payload)[at:], *frame(b"next")]))
    await receiving
    assert bytes(lent) == before
    assert bytes(elsewhere[-at:]) == bytes(payload[-at:])
    assert (await pair.far.recv(allocate)).buffers[0] == b"next"  # the stream goes on as it was
    await sending


@pytest.mark.parametrize("nbytes", [4_000, 1 << 20])
async def test_of_a_frame_of_several_buffers_all_that_is_to_come_is_diverted(pair: Pair, nbytes: int):
    """As an island's rank sends them: the memory of all of them is another's from then on."""
    payloads = [pattern(nbytes + number) for number in range(4)]
    header, *rest = frame(*payloads)
    data = b"".join(map(bytes, rest))
    lent = [bytearray(len(payload)) for payload in payloads]
    asked = []

    def accept(message: Message, specs: tuple[BufferSpec, ...]) -> list[memoryview]:
        asked.append(message)
        return [memoryview(view) for view in lent]

    receiving = asyncio.create_task(pair.far.recv(accept))
    at = nbytes + nbytes // 3  # in the second
    await pair.near.send([header, memoryview(data)[:at]])
    await until(lambda: bool(asked) and pair.far.bytes_received >= len(header) + at)
    async with asyncio.timeout(5):
        while not pair.far.divert(memoryview(bytearray(len(data)))):  # noqa: ASYNC110 - until a thread leaves it
            await asyncio.sleep(0)
    before = [bytes(view) for view in lent]
    sending = asyncio.create_task(pair.near.send([memoryview(data)[at:], *frame(b"next")]))
    await receiving
    assert [bytes(view) for view in lent] == before
    assert (await pair.far.recv(allocate)).buffers[0] == b"next"
    await sending


@pytest.mark.parametrize("views", [[], [b"123"], [memoryview(bytearray(4)).cast("I")]])
async def test_accept_that_returns_other_memory_is_our_bug(pair: Pair, views: list):
    await pair.near.send(frame(b"1234"))
    with pytest.raises(LocalError):
        await pair.far.recv(lambda message, specs: [memoryview(view) for view in views])


async def test_two_at_once_is_our_bug(pair: Pair):
    receiving = asyncio.create_task(pair.near.recv())
    sending = asyncio.create_task(pair.near.send(frame(pattern(24_000_000))))
    await asyncio.sleep(0.01)
    with pytest.raises(LocalError):
        await pair.near.recv()
    with pytest.raises(LocalError):
        await pair.near.send(encode(Heartbeat("x")))
    assert not receiving.done()
    assert not sending.done()
    pair.near.abort()
    await asyncio.gather(receiving, sending, return_exceptions=True)


# -- bulk, memory


async def test_abort_and_cancel_while_threads_pump(authority, monkeypatch):
    """The descriptor outlives the threads that use it, and they end at once."""
    monkeypatch.setattr(sockets, "BITE_BYTES", 1024)  # any payload at hand is worth a thread
    payload = pattern(64_000_000)
    for stop in ("abort", "cancel"):
        async with connected("tcp+bulk", authority, monkeypatch) as (near, far):
            channel = far._writer.transport
            sending = asyncio.create_task(near.send(frame(payload)))
            receiving = asyncio.create_task(far.recv(allocate))
            await until(lambda channel=channel: bool(channel._jobs))
            if stop == "abort":
                far.abort()
                assert channel._sock.fileno() != -1  # a thread uses it: another socket must not get its number
            else:
                receiving.cancel()
            with pytest.raises((LinkLost, asyncio.CancelledError)):
                await receiving
            assert not channel._jobs
            assert channel._sock.fileno() == -1
            with pytest.raises(LinkLost):
                await sending


async def test_an_idle_socket_gets_its_thread_back(authority, monkeypatch):
    async with connected("tcp+bulk", authority, monkeypatch) as (near, far):
        whole = frame(pattern(4_000_000))
        receiving = asyncio.create_task(far.recv(allocate))
        await near.send([whole[0], memoryview(whole[1])[:2_000_000]])
        await until(lambda: not far._writer.transport._jobs and far._writer.transport._reading is not None)
        await near.send([memoryview(whole[1])[2_000_000:]])
        assert bytes((await receiving).buffers[0]) == whole[1]


async def test_an_executor_that_is_shut_down_is_done_without(authority, monkeypatch):
    async with connected("tcp+bulk", authority, monkeypatch) as (near, far):
        far._writer.transport._bulk.shutdown()
        payload = pattern(5_000_000)
        _, received = await asyncio.gather(near.send(frame(payload)), far.recv(allocate))
        assert bytes(received.buffers[0]) == payload


@pytest.mark.parametrize("after_bytes", [0, 1, 30, 500])
async def test_memory_links_can_be_cut(after_bytes: int):
    near, far = memory_pair()
    near.caps = far.caps = SESSION_CAPS
    near.cut(after_bytes=after_bytes)
    with suppress(LinkLost):
        await near.send(frame(pattern(1000)))
    with pytest.raises(LinkLost) as lost:
        await far.recv(allocate)
    assert lost.value.reason == (CLOSED_MID_FRAME if after_bytes else CLOSED_BY_PEER)
    with pytest.raises(LinkLost):
        await near.send(encode(Heartbeat("x")))


async def test_memory_links_can_freeze():
    near, far = memory_pair()
    assert isinstance(far, MemoryLink)
    far.freeze()
    await near.send(encode(Heartbeat("x")))
    receiving = asyncio.create_task(far.recv())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not receiving.done()
    far.freeze(False)
    assert (await receiving).message == Heartbeat("x")


async def test_a_peer_that_vanishes_without_tls_goodbye(authority, monkeypatch):
    """The bytes just end: TLS must say so, not take it for a whole stream."""
    async with connected("tls", authority, monkeypatch) as (near, far):
        receiving = asyncio.create_task(far.recv())
        await asyncio.sleep(0)
        sock = near._writer.transport.get_extra_info("socket")
        with socket.socket(fileno=socket.dup(sock.fileno())) as raw:
            raw.shutdown(socket.SHUT_RDWR)
        with pytest.raises(LinkLost) as lost:
            await receiving
        assert lost.value.reason == CUT_OFF
