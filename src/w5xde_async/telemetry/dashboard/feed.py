"""Who watches: one bounded queue a viewer, filled with bytes that are encoded once for all.

A viewer that does not keep up loses what waits for it and is given a new snapshot instead; nothing ever waits for a
viewer, and none holds more than ``_MOST_WAITING`` updates.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

from w5xde_async.telemetry.dashboard.view import View

__all__ = ["Feed", "sse"]

_MOST_WAITING = 8
#: A proxy or a sleeping laptop is noticed by a comment that nobody reads.
_KEEPALIVE_S = 15.0


def sse(event: str, data: object, number: int) -> bytes:
    """One server-sent event."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, default=str)
    return f"id: {number}\nevent: {event}\ndata: {text}\n\n".encode()


class Feed:
    """The viewers of one run. ``dropped`` counts updates that viewers have lost by being slow."""

    def __init__(self, view: View, *, max_viewers: int = 256) -> None:
        self._view, self._max_viewers = view, max_viewers
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        self._number = 0
        self._snapshot: bytes | None = None
        self._closed = False
        self.dropped = 0

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def full(self) -> bool:
        """True when no further viewer is let in."""
        return self._closed or len(self._viewers) >= self._max_viewers

    def flush(self) -> None:
        """Give every viewer what is new."""
        update = self._view.update()
        if update is None:
            return
        self._snapshot = None
        self._number += 1
        if not self._viewers:
            return
        data = sse("update", update, self._number)
        for queue in self._viewers:
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                    self.dropped += 1
                queue.put_nowait(b"")  # stands for a new snapshot
            else:
                queue.put_nowait(data)

    def snapshot(self) -> bytes:
        """The whole view as an event; what comes after it are the updates to it."""
        self.flush()
        if self._snapshot is None:
            self._snapshot = sse("snapshot", self._view.snapshot(), self._number)
        return self._snapshot

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """A snapshot, then updates, until ``close`` or until the viewer goes."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_WAITING)
        snapshot = self.snapshot()  # before this queue is filled: it lacks nothing and has nothing twice
        self._viewers.add(queue)
        try:
            yield b"retry: 1000\n\n" + snapshot
            while not self._closed:
                try:
                    async with asyncio.timeout(_KEEPALIVE_S):
                        data = await queue.get()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if data is None:
                    return
                if not data:
                    while not queue.empty():
                        queue.get_nowait()
                    data = self.snapshot()
                    while not queue.empty():  # the snapshot holds what its own flush has just put there
                        queue.get_nowait()
                yield data
        finally:
            self._viewers.discard(queue)

    def close(self) -> None:
        """A last update, then the end for every viewer."""
        self.flush()
        self._closed = True
        for queue in self._viewers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)
