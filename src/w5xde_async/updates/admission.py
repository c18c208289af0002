"""What every rule asks of a result before it counts: fresh enough, finite, of a usual size.

The order is fixed: staleness (costs nothing), then one pass over the vector for its norm, which is also the finite
check (one NaN among ten defeats mean and median alike, so nothing may come before it), then the gate. A result
that is refused changes no sum: its leaves go back to the ledger, so each sample still counts once (G1).
No clock, no randomness; staleness is an argument. Vectors are flat float32 on the CPU and are used up: they may be
overwritten, whatever the answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from w5xde_async.params.flat import l2_norm
from w5xde_async.updates.norm_gate import NormGate
from w5xde_async.wire.messages import VerdictCode

#: Norms that count. Sums and momenta of larger ones would soon be infinite, and rules of local steps do not look again.
_MOST = 1e19


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one result. ``weight`` is its staleness weight, 0 where refused; ``norm`` its L2 norm as sent.
    ``unusual``: refused by the norm gate."""

    verdict: VerdictCode
    reason: str = ""
    weight: float = 0.0
    norm: float = math.nan
    unusual: bool = False

    @property
    def accepted(self) -> bool:
        """Whether it counts. Where not, its leaves are to be leased again."""
        return self.verdict is VerdictCode.APPLIED


def staleness_weight(staleness: int, exponent: float) -> float:
    """(1 + tau)^-exponent: 1/2 is FedBuff's (Nguyen et al. 2022, arXiv:2106.06639), 0 weighs all alike."""
    return float((1 + staleness) ** -exponent)


class Admission:
    """The checks in front of one rule. Its only state is the gate's."""

    def __init__(
        self, *, max_staleness: int | None, exponent: float, gate: NormGate | None, scale: bool = True
    ) -> None:
        """``max_staleness`` in versions, None for no bound; ``exponent`` of the staleness weight.

        ``scale`` False: the gate refuses without scaling. For pseudo-gradients, whose every step is to count.
        """
        self.max_staleness, self.exponent, self.gate = max_staleness, exponent, gate
        self._scale = scale

    def judge(
        self, vector: Tensor, *, samples: int, staleness: int, length: float | None = None, sender: str = "one",
        present: int = 1, vouched: float = 0.0,
    ) -> Outcome:  # fmt: skip
        """Whether this result counts, and by what weight. The gate may scale ``vector`` down in place.

        ``sender``: who sent it. ``present``: how many workers are here. ``vouched``: the norm that others' results
        allow it. ``length``: what the gate compares norms by, see there; None: the samples.

        Raises ValueError for a result from the future, which only a fault of the caller's can make.
        """
        if staleness < 0:
            raise ValueError(f"a result of version now + {-staleness}")
        if self.max_staleness is not None and staleness > self.max_staleness:
            reason = f"{staleness} versions old, at most {self.max_staleness} are taken"
            return Outcome(verdict=VerdictCode.STALE, reason=reason)
        if samples < 1:
            return Outcome(verdict=VerdictCode.REJECTED, reason=f"{samples} samples")
        norm = l2_norm(vector)
        if not norm < _MOST:
            return Outcome(verdict=VerdictCode.REJECTED, reason="not finite", norm=math.inf)
        if self.gate is not None:
            length = samples if length is None else length
            bound = self.gate.bound(length)
            factor = self.gate.judge(norm, length, sender=sender, present=present, vouched=vouched)
            if factor == 0.0:
                reason = f"its norm {norm:.3g} is over the bound {bound:.3g}"
                return Outcome(verdict=VerdictCode.REJECTED, reason=reason, norm=norm, unusual=True)
            if factor != 1.0 and self._scale:
                vector.mul_(factor)
        weight = staleness_weight(staleness, self.exponent)
        return Outcome(verdict=VerdictCode.APPLIED, weight=weight, norm=norm)

    def left(self, sender: str) -> None:
        """The sender is not present any more."""
        if self.gate is not None:
            self.gate.left(sender)

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and numbers."""
        return {"gate": None if self.gate is None else self.gate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. A gate that the checkpoint has not begins to learn."""
        if self.gate is not None and state["gate"] is not None:
            self.gate.load_state_dict(state["gate"])


def check_vector(vector: Tensor, numel: int | None = None, *, device: str = "cpu") -> None:
    """Raises ValueError unless it is a flat, contiguous float32 vector on ``device`` (of ``numel`` elements)."""
    if vector.dtype != torch.float32 or vector.dim() != 1 or vector.device.type != device or not vector.is_contiguous():
        raise ValueError(
            f"{vector.dtype} of shape {list(vector.shape)} on {vector.device}, not flat float32 on the {device.upper()}"
        )
    if numel is not None and vector.numel() != numel:
        raise ValueError(f"{vector.numel()} elements, not {numel}")


def restore_(target: Tensor, source: Any, what: str) -> None:
    """Copy a checkpoint's tensor over ``target``. Raises ValueError where shape or dtype differ."""
    if not isinstance(source, Tensor) or source.shape != target.shape or source.dtype != target.dtype:
        raise ValueError(f"{what} of the checkpoint does not fit this rule's")
    target.copy_(source)
