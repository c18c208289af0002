"""A batch as structure and tensors: nested tuples, lists and mappings of tensors, numbers, strings.

The structure travels as msgpack, the tensors as raw buffers. ``packed`` tensors hold the rows of all leaves of a
block, one behind the other; ``unpack`` cuts them again. Nothing here knows leases or links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import msgpack
import msgspec
import torch
from msgspec import DecodeError, Raw
from torch import Tensor

from w5xde_async.errors import MalformedFrame
from w5xde_async.params.layout import ALIGN_BYTES
from w5xde_async.wire.frame import DTYPE_BYTES, MAX_AXES, Buffer, BufferSpec

_MAX_DEPTH = 32
_MAX_TENSORS = 2048
_MAX_STRUCTURE_BYTES = 256 << 10  # it travels in a header, which has 1 MiB for everything
_DTYPES = {getattr(torch, name) for name in DTYPE_BYTES}
_EACH = "e"  # at the top of a structure: what follows is one structure for each leaf


def _wraps(kind: type[Tensor]) -> bool:
    """Whether such tensors are made of others, as a MaskedTensor is. A FakeTensor stands for one that is dense."""
    own = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return own and kind.__module__ != "torch._subclasses.fake_tensor"


def flatten(batch: Any) -> tuple[bytes, list[Tensor]]:
    """``(structure, tensors)`` of a batch. Raises TypeError naming the place of what cannot travel.

    What is taken here no worker refuses.
    """
    tensors: list[Tensor] = []

    def walk(value: Any, path: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise TypeError(f"batch{path} is nested deeper than {_MAX_DEPTH}")
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                raise TypeError(f"batch{path} is a {value.layout} tensor; give a dense one")
            if value.is_nested or _wraps(type(value)):
                kind = "nested tensor" if value.is_nested else type(value).__name__
                raise TypeError(f"batch{path} is a {kind}; give a dense one")
            if value.dtype not in _DTYPES:
                raise TypeError(f"batch{path} is of {value.dtype}, which does not travel; convert it in collate=...")
            if value.dim() > MAX_AXES:
                raise TypeError(f"batch{path} has {value.dim()} axes; at most {MAX_AXES} travel: reshape it")
            if len(tensors) == _MAX_TENSORS:
                raise TypeError(f"the batch holds more than {_MAX_TENSORS} tensors; stack them in collate=...")
            tensors.append(value.detach())
            return ["t"]
        if type(value) is tuple or type(value) is list:
            kind = "u" if type(value) is tuple else "l"
            return [kind, [walk(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]]
        if isinstance(value, Mapping):  # what collators of tokenizers give is no dict; it arrives as one
            if not all(type(key) is str for key in value):
                raise TypeError(f"batch{path} has keys that are not strings")
            return ["d", [[key, walk(item, f"{path}[{key!r}]", depth + 1)] for key, item in value.items()]]
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            raise TypeError(f"batch{path} is {value!r:.40}..., more than 64 bits; give a tensor or a string")
        if value is None or type(value) in (bool, int, float, str):
            return ["v", value]
        raise TypeError(
            f"batch{path} is a {type(value).__name__}; a batch holds tensors, numbers and strings in plain tuples, "
            "lists and dicts (convert it in collate=...)"
        )

    try:
        structure: bytes = msgpack.packb(walk(batch, "", 0))
    except UnicodeEncodeError as error:
        raise TypeError(f"the batch holds a string that is not Unicode text: {error.object!r:.60}") from None
    if len(structure) > _MAX_STRUCTURE_BYTES:
        raise TypeError(
            f"the batch holds {len(structure)} bytes of numbers and strings outside of tensors, at most "
            f"{_MAX_STRUCTURE_BYTES} travel; make tensors of them in collate=..."
        )
    return structure, tensors


def on_host(tensor: Tensor) -> Tensor:
    """In this machine's memory, as it is sent: a dataset's tensors may lie on an accelerator."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Axes of one element may keep any strides, by which some kernels go (channels_last): those of a fresh tensor.
    return host.view(-1).view(host.shape) if 1 in host.shape else host


def joined(structures: Sequence[bytes]) -> bytes:
    """The structure of leaves that lie one behind the other: the one that all have, or else each one's own.

    Strings and numbers are part of a structure, so leaves with a text or a name in each sample have different ones.
    """
    if all(structure == structures[0] for structure in structures):
        return structures[0]
    return msgspec.msgpack.encode((_EACH, [Raw(structure) for structure in structures]))


def unflatten(structure: bytes, tensors: Sequence[Tensor]) -> Any:
    """The batch again. Raises MalformedFrame where structure and tensors do not agree."""
    return _fill(_parse(structure), tensors)


def _parse(structure: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(structure)
    except (DecodeError, ValueError, RecursionError) as error:
        raise MalformedFrame(f"batch structure: {type(error).__name__}") from None


def _fill(tree: Any, tensors: Sequence[Tensor]) -> Any:
    supply = iter(tensors)

    def build(node: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH or type(node) is not list or not node:
            raise ValueError("a node")
        match node:
            case ["t"]:
                return next(supply)
            case ["u", list(items)]:
                return tuple([build(item, depth + 1) for item in items])
            case ["l", list(items)]:
                return [build(item, depth + 1) for item in items]
            case ["d", list(items)]:
                return {str(key): build(item, depth + 1) for key, item in items}
            case ["v", None | bool() | int() | float() | str() as value]:
                return value
        raise ValueError("a node")

    try:
        batch = build(tree, 0)
        left = sum(1 for _ in supply)
    except (ValueError, TypeError, StopIteration, RuntimeError, RecursionError) as error:
        raise MalformedFrame(f"batch structure: {type(error).__name__}") from None
    if left:
        raise MalformedFrame(f"batch structure: {left} tensors too many")
    return batch


def leaves_of(
    structure: bytes, tensors: Sequence[Tensor], samples: Sequence[int], packed: bool
) -> Iterator[tuple[int, Any]]:
    """(samples, batch) of each leaf, in order. ``packed``: each tensor's rows of all leaves; else leaf after leaf."""
    if packed:
        total = sum(samples)
        if any(tensor.dim() == 0 or tensor.shape[0] != total for tensor in tensors):
            raise MalformedFrame("a packed batch whose rows are not the leaves' samples")
        if not tensors:
            raise MalformedFrame("a packed batch without tensors")
        sizes = list(samples)  # ``torch.split`` checks them in Python, which takes longer than to cut a small batch
        pieces: Iterable[Sequence[Tensor]]
        if len(sizes) == 1:
            pieces = [[tensor.detach() for tensor in tensors]]  # a step may ask for gradients of what it is given
        else:
            pieces = zip(*[torch.split_with_sizes(tensor, sizes) for tensor in tensors], strict=True)
        plain = _is_plain(structure, len(tensors))
        tree = None if plain else _parse(structure)
        for count, piece in zip(samples, pieces, strict=True):
            aligned = tuple([_aligned(tensor) for tensor in piece])
            yield count, aligned if plain else _fill(tree, aligned)
        return
    tensors = [_aligned(tensor) for tensor in tensors]
    tree = _parse(structure)
    if type(tree) is list and len(tree) == 2 and tree[0] == _EACH:
        trees = tree[1]
        if type(trees) is not list or len(trees) != len(samples):
            raise MalformedFrame("a batch whose structures are not the leaves'")
        begin = 0
        for count, own in zip(samples, trees, strict=True):
            end = begin + _num_tensors(own)
            yield count, _fill(own, tensors[begin:end])
            begin = end
        if begin != len(tensors):
            raise MalformedFrame("a batch with more tensors than its structures")
        return
    per_leaf, rest = divmod(len(tensors), max(len(samples), 1))
    if rest:
        raise MalformedFrame("a batch whose tensors do not divide by its leaves")
    for index, count in enumerate(samples):
        yield count, _fill(tree, tensors[index * per_leaf : (index + 1) * per_leaf])


def selected(
    structure: bytes,
    buffers: Sequence[tuple[BufferSpec, Buffer]],
    samples: Sequence[int],
    packed: bool,
    leaves: Sequence[int],
) -> tuple[bytes, list[tuple[BufferSpec, Buffer]]]:
    """(structure, buffers) of some leaves of a block, leaf after leaf. ``leaves``: numbered from the block's first on.

    Nothing is copied.
    """
    if not leaves:
        return structure, []
    if packed:
        ends = list(accumulate(samples))
        chosen: list[tuple[BufferSpec, Buffer]] = []
        for leaf in leaves:
            for spec, data in buffers:
                row = spec.nbytes // max(spec.shape[0], 1)
                begin, end = (ends[leaf] - samples[leaf]) * row, ends[leaf] * row
                own = spec._replace(shape=(samples[leaf], *spec.shape[1:]), nbytes=end - begin)
                chosen.append((own, memoryview(data)[begin:end]))
        return structure, chosen
    tree = _parse(structure)
    if type(tree) is list and len(tree) == 2 and tree[0] == _EACH:
        counts = [_num_tensors(own) for own in tree[1]]
        raw = msgspec.msgpack.decode(structure, type=tuple[str, list[Raw]])[1]
        structure = joined([bytes(raw[leaf]) for leaf in leaves])
    else:
        counts = [len(buffers) // len(samples)] * len(samples)
    ends = list(accumulate(counts))
    return structure, [one for leaf in leaves for one in buffers[ends[leaf] - counts[leaf] : ends[leaf]]]


def _num_tensors(tree: Any, depth: int = 0) -> int:
    """Tensors that a structure asks for; of one that is none, any number: ``_fill`` says so."""
    if type(tree) is not list or not tree or depth > _MAX_DEPTH:
        return 0
    if tree[0] == "t":
        return 1
    if len(tree) != 2 or type(tree[1]) is not list or tree[0] not in ("u", "l", "d"):
        return 0
    items = tree[1] if tree[0] != "d" else [item[1] for item in tree[1] if type(item) is list and len(item) == 2]
    return sum(_num_tensors(item, depth + 1) for item in items)


@lru_cache(maxsize=8)  # a dataset's is the same in every block
def _is_plain(structure: bytes, num_tensors: int) -> bool:
    """Whether a batch is just a tuple of its tensors, as most are."""
    return bool(_parse(structure) == ["u", [["t"]] * num_tensors])


def rows(batch: Any, samples: int, start: int, stop: int) -> Any:
    """Samples ``start`` to ``stop`` of a batch: tensors of ``samples`` rows are cut, everything else stays whole. The
    batch itself where those are all."""
    if stop - start == samples:
        return batch
    if isinstance(batch, Tensor):
        if batch.dim() and batch.shape[0] == samples:
            return _aligned(batch[start:stop])
        return batch
    # Collating gives strings as a list inside of dicts, as a tuple elsewhere: one a sample. A tuple of numbers may be a
    # size.
    scalars = (str, int, float) if isinstance(batch, list) else (str, bytes)
    if isinstance(batch, (tuple, list)) and len(batch) == samples and all(isinstance(i, scalars) for i in batch):
        return batch[start:stop]
    if isinstance(batch, (tuple, list)):
        return type(batch)(rows(item, samples, start, stop) for item in batch)
    if isinstance(batch, Mapping):
        return {key: rows(item, samples, start, stop) for key, item in batch.items()}
    return batch


def microbatches(batch: Any, samples: int, size: int) -> list[tuple[int, int, Any]]:
    """A leaf's batch in pieces of ``size`` samples, the last perhaps smaller: first sample, end and data of each."""
    spans = [(begin, min(begin + size, samples)) for begin in range(0, samples, size)]
    return [(begin, end, rows(batch, samples, begin, end)) for begin, end in spans]


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same batch with every tensor changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(item, change) for item in batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(item, change) for key, item in batch.items()}
    return batch


def copied(batch: Any) -> Any:
    """The same batch in tensors and containers of its own: a step may write into it, or take things out."""
    return map_tensors(batch, Tensor.clone)


def _aligned(tensor: Tensor) -> Tensor:
    # Kernels may give other bits for operands that start elsewhere than a fresh tensor does.
    return tensor if tensor.data_ptr() % ALIGN_BYTES == 0 else tensor.clone()
