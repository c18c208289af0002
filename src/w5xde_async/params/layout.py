"""The flat layout of a model: entries, groups, buckets, fingerprint.

Every parameter and persistent buffer of the model is an **entry**. Entries of one role and dtype form a **group**,
one flat vector. Roles:

  grad    trainable parameters: a step's result is the float32 sum of weighted gradients
  mean    floating buffers (batch norm's running statistics): the float32 sum of weighted changes
  max     integer and bool buffers (batch norm's counters): the elementwise maximum, int64 (``flat.ordered``)
  frozen  parameters without gradient: sent once to each worker, never changed

A **bucket** is a contiguous piece of one group, the unit on the wire and in the reducer. Offsets are multiples of
64 bytes, in elements: matrix kernels may give other bits for operands that are aligned otherwise, and a plain loop's
tensors are aligned so. What lies between (padding) is zero and nobody's value; only the codec ``sign``, which has no
zero, makes a magnitude of it, which norms of that result then have.

Tied weights are one entry with several names. Non-persistent buffers are the model's own affair, as in checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from w5xde_async.errors import MalformedFrame

ALIGN_BYTES = 64
_SMALL_BYTES = 64 << 10  # of a result
MAX_LAYOUT_BYTES = 64 << 20  #: of a layout's description
# Of a layout that came over a network:
_MAX_BUCKETS = 1 << 20
_MAX_ENTRIES = 1 << 17
_MAX_NAME_PARTS = 1 << 20  # of all names together; each may become a module
_MAX_AXES, _MAX_EXTENT = 64, 1 << 48
_ROLES = ("grad", "mean", "max", "frozen")
#: Of frozen parameters and buffers: what travels and what a checkpoint holds.
_DTYPES = frozenset((
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz,
    torch.float8_e5m2, torch.float8_e5m2fnuz, torch.bool, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
))  # fmt: skip
_GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the model. ``offset`` and ``numel`` are elements in its group; ``names[0]`` is its name."""

    names: tuple[str, ...]
    role: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    group: int
    offset: int
    numel: int

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Group:
    """All entries of one role and dtype, as one vector of ``numel`` elements (padding included)."""

    index: int
    role: str
    dtype: torch.dtype
    numel: int
    entries: tuple[int, ...]

    @property
    def result_dtype(self) -> torch.dtype:
        """dtype of a block's sum of this group, and of the reducer's accumulators."""
        return torch.int64 if self.role == "max" else torch.float32


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements ``offset`` to ``offset + numel`` of group ``group``; ``entries`` overlap it."""

    index: int
    group: int
    offset: int
    numel: int
    entries: tuple[int, ...]


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, tensor, is_parameter) of every parameter and persistent buffer, every name of a tied one."""
    persistent = set(module.state_dict(keep_vars=True))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, parameter, True
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in persistent:
            yield name, buffer, False


def submodule(module: nn.Module, path: str) -> nn.Module:
    """The part of it at ``path``: ``get_submodule``, which modules in TorchScript lack."""
    return reduce(getattr, path.split(".") if path else (), module)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_BY_NAME = {_dtype_name(dtype): dtype for dtype in _DTYPES}


@dataclass(frozen=True)
class Layout:
    """Where each tensor of the model lies in the flat groups. Built alike on both sides; compared by fingerprint."""

    entries: tuple[Entry, ...]
    groups: tuple[Group, ...]
    buckets: tuple[Bucket, ...]
    bucket_bytes: int

    @classmethod
    def of(cls, module: nn.Module, *, bucket_bytes: int = 4 << 20) -> Layout:
        """Read the layout off a module. Raises ValueError naming the first tensor that cannot be trained here."""
        found: dict[int, tuple[list[str], Tensor, bool]] = {}
        for name, tensor, is_parameter in named_state(module):
            known = found.get(id(tensor))
            if known:
                known[0].append(name)
            else:
                found[id(tensor)] = ([name], tensor, is_parameter)
        staged: list[tuple[tuple[str, ...], str, torch.dtype, tuple[int, ...]]] = []
        for names, tensor, is_parameter in found.values():
            staged.append((tuple(names), _role(names[0], tensor, is_parameter), tensor.dtype, tuple(tensor.shape)))
        _check_shared_memory(module)
        if len(staged) > _MAX_ENTRIES:
            raise ValueError(f"it has {len(staged):,} tensors, more than {_MAX_ENTRIES:,}; stack some of them")
        _check_size([(names, shape) for names, _, _, shape in staged], bucket_bytes)
        layout = cls._build(staged, bucket_bytes)
        if len(layout.describe()) > MAX_LAYOUT_BYTES:
            raise ValueError(f"the names of its tensors come to more than {MAX_LAYOUT_BYTES >> 20} MiB; shorten them")
        return layout

    @classmethod
    def _build(
        cls, staged: list[tuple[tuple[str, ...], str, torch.dtype, tuple[int, ...]]], bucket_bytes: int
    ) -> Layout:
        keys = sorted({(_ROLES.index(role), _dtype_name(dtype)) for _, role, dtype, _ in staged})
        group_of = {key: index for index, key in enumerate(keys)}
        sizes = [0] * len(keys)
        members: list[list[int]] = [[] for _ in keys]
        entries: list[Entry] = []
        for names, role, dtype, shape in staged:
            group = group_of[_ROLES.index(role), _dtype_name(dtype)]
            numel = math.prod(shape)
            entries.append(Entry(names, role, dtype, shape, group, sizes[group], numel))
            members[group].append(len(entries) - 1)
            align = ALIGN_BYTES // dtype.itemsize
            sizes[group] += -(-numel // align) * align
        groups = tuple(
            Group(index, _ROLES[role], getattr(torch, dtype), sizes[index], tuple(members[index]))
            for index, (role, dtype) in enumerate(keys)
        )
        buckets: list[Bucket] = []
        for made in groups:
            _cut(made, entries, bucket_bytes, buckets)
        return cls(tuple(entries), groups, tuple(buckets), bucket_bytes)

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters, frozen ones included, tied ones once."""
        return sum(entry.numel for entry in self.entries if entry.role in ("grad", "frozen"))

    @cached_property
    def result_buckets(self) -> tuple[Bucket, ...]:
        """Buckets that a block's results are made of: all but the frozen ones. They come first in ``buckets``."""
        return tuple(bucket for bucket in self.buckets if self.groups[bucket.group].role != "frozen")

    @cached_property
    def trainable(self) -> tuple[int, ...]:
        """Entry indices of role ``grad``."""
        return tuple(index for index, entry in enumerate(self.entries) if entry.role == "grad")

    @cached_property
    def vector_offsets(self) -> tuple[int, ...]:
        """Byte offset of each group in a block's result vector; frozen groups have none (the total instead)."""
        offsets, at = [], 0
        for group in self.groups:
            offsets.append(at)
            if group.role != "frozen":
                at += -(-group.numel * group.result_dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
        return (*offsets, at)

    @property
    def vector_bytes(self) -> int:
        """Bytes of one block's whole result."""
        return self.vector_offsets[-1]

    @property
    def is_small(self) -> bool:
        """Whether a result travels within a machine as fast as it is told of."""
        return self.vector_bytes <= _SMALL_BYTES

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of all groups in their own dtypes."""
        return sum(group.numel * group.dtype.itemsize for group in self.groups)

    @cached_property
    def buffer_bytes(self) -> int:
        """Of them, buffers'."""
        return buffer_bytes(self.entries)

    def result_nbytes(self, bucket: Bucket) -> int:
        """Bytes of one bucket of a block's result."""
        return bucket.numel * self.groups[bucket.group].result_dtype.itemsize

    def state_nbytes(self, bucket: Bucket) -> int:
        """Bytes of one bucket of the parameters."""
        return bucket.numel * self.groups[bucket.group].dtype.itemsize

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes over names, roles, dtypes and shapes: equal models, equal fingerprints."""
        return hashlib.blake2b(self.describe(), digest_size=32).digest()

    def describe(self) -> bytes:
        """The layout as JSON text, for the other side to compare."""
        rows = [[list(e.names), e.role, _dtype_name(e.dtype), list(e.shape)] for e in self.entries]
        return json.dumps({"bucket_bytes": self.bucket_bytes, "entries": rows}, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, described: bytes) -> Layout:
        """Rebuild from ``describe``. Raises MalformedFrame for anything else."""
        try:
            if described.count(b",") > 16 * _MAX_ENTRIES:  # as many objects as there are, before they are made
                raise ValueError(f"more than {_MAX_ENTRIES} entries in the layout")
            document: Any = json.loads(described)
            if len(document["entries"]) > _MAX_ENTRIES:
                raise ValueError(f"more than {_MAX_ENTRIES} entries in the layout")
            staged = []
            for names, role, dtype, shape in document["entries"]:
                known = _BY_NAME[dtype]
                if not names or not _may_have(role, known):
                    raise ValueError("an entry of the layout")
                if len(shape) > _MAX_AXES or not all(type(e) is int and 0 <= e <= _MAX_EXTENT for e in shape):
                    raise ValueError("a shape of the layout")
                staged.append((tuple(map(str, names)), role, known, tuple(shape)))
            bucket_bytes = document["bucket_bytes"]
            if type(bucket_bytes) is not int or bucket_bytes < ALIGN_BYTES:
                raise ValueError("bucket_bytes of the layout")
            _check_size([(names, shape) for names, _, _, shape in staged], bucket_bytes)
            return cls._build(staged, bucket_bytes)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise MalformedFrame(f"layout: {error}") from None

    def first_difference(self, other: Layout) -> str:
        """What differs first between this (mine) and ``other`` (theirs), in words; empty when nothing does."""
        mine, theirs = self.entries, other.entries
        for a, b in zip(mine, theirs, strict=False):
            if a.names != b.names and a.name == b.name:
                return f"tensor {a.name!r} is tied: {' = '.join(b.names)} there, {' = '.join(a.names)} here"
            if a.names != b.names:
                return f"tensor {b.name!r} there is {a.name!r} here"
            if a.shape != b.shape:
                return f"tensor {a.name!r} has shape {list(b.shape)} there and {list(a.shape)} here"
            if a.dtype != b.dtype:
                return f"tensor {a.name!r} is {_dtype_name(b.dtype)} there and {_dtype_name(a.dtype)} here"
            if a.role != b.role:
                return f"tensor {a.name!r} is {_ROLE_WORDS[b.role]} there and {_ROLE_WORDS[a.role]} here"
        if len(mine) < len(theirs):
            return f"tensor {theirs[len(mine)].name!r} there is missing here"
        if len(mine) > len(theirs):
            return f"tensor {mine[len(theirs)].name!r} here is missing there"
        return ""


def runs(layout: Layout, buckets: Iterable[int]) -> list[tuple[int, int, int]]:
    """(group, begin, end) of these buckets' elements, in order; neighbours of one group are one run."""
    found: list[tuple[int, int, int]] = []
    for number in sorted(buckets):
        bucket = layout.buckets[number]
        end = bucket.offset + bucket.numel
        if found and found[-1][0] == bucket.group and found[-1][2] == bucket.offset:
            found[-1] = (bucket.group, found[-1][1], end)
        else:
            found.append((bucket.group, bucket.offset, end))
    return found


_ROLE_WORDS = {
    "grad": "a trainable parameter",
    "frozen": "a frozen parameter",
    "mean": "a floating buffer",
    "max": "an integer buffer",
}


def _check_size(tensors: Sequence[tuple[tuple[str, ...], tuple[int, ...]]], bucket_bytes: int) -> None:
    """What one side takes the other takes too. Raises ValueError."""
    if sum(name.count(".") + 1 for names, _ in tensors for name in names) > _MAX_NAME_PARTS:
        raise ValueError(f"the layout's names have more than {_MAX_NAME_PARTS} parts")
    if sum(8 * math.prod(shape) for _, shape in tensors) > _MAX_BUCKETS * bucket_bytes:
        raise ValueError(f"more than {_MAX_BUCKETS} buckets in the layout; larger ones (bucket_bytes) make fewer")


def _check_shared_memory(module: nn.Module) -> None:
    """Every tensor of a module gets memory of its own: two that share some would come apart. Raises ValueError."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found.setdefault(id(tensor), (name, tensor))
    pieces: list[tuple[str, int, int, int, str]] = []
    for name, tensor in found.values():
        if tensor.is_meta or nn.parameter.is_lazy(tensor):  # no memory yet
            continue
        if tensor.layout is torch.strided and tensor.numel():
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            end = begin + tensor.numel() * tensor.element_size()
            if reach + 1 == tensor.numel():  # of others nothing is known: their elements may lie between each other
                pieces.append((str(tensor.device), tensor.untyped_storage().data_ptr(), begin, end, name))
    pieces.sort()
    for before, after in pairwise(pieces):
        if before[:2] == after[:2] and after[2] < before[3]:
            raise ValueError(
                f"tensors {before[4]!r} and {after[4]!r} share memory without being one tensor, and would come apart; "
                "tie them (a.weight = b.weight), or clone one"
            )


def _may_have(role: str, dtype: torch.dtype) -> bool:
    """Whether ``_role`` gives this role to tensors of this dtype."""
    if role in ("mean", "max"):
        return dtype.is_floating_point == (role == "mean")
    return role == "frozen" or (role == "grad" and dtype in _GRADIENT_DTYPES)


def buffer_bytes(entries: Iterable[Entry]) -> int:
    """Bytes of those that are buffers."""
    return sum(entry.numel * entry.dtype.itemsize for entry in entries if entry.role in ("mean", "max"))


def _role(name: str, tensor: Tensor, is_parameter: bool) -> str:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"tensor {name!r} is not dense ({tensor.layout}); only dense tensors can be trained here")
    if nn.parameter.is_lazy(tensor):
        raise ValueError(
            f"tensor {name!r} is lazy and has no shape yet; run one forward pass where the job makes the model"
        )
    if tensor.dtype.is_complex:
        raise ValueError(f"tensor {name!r} is {_dtype_name(tensor.dtype)}; store it as two real tensors")
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"tensor {name!r} is {_dtype_name(tensor.dtype)}, which neither travels nor can be saved")
    if tensor.dim() > _MAX_AXES:
        raise ValueError(f"tensor {name!r} has {tensor.dim()} axes, at most {_MAX_AXES} are possible")
    if is_parameter and tensor.requires_grad:
        if not tensor.is_leaf:  # as in a copy of what is in TorchScript: the gradient is that of what it came from
            raise ValueError(
                f"parameter {name!r} is the result of a computation, as in a copy.deepcopy of a model in TorchScript, "
                "and cannot be trained; make the model anew, and load its state_dict()"
            )
        if tensor.dtype not in _GRADIENT_DTYPES:
            raise ValueError(
                f"parameter {name!r} is {_dtype_name(tensor.dtype)}; sums are float32, so trainable parameters "
                "are float32, bfloat16 or float16 (model.float() converts)"
            )
        return "grad"
    if is_parameter:
        return "frozen"
    return "mean" if tensor.dtype.is_floating_point else "max"


def _cut(group: Group, entries: list[Entry], bucket_bytes: int, buckets: list[Bucket]) -> None:
    """Cut a group into buckets of about ``bucket_bytes`` of result, at entry borders where they lie near."""
    limit = max(bucket_bytes // group.result_dtype.itemsize // ALIGN_BYTES * ALIGN_BYTES, ALIGN_BYTES)
    borders = [entries[index].offset for index in group.entries[1:]]
    starts, at = [0], 0
    for border in [*borders, group.numel]:
        previous = at
        at = border
        if border - starts[-1] <= limit:
            continue
        if previous > starts[-1]:
            starts.append(previous)
        while border - starts[-1] > limit:
            starts.append(starts[-1] + limit)
    offsets = [entries[index].offset for index in group.entries]
    ends = [entries[index].offset + entries[index].numel for index in group.entries]
    for start, stop in zip(starts, [*starts[1:], group.numel], strict=True):
        if stop > start:
            touching = group.entries[bisect_right(ends, start) : bisect_left(offsets, stop)]
            buckets.append(Bucket(len(buckets), group.index, start, stop - start, touching))
