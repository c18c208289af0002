"""Who is here, since when, in what state. Pure: time is an argument.

A worker is known by its id over reconnects; each connection is one **incarnation**. At most one incarnation of an
id is a member: a newer one replaces the older (a worker that reconnects before its half-open connection was found).
"""

from __future__ import annotations

from collections.abc import Callable, KeysView
from dataclasses import dataclass, field
from enum import Enum


class Departed:
    """Workers that have left, of which something is remembered. They alone are forgotten, who left first before others:
    else those who come and go would push out those who stay."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._workers: dict[str, None] = {}  # the last to leave last

    def __contains__(self, worker: object) -> bool:
        return worker in self._workers

    def left(self, worker: str) -> str | None:
        """``worker`` has left. Who is to be forgotten for it, if anybody is."""
        self.returned(worker)
        self._workers[worker] = None
        if len(self._workers) <= self._most:
            return None
        forgotten = next(iter(self._workers))
        del self._workers[forgotten]
        return forgotten

    def returned(self, worker: str) -> None:
        """``worker`` is here, whether it had left or not."""
        self._workers.pop(worker, None)


class Standing(Enum):
    """What a member is to the scheduler."""

    READY = "ready"
    LATE = "late"  # leases were taken from it, and it has not said of all of them what became of them
    DRAINING = "draining"
    OUT = "quarantined"  # its results were wrong; its link is about to end


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
    leaves: int = 0  # that count
    samples: int = 0  # in these
    computed: int = 0  # leaves, whatever became of them
    compute_s: float = 0.0
    wait_s: float = 0.0
    raw_bytes: int = 0  # of its results as float32, before any codec
    encoded_bytes: int = 0  # of the same on the wire
    encode_s: float = 0.0  # that it spent encoding
    link: str = "tcp"  # how parameters and results travel
    owes: set[int] = field(default_factory=set)  # leases taken from it of which it has said nothing yet
    _standing: Standing = field(default=Standing.READY, init=False)
    _of: Membership | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def standing(self) -> Standing:
        """What it is to the scheduler; setting it tells the Membership."""
        return self._standing

    @standing.setter
    def standing(self, standing: Standing) -> None:
        self._standing = standing
        if self._of is not None:
            self._of.look(self)


class Membership:
    """All members by id. ``silence_s``: a member that says nothing for that long counts as gone.

    Who takes work is kept as it changes, so that nobody need look through all members for it.
    """

    def __init__(self, silence_s: float, on_ready: Callable[[str, bool], None] = lambda worker_id, ready: None) -> None:
        """``on_ready`` is told the id of each member that begins (True) or ceases (False) to take work."""
        self.silence_s = silence_s
        self.members: dict[str, Member] = {}
        self._on_ready = on_ready
        self._ready: dict[str, Member] = {}

    def join(self, member: Member) -> Member | None:
        """Add a member. Returns the older incarnation that it replaces, if any."""
        replaced = self.members.get(member.worker_id)
        if replaced is not None:
            self._part(replaced)
        self.members[member.worker_id] = member
        member._of = self
        self.look(member)
        return replaced

    def leave(self, worker_id: str, incarnation: int) -> Member | None:
        """Remove that incarnation; a newer one of the same id stays."""
        member = self.members.get(worker_id)
        if member is None or member.incarnation != incarnation:
            return None
        self._part(member)
        return self.members.pop(worker_id)

    @property
    def num_ready(self) -> int:
        """Members that take work."""
        return len(self._ready)

    def is_ready(self, worker_id: str) -> bool:
        """Whether a member of that id takes work."""
        return worker_id in self._ready

    @property
    def ready_ids(self) -> KeysView[str]:
        """Ids of the members that take work: no copy, they change with them."""
        return self._ready.keys()

    def ready(self) -> list[Member]:
        """Members that take work, in the order in which they began to."""
        return list(self._ready.values())

    def silent(self, now: float) -> list[Member]:
        """Members that have said nothing for ``silence_s``."""
        return [member for member in self.members.values() if now - member.last_seen >= self.silence_s]

    def look(self, member: Member) -> None:
        """A member of this membership may take work now, or no more."""
        ready = member.standing is Standing.READY
        if ready != (member.worker_id in self._ready):
            if ready:
                self._ready[member.worker_id] = member
            else:
                del self._ready[member.worker_id]
            self._on_ready(member.worker_id, ready)

    def _part(self, member: Member) -> None:
        member._of = None
        if self._ready.pop(member.worker_id, None) is not None:
            self._on_ready(member.worker_id, False)
