"""Between host memory and the device: parameters in, result buckets out.

On the CPU there is nothing to move: the model's parameters are views of the memory that parameters are received
into, and a block's vector is sent from where it was summed. On CUDA the host side is pinned and copies run on a side
stream: a bucket's copy starts when its sum is recorded, and a copy thread waits for it, so the compute thread never
does. Waiting is sleeping: events are made to block, for one that spins takes a core from whoever launches kernels.
Memory that is shared with the coordinator is pinned where it lies, and copies go straight to and from there. MPS copies
blockingly, from ordinary memory.

A kernel of CUDA's may fail long after it was launched, and from then on every call does: nobody can ask the device how
far it came. So each leaf ends with a copy of its number into host memory, which is done only if the leaf was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from w5xde_async.compute.batch import map_tensors
from w5xde_async.compute.halving import lacks_memory
from w5xde_async.params.flat import FlatState, ResultVector, state_of
from w5xde_async.params.layout import Layout, runs
from w5xde_async.params.reducer import VectorPool
from w5xde_async.pinning import pin
from w5xde_async.segments import Opened, Window, unsupported

_cuda: Any = torch.cuda  # its streams and events are untyped
_NUMBERS = 1 << 12  # leaves are counted modulo this: more than a block has


class Lent(NamedTuple):
    """Host memory to compute with that somebody else has too: what comes in, and what goes out."""

    state: FlatState
    pool: VectorPool


class Transfer:
    """Moves one replica's memory. ``origin`` has one device tensor per entry: buffers' values at the step's start."""

    def __init__(self, layout: Layout, device: torch.device, lent: Lent | None = None) -> None:
        self.layout, self.device = layout, device
        self._cuda = device.type == "cuda"
        self.on_host = device.type == "cpu"
        self.window: Window | None = None  # what ``incoming`` lies in, where it may show another's memory
        if lent is not None:
            self.incoming = lent.state
        elif self.on_host and not unsupported():
            self.window = Window(FlatState.nbytes(layout))
            self.incoming = FlatState(layout, memory=self.window.memory)
        else:
            self.incoming = FlatState(layout, pinned=self._cuda)
        self._state = self.incoming if self.on_host else FlatState(layout, device)
        self.live = self._state
        self._source = self.incoming  # what versions are loaded from
        self.can_share = self.window is not None or (self._cuda and lent is None and not unsupported())
        self._pinned: set[int] = set()  # shared vectors, by slot
        self.origin: list[Tensor] = self._state.views
        self.host_pool = VectorPool(layout, spare=4, make=self._make_host_vector)
        if lent is not None:
            self.host_pool = lent.pool
        self._side: Any = _cuda.Stream(device) if self._cuda else None
        self._copier: ThreadPoolExecutor | None = None
        if self._cuda:  # a thread that has not said which device it means makes a context on the first one
            self._copier = ThreadPoolExecutor(
                1, thread_name_prefix="w5xde-copy", initializer=_cuda.set_device, initargs=(device,)
            )
        self._copies: list[Future[None]] = []
        self._stay: frozenset[int] = frozenset()  # buckets that are not brought to the host
        self._readers: dict[int, Future[None]] = {}  # id of a device vector -> who was given a bucket of it last
        self._ready: dict[int, Any] = {}  # id of a device vector -> event after its last copy
        # An event stands for what was recorded last, and whoever waits waits for no less when it is recorded again.
        self._summed: Any = _cuda.Event() if self._cuda else None
        self._loaded: Any = _cuda.Event(blocking=True) if self._cuda else None
        self._free: list[Any] = []  # events whose copy is over
        self._count = self._began = 0  # leaves whose end was marked, ever, and when the block began
        if self._cuda:
            self._numbers = torch.arange(_NUMBERS, device=device)
            self._reached = torch.zeros((), dtype=torch.int64, pin_memory=True)

    def attach(self, model: nn.Module) -> list[Any]:
        """Make the model's parameters views of the state; its buffers stay its own. Tensors in layout order."""
        self._state.adopt(model, buffers=False)
        if not self.on_host:
            self.load(range(len(self.layout.buckets)))
        return list(state_of(model, self.layout))

    def load(self, buckets: Iterable[int]) -> None:
        """``incoming`` is complete, and has new values in ``buckets``: bring them to the device."""
        if self.window is not None:
            self.window.restore()
        if self.on_host:
            return
        for group, begin, end in runs(self.layout, buckets):
            mine, theirs = self._state.groups[group], self._source.groups[group]
            mine[begin:end].copy_(theirs[begin:end], non_blocking=self._cuda)
        if self._cuda:
            self._loaded.record(_cuda.current_stream(self.device))
            if self._source is self.incoming:
                # The host memory will be received into again as soon as we return. The coordinator's own changes once
                # this worker has answered, or does not count any more.
                self._loaded.synchronize()

    def share(self, parameters: Opened | None, vectors: Sequence[ResultVector]) -> None:
        """See ``Engine.share``. Raises Unshared."""
        if self.window is not None:
            if parameters is None:
                self.window.hide()
            else:
                self.window.show(parameters)
            self.host_pool.lend(vectors)
        elif self.can_share:
            self._pinned.clear()
            if self._source is not self.incoming:
                with suppress(RuntimeError):  # a device that is lost copies nothing
                    self._loaded.synchronize()  # before that is unmapped which is copied
                self._source = self.incoming
            if parameters is not None:
                memory = parameters.map()
                pin(memory, self.device, read_only=True)
                self._source = FlatState(self.layout, memory=memory)
            self.host_pool.lend(vectors)

    def leave(self, buckets: Iterable[int]) -> None:
        """See ``Engine.leave_on_device``."""
        self._stay = frozenset(buckets) if self._cuda else frozenset()

    def batch(self, batch: Any) -> Any:
        """A leaf's batch on the device."""
        if self.on_host:
            return batch
        if self._cuda:
            return map_tensors(batch, lambda t: _pinned(t).to(self.device, non_blocking=True))
        return map_tensors(batch, lambda t: t.to(self.device))

    def make_vector(self, layout: Layout) -> ResultVector:
        """A vector to sum in, on the device. One that is freed is not used again before the copies out of it end."""
        vector = ResultVector(layout, self.device)
        if self._cuda:
            vector.memory.record_stream(self._side)
        return vector

    def _make_host_vector(self, layout: Layout) -> ResultVector:
        """One that copies on a side stream can go to; where no more can be pinned, they are waited for."""
        if self._cuda:
            try:
                return ResultVector(layout, pinned=True)
            except RuntimeError as error:
                if not lacks_memory(error):
                    raise
        return ResultVector(layout)

    def guard(self, vector: ResultVector) -> None:
        """``vector`` is about to be overwritten: let earlier copies out of it finish first (on the device's time), and
        whoever reads it."""
        reader = self._readers.pop(id(vector), None)
        if reader is not None:
            with suppress(BaseException):  # ``wait`` raises it
                reader.result()
        event = self._ready.pop(id(vector), None)
        if event is not None:
            _cuda.current_stream(self.device).wait_event(event)

    def send(self, vector: ResultVector, host: ResultVector, bucket: int, emit: Any) -> None:
        """Bucket ``bucket`` of ``vector`` is final: copy it to ``host`` (the same on the CPU) and emit it.

        One of those that stay is emitted as it is, in the copy thread, whose kernels go to the side stream then.
        """
        if vector is host:
            emit(bucket, host)
            return
        source, target = vector.buckets[bucket], host.buckets[bucket]
        if not self._cuda:
            target.copy_(source)
            emit(bucket, host)
            return
        assert self._copier is not None
        if bucket in self._stay:
            self._summed.record(_cuda.current_stream(self.device))
            self._side.wait_event(self._summed)
            self._readers[id(vector)] = reading = self._copier.submit(self._show, vector, bucket, emit)
            self._copies.append(reading)
            return
        if host.slot >= 0 and host.slot not in self._pinned:  # there are many, and most runs need a few of them
            self._pinned.add(host.slot)
            pin(host.memory, self.device)
        self._summed.record(_cuda.current_stream(self.device))
        self._side.wait_event(self._summed)
        copied = self._free.pop() if self._free else _cuda.Event(blocking=True)
        with _cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            copied.record(self._side)
        self._ready[id(vector)] = copied

        def deliver() -> None:
            copied.synchronize()
            self._free.append(copied)
            emit(bucket, host)

        self._copies.append(self._copier.submit(deliver))

    def _show(self, vector: ResultVector, bucket: int, emit: Any) -> None:
        with _cuda.stream(self._side):
            emit(bucket, vector)

    def wait(self) -> None:
        """Return when everything sent has been emitted. Raises what ``emit`` raised, first."""
        copies, self._copies = self._copies, []
        raised: BaseException | None = None
        for copy in copies:
            try:
                copy.result()
            except BaseException as error:
                raised = raised or error
        if raised is not None:
            raise raised

    def begin(self) -> None:
        """The first leaf of a block begins."""
        self._began = self._count

    def leaf_ended(self) -> None:
        """All kernels of a leaf have been launched."""
        if self._cuda:
            self._count += 1
            self._reached.copy_(self._numbers[self._count % _NUMBERS], non_blocking=True)

    def lost(self) -> tuple[int, str] | None:
        """Where the device fails at every call: leaves of this block that it has finished, and what it says.

        None: it works. Waits for the device, and for everything sent.
        """
        if not self._cuda:
            return None
        try:
            _cuda.synchronize(self.device)
        except RuntimeError as error:
            for copy in self._copies:
                with suppress(Exception):  # as the device does
                    copy.result()
            self._copies.clear()
            finished = (int(self._reached) - self._began) % _NUMBERS
            # A number of before this block is a large one now: this block's first leaf has not ended.
            return finished if finished <= self._count - self._began else 0, str(error).splitlines()[0]
        return None

    def empty_cache(self) -> None:
        """Give the device's unused memory back, in one piece."""
        if self._cuda:
            _cuda.empty_cache()
        elif self.device.type == "mps":
            torch.mps.empty_cache()

    def close(self) -> None:
        if self._copier is not None:
            self._copier.shutdown(wait=True)


def _pinned(tensor: Tensor) -> Tensor:
    """A pinned copy; the tensor itself where no more can be pinned: it is then copied while one waits."""
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        return tensor
