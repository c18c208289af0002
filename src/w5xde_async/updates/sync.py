"""The synchronous rule: every leaf of a step counted once, one optimizer step on their mean gradient.

g = root / sum(n); clipped by global norm if asked; then the job's optimizer and scheduler. All promises hold: the same
bits as one process that does the same leaves in tree order, whatever the workers.

Before anything is applied the gradient is checked to be finite. A step that is not is skipped: parameters, buffers,
optimizer and scheduler stay as they are and, under fp16, the loss scale is halved (dynamic loss scaling: Micikevicius
et al. 2018, section 3.2; grown after ``growth_interval`` good steps, as torch.amp.GradScaler does). Elements of buffers
whose new value is not plausible (``updates.buffers``) stay as they are.

What an optimizer or a scheduler of somebody's own draws (noise, stochastic rounding) is seeded by the job's seed and
the number of the step, as what leaves draw is.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from w5xde_async.errors import JobError, in_one_line
from w5xde_async.job import Job, groups_in, has_rate, made_by, optimizers_in, parts_of, rate_of, trained_otherwise
from w5xde_async.params.flat import FlatState, ResultVector, l2_norm, state_of
from w5xde_async.params.layout import Layout, named_state
from w5xde_async.params.reducer import Addends, add_into
from w5xde_async.plan.sampler import seed_for
from w5xde_async.randomness import has_drawn, random_state, seed_all
from w5xde_async.updates.buffers import BufferState
from w5xde_async.updates.flat_step import FlatStep
from w5xde_async.updates.fused_step import FusedStep
from w5xde_async.updates.on_device import OnDevice
from w5xde_async.updates.own_code import has_hooks, is_foreign
from w5xde_async.updates.untrained import Untrained
from w5xde_async.users_code import users_code

_STEADY_STEPS = 64
_MOST_TOLD = 64  # things in a container that are looked at
# Norms that torch's clipping can find, in each type, and gradients of which have no element that it lacks.
_MOST_NORMS = {torch.float32: 1e19, torch.bfloat16: 1e19, torch.float16: 6e4}
_HALF = (torch.float16, torch.bfloat16)
# In what is raised by a function that takes, or passes on, something else than it should.
_MISWRITTEN = (
    "positional argument", "can only optimize Tensors", "should be an iterable of Tensors", "is not an Optimizer",
)  # fmt: skip
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_ELEMENTWISE = (
    *_FUSED, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What one step did. ``changed`` lists the buckets whose parameters or buffers have new values."""

    skipped: bool
    gradient_norm: float
    learning_rate: float | None  # no group has one
    changed: tuple[int, ...]


@dataclass(slots=True)
class LossScale:
    """Dynamic loss scale: halved at a non-finite step, doubled after ``growth_interval`` good ones in a row."""

    value: float = 65536.0
    growth_interval: int = 2000
    good_steps: int = 0

    @classmethod
    def of_sums(cls, samples: int) -> LossScale:
        """For a loss that is a sum over so many samples: with it, their mean is scaled by 65536 at most, as in a plain
        loop (``torch.amp.GradScaler``). What is beyond that overflows in the first steps, which are skipped."""
        return cls(65536.0 / (1 << (samples - 1).bit_length()))

    def update(self, *, finite: bool) -> None:
        if not finite:
            self.value = max(self.value / 2, 2.0**-24)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value = min(self.value * 2, 2.0**24)
            self.good_steps = 0


class SchedulerFailed(Exception):
    """The scheduler raised ``error`` before a step: nothing of that step is applied, and the state is whole. ``hint``:
    what can be done about it, if that is known."""

    def __init__(self, error: Exception, hint: str = "") -> None:
        self.error, self.hint = error, hint
        super().__init__(str(error))


class _Divided(NamedTuple):
    """A bucket's sum, where it lies as one, what it was divided by, and the square of the quotient's norm."""

    summed: Tensor | None
    divisor: float
    square: float


def _divided(into: Tensor, addends: Addends, divisor: float) -> _Divided:
    """Their sum by ``divisor``, in ``into``: each operation finds in the cache what the one before has left there."""
    if len(addends) == 1:
        torch.div(addends[0], divisor, out=into)
    else:
        add_into(into, addends).div_(divisor)
    return _Divided(addends[0] if len(addends) == 1 else None, divisor, l2_norm(into) ** 2)


class SyncRule:
    """Owns optimizer and scheduler over a model whose tensors are views of ``state``; one thread at a time.

    A scheduler that raises after an optimizer step is put back to where it was, and stepped again before the next one.
    So the state is whole after every step, and one that raises at a run's end, as OneCycleLR does, ends no run.
    """

    name = "sync"

    def __init__(
        self,
        tensors: Sequence[Tensor],
        layout: Layout,
        state: FlatState,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        clip: float | None = None,
        scale: LossScale | None = None,
        across: Callable[[float], float] | None = None,
        on_device: OnDevice | None = None,
        seed: int = 0,
        untrained: Untrained | None = None,
    ) -> None:
        """``tensors``: the model's, in layout order. ``clip``: the largest global norm of a gradient. ``scheduler`` is
        stepped after every optimizer step. ``across``: where ``layout`` is a shard, the sum over all of them.
        ``on_device``: where the optimizer's parameters are, if not in ``state``. ``seed``: the job's. ``untrained``:
        what hooks of the optimizer or a scheduler of somebody's own may change, if it is to be seen.
        """
        self.on_device = on_device
        self.layout, self._buffers, self._across = layout, BufferState(layout, state), across
        self._parameters = [(index, tensors[index]) for index in layout.trainable]
        self.optimizer, self.scheduler, self.clip, self.scale = optimizer, scheduler, clip, scale
        self._is_foreign = is_foreign(optimizer)
        self._held = optimizers_in(optimizer)
        self._places = [parameter.data for _, parameter in self._parameters] if self._is_foreign else []
        # Whether a step calls code that is not torch's, whether that has drawn, and how many steps have been made.
        self._own_code = self._is_foreign or has_hooks(optimizer) or any(map(is_foreign, parts_of(scheduler)))
        self._untrained = untrained if self._own_code else None
        self._drew, self._steady, self._seed = False, 0, seed
        self._beside = _beside_its_state(optimizer, tensors) if self._is_foreign else {}
        apart = self.is_elementwise and on_device is None
        # What makes its steps sooner than the optimizer itself.
        self._flat: FlatStep | FusedStep | None = None
        if apart and FusedStep.suits(optimizer, self._parameters):
            self._flat = FusedStep(cast("torch.optim.Adam", optimizer), self._parameters)
        elif apart:
            self._flat = FlatStep(optimizer, layout, state, self._parameters)
        self._most_norm = min((_MOST_NORMS.get(p.dtype, math.inf) for _, p in self._parameters), default=math.inf)
        self._has_stepped = False
        self._trained = [b.index for b in layout.result_buckets if layout.groups[b.group].role == "grad"]  # buckets
        self._tensors = tensors
        self._ahead: ResultVector | None = None  # where gradients are divided that are expected
        self._expected: dict[int, _Divided] = {}  # by bucket
        self._behind = False  # the scheduler has not made the step that belongs to the last optimizer step

    @classmethod
    def of(
        cls, job: Job, model: nn.Module, layout: Layout, state: FlatState, device: torch.device | None = None
    ) -> SyncRule:
        """With the job's own optimizer and scheduler, which step on ``device`` if not in ``state``. Raises JobError."""
        if not any(layout.entries[index].numel for index in layout.trainable):
            lacking = f"it has no trainable parameter{' with elements' if layout.trainable else ''}"
            raise JobError("model", lacking, "set requires_grad on what is to be trained")
        on_device = None if device is None else OnDevice(model, layout, state, device)
        model = model if on_device is None else on_device.model
        with random_state():
            seed_all(seed_for("update", job.seed, "begin"))
            begun = _begun(model)
            optimizer = _optimizer(job, model, begun)
            scheduler = _scheduler(job, optimizer)
            if scheduler is not None:
                _check_unchanged("scheduler", model, begun)
        return cls(
            list(state_of(model, layout)), layout, state, optimizer, scheduler=scheduler,
            clip=job.gradient_clip_val, on_device=on_device,
            scale=LossScale.of_sums(job.batch_size) if job.precision == "fp16" else None,
            seed=job.seed, untrained=Untrained(model, layout, state, list(state_of(model, layout))),
        )  # fmt: skip

    @property
    def loss_scale(self) -> float:
        """What workers multiply losses with at the current version."""
        return 1.0 if self.scale is None else self.scale.value

    def kept_beside(self) -> list[str]:
        """Attributes of an optimizer of somebody's own that its steps have changed and that are not in its state, so
        that no checkpoint has them: counters, copies of the weights."""
        if not self._is_foreign:
            return []
        now = _beside_its_state(self.optimizer, self._tensors)
        changed = sorted(name for name, value in now.items() if self._beside.get(name) != value)
        saved: Collection[object] = self.optimizer.state_dict().keys() if changed else ()  # its own may have more
        return [name for name in changed if not {name, name.strip("_")} & {*saved}]

    @property
    def has_own_code(self) -> bool:
        """Whether an update calls code that is not torch's: a hook, an optimizer or a scheduler of one's own."""
        return self._own_code

    @property
    def is_elementwise(self) -> bool:
        """Whether each value's update is of that value alone, and so has the same bits with any number of threads."""
        return type(self.optimizer) in _ELEMENTWISE and not self._own_code

    @property
    def fused_form(self) -> str:
        """How the optimizer is written to make a step in one pass over memory; "" where that is not open to choice.

        On the CPU torch's own optimizers make a dozen passes over memory, unless they are told otherwise, flat steps
        too. A fused step takes a fourth of their time, and has other last bits. Where hooks are called, it may be
        these that take long.
        """
        made = self.optimizer
        if self.on_device is not None or self._untrained is not None:
            return ""
        if any(parameter.dtype is not torch.float32 for _, parameter in self._parameters):
            return ""  # of other types not every fused step is right: ``_check_fused``
        open_to_choice = all(group.get("fused", False) is None and not group["foreach"] for group in made.param_groups)
        return f"{type(made).__name__}(..., fused=True)" if type(made) in _FUSED and open_to_choice else ""

    def apply(
        self, root: ResultVector, present: Sequence[bool], samples: int, untouched: Collection[int], *,
        step: int = 0, addends: Sequence[Addends] | None = None, rate_factor: float = 1.0, schedules: bool = True,
        merge_buffers: Callable[[], Iterable[int]] = lambda: (),
    ) -> Applied:  # fmt: skip
        """Apply one step's sum. ``present`` per result bucket; ``untouched`` entries got no gradient from any leaf.

        ``step``: which it is, from 0 on; what is drawn is seeded with it.
        ``addends``: what each bucket is the sum of, where that is not ``root`` for all of them; gradients' are only
        read.
        ``rate_factor`` multiplies every group's learning rate in this one optimizer step; the scheduler never sees it,
        nor a step that does not count in it (``schedules``). ``merge_buffers`` changes buffers that are not in
        ``root``, before the optimizer steps, unless the step is skipped; it says in which buckets. Raises
        SchedulerFailed.
        """
        self.prepare()
        rate = rate_of(self.optimizer)
        learning_rate = None if rate is None else rate * rate_factor
        divisor, lie = samples * self.loss_scale, addends or [(piece,) for piece in root.buckets]
        if self.on_device is None:
            gradients = self._ahead if self._ahead is not None and self._expected else root
            squares = self._divide_all(gradients, lie, present, divisor)
        else:
            both = zip(root.buckets, lie, strict=True)
            sums = [those[0] if len(those) == 1 else add_into(own, those) for own, those in both]
            gradients, squares = self.on_device.vector, self.on_device.divide(sums, present, divisor)
        if self._flat is not None and has_hooks(self.optimizer):
            # Since a little while: those that it had in the beginning are code of its own. They hear of its own steps.
            self._flat.forget()
            self._flat = None
        flat = self._flat is not None and self._flat.ready(untouched)
        for index, parameter in self._parameters if self.clip is not None or not flat else ():
            gradient = gradients.gradients[index]
            assert gradient is not None
            if index in untouched:
                parameter.grad = None
            elif self._is_foreign:  # torch's own keep no gradient, whose memory is used again; others may
                parameter.grad = gradient.to(parameter.dtype, copy=True)
            else:
                parameter.grad = gradient if parameter.dtype is torch.float32 else gradient.to(parameter.dtype)
        norm = self._norm(squares)
        finite = math.isfinite(norm) and (flat or self._fits(norm))
        if self.scale is not None:
            self.scale.update(finite=finite)
        if not finite:
            self._forget_gradients()
            return Applied(skipped=True, gradient_norm=norm, learning_rate=learning_rate, changed=())
        changed = list(self._trained)
        for bucket in self._buffers.buckets:  # as in a plain loop: forward has changed them when the optimizer steps
            if present[bucket.index]:
                self._buffers.write(bucket, root.buckets[bucket.index], samples)
                changed.append(bucket.index)
        changed.extend(merge_buffers())
        if self._untrained is not None:
            self._untrained.look()
        make = partial(self._flat.step, gradients) if self._flat is not None and flat else self.optimizer.step
        if self.may_draw:
            with random_state(), torch.enable_grad():
                self._seed_draws(step)
                with random_state() as seeded:
                    self._step(make, rate_factor, schedules)
                    self._drew |= has_drawn(self._device) or not seeded.unmoved()
            self._steady += 1
        elif torch.is_grad_enabled():
            self._step(make, rate_factor, schedules)
        else:
            with torch.enable_grad():  # as in a plain loop; optimizers switch it off themselves
                self._step(make, rate_factor, schedules)
        if not flat or self.clip is not None:
            self._forget_gradients()
        if self._flat is not None and not flat:
            self._flat.note_own_step()
        if self._untrained is not None:
            changed.extend(index for index in self._untrained.changed() if index not in changed)
        if self.on_device is not None:
            self.on_device.publish(self._trained)
        return Applied(skipped=False, gradient_norm=norm, learning_rate=learning_rate, changed=tuple(changed))

    @torch.no_grad()
    def expect(self, bucket: int, summed: Tensor, samples: int) -> float | None:
        """What is in ``summed`` may become a step's sum: if the next ``apply`` is given this very tensor, it is the
        quotient of what is there now that is applied. The norm of that sum, by way of the quotient; None where it is
        found for all buckets together (``expected_norms``)."""
        if self.on_device is not None:
            self.on_device.bring(bucket, summed)
            return None
        if self._ahead is None:
            self._ahead = ResultVector(self.layout)
        divisor = samples * self.loss_scale
        self._expected[bucket] = known = _divided(self._ahead.buckets[bucket], (summed,), divisor)
        return math.sqrt(known.square) * divisor

    def expected_norms(self, sums: Mapping[int, Tensor]) -> dict[int, float]:
        """The norms, by bucket, of those of ``sums`` that are expected and whose norm ``expect`` did not say."""
        return {} if self.on_device is None else self.on_device.norms(sums)

    def expect_nothing(self) -> None:
        """The next ``apply`` reads all that it is given."""
        self._expected.clear()
        if self.on_device is not None:
            self.on_device.bring_nothing()

    def _divide_all(
        self, gradients: ResultVector, addends: Sequence[Addends], present: Sequence[bool], divisor: float
    ) -> float:
        """Every gradient's sum by ``divisor``; the square of their norm."""
        squares = 0.0
        for bucket in self.layout.result_buckets:
            if self.layout.groups[bucket.group].role == "grad":
                if not present[bucket.index]:
                    gradients.buckets[bucket.index].zero_()
                    continue
                those, known = addends[bucket.index], self._expected.get(bucket.index)
                if known is None or known.divisor != divisor or len(those) > 1 or known.summed is not those[0]:
                    known = _divided(gradients.buckets[bucket.index], those, divisor)
                squares += known.square
        self._expected.clear()
        return squares

    def prepare(self) -> None:
        """What goes before a step: the scheduler makes the step that it has failed to make, and nobody has frozen a
        parameter. Raises SchedulerFailed: nothing has changed."""
        if self._behind:
            try:
                with random_state() if self.may_draw else nullcontext():
                    if self.may_draw:
                        self._seed_draws("catch up")
                    self._schedule()
            except Exception as error:
                raise SchedulerFailed(error, self._lengthened()) from error
            self._behind = False
        if self._own_code:
            self._check_frozen()

    def _lengthened(self) -> str:
        """How a schedule that came out too short (OneCycleLR) is made longer: what the job says now is not asked."""
        if not any("total_steps" in vars(part) for part in parts_of(self.scheduler)):
            return ""
        return "what its scheduler was made with is kept with the run: --override scheduler.total_steps=N changes it"

    @property
    def may_draw(self) -> bool:
        """Whether the next step may draw: code that is not torch's, of which 64 steps have not shown that it does not.
        Such a step waits for whoever draws just now."""
        return self._own_code and (self._drew or self._steady < _STEADY_STEPS)

    @property
    def _device(self) -> torch.device:
        return self._parameters[0][1].device

    def _seed_draws(self, of: int | str) -> None:
        seed_all(seed_for("update", self._seed, of), self._device)

    def _check_frozen(self) -> None:
        """Whether code of somebody's own has frozen a parameter, or the reverse, which nobody would heed. Raises
        SchedulerFailed: nothing has changed."""
        trainable = set(self.layout.trainable)
        for index, (tensor, entry) in enumerate(zip(self._tensors, self.layout.entries, strict=True)):
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad != (index in trainable):
                raise SchedulerFailed(TypeError(trained_otherwise(entry.name, begun=index in trainable)))

    def _schedule(self) -> None:
        """Step the scheduler; where it raises, it and the learning rates are what they were."""
        parts = parts_of(self.scheduler)
        states = [dict(vars(part)) for part in parts]
        groups = [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
            for group in ({**group, "params": None} for group in self.optimizer.param_groups)
        ]
        try:
            with users_code():
                self.scheduler.step()
        except BaseException:
            for part, state in zip(parts, states, strict=True):
                vars(part).clear()
                vars(part).update(state)
            for group, kept in zip(self.optimizer.param_groups, groups, strict=True):
                group.update({**kept, "params": group["params"]})
            raise

    def _step(self, make: Callable[[], object], rate_factor: float, schedules: bool) -> None:
        """``make``: what makes the optimizer's step."""
        try:
            if rate_factor == 1.0:
                make()
            else:
                self._step_at(make, rate_factor)
        except Exception as error:
            if self._has_stepped or not (self._is_foreign and _takes_closure(self.optimizer)):
                raise
            reason = f"{type(self.optimizer).__name__}.step() without a closure raised {in_one_line(error)}"
            hint = "if it evaluates the loss itself, as SAM does, it cannot be used: a step's gradient is computed once"
            raise JobError("optimizer", reason, hint) from error
        self._has_stepped = True
        if self._is_foreign:
            self._take_back()
        if self.scheduler is not None and schedules:
            try:
                self._schedule()
            except Exception:
                self._behind = True

    def _step_at(self, make: Callable[[], object], rate_factor: float) -> None:
        groups = [group for group in groups_in(self.optimizer) if has_rate(group)]
        rates = [group["lr"] for group in groups]
        grown = [rate * rate_factor for rate in rates]  # new tensors where they are some
        before = list(map(float, grown))
        try:
            for group, rate in zip(groups, grown, strict=True):
                group["lr"] = rate
            make()
        finally:
            for group, rate, given in zip(groups, rates, before, strict=True):
                now = group["lr"]  # the optimizer or a hook of it may have set another
                group["lr"] = rate if float(now) == given else now / rate_factor

    @torch.no_grad()
    def _take_back(self) -> None:
        """After a step of an optimizer that is not torch's own, which may have given a parameter other memory
        (``p.data = ...``)."""
        for (_, parameter), place in zip(self._parameters, self._places, strict=True):
            if parameter.data_ptr() != place.data_ptr():
                place.copy_(parameter)
                parameter.data = place

    def _fits(self, norm: float) -> bool:
        """Whether gradients of this norm are still finite in the type of their parameters, whose range may be smaller
        than theirs."""
        return norm < self._most_norm or all(
            parameter.grad is None or bool(torch.isfinite(parameter.grad).all()) for _, parameter in self._parameters
        )

    def _norm(self, squares: float) -> float:
        """The gradient's, whose square is ``squares``; clipped, where that is asked for."""
        norm = math.sqrt(squares if self._across is None else self._across(squares))
        if self.clip is None or not math.isfinite(norm):
            return norm
        if self._across is None and norm < self._most_norm:
            return float(nn.utils.clip_grad_norm_([p for _, p in self._parameters], self.clip))
        # In float64, where it makes next to no difference that shards are added and not parameters.
        factor = min(1.0, self.clip / (norm + 1e-6))  # as ``clip_grad_norm_``
        parts = (factor,) if norm < 2.0**64 else (2.0**-64, factor * 2.0**64)  # float32 may have no number so small
        for _, parameter in self._parameters:
            if parameter.grad is not None:
                for part in parts:
                    parameter.grad.mul_(part)
        return norm

    def _forget_gradients(self) -> None:
        for _, parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything but the parameters: plain containers, numbers and tensors."""
        if self._flat is not None:
            self._flat.settle()
        return {
            "rule": self.name,
            "optimizer": self.optimizer.state_dict(),
            **({"held": {place: held.state_dict() for place, held in self._held.items()}} if self._held else {}),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scale": None if self.scale is None else [self.scale.value, self.scale.good_steps],
            **({"behind": True} if self._behind else {}),
            **({"draws": [self._drew, min(self._steady, _STEADY_STEPS)]} if self._own_code else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``; the parameters are there already. Raises ValueError where it belongs to another
        optimizer or scheduler."""
        if (state["scheduler"] is None) != (self.scheduler is None):
            raise ValueError("the checkpoint and the job do not agree on whether there is a scheduler")
        if (state["scale"] is None) != (self.scale is None):
            raise ValueError("the checkpoint and the job do not agree on fp16 loss scaling")
        if self._flat is not None:
            self._flat.forget()
        if state.get("held", {}).keys() != self._held.keys():
            raise ValueError("the checkpoint and the job do not agree on the optimizers that the optimizer holds")
        for made, saved in [(self.optimizer, state["optimizer"])] + [
            (held, state["held"][place]) for place, held in self._held.items()
        ]:
            _load(made, saved, shares=bool(self._held))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.on_device is not None:
            self.on_device.refresh()
        self._behind = bool(state.get("behind", False))
        drew, steady = state.get("draws", (False, 0))  # older ones lack it
        self._drew, self._steady = bool(drew), int(steady)
        if self.scale is not None:
            self.scale.value, self.scale.good_steps = float(state["scale"][0]), int(state["scale"][1])


def _beside_its_state(optimizer: torch.optim.Optimizer, model: Sequence[Tensor]) -> dict[str, Any]:
    """By attribute that torch's own optimizers have not: what tells whether it has changed. Of others than numbers,
    tensors, modules, objects and containers of those it is not known. The ``model``'s tensors, and the state of
    optimizers that this one holds, are saved."""
    own = vars(torch.optim.Optimizer([torch.zeros(1)], {})).keys()
    saved = {id(tensor) for tensor in (*model, *(p for group in optimizer.param_groups for p in group["params"]))}
    told = {
        name: _told(value, saved) for name, value in vars(optimizer).items() if name not in own and name[:4] != "_opt"
    }
    return {name: value for name, value in told.items() if value is not None}


def _told(value: Any, saved: Collection[int], depth: int = 3) -> Any:
    if isinstance(value, Tensor):
        return None if id(value) in saved else (id(value), value._version)
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.optim.Optimizer | type | types.ModuleType) or inspect.isroutine(value) or not depth:
        return None
    parts: Iterable[Any]
    if isinstance(value, nn.Module):
        parts = [*value.parameters(), *value.buffers()]
    elif isinstance(value, list | tuple | set | dict):
        parts = value.values() if isinstance(value, dict) else value
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    else:
        return None
    told = tuple(_told(part, saved, depth - 1) for part in islice(parts, _MOST_TOLD))
    return (len(value), told) if isinstance(value, list | tuple | set | dict) else told


def _load(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], *, shares: bool) -> None:
    """Give ``optimizer`` a saved state. ``shares``: its groups or its state may be another's, too, who is to see the
    loaded ones; torch puts new ones in their place."""
    lists, state = optimizer.param_groups, optimizer.state
    groups = list(lists)
    optimizer.load_state_dict(dict(saved))
    if saved.keys() >= {"state", "param_groups"}:  # somebody's own may have another form
        _keep_dtypes(optimizer, saved)
    if shares and type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        state.clear()
        state.update(optimizer.state)
        optimizer.param_groups, optimizer.state = lists, state


def _keep_dtypes(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give the state of ``optimizer`` the dtypes back that it was ``saved`` with.

    ``load_state_dict`` casts every tensor but ``step`` to its parameter's dtype. A float32 scalar (``mu_product`` of
    NAdam, ``eta`` and ``mu`` of ASGD) or a float32 copy of a bfloat16 parameter would be rounded at every restart.
    """
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        if index in saved["state"]:
            optimizer.state[parameter] = _as_saved(optimizer.state[parameter], saved["state"][index])


def _as_saved(loaded: Any, saved: Any) -> Any:
    """``loaded``, with a copy of ``saved`` in place of each tensor whose dtype differs."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor) and loaded.dtype != saved.dtype:
        return saved.detach().to(loaded.device, copy=True)
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        return {key: _as_saved(value, saved.get(key)) for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and isinstance(saved, (list, tuple)) and len(loaded) == len(saved):
        return type(loaded)(map(_as_saved, loaded, saved))
    return loaded


class _Begun(NamedTuple):
    """A parameter or buffer as the model was made with it."""

    tensor: Tensor
    dtype: torch.dtype
    place: int
    trained: bool


def _begun(model: nn.Module) -> dict[str, _Begun]:
    return {name: _Begun(t, t.dtype, t.data_ptr(), t.requires_grad) for name, t, _ in named_state(model)}


def _check_unchanged(part: str, model: nn.Module, begun: Mapping[str, _Begun]) -> None:
    """Raises JobError where what makes the optimizer or the scheduler (``part``) has changed more of the model than
    values: workers call ``model`` alone, so that the one would be trained and the other stepped."""
    now = _begun(model)
    for name in dict.fromkeys((*begun, *now)):
        before, after = begun.get(name), now.get(name)
        if before is None:
            what = f"adds {name!r} to the model"
        elif after is None:
            what = f"takes {name!r} from the model"
        elif after.tensor is not before.tensor or after[1:3] != before[1:3]:
            what = f"puts another tensor, or other memory, in the place of {name!r}"
        elif after.trained != before.trained:
            what = f"{'freezes' if before.trained else 'unfreezes'} {name!r}"
        else:
            continue
        raise JobError(
            part, f"its function {what}; workers, which call model= alone, would compute with another model",
            "do that in model=",
        )  # fmt: skip


def _optimizer(job: Job, model: nn.Module, begun: Mapping[str, _Begun]) -> torch.optim.Optimizer:
    wanted = _written(job.optimizer, torch.optim.Optimizer, "torch.optim.SGD")
    hint = f"write optimizer=lambda model: {wanted}(model.parameters(), lr=...)"
    made = _made("optimizer", job.optimizer, model, hint)
    if not isinstance(made, torch.optim.Optimizer):
        raise JobError("optimizer", f"returned {type(made).__name__}, not a torch.optim.Optimizer", hint)
    _check_unchanged("optimizer", model, begun)
    name = type(made).__name__
    if isinstance(made, torch.optim.LBFGS) or _needs_closure(made):
        raise JobError("optimizer", f"{name} evaluates the loss several times a step", "use one without a closure")
    if isinstance(made, torch.optim.SparseAdam):
        raise JobError(
            "optimizer", f"{name} takes sparse gradients alone; a step's sum is dense", "use Adam or Adagrad"
        )
    known = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in known for group in made.param_groups for parameter in group["params"]):
        raise JobError("optimizer", "holds a parameter that is not the model's", "make it from model.parameters()")
    _check_fused(made)
    return made


def _check_fused(made: torch.optim.Optimizer) -> None:
    """Torch's fused SGD adds the wrong gradients to parameters in half precision on the CPU (seen with torch 2.13)."""
    stepping = [one for one in (made, *optimizers_in(made).values()) if isinstance(one, torch.optim.SGD)]
    for group in [group for one in stepping for group in one.param_groups if group.get("fused")]:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.device.type == "cpu" and parameter.dtype in _HALF:
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise JobError(
                    "optimizer", f"torch's fused SGD updates {dtype} parameters wrongly on the CPU",
                    "leave out fused=True, or keep the parameters float32 (precision='bf16' computes in bfloat16)",
                )  # fmt: skip


def _made(part: str, given: Callable[[Any], Any], of: object, hint: str) -> Any:
    """``hint``: how it is written, which is said where it was written otherwise, not of whatever else it raises."""
    signs = (*_MISWRITTEN, f"{type(of).__name__!r} object is not iterable")
    is_class = isinstance(given, type)
    return made_by(part, partial(given, of), hint=hint if is_class else "", hints=dict.fromkeys(signs, hint))


def _written(given: object, kind: type, otherwise: str) -> str:
    """How a function that makes a ``kind`` is written: of the class that was given in its place, where one was."""
    if not (isinstance(given, type) and issubclass(given, kind)):
        return otherwise
    # torch.optim.sgd.SGD is known as torch.optim.SGD, a scheduler by the name of its own module.
    place = {"torch.optim": "torch.optim.", "torch.optim.lr_scheduler": "torch.optim.lr_scheduler."}
    module = given.__module__
    return place.get(module, place.get(module.rpartition(".")[0], "")) + given.__name__


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step()`` without an argument would be an error."""
    try:
        # The class's: a scheduler replaces the optimizer's own by a wrapper whose signature has ``self``.
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        return True
    except ValueError:  # it has no signature
        return False
    return False


def _takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    try:
        return "closure" in inspect.signature(type(optimizer).step).parameters
    except ValueError:  # it has no signature
        return False


def _scheduler(job: Job, optimizer: torch.optim.Optimizer) -> Any:
    if job.scheduler is None:
        return None
    wanted = _written(job.scheduler, torch.optim.lr_scheduler.LRScheduler, "torch.optim.lr_scheduler.StepLR")
    hint = f"write scheduler=lambda optimizer: {wanted}(optimizer, ...)"
    made = _made("scheduler", job.scheduler, optimizer, hint)
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise JobError(
            "scheduler", "ReduceLROnPlateau needs a metric at each step", "use a schedule of the step number"
        )
    if not (hasattr(made, "step") and hasattr(made, "state_dict") and hasattr(made, "load_state_dict")):
        raise JobError("scheduler", f"returned {type(made).__name__}, not a torch LRScheduler", hint)
    if any(getattr(part, "optimizer", optimizer) is not optimizer for part in parts_of(made)):
        raise JobError("scheduler", "it schedules another optimizer than the one that its function was given", hint)
    return made
