"""How large a block's results are, and how far two computations of one block are apart: their sums, losses, metrics,
and which parameters they left untouched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from w5xde_async.params.flat import l2_norm
from w5xde_async.params.layout import Layout
from w5xde_async.plan.audit import Deviation

LOSS = "loss"
_LEAST = 1e-4  # numbers smaller than that are compared as ones of that size: what is near zero may be rounding alone


class Reported(Protocol):
    """What whoever computed a block says of its leaves."""

    @property
    def losses(self) -> tuple[float, ...]: ...
    @property
    def metric_names(self) -> tuple[str, ...]: ...
    @property
    def metrics(self) -> tuple[float, ...]: ...


def compare(
    layout: Layout, mine: Sequence[Tensor], mine_present: frozenset[int], theirs: Sequence[Tensor],
    theirs_present: frozenset[int], *, may_overflow: bool = False,
) -> Deviation:  # fmt: skip
    """How far two results of one block, a piece for each result bucket, are apart; a bucket that is not present is zero
    everywhere.

    With a gradient that is not finite the step is skipped, and nothing of the block is used: where neither's is, they
    are not apart. A buffer that is not finite skips no step. So the two are to be so in the same elements (which keep
    their values), and are compared by the others. ``may_overflow``: one may be finite where the other is not.
    """
    sums: dict[str, list[float]] = {"grad": [0.0] * 3, "mean": [0.0] * 3}  # |a|^2, |b|^2, |a-b|^2
    finite = [True, True]  # the gradients
    worst = {"grad": (0.0, 0), "mean": (0.0, 0), "max": (0.0, 0)}  # how far its bucket is apart that is so most, which
    same, whole = True, True
    for bucket in layout.result_buckets:
        number, role = bucket.index, layout.groups[bucket.group].role
        here, there = number in mine_present, number in theirs_present
        if not (here or there):
            continue
        a = mine[number] if here else torch.zeros_like(theirs[number])
        b = theirs[number] if there else torch.zeros_like(mine[number])
        if role == "max":
            equal = here == there and torch.equal(a, b)
            size = 0.0 if equal else math.inf
            whole = whole and equal
        else:
            equal = here == there and torch.equal(a.view(torch.int32), b.view(torch.int32))
            terms, known = _terms(a, b, equal=equal), True
            if not math.isfinite(terms[0] + terms[1]):
                if role == "grad":
                    finite = [one and math.isfinite(term) for one, term in zip(finite, terms, strict=False)]
                else:
                    both = torch.isfinite(a), torch.isfinite(b)
                    known = may_overflow or torch.equal(*both)
                    whole = whole and known
                    terms = _terms(*(one.where(both[0] & both[1], 0.0) for one in (a, b)), equal=equal)
            size = terms[2] if known and not math.isnan(terms[2]) else math.inf
            for index, term in enumerate(terms):
                sums[role][index] += term
        same = same and equal
        if size > worst[role][0]:
            worst[role] = size, number
    furthest = max(worst.values())[1]
    if not finite[0] and (may_overflow or not finite[1]):
        return Deviation(0.0, 1.0, furthest, same)
    if not whole or not (all(finite) or may_overflow):
        return Deviation(math.inf, 0.0, furthest, False)
    if not finite[1]:
        sums["grad"] = [0.0] * 3
    # Of sums of one kind alone it can be said which are further apart: buffers may be a million times a gradient.
    relative, role = max((_ratio(gap, length), role) for role, (_, length, gap) in sums.items())
    aa, bb, gap = sums["grad"]
    cosine = max(-1.0, (aa + bb - gap) / (2 * math.sqrt(aa) * math.sqrt(bb))) if aa and bb else float(aa == bb)
    return Deviation(relative, cosine, worst[role][1], same)


def weighed(piece: Tensor, role: str) -> tuple[float, Tensor | None]:
    """The L2 norm of a bucket of floats, and where it is not finite, None for nowhere. The norm of a gradient is not
    finite either, then; that of buffers is of their other elements. However large values are: it is finite itself."""
    norm = l2_norm(piece)
    if math.isfinite(norm):
        return norm, None
    known = torch.isfinite(piece)
    return (math.inf if role == "grad" else l2_norm(piece.where(known, 0.0))), ~known


def _terms(a: Tensor, b: Tensor, *, equal: bool) -> tuple[float, float, float]:
    """|a|^2, |b|^2 and |a-b|^2."""
    length = l2_norm(a) ** 2
    return (length, length, 0.0) if equal else (length, l2_norm(b) ** 2, l2_norm(a - b) ** 2)


def _ratio(gap: float, length: float) -> float:
    return 0.0 if gap == 0 else math.inf if length == 0 else math.sqrt(gap / length)


def with_words(
    found: Deviation, mine: Sequence[float], mine_untouched: Sequence[int], theirs: Sequence[float],
    theirs_untouched: Sequence[int], *, may_overflow: bool = False,
) -> Deviation:  # fmt: skip
    """Losses and untouched parameters belong to a result too. ``may_overflow``: one loss may, where the other does
    not."""
    if set(mine_untouched) != set(theirs_untouched):
        differ = set(mine_untouched) ^ set(theirs_untouched)
        words = f"sums: {found}; but one says that {len(differ)} parameter(s) had no gradient and the other does not"
        return found._replace(relative=math.inf, same_bits=False, words=words)
    gap = 0.0
    for a, b in zip(mine, theirs, strict=True):
        overflows = not math.isfinite(a), not math.isfinite(b)
        if a == b or all(overflows) or (may_overflow and any(overflows)):
            continue
        gap = max(gap, abs(a - b) / max(abs(b), 1.0) if math.isfinite(a - b) else math.inf)
    if gap <= found.relative:
        return found
    return found._replace(relative=gap, words=f"sums: {found}; but losses {gap:.2g} apart, relatively")


def numbers_apart(mine: Reported, theirs: Reported, tolerance: float) -> dict[str, tuple[float, float]]:
    """What two computations of a block report otherwise, and the first two values that differ: by ``LOSS``, and the
    metrics by ``name_of_metric``. A metric that one does not have is one that is NaN in every leaf, as in ``jobs.md``.

    Each is compared beside the largest of its own block, which at a small loss is far less than ``with_words`` allows.
    """
    apart = {}
    ours, others = _columns(mine), _columns(theirs)
    for name in {**ours, **others}:
        nothing = (math.nan,) * len(mine.losses)
        pairs = list(zip(ours.get(name, nothing), others.get(name, nothing), strict=True))
        scale = max([_LEAST, *(abs(value) for pair in pairs for value in pair if math.isfinite(value))])
        differing = [(a, b) for a, b in pairs if not _is_near(a, b, tolerance * scale)]
        if differing:
            apart[name] = differing[0]
    return apart


def name_of_metric(name: str) -> str:
    """As people are told of it: it cannot be taken for the loss that the run itself knows."""
    return f"metric {name!r}"


def _columns(reported: Reported) -> dict[str, tuple[float, ...]]:
    count = len(reported.metric_names)
    metrics = {name_of_metric(name): reported.metrics[at::count] for at, name in enumerate(reported.metric_names)}
    return {LOSS: reported.losses, **metrics}


def _is_near(a: float, b: float, distance: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= distance
