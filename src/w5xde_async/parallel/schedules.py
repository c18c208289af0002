"""In which order a stage of a pipeline computes. Pure: positions and microbatches are numbers.

Every schedule keeps this: a stage's forward passes are in the microbatches' order, and so are its backward passes. So
gradients are added as in one process, and every order of one stage fits those of its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

SCHEDULES = ("1f1b", "gpipe")


class Pass(NamedTuple):
    """One microbatch, numbered in its block, forward or backward."""

    microbatch: int
    forward: bool


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> Iterator[Pass]:
    """1F1B (PipeDream-Flush, Narayanan et al. 2021) over all of a block's leaves: at most ``stages - stage``
    microbatches are under way at a stage, and the pipeline fills and drains once a block."""
    ahead = min(stages - 1 - stage, microbatches)
    for number in range(ahead):
        yield Pass(number, True)
    for number in range(microbatches):
        if number + ahead < microbatches:
            yield Pass(number + ahead, True)
        yield Pass(number, False)


def all_forward_all_backward(leaves: Sequence[int]) -> Iterator[Pass]:
    """GPipe (Huang et al. 2019), leaf by leaf. ``leaves``: the microbatches of each."""
    first = 0
    for count in leaves:
        for number in range(first, first + count):
            yield Pass(number, True)
        for number in range(first, first + count):
            yield Pass(number, False)
        first += count


def passes(schedule: str, stage: int, stages: int, leaves: Sequence[int]) -> Iterator[Pass]:
    """A block's passes at one stage. Raises KeyError for a schedule that is none."""
    if schedule == "gpipe":
        return all_forward_all_backward(leaves)
    if schedule == "1f1b":
        return one_forward_one_backward(stage, stages, sum(leaves))
    raise KeyError(schedule)
