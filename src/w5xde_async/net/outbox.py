"""What waits to be sent on one link, in order, gathered into few sends.

Bounded by what its owner puts into it: a session holds the leases of its worker, one version of the parameters (what is
unsent of an older one is superseded) and small messages; a worker holds the results of its leases.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from w5xde_async.net.link import Link
from w5xde_async.net.tuning import BUFFER_BYTES
from w5xde_async.wire.frame import Buffer

_SEND_BYTES = 1 << 20  # frames are gathered up to this into one send
_AT_ONCE_BYTES = 128 << 10  # ``flush`` sends no more: it is not to hold up the loop


class _Item(NamedTuple):
    version: int  # of parameters; -1 for everything else
    lease: int  # of a LEASE; 0 for everything else
    chunks: list[Buffer]
    nbytes: int
    sent: Callable[[], None] | None


class Outbox:
    """A queue of encoded frames and the coroutine that sends them.

    ``gather`` False sends every frame by itself, where otherwise frames that are ready together share one write.
    """

    def __init__(self, link: Link, *, gather: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._link, self._clock = link, clock
        self._gather, self._send_bytes = gather, _SEND_BYTES if gather else 1
        self._items: deque[_Item] = deque()
        self._wake = asyncio.Event()
        self._sending = self._looking = False
        self._leaving: tuple[_Item, ...] = ()  # taken by ``flush``, and not yet whole by the kernel
        self._error: Exception | None = None  # raised by a ``sent`` when ``flush`` called it
        self._began = 0.0  # when ``flush`` took them
        self.lease_bytes = 0  #: bytes of leases that wait to be sent
        #: Bytes sent and seconds spent sending, up to the frame whose ``sent`` is called. Frames that share a write
        #: have their shares of its time.
        self.sent_bytes, self.sending_s = 0, 0.0
        #: Bytes that the kernel could not take at once, and the seconds that those took: by them the line is known.
        self.paced_bytes, self.paced_s = 0, 0.0
        self.num_messages = 0  #: other messages that wait, parameters not counted

    @property
    def idle(self) -> bool:
        """True when nothing waits to be sent and nothing is being sent."""
        return not self._items and not self._sending and not self._leaving

    def post(
        self, chunks: list[Buffer], *, sent: Callable[[], None] | None = None, version: int = -1, lease: int = 0,
        first: bool = False,
    ) -> None:  # fmt: skip
        """Queue a frame; ``sent`` is called when it has been handed to the kernel whole.

        ``first``: before all that waits.
        """
        item = _Item(version, lease, chunks, sum(map(len, chunks)), sent)
        if first:
            self._items.appendleft(item)
        else:
            self._items.append(item)
        if lease:
            self.lease_bytes += item.nbytes
        elif version < 0:
            self.num_messages += 1
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def withdraw(self, lease: int) -> bool:
        """Forget a queued LEASE. False where it is on its way already."""
        for item in self._items:
            if item.lease == lease:
                self._items.remove(item)
                self.lease_bytes -= item.nbytes
                return True
        return False

    def supersede(self, version: int) -> None:
        """Forget queued frames of versions before ``version``."""
        if any(0 <= item.version < version for item in self._items):
            self._items = deque(item for item in self._items if not 0 <= item.version < version)

    def flush(self) -> None:
        """Send what waits at once, if it is little and the line is free: else, ``run`` does.

        What was posted leaves soon in any case; this spares the loop a turn where nothing more is to leave with it.
        """
        if not self._items or self._sending or self._leaving:
            return
        if not self._gather or sum(item.nbytes for item in self._items) > _AT_ONCE_BYTES:
            self._wake.set()
            return
        items, began = tuple(self._items), self._clock()
        whole = self._link.send_now([chunk for item in items for chunk in item.chunks])
        if whole is not None:
            self._take(len(items))
        if whole:
            try:
                self._have_left(items, self._clock() - began)
            except Exception as error:  # of a ``sent``: it is for whoever sends, not for whoever posts
                self._error = error
                self._wake.set()
            return
        if whole is not None:
            self._leaving, self._began = items, began
        self._wake.set()

    def _look(self) -> None:
        """The loop's next turn after something was posted: nothing more comes to leave with it."""
        self._looking = False
        self.flush()

    async def run(self) -> None:
        """Send until cancelled. Raises LinkLost, and what a ``sent`` raises."""
        room = BUFFER_BYTES  # what the kernel takes at once
        while True:
            if not (self._items or self._leaving or self._error):
                self._wake.clear()
                await self._wake.wait()
                room = BUFFER_BYTES
            if self._error is not None:
                raise self._error
            if self._leaving:
                await self._send([])
                items, self._leaving = self._leaving, ()
                self._have_left(items, self._clock() - self._began)
                continue
            count = nbytes = 0
            for item in self._items:
                if nbytes >= self._send_bytes:
                    break
                count, nbytes = count + 1, nbytes + item.nbytes
            items = self._take(count)
            began = self._clock()
            if batch := [chunk for item in items for chunk in item.chunks]:
                await self._send(batch)
            seconds = self._clock() - began if batch else 0.0
            if nbytes > room:
                self.paced_bytes, self.paced_s = self.paced_bytes + nbytes - room, self.paced_s + seconds
            room = max(0, room - nbytes)
            self._have_left(items, seconds)

    async def _send(self, batch: Sequence[Buffer]) -> None:
        self._sending = True
        await self._link.send(batch)
        self._sending = False

    def _take(self, count: int) -> tuple[_Item, ...]:
        items = tuple([self._items.popleft() for _ in range(count)])
        for item in items:
            if item.lease:
                self.lease_bytes -= item.nbytes
            elif item.version < 0:
                self.num_messages -= 1
        return items

    def _have_left(self, items: Sequence[_Item], seconds: float) -> None:
        total = sum(item.nbytes for item in items)
        for item in items:
            if item.nbytes:
                self.sent_bytes += item.nbytes
                self.sending_s += seconds * item.nbytes / total
            if item.sent is not None:
                item.sent()
