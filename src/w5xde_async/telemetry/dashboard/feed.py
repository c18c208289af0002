"""Who watches: one bounded queue a viewer, filled with bytes that are encoded once for all.

A viewer that does not keep up loses what waits for it and is given a new snapshot instead; nothing ever waits for a
viewer, and none holds more than ``_MOST_WAITING`` updates. A snapshot may take a while to make: those who lack one get
the same one, when the server's turn for it comes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable

from w5xde_async.telemetry.dashboard.view import View
from w5xde_async.telemetry.records import plain_value

MOST_VIEWERS = 256
_MOST_WAITING = 8
#: A proxy or a sleeping laptop is noticed by a comment that nobody reads.
_KEEPALIVE_S = 15.0


def sse(event: str, data: object, number: int) -> bytes:
    """One server-sent event."""
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:  # JSON has no word for what is not finite: one such value must not keep the others away
        text = json.dumps(plain_value(data), separators=(",", ":"), allow_nan=False, default=str)
    return f"id: {number}\nevent: {event}\ndata: {text}\n\n".encode()


class Feed:
    """The viewers of one run. ``dropped`` counts updates that viewers have lost by being slow."""

    def __init__(
        self, view: View, *, max_viewers: int = MOST_VIEWERS,
        soon: Callable[[Callable[[], bytes]], object] = lambda make: make(),
    ) -> None:  # fmt: skip
        """``soon`` calls what it is given, once, whenever that may take a while; asked again before, not twice."""
        self._view, self._max_viewers, self._soon = view, max_viewers, soon
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        self._lacking: set[asyncio.Queue[bytes | None]] = set()  # of these, who waits for a snapshot
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

    def flush(self, *, row: bool = True) -> None:
        """Give every viewer what is new; ``row`` as in ``View.update``."""
        update = self._view.update(row=row)
        if update is None:
            return
        self._snapshot = None
        self._number += 1
        if not self._viewers:
            return
        data = sse("update", update, self._number)
        for queue in self._viewers - self._lacking:
            if queue.full():
                self._lose(queue)
            else:
                queue.put_nowait(data)

    def snapshot(self) -> bytes:
        """The whole view as an event; what comes after it are the updates to it."""
        self.flush(row=False)  # who comes does not change what the others see
        if self._snapshot is None:
            self._snapshot = sse("snapshot", self._view.snapshot(), self._number)
        return self._snapshot

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """A snapshot, then updates, until ``close`` or until the viewer goes. Nothing where it is full by now: others
        may have come since this one was let in."""
        head = b"retry: 1000\n\n"
        if self._closed:
            yield head + self.snapshot()
            return
        if self.full:
            yield head
            return
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_WAITING)
        self._viewers.add(queue)
        try:
            self._ask(queue)
            while queue in self._viewers:
                try:
                    async with asyncio.timeout(_KEEPALIVE_S):
                        data = await queue.get()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if data is None:
                    return
                if data:
                    yield head + data
                    head = b""
                elif None in _emptied(queue):
                    yield head + self.snapshot()
                    return
                else:
                    self._ask(queue)
        finally:
            self._viewers.discard(queue)
            self._lacking.discard(queue)

    def _ask(self, queue: asyncio.Queue[bytes | None]) -> None:
        """It is given a snapshot, and no update before."""
        self._lacking.add(queue)
        self._soon(self._give)

    def _give(self) -> bytes:
        data: bytes | None = None  # where it cannot be made, who waits for it is let go
        try:
            return (data := self.snapshot())
        finally:
            for queue in self._lacking:
                queue.put_nowait(data)
            self._lacking.clear()

    def close(self) -> None:
        """A last update, then the end for every viewer."""
        self.flush()
        self._closed = True
        for queue in self._viewers:
            if queue.full() or queue in self._lacking:
                self._lose(queue)
            queue.put_nowait(None)
        self._lacking.clear()

    def _lose(self, queue: asyncio.Queue[bytes | None]) -> None:
        """In place of what waits for a viewer: b"", for a new snapshot."""
        self.dropped += len(_emptied(queue))
        queue.put_nowait(b"")


def _emptied(queue: asyncio.Queue[bytes | None]) -> list[bytes | None]:
    return [queue.get_nowait() for _ in range(queue.qsize())]
