"""Results that a codec wrote, on their way in: received into pooled bytes, then decoded.

Under ``sync`` they are decoded as they come, on the event loop or, where that takes long, in a thread; under the other
rules in the aggregator's.

Nothing is allocated before the result's lease, bucket, codec and size have been found right. Memory: at most what the
open leases' buckets come to, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from w5xde_async.codecs.codec import BytePool, Codec, as_view
from w5xde_async.errors import RemoteError
from w5xde_async.hub.members.island import Island
from w5xde_async.hub.members.session import Session
from w5xde_async.hub.work.block_store import Destination
from w5xde_async.openmp import alone, side_by_side
from w5xde_async.params.flat import ResultVector, bytes_of
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import Run
from w5xde_async.updates.coded import coded_up
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Result


class Part(NamedTuple):
    """One bucket as it came, or what an island's rank has of it. ``codec`` None: as it lies in memory.

    ``runs``: where a rank's values belong, in the layout; None: they are the whole bucket.
    """

    codec: Codec | None
    data: Tensor
    rank: int = 0
    runs: tuple[Run, ...] | None = None


Parts = Mapping[int, Sequence[Part]]
"""By bucket."""


class ReceiveBuffers:
    """The bytes of the leases under way. ``codec``: the one that workers were told to use."""

    def __init__(self, layout: Layout, codec: Codec) -> None:
        self.layout, self.codec = layout, codec
        self.pool = BytePool()
        self._codecs = {known.name: known for known in codec.alternatives if known.name != "raw"}
        self._sizes = coded_up(layout)
        self._parts: dict[int, dict[int, list[Part]]] = {}
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

    def check_pieces(
        self, session: Session, result: Result, specs: Sequence[BufferSpec]
    ) -> tuple[tuple[Run, ...], Codec | None]:
        """The pieces of a rank's shard in the bucket that its result is of, and the codec of what came: None for one
        buffer for each piece, else one buffer of all of them, one behind the other.

        Raises RemoteError, FrameTooLarge, MalformedFrame for wrong ones.
        """
        buckets = self.layout.result_buckets
        if result.bucket >= len(buckets) or session.shard is None:
            raise RemoteError(f"it sent bucket {result.bucket} of {len(buckets)}")
        bucket = buckets[result.bucket]
        pieces = session.shard.pieces(bucket)
        codec = self._codecs.get(specs[0].codec) if len(specs) == 1 and result.bucket in self._sizes else None
        if codec is not None and pieces and specs[0].dtype == "uint8" and specs[0].shape == (specs[0].nbytes,):
            codec.check_nbytes(session.shard.numel(bucket), specs[0].nbytes)
            return pieces, codec
        dtype = str(self.layout.groups[bucket.group].result_dtype).removeprefix("torch.")
        if not pieces or [(spec.dtype, spec.shape, spec.codec) for spec in specs] != [
            (dtype, (run.end - run.begin,), "raw") for run in pieces
        ]:
            raise RemoteError(f"what it sent of bucket {result.bucket} is not what its shard has of it")
        return pieces, None

    def place(self, session: Session, result: Result, spec: BufferSpec) -> Destination:
        """Where an authorized result goes. Raises as ``check`` does."""
        codec = self.check(result, spec)
        if result.bucket in self._parts.get(result.lease, ()):
            return Destination(None, True)
        part = Part(codec, self.pool.take(spec.nbytes))
        self._receiving[session] = (result.lease, result.bucket, part)
        return Destination(as_view(part.data), True)

    def place_pieces(
        self, session: Session, result: Result, specs: Sequence[BufferSpec]
    ) -> tuple[list[memoryview] | None, bool]:
        """The same for what a rank has of a bucket. Raises as ``check_pieces`` does."""
        runs, codec = self.check_pieces(session, result, specs)
        if any(part.rank == session.rank for part in self._parts.get(result.lease, {}).get(result.bucket, ())):
            return None, True
        part = Part(codec, self.pool.take(sum(spec.nbytes for spec in specs)), session.rank, runs)
        self._receiving[session] = (result.lease, result.bucket, part)
        return [as_view(piece) for piece in torch.split(part.data, [spec.nbytes for spec in specs])], True

    def receives(self, session: Session) -> bool:
        """Whether something is being received for this session."""
        return session in self._receiving

    def arrived(self, session: Session) -> None:
        """What was placed for this session is complete."""
        lease, bucket, part = self._receiving.pop(session)
        self._parts.setdefault(lease, {}).setdefault(bucket, []).append(part)

    def read(self, session: Session, vector: ResultVector) -> Callable[[], None]:
        """What was placed for this session is complete, and ``left`` by it: what decodes it into ``vector``, in any
        thread; that raises MalformedFrame."""
        _, bucket, part = self._receiving.pop(session)

        def decode() -> None:
            try:
                with alone():  # in many small operations, which others would only be waited for in
                    self._decode(part, bucket, vector)
            finally:
                self.pool.give(part.data)

        return decode

    def left(self, session: Session) -> None:
        """The session has ended: nothing writes for it any more."""
        receiving = self._receiving.pop(session, None)
        if receiving is not None:
            self.pool.give(receiving[2].data)

    def has(self, lease: int, island: Island | None = None) -> frozenset[int]:
        """Buckets of a lease that have come; of an island, from all ranks that have anything of them."""
        parts = self._parts.get(lease, {})
        if island is None:
            return frozenset(parts)
        return frozenset(
            bucket for bucket, some in parts.items() if {part.rank for part in some} == island.holders(bucket)
        )

    def take(self, lease: int) -> dict[int, list[Part]]:
        """All that came for a lease; ``release`` it afterwards."""
        return self._parts.pop(lease, {})

    def drop(self, lease: int) -> None:
        """The lease is void."""
        self.release(self._parts.pop(lease, {}))

    def release(self, parts: Parts) -> None:
        """The bytes are not needed any more. Any thread."""
        for some in parts.values():
            for part in some:
                self.pool.give(part.data)

    def decode(self, parts: Parts, vector: ResultVector) -> list[bool]:
        """Read parts into ``vector``; per result bucket whether it is there. In the aggregator's thread.

        Raises MalformedFrame. Buckets that are not there are zero (the neutral element for maxima).
        """
        vector.reset()
        present = [False] * len(self.layout.result_buckets)

        def read(number: int) -> None:
            for part in parts[number]:
                self._decode(part, number, vector)
            present[number] = True

        numbers = list(parts)
        side_by_side(read, numbers, sum(vector.buckets[number].nbytes for number in numbers))
        return present

    def _decode(self, part: Part, bucket: int, vector: ResultVector) -> None:
        """Read a part into its place in ``vector``. Raises MalformedFrame."""
        target = vector.buckets[bucket]
        if part.runs is None:
            if part.codec is None:
                bytes_of(target)[:] = as_view(part.data)
            else:
                part.codec.decode(part.data, target)
            return
        numel = sum(run.end - run.begin for run in part.runs)
        if part.codec is None:
            values = torch.frombuffer(as_view(part.data), dtype=target.dtype)
            _scatter(values, part.runs, vector)
            return
        values = self.pool.take_floats(numel)
        try:
            part.codec.decode(part.data, values)
            _scatter(values, part.runs, vector)
        finally:
            self.pool.give(values)


def _scatter(values: Tensor, runs: Sequence[Run], vector: ResultVector) -> None:
    """Values that lie one behind the other, each to its place."""
    for (group, begin, end), piece in zip(
        runs, torch.split(values, [run.end - run.begin for run in runs]), strict=True
    ):
        vector.group(group)[begin:end].copy_(piece)
