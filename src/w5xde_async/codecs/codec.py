"""What a codec is: how the float32 values of one bucket are written as bytes, and read back.

A ``Codec`` is a value: a name and numbers, the same on both sides, no state. How many values a bucket has both sides
read off the layout.

Invariants of every codec:

- ``encoded_nbytes(numel)`` is exact, or where ``variable`` an upper bound, so a receiver knows before it reads.
- Decoding never trusts the bytes: it raises MalformedFrame, writes inside its target alone, and allocates pieces
  of fixed size and at most what the number of values explains.
- A bucket that holds NaN or infinity decodes to one that is not finite: the finite check of the update rule
  sees it. Finite values decode to finite ones (except ``bf16`` above 3.39e38,
  ``int8`` and ``sign`` within a millionth of the largest float32).
- ``add_to`` with ``alpha`` 1 or -1 gives the bits of ``decode`` followed by an addition, but for the sign of zeros
  where sparse codecs leave a value out and ``alpha`` is -1.
- The same input gives the same bytes on the same machine, with any number of threads.

Values and bytes are tensors on one device, any device; bytes are little-endian and so must the machine be. What is
encoded on an accelerator comes into host memory with ``brought``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from w5xde_async.errors import FrameTooLarge, MalformedFrame

_CPU_CHUNK = 1 << 20
"""Elements worked on at once on a CPU: a default bucket. Of less, it is calls of operators that cost, and threads side
by side wait for Python's lock between them."""
_DEVICE_CHUNK = 1 << 24  # elsewhere the start of a kernel is what costs
_CLASS_BYTES = 1 << 12


class BytePool:
    """Byte buffers for reuse (a fresh one costs page faults), on one device. May be used from several threads.

    Keeps at most ``spare_bytes`` of unused ones. ``num_out`` counts what was taken and not given back.
    """

    def __init__(
        self, *, spare_bytes: int = 256 << 20, device: torch.device | str = "cpu", pinned: bool = False
    ) -> None:
        """``pinned``: host memory that CUDA copies to and from without a detour, where there is enough of it."""
        self.spare_bytes, self.device, self._pinned = spare_bytes, torch.device(device), pinned
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = {}
        self._out: dict[int, Tensor] = {}
        self._spare = 0

    @property
    def num_out(self) -> int:
        return len(self._out)

    def take(self, nbytes: int) -> Tensor:
        """``nbytes`` bytes of undefined content, aligned for any dtype."""
        size = max(1, -(-nbytes // _CLASS_BYTES)) * _CLASS_BYTES
        with self._lock:
            free = self._free.get(size)
            if free:
                whole = free.pop()
                self._spare -= size
            else:
                whole = self._new(size)
            self._out[whole.untyped_storage().data_ptr()] = whole
        return whole[:nbytes]

    def _new(self, size: int) -> Tensor:
        if self._pinned:
            with suppress(RuntimeError):  # no more can be pinned: copies are as right, and slower
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def take_floats(self, numel: int) -> Tensor:
        """``numel`` float32 of undefined content: to decode into."""
        return self.take(4 * numel).view(torch.float32)

    def give(self, piece: Tensor) -> None:
        """Take back what ``take`` lent, or any view of it. Raises ValueError for anything else."""
        with self._lock:
            whole = self._out.pop(piece.untyped_storage().data_ptr(), None)  # an empty view has no address
            if whole is None:
                raise ValueError("this buffer is not out: given back twice, or never taken here")
            if self._spare + whole.numel() <= self.spare_bytes:
                self._free.setdefault(whole.numel(), []).append(whole)
                self._spare += whole.numel()


class Encoded(NamedTuple):
    """One bucket as bytes. ``codec`` is the one that wrote them: lz4 hands over to its inner one where it does not pay.

    ``data`` lies in the pool's memory: whoever knows that the bytes have left gives it back.
    """

    codec: Codec
    data: Tensor

    @property
    def view(self) -> memoryview:
        """The bytes to send (CPU only), uncopied."""
        return as_view(self.data)


class Codec(ABC):
    """One way to write a bucket. ``name`` is what stands on the wire."""

    name: str
    exact = False
    """Decoding gives back every bit."""
    needs_feedback = False
    """It converges only where what it leaves out is added to the next gradient (``codecs.feedback``)."""
    variable = False
    """The number of bytes depends on the values."""
    residual_decay = 1.0
    """What a residual is multiplied by before it is added to the next gradient."""
    word_bytes = 1
    """Bytes of one element of the encoding, for lz4's byte shuffle."""

    @property
    def alternatives(self) -> tuple[Codec, ...]:
        """The codecs that ``encode`` may have written by; the wire's name says which."""
        return (self,)

    @abstractmethod
    def encoded_nbytes(self, numel: int) -> int:
        """Bytes of an encoded bucket of ``numel`` values; an upper bound where ``variable``."""

    def check_nbytes(self, numel: int, nbytes: int) -> None:
        """Raise FrameTooLarge or MalformedFrame where an encoding of ``nbytes`` bytes cannot be: before it is read."""
        most = self.encoded_nbytes(numel)
        if nbytes > most:
            raise FrameTooLarge(f"{self.name} bucket", nbytes, most)
        if nbytes < most and not self.variable:
            raise MalformedFrame(f"{self.name} bucket of {nbytes} bytes, its {numel} values take {most}")

    def encode(self, values: Tensor, pool: BytePool) -> Encoded:
        """Encode ``values`` (float32, flat) into a buffer of ``pool``. The values are not changed."""
        check_values(values)
        out = pool.take(self.encoded_nbytes(values.numel()))
        return Encoded(self, out[: self._write(values, out)])

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Write the values of ``data`` (uint8) to ``out``. Raises MalformedFrame; ``out`` is then undefined."""
        self._read(self._checked(data, out), out, None)

    def add_to(self, data: Tensor, accumulator: Tensor, alpha: float = 1.0) -> None:
        """``accumulator += alpha * decoded``, piece by piece while it is in cache.

        Raises MalformedFrame; the accumulator may then hold a part of the sum.
        """
        self._read(self._checked(data, accumulator), accumulator, alpha)

    def _checked(self, data: Tensor, target: Tensor) -> Tensor:
        check_values(target)
        if data.dtype != torch.uint8 or data.dim() != 1 or data.device != target.device:
            raise ValueError("encoded bytes are a flat uint8 tensor on the device of the values")
        self.check_nbytes(target.numel(), data.numel())
        aligned = data.is_contiguous() and data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0
        return data if aligned else data.clone()

    @abstractmethod
    def _write(self, values: Tensor, out: Tensor) -> int:
        """Encode into ``out`` (``encoded_nbytes`` long); the bytes used."""

    @abstractmethod
    def _read(self, data: Tensor, target: Tensor, alpha: float | None) -> None:
        """Decode into ``target`` (``alpha`` None) or add ``alpha`` times the values to it."""


def check_values(values: Tensor) -> None:
    """Raise ValueError unless ``values`` are what a codec works on."""
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
        raise ValueError("a codec works on a flat contiguous float32 tensor")


def pieces(numel: int, device: torch.device) -> Iterator[slice]:
    """The slices that a loop over a bucket works on at once; all but the last are of whole blocks."""
    step = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


def scratch_for(
    numel: int, device: torch.device, dtype: torch.dtype = torch.float32, *, vectors: int | None = None
) -> Tensor:
    """Room for the largest of ``pieces(numel, device)``; with ``vectors`` for so many of them, [vectors, elements]."""
    most = min(numel, _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK)
    return torch.empty(most if vectors is None else (vectors, most), dtype=dtype, device=device)


def brought(encoded: Encoded, pool: BytePool, *others: tuple[Tensor, Tensor]) -> Encoded:
    """An accelerator's encoding in host memory of ``pool``. ``others``: host tensors, and what is copied there as well.

    Waits, asleep, until all is there.
    """
    data = pool.take(encoded.data.numel())
    try:
        for target, source in ((data, encoded.data), *others):
            target.copy_(source, non_blocking=source.is_cuda)
        if encoded.data.is_cuda:
            event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
            event.synchronize()
    except BaseException:
        pool.give(data)
        raise
    return Encoded(encoded.codec, data)


def as_view(data: Tensor) -> memoryview:
    """The bytes of a flat CPU tensor, uncopied, format ``B``."""
    flat: Any = data.detach().view(torch.uint8).numpy()
    return memoryview(flat).cast("B") if data.numel() else memoryview(b"")
