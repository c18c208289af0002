"""Samples that cannot be read: left out up to a bound, the same ones whoever computes and wherever a run is resumed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cluster import QUICK_WORKER, Commits, settings, train
from tests.support.oracle import PLAIN
from torch import Tensor, nn
from torch.utils.data import Dataset

from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.data.sharded import ShardedStream
from w5xde_async.errors import LeafFailed
from w5xde_async.job import Job
from w5xde_async.telemetry.events import Event, RunFinished, SampleLeftOut
from w5xde_async.worker.service import Worker

SAMPLES, BATCH = 48, 8
BAD = {3, 17, 18, 40}


class Damaged(Dataset[Any]):
    """Reads of ``bad`` raise, those of ``at_first`` the first two times."""

    def __init__(self, bad: set[int], at_first: Collection[int]) -> None:
        self.bad, self.left = bad, dict.fromkeys(at_first, 2)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index in self.bad or self.left.get(index, 0):
            self.left[index] = self.left.get(index, 0) - 1
            raise ValueError("corrupt JPEG")
        return torch.full((4,), float(index)), index % 2


def job(bad: set[int] = BAD, at_first: Collection[int] = (), epochs: int = 2) -> Job:
    return Job(
        model=lambda: nn.Linear(4, 2), dataset=Damaged(bad, at_first), loss=nn.functional.cross_entropy, epochs=epochs,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.001), batch_size=BATCH, microbatch_size=2,
    )  # fmt: skip


async def test_the_same_bits_however_many_compute() -> None:
    one: list[Event] = []
    first = await train(job, events=one, max_bad_samples=9)
    second = await train(job, workers=2, max_bad_samples=4, loader_threads=3)
    assert (first.digest, first.bad_samples) == (second.digest, len(BAD))
    told = [event for event in one if isinstance(event, SampleLeftOut)]
    assert {event.sample for event in told} == BAD
    assert [(event.bad_samples, event.most) for event in told] == [(n, 9) for n in (1, 2, 3, 4)]
    assert told[0].error.startswith("ValueError: corrupt JPEG (test_bad_samples.py:")
    (ended,) = [event for event in one if isinstance(event, RunFinished)]
    assert (ended.bad_samples, ended.samples) == (4, 2 * SAMPLES)
    assert (await train(lambda: job(set()))).digest != first.digest


async def test_a_bad_record_of_a_stream_is_told_by_its_shard_and_counts_in_each_epoch() -> None:
    def decode(number: int) -> tuple[Tensor, int]:
        if number == 5:
            raise ValueError("corrupt JPEG")
        return torch.full((4,), float(number)), number % 2

    def streamed() -> Job:
        shards = ShardedStream([0, 4], open=lambda first: range(first, first + 4), decode=decode, shuffle_shards=False)
        return replace(job(), dataset=shards, epochs=None, max_steps=4, batch_size=4, shuffle=False)

    events: list[Event] = []
    result = await train(streamed, events=events, max_bad_samples=2)
    told = [event for event in events if isinstance(event, SampleLeftOut)]
    assert (result.bad_samples, [event.sample for event in told]) == (2, [5, 13])
    assert all(event.error.endswith(", at record 1 of shard 4") for event in told)
    with pytest.raises(
        LeafFailed, match=r"(?s)1 others were left out already; a stream's count anew each epoch.*record 1 of"
    ):
        await train(streamed, max_bad_samples=1)


async def test_none_by_default_and_no_more_than_the_bound() -> None:
    with pytest.raises(LeafFailed, match=r"(?s)corrupt JPEG.*sample \d+\n.*--max-bad-samples N leaves up to N") as one:
        await train(job)
    assert one.value.sample in BAD
    with pytest.raises(LeafFailed, match=r"(?s)corrupt JPEG.*sample \d+\n.*3 others were left out already") as fourth:
        await train(job, max_bad_samples=3)
    assert fourth.value.sample in BAD


@pytest.mark.parametrize("rule", ["async", "local"])
async def test_other_rules(rule: str) -> None:
    result = await train(job, workers=2, update=PLAIN[rule], max_bad_samples=4)
    assert (result.outcome, result.bad_samples) == ("finished", 4)


async def stopped(path: Path, at: int, made: Job, **kwargs: Any) -> RunResult:
    """The run until step ``at``, by one worker."""
    commits = Commits()
    config = settings(max_bad_samples=9, **kwargs)
    async with Coordinator(made, run_dir=path, config=config, bus=commits.bus) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=job(), config=QUICK_WORKER).run())
        await commits.reach(at)
        coordinator.request_stop("enough")
        result = await coordinator.wait()
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    return result


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
async def test_what_was_left_out_stays_so_after_a_resume(durability: str, tmp_path: Path) -> None:
    """Reads that failed by chance: what could be read after the resume was left out before, so it still is."""
    path, by_chance = tmp_path / "run", {5, 30}
    whole = await train(lambda: job(BAD | by_chance), max_bad_samples=9)
    before = await stopped(path, 6, job(BAD, by_chance), durability=durability)
    assert before.bad_samples == 6
    if durability == "journal":  # without the last checkpoint: its records have what was found since
        shutil.rmtree(max((path / "checkpoints").glob("step-*")))
    after = await train(lambda: job(BAD), run_dir=path, max_bad_samples=9, durability=durability)
    assert (after.step, after.bad_samples, after.digest) == (12, 6, whole.digest)
