"""Leases: their numbers, who holds which, when they are overdue, and on whom their work has failed.

The two ledgers over this table decide what a lease covers: blocks of one step after the other (``plan.ledger``), or
whole steps (``plan.stream``). Time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from w5xde_async.plan.attempts import Places

_REMEMBERED = 4096  # leases that ended, by which late results are told from noise


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease as given out. ``deadline_s``: from when it could be begun."""

    lease: int
    step: int
    worker: str
    granted_at: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class FailedWork:
    """A leaf that failed more often than allowed; ``died`` when workers vanished on it rather than reported."""

    step: int
    leaf: int
    attempts: int
    died: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """``first_lease``: leases are numbered from here on; terms that do not overlap make them unique in a run.

    ``max_failures``, ``max_deaths``: of workers on the same work, before it is to blame. ``present``: workers that take
    work now.
    """

    first_lease: int = 1
    max_failures: int = 3
    max_deaths: int = 8
    present: Callable[[], Iterable[str]] = tuple


G = TypeVar("G", bound=Grant)


class LeaseTable(Generic[G]):
    """Open leases, those that ended not long ago, and who has failed on which work."""

    def __init__(self, terms: LeaseTerms, allowed_s: Callable[[G], float]) -> None:
        """``allowed_s``: how long a lease may take, by what is known of its worker now."""
        self.places = Places(terms.present)
        self._terms, self._allowed_s = terms, allowed_s
        self.num_backups = 0
        self._next_lease = terms.first_lease
        self._grants: dict[int, G] = {}
        self._held: dict[str, list[int]] = {}
        self._ended: deque[int] = deque()
        self._past: dict[int, tuple[G, bool]] = {}  # the last leases that ended, and whether finished
        self._failures: dict[tuple[int, int], list[str]] = {}  # (step, leaf) -> workers on which it raised
        # (step, leaf) -> workers that vanished on it, and whether results of theirs had counted.
        self._deaths: dict[tuple[int, int], dict[str, bool]] = {}
        self._overran: dict[tuple[int, int], int] = {}  # (step, leaf) -> leases that took too long

    def get(self, lease: int) -> G | None:
        """An open lease, or None when it is not open (any more)."""
        return self._grants.get(lease)

    def held_by(self, worker: str, lease: int) -> G | None:
        """An open lease of ``worker``; None where it is not open, or another's."""
        grant = self._grants.get(lease)
        return grant if grant is not None and grant.worker == worker else None

    def held(self, worker: str) -> list[G]:
        """Open leases of a worker, oldest first."""
        return [self._grants[lease] for lease in self._held.get(worker, ())]

    def num_held(self, worker: str) -> int:
        """Open leases of a worker."""
        return len(self._held.get(worker, ()))

    @property
    def num_open(self) -> int:
        """Open leases."""
        return len(self._grants)

    def past(self, worker: str, lease: int) -> G | None:
        """A lease of ``worker`` that ended not long ago (the last few thousand are remembered)."""
        grant, _ = self._past.get(lease, (None, False))
        return grant if grant is not None and grant.worker == worker else None

    def is_duplicate(self, lease: int) -> bool:
        """True when that lease ended because its work was done, by itself or by the other one on it."""
        return self._past.get(lease, (None, False))[1]

    def returned(self, worker: str) -> None:
        """The worker is here again: it had lost its link, not its life."""
        for work, deaths in list(self._deaths.items()):
            deaths.pop(worker, None)
            if not deaths:
                del self._deaths[work]

    def overran(self, grant: G) -> float:
        """The deadline of an open lease has passed, and what it covers is to be given to another.

        That may take twice as long: work that takes longer than any before it is done by whoever has it then, however
        quick all workers were so far. Returns how many times as long as usual.
        """
        for work in self._works(grant):
            self._overran[work] = self._overran.get(work, 0) + 1
        return self._patience(grant)

    # What the ledgers say of their leases besides.

    def began_at(self, grant: G) -> float:
        """When the worker could begin an open lease, as far as is known."""
        raise NotImplementedError

    def overdue(self, now: float) -> Sequence[G]:
        """Leases whose deadline has passed."""
        raise NotImplementedError

    def give_back(self, lease: int) -> G:
        """The lease ends unfinished."""
        raise NotImplementedError

    def _works(self, grant: G) -> Iterable[tuple[int, int]]:
        """What it covers: (step, leaf)."""
        raise NotImplementedError

    # -- for the ledgers -----------------------------------------------------------------------------------

    def _is_overdue(self, grant: G, now: float) -> bool:
        return self.began_at(grant) + self._allowed_s(grant) * self._patience(grant) <= now

    def _patience(self, grant: G) -> float:
        if not self._overran:
            return 1.0
        return 2.0 ** min(max((self._overran.get(work, 0) for work in self._works(grant)), default=0), 32)

    def _number(self) -> int:
        """Of the next lease."""
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        return lease

    def _enter(self, grant: G) -> G:
        self._grants[grant.lease] = grant
        self._held.setdefault(grant.worker, []).append(grant.lease)
        return grant

    def _drop(self, lease: int, *, finished: bool = False) -> G:
        grant = self._grants.pop(lease)
        held = self._held[grant.worker]
        held.remove(lease)
        if not held:
            del self._held[grant.worker]
        self._ended.append(lease)
        self._past[lease] = (grant, finished)
        if len(self._ended) > _REMEMBERED:
            del self._past[self._ended.popleft()]
        return grant

    def _raised(self, step: int, leaf: int, worker: str) -> FailedWork | None:
        """The job raised on a leaf. It is returned once nobody is left whose word would count for more."""
        failures = self._failures.setdefault((step, leaf), [])
        failures.append(worker)
        if not self.places.fails(failures, self._terms.max_failures):
            return None
        return FailedWork(step, leaf, len(failures), died=False)

    def _died(self, step: int, leaf: int, worker: str) -> FailedWork | None:
        """A worker vanished while it computed a leaf, which is returned where it is to blame."""
        deaths = self._deaths.setdefault((step, leaf), {})
        deaths[worker] = self.places.has_delivered(worker)
        if not self.places.kills(deaths, self._terms.max_deaths):
            return None
        return FailedWork(step, leaf, len(deaths), died=True)

    def _check_held(self) -> None:
        """Every open lease is held by its worker, once. Raises AssertionError."""
        assert sorted(self._grants) == sorted(lease for held in self._held.values() for lease in held)
