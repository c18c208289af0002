"""What each worker of a machine is told, and when: its device, where the coordinator is. No process is started."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.simulator.loop import VirtualLoop
from tests.support.jobs import mlp_sgd

from w5xde_async.cluster import LocalCluster, worker_processes
from w5xde_async.cluster.worker_processes import LocalWorkers
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.errors import LocalError, UsageError
from w5xde_async.net.tls import TlsFiles
from w5xde_async.plan.numerics import EXACT, FIRST
from w5xde_async.runtime import is_stopped, loop_factory
from w5xde_async.settings.flags import read
from w5xde_async.settings.programs import CoordinatorSettings, WorkerSettings
from w5xde_async.telemetry.events import Warned, WorkerJoined, WorkerLeft


class Pipe:
    """What a process writes to, with the end that it has when the process ends."""

    def __init__(self) -> None:
        self._written = asyncio.Queue[bytes]()
        self.put = self._written.put_nowait

    async def read(self, most: int) -> bytes:
        return await self._written.get()


class Started:
    """A process that runs until it is killed, and what it was told."""

    def __init__(self, asked: Asked, command: tuple[str, ...], environment: dict[str, str]) -> None:
        self.asked, self.command, self.environment = asked, command, environment
        self.pid, self.returncode = 1 << 30, None
        self.ended = asyncio.Event()
        self.stdin, self.stdout, self.stderr = self, Pipe(), Pipe()
        self.lines: list[bytes] = []
        self.tells, self.prints = self.stdout.put, self.stderr.put

    def write(self, line: bytes) -> None:
        self.lines.append(line)
        if len(self.lines) == 2:
            told = json.loads(line)
            given, variables = told["arguments"], {**self.environment, **told["environment"]}
            flag = given[given.index("--device") + 1] if "--device" in given else ""
            name = given[given.index("--name") + 1]
            self.asked.rows.append((name, flag, variables.get("W5XDE_DEVICE", "")))
            if self.asked.tells_ids:
                self.tells(f"id id of {name}\n".encode())

    async def wait(self) -> int:
        await self.ended.wait()
        return self.asked.code

    def terminate(self) -> None:
        self.ended.set()
        self.tells(b"")
        self.prints(b"")

    def send_signal(self, number: int) -> None:
        self.asked.signals.append(number)
        self.terminate()

    def close(self) -> None:
        """Of its standard input: nobody reads it."""


class Asked:
    """What was started, and what those were told that have work: (name, --device, W5XDE_DEVICE)."""

    def __init__(self) -> None:
        self.started: list[Started] = []
        self.rows: list[tuple[str, str, str]] = []
        self.options: dict[str, Any] = {}
        self.signals: list[int] = []
        self.tells_ids = True
        self.code = -9

    async def start(self, *command: str, env: dict[str, str], **options: Any) -> Any:
        self.options = options
        self.started.append(Started(self, command, env))
        return self.started[-1]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(asyncio, "create_subprocess_exec", asked.start)
    monkeypatch.setattr(worker_processes, "_kill", lambda process: process.terminate())
    monkeypatch.setattr(worker_processes, "_is_gone", lambda process: False)
    monkeypatch.delenv("W5XDE_DEVICE", raising=False)
    return asked


def with_devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


async def begun(workers: LocalWorkers, count: int, asked: Asked) -> None:
    await workers.scale(count)
    for _ in range(5):
        await asyncio.sleep(0)


async def test_each_worker_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    with_devices(monkeypatch, 4)
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        await begun(workers, 4, asked)
        assert asked.rows == [(f"local-{n}", "", f"cuda:{n}") for n in range(4)]
        await begun(workers, 2, asked)
        await begun(workers, 4, asked)  # the two that are free, not the next two in turn
        assert asked.rows[4:] == [("local-4", "", "cuda:2"), ("local-5", "", "cuda:3")]


async def test_more_workers_than_devices_are_told(
    monkeypatch: pytest.MonkeyPatch, asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    with_devices(monkeypatch, 2)
    caplog.set_level(logging.WARNING)
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        await begun(workers, 2, asked)
        assert not caplog.records
        await begun(workers, 5, asked)
        assert [device for _, _, device in asked.rows] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]
        (told,) = [record.getMessage() for record in caplog.records]
        assert "5 workers share 2 CUDA devices" in told
        assert "--workers 2" in told


async def test_without_cuda_the_worker_chooses(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    with_devices(monkeypatch, 0)
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        await begun(workers, 2, asked)
        assert [row[1:] for row in asked.rows] == [("", "")] * 2


def test_what_the_user_asks_for_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("W5XDE_DEVICE", raising=False)

    def devices(*arguments: str) -> tuple[str, ...]:
        return read(CoordinatorSettings, ("train.py:job", *arguments), prog="")[0].worker_devices()

    assert devices() == ()
    file = tmp_path / "run.toml"
    file.write_text('[worker]\ndevice = "cpu"\n')
    assert devices("--config", str(file)) == ("cpu",)
    monkeypatch.setenv("W5XDE_DEVICE", "cuda:3")
    assert devices("--config", str(file)) == ("cuda:3",)


def test_authorities_that_local_workers_have_no_certificate_for_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("W5XDE_TLS_CERT", raising=False)

    def require(*arguments: str) -> None:
        given = ("train.py:job", "--tls-ca-file", "ca.pem", *arguments)
        read(CoordinatorSettings, given, prog="")[0].require_certificates()

    require()
    with pytest.raises(UsageError, match="those of --workers have none: give them one"):
        require("--workers", "1")
    file = tmp_path / "run.toml"
    file.write_text('[worker]\ntls_cert = "own.pem"\ntls_key = "own.key"\n')
    require("--workers", "1", "--config", str(file))
    config = CoordinatorConfig(tls=TlsFiles(ca=Path("ca.pem")))
    for job in ("train.py:job", mlp_sgd()):
        LocalCluster(job, 0, config=config)
        with pytest.raises(UsageError, match="those of this cluster have none"):
            LocalCluster(job, 1, config=config)
    monkeypatch.setenv("W5XDE_TLS_CERT", "own.pem")
    require("--workers", "1")
    LocalCluster("train.py:job", 1, config=config)


@pytest.mark.parametrize("setting", ["island", "island_member"])
def test_sums_are_asked_to_be_those_of_one_process_where_no_local_worker_is_an_island(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[worker]\n{setting} = "tp=2"\n')

    def asked(*arguments: str) -> str:
        settings = read(CoordinatorSettings, ("train.py:job", *arguments), prog="")[0]
        return settings.coordinator_config("").numerics

    assert asked("--workers", "1") == EXACT
    assert asked() == FIRST
    assert asked("--workers", "1", "--config", str(file)) == FIRST
    assert asked("--workers", "1", "--config", str(file), "--numerics", "exact") == EXACT
    monkeypatch.setenv(f"W5XDE_{setting.upper()}", "tp=2")
    assert asked("--workers", "1") == FIRST


@pytest.mark.parametrize("variable", ["W5XDE_ISLAND", "W5XDE_ISLAND_MEMBER", "W5XDE_CONFIG"])
def test_a_cluster_whose_processes_may_be_islands_lets_them_in(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    assert LocalCluster("train.py:job", 1)._config.numerics == EXACT
    monkeypatch.setenv(variable, "tp=2")
    assert LocalCluster("train.py:job", 1)._config.numerics == FIRST
    assert LocalCluster(mlp_sgd(), 1)._config.numerics == EXACT  # tasks, which read no environment


def test_where_a_coordinator_is_asks_for_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker's settings in its own environment and file, among them where it would look for a coordinator."""
    file = tmp_path / "run.toml"
    file.write_text('[worker]\njoin_file = "join"\n')
    monkeypatch.setenv("W5XDE_JOIN", "w5xde://host:1")
    settings = read(CoordinatorSettings, ("train.py:job", "--config", str(file)), prog="")[0]
    assert settings.worker_devices() == ()


async def test_whatever_a_worker_prints_it_is_heard_after_that(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        async with LocalWorkers(0, address="a:1", reference="", devices=("cpu",)) as workers:
            await begun(workers, 1, asked)
            for odd in ("[" * 100_000, json.dumps({"event": "log", "level": ["error"], "message": [0]}), "9" * 5000):
                asked.started[0].prints(odd.encode() + b"\n")
            said = json.dumps({"event": "log", "level": "error", "message": "after that"})
            asked.started[0].prints(said.encode() + b"\n")
            for _ in range(10):
                await asyncio.sleep(0)
            assert caplog.messages == ["worker local-0: after that"]


@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize("join", ["", "w5xde://host:1?token=geheim"])
async def test_a_worker_goes_to_who_has_started_it_whatever_environment_and_file_say(
    join: str, insecure: bool, monkeypatch: pytest.MonkeyPatch, asked: Asked, tmp_path: Path
) -> None:
    with_devices(monkeypatch, 0)
    for name, value in (
        ("SERVER", "other:1"), ("JOIN", "w5xde://other:1"), ("JOIN_FILE", "other"), ("INSECURE", "true"),
        ("TLS_CA_FILE", "other"), ("TLS_CERT", "own"), ("TLS_KEY", "key"),
    ):  # fmt: skip
        monkeypatch.setenv(f"W5XDE_{name}", value)
    file = tmp_path / "run.toml"
    in_file = 'join_file = "other"\ntls_cert = "file"\ntls_key = "file"\ntls_ca_file = "file"\ninsecure = true\n'
    await asyncio.to_thread(file.write_text, f"[worker]\n{in_file}")
    async with LocalWorkers(
        0, address="host:1", join=join, insecure=insecure, reference="", config_path=file
    ) as workers:
        await begun(workers, 1, asked)
    (one,) = asked.started
    told = json.loads(one.lines[1])
    arguments = [*one.command[one.command.index("w5xde_async.worker") + 1 : -2], *told["arguments"]]
    environment = {**one.environment, **told["environment"]}
    settings, _ = await asyncio.to_thread(read, WorkerSettings, arguments, prog="", environment=environment)
    assert (settings.server, settings.join, settings.join_file) == (None if join else "host:1", join or None, None)
    tls = [settings.values[name] for name in ("insecure", "tls_ca_file", "tls_cert", "tls_key")]
    assert tls == ([False, None, Path("own"), Path("key")] if join else [insecure, None, None, None])


async def test_what_the_user_asks_for_wins(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    with_devices(monkeypatch, 4)
    monkeypatch.setenv("W5XDE_DEVICE", "cuda:3")
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        await begun(workers, 1, asked)
    async with LocalWorkers(0, address="a:1", reference="", devices=("cpu",)) as workers:
        await begun(workers, 1, asked)
    assert [row[1:] for row in asked.rows] == [("", "cuda:3"), ("cpu", "cuda:3")]


async def test_processes_start_before_anybody_knows_where_the_coordinator_is(asked: Asked) -> None:
    workers = LocalWorkers(2, reference="train.py:job", token="geheim")
    await workers.prestart()
    assert [one.lines for one in asked.started] == [[], []]  # they import
    workers.job_is_loaded()
    assert [one.lines for one in asked.started] == [[b"\n"], [b"\n"]]  # and load the job, once it has been loaded here
    assert not asked.rows
    workers.at("host:1", join="w5xde://secret@host:1", threads=3)
    async with workers:
        await begun(workers, 2, asked)
        assert len(asked.started) == 2
        assert [row[0] for row in asked.rows] == ["local-0", "local-1"]
        await begun(workers, 3, asked)
        assert len(asked.started) == 3
        told = [json.loads(one.lines[1]) for one in asked.started]
        assert [one["environment"]["W5XDE_JOIN"] for one in told] == ["w5xde://secret@host:1"] * 3
        assert [one["arguments"] for one in told] == [["--name", f"local-{n}", "--threads", "3"] for n in range(3)]
    assert all(one.ended.is_set() for one in asked.started)
    everything = [" ".join(one.command) + str(one.environment) for one in asked.started]
    assert not any("secret" in text or "geheim" in text for text in everything)  # process lists are public


@pytest.mark.parametrize("startable", [0, 1])
async def test_what_cannot_be_started_early_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, asked: Asked, caplog: pytest.LogCaptureFixture, startable: int
) -> None:
    """Where some could be, the others are told of as those are that cannot be started later."""

    async def start(*command: str, **options: Any) -> Any:
        if len(asked.started) == startable:
            raise PermissionError(13, "Permission denied")
        return await asked.start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    told = f"cannot be started: {sys.executable}: Permission denied"
    workers = LocalWorkers(2, address="a:1", reference="train.py:job")
    if not startable:
        with pytest.raises(LocalError) as raised:
            await workers.prestart()
        assert str(raised.value) == f"worker local-0 {told}"
        return
    await workers.prestart()
    workers.job_is_loaded()
    async with workers:
        await begun(workers, 2, asked)
        assert workers.processes.keys() == {"local-0"}
        assert [record.getMessage() for record in caplog.records] == [f"worker local-1 {told}"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PermissionError(13, "Permission denied"), f"{sys.executable}: Permission denied"),
        (LocalError("other threads start programs"), "other threads start programs"),
    ],
)
async def test_those_that_cannot_be_started_are_lost_and_are_none_of_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    tried, lost = list[None](), list[str]()

    async def start(*_: str, **__: Any) -> Any:
        tried.append(None)
        raise error

    monkeypatch.setattr(worker_processes, "start_process", start)
    async with LocalWorkers(0, address="a:1", reference="", on_all_lost=lost.append) as workers:
        for number in (1, 2):
            await workers.scale(1)
            await asyncio.wait(workers._keepers.values())
            assert len(tried) == number
    assert lost == [f"every local worker has failed; local-{n} cannot be started: {told}" for n in (0, 1)]


async def test_what_was_started_too_early_ends_too(asked: Asked) -> None:
    workers = LocalWorkers(2, reference="train.py:job")
    await workers.prestart()
    await workers.aclose()  # the job could not be loaded
    assert all(one.ended.is_set() for one in asked.started)


@pytest.mark.parametrize("patience", [0, 1, 2])
async def test_whoever_has_no_patience_with_what_was_started_too_early_kills_it(
    monkeypatch: pytest.MonkeyPatch, asked: Asked, patience: int
) -> None:
    """In whichever turn of the event loop he loses it."""
    killed: list[Any] = []
    monkeypatch.setattr(worker_processes, "_kill", killed.append)
    workers = LocalWorkers(3, reference="train.py:job")
    await workers.prestart()
    closing = asyncio.create_task(workers.aclose())
    for _ in range(1 + patience):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert killed == asked.started


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, loop_factory("auto")])
def test_one_that_has_died_before_its_orders_is_noticed_by_whoever_waits(loop: Callable[[], Any]) -> None:
    """uvloop's pipes raise what no other loop's do."""

    async def run() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import os; os.close(0)", stdin=subprocess.PIPE
        )
        assert await process.wait() == 0
        for _ in range(100):
            await asyncio.sleep(0)
            worker_processes._say(process, b"\n")

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


_TAKEN = """
import asyncio, os, signal, sys
from w5xde_async.cluster import worker_processes
from w5xde_async.runtime import loop_factory

worker_processes._LOOKS_S = 0.02

async def code() -> int:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    if sys.argv[2] == "ignored":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    waiting = asyncio.create_task(worker_processes._ended(process))
    await asyncio.sleep(0)
    process.stdin.write(bytes([10]))
    process.stdin.close()
    if sys.argv[2] == "taken":
        try:
            os.wait()  # the loop hears of nothing meanwhile
        except ChildProcessError:
            pass
    code = await waiting
    worker_processes._kill(process)  # sends nothing to whoever has its number now
    return code

with asyncio.Runner(loop_factory=loop_factory(sys.argv[1])) as runner:
    print(runner.run(code()))
"""


@pytest.mark.parametrize("how", ["ignored", "taken", "neither"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_one_whose_exit_code_somebody_else_has_taken_is_known_to_have_ended(loop: str, how: str) -> None:
    """A job ignores SIGCHLD, so that its own processes leave no zombies, or collects whatever has ended."""
    command = [sys.executable, "-c", _TAKEN, loop, how]
    found = subprocess.run(command, capture_output=True, text=True, timeout=40)
    expected = ["0"] if how == "neither" else ["None"]
    if loop == "asyncio":  # a thread waits for the process there: it may be sooner than the job, or finds nothing
        expected += ["0", "255"]
    assert found.stdout.strip() in expected
    assert found.returncode == 0


_HELD = """
import asyncio, os, signal, sys
from w5xde_async.cluster import worker_processes
from w5xde_async.runtime import loop_factory

worker_processes._LOOKS_S = 0.02
holding = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"

async def code() -> int:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", holding, stdout=asyncio.subprocess.PIPE)
    holder = int(await process.stdout.readline())
    try:
        return await asyncio.wait_for(worker_processes._ended(process), 20)
    finally:
        os.kill(holder, signal.SIGKILL)

with asyncio.Runner(loop_factory=loop_factory(sys.argv[1])) as runner:
    print(runner.run(code()))
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_one_that_has_ended_is_noticed_though_what_it_has_started_holds_its_pipes(loop: str) -> None:
    found = subprocess.run([sys.executable, "-c", _HELD, loop], capture_output=True, text=True, timeout=40)
    assert found.stdout == "0\n", found.stderr


async def test_one_that_somebody_tells_to_go_is_not_started_again(asked: Asked) -> None:
    """Whatever the environment or the [worker] table says: 0 has it stay away."""
    async with LocalWorkers(1, address="a:1", reference="") as workers:
        await begun(workers, 1, asked)
        (process,) = asked.started
        place = process.command.index("--exit-on-drain")
        assert process.command[place + 1] == "0"
        assert asked.options["start_new_session"]  # a terminal's Ctrl-C is the coordinator's alone
    assert not asked.signals


async def test_on_windows_workers_are_told_by_ctrl_break(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    """terminate() is no signal there: it would end them in the middle of a lease."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(signal, "CTRL_BREAK_EVENT", 1, raising=False)
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200, raising=False)
    async with LocalWorkers(1, address="a:1", reference="") as workers:
        await begun(workers, 1, asked)
        assert asked.options["creationflags"] == 0x200
        assert "start_new_session" not in asked.options
    assert asked.signals == [1]


def on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*arguments, **named))

    return run


@pytest.mark.parametrize("words", [b"", b"no device\n"])
@on_virtual_time
async def test_one_that_fails_for_good_is_told_of_with_how_many_are_left(
    asked: Asked, caplog: pytest.LogCaptureFixture, words: bytes
) -> None:
    asked.tells_ids = False
    given_up, all_lost = list[tuple[str, str, int]](), list[str]()

    def lost(name: str, reason: str, left: int) -> None:
        given_up.append((name, reason, left))

    async with LocalWorkers(
        0, address="a:1", reference="", on_all_lost=all_lost.append, on_given_up=lost
    ) as workers:  # fmt: skip
        await begun(workers, 2, asked)
        why = "was ended by SIGKILL again, 3 restarts within a minute"
        ended = set[Started]()
        for left, name in ((1, "local-1"), (0, "local-0")):
            while len(given_up) < 2 - left:
                for process in asked.started:
                    if process not in ended and json.loads(process.lines[1])["arguments"][1] == name:
                        ended.add(process)
                        if words:
                            process.prints(words)
                        process.terminate()
                await asyncio.sleep(worker_processes._RESTART_DELAY_S)
            assert given_up[-1] == (name, why, left)
            said = f"worker {name} {why}:\n  no device" if words else f"worker {name} {why}"
            assert caplog.records[-1].getMessage() == said
            assert all_lost == ([] if left else [f"every local worker has failed; local-0 {why}"])


@pytest.mark.parametrize("code", [0, 2, 4, 5])
@on_virtual_time
async def test_one_whose_process_the_job_ends_is_started_again_whatever_its_exit_code(
    asked: Asked, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """It would be taken for one that has left, or that could never work."""
    asked.code = code
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        await begun(workers, 1, asked)
        asked.started[0].terminate()
        await asyncio.sleep(worker_processes._RESTART_DELAY_S + 0.1)
        assert len(asked.started) == 2
        assert f"worker local-0 ended with exit code {code} (by the job's code or a library" in caplog.text
        asked.started[1].tells(b"ends\n")
        asked.started[1].terminate()
        await asyncio.sleep(worker_processes._RESTART_DELAY_S + 0.1)
        assert len(asked.started) == 2


async def ended(process: Started) -> None:
    """Until what follows from its end has been done."""
    process.terminate()
    await asyncio.sleep(worker_processes._RESTART_DELAY_S + 1.1)


@on_virtual_time
async def test_one_that_could_not_say_that_it_ends_is_taken_at_its_exit_code(
    asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    """The job's code has closed descriptors that it has not opened."""
    asked.code, asked.tells_ids = 0, False
    caplog.set_level(logging.INFO)
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        workers.heard(Warned(text="a run begins"))
        await begun(workers, 1, asked)
        asked.started[0].tells(b"")
        await asyncio.sleep(2 * worker_processes._JOINS_S)
        await ended(asked.started[0])
        assert caplog.messages == ["worker local-0 has left"]  # and none that it has not joined
        assert len(asked.started) == 1


@pytest.mark.parametrize("code", [0, 5])
@on_virtual_time
async def test_one_that_the_job_ends_however_late_is_not_started_again_for_ever(asked: Asked, code: int) -> None:
    asked.code = code
    given_up: list[str] = []
    async with LocalWorkers(0, address="a:1", reference="", on_all_lost=given_up.append) as workers:
        await begun(workers, 1, asked)
        for number in range(4):
            assert len(asked.started) == 1 + number
            assert not given_up
            await asyncio.sleep(3600)
            await ended(asked.started[-1])
        assert len(asked.started) == 4
        assert f"ended with exit code {code} (by the job's code or a library" in given_up[0]
        assert given_up[0].endswith("again, after 3 restarts")


@pytest.mark.parametrize("loads", [True, False])
@on_virtual_time
async def test_what_a_worker_takes_to_load_is_no_time_in_which_it_has_worked(asked: Asked, loads: bool) -> None:
    """One that is killed while it loads would be started again for ever, where that takes long."""
    asked.tells_ids = False
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        await begun(workers, 1, asked)
        for _ in range(6):
            if loads:
                asked.started[-1].tells(b"id a\n")
            await asyncio.sleep(30.0)
            await ended(asked.started[-1])
        assert len(asked.started) == (7 if loads else 4)


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ([b"1 %\r2 %\r3 %\nbye\r\n"], ["3 %", "bye"]),
        ([b"by", b"e"], ["bye"]),
        ([b"x" * (1 << 16)] * 48 + [b"y\nbye\n"], [(1 << 20) * "x" + "y", "bye"]),
        ([b"\r50 %" * (1 << 14)] * 24 + [b"\r100 %\nbye\n"], ["100 %", "bye"]),
    ],
)
@on_virtual_time
async def test_what_it_printed_last_is_shown_as_a_terminal_shows_it(
    asked: Asked, caplog: pytest.LogCaptureFixture, printed: list[bytes], shown: list[str]
) -> None:
    """Bars, too, whose line is long and ends late: nothing beside it is lost."""
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        await begun(workers, 1, asked)
        for data in printed:
            asked.started[0].prints(data)
        await ended(asked.started[0])
        (message,) = caplog.messages
        first, *lines = message.split("\n  ")
        assert first == "worker local-0 was ended by SIGKILL and is started again"
        assert lines == shown


def joined(name: str, worker_id: str = "") -> WorkerJoined:
    known = worker_id or f"id of {name}"
    return WorkerJoined(worker_id=known, name=name, peer="p", device="cpu", threads=1, num_workers=1)


def left(name: str, worker_id: str = "", *, clean: bool = False) -> WorkerLeft:
    known = worker_id or f"id of {name}"
    return WorkerLeft(worker_id=known, name=name, reason="silent", clean=clean, leases_returned=1, num_workers=0)


@on_virtual_time
async def test_one_that_is_lost_and_does_not_come_back_is_killed_and_started_again(
    asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        await begun(workers, 2, asked)
        for event in (joined("local-0"), joined("local-1"), left("local-0")):
            workers.heard(event)
        began = loop.time()
        await asked.started[0].ended.wait()
        assert loop.time() - began == pytest.approx(worker_processes._LOST_S)
        await asyncio.sleep(1.0)
        assert len(asked.started) == 3
        assert [row[0] for row in asked.rows] == ["local-0", "local-1", "local-0"]
    assert "worker local-0 neither answers nor comes back" in caplog.text


@pytest.mark.parametrize(
    "events",
    [
        [joined("local-0"), left("local-0"), joined("local-0")],
        [
            joined("local-0"),
            joined("local-0"),
            left("local-0"),
        ],  # again, before the old link was seen to end
        [joined("local-0"), left("local-0", clean=True)],
        [left("local-0")],
        [joined("lab-3"), left("lab-3")],
    ],
)
@on_virtual_time
async def test_whoever_is_there_has_left_or_is_not_ours_is_let_alone(asked: Asked, events: list[Any]) -> None:
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        await begun(workers, 1, asked)
        for event in events:
            workers.heard(event)
        await asyncio.sleep(10 * worker_processes._LOST_S)
        assert len(asked.started) == 1
        assert not asked.started[0].ended.is_set()


@on_virtual_time
async def test_a_stranger_who_has_its_name_is_not_it(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    """A worker of elsewhere may call itself as it likes, and another run's local-0 is called so, too."""
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        workers.heard(Warned(text="a run begins"))
        await begun(workers, 1, asked)
        for event in (joined("local-0", "stranger"), left("local-0", "stranger")):
            workers.heard(event)
        await asyncio.sleep(worker_processes._LOST_S + worker_processes._JOINS_S)
        assert not asked.started[0].ended.is_set()
        assert "worker local-0 has not joined" in caplog.text
        for event in (joined("local-0"), joined("local-0", "stranger"), left("local-0")):
            workers.heard(event)
        await asyncio.sleep(worker_processes._LOST_S + 1)
        assert asked.started[0].ended.is_set()


@on_virtual_time
async def test_one_whose_id_is_read_after_the_coordinator_has_let_it_in(
    asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    asked.tells_ids = False
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        workers.heard(Warned(text="a run begins"))
        await begun(workers, 1, asked)
        workers.heard(joined("local-0"))
        asked.started[0].tells(b"id id of local-0\n")
        await asyncio.sleep(2 * worker_processes._JOINS_S)
        assert "has not joined" not in caplog.text


@on_virtual_time
async def test_one_that_a_signal_has_stopped_is_waited_for(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = [True]
    monkeypatch.setattr(worker_processes, "is_stopped", lambda _: stopped[0])
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        await begun(workers, 1, asked)
        for event in (joined("local-0"), left("local-0")):
            workers.heard(event)
        await asyncio.sleep(10 * worker_processes._LOST_S)
        assert not asked.started[0].ended.is_set()
        stopped.clear()
        stopped.append(False)
        await asyncio.sleep(worker_processes._LOST_S + 1)
        assert asked.started[0].ended.is_set()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="only Linux tells of a process's state")
def test_what_a_signal_has_stopped_is_told() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
        process.kill()


@pytest.mark.parametrize(("joins", "hears"), [(False, True), (True, True), (False, False)])
@on_virtual_time
async def test_one_that_does_not_join_is_told_of(
    asked: Asked, caplog: pytest.LogCaptureFixture, joins: bool, hears: bool
) -> None:
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        if hears:
            workers.heard(Warned(text="a run begins"))
        await begun(workers, 1, asked)
        await asyncio.sleep(worker_processes._JOINS_S - 1)
        assert "has not joined" not in caplog.text
        if joins:
            workers.heard(joined("local-0"))
        await asyncio.sleep(10 * worker_processes._JOINS_S)
        told = [text for text in caplog.messages if "has not joined" in text]
        assert len(told) == (hears and not joins)
        assert all(text.startswith("worker local-0 has not joined 60 s after") for text in told)
