"""Islands of real processes: the digest of single workers, whatever is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import jobs
from tests.support.chaos import show
from tests.support.cluster import settings, train
from tests.support.processes import ROOT, Program, programs
from tests.support.programs import TRACEABLE
from tests.unit import test_parallel_unusual_steps as unusual

from w5xde_async.cluster.worker_processes import LocalWorkers
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import ExitCode
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.telemetry.events import Bus, Event, StepCommitted, WorkerJoined
from w5xde_async.updates.config import UpdateConfig

pytestmark = [pytest.mark.slow, pytest.mark.processes]
JOB = f"{ROOT / 'tests/support/jobs.py'}:gpt_adamw"
CNN = f"{ROOT / 'tests/support/jobs.py'}:cnn_sgd"


@pytest.fixture
def start() -> Iterator[Any]:
    with programs() as started:
        yield started


FAILING = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from w5xde_async import Job

class Failing(nn.Linear):
    def forward(self, x):
        raise RuntimeError("a bug of the user")

def job():
    return Job(
        model=lambda: Failing(4, 2), dataset=TensorDataset(torch.zeros(64, 4), torch.zeros(64, dtype=torch.int64)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.cross_entropy,
        batch_size=8, microbatch_size=4, max_steps=20,
    )
"""


def coordinator(start: Any, tmp_path: Path, *arguments: str, job: str = JOB, **kwargs: Any) -> tuple[Program, str]:
    program = start(
        "w5xde_async.coordinator", job, "--port", "0", "--run-dir", str(tmp_path / f"run{len(os.listdir(tmp_path))}"),
        "--log-format", "json", *arguments, **kwargs,
    )  # fmt: skip
    return program, program.wait_for("run_started")["address"]


def worker(start: Any, address: str, *arguments: str, job: str = JOB, **kwargs: Any) -> Program:
    program: Program = start(
        "w5xde_async.worker", "--server", address, "--job", job, "--threads", "1", "--log-format", "json", *arguments,
        **kwargs,
    )  # fmt: skip
    return program


@pytest.mark.timeout(120)  # tracing
@pytest.mark.parametrize(
    ("name", "shape"), [("mlp", "fsdp=2"), ("gpt", "pp=2 --pp-schedule gpipe --checkpoint-activations")]
)
def test_an_island_without_the_jobs_code_has_the_digest_of_one_process(
    start: Any, tmp_path: Path, name: str, shape: str
) -> None:
    """It may be there before its coordinator is: where that is, and so what the island may do, the join file says."""
    torch.set_num_threads(1)
    module, given = ("jobs", "mlp_adamw") if name == "mlp" else ("programs", "gpt")
    join = str(tmp_path / "join")
    island = start(
        "w5xde_async.worker", "--join-file", join, "--threads", "1", "--log-format", "json", "--island", *shape.split()
    )  # fmt: skip
    program = start(
        "w5xde_async.coordinator", f"{ROOT}/tests/support/{module}.py:{given}", "--port", "0", "--log-format", "json",
        "--run-dir", str(tmp_path / "run"), "--join-file", join,
        code_free=True,
    )  # fmt: skip
    assert digest(program) == asyncio.run(train(TRACEABLE[name])).digest
    assert island.finish() == 0, "".join(island.text)


def digest(program: Program) -> str:
    assert program.finish() == 0, "".join(program.text[-20:])
    return str(program.last("run_finished")["digest"])


@pytest.fixture(scope="module")
def expected() -> str:
    """The digest of one worker, in this process."""
    torch.set_num_threads(1)
    return asyncio.run(train(jobs.gpt_adamw)).digest


def ranks_of(island: Program) -> dict[int, int]:
    """Process ids by rank."""
    found: dict[int, int] = {}
    for children in Path(f"/proc/{island.process.pid}/task").glob("*/children"):
        for pid in children.read_text().split():
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {int(one[5:]): int(pid) for one in environment if one.startswith(b"RANK=")}
    return found


@pytest.mark.parametrize("shape", ["dp=2", "fsdp=2 --checkpoint-activations"])
def test_an_island_has_the_digest_of_a_single_worker(start: Any, tmp_path: Path, expected: str, shape: str) -> None:
    program, address = coordinator(start, tmp_path)
    island = worker(start, address, "--island", *shape.split())
    assert digest(program) == expected
    assert island.finish() == 0, "".join(island.text)


def test_a_step_that_does_what_few_do_has_the_digest_of_a_single_worker(start: Any, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    job = f"{ROOT / 'tests/unit/test_parallel_unusual_steps.py'}:all_at_once"
    program, address = coordinator(start, tmp_path, job=job)
    island = worker(start, address, "--island", "fsdp=2", job=job)
    assert digest(program) == asyncio.run(train(unusual.all_at_once)).digest
    assert island.finish() == 0, "".join(island.text)


def test_ranks_that_do_not_meet_are_lost_and_not_beyond_hope(start: Any, tmp_path: Path) -> None:
    """Who starts them starts them again. Here somebody else has the port of the meeting."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        program = worker(start, "127.0.0.1:9", "--island", "dp=2", **place, MASTER_PORT=str(other.getsockname()[1]))
        assert program.finish() == ExitCode.ISLAND_LOST, "".join(program.text)
    assert "rank 0 leaves: the ranks did not meet" in "".join(program.text)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("shape", "signals"),  # to ranks, one after the other
    [("dp=2", [(1, signal.SIGSTOP)]), ("fsdp=2", [(0, signal.SIGKILL)])],
    ids=["dp=2", "fsdp=2"],
)
def test_an_island_computes_again_within_15_s(
    start: Any, tmp_path: Path, expected: str, shape: str, signals: list[tuple[int, signal.Signals]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """From the signal to the next step, which nobody else can have computed: what has started a rank sees that it
    ended, or stands still, long before it has been silent for --silence."""
    if (1, signal.SIGSTOP) in signals:
        monkeypatch.setenv("REAL_RANKS", "1")
    program, address = coordinator(start, tmp_path)
    island = worker(start, address, "--island", shape, leaf_s=0.05)
    step, signalled = 0, list[int]()
    try:
        for lost, number in signals:
            program.wait_for("step_committed", step=step + 3)
            began = time.monotonic()
            signalled.append(ranks_of(island)[lost])
            os.kill(signalled[-1], number)
            assert not program.wait_for("worker_left")["clean"]
            found_s = time.monotonic() - began
            program.wait_for("worker_joined")
            step = program.wait_for("step_committed")["step"]
            again_s = time.monotonic() - began
            show(f"{shape}: {number.name} to rank {lost}: lost after {found_s:.1f} s, again after {again_s:.1f} s")
            assert found_s < 6
            assert again_s < 15
    finally:  # one that still stands would keep the pipes of what has started it
        for pid in signalled:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert digest(program) == expected
    assert island.finish() == 0, "".join(island.text)


def test_local_steps_on_shards_have_the_digest_of_a_single_worker(start: Any, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    rule = UpdateConfig(rule="local", inner_steps=3)
    program, address = coordinator(start, tmp_path, "--update", "local", "--inner-steps", "3", job=CNN)
    island = worker(start, address, "--island", "fsdp=2", job=CNN)
    assert digest(program) == asyncio.run(train(jobs.cnn_sgd, update=rule)).digest
    assert island.finish() == 0, "".join(island.text)


def test_a_rank_is_killed_under_streaming_int4(start: Any, tmp_path: Path) -> None:
    update = ("--update", "streaming", "--codec", "int4", "--inner-steps", "4", "--fragments", "2")
    program, address = coordinator(start, tmp_path, *update, "--min-workers", "2", job=CNN)
    island = worker(start, address, "--island", "fsdp=2", job=CNN, leaf_s=0.05)
    single = worker(start, address, job=CNN, leaf_s=0.05)
    program.wait_for("step_committed", step=8)
    os.kill(ranks_of(island)[1], signal.SIGKILL)
    assert not program.wait_for("worker_left")["clean"]
    digest(program)
    assert (single.finish(), island.finish()) == (0, 0), "".join(island.text)
    steps = [event for event in program.events if event.get("event") == "step_committed"]
    assert steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.parametrize("told", ["all", "a rank"])
def test_an_island_is_told_to_leave_and_a_single_worker_goes_on(
    start: Any, tmp_path: Path, expected: str, told: str
) -> None:
    program, address = coordinator(start, tmp_path, "--min-workers", "2")
    island, single = worker(start, address, "--island", "dp=2", leaf_s=0.05), worker(start, address, leaf_s=0.05)
    program.wait_for("step_committed", step=3)
    if told == "all":
        island.signal(signal.SIGTERM)
    else:
        os.kill(ranks_of(island)[1], signal.SIGTERM)
    assert island.finish() == 75
    assert program.wait_for("worker_left")["clean"]
    assert digest(program) == expected
    assert single.finish() == 0


def test_who_takes_the_place_of_a_member_that_was_killed_at_its_start_is_not_kept_waiting(
    start: Any, tmp_path: Path, expected: str
) -> None:
    """Before its rank was there: the other's would wait five minutes for it, and nobody could join that member."""
    job = tmp_path / "late.py"
    job.write_text(LATE)
    program, address = coordinator(start, tmp_path, job=f"{job}:gpt_adamw")
    first = worker(start, address, "--island-member", "fsdp=2", job=f"{job}:gpt_adamw")
    ends = time.monotonic() + 30
    while "waiting for the other members" not in "".join(first.text):  # it is to be rank 0
        assert time.monotonic() < ends, "".join(first.text)
        time.sleep(0.02)
    killed = worker(start, address, "--island-member", "fsdp=2", job=f"{job}:gpt_adamw", LATE="1")
    while len(ranks_of(first)) + len(ranks_of(killed)) < 2:
        assert time.monotonic() < ends, "".join(first.text + killed.text)
        time.sleep(0.02)
    (late,) = ranks_of(killed).values()
    killed.signal(signal.SIGKILL)
    os.kill(late, signal.SIGKILL)
    instead = worker(start, address, "--island-member", "fsdp=2", job=f"{job}:gpt_adamw")
    assert digest(program) == expected
    assert first.finish() == instead.finish() == 0
    assert "is gone" in "".join(first.text)


LATE = """
import os
import time
from tests.support.jobs import gpt_adamw

if "RANK" in os.environ and "LATE" in os.environ:
    time.sleep(60)
"""


def test_a_run_that_has_failed_ends_its_islands(start: Any, tmp_path: Path) -> None:
    job = tmp_path / "failing.py"
    job.write_text(FAILING)
    program, address = coordinator(start, tmp_path, job=f"{job}:job")
    island = worker(start, address, "--island", "dp=2", job=f"{job}:job")
    member = worker(start, address, "--island-member", "dp=2", job=f"{job}:job")
    assert program.finish() == 1
    assert island.finish(30) == 1, "".join(island.text)
    assert "a bug of the user" in "".join(island.text)
    member.close()


BREAKING = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
from w5xde_async import Job

class Refusing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        if (x == 7).any():
            raise RuntimeError("a bug of the user")
        return self.layer(x)

def divide(model, mesh):
    fully_shard(model, mesh=mesh["fsdp"])

def job():
    x = torch.zeros(8, 4)
    x[0] = 7
    return Job(
        model=Refusing, dataset=TensorDataset(x, torch.zeros(8, dtype=torch.int64)), parallelize=divide,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.cross_entropy,
        batch_size=8, microbatch_size=1, max_steps=20,
    )
"""


@pytest.mark.timeout(120)
def test_a_leaf_that_breaks_an_island_is_told_and_ends_the_run(start: Any, tmp_path: Path) -> None:
    """One rank raises; the other waits for it, and nothing that it meets then is the job's error."""
    job = tmp_path / "breaking.py"
    job.write_text(BREAKING)
    program, address = coordinator(start, tmp_path, "--max-leaf-failures", "2", job=f"{job}:job")
    island = worker(start, address, "--island", "fsdp=2", job=f"{job}:job")
    assert program.finish() == 1
    code, text = island.finish(30), "".join(island.text)
    assert code == 1, text
    again = [line for line in island.text if "all of it is started again" in line]
    assert len(again) == 1
    assert re.search(r"rank \d ended with exit code 8: step 0, leaf \d: RuntimeError: a bug of the user", again[0])
    assert "is lost to this process" not in text
    assert not [line for line in island.text if "leaf failed leaf=" in line and "a bug of the user" not in line]


LLAMA = f"{ROOT / 'examples/llama.py'}:tiny"


def parameters(run: Path) -> torch.Tensor:
    """The trained parameters of a run's last checkpoint, in one vector."""
    record, _ = CheckpointStore(run / "checkpoints").latest()
    assert record is not None
    return torch.cat([tensor.flatten() for tensor in record.groups["model"].values()])


@pytest.mark.timeout(150)
def test_tensor_parallel_islands_repeat_and_lie_near_one_process(start: Any, tmp_path: Path) -> None:
    found = []
    for number, islands in enumerate(([], ["tp=2"], ["tp=2", "tp=2"])):
        run = tmp_path / f"run{number}"
        program = start(
            "w5xde_async.coordinator", LLAMA, "--port", "0", "--run-dir", str(run), "--log-format", "json",
            "--max-steps", "6", "--audit-fraction", "0.5", "--min-workers", str(max(1, len(islands))),
        )  # fmt: skip
        address = program.wait_for("run_started")["address"]
        workers = [worker(start, address, "--island", shape, job=LLAMA) for shape in islands]
        workers += [] if islands else [worker(start, address, job=LLAMA)]
        found.append((digest(program), parameters(run)))
        assert [one.finish() for one in workers] == [0] * len(workers), "".join(workers[0].text)
    (_, alone), (one, first), (two, _) = found
    assert one == two
    assert not torch.equal(alone, first)
    # AdamW divides by what is nearly nothing in the first steps: the distance grows with them.
    assert float((alone - first).norm() / alone.norm()) < 1e-5


QUIET = """
import os
from tests.support import jobs

def job():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return jobs.mlp_adamw()
"""


@pytest.mark.parametrize("island", ["", "dp=2"])
async def test_a_local_worker_says_by_what_id_it_is_known(island: str, tmp_path: Path) -> None:
    """Also where its head is a process that it has started, and where its job puts what is printed elsewhere."""
    job = tmp_path / "quiet.py"
    job.write_text(QUIET)
    bus, joined, told = Bus(), list[str](), list[list[str]]()

    def see(event: Event) -> None:
        if isinstance(event, WorkerJoined):
            joined.append(event.worker_id)
        elif isinstance(event, StepCommitted):
            told.append(list(workers._ids.values()))

    bus.subscribe(see)
    async with Coordinator(jobs.mlp_adamw(), config=settings(), bus=bus) as coordinator:
        workers = LocalWorkers(1, address=coordinator.address, reference=f"{job}:job", island=island)
        async with workers:
            await coordinator.wait()
    assert len(joined) == 1
    assert told[-1] == joined
