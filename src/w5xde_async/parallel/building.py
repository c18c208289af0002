"""One rank's engine, of a shape, and a job or a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from w5xde_async.compute.block import LeafSpec
from w5xde_async.compute.engine import Engine
from w5xde_async.compute.program.program_job import ProgramJob
from w5xde_async.errors import JobError, LocalError, UsageError
from w5xde_async.job import Job, made_by, step_function
from w5xde_async.parallel.agreement import fingerprint_of, require_alike
from w5xde_async.parallel.data_parallel import DataParallelEngine
from w5xde_async.parallel.engine import IslandEngine, Traced
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.shape import MODES, IslandShape
from w5xde_async.params.layout import Layout
from w5xde_async.users_code import users_code


def island_engine(
    shape: IslandShape,
    source: Job | Traced,
    spec: LeafSpec,
    group: Group,
    *,
    bucket_bytes: int = 4 << 20,
    schedule: str = "1f1b",
    stages_at: Sequence[str] = (),
    checkpoint_activations: bool = False,
    compiles: bool = False,
) -> IslandEngine:
    """Build it; all ranks do at the same time. ``bucket_bytes``: of a job's layout. ``stages_at``: modules at which a
    pipeline's stages begin, but the first (default: where they have even shares of the operations). ``compiles``: the
    step, where each rank computes all of it and that is faster.

    Raises UsageError for what the mode cannot compute, and for ranks that would not compute the same; ProgramRefused,
    LocalError for a group of another size.
    """
    if group.size != shape.ranks:
        raise LocalError(f"an island {shape} of {group.size} ranks")
    told = {
        "torch": str(torch.__version__), "--island": str(shape), "--pp-schedule": schedule,
        "--checkpoint-activations": str(checkpoint_activations), "--compile": str(compiles),
        "the run": fingerprint_of(spec, bucket_bytes),
        "--job": "the coordinator's program" if isinstance(source, Traced) else "a job",
    }  # fmt: skip

    def alike(layout: Layout, *parts: object) -> None:
        require_alike(group, {**told, "the model": layout.fingerprint.hex()[:16], "its parts": fingerprint_of(*parts)})

    axes = shape.axes
    if shape.mode not in (*MODES, "fsdp,tp", "dp,tp", "dp,pp"):
        raise UsageError(
            f"--island {shape}: these do not go together; fsdp=2,tp=2 does, and dp=2 with tp or with pp (fsdp=4 does "
            "what dp=2,fsdp=2 would, with less memory)"
        )
    if stages_at and "pp" not in axes:
        raise UsageError(f"--pp-stages says where the stages of pp begin, and --island {shape} has none: leave it out")
    inner = group
    across: Group | None = None
    if len(axes) > 1 and "dp" in axes:
        inner, across = group.divided(group.size // axes.pop("dp"))
    if "dp" in axes:
        if checkpoint_activations:
            raise UsageError("activations are checkpointed in islands that share a model: fsdp, pp or tp")
        engine = whole_engine(source, spec, group.device, bucket_bytes=bucket_bytes)
        if compiles:
            engine.compile_step()
        alike(engine.layout)
        return DataParallelEngine(engine, group)
    if compiles:
        raise UsageError(
            f"--compile compiles steps that are computed whole, and --island {shape} divides them: leave it out, or "
            "take dp; under fsdp and tp a job compiles its layers itself (Job.parallelize)"
        )
    made: IslandEngine
    if "tp" in axes or (isinstance(source, Job) and source.parallelize is not None and "pp" not in axes):
        made = _composed(shape, source, spec, inner, bucket_bytes, checkpoint_activations, alike)
    elif "fsdp" in axes:
        made = _fully_sharded(source, spec, inner, bucket_bytes, checkpoint_activations, alike)
    else:
        made = _pipeline(source, spec, inner, schedule, stages_at, checkpoint_activations, alike)
    if across is None:
        return made
    from w5xde_async.parallel.replicated import ReplicatedEngine

    return ReplicatedEngine(made, group, across)


_Alike = Callable[..., None]
"""Given the layout, and the parts of the model: raises UsageError where ranks differ in them."""


def _fully_sharded(
    source: Job | Traced, spec: LeafSpec, group: Group, bucket_bytes: int, checkpoint: bool,
    alike: _Alike,
) -> IslandEngine:  # fmt: skip
    # What these import takes seconds.
    from w5xde_async.compute.program.atoms import cut
    from w5xde_async.parallel.fsdp import FsdpEngine
    from w5xde_async.parallel.replica import replica_of, replica_of_program

    if isinstance(source, Traced):
        atoms = cut(source.program, source.layout, precision=spec.precision, memory_bytes=source.memory_bytes)
        replica = replica_of_program(atoms, group.device, spec.precision)
    else:
        replica = replica_of(source, bucket_bytes)
    alike(replica.layout, [[(n, p.shape) for n, p in unit.named_parameters()] for unit in replica.units])
    return FsdpEngine(replica, spec, group, checkpoint_activations=checkpoint)


def _pipeline(
    source: Job | Traced, spec: LeafSpec, group: Group, schedule: str, stages_at: Sequence[str], checkpoint: bool,
    alike: _Alike,
) -> IslandEngine:  # fmt: skip
    if not isinstance(source, Traced):
        raise UsageError(
            "pipelines compute the coordinator's program, for a job's code does not say where a model can be cut: "
            "leave out --job, or take fsdp"
        )
    from w5xde_async.compute.program.atoms import cut
    from w5xde_async.parallel.pipeline import PipelineEngine

    memory_bytes = group.size * source.memory_bytes  # what a step makes lies on all ranks together
    atoms = cut(source.program, source.layout, precision=spec.precision, memory_bytes=memory_bytes)
    stages: list[range] | None = None
    if stages_at:
        if len(stages_at) != group.size - 1:
            raise UsageError(f"--pp-stages names the first module of every stage but the first: {group.size - 1} names")
        try:
            stages = atoms.stages_at(stages_at)
        except ValueError as error:
            raise UsageError(f"--pp-stages: {error}") from None
    elif len(atoms) >= group.size:
        stages = atoms.stages(group.size)
    alike(atoms.layout, atoms.fingerprint, stages)
    return PipelineEngine(
        atoms, spec, group, schedule=schedule, stages=stages, checkpoint_activations=checkpoint
    )  # fmt: skip


def _composed(
    shape: IslandShape, source: Job | Traced, spec: LeafSpec, group: Group, bucket_bytes: int, checkpoint: bool,
    alike: _Alike,
) -> IslandEngine:  # fmt: skip
    from torch.distributed.device_mesh import init_device_mesh

    from w5xde_async.parallel.composed import ComposedEngine
    from w5xde_async.parallel.recomputing import checkpoint_units
    from w5xde_async.parallel.replica import replica_of
    from w5xde_async.parallel.split_program import split_program
    from w5xde_async.parallel.tensor_plan import parallelized, plan_of

    axes = shape.axes
    divide: Callable[..., Any]
    parts: list[tuple[str, str]] = []
    if isinstance(source, Traced):
        if "fsdp" in axes or checkpoint:
            what = "--checkpoint-activations with tp" if checkpoint else f"--island {shape}"
            raise UsageError(f"{what} takes the job's own code: give --job")
        replica, divide = split_program(source, group, spec.precision)
    elif checkpoint and source.parallelize is not None:
        raise UsageError("a job that divides its model itself (Job.parallelize) checkpoints activations itself, too")
    else:
        replica = replica_of(source, bucket_bytes)
        if source.parallelize is None:
            plan = plan_of(replica.model, axes["tp"], partial(run_step, source, spec))
            parts = [(name, type(style).__name__) for name, style in plan.items()]
            divide = partial(parallelized, plan=plan)
        if checkpoint:
            checkpoint_units(replica.units)
    alike(replica.layout, *parts)
    mesh = init_device_mesh(group.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if "dp" in axes:
        mesh = mesh[tuple(axis for axis in axes if axis != "dp")]
    words = ",".join(f"{axis}={ranks}" for axis, ranks in axes.items() if axis != "dp")
    if isinstance(source, Traced):
        words = f"{words} of the program"
    elif source.parallelize is not None:
        words, divide = f"{words} of the job", partial(_by_job, source.parallelize)
    return ComposedEngine(replica, divide, spec, group, mesh, words=words)


def run_step(job: Job, spec: LeafSpec, model: nn.Module) -> None:
    """The step with a model that has no memory, on few samples where it computes so few. Raises where the data is not
    here, and what the job raises."""
    from w5xde_async.compute.footprint import activations_of
    from w5xde_async.compute.program.tracing import probe_batches

    sizes = sorted({min(2, spec.microbatch_samples), spec.microbatch_samples})
    with users_code():
        batches = probe_batches(job, sizes)
    for batch in batches:
        try:
            activations_of(model, step_function(job), batch, spec.precision)
        except JobError:
            if batch is batches[-1]:
                raise
        else:
            return


def _by_job(parallelize: Callable[..., Any], model: nn.Module, mesh: Any) -> Any:
    with users_code():
        return made_by("parallelize", lambda: parallelize(model, mesh))


def whole_engine(
    source: Job | Traced,
    spec: LeafSpec,
    device: torch.device,
    *,
    bucket_bytes: int,
) -> Engine:
    """One that computes all of a model in this process."""
    whole: Job | ProgramJob
    if isinstance(source, Traced):
        whole = ProgramJob.of(
            source.program, source.layout, device, precision=spec.precision, memory_bytes=source.memory_bytes
        )
    else:
        whole = source
    return Engine(whole, spec, device=device, bucket_bytes=bucket_bytes)
