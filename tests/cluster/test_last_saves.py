"""The last saves of a run: workers are kept while they last, and a disk that hangs holds nobody for ever."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from tests.support import jobs
from tests.support.cluster import QUICK_WORKER, Commits, settings, train

from w5xde_async import process as program
from w5xde_async.coordinator.durability.journal_writer import MOST_AHEAD
from w5xde_async.coordinator.outer.training import OuterTraining
from w5xde_async.coordinator.run import shutdown
from w5xde_async.coordinator.run.shutdown import ShutdownDeadline, deadline_s
from w5xde_async.coordinator.run_result import RunResult
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.coordinator.sync.training import SyncTraining
from w5xde_async.errors import DiskHangs, ExitCode, UpdateFailed, W5xdeError
from w5xde_async.hub.members.roster import Roster
from w5xde_async.job import Job
from w5xde_async.settings import CoordinatorSettings
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.store.filesystem import Filesystem
from w5xde_async.telemetry.events import Bus, Evaluated, Event, JournalFailed, RunFinished, Warned, WorkerLeft
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.service import Departure, RunFailed, Worker


async def test_workers_hear_of_the_coordinator_while_the_last_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take longer than they bear silence; only when it is on the disk are they told that they may go."""
    enough, told = threading.Event(), 0
    save, tick = CheckpointStore.save, SyncTraining.tick
    events: list[Event] = []

    def slow(self: CheckpointStore, record: Any) -> Any:
        assert enough.wait(60), "nobody was told that the coordinator lives"
        return save(self, record)

    def count(self: SyncTraining, now: float) -> None:
        nonlocal told
        tick(self, now)
        told += self.progress >= self.total_steps
        if told == 3:
            enough.set()

    monkeypatch.setattr(CheckpointStore, "save", slow)
    monkeypatch.setattr(SyncTraining, "tick", count)
    config = settings(heartbeat_s=0.05, checkpoint_every=500)
    coordinator = Coordinator(jobs.metrics(), run_dir=tmp_path / "run", config=config, callbacks=[events.append])
    async with coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=jobs.metrics(), config=QUICK_WORKER).run())
        result = await coordinator.wait()
        assert await worker is Departure.FINISHED
    assert result.outcome == "finished"
    assert len([event for event in events if isinstance(event, WorkerLeft)]) == 1


# -- a disk that hangs


class Hanging:
    """From ``begin`` on, syncs of some files do not return until the test is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self._name, self._over, self.begun = name, threading.Event(), False
        self.met = threading.Event()
        self._sync = Filesystem.sync
        monkeypatch.setattr(Filesystem, "sync", lambda filesystem, file: self.sync(filesystem, file))

    def sync(self, filesystem: Filesystem, file: BinaryIO) -> None:
        if self.begun and self._name in str(file.name):
            self.met.set()
            self._over.wait()
        self._sync(filesystem, file)

    def end(self) -> None:
        self._over.set()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Hanging]:
    monkeypatch.setattr(shutdown, "LEAST_S", 0.05)
    monkeypatch.setattr("w5xde_async.coordinator.service.deadline_s", lambda *_: 2.0)
    disk = Hanging(monkeypatch, request.param)
    yield disk
    disk.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hanging", "durability", "what"),
    [("checkpoints", "checkpoint", "the last checkpoint"), ("journal", "journal", "the step under way")],
    indirect=["hanging"],
)
async def test_a_disk_that_hangs_does_not_hold_a_stop_for_ever(
    tmp_path: Path, hanging: Hanging, durability: str, what: str
) -> None:
    commits, events = Commits(), []
    commits.bus.subscribe(events.append)
    config = settings(durability=durability, max_steps=100_000, max_time_s=60.0, heartbeat_s=0.05, grace_s=0.1)
    async with Coordinator(jobs.metrics(), run_dir=tmp_path / "run", config=config, bus=commits.bus) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=jobs.metrics(), config=QUICK_WORKER).run())
        await commits.reach(3)
        hanging.begun = True
        if (journaling := coordinator._journal) is not None:
            while not hanging.met.is_set() or journaling._pending < MOST_AHEAD:  # noqa: ASYNC110 - the step path waits
                await asyncio.sleep(0.001)
        coordinator.request_stop("SIGTERM")
        with pytest.raises(DiskHangs, match=what):
            await coordinator.wait()
        hanging.end()
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    assert hanging.met.is_set()
    assert any(isinstance(event, Warned) and "ends without waiting longer" in event.text for event in events)
    assert any(isinstance(event, JournalFailed) for event in events) == (durability == "journal")
    (finished,) = [event for event in events if isinstance(event, RunFinished)]
    assert (finished.outcome, finished.model_path) == ("stopped", "")


async def test_a_plot_that_takes_its_time_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread is left to itself, and puts no picture there when the directory may be another's."""
    over, seen = threading.Event(), list[bool]()

    def draw(metrics: Path, picture: Path, given_up: Callable[[], bool]) -> bool:
        over.wait(60)
        seen.append(given_up())
        return False

    monkeypatch.setattr(shutdown, "DRAWING_S", 0.05)
    monkeypatch.setattr(shutdown, "draw_loss", draw)
    events: list[Event] = []
    try:
        result = await train(jobs.metrics, run_dir=tmp_path / "run", events=events, max_steps=3)
    finally:
        over.set()
    assert (result.outcome, result.metrics_path, result.plot_path) == (
        "finished", tmp_path / "run" / "metrics.jsonl", None,
    )  # fmt: skip
    assert [event.text for event in events if isinstance(event, Warned)] == ["no plot: it was not drawn within 0 s"]
    await asyncio.get_running_loop().shutdown_default_executor()
    assert seen == [True]


async def test_patience_is_shared_and_what_does_not_hang_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "LEAST_S", 0.01)
    said: list[DiskHangs] = []
    deadline = ShutdownDeadline(0.05, said.append)
    assert await deadline.wait(asyncio.sleep(0, "done"), "nothing") == "done"
    for what in ("one", "another"):
        never = asyncio.get_running_loop().create_future()
        assert await deadline.wait(never, what, "/runs/digits") is None
        assert never.cancelled()
    assert await deadline.wait(asyncio.sleep(0, "done"), "nothing") == "done"
    assert said == [deadline.error]
    assert str(said[0]).startswith("/runs/digits: one did not end in time")


class Ending(torch.optim.lr_scheduler.LambdaLR):
    """Raises where OneCycleLR does at its end: half way through a step that belongs to the ``end``-th update."""

    end = -1

    def get_lr(self) -> list[float]:
        if self.last_epoch == self.end:
            raise ValueError("the schedule is over")
        return super().get_lr()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("rule", ["sync", "async"])
async def test_a_scheduler_that_raises_costs_no_step(tmp_path: Path, rule: str, nested: bool) -> None:
    """What was done by then is saved, and a run whose scheduler is mended goes on from there: the same bits."""

    def job() -> Job:
        def scheduler(optimizer: torch.optim.Optimizer) -> Any:
            one = Ending(optimizer, lambda step: 0.9**step)
            return torch.optim.lr_scheduler.ChainedScheduler([one]) if nested else one

        return replace(jobs.metrics(), scheduler=scheduler, max_steps=6, epochs=None)

    async def run(directory: str) -> RunResult:
        config = settings(checkpoint_every=500, update=UpdateConfig(rule=rule))
        coordinator = Coordinator(job(), run_dir=tmp_path / directory, config=config)
        async with coordinator:
            worker = asyncio.create_task(Worker(coordinator.address, job=job(), config=QUICK_WORKER).run())
            try:
                return await coordinator.wait()
            finally:
                await asyncio.gather(worker, return_exceptions=True)

    whole = await run("whole")
    try:
        Ending.end = 4
        with pytest.raises(UpdateFailed, match=r"raised ValueError: the schedule is over \(test_last_saves.py:"):
            await run("ended")
        (saved,) = await asyncio.to_thread(CheckpointStore(tmp_path / "ended" / "checkpoints").steps)
        assert saved == 4 if rule == "sync" else saved >= 4
        with pytest.raises(UpdateFailed, match="the schedule is over"):
            await run("ended")  # nothing has been mended
        Ending.end = 6
        ended = await run("ended")  # nobody needs what it raises after the last step
        assert (ended.outcome, ended.step) == ("finished", 6)
        if rule == "sync":
            assert ended.digest == whole.digest
    finally:
        Ending.end = -1


async def test_a_scheduler_that_raises_when_the_tick_gives_a_lease_ends_the_run_in_good_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a worker's line was full when the lease fell due."""
    ticking, tick, has_credit = [False], OuterTraining.tick, Roster.has_credit

    def ticked(training: OuterTraining, now: float) -> None:
        ticking[0] = True
        tick(training, now)
        ticking[0] = False

    monkeypatch.setattr(OuterTraining, "tick", ticked)
    monkeypatch.setattr(Roster, "has_credit", lambda roster, worker: ticking[0] and has_credit(roster, worker))
    job = replace(
        jobs.metrics(), scheduler=lambda optimizer: Ending(optimizer, lambda step: 1.0), max_steps=60, epochs=None
    )
    monkeypatch.setattr(Ending, "end", 6)
    config = settings(heartbeat_s=0.05, update=UpdateConfig(rule="local", inner_steps=2))
    async with Coordinator(job, run_dir=tmp_path / "run", config=config) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=job, config=QUICK_WORKER).run())
        with pytest.raises(UpdateFailed, match="the schedule is over"):
            await asyncio.wait_for(coordinator.wait(), 30.0)
        with pytest.raises(RunFailed, match="the schedule is over"):  # it is told
            await worker
        step = coordinator.step  # leases are given for steps ahead
    assert 0 < step <= 6
    assert await asyncio.to_thread(CheckpointStore(tmp_path / "run" / "checkpoints").steps) == [step]


@pytest.mark.parametrize("rule", ["sync", "local"])
async def test_a_run_that_stop_when_ends_is_finished_for_its_workers_too(tmp_path: Path, rule: str) -> None:
    seen: list[float] = []

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        return {"val_loss": 1.0 / (1 + len(seen))}

    def stop_when(metrics: Mapping[str, float]) -> bool:
        seen.append(metrics["val_loss"])
        return metrics["val_loss"] < 0.4

    job = replace(
        jobs.metrics(), evaluate=evaluate, evaluate_every=2, stop_when=stop_when, max_steps=100_000, epochs=None
    )
    config = settings(update=UpdateConfig(rule=rule, **({"inner_steps": 2} if rule == "local" else {})))
    coordinator = Coordinator(job, run_dir=tmp_path / "run", config=config)
    async with coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=job, config=QUICK_WORKER).run())
        result = await coordinator.wait()
        assert await asyncio.wait_for(worker, 10) is Departure.FINISHED
    assert result.outcome == "finished"
    assert result.reason.startswith("stop_when, at the evaluation of step ")
    assert result.step < 100_000
    assert seen[:3] == [1.0, 0.5, pytest.approx(1 / 3)]
    steps = await asyncio.to_thread(CheckpointStore(tmp_path / "run" / "checkpoints").steps)
    assert steps[-1] == result.step


async def test_a_stop_when_that_raises_ends_no_run() -> None:
    events: list[Event] = []

    def stop_when(metrics: Mapping[str, float]) -> bool:
        return metrics["val_lss"] < 0.4

    job = replace(
        jobs.metrics(), evaluate=lambda model: {"val_loss": 1.0}, evaluate_every=2, stop_when=stop_when, max_steps=4,
        epochs=None,
    )  # fmt: skip
    coordinator = Coordinator(job, config=settings(), callbacks=[events.append])
    async with coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=job, config=QUICK_WORKER).run())
        result = await coordinator.wait()
        await worker
    assert (result.outcome, result.step, result.reason) == ("finished", 4, "")
    said = [event.text for event in events if isinstance(event, Warned) and "stop_when" in event.text]
    assert len(said) == 1  # of two evaluations
    assert re.fullmatch(r"stop_when raised KeyError: 'val_lss' \(test_last_saves.py:\d+\); the run goes on", said[0])


def test_a_large_model_has_longer() -> None:
    assert deadline_s(10.0, 0) == 60.0
    assert deadline_s(0.0, 0) == 30.0
    assert deadline_s(10.0, 4 << 30) > 2000.0


@pytest.mark.usefixtures("as_a_program")
def test_the_program_does_not_wait_for_threads_that_hang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        raise Ended(code)

    async def body() -> int:
        raise DiskHangs("/runs/digits", "the last checkpoint")

    monkeypatch.setattr(program.os, "_exit", end)
    with pytest.raises(Ended) as ended:
        program.launch(
            lambda: CoordinatorSettings, ["job.py:job", "--loop", "asyncio"], prog="w5xde", prepare=lambda *_: body
        )
    assert ended.value.args == (ExitCode.ERROR,)
    assert "the last checkpoint did not end in time" in capsys.readouterr().err


@pytest.mark.usefixtures("as_a_program")
def test_the_program_prints_no_traceback_of_an_update_that_the_summary_has_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def body() -> int:
        raise UpdateFailed(3, ArithmeticError("stumbled"), "Traceback (most recent call last):\n  the optimizer's line")

    code = program.launch(
        lambda: CoordinatorSettings, ["job.py:job", "--loop", "asyncio"], prog="w5xde", prepare=lambda *_: body
    )
    assert code == ExitCode.ERROR
    assert capsys.readouterr().err.splitlines() == ["w5xde: the update after step 3 raised ArithmeticError: stumbled"]


@pytest.mark.parametrize("workers", [1, 2])
async def test_every_evaluation_counts_where_a_run_goes_by_them(workers: int) -> None:
    """However long they take: none that is due is left out, and the run ends at the step of the one that ended it."""
    asked: list[float] = []
    events: list[Event] = []

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        time.sleep(0.02 * (len(asked) % 3))  # longer than steps take
        return {"val_loss": 1.0}

    def stop_when(metrics: Mapping[str, float]) -> bool:
        asked.append(metrics["val_loss"])
        return len(asked) == 6

    job = replace(
        jobs.metrics(), evaluate=evaluate, evaluate_every=2, stop_when=stop_when, max_steps=100_000, epochs=None
    )
    bus = Bus()
    bus.subscribe(events.append)
    async with Coordinator(job, config=settings(min_workers=workers), bus=bus) as coordinator:
        running = [
            asyncio.create_task(Worker(coordinator.address, job=job, config=QUICK_WORKER).run()) for _ in range(workers)
        ]
        result = await coordinator.wait()
        await asyncio.gather(*running)
    assert [event.step for event in events if isinstance(event, Evaluated)] == [2, 4, 6, 8, 10, 12]
    assert (result.outcome, result.step) == ("finished", 12)


async def test_of_a_run_without_a_step_no_plot_is_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither of one that failed on its first step nor of one that was stopped before it."""

    def raises(*_: Any) -> Any:
        raise ValueError("not today")

    with pytest.raises(W5xdeError, match="not today"):
        await train(lambda: replace(jobs.metrics(), step=raises, loss=None), run_dir=tmp_path / "failed")
    async with Coordinator(jobs.metrics(), run_dir=tmp_path / "stopped", config=settings()) as coordinator:
        coordinator.request_stop("enough")
        result = await coordinator.wait()
    assert (result.outcome, result.plot_path) == ("stopped", None)
    assert [record.getMessage() for record in caplog.records if "plot" in record.getMessage()] == []
