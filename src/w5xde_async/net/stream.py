"""Byte streams under the links: ``readexactly``, ``readinto``, ``write`` that returns when the bytes have left.

:class:`Stream` is the contract and the read-ahead that all kinds share: a fixed buffer for headers and small frames;
large payloads bypass it and land in the caller's own memory. :class:`SocketStream` is plain TCP on loops that watch
descriptors (asyncio's on POSIX, uvloop). It moves bytes itself with ``recv_into`` and ``sendmsg``: no copy, no pause
protocol between, and "written" means that the kernel has it. TLS and other loops: ``net.transport``.

Bulk work: with an executor, a payload that has ``BULK_BYTES`` or more left is pumped by a thread (the copies release
the GIL), so that the event loop goes on and several links copy at once. A thread leaves a socket that idles for
``PUMP_IDLE_S`` or trickles, and the loop goes on with it. A descriptor is closed only when no thread uses it.

Invariants: a stream that ended raises LinkLost with the first reason, for ever; nothing here is read and dropped
before the end; memory beyond the caller's own is ``READ_AHEAD_BYTES`` a stream.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, TypeVar

from w5xde_async.errors import LinkLost
from w5xde_async.net.tuning import Figures, figures
from w5xde_async.wire.frame import Buffer

__all__ = [
    "BULK_BYTES",
    "CLOSED_BY_PEER",
    "CLOSED_HERE",
    "FILL_BYTES",
    "LINGER_S",
    "PUMP_IDLE_S",
    "READ_AHEAD_BYTES",
    "SocketStream",
    "Stream",
    "ended_by",
]

#: ``LinkLost.reason`` where this side ended the link, and where the peer did.
CLOSED_HERE = "closed by this side"
CLOSED_BY_PEER = "closed by peer"

READ_AHEAD_BYTES = 128 * 1024
#: The most that may be asked of ``fill``; leaves room for what a transport pushes meanwhile.
FILL_BYTES = 32 * 1024
#: Read ahead after a big payload: enough for a header.
GLANCE_BYTES = 4096
#: What is left of a buffer below this is read ahead and copied: cheaper than a system call each.
DIRECT_BYTES = 16 * 1024
#: A payload with this much left is worth a thread (a hop costs about 55 us, 512 KiB about 100 us).
BULK_BYTES = 512 * 1024
#: The loop takes this much itself first; only a link that has more at hand gets the thread, a slow one stays here.
BITE_BYTES = 256 * 1024
PUMP_IDLE_S = 0.0015
#: A thread also leaves a link that gives less than this after a wait, so many times in a row.
PUMP_TRICKLE_BYTES, PUMP_TRICKLES = 64 * 1024, 4
#: How long a graceful close waits for the peer's own end, so that its unread last words are not reset away.
LINGER_S = 0.5
#: What one stream may move without letting the event loop run something else.
TURN_BYTES = 4 << 20
#: A system call counts as this many bytes towards a turn.
CALL_BYTES = 16 * 1024
#: A link that had this much waiting is asked again before the loop watches it: a round of the loop costs ten calls.
FLOW_BYTES = 8 * 1024
IOV_MAX = 1024
_LINGER = "hh" if sys.platform == "win32" else "ii"  # struct linger: on or off, seconds

_T = TypeVar("_T")


def ended_by(error: OSError) -> str:
    """An operating system's error as the reason of a LinkLost."""
    if isinstance(error, ConnectionResetError):
        return "reset by peer"
    if isinstance(error, BrokenPipeError | ConnectionAbortedError):
        return CLOSED_BY_PEER
    if isinstance(error, TimeoutError):
        return "peer stopped answering"
    if error.errno and error.strerror and error.strerror.startswith("Connect call failed"):
        return os.strerror(error.errno)  # asyncio writes the address where the reason should be
    return error.strerror or str(error) or type(error).__name__


class Stream(ABC):
    """Bytes in order, with read-ahead. ``ahead[start:end]`` is what was read and not yet taken.

    A link takes small headers straight from ``ahead`` and moves ``start``; that saves a call per field.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.bytes_sent = self.bytes_received = 0
        self.ahead = memoryview(bytearray(READ_AHEAD_BYTES))
        self._glance = False  # the last payload was big: so may be the next, and what is read ahead of it is copied
        self.start = self.end = 0
        self.lost: str | None = None  # why the stream ended; None while it stands
        self.certificate = b""  # the peer's, DER, under TLS; what a proof is bound to
        self._turn = 0  # moved since the loop last had its turn

    def figures(self) -> Figures | None:
        """What the kernel knows of the connection; None where there is none."""
        return None

    @abstractmethod
    async def receive(self, view: memoryview, least: int) -> int:
        """Store between ``least`` and ``len(view)`` bytes; how many. Raises LinkLost."""

    def write_now(self, chunks: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """Hand over what goes without waiting: None when that was all, else what to give to ``write``."""
        return chunks

    @abstractmethod
    async def write(self, chunks: Sequence[Buffer]) -> None:
        """Returns when every byte has been handed over and the chunks may be overwritten. Raises LinkLost."""

    @abstractmethod
    async def aclose(self) -> None:
        """Graceful end; idempotent."""

    @abstractmethod
    def abort(self, reason: str = CLOSED_HERE) -> None:
        """Immediate end; pending calls raise LinkLost with ``reason``; idempotent."""

    async def fill(self, num_bytes: int) -> None:
        """Have at least ``num_bytes`` (at most FILL_BYTES) read ahead, and as many more as are there."""
        while self.end - self.start < num_bytes:
            self._compact(num_bytes)
            stop = self.end + max(num_bytes, GLANCE_BYTES) if self._glance else READ_AHEAD_BYTES
            self._glance = False
            self.end += await self.receive(self.ahead[self.end : stop], 1)

    def _compact(self, num_bytes: int) -> None:
        """Move what is held to the front where ``num_bytes`` would not fit behind it, or hardly more would."""
        held = self.end - self.start
        if self.start and (not held or self.end > READ_AHEAD_BYTES // 2 or self.start + num_bytes > READ_AHEAD_BYTES):
            self.ahead[:held] = self.ahead[self.start : self.end]
            self.start, self.end = 0, held

    async def readinto(self, view: memoryview) -> None:
        """Fill ``view`` (flat, format B)."""
        size = len(view)
        done = 0
        self._glance = size >= 16 * GLANCE_BYTES
        while done < size:
            held = self.end - self.start
            if held:
                part = min(held, size - done)
                view[done : done + part] = self.ahead[self.start : self.start + part]
                self.start += part
                done += part
            elif size - done >= DIRECT_BYTES:
                done += await self.receive(view[done:] if done else view, size - done)
            else:
                await self.fill(size - done)

    async def readexactly(self, num_bytes: int) -> bytearray:
        """The next ``num_bytes`` in memory of their own."""
        data = bytearray(num_bytes)
        await self.readinto(memoryview(data))
        return data

    async def _yield_turn(self) -> None:
        self._turn = 0
        await asyncio.sleep(0)

    def _check(self) -> None:
        if self.lost is not None:
            raise LinkLost(self.peer, self.lost)


class _Outgoing:
    """Chunks on their way into the kernel."""

    __slots__ = ("_chunks", "_index", "left")

    def __init__(self, chunks: Sequence[Buffer], sent: int) -> None:
        self._chunks = list(chunks)
        self._index = 0
        self.left = sum(map(len, chunks)) - sent
        self._advance(sent)

    def pump(self, sock: socket.socket, budget: int) -> None:
        """Hand over until nothing is left, ``budget`` is spent or the kernel is full (BlockingIOError)."""
        while self.left and budget > 0:
            sent = sock.sendmsg(self._chunks[self._index : self._index + IOV_MAX])
            self.left -= sent
            budget -= sent + CALL_BYTES
            self._advance(sent)

    def rest(self) -> list[Buffer]:
        return self._chunks[self._index :]

    def _advance(self, sent: int) -> None:
        chunks = self._chunks
        while sent:
            size = len(chunks[self._index])
            if sent < size:
                chunks[self._index] = memoryview(chunks[self._index])[sent:]
                break
            sent -= size
            self._index += 1


class SocketStream(Stream):
    """Plain TCP over a connected, non-blocking socket, which it owns from now on."""

    def __init__(self, sock: socket.socket, peer: str, *, bulk: Executor | None = None) -> None:
        super().__init__(peer)
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._fd = sock.fileno()
        self._bulk = bulk
        self._jobs: set[Future[Any]] = set()
        self._closed = False
        self._watching_in = self._watching_out = False
        self._reading: asyncio.Future[None] | None = None
        self._target = self.ahead
        self._got = self._least = 0
        self._drained = False  # the last receive took all that there was
        self._flowing = False  # but bytes come so fast that there may be more by now
        self._writing: asyncio.Future[None] | None = None
        self._outgoing: _Outgoing | None = None

    def figures(self) -> Figures | None:
        return None if self._closed else figures(self._sock)

    async def receive(self, view: memoryview, least: int) -> int:
        if self._closed:
            self._check()
        self._target, self._got, self._least = view, 0, least
        try:
            if self._flowing or not self._drained:
                self._pull()
            while self._got < least:
                if self._bulk is not None and not self._drained and least - self._got >= BULK_BYTES:
                    got = await self._in_thread(0, _pump_in, self._sock, view[self._got :])
                    self._got += got
                    self.bytes_received += got
                    self._drained = True
                    continue
                self._reading = self._loop.create_future()
                if not self._watching_in:
                    self._loop.add_reader(self._fd, self._on_readable)
                    self._watching_in = True
                try:
                    await self._reading
                finally:
                    self._reading = None
            if self._turn >= TURN_BYTES:
                await self._yield_turn()
        except OSError as error:
            self.abort(ended_by(error))
            self._check()
        finally:
            self._target = self.ahead  # let go of the caller's memory
        return self._got

    def _pull(self) -> None:
        """Take what the kernel has for the pending receive, a turn's worth at most."""
        view = self._target
        budget = TURN_BYTES if self._bulk is None else BITE_BYTES
        try:
            while self._got < self._least and budget > 0:
                rest = view[self._got : self._got + budget]
                got = self._sock.recv_into(rest)
                if not got:
                    raise LinkLost(self.peer, CLOSED_BY_PEER)
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

    def _on_readable(self) -> None:
        # The descriptor stays watched over a series of receives; it is forgotten when it fires unasked.
        waiting = self._reading
        if waiting is None or waiting.done():
            self._loop.remove_reader(self._fd)
            self._watching_in = False
            return
        try:
            self._pull()
        except (OSError, LinkLost) as error:
            waiting.set_exception(error)
            return
        self._flowing = self._got >= FLOW_BYTES
        left = self._least - self._got
        if left <= 0 or (self._bulk is not None and not self._drained and left >= BULK_BYTES):
            waiting.set_result(None)

    def write_now(self, chunks: Sequence[Buffer]) -> Sequence[Buffer] | None:
        if self.lost is not None:
            raise LinkLost(self.peer, self.lost)
        total = sum(map(len, chunks))
        if self._bulk is not None and total >= BULK_BYTES:
            return chunks
        try:
            sent = self._sock.sendmsg(chunks if len(chunks) <= IOV_MAX else chunks[:IOV_MAX])
        except BlockingIOError:
            return chunks
        except OSError as error:
            raise LinkLost(self.peer, ended_by(error)) from None
        self.bytes_sent += sent
        self._turn += sent + CALL_BYTES
        if sent < total:
            return _Outgoing(chunks, sent).rest()
        return None if self._turn < TURN_BYTES else ()

    async def write(self, chunks: Sequence[Buffer]) -> None:
        self._check()
        outgoing = _Outgoing(chunks, 0)
        total, before = outgoing.left, self.bytes_sent
        full = False  # the kernel's buffer, as far as we know
        try:
            while outgoing.left:
                if self._bulk is not None and not full and outgoing.left >= BULK_BYTES:
                    await self._in_thread(None, _pump_out, self._sock, outgoing)
                    full = True
                    self.bytes_sent = before + total - outgoing.left
                    continue
                self._outgoing = outgoing
                self._writing = self._loop.create_future()
                if not self._watching_out:
                    self._loop.add_writer(self._fd, self._on_writable)
                    self._watching_out = True
                try:
                    await self._writing
                finally:
                    self._writing = self._outgoing = None
                full = False
            if self._turn >= TURN_BYTES:
                await self._yield_turn()
        except OSError as error:
            self._check()
            raise LinkLost(self.peer, ended_by(error)) from None
        finally:
            self.bytes_sent = before + total - outgoing.left
            self._turn += total - outgoing.left

    def _on_writable(self) -> None:
        waiting, outgoing = self._writing, self._outgoing
        if waiting is None or outgoing is None or waiting.done():
            self._loop.remove_writer(self._fd)
            self._watching_out = False
            return
        if self._bulk is None or outgoing.left < BULK_BYTES:
            left = outgoing.left
            try:
                with suppress(BlockingIOError):
                    outgoing.pump(self._sock, TURN_BYTES)
            except OSError as error:
                waiting.set_exception(error)
                return
            self.bytes_sent += left - outgoing.left
            if outgoing.left:
                return
        waiting.set_result(None)

    async def _in_thread(self, idle: _T, pump: Callable[..., _T], *args: Any) -> _T:
        """Run ``pump`` in the executor and always wait for it: it uses the caller's memory and our descriptor."""
        assert self._bulk is not None
        try:
            job = self._bulk.submit(pump, *args)
        except RuntimeError:  # the executor is shut down: go on without it
            self._bulk = None
            return idle
        self._jobs.add(job)
        done = asyncio.wrap_future(job)
        interrupted: asyncio.CancelledError | None = None
        while not done.done():
            try:
                await asyncio.wait((done,))
            except asyncio.CancelledError as error:
                interrupted = error
                self.abort()  # ends the thread's socket calls at once, or the job before it starts
        self._jobs.discard(job)
        self._turn = 0
        if self._closed and not self._jobs:
            self._sock.close()
        failed = None if done.cancelled() else done.exception()
        if interrupted is not None:
            raise interrupted
        self._check()
        if failed is not None:
            raise failed
        return done.result()

    async def aclose(self) -> None:
        if self.lost is not None:
            return
        if self._reading is not None or self._writing is not None or self._jobs:
            self.abort()
            return
        self.lost = CLOSED_HERE
        try:
            self._sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(LINGER_S):
                while True:  # until the peer's end; closing over unread bytes would reset what it has not read yet
                    await self.receive(self.ahead, 1)
        except (OSError, LinkLost):
            pass
        finally:
            self._close()

    def abort(self, reason: str = CLOSED_HERE) -> None:
        if self.lost is None:
            self.lost = reason
        self.start = self.end = 0
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        for waiting in (self._reading, self._writing):
            if waiting is not None and not waiting.done():
                waiting.set_exception(LinkLost(self.peer, self.lost or CLOSED_HERE))
        if not self._jobs:
            self._sock.close()
            return
        with suppress(OSError):
            # Closed with a reset: a thread may empty a full buffer after the shutdown, and the kernel then goes on
            # telling the peer that its window is zero; a sender would wait for TCP_USER_TIMEOUT.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack(_LINGER, 1, 0))
            self._sock.shutdown(socket.SHUT_RDWR)  # the threads see the end; the last of them to return closes
        for job in list(self._jobs):
            job.cancel()


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


def _pump_out(sock: socket.socket, outgoing: _Outgoing) -> None:
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
