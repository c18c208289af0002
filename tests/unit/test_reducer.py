"""Block sums in, the root out: the bits of a recursive tree sum, whatever the blocks and their order."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.reference import tree_sum
from torch import Tensor, nn

from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.params.reducer import Addends, Reducer, VectorPool, add_into
from w5xde_async.plan.tree import Block, Frontier, aligned_block, right_half


def layout() -> Layout:
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    return Layout.of(module, bucket_bytes=64)


LAYOUT = layout()
BUCKETS = LAYOUT.result_buckets
Part = list[Tensor | None]  # per bucket; None: nothing


def add(left: Part, right: Part) -> Part:
    def one(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if a is None or b is None:
            return b if a is None else a
        return torch.maximum(a, b) if a.dtype == torch.int64 else a + b

    return [one(a, b) for a, b in zip(left, right, strict=True)]


def leaf_part(seed: int, absent: float) -> Part:
    generator = torch.Generator().manual_seed(seed)

    def one(piece: Tensor) -> Tensor | None:
        if float(torch.rand((), generator=generator)) < absent:
            return None
        if piece.dtype == torch.int64:
            return torch.randint(-50, 50, piece.shape, generator=generator)
        scale = 10.0 ** torch.randint(-6, 7, piece.shape, generator=generator)
        value = torch.randn(piece.shape, generator=generator) * scale
        return torch.where(torch.rand(piece.shape, generator=generator) < 0.2, -0.0, value)

    return [one(piece) for piece in ResultVector(LAYOUT).buckets]


def bits(part: Part) -> list[bytes | None]:
    return [None if piece is None else piece.numpy().tobytes() for piece in part]


def reduce(
    parts: list[Part], blocks: list[Block], order: Any = None, borrows: Callable[[], bool] = lambda: False
) -> Part:
    """As the coordinator does it: (block, bucket) after (block, bucket), merged as the frontiers say. ``borrows``:
    whether the next piece lies in another's memory, which stays as it is."""
    lent: list[tuple[Tensor, bytes]] = []
    pool = VectorPool(LAYOUT, make=_dirty)
    reducer, half = Reducer(LAYOUT, pool), right_half(len(parts))
    reducer.begin(half)
    frontiers = [Frontier(len(parts)) for _ in BUCKETS]
    slots = [(block, bucket.index) for block in blocks for bucket in BUCKETS]
    for block, bucket in order(slots) if order else slots:
        piece = tree_sum(parts[block.start : block.stop], add)[bucket]
        if piece is not None and borrows():
            lent.append((piece.clone(), piece.numpy().tobytes()))
            reducer.block(block.start).borrow(bucket, lent[-1][0])
        elif piece is not None:
            reducer.block(block.start).vector.buckets[bucket].copy_(piece)
        reducer.put(bucket, block.start, present=piece is not None)
        for left, right in frontiers[bucket].fill(block):
            reducer.merge(bucket, left, right)
    root, present, addends, _ = reducer.root()
    memory = {piece.untyped_storage().data_ptr() for piece in root.buckets}
    assert memory == {root.memory.untyped_storage().data_ptr()}, "the rule works in it, in place"
    for bucket, own, those in zip(BUCKETS, root.buckets, addends, strict=True):
        # Buffers' sums are used up, so they are in the vector; gradients' may be where somebody else wrote them, and
        # those of both halves of the step are there as they are.
        if LAYOUT.groups[bucket.group].role != "grad":
            assert not those or [piece.data_ptr() for piece in those] == [own.data_ptr()]
            continue
        halves = [parts[:half], parts[half:]] if half and len(blocks) > 1 else [parts]
        whole = [tree_sum(those_leaves, add)[bucket.index] for those_leaves in halves]
        assert bits([*those]) == bits([piece for piece in whole if piece is not None])
    result = [
        add_into(piece.clone(), those) if those else None for piece, those in zip(root.buckets, addends, strict=True)
    ]
    assert all(piece.numpy().tobytes() == before for piece, before in lent)
    assert present == [piece is not None for piece in result]
    assert pool.num_out == min(len(blocks), 2)
    reducer.clear()
    assert pool.num_out == 0
    return result


def _dirty(layout: Layout) -> ResultVector:
    vector = ResultVector(layout)
    vector.memory.fill_(123)  # a vector that was used before
    return vector


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 13), st.sampled_from([0.0, 0.3, 0.8, 1.0]), st.data())
def test_the_root_has_the_bits_of_the_recursive_sum(num_leaves: int, absent: float, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1000))
    parts = [leaf_part(seed * 100 + leaf, absent) for leaf in range(num_leaves)]
    blocks, start = [], 0
    while start < num_leaves:
        blocks.append(aligned_block(start, num_leaves, num_leaves, data.draw(st.integers(1, 8))))
        start = blocks[-1].stop
    chance = random.Random(seed)
    share = data.draw(st.sampled_from([0.0, 0.5, 1.0]), "share of pieces in another's memory")
    found = reduce(parts, blocks, lambda slots: data.draw(st.permutations(slots)), lambda: chance.random() < share)
    assert bits(found) == bits(tree_sum(parts, add))


def test_minus_zero_survives() -> None:
    """A bucket that arrives as nothing contributes nothing: it does not turn -0.0 into 0.0."""
    part: Part = [
        torch.full_like(piece, -0.0 if piece.is_floating_point() else 3) for piece in ResultVector(LAYOUT).buckets
    ]
    nothing: Part = [None] * len(BUCKETS)
    for parts in ([part, nothing], [nothing, part], [part, part]):
        for borrowed in (False, True):
            assert bits(reduce(parts, [Block(0, 1), Block(1, 2)], borrows=lambda: borrowed)) == bits(part)  # noqa: B023


def test_what_nobody_sent_is_nothing() -> None:
    nothing: Part = [None] * len(BUCKETS)
    assert reduce([nothing] * 3, [Block(0, 2), Block(2, 3)]) == nothing


@pytest.mark.parametrize("borrowed", [False, True])
@pytest.mark.parametrize(("num_leaves", "span", "absent"), [(2, 1, 0.0), (5, 1, 0.5), (7, 4, 0.0), (1, 1, 0.0)])
def test_the_halves_of_the_root_are_measured(num_leaves: int, span: int, absent: float, borrowed: bool) -> None:
    """The same numbers whatever the blocks: those of the gradient's sums, not of buffers."""
    parts = [leaf_part(40 + leaf, absent) for leaf in range(num_leaves)]
    reducer, frontiers = Reducer(LAYOUT, VectorPool(LAYOUT, make=_dirty)), [Frontier(num_leaves) for _ in BUCKETS]
    half = right_half(num_leaves)
    reducer.begin(half, measure=True)
    for start in reversed(range(0, num_leaves, span)):
        block = Block(start, min(start + span, num_leaves))
        for bucket, piece in enumerate(tree_sum(parts[block.start : block.stop], add)):
            if piece is not None and borrowed:
                reducer.block(start).borrow(bucket, piece)
            elif piece is not None:
                reducer.block(start).vector.buckets[bucket].copy_(piece)
            reducer.put(bucket, start, present=piece is not None)
            for left, right in frontiers[bucket].fill(block):
                reducer.merge(bucket, left, right)

    def square(part: Part) -> float:
        gradients = [bucket.index for bucket in BUCKETS if LAYOUT.groups[bucket.group].role == "grad"]
        return sum(float(piece.double().square().sum()) for i in gradients if (piece := part[i]) is not None)

    if num_leaves == 1:
        assert reducer.root().halves is None
        return
    wanted = [tree_sum(of, add) for of in (parts[:half], parts[half:], parts)]
    root = reducer.root()
    assert root.halves == pytest.approx([square(part) for part in wanted], rel=1e-5)
    assert bits([those[0] if those else None for those in root.addends]) == bits(wanted[2]), (
        "added, where it was measured"
    )
    reducer.clear()
    reducer.block(0)
    assert reducer.root().halves is None


def test_what_is_borrowed_is_let_go_as_soon_as_it_is_added_and_when_the_step_is_over() -> None:
    """It may be the memory of a worker that is gone, and of the step before."""
    reducer, lent = Reducer(LAYOUT, VectorPool(LAYOUT, make=_dirty)), weakref.WeakSet[Tensor]()

    def borrow(start: int) -> None:
        piece = torch.ones(BUCKETS[0].numel)
        lent.add(piece)
        reducer.block(start).borrow(0, piece)
        reducer.put(0, start, present=True)

    reducer.begin(2)
    for start in range(4):
        borrow(start)
    reducer.merge(0, 2, 3)
    assert len(lent) == 2
    reducer.merge(0, 0, 1)
    assert len(lent) == 0
    reducer.merge(0, 0, 2)
    assert [piece.tolist() for piece in reducer.root().addends[0]] == [[2.0] * BUCKETS[0].numel] * 2
    reducer.clear()
    borrow(0)
    reducer.clear()
    assert len(lent) == 0
    reducer.block(0).vector.buckets[0].fill_(5.0)
    assert reducer.block(0).piece(0).tolist() == [5.0] * BUCKETS[0].numel


@pytest.mark.parametrize("num_addends", [0, 1, 2])
def test_what_is_added_may_be_where_the_sum_is_to_lie(num_addends: int) -> None:
    pieces: Addends = (torch.ones(3), torch.full((3,), 2.0))[:num_addends]
    into = pieces[0] if pieces else torch.full((3,), 7.0)
    assert add_into(into, pieces) is into
    assert into.tolist() == [(7.0, 1.0, 3.0)[num_addends]] * 3
    assert add_into(torch.zeros(3), (into,)).tolist() == into.tolist()


def test_memory_is_given_back_as_blocks_merge() -> None:
    pool = VectorPool(LAYOUT, spare=2)
    reducer, frontiers = Reducer(LAYOUT, pool), [Frontier(32) for _ in BUCKETS]
    most = 0
    for leaf in range(32):
        for bucket in BUCKETS:
            reducer.put(bucket.index, leaf, present=True)
            for left, right in frontiers[bucket.index].fill(Block(leaf, leaf + 1)):
                reducer.merge(bucket.index, left, right)
        most = max(most, pool.num_out)
    assert most <= 6  # log2(leaves) + 1
    reducer.clear()


def test_the_pool_reuses_and_keeps_few() -> None:
    pool = VectorPool(LAYOUT, spare=2)
    taken = [pool.take() for _ in range(4)]
    for vector in taken:
        pool.give(vector)
    again = [pool.take() for _ in range(3)]
    assert [any(vector is old for old in taken) for vector in again] == [True, True, False]
    assert pool.num_out == 3
