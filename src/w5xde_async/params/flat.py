"""Flat vectors with named views: the model's state, and one block's result.

``FlatState`` holds all groups of a layout and can become a module's storage (its parameters are then views of it).
``ResultVector`` holds one block's sums. Both are plain memory: who may write when is decided by their owner.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from w5xde_async.params.layout import ALIGN_BYTES, Bucket, Group, Layout, named_state, submodule


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, uncopied, format ``B``."""
    if not tensor.numel():
        return memoryview(bytearray())  # an empty view cannot be cast
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat).cast("B")


def isfinite(tensor: Tensor) -> Tensor:
    """Where a floating tensor is finite. Torch has no such kernel for float8."""
    return torch.isfinite(tensor if tensor.element_size() > 1 else tensor.float())


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COLUMNS = 1021  # words of eight bytes; prime: no shape of a tensor lies along it
_FEW = 4 * _COLUMNS  # to read more one by one takes longer than to add them up
_AT_ONCE = 128  # rows, which a cache still has when they are read for the second time


def fingerprints(
    tensors: Iterable[Tensor], device: torch.device | str = "cpu", *, resized: bool = False
) -> Tensor:  # fmt: skip
    """Of each its values' bits and where they lie, as int64 on their ``device``: what tells, next to always, whether a
    value has changed or is in another place. For comparisons within a process. ``resized``: their memory is, which is
    over for what numpy has once looked at.

    Many are added up first, in rows and in columns: whatever is moved leaves its row or its column.
    """
    if torch.device(device).type == "cpu" and not resized:
        return torch.tensor([_of_bytes(tensor) for tensor in tensors], dtype=torch.int64)
    found = [_of_words(tensor) for tensor in tensors]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device=device)


def _of_bytes(tensor: Tensor) -> int:
    data = bytes_of(tensor.contiguous())
    if len(data) <= 8 * _FEW:
        return zlib.crc32(data)
    count = len(data) // (8 * _COLUMNS)
    # By numpy, in one thread: torch's threads would meet at every few rows.
    rows = np.ndarray((count, _COLUMNS), np.int64, data)
    columns, sums = np.zeros(_COLUMNS, np.int64), np.empty(count, np.int64)
    for first in range(0, count, _AT_ONCE):
        some = rows[first : first + _AT_ONCE]
        np.add.reduce(some, 1, out=sums[first : first + _AT_ONCE])
        columns += np.add.reduce(some, 0)
    return zlib.crc32(data[rows.nbytes :], zlib.crc32(sums.data, zlib.crc32(columns.data)))


def _of_words(tensor: Tensor) -> Tensor:
    """The same by kernels alone: nothing waits for it."""
    words, rest = _words(tensor)
    while words.numel() > _FEW:
        whole = words.numel() // _COLUMNS * _COLUMNS
        rows = words[:whole].view(-1, _COLUMNS)
        words = torch.cat((rows.sum(0), rows.sum(1), words[whole:]))
    words = torch.cat((words, rest))
    # Bits at the top come down first: in no product would they.
    return (words >> 32).add_(words).mul_(_weights(words.device)[: words.numel()]).sum()


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Its bits, eight bytes each, and the few values of fewer bytes that are left."""
    flat = tensor.detach().contiguous().reshape(-1)
    size = flat.element_size()
    if size not in _INTEGERS:  # complex128
        flat, size = flat.view(torch.int64), 8
    together = 8 // size
    if flat.storage_offset() % together:
        flat = flat.clone()
    end = flat.numel() // together * together
    return flat[:end].view(torch.int64), flat[end:].view(_INTEGERS[size]).to(torch.int64)


def condensed(tensor: Tensor) -> Tensor:
    """Its bits, a large tensor's added up in columns: what to take ``fingerprints`` of later, of many tensors together.
    It takes few kernels, which read the tensor once. What moves by whole rows of columns is not noticed."""
    words, rest = _words(tensor)
    whole = words.numel() // _COLUMNS * _COLUMNS
    if whole <= _COLUMNS:
        return torch.cat((words, rest))
    columns = words[:whole].view(-1, _COLUMNS).sum(0)
    columns[: words.numel() - whole].add_(words[whole:])
    return torch.cat((columns, rest)) if rest.numel() else columns


@lru_cache(maxsize=64)
def _weights(device: torch.device) -> Tensor:
    """Odd ones: of a single word no change is lost."""
    made = torch.randint(1 << 62, (_FEW + 8,), generator=torch.Generator().manual_seed(0))
    return (2 * made + 1).to(device)


_ROW = 1 << 14
_MANY = 1 << 22  # values: of so many threads are worth their start


def l2_norm(values: Tensor) -> float:
    """L2 norm of a flat float32 tensor; not finite where an element is not, and there alone.

    The bits do not depend on the number of threads: few values are one thread's work (as all are for
    ``torch.linalg.vector_norm``, which then also loses digits), of many each row is.
    """
    if values.numel() < _MANY:
        return finite_norm(float(torch.linalg.vector_norm(values)), values)
    whole = values.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(values[:whole].view(-1, _ROW), dim=1)
    norm = math.hypot(
        torch.linalg.vector_norm(rows, dtype=torch.float64).item(), torch.linalg.vector_norm(values[whole:]).item()
    )
    return finite_norm(norm, values)


def finite_norm(norm: float, values: Tensor) -> float:
    """The ``norm`` of ``values``, and where that is infinite, what it is in float64: values over 1e19 have no squares
    in float32."""
    if not math.isinf(norm):
        return norm
    pieces = torch.split(values, _MANY)
    return math.hypot(*(float(torch.linalg.vector_norm(piece, dtype=torch.float64)) for piece in pieces))


class FlatState:
    """All groups of a layout, each one vector in its own dtype, on one device."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str = "cpu",
        *,
        pinned: bool = False,
        memory: Tensor | None = None,
    ) -> None:
        """``memory``: bytes to lie in (``nbytes(layout)`` of them, zeros), in place of fresh ones."""
        self.layout = layout
        if memory is None:
            self.groups = [
                torch.zeros(group.numel, dtype=group.dtype, device=device, pin_memory=pinned) for group in layout.groups
            ]
            return
        self.groups, at = [], 0
        for group in layout.groups:
            nbytes = group.numel * group.dtype.itemsize
            self.groups.append(memory[at : at + nbytes].view(group.dtype))
            at += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES

    @staticmethod
    def nbytes(layout: Layout) -> int:
        """Bytes of all groups, each aligned."""
        sizes = [group.numel * group.dtype.itemsize for group in layout.groups]
        return sum(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)

    @cached_property
    def views(self) -> list[Tensor]:
        """One view per entry, in its shape."""
        return [self.groups[e.group][e.offset : e.offset + e.numel].view(e.shape) for e in self.layout.entries]

    def bucket(self, bucket: Bucket) -> Tensor:
        """The piece of its group that is this bucket."""
        return self.groups[bucket.group][bucket.offset : bucket.offset + bucket.numel]

    @cached_property
    def bucket_bytes(self) -> list[memoryview]:
        """Every bucket's memory (CPU only), to be sent or received into."""
        return [bytes_of(self.bucket(bucket)) for bucket in self.layout.buckets]

    def copy_from(self, module: nn.Module) -> None:
        """Take the module's values."""
        with torch.no_grad():
            for view, tensor in zip(self.views, state_of(module, self.layout), strict=True):
                view.copy_(tensor)

    def copy_groups(self, other: FlatState) -> None:
        """Take the values of a state of the same layout."""
        for mine, theirs in zip(self.groups, other.groups, strict=True):
            mine.copy_(theirs)

    def adopt(self, module: nn.Module, *, buffers: bool = True) -> None:
        """Make the module's parameters, and its persistent ``buffers``, views of this state (its values are lost)."""
        for entry, view, tensor in zip(self.layout.entries, self.views, state_of(module, self.layout), strict=True):
            if entry.role in ("grad", "frozen"):
                tensor.data = view
            elif buffers:
                for name in entry.names:
                    owner, _, leaf = name.rpartition(".")
                    submodule(module, owner)._buffers[leaf] = view

    @property
    def trains_finite(self) -> bool:
        """Whether every parameter that is trained is finite in each place."""
        for flat, group in zip(self.groups, self.layout.groups, strict=True):
            # Adding them up is quick, and finds what is not finite; only that a sum is not finite proves nothing.
            if group.role == "grad" and not flat.sum().isfinite() and not flat.isfinite().all():
                return False
        return True

    def digest(self) -> str:
        """Hex digest over every entry's bytes in layout order."""
        return digest(self.views)


def digest(tensors: Iterable[Tensor]) -> str:
    """64 hex digits over the bytes of tensors, in order (blake2b, 32 bytes)."""
    state = hashlib.blake2b(digest_size=32)
    for tensor in tensors:
        state.update(bytes_of(tensor.detach().contiguous().cpu()))
    return state.hexdigest()


def named_digest(module: nn.Module) -> str:
    """The digest of a plain module's parameters and persistent buffers: equal to the run's, whatever trained it."""
    seen: dict[int, Tensor] = {}
    for _, tensor, _ in named_state(module):
        seen.setdefault(id(tensor), tensor)
    return digest(seen.values())


def state_of(module: nn.Module, layout: Layout) -> Iterator[Tensor]:
    """The module's tensors in layout order."""
    tensors: Mapping[str, Tensor] = {name: tensor for name, tensor, _ in named_state(module)}
    for entry in layout.entries:
        yield tensors[entry.name]


_LEAST = torch.iinfo(torch.int64).min


def ordered(value: Tensor) -> Tensor:
    """Integers or flags as a result holds them: int64 of the same order.

    uint64 lies 2^63 lower there. Its zero is then the smallest int64, the neutral element of the maximum: a maximum
    cannot tell a zero that every leaf set, in place of a larger value, from nothing (``compute.buffers`` refuses that).
    """
    return value.view(torch.int64) ^ _LEAST if value.dtype == torch.uint64 else value.to(torch.int64)


def of_ordered(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``ordered``."""
    return (value ^ _LEAST).view(torch.uint64) if dtype == torch.uint64 else value.to(dtype)


def add(left: Tensor, right: Tensor) -> None:
    """``left`` and ``right`` of results into ``left``: sums, or the greater ones (role ``max``)."""
    if left.dtype == torch.int64:
        torch.maximum(left, right, out=left)
    else:
        left.add_(right)


class ResultVector:
    """One block's sums: a single allocation, groups in order, each aligned; float32, int64 for role ``max``."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str = "cpu",
        *,
        pinned: bool = False,
        memory: Tensor | None = None,
        slot: int = -1,
    ) -> None:
        """``memory``: ``layout.vector_bytes`` bytes to lie in, in place of fresh ones. ``slot``: its number among those
        that lie in memory with others (``params.slots``)."""
        self.layout, self.slot = layout, slot
        if memory is None:
            memory = torch.empty(max(layout.vector_bytes, 1), dtype=torch.uint8, device=device, pin_memory=pinned)
        self.memory = memory
        self.groups: list[Tensor | None] = []
        for group, offset in zip(layout.groups, layout.vector_offsets, strict=False):
            nbytes = group.numel * group.result_dtype.itemsize
            piece = self.memory[offset : offset + nbytes].view(group.result_dtype) if group.role != "frozen" else None
            self.groups.append(piece)

    def group(self, index: int) -> Tensor:
        piece = self.groups[index]
        assert piece is not None, "frozen groups have no result"
        return piece

    def entry(self, index: int) -> Tensor:
        """The flat piece of one entry."""
        entry = self.layout.entries[index]
        return self.group(entry.group)[entry.offset : entry.offset + entry.numel]

    @cached_property
    def buckets(self) -> list[Tensor]:
        """One piece per result bucket."""
        return [self.group(b.group)[b.offset : b.offset + b.numel] for b in self.layout.result_buckets]

    @cached_property
    def bucket_bytes(self) -> list[memoryview]:
        """Every result bucket's memory (CPU only)."""
        return [bytes_of(piece) for piece in self.buckets]

    @cached_property
    def gradients(self) -> list[Tensor | None]:
        """One float32 view per entry in its shape, for role ``grad``; None for the others.

        Each counts by itself how often it was written (``.data``): so a backward pass shows where gradients landed.
        """
        return [
            self.group(e.group)[e.offset : e.offset + e.numel].view(e.shape).data if e.role == "grad" else None
            for e in self.layout.entries
        ]

    def reset(self, parts: Iterable[tuple[int, int, int]] | None = None) -> None:
        """Fill with the neutral element; ``parts``: (group, begin, end), there alone. For sums that is -0.0: -0.0 + x
        is x to the bit, which 0.0 + -0.0 is not."""
        pieces: Iterable[tuple[Group, Tensor | None]] = zip(self.layout.groups, self.groups, strict=True)
        if parts is not None:
            pieces = [(self.layout.groups[index], self.group(index)[begin:end]) for index, begin, end in parts]
        for group, piece in pieces:
            if piece is not None:
                piece.fill_(_LEAST if group.role == "max" else -0.0)
