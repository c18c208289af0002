"""What is published, where versions come encoded, as deltas, or while an older one is computed with.

Updates are kept as they arrived (on the event loop) and applied by the compute thread, which owns what they change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from w5xde_async.codecs.codec import Codec
from w5xde_async.errors import FrameTooLarge, MalformedFrame
from w5xde_async.openmp import side_by_side
from w5xde_async.params.flat import FlatState, bytes_of
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import Shard
from w5xde_async.updates.coded import coded_down
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Params
from w5xde_async.worker.executors.executor import BucketUpdate, Version, bucket_of, check_pieces, check_raw

WORDS = 4  #: that describe an encoded update to the other ranks of an island
_MOST_UPDATES = 2  # of a bucket in one version: its values and a delta to them


class DeltaReceiver:
    """Keeps buckets and deltas until their version is whole.

    With ``shard`` (of ``layout``) values are those of an island's rank, in its pieces; what a codec wrote is a whole
    bucket in any case, which the rank passes on to the others.
    """

    def __init__(self, layout: Layout, codec: Codec, shard: Shard | None = None) -> None:
        self._layout, self._shard = layout, shard
        self._codecs = {known.name: known for known in codec.alternatives}
        self._sizes = coded_down(layout)
        self._placed: BucketUpdate | None = None
        self._kept: dict[int, list[BucketUpdate]] = {}  # bucket -> what is to be done to it, in order

    def place(self, message: Params, specs: Sequence[BufferSpec]) -> list[memoryview]:
        """Raises MalformedFrame where bucket, codec or size are not those of this run."""
        if self._shard is not None and not message.delta and all(spec.codec == "raw" for spec in specs):
            return self._place_pieces(self._shard, message, specs)
        bucket, spec = bucket_of(self._layout, message, specs), specs[0]
        if message.delta or spec.codec != "raw":
            codec, size = self._codecs.get(spec.codec), self._sizes.get(message.bucket)
            if codec is None or size is None or spec.dtype != "uint8" or spec.shape != (spec.nbytes,):
                raise MalformedFrame(f"PARAMS bucket {message.bucket} is in codec {spec.codec[:64]}")
            codec.check_nbytes(size, spec.nbytes)
            data = torch.empty(spec.nbytes, dtype=torch.uint8)
            self._placed = BucketUpdate(message.bucket, codec, data, message.delta)
        else:
            check_raw(self._layout, bucket, spec)
            data = torch.empty(bucket.numel, dtype=self._layout.groups[bucket.group].dtype)
            self._placed = BucketUpdate(message.bucket, None, data, False)
        return [bytes_of(self._placed.data)]

    def _place_pieces(self, shard: Shard, message: Params, specs: Sequence[BufferSpec]) -> list[memoryview]:
        bucket = check_pieces(shard, message, specs)
        data = torch.empty(shard.numel(bucket), dtype=self._layout.groups[bucket.group].dtype)
        self._placed = BucketUpdate(message.bucket, None, data, False)
        return [bytes_of(piece) for piece in torch.split(data, [spec.shape[0] for spec in specs])]

    def arrived(self) -> None:
        """Raises FrameTooLarge where too many deltas of an unfinished version wait."""
        placed, self._placed = self._placed, None
        if placed is None:  # a version in which nothing changed
            return
        # A bucket that comes whole takes the place of what an overtaken version brought of it: nothing piles up.
        kept = self._kept.setdefault(placed.bucket, [])
        if not placed.delta:
            kept.clear()
        kept.append(placed)
        if len(kept) > _MOST_UPDATES:
            raise FrameTooLarge("deltas of a version that is not whole", len(kept), _MOST_UPDATES)

    def take(self) -> tuple[BucketUpdate, ...]:
        updates = tuple(update for bucket in self._kept.values() for update in bucket)
        self._kept = {}
        return updates

    # -- among the ranks of an island, of what a codec wrote

    @property
    def coded(self) -> bool:
        """Whether anything may come encoded."""
        return list(self._codecs) != ["raw"]

    def described(self, update: BucketUpdate) -> tuple[int, ...]:
        """WORDS numbers of an encoded update."""
        assert update.codec is not None
        return update.bucket, list(self._codecs).index(update.codec.name), int(update.delta), update.data.numel()

    def awaited(self, described: Sequence[int]) -> BucketUpdate:
        """An update of which another rank has the bytes, with memory for them."""
        bucket, number, delta, nbytes = described
        codec = list(self._codecs.values())[number]
        codec.check_nbytes(self._sizes[bucket], nbytes)
        return BucketUpdate(bucket, codec, torch.empty(nbytes, dtype=torch.uint8), bool(delta))

    def own(self, update: BucketUpdate) -> BucketUpdate | None:
        """What of an encoded update is this rank's, decoded. Raises MalformedFrame."""
        assert self._shard is not None
        assert update.codec is not None
        bucket = self._layout.buckets[update.bucket]
        runs = self._shard.pieces(bucket)
        if not runs:
            return None
        values = torch.empty(bucket.numel)
        update.codec.decode(update.data, values)
        parts = [values[run.begin - bucket.offset : run.end - bucket.offset] for run in runs]
        return BucketUpdate(update.bucket, None, torch.cat(parts), update.delta)


class Published:
    """What the coordinator has published, as far as it has come. Belongs to the compute thread."""

    def __init__(self, layout: Layout) -> None:
        """``layout``: of an island's rank, what its shard holds (``Shard.own``)."""
        self.layout = layout
        self.state = FlatState(layout)
        self.version = -1
        self.loss_scale = 1.0
        self.touched: set[int] = set()
        """Buckets that changed since somebody cleared this."""
        self.newest: dict[int, int] = {}
        """Bucket -> the version that changed it last."""

    @torch.no_grad()
    def apply(self, version: Version) -> None:
        """Take up a version. Raises MalformedFrame for updates that do not decode."""
        of_bucket: dict[int, list[BucketUpdate]] = {}
        for update in version.updates:
            of_bucket.setdefault(update.bucket, []).append(update)
        updates = list(of_bucket.values())
        side_by_side(self._change, updates, sum(4 * self.layout.buckets[bucket].numel for bucket in of_bucket))
        self.touched.update(version.buckets)
        self.newest.update(dict.fromkeys(version.buckets, version.number))
        self.version, self.loss_scale = version.number, version.loss_scale

    @torch.no_grad()
    def _change(self, updates: Sequence[BucketUpdate]) -> None:
        """What came of one bucket, in order. In any thread."""
        for bucket, codec, data, delta in updates:
            target = self.state.bucket(self.layout.buckets[bucket])
            if codec is None and delta:
                target.add_(data)
            elif codec is None:
                target.copy_(data)
            elif delta:
                codec.add_to(data, target)
            else:
                codec.decode(data, target)
