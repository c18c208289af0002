"""What is left of a run when it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from w5xde_async.telemetry.events import Best, WorkerShare
from w5xde_async.telemetry.notebook import html_table


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended. ``outcome``: finished or stopped (a failed run raises). ``digest``: of the final parameters
    and buffers.

    ``loss``: of the last commit that has a finite one.
    ``shares``: what each worker did, in time and bytes; ``encode_s``, ``network_s``, ``raw_bytes``, ``encoded_bytes``
    (of results, before and after their codec) are its sums. ``downlink_raw_bytes`` and ``downlink_encoded_bytes``: of
    the versions that a codec wrote, each once. ``residuals_lost``: workers that vanished with what it had left out.
    ``steps_skipped``: steps of this session without an update, as it was not finite or, under rules other than
    ``sync``, refused.
    ``bad_samples``: of the dataset, in the whole run, that cannot be read and were left out.
    ``best``: what the job's ``keep_best`` has kept; its ``path``, ``step`` and ``value``.
    """

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
    shares: tuple[WorkerShare, ...] = ()
    downlink_raw_bytes: int = 0
    downlink_encoded_bytes: int = 0
    residuals_lost: int = 0
    steps_skipped: int = 0
    bad_samples: int = 0
    best: Best | None = None

    @property
    def encode_s(self) -> float:
        return sum(share.encode_s for share in self.shares)

    @property
    def network_s(self) -> float:
        return sum(share.network_s for share in self.shares)

    @property
    def raw_bytes(self) -> int:
        return sum(share.raw_bytes for share in self.shares)

    @property
    def encoded_bytes(self) -> int:
        return sum(share.encoded_bytes for share in self.shares)

    def _repr_html_(self) -> str:
        rows = {
            "outcome": f"{self.outcome}: {self.reason}" if self.reason else self.outcome,
            "step": f"{self.step} ({self.steps_skipped} skipped)" if self.steps_skipped else self.step,
            "loss": self.loss,
            **self.metrics,
            "seconds": round(self.seconds, 2),
            "digest": self.digest[:12],
            "model": self.model_path,
            "best": None if self.best is None else self.best.path,
            "metrics": self.metrics_path,
            "plot": self.plot_path,
        }
        return html_table("Run", rows)
