"""Who has tried a piece of work and where, so that one machine, or one peer under many names, ends no run.

A worker runs at a **place**: its host, and whether it computes with the job's own code. Work that fails everywhere at
one place may be done at another; it is to blame only when every place that is present has tried it.

A worker that vanishes may have died of its work, or may only look so; one that says that the work raises may lie, or
be broken. So a worker that is present, has delivered results and has not tried the work itself is believed more than
any number of workers that never delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from w5xde_async.plan.membership import Departed

_REMEMBERED = 4096  # workers that have left


class Places:
    """Where workers run. One of which nothing was said is a place by itself."""

    def __init__(self, present: Callable[[], Iterable[str]] = tuple) -> None:
        """``present``: workers that take work now."""
        self._present = present
        self._places: dict[str, Hashable] = {}
        self._delivered: set[str] = set()  # of these, whose results counted
        self._departed = Departed(_REMEMBERED)

    def joined(self, worker: str, place: Hashable) -> None:
        """``worker`` runs at ``place``."""
        self._departed.returned(worker)
        self._places[worker] = place

    def left(self, worker: str) -> None:
        """``worker`` is gone."""
        if worker in self._places and (forgotten := self._departed.left(worker)) is not None:
            del self._places[forgotten]
            self._delivered.discard(forgotten)

    def delivered(self, worker: str) -> None:
        """A result of ``worker`` counts."""
        if worker in self._places:
            self._delivered.add(worker)

    def has_delivered(self, worker: str) -> bool:
        """Whether a result of ``worker`` has counted."""
        return worker in self._delivered

    def kills(self, deaths: Mapping[str, bool], most: int) -> bool:
        """Whether work is to blame for ``deaths``: who vanished while it had it, and whether that one had delivered."""
        return len(deaths) >= most and self._blamed(deaths, most)

    def fails(self, failures: Sequence[str], most: int) -> bool:
        """Whether work is to blame for ``failures``: the workers on which it raised, each as often as it did."""
        return len(failures) >= most and self._blamed({worker: worker in self._delivered for worker in failures}, most)

    def _blamed(self, tried: Mapping[str, bool], most: int) -> bool:
        """``tried``: who failed, and whether results of theirs had counted."""
        if self.untried(tried):
            return False
        if sum(tried.values()) >= most:
            return True
        return not any(worker in self._delivered and worker not in tried for worker in self._present())

    def of(self, worker: str) -> Hashable:
        """Where a worker runs, or ran."""
        return self._places.get(worker, worker)

    def untried(self, tried: Iterable[str]) -> bool:
        """Whether somebody is present at a place where none of ``tried`` was."""
        return self._elsewhere(self._present(), tried)

    def leaves(self, worker: str, tried: Collection[str], others: Iterable[str]) -> bool:
        """Whether ``worker`` leaves it to ``others``: it, or its place, has failed on it, and one of them has not."""
        if not tried:
            return False
        if worker in tried and any(other not in tried for other in others):
            return True
        return self.of(worker) in {self.of(one) for one in tried} and self._elsewhere(others, tried)

    def _elsewhere(self, workers: Iterable[str], tried: Iterable[str]) -> bool:
        places = {self.of(worker) for worker in tried}
        return any(self.of(worker) not in places for worker in workers)
