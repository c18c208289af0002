"""What of a layout a rank holds, and which leaves of a block are its own."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from w5xde_async.errors import MalformedFrame
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import Shard, check_division
from w5xde_async.plan.shares import Share, leaves_of
from w5xde_async.plan.tree import Block


def layout() -> Layout:
    model = nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 5))
    model[2].bias.requires_grad_(False)
    return Layout.of(model, bucket_bytes=256)


@st.composite
def divided(draw: st.DrawFn) -> tuple[Layout, list[Shard]]:
    """A layout, cut at random places and dealt out to ranks at random."""
    made, ranks = layout(), draw(st.integers(1, 4))
    runs: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for group in made.groups:
        cuts = sorted({0, group.numel, *draw(st.lists(st.integers(0, group.numel), max_size=6))})
        for begin, end in pairwise(cuts):
            runs[draw(st.integers(0, ranks - 1))].append((group.index, begin, end))
    return made, [Shard.of(made, one) for one in runs]


@given(divided())
def test_the_pieces_of_all_shards_are_every_bucket_once(case: tuple[Layout, list[Shard]]) -> None:
    made, shards = case
    check_division(made, shards)
    for bucket in made.buckets:
        seen = torch.zeros(bucket.numel, dtype=torch.int64)
        for shard in shards:
            assert shard.numel(bucket) == sum(run.end - run.begin for run in shard.pieces(bucket))
            assert (bucket.index in shard.buckets) == bool(shard.pieces(bucket))
            for run in shard.pieces(bucket):
                assert run.group == bucket.group
                seen[run.begin - bucket.offset : run.end - bucket.offset] += 1
        assert seen.eq(1).all()


@given(divided())
def test_what_a_shard_holds_is_a_layout_of_the_same_tensors(case: tuple[Layout, list[Shard]]) -> None:
    """Each value of the whole lies in one shard's own layout, in the bucket and the entry that it is of."""
    made, shards = case
    for group in made.groups:
        values = torch.arange(group.numel)
        for shard in shards:
            own, runs = shard.own, [run for run in shard.runs if run.group == group.index]
            mine = torch.cat([values[run.begin : run.end] for run in runs] or [values[:0]])
            assert own.groups[group.index].numel == len(mine)
            for whole, part in zip(
                [*made.entries, *(bucket for bucket in made.buckets if bucket.group == group.index)],
                [*own.entries, *(bucket for bucket in own.buckets if bucket.group == group.index)], strict=True,
            ):  # fmt: skip
                if whole.group == group.index:
                    held = mine[part.offset : part.offset + part.numel]
                    there = {*range(whole.offset, whole.offset + whole.numel)}
                    assert held.tolist() == [value for value in mine.tolist() if value in there]
            for bucket in own.buckets:
                assert bucket.numel == shard.numel(made.buckets[bucket.index])


def test_shards_of_one_size_have_digests_of_their_own() -> None:
    made = layout()
    halves = [Shard.of(made, [(0, 0, 64)]), Shard.of(made, [(0, 64, 128)])]
    assert halves[0].own.describe() == halves[1].own.describe()
    assert halves[0].digest != halves[1].digest


@given(divided())
def test_a_shard_comes_back_from_the_wire(case: tuple[Layout, list[Shard]]) -> None:
    made, shards = case
    for shard in shards:
        assert Shard.parse(made, shard.packed) == shard


@pytest.mark.parametrize("packed", [(0, 1), (0, 5, 4), (9, 0, 1), (0, 0, 1 << 40), (0, 0, 4, 0, 3, 5)])
def test_what_is_no_shard_is_refused(packed: tuple[int, ...]) -> None:
    with pytest.raises(MalformedFrame, match="shard"):
        Shard.parse(layout(), packed)


def test_a_gap_and_an_overlap_are_named() -> None:
    made = layout()
    whole = Shard.whole(made)
    check_division(made, [whole])
    with pytest.raises(ValueError, match="element 0 of group 0 is in two shards"):
        check_division(made, [whole, Shard.of(made, [(0, 0, 3)])])
    rest = [(run.group, run.begin + 4 * (not run.group), run.end) for run in whole.runs]
    with pytest.raises(ValueError, match="element 0 of group 0 is in no shard"):
        check_division(made, [Shard.of(made, rest)])
    with pytest.raises(ValueError, match="in no shard"):
        check_division(made, [Shard.of(made, whole.runs[:-1])])


@given(st.integers(0, 5), st.integers(1, 33), st.integers(1, 9))
def test_every_leaf_has_a_rank(start: int, leaves: int, ranks: int) -> None:
    span = 1 << (leaves - 1).bit_length()
    block = Block(start * span, start * span + leaves)
    everything = list(range(block.start, block.stop))
    assert leaves_of(block, Share.ALL, ranks) == [range(block.start, block.stop)] * ranks
    own = leaves_of(block, Share.BLOCK, ranks)
    assert [leaf for part in own for leaf in part] == everything
    assert len(own) == ranks
    if leaves >= ranks:
        assert all(own)
    for part in own:  # each is a block of the tree
        if part and part[-1] + 1 < block.stop:
            assert len(part) & (len(part) - 1) == 0
        if part:
            assert part[0] % (1 << (len(part) - 1).bit_length()) == 0
    turns = leaves_of(block, Share.TURNS, ranks)
    assert len({len(part) for part in turns}) == 1
    rounds = list(zip(*turns, strict=True))
    for number, leaves_now in enumerate(rounds):
        first = block.start + number * ranks
        assert leaves_now == tuple(min(first + rank, first) if first + rank >= block.stop else first + rank
                                   for rank in range(ranks))  # fmt: skip
    assert sorted({leaf for part in turns for leaf in part}) == everything
