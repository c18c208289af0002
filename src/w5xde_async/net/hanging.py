"""Calls that may hang: a resolver without an answer, a file on a network disk.

Each runs in a daemon thread of its own, so that neither its caller nor the end of the program waits for it. Whoever
asks the same again while a call is under way gets that one's answer: a call that hangs for hours holds one thread.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
_under_way: dict[Hashable, Future[Any]] = {}


async def in_daemon_thread(key: Hashable, function: Callable[[], _T]) -> _T:
    """``function()``, called in a thread; ``key`` says what is asked. Cancelling ends the waiting, not the call.

    Raises OSError, too, where no thread can be had.
    """
    future: Future[_T] | None = _under_way.get(key)
    if future is None:
        future = _under_way[key] = Future()
        future.set_running_or_notify_cancel()  # from now on nobody who stops waiting can cancel it
        thread = threading.Thread(target=_call, args=(key, function, future), name="w5xde-may-hang", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            del _under_way[key]  # or whoever asks the same later would wait for nobody
            said = f"no thread can be started ({error}); raise pids.max or ulimit -u"
            raise OSError(errno.EAGAIN, said) from None
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
