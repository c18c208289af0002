"""``w5xde memory JOB``: what the job's model needs in memory, process by process, for each way to compute it.

Nothing is allocated: the model is made on torch's meta device, and one step runs on tensors without memory. (A model of
at most 20 million parameters is made in earnest where a job leaves ``microbatch_size`` open and its step needs values:
so does a run, which chooses that size.) Exit codes are those of the other programs: 2 wrong usage or job.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before torch is imported, for which there may be no room
    from w5xde_async.process import imported

    sys.exit(imported("w5xde_async.memory", sys.argv[1:], prog="python -m w5xde_async.memory"))

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from w5xde_async.compute.batch import flatten, map_tensors
from w5xde_async.compute.block import LeafSpec
from w5xde_async.compute.footprint import (
    activations_of,
    activations_of_stages,
    faked,
    model_without_memory,
    optimizer_bytes,
)
from w5xde_async.compute.leaf_size import with_leaf_size
from w5xde_async.compute.program.atoms import Atoms, cut
from w5xde_async.compute.program.converting import NotTraceable
from w5xde_async.compute.program.form import Program
from w5xde_async.compute.program.interpreter import example
from w5xde_async.compute.program.tracing import outline, probe_batches
from w5xde_async.config import Parser
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.errors import JobError, UsageError, need
from w5xde_async.job import Job, load_job, made_by, step_function
from w5xde_async.parallel.replica import replica_of_program, units_of
from w5xde_async.parallel.shape import MODES, IslandShape
from w5xde_async.params.layout import Entry, Layout, buffer_bytes
from w5xde_async.plan.footprint import (
    SYNC,
    Activations,
    Model,
    Need,
    Rule,
    Stage,
    alone,
    coordinator,
    dp,
    fsdp,
    fsdp_tp,
    pp,
    replicated,
    tp,
    under,
)
from w5xde_async.plan.island_choice import ALONE, USABLE, Devices, Option, choose, wanted
from w5xde_async.process import tell, without_loop
from w5xde_async.updates.config import RULES, UpdateConfig

_SHOWN = ("dp=2", "fsdp=2", "fsdp=4", "fsdp=8", "pp=2", "pp=4")  # without --island
_BOTH = {"fsdp", "tp"}  # which compute a program in one way, and a job's code in another
#: What a rule keeps at the coordinator, in sums of gradients (docs/updates.md).
_OUTER = {"sync": 0, "async": 1, "local": 2, "streaming": 3, "async-local": 2}
_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "data", "exchange", "together")
_LEAST_SHOWN = 0.00995  # what is less rounds to nothing
_NOT_COUNTED = """\
Activations: the most in forward and backward of a leaf, with what autocast
makes of weights. Data and gradients: leases of two leaves a rank, one computed,
one ahead. Not counted: Python and torch themselves, kernels' scratch memory,
what an allocator keeps, codecs at work, and on CUDA the parameters and results
that also lie in host memory.
"""


class Row(NamedTuple):
    """What a process is called, and what it needs, or why that is not known."""

    name: str
    need: Need | str


class Measured(ABC):
    """What a model and a microbatch take, measured once: ``model`` and ``layout``."""

    model: Model
    layout: Layout
    precision: str
    tensors: Sequence[Tensor]  #: a microbatch's

    @abstractmethod
    def atoms(self) -> Atoms | NotTraceable:
        """The step in atoms, or why there are none."""

    def needs(
        self, mode: str, ranks: int, *, sizes: Sequence[int] = (), with_job: bool = False, rule: Rule = SYNC
    ) -> list[Need] | str:  # fmt: skip
        """Of each rank of an island, or of a worker ALONE; or why it cannot be. ``sizes``: as in IslandShape.
        ``with_job``: by the job's code, whose units are others than a program's."""
        if mode == ALONE:
            return [under(rule, self.model, alone(self.model), self.model.gradients, of_island=False)]
        found = self._found(mode, ranks, sizes, with_job=with_job)
        return found if isinstance(found, str) else [under(rule, self.model, need, part) for need, part in found]

    def _found(self, mode: str, ranks: int, sizes: Sequence[int], *, with_job: bool) -> list[tuple[Need, int]] | str:
        """And the bytes of each rank's part of the gradients."""
        if "," in mode:
            return self._product(mode, sizes, with_job=with_job)
        needed: list[Need]
        if mode == "dp":
            needed = dp(self.model, ranks, self.layout.bucket_bytes)
        elif mode == "tp":
            split = self.split(ranks, with_job=with_job)
            if isinstance(split, str):
                return split
            needed = tp(self.model, ranks, *split)
        elif mode == "fsdp" and with_job:
            needed = fsdp(self.model, ranks)
        else:
            atoms = self.atoms()
            if isinstance(atoms, NotTraceable):
                return f"the step cannot be cut: {atoms}"
            if mode == "pp":
                return self._pipeline(atoms, ranks)
            replica = replica_of_program(atoms, torch.device("cpu"), self.precision)
            needed = fsdp(replace(self.model, largest_unit=_largest(replica.units, replica.model)), ranks)
        return [(need, -(-self.model.gradients // ranks)) for need in needed]

    def _pipeline(self, atoms: Atoms, ranks: int) -> list[tuple[Need, int]] | str:
        try:
            runs = atoms.stages(ranks)
        except ValueError as error:
            return str(error)
        each = activations_of_stages(atoms, runs, self.tensors, self.precision)
        stages = [self._stage(atoms, *pair) for pair in zip(runs, each, strict=True)]
        return [*zip(pp(self.model, stages), (stage.gradients for stage in stages), strict=True)]

    def _product(self, mode: str, sizes: Sequence[int], *, with_job: bool) -> list[tuple[Need, int]] | str:
        if mode == "fsdp,tp":
            if not with_job:
                return "fsdp and tp together take the job's code"
            split = self.split(sizes[1], with_job=True)
            if isinstance(split, str):
                return split
            ranks = sizes[0] * sizes[1]
            needed = fsdp_tp(self.model, (sizes[0], sizes[1]), *split)
            return [(need, -(-self.model.gradients // ranks)) for need in needed]
        if mode not in ("dp,pp", "dp,tp"):
            return "these do not go together"
        row = self._found(mode.partition(",")[2], sizes[1], (), with_job=with_job)
        if isinstance(row, str):
            return row
        parts = [part for _, part in row]
        needed = replicated(self.model, [need for need, _ in row], sizes[0], parts, self.layout.bucket_bytes)
        return [*zip(needed, [-(-part // sizes[0]) for part in parts] * sizes[0], strict=True)]

    def split(self, ranks: int, *, with_job: bool) -> tuple[tuple[int, int], Activations] | str:
        """What ``tp`` splits: bytes of parameters and of their gradients; and the activations then. Or why not."""
        if with_job:
            return "not known without the job's code"
        atoms = self.atoms()
        if isinstance(atoms, NotTraceable):
            return f"the step cannot be cut: {atoms}"
        from w5xde_async.parallel.split_program import splittable

        entries = splittable(atoms.program, self.layout, ranks)
        return self._sizes({self.layout.entries[entry].name for entry in entries}), self.model.activations

    def _sizes(self, names: set[str]) -> tuple[int, int]:
        entries = [entry for entry in self.layout.entries if names.intersection(entry.names)]
        parameters = sum(entry.numel * entry.dtype.itemsize for entry in entries)
        return parameters, sum(4 * entry.numel for entry in entries if entry.role == "grad")

    def _stage(self, atoms: Atoms, run: range, activations: Activations) -> Stage:
        held = {index for number in run for index in atoms.atoms[number].entries}
        entries = [self.layout.entries[index] for index in sorted(held)]
        return Stage(
            sum(entry.numel * entry.dtype.itemsize for entry in entries) + buffer_bytes(entries) + self.model.unsaved,
            sum(4 * entry.numel for entry in entries if entry.role == "grad"),
            _native(entries),
            activations,
        )

    def rows(self, islands: Iterable[IslandShape], rule: Rule = SYNC) -> Iterator[Row]:
        """One for each kind of process."""
        yield Row("coordinator", coordinator(self.model, rule))
        yield from rows_of("a worker alone", self.needs(ALONE, 1, rule=rule))
        for island in islands:
            needed = self.needs(island.mode, island.ranks, sizes=island.sizes, rule=rule)
            both = not _BOTH.isdisjoint(island.axes)
            yield from rows_of(str(island), needed, of_program=both)
            if both:
                needed = self.needs(island.mode, island.ranks, sizes=island.sizes, with_job=True, rule=rule)
                yield Row(f"{island}, with --job", needed if isinstance(needed, str) else needed[0])


class Survey(Measured):
    """A job. Raises JobError for one whose model or batch cannot be had without memory."""

    def __init__(self, job: Job) -> None:
        self._model = model_without_memory(job)
        self.job = job = with_leaf_size(job, self._model).job
        self.precision = job.precision
        self.layout = Layout.of(self._model, bucket_bytes=CoordinatorConfig().bucket_bytes)
        self._batch = made_by("dataset", partial(probe_batches, job, [job.microbatch_samples]))[0]
        self.tensors = flatten(self._batch)[1]
        optimizer = optimizer_bytes(job, self._model)
        self.optimizer_known = optimizer is not None
        microbatch, buffers = _bytes(self.tensors), _bytes(self._model.buffers())
        self.model = Model(
            parameters=self.layout.state_bytes,
            gradients=self.layout.vector_bytes,
            native=_native(self.layout.entries),
            largest_unit=_largest(units_of(self._model), self._model),
            optimizer=optimizer or 0,
            activations=activations_of(self._model, step_function(job), self._batch, job.precision),
            microbatch=microbatch,
            microbatches=job.accumulate_grad_batches,
            step=-(-microbatch * job.batch_size // job.microbatch_samples),
            buffers=buffers,
            unsaved=buffers - self.layout.buffer_bytes,
        )
        self._atoms: Atoms | NotTraceable | None = None

    def split(self, ranks: int, *, with_job: bool) -> tuple[tuple[int, int], Activations] | str:
        if not with_job:
            return super().split(ranks, with_job=False)
        from w5xde_async.parallel.building import run_step
        from w5xde_async.parallel.tensor_plan import part_of, plan_of

        if self.job.parallelize is not None:
            return "Job.parallelize says what is split, and to ranks alone"
        try:
            plan = plan_of(self._model, ranks, partial(run_step, self.job, LeafSpec.of(self.job)))
        except UsageError as error:
            return str(error)
        part, names = part_of(self._model, ranks, plan)
        try:
            found = activations_of(part, step_function(self.job), self._batch, self.precision)
        except JobError:  # it takes sizes from constants
            return f"the step does not run with 1/{ranks} of the heads and features that the model's _tp_plan splits"
        return self._sizes(names), found

    def atoms(self) -> Atoms | NotTraceable:
        if self._atoms is None:
            with faked(self._model) as (model, _):
                batch = map_tensors(self._batch, lambda tensor: torch.empty_like(tensor, device="cpu"))
                try:
                    program = outline(self.job, model, self.layout, batch)
                except NotTraceable as error:
                    self._atoms = error
                    return error
            self._atoms = cut(program, self.layout, precision=self.precision, memory_bytes=1 << 62)
        return self._atoms


class ProgramSurvey(Measured):
    """A coordinator's program, to one of its workers: of the optimizer, and of a whole step, nothing is known."""

    def __init__(self, program: Program, layout: Layout, spec: LeafSpec) -> None:
        self.layout, self.precision = layout, spec.precision
        self._atoms = cut(program, layout, precision=self.precision, memory_bytes=1 << 62)
        shapes = example(program.graphs[0].inputs)
        self.tensors = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in shapes]
        (activations,) = activations_of_stages(self._atoms, [range(len(self._atoms))], self.tensors, self.precision)
        self.model = Model(
            parameters=layout.state_bytes, gradients=layout.vector_bytes, native=_native(layout.entries),
            largest_unit=0, optimizer=0, activations=activations, microbatch=_bytes(self.tensors),
            microbatches=spec.accumulate, step=0, buffers=layout.buffer_bytes,
        )  # fmt: skip

    def atoms(self) -> Atoms:
        return self._atoms


def rows_of(name: str, needs: Sequence[Need] | str, *, of_program: bool = False) -> Iterator[Row]:
    """Of one way to compute: one row where its ranks are alike. ``of_program``: none where that cannot be cut."""
    if isinstance(needs, str):
        if not of_program:
            yield Row(name, needs)
    elif len(set(needs)) == 1:
        yield Row(name if len(needs) == 1 else f"{name}, a rank", needs[0])
    else:
        for rank, each in enumerate(needs):
            yield Row(f"{name}, rank {rank}", each)


def fitting(measured: Measured, devices: Devices, *, with_job: bool, islands: bool = True) -> tuple[Option | None, str]:
    """What fits on a worker's devices, and the arithmetic by which that was found, for people.

    ``islands``: whether the run takes any.
    """
    tried: list[Option] = []

    def options() -> Iterator[Option]:
        for mode, ranks in wanted(devices) if islands else [(ALONE, 1)]:
            tried.append(Option(mode, ranks, measured.needs(mode, ranks, with_job=with_job)))
            yield tried[-1]

    found = choose(options(), devices)
    rows = [row for option in tried for row in rows_of(option.name, option.needs)]
    unit, size = _unit(devices.nbytes)
    each = "for all ranks together" if devices.shared else f"on {_devices(devices.number)}"
    said = f"{devices.nbytes / size:.1f} {unit} {each}, of which {USABLE:.0%} may be needed"
    return found, f"{table(rows)}\n{said}: {'nothing fits' if found is None else found.name}"


def rule_of(update: UpdateConfig) -> Rule:
    """What of an update rule and its codec takes memory."""
    return Rule(
        plain=update.plain, local=update.local, streaming=update.rule == "streaming",
        lossy=update.feedback and not update.uplink_codec.exact, outer=_OUTER[update.rule],
    )  # fmt: skip


def _devices(number: int) -> str:
    return "one device" if number == 1 else f"each of {number} devices"


def _native(entries: Iterable[Entry]) -> int:
    trained = (entry for entry in entries if entry.role == "grad" and entry.dtype != torch.float32)
    return sum(entry.numel * entry.dtype.itemsize for entry in trained)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _largest(units: Iterable[nn.Module], model: nn.Module) -> int:
    """Bytes that the unit with the most takes: itself and the next one whole, and what it is copied from, as it was
    gathered, or later its gradient, sent and received, where it is trained. What is in no unit is one more."""
    inside: set[int] = set()
    sizes = []
    for part in (*units, model):
        own = [parameter for parameter in part.parameters() if id(parameter) not in inside]
        inside |= set(map(id, own))
        trained = _bytes(parameter for parameter in own if parameter.requires_grad)
        sizes.append(2 * _bytes(own) + max(_bytes(own), 3 * trained))
    return max(sizes)


def table(rows: Iterable[Row]) -> str:
    """Lines of text, in GiB, MiB or KiB, as the largest sum asks for, without columns that round to nothing."""
    rows = list(rows)
    needs = [row.need for row in rows if isinstance(row.need, Need)]
    unit, size = _unit(max((need.together for need in needs), default=0))
    wide = max(len(row.name) for row in rows)
    columns = [name for name in _COLUMNS if any(getattr(need, name) / size >= _LEAST_SHOWN for need in needs)]
    lines = [f"{unit:<{wide}}" + "".join(f"{column:>13}" for column in columns)]
    for name, needed in rows:
        if isinstance(needed, str):
            lines.append(f"{name:<{wide}}  {needed}")
        else:
            cells = (getattr(needed, column) / size for column in columns)
            lines.append(f"{name:<{wide}}" + "".join(f"{_shown(cell):>13}" for cell in cells))
    return "\n".join(lines)


def _unit(nbytes: int) -> tuple[str, int]:
    units = (("GiB", 1 << 30), ("MiB", 1 << 20))
    return next(((unit, size) for unit, size in units if nbytes >= 2 * size), ("KiB", 1 << 10))


def _shown(cell: float) -> str:
    return "-" if not cell else "< 0.01" if cell < _LEAST_SHOWN else f"{cell:.2f}" if cell < 9.95 else f"{cell:.1f}"


def parser(prog: str) -> Parser:
    """Of the command line; its ``read`` raises UsageError."""
    parser = Parser(
        prog=prog,
        description="What a job's model needs in memory, process by process. Nothing of it is allocated.",
        epilog="An island is a worker of several devices: dp=N each with the model, fsdp=N each with a part of every "
        "layer, pp=N each with some of the layers, tp=N each with a part of large layers, and of what they give.",
    )
    parser.add_argument("job", metavar="JOB", help="FILE.py:NAME or MODULE:NAME, a Job or a function that returns one")
    parser.add_argument(
        "--island", metavar="MODE=N", action="append", help=f"{', '.join(MODES)}; repeatable [{' '.join(_SHOWN)}]"
    )
    parser.add_argument("--update", metavar="RULE", choices=RULES, default="sync", help=f"{', '.join(RULES)} [sync]")
    parser.add_argument("--codec", metavar="CODEC", default="raw", help="of the results, as the coordinator's [raw]")
    return parser


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m w5xde_async.memory") -> int:
    """Print the table; the result is the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return without_loop(prog, lambda: tell(prog, _asked(parser(prog).read(given))))


def _asked(given: Namespace) -> str:
    islands = [IslandShape.parse(text) for text in given.island or _SHOWN]
    need(given.job.count(":") >= 1, f"{given.job!r} is not FILE.py:NAME or MODULE:NAME")
    rule = rule_of(UpdateConfig(rule=given.update, codec=given.codec))
    survey = Survey(load_job(given.job))
    job = survey.job  # with the size of a microbatch that a run would choose
    parts = (
        f"{survey.layout.num_parameters:,} parameters",
        f"{job.microbatch_samples} samples a microbatch",
        f"{job.accumulate_grad_batches} microbatches a leaf",
        job.precision,
    )
    text = f"{given.job}: {', '.join(parts)}\n\n{table(survey.rows(islands, rule))}\n\n{_NOT_COUNTED}"
    if not survey.optimizer_known:
        text += "The optimizer's state is not known: it cannot be made, or cannot step, without values.\n"
    return text
