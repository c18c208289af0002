"""What waits to be sent on one link, in order, gathered into few sends.

Bounded by what its owner puts into it: a session holds the leases of its worker, one version of the parameters (what is
unsent of an older one is superseded) and small messages; a worker holds the results of its leases.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from w5xde_async.net.link import Link
from w5xde_async.net.tuning import BUFFER_BYTES
from w5xde_async.wire.frame import Buffer

_SEND_BYTES = 1 << 20  # frames are gathered up to this into one send


class _Item(NamedTuple):
    version: int  # of parameters; -1 for everything else
    lease: int  # of a LEASE; 0 for everything else
    chunks: list[Buffer]
    sent: Callable[[], None] | None


class Outbox:
    """A queue of encoded frames and the coroutine that sends them.

    ``gather`` False sends every frame by itself, where otherwise frames that are ready together share one write.
    """

    def __init__(self, link: Link, *, gather: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._link, self._clock = link, clock
        self._send_bytes = _SEND_BYTES if gather else 1
        self._items: deque[_Item] = deque()
        self._wake = asyncio.Event()
        self._sending = False
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
        return not self._items and not self._sending

    def post(
        self, chunks: list[Buffer], *, sent: Callable[[], None] | None = None, version: int = -1, lease: int = 0,
        first: bool = False,
    ) -> None:  # fmt: skip
        """Queue a frame; ``sent`` is called when it has been handed to the kernel whole.

        ``first``: before all that waits.
        """
        item = _Item(version, lease, chunks, sent)
        if first:
            self._items.appendleft(item)
        else:
            self._items.append(item)
        if lease:
            self.lease_bytes += sum(map(len, chunks))
        elif version < 0:
            self.num_messages += 1
        self._wake.set()

    def withdraw(self, lease: int) -> bool:
        """Forget a queued LEASE. False where it is on its way already."""
        for item in self._items:
            if item.lease == lease:
                self._items.remove(item)
                self.lease_bytes -= sum(map(len, item.chunks))
                return True
        return False

    def supersede(self, version: int) -> None:
        """Forget queued frames of versions before ``version``."""
        if any(0 <= item.version < version for item in self._items):
            self._items = deque(item for item in self._items if not 0 <= item.version < version)

    async def run(self) -> None:
        """Send until cancelled. Raises LinkLost."""
        room = BUFFER_BYTES  # what the kernel takes at once
        while True:
            if not self._items:
                self._wake.clear()
                await self._wake.wait()
                room = BUFFER_BYTES
            batch: list[Buffer] = []
            frames: list[tuple[int, Callable[[], None] | None]] = []
            nbytes = 0
            while self._items and nbytes < self._send_bytes:
                version, lease, chunks, sent = self._items.popleft()
                batch.extend(chunks)
                size = sum(map(len, chunks))
                nbytes += size
                if lease:
                    self.lease_bytes -= size
                elif version < 0:
                    self.num_messages -= 1
                frames.append((size, sent))
            seconds = 0.0
            if batch:
                self._sending, began = True, self._clock()
                await self._link.send(batch)
                seconds = self._clock() - began
                self._sending = False
                if nbytes > room:
                    self.paced_bytes, self.paced_s = self.paced_bytes + nbytes - room, self.paced_s + seconds
                room = max(0, room - nbytes)
            for size, sent in frames:
                if size:
                    self.sent_bytes += size
                    self.sending_s += seconds * size / nbytes
                if sent is not None:
                    sent()
