"""What a coordinator and a worker take from the machine they run on: a clock, threads, links, files, random bytes.

An application that embeds them may give its own of any of these, for instance a pool that it shares or a listener on
something other than TCP; tests give virtual time, links in memory and a disk that fails. Sleeping and timeouts are the
event loop's matter, and so are short blocking calls, which go to the loop's default executor.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from w5xde_async.net import endpoint
from w5xde_async.net.link import Link
from w5xde_async.store.filesystem import Filesystem

__all__ = ["Listening", "Runtime", "thread_pool"]


class Listening(Protocol):
    """What ``listen`` returns: it accepts links until it is told to stop."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    async def stop_accepting(self) -> None:
        """Accept no further link; those that are open stay."""

    async def aclose(self) -> None:
        """Close everything, and return when nothing of it is left."""


def thread_pool(count: int, name: str) -> Executor:
    """So many threads of its own."""
    return ThreadPoolExecutor(count, thread_name_prefix=name)


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
