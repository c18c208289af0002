"""How much Python a call takes, counted and not timed: the same number on every machine, however busy it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import w5xde_async

_COUNTED = (str(Path(w5xde_async.__file__).parent), __file__)

__all__ = ["Name", "Operations", "operations"]


class Operations:
    """Bytecodes that have run."""

    def __init__(self) -> None:
        self.count = 0


@contextmanager
def operations() -> Iterator[Operations]:
    """Count this thread's bytecodes in the project's code and in ``Name``, which makes C's loops over ids visible.

    What runs in C counts once. Nothing else counts: asyncio's debug mode, for one, formats tracebacks.
    """
    counted = Operations()

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            counted.count += 1
        return local

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_COUNTED):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield counted
    finally:
        sys.settrace(before)


class Name(str):
    """An id whose every comparison and every hash runs in Python, so that sets and scans of ids are counted too."""

    __slots__ = ()

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other
