"""What of a run is kept, how often, and where a start takes it up."""

from __future__ import annotations

from dataclasses import dataclass

from w5xde_async.config import TIME, YES_OR_NO, Config, one_of, path_or, setting, text, whole


@dataclass(frozen=True, kw_only=True)
class DurabilityConfig(Config):
    """Settings of checkpoints, journal and evaluation.

    With a journal every step is on the disk before it counts. A ``resume`` other than ``auto`` and ``never`` is a path.
    """

    checkpoint_every: int = setting(500, "steps between checkpoints; the end always writes one", whole(1), "files")
    checkpoint_time_s: float = setting(
        600.0, "longest time between them: one is written after the next step", TIME, "files", flag="checkpoint_time",
        shown="10m",
    )  # fmt: skip
    keep_checkpoints: int = setting(3, "how many are kept", whole(1), "files")
    durability: str = setting(
        "checkpoint", "what a crash goes back to: the newest checkpoint, or, with a journal of every step, nothing",
        one_of("checkpoint", "journal"), "files",
    )  # fmt: skip
    resume: str = setting(
        "auto", "auto: go on from the newest checkpoint; never: start afresh and set the old run aside; or a "
        "checkpoint", path_or(text("auto, never or the path of a checkpoint", "HOW")), "files",
    )  # fmt: skip
    evaluate: bool = setting(True, "run the job's evaluate, on the coordinator", YES_OR_NO, "the run")
