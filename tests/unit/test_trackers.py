"""Trackers: what reaches them, and that none of them can hold up or end a run."""

from __future__ import annotations

import logging
import os
import posixpath
import re
import struct
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.support.events import FINISHED, STARTED, committed, run_reported

from w5xde_async.coordinator.monitoring.config import MonitoringConfig
from w5xde_async.errors import UsageError
from w5xde_async.telemetry import trackers
from w5xde_async.telemetry.events import Evaluated
from w5xde_async.telemetry.trackers import TRACKERS, Tracker, Tracking


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Kept(Tracker):
    """Remembers what it is told."""

    package = extra = "kept"
    said: list[Any]

    def begin(self, name: str, config: dict[str, object]) -> None:
        type(self).said = [("begin", name, config)]

    def log(self, step: int, values: Any) -> None:
        self.said.append((step, dict(values)))

    def end(self, outcome: str) -> None:
        self.said.append(outcome)


def use(monkeypatch: pytest.MonkeyPatch, **kinds: type[Tracker]) -> None:
    monkeypatch.setattr(trackers, "TRACKERS", {**TRACKERS, **kinds})


def test_fast_steps_share_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    use(monkeypatch, kept=Kept)
    clock = Clock()
    tracking = Tracking(["kept"], tmp_path, clock=clock)
    tracking(STARTED)
    for step, at, loss in ((1, 0.1, 1.0), (2, 0.2, 2.0), (3, 0.7, 4.0), (4, 0.8, 8.0)):
        clock.now = at
        tracking(committed(step, loss=loss, metrics={"acc": 10 * loss} if step != 3 else {}))
    tracking(Evaluated(step=3, metrics={"accuracy": 0.5, "worst": float("nan")}, seconds=0.1))
    tracking(FINISHED)
    tracking.close()
    tracking.close()
    begin, *rows, end = Kept.said
    assert begin[:2] == ("begin", "digits")
    assert "hush" not in str(begin)
    assert "secret command" not in str(begin)
    assert [(step, values.get("loss")) for step, values in rows] == [(1, 1.0), (3, 3.0), (3, None), (4, 8.0)]
    assert [values.get("step/acc") for _, values in rows] == [10.0, 20.0, None, 80.0]
    assert rows[1][1]["samples_per_s"] == pytest.approx(20 / 0.6)
    assert rows[2][1] == {"evaluated/accuracy": 0.5}  # no tracker is given what is not a number
    assert end == "finished"


def test_one_that_fails_is_left_out_and_named_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    class Broken(Kept):
        extra = "broken"

        def log(self, step: int, values: Any) -> None:
            raise ConnectionError("no server")

    use(monkeypatch, kept=Kept, broken=Broken)
    tracking = Tracking(["broken", "kept"], tmp_path, interval_s=0.0)
    tracking(STARTED)
    tracking(committed(1))
    tracking(committed(2))
    tracking(FINISHED)
    tracking.close()
    assert [message for message in caplog.messages if "broken" in message] == [
        "tracker left out name=broken error=ConnectionError: no server"
    ]
    assert [entry[0] for entry in Kept.said[1:-1]] == [1, 2]


def test_one_that_hangs_costs_the_run_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    go_on = threading.Event()

    class Slow(Kept):
        def log(self, step: int, values: Any) -> None:
            go_on.wait(60)
            super().log(step, values)

    use(monkeypatch, slow=Slow)
    monkeypatch.setattr(trackers, "_CAPACITY", 10)
    tracking = Tracking(["slow"], tmp_path, interval_s=0.0)
    tracking(STARTED)
    for step in range(1, 100):
        tracking(committed(step))  # returns at once
    assert tracking.dropped >= 85
    go_on.set()
    tracking(FINISHED)
    tracking.close()
    assert Slow.said[-1] in ("finished", "stopped")


def test_one_that_hangs_is_named_and_left_out_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    entered, go_on, clock = threading.Event(), threading.Event(), Clock()

    class Hanging(Kept):
        extra = "hanging"

        def log(self, step: int, values: Any) -> None:
            entered.set()
            go_on.wait(60)
            self.said.append(step)

    use(monkeypatch, kept=Kept, hanging=Hanging)
    monkeypatch.setattr(trackers, "_CLOSE_S", 50.0)  # longer than this test may take, by whom it is waited for
    tracking = Tracking(["hanging", "kept"], tmp_path, interval_s=0.0, clock=clock)
    tracking(STARTED)
    tracking(committed(1))
    assert entered.wait(60)
    clock.now = 299.0
    tracking(run_reported())
    assert caplog.messages == []  # these packages try again for minutes
    clock.now = 301.0
    for step in (2, 3):
        tracking(run_reported())
        tracking(committed(step))
    tracking(FINISHED)
    began = time.monotonic()
    tracking.close()
    assert time.monotonic() - began < 25.0
    assert caplog.messages == ["tracker left out name=hanging error=it hangs, for 300 s now"]
    assert [entry[0] for entry in Kept.said[1:-1]] == [1, 2, 3]
    assert Kept.said[-1] == "finished"
    go_on.set()
    tracking._lanes[0]._thread.join(60)
    assert Hanging.said[1:] == [1]  # where it comes back, it is told nothing more


def test_one_that_does_not_end_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    go_on = threading.Event()

    class Hanging(Kept):
        extra = "hanging"

        def end(self, outcome: str) -> None:
            go_on.wait(60)

    use(monkeypatch, kept=Kept, hanging=Hanging)
    monkeypatch.setattr(trackers, "_CLOSE_S", 0.2)
    tracking = Tracking(["hanging"], tmp_path)
    tracking(STARTED)
    tracking(FINISHED)
    tracking.close()
    tracking.close()  # once is enough
    assert caplog.messages == ["tracker left out name=hanging error=it did not end within 0 s"]
    go_on.set()
    tracking._lanes[0]._thread.join(60)


def test_a_name_that_is_none(tmp_path: Path):
    with pytest.raises(UsageError, match="there is no tracker 'tensorbord'"):
        Tracking(["tensorbord"], tmp_path)


@pytest.mark.parametrize(
    ("target", "refused"),
    [
        ("mlflow:http://user:hunter2@host:5000", True),
        ("mlflow:https://hunter2@host", True),  # a token
        ("mlflow:postgresql://user:hunter2@host/db", True),
        ("mlflow:postgresql://user:hun/ter2@host/db", True),
        ("mlflow:postgresql://host/db?user=me&password=hunter2", True),
        ("mlflow:HTTP://hunter2@host", True),
        ("mlflow:http:/user:hunter2@host", True),
        ("mlflow: \thttp://user:hunter2@host", True),
        ("mlflow:sqlite:///file:x.db?uri=true&password=hunter2", True),
        ("mlflow:file:///x?password=hunter2", True),
        ("mlflow:file://user:hunter2@host/x", True),
        ("mlflow:https://host/?api_key=hunter2", True),
        ("mlflow:https://host?auth=hunter2", True),
        ("mlflow:https://host/#token=hunter2", True),
        ("mlflow:mysql://host/db?user=me&passwd=hunter2", True),
        ("mlflow:mysql://me:hun?ter2@host/db", True),
        ("mlflow:mssql+pyodbc://host/db?driver=ODBC+Driver+18&UID=sa&PWD=hunter2", True),
        ("mlflow:mssql+pyodbc:///?odbc_connect=DRIVER%3D%7BODBC%7D%3BUID%3Dsa%3BPWD%3Dhunter2", True),
        ("mlflow:mssql+pyodbc://host/db?driver=ODBC%3BPWD%3Dhunter2", True),
        ("mlflow:mssql+pyodbc://host/db?driver=ODBC+Driver+18&Trusted_Connection=yes", False),
        ("mlflow:postgresql://host/db?sslmode=require", False),
        ("mlflow:databricks://profile", False),
        ("mlflow:sqlite:////runs/a:b@c.db", False),
        ("tensorboard:C:/runs/a:b@c", False),
        ("mlflow:postgresql://user@host/db", False),  # it asks for the password elsewhere
        ("mlflow:http://host:5000/a@b", False),
        ("mlflow:file:a@b/c", False),
        ("mlflow:sqlite:a@b.db", False),
        ("mlflow:sqlite:///file:x.db?uri=true&mode=ro", False),
        ("mlflow:file:///runs/a:b@c", False),
        ("tensorboard:runs/a:b@c", False),
    ],
)
def test_a_password_in_a_target_is_refused_and_not_repeated(target: str, refused: bool):
    """Settings are kept in config.toml and shown on the dashboard, and others can read a command's arguments."""
    if not refused:
        assert MonitoringConfig(trackers=("wandb", target)).trackers == ("wandb", target)
        return
    with pytest.raises(UsageError, match="--tracker: mlflow's target holds a password") as error:
        MonitoringConfig(trackers=("wandb", target))
    assert "MLFLOW_TRACKING_PASSWORD" in str(error.value)
    assert "hunter2" not in str(error.value)


def test_one_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    tracking = Tracking(["tensorboard"], tmp_path)
    tracking(STARTED)
    tracking(committed(1))
    tracking(FINISHED)
    tracking.close()
    assert caplog.messages == ["no tensorboardX: it is not installed (pip install 'w5xde-async[tensorboard]')"]


@pytest.mark.parametrize("rate", [0.1, None])
def test_tensorboard_files(rate: float | None, tmp_path: Path):
    pytest.importorskip("tensorboardX")
    logging.getLogger("tensorboardX").setLevel(logging.ERROR)
    tracking = Tracking(["tensorboard"], tmp_path, interval_s=0.0)
    tracking(STARTED)
    tracking(committed(7, loss=0.25, learning_rate=rate))
    tracking(FINISHED)
    tracking.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"gradient_norm" in file.read_bytes()
    assert (b"learning_rate" in file.read_bytes()) == (rate is not None)


def tensorboard_events(file: Path) -> list[Any]:
    """What an event file holds."""
    event_pb2: Any = pytest.importorskip("tensorboardX.proto.event_pb2")
    raw, at, found = file.read_bytes(), 0, []
    while at < len(raw):
        (nbytes,) = struct.unpack("<Q", raw[at : at + 8])  # and its checksum, and one behind the event
        found.append(event_pb2.Event.FromString(raw[at + 12 : at + 12 + nbytes]))
        at += 16 + nbytes
    return found


def test_tensorboard_shows_steps_that_are_made_again_once(tmp_path: Path):
    pytest.importorskip("tensorboardX")
    # The last goes on from another run's checkpoint, in its files.
    for term, resumed_step, steps in ((1, 0, (1, 2, 3)), (2, 2, (3, 4)), (3, 0, (1,)), (1, 3, (4,))):
        tracking = Tracking(["tensorboard"], tmp_path, interval_s=0.0)
        tracking(replace(STARTED, term=term, resumed_step=resumed_step))
        for step in steps:
            tracking(committed(step))
        tracking(FINISHED)
        tracking.close()
    files = [tensorboard_events(file) for file in sorted((tmp_path / "tensorboard").iterdir())]
    assert [events[0].file_version for events in files] == ["brain.Event:2"] * 4
    void_from = [[event.step for event in events if event.HasField("session_log")] for events in files]
    assert void_from == [[], [3], [1], [4]]  # what the files before have from there on is shown no more
    losses = [
        [event.step for event in events for value in event.summary.value if value.tag == "loss"] for events in files
    ]
    assert losses == [[1, 2, 3], [3, 4], [1], [4]]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device stands for a full disk")
def test_tensorboard_on_a_full_disk_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    tensorboard: Any = pytest.importorskip("tensorboardX")
    make = tensorboard.RecordWriter
    monkeypatch.setattr(tensorboard, "RecordWriter", lambda path: make("/dev/full"))
    tracking = Tracking(["tensorboard"], tmp_path, interval_s=0.0)
    tracking(STARTED)
    tracking(committed(1))
    tracking(FINISHED)
    tracking.close()
    (said,) = caplog.messages
    assert said.startswith("tracker left out name=tensorboard error=OSError: [Errno 28] No space left on device")


def fake(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    for key, value in members.items():
        setattr(module, key, value)
    return module


class Recording:
    """Stands for a package: every call is kept with its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments, named))
            return self

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, named) for called, arguments, named in self.calls if called == name]


def test_wandb_stays_offline_and_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    wandb = Recording()
    monkeypatch.setitem(sys.modules, "wandb", fake("wandb", init=wandb.init, Settings=dict))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    tracker = TRACKERS["wandb"](tmp_path, "")
    tracker.begin("digits", {})
    tracker.log(5, {"loss": 1.0})
    tracker.log(3, {"evaluated/accuracy": 1.0})  # an evaluation that comes late
    tracker.end("failed")
    ((_, told),) = wandb.named("init")
    assert told["mode"] == "offline"
    assert told["settings"]["x_disable_stats"] is True
    assert [named["step"] for _, named in wandb.named("log")] == [5, 5]
    assert wandb.named("finish") == [((), {"exit_code": 1})]
    with pytest.raises(ValueError, match="online or offline"):
        TRACKERS["wandb"](tmp_path, "elsewhere").begin("digits", {})
    assert dict(TRACKERS["wandb"].quiet)["WANDB_ERROR_REPORTING"] == "false"
    assert dict(TRACKERS["mlflow"].quiet)["MLFLOW_DISABLE_TELEMETRY"] == "true"


@pytest.mark.parametrize("known", [None, SimpleNamespace(experiment_id="7")])
def test_mlflow_is_given_the_run(known: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    class Client(Recording):
        def get_experiment_by_name(self, name: str) -> Any:
            return known

        def create_experiment(self, name: str) -> str:
            self.calls.append(("create_experiment", (name,), {}))
            return "8"

        def create_run(self, experiment: str, run_name: str) -> Any:
            self.calls.append(("create_run", (experiment, run_name), {}))
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    client, uris = Client(), []

    def make(*, tracking_uri: str) -> Client:
        uris.append(tracking_uri)
        return client

    entities = fake("mlflow.entities", Metric=lambda *fields: fields, Param=lambda *fields: fields)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", fake("mlflow.tracking", MlflowClient=make))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    for target, outcome in (("", "finished"), ("http://host:5000", "stopped"), ("", "failed")):
        tracker = TRACKERS["mlflow"](tmp_path / "run", target)
        tracker.begin("digits", {"codec": "raw", "long": "x" * 1000})
        tracker.log(5, {"loss": 1.0, "rate@": 2.0})
        tracker.log(3, {"evaluated/accuracy": 0.5})  # an evaluation that comes late keeps its step
        tracker.end(outcome)
    files = (tmp_path / "run" / "mlflow").as_uri()
    assert uris == [files, "http://host:5000", files]
    assert client.named("create_run")[0] == (("8" if known is None else "7", "digits"), {})
    assert len(client.named("create_experiment")) == (3 if known is None else 0)
    ((run,), params), ((_, first)), ((_, second)), *_ = client.named("log_batch")
    assert run == "r1"
    assert params == {"params": [("codec", "raw"), ("long", "x" * 500)]}
    assert [(key, value, step) for key, value, _, step in first["metrics"]] == [("loss", 1.0, 5), ("rate_", 2.0, 5)]
    assert [(key, value, step) for key, value, _, step in second["metrics"]] == [("evaluated/accuracy", 0.5, 3)]
    assert [told for told, _ in client.named("set_terminated")] == [
        ("r1", "FINISHED"), ("r1", "KILLED"), ("r1", "FAILED"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("step/acc@1", "step/acc_1"), ("evaluated/val loss (top-5)", "evaluated/val loss _top-5_"), ("loss", "loss"),
        ("step/../../a//b/./c/", "step/a/b/c"), ("step/größe", "step/größe"),
        ("step/" + "x" * 999, "step/" + "x" * 245), ("x" * 249 + "/acc", "x" * 249), ("x" * 247 + "/..acc", "x" * 247),
        ("..", "_"), ("", "_"), ("./", "_"),
    ],
)  # fmt: skip
def test_names_that_mlflow_refuses(name: str, given: str):
    """It would refuse the row, and the tracker would be left out: its rules are those of mlflow 3.17."""
    assert trackers._for_mlflow(name) == given
    assert re.match(r"^[/\w.\- ]*$", given)
    assert posixpath.normpath(given) == given


def test_trackio_is_given_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TRACKIO_DIR", "")  # what is set here is taken back
    monkeypatch.delenv("TRACKIO_DIR")
    trackio = Recording()
    members = {name: getattr(trackio, name) for name in ("init", "log", "finish")}
    monkeypatch.setitem(sys.modules, "trackio", fake("trackio", **members))
    for target in ("", "other"):
        tracker = TRACKERS["trackio"](tmp_path, target)
        tracker.begin("digits", {"codec": "raw"})
        tracker.log(5, {"loss": 1.0})
        tracker.end("finished")
    config = {"name": "digits", "config": {"codec": "raw"}, "embed": False}
    assert trackio.named("init") == [((), {"project": name, **config}) for name in ("w5xde-async", "other")]
    assert trackio.named("log") == [(({"loss": 1.0},), {"step": 5})] * 2
    assert trackio.named("finish") == [((), {})] * 2
    assert os.environ["TRACKIO_DIR"] == str(tmp_path / "trackio")
