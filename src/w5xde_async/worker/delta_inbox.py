"""A worker's inbox where versions come in pieces: encoded, as deltas, or while older ones are computed with.

Pieces are kept as they came and applied by the compute thread, which owns what they are added to. Leases and requests
to submit are taken strictly in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from w5xde_async.codecs.codec import Codec
from w5xde_async.errors import FrameTooLarge, MalformedFrame
from w5xde_async.params.flat import FlatState, bytes_of
from w5xde_async.params.layout import Layout
from w5xde_async.updates.forms import form_of, is_coded_down
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Lease, Params, Submit
from w5xde_async.worker.inbox import HeldLease, Inbox, Version

__all__ = ["Piece", "PieceInbox", "PieceVersion", "Published"]


class Piece(NamedTuple):
    """One bucket. ``codec`` None: as it lies in memory; ``delta``: to be added, else it is the bucket whole."""

    bucket: int
    codec: Codec | None
    data: Tensor
    delta: bool


@dataclass(frozen=True, slots=True)
class PieceVersion(Version):
    """A whole version and what makes it of the one before."""

    pieces: tuple[Piece, ...] = ()


class PieceInbox(Inbox):
    """``exact``: a lease is computed at its very version; otherwise at that or any newer one."""

    def __init__(
        self, layout: Layout, codec: Codec, incoming: FlatState, memory_limit_bytes: int, *, exact: bool
    ) -> None:
        super().__init__(layout, incoming, memory_limit_bytes)
        self._codecs = {known.name: known for known in codec.alternatives}
        self._forms = {b.index: form_of(layout, b) for b in layout.result_buckets if is_coded_down(layout, b)}
        self._exact = exact
        self._placed: Piece | None = None
        self._kept: dict[int, list[Piece]] = {}  # bucket -> what is to be done to it, in order
        self._items: list[HeldLease | Submit] = []

    def allow(self, codec: Codec) -> None:
        """Versions may come in this codec too."""
        self._codecs |= {known.name: known for known in codec.alternatives}

    def place_params(self, message: Params, specs: Sequence[BufferSpec]) -> list[memoryview]:
        buckets = self._layout.buckets
        if message.bucket >= len(buckets) or message.num_buckets > len(buckets) or len(specs) != 1:
            raise MalformedFrame(f"PARAMS for bucket {message.bucket} of {len(buckets)}")
        bucket, spec = buckets[message.bucket], specs[0]
        if message.delta or spec.codec != "raw":
            codec, form = self._codecs.get(spec.codec), self._forms.get(message.bucket)
            if codec is None or form is None or spec.dtype != "uint8" or spec.shape != (spec.nbytes,):
                raise MalformedFrame(f"PARAMS bucket {message.bucket} is in codec {spec.codec[:64]}")
            codec.check_nbytes(form, spec.nbytes)
            data = torch.empty(spec.nbytes, dtype=torch.uint8)
            self._placed = Piece(message.bucket, codec, data, message.delta)
        else:
            dtype = self._layout.groups[bucket.group].dtype
            if spec.dtype != str(dtype).removeprefix("torch.") or spec.shape != (bucket.numel,) or spec.codec != "raw":
                raise MalformedFrame(
                    f"PARAMS bucket {message.bucket} is {spec.dtype}{list(spec.shape)}, codec {spec.codec}"
                )
            self._placed = Piece(message.bucket, None, torch.empty(bucket.numel, dtype=dtype), False)
        return [bytes_of(self._placed.data)]

    def params(self, message: Params) -> Version | None:
        placed, self._placed = self._placed, None
        if placed is not None:
            # A bucket that comes whole takes the place of what an overtaken version brought of it: nothing piles up.
            kept = self._kept.setdefault(placed.bucket, [])
            if not placed.delta:
                kept.clear()
            kept.append(placed)
            if len(kept) > 2:  # the bucket and a delta to it, of one version
                raise FrameTooLarge("deltas of a version that is not whole", len(kept), 2)
        whole = super().params(message)
        if whole is None:
            return None
        pieces = tuple(piece for bucket in self._kept.values() for piece in bucket)
        self._kept = {}
        return PieceVersion(whole.number, whole.loss_scale, whole.buckets, pieces)

    @property
    def num_leases(self) -> int:
        return sum(isinstance(item, HeldLease) for item in self._items)

    def lease(self, message: Lease) -> None:
        super().lease(message)
        self._items.append(self._leases.pop(message.lease))

    def submit(self, message: Submit) -> None:
        """Keep a request in its place among the leases. Raises MalformedFrame for buckets that have no result."""
        if any(bucket >= len(self._layout.result_buckets) for bucket in message.buckets):
            raise MalformedFrame(f"SUBMIT for buckets {message.buckets[:8]} of {len(self._layout.result_buckets)}")
        self._items.append(message)

    def revoke(self, lease: int) -> bool:
        kept = [item for item in self._items if isinstance(item, Submit) or item.message.lease != lease]
        revoked, self._items = len(kept) < len(self._items), kept
        if revoked:
            self.end(lease)
        return revoked

    def take_items(self) -> list[HeldLease | Submit]:
        """What can be done now, in order; void leases are forgotten."""
        held = [item for item in self._items if isinstance(item, HeldLease)]
        if self._exact:  # one of the next step does not hold up what is still to be done of this one
            for item in held:
                if item.message.version < self.version:
                    self.end(item.message.lease)
            self._items = [item for item in held if item.message.version > self.version]
            return [item for item in held if item.message.version == self.version]
        first = next((item for item in held if item.message.version > self.version), None)
        count = len(self._items) if first is None else self._items.index(first)
        ready, self._items = self._items[:count], self._items[count:]
        return ready


class Published:
    """What the coordinator has published, as far as it has come. Belongs to the compute thread."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.state = FlatState(layout)
        self.version = -1
        self.loss_scale = 1.0
        self._forms = {b.index: form_of(layout, b) for b in layout.result_buckets if is_coded_down(layout, b)}
        self.touched: set[int] = set()
        """Buckets that changed since somebody cleared this."""
        self.newest: dict[int, int] = {}
        """Bucket -> the version that changed it last."""

    @torch.no_grad()
    def apply(self, version: PieceVersion) -> None:
        """Take up a version. Raises MalformedFrame for pieces that do not decode."""
        for bucket, codec, data, delta in version.pieces:
            target = self.state.bucket(self.layout.buckets[bucket])
            if codec is None:
                target.copy_(data)
            elif delta:
                codec.add_to(data, self._forms[bucket], target)
            else:
                codec.decode(data, self._forms[bucket], target)
            self.touched.add(bucket)
            self.newest[bucket] = version.number
        self.version, self.loss_scale = version.number, version.loss_scale
