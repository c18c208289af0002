"""Islands for tests: ranks as real processes over loopback, many cases in one group, and what one process computes.

A test module has its cases in a dictionary ``CASES``, functions of a ``Group`` that raise where something is wrong.
They run on every rank, in order. ``outcomes`` runs them and gives what was raised. Run as a module this is one rank.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.support import forking
from torch import Tensor, nn

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import ComputedBlock, LeafSpec, Task
from w5xde_async.compute.engine import Engine
from w5xde_async.job import Job, build_model
from w5xde_async.parallel.engine import IslandEngine
from w5xde_async.parallel.group import Group, join_store, open_store
from w5xde_async.params.flat import FlatState, ResultVector, bytes_of
from w5xde_async.params.layout import Layout
from w5xde_async.plan.shares import leaves_of
from w5xde_async.plan.tree import Block

Case = Callable[[Group], None]
BUCKET_BYTES = 4096
STEP = 3
_THRESHOLD, _M_MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_", -3


def outcomes(
    module: str, size: int, folder: Path, names: Sequence[str] = (), timeout_s: float = 50.0, **environment: str
) -> dict[str, list[str]]:
    """For each case (of ``names``) what each rank says of it, "" where nothing was raised, or that it did not end."""
    names = names or list(importlib.import_module(module).CASES)
    env = {**os.environ, "PYTHONPATH": forking.SEARCHED, "OMP_NUM_THREADS": "1", **environment}
    processes: list[Any] = []
    said: list[str] = []
    try:
        for rank in range(size):
            arguments = ("tests.support.islands", module, str(rank), str(size), str(folder), *names)
            if forking.running is None:
                processes.append(
                    subprocess.Popen(
                        [forking.PYTHON, "-m", *arguments], cwd=forking.ROOT, env=env, stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT, text=True,
                    )
                )  # fmt: skip
            else:
                processes.append(forking.running.start(*arguments, cwd=forking.ROOT, env=env))
        deadline = time.monotonic() + timeout_s
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                said.append("it did not end in time")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    said.append(pipe.read()[-3000:])
                    pipe.close()
            if isinstance(process, forking.Forked):
                process.close()
    told = [_told(folder / f"{rank}.jsonl") for rank in range(size)]
    missing = "nothing; " + "\n".join(said)
    return {name: [of_rank.get(name, missing) for of_rank in told] for name in names}


def run(module: str, size: int, folder: Path, names: Sequence[str] = (), timeout_s: float = 50.0, **more: str) -> None:
    """Every case (of ``names``) on every rank, without an error."""
    wrong = {name: said for name, said in outcomes(module, size, folder, names, timeout_s, **more).items() if any(said)}
    assert not wrong, "\n".join(
        f"{name}, rank {rank}: {text}" for name, said in wrong.items() for rank, text in enumerate(said)
    )


def _told(path: Path) -> dict[str, str]:
    return dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}


def _met(rank: int, folder: Path) -> Any:
    """The first rank serves the store, and says where."""
    place = folder / "port"
    if rank == 0:
        store = open_store("127.0.0.1")
        (folder / "writing").write_text(str(store.port))
        (folder / "writing").rename(place)
        return store
    while not place.exists():
        time.sleep(0.01)
    return join_store("127.0.0.1", int(place.read_text()))


def _run(module: str, rank: int, size: int, folder: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    if _THRESHOLD in os.environ:  # which a forked process has not been started with
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, int(os.environ[_THRESHOLD]))
    group = Group(_met(rank, folder), rank, size)
    with (folder / f"{rank}.jsonl").open("w") as file:
        cases = importlib.import_module(module).CASES
        for name in names:
            try:
                cases[name](group)
                said = ""
            except BaseException:
                said = traceback.format_exc()
            file.write(json.dumps([name, said]) + "\n")
            file.flush()
            if said:  # the others may wait for this rank in the middle of the case
                os._exit(1)
    sys.stdout.flush()
    os._exit(0)


# -- cases


def task(batches: Sequence[Any], samples: Sequence[int], leaves: Sequence[int], start: int = 0, **changes: Any) -> Task:
    """The block of all ``samples``, with the tensors of ``leaves`` alone (numbers of the step)."""
    structure = flatten(batches[0])[0]
    tensors = [tensor for leaf in leaves for tensor in flatten(batches[leaf - start])[1]]
    fields: dict[str, Any] = {"step": STEP, "loss_scale": 1.0, "packed": False, **changes}
    return Task(start=start, samples=tuple(samples), structure=structure, tensors=tensors, **fields)


class Alone:
    """One process that computes all: the bits to have."""

    def __init__(self, job: Job) -> None:
        self.engine = Engine(job, bucket_bytes=BUCKET_BYTES)
        self.layout: Layout = self.engine.layout
        self.state = self.engine.incoming

    def compute(self, wanted: Task) -> tuple[ComputedBlock, dict[int, Tensor]]:
        found: dict[int, Tensor] = {}

        def emit(bucket: int, vector: ResultVector) -> None:
            found[bucket] = vector.buckets[bucket].clone()

        outcome = self.engine.compute(wanted, emit)
        for vector in outcome.vectors:
            self.engine.release(vector)
        return outcome, found


class Together:
    """One rank's engine, and what it gives out."""

    def __init__(self, engine: IslandEngine, group: Group) -> None:
        self.engine, self.group = engine, group

    def load(self, state: FlatState) -> None:
        """Receive this rank's pieces of a whole state, and nothing else of it."""
        engine = self.engine
        for bucket in engine.layout.buckets:
            places = engine.incoming(bucket.index)
            pieces = engine.shard.pieces(bucket)
            assert len(places) == len(pieces)
            for place, (index, begin, end) in zip(places, pieces, strict=True):
                place[:] = bytes_of(state.groups[index][begin:end])
        engine.load([bucket.index for bucket in engine.layout.buckets])

    def compute(
        self, batches: Sequence[Any], samples: Sequence[int], start: int = 0, **changes: Any
    ) -> tuple[ComputedBlock, dict[int, list[Tensor]]]:
        engine = self.engine
        block = Block(start, start + len(samples))
        mine = leaves_of(block, engine.share, self.group.size, engine.together)[self.group.rank]
        found: dict[int, list[Tensor]] = {}

        def emit(bucket: int, pieces: Sequence[Tensor]) -> None:
            assert bucket not in found, f"bucket {bucket} was given out twice"
            assert all(piece.dim() == 1 and piece.is_contiguous() for piece in pieces)
            found[bucket] = [piece.clone() for piece in pieces]

        outcome = engine.compute(task(batches, samples, mine, start, **changes), emit)
        engine.release(outcome.vectors)
        return outcome, found


def bits(tensor: Tensor) -> Tensor:
    """-0.0 differs from 0.0, and a NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


def same_block(
    together: Together, alone: Alone, batches: Sequence[Any], samples: Sequence[int], start: int = 0, **changes: Any
) -> tuple[ComputedBlock, ComputedBlock]:
    """Compute a block both ways. Everything that is given out must be equal, to the last bit."""
    engine, layout = together.engine, alone.layout
    whole = task(batches, samples, range(start, start + len(samples)), start, **changes)
    expected, sums = alone.compute(whole)
    outcome, pieces = together.compute(batches, samples, start, **changes)
    assert outcome.untouched == expected.untouched, (outcome.untouched, expected.untouched)
    assert outcome.absent == expected.absent, (outcome.absent, expected.absent)
    assert set(pieces) == set(sums) & engine.shard.buckets, (sorted(pieces), sorted(sums))
    for bucket, found in pieces.items():
        for piece, (index, begin, end) in zip(found, engine.shard.pieces(layout.buckets[bucket]), strict=True):
            offset = layout.buckets[bucket].offset
            wanted = sums[bucket][begin - offset : end - offset]
            names = [layout.entries[entry].name for entry in layout.buckets[bucket].entries]
            assert torch.equal(bits(piece), bits(wanted)), f"bucket {bucket} of group {index} {names}: {piece} {wanted}"
    if together.group.rank == 0:
        assert outcome.losses == expected.losses, (outcome.losses, expected.losses)
        assert outcome.metric_names == expected.metric_names
        assert repr(outcome.metrics) == repr(expected.metrics)
    else:
        assert outcome.losses == outcome.metric_names == outcome.metrics == ()
    return outcome, expected


def near_block(
    together: Together, alone: Alone, batches: Sequence[Any], samples: Sequence[int], start: int = 0, **changes: Any
) -> dict[int, list[Tensor]]:
    """Compute a block both ways. What is given out lies within 1e-5 of one process's (relative L2 distance)."""
    engine, layout = together.engine, alone.layout
    expected, sums = alone.compute(task(batches, samples, range(start, start + len(samples)), start, **changes))
    outcome, pieces = together.compute(batches, samples, start, **changes)
    assert (outcome.untouched, outcome.absent) == (expected.untouched, expected.absent)
    assert outcome.drew == expected.drew
    assert set(pieces) == set(sums) & engine.shard.buckets
    apart, size = [0.0] * len(layout.groups), [0.0] * len(layout.groups)
    for bucket, found in pieces.items():
        whole = layout.buckets[bucket]
        for piece, (index, begin, end) in zip(found, engine.shard.pieces(whole), strict=True):
            wanted = sums[bucket][begin - whole.offset : end - whole.offset]
            apart[index] += float((piece - wanted).double().square().sum())
            size[index] += float(wanted.double().square().sum())
    assert all(one <= 1e-10 * other for one, other in zip(apart, size, strict=True)), (apart, size)
    if together.group.rank == 0:
        assert len(outcome.losses) == len(expected.losses)
        assert all(abs(a - b) < 1e-5 * abs(b) for a, b in zip(outcome.losses, expected.losses, strict=True))
    else:
        assert outcome.losses == ()
    return pieces


def spread(model: nn.Module, seed: int = 5) -> None:
    """Other values than those that a model was made with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dtype.is_floating_point:
                tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype).abs() * 0.05)


def changed_state(job: Job, seed: int = 5) -> FlatState:
    """Parameters and buffers that no replica has by itself."""
    model = build_model(job, replica=True)
    spread(model, seed)
    layout = Layout.of(model, bucket_bytes=BUCKET_BYTES)
    state = FlatState(layout)
    state.copy_from(model)
    return state


def spec(job: Job) -> LeafSpec:
    return LeafSpec.of(job)


if __name__ == "__main__":
    _run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
