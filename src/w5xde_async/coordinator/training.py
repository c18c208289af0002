"""What every training has in common, whatever its update rule: what it is made of, what it counts, and how it ends.

``Training`` is the interface that the run, durability, monitoring and the service rely on. ``coordinator.sync`` and
``coordinator.outer`` implement it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from w5xde_async.coordinator.verification_config import VerificationConfig
from w5xde_async.data.loader import Loader
from w5xde_async.errors import W5xdeError
from w5xde_async.hub.config import NetworkConfig
from w5xde_async.hub.members.contributions import Contributions
from w5xde_async.hub.members.roster import Roster
from w5xde_async.hub.members.session import Session, WorkSource
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.plan.membership import Member
from w5xde_async.plan.pacing import Pacing
from w5xde_async.telemetry.events import Bus

__all__ = [
    "Commit",
    "Counts",
    "History",
    "Hooks",
    "Lifecycle",
    "NonFinite",
    "Parameters",
    "RunContext",
    "Training",
]

_T = TypeVar("_T")


class NonFinite(W5xdeError):
    """Too many steps in a row had a non-finite gradient. Fields: ``step``, ``count``."""

    def __init__(self, step: int, count: int) -> None:
        self.step, self.count = step, count
        super().__init__(
            f"the gradient was not finite in {count} steps in a row, when the run was at step {step}: "
            "training diverges; lower the learning rate, set gradient_clip_val, or look at the data"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What everything in one phase of a run works with. ``clock`` gives seconds.

    ``total_steps`` is where the phase ends as it begins; a training whose batch grows may end elsewhere.
    """

    layout: Layout
    state: FlatState
    loader: Loader
    config: NetworkConfig
    checks: VerificationConfig
    bus: Bus
    clock: Callable[[], float]
    total_steps: int


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
    """What the run has come to before a training begins: samples applied, the last loss, work and workers' shares."""

    samples: int = 0
    loss: float | None = None
    counts: Counts = NOTHING_YET
    downlink_bytes: tuple[int, int] = (0, 0)
    contributions: Contributions = field(default_factory=Contributions)


def _nobody(*_: object) -> None:
    """For whom nothing is to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What a training tells whoever runs it, at once and on the event loop's thread."""

    on_commit: Callable[[Commit], None] = _nobody
    """After each commit, before anything else can touch the parameters."""
    on_quarantine: Callable[[str, str], None] = _nobody
    """A worker was quarantined: the name it has proved, or else its id, and why."""


class Lifecycle:
    """How a training ends: a stop or a failure. ``wake`` is set for the task that drives the training."""

    def __init__(self, clock: Callable[[], float], grace_s: float) -> None:
        self._clock, self._grace_s = clock, grace_s
        self.wake = asyncio.Event()
        self.failure: BaseException | None = None
        self.stopping = False
        self.stop_at = 0.0  #: when work under way is given up, once ``stopping``

    @property
    def ends(self) -> bool:
        """Whether the training was stopped or has failed."""
        return self.stopping or self.failure is not None

    def stop(self) -> bool:
        """End in good order. True for the first call."""
        first, self.stopping = not self.stopping, True
        if first:
            self.stop_at = self._clock() + self._grace_s
        self.wake.set()
        return first

    def fail(self, error: BaseException) -> None:
        """End now, with the first error that was given."""
        self.failure = self.failure or error
        self.wake.set()

    @contextmanager
    def failure_set_aside(self) -> Iterator[None]:
        """What is done inside is done as if nothing had failed before. An earlier failure still comes first."""
        earlier, self.failure = self.failure, None
        try:
            yield
        finally:
            self.failure = earlier or self.failure


class Parameters(Protocol):
    """The owner of the parameters, seen from outside."""

    @property
    def torn(self) -> bool:
        """An update broke off: the parameters are not those of any version, and must not be saved."""

    def submit(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        """Run ``call`` in the thread that owns the parameters: between two commits, never inside one."""

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of every tensor, by entry name. To be submitted."""


class Training(WorkSource, Protocol):
    """One phase of a run, from its first lease to its last commit. Everything runs on the event loop's thread."""

    @property
    def context(self) -> RunContext:
        """What it works with."""

    @property
    def roster(self) -> Roster:
        """Its members, and the admission of new ones."""

    @property
    def pacing(self) -> Pacing:
        """How fast workers are, and how much work they are given."""

    @property
    def aggregator(self) -> Parameters:
        """The owner of the parameters."""

    @property
    def lifecycle(self) -> Lifecycle:
        """Whether it was stopped or has failed."""

    @property
    def progress(self) -> int:
        """Steps of the sampler that are applied: the run's end is ``total_steps``."""

    @property
    def total_steps(self) -> int:
        """Where the run ends."""

    @property
    def samples_applied(self) -> int:
        """Samples in the parameters, those of earlier phases included."""

    @property
    def last_loss(self) -> float | None:
        """Of the last commit."""

    @property
    def history(self) -> History:
        """What the run had come to before."""

    def counts(self) -> Counts:
        """What became of the work of this phase so far."""

    def leases_held(self, worker: str) -> int:
        """How many leases a worker has."""

    def reason_to_wait(self, session: Session, member: Member) -> str:
        """What keeps a worker from computing at this moment, for a person; empty where nothing does."""

    def totals(self) -> Counts:
        """What became of the work so far, earlier phases included."""

    def downlink_bytes(self) -> tuple[int, int]:
        """Bytes of the versions that a codec wrote, before and after it, each once however many workers took it."""

    async def run(self) -> None:
        """Train until the end, a stop or a failure (which is raised)."""

    def stop(self) -> None:
        """End after the step under way, or after ``grace_s`` where that takes longer."""

    def fail(self, error: BaseException) -> None:
        """End now; ``run`` raises ``error``."""

    def data_came(self) -> None:
        """The loader has read something: leases that waited for it can be sent."""

    def tick(self, now: float) -> None:
        """Do what is due by time. Called every second or so."""

    async def aclose(self) -> None:
        """Wait for the loader and the thread that owns the parameters."""
