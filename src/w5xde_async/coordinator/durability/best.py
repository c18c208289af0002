"""The best state that a run's evaluations have found, kept as plain weights in a file of its own.

The file says of which evaluation it is, so weights and value are replaced in one step, and a resume reads both from it.
A disk that fails or hangs, or memory that lacks, ends no run: what could not be written waits for the next evaluation,
and for the run's end.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from w5xde_async.errors import CheckpointCorrupt, StoreError, in_one_line
from w5xde_async.job import best_by
from w5xde_async.params.layout import Layout
from w5xde_async.store.filesystem import Filesystem, disk_errors, regular, unused
from w5xde_async.store.rundir import RunDir, export_tensors
from w5xde_async.store.tensors import read_metadata
from w5xde_async.telemetry.events import Best, Bus, Warned

_ABOUT = "w5xde_async.best"  #: in the file's metadata
#: A write that takes longer hangs: 30 s, and as long as a disk of 10 MB/s would take.
_PATIENCE_S, _SLOWEST_BYTES_S = 30.0, 10e6


class _Found(NamedTuple):
    """The best so far, while the file does not hold it."""

    step: int
    value: float
    snapshot: Mapping[str, Tensor]


class BestModel:
    """Keeps what ``Job.keep_best`` names. ``best`` is what the file holds. One ``offer`` at a time.

    Memory: the snapshot of the best, until it is written, and one that a disk which hangs was given.
    """

    def __init__(
        self, keep_best: str, layout: Layout, path: Path, filesystem: Filesystem, bus: Bus, best: Best | None
    ) -> None:
        """``best``: what an earlier start has left in the file."""
        self._direction, self.metric = best_by(keep_best)
        self._layout, self._path, self._filesystem, self._bus = layout, path, filesystem, bus
        self.best = best
        self._found: _Found | None = None
        self._writing: tuple[_Found, asyncio.Future[Best]] | None = None

    async def offer(self, step: int, metrics: Mapping[str, float], snapshot: Mapping[str, Tensor]) -> bool:
        """Keep ``snapshot`` (tensors by entry name, unchanged from now on) if ``metrics`` are better than all before.
        Whether it was kept.

        A value that is not finite, or that is missing, is not better.
        """
        value = metrics.get(self.metric, math.nan)
        known = self._found or self.best
        if math.isfinite(value) and (known is None or self._better(value, known.value)):
            self._found = _Found(step, value, snapshot)
        await self.save()
        return self.best is not None and self.best.step == step and self._found is None

    async def save(self) -> None:
        """Write what waits to be written."""
        if self._writing is not None and self._writing[1].done():
            self._written()  # after it had been given up
        if (found := self._found) is None:
            return
        if self._writing is not None:
            self._say(found.step, "the disk still hangs")
            return
        writing = asyncio.get_running_loop().run_in_executor(None, self._write, found)
        self._writing = found, writing
        patience_s = _PATIENCE_S + self._layout.state_bytes / _SLOWEST_BYTES_S
        await asyncio.wait([writing], timeout=patience_s)
        if not writing.done():
            self._say(found.step, f"the disk hangs, for {patience_s:.0f} s")
        elif self._writing is not None and self._writing[1] is writing:
            self._written()  # unless whoever waits for nothing any more has seen it first

    def _written(self) -> None:
        assert self._writing is not None
        (found, writing), self._writing = self._writing, None
        try:
            self.best = writing.result()
        except StoreError as error:
            self._say(found.step, str(error))
            return
        if self._found is found:
            self._found = None

    def _better(self, value: float, kept: float) -> bool:
        return value < kept if self._direction == "min" else value > kept

    def _say(self, step: int, reason: str) -> None:
        self._bus.publish(Warned(text=f"the best model so far, of step {step}, was not written: {reason}"))

    def _write(self, found: _Found) -> Best:
        """Blocks. Raises StoreError."""
        step, value = found.step, found.value
        said = json.dumps({"metric": self.metric, "best": self._direction, "value": value, "step": step})
        tensors = {name: found.snapshot[entry.name] for entry in self._layout.entries for name in entry.names}
        try:
            export_tensors(tensors, self._path, about={_ABOUT: said}, filesystem=self._filesystem)
        except StoreError:
            raise
        except Exception as error:  # no memory for it, say: a later one may fare better
            raise StoreError(str(self._path), f"cannot write it: {in_one_line(error)}") from error
        return Best(metric=self.metric, value=value, step=step, path=str(self._path))


def take_up_best(keep_best: str, directory: RunDir, last_step: int | None, notes: list[str]) -> Best | None:
    """What an earlier start has kept. What is no best of this course of the run is set aside, and ``notes`` say so.

    ``last_step``: the run goes on from there on another course; None: on the same. Blocks. Raises StoreError.
    """
    path, (direction, metric) = directory.best_path, best_by(keep_best)
    with disk_errors(path, "read the best model"):
        try:
            with open(path, "rb", opener=regular) as file:
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
        except (CheckpointCorrupt, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            reason = "no evaluation of a run is told in it"
        aside = unused(path.with_name(f"abandoned-{path.name}"))
        directory.filesystem.rename(path, aside)
        directory.filesystem.sync_directory(path.parent)
    notes.append(f"the best model was set aside in {aside}: {reason}")
    return None
