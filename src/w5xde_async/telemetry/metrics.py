"""The run for Prometheus: a subscriber that counts, and a collector that a scrape reads. See docs/metrics.md.

An event costs a few additions; what Prometheus wants to see is built at a scrape. The registry is one of its own, so
that two coordinators in a process, or one in somebody's application, do not meet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from w5xde_async.telemetry.events import (
    Audited,
    BatchGrown,
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    Event,
    JournalFailed,
    JournalRestored,
    ResultHeld,
    RunFinished,
    RunReported,
    RunStarted,
    StepCommitted,
    WorkerJoined,
    WorkerLeft,
    WorkerQuarantined,
    WorkerReported,
)

__all__ = ["Metrics"]

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PREFIX = "w5xde_"


class Metrics(Collector):
    """Subscribe with ``samples=True``; ``text()`` is what ``/metrics`` answers."""

    def __init__(self) -> None:
        self._run: RunStarted | None = None
        self._total_steps = 0
        self._step: StepCommitted | None = None
        self._report: RunReported | None = None
        self._workers: dict[str, WorkerReported] = {}
        self._joining: set[str] = set()  # reported since the last report of the run
        self._evaluated: dict[str, float] = {}
        self._steps = self._skipped = self._samples = self._joined = self._lost = self._left = 0
        self._step_counts = [0] * (len(_STEP_S) + 1)
        self._phases_s: dict[str, float] = {}
        self._seconds = 0.0
        self._saved: CheckpointSaved | None = None
        self._num_saved = self._num_failed = 0
        self._journal_s: float | None = None  # for how long the journal has not counted; None: it does
        self._outcome = ""
        self._held: dict[str, int] = {}
        self._audits = {True: 0, False: 0}
        self._quarantined = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def __call__(self, event: Event) -> None:
        if type(event) is StepCommitted:
            self._step = event
            self._steps += 1
            self._samples += event.samples
            self._skipped += event.skipped
            self._seconds += event.seconds
            self._step_counts[bisect_left(_STEP_S, event.seconds)] += 1
            phases = self._phases_s
            for name, seconds in event.phases_s.items():
                phases[name] = phases.get(name, 0.0) + seconds
        elif type(event) is WorkerReported:
            self._workers[event.worker_id] = event
            if event.state == "joining":
                self._joining.add(event.worker_id)
        elif type(event) is RunReported:
            self._report = event
            self._forget_joining()
        else:
            self._rare(event)

    def _rare(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._run, self._total_steps = event, event.total_steps
            case BatchGrown():
                self._total_steps = event.total_steps
            case WorkerJoined():
                self._joined += 1
            case WorkerLeft():
                self._workers.pop(event.worker_id, None)
                self._left += event.clean
                self._lost += not event.clean
            case ResultHeld():
                self._held[event.why] = self._held.get(event.why, 0) + 1
            case Audited():
                self._audits[event.agreed] += 1
            case WorkerQuarantined():
                self._quarantined += 1
            case Evaluated():
                self._evaluated.update(event.metrics)
            case CheckpointSaved():
                self._saved, self._num_saved = event, self._num_saved + 1
            case CheckpointFailed():
                self._num_failed += 1
            case JournalFailed():
                self._journal_s = event.seconds
            case JournalRestored():
                self._journal_s = None
            case RunFinished():
                self._outcome = event.outcome

    def _forget_joining(self) -> None:
        """Of those that end before they are members nobody tells: they are not reported any more."""
        for key in [key for key, worker in self._workers.items() if worker.state == "joining"]:
            if key not in self._joining:
                del self._workers[key]
        self._joining.clear()

    # -- a scrape ------------------------------------------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        """What the registry asks for at a scrape."""
        yield from self._of_run()
        yield from self._of_steps()
        yield from self._of_checkpoints()
        yield from self._of_judgement()
        if self._report is not None:
            yield from self._of_work(self._report)
        yield from self._of_workers(list(self._workers.values()))

    def _of_run(self) -> Iterator[Metric]:
        run = self._run
        if run is None:
            return
        yield InfoMetricFamily(
            f"{_PREFIX}run", "What runs.",
            {"run": run.run_name, "run_id": run.run_id, "version": run.version, "model": run.model,
             "update_rule": run.update_rule, "codec": run.codec, "precision": run.precision},
        )  # fmt: skip
        yield _gauge("run_term", "Incarnation of the coordinator.", run.term)
        yield _gauge("run_steps_target", "Step at which the run ends.", self._total_steps)
        yield _gauge("model_parameters", "Parameters of the model.", run.num_parameters)
        yield _gauge("run_finished", "1 once the run has ended, whatever the outcome.", float(bool(self._outcome)))

    def _of_judgement(self) -> Iterator[Metric]:
        held = CounterMetricFamily(
            f"{_PREFIX}results_held", "Results that a second worker computed because they looked odd.", labels=("why",)
        )
        for why, count in sorted(self._held.items()):
            held.add_metric((why,), count)
        yield held
        yield _counter("audits_agreed", "Results that two workers computed alike.", self._audits[True])
        yield _counter("audits_disagreed", "Results that two workers did not compute alike.", self._audits[False])
        yield _counter("workers_quarantined", "Workers whose results were proven wrong.", self._quarantined)

    def _of_steps(self) -> Iterator[Metric]:
        yield _counter("steps", "Steps committed by this coordinator.", self._steps)
        yield _counter("steps_skipped", "Steps without an update: their gradient was not finite.", self._skipped)
        yield _counter("samples", "Samples applied by this coordinator.", self._samples)
        buckets, total = [], 0
        for bound, count in zip((*map(str, _STEP_S), "+Inf"), self._step_counts, strict=True):
            total += count
            buckets.append((bound, total))
        yield HistogramMetricFamily(
            f"{_PREFIX}step_duration_seconds", "Time from commit to commit.", buckets, self._seconds
        )
        phases = CounterMetricFamily(f"{_PREFIX}step_phase_seconds", "Where the time of steps went.", labels=["phase"])
        for name, seconds in self._phases_s.items():
            phases.add_metric([name], seconds)
        yield phases
        step = self._step
        if step is not None:
            yield _gauge("step", "Steps of the whole run.", step.step)
            yield _gauge("epoch", "Epoch of the last step.", step.epoch)
            yield _gauge("loss", "Mean loss of the last step.", step.loss)
            yield _gauge("learning_rate", "Learning rate of the last step.", step.learning_rate)
            yield _gauge("loss_scale", "Loss scale of the last step.", step.loss_scale)
            if step.staleness is not None:
                yield _gauge("staleness_versions", "How old the last step's results were, in versions.", step.staleness)
            if step.gradient_norm is not None:
                yield _gauge("gradient_norm", "Norm of the last step's gradient.", step.gradient_norm)
        evaluated = GaugeMetricFamily(f"{_PREFIX}evaluation", "What the last evaluation found.", labels=["metric"])
        for name, value in self._evaluated.items():
            evaluated.add_metric([name], value)
        yield evaluated

    def _of_checkpoints(self) -> Iterator[Metric]:
        yield _counter("checkpoints", "Checkpoints written.", self._num_saved)
        yield _counter("checkpoint_failures", "Checkpoints that could not be written.", self._num_failed)
        if self._saved is not None:
            yield _gauge("checkpoint_step", "Step of the newest checkpoint.", self._saved.step)
            yield _gauge("checkpoint_size_bytes", "Size of the newest checkpoint.", self._saved.nbytes)
            yield _gauge("checkpoint_duration_seconds", "How long writing it took.", self._saved.seconds)
        if self._run is not None and self._run.durability == "journal":
            yield _gauge("journal_up", "1 while every step is on the disk before it counts.", self._journal_s is None)

    def _of_work(self, report: RunReported) -> Iterator[Metric]:
        yield _gauge("workers", "Workers that have joined.", report.num_workers)
        yield _gauge("workers_joining", "Workers that build their model.", report.num_joining)
        yield _counter("workers_joined", "Workers that have joined since the start.", self._joined)
        left = CounterMetricFamily(f"{_PREFIX}workers_left", "Workers that have left since the start.", labels=["how"])
        left.add_metric(["clean"], self._left)
        left.add_metric(["lost"], self._lost)
        yield left
        leaves = CounterMetricFamily(f"{_PREFIX}leaves", "Leaves computed, by what became of them.", labels=["outcome"])
        leaves.add_metric(["applied"], report.leaves)
        leaves.add_metric(["in_vain"], report.leaves_in_vain)
        yield leaves
        refused = CounterMetricFamily(
            f"{_PREFIX}leases_refused", "Leases computed and not used, by verdict.", labels=["verdict"]
        )
        for verdict in ("stale", "duplicate", "rejected"):
            refused.add_metric([verdict], getattr(report, f"leases_{verdict}"))
        yield refused
        yield _counter("leases_backed_up", "Leases given to a second worker.", report.leases_backed_up)
        yield _counter("network_sent_bytes", "Bytes that the coordinator has sent to workers.", report.bytes_sent)
        yield _counter("network_received_bytes", "Bytes that it has received from them.", report.bytes_received)
        yield _counter(
            "downlink_raw_bytes", "Bytes of versions before their codec, each once.", report.downlink_raw_bytes
        )
        yield _counter(
            "downlink_encoded_bytes", "Bytes of versions after their codec, each once.", report.downlink_encoded_bytes
        )
        yield _counter(
            "residuals_lost", "Workers that vanished with what their codec had left out.", report.residuals_lost
        )
        yield _gauge("coordinator_resident_memory_bytes", "Memory of the coordinator's process.", report.host_bytes)
        yield _gauge("coordinator_uptime_seconds", "Time since the coordinator began to listen.", report.uptime_s)

    def _of_workers(self, workers: list[WorkerReported]) -> Iterator[Metric]:
        counters = {
            "leaves": ("Leaves applied of this worker.", "leaves"),
            "samples": ("Samples applied of this worker.", "samples"),
            "compute_seconds": ("Time it has computed.", "compute_s"),
            "wait_seconds": ("Time it has waited between blocks.", "wait_s"),
            "network_seconds": ("Time in the middle of sending to it or receiving from it.", "network_s"),
            "encode_seconds": ("Time it has spent in the codec.", "encode_s"),
            "cpu_seconds": ("Processor time of its process.", "cpu_s"),
            "sent_bytes": ("Bytes that it has sent.", "bytes_sent"),
            "received_bytes": ("Bytes that it has received.", "bytes_received"),
            "result_raw_bytes": ("Bytes of its results before the codec.", "raw_bytes"),
            "result_encoded_bytes": ("Bytes of its results after the codec.", "encoded_bytes"),
        }
        for name, (meaning, field) in counters.items():
            counted = CounterMetricFamily(f"{_PREFIX}worker_{name}", meaning, labels=["worker", "id"])
            for worker in workers:
                counted.add_metric([worker.name, worker.worker_id], getattr(worker, field))
            yield counted
        gauges = {
            "leases": ("Leases that it holds.", "leases_held"),
            "round_trip_seconds": ("The kernel's smoothed round trip.", "rtt_s"),
            "resident_memory_bytes": ("Memory of its process.", "host_bytes"),
            "device_memory_used_bytes": ("Memory that its tensors hold on the device.", "device_bytes"),
            "device_memory_total_bytes": ("Memory that the device has.", "device_total_bytes"),
            "flops_per_second": ("Floating-point operations a second, by the leaves it has done.", ""),
        }
        for name, (meaning, field) in gauges.items():
            gauge = GaugeMetricFamily(f"{_PREFIX}worker_{name}", meaning, labels=["worker", "id"])
            for worker in workers:
                value = getattr(worker, field) if field else worker.flops_per_leaf * worker.leaves_per_s
                if value is not None:
                    gauge.add_metric([worker.name, worker.worker_id], value)
            yield gauge


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, meaning, value=value)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, meaning, value=value)
