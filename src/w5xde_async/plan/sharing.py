"""How a step is dealt out where results cost more on their way than leaves to compute: one block a worker, at once.

A result is as large as the model, however small its block. Blocks are aligned (``plan.tree``), so shares cannot be cut
as one likes: free blocks are halved until each fits a worker, and all are done as soon as can be.

Pure: costs come in, blocks go out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from w5xde_async.plan.tree import Block, aligned_block

_CLOSER, _CLOSEST = 1.1, 4  # the time that suffices is sought in such steps, and then by so many halvings


class Cost(NamedTuple):
    """What work costs a worker: seconds for each leaf, and for each lease beside them."""

    leaf_s: float
    lease_s: float

    def of(self, leaves: float) -> float:
        """Seconds of one lease of so many leaves."""
        return self.lease_s + self.leaf_s * leaves

    def within(self, seconds: float) -> float:
        """Leaves of one lease that takes so long."""
        return (seconds - self.lease_s) / self.leaf_s


def finish_s(costs: Iterable[Cost], leaves: float) -> float:
    """Seconds until ``leaves``, cut as one likes, are done, one lease a worker; who takes longer for it has none.

    Infinite where nobody is there for them.
    """
    done_s, rate, owed = math.inf, 0.0, leaves
    for leaf_s, lease_s in sorted(costs, key=lambda cost: cost.lease_s):
        if lease_s >= done_s:
            break
        rate, owed = rate + 1 / leaf_s, owed + lease_s / leaf_s
        done_s = owed / rate
    return done_s


def share_out(
    runs: Iterable[Block], step_leaves: int, most: int, costs: Mapping[str, Cost], several: Collection[str] = ()
) -> dict[str, list[Block]]:
    """The free ``runs`` of a step, dealt out to workers in blocks of at most ``most`` leaves.

    ``several``: workers that may have more than one block. Others have one at most, unless there are more pieces than
    workers. Somebody has every leaf, unless nobody is there.
    """
    pieces = [piece for run in runs for piece in _pieces(run, step_leaves, most)]
    if not costs or not pieces:
        return {}
    if len(pieces) > len(costs):
        several = costs.keys()
    too_short_s = seconds = finish_s(costs.values(), sum(piece.num_leaves for piece in pieces))
    while (dealt := _dealt(pieces, step_leaves, costs, several, seconds)) is None:
        too_short_s, seconds = seconds, seconds * _CLOSER
    for _ in range(_CLOSEST):
        middle_s = (too_short_s + seconds) / 2
        better = _dealt(pieces, step_leaves, costs, several, middle_s)
        if better is None:
            too_short_s = middle_s
        else:
            dealt, seconds = better, middle_s
    return dealt


def _dealt(
    pieces: Sequence[Block], step_leaves: int, costs: Mapping[str, Cost], several: Collection[str], seconds: float
) -> dict[str, list[Block]] | None:
    """Whoever can do most takes the largest piece that it can do in ``seconds``. None where something is left."""
    rooms = [(-cost.within(seconds), worker) for worker, cost in costs.items() if cost.within(seconds) >= 1]
    heapq.heapify(rooms)
    free = [(-piece.num_leaves, piece) for piece in pieces]
    heapq.heapify(free)
    dealt: dict[str, list[Block]] = {}
    while free and rooms:
        room, worker = heapq.heappop(rooms)
        size, block = heapq.heappop(free)
        while size < room:
            half = aligned_block(block.start, block.stop, step_leaves, 1 << ((-size - 1).bit_length() - 1))
            for part in (half, Block(half.stop, block.stop)):
                heapq.heappush(free, (-part.num_leaves, part))
            size, block = heapq.heappop(free)
        dealt.setdefault(worker, []).append(block)
        if worker in several:
            cost = costs[worker]
            left = -room + size - cost.lease_s / cost.leaf_s
            if left >= 1:
                heapq.heappush(rooms, (-left, worker))
    return None if free else dealt


def _pieces(run: Block, step_leaves: int, most: int) -> list[Block]:
    """A free run as the largest aligned blocks of at most ``most`` leaves."""
    pieces, start = [], run.start
    while start < run.stop:
        pieces.append(aligned_block(start, run.stop, step_leaves, min(most, 2 * step_leaves)))
        start = pieces[-1].stop
    return pieces
