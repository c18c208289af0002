"""Memory that a GPU copies to and from without a detour: CUDA is told of it, and the system keeps it where it is.

For memory that was not allocated so (``pin_memory``): segments, and what others have mapped of them. Where CUDA does
not take it copies are as right, and slower.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from w5xde_async.segments import HEADER_BYTES, before_unmapped, is_mapped

_cuda: Any = torch.cuda  # its runtime is untyped
_READ_ONLY = 0x08  # cudaHostRegisterReadOnly


def pin(memory: Tensor, device: torch.device, *, read_only: bool = False) -> bool:
    """Pin memory of a mapping of ``segments``, until that ends. ``read_only``: it is mapped so. Whether it is pinned.

    Where it lies elsewhere nothing is done. No part of it is to be pinned twice.
    """
    if not is_mapped(memory):
        return False
    cuda = _cuda
    with cuda.device(device):
        runtime, address = cuda.cudart(), memory.data_ptr()
        if int(runtime.cudaHostRegister(address, memory.nbytes, _READ_ONLY if read_only else 0)):
            with suppress(RuntimeError):  # the next call says again what this one has said
                torch.zeros(1, device=device)
            return False

    def unpin() -> None:
        # Else CUDA would take what is mapped there next for these pages. Copies may be under way.
        with suppress(RuntimeError):  # where the device is lost
            cuda.synchronize(device)
        with suppress(RuntimeError), cuda.device(device):
            runtime.cudaHostUnregister(address)

    before_unmapped(memory, unpin)
    return True


def pin_around(piece: Tensor, nbytes: int, device: torch.device) -> bool:
    """Pin that of the parts of ``nbytes`` of a segment, which is mapped to be read, in which ``piece`` lies."""
    storage = piece.untyped_storage()
    at = piece.data_ptr() - storage.data_ptr() - HEADER_BYTES
    begin = HEADER_BYTES + at // nbytes * nbytes
    if at < 0 or begin + nbytes > storage.nbytes():
        return False
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    return pin(whole[begin : begin + nbytes], device, read_only=True)
