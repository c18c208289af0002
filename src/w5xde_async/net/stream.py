"""The pair under a link: an ``asyncio.StreamReader`` and an ``asyncio.StreamWriter``, without asyncio's copies.

:class:`Reader` also reads into the caller's own memory (``readinto``); a fixed read-ahead serves headers and small
frames. :class:`Writer` keeps no copy: ``drain`` returns when the bytes may be overwritten. Both stand on a
:class:`Channel`, a transport that receives where it is told to. There is one channel for each way of moving bytes:
``net.sockets`` (plain TCP), ``net.encrypted`` (TLS), ``net.transport`` (both, where a loop watches no descriptors), and
``net.stock`` over a pair of asyncio's own.

Invariants: a channel that ended raises StreamLost with the first reason, for ever; nothing is read and dropped before
the end; memory beyond the caller's own is ``READ_AHEAD_BYTES`` a reader, and as much again in ``net.transport``.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import suppress
from typing import Any, SupportsIndex

from w5xde_async.errors import LinkLost
from w5xde_async.net.tuning import acked_bytes, unacked_bytes
from w5xde_async.wire.frame import Buffer

#: ``LinkLost.reason`` where this side ended the link, and where the peer did.
CLOSED_HERE = "closed by this side"
CLOSED_BY_PEER = "closed by peer"
#: And where bytes ended that TLS protects, but nobody said so: the peer died, or somebody between cut it off.
CUT_OFF = "cut off: the peer, or whoever sits between, ended it without the goodbye of TLS"

READ_AHEAD_BYTES = 128 * 1024
#: The most that may be asked of ``fill``.
FILL_BYTES = 32 * 1024
#: Read ahead after a big payload: enough for a header.
GLANCE_BYTES = 4096
#: What is left of a buffer below this is read ahead and copied: cheaper than a system call each.
DIRECT_BYTES = 16 * 1024
#: How long a graceful close waits for the peer's own end, so that its unread last words are not reset away.
LINGER_S = 0.5
#: What one channel may move without letting the event loop run something else.
TURN_BYTES = 4 << 20
NOWHERE = memoryview(bytearray())
#: A system call counts as this many bytes towards a turn.
CALL_BYTES = 16 * 1024


class StreamLost(LinkLost, ConnectionError):
    """The connection under a pair ended: a LinkLost, and the ConnectionError that users of asyncio expect."""


def ended_by(error: OSError) -> str:
    """An operating system's error as the reason of a LinkLost."""
    if isinstance(error, ConnectionResetError):
        return "reset by peer"
    if isinstance(error, BrokenPipeError | ConnectionAbortedError):
        return CLOSED_BY_PEER
    if isinstance(error, TimeoutError):
        return "peer stopped answering"
    if isinstance(error, ssl.SSLEOFError):
        return CUT_OFF
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if error.errno and error.strerror and error.strerror.startswith("Connect call failed"):
        return os.strerror(error.errno)  # asyncio writes the address where the reason should be
    return error.strerror or str(error) or type(error).__name__


def in_pieces(chunks: Iterable[Buffer], most: int) -> Iterator[Buffer]:
    """The same bytes in pieces of ``most`` at most; neighbours that are small become one."""
    small: list[Buffer] = []
    held = 0
    for chunk in chunks:
        if held + len(chunk) <= most:
            small.append(chunk)
            held += len(chunk)
            continue
        if held:
            yield small[0] if len(small) == 1 else b"".join(small)
        small, held = [], 0
        if len(chunk) <= most:
            small, held = [chunk], len(chunk)
            continue
        view = memoryview(chunk)
        for start in range(0, len(view), most):
            yield view[start : start + most]
    if held:
        yield small[0] if len(small) == 1 else b"".join(small)


class Channel(asyncio.WriteTransport, ABC):
    """One end of a connection, beneath its reader and its writer.

    One call of ``receive`` at a time, and one of ``drain``. Whoever is cancelled in either must ``abort``: what was
    moved meanwhile is not known.
    """

    def __init__(self, peer: str, extra: dict[str, Any] | None = None) -> None:
        """``peer``: the other end, for people. ``extra``: what ``get_extra_info`` says, by asyncio's names."""
        super().__init__(extra)
        self.peer = peer
        self.bytes_sent = self.bytes_received = 0
        self.lost: str | None = None  # why the connection ended; None while it stands
        self._turn = 0  # moved since the loop last had its turn
        self._target = NOWHERE  # the caller's memory, while it is being received into
        self._closing: asyncio.Task[None] | None = None

    def pair(self) -> tuple[Reader, Writer]:
        """The reader and the writer. Call it once."""
        reader = Reader(self)
        return reader, Writer(self, reader)

    @abstractmethod
    async def receive(self, view: memoryview, least: int) -> int:
        """Store between ``least`` and ``len(view)`` bytes; how many. Raises StreamLost."""

    def divert(self, view: memoryview) -> bool:
        """Store what the receive under way still gets in ``view``, which is as long as the memory that it was given:
        nothing is written there any more. False where a thread is writing there."""
        self._target = view
        return True

    @abstractmethod
    def writelines(self, chunks: Iterable[Buffer]) -> None:
        """Hand over what goes without waiting. The rest is kept by reference; ``drain`` sees it off."""

    @abstractmethod
    async def drain(self) -> None:
        """Returns when every byte has been handed over and the chunks may be overwritten. Raises StreamLost."""

    @property
    def drained(self) -> bool:
        """Whether every byte has been handed over, so that ``drain`` has nothing to wait for. False where that is not
        known, and where the connection has ended."""
        return False

    @property
    def acked_bytes(self) -> int | None:
        """Bytes that the other machine has acknowledged, and perhaps others; None where nobody says."""
        sock = self.get_extra_info("socket")
        return None if sock is None else acked_bytes(sock, self.bytes_sent)

    @property
    def unacked_bytes(self) -> int | None:
        """Bytes that were handed over and are not acknowledged; None where nobody says."""
        sock = self.get_extra_info("socket")
        return None if sock is None else unacked_bytes(sock)

    @abstractmethod
    async def aclose(self) -> None:
        """Graceful end; idempotent."""

    @abstractmethod
    def abort(self, reason: str = CLOSED_HERE) -> None:
        """Immediate end; pending calls raise StreamLost with ``reason``; idempotent."""

    # -- what ``asyncio.StreamWriter`` asks of a transport besides

    def write(self, data: Buffer) -> None:
        self.writelines((data,))

    def can_write_eof(self) -> bool:
        return False  # a connection ends both ways at once

    def is_closing(self) -> bool:
        return self.lost is not None or self._closing is not None

    def close(self) -> None:
        """Begin a graceful end; ``wait_closed`` waits for it."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.aclose(), name=f"close {self.peer}")

    async def wait_closed(self) -> None:
        if self._closing is not None:
            await asyncio.shield(self._closing)

    def _shut_down(self) -> None:
        """Have the peer hear of the end though a process that was forked from this one has the descriptor too."""
        if (sock := self.get_extra_info("socket")) is not None:
            with suppress(OSError), socket.socket(fileno=socket.dup(sock.fileno())) as own:  # uvloop's has no shutdown
                own.shutdown(socket.SHUT_RDWR)

    async def _yield_turn(self) -> None:
        self._turn = 0
        await asyncio.sleep(0)

    def _check(self) -> None:
        if self.lost is not None:
            raise StreamLost(self.peer, self.lost)


class Reader(asyncio.StreamReader):
    """An ``asyncio.StreamReader`` that also reads into the caller's memory.

    ``ahead[start:end]`` is what was read and not yet taken. A link takes small headers straight from ``ahead`` and
    moves ``start``; that saves a call per field. An end between bytes that were asked for is asyncio's: ``b""`` from
    ``read``, IncompleteReadError from ``readexactly`` and ``readuntil``. ``fill`` and ``readinto`` raise StreamLost
    there; so does everything at any other end.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self.ahead = memoryview(bytearray(READ_AHEAD_BYTES))
        self.start = self.end = 0
        self._glance = False  # the last payload was big: so may be the next, and what is read ahead of it is copied
        self._into, self._done = NOWHERE, 0  # the caller's memory, and how much of it is filled
        self._direct = False  # by the channel itself

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._channel.peer}>"

    @property
    def bytes_received(self) -> int:
        """Bytes taken in so far, read-ahead included."""
        return self._channel.bytes_received

    async def fill(self, num_bytes: int) -> None:
        """Have at least ``num_bytes`` (at most FILL_BYTES) read ahead, and as many more as are there."""
        while self.end - self.start < num_bytes:
            self._compact(num_bytes)
            stop = self.end + max(num_bytes, GLANCE_BYTES) if self._glance else READ_AHEAD_BYTES
            self._glance = False
            self.end += await self._channel.receive(self.ahead[self.end : stop], 1)

    async def readinto(self, view: memoryview) -> None:
        """Fill ``view`` (flat, format B)."""
        size = len(view)
        self._into, self._done = view, 0
        self._glance = size >= 16 * GLANCE_BYTES
        try:
            while (done := self._done) < size:
                held = self.end - self.start
                if held:
                    part = min(held, size - done)
                    self._into[done : done + part] = self.ahead[self.start : self.start + part]
                    self.start += part
                    self._done += part
                elif size - done >= DIRECT_BYTES:
                    self._direct = True
                    self._done += await self._channel.receive(self._into[done:] if done else self._into, size - done)
                    self._direct = False
                else:
                    await self.fill(size - done)
        finally:
            self._into, self._direct = NOWHERE, False

    def divert(self, view: memoryview) -> bool:
        """Have ``readinto`` fill ``view`` from here on, which is as long: nothing is written into the memory that it
        was given any more. False where a thread is writing there."""
        if self._direct and not self._channel.divert(view[self._done :]):
            return False
        self._into = view
        return True

    def forget(self) -> None:
        """Drop what was read ahead."""
        self.start = self.end = 0

    # -- asyncio's own names

    async def read(self, n: int = -1) -> bytes:
        if n < 0:
            parts = []
            while part := await self.read(READ_AHEAD_BYTES):
                parts.append(part)
            return b"".join(parts)
        if n == 0 or not await self._hold(1):
            return b""
        return self._take(min(n, self.end - self.start))

    async def readexactly(self, n: int) -> bytes:
        if n < 0:
            raise ValueError("readexactly size can not be less than zero")
        data = bytearray()
        while len(data) < n:
            part = await self.read(n - len(data))
            if not part:
                raise asyncio.IncompleteReadError(bytes(data), n)
            data += part
        return bytes(data)

    async def readuntil(self, separator: Any = b"\n") -> bytes:
        """As asyncio's, with a limit of FILL_BYTES; what is over it stays unread.

        Raises ``asyncio.LimitOverrunError`` then, and ValueError for an empty separator.
        """
        if not separator:
            raise ValueError("Separator should be at least one-byte string")
        while True:
            held = bytes(self.ahead[self.start : self.end])
            found = held.find(separator)
            if found > FILL_BYTES or (found < 0 and len(held) >= FILL_BYTES):
                raise asyncio.LimitOverrunError(f"no separator within {FILL_BYTES} bytes", len(held))
            if found >= 0:
                return self._take(found + len(separator))
            if not await self._hold(len(held) + 1):
                self.forget()
                raise asyncio.IncompleteReadError(held, None)

    def at_eof(self) -> bool:
        return super().at_eof() and self.start == self.end

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        raise RuntimeError("nothing can be fed to this reader: it has a connection of its own")

    async def _hold(self, num_bytes: int) -> bool:
        """False where the peer ended before so many bytes."""
        try:
            await self.fill(num_bytes)
        except StreamLost as lost:
            if lost.reason != CLOSED_BY_PEER:
                self.set_exception(lost)
                raise
            self.feed_eof()
            return False
        return True

    def _take(self, num_bytes: int) -> bytes:
        data = bytes(self.ahead[self.start : self.start + num_bytes])
        self.start += num_bytes
        return data

    def _compact(self, num_bytes: int) -> None:
        """Move what is held to the front where ``num_bytes`` would not fit behind it, or hardly more would."""
        held = self.end - self.start
        if self.start and (not held or self.end > READ_AHEAD_BYTES // 2 or self.start + num_bytes > READ_AHEAD_BYTES):
            self.ahead[:held] = self.ahead[self.start : self.end]
            self.start, self.end = 0, held


class Writer(asyncio.StreamWriter):
    """An ``asyncio.StreamWriter`` whose ``drain`` means that the bytes may be overwritten.

    ``write`` and ``writelines`` copy nothing: until ``drain`` has returned, the caller leaves its buffers as they are.
    ``start_tls`` is not offered; a connection is encrypted from its beginning or never.
    """

    def __init__(self, channel: Channel, reader: Reader) -> None:
        super().__init__(channel, asyncio.BaseProtocol(), reader, asyncio.get_running_loop())
        self.channel, self._beside = channel, reader

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.channel.peer}>"

    def __del__(self) -> None:
        """Nothing: a socket or transport that was left open warns by itself."""

    @property
    def peer(self) -> str:
        """The other end, for people."""
        return self.channel.peer

    @property
    def bytes_sent(self) -> int:
        """Bytes handed over so far."""
        return self.channel.bytes_sent

    @property
    def drained(self) -> bool:
        """Whether ``drain`` has nothing to wait for; False where that is not known."""
        return self.channel.drained

    def drain(self) -> Coroutine[Any, Any, None]:
        """Returns when every byte has been handed over and may be overwritten. Raises StreamLost."""
        return self.channel.drain()

    async def wait_closed(self) -> None:
        await self.channel.wait_closed()

    async def aclose(self) -> None:
        """``close`` and ``wait_closed`` in one; cancelled, the connection is cut off at once."""
        await self.channel.aclose()

    def abort(self, reason: str = CLOSED_HERE) -> None:
        """End at once; pending calls raise StreamLost with ``reason``, and what was read ahead is dropped."""
        self._beside.forget()
        self.channel.abort(reason)

    async def start_tls(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError("this connection cannot become TLS; connect with it from the beginning")
