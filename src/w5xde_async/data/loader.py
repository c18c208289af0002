"""The dataset's side: leaves collated ahead of need, kept until their results are in.

A **chunk** is a run of leaves that is read in one go: one leaf of an ordinary dataset, many of a TensorDataset (whose
rows are gathered at once; all of a step's where leases are whole steps, since no lease spans two chunks). Chunks are
read by threads or processes, in order, ``prefetch_leaves`` ahead; a block that is leased pulls its own chunks forward.
A chunk is forgotten when all its leaves are finished, so a block can be leased again without reading it again.

A chunk exists from when it is asked for: opening a step costs nothing for each of its leaves, and no call costs more
than the chunks that it names.

A sample that cannot be read is left out where that is allowed, and another of its step stands in for it
(``plan.bad_samples``): its leaf is read anew.

A stream is read by one thread, in windows (``data.stream``); the indices of a step are then places in it.

Where Python code reads the dataset in a thread while the event loop computes steps, both want Python's lock, which is
handed over at every operation. Then they may better take turns (``take_turns``): nothing is read but when it is asked
for, and then some of what follows too, in one go.

Workers that have shards of the data themselves (``data.shards``) are given indices of what lies in those. Nothing is
read ahead while all workers have all of it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from w5xde_async.compute.batch import joined
from w5xde_async.data.config import DataConfig
from w5xde_async.data.reader import LeafReader, Read
from w5xde_async.data.shards import Fingerprints, shards_of
from w5xde_async.data.stream import AT_FAULT, StreamReader, stream_of
from w5xde_async.errors import JobError, LeafFailed, ReadersLost, headline
from w5xde_async.job import Job
from w5xde_async.params.flat import bytes_of
from w5xde_async.plan.bad_samples import BadSamples
from w5xde_async.plan.sampler import Sampler, StepPlan, Steps, seed_for
from w5xde_async.plan.tree import Block
from w5xde_async.runtime import thread_pool
from w5xde_async.wire.frame import SESSION_CAPS, Buffer, BufferSpec, encode
from w5xde_async.wire.messages import Lease

_CHUNK_BYTES = 4 << 20
_LEASE_BYTES = 64 << 20
#: Chunks of at most this much are read on the loop, in less time than the way to a thread and back takes; of datasets
#: of at most so much, whose tensors lie in memory even where they are mapped from a file.
_INLINE_BYTES, _INLINE_DATASET_BYTES = 1 << 20, 256 << 20
#: Small steps that are gathered in one go, and what they may have together.
_STEPS_AHEAD, _AHEAD_BYTES = 16, 128 << 10
#: What is read in one turn, beyond what is asked for: of so many steps, within so many seconds, and so much.
_TURN_STEPS, _TURN_LEAVES, _TURN_S, _TURN_BYTES = 16, 64, 0.01, 4 << 20
_MAX_BUFFERS = 2048
_STRUCTURE_BYTES = 512 << 10  # of a lease: strings travel in its header
_JOINT_BYTES = 64  # of a lease's structure, beside those of its leaves
_ROOM_BYTES = 64 << 10  # in a lease's header, for what does not come from its data


class BlockData(NamedTuple):
    """A block's batch, ready for a LEASE.

    ``buffers``: its tensors in the order of ``structure``; each spec has the shape and dtype of its tensor. ``local``:
    for a worker that reads it itself, whose samples the one buffer names. ``step_samples``: of the whole step.
    """

    structure: bytes
    packed: bool
    samples: tuple[int, ...]
    buffers: list[tuple[BufferSpec, Buffer]]
    step_samples: int
    local: bool = False

    @property
    def too_large(self) -> bool:
        """Whether its leaves have come out so much larger than those before that smaller blocks are to be leased."""
        return len(self.samples) > 1 and (
            sum(spec.nbytes for spec, _ in self.buffers) > _LEASE_BYTES
            or len(self.structure) > _STRUCTURE_BYTES + _JOINT_BYTES
            or (len(self.buffers) > _MAX_BUFFERS and not self.packed)
        )

    @property
    def header_bytes(self) -> int:
        """Of a lease's header, what comes from its data."""
        lease = Lease(0, 0, 0, 0, self.samples, 0.0, self.packed, self.structure, step_samples=self.step_samples)
        return len(encode(lease, self.buffers)[0])


class Batch(NamedTuple):
    """The data of one block as it was read: see BlockData. ``tensors`` are not to be written, but by who has them
    alone (``own``)."""

    structure: bytes
    packed: bool
    samples: tuple[int, ...]
    tensors: list[Tensor]
    own: bool = False


@dataclass(slots=True)
class _Chunk:
    first: int
    num_leaves: int
    unfinished: int
    read: Read | None = None  # once it has come
    wanted: list[Block] = field(default_factory=list)  # blocks that were asked for before this had come


class _Wanted(NamedTuple):
    """A chunk to be read: of which step, which of them, what it is to have, and how many bad samples that heeds."""

    plan: StepPlan
    number: int
    chunk: _Chunk
    indices: NDArray[np.int64]
    known: int


@dataclass(slots=True)
class _Opened:
    """A step whose leaves are needed. Chunks below ``cursor``, and those in ``early``, have been asked for."""

    plan: StepPlan
    num_chunks: int
    cursor: int = 0
    early: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)  # chunks that have not been forgotten

    def asked(self, number: int) -> bool:
        return number < self.cursor or number in self.early


class Loader:
    """Reads leaves for the open steps."""

    def __init__(
        self,
        job: Job,
        sampler: Steps,
        config: DataConfig | None = None,
        *,
        reference: str | None = None,
        make_pool: Callable[[int, str], Executor] = thread_pool,
        whole_steps: bool = False,
        bad: BadSamples | None = None,
        stream: StreamReader | None = None,
        on_ready: Callable[[], None] = lambda: None,
        on_skip: Callable[[int, str], None] = lambda sample, error: None,
        on_error: Callable[[BaseException], None] = lambda error: None,
        on_foreign: Callable[[str, int, int], None] = lambda worker, same, said: None,
    ) -> None:
        """``make_pool``: of so many threads, with such a name, where the dataset is not read by processes.

        ``bad``: samples that are left out; none is by default. ``on_skip`` is told of each further one, and why;
        ``on_foreign`` of a worker whose own data is not the run's, and how many of its shards are.
        ``stream`` reads a dataset that is one; it outlives the loader.

        ``whole_steps``: every lease is a step, however many leaves and bytes it has. ``on_ready`` is called on the
        loop's thread whenever a chunk has come, ``on_error`` with what must end the run. Neither is called before the
        first step is opened.
        """
        config = config or DataConfig()
        self._sampler, self._job = sampler, job
        self.bad = BadSamples(config.max_bad_samples) if bad is None else bad  #: samples that are left out
        self._prefetch_leaves = config.prefetch_leaves
        self._reader = LeafReader(
            job, config, reference=reference, make_pool=make_pool, stream=stream or stream_of(job)
        )
        self._gather, self._whole_steps = self._reader.gathers, whole_steps
        self._chunk_leaves = 1
        if self._gather:
            self._chunk_leaves = -(-sampler.batch_size // job.leaf_samples) if whole_steps else _chunk_leaves(job)
        self._inline_leaves = _inline_leaves(job) if self._gather else 0
        self._leaf_bytes = 0
        self._tensors_per_leaf = self._structure_bytes = 1
        self._opened: dict[int, _Opened] = {}
        self._unread: list[int] = []  # heap of steps with chunks that nobody has asked for yet, closed ones among them
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        self._missing: dict[tuple[int, Block], int] = {}  # block that was asked for too early -> chunks yet to come
        self._heard_at = 0.0  # on the loop's clock: something was read, or the first of these asked for
        self._came: list[tuple[int, Block]] = []
        self._ahead: dict[tuple[int, int], Read | Exception] = {}  # what was read with others that were asked for
        self._coming: dict[tuple[int, int], _Wanted | None] = {}  # what is being read so; who has asked for it by now
        self._turns_before = 0  # what is read in one turn is of steps before this one; 0: nobody takes turns
        self._turn: list[_Wanted] = []  # chunks that were asked for and are read in the next turn
        self._held_leaves = 0  # in the chunks that have been read and not been forgotten
        self._reading = 0
        self._most_reading = self._reader.num_readers * 2
        self._members: dict[str, tuple[int, ...]] = {}  # worker -> fingerprints of its own data
        self._own: dict[str, frozenset[int]] = {}  # worker -> the shards that it reads itself
        self._fingerprints: Fingerprints | None = None  # of our data, once they are asked for
        self._fingerprinting: asyncio.Future[Fingerprints] | None = None
        self._arrival = asyncio.Event()  # something was read
        self._closed = False
        self._on_ready, self._on_skip, self._on_error, self._on_foreign = on_ready, on_skip, on_error, on_foreign

    @property
    def leaf_bytes(self) -> int:
        """Bytes of the largest leaf's batch so far."""
        return self._leaf_bytes

    @property
    def max_block_leaves(self) -> int:
        """Most leaves that one lease may hold, by its bytes and buffers."""
        if self._gather:
            return self._chunk_leaves
        by_bytes = _LEASE_BYTES // max(self._leaf_bytes, 1)
        by_buffers = _MAX_BUFFERS // max(self._tensors_per_leaf, 1)
        return max(1, min(by_bytes, by_buffers, _STRUCTURE_BYTES // self._structure_bytes, 1024))

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample of the largest leaf so far; 0 where none was read yet."""
        return self._leaf_bytes // self._job.leaf_samples

    @property
    def can_take_turns(self) -> bool:
        """Whether ``take_turns`` changes anything: one thread of this process reads, by code that is not ours, and no
        sample is left out."""
        reader = self._reader
        one = reader.reads_here and reader.num_readers == 1 and not self._gather
        return one and type(self._sampler) is Sampler and not len(self.bad)

    def take_turns(self, before: int) -> None:
        """Read when something is asked for, and nothing else: then also some of what follows it, of steps ``before``
        this one. 0: ahead of need, whatever else goes on. What has been read stays."""
        before = before if self.can_take_turns else 0
        if before != self._turns_before:
            self._turns_before = before
            self._prefetch()

    def introduce(self, worker: str, shards: tuple[int, ...]) -> None:
        """``worker`` is here. ``shards``: the fingerprints of its own data, if it has any."""
        self._members[worker] = shards
        if shards and not self._job.streamed:
            self._fingerprint()
            if self._fingerprints is not None:
                self._compare(worker)
        self._prefetch()

    def forget(self, worker: str) -> None:
        """It has gone."""
        self._members.pop(worker, None)
        self._own.pop(worker, None)

    def unread(self, worker: str, step: int, block: Block) -> None:
        """It could not read this block: from now on it is sent what lies in those shards."""
        shards = shards_of(self._chosen(self._opened[step].plan, block), len(self._job.dataset))
        self._own[worker] = self._own.get(worker, frozenset()) - shards
        self._prefetch()

    def read_by(self, worker: str) -> str:
        """Who reads what a worker computes, for a person."""
        said, own = self._members.get(worker, ()), len(self._own.get(worker, ()))
        if not own:
            return "coordinator"
        return "itself" if own == len(said) else f"itself, {own} of {len(said)} shards"

    def _fingerprint(self) -> None:
        """Have our own fingerprints computed."""
        if self._fingerprinting is None:
            self._fingerprinting = asyncio.get_running_loop().run_in_executor(None, self._reader.fingerprints)
            self._fingerprinting.add_done_callback(self._fingerprinted)

    def _fingerprinted(self, computing: asyncio.Future[Fingerprints]) -> None:
        if self._closed or computing.cancelled():
            return
        if (error := computing.exception()) is not None:
            self._on_error(error)
            return
        self._fingerprints = computing.result()
        self._leaf_bytes = max(self._leaf_bytes, self._fingerprints.sample_bytes * self._job.leaf_samples)
        for worker in self._members:
            self._compare(worker)

    def _compare(self, worker: str) -> None:
        assert self._fingerprints is not None
        ours, theirs = self._fingerprints.shards, self._members[worker]
        if len(ours) == len(theirs):
            same = [number for number, one in enumerate(ours) if one and one == theirs[number]]
            self._own[worker] = frozenset(same)
        if theirs and len(self._own.get(worker, ())) < len(theirs):
            self._on_foreign(worker, len(self._own.get(worker, ())), len(theirs))

    def _all_read_themselves(self) -> bool:
        """Whether nobody is to be sent data."""
        return bool(self._members) and all(
            said and len(self._own.get(worker, ())) == len(said) for worker, said in self._members.items()
        )

    def _chosen(self, plan: StepPlan, block: Block) -> NDArray[np.int64]:
        end = min(block.stop * plan.leaf_samples, plan.num_samples)
        return self.bad.chosen(plan, block.start * plan.leaf_samples, end)

    def _named(self, plan: StepPlan, block: Block, own: frozenset[int]) -> BlockData | None:
        """The block for a worker that has these shards; None where it has not got all of it."""
        try:
            indices = self._chosen(plan, block)
        except ValueError:
            return None
        if not shards_of(indices, len(self._job.dataset)) <= own:
            return None
        samples = plan.leaf_sizes(*block)
        return BlockData(
            b"", False, samples, [_buffer(torch.from_numpy(np.array(indices)))], plan.num_samples, local=True
        )

    def open(self, plan: StepPlan) -> None:
        """A step's leaves will be needed."""
        if self._job.local_data is not None:  # before anybody comes who has data
            self._fingerprint()
        self._opened[plan.step] = _Opened(plan, -(-plan.num_leaves // self._chunk_leaves))
        heapq.heappush(self._unread, plan.step)
        self._prefetch()

    def close_step(self, step: int) -> None:
        """The step is committed or given up: forget what is left of it."""
        opened = self._opened.pop(step, None)
        for place in [place for place in self._ahead if place[0] <= step]:  # which nobody has asked for
            del self._ahead[place]
        self._arrival.set()
        if opened is not None:
            for number in tuple(opened.kept):
                self._forget(step, number, opened)
        self._prefetch()

    def finished(self, step: int, block: Block) -> None:
        """The block's results are in: its data will not be needed again."""
        opened = self._opened.get(step)
        for number in self._numbers(block):
            chunk = self._chunks.get((step, number))
            if chunk is not None and opened is not None:
                begin = max(block.start, chunk.first)
                chunk.unfinished -= min(block.stop, chunk.first + chunk.num_leaves) - begin
                if not chunk.unfinished:
                    self._forget(step, number, opened)
        self._prefetch()

    def came(self) -> list[tuple[int, Block]]:
        """Blocks that ``data`` had not got when it was asked, and whose last chunk has come since the last call."""
        came, self._came = self._came, []
        return came

    async def wait(self, step: int, block: Block) -> BlockData | None:
        """The block's batch, once it has been read; None where its step is over."""
        while step in self._opened and not self._closed:
            if (data := self.data(step, block)) is not None:
                return data
            self._arrival.clear()
            await self._arrival.wait()
        return None

    def data(self, step: int, block: Block, worker: str = "") -> BlockData | None:
        """The block's batch, or None while it is being read (``on_ready`` will tell, and then ``came``).

        ``worker``: for whom; it may have the data itself.
        """
        opened = self._opened[step]
        plan = opened.plan
        if (own := self._own.get(worker)) and (named := self._named(plan, block, own)) is not None:
            return named
        batch = self.batch(step, block)
        if batch is None:
            return None
        buffers = [_buffer(tensor) for tensor in batch.tensors]
        data = BlockData(batch.structure, batch.packed, batch.samples, buffers, plan.num_samples)
        if self._whole_steps and (error := _too_large_a_step(data)) is not None:
            self._on_error(error)
            return None
        return data

    def batch(self, step: int, block: Block) -> Batch | None:
        """The block's batch as it was read, or None, as ``data`` says."""
        opened = self._opened[step]
        plan = opened.plan
        chunks = []
        for number in self._numbers(block):
            if not opened.asked(number):
                opened.early.add(number)
                self._read(opened, number)
            chunks.append(self._chunks[step, number])
        if missing := [chunk for chunk in chunks if chunk.read is None]:
            if (step, block) not in self._missing:
                if not self._missing:
                    self._heard_at = asyncio.get_running_loop().time()
                self._missing[step, block] = len(missing)
                for chunk in missing:
                    chunk.wanted.append(block)
            return None
        samples = plan.leaf_sizes(*block)
        reads = [chunk.read for chunk in chunks if chunk.read is not None]
        if self._gather:
            structure, tensors = reads[0]
            begin, count = (block.start - chunks[0].first) * plan.leaf_samples, plan.samples_in(*block)
            rows = [t if t.shape[0] == count else t[begin : begin + count] for t in tensors]
            return Batch(structure, True, samples, rows)
        structure = joined([read.structure for read in reads])
        return Batch(structure, False, samples, [tensor for read in reads for tensor in read.tensors])

    def gathered(self, plan: StepPlan) -> Batch | None:
        """A whole step's batch where it can be gathered on the loop; else None. Of a step that is not open it is kept
        for nobody else."""
        block = Block(0, plan.num_leaves)
        if plan.num_leaves > min(self._inline_leaves, self._chunk_leaves) or len(self.bad):
            return None
        if plan.step in self._opened:
            return self.batch(plan.step, block)
        read = self._ahead.pop((plan.step, 0), None)
        if not isinstance(read, Read):
            read = self._gathered(plan, plan.num_leaves, plan.indices)
        return Batch(read.structure, True, plan.leaf_sizes(*block), list(read.tensors), own=True)

    def awaits(self, step: int, block: Block) -> bool:
        """Whether a block that was asked for is still being read."""
        return (step, block) in self._missing

    @property
    def silent_s(self) -> float:
        """For how long nothing has been read although somebody waits for it."""
        return asyncio.get_running_loop().time() - self._heard_at if self._missing else 0.0

    @property
    def may_draw(self) -> bool:
        """Whether what is read may wait for its turn to draw random numbers."""
        return self._reader.may_draw

    async def aclose(self) -> None:
        """Stop reading; waits for reads under way."""
        self._closed = True
        self._arrival.set()
        if self._fingerprinting is not None:
            await asyncio.wait([self._fingerprinting])
        await self._reader.aclose()

    # -- reading -------------------------------------------------------------------------------------------

    def _numbers(self, block: Block) -> range:
        """The chunks that a block lies in."""
        return range(block.start // self._chunk_leaves, (block.stop - 1) // self._chunk_leaves + 1)

    def _forget(self, step: int, number: int, opened: _Opened) -> None:
        chunk = self._chunks.pop((step, number))
        opened.kept.discard(number)
        self._held_leaves -= chunk.num_leaves if chunk.read is not None else 0
        for block in chunk.wanted:
            self._missing.pop((step, block), None)

    def _prefetch(self) -> None:
        if self._turns_before:
            return
        while self._unread and not self._closed and self._reading < self._most_reading:
            ahead = self._held_leaves + self._reading * self._chunk_leaves
            over_bytes = ahead * self._leaf_bytes > 4 * _LEASE_BYTES
            if ahead and (ahead >= max(self._prefetch_leaves, 2 * self._chunk_leaves) or over_bytes):
                return
            if self._all_read_themselves() or not self._read_next():
                return

    def _read_next(self) -> bool:
        """Read the first chunk that nobody has asked for. False where there is none."""
        while self._unread:
            opened = self._opened.get(self._unread[0])
            while opened is not None and opened.cursor < opened.num_chunks:
                number, opened.cursor = opened.cursor, opened.cursor + 1
                if number not in opened.early:
                    self._read(opened, number)
                    return True
                opened.early.discard(number)
            heapq.heappop(self._unread)
        return False

    def _read(self, opened: _Opened, number: int) -> None:
        plan, step = opened.plan, opened.plan.step
        first = number * self._chunk_leaves
        leaves = min(self._chunk_leaves, plan.num_leaves - first)
        chunk = self._chunks[step, number] = _Chunk(first, leaves, leaves)
        opened.kept.add(number)
        self._fetch_chunk(plan, number, chunk)

    def _fetch_chunk(self, plan: StepPlan, number: int, chunk: _Chunk) -> None:
        step, begin = plan.step, chunk.first * plan.leaf_samples
        end, known = begin + chunk.num_leaves * plan.leaf_samples, len(self.bad)
        try:
            indices = self.bad.chosen(plan, begin, end)
        except ValueError as error:
            self._on_error(JobError("dataset", str(error)))
            return
        wanted, place = _Wanted(plan, number, chunk, indices, known), (step, number)
        if place in self._coming:
            self._coming[place] = wanted
        elif (read := self._ahead.pop(place, None)) is not None:
            if isinstance(read, Read):
                self._keep(chunk, read)
            else:
                asyncio.get_running_loop().call_soon(self._take_in, [(wanted, read)])
        elif chunk.num_leaves <= self._inline_leaves:
            self._keep(chunk, self._gathered(plan, chunk.num_leaves, indices))
        elif self._turns_before and self.can_take_turns:
            self._turn.append(wanted)
            if len(self._turn) == 1:  # with whatever else is asked for now
                asyncio.get_running_loop().call_soon(self._take_turn)
        else:
            self._reading += 1
            reading = self._reader.read(indices, self._seed(plan, chunk.first))
            reading.add_done_callback(partial(self._was_read, [wanted], []))

    def _take_turn(self) -> None:
        try:
            if not self._closed:
                self._read_in_turn()
        except Exception as error:  # the run would wait for what was asked for
            self._on_error(error)

    def _read_in_turn(self) -> None:
        """Read what was asked for, and what follows it in its epoch."""
        turn, self._turn = self._turn, []
        plan, number = turn[-1].plan, turn[-1].number + 1
        most = min(self._prefetch_leaves, _TURN_LEAVES, _TURN_BYTES // self._leaf_bytes) if self._leaf_bytes else 0
        ahead: list[tuple[int, int]] = []
        wanted = [(one.indices, self._seed(one.plan, one.chunk.first)) for one in turn]
        following = list[tuple[NDArray[np.int64], int]]()
        for step in range(plan.step, min(plan.step + _TURN_STEPS, self._turns_before)):
            if self._sampler.epoch_of(step) != plan.epoch or len(ahead) >= most:
                break
            if step != plan.step:
                plan, number = self._sampler.plan(step), 0
            for leaf in range(number, plan.num_leaves):
                place = step, leaf
                if len(ahead) >= most:
                    break
                if not (place in self._chunks or place in self._ahead or place in self._coming):
                    ahead.append(place)
                    following.append((plan.leaf_indices(leaf), self._seed(plan, leaf)))
        reading = self._reader.read_in_turn(wanted, following, _TURN_S)
        self._coming.update(dict.fromkeys(ahead))
        self._reading += 1
        reading.add_done_callback(partial(self._was_read, turn, ahead))

    def _seed(self, plan: StepPlan, leaf: int) -> int:
        return seed_for("data", self._sampler.seed, plan.step, leaf)

    def _was_read(self, wanted: list[_Wanted], ahead: list[tuple[int, int]], reading: asyncio.Future[Any]) -> None:
        self._reading -= 1
        if reading.cancelled() or self._closed:
            return
        self._heard_at = asyncio.get_running_loop().time()
        if (error := reading.exception()) is not None:
            found: list[Any] = [error] * len(wanted)
        else:
            result = reading.result()
            found = result if isinstance(result, list) else [result]
        came = list(zip(wanted, found, strict=False))
        for place, outcome in zip_longest(ahead, found[len(wanted) :]):
            asked = self._coming.pop(place)
            if asked is not None:
                came.append((asked, outcome))
            elif outcome is not None:
                self._ahead[place] = outcome
        self._take_in(came)

    def _take_in(self, came: Sequence[tuple[_Wanted, Read | BaseException | None]]) -> None:
        """Outcomes of chunks that were asked for; None where there was no time for one."""
        if self._closed:
            return
        try:
            if any([self._came_in(wanted, outcome) for wanted, outcome in came]):
                self._arrival.set()
                self._on_ready()
                self._prefetch()
        except Exception as error:  # the run would wait for these leaves for ever
            self._on_error(error)

    def _came_in(self, wanted: _Wanted, outcome: Read | BaseException | None) -> bool:
        """What came of reading a chunk. False where it has to be read anew, or ends the run."""
        plan, number, chunk, indices, known = wanted
        there = self._chunks.get((plan.step, number)) is chunk  # else its step was closed meanwhile
        if outcome is None:
            if there:
                self._fetch_chunk(plan, number, chunk)
            return False
        if isinstance(outcome, BaseException):
            if isinstance(outcome, JobError | ReadersLost):
                self._on_error(outcome)
            elif not self._left_out(outcome):
                self._on_error(self._failure(plan, chunk.first, outcome))
            elif there:
                self._fetch_chunk(plan, number, chunk)
            return False
        begin, end = chunk.first * plan.leaf_samples, (chunk.first + chunk.num_leaves) * plan.leaf_samples
        if there and len(self.bad) > known and not np.array_equal(self.bad.chosen(plan, begin, end), indices):
            self._fetch_chunk(plan, number, chunk)  # one of these could not be read for another leaf
            return False
        if there:
            self._keep(chunk, outcome)
            self._tell(plan.step, chunk)
        else:
            self._learn(outcome, chunk.num_leaves)
        return True

    def _keep(self, chunk: _Chunk, read: Read) -> None:
        chunk.read = read
        self._held_leaves += chunk.num_leaves
        self._learn(read, chunk.num_leaves)

    def _gathered(self, plan: StepPlan, leaves: int, indices: NDArray[np.int64]) -> Read:
        """Rows of a chunk of so many leaves. Where that is a whole small step, those of the next steps of its epoch as
        well, in one go: to gather a few rows takes as long as a hundred."""
        together, steps = [indices], self._sampler
        nbytes = max(self._leaf_bytes, 1) * leaves
        if leaves == plan.num_leaves and self._leaf_bytes and type(steps) is Sampler and not len(self.bad):
            for step in range(plan.step + 1, plan.step + min(_STEPS_AHEAD, _AHEAD_BYTES // nbytes)):
                if steps.epoch_of(step) != plan.epoch or (following := steps.plan(step)).num_samples != len(indices):
                    break
                together.append(following.indices)
        if len(together) == 1:
            return self._reader.gather(indices)
        structure, rows = self._reader.gather(np.concatenate(together))
        sizes = [len(indices)] * len(together)
        cut = zip(*[torch.split_with_sizes(tensor, sizes) for tensor in rows], strict=True)
        first, *others = [Read(structure, pieces) for pieces in cut]
        self._ahead = {(plan.step + 1 + number, 0): read for number, read in enumerate(others)}
        return first

    def _left_out(self, error: BaseException) -> bool:
        """Whether what was raised is one sample's fault, and the run goes on without that."""
        sample, known = getattr(error, AT_FAULT, None), len(self.bad)
        if sample is None or isinstance(error, MemoryError) or not self.bad.found(sample):
            return False
        if len(self.bad) > known:
            where = getattr(error, "__notes__", [])[-1:]  # as a ShardedStream's records have it
            self._on_skip(sample, ", ".join((headline(LeafFailed.shown(error)), *where)))
        return True

    def _learn(self, read: Read, leaves: int) -> None:
        """What leaves are like: they may grow."""
        total = sum(tensor.numel() * tensor.element_size() for tensor in read.tensors)
        self._leaf_bytes = max(1, self._leaf_bytes, total // leaves)
        self._tensors_per_leaf = max(1, self._tensors_per_leaf, len(read.tensors))
        self._structure_bytes = max(self._structure_bytes, len(read.structure))

    def _tell(self, step: int, chunk: _Chunk) -> None:
        """Note which of the blocks that were asked for have all their chunks now."""
        for block in chunk.wanted:
            missing = self._missing.pop((step, block)) - 1
            if missing:
                self._missing[step, block] = missing
            else:
                self._came.append((step, block))
        chunk.wanted.clear()

    def _failure(self, plan: StepPlan, leaf: int, error: BaseException) -> LeafFailed:
        text, indices = LeafFailed.shown(error), plan.leaf_indices(leaf).tolist()
        sample, most = getattr(error, AT_FAULT, None), self.bad.most
        hint = f"{most} others were left out already" if most else "--max-bad-samples N leaves up to N such samples out"
        if self._job.streamed:
            hint += "; a stream's count anew each epoch"
        if sample is None:
            hint = "no single sample is at fault"
        return LeafFailed(plan.step, leaf, indices, 1, f"while reading the dataset ({hint}):\n{text}", sample=sample)


def _too_large_a_step(data: BlockData) -> JobError | None:
    """A lease that is a whole step cannot be made smaller."""
    leaves, count, most = len(data.samples), len(data.buffers), SESSION_CAPS.buffers
    if count > most:
        reason = f"a step of {leaves} leaves has {count} tensors, a lease at most {most}"
        hint = "raise microbatch_size or accumulate_grad_batches, lower batch_size, or use --update sync"
        return JobError("batch_size", reason, hint)
    nbytes, most = data.header_bytes, SESSION_CAPS.header_bytes - _ROOM_BYTES
    if nbytes <= most:
        return None
    reason = (
        f"a step of {leaves} leaves has {nbytes:,} bytes of strings, numbers and shapes outside of its tensors, a "
        f"lease at most {most:,}"
    )
    return JobError("batch_size", reason, "make tensors of them in collate=..., lower batch_size, or use --update sync")


def _buffer(tensor: Tensor) -> tuple[BufferSpec, Buffer]:
    nbytes = tensor.numel() * tensor.element_size()
    spec = BufferSpec("", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), "raw", nbytes)
    return spec, bytes_of(tensor) if nbytes else b""


def _sample_bytes(job: Job) -> int:
    return sum(t[:1].numel() * t.element_size() for t in job.dataset.tensors)


def _chunk_leaves(job: Job) -> int:
    leaves = max(1, _CHUNK_BYTES // max(1, _sample_bytes(job) * job.leaf_samples))
    return int(min(256, 1 << (leaves.bit_length() - 1)))


def _inline_leaves(job: Job) -> int:
    """Leaves of a chunk that is read on the loop."""
    nbytes = _sample_bytes(job)
    on_host = all(tensor.device.type == "cpu" for tensor in job.dataset.tensors)
    if not on_host or nbytes * len(job.dataset) > _INLINE_DATASET_BYTES:
        return 0
    return _INLINE_BYTES // max(1, nbytes * job.leaf_samples)
