"""Which leaves of a block each rank of an island works on."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from w5xde_async.plan.tree import Block, right_half


class Share(IntEnum):
    """How a block's leaves are divided among ranks. On the wire in READY; never renumbered."""

    BLOCK = 0  #: each rank has a block of the tree to itself, or none
    TURNS = 1  #: rank r has leaf r, r + R and so on, counted from the block's first
    ALL = 2  #: every rank works on every leaf


def leaves_of(block: Block, share: Share, ranks: int, together: int = 1) -> list[Sequence[int]]:
    """For each rank the leaves, numbered in the step, whose data it needs, in the order in which it works on them.

    ``together``: so many neighbours work on the same leaves, as one; it divides ``ranks``. Under ``TURNS`` every rank
    takes part in every round. A rank for which the last round has no leaf works on the round's first as well, and what
    it gets counts for nothing.
    """
    if together > 1:
        return [leaves for leaves in leaves_of(block, share, ranks // together) for _ in range(together)]
    if share is Share.ALL:
        return [range(block.start, block.stop)] * ranks
    if share is Share.BLOCK:
        return _split(block, ranks)
    return [
        [first + rank if first + rank < block.stop else first for first in range(block.start, block.stop, ranks)]
        for rank in range(ranks)
    ]


def _split(block: Block, ranks: int) -> list[Sequence[int]]:
    if ranks == 1:
        return [range(block.start, block.stop)]
    left = right_half(block.num_leaves)
    if not left:
        return [range(block.start, block.stop), *([range(0)] * (ranks - 1))]
    to_left = min(max(1, round(ranks * left / block.num_leaves)), ranks - 1)
    middle = block.start + left
    return _split(Block(block.start, middle), to_left) + _split(Block(middle, block.stop), ranks - to_left)
