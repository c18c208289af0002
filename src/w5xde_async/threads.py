"""Calls in threads of a pool that use memory of their caller's: none runs when the caller takes it to be over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def submitted(submit: Callable[[Callable[[], None]], object], call: Callable[[], _T]) -> Future[_T]:
    """``call``, given to a pool by its ``submit``. Raises RuntimeError where it is not called, nor ever will be.

    A pool that can start no thread raises as well, but has put the call into its queue before: a thread that was busy
    then would come to it some time.
    """
    job: Future[_T] = Future()

    def work() -> None:
        if job.set_running_or_notify_cancel():
            try:
                job.set_result(call())
            except BaseException as error:
                job.set_exception(error)

    try:
        submit(work)
    except RuntimeError:
        if job.cancel():
            raise
    return job


async def ended(job: Future[_T], interrupt: Callable[[], object] = lambda: None) -> asyncio.Future[_T]:
    """The job, when it has ended, however often its caller is cancelled meanwhile: that is raised then, and
    ``interrupt`` called at once."""
    done = asyncio.wrap_future(job)
    interrupted: asyncio.CancelledError | None = None
    while not done.done():
        try:
            await asyncio.wait((done,))
        except asyncio.CancelledError as error:
            interrupted = error
            interrupt()
    if interrupted is not None:
        if not done.cancelled():
            done.exception()  # else it would be told as one that nobody has seen
        raise interrupted
    return done
