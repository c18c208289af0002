"""What programs do with signals before anybody listens to them, and how their threads are scheduled."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import io
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support import forking

from w5xde_async.__main__ import main as w5xde
from w5xde_async.cluster.worker_processes import PRESTARTED
from w5xde_async.errors import ExitCode, LocalError, UsageError
from w5xde_async.process import (
    _LONG_SLICE_NS,
    _RESET_ON_FORK,
    _SCHED_ATTR,
    _SCHED_SETATTR,
    _SHORT_SLICE_NS,
    _allow_descriptors,
    _Early,
    _Echoes,
    _Ending,
    _ignore_signals,
    imported,
    interrupts,
    keeping_objects,
    launch,
    note,
    say,
    signals,
    tell,
    use_batch_scheduling,
    use_short_slices,
)
from w5xde_async.settings import WorkerSettings
from w5xde_async.telemetry.dashboard.connections import at_most
from w5xde_async.telemetry.writer import writer_for
from w5xde_async.users_code import take_stdin

FREEZE = gc.freeze
_PROGRAMS = ("coordinator", "worker", "status", "doctor", "predict", "memory", "tune", "launch")


class Ended(BaseException):
    pass


def test_a_second_stop_before_the_beginning_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr("os._exit", end)
    stops = _Early(stops=True)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        stops(signal.SIGTERM, None)
    with pytest.raises(Ended) as ended:
        stops(signal.SIGINT, None)
    assert ended.value.args == (ExitCode.INTERRUPTED_TWICE,)


@pytest.mark.parametrize("handler", [_Early(stops=True), _Ending()], ids=["it starts", "it ends"])
def test_an_echo_is_no_second_stop(handler: _Early | _Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    """timeout(1) passes on what the terminal has told the whole group."""

    def end(code: int) -> None:
        raise Ended(code)

    now = 0.0
    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr(handler, "_echoes", _Echoes(lambda: now))
    with suppress(KeyboardInterrupt):
        handler(signal.SIGTERM, None)
    now = 0.2
    handler(signal.SIGTERM, None)
    now = 0.3
    with pytest.raises(Ended):
        handler(signal.SIGTERM, None)


def test_an_echo_is_no_second_stop_of_a_program_without_a_loop() -> None:
    with interrupts():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


EARLY = """
import os, signal, sys
from w5xde_async.process import launch

def kind():
    {what}

class Last:
    def __del__(self, kill=os.kill, own=os.getpid(), number=signal.SIGTERM):  # while Python ends
        {last}

last = Last()
sys.exit(launch(kind, [], prog="early", prepare=None, exit_on_drain=75))
"""
KILLED = "exec('import os, signal; os.kill(os.getpid(), signal.SIGTERM)\\nfor _ in range(10**7): pass')"


@pytest.mark.parametrize("last", ["pass", "kill(own, number)"])
@pytest.mark.parametrize(
    "what",
    [
        KILLED,  # as while a dataclass is made
        f"""try:
        {KILLED}
    except BaseException:
        raise ImportError('cannot load module more than once per process') from None""",
    ],
    ids=["within exec", "swallowed, and failed of it"],
)
def test_a_stop_before_the_beginning_has_its_exit_code(what: str, last: str, tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(EARLY.format(what=what, last=last))
    paths = os.pathsep.join(str(path) for path in (tmp_path, *sys.path))
    done = subprocess.run(
        [forking.PYTHON, "-m", "early"], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr.strip()) == (75, "early: stopped before it began")


def test_an_interrupt_ends_a_worker_that_waits_for_its_coordinator_without_a_word() -> None:
    """Which says itself that a signal has ended it."""
    script = (
        "import os, signal, w5xde_async.worker.__main__ as program\n"
        "program._line = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        f"program.main(['{PRESTARTED}', '1'])"
    )
    done = subprocess.run(
        [forking.PYTHON, "-c", script], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has no SIGUSR1")
def test_a_warning_before_it_is_not_the_first() -> None:
    """As Slurm sends SIGUSR1 some time before SIGTERM."""
    stops = _Early(stops=True)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        with pytest.raises(KeyboardInterrupt):
            stops(number, None)


def test_while_it_ends_a_first_stop_changes_nothing_and_a_second_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr("os._exit", end)
    ending = _Ending()
    ending(signal.SIGINT, None)
    with pytest.raises(Ended) as ended:
        ending(signal.SIGTERM, None)
    assert ended.value.args == (ExitCode.INTERRUPTED_TWICE,)


@pytest.mark.both_loops
async def test_handlers_of_a_host_program_are_there_again_afterwards() -> None:
    """Who runs one of the programs by its function, in a program of his own."""

    def mine(*_: object) -> None: ...

    heard, known = [], (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in known}
    try:
        for theirs in (signal.default_int_handler, mine, signal.SIG_DFL, signal.SIG_IGN):
            for number in known:
                signal.signal(number, theirs)
            with signals(heard.append, warns=["SIGUSR1"]):
                assert (signal.getsignal(signal.SIGINT) is theirs) == (theirs is signal.SIG_IGN)
            assert [signal.getsignal(number) for number in known] == [theirs] * 3
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not heard


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_while_python_ends_its_default_does_not_come_back(number: signal.Signals) -> None:
    before = signal.signal(number, _Ending() if number == signal.SIGTERM else _Early())
    try:
        _ignore_signals()
        assert signal.getsignal(number) is signal.SIG_IGN
        signal.signal(number, signal.SIG_DFL)  # not this program's any more
        _ignore_signals()
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("chosen", [None, (100, 5, 5)])
def test_what_a_program_has_loaded_is_not_looked_through_again(
    chosen: tuple[int, int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``chosen``: what the job's own code wants while it is loaded, which stays."""
    monkeypatch.setattr(gc, "freeze", FREEZE)
    before, full = gc.get_threshold(), []
    phases = lambda phase, about: full.append(about["generation"]) if phase == "start" else None  # noqa: E731
    gc.callbacks.append(phases)
    try:
        with keeping_objects():
            kept = [[number] for number in range(200_000)]
            if chosen:
                gc.set_threshold(*chosen)
        assert 2 not in full
        assert 0 in full  # what is new is looked at
        assert gc.get_threshold() == (chosen or before)
        assert not any(one is kept for one in gc.get_objects())
    finally:
        gc.callbacks.remove(phases)
        gc.set_threshold(*before)
        gc.unfreeze()


def test_a_program_may_open_what_the_system_lets_it() -> None:
    """Most shells give 1024 descriptors, where the system lets a process have many more."""
    resource = pytest.importorskip("resource", reason="Windows has no such limit")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        _allow_descriptors()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1]
        assert soft > 256 or hard == 256
        assert at_most(512, 8) == min(512, soft // 8)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert (at_most(512, 8), at_most(8, 8)) == (32, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_program_that_may_open_too_little_says_so_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, launched: Callable[..., tuple[int, str]]
) -> None:
    """With 24 a run begins, and waits for ever for the connection of a worker that it cannot accept."""
    resource = pytest.importorskip("resource", reason="Windows has no such limit")
    begun: list[bool] = []

    async def body() -> int:
        begun.append(True)
        return ExitCode.OK

    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert launched(body) == (ExitCode.OK, "")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 24))
    code, said = launched(body)
    assert code == ExitCode.ERROR
    assert said.startswith("worker: this process may have 24 files and connections open (ulimit -Hn")
    assert said.count("\n") == 1
    assert begun == [True]


def test_a_program_whose_directory_is_gone_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: Callable[..., tuple[int, str]]
) -> None:
    """Torch ends a process that loads it there, with no word of that."""

    async def body() -> int:
        raise AssertionError("it has begun")

    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, said = launched(body)
    monkeypatch.chdir(tmp_path)
    assert code == ExitCode.USAGE
    assert said.startswith("worker: the working directory has been removed")
    assert said.count("\n") == 1


def test_a_system_whose_limit_is_lower_than_it_says_gives_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS, whose hard limit is infinite."""
    resource = pytest.importorskip("resource", reason="Windows has no such limit")
    limits = [256, resource.RLIM_INFINITY]

    def put(_: int, wanted: tuple[int, int]) -> None:
        if wanted[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")
        limits[:] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", put)
    _allow_descriptors()
    assert limits == [8192, resource.RLIM_INFINITY]


def _policy_in_a_thread(before: int) -> tuple[int, int]:
    """How a thread is scheduled that had ``before`` and asks for batch scheduling, and one that it then starts."""
    found: list[int] = []

    def child() -> None:
        found.append(os.sched_getscheduler(0))

    def ask() -> None:
        os.sched_setscheduler(0, before, os.sched_param(0))
        use_batch_scheduling()
        found.append(os.sched_getscheduler(0))
        started = threading.Thread(target=child)
        started.start()
        started.join()

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    return found[0], found[1]


@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="Linux alone has scheduling policies")
def test_batch_scheduling_is_inherited_and_takes_no_other_policys_place() -> None:
    assert _policy_in_a_thread(os.SCHED_OTHER) == (os.SCHED_BATCH, os.SCHED_BATCH)
    assert _policy_in_a_thread(os.SCHED_IDLE) == (os.SCHED_IDLE, os.SCHED_IDLE)


_HEEDED = tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 12)


def _attributes() -> tuple[int, ...]:
    """What sched_getattr(2) says of this thread: policy, flags, nice, priority, runtime, deadline, period."""
    had = ctypes.create_string_buffer(_SCHED_ATTR.size)
    number = _SCHED_SETATTR[platform.machine()] + 1
    assert ctypes.CDLL(None).syscall(number, 0, had, _SCHED_ATTR.size, 0) == 0
    return tuple(_SCHED_ATTR.unpack(had.raw)[1:])


def _in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.skipif(platform.machine() not in _SCHED_SETATTR, reason="sched_setattr(2) of this machine is not known")
@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="Linux alone has scheduling policies")
def test_long_slices_are_asked_for_and_change_nothing_else() -> None:
    found: list[tuple[int, ...]] = []

    def ask() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, 3)
        use_batch_scheduling()
        found.append(_attributes())

    _in_a_thread(ask)
    ((policy, flags, nice, priority, runtime, deadline, period),) = found
    assert (policy, flags, nice, priority, deadline, period) == (os.SCHED_BATCH, 0, 3, 0, 0, 0)
    assert runtime == _LONG_SLICE_NS or not _HEEDED


@pytest.mark.skipif(platform.machine() not in _SCHED_SETATTR, reason="sched_setattr(2) of this machine is not known")
@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="Linux alone has scheduling policies")
def test_a_loop_has_short_slices_and_nothing_that_it_starts_has() -> None:
    """Else what computes in its threads, and in local workers, would be interrupted thirty times as often."""
    found: dict[str, tuple[int, ...]] = {}

    def ask() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, 3)
        _in_a_thread(lambda: found.update(before=_attributes()))
        use_short_slices()
        found["loop"] = _attributes()
        _in_a_thread(lambda: found.update(after=_attributes()))
        _in_a_thread(lambda: (use_batch_scheduling(), found.update(worker=_attributes())))

    _in_a_thread(ask)
    policy, flags, nice, priority, runtime, deadline, period = found["loop"]
    assert (policy, flags, nice, priority, deadline, period) == (os.SCHED_OTHER, _RESET_ON_FORK, 3, 0, 0, 0)
    assert runtime == _SHORT_SLICE_NS or not _HEEDED
    assert found["after"] == found["before"]
    assert found["worker"][0] == os.SCHED_BATCH


@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="Linux alone has scheduling policies")
@pytest.mark.parametrize(("policy", "nice"), [("SCHED_BATCH", 0), ("SCHED_IDLE", 0), ("SCHED_OTHER", -3)])
def test_how_an_owner_has_a_loop_scheduled_stands(policy: str, nice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("w5xde_async.process._ask_for_slice", lambda *told: asked.append(told))
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: getattr(os, policy))
    monkeypatch.setattr(os, "getpriority", lambda *_: nice)
    use_short_slices()
    assert not asked
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_OTHER)
    monkeypatch.setattr(os, "getpriority", lambda *_: 0)
    use_short_slices()
    assert asked


@pytest.mark.parametrize("use", [use_batch_scheduling, use_short_slices])
def test_machines_and_systems_that_have_no_slices_go_on(
    use: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(platform, "machine", lambda: "another")
        _in_a_thread(use)
    for name in ("sched_setscheduler", "sched_getscheduler", "SCHED_BATCH", "SCHED_OTHER"):
        monkeypatch.delattr(os, name, raising=False)
    use()


@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="Linux alone has scheduling policies")
def test_who_may_not_choose_a_policy_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def forbidden(*arguments: object) -> None:
        asked.append(arguments)
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    use_batch_scheduling()
    assert asked


@pytest.fixture
def launched(capsys: pytest.CaptureFixture[str], as_a_program: None) -> Callable[..., tuple[int, str]]:
    """Gives the exit code of a program whose body that is, and what it has complained of."""

    def launched(body: Callable[[], Coroutine[Any, Any, int]], *flags: str) -> tuple[int, str]:
        given = ("--server", "localhost:1", *flags)
        code = launch(lambda: WorkerSettings, given, prog="worker", prepare=lambda settings, token: body)
        return code, capsys.readouterr().err

    return launched


def refuse(_: threading.Thread) -> None:
    """In place of ``Thread.start``, as under ``ulimit -u``."""
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    "reason",
    ["libx.so: failed to map segment from shared object", "liby.so: cannot allocate memory for thread-local data"],
)
def test_a_library_that_there_is_no_room_for_is_named_in_one_line(launched: Any, reason: str, wrapped: bool) -> None:
    async def body() -> int:
        try:
            raise ImportError(reason)
        except ImportError as error:
            if wrapped:
                raise ImportError("IMPORTANT: read this\n\nfor many lines\n") from error
            raise

    code, said = launched(body)
    assert code == ExitCode.ERROR
    assert f"no room to load what it needs: {reason}; raise its limit of memory (ulimit -v" in said
    assert "IMPORTANT" not in said


def test_another_failed_import_is_shown_as_it_is(launched: Any) -> None:
    async def body() -> int:
        raise ImportError("no module of that name")

    with pytest.raises(ImportError, match="no module of that name"):
        launched(body)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise MemoryError", "MemoryError"),
        ("raise OSError('libx.so: cannot allocate memory')", "libx.so: cannot allocate memory"),
        ("try: raise MemoryError('big')\nexcept MemoryError as e: raise RuntimeError('no x') from e", "big"),
    ],
)
@pytest.mark.parametrize("looped", [False, True])
def test_whatever_is_imported_without_room_for_it_is_one_line(
    launched: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    source: str, reason: str, looped: bool,
) -> None:  # fmt: skip
    (tmp_path / "heavy.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    async def body() -> int:
        import heavy  # type: ignore[import-not-found]

        return int(heavy.main())

    if looped:
        code, said = launched(body)
    else:
        code, said = imported("heavy", [], prog="w5xde heavy"), capsys.readouterr().err
    assert code == ExitCode.ERROR
    assert said.splitlines()[1:] == []
    assert f"no room to load what it needs: {reason}; raise its limit of memory (ulimit -v" in said


def _falls_back() -> None:
    try:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))  # as a cache that there is no room for
    except OSError:
        raise KeyError("typo")  # noqa: B904


def _ring() -> None:
    try:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    except OSError as error:
        raise error from error


def _large() -> None:
    raise MemoryError


@pytest.mark.parametrize("fails", [_falls_back, _ring, _large])
def test_what_fails_later_is_no_lack_of_room_to_load_something(launched: Any, fails: Callable[[], None]) -> None:
    async def body() -> int:
        fails()
        return 0

    with pytest.raises((KeyError, OSError, MemoryError)) as caught:
        launched(body)
    assert caught.traceback[-1].name == fails.__name__


NO_THREADS = (
    "worker: this machine lets this process start no more threads: raise its limit of processes (ulimit -u, or the "
    "container's), or of memory (ulimit -v), which a thread's stack needs\n"
)


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_program_that_gets_no_thread_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, launched: Callable[..., tuple[int, str]], loop: str, grouped: bool
) -> None:
    """The end of its loop, which wants a thread too, adds nothing."""

    async def body() -> int:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        if grouped:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.to_thread(int))
        return await asyncio.to_thread(int)

    assert launched(body, "--loop", loop) == (ExitCode.ERROR, NO_THREADS)


def test_one_that_gets_none_before_its_loop_says_the_same(
    monkeypatch: pytest.MonkeyPatch, launched: Callable[..., tuple[int, str]]
) -> None:
    async def body() -> int:
        raise AssertionError

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert launched(body, "--exit-with-stdin") == (ExitCode.ERROR, NO_THREADS)


def test_an_interrupt_that_a_library_raises_for_lack_of_threads_is_no_stop(
    monkeypatch: pytest.MonkeyPatch, launched: Callable[..., tuple[int, str]]
) -> None:
    """OpenBLAS does, where it can start none of its own while it is imported."""

    async def body() -> int:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        raise KeyboardInterrupt

    assert launched(body) == (ExitCode.ERROR, NO_THREADS)


def test_the_jobs_code_finds_nothing_to_read_where_the_parents_line_was() -> None:
    """``input()`` would wait for the parent, for ever."""
    kept, (reader, writer) = os.dup(0), os.pipe()
    os.dup2(reader, 0)
    try:
        line = take_stdin()
        os.write(writer, b"told")
        assert os.read(0, 1) == b""
        assert os.read(line, 4) == b"told"
        os.close(writer)
        assert os.read(line, 1) == b""  # the parent has ended
        os.close(line)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(reader)


_PRINTING = """
import os
from w5xde_async.users_code import take_stdout
words = take_stdout()
os.write(words, b"said")
print("printed", flush=True)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # as a quiet library does
os.dup2(2, 1)
os.write(words, b" after that")
"""


def test_what_the_jobs_code_prints_or_puts_elsewhere_is_none_of_the_words_for_the_parent() -> None:
    found = subprocess.run([sys.executable, "-c", _PRINTING], capture_output=True, text=True)
    assert (found.stdout, found.stderr, found.returncode) == ("said after that", "printed\n", 0)


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
@pytest.mark.parametrize("told", ["", "no such device"])
def test_a_loop_that_gets_none_for_its_end_changes_no_end(
    monkeypatch: pytest.MonkeyPatch, launched: Callable[..., tuple[int, str]], loop: str, told: str
) -> None:
    async def body() -> int:
        await asyncio.to_thread(int)  # for the end of such threads the loop starts another
        monkeypatch.setattr(threading.Thread, "start", refuse)
        if told:
            raise UsageError(told)
        return ExitCode.DRAINED

    expected = (ExitCode.USAGE, f"worker: {told}\n") if told else (ExitCode.DRAINED, "")
    assert launched(body, "--loop", loop) == expected


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
def test_what_else_it_fails_of_is_raised_as_it_is(
    monkeypatch: pytest.MonkeyPatch, launched: Callable[..., tuple[int, str]], loop: str
) -> None:
    async def body() -> int:
        await asyncio.to_thread(int)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        raise ZeroDivisionError("a fault")

    with pytest.raises(ZeroDivisionError, match="a fault") as raised:
        launched(body, "--loop", loop)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("program", ["", *_PROGRAMS])
def test_help_without_room_is_one_line(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert w5xde([*program.split(), "--help"]) == ExitCode.ERROR
    name = f"w5xde {program}".rstrip()
    assert capsys.readouterr().err == f"{name}: standard output cannot be written: No space left on device\n"


def test_output_that_nobody_reads_or_can_write_ends_no_program_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes later, Python's own end too, is dropped."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert [say("a"), say("b")] == [False, True]
    monkeypatch.setattr("sys.stdout", io.StringIO())
    sys.stdout.close()  # by the job's code
    with pytest.raises(LocalError, match="standard output cannot be written: I/O operation on closed file"):
        say("c")
    monkeypatch.setattr("sys.stderr", sys.stdout)
    note("d")


def test_a_note_that_whoever_reads_is_too_slow_for_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that another process has made non-blocking, and that is full."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    with os.fdopen(reading, "rb", buffering=0) as read, os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr("sys.stderr", pipe)
        with suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(1 << 12))
        note("first")
        shown = b""
        while not shown.endswith(b"first\n"):
            shown = read.read(1 << 16) or shown
        note("second")
        assert writer_for(pipe).flush()
        assert read.read(1 << 16) == b"second\n"


def test_what_is_told_is_told_in_what_the_stream_can_write(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert tell("p", "178 \u00b5s\n") == ExitCode.OK
    assert raw.getvalue() == b"178 \\xb5s\n"
