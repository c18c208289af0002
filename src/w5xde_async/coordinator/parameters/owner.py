"""The owner of the parameters: one thread in which they are changed, copied and encoded.

What is submitted to that thread runs in order, so it sees the parameters between two commits, never inside one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from w5xde_async.coordinator.training import RunContext
from w5xde_async.errors import LeafFailed, UpdateFailed
from w5xde_async.openmp import release_helpers
from w5xde_async.updates.sync import SchedulerFailed

_T = TypeVar("_T")


class ParameterOwner:
    """Parameters and their thread. ``aggregator`` and ``outer_aggregator`` say how results become parameters."""

    def __init__(self, context: RunContext) -> None:
        self.layout, self.state = context.layout, context.state
        self.torn = False  #: an update broke off: the parameters are not those of any version
        self.closed = False  #: nothing may be submitted any more
        self._clock = context.clock
        self._executor = context.executor or ThreadPoolExecutor(1, thread_name_prefix="w5xde-aggregate")
        self._calls: set[Future[Any]] = set()  # under way, and those that wait for the thread

    def submit(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        """Run ``call`` in the thread that owns the parameters: between two commits, never inside one."""
        return asyncio.wrap_future(self._begin(call))

    def post(self, call: Callable[[], object]) -> None:
        """As ``submit``, where nobody waits, and nothing is done any more once it is closed."""
        if not self.closed:
            self._begin(call)

    def _begin(self, call: Callable[[], _T]) -> Future[_T]:
        future = self._executor.submit(call)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of every tensor, by entry name. To be submitted."""
        with torch.no_grad():
            views = zip(self.layout.entries, self.state.views, strict=True)
            copies = {entry.name: view.clone() for entry, view in views}
        release_helpers()
        return copies

    def trains_finite(self) -> bool:
        """Whether every parameter that is trained is finite. To be submitted."""
        try:
            return self.state.trains_finite
        finally:
            release_helpers()

    async def aclose(self) -> None:
        """Wait for the thread."""
        self.closed = True
        await asyncio.get_running_loop().run_in_executor(None, self._executor.shutdown)

    @property
    def is_idle(self) -> bool:
        """Whether everything that was submitted is done."""
        return not self._calls

    def abandon(self) -> None:
        """Nobody waits for an update under way: what comes of it are parameters of no version."""
        self.torn = True

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What is done in it is done whole, or the parameters, and what goes with them, count as ``torn``."""
        try:
            yield
        except SchedulerFailed:
            raise
        except BaseException:
            self.torn = True
            raise

    async def _failed(self, step: int, error: Exception) -> UpdateFailed:
        """What is raised for an ``error`` of the update, or of what follows it, at ``step``."""
        hint = ""
        if isinstance(error, SchedulerFailed):
            hint, error = error.hint, error.error
        told = await self.submit(partial(LeafFailed.shown, error))  # reads source files
        return UpdateFailed(step, error, told, hint)
