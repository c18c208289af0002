"""The pair under a link is asyncio's own: what asyncio says of its methods holds, and ``drain`` means a little more."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from w5xde_async.errors import LinkLost
from w5xde_async.net.sockets import SocketChannel
from w5xde_async.net.stream import CLOSED_BY_PEER, CLOSED_HERE, FILL_BYTES, Reader, Writer
from w5xde_async.net.transport import TransportChannel

pytestmark = pytest.mark.both_loops

Streams = tuple[Reader, Writer]


@asynccontextmanager
async def connected(kind: str) -> AsyncIterator[tuple[Streams, Streams]]:
    ends: list[Streams] = []
    for sock in socket.socketpair():
        sock.setblocking(False)
        if kind == "socket":
            ends.append(SocketChannel(sock, "peer").pair())
            continue
        channel = TransportChannel("peer")
        await asyncio.get_running_loop().connect_accepted_socket(lambda channel=channel: channel, sock)
        ends.append(channel.pair())
    yield ends[0], ends[1]
    for _, writer in ends:
        writer.abort()
    await asyncio.sleep(0.01)


@pytest.fixture(params=["socket", "transport"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Streams, Streams]]:
    async with connected(request.param) as made:
        yield made


async def test_it_is_asyncios_pair(pair: tuple[Streams, Streams]):
    reader, writer = pair[0]
    assert isinstance(reader, asyncio.StreamReader)
    assert isinstance(writer, asyncio.StreamWriter)
    assert isinstance(writer.transport, asyncio.WriteTransport)
    assert writer.get_extra_info("socket").fileno() > 0
    assert writer.get_extra_info("no such thing", "default") == "default"
    assert writer.get_extra_info("peername") == writer.get_extra_info("socket").getpeername()
    assert not writer.is_closing()


async def test_asyncios_ways_of_reading(pair: tuple[Streams, Streams]):
    (reader, _), (_, writer) = pair
    writer.write(b"one\ntwo\n")
    writer.writelines([b"thr", b"ee\nfour;", b"five", b"six"])
    await writer.drain()
    assert await reader.readline() == b"one\n"
    assert [await anext(reader), await reader.readuntil()] == [b"two\n", b"three\n"]
    assert await reader.readuntil(b";") == b"four;"
    assert await reader.read(2) == b"fi"
    assert await reader.readexactly(2) == b"ve"
    view = memoryview(bytearray(2))
    await reader.readinto(view)
    assert bytes(view) == b"si"
    assert await reader.read(0) == b""
    assert not reader.at_eof()
    await writer.aclose()
    assert await reader.read() == b"x"
    assert reader.at_eof()
    assert await reader.read(5) == await reader.readline() == b""


async def test_an_end_is_asyncios(pair: tuple[Streams, Streams]):
    (reader, _), (_, writer) = pair
    writer.write(b"half a line")
    writer.close()
    assert writer.is_closing()
    with pytest.raises(asyncio.IncompleteReadError) as cut:
        await reader.readexactly(50)
    assert cut.value.partial == b"half a line"
    with pytest.raises(asyncio.IncompleteReadError):
        await reader.readuntil()
    with pytest.raises(LinkLost, match=CLOSED_BY_PEER):
        await reader.readinto(memoryview(bytearray(1)))
    await writer.wait_closed()
    with pytest.raises(ConnectionError, match=CLOSED_HERE):
        await writer.drain()


async def test_an_abort_is_a_connection_error(pair: tuple[Streams, Streams]):
    (reader, writer), _ = pair
    reading = asyncio.create_task(reader.read(1))
    await asyncio.sleep(0)
    writer.abort("no more of this")
    with pytest.raises(ConnectionError, match="no more of this"):
        await reading
    assert isinstance(reader.exception(), LinkLost)
    with pytest.raises(LinkLost, match="no more of this"):
        await writer.drain()
    with pytest.raises(ConnectionError):
        await reader.readline()


async def test_a_line_has_a_limit(pair: tuple[Streams, Streams]):
    (reader, _), (_, writer) = pair
    writer.write(bytes(2 * FILL_BYTES))
    writer.write(b";")
    await writer.drain()
    with pytest.raises(asyncio.LimitOverrunError):
        await reader.readuntil(b";")
    assert len(await reader.readexactly(2 * FILL_BYTES)) == 2 * FILL_BYTES  # nothing of it is lost
    assert await reader.readuntil(b";") == b";"


async def test_misuse_is_said(pair: tuple[Streams, Streams]):
    (reader, writer), _ = pair
    wrong: list[Callable[[], object]] = [partial(reader.readexactly, -1), partial(reader.readuntil, b"")]
    for call in wrong:
        with pytest.raises(ValueError):  # noqa: PT011 - asyncio's own words
            await call()
    with pytest.raises(RuntimeError):
        reader.feed_data(b"x")
    with pytest.raises(NotImplementedError):
        await writer.start_tls()


@pytest.mark.parametrize("ends_with", ["nothing", "close"])
async def test_what_is_not_drained_leaves_all_the_same(pair: tuple[Streams, Streams], ends_with: str):
    (reader, _), (_, writer) = pair
    data = bytes(range(256)) * 20_000
    for start in range(0, len(data), 1_000_000):
        writer.write(data[start : start + 1_000_000])
    if ends_with == "close":
        writer.close()
    assert await reader.readexactly(len(data)) == data
    await writer.drain() if ends_with == "nothing" else await writer.wait_closed()


async def test_drained_bytes_may_be_overwritten(pair: tuple[Streams, Streams]):
    (reader, _), (_, writer) = pair
    data = bytearray(bytes(range(256)) * 20_000)
    expected = bytes(data)
    reading = asyncio.create_task(reader.readexactly(len(data)))
    writer.write(data)
    await writer.drain()
    data[:] = bytes(len(data))
    assert await reading == expected


@pytest.mark.parametrize("turns", range(1, 5))
async def test_cancelled_at_any_turn_nothing_is_left(turns: int):
    """Whoever connects and is cancelled, in whichever turn of the loop, leaves no open socket (it would warn)."""
    near, far = socket.socketpair()
    near.setblocking(False)

    async def attach() -> None:
        channel = TransportChannel("peer")
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: channel, near)
        except BaseException:
            near.close()
            raise
        channel.abort()

    attaching = asyncio.create_task(attach())
    for _ in range(turns):
        await asyncio.sleep(0)
    attaching.cancel()
    await asyncio.gather(attaching, return_exceptions=True)
    await asyncio.sleep(0.01)
    with far:
        assert far.recv(1) == b""


class PushingTransport(asyncio.Transport):
    """Takes everything at once, and is told what the network brings."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def abort(self) -> None: ...


async def test_what_is_pushed_before_the_reader_has_its_turn_is_read_next():
    channel = TransportChannel("peer")
    channel.connection_made(PushingTransport())

    def push(data: bytes) -> None:
        channel.get_buffer(-1)[: len(data)] = data
        channel.buffer_updated(len(data))

    for least, size in ((1, 100_000), (5, 5)):
        view = memoryview(bytearray(size))
        receiving = asyncio.create_task(channel.receive(view, least))
        await asyncio.sleep(0)
        push(b"first")
        push(b"second")
        got = await receiving
        rest = memoryview(bytearray(11 - got))
        assert await channel.receive(rest, len(rest)) == len(rest)
        assert bytes(view[:got]) + bytes(rest) == b"firstsecond"
    channel.abort()
