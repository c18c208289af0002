"""A worker that lacks memory at generated places: the run ends where it ends without that, but for last bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.support import jobs
from tests.support.cluster import train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from w5xde_async.job import Job
from w5xde_async.telemetry.events import Event, Warned
from w5xde_async.updates.config import UpdateConfig

WIDTH = 128  # a layer has a bucket of its own


class Scarce(nn.Module):
    """Lacks memory in some of its passes over more than one row, in the last layer that backward reaches: gradients of
    the others are there by then, and have left where the leaf is its block's last."""

    chance = random.Random()
    share = 0.0
    once = False
    lacked = 0

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.layers = nn.ModuleList([nn.Linear(64, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)])

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.layers[0](x))
        if h.requires_grad:
            h.register_hook(lambda _: self.lack(x))
        for layer in list(self.layers)[1:]:
            h = layer(torch.tanh(h))
        return h

    @classmethod
    def lack(cls, x: Tensor) -> None:
        if cls.once and cls.lacked == 0 and cls.chance.random() < 0.1:
            cls.lacked += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        if len(x) > 1 and cls.chance.random() < cls.share:
            cls.lacked += 1
            raise torch.OutOfMemoryError("CUDA out of memory")


def job(*, norm: bool = False, microbatch: int = 8) -> Job:
    x, y = jobs.digits()
    torch.manual_seed(3)
    return Job(
        model=Scarce(norm=norm), dataset=TensorDataset(x, y), loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        batch_size=32, microbatch_size=microbatch, max_steps=48, seed=5,
    )  # fmt: skip


async def trained(share: float, seed: int = 0, **config: Any) -> Tensor:
    """All parameters after a run with one worker."""
    made: list[Job] = []

    def make() -> Job:
        made.append(job())
        return made[-1]

    Scarce.chance, Scarce.share, Scarce.lacked = random.Random(seed), share, 0
    try:
        result = await train(make, bucket_bytes=64 << 10, **config)
    finally:
        Scarce.share = 0.0
    assert result.outcome == "finished"
    return weights(made[0])


def weights(made: Job) -> Tensor:
    assert isinstance(made.model, nn.Module)
    return torch.cat([parameter.detach().flatten() for parameter in made.model.parameters()])


RULES = {
    "sync": UpdateConfig(),
    "async": UpdateConfig(rule="async"),
    "local": UpdateConfig(rule="local", inner_steps=8, outer_momentum=0.0, outer_lr=1.0),
}


@pytest.mark.parametrize("rule", RULES)
async def test_one_lack_of_memory_ends_no_run_whose_job_refuses_single_samples(rule: str):
    """Batch norm refuses them, and a microbatch of two has no other pieces."""
    Scarce.chance, Scarce.once, Scarce.lacked = random.Random(1), True, 0
    try:
        result = await train(lambda: job(norm=True, microbatch=2), update=RULES[rule])
    finally:
        Scarce.once = False
    assert Scarce.lacked == 1
    assert result.outcome == "finished"


@pytest.mark.parametrize("rule", RULES)
async def test_who_halves_is_named_once_and_says_so_itself(rule: str, caplog: pytest.LogCaptureFixture):
    events: list[Event] = []
    Scarce.chance, Scarce.once, Scarce.lacked = random.Random(1), True, 0
    caplog.set_level("INFO", logger="w5xde_async.worker")
    try:
        await train(job, update=RULES[rule], events=events)
    finally:
        Scarce.once = False
    named = [event.text for event in events if isinstance(event, Warned) and "2^1 pieces" in event.text]
    assert len(named) == 1
    assert "batch norm and dropout" in named[0]
    said = [(record.levelname, record.getMessage()) for record in caplog.records if "pieces" in record.getMessage()]
    assert [level for level, _ in said] == ["WARNING", "INFO"]
    assert "pieces=2" in said[0][1]
    assert "pieces=1" in said[1][1], "32 blocks later"


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
@pytest.mark.parametrize("rule", ["sync", "local"])
async def test_a_worker_that_lacks_memory_trains_the_same_model(rule: str, seed: int):
    expected = await trained(0.0, update=RULES[rule])
    assert Scarce.lacked == 0
    # Few enough that none strikes twice in a row where a part of the block has left: that fails a leaf.
    actual = await trained(0.02, seed, update=RULES[rule])
    assert Scarce.lacked >= 2
    moved = torch.linalg.vector_norm(expected - weights(job()))
    assert float(moved) > 1
    assert float(torch.linalg.vector_norm(actual - expected) / moved) < 1e-3
