"""The first of several ways that works."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from w5xde_async.net import racing
from w5xde_async.net.racing import NoneWorked, first_that_works


class Attempts:
    """What was begun, ended and discarded."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.discarded: list[str] = []

    def one(
        self, name: str, ends: Callable[[], Awaitable[object]] | None = None, error: Exception | None = None
    ) -> Callable[[], Awaitable[str]]:
        async def attempt() -> str:
            self.begun.append(name)
            try:
                if ends is not None:
                    await ends()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            if error is not None:
                raise error
            return name

        return attempt


async def test_the_first_that_works_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "DELAY_S", 0.001)
    seen = Attempts()
    attempts = [seen.one("slow", asyncio.Event().wait), seen.one("good"), seen.one("later")]
    assert await first_that_works(attempts, discard=seen.discarded.append) == "good"
    assert (seen.begun, seen.cancelled, seen.discarded) == (["slow", "good"], ["slow"], [])


async def test_the_next_begins_at_once_where_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "DELAY_S", 1e9)
    seen = Attempts()
    attempts = [seen.one("bad", error=OSError("no")), seen.one("good")]
    assert await first_that_works(attempts, discard=seen.discarded.append) == "good"
    with pytest.raises(NoneWorked) as caught:
        await first_that_works([attempts[0]] * 2, discard=seen.discarded.append)
    assert [str(error) for error in caught.value.errors] == ["no", "no"]


@pytest.mark.parametrize("turns", range(8))
async def test_cancelled_in_any_turn_it_leaves_nothing(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has worked already is discarded."""
    monkeypatch.setattr(racing, "DELAY_S", 0)
    seen = Attempts()
    attempts = [seen.one("a", lambda: asyncio.sleep(0)), seen.one("b", lambda: asyncio.sleep(0))]
    racing_task = asyncio.ensure_future(first_that_works(attempts, discard=seen.discarded.append))
    for _ in range(turns):
        await asyncio.sleep(0)
    cancelled = racing_task.cancel()
    (result,) = await asyncio.gather(racing_task, return_exceptions=True)
    kept = [] if isinstance(result, BaseException) else [result]
    assert cancelled != bool(kept)
    worked = set(seen.begun) - set(seen.cancelled)
    assert sorted([*kept, *seen.discarded]) == sorted(worked)


@pytest.mark.parametrize("turns", range(8))
async def test_of_two_that_worked_at_once_and_were_cancelled_none_is_left(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(racing, "DELAY_S", 0)
    seen, go = Attempts(), asyncio.Event()
    attempts = [seen.one("a", go.wait), seen.one("b", go.wait)]
    racing_task = asyncio.ensure_future(first_that_works(attempts, discard=seen.discarded.append))
    while len(seen.begun) < 2:  # noqa: ASYNC110 - both wait for the same
        await asyncio.sleep(0)
    go.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    racing_task.cancel()
    (result,) = await asyncio.gather(racing_task, return_exceptions=True)
    kept = [] if isinstance(result, BaseException) else [result]
    assert sorted([*kept, *seen.discarded, *seen.cancelled]) == ["a", "b"]
