"""Islands in virtual time: a process for each rank, on a machine and with a link of its own.

What ranks tell each other takes no link of the simulated network. It comes to an end, as gloo's collectives do, when
the process of a rank has ended; while one stands still, the others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.simulator.loop import ComputeExecutor, Host
from tests.simulator.model import IntegerEngine
from tests.support.circle import Circle, Gone

from w5xde_async.compute.block import LeafSpec, Task
from w5xde_async.plan.shares import Share
from w5xde_async.worker.executors.island import Rank

__all__ = ["VirtualCircle"]

_LOOK_S = 0.02  # how often who waits for another rank looks


class VirtualCircle(Circle):
    """What the ranks of one island share. All methods are called on compute threads, one at a time, but for ``end``."""

    def __init__(self, ranks: int, share: Share, *, seed: int) -> None:
        super().__init__(ranks, share, seed=seed)
        self.ended = False
        self._boards: dict[int, dict[int, Any]] = {}  # of each meeting, by its number
        self._met = [0] * ranks
        self._told: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]

    def meet(self, rank: int, given: Any) -> list[Any]:
        number, self._met[rank] = self._met[rank], self._met[rank] + 1
        board = self._boards.setdefault(number, {})
        board[rank] = given
        self._until(lambda: len(board) == self.ranks)
        self._boards.pop(number - 1, None)
        return [board[rank] for rank in range(self.ranks)]

    def end(self) -> None:
        self.ended = True

    def engine(self, job: Any, spec: LeafSpec, bucket_bytes: int) -> Any:
        return IntegerEngine(job, spec, bucket_bytes=bucket_bytes)

    def of_host(self, number: int, host: Host) -> Rank:
        """The rank that is computed on ``host``."""

        def fails(task: Task, rank: int) -> bool:
            failing, host.failing_leaf = host.failing_leaf, False
            return failing

        return replace(self.rank(number, fails=fails), lockstep=_Lockstep(self, number))

    def _until(self, holds: Callable[[], object]) -> None:
        while not holds():
            if self.ended:
                raise Gone
            ComputeExecutor.sleep(_LOOK_S)


class _Lockstep:
    def __init__(self, circle: VirtualCircle, rank: int) -> None:
        self._circle, self._rank = circle, rank

    def announce(self, turn: int, number: int) -> None:
        if self._circle.ended:
            raise Gone
        for told in self._circle._told[1:]:
            told.append((turn, number))

    def hear(self) -> tuple[int, int]:
        told = self._circle._told[self._rank]
        self._circle._until(lambda: told)
        return told.pop(0)

    def union(self, numbers: Sequence[int], count: int) -> list[int]:
        return sorted(set().union(*self._circle.meet(self._rank, numbers)))
