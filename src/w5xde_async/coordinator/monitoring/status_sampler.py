"""The run, looked at once a second: what every worker does and why it waits, and what the run as a whole has come to.

It reads what sessions, membership, ledger and contributions have counted already, and only while somebody has asked
for samples. It changes nothing. Time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice, pairwise

from w5xde_async.coordinator.outer.training import OuterTraining
from w5xde_async.coordinator.sync.training import SyncTraining
from w5xde_async.coordinator.training import Training
from w5xde_async.hub.members.session import Session
from w5xde_async.job import shown_end
from w5xde_async.plan.membership import Member, Standing
from w5xde_async.telemetry.events import RunReported, WorkerReported
from w5xde_async.telemetry.memory import host_bytes

__all__ = ["StatusSampler", "reason_to_wait"]

_MOST_NAMES = 3
_SPEED_S = 10.0  # a worker's speed is that of the last seconds,
_SPEED_LEASES = 3  # or of its last leases, where these take longer


class _Speed:
    """Leaves a second of one worker, by when they became more: so long leases are no bursts, and no standstill."""

    def __init__(self, joined_at: float) -> None:
        self._seen = deque([(joined_at, 0)])  # when, and how many there were

    def look(self, now: float, leaves: int) -> float:
        """The speed; ``leaves`` are all so far."""
        seen = self._seen
        if leaves != seen[-1][1]:
            seen.append((now, leaves))
        if len(seen) == 1:
            return 0.0
        times = [when for when, _ in islice(reversed(seen), _SPEED_LEASES + 1)]
        lease_s = max(later - earlier for later, earlier in pairwise(times))
        began = now - max(_SPEED_S, _SPEED_LEASES * lease_s)
        while len(seen) > 2 and seen[0][0] < began:
            seen.popleft()
        (first, known), (last, most) = seen[0], seen[-1]
        if last <= began:  # it has done nothing for so long
            seen.popleft()
            return 0.0
        # Since then it is busy with its next lease, but not for ever.
        seconds = max(last - first, now - first - lease_s)
        return (most - known) / seconds if seconds > 0 else 0.0


class StatusSampler:
    """Publishes a ``WorkerReported`` for every worker and one ``RunReported``, at most once per ``interval_s``."""

    def __init__(self, training: Training, *, interval_s: float = 1.0) -> None:
        self._training, self._interval_s = training, interval_s
        self._began = self._last = training.context.clock()
        self._speeds: dict[tuple[str, int], _Speed] = {}  # (worker, incarnation) -> its own

    def follow(self, training: Training) -> None:
        """Look at another phase of the same run from now on."""
        self._training = training

    def tick(self, now: float) -> None:
        """Look, where somebody wants to know and the last look is long enough ago."""
        seconds = now - self._last
        if not self._training.context.bus.sampled or seconds < 0.9 * self._interval_s:
            return
        self._last = now
        roster, bus = self._training.roster, self._training.context.bus
        members = roster.membership.members
        total = sum(member.leaves for member in members.values()) or 1
        before, self._speeds = self._speeds, {}
        for worker, session in roster.sessions.items():
            member = members.get(worker)
            if member is not None:
                key = (worker, member.incarnation)
                self._speeds[key] = speed = before.get(key) or _Speed(member.joined_at)
                leaves_per_s = speed.look(now, member.leaves)
                bus.publish(self._worker(session, member, now, leaves_per_s, member.leaves / total))
        for session in roster.joining:
            bus.publish(self._joining(session, now))
        bus.publish(self._run(now))

    def _worker(
        self, session: Session, member: Member, now: float, leaves_per_s: float, share: float
    ) -> WorkerReported:
        link, report = session.link, session.report
        figures = link.figures
        training = self._training
        held, waits_for = 0, ""
        if isinstance(training, SyncTraining):
            held = training.ledger.num_held(member.worker_id)
            waits_for = reason_to_wait(training, session, member)
        elif isinstance(training, OuterTraining):
            held = training.ledger.num_held(member.worker_id)
            waits_for = _reason_in_rounds(training, session, member)
        return WorkerReported(
            worker_id=member.worker_id, name=member.name, peer=member.peer, device=member.device,
            threads=member.threads, state=member.standing.value, activity=session.last_message, waits_for=waits_for,
            member_s=now - member.joined_at, leases_held=held, leaves=member.leaves, samples=member.samples,
            share=share, leaves_per_s=leaves_per_s, compute_s=member.compute_s, wait_s=member.wait_s,
            network_s=session.receiving_s + session.outbox.sending_s, encode_s=member.encode_s,
            bytes_sent=link.bytes_received, bytes_received=link.bytes_sent, raw_bytes=member.raw_bytes,
            encoded_bytes=member.encoded_bytes, rtt_s=None if figures is None else figures.rtt_s,
            retransmits=None if figures is None else figures.retransmits,
            host_bytes=0 if report is None else report.host_bytes,
            device_bytes=0 if report is None else report.device_bytes,
            device_total_bytes=0 if report is None else report.device_total_bytes,
            cpu_s=0.0 if report is None else _finite(report.cpu_s),
            flops_per_leaf=0.0 if report is None else _finite(report.flops_per_leaf),
        )  # fmt: skip

    def _joining(self, session: Session, now: float) -> WorkerReported:
        link = session.link
        return WorkerReported(
            worker_id=session.worker_id, name=session.name, peer=link.peer, device="", threads=0, state="joining",
            activity=session.last_message, waits_for="its model to be built", member_s=now - session.admitted_at,
            leases_held=0, leaves=0, samples=0, share=0.0, leaves_per_s=0.0, compute_s=0.0, wait_s=0.0, network_s=0.0,
            encode_s=0.0, bytes_sent=link.bytes_received, bytes_received=link.bytes_sent, raw_bytes=0, encoded_bytes=0,
        )  # fmt: skip

    def _run(self, now: float) -> RunReported:
        training, roster = self._training, self._training.roster
        counts = training.totals()
        sent, received = roster.contributions.traffic(roster.sessions.values())
        raw, encoded = training.downlink_bytes()
        return RunReported(
            step=training.progress, total_steps=shown_end(training.total_steps), samples=training.samples_applied,
            num_workers=len(roster.sessions), num_joining=len(roster.joining), leaves=counts.leaves,
            leaves_in_vain=counts.leaves_wasted, leases_stale=counts.stale, leases_duplicate=counts.duplicate,
            leases_rejected=counts.rejected, leases_backed_up=counts.backed_up, bytes_sent=sent,
            bytes_received=received, uptime_s=now - self._began, host_bytes=host_bytes(),
            residuals_lost=roster.contributions.residuals_lost, downlink_raw_bytes=raw, downlink_encoded_bytes=encoded,
        )  # fmt: skip


def reason_to_wait(training: SyncTraining, session: Session, member: Member) -> str:
    """What keeps a worker from computing at this moment, for a person; empty where nothing does."""
    if (reason := _reason_of_standing(member)) is not None:
        return reason
    if not training.begun:
        return f"workers: the run begins with {training.context.config.min_workers}"
    steps = training.ledger.open_steps
    if not steps:
        return "the end of the run"
    held = training.ledger.held(member.worker_id)
    if any(grant.step == steps[0] for grant in held):
        if (reason := _reason_of_network(session)) is not None:
            return reason
        if held[0].lease in training.scheduler.unread:
            return "data: the loader has not read its samples yet"
        return ""
    if training.ledger.free_leaves(steps[0]):
        if session.outbox.lease_bytes > training.context.config.credit_bytes:
            return "the network: it has not taken the leases that it was sent"
        return "a lease"
    if training.ledger.complete(steps[0]):
        return f"the update of step {steps[0] + 1}"
    return f"step {steps[0] + 1}: {_holders(training, steps[0], member.worker_id)}"


def _reason_in_rounds(training: OuterTraining, session: Session, member: Member) -> str:
    """The same under rules whose results count as they come."""
    if (reason := _reason_of_standing(member)) is not None:
        return reason
    if training.ledger.num_held(member.worker_id):
        return _reason_of_network(session) or ""
    if training.ledger.complete:
        return "the end of the run"
    return "the next version" if training.local_steps.of(member.worker_id).blocked else "a lease"


def _reason_of_standing(member: Member) -> str | None:
    if member.standing is Standing.DRAINING:
        return "nothing: it is leaving"
    if member.standing is Standing.LATE:
        return "its own answer: a lease was taken from it and it has not said what became of it"
    return None


def _reason_of_network(session: Session) -> str | None:
    if session.receiving is not None:
        return "the network: its result is on its way"
    return "the network: a lease is on its way" if session.outbox.lease_bytes else None


def _holders(training: SyncTraining, step: int, worker: str) -> str:
    """Who still computes leaves of a step."""
    held = [
        (other.name, leaves)
        for other in training.roster.sessions.values()
        if other.worker_id != worker and (leaves := training.ledger.num_held_leaves(other.worker_id, step))
    ]
    if not held:
        return "its last results are being added"
    number = sum(leaves for _, leaves in held)
    verb = "computes" if len(held) == 1 else "compute"
    return f"{_names([name for name, _ in held])} {verb} the last {number} {'leaf' if number == 1 else 'leaves'}"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown


def _finite(value: float) -> float:
    """A peer's number, fit for arithmetic."""
    return value if math.isfinite(value) and value >= 0 else 0.0
