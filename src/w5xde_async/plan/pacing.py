"""How much, for whom, until when.

Blocks are sized as in guided self-scheduling (Polychronopoulos & Kuck 1987), weighted by measured speed: a worker
gets half of its fair share of what is left, so blocks shrink towards the step's end and all finish together. Two floors
keep a lease from costing more than its work: ``target_lease_s`` while every worker can still have a block of that size,
and ``min_lease_s`` as long as it is no more than a fair share of the whole step.
Pure: speeds come in as measurements, time is an argument.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

__all__ = ["Pacing", "PacingConfig"]


@dataclass(frozen=True, kw_only=True)
class PacingConfig:
    """Knobs of the pace.

    ``target_lease_s`` and ``min_lease_s``: work that a lease should hold, see above. ``leases_ahead``: leases a worker
    holds, the one it computes included. ``min_deadline_s`` and ``max_deadline_s`` clamp ``deadline_factor`` x the
    expected time; ``first_deadline_s`` serves workers whose speed is not known yet (a first step may compile kernels).
    """

    target_lease_s: float = 0.03
    min_lease_s: float = 0.005
    leases_ahead: int = 2
    smoothing: float = 0.3
    deadline_factor: float = 8.0
    min_deadline_s: float = 20.0
    max_deadline_s: float = 3600.0
    first_deadline_s: float = 600.0

    def __post_init__(self) -> None:
        if self.leases_ahead < 1:
            raise ValueError("leases_ahead is at least 1")
        if not 0 < self.min_deadline_s <= self.max_deadline_s:
            raise ValueError("min_deadline_s lies between 0 and max_deadline_s")


@dataclass(slots=True)
class Pacing:
    """Measured speeds and what follows from them."""

    config: PacingConfig
    _leaf_s: dict[str, float] = field(default_factory=dict)

    def observe(self, worker: str, leaves: int, seconds: float) -> None:
        """``worker`` computed ``leaves`` leaves in ``seconds`` (finite)."""
        leaf_s = max(seconds, 1e-9) / leaves
        known = self._leaf_s.get(worker)
        a = self.config.smoothing
        self._leaf_s[worker] = leaf_s if known is None else (1 - a) * known + a * leaf_s

    def forget(self, worker: str) -> None:
        self._leaf_s.pop(worker, None)

    def leaf_s(self, worker: str) -> float | None:
        """Smoothed seconds per leaf, None before the first measurement."""
        return self._leaf_s.get(worker)

    def block_leaves(self, worker: str, free_leaves: int, workers: Collection[str], *, step_leaves: int = 0) -> int:
        """Most leaves (a power of two) of the next block for ``worker``.

        ``free_leaves`` are left for ``workers``, of the step's ``step_leaves``.
        """
        leaf_s = self._leaf_s.get(worker)
        if leaf_s is None:
            known = [self._leaf_s[other] for other in workers if other in self._leaf_s]
            if not known:
                return 1  # nothing is known: find out with one leaf
            leaf_s = sorted(known)[len(known) // 2]
        speed = 1 / leaf_s
        total = sum(1 / self._leaf_s.get(other, leaf_s) for other in workers) or speed
        fair = speed / max(total, speed)
        share = free_leaves * fair
        wanted = max(
            share / 2,
            min(share, self.config.target_lease_s / leaf_s),
            min(step_leaves * fair, self.config.min_lease_s / leaf_s),
        )
        return 1 << max(int(wanted), 1).bit_length() - 1

    def deadline_s(self, worker: str, leaves: int) -> float:
        """How long a lease of ``leaves`` leaves may take, the leases before it included."""
        leaf_s = self._leaf_s.get(worker)
        if leaf_s is None:
            return self.config.first_deadline_s
        expected = leaf_s * leaves * self.config.leases_ahead
        return min(max(expected * self.config.deadline_factor, self.config.min_deadline_s), self.config.max_deadline_s)
