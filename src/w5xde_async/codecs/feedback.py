"""Acknowledged error feedback: what a lossy codec left out is added to the next gradient, once it is known what became
of the last.

For each bucket a **residual** e. A submission sends c = C(g + decay e). Until its verdict its error g + decay e - D(c)
and the residual that it took are *pending*, and e is nothing: a second submission before the verdict takes nothing
twice. Then

    applied       e += the error         the coordinator has D(c)
    refused       e += what it took      g is forgotten: it is computed again, or stays in the worker's parameters

so that, with decay 1 and in any order of verdicts, decoded and applied + residuals = computed and not refused, to float
error, once no verdict is awaited. A worker that dies loses its residuals: ``drop`` says how many and how much.

A gradient is a sum over samples, and a step divides by how many it has: its ``weight``. What a step of 128 left out
would count 64 times in one of 2. So a residual has the weight of the step that left it, and is added in proportion:
what is conserved, where weights differ, is what steps divide by theirs.

Every submission has a key, (worker, lease, attempt) or the like: encoding again under the same key gives the same
bytes, and only the first verdict counts. A gradient that is not finite never enters a residual.

Memory: one vector for the residuals, two more (and the encoded bytes) for each submission without a verdict. Values may
be an accelerator's: they are encoded there, one bucket at a time, while all of this lies in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from w5xde_async.codecs.codec import BytePool, Codec, Encoded, brought, check_values


@dataclass(frozen=True, slots=True)
class Dropped:
    """Residuals lost. ``norm``: of all of them as one vector; ``num_buckets``: buckets that had one.
    ``num_pending``: submissions without a verdict."""

    norm: float = 0.0
    num_buckets: int = 0
    num_pending: int = 0


@dataclass(slots=True)
class _Pending:
    """One bucket of one submission. ``finite``: its error may become a residual. ``weight``: of its step, and of the
    step that ``taken`` is of."""

    encoded: Encoded
    error: Tensor
    taken: Tensor | None
    finite: bool
    weight: float
    taken_weight: float


class Feedback:
    """The residuals of one worker. Not for several threads at once."""

    def __init__(self, codec: Codec, sizes: Mapping[int, int], *, pool: BytePool, decay: float | None = None) -> None:
        """``sizes``: bucket -> values. ``decay``, 0 to 1: the codec's own by default. Raises ValueError."""
        self.codec, self.sizes, self.pool = codec, sizes, pool
        self.decay = codec.residual_decay if decay is None else decay
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(f"a decay from 0 to 1, not {decay}")
        self._residuals: dict[int, Tensor] = {}
        self._weights: dict[int, float] = {}  # of each of them
        self._pending: dict[Hashable, dict[int, _Pending]] = {}

    def change(self, codec: Codec) -> None:
        """Encode by this codec from now on, with its own decay. Residuals and what is pending stay as they are."""
        self.codec, self.decay = codec, codec.residual_decay

    @property
    def num_pending(self) -> int:
        """Submissions without a verdict."""
        return len(self._pending)

    def encode(self, key: Hashable, bucket: int, values: Tensor, weight: float = 1.0) -> Encoded:
        """Encode ``values`` and the bucket's residual. The values are not changed, nor looked at after this returns.

        ``weight``: what their step divides by, its samples.

        The bytes, in the pool's memory, belong to this object until ``settle``: do not give them back. Where it raises
        nothing has changed.
        """
        known = self._pending.get(key, {}).get(bucket)
        if known is not None:
            return known.encoded
        self._check(bucket, values)
        taken, taken_weight = self._residuals.get(bucket), self._weights.get(bucket, weight)
        error = self.pool.take_floats(values.numel())
        try:
            there = values.device != self.pool.device
            work, pool = (torch.empty_like(values), BytePool(device=values.device)) if there else (error, self.pool)
            if taken is None:
                work.copy_(values)
            else:
                torch.add(
                    values,
                    taken.to(work.device, non_blocking=True),
                    alpha=self.decay * (weight / taken_weight),
                    out=work,
                )
            encoded = self.codec.encode(work, pool)
            encoded.codec.add_to(encoded.data, work, alpha=-1.0)
            total = work.sum()
            if there:
                encoded = brought(encoded, self.pool, (error, work))
            # A sum is one pass without a temporary; only where it overflows must each value be looked at.
            finite = math.isfinite(float(total)) or bool(work.isfinite().all())
        except BaseException:
            self.pool.give(error)
            raise
        self._residuals.pop(bucket, None)
        self._pending.setdefault(key, {})[bucket] = _Pending(
            encoded, error, taken, finite, weight, taken_weight
        )  # fmt: skip
        return encoded

    def settle(self, key: Hashable, *, applied: bool, counted: Collection[int] | None = None) -> bool:
        """A verdict came for all buckets of ``key``; False, and nothing done, where none is pending under it.

        ``counted``: the buckets that were applied, where not all were.

        Only when the link holds none of its bytes any more: their buffers go back to the pool.
        """
        submission = self._pending.pop(key, None)
        if submission is None:
            return False
        for bucket, pending in submission.items():
            back, weight = pending.taken, pending.taken_weight
            rest: Tensor | None = pending.error
            if applied and pending.finite and (counted is None or bucket in counted):
                back, weight, rest = pending.error, pending.weight, pending.taken
            if rest is not None:
                self.pool.give(rest)
            if back is not None:
                self._put(bucket, back, weight)
            self.pool.give(pending.encoded.data)
        return True

    def _put(self, bucket: int, back: Tensor, weight: float) -> None:
        present = self._residuals.get(bucket)
        if present is None:
            self._residuals[bucket], self._weights[bucket] = back, weight
        else:
            present.add_(back, alpha=self._weights[bucket] / weight)
            self.pool.give(back)

    def residual(self, bucket: int) -> Tensor | None:
        """The bucket's residual, None for nothing; what is pending is not in it."""
        return self._residuals.get(bucket)

    def norm(self) -> float:
        """Of all residuals as one vector; what is pending is not in it."""
        return math.hypot(*[float(torch.linalg.vector_norm(residual)) for residual in self._residuals.values()])

    def drop(self) -> Dropped:
        """Forget residuals and submissions, and say what was lost. For the end of a link that is not resumed."""
        num_pending = self.num_pending
        for key in list(self._pending):  # what they took is lost as well, and belongs to the count
            self.settle(key, applied=False)
        dropped = Dropped(self.norm(), len(self._residuals), num_pending)
        for residual in self._residuals.values():
            self.pool.give(residual)
        self._residuals.clear()
        return dropped

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals, at a weight of 1, for a worker that drains. Raises ValueError while a verdict is awaited."""
        if self._pending:
            raise ValueError(f"{len(self._pending)} submission(s) have no verdict yet: settle them first")
        return {
            f"residual.{bucket}": residual / self._weights[bucket]
            for bucket, residual in sorted(self._residuals.items())
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replaces the residuals, whatever codec left them out. Raises ValueError where they are of other buckets.

        Nothing has changed then, and nothing may be pending.
        """
        if self._pending:
            raise ValueError(f"{self.num_pending} submission(s) have no verdict yet: settle them first")
        residuals: dict[int, Tensor] = {}
        for name, tensor in state.items():
            kind, _, number = name.partition(".")
            bucket = int(number) if number.isdecimal() else -1
            if kind != "residual" or bucket not in self.sizes:
                raise ValueError(f"{name} is of no bucket here")
            self._check(bucket, tensor)
            residuals[bucket] = tensor
        self.drop()
        for bucket, residual in residuals.items():
            self._residuals[bucket] = self.pool.take_floats(residual.numel()).copy_(residual)
            self._weights[bucket] = 1.0

    def _check(self, bucket: int, values: Tensor) -> None:
        check_values(values)
        if values.numel() != self.sizes[bucket]:
            raise ValueError(f"{values.numel()} values, the bucket has {self.sizes[bucket]}")
