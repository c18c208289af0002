"""The part of a resumed run that was before: its steps from ``metrics.jsonl``, as rows of the view's series."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from w5xde_async.telemetry.dashboard.rows import Row
from w5xde_async.telemetry.records import number, read_records

__all__ = ["recorded_rows"]

#: Of a longer file the end alone is read: a start must not wait for it.
_MOST_BYTES = 64 << 20


def recorded_rows(path: Path, resumed_step: int, *, most_bytes: int = _MOST_BYTES) -> Iterator[Row]:
    """A row for each step up to ``resumed_step``. Blocking; never raises for the file's sake."""
    with suppress(OSError):
        for record in read_records(path, last_bytes=most_bytes):
            with suppress(ValueError, KeyError, TypeError):  # a record that is not ours
                if record["event"] == "step_committed" and record["step"] <= resumed_step:
                    loss, seconds = _finite(record["loss"]), _finite(record["seconds"])
                    rate = number(record["samples"]) / seconds if seconds else None
                    workers = int(number(record["num_workers"]))
                    yield record["step"], round(number(record["time"]), 2), loss, loss, loss, rate, workers, None


def _finite(value: object) -> float | None:
    found = number(value)
    return found if abs(found) < float("inf") else None
