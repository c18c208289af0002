"""The best state that a run's evaluations have found, kept as plain weights in a file of its own.

The file says of which evaluation it is, so weights and value are replaced in one step, and a resume reads both from it.
A disk that fails costs the run nothing: that is said, and a later evaluation that is better still is kept.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from w5xde_async.errors import CheckpointCorrupt, StoreError
from w5xde_async.job import best_by
from w5xde_async.params.layout import Layout
from w5xde_async.store.filesystem import Filesystem, disk_errors, unused
from w5xde_async.store.rundir import RunDir, export_tensors
from w5xde_async.store.tensors import read_metadata
from w5xde_async.telemetry.events import Best, Bus, Warned

_ABOUT = "w5xde_async.best"  #: in the file's metadata
#: A write that takes longer hangs: 30 s, and as long as a disk of 10 MB/s would take.
_PATIENCE_S, _SLOWEST_BYTES_S = 30.0, 10e6


class BestModel:
    """Keeps what ``Job.keep_best`` names. ``best`` is what the file holds. One call of ``offer`` at a time."""

    def __init__(
        self, keep_best: str, layout: Layout, path: Path, filesystem: Filesystem, bus: Bus, best: Best | None
    ) -> None:
        """``best``: what an earlier start has left in the file."""
        self._direction, self.metric = best_by(keep_best)
        self._layout, self._path, self._filesystem, self._bus = layout, path, filesystem, bus
        self.best = best
        self._writing: asyncio.Future[Any] | None = None

    async def offer(self, step: int, metrics: Mapping[str, float], snapshot: Mapping[str, Tensor]) -> bool:
        """Keep ``snapshot`` (tensors by entry name) if ``metrics`` are better than what is kept. Whether it was.

        A value that is not finite, or that is missing, is not better.
        """
        value = metrics.get(self.metric, math.nan)
        if not math.isfinite(value) or (self.best is not None and not self._better(value, self.best.value)):
            return False
        if self._writing is not None and not self._writing.done():
            self._say(step, "the disk still hangs")
            return False
        self._writing = asyncio.get_running_loop().run_in_executor(None, self._write, step, value, snapshot)
        patience_s = _PATIENCE_S + self._layout.state_bytes / _SLOWEST_BYTES_S
        await asyncio.wait([self._writing], timeout=patience_s)
        if not self._writing.done():
            self._say(step, f"the disk hangs, for {patience_s:.0f} s")
            return False
        try:
            self.best = self._writing.result()
        except StoreError as error:
            self._say(step, str(error))
            return False
        return True

    def _better(self, value: float, kept: float) -> bool:
        return value < kept if self._direction == "min" else value > kept

    def _say(self, step: int, reason: str) -> None:
        self._bus.publish(Warned(text=f"the best model so far, of step {step}, was not written: {reason}"))

    def _write(self, step: int, value: float, snapshot: Mapping[str, Tensor]) -> Best:
        """Blocks. Raises StoreError."""
        said = json.dumps({"metric": self.metric, "best": self._direction, "value": value, "step": step})
        tensors = {name: snapshot[entry.name] for entry in self._layout.entries for name in entry.names}
        export_tensors(tensors, self._path, about={_ABOUT: said}, filesystem=self._filesystem)
        return Best(metric=self.metric, value=value, step=step, path=str(self._path))


def take_up_best(keep_best: str, directory: RunDir, last_step: int | None, notes: list[str]) -> Best | None:
    """What an earlier start has kept. What is no best of this course of the run is set aside, and ``notes`` say so.

    ``last_step``: the run goes on from there on another course; None: on the same. Blocks. Raises StoreError.
    """
    path, (direction, metric) = directory.best_path, best_by(keep_best)
    with disk_errors(path, "read the best model"):
        try:
            with path.open("rb") as file:
                nbytes = file.seek(0, 2)
                file.seek(0)
                said: Any = json.loads(read_metadata(file, nbytes)[_ABOUT])
            step, value = int(said["step"]), float(said["value"])
            if (said["metric"], said["best"]) != (metric, direction):
                reason = f"it is the {said['best']} of {said['metric']}, the job keeps the {direction} of {metric}"
            elif last_step is not None and step > last_step:
                reason = f"it is of step {step}, and the run goes on from step {last_step}"
            else:
                return Best(metric=metric, value=value, step=step, path=str(path))
        except FileNotFoundError:
            return None
        except (CheckpointCorrupt, ValueError, KeyError, TypeError, AttributeError):
            reason = "no evaluation of a run is told in it"
        aside = unused(path.with_name(f"abandoned-{path.name}"))
        directory.filesystem.rename(path, aside)
        directory.filesystem.sync_directory(path.parent)
    notes.append(f"the best model was set aside in {aside}: {reason}")
    return None
