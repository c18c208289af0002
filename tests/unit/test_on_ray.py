"""The actor that keeps a program on Ray, without Ray: how it is told to leave, and when it has itself started again.

A run with real actors: tests/process/test_ray.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from w5xde_async.errors import ExitCode
from w5xde_async.launch.plan import Plan
from w5xde_async.net.join import write_private_line

on_ray = pytest.importorskip("w5xde_async.launch.on_ray", exc_type=ImportError)


class Process:
    """A program that heeds SIGTERM."""

    def __init__(self) -> None:
        self.pid, self.told = 1, 0
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGTERM
        if self._ended.done():
            raise ProcessLookupError
        self.told += 1
        self.end(ExitCode.DRAINED)

    def end(self, code: int) -> None:
        self._ended.set_result(code)

    async def wait(self) -> int:
        return await self._ended


class Starts:
    """``start_process``, which takes until ``let`` is set."""

    def __init__(self) -> None:
        self.let, self.process, self.error = asyncio.Event(), Process(), None
        self.environment: dict[str, str] = {}

    async def __call__(self, *_: str, **options: Any) -> Process:
        self.environment = options["env"]
        await self.let.wait()
        if self.error is not None:
            raise self.error
        return self.process


@pytest.fixture
async def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    made = Starts()
    monkeypatch.setattr(on_ray, "start_process", made)
    return made


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the actor ended itself with, for Ray to start it again."""
    found: list[int] = []
    monkeypatch.setattr("os._exit", found.append)
    monkeypatch.setattr(on_ray, "_AGAIN_S", 0.0)
    return found


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    monkeypatch.setattr(on_ray, "ray", mock.MagicMock())
    monkeypatch.setattr(on_ray.tempfile, "tempdir", str(tmp_path))
    made = on_ray.Keeper("coordinator", [])
    yield made
    os.close(made._held)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_program_that_is_being_started_is_told_to_leave_as_soon_as_it_runs(
    keeper: Any, starts: Starts, exits: list[int]
) -> None:
    running = asyncio.create_task(keeper.run())
    await settle()
    leaving = asyncio.create_task(keeper.leave())
    await settle()
    assert not leaving.done()
    starts.let.set()
    await leaving
    assert (starts.process.told, await running, exits) == (1, ExitCode.DRAINED, [])


async def test_no_variable_says_what_flags_may_not(
    keeper: Any, starts: Starts, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that Ray starts on this machine has the environment of who launches."""
    for name in ("RESUME", "CONFIG", "TOKEN", "OF_THE_JOB"):
        monkeypatch.setenv(f"W5XDE_{name}", "never")
    starts.let.set()
    starts.process.end(ExitCode.OK)
    await keeper.run()
    assert {"W5XDE_TOKEN", "W5XDE_OF_THE_JOB", "PATH"} <= starts.environment.keys()
    assert starts.environment.keys().isdisjoint({"W5XDE_RESUME", "W5XDE_CONFIG"})


async def test_one_that_is_told_to_leave_before_it_is_started_is_not(
    keeper: Any, starts: Starts, exits: list[int]
) -> None:
    await keeper.leave()
    assert (await keeper.run(), exits) == (ExitCode.DRAINED, [])


async def test_an_actor_that_is_told_to_leave_before_it_is_started_again_is_not(
    keeper: Any, starts: Starts, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = asyncio.Event()

    async def sleep(_: float) -> None:
        await pause.wait()

    running = asyncio.create_task(keeper.run())
    starts.let.set()
    await settle()
    monkeypatch.setattr(on_ray, "asyncio", mock.Mock(wraps=asyncio, sleep=sleep))
    starts.process.end(ExitCode.PORT_IN_USE)
    await asyncio.wait([asyncio.create_task(starts.process.wait())])
    leaving = asyncio.create_task(keeper.leave())
    pause.set()
    await leaving
    assert (await running, exits) == (ExitCode.PORT_IN_USE, [])


@pytest.mark.parametrize("code", [ExitCode.PORT_IN_USE, ExitCode.DRAINED, -9])
async def test_an_actor_ends_with_a_program_that_another_start_may_mend(
    code: int, keeper: Any, starts: Starts, exits: list[int]
) -> None:
    starts.let.set()
    starts.process.end(code)
    await keeper.run()
    assert exits == [1]


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.ERROR, ExitCode.USAGE])
async def test_an_actor_stays_with_the_exit_code_of_one_that_has_ended_for_good(
    code: int, keeper: Any, starts: Starts, exits: list[int]
) -> None:
    starts.let.set()
    starts.process.end(code)
    assert (await keeper.run(), exits) == (code, [])


async def test_an_actor_whose_program_cannot_be_started_is_started_again(
    keeper: Any, starts: Starts, exits: list[int]
) -> None:
    starts.error = OSError("Resource temporarily unavailable")
    starts.let.set()
    await keeper.run()
    assert exits == [1]


@pytest.mark.parametrize(
    ("code", "said", "ends_with"),
    [
        (ExitCode.DRAINED, "stopped in good order; the same command goes on from there", ExitCode.OK),
        (ExitCode.OK, "the run has come to its end", ExitCode.OK),
        (ExitCode.ERROR, "the run has not stopped in good order (exit code 1)", ExitCode.ERROR),
    ],
)
def test_what_is_said_of_a_stop_is_what_came_of_it(
    code: int, said: str, ends_with: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = mock.MagicMock()
    fleet.__enter__.return_value = fleet
    fleet.wait.side_effect = KeyboardInterrupt
    fleet.stop.return_value = code
    monkeypatch.setattr(on_ray, "Fleet", lambda _: fleet)
    assert on_ray.run(mock.Mock(coordinator_grace_s=240)) == ends_with
    first, last = capsys.readouterr().err.splitlines()
    assert first == "Ctrl-C: the run stops in good order, with a checkpoint (at most 240 s); again: ends at once"
    assert last.startswith(said)


class Cluster:
    """What there is of Ray: the actors by name, and what was asked of each. ``interrupted``: at which calls Ctrl-C
    comes, by number."""

    def __init__(self, *interrupted: int) -> None:
        self.actors: dict[str, list[str]] = {}
        self._interrupted, self._calls = interrupted, 0
        self.util, self.exceptions = self, mock.Mock(RayError=RuntimeError)

    def _called(self) -> None:
        self._calls += 1
        if self._calls in self._interrupted:
            raise KeyboardInterrupt

    def handle(self, name: str) -> Any:
        def ask(what: str) -> str:
            self._called()
            self.actors[name].append(what)
            return what

        asked = {what: mock.Mock(remote=lambda what=what: ask(what)) for what in ("run", "leave")}
        return mock.Mock(**asked, called=name)

    def remote(self, **_: Any) -> Any:
        def options(*, name: str, **_: Any) -> Any:
            def remote(*_: Any) -> Any:
                self.actors[name] = self.actors.get(name, [])
                self._called()  # Ray has started it, and nobody here knows
                return self.handle(name)

            return mock.Mock(remote=remote)

        return lambda kind: mock.Mock(options=options)

    def is_initialized(self) -> bool:
        return False

    def init(self, **_: Any) -> None:
        self._called()

    def shutdown(self) -> None: ...

    def list_named_actors(self, *, all_namespaces: bool) -> list[dict[str, str]]:
        self._called()
        return [{"name": name, "namespace": "w5xde"} for name in self.actors]

    def get_actor(self, name: str, _: str) -> Any:
        return self.handle(name)

    def wait(self, asked: list[str], **_: Any) -> tuple[list[str], list[str]]:
        self._called()
        return asked, []

    def get(self, _: str) -> int:
        return ExitCode.DRAINED

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        assert no_restart
        del self.actors[actor.called]


PLAN = Plan(job="t.py:job", name="t", workers=2, cpus=1, gpus=0, memory_bytes=1 << 30)
_CALLS = range(2, 8)  # of Ray: 1 connects, 2 to 7 start the run, and 8 waits for its end


def interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *calls: int
) -> tuple[Cluster, int, list[str]]:
    cluster = Cluster(*calls)
    monkeypatch.setattr(on_ray, "ray", cluster)
    code = on_ray.run(PLAN)
    return cluster, code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("call", [*_CALLS, 8])
def test_ctrl_c_while_the_actors_start_leaves_none_of_them(
    call: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, code, said = interrupted(monkeypatch, capsys, call)
    assert (cluster.actors, code) == ({}, ExitCode.OK)
    assert [line.partition(" ")[0] for line in said] == ["Ctrl-C:", "stopped"]


@pytest.mark.parametrize("call", _CALLS)
@pytest.mark.parametrize("later", [1, 2, 3, 4])
def test_a_second_ctrl_c_ends_the_run_at_once(
    call: int, later: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, code, said = interrupted(monkeypatch, capsys, call, call + later)
    assert (cluster.actors, code) == ({}, ExitCode.INTERRUPTED_TWICE)
    assert said[-1] == "ended at once: the same command goes on from the run's last checkpoint"


def test_a_third_one_says_what_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, code, said = interrupted(monkeypatch, capsys, 4, 5, 6)
    assert (cluster.actors.keys(), code) == ({"t"}, ExitCode.INTERRUPTED_TWICE)
    assert said[-1] == "ended at once, and the run's actors may go on: the same command finds them"


def test_ctrl_c_before_anything_is_started_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert interrupted(monkeypatch, capsys, 1)[1:] == (ExitCode.OK, ["stopped before it began"])


async def test_an_actor_that_leaves_or_is_started_again_leaves_no_folder(
    keeper: Any, starts: Starts, exits: list[int], tmp_path: Path
) -> None:
    """In it lies a join string, which holds the run's secret."""
    other = await asyncio.to_thread(on_ray.Keeper, "worker", [])
    try:
        starts.let.set()
        starts.process.end(ExitCode.PORT_IN_USE)
        await keeper.run()
        assert await asyncio.to_thread(os.listdir, tmp_path) == [other._folder.name]
        await other.leave()
        assert await asyncio.to_thread(os.listdir, tmp_path) == []
    finally:
        os.close(other._held)


def test_what_a_killed_actor_has_left_goes_with_the_next_one(keeper: Any, tmp_path: Path) -> None:
    killed = on_ray.Keeper("worker", [])
    write_private_line(killed._join, "a secret")
    os.close(killed._held)
    others = [tmp_path / "w5xde-ray-a-file", tmp_path / "w5xde-ray-a-link", tmp_path / "another"]
    others[0].touch()
    others[2].mkdir()
    others[1].symlink_to(others[2])
    made = on_ray.Keeper("worker", [])
    os.close(made._held)
    assert sorted(tmp_path.iterdir()) == sorted([keeper._folder, made._folder, *others])
