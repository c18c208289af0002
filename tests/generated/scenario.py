"""What is drawn: a job, the run's settings and what goes wrong in it. Every default is the simplest there is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from hypothesis import strategies as st

__all__ = ["EXACT", "FAULTS", "KEPT", "OPEN", "Fault", "Scenario", "known", "scenarios", "smaller", "storm"]

DATA = ("tensors", "map", "getitems", "collate", "dict", "nested")
INPUTS = ("float32", "float64", "float16", "bfloat16", "uint8", "int32", "int64", "bool", "uint16", "uint32")
PARAMETERS = ("float32", "bfloat16", "float16", "float64", "mixed")
OPTIMIZERS = ("sgd", "momentum", "adamw", "nadam", "rmsprop", "adagrad")
BUFFERS = (
    "in place", "assigned", "integer", "assigned integer", "bool", "float64", "narrow", "constant inf", "from inf",
)  # fmt: skip
HABITS = ("tied", "frozen", "unused", "rare", "sparse", "dropout")
RULES = ("sync", "async", "local", "streaming", "async-local")
#: Codecs that keep every bit; the others by how far an application of one sample may be off.
EXACT = ("raw", "lz4", "lz4-shuffle")
CODECS = (*EXACT, "bf16", "fp16", "int8", "int4", "sign", "topk:0.25", "sparseloco", "powersgd:2", "lz4:int8")
DOWNLINKS = ("", "", "raw", "lz4", "bf16", "fp16", "int8", "int4", "topk:0.25", "sign")
FAULTS = (
    "worker killed", "worker hangs in its step", "worker stopped (SIGSTOP)", "worker drained", "late joiner",
    "link reset", "link closed", "half-close", "cut in mid-frame", "worker ten times slower", "worker lies about time",
    "delay spike", "partition", "leaf failed", "worker reads nothing", "stranger",
)  # fmt: skip
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

    rule: str = "sync"
    codec: str = "raw"
    downlink: str = ""
    inner_steps: int = 2
    fragments: int = 2
    results_per_step: int = 1
    durability: str = "checkpoint"
    kept: bool = False
    checkpoint_every: int = 50
    workers: int = 1
    min_workers: int = 1
    same_name: bool = False
    gate: bool = False
    audit: float = 0.0
    ahead: int = 2
    prefetch: int = 64
    leaf_s: float = 0.1
    faults: tuple[Fault, ...] = ()
    storm: bool = False  # faults come as in the simulator's schedules, of any kind and often
    seed: int = 0

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

    def valid(self) -> bool:
        """Whether a job like this can be asked for, and is small enough to run by the thousand."""
        return (
            1 <= self.leaf_samples <= self.batch
            and self.steps_per_epoch > 0
            and self.total_steps <= 40
            and self.leaves <= 400
            and self.min_workers <= self.workers
            and self.batch * self.columns <= 1 << 21
            and (self.durability == "checkpoint" or (self.kept and self.rule == "sync"))
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
        checkpoint_every=rng.choice([1, 3, 50]), storm=True, seed=seed,
    )  # fmt: skip


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Any of them. Sizes lie around the edges: of batches, leaves, chunks (4 MiB of rows) and what is read ahead."""
    batch = draw(st.integers(1, 16) | st.sampled_from([31, 32, 33, 64, 100, 128, 512]))
    microbatch = draw(st.integers(1, max(1, batch)) | st.sampled_from([max(1, batch // 8), max(1, batch // 2)]))
    microbatch = max(microbatch, -(-batch // 24))
    accumulate = draw(st.sampled_from([1, 1, 1, 2, 3]))
    if microbatch * accumulate > batch:
        accumulate = 1
    steps = draw(st.integers(1, 6) | st.just(1))
    edge = draw(st.sampled_from([0, 0, 1, -1]) | st.integers(0, batch))
    samples = max(1, steps * batch + edge)
    columns = draw(st.sampled_from([1, 4, 4, 16, 257]))
    if draw(st.integers(0, 9)) == 0:  # a step that spans chunks
        columns = draw(st.sampled_from([1024, 3072]))
    max_steps = 0
    if draw(st.integers(0, 19)) == 0:  # a dataset of which a few steps are trained
        samples, max_steps = draw(st.sampled_from([10_000, 99_999, 100_000])), draw(st.integers(1, 4))
        columns = 4
    long = draw(st.integers(0, 29)) == 0
    if long:  # one step an epoch, whose order takes a while to compute
        samples = batch = draw(st.integers(10_001, 12_000))
        microbatch, accumulate, columns, max_steps = draw(st.sampled_from([5_000, batch])), 1, 1, 0
    rule = draw(st.sampled_from(RULES))
    lossless = rule == "sync" and draw(st.booleans())
    codec = draw(st.sampled_from(EXACT if lossless else CODECS)) if draw(st.booleans()) else "raw"
    downlink = draw(st.sampled_from(("", *EXACT) if lossless else DOWNLINKS))
    workers = draw(st.integers(1, 3) | st.just(2))
    if draw(st.integers(0, 39)) == 0:
        workers = draw(st.sampled_from([8, 17, 66]))
    kept = draw(st.booleans())
    kinds = FAULTS + KEPT if kept else FAULTS
    faults = st.builds(Fault, st.sampled_from(kinds), st.integers(0, 40).map(lambda tenths: tenths / 10))
    oracle = rule != "sync" or codec not in EXACT
    made = Scenario(
        data=draw(st.sampled_from(DATA)), samples=samples, columns=columns,
        inputs=draw(st.just("float32") | st.sampled_from(INPUTS)), batch=batch, microbatch=microbatch,
        accumulate=accumulate, drop_last=draw(st.booleans()) and samples >= batch, shuffle=draw(st.booleans()),
        epochs=4 if long else draw(st.integers(1, 2)), max_steps=max_steps,
        parameters=draw(st.just("float32") | st.sampled_from(PARAMETERS)),
        precision=draw(st.sampled_from(["fp32", "fp32", "fp32", "bf16"])),
        optimizer=draw(st.sampled_from(["sgd", "momentum"] if oracle else OPTIMIZERS)),
        scheduled=not oracle and draw(st.booleans()), clipped=not oracle and draw(st.booleans()),
        buffers=tuple(sorted(draw(st.sets(st.sampled_from(BUFFERS), max_size=3)))),
        habits=tuple(sorted(draw(st.sets(st.sampled_from(HABITS), max_size=3)))),
        rule=rule, codec=codec, downlink=downlink, inner_steps=draw(st.integers(1, 5)),
        fragments=draw(st.integers(1, 3)), results_per_step=draw(st.sampled_from([1, 1, 2])),
        durability="journal" if kept and rule == "sync" and draw(st.booleans()) else "checkpoint", kept=kept,
        checkpoint_every=draw(st.sampled_from([1, 2, 50])), workers=workers,
        min_workers=draw(st.sampled_from([1, workers])), same_name=draw(st.booleans()), gate=draw(st.booleans()),
        audit=draw(st.sampled_from([0.0, 0.0, 0.3])), ahead=draw(st.sampled_from([1, 2, 3])),
        prefetch=draw(st.sampled_from([1, 4, 64])), leaf_s=draw(st.sampled_from([0.1, 0.001, 0.5])),
        faults=tuple(draw(st.lists(faults, max_size=3))), seed=draw(st.integers(0, 1 << 16)),
        storm=kept and draw(st.integers(0, 9)) == 0,
    )  # fmt: skip
    if not made.valid():
        made = replace(made, epochs=1, max_steps=min(made.max_steps or 6, 6))
    return made
