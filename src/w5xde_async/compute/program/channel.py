"""What a sandboxed child and its worker say to each other, and the memory that both have.

``[4-byte big-endian length][msgpack array]`` over a socket of their own, nothing pickled, lengths bounded; tensors lie
in shared memory and are spoken of by offsets. The worker believes the child no word: all of an answer is checked.

Regions (``segments``) have a size that is sealed before the child has them.
"""

from __future__ import annotations

import math
import os
import socket
import struct
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from msgspec import DecodeError, Meta, Struct, msgpack
from torch import Tensor

from w5xde_async.compute.block import LeafSpec
from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import ALIGN_BYTES, Layout
from w5xde_async.params.reducer import VectorPool
from w5xde_async.params.slots import slot_bytes
from w5xde_async.segments import Region, aligned, mapped
from w5xde_async.wire.messages import METRIC_NAME, MOST_METRICS

#: Result vectors that both sides have: those of a block under way (one a level of its tree) and those that still leave.
NUM_SLOTS = 96
_PLENTY, _LEAST_SLOTS = 16, 4
_MAX_ANSWER, _MAX_ORDER = 8 << 20, 1 << 30  # bytes of what the child says at once, and of what the worker does
_LENGTH = struct.Struct(">I")


class _Said(Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """A message: its name and its fields, whose types are checked on the way in."""


# -- from the worker -----------------------------------------------------------------------------------------------


class Place(Struct, frozen=True, array_like=True):
    """Where a tensor lies in a region."""

    dtype: str
    shape: tuple[int, ...]
    at: int

    def tensor(self, memory: Tensor) -> Tensor:
        """The tensor that lies here in ``memory``."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return memory[self.at : self.at + math.prod(self.shape) * dtype.itemsize].view(dtype).view(self.shape)


def put(tensors: Sequence[Tensor], memory: Tensor, at: int = 0) -> list[Place]:
    """Copy the tensors into ``memory``, from ``at`` on. Raises MemoryError where it has not the room."""
    places = []
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if at + nbytes > memory.numel():
            raise MemoryError(f"{at + nbytes} bytes in {memory.numel()}")
        if nbytes:
            memory[at : at + nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        places.append(Place(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), at))
        at += aligned(nbytes, ALIGN_BYTES)
    return places


class Warm(_Said):
    """First of all: the precision of what will be computed."""

    precision: str


class Build(_Said):
    """The engine to make. The first region has the layout, the program's text and its constants, in this order."""

    device: str
    spec: LeafSpec
    threads: int
    memory_bytes: int
    regions: list[int]
    layout_bytes: int
    text_bytes: int
    constants: list[Place]


class Load(_Said):
    """The state has new values in these buckets."""

    buckets: list[int]


class Compute(_Said):
    """One block (``block.Task``). ``released``: slots that may be written again; ``counting``: operations too."""

    step: int
    start: int
    samples: tuple[int, ...]
    loss_scale: float
    structure: bytes
    packed: bool
    tensors: list[Place]
    released: list[int]
    counting: bool


# -- from the child ------------------------------------------------------------------------------------------------

_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Slot = Annotated[int, Meta(ge=0, lt=NUM_SLOTS)]
_Slots = Annotated[tuple[_Slot, ...], Meta(max_length=NUM_SLOTS)]


class Sealed(_Said):
    """The doors are closed."""


class Unsealed(_Said):
    """They cannot be closed."""

    reason: str


class Ready(_Said):
    """The engine is made."""


class Refused(_Said):
    """It is not, for what is wrong with the program."""

    reason: str
    node: int
    operator: str


class Emit(_Said):
    """A bucket of the block lies in a slot."""

    bucket: _Count
    slot: _Slot


class Failed(_Said):
    """A leaf raised; ``slots`` are the block's. ``device_lost``: this process can compute nothing any more."""

    leaf: int
    error: str
    traceback: str
    slots: _Slots
    device_lost: bool


class Done(_Said):
    """The block is computed (``block.ComputedBlock``)."""

    losses: tuple[float, ...]
    metric_names: Annotated[tuple[Annotated[str, Meta(max_length=METRIC_NAME)], ...], Meta(max_length=MOST_METRICS)]
    metrics: tuple[float, ...]
    untouched: tuple[_Count, ...]
    absent: tuple[_Count, ...]
    splits: Annotated[int, Meta(ge=0, le=63)]
    slots: _Slots
    flops: _Count
    drew: bool

    def __post_init__(self) -> None:
        names = self.metric_names
        if len(set(names)) < len(names) or not all(map(str.isprintable, names)):
            raise ValueError("names of metrics that are no different printable texts")


class Broken(_Said):
    """The process itself has failed, and ends."""

    reason: str


Answer = Sealed | Unsealed | Ready | Refused | Emit | Failed | Done | Broken
_ORDERS: Any = msgpack.Decoder(Warm | Build | Load | Compute)
_ANSWERS: Any = msgpack.Decoder(Answer)


def send(descriptor: int, message: _Said) -> None:
    """Raises OSError where the other side is gone."""
    data = msgpack.encode(message)
    left = memoryview(_LENGTH.pack(len(data)) + data)
    while left:
        left = left[os.write(descriptor, left) :]


def order_of(descriptor: int) -> Warm | Build | Load | Compute:
    """The worker's next message. Raises EOFError where it is gone."""
    order: Warm | Build | Load | Compute = _ORDERS.decode(_message(descriptor, _MAX_ORDER))
    return order


def answer_of(descriptor: int) -> Answer:
    """The child's next message. Raises EOFError where it is gone, ValueError for what is none."""
    try:
        answer: Answer = _ANSWERS.decode(_message(descriptor, _MAX_ANSWER))
    except (DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return answer


def _message(descriptor: int, most: int) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(descriptor, _LENGTH.size))
    if length > most:
        raise ValueError(f"a message of {length} bytes")
    return _exactly(descriptor, length)


def _exactly(descriptor: int, length: int) -> bytes:
    pieces, left = [], length
    while left:
        try:
            piece = os.read(descriptor, min(left, 1 << 20))
        except ConnectionResetError:
            piece = b""
        if not piece:
            raise EOFError
        pieces.append(piece)
        left -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def receive_regions(control: socket.socket, sizes: Sequence[int]) -> list[Tensor]:
    """The child's side of ``send_regions``."""
    data, descriptors, _, _ = socket.recv_fds(control, 1, len(sizes))
    if not data or len(descriptors) != len(sizes):
        raise EOFError
    tensors = [mapped(descriptor, nbytes) for descriptor, nbytes in zip(descriptors, sizes, strict=True)]
    for descriptor in descriptors:
        os.close(descriptor)
    return tensors


def send_regions(control: socket.socket, regions: Sequence[Region]) -> None:
    """Give the child what it maps."""
    socket.send_fds(control, [b"m"], [region.descriptor for region in regions])


def num_slots(layout: Layout, memory_bytes: int) -> int:
    """How many a machine with ``memory_bytes`` has room for: what the child fills the worker has too, and does not lose
    with it. All that is left beside the state for a few, and a quarter of it for more."""
    left = memory_bytes - layout.state_bytes - layout.vector_bytes
    size = slot_bytes(layout)
    return max(_LEAST_SLOTS, min(NUM_SLOTS, max(left // 4, min(left, _PLENTY * size)) // size))


def results_bytes(layout: Layout, count: int) -> int:
    """Of the region in which ``count`` of them have room. It has more where these are too few for a block of very many
    leaves, which takes memory for them when it needs them."""
    return max(count, _PLENTY) * slot_bytes(layout)


class SlotPool(VectorPool):
    """Result vectors by number, in memory that both sides have."""

    def __init__(self, layout: Layout, memory: Tensor) -> None:
        count = memory.numel() // slot_bytes(layout)
        super().__init__(layout, spare=count, make=self._none)
        size = slot_bytes(layout)
        self.vectors = [
            ResultVector(layout, memory=memory[at : at + max(layout.vector_bytes, 1)])
            for at in range(0, count * size, size)
        ]
        self._number_of = {id(vector): number for number, vector in enumerate(self.vectors)}
        self._free = self.vectors[::-1]

    @staticmethod
    def _none(layout: Layout) -> ResultVector:
        raise MemoryError("no result vector is free")

    def number_of(self, vector: ResultVector) -> int:
        """-1 for one that is not of this pool."""
        return self._number_of.get(id(vector), -1)

    def numbers_of(self, vectors: Sequence[ResultVector]) -> tuple[int, ...]:
        return tuple(map(self.number_of, vectors))

    def give_number(self, number: int) -> None:
        """The other side has done with it."""
        self.give(self.vectors[number])
