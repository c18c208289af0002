"""What a run will need, before it is started: memory, bytes on the network and time, by estimate.

Sizes follow from the model, the optimizer and the settings; activations and time from a few passes over the first
samples on this machine. Nothing is written and nobody is connected to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from w5xde_async.codecs.codec import Codec
from w5xde_async.compute.batch import flatten, map_tensors
from w5xde_async.compute.block import autocast
from w5xde_async.compute.engine import choose_device
from w5xde_async.compute.leaf_size import with_leaf_size
from w5xde_async.compute.program.tracing import probe_batches
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.memory_bound import memory_bound_bytes
from w5xde_async.coordinator.run.startup import limits, sampler_of
from w5xde_async.coordinator.run.strategy import update_device
from w5xde_async.errors import JobError, UsageError
from w5xde_async.job import Job, build_model, made_by, make_dense, shown_end, state_bytes, step_function
from w5xde_async.params.layout import Layout
from w5xde_async.randomness import random_state, seed_all
from w5xde_async.telemetry import wording
from w5xde_async.updates.coded import coded_down, coded_up
from w5xde_async.updates.config import UpdateConfig

_TIMED_S, _MOST_RUNS = 1.0, 20
_INDEX_BYTES = 8  # of a sample that workers have themselves
_LINES = (("1 Gbit/s", 125e6), ("100 Mbit/s", 12.5e6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """An estimate for a run with ``workers`` that are each like this machine.

    steps, step_samples, leaves  of the run (0: until it is stopped), of a step, of a step
    model_bytes, optimizer_bytes  parameters and buffers; the optimizer's state
    for_workers_bytes       most that the coordinator holds for its workers beside those (``memory_bound_bytes``)
    worker_bytes            of a worker, beside Python, torch and the model's code: activations and batches included
    activation_bytes        that a microbatch keeps until its backward pass
    up_bytes                of a result. A worker sends one a step where lines are slow or leaves fast, and at most as
                            many as it has leaves of the step (``most_results``). Under rules other than sync steps are
                            not shared out: each worker's part of what is sent for a step
    down_bytes              a worker receives for a step, batches included, in the same way
    leaf_s                  forward and backward of a leaf
    update_s                the optimizer's step: the coordinator's; a worker's own under local rules
    step_s, total_s         of both; ``total_s`` is infinite where there is no end
    """

    workers: int
    steps: int
    step_samples: int
    leaves: int
    num_parameters: int
    model_bytes: int
    optimizer_bytes: int
    for_workers_bytes: int
    worker_bytes: int
    activation_bytes: int
    up_bytes: int
    most_results: int
    down_bytes: int
    leaf_s: float
    update_s: float
    step_s: float
    device: str

    @property
    def total_s(self) -> float:
        return self.steps * self.step_s if self.steps else math.inf

    def __str__(self) -> str:
        """Five lines for people."""
        size, brief = wording.size, wording.brief
        workers = f"{self.workers} worker{'s' * (self.workers != 1)}"
        on_lines = ", ".join(f"{brief(max(self.up_bytes, self.down_bytes) / rate)} at {name}" for name, rate in _LINES)
        more = f" (up to {self.most_results} times, on fast lines)" if self.most_results > 1 else ""
        end = f", {wording.duration(self.total_s)} in all" if self.steps else ""
        rows = {
            "steps": f"{self.steps or 'until stopped'}, of {self.step_samples} samples in {_leaves(self.leaves)}; "
            f"{self.num_parameters:,} parameters",
            "coordinator": f"{size(self.model_bytes + self.optimizer_bytes)} of model and optimizer; at most "
            f"{size(self.for_workers_bytes)} more for {workers}",
            "a worker": f"{size(self.worker_bytes)} beside Python and torch, {size(self.activation_bytes)} of them "
            "activations",
            "network": f"a worker sends {size(self.up_bytes)}{more} and receives {size(self.down_bytes)} a step: "
            f"{on_lines}",
            "time": f"{brief(self.step_s)} a step{end}, without the network and what each step has beside: "
            f"{workers} like this machine ({self.device}), {brief(self.leaf_s)} a leaf, {brief(self.update_s)} "
            "an update",
        }
        return "\n".join(f"{label:<12} {text}" for label, text in rows.items())


def predict(job: Job, config: CoordinatorConfig | None = None, *, workers: int = 1, device: str = "auto") -> Prediction:
    """Estimate what ``job`` needs under ``config``. Blocks, for about as long as a few steps take.

    Raises JobError where the job cannot be built or computed, UsageError for no workers or a device that is not there.
    """
    config = config or CoordinatorConfig()
    if workers < 1:
        raise UsageError(f"workers is {workers}; give a number >= 1")
    try:
        where = choose_device(device)
    except (ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    with random_state():
        model = build_model(job, replica=True)
        job = with_leaf_size(job, model, grows=config.target_batch is not None).job
    sampler = sampler_of(job)
    epochs, max_steps = limits(job, config)
    ends = [] if epochs is None else [sampler.total_steps(epochs)]
    steps = min(ends if max_steps is None else [*ends, max_steps])
    first = sampler.size(0)
    with random_state():
        model = model.to(where)
        try:
            layout = Layout.of(model, bucket_bytes=config.bucket_bytes)
        except ValueError as error:
            raise JobError("model", str(error)) from error
        seed_all(job.seed)
        samples = min(job.microbatch_samples, first.num_samples)
        batch = made_by("dataset", lambda: probe_batches(job, [samples])[0])
        activation_bytes, microbatch_s = made_by("step", lambda: _measured(job, model, batch, where))
        # Under rules of local steps each worker steps where it computes.
        model = model if config.update.local else model.to(update_device(config) or "cpu")
        optimizer_bytes, update_s = made_by("optimizer", lambda: _updated(job, model))
        buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    sample_bytes = sum(tensor.numel() * tensor.element_size() for tensor in flatten(batch)[1]) / samples
    update = config.update
    shared = update.rule == "sync"  # each step among all; else each worker has steps of its own
    leaves = -(-first.num_leaves // workers) if shared else first.num_leaves  # of the worker that has most
    steps_at_once = 1 if shared else workers
    share = sample_bytes * leaves * job.leaf_samples
    sent = share if job.local_data is None else _INDEX_BYTES * leaves * job.leaf_samples
    rounds = update.inner_steps if update.local else 1  # steps for each time that values travel
    up = _encoded(layout, coded_up(layout), update.uplink_codec, results=True) / rounds
    down = _encoded(layout, coded_down(layout), update.downlink_codec, results=False) / rounds
    here = replace(config, max_workers=max(workers, config.min_workers))
    leaf_s = microbatch_s * -(-job.leaf_samples // job.microbatch_samples)
    return Prediction(
        workers=workers,
        steps=shown_end(steps),
        step_samples=first.num_samples,
        leaves=first.num_leaves,
        num_parameters=layout.num_parameters,
        model_bytes=layout.state_bytes + buffer_bytes - layout.buffer_bytes,
        optimizer_bytes=optimizer_bytes,
        for_workers_bytes=memory_bound_bytes(layout.vector_bytes, layout.state_bytes, first.num_leaves, here),
        worker_bytes=round(
            layout.state_bytes
            + buffer_bytes  # its own, beside the step's values
            + activation_bytes
            + config.pacing.leases_ahead * share
            + _kept_bytes(layout, update, leaves, optimizer_bytes)
        ),
        activation_bytes=activation_bytes,
        up_bytes=round(up / steps_at_once),
        most_results=leaves if shared else 1,
        down_bytes=round((down + sent) / steps_at_once),
        leaf_s=leaf_s,
        update_s=update_s,
        step_s=_step_s(leaf_s * leaves, update_s, update, steps_at_once),
        device=str(where),
    )


def _step_s(compute_s: float, update_s: float, update: UpdateConfig, at_once: int) -> float:
    """Of the run: between one step's end and the next's, where ``at_once`` workers compute steps of their own."""
    if update.local:
        return (compute_s + update_s) / at_once
    if update.rule == "sync":
        return compute_s + update_s
    return max(compute_s / at_once, update_s)


def _kept_bytes(layout: Layout, update: UpdateConfig, leaves: int, optimizer_bytes: int) -> int:
    """Of a worker beside parameters and activations: sums of the tree's levels, a result on its way, and the rule's."""
    vectors = 2 + max(leaves - 1, 0).bit_length()
    more = 0
    if not update.plain:
        more += layout.state_bytes  # what is published
        vectors += 3 if update.feedback and not update.uplink_codec.exact else 0
    if update.local:
        more += layout.state_bytes + optimizer_bytes
    return vectors * layout.vector_bytes + more


def _encoded(layout: Layout, coded: dict[int, int], codec: Codec, *, results: bool) -> int:
    """Bytes of all buckets that travel one way; of a codec whose bytes depend on the values, the most."""
    total = 0
    for bucket in layout.result_buckets:
        if bucket.index in coded:
            total += codec.encoded_nbytes(bucket.numel)
        else:
            total += layout.result_nbytes(bucket) if results else layout.state_nbytes(bucket)
    return total


def _measured(job: Job, model: nn.Module, batch: Any, device: torch.device) -> tuple[int, float]:
    """Bytes that a microbatch's forward pass keeps, and seconds of forward and backward, the fastest of a few."""
    step, in_precision = step_function(job), autocast(job.precision, device.type) or nullcontext
    batch = map_tensors(batch, lambda tensor: tensor.to(device))

    def once() -> None:
        model.zero_grad(set_to_none=True)
        with in_precision():
            loss, _ = step(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if device.type != "cpu":
            float(loss)  # waits for the device

    with _counting_saved([*model.parameters(), *model.buffers(), *flatten(batch)[1]]) as saved:
        once()
    return sum(saved.values()), _fastest(once)


def _fastest(call: Callable[[], object]) -> float:
    """Seconds that it takes, the fewest of a few times."""
    fastest, spent = math.inf, 0.0
    for _ in range(_MOST_RUNS):
        began = time.perf_counter()
        call()
        took = time.perf_counter() - began
        fastest, spent = min(fastest, took), spent + took
        if spent > _TIMED_S:
            break
    return fastest


@contextmanager
def _counting_saved(known: Iterable[Tensor]) -> Iterator[dict[int, int]]:
    """Storages that autograd keeps for the backward pass, address -> bytes; those of ``known`` are left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in known}
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address comes twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _updated(job: Job, model: nn.Module) -> tuple[int, float]:
    """Bytes of the state that the optimizer has after a step, and seconds of one."""
    optimizer = job.optimizer(model)
    make_dense(model)
    optimizer.step()
    one = next(model.parameters())

    def once() -> None:
        optimizer.step()
        if one.device.type != "cpu":
            one.flatten()[:1].tolist()  # waits for the device

    return state_bytes(optimizer), _fastest(once)


def _leaves(count: int) -> str:
    return f"{count} {'leaf' if count == 1 else 'leaves'}"
