"""A sandbox's child, sealed and warm, whose kernels do what a bug in one may let a program do: at the third block."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from w5xde_async.compute.engine import Engine, LeafError
from w5xde_async.compute.program import child, runner

_compute = Engine.compute
_blocks = 0


def compute(self: Engine, *arguments: Any) -> Any:
    global _blocks
    _blocks += 1
    if _blocks == 3 and self.layout.num_parameters > 100:  # not the one that warms up
        how = os.environ.get("CUDA_TEST_DEATH", "")
        if how == "reads beside its memory":
            ctypes.string_at(8)
        if how == "loses its device":
            raise LeafError(arguments[0].start, RuntimeError("CUDA error: an illegal address"), device_lost=True)
        if how == "opens a file":
            os.open("/etc/passwd", os.O_RDONLY)
        if how == "raises":
            raise KeyError("what nobody expects")
        if how == "aborts":
            os.abort()
        if how == "lies":
            os.write(int(sys.argv[1]), b"\x00\x00\x00\x05hello")
        os._exit(7)
    return _compute(self, *arguments)


if __name__ == "__main__":
    count = Engine.compute
    child_warm = runner.warm_up

    def warm(*arguments: Any, **named: Any) -> None:
        global _blocks
        child_warm(*arguments, **named)
        _blocks = 0

    runner.warm_up = warm
    Engine.compute = compute  # type: ignore[method-assign]
    sys.exit(child.main())
