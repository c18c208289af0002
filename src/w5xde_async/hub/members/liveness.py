"""Who is alive: silence, links that take nothing, workers that never become ready, leases past their deadline.

Looks at everything once a tick; time is an argument. A peer counts as alive while frames come from it, or more of a
long one than heartbeats would be, and is told that we are when nothing else is on its way to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from w5xde_async.hub.config import NetworkConfig
from w5xde_async.hub.members.session import Session
from w5xde_async.plan.leases import Grant, LeaseTable
from w5xde_async.plan.membership import Membership, Standing
from w5xde_async.plan.pacing import Pacing
from w5xde_async.wire.messages import Heartbeat

#: After so long whoever owes an answer is not waited for. A compiler may take minutes in the middle of a run.
_HANGS_S = 300.0
_PATIENT = 2.0  # times as long as usual: beyond that it is told
_TELLS_S = 60.0  # overdue for so long: who waits for the only worker is told so


class Scheduling(Protocol):
    """What the roster needs of whoever hands out work: a training, or a relay."""

    @property
    def ledger(self) -> LeaseTable[Any]:
        """The open leases."""

    @property
    def pacing(self) -> Pacing:
        """How long leases may take: told of those that took longer."""

    @property
    def accepts(self) -> bool:
        """Whether new workers may come: nothing was stopped and nothing has failed."""

    def takes_work(self, worker: str, does: bool) -> None:
        """A member takes work from now on, or no more."""

    def introduce(self, session: Session, awaited: Sequence[int]) -> None:
        """A worker has become a member: it lacks the parameters, and the verdicts on the leases ``awaited``."""

    def schedule(self, only: str | None = None) -> None:
        """Give work to whoever has room for it (``only``: check this worker alone)."""

    def revoke(self, grant: Grant, reason: str) -> None:
        """A lease was taken from its worker, which is to be told."""

    def release(self, session: Session) -> None:
        """Nothing is received for this session any more, and nothing is sent to it."""

    def divert(self, session: Session) -> bool:
        """Drop the result that is being received for this session. False where its memory cannot be freed so."""

    def take_back(self, session: Session) -> int:
        """A member is gone: its leases are for others. Returns how many there were."""

    def departed(self, worker: str) -> None:
        """A member has left, and everybody was told."""


class Liveness:
    """The checks of a tick. ``sessions`` are members by worker id, ``joining`` those that build their model."""

    def __init__(
        self, config: NetworkConfig, sessions: Mapping[str, Session], joining: dict[Session, float],
        membership: Membership, scheduling: Scheduling, warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._config, self._sessions, self._joining = config, sessions, joining
        self._membership, self._ledger, self._warn = membership, scheduling.ledger, warn
        self._revoke, self._overran = scheduling.revoke, scheduling.pacing.overran
        self._divert = scheduling.divert
        self._alone, self._alone_since = -1, math.inf  # a lease that is overdue and nobody else can have; inf: told
        self._late: dict[str, float] = {}  # since when workers owe an answer for what was taken from them

    def tick(self, now: float, activity: str) -> None:
        """Cut the links that are dead and give back the leases that are overdue. ``activity``: what we are doing."""
        for session in (*self._sessions.values(), *self._joining):
            for link in session.links:
                self._sending(link, now, activity)
                self._receiving(link, now)
        config = self._config
        for session, seen in self._joining.items():
            if now - seen >= config.silence_s:
                session.abort(f"silent for {now - seen:.0f} s", silent=True)
            elif now - session.admitted_at >= config.join_s:
                session.abort(f"not ready {config.join_s:.0f} s after it was let in")
        for member in self._membership.silent(now):
            silent = self._sessions.get(member.worker_id)
            if silent is not None:
                silent.abort(f"silent for {now - member.last_seen:.0f} s", silent=True)
        for grant in self._ledger.overdue(now):
            if self._ledger.get(grant.lease) is not None:
                self._overdue(grant, now)
        for worker, member in self._membership.members.items():
            if member.standing is Standing.LATE:
                self._late.setdefault(worker, now)
            else:
                self._late.pop(worker, None)
        for worker, since in list(self._late.items()):
            if worker not in self._membership.members:
                del self._late[worker]
            elif now - since >= _HANGS_S and (holder := self._sessions.get(worker)) is not None:
                del self._late[worker]
                holder.abort(f"its lease was overdue, and it has not answered for {now - since:.0f} s more: it hangs")

    def _sending(self, session: Session, now: float, activity: str) -> None:
        if session.outbox.idle:
            session.post(Heartbeat(activity))
            session.uptake.begin(now)
        elif stalled_s := session.uptake.stalled_s(session.link, now, self._config.silence_s):
            session.abort(f"it has taken nothing of what was sent for {stalled_s:.0f} s", silent=True)

    def _receiving(self, session: Session, now: float) -> None:
        if not session.link.heard(self._config.heartbeat_s, self._config.silence_s):
            if session.rank and session.island is not None and now - session.heard_at >= self._config.silence_s:
                session.abort(f"silent for {now - session.heard_at:.0f} s", silent=True)
            return
        session.heard_at = now
        if session in self._joining:
            self._joining[session] = now
        elif not session.rank and session.worker_id in self._membership.members:
            self._membership.members[session.worker_id].last_seen = now

    def _overdue(self, grant: Grant, now: float) -> None:
        holder = self._sessions.get(grant.worker)
        if self._membership.num_ready <= self._membership.is_ready(grant.worker):
            self._wait_for(grant, grant.worker if holder is None else holder.name, now)
            return  # nobody else could do it sooner
        self._overran(grant.worker)
        times = self._ledger.overran(grant)
        longer = f", which may take {times:.0f} times as long as usual" if times > _PATIENT else ""
        if holder is not None and holder.is_receiving(grant.lease) and not self._divert(holder):
            # Its bytes are on their way into the block's memory: only the end of the link frees that.
            holder.abort("its lease's deadline passed in the middle of a result")
            return
        name = holder.name if holder is not None else grant.worker
        if holder is not None and self._config.update.local:
            # What it carries would go on from a step that another has been given. And it cannot give back a lease that
            # asks for its pseudo-gradient: it would answer, and nobody would know that lease any more.
            self._warn(f"lease {grant.lease} of {name} was overdue: what it had computed is given to others{longer}")
            holder.dismiss("its lease's deadline passed; it begins anew")
            return
        self._warn(f"lease {grant.lease} of {name} was overdue and is given to another{longer}")
        self._ledger.give_back(grant.lease)
        self._revoke(grant, "its deadline passed")
        self.await_answer(grant.worker)

    def _wait_for(self, grant: Grant, name: str, now: float) -> None:
        if self._ledger.get(self._alone) is None:
            self._alone, self._alone_since = grant.lease, now
        elif grant.lease == self._alone and now - self._alone_since >= _TELLS_S:
            self._alone_since = math.inf
            self._warn(
                f"lease {grant.lease} of {name} is overdue, and no other worker is here: it is waited for. If {name} "
                "hangs, end its process, or start another worker, which is given the lease"
            )

    def await_answer(self, worker: str) -> None:
        """A lease of this worker was taken from it: it gets no other until it has said what became of that one.

        What it has not begun is better given to others as well, so that a worker that hangs costs one lease.
        """
        member, holder = self._membership.members.get(worker), self._sessions.get(worker)
        if member is None or holder is None or member.standing is not Standing.READY:
            return
        member.standing = Standing.LATE
        for held in self._ledger.held(worker):
            if not holder.is_receiving(held.lease):
                self._ledger.give_back(held.lease)
                self._revoke(held, "an earlier lease is late")
        if not member.owes:  # it had been sent none of them
            member.standing = Standing.READY
