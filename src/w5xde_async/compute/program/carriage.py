"""A program's document as buffers of a frame, and back; its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from w5xde_async.compute.program.form import LIMITS, Document
from w5xde_async.errors import ProgramRefused
from w5xde_async.params.flat import bytes_of
from w5xde_async.wire.frame import Buffer, BufferSpec


def digest_of(document: Document) -> bytes:
    """32 bytes over the text and the constants."""
    state = hashlib.blake2b(document.text, digest_size=32)
    for constant in document.constants:
        state.update(bytes_of(constant))
    return state.digest()


def buffers_of(document: Document) -> list[tuple[BufferSpec, Buffer]]:
    """The text, then the constants, uncopied."""
    text = document.text
    buffers: list[tuple[BufferSpec, Buffer]] = [(BufferSpec("program", "uint8", (len(text),), "raw", len(text)), text)]
    for constant in document.constants:
        data = bytes_of(constant)
        dtype = str(constant.dtype).removeprefix("torch.")
        buffers.append((BufferSpec("constant", dtype, tuple(constant.shape), "raw", len(data)), data))
    return buffers


class Unloading:
    """Memory for a program that comes in. ``document`` is whole once the buffers are filled."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._constants: list[Tensor] = []

    def place(self, specs: Sequence[BufferSpec]) -> list[memoryview]:
        """Where the buffers go. Raises ProgramRefused over a limit, before anything is allocated."""
        if not specs or specs[0].dtype != "uint8" or any(spec.codec != "raw" for spec in specs):
            raise ProgramRefused("its first buffer is not a text")
        text, *constants = specs
        if text.nbytes > LIMITS.text_bytes:
            raise ProgramRefused(f"its text has {text.nbytes} bytes, more than {LIMITS.text_bytes}")
        total = sum(spec.nbytes for spec in constants)
        if len(constants) > LIMITS.constants or total > LIMITS.constant_bytes:
            raise ProgramRefused(f"it has {len(constants)} constants of {total} bytes")
        self._text = bytearray(text.nbytes)
        self._constants = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in constants]
        views = [bytes_of(constant) if constant.numel() else memoryview(bytearray()) for constant in self._constants]
        return [memoryview(self._text), *views]

    @property
    def document(self) -> Document:
        return Document(bytes(self._text), tuple(self._constants))
