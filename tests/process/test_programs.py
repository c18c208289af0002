"""The two programs as people meet them: real processes, signals and exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.support.forking import PYTHON, SEARCHED
from tests.support.ports import free_port
from tests.support.processes import ROOT, Program, programs

from w5xde_async.cluster.worker_processes import PRESTARTED
from w5xde_async.errors import ExitCode
from w5xde_async.net.join import write_private_line

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(120)]

DIGITS = f"{ROOT}/examples/digits.py:job"
JOBS = """
import os
import signal
import sys
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from w5xde_async import Job

NOT_A_JOB = 3

def _job(model, **more):
    data = TensorDataset(torch.zeros(64, 4), torch.zeros(64, dtype=torch.int64))
    settings = dict(
        model=model, dataset=data, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.functional.cross_entropy, batch_size=8, microbatch_size=4, max_steps=20,
    )
    return Job(**(settings | more))

def job():
    return _job(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))

def scored():
    def step(model, batch):
        output = model(batch[0])
        return nn.functional.cross_entropy(output, batch[1]), {"right": (output.argmax(1) == batch[1]).float().mean()}
    def evaluate(model):
        return {"val_loss": nn.functional.cross_entropy(model(torch.zeros(1, 4)), torch.zeros(1, dtype=torch.int64))}
    return _job(
        lambda: nn.Linear(4, 2), loss=None, step=step, evaluate=evaluate, evaluate_every=4, keep_best="val_loss",
    )

def wider():
    return _job(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))

def quiet():
    if "--exit-with-stdin" not in sys.argv:
        return job()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    return wider()

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(200)
        return super().forward(x)

def slow():
    return _job(lambda: Slow(4, 2))

class Failing(nn.Linear):
    def forward(self, x):
        raise RuntimeError("a bug of the user")

def failing():
    return _job(lambda: Failing(4, 2))

class Asserting(nn.Linear):
    # On a worker what CUDA does where a label is out of range: every call fails from then on.
    def forward(self, x):
        if (x == 7).any():
            if "--exit-with-stdin" not in sys.argv:
                raise IndexError("Target 7 is out of bounds.")
            from w5xde_async.compute.transfer import Transfer
            Transfer.lost = lambda self: (1, "CUDA error: device-side assert triggered")
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        return super().forward(x)

def asserting():
    data = torch.zeros(64, 4)
    data[21] = 7  # the second leaf of the third step
    return _job(
        lambda: Asserting(4, 2), dataset=TensorDataset(data, torch.zeros(64, dtype=torch.int64)), shuffle=False,
    )

def raises():
    raise ValueError("no data here")

def signalled():
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGHUP)
    return job()

def stopped():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(200)
    except BaseException:
        pass
    return job()

def number():
    return 3
"""


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    with programs() as start:
        yield start


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    path = tmp_path / "jobs.py"
    path.write_text(JOBS)
    return str(path)


def coordinate(job: str, run_dir: Path, *more: str) -> tuple[str, ...]:
    place = ("--run-dir", str(run_dir), "--port", "0", "--log-format", "json")
    return ("w5xde_async.coordinator", job, *place, *more)


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    with programs() as start:
        program = start(*arguments, **environment)
        return program.finish(), "".join(program.text)


def token_file(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def local_workers(coordinator: int) -> list[int]:
    """Process ids of workers that this process has started, dead or alive."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if [PRESTARTED, str(coordinator)] == words[-3:-1]:
            found.append(int(entry.parent.name))
    return found


def assert_all_gone(coordinator: int, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while local_workers(coordinator):
        assert time.monotonic() < deadline, "workers were left behind"
        time.sleep(0.05)


# -- runs


def test_two_local_workers_and_again_when_it_is_complete(
    start: Callable[..., Program], jobs: str, tmp_path: Path
) -> None:
    """In interpreters of their own, as people start them."""
    command = coordinate(f"{jobs}:job", tmp_path / "run", "--workers", "2")
    program = start(*command, fresh=True)
    program.wait_for("step_committed")
    if hasattr(os, "SCHED_BATCH"):  # whom the coordinator wakes lets it tell the others too
        of_workers = {os.sched_getscheduler(worker) for worker in local_workers(program.process.pid)}
        of_loop = os.sched_getscheduler(program.process.pid)  # which has short slices, and what it starts has not
        assert (of_workers, of_loop) == ({os.SCHED_BATCH}, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK)
    assert program.finish() == ExitCode.OK
    finished = program.last("run_finished")
    assert finished["outcome"] == "finished"
    assert {share["name"] for share in finished["shares"]} == {"local-0", "local-1"}
    assert_all_gone(program.process.pid)
    assert "hush" not in (tmp_path / "run" / "config.toml").read_text()

    again = start(*command)
    assert again.finish() == ExitCode.OK
    assert again.last("run_finished")["digest"] == finished["digest"]
    assert "--resume never" in again.last("run_finished")["reason"]


def test_options_of_another_rule_are_named_at_the_start(
    start: Callable[..., Program], jobs: str, tmp_path: Path
) -> None:
    given = "--workers 1 --quorum 0.3 --batch-patience 5".split()
    program = start(*coordinate(f"{jobs}:job", tmp_path / "run", *given))
    assert program.finish() == ExitCode.OK
    said = [event["text"] for event in program.events if event.get("event") == "warned"]
    assert said.count(
        "--update sync has no use for --quorum (local, streaming); --batch-patience does nothing without --target-batch"
    ) == 1  # fmt: skip


def test_ctrl_c_then_the_same_command_goes_on(start: Callable[..., Program], tmp_path: Path) -> None:
    command = coordinate(DIGITS, tmp_path / "digits", "--workers", "2", "--log", "verbose", "--epochs", "100")
    first = start(*command)
    first.wait_for("step_committed", step=30)
    first.signal(signal.SIGINT)
    assert first.finish() == ExitCode.OK
    stopped = first.last("run_finished")
    assert (stopped["outcome"], stopped["reason"]) == ("stopped", "Ctrl-C")
    assert stopped["step"] < stopped["total_steps"]
    assert_all_gone(first.process.pid)

    second = start(*command)
    assert second.finish() == ExitCode.OK
    assert second.last("run_started")["resumed_step"] == stopped["step"]
    assert second.last("run_finished")["outcome"] == "finished"
    assert second.last("run_finished")["metrics"]["accuracy"] >= 0.95


def test_short_steps_are_computed_by_the_coordinator_with_the_workers_bits(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    """Also where it is killed in the middle of one. ``--short-steps workers`` has them sent."""
    steps = ("--workers", "2", "--epochs", "40", "--log", "verbose", "--checkpoint-every", "50")
    killed = start(*coordinate(DIGITS, tmp_path / "here", *steps))
    killed.wait_for("step_committed", step=200)
    killed.signal(signal.SIGKILL)
    killed.process.wait(30)
    ended = {}
    for who, folder in (("here", "here"), ("workers", "sent")):
        program = start(*coordinate(DIGITS, tmp_path / folder, *steps, "--short-steps", who))
        assert program.finish() == ExitCode.OK
        ended[who] = program.last("run_finished")
    assert ended["here"]["digest"] == ended["workers"]["digest"]
    leaves = {who: {share["name"]: share["leaves"] for share in end["shares"]} for who, end in ended.items()}
    assert leaves["here"]["coordinator"] > sum(leaves["here"].values()) / 2
    assert "coordinator" not in leaves["workers"]
    assert_all_gone(killed.process.pid)


def test_the_best_model_is_kept_over_a_resume_and_begins_another_run(
    start: Callable[..., Program], jobs: str, tmp_path: Path
) -> None:
    """As a user does it: stop, go on, look at the page, take the best weights, begin with them elsewhere."""
    run_dir, best = tmp_path / "run", tmp_path / "run" / "best.safetensors"
    command = coordinate(
        f"{jobs}:scored", run_dir, "--workers", "1", "--dashboard", "--dashboard-address", "127.0.0.1:0"
    )
    first = start(*command, "--max-steps", "8")
    assert first.finish() == ExitCode.OK
    kept = first.last("run_finished")["best"]
    assert (kept["metric"], kept["step"], kept["path"]) == ("val_loss", 8, str(best))

    second = start(*command, "--max-steps", "1000000")
    page = second.wait_for("run_started")["dashboard"]
    second.wait_for("evaluated", step=12)
    with urllib.request.urlopen(f"{page}api/v1/evaluations") as answer:
        evaluations = json.load(answer)
    assert [one["step"] for one in evaluations][:3] == [4, 8, 12]
    with urllib.request.urlopen(f"{page}metrics") as answer:
        assert 'w5xde_step_metric{metric="right"} 1.0' in answer.read().decode()
    second.signal(signal.SIGINT)
    assert second.finish() == ExitCode.OK
    assert second.last("run_finished")["best"]["value"] < kept["value"]

    model = torch.nn.Linear(4, 2)
    model.load_state_dict(safetensors.torch.load_file(best))
    warm = coordinate(f"{jobs}:scored", tmp_path / "warm", "--max-steps", "4", "--init-from", str(best))
    third = start(*warm, "--min-workers", "1", code_free=True)
    address = third.wait_for("run_started")["address"]
    worker = start("w5xde_async.worker", "--server", address, "--threads", "1", cwd=tmp_path)  # without job and file
    assert third.finish() == ExitCode.OK
    assert worker.finish() == ExitCode.OK
    assert third.last("run_finished")["best"]["value"] < second.last("run_finished")["best"]["value"]

    code, text = run(*coordinate(f"{jobs}:wider", tmp_path / "other", "--init-from", str(best)))
    assert code == ExitCode.USAGE
    assert "is of another model: it lacks 0.weight, 0.bias, 1.weight and 1 more; the model lacks weight, bias" in text


def test_what_local_workers_left_out_outlives_ctrl_c(start: Callable[..., Program], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    command = coordinate(
        DIGITS, tmp_path / "digits", "--workers", "2", "--log", "verbose", "--max-steps", "200", "--codec", "topk:0.1",
        "--data-dir", str(kept),
    )  # fmt: skip
    first = start(*command)
    first.wait_for("step_committed", step=30)
    first.signal(signal.SIGINT)
    assert first.finish() == ExitCode.OK
    assert {path.name.split("-")[2] for path in kept.iterdir()} == {"local0", "local1"}
    assert start(*command).finish() == ExitCode.OK
    assert not list(kept.iterdir())  # taken up by the next ones, and of no use after the end


def until_gone(program: Program, number: signal.Signals) -> None:
    """As a person tells it again and again: what follows the first within a moment is its echo."""
    for _ in range(100):
        if program.process.poll() is not None:
            return
        program.signal(number)
        time.sleep(0.05)


def test_a_signal_that_comes_twice_within_a_moment_is_one(start: Callable[..., Program], tmp_path: Path) -> None:
    """timeout(1) passes on what the terminal tells its whole group."""
    program = start(*coordinate(DIGITS, tmp_path / "digits", "--workers", "1", "--max-steps", "1000000"))
    program.wait_for("step_committed", step=30)
    for _ in range(3):
        program.signal(signal.SIGINT)
        time.sleep(0.03)
    assert program.finish() == ExitCode.OK
    assert program.last("run_finished")["outcome"] == "stopped"
    assert program.last("checkpoint_saved")["step"] == program.last("run_finished")["step"]


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_everything_at_once(
    start: Callable[..., Program], jobs: str, tmp_path: Path, second: signal.Signals
) -> None:
    program = start(*coordinate(f"{jobs}:slow", tmp_path / "run", "--workers", "1", "--grace", "100"))
    program.wait_for("worker_joined")
    program.signal(signal.SIGINT)
    told = program.wait_for("warned")["text"]
    assert told.startswith("Ctrl-C: the step under way is finished (at most 100 s), then a checkpoint is saved;")
    assert "again: ends at once, and loses what is not saved" in told
    until_gone(program, second)
    assert program.finish() == ExitCode.INTERRUPTED_TWICE  # without waiting for the step or --grace
    assert program.last("warned")["text"].startswith("ended at once, at step 0: what was not saved is lost")
    assert_all_gone(program.process.pid)


def test_workers_end_with_a_coordinator_that_is_killed(
    start: Callable[..., Program], jobs: str, tmp_path: Path
) -> None:
    program = start(*coordinate(f"{jobs}:slow", tmp_path / "run", "--workers", "1"))
    program.wait_for("worker_joined")
    program.signal(signal.SIGKILL)
    program.finish()
    assert_all_gone(program.process.pid)


def test_sigterm_during_a_long_step_gives_it_up(start: Callable[..., Program], jobs: str, tmp_path: Path) -> None:
    program = start(*coordinate(f"{jobs}:slow", tmp_path / "run", "--workers", "1", "--grace", "0.2"))
    program.wait_for("worker_joined")
    program.signal(signal.SIGTERM)
    assert program.finish() == ExitCode.OK  # which does not wait for as long as the step takes
    assert program.last("run_finished")["outcome"] == "stopped"
    assert_all_gone(program.process.pid)


def test_a_killed_worker_is_started_again_and_sigusr1_writes_a_checkpoint(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    program = start(*coordinate(DIGITS, tmp_path / "run", "--workers", "2", "--epochs", "25"))
    program.wait_for("worker_joined", num_workers=2)
    program.signal(signal.SIGUSR1)
    program.wait_for("checkpoint_saved")
    os.kill(local_workers(program.process.pid)[0], signal.SIGKILL)
    log = program.wait_for("log")
    assert "was ended by SIGKILL and is started again" in log["message"]
    assert program.finish() == ExitCode.OK
    assert program.last("run_finished")["metrics"]["accuracy"] >= 0.95


def test_one_that_could_never_work_is_not_started_again_though_its_job_puts_what_is_printed_elsewhere(
    start: Callable[..., Program], jobs: str, tmp_path: Path
) -> None:
    program = start(*coordinate(f"{jobs}:quiet", tmp_path / "run", "--workers", "1", "--short-steps", "workers"))
    assert program.finish() == ExitCode.ERROR
    text = "".join(program.text)
    assert f"worker local-0 ended with exit code {int(ExitCode.MISMATCH)}" in text
    assert "started again" not in text


def test_user_code_that_fails_stops_the_run_and_names_the_samples(
    start: Callable[..., Program], jobs: str, tmp_path: Path
) -> None:
    program = start(*coordinate(f"{jobs}:failing", tmp_path / "run", "--workers", "2"))
    assert program.finish() == ExitCode.ERROR
    failed = program.last("run_finished")
    assert failed["outcome"] == "failed"
    assert "sample indices [" in failed["reason"]
    assert "a bug of the user" in failed["reason"]
    assert 'jobs.py", line' in failed["reason"]
    assert "a bug of the user (jobs.py:" in program.last("exit")["message"]


def test_a_worker_that_lost_its_device_is_started_again_and_the_coordinator_names_the_samples(
    start: Callable[..., Program], jobs: str, tmp_path: Path
) -> None:
    """And no worker is held to have died of the leaf: it said what happened."""
    program = start(*coordinate(f"{jobs}:asserting", tmp_path / "run", "--workers", "1"))
    assert program.finish() == ExitCode.ERROR
    log = [event["message"] for event in program.events if event["event"] == "log"]
    assert any(f"ended with exit code {int(ExitCode.DEVICE_LOST)} and is started again" in text for text in log), log
    failed = program.last("run_finished")
    assert failed["outcome"] == "failed"
    assert "step 2, leaf 1: " in failed["reason"]
    assert "samples 20, 21, 22, 23" in failed["reason"]
    assert "Target 7 is out of bounds" in failed["reason"]


def test_tokens_and_models_that_do_not_fit(start: Callable[..., Program], jobs: str, tmp_path: Path) -> None:
    right, wrong = token_file(tmp_path / "right", "hush-hush"), token_file(tmp_path / "wrong", "guess")
    program = start(*coordinate(f"{jobs}:job", tmp_path / "run", "--token-file", right, "--min-workers", "2"))
    address = program.wait_for("run_started")["address"]

    def worker(job: str, *more: str, **environment: str) -> tuple[int, str]:
        given = ("--server", address, "--job", f"{jobs}:{job}", "--connect-timeout", "20", *more)
        return run("w5xde_async.worker", *given, **environment)

    code, said = worker("job", HOME=str(tmp_path))
    assert code == ExitCode.AUTHENTICATION
    assert "has none" in said
    code, said = worker("job", "--token-file", wrong)
    assert code == ExitCode.AUTHENTICATION
    code, said = worker("wider", W5XDE_TOKEN="hush-hush")
    assert code == ExitCode.MISMATCH
    assert "1.weight" in said
    assert "Traceback" not in said

    joined: list[Any] = [
        start("w5xde_async.worker", "--server", address, "--job", f"{jobs}:job", "--token-file", right)
        for _ in range(2)
    ]
    assert program.finish() == ExitCode.OK
    assert [one.finish() for one in joined] == [ExitCode.OK, ExitCode.OK]
    shown = "".join(program.text) + (tmp_path / "run" / "config.toml").read_text()
    assert "hush" not in shown


ONE_CANNOT = """
import os
import sys
from pathlib import Path
if "worker" in sys.argv[0]:
    try:
        os.close(os.open(Path(__file__).with_name("taken"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        raise RuntimeError("this machine has one device") from None
"""


def test_a_worker_whose_own_code_is_other_code_is_named(start: Callable[..., Program], tmp_path: Path) -> None:
    """Its model and its data fit, so that nothing refuses it; what it computes may be another loss."""
    job = JOBS + "import losses\ndef own(): return _job(lambda: nn.Linear(4, 2), loss=losses.of, max_steps=1000000)\n"
    for folder, loss in (("there", "cross_entropy"), ("same", "cross_entropy"), ("edited", "multi_margin_loss")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(job)
        (tmp_path / folder / "losses.py").write_text(f"from torch.nn.functional import {loss} as of\n")
    program = start(*coordinate(f"{tmp_path}/there/own.py:own", tmp_path / "run"))
    address = program.wait_for("run_started")["address"]

    def join(folder: str) -> None:
        job = f"{tmp_path}/{folder}/own.py:own"
        start("w5xde_async.worker", "--server", address, "--name", folder, "--job", job)
        program.wait_for("worker_joined")

    def said() -> list[str]:
        return [text for one in program.events if "has other code than" in (text := str(one.get("text", "")))]

    join("same")
    join("there")
    assert said() == []
    join("edited")
    join("same")
    (text,) = said()
    assert text.startswith("worker edited has other code than this coordinator")
    assert "without --job" in text


def test_a_run_begins_without_a_worker_that_cannot_work(start: Callable[..., Program], tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(ONE_CANNOT + JOBS)
    program = start(*coordinate(f"{tmp_path}/one.py:job", tmp_path / "run", "--workers", "2"))
    assert program.finish() == ExitCode.OK
    said = "".join(program.text)
    assert "ended with exit code 2: the run does not wait for it, and begins with 1 worker" in said


def test_a_worker_that_could_never_work_is_not_started_again(
    start: Callable[..., Program], jobs: str, tmp_path: Path
) -> None:
    config = tmp_path / "w5xde.toml"
    config.write_text('[worker]\ndevice = "cuda:99"\n')
    program = start(*coordinate(f"{jobs}:job", tmp_path / "run", "--workers", "2", "--config", str(config)))
    assert program.finish() == ExitCode.ERROR
    assert "every local worker has failed" in program.last("exit")["message"]
    errors = [event for event in program.events if event.get("level") == "error"]
    assert len(errors) == 2
    assert "cuda:99" in errors[0]["message"]


# -- exit codes

COORDINATOR_MISTAKES = {
    "no job": ((), ExitCode.USAGE, "JOB is missing"),
    "no reference": (("jobs.py",), ExitCode.USAGE, "FILE.py:NAME"),
    "no file": (("nothing.py:job",), ExitCode.USAGE, "there is no file nothing.py"),
    "no module": (("no_such_module:job",), ExitCode.USAGE, "there is no module no_such_module"),
    "no such name": (("{jobs}:jbo",), ExitCode.USAGE, "has no 'jbo'"),
    "not a job": (("{jobs}:NOT_A_JOB",), ExitCode.USAGE, "is a int"),
    "returns no job": (("{jobs}:number",), ExitCode.USAGE, "returned int"),
    "raises": (("{jobs}:raises",), ExitCode.USAGE, "raised ValueError: no data here (jobs.py:"),
    "open to others": (("{jobs}:job", "--host", "0.0.0.0", "--insecure"), ExitCode.USAGE, "W5XDE_TOKEN"),
    "run directory below a file": (("{jobs}:job", "--run-dir", "{jobs}/run"), ExitCode.USAGE, "--run-dir"),
    "no such checkpoint": (("{jobs}:signalled", "--resume", "{jobs}.nothing"), ExitCode.USAGE, "jobs.py.nothing"),
    "no checkpoint": (("{jobs}:job", "--resume", "."), ExitCode.USAGE, "step-..."),
    "no codec": (("{jobs}:job", "--codec", "nope"), ExitCode.USAGE, "--codec: 'nope' will not do; give one of raw,"),
    "no tracker": (("{jobs}:job", "--tracker", "nope"), ExitCode.USAGE, "with commas between them: tensorboard"),
    "no host": (("{jobs}:job", "--advertise", "a/b"), ExitCode.USAGE, "'a/b' has no valid host"),
    "no authorities": (("{jobs}:job", "--tls-ca-file", "nope"), ExitCode.USAGE, "TLS authorities nope"),
    "join file below a file": (("{jobs}:job", "--join-file", "{jobs}/join"), ExitCode.USAGE, "jobs.py/join"),
    "stopped while it starts": (("{jobs}:stopped",), ExitCode.OK, "stopped before it began"),
}  # fmt: skip


# Importing torch is most of what a short process does: one process plays all of them.
ALL_IN_ONE = """
import contextlib, io, json, sys
from w5xde_async.coordinator.__main__ import main
results = {}
for name, arguments in json.loads(sys.argv[1]).items():
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = int(main(arguments))
    results[name] = code, said.getvalue()
print(json.dumps(results))
"""


def test_a_coordinator_says_what_is_wrong_in_one_line(jobs: str, tmp_path: Path) -> None:
    given = {}
    for name, (arguments, _, _) in COORDINATOR_MISTAKES.items():
        place = () if "--run-dir" in arguments else ("--run-dir", str(tmp_path / name))
        given[name] = [argument.format(jobs=jobs) for argument in (*arguments, "--port", "0", *place)]
    env = {key: value for key, value in os.environ.items() if not key.startswith("W5XDE_")} | {"HOME": str(tmp_path)}
    command = [sys.executable, "-c", ALL_IN_ONE, json.dumps(given)]
    results = json.loads(subprocess.run(command, env=env, check=True, capture_output=True, timeout=100).stdout)
    for name, (_, expected, part) in COORDINATOR_MISTAKES.items():
        code, said = results[name]
        assert code == expected, (name, said)
        assert part in said, name
        assert said.count("\n") == 1, (name, said)


def test_a_port_that_is_taken(jobs: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ("--port", str(port), "--run-dir", str(tmp_path / "run"))
        code, said = run("w5xde_async.coordinator", f"{jobs}:job", *arguments)
    assert code == ExitCode.PORT_IN_USE
    assert f"127.0.0.1:{port} is in use" in said
    assert said.count("\n") == 1


def test_a_worker_alone(jobs: str) -> None:
    here = ("--server", "127.0.0.1:1")
    code, said = run("w5xde_async.worker", *here, "--job", f"{jobs}:job", "--connect-timeout", "1", "--log", "silent")
    assert code == ExitCode.UNREACHABLE
    assert "no coordinator reachable at 127.0.0.1:1 within 1 s" in said
    assert said.count("\n") == 1
    code, said = run("w5xde_async.worker", "--server", "127.0.0.77", "--connect-timeout", "0.1")
    assert code == ExitCode.UNREACHABLE
    assert "connecting server=127.0.0.77:5555 (the default port)" in said
    code, said = run("w5xde_async.worker")
    assert code == ExitCode.USAGE
    assert "--join-file or --server is missing" in said
    code, said = run("w5xde_async.worker", *here, "--job", f"{jobs}:raises")
    assert code == ExitCode.USAGE
    assert "no data here" in said


def test_a_worker_that_is_told_to_go_says_by_its_exit_code_whether_to_start_another(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    """Also where nobody has answered yet. Ctrl-C is a person's: nobody is to be started."""
    for number, flags, code in (
        (signal.SIGTERM, (), ExitCode.DRAINED),
        (signal.SIGUSR1, (), ExitCode.DRAINED),
        (signal.SIGINT, (), ExitCode.OK),
        (signal.SIGTERM, ("--exit-on-drain", "0"), ExitCode.OK),
        (signal.SIGTERM, ("--exit-on-drain", "99", "--island", "dp=2"), 99),
        (signal.SIGINT, ("--island", "dp=2"), ExitCode.OK),
    ):
        worker = start("w5xde_async.worker", "--join-file", str(tmp_path / "join"), *flags)
        while not any(word in line for line in worker.text for word in ("waiting for", "rank 0")):
            assert worker.process.poll() is None, worker.text
            time.sleep(0.01)
        worker.signal(number)
        assert worker.finish() == code, (number, flags, worker.text)


def test_sigusr1_and_then_sigterm_leave_in_good_order(start: Callable[..., Program], jobs: str, tmp_path: Path) -> None:
    """As Slurm sends them. A second SIGTERM is what ends it at once."""
    coordinator = start(*coordinate(f"{jobs}:slow", tmp_path / "run"))
    address = coordinator.wait_for("run_started")["address"]
    flags = ("--job", f"{jobs}:slow", "--log-format", "json", "--grace", "100")
    worker = start("w5xde_async.worker", "--server", address, *flags)
    coordinator.wait_for("worker_joined")
    for number in (signal.SIGUSR1, signal.SIGTERM):
        worker.signal(number)
        told = worker.wait_for("log")
        while not told["message"].startswith(number.name):
            told = worker.wait_for("log")
    assert worker.process.poll() is None
    until_gone(worker, signal.SIGTERM)
    assert worker.finish() == ExitCode.INTERRUPTED_TWICE


def test_a_coordinator_that_is_told_to_stop_may_ask_to_be_started_again(
    start: Callable[..., Program], jobs: str, tmp_path: Path
) -> None:
    command = coordinate(f"{jobs}:job", tmp_path / "run", "--exit-on-drain", "75")
    program = start(*command)
    program.wait_for("run_started")
    program.signal(signal.SIGTERM)
    assert program.finish() == ExitCode.DRAINED
    again = start(*command, "--workers", "1")
    assert again.finish() == ExitCode.OK
    assert run(*coordinate(f"{jobs}:stopped", tmp_path / "early", "--exit-on-drain", "75"))[0] == ExitCode.DRAINED


def test_the_common_program() -> None:
    assert run("w5xde_async", "worker")[0] == ExitCode.USAGE
    assert run("w5xde_async", "dance")[0] == ExitCode.USAGE
    assert run("w5xde_async", "coordinator", "--help")[0] == ExitCode.OK
    assert run("w5xde_async", "--version")[0] == ExitCode.OK


@pytest.mark.skipif(os.name == "nt", reason="Windows has no descriptors that a shell could close")
@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_descriptors_that_a_shell_has_closed(closed: str, jobs: str, tmp_path: Path) -> None:
    """As some supervisors start a program: what it opens first would be its standard input, or its errors."""
    join = tmp_path / "join"
    coordinator = coordinate(f"{jobs}:job", tmp_path / "run", "--join-file", str(join))
    worker = ("w5xde_async.worker", "--join-file", str(join), "--job", f"{jobs}:job", "--threads", "1")
    environment = os.environ | {"PYTHONPATH": SEARCHED, "W5XDE_CODE_FREE": "false", "W5XDE_DASHBOARD": "false"}
    both = [
        subprocess.Popen(["sh", "-c", f'exec "$@" {closed}', "sh", PYTHON, "-m", *arguments], env=environment)
        for arguments in (coordinator, worker)
    ]
    try:
        assert [program.wait(60) for program in both] == [ExitCode.OK, ExitCode.OK]
    finally:
        for program in both:
            program.kill()
            program.wait()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("program", ["coordinator", "worker"])
def test_the_exit_code_stands_where_nothing_can_be_written(program: str) -> None:
    environment = os.environ | {"PYTHONPATH": SEARCHED}
    environment["W5XDE_LOGG"] = "verbose"  # a warning before the end
    command = [PYTHON, "-m", f"w5xde_async.{program}", "--nonsense"]
    reader, nobody_reads = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb", buffering=0) as full, open(nobody_reads, "wb", buffering=0) as closed:
        for sink in (full, closed):
            ended = subprocess.run(command, stderr=sink, env=environment, timeout=60, check=False)
            assert ended.returncode == ExitCode.USAGE
            ended = subprocess.run(
                [*command[:-1], "--help"], stdout=sink, stderr=subprocess.PIPE, env=environment, timeout=60, check=False
            )
            # Who has read enough is content; who has no room has to know.
            expected = (ExitCode.OK, 1) if sink is closed else (ExitCode.ERROR, 2)
            assert (ended.returncode, ended.stderr.count(b"\n")) == expected


# -- joining


def test_a_worker_with_nothing_but_a_join_file(start: Callable[..., Program], jobs: str, tmp_path: Path) -> None:
    """TLS, the secret and the step's program all come by the one file."""
    join = tmp_path / "elsewhere" / "join"
    join.parent.mkdir()
    coordinator = start(*coordinate(f"{jobs}:job", tmp_path / "run", "--join-file", str(join)), code_free=True)
    began = coordinator.wait_for("run_started")
    assert f"--join-file {join}" in began["worker_command"]
    assert join.stat().st_mode & 0o777 == 0o600
    secret = join.read_text().partition("//")[2].partition("@")[0]
    assert len(secret) >= 16
    command = ("w5xde_async.worker", "--join-file", str(join), "--threads", "1")
    worker = start(*command, cwd=tmp_path / "elsewhere")  # where there is no job file
    assert coordinator.finish() == ExitCode.OK
    assert worker.finish() == ExitCode.OK
    said = "".join((*coordinator.text, *worker.text))
    assert secret not in said
    assert [share["leaves"] for share in coordinator.last("run_finished")["shares"]] == [20 * 2]


def test_a_join_file_that_others_could_read_or_that_is_none(start: Callable[..., Program], tmp_path: Path) -> None:
    open_to_all, nonsense = tmp_path / "open", tmp_path / "nonsense"
    open_to_all.write_text(f"w5xde://{'s' * 32}@127.0.0.1:1?cert=sha256:{'0' * 64}\n")
    open_to_all.chmod(0o644)
    nonsense.write_text("127.0.0.1:5555\n")
    nonsense.chmod(0o600)
    for path, words in ((open_to_all, "chmod 600"), (nonsense, "join")):
        code, said = run("w5xde_async.worker", "--join-file", str(path))
        assert code == ExitCode.USAGE, said
        assert words in said
        assert "s" * 32 not in said
        assert "Traceback" not in said
    code, said = run("w5xde_async.worker", "--join-file", str(tmp_path / "missing"), "--connect-timeout", "1s")
    assert code == ExitCode.UNREACHABLE, said
    assert "missing is not there yet" in said


def test_the_doctor_says_what_is_wrong_and_how_a_worker_would_end(tmp_path: Path) -> None:
    join = tmp_path / "join"
    write_private_line(join, f"w5xde://{'s' * 32}@127.0.0.1:1?cert=sha256:{'0' * 64}")
    command = [sys.executable, "-m", "w5xde_async", "doctor", "--join-file", str(join)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == ExitCode.UNREACHABLE, ended
    assert "FAILED  port" in ended.stdout
    assert "start the coordinator" in ended.stdout
    assert "s" * 32 not in ended.stdout + ended.stderr
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as cut:
        assert cut.stdout is not None
        assert cut.stderr is not None
        cut.stdout.close()  # as head does, sooner
        assert cut.wait(60) == ExitCode.UNREACHABLE
        assert b"Traceback" not in cut.stderr.read()
    if Path("/dev/full").exists():
        with open("/dev/full", "wb") as full:
            ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stderr.count("\n")) == (ExitCode.ERROR, 1)
        assert "standard output cannot be written: No space left on device" in ended.stderr
    code, said = run("w5xde_async.doctor", "--join-file", str(tmp_path / "missing"))
    assert code == ExitCode.USAGE, said
    assert "the coordinator writes it" in said


# -- standard error that nobody reads


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The end of a pipe into which nothing more goes: whoever reads it has stopped, as a terminal at Ctrl-S does."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(1 << 12))
    os.set_blocking(writing, True)
    yield writing
    os.close(reading)
    os.close(writing)


@contextmanager
def unread(full_pipe: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("W5XDE_")}
    env |= {"PYTHONPATH": SEARCHED, "W5XDE_DASHBOARD": "false"}
    with subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=full_pipe,
        stderr=full_pipe,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def recorded(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_whose_standard_error_nobody_reads_goes_on_and_ends(full_pipe: int, jobs: str, tmp_path: Path) -> None:
    """Of the coordinator and of a worker."""
    run, port = tmp_path / "run", str(free_port())
    with unread(full_pipe, *coordinate(f"{jobs}:job", run, "--log", "verbose", "--port", port)) as coordinator:
        join = ("--server", f"127.0.0.1:{port}", "--job", f"{jobs}:job", "--log", "verbose")
        with unread(full_pipe, "w5xde_async.worker", *join) as worker:
            assert coordinator.wait(60) == ExitCode.OK
            assert worker.wait(60) == ExitCode.OK
    assert recorded(run)[-1] == "run_finished"


def test_a_stop_ends_a_coordinator_whose_standard_error_nobody_reads(full_pipe: int, jobs: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = coordinate(f"{jobs}:slow", run, "--workers", "1", "--grace", "0.2")
    with unread(full_pipe, *arguments) as coordinator:
        while "worker_joined" not in recorded(run):
            assert coordinator.poll() is None
            time.sleep(0.05)
        coordinator.send_signal(signal.SIGTERM)
        assert coordinator.wait(60) == ExitCode.OK
