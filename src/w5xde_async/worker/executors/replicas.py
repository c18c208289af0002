"""What a worker does with its replica under each kind of rule. All of it runs on the compute thread.

``FollowingReplica`` computes at what is published (sync through codecs, ``async``). ``SteppingReplica`` makes an
optimizer step of every lease and says how far it has gone when it is asked (rules of local steps).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import torch
from msgspec import DecodeError, Meta, Struct, msgpack
from torch import Tensor

from w5xde_async.compute.block import ComputedBlock, Emit, Task
from w5xde_async.compute.inner import build_inner, set_scheduled
from w5xde_async.compute.program.sandbox import Computing
from w5xde_async.errors import MalformedFrame
from w5xde_async.openmp import side_by_side
from w5xde_async.params.flat import ResultVector, ordered
from w5xde_async.params.layout import Bucket
from w5xde_async.updates.fragments import Fragment
from w5xde_async.updates.outer import bucket_fragments
from w5xde_async.updates.streaming import StreamingReplica
from w5xde_async.updates.sync import SyncRule
from w5xde_async.wire.messages import VerdictCode
from w5xde_async.worker.executors.published import Published
from w5xde_async.worker.executors.shard_engine import ShardEngine

_MOST_INNER = 1 << 20  # bytes of a description


class _Sent(NamedTuple):
    """A fragment's pseudo-gradient that no verdict has come for."""

    fragment: int
    pseudo_gradient: Tensor
    finite: bool


class FollowingReplica:
    """Always at the newest version that has come."""

    submits = False  #: results are sent with each lease

    def __init__(self, engine: Computing | ShardEngine, published: Published) -> None:
        self.published, self.version = published, -1
        self._engine = engine

    def compute(self, task: Task, rates: Sequence[float], emit: Emit) -> ComputedBlock:
        """One lease, whose results ``emit`` gets."""
        published = self.published
        if self.version != published.version:
            changed = sorted(published.touched)
            published.touched.clear()
            buckets = [self._engine.layout.buckets[number] for number in changed]
            side_by_side(self._copy, buckets, sum(self._engine.layout.state_nbytes(bucket) for bucket in buckets))
            self._engine.load(changed)
            self.version = published.version
        return self._engine.compute(task, emit)

    def _copy(self, bucket: Bucket) -> None:
        self._engine.incoming.bucket(bucket).copy_(self.published.state.bucket(bucket))

    def settle(self, leases: Sequence[int], code: int) -> None:
        """What is refused is leased again."""


class SteppingReplica:
    """Parameters of its own, which ``published`` ones take the place of at the first lease after each submission.

    So a pseudo-gradient has the steps made since the submission before it, whatever was published and whatever verdicts
    came meanwhile: the steps that the coordinator says this worker carries, for both read leases and SUBMITs in the
    same order. What is in a pseudo-gradient that was refused is leased again, to whoever comes.

    Where fragments stream, a replica goes on after it was asked. Steps in a refused pseudo-gradient are not leased
    again (other fragments have them): the replica keeps what it went for the next one. Refused a second time in a row
    it is left to the mixing, or a replica that has gone astray would never come back. What counted is in no
    pseudo-gradient again, whether the new values are here yet or not.

    Memory for n parameters, beside the model's: 4 n bytes published, 4 n as it began, the inner optimizer's state, and
    where fragments stream at most 4 n of what was sent and is not mixed in.
    """

    submits = True  #: results are sent when the coordinator asks for them

    def __init__(
        self, engine: Computing | ShardEngine, published: Published, inner: bytes, *, on_device: bool = False
    ) -> None:
        """``inner``: what WELCOME said of the optimizer (``inner_description``). ``on_device``: what is submitted stays
        on a CUDA device that has room for it. Raises MalformedFrame."""
        described, clip, streaming = _read_inner(inner)
        self._engine, self.published, self.version = engine, published, -1
        engine.keep_results()
        self._on_device = on_device and engine.device.type == "cuda"
        self._layout = layout = engine.layout
        self._live = engine.live
        self._optimizer = build_inner(described, engine.tensors)
        self._scheduled: list[str] = described["scheduled"]
        self._across = engine.across if isinstance(engine, ShardEngine) else None
        self._rule = SyncRule(
            engine.tensors, layout, self._live, self._optimizer, clip=clip, across=self._across
        )  # fmt: skip
        self._base = [group.clone() for group in self._live.groups]
        self._group = next(group.index for group in layout.groups if group.role == "grad")
        self._steps = 0  # inner steps
        self._streaming: StreamingReplica | None = None
        self._sent_at: dict[int, int] = {}  # fragment -> published version when it was sent
        self._fragment_version: dict[int, int] = {}
        self._anew = True  # it begins at published parameters with the next lease
        self._awaited: dict[int, _Sent] = {}  # by lease, until the verdict
        self._counted: dict[int, Tensor] = {}  # fragment -> its pseudo-gradient, which was accepted and is not mixed in
        self._moved: set[int] = set()  # fragments in which the replica has moved other than by a step
        self._kept: set[int] = set()  # fragments whose last pseudo-gradient was refused
        self._delay, self._mixing, self._buckets, self._fragments = 0, 0.0, [], []
        if streaming is not None:
            count, self._delay, self._mixing = streaming
            for numbers in bucket_fragments(layout, count):
                trained = [layout.buckets[number] for number in numbers if layout.buckets[number].group == self._group]
                self._buckets.append([bucket.index for bucket in trained])
                self._fragments.append(Fragment(tuple((b.offset, b.offset + b.numel) for b in trained)))

    def compute(self, task: Task, rates: Sequence[float], emit: Emit) -> ComputedBlock:
        """One inner step."""
        if self._anew:
            self._begin()
        elif self._moved:
            self._engine.refresh(sorted(number for index in self._moved for number in self._buckets[index]))
        self._moved.clear()
        set_scheduled(self._optimizer, self._scheduled, rates)
        present = [False] * len(self._layout.result_buckets)
        vectors: list[ResultVector] = []

        def keep(bucket: int, vector: ResultVector) -> None:
            present[bucket] = True
            vectors.append(vector)

        outcome = self._engine.compute(task, keep)
        self._engine.unbind()
        samples = sum(task.samples)
        if vectors:
            began = self._engine.clock()
            applied = self._rule.apply(vectors[-1], present, samples, outcome.untouched)
            self._engine.refresh(applied.changed)
            # A step that was skipped has no result: that tells the coordinator.
            absent = tuple(range(len(present))) if applied.skipped else ()
            compute_s = outcome.compute_s + self._engine.clock() - began
            outcome = replace(outcome, absent=absent, compute_s=compute_s)
        else:
            outcome = replace(outcome, absent=())
        self._steps += 1
        if self._streaming is not None:
            self._deliver()
            self._mixed(self._streaming.mix(self._steps))
        return outcome

    @torch.no_grad()
    def _begin(self) -> None:
        """Go on from what is published."""
        for live, base, published in zip(self._live.groups, self._base, self.published.state.groups, strict=True):
            live.copy_(published)
            base.copy_(published)
        self._engine.refresh(range(len(self._layout.buckets)))
        self.version = self.published.version
        self._anew = False
        if self._fragments:
            self._streaming = StreamingReplica(
                self._live.groups[self._group], self._fragments, delay=self._delay, mixing=self._mixing
            )
            self._fragment_version = dict.fromkeys(range(len(self._fragments)), self.version)
            for of_old in (self._sent_at, self._awaited, self._counted, self._kept):
                of_old.clear()

    def _deliver(self) -> None:
        """Hand over fragments that have come since they were sent.

        Verdicts and parameters come in the order in which they were sent: while a pseudo-gradient has no verdict,
        whatever has been published was made without it.
        """
        assert self._streaming is not None
        under_way = {sent.fragment for sent in self._awaited.values()}
        for index in self._sent_at:
            if index in under_way:
                self._rebase(index)
            elif (newest := self._newest(index)) > self._sent_at[index]:
                self._streaming.deliver(index, self._values(index))
                self._fragment_version[index] = newest

    def _rebase(self, index: int) -> None:
        """Go on from what has come of a fragment without this replica's pseudo-gradient in it."""
        assert self._streaming is not None
        newest = self._newest(index)
        if newest > self._sent_at[index]:
            self._streaming.rebase(index, self._values(index))
            self._moved.add(index)
            self._sent_at[index] = self._fragment_version[index] = newest

    def _newest(self, index: int) -> int:
        """The version in which a fragment has come last."""
        return max(self.published.newest.get(number, -1) for number in self._buckets[index])

    def _values(self, index: int) -> Tensor:
        """A fragment as it was published last."""
        values = self._fragments[index].gather(self.published.state.groups[self._group])
        return values.to(self._live.groups[self._group].device)

    def _mixed(self, fragments: Sequence[int]) -> None:
        self._moved.update(fragments)
        for index in fragments:
            del self._sent_at[index]
            self._counted.pop(index, None)

    @torch.no_grad()
    def submission(self, lease: int, buckets: Sequence[int]) -> tuple[ResultVector, int]:
        """How far the replica has gone in ``buckets``, and from which version.

        Raises MalformedFrame where the buckets are no fragment.
        """
        if self._anew:
            self._begin()
        layout, vector, version = self._layout, self._new_vector(), self.version
        trained = [number for number in buckets if layout.buckets[number].group == self._group]
        if self._streaming is not None and trained:
            if trained not in self._buckets:
                raise MalformedFrame(f"SUBMIT for buckets {trained[:8]}, which are no fragment")
            index = self._buckets.index(trained)
            version = self._fragment_version[index]
            pseudo_gradient = self._send(index)
            self._awaited[lease] = _Sent(index, pseudo_gradient, self._is_finite(pseudo_gradient))
            self._fragments[index].scatter_(vector.group(self._group), pseudo_gradient.to(vector.memory.device))
        else:
            self._anew = True
            for number in trained:
                at = layout.buckets[number]
                where = slice(at.offset, at.offset + at.numel)
                pseudo_gradient = self._base[self._group][where] - self._live.groups[self._group][where]
                vector.group(self._group)[where].copy_(pseudo_gradient)
        for number in set(buckets) - set(trained):
            bucket = layout.buckets[number]
            where = slice(bucket.offset, bucket.offset + bucket.numel)
            live = self._live.groups[bucket.group][where]  # buffers as they are
            vector.group(bucket.group)[where].copy_(live if live.is_floating_point() else ordered(live))
        return vector, version

    def _new_vector(self) -> ResultVector:
        if self._on_device:
            with suppress(torch.OutOfMemoryError):
                return ResultVector(self._layout, self._engine.device)
        return ResultVector(self._layout)

    @torch.no_grad()
    def settle(self, leases: Sequence[int], code: int) -> None:
        """A verdict on results that have left."""
        for lease in leases:
            sent = self._awaited.pop(lease, None)
            if sent is None:
                continue
            streaming, index = self._streaming, sent.fragment
            assert streaming is not None
            if code in (VerdictCode.APPLIED, VerdictCode.DUPLICATE):
                self._kept.discard(index)
                if streaming.is_sent(index):
                    self._counted[index] = sent.pseudo_gradient
                    self._rebase(index)  # what has come so far was made without it
                continue
            if not sent.finite:
                self._anew = True  # nothing finite would ever come of it: it begins anew
                self._optimizer.state.clear()
                return
            if index in self._kept:
                self._kept.discard(index)
                continue
            self._kept.add(index)
            self._moved.add(index)
            streaming.keep(index, sent.pseudo_gradient)

    def _is_finite(self, values: Tensor) -> bool:
        """Whether all values are, those of the other ranks included."""
        finite = bool(values.isfinite().all())
        return finite if self._across is None else not self._across(float(not finite))

    def _send(self, index: int) -> Tensor:
        streaming = self._streaming
        assert streaming is not None
        if streaming.is_sent(index):
            self._deliver()
            self._mixed(streaming.mix(self._steps + self._delay))  # what has come is not waited for any more
        if streaming.is_sent(index):
            streaming.recall(index, self._counted.pop(index, None))
        self._sent_at[index] = self.published.version
        return streaming.send(index, self._steps)


Replica = FollowingReplica | SteppingReplica


class _Inner(Struct, forbid_unknown_fields=True):
    """WELCOME's inner optimizer: its description for ``build_inner``, the largest norm of a gradient, and of streaming
    fragments, delay and mixing."""

    name: Any
    scheduled: Any
    groups: Any
    clip: Annotated[float, Meta(gt=0)] | None
    streaming: tuple[Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=0)], Annotated[float, Meta(ge=0, lt=1)]] | None


_INNER = msgpack.Decoder(_Inner)


def _read_inner(inner: bytes) -> tuple[dict[str, Any], float | None, tuple[int, int, float] | None]:
    if len(inner) > _MOST_INNER:
        raise MalformedFrame(f"an inner optimizer of {len(inner)} bytes")
    try:
        read = _INNER.decode(inner)
    except (DecodeError, ValueError, RecursionError) as error:
        raise MalformedFrame(f"inner optimizer: {str(error)[:200]}") from None
    return {"name": read.name, "scheduled": read.scheduled, "groups": read.groups}, read.clip, read.streaming
