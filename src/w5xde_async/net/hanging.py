"""Calls that may hang: a resolver without an answer, a file on a network disk.

Each runs in a daemon thread of its own, so that neither its caller nor the end of the program waits for it. Whoever
asks the same again while a call is under way gets that one's answer: a call that hangs for hours holds one thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
_under_way: dict[Hashable, Future[Any]] = {}


async def in_daemon_thread(key: Hashable, function: Callable[[], _T]) -> _T:
    """``function()``, called in a thread; ``key`` says what is asked. Cancelling ends the waiting, not the call."""
    future: Future[_T] | None = _under_way.get(key)
    if future is None:
        future = _under_way[key] = Future()
        future.set_running_or_notify_cancel()  # from now on nobody who stops waiting can cancel it
        threading.Thread(target=_call, args=(key, function, future), name="w5xde-may-hang", daemon=True).start()
    return await asyncio.wrap_future(future)


def _call(key: Hashable, function: Callable[[], _T], future: Future[_T]) -> None:
    try:
        result = function()
    except Exception as error:
        _under_way.pop(key, None)
        future.set_exception(error)
    else:
        _under_way.pop(key, None)
        future.set_result(result)
