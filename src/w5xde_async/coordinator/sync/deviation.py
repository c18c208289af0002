"""How far two computations of one block are apart: their sums, losses, and which parameters they left untouched."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from w5xde_async.params.layout import Layout
from w5xde_async.plan.audit import Deviation


def compare(
    layout: Layout, mine: Sequence[Tensor], mine_present: frozenset[int], theirs: Sequence[Tensor],
    theirs_present: frozenset[int],
) -> Deviation:  # fmt: skip
    """How far two results of one block, a piece for each result bucket, are apart; a bucket that is not present is zero
    everywhere."""
    sums: dict[str, list[float]] = {"grad": [0.0] * 4, "mean": [0.0] * 4}  # |a|^2, |b|^2, a.b, |a-b|^2
    worst, largest, same, whole = -1, 0.0, True, True
    for bucket in layout.result_buckets:
        number, role = bucket.index, layout.groups[bucket.group].role
        here, there = number in mine_present, number in theirs_present
        if not (here or there):
            continue
        a = mine[number] if here else torch.zeros_like(theirs[number])
        b = theirs[number] if there else torch.zeros_like(mine[number])
        if role == "max":
            if here != there or not torch.equal(a, b):
                worst, same, whole = (number if worst < 0 else worst), False, False
            continue
        equal = here == there and torch.equal(a.view(torch.int32), b.view(torch.int32))
        same = same and equal
        length = float(torch.linalg.vector_norm(a)) ** 2
        if equal:
            terms = (length, length, length, 0.0)
        else:
            other, gap = float(torch.linalg.vector_norm(b)) ** 2, float(torch.linalg.vector_norm(a - b)) ** 2
            terms = (length, other, float(torch.dot(a, b)), gap)
            size = math.inf if math.isnan(gap) else gap
            if size > largest:
                worst, largest = number, size
        for index, term in enumerate(terms):
            sums[role][index] += term
    lengths = [value for role in sums.values() for value in role[:2]]
    finite = [all(map(math.isfinite, lengths[0::2])), all(map(math.isfinite, lengths[1::2]))]
    if finite == [False, False]:
        return Deviation(0.0, 1.0, max(worst, 0), same)
    if not all(finite) or not whole:
        return Deviation(math.inf, 0.0, max(worst, 0), False)
    relative = max(_ratio(gap, length) for _, length, _, gap in sums.values())
    aa, bb, ab, _ = sums["grad"]
    cosine = ab / math.sqrt(aa * bb) if aa and bb else float(aa == bb)
    return Deviation(relative, cosine, max(worst, 0), same)


def _ratio(gap: float, length: float) -> float:
    return 0.0 if gap == 0 else math.inf if length == 0 else math.sqrt(gap / length)


def with_words(
    found: Deviation, mine: Sequence[float], mine_untouched: Sequence[int], theirs: Sequence[float],
    theirs_untouched: Sequence[int],
) -> Deviation:  # fmt: skip
    """Losses and untouched parameters belong to a result too."""
    if set(mine_untouched) != set(theirs_untouched):
        differ = set(mine_untouched) ^ set(theirs_untouched)
        words = f"sums: {found}; but one says that {len(differ)} parameter(s) had no gradient and the other does not"
        return found._replace(relative=math.inf, same_bits=False, words=words)
    gap = 0.0
    for a, b in zip(mine, theirs, strict=True):
        if a == b or (not math.isfinite(a) and not math.isfinite(b)):
            continue
        gap = max(gap, abs(a - b) / max(abs(b), 1.0) if math.isfinite(a - b) else math.inf)
    if gap <= found.relative:
        return found
    return found._replace(relative=gap, words=f"sums: {found}; but losses {gap:.2g} apart, relatively")
