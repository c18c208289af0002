"""``lz4``: the bytes of another codec, compressed where that pays.

    lz4            raw float32, compressed                  lz4:int8          int8's bytes, compressed
    lz4-shuffle    first all lowest bytes, then the next ...  lz4-shuffle:bf16  likewise, in words of two bytes

Before a bucket is compressed, two pieces of it are: if they shrink by less than 3 % the inner codec's bytes are sent as
they are, under its own name; likewise when the whole has not shrunk by 3 %. So never more bytes than the inner codec.

Encoding: the inner length (8 bytes), the length of each compressed piece of 256 KiB (4 bytes each; a piece of its
full length is not compressed), the pieces. Decoding is bounded by the inner codec's length for the bucket's number of
values. It runs on the CPU; tensors of another device are copied there and back.

Pieces are independent, and neither lz4's compression nor numpy's copies hold Python's lock: a large bucket is
compressed by as many threads as torch has in the calling one, which waits for them. The bytes are the same with any
number.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import lz4.block
import numpy as np
import torch
from torch import Tensor

from w5xde_async.codecs.codec import BytePool, Codec, Encoded, as_view, check_values
from w5xde_async.codecs.dense import Raw
from w5xde_async.errors import MalformedFrame

_PIECE = 256 << 10
_PROBE = 128 << 10  # shuffled planes shrink less in shorter pieces
_WORTH = 0.97  # of the inner length
_PIECES_A_THREAD = 2  # at least: starting a thread takes as long as a tenth of a piece
_MOST_THREADS = 8
_T = TypeVar("_T")


class Lz4(Codec):
    """At most 0.97 of the inner codec's bytes, or those."""

    variable = True

    def __init__(self, inner: Codec | None = None, *, shuffle: bool = False) -> None:
        """Raises ValueError for lz4 in lz4 and for a shuffle of words of one byte."""
        self.inner = inner or Raw()
        self.shuffle = shuffle
        if isinstance(self.inner, Lz4):
            raise ValueError("lz4 of lz4")
        if shuffle and self.inner.word_bytes == 1:
            raise ValueError(f"{self.inner.name} is bytes already: nothing to shuffle")
        suffix = "" if isinstance(self.inner, Raw) else f":{self.inner.name}"
        self.name = ("lz4-shuffle" if shuffle else "lz4") + suffix
        self.exact = self.inner.exact
        self.needs_feedback = self.inner.needs_feedback
        self.residual_decay = self.inner.residual_decay

    @property
    def alternatives(self) -> tuple[Codec, ...]:
        return (self, self.inner)

    def encoded_nbytes(self, numel: int) -> int:
        """At most the inner codec's."""
        return self.inner.encoded_nbytes(numel)

    def encode(self, values: Tensor, pool: BytePool) -> Encoded:
        """The inner codec's encoding where compression does not pay."""
        check_values(values)
        inner = None
        if isinstance(self.inner, Raw) and values.device.type == "cpu":
            plain = values.detach().view(torch.uint8)  # as the inner codec would copy it
        else:
            inner = self.inner.encode(values, pool)
            plain = inner.data.cpu()
        out = pool.take(plain.numel())
        packed = out if out.device.type == "cpu" else torch.empty_like(plain)
        nbytes = self.compress(plain, packed)
        if not nbytes:
            pool.give(out)
            return inner or self.inner.encode(values, pool)
        if packed is not out:
            out[:nbytes].copy_(packed[:nbytes])
        if inner is not None:
            pool.give(inner.data)
        return Encoded(self, out[:nbytes])

    def _write(self, values: Tensor, out: Tensor) -> int:
        raise NotImplementedError("encode writes")

    def _read(self, data: Tensor, target: Tensor, alpha: float | None) -> None:
        inner = self._expand(as_view(data.cpu()), target.numel()).to(target.device)
        if alpha is None:
            self.inner.decode(inner, target)
        else:
            self.inner.add_to(inner, target, alpha)

    def _expand(self, data: memoryview, numel: int) -> Tensor:
        """The inner codec's bytes. Nothing is allocated before their length has been checked."""
        if len(data) < 8:
            raise MalformedFrame(f"{self.name} bucket of {len(data)} bytes")
        nbytes = int.from_bytes(data[:8], "little")
        self.inner.check_nbytes(numel, nbytes)
        at = 8 + 4 * -(-nbytes // _PIECE)
        if len(data) < at:
            raise MalformedFrame(f"{self.name} bucket of {len(data)} bytes for {nbytes}")
        lengths = struct.unpack(f"<{(at - 8) // 4}I", data[8:at])
        if at + sum(lengths) != len(data):
            raise MalformedFrame(f"{self.name} bucket: its pieces are not as long as it is")
        out = torch.empty(nbytes, dtype=torch.uint8)
        words = self.inner.word_bytes if self.shuffle else 1
        for index, length in enumerate(lengths):
            piece = out[index * _PIECE : (index + 1) * _PIECE]
            packed = data[at : at + length]
            at += length
            if length == piece.numel():
                whole: Any = packed
            else:
                try:
                    whole = lz4.block.decompress(packed, uncompressed_size=piece.numel(), return_bytearray=True)
                except lz4.block.LZ4BlockError as error:
                    raise MalformedFrame(f"{self.name} bucket: {error}") from None
                if len(whole) != piece.numel():
                    raise MalformedFrame(f"{self.name} bucket: a piece of {len(whole)} bytes, not {piece.numel()}")
            flat = np.frombuffer(whole, dtype=np.uint8)
            np.copyto(piece.numpy().reshape(-1, words), flat.reshape(words, -1).T)
        return out

    def _arranged(self, data: Tensor) -> Any:
        """A piece as it is compressed: as it lies there, or shuffled."""
        if not self.shuffle:
            return as_view(data)
        shuffled: Any = np.ascontiguousarray(data.numpy().reshape(-1, self.inner.word_bytes).T)
        return memoryview(shuffled).cast("B")

    def _packed(self, data: Tensor) -> Any:
        """One piece, compressed, or as it was where that is no shorter."""
        arranged = self._arranged(data)
        packed = lz4.block.compress(arranged, store_size=False)
        return packed if len(packed) < len(arranged) else arranged

    def _pays(self, data: Tensor) -> bool:
        """Whether two pieces of it shrink enough."""
        quarter = data.numel() // 4 // 64 * 64
        if quarter < _PROBE:
            return True
        probes = [data[start : start + _PROBE] for start in (quarter, 3 * quarter - _PROBE)]
        return sum(len(self._packed(probe)) for probe in probes) <= _WORTH * _PROBE * len(probes)

    def compressed_nbytes(self, data: Tensor) -> int:
        """Bytes of ``data`` (CPU) when compressed, whether that pays or not."""
        pieces = _split(data)
        return 8 + 4 * len(pieces) + sum(map(len, _each(self._packed, pieces)))

    def compress(self, data: Tensor, out: Tensor) -> int:
        """Compress into ``out`` (CPU, as long as ``data``); the bytes used, 0 where it does not pay."""
        head = 8 + 4 * -(-data.numel() // _PIECE)
        most = int(_WORTH * data.numel())
        if most < head or not self._pays(data):
            return 0
        packed = _each(self._packed, _split(data))
        lengths = list(map(len, packed))
        if head + sum(lengths) > most:
            return 0
        target, at = as_view(out), head
        for piece in packed:
            target[at : at + len(piece)] = piece
            at += len(piece)
        target[:8] = data.numel().to_bytes(8, "little")
        target[8:head] = struct.pack(f"<{len(lengths)}I", *lengths)
        return at


def _split(data: Tensor) -> list[Tensor]:
    return [data[start : start + _PIECE] for start in range(0, data.numel(), _PIECE)]


def _each(work: Callable[[Any], _T], pieces: Sequence[Any]) -> list[_T]:
    """``work`` of each piece, in order, by as many threads as pay. Raises what the first piece that fails raises."""
    threads = min(torch.get_num_threads(), len(pieces) // _PIECES_A_THREAD, _MOST_THREADS)
    if threads < 2:
        return list(map(work, pieces))
    share = -(-len(pieces) // threads)
    shares = [pieces[start : start + share] for start in range(0, len(pieces), share)]
    with ThreadPoolExecutor(len(shares) - 1, thread_name_prefix="w5xde-lz4") as pool:
        others: list[Future[list[_T]]] = []
        with suppress(RuntimeError):  # it can start no thread: those that there are do it
            others.extend(pool.submit(lambda part: list(map(work, part)), part) for part in shares[1:])
        done = list(map(work, shares[0]))  # by this thread, which would wait otherwise
        for other in others:
            done += other.result()
    for part in shares[1 + len(others) :]:
        done += map(work, part)
    return done
