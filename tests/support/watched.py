"""The coordinator's program, with a line on stderr for every commit: ``python -m tests.support.watched JOB ...``.

The program itself shows a step now and then, and its file of metrics is a second behind and dies with it. A line here
is written by the system before the commit's subscribers return, so a SIGKILL takes none back. ``at`` is
time.monotonic's, which all processes of a machine share on Linux.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import time

from w5xde_async.coordinator.__main__ import main
from w5xde_async.telemetry import events


class WatchedBus(events.Bus):
    """Tells of every commit first."""

    def __init__(self, *, log_warnings: bool = False) -> None:
        super().__init__(log_warnings=log_warnings)
        self.subscribe(self._tell)

    @staticmethod
    def _tell(event: events.Event) -> None:
        if isinstance(event, events.StepCommitted):
            told = {
                "event": "commit", "at": time.monotonic(), "step": event.step, "seconds": event.seconds,
                "leaves": event.leaves, "samples": event.samples, "num_workers": event.num_workers,
                "tasks": len(asyncio.all_tasks()),
            }  # fmt: skip
            os.write(2, json.dumps(told).encode() + b"\n")


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no run outlives its test
    events.Bus = WatchedBus  # type: ignore[misc]
    sys.exit(main())
