"""One rank's engine, of a shape, and a job or a program."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from w5xde_async.compute.block import LeafSpec
from w5xde_async.compute.engine import Engine
from w5xde_async.compute.program.program_job import ProgramJob
from w5xde_async.errors import LocalError, UsageError
from w5xde_async.job import Job
from w5xde_async.parallel.agreement import fingerprint_of, require_alike
from w5xde_async.parallel.data_parallel import DataParallelEngine
from w5xde_async.parallel.engine import IslandEngine, Traced
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.shape import IslandShape
from w5xde_async.params.layout import Layout


def island_engine(
    shape: IslandShape,
    source: Job | Traced,
    spec: LeafSpec,
    group: Group,
    *,
    bucket_bytes: int = 4 << 20,
    schedule: str = "1f1b",
    checkpoint_activations: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> IslandEngine:
    """Build it; all ranks do at the same time. ``bucket_bytes``: of a job's layout.

    Raises UsageError for what the mode cannot compute, and for ranks that would not compute the same; ProgramRefused,
    LocalError for a group of another size.
    """
    if group.size != shape.ranks:
        raise LocalError(f"an island {shape} of {group.size} ranks")
    told = {
        "torch": str(torch.__version__), "--island": str(shape), "--pp-schedule": schedule,
        "--checkpoint-activations": str(checkpoint_activations), "the run": fingerprint_of(spec, bucket_bytes),
        "--job": "the coordinator's program" if isinstance(source, Traced) else "a job",
    }  # fmt: skip

    def alike(layout: Layout, *parts: object) -> None:
        require_alike(group, {**told, "the model": layout.fingerprint.hex()[:16], "its parts": fingerprint_of(*parts)})

    if shape.mode == "dp":
        if checkpoint_activations:
            raise UsageError("activations are checkpointed in islands that share a model: fsdp or pp")
        engine = whole_engine(source, spec, group.device, bucket_bytes=bucket_bytes, clock=clock)
        alike(engine.layout)
        return DataParallelEngine(engine, group)
    # What these import takes seconds.
    from w5xde_async.compute.program.atoms import cut

    if shape.mode == "fsdp":
        from w5xde_async.parallel.fsdp import FsdpEngine
        from w5xde_async.parallel.replica import replica_of, replica_of_program

        if isinstance(source, Traced):
            atoms = cut(source.program, source.layout, memory_bytes=source.memory_bytes)
            replica = replica_of_program(atoms, group.device, spec.precision)
        else:
            replica = replica_of(source, bucket_bytes)
        alike(replica.layout, [[(n, p.shape) for n, p in unit.named_parameters()] for unit in replica.units])
        return FsdpEngine(replica, spec, group, checkpoint_activations=checkpoint_activations, clock=clock)
    if shape.mode == "tp":
        return _tensor_parallel(shape, source, spec, group, bucket_bytes, checkpoint_activations, clock, alike)
    if shape.mode != "pp":
        raise UsageError(f"--island {shape}: these modes do not go together")
    if not isinstance(source, Traced):
        raise UsageError(
            "pipelines compute the coordinator's program, for a job's code does not say where a model can be cut: "
            "leave out --job, or take fsdp"
        )
    from w5xde_async.parallel.pipeline import PipelineEngine

    memory_bytes = shape.ranks * source.memory_bytes  # what a step makes lies on all ranks together
    atoms = cut(source.program, source.layout, memory_bytes=memory_bytes)
    stages = atoms.stages(shape.ranks) if len(atoms) >= shape.ranks else []
    alike(atoms.layout, atoms.fingerprint, stages)
    return PipelineEngine(
        atoms, spec, group, schedule=schedule, checkpoint_activations=checkpoint_activations, clock=clock
    )  # fmt: skip


def _tensor_parallel(
    shape: IslandShape, source: Job | Traced, spec: LeafSpec, group: Group, bucket_bytes: int, checkpoint: bool,
    clock: Callable[[], float], alike: Callable[[Layout], None],
) -> IslandEngine:  # fmt: skip
    from torch.distributed.device_mesh import init_device_mesh

    from w5xde_async.parallel.composed import ComposedEngine
    from w5xde_async.parallel.recomputing import checkpoint_units
    from w5xde_async.parallel.replica import replica_of
    from w5xde_async.parallel.tensor_plan import parallelized

    if isinstance(source, Traced):
        raise UsageError("tensor parallel islands compute a job's own code: give --job, or take fsdp or pp")
    replica = replica_of(source, bucket_bytes)
    alike(replica.layout)
    if checkpoint:
        checkpoint_units(replica.units)
    axes = shape.axes
    mesh = init_device_mesh(group.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    return ComposedEngine(replica, parallelized, spec, group, mesh, words=str(shape), clock=clock)


def whole_engine(
    source: Job | Traced,
    spec: LeafSpec,
    device: torch.device,
    *,
    bucket_bytes: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """One that computes all of a model in this process."""
    whole: Job | ProgramJob
    if isinstance(source, Traced):
        whole = ProgramJob.of(
            source.program, source.layout, device, precision=spec.precision, memory_bytes=source.memory_bytes
        )
    else:
        whole = source
    return Engine(whole, spec, device=device, bucket_bytes=bucket_bytes, clock=clock)
