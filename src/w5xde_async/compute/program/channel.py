"""What a sandboxed child and its worker say to each other, and the memory that both have.

``[4-byte big-endian length][msgpack array]`` over a socket of their own, nothing pickled, lengths bounded; tensors lie
in shared memory and are spoken of by offsets. The worker believes the child no word: all of an answer is checked.

Regions are ``memfd``s whose size is sealed before the child has them: nobody can shorten one under the other's feet.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import struct
import weakref
from collections.abc import Sequence
from typing import Any

import msgpack
import torch
from torch import Tensor

from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import ALIGN_BYTES, Layout
from w5xde_async.params.reducer import VectorPool
from w5xde_async.wire.packed import unpack

__all__ = [
    "MAX_ANSWER", "NUM_SLOTS", "Region", "SlotPool", "aligned", "receive", "receive_regions", "send", "send_regions",
    "slot_bytes",
]  # fmt: skip

MAX_ANSWER = 8 << 20  # bytes of what the child says at once
_LENGTH = struct.Struct(">I")
#: Result vectors that both sides have: those of a block under way (one a level of its tree) and those that still leave.
NUM_SLOTS = 96
_PAGE = mmap.PAGESIZE


def send(descriptor: int, message: Sequence[Any]) -> None:
    """Raises OSError where the other side is gone."""
    data = msgpack.packb(message)
    left = memoryview(_LENGTH.pack(len(data)) + data)
    while left:
        left = left[os.write(descriptor, left) :]


def receive(descriptor: int, most: int) -> tuple[Any, ...]:
    """The next message. Raises EOFError where the other side is gone, ValueError for what is none."""
    (length,) = _LENGTH.unpack(_exactly(descriptor, _LENGTH.size))
    if length > most:
        raise ValueError(f"a message of {length} bytes")
    try:
        message = unpack(_exactly(descriptor, length))
    except (RecursionError, msgpack.UnpackException) as error:
        raise ValueError(type(error).__name__) from None
    if type(message) is not tuple or not message or type(message[0]) is not str:
        raise ValueError("no message")
    return message


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


def aligned(nbytes: int, to: int = ALIGN_BYTES) -> int:
    return -(-nbytes // to) * to


def slot_bytes(layout: Layout) -> int:
    """From one result vector to the next."""
    return aligned(max(layout.vector_bytes, 1), _PAGE)


class Region:
    """A piece of memory that both sides have. Pages take memory when they are first written."""

    def __init__(self, name: str, nbytes: int) -> None:
        """The worker's side: make it."""
        self.nbytes = aligned(max(nbytes, 1), _PAGE)
        self.descriptor = os.memfd_create(f"w5xde-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self.memory = mapped(self.descriptor, self.nbytes)
        except (OSError, MemoryError):
            self.close()
            raise

    def close(self) -> None:
        """Give the descriptor back; what is mapped stays until nobody has it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def mapped(descriptor: int, nbytes: int) -> Tensor:
    """Memory of a descriptor, which may be closed then; unmapped when no tensor has it any more.

    By the plain call: Python's own would keep a copy of the descriptor, and ask for what is forbidden in the child.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise MemoryError(f"{nbytes} bytes cannot be mapped")
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, libc.munmap, address, nbytes).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def receive_regions(control: socket.socket, sizes: Sequence[int]) -> list[Tensor]:
    """The child's side of ``send_regions``."""
    room = socket.CMSG_SPACE(4 * len(sizes))
    data, ancillary, _, _ = control.recvmsg(1, room)
    descriptors = [
        number
        for level, kind, content in ancillary
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
        for (number,) in struct.iter_unpack("i", content[: len(content) // 4 * 4])
    ]
    if not data or len(descriptors) != len(sizes):
        raise EOFError
    tensors = [mapped(descriptor, nbytes) for descriptor, nbytes in zip(descriptors, sizes, strict=True)]
    for descriptor in descriptors:
        os.close(descriptor)
    return tensors


def send_regions(control: socket.socket, regions: Sequence[Region]) -> None:
    """Give the child what it maps."""
    socket.send_fds(control, [b"m"], [region.descriptor for region in regions])


class SlotPool(VectorPool):
    """Result vectors by number, in memory that both sides have."""

    def __init__(self, layout: Layout, memory: Tensor, count: int = NUM_SLOTS) -> None:
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

    def give_number(self, number: int) -> None:
        """The other side has done with it."""
        self.give(self.vectors[number])
