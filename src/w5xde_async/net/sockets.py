"""Plain TCP on loops that watch descriptors (asyncio's on POSIX, uvloop): the channel that moves bytes itself.

It calls ``recv_into`` and ``sendmsg``: no copy, no pause protocol between, and "handed over" means that the kernel has
the bytes. TLS: ``net.encrypted``. Other loops: ``net.transport``.

Bulk work: with an executor, a payload that has ``BULK_BYTES`` or more left is pumped by a thread (the copies release
the GIL), so that the event loop goes on and several links copy at once. A thread leaves a socket that idles for
``PUMP_IDLE_S`` or trickles, and the loop goes on with it. A descriptor is closed only when no thread uses it.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from w5xde_async.net.stream import (
    CALL_BYTES,
    CLOSED_BY_PEER,
    CLOSED_HERE,
    GLANCE_BYTES,
    LINGER_S,
    NOWHERE,
    TURN_BYTES,
    Channel,
    StreamLost,
    ended_by,
)
from w5xde_async.threads import ended, submitted
from w5xde_async.wire.frame import Buffer

#: A payload with this much left is worth a thread (a hop costs about 55 us, 512 KiB about 100 us).
BULK_BYTES = 512 * 1024
#: The loop takes this much itself first; only a link that has more at hand gets the thread, a slow one stays here.
BITE_BYTES = 256 * 1024
PUMP_IDLE_S = 0.0015
#: A thread also leaves a link that gives less than this after a wait, so many times in a row.
PUMP_TRICKLE_BYTES, PUMP_TRICKLES = 64 * 1024, 4
#: A link that had this much waiting is asked again before the loop watches it: a round of the loop costs ten calls.
FLOW_BYTES = 8 * 1024
IOV_MAX = 1024
_LINGER = "hh" if sys.platform == "win32" else "ii"  # struct linger: on or off, seconds

_T = TypeVar("_T")


class Outgoing:
    """Chunks on their way into the kernel."""

    __slots__ = ("_chunks", "_index", "left")

    def __init__(self, chunks: Iterable[Buffer]) -> None:
        self._chunks = list(chunks)
        self._index = 0
        self.left = sum(map(len, self._chunks))

    @property
    def next_chunk(self) -> Buffer:
        """What goes next, of which nothing has gone yet."""
        return self._chunks[self._index]

    def pump(self, sock: socket.socket, budget: int) -> None:
        """Hand over until nothing is left, ``budget`` is spent or the kernel is full (BlockingIOError)."""
        while self.left and budget > 0:
            sent = sock.sendmsg(self._chunks[self._index : self._index + IOV_MAX])
            budget -= sent + CALL_BYTES
            self.sent(sent)

    def extend(self, chunks: Iterable[Buffer]) -> None:
        more = list(chunks)
        self._chunks += more
        self.left += sum(map(len, more))

    def sent(self, num_bytes: int) -> None:
        """So many bytes more are in the kernel."""
        self.left -= num_bytes
        chunks = self._chunks
        while num_bytes:
            size = len(chunks[self._index])
            if num_bytes < size:
                chunks[self._index] = memoryview(chunks[self._index])[num_bytes:]
                break
            num_bytes -= size
            self._index += 1


class SocketChannel(Channel):
    """Plain TCP over a connected, non-blocking socket, which it owns from now on."""

    def __init__(self, sock: socket.socket, peer: str, *, bulk: Executor | None = None) -> None:
        extra: dict[str, Any] = {"socket": sock}
        with suppress(OSError):  # the peer may be gone already
            extra |= {"peername": sock.getpeername(), "sockname": sock.getsockname()}
        super().__init__(peer, extra)
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._fd = sock.fileno()
        self._bulk = bulk
        self._jobs: set[Future[Any]] = set()
        self._closed = False
        self._watching_in = self._watching_out = False
        self._reading: asyncio.Future[None] | None = None
        self._got = self._least = 0
        self._filling = False  # a thread receives
        self._drained = False  # the last receive took all that there was
        self._flowing = False  # but bytes come so fast that there may be more by now
        self._writing: asyncio.Future[None] | None = None
        self._outgoing: Outgoing | None = None
        self._behind: list[Buffer] = []  # what was written while a thread pumps
        self._pumping = False
        self._deaf: str | None = None  # why the peer takes nothing more, though what it said may still be read

    # -- receiving

    async def receive(self, view: memoryview, least: int) -> int:
        if self._closed:
            self._check()
        self._target, self._got, self._least = view, 0, least
        try:
            if self._flowing or not self._drained:
                self._pull()
            while self._got < least:
                if self._bulk is not None and not self._drained and least - self._got >= BULK_BYTES:
                    self._filling = True
                    try:
                        got = await self._in_thread(0, _pump_in, self._sock, self._target[self._got :])
                    finally:
                        self._filling = False
                    self._got += got
                    self.bytes_received += got
                    self._drained = True
                    continue
                self._reading = self._loop.create_future()
                self._watch_in()
                try:
                    await self._reading
                finally:
                    self._reading = None
            if self._turn >= TURN_BYTES:
                await self._yield_turn()
        except StreamLost:
            raise
        except OSError as error:
            self.abort(ended_by(error))
            self._check()
        finally:
            self._target = NOWHERE  # let go of the caller's memory
        return self._got

    def divert(self, view: memoryview) -> bool:
        return not self._filling and super().divert(view)

    def _pull(self) -> None:
        """Take what the kernel has for the pending receive, a turn's worth at most."""
        view = self._target
        budget = TURN_BYTES if self._bulk is None else BITE_BYTES
        try:
            while self._got < self._least and budget > 0:
                rest = view[self._got : self._got + budget]
                got = self._sock.recv_into(rest)
                if not got:
                    raise StreamLost(self.peer, CLOSED_BY_PEER)
                self._got += got
                self.bytes_received += got  # at once: that it grows is how a slow peer is told from a silent one
                budget -= got
                self._turn += got + CALL_BYTES
                if got < len(rest):  # the kernel has no more: another try would only raise
                    self._drained = True
                    return
            self._drained = False
        except BlockingIOError:
            self._drained = True
            self._flowing = False

    def _watch_in(self) -> None:
        if not self._watching_in:
            self._loop.add_reader(self._fd, self._on_readable)
            self._watching_in = True

    def _on_readable(self) -> None:
        # The descriptor stays watched over a series of receives; it is forgotten when it fires unasked.
        waiting = self._reading
        if waiting is None or waiting.done():
            self._loop.remove_reader(self._fd)
            self._watching_in = False
            return
        try:
            self._pull()
        except OSError as error:
            waiting.set_exception(error)
            return
        self._flowing = self._got >= FLOW_BYTES
        left = self._least - self._got
        if left <= 0 or (self._bulk is not None and not self._drained and left >= BULK_BYTES):
            waiting.set_result(None)

    # -- sending

    def writelines(self, chunks: Iterable[Buffer]) -> None:
        if self.lost is not None or self._deaf is not None:
            return  # ``drain`` says so
        if self._pumping:
            self._behind.extend(chunks)
            return
        if self._outgoing is not None:
            self._outgoing.extend(chunks)
            return
        if not isinstance(chunks, list):
            chunks = list(chunks)
        total, sent = sum(map(len, chunks)), 0
        if self._bulk is None or total < BULK_BYTES:
            try:
                sent = self._sock.sendmsg(chunks if len(chunks) <= IOV_MAX else chunks[:IOV_MAX])
            except BlockingIOError:
                pass
            except OSError as error:
                self._deaf = ended_by(error)
                return
            self.bytes_sent += sent
            self._turn += sent + CALL_BYTES
            if sent == total:
                return
        self._outgoing = Outgoing(chunks)
        self._outgoing.sent(sent)
        self._loop.call_soon(self._watch_out)  # what nobody drains leaves all the same

    @property
    def drained(self) -> bool:
        ended = self.lost is not None or self._deaf is not None
        return self._outgoing is None and not self._pumping and not ended

    async def drain(self) -> None:
        if self._outgoing is not None:
            await self._hand_over(self._outgoing)
        elif self.lost is not None or self._deaf is not None:
            raise StreamLost(self.peer, self.lost or self._deaf or "")
        if self._turn >= TURN_BYTES:
            await self._yield_turn()

    async def _hand_over(self, outgoing: Outgoing) -> None:
        full = False  # the kernel's buffer, as far as we know
        try:
            while outgoing.left:
                if self._bulk is not None and not full and outgoing.left >= BULK_BYTES:
                    await self._pump(outgoing)
                    full = True
                    continue
                self._writing = self._loop.create_future()
                self._watch_out()
                try:
                    await self._writing
                finally:
                    self._writing = None
                full = False
        except StreamLost:
            raise
        except OSError as error:
            self._outgoing, self._deaf = None, ended_by(error)
            self._check()
            raise StreamLost(self.peer, self._deaf) from None
        if self._outgoing is outgoing:
            self._outgoing = None

    async def _pump(self, outgoing: Outgoing) -> None:
        left, self._pumping = outgoing.left, True
        try:
            await self._in_thread(None, _pump_out, self._sock, outgoing)
        finally:
            self._pumping = False
            self.bytes_sent += left - outgoing.left
            outgoing.extend(self._behind)
            self._behind.clear()

    def _watch_out(self) -> None:
        if self._outgoing is not None and not (self._watching_out or self._pumping or self._closed):
            self._loop.add_writer(self._fd, self._on_writable)
            self._watching_out = True

    def _on_writable(self) -> None:
        waiting, outgoing = self._writing, self._outgoing
        if outgoing is None or self._pumping or (waiting is not None and waiting.done()):
            self._loop.remove_writer(self._fd)
            self._watching_out = False
            return
        if waiting is None or self._bulk is None or outgoing.left < BULK_BYTES:
            left = outgoing.left
            try:
                with suppress(BlockingIOError):
                    outgoing.pump(self._sock, TURN_BYTES)
            except OSError as error:
                if waiting is not None:
                    waiting.set_exception(error)
                else:
                    self._outgoing, self._deaf = None, ended_by(error)
                return
            self.bytes_sent += left - outgoing.left
            self._turn += left - outgoing.left
            if outgoing.left:
                return
            self._outgoing = None
        if waiting is not None:
            waiting.set_result(None)

    async def _in_thread(self, idle: _T, pump: Callable[..., _T], *args: Any) -> _T:
        """Run ``pump`` in the executor and always wait for it: it uses the caller's memory and our descriptor."""
        assert self._bulk is not None
        try:
            job = submitted(self._bulk.submit, partial(pump, *args))
        except RuntimeError:  # the executor is shut down, or can start no thread: go on without it
            self._bulk = None
            return idle
        self._jobs.add(job)
        try:
            done = await ended(job, self.abort)  # which ends the thread's socket calls, or the job before it starts
        finally:
            self._jobs.discard(job)
            self._turn = 0
            if self._closed and not self._jobs:
                self._sock.close()
        self._check()
        return done.result()

    async def aclose(self) -> None:
        if self.lost is not None:
            return
        try:
            async with asyncio.timeout(LINGER_S):
                if self._outgoing is not None and self._writing is None and not self._pumping:
                    await self._hand_over(self._outgoing)  # what was written and not drained
                sending = self._writing is not None or bool(self._jobs)
                self.lost = CLOSED_HERE
                if not sending:
                    await self._say_goodbye()
                if not sending and self._reading is None:
                    self._sock.shutdown(socket.SHUT_WR)
                    scratch = memoryview(bytearray(GLANCE_BYTES))
                    while True:  # until the peer's end; closing over unread bytes would reset what it has not read yet
                        await self.receive(scratch, 1)
        except OSError:
            pass  # too slow, or the peer was faster
        finally:
            self.abort()

    async def _say_goodbye(self) -> None:
        """What this side says last, beneath the frames; TCP's own end needs no word."""

    def abort(self, reason: str = CLOSED_HERE) -> None:
        if self.lost is None:
            self.lost = reason
        if self._closed:
            return
        self._closed = True
        self._outgoing = None
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        for waiting in (self._reading, self._writing):
            if waiting is not None and not waiting.done():
                waiting.set_exception(StreamLost(self.peer, self.lost))
        with suppress(OSError):
            if self._jobs:
                # Closed with a reset: a thread may empty a full buffer after the shutdown, and the kernel then goes on
                # telling the peer that its window is zero; a sender would wait for TCP_USER_TIMEOUT.
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack(_LINGER, 1, 0))
            self._sock.shutdown(socket.SHUT_RDWR)  # the peer hears it though a forked child has the descriptor too
        for job in list(self._jobs):  # the threads see the end, and the last of them to return closes
            job.cancel()
        if not self._jobs:
            self._sock.close()


async def until_readable(sock: socket.socket) -> None:
    """On the running loop, which must watch descriptors; nothing else may watch this one for it, or close it."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(sock, set_done, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


async def until_writable(sock: socket.socket) -> None:
    """As ``until_readable``."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(sock, set_done, ready)
    try:
        await ready
    finally:
        loop.remove_writer(sock)


def set_done(ready: asyncio.Future[None]) -> None:
    """For what a descriptor calls, perhaps more than once."""
    if not ready.done():
        ready.set_result(None)


def _pump_in(sock: socket.socket, view: memoryview) -> int:
    """In a thread: receive until ``view`` is full or the socket idles or trickles; how many bytes. Raises OSError."""
    done, size, trickles = 0, len(view), 0
    while done < size and trickles < PUMP_TRICKLES and _ready(sock, receive=True):
        try:
            got = sock.recv_into(view[done:])
        except BlockingIOError:
            continue
        if not got:
            raise ConnectionAbortedError
        done += got
        trickles = trickles + 1 if got < PUMP_TRICKLE_BYTES else 0
    return done


def _pump_out(sock: socket.socket, outgoing: Outgoing) -> None:
    """In a thread: hand over until nothing is left or the socket idles. Raises OSError."""
    while outgoing.left:
        try:
            outgoing.pump(sock, outgoing.left)
        except BlockingIOError:
            if not _ready(sock, receive=False):
                return


def _ready(sock: socket.socket, *, receive: bool) -> bool:
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN if receive else select.POLLOUT)
        return bool(poll.poll(PUMP_IDLE_S * 1000))
    watched = [sock]
    return any(select.select(watched if receive else [], [] if receive else watched, [], PUMP_IDLE_S))
