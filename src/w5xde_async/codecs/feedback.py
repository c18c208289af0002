"""Acknowledged error feedback: what a lossy codec left out is added to the next gradient, once it is known what became
of the last.

For each bucket a **residual** e. A submission sends c = C(g + decay e). Until its verdict its error g + decay e - D(c)
and the residual that it took are *pending*, and e is nothing: a second submission before the verdict takes nothing
twice. Then

    APPLIED        e += the error             the coordinator has D(c)
    LEASED_AGAIN   e += what it took          g is forgotten: somebody else computes it
    KEPT           e += the error + D(c)      refused, and nobody computes it again

so that, with decay 1 and in any order of verdicts, decoded and applied + residuals = computed and not leased again,
to float error, once no verdict is awaited. A worker that dies loses its residuals: ``drop`` says how many and how much.

No run settles with KEPT: a Delta that is refused under local steps stays in the worker's parameters, not here, and its
residual is as after LEASED_AGAIN. ``bench/feedback.py`` measures with it what it is for a gradient to be kept here.

Every submission has a key, (worker, lease, attempt) or the like: encoding again under the same key gives the same
bytes, and only the first verdict counts. A gradient that is not finite never enters a residual.

Memory: one vector for the residuals, two more (and the encoded bytes) for each submission without a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from w5xde_async.codecs.codec import BytePool, Codec, Encoded, Encoder, Form, check_values

__all__ = ["Dropped", "Feedback", "Outcome"]


class Outcome(Enum):
    """What a verdict means for the residuals."""

    APPLIED = "applied"
    LEASED_AGAIN = "leased again"
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class Dropped:
    """Residuals lost. ``norm``: of all of them as one vector; ``num_buckets`` had one, ``num_pending`` submissions none
    of whose verdicts had come."""

    norm: float = 0.0
    num_buckets: int = 0
    num_pending: int = 0


@dataclass(slots=True)
class _Pending:
    """One bucket of one submission. ``finite``: its error may become a residual."""

    encoded: Encoded
    error: Tensor
    taken: Tensor | None
    finite: bool


class Feedback:
    """The residuals of one worker. Not for several threads at once."""

    def __init__(self, codec: Codec, forms: Sequence[Form], *, pool: BytePool, decay: float | None = None) -> None:
        """``forms``: of each bucket. ``decay``: None for the codec's own. Raises ValueError unless 0 <= decay <= 1."""
        self.codec, self.pool = codec, pool
        self.decay = codec.residual_decay if decay is None else decay
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(f"a decay from 0 to 1, not {decay}")
        self._encoders: list[Encoder] = [codec.encoder(form) for form in forms]
        self._residuals: dict[int, Tensor] = {}
        self._pending: dict[Hashable, dict[int, _Pending]] = {}
        self.num_not_finite = 0
        """Buckets encoded from a gradient that was not finite."""

    @property
    def num_pending(self) -> int:
        """Submissions without a verdict."""
        return len(self._pending)

    def encode(self, key: Hashable, bucket: int, values: Tensor) -> Encoded:
        """Encode ``values`` and the bucket's residual. The values are not changed.

        The bytes belong to this object until ``settle``: do not give them back to the pool.
        """
        known = self._pending.get(key, {}).get(bucket)
        if known is not None:
            return known.encoded
        encoder = self._encoders[bucket]
        check_values(values, encoder.form)
        taken = self._residuals.pop(bucket, None)
        error = self.pool.take_floats(values.numel())
        if taken is None:
            error.copy_(values)
        else:
            torch.add(values, taken, alpha=self.decay, out=error)
        encoded = encoder.encode(error, self.pool)
        encoded.codec.add_to(encoded.data, encoder.form, error, alpha=-1.0)
        # A sum is one pass without a temporary; only where it overflows must each value be looked at.
        finite = math.isfinite(float(error.sum())) or bool(error.isfinite().all())
        self.num_not_finite += not finite
        self._pending.setdefault(key, {})[bucket] = _Pending(encoded, error, taken, finite)
        return encoded

    def settle(self, key: Hashable, outcome: Outcome, counted: Collection[int] | None = None) -> bool:
        """A verdict came for all buckets of ``key``; False, and nothing done, where none is pending under it.

        ``counted``: buckets that ``outcome`` is for; the others are leased again.

        Only when the link holds none of its bytes any more: their buffers go back to the pool.
        """
        submission = self._pending.pop(key, None)
        if submission is None:
            return False
        for bucket, pending in submission.items():
            back: Tensor | None
            encoded = pending.encoded
            again = outcome is Outcome.LEASED_AGAIN or (counted is not None and bucket not in counted)
            if again or not pending.finite:
                back, rest = pending.taken, [pending.error]
            else:
                back, rest = pending.error, [pending.taken] if pending.taken is not None else []
                if outcome is Outcome.KEPT:
                    encoded.codec.add_to(encoded.data, encoded.form, pending.error)
            for vector in rest:
                self.pool.give(vector)
            if back is not None:
                self._put(bucket, back)
            self.pool.give(encoded.data)
        return True

    def _put(self, bucket: int, back: Tensor) -> None:
        present = self._residuals.get(bucket)
        if present is None:
            self._residuals[bucket] = back
        else:
            present.add_(back)
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
            self.settle(key, Outcome.LEASED_AGAIN)
        dropped = Dropped(self.norm(), len(self._residuals), num_pending)
        for residual in self._residuals.values():
            self.pool.give(residual)
        self._residuals.clear()
        return dropped

    def state_dict(self) -> dict[str, Tensor]:
        """Residuals and the encoders' state, for a worker that drains. Raises ValueError while a verdict is awaited."""
        if self._pending:
            raise ValueError(f"{len(self._pending)} submission(s) have no verdict yet: settle them first")
        state = {f"residual.{bucket}": residual.clone() for bucket, residual in sorted(self._residuals.items())}
        for index, encoder in enumerate(self._encoders):
            state |= {f"encoder.{index}.{name}": tensor for name, tensor in encoder.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replaces residuals and the encoders' state. Raises ValueError where it is of other buckets or another codec.

        Nothing has changed then, and nothing may be pending.
        """
        if self._pending:
            raise ValueError(f"{self.num_pending} submission(s) have no verdict yet: settle them first")
        residuals: dict[int, Tensor] = {}
        encoders: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(self._encoders))}
        for name, tensor in state.items():
            kind, _, rest = name.partition(".")
            number, _, inner = rest.partition(".")
            bucket = int(number) if number.isdecimal() else -1
            if not 0 <= bucket < len(self._encoders) or (kind, bool(inner)) not in (
                ("residual", False),
                ("encoder", True),
            ):
                raise ValueError(f"{name} is of no bucket here")
            if kind == "encoder":
                encoders[bucket][inner] = tensor
            else:
                check_values(tensor, self._encoders[bucket].form)
                residuals[bucket] = tensor
        fresh = [self.codec.encoder(encoder.form) for encoder in self._encoders]
        for index, encoder in enumerate(fresh):
            encoder.load_state_dict(encoders[index])
        self.drop()
        self._encoders = fresh
        for bucket, residual in residuals.items():
            self._residuals[bucket] = self.pool.take_floats(residual.numel()).copy_(residual)
