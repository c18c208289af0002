"""Workers whose leases are taken from them: who was never sent one owes nothing and is there at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.sync.training import SyncTraining
from w5xde_async.hub.members.liveness import Liveness
from w5xde_async.hub.members.roster import Roster
from w5xde_async.hub.members.session import Uptake
from w5xde_async.net.link import Link
from w5xde_async.plan.leases import LeaseTable
from w5xde_async.plan.ledger import Ledger
from w5xde_async.plan.membership import Member, Membership, Standing
from w5xde_async.plan.pacing import Pacing, PacingConfig
from w5xde_async.plan.stream import StreamLedger
from w5xde_async.updates.config import UpdateConfig


def scheduling(ledger: LeaseTable[Any], revoke: Callable[[Any, str], None]) -> Any:
    """What liveness needs of a training."""
    return SimpleNamespace(ledger=ledger, revoke=revoke, pacing=Pacing(PacingConfig()), divert=lambda session: False)


@pytest.mark.parametrize(
    ("in_outbox", "was_sent", "standing"),
    [
        (True, True, Standing.READY),  # withdrawn from the outbox
        (False, False, Standing.READY),  # its data was still being read
        (False, True, Standing.LATE),  # it is with the worker, which has to answer
    ],
)
def test_a_worker_is_late_only_for_what_it_was_sent(in_outbox: bool, was_sent: bool, standing: Standing) -> None:
    ledger, membership, said = Ledger(), Membership(12.0), []

    def session(worker: str) -> Any:
        return SimpleNamespace(
            worker_id=worker, name=worker, is_receiving=lambda lease: False, withdraw=lambda lease: in_outbox,
            post=said.append,
        )  # fmt: skip

    sessions = {worker: session(worker) for worker in "ab"}
    for worker in "ab":
        membership.join(
            Member(
                worker_id=worker, name=worker, peer="", device="cpu", threads=1, incarnation=1, joined_at=0.0,
                last_seen=0.0,
            )
        )  # fmt: skip
    roster: Any = SimpleNamespace(sessions=sessions, member=membership.members.get)
    roster.revoke = lambda grant, reason: Roster.revoke(roster, grant, reason)
    scheduler = SimpleNamespace(unread=() if was_sent else range(100), known=())
    training: Any = SimpleNamespace(scheduler=scheduler, roster=roster, _let_go=lambda worker: None, _for_us=())
    training._was_sent = partial(SyncTraining._was_sent, training)

    def revoke(grant: Any, reason: str) -> None:
        SyncTraining.revoke(training, grant, reason)

    liveness = Liveness(CoordinatorConfig(), sessions, {}, membership, scheduling(ledger, revoke), print)
    ledger.open(0, 4, 0.0)
    mine = ledger.grant("a", 0, 4, now=0.0, deadline_s=9.0)
    assert mine is not None
    ledger.back_up(mine.lease, "b", now=1.0, deadline_s=9.0)
    other = ledger.finish(mine.lease)
    assert other is not None
    revoke(other, "another worker was faster")
    liveness.await_answer("b")
    assert membership.members["b"].standing is standing
    assert len(said) == (standing is Standing.LATE)


class Line:
    """What a link says of a line that carries ``rate`` bytes a second, of which the kernel holds ``held``."""

    def __init__(self, rate: float, held: int, *, says: bool) -> None:
        self._rate, self._held, self._says, self.now = rate, held, says, 0.0

    @property
    def acked_bytes(self) -> int | None:
        return int(self._rate * self.now) if self._says else None

    @property
    def bytes_sent(self) -> int:
        """The kernel takes more once a third of what it holds has left."""
        portion = self._held // 3
        return self._held + int(self._rate * self.now) // portion * portion


def cut_at(line: Line, until_s: float) -> float | None:
    """When a peer behind this line counts as one that takes nothing, looked at every second."""
    uptake = Uptake()
    for second in range(int(until_s)):
        line.now = float(second)
        if uptake.stalled_s(cast(Link, line), line.now, 12.0):
            return line.now
    return None


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("kilobits", [5, 20, 100, 2000])
def test_a_slow_line_is_not_cut_while_bytes_flow(kilobits: int, says: bool) -> None:
    """Where the kernel tells what was acknowledged at any rate, elsewhere where it takes portions often enough."""
    line = Line(kilobits * 125.0, 256 << 10, says=says)
    alive = says or (256 << 10) / 3 / (kilobits * 125.0) < 12.0
    assert cut_at(line, 600.0) is None if alive else cut_at(line, 600.0) is not None


def test_a_line_that_gets_slower_has_the_time_that_it_needed_before() -> None:
    line = Line(8_000.0, 256 << 10, says=False)  # a portion takes eleven seconds
    uptake = Uptake()
    for second in range(100):
        line.now = float(second)
        assert not uptake.stalled_s(cast(Link, line), line.now, 12.0)
    stopped = line.now
    waits = [second for second in range(60) if uptake.stalled_s(cast(Link, line), stopped + second, 12.0)]
    assert 12 <= waits[0] <= 24


@pytest.mark.parametrize("says", [True, False])
def test_who_reads_nothing_is_cut_after_the_silence(says: bool) -> None:
    assert cut_at(Line(0.0, 256 << 10, says=says), 60.0) == 12.0


@pytest.mark.parametrize("rule", ["async", "local", "streaming", "async-local"])
def test_who_is_overdue_with_steps_of_its_own_begins_anew(rule: str) -> None:
    """A request for its Delta could not be taken back from it: it would answer, and wait for a verdict for ever."""
    ledger, membership, revoked, aborted = StreamLedger(total_steps=9), Membership(12.0), [], []
    sessions: dict[str, Any] = {}
    for worker in "ab":
        sessions[worker] = SimpleNamespace(
            worker_id=worker, name=worker, is_receiving=lambda lease: False, dismiss=aborted.append
        )
        membership.join(
            Member(
                worker_id=worker, name=worker, peer="", device="cpu", threads=1, incarnation=1, joined_at=0.0,
                last_seen=0.0,
            )
        )  # fmt: skip
    liveness = Liveness(
        CoordinatorConfig(update=UpdateConfig(rule=rule)), sessions, {}, membership,
        scheduling(ledger, lambda grant, reason: revoked.append(grant.lease)), lambda text: None,
    )  # fmt: skip
    late = ledger.grant("a", now=0.0, deadline_s=5.0)
    assert late is not None
    ledger.ask("a", now=0.0)
    liveness._overdue(late, 0.0)
    assert (len(aborted), len(revoked)) == ((0, 2) if rule == "async" else (1, 0))
    assert ledger.num_held("a") == (0 if rule == "async" else 2)  # the end of the link gives them back
