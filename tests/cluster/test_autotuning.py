"""``auto``: what it measures, what it may choose, and what becomes of a choice that does not hold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support import jobs
from tests.support.cluster import QUICK_WORKER, Commits, settings
from tests.support.scripted import scripted, settle
from tests.support.streams import stream

from w5xde_async.coordinator.run import run as run_module
from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.coordinator.run.strategy_chooser import StrategyChooser
from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.coordinator.sync.training import SyncTraining
from w5xde_async.errors import JobError, W5xdeError
from w5xde_async.job import Job
from w5xde_async.plan.pacing import Pacing, PacingConfig
from w5xde_async.plan.strategy_choice import PAIRS, Choice, Figures, Situation
from w5xde_async.telemetry.events import StepCommitted, Warned
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.wire.messages import Lease
from w5xde_async.worker.service import Worker


def hooked() -> Job:
    """Its optimizer has a hook, which no worker runs."""

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), lr=0.05)
        made.register_step_pre_hook(lambda *_: None)
        return made

    return replace(jobs.mlp_sgd(), optimizer=optimizer)


SYNC = {("sync", "raw"), ("sync", "bf16"), ("sync", "int8")}


@pytest.mark.parametrize(
    ("make", "update", "possible"),
    [
        (jobs.mlp_sgd, {}, PAIRS),
        (hooked, {}, SYNC),
        (jobs.odd, {}, SYNC),  # half of it is float16
        (jobs.fp16, {}, {("sync", "raw")}),
        (jobs.mlp_sgd, {"feedback": False}, {pair for pair in PAIRS if pair[1] != "sparseloco"}),
        (
            jobs.mlp_sgd,
            {"rule": "local", "average": "median"},
            {pair for pair in PAIRS if pair[0] == "local"},
        ),
    ],
)
def test_what_does_not_go_with_the_job_is_not_chosen(
    make: Callable[[], Job], update: dict[str, Any], possible: set[tuple[str, str]]
) -> None:
    config = settings(auto=True, update=UpdateConfig(**update))
    assert prepare(make(), config, None, lambda: "0" * 16).spec.possible == possible


def over_a_poor_line(self: StrategyChooser, training: Any) -> Situation | None:
    """What would be measured over it, from the first results on."""
    figures = Figures(batch_s=0.05, up_bytes_s=1e5, down_bytes_s=1e5, round_trip_s=0.24)
    if not all(training.pacing.leaf_s(worker) for worker in training.roster.sessions):
        return None
    return Situation(num_values=100_000, batch_bytes=0, num_layers=4, workers=(figures,) * 2)


async def run(
    make: Callable[[], Job], path: Path, config: Any = None
) -> tuple[RunResult, Coordinator, list[StepCommitted], list[str]]:
    commits, steps, said = Commits(), list[StepCommitted](), list[str]()

    def see(event: object) -> None:
        if isinstance(event, StepCommitted):
            steps.append(event)
        elif isinstance(event, Warned):
            said.append(event.text)

    commits.bus.subscribe(see)
    config = config or settings(auto=True, min_workers=2, checkpoint_every=4)
    async with Coordinator(make(), run_dir=path, config=config, bus=commits.bus) as coordinator:
        tasks = [
            asyncio.create_task(Worker(coordinator.address, job=make(), config=QUICK_WORKER).run()) for _ in range(2)
        ]
        result = await coordinator.wait()
        await asyncio.gather(*tasks)
    return result, coordinator, steps, said


async def test_a_job_that_local_steps_cannot_do_stays_synchronous(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(StrategyChooser, "situation", over_a_poor_line)
    result, coordinator, steps, said = await run(hooked, tmp_path / "run")
    assert not any("as before" in text for text in said)  # nothing else was tried
    assert result.outcome == "finished"
    assert [step.step for step in steps] == list(range(1, result.step + 1))
    assert coordinator._run is not None
    update = coordinator._run.config.update
    assert (update.rule, update.codec) == ("sync", "int8")  # the best of what it can do
    (told,) = [text for text in said if "not computed again to be compared" in text]
    assert "int8" in told


async def test_a_choice_that_the_job_turns_out_not_to_fit_leaves_the_run_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(StrategyChooser, "situation", over_a_poor_line)
    asked: list[tuple[str, str]] = []

    def refuse(spec: Any, config: Any, before: Any, update: UpdateConfig, step: int, samples: int) -> None:
        asked.append((update.rule, update.codec))
        raise JobError("scheduler", "it sets more than learning rates")

    monkeypatch.setattr(run_module, "change_strategy", refuse)
    result, coordinator, steps, said = await run(jobs.mlp_sgd, tmp_path / "run")
    assert asked[0][0] in ("local", "streaming")
    assert result.outcome == "finished"
    assert [step.step for step in steps] == list(range(1, result.step + 1))
    (told, *_) = [text for text in said if text.startswith("auto: the run goes on as before")]
    assert "it sets more than learning rates" in told
    assert coordinator._run is not None
    assert coordinator._run.config.update.plain
    assert len(asked) == 1  # nothing is chosen again
    assert (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
async def test_the_leases_ahead_that_were_chosen_are_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(StrategyChooser, "situation", over_a_poor_line)
    result, coordinator, _, _ = await run(jobs.mlp_sgd, tmp_path / "run")
    assert result.outcome == "finished"
    assert coordinator._training is not None
    assert coordinator._training.context.config.update.rule != "sync"
    # A round trip of 4.8 batches, twice a fragment's way down of 2.6 (a quarter of 52 kB), and the one at work.
    assert coordinator._training.context.config.update.fragments == 4
    assert coordinator._training.pacing.config.leases_ahead == 11


@pytest.mark.slow
async def test_more_leases_ahead_are_more_leases() -> None:
    async with scripted(pacing=PacingConfig(leases_ahead=1, target_lease_s=0.0, min_lease_s=0.0)) as run:
        one = await run.worker("one")
        await one.lease()
        assert len(one.all(Lease)) == 1
        run.training.pacing.lead(3)
        run.training.schedule()
        await one.lease(2)
        await settle()
        assert len(one.all(Lease)) == 3
        run.training.pacing.lead(1)
        assert run.training.pacing.config.leases_ahead == 3  # never fewer than before


class Line:
    """A training of one worker, as far as its counters go."""

    def __init__(self, num_values: int = 10, *, known: bool = True) -> None:
        self.pacing = Pacing(PacingConfig())
        if known:
            self.pacing.observe("one", 1, 0.5)
        layout = SimpleNamespace(
            result_buckets=[SimpleNamespace(group=0, numel=num_values // 10)] * 10,
            groups=[SimpleNamespace(role="grad")],
        )
        loader = SimpleNamespace(leaf_bytes=0)
        self.now, self.phase = 100.0, SimpleNamespace(begun=True)
        self.progress, self.total_steps = 0, 1 << 40
        self.context = SimpleNamespace(layout=layout, loader=loader, clock=lambda: self.now)
        self.connect()

    def connect(self) -> None:
        outbox = SimpleNamespace(paced_bytes=0, paced_s=0.0)
        link = SimpleNamespace(figures=None)
        self.session = SimpleNamespace(result_bytes=0, receiving_s=0.0, outbox=outbox, link=link, report=None)
        self.session.links = [self.session]
        self.member = SimpleNamespace(compute_s=0.0)
        self.roster = SimpleNamespace(sessions={"one": self.session}, member=lambda worker: self.member)

    def results(self, nbytes: int, seconds: float) -> None:
        self.session.result_bytes += nbytes
        self.session.receiving_s += seconds

    def parameters(self, nbytes: int, seconds: float) -> None:
        self.session.outbox.paced_bytes += nbytes
        self.session.outbox.paced_s += seconds


def test_rates_are_bytes_over_the_time_they_took() -> None:
    line: Any = Line()
    chooser = StrategyChooser(1)

    def rates() -> tuple[float, float] | None:
        found = chooser.situation(line)
        return None if found is None else (found.workers[0].up_bytes_s, found.workers[0].down_bytes_s)

    assert rates() is None  # nothing has come
    line.results(1_000_000, 2.0)
    assert rates() == (500_000, 500_000)  # down, the kernel took all at once: as fast as up
    line.parameters(3_000_000, 1.0)
    assert rates() == (500_000, 3_000_000)
    line.connect()
    assert rates() is None
    line.results(200_000, 1.0)
    line.parameters(70_000, 1.0)
    assert rates() == (200_000, 70_000)


def test_an_islands_links_are_one_line() -> None:
    line: Any = Line()
    line.results(1_000_000, 2.0)
    line.parameters(1_000_000, 1.0)
    other = SimpleNamespace(result_bytes=3_000_000, receiving_s=1.0)
    other.outbox = SimpleNamespace(paced_bytes=500_000, paced_s=0.5)
    line.session.links.append(other)
    found = StrategyChooser(1).situation(line)
    assert found is not None
    assert (found.workers[0].up_bytes_s, found.workers[0].down_bytes_s) == (2_000_000, 1_500_000)


def test_a_run_that_goes_on_by_an_earlier_choice_keeps_it_and_finds_its_leases_anew() -> None:
    line: Any = Line()
    line.results(1_000_000, 1.0)
    kept = UpdateConfig(rule="local", codec="int8", inner_steps=20)
    choice = StrategyChooser(1, kept=kept).after_commit(line)
    assert choice is None  # not before three commits, unless they are slow
    chooser = StrategyChooser(1, kept=kept)
    choice = [chooser.after_commit(line) for _ in range(3)][-1]
    assert choice is not None
    assert (choice.update, choice.codec, choice.inner_steps, choice.reason) == ("local", "int8", 20, "")
    assert choice.leases_ahead >= 2


GPT_VALUES = 10_000_000


def test_a_long_first_step_is_not_waited_for() -> None:
    line: Any = Line(GPT_VALUES, known=False)  # 40 MB: 40 s of this line
    chooser = StrategyChooser(2)
    ticks = iter(range(100))

    def tick() -> Any:
        line.now = 100.0 + next(ticks)
        return chooser.tick(line)[0]

    line.phase.begun = False
    assert tick() is None  # there are not enough workers yet
    line.phase.begun = True
    assert tick() is None
    line.parameters(40_000_000, 40.0)
    line.results(4 << 20, 4.0)
    assert [tick() for _ in range(10)] == [None] * 10  # nobody has said how long a leaf takes
    line.session.report = SimpleNamespace(leaf_s=0.1)
    choice = tick()
    assert choice is not None
    assert choice.update == "streaming"
    situation = chooser.situation(line)
    assert situation is not None
    assert situation.workers[0] == Figures(batch_s=0.1, up_bytes_s=(4 << 20) / 4, down_bytes_s=1e6, round_trip_s=0.0)


def test_some_bytes_of_a_large_result_do_not_tell_the_rate() -> None:
    line: Any = Line(GPT_VALUES)
    chooser = StrategyChooser(1)
    line.results(100_000, 1e-4)  # what had come by the time that it was looked for
    assert chooser.situation(line) is None
    line.results(2 << 20, 2.0)
    assert chooser.situation(line) is not None


class Watched:
    """A run that goes on by a choice, in minutes of computing and sending."""

    def __init__(self, *, up_bytes_s: float) -> None:
        self.line: Any = Line(GPT_VALUES)
        self.chooser = StrategyChooser(1)
        self.line.results(2 << 20, (2 << 20) / up_bytes_s)
        self.line.parameters(4 << 20, (4 << 20) / up_bytes_s)
        first = [self.chooser.after_commit(self.line) for _ in range(3)][-1]
        assert first is not None
        self.choice = first
        self.chooser.begins(first, self.line)

    def minutes(self, count: int, utilization: float, up_bytes_s: float) -> tuple[list[Any], list[str]]:
        choices, said = [], []
        for _ in range(60 * count):
            self.line.now += 1.0
            self.line.member.compute_s += utilization
            self.line.results(int(up_bytes_s / 2), 0.5)
            self.line.parameters(int(up_bytes_s / 2), 0.5)
            choice, text = self.chooser.tick(self.line)
            if choice is not None:
                choices.append(choice)
                self.chooser.begins(choice, self.line)
            if text:
                said.append(text)
        return choices, said


def test_what_was_foreseen_is_told_beside_what_is_seen() -> None:
    run = Watched(up_bytes_s=1e6)
    choices, said = run.minutes(20, 0.85, 1e6)
    assert said == [f"auto: workers compute 85% of the time ({run.choice.utilization:.0%} foreseen)"]
    assert not choices


@pytest.mark.parametrize("utilization", [0.2, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("up_bytes_s", [1e5, 1e6, 1e7, 1e9])
def test_on_a_constant_line_nothing_is_chosen_again(up_bytes_s: float, utilization: float) -> None:
    run = Watched(up_bytes_s=up_bytes_s)
    assert not run.minutes(120, utilization, up_bytes_s)[0]  # however wrong the forecast was


def test_a_line_that_gets_much_worse_is_chosen_for_anew_and_then_left_alone() -> None:
    run = Watched(up_bytes_s=1e9)
    assert run.choice.update == "sync"
    (choice,), _ = run.minutes(30, 0.05, 1e6)
    assert choice.update == "streaming"
    assert not run.minutes(120, 0.9, 1e6)[0]


def test_who_comes_or_goes_begins_the_look_anew() -> None:
    run = Watched(up_bytes_s=1e9)
    choices = []
    for _ in range(40):
        choices += run.minutes(1, 0.05, 1e6)[0]
        run.line.roster.sessions = {str(id(object())) + str(run.line.now): run.line.session}
    assert not choices


def test_a_worker_that_never_computes_is_not_waited_for_for_ever() -> None:
    line: Any = Line(GPT_VALUES)
    idle = SimpleNamespace(
        result_bytes=0, receiving_s=0.0, outbox=line.session.outbox, link=line.session.link, report=None
    )  # fmt: skip
    idle.links = [idle]
    line.roster.sessions = {"one": line.session, "idle": idle}
    chooser = StrategyChooser(1)
    line.results(2 << 20, 2.0)
    for _ in range(59):
        assert chooser.after_commit(line) is None
        line.now += 1.0
    choices = []
    for _ in range(3):
        choices.append(chooser.after_commit(line))
        line.now += 1.0
    assert choices[-1] is not None


def test_a_choice_that_promises_little_more_than_is_seen_is_not_made() -> None:
    """Over 20 MB/s rounds of local steps would compute 91 % of the time."""
    assert not Watched(up_bytes_s=1e10).minutes(60, 0.78, 2e7)[0]
    assert [choice.update for choice in Watched(up_bytes_s=1e10).minutes(60, 0.6, 2e7)[0]] == ["local"]


@pytest.mark.parametrize("at", ["workers leave", "strategy", "training is closed", "evaluation"])
async def test_what_fails_while_the_rule_changes_ends_the_run(
    at: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The training that stopped for it tells nobody any more."""
    changing, before = threading.Event(), list[Any]()
    leave, change, close = run_module.gone, run_module.change_strategy, SyncTraining.aclose

    def choose(self: StrategyChooser, training: Any) -> Choice | None:
        if before or training.progress < 3:
            return None
        before.append(training)
        return Choice(
            update="async", codec="raw", downlink="", inner_steps=0, fragments=1, delay=0, leases_ahead=2,
            utilization=0.5, reason="planted",
        )  # fmt: skip

    def fail(here: str) -> None:
        if at == here and before:
            before[0].lifecycle.fail(W5xdeError("planted"))

    async def gone(training: Any) -> None:
        changing.set()
        await leave(training)
        fail("workers leave")

    def change_strategy(*args: Any) -> Any:
        loop.call_soon_threadsafe(fail, "strategy")
        return change(*args)

    async def aclose(self: SyncTraining) -> None:
        await close(self)
        fail("training is closed")

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        assert changing.wait(20)
        return {"loss": 1.0}

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(StrategyChooser, "after_commit", choose)
    monkeypatch.setattr(StrategyChooser, "tick", lambda *_: (None, ""))
    monkeypatch.setattr(run_module, "gone", gone)
    monkeypatch.setattr(run_module, "change_strategy", change_strategy)
    monkeypatch.setattr(SyncTraining, "aclose", aclose)
    job = jobs.mlp_sgd()
    if at == "evaluation":
        job = replace(job, evaluate=evaluate, evaluate_every=3, keep_best="max accuracy")
    expected = r"evaluate gives no 'max accuracy'" if at == "evaluation" else "planted"
    async with Coordinator(job, run_dir=tmp_path / "run", config=settings(auto=True)) as coordinator:
        working = asyncio.create_task(Worker(coordinator.address, job=jobs.mlp_sgd(), config=QUICK_WORKER).run())
        with pytest.raises(W5xdeError, match=expected):
            await asyncio.wait_for(coordinator.wait(), 30)
        assert coordinator._run is not None
        assert coordinator._run.training.progress == 3
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.slow
async def test_a_stream_goes_on_under_the_rule_that_was_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What had been read ahead for the steps before is not what is trained on: no sample is passed over."""
    monkeypatch.setattr(StrategyChooser, "situation", over_a_poor_line)
    seen: set[int] = set()

    def made() -> Job:
        plain = jobs.mlp_sgd()
        rows = [plain.dataset[index % len(plain.dataset)] for index in range(60 * 8)]

        def step(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            ids, (x, y) = batch
            seen.update(ids.tolist())
            assert plain.loss is not None
            return plain.loss(model(x), y)

        return replace(
            plain, dataset=stream("stateful", list(enumerate(rows)), len(rows)), loss=None, step=step, batch_size=8,
            microbatch_size=2, epochs=None, max_steps=60, shuffle_buffer=20, accumulate_grad_batches=1,
        )  # fmt: skip

    result, coordinator, steps, _ = await run(made, tmp_path / "run")
    assert coordinator._run is not None
    assert coordinator._run.config.update.rule == "streaming"
    assert (result.outcome, result.step, sum(step.samples for step in steps)) == ("finished", 60, 480)
    assert seen == set(range(480))
