"""Lack of memory: what it looks like, and into how many pieces microbatches are cut for it."""

from __future__ import annotations

import math

import torch

#: MPS, pinned memory, CUDA's libraries and the CPU's allocator say it in a plain RuntimeError ("MPS backend out of
#: memory", "CUDA error: out of memory", CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_..._ALLOCATION_FAILED,
#: "DefaultCPUAllocator: can't allocate memory").
_SIGNS = ("out of memory", "alloc_failed", "allocation_failed", "can't allocate memory")
_PATIENCE, _MOST_PATIENCE = 32, 1024  # blocks


def lacks_memory(error: BaseException) -> bool:
    """Whether memory was too small, a device's or the host's beside it: with less to do at once it may go well."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(sign in text for sign in _SIGNS)


class Halving:
    """How often microbatches of at most ``samples`` samples are halved: once more where memory lacks, and once less
    when blocks have fitted for a while, in case what took the memory has gone. A try that fails doubles the while.

    The job's code may refuse small pieces (batch norm refuses single samples). A block in which it does is tried with
    larger ones again, and halved no further than those; the next one may be.
    """

    def __init__(self, samples: int, splits: int = 0) -> None:
        """``splits``: to begin with."""
        self._samples, self.splits = samples, splits
        self._patience, self._fitted = _PATIENCE, 0
        self._has_lacked, self._most = False, math.inf  # halvings, in this block
        self.tries = False  #: larger pieces than last fitted, and nobody knows yet whether they will do

    @property
    def pieces(self) -> int:
        """Of a microbatch."""
        return 1 << self.splits

    @property
    def size(self) -> int:
        """Most samples of a piece."""
        return -(-self._samples // self.pieces)

    def begin(self) -> None:
        """A block begins."""
        self._most = math.inf

    def lacked(self) -> bool:
        """Memory lacked. False where no smaller pieces can be computed."""
        if self.tries:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self.tries, self._fitted, self._has_lacked = False, 0, True
        if self.size == 1 or self.splits >= self._most:
            return False
        self.splits += 1
        return True

    def refused(self) -> bool:
        """The job's code raised something else on these pieces. False where nothing was halved for lack of memory."""
        if not self.splits or not self._has_lacked:
            return False
        self.splits -= 1
        self._most, self.tries, self._fitted = self.splits, True, 0
        return True

    def fitted(self) -> None:
        """A block had memory enough."""
        if not self.splits and not self.tries:
            return
        self._fitted += 1
        if self._fitted >= self._patience:
            self._fitted, self.tries = 0, self.splits > 0
            self.splits -= self.tries
