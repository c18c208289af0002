"""What has come of a step: every slot of its grid (leaves x buckets), and the sum of all leaves.

A **slot** is one bucket of one block's sum, or of a block's second computation (an audit). It is empty, being received
(a writer has reserved it), filled (from a supplier) or filled with nothing (no leaf of the block changed the bucket).
A slot is filled once: whatever comes for it later finds no memory. Here alone is noted what has come of which block;
``plan.ledger`` asks.

What is received lies in memory of the store's own. What lies whole in memory that a worker shares fills its slot from
there (``lay``) and is added from there: the worker writes it again only when it has been told what became of it.

A finished block is closed: its slots' story is over, and what counts of them is added to the sum, bucket by bucket, in
the order of the tree (``plan.tree``). A block that does not hold is discarded, and its slots are empty again.

**A store holds a rectangle of the grid**: a block of the step's tree, from any first leaf on, and any subset of the
buckets. The coordinator's is the whole step. A relay's is the block that it leased; a stage worker's, or a bucket
home's, has only their buckets. The bits do not depend on it: the sum of a block over some buckets is the same piece of
memory, whoever adds it.

The event loop's thread reserves, fills and counts; ``add`` and ``take`` may run in one other thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from w5xde_async.params.flat import ResultVector, l2_norm
from w5xde_async.params.layout import Layout
from w5xde_async.params.reducer import BlockSum, Reducer, Root, VectorPool
from w5xde_async.plan.tree import Block, Frontier, Merge, right_half

#: Result vectors of so much are kept for the next blocks: making a small one takes longer than filling it.
_SPARE_BYTES = 16 << 20


class Destination(NamedTuple):
    """Where a result is received: ``view``, or scratch for None. ``authorized``: a lease accounts for it."""

    view: memoryview | None
    authorized: bool


@dataclass(frozen=True, slots=True)
class AuditKey:
    """The second computation of a block, by the lease that it is done under. It is no part of the sum."""

    lease: int


class SlotKey(NamedTuple):
    """One bucket of a block of the step under way, or of an audit."""

    of: Block | AuditKey
    bucket: int


class Supplier(NamedTuple):
    """Who has filled a slot, under which lease."""

    worker: str
    lease: int


class Addition(NamedTuple):
    """A slot that counts, and what can be added now that it does. ``start``: of its block, from the first leaf on."""

    bucket: int
    start: int
    present: bool
    merges: list[Merge]


class BlockStore:
    """The slots of one step after the other, of ``buckets`` (default: all result buckets)."""

    def __init__(
        self,
        layout: Layout,
        buckets: Iterable[int] | None = None,
        *,
        make: Callable[[Layout], ResultVector] = ResultVector,
    ) -> None:
        """``make`` allocates a result vector. Raises ValueError for buckets that the layout does not have."""
        everything = range(len(layout.result_buckets))
        self.layout, self.buckets = layout, tuple(everything if buckets is None else sorted(set(buckets)))
        if not self.buckets or not set(self.buckets) <= set(everything):
            raise ValueError(f"buckets {self.buckets} are none of the {len(everything)} that there are")
        self.leaves = Block(0, 0)  #: of the step under way
        # Never more spare vectors than were out at once, so the stated memory holds; of large ones a few, of small all.
        spare = max(4, _SPARE_BYTES // max(1, layout.vector_bytes))
        self._pool = VectorPool(layout, spare=spare, make=make)
        self._reducer = Reducer(layout, self._pool, self.buckets)
        self._frontiers: dict[int, Frontier] = {}
        self._additions: list[Addition] = []
        self._counted: set[tuple[int, int]] = set()  # (first leaf, bucket): in the sum, whoever's it is
        # Of blocks that are not closed and of audits: what is filled, by bucket. None: the bucket is absent (no leaf
        # changed it).
        self._filled: dict[Block | AuditKey, dict[int, Supplier | None]] = {}
        self._reserved: dict[Hashable, SlotKey] = {}  # writer -> what it receives
        self._receiving: dict[Block | AuditKey, set[int]] = {}  # the same by block: buckets
        self._audits: dict[AuditKey, BlockSum] = {}
        self._released: set[AuditKey] = set()  # audits that are over, as soon as nothing is received for them

    @property
    def num_vectors(self) -> int:
        """Result vectors that are in use."""
        return self._pool.num_out

    @property
    def num_audits(self) -> int:
        """Audits that hold memory."""
        return len(self._audits)

    @property
    def num_released(self) -> int:
        """Audits that are over and hold memory still, since something is being received into it."""
        return len(self._released)

    def begin(self, leaves: Block, *, measure_halves: bool = False) -> None:
        """The next step, or block of a step. Raises ValueError where ``leaves`` is no block of a tree.

        ``measure_halves``: of the sum; no lease may hold leaves of both halves then.
        """
        span = 1 << (leaves.num_leaves - 1).bit_length()
        if leaves.start % span:
            raise ValueError(f"{leaves} is no block: its first leaf is no multiple of {span}")
        self.leaves = leaves
        self._frontiers = {bucket: Frontier(leaves.num_leaves) for bucket in self.buckets}
        self._counted.clear()
        self._reducer.begin(right_half(leaves.num_leaves), measure=measure_halves)

    # -- slots ---------------------------------------------------------------------------------------------

    def reserve(self, key: SlotKey, writer: Hashable) -> memoryview | None:
        """Lend an empty slot's memory to ``writer``, until it fills or abandons it. None where the slot is not empty.

        A writer receives one slot at a time.
        """
        if key.bucket in self._receiving.get(key.of, ()) or key.bucket in self._filled.get(key.of, ()):
            return None
        self._receiving.setdefault(key.of, set()).add(key.bucket)
        self._reserved[writer] = key
        return self.vector(key.of).bucket_bytes[key.bucket]

    def is_filled(self, key: SlotKey) -> bool:
        """Whether a slot of a block that is not closed is filled, or filled with nothing."""
        return key.bucket in self._filled.get(key.of, ())

    def writer(self, key: SlotKey) -> Hashable | None:
        """Who is receiving into a slot's memory."""
        return next((writer for writer, reserved in self._reserved.items() if reserved == key), None)

    def fill(self, writer: Hashable, supplier: Supplier) -> SlotKey:
        """What ``writer`` received is whole. The slot that it is in."""
        key = self._end(writer)
        assert key is not None, "nothing was being received"
        return self.put(key, supplier)

    def put(self, key: SlotKey, supplier: Supplier) -> SlotKey:
        """An empty slot's memory, into which nobody receives, holds a result."""
        self._filled.setdefault(key.of, {})[key.bucket] = supplier
        if isinstance(key.of, AuditKey):
            self._free(key.of)
        return key

    def lay(self, key: SlotKey, piece: Tensor, supplier: Supplier) -> SlotKey:
        """An empty slot, into which nobody receives, is filled by what lies in ``piece``, which is read from there.

        It has to stay as it is until the slot is empty again, the sum is cleared or the audit released. Who is given it
        from here may know it by the tensor: no other content is ever in the same one.
        """
        self._sum(key.of).borrow(key.bucket, piece.detach())
        return self.put(key, supplier)

    def fill_with_nothing(self, of: Block | AuditKey) -> list[int]:
        """The slots of a block that are empty stay so: no leaf of it changed those buckets. Which they are."""
        missing = self.missing(of)
        self._filled.setdefault(of, {}).update(dict.fromkeys(missing))
        return missing

    def abandon(self, writer: Hashable) -> None:
        """``writer`` is gone: nothing writes for it any more, and what it was sending is missing."""
        key = self._end(writer)
        if key is not None and isinstance(key.of, AuditKey):
            self._free(key.of)

    def is_receiving(self, of: Block | AuditKey) -> bool:
        """Whether anything of that block is being received."""
        return bool(self._receiving.get(of))

    def has(self, of: Block | AuditKey) -> bool:
        """Whether a slot of a block that is not closed is filled."""
        return bool(self._filled.get(of))

    def missing(self, of: Block | AuditKey) -> list[int]:
        """Buckets that are not filled."""
        filled = self._filled.get(of, ())
        return [bucket for bucket in self.buckets if bucket not in filled]

    def suppliers(self, of: Block | AuditKey) -> Mapping[int, Supplier]:
        """Who has filled which bucket of a block that is not closed."""
        return {bucket: known for bucket, known in self._filled.get(of, {}).items() if known is not None}

    def supplied_by(self, worker: str) -> dict[Block, list[int]]:
        """Blocks that are not closed, and the buckets of each that ``worker`` has filled and that do not count yet."""
        found: dict[Block, list[int]] = {}
        for of, slots in self._filled.items():
            if isinstance(of, Block):
                mine = [bucket for bucket, known in slots.items() if known is not None and known.worker == worker]
                if theirs := [bucket for bucket in mine if (of.start, bucket) not in self._counted]:
                    found[of] = theirs
        return found

    def empty(self, block: Block, buckets: Iterable[int]) -> None:
        """What fills these slots is not trusted any more. They are empty again."""
        slots, known = self._filled[block], self._sum(block)
        for bucket in buckets:
            del slots[bucket]
            known.forget(bucket)
        if not slots:
            del self._filled[block]

    def close(self, block: Block) -> Mapping[int, Supplier]:
        """The block is finished: nothing more is received for it. Who has filled which bucket."""
        suppliers = self.suppliers(block)
        self._filled.pop(block, None)
        return suppliers

    def discard(self, block: Block) -> None:
        """A block that is closed does not hold: nothing of it is read any more, and its slots are empty again."""
        known = self._sum(block)
        for bucket in self.buckets:
            known.forget(bucket)

    # -- audits --------------------------------------------------------------------------------------------

    def release(self, audit: AuditKey) -> None:
        """The second computation is over. Its memory is given back as soon as nothing is received into it."""
        self._filled.pop(audit, None)
        self._released.add(audit)
        self._free(audit)

    def _free(self, audit: AuditKey) -> None:
        if audit not in self._released or self.is_receiving(audit):
            return
        self._released.discard(audit)
        self._filled.pop(audit, None)
        if (known := self._audits.pop(audit, None)) is not None:
            self._pool.give(known.vector)

    # -- memory --------------------------------------------------------------------------------------------

    def vector(self, of: Block | AuditKey) -> ResultVector:
        """Where a block's slots, or an audit's, are received."""
        return self._sum(of).vector

    def pieces(self, of: Block | AuditKey) -> list[Tensor]:
        """Where each bucket of a block, or of an audit, lies now. To be read."""
        known = self._sum(of)
        return [known.piece(bucket.index) for bucket in self.layout.result_buckets]

    def piece(self, of: Block | AuditKey, bucket: int) -> Tensor:
        """Where a bucket lies now. To be read."""
        return self._sum(of).piece(bucket)

    def _sum(self, of: Block | AuditKey) -> BlockSum:
        if isinstance(of, Block):
            return self._reducer.block(of.start - self.leaves.start)
        known = self._audits.get(of)
        if known is None:
            known = self._audits[of] = BlockSum(self._pool.take())
        return known

    def norms(self, block: Block, buckets: Iterable[int]) -> dict[int, float]:
        """L2 norm of each of a block's buckets of floats; not finite where an element is not."""
        pieces, norms = self.pieces(block), {}
        for bucket in buckets:
            piece = pieces[bucket]
            if piece.dtype is torch.float32:
                norms[bucket] = l2_norm(piece)
        return norms

    # -- the sum -------------------------------------------------------------------------------------------

    def count(self, block: Block, bucket: int, *, present: bool) -> bool:
        """A bucket of a block's sum counts, or nothing of it is ``present``. True when something can be added now."""
        local = Block(block.start - self.leaves.start, block.stop - self.leaves.start)
        merges = self._frontiers[bucket].fill(local)
        self._counted.add((block.start, bucket))
        self._additions.append(Addition(bucket, local.start, present, merges))
        return bool(merges)

    def additions(self) -> list[Addition]:
        """What has come to count since the last call: ``add`` it."""
        additions, self._additions = self._additions, []
        return additions

    def nbytes(self, additions: Collection[Addition]) -> int:
        """Bytes that ``add`` adds, and does not leave to whoever takes the sum."""
        layout, leaves = self.layout, self._reducer.leaves
        return sum(
            layout.result_nbytes(layout.result_buckets[one.bucket])
            for one in additions
            if any(not leaves(one.bucket, right) for _, right in one.merges)
        )

    def add(self, additions: Iterable[Addition]) -> None:
        """Add in tree order, in the order that ``additions`` gave them."""
        for bucket, start, present, merges in additions:
            self._reducer.put(bucket, start, present=present)
            for left, right in merges:
                self._reducer.merge(bucket, left, right)

    def take(self) -> Root:
        """The sum of all leaves, once all of them were counted and added. Valid until ``clear``."""
        return self._reducer.root()

    def clear(self) -> None:
        """The sum was used; its memory is free for the next step."""
        self._reducer.clear()

    # -- inner ---------------------------------------------------------------------------------------------

    def _end(self, writer: Hashable) -> SlotKey | None:
        key = self._reserved.pop(writer, None)
        if key is not None:
            receiving = self._receiving[key.of]
            receiving.remove(key.bucket)
            if not receiving:
                del self._receiving[key.of]
        return key
