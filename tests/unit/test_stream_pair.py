"""The pair under a link is asyncio's own: what asyncio says of its methods holds, and ``drain`` means a little more."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial

import pytest
import trustme

from w5xde_async.errors import LinkLost
from w5xde_async.net.encrypted import PIECE_BYTES, RECORD_BYTES, EncryptedChannel, shake_hands
from w5xde_async.net.sockets import SocketChannel
from w5xde_async.net.stream import (
    CLOSED_BY_PEER,
    CLOSED_HERE,
    CUT_OFF,
    FILL_BYTES,
    LINGER_S,
    Reader,
    StreamLost,
    Writer,
    in_pieces,
)
from w5xde_async.net.transport import TransportChannel

pytestmark = pytest.mark.both_loops

Streams = tuple[Reader, Writer]


@cache
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's and the client's."""
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server)
    authority.configure_trust(client)
    return server, client


async def encrypted_pair() -> tuple[EncryptedChannel, EncryptedChannel]:
    server, client = contexts()
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    socks = await asyncio.gather(shake_hands(near, client, "localhost"), shake_hands(far, server, None))
    return EncryptedChannel(socks[0], "peer"), EncryptedChannel(socks[1], "peer")


@asynccontextmanager
async def connected(kind: str) -> AsyncIterator[tuple[Streams, Streams]]:
    ends: list[Streams] = []
    if kind == "encrypted":
        ends = [channel.pair() for channel in await encrypted_pair()]
    for sock in () if ends else socket.socketpair():
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


@pytest.fixture(params=["socket", "encrypted", "transport"])
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


# -- TLS


@pytest.fixture
async def encrypted() -> AsyncIterator[tuple[EncryptedChannel, EncryptedChannel]]:
    near, far = await encrypted_pair()
    yield near, far
    near.abort()
    far.abort()


async def test_what_openssl_holds_is_not_waited_for(encrypted: tuple[EncryptedChannel, EncryptedChannel]):
    """A record lies decrypted in OpenSSL, and the descriptor has nothing more to tell."""
    near, far = encrypted
    data = bytes(range(256)) * 64
    assert len(data) == RECORD_BYTES
    near.write(data)
    await near.drain()
    got = b""
    for size in (1, 4000, 100, RECORD_BYTES - 4101):
        view = memoryview(bytearray(size))
        assert await far.receive(view, size) == size
        got += view
    assert got == data


async def test_only_tlss_own_goodbye_is_a_clean_end(encrypted: tuple[EncryptedChannel, EncryptedChannel]):
    near, far = encrypted
    reader, _ = far.pair()
    near.write(b"all")
    await near.aclose()
    assert await reader.read() == b"all"
    near, far = await encrypted_pair()
    reader, _ = far.pair()
    near.write(b"some of it")
    near.abort()
    with pytest.raises(StreamLost, match=CUT_OFF):
        await reader.read()
    far.abort()


async def test_the_goodbye_is_said_though_this_side_still_reads(encrypted: tuple[EncryptedChannel, EncryptedChannel]):
    """A link that is closed mostly waits for its peer's next frame."""
    near, far = encrypted
    reading = asyncio.create_task(near.receive(memoryview(bytearray(1)), 1))
    await asyncio.sleep(0)
    await near.aclose()
    with pytest.raises(StreamLost, match=CLOSED_HERE):
        await reading
    with pytest.raises(StreamLost, match=CLOSED_BY_PEER):
        await far.receive(memoryview(bytearray(1)), 1)


async def test_the_goodbye_waits_for_a_full_kernel(encrypted: tuple[EncryptedChannel, EncryptedChannel]):
    near, far = encrypted
    said = []

    def unwrap() -> None:
        said.append("tried")
        if len(said) < 3:
            raise ssl.SSLWantWriteError

    near._tls.unwrap = unwrap
    await near.aclose()
    assert len(said) == 3
    with pytest.raises(StreamLost):
        await far.receive(memoryview(bytearray(1)), 1)


async def test_a_goodbye_that_waits_for_a_full_kernel_ends_with_the_link(
    encrypted: tuple[EncryptedChannel, EncryptedChannel], monkeypatch: pytest.MonkeyPatch
):
    near, _ = encrypted
    tried = asyncio.Event()

    def unwrap() -> None:
        tried.set()
        raise ssl.SSLWantWriteError

    near._tls.unwrap = unwrap
    monkeypatch.setattr(near._loop, "add_writer", lambda *args: None)  # the kernel is full
    closing = asyncio.create_task(near.aclose())
    await tried.wait()
    near.abort()
    done, _ = await asyncio.wait([closing], timeout=LINGER_S / 2)
    assert done
    await closing


async def test_openssl_may_have_to_send_before_it_reads_on(encrypted: tuple[EncryptedChannel, EncryptedChannel]):
    """Its answer to a new key, while the kernel is full: no turn of the loop is spent on what can be read meanwhile."""
    near, far = encrypted
    read, full, tries = far._read, True, 0

    def stuck(num_bytes: int, view: memoryview) -> int:
        nonlocal tries
        tries += 1
        if full:
            raise ssl.SSLWantWriteError
        return read(num_bytes, view)

    view = memoryview(bytearray(5))
    receiving = asyncio.create_task(far.receive(view, 5))
    await asyncio.sleep(0)
    far._read = stuck
    watched = far._loop.add_writer
    far._loop.add_writer = lambda *args: None  # the kernel is full
    near.write(b"hello")
    await near.drain()
    for _ in range(20):
        await asyncio.sleep(0)
    assert tries == 1
    full = False
    del far._loop.add_writer
    watched(far._fd, far._on_writable)
    assert await receiving == 5
    assert bytes(view) == b"hello"


async def test_a_record_that_was_altered_ends_the_connection_and_says_so(
    encrypted: tuple[EncryptedChannel, EncryptedChannel],
):
    near, far = encrypted
    with socket.socket(fileno=socket.dup(near._fd)) as raw:
        raw.send(b"\x17\x03\x03\x00\x20" + bytes(32))  # a record by its header, and no key made it
    for _ in range(2):
        with pytest.raises(StreamLost, match="TLS: DECRYPTION_FAILED_OR_BAD_RECORD_MAC"):
            await far.receive(memoryview(bytearray(1)), 1)


@pytest.mark.parametrize("turns", range(8))
async def test_a_handshake_that_is_cancelled_at_any_turn_leaves_nothing(turns: int):
    server, client = contexts()
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    shaking = [asyncio.create_task(shake_hands(near, client, "localhost")),
               asyncio.create_task(shake_hands(far, server, None))]  # fmt: skip
    for _ in range(turns):
        await asyncio.sleep(0)
    shaking[0].cancel()
    await asyncio.sleep(0)
    near.close()  # a task that was cancelled before it began has taken neither
    for done in await asyncio.gather(*shaking, return_exceptions=True):
        if isinstance(done, ssl.SSLSocket):
            done.close()


async def test_a_handshake_that_the_peer_leaves_was_closed_by_the_peer():
    server, _ = contexts()
    near, far = socket.socketpair()
    far.setblocking(False)
    near.close()
    with pytest.raises(ConnectionError):
        await shake_hands(far, server, None)


async def test_a_connection_that_is_reset_before_the_handshake_was_reset_whatever_came_of_it():
    """With bytes left to read, Python has an SSLError of its own for it: no word of the other side about TLS."""
    _, client = contexts()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    near.setblocking(False)
    far.sendall(b"x")
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    with pytest.raises(ConnectionResetError):
        await shake_hands(near, client, "localhost")


def test_pieces_are_never_empty():
    """OpenSSL has no record of nothing."""
    for chunks in ([b"", b"12345"], [b"", b""], [b"1", b"", b"23456", b""], [b"12345678", b"", b"9"]):
        pieces = [bytes(piece) for piece in in_pieces(chunks, 4)]
        assert b"".join(pieces) == b"".join(chunks)
        assert all(1 <= len(piece) <= 4 for piece in pieces)


async def test_what_is_written_while_a_piece_waits_goes_behind_it(encrypted: tuple[EncryptedChannel, EncryptedChannel]):
    """A piece that the kernel took half of is given to OpenSSL again as it was."""
    near, far = encrypted
    first, second = bytes(range(256)) * (PIECE_BYTES // 64), bytes(range(255, -1, -1)) * 300
    near.write(first)
    near.write(second)
    assert not near.drained
    view = memoryview(bytearray(len(first) + len(second)))
    await asyncio.gather(near.drain(), far.receive(view, len(view)))
    assert bytes(view) == first + second
