"""The stream over an asyncio transport: TLS on every loop, and plain TCP where a loop watches no descriptors.

The stream is itself the transport's ``BufferedProtocol`` and lends it the caller's own memory for payloads. It does
not inherit asyncio's flow control mixin: uvloop would then ignore ``get_buffer``.

``write`` hands over small pieces and waits until the transport's own buffer is empty before the next. On plain TCP
that means the kernel has the bytes. Under TLS it means that they are encrypted, thus copied, and that no more than a
piece of ciphertext waits outside the kernel; in both cases the caller may overwrite its buffers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import cast

from w5xde_async.errors import LinkLost
from w5xde_async.net.stream import (
    CALL_BYTES,
    CLOSED_BY_PEER,
    CLOSED_HERE,
    LINGER_S,
    READ_AHEAD_BYTES,
    TURN_BYTES,
    Stream,
    ended_by,
)
from w5xde_async.net.tuning import Figures, figures
from w5xde_async.wire.frame import Buffer

__all__ = ["TransportStream"]

PIECE_BYTES = 256 * 1024
#: A transport may push this much after it was told to pause (the proactor's read size).
PUSH_BYTES = 64 * 1024


class TransportStream(Stream, asyncio.BufferedProtocol):
    """Give it to ``create_connection`` or ``connect_accepted_socket`` as the protocol."""

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._gone = self._loop.create_future()
        self._tls = self._paused = False
        self._reading: asyncio.Future[None] | None = None
        self._target: memoryview | None = None  # what is left of the caller's memory, lent to the transport
        self._needed = 0
        self._writing: asyncio.Future[None] | None = None

    # -- what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit it
        tls = transport.get_extra_info("ssl_object")
        self._tls = tls is not None
        if tls is not None:
            self.certificate = tls.getpeercert(binary_form=True) or b""
        # asyncio's TLS compares with >=, its plain transports with >: both mean "anything unsent".
        self._transport.set_write_buffer_limits(high=0 if tls is None else 1, low=0)

    def figures(self) -> Figures | None:
        sock = None if self.lost is not None else self._transport.get_extra_info("socket")
        return None if sock is None else figures(sock)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target is not None:
            return self._target
        if self.lost is not None:
            return memoryview(bytearray(PUSH_BYTES))  # what still comes is dropped; what is read ahead stays
        if self.start == self.end:
            self.start = self.end = 0
        return self.ahead[self.end :]

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_received += nbytes
        if self.lost is not None:
            return
        if self._target is not None:
            if nbytes < len(self._target):
                self._target = self._target[nbytes:]
                return
            self._target = None
        else:
            self.end += nbytes
            if READ_AHEAD_BYTES - self.end < PUSH_BYTES:
                self._transport.pause_reading()
                self._paused = True
            if self.end - self.start < self._needed:
                return
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    def eof_received(self) -> bool:
        self._end(CLOSED_BY_PEER)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(ended_by(exc) if isinstance(exc, OSError) else CLOSED_BY_PEER)
        if not self._gone.done():
            self._gone.set_result(None)

    def pause_writing(self) -> None:
        pass  # ``write`` asks the transport itself

    def resume_writing(self) -> None:
        if self._writing is not None and not self._writing.done():
            self._writing.set_result(None)

    # -- what the link calls

    async def receive(self, view: memoryview, least: int) -> int:
        assert least == len(view)
        self._check()
        self.start = self.end = 0  # all taken, or we would not be here
        self._target = view
        try:
            await self._wait_read()
        finally:
            self._target = None
        return least

    async def fill(self, num_bytes: int) -> None:
        while self.end - self.start < num_bytes:
            self._check()
            self._compact(num_bytes)
            self._needed = num_bytes
            await self._wait_read()

    async def _wait_read(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        self._reading = self._loop.create_future()
        try:
            await self._reading
        finally:
            self._reading = None

    async def write(self, chunks: Sequence[Buffer]) -> None:
        self._check()
        for piece in _pieces(chunks):
            self._transport.write(piece)
            while self.lost is None and self._transport.get_write_buffer_size():
                self._writing = self._loop.create_future()
                try:
                    await self._writing
                finally:
                    self._writing = None
            self._check()
            self.bytes_sent += len(piece)
            self._turn += len(piece) + CALL_BYTES
            if self._turn >= TURN_BYTES:
                await self._yield_turn()

    async def aclose(self) -> None:
        if self._gone.done():
            return
        if self.lost is not None:
            self._transport.abort()
        self._end(CLOSED_HERE)
        try:
            async with asyncio.timeout(LINGER_S):
                if self._paused:
                    self._paused = False
                    self._transport.resume_reading()
                if not self._tls:
                    self._transport.write_eof()  # the peer's end, in answer, closes the transport
                else:
                    self._transport.close()
                await asyncio.shield(self._gone)
        except OSError:
            pass  # too slow, or the peer was faster
        finally:
            self._transport.abort()

    def abort(self, reason: str = CLOSED_HERE) -> None:
        self._end(reason)
        self.start = self.end = 0
        self._transport.abort()

    def _end(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        self._target = None
        for waiting in (self._reading, self._writing):
            if waiting is not None and not waiting.done():
                waiting.set_exception(LinkLost(self.peer, reason))


def _pieces(chunks: Sequence[Buffer]) -> Iterator[Buffer]:
    """The same bytes in pieces of PIECE_BYTES at most; neighbours that are small become one."""
    small: list[Buffer] = []
    held = 0
    for chunk in chunks:
        if held + len(chunk) <= PIECE_BYTES:
            small.append(chunk)
            held += len(chunk)
            continue
        if small:
            yield small[0] if len(small) == 1 else b"".join(small)
            small, held = [], 0
        if len(chunk) <= PIECE_BYTES:
            small, held = [chunk], len(chunk)
            continue
        view = memoryview(chunk)
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]
    if held:
        yield small[0] if len(small) == 1 else b"".join(small)
