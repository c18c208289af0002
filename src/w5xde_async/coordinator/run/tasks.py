"""The tasks of a run beside its training: evaluations, checkpoints, what ticks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class RunTasks(asyncio.TaskGroup):
    """A group in which no task ends the others: what one raises is given to ``on_error``.

    The group would cancel all that is under way, and with it the last checkpoint and the workers' goodbye.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        super().__init__()
        self._on_error = on_error

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        async def guarded() -> Any:
            try:
                return await coro
            except Exception as error:
                self._on_error(error)

        task = super().create_task(guarded(), **options)
        task.add_done_callback(lambda _: coro.close())  # cancelled before it began
        return task
