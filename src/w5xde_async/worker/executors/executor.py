"""The protocol between a connection and whatever computes its leases.

A connection knows links, frames and leases; an executor knows models, parameters and codecs. They share two threads:
the event loop, on which frames arrive, and one compute thread, on which work is done in the order of its arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from w5xde_async.codecs.codec import Codec
from w5xde_async.compute.block import ComputedBlock, Task
from w5xde_async.errors import MalformedFrame
from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Bucket, Layout
from w5xde_async.params.shard import Shard
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Done, Lease, Params, Submit, Verdict
from w5xde_async.worker.uplink.result_encoder import BucketResult

Send = Callable[[BucketResult], None]
"""Takes one bucket's result as soon as it is complete. May be called from any thread."""


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease with its data in host memory."""

    message: Lease
    tensors: tuple[Tensor, ...]
    nbytes: int

    def task(self, loss_scale: float) -> Task:
        """The block to compute."""
        lease = self.message
        return Task(
            step=lease.step,
            start=lease.start,
            samples=lease.samples,
            loss_scale=loss_scale,
            structure=lease.structure,
            packed=lease.packed,
            tensors=self.tensors,
        )


class BucketUpdate(NamedTuple):
    """What a version does to one bucket. ``codec`` None: ``data`` is not encoded; ``delta``: to be added to its values,
    which it is else."""

    bucket: int
    codec: Codec | None
    data: Tensor
    delta: bool


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the parameters that has arrived whole.

    ``buckets`` have come since the version before. ``updates`` are what is to be done to them, in order; empty where
    they were received in their place.
    """

    number: int
    loss_scale: float
    buckets: tuple[int, ...]
    updates: tuple[BucketUpdate, ...] = ()


@dataclass(frozen=True, slots=True)
class Computed:
    """What came of a lease, or of a request to submit.

    ``results`` were not given to ``send`` before; ``vectors`` are to be released once everything has left. ``version``
    is what was computed with, where the rule asks for it. ``encode_s`` and ``raw_bytes``: what the codec took, and the
    size of the results without it.
    """

    outcome: ComputedBlock
    results: Sequence[BucketResult] = ()
    vectors: Sequence[ResultVector] = ()
    version: int = 0
    encode_s: float = 0.0
    raw_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Unsent:
    """The whole answer to a lease whose link ended before it had left."""

    lease: Lease
    results: Sequence[BucketResult]
    done: Done
    vectors: Sequence[ResultVector]

    def answers(self, lease: Lease) -> bool:
        """Whether a lease is of the same block at the same version."""
        mine = self.lease
        return (mine.version, mine.start, mine.samples) == (lease.version, lease.start, lease.samples)


class ParameterReceiver(Protocol):
    """Where buckets of parameters go as they arrive. Belongs to the event loop."""

    def place(self, message: Params, specs: Sequence[BufferSpec]) -> list[memoryview]:
        """Memory for one bucket. Raises MalformedFrame where it is not the layout's, or in an unknown codec."""

    def arrived(self) -> None:
        """The bucket that was placed last is complete. Raises FrameTooLarge where too much waits for its version."""

    def take(self) -> tuple[BucketUpdate, ...]:
        """A version is whole: the updates that have arrived since the one before."""


def bucket_of(layout: Layout, message: Params, specs: Sequence[BufferSpec]) -> Bucket:
    """The bucket that PARAMS brings. Raises MalformedFrame where it is not one of the layout's, in one buffer."""
    count = len(layout.buckets)
    if message.bucket >= count or message.num_buckets > count or len(specs) != 1:
        raise MalformedFrame(f"PARAMS for bucket {message.bucket} of {count}")
    return layout.buckets[message.bucket]


def check_raw(layout: Layout, bucket: Bucket, spec: BufferSpec) -> None:
    """Raises MalformedFrame where a buffer is not the bucket's values as they lie in memory."""
    dtype = str(layout.groups[bucket.group].dtype).removeprefix("torch.")
    if spec.dtype != dtype or spec.shape != (bucket.numel,) or spec.codec != "raw":
        raise MalformedFrame(f"PARAMS bucket {bucket.index} is {spec.dtype}{list(spec.shape)}, codec {spec.codec}")


def check_pieces(shard: Shard, message: Params, specs: Sequence[BufferSpec]) -> Bucket:
    """The bucket whose values an island's rank is sent. Raises MalformedFrame where they are not its pieces of one."""
    buckets, number = shard.layout.buckets, message.bucket
    if number >= len(buckets) or message.num_buckets > len(buckets):
        raise MalformedFrame(f"PARAMS for bucket {number} of {len(buckets)}")
    bucket = buckets[number]
    dtype = str(shard.layout.groups[bucket.group].dtype).removeprefix("torch.")
    wanted = [(dtype, (run.end - run.begin,), "raw") for run in shard.pieces(bucket)]
    if not wanted or [(spec.dtype, spec.shape, spec.codec) for spec in specs] != wanted or message.delta:
        raise MalformedFrame(f"PARAMS bucket {number} is not what this rank's shard has of it")
    return bucket


class LeaseExecutor(Protocol):
    """Computes the leases of one connection.

    This is where other ways of computing plug in: an island is an executor that has a group of ranks compute each lease
    together, and a pipeline stage is one whose ``layout`` holds only the buckets of its stage. The connection and the
    coordinator see one worker either way.

    An executor may rely on this:

    - It belongs to one connection, from READY to the link's end. The model behind it may outlive it.
    - ``load``, ``compute``, ``submit`` and ``settle`` come one at a time on one compute thread, in the
      order in which their messages arrived. Where ``newest_first`` holds, versions are loaded ahead of their turn.
    - ``compute`` comes only after ``load`` of a version that is at least the lease's; where ``exact`` holds, of just
      that version.
    - ``compute`` comes only while it ``has_room``.
    - ``admit`` and the methods of ``parameters`` come on the event loop, also while the compute thread is busy.

    It must keep this:

    - The results of a lease are a function of (parameters, seed, step, leaves, data) and of nothing else, so that any
      other executor may compute the lease instead.
    - Each bucket of a lease is given out once: to ``send``, or in ``Computed.results``. What was given out stays
      unchanged until it was ``release``d, or its ``sent`` was called.
    - A leaf on which the job's code raises is LeafError; the executor goes on afterwards. Any other exception ends the
      connection.
    """

    layout: Layout
    """The buckets that it takes and whose results it gives."""
    device: torch.device
    capacity_bytes: int
    """Most bytes of batches that it may hold at once, those under way included."""
    exact: bool
    """A lease is computed at its very version and is void at a later one; otherwise at that version or a later one."""
    repeatable: bool
    """Results may be sent anew on another link, or not at all: nothing was left out of them."""
    newest_first: bool
    """Versions that have arrived are loaded before the next lease, also those that came after it."""

    @property
    def parameters(self) -> ParameterReceiver:
        """Where parameters go as they arrive."""

    @property
    def version(self) -> int:
        """The version loaded last; -1 before the first."""

    @property
    def has_room(self) -> bool:
        """Whether there is memory for another block's results; where not, ``release`` makes it. Any thread."""

    @property
    def flops_per_leaf(self) -> float:
        """Floating-point operations that a leaf takes; 0.0 where that is not known."""

    @property
    def child(self) -> int:
        """The process that it computes in, where that is one of its own, else 0."""

    def admit(self, message: Verdict | Submit) -> bool:
        """Whether this message is to be queued for the compute thread. On the event loop.

        Raises MalformedFrame for one that does not fit the rule or the layout.
        """

    def load(self, version: Version) -> None:
        """Compute with this version from now on."""

    def compute(self, held: HeldLease, send: Send) -> Computed:
        """Compute one lease. Raises LeafError."""

    def submit(self, asked: Submit) -> Computed:
        """What was computed in these buckets since the last submission (rules of local steps)."""

    def settle(self, verdict: Verdict) -> None:
        """What became of results that have left. Verdicts that had not come to their turn when the link ended are
        settled last of all: nobody will say them again unasked."""

    def release(self, vectors: Sequence[ResultVector]) -> None:
        """These have been sent and may be overwritten. Any thread."""
