"""Links without a network: two channels in memory, byte for byte what TCP would carry.

They run on any event loop and use no clock, so cluster tests run them on virtual time. Each direction holds at most
``limit_bytes``; a writer then waits for the reader, as it would for a full socket. ``cut`` and ``freeze`` are the
faults that tests inject.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from w5xde_async.net.link import Link
from w5xde_async.net.stream import CALL_BYTES, CLOSED_BY_PEER, CLOSED_HERE, TURN_BYTES, Channel, StreamLost
from w5xde_async.wire.frame import Buffer

__all__ = ["MemoryChannel", "MemoryLink", "memory_pair"]


class _Pipe:
    """One direction. Whoever waits is woken by any change and looks again."""

    def __init__(self, limit_bytes: int) -> None:
        self.data = bytearray()
        self.limit_bytes = limit_bytes
        self.ended: str | None = None  # no more bytes will come
        self.frozen = False
        self.uncut: int | None = None  # bytes that still pass before the cut
        self._waiting: set[asyncio.Future[None]] = set()

    def changed(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def wait(self) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)

    def end(self, reason: str) -> None:
        if self.ended is None:
            self.ended = reason
        self.changed()


class MemoryChannel(Channel):
    """One end: reads one pipe, writes the other."""

    def __init__(self, peer: str, inbound: _Pipe, outbound: _Pipe) -> None:
        super().__init__(peer)
        self.inbound, self.outbound = inbound, outbound
        self._chunks: list[memoryview] = []  # written, and not in the pipe

    async def receive(self, view: memoryview, least: int) -> int:
        pipe, got, self._target = self.inbound, 0, view
        while True:
            self._check()
            if pipe.data and not pipe.frozen:
                part = min(len(pipe.data), len(view) - got)
                with memoryview(pipe.data) as source:
                    self._target[got : got + part] = source[:part]
                del pipe.data[:part]
                got += part
                self.bytes_received += part
                pipe.changed()
            if got >= least:
                return got
            if pipe.ended is not None and not pipe.data:
                raise StreamLost(self.peer, pipe.ended)
            await pipe.wait()

    def writelines(self, chunks: Iterable[Buffer]) -> None:
        self._chunks.extend(memoryview(chunk) for chunk in chunks if len(chunk))
        self._push()

    @property
    def drained(self) -> bool:
        return not self._chunks and self.lost is None and self.outbound.ended is None

    def _push(self) -> None:
        """As much as the pipe has room for."""
        pipe = self.outbound
        while self._chunks and self.lost is None and pipe.ended is None:
            room = pipe.limit_bytes - len(pipe.data)
            if room <= 0:
                return
            part = min(room, len(self._chunks[0]))
            if pipe.uncut is not None:
                part = min(part, pipe.uncut)
                pipe.uncut -= part
            pipe.data += self._chunks[0][:part]
            self._chunks[0] = self._chunks[0][part:]
            if not self._chunks[0]:
                del self._chunks[0]
            self.bytes_sent += part
            self._turn += part + CALL_BYTES
            pipe.changed()
            if pipe.uncut == 0:
                self.cut()

    async def drain(self) -> None:
        pipe = self.outbound
        while True:
            self._check()
            self._push()
            if pipe.ended is not None:
                raise StreamLost(self.peer, pipe.ended)
            if not self._chunks:
                break
            await pipe.wait()
        self._check()
        if self._turn >= TURN_BYTES:
            await self._yield_turn()

    async def aclose(self) -> None:
        self.abort()

    def abort(self, reason: str = CLOSED_HERE) -> None:
        if self.lost is None:
            self.lost = reason
        self.inbound.end(CLOSED_BY_PEER)
        self.outbound.end(CLOSED_BY_PEER)

    def cut(self) -> None:
        """As if the network had closed both ends: what was written before is still read."""
        self.inbound.end(CLOSED_BY_PEER)
        self.outbound.end(CLOSED_BY_PEER)


class MemoryLink(Link):
    """A link over a MemoryChannel, with the faults that tests inject."""

    __slots__ = ("_memory",)

    def __init__(self, channel: MemoryChannel) -> None:
        super().__init__(*channel.pair())
        self._memory = channel

    def cut(self, *, after_bytes: int = 0) -> None:
        """Break the connection for both ends, once ``after_bytes`` more have been sent from this one."""
        if after_bytes:
            self._memory.outbound.uncut = after_bytes
        else:
            self._memory.cut()

    def freeze(self, frozen: bool = True) -> None:
        """Deliver nothing more to this end, or (False) go on; writers see only a full pipe."""
        self._memory.inbound.frozen = frozen
        self._memory.inbound.changed()


def memory_pair(
    *, limit_bytes: int = 1 << 20, names: tuple[str, str] = ("memory:a", "memory:b")
) -> tuple[MemoryLink, MemoryLink]:
    """Two connected links; ``names`` are theirs, so each has the other's as its ``peer``."""
    forth, back = _Pipe(limit_bytes), _Pipe(limit_bytes)
    first = MemoryChannel(names[1], inbound=back, outbound=forth)
    second = MemoryChannel(names[0], inbound=forth, outbound=back)
    return MemoryLink(first), MemoryLink(second)
