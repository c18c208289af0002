"""The aggregator: the one owner of parameters, optimizer and the thread that changes them.

It has the block store add what counts, takes the step's root from there, and has the update rule apply it. What takes
longer than the way to a thread and back runs in its one thread; what others submit to that thread sees the parameters
between two commits, never inside one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from w5xde_async.compute.block import ComputedBlock
from w5xde_async.coordinator.parameters.owner import ParameterOwner
from w5xde_async.coordinator.parameters.publisher import Piece, Publisher
from w5xde_async.coordinator.parameters.step_reports import known_mean
from w5xde_async.coordinator.training import RunContext
from w5xde_async.errors import UpdateFailed
from w5xde_async.hub.work.block_store import Addition, BlockStore
from w5xde_async.openmp import release_helpers
from w5xde_async.params.flat import ResultVector, l2_norm
from w5xde_async.params.reducer import Addends, Halves, VectorPool, add_into
from w5xde_async.plan.sampler import StepPlan
from w5xde_async.plan.tree import Block
from w5xde_async.randomness import Claim
from w5xde_async.store.failpoints import failpoint
from w5xde_async.updates.sync import Applied, SchedulerFailed, SyncRule
from w5xde_async.users_code import users_code
from w5xde_async.wire.messages import Done

_T = TypeVar("_T")

#: Additions of at most this much are done on the loop: they take about as long as the way to a thread and back, and a
#: bucket is added while it is still in the cache.
_INLINE_ADD_BYTES = 4 << 20
#: So are updates of vectors of at most this size, as long as the last one took less than ``_INLINE_UPDATE_S``.
_INLINE_UPDATE_BYTES = 4 << 20
_INLINE_UPDATE_S = 0.002
_ONE_THREAD_BYTES = 1 << 20


@dataclass(slots=True)
class StepState:
    """What the current step has gathered."""

    plan: StepPlan
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
    def samples(self) -> tuple[int, ...]:
        """Samples of each leaf."""
        return self.plan.leaf_sizes(0, self.plan.num_leaves)

    def mean(self, values: Sequence[float]) -> float:
        """One value a leaf, weighted by samples, added in leaf order."""
        return sum(n * value for n, value in zip(self.samples, values, strict=True)) / self.plan.num_samples

    def mean_metrics(self) -> dict[str, float]:
        """Each over the leaves that have it."""
        return {name: known_mean(zip(self.samples, values, strict=True))[0] for name, values in self.metrics.items()}

    def note(self, block: Block, done: Done | ComputedBlock) -> None:
        """A block is finished: keep what its DONE says, or what has computed it here."""
        self.losses[block.start : block.stop] = done.losses
        for index, name in enumerate(done.metric_names):
            values = self.metrics.setdefault(name, [float("nan")] * self.plan.num_leaves)
            values[block.start : block.stop] = done.metrics[index :: len(done.metric_names)]
        untouched = set(done.untouched)
        self.untouched = untouched if self.untouched is None else self.untouched & untouched


class Committed(NamedTuple):
    """A step that was applied: what tells workers of it, and seconds by phase."""

    step: StepState
    applied: Applied
    pieces: list[Piece]
    phases_s: dict[str, float]


class Broken(Exception):
    """The update of ``step`` raised ``error``."""

    def __init__(self, step: StepState, error: Exception) -> None:
        self.step, self.error = step, error
        super().__init__(str(error))


class Aggregator(ParameterOwner):
    """Parameters and optimizer, and what the step under way has gathered. ``store`` has its sums."""

    def __init__(
        self, context: RunContext, rule: SyncRule, store: BlockStore, publisher: Publisher, *,
        keep: VectorPool | None = None, beside: bool = False,
    ) -> None:  # fmt: skip
        """``keep``: where copies of each step's sum come from, if wanted. ``beside``: leaves are computed in this
        process too, and the thread that makes updates is to keep no helpers from one to the next."""
        super().__init__(context)
        self.rule, self._store, self._publisher = rule, store, publisher
        self.step: StepState | None = None
        self._keep = keep
        groups = self.layout.groups
        self._is_gradient = [groups[bucket.group].role == "grad" for bucket in self.layout.result_buckets]
        self._beside = beside
        self._update_s = math.inf  # what the last update took
        self._small = self.layout.vector_bytes <= _INLINE_UPDATE_BYTES and rule.on_device is None
        # Small updates are made with as many threads here and there: an optimizer that multiplies matrices has other
        # last bits with another count. Of few values a second thread takes longer to wake than it saves.
        alone = rule.is_elementwise and self.layout.vector_bytes <= _ONE_THREAD_BYTES
        self._threads = 1 if alone else torch.get_num_threads()

    @property
    def is_quick(self) -> bool:
        """Whether the next update will be made on the loop: who waits for it need not do anything before."""
        return self._small and self._update_s < _INLINE_UPDATE_S and self.is_idle and self._keep is None

    def begin(self, plan: StepPlan, *, rate_factor: float = 1.0, measure: bool = False) -> None:
        """The next step. ``measure``: the halves of its sum, which no lease may span then."""
        self.step = StepState(plan, [0.0] * plan.num_leaves, self._clock(), rate_factor=rate_factor)
        self._store.begin(Block(0, plan.num_leaves), measure_halves=measure)

    def weigh(self, norms: dict[int, float], bucket: int, piece: Tensor, *, is_sum: bool) -> None:
        """Put the norm of a bucket of floats into ``norms``, in the parameters' thread.

        ``is_sum``: its block is the whole step, and nobody but a worker writes where it lies. Then what is weighed is
        the quotient that will be applied, in memory of the rule's own; a journal has the sum itself, and so do those
        who compare results (``begin_anew``). Where the rule weighs all buckets together it is ``expected_norms`` that
        has them.
        """
        step, rule = self.step, self.rule
        begins = is_sum and self._is_gradient[bucket] and self._keep is None
        samples = 0 if step is None else step.plan.num_samples

        def weigh() -> None:
            norm = rule.expect(bucket, piece, samples) if begins and samples else l2_norm(piece)
            if norm is not None:
                norms[bucket] = norm

        self.post(weigh)

    def expected_norms(self, pieces: Mapping[int, Tensor]) -> dict[int, float]:
        """Of those of ``pieces``, by bucket, whose norms ``weigh`` has left for now. To be submitted."""
        return self.rule.expected_norms(pieces)

    def begin_anew(self) -> None:
        """What ``weigh`` has begun is not used: the update reads its sums when it is made."""
        self.post(self.rule.expect_nothing)

    async def reduce(self) -> bool:
        """Add what has come. False when there was nothing."""
        additions = self._store.additions()
        if self._store.nbytes(additions) > _INLINE_ADD_BYTES:
            await self.submit(lambda: self._add(additions))
        else:
            self._add(additions)
        return bool(additions)

    async def commit(self) -> Committed:
        """Apply the complete step. Raises UpdateFailed: the parameters are ``torn`` unless the scheduler raised."""
        step = self.step
        assert step is not None
        additions = self._store.additions()
        waited = self._clock() - step.began - step.reduce_s
        apply_s = encode_s = 0.0

        def apply() -> tuple[Applied, list[Piece]]:
            nonlocal apply_s, encode_s
            self._add(additions)
            began = self._clock()
            root, present, addends, halves = self._store.take()
            if self._keep is not None:  # before the rule, which works in place
                step.root, step.present = self._keep.take(), present
                addends = [(add_into(mine, those),) for mine, those in zip(step.root.buckets, addends, strict=True)]
                step.copy_s = self._clock() - began
                began += step.copy_s
            if halves is not None:
                scale = self.rule.loss_scale**2  # what the workers multiplied with; the update may change it
                step.halves = Halves(*(square / scale for square in halves))
            applied = self._apply(step, root, present, addends)
            apply_s = self._clock() - began
            pieces = self._publisher.advance(applied.changed)
            encode_s = self._clock() - began - apply_s
            return applied, pieces

        def apply_small() -> tuple[Applied, list[Piece]]:
            return self._with_own_threads(apply)

        def apply_beside() -> tuple[Applied, list[Piece]]:
            try:
                return apply()
            finally:
                release_helpers()  # a tenth of a millisecond; leaves would take three times as long

        try:
            made: tuple[Applied, list[Piece]] | None = None
            if self._small and self._update_s < _INLINE_UPDATE_S and self.is_idle:
                # Whoever draws just now is waited for in the thread.
                with Claim() if self.rule.may_draw else nullcontext(True) as mine:
                    made = apply_small() if mine else None
            if made is None:
                away = apply_beside if self._beside else apply
                made = await self.submit(apply_small if self._small else away)
            applied, pieces = made
        except Exception as error:
            raise await self.broke(step, error) from error
        self._update_s = apply_s + encode_s
        self._store.clear()
        self.step = None
        seconds = {"wait": max(0.0, waited), "reduce": step.reduce_s, "apply": apply_s, "publish": encode_s}
        return Committed(step, applied, pieces, seconds)

    def commit_own(self, step: StepState, computed: ComputedBlock) -> Applied:
        """Apply a step that was computed here as one block, in whose own memory it is divided: to be called where
        ``is_quick``, and no code of somebody's own may draw. Raises Broken, for ``broke``."""
        began, absent = self._clock(), computed.absent
        present = [bucket not in absent for bucket in range(len(self._is_gradient))]
        try:
            applied = self._with_own_threads(lambda: self._apply(step, computed.vectors[-1], present))
        except Exception as error:
            raise Broken(step, error) from error
        self._update_s = self._clock() - began
        self.step = None
        return applied

    def _with_own_threads(self, apply: Callable[[], _T]) -> _T:
        """A small update is made with as many threads wherever it is made."""
        threads = torch.get_num_threads()
        if threads == self._threads:
            return apply()
        torch.set_num_threads(self._threads)
        try:
            return apply()
        finally:
            torch.set_num_threads(threads)

    def _apply(
        self, step: StepState, root: ResultVector, present: Sequence[bool], addends: Sequence[Addends] | None = None
    ) -> Applied:
        failpoint("apply.before")
        with users_code():  # the optimizer and the scheduler
            applied = self.rule.apply(
                root, present, step.plan.num_samples, step.untouched or set(), step=step.plan.step, addends=addends,
                rate_factor=step.rate_factor,
            )  # fmt: skip
        failpoint("apply.after")
        return applied

    async def broke(self, step: StepState, error: Exception) -> UpdateFailed:
        """What is raised for an update that raised ``error``."""
        self.torn = not isinstance(error, SchedulerFailed)
        return await self._failed(step.plan.step, error)

    def _add(self, additions: Sequence[Addition]) -> None:
        began = self._clock()
        self._store.add(additions)
        if self.step is not None:
            self.step.reduce_s += self._clock() - began
