"""Which blocks are computed a second time, and by whom. What follows from it: ``plan.verification``.

A finished block is **held** (nothing of it counts yet) while another worker computes it too:

  sampled     drawn by chance, on average one block in 1 / ``fraction`` steps, more often of workers never checked yet
  first       nothing is known yet of how large results are
  norm        its norm is over the gate's bound
  not finite  it holds an infinity or a NaN; in a buffer, in another element than in earlier blocks that counted
  vanishing   drawn by chance, of those that nobody computes alike: it is next to nothing beside what is usual. The
              coordinator computes it

The last four say nothing against a worker: data may be odd and training may diverge. What counts is whether a second
computation comes to the same.

Chance is drawn from a key that only the coordinator knows, so that a worker cannot tell beforehand which of its blocks
will be looked at; an audit's lease looks like any other. Pure: no clock, no tensors, no randomness of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from w5xde_async.config import Config, number, setting, whole
from w5xde_async.plan.tree import Block

_NEWCOMER = 16.0  # a worker whose work was never compared is sampled that much more often


class Why(Enum):
    """Why a block is computed a second time."""

    SAMPLED = "sampled"
    FIRST = "first"
    NORM = "norm"
    NOT_FINITE = "not finite"
    VANISHING = "vanishing"


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Config):
    """Knobs of the audits. On equal CPUs a hundredth of ``tolerance`` (a relative L2 distance) is allowed."""

    fraction: float = setting(
        0.01, "blocks for each step, on average, that are drawn by chance and computed by a second worker, to compare; "
        "0: none", number("from 0 to 1", lambda x: 0 <= x <= 1), "bad workers", flag="audit_fraction",
    )  # fmt: skip
    tolerance: float = setting(
        0.01, "relative distance that two honest results on unlike machines may have",
        number("between 0 and 1", lambda x: 0 < x < 1), "bad workers", flag="audit_tolerance",
    )  # fmt: skip
    most_open: int = setting(
        2, "blocks that are computed a second time at once; each takes one result vector of memory", whole(1)
    )


class Deviation(NamedTuple):
    """How far two results of a block are apart. ``bucket`` is the one that differs most.

    ``relative``: the L2 norm of the difference over that of the second result; 0 where both gradients are not finite,
    infinite where one is. ``same_bits``: nothing differs at all. ``words``: how people are told of it where what was
    said beside the sums differs more than they do, "" elsewhere.
    """

    relative: float
    cosine: float
    bucket: int
    same_bits: bool
    words: str = ""

    def __str__(self) -> str:
        if not (self.relative or self.same_bits or self.words):
            return "equal but for the sign of zeros, or neither is finite"
        return self.words or f"relative L2 distance {self.relative:.2g}, cosine {self.cosine:.3f}"


class Choice(NamedTuple):
    """A worker that could compute a block again.

    ``alike``: its machine equals that of the block's worker. ``apart``: it runs elsewhere, under another proven name or
    on another host, so that one who has many workers audits himself as little as can be. ``same_numbers``: it draws the
    random numbers that are in the block, if any are.
    """

    worker: str
    alike: bool
    num_held: int
    apart: bool = True
    same_numbers: bool = True


@dataclass(slots=True)
class HeldBlock:
    """A finished block that does not count yet. ``suppliers``: bucket -> the worker that sent it."""

    step: int
    block: Block
    worker: str
    why: Why
    suppliers: dict[int, str]
    lease: int | None = None  # of the second computation
    second: str = ""  # who holds or held that lease
    asked: set[str] = field(default_factory=set)  # workers that were asked and gave no result

    def said_by(self, what: Deviation | int) -> str:
        """Whose part of it a bucket is, or what differs most: who has sent that bucket; of words, and of what is absent
        by them, who has finished the block."""
        if isinstance(what, Deviation):
            return self.worker if what.words else self.said_by(what.bucket)
        return self.suppliers.get(what, self.worker)


class Auditor:
    """Draws, chooses and remembers who was compared. ``key``: 16 bytes or more that nobody else knows."""

    def __init__(self, config: AuditConfig, key: bytes) -> None:
        self.config, self._keyed = config, hashlib.blake2b(key=key[:64], digest_size=7)
        self._known: set[str] = set()  # workers whose work has agreed with another's

    def draw(self, step: int, block: Block, num_leaves: int, *workers: str) -> bool:
        """Whether this finished block of a step of ``num_leaves`` leaves is sampled. ``workers``: all who had a hand in
        it, of whom the least known decides."""
        if not self.config.fraction:
            return False
        part = self.config.fraction * (1.0 if self._known.issuperset(workers) else _NEWCOMER)
        return self._chance(step, block.start) < part * block.num_leaves / num_leaves

    def _chance(self, *what: int) -> float:
        """In [0, 1), the same for the same arguments."""
        keyed = self._keyed.copy()
        keyed.update(b",".join([b"%d" % number for number in what]))
        return int.from_bytes(keyed.digest(), "big") / (1 << 56)

    def choose(self, held: HeldBlock, choices: Sequence[Choice]) -> str | None:
        """Who computes it again: nobody that had a hand in it, who draws the same random numbers first, then somebody
        from elsewhere, then an equal machine, then whoever holds least."""
        fit = [c for c in choices if c.worker not in held.asked and c.worker not in held.suppliers.values()]
        fit = [c for c in fit if c.worker != held.worker]
        if not fit:
            return None
        turn = {c.worker: self._chance(held.step, held.block.start, number) for number, c in enumerate(choices)}
        return min(fit, key=lambda c: (not c.same_numbers, not c.apart, not c.alike, c.num_held, turn[c.worker])).worker

    def agreed(self, *workers: str) -> None:
        """Their results were compared and found the same."""
        self._known.update(workers)

    def forget(self, worker: str) -> None:
        """The worker has left; if it comes back it is a newcomer."""
        self._known.discard(worker)

    def tolerance(self, *, equal_cpus: bool, reduced_precision: bool) -> float:
        """What two honest results may differ by. bf16 and fp16 keep 8 and 11 bits: ten times as much."""
        tolerance = self.config.tolerance * (10.0 if reduced_precision else 1.0)
        return tolerance / 100.0 if equal_cpus else tolerance
