"""Data parallel islands: two ranks that compute a block together give what one process gives, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import island_jobs, islands
from torch import Tensor, nn
from torch.nn import functional as F

from w5xde_async.compute.engine import Engine, LeafError
from w5xde_async.job import Job
from w5xde_async.parallel.data_parallel import DataParallelEngine, shard_of
from w5xde_async.parallel.group import Group
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import check_division

BUCKET = islands.BUCKET_BYTES


def _island(job: Job, group: Group) -> islands.Together:
    return islands.Together(DataParallelEngine(Engine(job, bucket_bytes=BUCKET), group), group)


def _alike(job: Job, group: Group, *blocks: tuple[int, ...], start: int = 0, **changes: Any) -> None:
    """The blocks of a run, with parameters that came from outside."""
    together, alone = _island(job, group), islands.Alone(job)
    state = islands.changed_state(job)
    together.load(state)
    alone.state.copy_groups(state)
    alone.engine.load(range(len(alone.layout.buckets)))
    for samples in blocks:
        islands.same_block(together, alone, island_jobs.batches(job, samples), samples, start, **changes)
    together.engine.close()
    alone.engine.close()


def _announces(group: Group) -> None:
    if group.rank == 0:
        group.announce(3, 1 << 40, -7)
        group.announce(0)
    else:
        assert [tuple(group.hear()), tuple(group.hear())] == [(3, 1 << 40, -7), (0, 0, 0)]


def _bytes(group: Group) -> None:
    expected = [b"x" * (1000 * rank) for rank in range(group.size)]
    assert group.bytes_of_all(expected[group.rank]) == expected
    assert group.bytes_of_all(b"") == [b""] * group.size
    group.all_gather(torch.empty(0), torch.empty(0))  # as of layers that get no rows


def _uneven(group: Group) -> None:
    """Rank r sends (r + 1) * (to + 1) elements."""
    rank, size = group.rank, group.size
    sent = [(rank + 1) * (to + 1) for to in range(size)]
    received = [(source + 1) * (rank + 1) for source in range(size)]
    given = torch.cat([torch.full((count,), 10.0 * rank + to) for to, count in enumerate(sent)])
    output = torch.empty(sum(received))
    group.all_to_all(output, given, received, sent)
    wanted = torch.cat([torch.full((count,), 10.0 * source + rank) for source, count in enumerate(received)])
    assert torch.equal(output, wanted)


def _mlp(group: Group) -> None:
    _alike(island_jobs.mlp(), group, (4, 4, 4, 4), (4, 4, 4, 4), (4, 4, 4, 2))


def _later_block(group: Group) -> None:
    _alike(island_jobs.mlp(), group, (4, 4, 4, 4), start=8)


def _uneven_blocks(group: Group) -> None:
    _alike(island_jobs.mlp(), group, (4, 4, 3), (2,), (4, 4, 4, 4, 1), (4,), (4, 4))


def _normed(group: Group) -> None:
    _alike(island_jobs.normed(), group, (4, 4, 4, 4), (4, 4, 3), (4,))


def _odd(group: Group) -> None:
    _alike(island_jobs.odd(), group, (4, 4, 4, 4), (4, 4, 3))


def _transformer(group: Group) -> None:
    _alike(island_jobs.transformer(), group, (4, 4, 4), (4, 4, 4, 4))


def _half(group: Group) -> None:
    _alike(island_jobs.transformer(precision="bf16"), group, (4, 4, 4))
    _alike(island_jobs.mlp(precision="fp16"), group, (4, 4, 4), loss_scale=1024.0)


def _accumulates(group: Group) -> None:
    _alike(island_jobs.normed(accumulate_grad_batches=3), group, (12, 12, 10, 12), (12,))


def _metrics(group: Group) -> None:
    _alike(island_jobs.mlp(loss=None, step=island_jobs.measured), group, (4, 4, 4, 4), (4,), (3, 3, 3))


class Fragile(nn.Module):
    """Raises for the row that begins with 99, in forward or, told so, in backward."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        if float(x[0, 0]) == 99:
            if not self.late:
                raise RuntimeError("this leaf is bad")
            x = x.requires_grad_()
            x.register_hook(_refuse)
        out: Tensor = self.layers(x)
        return out


def _refuse(_: Tensor) -> None:
    raise RuntimeError("this leaf is bad")


def _fails(group: Group) -> None:
    """A leaf that one rank cannot compute fails on all, and the island goes on."""
    job = island_jobs.mlp()
    fragile = Job(
        model=Fragile, dataset=job.dataset, loss=F.cross_entropy, optimizer=job.optimizer, batch_size=64,
        microbatch_size=4, max_steps=5,
    )  # fmt: skip
    together, alone = _island(fragile, group), islands.Alone(fragile)
    samples = (4, 4, 4, 4)
    good = island_jobs.batches(fragile, samples)
    islands.same_block(together, alone, good, samples)
    for late in (False, True):
        Fragile.late = late
        for bad in range(4):
            broken = [(x.clone(), y) for x, y in good]
            broken[bad][0][0, 0] = 99
            with pytest.raises(LeafError, match="this leaf is bad") as caught:
                together.compute(broken, samples, start=8)
            assert caught.value.leaf == 8 + bad
            assert "this leaf is bad" in caught.value.traceback
            together.engine.release(caught.value.vectors)
            islands.same_block(together, alone, good, samples)
    together.engine.close()
    alone.engine.close()


CASES: dict[str, islands.Case] = {
    "announcements": _announces, "bytes": _bytes, "uneven exchange": _uneven, "mlp": _mlp, "later block": _later_block,
    "uneven blocks": _uneven_blocks, "batch norm": _normed, "odd parameters": _odd, "transformer": _transformer,
    "half precision": _half, "accumulation": _accumulates, "metrics": _metrics, "errors": _fails,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.processes
def test_two_ranks(tmp_path: Path) -> None:
    islands.run("tests.unit.test_parallel_data", 2, tmp_path)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(150)
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks(size: int, tmp_path: Path) -> None:
    islands.run("tests.unit.test_parallel_data", size, tmp_path, timeout_s=110)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_shards_divide_the_layout(size: int) -> None:
    for job in (island_jobs.odd(), island_jobs.transformer()):
        assert callable(job.model)
        layout = Layout.of(job.model(), bucket_bytes=BUCKET)
        check_division(layout, [shard_of(layout, rank, size) for rank in range(size)])


def test_large_buckets_are_divided_evenly() -> None:
    layout = Layout.of(nn.Linear(256, 256), bucket_bytes=64 << 10)
    sizes = [sum(end - begin for _, begin, end in shard_of(layout, rank, 4).runs) for rank in range(4)]
    assert max(sizes) - min(sizes) <= 4 * 64 * len(layout.buckets)
