"""Steps of the sampler handed out one by one, to whoever comes; what each of them has become.

The ledger of the rules that do not wait for a whole step (``asynchronous``, ``local``, ``streaming``, ``delayed``). A
lease is one step of the sampler, whole. What its worker makes of it is submitted at once, or carried along with the
steps after it until the worker is asked for the sum of them.

Invariants, checked by ``validate`` in tests:
  - every step from 0 to ``total_steps`` is in one place: done, fresh, free again, leased, carried by one worker, or in
    a result that is being judged;
  - a step is leased to one worker, or to two where the second backs the first up: whose result comes first has it;
  - a step becomes done once; what a worker that is gone had leased or carried is free again.

Time is an argument. What this room does not do: hold tensors, know rules.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from w5xde_async.plan.attempts import Places
from w5xde_async.plan.ledger import FailedWork

__all__ = ["DoneSteps", "StreamGrant", "StreamLedger"]

_REMEMBERED = 4096  # leases that ended, by which late results are told from noise


class DoneSteps:
    """A set of steps that is dense from below: all up to ``floor``, and some above."""

    def __init__(self, floor: int = 0, above: Iterable[int] = ()) -> None:
        self.floor = floor
        self._above = set(above)
        self._rise()

    def __len__(self) -> int:
        return self.floor + len(self._above)

    def __contains__(self, step: int) -> bool:
        return step < self.floor or step in self._above

    def add(self, step: int) -> None:
        """Raises ValueError where it is in the set already."""
        if step in self:
            raise ValueError(f"step {step} is done already")
        self._above.add(step)
        self._rise()

    def above(self) -> list[int]:
        """Those above the floor, ascending."""
        return sorted(self._above)

    def _rise(self) -> None:
        while self.floor in self._above:
            self._above.discard(self.floor)
            self.floor += 1

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"floor": self.floor, "above": self.above()}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> DoneSteps:
        """From ``state_dict``."""
        return cls(int(state["floor"]), [int(step) for step in state["above"]])


@dataclass(frozen=True, slots=True)
class StreamGrant:
    """A lease as given out. ``step`` is -1 for a submission, which is asked for by a lease of its own."""

    lease: int
    step: int
    worker: str
    granted_at: float
    deadline_s: float


class StreamLedger:
    """The book of all open leases, and of what each worker carries."""

    def __init__(
        self, *, total_steps: int, done: DoneSteps | None = None, max_failures: int = 3, max_deaths: int = 8,
        first_lease: int = 1, present: Callable[[], Iterable[str]] = tuple,
        waits: Callable[[StreamGrant], bool] = lambda grant: False,
        allowed_s: Callable[[StreamGrant], float] = lambda grant: grant.deadline_s,
    ) -> None:  # fmt: skip
        """``done`` belongs to this object from now on. ``waits``: whether a lease cannot be begun yet (its version is
        not there), so that its time has not begun either. The others: see ``plan.ledger.Ledger``."""
        self.total_steps = total_steps
        self.done = done or DoneSteps()
        self.max_failures, self.max_deaths = max_failures, max_deaths
        self.places = Places(present)
        self._next_lease = first_lease
        self._cursor = self.done.floor
        self._free: list[int] = []  # heap of steps below the cursor
        self._grants: dict[int, StreamGrant] = {}
        self._held: dict[str, list[int]] = {}
        self._carried: dict[str, list[int]] = {}
        self._judged: dict[int, tuple[int, ...]] = {}  # lease -> steps of a result that has come
        self._since: dict[str, float] = {}  # worker -> when its oldest lease could begin
        self._failures: dict[int, list[str]] = {}
        self._refusals: dict[int, list[tuple[str, float]]] = {}  # whose results of a step were no good, and their norms
        self._deaths: dict[
            int, dict[str, bool]
        ] = {}  # step -> who vanished on it, and whether results of theirs had counted
        self._past: dict[int, tuple[StreamGrant, bool]] = {}
        self._twins: dict[int, int] = {}  # lease -> the other one on its step
        self._ended: deque[int] = deque()
        self._waits, self._allowed_s = waits, allowed_s

    # -- steps ---------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Every step is done."""
        return len(self.done) >= self.total_steps

    @property
    def cursor(self) -> int:
        """The first step that was never leased."""
        return self._cursor

    def upcoming(self, count: int) -> list[int]:
        """The next ``count`` steps that would be leased, in order."""
        if count == 1 and self._free:
            return self._free[:1]
        found = heapq.nsmallest(count, self._free) if self._free else []
        step = self._cursor
        while len(found) < count and step < self.total_steps:
            if step not in self.done:
                found.append(step)
            step += 1
        return found

    @property
    def exhausted(self) -> bool:
        """Nothing is left to lease (though some of what is leased may come back)."""
        return not self.upcoming(1)

    def carried(self, worker: str) -> tuple[int, ...]:
        """Steps that a worker has computed and nobody else knows the gradient of."""
        return tuple(self._carried.get(worker, ()))

    # -- leases --------------------------------------------------------------------------------------------

    def get(self, lease: int) -> StreamGrant | None:
        """An open lease, or None when it is not open (any more)."""
        return self._grants.get(lease)

    def is_open(self, lease: int) -> bool:
        """Whether a lease is held, or its result is being judged."""
        return lease in self._grants or lease in self._judged

    def held(self, worker: str) -> list[StreamGrant]:
        """Open leases of a worker, oldest first."""
        return [self._grants[lease] for lease in self._held.get(worker, ())]

    def num_held(self, worker: str) -> int:
        """Open leases of a worker, a submission among them."""
        return len(self._held.get(worker, ()))

    @property
    def num_open(self) -> int:
        """Open leases, and results that are being judged."""
        return len(self._grants) + len(self._judged)

    def num_steps_held(self, worker: str) -> int:
        """Steps leased to a worker."""
        return sum(self._grants[lease].step >= 0 for lease in self._held.get(worker, ()))

    def past(self, worker: str, lease: int) -> StreamGrant | None:
        """A lease of ``worker`` that ended not long ago."""
        grant, _ = self._past.get(lease, (None, False))
        return grant if grant is not None and grant.worker == worker else None

    def is_duplicate(self, lease: int) -> bool:
        """True when that lease ended because its step's result had come, from it or from the other worker on it."""
        return self._past.get(lease, (None, False))[1]

    def grant(self, worker: str, *, now: float, deadline_s: float, others: Collection[str] = ()) -> StreamGrant | None:
        """Lease ``worker`` the next step; one that it failed on is left to ``others`` while there are any."""
        shunned = []
        step: int | None = None
        while self._free:
            candidate = heapq.heappop(self._free)
            failed = self._tried(candidate)
            if self.places.leaves(worker, failed, others):
                shunned.append(candidate)
                continue
            step = candidate
            break
        for candidate in shunned:
            heapq.heappush(self._free, candidate)
        if step is None:
            while self._cursor < self.total_steps and self._cursor in self.done:
                self._cursor += 1
            if self._cursor >= self.total_steps:
                return None
            step, self._cursor = self._cursor, self._cursor + 1
        return self._enter(step, worker, now, deadline_s)

    def ask(self, worker: str, *, now: float, deadline_s: float = math.inf) -> StreamGrant:
        """A lease for a submission of all that ``worker`` carries by the time that it has computed what it holds."""
        return self._enter(-1, worker, now, deadline_s)

    def unbacked(self) -> list[tuple[StreamGrant, int]]:
        """Leases that may be backed up, and how many their worker has before each of them."""
        return [
            (grant, place)
            for leases in self._held.values()
            if not self._waits(self._grants[leases[0]])
            for place, grant in enumerate(self._grants[lease] for lease in leases)
            if grant.step >= 0 and grant.lease not in self._twins
        ]

    def may_back_up(self, worker: str, grant: StreamGrant) -> bool:
        """Whether that lease is another's, and its step none that ``worker`` has failed on."""
        tried = self._tried(grant.step)
        return grant.worker != worker and worker not in tried

    def back_up(self, lease: int, worker: str, *, now: float, deadline_s: float) -> StreamGrant:
        """Lease the step of ``lease`` to a second worker too; whose result comes first has it."""
        grant = self._grants[lease]
        if grant.step < 0 or lease in self._twins or grant.worker == worker:
            raise ValueError(f"lease {lease} of {grant.worker} cannot be backed up by {worker}")
        second = self._enter(grant.step, worker, now, deadline_s)
        self._twins[lease], self._twins[second.lease] = second.lease, lease
        return second

    def carry(self, lease: int, now: float) -> None:
        """The step is computed; its worker carries it."""
        grant = self._end(lease, now, finished=True)
        self._carried.setdefault(grant.worker, []).append(grant.step)

    def submitted(self, lease: int, now: float) -> tuple[tuple[int, ...], StreamGrant | None]:
        """The lease's result is here, to be judged: its step, or all that its worker carried. ``settle`` follows.

        Returns the other lease on the step as well, which is void from now on, where there was one.
        """
        twin = self._twins.get(lease)
        grant = self._end(lease, now, finished=True)
        steps = (grant.step,) if grant.step >= 0 else tuple(self._carried.pop(grant.worker, ()))
        self._judged[lease] = steps
        return steps, None if twin is None else self._drop(twin, finished=True)

    def settle(self, lease: int, *, accepted: bool) -> None:
        """A result was judged: its steps are done, or free again."""
        for step in self._judged.pop(lease):
            if accepted:
                self.done.add(step)
                self._refusals.pop(step, None)
            else:
                heapq.heappush(self._free, step)

    def vouched(self, lease: int, worker: str, present: int) -> float:
        """The norm that a result of ``worker``, which waits to be judged, may have by what others made of its steps.

        Where more than half of those ``present`` (and two at least) come to results of a step that are all too large,
        one of them is honest, and it is the step that is unusual. So it may have twice the smallest of the others'
        norms; 0 where they are too few.
        """
        most = math.inf
        for step in self._judged[lease]:
            others = {who: norm for who, norm in self._refusals.get(step, ()) if who != worker and math.isfinite(norm)}
            agreed = others and 2 * (len(others) + 1) > present
            most = min(most, 2 * min(others.values()) if agreed else 0.0)
        return most

    def refuse(self, lease: int, worker: str, norm: float, most: int) -> tuple[int, ...]:
        """A result of ``worker`` was no good: its steps are free again, for others first. ``norm``: of the result.

        Returns those that were refused ``most`` times: they are given up, which is to say done.
        """
        given_up = []
        for step in self._judged.pop(lease):
            refusals = self._refusals.setdefault(step, [])
            refusals.append((worker, norm))
            if len(refusals) < most:
                heapq.heappush(self._free, step)
                continue
            self.done.add(step)
            given_up.append(step)
            del self._refusals[step]
        return tuple(given_up)

    def _tried(self, step: int) -> tuple[str, ...]:
        """Who failed on a step, each as often as it did."""
        return (*self._failures.get(step, ()), *(worker for worker, _ in self._refusals.get(step, ())))

    def began_at(self, grant: StreamGrant) -> float:
        """When the worker could begin an open lease, as far as is known: the one before it had ended."""
        return max(grant.granted_at, self._since.get(grant.worker, grant.granted_at))

    def give_back(self, lease: int) -> StreamGrant:
        """The lease ends unfinished: its step is free again, or its backup's."""
        backed_up = lease in self._twins
        grant = self._drop(lease, finished=False)
        if grant.step >= 0 and not backed_up:
            heapq.heappush(self._free, grant.step)
        return grant

    def fail(self, lease: int) -> FailedWork | None:
        """The job raised on a step. It goes back; one that failed too often is returned, as ``Ledger.fail`` says."""
        grant = self.give_back(lease)
        failures = self._failures.setdefault(grant.step, [])
        failures.append(grant.worker)
        if not self.places.fails(failures, self.max_failures):
            return None
        return FailedWork(grant.step, 0, len(failures), died=False)

    def lose(self, worker: str, *, died: bool = True) -> tuple[int, FailedWork | None]:
        """The worker is gone: what it held and carried is free again. How many steps, and one it may have died of."""
        begun = next((grant for grant in self.held(worker) if grant.step >= 0), None)
        count = 0
        for lease in tuple(self._held.get(worker, ())):
            count += self.give_back(lease).step >= 0
        for step in self._carried.pop(worker, ()):
            heapq.heappush(self._free, step)
            count += 1
        self._since.pop(worker, None)
        failed_work = None
        if died and begun is not None:
            deaths = self._deaths.setdefault(begun.step, {})
            deaths[worker] = self.places.has_delivered(worker)
            if self.places.kills(deaths, self.max_deaths):
                failed_work = FailedWork(begun.step, 0, len(deaths), died=True)
        return count, failed_work

    def returned(self, worker: str) -> None:
        """The worker is here again: it had lost its link, not its life."""
        for step, deaths in list(self._deaths.items()):
            deaths.pop(worker, None)
            if not deaths:
                del self._deaths[step]

    def overdue(self, now: float) -> list[StreamGrant]:
        """Of each worker the lease it is at, where its deadline has passed."""
        found = []
        for worker, leases in self._held.items():
            grant = self._grants[leases[0]]
            if self._waits(grant):
                self._since[worker] = now
            elif self.began_at(grant) + self._allowed_s(grant) <= now:
                found.append(grant)
        return found

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        places = [*self._free, *(step for steps in self._carried.values() for step in steps)]
        places += [step for steps in self._judged.values() for step in steps]
        # Of two leases on a step the later one is its backup.
        places += [grant.step for lease, grant in self._grants.items()
                   if grant.step >= 0 and self._twins.get(lease, lease + 1) > lease]  # fmt: skip
        assert all(self._twins[twin] == lease for lease, twin in self._twins.items())
        assert self._twins.keys() <= self._grants.keys()
        places += [step for step in range(self._cursor) if step in self.done]
        assert sorted(places) == list(range(self._cursor)), f"steps below {self._cursor} lie in {sorted(places)}"
        assert sorted(self._grants) == sorted(lease for held in self._held.values() for lease in held)

    # -- inner ---------------------------------------------------------------------------------------------

    def _enter(self, step: int, worker: str, now: float, deadline_s: float) -> StreamGrant:
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        grant = self._grants[lease] = StreamGrant(lease, step, worker, now, deadline_s)
        self._held.setdefault(worker, []).append(lease)
        return grant

    def _end(self, lease: int, now: float, *, finished: bool) -> StreamGrant:
        grant = self._drop(lease, finished=finished)
        self._since[grant.worker] = now
        return grant

    def _drop(self, lease: int, *, finished: bool) -> StreamGrant:
        grant = self._grants.pop(lease)
        twin = self._twins.pop(lease, None)
        if twin is not None:
            del self._twins[twin]
        held = self._held[grant.worker]
        held.remove(lease)
        if not held:
            del self._held[grant.worker]
        self._ended.append(lease)
        self._past[lease] = (grant, finished)
        if len(self._ended) > _REMEMBERED:
            del self._past[self._ended.popleft()]
        return grant
