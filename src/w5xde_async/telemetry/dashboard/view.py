"""What the pages show: the run folded from its events, bounded whatever its length, as plain JSON values.

``snapshot()`` is all of it, for whoever comes late; ``update()`` is what has come since the last update and goes to
those who have a snapshot already. A step costs a few additions. No clocks of its own but ``wall``, which dates
and may be set by somebody, and ``clock``, by which it is known how long the run stands still.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from w5xde_async.telemetry import events, wording
from w5xde_async.telemetry.dashboard.rows import Row, Rows
from w5xde_async.telemetry.events import (
    Event,
    RunReported,
    RunStarted,
    StepCommitted,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from w5xde_async.telemetry.rates import Rate
from w5xde_async.telemetry.records import SECRETS, number, plain_fields, plain_value, read_records

#: Columns of ``series``: one row an update, merged over long runs.
SERIES = ("step", "time", "loss", "loss_low", "loss_high", "samples_per_s", "num_workers", "stale_share")
#: Columns of a worker's timeline: shares of the time since the row before, from 0 to 1.
TIMELINE = ("time", "compute", "wait", "network")

_STALL_S = 10.0  # without a step, and three times as long as one takes: only then is the throughput nothing
_MOST_GONE = 32
_MOST_LOGS = 400
_MOST_CHECKPOINTS = 50
_MOST_EVALUATIONS = 500
_MOST_BYTES = 64 << 20  # of a longer metrics.jsonl the end alone is read: a start must not wait for it
#: What the last step has to say of the run.
_OF_STEP = ("step", "epoch", "loss", "learning_rate", "gradient_norm", "loss_scale", "staleness", "metrics", "phases_s")

Json = dict[str, object]


@dataclass(slots=True)
class _Worker:
    """One worker as shown. ``shown_s`` is how much computing its timeline has shown so far."""

    shown: Json
    report: WorkerReported | None = None
    timeline: Rows = field(default_factory=lambda: Rows(("last", "mean", "mean", "mean"), capacity=240))
    new_rows: list[Row] = field(default_factory=list)
    shown_s: float = 0.0
    changed: bool = True


class View:
    """Subscribe it with ``samples=True``. One thread, that of the event loop."""

    def __init__(
        self, settings: Mapping[str, object] | None = None, *, wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """``settings`` are shown as they are: they must hold no secret."""
        self._wall, self._clock = wall, clock
        self._settings = plain_value(settings or {})
        self._run: Json = {}
        self._status: Json = {"state": "starting", "step": 0, "total_steps": 0}
        self._series = Rows(("last", "last", "mean", "low", "high", "mean", "last", "mean"), capacity=1200)
        self._workers: dict[str, _Worker] = {}
        self._gone: deque[str] = deque()
        self._evaluations: deque[Json] = deque(maxlen=_MOST_EVALUATIONS)
        self._checkpoints: deque[Json] = deque(maxlen=_MOST_CHECKPOINTS)
        self._logs: deque[Json] = deque(maxlen=_MOST_LOGS)
        self._finished: Json | None = None
        self._new: dict[str, list[Json]] = {"evaluations": [], "checkpoints": [], "logs": []}
        self._removed: list[str] = []
        self._joining: set[str] = set()  # reported since the last report of the run
        self._row_at = self._commit_at = 0.0  # by ``clock``: the last row, and the last one that had steps
        self._last: StepCommitted | None = None
        self._running = False
        self._pace = Rate()  # of steps
        self._losses: list[float] = []
        self._samples = self._steps = 0
        self._seconds = self._step_s = 0.0
        self._in_vain = self._in_vain_before = self._leaves = self._leaves_before = 0

    def recall(self, records: Iterable[Row | events.Evaluated]) -> None:
        """What the run had come to before it was resumed (``recorded``); before the first event."""
        for record in records:
            if isinstance(record, events.Evaluated):
                self._evaluations.append(plain_fields(record))
            else:
                self._series.append(record)

    # -- in ------------------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        match event:
            case StepCommitted():
                self._last, self._running = event, True
                self._steps += 1
                self._samples += event.samples
                self._seconds += event.seconds
                if math.isfinite(event.loss):
                    self._losses.append(event.loss)
            case WorkerReported():
                self._reported(event)
            case RunReported():
                self._leaves, self._in_vain = event.leaves, event.leaves_in_vain
                self._status |= plain_fields(event, omit=("step",))
                self._forget_joining()
            case _:
                self._rare(event)

    def log(self, level: str, text: str) -> None:
        """A line for the page of logs."""
        self._note("logs", self._logs, {"time": self._wall(), "level": level, "text": wording.clean(text)})

    def _rare(self, event: Event) -> None:
        line = wording.line(event, wording.plain)
        if line is not None and not isinstance(event, events.Evaluated):  # these have a table, and may be many
            warns = events.CheckpointFailed | events.JournalFailed | events.SampleLeftOut
            self.log("warning" if isinstance(event, warns) else "info", line)
        match event:
            case RunStarted():
                self._run = plain_fields(event, omit=SECRETS)
                self._status |= {"step": event.resumed_step, "total_steps": event.total_steps, "state": "waiting"}
                self._pace = Rate()
                self.log("info", f"run {event.run_name} began at step {event.resumed_step:,}, term {event.term}")
            case events.BatchGrown():
                self._status |= {"total_steps": event.total_steps}
            case WorkerJoined():
                self._joined(event)
            case WorkerLeft():
                self._left(event)
            case events.Waiting():
                self._running = False
                self._pace.pause()
                self._status |= {"state": "waiting", "waits_for": wording.clean(event.reason), "eta_s": None}
            case events.Evaluated():
                self._note("evaluations", self._evaluations, plain_fields(event))
            case events.CheckpointSaved():
                self._note("checkpoints", self._checkpoints, {**plain_fields(event), "time": self._wall()})
            case events.ResultHeld():
                self._count("results_held")
                text = f"a result of {event.name} for step {event.step:,} is computed by another too: {event.why}"
                self.log("info", text)
            case events.Audited():
                self._count("audits_agreed" if event.agreed else "audits_disagreed")
                if not event.agreed:
                    text = f"two workers disagree about step {event.step:,} ({event.why}), by {event.relative:.2g}"
                    self.log("warning", text)
            case events.WorkerQuarantined():
                self._count("workers_quarantined")
                self.log("warning", f"{event.name} computes wrongly: {event.reason}")
            case events.Warned():
                self.log("warning", event.text)
            case events.RunFinished():
                self._finished, self._running = plain_fields(event), False
                self._status |= {"state": event.outcome, "reason": wording.clean(event.reason), "waits_for": ""}
                self._status["eta_s"] = None
                level = "info" if event.outcome == "finished" else "warning"
                self.log(level, f"{event.outcome} {event.reason}".strip())

    def _note(self, name: str, kept: deque[Json], value: Json) -> None:
        kept.append(value)
        self._new[name].append(value)
        del self._new[name][:-_MOST_LOGS]

    def _count(self, name: str) -> None:
        known = self._status.get(name, 0)
        self._status[name] = (known if isinstance(known, int) else 0) + 1

    def _joined(self, event: WorkerJoined) -> None:
        worker = self._workers.setdefault(event.worker_id, _Worker({}))
        for key in [key for key in self._gone if key == event.worker_id or self._name(key) == event.name]:
            self._gone.remove(key)
            if key != event.worker_id:  # another process, the same worker to a person: its time goes on
                worker.timeline = self._workers[key].timeline
                worker.new_rows = worker.timeline.rows()
                self._drop(key)
        worker.report, worker.shown_s, worker.changed = None, 0.0, True
        worker.shown = plain_fields(event, omit=("num_workers",)) | {"state": "ready", "joined": self._wall()}

    def _name(self, key: str) -> object:
        return self._workers[key].shown.get("name")

    def _drop(self, key: str) -> None:
        if self._workers.pop(key, None) is not None:
            self._removed.append(key)

    def _left(self, event: WorkerLeft) -> None:
        worker = self._workers.get(event.worker_id)
        if worker is None:
            return
        worker.report, worker.changed = None, True
        worker.shown |= {"leaves_per_s": 0.0, "leases_held": 0, "flops_per_s": 0.0, "busy": 0.0, "left": self._wall()}
        worker.shown |= {"state": "left" if event.clean else "lost", "waits_for": wording.clean(event.reason)}
        self._row(worker, (round(self._wall(), 2), None, None, None))
        self._gone.append(event.worker_id)
        while len(self._gone) > _MOST_GONE:
            self._drop(self._gone.popleft())

    def _forget_joining(self) -> None:
        """Drop workers that left before they were members: no event says so, they are just not reported any more."""
        for key in [key for key, worker in self._workers.items() if worker.shown.get("state") == "joining"]:
            if key not in self._joining:
                self._drop(key)
        self._joining.clear()

    def _reported(self, event: WorkerReported) -> None:
        if event.state == "joining":
            self._joining.add(event.worker_id)
        if event.state == "joining" and event.worker_id in self._gone:
            return  # its old row stands until it is a member again
        worker = self._workers.setdefault(event.worker_id, _Worker({"joined": self._wall()}))
        before, worker.report, worker.changed = worker.report, event, True
        compute = 0.0
        seconds = event.member_s - (before.member_s if before else 0.0)
        if seconds > 0 and event.state != "joining":
            computed = event.compute_s - (before.compute_s if before else 0.0)
            if not event.waits_for and not computed:
                compute = 1.0  # in the middle of a long lease, whose time is told when it is done
            else:
                compute = min(max((event.compute_s - worker.shown_s) / seconds, 0.0), 1.0)
            worker.shown_s += compute * seconds
            if computed:
                worker.shown_s = min(worker.shown_s, event.compute_s)  # what was taken for computing was not
            network = min(max((event.network_s - (before.network_s if before else 0.0)) / seconds, 0.0), 1.0)
            self._row(worker, (round(self._wall(), 2), round(compute, 3), round(1 - compute, 3), round(network, 3)))
        worker.shown |= plain_fields(event) | {"left": None, "busy": compute, "flops_per_s": event.flops_per_s}
        worker.shown |= {"activity": wording.clean(event.activity), "waits_for": wording.clean(event.waits_for)}

    def _row(self, worker: _Worker, row: Row) -> None:
        worker.timeline.append(row)
        worker.new_rows.append(row)
        del worker.new_rows[:-60]

    # -- out -----------------------------------------------------------------------------------------------

    def update(self, *, row: bool = True) -> Json | None:
        """What is new since the last update; None where nothing is. Without ``row`` steps wait for a later one."""
        found: Json = {}
        if row and (steps := self._next_row()) is not None:
            found["series"] = [steps]
        changed = {key: worker for key, worker in self._workers.items() if worker.changed}
        if changed:
            found["workers"] = [{"worker_id": key, **worker.shown} for key, worker in changed.items()]
            found["timelines"] = {key: worker.new_rows for key, worker in changed.items() if worker.new_rows}
            for worker in changed.values():
                worker.changed, worker.new_rows = False, []
        if self._removed:
            found["removed"], self._removed = self._removed, []
        for name, values in self._new.items():
            if values:
                found[name] = values
        self._new = {name: [] for name in self._new}
        if not found:
            return None
        return found | {"time": self._wall(), "status": self._told(), "finished": self._finished}

    def snapshot(self) -> Json:
        """Everything but steps that no row has yet. Who is given updates too wants one before, or has things twice."""
        return {
            "time": self._wall(),
            "run": self._run,
            "settings": self._settings,
            "status": self._told(),
            "series": {"columns": SERIES, "rows": self._series.rows()},
            "workers": self.workers(),
            "timelines": {
                "columns": TIMELINE,
                "rows": {key: worker.timeline.rows() for key, worker in self._workers.items()},
            },
            "evaluations": list(self._evaluations),
            "checkpoints": list(self._checkpoints),
            "logs": list(self._logs),
            "finished": self._finished,
        }

    def workers(self) -> list[Json]:
        """Every worker, those too that have left not long ago."""
        return [{"worker_id": key, **worker.shown} for key, worker in self._workers.items()]

    def _told(self) -> Json:
        """The status, with what the last step has to say: whoever looks, and when, changes nothing."""
        told = dict(self._status)
        if self._last is not None:
            told |= {name: plain_value(getattr(self._last, name)) for name in _OF_STEP}
        return told | ({"state": "running", "waits_for": ""} if self._running else {})

    def _next_row(self) -> Row | None:
        """The steps since the last row, as one; a row without steps says that the run stands still, once a second."""
        step, now = self._last, self._clock()
        if step is None:
            return None
        rate: float | None = 0.0
        if self._steps:
            # By the steps' own time: when rows are made has no part in it.
            rate = self._samples / self._seconds if self._seconds > 0 else None
            self._commit_at, self._step_s = now, self._seconds / self._steps
            self._status["step_s"] = self._step_s
            self._estimate(now, step.step)
        elif now - self._commit_at < max(_STALL_S, 3 * self._step_s) or now - self._row_at < 1.0:
            return None
        losses = self._losses
        leaves, in_vain = self._leaves - self._leaves_before, self._in_vain - self._in_vain_before
        self._leaves_before, self._in_vain_before = self._leaves, self._in_vain
        # The last report counts those of now: whoever computed these steps may have left since.
        workers = step.num_workers if self._steps else self._status.get("num_workers", step.num_workers)
        row: Row = (
            step.step,
            round(self._wall(), 2),
            sum(losses) / len(losses) if losses else None,
            min(losses) if losses else None,
            max(losses) if losses else None,
            rate,
            workers if isinstance(workers, int) else step.num_workers,
            in_vain / (leaves + in_vain) if leaves + in_vain else None,
        )
        self._status["samples_per_s"] = rate
        self._row_at, self._losses, self._samples, self._steps, self._seconds = now, [], 0, 0, 0.0
        self._series.append(row)
        return row

    def _estimate(self, now: float, step: int) -> None:
        """How long the run still takes, as the progress bar has it."""
        if not self._running:
            return
        self._pace.update(now, step)
        total = self._status["total_steps"]
        if isinstance(total, int) and total:
            self._status["eta_s"] = self._pace.seconds_for(total - step)


class LogHandler(logging.Handler):
    """Brings log records to a view's page of logs, from any thread, by ``soon`` (``loop.call_soon_threadsafe``)."""

    def __init__(self, view: View, soon: Callable[..., object]) -> None:
        super().__init__(logging.INFO)
        self._view, self._soon = view, soon

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._soon(self._view.log, record.levelname.lower(), record.getMessage())
        except RuntimeError:  # the loop has been closed
            return
        except Exception:
            self.handleError(record)


def recorded(
    path: Path, resumed_step: int, *, most_bytes: int = _MOST_BYTES
) -> Iterator[Row | events.Evaluated]:  # fmt: skip
    """Of ``metrics.jsonl`` up to ``resumed_step``: a row of ``SERIES`` for each step, and the evaluations.

    Blocking; never raises for the file's sake.
    """
    with suppress(OSError):
        for record in read_records(path, last_bytes=most_bytes):
            with suppress(ValueError, KeyError, TypeError, AttributeError):  # a record that is not ours
                if record["step"] > resumed_step:
                    continue
                if record["event"] == "evaluated":
                    metrics = {str(name): number(value) for name, value in record["metrics"].items()}
                    yield events.Evaluated(
                        step=int(record["step"]), metrics=metrics, seconds=number(record["seconds"]),
                        best=record.get("best") is True,
                    )  # fmt: skip
                if record["event"] == "step_committed":
                    loss, seconds = _finite(record["loss"]), _finite(record["seconds"])
                    rate = number(record["samples"]) / seconds if seconds else None
                    workers = int(number(record["num_workers"]))
                    yield record["step"], round(number(record["time"]), 2), loss, loss, loss, rate, workers, None


def _finite(value: object) -> float | None:
    found = number(value)
    return found if abs(found) < float("inf") else None
