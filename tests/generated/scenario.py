"""What is drawn: a job, the run's settings and what goes wrong in it. Every default is the simplest there is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from tests.support.streams import KINDS

__all__ = [
    "EXACT",
    "FAULTS",
    "JUDGED",
    "KEPT",
    "LEAVING",
    "OPEN",
    "SPARING",
    "Fault",
    "Scenario",
    "drawn",
    "known",
    "lossy",
    "smaller",
    "storm",
]

DATA = ("tensors", "map", "getitems", "collate", "dict", "nested")
INPUTS = ("float32", "float64", "float16", "bfloat16", "uint8", "int32", "int64", "bool", "uint16", "uint32")
PARAMETERS = ("float32", "bfloat16", "float16", "float64", "mixed")
OPTIMIZERS = ("sgd", "momentum", "adamw", "nadam", "rmsprop", "adagrad")
BUFFERS = (
    "in place", "assigned", "integer", "assigned integer", "bool", "float64", "narrow", "constant inf", "from inf",
)  # fmt: skip
HABITS = ("tied", "frozen", "unused", "rare", "sparse", "dropout", "loud")
#: What a hook of the optimizer changes beside what that steps: a frozen copy, or a buffer.
FOLLOWS = ("in place", "other memory", "buffer")
RULES = ("sync", "async", "local", "streaming", "async-local")
#: Codecs that keep every bit; the others by how far an application of one sample may be off.
EXACT = ("raw", "lz4", "lz4-shuffle")
CODECS = (*EXACT, "bf16", "fp16", "int8", "int4", "sign", "topk:0.25", "sparseloco", "lz4:int8")
DOWNLINKS = ("", "", "raw", "lz4", "bf16", "fp16", "int8", "int4", "topk:0.25", "sign")
OWN = ("all", "some", "damaged")
FAULTS = (
    "worker killed", "worker hangs in its step", "worker stopped (SIGSTOP)", "worker drained", "late joiner",
    "link reset", "link closed", "half-close", "cut in mid-frame", "worker ten times slower", "worker lies about time",
    "delay spike", "partition", "leaf failed", "worker reads nothing", "stranger",
)  # fmt: skip
#: What does no harm where results are judged.
JUDGED = "worker computes no numbers"
LEAVING = "everybody drained"
#: After which every worker is still there, or has left in good order.
SPARING = (
    "worker drained", LEAVING, "late joiner", "link reset", "link closed", "half-close", "cut in mid-frame",
    "worker ten times slower", "delay spike", "partition", "leaf failed", "worker reads nothing",
    "worker stopped (SIGSTOP)",
)  # fmt: skip
_DELAYING = ("delay spike", "delay spike", "worker reads nothing", "partition", "worker stopped (SIGSTOP)")
#: Those that need a run directory.
KEPT = ("coordinator killed", "coordinator stopped in good order", "coordinator without power", "disk full")


@dataclass(frozen=True)
class Fault:
    """``kind`` as in ``tests.simulator.faults``; ``at_s``: virtual seconds after the run has begun."""

    kind: str
    at_s: float


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One job and one run of it."""

    data: str = "tensors"
    samples: int = 8
    columns: int = 4
    inputs: str = "float32"
    batch: int = 4
    microbatch: int = 2
    accumulate: int = 1
    drop_last: bool = False
    shuffle: bool = True
    epochs: int = 1
    max_steps: int = 0
    parameters: str = "float32"
    precision: str = "fp32"
    optimizer: str = "sgd"
    scheduled: bool = False
    clipped: bool = False
    buffers: tuple[str, ...] = ()
    habits: tuple[str, ...] = ()
    follows: str = ""
    tensors: int = 0  # more parameters than those, of one element each

    rule: str = "sync"
    codec: str = "raw"
    downlink: str = ""
    inner_steps: int = 2
    fragments: int = 2
    results_per_step: int = 1
    average: str = "mean"
    durability: str = "checkpoint"
    kept: bool = False
    keeps_residuals: bool = False  # workers have a directory for what a codec has left out
    checkpoint_every: int = 50
    workers: int = 1
    min_workers: int = 1
    same_name: bool = False
    gate: bool = False
    audit: float = 0.0
    ahead: int = 2
    prefetch: int = 64
    leaf_s: float = 0.1
    line_s: float = 0.0  # that the parameters take on their way, each way; the kernel takes them at once
    faults: tuple[Fault, ...] = ()
    stream: str = ""  # a kind of tests.support.streams, instead of a dataset that is read by index
    shuffle_buffer: int = 8
    own: str = ""  # who has a copy of the data: all, every other worker (some), or all one that lacks samples (damaged)
    as_if_big: bool = False  # what a big model's sizes ask for is done: in threads, one by one, in pieces
    storm: bool = False  # faults come as in the simulator's schedules, of any kind and often
    seed: int = 0

    @property
    def endless(self) -> bool:
        """Its stream does not say how many samples it has: ``max_steps`` ends the run."""
        return self.stream not in ("", "counted", "sharded counted")

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    @property
    def total_steps(self) -> int:
        steps = self.epochs * self.steps_per_epoch
        return min(steps, self.max_steps) if self.max_steps else steps

    @property
    def leaf_samples(self) -> int:
        return self.microbatch * self.accumulate

    @property
    def leaves(self) -> int:
        """Of the whole run."""
        return self.total_steps * -(-self.batch // self.leaf_samples)

    @property
    def exact(self) -> bool:
        """It promises the bits of the single-process loop."""
        return self.rule == "sync" and self.codec in EXACT and self.downlink in ("", *EXACT)

    @property
    def judged(self) -> bool:
        """One worker's results do no harm, whatever they are: another is there as long as the run, and has joined."""
        return self.gate and self.exact and self.min_workers > 1 and len(self.faults) == 1 and not self.storm

    def valid(self) -> bool:
        """Whether a job like this can be asked for, and is small enough to run by the thousand."""
        return (
            1 <= self.leaf_samples <= self.batch
            and self.steps_per_epoch > 0
            and self.total_steps <= (40 if self.batch > 4 else 100)
            and self.leaves <= 400
            and self.min_workers <= self.workers
            and (not self.stream or self.samples <= 2000)
            and not (self.own and self.stream)
            and self.batch * self.columns <= 1 << 21
            and ("loud" not in self.habits or (self.parameters == "float32" and self.batch <= 4))
            and (not self.follows or self.rule in ("sync", "async"))
            and (self.average == "mean" or self.rule in ("async", "local"))
            and (self.durability == "checkpoint" or (self.kept and self.rule == "sync"))
            and (not any(fault.kind == JUDGED for fault in self.faults) or self.judged)
            and (self.kept or not (self.storm or any(fault.kind in KEPT for fault in self.faults)))
        )

    def __repr__(self) -> str:
        """As code, without what is as simple as it can be."""
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return "Scenario(" + ", ".join(f"{name}={value!r}" for name, value in given) + ")"


#: What is known and not mended yet, and which scenarios meet it: they are left out unless asked for.
OPEN: dict[str, Callable[[Scenario], bool]] = {}


def known(scenario: Scenario) -> str:
    """Which of ``OPEN`` it meets."""
    return next((what for what, meets in OPEN.items() if meets(scenario)), "")


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios that are simpler: many fields at a time as simple as they can be, then fewer, then smaller numbers."""
    given = [field for field in fields(scenario) if getattr(scenario, field.name) != field.default]
    at_once = len(given)
    while at_once:
        for begin in range(0, len(given), at_once):
            yield replace(scenario, **{field.name: field.default for field in given[begin : begin + at_once]})
        at_once //= 2
    for field in given:
        value: Any = getattr(scenario, field.name)
        tries: list[Any] = []
        if isinstance(value, tuple):
            tries = [value[:at] + value[at + 1 :] for at in range(len(value))]
        elif type(value) is int:
            tries = [field.default + (value - field.default) // 2, value - 1 if value > field.default else value + 1]
        for tried in tries:
            yield replace(scenario, **{field.name: tried})


def storm(seed: int) -> Scenario:
    """A run under any rule and codec that is long enough for a schedule of the simulator's faults."""
    rng = random.Random(f"storm {seed}")
    rule = RULES[seed % len(RULES)]
    return Scenario(
        rule=rule, codec=rng.choice(CODECS), downlink=rng.choice(DOWNLINKS), inner_steps=rng.randint(1, 4),
        fragments=rng.randint(1, 3), samples=rng.choice([64, 100]), batch=8, microbatch=rng.choice([2, 4]), epochs=2,
        buffers=tuple(sorted(rng.sample(BUFFERS, 2))), workers=rng.randint(1, 3), gate=rng.random() < 0.5,
        same_name=rng.random() < 0.5, ahead=rng.randint(1, 3), leaf_s=rng.choice([0.1, 0.2, 0.4]), kept=True,
        durability="journal" if rule == "sync" and rng.random() < 0.5 else "checkpoint",
        checkpoint_every=rng.choice([1, 3, 50]), storm=True, as_if_big=_as_if_big(seed), seed=seed,
    )  # fmt: skip


def lossy(seed: int) -> Scenario:
    """A run whose codec leaves much out, and faults that take no worker's residuals with them: none may be lost."""
    rng = random.Random(f"lossy {seed}")
    faults = [Fault(rng.choice(SPARING + KEPT), rng.randint(0, 60) / 10) for _ in range(rng.randint(0, 3))]
    # Before somebody has heard what became of his results, who knows it is gone.
    at_s = rng.randint(0, 40) / 10
    faults += [Fault(rng.choice(_DELAYING), at_s), Fault(rng.choice(KEPT), at_s + rng.randint(1, 20) / 10)]
    workers = rng.randint(1, 3)
    return Scenario(
        codec=rng.choice(["topk:0.02", "topk:0.02", "topk:0.04", "sign", "int4", "bf16"]),
        downlink=rng.choice(DOWNLINKS),
        samples=rng.choice([64, 100, 128]), batch=rng.choice([8, 16]), microbatch=rng.choice([1, 2, 4]),
        accumulate=rng.choice([1, 1, 2]), drop_last=rng.random() < 0.5, epochs=rng.randint(1, 2),
        optimizer=rng.choice(["sgd", "momentum"]), workers=workers, min_workers=rng.choice([1, workers]), kept=True,
        keeps_residuals=rng.random() < 0.5, durability=rng.choice(["journal", "checkpoint"]),
        checkpoint_every=rng.choice([1, 3, 50]), same_name=rng.random() < 0.3, gate=rng.random() < 0.3,
        ahead=rng.randint(1, 3), leaf_s=rng.choice([0.05, 0.1, 0.4]),
        line_s=rng.choice([0.0, 0.1, 1.0]), faults=tuple(faults), as_if_big=_as_if_big(seed), seed=seed,
    )  # fmt: skip


def _as_if_big(seed: int) -> bool:
    return random.Random(f"size {seed}").random() < 0.4


def drawn(seed: int) -> Scenario:
    """Any of them. Sizes lie around the edges: of batches, leaves, chunks (4 MiB of rows) and what is read ahead."""
    rng = random.Random(f"scenario {seed}")
    while True:
        made = _drawn(rng, seed)
        made = replace(made, own="" if made.stream else made.own, as_if_big=_as_if_big(seed))
        if made.valid():
            return made
        made = replace(made, epochs=1, max_steps=min(made.max_steps or 6, 6))
        if made.valid():
            return made


def _drawn(rng: random.Random, seed: int) -> Scenario:
    def one_in(count: int) -> bool:
        return rng.randrange(count) == 0

    batch = rng.choice([rng.randint(1, 16), rng.randint(1, 16), rng.choice([31, 32, 33, 64, 100, 128, 512])])
    microbatch = max(rng.choice([rng.randint(1, batch), batch // 8, batch // 2]), -(-batch // 24), 1)
    accumulate = rng.choice([1, 1, 1, 2, 3])
    if microbatch * accumulate > batch:
        accumulate = 1
    edge = rng.choice([0, 0, 1, -1, rng.randint(0, batch)])
    samples = max(1, rng.choice([1, rng.randint(1, 6)]) * batch + edge)
    columns = rng.choice([1, 4, 4, 16, 257])
    epochs, max_steps = rng.randint(1, 2), 0
    if one_in(10):  # a step that spans chunks
        columns = rng.choice([1024, 3072])
    if one_in(20):  # a dataset of which a few steps are trained
        samples, max_steps, columns = rng.choice([10_000, 99_999, 100_000]), rng.randint(1, 4), 4
    elif one_in(40):  # one step an epoch, whose order takes a while to compute
        samples = batch = rng.randint(10_001, 12_000)
        microbatch, accumulate, columns, epochs = rng.choice([5_000, batch]), 1, 1, 4
    rule = rng.choice(RULES)
    workers, inner_steps, habits = rng.choice([1, 2, 2, 3]), rng.randint(1, 5), set[str]()
    min_workers = rng.choice([1, workers])
    gate = one_in(2)
    other = rng.choice(PARAMETERS) if rule == "sync" or one_in(20) else "float32"
    if one_in(150):  # more than a round was ever thought to have
        workers = rng.choice([17, 66, 70])
        batch, microbatch, accumulate, columns, epochs, max_steps, inner_steps = 2, rng.randint(1, 2), 1, 4, 1, 0, 1
        samples, min_workers = 2 * rng.randint(workers, 90), workers
    elif gate and one_in(2):  # results that the norm gate refuses, once it knows what is usual
        batch = rng.randint(2, 4)
        microbatch, accumulate, columns, epochs, max_steps, inner_steps = batch, 1, 4, 1, 0, rng.randint(1, 2)
        samples = batch * rng.randint(16, 60) + rng.randint(0, 1)
        habits.add("loud")
        other = "float32"
    lossless = rule == "sync" and one_in(2)
    codec = rng.choice(EXACT if lossless else CODECS) if one_in(2) else "raw"
    downlink = rng.choice(("", *EXACT) if lossless else DOWNLINKS)
    exact = rule == "sync" and codec in EXACT and downlink in ("", *EXACT)
    kept = one_in(2)
    kinds = FAULTS + KEPT if kept else FAULTS
    results_per_step = rng.choice([1, 1, 2])
    average = "mean"
    if rule == "local" and one_in(3):  # those keep so many results, and no more
        average, results_per_step = rng.choice(["radial", "median"]), rng.choice([1, 2, 3])
    made = Scenario(
        data=rng.choice(DATA), samples=samples, columns=columns, inputs=rng.choice(["float32", rng.choice(INPUTS)]),
        batch=batch, microbatch=microbatch, accumulate=accumulate, drop_last=samples >= batch and one_in(2),
        shuffle=one_in(2), epochs=epochs, max_steps=max_steps, parameters=rng.choice(["float32", other]),
        precision=rng.choice(["fp32", "fp32", "fp32", "bf16"]),
        optimizer=rng.choice(OPTIMIZERS if exact else ("sgd", "momentum")),
        scheduled=exact and one_in(2), clipped=exact and one_in(2),
        buffers=tuple(sorted(rng.sample(BUFFERS, rng.randint(0, 3)))),
        habits=tuple(sorted(habits | set(rng.sample(HABITS[:-1], rng.choice([0, 0, 1, 2, 3]))))),
        tensors=rng.choice([300, 3000]) if one_in(60) else 131_100 if one_in(600) else 0,
        rule=rule, codec=codec, downlink=downlink, inner_steps=inner_steps, fragments=rng.randint(1, 3),
        results_per_step=results_per_step, average=average,
        durability="journal" if kept and rule == "sync" and one_in(2) else "checkpoint", kept=kept,
        checkpoint_every=rng.choice([1, 2, 50]), workers=workers, min_workers=min_workers, same_name=one_in(2),
        gate=gate, audit=rng.choice([0.0, 0.0, 0.3]), ahead=rng.choice([1, 2, 3]), prefetch=rng.choice([1, 4, 64]),
        leaf_s=rng.choice([0.1, 0.001, 0.5]), storm=kept and workers < 8 and one_in(10), seed=seed,
        line_s=rng.choice([1.0, 3.0, 10.0, 30.0]) if one_in(8) else 0.0,
        faults=tuple(Fault(rng.choice(kinds), rng.randint(0, 40) / 10) for _ in range(rng.choice([0, 0, 1, 2, 3]))),
        # Drawn last: what seeds meant before they still mean.
        stream=rng.choice(KINDS) if samples <= 2000 and one_in(4) else "", shuffle_buffer=rng.choice([1, 7, 64, 1000]),
        own=rng.choice(OWN) if one_in(4) else "",
        follows=rng.choice(FOLLOWS) if one_in(4) and rule in ("sync", "async") else "",
    )  # fmt: skip
    if made.gate and made.exact and one_in(2):
        faults = (Fault(JUDGED, rng.randint(0, 40) / 10),)
        made = replace(made, faults=faults, storm=False, workers=max(made.workers, 2), min_workers=max(made.workers, 2))
    elif one_in(6):
        made = replace(made, faults=(*made.faults, Fault(LEAVING, rng.randint(0, 40) / 10)))
    return made
