"""Steps of an inner optimizer on the shards of an island: what one process makes of them, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from tests.support import island_jobs, island_programs, islands
from tests.unit import test_parallel_pipeline as traced_jobs
from tests.unit import test_parallel_tensors as tensor_jobs
from tests.unit.test_atoms import Transformer
from torch import Tensor

from w5xde_async.compute.block import LeafSpec
from w5xde_async.compute.engine import Engine
from w5xde_async.compute.inner import describe_inner
from w5xde_async.job import Job
from w5xde_async.parallel.building import island_engine
from w5xde_async.parallel.engine import IslandEngine, Traced
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.shape import IslandShape
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import Shard
from w5xde_async.plan.shares import leaves_of
from w5xde_async.plan.tree import Block
from w5xde_async.updates.outer import bucket_fragments
from w5xde_async.wire.messages import VerdictCode
from w5xde_async.worker.executors.island import sum_across
from w5xde_async.worker.executors.published import Published
from w5xde_async.worker.executors.replicas import SteppingReplica
from w5xde_async.worker.executors.shard_engine import ShardEngine
from w5xde_async.worker.island_rank import GroupLockstep

SAMPLES = [(4, 4, 4), (4, 2)]
Optimizer = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def _cut(shard: Shard, whole: FlatState, own: FlatState) -> None:
    """Into ``own`` what is a rank's."""
    for group in shard.layout.groups:
        runs = [run for run in shard.runs if run.group == group.index]
        if runs:
            own.groups[group.index].copy_(torch.cat([whole.groups[run.group][run.begin : run.end] for run in runs]))


class _Stepping:
    """A replica, and what is published to it."""

    def __init__(self, engine: Any, inner: dict[str, Any], shard: Shard | None) -> None:
        self.published, self.shard = Published(engine.layout), shard
        self.published.version = 0
        self.replica = SteppingReplica(engine, self.published, msgpack.packb(inner))

    def publish(self, whole: FlatState, version: int) -> None:
        if self.shard is None:
            self.published.state.copy_groups(whole)
        else:
            _cut(self.shard, whole, self.published.state)
        self.published.version = version
        for bucket in self.published.layout.buckets:
            self.published.newest[bucket.index] = version


def _engine(job: Job, mode: str, group: Group) -> IslandEngine:
    source: Job | Traced = job
    if mode == "pp":
        atoms = island_programs.atoms_of(job, group)
        source = Traced(atoms.program, atoms.layout, 1 << 32)
    shape = IslandShape(mode, group.size)
    return island_engine(shape, source, LeafSpec.of(job), group, bucket_bytes=islands.BUCKET_BYTES)


def _walk(
    job: Job, mode: str, optimizer: Optimizer, group: Group, *, clip: float | None = None,
    streaming: Sequence[Any] | None = None, alike: Callable[[Tensor, Tensor], None],
) -> None:  # fmt: skip
    alone = Engine(job, bucket_bytes=islands.BUCKET_BYTES)
    island = _engine(job, mode, group)
    layout: Layout = alone.layout
    made = describe_inner(optimizer(alone.model.parameters()), layout, alone.model)
    inner = {**made, "clip": clip, "streaming": streaming}
    lockstep = GroupLockstep(group)
    together = ShardEngine(island, partial(sum_across, lockstep))
    one, other = _Stepping(alone, inner, None), _Stepping(together, inner, island.shard)
    rates = [group["lr"] for group in made["groups"]]
    fragments = bucket_fragments(layout, streaming[0] if streaming else 1)
    for round_ in range(2):
        state = islands.changed_state(job, 5 + round_)
        for replica in (one, other):
            replica.publish(state, round_)
        for samples in SAMPLES:
            batches = island_jobs.batches(job, samples)
            mine = leaves_of(Block(0, len(samples)), island.share, group.size)[group.rank]
            expected = one.replica.compute(
                islands.task(batches, samples, range(len(samples))), rates, lambda *_: None
            )  # fmt: skip
            outcome = other.replica.compute(islands.task(batches, samples, mine), rates, lambda *_: None)
            if not group.rank:
                alike(torch.tensor(outcome.losses), torch.tensor(expected.losses))
            assert outcome.absent == expected.absent
            for vector in outcome.vectors:
                together.release(vector)
        for lease, fragment in enumerate(fragments):
            whole, version = one.replica.submission(lease, fragment)
            part, same = other.replica.submission(lease, fragment)
            assert version == same
            for number in fragment:
                runs = island.shard.pieces(layout.buckets[number])
                wanted = [whole.group(run.group)[run.begin : run.end] for run in runs]
                if runs:
                    alike(part.buckets[number], torch.cat(wanted))
            for replica in (one.replica, other.replica):
                replica.settle([lease], VerdictCode.APPLIED if lease else VerdictCode.STALE)
    island.close()
    alone.close()


def _equal(mine: Tensor, wanted: Tensor) -> None:
    assert torch.equal(islands.bits(mine), islands.bits(wanted)), (mine - wanted).abs().max()


def _of_jobs(optimizer: str, group: Group) -> None:
    for mode in ("dp", "fsdp"):
        _walk(island_jobs.normed(), mode, OPTIMIZERS[optimizer], group, alike=_equal)


def _of_a_program(optimizer: str, group: Group) -> None:
    job = traced_jobs._job(Transformer, traced_jobs._tokens(), traced_jobs._words)
    _walk(job, "pp", OPTIMIZERS[optimizer], group, alike=_equal)


def _streams(mode: str, group: Group) -> None:
    _walk(island_jobs.transformer(), mode, OPTIMIZERS["adamw"], group, streaming=[2, 1, 0.5], alike=_equal)


def _close(mine: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-6)


def _clips(group: Group) -> None:
    """The norm is that of all ranks' gradients, added in another order."""
    _walk(island_jobs.transformer(), "fsdp", OPTIMIZERS["sgd"], group, clip=0.1, alike=_close)


def _tensor_parallel(group: Group) -> None:
    """Its layers' sums are added in another order."""
    job = tensor_jobs.job(model=partial(tensor_jobs.Model, dropout=0.0))
    _walk(job, "tp", OPTIMIZERS["sgd"], group, alike=_close)


def _skips(group: Group) -> None:
    """A gradient that is not finite on one rank is no step on any."""
    job = replace(island_jobs.mlp(), seed=9)
    engine = _engine(job, "fsdp", group)
    together = ShardEngine(engine, partial(sum_across, GroupLockstep(group)))
    alone = Engine(job, bucket_bytes=islands.BUCKET_BYTES)
    made = describe_inner(OPTIMIZERS["sgd"](alone.model.parameters()), alone.layout, alone.model)
    stepping = _Stepping(together, {**made, "clip": None, "streaming": None}, engine.shard)
    stepping.publish(islands.changed_state(job), 0)
    batches = island_jobs.batches(job, (4, 4))
    mine = leaves_of(Block(0, 2), engine.share, group.size)[group.rank]
    task = islands.task(batches, (4, 4), mine)
    if group.rank:
        task.tensors[0].fill_(float("inf"))
    outcome = stepping.replica.compute(task, [0.05], lambda *_: None)
    assert outcome.absent == tuple(range(len(alone.layout.result_buckets)))
    vector, _ = stepping.replica.submission(1, bucket_fragments(alone.layout, 1)[0])
    assert all(not piece.any() for piece in vector.buckets)
    engine.close()
    alone.close()


CASES: dict[str, islands.Case] = {
    **{f"job {name}": partial(_of_jobs, name) for name in OPTIMIZERS},
    **{f"program {name}": partial(_of_a_program, name) for name in OPTIMIZERS},
    **{f"streams {mode}": partial(_streams, mode) for mode in ("dp", "fsdp")},
    "clips": _clips,
    "tensor parallel": _tensor_parallel,
    "skips": _skips,
}


@pytest.mark.slow
@pytest.mark.processes
def test_two_ranks(tmp_path: Path) -> None:
    islands.run(__name__, 2, tmp_path)
