"""Which update rule, and its numbers: one frozen value that flags, TOML and keyword arguments make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from w5xde_async.codecs.names import NAMES, is_codec
from w5xde_async.config import YES_OR_NO, Config, Kind, number, one_of, setting, whole
from w5xde_async.errors import need

if TYPE_CHECKING:
    from w5xde_async.codecs.codec import Codec

RULES = ("sync", "async", "local", "streaming", "async-local")
#: Rules whose workers run the optimizer themselves and submit how far they went.
LOCAL_RULES = ("local", "streaming", "async-local")
_SHORT_ROUND = 100  # inner steps
#: The averages, and of how many results each makes something else than the mean.
_FEWEST = {"mean": 1, "radial": 2, "median": 3}
AVERAGES = tuple(_FEWEST)
#: The rules that use each field of ``UpdateConfig``; the others read none of it.
USED_BY: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("rule", "codec", "downlink", "feedback"), RULES),
    **dict.fromkeys(("inner_steps", "outer_lr", "outer_momentum"), LOCAL_RULES),
    **dict.fromkeys(("fragments", "overlap", "mixing"), ("streaming",)),
    "results_per_step": ("async", "async-local"),
    **dict.fromkeys(("max_staleness", "staleness_exponent"), ("async", *LOCAL_RULES)),
    "average": ("async", "local"),
    "quorum": ("local", "streaming"),
}
_CODEC = Kind(f"one of {', '.join(NAMES)}, with FRACTION at most 0.5", "CODEC", str, is_codec)
_BELOW_1 = number("from 0 to less than 1", lambda x: 0 <= x < 1)


@dataclass(frozen=True, kw_only=True)
class UpdateConfig(Config):
    """How results become parameters, and how both travel.

    rule                sync: every leaf of a step, then one commit; the same bits with any workers.
                        async: a result counts when it comes, older ones less (``updates.asynchronous``).
                        local: workers take ``inner_steps`` optimizer steps of their own, then a round averages where
                        they went (DiLoCo, ``updates.local``). streaming: the same in ``fragments``, one at a time,
                        while computing goes on (``updates.streaming``). async-local: the same, each counting when it
                        comes (``updates.delayed``).

    Without ``downlink`` it is as the codec where that writes every value, ``int8`` for those that leave values out.
    Defaults that depend on the rule are the papers': momentum 0.9, but 0.5 below 100 inner steps, whose
    pseudo-gradients are alike (0.9 makes steps of ten times their length of them). Average ``radial`` keeps the length
    of unlike results; few bad ones cannot move the ``median``.
    """

    rule: str = setting(
        "sync", "how results become parameters: sync waits for every part of a step, async takes gradients as they "
        "come; under local, streaming and async-local workers make steps of their own; auto chooses rule, codec and "
        "steps by the links", one_of("auto", *RULES, metavar="RULE"), "updates", flag="update",
    )  # fmt: skip
    codec: str = setting("raw", f"how workers write what they send: {', '.join(NAMES)}", _CODEC, "updates")
    downlink: str = setting(
        "", "how changes of the parameters are written for workers; names as of --codec", _CODEC, "updates",
        shown="as --codec where that keeps every value, else int8",
    )  # fmt: skip
    feedback: bool = setting(True, "add what a codec leaves out to the next gradient", YES_OR_NO, "updates")
    inner_steps: int = setting(
        50, "steps that the fastest worker makes of its own; others fewer, by speed", whole(1), "updates"
    )
    outer_lr: float | None = setting(
        None, "learning rate of the outer step under rules of own steps",
        number("above 0, at most 1e30", lambda x: 0 < x <= 1e30), "updates", shown="0.7; streaming 0.4",
    )  # fmt: skip
    outer_momentum: float | None = setting(
        None, "its Nesterov momentum", _BELOW_1, "updates", shown="0.5; 0.9 from 100 inner steps on"
    )
    fragments: int = setting(4, "streaming: parts of the model that take turns", whole(1), "updates")
    overlap: int = setting(
        1, "streaming: own steps until a part that was sent is mixed in; never fewer than --leases-ahead and one more",
        whole(0), "updates",
    )  # fmt: skip
    mixing: float = setting(
        0.5, "streaming: part that is kept of the worker's own values then; the rest of its steps since the sending is "
        "dropped", _BELOW_1, "updates",
    )  # fmt: skip
    results_per_step: int = setting(
        0, "async: results that make a step; async-local: results that make a step of momentum", whole(1), "updates",
        shown="1; async-local the workers that are there",
    )  # fmt: skip
    max_staleness: int | None = setting(
        None, "results older than that many versions are computed again", whole(0), "updates",
        shown="async 16, local and streaming 1, async-local without bound",
    )  # fmt: skip
    staleness_exponent: float | None = setting(
        None, "a result N versions old counts (1 + N)^-X", number(">= 0", lambda x: x >= 0), "updates",
        shown="0.5; async-local 0",
    )  # fmt: skip
    average: str = setting(
        "mean", f"how results of one step are averaged: {', '.join(AVERAGES)}", one_of(*AVERAGES), "updates"
    )
    quorum: float = setting(
        0.5, "local, streaming: part of the workers after which a round closes, with a learned grace",
        number("above 0, at most 1", lambda x: 0 < x <= 1), "updates",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.rule != "auto", "rule is 'auto', which CoordinatorConfig(auto=True) stands for")
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

    @property
    def uplink_codec(self) -> Codec:
        """Of results."""
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

    def uses(self, name: str) -> bool:
        """Whether the rule does something with a field."""
        if name == "results_per_step" and self.average == "median":
            return True  # room for so many results
        return self.rule in USED_BY[name]

    @property
    def plain(self) -> bool:
        """The synchronous tree with everything as it lies in memory: the same bits."""
        return self.rule == "sync" and self.codec == "raw" and self.downlink in ("", "raw")


def _codec(name: str) -> Codec:
    from w5xde_async.codecs.registry import codec

    return codec(name)
