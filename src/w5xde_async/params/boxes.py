"""Boxes of tensors, and what of a box lies in a run of the flat layout. Pure.

A rank that computes with a part of a tensor that is not contiguous in the layout (some columns of a matrix) holds a
box: a range of indices for each axis. A run of the tensor's flat elements meets a box in few rectangles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, int], ...]
"""First index and the one behind the last, for each axis. Of a scalar: no axes."""


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple((0, extent) for extent in shape)


def extents(box: Box) -> tuple[int, ...]:
    """The shape of what is in a box."""
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    """How many elements are in a box."""
    return math.prod(stop - start for start, stop in box)


def rectangles(shape: Sequence[int], begin: int, end: int, box: Box) -> Iterator[Box]:
    """The boxes within ``box`` that hold just those of its elements whose flat positions are ``begin`` to ``end``, in
    the order of these; at most two for each axis, and one more."""
    if begin >= end or not numel(box):
        return
    if not shape:
        yield ()
        return
    width = math.prod(shape[1:])
    (low, high), inner = box[0], box[1:]
    first, stop = -(-begin // width), end // width  # rows that are whole in the run
    if first > stop:  # it lies within one row
        if low <= stop < high:
            row = stop * width
            yield from (((stop, stop + 1), *rest) for rest in rectangles(shape[1:], begin - row, end - row, inner))
        return
    if begin % width and low <= first - 1 < high:
        row = (first - 1) * width
        yield from (((first - 1, first), *rest) for rest in rectangles(shape[1:], begin - row, width, inner))
    if max(low, first) < min(high, stop):
        yield ((max(low, first), min(high, stop)), *inner)
    if end % width and low <= stop < high:
        yield from (((stop, stop + 1), *rest) for rest in rectangles(shape[1:], 0, end - stop * width, inner))
