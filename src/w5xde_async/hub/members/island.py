"""A worker of several ranks: one member, one session for each rank, each with its own part of everything.

Rank 0 is the head: its session is the member's. Leases are granted to the head and sent to all ranks, each with the
data of its own leaves. A rank is sent the parameters of its shard and sends the results of it. The island has done a
lease when all ranks have; it is lost when one of them is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from w5xde_async.compute.batch import selected
from w5xde_async.errors import RemoteError
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import Shard, check_division
from w5xde_async.plan.shares import Share, leaves_of
from w5xde_async.plan.tree import Block
from w5xde_async.wire.frame import SESSION_CAPS, Buffer, BufferSpec
from w5xde_async.wire.messages import Done, Lease, Ready

if TYPE_CHECKING:
    from w5xde_async.hub.members.session import Session

_MOST_OPEN = 64  # leases that some ranks have done and others not: a worker holds fewer


class Island:
    """The sessions of one worker, by rank. Belongs to the event loop."""

    def __init__(self, layout: Layout, ranks: int) -> None:
        self.ranks, self._layout = ranks, layout
        self._sessions: dict[int, Session] = {}
        self._shares: dict[int, tuple[Share, int, str]] = {}  # and how many neighbours work as one, and numerics
        self._shards: dict[int, Shard] = {}
        self._done: dict[int, dict[int, Done]] = {}  # lease -> rank -> what it said
        self.submits: set[int] = set()  #: leases by which it was asked to submit
        self.gone: set[int] = set()  #: ranks whose sessions have ended
        self.reason = ""  #: why the first of them ended
        self.vanished = False  #: it did without a word

    def add(self, session: Session, ready: Ready) -> None:
        """A rank is ready. Raises RemoteError where the island cannot be made of what its ranks say."""
        if session.ranks != self.ranks:
            raise RemoteError(f"rank {session.rank} of {session.ranks} came to an island of {self.ranks}")
        if self.gone:
            raise RemoteError("its island is lost")
        if session.rank in self._sessions:
            raise RemoteError(f"rank {session.rank} of its island is here already")
        shard = Shard.parse(self._layout, ready.shard)
        most = max((len(shard.pieces(bucket)) for bucket in self._layout.buckets), default=0)
        if most > SESSION_CAPS.buffers:
            raise RemoteError(f"its shard has {most} pieces in one bucket; at most {SESSION_CAPS.buffers} travel")
        if ready.share not in tuple(Share):
            raise RemoteError(f"it divides leaves in way {ready.share}, which is none")
        if self.ranks % ready.together:
            raise RemoteError(f"{ready.together} of its {self.ranks} ranks work as one, which does not come out even")
        self._sessions[session.rank] = session
        self._shares[session.rank] = (Share(ready.share), ready.together, ready.numerics)
        self._shards[session.rank] = shard
        session.shard = shard
        if not self.complete:
            return
        try:
            check_division(self._layout, self._shards.values())
        except ValueError as error:
            raise RemoteError(f"its ranks do not divide the model: {error}") from None
        if len(set(self._shares.values())) > 1:
            raise RemoteError("its ranks do not agree how leaves are divided, or how sums are made")

    @property
    def complete(self) -> bool:
        """Whether all ranks are ready."""
        return len(self._sessions) == self.ranks

    @property
    def head(self) -> Session:
        """Of a complete island: the session of rank 0."""
        return self._sessions[0]

    @property
    def sessions(self) -> list[Session]:
        """Those that are there, by rank."""
        return [self._sessions[rank] for rank in sorted(self._sessions)]

    @property
    def least_leaves(self) -> int:
        """Of a lease, for every rank to have one."""
        share, together, _ = self._shares[0]
        return 1 if share is Share.ALL else self.ranks // together

    def holders(self, bucket: int) -> set[int]:
        """The ranks that have anything of a bucket."""
        return {rank for rank, shard in self._shards.items() if bucket in shard.buckets}

    def divided(
        self, lease: Lease, buffers: Sequence[tuple[BufferSpec, Buffer]]
    ) -> list[tuple[Lease, list[tuple[BufferSpec, Buffer]]]]:
        """A lease with the data of its block, as it goes to each rank: with the data of its own leaves."""
        block = Block(lease.start, lease.start + len(lease.samples))
        parts = []
        share, together, _ = self._shares[0]
        for leaves in leaves_of(block, share, self.ranks, together):
            own = [leaf - lease.start for leaf in leaves]
            structure, data = selected(lease.structure, buffers, lease.samples, lease.packed, own)
            parts.append((structs.replace(lease, structure=structure, packed=False), data))
        return parts

    def done(self, session: Session, done: Done) -> Done | None:
        """A rank has done its part of a lease. What the head said, once all have.

        Of a lease that was revoked before it was begun the head alone says something.
        """
        if not session.rank and not done.losses and done.lease not in self.submits:
            self._done.pop(done.lease, None)
            return done
        said = self._done.setdefault(done.lease, {})
        said[session.rank] = done
        if len(said) == self.ranks:
            del self._done[done.lease]
            self.submits.discard(done.lease)
            return structs.replace(
                said[0], encode_s=max(one.encode_s for one in said.values()),
                raw_bytes=sum(one.raw_bytes for one in said.values()),
            )  # fmt: skip
        while len(self._done) > _MOST_OPEN:
            del self._done[next(iter(self._done))]
        return None

    def failed(self, lease: int) -> None:
        """A rank has failed on a lease: nobody waits for the others."""
        self._done.pop(lease, None)

    def ended(self, session: Session, reason: str) -> bool:
        """A rank's session has ended, and with it the island. True once all sessions have."""
        if not self.gone:
            self.reason, self.vanished = f"rank {session.rank}: {reason}", session.vanished
        self.gone.add(session.rank)
        for rank, other in self._sessions.items():
            if rank not in self.gone and not (session.dismissed and self.complete):
                other.abort(f"its island is lost, {self.reason}")
        return self.gone >= set(self._sessions)
