"""The parameters on their way out, encoded once a version and sent to all who need it.

``published`` is what workers hold. With an exact downlink it is the parameters themselves, as they were at the commit;
with a lossy one each version sends c = C(theta - published) and published += D(c), so what one delta leaves out is in
the next, and every worker holds the same bits.

What a worker is being sent is never taken back, however slow its link: a version that has been begun is finished. If a
worker misses a version, the buckets that it missed are marked. Once its link is free the worker is ``due``: it gets
those buckets of ``published`` whole, as they then are, and follows again. A new worker lacks everything, and is due.

``advance`` and ``whole`` run in the aggregator's thread, the rest on the loop's. Frames are copies: a later commit does
not touch what is still being sent. Memory: ``published`` (with a lossy codec); for those that were due at the same time
one copy of what they lacked, while it leaves; and the deltas that wait for the slowest worker, of a worker at most as
many bytes as the model has.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from w5xde_async.codecs.codec import BytePool, Codec
from w5xde_async.coordinator.parameters.owner import ParameterOwner
from w5xde_async.coordinator.parameters.publisher import Piece
from w5xde_async.coordinator.training import Lifecycle
from w5xde_async.hub.members.island import Island
from w5xde_async.hub.members.session import Session
from w5xde_async.openmp import side_by_side
from w5xde_async.params.flat import FlatState, bytes_of
from w5xde_async.params.layout import Layout
from w5xde_async.updates.coded import coded_down
from w5xde_async.wire.frame import Buffer, BufferSpec, encode
from w5xde_async.wire.messages import Params

_Frame = tuple[int, list[Buffer]]  # of a bucket; -1: of a version in which nothing has changed

_MOST_QUEUED = 1024  # versions that may wait for one worker, where there is next to nothing in them


@dataclass(slots=True)
class _Way:
    """What is on its way to one worker."""

    queued: dict[int, int] = field(default_factory=dict)  # version that has not left yet -> its bytes, as deltas
    newest: dict[int, int] = field(default_factory=dict)  # bucket -> version on its way that brings its newest value
    behind: bool = False  # it is to be sent what it lacks
    left: int = -1  # the newest version that has left whole
    seen: int = 0  # ``DeltaPublisher.sent`` when ``Session.unsent`` was last right


class DeltaPublisher:
    """One run's published parameters. ``wake`` is called when a worker has become ``due``."""

    def __init__(
        self, layout: Layout, state: FlatState, codec: Codec, *, version: int = 0,
        wake: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.layout, self.codec, self._state = layout, codec, state
        self._version, self._wake = version, wake
        self.deltas = codec.name != "raw"
        # As many bytes of deltas pile up while the model is sent whole only where the link carries less than they are:
        # whoever can follow at all gets there. Versions that are whole themselves take each other's place.
        self._most_bytes = sum(layout.state_nbytes(bucket) for bucket in layout.buckets) if self.deltas else 0
        self._published = state
        if self.deltas:
            self._published = FlatState(layout)
            for mine, theirs in zip(self._published.groups, state.groups, strict=True):
                mine.copy_(theirs)
        self._pool = BytePool()
        self._coded = coded_down(layout).keys()
        self._ways: dict[Session, _Way] = {}
        self._due: dict[Session, _Way] = {}  # those that are behind and are not being sent anything
        self._changed: dict[int, int] = {}  # bucket -> ``sent`` when it last changed
        self._made = 0  # versions that ``advance`` has made
        self.sent = 0  #: versions that ``send`` has sent
        self.raw_bytes = self.encoded_bytes = 0  #: of the deltas, before and after

    @property
    def published(self) -> FlatState:
        """What workers compute with once they have been sent the version under way."""
        return self._published

    # -- in the aggregator's thread ------------------------------------------------------------------------

    @torch.no_grad()
    def advance(self, changed: Iterable[int]) -> list[Piece]:
        """What tells the new version from the one before."""
        self._made += 1
        if not self.deltas:
            return self.whole(changed)
        numbers = list(changed)
        pieces = side_by_side(self._told, numbers, sum(self.layout.buckets[number].numel * 4 for number in numbers))
        for piece in pieces:
            if piece.bucket in self._coded:
                self.raw_bytes += 4 * self.layout.buckets[piece.bucket].numel
                self.encoded_bytes += len(piece.data)
        return pieces

    @torch.no_grad()
    def _told(self, number: int) -> Piece:
        """What tells a bucket's new values. In any thread, for one bucket."""
        bucket = self.layout.buckets[number]
        mine, theirs = self._published.bucket(bucket), self._state.bucket(bucket)
        if number not in self._coded:
            mine.copy_(theirs)
            return self._raw(number)
        if self.codec.exact:  # a + (b - a) is not b: what is to keep its bits travels as it is
            mine.copy_(theirs)
            encoded = self.codec.encode(theirs, self._pool)
        else:
            delta = torch.sub(theirs, mine, out=self._pool.take_floats(bucket.numel))
            encoded = self.codec.encode(delta, self._pool)
            self._pool.give(delta)
            encoded.codec.add_to(encoded.data, mine)
        data = bytes(encoded.view)
        self._pool.give(encoded.data)
        spec = BufferSpec("", "uint8", (len(data),), encoded.codec.name, len(data))
        if encoded.codec.name == "raw":  # where lz4 did not pay
            spec = BufferSpec("", "float32", (bucket.numel,), "raw", len(data))
        return Piece(number, spec, data, not self.codec.exact)

    def whole(self, buckets: Iterable[int] | None = None) -> list[Piece]:
        """``buckets`` (all of them) as they are published."""
        numbers = range(len(self.layout.buckets)) if buckets is None else buckets
        return [self._raw(number) for number in numbers]

    def copy(self, buckets: Iterable[int]) -> tuple[int, list[Piece]]:
        """``whole``, and after how many versions of ``advance``: equal to ``sent`` where none is on its way."""
        return self._made, self.whole(buckets)

    def _raw(self, number: int) -> Piece:
        bucket = self.layout.buckets[number]
        dtype = str(self.layout.groups[bucket.group].dtype).removeprefix("torch.")
        data = bytes(bytes_of(self._published.bucket(bucket)))
        return Piece(number, BufferSpec("", dtype, (bucket.numel,), "raw", len(data)), data, False)

    # -- on the loop's thread ------------------------------------------------------------------------------

    def join(self, session: Session, *, held: bool = False, idle: bool = False) -> None:
        """A worker has come. It lacks everything, or nothing where it has ``held`` on to this version.

        ``idle`` ones are sent everything too: deltas are small, and whoever missed some would be sent the whole model.
        """
        self._ways[session] = _Way(seen=self.sent)
        if not held:
            session.unsent.update(range(len(self.layout.buckets)))
        self.catch_up(session)

    def bring(self, session: Session) -> None:
        """It comes anyway."""

    def forget(self, session: Session) -> None:
        """The session has ended."""
        self._ways.pop(session, None)
        self._due.pop(session, None)

    def knows(self, session: Session) -> bool:
        """Whether it has joined and has not ended. An island's head is forgotten when its link ends, and a member until
        those of all ranks have."""
        return session in self._ways

    def catch_up(self, session: Session) -> None:
        """The worker is to be sent what it lacks when all that is on its way to it has left."""
        way = self._ways.get(session)
        if way is not None:  # it may have left
            way.behind = True
            if not way.queued:
                self._due[session] = way
                self._wake()

    def has_left(self, session: Session, version: int) -> bool:
        """Whether ``version`` or a newer one has been sent to the worker whole."""
        way = self._ways.get(session)
        return way is not None and way.left >= version

    @property
    def due(self) -> list[Session]:
        """Those that are to be sent what they lack, now."""
        return list(self._due)

    def lacks(self, sessions: Iterable[Session]) -> list[int]:
        """Buckets whose newest value one of them or another has not been sent."""
        return sorted(set[int]().union(*(self._unsent(session, self._ways[session]) for session in sessions)))

    def _unsent(self, session: Session, way: _Way) -> set[int]:
        """``Session.unsent``, made right: a version costs nothing for those that are not sent it."""
        if way.seen != self.sent:
            for bucket, at in self._changed.items():
                if at > way.seen:
                    session.unsent.add(bucket)
                    way.newest.pop(bucket, None)
            way.seen = self.sent
        return session.unsent

    def send(
        self, sessions: Iterable[Session], version: int, pieces: Sequence[Piece], *, idle: Collection[Session] = ()
    ) -> None:
        """Queue a version that ``advance`` made, for those of ``sessions`` that follow; everybody else lacks it."""
        self._version = version
        told_to = [(session, way) for session in sessions if (way := self._ways.get(session)) is not None]
        for session, way in told_to:
            self._unsent(session, way)
        self.sent += 1
        self._changed.update((piece.bucket, self.sent) for piece in pieces)
        frames = self._frames(version, pieces)
        nbytes = sum(len(piece.data) for piece in pieces)
        told = {piece.bucket for piece in pieces}
        for session, way in told_to:
            waits = bool(way.queued) and (
                sum(way.queued.values()) + nbytes > self._most_bytes or len(way.queued) >= _MOST_QUEUED
            )
            if not way.behind and not waits and session.unsent - told <= way.newest.keys():
                way.seen = self.sent
                self._post(session, way, version, frames, pieces, nbytes)
            else:
                self._unsent(session, way)
                self.catch_up(session)

    def send_lacking(self, sessions: Iterable[Session], pieces: Sequence[Piece]) -> None:
        """Queue what those that are ``due`` lack of the newest version: ``pieces`` has it all, whole."""
        version = self._version
        frames: dict[tuple[int, ...], tuple[list[_Frame], list[Piece]]] = {}
        for session in sessions:
            way = self._ways[session]
            lacking = tuple(sorted(self._unsent(session, way)))
            if lacking not in frames:
                some = [piece for piece in pieces if piece.bucket in session.unsent]
                frames[lacking] = self._frames(version, some), some
            way.behind = False
            self._due.pop(session, None)
            self._post(session, way, version, *frames[lacking], 0)

    def _frames(self, version: int, pieces: Sequence[Piece]) -> list[_Frame]:
        if not pieces:
            return [(-1, encode(Params(version, 0, 0, 1.0)))]
        frames = []
        for bucket, spec, data, delta in pieces:
            frames.append((bucket, encode(Params(version, bucket, len(pieces), 1.0, delta), [(spec, data)])))
        return frames

    def _divided(self, island: Island, version: int, pieces: Sequence[Piece]) -> list[tuple[Session, _Frame]]:
        """A version as it goes to an island's ranks. Values go to those that hold them. What a codec wrote was encoded
        once for all workers, and cannot be cut: it goes whole to one rank, each bucket to another, which passes it on.
        """
        of_ranks: list[list[tuple[Piece, list[tuple[BufferSpec, Buffer]]]]] = [[] for _ in range(island.ranks)]
        turn = version  # not by the bucket's number: a fragment's buckets lie so many apart
        for piece in pieces:
            if piece.spec.codec != "raw":
                of_ranks[turn % island.ranks].append((piece, [(piece.spec, piece.data)]))
                turn += 1
                continue
            bucket, data = self.layout.buckets[piece.bucket], memoryview(piece.data)
            size = len(data) // bucket.numel
            for session, own in zip(island.sessions, of_ranks, strict=True):
                assert session.shard is not None
                if runs := session.shard.pieces(bucket):
                    buffers: list[tuple[BufferSpec, Buffer]] = []
                    for _, begin, end in runs:
                        part = data[(begin - bucket.offset) * size : (end - bucket.offset) * size]
                        buffers.append((BufferSpec("", piece.spec.dtype, (end - begin,), "raw", len(part)), part))
                    own.append((piece, buffers))
        frames: list[tuple[Session, _Frame]] = []
        for session, own in zip(island.sessions, of_ranks, strict=True):
            if not own:
                frames.append((session, (-1, encode(Params(version, 0, 0, 1.0)))))
            for piece, buffers in own:
                params = Params(version, piece.bucket, len(own), 1.0, piece.delta)
                frames.append((session, (piece.bucket, encode(params, buffers))))
        return frames

    def _post(
        self, session: Session, way: _Way, version: int, frames: Sequence[_Frame], pieces: Sequence[Piece], nbytes: int
    ) -> None:
        session.current_version = version
        way.queued[version] = nbytes
        posts = (
            [(session, frame) for frame in frames]
            if session.island is None
            else self._divided(session.island, version, pieces)
        )
        open_frames, open_of = len(posts), Counter(bucket for _, (bucket, _) in posts)
        for bucket in open_of:
            if bucket >= 0:
                session.unsent.add(bucket)
                way.newest[bucket] = version

        def sent(bucket: int) -> None:
            nonlocal open_frames
            open_frames -= 1
            open_of[bucket] -= 1
            if not open_of[bucket] and way.newest.get(bucket) == version:
                del way.newest[bucket]
                session.unsent.discard(bucket)
            if not open_frames:
                del way.queued[version]
                way.left = version
                if way.behind and not way.queued and self._ways.get(session) is way:
                    self._due[session] = way
                    self._wake()

        for link, (bucket, chunks) in posts:
            link.outbox.post(chunks, sent=partial(sent, bucket), version=version)


class CatchUp:
    """Sends those that are ``due`` what they lack, copied in the parameters' thread between two commits.

    Whoever makes commits itself calls ``send`` between two of them. ``begin`` does it whatever else goes on: one copy
    at a time, and one more where a commit came between.
    """

    def __init__(self, publisher: DeltaPublisher, parameters: ParameterOwner, lifecycle: Lifecycle) -> None:
        """``lifecycle``: of the training, which ends where a copy cannot be made or sent."""
        self._publisher, self._parameters, self._lifecycle = publisher, parameters, lifecycle
        self._copying = False

    async def send(self, due: Sequence[Session]) -> tuple[list[Session], list[Session]]:
        """Who was sent something, and which of them had nothing before."""
        _, pieces = await self._copy(due)
        return self._queue(due, pieces)

    def begin(self) -> None:
        """Somebody is due."""
        if not self._copying and not self._parameters.closed and (due := self._publisher.due):
            self._copying = True
            self._copy(due).add_done_callback(self._lifecycle.guarded(partial(self._copied, due)))

    def _copy(self, due: Sequence[Session]) -> asyncio.Future[tuple[int, list[Piece]]]:
        return self._parameters.submit(partial(self._publisher.copy, self._publisher.lacks(due)))

    def _copied(self, due: Sequence[Session], copying: asyncio.Future[tuple[int, list[Piece]]]) -> None:
        self._copying = False
        if self._parameters.closed or copying.cancelled():
            return
        number, pieces = copying.result()
        if number == self._publisher.sent:  # else a commit came between
            self._queue(due, pieces)
        self.begin()

    def _queue(self, due: Sequence[Session], pieces: Sequence[Piece]) -> tuple[list[Session], list[Session]]:
        here = [session for session in due if self._publisher.knows(session)]  # others have ended meanwhile
        new = [session for session in here if session.current_version < 0]
        self._publisher.send_lacking(here, pieces)
        return here, new
