"""Where those meet who want to be an island together."""

from __future__ import annotations

import asyncio

from w5xde_async.wire.messages import Rendezvous

_MOST_WAITING = 4096


class Meeting:
    """Volunteers by the island that they want. Belongs to the event loop. The first to come is rank 0."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], list[tuple[str, int, asyncio.Future[Rendezvous]]]] = {}

    def num_waiting(self, shape: str, ranks: int) -> int:
        """Who waits for an island of this shape."""
        return len(self._waiting.get((shape, ranks), ()))

    async def wait(self, shape: str, ranks: int, host: str, port: int, seconds: float) -> Rendezvous | None:
        """Where the others are, or None where they did not come within ``seconds`` (or too many wait)."""
        if sum(map(len, self._waiting.values())) >= _MOST_WAITING:
            return None
        found: asyncio.Future[Rendezvous] = asyncio.get_running_loop().create_future()
        waiting, mine = self._waiting.setdefault((shape, ranks), []), (host, port, found)
        waiting[:] = [*(one for one in waiting if not one[2].done()), mine]  # some may have just given up
        if len(waiting) == ranks:
            del self._waiting[shape, ranks]
            first_host, first_port, _ = waiting[0]
            for rank, (_, _, theirs) in enumerate(waiting):
                theirs.set_result(Rendezvous(rank, first_host, first_port))
        try:
            async with asyncio.timeout(seconds):
                return await found
        except TimeoutError:  # in the turn in which the last one came: the others have been told of this one
            return found.result() if found.done() and not found.cancelled() else None
        finally:
            if not found.done() or found.cancelled():
                still = self._waiting.get((shape, ranks))
                if still is not None and mine in still:
                    still.remove(mine)
                    if not still:
                        del self._waiting[shape, ranks]
