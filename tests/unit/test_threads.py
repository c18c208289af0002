"""Calls that use their caller's memory in threads of a pool: none runs when its caller takes it to be over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from w5xde_async.codecs import lossless
from w5xde_async.openmp import side_by_side
from w5xde_async.threads import ended, submitted


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on no thread can be started, as under ``ulimit -u``."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    return lambda: monkeypatch.setattr(threading.Thread, "start", refuse)


def test_what_is_called_in_a_thread_is_its_future(pool: ThreadPoolExecutor) -> None:
    assert submitted(pool.submit, lambda: 3).result() == 3
    with pytest.raises(ZeroDivisionError):
        submitted(pool.submit, lambda: 1 // 0).result()


def test_what_no_thread_could_be_started_for_is_never_called(
    pool: ThreadPoolExecutor, no_threads: Callable[[], None]
) -> None:
    free, called = threading.Event(), list[int]()
    busy = pool.submit(free.wait)  # a thread that will look into the queue
    no_threads()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        submitted(pool.submit, lambda: called.append(1))
    free.set()
    busy.result()
    pool.shutdown()  # when the queue is empty
    assert called == []


def test_what_a_thread_has_begun_meanwhile_is_waited_for() -> None:
    def submit(work: Callable[[], None]) -> None:
        work()
        raise RuntimeError("can't start new thread")

    assert submitted(submit, lambda: 3).result() == 3


def test_a_pool_that_is_shut_down_says_so(pool: ThreadPoolExecutor) -> None:
    pool.shutdown()
    with pytest.raises(RuntimeError):
        submitted(pool.submit, lambda: 3)


async def test_whoever_is_cancelled_waits_all_the_same() -> None:
    job: Future[int] = Future()
    job.set_running_or_notify_cancel()
    interrupts: list[bool] = []
    waiting = asyncio.ensure_future(ended(job, lambda: interrupts.append(True)))
    for cancelled in (1, 2):
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
        assert len(interrupts) == cancelled
    job.set_exception(ValueError("seen"))
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_what_has_ended_is_given() -> None:
    job: Future[int] = Future()
    job.set_result(3)
    assert (await ended(job)).result() == 3


def test_work_side_by_side_is_done_by_those_that_there_are(
    no_threads: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    no_threads()
    assert side_by_side(lambda item: item + 1, range(5), 1 << 30) == [1, 2, 3, 4, 5]
    assert lossless._each(lambda item: item + 1, range(1000)) == list(range(1, 1001))
