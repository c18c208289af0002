"""How results are checked."""

from __future__ import annotations

from dataclasses import dataclass

from w5xde_async.config import Config, number, same_as, setting, whole
from w5xde_async.plan.audit import AuditConfig
from w5xde_async.updates.norm_gate import NormGateConfig


@dataclass(frozen=True, kw_only=True)
class VerificationConfig(Config):
    """Settings of how results are checked, and how much may fail before the run does."""

    norm_gate: float = setting(
        6.0, "a result larger than the median by so many median deviations is computed by a second worker before it "
        "counts (sync), or scaled down or refused (other rules); 0: no such check",
        number(">= 0", lambda x: x >= 0), "bad workers",
    )  # fmt: skip
    audit_fraction: float = same_as(AuditConfig, "fraction")
    audit_tolerance: float = same_as(AuditConfig, "tolerance")
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
