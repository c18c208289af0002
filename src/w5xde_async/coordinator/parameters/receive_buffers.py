"""Results that a codec wrote, on their way in: received into pooled bytes, then decoded.

Under ``sync`` they are decoded on the event loop, under the other rules in the aggregator's thread.

Nothing is allocated before the result's lease, bucket, codec and size have been found right. Memory: at most what the
open leases' buckets come to, each once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from w5xde_async.codecs.codec import BytePool, Codec, as_view
from w5xde_async.errors import RemoteError
from w5xde_async.hub.members.session import Session
from w5xde_async.hub.work.block_store import Destination
from w5xde_async.params.flat import ResultVector, bytes_of
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import Run
from w5xde_async.updates.coded import coded_up
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Result


class Part(NamedTuple):
    """One bucket as it came. ``codec`` None: as it lies in memory."""

    codec: Codec | None
    data: Tensor


class ReceiveBuffers:
    """The bytes of the leases under way. ``codec``: the one that workers were told to use."""

    def __init__(self, layout: Layout, codec: Codec) -> None:
        self.layout, self.codec = layout, codec
        self.pool = BytePool()
        self._codecs = {known.name: known for known in codec.alternatives if known.name != "raw"}
        self._sizes = coded_up(layout)
        self._parts: dict[int, dict[int, Part]] = {}
        self._receiving: dict[Session, tuple[int, int, Part]] = {}

    def check(self, result: Result, spec: BufferSpec) -> Codec | None:
        """The codec of a result of the right dtype and size, whatever becomes of it; None for a raw one.

        Raises RemoteError, FrameTooLarge, MalformedFrame for a wrong one.
        """
        buckets = self.layout.result_buckets
        if result.bucket >= len(buckets):
            raise RemoteError(f"it sent bucket {result.bucket} of {len(buckets)}")
        bucket, size = buckets[result.bucket], self._sizes.get(result.bucket)
        codec = None if size is None else self._codecs.get(spec.codec)
        if codec is not None and size is not None:
            if spec.dtype != "uint8" or spec.shape != (spec.nbytes,):
                raise RemoteError(f"bucket {result.bucket} in codec {spec.codec} is {spec.dtype}{list(spec.shape)}")
            codec.check_nbytes(size, spec.nbytes)
        else:
            dtype = str(self.layout.groups[bucket.group].result_dtype).removeprefix("torch.")
            if spec.codec != "raw" or spec.dtype != dtype or spec.shape != (bucket.numel,):
                raise RemoteError(
                    f"bucket {result.bucket} is {spec.dtype}{list(spec.shape)} in codec {spec.codec}, "
                    f"not {dtype}[{bucket.numel}] in {self.codec.name if size is not None else 'raw'}"
                )
        return codec

    def check_pieces(self, session: Session, result: Result, specs: Sequence[BufferSpec]) -> tuple[Run, ...]:
        """The pieces of a rank's shard in the bucket that its result is of, which ``specs`` are.

        Raises RemoteError for wrong ones.
        """
        buckets = self.layout.result_buckets
        if result.bucket >= len(buckets) or session.shard is None:
            raise RemoteError(f"it sent bucket {result.bucket} of {len(buckets)}")
        bucket = buckets[result.bucket]
        pieces = session.shard.pieces(bucket)
        dtype = str(self.layout.groups[bucket.group].result_dtype).removeprefix("torch.")
        if [(spec.dtype, spec.shape, spec.codec) for spec in specs] != [
            (dtype, (run.end - run.begin,), "raw") for run in pieces
        ]:
            raise RemoteError(f"what it sent of bucket {result.bucket} is not what its shard has of it")
        return pieces

    def place(self, session: Session, result: Result, spec: BufferSpec) -> Destination:
        """Where an authorized result goes. Raises as ``check`` does."""
        codec = self.check(result, spec)
        if result.bucket in self._parts.get(result.lease, ()):
            return Destination(None, True)
        part = Part(codec, self.pool.take(spec.nbytes))
        self._receiving[session] = (result.lease, result.bucket, part)
        return Destination(as_view(part.data), True)

    def receives(self, session: Session) -> bool:
        """Whether something is being received for this session."""
        return session in self._receiving

    def arrived(self, session: Session) -> None:
        """What was placed for this session is complete."""
        lease, bucket, part = self._receiving.pop(session)
        self._parts.setdefault(lease, {})[bucket] = part

    def read(self, session: Session, target: Tensor) -> None:
        """What was placed for this session is complete: decode it into ``target`` at once. Raises MalformedFrame."""
        part = self._receiving.pop(session)[2]
        assert part.codec is not None
        try:
            part.codec.decode(part.data, target)
        finally:
            self.pool.give(part.data)

    def left(self, session: Session) -> None:
        """The session has ended: nothing writes for it any more."""
        receiving = self._receiving.pop(session, None)
        if receiving is not None:
            self.pool.give(receiving[2].data)

    def has(self, lease: int) -> frozenset[int]:
        """Buckets of a lease that have come."""
        return frozenset(self._parts.get(lease, ()))

    def take(self, lease: int) -> dict[int, Part]:
        """All that came for a lease; ``release`` it afterwards."""
        return self._parts.pop(lease, {})

    def drop(self, lease: int) -> None:
        """The lease is void."""
        self.release(self._parts.pop(lease, {}))

    def release(self, parts: Mapping[int, Part]) -> None:
        """The bytes are not needed any more. Any thread."""
        for part in parts.values():
            self.pool.give(part.data)

    def decode(self, parts: Mapping[int, Part], vector: ResultVector) -> list[bool]:
        """Read parts into ``vector``; per result bucket whether it is there. In the aggregator's thread.

        Raises MalformedFrame. Buckets that are not there are zero (the neutral element for maxima).
        """
        vector.reset()
        present = [False] * len(self.layout.result_buckets)
        for number, part in parts.items():
            target = vector.buckets[number]
            if part.codec is None:
                bytes_of(target)[:] = as_view(part.data)
            else:
                part.codec.decode(part.data, target)
            present[number] = True
        return present
