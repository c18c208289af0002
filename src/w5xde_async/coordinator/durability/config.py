"""What of a run is kept, how often, and where a start takes it up."""

from __future__ import annotations

from dataclasses import dataclass

from w5xde_async.errors import need

__all__ = ["DurabilityConfig"]


@dataclass(frozen=True, kw_only=True)
class DurabilityConfig:
    """Settings of checkpoints, journal and evaluation.

    checkpoint_every        steps between checkpoints; one is always written at the end
    keep_checkpoints        how many are kept
    durability              ``checkpoint``: a crash goes back to the newest checkpoint; ``journal``: every step is on
                            the disk before it counts, and a crash goes back to none
    resume                  ``auto``: go on from the newest whole checkpoint; ``never``: start afresh, the old run is
                            set aside; a path: go on from that checkpoint
    evaluate                False switches the job's evaluation off
    """

    checkpoint_every: int = 500
    keep_checkpoints: int = 3
    durability: str = "checkpoint"
    resume: str = "auto"
    evaluate: bool = True

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "keep_checkpoints"):
            need(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; give a number >= 1")
        need(
            self.durability in ("checkpoint", "journal"),
            f"durability is {self.durability!r}; give checkpoint or journal",
        )
