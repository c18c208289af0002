"""A Job from a LightningModule and its data does what Lightning's Trainer does: held against ``Trainer.fit`` itself."""

from __future__ import annotations

import asyncio
import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import reference
from tests.support.cluster import QUICK_WORKER, settings, train
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset, WeightedRandomSampler

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import JobError
from w5xde_async.job import Job
from w5xde_async.lightning import job_of
from w5xde_async.params.flat import named_digest
from w5xde_async.worker.service import Departure, Worker

pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:lightning"),  # of numbers of processes, Slurm, torch's own trees
    pytest.mark.filterwarnings("ignore:of Lightning not taken over"),
]

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X.sum(1) > 0).long())


@pytest.fixture(autouse=True)
def pl() -> Any:
    torch.set_num_threads(1)
    import lightning.pytorch  # here: it takes seconds

    return lightning.pytorch


def module(pl: Any, optimizers: Any = None, **methods: Any) -> Any:
    """A module of the kind that people write: its own optimizers and ``methods``, the rest as below."""
    import torchmetrics

    class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
            self.hits = torchmetrics.classification.MulticlassAccuracy(2, average="micro")

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)  # type: ignore[no-any-return]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self(x.to(self.device))
            loss = nn.functional.cross_entropy(logits, y)
            self.hits(logits, y)
            self.log("hits", self.hits)
            self.log_dict({"train_loss": loss})
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.hits(self(x), y)
            self.log("val_hits", self.hits)
            self.log("val_loss", nn.functional.cross_entropy(self(x), y))

        def configure_optimizers(self) -> Any:
            return (optimizers or each_epoch)(self)

    torch.manual_seed(0)
    return type("Net", (Net,), methods)()


def each_epoch(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def each_step(model: Any) -> Any:
    """As its own documents have it: the schedule asks the trainer how many steps there will be."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = int(model.trainer.estimated_stepping_batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=steps + 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def every_other_epoch(model: Any) -> Any:
    groups = [{"params": model.net[0].parameters(), "lr": 0.2}, {"params": model.net[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    schedule = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "frequency": 2}
    return {"optimizer": optimizer, "lr_scheduler": schedule}


def trainer(pl: Any, **given: Any) -> Any:
    base = {
        "max_epochs": 3, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "accelerator": "cpu", "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return pl.Trainer(**base | given)


def loader(**given: Any) -> DataLoader[Any]:
    return DataLoader(**{"dataset": DATA, "batch_size": 4} | given)


def data(pl: Any) -> Any:
    class Points(pl.LightningDataModule):  # type: ignore[misc, name-defined]
        def prepare_data(self) -> None:
            self.prepared = True

        def setup(self, stage: str) -> None:
            assert self.prepared
            assert stage == "fit"
            assert self.trainer.world_size == 1
            self.points = DATA

        def train_dataloader(self) -> DataLoader[Any]:
            return loader(dataset=self.points)

        def val_dataloader(self) -> DataLoader[Any]:
            return loader(dataset=self.points, batch_size=20)

    return Points()


@pytest.mark.parametrize(
    ("optimizers", "given"),
    [
        (each_epoch, {}),
        (each_step, {"max_epochs": -1, "max_steps": 7, "gradient_clip_val": None}),
        (each_step, {"max_epochs": -1, "max_steps": 7, "gradient_clip_val": -1.0}),
        (every_other_epoch, {"max_epochs": 5, "accumulate_grad_batches": 1}),
        (
            lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
            {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
        ),
    ],
    ids=["each epoch", "each step", "a negative norm", "every other epoch", "bf16"],
)
def test_it_comes_to_the_parameters_of_fit_itself(pl: Any, optimizers: Any, given: dict[str, Any]) -> None:
    ours, theirs = module(pl, optimizers), module(pl, optimizers)
    job = job_of(trainer(pl, **given), ours, data(pl))
    model, _ = reference.train(job)
    assert model is ours
    assert ours._trainer is None
    trainer(pl, **given).fit(theirs, loader())
    for (name, value), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert job.max_steps == theirs.trainer.global_step


def noisy(model: Any) -> Any:
    """A part that differs by its mode is in the way, in eval mode; the rest is trained."""
    model.net.insert(1, nn.BatchNorm1d(8).eval())
    model.net[1].requires_grad_(False)
    model.net.insert(3, nn.Dropout(0.5).eval())
    return model


def test_what_is_in_eval_mode_before_the_training_stays_so(pl: Any) -> None:
    ours, theirs = noisy(module(pl)), noisy(module(pl))
    reference.train(job_of(trainer(pl), ours, loader()))
    trainer(pl).fit(theirs, loader())
    for (name, value), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_a_compiled_module_is_the_one_inside(pl: Any) -> None:
    """Of it neither the validation was seen nor what is refused."""
    inside = module(pl)
    with pytest.warns(UserWarning, match=r"not taken over: torch\.compile: start workers with --compile"):
        job = job_of(trainer(pl), torch.compile(inside, backend="eager"), data(pl))
    assert job.model is inside
    assert job.evaluate is not None
    with pytest.raises(JobError, match="Net: its on_after_backward"):
        job_of(trainer(pl), torch.compile(module(pl, on_after_backward=print), backend="eager"), loader())


def in_proportion(model: Any) -> Any:
    """Steps as long as their gradients, all of one length: the weight of an epoch's last step is not seen."""
    return torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.mark.parametrize("count", [9, 13, 22, 30, 46, 48])
def test_the_last_batch_is_dropped_and_what_was_accumulated_before_it_is_a_step(pl: Any, count: int) -> None:
    points = TensorDataset(*DATA[:count])
    given = {"gradient_clip_val": 1e-3, "max_epochs": 2}  # which every gradient is clipped to
    ours, theirs = module(pl, in_proportion), module(pl, in_proportion)
    job = job_of(trainer(pl, **given), ours, loader(dataset=points, drop_last=True))
    reference.train(job)
    trainer(pl, **given).fit(theirs, loader(dataset=points, drop_last=True))
    assert job.max_steps == theirs.trainer.global_step == 2 * -(-(count // 4) // 3)
    for (name, value), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_steps_are_counted_as_lightning_counts_them(pl: Any) -> None:
    """By ``configure_optimizers``, and by validation within an epoch."""
    seen: list[float] = []

    def asks(model: Any) -> Any:
        seen.append(model.trainer.estimated_stepping_batches)
        return in_proportion(model)

    points, given = TensorDataset(*DATA[:30]), {"accumulate_grad_batches": 2, "val_check_interval": 0.6}
    job = job_of(trainer(pl, **given), module(pl, asks), loader(dataset=points, drop_last=True), loader())
    evaluated: list[int] = []

    def at(model: Any) -> None:
        evaluated.append(model.trainer.global_step)

    fitted = trainer(pl, num_sanity_val_steps=0, **given)
    fitted.fit(module(pl, asks, on_validation_start=at), loader(dataset=points, drop_last=True), loader())
    assert set(seen) == {12}
    assert job.evaluate_every == evaluated[0] == 2


def test_of_samples_in_random_order_it_is_said_which_are_dropped(pl: Any) -> None:
    points = TensorDataset(*DATA[:30])
    with pytest.warns(UserWarning, match="of 30 samples no epoch has the last 2, and in Lightning"):
        job_of(trainer(pl), module(pl), loader(dataset=points, drop_last=True, shuffle=True))
    with pytest.raises(JobError, match="drop_last leaves nothing to train on: 3 samples, 4 a batch"):
        job_of(trainer(pl), module(pl), loader(dataset=TensorDataset(*DATA[:3]), drop_last=True))


@pytest.mark.parametrize(("count", "batches"), [(30, 2), (40, 1), (46, 3)])
def test_that_the_last_step_of_an_epoch_weighs_otherwise_is_said(pl: Any, count: int, batches: int) -> None:
    """Lightning counts batches that are not there, and short ones, as whole ones."""
    points = TensorDataset(*DATA[:count])
    given, ours, theirs = {"gradient_clip_val": None, "max_epochs": 1}, module(pl), module(pl)
    with pytest.warns(UserWarning, match=rf"of its {batches} batches and divides them by accumulate_grad_batches=3"):
        job = job_of(trainer(pl, **given), ours, loader(dataset=points))
    assert job.max_steps is not None
    gradients: list[Tensor] = []

    def kept(optimizer: Any, *_: Any) -> None:
        gradients.append(torch.cat([p.grad.flatten() for p in optimizer.param_groups[0]["params"]]))

    hooked = register_optimizer_step_post_hook(kept)
    reference.train(job)
    trainer(pl, **given).fit(theirs, loader(dataset=points))
    hooked.remove()
    mine, lightnings = gradients[: job.max_steps], gradients[job.max_steps :]
    assert len(mine) == len(lightnings)
    torch.testing.assert_close(mine[:-1], lightnings[:-1], rtol=1e-4, atol=1e-6)
    if count % 4 == 0:
        torch.testing.assert_close(batches * mine[-1], 3 * lightnings[-1], rtol=1e-3, atol=1e-6)
    else:
        assert not torch.allclose(mine[-1], lightnings[-1], rtol=1e-2)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (DATA[number] for number in range(48))


class Counted(Stream):
    def __len__(self) -> int:
        return 48


@pytest.mark.parametrize(
    ("stream", "optimizers", "given"),
    [
        (Stream, each_step, {"max_epochs": -1, "max_steps": 4}),
        (Counted, each_epoch, {"max_epochs": 2}),
    ],
    ids=["plain", "with a length"],
)
def test_a_stream_is_read_as_fit_reads_it(pl: Any, stream: Any, optimizers: Any, given: dict[str, Any]) -> None:
    ours, theirs = module(pl, optimizers), module(pl, optimizers)
    job = job_of(trainer(pl, **given), ours, loader(dataset=stream()))
    reference.train(job)
    trainer(pl, **given).fit(theirs, loader(dataset=stream()))
    for (name, value), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert job.max_steps == theirs.trainer.global_step


def test_evaluation_gives_what_validate_logs(pl: Any, capfd: pytest.CaptureFixture[str]) -> None:
    kept = pl.callbacks.ModelCheckpoint(monitor="val_hits", mode="max")
    given = {"callbacks": [kept], "enable_checkpointing": True, "check_val_every_n_epoch": 2}
    job = job_of(trainer(pl, **given), module(pl), datamodule=data(pl))
    assert (job.evaluate_every, job.keep_best) == (8, "max:val_hits")
    assert job_of(trainer(pl, val_check_interval=0.5), module(pl), data(pl)).evaluate_every == 2
    assert job_of(trainer(pl, limit_val_batches=0), module(pl), data(pl)).evaluate is None
    other = module(pl)
    nn.init.ones_(other.net[0].weight)
    other.setup = own = lambda stage: None
    capfd.readouterr()
    assert job.evaluate is not None
    found = job.evaluate(other)
    assert vars(other)["setup"] is own
    assert "teardown" not in vars(other)
    assert capfd.readouterr() == ("", "")
    assert [found] == trainer(pl).validate(other, loader(batch_size=20), verbose=False)
    assert found.keys() == {"val_hits", "val_loss"}


def test_a_module_and_its_data_keep_the_trainer_that_they_had(pl: Any) -> None:
    """As after a ``validate`` before the run: a notebook goes on with them."""
    own, model, points = trainer(pl), module(pl), data(pl)
    own.validate(model, loader(), verbose=False)
    model.trainer = points.trainer = own
    job = job_of(trainer(pl, max_epochs=1), model, points)
    assert job.evaluate is not None
    job.evaluate(model)
    reference.train(job)
    assert model.trainer is points.trainer is own
    apart = copy.deepcopy(model)  # which Lightning makes without
    job.evaluate(apart)
    assert apart._trainer is None


@pytest.mark.parametrize("how", [{"logger": False}, {"on_step": True, "on_epoch": True}, {"prog_bar": True}], ids=str)
def test_the_best_goes_by_what_a_checkpoint_of_lightning_goes_by(pl: Any, how: dict[str, Any], tmp_path: Path) -> None:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), **how)

    def given() -> Any:
        kept = pl.callbacks.ModelCheckpoint(monitor="val_loss", dirpath=tmp_path)
        return trainer(pl, max_epochs=1, callbacks=[kept], enable_checkpointing=True)

    job = job_of(given(), module(pl, validation_step=validation_step), data(pl))
    trained, _ = reference.train(job)
    fitted = given()
    fitted.fit(module(pl, validation_step=validation_step), data(pl))
    assert (job.evaluate is not None, job.keep_best) == (True, "min:val_loss")
    found = job.evaluate(trained)["val_loss"]  # type: ignore[misc]
    assert found == pytest.approx(float(fitted.checkpoint_callback.best_model_score), rel=1e-5)


def test_an_evaluation_is_of_the_trained_weights_and_makes_nothing_again(pl: Any) -> None:
    """``setup`` may build layers: called again, it would give the evaluated model new ones. In ``fit`` nobody does."""
    made: list[str] = []

    def makes(self: Any) -> None:
        made.append(f"{type(self).__name__}.prepare_data")

    def sets_up(self: Any, stage: str) -> None:
        made.append(f"{type(self).__name__}.setup")
        self.net = nn.Linear(6, 2)

    def ends(self: Any, stage: str) -> None:
        made.append(f"{type(self).__name__}.teardown")

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        assert self.trainer.datamodule.points is DATA
        x = batch[0].clone().requires_grad_()
        with torch.enable_grad():  # as fit lets it, whatever inference_mode says
            (slope,) = torch.autograd.grad(self(x).sum(), x)
        self.log("slope", slope.mean())

    methods = {"prepare_data": makes, "setup": sets_up, "configure_model": makes, "teardown": ends}
    points = data(pl)
    type(points).teardown = ends
    job = job_of(trainer(pl), module(pl, **methods, validation_step=validation_step), points)
    assert made == ["Net.prepare_data", "Net.setup", "Net.prepare_data"]
    model = copy.deepcopy(job.model)
    assert job.evaluate is not None
    slope = job.model.get_parameter("net.weight").detach().mean(1).sum()
    for _ in range(2):
        assert job.evaluate(model)["slope"] == pytest.approx(float(slope))
    assert len(made) == 3


def test_a_metric_tells_of_its_own_microbatch(pl: Any) -> None:
    """Workers live as long as the run: a metric that went on would mix old leaves in, and grow."""
    job = job_of(trainer(pl), module(pl), data(pl))
    assert job.step is not None
    job.step(job.model, DATA[:40])  # type: ignore[arg-type]
    _, metrics = job.step(job.model, DATA[40:])  # type: ignore[arg-type, misc]
    x, y = DATA[40:]
    assert float(metrics["hits"]) == float((job.model(x).argmax(1) == y).float().mean())  # type: ignore[operator]


@pytest.mark.slow
def test_it_trains_with_a_worker_that_has_no_code_and_over_a_resume(pl: Any, tmp_path: Path) -> None:
    """Metrics of torchmetrics, too; and the schedule goes on where it was, within an epoch."""

    def job(steps: int) -> Job:
        return replace(job_of(trainer(pl), module(pl), data(pl)), max_steps=steps)

    metrics: list[dict[str, float]] = []

    async def part(job: Job) -> str:
        async with Coordinator(job, config=settings(code_free=True), run_dir=tmp_path) as coordinator:
            coordinator.bus.subscribe(lambda event: metrics.append(getattr(event, "metrics", {})))
            worker = asyncio.create_task(Worker(coordinator.address, job=None, config=QUICK_WORKER).run())
            result = await coordinator.wait()
            assert await worker is Departure.FINISHED
        return result.digest

    asyncio.run(part(job(6)))
    digest = asyncio.run(part(job(12)))
    assert digest == named_digest(reference.train(job(12))[0])
    named = [found for found in metrics if "hits" in found]
    assert named
    assert all(0.0 <= found["hits"] <= 1.0 for found in named)


def by_hand(model: Any) -> Any:
    model.automatic_optimization = False
    return model


def two(model: Any) -> Any:
    return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.net[0], model.net[2])]


def plateau(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Slotted:
    __slots__ = ("optimizer",)

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def slotted(model: Any, interval: str = "step") -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": Slotted(optimizer), "interval": interval}}


def slotted_each_epoch(model: Any) -> Any:
    return slotted(model, "epoch")


@pytest.mark.parametrize(
    ("words", "made"),
    [
        ("gives a Slotted as schedule; give a torch", lambda pl: (trainer(pl), module(pl, slotted), loader())),
        ("gives a Slotted as schedule", lambda pl: (trainer(pl), module(pl, slotted_each_epoch), loader())),
        ("optimizes by hand", lambda pl: (trainer(pl), by_hand(module(pl)), loader())),
        ("2 optimizers", lambda pl: (trainer(pl), module(pl, two), loader())),
        ("ReduceLROnPlateau", lambda pl: (trainer(pl), module(pl, plateau), loader())),
        ("Net: its on_after_backward", lambda pl: (trainer(pl), module(pl, on_after_backward=print), loader())),
        (
            "callback EarlyStopping .*stop_when",
            lambda pl: (trainer(pl, callbacks=[pl.callbacks.EarlyStopping("val_loss")]), module(pl), loader()),
        ),
        ("precision is 64-true", lambda pl: (trainer(pl, precision="64-true"), module(pl), loader())),
        ("clip_algorithm is value", lambda pl: (trainer(pl, gradient_clip_algorithm="value"), module(pl), loader())),
        ("limit_train_batches is 3", lambda pl: (trainer(pl, limit_train_batches=3), module(pl), loader())),
        ("overfit_batches is 1", lambda pl: (trainer(pl, overfit_batches=1), module(pl), loader())),
        ("is a list", lambda pl: (trainer(pl), module(pl), [loader(), loader()])),
        (
            r"max_epochs is 3, and its stream has no len\(\)",
            lambda pl: (trainer(pl), module(pl), loader(dataset=Stream())),
        ),
        (
            "a schedule of epochs, and the stream has no len",
            lambda pl: (trainer(pl, max_epochs=-1, max_steps=4), module(pl, each_epoch), loader(dataset=Stream())),
        ),
        (
            "val_check_interval is 1.0, and its stream has no len",
            lambda pl: (
                trainer(pl, max_epochs=-1, max_steps=4),
                module(pl, each_step),
                loader(dataset=Stream()),
                loader(),
            ),
        ),
        (
            "val_check_interval is a time; give it in batches or in epochs",
            lambda pl: (trainer(pl, val_check_interval="00:00:00:01"), module(pl), loader()),
        ),
        (
            "its training_step takes batches by itself",
            lambda pl: (trainer(pl), module(pl, training_step=lambda self, dataloader_iter: None), loader()),
        ),
        ("batch_size is None", lambda pl: (trainer(pl), module(pl), loader(dataset=Counted(), batch_size=None))),
        (
            "its own WeightedRandomSampler",
            lambda pl: (trainer(pl), module(pl), loader(sampler=WeightedRandomSampler([1.0] * 48, 48))),
        ),
        (
            "its own SequentialSampler; give .*Subset",
            lambda pl: (trainer(pl), module(pl), loader(sampler=SequentialSampler(range(12)))),
        ),
        ("lightning.job_of: it is given a int; give a Trainer", lambda pl: (5, module(pl), loader())),
        (
            "lightning.job_of: it is given a Linear; give a LightningModule",
            lambda pl: (trainer(pl), nn.Linear(1, 1), loader()),
        ),
        ("it has no end", lambda pl: (trainer(pl, max_epochs=-1), module(pl), loader())),
        ("max_steps is 0: it trains nothing", lambda pl: (trainer(pl, max_steps=0), module(pl), loader())),
        ("max_epochs is 0: it trains nothing", lambda pl: (trainer(pl, max_epochs=0), module(pl), loader())),
        ("max_epochs is 0", lambda pl: (trainer(pl, max_epochs=0, max_steps=4), module(pl), loader())),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_change_the_result_is_refused_by_name(pl: Any, words: str, made: Any) -> None:
    with pytest.raises(JobError, match=words) as refused:
        job_of(*made(pl))
    assert len(str(refused.value).splitlines()) == 1


async def test_what_no_worker_knows_is_named(pl: Any) -> None:
    """Not taken as 0 in silence, as Lightning does where there is no trainer."""

    def training_step(self: Any, batch: Any) -> Tensor:
        return self(batch[0]).square().mean() * (1 + self.current_epoch)  # type: ignore[no-any-return]

    job = job_of(trainer(pl), module(pl, training_step=training_step), loader())
    with pytest.raises(Exception, match=r"asks for trainer\.current_epoch, which no worker knows"):
        await train(lambda: job)


def by_the_trainer(model: Any) -> Any:
    """A schedule that asks when it is stepped, as one by a function of the module's does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def factor(step: int) -> float:
        asked = model.trainer
        whole = asked.estimated_stepping_batches * asked.accumulate_grad_batches
        assert asked.max_steps == -1
        return max(0.1, 1 - step / whole) * asked.max_epochs / asked.num_training_batches  # type: ignore[no-any-return]

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def by_the_trainer_each_epoch(model: Any) -> Any:
    found = by_the_trainer(model)
    return [found["optimizer"]], [found["lr_scheduler"]["scheduler"]]


@pytest.mark.parametrize("optimizers", [by_the_trainer, by_the_trainer_each_epoch])
def test_a_schedule_may_ask_for_what_lasts(pl: Any, optimizers: Any) -> None:
    ours, theirs = module(pl, optimizers), module(pl, optimizers)
    job = job_of(trainer(pl), ours, loader())
    reference.train(job)
    assert ours._trainer is None
    trainer(pl).fit(theirs, loader())
    for value, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


async def test_a_schedule_that_asks_is_kept_and_taken_up_as_torchs(pl: Any, tmp_path: Path) -> None:
    def job(steps: int) -> Job:
        return replace(job_of(trainer(pl), module(pl, by_the_trainer), loader()), max_steps=steps)

    await train(lambda: job(5), run_dir=tmp_path)
    result = await train(lambda: job(8), run_dir=tmp_path)
    assert result.digest == named_digest(reference.train(job(8))[0])
    made = job(8)
    optimizer = made.optimizer(made.model)  # type: ignore[arg-type]
    schedule = made.scheduler(optimizer)  # type: ignore[misc]
    assert (type(schedule).__name__, type(schedule).__module__) == ("LambdaLR", "torch.optim.lr_scheduler")


async def test_what_a_schedule_cannot_know_is_named(pl: Any) -> None:
    """Lightning counts it up; here it would stay 0."""

    def optimizers(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**model.current_epoch)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    job = job_of(trainer(pl), module(pl, optimizers), loader())
    with pytest.raises(
        Exception, match=r"asks for trainer\.current_epoch, which is not known .*go by the number of the"
    ):
        await train(lambda: job)


@pytest.mark.parametrize("how", [lambda self, *args: args, lambda self, batch, *rest: (batch, *rest)])
def test_a_training_step_of_any_arguments_is_given_what_lightning_gives_it(pl: Any, how: Any) -> None:
    seen: list[Any] = []

    def training_step(self: Any, *args: Any) -> Tensor:
        found = how(self, *args)
        seen.append(len(found))
        return nn.functional.cross_entropy(self(found[0][0]), found[0][1])

    job = job_of(trainer(pl), module(pl, training_step=training_step), loader())
    assert job.step is not None
    job.step(job.model, DATA[:4])  # type: ignore[arg-type]
    trainer(pl, max_steps=1).fit(module(pl, training_step=training_step), loader())
    assert set(seen) == {2}


def test_a_best_that_nothing_tells_of_is_said(pl: Any, tmp_path: Path) -> None:
    def given(*monitors: str) -> Any:
        kept = [pl.callbacks.ModelCheckpoint(monitor=one, dirpath=tmp_path) for one in monitors]
        return trainer(pl, callbacks=kept, enable_checkpointing=True)

    with pytest.warns(UserWarning, match="ModelCheckpoint of train_loss: there is no validation") as said:
        job = job_of(given("train_loss"), module(pl), loader())
    assert (len(said), job.keep_best) == (1, None)
    with pytest.warns(UserWarning, match="ModelCheckpoint of val_hits: a run keeps the best of one metric"):
        job = job_of(given("val_loss", "val_hits"), module(pl), data(pl))
    assert job.keep_best == "min:val_loss"


@pytest.mark.parametrize(("interval", "steps", "said"), [(7, 2, True), (0.6, 2, True), (6, 2, False), (0.5, 2, False)])
def test_an_interval_of_batches_that_are_no_whole_steps_is_said(
    pl: Any, interval: float, steps: int, said: bool
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        job = job_of(trainer(pl, val_check_interval=interval), module(pl), data(pl))
    assert job.evaluate_every == steps
    found = [str(one.message) for one in told if "val_check_interval of 7 batches" in str(one.message)]
    assert bool(found) == said


def test_that_an_interval_within_epochs_is_heeded_in_every_epoch_is_said(pl: Any) -> None:
    with pytest.warns(UserWarning, match="check_val_every_n_epoch=2: with a val_check_interval evaluated is in every"):
        job = job_of(trainer(pl, val_check_interval=0.5, check_val_every_n_epoch=2), module(pl), data(pl))
    assert job.evaluate_every == 2


def test_what_is_left_out_is_said_once(pl: Any) -> None:
    one, three = trainer(pl, accumulate_grad_batches=1), trainer(pl)
    with pytest.warns(UserWarning, match=r"on_train_epoch_end of Net.*accumulate_grad_batches=1") as said:
        job_of(one, module(pl, on_train_epoch_end=print), loader())
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job_of(three, module(pl), loader())
