"""Programs: what is traced computes the same bits, in the engine too, and survives the wire."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import programs
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import ComputedBlock, LeafSpec, Task
from w5xde_async.compute.engine import Engine
from w5xde_async.compute.program.form import Document, Program, encode, parse
from w5xde_async.compute.program.program_job import ProgramJob
from w5xde_async.compute.program.tracing import NotTraceable, probe_batches, trace
from w5xde_async.job import Job, build_model
from w5xde_async.params.layout import Layout

CPU = torch.device("cpu")


pytestmark = pytest.mark.timeout(90)  # tracing takes seconds where other processes compute


@cache
def traced(name: str) -> tuple[Job, Layout, Document]:
    job = programs.TRACEABLE[name]()
    model = build_model(job)
    layout = Layout.of(model)
    sizes = [job.microbatch_samples, job.microbatch_samples - 1, 1]
    return job, layout, trace(job, model, layout, probe_batches(job, sizes))


def engines(name: str) -> tuple[Engine, Engine]:
    """With the job's code, and without; the same parameters."""
    job, layout, document = traced(name)
    local = Engine(job)
    replica = ProgramJob.of(parse(document, layout), layout, CPU, precision=job.precision, memory_bytes=1 << 30)
    free = Engine(replica, LeafSpec.of(job))
    for mine, theirs in zip(free.incoming.groups, local.incoming.groups, strict=True):
        mine.copy_(theirs)
    for engine in (local, free):
        engine.load(range(len(layout.buckets)))
    return local, free


def batch_of(job: Job, indices: range) -> Any:
    if type(job.dataset) is TensorDataset:
        return tuple(tensor[list(indices)] for tensor in job.dataset.tensors)
    return (job.collate or default_collate)([job.dataset[index] for index in indices])


def computed(engine: Engine, job: Job, samples: tuple[int, ...]) -> tuple[ComputedBlock, dict[int, bytes]]:
    torch.manual_seed(0)  # some datasets draw
    batches = [batch_of(job, range(at, at + n)) for at, n in zip((0, 5, 11), samples, strict=False)]
    flat = [flatten(batch) for batch in batches]
    task = Task(
        step=3, start=2, samples=samples, loss_scale=1.0, structure=flat[0][0], packed=False,
        tensors=[tensor for _, tensors in flat for tensor in tensors],
    )  # fmt: skip
    sums: dict[int, bytes] = {}

    def emit(bucket: int, vector: Any) -> None:
        sums[bucket] = b""

    outcome = engine.compute(task, emit)
    host = outcome.vectors[-1]
    return outcome, {bucket: bytes(host.bucket_bytes[bucket]) for bucket in sums}


@pytest.mark.parametrize("name", programs.QUICK_AND_SLOW)
def test_an_engine_without_code_gives_the_same_bits(name: str) -> None:
    """And what is parsed is encoded the same."""
    job, layout, document = traced(name)
    assert encode(parse(document, layout)) == document
    local, free = engines(name)
    samples = (job.leaf_samples, job.leaf_samples - 1)
    for _ in range(2):
        expected, expected_sums = computed(local, job, samples)
        outcome, sums = computed(free, job, samples)
        assert outcome.losses == expected.losses
        assert (outcome.metric_names, outcome.metrics) == (expected.metric_names, expected.metrics)
        assert (outcome.untouched, outcome.absent) == (expected.untouched, expected.absent)
        assert sums == expected_sums
        assert sums
    for engine in (local, free):
        engine.close()


@pytest.mark.slow
def test_one_graph_holds_for_all_numbers_of_samples_where_the_model_leaves_them_free() -> None:
    def graphs(name: str) -> int:
        _, layout, document = traced(name)
        program: Program = parse(document, layout)
        return len(program.graphs)

    assert graphs("cnn") == 2  # and one for a single sample
    assert graphs("metrics") == 3  # float(len(x)) fixes it: a graph for each


def job_of(model: Any, step: Any = None, **kwargs: Any) -> Job:
    data = TensorDataset(torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3)
    return Job(
        model=model, dataset=data, step=step, loss=None if step else nn.CrossEntropyLoss(), max_steps=1,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), **kwargs,
    )  # fmt: skip


def trace_of(job: Job, sizes: tuple[int, ...] = (4,)) -> Document:
    model = build_model(job)
    return trace(job, model, Layout.of(model), probe_batches(job, sizes))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        if out.sum() > 0:  # the line that is named
            out = out * 2
        return out


def test_what_depends_on_values_is_not_traced_and_the_line_is_named() -> None:
    with pytest.raises(NotTraceable) as caught:
        trace_of(job_of(Branch))
    text = Path(__file__).read_text().splitlines()
    line = next(number for number, code in enumerate(text, start=1) if code.endswith("# the line that is named"))
    assert caught.value.where == f"test_program.py:{line}"
    assert "data-dependent" in caught.value.reason


class Counting(nn.Module):
    """Python state that changes what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.calls = nn.Linear(6, 3), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.head(x) / self.calls
        return out


def test_a_trace_that_computes_something_else_is_no_program() -> None:
    with pytest.raises(NotTraceable, match="differs from the model: loss"):
        trace_of(job_of(Counting))


class Exported(nn.Module):
    """Computes the same in another order when it is traced, as attention does in models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        return out * 0.1 * 3.7 if torch.compiler.is_exporting() else out * 0.37


def test_a_trace_that_rounds_otherwise_is_no_program_and_says_what_it_is() -> None:
    with pytest.raises(NotTraceable, match=r"by rounding alone.*attn_implementation='eager'"):
        trace_of(job_of(Exported))


def test_an_operator_that_is_not_on_the_list_is_named() -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(torch.linalg.inv(x[:, :4, None] + torch.eye(4)).mean(2)), y)

    with pytest.raises(NotTraceable, match=r"linalg_inv.*test_program.py"):
        trace_of(job_of(lambda: nn.Linear(4, 3), step))


def zeroes(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    model.zero_grad()
    return F.cross_entropy(model(x), y)


def zeroes_in_place(model: nn.Module, batch: Any) -> Any:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    model.zero_grad(set_to_none=False)
    return loss


def clips(model: nn.Module, batch: Any) -> Any:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return F.cross_entropy(model(batch[0]), batch[1])


def goes_backward(model: nn.Module, batch: Any) -> Any:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return loss


@pytest.mark.parametrize("step", [zeroes, zeroes_in_place, clips, goes_backward])
def test_a_step_that_changes_gradients_is_told_so(step: Any) -> None:
    with pytest.raises(NotTraceable, match="the step changed the model's gradients; leave zero_grad"):
        trace_of(job_of(lambda: nn.Linear(6, 3), step))
