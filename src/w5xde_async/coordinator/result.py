"""What is left of a run when it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from w5xde_async.telemetry.notebook import html_table

__all__ = ["RunResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended. ``outcome``: finished or stopped (a failed run raises). ``digest``: of the final parameters."""

    outcome: str
    reason: str
    step: int
    loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    digest: str = ""
    seconds: float = 0.0
    model_path: Path | None = None
    metrics_path: Path | None = None
    plot_path: Path | None = None

    def _repr_html_(self) -> str:
        rows = {
            "outcome": f"{self.outcome}: {self.reason}" if self.reason else self.outcome,
            "step": self.step,
            "loss": self.loss,
            **self.metrics,
            "seconds": round(self.seconds, 2),
            "digest": self.digest[:12],
            "model": self.model_path,
            "metrics": self.metrics_path,
            "plot": self.plot_path,
        }
        return html_table("Run", rows)
