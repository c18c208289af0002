"""Codecs with a few bits for each value and a float32 scale for each block of values.

Encoding: the scales of all blocks, then the values' codes. A block of w values takes ceil(w * bits / 8) bytes; the
last block may be shorter. Byte j of an int4 block of b bytes holds the codes of values j (low bits) and j + b, so
packing works on contiguous memory; byte j of a sign block holds values 8 j (lowest bit) to 8 j + 7.

| codec | block | bytes of n values | what becomes of a value x, with m the block's largest magnitude |
|---|---|---|---|
| int8 | 256 | n + 4 ceil(n / 256) | round(127 x / m), to nearest even; error at most m / 254 |
| int4 | 256 | ceil(n / 2) + 4 ceil(n / 256) | nearest of 0 and +-m 2^-6 ... m (E3M0); at most max(m / 128, x / 3) |
| sign | 1024 | ceil(n / 8) + 4 ceil(n / 1024) | -1 below zero, else 1, times the block's mean magnitude |

``sign`` has no zero: zeros, those between tensors included (``params.layout``), become the mean magnitude, too.

For m below 2^-120 read 2^-120. A block with NaN or infinity has a scale that is not finite, and all of its values
decode to such; the other blocks are what they would be without it.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from w5xde_async.codecs.codec import Codec, pieces, scratch_for

_TINY = 2.0**-120  # below it the reciprocals overflow


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Rows of uint8 codes below 2^bits into rows of bytes; ``codes`` has 8 / bits times the columns of ``out``."""
    width = out.shape[1]
    out.copy_(codes[:, :width])
    for plane in range(1, 8 // bits):
        shifted = torch.bitwise_left_shift(codes[:, plane * width : (plane + 1) * width], plane * bits)
        out.bitwise_or_(shifted)


def unpack(packed: Tensor, bits: int, out: Tensor) -> None:
    """The inverse of ``pack``."""
    width = packed.shape[1]
    for plane in range(8 // bits):
        shifted = torch.bitwise_right_shift(packed, plane * bits)
        torch.bitwise_and(shifted, (1 << bits) - 1, out=out[:, plane * width : (plane + 1) * width])


class _Blocks(Codec):
    """Scales, then codes. Subclasses say what becomes of a few rows of equal width."""

    block: int
    bits: int
    _work = 1  # vectors to quantise in

    def encoded_nbytes(self, numel: int) -> int:
        """Exactly ceil(n * bits / 8) + 4 ceil(n / block)."""
        return -(-numel * self.bits // 8) + 4 * -(-numel // self.block)

    def _write(self, values: Tensor, out: Tensor) -> int:
        nbytes = self.encoded_nbytes(values.numel())
        scales, codes = self._sections(out[:nbytes], values.numel())
        work = scratch_for(values.numel(), values.device, vectors=self._work)
        for piece in pieces(values.numel(), values.device):
            for part in self._even(piece):
                rows, width, where, coded = self._rows(part)
                self._quantise(
                    values[part].view(rows, width), work[:, : part.stop - part.start].view(-1, rows, width),
                    scales[where], codes[coded].view(rows, -1),
                )  # fmt: skip
        self._finish(scales, codes)
        return nbytes

    def _read(self, data: Tensor, target: Tensor, alpha: float | None) -> None:
        scales, codes = self._sections(data, target.numel())
        scratch = None if alpha is None else scratch_for(target.numel(), target.device)
        for piece in pieces(target.numel(), target.device):
            for part in self._even(piece):
                rows, width, where, coded = self._rows(part)
                values = target[part] if scratch is None else scratch[: part.stop - part.start]
                self._restore(codes[coded].view(rows, -1), scales[where], values.view(rows, width))
                if alpha is not None:
                    target[part].add_(values, alpha=alpha)

    def _sections(self, data: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        split = 4 * -(-numel // self.block)
        return data[:split].view(torch.float32), data[split:]

    def _even(self, piece: slice) -> list[slice]:
        """A piece as one of whole blocks and one of what is left."""
        whole = piece.start + (piece.stop - piece.start) // self.block * self.block
        return [part for part in (slice(piece.start, whole), slice(whole, piece.stop)) if part.stop > part.start]

    def _rows(self, part: slice) -> tuple[int, int, slice, slice]:
        """Rows, their width, their scales, their codes."""
        width = min(self.block, part.stop - part.start)
        rows = (part.stop - part.start) // width
        first = part.start // self.block
        start = part.start * self.bits // 8
        return rows, width, slice(first, first + rows), slice(start, start + rows * -(-width * self.bits // 8))

    @staticmethod
    def _largest(magnitudes: Tensor, scales: Tensor) -> None:
        """Each row's largest, or 2^-120."""
        torch.amax(magnitudes, 1, out=scales)
        scales.clamp_min_(_TINY)

    @abstractmethod
    def _quantise(self, x: Tensor, work: Tensor, scales: Tensor, codes: Tensor) -> None:
        """``x`` [rows, width], ``work`` [vectors, rows, width] of undefined content."""

    @abstractmethod
    def _restore(self, codes: Tensor, scales: Tensor, out: Tensor) -> None: ...

    def _finish(self, scales: Tensor, codes: Tensor) -> None:
        """Zero the codes of blocks whose scale is not finite: what a cast makes of NaN is not defined."""
        nbytes = self.block * self.bits // 8
        if scales.device.type != "cpu":  # where to look costs more than to do it
            sound, whole = scales < math.inf, codes.numel() // nbytes
            codes[: whole * nbytes].view(-1, nbytes).mul_(sound[:whole, None])
            codes[whole * nbytes :].mul_(sound[-1:])
            return
        sound = scales.isfinite()
        if bool(sound.all()):
            return
        for index in torch.nonzero(~sound).flatten().tolist():
            codes[index * nbytes : (index + 1) * nbytes] = 0


class Int8(_Blocks):
    """1.016 bytes a value: a signed byte each, a scale for 256."""

    name = "int8"
    block, bits = 256, 8

    def _quantise(self, x: Tensor, work: Tensor, scales: Tensor, codes: Tensor) -> None:
        (scaled,) = work
        self._largest(torch.abs(x, out=scaled), scales)
        torch.mul(x, (127.0 / scales)[:, None], out=scaled)
        codes.view(torch.int8).copy_(scaled.round_())

    def _finish(self, scales: Tensor, codes: Tensor) -> None:
        super()._finish(scales, codes)
        scales.div_(127.0)

    def _restore(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(torch.int8)).mul_(scales[:, None])


class Int4(_Blocks):
    """0.516 bytes a value: sign and three bits of exponent each (E3M0), a scale for 256."""

    name = "int4"
    block, bits = 256, 4
    _work = 2

    def _quantise(self, x: Tensor, work: Tensor, scales: Tensor, codes: Tensor) -> None:
        y, other = work
        self._largest(torch.abs(x, out=y), scales)
        # With y = 4/3 |x| / m: 2^-j is the nearest power of m from y = 2^-j on, so its exponent is floor(log2(y)).
        y.mul_(((4 / 3) / scales)[:, None])
        # 0 and 1/64 meet at y = 1/96: from there on y is lifted to 1/64.
        torch.maximum(y, torch.mul(y, 1.5, out=other).clamp_max_(1 / 64), out=y)
        nibbles = y.view(torch.int32).bitwise_right_shift_(23).sub_(120).clamp_(0, 7)
        signs, width = other.view(torch.int32), codes.shape[1]
        nibbles.bitwise_or_(torch.bitwise_right_shift(x.view(torch.int32), 28, out=signs).bitwise_and_(8))
        high = nibbles[:, width:]  # an odd block has one less
        nibbles[:, : high.shape[1]].bitwise_or_(torch.bitwise_left_shift(high, 4, out=signs[:, width:]))
        codes.copy_(nibbles[:, :width])

    def _restore(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        rows, width = codes.shape
        # As bfloat16: exponent field 0 is zero itself, 1 to 7 are 2^-126 to 2^-120.
        wide = torch.empty(rows, 2 * width, dtype=torch.int16, device=codes.device)
        wide[:, :width].copy_(codes)
        torch.bitwise_right_shift(wide[:, :width], 4, out=wide[:, width:])
        signs = torch.bitwise_and(wide, 8).bitwise_left_shift_(12)
        wide.bitwise_and_(7).bitwise_left_shift_(7).bitwise_or_(signs)
        out.copy_(wide.view(torch.bfloat16)[:, : out.shape[1]]).mul_(2.0**120).mul_(scales[:, None])


class Sign(_Blocks):
    """0.129 bytes a value: a bit each, the mean magnitude of 1024."""

    name = "sign"
    block, bits = 1024, 1
    needs_feedback = True

    def _quantise(self, x: Tensor, work: Tensor, scales: Tensor, codes: Tensor) -> None:
        (parts,) = work
        # Divided before they are summed: a sum of finite values may be infinite, their mean may not.
        torch.abs(x, out=parts).mul_(1.0 / x.shape[1])
        torch.sum(parts, 1, out=scales)
        if x.device.type == "cpu":  # ten times as fast as torch's shifts
            packed = np.packbits(np.less(x.numpy(), 0), axis=1, bitorder="little")
            codes.copy_(torch.from_numpy(packed))
            return
        flags = torch.zeros(x.shape[0], 8 * codes.shape[1], dtype=torch.uint8, device=x.device)
        flags[:, : x.shape[1]] = x < 0
        places = torch.arange(8, dtype=torch.uint8, device=x.device)
        codes.copy_(flags.view(x.shape[0], -1, 8).bitwise_left_shift_(places).sum(2))

    def _restore(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        if codes.device.type == "cpu":
            flags = torch.from_numpy(np.unpackbits(codes.numpy(), axis=1, count=out.shape[1], bitorder="little"))
        else:
            places = torch.arange(8, dtype=torch.uint8, device=codes.device)
            flags = codes[:, :, None].bitwise_right_shift(places).bitwise_and_(1).flatten(1)[:, : out.shape[1]]
        out.copy_(flags).mul_(-2.0).add_(1.0).mul_(scales[:, None])
