"""Fragments: strided groups of layers of the flat vector, each synchronized in its own turn.

Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", arXiv:2501.18512: layer l is in fragment
l mod P, so that each fragment has early and late layers. Fragment p is due at inner steps t with (t - t_p) mod H = 0;
the offsets t_p = floor(p H / P) spread the turns evenly, and the peak of what is sent falls by P.
Pure functions of layout and step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from w5xde_async.params.layout import Layout

__all__ = ["Fragment", "FragmentSchedule", "fragments_of", "layers_of"]

_NUMBERED = re.compile(r"(?:.*?\.)?\d+(?=\.)")


@dataclass(frozen=True)
class Fragment:
    """Ranges [start, stop) of elements of one flat vector, ascending."""

    index: int
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


def layers_of(layout: Layout, group: int) -> list[tuple[int, int]]:
    """Ranges of one group's layers, ascending, which together are the whole group (padding goes with what it follows).

    A layer is what shares a name up to its first number (``blocks.3.attn.weight``: ``blocks.3``), or else its module.
    """
    starts: list[int] = []
    before = None
    for index in layout.groups[group].entries:
        entry = layout.entries[index]
        numbered = _NUMBERED.match(entry.name)
        key = numbered[0] if numbered else entry.name.rpartition(".")[0]
        if key != before:
            starts.append(entry.offset)
        before = key
    return list(zip(starts, [*starts[1:], layout.groups[group].numel], strict=True))


def fragments_of(layers: Sequence[tuple[int, int]], num_fragments: int) -> tuple[Fragment, ...]:
    """Strided groups of layers. Raises ValueError where there are fewer layers than fragments."""
    if not 1 <= num_fragments <= len(layers):
        raise ValueError(f"{num_fragments} fragments of {len(layers)} layers")
    return tuple(Fragment(index, tuple(layers[index::num_fragments])) for index in range(num_fragments))


@dataclass(frozen=True, kw_only=True)
class FragmentSchedule:
    """``period`` is H, inner steps between two turns of one fragment."""

    num_fragments: int
    period: int

    def __post_init__(self) -> None:
        if self.num_fragments < 1 or self.period < 1:
            raise ValueError("num_fragments and period are at least 1")

    def due(self, step: int) -> tuple[int, ...]:
        """Fragments whose Deltas are sent after ``step`` inner steps (of the run, the same count on all workers)."""
        if step < 1:
            return ()
        offsets = (index * self.period // self.num_fragments for index in range(self.num_fragments))
        return tuple(index for index, offset in enumerate(offsets) if (step - offset) % self.period == 0)
