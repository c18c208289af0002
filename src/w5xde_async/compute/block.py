"""One block while it is computed: what it is made of, and what has come of it so far."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from w5xde_async.job import Job
from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Bucket
from w5xde_async.wire.messages import METRIC_NAME, MOST_METRICS

logger = logging.getLogger(__name__)

Emit = Callable[[int, ResultVector], None]
"""Called with a bucket's number and the host vector that holds its final sum; from the compute or the copy thread."""

GRADIENTS_CHANGED = (
    "the step changed the model's gradients; leave zero_grad and the optimizer out of it, and backward too"
)


class LeafSpec(NamedTuple):
    """What a leaf's result depends on beside model, step and data. ``accumulate`` microbatches are one leaf."""

    seed: int
    precision: str
    microbatch_samples: int
    accumulate: int

    @classmethod
    def of(cls, job: Job) -> LeafSpec:
        """The job's own."""
        return cls(job.seed, job.precision, job.microbatch_samples, job.accumulate_grad_batches)


def autocast(precision: str, device_type: str = "cpu") -> Callable[[], Any] | None:
    """What a step is run under: makes a context of half precision; None for full precision."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return None if dtype is None else partial(torch.autocast, device_type, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One block to compute. ``samples`` counts each leaf's samples.

    ``tensors`` lie in host memory: the batch's, in the order of ``structure``. Shapes and dtypes are those of the
    dataset's batch; the first dimension of one with samples counts them. Nobody else reads them where they are its
    ``own``: a step may write into them.
    """

    step: int
    start: int
    samples: tuple[int, ...]
    loss_scale: float
    structure: bytes
    packed: bool
    tensors: Sequence[Tensor]
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedBlock:
    """What a block gave besides its sums; see messages.Done. ``vectors`` are to be released when they are sent.

    ``firsts``: the leaf of the block that returned each metric first; empty where all leaves return the same.
    """

    losses: tuple[float, ...]
    metric_names: tuple[str, ...]
    metrics: tuple[float, ...]
    untouched: tuple[int, ...]
    absent: tuple[int, ...]
    splits: int
    compute_s: float
    vectors: tuple[ResultVector, ...]
    drew: bool = False
    firsts: tuple[int, ...] = ()


class MetricNames:
    """The names of the metrics that a step has returned so far. It may return others of one batch than of the next."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}
        self._told = False

    def taken(self, metrics: Mapping[str, Any]) -> list[str]:
        """Those of ``metrics`` that are reported: at most MOST_METRICS in the life of this object.

        Raises TypeError where the metrics are no dict with str keys or too many, ValueError for a name too long or not
        printable.
        """
        if not isinstance(metrics, Mapping):
            raise TypeError(f"a step returns a loss, or (loss, {{name: number}}), not (loss, {described(metrics)})")
        if len(metrics) > MOST_METRICS:
            raise TypeError(f"a step returns at most {MOST_METRICS} metrics, not {len(metrics)}")
        for name in metrics:
            if type(name) is not str:
                raise TypeError(f"the name of metric {name!r} is of type {type(name).__name__}; it must be a str")
        taken = []
        for name in metrics:
            if name not in self._known:
                if not name.isprintable() or len(name) > METRIC_NAME:
                    raise ValueError(
                        f"a metric's name is printable and has at most {METRIC_NAME} characters: {name[:200]!r}"
                    )
                if len(self._known) >= MOST_METRICS:
                    if not self._told:
                        self._told = True
                        logger.warning(
                            "metric left out name=%s: the step has returned %d other names before; return fewer",
                            name, MOST_METRICS,
                        )  # fmt: skip
                    continue
                self._known[name] = None
            taken.append(name)
        return taken


def scalar_loss(loss: object) -> Tensor:
    """The loss that a step gave, in float32 and without dimensions. Raises TypeError for what has no gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        raise TypeError(f"the step gave {described(loss)} as loss, not a tensor with one element{_remedy(loss)}")
    if loss.dim() or loss.dtype != torch.float32:
        loss = loss.reshape(()).float()
    if loss.grad_fn is None:
        raise TypeError("the loss does not depend on any trainable parameter")
    return loss


def _remedy(loss: object) -> str:
    if loss is None:
        return ": it has no return, or the loss function has none"
    if isinstance(loss, bool | int | float | np.generic | np.ndarray):
        return ": a number has no gradient; return the tensor, without .item(), float(), .detach() or .numpy()"
    if isinstance(loss, dict):
        return ": return the tensor that is to be minimized, or (loss, {name: number}) with the rest of it"
    if isinstance(loss, list):
        return ": return one tensor, such as their sum"
    if isinstance(loss, Tensor) and loss.is_complex():
        return ": take its real part, or its magnitude"
    return ": take its mean, or give the loss reduction='mean'" if isinstance(loss, Tensor) and loss.numel() else ""


def described(value: object) -> str:
    """What somebody returned, in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}" + (f" and {value.dtype}" if value.is_complex() else "")
    return type(value).__name__


def _number(name: str, value: Any) -> Tensor | float:
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.detach().float().reshape(())
    elif not isinstance(value, str | bytes):  # "0.5" is no number that somebody computed
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise TypeError(f"metric {name!r} is {described(value)}; it must be a number or a tensor with one element")


class Block:
    """The state of one block while it is computed."""

    __slots__ = (
        "changed", "emit", "emitted", "finished", "host", "landed", "leaf", "losses", "metrics", "names", "open",
        "pending", "spent", "task", "touched",
    )  # fmt: skip

    def __init__(self, task: Task, emit: Emit, names: MetricNames) -> None:
        self.task, self.emit, self.names = task, emit, names
        self.emitted: set[int] = set()
        self.spent: list[ResultVector] = []  # hosts of attempts that had emitted before they broke off
        self.host: ResultVector | None = None
        self.open: list[ResultVector] = []
        self.begin()

    def begin(self) -> None:
        self.leaf = 0
        self.losses: list[Tensor] = []
        self.metrics: list[dict[str, tuple[Tensor | float, int]]] = []  # of each leaf: sum over samples, their number
        self.touched: set[int] = set()
        self.changed: set[int] = set()
        self.landed: list[int] = []  # how many gradients each trainable parameter got in the last backward pass
        self.pending: dict[int, int] | None = None
        self.finished: set[int] = set()  # entries whose gradient has landed since the last backward pass began

    @property
    def host_vector(self) -> ResultVector:
        assert self.host is not None
        return self.host

    def count_down(self, buckets: Sequence[Bucket]) -> None:
        """The last backward begins: from now on hooks finish buckets."""
        self.pending = {bucket.index: len(bucket.entries) for bucket in buckets}

    def note_metrics(self, metrics: Mapping[str, Any], samples: int, share: float, *, first: bool) -> None:
        """What the step returned for ``samples`` samples, which are ``share`` of their leaf's."""
        if first:
            self.metrics.append({})
        if type(metrics) is dict and not metrics:
            return
        known = self.metrics[-1]
        for name in self.names.taken(metrics):
            value = metrics[name]
            value = _number(name, value)
            value = value * share if share != 1 else value
            before, weight = known.get(name, (None, 0))
            known[name] = (value if before is None else before + value, weight + samples)

    def reported(self) -> tuple[dict[str, int], list[Tensor | float]]:
        """Names, each with the first leaf that has it, and for each leaf a value of each: its mean over the samples
        that have it, NaN where none has."""
        names: dict[str, int] = {}
        for number, leaf in enumerate(self.metrics):
            for name in leaf:
                names.setdefault(name, number)
        if not names:
            return names, []
        values: list[Tensor | float] = []
        for leaf, samples in zip(self.metrics, self.task.samples, strict=True):
            for name in names:
                value, weight = leaf.get(name, (math.nan, samples))
                values.append(value if weight == samples else value * (samples / weight))
        return names, values
