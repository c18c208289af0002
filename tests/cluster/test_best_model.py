"""``Job.keep_best``: the weights of the best evaluation, in plain PyTorch, whatever the rule and over a resume."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import safetensors.torch
import torch
from tests.support import jobs
from tests.support.cluster import train
from torch import Tensor, nn

from w5xde_async import LocalCluster
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.durability import best
from w5xde_async.coordinator.service import RunResult
from w5xde_async.errors import JobError, UsageError
from w5xde_async.job import Job
from w5xde_async.params.layout import Layout
from w5xde_async.store.filesystem import Filesystem
from w5xde_async.store.rundir import RunDir
from w5xde_async.telemetry.events import Bus, Evaluated, Event, Warned
from w5xde_async.updates.config import UpdateConfig


class Scored:
    """An ``evaluate`` whose metric takes these values, and 9 from then on; it remembers what it was given."""

    def __init__(self, *values: float, metric: str = "val_loss") -> None:
        self.values, self.metric = iter(values), metric
        self.seen: list[tuple[float, dict[str, Tensor]]] = []

    def __call__(self, model: nn.Module) -> Mapping[str, float]:
        value = next(self.values, 9.0)
        self.seen.append((value, {name: tensor.clone() for name, tensor in model.state_dict().items()}))
        return {self.metric: value, "other": 1.0}

    def state(self, value: float) -> dict[str, Tensor]:
        (state,) = [state for seen, state in self.seen if seen == value]
        return state


def job(evaluate: Scored, keep_best: str = "val_loss", **changes: Any) -> Job:
    given = {"max_steps": 10, "epochs": None, "evaluate_every": 2, **changes}
    return replace(jobs.metrics(), evaluate=evaluate, keep_best=keep_best, **given)


def same(path: Path | str, state: Mapping[str, Tensor]) -> bool:
    kept = safetensors.torch.load_file(path)
    return kept.keys() == state.keys() and all(torch.equal(kept[name], state[name]) for name in kept)


async def run(scored: Scored, path: Path, **kwargs: Any) -> RunResult:
    of_job = {name: kwargs.pop(name) for name in ("keep_best", "max_steps", "stop_when") if name in kwargs}
    return await train(lambda: job(scored, **of_job), run_dir=path, **kwargs)


@pytest.mark.parametrize("rule", ["sync", "async", "local", "streaming", "async-local"])
async def test_the_best_evaluation_is_kept_as_plain_weights(tmp_path: Path, rule: str) -> None:
    scored, events = Scored(float("nan"), 3.0, 2.0, 8.0), []  # type: list[Event]
    local = {"inner_steps": 1} if rule in ("local", "streaming", "async-local") else {}
    result = await run(
        scored, tmp_path / "run", max_steps=100_000, stop_when=lambda metrics: metrics["val_loss"] == 8.0,
        events=events, update=UpdateConfig(rule=rule, **local),
    )  # fmt: skip
    best = result.best
    assert best is not None
    assert (best.metric, best.value, best.path) == ("val_loss", 2.0, str(tmp_path / "run" / "best.safetensors"))
    assert same(best.path, scored.state(2.0))
    told = {event.metrics["val_loss"]: (event.best, event.step) for event in events if isinstance(event, Evaluated)}
    assert told[2.0] == (True, best.step)
    assert (told[3.0][0], told[8.0][0]) == (True, False)


async def test_the_model_is_read_into_torch_and_tied_weights_with_it(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 10)
            self.second.weight = nn.Parameter(torch.zeros(10, 4))
            self.first.weight = nn.Parameter(torch.randn(4, 10))
            self.third = nn.Linear(10, 4)
            self.third.weight = self.first.weight

        def forward(self, x: Tensor) -> Any:
            out: Tensor = self.third(x + self.second(self.norm(self.first(x))))
            return out

    scored = Scored(2.0, 1.0)
    made = replace(job(scored), model=Tied, microbatch_size=10)
    result = await train(lambda: made, run_dir=tmp_path / "run")
    assert result.best is not None
    twin = Tied()
    safetensors.torch.load_model(twin, result.best.path)
    expected = scored.state(1.0)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in twin.state_dict().items())


@pytest.mark.slow
async def test_a_resume_goes_on_from_the_best_so_far(tmp_path: Path) -> None:
    path, scored = tmp_path / "run", Scored(5.0, 2.0, 4.0, 4.0, 4.0, 3.0, 1.0)
    result = await run(scored, path, max_steps=4)
    assert result.best is not None
    assert result.best.value <= 5.0
    before = min(value for value, _ in scored.seen)
    scored.values = iter([before + 1.0] * 2)
    again = await run(scored, path, max_steps=6)
    assert again.best is not None
    assert (again.best.value, again.best.step) == (before, result.best.step)
    assert same(path / "best.safetensors", scored.state(before))
    scored.values = iter([before - 1.0])
    better = await run(scored, path, max_steps=8)
    assert better.best is not None
    assert (better.best.value, better.best.step) == (before - 1.0, 8)
    assert same(path / "best.safetensors", scored.state(before - 1.0))


@pytest.mark.slow
async def test_a_best_of_a_course_that_was_left_or_of_another_metric_is_set_aside(tmp_path: Path) -> None:
    path, events = tmp_path / "run", []  # type: list[Event]
    await run(Scored(), path, max_steps=4, checkpoint_every=2)
    await run(Scored(*[1.0] * 9), path, max_steps=8)
    back = str(path / "checkpoints" / "step-000000004")
    scored = Scored(*[7.0] * 9)
    result = await run(scored, path, max_steps=6, resume=back, events=events)
    assert result.best is not None
    assert (result.best.value, result.best.step) == (7.0, 6)
    warned = [event.text for event in events if isinstance(event, Warned)]
    assert any("set aside" in text and "is of step" in text and "goes on from step 4" in text for text in warned)
    assert (path / "abandoned-best.safetensors").exists()
    other = await run(Scored(*[0.5] * 9), path, max_steps=8, keep_best="max:other", events=events)
    assert other.best is not None
    assert (other.best.metric, other.best.step) == ("other", 8)
    assert any("it is the min of val_loss, the job keeps the max of other" in one.text for one in events
               if isinstance(one, Warned))  # fmt: skip


@pytest.mark.parametrize("mine", [b"mine", safetensors.torch.save({}, {"w5xde_async.best": "[" * 100_000})])
async def test_a_file_of_that_name_that_no_run_made_is_not_written_over(tmp_path: Path, mine: bytes) -> None:
    path = tmp_path / "run"
    (await asyncio.to_thread(RunDir.open, path, resume=True)).close()
    (path / "best.safetensors").write_bytes(mine)
    await run(Scored(), path, max_steps=2)
    assert (path / "abandoned-best.safetensors").read_bytes() == mine


@pytest.mark.slow
async def test_a_metric_that_evaluate_does_not_give_ends_the_run_at_its_first_evaluation(tmp_path: Path) -> None:
    scored = Scored(metric="loss")
    words = "evaluate gives no 'val_loss'; it gives loss, other; name one that it gives"
    with pytest.raises(JobError, match=words):
        await run(scored, tmp_path / "run", max_steps=100_000)
    assert len(scored.seen) == 1
    result = await run(scored, tmp_path / "run", keep_best="loss", max_steps=100)
    assert (result.outcome, result.best is not None) == ("finished", True)  # it goes on from there


@pytest.mark.parametrize("max_steps", [1, 2])  # it is due only because the run ends; it is due anyway
async def test_where_the_only_evaluation_is_the_last_that_is_said_and_nothing_is_lost(
    tmp_path: Path, max_steps: int
) -> None:
    events: list[Event] = []
    result = await run(Scored(metric="loss"), tmp_path / "run", max_steps=max_steps, events=events)
    assert (result.outcome, result.best) == ("finished", None)
    assert any("evaluate gives no 'val_loss'" in event.text for event in events if isinstance(event, Warned))


async def test_without_a_run_directory_there_is_no_place_for_it() -> None:
    with pytest.raises(UsageError, match="keep_best keeps a file but there is no run directory"):
        async with LocalCluster(job(Scored())):
            pass


async def test_a_full_disk_costs_the_best_model_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, create = True, Filesystem.create

    def full(self: Filesystem, path: Path) -> BinaryIO:
        if failing and "best.safetensors" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(self, path)

    monkeypatch.setattr(Filesystem, "create", full)
    events: list[Event] = []
    scored = Scored(*[1.0] * 50)
    result = await run(scored, tmp_path / "run", events=events)
    assert (result.outcome, result.best) == ("finished", None)
    assert any("the best model so far" in one.text and "disk is full" in one.text for one in events
               if isinstance(one, Warned))  # fmt: skip
    failing = False  # what is gone does not count as the best
    scored.values = iter([3.0] * 9)
    result = await run(scored, tmp_path / "run", max_steps=12)
    assert result.best is not None
    assert result.best.value == 3.0


@pytest.mark.parametrize("last", [5.0, 3.0, 0.5, None])
async def test_the_best_of_a_time_when_the_disk_was_full_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: float | None
) -> None:
    """In place of it nothing that is worse. ``None``: there is no later evaluation."""
    create, tries = Filesystem.create, 0

    def full(self: Filesystem, path: Path) -> BinaryIO:
        nonlocal tries
        if "best.safetensors" in path.name:
            tries += 1
            if tries == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
        return create(self, path)

    monkeypatch.setattr(Filesystem, "create", full)
    events: list[Event] = []
    values = [4.0, 1.0] if last is None else [4.0, 1.0, last]
    scored = Scored(*values)
    kept = min(values)
    result = await run(scored, tmp_path / "run", max_steps=2 * len(values), events=events)
    assert [event.metrics["val_loss"] for event in events if isinstance(event, Evaluated)] == values
    assert [event.best for event in events if isinstance(event, Evaluated)] == [True, False, last == 0.5][: len(values)]
    assert result.best is not None
    assert result.best.value == kept
    assert same(result.best.path, scored.state(kept))
    assert tries == 3


async def test_a_cluster_gives_it(tmp_path: Path) -> None:
    scored = Scored(2.0, 1.0)
    async with LocalCluster(job(scored), 1, run_dir=tmp_path / "run", config=CoordinatorConfig(port=0)) as cluster:
        result = await cluster.wait()
    assert cluster.best == result.best
    assert cluster.best is not None
    assert same(cluster.best.path, scored.state(1.0))


async def test_a_write_that_another_sees_done_first_is_done_all_the_same(tmp_path: Path) -> None:
    """At the end of a run that waits no longer for an evaluation, which itself waits for this write."""
    model = nn.Linear(2, 2)
    kept = best.BestModel(
        "val_loss", Layout.of(model, bucket_bytes=4096), tmp_path / "best.safetensors", Filesystem(), Bus(), None
    )
    offering = asyncio.ensure_future(kept.offer(3, {"val_loss": 1.0}, model.state_dict()))
    await asyncio.sleep(0)
    assert kept._writing is not None
    writing = kept._writing[1]
    async with asyncio.timeout(10):
        while not writing.done():  # noqa: ASYNC110 - whoever waits for it would be told after the other
            await asyncio.sleep(0)
    assert not offering.done()
    await kept.save()
    assert await offering
    assert kept.best is not None
    assert kept.best.value == 1.0


@pytest.mark.slow
async def test_a_disk_that_hangs_holds_up_neither_evaluations_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, create = threading.Event(), Filesystem.create

    def hanging(self: Filesystem, path: Path) -> BinaryIO:
        if "best.safetensors" in path.name:
            assert works.wait(30)
        return create(self, path)

    monkeypatch.setattr(Filesystem, "create", hanging)
    monkeypatch.setattr(best, "_PATIENCE_S", 0.05)
    events: list[Event] = []
    try:
        result = await run(Scored(3.0, 2.0), tmp_path / "run", max_steps=40, events=events)
    finally:
        works.set()
    assert (result.outcome, result.best) == ("finished", None)
    said = [event.text for event in events if isinstance(event, Warned) and "was not written" in event.text]
    assert "the disk hangs" in said[0]
    assert all("the disk still hangs" in text for text in said[1:])
    assert len([event for event in events if isinstance(event, Evaluated)]) > 1
