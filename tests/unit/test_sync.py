"""The synchronous rule beside a plain optimizer loop, to the last bit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from w5xde_async.errors import JobError
from w5xde_async.job import Job
from w5xde_async.params.flat import FlatState, ResultVector, named_digest
from w5xde_async.params.layout import Layout
from w5xde_async.params.reducer import Addends
from w5xde_async.store.state import pack_state, unpack_state
from w5xde_async.updates.sync import LossScale, SyncRule

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 5)
        self.narrow = nn.Parameter(torch.randn(7).bfloat16())
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.rare = nn.Parameter(torch.randn(70))  # alone in a bucket
        self.norm = nn.BatchNorm1d(5)


def grouped(module: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(module, Model)
    return torch.optim.AdamW(
        [
            {"params": [module.body.weight, module.narrow], "weight_decay": 0.1},
            {"params": [module.body.bias, module.rare, *module.norm.parameters()], "lr": 0.5},
        ],
        lr=0.01,
    )


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9, nesterov=True)


def job(**changes: Any) -> Job:
    data = TensorDataset(torch.zeros(8, 6), torch.zeros(8))
    return Job(**{"model": Model, "dataset": data, "optimizer": momentum, "max_steps": 5, "batch_size": 8, **changes})


@pytest.fixture(autouse=True, params=[None, torch.device("cpu")], ids=["in place", "elsewhere"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device | None:
    """Every test: where the optimizer steps in the memory that is sent, and where in other memory."""
    chosen: torch.device | None = request.param
    monkeypatch.setattr(Bench, "device", chosen)
    return chosen


class Bench:
    """A rule over a flat model, fed with gradients by name."""

    device: torch.device | None = None

    def __init__(self, **changes: Any) -> None:
        self.model = Model()
        self.layout = Layout.of(self.model, bucket_bytes=64)
        self.state = FlatState(self.layout)
        self.state.copy_from(self.model)
        self.state.adopt(self.model)
        self.rule = SyncRule.of(job(**changes), self.model, self.layout, self.state, self.device)
        self.names = [entry.name for entry in self.layout.entries]

    def apply(
        self, sums: dict[str, Tensor], samples: int = 8, buffers: dict[str, Tensor] | None = None,
        rate_factor: float = 1.0, expected: random.Random | None = None, step: int = 0,
    ) -> Any:  # fmt: skip
        """``sums`` per trainable parameter; what is missing got no gradient.

        ``expected``: sums lie elsewhere, and some of them, or others in their places, have been expected before.
        """
        root = ResultVector(self.layout)
        root.memory.fill_(77)  # what is not present may hold anything
        touched = set()
        for group, piece in zip(self.layout.groups, root.groups, strict=True):
            if piece is not None:
                piece.fill_(-0.0 if group.role != "max" else torch.iinfo(torch.int64).min)
        for name, value in {**sums, **(buffers or {})}.items():
            index = self.names.index(name)
            entry = self.layout.entries[index]
            root.group(entry.group)[entry.offset : entry.offset + entry.numel].copy_(value.reshape(-1))
            touched.add(index)
        present = [any(index in touched for index in bucket.entries) for bucket in self.layout.result_buckets]
        for bucket, there in zip(self.layout.result_buckets, present, strict=True):
            if not there:
                root.buckets[bucket.index].fill_(-7)
        untouched = {index for index in self.layout.trainable if index not in touched}
        if expected is None:
            return self.rule.apply(root, present, samples, untouched, step=step, rate_factor=rate_factor)
        lie = [_addends(piece, there, expected) for piece, there in zip(root.buckets, present, strict=True)]
        before = [[piece.clone() for piece in those] for those in lie]
        for bucket in self.layout.result_buckets:
            if self.layout.groups[bucket.group].role == "grad":
                for what in expected.sample(["other", "same", "of a like step"], expected.randint(0, 3)):
                    if what == "other" or not lie[bucket.index]:
                        self.rule.expect(bucket.index, torch.full_like(root.buckets[bucket.index], 5.0), samples)
                    else:  # of two, it is no sum at all
                        self.rule.expect(bucket.index, lie[bucket.index][0], samples + (what != "same"))
                root.buckets[bucket.index].fill_(9)
        applied = self.rule.apply(root, present, samples, untouched, rate_factor=rate_factor, addends=lie)
        gradients = [b.index for b in self.layout.result_buckets if self.layout.groups[b.group].role == "grad"]
        for bucket in gradients:
            assert all(torch.equal(*pair) for pair in zip(lie[bucket], before[bucket], strict=True))
        return applied


def _addends(summed: Tensor, present: bool, chance: random.Random) -> Addends:
    """What ``summed`` is the sum of, to the bit: itself, or two tensors."""
    if not present:
        return ()
    half = torch.zeros_like(summed) if chance.random() < 0.5 else summed / 2
    both = (half, summed - half) if summed.is_floating_point() and chance.random() < 0.5 else (summed.clone(),)
    return both if torch.equal(sum(both[1:], both[0]), summed) else (summed.clone(),)


def gradients(step: int, *, rare: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    found = {}
    for name, parameter in Model().named_parameters():
        if parameter.requires_grad:
            found[name] = torch.randn(parameter.shape, generator=generator) * 8
    if not rare:
        del found["rare"]
    return found


def plain(make: Make, schedule: Any, clip: float | None, steps: int, samples: int = 8) -> nn.Module:
    model = Model()
    optimizer = make(model)
    scheduler = schedule(optimizer) if schedule else None
    for step in range(steps):
        sums = gradients(step, rare=step % 2 == 0)
        for name, parameter in model.named_parameters():
            parameter.grad = (sums[name] / samples).to(parameter.dtype) if name in sums else None
        if clip is not None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("schedule", [None, cosine])
@pytest.mark.parametrize("make", [grouped, momentum])
def test_equal_to_a_plain_loop(make: Make, schedule: Any, clip: float | None) -> None:
    bench = Bench(optimizer=make, scheduler=schedule, gradient_clip_val=clip)
    rates = [bench.apply(gradients(step, rare=step % 2 == 0)).learning_rate for step in range(6)]
    assert bench.state.digest() == named_digest(plain(make, schedule, clip, 6))
    assert (rates[0] == rates[-1]) == (schedule is None)
    assert all(parameter.grad is None for parameter in bench.model.parameters())


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("seed", range(6))
def test_a_sum_that_was_expected_and_one_that_was_not_have_the_same_bits(seed: int, clip: float | None) -> None:
    chance = random.Random(seed)
    bench = Bench(optimizer=grouped, scheduler=cosine, gradient_clip_val=clip)
    for step in range(6):
        expected = chance if step % 3 else None
        bench.apply(gradients(step, rare=step % 2 == 0), expected=expected)
    assert bench.state.digest() == named_digest(plain(grouped, cosine, clip, 6))


@pytest.mark.parametrize("tensors", [False, True])
def test_a_factor_multiplies_every_groups_rate_in_one_step_alone(tensors: bool) -> None:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        optimizer = grouped(module)
        for group in optimizer.param_groups if tensors else ():
            group["lr"] = torch.tensor(group["lr"])
        return optimizer

    def tripled(module: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(module)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 3.0
        return optimizer

    mine, other = Bench(optimizer=make), Bench(optimizer=tripled)
    before = [group["lr"] for group in mine.rule.optimizer.param_groups]
    applied, expected = mine.apply(gradients(0), rate_factor=3.0), other.apply(gradients(0))
    assert mine.state.digest() == other.state.digest()
    assert applied.learning_rate == pytest.approx(expected.learning_rate)
    assert all(group["lr"] is rate for group, rate in zip(mine.rule.optimizer.param_groups, before, strict=True))


class Beside(torch.optim.Optimizer):
    """Makes its steps by another, and has no setting itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__([p for p in module.parameters() if p.requires_grad], {})
        self.made = momentum(module)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.made.step()


class Rateless(torch.optim.Optimizer):
    """``unset``: as one that finds a rate itself."""

    def __init__(self, module: nn.Module, unset: dict[str, Any]) -> None:
        super().__init__([p for p in module.parameters() if p.requires_grad], unset)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign())


def test_the_rate_is_that_of_an_optimizer_which_it_holds() -> None:
    bench, other = Bench(optimizer=Beside), Bench()
    for step, factor in enumerate((1.0, 3.0, 1.0)):
        applied = bench.apply(gradients(step), rate_factor=factor)
        assert applied.learning_rate == other.apply(gradients(step), rate_factor=factor).learning_rate
    assert bench.state.digest() == other.state.digest()
    assert [group["lr"] for group in bench.rule.optimizer.made.param_groups] == [0.1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("unset", [{}, {"lr": None}])
def test_an_optimizer_without_a_rate_makes_its_steps(unset: dict[str, Any]) -> None:
    bench = Bench(optimizer=lambda module: Rateless(module, unset))
    before = bench.state.digest()
    assert [bench.apply(gradients(0), rate_factor=factor).learning_rate for factor in (1.0, 2.0)] == [None, None]
    assert bench.state.digest() != before


@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)])
@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("how", ["step", "hook"])
def test_a_rate_that_the_optimizer_sets_itself_is_kept_in_a_grown_batch(rate: Any, factor: float, how: str) -> None:
    def adapt(made: torch.optim.Optimizer, *_: Any) -> None:
        for group in made.param_groups:
            group["lr"] = group["lr"] * 0.5

    class Adapting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            adapt(self)

    def make(module: nn.Module) -> torch.optim.Optimizer:
        of = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if how == "step":
            return Adapting(of, lr=rate)
        made = torch.optim.SGD(of, lr=rate)
        made.register_step_post_hook(adapt)
        return made

    bench = Bench(optimizer=make)
    for step in range(3):
        bench.apply(gradients(step), rate_factor=factor)
    assert float(bench.rule.optimizer.param_groups[0]["lr"]) == 0.125
    assert float(rate) == 1.0


def test_the_norm_is_that_of_the_mean_gradient_before_clipping() -> None:
    for clip in (None, 0.1):
        for rare in (True, False):
            sums = gradients(0, rare=rare)
            expected = math.sqrt(sum(float((value / 8).square().sum()) for value in sums.values()))
            assert Bench(gradient_clip_val=clip).apply(sums).gradient_norm == pytest.approx(expected, rel=1e-2)


def test_buffers_move_by_the_mean_change_and_by_the_maximum() -> None:
    bench = Bench()
    before = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
    change = torch.arange(5.0)
    applied = bench.apply(
        gradients(0), buffers={"norm.running_mean": change, "norm.num_batches_tracked": torch.tensor(4)}
    )
    assert torch.equal(bench.model.norm.running_mean, before["norm.running_mean"] + change / 8)
    assert torch.equal(bench.model.norm.running_var, before["norm.running_var"])
    assert int(bench.model.norm.num_batches_tracked) == 4
    roles = [bench.layout.groups[bench.layout.buckets[number].group].role for number in applied.changed]
    assert set(roles) == {"grad", "mean", "max"}
    assert torch.equal(bench.model.frozen, before["frozen"])


def test_only_what_changed_is_sent() -> None:
    bench = Bench()
    changed = bench.apply(gradients(0)).changed
    roles = [bench.layout.groups[bucket.group].role for bucket in bench.layout.result_buckets]
    assert changed == tuple(number for number, role in enumerate(roles) if role == "grad")


class Careless(torch.optim.Optimizer):
    """What one may do in a plain loop: keep gradients, in several places, and give parameters other memory."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.last: list[Any] = []
        self.itself = {"and so on": [self]}
        self.sparse = torch.eye(3).to_sparse()
        self.seen: tuple[Any, ...] = ()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for number, p in enumerate(trained):
            state = self.state[p]
            direction = (
                p.grad.float() + 0.5 * state.get("grad", torch.zeros(())) + 0.25 * sum(self.seen, torch.zeros(()))
            )
            if number % 2:
                p.data = p.data - (0.05 * direction).to(p.dtype)
            else:
                p.data.sub_((0.05 * direction).to(p.dtype))
            state["grad"] = p.grad
        self.last = [{"grads": [p.grad for p in trained]}]
        self.seen = (trained[0].grad.flatten()[0], len(trained))


def test_an_optimizer_may_keep_gradients_and_give_parameters_other_memory() -> None:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        return Careless([p for p in module.parameters() if p.requires_grad])

    bench = Bench(optimizer=make, gradient_clip_val=2.0)
    for step in range(6):
        bench.apply(gradients(step, rare=step % 2 == 0))
        pack_state(bench.rule.state_dict())
    assert bench.state.digest() == named_digest(plain(make, None, 2.0, 6))


class SAM(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "it requires a closure"


def test_an_optimizer_that_turns_out_to_need_a_closure_is_told_so() -> None:
    bench = Bench(optimizer=lambda module: SAM([p for p in module.parameters() if p.requires_grad], lr=0.1))
    with pytest.raises(
        JobError, match=r"SAM\.step\(\) without a closure raised AssertionError: it requires a closure .*; if it"
    ):
        bench.apply(gradients(0))


class Lookahead(torch.optim.SGD):
    """Keeps what no ``state_dict`` has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.k, self.period, self.names = 0, 5, ["a", "b"]
        self.slow = {number: p.detach().clone() for number, p in enumerate(self.param_groups[0]["params"])}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.k += 1
        for number, p in enumerate(self.param_groups[0]["params"]):
            self.slow[number].lerp_(p.detach(), 0.5)


class Holds(torch.optim.SGD):
    """Keeps it in objects and modules of its own; it has the model's, too, and others' that do not change."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.average, self.still = nn.ParameterList(p.detach().clone() for p in self.parameters), nn.Linear(2, 2)
        self.model = {"of": nn.ParameterList(self.parameters)}
        self.noted, self.fixed = SimpleNamespace(steps=[0]), SimpleNamespace(steps=[0])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.noted.steps[0] += 1
        with torch.no_grad():
            for mine, p in zip(self.average, self.parameters, strict=True):
                mine.lerp_(p, 0.5)


class Counts(torch.optim.SGD):
    """Keeps it where it is saved."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


class Sees(Lookahead):
    """Sees to one of them itself."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "k": self.k}


@pytest.mark.parametrize(
    ("make", "beside"),
    [
        (Lookahead, ["k", "slow"]),
        (Sees, ["slow"]),
        (Holds, ["average", "noted"]),
        (partial(Counts, lr=0.1), []),
        (partial(torch.optim.AdamW, lr=0.1), []),
    ],
    ids=["beside", "its own state_dict", "held", "saved", "torch's"],
)
def test_what_an_optimizer_keeps_where_no_checkpoint_has_it_is_known(make: Any, beside: list[str]) -> None:
    bench = Bench(optimizer=lambda module: make([p for p in module.parameters() if p.requires_grad]))
    assert bench.rule.kept_beside() == []
    bench.apply(gradients(0))
    bench.apply(gradients(1))
    assert bench.rule.kept_beside() == beside


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_that_is_not_finite_changes_nothing(poison: float, clip: float | None) -> None:
    bench = Bench(optimizer=grouped, scheduler=cosine, gradient_clip_val=clip)
    bench.apply(gradients(0))
    before, state = bench.state.digest(), pack_state(bench.rule.state_dict())[0]
    sums = gradients(1)
    sums["body.bias"][2] = poison
    applied = bench.apply(sums, buffers={"norm.running_mean": torch.ones(5)})
    assert (applied.skipped, applied.changed, math.isfinite(applied.gradient_norm)) == (True, (), False)
    assert (bench.state.digest(), pack_state(bench.rule.state_dict())[0]) == (before, state)
    assert all(parameter.grad is None for parameter in bench.model.parameters())


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("size", [1e20, 3e38])
def test_a_gradient_whose_squares_are_beyond_float32_is_finite(size: float, clip: float | None) -> None:
    bench = Bench(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-2), gradient_clip_val=clip)
    before = {name: tensor.detach().clone().double() for name, tensor in bench.model.named_parameters()}
    sums = {name: gradient.sign() * size for name, gradient in gradients(0).items()}
    norm = math.sqrt(sum(value.numel() for value in sums.values())) * size
    applied = bench.apply(sums, samples=1)
    assert not applied.skipped
    assert applied.gradient_norm == pytest.approx(norm, rel=1e-2)
    by = 1e-2 * (1.0 if clip is None else clip / norm)
    for name, tensor in bench.model.named_parameters():
        if name in sums:
            expected = before[name] - by * sums[name].double()
            assert torch.allclose(tensor.double(), expected, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_that_is_finite_in_float16_though_its_norm_is_not(clip: float | None) -> None:
    """That is clipped; one that is not finite there skips the step."""
    model = nn.Linear(8, 8, bias=False).half()
    layout = Layout.of(model)
    state = FlatState(layout)
    state.copy_from(model)
    state.adopt(model)
    rule = SyncRule(list(model.parameters()), layout, state, torch.optim.SGD(model.parameters(), lr=1e-3), clip=clip)
    root, before = ResultVector(layout), model.weight.detach().clone()
    for size, skips in ((6e4, False), (7e4, True)):
        root.buckets[0].fill_(size)
        applied = rule.apply(root, [True], 1, set())
        assert applied.skipped == skips
        assert applied.gradient_norm == pytest.approx(8 * size)
        expected = before - (60.0 if clip is None else 1e-3 / 8)
        assert torch.allclose(model.weight, expected, rtol=1e-2)


def test_fp16_scales_backs_off_and_grows() -> None:
    bench, twin = Bench(precision="fp16"), Bench()
    first = LossScale.of_sums(job().batch_size).value
    assert (bench.rule.loss_scale, twin.rule.loss_scale) == (first, 1.0)
    scaled = {name: value * first for name, value in gradients(0).items()}
    assert not bench.apply(scaled).skipped
    twin.apply(gradients(0))
    assert bench.state.digest() == twin.state.digest()  # a power of two costs no bit
    assert bench.apply({name: value * math.inf for name, value in scaled.items()}).skipped
    assert (bench.rule.loss_scale, bench.state.digest()) == (first / 2, twin.state.digest())
    assert bench.rule.scale is not None
    bench.rule.scale.growth_interval = 2
    for _ in range(2):
        bench.apply({name: value / 2 for name, value in scaled.items()})
    assert bench.rule.loss_scale == first


def test_the_first_scale_is_a_plain_loops_of_the_mean() -> None:
    """A loss of so many samples is their sum: scaled as a mean is, it overflows no sooner."""
    found = [(count, LossScale.of_sums(count).value * count) for count in (1, 2, 3, 64, 100, 256)]
    assert found == [(1, 65536), (2, 65536), (3, 49152), (64, 65536), (100, 51200), (256, 65536)]


def test_the_scale_stays_within_bounds() -> None:
    scale = LossScale(growth_interval=1)
    for _ in range(100):
        scale.update(finite=True)
    assert scale.value == 2.0**24
    for _ in range(100):
        scale.update(finite=False)
    assert scale.value == 2.0**-24
    scale = LossScale(growth_interval=2)
    for finite in (True, False, True):
        scale.update(finite=finite)
    assert (scale.value, scale.good_steps) == (32768.0, 1)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_state_goes_round(precision: str) -> None:
    settings: dict[str, Any] = {"optimizer": grouped, "scheduler": cosine, "precision": precision}
    first, second = Bench(**settings), Bench(**settings)
    for step in range(3):
        first.apply(gradients(step))
    skeleton, tensors = pack_state(first.rule.state_dict())
    second.state.copy_groups(first.state)  # parameters first, as a resume does
    second.rule.load_state_dict(unpack_state(skeleton, {name: tensor.clone() for name, tensor in tensors.items()}))
    for bench in (first, second):
        bench.apply({name: value * bench.rule.loss_scale for name, value in gradients(9).items()})
    assert first.state.digest() == second.state.digest()
    assert first.rule.loss_scale == second.rule.loss_scale


class Several(torch.optim.Optimizer):
    """Makes its steps by others, whose groups are its own as well, so that a schedule moves theirs."""

    def __init__(self, *several: torch.optim.Optimizer) -> None:
        self.several = {"of each": list(several)}
        super().__init__([group for one in several for group in one.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.several["of each"]:
            one.step()


class Slowly(torch.optim.Optimizer):
    """Has another's list of groups (Zhang et al. 2019); ``state`` is its own: the slow weights."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__([{"params": group["params"]} for group in base.param_groups], {"lr": 1.0})
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            if "slow" not in state:
                state["slow"], state["made"] = parameter.detach().clone(), 0
            state["made"] += 1
            if state["made"] % 2 == 0:
                with torch.no_grad():
                    state["slow"].add_(parameter - state["slow"], alpha=0.5)
                    parameter.copy_(state["slow"])


class Saving(Slowly):
    """Sees to the other's state itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"own": super().state_dict(), "base": self.base.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["own"])
        self.base.load_state_dict(state_dict["base"])
        self.param_groups = self.base.param_groups


def several(module: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]
    first = Several(torch.optim.Adam(others[1:], lr=0.02), torch.optim.SGD(others[:1], lr=0.1, momentum=0.9))
    return Several(torch.optim.RMSprop(matrices, lr=0.01, momentum=0.5), first)


def lookahead(module: nn.Module) -> torch.optim.Optimizer:
    return Slowly(grouped(module))


def saving(module: nn.Module) -> torch.optim.Optimizer:
    return Saving(grouped(module))


@pytest.mark.parametrize("schedule", [None, cosine])
@pytest.mark.parametrize("make", [several, lookahead, saving])
def test_the_state_of_optimizers_that_one_holds_goes_round(make: Make, schedule: Any) -> None:
    """None of theirs is in its own ``state_dict``, and what it shares with them stays shared."""
    settings: dict[str, Any] = {"optimizer": make, "scheduler": schedule}
    before, after = Bench(**settings), Bench(**settings)
    for step in range(3):
        before.apply(gradients(step, rare=step % 2 == 0))
    skeleton, tensors = pack_state(before.rule.state_dict())
    after.state.copy_groups(before.state)
    after.rule.load_state_dict(unpack_state(skeleton, {name: tensor.clone() for name, tensor in tensors.items()}))
    if after.rule.on_device is not None:
        after.rule.on_device.refresh()
    for step in range(3, 8):
        after.apply(gradients(step, rare=step % 2 == 0))
    assert after.state.digest() == named_digest(plain(make, schedule, None, 8))


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        ({"optimizer": several}, "optimizers that"),
        ({"scheduler": cosine}, "scheduler"),
        ({"precision": "fp16"}, "fp16"),
        ({"optimizer": grouped}, "group"),
    ],
)
def test_a_state_of_another_job_is_refused(mine: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Bench(**mine).rule.load_state_dict(Bench().rule.state_dict())


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def foreign(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*momentum(module).param_groups[0]["params"], nn.Parameter(torch.zeros(1))], lr=0.1)


class HoldsFused(torch.optim.Optimizer):
    """Makes its steps by another."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.one = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1, fused=True)

    def step(self, closure: Any = None) -> None:
        self.one.step()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": lambda module: torch.optim.LBFGS(module.parameters())}, "LBFGS"),
        ({"optimizer": lambda module: 3}, "returned int"),
        ({"optimizer": foreign}, "not the model's"),
        ({"optimizer": lambda module: torch.optim.SGD(module.parameters(), fused=True)}, "fused SGD.*leave out fused"),
        ({"optimizer": lambda module: HoldsFused(module.parameters())}, "fused SGD.*leave out fused"),
        ({"scheduler": plateau}, "ReduceLROnPlateau"),
        ({"scheduler": lambda optimizer: "cosine"}, "returned str"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        Bench(**change)


def test_a_fused_optimizer_is_for_float32(device: torch.device | None) -> None:
    """Torch's SGD is wrong with others."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    bench = Bench(optimizer=lambda model: sgd(model.parameters()))
    assert bench.rule.fused_form == ""
    Bench(optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True))
    model = nn.Linear(3, 3)
    layout = Layout.of(model)
    state = FlatState(layout)
    state.adopt(model)
    rule = SyncRule(list(model.parameters()), layout, state, sgd(model.parameters()))
    assert rule.fused_form == "SGD(..., fused=True)"


def test_an_optimizer_function_may_make_a_schedule_too() -> None:
    """A schedule replaces the optimizer's ``step`` by a wrapper, which was taken for one that needs a closure."""

    def make(module: nn.Module) -> torch.optim.Optimizer:
        optimizer = momentum(module)
        torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return optimizer

    Bench(optimizer=make)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    model = Model().requires_grad_(False)
    layout = Layout.of(model)
    with pytest.raises(JobError, match="no trainable parameter"):
        SyncRule.of(job(), model, layout, FlatState(layout))


@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
def test_state_of_half_precision_parameters_keeps_its_dtype(name: str) -> None:
    """torch casts all of it to the parameter's dtype: a float32 product of momenta would be rounded at each restart."""
    make: Any = getattr(torch.optim, name)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = make([p for p in model.parameters() if p.requires_grad], lr=0.01)
        return made

    first, second = Bench(optimizer=optimizer), Bench(optimizer=optimizer)
    for step in range(3):
        first.apply(gradients(step))
    skeleton, tensors = pack_state(first.rule.state_dict())
    second.rule.load_state_dict(unpack_state(skeleton, {key: tensor.clone() for key, tensor in tensors.items()}))
    second.state.copy_from(first.model)
    for state, restored in zip(*(bench.rule.optimizer.state.values() for bench in (first, second)), strict=True):
        for key, value in state.items():
            assert restored[key].dtype == value.dtype
            assert torch.equal(restored[key], value)


class Own(torch.optim.SGD):
    """Somebody's own optimizer, which draws from ``first`` on."""

    def __init__(self, parameters: Any, first: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.first, self.steps = first, 0

    def step(self, closure: Any = None) -> Any:
        super().step()
        self.steps += 1
        if self.steps > self.first:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(torch.randn_like(parameter) + random.random())


@pytest.mark.parametrize("first", [0, 60, math.inf])
def test_an_optimizer_that_has_not_drawn_in_64_steps_waits_for_nobody(first: float) -> None:
    def bench() -> Bench:
        return Bench(optimizer=lambda model: Own([p for p in model.parameters() if p.requires_grad], first))

    digests = set()
    for _ in range(2):
        made = bench()
        for step in range(70):
            assert made.rule.may_draw == (step < 64 or first < 64)
            random.random()  # somebody else's
            torch.rand(())
            made.apply(gradients(step))
        digests.add(made.state.digest())
    assert len(digests) == 1


@pytest.mark.parametrize("first", [0, 3, 30, math.inf])
def test_a_resume_knows_whether_the_optimizer_has_drawn(first: float) -> None:
    """It draws in one step of a hundred, or never: what was found holds, and so does how long it was looked for."""

    class Seldom(Own):
        def step(self, closure: Any = None) -> Any:
            drew = self.steps % 100 == self.first
            self.steps, self.first = self.steps + 1, -1 if drew else math.inf
            super().step()
            self.steps, self.first = self.steps - 1, first

    def bench() -> Bench:
        return Bench(optimizer=lambda model: Seldom([p for p in model.parameters() if p.requires_grad], first))

    def go_on(made: Bench, steps: range) -> str:
        for step in steps:
            torch.rand(())  # somebody else's
            made.apply(gradients(step), step=step)
        return made.state.digest()

    for resumed_at in (2, 20, 70):
        whole, broken, other = bench(), bench(), bench()
        go_on(whole, range(resumed_at))
        go_on(broken, range(resumed_at))
        for mine, theirs in zip(other.state.groups, broken.state.groups, strict=True):
            mine.copy_(theirs)
        other.rule.load_state_dict(broken.rule.state_dict())
        other.rule.optimizer.steps = resumed_at  # type: ignore[attr-defined]
        assert other.rule.may_draw == whole.rule.may_draw
        assert go_on(other, range(resumed_at, 140)) == go_on(whole, range(resumed_at, 140))
        assert other.rule.may_draw == whole.rule.may_draw == (first < 64)


def test_torchs_own_wait_for_nobody_and_hooks_count_as_somebodys_own() -> None:
    assert not Bench().rule.may_draw
    assert not Bench(
        scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.9**step)
    ).rule.may_draw

    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        made = momentum(model)
        made.register_step_post_hook(lambda *_: None)
        return made

    assert Bench(optimizer=hooked).rule.may_draw


def freezes(model: nn.Module) -> None:
    model[0].requires_grad_(False)  # type: ignore[index]


def unfreezes(model: nn.Module) -> None:
    model[1].weight.requires_grad_(True)  # type: ignore[index]


def replaces(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def moves(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data.clone()  # type: ignore[index]


def converts(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def adds(model: nn.Module) -> None:
    model.teacher = nn.Linear(2, 2)


def adds_buffer(model: nn.Module) -> None:
    model[0].register_buffer("mask", torch.ones(2))  # type: ignore[index]


def removes(model: nn.Module) -> None:
    del model[2]  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", ["optimizer", "scheduler"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (freezes, "freezes '0.weight'"), (unfreezes, "unfreezes '1.weight'"), (replaces, "in the place of '0.weight'"),
        (moves, "in the place of '0.weight'"), (converts, "in the place of '0.weight'"),
        (adds, "adds 'teacher.weight' to"), (adds_buffer, "adds '0.mask' to"), (removes, "takes '2.weight' from"),
    ],
)  # fmt: skip
def test_what_makes_the_optimizer_leaves_the_model_as_workers_make_it(
    part: str, change: Callable[[nn.Module], None], said: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    model[1].weight.requires_grad_(False)
    layout = Layout.of(model)
    state = FlatState(layout)
    state.copy_from(model)
    state.adopt(model)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(list(model.parameters()), 0.1)
        if part == "optimizer":
            change(model)
        return made

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        change(model)
        return torch.optim.lr_scheduler.StepLR(optimizer, 3)

    job = Job(
        model=lambda: model, dataset=TensorDataset(torch.zeros(4, 2)), step=lambda m, batch: m(batch[0]).sum(),
        optimizer=optimizer, scheduler=scheduler if part == "scheduler" else None, batch_size=2, max_steps=1,
    )  # fmt: skip
    with pytest.raises(JobError, match=f"job {part}: its function .*{said}.*; do that in model="):
        SyncRule.of(job, model, layout, state)


def test_what_makes_the_optimizer_may_give_other_values_and_memory_of_its_own() -> None:
    model = nn.Linear(2, 1)
    layout = Layout.of(model)
    state = FlatState(layout)
    state.copy_from(model)
    state.adopt(model)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        nn.init.ones_(model.weight)  # type: ignore[arg-type]
        model.load_state_dict({"weight": torch.full((1, 2), 2.0), "bias": torch.zeros(1)})
        model.register_buffer("seen", torch.zeros(1), persistent=False)
        return torch.optim.SGD(model.parameters(), 0.1)

    job = Job(
        model=lambda: model, dataset=TensorDataset(torch.zeros(4, 2)), step=lambda m, batch: m(batch[0]).sum(),
        optimizer=optimizer, batch_size=2, max_steps=1,
    )  # fmt: skip
    SyncRule.of(job, model, layout, state)
    assert state.views[0].tolist() == [[2.0, 2.0]]
