"""How results are checked."""

from __future__ import annotations

from dataclasses import dataclass

from w5xde_async.config import Config, number, setting, whole
from w5xde_async.plan.audit import AuditConfig
from w5xde_async.updates.norm_gate import NormGateConfig

__all__ = ["VerificationConfig"]


@dataclass(frozen=True, kw_only=True)
class VerificationConfig(Config):
    """Settings of how results are checked, and how much may fail before the run does."""

    norm_gate: float = setting(
        6.0, "a result larger than the median by so many median deviations is computed by a second worker before it "
        "counts; 0: no such check", number(">= 0", lambda x: x >= 0), "bad workers",
    )  # fmt: skip
    audit_fraction: float = setting(
        0.01, "blocks for each step, on average, that are drawn by chance and computed by a second worker, to compare; "
        "0: none", number("from 0 to 1", lambda x: 0 <= x <= 1), "bad workers",
    )  # fmt: skip
    audit_tolerance: float = setting(
        0.01, "relative distance that two honest results on unlike machines may have",
        number("between 0 and 1", lambda x: 0 < x < 1), "bad workers",
    )  # fmt: skip
    max_leaf_failures: int = setting(
        3, "attempts on a leaf whose code raises before the run stops", whole(1), "the run"
    )
    max_nonfinite_steps: int = setting(50, "steps in a row with a non-finite gradient before the run stops", whole(1))

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
