"""The parameters on their way out: each version encoded once, each worker sent what it lacks.

A worker lacks a bucket when the bucket has changed since the last time that it was sent to it whole. Buckets that a
commit leaves alone (frozen parameters, constant buffers) therefore travel once, at joining.
"""

from __future__ import annotations

from collections.abc import Iterable

from w5xde_async.hub.members.session import Session
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.wire.frame import Buffer, BufferSpec, encode
from w5xde_async.wire.messages import Params

__all__ = ["Publisher"]


class Publisher:
    """Sends buckets of ``state`` at one version after the other."""

    def __init__(self, layout: Layout, state: FlatState) -> None:
        self._layout, self._state = layout, state
        self._version, self._loss_scale = 0, 1.0
        self._encoded: dict[tuple[int, int], list[Buffer]] = {}  # (bucket, buckets in all) -> frame, of this version

    def begin(self, version: int, loss_scale: float) -> None:
        """From now on this is the version."""
        self._version, self._loss_scale = version, loss_scale
        self._encoded.clear()

    def welcome(self, session: Session) -> None:
        """A worker has come: it lacks everything."""
        self.send(session, (bucket.index for bucket in self._layout.buckets))

    def send(self, session: Session, changed: Iterable[int]) -> None:
        """Queue every bucket that the worker lacks, ``changed`` ones included, at the current version."""
        version = self._version
        session.outbox.supersede(version)
        session.current_version = version
        session.unsent.update(changed)
        unsent = sorted(session.unsent)
        if not unsent:
            session.post(Params(version, 0, 0, self._loss_scale))
        for bucket in unsent:

            def sent(bucket: int = bucket) -> None:
                # Bytes that left while the version changed may be torn: they stay unsent.
                if session.current_version == version:
                    session.unsent.discard(bucket)

            session.outbox.post(self._frame(bucket, len(unsent)), sent=sent, version=version)

    def _frame(self, number: int, num_buckets: int) -> list[Buffer]:
        chunks = self._encoded.get((number, num_buckets))
        if chunks is None:
            bucket = self._layout.buckets[number]
            dtype = str(self._layout.groups[bucket.group].dtype).removeprefix("torch.")
            spec = BufferSpec("", dtype, (bucket.numel,), "raw", self._layout.state_nbytes(bucket))
            message = Params(self._version, number, num_buckets, self._loss_scale)
            chunks = encode(message, [(spec, self._state.bucket_bytes[number])])
            self._encoded[number, num_buckets] = chunks
        return chunks
