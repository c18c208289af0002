"""Leases under ``async``, frame by frame: what is refused, late or taken back, on a clock that a test moves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from tests.support import jobs
from tests.support.cluster import QUICK_WORKER, Commits, settings, train
from tests.support.scripted import LEAVES, Run, Scripted, job, settle

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.outer.training import OuterTraining
from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.coordinator.training import NonFinite, RunContext
from w5xde_async.data.loader import Loader
from w5xde_async.errors import LocalError
from w5xde_async.hub.members.roster import Greeting
from w5xde_async.job import build_model
from w5xde_async.params.layout import Layout
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.telemetry.events import Bus, Event, RunFinished, StepCommitted, Warned
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.outer import OuterRule
from w5xde_async.wire.frame import BufferSpec, encode
from w5xde_async.wire.messages import Done, Failed, Lease, Result, Submit, Verdict, VerdictCode, Welcome
from w5xde_async.worker.service import Worker


class AsyncRun(Run):
    """The same coordinator's side over ``OuterTraining``: a step is one lease of all its leaves."""

    def __init__(self, *, steps: int = 6, leases_ahead: int = 1, update: UpdateConfig | None = None, **config: Any):
        self.now = 1000.0
        self.events: list[Event] = []
        bus = Bus()
        bus.subscribe(self.events.append)
        update = update or UpdateConfig(rule="async", staleness_exponent=0.0)
        pacing = PacingConfig(leases_ahead=leases_ahead)
        self.config = CoordinatorConfig(
            bucket_bytes=64 << 10, pacing=pacing, update=update, **{"norm_gate": 0.0, "audit_fraction": 0.0, **config}
        )
        self.prepared = prepared = prepare(job(), self.config, None, lambda: "0" * 16)
        made = job()
        self.start = [view.clone() for view in prepared.spec.state.views]
        welcome = Welcome(
            prepared.spec.run_id, "scripted", 1, made.seed, made.precision, 1, 1, self.config.bucket_bytes,
            prepared.spec.layout.fingerprint, self.config.heartbeat_s, self.config.silence_s, update.rule,
        )  # fmt: skip
        assert isinstance(prepared.strategy.rule, OuterRule)
        inner = prepared.strategy.inner
        buffers = [(BufferSpec("inner", "uint8", (len(inner),), "raw", len(inner)), inner)] if inner else []
        loader = Loader(
            made, prepared.spec.sampler, on_ready=lambda: self.training.data_came(),
            on_error=lambda error: self.training.lifecycle.fail(error),
        )  # fmt: skip
        context = RunContext(
            layout=prepared.spec.layout, state=prepared.spec.state, sampler=prepared.spec.sampler,
            loader=loader, config=self.config, checks=self.config, bus=bus, clock=lambda: self.now, total_steps=steps,
        )  # fmt: skip
        greeting = Greeting(message=welcome, layout=prepared.spec.layout, buffers=buffers)
        self.rounds = OuterTraining(
            context, greeting, prepared.strategy.rule, prepared.strategy.schedule,
        )  # fmt: skip
        self.training: Any = self.rounds
        self._tasks: list[asyncio.Task[Any]] = []
        self._incarnation = 0
        self.running = self.task(self.rounds.run())

    def committed(self) -> list[StepCommitted]:
        return [event for event in self.events if isinstance(event, StepCommitted)]

    def warned(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Warned)]


@asynccontextmanager
async def rounds(**config: Any) -> AsyncIterator[AsyncRun]:
    run = AsyncRun(**config)
    await settle()
    try:
        yield run
    finally:
        await run.aclose()


async def test_a_fault_of_ours_when_an_order_is_there_ends_the_run() -> None:
    """The event loop would log it, and go on without it."""
    async with rounds() as run:
        run.training.scheduler._assign = lambda only: int("planted")
        run.training.scheduler._prefetch._on_ready()
        with pytest.raises(LocalError, match=r"ValueError: .*planted"):
            await asyncio.wait_for(run.running, 5)


async def answer(worker: Scripted, lease: Lease, *, value: float | None = None, loss: float = 1.0) -> Verdict:
    """Send a whole result, every value of it ``value`` (ones for each sample), and wait for what becomes of it."""
    for bucket, known in enumerate(worker.run.prepared.spec.layout.result_buckets):
        filled = torch.full((known.numel,), float(sum(lease.samples)) if value is None else value)
        data = filled.numpy().tobytes()
        spec = BufferSpec("", "float32", (known.numel,), "raw", len(data))
        await worker.link.send(encode(Result(lease.lease, bucket), [(spec, data)]))
    losses = tuple(loss for _ in lease.samples)
    done = Done(lease.lease, losses, (), (), (), (), 0, 0.01, 0.0, lease.version)
    await worker.link.send(encode(done))
    async with asyncio.timeout(5):
        while not (found := [v for v in worker.all(Verdict) if lease.lease in v.leases]):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return found[0]


async def newest(worker: Scripted, count: int) -> Lease:
    """Its ``count``-th lease, and that it has been sent no other."""
    lease = await worker.lease(count - 1)
    assert len(worker.all(Lease)) == count
    return lease


async def test_a_step_that_is_never_finite_is_left_out_by_name() -> None:
    async with rounds(steps=3) as run:
        one, two = await run.worker("one"), await run.worker("two")
        bad = await newest(one, 1)
        other = await newest(two, 1)
        assert (bad.step, other.step) == (0, 1)
        told = await answer(one, bad, value=math.nan, loss=math.nan)
        assert (told.code, told.reason) == (VerdictCode.REJECTED, "not finite")
        own = await newest(one, 2)
        assert own.step == 2  # the other is asked first
        assert (await answer(two, other)).code == VerdictCode.APPLIED
        again = await newest(two, 2)
        assert again.step == 0
        await answer(two, again, value=math.inf)
        last = await newest(two, 3)
        assert last.step == 0  # both have tried
        await answer(two, last, value=math.nan, loss=math.nan)
        assert (await answer(one, own)).code == VerdictCode.APPLIED
        await asyncio.wait_for(run.running, 5)
        run.rounds.ledger.validate()
        assert run.applied() == {2.0}  # twice
        assert not run.rounds.scheduler._unjudged  # nothing is kept of workers that have nothing there
        skipped = [event for event in run.committed() if event.skipped]
        assert [(event.samples, math.isnan(event.loss)) for event in skipped] == [(LEAVES, True)]
        assert run.rounds.progress == run.committed()[-1].step == 3
        assert len(run.rounds.rule.done) == 3
        assert run.rounds.phase.samples_applied == run.rounds.rule.samples == 3 * LEAVES  # used up
        (text,) = run.warned()
        indices = run.prepared.spec.sampler.plan(0).leaf_indices(0).tolist()
        assert text.startswith("step 1 is left out: not finite")  # people count from one
        assert f"its samples are {indices[0]}" in text


async def test_the_run_ends_with_the_last_loss_that_is_one() -> None:
    async with rounds(steps=2, max_leaf_failures=1) as run:
        one = await run.worker("one")
        assert run.rounds.phase.last_loss is None
        await answer(one, await newest(one, 1), loss=0.5)
        await answer(one, await newest(one, 2), value=math.nan, loss=math.nan)
        await asyncio.wait_for(run.running, 5)
        assert [math.isnan(event.loss) for event in run.committed()] == [False, True]
        assert run.rounds.phase.last_loss == 0.5


def credited(run: AsyncRun) -> dict[str, tuple[int, int]]:
    """Leaves and samples of each worker, whether it is here or has left."""
    roster = run.rounds.roster
    found = {share.name: (share.leaves, share.samples) for share in roster.contributions.shares()}
    for member in roster.membership.members.values():
        leaves, samples = found.get(member.name, (0, 0))
        found[member.name] = leaves + member.leaves, samples + member.samples
    return found


async def test_a_worker_has_what_counts_of_what_it_computed() -> None:
    async with rounds(steps=3, update=UpdateConfig(rule="async", max_staleness=0)) as run:
        one, two = await run.worker("one"), await run.worker("two")
        stale = await newest(two, 1)
        assert (await answer(one, await newest(one, 1))).code == VerdictCode.APPLIED
        assert (await answer(two, stale)).code == VerdictCode.STALE
        assert credited(run) == {"one": (LEAVES, LEAVES), "two": (0, 0)}
        two.link.abort()  # what it was leased since is for the other
        await settle()
        for number in (2, 3):
            assert (await answer(one, await newest(one, number))).code == VerdictCode.APPLIED
        await asyncio.wait_for(run.running, 5)
        await settle()
        phase = run.rounds.phase
        assert credited(run) == {"one": (3 * LEAVES, phase.samples_applied), "two": (0, 0)}
        assert (phase.leaves, phase.leaves_wasted) == (3 * LEAVES, LEAVES)


async def test_work_that_nobody_had_asked_for_is_none_in_vain() -> None:
    async with rounds() as run:
        one = await run.worker("one")
        lease, losses, phase = await newest(one, 1), (1.0,) * 5000, run.rounds.phase
        await one.link.send(encode(Done(987654321, losses, (), (), (), (), 0, 0.0, 0.0)))
        await answer(one, lease)
        assert (phase.leaves_wasted, phase.refused) == (0, {})
        await one.link.send(encode(Done(lease.lease, losses, (), (), (), (), 0, 0.0, 0.0)))
        await settle()
        assert (phase.leaves_wasted, phase.refused) == (LEAVES, {VerdictCode.DUPLICATE: 1})


async def test_a_worker_whose_step_is_left_out_has_its_samples() -> None:
    async with rounds(steps=1, max_leaf_failures=2) as run:
        one, two = await run.worker("one"), await run.worker("two")
        await answer(one, await newest(one, 1), value=math.nan)
        assert credited(run) == {"one": (0, 0), "two": (0, 0)}
        await answer(two, await newest(two, 1), value=math.nan)
        await asyncio.wait_for(run.running, 5)
        assert credited(run) == {"one": (0, 0), "two": (LEAVES, LEAVES)}
        assert (run.rounds.phase.leaves, run.rounds.phase.leaves_wasted) == (LEAVES, LEAVES)


async def test_a_worker_that_is_gone_before_its_result_is_judged_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rounds(steps=1) as run:
        one = await run.worker("one")
        judged, offer = asyncio.Event(), run.rounds.aggregator.offer

        async def late(*given: Any) -> Any:
            await judged.wait()
            return await offer(*given)

        monkeypatch.setattr(run.rounds.aggregator, "offer", late)
        await one.compute(await newest(one, 1))
        one.link.abort()
        await settle()
        assert credited(run) == {"one": (0, 0)}
        judged.set()
        await asyncio.wait_for(run.running, 5)
        assert credited(run) == {"one": (LEAVES, LEAVES)}


async def test_so_many_in_a_row_end_the_run() -> None:
    async with rounds(steps=100, max_nonfinite_steps=3, max_leaf_failures=2) as run:
        one = await run.worker("one")
        await answer(one, await newest(one, 1), value=math.nan)
        await answer(one, await newest(one, 2), value=math.nan)  # step 0 is left out
        await answer(one, await newest(one, 3))  # and one that is finite begins the count anew
        for number in range(4, 10):
            assert not run.running.done()
            await answer(one, await newest(one, number), value=math.nan)
        with pytest.raises(NonFinite, match="in 3 steps in a row"):
            await asyncio.wait_for(run.running, 5)


@pytest.mark.parametrize("changes", [False, True], ids=["the same", "another each time"])
async def test_what_the_norm_gate_refuses_is_tried_until_the_gate_learns_anew(changes: bool) -> None:
    """Where the only worker comes to the same once more, that is what it is. Else it may be anything."""
    async with rounds(steps=40, norm_gate=6.0, max_leaf_failures=1) as run:
        one, refused = await run.worker("one"), 0
        for number in range(1, 41 + (16 if changes else 1)):
            value = 4.0 if number <= 10 else 4000.0 * (3.0 ** (number - 10) if changes and number <= 27 else 1.0)
            told = await answer(one, await newest(one, number), value=value)
            refused += told.code == VerdictCode.REJECTED
        assert refused == (16 if changes else 1)
        await asyncio.wait_for(run.running, 5)
        assert run.rounds.phase.samples_applied == 40 * LEAVES
        (text,) = run.warned()  # once, not sixteen times
        assert "a result of one does not count: its norm" in text


async def test_results_that_make_no_whole_step_count_at_the_end() -> None:
    async with rounds(steps=3, update=UpdateConfig(rule="async", results_per_step=2)) as run:
        one = await run.worker("one")
        for number in range(1, 4):
            await answer(one, await newest(one, number))
        await asyncio.wait_for(run.running, 5)
        assert run.applied() == {2.0}
        assert run.rounds.progress == 3


async def test_a_deadline_leaves_time_for_the_upload() -> None:
    """10 ms of computing and 9 s on a slow line: eight times the 95th percentile of both."""
    async with rounds(silence_s=1e6) as run:
        one, _ = await run.worker("one"), await run.worker("two")
        for number in range(1, 4):
            lease = await newest(one, number)
            result = b"".join(map(bytes, one.result(lease, 0)))
            for part in range(9):  # heartbeats and ticks while the bytes come
                await one.link.send([result[part * len(result) // 9 : (part + 1) * len(result) // 9]])
                await run.pass_time(1.0)
                assert not one.ended()
            await one.send(lease, *range(1, len(run.prepared.spec.layout.result_buckets)))
            await one.done(lease)
            assert number == 1 or lease.deadline_s >= 8 * 9.0
        assert not [text for text in run.warned() if "overdue" in text]


async def test_buckets_of_leases_that_ended_are_let_go() -> None:
    async with rounds(leases_ahead=2, silence_s=1e6) as run:
        one, two = await run.worker("one"), await run.worker("two")
        intake = run.rounds.intake
        lease = await one.lease()
        await one.send(lease, 0)
        assert intake.has(lease.lease) == {0}
        await one.link.send(encode(Failed(lease.lease, 0, "it broke", "")))
        await settle()
        assert not intake.has(lease.lease)
        second = await one.lease(1)
        await one.send(second, 0)
        assert intake.has(second.lease) == {0}
        await run.pass_time(601.0)  # past the first deadline
        assert second.lease in one.revoked()
        assert not intake.has(second.lease)
        third = await two.lease()
        await two.send(third, 0)
        assert not two.ended()
        two.link.abort()
        await settle()
        assert not intake._parts


@pytest.mark.parametrize(
    ("update", "most"),
    [
        ({}, 1.0),
        ({"codec": "lz4"}, 1.5),  # some buckets do not pay: those travel as they are, and count
        ({"codec": "int8"}, 0.5),
        ({"rule": "async", "codec": "int8", "downlink": "int4"}, 0.5),
        ({"rule": "local", "inner_steps": 3, "codec": "int8"}, 0.5),
    ],
)
async def test_what_codecs_save_is_told_for_each_worker_and_in_sum(update: dict[str, Any], most: float) -> None:
    """The model has buffers that no codec writes; every bucket counts on both sides."""
    events: list[Event] = []
    made = UpdateConfig(**update)
    result = await train(jobs.cnn_sgd, workers=2, events=events, update=made, max_steps=12)
    (ended,) = [event for event in events if isinstance(event, RunFinished)]
    assert result.shares == ended.shares
    assert len(result.shares) == 2
    layout = Layout.of(build_model(jobs.cnn_sgd()), bucket_bytes=64 << 10)
    whole = sum(bucket.numel * layout.groups[bucket.group].result_dtype.itemsize for bucket in layout.result_buckets)
    for share in result.shares:
        assert share.raw_bytes > 0
        assert share.raw_bytes % whole == 0
        assert share.network_s > 0
        assert (share.encode_s > 0) == (not made.plain)
        if made.plain:
            assert share.encoded_bytes == share.raw_bytes
        else:
            assert 0.2 * share.raw_bytes < share.encoded_bytes < most * share.raw_bytes
    assert result.raw_bytes == sum(share.raw_bytes for share in result.shares)
    assert result.encoded_bytes == sum(share.encoded_bytes for share in result.shares)
    assert result.encode_s + result.network_s > 0
    assert (result.downlink_raw_bytes > result.downlink_encoded_bytes > 0) == (made.codec == "int8")
    assert result.residuals_lost == ended.residuals_lost == 0


async def test_residuals_that_were_lost_are_counted() -> None:
    commits, make = Commits(), jobs.mlp_sgd
    config = settings(update=UpdateConfig(codec="topk:0.1"))
    async with Coordinator(make(), config=config, bus=commits.bus) as coordinator:
        first = asyncio.create_task(Worker(coordinator.address, job=make(), config=QUICK_WORKER).run())
        await commits.reach(3)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(Worker(coordinator.address, job=make(), config=QUICK_WORKER).run())
        result = await coordinator.wait()
        await second
    assert result.residuals_lost == 1


async def submit(worker: Scripted, number: int) -> Submit:
    """Answer its ``number``-th request for a Delta, every value one."""
    async with asyncio.timeout(5):
        while len(worker.all(Submit)) <= number:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    asked = worker.all(Submit)[number]
    for bucket in asked.buckets:
        data = torch.ones(worker.run.prepared.spec.layout.result_buckets[bucket].numel).numpy().tobytes()
        spec = BufferSpec("", "float32", (len(data) // 4,), "raw", len(data))
        await worker.link.send(encode(Result(asked.lease, bucket), [(spec, data)]))
    version = worker.session.current_version
    await worker.link.send(encode(Done(asked.lease, (), (), (), (), (), 0, 0.0, 0.0, version)))
    await settle()
    return asked


def by_steps(rule: str) -> UpdateConfig:
    return UpdateConfig(rule=rule, inner_steps=1, outer_lr=1.0, outer_momentum=0.0)


async def test_a_worker_that_hangs_in_its_step_is_overdue_though_others_have_newer_versions() -> None:
    async with rounds(steps=8, silence_s=1e6) as run:
        one, two = await run.worker("one"), await run.worker("two")
        hung = await newest(two, 1)
        for number in range(1, 4):
            assert (await answer(one, await newest(one, number))).code == VerdictCode.APPLIED
        await run.pass_time(601.0)
        assert two.revoked() == [hung.lease]


async def test_a_refused_delta_is_known_to_be_leased_again() -> None:
    """Nothing else was committed meanwhile: no newer version tells the worker to begin anew, its verdict does."""
    async with rounds(steps=3, update=by_steps("async-local"), norm_gate=6.0) as run:
        one = await run.worker("one")
        gate = run.rounds.rule._rule.admission.gate  # type: ignore[attr-defined]
        for _ in range(gate.config.warmup):
            gate.judge(1e-3, 4)
        first = await one.lease()
        await one.done(first)
        asked = await submit(one, 0)
        async with asyncio.timeout(5):
            while not one.all(Verdict):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        (verdict,) = one.all(Verdict)
        assert (verdict.leases, verdict.code) == ((asked.lease,), VerdictCode.REJECTED)
        assert credited(run) == {"one": (0, 0)}
        again = await one.lease(1)
        assert again.step == first.step
