"""Rules that take results as they come, over real links: what they compute, and that every step counts once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import jobs, reference
from tests.support.cluster import QUICK_WORKER, Commits, settings, train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.outer.training import OuterTraining
from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.coordinator.run.strategy_chooser import StrategyChooser
from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.errors import JobError, UsageError
from w5xde_async.job import Job
from w5xde_async.params.flat import named_digest
from w5xde_async.plan.strategy_choice import Figures, Situation
from w5xde_async.telemetry.events import Event, RunFinished, StepCommitted, Warned
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.service import Worker

RULES: dict[str, dict[str, Any]] = {
    "fresh": {"rule": "async", "max_staleness": 0},  # whoever is late is told of the newest version
    "async": {"rule": "async", "results_per_step": 2},
    "local": {"rule": "local", "inner_steps": 3, "outer_momentum": 0.5},
    "radial": {"rule": "local", "inner_steps": 3, "average": "radial", "codec": "int8"},
    "streaming": {"rule": "streaming", "inner_steps": 4, "fragments": 2, "codec": "int4"},
    "async-local": {"rule": "async-local", "inner_steps": 3, "codec": "sparseloco"},
}


def total(job: Job) -> int:
    return job.max_steps or (job.epochs or 0) * -(-len(job.dataset) // job.batch_size)


def samples_of(job: Job) -> int:
    whole, rest = divmod(total(job), -(-len(job.dataset) // job.batch_size))
    return whole * len(job.dataset) + rest * job.batch_size


@pytest.mark.parametrize("update", RULES.values(), ids=RULES)
async def test_every_step_counts_once(update: dict[str, Any]) -> None:
    events: list[Event] = []
    result = await train(jobs.mlp_sgd, workers=2, events=events, update=UpdateConfig(**update))
    steps = [event for event in events if isinstance(event, StepCommitted)]
    assert result.outcome == "finished"
    assert result.step == steps[-1].step == total(jobs.mlp_sgd())
    assert sum(event.samples for event in steps) == samples_of(jobs.mlp_sgd())
    assert steps[-1].loss < steps[0].loss


def _idle_at_first(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step < 40 else 1.0)


def _up_and_down(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=161, div_factor=1e3)


def _restarts(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 40)


@pytest.mark.parametrize(
    "scheduler",
    [_idle_at_first, *(pytest.param(other, marks=pytest.mark.slow) for other in (_up_and_down, _restarts))],
)
@pytest.mark.parametrize("rule", ["async", "local", "streaming", "async-local"])
async def test_whatever_the_schedule_nothing_of_honest_workers_is_refused(rule: str, scheduler: Any) -> None:
    """The norm gate is on, and has seen nothing but other rates."""
    events: list[Event] = []
    update = UpdateConfig(rule=rule, inner_steps=4, max_staleness=1000)
    await train(lambda: replace(jobs.mlp_sgd(), max_steps=160, epochs=None, scheduler=scheduler), workers=2,
                events=events, update=update, norm_gate=6.0)  # fmt: skip
    assert not [event.text for event in events if isinstance(event, Warned) and "does not count" in event.text]
    (finished,) = [event for event in events if isinstance(event, RunFinished)]
    assert finished.leaves_in_vain == 0


@pytest.mark.parametrize(("rule", "name"), [("local", "cnn_sgd"), ("async-local", "mlp_adamw")])
async def test_one_worker_and_an_outer_step_of_one_is_the_plain_loop(rule: str, name: str) -> None:
    """theta - 1 (theta - theta_local) is where the worker's own optimizer went, its state kept from round to round."""
    make: Callable[[], Job] = jobs.ALL[name]
    update = UpdateConfig(rule=rule, inner_steps=5, outer_lr=1.0, outer_momentum=0.0)
    job = make()
    async with Coordinator(job, config=settings(update=update, norm_gate=0.0)) as coordinator:
        working = asyncio.create_task(Worker(coordinator.address, job=make(), config=QUICK_WORKER).run())
        await coordinator.wait()
        await working
        assert coordinator._prepared is not None
        trained = coordinator._prepared.spec.model.state_dict()
    expected, _ = reference.train(make(), total(make()))
    torch.testing.assert_close(dict(trained), dict(expected.state_dict()), rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("update", [{"codec": "lz4"}, {"codec": "lz4-shuffle"}, {"downlink": "lz4"}])
async def test_a_lossless_codec_keeps_the_bits(update: dict[str, Any]) -> None:
    result = await train(jobs.mlp_sgd, workers=2, update=UpdateConfig(**update))
    model, _ = reference.train(jobs.mlp_sgd(), total(jobs.mlp_sgd()))
    assert result.digest == named_digest(model)


@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "sparseloco"])
async def test_a_lossy_codec_under_the_synchronous_rule(codec: str) -> None:
    events: list[Event] = []
    result = await train(jobs.mlp_sgd, workers=2, events=events, update=UpdateConfig(codec=codec))
    losses = [event.loss for event in events if isinstance(event, StepCommitted)]
    assert len(losses) == result.step == total(jobs.mlp_sgd())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("update", RULES.values(), ids=RULES)
async def test_workers_that_vanish_and_come(update: dict[str, Any]) -> None:
    """A worker that is gone had steps leased and carried: others do them, and none counts twice."""
    commits, make = Commits(), jobs.mlp_sgd
    async with Coordinator(make(), config=settings(update=UpdateConfig(**update)), bus=commits.bus) as coordinator:
        tasks: list[asyncio.Task[object]] = []

        def start() -> None:
            tasks.append(asyncio.create_task(Worker(coordinator.address, job=make(), config=QUICK_WORKER).run()))

        start()
        start()
        training = coordinator._training
        assert isinstance(training, OuterTraining)
        for number in range(2):
            await commits.reach(2 + 5 * number)
            tasks[number].cancel()
            await asyncio.gather(tasks[number], return_exceptions=True)
            training.ledger.validate()
            start()
        result = await coordinator.wait()
        training.ledger.validate()
        for task in tasks[2:]:
            task.cancel()  # one may come when all is done, and would look for a while
        await asyncio.gather(*tasks[2:], return_exceptions=True)
        assert result.outcome == "finished"
        assert training.ledger.done.state_dict() == {"floor": total(make()), "above": []}
        assert training.phase.samples_applied == training.rule.samples == samples_of(make())


async def test_what_a_codec_left_out_goes_from_one_worker_to_the_next(tmp_path: Path) -> None:
    update, make = UpdateConfig(codec="topk:0.05"), jobs.mlp_sgd
    commits, config = Commits(), replace(QUICK_WORKER, data_dir=tmp_path / "kept")
    async with Coordinator(make(), config=settings(update=update), bus=commits.bus) as coordinator:
        first = Worker(coordinator.address, job=make(), config=config)
        task = asyncio.create_task(first.run())
        await commits.reach(5)
        first.drain("test")
        await task
        (kept,) = (tmp_path / "kept").iterdir()
        assert first._uplink.encoder is not None
        assert first._uplink.encoder.feedback is not None
        norm = first._uplink.encoder.feedback.norm()
        assert norm > 0
        second = Worker(coordinator.address, job=make(), config=config)
        task = asyncio.create_task(second.run())
        await commits.reach(coordinator.step + 1)
        assert not kept.exists()  # taken, so that nothing is added twice
        await coordinator.wait()
        await task


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["async", "local", "streaming", "async-local"])
async def test_workers_without_the_jobs_code(rule: str) -> None:
    """The inner optimizer comes as a name and numbers, the step as a program."""
    update = UpdateConfig(rule=rule, inner_steps=4, fragments=2)
    make = jobs.cnn_sgd if rule == "local" else jobs.mlp_sgd
    async with Coordinator(make(), config=settings(update=update, code_free=True)) as coordinator:
        working = asyncio.create_task(Worker(coordinator.address, config=QUICK_WORKER).run())
        result = await coordinator.wait()
        await working
    assert (result.outcome, result.step) == ("finished", total(make()))


def plain_sgd() -> Job:
    return replace(jobs.mlp_sgd(), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05), scheduler=None)


async def run_until(coordinator: Coordinator, make: Callable[[], Job], commits: Commits, step: int | None) -> RunResult:
    worker = Worker(coordinator.address, job=make(), config=QUICK_WORKER)
    task = asyncio.create_task(worker.run())
    if step is not None:
        await commits.reach(step)
        coordinator.request_stop("test")
    result = await coordinator.wait()
    worker.drain()
    await task
    return result


@pytest.mark.slow
@pytest.mark.parametrize("update", RULES.values(), ids=RULES)
async def test_stopped_and_resumed(update: dict[str, Any], tmp_path: Path) -> None:
    # Steps enough to be stopped in the middle on a busy machine. The gate leaves out, and says so, a step whose norm
    # is over its bound, which late results may be: that is another matter.
    make = lambda: replace(jobs.mlp_sgd(), max_steps=96, epochs=None)  # noqa: E731
    config = settings(update=UpdateConfig(**update), checkpoint_every=3, norm_gate=0.0)
    commits = Commits()
    async with Coordinator(make(), run_dir=tmp_path / "run", config=config, bus=commits.bus) as coordinator:
        first = await run_until(coordinator, make, commits, 4)
    assert 4 <= first.step < total(make())
    async with Coordinator(make(), run_dir=tmp_path / "run", config=config) as coordinator:
        assert coordinator.step >= first.step
        second = await run_until(coordinator, make, Commits(), None)
        assert isinstance(coordinator._training, OuterTraining)
        assert coordinator._training.rule.samples == samples_of(make())
    assert (second.outcome, second.step) == ("finished", total(make()))


@pytest.mark.parametrize(
    ("update", "make", "warns"),
    [
        ({"rule": "local", "inner_steps": 2}, jobs.mlp_adamw, True),
        ({"rule": "streaming", "inner_steps": 2}, jobs.mlp_adamw, True),
        ({"rule": "async-local", "inner_steps": 2}, jobs.mlp_adamw, True),
        ({"rule": "local", "inner_steps": 2}, plain_sgd, False),
        ({"rule": "async"}, jobs.mlp_adamw, False),
    ],
    ids=["local", "streaming", "async-local", "sgd", "async"],
)  # fmt: skip
async def test_a_resume_says_that_inner_optimizers_begin_anew(
    update: dict[str, Any], make: Callable[[], Job], warns: bool, tmp_path: Path
) -> None:
    said: list[list[str]] = []
    for steps in (4, 8, 8):
        events: list[Event] = []
        wanted = lambda: replace(make(), max_steps=steps, epochs=None)  # noqa: B023, E731
        if len(said) < 2:
            result = await train(wanted, run_dir=tmp_path / "run", events=events, update=UpdateConfig(**update))
            assert result.step == steps
        else:  # nothing is left to do
            prepared = await asyncio.to_thread(
                prepare, wanted(), settings(update=UpdateConfig(**update)), tmp_path / "run", lambda: "0" * 16
            )
            assert prepared.spec.files is not None
            prepared.spec.files.directory.close()
            events = [Warned(text=note) for note in prepared.resume.notes]
        said.append([e.text for e in events if isinstance(e, Warned) and "inner optimizer" in e.text])
    assert [len(texts) for texts in said] == [0, int(warns), 0]
    if warns:
        assert said[1][0].startswith("the workers' inner optimizer (AdamW) begins without the state it had")


async def test_a_worker_that_drains_submits_what_it_has() -> None:
    commits, make = Commits(), jobs.mlp_sgd
    update = UpdateConfig(rule="local", inner_steps=1000)  # no round ends by itself
    async with Coordinator(make(), config=settings(update=update), bus=commits.bus) as coordinator:
        worker = Worker(coordinator.address, job=make(), config=QUICK_WORKER)
        task = asyncio.create_task(worker.run())
        training = coordinator._training
        assert isinstance(training, OuterTraining)
        while not training.ledger.carried(worker.worker_id):  # noqa: ASYNC110 - a count has no event
            await asyncio.sleep(0.001)
        worker.drain("test")
        await task
    assert len(training.rule.done) > 0
    assert training.phase.counts().leaves_wasted == 0


def over_a_line(bytes_s: float, round_trip_s: float) -> Callable[[StrategyChooser, Any], Situation | None]:
    """What would be measured over a network of this rate, by a run that has much left to do."""
    measured = StrategyChooser.situation

    def situation(self: StrategyChooser, training: Any) -> Situation | None:
        found = measured(self, training)
        if found is None:
            return None
        slow = [
            Figures(batch_s=0.05, up_bytes_s=bytes_s, down_bytes_s=bytes_s, round_trip_s=round_trip_s)
            for _ in found.workers
        ]
        return replace(found, workers=tuple(slow), steps_left=10_000)

    return situation


@pytest.mark.parametrize(("bytes_s", "round_trip_s", "rule"), [(1e9, 0.0, "sync"), (1e5, 0.04, "local")])
async def test_auto_begins_exactly_and_goes_on_as_the_links_ask(
    bytes_s: float, round_trip_s: float, rule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(StrategyChooser, "situation", over_a_line(bytes_s, round_trip_s))
    make, commits, events = jobs.mlp_sgd, Commits(), list[Event]()
    commits.bus.subscribe(events.append)
    config = settings(auto=True, checkpoint_every=4)
    async with Coordinator(make(), run_dir=tmp_path / "run", config=config, bus=commits.bus) as coordinator:
        workers = [Worker(coordinator.address, job=make(), config=QUICK_WORKER) for _ in range(2)]
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        await commits.reach(8)
        coordinator.request_stop("test")
        first = await coordinator.wait()
        last = coordinator._training
        for worker in workers:
            worker.drain()
        await asyncio.gather(*tasks)
    assert any(event.text.startswith("auto: ") for event in events if isinstance(event, Warned))
    told = [event.text for event in events if isinstance(event, Warned) and "coordinator holds at most" in event.text]
    assert bool(told) == (rule == "local")
    (finished,) = [event for event in events if isinstance(event, RunFinished)]
    assert last is not None
    before = last.context.history.counts.leaves
    assert (before > 0) == (rule == "local")  # the first steps count, whatever rule came after them
    assert finished.leaves == before + last.phase.counts().leaves
    async with Coordinator(make(), run_dir=tmp_path / "run", config=config) as coordinator:
        assert coordinator._training is not None
        assert coordinator.step >= first.step
        assert coordinator._training.context.config.update.rule == rule  # as chosen before: nothing is measured again
        second = await run_until(coordinator, make, Commits(), None) if rule == "local" else None
    assert second is None or (second.step, second.outcome) == (total(make()), "finished")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codec": "topk:0.01", "feedback": False}, "does not converge without error feedback"),
        ({"rule": "fedavg"}, "give one of auto, sync, async"),
        ({"codec": "zip"}, "codec is 'zip'; give one of raw, bf16"),
        ({"rule": "async-local", "average": "median"}, "several results at once"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        UpdateConfig(**changes)


def test_a_journal_is_of_the_synchronous_rule() -> None:
    with pytest.raises(UsageError, match="durability checkpoint"):
        settings(update=UpdateConfig(rule="local"), durability="journal")


async def test_a_model_in_half_precision_has_the_synchronous_rule_alone() -> None:
    config = settings(update=UpdateConfig(rule="async"))
    with pytest.raises(JobError, match="only the sync rule"):
        await Coordinator(jobs.odd(), config=config).start()
    with pytest.raises(JobError, match="fp16 scales its losses"):
        await Coordinator(jobs.fp16(), config=config).start()


WIDE: dict[str, dict[str, Any]] = {name: RULES[name] for name in ("async", "local", "streaming", "async-local")}


@pytest.mark.parametrize("update", WIDE.values(), ids=WIDE)
async def test_a_step_whose_data_fill_several_chunks_is_one_lease(update: dict[str, Any]) -> None:
    """A chunk of the dataset is at most 4 MiB; a step here has 6."""

    def wide() -> Job:
        x = torch.zeros(1024, 3072)
        x[:, 0] = torch.arange(1024) / 1024
        return Job(
            model=lambda: nn.Linear(3072, 24), dataset=TensorDataset(x, x[:, :1].expand(-1, 24)), batch_size=512,
            loss=nn.functional.mse_loss, microbatch_size=64, max_steps=6,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )  # fmt: skip

    events: list[Event] = []
    result = await train(wide, workers=2, events=events, update=UpdateConfig(**update))
    assert result.step == 6
    assert sum(event.samples for event in events if isinstance(event, StepCommitted)) == 6 * 512


async def test_a_step_that_fits_into_no_lease_is_refused_by_name() -> None:
    class Many(torch.utils.data.Dataset[tuple[Tensor, ...]]):
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            return (torch.zeros(1),) * 50

    def many(dataset: Any, batch_size: int) -> Job:
        return Job(
            model=lambda: nn.Linear(1, 1), dataset=dataset, loss=nn.functional.mse_loss, batch_size=batch_size,
            microbatch_size=1, max_steps=2, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )  # fmt: skip

    config = settings(update=UpdateConfig(rule="local"))
    points = TensorDataset(torch.zeros(40_000, 1), torch.zeros(40_000, 1))
    with pytest.raises(JobError, match=r"a step has 40000 leaves.*raise microbatch_size"):
        await Coordinator(many(points, 40_000), config=config).start()
    async with Coordinator(many(Many(), 200), config=config) as coordinator:
        working = asyncio.create_task(Worker(coordinator.address, job=many(Many(), 200), config=QUICK_WORKER).run())
        with pytest.raises(JobError, match=r"10000 tensors.*raise microbatch_size"):
            await coordinator.wait()
        await asyncio.gather(working, return_exceptions=True)


@pytest.mark.parametrize("rule", ["local", "streaming", "async-local", "async"])
async def test_running_statistics_lie_between_those_of_the_workers(rule: str) -> None:
    """With every default. Changes that began at one variance and were added one after the other made it negative."""

    def still() -> Job:
        x = torch.linspace(-0.1, 0.1, 512).reshape(-1, 1).repeat(1, 4)
        return Job(
            model=lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)), dataset=TensorDataset(x, x[:, :1]),
            loss=nn.functional.mse_loss, batch_size=32, microbatch_size=8, epochs=3,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        )  # fmt: skip

    job = still()
    async with Coordinator(job, config=settings(update=UpdateConfig(rule=rule), min_workers=4)) as coordinator:
        running = [
            asyncio.create_task(Worker(coordinator.address, job=still(), config=QUICK_WORKER).run()) for _ in range(4)
        ]
        await coordinator.wait()
        await asyncio.gather(*running)
        assert coordinator._prepared is not None
        variance = coordinator._prepared.spec.model.state_dict()["0.running_var"]
    assert bool(((variance > 0) & (variance <= 1)).all())
