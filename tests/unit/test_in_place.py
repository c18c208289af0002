"""When the coordinator computes short steps itself, and in whose place."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support import jobs
from torch import Tensor, nn

from w5xde_async.compute import engine
from w5xde_async.compute.batch import flatten
from w5xde_async.compute.engine import device_name
from w5xde_async.coordinator.sync import in_place
from w5xde_async.coordinator.sync.in_place import InPlace
from w5xde_async.data.loader import Batch
from w5xde_async.job import Job, build_model
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.plan.sampler import Sampler, StepPlan
from w5xde_async.plan.tree import Block
from w5xde_async.randomness import Claim, random_state
from w5xde_async.segments import Segment, unsupported
from w5xde_async.updates.sync import SyncRule
from w5xde_async.users_code import Overdue, time_limit
from w5xde_async.wire.messages import Done


@pytest.fixture(autouse=True)
def the_signal_is_free(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests are timed with it."""
    monkeypatch.setattr(time_limit, "_in_use", 0)
    handler, left = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *left)


def session(**said: Any) -> Any:
    ready = {
        "device": "cpu", "device_name": device_name(torch.device("cpu")), "threads": 1, "numerics": "exact",
        "torch_version": torch.__version__, **said,
    }  # fmt: skip
    return SimpleNamespace(name="w", ranks=1, link=SimpleNamespace(same_host=True), ready=SimpleNamespace(**ready))


class Rig:
    """One ``InPlace``, and who does what in a step."""

    def __init__(self, job: Job | None = None, *, turns: bool = False, shared: bool = False) -> None:
        self.job = job or jobs.mlp_sgd()
        model = build_model(self.job)
        layout = Layout.of(model)
        self.segment = Segment("parameters", FlatState.nbytes(layout), b"secret") if shared else None
        state = FlatState(layout, memory=None if self.segment is None else self.segment.payload)
        state.copy_from(model)
        state.adopt(model)
        self.sampler = sampler = Sampler(num_samples=64, batch_size=8, leaf_samples=8, seed=1)
        x, y = self.job.dataset[0:8]
        structure, self.tensors = flatten((x, y))
        self.batch: Batch | None = Batch(structure, True, (8,), self.tensors)
        self.loader: Any = SimpleNamespace(batch=lambda step, block: self.batch, can_take_turns=turns)
        self.in_place = InPlace(
            self.job, self.loader, model, state, SyncRule.of(self.job, model, layout, state), segment=self.segment
        )
        self.plan: StepPlan = sampler.plan(0)
        self.members: list[Any] = []

    def close(self) -> None:
        self.in_place.close()
        if self.segment is not None:
            self.segment.close()

    @property
    def stands_in(self) -> bool:
        return self.in_place.stands_in(lambda one: one in self.members, lambda: self.members) is not None

    def by_worker(self, worker: Any, seconds: float = 1.0, *, whole: bool = True, changed: float = 0.0) -> bool:
        """A step by way of a worker. Whether it was compared."""
        done, pieces = self.results()
        if changed:
            pieces[0][0] += changed
        if whole:
            self.in_place.watch(worker, done, self.plan)
        if compared := self.in_place.wants_proof:
            self.in_place.prove(self.plan, pieces)
        self.in_place.took(seconds)
        return compared

    def here(self, seconds: float) -> bool:
        """A step computed here. Whether it was."""
        assert self.in_place.has_data(self.plan)
        computed = self.in_place.compute(self.plan)
        if computed is not None:
            self.in_place.release(computed)
            self.in_place.took(seconds)
        return computed is not None

    def results(self) -> tuple[Done, list[Tensor]]:
        """What a worker sends, computed by an engine of its own."""
        assert self.batch is not None
        model = build_model(self.job)
        other = InPlace(self.job, self.loader, model, self.in_place._state, self.in_place._rule)
        computed = other._compute(self.plan, Block(0, self.plan.num_leaves), self.batch, 1)
        other.close()
        if computed is None:
            return Done(1, (0.0,), (), (), (), (), 0, 0.0, 0.0), []
        done = Done(
            1, computed.losses, computed.metric_names, computed.metrics, computed.untouched, computed.absent,
            computed.splits, 0.0, 0.0,
        )  # fmt: skip
        return done, [piece.clone() for piece in computed.vectors[-1].buckets]

    def prove(self, worker: Any) -> None:
        self.members.append(worker)
        for _ in range(self.in_place._settling):
            assert not self.by_worker(worker)
        for _ in range(in_place._PROOFS):
            assert not self.stands_in
            assert self.by_worker(worker)
        assert self.stands_in


def test_steps_are_computed_here_once_some_were_the_same_to_the_bit() -> None:
    rig = Rig()
    rig.prove(session())
    assert rig.here(0.5)


def test_one_bit_is_enough_to_leave_them_to_the_worker() -> None:
    rig, worker = Rig(), session()
    rig.members.append(worker)
    for _ in range(in_place._SETTLED):
        rig.by_worker(worker)
    assert rig.by_worker(worker, changed=2.0**-20)
    for _ in range(50):
        assert not rig.by_worker(worker)
    assert not rig.stands_in


@pytest.mark.parametrize(
    "other",
    [
        session(device="cuda:0"),
        session(numerics="tp=2 ab"),
        session(threads=(os.cpu_count() or 1) + 1),
        session(torch_version="1.0"),
        SimpleNamespace(**{**vars(session()), "link": SimpleNamespace(same_host=False)}),
        SimpleNamespace(**{**vars(session()), "ranks": 2}),
        SimpleNamespace(**{**vars(session()), "ready": None}),
    ],
)
def test_there_are_workers_in_whose_place_they_never_are(other: Any) -> None:
    rig = Rig()
    rig.members.append(other)
    assert not any(rig.by_worker(other) for _ in range(40))
    assert not rig.stands_in


def test_who_computes_otherwise_is_told_of_once() -> None:
    rig, worker = Rig(), session()
    told: list[str] = []
    rig.in_place._tell = told.append
    for _ in range(in_place._SETTLED + 20):
        rig.by_worker(worker, changed=1.0)
    assert len(told) == 1
    assert told[0].startswith("w has computed other bits of a step")


@pytest.mark.skipif(bool(unsupported()), reason="shared memory is there on Linux alone")
def test_parameters_are_seen_where_they_lie() -> None:
    """Nothing is copied: what the next version changes is there, and what a step writes is its own until then."""
    calls = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        calls.append([p.detach().clone() for p in model.parameters()])
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        written = next(model.parameters()).data[0]
        written.copy_(torch.stack((written.clone(), written.fill_(7.0)))[0])
        return loss

    rig = Rig(replace(jobs.mlp_sgd(), step=step, loss=None), shared=True)
    state = rig.in_place._state
    expected = state.views[0].clone()
    rig.prove(session())
    for version in (1, 2):
        state.views[0].add_(1.0)
        expected += 1.0
        rig.plan = rig.sampler.plan(version)
        assert rig.here(0.5)
        assert torch.equal(state.views[0], expected)
        assert torch.equal(calls[-1][0], expected)
    engine = rig.in_place._engine
    assert engine is not None
    assert rig.in_place._shows
    assert engine.incoming.groups[0].data_ptr() != state.groups[0].data_ptr()
    rig.close()


@pytest.mark.skipif(bool(unsupported()), reason="shared memory is there on Linux alone")
def test_where_they_cannot_be_seen_they_are_copied() -> None:
    rig = Rig(shared=True)
    assert rig.segment is not None
    rig.segment.close()
    rig.prove(session())
    rig.in_place._state.views[0].add_(1.0)
    rig.plan = rig.sampler.plan(1)
    assert rig.here(0.5)
    assert not rig.in_place._shows
    assert rig.in_place._engine is not None
    assert torch.equal(rig.in_place._engine.incoming.views[0], rig.in_place._state.views[0])
    rig.close()


@pytest.mark.skipif(bool(unsupported()), reason="shared memory is there on Linux alone")
def test_another_segment_is_not_taken_for_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc is of another namespace, the numbers may name one: its secret tells."""
    rig = Rig(shared=True)
    assert rig.segment is not None
    other = Segment("parameters", rig.segment.payload.numel(), b"another")
    numbers = other.told
    monkeypatch.setattr(Segment, "told", property(lambda segment: numbers))
    rig.prove(session())
    assert rig.here(0.5)
    assert not rig.in_place._shows
    rig.close()
    other.close()


@pytest.mark.parametrize("what", ["trained", "frozen", "buffer", "not saved", "small"])
def test_a_large_model_is_not_built_on_the_loop(what: str) -> None:
    """Whatever of it is large."""
    many = in_place._MOST_BYTES // 4 + 1

    def build() -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(256, 4))
        if what in ("trained", "frozen"):
            model.large = nn.Parameter(torch.zeros(many), requires_grad=what == "trained")
        elif what != "small":
            model.register_buffer("large", torch.zeros(many), persistent=what == "buffer")
        return model

    rig = Rig(replace(jobs.mlp_sgd(), model=build))
    assert rig.in_place.possible == (what == "small")
    rig.close()


def by_part(rig: Rig, worker: Any, seconds: float = 1.0, *, changed: float = 0.0) -> bool:
    """A step of which a worker has computed a part. Whether that was compared."""
    done, pieces = rig.results()
    if changed:
        pieces[0][0] += changed
    block = Block(0, rig.plan.num_leaves)
    rig.in_place.watch_part(worker, done, rig.plan, block, pieces)
    rig.in_place.watch_part(session(), done, rig.plan, block, pieces)  # one a step is enough
    compared = rig.in_place._compared
    rig.in_place.took(seconds)
    return compared


def test_parts_of_steps_are_computed_here_once_some_were_the_same_to_the_bit() -> None:
    rig, worker = Rig(), session()
    rig.members.append(worker)
    assert not any(by_part(rig, worker) for _ in range(in_place._SETTLED))
    for _ in range(in_place._PROOFS):
        assert not rig.stands_in
        assert by_part(rig, worker)
    assert rig.stands_in
    assert not rig.in_place.whole
    assert not by_part(rig, worker)
    for _ in range(2 * in_place.MOST_LENT):
        computed = rig.in_place.compute_part(rig.plan, Block(0, rig.plan.num_leaves))
        assert computed is not None
        (rig.in_place.lend if rig.in_place.can_lend else rig.in_place.release)(computed)
    assert not rig.in_place.can_lend
    rig.in_place.committed()
    assert rig.in_place.can_lend
    rig.in_place.took(0.5)
    rig.batch = None
    assert rig.in_place.compute_part(rig.plan, Block(0, rig.plan.num_leaves)) is None


def test_short_steps_are_shared_out_where_that_is_faster() -> None:
    rig = Rig()

    def takes(seconds: float) -> None:
        """So long a step, until they are compared."""
        rig.in_place._by, rig.in_place._computed, rig.in_place.whole = session(), True, not rig.in_place.shares
        rig.in_place._there.extend([9.0] * in_place._SETTLED)
        rig.in_place._leaf_s.append(0.001)
        for _ in range(in_place._SETTLED):
            rig.in_place._computed = True
            rig.in_place.took(seconds, 2, 0.004)

    takes(0.0030)
    assert not rig.in_place.shares  # that is tried
    assert not rig.stands_in  # and proven anew
    takes(0.0034)
    assert rig.in_place.shares
    for _ in range(in_place._WEIGHED - 1):
        takes(0.0030)
        assert rig.in_place.shares
    takes(0.0030)
    assert not rig.in_place.shares  # tried again
    takes(0.0020)
    assert not rig.in_place.shares
    takes(0.0034)
    assert rig.in_place.shares
    takes(0.0040)
    assert not rig.in_place.shares
    for _ in range(4 * in_place._WEIGHED - 1):
        takes(0.0020)
        assert not rig.in_place.shares
    takes(0.0020)
    assert rig.in_place.shares
    rig.in_place._sharing._known.clear()
    rig.in_place._by, rig.in_place.whole = session(), False
    rig.in_place._leaf_s.extend([0.003] * in_place._SETTLED)
    for _ in range(in_place._SETTLED):
        rig.in_place._computed = True
        rig.in_place.took(0.0030, 2, 0.004)
    assert rig.in_place.shares  # it is not short


def test_reading_and_steps_take_turns_where_that_is_faster() -> None:
    """By what most steps take together: some wait for data and others do not, and now and then the machine pauses."""
    rig, worker = Rig(turns=True), session()
    rig.prove(worker)
    assert not rig.by_worker(worker)  # a step that it computes after all is not compared any more

    def takes(seconds: float, *, pause: float = 0.0) -> None:
        """So long a step in the mean, until they are compared."""
        for number in range(in_place._VARIED):
            waits = number % 4 == 0
            assert rig.here(seconds * (2.5 if waits else 0.5) + (pause if number == 7 else 0.0))

    def settle() -> None:
        """Steps that have what was read the other way."""
        for _ in range(in_place._SETTLED):
            assert rig.here(100.0)

    assert rig.in_place.takes_turns
    takes(0.0020)
    assert not rig.in_place.takes_turns  # the other way is tried
    settle()
    takes(0.0030)
    assert rig.in_place.takes_turns
    settle()
    for _ in range(in_place._WEIGHED - 1):
        takes(0.0020, pause=10.0)
        assert rig.in_place.takes_turns
    takes(0.0020)
    assert not rig.in_place.takes_turns  # tried again
    settle()
    takes(0.0010)
    assert not rig.in_place.takes_turns
    takes(0.0030)
    assert rig.in_place.takes_turns
    rig.in_place.whole = False
    for _ in range(3 * in_place._VARIED):
        rig.in_place._computed = True
        rig.in_place.took(0.5)
    assert not rig.in_place.takes_turns  # parts of steps are read for whoever computes the others as well
    rig.in_place.whole = True
    assert rig.in_place.takes_turns
    rig.loader.can_take_turns = False
    assert not rig.in_place.takes_turns


@pytest.mark.parametrize(("here_s", "stays"), [(0.2, True), (0.5, True), (2.0, False)])
def test_steps_of_which_some_wait_for_data_go_by_their_groups(here_s: float, stays: bool) -> None:
    """By way of workers seven of eight take 0.1 s, one 4.3 s: all others have their data with it. What is between them,
    computed by the other side, changes nothing."""
    rig, worker = Rig(turns=True), session()
    rig.members.append(worker)
    for number in range(in_place._VARIED + in_place._PROOFS):
        rig.by_worker(worker, 4.3 if number % 8 == 0 else 0.1)
    assert rig.stands_in
    for number in range(4 * in_place._VARIED):
        if rig.stands_in:
            assert rig.here(here_s + (50.0 if number == 30 else 0.0))
            if number % 10 == 0:
                rig.by_worker(worker, 5.0)
    assert rig.stands_in == stays


def test_one_bit_of_a_part_is_enough_to_leave_all_to_the_worker() -> None:
    rig, worker = Rig(), session()
    rig.members.append(worker)
    for _ in range(in_place._SETTLED + 1):
        by_part(rig, worker, changed=2.0**-20)
    assert not any(by_part(rig, worker) for _ in range(50))
    assert not rig.stands_in


def test_steps_that_are_shared_out_show_nothing() -> None:
    rig, worker = Rig(), session()
    assert not any(rig.by_worker(worker, whole=False) for _ in range(40))


def test_whoever_is_proved_stands_for_those_that_compute_alike() -> None:
    rig, worker = Rig(), session()
    rig.prove(worker)
    rig.members[:] = [session(torch_version="1.0"), twin := session()]
    assert rig.stands_in
    rig.members.remove(twin)
    assert not rig.stands_in


@pytest.mark.slow
def test_workers_have_them_again_where_that_is_faster_and_later_it_may_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time in a row for four times as long; one slow moment of the machine costs as few steps as the first."""
    monkeypatch.setattr(in_place, "_MOST_PATIENCE", 20 * in_place._SETTLED)
    rig, worker = Rig(), session()
    rig.prove(worker)

    def takes(seconds: float) -> None:
        """So long a step here, until they are compared."""
        for _ in range(in_place._SETTLED):
            assert rig.stands_in
            rig.here(seconds)

    def by_workers(steps: int) -> None:
        """So many are by way of workers before it is looked at anew."""
        for _ in range(steps):
            assert not rig.stands_in
            assert not rig.by_worker(worker, 3.0)
        assert rig.by_worker(worker, 3.0)

    takes(2.0)
    by_workers(in_place._SETTLED)
    takes(4.0)
    by_workers(4 * in_place._SETTLED)
    takes(4.0)
    by_workers(16 * in_place._SETTLED)
    takes(2.0)  # is faster
    takes(4.0)
    by_workers(in_place._SETTLED)
    for _ in range(2):
        takes(2.0)
    assert rig.stands_in
    for times in (1, 4, 16, 20, 20):
        takes(4.0)
        by_workers(times * in_place._SETTLED)


def test_a_few_slow_steps_change_nothing() -> None:
    rig = Rig()
    rig.prove(session())
    for number in range(100):
        rig.here(9.0 if number % 3 == 0 else 0.5)
    assert rig.stands_in


class Steps:
    """Of a job: raises, hangs, or writes into its batch, once it is told to."""

    def __init__(self) -> None:
        self.does = ""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        if self.does == "raises":
            raise RuntimeError("not today")
        if self.does == "hangs":
            time.sleep(60)
        if self.does == "swallows":
            with suppress(BaseException):
                time.sleep(60)
        if self.does == "interrupts":
            raise KeyboardInterrupt
        if self.does == "writes":
            x.mul_(0)
        return nn.functional.cross_entropy(model(x), y)


@pytest.mark.parametrize("does", ["raises", "hangs", "swallows", "interrupts"])
def test_a_step_that_fails_or_hangs_is_left_to_workers_and_so_is_every_other(does: str) -> None:
    step = Steps()
    rig = Rig(replace(jobs.mlp_sgd(), step=step, loss=None))
    rig.prove(session())
    told: list[str] = []
    rig.in_place._tell, step.does = told.append, does
    rig.in_place._limit._seconds = 0.5  # a machine that does other work is long in coming to the step
    assert not rig.here(1.0)
    assert ["since step 0 failed there (" in text for text in told] == [True]
    step.does = ""
    assert not rig.stands_in
    rig.in_place.close()
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


@pytest.mark.parametrize("what", in_place._SETTINGS)
def test_a_step_that_changes_what_the_process_works_with_is_left_to_workers(what: str) -> None:
    """The optimizer would go on with it; a worker's process is its own."""
    changes: dict[str, Callable[[], object]] = {
        "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
        "whether gradients are recorded": lambda: torch.set_grad_enabled(False),
        "whether denormal numbers are flushed": lambda: torch.set_flush_denormal(True),
        "the precision of matrix products": lambda: torch.set_float32_matmul_precision("medium"),
    }
    read, put_back = in_place._SETTINGS[what]
    before, does = read(), False

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if does:
            changes[what]()
        return loss

    rig = Rig(replace(jobs.mlp_sgd(), step=step, loss=None))
    rig.prove(session())
    told: list[str] = []
    rig.in_place._tell, does = told.append, True
    try:
        assert not rig.here(1.0)
        assert read() == before
    finally:
        put_back(before)
    assert [f"it changes {what}," in text for text in told] == [True]
    assert not rig.stands_in


def test_precision_that_torchs_older_setting_has_no_word_for() -> None:
    backend: Any = torch.backends.mkldnn
    products = backend.matmul
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    try:
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        rig = Rig()
        rig.prove(session())
        assert rig.here(0.5)
        assert products.fp32_precision == "bf16"
    finally:
        products.fp32_precision = before
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_a_step_may_write_into_its_batch(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``most``: of what the engine has a copy itself."""
    monkeypatch.setattr(engine, "_COPIED_BYTES", most)
    step = Steps()
    rig = Rig(replace(jobs.mlp_sgd(), step=step, loss=None))
    rig.prove(session())
    before, step.does = rig.tensors[0].clone(), "writes"
    assert rig.here(0.5)
    assert torch.equal(rig.tensors[0], before)


def test_data_that_has_not_come() -> None:
    rig = Rig()
    rig.prove(session())
    rig.batch = None
    assert not rig.in_place.has_data(rig.plan)


def test_the_number_of_threads_is_the_workers_and_then_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), []

    def step(model: nn.Module, batch: Any) -> Tensor:
        seen.append(torch.get_num_threads())
        torch.set_num_threads(before + 2)  # whatever it does
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    monkeypatch.setattr("os.cpu_count", lambda: before + 1)
    rig = Rig(replace(jobs.mlp_sgd(), step=step, loss=None))
    rig.in_place._kind = in_place._kind(session(threads=before + 1))
    assert rig.in_place.has_data(rig.plan)
    assert rig.in_place.compute(rig.plan) is not None
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_code_that_sleeps_or_goes_round_in_circles_is_interrupted() -> None:
    limit = time_limit(0.02)
    for hangs in (lambda: time.sleep(60), lambda: [None for _ in iter(int, 1)]):
        with pytest.raises(Overdue, match="longer than it may"), limit:
            hangs()
    other = time_limit(1.0)
    with other:
        pass
    other.close()
    with pytest.raises(Overdue), limit:  # its handler is still there
        time.sleep(60)
    limit.close()
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


@pytest.mark.slow
def test_the_timer_that_an_earlier_call_has_left_ends_nothing() -> None:
    limit = time_limit(0.2)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:  # it goes off in some of these, which are short
        with limit:
            pass
    while time_limit._rings < math.inf:  # and between two
        pass
    assert not any(signal.getitimer(signal.ITIMER_REAL))
    began = time.monotonic()
    with limit:
        pass
    while time.monotonic() < began + 0.1:
        pass
    began = time.monotonic()
    with pytest.raises(Overdue), limit:  # it has all of its own time
        time.sleep(60)
    assert time.monotonic() - began >= 0.2
    shorter = time_limit(0.1)
    with pytest.raises(Overdue), shorter:
        time.sleep(60)
    signal.setitimer(signal.ITIMER_REAL, 0)  # as a job's own code may
    while time.monotonic() < time_limit._rings:
        pass
    with pytest.raises(Overdue), limit:
        time.sleep(60)
    for one in (limit, shorter):
        one.close()
    assert not any(signal.getitimer(signal.ITIMER_REAL))


@pytest.mark.parametrize("where", [time_limit.__enter__, time_limit.__exit__])
def test_one_that_goes_off_at_a_calls_edge_leaves_no_limit_behind(where: Any) -> None:
    """At the beginning the call has its time again; at the end it is over, and late."""
    limit, edge = time_limit(60.0), where.__code__

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is edge and event == "line" and time_limit._ends < math.inf:
            sys.settrace(None)
            time_limit._ends = time.monotonic()
            signal.raise_signal(signal.SIGALRM)
        return trace if frame.f_code is edge else None

    sys.settrace(trace)
    try:
        with suppress(Overdue) if where is time_limit.__enter__ else pytest.raises(Overdue), limit:
            pass
    finally:
        sys.settrace(None)
    assert time_limit._ends == math.inf
    limit.close()


def test_code_that_swallows_every_interrupt_is_given_up() -> None:
    class GivenUp(BaseException):
        pass

    def give_up() -> None:
        nonlocal swallows
        swallows = False
        raise GivenUp

    def swallow() -> None:
        while swallows:
            with suppress(BaseException):
                time.sleep(60)

    swallows, limit = True, time_limit(0.02, stuck=give_up)
    with pytest.raises(Overdue), limit:
        swallow()
    limit.close()


def test_the_signal_is_not_taken_from_anybody() -> None:
    assert time_limit.is_free()
    signal.setitimer(signal.ITIMER_REAL, 60)
    assert not time_limit.is_free()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, lambda *_: None)
    assert not time_limit.is_free()


class Elsewhere:
    """Another thread that has the process's random state, as an evaluation has it."""

    def __enter__(self) -> None:
        self._taken, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold)
        self._thread.start()
        self._taken.wait()

    def _hold(self) -> None:
        with random_state():
            self._taken.set()
            self._over.wait()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_while_others_draw_workers_go_on_and_nobody_waits() -> None:
    rig, told = Rig(), list[str]()
    rig.in_place._tell = told.append
    rig.prove(session())
    with Elsewhere():
        began = time.monotonic()
        assert not rig.stands_in
        assert not rig.here(0.5)
        assert time.monotonic() - began < 2.0  # or it would be for as long as the other has it
    assert rig.stands_in  # and nothing was wrong
    assert rig.here(0.5)
    assert told == []


def test_a_moment_of_others_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    class Seen(Claim):
        def __init__(self, seconds: float) -> None:
            asked.append(seconds)
            super().__init__(seconds)

    monkeypatch.setattr(in_place, "Claim", Seen)
    rig = Rig()
    rig.prove(session())
    with Elsewhere():
        asked.clear()
        assert not any(rig.stands_in for _ in range(4))
        assert [seconds > 0 for seconds in asked] == [True, False, False, False]
    assert rig.stands_in
    asked.clear()
    assert rig.stands_in
    assert asked[0] > 0
