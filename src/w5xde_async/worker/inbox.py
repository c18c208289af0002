"""What a worker holds: leases and versions, in the order in which they can be computed.

Pure bookkeeping between the link's reader and the compute thread. A lease can be computed when its version is whole;
one of an older version is void. Buffers are allocated only after header, layout and memory limit agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from w5xde_async.errors import FrameTooLarge, MalformedFrame
from w5xde_async.params.flat import FlatState, bytes_of
from w5xde_async.params.layout import Layout
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Lease, Params

__all__ = ["HeldLease", "Inbox", "OverMemoryLimit", "Version"]

#: Samples of a lease that may be smaller than a byte each: what a lease says is what its computing takes.
_SAMPLES_OF_NOTHING = 1 << 20


class OverMemoryLimit(FrameTooLarge):
    """A lease that this worker's own limit has no room for: the coordinator has done nothing wrong."""


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease with its data in host memory."""

    message: Lease
    tensors: tuple[Tensor, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Version:
    """A version that has become whole; ``buckets`` came since the one before."""

    number: int
    loss_scale: float
    buckets: tuple[int, ...]


class Inbox:
    """Leases and parameters as they come in."""

    def __init__(self, layout: Layout, incoming: FlatState, memory_limit_bytes: int) -> None:
        self._layout, self._incoming, self._limit = layout, incoming, memory_limit_bytes
        self.version = -1  # the newest whole one
        self._receiving = -1
        self._num_received = 0  # buckets of the version being received
        self._fresh: set[int] = set()  # buckets that came since the last whole version
        self._pieces: list[Tensor] = []
        self._leases: dict[int, HeldLease] = {}
        self._sizes: dict[int, int] = {}  # lease -> bytes of its batch, from its coming until it is done or void

    @property
    def held_bytes(self) -> int:
        """Bytes of batches held, those included that wait for the compute thread or are in it."""
        return sum(self._sizes.values())

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def place_params(self, message: Params, specs: Sequence[BufferSpec]) -> list[memoryview]:
        """Where a bucket of parameters goes. Raises MalformedFrame where it is not the layout's."""
        if message.bucket >= len(self._layout.buckets) or len(specs) != 1:
            raise MalformedFrame(f"PARAMS for bucket {message.bucket} of {len(self._layout.buckets)}")
        bucket = self._layout.buckets[message.bucket]
        dtype = str(self._layout.groups[bucket.group].dtype).removeprefix("torch.")
        spec = specs[0]
        if spec.dtype != dtype or spec.shape != (bucket.numel,) or spec.codec != "raw":
            raise MalformedFrame(
                f"PARAMS bucket {message.bucket} is {spec.dtype}{list(spec.shape)}, codec {spec.codec}"
            )
        return [self._incoming.bucket_bytes[message.bucket]]

    def params(self, message: Params) -> Version | None:
        """A bucket has come (or none, where nothing changed). The version, once it is whole."""
        if message.version != self._receiving:
            if message.version < self._receiving:
                raise MalformedFrame(f"PARAMS of version {message.version} after version {self._receiving}")
            self._receiving, self._num_received = message.version, 0
        if message.num_buckets:
            self._num_received += 1
            self._fresh.add(message.bucket)
        if self._num_received < message.num_buckets:
            return None
        # Buckets of a version that was overtaken before it was whole are not sent again: they count now.
        fresh, self._fresh = tuple(sorted(self._fresh)), set()
        self.version = message.version
        return Version(message.version, message.loss_scale, fresh)

    def place_lease(self, message: Lease, specs: Sequence[BufferSpec]) -> list[memoryview]:
        """Memory for a lease's batch. Raises OverMemoryLimit, MalformedFrame."""
        if any(spec.codec != "raw" for spec in specs):
            raise MalformedFrame("LEASE in a codec")
        total = sum(spec.nbytes for spec in specs)
        if total + self.held_bytes > self._limit:
            raise OverMemoryLimit("batches held", total + self.held_bytes, self._limit)
        self._pieces = []
        views = []
        for spec in specs:
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            self._pieces.append(tensor)
            views.append(bytes_of(tensor) if spec.nbytes else memoryview(bytearray()))
        return views

    def lease(self, message: Lease) -> None:
        """The lease and its batch are complete."""
        if not message.samples or any(count < 1 for count in message.samples):
            raise MalformedFrame("LEASE without samples")
        if message.lease in self._sizes:
            raise MalformedFrame(f"LEASE {message.lease} came twice")
        pieces, self._pieces = tuple(self._pieces), []
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in pieces)
        if sum(message.samples) > max(_SAMPLES_OF_NOTHING, nbytes + len(message.structure)):
            raise MalformedFrame(f"LEASE of {sum(message.samples)} samples in {nbytes} bytes")
        self._leases[message.lease] = HeldLease(message, pieces, nbytes)
        self._sizes[message.lease] = nbytes

    def revoke(self, lease: int) -> bool:
        """The lease is void. False where it has been taken already, or is not known."""
        if self._leases.pop(lease, None) is None:
            return False
        self.end(lease)
        return True

    def end(self, lease: int) -> None:
        """A lease that was taken is done with: its batch does not count any more."""
        self._sizes.pop(lease, None)

    def take(self) -> list[HeldLease]:
        """Leases that can be computed now, oldest first; void ones are forgotten. ``end`` follows for each of them."""
        ready = [held for held in self._leases.values() if held.message.version == self.version]
        for held in self._leases.values():
            if held.message.version < self.version:
                self.end(held.message.lease)
        self._leases = {n: held for n, held in self._leases.items() if held.message.version > self.version}
        return ready
