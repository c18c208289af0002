"""The actor that keeps a program on Ray, without Ray: how it is told to leave, and when it has itself started again.

A run with real actors: tests/process/test_ray.py.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any
from unittest import mock

import pytest

from w5xde_async.errors import ExitCode

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
    monkeypatch.setattr(on_ray.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    return on_ray.Keeper("coordinator", [])


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
    assert on_ray.run(mock.Mock()) == ends_with
    assert capsys.readouterr().err.startswith(said)
