"""What both facades do alike: block on an event loop of their own, show the run, find the secret.

Coordinator and Worker are guests in somebody's loop and read no environment; the earlier systems' calls block, and
their scripts say nothing of secrets. This is where the one becomes the other. Works from any thread; from the main
one, Ctrl-C cancels the call once, which then ends in good order.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from w5xde_async.errors import UsageError
from w5xde_async.net.endpoint import format_address, parse_address
from w5xde_async.net.join import Invitation, read_secret_file
from w5xde_async.net.tls import is_loopback
from w5xde_async.net.token import find_token
from w5xde_async.runtime import loop_factory
from w5xde_async.telemetry.events import Bus, Event, RunStarted
from w5xde_async.telemetry.progress import Progress, ProgressConfig
from w5xde_async.worker.connection.connection import Departure
from w5xde_async.worker.service import Worker

_T = TypeVar("_T")
_EXIT_S = 30.0  #: how long a program that ends waits for calls in daemon threads
LogMode = Literal["silent", "normal", "verbose"]


def block_on(main: Callable[[], Coroutine[Any, Any, _T]], *, instead: str) -> _T:
    """Run ``main`` in a new event loop (uvloop where it is) until it ends.

    Raises UsageError where this thread runs a loop already, and names ``instead``, which does not block.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise UsageError(f"this call blocks, and an event loop runs in this thread: use {instead}, or another thread")
    logging.getLogger("stamina").setLevel(logging.ERROR)  # an attempt to connect is no news
    with _ended_at_exit() as running, asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            return runner.run(running.call(main))
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # where the loop stood is no news
        except asyncio.CancelledError:
            if running.cancelled:
                raise SystemExit from None  # which ends a thread without a word
            raise


# -- calls that are still running when the program ends


class _Running:
    """A call in a daemon thread."""

    def __init__(self) -> None:
        self.cancelled = False
        self.ended = threading.Event()
        self._task: asyncio.Task[Any] | None = None

    async def call(self, main: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """``main()``, in its loop."""
        self._task = task = asyncio.current_task()
        if self.cancelled and task is not None:
            task.cancel()
        return await main()

    def cancel(self) -> None:
        """From any thread: as Ctrl-C does in the main one."""
        self.cancelled = True
        if self._task is not None:
            with suppress(RuntimeError):  # it has ended just now
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)


_in_daemons: set[_Running] = set()
_registered = threading.Lock()  # taken for good


@contextmanager
def _ended_at_exit() -> Iterator[_Running]:
    """In a daemon thread: have the call end in good order when the program does.

    Python kills such threads where they stand. In the middle of one of torch's operations that aborts the process.
    """
    running = _Running()
    if not threading.current_thread().daemon:
        yield running
        return
    if _registered.acquire(blocking=False):
        # What is registered with threading is called while thread pools still take work; atexit comes too late.
        register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
        with suppress(RuntimeError):  # the program is ending already
            register(_end_all)
    _in_daemons.add(running)
    try:
        yield running
    finally:
        _in_daemons.discard(running)
        running.ended.set()


def _end_all() -> None:
    calls = _in_daemons.copy()
    for running in calls:
        running.cancel()
    deadline = time.monotonic() + _EXIT_S
    for running in calls:
        running.ended.wait(max(0.0, deadline - time.monotonic()))


async def working(worker: Worker) -> Departure:
    """The worker's ``run``. Cancelled (Ctrl-C), it first leaves in good order: the lease under way is finished."""
    running = asyncio.create_task(worker.run(), name="worker")
    try:
        await asyncio.wait([running])
    except asyncio.CancelledError:
        worker.drain("Ctrl-C")
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # looked at: what ended it now is no news
        raise
    return running.result()


@contextmanager
def shown(bus: Bus, mode: LogMode, *, join: Callable[[], str]) -> Iterator[Progress]:
    """Show the run on stderr for as long as the context is open, this package's warnings too.

    ``join``: what somebody types to join; asked for once the run has begun.
    """
    dumb = os.environ.get("TERM") == "dumb"
    color = not os.environ.get("NO_COLOR") and not dumb
    progress = Progress(ProgressConfig(mode=mode, color=color), terminal=False if dumb else None)

    def show(event: Event) -> None:
        progress(replace(event, worker_command=join()) if isinstance(event, RunStarted) else event)

    unsubscribe = bus.subscribe(show)
    logger, handler = logging.getLogger("w5xde_async"), progress.handler()
    logger.addHandler(handler)
    try:
        yield progress
    finally:
        logger.removeHandler(handler)
        unsubscribe()
        progress.close()


def token_of(token: str) -> str:
    """``token``, or where it is looked for without one (``net.token``). Raises UsageError."""
    named = os.environ.get("W5XDE_TOKEN_FILE", "")
    return token or find_token(Path(named) if named else None, given_as_argument=False, environment=os.environ)


def where_to_join(
    address: tuple[str, int] | str | None, default: tuple[str, int], *, join_file: Path | str | None, secure: bool
) -> str:
    """The coordinator as ``host:port`` or, where there is one, as a join string: ``join_file``, W5XDE_JOIN_FILE or
    W5XDE_JOIN. The string's secret and certificate count, its address only where ``address`` is None.

    Raises UsageError for a bad address or join string, and for ``secure`` on loopback without one.
    """
    given = None if address is None else parse_address(address) if isinstance(address, str) else address
    text, place = os.environ.get("W5XDE_JOIN", ""), "W5XDE_JOIN"
    if named := join_file or os.environ.get("W5XDE_JOIN_FILE", ""):
        text, place = read_secret_file(Path(named), kind="join file"), f"join file {named}"
    if text:
        told = Invitation.parse(text, place=place)
        return (told if given is None else replace(told, host=given[0], port=given[1], also=())).reveal()
    host, port = given or default
    if secure and is_loopback(host):
        raise UsageError(
            "secure=True on this machine needs the server's join file: give join_file=, or set W5XDE_JOIN_FILE; "
            "the server writes it (file join in its checkpoint_dir)"
        )
    return format_address(host, port)
