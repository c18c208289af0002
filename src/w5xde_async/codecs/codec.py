"""What a codec is: how the float32 values of one bucket are written as bytes, and read back.

A ``Codec`` is a value: a name and numbers, the same on both sides, no state. What one bucket needs to know of itself is
its ``Form`` (how many values, where matrices lie in it), which both sides read off the layout. State, where a codec has
any, lives in the ``Encoder`` of one bucket on the sending side; decoding never needs it.

Invariants of every codec:

- ``encoded_nbytes(form)`` is exact, or where ``variable`` an upper bound, so a receiver knows before it reads.
- Decoding never trusts the bytes: it raises MalformedFrame, writes inside its target alone, and allocates pieces
  of fixed size and at most what ``form`` explains.
- A bucket that holds NaN or infinity decodes to one that is not finite: the finite check of the update rule
  sees it. Finite values decode to finite ones (except ``bf16`` above 3.39e38, ``powersgd`` where products overflow).
- ``add_to`` with ``alpha`` 1 or -1 gives the bits of ``decode`` followed by an addition.
- The same input gives the same bytes on the same machine, with any number of threads (``powersgd``: with the same
  number; its matrix products and its factorisation are the library's).

Values and bytes are tensors on one device, any device; bytes are little-endian and so must the machine be.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from w5xde_async.errors import FrameTooLarge, MalformedFrame

__all__ = ["CHUNK", "BytePool", "Codec", "Encoded", "Encoder", "Form", "Matrix", "as_tensor", "as_view", "pieces"]

CHUNK = 1 << 16
"""Elements worked on at once on a CPU: 256 KiB of float32 and its temporaries stay in a core's own cache."""
_DEVICE_CHUNK = 1 << 24  # elsewhere the start of a kernel is what costs
_CLASS_BYTES = 1 << 12


class Matrix(NamedTuple):
    """``rows`` x ``columns`` values of a bucket, contiguous from element ``offset``."""

    offset: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Form:
    """What both sides know of a bucket: ``numel`` values; ``matrices`` in it, ascending and apart.

    Raises ValueError where a matrix leaves the bucket or overlaps the one before.
    """

    numel: int
    matrices: tuple[Matrix, ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for matrix in self.matrices:
            if matrix.offset < end or matrix.rows < 1 or matrix.columns < 1:
                raise ValueError(f"{matrix} overlaps what is before it")
            end = matrix.offset + matrix.rows * matrix.columns
        if self.numel < end:
            raise ValueError(f"{self.matrices[-1]} leaves a bucket of {self.numel} values")

    @classmethod
    def of(cls, numel: int, entries: Iterable[tuple[int, tuple[int, ...]]]) -> Form:
        """A bucket with tensors of ``shape`` that begin at element ``start`` (negative: in an earlier bucket).

        Tensors of two and more axes become matrices of shape[0] rows, as far as whole rows lie in the bucket.
        """
        matrices = []
        for start, shape in entries:
            columns = math.prod(shape[1:])
            if len(shape) < 2 or not columns:
                continue
            first = -(-max(0, -start) // columns)
            last = min(shape[0], (numel - start) // columns)
            if last > first:
                matrices.append(Matrix(start + first * columns, last - first, columns))
        return cls(numel, tuple(matrices))


class BytePool:
    """Byte buffers for reuse (a fresh one costs page faults), on one device. May be used from several threads.

    Keeps at most ``spare_bytes`` of unused ones. ``num_out`` counts what was taken and not given back.
    """

    def __init__(self, *, spare_bytes: int = 256 << 20, device: torch.device | str = "cpu") -> None:
        self.spare_bytes, self.device = spare_bytes, torch.device(device)
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
                whole = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._out[whole.untyped_storage().data_ptr()] = whole
        return whole[:nbytes]

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
    form: Form
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
    converges_without_feedback = True
    """False: what is left out must be kept and added to the next gradient (``codecs.feedback``)."""
    variable = False
    """The number of bytes depends on the values."""
    residual_decay = 1.0
    """What a residual is multiplied by before it is added to the next gradient."""
    word_bytes = 1
    """Bytes of one element of the encoding, for lz4's byte shuffle."""

    @property
    def needs_feedback(self) -> bool:
        return not self.converges_without_feedback

    @property
    def alternatives(self) -> tuple[Codec, ...]:
        """What an encoder of this codec may have written; the wire's name says which."""
        return (self,)

    @abstractmethod
    def encoded_nbytes(self, form: Form) -> int:
        """Bytes of an encoded bucket; an upper bound where ``variable``."""

    def check_nbytes(self, form: Form, nbytes: int) -> None:
        """Raise FrameTooLarge or MalformedFrame where an encoding of ``nbytes`` bytes cannot be: before it is read."""
        most = self.encoded_nbytes(form)
        if nbytes > most:
            raise FrameTooLarge(f"{self.name} bucket", nbytes, most)
        if nbytes < most and not self.variable:
            raise MalformedFrame(f"{self.name} bucket of {nbytes} bytes, its form says {most}")

    def encoder(self, form: Form) -> Encoder:
        """The sending side of one bucket."""
        return Encoder(self, form)

    def decode(self, data: Tensor, form: Form, out: Tensor) -> None:
        """Write the values of ``data`` (uint8) to ``out``. Raises MalformedFrame; ``out`` is then undefined."""
        self._read(self._checked(data, form, out), form, out, None)

    def add_to(self, data: Tensor, form: Form, accumulator: Tensor, alpha: float = 1.0) -> None:
        """``accumulator += alpha * decoded``, piece by piece while it is in cache.

        Raises MalformedFrame; the accumulator may then hold a part of the sum.
        """
        self._read(self._checked(data, form, accumulator), form, accumulator, alpha)

    def _checked(self, data: Tensor, form: Form, target: Tensor) -> Tensor:
        check_values(target, form)
        if data.dtype != torch.uint8 or data.dim() != 1 or data.device != target.device:
            raise ValueError("encoded bytes are a flat uint8 tensor on the device of the values")
        self.check_nbytes(form, data.numel())
        aligned = data.is_contiguous() and data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0
        return data if aligned else data.clone()

    @abstractmethod
    def _write(self, values: Tensor, form: Form, out: Tensor) -> int:
        """Encode into ``out`` (``encoded_nbytes`` long); the bytes used."""

    @abstractmethod
    def _read(self, data: Tensor, form: Form, target: Tensor, alpha: float | None) -> None:
        """Decode into ``target`` (``alpha`` None) or add ``alpha`` times the values to it."""


class Encoder:
    """The sending side of one bucket; this one has no state."""

    def __init__(self, codec: Codec, form: Form) -> None:
        self.codec, self.form = codec, form

    def encode(self, values: Tensor, pool: BytePool) -> Encoded:
        """Encode ``values`` (float32, flat) into a buffer of ``pool``. The values are not changed."""
        check_values(values, self.form)
        out = pool.take(self.codec.encoded_nbytes(self.form))
        return Encoded(self.codec, self.form, out[: self.codec._write(values, self.form, out)])

    def state_dict(self) -> dict[str, Tensor]:
        """What the next encoding depends on, besides its values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where the state is of another codec or form."""
        if state:
            raise ValueError(f"codec {self.codec.name} has no state, got {sorted(state)}")


def check_values(values: Tensor, form: Form) -> None:
    """Raise ValueError unless ``values`` are what a codec works on."""
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
        raise ValueError("a codec works on a flat contiguous float32 tensor")
    if values.numel() != form.numel:
        raise ValueError(f"{values.numel()} values, the bucket has {form.numel}")


def pieces(numel: int, device: torch.device) -> Iterator[slice]:
    """The slices that a loop over a bucket works on at once; all but the last are multiples of ``CHUNK``."""
    step = CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


def scratch_for(numel: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Room for the largest of ``pieces(numel, device)``."""
    return torch.empty(min(numel, CHUNK if device.type == "cpu" else _DEVICE_CHUNK), dtype=dtype, device=device)


def as_tensor(buffer: bytearray | memoryview) -> Tensor:
    """Writable bytes as a flat uint8 tensor, uncopied."""
    return torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)


def as_view(data: Tensor) -> memoryview:
    """The bytes of a flat CPU tensor, uncopied, format ``B``."""
    flat: Any = data.detach().view(torch.uint8).numpy()
    return memoryview(flat).cast("B") if data.numel() else memoryview(b"")
