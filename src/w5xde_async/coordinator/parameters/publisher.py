"""The parameters on their way out: each version encoded once, each worker sent what it lacks.

A worker lacks a bucket when the bucket has changed since the last time that it was sent to it whole. Buckets that a
commit leaves alone (frozen parameters, constant buffers) therefore travel once, at joining.

``LivePublisher`` sends the parameters themselves, whole. ``delta_publisher`` sends copies, of what has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from w5xde_async.hub.members.session import Session
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Bucket, Layout
from w5xde_async.params.shard import Shard
from w5xde_async.updates.sync import SyncRule
from w5xde_async.wire.frame import Buffer, BufferSpec, encode
from w5xde_async.wire.messages import Params


class Piece(NamedTuple):
    """One bucket of a version, as it is sent."""

    bucket: int
    spec: BufferSpec
    data: Buffer
    delta: bool


class Publisher(Protocol):
    """How workers are told of each version. Everything but ``advance`` runs on the event loop's thread."""

    raw_bytes: int
    """Of the versions that a codec wrote, before it, each once however many workers took it."""
    encoded_bytes: int
    """Of the same, after it."""

    def advance(self, changed: Iterable[int]) -> list[Piece]:
        """What tells the new version from the one before. In the parameters' thread, right after the update."""

    def join(self, session: Session, *, held: bool = False, idle: bool = False) -> None:
        """A worker has come. It lacks everything, or nothing where it has ``held`` on to this version.

        ``idle``: it has no work, and may be sent nothing until ``bring`` is called.
        """

    def bring(self, session: Session) -> None:
        """A worker has work of the newest version, which it may not have been sent."""

    def forget(self, session: Session) -> None:
        """The session has ended."""

    def send(
        self, sessions: Iterable[Session], version: int, pieces: Sequence[Piece], *, idle: Collection[Session] = ()
    ) -> None:
        """Queue a version that ``advance`` made. Who cannot follow is sent later what it lacks.

        Those that are ``idle`` have no work, and may be sent nothing until ``bring`` is called.
        """


class LivePublisher:
    """Sends buckets of ``state`` at one version after the other: no copies, so an update may overwrite what leaves."""

    raw_bytes = encoded_bytes = 0  # no codec writes anything

    def __init__(self, layout: Layout, state: FlatState, rule: SyncRule, version: int) -> None:
        """``rule``: its loss scale travels with each version. ``version``: that of ``state`` now."""
        self._layout, self._state, self._rule = layout, state, rule
        self._version, self._loss_scale = version, rule.loss_scale
        self._encoded: dict[tuple[int, int], list[Buffer]] = {}  # (bucket, buckets in all) -> frame, of this version

    def advance(self, changed: Iterable[int]) -> list[Piece]:
        return [self._piece(number) for number in changed]

    def join(self, session: Session, *, held: bool = False, idle: bool = False) -> None:
        if not held:
            for link in session.links:
                link.unsent.update(range(len(self._layout.buckets)) if link.shard is None else link.shard.buckets)
        if not idle:
            self._queue(session)

    def bring(self, session: Session) -> None:
        if session.current_version != self._version:
            self._queue(session)

    def forget(self, session: Session) -> None:
        """Nothing is kept of it."""

    def send(
        self, sessions: Iterable[Session], version: int, pieces: Sequence[Piece], *, idle: Collection[Session] = ()
    ) -> None:
        self._version, self._loss_scale = version, self._rule.loss_scale
        self._encoded.clear()
        changed = [piece.bucket for piece in pieces]
        for session in sessions:
            for link in session.links:
                link.unsent.update(changed if link.shard is None else link.shard.buckets.intersection(changed))
            if session in idle:
                for link in session.links:
                    link.outbox.supersede(version)
                session.current_version = -1
            else:
                self._queue(session)

    def _queue(self, session: Session) -> None:
        """Every bucket that the worker lacks, at the current version."""
        for link in session.links:
            self._queue_on(link)

    def _queue_on(self, session: Session) -> None:
        version = self._version
        session.outbox.supersede(version)
        session.current_version = version
        unsent = sorted(session.unsent)
        if not unsent:
            session.post(Params(version, 0, 0, self._loss_scale))
        elif session.shared is not None:
            shared = Params(version, 0, 0, self._loss_scale, shared=tuple(unsent))
            session.outbox.post(encode(shared), sent=partial(self._seen, session, unsent, version), version=version)
            return
        for bucket in unsent:

            def sent(bucket: int = bucket) -> None:
                # Bytes that left while the version changed may be torn: they stay unsent.
                if session.current_version == version:
                    session.unsent.discard(bucket)

            frame = self._frame(bucket, len(unsent), session.shard)
            session.outbox.post(frame, sent=sent, version=version)
        session.outbox.flush()

    @staticmethod
    def _seen(session: Session, buckets: Sequence[int], version: int) -> None:
        if session.current_version == version:
            session.unsent.difference_update(buckets)

    def _frame(self, number: int, num_buckets: int, shard: Shard | None) -> list[Buffer]:
        if shard is not None:
            params = Params(self._version, number, num_buckets, self._loss_scale)
            return encode(params, self._pieces(self._layout.buckets[number], shard))
        chunks = self._encoded.get((number, num_buckets))
        if chunks is None:
            _, spec, data, _ = self._piece(number)
            chunks = encode(Params(self._version, number, num_buckets, self._loss_scale), [(spec, data)])
            self._encoded[number, num_buckets] = chunks
        return chunks

    def _pieces(self, bucket: Bucket, shard: Shard) -> list[tuple[BufferSpec, Buffer]]:
        dtype = self._layout.groups[bucket.group].dtype
        memory, size, name = self._state.bucket_bytes[bucket.index], dtype.itemsize, str(dtype).removeprefix("torch.")
        return [
            (
                BufferSpec("", name, (run.end - run.begin,), "raw", (run.end - run.begin) * size),
                memory[(run.begin - bucket.offset) * size : (run.end - bucket.offset) * size],
            )
            for run in shard.pieces(bucket)
        ]

    def _piece(self, number: int) -> Piece:
        bucket = self._layout.buckets[number]
        dtype = str(self._layout.groups[bucket.group].dtype).removeprefix("torch.")
        spec = BufferSpec("", dtype, (bucket.numel,), "raw", self._layout.state_nbytes(bucket))
        return Piece(number, spec, self._state.bucket_bytes[number], False)
