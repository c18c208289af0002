"""Who is here, since when, in what state. Pure: time is an argument.

A worker is known by its id over reconnects; each connection is one **incarnation**. At most one incarnation of an
id is a member: a newer one replaces the older (a worker that reconnects before its half-open connection was found).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Member", "Membership", "Standing"]


class Standing(Enum):
    """What a member is to the scheduler."""

    READY = "ready"
    LATE = "late"  # leases were taken from it, and it has not said of all of them what became of them
    DRAINING = "draining"
    OUT = "put out"  # its results were wrong; its link is about to end


@dataclass(slots=True, kw_only=True)
class Member:
    """One worker. ``last_seen`` is when its last byte came, on the caller's clock."""

    worker_id: str
    name: str
    peer: str
    device: str
    threads: int
    incarnation: int
    joined_at: float
    last_seen: float
    standing: Standing = Standing.READY
    leaves: int = 0
    samples: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    raw_bytes: int = 0  # of its results as float32, before any codec
    encoded_bytes: int = 0  # of the same on the wire
    encode_s: float = 0.0  # that it spent encoding
    owes: set[int] = field(default_factory=set)  # leases taken from it of which it has said nothing yet


@dataclass(slots=True)
class Membership:
    """All members by id. ``silence_s``: a member that says nothing for that long counts as gone."""

    silence_s: float
    members: dict[str, Member] = field(default_factory=dict)
    _incarnations: int = 0

    def next_incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations

    def join(self, member: Member) -> Member | None:
        """Add a member. Returns the older incarnation that it replaces, if any."""
        replaced = self.members.get(member.worker_id)
        self.members[member.worker_id] = member
        return replaced

    def leave(self, worker_id: str, incarnation: int) -> Member | None:
        """Remove that incarnation; a newer one of the same id stays."""
        member = self.members.get(worker_id)
        if member is None or member.incarnation != incarnation:
            return None
        return self.members.pop(worker_id)

    def ready(self) -> list[Member]:
        """Members that take work, in order of joining."""
        return [member for member in self.members.values() if member.standing is Standing.READY]

    def silent(self, now: float) -> list[Member]:
        """Members that have said nothing for ``silence_s``."""
        return [member for member in self.members.values() if now - member.last_seen >= self.silence_s]
