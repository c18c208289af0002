"""The run for experiment trackers: ``--tracker tensorboard,mlflow:URI``.

Rows go through a bounded queue to a thread for each tracker; what it cannot take is counted and left out, never waited
for. Fast steps share a row: at most one every ``interval_s``, with the means of their losses and metrics. A tracker
that is not installed, that fails or that hangs is named once and left out; the run and the other trackers go on.
Nothing leaves this machine unless the target says so: wandb writes offline, mlflow and trackio write files, and what
these packages would tell their makers is switched off.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import unquote_plus

from w5xde_async.errors import UsageError
from w5xde_async.telemetry.events import Evaluated, Event, RunFinished, RunReported, RunStarted, StepCommitted
from w5xde_async.telemetry.records import SECRETS, number, plain_fields
from w5xde_async.users_code import users_code

logger = logging.getLogger(__name__)

_CAPACITY = 4096
_CLOSE_S = 30.0  # trackers may take so long for their last words
_HANGS_S = 300.0  # one that has taken so long for one call hangs: these packages try again by themselves for minutes

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+")  # of two letters at least: one is a drive
#: What a database's address may say of the way to it; any other option may be a password, whatever it is called.
_OPTIONS = frozenset(
    ("cache", "charset", "check_same_thread", "connect_timeout", "driver", "encrypt", "mode", "ssl_ca", "sslmode",
     "sslrootcert", "timeout", "trusted_connection", "trustservercertificate", "uid", "uri", "user")
)  # fmt: skip

Config = dict[str, object]
Values = Mapping[str, float]


class Tracker(ABC):
    """One tracker. Every method runs on a thread of its own and may block; one that raises ends this tracker."""

    package: ClassVar[str]  #: what is imported
    extra: ClassVar[str]  #: of this project, that installs it
    quiet: ClassVar[Mapping[str, str]] = {}  #: environment that keeps it from reporting to its makers

    def __init__(self, folder: Path, target: str) -> None:
        """``folder`` is for its files; ``target`` is what stood behind the colon, empty for the default."""
        self.folder, self.target = folder, target

    @abstractmethod
    def begin(self, name: str, config: Config) -> None:
        """The run ``name`` begins."""

    @abstractmethod
    def log(self, step: int, values: Values) -> None:
        """Values of one step; those of an evaluation may come after later steps."""

    @abstractmethod
    def end(self, outcome: str) -> None:
        """The run has ended: finished, stopped or failed."""


class TensorBoard(Tracker):
    """Event files in ``folder/tensorboard``, or in the target.

    Written here: tensorboardX's own writer does it on a thread that ends at the first error, a full disk's too, and
    waits for that thread from then on.
    """

    package, extra = "tensorboardX", "tensorboard"

    def begin(self, name: str, config: Config) -> None:
        path = Path(self.target) if self.target else self.folder / "tensorboard"
        self._summary: Any = import_module("tensorboardX.summary")
        self._proto: Any = import_module("tensorboardX.proto.event_pb2")
        path.mkdir(parents=True, exist_ok=True)
        file = path / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._records: Any = import_module("tensorboardX").RecordWriter(str(file))
        text = "\n".join(f"    {key} = {value}" for key, value in config.items())
        events: list[dict[str, Any]] = [{"file_version": "brain.Event:2"}]
        term, resumed_step = (int(number(config[name])) for name in ("term", "resumed_step"))
        if term > 1 or resumed_step:  # an earlier start may have shown steps that are made again
            begun = self._proto.SessionLog(status=self._proto.SessionLog.START)
            events.append({"session_log": begun, "step": resumed_step + 1})
        self._write(*events, {"summary": self._summary.text("run", text)})

    def log(self, step: int, values: Values) -> None:
        self._write(*({"summary": self._summary.scalar(key, value), "step": step} for key, value in values.items()))

    def end(self, outcome: str) -> None:
        self._records.close()

    def _write(self, *events: Mapping[str, Any]) -> None:
        try:
            for event in events:
                self._records.write(self._proto.Event(wall_time=time.time(), **event).SerializeToString())
            self._records.flush()
        except OSError:
            with suppress(OSError):  # it tries to write what is left
                self._records.close()
            raise


class Wandb(Tracker):
    """Offline files in ``folder/wandb`` for ``wandb sync``; the target ``online`` sends them at once."""

    package, extra = "wandb", "wandb"
    quiet: ClassVar[Mapping[str, str]] = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}

    def begin(self, name: str, config: Config) -> None:
        """Raises ValueError where the target is neither online nor offline."""
        if self.target not in ("", "online", "offline"):
            raise ValueError(f"wandb:{self.target}: the target is online or offline")
        wandb: Any = import_module("wandb")
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(console="off", disable_git=True, disable_code=True, x_disable_stats=True)
        self._step = 0
        mode, folder = self.target or "offline", str(self.folder)
        self._run = wandb.init(
            project="w5xde-async", name=name, config=config, dir=folder, mode=mode, settings=settings
        )

    def log(self, step: int, values: Values) -> None:
        self._step = max(self._step, step)  # it takes no step that is older than the last; evaluations come late
        self._run.log(dict(values), step=self._step)

    def end(self, outcome: str) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))


class Mlflow(Tracker):
    """Files in ``folder/mlflow``, or the tracking URI that is the target."""

    package, extra = "mlflow", "mlflow"
    # The last: files need no database's packages, and mlflow wants to be told so.
    quiet = dict.fromkeys(("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "MLFLOW_ALLOW_FILE_STORE"), "true")

    def begin(self, name: str, config: Config) -> None:
        tracking, entities = import_module("mlflow.tracking"), import_module("mlflow.entities")
        self.folder.mkdir(parents=True, exist_ok=True)
        uri = self.target or (self.folder / "mlflow").absolute().as_uri()
        self._client: Any = tracking.MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name("w5xde-async")
        experiment = known.experiment_id if known is not None else self._client.create_experiment("w5xde-async")
        self._run = self._client.create_run(experiment, run_name=name).info.run_id
        self._metric: Any = entities.Metric
        params = [entities.Param(key, str(value)[:500]) for key, value in config.items()]
        self._client.log_batch(self._run, params=params)

    def log(self, step: int, values: Values) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(_for_mlflow(key), value, now_ms, step) for key, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def end(self, outcome: str) -> None:
        status = {"finished": "FINISHED", "failed": "FAILED"}.get(outcome, "KILLED")
        self._client.set_terminated(self._run, status)


def _for_mlflow(name: str) -> str:
    """A metric's name as mlflow takes it: it refuses other characters, what is no plain path, and long ones."""
    parts = [part for part in name.split("/") if part.strip(".")] or ["_"]
    taken = "/".join(re.sub(r"[^\w.\- ]" if os.name == "nt" else r"[^\w.\- :]", "_", part) for part in parts)[:250]
    return "/".join(part for part in taken.split("/") if part.strip("."))  # the last may have been cut


class Trackio(Tracker):
    """trackio's local database; the target is a project's name."""

    package, extra = "trackio", "trackio"
    quiet: ClassVar = {"HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_ANALYTICS_ENABLED": "False", "DO_NOT_TRACK": "1"}

    def begin(self, name: str, config: Config) -> None:
        os.environ.setdefault("TRACKIO_DIR", str((self.folder / "trackio").absolute()))
        self._trackio: Any = import_module("trackio")
        self._trackio.init(project=self.target or "w5xde-async", name=name, config=config, embed=False)

    def log(self, step: int, values: Values) -> None:
        self._trackio.log(dict(values), step=step)

    def end(self, outcome: str) -> None:
        self._trackio.finish()


TRACKERS: Mapping[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}


def check_trackers(names: Sequence[str]) -> None:
    """Raises UsageError for a name that is no tracker's, and for a target with a password.

    Settings must not hold one: they are kept in ``config.toml`` and shown on the dashboard.
    """
    for text in names:
        name, _, target = text.partition(":")
        if name not in TRACKERS:
            raise UsageError(f"there is no tracker {text!r}; give one of {', '.join(TRACKERS)}")
        if _may_tell(target):
            raise UsageError(
                f"--tracker: {name}'s target holds a password, or an option that may be one, and settings are shown; "
                "of a server set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, of a database what its client "
                "reads (PGPASSWORD)"
            )


def _may_tell(target: str) -> bool:
    """Whether a tracker's target is an address with a password, or with what may be one."""
    scheme, _, rest = target.strip().partition(":")
    scheme = scheme.lower()
    if not _SCHEME.fullmatch(scheme):
        return False
    if scheme in ("http", "https"):  # a user's name may be a token here, and an @ may stand in the path
        return "@" in rest.lstrip("/").partition("/")[0] or "?" in rest or "#" in rest
    place, _, options = rest.partition("?")
    names = {option.partition("=")[0].strip().lower() for option in re.split("[&;]", unquote_plus(options)) if option}
    if scheme in ("file", "sqlite"):  # an @ may stand in the path
        return (place.startswith("//") and "@" in place[2:].partition("/")[0]) or not names <= _OPTIONS
    return ":" in place.rpartition("@")[0] or "#" in rest or not names <= _OPTIONS


class _Row(NamedTuple):
    step: int
    values: Values


class _Lane:
    """The way to one tracker: a queue and a thread, so that whatever it does the others go on."""

    def __init__(self, tracker: Tracker, clock: Callable[[], float]) -> None:
        self._tracker, self._clock = tracker, clock
        self.dropped = 0  #: rows that it was too slow for
        self.left_out = False  #: it has failed or hangs
        self._queue: queue.Queue[RunStarted | _Row | str] = queue.Queue(_CAPACITY)
        self._since: float | None = None  # when the call under way began
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"w5xde-tracker-{tracker.extra}", daemon=True)
        self._thread.start()

    def put(self, item: RunStarted | _Row | str) -> None:
        """Bring it a row, the run's beginning or its outcome, which ends the thread. Never waits."""
        if self.left_out:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.dropped += 1

    def look(self, now: float) -> None:
        """Leave it out where it hangs."""
        since = self._since
        if since is not None and now - since >= _HANGS_S:
            self._leave_out(f"it hangs, for {_HANGS_S:.0f} s now")

    def close(self) -> None:
        """Nothing comes any more."""
        self._closed = True
        self.put("stopped")  # ends the thread where no RunFinished did

    def wait(self, seconds: float) -> None:
        """For its last words. Blocking."""
        if not self.left_out:
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._leave_out(f"it did not end within {_CLOSE_S:.0f} s")

    def _leave_out(self, reason: str) -> None:
        if not self.left_out:
            self.left_out = True
            logger.warning("tracker left out name=%s error=%s", self._tracker.extra, reason)

    # -- the thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        tracker, begun, outcome = self._tracker, False, ""
        while not outcome and not self.left_out:
            try:
                item = self._queue.get(timeout=1.0)
            except queue.Empty:
                outcome = "stopped" if self._closed else ""
                continue
            if isinstance(item, str):
                outcome = item
            elif isinstance(item, RunStarted):
                self._call(partial(_begin, tracker, item))
                begun = True
            elif begun:
                values = {key: value for key, value in item.values.items() if math.isfinite(value)}
                self._call(partial(tracker.log, item.step, values))
        if begun and not self.left_out:
            self._call(partial(tracker.end, outcome))
        if self.dropped and not self.left_out:
            logger.warning("tracker was too slow name=%s rows_left_out=%d", tracker.extra, self.dropped)

    def _call(self, call: Callable[[], None]) -> None:
        self._since = self._clock()
        try:
            with users_code():
                call()
        except ImportError:
            package, extra = self._tracker.package, self._tracker.extra
            logger.warning("no %s: it is not installed (pip install 'w5xde-async[%s]')", package, extra)
            self.left_out = True
        except Exception as error:
            self._leave_out(f"{type(error).__name__}: {error}")
        finally:
            self._since = None


def _begin(tracker: Tracker, run: RunStarted) -> None:
    for name, value in tracker.quiet.items():
        os.environ.setdefault(name, value)
    tracker.begin(run.run_name, plain_fields(run, omit=SECRETS))


class Tracking:
    """A subscriber (``samples=True``) that brings the run to ``names``. ``close`` is blocking."""

    def __init__(
        self, names: Sequence[str], folder: Path, *, interval_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Raises UsageError as ``check_trackers``."""
        check_trackers(names)
        self._interval_s, self._clock = interval_s, clock
        parts = [text.partition(":") for text in names]
        self._lanes = [_Lane(TRACKERS[name](folder, target), clock) for name, _, target in parts]
        self._row_at = -math.inf
        self._steps: list[StepCommitted] = []  # since the last row
        self._since = clock()
        self._report: RunReported | None = None

    @property
    def dropped(self) -> int:
        """Rows that trackers were too slow for."""
        return sum(lane.dropped for lane in self._lanes)

    def __call__(self, event: Event) -> None:
        match event:
            case StepCommitted():
                self._committed(event)
            case RunReported():
                self._report = event
                for lane in self._lanes:
                    lane.look(self._clock())
            case Evaluated():
                self._put(_Row(event.step, {f"evaluated/{key}": value for key, value in event.metrics.items()}))
            case RunStarted():
                self._put(event)
            case RunFinished():
                if self._steps:
                    self._row(self._clock())
                self._put(event.outcome)

    def close(self) -> None:
        """Wait for the trackers' last words, but not for ever. Blocking; calling it twice is fine."""
        for lane in self._lanes:
            lane.close()
        ends = time.monotonic() + _CLOSE_S
        for lane in self._lanes:
            lane.wait(max(ends - time.monotonic(), 0.0))

    def _committed(self, event: StepCommitted) -> None:
        self._steps.append(event)
        now = self._clock()
        if now - self._row_at >= self._interval_s:
            self._row(now)

    def _row(self, now: float) -> None:
        steps, self._steps = self._steps, []
        last, found = steps[-1], dict[str, list[float]]()
        for step in steps:
            for name, value in (("loss", step.loss), *((f"step/{key}", one) for key, one in step.metrics.items())):
                found.setdefault(name, []).append(value)
        values = {name: sum(each) / len(each) for name, each in found.items()}
        values["num_workers"] = float(last.num_workers)
        if last.learning_rate is not None:
            values["learning_rate"] = last.learning_rate
        if now > self._since:
            values["samples_per_s"] = sum(step.samples for step in steps) / (now - self._since)
        if last.gradient_norm is not None:
            values["gradient_norm"] = last.gradient_norm
        if self._report is not None:
            values["network/sent_bytes"] = float(self._report.bytes_sent)
            values["network/received_bytes"] = float(self._report.bytes_received)
            values["leaves_in_vain"] = float(self._report.leaves_in_vain)
        self._row_at = self._since = now
        self._put(_Row(last.step, values))

    def _put(self, item: RunStarted | _Row | str) -> None:
        for lane in self._lanes:
            lane.put(item)
