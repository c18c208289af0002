"""The dashboard: what it makes of events, who may look, what a slow viewer costs, and the server on a real socket."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.events import FINISHED, STARTED, committed, joined, left, reported, run_reported

from w5xde_async.net.tls import own_certificate, server_context
from w5xde_async.telemetry.dashboard import server
from w5xde_async.telemetry.dashboard.connections import Idle
from w5xde_async.telemetry.dashboard.feed import Feed, sse
from w5xde_async.telemetry.dashboard.server import Dashboard
from w5xde_async.telemetry.dashboard.view import SERIES, LogHandler, View, recorded
from w5xde_async.telemetry.events import (
    Audited,
    CheckpointSaved,
    Evaluated,
    ResultHeld,
    Waiting,
    Warned,
    WorkerQuarantined,
)
from w5xde_async.telemetry.metrics import Metrics
from w5xde_async.telemetry.records import to_line, to_record


class Wall:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def view_of(*events: Any) -> tuple[View, Wall]:
    wall = Wall()
    view = View({"coordinator": {"port": 5555}}, wall=wall, clock=wall)
    for event in events:
        view(event)
    return view, wall


# -- the view


def test_steps_between_two_updates_are_one_row():
    view, wall = view_of(STARTED)
    wall.now += 0.5
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        view(committed(step, loss=loss))
    update = view.update()
    assert update is not None
    (row,) = update["series"]
    assert dict(zip(SERIES, row, strict=True)) == {
        "step": 3, "time": 1000.5, "loss": 2.0, "loss_low": 1.0, "loss_high": 3.0,
        "samples_per_s": pytest.approx(100.0), "num_workers": 1, "stale_share": None,
    }  # fmt: skip
    assert update["status"]["state"] == "running"
    assert view.snapshot()["series"]["rows"] == [row]
    assert view.update() is None  # nothing new


def rows_of(view: View) -> list[Any]:
    series: Any = view.snapshot()["series"]
    return list(series["rows"])


def status_of(view: View) -> Any:
    return view.snapshot()["status"]


@pytest.mark.parametrize("seconds", [0.3, 5.0, 60.0])
def test_the_throughput_of_long_steps_is_not_that_of_the_rows(seconds: float):
    view, wall = view_of(STARTED)
    for tick in range(1, 600):
        wall.now += 0.5
        if int(tick * 0.5 / seconds) > int((tick - 1) * 0.5 / seconds):
            view(committed(tick, samples=100, seconds=seconds))
        view.update()
    rates = [row[5] for row in rows_of(view)]
    assert rates == pytest.approx([100 / seconds] * len(rates))
    assert len(rates) >= 4
    assert status_of(view)["step_s"] == pytest.approx(seconds)
    assert status_of(view)["samples_per_s"] == pytest.approx(100 / seconds)


def test_a_stall_is_seen():
    """After ten seconds, or three times as long as a step takes: not before."""
    for seconds, patience in ((0.1, 10), (5.0, 15)):
        view, wall = view_of(STARTED, committed(1, seconds=seconds))
        view.update()
        for _ in range(patience - 1):
            wall.now += 1
            assert view.update() is None
        wall.now += 1
        update: Any = view.update()
        assert update["series"][0][5] == update["status"]["samples_per_s"] == 0.0
        assert update["series"][0][2] is None  # no loss
        assert view.update() is None  # once a second


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_hides_no_stall_and_makes_none(jump_s: float):
    wall, clock = Wall(), Wall()
    view = View(wall=wall, clock=clock)
    view(committed(1))
    view.update()
    wall.now += jump_s
    for _ in range(9):
        clock.now += 1
        assert view.update() is None
    clock.now += 1
    update: Any = view.update()
    assert update["series"][0][5] == 0.0
    assert update["series"][0][1] == wall.now


async def test_looking_changes_nothing_that_is_seen():
    """A viewer comes and a program asks a few milliseconds after a step: neither makes a row."""
    view, wall = view_of(STARTED)
    async with shown(view) as dashboard:
        wall.now += 0.5
        view(committed(1, loss=3.0))
        wall.now += 0.001
        watching = dashboard.feed.watch()
        _, snapshot = parsed(await anext(watching))
        assert (snapshot["status"]["step"], snapshot["status"]["state"]) == (1, "running")  # it is up to date
        assert json.loads((await ask(dashboard, "/api/v1/status"))[2])["step"] == 1
        assert rows_of(view) == []
        view(committed(2, loss=1.0))
        dashboard.feed.flush()
        (row,) = rows_of(view)
        assert (row[0], row[2], row[5]) == (2, 2.0, pytest.approx(100.0))
        await watching.aclose()


def test_time_in_which_nothing_could_be_computed_has_no_part_in_what_is_left():
    view, wall = view_of(replace(STARTED, total_steps=1000), Waiting(reason="0 of 1 workers"))
    wall.now += 36_000.0
    for step in range(1, 101):
        wall.now += 0.6
        view(committed(step, seconds=0.6))
        view.update()
    assert view.snapshot()["status"]["eta_s"] == pytest.approx(540.0)
    view(committed(101, seconds=0.6))
    view(Waiting(reason="0 of 1 workers"))
    view.update()
    assert view.snapshot()["status"]["eta_s"] is None
    wall.now += 36_000.0
    for step in (102, 103):
        wall.now += 0.6
        view(committed(step, seconds=0.6))
        view.update()
    assert view.snapshot()["status"]["eta_s"] == pytest.approx(538.2)
    view(FINISHED)
    assert view.snapshot()["status"]["eta_s"] is None


def test_a_run_without_an_end_has_nothing_left():
    view, wall = view_of(replace(STARTED, total_steps=0))
    for step in (1, 2, 3):
        wall.now += 1.0
        view(committed(step))
        view.update()
    assert "eta_s" not in view.snapshot()["status"]


def test_waiting_after_a_step_is_waiting():
    view, _ = view_of(STARTED, committed(1), Waiting(reason="no workers"))
    view.update()
    assert (status_of(view)["state"], status_of(view)["waits_for"]) == ("waiting", "no workers")
    view(committed(2))
    assert status_of(view)["state"] == "running"
    view(FINISHED)
    assert (status_of(view)["state"], status_of(view)["waits_for"]) == ("finished", "")  # for nothing any more


def test_who_fails_while_it_joins_is_forgotten():
    """Restarted again and again it leaves one row, until the next look."""
    view, _ = view_of(STARTED, joined("member"))
    for number in range(50):
        view(reported("member", number + 1.0))
        view(reported(f"try-{number}", 1.0, state="joining"))
        view(run_reported())
        assert [worker["worker_id"] for worker in view.workers()] == ["member", f"try-{number}"]
    view(joined("try-49"))
    view(run_reported())
    assert len(view.workers()) == 2  # it is a member
    view(reported("late", 1.0, state="joining"))
    view(run_reported())
    view.update()
    view(run_reported())
    update = view.update()
    assert update is not None
    assert update["removed"] == ["late"]


def test_what_is_not_a_number_reaches_the_page_as_text():
    view, wall = view_of(STARTED)
    wall.now += 1
    view(committed(1, loss=float("nan"), gradient_norm=float("inf")))
    text = json.dumps(view.update(), allow_nan=False)
    assert '"nan"' in text
    assert '"inf"' in text


def test_no_secret_is_shown():
    view, _ = view_of(STARTED, joined("a"))
    text = json.dumps(view.snapshot(), default=str)
    assert "hush" not in text
    assert "secret command" not in text


def test_a_worker_that_comes_back_takes_its_row():
    view, _ = view_of(STARTED, joined("a"), reported("a", 1.0), left("a"))
    assert view.workers()[0]["state"] == "lost"
    assert view.workers()[0]["waits_for"] == "killed"
    view.update()
    view(joined("b", name="name-a"))  # another process of the same name
    assert [worker["worker_id"] for worker in view.workers()] == ["b"]
    update = view.update()
    assert update is not None
    assert update["removed"] == ["a"]


def test_workers_that_are_gone_are_forgotten_in_the_end():
    view, _ = view_of(STARTED)
    for n in range(100):
        view(joined(str(n)))
        view(left(str(n)))
    assert len(view.workers()) <= 32


def test_the_timeline_shows_all_computing_and_no_more():
    """A lease of 3 s is told when it is done; what was shown meanwhile is not shown again."""
    view, wall = view_of(STARTED, joined("a"))
    told = [(1.0, 0.0, ""), (2.0, 0.0, ""), (3.0, 3.0, ""), (4.0, 3.0, "step 2: b computes"), (5.0, 3.5, "")]
    for member_s, compute_s, waits_for in told:
        wall.now += 1
        view(reported("a", member_s, compute_s=compute_s, waits_for=waits_for))
    rows = view.snapshot()["timelines"]["rows"]["a"]
    assert [row[1] for row in rows] == [1.0, 1.0, 1.0, 0.0, 0.5]
    assert sum(row[1] for row in rows) == 3.5


def test_pages_have_what_happened():
    view, _ = view_of(
        STARTED, Waiting(reason="0 of 2 workers"), Evaluated(step=5, metrics={"accuracy": 0.9}, seconds=0.1),
        CheckpointSaved(step=5, path="p", nbytes=10, pause_s=0.1, seconds=0.2), Warned(text="look\x1b[31m here"),
        run_reported(leaves_in_vain=3), ResultHeld(worker_id="a", name="anna", step=4, why="norm"),
        Audited(
            step=4, worker_id="a", second_id="b", why="norm", agreed=False, same_bits=False, relative=2.0
        ),
        WorkerQuarantined(worker_id="a", name="anna", reason="its block was wrong", put_out=True),
    )  # fmt: skip
    shown = view.snapshot()
    assert shown["status"]["state"] == "waiting"
    assert shown["status"]["waits_for"] == "0 of 2 workers"
    assert shown["status"]["leaves_in_vain"] == 3
    assert shown["evaluations"][0]["metrics"] == {"accuracy": 0.9}
    assert shown["checkpoints"][0]["nbytes"] == 10
    assert shown["settings"] == {"coordinator": {"port": 5555}}
    assert [line["level"] for line in shown["logs"] if "look" in line["text"]] == ["warning"]
    assert [shown["status"][key] for key in ("results_held", "audits_disagreed", "workers_quarantined")] == [1, 1, 1]
    assert "anna computes wrongly: its block was wrong" in [line["text"] for line in shown["logs"]]
    assert not any("\x1b" in line["text"] for line in shown["logs"])
    view(FINISHED)
    assert view.snapshot()["finished"]["outcome"] == "finished"


def test_log_records_reach_the_page():
    view, _ = view_of(STARTED)
    logger = logging.getLogger("w5xde_async.test_dashboard")
    handler = LogHandler(view, lambda call, *arguments: call(*arguments))
    logger.addHandler(handler)
    try:
        logger.warning("peer gone name=%s", "x")
    finally:
        logger.removeHandler(handler)
    assert view.snapshot()["logs"][-1]["text"] == "peer gone name=x"


def test_a_resumed_run_shows_what_was_before(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"time": 100.0 + n, **to_record(committed(n, loss=float("nan") if n == 2 else n, seconds=0.5))}
        for n in range(1, 9)
    ]
    path.write_text("".join(map(to_line, lines)) + '{"event": "step_comm')
    rows: list[Any] = list(recorded(path, 5))
    assert [row[0] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[0] == (1, 101.0, 1, 1, 1, 20.0, 1, None)
    assert rows[1][2] is None  # nan
    assert [row[0] for row in recorded(path, 9, most_bytes=len(to_line(lines[-1])) + 30)] == [8]
    assert list(recorded(tmp_path / "absent", 5)) == []
    view, wall = view_of()
    view.recall(rows)
    view(replace(STARTED, resumed_step=5))
    wall.now += 1
    view(committed(6))
    view.update()
    assert [row[0] for row in view.snapshot()["series"]["rows"]] == [1, 2, 3, 4, 5, 6]


def test_a_resumed_run_shows_its_evaluations_too(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    told = [
        Evaluated(step=2, metrics={"val_loss": 1.0, "f1": float("nan")}, seconds=0.5, best=True),
        Evaluated(step=4, metrics={"val_loss": 2.0}, seconds=0.5),
        Evaluated(step=6, metrics={"val_loss": 3.0}, seconds=0.5),
    ]
    strange = [{"event": "evaluated", "step": 3}, {"event": "evaluated", "step": 3, "metrics": 1, "seconds": 1}]
    old = {"event": "evaluated", "step": 3, "metrics": {"f1": "inf"}, "seconds": 1}  # without best
    path.write_text("".join(map(to_line, [*map(to_record, told), *strange, old, {"event": "evaluated", "step": "x"}])))
    view, _ = view_of()
    view.recall(recorded(path, 5))
    view(replace(STARTED, resumed_step=5))
    assert view.snapshot()["evaluations"] == [
        {"step": 2, "metrics": {"val_loss": 1.0, "f1": "nan"}, "seconds": 0.5, "best": True},
        {"step": 4, "metrics": {"val_loss": 2.0}, "seconds": 0.5, "best": False},
        {"step": 3, "metrics": {"f1": "inf"}, "seconds": 1, "best": False},
    ]
    view(committed(6, metrics={"accuracy": 0.5}))
    assert status_of(view)["metrics"] == {"accuracy": 0.5}


# -- the feed


def parsed(data: bytes) -> tuple[str, Any]:
    lines = dict(line.split(": ", 1) for line in data.decode().strip().splitlines() if ": " in line)
    return lines["event"], json.loads(lines["data"])


async def test_a_late_viewer_misses_nothing_and_gets_nothing_twice():
    view, wall = view_of(STARTED)
    feed = Feed(view)
    wall.now += 1
    view(committed(1))
    watching = feed.watch()
    kind, snapshot = parsed(await anext(watching))
    assert kind == "snapshot"
    assert snapshot["series"]["rows"] == []
    feed.flush()
    assert [row[0] for row in parsed(await anext(watching))[1]["series"]] == [1]
    wall.now += 1
    view(committed(2))
    feed.flush()
    kind, update = parsed(await anext(watching))
    assert (kind, [row[0] for row in update["series"]]) == ("update", [2])
    feed.close()
    with pytest.raises(StopAsyncIteration):
        await anext(watching)
    assert feed.num_viewers == 0


async def test_a_slow_viewer_gets_a_snapshot_in_place_of_what_it_missed():
    view, wall = view_of(STARTED)
    feed = Feed(view)
    watching = feed.watch()
    await anext(watching)
    for step in range(1, 50):
        wall.now += 1
        view(committed(step))
        feed.flush()
    assert feed.dropped > 30
    kinds = []
    steps: list[int] = []
    while not steps or steps[-1] < 49:
        kind, data = parsed(await anext(watching))
        rows = data["series"]["rows"] if kind == "snapshot" else data["series"]
        steps = [row[0] for row in rows] if kind == "snapshot" else steps + [row[0] for row in rows]
        kinds.append(kind)
    assert "snapshot" in kinds
    assert steps == list(range(1, 50))  # whole again, in order, without a gap
    await watching.aclose()


async def test_who_comes_while_a_snapshot_is_not_made_yet_shares_it_and_has_nothing_twice():
    """Of two thousand workers it takes more than a second of the run's event loop."""
    view, wall = view_of(STARTED)
    asked: list[Any] = []
    feed = Feed(view, soon=asked.append)
    watching = [feed.watch() for _ in range(3)]
    coming = [asyncio.create_task(anext(one)) for one in watching]
    while len(asked) < 3:  # noqa: ASYNC110 - tasks that begin
        await asyncio.sleep(0)
    for step in (1, 2):
        wall.now += 1
        view(committed(step))
        feed.flush()
    assert not any(task.done() for task in coming)
    assert feed.num_viewers == 3
    asked[0]()
    first, *others = await asyncio.gather(*coming)
    assert all(other is first or other == first for other in others)
    assert [row[0] for row in parsed(first)[1]["series"]["rows"]] == [1, 2]
    wall.now += 1
    view(committed(3))
    feed.flush()
    asked[1]()  # nobody lacks one any more
    for one in watching:
        kind, update = parsed(await anext(one))
        assert (kind, [row[0] for row in update["series"]]) == ("update", [3])
        await one.aclose()
    late = feed.watch()
    coming = [asyncio.create_task(anext(late))]
    while len(asked) < 4:  # noqa: ASYNC110
        await asyncio.sleep(0)
    view(FINISHED)
    feed.close()  # whose turn does not come any more
    assert parsed(await coming[0])[1]["status"]["state"] == "finished"
    assert [data async for data in late] == []


async def test_who_comes_to_a_snapshot_that_cannot_be_made_is_let_go(monkeypatch: pytest.MonkeyPatch):
    view, _ = view_of(STARTED)
    asked: list[Any] = []
    feed = Feed(view, soon=asked.append)
    watching = feed.watch()
    coming = asyncio.create_task(anext(watching))
    while not asked:  # noqa: ASYNC110
        await asyncio.sleep(0)
    monkeypatch.setattr(view, "snapshot", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asked[0]()
    with pytest.raises(StopAsyncIteration):
        await coming
    assert feed.num_viewers == 0


@pytest.mark.parametrize("behind", [1, 7, 20])
async def test_the_last_update_reaches_who_is_behind(behind: int):
    view, _ = view_of(STARTED)
    feed = Feed(view)
    watching = feed.watch()
    await anext(watching)
    for number in range(behind):
        view(joined(str(number)))
        feed.flush()
    view(FINISHED)
    feed.close()
    told = [parsed(data)[1] async for data in watching]
    assert told[-1]["status"]["state"] == "finished"
    workers = {worker["worker_id"] for update in told for worker in update.get("workers", ())}
    assert workers == set(map(str, range(behind)))
    assert [kind async for kind in feed.watch()][1:] == []  # who comes now is not kept waiting
    assert feed.num_viewers == 0


async def test_only_so_many_viewers():
    view, _ = view_of(STARTED)
    feed = Feed(view, max_viewers=1)
    watching = feed.watch()
    assert not feed.full
    await anext(watching)
    assert feed.full
    assert [data async for data in feed.watch()] == [b"retry: 1000\n\n"]  # was let in at the same time, came later
    assert feed.num_viewers == 1
    await watching.aclose()
    assert not feed.full


# -- the server


@asynccontextmanager
async def served(token: str = "", *events: Any) -> AsyncIterator[tuple[Dashboard, View]]:
    view, _ = view_of(STARTED, *events)
    async with shown(view, token) as dashboard:
        yield dashboard, view


@asynccontextmanager
async def shown(view: View, token: str = "") -> AsyncIterator[Dashboard]:
    dashboard = Dashboard(view, Metrics(), host="127.0.0.1", port=0, token=token)
    await dashboard.start()
    try:
        yield dashboard
    finally:
        await dashboard.aclose()
        await dashboard.aclose()


async def ask(
    dashboard: Dashboard, path: str, *, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", dashboard.port)
    try:
        sent = {"host": f"127.0.0.1:{dashboard.port}", "connection": "close"} | headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        first, *rest = head.split("\r\n")
        found = {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
        return int(first.split()[1]), found, body
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.both_loops
async def test_pages_and_data():
    async with served("", joined("a")) as (dashboard, _):
        status, headers, body = await ask(dashboard, "/")
        assert status == 200
        assert "<title>" in body
        assert "default-src 'none'" in headers["content-security-policy"]
        for name in ("app.js", "charts.js", "format.js", "style.css", "uPlot.iife.min.js", "uPlot.LICENSE.txt"):
            assert (await ask(dashboard, f"/static/{name}"))[0] == 200, name
        assert (await ask(dashboard, "/static/..%2fserver.py"))[0] == 404
        assert json.loads((await ask(dashboard, "/health"))[2]) == {"status": "ok"}
        assert json.loads((await ask(dashboard, "/api/v1/workers"))[2])[0]["name"] == "name-a"
        assert json.loads((await ask(dashboard, "/api/v1/snapshot"))[2])["run"]["run_name"] == "digits"
        assert (await ask(dashboard, "/api/v1/secrets"))[0] == 404
        assert "w5xde_steps_total" in (await ask(dashboard, "/metrics"))[2]


@pytest.mark.both_loops
async def test_who_asks_for_what_takes_long_to_make_before_it_is_begun_shares_it(monkeypatch: pytest.MonkeyPatch):
    """Thousands at once would else hold up the run, and ``/health``, for many seconds."""
    made = 0
    async with served("", joined("a")) as (dashboard, view):
        snapshot = view.snapshot

        def noted() -> Any:
            nonlocal made
            made += 1
            until = time.monotonic() + 0.02
            while time.monotonic() < until:
                pass
            return snapshot()

        monkeypatch.setattr(view, "snapshot", noted)
        began = time.monotonic()
        asked = [asyncio.create_task(ask(dashboard, "/api/v1/snapshot")) for _ in range(60)]
        assert (await ask(dashboard, "/health"))[0] == 200
        answers = await asyncio.gather(*asked)
        took_s = time.monotonic() - began
        assert {status for status, _, _ in answers} == {200}
        assert len({body for _, _, body in answers}) <= made <= 1 + took_s / (0.02 * server._REST)
        before = made
        assert "name-b" not in (await ask(dashboard, "/api/v1/workers"))[2]
        view(joined("b"))  # what is answered is never older than the question
        assert "name-b" in (await ask(dashboard, "/api/v1/workers"))[2]
        assert made == before + 2


@pytest.mark.both_loops
async def test_viewers_get_their_snapshot_when_its_turn_has_come_or_at_the_end(monkeypatch: pytest.MonkeyPatch):
    async with served("", joined("a")) as (dashboard, view):
        snapshot, made = view.snapshot, list[Any]()

        def noted() -> Any:
            made.append(snapshot())
            return made[-1]

        monkeypatch.setattr(view, "snapshot", noted)
        dashboard._rests_until = asyncio.get_running_loop().time() + 60
        coming = [await asyncio.open_connection("127.0.0.1", dashboard.port) for _ in range(5)]
        for _, writer in coming:
            writer.write(f"GET /events HTTP/1.1\r\nhost: 127.0.0.1:{dashboard.port}\r\n\r\n".encode())
        while dashboard.feed.num_viewers < 5:
            assert (await ask(dashboard, "/health"))[0] == 200
        assert made == []
    for reader, writer in coming:
        await reader.readuntil(b"event: snapshot")
        writer.transport.abort()
    assert len(made) == 1


@pytest.mark.both_loops
async def test_an_answer_that_cannot_be_made_is_an_error_for_who_asked_alone(monkeypatch: pytest.MonkeyPatch):
    async with served("", joined("a")) as (dashboard, view):
        monkeypatch.setattr(view, "snapshot", lambda: 1 / 0)
        answers = await asyncio.gather(*[ask(dashboard, "/api/v1/run") for _ in range(3)])
        assert [status for status, _, _ in answers] == [500, 500, 500]
        monkeypatch.undo()
        assert (await ask(dashboard, "/api/v1/run"))[0] == 200


@pytest.mark.both_loops
async def test_it_closes_while_somebody_waits_for_an_answer():
    async with served("", joined("a")) as (dashboard, _):
        dashboard._rests_until = asyncio.get_running_loop().time() + 60
        waiting = asyncio.create_task(ask(dashboard, "/metrics"))
        while not dashboard._making:  # noqa: ASYNC110 - a request tells nobody that it waits
            await asyncio.sleep(0)
    await asyncio.gather(waiting, return_exceptions=True)
    assert not dashboard._making or all(task.done() for task in dashboard._making.values())


async def test_nothing_can_be_changed():
    async with served() as (dashboard, _):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await ask(dashboard, "/api/v1/status", method=method))[0] == 405


async def test_another_name_for_this_machine_is_turned_away():
    """DNS rebinding: a page elsewhere has its own name point at 127.0.0.1."""
    async with served() as (dashboard, _):
        for host in ("evil.example:80", f"127.0.0.1:{dashboard.port}.evil.example", "[::1]evil", "[::1]:80.evil", ""):
            assert (await ask(dashboard, "/api/v1/status", host=host))[0] == 403
        for host in ("localhost", "LOCALHOST:1", "[::1]:5556", "[::1]", "127.0.0.1", "127.0.0.1:"):
            assert (await ask(dashboard, "/api/v1/status", host=host))[0] == 200


async def test_the_token_opens_and_leaves_the_address_bar(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    async with served("hush-hush") as (dashboard, _):
        assert dashboard.link.endswith("/?token=hush-hush")
        assert "hush" not in dashboard.address
        for path in ("/", "/api/v1/status", "/metrics", "/events", "/static/app.js", "/?token=", "/?token=wrong"):
            assert (await ask(dashboard, path))[0] == 401, path
        assert (await ask(dashboard, "/health"))[0] == 200
        status, headers, _ = await ask(dashboard, "/?token=hush-hush&x=1&sha256=ab")
        assert (status, headers["location"]) == (303, "/?x=1")
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=lax" in cookie.lower()
        assert (await ask(dashboard, "/api/v1/status", cookie=cookie.partition(";")[0]))[0] == 200
        assert (await ask(dashboard, "/api/v1/status", cookie="w5xde_1=hush-hush"))[0] == 401
        assert (await ask(dashboard, "/metrics", authorization="Bearer hush-hush"))[0] == 200
        assert (await ask(dashboard, "/metrics", authorization="Bearer hush"))[0] == 401
    assert "hush" not in caplog.text


async def test_events_live_and_the_end():
    async with served() as (dashboard, view):
        reader, writer = await asyncio.open_connection("127.0.0.1", dashboard.port)
        writer.write(f"GET /events HTTP/1.1\r\nhost: 127.0.0.1:{dashboard.port}\r\n\r\n".encode())
        assert b"text/event-stream" in await reader.readuntil(b"\r\n\r\n")
        assert b"event: snapshot" in await reader.readuntil(b"event: snapshot")
        view(joined("late"))
        dashboard.feed.flush()
        assert await reader.readuntil(b"name-late")
        view(FINISHED)
        await dashboard.aclose()
        assert b'"outcome":"finished"' in await reader.read()  # a last update, then the end
        writer.close()
        await writer.wait_closed()


async def test_a_viewer_that_goes_is_forgotten():
    async with served() as (dashboard, view):
        _, writer = await asyncio.open_connection("127.0.0.1", dashboard.port)
        writer.write(f"GET /events HTTP/1.1\r\nhost: 127.0.0.1:{dashboard.port}\r\n\r\n".encode())
        while not dashboard.feed.num_viewers:
            await ask(dashboard, "/health")
        writer.close()
        await writer.wait_closed()
        number = 0
        while dashboard.feed.num_viewers:
            view(joined(str(number := number + 1)))
            dashboard.feed.flush()
            await ask(dashboard, "/health")


async def test_a_connection_that_says_nothing_is_closed():
    async with served("hush") as (dashboard, _):
        silent = [await asyncio.open_connection("127.0.0.1", dashboard.port) for _ in range(3)]
        kept = await asyncio.open_connection("127.0.0.1", dashboard.port)
        for reader, writer in (silent[2], kept):
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b"}")
        silent[2][1].write(b"GET /hea")  # the other is for uvicorn to close
        assert (await ask(dashboard, "/health"))[0] == 200
        now = asyncio.get_running_loop().time()
        dashboard.drop_idle(now)
        dashboard.drop_idle(now + 11.0)
        for reader, writer in silent[:2]:
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
        with suppress(ConnectionResetError):  # what it has sent was perhaps not read
            assert await silent[2][0].read() == b""
        silent[2][1].transport.abort()
        kept[1].write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await kept[0].readuntil(b"}")
        kept[1].transport.abort()
        assert (await ask(dashboard, "/health"))[0] == 200


@pytest.mark.both_loops
@pytest.mark.parametrize("token", ["", "hush"])
@pytest.mark.parametrize("asked", [b"", b"GET / HTTP/1.1\r\nhost: evil\r\n\r\n"], ids=["silent", "refused"])
async def test_connections_that_want_nothing_keep_nobody_out(token: str, asked: bytes, monkeypatch: pytest.MonkeyPatch):
    """Whoever reaches the port can open as many as he likes; /health is what Kubernetes ends a pod by."""
    monkeypatch.setattr("w5xde_async.telemetry.dashboard.connections.MOST_IDLE", 160)
    async with served(token) as (dashboard, _):
        reader, viewer = await asyncio.open_connection("127.0.0.1", dashboard.port)
        bearer = f"host: localhost\r\nauthorization: Bearer {token}\r\n\r\n"
        viewer.write(f"GET /events HTTP/1.1\r\n{bearer}".encode())
        await reader.readuntil(b"event: snapshot")
        idle = []
        for _ in range(200):
            one = await asyncio.open_connection("127.0.0.1", dashboard.port)
            one[1].write(asked)
            if asked:
                assert (await one[0].readuntil(b"\r\n\r\n")).split()[1] in (b"401", b"403")
            idle.append(one)
        assert (await ask(dashboard, "/health"))[0] == 200
        assert (await ask(dashboard, "/api/v1/status", authorization=f"Bearer {token}"))[0] == 200
        server = dashboard._server
        assert server is not None
        assert len(server.server_state.connections) <= 162
        await asyncio.wait_for(idle[0][0].read(), 20)  # the oldest had to go
        assert dashboard.feed.num_viewers == 1  # it has something under way
        for _, writer in (*idle, (reader, viewer)):
            writer.transport.abort()


def test_of_few_descriptors_the_run_keeps_most() -> None:
    """Else whoever reaches the port keeps checkpoints from being written."""
    resource = pytest.importorskip("resource", reason="Windows has no such limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        dashboard, idle = Dashboard(View(), Metrics(), host="127.0.0.1", port=0), Idle()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    class One:
        host, closed = "", False

        def abort(self) -> None:
            self.closed = True

    many = [One() for _ in range(40)]
    for one in many:
        idle.add(one)
    assert sum(one.closed for one in many) == 8
    assert not dashboard.feed.full
    viewers = [aiter(dashboard.feed.watch()) for _ in range(32)]

    async def look() -> None:
        for viewer in viewers:
            await anext(viewer)
        assert dashboard.feed.full
        for viewer in viewers:
            await viewer.aclose()

    asyncio.run(look())


@pytest.mark.both_loops
async def test_handshakes_that_nobody_goes_on_with_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not even TLS is needed to hold a descriptor of the coordinator's."""
    monkeypatch.setattr("w5xde_async.telemetry.dashboard.connections.MOST_IDLE", 20)
    files = await asyncio.get_running_loop().run_in_executor(None, own_certificate, tmp_path / "tls", "digits")
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    dashboard = Dashboard(View(), Metrics(), host="127.0.0.1", port=0, token="hush", ssl=server_context(files))
    await dashboard.start()
    mute = [await asyncio.open_connection("127.0.0.1", dashboard.port) for _ in range(60)]
    reader, writer = await asyncio.open_connection("127.0.0.1", dashboard.port, ssl=trusting)
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).split()[1] == b"200"
    for early, _ in mute[:40]:
        assert await asyncio.wait_for(early.read(), 20) == b""
    await dashboard.aclose()
    for late, other in (*mute, (reader, writer)):
        assert await asyncio.wait_for(late.read(), 20) == b""
        other.transport.abort()


async def test_what_is_no_request_writes_no_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Nobody needs a token for it; a fault of our own is still said."""
    caplog.set_level(logging.DEBUG)
    async with served() as (dashboard, view):
        upgrade = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close, upgrade\r\nupgrade: websocket\r\n\r\n"
        for sent, status in ((b"garbage\r\n\r\n", b"400"), (upgrade, b"200")):
            reader, writer = await asyncio.open_connection("127.0.0.1", dashboard.port)
            writer.write(sent)
            assert (await reader.read()).split()[1] == status
            writer.close()
            await writer.wait_closed()
        assert [record for record in caplog.records if record.levelno > logging.INFO] == []
        monkeypatch.setattr(view, "snapshot", lambda: 1 / 0)
        assert (await ask(dashboard, "/api/v1/status"))[0] == 500
        assert "ZeroDivisionError" in caplog.text


async def test_under_any_load_health_is_answered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("w5xde_async.telemetry.dashboard.server._MOST_REQUESTS", 4)
    async with served() as (dashboard, _):
        viewers = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", dashboard.port)
            writer.write(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b"event: snapshot")
            viewers.append(writer)
        assert (await ask(dashboard, "/api/v1/status"))[0] == 503
        assert (await ask(dashboard, "/health"))[0] == 200
        for writer in viewers:
            writer.transport.abort()


@pytest.mark.slow
async def test_viewers_that_read_nothing_cost_little_and_delay_nobody():
    """200 of them; one byte now and then is as good as none."""
    async with served() as (dashboard, view):
        loop = asyncio.get_running_loop()
        slow: list[socket.socket] = []
        for number in range(200):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            one.setblocking(False)
            await loop.sock_connect(one, ("127.0.0.1", dashboard.port))
            path = "/events" if number % 2 else "/api/v1/snapshot"
            await loop.sock_sendall(one, f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{dashboard.port}\r\n\r\n".encode())
            slow.append(one)
        while dashboard.feed.num_viewers < 100:
            await ask(dashboard, "/health")
        for number in range(40):
            view(joined(str(number) + 60_000 * "x"))
            dashboard.feed.flush()
            await ask(dashboard, "/health")
        server = dashboard._server
        assert server is not None
        waiting = [one.transport.get_write_buffer_size() for one in server.server_state.connections]
        assert any(waiting)
        assert max(waiting) < 1 << 23  # a snapshot, and what was on its way
        now = loop.time()
        dashboard.drop_idle(now)
        await loop.sock_recv(slow[1], 1)
        dashboard.drop_idle(now + 11.0)
        while dashboard.feed.num_viewers:
            await ask(dashboard, "/health")
        assert not any(one.transport.get_write_buffer_size() for one in server.server_state.connections)
        assert (await ask(dashboard, "/api/v1/snapshot"))[0] == 200
        for one in slow:
            one.close()


async def test_one_update_that_fails_does_not_end_the_feed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("w5xde_async.telemetry.dashboard.server._FLUSH_S", 0.001)
    async with served() as (dashboard, _):
        flush, calls = dashboard.feed.flush, asyncio.Queue[None]()

        def fails_once() -> None:
            calls.put_nowait(None)
            if calls.qsize() == 1:
                raise ValueError("no word for it")
            flush()

        monkeypatch.setattr(dashboard.feed, "flush", fails_once)
        while calls.qsize() < 3:
            await ask(dashboard, "/health")


async def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        dashboard = Dashboard(view_of(STARTED)[0], Metrics(), host="127.0.0.1", port=taken)
        await dashboard.start()
        assert dashboard.moved
        assert dashboard.port != taken
        assert (await ask(dashboard, "/health"))[0] == 200
        await dashboard.aclose()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_json_has_no_word_for_keeps_no_other_away(value: float):
    data = sse("update", {"a": [1.0, {"b": value}], "c": 2}, 1).decode()
    told = json.loads(data.partition("data: ")[2])
    assert told == {"a": [1.0, {"b": repr(value)}], "c": 2}
