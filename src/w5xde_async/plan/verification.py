"""What becomes of a finished block: the decisions, from plain numbers.

Every finished block is looked at before anything of it counts. Most count at once. The others are **held**
(``plan.audit.Why`` names the reasons): another worker computes them too (``Audit``), and where the two do not agree, or
nobody else can, the coordinator does (``Recompute``), which is trusted. A worker that is proven wrong is quarantined
(``Quarantine``); a block that does not hold is computed again (``Discard``).

A block that counts, counts as it came: nothing is scaled or left out, so an honest run has the same bits with and
without this.

Like is compared with like (``Origin``). Devices of another kind draw other random numbers from the same seed, and
smaller pieces of a microbatch have other masks and batch statistics: such results may agree, but where they do not,
nobody is wrong. What only devices of one kind compute alike, the most of them decide.

Results that a lossy codec wrote are never alike: what was left out before is in them, and nothing is compared. There,
and where nobody computes alike, the coordinator's own computation only tells how large the block's gradient is, and
whether it is finite.

Pure: whoever calls has measured norms and deviations, and does what is decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from w5xde_async.plan.audit import Deviation, HeldBlock, Why
from w5xde_async.plan.numerics import EXACT

_SIZE_FACTOR = 10.0  # a result of which only the size is known may be that much larger than the gradient and usual ones
_MOST_STRIKES = 3  # of those that are larger, in a row, or next to nothing
_NEXT_TO_NOTHING = 1e-6  # of what is usual, and of what the block gives: other random numbers do not come to that


@dataclass(frozen=True, slots=True)
class Count:
    """The block counts as it came."""

    reason: str


@dataclass(frozen=True, slots=True)
class Discard:
    """The block does not hold: its leaves are leased again. Its worker is told the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Audit:
    """Another worker computes the block too; until then it does not count."""

    why: Why

    @property
    def reason(self) -> str:
        return self.why.value


@dataclass(frozen=True, slots=True)
class Recompute:
    """The coordinator computes the block too; until then it does not count."""

    why: Why
    reason: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The worker was proven wrong: it is quarantined."""

    worker: str
    reason: str


LEFT_OUT = "its step is left out, whatever it holds"

Decision = Count | Discard | Audit | Recompute | Quarantine


class Origin(NamedTuple):
    """What honest results of one block may differ by.

    ``kind``: of the devices it was computed on ("" where they are several); ``splits``: halvings of its microbatches
    (-1: unknown), and ``drew``: whether random numbers are in it, by who has finished it; ``numerics`` ("" where they
    are several): how its sums were made.
    """

    kind: str
    splits: int
    drew: bool
    numerics: str = EXACT

    def is_like(self, other: Origin) -> bool:
        """Whether two honest results of these origins are alike."""
        same_numbers = self.kind == other.kind != "" or not (self.drew and other.drew)
        return self.splits == other.splits >= 0 and same_numbers and self.numerics == other.numerics != ""


class Size(NamedTuple):
    """The norm of one kind of sums (gradients, or means of buffers), as of a mean over the block's samples.

    ``bound``: the largest usual one, by median and spread of the last ones; None while none is known.
    """

    norm: float
    bound: float | None

    @property
    def vanishes(self) -> bool:
        """Whether it is next to nothing beside what is usual."""
        return self.bound is not None and self.norm <= _NEXT_TO_NOTHING * self.bound


@dataclass(frozen=True, slots=True)
class Measured:
    """A finished block in numbers. ``finite``: all gradients and losses are so, and so are buffers, but for elements in
    which others' were not, either. ``sizes``: by role, of buffers without what is not finite."""

    finite: bool
    sizes: Mapping[str, Size]

    @property
    def oddity(self) -> Why | None:
        """What is unusual about it."""
        if not self.finite:  # a loss alone too: honest gradients of such a loss are not finite either, mostly
            return Why.NOT_FINITE
        for norm, bound in self.sizes.values():
            if bound is None:
                return Why.FIRST
            if norm > bound:
                return Why.NORM
        return None

    @property
    def vanishes(self) -> bool:
        """Whether all of it is next to nothing, as of a device that gives zeros."""
        return all(size.vanishes for size in self.sizes.values())


def when_finished(
    block: Measured,
    *,
    others: bool,
    sampled: bool,
    exact: bool,
    done_again: bool,
    comparable: bool = True,
    left_out: bool = False,
) -> Count | Audit | Recompute:
    """A block is finished.

    ``others``: another worker is here that could compute it. ``sampled``: it was drawn by chance. ``exact``: two honest
    results of it are alike. ``done_again``: nobody could say what was wrong with it the last time. ``comparable``: one
    of the others, or the coordinator, computes it alike. ``left_out``: its step is, since it and another that
    counts have gradients that are not finite.
    """
    if not others:
        return Count("no other worker is here")
    why = None if done_again else block.oddity
    if left_out and why is Why.NOT_FINITE:
        return Count(LEFT_OUT)
    if why is None:
        if sampled and exact and (comparable or block.vanishes):
            return Audit(Why.SAMPLED) if comparable else Recompute(Why.VANISHING, Why.VANISHING.value)
        return Count("nothing is unusual about it")
    return Audit(why) if exact else Recompute(why, why.value)


def when_nobody_else_can(why: Why, *, others: bool, can_recompute: bool) -> Count | Recompute:
    """No other worker can compute a held block: it counts where there is none, or where it was not odd.

    ``others``: some are here, or were asked. ``can_recompute``: the coordinator can.
    """
    if why in (Why.NORM, Why.NOT_FINITE, Why.VANISHING) and others and can_recompute:
        return Recompute(why, "no other worker can compute it")
    return Count("no other worker can compute it")


def when_compared(
    why: Why, between: Deviation, *, agreed: bool, alike: bool = True, can_judge: bool = True, vanishes: bool = False
) -> Count | Recompute:
    """Another worker has computed it too.

    ``alike``: two honest results are. ``can_judge``: an honest one is like what the coordinator would compute.
    ``vanishes``: it is next to nothing beside what is usual.
    """
    if agreed:
        return Count("another worker computed the same")
    if not (alike or can_judge or vanishes or why in (Why.NORM, Why.NOT_FINITE)):
        return Count("it cannot be compared with what others compute")
    return Recompute(why, f"another worker computed something else ({between})")


def when_disputed(
    held: HeldBlock, between: Deviation, votes: Mapping[str, tuple[int, int]]
) -> list[Count | Discard | Quarantine]:
    """Two that should be alike are not, and the coordinator's would be like neither: only others of their kind can say.

    ``votes``: of the two workers, how many members of their kind ever differed so from each, and how many have a say in
    it. Whoever more than half of them differ from is wrong.
    """
    reason = f"others of its kind compute something else than it does, as for step {held.step} ({between})"
    wrong = [worker for worker, (against, of_kind) in votes.items() if 2 * against > of_kind]
    return [Discard("another worker computed something else"), *(Quarantine(worker, reason) for worker in wrong)]


def when_not_recomputed(between: Deviation | None) -> Discard:
    """The coordinator cannot compute it either. ``between``: it and what another worker computed."""
    return Discard("it is odd" if between is None else "another worker computed something else")


def when_impossible(held: HeldBlock, splits: int, refused: str) -> list[Count | Discard | Quarantine]:
    """The coordinator can compute it, but not in the pieces in which its worker says that it did.

    ``splits``: the halvings that it claims. ``refused``: what the job's code raises on such pieces; who had computed
    them would have failed with it.
    """
    claim = f"it says that it computed microbatches in 2^{splits} pieces, which the job refuses ({refused[:300]})"
    return [Discard(claim), Quarantine(held.worker, f"step {held.step}: {claim}")]


def when_recomputed(
    held: HeldBlock, own: Deviation, second: Deviation | None, tolerance: float, *, proven: bool = True
) -> list[Count | Discard | Quarantine]:
    """The coordinator has computed it. ``own``, ``second``: how far the block, and the second computation, are off.
    ``proven``: in no pieces of microbatches does the block give what was sent of it."""
    decisions: list[Count | Discard | Quarantine] = []
    wrong: dict[str, Deviation] = {}
    if own.relative <= tolerance:
        decisions.append(Count("the coordinator computed the same"))
    else:
        decisions.append(Discard(f"the coordinator computed something else ({own})"))
        if proven:
            wrong[held.said_by(own)] = own
    if second is not None and held.second and not second.relative <= tolerance:
        wrong[held.second] = second
    for worker, found in wrong.items():
        reason = f"its result for step {held.step} is not what the block gives ({found})"
        decisions.append(Quarantine(worker, reason))
    return decisions


def is_far_larger(sizes: Mapping[str, Size], true: Mapping[str, float]) -> bool:
    """Whether a result is larger than one may be of a gradient of the ``true`` sizes, by role."""
    return any(size.norm > _SIZE_FACTOR * max(true.get(role, 0.0), size.bound or 0.0) for role, size in sizes.items())


def is_next_to_nothing(sizes: Mapping[str, Size], true: Mapping[str, float]) -> bool:
    """Whether a result is so beside a gradient of the ``true`` sizes, by role, which is not."""
    return bool(sizes) and all(size.norm < _NEXT_TO_NOTHING * true.get(role, 0.0) for role, size in sizes.items())


def when_only_sizes_compare(
    held: HeldBlock, not_finite: Sequence[int], worker: str, *, true_is_finite: bool, strikes: int, alike: bool = True,
    may_overflow: bool = False, size: str = "far larger than", in_a_row: bool = True,
) -> list[Count | Discard | Quarantine]:  # fmt: skip
    """The coordinator has computed what a worker has sent by a lossy codec, or not ``alike``: other random numbers.

    ``true_is_finite``: the gradient that it has computed. ``not_finite``: buckets of the result that hold an infinity
    or a NaN, where its own do not; without a lie that ``may_overflow``.
    ``strikes``: results of ``worker``, who has sent what is too large or too small, this one among them, that were not
    of the ``size`` that their blocks give, in words: ``in_a_row``, or of those that were looked at.
    """
    if not true_is_finite:
        return [Count("training diverges")]  # nobody is to blame
    if not_finite and may_overflow:
        return [Count("it may overflow where the coordinator's does not")]
    if not_finite and alike:
        reason = f"its result for step {held.step} is not finite, and the block is"
        return [Discard("it is not finite, and the block is"), Quarantine(held.said_by(not_finite[0]), reason)]
    if not strikes:
        return [Count("it is about as large as what the coordinator computed")]
    decisions: list[Count | Discard | Quarantine] = [Discard(f"it is {size} what the block gives")]
    if strikes >= _MOST_STRIKES:
        those = "in a row" if in_a_row else "that were looked at"
        reason = f"{strikes} results {those}, the last for step {held.step}, were {size} what their blocks give"
        decisions.append(Quarantine(worker, reason))
    return decisions
