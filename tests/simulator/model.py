"""An integer-vector model whose parameters prove which samples were applied, and the loop that every run must equal.

``applied`` has one element for each (epoch, sample); a step of n samples moves those of its samples by exactly -1/n
(n is a power of two), so a lost sample leaves 0 and one counted twice leaves -2/n. ``weights`` moves by inexact
floats that depend on its own value, under momentum and a schedule: it has the reference's bits only where every sum
has the reference's shape and every step began with the right parameters and optimizer state. ``rare`` gets gradients
from some samples only, so its buckets are absent from many blocks. ``frozen`` never changes and takes part in every
gradient: it travels once to each worker, and whoever lacks it computes something else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tests.simulator.loop import HOST, ComputeExecutor
from tests.support.reference import tree_sum
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from w5xde_async.compute.block import ComputedBlock, Emit, Task
from w5xde_async.compute.engine import LeafError
from w5xde_async.job import Job
from w5xde_async.params.flat import FlatState, digest
from w5xde_async.params.layout import Layout
from w5xde_async.params.reducer import VectorPool
from w5xde_async.plan.sampler import Sampler

__all__ = ["SHAPES", "Expected", "IntegerEngine", "Shape", "expected_run", "explain_difference", "job_of"]

_WIDTH = 48
_OVERFLOWS_ABOVE = 2.0**10
_NAMES = ("applied", "weights", "rare")

_Part = tuple[np.ndarray, np.ndarray, np.ndarray | None]


@dataclass(frozen=True)
class Shape:
    """Sizes of one run. ``batch`` and the samples of every epoch's last step are powers of two."""

    num_samples: int
    batch: int
    leaf: int
    epochs: int
    precision: Any = "fp32"
    per_leaf: bool = False  # the dataset is read leaf by leaf, not gathered by chunks
    schedule: bool = False

    @property
    def sampler(self) -> Sampler:
        return Sampler(num_samples=self.num_samples, batch_size=self.batch, leaf_samples=self.leaf, seed=5)

    @property
    def total_steps(self) -> int:
        return self.epochs * self.sampler.steps_per_epoch


SHAPES = (
    Shape(40, 16, 2, 2),
    Shape(24, 8, 1, 2, schedule=True),
    Shape(48, 16, 3, 2, per_leaf=True),
    Shape(36, 16, 2, 2, schedule=True),
    Shape(32, 16, 1, 3, "fp16", schedule=True),
    Shape(20, 8, 2, 3, per_leaf=True, schedule=True),
)


class IntegerVector(nn.Module):
    def __init__(self, num_cells: int) -> None:
        super().__init__()
        self.applied = nn.Parameter(torch.zeros(num_cells))
        self.weights = nn.Parameter(torch.linspace(-1, 1, _WIDTH))
        self.rare = nn.Parameter(torch.ones(_WIDTH))
        self.frozen = nn.Parameter(torch.linspace(0.5, 2, _WIDTH), requires_grad=False)


class _Numbers(Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self._ids = torch.arange(count, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Tensor:
        return self._ids[index]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    exact, inexact = [model.applied], [model.weights, model.rare]
    return torch.optim.SGD([{"params": exact, "momentum": 0.0, "lr": 1.0}, {"params": inexact}], lr=0.25, momentum=0.9)


def _schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 1.0 / (1.0 + 0.3 * step)])


def _loss(output: Any, target: Any) -> Tensor:
    raise AssertionError("the engine computes by itself")


@lru_cache(maxsize=16)
def job_of(shape: Shape) -> Job:
    data = _Numbers(shape.num_samples) if shape.per_leaf else TensorDataset(torch.arange(shape.num_samples))
    return Job(
        model=lambda: IntegerVector(shape.epochs * shape.num_samples), dataset=data, loss=_loss, optimizer=_optimizer,
        scheduler=_schedule if shape.schedule else None, batch_size=shape.batch, microbatch_size=shape.leaf,
        epochs=shape.epochs, precision=shape.precision, seed=5,
    )  # fmt: skip


@lru_cache(maxsize=8)
def _noise(num_samples: int) -> np.ndarray:
    bits = np.random.Philox(key=77).random_raw(num_samples * _WIDTH)
    return ((bits >> 40).astype(np.float64) / 2**24 - 0.5).astype(np.float32).reshape(num_samples, _WIDTH)


def _leaf_gradient(
    shape: Shape, epoch: int, ids: Sequence[int], weights: np.ndarray, frozen: np.ndarray, scale: float
) -> _Part:
    """The sum over a leaf's samples, in order, of their gradients, times ``scale``."""
    applied = np.zeros(shape.epochs * shape.num_samples, np.float32)
    inexact = np.zeros(_WIDTH, np.float32)
    rare: np.ndarray | None = None
    noise, factor = _noise(shape.num_samples), np.float32(scale)
    for sample in ids:
        applied[epoch * shape.num_samples + sample] += factor
        gradient = (weights * np.float32(0.37) + noise[sample] * frozen) * factor
        inexact = inexact + gradient
        if sample % 5 == 0:
            rare = gradient if rare is None else rare + gradient
    if scale > _OVERFLOWS_ABOVE:
        inexact = inexact + np.float32(np.inf)
    return applied, inexact, rare


def _add(left: _Part, right: _Part) -> _Part:
    rare = left[2] if right[2] is None else right[2] if left[2] is None else left[2] + right[2]
    return left[0] + right[0], left[1] + right[1], rare


def _leaf_loss(ids: Sequence[int]) -> float:
    return float(sum(ids)) / len(ids)


class IntegerEngine:
    """What ``compute.engine.Engine`` is to a worker; forward and backward are the sums above, in virtual time."""

    def __init__(self, job: Job, _: object = None, *, bucket_bytes: int, **__: Any) -> None:
        host = HOST.get()
        assert host is not None
        self._host, self._loop = host, host.loop
        self.device, self.child, self.has_room = torch.device("cpu"), 0, True
        self.layout = Layout.of(job.model(), bucket_bytes=bucket_bytes)
        self.incoming = FlatState(self.layout)
        self._live = FlatState(self.layout)
        self._pool = VectorPool(self.layout)
        num = len(job.dataset)
        self._shape = Shape(num, job.batch_size, job.leaf_samples, job.epochs or 1)
        self._steps_per_epoch = self._shape.sampler.steps_per_epoch
        self._index = {entry.name: index for index, entry in enumerate(self.layout.entries)}
        self._group = next(group.index for group in self.layout.groups if group.role == "grad")

    def load(self, buckets: Any) -> None:
        for number in buckets:
            bucket = self.layout.buckets[number]
            self._live.bucket(bucket).copy_(self.incoming.bucket(bucket))

    def compute(self, task: Task, emit: Emit) -> ComputedBlock:
        began, epoch = self._loop.now, task.step // self._steps_per_epoch
        ids = [int(i) for tensor in task.tensors for i in tensor.tolist()]
        leaves, at = [], 0
        for count in task.samples:
            leaves.append(ids[at : at + count])
            at += count
        parts = []
        for number, leaf in enumerate(leaves):
            slow = 10.0 if self._host.slow_until > self._loop.now else 1.0
            self._takes(self._host.leaf_s * slow * self._host.random.uniform(0.7, 1.4))
            if self._host.cursed in leaf and ComputeExecutor.current() is not None:
                raise LeafError(task.start + number, RuntimeError("no worker can compute it"))
            if self._host.failing_leaf:
                self._host.failing_leaf = False
                raise LeafError(task.start + number, RuntimeError("planted"))
            weights, frozen = (self._live.views[self._index[name]].numpy() for name in ("weights", "frozen"))
            parts.append(_leaf_gradient(self._shape, epoch, leaf, weights, frozen, task.loss_scale))
        total = tree_sum(parts, _add)
        vector = self._pool.take()
        vector.memory.fill_(0xFF)  # what is not written is NaN
        vector.group(self._group).zero_()
        present = []
        for name, value in zip(_NAMES, total, strict=True):
            if value is not None:
                view = vector.gradients[self._index[name]]
                assert view is not None
                view.copy_(torch.from_numpy(value))
                present.append(self._index[name])
        emitted = []
        for bucket in self.layout.result_buckets:
            if any(index in present for index in bucket.entries):
                emit(bucket.index, vector)
                emitted.append(bucket.index)
                self._takes(self._host.leaf_s * 0.05)
        return ComputedBlock(
            losses=tuple(_leaf_loss(leaf) for leaf in leaves), metric_names=("rows",),
            metrics=tuple(float(len(leaf)) for leaf in leaves),
            untouched=tuple(index for index in self.layout.trainable if index not in present),
            absent=tuple(bucket.index for bucket in self.layout.result_buckets if bucket.index not in emitted),
            splits=0, compute_s=self._loop.now - began, vectors=(vector,),
        )  # fmt: skip

    @staticmethod
    def _takes(seconds: float) -> None:
        if ComputeExecutor.current() is not None:  # the coordinator's has no compute thread: ``patches`` waits for it
            ComputeExecutor.sleep(seconds)

    def counted(self, task: Task, emit: Emit) -> tuple[ComputedBlock, int]:
        """Its floating point operations are nobody's business."""
        return self.compute(task, emit), 0

    def release(self, vector: Any) -> None:
        vector.memory.fill_(0xFF)  # whoever still sends it sends NaN
        self._pool.give(vector)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Expected:
    """The reference after each version: ``digests[v]``, ``losses[v]`` of the step that made it, tensors to explain."""

    digests: tuple[str, ...]
    losses: tuple[float, ...]
    tensors: tuple[tuple[Tensor, ...], ...]


@lru_cache(maxsize=16)
def expected_run(shape: Shape, bucket_bytes: int) -> Expected:
    """The plain loop over the same samples, one process, one thread, optimizer and schedule of the job."""
    job = job_of(shape)
    model = IntegerVector(shape.epochs * shape.num_samples)
    optimizer = _optimizer(model)
    scheduler = _schedule(optimizer) if shape.schedule else None
    layout = Layout.of(model, bucket_bytes=bucket_bytes)
    named = dict(model.named_parameters())
    scale = 65536.0 / 2 ** math.ceil(math.log2(shape.batch)) if shape.precision == "fp16" else 1.0

    def state() -> tuple[Tensor, ...]:
        return tuple(named[entry.name].detach().clone() for entry in layout.entries)

    tensors, losses = [state()], [0.0]
    for step in range(job.epochs * shape.sampler.steps_per_epoch):  # type: ignore[operator]
        plan = shape.sampler.plan(step)
        leaves = [plan.leaf_indices(leaf).tolist() for leaf in range(plan.num_leaves)]
        weights = model.weights.detach().numpy().copy()
        frozen = model.frozen.numpy()
        root = tree_sum([_leaf_gradient(shape, plan.epoch, leaf, weights, frozen, scale) for leaf in leaves], _add)
        losses.append(sum(len(leaf) * _leaf_loss(leaf) for leaf in leaves) / plan.num_samples)
        finite = bool(np.isfinite(root[1]).all())
        if finite:
            divisor = plan.num_samples * scale
            for name, value in zip(_NAMES, root, strict=True):
                named[name].grad = None if value is None else torch.from_numpy(value) / divisor
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        else:
            scale /= 2
        tensors.append(state())
    return Expected(tuple(digest(t) for t in tensors), tuple(losses), tuple(tensors))


def explain_difference(shape: Shape, views: Sequence[Tensor], layout: Layout, want: Sequence[Tensor]) -> str:
    """``lost``, ``twice`` or ``bits``: what is wrong with parameters that are not the reference's."""
    for entry, got, expected in zip(layout.entries, views, want, strict=True):
        if entry.name != "applied":
            continue
        lost = [i for i, (g, e) in enumerate(zip(got.tolist(), expected.tolist(), strict=True)) if abs(g) < abs(e)]
        twice = [i for i, (g, e) in enumerate(zip(got.tolist(), expected.tolist(), strict=True)) if abs(g) > abs(e)]
        if twice:
            return f"twice: (epoch, sample) {[divmod(i, shape.num_samples) for i in twice[:6]]}"
        if lost:
            return f"lost: (epoch, sample) {[divmod(i, shape.num_samples) for i in lost[:6]]}"
        if not torch.equal(got, expected):
            return "bits: applied is not finite"
    names = [e.name for e, g, w in zip(layout.entries, views, want, strict=True) if not torch.equal(g, w)]
    return f"bits: {', '.join(names)} differ from the reference"
