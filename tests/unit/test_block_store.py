"""Slots: who may write where, what is there, and the sum of a rectangle of leaves and buckets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.reference import tree_sum
from torch import Tensor, nn

from w5xde_async.hub.work.block_store import AuditKey, BlockStore, SlotKey, Supplier
from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.params.reducer import add_into
from w5xde_async.plan.tree import Block, aligned_block

LAYOUT = Layout.of(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), bucket_bytes=64)
EVERY = tuple(range(len(LAYOUT.result_buckets)))
STEP, BLOCK = Block(0, 4), Block(0, 2)


def store(leaves: Block = STEP) -> BlockStore:
    made = BlockStore(LAYOUT)
    made.begin(leaves)
    return made


def test_a_slot_is_reserved_by_one_filled_once_and_missing_until_then() -> None:
    book = store()
    view = book.reserve(SlotKey(BLOCK, 0), "a")
    assert view is not None
    assert len(view) == LAYOUT.result_nbytes(LAYOUT.result_buckets[0])
    assert book.is_receiving(BLOCK)
    assert 0 in book.missing(BLOCK), "it is received, not there"
    assert book.reserve(SlotKey(BLOCK, 0), "b") is None, "another receives into it"
    assert book.reserve(SlotKey(BLOCK, 1), "b") is not None
    assert book.fill("a", Supplier("a", 7)) == SlotKey(BLOCK, 0)
    assert book.missing(BLOCK) == list(EVERY[1:])
    assert book.reserve(SlotKey(BLOCK, 0), "c") is None, "it is there"
    assert book.writer(SlotKey(BLOCK, 0)) is None
    assert book.writer(SlotKey(BLOCK, 1)) == "b"
    assert (book.is_filled(SlotKey(BLOCK, 0)), book.is_filled(SlotKey(BLOCK, 1))) == (True, False)


def test_what_a_writer_abandons_is_missing_and_free_for_others() -> None:
    book = store()
    book.reserve(SlotKey(BLOCK, 0), "a")
    book.abandon("a")
    book.abandon("a")
    assert not book.is_receiving(BLOCK)
    assert book.missing(BLOCK) == list(EVERY)
    assert book.reserve(SlotKey(BLOCK, 0), "b") is not None


def test_suppliers_are_known_until_the_block_is_closed() -> None:
    book = store()
    for bucket, worker in ((0, "a"), (1, "b"), (2, "a")):
        book.reserve(SlotKey(BLOCK, bucket), worker)
        book.fill(worker, Supplier(worker, bucket))
    assert book.supplied_by("a") == {BLOCK: [0, 2]}
    book.empty(BLOCK, [0])
    assert 0 in book.missing(BLOCK)
    assert book.supplied_by("a") == {BLOCK: [2]}
    assert book.fill_with_nothing(BLOCK) == [0, *EVERY[3:]]
    assert book.missing(BLOCK) == []
    assert book.close(BLOCK) == {1: Supplier("b", 1), 2: Supplier("a", 2)}
    assert book.supplied_by("a") == {}
    assert book.missing(BLOCK) == list(EVERY), "should it not hold, it is done anew"


def test_what_counts_of_a_worker_is_not_among_what_may_be_emptied_until_the_next_step() -> None:
    """Its memory may hold the sum of it and its sibling."""
    book = store()
    for bucket in (0, 1):
        book.reserve(SlotKey(BLOCK, bucket), "a")
        book.fill("a", Supplier("a", bucket))
    book.count(BLOCK, 1, present=True)
    assert book.supplied_by("a") == {BLOCK: [0]}
    book.count(BLOCK, 0, present=True)
    assert book.supplied_by("a") == {}
    book.close(BLOCK)
    book.begin(STEP)
    book.reserve(SlotKey(BLOCK, 1), "a")
    book.fill("a", Supplier("a", 9))
    assert book.supplied_by("a") == {BLOCK: [1]}


def test_emptied_of_everything_the_block_is_as_new() -> None:
    book = store()
    book.reserve(SlotKey(BLOCK, 0), "a")
    book.fill("a", Supplier("a", 1))
    book.empty(BLOCK, [0])
    assert book.suppliers(BLOCK) == {}
    assert book.missing(BLOCK) == list(EVERY)


def test_an_audit_has_slots_and_memory_of_its_own() -> None:
    book = store()
    book.reserve(SlotKey(BLOCK, 0), "a")
    book.fill("a", Supplier("a", 1))
    audit = AuditKey(2)
    assert book.reserve(SlotKey(audit, 0), "b") is not None
    book.fill("b", Supplier("b", 2))
    assert book.vector(audit) is not book.vector(BLOCK)
    assert book.missing(audit) == book.missing(BLOCK)
    assert book.supplied_by("b") == {}, "it is no part of the step"
    book.release(audit)
    assert (book.num_audits, book.num_vectors) == (0, 1)


def test_what_lies_in_anothers_memory_fills_a_slot_and_is_read_there_until_it_is_not_trusted() -> None:
    book, piece, own = store(), torch.full((LAYOUT.result_buckets[0].numel,), 3.0), -1.0
    book.vector(BLOCK).memory.fill_(0)
    book.vector(BLOCK).buckets[0].fill_(own)
    known = [piece]
    for let_go in ("emptied", "discarded"):
        assert book.lay(SlotKey(BLOCK, 0), piece, Supplier("a", 7)) == SlotKey(BLOCK, 0)
        assert book.suppliers(BLOCK) == {0: Supplier("a", 7)}
        assert book.reserve(SlotKey(BLOCK, 0), "b") is None, "it is there"
        assert book.pieces(BLOCK)[0].data_ptr() == piece.data_ptr()
        assert all(book.piece(BLOCK, 0) is not other for other in known), "who knows it by the tensor knows the content"
        known.append(book.piece(BLOCK, 0))
        assert book.norms(BLOCK, [0]) == {0: pytest.approx(3.0 * piece.numel() ** 0.5)}
        if let_go == "emptied":
            book.empty(BLOCK, [0])
        else:
            book.close(BLOCK)
            book.discard(BLOCK)
        assert book.pieces(BLOCK)[0][0] == own
        assert 0 in book.missing(BLOCK)
    view = book.reserve(SlotKey(BLOCK, 0), "b")
    assert view is not None
    view[:] = bytes(len(view))
    book.fill("b", Supplier("b", 8))
    assert not book.pieces(BLOCK)[0].any(), "what was received is what is read"
    assert bool((piece == 3.0).all())


def test_an_audit_lies_in_anothers_memory_until_it_is_released() -> None:
    book, audit, piece = store(), AuditKey(2), torch.ones(LAYOUT.result_buckets[0].numel)
    book.lay(SlotKey(audit, 0), piece, Supplier("b", 2))
    assert book.pieces(audit)[0].data_ptr() == piece.data_ptr()
    assert (book.num_audits, book.suppliers(BLOCK)) == (1, {})
    book.release(audit)
    assert (book.num_audits, book.num_vectors) == (0, 0)


@pytest.mark.parametrize("how", ["abandoned", "filled"])
def test_the_memory_of_an_audit_that_is_over_stays_while_something_is_received_into_it(how: str) -> None:
    book, audit = store(), AuditKey(2)
    book.reserve(SlotKey(audit, 0), "b")
    book.release(audit)
    assert (book.num_audits, book.num_released) == (1, 1)
    if how == "abandoned":
        book.abandon("b")
    else:
        book.fill("b", Supplier("b", 2))
    assert (book.num_audits, book.num_released, book.num_vectors) == (0, 0, 0)


# -- rectangles

Part = list[Tensor | None]


def add(left: Part, right: Part) -> Part:
    def one(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if a is None or b is None:
            return b if a is None else a
        return torch.maximum(a, b) if a.dtype == torch.int64 else a + b

    return [one(a, b) for a, b in zip(left, right, strict=True)]


def leaf(number: int) -> Part:
    generator = torch.Generator().manual_seed(number)

    def one(piece: Tensor) -> Tensor | None:
        if float(torch.rand((), generator=generator)) < 0.2:
            return None
        if piece.dtype == torch.int64:
            return torch.randint(-50, 50, piece.shape, generator=generator)
        return torch.randn(piece.shape, generator=generator) * 10.0 ** int(
            torch.randint(-6, 7, (), generator=generator)
        )

    return [one(piece) for piece in ResultVector(LAYOUT).buckets]


def bits(part: Part, buckets: tuple[int, ...]) -> list[bytes | None]:
    return [None if (piece := part[bucket]) is None else piece.numpy().tobytes() for bucket in buckets]


def dirty(layout: Layout) -> ResultVector:
    vector = ResultVector(layout)
    vector.memory.fill_(123)  # as if it had been used before
    return vector


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 29), st.data())
def test_any_block_over_any_buckets_has_the_bits_of_the_whole_trees_part(num_leaves: int, data: st.DataObject) -> None:
    """A coordinator has all leaves, a relay those of its lease, a stage or a bucket home a few buckets."""
    start = data.draw(st.integers(0, num_leaves - 1), "first leaf")
    held = aligned_block(start, num_leaves, num_leaves, data.draw(st.sampled_from([1, 2, 4, 8, 16, 32]), "leaves"))
    buckets = tuple(sorted(data.draw(st.sets(st.sampled_from(EVERY), min_size=1), "buckets")))
    book = BlockStore(LAYOUT, buckets, make=dirty)
    book.begin(held)
    blocks, first = [], held.start
    while first < held.stop:
        blocks.append(aligned_block(first, held.stop, num_leaves, data.draw(st.integers(1, 8))))
        first = blocks[-1].stop
    parts = [leaf(number) for number in range(num_leaves)]
    for block in data.draw(st.permutations(blocks)):
        sums = tree_sum(parts[block.start : block.stop], add)
        assert book.missing(block) == list(buckets)
        for bucket in data.draw(st.permutations(buckets)):
            piece = sums[bucket]
            if piece is not None and data.draw(st.booleans(), "in another's memory"):
                assert book.lay(SlotKey(block, bucket), piece.clone(), Supplier("a", 1)) == SlotKey(block, bucket)
            elif piece is not None:
                view = book.reserve(SlotKey(block, bucket), "a")
                assert view is not None
                view[:] = piece.numpy().tobytes()
                book.fill("a", Supplier("a", 1))
            book.count(block, bucket, present=piece is not None)
        assert set(book.fill_with_nothing(block)) == {bucket for bucket in buckets if sums[bucket] is None}
        book.close(block)
        if data.draw(st.booleans(), "add now"):
            book.add(book.additions())
    book.add(book.additions())
    root = book.take()
    found: Part = [
        add_into(own.clone(), those) if those else None
        for own, those in zip(root.vector.buckets, root.addends, strict=True)
    ]
    wanted = tree_sum(parts[held.start : held.stop], add)
    assert bits(found, buckets) == bits(wanted, buckets)
    assert not any(there for bucket, there in enumerate(root.present) if bucket not in buckets)
    gradients = [bucket for bucket in buckets if LAYOUT.groups[LAYOUT.result_buckets[bucket].group].role == "grad"]
    assert book.num_vectors == (2 if gradients and len(blocks) > 1 else 1)
    book.clear()
    assert book.num_vectors == 0


@pytest.mark.parametrize("measured", [False, True])
def test_what_is_left_to_whoever_takes_the_sum_is_no_work_of_the_stores(measured: bool) -> None:
    book, nbytes = store(), LAYOUT.result_nbytes(LAYOUT.result_buckets[0])
    book.begin(STEP, measure_halves=measured)
    work = []
    for leaf in (0, 1, 3, 2):
        book.count(Block(leaf, leaf + 1), 0, present=True)
        work.append(book.nbytes(book.additions()))
    assert work == [0, nbytes, 0, nbytes]
    book.begin(Block(0, 2), measure_halves=measured)
    for leaf in range(2):
        book.count(Block(leaf, leaf + 1), 0, present=True)
    assert book.nbytes(book.additions()) == (nbytes if measured else 0)


def test_what_is_no_rectangle_is_refused() -> None:
    with pytest.raises(ValueError, match="no block"):
        store(Block(2, 6))
    with pytest.raises(ValueError, match="buckets"):
        BlockStore(LAYOUT, [len(EVERY)])
    with pytest.raises(ValueError, match="buckets"):
        BlockStore(LAYOUT, [])
