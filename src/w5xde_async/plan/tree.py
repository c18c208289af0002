"""Blocks and the shape of their sum.

A step has M leaves. A **block** is an aligned run of 2^k leaves, cut at M. Its sum is
``sum(left half) + sum(right half)``; a half that lies beyond M contributes nothing (not zero). The shape depends
on M alone, so whoever computes which block, the bits of the root are the same.

Here are only shapes: which blocks exist and which two are to be added next. The numbers are added elsewhere
(the worker inside a block, ``params.reducer`` above it).
"""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """Leaves ``start`` (inclusive) to ``stop`` (exclusive) of one step."""

    start: int
    stop: int

    @property
    def num_leaves(self) -> int:
        return self.stop - self.start


class Merge(NamedTuple):
    """Add the block that begins at ``right`` to the one that begins at ``left``."""

    left: int
    right: int


def aligned_block(start: int, free_stop: int, num_leaves: int, max_leaves: int) -> Block:
    """The largest block at ``start`` of at most ``max_leaves`` leaves that ends by ``free_stop``.

    Where ``free_stop`` is the step's end, a block may be cut by it.
    """
    span = 1
    while (
        span * 2 <= max_leaves
        and start % (span * 2) == 0
        and (start + span * 2 <= free_stop or free_stop == num_leaves)
        and start + span < free_stop
    ):
        span *= 2
    return Block(start, min(start + span, free_stop))


def right_half(num_leaves: int) -> int:
    """First leaf of the root's right half, which is also the size of the left one; 0 for a root of one leaf."""
    return 0 if num_leaves < 2 else 1 << ((num_leaves - 1).bit_length() - 1)


def carries(index: int) -> int:
    """Additions after leaf ``index`` (0-based in its block) when leaves come in order: a binary counter's carries."""
    return ((index + 1) & -(index + 1)).bit_length() - 1


class Frontier:
    """What of one bucket's tree is filled: a set of maximal complete blocks, each known by its first leaf.

    Invariants: blocks do not overlap; two complete halves never lie side by side unmerged.
    """

    __slots__ = ("_complete", "_level", "num_leaves")

    def __init__(self, num_leaves: int) -> None:
        """Raises ValueError for less than one leaf."""
        if num_leaves < 1:
            raise ValueError("a step has at least one leaf")
        self.num_leaves = num_leaves
        self._level: dict[int, int] = {}  # first leaf -> level of the complete block there
        self._complete = False

    @property
    def complete(self) -> bool:
        """True when the root is summed; it lies at leaf 0."""
        return self._complete

    def fill(self, block: Block) -> list[Merge]:
        """Note that ``block`` is summed. Returns the additions that now can be made, in order."""
        start, merges = block.start, []
        level = (block.num_leaves - 1).bit_length()
        while True:
            span = 1 << level
            if start % (2 * span) == 0:  # a left half, or the root
                right = start + span
                if start == 0 and right >= self.num_leaves:
                    self._complete = True
                    break
                if right < self.num_leaves:
                    if self._level.get(right) != level:
                        break
                    del self._level[right]
                    merges.append(Merge(start, right))
                # a right half beyond the end contributes nothing
            else:
                left = start - span
                if self._level.get(left) != level:
                    break
                del self._level[left]
                merges.append(Merge(left, start))
                start = left
            level += 1
        self._level[start] = level
        return merges
