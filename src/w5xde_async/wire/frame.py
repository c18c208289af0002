"""Frame codec: one message and its buffers <-> bytes.

A frame is ``[4-byte big-endian header length][msgpack header][raw buffers]``. The header is the array
``[type, [field, ...], [[name, dtype, shape, codec, nbytes], ...]]``; the buffers follow in that order,
little-endian, unpadded. The length counts the header alone, so a buffer may be larger than 4 GiB.

Invariants: every size is checked against its cap before anything is allocated for it; nothing here does
I/O, keeps time or unpickles. What this room does not do: decide whether a buffer is *expected* (the caller's
``accept`` does, knowing the leases) and verify who the peer is (``handshake``).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import DecodeError, Meta, Raw, structs

from w5xde_async.errors import FrameTooLarge, MalformedFrame, ProtocolViolation, utf8
from w5xde_async.wire.messages import MESSAGES, Message

Buffer = bytes | bytearray | memoryview
"""Anything sent as it lies in memory; memoryviews are flat, format ``B``."""

LENGTH_BYTES = 4
_LENGTH = struct.Struct(">I")

#: Bytes of one element; also the list of dtypes that the wire knows (names as torch prints them).
DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip

MAX_AXES = 16
_Count = Annotated[int, Meta(ge=0)]
_RawSpec = tuple[str, str, Annotated[tuple[_Count, ...], Meta(max_length=MAX_AXES)], str, _Count]


def _plain(value: Any) -> Any:
    """A text or number of a type of its own (torch's version, numpy's floats) as what it is."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a {type(value).__name__} has no place in a header")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
#: The fields stay as they are until the message is known whose they are.
_HEADER = msgspec.msgpack.Decoder(tuple[int, Raw, tuple[_RawSpec, ...]])
_MAX_SPAN = 1 << 46  # product of the extents but for zeros, beside which the byte count says nothing of them


class Caps(NamedTuple):
    """What one frame may hold. ``header_bytes`` and ``buffers`` bound one header, ``buffer_bytes`` one buffer."""

    header_bytes: int
    buffers: int
    buffer_bytes: int


#: Before authentication: a small header and no buffer at all.
HANDSHAKE_CAPS = Caps(header_bytes=4096, buffers=0, buffer_bytes=0)
#: After it. Buffers have no fixed cap here: ``accept`` knows the exact size that a lease authorizes.
SESSION_CAPS = Caps(header_bytes=1 << 20, buffers=8192, buffer_bytes=1 << 46)


class BufferSpec(NamedTuple):
    """One buffer of a frame. ``nbytes`` counts encoded bytes; for codec ``raw`` it is product(shape) * itemsize."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    nbytes: int


def encode(message: Message, buffers: Sequence[tuple[BufferSpec, Buffer]] = ()) -> list[Buffer]:
    """The chunks of one frame, in order: length and header in one piece, then each buffer uncopied.

    A text may have halves of characters, as names of hosts and files have: others stand in for them.

    Raises ProtocolViolation where a buffer is not as long as its spec says: the peer would read on out of step.
    """
    specs = []
    chunks: list[Buffer] = [b""]
    for spec, data in buffers:
        nbytes = spec.nbytes
        if len(data) != nbytes:
            raise ProtocolViolation(f"buffer {spec.name!r} has {len(data)} bytes, its spec says {nbytes}")
        specs.append(spec)
        if nbytes:
            chunks.append(data)
    try:
        header = _ENCODER.encode((message.TYPE, message, specs))
    except UnicodeEncodeError:
        fields = [utf8(value) if isinstance(value, str) else value for value in structs.astuple(message)]
        header = _ENCODER.encode((message.TYPE, fields, specs))
    chunks[0] = _LENGTH.pack(len(header)) + header
    return chunks


def header_length(prefix: Buffer, caps: Caps) -> int:
    """Header bytes announced by a frame's first four bytes. Raises FrameTooLarge, MalformedFrame."""
    length: int = _LENGTH.unpack(prefix)[0]
    if length > caps.header_bytes:
        raise FrameTooLarge("header", length, caps.header_bytes)
    if length < 3:  # the shortest header is an array of three empty things
        raise MalformedFrame(f"header of {length} bytes")
    return length


def decode_header(header: Buffer, caps: Caps) -> tuple[Message, tuple[BufferSpec, ...]]:
    """Parse and check one header. Raises MalformedFrame, FrameTooLarge; never anything else."""
    try:
        kind, fields, raw_specs = _HEADER.decode(header)
    except (DecodeError, ValueError, RecursionError) as error:
        raise MalformedFrame(f"header is not [type, fields, buffers] in msgpack ({type(error).__name__})") from None
    cls = MESSAGES.get(kind)
    if cls is None:
        raise MalformedFrame(f"unknown message type {kind}")
    if len(raw_specs) > caps.buffers:
        raise FrameTooLarge(f"{cls.__name__}: buffer count", len(raw_specs), caps.buffers)
    return cls.parse(fields), tuple([_spec(cls.__name__, raw, caps) for raw in raw_specs])


def _spec(message: str, raw: _RawSpec, caps: Caps) -> BufferSpec:
    name, dtype, shape, codec, nbytes = raw
    itemsize = DTYPE_BYTES.get(dtype)
    if itemsize is None:
        raise MalformedFrame(f"{message}: unknown dtype of buffer {name[:64]!r}")
    numel = span = 1
    for extent in shape:
        numel *= extent
        span *= extent or 1
    if span > _MAX_SPAN:
        raise MalformedFrame(f"{message}: shape of buffer {name[:64]!r}")
    if nbytes > caps.buffer_bytes:
        raise FrameTooLarge(f"{message}: buffer {name[:64]!r}", nbytes, caps.buffer_bytes)
    if codec == "raw" and nbytes != numel * itemsize:
        raise MalformedFrame(f"{message}: buffer {name[:64]!r} has {nbytes} bytes, its shape {numel * itemsize}")
    return BufferSpec(name, dtype, shape, codec, nbytes)
