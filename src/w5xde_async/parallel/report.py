"""What an island's ranks tell each other at the end of a block, and the one outcome that they make of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from msgspec import Struct, msgpack

from w5xde_async.compute.block import ComputedBlock, Task
from w5xde_async.compute.engine import LeafError
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.shard_memory import ShardMemory
from w5xde_async.wire.messages import MOST_METRICS


class Report(Struct, frozen=True, kw_only=True, array_like=True):
    """One rank's part. ``leaves`` that it computed, in the step's numbering; losses and metrics are theirs, in order.

    ``firsts``: of ``names``, which of ``leaves`` returned each first; empty where all return the same.
    ``untouched`` and ``absent``: what is so as far as this rank knows; None where it knows nothing. ``failed``: the
    leaf on which the job's code raised, or -1.
    """

    leaves: list[int] = []
    losses: list[float] = []
    names: list[str] = []
    firsts: list[int] = []
    metrics: list[float] = []
    untouched: list[int] | None = None
    absent: list[int] | None = None
    splits: int = 0
    drew: bool = False
    failed: int = -1
    error: str = ""
    traceback: str = ""
    device_lost: bool = False

    @classmethod
    def of(cls, leaves: Sequence[int], outcome: ComputedBlock) -> Report:
        """Of leaves that were computed."""
        return cls(
            leaves=list(leaves),
            losses=list(outcome.losses),
            names=list(outcome.metric_names),
            firsts=list(outcome.firsts),
            metrics=list(outcome.metrics),
            untouched=list(outcome.untouched),
            absent=list(outcome.absent),
            splits=outcome.splits,
            drew=outcome.drew,
        )

    @classmethod
    def of_failure(cls, error: LeafError) -> Report:
        """Of a leaf that failed."""
        return cls(
            failed=error.leaf, error=error.error, traceback=error.traceback, device_lost=error.device_lost
        )  # fmt: skip


def only(task: Task, leaves: Sequence[int]) -> Task:
    """A task with the sample counts of these of its leaves alone, numbered in the step."""
    return replace(task, samples=tuple(task.samples[leaf - task.start] for leaf in leaves))


_decode = msgpack.Decoder(Report).decode


def exchange(group: Group, mine: Report) -> list[Report]:
    """Every rank's report. Raises msgspec.DecodeError for what is none."""
    return [_decode(data) for data in group.bytes_of_all(msgpack.encode(mine))]


def raise_failure(reports: Sequence[Report], own: LeafError | None, vectors: Sequence[ShardMemory]) -> None:
    """Raises the LeafError of the first leaf that failed, on every rank the same. ``vectors``: sent from by then."""
    failed = [report for report in reports if report.failed >= 0]
    if not failed:
        return
    first = min(failed, key=lambda report: report.failed)
    held = cast(Any, tuple(vectors))
    if own is not None and own.leaf == first.failed:
        own.vectors = held
        raise own
    raise LeafError.told(first.failed, first.error, first.traceback, held, device_lost=first.device_lost)


def outcome_of(
    reports: Sequence[Report], *, rank: int, compute_s: float, vectors: Sequence[ShardMemory]
) -> ComputedBlock:
    """The block's outcome as rank ``rank`` gives it out."""
    computed = [report for report in reports if report.leaves]
    names: dict[str, int] = {}
    losses: list[float] = []
    metrics: list[float] = []
    if rank == 0:
        rows: list[tuple[int, float, dict[str, float]]] = []
        for report in computed:
            width = len(report.names)
            for number, leaf in enumerate(report.leaves):
                values = report.metrics[number * width : (number + 1) * width]
                rows.append((leaf, report.losses[number], dict(zip(report.names, values, strict=True))))
        rows.sort(key=lambda row: row[0])
        # As they come leaf by leaf; a leaf that lacks one has NaN, as has one whose value that is.
        numbers = {leaf: number for number, (leaf, *_) in enumerate(rows)}
        found = (
            (numbers[report.leaves[report.firsts[at] if report.firsts else 0]], at, name)
            for report in computed
            for at, name in enumerate(report.names)
        )
        for first, _, name in sorted(found):
            if name in names or len(names) < MOST_METRICS:
                names.setdefault(name, first)
        for _, loss, row in rows:
            losses.append(loss)
            metrics.extend(row.get(name, math.nan) for name in names)
    return ComputedBlock(
        losses=tuple(losses),
        metric_names=tuple(names),
        metrics=tuple(metrics),
        untouched=_in_all([report.untouched for report in reports]),
        absent=_in_all([report.absent for report in reports]),
        splits=max(report.splits for report in reports),
        compute_s=compute_s,
        vectors=cast(Any, tuple(vectors)),
        drew=any(report.drew for report in reports),
        firsts=tuple(names.values()),
    )


def _in_all(lists: Sequence[list[int] | None]) -> tuple[int, ...]:
    known = [set(numbers) for numbers in lists if numbers is not None]
    return tuple(sorted(known[0].intersection(*known[1:]))) if known else ()
