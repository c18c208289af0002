"""The rules of ``updates`` over a model's own memory: contributions in, new parameters out.

One contribution is what one worker submits: sums over its samples of gradients (``async``) or how far its parameters
went (local rules), and what became of buffers. Each class here puts one of the pure rules in front of ``FlatState`` and
keeps the book that belongs into the same checkpoint: which steps of the sampler are in, and how many samples.

All methods run in the aggregator's thread. Trainable parameters are float32, in one group; ``check_trainable`` says so
to the user. Holds: each step's samples count once, over restarts too (G1), for what is offered and what is noted as
done are in one state_dict. Does not hold: the same bits (G3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from w5xde_async.errors import JobError
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.params.layout import Bucket, Layout
from w5xde_async.plan.stream import DoneSteps
from w5xde_async.updates.admission import Outcome
from w5xde_async.updates.asynchronous import AsynchronousConfig, AsynchronousRule
from w5xde_async.updates.averages import Average, CoordinateMedian, RadialDirectionalAverage, WeightedMean
from w5xde_async.updates.buffers import BufferState, mean_of
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.delayed import DelayedNesterovConfig, DelayedNesterovRule
from w5xde_async.updates.fragments import Fragment
from w5xde_async.updates.local import LocalStepsConfig
from w5xde_async.updates.norm_gate import NormGate, NormGateConfig
from w5xde_async.updates.streaming import StreamingRule
from w5xde_async.updates.sync import Applied, SyncRule
from w5xde_async.wire.messages import VerdictCode

_ROWS = 64  # results that an average which keeps them all has room for
_SPREAD = 0.5  # of norms, in medians: with the default of --norm-gate four times the median is not unusual
_KEPT_BUFFERS = 64  # versions, at most: a model may have many buffers, and results so old weigh little
_REMEMBERED = 1024  # versions by which a fragment's staleness is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one worker submits. ``vector`` is used up; ``present`` per result bucket; ``version``: computed with.

    ``fragment``: the one that its buckets belong to (0 where there is but one). ``steps``: sampler steps that no
    earlier contribution holds; ``counted``: their samples. ``samples``: what it weighs. ``path``: of a pseudo-gradient,
    how far its steps may have gone (samples times learning rate, summed). ``sender``: who submits it; ``workers`` are
    present. ``vouched``: the norm that it may have by what others made of the same steps.
    """

    steps: tuple[int, ...]
    counted: int
    samples: int
    version: int
    fragment: int
    vector: ResultVector
    present: Sequence[bool]
    untouched: frozenset[int]
    path: float = 0.0
    workers: int = 1
    sender: str = "one"
    vouched: float = 0.0


def check_trainable(layout: Layout) -> int:
    """The one group of trainable parameters. Raises JobError where they are not all float32."""
    groups = [group for group in layout.groups if group.role == "grad"]
    if len(groups) != 1 or groups[0].dtype != torch.float32:
        found = ", ".join(sorted(str(group.dtype).removeprefix("torch.") for group in groups))
        raise JobError(
            "model",
            f"its trainable parameters are {found}; only the sync rule trains other types than float32",
            "keep them float32 (precision='bf16' computes in bfloat16 all the same), or use --update sync",
        )
    return groups[0].index


def bucket_fragments(layout: Layout, num_fragments: int) -> tuple[tuple[int, ...], ...]:
    """Buckets of each fragment: every ``num_fragments``-th one, so each has early and late layers.

    Fewer fragments where there are fewer buckets. Buffers that are not trained travel with fragment 0.
    """
    group = check_trainable(layout)
    trained = [bucket.index for bucket in layout.result_buckets if bucket.group == group]
    others = [bucket.index for bucket in layout.result_buckets if bucket.group != group]
    fragments = [trained[index::num_fragments] for index in range(min(num_fragments, len(trained)))]
    fragments[0] += others
    return tuple(tuple(fragment) for fragment in fragments)


class _Buffers:
    """Means and maxima of buffers over the contributions since the last commit.

    A floating buffer goes towards the mean of its values at the workers. Each of these lies between what the worker
    began with and what its data say, and so does every mean of them, whenever they began. Changes do not: two that
    began at the same value, one after the other, make a running variance negative.

    ``changes``: they come as sums of changes from the values of the contribution's version (``async``), so these are
    kept for the last ``versions`` commits; an older contribution moves no floating buffer.
    """

    def __init__(self, layout: Layout, state: FlatState, *, changes: bool, versions: int = 0) -> None:
        self._state, self._changes = BufferState(layout, state), changes
        self._values: dict[int, Tensor] = {}  # means, and maxima
        self._weights: dict[int, float] = {}  # of means
        self._samples: dict[int, int] = {}
        self._moved: dict[int, Tensor] = {}  # of means: where a contribution has another value than it began with
        self._before: deque[dict[int, Tensor]] = deque(maxlen=versions)  # floating buckets as of earlier versions
        self._changed: frozenset[int] = frozenset()  # buckets, by the last commit

    def refusal(self, given: Contribution) -> str:
        """Why the contribution's buffers do not count; "" where they do."""
        return self._state.implausible(given.vector, given.present, given.samples)

    def add(self, given: Contribution, *, staleness: int = 0, weight: float = 1.0) -> None:
        """``weight``: of the contribution's floating buffers; what is missing to 1 stays with the state's values."""
        for bucket in self._state.buckets:
            if not given.present[bucket.index]:
                continue
            piece, known = given.vector.buckets[bucket.index], self._values.get(bucket.index)
            if self._state.roles[bucket.index] == "max":
                self._values[bucket.index] = piece.clone() if known is None else torch.maximum(known, piece)
            elif (found := self._found(bucket, piece, given.samples, staleness)) is not None:
                value, moved = found
                weighs = given.samples * weight
                total = self._weights.get(bucket.index, 0.0) + weighs
                if known is not None:
                    value = mean_of(known, value, weighs / total if total else 0.0)
                    moved = moved | self._moved[bucket.index]
                self._values[bucket.index], self._moved[bucket.index] = value, moved
                self._weights[bucket.index] = total
            else:
                continue
            self._samples[bucket.index] = self._samples.get(bucket.index, 0) + given.samples

    def _found(self, bucket: Bucket, piece: Tensor, samples: int, staleness: int) -> tuple[Tensor, Tensor] | None:
        """A contribution's values and where they are no longer those it began with; None where nobody knows these."""
        if not self._changes:
            return piece.clone(), self._state.differs(bucket, piece)
        if not staleness:
            return self._state.changed(bucket, piece, samples)
        if staleness > len(self._before):
            return None
        return self._state.changed(bucket, piece, samples, self._before[-staleness][bucket.index])

    def apply(self, part: float = 1.0) -> list[int]:
        """Put them into the state; the buckets that changed. ``part``: of the way to the means."""
        if self._before.maxlen:
            # Most floating buffers of some models never change, and may be large: masks, tables of positions.
            last = self._before[-1] if self._before else {}
            self._before.append(self._state.means({i: last[i] for i in last if i not in self._changed}))
        for bucket in self._state.buckets:
            value = self._values.get(bucket.index)
            if value is None:
                continue
            moved, samples = self._moved.get(bucket.index), self._samples[bucket.index]
            if moved is None:
                self._state.write(bucket, value, samples)
            else:
                self._state.approach(bucket, value, moved, part * (self._weights[bucket.index] / samples))
        changed = list(self._values)
        self._changed = frozenset(changed)
        self._values, self._weights, self._samples, self._moved = {}, {}, {}, {}
        return changed

    def note_changed(self, buckets: Iterable[int]) -> None:
        """The commit has changed these, too."""
        self._changed |= frozenset(buckets)

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": dict(self._values), "weights": dict(self._weights), "samples": dict(self._samples),
            "moved": dict(self._moved),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before.clear()  # workers begin with what was loaded
        self._samples = {int(index): int(value) for index, value in state["samples"].items()}
        self._moved = {int(index): value.clone() for index, value in state["moved"].items()}
        if "values" in state:
            self._values = {int(index): value.clone() for index, value in state["values"].items()}
            self._weights = {int(index): float(value) for index, value in state["weights"].items()}
            return
        # Earlier checkpoints hold sums: of values, or of changes.
        self._values, self._weights = {int(index): value.clone() for index, value in state["sums"].items()}, {}
        for bucket in self._state.buckets:
            total = self._values.get(bucket.index)
            if total is None or self._state.roles[bucket.index] == "max":
                continue
            samples = self._samples[bucket.index]
            self._weights[bucket.index] = float(samples)
            if self._changes:
                self._values[bucket.index], self._moved[bucket.index] = self._state.changed(bucket, total, samples)
            else:
                total.div_(samples)


class OuterRule(ABC):
    """A rule that takes contributions as they come. ``version`` counts commits."""

    name: str
    local = True
    """Contributions are how far a worker's parameters went, not gradients."""
    loss_scale = 1.0
    scheduler: Any = None
    once = False
    """Steps of a contribution that is refused are done all the same: other fragments have them."""

    def __init__(self, layout: Layout, state: FlatState, optimizer: torch.optim.Optimizer) -> None:
        self.layout, self.state, self.optimizer = layout, state, optimizer
        self.group = check_trainable(layout)
        self.done = DoneSteps()
        self.samples = self.version = 0
        self._buffers = _Buffers(layout, state, changes=False)

    @property
    def parameters(self) -> Tensor:
        """All trainable ones, flat."""
        return self.state.groups[self.group]

    @torch.no_grad()
    def offer(self, given: Contribution) -> Outcome:
        """Count it, or say why not. Steps of an accepted one are done."""
        if reason := self._buffers.refusal(given):
            outcome = Outcome(verdict=VerdictCode.REJECTED, reason=reason)
        else:
            outcome = self._offer(given, self._staleness(given))
        if outcome.accepted:
            self._add_buffers(given, outcome)
        if outcome.accepted or self.once:
            self.samples += given.counted
            for step in given.steps:
                self.done.add(step)
        return outcome

    @torch.no_grad()
    def commit(self, fragment: int) -> Applied | None:
        """The next version, of what was offered to ``fragment``. None where too little was: then nothing changes."""
        applied = self._commit(fragment)
        self.version += 1
        return applied

    def skip(self, steps: Sequence[int], samples: int) -> None:
        """No result of these steps counts, whoever computes it: they are done without, and their samples used up."""
        self.samples += samples
        for step in steps:
            self.done.add(step)

    @abstractmethod
    def left(self, sender: str) -> None:
        """Who sent contributions is not present any more."""

    def kept_beside(self) -> list[str]:
        """As ``SyncRule.kept_beside``: of the one optimizer that steps here, where one does."""
        return []

    def begin_after(self, step: int, samples: int) -> None:
        """Steps before ``step`` were done under another rule."""
        self.done, self.samples = DoneSteps(step), samples

    @property
    @abstractmethod
    def due(self) -> bool:
        """A commit must follow now, before anything else is offered."""

    def pending(self, fragment: int) -> int:
        """Contributions that the open round of a fragment has."""
        return 0

    def _add_buffers(self, given: Contribution, outcome: Outcome) -> None:
        self._buffers.add(given)

    @abstractmethod
    def _offer(self, given: Contribution, staleness: int) -> Outcome: ...

    @abstractmethod
    def _commit(self, fragment: int) -> Applied | None: ...

    @abstractmethod
    def _rule_state(self) -> dict[str, Any]: ...

    @abstractmethod
    def _load_rule_state(self, state: Mapping[str, Any]) -> None: ...

    def _staleness(self, given: Contribution) -> int:
        return self.version - given.version

    def _applied(self, buckets: Iterable[int], norm: float, learning_rate: float | None, part: float = 1.0) -> Applied:
        changed = tuple(sorted({*buckets, *self._buffers.apply(part)}))
        return Applied(skipped=False, gradient_norm=norm, learning_rate=learning_rate, changed=changed)

    @property
    def _trained(self) -> list[int]:
        return [bucket.index for bucket in self.layout.result_buckets if bucket.group == self.group]

    def state_dict(self) -> dict[str, Any]:
        """Everything but parameters and buffers: plain containers, numbers and tensors."""
        return {
            "rule": self.name, "outer": self._rule_state(), "done": self.done.state_dict(), "samples": self.samples,
            "version": self.version, "buffers": self._buffers.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; parameters come first. Raises ValueError where it does not fit."""
        if state["rule"] != self.name:
            raise ValueError(f"the checkpoint has the rule {state['rule']!r}, not {self.name!r}")
        self._load_rule_state(state["outer"])
        self.done = DoneSteps.of_state(state["done"])
        self.samples, self.version = int(state["samples"]), int(state["version"])
        self._buffers.load_state_dict(state["buffers"])


class _Asynchronous(OuterRule):
    """``updates.asynchronous`` with the job's own optimizer."""

    name = "async"
    local = False

    def __init__(self, inner: SyncRule, state: FlatState, config: UpdateConfig, gate: NormGate | None) -> None:
        super().__init__(inner.layout, state, inner.optimizer)
        self._inner, self.scheduler = inner, inner.scheduler
        numel = self.parameters.numel()
        made = AsynchronousConfig(
            results_per_step=config.results_per_step or 1,
            max_staleness=16 if config.max_staleness is None else config.max_staleness,
            staleness_exponent=0.5 if config.staleness_exponent is None else config.staleness_exponent,
        )
        self._rule = AsynchronousRule(numel, made, average=_average(config, inner.layout, self.group, numel), gate=gate)
        self._buffers = _Buffers(inner.layout, state, changes=True, versions=min(made.max_staleness, _KEPT_BUFFERS))
        self._root = ResultVector(inner.layout)
        self._present = [bucket.group == self.group for bucket in inner.layout.result_buckets]
        self._untouched: frozenset[int] | None = None
        self._unscheduled = 0  # results that versions have, and steps of the scheduler have not

    def pending(self, fragment: int) -> int:
        return self._rule.average.count

    def kept_beside(self) -> list[str]:
        return self._inner.kept_beside()

    def left(self, sender: str) -> None:
        self._rule.admission.left(sender)

    @property
    def due(self) -> bool:
        return self._rule.ready

    def _offer(self, given: Contribution, staleness: int) -> Outcome:
        outcome = self._rule.offer(
            given.vector.group(self.group), samples=given.samples, staleness=staleness, sender=given.sender,
            present=given.workers, vouched=given.vouched,
        )  # fmt: skip
        if outcome.accepted:
            known = self._untouched
            self._untouched = given.untouched if known is None else known & given.untouched
        return outcome

    def _add_buffers(self, given: Contribution, outcome: Outcome) -> None:
        self._buffers.add(given, staleness=self._staleness(given), weight=outcome.weight)  # as its gradient weighs

    def _commit(self, fragment: int) -> Applied | None:
        self._inner.prepare()  # before anything is taken
        # The last may be fewer than K, and so may what a stop or a kill has found in the buffer: such versions are more
        # than a schedule for as many results has steps.
        per, results = self._rule.config.results_per_step, self._unscheduled + self._rule.average.count
        schedules = results >= per
        self._root.group(self.group).copy_(self._rule.take(early=True))
        applied = self._inner.apply(
            self._root, self._present, 1, self._untouched or (), step=self.version, schedules=schedules,
            merge_buffers=self._buffers.apply,
        )  # fmt: skip
        if applied.skipped:
            applied = replace(applied, changed=tuple(self._buffers.apply()))
        else:
            self._unscheduled = results - per if schedules else results
            self._buffers.note_changed(applied.changed)
        self._untouched = None
        return replace(applied, changed=tuple(sorted(applied.changed)))

    def _rule_state(self) -> dict[str, Any]:
        return {
            "asynchronous": self._rule.state_dict(), "inner": self._inner.state_dict(),
            "unscheduled": self._unscheduled, "results_per_step": self._rule.config.results_per_step,
            "untouched": None if self._untouched is None else sorted(self._untouched),
        }  # fmt: skip

    def _load_rule_state(self, state: Mapping[str, Any]) -> None:
        self._rule.load_state_dict(state["asynchronous"])
        self._inner.load_state_dict(state["inner"])
        untouched = state.get("untouched")  # earlier checkpoints lack it, and the number of results
        self._untouched = None if untouched is None else frozenset(untouched)
        as_before = state.get("results_per_step") == self._rule.config.results_per_step
        self._unscheduled = int(state.get("unscheduled", 0)) if as_before else 0


class _Fragmented(OuterRule):
    """``updates.streaming`` with its fragments made of buckets; with one fragment, ``updates.local``."""

    def __init__(
        self, name: str, layout: Layout, state: FlatState, optimizer: torch.optim.Optimizer, config: UpdateConfig,
        gate: Callable[[], NormGate] | None,
    ) -> None:  # fmt: skip
        super().__init__(layout, state, optimizer)
        self.name, self.once = name, name == "streaming"
        self.buckets = bucket_fragments(layout, config.fragments if name == "streaming" else 1)
        trained = set(self._trained)
        fragments = []
        for buckets in self.buckets:
            pieces = [layout.buckets[number] for number in buckets if number in trained]
            fragments.append(Fragment(tuple((b.offset, b.offset + b.numel) for b in pieces)))
        default_lr = 0.4 if name == "streaming" else 0.7
        made = LocalStepsConfig(
            learning_rate=config.outer_lr or default_lr,
            momentum=config.momentum,
            max_staleness=1 if config.max_staleness is None else config.max_staleness,
            staleness_exponent=0.5 if config.staleness_exponent is None else config.staleness_exponent,
        )
        self._fragments, self._learning_rate = fragments, made.learning_rate
        self._config, self._local, self._gate = config, made, gate
        self._rule = self._make()
        self._history: dict[int, tuple[int, ...]] = {0: tuple(self._rule.versions)}  # by version, of each fragment

    def _make(self) -> StreamingRule:
        def average(fragment: Fragment) -> Average:
            return _average(self._config, self.layout, self.group, fragment.numel)

        return StreamingRule(self.parameters, self._fragments, self._local, average=average, gate=self._gate)

    def left(self, sender: str) -> None:
        self._rule.left(sender)

    @property
    def due(self) -> bool:
        return self._rule.full(0)  # an average that keeps its results goes with one fragment alone

    def _staleness(self, given: Contribution) -> int:
        return 0  # ``StreamingRule`` counts versions by fragment

    def pending(self, fragment: int) -> int:
        return self._rule.pending(fragment)

    def _offer(self, given: Contribution, staleness: int) -> Outcome:
        base = self._history.get(given.version)
        if base is None:
            return Outcome(verdict=VerdictCode.STALE, reason=f"it began at version {given.version}")
        pseudo_gradient = self._fragments[given.fragment].gather(given.vector.group(self.group))
        return self._rule.offer(
            given.fragment, pseudo_gradient, samples=given.samples, path=given.path, version=base[given.fragment],
            sender=given.sender, present=given.workers, vouched=given.vouched,
        )  # fmt: skip

    def _commit(self, fragment: int) -> Applied | None:
        norm = self._rule.close(fragment)
        self._history[self.version + 1] = tuple(self._rule.versions)
        self._history.pop(self.version - _REMEMBERED, None)
        if norm is None:
            return None
        trained = set(self._trained)
        buckets = [bucket for bucket in self.buckets[fragment] if bucket in trained]
        return self._applied(buckets, norm, self._learning_rate)

    def _rule_state(self) -> dict[str, Any]:
        return self._rule.state_dict()

    def _load_rule_state(self, state: Mapping[str, Any]) -> None:
        self._rule = self._make()  # over the parameters as they were restored
        self._rule.load_state_dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._history = {self.version: tuple(self._rule.versions)}


class _Delayed(OuterRule):
    """``updates.delayed``: every accepted pseudo-gradient is a version."""

    name = "async-local"

    def __init__(
        self, layout: Layout, state: FlatState, optimizer: torch.optim.Optimizer, config: UpdateConfig,
        gate: NormGate | None, min_workers: int,
    ) -> None:  # fmt: skip
        super().__init__(layout, state, optimizer)
        self._min_workers = min_workers
        self._learning_rate = config.outer_lr or 0.7
        made = DelayedNesterovConfig(
            period=config.results_per_step or None, learning_rate=self._learning_rate, momentum=config.momentum,
            max_staleness=config.max_staleness, staleness_exponent=config.staleness_exponent or 0.0,
        )  # fmt: skip
        self._rule = DelayedNesterovRule(self.parameters, made, gate=gate)
        self._norm: float | None = None
        self._part = 1.0  # of the buffers, as of the last pseudo-gradient

    def left(self, sender: str) -> None:
        self._rule.admission.left(sender)

    @property
    def due(self) -> bool:
        return self._norm is not None

    def _offer(self, given: Contribution, staleness: int) -> Outcome:
        pseudo_gradient, workers = given.vector.group(self.group), max(given.workers, self._min_workers)
        outcome = self._rule.offer(
            pseudo_gradient, samples=given.samples, path=given.path, staleness=staleness, workers=workers,
            sender=given.sender, present=given.workers, vouched=given.vouched,
        )  # fmt: skip
        if outcome.accepted:
            self._norm, self._part = outcome.norm, 1.0 / (self._rule.config.period or workers)
        return outcome

    def _commit(self, fragment: int) -> Applied | None:
        norm, self._norm = self._norm, None
        return None if norm is None else self._applied(self._trained, norm, self._learning_rate, self._part)

    def _rule_state(self) -> dict[str, Any]:
        return self._rule.state_dict()

    def _load_rule_state(self, state: Mapping[str, Any]) -> None:
        self._rule.load_state_dict(state)


def make_rule(
    config: UpdateConfig, inner: SyncRule, state: FlatState, *, min_workers: int, gate: NormGateConfig | None
) -> OuterRule:
    """The rule that ``config`` names, over ``state``. ``inner`` is the job's own optimizer as the sync rule has it.

    ``gate`` None lets results of any finite size through. Raises JobError where the model does not fit.
    """
    if gate is not None:
        # Norms that were alike for a while say little of the next batch. A gradient over the median moves an update no
        # further than the median would, and a pseudo-gradient counts whole on purpose.
        gate = replace(gate, least_spread=max(gate.least_spread, _SPREAD))
    made = None if gate is None else NormGate(gate, pseudo_gradients=config.local)
    layout, optimizer = inner.layout, inner.optimizer
    if config.rule == "async":
        return _Asynchronous(inner, state, config, made)
    if config.rule == "async-local":
        return _Delayed(layout, state, optimizer, config, made, min_workers)
    return _Fragmented(
        config.rule,
        layout,
        state,
        optimizer,
        config,
        None if gate is None else partial(NormGate, gate, pseudo_gradients=True),
    )


def _average(config: UpdateConfig, layout: Layout, group: int, numel: int) -> Average:
    if config.average == "mean":
        return WeightedMean(numel)
    if config.average == "radial":
        tensors = [
            (e.offset, e.offset + e.numel) for e in layout.entries if e.group == group and e.role == "grad" and e.numel
        ]
        return RadialDirectionalAverage(numel, tensors)
    return CoordinateMedian(numel, config.results_per_step or _ROWS)
