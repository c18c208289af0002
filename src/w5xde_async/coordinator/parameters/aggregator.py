"""The aggregator: block sums in, a step's root out, the rule applied. The one owner of the parameters.

Sessions fill (block, bucket) slots whose memory it lends; once a block counts it adds it in tree order, and has the
update rule apply the root. Before that it can be asked how large a block is (``weigh``). What takes longer than the way
to a thread and back runs in its one thread; what others submit to that thread sees the parameters between two commits,
never inside one.
"""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from w5xde_async.coordinator.parameters.step_reports import known_mean
from w5xde_async.errors import UpdateFailed
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.params.reducer import Halves, Reducer, VectorPool
from w5xde_async.plan.sampler import StepPlan
from w5xde_async.plan.tree import Block, Frontier, Merge, right_half
from w5xde_async.store.failpoints import failpoint
from w5xde_async.updates.sync import Applied, SyncRule
from w5xde_async.users_code import users_code
from w5xde_async.wire.messages import Done

__all__ = ["INLINE_WEIGH_BYTES", "Aggregator", "StepState"]

#: Additions of at most this much are done on the loop: they take about as long as the way to a thread and back, and a
#: bucket is added while it is still in the cache.
_INLINE_ADD_BYTES = 4 << 20
#: Blocks of at most this much are weighed on the loop, for the same reasons.
INLINE_WEIGH_BYTES = 4 << 20
#: So are updates of vectors of at most this size, as long as the last one took less than ``_INLINE_UPDATE_S``.
_INLINE_UPDATE_BYTES = 64 << 10
_INLINE_UPDATE_S = 0.0005
#: Result vectors of so much are kept for the next blocks: making a small one takes longer than filling it.
_SPARE_BYTES = 16 << 20


_T = TypeVar("_T")


class _Arrival(NamedTuple):
    bucket: int
    start: int
    present: bool
    merges: list[Merge]


@dataclass(slots=True)
class StepState:
    """What the current step has gathered."""

    plan: StepPlan
    frontiers: list[Frontier]
    losses: list[float]
    began: float
    metrics: dict[str, list[float]] = field(default_factory=dict)
    untouched: set[int] | None = None
    reduce_s: float = 0.0
    root: ResultVector | None = None  # a copy of the sum as the rule got it, and which buckets are in it
    present: list[bool] = field(default_factory=list)
    copy_s: float = 0.0
    rate_factor: float = 1.0  # of this step's learning rate
    halves: Halves | None = None  # of the true gradient's sum, where it is measured

    @property
    def samples(self) -> list[int]:
        """Samples of each leaf."""
        return [self.plan.samples_in(leaf) for leaf in range(self.plan.num_leaves)]

    def mean(self, values: Sequence[float]) -> float:
        """One value a leaf, weighted by samples, added in leaf order."""
        return sum(n * value for n, value in zip(self.samples, values, strict=True)) / self.plan.num_samples

    def mean_metrics(self) -> dict[str, float]:
        """Each over the leaves that have it."""
        return {name: known_mean(zip(self.samples, values, strict=True))[0] for name, values in self.metrics.items()}

    def note(self, block: Block, done: Done) -> None:
        """A block is finished: keep what its DONE says."""
        self.losses[block.start : block.stop] = done.losses
        for index, name in enumerate(done.metric_names):
            values = self.metrics.setdefault(name, [float("nan")] * self.plan.num_leaves)
            values[block.start : block.stop] = done.metrics[index :: len(done.metric_names)]
        untouched = set(done.untouched)
        self.untouched = untouched if self.untouched is None else self.untouched & untouched


class Aggregator:
    """Parameters, optimizer and the sums of the step under way."""

    def __init__(
        self,
        layout: Layout,
        state: FlatState,
        rule: SyncRule,
        *,
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
    ) -> None:
        """``executor`` runs one call at a time, in order; it belongs to this object from now on."""
        self._clock = clock
        self.layout, self.state, self.rule = layout, state, rule
        self.step: StepState | None = None
        self.keep: VectorPool | None = None  # where a copy of each step's sum comes from, where one is wanted
        self.torn = False  # an update broke off: the parameters are not those of any version
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="w5xde-aggregate")
        self._last: Future[Any] | None = None
        # Never more than were out at once, so the stated memory holds; of large ones a few, of small ones all.
        spare = max(4, _SPARE_BYTES // max(1, layout.vector_bytes))
        self._reducer = Reducer(layout, VectorPool(layout, spare=spare))
        self._inbox: list[_Arrival] = []
        self._second: dict[int, ResultVector] = {}  # audit's lease -> what it has brought
        self._update_s = math.inf  # what the last update took

    def begin(self, plan: StepPlan, *, rate_factor: float = 1.0, measure: bool = False) -> None:
        """The next step. ``measure``: the halves of its sum, which no lease may span then."""
        frontiers = [Frontier(plan.num_leaves) for _ in self.layout.result_buckets]
        self.step = StepState(
            plan, frontiers, [0.0] * plan.num_leaves, self._clock(), rate_factor=rate_factor
        )  # fmt: skip
        self._reducer.half = right_half(plan.num_leaves) if measure else 0

    def memory(self, block: Block, bucket: int) -> memoryview:
        """Where a bucket of a block's result is received."""
        return self._reducer.vector(block.start).bucket_bytes[bucket]

    def vector(self, block: Block) -> ResultVector:
        """What has been received of a block that is not added yet."""
        return self._reducer.vector(block.start)

    def second(self, lease: int) -> ResultVector:
        """Where an audit's result is received, until ``end_second``."""
        vector = self._second.get(lease)
        if vector is None:
            vector = self._second[lease] = self._reducer.pool.take()
        return vector

    def end_second(self, lease: int) -> None:
        """The audit is over, and nothing is being received into its memory."""
        vector = self._second.pop(lease, None)
        if vector is not None:
            self._reducer.pool.give(vector)

    def weigh(self, block: Block, buckets: Iterable[int]) -> dict[int, float]:
        """L2 norm of each of a block's buckets of floats; not finite where an element is not."""
        pieces, norms = self._reducer.vector(block.start).buckets, {}
        for bucket in buckets:
            piece = pieces[bucket]
            if piece.dtype is torch.float32:
                norms[bucket] = math.sqrt(torch.dot(piece, piece).item())
        return norms

    def fill(self, block: Block, bucket: int, *, present: bool) -> bool:
        """A bucket has come, or is nothing. True when something can be added now."""
        assert self.step is not None
        merges = self.step.frontiers[bucket].fill(block)
        self._inbox.append(_Arrival(bucket, block.start, present, merges))
        return bool(merges)

    async def reduce(self) -> bool:
        """Add what has come. False when there was nothing."""
        arrivals, self._inbox = self._inbox, []
        nbytes = sum(self.layout.result_nbytes(self.layout.buckets[a.bucket]) for a in arrivals if a.merges)
        if nbytes > _INLINE_ADD_BYTES:
            await self.submit(lambda: self._add(arrivals))
        else:
            self._add(arrivals)
        return bool(arrivals)

    async def commit(self) -> tuple[StepState, Applied, dict[str, float]]:
        """Apply the complete step: its state, what was applied, seconds by phase. Raises UpdateFailed."""
        step = self.step
        assert step is not None
        arrivals, self._inbox = self._inbox, []
        waited = self._clock() - step.began - step.reduce_s
        apply_s = 0.0

        def apply() -> Applied:
            nonlocal apply_s
            self._add(arrivals)
            began = self._clock()
            root, present = self._reducer.root()
            if self.keep is not None:  # before the rule, which works in place
                step.root, step.present = self.keep.take(), present
                step.root.memory.copy_(root.memory)
                step.copy_s = self._clock() - began
                began += step.copy_s
            if (halves := self._reducer.halves()) is not None:
                scale = self.rule.loss_scale**2  # what the workers multiplied with; the update may change it
                step.halves = Halves(*(square / scale for square in halves))
            failpoint("apply.before")
            with users_code():  # the optimizer and the scheduler
                applied = self.rule.apply(
                    root, present, step.plan.num_samples, step.untouched or set(), rate_factor=step.rate_factor
                )
            failpoint("apply.after")
            apply_s = self._clock() - began
            return applied

        small = self.layout.vector_bytes <= _INLINE_UPDATE_BYTES and self._update_s < _INLINE_UPDATE_S
        try:
            applied = apply() if small and self._idle() else await self.submit(apply)
        except Exception as error:
            self.torn = True
            lines = await self.submit(partial(traceback.format_exception, error))  # reads source files
            raise UpdateFailed(step.plan.step, error, "".join(lines)[-8000:]) from error
        self._update_s = apply_s
        self._reducer.clear()
        self.step = None
        return step, applied, {"wait": max(0.0, waited), "reduce": step.reduce_s, "apply": apply_s}

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of every tensor, by entry name. To be submitted."""
        with torch.no_grad():
            return {entry.name: view.clone() for entry, view in zip(self.layout.entries, self.state.views, strict=True)}

    async def aclose(self) -> None:
        """Wait for the thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._executor.shutdown)

    def submit(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        """Run ``call`` in the aggregator's thread: between two commits, never inside one."""
        future = self._executor.submit(call)
        self._last = future
        return asyncio.wrap_future(future)

    def _idle(self) -> bool:
        """Whether everything that was submitted is done (first in, first out)."""
        return self._last is None or self._last.done()

    def _add(self, arrivals: Sequence[_Arrival]) -> None:
        began = self._clock()
        for bucket, start, present, merges in arrivals:
            self._reducer.put(bucket, start, present=present)
            for left, right in merges:
                self._reducer.merge(bucket, left, right)
        if self.step is not None:
            self.step.reduce_s += self._clock() - began
