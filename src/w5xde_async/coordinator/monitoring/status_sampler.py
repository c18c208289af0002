"""The run, looked at once a second: what every worker does and why it waits, and what the run as a whole has come to.

It reads what sessions, membership, ledger and contributions have counted already, and but for memory only while
somebody has asked for samples. It changes nothing. Time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice, pairwise

from w5xde_async.coordinator.training import Training
from w5xde_async.hub.members.session import Session
from w5xde_async.job import shown_end
from w5xde_async.plan.membership import Member
from w5xde_async.telemetry.events import MemoryUsed, RunReported, WorkerReported
from w5xde_async.telemetry.memory import host_bytes, own_device_memory

_MEMORY_S = 30.0  # between two records of a process's memory
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
    """Publishes a ``WorkerReported`` for every worker and one ``RunReported``, at most once per ``interval_s``.

    And ``MemoryUsed`` of each process, whoever listens: once it is known, then every 30 s.
    """

    def __init__(self, training: Training, *, interval_s: float = 1.0) -> None:
        self._training, self._bus, self._interval_s = training, training.context.bus, interval_s
        self._began = self._last = training.context.clock()
        self._speeds: dict[tuple[str, int], _Speed] = {}  # (worker, incarnation) -> its own
        self._weighed: dict[str, float] = {}  # worker, or none for this process -> when its memory was told

    def follow(self, training: Training) -> None:
        """Look at another phase of the same run from now on."""
        self._training = training

    def tick(self, now: float) -> None:
        """Look, where somebody wants to know and the last look is long enough ago."""
        self._weigh(now)
        seconds = now - self._last
        if seconds >= 0.9 * self._interval_s:
            self.look(now)

    def look(self, now: float) -> None:
        """Look, where somebody wants to know, however long ago the last look was."""
        if not self._bus.sampled:
            return
        self._last = now
        roster, bus = self._training.roster, self._bus
        members = roster.membership.members
        total = sum(member.leaves for member in members.values()) or 1
        before, self._speeds = self._speeds, {}
        for worker, session in roster.sessions.items():
            member = members.get(worker)
            if member is not None:
                key = (worker, member.incarnation)
                self._speeds[key] = speed = before.get(key) or _Speed(member.joined_at)
                leaves_per_s = speed.look(now, member.computed)
                bus.publish(self._worker(session, member, now, leaves_per_s, member.leaves / total))
        for session in roster.joining:
            if session.worker_id not in members:  # else it is one more link of a member, whose report counts
                bus.publish(self._joining(session, now))
        bus.publish(self._run(now))

    def _weigh(self, now: float) -> None:
        before, self._weighed = self._weighed, {}
        for worker, session in (("", None), *self._training.roster.sessions.items()):
            report = None if session is None else session.report
            if session is not None and report is None:
                continue
            told = before.get(worker, -math.inf)
            if now - told >= _MEMORY_S:
                told = now
                self._training.context.bus.publish(self._memory(worker, session))
            self._weighed[worker] = told

    @staticmethod
    def _memory(worker: str, session: Session | None) -> MemoryUsed:
        if session is None or session.report is None:
            device = own_device_memory()
            return MemoryUsed(
                worker_id="", name="coordinator", host_bytes=host_bytes(), device_bytes=device.used_bytes,
                device_total_bytes=device.total_bytes,
            )  # fmt: skip
        report = session.report
        return MemoryUsed(
            worker_id=worker, name=session.name, host_bytes=report.host_bytes, device_bytes=report.device_bytes,
            device_total_bytes=report.device_total_bytes,
        )  # fmt: skip

    def _worker(
        self, session: Session, member: Member, now: float, leaves_per_s: float, share: float
    ) -> WorkerReported:
        link, reports = session.link, [one.report for one in session.links if one.report is not None]
        figures = link.figures
        training = self._training
        return WorkerReported(
            worker_id=member.worker_id, name=member.name, peer=member.peer, device=member.device,
            threads=member.threads, state=member.standing.value, activity=session.last_message,
            waits_for=training.reason_to_wait(session, member),
            member_s=now - member.joined_at, leases_held=training.ledger.num_held(member.worker_id),
            leaves=member.leaves, samples=member.samples,
            share=share, leaves_per_s=leaves_per_s, compute_s=member.compute_s, wait_s=member.wait_s,
            network_s=session.network_s, encode_s=member.encode_s,
            bytes_sent=sum(one.link.bytes_received for one in session.links),
            bytes_received=sum(one.link.bytes_sent for one in session.links), raw_bytes=member.raw_bytes,
            encoded_bytes=member.encoded_bytes, rtt_s=None if figures is None else figures.rtt_s,
            retransmits=None if figures is None else figures.retransmits,
            host_bytes=sum(report.host_bytes for report in reports),
            device_bytes=sum(report.device_bytes for report in reports),
            device_total_bytes=sum(report.device_total_bytes for report in reports),
            cpu_s=sum(_finite(report.cpu_s) for report in reports),
            flops_per_leaf=sum(_finite(report.flops_per_leaf) for report in reports), link=member.link,
            data_from=training.context.loader.read_by(member.worker_id),
        )  # fmt: skip

    def _joining(self, session: Session, now: float) -> WorkerReported:
        link = session.link
        awaits = session in self._training.roster.programs.awaited_by
        waits_for = "the step to be made a program (--job needs none)" if awaits else "its model to be built"
        return WorkerReported(
            worker_id=session.worker_id, name=session.name, peer=link.peer, device="", threads=0, state="joining",
            activity=session.last_message, waits_for=waits_for, member_s=now - session.admitted_at,
            bytes_sent=link.bytes_received, bytes_received=link.bytes_sent,
        )  # fmt: skip

    def _run(self, now: float) -> RunReported:
        training, roster = self._training, self._training.roster
        counts = training.phase.totals()
        sent, received = roster.contributions.traffic(roster.sessions.values())
        raw, encoded = training.downlink_bytes()
        return RunReported(
            step=training.progress, total_steps=shown_end(training.total_steps), samples=training.phase.samples_applied,
            num_workers=len(roster.sessions), num_joining=len(roster.joining), leaves=counts.leaves,
            leaves_in_vain=counts.leaves_wasted, leases_stale=counts.stale, leases_duplicate=counts.duplicate,
            leases_rejected=counts.rejected, leases_backed_up=counts.backed_up, bytes_sent=sent,
            bytes_received=received, uptime_s=now - self._began, host_bytes=host_bytes(),
            refused=roster.contributions.links_refused, residuals_lost=roster.contributions.residuals_lost,
            downlink_raw_bytes=raw, downlink_encoded_bytes=encoded, bad_samples=len(training.context.loader.bad),
            sample_bytes=training.context.loader.sample_bytes,
        )  # fmt: skip


def _finite(value: float) -> float:
    """A peer's number, fit for arithmetic."""
    return value if math.isfinite(value) and value >= 0 else 0.0
