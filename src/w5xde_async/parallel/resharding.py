"""Between the pieces that travel and the boxes that a rank computes with.

Over its link a rank is sent an equal run of every bucket (``data_parallel.shard_of``): few pieces, none larger than
another. Tensor parallelism computes with rows or columns. A column of a matrix would be as many pieces as there are
rows, each a buffer of its own on the wire, so the ranks exchange among themselves what each has for the others, bucket
by bucket, over the group's own connections. Nobody ever holds more of a tensor than its run, its box and one bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from w5xde_async.parallel.group import Group
from w5xde_async.parallel.shard_memory import ShardMemory
from w5xde_async.params.boxes import Box, extents, rectangles
from w5xde_async.params.layout import Bucket, Layout
from w5xde_async.params.shard import Run, Shard

Boxes = Mapping[int, Box]
"""What a rank computes with, by entry."""


class _Piece(NamedTuple):
    """Of an entry: a rectangle that lies in one run of a shard."""

    entry: int
    run: Run
    rectangle: Box


class Resharding:
    """Of one rank. ``shards`` and ``boxes`` are all ranks', in order; they may have boxes in common."""

    def __init__(self, layout: Layout, group: Group, shards: Sequence[Shard], boxes: Sequence[Boxes]) -> None:
        self._layout, self._group, self._shards, self._boxes = layout, group, shards, boxes
        self._holders: dict[tuple[int, Box], list[int]] = {}
        for rank, theirs in enumerate(boxes):
            for entry, box in theirs.items():
                self._holders.setdefault((entry, box), []).append(rank)

    @torch.no_grad()
    def to_boxes(self, bucket: Bucket, memory: ShardMemory, local: Callable[[int], Tensor]) -> None:
        """From all ranks' shards of parameters into this rank's boxes. ``local``: the tensor of a box, by entry."""
        rank, size = self._group.rank, self._group.size
        given = [
            [_in_run(memory, self._layout, piece) for piece in self._pieces(bucket, rank, self._boxes[to])]
            for to in range(size)
        ]
        wanted = [self._pieces(bucket, source, self._boxes[rank]) for source in range(size)]
        targets = [
            [_in_box(local(p.entry), self._boxes[rank][p.entry], p.rectangle) for p in pieces] for pieces in wanted
        ]
        self._exchange(given, targets, self._layout.groups[bucket.group].dtype)

    @torch.no_grad()
    def to_shards(self, bucket: Bucket, local: Callable[[int], Tensor], memory: ShardMemory) -> None:
        """From all ranks' boxes of sums into this rank's shard. Whoever has a value itself takes its own."""
        rank, size = self._group.rank, self._group.size
        given: list[list[Tensor]] = []
        targets: list[list[Tensor]] = []
        for other in range(size):
            mine = {e: box for e, box in self._boxes[rank].items() if self._giver(e, box, other) == rank}
            given.append([
                _in_box(local(p.entry), mine[p.entry], p.rectangle) for p in self._pieces(bucket, other, mine)
            ])  # fmt: skip
            theirs = {e: box for e, box in self._boxes[other].items() if self._giver(e, box, rank) == other}
            targets.append([_in_run(memory, self._layout, p) for p in self._pieces(bucket, rank, theirs)])
        self._exchange(given, targets, self._layout.groups[bucket.group].result_dtype)

    def _giver(self, entry: int, box: Box, to: int) -> int:
        holders = self._holders[entry, box]
        return to if to in holders else holders[to % len(holders)]

    def _pieces(self, bucket: Bucket, owner: int, boxes: Boxes) -> list[_Piece]:
        """What of ``boxes`` lies in a rank's run of a bucket, in order."""
        found: list[_Piece] = []
        for run in self._shards[owner].pieces(bucket):
            for index in bucket.entries:
                entry = self._layout.entries[index]
                if index in boxes:
                    begin, end = max(run.begin - entry.offset, 0), min(run.end - entry.offset, entry.numel)
                    found += [_Piece(index, run, one) for one in rectangles(entry.shape, begin, end, boxes[index])]
        return found

    def _exchange(self, given: list[list[Tensor]], targets: list[list[Tensor]], dtype: torch.dtype) -> None:
        sent = [sum(tensor.numel() for tensor in tensors) for tensors in given]
        received = [sum(tensor.numel() for tensor in tensors) for tensors in targets]
        flat = [tensor.reshape(-1) for tensors in given for tensor in tensors]
        packed = torch.cat(flat) if flat else torch.empty(0, dtype=dtype)
        output = torch.empty(sum(received), dtype=dtype, device=self._group.device)
        self._group.all_to_all(output, packed.to(self._group.device), received, sent)
        at = 0
        for tensors in targets:
            for tensor in tensors:
                tensor.copy_(output[at : at + tensor.numel()].view(tensor.shape))
                at += tensor.numel()


def _in_run(memory: ShardMemory, layout: Layout, piece: _Piece) -> Tensor:
    """A rectangle where it lies in a shard's memory."""
    entry, (group, begin, end) = layout.entries[piece.entry], piece.run
    tensor = memory.piece(group, begin, end)
    strides = [1] * len(entry.shape)
    for axis in range(len(entry.shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * entry.shape[axis + 1]
    first = sum(start * stride for (start, _), stride in zip(piece.rectangle, strides, strict=True))
    offset = tensor.storage_offset() + entry.offset + first - begin
    return tensor.as_strided(extents(piece.rectangle), strides, offset)


def _in_box(tensor: Tensor, box: Box, rectangle: Box) -> Tensor:
    """A rectangle where it lies in the tensor of a box."""
    for axis, ((start, stop), (origin, _)) in enumerate(zip(rectangle, box, strict=True)):
        tensor = tensor.narrow(axis, start - origin, stop - start)
    return tensor
