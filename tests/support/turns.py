"""Streaming as it runs: whose turn it is, by the coordinator's own bookkeeping, and fragments that are strided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from w5xde_async.coordinator.outer.local_step_schedule import LocalStepSchedule
from w5xde_async.plan.pacing import Pacing, PacingConfig
from w5xde_async.updates.fragments import Fragment
from w5xde_async.updates.quorum import QuorumConfig


def strided(pieces: Sequence[tuple[int, int]], num_fragments: int) -> tuple[Fragment, ...]:
    """Every ``num_fragments``-th piece, as a layout's buckets are dealt out."""
    return tuple(Fragment(tuple(pieces[index::num_fragments])) for index in range(num_fragments))


def taking_turns(num_fragments: int, period: int) -> Iterator[list[int]]:
    """The fragments that one worker, which nothing delays, is to submit after each inner step from the first on."""
    turns = LocalStepSchedule(
        num_fragments=num_fragments, inner_steps=period, pacing=Pacing(PacingConfig()), quorum=QuorumConfig()
    )  # fmt: skip
    turns.join("one", 0)
    leases = count()
    while True:
        due = turns.granted("one", 0.0)
        for fragment in due:
            lease = next(leases)
            turns.asked("one", lease, fragment)
            turns.answered("one", lease, 0.0)
        yield due
