"""``w5xde tune``: which sizes it tries, what it says of them, and that it measures runs."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from pathlib import Path
from threading import Event
from typing import ClassVar

import pytest
import torch
from tests.support import jobs
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async import tune
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import LeafFailed, LocalError, UsageError
from w5xde_async.job import Job, build_model
from w5xde_async.net.tls import TlsFiles
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.settings import read
from w5xde_async.settings.programs import TuningSettings
from w5xde_async.tune import Row, plain_loop, report, sizes
from w5xde_async.updates.config import UpdateConfig


def row(size: int, together: float, alone: float = 1000.0) -> Row:
    return Row(microbatch=size, leaves=64 // size, alone=alone, together=together, worker_bytes=200_000_000)


def thrice(own: Row, *others: Row) -> dict[int, list[tuple[Row, Row]]]:
    """Measured again to the same figures."""
    return {other.microbatch: [(own, other)] * 3 for other in others}


def test_a_step_is_whole_or_each_worker_has_one_to_eight_leaves_and_the_jobs_own_size_is_among_them() -> None:
    job = replace(jobs.mlp_sgd(), batch_size=64, microbatch_size=None)
    assert sizes(job, 2) == [64, 32, 16, 8, 4]
    assert sizes(job, 3) == [64, 22, 11, 8, 6, 3]
    assert sizes(replace(job, microbatch_size=5), 2) == [64, 32, 16, 8, 5, 4]
    assert sizes(replace(job, accumulate_grad_batches=4, microbatch_size=4), 4) == [16, 4, 2, 1]
    with pytest.raises(UsageError, match="a step of 64 samples has no leaf for each of 65 workers"):
        sizes(job, 65)


def test_a_batch_that_grows_has_two_whole_leaves_at_least() -> None:
    job = replace(jobs.mlp_sgd(), batch_size=60, microbatch_size=30)
    assert sizes(job, 2) == [60, 30, 15, 8, 4]
    assert sizes(job, 2, grows=True) == [30, 15, 4]
    assert sizes(replace(job, accumulate_grad_batches=3, microbatch_size=10), 2, grows=True) == [10, 5, 2]


def test_a_dataset_of_fewer_samples_than_a_batch_has_smaller_steps() -> None:
    job = replace(jobs.mlp_sgd(), dataset=TensorDataset(*(part[:20] for part in jobs.digits())), batch_size=64)
    assert sizes(replace(job, microbatch_size=None), 2) == [20, 10, 8, 5, 3, 2]
    assert sizes(replace(job, microbatch_size=64), 2) == [20, 10, 5, 3, 2]  # the same one leaf


def test_the_fastest_is_named_with_what_it_gains() -> None:
    job = replace(jobs.mlp_sgd(), batch_size=64, microbatch_size=None)
    rows = [row(32, 1500.0), row(8, 1000.0)]
    turns = [(rows[1], rows[0]), (row(8, 1000.0), row(32, 1200.0)), (row(8, 900.0), row(32, 1260.0))]
    said = report(job, rows, {32: turns}, 1400.0, workers=2, threads=1)
    assert "microbatch_size=32,  # 1.40 times (1.20 to 1.5 in 3 turns) as fast as 8 with 2 workers here" in said
    assert "200 MB  (the job's)" in said
    assert "plain loop is faster" not in said
    said = report(job, [row(32, 1010.0), row(8, 1000.0)], {}, 9000.0, workers=2, threads=1)
    assert "microbatch_size=8 is as good as any here." in said
    assert "the plain loop is faster" in said


def test_a_size_that_was_faster_by_chance_is_not_named_for_the_job() -> None:
    """A machine that others use may be three times slower in one minute than in the next."""
    job = replace(jobs.mlp_sgd(), batch_size=64, microbatch_size=None)
    rows = [row(32, 2100.0), row(16, 1500.0), row(8, 1000.0)]
    turns = [(rows[2], rows[0]), (row(8, 1000.0), row(32, 810.0)), (row(8, 500.0), row(32, 600.0))]
    said = report(job, rows, {32: turns, **thrice(rows[2], rows[1])}, 900.0, workers=2, threads=1)
    assert "microbatch_size=16,  # 1.5 times (1.5 to 1.5 in 3 turns) as fast as 8" in said
    assert "With 32 it was 1.20 times (0.81 to 2.1 in 3 turns) as fast as with 8" in said
    said = report(job, [rows[0], rows[2]], {32: turns}, 900.0, workers=2, threads=1)
    assert "microbatch_size=8 is as good as any here." in said


def test_what_is_best_for_one_worker_is_named_too_and_what_nobody_shares() -> None:
    job = replace(jobs.mlp_sgd(), batch_size=64, microbatch_size=None)
    rows = [row(64, 1900.0, 1900.0), row(32, 2000.0, 1000.0), row(8, 2000.0, 1000.0)]
    said = report(job, rows, thrice(rows[2], rows[0]), 2000.0, workers=2, threads=1)
    assert "microbatch_size=8 is as good as any here." in said
    assert "One worker alone is 1.9 times (1.9 to 1.9 in 3 turns) as fast with 64." in said
    rows[0] = row(64, 3000.0, 3000.0)
    said = report(job, rows, thrice(rows[2], rows[0]), 2000.0, workers=2, threads=1)
    assert "1.5 times (1.5 to 1.5 in 3 turns) as fast as 8 with 2 workers here" in said
    assert "no step is shared out to 2 workers then" in said
    assert "alone" not in said


class _Workers(AsyncExitStack):
    """None of them."""

    processes: ClassVar[dict[str, int]] = {}

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


def test_workers_that_do_not_begin_are_told_of_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_PATIENCE_S", 0.0)
    monkeypatch.setattr("w5xde_async.cluster.worker_processes.LocalWorkers", _Workers)
    running = tune.measured(jobs.mlp_sgd(), 16, "", CoordinatorConfig(), workers=2, threads=1, seconds=1.0)
    with pytest.raises(
        LocalError, match=r"^microbatch_size=16: 0 of 1 workers have joined and computed 0 steps in 0 s"
    ):
        asyncio.run(running)


def test_a_step_that_does_not_end_is_told_of_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the first few, while it is measured."""
    monkeypatch.setattr(tune, "_WARM_STEPS", 0)
    monkeypatch.setattr(tune, "_PATIENCE_S", 0.01)
    monkeypatch.setattr("w5xde_async.cluster.worker_processes.LocalWorkers", _Workers)
    monkeypatch.setattr("w5xde_async.coordinator.service.Coordinator.num_workers", 1)
    running = tune.measured(jobs.mlp_sgd(), 16, "", CoordinatorConfig(), workers=1, threads=1, seconds=0.0)
    with pytest.raises(LocalError, match=r"1 of 1 workers have joined and computed 0 steps in 0 s: .*hang in it"):
        asyncio.run(asyncio.wait_for(running, 60))


def test_a_run_that_ends_while_it_is_measured_is_told_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Coordinator.start

    async def start(self: Coordinator) -> None:
        await ends(self)
        self.request_stop("planted")

    monkeypatch.setattr(Coordinator, "start", start)
    monkeypatch.setattr("w5xde_async.cluster.worker_processes.LocalWorkers", _Workers)
    running = tune.measured(jobs.mlp_sgd(), 16, "", CoordinatorConfig(), workers=2, threads=1, seconds=1.0)
    with pytest.raises(LocalError, match=r"^microbatch_size=16: the run ended while it was measured: planted"):
        asyncio.run(asyncio.wait_for(running, 60))


#: Of every setting a value that is not the default, and whether a measured run has it.
_TOLD = {
    "token": ("a token that is long enough: 9f8e7d6c", True), "tls": (TlsFiles(Path("cert"), Path("key")), True),
    "insecure": (True, False), "host": ("127.0.0.2", False), "port": (5678, False), "join_file": (Path("join"), False),
    "advertise": ("example.org", False), "heartbeat_s": (2.0, True), "silence_s": (20.0, True),
    "handshake_s": (20.0, True), "join_s": (1.0, False), "bucket_bytes": (1 << 20, True), "bulk_threads": (7, True),
    "credit_bytes": (1 << 20, True), "min_workers": (2, False), "max_workers": (2, True), "grace_s": (1e6, False),
    "numerics": ("any", True), "quarantine": (False, True), "code_free": (True, True), "island": ("pp=2", False),
    "pacing": (PacingConfig(leases_ahead=3), True), "update": (UpdateConfig(codec="lz4"), True),
    "loader_threads": (2, True), "loader_processes": (2, True), "prefetch_leaves": (65, True),
    "max_bad_samples": (2, True), "checkpoint_every": (7, False), "checkpoint_time_s": (7.0, False),
    "keep_checkpoints": (7, False), "durability": ("journal", False), "resume": ("step-7", False),
    "evaluate": (False, False), "dashboard": ("127.0.0.1:5679", False), "trackers": (("tensorboard",), False),
    "norm_gate": (7.0, True), "audit_fraction": (0.1, True), "audit_tolerance": (0.1, True),
    "max_leaf_failures": (7, True), "max_nonfinite_steps": (7, False), "max_steps": (7, False), "epochs": (7, False),
    "max_time_s": (7.0, False), "auto": (True, True), "init_from": (Path("model.safetensors"), False),
    "override": ("optimizer.lr=1", False), "update_device": ("cuda", True), "target_batch": (512, False),
    "batch_patience": (7, False),
}  # fmt: skip


def test_a_measured_run_has_no_file_address_or_limit_of_the_settings() -> None:
    """As a join file, which would be written over another run's. A setting that is new is not passed on either."""
    assert set(_TOLD) == {each.name for each in fields(CoordinatorConfig)}
    for name, (value, kept) in _TOLD.items():
        told = CoordinatorConfig()
        object.__setattr__(told, name, value)  # whatever it goes with
        assert getattr(told, name) != getattr(CoordinatorConfig(), name), name
        assert (getattr(tune._measuring(told), name) == value) is kept, name


def test_one_worker_alone_has_one_column() -> None:
    job = replace(jobs.mlp_sgd(), batch_size=64, microbatch_size=None)
    rows = [row(32, 1500.0, 1500.0), row(8, 1000.0)]
    said = report(job, rows, thrice(rows[1], rows[0]), 100.0, workers=1, threads=2)
    assert said.splitlines()[0].split() == ["microbatch_size", "leaves", "1", "worker", "memory"]
    assert said.splitlines()[1].split() == ["32", "2", "1,500", "200", "MB"]
    assert "microbatch_size=32,  # 1.5 times (1.5 to 1.5 in 3 turns) as fast as 8 with 1 worker here; batch" in said


@pytest.mark.usefixtures("as_a_program")
def test_what_seems_faster_than_the_jobs_own_size_is_measured_again_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(_JOB)
    """With all workers, and then with one."""
    rates = {4: iter([3000.0, 900.0, 1100.0, 950.0]), 2: iter([1000.0] * 9), 1: iter([2500.0, 1900.0, 2100.0, 2000.0])}
    alone = dict.fromkeys(rates, 1000.0)
    order = []

    async def measured(job: Job, size: int, *_: object, **__: object) -> Row:
        order.append(size)
        return row(size, next(rates[size]), alone[size])

    monkeypatch.setattr(tune, "measured", measured)
    monkeypatch.setattr(tune, "plain_loop", lambda *_: 100.0)
    settings, _ = read(TuningSettings, [f"{tmp_path / 'train.py'}:job"], prog="tune")
    assert asyncio.run(tune._prepare(settings, "")()) == 0
    assert order == [4, 2, 1, *([2, 4] * 3), *([2, 1] * 3)]
    told = capsys.readouterr()
    assert "microbatch_size=1,  # 2.0 times (1.9 to 2.1 in 3 turns) as fast as 2" in told.out
    assert "With 4 it was 0.95 times (0.90 to 1.10 in 3 turns)" in told.out
    assert "microbatch_size=4 seems faster than 2: measuring both again, in turn" in told.err
    rates, alone, order[:] = {size: iter([1000.0] * 9) for size in rates}, {4: 1000.0, 2: 1000.0, 1: 1500.0}, []
    assert asyncio.run(tune._prepare(settings, "")()) == 0
    assert order == [4, 2, 1, *([2, 1] * 3)]
    told = capsys.readouterr()
    assert "microbatch_size=2 is as good as any here." in told.out
    assert "One worker alone is 1.5 times (1.5 to 1.5 in 3 turns) as fast with 1." in told.out


@pytest.mark.usefixtures("as_a_program")
@pytest.mark.parametrize("given", ["0", "1"])  # as a coordinator's command line, and what it prints with --print-config
def test_a_coordinators_number_of_workers_will_do(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(_JOB)
    counts = []

    async def measured(job: Job, size: int, *_: object, workers: int, **__: object) -> Row:
        counts.append(workers)
        return row(size, 1500.0)

    monkeypatch.setattr(tune, "measured", measured)
    monkeypatch.setattr(tune, "plain_loop", lambda *_: 100.0)
    settings, _ = read(TuningSettings, [f"{tmp_path / 'train.py'}:job", "--workers", given], prog="tune")
    assert asyncio.run(tune._prepare(settings, "")()) == 0
    assert set(counts) == {1}


def test_a_plain_loop_leaves_the_job_and_torch_as_they_were() -> None:
    job, threads, state = jobs.mlp_sgd(), torch.get_num_threads(), torch.get_rng_state()
    assert plain_loop(job, 1, 0.01, Event()) > 0
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_plain_loop_gives_optimizers_dense_gradients_as_a_run_does() -> None:
    rows = TensorDataset(torch.randint(0, 50, (64, 4)), torch.randint(0, 3, (64,)))
    job = replace(
        jobs.mlp_sgd(), model=lambda: nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 3)), dataset=rows,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    )  # fmt: skip
    assert plain_loop(job, 1, 0.01, Event()) > 0


def test_a_plain_loop_ends_at_the_step_at_which_it_is_stopped() -> None:
    job, stopped, steps = jobs.mlp_sgd(), Event(), 0

    class Stopping(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal steps
            steps += 1
            if steps == 3:
                stopped.set()
            return super().forward(x)  # type: ignore[no-any-return]

    assert plain_loop(replace(job, model=lambda: Stopping(build_model(job))), 2, 1e9, stopped) == 0.0
    assert steps == 3


@pytest.mark.usefixtures("as_a_program")
def test_one_that_is_stopped_in_the_plain_loop_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(_JOB)

    async def measured(job: Job, size: int, *given: object, **named: object) -> Row:
        return row(size, 1500.0)

    def looping(job: Job, threads: int, seconds: float, stopped: Event) -> float:
        signal.raise_signal(signal.SIGINT)
        assert stopped.wait(20)
        return 0.0

    monkeypatch.setattr(tune, "measured", measured)
    monkeypatch.setattr(tune, "plain_loop", looping)
    settings, _ = read(TuningSettings, [f"{tmp_path / 'train.py'}:job"], prog="tune")
    assert asyncio.run(tune._prepare(settings, "")()) == 0
    assert "3 of 3 sizes measured; not measured: the plain loop" in capsys.readouterr().err


@pytest.mark.usefixtures("as_a_program")
def test_a_plain_loop_that_the_job_cannot_make_costs_nothing_of_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole batch may be too large for its code."""
    (tmp_path / "train.py").write_text(_JOB)

    async def measured(job: Job, size: int, *given: object, **named: object) -> Row:
        return row(size, 1500.0)

    def too_large(*_: object) -> float:
        raise RuntimeError("no more\nthan two")

    monkeypatch.setattr(tune, "measured", measured)
    monkeypatch.setattr(tune, "plain_loop", too_large)
    settings, _ = read(TuningSettings, [f"{tmp_path / 'train.py'}:job"], prog="tune")
    assert asyncio.run(tune._prepare(settings, "")()) == 0
    told = capsys.readouterr()
    assert "is as good as any here" in told.out
    assert "plain loop" not in told.out
    assert "a plain loop of whole batches cannot be measured: RuntimeError: no more" in told.err


@pytest.mark.usefixtures("as_a_program")
def test_a_size_that_the_job_cannot_compute_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As batch norm refuses single samples."""
    (tmp_path / "train.py").write_text(_JOB)

    async def measured(job: Job, size: int, *given: object, **named: object) -> Row:
        if size == 1:
            raise LeafFailed(0, 0, [0], 1, "ValueError: Expected more than 1 value per channel")
        return row(size, 1500.0)

    monkeypatch.setattr(tune, "measured", measured)
    monkeypatch.setattr(tune, "plain_loop", lambda *_: 100.0)
    settings, _ = read(TuningSettings, [f"{tmp_path / 'train.py'}:job"], prog="tune")
    assert asyncio.run(tune._prepare(settings, "")()) == 0
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()[:3]] == ["microbatch_size", "4", "2"]
    assert "microbatch_size=1 cannot be computed: step 0, leaf 0: ValueError: Expected more than 1" in told.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 75)])
def test_one_that_is_stopped_shows_what_it_has_measured(
    number: signal.Signals,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text(_JOB)
    given = [f"{tmp_path / 'train.py'}:job", "--exit-on-drain", "75"]

    async def measured(job: Job, size: int, *given: object, **named: object) -> Row:
        if size == 1:
            signal.raise_signal(number)
            await asyncio.Event().wait()
        return row(size, 1500.0)

    monkeypatch.setattr(tune, "measured", measured)
    settings, _ = read(TuningSettings, given, prog="tune")
    assert asyncio.run(tune._prepare(settings, "")()) == code
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()[:3]] == ["microbatch_size", "4", "2"]
    assert "2 of 3 sizes measured; not measured: 1" in told.err


_JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from w5xde_async import Job

def job():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return Job(model=lambda: nn.Linear(8, 1), dataset=TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4,
               optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.mse_loss,
               scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2),
               max_steps=2, microbatch_size=2)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("flags", "own", "rows"),
    [
        ([], 2, [["4", "1"], ["2", "2"], ["1", "4"]]),
        (["--target-batch", "8"], 2, [["2", "2"], ["1", "4"]]),
        (["--target-batch", "8"], 4, [["4", "1"], ["2", "2"], ["1", "4"]]),  # which a run refuses
    ],
    ids=["", "of a batch that grows", "of one that cannot"],
)
def test_the_command_measures_runs_and_leaves_nothing(
    flags: list[str], own: int, rows: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(_JOB.replace("microbatch_size=2", f"microbatch_size={own}"))
    command = [
        sys.executable,
        "-m",
        "w5xde_async.tune",
        "train.py:job",
        "--seconds",
        "0.05",
        "--worker-threads",
        "1",
        *flags,
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1 : lines.index("")]] == rows
    assert "microbatch_size=" in ended.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["train.py"]
