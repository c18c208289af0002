"""What every training has in common, whatever its update rule: what it is made of, what it counts, and how it ends.

``Training`` is the interface that the run, durability, monitoring and the service rely on. ``coordinator.sync`` and
``coordinator.outer`` implement it.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from w5xde_async.coordinator.verification_config import VerificationConfig
from w5xde_async.data.loader import BlockData, Loader
from w5xde_async.errors import LeafFailed, LinkLost, LocalError, RemoteError, W5xdeError, headline
from w5xde_async.hub.config import NetworkConfig
from w5xde_async.hub.members.contributions import Contributions
from w5xde_async.hub.members.liveness import Scheduling
from w5xde_async.hub.members.roster import Greeting, Roster
from w5xde_async.hub.members.session import Session, WorkSource
from w5xde_async.hub.work.verdicts import Counted, Verdicts
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.plan.leases import FailedWork, LeaseTable, LeaseTerms
from w5xde_async.plan.membership import Member, Standing
from w5xde_async.plan.numerics import RunNumerics
from w5xde_async.plan.pacing import Pacing
from w5xde_async.plan.sampler import Sampler, StepPlan
from w5xde_async.telemetry.events import Bus, Waiting, Warned
from w5xde_async.wire.messages import Done, Failed, Unread, VerdictCode

_T = TypeVar("_T")
_MOST_NAMED = 1024  # workers
_MOST_CAUSES = 64
_TOLD_AGAIN_S = 60.0
_SILENT_READ_S = 60.0
_LONGEST_TICK_S = 5.0  # between two looks at it: what is longer, this process stood still
_MOST_SHOWN = 32  # sample indices in a warning


class NonFinite(W5xdeError):
    """Too many steps in a row had a non-finite gradient. Fields: ``step``, ``count``. ``codec``: of the uplink, where
    it keeps back most of each gradient."""

    def __init__(self, step: int, count: int, codec: str = "") -> None:
        self.step, self.count = step, count
        kept_back = f" (--codec {codec} bears less of it, and of momentum, than no codec does)" if codec else ""
        super().__init__(
            f"the gradient was not finite in {count} steps in a row, when the run was at step {step}: "
            f"training diverges; lower the learning rate{kept_back}, clip gradients at a smaller norm, or look at "
            "the data (or, where not all workers can be trusted, at whose results were refused)"
        )


class ParametersNotFinite(NonFinite):
    """An update has made parameters infinite or NaN, which no later one mends. Fields: ``step``, ``count`` (0)."""

    def __init__(self, step: int) -> None:
        super().__init__(step, 0)
        self.args = (
            f"an update has made parameters infinite or NaN, seen at step {step}; nothing that follows mends that: "
            "lower the learning rate (--override optimizer.lr=...), clip gradients, or keep the model's parameters in "
            "float32, and go on from an earlier checkpoint (--resume PATH)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One commit, for whoever follows the run: how far it is now, and was before, in steps of the sampler."""

    step: int
    before: int

    def passes(self, every: int) -> bool:
        """Whether a multiple of ``every`` steps lies in it."""
        return self.step // every > self.before // every


class Counts(NamedTuple):
    """What became of the work so far. ``leaves`` were used, ``leaves_wasted`` were not; the rest counts leases."""

    leaves: int
    leaves_wasted: int
    stale: int
    duplicate: int
    rejected: int
    backed_up: int

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(*map(sum, zip(self, other, strict=True)))


NOTHING_YET = Counts(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the run has come to before a training begins: steps and samples applied, the last loss, work and workers'
    shares."""

    step: int = 0
    samples: int = 0
    loss: float | None = None
    counts: Counts = NOTHING_YET
    downlink_bytes: tuple[int, int] = (0, 0)
    trained_s: float = 0.0  # from the first leases to the last commit
    contributions: Contributions = field(default_factory=Contributions)


def _nobody(*_: object) -> None:
    """A callback that does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What a training tells whoever runs it, at once and on the event loop's thread."""

    on_commit: Callable[[Commit], None] = _nobody
    """After each commit, before anything else can touch the parameters."""
    awaited: Callable[[], asyncio.Task[None] | None] = _nobody
    """What the next commit waits for under an exact rule: it decides whether there is one. None: nothing."""
    on_quarantine: Callable[[str, str], None] = _nobody
    """A worker was quarantined: the name it has proved, or else its id, and why."""
    on_skip: Callable[[int], None] = _nobody
    """A step, after so many, had no update since it was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What everything in one phase of a run works with. ``clock`` gives seconds.

    ``total_steps`` is where the phase ends as it begins; a training whose batch grows may end elsewhere. ``executor``
    runs what changes the parameters, one call at a time (None: a thread); it belongs to the training.
    """

    layout: Layout
    state: FlatState
    sampler: Sampler
    loader: Loader
    config: NetworkConfig
    checks: VerificationConfig
    bus: Bus
    clock: Callable[[], float]
    total_steps: int
    history: History = field(default_factory=History)
    numerics: RunNumerics = field(default_factory=RunNumerics)
    counted: Counted = field(default_factory=Counted)
    hooks: Hooks = field(default_factory=Hooks)
    executor: Executor | None = None
    random_bytes: Callable[[int], bytes] = os.urandom


class Lifecycle:
    """How a training ends: a stop or a failure. ``wake`` is set for the task that drives the training."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.wake = asyncio.Event()
        self.failure: BaseException | None = None
        self.stopping = False
        self.stop_at = 0.0  #: when work under way is given up, once ``stopping``

    @property
    def ends(self) -> bool:
        """Whether the training was stopped or has failed."""
        return self.stopping or self.failure is not None

    def is_over(self, now: float) -> bool:
        """Whether work under way is waited for no longer: the training has failed, or a stop's grace has passed."""
        return self.failure is not None or (self.stopping and now >= self.stop_at)

    def stop(self, grace_s: float) -> bool:
        """End in good order, and give up what is under way after ``grace_s``. True for the first call."""
        first, self.stopping = not self.stopping, True
        if first:
            self.stop_at = self._clock() + grace_s
        self.wake.set()
        return first

    def fail(self, error: BaseException) -> None:
        """End now, with the first error that was given."""
        self.failure = self.failure or error
        self.wake.set()

    def guarded(self, call: Callable[..., object]) -> Callable[..., None]:
        """``call`` for the event loop to make, which would log what it raises, and go on without it: that ends this."""

        def guard(*given: Any) -> None:
            try:
                call(*given)
            except Exception as error:
                self.fail(ending(error))

        return guard

    @contextmanager
    def failure_set_aside(self) -> Iterator[None]:
        """What is done inside is done as if nothing had failed before. An earlier failure still comes first."""
        earlier, self.failure = self.failure, None
        try:
            yield
        finally:
            self.failure = earlier or self.failure


def ending(error: Exception) -> W5xdeError:
    """What a run ends of where nothing should be raised: an error that has words of its own, as that of the job's
    scheduler, when a lease was to be given, or a fault of ours. What a peer does ends no run."""
    if isinstance(error, W5xdeError) and not isinstance(error, RemoteError | LinkLost):
        return error
    fault = LocalError(f"a fault of the coordinator itself: {type(error).__name__}: {error}")
    fault.__cause__ = error
    return fault


_NEWS_S, _LONG_S = 10.0, 60.0  # between two lines of one wait; and once it is this long
_NUMBER = re.compile(r"\d+")  # of a sample, a size: most causes name one
#: What is said where a worker has not the job's code, and the program no graph for a batch.
WITHOUT_CODE = (
    "workers without --job cannot compute batches {sizes}: the program of the step holds for the sizes that it was "
    "traced with"
)


class Phase:
    """What every training holds, whatever its rule: its members, what they are told, what their work has come to."""

    def __init__(self, context: RunContext, greeting: Greeting, scheduling: Scheduling, *, version: int) -> None:
        """``version``: the one that was published last."""
        config, history = context.config, context.history
        self._context, self._ledger = context, scheduling.ledger
        self.lifecycle = Lifecycle(context.clock)
        self.roster = Roster(
            scheduling, greeting, config, context.bus, context.clock,
            contributions=history.contributions, numerics=context.numerics, on_quarantine=context.hooks.on_quarantine,
        )  # fmt: skip
        self.verdicts = Verdicts(
            self.roster.tell, lasting=self.roster.keeps_residuals, version=version, counted=context.counted
        )
        self.samples_applied = history.samples  #: of the steps that are done, those of earlier phases included
        self.last_loss = history.loss  #: of the last commit that has a finite one, if any has
        self.leaves = self.leaves_wasted = 0  #: computed and used, and not used
        self.refused: Counter[VerdictCode] = Counter()  #: leases whose work was not used, by verdict
        self.begun = False  #: leases are given
        self.min_workers = config.min_workers  #: so many have to come before; fewer where some never will
        self._began_at = self._committed_at = 0.0
        self._waiting = ""  # what was said last of why they are not
        self._nonfinite, self._told_beside, self._told_untouched = 0, False, False
        self._told_of: dict[str, float] = {}  # when a failure was told, by its cause
        self._unread: dict[str, None] = {}  # workers that could not read their own data; they were named once
        self._foreign: dict[str, None] = {}  # those whose data is not the run's
        self._reading_hangs, self._silent_s, self._looked_at = False, 0.0, 0.0
        self._halved: dict[str, None] = {}  # workers that had to halve microbatches; they were named once

    def warn(self, text: str) -> None:
        """For a person."""
        self._context.bus.publish(Warned(text=text))

    def note_reading(self) -> None:
        """Name the dataset, once each time, where work waits for it and nothing comes."""
        now = self._context.clock()
        passed_s, self._looked_at = min(now - self._looked_at, _LONGEST_TICK_S), now
        silent_s = self._silent_s = min(self._context.loader.silent_s, self._silent_s + passed_s)
        hangs = silent_s >= _SILENT_READ_S
        if hangs and not self._reading_hangs:
            self.warn(
                f"no sample has been read for {silent_s:.0f} s: the dataset hangs, as on a disk or a server that does "
                "not answer, or takes that long; the run waits for it"
            )
        self._reading_hangs = hangs

    def note_untouched(self, step: int, untouched: Collection[int]) -> None:
        """Tell of a step in which nothing that is trained got a gradient, once: a plain loop would say nothing."""
        if len(untouched) == len(self._context.layout.trainable) and not self._told_untouched:
            self._told_untouched = True
            self.warn(
                f"no parameter of the model got a gradient in step {step}, which changes none: does the loss come from "
                "the model that the step is given, or from another, as one that a function or a closure holds?"
            )

    def note_beside(self, names: Sequence[str]) -> None:
        """Name attributes of the optimizer that no checkpoint has, once."""
        if names and not self._told_beside:
            self._told_beside = True
            self.warn(
                f"the optimizer changes {', '.join(names)[:200]} with its steps, which no checkpoint has: a resumed "
                "run would go on without. Keep it in self.state[parameter] or in a param_group, which are saved"
            )

    def note_splits(self, session: Session, done: Done) -> None:
        """Name a worker that lacks memory, once."""
        if not done.splits or session.worker_id in self._halved:
            return
        self._halved[session.worker_id] = None
        if len(self._halved) > _MOST_NAMED:
            del self._halved[next(iter(self._halved))]
        self.warn(
            f"{session.name} lacks memory for a whole microbatch and computes it in 2^{done.splits} pieces: batch norm "
            "and dropout see the pieces, all other sums are the same but for their last bits; a smaller "
            "microbatch_size gives every worker the same bits"
        )

    def note_unread(self, session: Session, unread: Unread) -> None:
        """A worker cannot read its own data: each is named once."""
        if session.worker_id in self._unread:
            return
        self._unread[session.worker_id] = None
        if len(self._unread) > _MOST_NAMED:
            del self._unread[next(iter(self._unread))]
        self.warn(f"{session.name} cannot read its own data and is sent what it lacks: {unread.reason[:300]}")

    def note_other_data(self, worker: str, same: int, said: int) -> None:
        """Name a worker whose own data is not the run's, once: of ``said`` shards ``same`` are."""
        session = self.roster.sessions.get(worker)
        if session is None or worker in self._foreign:
            return
        self._foreign[worker] = None
        if len(self._foreign) > _MOST_NAMED:
            del self._foreign[next(iter(self._foreign))]
        lacks = f"in {said - same} of its {said} shards" if same else "everywhere"
        self.warn(
            f"{session.name}'s own data is not the coordinator's {lacks} (other samples, another order, or another "
            "number): what has a sample of those is sent to it"
        )

    @property
    def has_code(self) -> bool:
        """Whether a worker that takes work has the job's code."""
        sessions = map(self.roster.sessions.get, self.roster.present)
        return any(session is not None and not session.code_free for session in sessions)

    def beyond(self, worker: str, data: BlockData) -> tuple[tuple[int, str], ...]:
        """Leaves of a lease, numbered from its first on, that ``worker`` cannot compute, and what their batches are: it
        has not the job's code, and the program has no graph for them."""
        session, taking = self.roster.sessions.get(worker), self.roster.programs.taking
        if session is None or not session.code_free or taking is None or data.packed or data.local:
            return ()
        return taking.refused(data.structure, [spec for spec, _ in data.buffers], data.samples)

    def note_failure(self, what: str, failed: Failed) -> None:
        """A leaf raised, and is tried again. One cause, whatever numbers are in it, is told once, and again after a
        minute at the earliest."""
        cause, now = headline(failed.traceback or failed.error), self._context.clock()
        alike = _NUMBER.sub("0", cause)
        if now - self._told_of.get(alike, -math.inf) < _TOLD_AGAIN_S:
            return
        self._told_of.pop(alike, None)
        self._told_of[alike] = now
        if len(self._told_of) > _MOST_CAUSES:
            del self._told_of[next(iter(self._told_of))]
        self.warn(f"{what}: {cause[:300]}; trying again")

    def used(self, *, leaves: int = 0, samples: int = 0) -> None:
        """What workers have computed counts: it is in the parameters or will be, or its step is done without it, as it
        is not finite."""
        self.leaves += leaves
        self.samples_applied += samples

    def refuse(self, code: VerdictCode, leaves: int) -> None:
        """What a lease has come to is not used."""
        self.refused[code] += 1
        self.leaves_wasted += leaves

    def lose(self, leaves: int) -> None:
        """These were computed, and their worker has gone with what came of them."""
        self.leaves_wasted += leaves

    def committed(self, loss: float) -> None:
        """A commit was made of steps with this loss."""
        # A step that was left out says nothing of the parameters, which are those of the steps before it.
        if math.isfinite(loss) or self.last_loss is None or not math.isfinite(self.last_loss):
            self.last_loss = loss
        self._committed_at = self._context.clock()

    @property
    def trained_s(self) -> float:
        """Seconds from the first leases to the last commit, earlier phases included: no waiting for workers to come,
        and nothing of what is done at the end."""
        return self._context.history.trained_s + self._committed_at - self._began_at

    def counts(self) -> Counts:
        """What became of the work of this phase so far."""
        refused = self.refused
        return Counts(
            self.leaves, self.leaves_wasted, refused[VerdictCode.STALE], refused[VerdictCode.DUPLICATE],
            refused[VerdictCode.REJECTED], self._ledger.num_backups,
        )  # fmt: skip

    def totals(self) -> Counts:
        """What became of the work so far, earlier phases included."""
        return self._context.history.counts.plus(self.counts())

    def note_gradient(self, step: int, *, finite: bool) -> None:
        """Of a commit after ``step`` steps. Too many in a row that are not finite end the run."""
        self._nonfinite = 0 if finite else self._nonfinite + 1
        if not finite:
            self._context.hooks.on_skip(step)
        if self._nonfinite >= self._context.checks.max_nonfinite_steps:
            self.lifecycle.fail(self.nonfinite(step, self._nonfinite))

    def nonfinite(self, step: int, count: int) -> NonFinite:
        """What ends the run: ``count`` steps in a row were not finite."""
        update = self._context.config.update
        return NonFinite(step, count, update.codec if update.uplink_codec.needs_feedback else "")

    def may_lease(self) -> bool:
        """Whether leases are given: nothing has failed, and enough workers have come to begin."""
        if self.lifecycle.failure is not None:
            return False
        ready, wanted = self.roster.membership.num_ready, self.min_workers
        if not self.begun and ready < wanted:
            joining = len(self.roster.joining)
            reason = f"{ready} of {wanted} workers" + (f", {joining} joining" if joining else "")
            if awaiting := self.roster.programs.awaited_by:
                waited_s = self._context.clock() - min(session.admitted_at for session in awaiting)
                passed = f" ({told:.0f} s)" if (told := _rounded_s(waited_s)) else ""
                reason += f": the step is being made a program{passed} for workers without --job"
            if reason != self._waiting:
                self._waiting = reason
                self._context.bus.publish(Waiting(reason=reason))
        if not self.begun and ready >= wanted:
            self.begun = True
            self._began_at = self._committed_at = self._context.clock()
        return self.begun

    def stop(self, grace_s: float | None = None) -> None:
        """End in good order: members are told."""
        grace_s = self._context.config.grace_s if grace_s is None else grace_s
        if self.lifecycle.stop(grace_s):
            self.roster.tell_stop(grace_s)

    def introduce(self, session: Session) -> None:
        """A worker is here, again or for the first time."""
        assert session.ready is not None
        self._context.loader.introduce(session.worker_id, session.ready.shards if session.island is None else ())
        self._ledger.returned(session.worker_id)
        self._ledger.places.joined(session.worker_id, session.place)

    def computed(self, worker: str, leaves: int, done: Done) -> None:
        """A worker has computed something, whatever will become of it."""
        if (member := self.roster.member(worker)) is not None:
            member.computed += leaves
            member.compute_s += done.compute_s
            member.wait_s += done.wait_s

    def credit(self, worker: str, leaves: int, samples: int) -> None:
        """What a worker has computed counts; it may be gone by now."""
        if (member := self.roster.member(worker)) is not None:
            member.leaves += leaves
            member.samples += samples
        else:
            self.roster.contributions.credit(worker, leaves, samples)

    def leaving(self, worker: str) -> tuple[Member, Session] | None:
        """A worker that wants to leave and holds no lease any more."""
        member, session = self.roster.member(worker), self.roster.sessions.get(worker)
        if member is None or session is None or member.standing is not Standing.DRAINING:
            return None
        return None if self._ledger.num_held(worker) else (member, session)

    def blame(self, failed_work: FailedWork, plan: StepPlan, leaf: int, traceback: str) -> None:
        """End the run over a leaf of the step ``plan``."""
        indices = plan.leaf_indices(leaf).tolist()
        self.lifecycle.fail(LeafFailed(failed_work.step, leaf, indices, failed_work.attempts, traceback))

    def departed(self, worker: str, *, over: bool) -> bool:
        """A worker has left. Whether its work is for others: not where the run is ``over``, or ends."""
        self.verdicts.left(worker)
        self.lifecycle.wake.set()
        if over or self.lifecycle.ends:
            return False
        if not self.roster.sessions:
            self._context.bus.publish(Waiting(reason="no workers"))
        return True


def _rounded_s(seconds: float) -> float:
    """As often as a line of it in a log is news."""
    return seconds - seconds % (_NEWS_S if seconds < _LONG_S else _LONG_S)


def named_samples(plan: StepPlan, losses: Sequence[float] = ()) -> str:
    """The samples of a step that has no update, for the person who looks for the bad one among them.

    ``losses``: one a leaf, where they are known. Where some are finite, the leaves of the others are at fault.
    """
    leaves = [leaf for leaf, loss in enumerate(losses) if not math.isfinite(loss)]
    whole = len(leaves) in (0, plan.num_leaves)
    indices = chain.from_iterable(plan.leaf_indices(leaf) for leaf in (range(plan.num_leaves) if whole else leaves))
    shown = [*map(str, islice(indices, _MOST_SHOWN)), *("..." for _ in islice(indices, 1))]
    return f"{'its samples' if whole else 'the samples of its leaves without a finite loss'} are {', '.join(shown)}"


def lease_terms(context: RunContext, greeting: Greeting, present: Callable[[], Iterable[str]]) -> LeaseTerms:
    """``present``: workers that take work now."""
    return LeaseTerms(
        first_lease=(greeting.message.term << 32) + 1,  # no lease of another term has the same number
        max_failures=context.checks.max_leaf_failures,
        present=present,
    )


def reason_of_standing(member: Member) -> str | None:
    """Why a worker waits, by what it is to the scheduler; None where that is no reason."""
    if member.standing is Standing.DRAINING:
        return "nothing: it is leaving"
    if member.standing is Standing.LATE:
        return "its own answer: a lease was taken from it and it has not said what became of it"
    return None


def reason_of_network(session: Session) -> str | None:
    """Why a worker waits that holds a lease, by what is on its way."""
    if session.receiving is not None:
        return "the network: its result is on its way"
    return "the network: a lease is on its way" if session.lease_bytes else None


class Parameters(Protocol):
    """The owner of the parameters, seen from outside."""

    @property
    def torn(self) -> bool:
        """An update broke off: the parameters are not those of any version, and must not be saved."""

    @property
    def is_idle(self) -> bool:
        """Whether everything that was submitted is done."""

    def submit(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        """Run ``call`` in the thread that owns the parameters: between two commits, never inside one."""

    def abandon(self) -> None:
        """Nobody waits for an update under way: what comes of it are parameters of no version."""

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of every tensor, by entry name. To be submitted."""

    def trains_finite(self) -> bool:
        """Whether every parameter that is trained is finite. To be submitted."""


class Training(WorkSource, Protocol):
    """One phase of a run, from its first lease to its last commit. Everything runs on the event loop's thread."""

    @property
    def context(self) -> RunContext:
        """What it works with."""

    @property
    def phase(self) -> Phase:
        """Its members, what they are told, what their work has come to, how it ends."""

    @property
    def roster(self) -> Roster:
        """Of the phase."""

    @property
    def ledger(self) -> LeaseTable[Any]:
        """The open leases."""

    @property
    def pacing(self) -> Pacing:
        """How fast workers are, and how much work they are given."""

    @property
    def aggregator(self) -> Parameters:
        """The owner of the parameters."""

    @property
    def progress(self) -> int:
        """Steps of the sampler that are applied: the run's end is ``total_steps``."""

    @property
    def total_steps(self) -> int:
        """Where the run ends."""

    def reason_to_wait(self, session: Session, member: Member) -> str:
        """What keeps a worker from computing at this moment, for a person; empty where nothing does."""

    def downlink_bytes(self) -> tuple[int, int]:
        """Bytes of the versions that a codec wrote, before and after it, each once however many workers took it."""

    async def run(self) -> None:
        """Train until the end, a stop or a failure (which is raised)."""

    def stop(self, grace_s: float | None = None) -> None:
        """End after the step under way, or after ``grace_s`` (that of the config) where that takes longer."""

    def finish(self) -> None:
        """End here, as after the last step. Under an exact rule nothing more is committed."""

    def data_came(self) -> None:
        """The loader has read something: leases that waited for it can be sent."""

    def tick(self, now: float) -> None:
        """Do what is due by time. Called every second or so."""

    async def aclose(self) -> None:
        """Wait for the loader and the thread that owns the parameters."""
