"""No rank of a pipeline holds another's stage: its peak, measured by the kernel, against the arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support import island_programs, islands
from tests.support.resident import forget_peak, peak_bytes
from tests.unit.test_footprint import tower

from w5xde_async.compute.block import LeafSpec
from w5xde_async.job import Job
from w5xde_async.memory import Survey
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.pipeline import PipelineEngine
from w5xde_async.parallel.shape import IslandShape
from w5xde_async.plan.footprint import Need

_LEAVES = 4


def _peak(group: Group) -> None:
    _island(tower(4, 64, 8), group)  # what is loaded and started once
    job = tower(12, 1024, 512)
    expected = _expected(job, group)
    peak = _island(job, group)
    assert peak < 1.1 * expected.together, f"{peak >> 20} MiB at the peak; by the arithmetic {expected}"
    assert peak > 0.85 * expected.together, f"{peak >> 20} MiB: is it measured? By the arithmetic {expected}"


def _expected(job: Job, group: Group) -> Need:
    rows = list(Survey(job).rows([IslandShape("pp", group.size)]))
    need = rows[2 + group.rank].need
    assert isinstance(need, Need)
    return need


def _island(job: Job, group: Group) -> int:
    """The peak of two leases beside what was there before."""
    rows = job.microbatch_samples
    atoms = island_programs.atoms_of(job, group, sizes=[rows], bucket_bytes=4 << 20)
    width = atoms.layout.entries[0].shape[1]
    before = forget_peak()
    engine = PipelineEngine(atoms, LeafSpec.of(job), group)
    for bucket in engine.layout.buckets:
        for place in engine.incoming(bucket.index):
            place[:] = bytes(len(place))
    engine.load([bucket.index for bucket in engine.layout.buckets])
    leases = []
    for _ in range(2):
        batches = [(torch.randn(rows, width), torch.randn(rows, width)) for _ in range(_LEAVES)]
        leases.append(islands.task(batches, [rows] * _LEAVES, range(_LEAVES)))
    held = [engine.compute(lease, lambda bucket, pieces: None).vectors for lease in leases]
    peak = peak_bytes() - before
    assert len(held) == 2  # the first lease's sums are on their way while the second is computed
    engine.close()
    return peak


CASES: dict[str, islands.Case] = {"peak": _peak}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_rank_holds_its_stage_and_the_microbatches_under_way(tmp_path: Path) -> None:
    islands.run(
        "tests.unit.test_pipeline_memory", 2, tmp_path, timeout_s=170.0,
        MALLOC_MMAP_THRESHOLD_="1048576",  # what is freed goes back to the system
    )  # fmt: skip
