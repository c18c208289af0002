"""What a coordinator and a worker take from the machine they run on: a clock, threads, links, files, random bytes.

An application that embeds them may give its own of any of these, for instance a pool that it shares or a listener on
something other than TCP; tests give virtual time, links in memory and a disk that fails. Sleeping and timeouts are the
event loop's matter, and so are short blocking calls, which go to the loop's default executor.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from w5xde_async.errors import LocalError, UsageError
from w5xde_async.net import endpoint
from w5xde_async.net.link import Link
from w5xde_async.store.filesystem import Filesystem

_MOST_RACES, _RACE_S = 1000, 0.01  # between threads that start programs: one takes a few milliseconds


class Listening(Protocol):
    """What ``listen`` returns: it accepts links until it is told to stop."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection that was accepted elsewhere like one of its own, until that has ended."""

    async def stop_accepting(self) -> None:
        """Accept no further link; those that are open stay."""

    async def aclose(self) -> None:
        """Close everything, and return when nothing of it is left."""


def thread_pool(count: int, name: str) -> Executor:
    """So many threads of its own."""
    return ThreadPoolExecutor(count, thread_name_prefix=name)


def loop_factory(kind: str = "auto") -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes event loops of a kind: ``asyncio`` (None: the standard library's), ``uvloop``, or ``auto``.

    ``auto`` is uvloop where it is installed and works, which it does not on Windows. Raises UsageError where uvloop is
    asked for by name and is not installed.
    """
    if kind == "asyncio" or (kind == "auto" and sys.platform == "win32"):
        return None
    try:
        import uvloop
    except ImportError:
        if kind == "auto":
            return None
        raise UsageError("--loop uvloop: uvloop is not installed; install it, or give --loop asyncio") from None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where time, threads, links, files and random bytes come from.

    clock         seconds that never go back; may stand anywhere (``time.monotonic``)
    wall          seconds since 1970, for records that people read (``time.time``)
    executor      ``executor(threads, name)`` makes a pool; its owner shuts it down. Pools of one thread run one call
                  at a time, in order
    wait          ``wait(event, seconds)``, by which a compute thread waits for the loop (``threading.Event.wait``)
    listen        as ``net.endpoint.listen``
    connect       as ``net.endpoint.connect``
    filesystem    through it everything in a run directory is written that must last
    random_bytes  for ids, and for what a worker must not foresee (``os.urandom``)
    """

    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    executor: Callable[[int, str], Executor] = thread_pool
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait
    listen: Callable[..., Awaitable[Listening]] = endpoint.listen
    connect: Callable[..., Awaitable[Link]] = endpoint.connect
    filesystem: Filesystem = field(default_factory=Filesystem)
    random_bytes: Callable[[int], bytes] = os.urandom


async def start_process(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """As ``asyncio.create_subprocess_exec``, also where a loop of another thread is just starting one: uvloop refuses
    that then; and where the directory of this process has been removed, in which no process could load torch. Raises as
    it does, and LocalError where that does not end."""
    try:
        os.getcwd()
    except FileNotFoundError:
        options.setdefault("cwd", os.sep)
    for _ in range(_MOST_RACES):
        try:
            return await asyncio.create_subprocess_exec(*command, **options)
        except RuntimeError as error:
            if "Racing with another loop" not in str(error):
                raise
        await asyncio.sleep(_RACE_S)
    raise LocalError(f"{command[0]} could not be started: other threads start programs all the time")


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process; False where the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False
