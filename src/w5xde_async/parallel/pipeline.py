"""Pipeline islands: each rank holds one stage of the model, and leaves pass through all of them.

The model is a program in atoms (``compute.program.atoms``); a stage is a run of them, with about as many operations as
any other. A microbatch's live values go from stage to stage and their gradients back, each as it lay in memory:
kernels may give other bits for other strides. Every stage adds the gradients of its own parameters, leaf by leaf in the
tree's order, so the result has the bits of one process.

- Random numbers: a leaf's generator is seeded at the first stage, and its state goes on with the values as far as a
  stage draws. The next microbatch of the same leaf goes on from there: where dropout meets accumulation, its forward
  pass waits for the one before.
- A parameter that several stages use (a tied embedding) belongs to the first. The others have a copy for each version,
  and its gradient goes back from user to user, where each adds its own: autograd's order, microbatch by microbatch.
- Buffers: each leaf in flight has its own, as the step has them.

Every message has a header of numbers before its values: which of them there are, how they lie, and whether a leaf has
failed. From then on stages pass on the failure in place of values, so all get to the block's end and hear of it there.

The schedule is our own (``schedules``), not that of ``torch.distributed.pipelining``: docs/decisions says why.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from w5xde_async.compute.batch import flatten, rows
from w5xde_async.compute.batch import leaves_of as batches_of
from w5xde_async.compute.block import Block, ComputedBlock, LeafSpec, MetricNames, Task, autocast, scalar_loss
from w5xde_async.compute.buffers import BufferMerge
from w5xde_async.compute.engine import LeafError
from w5xde_async.compute.program.atoms import Atoms, Live, Sizes
from w5xde_async.compute.program.program_job import skeleton
from w5xde_async.errors import ProgramRefused, UsageError
from w5xde_async.parallel.engine import EmitPieces
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.recomputing import checkpointed
from w5xde_async.parallel.replica import coalesced, refuse_cast_again
from w5xde_async.parallel.report import Report, exchange, outcome_of, raise_failure
from w5xde_async.parallel.schedules import SCHEDULES, passes
from w5xde_async.parallel.shard_memory import ShardMemory, ShardPool
from w5xde_async.params.flat import add
from w5xde_async.params.layout import ALIGN_BYTES
from w5xde_async.params.shard import Shard
from w5xde_async.plan.numerics import EXACT
from w5xde_async.plan.sampler import seed_for
from w5xde_async.plan.shares import Share
from w5xde_async.plan.tree import carries
from w5xde_async.randomness import has_drawn, random_state, seed_all
from w5xde_async.users_code import is_interrupt

_ONWARD, _BACK, _AROUND = range(3)  # lanes: values, gradients, and the generator's state to the first stage


class _Slot(NamedTuple):
    """What may be in a message."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class _Piece(NamedTuple):
    """One microbatch of a block. ``leaf`` is numbered in the block, ``of`` the microbatches of its leaf."""

    leaf: int
    microbatch: int
    of: int
    samples: int
    tensors: list[Tensor | None]
    sizes: Sizes


class _Held(NamedTuple):
    """A forward pass that waits for its backward pass. ``outputs`` of the last stage are the loss."""

    inputs: list[Tensor]
    lent: list[Tensor]
    outputs: list[Any]


class PipelineEngine:
    """One rank's :class:`IslandEngine`: the stage of its own number. All methods but ``release`` run on one thread."""

    share, together, numerics = Share.ALL, 1, EXACT

    def __init__(
        self,
        atoms: Atoms,
        spec: LeafSpec,
        group: Group,
        *,
        schedule: str = "1f1b",
        stages: Sequence[range] | None = None,
        checkpoint_activations: bool = False,
    ) -> None:
        """``stages``: each rank's run of atoms (default: by operations). ``checkpoint_activations``: a stage computes
        its forward pass once more in backward. Raises UsageError where the program has fewer atoms than ranks.
        """
        if schedule not in SCHEDULES:
            raise UsageError(f"there is no schedule {schedule!r}; give one of {', '.join(SCHEDULES)}")
        if len(atoms) < group.size:
            raise UsageError(
                f"the model can be cut into {len(atoms)} parts at most, which is too few for {group.size} stages; "
                "give fewer ranks, or use fsdp"
            )
        self.layout, self.device = atoms.layout, group.device
        self._atoms, self._spec, self._group, self._schedule = atoms, spec, group, schedule
        self._autocast = autocast(spec.precision, self.device.type)
        self._metric_names = MetricNames()
        self._stages = list(stages) if stages is not None else atoms.stages(group.size)
        if [atom for run in self._stages for atom in run] != list(range(len(atoms))) or not all(self._stages):
            raise UsageError(f"stages {self._stages} do not divide {len(atoms)} atoms")
        self._run = run = self._stages[group.rank]
        self._first, self._last = group.rank == 0, group.rank == group.size - 1
        stage_of = [number for number, atoms_of in enumerate(self._stages) for _ in atoms_of]
        self._owner = [stage_of[atom] for atom in atoms.owner]
        users = {
            entry: sorted({stage_of[number] for number, atom in enumerate(atoms.atoms) if entry in atom.entries})
            for entry in range(len(self.layout.entries))
        }
        mine = {entry for number in run for entry in atoms.atoms[number].entries}
        trained = set(self.layout.trainable)
        tied = {entry for entry, stages_of in users.items() if len(stages_of) > 1 and entry in trained}
        refuse_cast_again(atoms, tied, spec.precision)
        lent = [entry for entry in tied & mine if users[entry][0] < group.rank]
        passed = [entry for entry in tied & mine if users[entry][-1] > group.rank]
        self._part = atoms.part(run, self.device, lent=lent, passed=passed)
        # Of tied parameters, whose gradient comes back to this stage, and goes on back from it.
        self._returned = sorted(entry for entry in tied if users[entry][0] <= group.rank < users[entry][-1])
        self._returns = sorted(entry for entry in tied if users[entry][0] < group.rank <= users[entry][-1])
        self._shared = [e for e, s in users.items() if any(number != self._owner[e] for number in s)]
        drawing = [
            number for number, atoms_of in enumerate(self._stages) if any(atoms.atoms[a].draws for a in atoms_of)
        ]
        self._last_drawing = max(drawing, default=0)
        self._draws_later = self._last_drawing > group.rank
        self._state_size = -(-sum(state.numel() for state in self._random()) // 8)
        self.shard = self._shard_of(group.rank)
        pinned = self.device.type == "cuda"
        self._memory = ShardMemory(self.shard, pinned=pinned)
        self._live = ShardMemory(self.shard, device=self.device) if pinned else self._memory
        self._sums = ShardPool(self.shard, device=self.device)
        self._pool = ShardPool(self.shard, pinned=True) if pinned else self._sums
        self.release = self._pool.release
        self._values = {
            entry: self._value(entry) for entry in sorted({*self._part.entries, *self._shared_here(), *self._owned()})
        }
        self._parameters: dict[int, nn.Parameter] = {}
        for entry in self._part.entries:
            if self.layout.entries[entry].role in ("grad", "frozen"):
                role = self.layout.entries[entry].role
                self._parameters[entry] = nn.Parameter(self._values[entry], requires_grad=role == "grad")
        self._part.hold(self._parameters)
        self._trained = {entry: p for entry, p in self._parameters.items() if p.requires_grad}
        self._native = {
            entry: torch.zeros_like(parameter)
            for entry, parameter in self._trained.items()
            if parameter.dtype != torch.float32
        }
        self._touched: set[int] = set()
        self._hooks: list[Any] = []
        parameter: Any
        for entry, parameter in self._trained.items():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._landed, entry)))
            self._hooks.append(parameter.register_hook(coalesced))
        self._lanes: list[_Buffers] = []
        self._compute: Callable[..., Any] = self._part
        if checkpoint_activations:
            self._compute = partial(checkpointed, self._part, self._part)

    # -- parameters ----------------------------------------------------------------------------------------

    def incoming(self, bucket: int) -> list[memoryview]:
        """Memory for this stage's pieces of a bucket."""
        return self._memory.bytes[bucket]

    @torch.no_grad()
    def load(self, buckets: Iterable[int]) -> None:
        """Compute with what has come. Entries of several stages go from their owner to all."""
        entries = sorted({entry for number in buckets for entry in self.layout.buckets[number].entries})
        if self._live is not self._memory:
            for entry in entries:
                if self._live.holds(entry):
                    self._live.entry(entry).copy_(self._memory.entry(entry))
        loaded = set(entries)
        for entry in self._shared:
            if entry in loaded:
                tensor = self._values.get(entry)
                if tensor is None:  # it is no business of this stage, but all take part
                    told = self.layout.entries[entry]
                    tensor = torch.empty(told.shape, dtype=told.dtype, device=self.device)
                if tensor.numel():
                    self._group.broadcast(tensor.view(-1), self._owner[entry])
        for lane in self._lanes:
            lane.merge.refresh(entries)

    # -- a block -------------------------------------------------------------------------------------------

    def compute(self, task: Task, emit: EmitPieces) -> ComputedBlock:
        """Compute one block together. Raises LeafError, on every rank."""
        began = time.perf_counter()
        own = Block(task, lambda *_: None, self._metric_names)
        now = _Running(task, own, emit)
        pieces = self._pieces(task)
        with random_state():
            for number, forward in passes(
                self._schedule, self._group.rank, self._group.size, [-(-n // self._spec.microbatch_samples)
                                                                      for n in task.samples]
            ):  # fmt: skip
                if forward:
                    self._forward(now, number, pieces[number])
                else:
                    self._backward(now, number, pieces[number])
        while now.sent:
            self._sent(now)
        report = Report() if now.failure is None else Report.of_failure(now.failure)
        if not now.failed:
            report = self._report(now)
        reports = exchange(self._group, report)
        memory = now.result or self._pool.take()
        if now.failed:
            now.give_up(self)
        raise_failure(reports, now.failure, (memory,))
        outcome = outcome_of(
            reports, rank=self._group.rank, compute_s=time.perf_counter() - began, vectors=(memory,)
        )  # fmt: skip
        for bucket in sorted(self.shard.buckets - set(outcome.absent) - now.emitted):
            if memory.pieces[bucket]:  # what changed of it is another stage's
                emit(bucket, memory.pieces[bucket])
        return outcome

    def close(self) -> None:
        """Let the stage go."""
        for hook in self._hooks:
            hook.remove()
        self._lanes.clear()
        for parameter in self._trained.values():
            parameter.grad = None

    def _pieces(self, task: Task) -> list[_Piece]:
        """The block's microbatches. Raises LeafError, on every rank, for one that the program was not traced for."""
        found: list[_Piece] = []
        size = self._spec.microbatch_samples
        batches = batches_of(task.structure, task.tensors, task.samples, task.packed)
        for leaf, (samples, batch) in enumerate(batches):
            bounds = [(begin, min(begin + size, samples)) for begin in range(0, samples, size)]
            for number, (begin, end) in enumerate(bounds):
                structure, tensors = flatten(rows(batch, samples, begin, end))
                try:
                    if structure != self._atoms.program.structure:
                        raise ProgramRefused("the batch has another structure, or other numbers, than was traced")
                    sizes = self._atoms.sizes(
                        [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors], precision=self._spec.precision
                    )
                except ProgramRefused as error:
                    raise LeafError(task.start + leaf, error) from error
                used = [
                    tensor.to(self.device) if index in self._part.tensors else None
                    for index, tensor in enumerate(tensors)
                ]
                found.append(_Piece(leaf, number, len(bounds), end - begin, used, sizes))
        return found

    # -- forward -------------------------------------------------------------------------------------------

    def _forward(self, now: _Running, number: int, piece: _Piece) -> None:
        rank, around = self._group.rank, bool(self._last_drawing)
        values: list[Tensor | None] = []
        state: Tensor | None = None
        if not self._first:
            slots = _slots_of(piece.sizes.live[self._run.start])
            values, state = self._receive(now, rank - 1, _ONWARD, slots, self._last_drawing >= rank)
        elif piece.microbatch and around:
            _, state = self._receive(now, self._last_drawing, _AROUND, [], True)
        outputs: list[Any] | None = None
        if not now.failed:
            try:
                outputs = self._compute_forward(now, number, piece, values, state)
            except BaseException as error:
                now.fail(error, piece)
        if not self._last:
            crossing = piece.sizes.live[self._run.stop]
            given: Sequence[Tensor | None] = [None] * len(crossing) if outputs is None else outputs[: len(crossing)]
            self._send(now, rank + 1, _ONWARD, _slots_of(crossing), given, self._draws_later)
        if around and rank == self._last_drawing and piece.microbatch + 1 < piece.of:
            self._send(now, 0, _AROUND, [], [], True)

    def _compute_forward(
        self, now: _Running, number: int, piece: _Piece, values: Sequence[Tensor | None], state: Tensor | None
    ) -> list[Any]:
        if not piece.microbatch:
            lane = now.lanes[piece.leaf] = self._take_lane()
            lane.merge.restore()
            if self._first:
                leaf = now.task.start + piece.leaf
                seed_all(seed_for(self._spec.seed, now.task.step, leaf), self.device)
        elif self._first and state is None:
            state = now.random  # another microbatch's backward pass lies between
        if state is not None:
            self._set_random(state)
        lane = now.lanes[piece.leaf]
        self._part.hold(lane.tensors())
        inputs: list[Tensor] = []
        for live, value in zip(piece.sizes.live[self._run.start], values, strict=True):
            assert value is not None
            inputs.append(value.requires_grad_(live.requires_grad))
        lent = [self._values[entry].detach().requires_grad_() for entry in self._part.lent]
        with nullcontext() if self._autocast is None else self._autocast():
            made = self._compute([*inputs, *lent], piece.tensors, piece.sizes)
        if self._first and not self._last_drawing and piece.microbatch + 1 < piece.of:
            now.random = self._packed_random()
        outputs: list[Any] = list(made)
        if self._last:
            outputs = [self._loss(now, piece, *made)]
        now.held[number] = _Held(inputs, lent, outputs)
        if piece.microbatch + 1 == piece.of:
            if self._last_drawing >= self._group.rank:
                now.drew = now.drew or has_drawn(self.device)
            lane.collect(now.task.samples[piece.leaf], now.changed)
        return outputs

    def _loss(self, now: _Running, piece: _Piece, loss: Any, metrics: Any) -> Any:
        loss = scalar_loss(loss)
        samples = now.task.samples[piece.leaf]
        share = loss.detach() if piece.of == 1 else loss.detach() * (piece.samples / samples)
        if piece.microbatch:
            now.own.losses[-1] = now.own.losses[-1] + share
        else:
            now.own.losses.append(share)
        now.own.note_metrics(metrics, piece.samples, piece.samples / samples, first=not piece.microbatch)
        return loss

    # -- backward ------------------------------------------------------------------------------------------

    def _backward(self, now: _Running, number: int, piece: _Piece) -> None:
        rank, live = self._group.rank, piece.sizes.live
        gradients: list[Tensor | None] = []
        if not self._last:
            slots = self._returning(live[self._run.stop], self._returned)
            gradients, _ = self._receive(now, rank + 1, _BACK, slots, False)
            now.onward_arrived()
        found: list[Tensor | None] | None = None
        if not now.failed:
            try:
                found = self._compute_backward(now, number, piece, gradients)
            except BaseException as error:
                now.fail(error, piece)
        if not self._first:
            slots = self._returning(live[self._run.start], self._returns)
            self._send(now, rank - 1, _BACK, slots, found or [None] * len(slots), False)
        if not now.failed and piece.microbatch + 1 == piece.of:
            self._leaf_done(now, piece)

    def _compute_backward(
        self, now: _Running, number: int, piece: _Piece, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        held = now.held.pop(number)
        if not piece.microbatch:
            self._bind(now, piece)
        relayed: dict[int, Tensor | None] = {}
        if self._last:
            weight = torch.tensor(piece.samples * now.task.loss_scale, dtype=torch.float32, device=self.device)
            torch.autograd.backward(held.outputs, [weight])
        else:
            crossing = piece.sizes.live[self._run.stop]
            wanted = [place for place, live in enumerate(crossing) if live.requires_grad]
            targets: list[Tensor | None] = [held.outputs[place] for place in wanted]
            passed = dict(zip(self._part.passed, held.outputs[len(crossing) :], strict=True))
            for entry, gradient in zip(self._returned, gradients[len(wanted) :], strict=True):
                targets.append(passed.get(entry))
                if entry not in passed:
                    relayed[entry] = gradient
            roots = [
                (target, gradient)
                for target, gradient in zip(targets, gradients, strict=True)
                if target is not None and gradient is not None and target.requires_grad
            ]
            if roots:
                torch.autograd.backward([target for target, _ in roots], [gradient for _, gradient in roots])
        found = [
            value.grad
            for live, value in zip(piece.sizes.live[self._run.start], held.inputs, strict=True)
            if live.requires_grad
        ]
        own = {entry: leaf.grad for entry, leaf in zip(self._part.lent, held.lent, strict=True)}
        return [*found, *(own.get(entry, relayed.get(entry)) for entry in self._returns)]

    def _lands_directly(self, piece: _Piece) -> bool:
        """Whether a leaf's gradients land on its left sibling's: the tree's addition without a pass of its own."""
        return bool(piece.leaf & 1) and piece.of == 1 and not self._native

    def _bind(self, now: _Running, piece: _Piece) -> None:
        """A leaf's first backward pass: its gradients are to land in memory of its own."""
        if not self._lands_directly(piece):
            now.open.append(self._sums.take())
            now.open[-1].reset()
        memory = now.open[-1]
        for entry, parameter in self._trained.items():
            native = self._native.get(entry)
            if native is not None:
                native.fill_(-0.0)
            if native is None:
                native = memory.entry(entry).view(parameter.shape) if parameter.numel() else torch.zeros_like(parameter)
            parameter.grad = native

    def _leaf_done(self, now: _Running, piece: _Piece) -> None:
        memory, leaf = now.open[-1], piece.leaf
        for entry, native in self._native.items():
            if native.numel():
                memory.entry(entry).copy_(native.view(-1))
        lane = now.lanes.pop(leaf)
        for entry, change in lane.sums.items():
            if memory.holds(entry):
                add(memory.entry(entry), change)
        self._lanes.append(lane)
        last = leaf + 1 == len(now.task.samples)
        for _ in range(len(now.open) - 1 if last else carries(leaf) - self._lands_directly(piece)):
            right = now.open.pop()
            now.open[-1].add(right)
            self._sums.give(right)
        if last:
            self._finish(now)

    def _finish(self, now: _Running) -> None:
        """This stage's part of the block is summed."""
        (total,) = now.open
        now.open.clear()
        now.touched = {entry for entry in self._touched if entry in self._trained}
        self._touched.clear()
        now.result = total
        if self._pool is not self._sums:
            now.result = self._pool.take()
            now.result.memory.copy_(total.memory)
            self._sums.give(total)
        for bucket in self.layout.result_buckets:
            entries = now.touched | now.changed
            if bucket.index in self.shard.buckets and not entries.isdisjoint(bucket.entries):
                now.emitted.add(bucket.index)
                now.emit(bucket.index, now.result.pieces[bucket.index])

    def _report(self, now: _Running) -> Report:
        names, values = now.own.reported() if self._last else ({}, [])
        changed = now.touched | now.changed
        return Report(
            leaves=list(range(now.task.start, now.task.start + len(now.task.samples))) if self._last else [],
            losses=[float(loss) for loss in now.own.losses],
            names=list(names),
            firsts=list(names.values()),
            metrics=[float(value) for value in values],
            untouched=[entry for entry in self.layout.trainable if entry not in now.touched],
            absent=[b.index for b in self.layout.result_buckets if changed.isdisjoint(b.entries)],
            drew=now.drew,
        )

    # -- messages ------------------------------------------------------------------------------------------

    def _returning(self, crossing: Sequence[Live], tied: Sequence[int]) -> list[_Slot]:
        """Gradients that come back over a cut."""
        slots = _slots_of([live for live in crossing if live.requires_grad])
        return [*slots, *(_Slot(self.layout.entries[e].dtype, self.layout.entries[e].shape) for e in tied)]

    def _send(
        self, now: _Running, to: int, lane: int, slots: Sequence[_Slot], values: Sequence[Tensor | None], random: bool
    ) -> None:
        header: list[int] = [int(now.failed)]
        packed: list[Tensor] = []
        for slot, value in zip(slots, values, strict=True):
            if value is None or now.failed:
                header += [0] * (2 + len(slot.shape))
                continue
            assert (value.dtype, tuple(value.shape)) == slot
            value = value.detach()
            lies = Live(0, value.dtype, slot.shape, tuple(value.stride()), _misaligned(value), False)
            header += [1, lies.offset, *lies.stride]
            if value.numel():
                packed.append(lies.pack(value).reshape(-1))
        numbers = torch.tensor(header, dtype=torch.int64)
        if random:
            numbers = torch.cat((numbers, self._packed_random()))
        works = [(self._group.send_numbers(numbers, to, lane), numbers)]
        works += [(self._group.send(tensor, to, lane), tensor) for tensor in packed]
        if lane == _ONWARD:
            now.onward.append(works)
            return
        now.sent.append(works)
        # When this one can be sent, the neighbour has taken what was sent so many passes ago.
        while len(now.sent) > self._group.size + 2:
            self._sent(now)

    def _sent(self, now: _Running) -> None:
        for work, _ in now.sent.popleft():
            work.wait()

    def _receive(
        self, now: _Running, source: int, lane: int, slots: Sequence[_Slot], random: bool
    ) -> tuple[list[Tensor | None], Tensor | None]:
        size = 1 + sum(2 + len(slot.shape) for slot in slots)
        numbers = torch.empty(size + (self._state_size if random else 0), dtype=torch.int64)
        self._group.receive_numbers(numbers, source, lane)
        header = numbers[:size].tolist()
        if header[0]:
            now.failed = True
        at, values = 1, list[Tensor | None]()
        for dtype, shape in slots:
            present, offset, *stride = header[at : at + 2 + len(shape)]
            at += 2 + len(shape)
            if not present:
                values.append(None)
                continue
            lies = Live(0, dtype, shape, tuple(stride), offset, False)
            packed = torch.empty(lies.packed, dtype=dtype, device=self.device)
            if packed.numel():
                self._group.receive(packed.view(-1), source, lane)
            values.append(lies.unpack(packed))
        return values, numbers[size:] if random else None

    # -- random numbers ------------------------------------------------------------------------------------

    def _random(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    def _packed_random(self) -> Tensor:
        together = torch.zeros(8 * self._state_size, dtype=torch.uint8)
        states = torch.cat(self._random())
        together[: states.numel()] = states
        return together.view(torch.int64)

    def _set_random(self, packed: Tensor) -> None:
        together, at = packed.clone().view(torch.uint8), 0
        for number, state in enumerate(self._random()):
            own = together[at : at + state.numel()].clone()
            at += state.numel()
            if number:
                torch.cuda.set_rng_state(own, self.device)
            else:
                torch.set_rng_state(own)

    # -- building ------------------------------------------------------------------------------------------

    def _owned(self) -> list[int]:
        return [entry for entry, owner in enumerate(self._owner) if owner == self._group.rank]

    def _shared_here(self) -> list[int]:
        return [entry for entry in self._shared if entry in self._part.entries or entry in self._part.lent]

    def _value(self, entry: int) -> Tensor:
        """Memory for an entry: what comes in, where it is this stage's."""
        told = self.layout.entries[entry]
        if self._live.holds(entry):
            return self._live.entry(entry).view(told.shape)
        return torch.zeros(told.shape, dtype=told.dtype, device=self.device)

    def _shard_of(self, rank: int) -> Shard:
        runs: list[tuple[int, int, int]] = []
        for group in self.layout.groups:
            entries = [self.layout.entries[index] for index in group.entries]
            ends = [*(entry.offset for entry in entries[1:]), group.numel]
            runs += [
                (group.index, entry.offset, end)
                for index, entry, end in zip(group.entries, entries, ends, strict=True)
                if self._owner[index] == rank
            ]
        return Shard.of(self.layout, runs)

    def _take_lane(self) -> _Buffers:
        return self._lanes.pop() if self._lanes else _Buffers(self)

    def _landed(self, entry: int, _: Tensor) -> None:
        self._touched.add(entry)


class _Buffers:
    """The stage's buffers for one leaf under way, and what it has made of them."""

    def __init__(self, engine: PipelineEngine) -> None:
        layout, part = engine.layout, engine._part
        self._entries = [entry for entry in part.entries if layout.entries[entry].role in ("mean", "max")]
        self._model = skeleton(layout, self._entries, engine.device)
        origin = [engine._values.get(entry, torch.empty(0)) for entry in range(len(layout.entries))]
        silent = set(engine._atoms.program.statistics) & set(self._entries)
        self.merge = BufferMerge(layout, self._model, origin, silent)
        self.merge.refresh(self._entries)
        self._layout = layout
        self.sums: dict[int, Tensor] = {}

    def tensors(self) -> dict[int, Tensor]:
        """By entry."""
        return {
            entry: self._model.get_buffer(self._layout.entries[entry].name) for entry in self._entries
        }  # fmt: skip

    def collect(self, samples: int, changed: set[int]) -> None:
        """After the leaf's last forward pass."""
        self.sums = {}
        self.merge.collect(self, samples, changed)

    def entry(self, index: int) -> Tensor:
        """Where the change of a buffer is added."""
        told = self._layout.entries[index]
        nothing = torch.iinfo(torch.int64).min if told.role == "max" else -0.0
        dtype = self._layout.groups[told.group].result_dtype
        device = self._model.get_buffer(told.name).device
        return self.sums.setdefault(index, torch.full((told.numel,), nothing, dtype=dtype, device=device))


class _Running:
    """One block at one stage."""

    def __init__(self, task: Task, own: Block, emit: EmitPieces) -> None:
        self.task, self.own, self.emit = task, own, emit
        self.failed, self.drew = False, False
        self.failure: LeafError | None = None
        self.held: dict[int, _Held] = {}  # by microbatch
        self.lanes: dict[int, _Buffers] = {}  # by leaf
        self.open: list[ShardMemory] = []
        self.touched: set[int] = set()
        self.changed: set[int] = set()
        self.emitted: set[int] = set()
        self.result: ShardMemory | None = None
        self.random: Tensor | None = None
        self.onward: deque[list[tuple[Any, Tensor]]] = deque()
        self.sent: deque[list[tuple[Any, Tensor]]] = deque()

    def fail(self, error: BaseException, piece: _Piece) -> None:
        """A leaf failed here."""
        if is_interrupt(error):
            raise error
        self.failed, self.failure = True, LeafError(self.task.start + piece.leaf, error)

    def onward_arrived(self) -> None:
        """The next stage has given an answer to what it was sent first."""
        for work, _ in self.onward.popleft():
            work.wait()

    def give_up(self, engine: PipelineEngine) -> None:
        """Nothing of the block counts."""
        engine._touched.clear()
        for memory in self.open:
            engine._sums.give(memory)
        self.held.clear()
        self.lanes.clear()  # nobody knows what is in them


def _slots_of(crossing: Sequence[Live]) -> list[_Slot]:
    return [_Slot(live.dtype, live.shape) for live in crossing]


def _misaligned(tensor: Tensor) -> int:
    """Elements between a multiple of 64 bytes and the first of a tensor."""
    return int(tensor.data_ptr() % ALIGN_BYTES) // tensor.element_size()
