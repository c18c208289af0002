"""What a run will need, told before it is started, and held against what it needs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.facade import Data, Model, calls, model, no_secret_of_this_machine, node_for, serve, server_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.run import prediction
from w5xde_async.coordinator.run.prediction import Prediction, predict
from w5xde_async.errors import JobError, UsageError
from w5xde_async.facade.guava import DistributedConfig, Orchestrator
from w5xde_async.job import Job
from w5xde_async.predict import main
from w5xde_async.telemetry import wording
from w5xde_async.updates.config import UpdateConfig

__all__ = ["calls", "no_secret_of_this_machine"]

pytestmark = pytest.mark.usefixtures("no_secret_of_this_machine")

WIDE = 256


class Deep(nn.Module):
    """Keeps of each ReLU its output, which is the next layer's input; what the first one gets is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU())
        self.head = nn.Linear(WIDE, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x))
        return out


def job(**kwargs: Any) -> Job:
    x = torch.randn(64, WIDE)
    given: dict[str, Any] = {
        "model": Deep, "dataset": TensorDataset(x, (x.sum(1) > 0).long()), "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda model: torch.optim.Adam(model.parameters()), "batch_size": 32, "epochs": 3,
    }  # fmt: skip
    return Job(**(given | kwargs))


PARAMETERS = 2 * (WIDE * WIDE + WIDE) + 2 * WIDE + 2


def test_sizes_follow_from_model_optimizer_and_settings() -> None:
    given = job(batch_size=64, microbatch_size=32, epochs=6)
    told = predict(given, workers=2, device="cpu")
    assert (told.steps, told.step_samples, told.leaves, told.workers) == (6, 64, 2, 2)
    assert told.num_parameters == PARAMETERS
    assert 4 * PARAMETERS <= told.model_bytes < 4 * PARAMETERS + 64 * 6
    assert 8 * PARAMETERS <= told.optimizer_bytes < 8 * PARAMETERS + 4 * 6 + 64  # two moments, and a counter each
    assert 4 * PARAMETERS <= told.up_bytes < 4 * PARAMETERS + 64 * 6
    batch = 32 * (4 * WIDE + 8)  # half of the step's samples
    assert told.down_bytes == told.up_bytes + batch
    assert told.worker_bytes > 3 * told.model_bytes
    most = predict(given, workers=200, device="cpu")
    assert most.for_workers_bytes > 10 * told.for_workers_bytes
    assert most.step_s == most.leaf_s + most.update_s  # a leaf each, and then the coordinator's update
    assert told.total_s == 6 * told.step_s == pytest.approx(6 * (told.leaf_s + told.update_s))
    assert 0 < told.leaf_s < 1
    assert 0 < told.update_s < 1


def test_updates_take_their_time_at_the_coordinator_or_at_each_worker() -> None:
    """Of the same job: one after the other for all workers, or each worker's own."""

    def told(rule: str) -> Prediction:
        config = CoordinatorConfig(update=UpdateConfig(rule=rule))
        return predict(job(batch_size=1, microbatch_size=1), config, workers=1000, device="cpu")

    sync, late, local = told("sync"), told("async"), told("local")
    assert sync.step_s == sync.leaf_s + sync.update_s
    assert late.step_s == late.update_s
    assert local.step_s == pytest.approx((local.leaf_s + local.update_s) / 1000)
    assert f"{wording.brief(sync.update_s)} an update" in str(sync)


@pytest.mark.parametrize(("rule", "where"), [("sync", "cpu"), ("async", "cpu"), ("local", "meta")])
def test_an_update_is_measured_where_it_is_made(rule: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the coordinator, or on each worker's device, for which the meta device stands here."""
    meta, seen = torch.device("meta"), list[str]()
    monkeypatch.setattr(prediction, "choose_device", lambda _: meta)
    monkeypatch.setattr(prediction, "_measured", lambda *_: (0, 0.1))
    monkeypatch.setattr(nn.Module, "to", lambda self, device: self.to_empty(device=torch.device(device)))

    def updated(_: Job, model: nn.Module) -> tuple[int, float]:
        seen.append(next(model.parameters()).device.type)
        return 0, 2.0

    monkeypatch.setattr(prediction, "_updated", updated)
    predict(job(), CoordinatorConfig(update=UpdateConfig(rule=rule)), workers=2, device="cuda")
    assert seen == [where]


def test_an_optimizer_is_given_dense_gradients_as_in_a_run() -> None:
    """AdamW takes no sparse ones, and the run sums them."""

    def model() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 3))

    rows = TensorDataset(torch.randint(0, 50, (64, 4)), torch.randint(0, 3, (64,)))
    told = predict(job(model=model, dataset=rows), device="cpu")
    assert told.optimizer_bytes >= 2 * 4 * 50 * 8


def test_activations_are_what_the_forward_pass_keeps() -> None:
    told = predict(job(microbatch_size=16), device="cpu")
    kept = 16 * WIDE * 4
    assert 2 * kept <= told.activation_bytes <= 2 * kept + 16 * 64  # two outputs of ReLU; logits
    assert predict(job(microbatch_size=8), device="cpu").activation_bytes == pytest.approx(
        told.activation_bytes / 2, rel=0.1
    )


def test_codecs_and_rules_are_fewer_bytes() -> None:
    def bytes_of(**kwargs: Any) -> tuple[int, int]:
        told = predict(job(), CoordinatorConfig(update=UpdateConfig(**kwargs)), device="cpu")
        return told.up_bytes, told.down_bytes

    raw = bytes_of()
    half = bytes_of(codec="bf16")
    assert half[0] == pytest.approx(raw[0] / 2, rel=0.01)
    assert half[1] < raw[1]
    sparse = bytes_of(codec="topk:0.01")
    assert sparse[0] < raw[0] / 50
    assert bytes_of(rule="local", inner_steps=10)[0] == pytest.approx(raw[0] / 10, abs=1)
    accumulated = predict(job(accumulate_grad_batches=2, microbatch_size=4), device="cpu")
    assert (accumulated.leaves, accumulated.up_bytes) == (4, raw[0])
    endless = predict(job(epochs=None, max_steps=1_000_000_000), device="cpu")
    assert endless.total_s == math.inf
    assert "until stopped" in str(endless)
    assert "in all" not in str(endless)


@pytest.mark.parametrize("rule", ["async", "local", "async-local"])
def test_under_other_rules_a_lease_is_a_whole_step(rule: str) -> None:
    """However many workers there are; each has steps of its own, so each step's bytes are of one of them."""
    one, four = (
        predict(
            job(microbatch_size=4), CoordinatorConfig(update=UpdateConfig(rule=rule)), workers=workers, device="cpu"
        )
        for workers in (1, 4)
    )  # fmt: skip
    assert four.worker_bytes == one.worker_bytes
    assert four.up_bytes == pytest.approx(one.up_bytes / 4, abs=1)
    assert four.down_bytes == pytest.approx(one.down_bytes / 4, abs=1)
    each = 8 * four.leaf_s + (0.0 if rule == "async" else four.update_s)
    assert four.step_s == pytest.approx(max(each / 4, four.update_s if rule == "async" else 0.0))
    shared = predict(job(microbatch_size=4), workers=4, device="cpu")
    assert shared.step_s == 2 * shared.leaf_s + shared.update_s
    assert shared.worker_bytes < four.worker_bytes


def test_workers_that_have_the_data_are_sent_none() -> None:
    sent = predict(job(), device="cpu")
    there = predict(job(local_data=lambda where: TensorDataset(torch.randn(64, WIDE), torch.zeros(64))), device="cpu")
    assert sent.down_bytes - there.down_bytes == 32 * (4 * WIDE + 8) - 32 * 8
    assert there.worker_bytes == sent.worker_bytes


def test_every_buffer_is_counted() -> None:
    """A worker has those that are saved twice, and others once."""

    class Buffered(Deep):
        def __init__(self, numel: int, persistent: bool) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(numel), persistent=persistent)

    def told(numel: int, *, persistent: bool) -> tuple[int, int]:
        found = predict(job(model=lambda: Buffered(numel, persistent)), device="cpu")
        return found.model_bytes, found.worker_bytes

    none, saved, unsaved = told(0, persistent=False), told(1 << 20, persistent=True), told(1 << 20, persistent=False)
    assert unsaved[0] - none[0] == 4 << 20
    assert saved[0] - none[0] == 4 << 20
    assert unsaved[1] - none[1] == 4 << 20
    assert saved[1] - none[1] >= 8 << 20


def test_predictions_change_nothing_and_are_told_by_both_facades(calls: Any, tmp_path: Path) -> None:
    given = model()
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    random = torch.random.get_rng_state()
    server = server_of(tmp_path / "run", model=given)
    told = server.predict(nodes=2)
    assert not (tmp_path / "run").exists()
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.state_dict().items())
    assert torch.equal(random, torch.random.get_rng_state())
    assert given.layers[0].weight.grad is None
    lines = str(told).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["steps", "coordinator", "a worker", "network", "time"]
    orchestrator = Orchestrator(DistributedConfig(num_workers=2, checkpoint_dir=str(tmp_path / "checkpoints")))
    orchestrator.register_model(given)
    data = Data()
    loader = DataLoader(TensorDataset(data.x, data.y), batch_size=8)
    guavas = orchestrator.predict(loader, 3)
    assert (guavas.steps, guavas.leaves, guavas.workers) == (18, 2, 2)
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_sends_what_was_predicted(calls: Any) -> None:
    server = server_of(None, model=Model(2000), compression="bf16", max_steps=10)
    told = server.predict()
    running, _ = serve(calls, server)
    node_for(server, model=lambda: Model(2000), log="silent").train()
    result = running.result(30)
    (share,) = result.shares
    assert 10 * told.up_bytes <= share.encoded_bytes <= 10 * told.most_results * told.up_bytes
    assert share.bytes_received > 0.9 * 10 * told.down_bytes


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: predict(job(), workers=0), "workers is 0"),
        (lambda: predict(job(), device="abacus"), "abacus"),
        (lambda: predict(job(model=lambda: 3)), "returned int"),
        (lambda: predict(job(loss=lambda output, target: output.banana)), "job step: the function raised Attribute"),
        (lambda: predict(job(optimizer=lambda model: 1 / 0)), "job optimizer: the function raised ZeroDivision"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(wrong: Any, said: str) -> None:
    with pytest.raises((UsageError, JobError), match=said) as raised:
        wrong()
    assert "\n" not in str(raised.value)


JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from w5xde_async import Job

x = torch.randn(64, 8)
job = Job(model=nn.Linear(8, 2), dataset=TensorDataset(x, (x.sum(1) > 0).long()), loss=nn.CrossEntropyLoss(),
          optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), batch_size=16, epochs=2)
"""


@pytest.mark.usefixtures("as_a_program")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A coordinator's command line with another first word."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(JOB)
    assert main(["train.py:job", "--workers", "3", "--codec", "int8", "--max-steps", "5"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("steps        5, of 16 samples in 1 leaf; 18 parameters\n")
    assert "for 3 workers" in told
    assert not Path("runs").exists()
    assert main(["nothing.py:job"]) == 2
    assert "there is no file nothing.py" in capsys.readouterr().err
