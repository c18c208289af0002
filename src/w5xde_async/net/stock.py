"""The channel over a pair of asyncio's own: a Unix socket, a tunnel, a proxy, whatever an application is connected by.

It copies: incoming bytes lie in asyncio's reader first, and asyncio's writer is given copies of outgoing ones, since
its ``drain`` does not say that they have left. Both are bounded: a reader with asyncio's limit of 64 KiB holds twice
that and one read of 256 KiB, and a writer holds a piece more than the transport's high-water mark of 64 KiB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from w5xde_async.net.stream import (
    CALL_BYTES,
    CLOSED_BY_PEER,
    CLOSED_HERE,
    LINGER_S,
    NOWHERE,
    TURN_BYTES,
    Channel,
    Reader,
    StreamLost,
    Writer,
    ended_by,
    in_pieces,
)
from w5xde_async.wire.frame import Buffer

PIECE_BYTES = 64 * 1024
#: Whose transports have a socket of their own. Of a tunnel's, it may be that of other connections too.
_OWN_SOCKET = ("asyncio", "uvloop")
BUFFERED_BYTES = 512 * 1024  #: that a pair holds at most, in and out (above)


def our_pair(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Reader, Writer]:
    """The pair itself where it is ours, else one of ours over it."""
    if isinstance(reader, Reader) and isinstance(writer, Writer):
        return reader, writer
    return StockChannel(reader, writer).pair()


def peer_of(writer: asyncio.StreamWriter) -> str:
    """The other end's address, for people: ``host:port``, or the path of a Unix socket."""
    for name in ("peername", "sockname"):  # whoever connects to a Unix socket has no name, but the socket has
        address = writer.get_extra_info(name)
        if isinstance(address, tuple) and len(address) >= 2:
            host, port = address[:2]
            return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
        if isinstance(address, str) and address:
            return f"unix:{address}"
    return "a connection without an address"


def _has_own_socket(transport: Any) -> bool:
    while (tls := getattr(transport, "_ssl_protocol", None)) is not None:  # asyncio's: it tells of the socket below it
        transport = tls._transport
    return type(transport).__module__.partition(".")[0] in _OWN_SOCKET


class StockChannel(Channel):
    """Over a connected pair, which it owns from now on."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(peer_of(writer))
        self._reader, self._writer = reader, writer
        self._chunks: list[Buffer] = []
        self._receiving = self._draining = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._writer.get_extra_info(name, default)

    async def receive(self, view: memoryview, least: int) -> int:
        got, self._target, self._receiving = 0, view, True
        try:
            with self._moving():
                while got < least:
                    self._check()
                    data = await self._reader.read(len(view) - got)
                    self._check()
                    if not data:
                        raise StreamLost(self.peer, CLOSED_BY_PEER)
                    self._target[got : got + len(data)] = data
                    got += len(data)
                    self.bytes_received += len(data)
                    await self._moved(len(data))
        finally:
            self._target, self._receiving = NOWHERE, False  # let go of the caller's memory
        return got

    def writelines(self, chunks: Iterable[Buffer]) -> None:
        self._chunks.extend(chunks)

    async def drain(self) -> None:
        chunks, self._chunks, self._draining = self._chunks, [], True
        try:
            with self._moving():
                for piece in in_pieces(chunks, PIECE_BYTES):
                    stands = not self._writer.is_closing()  # else uvloop's raises RuntimeError, asyncio's drops it
                    if stands:
                        self._writer.write(bytes(piece))  # memory of its own
                    await self._writer.drain()  # which mostly knows what has ended it
                    self._check()
                    if not stands:
                        raise StreamLost(self.peer, CLOSED_BY_PEER)
                    self.bytes_sent += len(piece)
                    await self._moved(len(piece))
        finally:
            self._draining = False

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """A receive or a drain. Whatever ends the connection in it is raised as a StreamLost."""
        try:
            self._check()
            yield
        except StreamLost:
            raise
        except OSError as error:
            self._check()
            raise StreamLost(self.peer, ended_by(error)) from None

    async def _moved(self, num_bytes: int) -> None:
        self._turn += num_bytes + CALL_BYTES
        if self._turn >= TURN_BYTES:
            await self._yield_turn()

    async def aclose(self) -> None:
        if self.lost is not None:
            return
        try:
            async with asyncio.timeout(LINGER_S):
                sending = self._draining
                if not sending:
                    await self.drain()
                self.lost = CLOSED_HERE
                if not sending:
                    await self._say_goodbye()
        except OSError:
            pass  # too slow, or the peer was faster
        finally:
            self.abort()

    async def _say_goodbye(self) -> None:
        """Until the peer's end: closing over unread bytes would reset what it has not read yet."""
        if self._writer.can_write_eof() and not (self._receiving or self._writer.is_closing()):
            self._writer.write_eof()
            while await self._reader.read(PIECE_BYTES):
                pass
        self._writer.close()
        await self._writer.wait_closed()

    def abort(self, reason: str = CLOSED_HERE) -> None:
        self.lost = self.lost or reason
        self._chunks.clear()
        with suppress(AttributeError):  # of asyncio's, where it has closed itself with the last of what it had to send
            transport = self._writer.transport
            if _has_own_socket(transport) and not transport.is_closing():
                self._shut_down()
            transport.abort()
