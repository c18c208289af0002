"""The safetensors format, streamed: one pass, one buffer's worth of extra memory, a digest on the way.

The library's own writer first copies every tensor into bytes and its reader maps the file; a checkpoint needs
neither a second model in memory nor tensors that change when a file does. The format is the library's: an 8-byte
little-endian length, a JSON header, the raw elements. Tensors that are one and the same are stored once, the other
names stand in ``__metadata__`` as ``{name: stored name}``, which ``safetensors.torch.load_model`` understands.
The host must be little-endian, like every host PyTorch is built for today.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from w5xde_async.errors import CheckpointCorrupt, StoreError

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_CHUNK_BYTES = 4 << 20
_MAX_DIMS = 64  # PyTorch's own limit
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit

Sink = Callable[[bytes | memoryview], None]


def write_tensors(sink: Sink, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> int:
    """Give ``sink`` the bytes of a safetensors file that holds ``tensors``, in order; how many they are.

    ``about`` stands in the file's metadata, which loaders pass over; its texts are no names of tensors.

    Raises:
        StoreError: a value that the format cannot hold; ``path`` is its name.
    """
    stored, aliases = _distinct(tensors)
    # Wide elements first keeps every tensor aligned without padding, which the format does not allow.
    order = sorted(stored, key=lambda name: -stored[name].element_size())
    metadata = {**aliases, **(about or {})}
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name in order:
        tensor = stored[name]
        end = offset + tensor.numel() * tensor.element_size()
        entry = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        header[name] = entry
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > _MAX_HEADER_BYTES:
        raise StoreError("header", f"{len(stored)} tensors need a header over {_MAX_HEADER_BYTES} bytes")
    sink(len(encoded).to_bytes(8, "little") + encoded)
    for name in order:
        data = _bytes_of(stored[name].detach().resolve_conj().resolve_neg().cpu().contiguous())
        for start in range(0, len(data), _CHUNK_BYTES):
            sink(data[start : start + _CHUNK_BYTES])
    return 8 + len(encoded) + offset


def read_metadata(file: BinaryIO, nbytes: int) -> dict[str, str]:
    """The metadata of a safetensors file of ``nbytes``, without its tensors. Raises CheckpointCorrupt."""
    return _read_header(file, nbytes, lambda _: None)[0]


def read_tensors(file: BinaryIO, nbytes: int, tap: Sink) -> dict[str, Tensor]:
    """Read a safetensors file of ``nbytes`` into fresh tensors; ``tap`` sees every byte in order.

    Nothing is allocated that the file's size does not cover. Names that were one tensor are one tensor again.

    Raises:
        CheckpointCorrupt: not such a file; ``path`` is the part that is wrong.
    """
    aliases, entries, header_bytes = _read_header(file, nbytes, tap)
    tensors: dict[str, Tensor] = {}
    position = 0
    for name, dtype, shape, start, end in sorted(entries, key=lambda entry: (entry[3], entry[4])):
        if start != position or end > nbytes - 8 - header_bytes:
            raise CheckpointCorrupt(name, f"claims bytes {start} to {end}, which are not its own")
        tensor = torch.empty(shape, dtype=dtype)
        _fill(file, _bytes_of(tensor), tap, name)
        tensors[name] = tensor
        position = end
    if 8 + header_bytes + position != nbytes:
        raise CheckpointCorrupt("file", f"has {nbytes} bytes, its header accounts for {8 + header_bytes + position}")
    for alias, name in aliases.items():
        if name in tensors:
            tensors.setdefault(alias, tensors[name])
    return tensors


def _read_header(
    file: BinaryIO, nbytes: int, tap: Sink
) -> tuple[dict[str, str], list[tuple[str, torch.dtype, list[int], int, int]], int]:
    """Metadata, what the file says of its tensors, and how many bytes the header has."""
    prefix = _read_exactly(file, 8, tap)
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > min(nbytes - 8, _MAX_HEADER_BYTES):
        raise CheckpointCorrupt("header", f"claims {header_bytes} bytes in a file of {nbytes}")
    try:
        header = json.loads(_read_exactly(file, header_bytes, tap))
        metadata = {name: str(told) for name, told in header.pop("__metadata__", {}).items()}
        entries = [(name, *_layout(entry)) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt("header", f"is not a safetensors header ({error!r})") from error
    return metadata, entries, header_bytes


def _distinct(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to store, and the further names of those that appear more than once."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES:
            kind = f"{tensor.dtype} tensor" if isinstance(tensor, Tensor) else type(tensor).__qualname__
            raise StoreError(name, f"a {kind} cannot be stored as safetensors")
        if tensor.device.type == "meta":
            raise StoreError(name, "a tensor on the meta device has no elements to store")
        if name == "__metadata__":
            raise StoreError(name, "the name is reserved by the safetensors format")
        flags = (tensor.is_conj(), tensor.is_neg())
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), *flags)
        if tensor.numel() and identity in names:
            aliases[name] = names[identity]
        else:
            names[identity] = name
            stored[name] = tensor
    return stored, aliases


def _layout(entry: Any) -> tuple[torch.dtype, list[int], int, int]:
    """A header's entry with every type and size checked: its file is not verified yet."""
    dtype, shape, (start, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in (*shape, start, end)):
        raise ValueError("a size or an offset is not a number of that kind")
    if len(shape) > _MAX_DIMS or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{end - start} bytes do not hold the shape {shape}")
    if math.prod(number or 1 for number in shape) >= 1 << 63:  # of no elements; torch counts strides all the same
        raise ValueError(f"no tensor has the shape {shape}")
    return dtype, list(shape), start, end


def _bytes_of(tensor: Tensor) -> memoryview:
    """The elements of a contiguous CPU tensor as writable bytes, not copied."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _read_exactly(file: BinaryIO, count: int, tap: Sink) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise CheckpointCorrupt("header", "the file ends inside it")
    tap(data)
    return data


def _fill(file: BinaryIO, target: memoryview, tap: Sink, name: str) -> None:
    for start in range(0, len(target), _CHUNK_BYTES):
        chunk = target[start : start + _CHUNK_BYTES]
        if file.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
            raise CheckpointCorrupt(name, "the file ends inside it")
        tap(chunk)
