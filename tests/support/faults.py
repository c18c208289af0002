"""What is to be done to a run (actions, from a seed) and what was seen of it (its record)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from tests.support.processes import Event


@dataclass(frozen=True, kw_only=True)
class Action:
    """One fault. ``kind``:

    kill    SIGKILL to a worker; a new one is started
    stop    SIGSTOP to a worker, SIGCONT after ``seconds``
    drain   SIGTERM to a worker; a new one is started
    crash   SIGKILL to the coordinator; the same command is started again
    reset   RST on the connection of a worker behind a proxy
    hold    nothing passes a proxy in one direction for ``seconds``
    lag     50 ms of delay and 50 ms of jitter through a proxy, each way, for ``seconds``
    """

    kind: str
    at_step: int | None = None
    at_s: float | None = None  # after the first commit
    seconds: float = 0.0


def at_steps(seed: int, kinds: Mapping[str, int], first: int, last: int, *, seconds: float = 0.0) -> list[Action]:
    """So many of each kind, each at a step of its own between ``first`` and ``last``."""
    wanted = [kind for kind, count in kinds.items() for _ in range(count)]
    chosen = random.Random(f"{seed}:steps")
    steps = chosen.sample(range(first, last + 1), len(wanted))
    return sorted(
        (Action(kind=kind, at_step=step, seconds=seconds) for kind, step in zip(wanted, steps, strict=True)),
        key=lambda action: action.at_step or 0,
    )


def per_minute(seed: int, rates: Mapping[str, float], span_s: float, *, seconds: float = 0.0) -> list[Action]:
    """Faults at seeded moments within ``span_s``: one of a kind in each interval of a minute over its rate."""
    actions = []
    for kind, rate in rates.items():
        moments = random.Random(f"{seed}:{kind}")
        actions += [
            Action(kind=kind, at_s=(number + moments.random()) * 60 / rate, seconds=seconds)
            for number in range(int(rate * span_s / 60 + 0.5) if rate else 0)
        ]
    return sorted(actions, key=lambda action: action.at_s or 0.0)


class Commit(NamedTuple):
    """``at`` is time.monotonic's, in the coordinator; ``tasks`` counts its asyncio tasks then."""

    at: float
    step: int
    seconds: float
    leaves: int
    samples: int
    num_workers: int
    tasks: int


@dataclass
class Record:
    """What happened. ``fired`` counts faults that took effect."""

    fired: Counter[str] = field(default_factory=Counter)
    commits: list[Commit] = field(default_factory=list)
    starts: list[Event] = field(default_factory=list)
    crashed_at: list[tuple[float, int]] = field(default_factory=list)  # when, and the last step that was seen
    finished: Event = field(default_factory=dict)
    kept: list[Event] = field(default_factory=list)  # of the kinds asked for

    @property
    def digest(self) -> str:
        return str(self.finished["digest"])

    @property
    def span_s(self) -> float:
        """From the first commit to the last."""
        return self.commits[-1].at - self.commits[0].at

    @property
    def longest_gap_s(self) -> float:
        """Between two commits, restarts of the coordinator included."""
        return max((b.at - a.at for a, b in pairwise(self.commits)), default=0.0)

    @property
    def surviving_steps(self) -> list[int]:
        """Steps in the order of their commits, less those that a crash took back."""
        steps: list[int] = []
        for commit in self.commits:
            while steps and steps[-1] >= commit.step:
                steps.pop()
            steps.append(commit.step)
        return steps

    @property
    def steps_recomputed(self) -> int:
        """Commits that a crash of the coordinator took back."""
        return sum(
            max(0, step - int(start["resumed_step"]))
            for (_, step), start in zip(self.crashed_at, self.starts[1:], strict=False)
        )
