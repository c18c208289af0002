"""The first of several ways that works: attempts that start one after the other and go on side by side.

Happy Eyeballs (RFC 8305) as asyncio has it for ``create_connection``; that one gives a transport and is missing in
uvloop, so that it fits neither plain sockets nor several hosts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")

#: Before the next attempt starts beside those that have not failed yet.
DELAY_S = 0.25


class NoneWorked(Exception):
    """All attempts failed. Field: ``errors``, in the order in which they did."""

    def __init__(self, errors: Sequence[Exception]) -> None:
        self.errors = tuple(errors)
        super().__init__("; ".join(map(str, errors)))


async def first_that_works(attempts: Sequence[Callable[[], Awaitable[_T]]], *, discard: Callable[[_T], None]) -> _T:
    """The first result; the other attempts are cancelled, and what one of them has given meanwhile is discarded.

    The next attempt starts when one has failed, or after ``DELAY_S``. Raises NoneWorked. Cancelled, nothing is left.
    """
    waiting, running, errors = list(attempts), set[asyncio.Task[_T]](), list[Exception]()
    won: asyncio.Task[_T] | None = None
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.ensure_future(_awaited(waiting.pop(0))))
            await asyncio.wait(running, timeout=DELAY_S if waiting else None, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task.done()]:
                error = task.exception()
                if error is None:
                    won = task
                    return task.result()
                running.discard(task)
                if not isinstance(error, Exception):
                    raise error
                errors.append(error)
        raise NoneWorked(errors)
    finally:
        interrupted: asyncio.CancelledError | None = None
        for task in running:
            task.cancel()  # the one that has won is done
        while going := [task for task in running if not task.done()]:
            try:
                await asyncio.wait(going)
            except asyncio.CancelledError as error:
                interrupted = error
        for task in running:
            if not task.cancelled() and task.exception() is None and (task is not won or interrupted is not None):
                discard(task.result())
        if interrupted is not None:
            raise interrupted


async def _awaited(attempt: Callable[[], Awaitable[_T]]) -> _T:
    return await attempt()
