"""Pools of bytes that lie, as far as codecs can tell, on another device than their values."""

from __future__ import annotations

import torch
from torch import Tensor

from w5xde_async.codecs.codec import BytePool


class OfAnotherDevice(BytePool):
    """Its memory is the CPU's, and yet not that of the values."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cuda")

    def _new(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)
