"""Lack of memory: what it looks like, and into how many pieces microbatches are cut for it."""

from __future__ import annotations

import torch

#: MPS, pinned memory, CUDA's libraries and the CPU's allocator say it in a plain RuntimeError ("MPS backend out of
#: memory", "CUDA error: out of memory", CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_..._ALLOCATION_FAILED,
#: "DefaultCPUAllocator: can't allocate memory").
_SIGNS = ("out of memory", "alloc_failed", "allocation_failed", "can't allocate memory")
_PATIENCE, _MOST_PATIENCE = 32, 1024  # blocks


def lacks_memory(error: BaseException) -> bool:
    """Whether memory was too small, a device's or the host's beside it: with less to do at once it may go well."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(sign in text for sign in _SIGNS)


class Halving:
    """How often microbatches of at most ``samples`` samples are halved: once more where memory lacks, and once less
    when blocks have fitted for a while, in case what took the memory has gone. A try that fails doubles the while.
    """

    def __init__(self, samples: int, splits: int = 0) -> None:
        """``splits``: to begin with."""
        self._samples, self.splits = samples, splits
        self._patience, self._fitted = _PATIENCE, 0
        self.tries = False  #: larger pieces than last fitted, and nobody knows yet whether they will do

    @property
    def pieces(self) -> int:
        """Of a microbatch."""
        return 1 << self.splits

    def lacked(self) -> bool:
        """Memory lacked. False where single samples were computed already."""
        if self.tries:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self.tries, self._fitted = False, 0
        if self.pieces >= self._samples:
            return False
        self.splits += 1
        return True

    def fitted(self) -> None:
        """A block had memory enough."""
        if not self.splits and not self.tries:
            return
        self._fitted += 1
        if self._fitted >= self._patience:
            self._fitted, self.tries = 0, self.splits > 0
            self.splits -= self.tries
