"""How torch's threads wait for each other in our programs, and whose helpers there are."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from w5xde_async import openmp


@pytest.fixture(autouse=True)
def nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # put back after the test
        monkeypatch.delenv(name)


def test_they_spin_briefly() -> None:
    openmp.spin_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"


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
            seen.append(threads() & seen[-1])

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert [len(helpers) for helpers in seen] == [2, 0, 2, 0]


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
