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
from collections.abc import Callable, Collection, Iterable
from typing import Any

from w5xde_async.plan.leases import FailedWork, Grant, LeaseTable, LeaseTerms


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


class StreamLedger(LeaseTable[Grant]):
    """The book of all open leases, and of what each worker carries. A grant's ``step`` is -1 for a submission, which
    is asked for by a lease of its own."""

    def __init__(
        self, terms: LeaseTerms | None = None, *, total_steps: int, done: DoneSteps | None = None,
        waits: Callable[[Grant], bool] = lambda grant: False,
        allowed_s: Callable[[Grant], float] = lambda grant: grant.deadline_s,
    ) -> None:  # fmt: skip
        """``done`` belongs to this object from now on. ``waits``: whether a lease cannot be begun yet (its version is
        not there), so that its time has not begun either. ``allowed_s``: see ``LeaseTable``."""
        super().__init__(terms or LeaseTerms(), allowed_s)
        self.total_steps, self.done, self._waits = total_steps, done or DoneSteps(), waits
        self._cursor = self.done.floor
        self._free: list[int] = []  # heap of steps below the cursor
        self._carried: dict[str, list[int]] = {}
        self._judged: dict[int, tuple[int, ...]] = {}  # lease -> steps of a result that has come
        self._since: dict[str, float] = {}  # worker -> when its oldest lease could begin
        self._refusals: dict[int, list[tuple[str, float]]] = {}  # whose results of a step were no good, and their norms
        self._twins: dict[int, int] = {}  # lease -> the other one on its step

    # -- steps ---------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Every step is done."""
        return len(self.done) >= self.total_steps

    @property
    def cursor(self) -> int:
        """The first step that was never leased."""
        return self._cursor

    @property
    def upcoming(self) -> int | None:
        """The step that would be leased next; None where nothing is left to lease."""
        if self._free:
            return self._free[0]
        return next((step for step in range(self._cursor, self.total_steps) if step not in self.done), None)

    @property
    def exhausted(self) -> bool:
        """Nothing is left to lease (though some of what is leased may come back)."""
        return self.upcoming is None

    def carried(self, worker: str) -> tuple[int, ...]:
        """Steps that a worker has computed and nobody else knows the gradient of."""
        return tuple(self._carried.get(worker, ()))

    # -- leases --------------------------------------------------------------------------------------------

    def is_open(self, lease: int) -> bool:
        """Whether a lease is held, or its result is being judged."""
        return lease in self._grants or lease in self._judged

    @property
    def num_open(self) -> int:
        """Open leases, and results that are being judged."""
        return len(self._grants) + len(self._judged)

    def num_steps_held(self, worker: str) -> int:
        """Steps leased to a worker."""
        return sum(self._grants[lease].step >= 0 for lease in self._held.get(worker, ()))

    def grant(self, worker: str, *, now: float, deadline_s: float, others: Collection[str] = ()) -> Grant | None:
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
        return self._grant(step, worker, now, deadline_s)

    def ask(self, worker: str, *, now: float, deadline_s: float = math.inf) -> Grant:
        """A lease for a submission of all that ``worker`` carries by the time that it has computed what it holds."""
        return self._grant(-1, worker, now, deadline_s)

    def unbacked(self) -> list[tuple[Grant, int]]:
        """Leases that may be backed up, and how many their worker has before each of them."""
        return [
            (grant, place)
            for leases in self._held.values()
            if not self._waits(self._grants[leases[0]])
            for place, grant in enumerate(self._grants[lease] for lease in leases)
            if grant.step >= 0 and grant.lease not in self._twins
        ]

    def may_back_up(self, worker: str, grant: Grant) -> bool:
        """Whether that lease is another's, and its step none that ``worker`` has failed on."""
        tried = self._tried(grant.step)
        return grant.worker != worker and worker not in tried

    def back_up(self, lease: int, worker: str, *, now: float, deadline_s: float) -> Grant:
        """Lease the step of ``lease`` to a second worker too; whose result comes first has it.

        Raises ValueError where the worker cannot back it up.
        """
        grant = self._grants[lease]
        if grant.step < 0 or lease in self._twins or grant.worker == worker:
            raise ValueError(f"lease {lease} of {grant.worker} cannot be backed up by {worker}")
        second = self._grant(grant.step, worker, now, deadline_s)
        self._twins[lease], self._twins[second.lease] = second.lease, lease
        self.num_backups += 1
        return second

    def carry(self, lease: int, now: float) -> None:
        """The step is computed; its worker carries it."""
        grant = self._end(lease, now)
        self._carried.setdefault(grant.worker, []).append(grant.step)

    def submitted(self, lease: int, now: float) -> tuple[tuple[int, ...], Grant | None]:
        """The lease's result is here, to be judged: its step, or all that its worker carried. ``settle`` follows.

        Returns the other lease on the step as well, which is void from now on, where there was one.
        """
        twin = self._twins.get(lease)
        grant = self._end(lease, now)
        steps = (grant.step,) if grant.step >= 0 else tuple(self._carried.pop(grant.worker, ()))
        self._judged[lease] = steps
        return steps, None if twin is None else self._drop(twin, finished=True)

    def settle(self, lease: int, *, accepted: bool) -> None:
        """A result was judged: its steps are done, or free again."""
        for step in self._judged.pop(lease):
            if accepted:
                self.done.add(step)
                self._refusals.pop(step, None)
                self._overran.pop((step, 0), None)
            else:
                heapq.heappush(self._free, step)

    def vouched(self, lease: int, worker: str, present: int) -> float:
        """The norm that a result of ``worker``, which waits to be judged, may have by what others made of its steps.

        Where more than half of those ``present`` (and two at least) come to results of a step that are all too large,
        one of them is honest, and it is the step that is unusual. So it may have twice the smallest of the others'
        norms; 0 where they are too few, or it has no steps of its own: others then made nothing of the same. Who is
        alone has nobody else to ask: that it came to the same before vouches for it, as it was no slip.
        """
        most, alone = math.inf if self._judged[lease] else 0.0, present == 1
        for step in self._judged[lease]:
            refused = self._refusals.get(step, ())
            others = {who: norm for who, norm in refused if (alone or who != worker) and math.isfinite(norm)}
            agreed = others and 2 * (len(others) + 1) > present
            most = min(most, 2 * min(others.values()) if agreed else 0.0)
        return most

    def refuse(self, lease: int, worker: str, norm: float, *, most: int, most_finite: int) -> dict[int, int]:
        """A result of ``worker`` was no good: its steps are free again, for others first. ``norm``: of the result.

        Returns those that are given up, which is to say done, and how many results each had: ``most`` where none was
        finite. One that was shows that who sends others is at fault, or lies, and not the step; then ``most_finite`` of
        either kind.
        """
        given_up = {}
        for step in self._judged.pop(lease):
            refusals = self._refusals.setdefault(step, [])
            refusals.append((worker, norm))
            finite = sum(math.isfinite(norm) for _, norm in refusals)
            if max(finite, len(refusals) - finite) < (most_finite if finite else most):
                heapq.heappush(self._free, step)
                continue
            self.done.add(step)
            self._overran.pop((step, 0), None)
            given_up[step] = len(refusals)
            del self._refusals[step]
        return given_up

    def _tried(self, step: int) -> tuple[str, ...]:
        """Who failed on a step, each as often as it did."""
        return (*self._failures.get((step, 0), ()), *(worker for worker, _ in self._refusals.get(step, ())))

    def began_at(self, grant: Grant) -> float:
        """When the worker could begin an open lease, as far as is known: the one before it had ended."""
        return max(grant.granted_at, self._since.get(grant.worker, grant.granted_at))

    def give_back(self, lease: int) -> Grant:
        """The lease ends unfinished: its step is free again, or its backup's."""
        backed_up = lease in self._twins
        grant = self._drop(lease)
        if grant.step >= 0 and not backed_up:
            heapq.heappush(self._free, grant.step)
        return grant

    def fail(self, lease: int) -> FailedWork | None:
        """The job raised on a step. It goes back; one that failed too often is returned, as ``Ledger.fail`` says."""
        grant = self.give_back(lease)
        return self._raised(grant.step, 0, grant.worker)

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
        failed_work = self._died(begun.step, 0, worker) if died and begun is not None else None
        self.places.left(worker)
        return count, failed_work

    def overdue(self, now: float) -> list[Grant]:
        """Of each worker the lease it is at, where its deadline has passed."""
        found = []
        for worker, leases in self._held.items():
            grant = self._grants[leases[0]]
            if self._waits(grant):
                self._since[worker] = now
            elif self._is_overdue(grant, now):
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
        self._check_held()

    # -- inner ---------------------------------------------------------------------------------------------

    def _works(self, grant: Grant) -> list[tuple[int, int]]:
        return [(grant.step, 0)] if grant.step >= 0 else []  # a submission is its worker's own

    def _grant(self, step: int, worker: str, now: float, deadline_s: float) -> Grant:
        return self._enter(Grant(self._number(), step, worker, now, deadline_s))

    def _end(self, lease: int, now: float) -> Grant:
        grant = self._drop(lease, finished=True)
        self._since[grant.worker] = now
        return grant

    def _drop(self, lease: int, *, finished: bool = False) -> Grant:
        twin = self._twins.pop(lease, None)
        if twin is not None:
            del self._twins[twin]
        return super()._drop(lease, finished=finished)
