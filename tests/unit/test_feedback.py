"""Error feedback: nothing is lost, nothing is sent twice, and with it sparse codecs converge."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.pools import OfAnotherDevice
from torch import Tensor

from w5xde_async.codecs.codec import BytePool, Encoded
from w5xde_async.codecs.feedback import Dropped, Feedback
from w5xde_async.codecs.registry import codec

SIZES = (300, 5000)
NAMES = ["bf16", "int8", "int4", "sign", "topk:0.01", "sparseloco", "lz4:topk:0.1"]


def feedback(name: str, decay: float | None = 1.0) -> Feedback:
    return Feedback(codec(name), dict(enumerate(SIZES)), pool=BytePool(), decay=decay)


def decoded(what: Encoded, bucket: int = 0) -> Tensor:
    out = torch.empty(SIZES[bucket])
    what.codec.decode(what.data, out)
    return out


def gradient(seed: int, bucket: int = 0) -> Tensor:
    return torch.randn(SIZES[bucket], generator=torch.Generator().manual_seed(seed))


def held(worker: Feedback, bucket: int) -> Tensor:
    residual = worker.residual(bucket)
    return torch.zeros(SIZES[bucket]) if residual is None else residual


@pytest.mark.parametrize(
    ("name", "off_10", "off_100"), [("topk:0.01", 1.13, 0.48), ("sign", 0.31, 0.08), ("int4", 0.08, 0.02)]
)
def test_steps_that_a_coordinator_forgets_leave_residuals_changed(name: str, off_10: float, off_100: float) -> None:
    """By so much of what these steps computed is sum and residuals off (docs/codecs.md), in no direction of its own."""
    numel, steps = 4096, 300
    weights = torch.randn(numel, generator=torch.Generator().manual_seed(0))

    @cache
    def of_step(step: int) -> Tensor:
        x = torch.randn(32, numel, generator=torch.Generator().manual_seed(step))
        return x.T @ (x @ weights) / 32

    for forgotten, expected in ((10, off_10), (100, off_100)):
        worker = Feedback(codec(name), {0: numel}, pool=BytePool(), decay=1.0)
        counted, kept = torch.zeros(numel), range(steps - forgotten)
        again = range(steps - forgotten, steps)
        for key, step in enumerate([*kept, *again, *again]):
            encoded = worker.encode(key, 0, of_step(step))
            if key not in again:  # those of the coordinator that was killed
                encoded.codec.add_to(encoded.data, counted)
            worker.settle(key, applied=True)
            residual = worker.residual(0)
            assert residual is not None
            if key == again[0] - 1:
                before = residual.clone()
            elif key == again[-1]:
                changed = residual - before
        whole = sum(map(of_step, range(steps)), torch.zeros(numel))
        off = counted + residual - whole
        torch.testing.assert_close(off, changed, rtol=1e-3, atol=1e-2)
        assert float(off.norm() / sum(map(of_step, again), torch.zeros(numel)).norm()) == pytest.approx(
            expected, rel=0.1
        )
        assert abs(float(off @ whole / whole.norm() ** 2)) < 0.01


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_sent_and_residuals_are_what_was_computed(name: str, seed: int) -> None:
    """Any order of verdicts, up to three submissions without one; in float64, beside the float32 of the residuals."""
    draw = random.Random(seed)
    worker = feedback(name)
    computed = [torch.zeros(numel, dtype=torch.float64) for numel in SIZES]
    applied = [torch.zeros(numel, dtype=torch.float64) for numel in SIZES]
    waiting: list[tuple[int, list[Tensor], list[Tensor]]] = []
    verdicts = dict.fromkeys((True, False), 0)
    for key in range(30):
        gradients = [gradient(draw.randrange(2**31), bucket) for bucket in range(2)]
        sent = [decoded(worker.encode(key, bucket, g), bucket) for bucket, g in enumerate(gradients)]
        waiting.append((key, gradients, sent))
        while len(waiting) > draw.randint(0, 3):
            settled, gradients, sent = waiting.pop(draw.randrange(len(waiting)))
            counts = draw.choice((True, False))
            verdicts[counts] += 1
            assert worker.settle(settled, applied=counts)
            for bucket in range(2 * counts):
                computed[bucket] += gradients[bucket]
                applied[bucket] += sent[bucket]
    for key, _, _ in waiting:
        worker.settle(key, applied=False)
    assert all(verdicts.values())
    for bucket in range(2):
        total = applied[bucket] + held(worker, bucket)
        assert float((total - computed[bucket]).abs().max()) < 2e-4
    kept = sum(worker.residual(bucket) is not None for bucket in range(2))
    assert worker.pool.num_out == kept  # every buffer but the residuals' has gone back


@pytest.mark.parametrize("name", NAMES)
def test_values_that_lie_elsewhere_are_encoded_there_and_nothing_of_them_is_looked_at_later(name: str) -> None:
    here = feedback(name, decay=0.9)
    there = Feedback(codec(name), dict(enumerate(SIZES)), pool=OfAnotherDevice(), decay=0.9)
    for key in range(5):
        for bucket in range(2):
            values = gradient(7 * key + bucket, bucket)
            expected = here.encode(key, bucket, values.clone())
            found = there.encode(key, bucket, values)
            assert there.encode(key, bucket, values).data is found.data
            values.fill_(9.0)
            assert (found.codec.name, found.data.tolist()) == (expected.codec.name, expected.data.tolist())
        for which in (here, there):
            which.settle(key, applied=key != 2)
    assert all(torch.equal(held(here, bucket), held(there, bucket)) for bucket in range(2))
    there.drop()
    assert there.pool.num_out == 0


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("place", ["encode", "add_to"])
def test_where_memory_lacks_nothing_has_changed(
    elsewhere: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    worker, again = feedback("int8"), feedback("int8")
    if elsewhere:
        worker.pool = OfAnotherDevice()
    for which in (worker, again):
        which.encode(0, 0, gradient(1))
        which.settle(0, applied=True)
    before = worker.pool.num_out
    with monkeypatch.context() as patch:

        def lacks(*_: object, **__: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        patch.setattr(type(worker.codec), place, lacks)
        with pytest.raises(torch.OutOfMemoryError):
            worker.encode(1, 0, gradient(2))
    assert worker.pool.num_out - before == (0 if elsewhere or place == "encode" else 1)  # torch's, of the codec
    assert torch.equal(worker.encode(1, 0, gradient(2)).data, again.encode(1, 0, gradient(2)).data)


def test_each_verdict_by_its_formula() -> None:
    first, second = gradient(1), gradient(2)
    for applied in (True, False):
        worker = feedback("int4")
        sent = decoded(worker.encode("a", 0, first))
        worker.settle("a", applied=True)
        before = first - sent
        assert torch.equal(held(worker, 0), before)
        sent = decoded(worker.encode("b", 0, second))
        assert torch.equal(sent, decoded(codec("int4").encode(second + before, BytePool())))
        assert worker.residual(0) is None  # pending: nobody takes it twice
        worker.settle("b", applied=applied)
        assert torch.equal(held(worker, 0), second + before - sent if applied else before)


def test_the_gradient_is_not_changed() -> None:
    worker, values = feedback("sign"), gradient(1)
    worker.encode("a", 0, values)
    worker.settle("a", applied=True)
    worker.encode("b", 0, values)
    assert torch.equal(values, gradient(1))


def test_a_submission_counts_once() -> None:
    worker = feedback("topk:0.01")
    once = worker.encode(("w", 7, 0), 0, gradient(1))
    assert worker.encode(("w", 7, 0), 0, gradient(2)) is once
    assert worker.num_pending == 1
    assert worker.settle(("w", 7, 0), applied=True)
    kept = held(worker, 0).clone()
    assert not worker.settle(("w", 7, 0), applied=False)
    assert not worker.settle(("w", 8, 0), applied=False)
    assert torch.equal(held(worker, 0), kept)


def test_residuals_decay() -> None:
    worker = feedback("sparseloco", decay=None)
    assert worker.decay == 0.95
    worker.encode("a", 0, gradient(1))
    worker.settle("a", applied=True)
    before = held(worker, 0).clone()
    sent = decoded(worker.encode("b", 0, torch.zeros(300)))
    worker.settle("b", applied=True)
    assert torch.allclose(held(worker, 0), 0.95 * before - sent, atol=1e-6)
    with pytest.raises(ValueError, match="decay from 0 to 1"):
        feedback("sign", decay=1.1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("applied", [True, False])
def test_what_is_not_finite_never_becomes_a_residual(name: str, applied: bool) -> None:
    worker = feedback(name)
    worker.encode("a", 0, gradient(1))
    worker.settle("a", applied=True)
    before = held(worker, 0).clone()
    bad = gradient(2)
    bad[5] = float("inf")
    assert not bool(decoded(worker.encode("b", 0, bad)).isfinite().all())  # the coordinator's finite check sees it
    worker.settle("b", applied=applied)
    assert torch.equal(held(worker, 0), before)
    assert bool(decoded(worker.encode("c", 0, gradient(3))).isfinite().all())


def test_large_values_are_finite() -> None:
    worker = feedback("sign")
    worker.encode("a", 0, torch.full((300,), 2e38).mul_(gradient(1).sign()))
    worker.encode("a", 1, torch.full((5000,), 1e38).mul_(1 + gradient(1, 1).abs().clamp_(0, 1)))  # its sum overflows
    worker.settle("a", applied=True)
    assert all(bool(held(worker, bucket).any()) for bucket in range(2))  # what was left out is kept


def test_what_a_dead_worker_loses_is_counted() -> None:
    worker = feedback("topk:0.01")
    assert worker.drop() == Dropped()
    for bucket in range(2):
        worker.encode("a", bucket, gradient(1, bucket))
    worker.settle("a", applied=True)
    norm = float((held(worker, 0).square().sum() + held(worker, 1).square().sum()).sqrt())
    assert worker.norm() == pytest.approx(norm, rel=1e-5)
    worker.encode("b", 0, gradient(2))  # takes the residual with it
    assert worker.norm() < norm
    dropped = worker.drop()
    assert dropped.norm == pytest.approx(norm, rel=1e-5)
    assert (dropped.num_buckets, dropped.num_pending) == (2, 1)
    assert worker.norm() == 0.0
    assert worker.pool.num_out == 0
    assert not worker.settle("b", applied=True)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_where_steps_have_unequal_weights_what_they_divide_by_them_is_conserved(name: str, seed: int) -> None:
    """As the last step of an epoch, which may have one sample where the others have 128. Through a drain, too."""
    draw = random.Random(seed)
    worker = feedback(name)
    computed, applied = (torch.zeros(SIZES[0], dtype=torch.float64) for _ in range(2))
    waiting: list[tuple[int, Tensor, Tensor, float]] = []
    for key in range(30):
        weight = draw.choice((1.0, 2.0, 29.0, 64.0, 128.0))
        gradient_sum = gradient(draw.randrange(2**31)) * weight
        waiting.append((key, gradient_sum, decoded(worker.encode(key, 0, gradient_sum, weight)), weight))
        while len(waiting) > draw.randint(0, 3):
            settled, gradient_sum, sent, weight = waiting.pop(draw.randrange(len(waiting)))
            counts = draw.choice((True, False))
            worker.settle(settled, applied=counts)
            if counts:
                computed += gradient_sum / weight
                applied += sent / weight
    for key, *_ in waiting:
        worker.settle(key, applied=False)
    left = worker.state_dict().get("residual.0", torch.zeros(SIZES[0]))
    assert float((applied + left - computed).abs().max()) < 2e-4
    other = feedback(name)
    other.load_state_dict(worker.state_dict())
    one, same = (decoded(one.encode("next", 0, gradient(5) * 64, 64.0)) for one in (worker, other))
    assert float((one - same).norm() / one.norm()) < 0.05


@pytest.mark.parametrize("name", NAMES)
def test_a_drained_worker_goes_on_where_it_was(name: str) -> None:
    one, other = feedback(name), feedback(name)
    for key in range(3):
        one.encode(key, 1, gradient(key, 1))
        one.settle(key, applied=True)
    other.encode("old", 0, gradient(9))
    other.settle("old", applied=True)
    other.load_state_dict(one.state_dict())
    assert other.residual(0) is None
    for worker in (one, other):
        worker.encode("next", 0, gradient(4))
    assert bytes(one.encode("next", 1, gradient(5, 1)).view) == bytes(other.encode("next", 1, gradient(5, 1)).view)


def test_a_state_is_of_its_own_buckets_and_complete() -> None:
    worker = feedback("int8")
    worker.encode("a", 0, gradient(1))
    with pytest.raises(ValueError, match="no verdict yet"):
        worker.state_dict()
    with pytest.raises(ValueError, match="no verdict yet"):
        worker.load_state_dict({})
    worker.settle("a", applied=True)
    state = worker.state_dict()
    before = held(worker, 0).clone()
    for name, tensor, says in (
        ("residual.2", gradient(1), "no bucket"),
        ("residual.0", gradient(1, 1), "bucket has 300"),
        ("residual.-1", gradient(1), "no bucket"),
        ("residual.0.x", gradient(1), "no bucket"),
        ("loss.0", gradient(1), "no bucket"),
    ):
        with pytest.raises(ValueError, match=says):
            worker.load_state_dict(state | {name: tensor})
    assert torch.equal(held(worker, 0), before)
    other = feedback("topk:0.01")  # residuals are values, whatever codec left them out
    other.load_state_dict(state)
    assert torch.equal(held(other, 0), before)


# -- convergence

_ROWS = torch.tensor([[-3.0, 2.0, 2.0], [2.0, -3.0, 2.0], [2.0, 2.0, -3.0]])


def opposed(x: Tensor, row: Tensor) -> Tensor:
    """The gradient of <row, x>^2 + |x|^2 / 4: each worker's largest entry says the opposite of the sum's."""
    return 2 * (row @ x) * row + x / 2


def distance_after(steps: int, *, with_feedback: bool, name: str = "topk:0.3") -> float:
    """From the optimum 0, for three workers that each send one entry of three."""
    pool, x = BytePool(), torch.ones(3)
    workers = [Feedback(codec(name), {0: 3}, pool=pool, decay=1.0) for _ in range(3)]
    for step in range(steps):
        total = torch.zeros(3)
        for row, worker in zip(_ROWS, workers, strict=True):
            what = worker.encode(step, 0, opposed(x, row))
            what.codec.add_to(what.data, total)
            worker.settle(step, applied=True)
            if not with_feedback:
                worker.drop()
        x -= 0.01 * total / 3
    return float(x.norm())


@pytest.mark.slow
def test_topk_without_feedback_runs_away_and_with_it_converges() -> None:
    """Least squares on which greedy entries cancel the wrong way (Beznosikov et al., On Biased Compression)."""
    assert distance_after(300, with_feedback=False) > 100.0
    assert distance_after(1500, with_feedback=True) < 0.01


@cache
def distance_under(name: str, *, with_feedback: bool, decay: float | None = None, steps: int = 400) -> float:
    """Least squares with minibatches over two workers: the distance from the optimum, relative to the start's.

    Decreasing steps, so that the noise of the minibatches averages out and what a codec loses does not.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 128, generator=generator) * torch.logspace(0, -1, 128)
    best = torch.randn(128, generator=generator)
    targets = inputs @ best + 0.3 * torch.randn(512, generator=generator)
    best = torch.linalg.lstsq(inputs, targets[:, None]).solution.flatten()
    pool, x = BytePool(), torch.zeros(128)
    workers = [Feedback(codec(name), {0: 128}, pool=pool, decay=decay) for _ in range(2)]
    for step in range(steps):
        total = torch.zeros(128)
        for worker in workers:
            rows = torch.randint(512, (64,), generator=generator)
            what = worker.encode(step, 0, inputs[rows].T @ (inputs[rows] @ x - targets[rows]) / 64)
            what.codec.add_to(what.data, total)
            worker.settle(step, applied=True)
            if not with_feedback:
                worker.drop()
        x -= 0.3 / (1 + step / 100) * total / 2
    weight = inputs.square().mean(0).sqrt()
    return float(((x - best) * weight).norm() / (best * weight).norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "sign", "topk:0.05", "sparseloco"])
def test_with_feedback_every_codec_ends_where_float32_does(name: str) -> None:
    exact = distance_under("raw", with_feedback=False)
    assert distance_under(name, with_feedback=True, decay=1.0) < 1.1 * exact
    if name in ("topk:0.05", "sparseloco"):
        assert distance_under(name, with_feedback=False) > 2 * exact
    elif name != "sign":  # what is refused without feedback is refused for cause, and what is not converges
        assert distance_under(name, with_feedback=False) < 1.1 * exact


@pytest.mark.slow
def test_decay_costs_what_gradients_left_out() -> None:
    """Why top-k does not decay here: half of each residual is forgotten before its turn comes."""
    assert distance_under("topk:0.05", with_feedback=True, decay=0.95) > 1.2 * distance_under(
        "topk:0.05", with_feedback=True
    )
