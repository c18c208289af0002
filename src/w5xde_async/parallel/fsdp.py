"""Fully sharded islands: no rank ever holds the whole model, nor its gradients.

PyTorch's ``fully_shard`` does the sharding: a unit's parameters are gathered before it is computed and given up after,
in forward and in backward. Ranks take leaves in turns (``Share.TURNS``): in a round each computes one leaf, and every
unit's gradients are exchanged once. Instead of a reduce-scatter, whose order of additions is its own, every rank gets
each leaf's gradient of its shard, and adds them in the tree's order, onto what is open of the rounds before, as a
binary counter carries. So any number of ranks gives the bits of one process.

No tensor that a unit is called with is replaced by a view of its own, by which ``fully_shard`` sees that backward has
left a unit: what several units are called with (an encoder's output) would have its gradients added up unit by unit
first, in another order than one process adds them. A unit is over when backward comes to one that was computed before
it, and does not lie in it or around it: autograd runs what was computed last first.

Nothing is divided. A gradient that a leaf does not have is nothing, not zero: who has which is told beside the data.
Buffers and parameters that cannot be cut (scalars) are whole on every rank; their sums are rank 0's.

Every rank must run the same units in the same order, whatever its data: before each exchange they make sure of it. A
rank on which a leaf fails follows the others through the round with empty hands, so that the failure can be told.

Memory of a rank, for n bytes of parameters in float32, R ranks, u the largest unit: n/R as they come in, n/R to compute
with, n/R for each bit of the number of rounds, n/R for each block that is being sent, and about 5 u. Leaves of several
microbatches keep a whole gradient (n) in between, for they are summed before they are exchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from w5xde_async.compute.batch import copied, map_tensors, microbatches
from w5xde_async.compute.batch import leaves_of as batches_of
from w5xde_async.compute.block import (
    GRADIENTS_CHANGED,
    Block,
    ComputedBlock,
    LeafSpec,
    MetricNames,
    Task,
    autocast,
    scalar_loss,
)
from w5xde_async.compute.buffers import BufferMerge
from w5xde_async.compute.engine import LeafError
from w5xde_async.compute.fixed import FixedParameters, Held, frozen_again, renormed
from w5xde_async.errors import UsageError, W5xdeError
from w5xde_async.parallel.engine import EmitPieces, LoneLeafError
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.recomputing import DIFFERS, checkpointed
from w5xde_async.parallel.replica import Replica, carry_hooks, coalesced, made_dense
from w5xde_async.parallel.report import Report, exchange, only, outcome_of, raise_failure
from w5xde_async.parallel.shard_memory import ShardMemory, ShardPool
from w5xde_async.parallel.unit_forward import keep_apart, late_gradient
from w5xde_async.params.layout import ALIGN_BYTES, Layout
from w5xde_async.params.shard import Shard
from w5xde_async.plan import tree
from w5xde_async.plan.numerics import EXACT
from w5xde_async.plan.sampler import seed_for
from w5xde_async.plan.shares import Share, leaves_of
from w5xde_async.plan.tree import carries
from w5xde_async.randomness import has_drawn, random_state, seed_all
from w5xde_async.users_code import is_interrupt

#: What is made of a parameter's shape, dtype and device alone.
_OF_SHAPE = ("new_zeros", "new_ones", "new_empty", "new_full", "zeros_like", "ones_like", "empty_like", "full_like")
_FAILED = -1  # said in the place of an exchange's number
_PATIENCE_S = 20.0  # for the other ranks, who come to their next exchange, or raise as well


class _Part(NamedTuple):
    """A parameter in its unit's exchange: ``begin`` and ``padded`` elements in each rank's row of it, and how many of
    them are this rank's."""

    entry: int
    begin: int
    padded: int
    own: int


class FsdpEngine:
    """One rank's :class:`IslandEngine`. All methods but ``release`` run on one compute thread."""

    share, together, numerics = Share.TURNS, 1, EXACT

    def __init__(
        self,
        source: Replica,
        spec: LeafSpec,
        group: Group,
        *,
        checkpoint_activations: bool = False,
    ) -> None:
        """Takes ``source.model`` for itself. ``checkpoint_activations``: units compute their forward pass once more in
        backward, in place of keeping what it made.

        Raises UsageError for a model that cannot be sharded so.
        """
        self.layout, self.device = source.layout, group.device
        self._group, self._spec = group, spec
        self._autocast = autocast(spec.precision, self.device.type)
        self._metric_names = MetricNames()
        self._round: _Round | None = None
        self._now: _Running | None = None
        self._whole: Any = _Whole(source)
        self._state = list(source.tensors)
        entry_of = {id(tensor): index for index, tensor in enumerate(self._state)}
        self._small = [
            index
            for index, entry in enumerate(self.layout.entries)
            if entry.role in ("grad", "frozen") and (not entry.shape or not entry.numel)
        ]
        self._units = [
            _Unit(number, module, self) for number, module in enumerate((*_split(source), self._whole))
        ]  # fmt: skip
        changing = renormed(source.model)
        kept = {index for index, tensor in enumerate(self._state) if id(tensor) not in changing}
        self._checkpoints = checkpoint_activations
        self._shard_model(source, entry_of)
        self._fixed = self._fixed_of(source.model, kept)
        self._shards = [self._shard_of(rank) for rank in range(group.size)]
        self.shard = self._shards[group.rank]
        pinned = self.device.type == "cuda"
        self._memory = ShardMemory(self.shard, pinned=pinned)
        self._pool = ShardPool(self.shard, pinned=pinned)
        self.release = self._pool.release
        self._buffers = BufferMerge(self.layout, source.named, self._origin, source.statistics)
        self._has_extras = bool(self._small) or any(entry.role in ("mean", "max") for entry in self.layout.entries)
        self._buckets_of: dict[int, list[int]] = {}
        for bucket in self.layout.result_buckets:
            for index in bucket.entries:
                self._buckets_of.setdefault(index, []).append(bucket.index)
        most = max((unit.row * unit.dtype.itemsize for unit in self._units), default=0)
        self._received = torch.empty(group.size * most, dtype=torch.uint8, device=self.device)
        self._present: set[int] = set()  # entries that got gradients in this leaf
        self._known: dict[bool, list[_Step]] = {}  # what a microbatch exchanges, by whether it is its leaf's last
        self._log: list[_Step] = []
        self._lost: BaseException | None = None  # what an exchange raised: not the job's doing
        # Units but for the root, as ``fully_shard`` has them: groups of parameters.
        self._came: dict[Any, int] = {}  # when forward came to each last, counted from 1
        self._num_came = 0
        self._again: set[Any] = set()  # to which it came twice, and to others in between
        self._in_forward: Any = None
        self._in_backward: list[Any] = []  # from the outermost
        self._is_backward = False

    # -- parameters ----------------------------------------------------------------------------------------

    def incoming(self, bucket: int) -> list[memoryview]:
        """Memory for this rank's pieces of a bucket."""
        return self._memory.bytes[bucket]

    @torch.no_grad()
    def load(self, buckets: Iterable[int]) -> None:
        """Bring what has come to where it is computed with."""
        entries = sorted({entry for number in buckets for entry in self.layout.buckets[number].entries})
        whole: list[Tensor] = []
        for index in entries:
            held = self._memory.entry(index) if self._memory.holds(index) else None
            if index in self._local:
                if held is not None:
                    self._local[index].copy_(held)
                continue
            tensor = self._origin[index].view(-1)
            if held is not None:
                tensor.copy_(held)
            whole.append(tensor.view(torch.uint8))
        together = torch.cat(whole) if whole else torch.empty(0, dtype=torch.uint8)
        if together.numel():
            self._group.broadcast(together, 0)
            torch._foreach_copy_(whole, torch.split(together, [tensor.numel() for tensor in whole]))
        self._buffers.refresh(entries)

    # -- a block -------------------------------------------------------------------------------------------

    def compute(self, task: Task, emit: EmitPieces) -> ComputedBlock:
        """Compute one block together. Raises LeafError on every rank; LoneLeafError on one."""
        began, group = time.perf_counter(), self._group
        block = tree.Block(task.start, task.start + len(task.samples))
        turns = leaves_of(block, Share.TURNS, group.size)[group.rank]
        samples = [task.samples[leaf - task.start] for leaf in turns]
        mine = [leaf for number, leaf in enumerate(turns) if leaf == task.start + number * group.size + group.rank]
        own = Block(task, lambda *_: None, self._metric_names)
        now = self._now = _Running(self, self._pool.take(), emit)
        failure: LeafError | None = None
        with random_state(), self._fixed.block() as check:
            batches = batches_of(task.structure, task.tensors, samples, task.packed)
            for number, (count, batch) in enumerate(batches):
                self._round = current = _Round.of(task, number * group.size, group, self._spec.microbatch_samples)
                try:
                    self._leaf(own, turns[number], count, batch, current)
                except BaseException as error:
                    failure = self._failed(error, turns[number], current)
                if self._end_round(now, current, failed=failure is not None):
                    break
            else:
                try:
                    check()
                except TypeError as error:
                    failure = LeafError(turns[-1], error)
        report = Report() if failure is None else Report.of_failure(failure)
        if failure is None and not now.failed:
            report = self._report(own, mine, now)
        reports = exchange(group, report)
        self._now = self._round = None
        raise_failure(reports, failure, (now.memory,))
        return outcome_of(reports, rank=group.rank, compute_s=time.perf_counter() - began, vectors=(now.memory,))

    def close(self) -> None:
        """Let the model go."""
        for unit in self._units:
            unit.close()
        self._fixed.close()
        self._local.clear()
        self._origin.clear()
        self._state.clear()
        self._whole = None

    def _leaf(self, own: Block, leaf: int, samples: int, batch: Any, current: _Round) -> None:
        """Forward and backward of a leaf, in as many microbatches as the round's largest leaf has."""
        size = self._spec.microbatch_samples
        batch = map_tensors(batch, lambda tensor: tensor.to(self.device)) if self.device.type != "cpu" else batch
        pieces = microbatches(batch, samples, size)
        for _ in range(current.microbatches - len(pieces)):  # the others compute, and need this rank's shards
            seed_all(seed_for(self._spec.seed, current.step, leaf), self.device)
            self._buffers.restore()
            self._microbatch(copied(pieces[0][2]), 1.0, last=False, current=current)
        self._drop_gradients()
        self._present.clear()
        seed_all(seed_for(self._spec.seed, current.step, leaf), self.device)
        self._buffers.restore()
        loss_sum: Tensor | None = None
        for begin, end, piece in pieces:
            count = end - begin
            loss, metrics = self._microbatch(
                piece, count * current.loss_scale, last=end == samples, current=current
            )  # fmt: skip
            share = loss if count == samples else loss * (count / samples)
            loss_sum = share if loss_sum is None else loss_sum + share
            if current.real:
                own.note_metrics(metrics, count, count / samples, first=begin == 0)
        assert loss_sum is not None
        current.drew = has_drawn(self.device)
        if current.real:
            own.losses.append(loss_sum)
        current.extras = self._extras(samples, current.changed)

    def _microbatch(self, piece: Any, weight: float, *, last: bool, current: _Round) -> tuple[Tensor, Any]:
        self._whole.set_requires_gradient_sync(last)
        self._came.clear()
        self._again.clear()
        self._in_backward.clear()
        self._num_came, self._in_forward, self._is_backward = 0, None, False
        with self._fixed.step(), nullcontext() if self._autocast is None else self._autocast():
            loss, metrics = self._whole(piece)
        loss = scalar_loss(loss)
        self._is_backward = True
        torch.autograd.backward(loss, torch.tensor(weight, dtype=torch.float32, device=self.device))
        self._fixed.refuse_gradients()
        if last:
            for unit in self._units:
                unit.require_exchanged()
        self._known[last], self._log = self._log, []
        current.done += 1
        return loss.detach(), metrics

    def _extras(self, samples: int, changed: set[int]) -> _Extras:
        """What of a leaf's result is not exchanged by units."""
        extras = _Extras(self.layout, self._small, self.device)
        extras.reset()
        self._buffers.collect(extras, samples, changed)
        for number, index in enumerate(self._small):
            gradient = self._state[index].grad
            if gradient is not None:
                extras.small[number].copy_(gradient.view(-1))
                self._present.add(index)
        return extras

    def _end_round(self, now: _Running, current: _Round, *, failed: bool) -> bool:
        """Sum what units do not exchange. True where a leaf of the round failed somewhere, and the block with it."""
        self._drop_gradients()
        bits = [int(index in self._present or index in current.changed) for index in now.extra_entries]
        told = self._group.numbers([int(failed), *bits])
        if any(row[0] for row in told):
            now.failed = True
            return True
        for row in told[: current.count]:
            now.touched.update(index for index, bit in zip(now.extra_entries, row[1:], strict=True) if bit)
        now.drew = now.drew or current.drew
        if self._has_extras:
            extras = current.extras
            assert extras is not None
            size, first = extras.memory.numel(), self._group.rank == 0
            gathered = torch.empty(size * self._group.size if first else 0, dtype=torch.uint8, device=self.device)
            self._group.all_to_all(
                gathered, extras.memory, [size if first else 0] * self._group.size,
                [size if rank == 0 else 0 for rank in range(self._group.size)],
            )  # fmt: skip
            if first:
                for number in range(current.count):
                    memory = gathered[number * size : (number + 1) * size]
                    now.add_extras(_Extras(self.layout, self._small, self.device, memory), current.first + number)
        if current.last:
            now.finish()
        return False

    def _report(self, own: Block, mine: Sequence[int], now: _Running) -> Report:
        own.task = only(own.task, mine)
        names, values = own.reported()
        return Report(
            leaves=list(mine),
            losses=[float(loss) for loss in own.losses],
            names=list(names),
            firsts=list(names.values()),
            metrics=[float(value) for value in values],
            untouched=[index for index in self.layout.trainable if index not in now.touched],
            absent=[bucket.index for bucket in self.layout.result_buckets if bucket.index not in now.changed],
            drew=now.drew,
        )

    # -- a leaf that fails ---------------------------------------------------------------------------------

    def _failed(self, error: BaseException, leaf: int, current: _Round) -> LeafError:
        """Follow the others to the end of the round. Raises what is none of the job's doing, and LoneLeafError."""
        if self._lost is not None:
            raise self._lost
        if is_interrupt(error) or isinstance(error, UsageError):
            raise error
        if self._checkpoints and isinstance(error, CheckpointError):
            raise UsageError(DIFFERS.format("a unit")) from error
        if "FSDP does not support deepcopy" in str(error):
            raise UsageError(
                "the step copies the model (copy.deepcopy), or a unit of it, which fsdp islands have in parts: make "
                "the copy in the model's constructor, or use dp"
            ) from error
        if "storage of size 0" in str(error):
            raise UsageError(
                "backward needs parameters that were given up. Either the step writes in place into a view that a unit "
                "returned (use x = x + y for x += y), or a unit returns its tensors in an object that torch does not "
                "look into (return tensors, tuples, dicts or dataclasses), which both hide from fully_shard that "
                "backward has come to it; or the step asks for gradients of gradients (create_graph=True). Or use dp"
            ) from error
        if not hasattr(self._whole, "reset_iter_state"):  # as torch 2.11 has not: it cannot go on after this
            raise LoneLeafError(leaf, error) from error
        failure = LeafError(leaf, error)
        left = current.microbatches - current.done
        if left and not (True in self._known and (left == 1 or False in self._known)):
            if not self._all_fail():
                raise LoneLeafError(leaf, error) from error
            left = 0
        current.failed = True
        self._whole.reset_iter_state()
        begun, self._log = len(self._log), []
        try:
            for number in range(left):
                for step in self._known[number == left - 1][0 if number else begun :]:
                    step.follow(self)
        except _PartedError:  # the step computes something else from this round on
            raise LoneLeafError(leaf, error) from error
        self._log = []
        self._drop_gradients()
        return failure

    def _all_fail(self) -> bool:
        """Tell the others, in the place of what would have been exchanged next, that a leaf has failed here. Whether
        each has said the same."""
        try:
            rows = self._group.numbers([_FAILED, 1, *(0 for _ in range(self._widest - 1))], _PATIENCE_S)
        except TimeoutError:  # one computes for long, or is gone
            return False
        return all(row[0] == _FAILED for row in rows)

    def _drop_gradients(self) -> None:
        for unit in self._units:
            unit.drop_gradients()
        for index in self._small:
            self._state[index].grad = None

    # -- the exchange of one unit --------------------------------------------------------------------------

    def gather(self, unit: _Unit, output: Tensor, mine: Tensor) -> None:
        """All ranks' shards of a unit's parameters."""
        self._log.append(_Gather(unit, mine.dtype))
        self._meet(2 * unit.number, ())
        with self._exchanging():
            self._group.all_gather(output, mine)

    @torch.no_grad()
    def reduce(self, unit: _Unit, given: Tensor) -> None:
        """One leaf's gradients of a unit from each rank: rows of ``given``, one for each rank."""
        step = _Reduce(unit)
        if step in self._log:
            self._refuse_another_run(unit)
        self._log.append(step)
        current, now, size = self._round, self._now, self._group.size
        assert current is not None
        assert now is not None
        if given.numel() != unit.row * size or given.dtype != unit.dtype:
            raise W5xdeError(f"{unit.name!r} exchanges {given.numel()} elements of {given.dtype}: another torch?")
        bits = self._meet(2 * unit.number + 1, [int(part.entry in self._present) for part in unit.parts])
        with self._exchanging():
            received = self._received[: given.nbytes].view(unit.dtype)
            self._group.all_to_all(received, given, [unit.row] * size, [unit.row] * size)
        if current.failed or any(row[0] for row in bits):
            current.failed = True
            return
        leaves: list[Tensor] = []
        for number in range(current.count):
            row = received[number * unit.row : (number + 1) * unit.row].float()
            for part, bit in zip(unit.parts, bits[number][1:], strict=True):
                if bit:
                    now.touched.add(part.entry)
                else:
                    row[part.begin : part.begin + part.padded].fill_(-0.0)
            leaves.append(row)
        now.add(unit, leaves, current)

    def _meet(self, exchange: int, said: Sequence[int]) -> list[list[int]]:
        """What each rank says before an exchange, which must be the same one; first whether its leaf has failed.
        Raises UsageError.

        Else those that skip a unit would take another's parameters for the next.
        """
        failed = int(self._round is not None and self._round.failed)
        padding = [0] * (self._widest - 1 - len(said))
        with self._exchanging():
            rows = self._group.numbers([exchange, failed, *said, *padding])
        others = {row[0] for row in rows} - {exchange}
        if others and any(row[1] for row in rows):
            self._lost = _PartedError("a leaf failed on another rank, before the ranks knew what they exchange")
            raise self._lost
        if others:
            names = sorted({self._units[number // 2].name for number in (exchange, *others)})
            raise UsageError(
                f"ranks compute different parts of the model for different data ({', '.join(map(repr, names))}); in "
                "fsdp islands all of them run the same units in the same order: use dp"
            )
        return [row[1 : 2 + len(said)] for row in rows]

    def given(self, entry: int) -> Tensor:
        """A parameter as the model was built with it, while this engine is."""
        return self._state[entry]

    def output_for(self, unit: _Unit) -> Tensor:
        """Memory that looks like a unit's sharded gradients."""
        return self._received[: unit.row * unit.dtype.itemsize].view(unit.dtype)

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._lost = error
            raise

    # -- building ------------------------------------------------------------------------------------------

    def _shard_model(self, source: Replica, entry_of: dict[int, int]) -> None:
        group = self._group
        mesh = init_device_mesh(self.device.type, (group.size,))
        made: dict[int, nn.Parameter] = {}
        for index in self._small:
            parameter = self._state[index]
            small = nn.Parameter(torch.zeros_like(parameter, device=self.device), requires_grad=parameter.requires_grad)
            made[id(parameter)] = self._state[index] = carry_hooks(parameter, small, self.layout.entries[index].name)
        _put(source.model, made)
        ignored = {cast(nn.Parameter, self._state[index]) for index in self._small}
        self.small_ids = set(map(id, ignored))
        entry_of |= {id(self._state[index]): index for index in self._small}
        self._inside: dict[Any, set[Any]] = {}  # groups of parameters, as in ``_came``, that lie in another's module
        tops: dict[Any, nn.Module] = {}
        for unit in self._units:  # inner ones first
            # One unit after the other gets memory, of which its shard stays.
            made = {}
            for parameter in unit.module.parameters():
                if parameter.is_meta:
                    made[id(parameter)] = nn.Parameter(
                        torch.empty_like(parameter, device=self.device), requires_grad=parameter.requires_grad
                    )
                    entry_of[id(made[id(parameter)])] = entry_of[id(parameter)]
            _put(unit.module, made)
            made.clear()
            unit.plan([(entry_of[id(parameter)], parameter) for parameter in _managed(unit.module, self.small_ids)])
            if isinstance(unit.module, torch.jit.ScriptModule):
                raise UsageError(
                    f"{unit.name!r} is compiled by torch.jit, and fsdp islands gather parameters in hooks, which such "
                    "a module does not call: leave torch.jit out, or use dp or tp"
                )
            if self._checkpoints and unit.module is not self._whole:
                unit.module.forward = partial(checkpointed, unit.module, unit.module.forward)
            fully_shard(unit.module, mesh=mesh, ignored_params=ignored)
            module: FSDPModule = cast(Any, unit.module)
            module.set_custom_all_gather(cast(Any, unit.gather))
            module.set_custom_reduce_scatter(cast(Any, unit.reduce))
            held: Any = module._get_fsdp_state()._fsdp_param_group
            if held is not None:
                root = unit.module is self._whole  # which is over when all is
                held._register_post_backward_hook = _as_they_are if root else partial(self._forward, held)
                held.post_backward = partial(unit.end_backward, held.post_backward)
                if not root:
                    modules = set(unit.module.modules())
                    self._inside[held] = {other for other, top in tops.items() if top in modules}
                    tops[held] = unit.module
                    held.pre_backward = partial(self._backward, unit, held, held.pre_backward)
        self._widest = 1 + max(len(unit.parts) for unit in self._units)
        self._whole.set_reduce_scatter_unused_params(True)
        self._local: dict[int, Tensor] = {}
        self._log = []
        self._lost = None
        for unit in self._units:
            self._local.update(unit.find_parameters())
        self._state = [
            tensor if index in self._small or self.layout.entries[index].role in ("mean", "max") else torch.empty(0)
            for index, tensor in enumerate(self._state)
        ]
        self._origin: list[Tensor] = []
        live = source.tensors
        for index, entry in enumerate(self.layout.entries):
            if entry.role in ("mean", "max"):
                if live[index].is_meta:
                    raise UsageError(
                        f"buffer {entry.name!r} is computed from parameters (as spectral_norm's), which have no values "
                        "while the model is built; give the job the model itself, Job(model=make()), or register the "
                        "buffer by its own value"
                    )
                self._origin.append(live[index].detach().clone(memory_format=torch.contiguous_format))
            else:
                self._origin.append(self._state[index].detach())

    def _fixed_of(self, model: nn.Module, kept: set[int]) -> FixedParameters:
        """``kept``: entries whose values only an update changes."""
        told, trained = self.layout.entries, set(self.layout.trainable)
        small = [(told[index].name, self._state[index]) for index in self._small if index in kept]
        held = [Held(self._state[index], told[index].name, index in trained) for index in self._small]
        units: list[tuple[nn.Module, list[tuple[str, Tensor]]]] = []
        for unit in self._units:
            found = unit.found()
            for entry, (whole, part) in found:
                held.append(Held(whole, told[entry].name, entry in trained))
                held.append(Held(part, told[entry].name, entry in trained, lands=False))
            if unit.module._compiled_call_impl is None:  # other hooks would have it compiled anew
                units.append((unit.module, [(told[entry].name, whole) for entry, (whole, _) in found if entry in kept]))
        return FixedParameters(model, held, small, units, self.device)

    def _forward(self, held: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Forward has come to a unit. What it is called with stays as it is.

        Where backward computes it once more, it has not come a second time.
        """
        if held is not self._in_forward and torch.is_grad_enabled() and not self._is_backward:
            if held in self._came:
                self._again.add(held)
            self._num_came += 1
            self._in_forward, self._came[held] = held, self._num_came
        return args, kwargs

    def _backward(self, unit: _Unit, held: Any, gather: Callable[..., None], *prefetch: Any) -> None:
        """Backward has come to what a unit returned, once for each tensor: it has left those that it was in, but for
        the units around this one, and in it."""
        if not self._is_backward:
            raise UsageError(
                "the step runs backward itself (torch.autograd.grad, or backward()) before its loss's own, and fsdp "
                f"islands take each unit ({unit.name!r}) through backward once, for plain gradients and not for "
                "gradients of gradients (create_graph=True): use dp, or tp for plain ones"
            )
        chain = self._in_backward
        while chain and held not in chain and not (held in self._inside[chain[-1]] or chain[-1] in self._inside[held]):
            if self._came.get(held, 0) > self._came.get(chain[-1], 0):  # it returned what it was given
                if held in self._again:
                    self._refuse_another_run(unit)
                return
            chain.pop().post_backward()
        if held not in chain:
            chain.insert(next((n for n, other in enumerate(chain) if other in self._inside[held]), len(chain)), held)
        gather(*prefetch)

    def _refuse_another_run(self, unit: _Unit) -> None:
        raise UsageError(
            f"{unit.name!r} runs more than once in a forward pass, and other units in between; fsdp islands compute "
            "each unit once: use dp"
        )

    def _shard_of(self, rank: int) -> Shard:
        """Rows of parameters as ``fully_shard`` cuts them; the rest is rank 0's. Padding is the last owner's."""
        runs: list[tuple[int, int, int]] = []
        for group in self.layout.groups:
            entries = [self.layout.entries[index] for index in group.entries]
            ends = [*(entry.offset for entry in entries[1:]), group.numel]
            for index, entry, end in zip(group.entries, entries, ends, strict=True):
                begin, own = _rows_of(entry.shape, rank, self._group.size) if index in self._local else (0, entry.numel)
                if index not in self._local and rank:
                    continue
                last = begin + own == entry.numel and (own or index not in self._local)
                if own or last:
                    runs.append(
                        (group.index, entry.offset + begin, end if last else entry.offset + begin + own)
                    )  # fmt: skip
        return Shard.of(self.layout, runs)

    def write(self, memory: ShardMemory, index: int, values: Tensor) -> None:
        """What this rank has of an entry's sum."""
        if memory.holds(index):
            memory.entry(index).copy_(values)


class _Sum(NamedTuple):
    """What is open of a unit. ``passing``: it lies where the next unit's leaves are received."""

    values: Tensor
    passing: bool


class _Round:
    """One leaf of each rank."""

    def __init__(self, first: int, count: int, *, last: bool, real: bool, microbatches: int, task: Task) -> None:
        self.first, self.count = first, count  # of leaves, numbered in the block
        self.last, self.real, self.microbatches = last, real, microbatches
        self.step, self.loss_scale = task.step, task.loss_scale
        self.done = 0  # microbatches
        self.failed = self.drew = False
        self.changed: set[int] = set()  # buffers
        self.extras: _Extras | None = None

    @classmethod
    def of(cls, task: Task, first: int, group: Group, microbatch: int) -> _Round:
        leaves = task.samples[first : first + group.size]
        return cls(
            first,
            len(leaves),
            last=first + group.size >= len(task.samples),
            real=group.rank < len(leaves),
            microbatches=max(-(-count // microbatch) for count in leaves),
            task=task,
        )


class _Running:
    """One block: sums of the rounds so far, and what has been given out."""

    def __init__(self, engine: FsdpEngine, memory: ShardMemory, emit: EmitPieces) -> None:
        self.memory, self.failed, self.drew = memory, False, False
        self.touched: set[int] = set()  # entries that any leaf has changed
        self.changed: set[int] = set()  # buckets
        layout = engine.layout
        self.extra_entries = [
            index
            for index, entry in enumerate(layout.entries)
            if entry.role in ("mean", "max") or (entry.role == "grad" and index in engine._small)
        ]
        self._engine, self._emit = engine, emit
        self._open: dict[int, list[_Sum]] = {}  # by unit
        self._extras: list[_Extras] = []
        self._missing = {bucket.index: len(bucket.entries) for bucket in layout.result_buckets}
        self._on_host = engine.device.type == "cpu"
        self._late: list[int] = []

    def add(self, unit: _Unit, leaves: Sequence[Tensor], current: _Round) -> None:
        """A round's leaves of one unit, in memory that the next unit uses again."""
        stack = self._open.setdefault(unit.number, [])
        for number, leaf in enumerate(leaves):
            stack.append(_Sum(leaf, passing=True))
            last = current.last and number == len(leaves) - 1
            for _ in range(len(stack) - 1 if last else carries(current.first + number)):
                right = stack.pop()
                stack[-1].values.add_(right.values)
                unit.give(right)
        if not current.last:
            stack[:] = [unit.keep(held) for held in stack]
            return
        (total,) = stack
        del self._open[unit.number]
        for part in unit.parts:
            self._engine.write(self.memory, part.entry, total.values[part.begin : part.begin + part.own])
            self._done(part.entry)
        unit.give(total)

    def add_extras(self, extras: _Extras, leaf: int) -> None:
        """Leaf ``leaf`` of the block, on rank 0. They come in order."""
        self._extras.append(extras)
        for _ in range(carries(leaf)):
            right = self._extras.pop()
            self._extras[-1].add(right)

    def finish(self) -> None:
        """All leaves are summed: give out what is left."""
        engine = self._engine
        while len(self._extras) > 1:
            right = self._extras.pop()
            self._extras[-1].add(right)
        for total in self._extras:
            for index in self.extra_entries:
                engine.write(self.memory, index, total.entry(index))
        for index in self.extra_entries:
            self._done(index)
        if self._open or any(self._missing.values()):
            raise W5xdeError("a block has ended before all of its gradients were exchanged: another torch?")
        if self._late:
            torch.cuda.synchronize(engine.device)
            for bucket in self._late:
                self._emit(bucket, self.memory.pieces[bucket])

    def _done(self, entry: int) -> None:
        """An entry's sum is final. A bucket goes out when all of its are, wherever they lie."""
        for number in self._engine._buckets_of.get(entry, ()):
            self._missing[number] -= 1
            if self._missing[number]:
                continue
            bucket = self._engine.layout.buckets[number]
            if self.touched.isdisjoint(bucket.entries):
                continue
            self.changed.add(number)
            if number not in self._engine.shard.buckets:
                continue
            if self._on_host:
                self._emit(number, self.memory.pieces[number])
            else:
                self._late.append(number)


class _Unit:
    """A module whose parameters are gathered together, and its part of the exchange."""

    def __init__(self, number: int, module: nn.Module, engine: FsdpEngine) -> None:
        self.number, self.module, self._engine = number, module, engine
        self.name = next(
            (name for name, other in engine._whole.model.named_modules() if other is module), "the root"
        )  # fmt: skip
        self.parts: list[_Part] = []  # of trainable parameters, in the order in which they are exchanged
        self.row, self.dtype = 0, torch.float32
        self.gather, self.reduce = _GatherComm(engine, self), _ReduceComm(engine, self)
        self._entries: list[int] = []
        self._free: list[Any] = []  # the parameters as they are while they are whole
        self._trained: list[Any] = []  # of these
        self._frozen: list[tuple[Any, str]] = []  # and by name
        self._sharded: list[Any] = []
        self._hooks: list[Any] = []
        self._spare: list[Tensor] = []  # for sums: fresh memory costs page faults

    def plan(self, parameters: Sequence[tuple[int, nn.Parameter]]) -> None:
        """Its parameters by entry, whole, in the exchange's order. Raises UsageError for dtypes that do not mix, and
        for what does not lie in memory in the order of its axes."""
        size, rank = self._engine._group.size, self._engine._group.rank
        self._entries = [entry for entry, _ in parameters]
        for entry, parameter in parameters:
            if not parameter.is_contiguous():
                raise UsageError(
                    f"parameter {self._engine.layout.entries[entry].name!r} does not lie in memory in the order of its "
                    "axes (channels_last?), and fully_shard takes no other; leave that out, or --job, or use dp"
                )
        trainable = [(entry, parameter) for entry, parameter in parameters if parameter.requires_grad]
        dtypes = {parameter.dtype: self._engine.layout.entries[entry].name for entry, parameter in trainable}
        if len(dtypes) > 1:
            (one, first), (other, second) = list(dtypes.items())[:2]
            raise UsageError(
                f"parameters {first!r} ({one}) and {second!r} ({other}) are of one module; fsdp islands exchange each "
                "unit in one dtype: use one dtype, or dp"
            )
        for dtype in dtypes:
            self.dtype = dtype
        for entry, parameter in trainable:
            padded = -(-parameter.shape[0] // size) * (parameter.numel() // parameter.shape[0])
            _, own = _rows_of(tuple(parameter.shape), rank, size)
            self.parts.append(_Part(entry, self.row, padded, own))
            self.row += padded

    def find_parameters(self) -> dict[int, Tensor]:
        """Look at its parameters whole, and sharded. This rank's part of each, flat, by entry."""
        module: FSDPModule = cast(Any, self.module)
        module.unshard()
        self._free = list(_managed(self.module, self._engine.small_ids))
        self._trained = [parameter for parameter in self._free if parameter.requires_grad]
        names = [self._engine.layout.entries[entry].name for entry in self._entries]
        whole = dict(zip(names, self._free, strict=True))
        self._frozen = [(parameter, name) for name, parameter in whole.items() if not parameter.requires_grad]
        keep_apart(self.module, self.name, whole, is_step=self.module is self._engine._whole)
        for entry, parameter in zip(self._entries, self._free, strict=True):
            if parameter.requires_grad:
                name = self._engine.layout.entries[entry].name
                carry_hooks(self._engine.given(entry), cast(nn.Parameter, parameter), name)
                self._hooks.append(
                    parameter.register_post_accumulate_grad_hook(partial(self._landed, entry))
                )  # fmt: skip
                self._hooks.append(parameter.register_hook(cast(Any, coalesced)))
        module.reshard()
        self._sharded = list(_managed(self.module, self._engine.small_ids))
        with torch.no_grad():
            local = {
                entry: parameter.to_local().view(-1)
                for entry, parameter in zip(self._entries, self._sharded, strict=True)
            }  # fmt: skip
        for entry, parameter in zip(self._entries, self._sharded, strict=True):
            parameter.__class__ = _Shard
            parameter.place = (self._engine.layout.entries[entry].name, self.name)
        return local

    def found(self) -> list[tuple[int, tuple[Any, Any]]]:
        """By entry its parameters, whole and sharded."""
        return list(zip(self._entries, zip(self._free, self._sharded, strict=True), strict=True))

    def keep(self, held: _Sum) -> _Sum:
        """The same sum in memory of its own."""
        if not held.passing:
            return held
        kept = self._spare.pop() if self._spare else torch.empty_like(held.values)
        return _Sum(kept.copy_(held.values), passing=False)

    def give(self, held: _Sum) -> None:
        """It has been added, or given out."""
        if not held.passing:
            self._spare.append(held.values)

    def shard(self) -> Tensor:
        """This rank's part of its parameters, as it is exchanged: bytes. They are not whole now."""
        held: Any = cast(Any, self.module)._get_fsdp_state()._fsdp_param_group
        with torch.no_grad():
            return torch.cat(
                [one.view(torch.uint8) for parameter in held.fsdp_params for one in parameter.all_gather_inputs]
            )

    def end_backward(self, post_backward: Callable[..., None], *unused: Any) -> None:
        """Have its gradients exchanged, also where the step has frozen parameters for its time: each round has a leaf
        of each rank for every unit, which may hold nothing."""
        for parameter in self._trained:
            if not parameter.requires_grad:
                parameter.requires_grad_(True)
        with frozen_again(self._frozen):
            post_backward(*unused)

    def require_exchanged(self) -> None:
        """Raises UsageError for a gradient that has come after the exchange, and would be lost."""
        for entry, parameter in zip(self._entries, self._free, strict=True):
            if parameter.grad is not None:
                raise UsageError(late_gradient(self._engine.layout.entries[entry].name, self.name))

    def drop_gradients(self) -> None:
        for parameter in (*self._free, *self._sharded):
            parameter.grad = None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._free.clear()
        self._trained.clear()
        self._frozen.clear()
        self._sharded.clear()

    def _landed(self, entry: int, parameter: Tensor) -> None:
        if parameter.grad is None:  # as a hook leaves it that has an optimizer step
            raise TypeError(GRADIENTS_CHANGED)
        made_dense(parameter)
        self._engine._present.add(entry)


class _Shard(DTensor):
    """A rank's part of a parameter, which nothing may compute with: it would be taken for the whole, or its gradient
    be lost. ``fully_shard`` puts the whole parameter in its place while its unit is computed.

    Shape, dtype and device can be asked for, and used to make other tensors.
    """

    __slots__ = ()
    place: tuple[str, str]  # the parameter's name, and its unit's

    @classmethod
    def __torch_dispatch__(cls, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        found = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, cls))
        called = operator._schema.name.rpartition("::")[2]
        if called in _OF_SHAPE and args and args[0] is found:
            local = found._local_tensor
            whole = local.new_empty(found.shape) if called.endswith("_like") else local
            return operator(whole, *args[1:], **(kwargs or {}))
        if called == "detach":  # as state_dict does, whose names alone may be wanted
            detached: Any = cls.__new__(cls, found._local_tensor, found._spec, requires_grad=False)
            detached.place = found.place
            return detached
        name, unit = found.place
        raise UsageError(
            f"parameter {name!r} is used outside of {unit!r}, and a rank of an fsdp island has it whole only while "
            "that module is called: call the module, leave out --job, or use dp"
        )


class _PartedError(RuntimeError):
    """A rank whose leaf has failed follows what the others do no more."""


class _Gather(NamedTuple):
    """An exchange that all ranks make at the same place of a microbatch: of parameters."""

    unit: _Unit
    dtype: torch.dtype

    def follow(self, engine: FsdpEngine) -> None:
        """The others need this rank's shard: with anything else in its place their leaves would fail, too."""
        mine = self.unit.shard().view(self.dtype)
        engine.gather(self.unit, mine.new_empty(mine.numel() * engine._group.size), mine)


class _Reduce(NamedTuple):
    """And of gradients."""

    unit: _Unit

    def follow(self, engine: FsdpEngine) -> None:
        given = torch.zeros(self.unit.row * engine._group.size, dtype=self.unit.dtype, device=engine.device)
        engine.reduce(self.unit, given)


_Step = _Gather | _Reduce


class _GatherComm:
    """What ``fully_shard`` asks of an all-gather."""

    def __init__(self, engine: FsdpEngine, unit: _Unit) -> None:
        self._engine, self._unit = engine, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self._engine.gather(self._unit, output_tensor, input_tensor)


class _ReduceComm:
    """What ``fully_shard`` asks of a reduce-scatter. Nothing is put into the output: all units have one for it."""

    def __init__(self, engine: FsdpEngine, unit: _Unit) -> None:
        self._engine, self._unit = engine, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if tuple(size) == (self._unit.row,):
            return self._engine.output_for(self._unit)
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._engine.reduce(self._unit, input_tensor)


class _Extras:
    """A leaf's changes of buffers, and its gradients of parameters that are not cut."""

    def __init__(
        self, layout: Layout, small: Sequence[int], device: torch.device, memory: Tensor | None = None
    ) -> None:
        self._layout = layout
        sizes = [group.numel if group.role in ("mean", "max") else 0 for group in layout.groups]
        wide = [size if group.role == "max" else 0 for group, size in zip(layout.groups, sizes, strict=True)]
        counts = [layout.entries[index].numel for index in small]
        num_wide, num_floats = sum(wide), sum(sizes) - sum(wide) + sum(counts)
        if memory is None:
            nbytes = -(-(num_wide * 8 + num_floats * 4) // ALIGN_BYTES) * ALIGN_BYTES
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.memory = memory
        self._wide = memory[: num_wide * 8].view(torch.int64)
        self._floats = memory[num_wide * 8 :][: num_floats * 4].view(torch.float32)
        narrow = [size - other for size, other in zip(sizes, wide, strict=True)]
        pieces = torch.split(self._floats, [*narrow, *counts])
        of_wide = torch.split(self._wide, wide)
        self._groups = [of_wide[g.index] if g.role == "max" else pieces[g.index] for g in layout.groups]
        self._small = dict(zip(small, pieces[len(narrow) :], strict=True))
        self.small = list(self._small.values())

    def reset(self) -> None:
        """Fill with nothing."""
        self._wide.fill_(torch.iinfo(torch.int64).min)
        self._floats.fill_(-0.0)

    def entry(self, index: int) -> Tensor:
        """An entry's values, flat."""
        if index in self._small:
            return self._small[index]
        entry = self._layout.entries[index]
        return self._groups[entry.group][entry.offset : entry.offset + entry.numel]

    def add(self, right: _Extras) -> None:
        """The sum with ``right`` in its place."""
        torch.maximum(self._wide, right._wide, out=self._wide)
        self._floats.add_(right._floats)


class _Whole(nn.Module):
    """The model and its step, so that what the step does outside of the model's forward finds parameters too."""

    def __init__(self, source: Replica) -> None:
        super().__init__()
        self.model, self._step = source.model, source.step

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        return self._step(self.model, batch)


def _split(source: Replica) -> list[nn.Module]:
    """The units, and modules in other dtypes than the unit around them: each exchange has one. Inner ones first."""
    units = list(source.units)
    if not source.called:
        return units
    known = {id(unit) for unit in units}

    def inside(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if id(child) not in known:
                yield from inside(child)
                yield child

    found: list[nn.Module] = []
    for top in (*units, source.model):
        dtypes = [parameter.dtype for parameter in _trainable(top)]
        for module in inside(top):
            dtypes += [parameter.dtype for parameter in _trainable(module)]
        main = max(dict.fromkeys(dtypes), key=dtypes.count, default=torch.float32)
        for module in inside(top):
            own = {parameter.dtype for parameter in _trainable(module)}
            if own and main not in own and module not in found:
                found.append(module)
        if top is not source.model:
            found.append(top)
    return found


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [
        parameter
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad and parameter.dim() and parameter.numel()
    ]


def _managed(top: nn.Module, ignored: Iterable[int] = ()) -> Iterator[nn.Parameter]:
    """The parameters that ``fully_shard`` has in one exchange for ``top``, in its order: those of modules inside first,
    less those of units inside."""
    left_out, seen, known = set(ignored), set[int](), set[int]()

    def visit(module: nn.Module) -> Iterator[nn.Parameter]:
        known.add(id(module))
        for child in module.children():
            if id(child) not in known and not isinstance(child, FSDPModule):
                yield from visit(child)
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen and id(parameter) not in left_out:
                seen.add(id(parameter))
                yield parameter

    yield from visit(top)


def _put(top: nn.Module, made: dict[int, nn.Parameter]) -> None:
    """Put parameters in the place of others, by the others' ids, wherever they hang."""
    for module in top.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[name] = made[id(parameter)]


def _as_they_are(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """In the place of ``fully_shard``'s views of what a unit is called with."""
    return args, kwargs


def _rows_of(shape: Sequence[int], rank: int, size: int) -> tuple[int, int]:
    """First element and number of elements of a rank's rows, as ``torch.chunk`` cuts the first dimension."""
    each = -(-shape[0] // size)
    width = 1
    for extent in shape[1:]:
        width *= extent
    begin, end = min(rank * each, shape[0]), min((rank + 1) * each, shape[0])
    return begin * width, (end - begin) * width
