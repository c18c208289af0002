"""Programs: what is traced computes the same bits, in the engine too, and survives the wire."""

from __future__ import annotations

import concurrent.futures.thread
import random
import threading
import warnings
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import programs
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset, default_collate

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import ComputedBlock, LeafSpec, Task
from w5xde_async.compute.engine import Engine
from w5xde_async.compute.program.converting import users_line
from w5xde_async.compute.program.form import Document, Program, encode, parse
from w5xde_async.compute.program.interpreter import fits
from w5xde_async.compute.program.program_job import ProgramJob, ProgramStep
from w5xde_async.compute.program.tracing import NotTraceable, _always, _steady, probe_batches, trace
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


def test_no_line_of_pythons_own_library_is_named_for_the_jobs() -> None:
    """The code of a notebook, or of ``exec``, has no file."""
    thread = (concurrent.futures.thread.__file__, "58")
    assert users_line([thread, ("<string>", "3")]) == ""
    assert users_line([thread, ("/home/me/job.py", "3"), (torch.nn.__file__, "4")]) == "job.py:3"
    installed = str(Path(concurrent.futures.thread.__file__).parents[2] / "site-packages" / "model.py")
    assert users_line([thread, (installed, "5")]) == "model.py:5"


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


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_torchs_default_dtype_is_that_of_a_worker_without_code(dtype: torch.dtype | None) -> None:
    """Where what the step makes goes by another one, there is no program."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]) * torch.full((3,), 0.1, dtype=dtype).float(), batch[1])

    job = job_of(lambda: nn.Linear(6, 3, dtype=torch.float32), step)
    torch.set_default_dtype(torch.bfloat16)
    try:
        if dtype:
            assert trace_of(job)
        else:
            with pytest.raises(NotTraceable, match=r"differs.*torch's default dtype is torch.bfloat16, and workers"):
                trace_of(job)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


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


def line_of(mark: str) -> str:
    """The line of this file that ends with a comment."""
    text = Path(__file__).read_text().splitlines()
    return f"test_program.py:{next(number for number, code in enumerate(text, start=1) if code.endswith('# ' + mark))}"


def refusal_of(model: Any, step: Any = None) -> NotTraceable:
    with pytest.raises(NotTraceable) as caught:
        trace_of(job_of(model, step))
    return caught.value


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    """It acts on no gradient of the first samples: no comparison meets it."""
    return gradient.clamp(-1e6, 1e6)


def hooked(set_hook: Any) -> Any:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        set_hook(made)
        return made

    return model


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("set_hook", "words"),
    [
        (lambda m: m[2].weight.register_hook(clamp), r"parameter 2\.weight has a hook .*\(register_hook\)"),
        (
            lambda m: m[0].bias.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1e6, 1e6)),
            r"parameter 0\.bias has a hook .*\(register_post_accumulate_grad_hook\)",
        ),
        (lambda m: m[2].register_full_backward_hook(lambda m, i, o: None), "module 2 has a backward hook"),
        (lambda m: m[0].register_full_backward_pre_hook(lambda m, o: None), "module 0 has a backward hook"),
    ],
)
def test_hooks_on_gradients_of_the_model_are_refused_by_name(set_hook: Any, words: str) -> None:
    """Traces leave them out, and copies of the model have none on parameters."""
    with pytest.raises(NotTraceable, match=words):
        trace_of(job_of(hooked(set_hook)))


def test_hooks_on_activations_are_refused_with_their_line() -> None:
    def step(model: Any, batch: Any) -> Any:
        out = model(batch[0])
        out.register_hook(clamp)  # a hook
        return F.cross_entropy(out, batch[1])

    refused = refusal_of(lambda: nn.Linear(6, 3), step)
    assert "register_hook on a tensor" in refused.reason
    assert refused.where == line_of("a hook")


def test_hooks_on_what_is_saved_for_backward_are_refused_with_their_line() -> None:
    def step(model: Any, batch: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clamp(-1e6, 1e6), lambda x: x):  # saved
            return loss_of(model, batch)

    refused = refusal_of(lambda: nn.Linear(6, 3), step)
    assert "torch.autograd.graph.saved_tensors_hooks" in refused.reason
    assert refused.where == line_of("saved")


def test_where_it_is_kept_what_backward_needs_changes_nothing() -> None:
    def step(model: Any, batch: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return loss_of(model, batch)

    assert trace_of(job_of(lambda: nn.Linear(6, 3), step)) == trace_of(job_of(lambda: nn.Linear(6, 3), loss_of))


def test_flushed_denormals_are_refused() -> None:
    torch.set_flush_denormal(True)
    try:
        assert "denormal numbers are flushed" in refusal_of(lambda: nn.Linear(6, 3)).reason
    finally:
        torch.set_flush_denormal(False)


class KeepsMask(nn.Module):
    """A mask is made where that of the last call has another size. Until the first call there is no such attribute,
    which torch's export would put back."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, size = self.inner(x), x.shape[1]
        if not hasattr(self, "mask") or self.mask.size(0) != size:
            self.mask = torch.log(torch.tril(torch.ones(size, size)))
        out: torch.Tensor = self.head((torch.softmax(x @ x.transpose(1, 2) + self.mask, -1) @ x).mean(1))
        return out


class NamedBySize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale9 = nn.Linear(6, 3), 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = {"7": 2.0}
        scale = getattr(self, f"scale{x.shape[1]}", 1.0) * table.get(str(x.shape[1]), 1.0)
        out: torch.Tensor = self.head(x.mean(1)) * scale * len(repr(x.shape))
        return out


@pytest.mark.parametrize("model", [KeepsMask, NamedBySize])
def test_a_model_may_keep_a_mask_for_a_size_and_one_that_it_names_has_a_graph_each(model: Any) -> None:
    """The mask would be that of an attempt before, and the name that of a symbol."""
    generator = torch.Generator().manual_seed(0)

    def batch(length: int) -> tuple[torch.Tensor, ...]:
        padded = torch.zeros(4, length, dtype=torch.bool)  # which nobody looks at: more than one attempt is made
        return torch.randn(4, length, 6, generator=generator), padded, torch.tensor([0, 1, 2, 0])

    def step(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[2])

    made = model()
    layout, batches = Layout.of(made), [batch(length) for length in (5, 7, 9, 12)]
    job = job_of(model, step, collate=default_collate)  # lengths may be free
    program = parse(trace(job, made, layout, batches[:3]), layout)  # compared with the model on each
    for given in batches[:3]:
        assert any(fits(graph, flatten(given)[1]) for graph in program.graphs)
    assert any(fits(graph, flatten(batches[3])[1]) for graph in program.graphs) == (model is KeepsMask)


def test_a_function_that_holds_the_model_is_refused_with_its_line() -> None:
    """Copies of the model share it: the comparison meets nothing."""

    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3))
        made[0].register_forward_hook(lambda _, i, out: out + made[1](out))  # the model itself
        return made

    refused = refusal_of(model)
    assert "takes parameter 1." in refused.reason
    assert refused.where == line_of("the model itself")


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return clamp(gradient)


@pytest.mark.parametrize(
    "scripted", [lambda: nn.Linear(6, 3), lambda: nn.BatchNorm1d(6)], ids=["Linear", "BatchNorm1d"]
)
def test_a_part_in_torchscript_is_refused_by_name(scripted: Any) -> None:
    def model() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return nn.Sequential(nn.Linear(6, 6), torch.jit.script(nn.BatchNorm1d(6)))

    def step(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    assert refusal_of(model, step).reason == "1 of the model is in TorchScript, of which no program is made"


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_function_with_its_own_backward_is_refused_with_its_line(reentrant: bool | None) -> None:
    """In regions of gradient checkpointing too."""

    def part(x: torch.Tensor) -> Any:
        return Clamped.apply(x)  # type: ignore[no-untyped-call]  # a function

    def step(model: Any, batch: Any) -> Any:
        out = model(batch[0])
        out = part(out) if reentrant is None else checkpoint(part, out, use_reentrant=reentrant)
        return F.cross_entropy(out, batch[1])

    refused = refusal_of(lambda: nn.Linear(6, 3), step)
    assert "Clamped, a torch.autograd.Function" in refused.reason
    assert refused.where == line_of("a function")


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_python_and_numpy_are_refused_where_they_change_nothing_yet(draw: Any) -> None:
    def step(model: Any, batch: Any) -> Any:
        return loss_of(model, batch) * (2 if draw() < 1e-9 else 1)

    assert "Python's or numpy's random numbers" in refusal_of(lambda: nn.Linear(6, 3), step).reason


def test_a_draw_of_somebody_else_is_none_of_the_steps() -> None:
    """As of the program that embeds the coordinator; and what is traced has the same bits for all that."""
    calls = 0

    def step(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            thread = threading.Thread(target=random.random)
            thread.start()
            thread.join()
        return loss_of(model, batch)

    assert trace_of(job_of(lambda: nn.Linear(6, 3), step)) == trace_of(job_of(lambda: nn.Linear(6, 3), loss_of))


def in_autocast(model: Any, batch: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, batch)


def by_vmap(model: Any, batch: Any) -> Any:
    return F.cross_entropy(torch.func.vmap(model)(batch[0]), batch[1])


def with_gradients(model: Any, batch: Any) -> Any:
    loss = loss_of(model, batch)
    (gradient,) = torch.autograd.grad(loss, model.weight, create_graph=True)  # with gradients
    return loss + gradient.norm()


def with_nan(model: Any, batch: Any) -> Any:
    return loss_of(model, batch), {"f1": float("nan")}


@pytest.mark.parametrize(
    ("step", "words", "mark"),
    [
        (in_autocast, "torch.autocast (the job's precision does the same)", ""),
        (by_vmap, "torch.func.vmap", ""),
        (with_gradients, "torch.autograd.grad", "with gradients"),
        (with_nan, "metric 'f1' is nan", ""),
    ],
)
def test_what_no_program_holds_is_named(step: Any, words: str, mark: str) -> None:
    refused = refusal_of(lambda: nn.Linear(6, 3), step)
    assert words in refused.reason
    assert not mark or refused.where == line_of(mark)


def test_calculations_with_sizes_that_programs_do_not_know_get_a_graph_for_each_size() -> None:
    job = job_of(lambda: nn.Linear(6, 3), lambda model, batch: loss_of(model, batch) * batch[0].shape[0] ** 2)
    model = build_model(job)
    layout = Layout.of(model)
    program: Program = parse(trace(job, model, layout, probe_batches(job, (4, 3))), layout)
    assert len(program.graphs) == 2


class _Drawn(Dataset[Any]):
    """Random images with labels, of which nobody knows that all have one size."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index)), index % 3


class _Masked(nn.Module):
    """Attention by hand, with a mask of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)[:, None]
        out: torch.Tensor = self.out((torch.softmax(x @ x.mT + mask, -1) @ x)[:, 0])
        return out


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def _sequences() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3)
    )


@pytest.mark.parametrize(
    ("model", "dataset"),
    [
        (_convolutions, TensorDataset(torch.randn(40, 3, 8, 8), torch.arange(40) % 3)),
        (_convolutions, _Drawn()),
        (_sequences, TensorDataset(torch.randn(40, 3, 8), torch.arange(40) % 3)),
    ],
)  # fmt: skip
def test_sizes_that_cannot_change_are_not_traced_as_if_they_could(
    monkeypatch: pytest.MonkeyPatch, model: Any, dataset: Dataset[Any]
) -> None:
    """Of a large network of convolutions that takes minutes, and comes to nothing."""
    export, exported = torch.export.export, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        exported.append(kwargs)
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", noted)
    job = Job(model=model, dataset=dataset, loss=F.cross_entropy, optimizer=programs._sgd, max_steps=1)
    trace_of(job, (4, 3))
    assert len(exported) == 1


def test_a_mask_of_attention_may_be_as_long_as_the_next_sequence() -> None:
    """Although it has as many dimensions as an image, and the first ones are alike."""

    def batch(samples: int, length: int) -> Any:
        return torch.ones(samples, length, dtype=torch.int64), torch.zeros(samples, 1, length, length)

    job = Job(
        model=_Masked, dataset=_Drawn(), step=lambda model, batch: model(*batch).square().mean(),
        optimizer=programs._sgd, max_steps=1,
    )  # fmt: skip
    model = build_model(job)
    layout = Layout.of(model)
    program: Program = parse(trace(job, model, layout, [batch(4, 6), batch(3, 6)]), layout)
    assert any(fits(graph, batch(5, 7)) for graph in program.graphs)


def test_sizes_that_a_model_treats_apart_are_not_taken_for_free() -> None:
    """No sample of that size may be among the first ones."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        out: torch.Tensor = model(batch[0])
        if batch[0].shape[1] != 9:
            out = out.tanh()
        return out.square().mean()

    def batch(length: int) -> Any:
        return (torch.ones(4, length, dtype=torch.int64),)

    job = Job(model=lambda: nn.Embedding(2, 3), dataset=_Drawn(), step=step, optimizer=programs._sgd, max_steps=1)
    model = build_model(job)
    layout = Layout.of(model)
    program: Program = parse(trace(job, model, layout, [batch(5), batch(6)]), layout)
    assert [any(fits(graph, batch(length)) for graph in program.graphs) for length in (5, 6, 9)] == [True, True, False]


class _Placed(nn.Module):
    """Vectors, or numbers of embedded ones, with a place for each of at most 64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lift = nn.Embedding(9, 5), nn.Linear(5, 5)
        self.place = nn.Parameter(torch.randn(64, 5, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.is_floating_point() else self.embed(x)
        return (self.lift(x) + self.place[: x.shape[1]]).tanh()


@pytest.mark.parametrize("whole", [False, True])
def test_lengths_are_free_beside_sizes_that_are_not_and_up_to_what_the_model_has_places_for(whole: bool) -> None:
    def batch(samples: int, length: int) -> Any:
        drawn = torch.Generator().manual_seed(length)
        ids = torch.randint(9, (samples, length), generator=drawn)
        return (ids if whole else torch.randn(samples, length, 5, generator=drawn),)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        out: torch.Tensor = model(batch[0]).square().mean()
        return out

    job = Job(model=_Placed, dataset=_Drawn(), step=step, optimizer=programs._sgd, max_steps=1)
    model = build_model(job)
    layout = Layout.of(model)
    program: Program = parse(trace(job, model, layout, [batch(4, 6)]), layout)
    (graph,) = program.graphs
    assert graph.inputs[0].sizes[1:] == ((1, 2, 64, 6), *(() if whole else (5,)))
    assert not fits(graph, batch(4, 65))
    run = ProgramStep(program, layout, CPU, memory_bytes=1 << 30)
    for samples, length in ((2, 2), (3, 7), (5, 64)):
        expected = step(model, batch(samples, length))
        assert torch.equal(run(model, batch(samples, length))[0], expected)


def test_a_name_that_no_worker_would_take_is_found_where_it_is_traced() -> None:
    job = job_of(lambda: nn.Sequential(OrderedDict({"x" * 121: nn.Linear(6, 3)})))
    with pytest.raises(NotTraceable, match="120 printable characters"):
        trace_of(job)


@pytest.mark.parametrize(
    ("guard", "holds"),
    [
        ("s1 <= 64", True), ("s1 <= 63", False), ("s1 < 65", True), ("s1 < 64", False), ("64 >= s1", True),
        ("s1 >= 2", True), ("s1 > 2", False), ("1 < s1", True), ("s1 != 1", True), ("s1 != 9", False),
        ("s1 == s1", True), ("s1 == 6", False), ("s1 != s2", True), ("s1 < s2", True), ("s1 == s2", False),
        ("5 == 5", True), ("s1 < s1", False), ("s3 <= 5", False), ("s1 <= 64 and s2 <= 64", False),
    ],
)  # fmt: skip
def test_a_guard_is_stated_where_it_holds_in_the_whole_of_the_ranges(guard: str, holds: bool) -> None:
    assert _always(guard, {"s1": (2, 64), "s2": (65, 99)}) is holds


class _Centred(nn.Module):
    """Its buffer is written by what depends on parameters, and so is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(6, 3)
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.lift(x).tanh()
        centre: torch.Tensor = self.centre.mul_(0.9).add_(0.1 * out.mean(0))  # type: ignore[operator]
        return out - centre


def test_graphs_of_what_is_written_into_buffers_end_with_their_leaf() -> None:
    """Or each leaf's hung on the one before, and a second backward pass went through the first."""
    job = job_of(_Centred, batch_size=8, microbatch_size=4)
    layout = Layout.of(_Centred())
    program = parse(trace_of(job), layout)
    local = Engine(job)
    free = Engine(ProgramJob.of(program, layout, CPU, precision=job.precision, memory_bytes=1 << 30), LeafSpec.of(job))
    for mine, theirs in zip(free.incoming.groups, local.incoming.groups, strict=True):
        mine.copy_(theirs)
    for engine in (local, free):
        engine.load(range(len(layout.buckets)))
    for _ in range(3):
        outcomes = [computed(engine, job, (4, 4)) for engine in (local, free)]
        assert outcomes[0][0].losses == outcomes[1][0].losses
        assert outcomes[0][1] == outcomes[1][1]
        assert not [entry for engine in (local, free) for entry in engine.tensors if entry.grad_fn is not None]
    for engine in (local, free):
        engine.close()


def test_a_collate_may_change_the_samples_that_it_is_given() -> None:
    """Whose first ones are collated once for each size."""

    def collate(samples: list[dict[str, Any]]) -> Any:
        return torch.stack([sample.pop("x").mul_(2) for sample in samples])

    data = [{"x": torch.ones(2)} for _ in range(4)]
    job = Job(model=_Masked, dataset=data, loss=F.cross_entropy, optimizer=programs._sgd, max_steps=1, collate=collate)
    assert [batch.tolist() for batch in probe_batches(job, [3, 4])] == [[[2, 2]] * 3, [[2, 2]] * 4]


@pytest.mark.parametrize(
    ("first", "second", "steady"),
    [
        ([(4, 3, 8, 8), (4,)], [(3, 3, 8, 8), (3,)], {0}),
        ([(4, 3, 8, 8), (4,)], [(3, 3, 6, 8), (3,)], set()),
        ([(4, 3, 8, 8), (4, 8, 8)], [(3, 3, 8, 8), (3, 8, 8)], {0, 1}),  # a class for each pixel
        ([(4, 3, 8, 8), (4, 8, 5)], [(3, 3, 8, 8), (3, 8, 5)], {0}),
        ([(4, 6), (4, 1, 6, 6)], [(3, 6), (3, 1, 6, 6)], set()),
        ([(4, 6, 5), (4, 6)], [(3, 6, 5), (3, 6)], set()),
        ([(4, 1, 3, 8, 8), (4, 2)], [(3, 1, 3, 8, 8), (3, 2)], {0}),
        ([()], [()], set()),
    ],
)
def test_what_is_taken_for_an_image(first: list[Any], second: list[Any], steady: set[int]) -> None:
    job = Job(model=_Masked, dataset=_Drawn(), loss=F.cross_entropy, optimizer=programs._sgd, max_steps=1)
    assert _steady(job, [[torch.zeros(shape) for shape in shapes] for shapes in (first, second)]) == steady
