"""The run as typed events, and the bus that carries them.

One stream; everything that shows or records a run subscribes to it. A subscriber that raises is removed and
named in a warning: telemetry never stops training. An event is built only when somebody listens (``bus.active``);
what is measured at intervals (``Sample``) only when somebody has asked for it (``bus.sampled``). Subscribers are
called on the event loop's thread and must return at once; whoever writes to a disk or a network hands the event to a
thread of its own.

Short steps come thousands a second. Where every subscriber has said that this will do, those that were made in one
turn of the loop are told of together, at its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial

from w5xde_async.users_code import users_code

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Event):
    """Base of what is measured about once a second, only while somebody has subscribed with ``samples=True``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """The coordinator listens. The run ends at step ``total_steps`` (0, here and in other events: when it is
    stopped); ``resumed_step`` 0 is a fresh start. ``num_samples`` and ``steps_per_epoch`` are 0 of a stream that does
    not say.

    ``host_bytes`` are resident now. Workers may add ``memory_bound_bytes``, where ``max_workers`` come, and
    ``expected_bytes`` where ``expected_workers`` do: those that the run waits for.

    ``leaves_by``: what has decided how many leaves a step has, where the job does not say.

    ``dashboard`` is where the run can be watched, ``dashboard_link`` the same with the token that it may need; both
    empty without a dashboard.
    """

    version: str
    run_name: str
    run_dir: str
    run_id: str
    term: int
    model: str
    num_parameters: int
    fingerprint: str
    dataset: str
    num_samples: int
    batch_size: int
    leaves_per_step: int
    update_rule: str
    codec: str
    precision: str
    address: str
    worker_command: str
    security: str
    resumed_step: int
    total_steps: int
    steps_per_epoch: int
    memory_bound_bytes: int
    max_workers: int = 0
    expected_bytes: int = 0
    expected_workers: int = 0
    host_bytes: int = 0
    leaves_by: str = ""
    durability: str = "checkpoint"
    dashboard: str = ""
    dashboard_link: str = ""
    join_addresses: str = ""  # those that the join file names, with commas between; "" without one


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined(Event):
    """``link``: how parameters and results travel: ``tcp`` (under TLS too), or ``shm`` for shared memory."""

    worker_id: str
    name: str
    peer: str
    device: str
    threads: int
    num_workers: int
    link: str = "tcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft(Event):
    """``reason`` says who ended it; ``clean`` is False for a worker that vanished."""

    worker_id: str
    name: str
    reason: str
    clean: bool
    leases_returned: int
    num_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultHeld(Event):
    """A block looked odd and is computed by a second worker before it counts. ``why``: as
    ``plan.audit.Why``, but for ``sampled``."""

    worker_id: str
    name: str
    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited(Event):
    """A block was computed by two workers. ``why`` as in ResultHeld, or sampled; ``relative``: their L2 distance."""

    step: int
    worker_id: str
    second_id: str
    why: str
    agreed: bool
    same_bits: bool
    relative: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerQuarantined(Event):
    """A worker's result was proven wrong. ``put_out`` is False where the run was told to keep such workers."""

    worker_id: str
    name: str
    reason: str
    put_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Event):
    """Nothing can be computed; ``reason`` says why (``0 of 2 workers``)."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted(Event):
    """One step is applied. ``step`` counts commits from 1; ``seconds`` is the time since the commit before.

    ``phases_s`` holds seconds by name: wait (for results), reduce, apply, publish, journal (waiting for the disk and
    copying), and where the coordinator computes itself data (waiting for it) and compute. Bytes are this step's.
    ``samples`` and ``leaves`` are those of every step in it; ``skipped`` of its steps had no update, and use up their
    samples all the same. ``learning_rate`` is None where no group of the optimizer has one. ``staleness`` is how old
    its results were on average, in versions; None under ``sync``, and where no result was judged since the commit
    before.
    """

    step: int
    epoch: int
    loss: float
    metrics: Mapping[str, float]
    samples: int
    leaves: int
    learning_rate: float | None
    gradient_norm: float | None
    loss_scale: float
    skipped: int
    seconds: float
    num_workers: int
    bytes_sent: int
    bytes_received: int
    phases_s: Mapping[str, float]
    staleness: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGrown(Event):
    """The commit ``step`` has shown that larger steps pay: those after ``after_step`` have ``batch_size`` samples.

    ``noise_scale``: in samples. ``rate_factor``: what this change multiplies the learning rate by. ``total_steps``:
    where the run ends now.
    """

    step: int
    after_step: int
    batch_size_before: int
    batch_size: int
    noise_scale: float
    rate_factor: float
    total_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLeftOut(Event):
    """A sample of the dataset cannot be read; others stand in for it from now on. ``bad_samples``: there are so many,
    of at most ``most``.
    """

    sample: int
    error: str
    bad_samples: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Event):
    """``best``: it is the best so far, and its state was kept (``Job.keep_best``)."""

    step: int
    metrics: Mapping[str, float]
    seconds: float
    best: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    """``pause_s`` is what the step path paid (the copy), ``seconds`` the whole write."""

    step: int
    path: str
    nbytes: int
    pause_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Event):
    """No checkpoint of ``step`` could be written, the newest is of ``safe_step`` (0: the run's beginning; None: it is
    not known, as where what was saved lies there no more). The run goes on and tries again."""

    step: int
    reason: str
    safe_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFailed(Event):
    """The journal ends with ``step`` because the disk failed ``seconds`` ago. ``safe_step``: a crash would go back
    to it, or to a later one whose checkpoint or entry the disk has taken after all; None: to a checkpoint."""

    step: int
    reason: str
    seconds: float
    safe_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRestored(Event):
    """The journal counts again, from the checkpoint of ``step``; ``seconds`` is how long it did not."""

    step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsed(Event):
    """Memory of one process: a worker's, as it last told, or the coordinator's, whose ``worker_id`` is empty.

    ``host_bytes`` are resident, ``device_bytes`` held by tensors; 0 where that is not known. Twice a minute.
    """

    worker_id: str
    name: str
    host_bytes: int
    device_bytes: int
    device_total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(Event):
    """A person should read this; the run goes on."""

    text: str


COORDINATOR = "coordinator"  #: whose share is what it has computed itself


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShare:
    """What one worker did in the whole run. Seconds and bytes are as in ``WorkerReported``."""

    name: str
    device: str
    leaves: int
    samples: int
    compute_s: float
    wait_s: float
    bytes_sent: int
    bytes_received: int
    encode_s: float = 0.0
    network_s: float = 0.0
    raw_bytes: int = 0
    encoded_bytes: int = 0

    def __add__(self, other: WorkerShare) -> WorkerShare:
        """What both did, under this one's name and device."""
        counted = [entry.name for entry in fields(self) if entry.name not in ("name", "device")]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in counted})


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best state that a run's evaluations have found: ``value`` of ``metric`` after ``step`` steps.

    ``path``: its weights, as safetensors.
    """

    metric: str
    value: float
    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(Event):
    """``outcome`` is ``finished``, ``stopped`` or ``failed``; paths are empty where nothing was written.

    ``step`` and ``samples`` are the whole run's; everything else this session's. ``loss``: of the last commit that has
    a finite one. ``leaves_in_vain`` were computed and not used: their leases had ended (stale) or another worker had
    been faster (duplicate). ``steps_skipped`` had no update, as ``skipped`` in ``StepCommitted``. ``short_steps`` were
    computed by the coordinator: too short to be sent.
    ``bad_samples`` of the dataset cannot be read and were left out, in the whole run. ``trained_s``: of ``seconds``,
    from the first leases to the last commit. ``downlink_...`` and ``residuals_lost`` are as in ``RunReported``.
    """

    outcome: str
    reason: str
    step: int
    total_steps: int
    samples: int
    session_samples: int
    loss: float | None
    metrics: Mapping[str, float]
    seconds: float
    bytes_sent: int
    bytes_received: int
    digest: str
    model_path: str
    metrics_path: str
    plot_path: str
    leaves: int = 0
    leaves_in_vain: int = 0
    leases_stale: int = 0
    leases_duplicate: int = 0
    leases_backed_up: int = 0
    shares: tuple[WorkerShare, ...] = field(default=())
    downlink_raw_bytes: int = 0
    downlink_encoded_bytes: int = 0
    residuals_lost: int = 0
    steps_skipped: int = 0
    short_steps: int = 0
    bad_samples: int = 0
    trained_s: float = 0.0
    best: Best | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReported(Sample):
    """One worker, as it stands. Counts, seconds and bytes are of this membership, from its joining on.

    ``state``: joining (it builds its model), ready, late or draining. ``waits_for`` says what keeps it from computing,
    empty while it computes. ``share`` is its part of the leaves that the present members have done. ``network_s``: the
    coordinator was in the middle of sending to it or receiving from it; that may overlap ``compute_s``. Bytes are the
    worker's: ``bytes_sent`` came to the coordinator. ``raw_bytes`` are those of its results before the codec,
    ``encoded_bytes`` after it. ``rtt_s`` and ``retransmits`` are the kernel's (None where it does not say). Memory,
    ``cpu_s`` (of the process) and ``flops_per_leaf`` are what the worker has told, 0 where it has not. ``link``: as in
    WorkerJoined. ``data_from``: who reads its samples, the coordinator or the worker itself.
    """

    worker_id: str
    name: str
    peer: str
    device: str
    threads: int
    state: str
    activity: str
    waits_for: str
    member_s: float
    leases_held: int = 0
    leaves: int = 0
    samples: int = 0
    share: float = 0.0
    leaves_per_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    network_s: float = 0.0
    encode_s: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    raw_bytes: int = 0
    encoded_bytes: int = 0
    rtt_s: float | None = None
    retransmits: int | None = None
    host_bytes: int = 0
    device_bytes: int = 0
    device_total_bytes: int = 0
    cpu_s: float = 0.0
    flops_per_leaf: float = 0.0
    link: str = "tcp"
    data_from: str = ""

    @property
    def flops_per_s(self) -> float:
        """Floating-point operations a second, by the leaves that it has done."""
        return self.flops_per_leaf * self.leaves_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReported(Sample):
    """The run as it stands; counts are of this session of the coordinator.

    ``leaves`` were applied, ``leaves_in_vain`` computed and not used; their leases had come too late (stale), been done
    by another (duplicate) or been refused by the update rule (rejected). ``host_bytes``: the coordinator's memory.
    ``refused``: links that were not let in. ``residuals_lost``: workers that vanished with what their codec had left
    out. ``downlink_*_bytes``: the versions that a codec wrote, each once. ``bad_samples``: as in ``RunFinished``.
    ``sample_bytes``: of a sample, in the largest leaf so far.
    """

    step: int
    total_steps: int
    samples: int
    num_workers: int
    num_joining: int
    leases_stale: int
    leases_duplicate: int
    leases_rejected: int
    leases_backed_up: int
    leaves: int
    leaves_in_vain: int
    bytes_sent: int
    bytes_received: int
    uptime_s: float
    host_bytes: int
    refused: int = 0
    residuals_lost: int = 0
    downlink_raw_bytes: int = 0
    downlink_encoded_bytes: int = 0
    bad_samples: int = 0
    sample_bytes: int = 0


Subscriber = Callable[[Event], None]


class Bus:
    """Delivers events to subscribers, in order of subscription, on the caller's thread.

    ``log_warnings``: for who has given no bus, and so shows nothing, what a person should read goes to the log.
    """

    def __init__(self, *, log_warnings: bool = False) -> None:
        self._log_warnings = log_warnings
        self._subscribers: list[Subscriber] = []
        self._samplers: list[Subscriber] = []  # those of them that take samples too
        self._prompt: list[Subscriber] = []  # and those that are told of everything at once
        self._pending: list[Event] = []  # what the others have not been told of yet

    @property
    def active(self) -> bool:
        """True when somebody listens."""
        return bool(self._subscribers)

    @property
    def sampled(self) -> bool:
        """True when somebody has asked for samples."""
        return bool(self._samplers)

    @property
    def prompt(self) -> bool:
        """True when somebody is to be told of every event before anything else is done."""
        return bool(self._prompt)

    def subscribe(self, subscriber: Subscriber, *, samples: bool = False, prompt: bool = True) -> Callable[[], None]:
        """Add a subscriber; the result removes it again (calling it twice is fine).

        With ``samples`` it is also given every ``Sample``: some per worker and second. Without ``prompt`` it may be
        told of a step when others have followed: in the same order, and in the same turn of the event loop.
        """
        self.deliver()
        subscriber = partial(subscriber)  # one of its own: whoever subscribes twice is told twice, and leaves twice
        self._subscribers.append(subscriber)
        if samples:
            self._samplers.append(subscriber)
        if prompt:
            self._prompt.append(subscriber)
        return lambda: self._remove(subscriber)

    def publish(self, event: Event) -> None:
        """Give ``event`` to every subscriber; one that raises is dropped, loudly."""
        self.deliver()
        if self._log_warnings and isinstance(event, Warned):
            logger.warning("%s", event.text)
        self._give([event], self._samplers if isinstance(event, Sample) else self._subscribers)

    def publish_later(self, event: Event) -> None:
        """``publish``, with the next event or by ``deliver``, which follows; at once where somebody is ``prompt``."""
        if self._prompt:
            self.publish(event)
        else:
            self._pending.append(event)

    def deliver(self) -> None:
        """Give everybody what was to be given later."""
        if self._pending:
            pending, self._pending = self._pending, []
            self._give(pending, self._subscribers)

    def _give(self, some: Sequence[Event], subscribers: Sequence[Subscriber]) -> None:
        for subscriber in tuple(subscribers):
            event = some[0]
            try:
                with users_code():
                    for event in some:
                        subscriber(event)
            except Exception:
                self._remove(subscriber)
                logger.exception("telemetry subscriber removed after an error event=%s", type(event).__name__)

    def _remove(self, subscriber: Subscriber) -> None:
        for subscribers in (self._subscribers, self._samplers, self._prompt):
            if subscriber in subscribers:
                subscribers.remove(subscriber)
