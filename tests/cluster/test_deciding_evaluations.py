"""A kill while an evaluation is made that decides (``stop_when``, ``keep_best``): it is made after the resume, and the
run ends where it would have ended."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support import jobs
from tests.support.cluster import QUICK_WORKER, settings, train
from torch import nn

from w5xde_async.coordinator.run.run import Run
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.coordinator.sync.training import SyncTraining
from w5xde_async.job import Job
from w5xde_async.telemetry.events import Evaluated, Event, StepCommitted
from w5xde_async.telemetry.recorder import Recorder, recorded
from w5xde_async.telemetry.records import to_line
from w5xde_async.worker.executors.executor import Computed, HeldLease, Send
from w5xde_async.worker.executors.in_place import InPlaceExecutor
from w5xde_async.worker.service import Worker

AT = 6  # evaluated every third step, and finished by the second evaluation


def job(evaluate: Any = lambda model: {"loss": float(model(jobs.digits()[0][:64]).square().mean())}) -> Job:
    calls: list[float] = []

    def stop_when(metrics: Any) -> bool:
        calls.append(metrics["loss"])
        return evaluations(metrics) >= 2

    def evaluations(metrics: Any) -> int:
        return int(metrics["norm"])

    def measured(model: nn.Module) -> dict[str, float]:
        # A number that says how far training is, whoever asks and however often: parameters move at every step.
        found = evaluate(model)
        return {**found, "norm": found.get("norm", 0.0)}

    return replace(
        jobs.mlp_sgd(), evaluate=measured, evaluate_every=3, stop_when=stop_when, keep_best="loss", max_steps=12,
        epochs=None,
    )  # fmt: skip


async def killed(make: Callable[[], Job], left: Path, **config: Any) -> None:
    """``left`` is what a kill -9 leaves while step ``AT`` is evaluated: all of that step, and no word of an end."""
    await train(
        lambda: replace(make(), max_steps=AT, evaluate=None, stop_when=None, keep_best=None), run_dir=left, **config
    )
    path = left / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"run_finished"' not in line))


@pytest.mark.parametrize(
    "config",
    [{"checkpoint_every": AT}, {"durability": "journal", "checkpoint_every": 1000}],  # no other is under way then
    ids=["checkpoint", "journal"],
)
async def test_a_kill_in_the_midst_of_it_changes_neither_end_nor_bits(tmp_path: Path, config: dict[str, Any]) -> None:
    steps, calls = {3: 1.0, 6: 2.0}, 0

    def made() -> Job:
        def evaluate(model: nn.Module) -> dict[str, float]:
            nonlocal calls
            calls += 1
            return {"loss": 1.0 / calls, "norm": steps[3 * calls]}

        return job(evaluate)

    undisturbed = await train(made, run_dir=tmp_path / "whole", **config)
    assert undisturbed.step == AT
    calls = 0
    await killed(made, tmp_path / "left", **config)
    calls, events = 1, list[Event]()  # the second is made again
    resumed = await train(made, run_dir=tmp_path / "left", events=events, **config)
    assert [event.step for event in events if isinstance(event, Evaluated)] == [AT]
    assert (resumed.step, resumed.reason) == (undisturbed.step, undisturbed.reason)
    assert resumed.digest == undisturbed.digest
    assert resumed.best is not None
    assert resumed.best.step == AT

    calls, steps = 0, {3: 1.0, 6: 1.0, 9: 1.0, 12: 1.0}  # and who goes on after such an end is not ended by it again
    further = await train(made, run_dir=tmp_path / "left", **config)
    assert further.step == 12
    assert calls == 2


async def test_the_step_under_way_is_not_committed_however_soon_an_evaluation_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finish, compute, finished = SyncTraining.finish, InPlaceExecutor.compute, threading.Event()

    def told(self: SyncTraining) -> None:
        finish(self)
        finished.set()

    def late(self: InPlaceExecutor, held: HeldLease, send: Send) -> Computed:
        if held.message.version == AT:
            finished.wait(30)
        return compute(self, held, send)

    monkeypatch.setattr(SyncTraining, "finish", told)
    monkeypatch.setattr(InPlaceExecutor, "compute", late)
    made = replace(
        job(lambda model: {"loss": 1.0, "norm": 2.0}), evaluate_every=AT, stop_when=lambda metrics: True, keep_best=None
    )
    result = await train(lambda: made)
    assert result.step == AT


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
async def test_an_evaluation_is_recorded_before_the_next_step_counts(
    durability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a kill in that step, from which a journal resumes, would leave no trace of it."""
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(Recorder, "_write_on", lambda self: None)  # what is written is written because it must be
    monkeypatch.setattr(
        Recorder, "_append", lambda self, data: lines.extend(map(json.loads, data.decode().splitlines()))
    )
    found: dict[int, list[int]] = {}

    class Heard(list[Event]):
        def append(self, event: Event) -> None:
            if isinstance(event, StepCommitted) and event.step % 3 == 1:
                found[event.step] = [line["step"] for line in lines if line["event"] == "evaluated"]

    await train(lambda: replace(job(), stop_when=None), run_dir=tmp_path, events=Heard(), durability=durability)
    assert found == {1: [], 4: [3], 7: [3, 6], 10: [3, 6, 9]}


async def test_a_stop_waits_for_no_evaluation_and_commits_nothing_beyond_it(tmp_path: Path) -> None:
    begun, hold = threading.Event(), threading.Event()

    def evaluate(model: nn.Module) -> dict[str, float]:
        begun.set()
        hold.wait(30)
        return {"loss": 1.0, "norm": 2.0}

    made = job(evaluate)
    async with Coordinator(made, run_dir=tmp_path / "run", config=settings()) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=made, config=QUICK_WORKER).run())
        await asyncio.to_thread(begun.wait, 30)
        coordinator.request_stop()
        asyncio.get_running_loop().call_later(0.2, hold.set)
        result = await coordinator.wait()
        worker.cancel()  # it would wait for the next start
        await asyncio.gather(worker, return_exceptions=True)
    assert result.step == 3


@pytest.mark.parametrize("in_flight", [True, False])
async def test_a_stop_does_not_overrule_what_an_evaluation_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_flight: bool
) -> None:
    """It is under way when somebody stops the run, and finishes it; now, or after the resume."""
    begun, hold, decided, holds = threading.Event(), threading.Event(), threading.Event(), True
    end_early = Run._end_early

    def told(self: Run) -> None:
        end_early(self)
        decided.set()

    def evaluate(model: nn.Module) -> dict[str, float]:
        if holds:
            begun.set()
            hold.wait(30)
        return {"loss": 1.0, "norm": 2.0}

    compute = InPlaceExecutor.compute

    def late(self: InPlaceExecutor, held: HeldLease, send: Send) -> Computed:
        if holds and in_flight and held.message.version == AT:
            decided.wait(5)  # what is in flight comes after the decision
        return compute(self, held, send)

    monkeypatch.setattr(InPlaceExecutor, "compute", late)
    monkeypatch.setattr(Run, "_end_early", told)
    made = replace(job(evaluate), evaluate_every=AT)
    async with Coordinator(made, run_dir=tmp_path / "run", config=settings()) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=made, config=QUICK_WORKER).run())
        await asyncio.to_thread(begun.wait, 30)
        coordinator.request_stop()
        asyncio.get_running_loop().call_later(0.1, hold.set)
        result = await coordinator.wait()
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    assert result.step == AT
    if result.outcome == "stopped":
        holds = False
        result = await train(lambda: made, run_dir=tmp_path / "run")
    assert (result.outcome, result.step) == ("finished", AT)


@pytest.mark.parametrize(
    ("records", "finished"),
    [
        ([], False),
        ([("evaluated", 6, "")], False),  # killed before anybody was asked
        ([("evaluated", 6, ""), ("run_finished", 6, "finished")], True),
        ([("evaluated", 6, ""), ("run_finished", 6, "stopped")], False),  # perhaps before ``stop_when`` was heard
        ([("evaluated", 6, ""), ("run_finished", 6, "failed")], False),
        ([("run_finished", 6, "finished"), ("run_finished", 9, "finished")], True),
        ([("run_finished", 6, "finished"), ("run_finished", 6, "stopped")], False),
        ([("evaluated", 9, ""), ("run_finished", 9, "finished")], False),
    ],
)
def test_a_run_that_was_finished_has_decided(
    tmp_path: Path, records: list[tuple[str, int, str]], finished: bool
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(to_line({"event": e, "step": s, "outcome": o}) for e, s, o in records))
    assert recorded(path, 6).finished is finished
    assert recorded(tmp_path / "none", 6) == (0, False, None)


def test_of_a_recorded_step_the_loss_is_known_where_it_is_finite(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    losses = [(5, 0.75), (6, 0.5), (6, 0.25), (7, "nan")]
    path.write_text("".join(to_line({"event": "step_committed", "step": s, "loss": loss}) for s, loss in losses))
    assert [recorded(path, step) for step in (5, 6, 7, 8)] == [
        (7, False, 0.75), (7, False, 0.25), (7, False, None), (7, False, None),
    ]  # fmt: skip
