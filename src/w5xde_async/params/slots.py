"""Result vectors by number, one behind the other in one piece of memory that a worker writes and others read."""

from __future__ import annotations

from torch import Tensor

from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Layout

#: Vectors of a worker's shared memory; those of a block under way, and those whose fate is not known.
SHARED_SLOTS = 16

_PAGE = 4096


def slot_bytes(layout: Layout) -> int:
    """From one result vector to the next."""
    return -(-max(layout.vector_bytes, 1) // _PAGE) * _PAGE


def slots_in(layout: Layout, memory: Tensor, count: int) -> list[ResultVector]:
    """``count`` vectors in ``memory``, which has ``count * slot_bytes(layout)`` bytes."""
    size, nbytes = slot_bytes(layout), max(layout.vector_bytes, 1)
    return [
        ResultVector(layout, memory=memory[number * size : number * size + nbytes], slot=number)
        for number in range(count)
    ]
