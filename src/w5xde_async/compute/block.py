"""One block while it is computed: what it is made of, and what has come of it so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.params.layout import Bucket, Layout
from w5xde_async.wire.messages import METRIC_NAME, MOST_METRICS

__all__ = ["Block", "Computing", "Emit", "Outcome", "Task"]

Emit = Callable[[int, ResultVector], None]
"""Called with a bucket's number and the host vector that holds its final sum; from the compute or the copy thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One block to compute. ``tensors`` lie in host memory; ``samples`` counts each leaf's samples."""

    step: int
    start: int
    samples: tuple[int, ...]
    loss_scale: float
    structure: bytes
    packed: bool
    tensors: Sequence[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a block gave besides its sums; see messages.Done. ``vectors`` are to be released when they are sent."""

    losses: tuple[float, ...]
    metric_names: tuple[str, ...]
    metrics: tuple[float, ...]
    untouched: tuple[int, ...]
    absent: tuple[int, ...]
    splits: int
    compute_s: float
    vectors: tuple[ResultVector, ...]


class Computing(Protocol):
    """What computes blocks: an engine in this process, or one in a process of its own. One thread."""

    layout: Layout
    device: torch.device
    model: nn.Module
    incoming: FlatState
    clock: Callable[[], float]

    @property
    def live(self) -> FlatState:
        """What the model computes with."""

    @property
    def tensors(self) -> list[Tensor]:
        """The model's own tensors, in layout order."""

    def load(self, buckets: Iterable[int]) -> None:
        """``incoming`` holds a new version, of which ``buckets`` came."""

    def refresh(self, buckets: Iterable[int]) -> None:
        """``live`` has new values in these buckets."""

    def compute(self, task: Task, emit: Emit) -> Outcome:
        """Compute one block; every bucket that changed is given to ``emit`` once. Raises LeafError."""

    def counted(self, task: Task, emit: Emit) -> tuple[Outcome, int]:
        """``compute``, and the floating-point operations that it took."""

    def keep_results(self) -> None:
        """From now on blocks' results stay where ``live`` is."""

    def unbind(self) -> None:
        """Somebody else has set the parameters' gradients."""

    def release(self, vector: ResultVector) -> None:
        """A block's vector has been sent; it may be written again. Any thread."""

    def close(self) -> None:
        """Free threads, hooks and processes."""


class Block:
    """The state of one block while it is computed."""

    __slots__ = (
        "changed", "emit", "emitted", "host", "leaf", "losses", "metric_names", "metrics", "open", "pending", "spent",
        "task", "touched",
    )  # fmt: skip

    def __init__(self, task: Task, emit: Emit) -> None:
        self.task, self.emit = task, emit
        self.emitted: set[int] = set()
        self.spent: list[ResultVector] = []  # hosts of attempts that had emitted before they broke off
        self.host: ResultVector | None = None
        self.open: list[ResultVector] = []
        self.begin()

    def begin(self) -> None:
        self.leaf = 0
        self.losses: list[Tensor] = []
        self.metric_names: tuple[str, ...] | None = None
        self.metrics: list[Tensor | float] = []
        self.touched: set[int] = set()
        self.changed: set[int] = set()
        self.pending: dict[int, int] | None = None

    @property
    def host_vector(self) -> ResultVector:
        assert self.host is not None
        return self.host

    def count_down(self, buckets: Sequence[Bucket]) -> None:
        """The last backward begins: from now on hooks finish buckets."""
        self.pending = {bucket.index: len(bucket.entries) for bucket in buckets}

    def note_metrics(self, metrics: Mapping[str, Any], share: float, *, first: bool) -> None:
        names = tuple(metrics)
        if self.metric_names is None:
            if len(names) > MOST_METRICS or not all(type(name) is str for name in names):
                raise TypeError(f"a step returns at most {MOST_METRICS} metrics with string names")
            if not all(name.isprintable() and len(name) <= METRIC_NAME for name in names):
                raise ValueError(f"a metric's name is printable and has at most {METRIC_NAME} characters: {names}")
            self.metric_names = names
        if names != self.metric_names:
            raise TypeError(f"the step returned metrics {names} after {self.metric_names}; return the same every time")
        values = [v.detach().float().reshape(()) if isinstance(v, Tensor) else float(v) for v in metrics.values()]
        if first:
            self.metrics.extend(value * share if share != 1 else value for value in values)
        else:
            for offset, value in enumerate(values, start=len(self.metrics) - len(names)):
                self.metrics[offset] = self.metrics[offset] + value * share
