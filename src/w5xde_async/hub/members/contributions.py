"""Who did how much, and what crossed the network: counters that outlive the sessions they come from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from w5xde_async.hub.members.session import Session
from w5xde_async.plan.membership import Member
from w5xde_async.telemetry.events import COORDINATOR, WorkerShare

_MAX_SHARES = 512


class Contributions:
    """Bytes and shares of workers that have left. At most 512 workers are kept by name; the rest is summed.

    A worker that is started again under its old name, after it had left, is the same worker.
    """

    def __init__(self) -> None:
        self._sent = self._received = 0
        self._shares: dict[str, WorkerShare] = {}
        self._key_of: dict[str, str] = {}  # worker that has left -> its key in the shares
        self._left: dict[str, tuple[str, float]] = {}  # name, where no identity was proved -> its key, when it left
        self.short_steps = 0  #: computed by the coordinator: too short to be sent
        self._own_leaves = self._own_samples = 0  # what the coordinator has computed itself
        self._own_s = 0.0
        self.steps_skipped = 0  #: without an update: not finite, or refused
        self.residuals_lost = 0  #: workers that vanished with what a lossy codec had left out
        self.links_refused = 0  #: that were not let in

    def skip(self, steps: int) -> None:
        """``steps`` were left without an update."""
        self.steps_skipped += steps

    def close(self, session: Session) -> None:
        """A link has ended: keep its byte counts."""
        self._sent += session.link.bytes_sent
        self._received += session.link.bytes_received

    def remember(self, session: Session, member: Member, now: float) -> None:
        """A member has left: keep its share."""
        key = session.identity or member.worker_id
        if not session.identity:
            before, left_at = self._left.pop(member.name, (key, now))
            if key not in self._shares and left_at <= member.joined_at:
                key = before
            self._left[member.name] = key, now
            if len(self._left) > _MAX_SHARES:
                del self._left[next(iter(self._left))]
        if key not in self._shares and len(self._shares) >= _MAX_SHARES:
            key = ""
        self._key_of.pop(member.worker_id, None)
        self._key_of[member.worker_id] = key
        if len(self._key_of) > _MAX_SHARES:
            del self._key_of[next(iter(self._key_of))]
        share, known = _share(member, session, member.name if key else "others"), self._shares.get(key)
        self._shares[key] = share + known if known else share

    def name_of(self, worker_id: str) -> str:
        """Of a worker that has left; "" where it is not known any more."""
        key = self._key_of.get(worker_id, "")
        return self._shares[key].name if key in self._shares and key else ""

    def credit(self, worker_id: str, leaves: int, samples: int) -> None:
        """A result counts whose worker has left before it was judged."""
        key = self._key_of.get(worker_id, "")
        known = self._shares.get(key) or WorkerShare(
            name="others", device="", leaves=0, samples=0, compute_s=0.0, wait_s=0.0, bytes_sent=0, bytes_received=0
        )
        self._shares[key] = replace(known, leaves=known.leaves + leaves, samples=known.samples + samples)

    def add_own(self, leaves: int, samples: int, compute_s: float) -> None:
        """The coordinator has computed something itself that counts."""
        self._own_leaves += leaves
        self._own_samples += samples
        self._own_s += compute_s

    def traffic(self, sessions: Iterable[Session]) -> tuple[int, int]:
        """Bytes sent and received so far, those of ``sessions`` included."""
        sent, received = self._sent, self._received
        for session in sessions:
            for one in session.links:
                if not one.ended.is_set():  # else it is counted: a rank that is gone before the others
                    sent += one.link.bytes_sent
                    received += one.link.bytes_received
        return sent, received

    def shares(self) -> tuple[WorkerShare, ...]:
        """Every worker's share, and the coordinator's where it has one, most leaves first."""
        shares = list(self._shares.values())
        if self._own_leaves:
            shares.append(WorkerShare(
                name=COORDINATOR, device="cpu", leaves=self._own_leaves, samples=self._own_samples,
                compute_s=self._own_s, wait_s=0.0, bytes_sent=0, bytes_received=0,
            ))  # fmt: skip
        return tuple(sorted(shares, key=lambda share: (-share.leaves, share.name)))


def _share(member: Member, session: Session, name: str) -> WorkerShare:
    return WorkerShare(
        name=name,
        device=member.device,
        leaves=member.leaves,
        samples=member.samples,
        compute_s=member.compute_s,
        wait_s=member.wait_s,
        bytes_sent=sum(one.link.bytes_received for one in session.links),
        bytes_received=sum(one.link.bytes_sent for one in session.links),
        encode_s=member.encode_s,
        network_s=session.network_s,
        raw_bytes=member.raw_bytes,
        encoded_bytes=member.encoded_bytes,
    )
