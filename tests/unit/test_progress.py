"""What a person sees, on a terminal, in a file and as JSON; and what it costs."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import re
import select
import sys
import time
import warnings
from dataclasses import replace
from typing import Any

import pytest
from tqdm.utils import disp_len

from w5xde_async.errors import UsageError
from w5xde_async.job import ENDLESS, shown_end
from w5xde_async.process import attach
from w5xde_async.telemetry import wording
from w5xde_async.telemetry.events import (
    BatchGrown,
    Best,
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    RunFinished,
    RunStarted,
    StepCommitted,
    Waiting,
    Warned,
    WorkerJoined,
    WorkerLeft,
    WorkerShare,
)
from w5xde_async.telemetry.progress import Progress, ProgressConfig
from w5xde_async.telemetry.wording import clean
from w5xde_async.telemetry.writer import writer_for

START = RunStarted(
    version="0.1.0",
    run_name="digits",
    run_dir="runs/digits",
    run_id="3f2a99c01b7d4e55",
    term=2,
    model="Net",
    num_parameters=1_234_567,
    fingerprint="9f3b2c1d00aa11bb22cc",
    dataset="Digits",
    num_samples=1797,
    batch_size=64,
    leaves_per_step=8,
    update_rule="sync",
    codec="raw",
    precision="fp32",
    address="127.0.0.1:5555",
    worker_command="python -m w5xde_async.worker --join-file runs/digits/join",
    security="TLS, token",
    resumed_step=0,
    total_steps=1000,
    steps_per_epoch=28,
    memory_bound_bytes=10**9,
    max_workers=256,
    expected_bytes=8 * 10**6,
    expected_workers=2,
    host_bytes=400 * 10**6,
)
JOINED = WorkerJoined(worker_id="a", name="anna", peer="10.0.0.3:4", device="cpu", threads=8, num_workers=1)
LEFT = WorkerLeft(worker_id="a", name="anna", reason="killed", clean=False, leases_returned=2, num_workers=0)
SAVED = CheckpointSaved(step=5, path="p", nbytes=1500, pause_s=0.002, seconds=0.3)
FINISHED = RunFinished(
    outcome="finished",
    reason="",
    step=1000,
    total_steps=1000,
    samples=64_000,
    session_samples=64_000,
    trained_s=160.0,
    loss=0.1234,
    metrics={"accuracy": 0.9712},
    seconds=192.0,
    bytes_sent=1_230_000,
    bytes_received=4_560_000_000,
    digest="d1e5",
    model_path="runs/digits/model.safetensors",
    metrics_path="runs/digits/metrics.jsonl",
    plot_path="",
    shares=(
        WorkerShare(
            name="bert",
            device="cuda:0",
            leaves=250,
            samples=16_000,
            compute_s=30.0,
            wait_s=10.0,
            bytes_sent=1,
            bytes_received=2,
        ),
        WorkerShare(
            name="anna",
            device="cpu",
            leaves=750,
            samples=48_000,
            compute_s=0.0,
            wait_s=0.0,
            bytes_sent=1,
            bytes_received=2,
        ),
    ),
)


def step(number: int, **changes: Any) -> StepCommitted:
    event = StepCommitted(
        step=number,
        epoch=0,
        loss=0.5,
        metrics={},
        samples=64,
        leaves=8,
        learning_rate=1e-3,
        gradient_norm=0.5,
        loss_scale=1.0,
        skipped=False,
        seconds=0.01,
        num_workers=2,
        bytes_sent=100,
        bytes_received=200,
        phases_s={"wait": 0.008, "reduce": 0.00005},
    )
    return replace(event, **changes)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Shown:
    """A progress on a stream that can be read, at a time that is set."""

    def __init__(self, *, terminal: bool = False, columns: int = 100, **config: Any) -> None:
        self.stream = io.StringIO()
        self.clock = Clock()
        self.progress = Progress(
            ProgressConfig(**config),
            stream=self.stream,
            terminal=terminal,
            columns=lambda: columns,
            clock=self.clock,
            wall=lambda: 1e9,
        )

    def __call__(self, *events: Any) -> str:
        """What these events wrote."""
        before = len(self.stream.getvalue())
        for event in events:
            self.progress(event)
        return self.stream.getvalue()[before:]

    def steps(self, first: int, last: int, every_s: float) -> str:
        before = len(self.stream.getvalue())
        for number in range(first, last + 1):
            self.clock.now += every_s
            self.progress(step(number))
        return self.stream.getvalue()[before:]


def test_the_header_fits_into_80_columns() -> None:
    sizes = {"host_bytes": 331 * 10**6, "expected_bytes": 67_900_000, "memory_bound_bytes": 4_550 * 10**6}
    text = Shown()(replace(START, resumed_step=500, dashboard="http://127.0.0.1:5556/", **sizes))
    assert [line for line in text.splitlines() if len(line) > 80] == []


def test_the_header_says_what_runs_and_how_to_join() -> None:
    text = Shown()(replace(START, resumed_step=500))
    for part in (
        "w5xde-async 0.1.0",
        "run digits",
        "Net · 1,234,567 parameters · fingerprint 9f3b2c1d00aa11bb\n",
        "400 MB now · +8 MB for 2 workers, +1 GB for --max-workers 256\n",
        "1,797 samples · batch 64 in 8 leaves",
        "sync · codec raw · fp32",
        "resumed at step 500",
        "127.0.0.1:5555 · TLS, token",
        "\n    python -m w5xde_async.worker --join-file runs/digits/join\n",
    ):
        assert part in text
    assert "resumed" not in Shown()(START)
    assert "Start a worker" not in Shown()(replace(START, worker_command=""))


@pytest.mark.parametrize(
    ("address", "joins", "said"),
    [
        ("127.0.0.1:5555", "", "Start a worker on this machine (--host 0.0.0.0 lets others in):"),
        ("[::1]:5555", "", "Start a worker on this machine (--host 0.0.0.0 lets others in):"),
        ("10.0.0.7:5555", "", "Start a worker, here or on another machine:"),
        (
            "0.0.0.0:5555", "10.0.0.7:5555, 192.168.1.2:5555",
            "Start a worker, here or where you have copied the join file (it calls 10.0.0.7:5555, 192.168.1.2:5555; "
            "--advertise names another address):",
        ),
    ],
)  # fmt: skip
def test_the_banner_says_from_where_a_worker_can_come(address: str, joins: str, said: str) -> None:
    assert f"  {said}\n" in Shown()(replace(START, address=address, join_addresses=joins))


def test_work_done_in_vain_is_shown_where_there_was_some() -> None:
    some = replace(FINISHED, leaves=990, leaves_in_vain=10, leases_stale=2, leases_duplicate=3)
    assert "wasted" not in Shown()(START, FINISHED)
    assert "1.0% of the leaves" in Shown()(START, some)
    assert "2 late leases, 3 backed up" in Shown()(START, some)


def test_what_happens_is_said_when_it_happens() -> None:
    shown = Shown()
    shown(START)
    assert shown(JOINED) == "+ anna joined (10.0.0.3:4, cpu, 8 threads) · 1 worker\n"
    assert shown(LEFT) == "- anna left: killed, 2 leases to redo · 0 workers\n"
    assert shown(Waiting(reason="0 of 2 workers"), Waiting(reason="0 of 2 workers")) == "waiting: 0 of 2 workers\n"
    assert shown(Evaluated(step=5, metrics={"acc": 0.5}, seconds=1.2)) == "* step 5 evaluated: acc 0.5000 (1.2 s)\n"
    assert shown(CheckpointFailed(step=5, reason="disk full")) == "! no checkpoint of step 5: disk full\n"
    assert shown(Warned(text="mind")) == "! mind\n"
    assert "step 5 saved" in shown(SAVED)  # after one that failed
    assert shown(SAVED) == ""


def test_off_a_terminal_a_line_comes_every_five_seconds_or_ten_per_cent() -> None:
    shown = Shown()
    shown(replace(START, total_steps=100_000))
    lines = shown.steps(1, 300, every_s=0.125).splitlines()  # 37.5 s, 0.3 %
    assert len(lines) == 8
    assert lines[1] == "step 41/100,000 (0 %) · loss 0.5000 · 512 samples/s · 2 workers · ETA 3:28:15"
    quick = Shown()
    quick(START)
    assert len(quick.steps(1, 1000, every_s=0.0001).splitlines()) == 10
    slow = Shown()
    slow(replace(START, total_steps=10**9))
    assert len(slow.steps(1, 8 * 3600, every_s=1).splitlines()) < 600  # a night fits a screen or ten
    assert "\x1b" not in shown.stream.getvalue()
    assert "\r" not in shown.stream.getvalue()


def test_the_bar_is_painted_at_most_ten_times_a_second() -> None:
    shown = Shown(terminal=True, color=False)
    shown(START)
    text = shown.steps(1, 500, every_s=0.001)
    assert 4 <= text.count("loss") <= 6
    assert "samples/s · 2 workers · ETA" in text
    assert shown(step(501)) == ""
    shown.clock.now += 1
    assert " 50% |" in shown(step(502))


def test_the_last_step_is_shown_before_the_table() -> None:
    shown = Shown(terminal=True, color=False)
    shown(START, step(1), step(1000, loss=0.25))
    text = shown(FINISHED)
    assert text.index("1,000/1,000 · loss 0.2500") < text.index("finished")
    assert "ETA" not in text
    shown.progress.close()
    shown.progress.close()


GROWN = BatchGrown(
    step=10, after_step=11, batch_size_before=64, batch_size=128, noise_scale=1234.0, rate_factor=1.3, total_steps=500
)


def test_a_batch_that_grows_is_said_and_moves_the_end() -> None:
    said = (
        "* the batch grows from 64 to 128 samples: noise scale 1.23k samples; learning rate x 1.3; after step 11; "
        "the run ends at step 500\n"
    )
    shown = Shown()
    shown(START)
    assert shown(GROWN) == said
    assert "step 11/500 (2 %)" in shown.steps(11, 11, every_s=10.0)
    assert "beyond measure" in shown(replace(GROWN, noise_scale=math.inf))
    bar = Shown(terminal=True, color=False)
    bar(START, step(1), GROWN)
    assert " 50% |" in bar.steps(250, 250, every_s=1.0)
    record = json.loads(Shown(log_format="json")(GROWN))
    assert (record["event"], record["total_steps"]) == ("batch_grown", 500)


def test_lines_go_above_the_bar() -> None:
    shown = Shown(terminal=True, color=False)
    shown(START, step(1))
    text = shown(JOINED)
    # The bar's line is wiped, the line written, the bar painted again below it.
    assert re.fullmatch(r"\r +\r\+ anna joined .*\n\r +0% \|.*1/1,000 .*", text)
    handler = shown.progress.handler()
    before = len(shown.stream.getvalue())
    handler.handle(logging.LogRecord("x", logging.WARNING, "f", 1, "link lost peer=%s", ("b",), None))
    assert re.fullmatch(r"\r +\rwarning link lost peer=b\n\r +0% \|.*", shown.stream.getvalue()[before:])


def test_a_warning_of_a_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own form has a second line, of source, and the path of a file that nobody here has written."""
    shown, root = Shown(color=False), logging.getLogger()
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    attach(shown.progress.handler(), logging.WARNING)
    monkeypatch.setattr(warnings, "formatwarning", lambda *_: "as a library words it\n")
    warnings.showwarning("old\n  name", FutureWarning, "/a/library/deep/inside.py", 7)
    assert shown.stream.getvalue() == "warning FutureWarning: old name (inside.py:7)\n"


def test_the_bar_never_exceeds_the_terminal() -> None:
    for columns in (1, 2, 5, *range(20, 200, 7)):
        shown = Shown(terminal=True, columns=columns, color=False)
        shown(replace(START, total_steps=1_000_000))
        text = shown.steps(1, 100, every_s=0.1)
        assert max(len(line.rstrip()) for line in text.split("\r")) <= max(columns - 1, 1)
        assert "loss" in text or columns < 40


def test_waiting_stands_beside_the_bar_and_is_not_counted() -> None:
    shown = Shown(terminal=True, color=False)
    assert "0/1,000 · waiting: 0 of 2 workers" in shown(START, Waiting(reason="0 of 2 workers"))
    shown.clock.now += 1000
    assert "640 samples/s · 2 workers · ETA 1:30" in shown.steps(1, 100, every_s=0.1)
    assert "waiting: 1 of 2" in shown(Waiting(reason="1 of 2"))
    shown.clock.now += 1000
    assert "640 samples/s" in shown.steps(101, 110, every_s=0.1)


def test_colour_is_for_terminals_that_want_it() -> None:
    assert "\x1b[1m" in Shown(terminal=True)(START, FINISHED)
    for plain in (Shown(terminal=True, color=False), Shown(), Shown(terminal=True, log_format="json")):
        assert "\x1b[3" not in plain(START, JOINED, step(1), FINISHED)
        assert "\x1b[1m" not in plain.stream.getvalue()


def test_a_checkpoint_is_told_of_where_the_one_before_it_failed() -> None:
    shown = Shown()
    failed = CheckpointFailed(step=3, reason="the disk is full", safe_step=1)
    assert shown(SAVED) == ""
    assert "no checkpoint of step 3: the disk is full" in shown(failed)
    assert "step 5 saved: p" in shown(SAVED)
    assert shown(SAVED) == ""


def test_the_table_at_the_end() -> None:
    text = Shown()(START, FINISHED)
    for part in (
        "finished\n",
        "steps      1,000 of 1,000\n",
        "samples    64,000 · 400 samples/s",
        "loss       0.1234",
        "accuracy   0.9712",
        "time       3:12 · 2:40 of it training",
        "1.23 MB sent · 4.56 GB received",
        "model      runs/digits/model.safetensors",
        "metrics    runs/digits/metrics.jsonl",
        "digest     d1e5",
    ):
        assert part in text
    assert "plot" not in text
    shares = [line.split() for line in text.splitlines() if line.startswith(("  anna", "  bert"))]
    assert [row[:4] for row in shares] == [["anna", "cpu", "75", "%"], ["bert", "cuda:0", "25", "%"]]
    many = tuple(replace(FINISHED.shares[0], name=f"anna-{n}", leaves=1, samples=8) for n in range(1000))
    table = Shown()(START, replace(FINISHED, shares=many)).splitlines()
    shares = [line.split() for line in table if line.startswith(("  anna", "  977 others"))]
    assert len(shares) == 24
    assert shares[-1][:6] == ["977", "others", "98", "%", "977", "7,816"]
    failed = Shown()(
        START, replace(FINISHED, outcome="failed", reason="leaf 3 failed", shares=(), samples=0, loss=None)
    )
    assert "failed: leaf 3 failed" in failed


def test_silent_shows_warnings_and_failure_alone() -> None:
    shown = Shown(terminal=True, mode="silent", color=False)
    assert shown(START, JOINED, LEFT, step(1), SAVED, Waiting(reason="x"), FINISHED) == ""
    assert shown(Warned(text="mind")) == "! mind\n"
    assert shown(CheckpointFailed(step=1, reason="full")) == "! no checkpoint of step 1: full\n"
    assert "failed: why" in shown(replace(FINISHED, outcome="failed", reason="why"))
    assert shown.progress.handler().level == logging.WARNING


def test_verbose_adds_phases_at_most_a_few_a_second() -> None:
    shown = Shown(mode="verbose")
    shown(START)
    lines = shown.steps(1, 1000, every_s=0.001).splitlines()
    phases = [line for line in lines if "wait" in line]
    assert 3 <= len(phases) <= 5
    assert "10 ms: wait 8 ms  reduce 50 µs  out 100 B  in 200 B" in phases[0]
    assert "loss 0.5000  lr 0.001  |g| 0.5  " in phases[0]
    assert "step 5 saved: p (1.5 kB, 300 ms, paused 2 ms)" in shown(SAVED)
    assert shown.progress.handler().level == logging.INFO


def test_a_rate_that_is_not_known_is_not_shown() -> None:
    shown = Shown(mode="verbose")
    shown(START)
    assert "loss 0.5000  |g| 0.5  " in shown(step(1, learning_rate=None))


@pytest.mark.parametrize("mode", ["silent", "normal", "verbose"])
def test_json_is_one_object_per_line(mode: Any) -> None:
    shown = Shown(terminal=True, log_format="json", mode=mode)
    shown(START, JOINED)
    shown.steps(1, 1000, every_s=0.001)
    shown(CheckpointFailed(step=1, reason="full"))
    shown(Warned(text="a\nb"), Evaluated(step=1, metrics={"acc": float("nan")}, seconds=1.0), FINISHED)
    shown.progress.handler().handle(logging.LogRecord("x.y", logging.ERROR, "f", 1, "bad %s", ("é",), None))
    records = [json.loads(line) for line in shown.stream.getvalue().splitlines()]
    kinds = [record["event"] for record in records]
    assert {record["time"] for record in records} == {1e9}
    assert records[-1] == {"time": 1e9, "event": "log", "level": "error", "logger": "x.y", "message": "bad é"}
    if mode == "silent":
        assert kinds == ["checkpoint_failed", "warned", "log"]
    else:
        assert kinds[:2] == ["run_started", "worker_joined"]
        assert 3 <= kinds.count("step_committed") <= 12
        assert next(record for record in records if record["event"] == "evaluated")["metrics"] == {"acc": "nan"}
        assert records[-2]["shares"][0]["name"] == "bert"


def test_no_peer_steers_the_terminal() -> None:
    shown = Shown(terminal=True, color=False)
    text = shown(
        START,
        replace(JOINED, name="\x1b[2Jx\ny" + "z" * 100),
        replace(LEFT, reason="\x1b]0;title\x07"),
        Warned(text="\x9b31m"),
        replace(FINISHED, shares=(replace(FINISHED.shares[0], name="\x1b[2J"),)),
    )
    assert "\x1b[2J" not in text
    assert "\x1b]" not in text
    assert "\x07" not in text
    assert "\x9b" not in text
    assert "x yzz" in text
    assert "z" * 50 not in text
    assert clean("a\nb\tc") == "a\nb\N{REPLACEMENT CHARACTER}c"


def test_an_ascii_stream_gets_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    progress = Progress(ProgressConfig(color=False), stream=stream, terminal=True, columns=lambda: 100)
    for event in (START, JOINED, step(1), Warned(text="naïve"), FINISHED):
        progress(event)
    stream.flush()
    text = raw.getvalue().decode("ascii")
    assert "127.0.0.1:5555" in text
    assert "! na?ve" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_thousand_steps_a_second_cost_under_one_per_cent(terminal: bool) -> None:
    shown = Shown(terminal=terminal, color=False)
    shown(START)
    events = [step(number) for number in range(1, 1001)]

    def cost_s() -> float:
        began = time.process_time()
        for event in events:
            shown.clock.now += 0.001
            shown.progress(event)
        return time.process_time() - began

    # A second of run; the best of a few tries, for this machine has other things to do.
    assert min(cost_s() for _ in range(10)) < 0.01


async def test_showing_is_fit_for_an_event_loop() -> None:
    shown = Shown(terminal=True, mode="verbose")
    shown(START, JOINED, step(1), Waiting(reason="x"), Warned(text="mind"), FINISHED)
    assert "finished" in shown.stream.getvalue()


def test_a_config_that_cannot_work_is_refused() -> None:
    with pytest.raises(UsageError, match="refresh_s"):
        ProgressConfig(refresh_s=0)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_that_goes_on_until_it_is_stopped_has_no_share_and_no_estimate(terminal: bool) -> None:
    shown = Shown(terminal=terminal, color=False)
    text = shown(replace(START, total_steps=shown_end(ENDLESS)))
    assert "until stopped" in text
    text += shown.steps(1, 100, every_s=0.1)
    assert "%" not in text
    assert "samples/s · 2 workers" in text
    text += shown(replace(FINISHED, outcome="stopped", total_steps=0))
    for word in ("ETA", "/0", "of 0", "1,000,000,000"):
        assert word not in text


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (140, "step 7/1,000 · loss 0.5000 · accuracy 0.9712 · f1 0.5000 · recall 1.500e-05 · - samples/s · 2 workers"),
        (80, "| 7/1,000 · loss 0.5000 · accuracy 0.9712 · -/s · 2 w"),
        (72, "| 7/1,000 · loss 0.5000 · accuracy 0.9712 · -/s · ETA -"),
        (62, "  1% | 7/1,000 · loss 0.5000 · accuracy 0.9712 · -/s · ETA -"),
        (60, "| 7/1,000 · loss 0.5000 · -/s · 2 w"),
        (44, "7/1,000 · loss 0.5000"),
    ],
)
def test_what_the_step_returns_stands_beside_the_bar_as_far_as_there_is_room(columns: int, shown: str) -> None:
    metrics = {"accuracy": 0.9712, "f1": 0.5, "recall": 1.5e-5, "a fourth": 1.0}
    text = Shown(terminal=True, columns=columns, color=False)(START, step(7, metrics=metrics))
    assert shown.removeprefix("step ") in text
    assert max(len(line.rstrip()) for line in text.rpartition("\n")[2].split("\r")) < columns
    assert "a fourth" not in text


def test_off_a_terminal_and_in_verbose_mode_they_are_in_the_line() -> None:
    metrics = {"accuracy": 0.9712, "bad\x1b[2J": float("nan")}
    assert "loss 0.5000 · accuracy 0.9712 · bad\N{REPLACEMENT CHARACTER}[2J nan · - samples/s" in Shown()(
        START, step(7, metrics=metrics)
    )
    assert "step 7  loss 0.5000  accuracy 0.9712  bad" in Shown(mode="verbose")(START, step(7, metrics=metrics))


def test_a_metric_with_the_name_of_a_number_of_the_runs_own_is_told_apart():
    metrics = {"loss": 123.0, "step": 2.0}
    told = Shown(terminal=True, columns=160, color=False)(START, step(7, metrics=metrics))
    assert "loss 0.5000 · metric loss 123.0000 · metric step 2.0000" in told
    told = Shown(mode="verbose")(START, step(7, metrics=metrics))
    assert "step 7  loss 0.5000  metric loss 123.0000  metric step 2.0000  lr" in told
    told = Shown()(START, replace(FINISHED, metrics={"loss": 0.25}))
    assert "\n  metric loss  0.2500\n" in told


def test_the_best_evaluation_is_said_at_once_and_at_the_end() -> None:
    shown = Shown()
    shown(START)
    best = Evaluated(step=5, metrics={"acc": 0.5}, seconds=1.2, best=True)
    assert shown(best) == "* step 5 evaluated: acc 0.5000 (1.2 s) · the best so far\n"
    kept = Best(metric="acc", value=0.5, step=5, path="runs/digits/best.safetensors")
    ended = shown(replace(FINISHED, best=kept))
    assert "  best       acc 0.5000 at step 5 · runs/digits/best.safetensors\n" in ended


@pytest.mark.parametrize(
    ("leaf_s", "a_step", "told"),
    [(0.0004, 16, True), (0.004, 4, True), (0.006, 16, False), (0.0004, 3, False), (0.0004, 0, False)],
)
def test_leaves_that_are_short_and_many_are_said_with_what_fewer_may_gain(
    leaf_s: float, a_step: int, told: bool
) -> None:
    shares = tuple(
        replace(share, leaves=500 * a_step, compute_s=500 * a_step * leaf_s) for share in FINISHED.shares[:2]
    )
    text = Shown()(START, replace(FINISHED, shares=shares))
    line = (
        f"leaves     {'400 µs' if leaf_s < 0.001 else '4 ms'} each, {a_step} a step · fewer may be up to {a_step / 2}"
    )
    assert (line in text) == told, text
    assert ("w5xde tune" in text) == told


@pytest.mark.parametrize(("workers", "a_step", "told"), [(1, 2, True), (1, 1, False), (2, 2, False)])
@pytest.mark.parametrize("own", [False, True])
def test_whoever_has_one_worker_hears_that_nobody_shares_its_leaves(
    workers: int, a_step: int, own: bool, told: bool
) -> None:
    """The coordinator, which computes in its place, is none."""
    shares = [replace(FINISHED.shares[0], name=f"w{n}", leaves=300 * a_step, compute_s=9.0) for n in range(workers)]
    if own:
        shares.append(replace(shares[0], name="coordinator", leaves=200 * a_step))
    text = Shown()(START, replace(FINISHED, step=300 * workers + 200 * own, shares=tuple(shares)))
    assert (f"{a_step} a step · one worker alone may be faster with one: w5xde tune" in text) == told, text


def test_a_failed_run_shows_the_cause_then_the_users_own_lines() -> None:
    told = (
        "the update after step 3 raised ValueError: mine (train.py:25)\nTraceback (most recent call last):\n"
        '  File "/x/site-packages/torch/optim/optimizer.py", line 530, in wrapper\n    out = func()\n'
        '  File "/home/me/train.py", line 25, in step\n    raise ValueError("mine")\nValueError: mine\n'
    )
    failed = replace(FINISHED, outcome="failed", reason=told)
    text = Shown()(START, failed)
    cause = text.index("failed: the update after step 3 raised ValueError: mine (train.py:25)\n")
    assert cause < text.index("Traceback") < text.index('File "/home/me/train.py"')
    assert "optimizer.py" not in text
    assert "--log verbose" in text
    assert "optimizer.py" in Shown(mode="verbose")(START, failed)


def test_what_is_told_at_the_end_may_find_nobody() -> None:
    """A terminal that was hung up: the run's end is not another for it."""

    class HungUp(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    progress = Progress(ProgressConfig(), stream=HungUp())
    progress.tell("To go on from here:", "python -m w5xde_async.coordinator")


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.9996, "1 s"), (0.9994, "999 ms"), (0.0009996, "1 ms"), (999.4, "999 s"), (999.6, "16:40"), (1234.0, "20:34"),
        (0.0, "0 s"),
    ],
)  # fmt: skip
def test_a_time_is_rounded_before_its_unit_is_chosen(seconds: float, told: str) -> None:
    assert wording.brief(seconds) == told


def test_numbers_of_any_size_have_three_figures() -> None:
    assert [wording.size(value) for value in (999.6, 1.2e15, 9.99e17)] == ["1 kB", "1.2 PB", "999 PB"]
    assert wording.short(1.2e15) == "1.2P"
    assert [wording.duration(value) for value in (9.94, 9.96)] == ["9.9 s", "0:10"]


def test_one_of_them_is_no_plural() -> None:
    text = Shown()(START, replace(FINISHED, leaves=990, leaves_in_vain=10, leases_stale=1, short_steps=1))
    assert "1 late lease, 0 backed up\n" in text
    assert "short      1 step · computed" in text


def test_a_bar_shows_all_only_when_all_is_done() -> None:
    shown = Shown(terminal=True, color=False)
    shown(START)
    assert " 99% |" in shown(step(999))
    shown.clock.now += 1
    assert "100% |" in shown(step(1000))


@pytest.mark.parametrize("columns", [60, 70, 80, 100])
def test_names_that_are_wide_on_a_terminal_cut_no_number(columns: int) -> None:
    for count in range(1, 24):
        shown = Shown(terminal=True, columns=columns, color=False)
        line = shown(START, step(1, metrics={"精" * count: 98765.4321})).rpartition("\r")[2]
        assert "精 9" not in line or "精 98765.4321" in line
        assert disp_len(line) < columns


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals here")
def test_a_terminal_that_says_it_has_no_rows_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh pseudo-terminal, as docker and ssh -t give one, and a script's stderr is that."""
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        progress = Progress(ProgressConfig(color=False))
        for event in (START, step(1)):
            progress(event)
        assert writer_for(terminal).flush()
        shown = b""
        while b"1/1,000 \xc2\xb7 loss 0.5000" not in shown:  # a read gives what the kernel has passed on by then
            assert select.select([master], [], [], 10)[0], shown
            shown += os.read(master, 1 << 16)
        progress.close()
        assert writer_for(terminal).flush()
    os.close(master)


def test_lines_that_are_left_out_are_told_of_in_json_too() -> None:
    writer = Shown(log_format="json").progress._screen.writer
    told = json.loads(writer.left_out(2, "why"))
    assert (told["event"], told["level"], told["message"]) == ("log", "warning", "2 lines left out: why")
