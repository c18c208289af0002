"""Connections between the members of an island, by which each hears at once that another is gone.

They begin where rank 0 will listen, once the members have met, and hold from then on: its start takes a rank seconds,
and it waits minutes for one that does not come, while its member would not be there for whoever takes the place.
Nothing is said on them but who is there, and that all are, and a line that is cut for a while ends none; like all that
ranks say to each other it is neither authenticated nor encrypted.
"""

from __future__ import annotations

import asyncio
import socket
from asyncio import StreamReader, StreamWriter
from contextlib import suppress

_SAYING_S = 2.0  # for who has connected to say who he is: it may be a stranger
_MOST_ASKED = 64  # at once; further ones wait to be accepted
_HELLO, _START = b"w5xde rank %d\n", b"start\n"


class Ties:
    """A member's: rank 0 has one to each of the others, the others have one to rank 0."""

    def __init__(self) -> None:
        self._streams: dict[int, tuple[StreamReader, StreamWriter]] = {}  # by rank

    async def accept(self, listening: socket.socket, ranks: int, seconds: float) -> None:
        """As rank 0, wait for all others, and have them go on.

        Raises TimeoutError where they are not there in time, OSError where one has gone again.
        """
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        accepting: asyncio.Task[tuple[socket.socket, object]] | None = None
        asked = set[asyncio.Task[None]]()  # side by side: strangers that say nothing hold up nobody
        try:
            async with asyncio.timeout(seconds):
                while len(self._streams) < ranks - 1:
                    if accepting is None and len(asked) < _MOST_ASKED:
                        accepting = asyncio.create_task(loop.sock_accept(listening))
                    waiting = asked if accepting is None else {*asked, accepting}
                    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    asked -= done
                    if accepting in done:
                        accepted, _ = await accepting
                        accepting = None
                        asked.add(asyncio.create_task(self._ask(accepted, ranks)))
                for _, writer in self._streams.values():
                    writer.write(_START)
                    await writer.drain()
        finally:
            begun = [*asked, *([] if accepting is None else [accepting])]
            for task in begun:
                task.cancel()
            for ended in await asyncio.gather(*begun, return_exceptions=True):
                if isinstance(ended, tuple):  # accepted in the same moment
                    ended[0].close()
            listening.setblocking(True)  # the rank that inherits it may count on that

    async def _ask(self, accepted: socket.socket, ranks: int) -> None:
        """Have who has connected say who he is, and keep the connection of another rank, the first of each."""
        try:
            reader, writer = await asyncio.open_connection(sock=accepted)
        except BaseException as error:
            accepted.close()
            if isinstance(error, OSError):  # gone again
                return
            raise
        rank = None
        try:
            rank = await _said(reader, ranks)
        finally:
            if rank is None or rank in self._streams:
                writer.close()
            else:
                self._streams[rank] = reader, writer

    async def connect(self, host: str, port: int, rank: int, seconds: float) -> None:
        """As another, be there for rank 0, and return when all are. Raises TimeoutError, OSError where they are not."""
        async with asyncio.timeout(seconds):
            reader, writer = streams = await asyncio.open_connection(host, port)
            self._streams[0] = streams
            writer.write(_HELLO % rank)
            if await reader.readline() != _START:
                raise ConnectionError("rank 0 waits for the others no more")

    async def gone(self) -> int:
        """Return when another member is gone, or has no tie to this one any more: its rank."""
        reading = {asyncio.create_task(reader.read(1)): rank for rank, (reader, _) in self._streams.items()}
        try:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        return reading[done.pop()]

    def close(self) -> None:
        """Let the others know that this one is gone."""
        while self._streams:
            self._streams.popitem()[1][1].close()


async def _said(reader: StreamReader, ranks: int) -> int | None:
    """Which rank has connected; None for a stranger."""
    with suppress(TimeoutError, OSError, ValueError):  # ValueError: of a line without an end, or of no number
        async with asyncio.timeout(_SAYING_S):
            line = await reader.readline()
        rank = int(line.removeprefix(_HELLO.partition(b"%")[0]))
        return rank if line == _HELLO % rank and 0 < rank < ranks else None
    return None
