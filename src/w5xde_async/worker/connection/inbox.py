"""What a worker holds: leases and versions, in the order in which they can be computed.

Bookkeeping between the link's reader and the compute thread; it belongs to the event loop. A lease can be computed when
its version is whole. Buffers are allocated only after header, layout and memory limit agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from w5xde_async.errors import FrameTooLarge, MalformedFrame
from w5xde_async.params.flat import bytes_of
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Lease, Params, Submit
from w5xde_async.worker.executors.executor import HeldLease, ParameterReceiver, Version

#: Samples of a lease that may be smaller than a byte each: what a lease says is what its computing takes.
_SAMPLES_OF_NOTHING = 1 << 20
#: Leases and requests to submit that may be held: a coordinator has a few ahead, and they need not have any bytes.
MOST_LEASES = 1024


class OverMemoryLimit(FrameTooLarge):
    """A lease that this worker's own limit has no room for: the coordinator has done nothing wrong."""


class Inbox:
    """Leases and parameters as they come in.

    ``exact``: a lease is computed at its very version, and one of an older version is void. Otherwise leases and
    requests to submit are taken strictly in the order in which they came, at that version or any newer one.
    ``follows``: of an island's rank whose head says what is computed, and what is void.
    """

    def __init__(self, parameters: ParameterReceiver, limit_bytes: int, *, exact: bool, follows: bool = False) -> None:
        self._parameters, self._limit, self._exact, self._follows = parameters, limit_bytes, exact, follows
        self.version = -1  # the newest whole one
        self._torn = False  # a newer one has begun to come
        self._receiving = -1
        self._num_received = 0  # buckets of the version being received
        self._fresh: set[int] = set()  # buckets that came since the last whole version
        self._batch: list[Tensor] = []  # of the lease being received
        self._waiting: list[HeldLease | Submit] = []
        self._sizes: dict[int, int] = {}  # lease -> bytes of its batch, from its coming until it is done or void

    @property
    def held_bytes(self) -> int:
        """Bytes of batches held, those included that wait for the compute thread or are in it."""
        return sum(self._sizes.values())

    @property
    def whole(self) -> int:
        """``version``, where nothing of a newer one has come; else -1."""
        return -1 if self._torn else self.version

    def place_params(self, message: Params, specs: Sequence[BufferSpec]) -> Sequence[memoryview]:
        """Memory for a bucket of parameters. Raises MalformedFrame."""
        self._torn = True
        return self._parameters.place(message, specs)

    def params(self, message: Params) -> Version | None:
        """A bucket has come (or none, where nothing changed). The version, once it is whole.

        Raises MalformedFrame where the version is older than the last.
        """
        self._parameters.arrived()
        if message.version != self._receiving:
            if message.version < self._receiving:
                raise MalformedFrame(f"PARAMS of version {message.version} after version {self._receiving}")
            self._receiving, self._num_received = message.version, 0
        self._fresh.update(message.shared)
        if message.num_buckets:
            self._num_received += 1
            self._fresh.add(message.bucket)
        if self._num_received < message.num_buckets:
            return None
        # Buckets of a version that was overtaken before it was whole are not sent again: they count now.
        fresh, self._fresh = tuple(sorted(self._fresh)), set()
        self.version, self._torn = message.version, False
        return Version(message.version, message.loss_scale, fresh, self._parameters.take())

    def place_lease(self, specs: Sequence[BufferSpec], beside: int = 0) -> list[memoryview]:
        """Memory for a lease's batch. ``beside``: bytes of batches that are held elsewhere. Raises OverMemoryLimit,
        MalformedFrame."""
        if any(spec.codec != "raw" for spec in specs):
            raise MalformedFrame("LEASE in a codec")
        total = sum(spec.nbytes for spec in specs)
        if total + self.held_bytes + beside > self._limit:
            raise OverMemoryLimit("batches held", total + self.held_bytes + beside, self._limit)
        self._batch = []
        views = []
        for spec in specs:
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            self._batch.append(tensor)
            views.append(bytes_of(tensor) if spec.nbytes else memoryview(bytearray()))
        return views

    def batch(self) -> tuple[Tensor, ...]:
        """What was received into the memory of ``place_lease``."""
        batch, self._batch = tuple(self._batch), []
        return batch

    def has_room(self, nbytes: int) -> bool:
        """Whether batches of so many more bytes may be held."""
        return nbytes + self.held_bytes <= self._limit

    def lease(self, message: Lease, batch: tuple[Tensor, ...] | None = None) -> None:
        """The lease and its batch are complete: what was received, unless it was read here.

        Raises MalformedFrame where it has no samples, came twice, its bytes do not fit its samples, or there are too
        many.
        """
        if not message.samples or any(count < 1 for count in message.samples):
            raise MalformedFrame("LEASE without samples")
        if message.lease in self._sizes:
            raise MalformedFrame(f"LEASE {message.lease} came twice")
        if len(self._sizes) >= MOST_LEASES:
            raise MalformedFrame(f"{MOST_LEASES} leases at once")
        batch = self.batch() if batch is None else batch
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in batch)
        if sum(message.samples) > max(_SAMPLES_OF_NOTHING, nbytes + len(message.structure)):
            raise MalformedFrame(f"LEASE of {sum(message.samples)} samples in {nbytes} bytes")
        self._waiting.append(HeldLease(message, batch, nbytes))
        self._sizes[message.lease] = nbytes

    def submit(self, message: Submit) -> None:
        """Keep a request in its place among the leases. Raises MalformedFrame where there are too many."""
        if len(self._waiting) >= MOST_LEASES:
            raise MalformedFrame(f"{MOST_LEASES} leases at once")
        self._waiting.append(message)

    def revoke(self, lease: int) -> bool:
        """The lease is void. False where it has been taken already, or is not known."""
        kept = [item for item in self._waiting if isinstance(item, Submit) or item.message.lease != lease]
        revoked, self._waiting = len(kept) < len(self._waiting), kept
        if revoked:
            self.end(lease)
        return revoked

    def end(self, lease: int) -> None:
        """A lease that was taken is done with: its batch does not count any more."""
        self._sizes.pop(lease, None)

    def take(self) -> list[HeldLease | Submit]:
        """What can be done now, in order; void leases are forgotten. ``end`` follows for each lease."""
        if self._exact:  # a lease of the next step does not hold up what is still to be done of this one
            held = [item for item in self._waiting if isinstance(item, HeldLease)]
            if self._follows:
                self._waiting = [item for item in held if item.message.version > self.version]
                return [item for item in held if item.message.version <= self.version]
            for item in held:
                if item.message.version < self.version:
                    self.end(item.message.lease)
            self._waiting = [item for item in held if item.message.version > self.version]
            return [item for item in held if item.message.version == self.version]
        count = 0
        for waiting in self._waiting:
            if isinstance(waiting, HeldLease) and waiting.message.version > self.version:
                break
            count += 1
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        return ready
