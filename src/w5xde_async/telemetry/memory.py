"""What memory a process uses, and reports of it on demand.

A report is a file: on CUDA the allocator's own snapshot, which PyTorch's viewer (pytorch.org/memory_viz) opens and
which this package never reads; elsewhere JSON with the resident bytes and, where Python's allocations were traced, the
lines of code that hold most. Tracing costs time and memory: it begins with ``begin`` and ends with ``end``, unless it
was on before.
"""

from __future__ import annotations

import json
import os
import sys
import time
import tracemalloc
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_STATM = "/proc/self/statm"
_MOST_EVENTS = 100_000  # of CUDA's allocator, the newest
_TOP_LINES = 50


def host_bytes() -> int:
    """Resident memory of this process; its peak where the system does not tell more, 0 where it tells nothing."""
    with suppress(OSError, IndexError, ValueError):
        return int(_told(_STATM).split()[1]) * _PAGE_BYTES
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True, slots=True)
class Usage:
    """Resident bytes of a process that it does not share with others, and its CPU time."""

    host_bytes: int = 0
    cpu_s: float = 0.0


def usage_of(pid: int) -> Usage:
    """What another process of ours uses; nothing for 0, or where it is gone or the system does not tell."""
    if not pid:
        return Usage()
    try:
        statm = _told(f"/proc/{pid}/statm").split()
        # The command's name, in parentheses, may hold anything; utime and stime are the 14th and 15th field.
        stat = _told(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        resident, shared, ticks = int(statm[1]), int(statm[2]), int(stat[11]) + int(stat[12])
    except (OSError, IndexError, ValueError):
        return Usage()
    return Usage(max(0, resident - shared) * _PAGE_BYTES, ticks / os.sysconf("SC_CLK_TCK"))


def _told(path: str) -> bytes:
    """What the kernel says of a process: answered from memory, no disk is waited for."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, 4096, 0)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes that tensors of this process hold on a device, and how many it has; 0 where that is not known."""

    used_bytes: int = 0
    total_bytes: int = 0


def device_memory(device: torch.device) -> DeviceMemory:
    """Never initialises a device: 0 for one that is not in use."""
    import torch

    if device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        used = torch.cuda.memory_allocated(device)
        return DeviceMemory(used, torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return DeviceMemory(torch.mps.current_allocated_memory(), torch.mps.recommended_max_memory())
    return DeviceMemory()


def own_device_memory() -> DeviceMemory:
    """Of the device that this process computes on, where it has begun to; nothing else is looked at."""
    import torch

    return device_memory(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))  # type: ignore[no-untyped-call]


class MemoryReport:
    """Traces allocations between ``begin`` and ``end``; ``write`` may be called at any time, on any thread."""

    def __init__(self, device: torch.device | None = None) -> None:
        #: Whether reports are snapshots of CUDA's allocator.
        self.on_cuda = device is not None and device.type == "cuda"
        self._tracing = False
        self._began = False  # tracemalloc, which somebody else may have

    def begin(self) -> None:
        """Remember where memory is allocated from now on."""
        if self._tracing:
            return
        self._tracing = True
        if self.on_cuda:
            import torch

            # Frames of C++ would be looked up by child processes that stay, seconds for a snapshot.
            torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS, stacks="python")
        elif not tracemalloc.is_tracing():
            tracemalloc.start()
            self._began = True

    def end(self) -> None:
        """Stop remembering."""
        if not self._tracing:
            return
        self._tracing = False
        if self.on_cuda:
            import torch

            torch.cuda.memory._record_memory_history(enabled=None)
        elif self._began:
            self._began = False
            tracemalloc.stop()

    def write(self, folder: Path, name: str) -> Path:
        """A report in ``folder``; its path. Blocking. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stem = f"memory-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        if self.on_cuda:
            import torch

            path = folder / f"{stem}.pickle"  # the viewer's format; nothing here ever reads it
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            return path
        path = folder / f"{stem}.json"
        content: dict[str, object] = {"name": name, "pid": os.getpid(), "resident_bytes": host_bytes()}
        if tracemalloc.is_tracing():
            now, peak = tracemalloc.get_traced_memory()
            content |= {"traced_bytes": now, "traced_peak_bytes": peak, "largest": _largest()}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path


def _largest() -> list[dict[str, object]]:
    found = tracemalloc.take_snapshot().statistics("lineno")[:_TOP_LINES]
    return [{"bytes": entry.size, "blocks": entry.count, "line": str(entry.traceback[0])} for entry in found]
