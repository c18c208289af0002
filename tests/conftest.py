"""What every test gets: blocking calls and leaks fail it, and it may ask for both event loops.

- A blocking call of this package inside a running event loop raises (blockbuster), and so does a call of the loop from
  another thread that is not made for it.
- A test that takes too long fails, wherever its time ends: in a task, too, and again if that held on.
- A test that leaves a task, a thread, a descriptor or another handler of SIGINT or SIGTERM behind fails;
  ``@pytest.mark.allow_leaks`` exempts one.
- Torch computes with one thread where a test begins.
- A test sees no accelerator, and neither do programs that it starts: bits are compared with the CPU's. Those marked
  ``gpu`` see what there is.
- ``@pytest.mark.both_loops`` runs an async test on asyncio's own loop and on uvloop.
- ``@pytest.mark.processes`` starts programs; they are forked from a server that has imported everything (forking.py),
  one for all processes of ``pytest -n``, and so is what starts them by ``sys.executable``.
- ``--rewrite-golden`` writes ``tests/golden`` anew instead of comparing with it.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import gc
import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import pytest
import torch
from blockbuster import BlockBuster
from tests.support import forking

from w5xde_async.coordinator.run import shutdown

GOLDEN = Path(__file__).parent / "golden"
_DESCRIPTORS = Path("/proc/self/fd")
_SETTLE_S = 2.0
_AGAIN_S = 5.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write tests/golden anew instead of comparing")
    parser.addoption("--all-differential", action="store_true", help="all that torch's databases have (minutes)")
    parser.addoption("--all-failpoints", action="store_true", help="die at every failpoint, several times each")
    parser.addoption("--every-lie", action="store_true", help="have members say every value in every field, not a few")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "both_loops: run on asyncio's own loop and on uvloop")
    config.addinivalue_line("markers", "allow_leaks: the leak check is not for this test")
    config.addinivalue_line("markers", "processes: starts programs, by fork from one that has imported everything")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: programs here would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # How long an example takes says what else runs here; and what is drawn is the same in every run.
    hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("suite")
    if sys.version_info < (3, 11, 8) or (3, 12) <= sys.version_info < (3, 12, 2):
        ast.parse = _parsed_alone
    if sys.platform != "win32":
        import uvloop

        uvloop.new_event_loop().close()  # its first loop opens a pipe that the process keeps


_parse = ast.parse
_parsing = threading.RLock()


def _parsed_alone(*args: Any, **kwargs: Any) -> Any:
    """Before 3.11.8 and 3.12.2 a collection inside ast.parse may let another thread in, and both fail (gh-106905).

    Tracing parses in a thread of its own, pytest wherever it shows source.
    """
    with _parsing:
        collecting = gc.isenabled()
        gc.disable()
        try:
            return _parse(*args, **kwargs)
        finally:
            if collecting:
                gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            # pytest puts its handlers on every logger that does not, six times a test; torch has forty.
            logger.propagate = True
    gc.callbacks.append(_time_collections)
    _freeze()
    shared = getattr(session.config, "workerinput", {}).get("fork_server")
    if session.config.option.collectonly or sys.platform != "linux":
        return
    if any(item.get_closest_marker("processes") for item in session.items):
        # Now, so that it imports while other tests run.
        forking.running = forking.ForkServer(Path(shared) if shared else None)
        os.environ["TESTS_TRACED"] = str(forking.running.folder)  # what is traced is traced once


_LONG_S = 0.2
_began_s = _longest_s = 0.0


def _time_collections(phase: str, info: dict[str, int]) -> None:
    global _began_s, _longest_s
    if phase == "start":
        _began_s = time.thread_time()
    elif info["generation"] == 2:
        _longest_s = max(_longest_s, time.thread_time() - _began_s)


def _freeze() -> None:
    """All that there is now is looked at no more: most of a collection's time, and nearly every test has one."""
    global _longest_s
    gc.collect()
    gc.freeze()
    _longest_s = 0.0


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    done = yield
    if _longest_s > _LONG_S:  # torch imports much when it is first used, so do others, and keeps what it has traced
        _freeze()
    return done


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A process that runs tests for this one (pytest -n) is about to start: all of them share one server."""
    if sys.platform == "linux" and node.config.option.markexpr != "not slow":  # as make test says: none is needed
        if forking.running is None:
            forking.running = forking.ForkServer()
        node.workerinput["fork_server"] = str(forking.running.folder)


class _TooLong(KeyboardInterrupt):
    """asyncio keeps what a task or a callback raises, but for this and SystemExit; a test would wait for ever."""


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item) -> Generator[None, object, object]:
    armed = yield
    if sys.platform == "win32":
        return armed
    fail = signal.getsignal(signal.SIGALRM)
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    if left_s and callable(fail):
        asked = False

        def too_long(number: int, frame: FrameType | None) -> None:
            nonlocal asked
            loop = asyncio._get_running_loop()
            if loop is not None and not asked:  # between two callbacks: within the loop's own code it would lose one
                asked = True
                loop.call_soon_threadsafe(too_long, number, None)
                return
            asked = False
            try:
                fail(number, frame)
            except pytest.fail.Exception as failed:
                raise _TooLong(str(failed)) from None

        def again() -> None:
            signal.signal(signal.SIGALRM, too_long)
            signal.setitimer(signal.ITIMER_REAL, left_s, _AGAIN_S)

        item.stash[_AGAIN] = again
        again()
    return armed


@contextmanager
def _in_time() -> Iterator[None]:
    try:
        yield
    except _TooLong as late:
        pytest.fail(str(late))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    with _in_time():
        return (yield)


@pytest.hookimpl(trylast=True)  # after those that run tests for this process
def pytest_sessionfinish() -> None:
    if forking.running is not None:
        forking.running.close()
        forking.running = None


class _OneThreadsLoop(asyncio.SelectorEventLoop):
    """Refuses calls from other threads, as debug mode does; that mode also notes the stack of every future and task,
    which takes half of the time of a test."""

    def call_soon(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
        self._check_thread()  # type: ignore[attr-defined]
        return super().call_soon(*args, **kwargs)

    def call_at(self, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        self._check_thread()  # type: ignore[attr-defined]
        return super().call_at(*args, **kwargs)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    stock: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": _OneThreadsLoop}
    if item.get_closest_marker("both_loops") is None or sys.platform == "win32":
        return stock
    import uvloop

    return stock | {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def blocking_calls_fail() -> Iterator[None]:
    guard = BlockBuster(scanned_modules="w5xde_async")
    for name, file, function in (
        ("threading.Lock.acquire", "concurrent/futures/thread.py", "submit"),  # held for microseconds
        ("threading.Lock.acquire", "threading.py", "start"),
        ("threading.Lock.acquire", "asyncio/runners.py", "close"),  # uvloop joins a thread that has said it ends
        ("threading.Lock.acquire", "w5xde_async/telemetry/writer.py", "write"),  # a moment, and no second one in vain
        ("os.getcwd", "w5xde_async/telemetry/wording.py", "started_in"),  # it asks no disk
        ("os.getcwd", "w5xde_async/coordinator/service.py", "__init__"),
        ("os.getcwd", "w5xde_async/runtime.py", "start_process"),
    ):
        guard.functions[name].can_block_in(file, function)
    for blocks in guard.functions.values():
        blocks.can_block_in("torch/__init__.py", "<module>")  # imports read files
        blocks.can_block_in("<frozen importlib._bootstrap>", "_find_and_load")
        blocks.can_block_in("logging/__init__.py", {"handle", "acquire"})
    guard.activate()
    yield
    guard.deactivate()


@pytest.fixture(autouse=True)
def programs_are_forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if forking.running is not None and request.node.get_closest_marker("processes") is not None:
        monkeypatch.setattr(sys, "executable", str(forking.running.commands / "python"))


@pytest.fixture(autouse=True)
def no_accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is not None:
        return
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def garbage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of programs are called in this process, which goes on: what a test has left is collected."""
    monkeypatch.setattr(gc, "freeze", lambda: None)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process draw none: it would take a tenth of the suite's time. test_plot.py looks at pictures, and
    tests/process at those of programs."""
    monkeypatch.setattr(shutdown, "draw_loss", lambda *_: False)


@pytest.fixture
def as_a_program() -> Iterator[None]:
    """The test runs a program's own function, after which its process would end: until then that has its handlers."""
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, bytes], None]:
    """``golden(name, data)`` compares with ``tests/golden/name``, or writes it under ``--rewrite-golden``."""

    def check(name: str, data: bytes) -> None:
        path = GOLDEN / name
        if request.config.getoption("--rewrite-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        assert path.exists(), f"{path} is missing; pytest --rewrite-golden writes it"
        assert data == path.read_bytes(), f"{name} changed; if it had to, pytest --rewrite-golden"

    return check


# -- leaks


def _descriptors() -> set[tuple[str, str]]:
    found = set()
    if _DESCRIPTORS.exists():
        for entry in os.listdir(_DESCRIPTORS):
            try:
                target = os.readlink(_DESCRIPTORS / entry)
            except OSError:  # the listing's own
                continue
            if target.endswith((".ttf", ".so")):  # matplotlib keeps the fonts open that it has drawn with
                continue
            if target.startswith(("socket:", "pipe:", "anon_inode:")) or not target.startswith(("/dev", "/proc")):
                found.add((entry, target))
    return found


@functools.cache
def _use_cuda() -> None:
    """A process keeps what CUDA and its libraries open at their first use."""
    device = torch.device("cuda", torch.cuda.current_device())
    for given in (torch.ones(8, 8, 8, 8), torch.ones(8, 8, 8, 8, dtype=torch.bfloat16)):
        x = given.pin_memory().to(device, non_blocking=True).requires_grad_()
        torch.nn.functional.conv2d(x, torch.ones_like(x)).sum().backward()
        (x[0, 0] @ x[0, 1]).sum().backward()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        torch.ones(8, device=device).cpu()
    torch.cuda.synchronize()


def _handlers() -> list[object]:
    """What a program is told to end by: with another handler the next test would end otherwise."""
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def _watched(item: pytest.Item) -> bool:
    return item.get_closest_marker("allow_leaks") is None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    if item.get_closest_marker("gpu") is not None and torch.cuda.is_available():
        _use_cuda()
    torch.set_num_threads(1)  # before any fixture: another number gives other bits, the one that a test before has left
    item.stash[_BEFORE] = (set(threading.enumerate()), _descriptors(), _handlers())
    with _in_time():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    again = item.stash.get(_AGAIN, None)
    if again is not None:
        again()  # a test that failed has no timer any more, and what comes now may hang as well
    with _in_time():
        result = yield
    if not _watched(item):
        return result
    threads_before, descriptors_before, handlers = item.stash[_BEFORE]
    if _handlers() != handlers:
        pytest.fail(f"left behind: other handlers of signals, {_handlers()} in place of {handlers}", pytrace=False)
    deadline = time.monotonic() + _SETTLE_S
    while True:
        threads = [thread for thread in threading.enumerate() if thread not in threads_before]
        descriptors = _descriptors() - descriptors_before
        if not threads and not descriptors:
            return result
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: threads {threads}, descriptors {sorted(descriptors)}", pytrace=False)
        gc.collect()
        time.sleep(0.01)


_AGAIN = pytest.StashKey[Callable[[], None]]()
_BEFORE = pytest.StashKey[tuple[set[threading.Thread], set[tuple[str, str]], list[object]]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # the long ones first, the short fill the gaps
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj) and _watched(item):
            item.obj = _leaving_no_task(item.obj)


def _leaving_no_task(test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    async def checked(*args: Any, **kwargs: Any) -> None:
        before = asyncio.all_tasks()
        await test(*args, **kwargs)
        for _ in range(10):  # what was cancelled or closed just now may finish
            left = asyncio.all_tasks() - before
            if not left:
                return
            await asyncio.sleep(0)
        pytest.fail(f"left behind: tasks {[task.get_name() for task in left]}", pytrace=False)

    return checked
