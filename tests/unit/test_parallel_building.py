"""Engines of a shape, for a job and for a program without its code; and shapes that are none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import island_jobs, island_programs, islands
from tests.unit import test_parallel_pipeline as jobs
from tests.unit.test_atoms import Again, Convolutions, Random, Transformer

from w5xde_async.compute.block import LeafSpec
from w5xde_async.compute.program.atoms import Atoms
from w5xde_async.compute.program.interpreter import example, measure
from w5xde_async.errors import LocalError, ProgramRefused, UsageError
from w5xde_async.job import Job
from w5xde_async.parallel.building import island_engine
from w5xde_async.parallel.engine import Traced
from w5xde_async.parallel.fsdp import FsdpEngine
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.replica import replica_of_program
from w5xde_async.parallel.shape import MODES, IslandShape

MEMORY = 1 << 32


def _alike(job: Job, group: Group, modes: tuple[str, ...], *blocks: tuple[int, ...], **options: Any) -> None:
    atoms = island_programs.atoms_of(job, group)
    traced, spec = Traced(atoms.program, atoms.layout, MEMORY), LeafSpec.of(job)
    engines = [island_engine(IslandShape(mode, group.size), traced, spec, group, **options) for mode in modes]
    if "fsdp" in modes:  # and as many units as can be: these models are of one otherwise
        replica = replica_of_program(atoms, group.device, spec.precision, unit_bytes=1)
        assert len(replica.units) > 1
        engines.append(FsdpEngine(replica, spec, group, **options))
    for engine in engines:
        both = islands.Together(engine, group), islands.Alone(job)
        jobs._load(job, both)
        for samples in blocks:
            islands.same_block(*both, island_jobs.batches(job, samples), samples)
        engine.close()
        both[1].engine.close()


def _transformer(group: Group) -> None:
    job = jobs._job(Transformer, jobs._tokens(), jobs._words)
    _alike(job, group, ("dp", "fsdp", "pp"), (4, 4, 4), (4,))


def _accumulates(group: Group) -> None:
    job = jobs._job(Transformer, jobs._tokens(), jobs._words, accumulate_grad_batches=3)
    _alike(job, group, ("dp", "fsdp"), (12, 12, 7))


def _half(group: Group) -> None:
    job = jobs._job(lambda: Transformer(2, tied=False), jobs._tokens(), jobs._words, precision="bf16")
    _alike(job, group, ("dp", "fsdp"), (4, 4, 4))


def _convolutions(group: Group) -> None:
    _alike(jobs._job(Convolutions, jobs._digits()), group, ("dp", "fsdp"), (4, 4, 4, 4), (4, 4, 3))


def _checkpoints(group: Group) -> None:
    job = jobs._job(Convolutions, jobs._digits())
    _alike(job, group, ("fsdp",), (4, 4, 4), checkpoint_activations=True)


def _random(group: Group) -> None:
    for seed in range(2):
        _alike(jobs._job(partial(Random, seed), jobs._digits()), group, ("fsdp",), (4, 4, 3))


def _odd(group: Group) -> None:
    _alike(jobs._job(jobs.Narrow, jobs._digits()), group, ("dp", "fsdp"), (4, 4, 4, 4), (4, 4, 3))


def _of_jobs(group: Group) -> None:
    job = island_jobs.normed()
    for mode in ("dp", "fsdp"):
        shape = IslandShape(mode, group.size)
        engine = island_engine(shape, job, LeafSpec.of(job), group, bucket_bytes=islands.BUCKET_BYTES)
        both = islands.Together(engine, group), islands.Alone(job)
        jobs._load(job, both)
        islands.same_block(*both, island_jobs.batches(job, (4, 4, 3)), (4, 4, 3))
        engine.close()
        both[1].engine.close()


def _too_large_for_one(group: Group) -> None:
    """What a step makes must fit into the memory of all of a pipeline's ranks, not of each."""
    job = jobs._job(Transformer, jobs._tokens(), jobs._words)
    atoms = island_programs.atoms_of(job, group)
    entries = [(entry.dtype, entry.shape) for entry in atoms.layout.entries]
    total = max(
        measure(atoms.program, graph, entries, example(graph.inputs), memory_bytes=MEMORY).total
        for graph in atoms.program.graphs
    )
    traced = Traced(atoms.program, atoms.layout, total * 2 // 3)
    with pytest.raises(ProgramRefused, match="bytes"):
        island_engine(IslandShape("fsdp", group.size), traced, LeafSpec.of(job), group)
    engine = island_engine(IslandShape("pp", group.size), traced, LeafSpec.of(job), group)
    both = islands.Together(engine, group), islands.Alone(job)
    jobs._load(job, both)
    islands.same_block(*both, island_jobs.batches(job, (4, 4)), (4, 4))
    engine.close()
    both[1].engine.close()


def _refuses(group: Group) -> None:
    job = island_jobs.mlp()
    build = partial(island_engine, source=job, spec=LeafSpec.of(job), group=group)
    with pytest.raises(UsageError, match="leave out --job"):
        build(IslandShape("pp", group.size))
    with pytest.raises(UsageError, match="fsdp, pp or tp"):
        build(IslandShape("dp", group.size), checkpoint_activations=True)
    with pytest.raises(LocalError, match="dp=9"):
        build(IslandShape("dp", 9))


def _casts_again(group: Group) -> None:
    job = jobs._job(Again, jobs._digits(), precision="bf16")
    atoms = island_programs.atoms_of(job, group)
    with pytest.raises(UsageError, match=r"same.weight, same.bias: several parts"):
        island_engine(
            IslandShape("pp", group.size), Traced(atoms.program, atoms.layout, MEMORY), LeafSpec.of(job), group
        )
    with pytest.raises(UsageError, match="with --job"):
        replica_of_program(atoms, group.device, job.precision, unit_bytes=1)
    in_full = jobs._job(Again, jobs._digits())
    _alike(in_full, group, ("fsdp", "pp"), (4, 4, 4))


def _unlike(group: Group) -> None:
    """Ranks that would wait for each other for good are told in what they differ, all of them."""
    job = island_jobs.mlp()
    shape, spec = IslandShape("fsdp", group.size), LeafSpec.of(job)
    others = ", ".join(map(str, range(1, group.size)))

    def refused(text: str, build: Callable[[], Any]) -> None:
        with pytest.raises(UsageError, match=text):
            build()

    def odd(ours: Any, theirs: Any) -> Any:
        return theirs if group.rank else ours

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", odd("2.13", "2.12"))
        refused(rf"differ in torch: 2.13 on 0; 2.12 on {others}", lambda: island_engine(shape, job, spec, group))
    refused("differ in the model", lambda: island_engine(shape, odd(job, island_jobs.normed()), spec, group))
    refused("differ in the run", lambda: island_engine(shape, job, spec, group, bucket_bytes=odd(4096, 8192)))
    refused(
        f"differ in --checkpoint-activations: False on 0; True on {others}",
        lambda: island_engine(shape, job, spec, group, checkpoint_activations=odd(False, True)),
    )
    kind = partial(IslandShape, ranks=group.size)
    refused("differ in --island: dp=", lambda: island_engine(kind(odd("dp", "fsdp")), job, spec, group))
    job = jobs._job(Transformer, jobs._tokens(), jobs._words)
    atoms = island_programs.atoms_of(job, group)
    traced, spec = Traced(atoms.program, atoms.layout, MEMORY), LeafSpec.of(job)
    refused("differ in --job: the coordinator's program on 0", lambda: island_engine(shape, odd(traced, job), spec,
                                                                                     group))  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:  # as where another version of torch counts other operations
        patch.setattr(Atoms, "stages", lambda self, count: [range(odd(1, 2)), range(odd(1, 2), len(self))])
        refused("differ in its parts", lambda: island_engine(kind("pp"), traced, spec, group))


def _named_stages(group: Group) -> None:
    job = jobs._job(Transformer, jobs._tokens(), jobs._words)
    atoms = island_programs.atoms_of(job, group)
    traced, spec = Traced(atoms.program, atoms.layout, MEMORY), LeafSpec.of(job)
    names = ["blocks.3", "norm"][: group.size - 1]
    engine: Any = island_engine(IslandShape("pp", group.size), traced, spec, group, stages_at=names)
    assert engine._stages == atoms.stages_at(names) != atoms.stages(group.size)
    both = islands.Together(engine, group), islands.Alone(job)
    jobs._load(job, both)
    islands.same_block(*both, island_jobs.batches(job, (4, 4, 4)), (4, 4, 4))
    engine.close()
    both[1].engine.close()
    for wrong, said in ((["blocks.1"] * group.size, "1 names|2 names"), (["b", "c"][: group.size - 1], "called 'b'")):
        with pytest.raises(UsageError, match=f"--pp-stages.*({said})"):
            island_engine(IslandShape("pp", group.size), traced, spec, group, stages_at=wrong)
    with pytest.raises(UsageError, match=f"--pp-stages .* and --island fsdp={group.size} has none"):
        island_engine(IslandShape("fsdp", group.size), traced, spec, group, stages_at=names)


def _compiles(group: Group) -> None:
    """Every rank of dp, for it computes whole steps; nothing that divides one."""
    job, calls = island_jobs.mlp(), list[str]()

    def compiled(step: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            calls.append("compiled")
            return step(*given)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compiled)
        spec, shape = LeafSpec.of(job), IslandShape("dp", group.size)
        engine = island_engine(shape, job, spec, group, bucket_bytes=islands.BUCKET_BYTES, compiles=True)
    both = islands.Together(engine, group), islands.Alone(job)
    jobs._load(job, both)
    islands.same_block(*both, island_jobs.batches(job, (4,) * 8), (4,) * 8)
    assert calls
    engine.close()
    both[1].engine.close()
    with pytest.raises(UsageError, match=f"--island fsdp={group.size} divides them"):
        island_engine(IslandShape("fsdp", group.size), job, spec, group, compiles=True)


CASES: dict[str, islands.Case] = {
    "transformer": _transformer, "convolutions": _convolutions, "jobs": _of_jobs, "refusals": _refuses,
    "accumulation": _accumulates, "half precision": _half, "checkpoints": _checkpoints, "random nets": _random,
    "odd parameters": _odd, "memory": _too_large_for_one,
    "cast again": _casts_again, "unlike": _unlike, "named stages": _named_stages, "compiles": _compiles,
}  # fmt: skip
#: What they trace is traced once.
FAST = (
    "transformer", "accumulation", "memory", "convolutions", "checkpoints", "jobs", "refusals", "unlike",
    "named stages", "compiles",
)  # fmt: skip
SLOW = tuple(name for name in CASES if name not in FAST)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(120)
def test_two_ranks(tmp_path: Path) -> None:
    islands.run("tests.unit.test_parallel_building", 2, tmp_path, FAST, timeout_s=110)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("size", "names"), [(2, SLOW), (3, ("transformer", "odd parameters"))])
def test_more_ranks(size: int, names: tuple[str, ...], tmp_path: Path) -> None:
    islands.run("tests.unit.test_parallel_building", size, tmp_path, names, timeout_s=110)


# -- shapes


@pytest.mark.parametrize("mode", MODES)
def test_a_shape_is_a_mode_and_ranks(mode: str) -> None:
    assert IslandShape.parse(f" {mode}=4") == IslandShape(mode, 4)
    assert str(IslandShape(mode, 3)) == f"{mode}=3"


@pytest.mark.parametrize("text", ["", "dp", "zero=2", "dp=x", "dp=0", "dp=-2", "dp=²", "dp=1", "dp=999999"])
def test_what_is_no_shape_is_refused_with_what_is_one(text: str) -> None:
    with pytest.raises(UsageError, match=r"--island.*(fsdp=N|ranks)"):
        IslandShape.parse(text)


def test_a_product_has_its_modes_in_one_order() -> None:
    shape = IslandShape.parse("tp=2, fsdp=4")
    assert (shape.mode, shape.ranks, shape.axes) == ("fsdp,tp", 8, {"fsdp": 4, "tp": 2})
    assert str(shape) == "fsdp=4,tp=2"
    assert IslandShape.parse("dp=3").axes == {"dp": 3}
    for text in ("tp=2,tp=2", "dp=2,tp=1", "dp=600,tp=2"):
        with pytest.raises(UsageError, match=r"named twice|2 to 1024 ranks"):
            IslandShape.parse(text)
