"""Users' scripts as processes, and what they have printed so far."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Script:
    """``python command`` in ``cwd``, which is its home too; ``lines`` is what it has printed so far."""

    def __init__(self, command: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("W5XDE_", "MASTER_"))}
        source = {"PYTHONPATH": str(ROOT / "src"), "HOME": str(cwd), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-u", *command], cwd=cwd, text=True, stdin=subprocess.DEVNULL, start_new_session=True,
            env=kept | source | dict(env or {}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def found(self, pattern: str) -> list[re.Match[str]]:
        return [match for line in tuple(self.lines) if (match := re.search(pattern, line))]

    def wait_for(self, pattern: str, count: int = 1, timeout_s: float = 100.0) -> list[re.Match[str]]:
        """The lines that match, once there are ``count``; fails where it ends before."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll() is not None
            if ended:
                self._reader.join(10)
            found = self.found(pattern)
            if len(found) >= count:
                return found
            assert not ended, f"it ended before {count} x {pattern}:\n{''.join(self.lines[-30:])}"
            assert time.monotonic() < deadline, f"{len(found)} of {count} x {pattern}:\n{''.join(self.lines[-30:])}"
            time.sleep(0.02)

    def finish(self, timeout_s: float = 60.0) -> int:
        """Its exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()
