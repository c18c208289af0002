"""What a task beside the training raises ends no other."""

from __future__ import annotations

import asyncio

from w5xde_async.coordinator.run.tasks import RunTasks


async def test_what_one_raises_is_handed_on_and_the_others_go_on() -> None:
    heard, done = list[Exception](), list[str]()

    async def raises(error: Exception) -> None:
        raise error

    async def waits(until: asyncio.Event) -> None:
        await until.wait()
        done.append("the other")

    error, until = MemoryError("a copy"), asyncio.Event()
    async with RunTasks(heard.append) as tasks:
        tasks.create_task(waits(until), name="the other")
        await asyncio.wait([tasks.create_task(raises(error), name="one")])
        assert heard == [error]
        never = tasks.create_task(waits(until), name="cancelled before it begins")
        never.cancel()
        until.set()
    assert never.cancelled()
    assert done == ["the other"]
