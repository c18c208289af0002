"""The parameters on their way out, encoded once a version and sent to all who need it.

``published`` is what workers hold. With an exact downlink it is the parameters themselves, as they were at the commit;
with a lossy one each version sends c = C(theta - published) and published += D(c), so what one delta leaves out is in
the next, and every worker holds the same bits. Who has come anew, or cannot follow, is sent ``published`` whole.

``advance`` and ``whole`` run in the aggregator's thread, the rest on the loop's. Frames are copies: a later commit does
not touch what is still being sent. Memory: ``published`` (with a lossy codec), the newest whole copy while somebody is
being sent it, and the deltas that the slowest worker has not been sent, at most ``_MOST_QUEUED`` versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from w5xde_async.codecs.codec import BytePool, Codec
from w5xde_async.coordinator.session import Session
from w5xde_async.params.flat import FlatState, bytes_of
from w5xde_async.params.layout import Layout
from w5xde_async.updates.forms import form_of, is_coded
from w5xde_async.wire.frame import Buffer, BufferSpec, encode
from w5xde_async.wire.messages import Params

__all__ = ["Downlink", "Piece"]

_MOST_QUEUED = 4  # versions that may wait for one worker as deltas; then it is sent the whole


class Piece(NamedTuple):
    """One bucket, encoded: its bytes belong to whoever sends them."""

    bucket: int
    spec: BufferSpec
    data: Buffer
    delta: bool


class Downlink:
    """One run's published parameters."""

    def __init__(self, layout: Layout, state: FlatState, codec: Codec) -> None:
        self.layout, self.codec, self._state = layout, codec, state
        self.deltas = codec.name != "raw"
        self._published = state
        if self.deltas:
            self._published = FlatState(layout)
            for mine, theirs in zip(self._published.groups, state.groups, strict=True):
                mine.copy_(theirs)
        self._pool = BytePool()
        self._encoders = {
            b.index: codec.encoder(form_of(layout, b)) for b in layout.result_buckets if is_coded(layout, b)
        }
        self._queued: dict[Session, set[int]] = {}  # versions that wait to be sent, oldest first
        self._made = 0  # versions that ``advance`` has made
        self.sent = 0  #: versions that ``send`` has sent
        self.raw_bytes = self.encoded_bytes = 0  #: of the deltas, before and after

    # -- in the aggregator's thread ------------------------------------------------------------------------

    @torch.no_grad()
    def advance(self, changed: Iterable[int]) -> list[Piece]:
        """What tells the new version from the one before."""
        self._made += 1
        if not self.deltas:
            return self.whole(changed)
        pieces = []
        for number in changed:
            bucket = self.layout.buckets[number]
            encoder = self._encoders.get(number)
            mine, theirs = self._published.bucket(bucket), self._state.bucket(bucket)
            if encoder is None:
                mine.copy_(theirs)
                pieces.append(self._raw(number))
                continue
            if self.codec.exact:  # a + (b - a) is not b: what is to keep its bits travels as it is
                mine.copy_(theirs)
                encoded = encoder.encode(theirs, self._pool)
            else:
                encoded = encoder.encode(theirs - mine, self._pool)
                encoded.codec.add_to(encoded.data, encoder.form, mine)
            data = bytes(encoded.view)
            self._pool.give(encoded.data)
            self.raw_bytes += 4 * bucket.numel
            self.encoded_bytes += len(data)
            spec = BufferSpec("", "uint8", (len(data),), encoded.codec.name, len(data))
            if encoded.codec.name == "raw":  # where lz4 did not pay
                spec = BufferSpec("", "float32", (bucket.numel,), "raw", len(data))
            pieces.append(Piece(number, spec, data, not self.codec.exact))
        return pieces

    def whole(self, buckets: Iterable[int] | None = None) -> list[Piece]:
        """``buckets`` (all of them) as they are published."""
        numbers = range(len(self.layout.buckets)) if buckets is None else buckets
        return [self._raw(number) for number in numbers]

    def copy(self) -> tuple[int, list[Piece]]:
        """``whole``, and after how many versions of ``advance``: equal to ``sent`` where none is on its way."""
        return self._made, self.whole()

    def _raw(self, number: int) -> Piece:
        bucket = self.layout.buckets[number]
        dtype = str(self.layout.groups[bucket.group].dtype).removeprefix("torch.")
        data = bytes(bytes_of(self._published.bucket(bucket)))
        return Piece(number, BufferSpec("", dtype, (bucket.numel,), "raw", len(data)), data, False)

    def change(self, codec: Codec) -> None:
        """Write the next versions by another codec."""
        self.codec = codec
        self._encoders = {number: codec.encoder(encoder.form) for number, encoder in self._encoders.items()}

    # -- on the loop's thread ------------------------------------------------------------------------------

    def send(self, sessions: Iterable[Session], version: int, pieces: Sequence[Piece]) -> list[Session]:
        """Queue a version that ``advance`` made. Returns those who cannot follow and are to be sent the whole."""
        self.sent += 1
        frames = self._frames(version, pieces)
        behind = []
        for session in sessions:
            queued = self._queued.setdefault(session, set())
            if self.deltas and len(queued) >= _MOST_QUEUED:
                behind.append(session)
                continue
            missing = set() if self.deltas else session.unsent - {piece.bucket for piece in pieces}
            if missing:
                behind.append(session)
                continue
            if not self.deltas:
                session.outbox.supersede(version)
                queued.clear()
            self._post(session, version, frames)
        return behind

    def send_whole(self, sessions: Iterable[Session], version: int, pieces: Sequence[Piece]) -> None:
        """Queue a version whole, for those that have nothing they could go on from."""
        frames = self._frames(version, pieces)
        for session in sessions:
            session.outbox.supersede(version)
            self._queued[session] = set()
            self._post(session, version, frames)

    def skip(self, sessions: Iterable[Session], pieces: Sequence[Piece]) -> None:
        """These workers are not sent a version: they lack its buckets from now on."""
        for session in sessions:
            session.unsent.update(piece.bucket for piece in pieces)

    def lacks(self, session: Session) -> frozenset[int]:
        """Buckets whose newest value a worker has not been sent."""
        return frozenset(session.unsent)

    def forget(self, session: Session) -> None:
        """The session has ended."""
        self._queued.pop(session, None)

    def _frames(self, version: int, pieces: Sequence[Piece]) -> list[tuple[int, list[Buffer]]]:
        if not pieces:
            return [(-1, encode(Params(version, 0, 0, 1.0)))]
        frames = []
        for bucket, spec, data, delta in pieces:
            frames.append((bucket, encode(Params(version, bucket, len(pieces), 1.0, delta), [(spec, data)])))
        return frames

    def _post(self, session: Session, version: int, frames: Sequence[tuple[int, list[Buffer]]]) -> None:
        session.current_version = version
        queued = self._queued[session]
        queued.add(version)
        last = len(frames) - 1
        for position, (bucket, chunks) in enumerate(frames):
            if bucket >= 0:
                session.unsent.add(bucket)

            def sent(bucket: int = bucket, ends: bool = position == last) -> None:
                if session.current_version == version:
                    session.unsent.discard(bucket)
                if ends:
                    queued.discard(version)

            session.outbox.post(chunks, sent=sent, version=version)
