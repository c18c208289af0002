"""Samples, leaves and skipped steps, by whoever tells of them: the same under every update rule."""

from __future__ import annotations

import asyncio
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tests.support.cluster import QUICK_WORKER, settings
from tests.support.fleet import fleet
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.job import Job
from w5xde_async.plan.sampler import Sampler
from w5xde_async.telemetry.events import Bus, Event, RunFinished, Warned
from w5xde_async.telemetry.metrics import Metrics
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.service import Worker

SAMPLES, BATCH, LEAF, EPOCHS, BAD = 32, 8, 4, 3, 13
RULES = ("sync", "async", "local", "async-local", "streaming")


def job() -> Job:
    """One sample of the dataset is not a number: one step of every epoch cannot count."""
    x = torch.arange(4.0 * SAMPLES).reshape(SAMPLES, 4) / (4 * SAMPLES)
    x[BAD, 2] = math.nan
    return Job(
        model=partial(nn.Linear, 4, 1), dataset=TensorDataset(x, x.sum(1, keepdim=True)), loss=nn.functional.mse_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01), batch_size=BATCH, microbatch_size=LEAF,
        epochs=EPOCHS,
    )  # fmt: skip


def update_of(rule: str) -> UpdateConfig:
    inner: dict[str, Any] = {} if rule in ("sync", "async") else {"inner_steps": 3}
    return UpdateConfig(rule=rule, **inner)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("rule", RULES)
async def test_all_that_count_say_the_same_where_steps_are_not_finite(rule: str, workers: int, tmp_path: Path) -> None:
    bus, metrics = Bus(), Metrics()
    events: list[Event] = []
    bus.subscribe(events.append)
    bus.subscribe(metrics, samples=True)
    config = settings(min_workers=workers, update=update_of(rule))
    async with Coordinator(job(), run_dir=tmp_path / "run", config=config, bus=bus) as coordinator:
        running = [
            asyncio.create_task(Worker(coordinator.address, job=job(), config=QUICK_WORKER).run())
            for _ in range(workers)
        ]
        result = await coordinator.wait()
        await asyncio.gather(*running)
    (ended,) = [event for event in events if isinstance(event, RunFinished)]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    committed = [line for line in lines if line["event"] == "step_committed"]
    scraped = {
        (sample.name, sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }
    counts = (EPOCHS * SAMPLES, EPOCHS * SAMPLES // LEAF, EPOCHS)
    assert (ended.samples, ended.leaves, ended.steps_skipped) == counts
    assert tuple(sum(line[name] for line in committed) for name in ("samples", "leaves", "skipped")) == counts
    names = (("w5xde_samples_total", None), ("w5xde_leaves_total", "applied"), ("w5xde_steps_skipped_total", None))
    assert tuple(scraped[name] for name in names) == counts
    assert (result.step, result.steps_skipped) == (EPOCHS * SAMPLES // BATCH, EPOCHS)
    assert sum(share.samples for share in ended.shares) == EPOCHS * SAMPLES
    assert sum(share.leaves for share in ended.shares) == EPOCHS * SAMPLES // LEAF
    warned = [event.text for event in events if isinstance(event, Warned)]
    found = [re.search(r"step (\d+) (?:was skipped|is left out)|skipped step (\d+):", text) for text in warned]
    named = [int(one[1] or one[2]) for one in found if one is not None]
    assert all(re.search(rf"samples (of .*)?are .*\b{BAD}\b", one.string) for one in found if one is not None)
    sampler = Sampler(num_samples=SAMPLES, batch_size=BATCH, leaf_samples=LEAF, seed=job().seed)
    assert sorted(named) == [
        step + 1 for step in range(EPOCHS * SAMPLES // BATCH) if BAD in sampler.plan(step).indices.tolist()
    ]


@pytest.mark.parametrize("rule", ["local", "async-local", "streaming"])
async def test_steps_that_a_worker_takes_with_it_were_computed_in_vain(rule: str) -> None:
    """It is cut off after it has computed some, and before it was asked for what came of them."""
    async with fleet(2, leaves=4, steps=64, update=UpdateConfig(rule=rule, inner_steps=4)) as made:
        ledger, goes = made.training.ledger, made.members[0]
        while len(ledger.carried(goes.worker_id)) < 2:
            made.now += 1.0
            goes.compute()
            await made.settle()
        carried, before = ledger.carried(goes.worker_id), made.training.phase.counts()
        made.leave(goes)
        assert made.training.phase.counts().leaves_wasted - before.leaves_wasted == 4 * len(carried)
        assert made.training.phase.counts().stale == before.stale
