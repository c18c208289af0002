"""What is reported of a run, from a real one on loopback; and that nothing is where nobody asked."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import threading
import tracemalloc
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.cluster import QUICK_WORKER, Commits, settings, train
from tests.support.events import committed, reported, run_reported
from tests.support.jobs import mlp_sgd
from tests.support.scripted import scripted, settle

from w5xde_async import status
from w5xde_async.compute.flops import counting_flops
from w5xde_async.coordinator.monitoring.outputs import Outputs
from w5xde_async.coordinator.monitoring.status_sampler import StatusSampler
from w5xde_async.coordinator.run.run import Run, RunEnvironment, RunHooks
from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.coordinator.sync.waiting import reason_to_wait
from w5xde_async.coordinator.training import Counts
from w5xde_async.errors import ExitCode
from w5xde_async.plan.ledger import Ledger
from w5xde_async.plan.membership import Member, Standing
from w5xde_async.plan.strategy_choice import Choice
from w5xde_async.runtime import Runtime
from w5xde_async.telemetry.dashboard.view import View
from w5xde_async.telemetry.events import (
    Bus,
    Event,
    MemoryUsed,
    RunFinished,
    RunReported,
    StepCommitted,
    Warned,
    WorkerReported,
)
from w5xde_async.telemetry.memory import MemoryReport, host_bytes
from w5xde_async.telemetry.metrics import Metrics
from w5xde_async.telemetry.progress import Progress, ProgressConfig
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.wire.messages import VerdictCode
from w5xde_async.worker.service import Worker


def test_samples_go_to_those_who_asked():
    bus = Bus()
    plain: list[Event] = []
    sampled: list[Event] = []
    bus.subscribe(plain.append)
    assert not bus.sampled
    leave = bus.subscribe(sampled.append, samples=True)
    assert bus.sampled
    for event in (committed(1), run_reported()):
        bus.publish(event)
    assert [type(event) for event in plain] == [StepCommitted]
    assert [type(event) for event in sampled] == [StepCommitted, RunReported]
    leave()
    leave()
    assert not bus.sampled
    assert bus.active


async def test_a_callback_that_raises_is_named_and_left_out(caplog: pytest.LogCaptureFixture):
    seen: list[Event] = []

    def broken(event: Event) -> None:
        seen.append(event)
        raise RuntimeError("no such column")

    async with Coordinator(mlp_sgd(), config=settings(max_steps=3), callbacks=[broken]) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=mlp_sgd(), config=QUICK_WORKER).run())
        result = await coordinator.wait()
        await worker
    assert result.outcome == "finished"
    assert len(seen) == 1
    assert any("removed after an error" in message for message in caplog.messages)


async def test_the_memory_of_each_process_is_recorded_though_nobody_takes_samples(tmp_path: Path):
    commits, found = Commits(), list[Event]()
    commits.bus.subscribe(found.append)
    config = settings(max_steps=100_000, heartbeat_s=0.05, silence_s=12.0)
    async with Coordinator(mlp_sgd(), run_dir=tmp_path / "run", config=config, bus=commits.bus) as coordinator:
        worker = Worker(coordinator.address, job=mlp_sgd(), config=QUICK_WORKER)
        working = asyncio.create_task(worker.run())
        while not any(isinstance(event, MemoryUsed) and event.worker_id for event in found):
            await commits.reach(commits.step + 1)
        training = coordinator._training
        assert training is not None
        sampler, clock = StatusSampler(training), training.context.clock()
        found.clear()
        for seconds in (0.0, 29.0, 31.0):
            sampler.tick(clock + seconds)
        assert [event.name for event in found if isinstance(event, MemoryUsed)] == 2 * ["coordinator", worker.name]
        worker.drain()
        await working
        coordinator.request_stop()
        await coordinator.wait()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    used = {record["worker_id"]: record for record in records if record["event"] == "memory_used"}
    assert {record["name"] for record in used.values()} == {"coordinator", worker.name}
    assert all(record["host_bytes"] > 10 << 20 for record in used.values())
    assert all(record["device_bytes"] == 0 for record in used.values())


async def test_a_worker_and_the_run_are_reported():
    commits = Commits()
    found: list[Any] = []
    commits.bus.subscribe(found.append, samples=True)
    config = settings(max_steps=10_000, heartbeat_s=0.05, silence_s=12.0)
    async with Coordinator(mlp_sgd(), config=config, bus=commits.bus) as coordinator:
        worker = Worker(coordinator.address, job=mlp_sgd(), config=QUICK_WORKER)
        working = asyncio.create_task(worker.run())
        await commits.reach(3)
        training = coordinator._training
        assert training is not None
        (session,) = training.roster.sessions.values()
        while session.report is None:
            await commits.reach(commits.step + 1)
        sampler = StatusSampler(training)
        found.clear()
        sampler.tick(training.context.clock() + 0.2)  # too early
        assert not [event for event in found if isinstance(event, WorkerReported)]
        sampler.tick(training.context.clock() + 1.0)
        (told,) = [event for event in found if isinstance(event, WorkerReported)]
        (run,) = [event for event in found if isinstance(event, RunReported)]
        worker.drain()
        await working
        coordinator.request_stop()
        result = await coordinator.wait()
    assert result.outcome == "stopped"
    assert told.state == "ready"
    assert told.leaves > 0
    assert told.share == 1.0
    assert told.bytes_received > told.bytes_sent / 100
    assert told.rtt_s is None or 0 < told.rtt_s < 1
    assert told.host_bytes > 10 << 20
    assert told.cpu_s > 0
    # Two multiplications of each weight forward; as many for the gradients of weights, and of hidden activations.
    assert told.flops_per_leaf > 0
    assert run.leaves == told.leaves
    assert run.host_bytes > 10 << 20
    assert run.num_workers == 1


@pytest.mark.parametrize("lease_s", [0.01, 0.7, 3.0, 8.0, 45.0])
async def test_the_speed_of_a_worker_is_that_of_its_leases_however_long(lease_s: float):
    found: list[Any] = []
    async with scripted() as run:
        run.training.context.bus.subscribe(found.append, samples=True)
        await run.worker("able")
        member = run.training.roster.membership.members["able"]
        sampler, began = StatusSampler(run.training), run.now
        for second in range(1, 600):
            member.computed = 4 * int(min(second, 300) / lease_s)  # idle from then on
            sampler.tick(began + second)
        speeds = [event.leaves_per_s for event in found if isinstance(event, WorkerReported)]
        assert min(speeds[int(2 * lease_s) + 1 : 300]) > 0.75 * 4 / lease_s
        assert max(speeds) < 1.25 * 4 / lease_s
        assert speeds[-1] == 0.0
        assert len(sampler._speeds) == 1
        assert len(sampler._speeds["able", member.incarnation]._seen) == 1


async def test_who_fails_while_it_joins_is_shown_no_longer():
    view, metrics = View(), Metrics()
    async with scripted() as run:
        for subscriber in (view, metrics):
            run.training.context.bus.subscribe(subscriber, samples=True)
        sampler = StatusSampler(run.training)
        await run.worker("member")
        for number in range(5):
            doomed = await run.worker(f"doomed-{number}", ready=False)
            run.now += 1.0
            sampler.tick(run.now)
            assert len(view.workers()) == 2
            doomed.link.abort()
            await settle()
            assert doomed.ended()
        run.now += 1.0
        sampler.tick(run.now)
    assert [worker["worker_id"] for worker in view.workers()] == ["member"]
    assert b"doomed" not in metrics.text()


def changed_to(rule: str) -> Choice:
    return Choice(
        update=rule, codec="raw", downlink="", inner_steps=50, fragments=1, delay=0, leases_ahead=2, utilization=1.0,
        reason="",
    )  # fmt: skip


async def test_another_rule_does_not_begin_the_counting_anew():
    """Under ``auto`` the run goes on as another training: what was counted and how long it runs go on too."""
    bus, found = Bus(), list[Any]()
    bus.subscribe(found.append, samples=True)
    config = settings()
    loop = asyncio.get_running_loop()
    prepared = await loop.run_in_executor(None, prepare, mlp_sgd(), config, None, lambda: "0" * 16)
    outputs = Outputs(config, bus, None)
    environment = RunEnvironment(name="test", reference="", bus=bus, runtime=Runtime())
    run = Run(prepared, config, environment, hooks=RunHooks(on_change=outputs.began))
    first = run.training
    outputs.began(first)
    now = first.context.clock()
    first.phase.leaves, first.phase.leaves_wasted = 40, 4  # type: ignore[union-attr]
    first.phase.refused[VerdictCode.STALE] = 3  # type: ignore[union-attr]
    try:
        await run._change(changed_to("local"))
        outputs.tick(now + 100.0)
        second = run.training
        assert second is not first
        assert second.phase.totals() == Counts(40, 4, 3, 0, 0, 0)
        await run._change(changed_to("async"))
        assert run.training.phase.totals() == second.phase.totals()  # once, not twice
    finally:
        await run.aclose()
        await outputs.aclose()
    (told,) = [event for event in found if isinstance(event, RunReported)]
    assert (told.leaves, told.leaves_in_vain, told.leases_stale) == (40, 4, 3)
    assert told.uptime_s == pytest.approx(100.0, abs=1.0)


def test_one_more_link_of_a_member_is_no_worker_that_joins(monkeypatch: pytest.MonkeyPatch):
    """Its report would take the place of the member's: counters would go back to nothing, and come again."""
    bus, found = Bus(), list[Any]()
    bus.subscribe(found.append, samples=True)
    known = SimpleNamespace(leaves=3, incarnation=1, joined_at=0.0, computed=3)
    roster = SimpleNamespace(
        membership=SimpleNamespace(members={"a": known}), sessions={"a": SimpleNamespace(worker_id="a")},
        joining=[SimpleNamespace(worker_id=worker) for worker in "ab"],
    )  # fmt: skip
    training: Any = SimpleNamespace(roster=roster, context=SimpleNamespace(bus=bus, clock=lambda: 0.0))
    sampler = StatusSampler(training)
    for name, state in (("_worker", "ready"), ("_joining", "joining")):
        told = lambda session, *_, state=state: reported(session.worker_id, 1.0, state=state)  # noqa: E731
        monkeypatch.setattr(sampler, name, told)
    monkeypatch.setattr(sampler, "_run", lambda now: run_reported())
    sampler.look(1.0)
    assert [(event.worker_id, event.state) for event in found[:-1]] == [("a", "ready"), ("b", "joining")]


def test_what_a_worker_that_joins_waits_for():
    """Its model, and before that, without the job's code, the program."""
    link = SimpleNamespace(peer="p", bytes_received=1, bytes_sent=2)
    one, other = (
        SimpleNamespace(worker_id=worker, name=worker, link=link, last_message="m", admitted_at=0.0) for worker in "ab"
    )
    roster = SimpleNamespace(programs=SimpleNamespace(awaited_by=[other]))
    training: Any = SimpleNamespace(roster=roster, context=SimpleNamespace(bus=Bus(), clock=lambda: 0.0))
    sampler = StatusSampler(training)
    told = [sampler._joining(session, 3.0).waits_for for session in (one, other)]  # type: ignore[arg-type]
    assert told == ["its model to be built", "the step to be made a program (--job needs none)"]


def test_why_a_worker_waits():
    """One step of four leaves, from before the first lease to the update; a and b are here."""
    ledger = Ledger()

    def session(worker: str) -> Any:
        return SimpleNamespace(worker_id=worker, name=f"name-{worker}", receiving=None, lease_bytes=0)

    sessions = {worker: session(worker) for worker in "ab"}
    training: Any = SimpleNamespace(
        ledger=ledger, roster=SimpleNamespace(sessions=sessions), phase=SimpleNamespace(begun=False, min_workers=2),
        context=SimpleNamespace(config=settings(min_workers=2, credit_bytes=10)),
        scheduler=SimpleNamespace(unread=set()), computes_here=False, takes_place_of=lambda session: False,
        version=0, total_steps=2,
    )  # fmt: skip
    member = Member(
        worker_id="a", name="name-a", peer="p", device="cpu", threads=1, incarnation=1, joined_at=0.0, last_seen=0.0
    )

    def reason() -> str:
        return reason_to_wait(training, sessions["a"], member)

    assert reason() == "workers: the run begins with 2"
    training.phase.begun = True
    ledger.open(0, 4, 0.0)
    assert reason() == "a lease"
    sessions["a"].lease_bytes = 11
    assert reason() == "the network: it has not taken the leases that it was sent"
    grant = ledger.grant("a", 0, 2, now=0.0, deadline_s=9.0)
    assert grant is not None
    assert reason() == "the network: a lease is on its way"
    sessions["a"].lease_bytes = 0
    training.scheduler.unread.add(grant.lease)
    assert reason() == "data: the loader has not read its samples yet"
    training.scheduler.unread.clear()
    assert reason() == ""
    sessions["a"].receiving = grant.lease
    assert reason() == "the network: its result is on its way"
    sessions["a"].receiving = None
    other = ledger.grant("b", 0, 2, now=0.0, deadline_s=9.0)
    assert other is not None
    ledger.finish(grant.lease)
    assert reason() == "step 1: name-b computes the last 2 leaves"
    ledger.open(1, 4, 0.0)
    ledger.grant("a", 1, 4, now=0.0, deadline_s=9.0)
    assert reason() == "step 1: name-b computes the last 2 leaves"  # what it has of the next step cannot begin yet
    ledger.finish(other.lease)
    assert reason() == "the update of step 1"
    training.computes_here = True
    assert reason() == "steps that are worth sending: the coordinator computes these itself"
    training.ledger = Ledger()  # in which nothing need be opened then
    assert reason() == "steps that are worth sending: the coordinator computes these itself"
    training.version = training.total_steps
    assert reason() == "the end of the run"
    training.ledger, training.version = ledger, 0
    training.computes_here, training.takes_place_of = False, lambda session: session is sessions["a"]
    assert reason() == "leaves that are worth sending: the coordinator computes its part itself"
    member.standing = Standing.LATE
    assert reason().startswith("its own answer")
    member.standing = Standing.DRAINING
    assert reason() == "nothing: it is leaving"


def reports(events: list[Any]) -> list[WorkerReported]:
    return [event for event in events if isinstance(event, WorkerReported)]


async def test_the_last_look_is_the_end():
    """What page, metrics and trackers hold when a run is over is what its summary says, however short it was."""
    found: list[Any] = []
    bus, view, metrics = Bus(), View(), Metrics()
    for subscriber in (found.append, view, metrics):
        bus.subscribe(subscriber, samples=True)
    config = settings(max_steps=3)
    async with Coordinator(mlp_sgd(), config=config, bus=bus) as coordinator:
        working = asyncio.create_task(Worker(coordinator.address, job=mlp_sgd(), config=QUICK_WORKER).run())
        await coordinator.wait()
        await working
    reports = [event for event in found if isinstance(event, RunReported)]
    (end,) = [event for event in found if isinstance(event, RunFinished)]
    names = ("step", "samples", "leaves", "leaves_in_vain", "bytes_sent", "bytes_received", "leases_stale")
    assert [getattr(reports[-1], name) for name in names] == [getattr(end, name) for name in names]
    assert end.leaves > 0
    assert f'w5xde_leaves_total{{outcome="applied"}} {float(end.leaves)}' in metrics.text().decode()
    (worker,), (share,) = view.workers(), end.shares
    assert [worker[name] for name in ("leaves", "samples", "compute_s")] == [
        share.leaves,
        share.samples,
        share.compute_s,
    ]
    status: Any = view.snapshot()["status"]
    assert [status[name] for name in ("state", "waits_for", "samples")] == ["finished", "", end.samples]
    view.update()
    rows: Any = view.snapshot()["series"]
    assert rows["rows"][-1][rows["columns"].index("num_workers")] == 1  # who has computed these steps, not who is left


async def test_every_rule_is_reported():
    commits = Commits()
    found: list[Any] = []
    commits.bus.subscribe(found.append, samples=True)
    config = settings(max_steps=10_000, update=UpdateConfig(rule="async", codec="int8"))
    async with Coordinator(mlp_sgd(), config=config, bus=commits.bus) as coordinator:
        worker = Worker(coordinator.address, job=mlp_sgd(), config=QUICK_WORKER)
        working = asyncio.create_task(worker.run())
        training = coordinator._training
        assert training is not None
        sampler = StatusSampler(training)
        number = 0
        while number < 9 or not any(event.leases_held for event in reports(found)):  # a busy machine's data come late
            number += 1
            await commits.reach(commits.step + 1)
            sampler.tick(training.context.clock() + number)
        worker.drain()
        await working
        coordinator.request_stop()
        await coordinator.wait()
    told = reports(found)
    assert told[-1].raw_bytes > told[-1].encoded_bytes > 0
    assert {event.waits_for for event in told} <= {
        "",
        "a lease",
        "the next version",
        "the network: a lease is on its way",
    }
    assert any(event.staleness is not None for event in found if isinstance(event, StepCommitted))


async def test_nobody_asked_nothing_is_measured(monkeypatch: pytest.MonkeyPatch):
    looked: list[float] = []
    monkeypatch.setattr(StatusSampler, "_run", lambda self, now: looked.append(now))
    result = await train(mlp_sgd, max_steps=3)
    assert result.outcome == "finished"
    assert looked == []


async def test_the_dashboard_of_a_coordinator(tmp_path: Path):
    events: list[Event] = []
    bus = Bus()
    bus.subscribe(events.append)
    config = settings(max_steps=5, dashboard="127.0.0.1:0", trackers=("tensorboard",))
    async with Coordinator(mlp_sgd(), run_dir=tmp_path / "run", config=config, bus=bus) as coordinator:
        link = coordinator.dashboard_link
        port = int(link.rpartition(":")[2].strip("/"))
        kept = tmp_path / "run" / "dashboard"
        assert kept.read_text().strip() == link
        assert kept.stat().st_mode & 0o777 == 0o600
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /api/v1/run HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        body = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        await writer.wait_closed()
        assert json.loads(body)["dashboard"] == link
        worker = asyncio.create_task(Worker(coordinator.address, job=mlp_sgd(), config=QUICK_WORKER).run())
        result = await coordinator.wait()
        await worker
    assert result.outcome == "finished"
    assert not kept.exists()
    assert [event.text for event in events if isinstance(event, Warned)] == []
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert not [handler for handler in logging.getLogger("w5xde_async").handlers if "LogHandler" in repr(type(handler))]


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_a_disk_that_does_not_let_its_link_go_fails_no_run(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    over, unlink = threading.Event(), Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name != "dashboard":
            unlink(path, missing_ok=missing_ok)
        elif how == "hangs":
            over.wait(60)
        else:
            raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("w5xde_async.coordinator.monitoring.outputs._REMOVING_S", 0.05 if how == "hangs" else 60.0)
    config = settings(max_steps=2, dashboard="127.0.0.1:0")
    try:
        async with Coordinator(mlp_sgd(), run_dir=tmp_path / "run", config=config) as coordinator:
            monkeypatch.setattr(Path, "unlink", refuse)
            worker = asyncio.create_task(Worker(coordinator.address, job=mlp_sgd(), config=QUICK_WORKER).run())
            result = await coordinator.wait()
            await worker
    finally:
        over.set()
    assert result.outcome == "finished"


async def test_off_loopback_it_asks_for_a_token_that_no_record_holds(tmp_path: Path):
    bus, shown = Bus(), StringIO()
    bus.subscribe(Progress(ProgressConfig(log_format="json", mode="verbose"), stream=shown))
    config = settings(max_steps=2, dashboard="0.0.0.0:0", advertise="localhost")
    run_dir = tmp_path / "run"
    async with Coordinator(mlp_sgd(), run_dir=run_dir, config=config, bus=bus) as coordinator:
        link = coordinator.dashboard_link
        assert link.startswith("https://localhost:")
        token = link.partition("token=")[2]
        assert len(token) > 30
        loop = asyncio.get_running_loop()
        for file, code in ((run_dir, ExitCode.OK), (tmp_path, ExitCode.USAGE)):
            assert await loop.run_in_executor(None, status.main, ["--json", "--run-dir", str(file)]) == code
        worker = asyncio.create_task(Worker(coordinator.address, job=mlp_sgd(), config=QUICK_WORKER).run())
        await coordinator.wait()
        await worker
    kept = [path for path in run_dir.rglob("*") if path.is_file() and path.suffix in (".jsonl", ".toml", ".json")]
    assert {path.name for path in kept} >= {"metrics.jsonl", "config.toml"}
    assert not [path for path in kept if token in path.read_text()]
    assert "run_started" in shown.getvalue()
    assert token not in shown.getvalue()


async def test_without_the_extra_it_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "w5xde_async.telemetry.dashboard.server", None)
    events: list[Event] = []
    result = await train(mlp_sgd, max_steps=2, events=events, dashboard="127.0.0.1:0")
    assert result.outcome == "finished"
    (text,) = [event.text for event in events if isinstance(event, Warned)]
    assert "pip install 'w5xde-async[dashboard]'" in text


def test_arithmetic_is_counted_and_the_bits_stay():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = run()
    counted, flops = counting_flops(run)
    assert all(torch.equal(a, b) for a, b in zip(plain, counted, strict=True))
    forward = 2 * 32 * (8 * 16 + 16 * 4)
    assert flops == 2 * forward + 2 * 32 * 16 * 4  # the input needs no gradient


def test_memory_report(tmp_path: Path):
    report = MemoryReport()
    report.begin()
    report.begin()
    try:
        kept = [bytearray(1 << 20) for _ in range(8)]
        path = report.write(tmp_path / "reports", "worker-1")
    finally:
        report.end()
        report.end()
    found = json.loads(path.read_text())
    assert found["resident_bytes"] == pytest.approx(host_bytes(), rel=0.5)
    assert found["traced_bytes"] >= len(kept) << 20
    assert any("test_status_sampler" in entry["line"] and entry["bytes"] >= 8 << 20 for entry in found["largest"])
    assert "largest" not in json.loads(report.write(tmp_path / "after", "worker-1").read_text())


def test_a_memory_report_leaves_somebody_elses_tracing_on():
    tracemalloc.start()
    try:
        for _ in range(2):
            report = MemoryReport()
            report.begin()
            report.end()
            assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()
