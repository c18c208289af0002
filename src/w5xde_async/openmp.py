"""How torch's threads wait for each other on the CPU. No imports of ours: it has to be said before torch is loaded."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import TypeVar

_SPINS = "GOMP_SPINCOUNT"
_T = TypeVar("_T")
_R = TypeVar("_R")


def spin_briefly() -> None:
    """Let OpenMP's threads soon sleep where they wait for each other, unless the environment says how they wait.

    By default one that waits spins for milliseconds. Where others want the cores too, workers or anybody, it spins
    while the thread that it waits for has none, at every operation. Small operations follow each other too closely to
    sleep between them. A step of 17 layers of 128 units with two threads on two cores took 1.95 ms by default, 10.9
    where they slept at once, and 2.2 like this; beside three busy processes 66, 11 (after a tenth of this) and 23. An
    update of Adam (10.9 million values) beside two took 63, 74 and 33 ms, and 31 with one thread. Where there are many
    cores some are idle, and it takes longer until the last of many threads is awake: those 17 layers took sixteen on
    sixteen cores 2.7 ms by default, 3.8 like this, and 3.0 with ten times as much, which such a machine gets.
    To be called before torch is imported (GNU's OpenMP, which torch for Linux has).
    """
    if not {_SPINS, "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ[_SPINS] = "1000" if (os.cpu_count() or 1) <= _FEW else "10000"  # 1000: some 20 to 50 us


def keep_to(cores: int) -> None:
    """Have torch compute with at most so many threads, in this one and in all that start later, unless the environment
    says with how many."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > cores:
        torch.set_num_threads(cores)


def spare_this_thread(threads: int) -> None:
    """Have torch compute with one thread on this one, an event loop's, and with ``threads`` on all that start later.

    What a loop computes is small: to wake a second thread for it takes longer, and where every core has work, its end
    is waited for until that thread has its turn, milliseconds later.
    """
    import torch

    torch.set_num_threads(1)
    other = threading.Thread(target=torch.set_num_threads, args=(threads,))  # the count of threads that start later
    other.start()
    other.join()


def release_helpers() -> None:
    """End the threads that help this one to compute; it gets others where it needs them again.

    GNU's OpenMP has helpers for each thread that has computed with more than one, for as long as that lives. As soon as
    there are more of them all than cores, they sleep between any two operations in place of spinning: a step of many
    small ones (17 layers of 128 units, 64 samples) took 10.3 ms in place of 1.95. So whoever leaves the computing to
    another thread has none (OpenMP 5.0, section 3.2.44).
    """
    with suppress(OSError, AttributeError):  # torch without OpenMP, or with an older one
        ctypes.CDLL(None).omp_pause_resource_all(_HARD)


class alone:
    """This thread computes by itself meanwhile, also what torch would share out among its helpers.

    For what several threads do side by side; and sums that are shared out have other bits for each number of threads.

    >>> with alone():
    ...     rows = dataset[0]
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        import torch

        self._before = torch.get_num_threads()  # torch sets it when a thread first asks or computes: not after this
        compute_with(1, self._before)

    def __exit__(self, *_: object) -> None:
        compute_with(self._before, 1)


def side_by_side(work: Callable[[_T], _R], items: Sequence[_T], nbytes: int) -> list[_R]:
    """``work`` of each item, in order, by as many threads as torch would share one operation out to, each by itself.

    For long rows of operations that are not shared out at no cost: there, one waits for all others at every one. An
    operation takes a millisecond at best: where they are small, threads wait for Python's lock between them, and eight
    are slower than one (int8, 124 million values: 284 ms by one, 625 by eight with 64 Ki at once, 71 with 1 Mi).
    ``nbytes`` are worked on in all: of few, this thread does them all. Raises what one of the items raises.
    """
    import torch

    if len(items) == 1:
        return [work(items[0])]
    threads = min(torch.get_num_threads(), len(items), _MOST, nbytes // _WORTH_A_THREAD)
    left, done = iter(range(len(items))), dict[int, _R]()

    def some() -> None:
        with alone():
            for index in left:
                done[index] = work(items[index])

    if threads < 2:
        some()
    else:
        with ThreadPoolExecutor(threads - 1, thread_name_prefix="w5xde-beside") as others:
            running: list[Future[None]] = []
            with suppress(RuntimeError):  # it can start no thread: those that there are do it
                running.extend(others.submit(some) for _ in range(threads - 1))
            some()
            for one in running:
                one.result()
    return [done[index] for index in range(len(items))]


def compute_with(threads: int, before: int) -> None:
    """``torch.set_num_threads`` for this thread alone: that also sets what MKL computes with in all of them.

    ``before``: what ``torch.get_num_threads()`` has said in this thread, which settles it.
    """
    if threads != before and (told := _set_num_threads()) is not None:
        told(threads)


@cache
def _set_num_threads() -> Callable[[int], object] | None:
    """OpenMP's own, which to look up takes longer than to call; None where there is none."""
    try:
        return ctypes.CDLL(None).omp_set_num_threads
    except (OSError, AttributeError):
        return None


_HARD = 2
_FEW = 4  # cores
_WORTH_A_THREAD = 4 << 20  # bytes: to start and end one takes 0.1 ms
_MOST = 8  # threads side by side: they share Python's lock
