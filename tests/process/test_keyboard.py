"""What a user types and reads on the first days: the programs, as text, in a directory with a file of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.processes import Program, programs

from w5xde_async.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(120)]

FILE = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from w5xde_async import Job

X = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X.sum(1) > 0).long())

def job(**changes):
    settings = dict(
        model=lambda: nn.Linear(4, 2), dataset=DATA, loss=nn.functional.cross_entropy, batch_size=8, microbatch_size=2,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5), max_steps=12,
    )
    return Job(**(settings | changes))

class Photos:
    def __len__(self): return 512
    def __getitem__(self, index):
        if index == 57: raise ValueError("corrupt JPEG")
        return X[index], int(X[index].sum() > 0)

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)

class Nan(nn.Linear):
    def forward(self, x): return super().forward(x) * float("nan")

def as_numpy(samples):
    return {"input_ids": torch.stack([x for x, _ in samples]).numpy(), "labels": torch.stack([y for _, y in samples])}

def no_weights(): raise RuntimeError("the weights are not there")
def loss_of(model): return {"val_loss": nn.functional.cross_entropy(model(X), DATA.tensors[1]).item()}

def photos(): return job(dataset=Photos(), shuffle=False)
def collate(): return job(collate=as_numpy)
def over(): return job(scheduler=lambda it: torch.optim.lr_scheduler.OneCycleLR(it, 0.5, total_steps=6))
def adam(): return job(optimizer=torch.optim.Adam)
def steplr(): return job(scheduler=torch.optim.lr_scheduler.StepLR)
def linear(): return job(model=nn.Linear)
def factory(): return job(model=no_weights)
def loader(): return job(dataset=DataLoader(DATA, batch_size=8))
def doubles(): return job(dataset=TensorDataset(X.double(), DATA.tensors[1]))
def tensor(): return job(evaluate=lambda model: torch.tensor(0.5), evaluate_every=2)
def nan(): return job(model=lambda: Nan(4, 2))
def slow(): return job(model=lambda: Slow(4, 2), max_steps=10_000)
def good(): return job(evaluate=loss_of, evaluate_every=4, keep_best="val_loss", max_steps=8)
def lower(): return job(
    evaluate=loss_of, evaluate_every=4, keep_best="val_loss", max_steps=8,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
)
def early(): return job(
    evaluate=loss_of, evaluate_every=4, keep_best="val_loss", max_steps=10_000,
    stop_when=lambda metrics: metrics["val_loss"] < 0.2,
)
"""

TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from w5xde_async.hf import job_of

def job():
    tokens = torch.randint(32, (40, 12), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": one, "labels": one} for one in tokens]
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=4, learning_rate=1e-2,
        use_cpu=True, report_to=[], disable_tqdm=True, eval_strategy="steps", eval_steps=2,
        metric_for_best_model="loss",
    )
    return job_of(Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), arguments, train_dataset=samples,
                          eval_dataset=samples[:8]))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """``start("good", ...)`` is a coordinator of that job, in a directory where its file lies."""
    (tmp_path / "train.py").write_text(FILE)
    with programs() as begin:

        def coordinate(job: str, *more: str, port: int = 0) -> Program:
            command = ("w5xde_async.coordinator", f"train.py:{job}", "--port", str(port), *more)
            program: Program = begin(*command, cwd=tmp_path)
            return program

        coordinate.worker = lambda *more, cwd: begin("w5xde_async.worker", *more, "--threads", "1", cwd=cwd)  # type: ignore[attr-defined]
        yield coordinate


def read(program: Program, words: str, timeout_s: float = 60.0) -> str:
    """What stands on the screen, once ``words`` do."""
    deadline = time.monotonic() + timeout_s
    while words not in (text := "".join(program.text)):
        assert time.monotonic() < deadline, text
        assert program.process.poll() is None or words in "".join(program.text), text
        time.sleep(0.02)
    return text


def ended(program: Program) -> tuple[int, str]:
    code = program.finish()
    return code, "".join(program.text)


# -- what is wrong is said in a line


MISTAKES = {
    "adam": "write optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=...)",
    "steplr": "write scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, ...)",
    "linear": "write model=lambda: torch.nn.Linear(...)",
    "factory": "the function raised RuntimeError: the weights are not there (train.py:",
    "loader": "dataset is a DataLoader; give its dataset=loader.dataset, and collate=loader.collate_fn",
}
#: Importing torch is most of what a short process does: one plays them all.
ALL_IN_ONE = """
import contextlib, io, json, sys
from w5xde_async.coordinator.__main__ import main
results = {}
for arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = int(main(arguments))
    results[arguments[0]] = code, said.getvalue()
print(json.dumps(results))
"""


def test_mistakes_in_a_job_and_the_help(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FILE)
    given = [[f"train.py:{name}", "--port", "0"] for name in MISTAKES] + [["--help"], ["--help-all"]]
    env = {key: value for key, value in os.environ.items() if not key.startswith("W5XDE_")} | {"COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", ALL_IN_ONE, json.dumps(given)], env=env, cwd=tmp_path, check=True, capture_output=True,
        timeout=100,
    )  # fmt: skip
    results = json.loads(done.stdout)
    for name, words in MISTAKES.items():
        code, said = results[f"train.py:{name}"]
        assert (code, said.count("\n")) == (ExitCode.USAGE, 1), said
        assert words in said
        assert ".py:" not in said.partition("raised")[2] or "(train.py:" in said or "(optimizer.py:" in said, said
    flags = {
        word: set(re.findall(r"^ {2}(--[\w-]+)", results[word][1], re.MULTILINE)) for word in results if word[0] == "-"
    }
    assert 8 <= len(flags["--help"]) <= 15, flags["--help"]
    assert len(flags["--help-all"]) > 60
    assert "--help-all" in results["--help"][1]


@pytest.mark.parametrize(
    ("job", "headline"),
    [
        ("photos", r"step 7, leaf 0: ValueError: corrupt JPEG \(train.py:\d+\), sample 57"),
        ("collate", r"step 0, leaf 0: TypeError: batch\['input_ids'\] is a ndarray; .*convert it in collate.*"),
        ("doubles", r"step 0, leaf \d: RuntimeError: .*; the batch is float64: convert it with .float\(\).*"),
        ("nan", r"the gradient was not finite in \d+ steps in a row, .*lower the learning rate.*"),
    ],
)
def test_a_failed_run_ends_with_its_cause(start: Callable[..., Program], job: str, headline: str) -> None:
    code, text = ended(start(job, "--workers", "2"))
    assert code == ExitCode.ERROR
    assert re.fullmatch(rf"python -m w5xde_async.coordinator: {headline}", text.splitlines()[-1]), text
    assert text.count("Traceback (most recent call last)") <= 1, text  # one report, not one for each worker and try
    assert "finished\n" not in text


def test_an_evaluation_that_gives_a_tensor_is_told_once_with_what_to_write(start: Callable[..., Program]) -> None:
    code, text = ended(start("tensor", "--workers", "1"))
    assert code == ExitCode.OK
    assert text.count("evaluate raised") == 1, text
    assert "it returned a tensor of shape [], not a dict of numbers by name; write return {'accuracy': ...}" in text


# -- stop, and go on


def test_ctrl_c_says_what_happens_what_a_second_does_and_how_to_go_on(start: Callable[..., Program]) -> None:
    program = start("slow", "--workers", "1", "--name", "mine")
    text = read(program, "step 1/10,000")
    assert "Start a worker on this machine (--host 0.0.0.0 lets others in)" in text
    program.signal(signal.SIGINT)
    read(program, "Ctrl-C: the step under way is finished (at most 10 s), then a checkpoint is saved;")
    code, text = ended(program)
    assert code == ExitCode.OK
    assert "again: ends at once, and loses what is not saved" in text
    after = text.partition("To go on from here:")[2]
    words = after.split()
    said = words[: words.index("python")]
    assert sorted(said) == ["W5XDE_CODE_FREE=false", "W5XDE_DASHBOARD=false"]  # as the program found them
    command = "python -m w5xde_async.coordinator train.py:slow --port 0 --workers 1 --name mine"
    assert words[len(said) :] == command.split()


def test_ctrl_c_before_the_first_step_says_how_to_go_on_too(start: Callable[..., Program]) -> None:
    program = start("good", "--min-workers", "1", "--name", "mine")
    read(program, "waiting: 0 of 1 workers")
    program.signal(signal.SIGINT)
    code, text = ended(program)
    assert code == ExitCode.OK
    after = text.partition("To go on from here:")[2]
    assert after.rstrip().endswith(
        "python -m w5xde_async.coordinator train.py:good --port 0 --min-workers 1 --name mine"
    )
    assert "no plot" not in text


def test_after_a_kill_the_steps_that_the_screen_showed_are_counted(start: Callable[..., Program]) -> None:
    same = ("slow", "--workers", "1", "--log-format", "json", "--log", "verbose")
    first = start(*same)
    first.wait_for("step_committed", step=2)
    first.signal(signal.SIGUSR1)
    saved = first.wait_for("checkpoint_saved")["step"]
    shown = first.wait_for("step_committed", step=saved + 2)["step"]
    time.sleep(0.15)  # of the tenth of a second within which a line is on the disk
    first.signal(signal.SIGKILL)
    first.finish()
    second = start(*same, "--max-steps", str(shown + 1))
    assert second.finish() == ExitCode.OK
    assert second.last("run_started")["resumed_step"] == saved
    told = [event["text"] for event in second.events if "were done before" in event.get("text", "")]
    assert len(told) == 1, second.text
    first_again, last_again = map(int, re.findall(r"steps (\d+) to (\d+)", told[0])[0])
    assert (first_again, last_again >= shown) == (saved + 1, True)


def test_a_schedule_that_is_over_loses_nothing_and_is_made_longer(start: Callable[..., Program]) -> None:
    code, text = ended(start("over", "--workers", "1"))
    assert code == ExitCode.ERROR
    assert re.search(r"the update after step 7 raised ValueError: Tried to step 7 times", text.splitlines()[-1])
    assert "When that is mended, go on from here:" in text
    code, text = ended(start("over", "--workers", "1", "--override", "scheduler.total_steps=40"))
    assert code == ExitCode.OK, text
    assert "resumed at step 7" in text
    assert "from step 7 on scheduler.total_steps is 40, was 6" in text


def test_others_are_told_the_address_that_their_join_file_calls(start: Callable[..., Program]) -> None:
    program = start("good", "--host", "0.0.0.0", "--advertise", "gpu-box.example.org", "--min-workers", "1")
    text = read(program, "--join-file")
    assert "gpu-box.example.org" in text
    assert "on this machine (--host" not in text
    program.signal(signal.SIGINT)
    assert program.finish() == ExitCode.OK


GOES = """
import os
import torch
from torch import nn
from w5xde_async import Job

class Goes(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index == 5:
            os.chdir({elsewhere!r})
        return torch.full((4,), float(index)), index % 2

def job():
    os.chdir({elsewhere!r})
    return Job(model=lambda: nn.Linear(4, 2), dataset=Goes(), loss=nn.functional.cross_entropy, batch_size=4, epochs=2,
               optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
"""


def test_a_job_that_goes_to_another_directory_leaves_its_files_where_they_were_asked_for(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "train.py").write_text(GOES.format(elsewhere=str(elsewhere)))
    code, text = ended(start("job", "--workers", "1", "--run-dir", "here"))
    assert code == ExitCode.OK, text
    assert re.search(r"^  model +here/model.safetensors$", text, re.MULTILINE), text
    assert {"model.safetensors", "metrics.jsonl", "checkpoints"} <= {
        path.name for path in (tmp_path / "here").iterdir()
    }
    assert not list(elsewhere.iterdir())


INTERRUPTS = """
import torch
from torch import nn
from w5xde_async import Job

calls = 0

def step(model, batch):
    global calls
    calls += 1
    if calls > 50:
        raise KeyboardInterrupt
    return model(batch[0]).sum()

def job():
    data = torch.utils.data.TensorDataset(torch.zeros(8, 4))
    return Job(model=lambda: nn.Linear(4, 2), dataset=data, step=step, batch_size=4, epochs=100,
               optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
"""


def test_an_interrupt_that_a_step_raises_itself_is_its_failure(start: Callable[..., Program], tmp_path: Path) -> None:
    """No worker takes it for Ctrl-C and leaves for good."""
    (tmp_path / "train.py").write_text(INTERRUPTS)
    same = ("--workers", "1", "--worker-threads", "1", "--short-steps", "workers")  # on its main thread, as it is short
    code, text = ended(start("job", *same))
    assert code == ExitCode.ERROR, text
    assert "leaf 0: KeyboardInterrupt (train.py:" in text, text
    assert "Task exception" not in text


def test_a_trainer_of_transformers_is_trained_by_the_program(start: Callable[..., Program], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    program = start("job", "--workers", "1")
    code, text = ended(program)
    assert code == ExitCode.OK, text
    assert re.search(r"^  best +eval_loss [\d.]+ at step 4 · runs/train/best.safetensors", text, re.MULTILINE), text
    assert "warning" not in text


# -- a run that is changed, with workers elsewhere, which leave with 0


def test_a_run_is_changed_from_start_to_start_with_workers_elsewhere(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    """Another learning rate, more steps, an early stop, the best kept over all, and another run that begins there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run(job: str, *more: str) -> str:
        join = tmp_path / "join"
        join.unlink(missing_ok=True)
        coordinator = start(job, "--join-file", str(join), "--min-workers", "2", *more)
        workers = [
            start.worker("--join-file", str(join), "--job", f"{tmp_path}/train.py:{job}", cwd=elsewhere)
            for _ in range(2)
        ]  # type: ignore[attr-defined]
        code, text = ended(coordinator)
        assert code == ExitCode.OK, text
        assert [worker.finish() for worker in workers] == [ExitCode.OK] * 2, [worker.text for worker in workers]
        return text

    def best(text: str) -> tuple[float, int]:
        found = re.search(r"^  best +val_loss ([\d.]+) at step (\d+)", text, re.MULTILINE)
        assert found, text
        return float(found[1]), int(found[2])

    same = ("--name", "mine")
    first = run("good", *same)
    assert best(first)[1] == 8
    # A changed job file alone changes nothing, which is said with what to give; the run goes on for longer.
    second = run("lower", *same, "--max-steps", "12")
    assert "resumed at step 8" in second
    assert "lr=0.5 counts, not the job's 0.05; give --override optimizer.lr=X to change it" in second
    assert best(second)[0] < best(first)[0]
    third = run("lower", *same, "--max-steps", "16", "--override", "optimizer.lr=0.05")
    assert "from step 12 on optimizer.lr is 0.05, was 0.5" in third
    fourth = run("early", *same, "--override", "optimizer.lr=0.5")
    assert "resumed at step 16" in fourth
    value, step = best(fourth)
    assert value < 0.2
    assert step < 10_000
    assert re.search(r"^finished", fourth, re.MULTILINE)
    warm = run("good", "--name", "warm", "--init-from", "runs/mine/best.safetensors", "--max-steps", "4")
    assert best(warm)[0] < best(first)[0]
