"""Islands whose model PyTorch's own parallelisms divide: tensor parallel, and what a job composes itself.

The model ends with ``DTensor`` parameters (``parallelize_module``, ``fully_shard``, both). Each rank holds one box of
every parameter, and gets it by ``Resharding``. The mesh may have an axis ``fsdp``: its ranks take leaves in turns, as
in ``parallel.fsdp``, and ``fully_shard`` sums their gradients by the tree; on the other axes all ranks work on every
leaf. Leaves are summed by the tree, so equal islands give equal bits however the work is dealt out (on ``fsdp`` axes of
2, 4, 8 ranks and so on). They are not the bits of one process: a product that is split is added in another order, and
``numerics`` says how.

Random numbers: every rank seeds a leaf alike. What is replicated draws what one process draws; ranks draw the same for
their parts of what is split.

A gradient of which several ranks have a copy must be the same on all. A plan that forgets to add them up (a norm over
the heads of one rank) is refused by the parameter's name.

Ranks with leaves of their own must run the same units of ``fully_shard`` in the same order, whatever their data: before
each exchange, and at the end of a block, they make sure of it.

Gradients that pass through ``DTensor`` have no gradients of their own, and ``fully_shard`` gives its parameters up
after the first: ``create_graph=True`` is refused where it has to do with what is divided.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import struct
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from msgspec import msgpack
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

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
from w5xde_async.errors import UsageError
from w5xde_async.parallel.data_parallel import shard_of
from w5xde_async.parallel.engine import EmitPieces, LoneLeafError
from w5xde_async.parallel.group import Group, all_gather, is_rank_gone
from w5xde_async.parallel.replica import Replica, carry_hooks, is_hooked, made_dense
from w5xde_async.parallel.report import Report, exchange, only, outcome_of, raise_failure
from w5xde_async.parallel.resharding import Resharding
from w5xde_async.parallel.shard_memory import ShardMemory, ShardPool
from w5xde_async.parallel.unit_forward import keep_apart, late_gradient
from w5xde_async.params.boxes import Box, extents, numel, whole
from w5xde_async.params.flat import add
from w5xde_async.params.layout import ALIGN_BYTES, Layout
from w5xde_async.plan import tree
from w5xde_async.plan.sampler import seed_for
from w5xde_async.plan.shares import Share, leaves_of
from w5xde_async.plan.tree import carries
from w5xde_async.randomness import has_drawn, random_state, seed_all
from w5xde_async.users_code import is_interrupt

logger = logging.getLogger(__name__)

Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module | None]
"""Divides a model, whose parameters are on the meta device, over a mesh with named axes; it may return another."""

_DATA = "fsdp"  # the axis whose ranks have leaves of their own
_ALIKE = 1e-3  # copies of a gradient may differ by so much (relative): other devices round otherwise
_PATIENCE_S = 20.0  # for the other ranks, who raise what this one has raised
_ENDED, _FAILED = -1, -2  # said in the place of an exchange's number
_OF_SIZES = re.compile(r"DTensor|\b(shapes?|sizes?|dimensions?|elements)\b", re.IGNORECASE)
_OF_DTENSOR = re.compile(r"torch\.distributed\.tensor\b")  # modules
_OF_A_UNIT = "RegisterPostBackwardFunction"  # what ``fully_shard`` has autograd call; under ``torch.func`` a subclass


class ComposedEngine:
    """One rank's :class:`IslandEngine`. All methods but ``release`` run on one compute thread."""

    def __init__(
        self,
        source: Replica,
        parallelize: Parallelize,
        spec: LeafSpec,
        group: Group,
        mesh: DeviceMesh,
        *,
        words: str,
    ) -> None:
        """Takes ``source.model`` for itself. ``words``: what it is, for ``numerics``.

        Raises UsageError for a model that has been divided in a way that this cannot follow.
        """
        self.layout, self.device = source.layout, group.device
        self._group, self._spec, self._step = group, spec, source.step
        self._autocast = autocast(spec.precision, self.device.type)
        self._metric_names = MetricNames()
        names: Sequence[str] = mesh.mesh_dim_names or ()
        self._turns = mesh.size(names.index(_DATA)) if _DATA in names else 1
        self._turn = mesh.get_local_rank(_DATA) if self._turns > 1 else 0
        self.together = group.size // self._turns
        self.share = Share.TURNS if self._turns > 1 else Share.ALL
        self._data_group: Any = mesh.get_group(_DATA) if self._turns > 1 else None
        changing = renormed(source.model)
        kept = {entry for entry, tensor in enumerate(source.tensors) if id(tensor) not in changing}
        self._model = self._divided(source, parallelize, mesh)
        self._touched: set[int] = set()
        self._hooks: list[Any] = []
        self._valid: list[bool] = []  # of a microbatch: whose gradients count, by turn
        self._units = [module for module in self._model.modules() if isinstance(module, FSDPModule)]
        self._unit_names = [name for name, module in self._model.named_modules() if isinstance(module, FSDPModule)]
        self._lost: BaseException | None = None  # what an exchange raised: not the job's doing
        self._parameters = self._found(source)
        for entry in self._gathered:
            parameter: Any = self._parameters[entry]
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(partial(self._used_apart, entry)))
        self._data_is_not_split_otherwise(mesh)
        self._fixed = self._fixed_of(kept)
        box = {e: _box_of(self.layout.entries[e].name, p) for e, p in self._parameters.items()}
        for entry, told in enumerate(self.layout.entries):
            if told.role in ("mean", "max"):
                box[entry] = whole(told.shape)
        boxes = [_decoded(data) for data in group.bytes_of_all(msgpack.encode([[e, box[e]] for e in sorted(box)]))]
        digest = hashlib.blake2b(msgpack.encode([sorted(one.items()) for one in boxes]), digest_size=4).hexdigest()
        self.numerics = f"{words} {digest}"
        shards = [shard_of(self.layout, rank, group.size) for rank in range(group.size)]
        self.shard = shards[group.rank]
        self._resharding = Resharding(self.layout, group, shards, boxes)
        copies = {entry: _holders(entry, boxes) for entry in self.layout.trainable}
        self._copies = {entry: ranks for entry, ranks in copies.items() if ranks}
        pinned = self.device.type == "cuda"
        self._memory = ShardMemory(self.shard, pinned=pinned)
        self._pool = ShardPool(self.shard, pinned=pinned)
        self.release = self._pool.release
        self._local = {e: _local(parameter) for e, parameter in self._parameters.items()}
        self._origin: list[Tensor] = []
        for entry, told in enumerate(self.layout.entries):
            if told.role in ("mean", "max"):
                self._origin.append(source.tensors[entry].detach().to(self.device, copy=True))
                self._local[entry] = self._origin[-1]
            else:
                self._origin.append(torch.empty(0))
        self._buffers = BufferMerge(self.layout, source.named, self._origin, source.statistics)
        self._boxes = {entry: one for entry, one in box.items() if self.layout.entries[entry].role != "frozen"}
        self._apart = {entry for entry in self._boxes if self._turns > 1 and entry not in self._gathered}
        self._spare: list[_Sums] = []
        self._told_of_failure = False

    # -- parameters ----------------------------------------------------------------------------------------

    def incoming(self, bucket: int) -> list[memoryview]:
        """Memory for this rank's pieces of a bucket."""
        return self._memory.bytes[bucket]

    @torch.no_grad()
    def load(self, buckets: Iterable[int]) -> None:
        """Bring what has come to all ranks to where each computes with it."""
        entries: set[int] = set()
        for number in sorted(buckets):
            bucket = self.layout.buckets[number]
            self._resharding.to_boxes(bucket, self._memory, self._local.__getitem__)
            entries.update(bucket.entries)
        self._buffers.refresh(sorted(entries))

    # -- a block -------------------------------------------------------------------------------------------

    def compute(self, task: Task, emit: EmitPieces) -> ComputedBlock:
        """Compute one block together. Raises LeafError on every rank; LoneLeafError on one."""
        began = time.perf_counter()
        block = tree.Block(task.start, task.start + len(task.samples))
        turns = leaves_of(block, Share.TURNS, self._turns)[self._turn]
        mine = [leaf for number, leaf in enumerate(turns) if leaf == task.start + number * self._turns + self._turn]
        own, now = Block(task, lambda *_: None, self._metric_names), _Running()
        failure: LeafError | None = None
        self._touched.clear()
        with random_state(), self._fixed.block() as check:
            samples = [task.samples[leaf - task.start] for leaf in turns]
            batches = batches_of(task.structure, task.tensors, samples, task.packed)
            for number, (count, batch) in enumerate(batches):
                first = number * self._turns
                leaf = _Leaf(turns[number], count, tuple(task.samples[first : first + self._turns]), task)
                try:
                    self._leaf(own, batch, leaf, now)
                    self._sum(now, leaf, number, last=number == len(turns) - 1)
                except BaseException as error:
                    failure = self._failed(error, leaf.number)
                    break
            else:
                try:
                    check()
                except TypeError as error:
                    failure = LeafError(turns[-1], error)
        changed = self._told(now, failure)
        report = Report() if failure is None else Report.of_failure(failure)
        if failure is None and changed is not None:
            report = self._report(own, mine, now, changed)
        reports = exchange(self._group, report)
        memory = self._pool.take()
        raise_failure(reports, failure, (memory,))
        assert changed is not None
        (total,) = now.open
        for bucket in self.layout.result_buckets:
            if not changed.isdisjoint(bucket.entries):
                self._resharding.to_shards(bucket, total.boxed, memory)
        self._spare.append(total)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for bucket in self.layout.result_buckets:
            if bucket.index in self.shard.buckets and not changed.isdisjoint(bucket.entries):
                emit(bucket.index, memory.pieces[bucket.index])
        return outcome_of(reports, rank=self._group.rank, compute_s=time.perf_counter() - began, vectors=(memory,))

    def close(self) -> None:
        """Let the model go."""
        for hook in self._hooks:
            hook.remove()
        self._fixed.close()
        self._drop_gradients()
        self._parameters.clear()
        self._local.clear()

    def _leaf(self, own: Block, batch: Any, leaf: _Leaf, now: _Running) -> None:
        """Forward and backward of a leaf, in as many microbatches as the largest leaf that is computed now has."""
        samples, size = leaf.samples, self._spec.microbatch_samples
        if self.device.type != "cpu":
            batch = map_tensors(batch, lambda tensor: tensor.to(self.device))
        pieces = microbatches(batch, samples, size)
        counts = [-(-count // size) for count in leaf.of_all]
        self._begin(leaf)
        for _ in range(max(counts) - len(pieces)):  # the others compute, and need this rank's shards
            self._microbatch(copied(pieces[0][2]), 0.0, last=False)
        self._drop_gradients(whole_too=True)
        self._begin(leaf)
        loss_sum: Tensor | None = None
        real = self._turn < len(counts)
        self._valid = [turn < len(counts) for turn in range(self._turns)]
        for begin, end, piece in pieces:
            count = end - begin
            loss, metrics = self._microbatch(piece, count * leaf.loss_scale, last=end == samples)
            share = loss if count == samples else loss * (count / samples)
            loss_sum = share if loss_sum is None else loss_sum + share
            if real:
                own.note_metrics(metrics, count, count / samples, first=begin == 0)
        assert loss_sum is not None
        if real:
            own.losses.append(loss_sum)
            now.drew = now.drew or has_drawn(self.device)

    def _begin(self, leaf: _Leaf) -> None:
        seed_all(seed_for(self._spec.seed, leaf.step, leaf.number), self.device)
        self._buffers.restore()

    def _microbatch(self, piece: Any, weight: float, *, last: bool) -> tuple[Tensor, Any]:
        if self._turns > 1:
            for unit in self._units:
                unit.set_requires_gradient_sync(last, recurse=False)
        with nullcontext() if self._autocast is None else self._autocast():
            with _FirstDerivatives(self._gathered.values()), self._fixed.step():
                loss, metrics = self._step(self._model, piece)
        for entry, parameter in self._gathered.items():
            # The root stays whole from its forward on: a step that had frozen it before has melted that copy alone.
            sharded, frozen = self._parameters[entry], not parameter.requires_grad
            if sharded.requires_grad == frozen and _local(parameter).untyped_storage().size():
                sharded.requires_grad_(not frozen)
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        loss = scalar_loss(loss)
        torch.autograd.backward(loss, torch.tensor(weight, dtype=torch.float32, device=self.device))
        self._fixed.refuse_gradients()
        if last:
            for entry, parameter in self._gathered.items():
                if parameter.grad is not None:
                    raise UsageError(late_gradient(self.layout.entries[entry].name, self._unit_of[entry]))
        return loss.detach(), metrics

    @torch.no_grad()
    def _sum(self, now: _Running, leaf: _Leaf, number: int, *, last: bool) -> None:
        """What has been computed of this turn, onto what is open of those before."""
        sums = self._spare.pop() if self._spare else _Sums(self.layout, self._boxes, self._apart, self.device)
        sums.reset()
        for entry in self.layout.trainable:
            parameter = self._parameters[entry]
            gradient: Any = parameter.grad
            if gradient is None:
                continue
            if isinstance(gradient, DTensor):
                placements = cast(DTensor, parameter).placements
                if gradient.placements != placements:
                    gradient = gradient.redistribute(placements=placements)
                gradient = gradient.to_local()
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            sums.boxed(entry).copy_(gradient)
            if entry not in self._gathered:
                self._touched.add(entry)
        self._drop_gradients()
        if self._turn < len(leaf.of_all):
            self._buffers.collect(sums, leaf.samples, now.changed)
        else:
            self._buffers.collect(_Sums(self.layout, self._boxes, self._apart, self.device), leaf.samples, set())
        if self._turns > 1:
            self._sum_apart(sums, len(leaf.of_all))
        now.open.append(sums)
        for _ in range(len(now.open) - 1 if last else carries(number)):
            right = now.open.pop()
            now.open[-1].add(right)
            self._spare.append(right)

    def _sum_apart(self, sums: _Sums, count: int) -> None:
        """What ``fully_shard`` does not sum, of the leaves of one turn, which have lain on ranks of their own."""
        if not sums.apart.numel():
            return
        gathered = [torch.empty_like(sums.apart) for _ in range(self._turns)]
        dist.all_gather(gathered, sums.apart, group=self._data_group)
        stack: list[_Sums] = []
        for number in range(count):
            stack.append(_Sums(self.layout, self._boxes, self._apart, self.device, gathered[number]))
            for _ in range(len(stack) - 1 if number == count - 1 else carries(number)):
                right = stack.pop()
                stack[-1].add(right)
        sums.apart.copy_(stack[0].apart)

    # -- what the ranks tell each other --------------------------------------------------------------------

    def _told(self, now: _Running, failure: LeafError | None) -> set[int] | None:
        """The entries that any leaf has changed, on all ranks the same; None where a leaf has failed.

        Raises UsageError where copies of a gradient differ, LoneLeafError where only this rank has failed.
        """
        entries, copied = list(self._boxes), list(self._copies)
        said = [int(failure is not None), *(0 for _ in range(len(entries) + len(copied)))]
        if failure is None:
            (total,) = now.open
            known = self._touched | now.changed
            said[1:] = [int(entry in known) for entry in entries]
            said += struct.unpack(f"<{len(copied)}q", struct.pack(f"<{len(copied)}d", *total.norms(copied)))
        # The others may wait for this rank's part of a layer that is split, and not come.
        patience_s = None if failure is None else _PATIENCE_S
        try:
            if self._turns > 1:
                self._meet(_ENDED if failure is None else _FAILED, failure, patience_s)
            told = self._group.numbers(said, patience_s)
        except TimeoutError:
            assert failure is not None
            raise LoneLeafError.alone(failure) from None
        if any(row[0] for row in told):
            return None
        norms = [
            struct.unpack(f"<{len(copied)}d", struct.pack(f"<{len(copied)}q", *row[1 + len(entries) :]))
            for row in told
        ]  # fmt: skip
        for number, entry in enumerate(copied):
            for ranks in self._copies[entry]:
                found = [norms[rank][number] for rank in ranks]
                if max(found) - min(found) > _ALIKE * max(found):
                    raise UsageError(
                        f"the gradient of {self.layout.entries[entry].name!r} is not the same on ranks that each hold "
                        "a copy of it: it is applied to what is split, and nobody adds its gradients up; split it too, "
                        "or apply it to what is whole (Job.parallelize)"
                    )
        return {entry for number, entry in enumerate(entries) if any(row[1 + number] for row in told)}

    def _meet(self, at: int, failure: LeafError | None = None, patience_s: float | None = None) -> None:
        """All ranks say where they are, this one ``at`` an exchange or at the block's end, and must be at the same.

        Else those that skip a unit would take another's parameters for the next. Raises UsageError; LoneLeafError where
        the others go on without this rank's ``failure``.
        """
        found = {row[0] for row in self._group.numbers([at], patience_s)}
        if len(found) == 1 or found == {_ENDED, _FAILED}:
            return
        if failure is not None:
            raise LoneLeafError.alone(failure)
        if _FAILED in found:
            raise RuntimeError("a leaf failed on another rank, while this one went on to what fully_shard exchanges")
        names = sorted({repr(self._unit_names[number // 2] or "the root") for number in found if number >= 0})
        raise UsageError(
            f"ranks compute different parts of the model for different data ({', '.join(names)}); in islands with "
            f"{_DATA!r} all of them run the same units of fully_shard in the same order: use dp or tp"
        )

    def exchanges(self, number: int) -> None:
        """The next exchange is this one, on all ranks. Raises UsageError."""
        if self._turns == 1:
            return
        try:
            self._meet(number)
        except BaseException as error:
            self._lost = error
            raise

    def _report(self, own: Block, mine: Sequence[int], now: _Running, changed: set[int]) -> Report:
        own.task = only(own.task, mine)
        names, values = own.reported()
        told = not self._group.rank % self.together  # else a neighbour says the same
        return Report(
            leaves=list(mine) if told else [],
            losses=[float(loss) for loss in own.losses],
            names=list(names),
            firsts=list(names.values()),
            metrics=[float(value) for value in values],
            untouched=[entry for entry in self.layout.trainable if entry not in changed],
            absent=[bucket.index for bucket in self.layout.result_buckets if changed.isdisjoint(bucket.entries)],
            drew=now.drew,
        )

    def _failed(self, error: BaseException, leaf: int) -> LeafError:
        """Raises what is none of the job's doing, and LoneLeafError where nothing can follow."""
        if self._lost is not None:
            raise self._lost
        if is_interrupt(error) or isinstance(error, UsageError) or is_rank_gone(error):
            raise error
        if not self._told_of_failure and _may_be_of_a_split(error):
            self._told_of_failure = True
            logger.warning(
                "a leaf failed under %s, which splits parameters: a model that uses one outside its own layer, or "
                "takes its number of heads from a constant, says in Job.parallelize what is split (docs/islands.md)",
                self.numerics,
            )  # fmt: skip
        for unit in self._units:
            if cast(Any, unit)._get_fsdp_state()._is_root:
                if not hasattr(unit, "reset_iter_state"):  # as torch 2.11 has not
                    raise LoneLeafError(leaf, error) from error
                unit.reset_iter_state()
        self._drop_gradients(whole_too=True)
        return LeafError(leaf, error)

    def _used_apart(self, entry: int, gradient: Tensor) -> None:
        """A part of what ``fully_shard`` divides has a gradient of its own, of this rank's leaf alone."""
        raise UsageError(
            f"parameter {self.layout.entries[entry].name!r} is used outside of the module that fully_shard has made a "
            "unit of, and its gradient there would be that of a part of the batch: use it in that module's forward"
        )

    def _drop_gradients(self, *, whole_too: bool = False) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        if not whole_too:
            return
        for parameter in self._gathered.values():
            parameter.grad = None
        for unit in self._units:
            for held in _groups_of(unit):
                for parameter in held.fsdp_params:
                    parameter.unsharded_accumulated_grad = None  # of earlier microbatches, in another dtype

    # -- building ------------------------------------------------------------------------------------------

    def _divided(self, source: Replica, parallelize: Parallelize, mesh: DeviceMesh) -> nn.Module:
        given = parallelize(source.model, mesh)
        model = source.model if given is None else given
        if not isinstance(model, nn.Module):
            raise UsageError(f"Job.parallelize gave {type(model).__name__}, not the model")
        return model

    def _found(self, source: Replica) -> dict[int, nn.Parameter]:
        """Every parameter after it was divided, with memory, by entry. Raises UsageError for one that is none."""
        made: dict[str, nn.Parameter] = {}
        slots: dict[str, tuple[nn.Module, str]] = {}
        hooked: dict[int, Tensor] = {}  # by entry, what has hooks that are to be carried over
        for path, module in self._model.named_modules(remove_duplicate=False):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    slots[_plain(f"{path}.{name}" if path else name)] = (module, name)
        for number, entry in enumerate(self.layout.entries):
            if entry.role not in ("grad", "frozen"):
                continue
            missing = [name for name in entry.names if name not in slots]
            if missing:
                raise UsageError(f"Job.parallelize has left no parameter {missing[0]!r} in the model")
            module, name = slots[entry.name]
            parameter = module._parameters[name]
            assert parameter is not None
            if tuple(parameter.shape) != entry.shape:
                raise UsageError(
                    f"parameter {entry.name!r} has the shape {list(parameter.shape)} after Job.parallelize, and "
                    f"{list(entry.shape)} before; only DTensors divide a parameter so that its pieces can be found"
                )
            own = nn.Parameter(torch.empty_like(parameter, device=self.device), requires_grad=parameter.requires_grad)
            made[entry.name] = own
            if is_hooked(built := source.tensors[number]) or is_hooked(built := parameter):
                hooked[number] = built
                if not isinstance(own, DTensor):
                    self._carry_hooks(number, hooked, own)
            for other in entry.names:
                at, leaf = slots[other]
                before = cast(Any, at._parameters[leaf])
                if _box_of(other, before) != _box_of(entry.name, parameter):
                    raise UsageError(f"parameters {entry.name!r} and {other!r} are tied, and are divided in two ways")
                at._parameters[leaf] = own
        self._entries_of: list[list[int]] = []  # of each unit: what it gathers
        self._gathered: dict[int, nn.Parameter] = {}  # as they are while ``fully_shard`` has them whole
        self._unit_of: dict[int, str] = {}
        entry_of = {id(made[entry.name]): number for number, entry in enumerate(self.layout.entries)
                    if entry.name in made}  # fmt: skip
        for number, unit in enumerate(self._units):
            self._watch(number, unit, entry_of, hooked)
        for number in hooked:
            raise UsageError(
                f"parameter {self.layout.entries[number].name!r} has a hook on its gradient, and is divided: no rank "
                "has the whole gradient that the hook is made for. Leave it whole (Job.parallelize), or use dp or fsdp"
            )
        found = {}
        for path, module in self._model.named_modules(remove_duplicate=False):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    found[_plain(f"{path}.{name}" if path else name)] = parameter
        return {number: found[entry.name] for number, entry in enumerate(self.layout.entries)
                if entry.role in ("grad", "frozen")}  # fmt: skip

    def _fixed_of(self, kept: set[int]) -> FixedParameters:
        """``kept``: entries whose values only an update changes."""
        told, trained = self.layout.entries, set(self.layout.trainable)
        held = [Held(one, told[entry].name, entry in trained)
                for found in (self._parameters, self._gathered) for entry, one in found.items()]  # fmt: skip
        lasting = [(told[entry].name, _in_memory(one)) for entry, one in self._parameters.items()
                   if entry in kept and entry not in self._gathered]  # fmt: skip
        units: list[tuple[nn.Module, list[tuple[str, Tensor]]]] = [
            (unit, [(told[entry].name, _in_memory(self._gathered[entry])) for entry in entries if entry in kept])
            for unit, entries in zip(self._units, self._entries_of, strict=True)
            if unit._compiled_call_impl is None  # other hooks would have it compiled anew
        ]
        return FixedParameters(self._model, held, lasting, units, self.device)

    def _data_is_not_split_otherwise(self, mesh: DeviceMesh) -> None:
        """Raises UsageError for a parameter that is divided among ranks whose leaves are not the same, but by
        ``fully_shard``: such layers would mix what the ranks compute."""
        if self._turns == 1:
            return
        axis = (mesh.mesh_dim_names or ()).index(_DATA)
        alike = set(mesh.mesh.select(axis, self._turn).flatten().tolist())
        for entry, parameter in self._parameters.items():
            if not isinstance(parameter, DTensor) or entry in self._gathered:
                continue
            if not alike.issuperset(parameter.device_mesh.mesh.flatten().tolist()):
                raise UsageError(
                    f"Job.parallelize divides {self.layout.entries[entry].name!r} over the axis {_DATA!r}, whose ranks "
                    f"compute leaves of their own, and not by fully_shard; parallelize_module takes mesh['tp'] of "
                    f"--island {_DATA}=N,tp=M, or of tp=M"
                )

    def _watch(self, number: int, unit: Any, entry_of: Mapping[int, int], hooked: dict[int, Tensor]) -> None:
        """Have a unit of ``fully_shard`` say what it exchanges, and sum by the tree."""
        unit.set_custom_all_gather(_AllGather(self, 2 * number))
        unit.set_custom_reduce_scatter(_TreeReduce(self, 2 * number + 1))
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_reduce_scatter_unused_params(True)
        sharded = {name: entry_of.get(id(parameter)) for name, parameter in unit.named_parameters()}
        told, whole = self._unit_names[number] or "the root", dict[str, Tensor]()
        unit.unshard()
        self._entries_of.append([])
        for name, parameter in unit.named_parameters():
            entry = sharded[name]
            if id(parameter) not in entry_of and entry is not None:
                self._entries_of[-1].append(entry)
                self._gathered[entry], self._unit_of[entry] = parameter, told
                whole[self.layout.entries[entry].name] = parameter
                if entry in hooked and not isinstance(parameter, DTensor):
                    self._carry_hooks(entry, hooked, parameter)
                elif parameter.requires_grad:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._landed, entry)))
        unit.reshard()
        frozen = [(parameter, name) for name, parameter in whole.items() if not parameter.requires_grad]
        for held in _groups_of(unit):
            held.post_backward = partial(_end_backward, frozen, held.post_backward)
        keep_apart(unit, told, whole)

    def _carry_hooks(self, entry: int, hooked: dict[int, Tensor], taker: Any) -> None:
        """What is whole on this rank while it is computed with has the job's hooks on its gradient."""
        carry_hooks(hooked.pop(entry), taker, self.layout.entries[entry].name)
        if taker.requires_grad:
            self._hooks.append(taker.register_post_accumulate_grad_hook(partial(self._landed, entry)))

    def _landed(self, entry: int, parameter: Tensor) -> None:
        if parameter.grad is None:  # as a hook leaves it that has an optimizer step
            raise TypeError(GRADIENTS_CHANGED)
        made_dense(parameter)
        self._touched.add(entry)

    def summed(self, output: Tensor, given: Tensor) -> None:
        """One leaf's gradients from each turn (rows of ``given``), of this rank's part, added by the tree."""
        received = torch.empty_like(given)
        dist.all_to_all_single(received, given, group=self._data_group)
        stack: list[Tensor] = []
        pieces = received.view(self._turns, -1)
        count = sum(self._valid)
        for number in range(count):
            stack.append(pieces[number])
            for _ in range(len(stack) - 1 if number == count - 1 else carries(number)):
                right = stack.pop()
                stack[-1].add_(right)
        output.copy_(stack[0])


class _Leaf(NamedTuple):
    """One leaf that a rank computes; ``of_all``: the samples of those that are computed at the same time."""

    number: int
    samples: int
    of_all: tuple[int, ...]
    task: Task

    @property
    def step(self) -> int:
        return self.task.step

    @property
    def loss_scale(self) -> float:
        return self.task.loss_scale


class _Running:
    """One block."""

    def __init__(self) -> None:
        self.open: list[_Sums] = []
        self.changed: set[int] = set()  # buffers
        self.drew = False


class _Sums:
    """What a rank has of a block's sums: its boxes of gradients, and all of the buffers' changes.

    Those of the entries ``apart`` lie together in one tensor; where that is given, only they are there.
    """

    def __init__(
        self, layout: Layout, boxes: Mapping[int, Box], apart: Collection[int], device: torch.device,
        memory: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._boxes = boxes
        self._entries: dict[int, Tensor] = {}
        self.apart = torch.empty(0, dtype=torch.uint8)
        for separate in (True,) if memory is not None else (True, False):
            entries = [entry for entry in boxes if (entry in apart) == separate]
            dtypes = [layout.groups[layout.entries[entry].group].result_dtype for entry in entries]
            sizes = [numel(boxes[entry]) * dtype.itemsize for entry, dtype in zip(entries, dtypes, strict=True)]
            places = list(accumulate((-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes), initial=0))
            held = torch.empty(places[-1], dtype=torch.uint8, device=device) if memory is None else memory
            for entry, dtype, at, size in zip(entries, dtypes, places, sizes, strict=False):
                self._entries[entry] = held[at : at + size].view(dtype)
            if separate:
                self.apart = held

    def reset(self) -> None:
        """Fill with nothing."""
        for tensor in self._entries.values():
            tensor.fill_(-0.0 if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).min)

    def entry(self, index: int) -> Tensor:
        """An entry's values, flat."""
        return self._entries[index]

    def boxed(self, index: int) -> Tensor:
        """And in the shape of the rank's box."""
        return self._entries[index].view(extents(self._boxes[index]))

    def add(self, right: _Sums) -> None:
        """The sum with ``right``, in its place."""
        for index, tensor in self._entries.items():
            add(tensor, right._entries[index])

    def norms(self, entries: Sequence[int]) -> list[float]:
        """The L2 norm of each; 0 where it is not finite, for then nothing can be compared."""
        if not entries:
            return []
        found: list[float] = torch.stack(torch._foreach_norm([self._entries[entry] for entry in entries])).tolist()
        return [norm if math.isfinite(norm) else 0.0 for norm in found]


class _AllGather:
    """What ``fully_shard`` asks of an all-gather: its own, of a unit that all ranks have come to."""

    def __init__(self, engine: ComposedEngine, number: int) -> None:
        self._engine, self._number = engine, number

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self._engine.exchanges(self._number)
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _TreeReduce:
    """What ``fully_shard`` asks of a reduce-scatter."""

    def __init__(self, engine: ComposedEngine, number: int) -> None:
        self._engine, self._number = engine, number

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._engine.exchanges(self._number)
        self._engine.summed(output_tensor, input_tensor)


class _FirstDerivatives:
    """Raises UsageError in a step that asks for gradients of gradients of what is divided, which would be nothing
    without a word. ``gathered``: parameters as they are while ``fully_shard`` has them whole."""

    def __init__(self, gathered: Iterable[nn.Parameter]) -> None:
        self._divided = set(map(id, gathered))
        self._over = False

    def __enter__(self) -> None:
        module: Any = torch.autograd
        self._run = module._engine_run_backward  # what grad, backward and Tensor.backward call
        module._engine_run_backward = self

    def __exit__(self, *_: object) -> None:
        module: Any = torch.autograd
        self._over = True  # another thread's may have come after it
        while isinstance(last := module._engine_run_backward, _FirstDerivatives) and last._over:
            module._engine_run_backward = last._run

    def __call__(
        self,
        outputs: Iterable[Tensor | GradientEdge],
        given: Any,
        retain_graph: Any,
        create_graph: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # ``torch.func.grad`` and ``vjp`` always create a graph.
        if create_graph and not self._over and self._passes_through_what_is_divided(outputs):
            raise UsageError(
                "the step asks for gradients of gradients (create_graph=True), and those that pass through what tp or "
                "Job.parallelize splits have none: use dp, or a worker of one process"
            )
        return self._run(outputs, given, retain_graph, create_graph, *args, **kwargs)

    def _passes_through_what_is_divided(self, outputs: Iterable[Tensor | GradientEdge]) -> bool:
        seen, waiting = set[Any](), list[Any]()
        for output in outputs:
            if isinstance(output, GradientEdge):
                waiting.append(output.node)
            elif self._is_divided(output):
                return True
            else:
                waiting.append(output.grad_fn)
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            kind = getattr(node, "_forward_cls", type(node))
            if kind.__module__.startswith("torch.distributed") or kind.__name__.startswith(_OF_A_UNIT):
                return True
            if (leaf := getattr(node, "variable", None)) is not None and self._is_divided(leaf):
                return True
            waiting.extend(before for before, _ in node.next_functions)
        return False

    def _is_divided(self, tensor: Tensor) -> bool:
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return isinstance(tensor, DTensor) or id(tensor) in self._divided


def _may_be_of_a_split(error: BaseException) -> bool:
    """Whether it is about sizes, or comes from ``DTensor``."""
    if not isinstance(error, (RuntimeError, TypeError, ValueError, AssertionError)):
        return False
    frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return _OF_SIZES.search(str(error)) is not None or any(map(_OF_DTENSOR.match, frames))


def _groups_of(unit: Any) -> list[Any]:
    """What ``fully_shard`` exchanges together."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one
    return [held for held in ([state._fsdp_param_group] if groups is None else groups) if held is not None]


def _end_backward(frozen: Sequence[tuple[Any, str]], post_backward: Callable[..., None], *unused: Any) -> None:
    """Have a unit's gradients exchanged."""
    with frozen_again(frozen):
        post_backward(*unused)


def _plain(name: str) -> str:
    """A parameter's name without what wrappers have put into it."""
    for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name


def _box_of(name: str, parameter: Tensor) -> Box:
    """What of a parameter this rank holds. Raises UsageError for what is not one box."""
    if not isinstance(parameter, DTensor):
        return whole(parameter.shape)
    if any(placement.is_partial() for placement in parameter.placements):
        raise UsageError(f"parameter {name!r} is a sum of what ranks hold ({parameter.placements}), not a part of it")
    chunks = cast(Any, parameter).__create_chunk_list__()
    if len(chunks) > 1:
        raise UsageError(
            f"a rank holds {len(chunks)} pieces of parameter {name!r} ({parameter.placements}); one box is what can be "
            "sent to it: divide another dimension, or fewer times"
        )
    if not chunks:
        return tuple((0, 0) for _ in parameter.shape)
    return tuple((at, at + size) for at, size in zip(chunks[0].offsets, chunks[0].sizes, strict=True))


def _in_memory(parameter: Tensor) -> Tensor:
    """What of it lies on this rank."""
    return _local(parameter) if isinstance(parameter, DTensor) else parameter


def _local(parameter: Tensor) -> Tensor:
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def _decoded(data: bytes) -> dict[int, Box]:
    rows_of: list[tuple[int, list[tuple[int, int]]]] = msgpack.decode(
        data, type=list[tuple[int, list[tuple[int, int]]]]
    )
    return {entry: tuple(box) for entry, box in rows_of}


def _holders(entry: int, boxes: Sequence[Mapping[int, Box]]) -> list[list[int]]:
    """The ranks that have copies of one box, for each that several have."""
    found: dict[Box, list[int]] = {}
    for rank, theirs in enumerate(boxes):
        found.setdefault(theirs[entry], []).append(rank)
    return [ranks for box, ranks in found.items() if len(ranks) > 1 and numel(box)]
