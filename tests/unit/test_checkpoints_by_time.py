"""When a checkpoint is due: by steps, and by time where steps are slow."""

from __future__ import annotations

import asyncio
import errno
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.durability.checkpointing import Checkpointing, CheckpointPolicy
from w5xde_async.coordinator.training import Commit
from w5xde_async.store.checkpoint import CheckpointStore, Record
from w5xde_async.telemetry.events import Bus, CheckpointFailed, CheckpointSaved


class Parameters:
    torn = False

    def submit(self, call: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(call())
        return future


class State:
    version = 0

    def record(self, step: int, samples: int) -> Record:
        return Record(step=step, meta={}, groups={})


class Members:
    """As much of a phase as is asked for here."""

    samples_applied = 0

    def note_beside(self, names: Sequence[str]) -> None:
        assert not names


async def saved_at(
    times: list[float], tmp_path: Path, *, every: int = 500, every_s: float = 600.0, broken: range = range(0)
) -> tuple[list[int], list[int]]:
    """Steps that end at these times, in seconds; those that were saved, and those at which that failed."""
    now, saved, failed = [0.0], [], []  # type: list[float], list[int], list[int]
    bus = Bus()

    def told(event: Any) -> None:
        if isinstance(event, CheckpointSaved):
            saved.append(event.step)
        elif isinstance(event, CheckpointFailed):
            failed.append(event.step)

    bus.subscribe(told)
    training: Any = SimpleNamespace(aggregator=Parameters(), phase=Members(), progress=0)
    folder = tmp_path / "checkpoints"
    policy = CheckpointPolicy(store=CheckpointStore(folder), every=every, every_s=every_s)
    checkpointing = Checkpointing(policy, State(), training, bus, lambda: now[0])
    async with asyncio.TaskGroup() as tasks:
        for step, time_s in enumerate(times, 1):
            now[0] = time_s
            if step == broken.start:
                folder.write_text("in the way")
            elif step == broken.stop:
                folder.unlink()
            checkpointing.on_commit(Commit(step=step, before=step - 1), tasks)
            await checkpointing.settle()
    return saved, failed


async def test_slow_steps_are_saved_by_time(tmp_path: Path) -> None:
    times = [90.0 * step for step in range(1, 21)]
    assert await saved_at(times, tmp_path) == ([7, 14], [])  # at 630 s and 1260 s


async def test_whichever_comes_first(tmp_path: Path) -> None:
    """Three quick steps, a pause, then quick ones again: a checkpoint by steps begins the time anew."""
    times = [1.0, 2.0, 3.0, 602.0, 603.0, 604.0, 605.0, 700.0, 1202.5, 1203.5]
    assert (await saved_at(times, tmp_path, every=4))[0] == [4, 8]
    assert (await saved_at([*times, 1301.0], tmp_path / "more", every=9))[0] == [4, 9]


async def test_a_disk_that_fails_is_tried_again_sooner(tmp_path: Path) -> None:
    saved, failed = await saved_at([601.0, 602.0, 640.0, 1239.0, 1240.0], tmp_path, broken=range(1, 3))
    assert (saved, failed) == ([3, 5], [1])


async def test_by_steps_alone(tmp_path: Path) -> None:
    assert (await saved_at([1e6 * n for n in range(1, 9)], tmp_path, every=4, every_s=math.inf))[0] == [4, 8]


def test_the_default_is_ten_minutes() -> None:
    assert CoordinatorConfig().checkpoint_time_s == 600.0


@pytest.mark.parametrize("lost", [True, False])
async def test_the_last_one_is_written_again_where_it_was_deleted(lost: bool, tmp_path: Path) -> None:
    """With the run directory, after the last commit: no later step brings another."""
    bus, saved = Bus(), list[int]()
    bus.subscribe(lambda event: saved.append(event.step) if isinstance(event, CheckpointSaved) else None)
    training: Any = SimpleNamespace(aggregator=Parameters(), phase=Members(), progress=1)
    store = CheckpointStore(tmp_path / "checkpoints")
    policy = CheckpointPolicy(store=store, every=1, every_s=600.0)
    checkpointing = Checkpointing(policy, State(), training, bus, lambda: 0.0)
    async with asyncio.TaskGroup() as tasks:
        checkpointing.on_commit(Commit(step=1, before=0), tasks)
        await checkpointing.settle()
        if lost:
            await asyncio.to_thread(shutil.rmtree, tmp_path / "checkpoints")
        await checkpointing.save_last()
    assert saved == ([1, 1] if lost else [1])
    assert await asyncio.to_thread(store.steps) == [1]


async def test_where_another_rule_goes_on_what_was_saved_and_asked_for_is_known(tmp_path: Path) -> None:
    bus, told = Bus(), list[Any]()
    bus.subscribe(told.append)
    before: Any = SimpleNamespace(aggregator=Parameters(), phase=Members(), progress=3)
    after: Any = SimpleNamespace(aggregator=Parameters(), phase=Members(), progress=3)
    folder = tmp_path / "checkpoints"
    full = list[OSError]()

    def before_save() -> None:
        for error in full:
            raise error

    policy = CheckpointPolicy(store=CheckpointStore(folder), every=3, every_s=600.0, before_save=before_save)
    checkpointing = Checkpointing(policy, State(), before, bus, lambda: 0.0)
    async with asyncio.TaskGroup() as tasks:
        checkpointing.on_commit(Commit(step=3, before=2), tasks)
        await checkpointing.settle()
        checkpointing.request()
        checkpointing.go_on_with(State(), after)
        full.append(OSError(errno.ENOSPC, "no space left"))
        checkpointing.on_commit(Commit(step=4, before=3), tasks)
        await checkpointing.settle()
        full.clear()
        await checkpointing.save_last()  # of the other rule nothing has been saved, though the step is the same
    saved = [event.step for event in told if isinstance(event, CheckpointSaved)]
    (failed,) = [event for event in told if isinstance(event, CheckpointFailed)]
    assert (saved, failed.step, failed.safe_step) == ([3, 3], 4, 3)
