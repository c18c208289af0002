"""The shape of a step's sum: the same expression, whatever the blocks and their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.reference import tree_sum

from w5xde_async.plan.tree import Block, Frontier, Merge, aligned_block, carries, right_half

sizes = st.integers(1, 70)


def expression(num_leaves: int) -> str:
    return str(tree_sum([str(leaf) for leaf in range(num_leaves)], "({}+{})".format))


def inner(block: Block) -> str:
    """What a worker sends for a block: the tree over its leaves."""
    return str(tree_sum([str(leaf) for leaf in range(*block)], "({}+{})".format))


@st.composite
def cut_steps(draw: st.DrawFn) -> tuple[int, list[Block]]:
    """A step cut into blocks as the ledger cuts it, then shuffled."""
    num_leaves = draw(sizes)
    blocks, start = [], 0
    while start < num_leaves:
        block = aligned_block(start, num_leaves, num_leaves, draw(st.integers(1, 80)))
        blocks.append(block)
        start = block.stop
    return num_leaves, draw(st.permutations(blocks))


@given(cut_steps())
def test_any_blocks_in_any_order_give_the_reference_expression(cut: tuple[int, list[Block]]) -> None:
    num_leaves, blocks = cut
    frontier, sums = Frontier(num_leaves), dict[int, str]()
    for block in blocks:
        assert not frontier.complete
        sums[block.start] = inner(block)
        for left, right in frontier.fill(block):
            sums[left] = f"({sums[left]}+{sums.pop(right)})"
    assert frontier.complete
    assert sums == {0: expression(num_leaves)}


def leaf_by_leaf(num_leaves: int) -> list[Merge]:
    """All additions of a step whose leaves come in order."""
    frontier = Frontier(num_leaves)
    return [merge for leaf in range(num_leaves) for merge in frontier.fill(Block(leaf, leaf + 1))]


@given(sizes)
def test_every_addition_is_named_once(num_leaves: int) -> None:
    sums = {leaf: str(leaf) for leaf in range(num_leaves)}
    for left, right in leaf_by_leaf(num_leaves):
        sums[left] = f"({sums[left]}+{sums.pop(right)})"
    assert sums == {0: expression(num_leaves)}


@given(st.data())
def test_an_aligned_block_is_a_subtree(data: st.DataObject) -> None:
    num_leaves = data.draw(sizes)
    start = data.draw(st.integers(0, num_leaves - 1))
    stop = data.draw(st.integers(start + 1, num_leaves))
    most = data.draw(st.integers(1, 80))
    block = aligned_block(start, stop, num_leaves, most)
    span = 1 << (block.num_leaves - 1).bit_length()
    assert block.start == start
    assert start < block.stop <= stop
    assert block.num_leaves <= most
    assert start % span == 0
    assert block.num_leaves == span or block.stop == num_leaves


@pytest.mark.parametrize(
    ("start", "free_stop", "num_leaves", "most", "expected"),
    [
        (0, 8, 8, 8, (0, 8)),
        (0, 8, 8, 7, (0, 4)),
        (2, 8, 8, 8, (2, 4)),
        (4, 7, 7, 8, (4, 7)),  # cut by the step's end
        (4, 7, 8, 8, (4, 6)),  # leaf 7 is somebody else's
        (6, 7, 7, 8, (6, 7)),
        (0, 5, 5, 64, (0, 5)),
        (0, 1, 1, 1, (0, 1)),
    ],
)
def test_aligned_block(start: int, free_stop: int, num_leaves: int, most: int, expected: tuple[int, int]) -> None:
    assert aligned_block(start, free_stop, num_leaves, most) == expected


@pytest.mark.parametrize("num_leaves", [1, 2, 3, 4, 5, 8, 9, 33])
def test_the_right_half_is_what_is_added_last(num_leaves: int) -> None:
    last = leaf_by_leaf(num_leaves)[-1:]
    assert [(0, right_half(num_leaves))] == [tuple(merge) for merge in last] or (num_leaves == 1 and not last)


def test_carries_are_those_of_a_binary_counter() -> None:
    assert [carries(index) for index in range(16)] == [0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0, 4]


@given(sizes)
def test_a_stack_with_carries_gives_the_reference_expression(num_leaves: int) -> None:
    """How a worker sums its leaves as they come."""
    stack: list[str] = []
    for leaf in range(num_leaves):
        stack.append(str(leaf))
        for _ in range(carries(leaf)):
            right = stack.pop()
            stack[-1] = f"({stack[-1]}+{right})"
    while len(stack) > 1:
        right = stack.pop()
        stack[-1] = f"({stack[-1]}+{right})"
    assert stack == [expression(num_leaves)]


def test_a_step_has_leaves() -> None:
    with pytest.raises(ValueError, match="at least one leaf"):
        Frontier(0)
