"""Memory for one shard's values: parameters as they come in, sums as they are made and go out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property, partial

import torch
from torch import Tensor

from w5xde_async.params.flat import add, bytes_of
from w5xde_async.params.layout import ALIGN_BYTES
from w5xde_async.params.shard import Shard

_SPARE = 4  # memories that a pool keeps


class ShardMemory:
    """One tensor for each run of a shard, all in one allocation, each aligned.

    Of parameters (each in its group's dtype, all groups) or, ``results``, of a block's sums (``Group.result_dtype``;
    frozen groups have none). Between entries is nothing there (``ResultVector.reset``), as in any block's vector.
    """

    def __init__(
        self, shard: Shard, *, results: bool = False, device: torch.device | str = "cpu", pinned: bool = False
    ) -> None:
        self.shard, self._results = shard, results
        groups = shard.layout.groups
        held = [not (results and groups[run.group].role == "frozen") for run in shard.runs]
        dtypes = [groups[run.group].result_dtype if results else groups[run.group].dtype for run in shard.runs]
        sizes = [
            -(-(run.end - run.begin) * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES if keep else 0
            for run, dtype, keep in zip(shard.runs, dtypes, held, strict=True)
        ]
        memory = torch.empty(max(sum(sizes), 1), dtype=torch.uint8, device=device, pin_memory=pinned)
        if not results:
            memory.zero_()
        self.memory = memory
        self.runs: list[Tensor | None] = []
        at = 0
        for run, dtype, size, keep in zip(shard.runs, dtypes, sizes, held, strict=True):
            nbytes = (run.end - run.begin) * dtype.itemsize
            piece = memory[at : at + nbytes].view(dtype) if keep else None
            self.runs.append(piece)
            at += size
        if results:
            self.reset()

    def reset(self) -> None:
        """Fill sums with nothing, as ``ResultVector.reset`` does."""
        for piece in self.runs:
            if piece is not None:
                piece.fill_(-0.0 if piece.dtype.is_floating_point else torch.iinfo(piece.dtype).min)

    def add(self, right: ShardMemory) -> None:
        """Sums: what is here and what is in ``right``, in the place of what is here."""
        for mine, theirs in zip(self.runs, right.runs, strict=True):
            if mine is not None and theirs is not None:
                add(mine, theirs)

    def entry(self, index: int) -> Tensor:
        """What is held of an entry, flat."""
        return self._entries[index]

    def holds(self, index: int) -> bool:
        """Whether there is anything of an entry."""
        return index in self._entries

    @cached_property
    def _entries(self) -> dict[int, Tensor]:
        layout, found = self.shard.layout, dict[int, Tensor]()
        for (group, begin, end), memory in zip(self.shard.runs, self.runs, strict=True):
            for index in layout.groups[group].entries if memory is not None else ():
                entry = layout.entries[index]
                first, stop = max(begin, entry.offset), min(end, entry.offset + entry.numel)
                if first < stop:
                    assert memory is not None
                    found[index] = memory[first - begin : stop - begin]
        return found

    def piece(self, group: int, begin: int, end: int) -> Tensor:
        """What is held of a group's elements ``begin`` to ``end``, which lie in one run."""
        number = bisect_right(self._starts, (group, begin)) - 1
        memory = self.runs[number]
        assert memory is not None
        first = self.shard.runs[number].begin
        return memory[begin - first : end - first]

    @cached_property
    def _starts(self) -> list[tuple[int, int]]:
        return [run[:2] for run in self.shard.runs]

    @cached_property
    def pieces(self) -> list[list[Tensor]]:
        """For each bucket ``shard.pieces`` of it; none for what is not held."""
        layout = self.shard.layout
        left_out = "frozen" if self._results else ""
        return [
            [self.piece(*run) for run in self.shard.pieces(bucket) if layout.groups[run.group].role != left_out]
            for bucket in layout.buckets
        ]

    @cached_property
    def bytes(self) -> list[list[memoryview]]:
        """The memory of ``pieces``, to be received into."""
        return [[bytes_of(piece) for piece in pieces] for pieces in self.pieces]


class ShardPool:
    """Memories for a shard's sums, for reuse: a fresh one costs page faults. Any thread."""

    def __init__(self, shard: Shard, *, device: torch.device | str = "cpu", pinned: bool = False) -> None:
        self._make = partial(ShardMemory, shard, results=True, device=device, pinned=pinned)
        self._free: list[ShardMemory] = []

    def take(self) -> ShardMemory:
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def give(self, memory: ShardMemory) -> None:
        if len(self._free) < _SPARE:
            self._free.append(memory)

    def release(self, vectors: Iterable[ShardMemory]) -> None:
        """``IslandEngine.release`` of engines whose results lie in memories of this pool."""
        for memory in vectors:
            self.give(memory)
