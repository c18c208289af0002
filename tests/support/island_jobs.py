"""Jobs of the kinds that islands must compute as one process does, with batches for their leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tests.support import jobs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

from w5xde_async.job import Job


class Following(nn.Module):
    """Goes by a mean that it keeps itself, as it is after this batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("level", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.level.lerp_(x.mean(0), 0.3)
        out: Tensor = torch.tanh(self.layer(x - self.level))
        return out


class Normed(nn.Module):
    """Batch norm and dropout in blocks, a frozen layer, one that nobody uses, a scalar, one that few leaves touch."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width + 1), nn.BatchNorm1d(width + 1), nn.ReLU(), nn.Dropout(0.2),
                          nn.Linear(width + 1, width, bias=False))
            for _ in range(3)
        )  # fmt: skip
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.rare = nn.Parameter(torch.ones(width))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(width, 3)
        self.register_buffer("mark", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        for block in self.blocks:
            h = h + block(h)
        if float(x[0, 0]) > 0:
            h = h * self.rare
            self.mark += int(x[0, 1].abs() * 100)
        out: Tensor = self.head(self.frozen(h)) * self.scale
        return out


class Blocks(nn.Module):
    """A transformer of plain blocks with a tied embedding, dropout and a table that no checkpoint has."""

    def __init__(self, width: int = 16, layers: int = 3, vocabulary: int = 33, context: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("place", torch.linspace(-1, 1, context * width).view(context, width), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = F.dropout(self.embed(tokens) + self.place, 0.1)
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(self.norm(h))
        return out


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attend(h, h, h, need_weights=False)[0]
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def lm_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _job(model: Callable[[], nn.Module], data: Any, **changes: Any) -> Job:
    defaults: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(), "batch_size": 64, "microbatch_size": 4, "max_steps": 5, "seed": 2,
        "optimizer": _sgd,
    }  # fmt: skip
    return Job(model=model, dataset=data, **{**defaults, **changes})


def _table() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(96, 8, generator=generator), torch.randint(3, (96,), generator=generator)
    )  # fmt: skip


def _text() -> TensorDataset:
    tokens = torch.randint(33, (96, 7), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def mlp(**changes: Any) -> Job:
    return _job(
        lambda: nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 37), nn.Tanh(), nn.Linear(37, 3)), _table(),
        **changes,
    )  # fmt: skip


def normed(**changes: Any) -> Job:
    return _job(Normed, _table(), **changes)


def following(**changes: Any) -> Job:
    return _job(
        lambda: nn.Sequential(nn.Linear(8, 12), Following(12), Following(12), nn.Linear(12, 3)), _table(), **changes
    )  # fmt: skip


def transformer(**changes: Any) -> Job:
    return _job(Blocks, _text(), **{"loss": lm_loss, **changes})


def odd(**changes: Any) -> Job:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(96, 10, generator=generator), torch.randint(4, (96,), generator=generator)
    return _job(jobs.Odd, TensorDataset(x, y), **changes)


def measured(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, float]]:
    """A step with metrics, of which not every leaf has each, and one is no number in some."""
    x, y = batch
    output = model(x)
    positive = float(x[0, 0]) > 0
    right = float((output.argmax(-1) == y).float().mean())
    metrics = {"undefined": 1.0 if positive else math.nan, "right": right}
    if positive:
        metrics["positive"] = 1.0
    return F.cross_entropy(output, y), metrics


def batches(job: Job, samples: Sequence[int]) -> list[Any]:
    """A batch for each leaf, of so many samples."""
    found, at = [], 0
    for count in samples:
        found.append(tuple(default_collate([job.dataset[(at + i) % len(job.dataset)] for i in range(count)])))
        at += count
    return found


def _writing(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.wide.weight.mul_(0.5)
    out: Tensor = model(x)
    return out


def _zeroing(model: Any, x: Tensor) -> Tensor:
    model.zero_grad()
    out: Tensor = model(x)
    return out


def _freezing(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    model.blocks[1].requires_grad_(False)
    return out


def _unfreezing(model: Any, x: Tensor) -> Tensor:
    model.blocks[0].requires_grad_(True)
    out: Tensor = model(x)
    return out


def _growing(model: Any, x: Tensor) -> Tensor:
    if not hasattr(model, "late"):
        model.late = nn.Linear(3, 3)
    out: Tensor = model.late(model(x))
    return out


class Clipping(nn.Linear):
    """It counts no write into its weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)


class ClippedBy(nn.Linear):
    """By a hook of its own, before or after its forward."""

    def __init__(self, *sizes: int, after: bool) -> None:
        super().__init__(*sizes)
        hang = self.register_forward_hook if after else self.register_forward_pre_hook
        hang(lambda *_: self.clip())

    def clip(self) -> None:
        self.weight.data.clamp_(-0.01, 0.01)


class Plain(nn.Module):
    def __init__(self, layer: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layer(8, 8) for _ in range(2))
        self.blocks[0].requires_grad_(False)
        self.wide, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: Tensor = self.head(self.wide(x))
        return out


def trespassing() -> Iterator[tuple[Job, str]]:
    """Jobs whose step does what no step may, and what is said of it. Leaves are of 8 samples."""

    def of(compute: Callable[[Any, Tensor], Tensor], model: Callable[[], nn.Module] = Plain) -> Job:
        def step(model: nn.Module, batch: Any) -> Tensor:
            return F.cross_entropy(compute(model, batch[0]), batch[1])

        return replace(mlp(), model=model, loss=None, step=step, accumulate_grad_batches=2)

    yield of(_writing), r"the step changes parameter 'wide\.weight' itself"
    yield (
        of(lambda model, x: model(x), lambda: Plain(Clipping)),
        r"the step changes parameter 'blocks\.0\.weight' itself",
    )
    for after in (False, True):
        yield (
            of(lambda model, x: model(x), lambda after=after: Plain(partial(ClippedBy, after=after))),  # type: ignore[misc]
            r"the step changes parameter 'blocks\.0\.weight' itself",
        )
    yield of(_zeroing), "the step changed the model's gradients"
    yield of(_freezing), r"'blocks\.1\.weight' was trainable when the run began and is frozen now"
    yield of(_unfreezing), r"'blocks\.0\.weight' was frozen when the run began and is to be trained now"
    yield of(_growing), r"parameter 'late\.weight' is another one than when the run began"
