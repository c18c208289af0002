"""How torch's threads wait for each other in our programs, and whose helpers there are."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.support import jobs
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async import openmp
from w5xde_async.coordinator import service
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.parameters.owner import ParameterOwner
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout


@pytest.fixture(autouse=True)
def nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # put back after the test
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("cores", "spins"), [(None, "1000"), (2, "1000"), (4, "1000"), (16, "10000")])
def test_they_spin_briefly(cores: int | None, spins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    openmp.spin_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == spins


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "0"), ("OMP_WAIT_POLICY", "active")])
def test_what_the_environment_says_counts(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    before = dict(os.environ)
    openmp.spin_briefly()
    assert dict(os.environ) == before


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="only Linux tells of a process's threads")
def test_helpers_are_released_and_come_again() -> None:
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    seen: list[set[str]] = []

    def compute() -> None:
        torch.set_num_threads(3)
        for _ in range(2):
            before = threads()
            torch.ones(1 << 20).add_(1)
            seen.append(threads() - before)
            openmp.release_helpers()
            until = time.monotonic() + 10.0
            while threads() & seen[-1] and time.monotonic() < until:  # one that has ended is listed a little longer
                os.sched_yield()
            seen.append(threads() & seen[-1])

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert [len(helpers) for helpers in seen] == [2, 0, 2, 0]


class Computed(nn.Linear):
    """Its first values take more than one thread."""

    def __init__(self) -> None:
        super().__init__(1024, 512)
        with torch.no_grad():
            self.weight.add_(1)


def _prepare() -> None:
    job = replace(jobs.mlp_sgd(), model=Computed, dataset=TensorDataset(torch.zeros(8, 1024), torch.zeros(8, 512)))
    service._prepared(replace(job, loss=nn.functional.mse_loss), CoordinatorConfig(), None, lambda: "0" * 16)


def _owner() -> ParameterOwner:
    layout = Layout.of(model := Computed())
    state = FlatState(layout)
    state.copy_from(model)
    return ParameterOwner(SimpleNamespace(layout=layout, state=state, clock=time.monotonic, executor=object()))  # type: ignore[arg-type]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="only Linux tells of a process's threads")
@pytest.mark.parametrize(
    "made", [lambda: _prepare, lambda: _owner().snapshot, lambda: _owner().trains_finite], ids=["start", "copy", "look"]
)
def test_a_thread_of_the_coordinator_that_computes_now_and_then_keeps_no_helpers(
    made: Callable[[], Callable[[], object]],
) -> None:
    """With as many as cores in all, those of the event loop's thread slept at every operation: 7 ms became 20."""
    own = set(os.listdir("/proc/self/task"))
    left: set[str] = set()

    def compute() -> None:
        torch.set_num_threads(3)
        work = made()
        openmp.release_helpers()
        work()
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            left.clear()
            left.update(set(os.listdir("/proc/self/task")) - own - {str(threading.get_native_id())})
            if not left:
                return
            os.sched_yield()

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert not left


def test_torch_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    openmp.release_helpers()


def test_alone_a_thread_computes_by_itself_and_others_do_not() -> None:
    def others() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    seen: list[int] = []

    def compute() -> None:
        torch.set_num_threads(3)
        with openmp.alone():
            seen.extend((torch.get_num_threads(), others()))
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert seen == [1, 3, 3]


@pytest.mark.parametrize(("items", "nbytes", "threads"), [(9, 1 << 30, 3), (2, 1 << 30, 2), (9, 1 << 20, 1), (0, 0, 1)])
def test_side_by_side_each_thread_computes_by_itself(items: int, nbytes: int, threads: int) -> None:
    seen, together = set[int](), threading.Barrier(max(threads, 1))

    def work(item: int) -> int:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            together.wait(10)  # each of them has something to do
        assert torch.get_num_threads() == 1
        return 2 * item

    def run() -> list[int]:
        torch.set_num_threads(3)
        torch.ones(1).add_(1)
        found = openmp.side_by_side(work, range(items), nbytes)
        assert torch.get_num_threads() == 3
        return found

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(run).result() == [2 * item for item in range(items)]
    finally:
        torch.set_num_threads(before)
    assert len(seen) == (threads if items else 0)


@pytest.mark.parametrize("nbytes", [0, 1 << 30])
def test_what_one_of_them_raises_is_raised_when_all_are_done(nbytes: int) -> None:
    running = set[int]()

    def work(item: int) -> None:
        running.add(item)
        if item == 3:
            raise ValueError("not this one")
        running.discard(item)

    with pytest.raises(ValueError, match="not this one"):
        openmp.side_by_side(work, range(8), nbytes)
    assert running == {3}
