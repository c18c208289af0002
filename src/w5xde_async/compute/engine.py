"""One model replica on one device: blocks in, block sums out.

Gradients land in a flat float32 vector whose views are ``param.grad``; an odd leaf accumulates straight onto its left
sibling's vector, which is the tree's addition without a pass of its own. In a block's last leaf a hook on each
parameter counts its buckets down; a bucket that is complete is folded over the block's open halves and handed to
``emit`` while backward goes on. Losses stay on the device until the block ends: nothing synchronises inside a leaf.

Invariants: the result of a block is a function of (parameters, seed, step, leaf, data) alone; buffers start every leaf
at the step's values; one thread computes. What this room does not do: talk to a network, hold leases.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable

from w5xde_async.compute.batch import leaves_of, rows
from w5xde_async.compute.block import (
    GRADIENTS_CHANGED,
    Block,
    ComputedBlock,
    Emit,
    LeafSpec,
    MetricNames,
    Task,
    autocast,
    scalar_loss,
)
from w5xde_async.compute.buffers import BufferMerge
from w5xde_async.compute.compiling import CompiledStep
from w5xde_async.compute.first_gradients import FirstGradients
from w5xde_async.compute.fixed import CHANGED, Values, Watched, looks, refuse_gradients, refuse_others, renormed
from w5xde_async.compute.flops import counting_flops
from w5xde_async.compute.halving import Halving, lacks_memory
from w5xde_async.compute.program.program_job import ProgramJob
from w5xde_async.compute.transfer import Lent, Transfer
from w5xde_async.errors import LeafFailed, W5xdeError, shortened, utf8
from w5xde_async.job import Job, StepFunction, build_model, step_function, trained_otherwise
from w5xde_async.params.flat import FlatState, ResultVector, add
from w5xde_async.params.layout import Bucket, Layout, runs
from w5xde_async.params.reducer import VectorPool
from w5xde_async.plan.sampler import seed_for
from w5xde_async.plan.tree import carries
from w5xde_async.randomness import has_drawn, random_state, seed_all
from w5xde_async.segments import Opened
from w5xde_async.users_code import is_interrupt

_MIXED = re.compile(r"\b(?:Double|float64|torch\.DoubleTensor)\b")  # in what torch says of dtypes that do not match
_COPIED_BYTES = 1 << 20  # of a block's batch
_WRITTEN = (
    "the step wrote into its batch before the block had to be computed again, so that its data is no longer there; "
    "write into a copy (batch.clone())"
)
_TOO_FEW = "Expected more than 1 value per channel"


class LeafError(W5xdeError):
    """The job's own code raised on one leaf. Fields: ``leaf`` (its number in the step), ``error``, ``traceback``,
    ``vectors`` (they hold what had been emitted by then, and are to be released when that is sent), ``device_lost``
    (every call of the engine's device fails from now on), ``lacked_memory`` (known in the process that
    raised it)."""

    def __init__(
        self, leaf: int, error: BaseException, vectors: tuple[ResultVector, ...] = (), *, device_lost: bool = False
    ) -> None:
        self.lacked_memory = lacks_memory(error)
        self.vectors, self.device_lost = vectors, device_lost
        self.leaf, self.error = leaf, utf8(f"{type(error).__name__}: {error}"[:1000])
        self.traceback = LeafFailed.shown(error)
        super().__init__(f"leaf {leaf}: {self.error}")

    @classmethod
    def told(
        cls, leaf: int, error: str, traceback: str, vectors: tuple[ResultVector, ...], *, device_lost: bool = False
    ) -> LeafError:
        """One that another process raised and described."""
        made = cls(leaf, RuntimeError(), vectors, device_lost=device_lost)
        made.error, made.traceback = error[:1000], shortened(traceback)
        made.args = (f"leaf {leaf}: {made.error}",)
        return made


def choose_device(name: str) -> torch.device:
    """``auto`` takes CUDA, then MPS, then the CPU. Raises ValueError where the named device is not there."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None
    present = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not present.get(device.type, False):
        raise ValueError(f"device {name} is not on this machine")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def device_name(device: torch.device) -> str:
    """Its model, for CUDA; elsewhere its type, the machine's architecture and what its CPU can do; and its kernels."""
    kernels = ", deterministic kernels" if torch.are_deterministic_algorithms_enabled() else ""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) + kernels
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}{kernels}"


def use_deterministic_kernels() -> None:
    """In all of this process, from now on. To be called before it first multiplies matrices on CUDA."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses cuBLAS then
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)


class Engine:
    """Forward and backward of one job on one device. All methods but ``release`` run on one compute thread.

    ``source`` is a job, or a program's replica. ``spec`` is the job's own unless given: a worker takes the
    coordinator's, so that a job file edited on one machine does not change what is computed. A replica has none of its
    own. ``lent``: host memory to compute with. ``splits``: how often microbatches are halved to begin with. Without
    ``notes_draws`` no block says that it drew from torch's generators.
    """

    def __init__(
        self,
        source: Job | ProgramJob,
        spec: LeafSpec | None = None,
        *,
        device: torch.device | str = "cpu",
        bucket_bytes: int = 4 << 20,
        clock: Callable[[], float] = time.perf_counter,
        lent: Lent | None = None,
        splits: int = 0,
        notes_draws: bool = True,
    ) -> None:
        self.clock, self._notes_draws = clock, notes_draws
        self.device = torch.device(device)
        if self.device == torch.device("cuda"):  # threads are told by its number which one they are to use
            self.device = torch.device("cuda", torch.cuda.current_device())
        # glibc gives blocks back to the system one by one until it has seen a large one freed, and every result is
        # then mapped and zeroed anew. A job's dataset does that by the way; nothing else of a program would.
        torch.empty(31 << 20, dtype=torch.uint8)
        if isinstance(source, Job):
            spec = spec or LeafSpec.of(source)
            model, layout, silent = build_model(source, replica=True).to(self.device), None, None
            self._step: StepFunction = step_function(source)
        else:
            model, layout, silent = source.model.to(self.device), source.layout, source.statistics
            self._step = source.step
        assert spec is not None
        self.model, self.seed, self.precision = model, spec.seed, spec.precision
        self._microbatch, self._accumulate = spec.microbatch_samples, spec.accumulate
        self.layout = layout = layout or Layout.of(self.model, bucket_bytes=bucket_bytes)
        self._transfer = Transfer(layout, self.device, lent)
        self.incoming: FlatState = self._transfer.incoming
        self.incoming.copy_from(self.model)
        self._live = self._transfer.attach(self.model)
        self._buffers = BufferMerge(layout, self.model, self._transfer.origin, silent)
        self.child = 0  #: it computes in this process
        self.has_room = True  #: vectors are made as they are needed
        self._pool = self._transfer.host_pool
        if not self._transfer.on_host:
            self._pool = VectorPool(layout, spare=4, make=self._transfer.make_vector)
        self._parameters: list[tuple[int, Any]] = [(index, self._live[index]) for index in layout.trainable]
        self._frozen: list[tuple[Any, str]] = [
            (tensor, entry.name)
            for index, (tensor, entry) in enumerate(zip(self._live, layout.entries, strict=True))
            if isinstance(tensor, nn.Parameter) and index not in set(layout.trainable)
        ]
        self._native = self._native_views()
        self._results = [bucket.index for bucket in layout.result_buckets]
        self._grad_buckets = [b for b in layout.result_buckets if layout.groups[b.group].role == "grad"]
        self._buckets_of: dict[int, list[int]] = {}
        for bucket in self._grad_buckets:
            for index in bucket.entries:
                self._buckets_of.setdefault(index, []).append(bucket.index)
        self._own = {id(parameter) for parameter in self.model.parameters()}
        self.looks_closely = False  #: every block is looked at for parameters that the job's code has changed
        self._lost = ""  # a parameter that the job's code has changed
        changing = renormed(self.model)
        self._watched = Watched(
            (
                (entry.name, tensor)
                for entry, tensor in zip(layout.entries, self._live, strict=True)
                if isinstance(tensor, nn.Parameter) and id(tensor) not in changing
            ),
            self.device,
        )
        self._blocks, self._foreign, self._pid = 0, False, os.getpid()
        self._weights: dict[float, Tensor] = {}
        self._autocast = autocast(self.precision, self.device.type)
        self._seeded = None if self.device.type == "cpu" else self.device  # whose generator is seeded beside the CPU's
        self._keeps = False
        self._bound: ResultVector | None = None
        self._gradients: list[tuple[Any, Tensor]] = []  # what is bound: parameters and where theirs lands
        self._halving = Halving(self._microbatch, splits)
        self._size = self._halving.size  # most samples of a backward pass, in the block under way
        # On after the first block has shown that each gradient arrives once a backward pass. Where one comes in parts
        # (re-entrant checkpoints), a sum is complete only at the end, and a leaf must be summed by itself.
        self._overlap = False
        self._in_parts = False
        self._block: Block | None = None
        self._metric_names = MetricNames()
        # Seeding ``random`` and numpy costs a tenth of a small leaf, and few jobs draw from them. Where nothing leaves
        # before the block's end they are seeded only once a block has been seen to draw; that block is done again.
        self._seeds_python = len(self._grad_buckets) != 1
        self._drew = False  # a leaf has drawn from torch's generators: other kinds of devices draw other numbers
        self._first = FirstGradients(layout, self._parameters if self.device.type == "cpu" else [])
        self._hooks: list[Any] = [*self._first.hooks]
        if len(self._grad_buckets) > 1:  # a single bucket is complete when backward ends
            self._hooks += [
                parameter.register_post_accumulate_grad_hook(partial(self._landed, index))
                for index, parameter in self._parameters
            ]
        self._dense = _add_sparse_ones_once(self.model, [parameter for _, parameter in self._parameters])

    # -- parameters ----------------------------------------------------------------------------------------

    def load(self, buckets: Iterable[int]) -> None:
        """``incoming`` holds a new version, of which ``buckets`` came: make the model compute with it."""
        buckets = tuple(buckets)
        self._transfer.load(buckets)
        self.refresh(buckets)

    @property
    def can_share(self) -> bool:
        """Whether ``share`` does anything."""
        return self._transfer.can_share

    def share(self, parameters: Opened | None, vectors: Sequence[ResultVector] = ()) -> None:
        """Compute with another process's ``parameters``, as they are and as they change, and sum in ``vectors`` as long
        as one of them is free. None: with memory of its own again, which holds zeros. ``load`` follows.

        Raises Unshared: then nothing has changed.
        """
        self._transfer.share(parameters, vectors)
        self._bound, self._gradients = None, []
        for _, parameter in self._parameters:
            parameter.grad = None

    @property
    def live(self) -> FlatState:
        """What the model computes with, on its device."""
        return self._transfer.live

    @property
    def tensors(self) -> list[Tensor]:
        """The model's own tensors, in layout order, with the model's shapes and dtypes, on its device."""
        return list(self._live)

    def keep_results(self) -> None:
        """From now on blocks' results stay on the device: ``emit`` gets them there, for use before the next block."""
        self._keeps = True

    def leave_on_device(self, buckets: Iterable[int]) -> None:
        """From now on ``emit`` gets these result buckets on the device (CUDA; elsewhere nothing changes), from another
        thread, and is to be done with them when it returns."""
        self._transfer.leave(buckets)

    def unbind(self) -> None:
        """Somebody else has set the parameters' gradients."""
        self._bound = None

    def refresh(self, buckets: Iterable[int]) -> None:
        """``live`` has new values in these buckets."""
        if self._buffers.entries:
            self._buffers.refresh(entry for number in buckets for entry in self.layout.buckets[number].entries)

    def compile_step(self) -> None:
        """Let ``torch.compile`` try to make the step faster, from the next block on."""
        self._step = CompiledStep(self._step, self.device)

    def counted(self, task: Task, emit: Emit) -> tuple[ComputedBlock, int]:
        """``compute``, and the floating-point operations that it took."""
        return counting_flops(lambda: self.compute(task, emit))

    def copies(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``compute`` has a step write into a copy of its batch.

        The block may have to be computed again. Of more there is no copy, which would not be in what a worker is said
        to take: such a block is asked for again.
        """
        return self._transfer.on_host and sum([tensor.nbytes for tensor in tensors]) <= _COPIED_BYTES

    def release(self, vector: ResultVector) -> None:
        """A block's host vector has been sent; it may be written again. Any thread."""
        self._transfer.host_pool.give(vector)

    def close(self) -> None:
        """Free threads and hooks: a hook that holds the engine keeps it, and all its memory, for good. So is what was
        shared."""
        self.share(None)
        self._transfer.close()
        for hook in self._hooks:
            hook.remove()

    # -- one block -----------------------------------------------------------------------------------------

    def compute(self, task: Task, emit: Emit) -> ComputedBlock:
        """Compute one block; every bucket that changed is given to ``emit`` once. Raises LeafError.

        ``emit`` gets the bucket's number and the block's flat float32 vector of sums, in which the bucket is final.
        """
        block = Block(task, emit, self._metric_names)
        try:
            return self._compute(block)
        except BaseException as error:
            self._end_fork(error)
            lost = self._transfer.lost()
            if lost is None:
                self._transfer.wait()  # whoever hears of it may count on no further ``emit``
                raise
            # Whatever was raised, and wherever: the kernel that failed may have been launched long before.
            self._abandon(block)
            finished, said = lost
            leaf = task.start + min(finished, len(task.samples) - 1)
            raise LeafError(leaf, RuntimeError(said), tuple(block.spent), device_lost=True) from error

    def _compute(self, block: Block) -> ComputedBlock:
        began, self._block = self.clock(), block
        # Seldom, but in every block once the version counter of one has moved: what was written there may have been
        # undone, or not.
        looking = self._foreign or self.looks_closely or looks(self._blocks)
        before, written = self._watched.values() if looking else None, self._watched.written()
        again, refused = False, ""  # what the job's code raised on pieces that were too small for it
        as_it_came = _versions(block.task.tensors)
        self._halving.begin()
        while True:
            try:
                self._run(block)
                break
            except _AgainOtherwise:
                self._abandon(block)  # nothing has left: it is computed again, in the way that was found right
            except LeafError as error:
                if block.emitted or self._transfer.lost() is not None or not self._halving.refused():
                    raise
                refused = error.error
                self._overlap = False  # nothing leaves before it is known whether memory does for the larger pieces
            except (RuntimeError, MemoryError) as error:
                if not lacks_memory(error):
                    raise
                # Partial sums are lost with the vectors; what was emitted is final and stays. Halves would be beside
                # it what no single computation gives (other dropout masks, other batch statistics): not in this block.
                self._abandon(block)
                if block.emitted and not again:
                    again = True
                elif not self._halving.lacked() or block.emitted:
                    raise self._failure(block, block.leaf, error, refused) from error
            if _versions(block.task.tensors) != as_it_came:
                raise self._failure(block, block.leaf, RuntimeError(_WRITTEN))
            self._transfer.empty_cache()  # not before the error and its frames are gone, which hold what was computed
        self._end_fork()
        self._blocks += 1
        self._check_trained(block)
        if self._watched.written() != written:
            self.looks_closely = True
        if before is not None:
            self._check_parameters(block, before)
        names, values = block.reported()
        numbers = self._read([*block.losses, *values])
        losses, metrics = numbers[: len(block.losses)], numbers[len(block.losses) :]
        self._transfer.wait()
        splits = self._halving.splits
        self._halving.fitted()
        while self._dense:
            parameter = self._dense.pop()
            if not parameter._backward_hooks:  # an empty dictionary of hooks is still asked in every backward pass
                parameter._backward_hooks = None
        self._overlap = not self._in_parts and not self._halving.tries
        return ComputedBlock(
            losses=losses,
            metric_names=tuple(names),
            metrics=metrics,
            untouched=_lacking(self.layout.trainable, block.touched),
            absent=_lacking(self._results, block.emitted),
            splits=splits,
            compute_s=self.clock() - began,
            vectors=(*block.spent, block.host_vector),
            drew=self._drew,
            firsts=tuple(names.values()),
        )

    def _run(self, block: Block) -> None:
        task, transfer = block.task, self._transfer
        last = len(task.samples) - 1
        seeds = [seed_for(self.seed, task.step, task.start + index) for index in range(len(task.samples))]
        lands_directly, self._size = self._lands_directly, self._halving.size
        block.begin()
        transfer.begin()
        with random_state(quick=not self._seeds_python) as state:
            tensors = task.tensors
            if not task.own and self.copies(tensors):
                tensors = [tensor.clone() for tensor in tensors]
            batches = leaves_of(task.structure, tensors, task.samples, task.packed)
            for index, (samples, batch) in enumerate(batches):
                block.leaf = index
                onto_left = bool(index & 1) and lands_directly
                if not onto_left:
                    vector = self._pool.take()
                    block.open.append(vector)
                    transfer.guard(vector)
                    self._first.reset(vector)
                    if block.host is None:
                        block.host = vector if transfer.on_host else transfer.host_pool.take()
                self._bind(block.open[-1])
                try:
                    seed_all(seeds[index], self._seeded, python=self._seeds_python)
                    self._leaf(block, samples, transfer.batch(batch), finishing=index == last)
                except _AgainOtherwise:
                    raise
                except BaseException as error:
                    if is_interrupt(error) or lacks_memory(error):
                        raise
                    self._abandon(block)
                    raise self._failure(block, index, error) from error
                transfer.leaf_ended()
                if index != last:
                    for _ in range(carries(index) - onto_left):
                        self._fold_all(block)
            if not self._seeds_python and not state.unmoved():
                self._seeds_python = True
                raise _AgainOtherwise
        for bucket in self.layout.result_buckets:  # whatever no hook has finished
            if bucket.index not in block.emitted:
                self._finish(block, bucket)
        for vector in block.open:
            if vector is not block.host:
                self._pool.give(vector)
        block.open.clear()

    @property
    def _lands_directly(self) -> bool:
        # A leaf of several microbatches is summed by itself first; other dtypes are cast on the way.
        return self._accumulate == 1 and not self._halving.splits and not self._native and not self._in_parts

    def _leaf(self, block: Block, samples: int, batch: Any, *, finishing: bool) -> None:
        # Small models spend most of a leaf in Python: nothing is called here that has nothing to do.
        self._buffers.restore()
        size = self._size
        loss_sum: Tensor | None = None
        for begin in range(0, samples, size):
            end = min(begin + size, samples)
            count = end - begin
            piece = batch if count == samples else rows(batch, samples, begin, end)
            before = self._times_written()
            if self._autocast is None:
                loss, metrics = self._step(self.model, piece)
            else:
                with self._autocast():
                    loss, metrics = self._step(self.model, piece)
            if self._times_written() != before:
                raise TypeError(GRADIENTS_CHANGED)
            loss = scalar_loss(loss)
            if finishing and end == samples and self._overlap:
                self._check_bound()  # before anything leaves
                block.count_down(self._grad_buckets)
            self._first.begin(self._gradients)
            _run_backward(loss, self._weight(count * block.task.loss_scale))
            self._first.end()
            self._check_bound()
            if self._frozen:
                refuse_gradients(self._frozen)
            landed = [after - earlier for after, earlier in zip(self._times_written(), before, strict=True)]
            if landed != block.landed:
                self._note_landed(block, landed)
            share = loss.detach() if count == samples else loss.detach() * (count / samples)
            loss_sum = share if loss_sum is None else loss_sum + share
            block.note_metrics(metrics, count, count / samples, first=begin == 0)
        assert loss_sum is not None
        # All leaves of the first block, then the last of each.
        if self._notes_draws and not self._drew and (finishing or not self._overlap):
            self._drew = has_drawn(self.device)
        block.losses.append(loss_sum)
        if self._buffers.entries:
            self._buffers.collect(block.open[-1], samples, block.changed)
        if self._native and not (finishing and self._overlap):
            self._cast(self._grad_buckets, block)

    def _check_parameters(self, block: Block, before: Values) -> None:
        """Raises LeafError where the job's code has given the model other parameters, which nobody would train, or has
        changed their values (``before``), which nobody would have but this process."""
        self._foreign = False
        if not self._lost and (after := self._watched.values()).changed(before):
            window = self._transfer.window
            if window is not None and window.shows:
                window.restore()
                # Another version may have come there meanwhile: this block does not count then.
                before = self._watched.values()
            self._lost = next(iter(after.changed(before)), "")
        if self._lost:  # from now on every block fails: the same values, written once more, would not show
            self._foreign = True
            self._abandon(block)
            raise self._failure(block, block.leaf, TypeError(CHANGED.format(name=self._lost)))
        try:
            refuse_others(self.model, self._own)
        except TypeError as error:
            self._foreign = True
            self._abandon(block)
            raise self._failure(block, block.leaf, error) from None

    def _end_fork(self, error: BaseException | None = None) -> None:
        """A process that the job's step has forked ends where the step ends: all that follows is its parent's, whose
        connections and files it has."""
        if os.getpid() != self._pid:
            asked = error.__cause__ if isinstance(error, LeafError) else error
            code = asked.code if isinstance(asked, SystemExit) else 1
            os._exit(code if isinstance(code, int) else int(code is not None))

    def _times_written(self) -> list[int]:
        """How often each bound gradient has been written so far."""
        return [gradient._version for _, gradient in self._gradients]

    def _check_bound(self) -> None:
        """Raises TypeError where a parameter's gradient is not the one that is summed."""
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                raise TypeError(GRADIENTS_CHANGED)

    def _check_trained(self, block: Block) -> None:
        """Raises LeafError where the step has left a parameter frozen, in this process alone."""
        for index in [index for index, parameter in self._parameters if not parameter.requires_grad]:
            self._abandon(block)
            error = TypeError(trained_otherwise(self.layout.entries[index].name, begun=True))
            raise self._failure(block, block.leaf, error)

    def _note_landed(self, block: Block, landed: list[int]) -> None:
        """Take from ``landed``, how many gradients each parameter got in one backward pass, what it says of the block.

        Raises _AgainOtherwise where one came in parts for the first time.
        """
        block.landed = landed
        block.touched.update([index for (index, _), times in zip(self._parameters, landed, strict=True) if times])
        if not self._in_parts and max(landed, default=0) > 1:
            self._in_parts, self._overlap = True, False
            raise _AgainOtherwise

    def _landed(self, index: int, _: Tensor) -> None:
        block = self._block_now
        if block.pending is None:
            return
        if index in block.finished:
            self._in_parts, self._overlap = True, False  # what has left is wrong, but the next attempt will be right
            raise TypeError(
                f"parameter {self.layout.entries[index].name!r} got two gradients in one backward pass, after passes "
                "with one; use torch.utils.checkpoint with use_reentrant=False"
            )
        block.finished.add(index)
        block.touched.add(index)
        for number in self._buckets_of.get(index, ()):  # an empty parameter lies in none
            block.pending[number] -= 1
            if not block.pending[number]:
                self._finish(block, self.layout.buckets[number])

    @property
    def _block_now(self) -> Block:
        assert self._block is not None
        return self._block

    def _finish(self, block: Block, bucket: Bucket) -> None:
        """Fold one bucket over the open halves, right to left, and emit it (absent ones are only noted)."""
        if bucket.index in block.emitted:
            return
        entries = block.touched if self.layout.groups[bucket.group].role == "grad" else block.changed
        if not any(index in entries for index in bucket.entries):
            return
        if block.pending is not None:
            self._cast((bucket,), block)
        pieces = [vector.buckets[bucket.index] for vector in block.open]
        for left, right in zip(reversed(pieces[:-1]), reversed(pieces[1:]), strict=True):
            add(left, right)
        block.emitted.add(bucket.index)
        if self._keeps:
            block.emit(bucket.index, block.open[0])
        else:
            self._transfer.send(block.open[0], block.host_vector, bucket.index, block.emit)

    def _fold_all(self, block: Block) -> None:
        right = block.open.pop()
        for mine, theirs in zip(block.open[-1].groups, right.groups, strict=True):
            if mine is not None and theirs is not None:
                add(mine, theirs)
        self._pool.give(right)

    def _failure(self, block: Block, index: int, error: BaseException, refused: str = "") -> LeafError:
        """What to raise after ``_abandon``. ``refused``: why microbatches cannot be smaller."""
        leaf = block.task.start + index
        if refused:
            lacked = MemoryError(
                f"out of memory with microbatches of {self._halving.size} samples, and the job cannot compute smaller "
                f"ones: {refused[:400]}; memory: {error}"
            )
            error = lacked.with_traceback(error.__traceback__)
        elif isinstance(error, ValueError) and _TOO_FEW in str(error):  # batch norm: what to do is said with it
            samples = block.task.samples[index]
            few = f"leaf {leaf} has 1 sample" if samples == 1 else f"a part of leaf {leaf} has 1 sample"
            told = ValueError(f"{error}; {few}: leave none alone (batch_size, microbatch_size, drop_last)")
            error = told.with_traceback(error.__traceback__)
        elif (
            isinstance(error, RuntimeError)
            and _MIXED.search(str(error))
            and any(tensor.dtype == torch.float64 for tensor in block.task.tensors)
        ):
            hint = "the batch is float64: convert it with .float() in the dataset or in collate"
            error = RuntimeError(f"{error}; {hint}").with_traceback(error.__traceback__)
        return LeafError(leaf, error, tuple(block.spent))

    def _abandon(self, block: Block) -> None:
        """Backward broke off: nothing in the open vectors can be trusted."""
        self._bound = None
        if self._keeps:  # nothing has left: ``emit`` is only told where it lies
            block.emitted.clear()
        for _, parameter in self._parameters:
            parameter.grad = None
        for vector in block.open:
            if vector is not block.host:
                self._pool.give(vector)
        if block.host is not None:
            if block.emitted:
                block.spent.append(block.host)
            else:
                self.release(block.host)
            block.host = None
        block.open.clear()

    # -- gradients in other dtypes -------------------------------------------------------------------------

    def _native_views(self) -> dict[int, Tensor]:
        """Own-dtype gradient memory for trainable entries that are not float32, by entry."""
        views: dict[int, Tensor] = {}
        self._native_memory: dict[int, Tensor] = {}  # by group
        for group in self.layout.groups:
            if group.role == "grad" and group.dtype != torch.float32:
                flat = torch.zeros(group.numel, dtype=group.dtype, device=self.device)
                self._native_memory[group.index] = flat
                for index in group.entries:
                    entry = self.layout.entries[index]
                    views[index] = flat[entry.offset : entry.offset + entry.numel].view(entry.shape).data
        return views

    def _bind(self, vector: ResultVector) -> None:
        if self._bound is not vector:
            own: list[Any] = vector.gradients
            self._gradients = [(p, self._native.get(index, own[index])) for index, p in self._parameters]
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            self._bound = vector
        for flat in self._native_memory.values():
            flat.fill_(-0.0)

    def _cast(self, buckets: Sequence[Bucket], block: Block) -> None:
        """Bring own-dtype gradients into the block's float32 vector; each bucket once a leaf."""
        if self._native_memory:
            for group, begin, end in runs(self.layout, [bucket.index for bucket in buckets]):
                flat = self._native_memory.get(group)
                if flat is not None:
                    block.open[-1].group(group)[begin:end].copy_(flat[begin:end])

    # -- small things --------------------------------------------------------------------------------------

    def _weight(self, value: float) -> Tensor:
        weight = self._weights.get(value)
        if weight is None:
            if len(self._weights) > 64:
                self._weights.clear()
            weight = self._weights[value] = torch.tensor(value, dtype=torch.float32, device=self.device)
        return weight

    def _read(self, values: Sequence[Tensor | float]) -> tuple[float, ...]:
        """Their values on the host. The tensors among them are brought there together: one wait for the device."""
        if self.device.type == "cpu":
            return tuple([float(value) for value in values])
        there = [torch.as_tensor(v, device=self.device, dtype=torch.float32) for v in values if isinstance(v, Tensor)]
        read = iter(torch.stack(there).tolist())
        return tuple([next(read) if isinstance(value, Tensor) else value for value in values])


def _lacking(among: Sequence[int], there: set[int]) -> tuple[int, ...]:
    """Those of ``among`` that are not there."""
    return () if len(there) == len(among) else tuple([index for index in among if index not in there])


class _AgainOtherwise(Exception):
    """A block drew from ``random`` or numpy unseeded, or got gradients in parts: it is computed again."""


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each has been written in place, through a view or itself."""
    return [tensor._version for tensor in tensors]


def _run_backward(loss: Tensor, weight: Tensor) -> None:
    """``torch.autograd.backward(loss, weight)`` less its checks of arguments, which cost a tenth of a small leaf."""
    engine: Any = Variable._execution_engine
    engine.run_backward((loss,), (weight,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _add_sparse_ones_once(model: nn.Module, parameters: Sequence[Any]) -> list[Any]:
    """Have rows that a sparse gradient names several times summed before they land.

    A leaf that lands on its left sibling's sum would otherwise be added row by row, which is not the tree's sum. Most
    parameters lose their hook, which costs time, with their first dense gradient, and are appended to the list that is
    returned. A matrix keeps it that may have gradients of both kinds, leaf by leaf: whether sparse ones are summed is
    not to depend on which leaf came first.
    """
    dense: list[Any] = []
    always = {
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None and parameter.dim() == 2 and not _takes_all_rows(module)
    }

    def first(parameter: Any, handles: list[Any], gradient: Tensor) -> Tensor | None:
        if gradient.layout is torch.sparse_coo:
            return gradient.coalesce()
        if id(parameter) not in always:
            handles[0].remove()
            dense.append(parameter)
        return None

    for parameter in parameters:
        handles: list[Any] = []
        handles.append(parameter.register_hook(partial(first, parameter, handles)))
    return dense


def _takes_all_rows(module: nn.Module) -> bool:
    """Whether the gradients of its parameters are dense, by what it is: one of torch's modules that look nothing up."""
    looks_up = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    return type(module).__module__.startswith("torch.nn.") and not looks_up
