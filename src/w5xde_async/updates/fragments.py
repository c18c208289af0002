"""A fragment: pieces of the flat vector that are synchronized together, in a turn of their own.

Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", arXiv:2501.18512. Which pieces:
``outer.bucket_fragments``; when each has its turn: ``coordinator.outer.local_step_schedule``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fragment:
    """Ranges [start, stop) of elements of one flat vector, ascending."""

    ranges: tuple[tuple[int, int], ...]

    @cached_property
    def numel(self) -> int:
        """Elements of all ranges."""
        return sum(stop - start for start, stop in self.ranges)

    def gather(self, vector: Tensor) -> Tensor:
        """This fragment's elements, one after the other, copied."""
        return torch.cat([vector[start:stop] for start, stop in self.ranges])

    def scatter_(self, vector: Tensor, values: Tensor) -> None:
        """Put ``values`` where ``gather`` takes them from."""
        at = 0
        for start, stop in self.ranges:
            vector[start:stop].copy_(values[at : at + stop - start])
            at += stop - start
