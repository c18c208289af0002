"""Buffers of every habit: a run has the bits of the plain loop, whoever computes which leaf."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support import reference
from tests.support.cluster import QUICK_WORKER, settings, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import W5xdeError
from w5xde_async.job import Job
from w5xde_async.worker.service import Worker


class Habit(nn.Module):
    """A layer between two others that keeps something of what it sees."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Assigned(Habit):
    def __init__(self) -> None:
        super().__init__(mean=torch.zeros(8), seen=torch.tensor(0), previous=torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.previous = self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.seen = self.seen + 1
        return x - self.mean + self.previous


class AssignedWithGraph(Habit):
    """As beginners write it: the buffer drags its graph along."""

    def __init__(self) -> None:
        super().__init__(mean=torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x


class InPlaceWithGraph(Habit):
    def __init__(self) -> None:
        super().__init__(mean=torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x


class Rarely(Habit):
    """Assigned by some leaves, written by others, left alone by the rest."""

    def __init__(self) -> None:
        super().__init__(mean=torch.zeros(8), last=torch.full((8,), -0.0))

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 0.3:
            self.mean = x.detach().mean(0)
        elif x[0, 0] > 0:
            self.mean.copy_(x.detach().amax(0))
        return x * self.mean.sigmoid()


class Neighbours(Habit):
    """One bucket holds what changes and what does not, in types whose bits a detour over float32 would lose."""

    def __init__(self) -> None:
        fine = torch.full((8,), 1 / 3, dtype=torch.float64)
        super().__init__(still=fine.clone(), moving=fine * 1e9, narrow=torch.full((8,), 0.1, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        self.moving += 0.125 * x.detach().mean(0).double()
        self.narrow.lerp_(x.detach().mean(0).half(), 0.1)
        return x * self.still.float()


class Extremes(Habit):
    """As observers of quantization do: the first value of all takes the place of infinity."""

    def __init__(self) -> None:
        mask = torch.zeros(8)
        mask[3] = -math.inf
        super().__init__(low=torch.tensor(math.inf), high=torch.full((8,), -math.inf), mask=mask,
                         unknown=torch.tensor(math.nan))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach()
        self.low.copy_(torch.minimum(self.low, seen.min()))
        self.high = torch.maximum(self.high, seen.amax(0))
        self.unknown = torch.where(self.unknown.isnan(), seen.mean() * 0.0, self.unknown)
        return x + torch.where(self.mask.isinf(), 0.0, self.mask)


class SometimesBegun(Habit):
    def __init__(self) -> None:
        super().__init__(best=torch.tensor(math.inf))

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 0:
            self.best = torch.minimum(self.best, x.detach().min())
        return x


class Shared(Habit):
    """One buffer under two names, written in place."""

    def __init__(self) -> None:
        super().__init__(mean=torch.zeros(8))
        self.register_buffer("alias", self.mean)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.alias


class Reentrant(nn.Module):
    """Its gradients come in parts: a first block is given up half-way and computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.average = Assigned()

    def forward(self, x: Tensor) -> Tensor:
        x = self.average(x)
        out: Tensor = checkpoint(self.inner, checkpoint(self.inner, x, use_reentrant=True), use_reentrant=True)
        return out


def job(layer: Callable[[], nn.Module], **changes: Any) -> Job:
    x = torch.randn(51, 8, generator=torch.Generator().manual_seed(1))
    defaults: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(8, 8), layer(), nn.Linear(8, 3)),
        "dataset": TensorDataset(x, x[:, :3].argmax(1)), "loss": nn.CrossEntropyLoss(), "batch_size": 20,
        "microbatch_size": 3, "max_steps": 5, "seed": 4,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    }  # fmt: skip
    return Job(**{**defaults, **changes})


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "layer",
    [Assigned, AssignedWithGraph, InPlaceWithGraph, Rarely, Neighbours, Extremes, SometimesBegun, Shared, Reentrant],
)
async def test_the_bits_of_the_plain_loop(layer: Callable[[], nn.Module], workers: int) -> None:
    result = await train(lambda: job(layer), workers=workers, code_free=False)
    assert result.digest == reference.digest(job(layer))


@pytest.mark.parametrize("layer", [Assigned, Extremes])
async def test_leaves_of_several_microbatches(layer: Callable[[], nn.Module]) -> None:
    changes = {"accumulate_grad_batches": 2, "precision": "bf16"}
    result = await train(lambda: job(layer, **changes), workers=2, code_free=False)
    assert result.digest == reference.digest(job(layer, **changes))


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_worker_without_the_code_assigns_too() -> None:
    def both() -> nn.Module:
        return nn.Sequential(Assigned(), Extremes())

    async with Coordinator(job(both), config=settings(code_free=True, max_time_s=60.0)) as coordinator:
        worker = Worker(coordinator.address, job=None, config=QUICK_WORKER)
        result, _ = await asyncio.gather(coordinator.wait(), worker.run())
    assert result.digest == reference.digest(job(both))


class Resized(Habit):
    def __init__(self) -> None:
        super().__init__(cache=torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.cache = x.detach()
        return x


class Retyped(Habit):
    def __init__(self) -> None:
        super().__init__(mean=torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach().mean(0).bfloat16()
        return x


class Emptied(Habit):
    def __init__(self) -> None:
        super().__init__(cache=torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.cache = None
        return x


class Untied(Shared):
    def forward(self, x: Tensor) -> Tensor:
        self.alias = x.detach().mean(0)
        return x


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Resized, "buffer '1.cache'.*shape \\[2\\].*shape \\[3, 8\\].*persistent=False"),
        (Retyped, "buffer '1.mean'.*float32.*bfloat16"),
        (Emptied, "NoneType in place of buffer '1.cache'"),
        (Untied, "1.mean, 1.alias.*one buffer"),
    ],
)
async def test_what_cannot_be_merged_is_a_clear_error(layer: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(W5xdeError, match=f"(?s){words}"):
        await train(lambda: job(layer), code_free=False)
