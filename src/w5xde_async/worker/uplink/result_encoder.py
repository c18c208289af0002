"""Results on their way out through a codec, with acknowledged error feedback.

Encodes on the compute thread, and settles there what verdicts say (``codecs.feedback`` belongs to one thread). What a
verdict is still awaited for when a link ends may have counted: the next link asks for it (``awaited``). Only for a
worker that leaves for good it counts as leased again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from w5xde_async.codecs.codec import BytePool, Codec, Encoded, brought
from w5xde_async.codecs.feedback import Feedback
from w5xde_async.openmp import alone
from w5xde_async.params.flat import ResultVector, bytes_of
from w5xde_async.params.layout import Bucket, Layout
from w5xde_async.params.shard import Shard
from w5xde_async.updates.coded import coded_up
from w5xde_async.wire.frame import Buffer, BufferSpec
from w5xde_async.wire.messages import VerdictCode

logger = logging.getLogger(__name__)

#: Threads. A codec's operations are small: two that share them take two thirds of the time, sixteen several times it.
_TOGETHER = 4


class BucketResult(NamedTuple):
    """One bucket's result, ready for a RESULT. ``sent`` is to be called when the bytes have left or are dropped.

    ``slot``: of the vector that it lies in, where that is one of the memory that the coordinator reads; else -1.
    """

    bucket: int
    buffers: Sequence[tuple[BufferSpec, Buffer]]
    sent: Callable[[], None] | None = None
    slot: int = -1


def raw_specs(layout: Layout) -> list[BufferSpec]:
    """How each result bucket travels as it lies in memory."""
    return [_raw_spec(layout, bucket, bucket.numel) for bucket in layout.result_buckets]


def piece_specs(shard: Shard) -> list[list[BufferSpec]]:
    """How an island's rank sends what it has of each result bucket, as it lies in memory: in a buffer for each run."""
    layout = shard.layout
    return [
        [_raw_spec(layout, bucket, run.end - run.begin) for run in shard.pieces(bucket)]
        for bucket in layout.result_buckets
    ]


def _raw_spec(layout: Layout, bucket: Bucket, numel: int) -> BufferSpec:
    dtype = layout.groups[bucket.group].result_dtype
    return BufferSpec("", str(dtype).removeprefix("torch."), (numel,), "raw", numel * dtype.itemsize)


class ResultEncoder:
    """One worker's codec and what it has left out so far. Survives its links.

    ``feedback`` is what was left out; None where the codec leaves nothing out, or feedback is off.
    """

    def __init__(
        self, layout: Layout, codec: Codec, *, feedback: bool, shard: Shard | None = None,
        device: str = "cpu", clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """``shard``: of an island's rank, which sends what lies in it, as ``shard.own`` has it. Then ``layout`` is not
        looked at. ``device``: the type of that with which results are computed."""
        self.codec, self.pool = codec, BytePool(pinned=device == "cuda")
        self.shard = "" if shard is None else shard.digest  #: which one
        if shard is None:
            self._sizes, self._raw = coded_up(layout), [[spec] for spec in raw_specs(layout)]
        else:
            self._sizes, self._raw = coded_up(shard.own), piece_specs(shard)
        self._clock, self._keeps = clock, feedback
        self.feedback = self._new_feedback()
        self._keys: set[int] = set()
        self.encode_s = 0.0  #: of the lease under way
        self.raw_bytes = 0

    def _new_feedback(self) -> Feedback | None:
        if not self._keeps or self.codec.exact:
            return None
        return Feedback(self.codec, self._sizes, pool=self.pool)

    def change(self, codec: Codec) -> None:
        """Encode by this codec on the next link; what was left out is added as ever, or dropped where it is exact.

        Only a coordinator that was started anew has another codec. What awaits its verdict may have counted before.
        """
        if codec.name == self.codec.name:
            return
        if codec.exact:
            self.drop()
        self.codec = codec
        if codec.exact or self.feedback is None:
            self.feedback = self._new_feedback()
        else:
            self.feedback.change(codec)

    def begin(self) -> None:
        """A lease's results are about to be encoded."""
        self.encode_s, self.raw_bytes = 0.0, 0

    @property
    def device_buckets(self) -> frozenset[int]:
        """The buckets that are encoded where they are, if that is a CUDA device: what comes from there is less then."""
        return frozenset() if self.codec.exact else frozenset(self._sizes)

    def has(self, bucket: int) -> bool:
        """Whether there is anything of a bucket: an island's rank has not something of each."""
        return bool(self._raw[bucket])

    def encode(self, lease: int, bucket: int, vector: ResultVector, weight: float = 1.0) -> BucketResult:
        """One bucket of ``vector``, encoded; its values are not changed. ``weight``: what its step divides by.

        Those of ``device_buckets`` may lie on a device, and are not looked at after this returns.
        """
        if bucket not in self._sizes or self.codec.name == "raw":
            values = vector.buckets[bucket]
            data = vector.bucket_bytes[bucket] if values.device.type == "cpu" else bytes_of(values.cpu())
            self.raw_bytes += len(data)
            return BucketResult(bucket, _cut(data, self._raw[bucket]))
        values = vector.buckets[bucket]
        began = self._clock()
        try:
            encoded = self._encoded(lease, bucket, values, weight)
        except torch.OutOfMemoryError:  # the job has all that the device has
            encoded = self._encoded(lease, bucket, values.cpu(), weight)
        sent = None if self.feedback is not None else partial(self.pool.give, encoded.data)
        nbytes = encoded.data.numel()
        self.encode_s += self._clock() - began
        self.raw_bytes += 4 * values.numel()
        if encoded.codec.name == "raw":  # where lz4 did not pay
            return BucketResult(bucket, _cut(encoded.view, self._raw[bucket]), sent)
        return BucketResult(
            bucket, ((BufferSpec("", "uint8", (nbytes,), encoded.codec.name, nbytes), encoded.view),), sent
        )  # fmt: skip

    def _encoded(self, lease: int, bucket: int, values: Tensor, weight: float) -> Encoded:
        """In host memory."""
        if torch.get_num_threads() > _TOGETHER:
            with alone():
                return self._written(lease, bucket, values, weight)
        return self._written(lease, bucket, values, weight)

    def _written(self, lease: int, bucket: int, values: Tensor, weight: float) -> Encoded:
        if self.feedback is not None:
            encoded = self.feedback.encode(lease, bucket, values, weight)
            self._keys.add(lease)
            return encoded
        if values.device == self.pool.device:
            return self.codec.encode(values, self.pool)
        return brought(self.codec.encode(values, BytePool(device=values.device)), self.pool)

    def settle(self, leases: Sequence[int], code: int, buckets: Sequence[int] = ()) -> None:
        """A verdict on results that have left. ``buckets``: those that counted, where not all did."""
        if self.feedback is None:
            return
        for lease in leases:
            if lease in self._keys:
                self._keys.discard(lease)
                self.feedback.settle(lease, applied=code == VerdictCode.APPLIED, counted=frozenset(buckets) or None)

    @property
    def awaited(self) -> tuple[int, ...]:
        """Leases without a verdict, ascending."""
        return tuple(sorted(self._keys))

    def cut(self) -> None:
        """No link follows, and what was awaited will not come."""
        self.settle(tuple(self._keys), VerdictCode.STALE)

    def drop(self) -> None:
        """Forget what was left out, and say how much it was."""
        self._keys.clear()
        if self.feedback is None:
            return
        dropped = self.feedback.drop()
        if dropped.num_buckets:
            logger.warning("what the codec left out is dropped norm=%.4g buckets=%d", dropped.norm, dropped.num_buckets)


def _cut(data: memoryview, specs: Sequence[BufferSpec]) -> list[tuple[BufferSpec, Buffer]]:
    """Values as they lie in memory, in their buffers."""
    found: list[tuple[BufferSpec, Buffer]] = []
    at = 0
    for spec in specs:
        found.append((spec, data[at : at + spec.nbytes]))
        at += spec.nbytes
    return found
