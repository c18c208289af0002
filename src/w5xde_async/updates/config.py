"""Which update rule, and its numbers: one frozen value that flags, TOML and keyword arguments make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from w5xde_async.errors import need

if TYPE_CHECKING:
    from w5xde_async.codecs.codec import Codec

__all__ = ["AVERAGES", "LOCAL_RULES", "RULES", "UpdateConfig"]

RULES = ("sync", "async", "local", "streaming", "async-local")
#: Rules whose workers run the optimizer themselves and submit how far they went.
LOCAL_RULES = ("local", "streaming", "async-local")
_SHORT_ROUND = 100  # inner steps
#: The averages, and of how many results each makes something else than the mean.
_FEWEST = {"mean": 1, "radial": 2, "median": 3}
AVERAGES = tuple(_FEWEST)


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How results become parameters, and how both travel.

    rule                sync: every leaf of a step, then one commit; the same bits with any workers.
                        async: a result counts when it comes, older ones less (``updates.asynchronous``).
                        local: workers take ``inner_steps`` optimizer steps of their own, then a round averages where
                        they went (DiLoCo, ``updates.local``). streaming: the same in ``fragments``, one at a time,
                        while computing goes on (``updates.streaming``). async-local: the same, each counting when it
                        comes (``updates.delayed``).
    codec               how gradients and Deltas are written (``codecs.registry``)
    downlink            how changes of the parameters are written; empty: as the codec where it writes every value
                        (``int8`` for those that leave values out)
    feedback            what a lossy codec leaves out is added to the next gradient
    inner_steps         H, of the fastest worker; others do fewer, by their speed
    outer_lr            of local rules; None: the paper's (0.7; streaming 0.4)
    outer_momentum      Nesterov momentum of local rules; None: 0.5 below 100 inner steps, whose Deltas are alike (0.9
                        makes steps of ten times their length of them), and the papers' 0.9 from there on
    fragments, overlap, mixing   streaming: P, tau (inner steps until a fragment is mixed in) and alpha (kept of local)
    results_per_step    async: K results make a commit; async-local: N (0: the workers that are there)
    max_staleness       versions; None: the rule's own (async 16, local 1, others none)
    staleness_exponent  a result tau versions old counts (1 + tau)^-exponent; None: the rule's own
    average             mean; radial, which keeps the length of unlike results; median, which few bad ones cannot move
    quorum              local, streaming: part of the workers after which a round closes, with a learned grace
    """

    rule: str = "sync"
    codec: str = "raw"
    downlink: str = ""
    feedback: bool = True
    inner_steps: int = 50
    outer_lr: float | None = None
    outer_momentum: float | None = None
    fragments: int = 4
    overlap: int = 1
    mixing: float = 0.5
    results_per_step: int = 0
    max_staleness: int | None = None
    staleness_exponent: float | None = None
    average: str = "mean"
    quorum: float = 0.5

    def __post_init__(self) -> None:
        need(self.rule in RULES, f"update is {self.rule!r}; give one of {', '.join(RULES)}")
        need(self.average in AVERAGES, f"average is {self.average!r}; give one of {', '.join(AVERAGES)}")
        need(self.inner_steps >= 1, f"inner_steps is {self.inner_steps}; give a number >= 1")
        need(self.fragments >= 1, f"fragments is {self.fragments}; give a number >= 1")
        need(self.overlap >= 0, f"overlap is {self.overlap}; give a number >= 0")
        need(0 <= self.mixing < 1, f"mixing is {self.mixing}; it lies in [0, 1)")
        need(self.results_per_step >= 0, f"results_per_step is {self.results_per_step}; give a number >= 0")
        need(self.outer_lr is None or self.outer_lr > 0, f"outer_lr is {self.outer_lr}; give a number > 0")
        need(
            self.outer_momentum is None or 0 <= self.outer_momentum < 1,
            f"outer_momentum is {self.outer_momentum}; it lies in [0, 1)",
        )
        need(self.max_staleness is None or self.max_staleness >= 0, f"max_staleness is {self.max_staleness}; give >= 0")
        need(
            self.staleness_exponent is None or self.staleness_exponent >= 0,
            f"staleness_exponent is {self.staleness_exponent}; give a number >= 0",
        )
        need(0 < self.quorum <= 1, f"quorum is {self.quorum}; it lies in (0, 1]")
        need(
            self.average == "mean" or self.rule in ("async", "local"),
            f"average {self.average} needs several results at once: async with --results-per-step, or local",
        )
        fewest = _FEWEST[self.average]
        need(
            self.rule != "async" or (self.results_per_step or 1) >= fewest,
            f"average {self.average} of {self.results_per_step or 1} results is their mean; "
            f"give --results-per-step {fewest} or more",
        )
        if self.codec == "raw" and self.downlink in ("", "raw"):
            return
        from w5xde_async.codecs.registry import refuse_divergence  # torch takes seconds, and --help needs none

        refuse_divergence(self.uplink_codec, feedback=self.feedback)
        down = self.downlink_codec
        need(
            down.exact or "powersgd" not in down.name,
            "downlink powersgd is not offered: it needs a state at each end; take int8 or int4",
        )

    @property
    def uplink_codec(self) -> Codec:
        """Of results. Raises UsageError for an unknown name."""
        return _codec(self.codec)

    @property
    def downlink_codec(self) -> Codec:
        """Of the parameters' changes."""
        if self.downlink:
            return _codec(self.downlink)
        up = self.uplink_codec
        return _codec("int8") if up.needs_feedback else up

    @property
    def momentum(self) -> float:
        """Of the outer optimizer."""
        if self.outer_momentum is not None:
            return self.outer_momentum
        return 0.5 if self.inner_steps < _SHORT_ROUND else 0.9

    @property
    def local(self) -> bool:
        """Workers run the optimizer."""
        return self.rule in LOCAL_RULES

    @property
    def plain(self) -> bool:
        """The synchronous tree with everything as it lies in memory: the same bits."""
        return self.rule == "sync" and self.codec == "raw" and self.downlink in ("", "raw")


def _codec(name: str) -> Codec:
    from w5xde_async.codecs.registry import codec

    return codec(name)
