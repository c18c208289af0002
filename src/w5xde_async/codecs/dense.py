"""Codecs that keep every value: raw float32 and the two half formats.

| codec | bytes of n values | error |
|---|---|---|
| raw | 4 n | none |
| bf16 | 2 n | relative 2^-8 at most, to nearest even (absolute 2^-134 below 2^-126); above 3.39e38 infinite |
| fp16 | 2 n | relative 2^-11 at most between 6.1e-5 and 65504, absolute 2^-25 below |

fp16 **saturates**: a finite value beyond 65504 becomes 65504 with its sign. NaN and infinity stay what they are, each
value for itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w5xde_async.codecs.codec import Codec, pieces, scratch_for


class Raw(Codec):
    """float32 as it lies in memory: 4 bytes a value. Who sends raw alone has no need of a copy here."""

    name = "raw"
    exact = True
    word_bytes = 4

    def encoded_nbytes(self, numel: int) -> int:
        """Exactly 4 n."""
        return 4 * numel

    def _write(self, values: Tensor, out: Tensor) -> int:
        out.view(torch.float32).copy_(values)
        return 4 * values.numel()

    def _read(self, data: Tensor, target: Tensor, alpha: float | None) -> None:
        if alpha is None:
            target.copy_(data.view(torch.float32))
        else:
            target.add_(data.view(torch.float32), alpha=alpha)


class _Half(Codec):
    """A cast to two bytes."""

    word_bytes = 2
    _dtype: torch.dtype

    def encoded_nbytes(self, numel: int) -> int:
        """Exactly 2 n."""
        return 2 * numel

    def _write(self, values: Tensor, out: Tensor) -> int:
        out.view(self._dtype).copy_(values)
        return 2 * values.numel()

    def _read(self, data: Tensor, target: Tensor, alpha: float | None) -> None:
        halves = data.view(self._dtype)
        if alpha is None:
            target.copy_(halves)
            return
        # Adding mixed dtypes is ten times slower than a cast into memory that is in cache, and an addition.
        scratch = scratch_for(target.numel(), target.device)
        for piece in pieces(target.numel(), target.device):
            values = scratch[: piece.stop - piece.start].copy_(halves[piece])
            target[piece].add_(values, alpha=alpha)


class Bf16(_Half):
    """bfloat16: 2 bytes a value, 8 bits of precision, float32's range."""

    name = "bf16"
    _dtype = torch.bfloat16


class Fp16(_Half):
    """float16: 2 bytes a value, 11 bits of precision between 6e-5 and 65504; saturates."""

    name = "fp16"
    _dtype = torch.float16

    def _write(self, values: Tensor, out: Tensor) -> int:
        halves = out.view(torch.float16)
        scratch = scratch_for(values.numel(), values.device, torch.int16)
        for piece in pieces(values.numel(), values.device):
            source, half = values[piece], halves[piece]
            half.copy_(source)
            bits = scratch[: piece.stop - piece.start]
            magnitudes = torch.bitwise_and(half.view(torch.int16), 0x7FFF, out=bits)
            if int(magnitudes.amax()) >= _INFINITY:
                saturated = source.clamp(-_LARGEST, _LARGEST)
                half.copy_(torch.where(source.isfinite(), saturated, source))
        return 2 * values.numel()


_LARGEST = torch.finfo(torch.float16).max
_INFINITY = 0x7C00  # its bits; without their sign, halves as integers are ordered as their magnitudes, NaN above
