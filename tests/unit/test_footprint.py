"""The arithmetic of memory, its measured sizes, and the program that prints both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.support import jobs, programs
from tests.support.resident import forget_peak, peak_bytes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from w5xde_async import memory
from w5xde_async.__main__ import main as w5xde
from w5xde_async.compute import footprint
from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import Task, autocast
from w5xde_async.compute.engine import Engine
from w5xde_async.compute.footprint import _Held, activations_of, model_without_memory, optimizer_bytes
from w5xde_async.compute.program.tracing import probe_batches
from w5xde_async.errors import JobError
from w5xde_async.job import Job, build_model, step_function
from w5xde_async.memory import Row, Survey, table
from w5xde_async.parallel.replica import replica_of
from w5xde_async.parallel.shape import IslandShape as Island
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
)  # fmt: skip
from w5xde_async.updates.config import UpdateConfig

MODEL = Model(
    parameters=1000, gradients=800, native=0, largest_unit=1000, optimizer=1600, activations=Activations(50, 70),
    microbatch=4, microbatches=1, step=32,
)  # fmt: skip


# -- the arithmetic


def test_a_worker_alone_holds_the_model_and_two_sums() -> None:
    found = alone(MODEL)
    assert (found.parameters, found.gradients, found.optimizer) == (1000, 2 * 800, 0)
    assert found.activations == 70
    assert found.data == 2 * 2 * 4
    assert found.together == 1000 + 1600 + 70 + 16
    assert alone(replace(MODEL, microbatches=3)).gradients == 3 * 800  # a leaf is summed by itself first
    assert alone(replace(MODEL, native=400)).gradients == 3 * 800 + 400


def test_the_optimizer_is_the_coordinators() -> None:
    found = coordinator(MODEL)
    assert found.optimizer == 1600
    assert found.together == 1000 + 2 * 800 + 1600 + 2 * 32
    assert not any(need.optimizer for need in (alone(MODEL), *dp(MODEL, 2, 64), *fsdp(MODEL, 2), *pp(MODEL, [])))


def test_ranks_that_share_the_data_hold_the_model_each() -> None:
    found = dp(MODEL, 4, 64)
    assert len(found) == 4
    assert found[0].parameters == 1000
    assert found[0].gradients == 800 + 2 * 200
    assert found[0].exchange == 64


def test_shards_shrink_with_the_ranks_and_units_do_not() -> None:
    two, eight = fsdp(MODEL, 2)[0], fsdp(MODEL, 8)[0]
    assert (two.parameters, two.gradients, two.exchange) == (1000, 3 * 400, 1000)
    assert (eight.parameters, eight.gradients, eight.exchange) == (250, 3 * 100, 1000)
    assert fsdp(replace(MODEL, microbatches=2), 8)[0].gradients == 3 * 100 + 800


def test_what_is_split_shrinks_with_the_ranks_and_the_rest_does_not() -> None:
    two = tp(MODEL, 2, (600, 480), Activations(10, 50))
    assert len(two) == 2
    assert two[0].parameters == 500 + 400 + 300  # as it comes in, whole, split
    assert two[0].gradients == 3 * (800 - 480 + 240) + 400  # the leaf's own, two sums; and what leaves
    assert two[0].activations == 50


def test_both_ways_of_splitting_shrink_what_is_split() -> None:
    (one, *others) = fsdp_tp(MODEL, (4, 2), (600, 480), Activations(10, 50))
    assert others == [one] * 7
    assert one.parameters == 125 + (400 + 300) // 4  # as it comes in, as it is computed with
    assert one.gradients == 3 * (800 - 480 + 240) // 4 + 100
    assert (one.activations, one.exchange) == (50, 1000 * 560 // 800)


def test_buffers_are_whole_on_every_rank_beside_the_steps_values() -> None:
    buffered = replace(MODEL, buffers=90, unsaved=30)
    assert coordinator(buffered).parameters == 1000 + 30
    split = (600, 480), Activations(10, 50)
    ways: list[Callable[[Model], Need]] = [
        alone, lambda model: dp(model, 4, 64)[0], lambda model: fsdp(model, 4)[0],
        lambda model: tp(model, 2, *split)[0], lambda model: fsdp_tp(model, (4, 2), *split)[0],
    ]  # fmt: skip
    for way in ways:
        assert way(buffered) == replace(way(MODEL), parameters=way(MODEL).parameters + 90)


@pytest.mark.parametrize("persistent", [True, False])
def test_every_buffer_is_counted(persistent: bool) -> None:
    def made(numel: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model.register_buffer("table", torch.zeros(numel), persistent=persistent)
        return model

    before, after = (dict(Survey(_job(lambda n=n: made(n), 64)).rows([Island.parse("pp=2")])) for n in (0, 1000))
    for name, need in after.items():
        known = before[name]
        assert isinstance(need, Need)
        assert isinstance(known, Need)
        twice = 4000 if persistent and name == "a worker alone" else 0
        if name in ("coordinator", "a worker alone") or not persistent:
            assert need.parameters - known.parameters == pytest.approx(4000 + twice, abs=64), name


def test_rows_of_ranks_have_what_a_row_has_and_shards_of_the_sum() -> None:
    row = tp(MODEL, 2, (600, 480), Activations(10, 50))
    (first, *others) = replicated(MODEL, row, 3, [400, 400], 64)
    assert others == [first] * 5
    assert first == replace(row[0], gradients=row[0].gradients + 2 * 134, exchange=64)
    stages = [Stage(600, 500, 0, Activations(30, 40)), Stage(400, 300, 6, Activations(20, 45))]
    found = replicated(MODEL, pp(MODEL, stages), 2, [500, 300], 64)
    assert [need.parameters for need in found] == [600, 400] * 2
    assert [need.gradients for need in found] == [4 * 500 + 500, 4 * 300 + 6 + 300] * 2


def test_under_rules_of_local_steps_the_optimizer_is_the_workers_and_much_is_kept() -> None:
    (rank,) = {under(Rule(plain=False, local=True), MODEL, need, 200) for need in fsdp(MODEL, 4)}
    plain = fsdp(MODEL, 4)[0]
    assert rank.parameters == plain.parameters + 3 * 200  # published, computed with, where the round began
    assert rank.gradients == plain.gradients + 200  # its sum once more; the pseudo-gradient leaves in a sum's place
    assert rank.optimizer == 1600 // 4
    all_kept = Rule(plain=False, local=True, streaming=True, lossy=True, outer=3)
    assert under(all_kept, MODEL, plain, 200).gradients == rank.gradients + 2 * 200
    single = under(all_kept, MODEL, alone(MODEL), 800, of_island=False)
    assert single.together == alone(MODEL).together + (2 + 2) * 800 + 1600
    assert under(SYNC, MODEL, plain, 200) == plain
    assert coordinator(MODEL, all_kept).optimizer == 3 * 800


def test_a_stage_keeps_the_microbatches_that_are_under_way() -> None:
    stages = [Stage(600, 500, 0, Activations(30, 40)), Stage(400, 300, 6, Activations(20, 45))]
    for microbatches in (1, 8):
        found = pp(replace(MODEL, microbatches=microbatches), stages)
        assert [need.activations for need in found] == [30 + 40, 45]
        assert [need.parameters for need in found] == [600, 400]
        # Four leaves: one that is being added up, two that wait for it, one on its way.
        assert [need.gradients for need in found] == [4 * 500, 4 * 300 + 6]
        assert [need.data for need in found] == [2 * 4 * microbatches * 4] * 2


# -- what is measured


class Wide(nn.Module):
    """What forward keeps can be counted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).exp())
        return out


def _job(model: Callable[[], nn.Module] | nn.Module, width: int, **more: Any) -> Job:
    x = torch.randn(32, width)
    return Job(
        model=model, dataset=TensorDataset(x, x), loss=F.mse_loss, batch_size=32, microbatch_size=8, max_steps=1,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()), **more,
    )  # fmt: skip


def test_what_forward_keeps_is_counted_once() -> None:
    job = _job(Wide, 16)
    found = activations_of(
        model_without_memory(job), step_function(job), probe_batches(job, [8])[0], precision="fp32"
    )  # fmt: skip
    # exp's result, which it keeps and the product after it too; the output and the loss. up's result is let go.
    assert found.kept == 8 * 64 * 4 + 8 * 16 * 4 + 4
    assert found.peak > found.kept


MEASURED: dict[str, Callable[[], Job]] = {
    name: programs.TRACEABLE[name] for name in ("mlp", "cnn", "gpt", "bf16", "words", "checkpointed")
}


@pytest.mark.parametrize("name", MEASURED)
def test_tensors_without_memory_take_what_real_ones_take(name: str) -> None:
    job = MEASURED[name]()
    batch = probe_batches(job, [job.microbatch_samples])[0]
    found = activations_of(model_without_memory(job), step_function(job), batch, job.precision)

    model = build_model(job, replica=True)
    known = [*model.parameters(), *model.buffers(), *flatten(batch)[1]]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        known.append(parameter.grad)
    step = step_function(job)
    with _Held(known) as held:
        with (autocast(job.precision) or nullcontext)():
            loss, metrics = step(model, batch)
        del metrics
        kept = held.now
        torch.autograd.backward(loss)
    assert found.kept == pytest.approx(kept, rel=0.01)
    assert found.peak == pytest.approx(held.most, rel=0.02)


def test_the_optimizers_state_is_measured() -> None:
    job = _job(Wide, 16)
    size = 4 * 2 * 16 * 64
    assert optimizer_bytes(job, model_without_memory(job)) == pytest.approx(2 * size, abs=16)
    plain = replace(job, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer_bytes(plain, model_without_memory(plain)) == 0

    class Reading(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            assert float(self.param_groups[0]["params"][0].sum()) >= 0

    reading = replace(job, optimizer=lambda model: Reading(model.parameters(), lr=0.1))
    assert optimizer_bytes(reading, model_without_memory(reading)) is None


def test_a_model_that_reads_values_is_refused() -> None:
    def made() -> nn.Module:
        model = Wide()
        assert float(model.up.weight.sum()) < 1e9
        return model

    with pytest.raises(JobError, match="cannot be made without memory"):
        model_without_memory(_job(made, 16))


def test_sparse_gradients_are_measured_by_their_parts() -> None:
    def job(*, sparse: bool) -> Job:
        x = torch.arange(320).view(64, 5) % 50
        return Job(
            model=lambda: nn.Sequential(nn.Embedding(50, 16, sparse=sparse), nn.Flatten(), nn.Linear(80, 3)),
            dataset=TensorDataset(x, x[:, 0] % 3), loss=F.cross_entropy, batch_size=16, microbatch_size=4, max_steps=2,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )  # fmt: skip

    few, all_rows = (Survey(job(sparse=sparse)).rows([Island.parse("fsdp=2")]) for sparse in (True, False))
    assert [row.name for row in few] == [row.name for row in all_rows]


def test_a_model_that_is_there_is_measured_and_left_alone() -> None:
    model = Wide()
    Survey(_job(model, 16))
    assert not model.up.weight.is_meta
    assert model.up.weight.grad is None


class Adapted(nn.Module):
    """Half precision, frozen, with few trained rows beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False).bfloat16().requires_grad_(False)
        self.rows = nn.Parameter(torch.zeros(2, 64, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        x = x.bfloat16()
        return torch.tanh(self.base(x) + (x @ self.rows.T) @ self.rows).float()


def test_a_unit_is_counted_in_its_dtype_and_exchanged_where_it_is_trained() -> None:
    job = _job(lambda: nn.Sequential(Adapted(), Adapted()), 64)
    (need, _) = Survey(job).needs("fsdp", 2, with_job=True)
    assert isinstance(need, Need)
    assert need.exchange == 3 * (2 * 64 * 64 + 2 * 2 * 64)
    job = _job(lambda: nn.Sequential(Adapted().requires_grad_(True)), 64)
    (need, _) = Survey(job).needs("fsdp", 2, with_job=True)
    assert isinstance(need, Need)
    assert need.exchange == 5 * (2 * 64 * 64 + 2 * 2 * 64)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weights_that_hooks_compute_are_measured() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 64))

    survey = Survey(_job(make, 64))
    for mode in ("fsdp", "tp"):
        (need, _) = survey.needs(mode, 2, with_job=True)
        assert isinstance(need, Need)
    for measure in (Survey, lambda job: replica_of(job, 4096)):
        with pytest.raises(JobError, match=r"'0.weight' was computed from parameters.*\(model=make\)"):
            measure(_job(make(), 64))


# -- the program


def test_rows_for_every_mode() -> None:
    survey = Survey(jobs.mlp_adamw())
    rows = list(survey.rows([Island("dp", 2), Island("fsdp", 2), Island("pp", 2), Island("tp", 2)]))
    assert [row.name for row in rows] == [
        "coordinator", "a worker alone", "dp=2, a rank", "fsdp=2, a rank", "fsdp=2, with --job", "pp=2, rank 0",
        "pp=2, rank 1", "tp=2, a rank", "tp=2, with --job",
    ]  # fmt: skip
    by_name = {row.name: row.need for row in rows}
    parameters = 4 * survey.layout.num_parameters
    assert by_name["a worker alone"].parameters == pytest.approx(parameters, rel=0.01)
    stages = [by_name["pp=2, rank 0"], by_name["pp=2, rank 1"]]
    assert sum(stage.parameters for stage in stages) == parameters
    lines = table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].startswith("KiB")


def test_a_table_has_nothing_that_rounds_to_nothing() -> None:
    small = Need(parameters=400, gradients=800, optimizer=0, activations=300, data=3, exchange=0)
    lines = table([Row("a worker", small), Row("another", "it cannot be cut")]).splitlines()
    assert lines[0].split() == ["KiB", "parameters", "gradients", "activations", "together"]
    assert lines[1].split()[2:] == ["0.39", "0.78", "0.29", "1.47"]
    large = replace(small, parameters=3 << 30, data=2 << 20)
    assert "data" not in table([Row("a worker", large)])
    both = table([Row("a worker", large), Row("another", replace(large, data=1 << 30))])
    assert "< 0.01" in both.splitlines()[1]


def test_products_and_rules_have_rows_too() -> None:
    survey = Survey(jobs.mlp_adamw())
    shapes = [Island.parse(text) for text in ("dp=2,pp=2", "dp=2,tp=2", "fsdp=2,tp=2", "dp=2,fsdp=2")]
    sync = {row.name: row.need for row in survey.rows(shapes)}
    assert list(sync) == [
        "coordinator", "a worker alone", *(f"dp=2,pp=2, rank {rank}" for rank in range(4)), "dp=2,tp=2, a rank",
        "dp=2,tp=2, with --job", "fsdp=2,tp=2, with --job", "dp=2,fsdp=2, with --job",
    ]  # fmt: skip
    assert sync["dp=2,fsdp=2, with --job"] == "these do not go together"
    half, quarter = survey.needs("tp", 2, with_job=True)[0], sync["fsdp=2,tp=2, with --job"]
    assert quarter.parameters == pytest.approx(half.parameters / 2, rel=0.01)  # type: ignore[union-attr]
    rule = memory.rule_of(UpdateConfig(rule="streaming", codec="int4"))
    local = {row.name: row.need for row in survey.rows(shapes, rule)}
    for name, need in local.items():
        assert isinstance(need, str) or name == "coordinator" or need.optimizer > 0, name
    stages = [local[f"dp=2,pp=2, rank {rank}"] for rank in range(4)]
    inner = sum(stage.optimizer for stage in stages)  # type: ignore[union-attr]
    assert inner == pytest.approx(local["a worker alone"].optimizer, rel=0.01)  # type: ignore[union-attr]


def test_what_cannot_be_cut_says_so() -> None:
    class Branching(Wide):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.shape[0] > 1 else x

    class Reading(Wide):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out if torch.is_grad_enabled() and out.sum() > 0 else out * 2

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(self.up(x).view(-1, 4, 16).flatten(1))
            return out

    class Together(Counting):
        _tp_plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    class Declaring(Counting):
        """In two modules: nothing says that a rank cannot compute its part of them."""

        _tp_plan: ClassVar = {"inner.up": "colwise", "down": "rowwise"}

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"up": self.up})
            del self.up

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(self.inner["up"](x).view(-1, 4, 16).flatten(1))
            return out

    for model in (Counting, Together):
        counting = Survey(replace(jobs.mlp_adamw(), model=model))
        said = [str(row.need) for row in counting.rows([Island("tp", 2), Island.parse("fsdp=2,tp=2")])]
        assert "Need(" in said[-2]
    counting = Survey(replace(jobs.mlp_adamw(), model=Declaring))
    assert "that the model's _tp_plan splits" in str(list(counting.rows([Island("tp", 2)]))[-1].need)
    assert "that the model's _tp_plan splits" in str(
        list(counting.rows([Island.parse("dp=2,tp=2"), Island.parse("fsdp=2,tp=2")]))[-1].need
    )
    survey = Survey(_job(Branching, 16))
    assert "parts at most, not 50" in str(list(survey.rows([Island("pp", 50)]))[-1].need)
    with pytest.raises(JobError, match=r"without computing it .*w5xde predict measures it"):
        Survey(_job(Reading, 16))

    def raises(*_: Any) -> Any:
        raise OSError("disk gone")

    with pytest.raises(JobError, match=r"without computing it \(OSError: disk gone \(test_footprint\.py:\d+\)\)"):
        Survey(replace(_job(Branching, 16), step=raises, loss=None))
    with pytest.raises(JobError, match=r"dataset: the function raised OSError: disk gone \(test_footprint\.py:\d+\)"):
        Survey(replace(_job(Branching, 16), collate=raises))


@pytest.mark.slow
def test_the_program_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert w5xde(["memory", "examples/llama.py:tiny", "--island", "fsdp=2", "--island", "pp=2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("examples/llama.py:tiny: 41,120 parameters, 4 samples a microbatch")
    assert "fsdp=2, a rank" in out
    assert "pp=2, rank 1" in out
    assert "Not counted" in out


def test_it_says_what_a_run_would_choose(capsys: pytest.CaptureFixture[str]) -> None:
    """A microbatch is all of a step that is too short to be shared."""
    assert w5xde(["memory", "examples/digits.py:job", "--island", "dp=2"]) == 0
    assert "9,610 parameters, 64 samples a microbatch, 1 microbatches a leaf" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["examples/llama.py:tiny", "--island", "zero=2"], "zero is none of dp=N"),
        (["examples/llama.py:tiny", "--island", "fsdp=1"], "2 to 1024 ranks"),
        (["examples/llama.py:tiny", "--update", "auto"], "invalid choice"),
        (["examples/llama.py:tiny", "--codec", "int5"], "int5"),
        (["examples/llama.py"], "is not FILE.py:NAME"),
        (["examples/nothing.py:job"], "there is no file"),
        (["n" * 300 + ".py:job"], "there is no file"),
        ([], "JOB"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert memory.main(arguments, prog="w5xde memory") == 2
    assert said in capsys.readouterr().err


# -- against the kernel


class Tower(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def tower(layers: int, width: int, rows: int) -> Job:
    x = torch.randn(4 * rows, width)
    return Job(
        model=lambda: Tower(layers, width), dataset=TensorDataset(x, x), loss=F.mse_loss, batch_size=4 * rows,
        microbatch_size=rows, max_steps=1, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip


def measured_peak(layers: int, width: int, rows: int) -> None:
    """In a process of its own: prints the peak of two leases, and the arithmetic's."""
    torch.set_num_threads(1)
    for job in (tower(1, width, 8), tower(layers, width, rows)):
        survey = Survey(job)
        before = forget_peak()
        engine = Engine(job)
        engine.load(range(len(engine.layout.buckets)))
        vectors = []
        leases = [tuple(torch.randn(2 * rows, width) for _ in range(2)) for _ in range(2)]
        for pair in leases:
            task = Task(
                step=0, start=0, samples=(rows, rows), loss_scale=1.0, structure=flatten(pair)[0], packed=True,
                tensors=pair,
            )  # fmt: skip
            vectors.append(engine.compute(task, lambda bucket, vector: None).vectors)
        peak = peak_bytes() - before
        engine.close()
        del engine, vectors, leases, pair, task
    print(peak, alone(survey.model).together)  # noqa: T201 - for who started this process


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel of Linux")
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("layers", "width", "rows"), [(16, 1024, 64), (8, 256, 4096)])
def test_a_worker_takes_what_the_arithmetic_says(layers: int, width: int, rows: int) -> None:
    """For a model that is large beside its activations, and the other way round."""
    script = f"from tests.unit.test_footprint import measured_peak as m; m({layers}, {width}, {rows})"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path), "MALLOC_MMAP_THRESHOLD_": "1048576"},
        capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    peak, expected = map(int, ran.stdout.split())
    assert peak < 1.1 * expected, f"{peak >> 20} MiB at the peak, {expected >> 20} MiB by the arithmetic"
    assert peak > 0.85 * expected, f"{peak >> 20} MiB at the peak: is it measured? {expected >> 20} MiB by arithmetic"


_TABLE = """
import sys
from tests.support.resident import peak_bytes
from w5xde_async.memory import main
main(sys.argv[1].split())
print(peak_bytes())
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("job", "parameters", "rows"), [("b1", 1_235_814_400, 18), ("b8", 8_030_261_248, 8)])
def test_the_documents_tables_are_the_programs_and_take_little_memory(job: str, parameters: int, rows: int) -> None:
    text = (Path(__file__).parents[2] / "docs" / "islands.md").read_text(encoding="utf-8")
    quoted = re.findall(r"```sh\nw5xde memory ([^\n]*)\n```\n\n```text\n(.*?)\n```", text, re.DOTALL)
    ((command, table),) = [one for one in quoted if f":{job} " in one[0]]
    if job == "b8":  # cutting 8 billion parameters takes a minute; the rows that need no cut are compared
        command = re.sub(" --island (pp|tp)=[0-9]", "", command)
        table = "\n".join(row for row in table.splitlines() if not row.startswith(("pp=", "tp=")))
    ran = subprocess.run(
        [sys.executable, "-c", _TABLE, command], env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert len(table.splitlines()) == rows
    assert table in ran.stdout
    assert f"{parameters:,} parameters" in ran.stdout
    assert int(ran.stdout.split()[-1]) < 2 << 30  # the parameters alone would be 5 and 30 GiB


def test_the_module_is_measured_where_it_lies() -> None:
    """``faked`` undoes nothing and changes nothing of what it is given."""
    model = model_without_memory(_job(Wide, 16))
    with footprint.faked(model) as (copied, known):
        assert copied is not model
        assert len(known) == 4  # two weights and their gradients
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())
