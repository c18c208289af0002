"""Whatever lies in a run directory in a file's place, a start neither waits for it nor reads without end."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.cluster import settings, train
from tests.support.jobs import mlp_sgd
from torch import nn

from w5xde_async.coordinator import service
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import DiskHangs, UsageError, W5xdeError
from w5xde_async.job import Job
from w5xde_async.store.rundir import RunDir
from w5xde_async.telemetry.events import Bus, Event, Warned


def job() -> Job:
    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"norm": float(sum(parameter.norm() for parameter in model.parameters()))}

    return replace(mlp_sgd(), evaluate=evaluate, evaluate_every=2, keep_best="min:norm")


async def run(directory: Path, steps: int) -> str:
    config = {"max_steps": steps, "durability": "journal", "insecure": False}
    return (await train(job, run_dir=directory, **config)).digest


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("put", [pipe, endless])
async def test_what_is_no_file_is_named_at_once_or_makes_no_difference(tmp_path: Path, put: object) -> None:
    assert callable(put)
    await run(tmp_path / "run", 4)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    digest = await run(tmp_path / "whole", 6)
    names = [path.relative_to(tmp_path / "run") for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(names) >= 10
    refused = []
    for name in names:
        directory = tmp_path / "tried"
        shutil.copytree(tmp_path / "run", directory)
        (directory / name).unlink()
        put(directory / name)
        try:
            ended = await run(directory, 6)
        except W5xdeError as error:
            ended = str(error)
            refused.append(str(name))
        assert ended == digest or name.name in ended, name
        shutil.rmtree(directory)
    assert {"run.json", ".lock"} <= set(refused)


async def test_a_start_that_hangs_says_so_and_ends_when_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a network's disk does not answer."""
    answered, loop, events = asyncio.Event(), asyncio.get_running_loop(), list[Event]()

    class Waiting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 1)
            asyncio.run_coroutine_threadsafe(answered.wait(), loop).result()

    bus, freed, close = Bus(), asyncio.Event(), RunDir.close

    def closed(directory: RunDir) -> None:
        close(directory)
        loop.call_soon_threadsafe(freed.set)

    monkeypatch.setattr(RunDir, "close", closed)
    bus.subscribe(events.append)
    monkeypatch.setattr(service, "_SLOW_START_S", 0.05)
    monkeypatch.setattr(service, "deadline_s", lambda grace_s, nbytes: 1.0)
    slow = replace(mlp_sgd(), model=Waiting, optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1))
    coordinator = Coordinator(slow, run_dir=tmp_path / "run", config=settings(), bus=bus)
    starting = asyncio.create_task(coordinator.start())
    while not events:  # noqa: ASYNC110 - until it says what it waits for
        await asyncio.sleep(0.01)
    coordinator.request_stop("SIGTERM")
    try:
        with pytest.raises(DiskHangs, match="the start did not end in time"):
            await asyncio.wait_for(starting, 20.0)
    finally:
        answered.set()
    await asyncio.wait_for(freed.wait(), 20.0)  # its thread has come to its end, and nobody had to wait for it
    assert (await train(mlp_sgd, run_dir=tmp_path / "run", max_steps=2)).step == 2
    said = [event.text for event in events if isinstance(event, Warned)]
    assert "the run has been in preparation" in said[0]
    assert "ends without waiting longer" in said[1]


def _waiting() -> tuple[Job, asyncio.Event, asyncio.Event]:
    """A job whose model is made, which is told, when it is answered."""
    answered, built, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    class Waiting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 1)
            loop.call_soon_threadsafe(built.set)
            asyncio.run_coroutine_threadsafe(answered.wait(), loop).result()

    slow = replace(mlp_sgd(), model=Waiting, optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1))
    return slow, built, answered


async def test_a_stop_that_is_asked_for_while_the_run_is_prepared_ends_it_before_its_first_step(tmp_path: Path) -> None:
    slow, built, answered = _waiting()
    coordinator = Coordinator(slow, run_dir=tmp_path / "run", config=settings())
    starting = asyncio.create_task(coordinator.start())
    await built.wait()
    coordinator.request_stop("asked over HTTP")
    answered.set()
    await starting
    result = await asyncio.wait_for(coordinator.wait(), 20.0)
    assert (result.outcome, result.reason, result.step) == ("stopped", "asked over HTTP", 0)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_start_that_is_cancelled_holds_nothing_however_often_it_is(tmp_path: Path, times: int) -> None:
    """Scopes of anyio cancel until they are left."""
    slow, built, answered = _waiting()
    coordinator = Coordinator(slow, run_dir=tmp_path / "run", config=settings())
    starting = asyncio.create_task(coordinator.start())
    await built.wait()
    for _ in range(times):
        starting.cancel()
        await asyncio.sleep(0)
    answered.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert coordinator._freeing is not None
    await asyncio.wait_for(coordinator._freeing, 20.0)
    async with Coordinator(mlp_sgd(), run_dir=tmp_path / "run", config=settings()) as again:
        assert again.step == 0


async def test_one_start_at_a_time() -> None:
    coordinator = Coordinator(mlp_sgd(), config=settings())
    first, second = await asyncio.gather(coordinator.start(), coordinator.start(), return_exceptions=True)
    assert first is None
    assert isinstance(second, UsageError)
    await coordinator.aclose()
