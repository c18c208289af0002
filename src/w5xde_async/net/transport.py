"""The channel over an asyncio transport, where a loop watches no descriptors (Windows' default): plain TCP and TLS.

The channel is itself the transport's ``BufferedProtocol`` and lends it the caller's own memory for payloads. It does
not inherit asyncio's flow control mixin: uvloop would then ignore ``get_buffer``.

Small pieces are handed over, each when the transport's own buffer is empty. On plain TCP that means that the kernel has
the one before. Under TLS it means that it is encrypted, thus copied, and that no more than a piece of ciphertext waits
outside the kernel; in both cases the caller may overwrite its buffers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, cast

from w5xde_async.net.stream import (
    CALL_BYTES,
    CLOSED_BY_PEER,
    CLOSED_HERE,
    LINGER_S,
    NOWHERE,
    READ_AHEAD_BYTES,
    TURN_BYTES,
    Channel,
    StreamLost,
    ended_by,
    in_pieces,
)
from w5xde_async.wire.frame import Buffer

#: Under TLS a turn of the transport costs more than its encryption of a smaller piece gains by the cache.
PIECE_BYTES = 512 * 1024
#: A transport may push this much after it was told to pause (the proactor's read size).
PUSH_BYTES = 64 * 1024


class TransportChannel(Channel, asyncio.BufferedProtocol):
    """Give it to ``create_connection`` or ``connect_accepted_socket`` as the protocol."""

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self.connected = False  # it has a transport
        self._gone = self._loop.create_future()
        self._tls = self._paused = False
        self._reading: asyncio.Future[int] | None = None  # how much the receive under way has been given
        self._lent = False  # the caller's memory, to the transport
        self._got = self._least = 0
        self._pushed = memoryview(bytearray(READ_AHEAD_BYTES))  # what came while nobody was receiving
        self._start = self._end = 0
        self._pieces: deque[Buffer] = deque()
        self._handed = 0  # bytes of the piece that the transport has
        self._writing: asyncio.Future[None] | None = None

    # -- what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit it
        self.connected = True
        self._tls = transport.get_extra_info("ssl_object") is not None
        # asyncio's TLS compares with >=, its plain transports with >: both mean "anything unsent".
        self._transport.set_write_buffer_limits(high=1 if self._tls else 0, low=0)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._lent:
            return self._target[self._got :]
        if self.lost is not None:
            return memoryview(bytearray(PUSH_BYTES))  # what still comes is dropped; what is here already stays
        if self._start == self._end:
            self._start = self._end = 0
        return self._pushed[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_received += nbytes
        if self.lost is not None:
            return
        self._got += nbytes
        if not self._lent:
            self._end += nbytes
            if READ_AHEAD_BYTES - self._end < PUSH_BYTES:
                self._transport.pause_reading()
                self._paused = True
        if self._got < self._least:
            return
        self._lent = False
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(self._got)

    def eof_received(self) -> bool:
        self._end_with(CLOSED_BY_PEER)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_with(ended_by(exc) if isinstance(exc, OSError) else CLOSED_BY_PEER)
        if not self._gone.done():
            self._gone.set_result(None)

    def pause_writing(self) -> None:
        pass  # ``_push`` asks the transport itself

    def resume_writing(self) -> None:
        self._push()

    # -- what the pair calls

    async def receive(self, view: memoryview, least: int) -> int:
        got = self._take(view)
        if got >= least:
            return got
        self._check()
        self._target, self._got, self._least = view, got, least
        self._lent = lent = len(view) - got >= PUSH_BYTES
        self._reading = self._loop.create_future()
        try:
            self._resume()
            given = await self._reading
            return given if lent else got + self._take(self._target[got:])
        finally:
            self._reading, self._lent, self._target = None, False, NOWHERE

    def _take(self, view: memoryview) -> int:
        """Copy what came while nobody was receiving; how many bytes."""
        got = min(self._end - self._start, len(view))
        if got:
            view[:got] = self._pushed[self._start : self._start + got]
            self._start += got
        return got

    def writelines(self, chunks: Iterable[Buffer]) -> None:
        if self.lost is not None:
            return  # ``drain`` says so
        self._pieces.extend(in_pieces(chunks, PIECE_BYTES))
        self._push()

    async def drain(self) -> None:
        while self._pieces or self._handed:
            self._check()
            self._writing = self._loop.create_future()
            try:
                await self._writing
            finally:
                self._writing = None
        self._check()
        if self._turn >= TURN_BYTES:
            await self._yield_turn()

    def _push(self) -> None:
        """Hand over piece after piece, as long as the transport takes each at once."""
        while self.lost is None and not self._transport.get_write_buffer_size():
            self.bytes_sent += self._handed
            self._handed = 0
            if not self._pieces:
                if self._writing is not None and not self._writing.done():
                    self._writing.set_result(None)
                return
            if self._turn >= TURN_BYTES:
                self._loop.call_soon(self._push_on)
                return
            piece = self._pieces.popleft()
            self._handed = len(piece)
            self._turn += len(piece) + CALL_BYTES
            self._transport.write(piece)

    def _push_on(self) -> None:
        self._turn = 0
        self._push()

    async def aclose(self) -> None:
        if self._gone.done():
            return
        if self.lost is not None:
            self._transport.abort()
        try:
            async with asyncio.timeout(LINGER_S):
                if self._writing is None and self.lost is None:
                    await self.drain()  # what was written and not drained
                self._end_with(CLOSED_HERE)
                self._resume()
                if not self._tls:
                    self._transport.write_eof()  # the peer's end, in answer, closes the transport
                else:
                    self._transport.close()
                await asyncio.shield(self._gone)
        except OSError:
            pass  # too slow, or the peer was faster
        finally:
            self.abort()

    def abort(self, reason: str = CLOSED_HERE) -> None:
        self._end_with(reason)
        self._start = self._end = 0
        if not self._gone.done():
            self._shut_down()
        self._transport.abort()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    def _end_with(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        self._lent = False
        self._pieces.clear()
        for waiting in (self._reading, self._writing):
            if waiting is not None and not waiting.done():
                waiting.set_exception(StreamLost(self.peer, reason))
