"""Which values of a layout one rank of an island holds.

A shard is a list of **runs**: contiguous pieces of the layout's groups. The shards of an island's ranks divide every
group among them, padding included, so that each value has one owner: its parameters go to that rank alone, and its sum
comes from there.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

from w5xde_async.errors import MalformedFrame
from w5xde_async.params.layout import Bucket, Layout

_MOST_RUNS = 1 << 17


class Run(NamedTuple):
    """Elements ``begin`` to ``end`` of a group."""

    group: int
    begin: int
    end: int


@dataclass(frozen=True)
class Shard:
    """One rank's part of a layout. ``runs`` are sorted and do not touch each other."""

    layout: Layout
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, layout: Layout, runs: Iterable[tuple[int, int, int]]) -> Self:
        """From runs in any order; empty ones are left out, neighbours become one.

        Raises ValueError where one lies outside of its group, or two overlap.
        """
        found: list[Run] = []
        for group, begin, end in sorted(runs):
            if begin == end:
                continue
            if not (0 <= group < len(layout.groups) and 0 <= begin < end <= layout.groups[group].numel):
                raise ValueError(f"elements {begin} to {end} of group {group} are none of the layout's")
            if found and found[-1].group == group and begin <= found[-1].end:
                if begin < found[-1].end:
                    raise ValueError(f"element {begin} of group {group} is named twice")
                found[-1] = found[-1]._replace(end=end)
            else:
                found.append(Run(group, begin, end))
        return cls(layout, tuple(found))

    @classmethod
    def whole(cls, layout: Layout) -> Self:
        """Everything."""
        return cls.of(layout, ((group.index, 0, group.numel) for group in layout.groups))

    @property
    def packed(self) -> tuple[int, ...]:
        """The runs as one row of numbers."""
        return tuple(number for run in self.runs for number in run)

    @classmethod
    def parse(cls, layout: Layout, packed: Sequence[int]) -> Self:
        """Rebuild from ``packed``. Raises MalformedFrame for anything else."""
        if len(packed) % 3 or len(packed) > 3 * _MOST_RUNS:
            raise MalformedFrame(f"a shard of {len(packed)} numbers")
        try:
            return cls.of(layout, zip(packed[::3], packed[1::3], packed[2::3], strict=True))
        except ValueError as error:
            raise MalformedFrame(f"shard: {error}") from None

    def pieces(self, bucket: Bucket) -> tuple[Run, ...]:
        """What of a bucket is in this shard, in order."""
        return self._pieces[bucket.index]

    def numel(self, bucket: Bucket) -> int:
        """How many elements of a bucket are in this shard."""
        return sum(run.end - run.begin for run in self._pieces[bucket.index])

    @cached_property
    def buckets(self) -> frozenset[int]:
        """The buckets of which it has anything."""
        return frozenset(index for index, pieces in enumerate(self._pieces) if pieces)

    @cached_property
    def own(self) -> Layout:
        """What it holds as a layout by itself: the runs one behind the other, under the same numbers of entries, groups
        and buckets. An entry is flat and has the values that are here, which may be none."""
        whole = self.layout
        before: list[list[tuple[int, int]]] = [[] for _ in whole.groups]  # begin of a run, elements before it
        sizes = [0] * len(whole.groups)
        for group, begin, end in self.runs:
            before[group].append((begin, sizes[group]))
            sizes[group] += end - begin
        ends = {(run.group, run.begin): run.end for run in self.runs}

        def at(group: int, element: int) -> int:
            found = bisect_right(before[group], (element, sizes[group])) - 1
            if found < 0:
                return 0
            begin, held = before[group][found]
            return held + min(element, ends[group, begin]) - begin

        def cut(group: int, offset: int, numel: int) -> tuple[int, int]:
            first = at(group, offset)
            return first, at(group, offset + numel) - first

        entries = []
        for entry in whole.entries:
            offset, numel = cut(entry.group, entry.offset, entry.numel)
            entries.append(replace(entry, offset=offset, numel=numel, shape=(numel,)))
        buckets = []
        for bucket in whole.buckets:
            offset, numel = cut(bucket.group, bucket.offset, bucket.numel)
            buckets.append(replace(bucket, offset=offset, numel=numel))
        groups = tuple(replace(group, numel=size) for group, size in zip(whole.groups, sizes, strict=True))
        return Layout(tuple(entries), groups, tuple(buckets), whole.bucket_bytes)

    @cached_property
    def digest(self) -> str:
        """16 hex digits that tell it from other shards, and from those of other layouts."""
        told = self.layout.fingerprint + ",".join(map(str, self.packed)).encode()
        return hashlib.blake2b(told, digest_size=8).hexdigest()

    @cached_property
    def _pieces(self) -> list[tuple[Run, ...]]:
        starts = [(run.group, run.begin) for run in self.runs]
        found: list[tuple[Run, ...]] = []
        for bucket in self.layout.buckets:
            begin, end = bucket.offset, bucket.offset + bucket.numel
            at = max(bisect_right(starts, (bucket.group, begin)) - 1, 0)
            pieces: list[Run] = []
            while at < len(self.runs) and self.runs[at][:2] < (bucket.group, end):
                run = self.runs[at]
                if run.group == bucket.group and run.end > begin:
                    pieces.append(Run(run.group, max(run.begin, begin), min(run.end, end)))
                at += 1
            found.append(tuple(pieces))
        return found


def check_division(layout: Layout, shards: Iterable[Shard]) -> None:
    """Raises ValueError where ``shards`` do not divide the layout: a value is in none of them, or in two."""
    at = [0] * len(layout.groups)
    for group, begin, end in sorted(run for shard in shards for run in shard.runs):
        if begin != at[group]:
            what = "in two shards" if begin < at[group] else "in no shard"
            raise ValueError(f"element {min(begin, at[group])} of group {group} is {what}")
        at[group] = end
    for whole, reached in zip(layout.groups, at, strict=True):
        if reached != whole.numel:
            raise ValueError(f"element {reached} of group {whole.index} is in no shard")
