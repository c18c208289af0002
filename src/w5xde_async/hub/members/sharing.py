"""What members on this machine have together with the coordinator: its parameters, and each its results.

A member is told of the parameters' segment where its link begins on this machine. Whether it could open that, and is of
the same user, is shown by the segment in which its results lie (docs/decisions/0029-shared-memory.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from w5xde_async.errors import MalformedFrame
from w5xde_async.params.layout import Layout
from w5xde_async.params.slots import SHARED_SLOTS, slot_bytes, slots_in
from w5xde_async.segments import Opened, Segment, Unshared
from w5xde_async.wire.handshake import prove
from w5xde_async.wire.messages import Result


def witness(secret: bytes, nonce: bytes) -> bytes:
    """The secret of a worker's segment: made under that of the parameters' segment, for the link of ``nonce``."""
    return prove(secret, "memory", nonce, b"")


class SharedResults:
    """One worker's results, where it writes them. Mapped as long as this or a piece of it is there."""

    def __init__(self, parameters: Segment, told: Sequence[int], nonce: bytes, layout: Layout) -> None:
        """``told``: of READY; ``nonce``: of its HELLO. Raises Unshared."""
        opened = Opened(told, SHARED_SLOTS * slot_bytes(layout))
        try:
            if not opened.has(witness(parameters.secret, nonce)):
                raise Unshared("its memory does not show that it has read the parameters'")
            memory = opened.map()
        finally:
            opened.close()
        self._vectors, self._num_buckets = slots_in(layout, memory, SHARED_SLOTS), len(layout.result_buckets)

    def find(self, result: Result) -> Tensor:
        """Where the bucket of a result lies, to be read: to write there ends the process. Raises MalformedFrame."""
        if not 1 <= result.slot <= len(self._vectors) or result.bucket >= self._num_buckets:
            raise MalformedFrame(f"RESULT of bucket {result.bucket} in vector {result.slot} of the shared memory")
        return self._vectors[result.slot - 1].buckets[result.bucket]
