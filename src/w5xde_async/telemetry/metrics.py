"""The run for Prometheus: a subscriber that counts, and a collector that a scrape reads. See docs/metrics.md.

An event costs a few additions; what Prometheus wants to see is built at a scrape. The registry is one of its own, so
that two coordinators in a process, or one in somebody's application, do not meet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from w5xde_async.errors import utf8
from w5xde_async.telemetry import events
from w5xde_async.telemetry.events import Event, RunReported, RunStarted, StepCommitted, WorkerReported

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PREFIX = "w5xde_"
#: Of each worker: what is exported, what it means, and the field of WorkerReported that it is.
_WORKER_COUNTERS = (
    ("leaves", "Leaves applied of this worker.", "leaves"),
    ("samples", "Samples applied of this worker.", "samples"),
    ("compute_seconds", "Time it has computed.", "compute_s"),
    ("wait_seconds", "Time it has waited between blocks.", "wait_s"),
    ("network_seconds", "Time in the middle of sending to it or receiving from it.", "network_s"),
    ("encode_seconds", "Time it has spent in the codec.", "encode_s"),
    ("cpu_seconds", "Processor time of its process.", "cpu_s"),
    ("sent_bytes", "Bytes that it has sent.", "bytes_sent"),
    ("received_bytes", "Bytes that it has received.", "bytes_received"),
    ("result_raw_bytes", "Bytes of its results before the codec.", "raw_bytes"),
    ("result_encoded_bytes", "Bytes of its results after the codec.", "encoded_bytes"),
)
_WORKER_GAUGES = (
    ("leases", "Leases that it holds.", "leases_held"),
    ("round_trip_seconds", "The kernel's smoothed round trip.", "rtt_s"),
    ("resident_memory_bytes", "Memory of its process.", "host_bytes"),
    ("device_memory_used_bytes", "Memory that its tensors hold on the device.", "device_bytes"),
    ("device_memory_total_bytes", "Memory that the device has.", "device_total_bytes"),
    ("flops_per_second", "Floating-point operations a second, by the leaves it has done.", "flops_per_s"),
)


class Metrics(Collector):
    """Subscribe with ``samples=True``; ``text()`` is what ``/metrics`` answers."""

    def __init__(self) -> None:
        self._run: RunStarted | None = None
        self._total_steps = 0
        self._step: StepCommitted | None = None
        self._report: RunReported | None = None
        self._workers: dict[str, WorkerReported] = {}  # as the last report of the run found them
        self._reported: dict[str, WorkerReported] = {}  # since then
        self._evaluated: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._step_counts = [0] * (len(_STEP_S) + 1)
        self._phases_s: defaultdict[str, float] = defaultdict(float)
        self._seconds = 0.0
        self._saved: events.CheckpointSaved | None = None
        self._journal_up = True
        self._finished = False
        self._held: Counter[str] = Counter()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def __call__(self, event: Event) -> None:
        counts = self._counts
        match event:
            case StepCommitted():
                self._step = event
                counts["steps"] += 1
                counts["samples"] += event.samples
                counts["steps_skipped"] += event.skipped
                self._seconds += event.seconds
                self._step_counts[bisect_left(_STEP_S, event.seconds)] += 1
                for name, seconds in event.phases_s.items():
                    self._phases_s[name] += seconds
            case WorkerReported():
                self._reported[event.worker_id] = event
            case RunReported():
                self._report = event
                # Nothing is published of a worker that leaves before it is a member: it is not reported any more.
                members = {key: worker for key, worker in self._workers.items() if worker.state != "joining"}
                self._workers, self._reported = members | self._reported, {}
            case RunStarted():
                self._run, self._total_steps = event, event.total_steps
            case events.BatchGrown():
                self._total_steps = event.total_steps
            case events.WorkerJoined():
                counts["joined"] += 1
            case events.WorkerLeft():
                self._workers.pop(event.worker_id, None)
                self._reported.pop(event.worker_id, None)
                counts["clean" if event.clean else "lost"] += 1
            case events.ResultHeld():
                self._held[event.why] += 1
            case events.Audited():
                counts["agreed" if event.agreed else "disagreed"] += 1
            case events.WorkerQuarantined():
                counts["quarantined"] += 1
            case events.Evaluated():
                self._evaluated = dict(event.metrics)
            case events.CheckpointSaved():
                self._saved = event
                counts["saved"] += 1
            case events.CheckpointFailed():
                counts["not saved"] += 1
            case events.JournalFailed():
                self._journal_up = False
            case events.JournalRestored():
                self._journal_up = True
            case events.RunFinished():
                self._finished = True

    # -- a scrape ------------------------------------------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        """What the registry asks for at a scrape."""
        if self._run is not None:
            yield from self._of_run(self._run)
        yield from self._of_steps()
        yield from self._of_checkpoints()
        yield from self._of_verification()
        if self._report is not None:
            yield from self._of_work(self._report)
        yield from self._of_workers(list(self._workers.values()))

    def _of_run(self, run: RunStarted) -> Iterator[Metric]:
        names = ("run_id", "version", "model", "update_rule", "codec", "precision")
        about = {"run": utf8(run.run_name)} | {name: getattr(run, name) for name in names}
        yield InfoMetricFamily(f"{_PREFIX}run", "What runs.", about)
        yield _gauge("run_term", "Incarnation of the coordinator.", run.term)
        yield _gauge("run_steps_target", "Step at which the run ends.", self._total_steps)
        yield _gauge("model_parameters", "Parameters of the model.", run.num_parameters)
        yield _gauge("run_finished", "1 once the run has ended, whatever the outcome.", self._finished)

    def _of_verification(self) -> Iterator[Metric]:
        held = dict(sorted(self._held.items()))
        yield _counters("results_held", "Results that a second worker computed because they looked odd.", "why", held)
        counts = self._counts
        yield _counter("audits_agreed", "Results that two workers computed alike.", counts["agreed"])
        yield _counter("audits_disagreed", "Results that two workers did not compute alike.", counts["disagreed"])
        yield _counter("workers_quarantined", "Workers whose results were proven wrong.", counts["quarantined"])

    def _of_steps(self) -> Iterator[Metric]:
        counts = self._counts
        yield _counter("steps", "Commits of this coordinator: a step each, or a round of local steps.", counts["steps"])
        yield _counter(
            "steps_skipped",
            "Steps without an update: not finite, or refused by the norm gate.",
            counts["steps_skipped"],
        )
        yield _counter("samples", "Samples of the commits of this coordinator.", counts["samples"])
        cumulated = accumulate(self._step_counts)
        buckets = list(zip((*map(str, _STEP_S), "+Inf"), cumulated, strict=True))
        duration = "Time from commit to commit."
        yield HistogramMetricFamily(f"{_PREFIX}step_duration_seconds", duration, buckets, self._seconds)
        yield _counters("step_phase_seconds", "Where the time of steps went.", "phase", self._phases_s)
        step = self._step
        if step is not None:
            yield _gauge("step", "Steps of the whole run.", step.step)
            yield _gauge("epoch", "Epoch of the last step.", step.epoch)
            yield _gauge("loss", "Mean loss of the last step.", step.loss)
            if step.learning_rate is not None:
                yield _gauge("learning_rate", "Learning rate of the last step.", step.learning_rate)
            yield _gauge("loss_scale", "Loss scale of the last step.", step.loss_scale)
            if step.staleness is not None:
                yield _gauge("staleness_versions", "How old the last step's results were, in versions.", step.staleness)
            if step.gradient_norm is not None:
                yield _gauge("gradient_norm", "Norm of the last step's gradient.", step.gradient_norm)
            yield _metrics("step_metric", "What the job's step returned, of the last step.", step.metrics)
        yield _metrics("evaluation", "What the last evaluation found.", self._evaluated)

    def _of_checkpoints(self) -> Iterator[Metric]:
        yield _counter("checkpoints", "Checkpoints written.", self._counts["saved"])
        yield _counter("checkpoint_failures", "Checkpoints that could not be written.", self._counts["not saved"])
        if self._saved is not None:
            yield _gauge("checkpoint_step", "Step of the newest checkpoint.", self._saved.step)
            yield _gauge("checkpoint_size_bytes", "Size of the newest checkpoint.", self._saved.nbytes)
            yield _gauge("checkpoint_duration_seconds", "How long writing it took.", self._saved.seconds)
        if self._run is not None and self._run.durability == "journal":
            yield _gauge("journal_up", "1 while every step is on the disk before it counts.", self._journal_up)

    def _of_work(self, report: RunReported) -> Iterator[Metric]:
        counts = self._counts
        yield _gauge("workers", "Workers that have joined.", report.num_workers)
        yield _gauge("workers_joining", "Workers that build their model.", report.num_joining)
        yield _counter("workers_joined", "Workers that have joined since the start.", counts["joined"])
        left = {how: counts[how] for how in ("clean", "lost")}
        yield _counters("workers_left", "Workers that have left since the start.", "how", left)
        yield _counter(
            "links_refused", "Links that were not let in: a wrong secret, no worker, no room.", report.refused
        )
        leaves = {"applied": report.leaves, "in_vain": report.leaves_in_vain}
        yield _counters("leaves", "Leaves computed, by what became of them.", "outcome", leaves)
        refused = {verdict: getattr(report, f"leases_{verdict}") for verdict in ("stale", "duplicate", "rejected")}
        yield _counters("leases_refused", "Leases computed and not used, by verdict.", "verdict", refused)
        yield _counter("leases_backed_up", "Leases given to a second worker.", report.leases_backed_up)
        yield _counter("network_sent_bytes", "Bytes that the coordinator has sent to workers.", report.bytes_sent)
        yield _counter("network_received_bytes", "Bytes that it has received from them.", report.bytes_received)
        raw, encoded, lost = report.downlink_raw_bytes, report.downlink_encoded_bytes, report.residuals_lost
        yield _counter("downlink_raw_bytes", "Bytes of versions before their codec, each once.", raw)
        yield _counter("downlink_encoded_bytes", "Bytes of versions after their codec, each once.", encoded)
        bad = "Samples that cannot be read and were left out, in the whole run."
        yield _gauge("bad_samples", bad, report.bad_samples)
        yield _gauge("sample_bytes", "Bytes of a sample, in the largest leaf so far.", report.sample_bytes)
        yield _counter("residuals_lost", "Workers that vanished with what their codec had left out.", lost)
        yield _gauge("coordinator_resident_memory_bytes", "Memory of the coordinator's process.", report.host_bytes)
        yield _gauge("coordinator_uptime_seconds", "Time since the coordinator began to listen.", report.uptime_s)

    def _of_workers(self, workers: list[WorkerReported]) -> Iterator[Metric]:
        for kind, rows in ((CounterMetricFamily, _WORKER_COUNTERS), (GaugeMetricFamily, _WORKER_GAUGES)):
            for name, meaning, field in rows:
                family = kind(f"{_PREFIX}worker_{name}", meaning, labels=["worker", "id"])
                for worker in workers:
                    value = getattr(worker, field)
                    if value is not None:
                        family.add_metric([worker.name, worker.worker_id], value)
                yield family


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, meaning, value=value)


def _counters(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
    """One counter for each value of ``label``."""
    family = CounterMetricFamily(_PREFIX + name, meaning, labels=[label])
    for labelled, value in values.items():
        family.add_metric([labelled], value)
    return family


def _metrics(name: str, meaning: str, values: Mapping[str, float]) -> Metric:
    """What the job's own code measures, by the names that it gives."""
    family = GaugeMetricFamily(_PREFIX + name, meaning, labels=["metric"])
    for labelled, value in {utf8(str(key)): value for key, value in values.items()}.items():
        family.add_metric([labelled], value)
    return family


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, meaning, value=value)
