"""One block while it is computed: what it is made of, and what has come of it so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Bucket
from w5xde_async.wire.messages import METRIC_NAME, MOST_METRICS

__all__ = ["Block", "Emit", "Task"]

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
