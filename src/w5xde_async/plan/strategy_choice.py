"""Which update rule, codec, round and prefetch suit the network: a choice from measurements, with its reason.

A worker's figures are measured while all transfer at once, so the coordinator's own line is in them. For n values:

    T  = n (bytes/value up / up rate + bytes/value down / down rate) + round trip + coding       of the slowest worker
    sync:       computes C = 1 / sum(1 / batch_s) a step      utilization C / (C' + T'), of the workers that it is
                fastest with: those whose lines are too slow are left out
    local:      computes R = H batch_s a round                utilization R / (R + T)
    streaming:  a P-th at a time, hidden where twice its way takes at most d batch_s; lines are full at two thirds

Candidates stand in the order of how much they give up (``LADDER``), and the first that reaches its target (``Targets``)
is chosen, or the best where none does. Exact sync has a lower one, and any network that costs a step next to nothing is
good enough for it.

Pure: figures in, choice out; no clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """``value_bytes`` on the wire for a value, ``value_s`` to encode and to decode and add it, on one thread."""

    value_bytes: float
    value_s: float


#: Bytes are exact for large buckets (a test compares); seconds are those of docs/codecs.md, rounded up.
CODECS = {
    "raw": CodecCost(value_bytes=4.0, value_s=0.0),
    "bf16": CodecCost(value_bytes=2.0, value_s=0.7e-9),
    "int8": CodecCost(value_bytes=1 + 4 / 256, value_s=2e-9),
    "int4": CodecCost(value_bytes=0.5 + 4 / 256, value_s=6e-9),
    "sparseloco": CodecCost(value_bytes=116 / 4096, value_s=6.5e-9),
}
#: A sparse codec of what the coordinator sends would leave most workers' work out for many versions.
_DOWNLINK = {"sparseloco": "int4"}
#: (update, codec, H), gentlest first: exact bits, then precision, then agreeing less often, or later.
LADDER: tuple[tuple[str, str, int], ...] = (
    ("sync", "raw", 0), ("sync", "bf16", 0), ("sync", "int8", 0),
    ("local", "bf16", 10), ("local", "int8", 10), ("local", "int8", 20), ("local", "int4", 20),
    ("streaming", "int8", 20), ("streaming", "int4", 20), ("local", "int8", 50), ("local", "int4", 50),
    ("streaming", "int8", 50), ("streaming", "int4", 50), ("local", "int4", 100), ("streaming", "int4", 100),
    ("streaming", "sparseloco", 100), ("local", "int4", 200), ("streaming", "int4", 200),
    ("streaming", "sparseloco", 200), ("local", "int4", 500), ("streaming", "int4", 500),
    ("local", "sparseloco", 500), ("streaming", "sparseloco", 500),
)  # fmt: skip
#: (update, codec) of all of them.
PAIRS = frozenset((update, codec) for update, codec, _ in LADDER)
_FULL = 0.65  # of a line that is busier fragments queue up behind each other
#: Inner steps that a streamed fragment may be late: 5 cost next to nothing (arXiv:2501.18512, section 3.3), 16 hardly
#: more in what docs/slow-links.md measured.
_MAX_DELAY = 16
_LEAST_ROUNDS = 4  # of each worker until the end: after fewer, averaging has not caught up
#: What a fragment takes over its bytes alone: it queues behind leases and others, and waits for the slowest worker.
_QUEUED = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One worker, measured: seconds for a whole batch of the job alone, bytes per second each way, round trip."""

    batch_s: float
    up_bytes_s: float
    down_bytes_s: float
    round_trip_s: float

    def __post_init__(self) -> None:
        if not (self.batch_s > 0 and self.up_bytes_s > 0 and self.down_bytes_s > 0 and self.round_trip_s >= 0):
            raise ValueError("seconds of a batch and bytes per second are above 0, the round trip at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """``num_values`` that travel each way; ``batch_bytes`` of one batch's data; ``num_layers`` bounds the fragments;
    ``steps_left`` until the run's end, of all workers together."""

    num_values: int
    batch_bytes: int
    num_layers: int
    workers: tuple[Figures, ...]
    steps_left: int = 1 << 62

    def __post_init__(self) -> None:
        if not self.workers or self.num_values < 1 or self.num_layers < 1 or self.batch_bytes < 0:
            raise ValueError("a situation has workers, values and layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """``computing``: part of the time that workers are to compute; ``exact``: enough where nothing is given up;
    ``negligible_s``: what the network may cost a step without being worth a thought."""

    computing: float = 0.9
    exact: float = 0.6
    negligible_s: float = 0.005

    def reached(self, choice: Choice) -> bool:
        """Whether the choice's workers compute enough of the time."""
        return choice.utilization >= (self.exact if choice.codec == "raw" else self.computing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """``update``: sync, local or streaming. ``inner_steps`` is H (0 under sync), ``fragments`` 1 unless streaming,
    ``delay`` inner steps between sending a fragment and using what came back. ``leases_ahead``: leases a worker holds,
    the one it computes included. ``utilization`` is what the model predicts for the slowest worker."""

    update: str
    codec: str
    downlink: str
    inner_steps: int
    fragments: int
    delay: int
    leases_ahead: int
    utilization: float
    reason: str


def choose(
    situation: Situation, targets: Targets | None = None, possible: Collection[tuple[str, str]] = PAIRS
) -> Choice:
    """The gentlest choice that keeps workers busy, and why, in one sentence.

    ``possible``: (update, codec) that the job and its other settings go with. Exact sync always does.
    """
    targets = targets or Targets()
    exact = predict(situation, "sync", "raw", 0)
    seconds = max(_exchange_s(situation, worker, "raw") for worker in situation.workers)
    if seconds < targets.negligible_s:
        return replace(exact, reason=f"exact sync: the network takes {_duration(seconds)} of a step")
    if targets.reached(exact):
        return replace(exact, reason=f"exact sync: workers compute {exact.utilization:.0%} of the time")
    candidates = [exact, *_candidates(situation, possible)]
    best = next(filter(targets.reached, candidates), None) or max(candidates, key=lambda choice: choice.utilization)
    if best.update == "sync" and best.codec == "raw":
        reason = f"exact sync: workers compute {exact.utilization:.0%} of the time, and nothing better fits this job"
        return replace(exact, reason=reason)
    reason = (
        f"{_named(best)}: workers compute {best.utilization:.0%} of the time; exact sync would wait up to "
        f"{_duration(seconds)} for the network at each step and compute {exact.utilization:.0%}"
    )
    return replace(best, reason=reason)


def _candidates(situation: Situation, possible: Collection[tuple[str, str]]) -> Iterator[Choice]:
    most_inner = situation.steps_left // (_LEAST_ROUNDS * len(situation.workers))
    for update, codec, inner_steps in LADDER:
        if inner_steps > most_inner:
            continue
        if (update, codec) in possible and (update != "streaming" or situation.num_layers > 1):
            yield predict(situation, update, codec, inner_steps)


def predict(situation: Situation, update: str, codec: str, inner_steps: int) -> Choice:
    """What the model says of one candidate, by its slowest worker. Its ``reason`` is empty."""
    fragments, delay, utilization = 1, 0, 1.0
    if update == "sync":
        utilization = _sync_utilization(situation, codec)
    elif update == "local":
        # A round ends with its slowest worker; the others' waiting for it is not the network's.
        for worker in situation.workers:
            computing_s = inner_steps * worker.batch_s
            utilization = min(utilization, computing_s / (computing_s + _exchange_s(situation, worker, codec)))
    else:
        fragments, delay = _fragments(situation, codec, inner_steps)
        for worker in situation.workers:
            computing_s = inner_steps * worker.batch_s
            up_s, down_s, coding_s = _ways_s(situation, worker, codec)
            away_s = _QUEUED * (up_s + down_s + coding_s) / fragments + worker.round_trip_s
            shown_s = max(0.0, away_s - delay * worker.batch_s)
            round_s = max(computing_s + fragments * shown_s, up_s / _FULL, down_s / _FULL)
            utilization = min(utilization, computing_s / round_s)
    ahead = max(
        1 + math.ceil((w.round_trip_s + _queue_s(situation, w, codec, fragments)) / w.batch_s)
        for w in situation.workers
    )
    return Choice(
        update=update, codec=codec, downlink=_DOWNLINK.get(codec, codec), inner_steps=inner_steps, fragments=fragments,
        delay=delay, leases_ahead=min(max(ahead, 2), 64), utilization=utilization, reason="",
    )  # fmt: skip


def _sync_utilization(situation: Situation, codec: str) -> float:
    """Of all workers, where a step is dealt out to those with the shortest exchange, as many as make it fastest."""
    by_exchange = sorted((_exchange_s(situation, worker, codec), worker.batch_s) for worker in situation.workers)
    speed, step_s = 0.0, math.inf
    for exchange_s, batch_s in by_exchange:
        speed += 1 / batch_s
        step_s = min(step_s, 1 / speed + exchange_s)
    return 1 / (speed * step_s)


def _queue_s(situation: Situation, worker: Figures, codec: str, fragments: int) -> float:
    """What a lease may take on its way down: a batch, behind a fragment where fragments come meanwhile."""
    fragment_s = _QUEUED * _ways_s(situation, worker, codec)[1] / fragments if fragments > 1 else 0.0
    return fragment_s + situation.batch_bytes / worker.down_bytes_s


def _fragments(situation: Situation, codec: str, inner_steps: int) -> tuple[int, int]:
    """As short a delay as hides a fragment's way there and back, and as few fragments as allow it."""
    most = min(situation.num_layers, inner_steps)
    for delay in range(1, min(_MAX_DELAY, inner_steps - 1) + 1):
        for fragments in range(2, most + 1):
            if all(
                _QUEUED * sum(_ways_s(situation, worker, codec)) / fragments + worker.round_trip_s
                <= delay * worker.batch_s
                for worker in situation.workers
            ):
                return fragments, delay
    return most, min(_MAX_DELAY, inner_steps - 1)


def _exchange_s(situation: Situation, worker: Figures, codec: str) -> float:
    """Results up, parameters down, the round trip and coding, one after the other."""
    return sum(_ways_s(situation, worker, codec)) + worker.round_trip_s


def _ways_s(situation: Situation, worker: Figures, codec: str) -> tuple[float, float, float]:
    """Seconds of all values on their way up, on their way down, and in coding at both ends."""
    up, down = CODECS[codec], CODECS[_DOWNLINK.get(codec, codec)]
    values = situation.num_values
    return (
        values * up.value_bytes / worker.up_bytes_s,
        values * down.value_bytes / worker.down_bytes_s,
        values * (up.value_s + down.value_s),
    )


def _named(choice: Choice) -> str:
    if choice.update == "sync":
        return f"sync with {choice.codec}"
    how = f"in {choice.fragments} fragments " if choice.fragments > 1 else ""
    return f"rounds of {choice.inner_steps} local steps {how}with {choice.codec}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{seconds * 1e3:.{0 if seconds >= 0.01 else 1}f} ms"
