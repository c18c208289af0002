"""How results are checked."""

from __future__ import annotations

from dataclasses import dataclass

from w5xde_async.errors import need
from w5xde_async.plan.audit import AuditConfig
from w5xde_async.updates.norm_gate import NormGateConfig

__all__ = ["VerificationConfig"]


@dataclass(frozen=True, kw_only=True)
class VerificationConfig:
    """Settings of how results are checked, and how much may fail before the run does.

    max_leaf_failures       attempts on one leaf before the run stops
    max_nonfinite_steps     steps in a row with a non-finite gradient before the run stops
    norm_gate               a block whose norm is over the median of the last ones by more than that many median
                            deviations is computed by a second worker before it counts; 0: no such check
    audit_fraction          blocks for each step, on average, that are drawn by chance and computed by a second worker
    audit_tolerance         relative distance that two honest computations of a block on unlike machines may have
    """

    max_leaf_failures: int = 3
    max_nonfinite_steps: int = 50
    norm_gate: float = 6.0
    audit_fraction: float = 0.01
    audit_tolerance: float = 0.01

    def __post_init__(self) -> None:
        for name in ("max_leaf_failures", "max_nonfinite_steps"):
            need(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; give a number >= 1")
        need(self.norm_gate >= 0, f"norm_gate is {self.norm_gate}; give a number >= 0 (0: no gate)")
        need(0 <= self.audit_fraction <= 1, f"audit_fraction is {self.audit_fraction}; give a number from 0 to 1")
        need(0 < self.audit_tolerance < 1, f"audit_tolerance is {self.audit_tolerance}; give one between 0 and 1")

    @property
    def gate(self) -> NormGateConfig | None:
        """The norm gate's own settings; None where it is off."""
        return NormGateConfig(deviations=self.norm_gate) if self.norm_gate else None

    @property
    def audit(self) -> AuditConfig:
        """The audits' own settings."""
        return AuditConfig(fraction=self.audit_fraction, tolerance=self.audit_tolerance)

    @property
    def compares(self) -> bool:
        """Whether any block is computed a second time, to compare."""
        return bool(self.norm_gate or self.audit_fraction)
