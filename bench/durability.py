"""What durability costs: the MLP on two workers without checkpoints, with one every 50 steps, and with a journal.

    python bench/durability.py [--quick] [--rounds 5] [--model mlp] [--dir DIR]

The three take turns. ``steps_per_s_*`` are commits a second as followers hear of them (with a journal: when they are
durable); ``over_none_*`` the same round's rate over the one without; ``cpu_ms_*`` the coordinator's processor time a
step, which says more where the machine does other work. ``pause_ms`` is a checkpoint's copy, the only part that the
step path waits for; ``save_ms`` its whole way to the disk. ``journal_ms`` is what a journal adds to the step path: the
copy and, where it comes to that, waiting for the disk; ``fsync_ms`` is one fsync of one step's bytes, for scale. Files
go to DIR, by default the system's place for temporary files; a RAM disk hides what a disk costs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from models import Reply, Rig, make_job, serve, work
from report import Report, parser
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.telemetry.events import Bus, CheckpointSaved, Event, StepCommitted

KINDS: dict[str, dict[str, Any]] = {
    "none": {"checkpoint_every": 1 << 40},
    "checkpoint": {"checkpoint_every": 50},
    "journal": {"checkpoint_every": 200, "durability": "journal"},
}
STEPS = {"mlp": (400, 150), "tiny": (4000, 1000), "gpt": (40, 10)}
WARM = 20
WORKERS = ("worker-0", "worker-1")


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=0, help="rounds of all three (5; 3 with --quick)")
    flags.add_argument("--model", choices=STEPS, default="mlp")
    flags.add_argument("--dir", type=Path, help="where the files go")
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.child:
        serve({"train": train, "work": work})
        return
    rounds = args.rounds or (3 if args.quick else 5)
    steps = STEPS[args.model][int(args.quick)]
    report = Report({"rounds": rounds, "steps": steps, "model": args.model, "workers": 2, "threads": 1})
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(dir=args.dir) as place, Rig(__file__, ["coordinator", *WORKERS]) as rig:
        for number in range(rounds):
            for kind in KINDS:
                found[kind].append(once(rig, args.model, steps, kind, Path(place) / f"{kind}-{number}"))
        nbytes = make_size(args.model)
        report.add("fsync_ms", [fsync_ms(Path(place), nbytes) for _ in range(10)])
    digests = {run["digest"] for runs in found.values() for run in runs}
    if len(digests) != 1:
        raise SystemExit(f"the runs ended in {len(digests)} different digests")
    for kind, runs in found.items():
        report.add(f"steps_per_s_{kind}", [run["rate"] for run in runs])
        report.add(f"cpu_ms_{kind}", [run["cpu_s"] * 1e3 for run in runs])
    for kind in ("checkpoint", "journal"):
        pairs = zip(found[kind], found["none"], strict=True)
        report.add(f"over_none_{kind}", [run["rate"] / plain["rate"] for run, plain in pairs])
    saves = [save for run in found["checkpoint"] for save in run["saves"]]
    report.add("pause_ms", [pause * 1e3 for pause, _ in saves])
    report.add("save_ms", [seconds * 1e3 for _, seconds in saves])
    report.add("journal_ms", [run["journal_s"] * 1e3 for run in found["journal"]])
    print(
        f"\n{args.model}: {steps} steps a run, {nbytes / 1e6:.2f} MB of gradient a step; all runs ended in one digest"
    )
    report.show()
    report.write(args.json)


def once(rig: Rig, model: str, steps: int, kind: str, run_dir: Path) -> dict[str, Any]:
    options = {"steps": steps + WARM}
    rig["coordinator"].tell("train", job=model, options=options, run_dir=str(run_dir), config=KINDS[kind])
    port = rig["coordinator"].answer()["port"]
    for worker in WORKERS:
        rig[worker].tell("work", port=port, job=model, options=options)
    ended = rig["coordinator"].answer()
    for worker in WORKERS:
        rig[worker].answer()
    return ended


def train(reply: Reply, *, job: str, options: dict[str, Any], run_dir: str, config: dict[str, Any]) -> None:
    """In the coordinator's process: one run; answers its port, then its rate after the warm steps."""
    made = make_job(job, **options)
    times: list[tuple[float, float]] = []
    saves: list[tuple[float, float]] = []
    waited: list[float] = []

    def see(event: Event) -> None:
        if isinstance(event, StepCommitted):
            times.append((time.perf_counter(), time.process_time()))
            waited.append(event.phases_s.get("journal", 0.0))
        elif isinstance(event, CheckpointSaved):
            saves.append((event.pause_s, event.seconds))

    async def run() -> None:
        bus = Bus()
        bus.subscribe(see)
        settings = CoordinatorConfig(port=0, min_workers=2, evaluate=False, silence_s=60.0, **config)
        async with Coordinator(made, run_dir=run_dir, config=settings, bus=bus) as coordinator:
            reply(port=coordinator.port)
            result = await coordinator.wait()
        count = len(times) - WARM
        seconds, cpu_s = (last - first for first, last in zip(times[WARM - 1], times[-1], strict=True))
        waits = waited[WARM:]
        reply(
            rate=count / seconds, cpu_s=cpu_s / count, saves=saves, journal_s=sum(waits) / len(waits),
            digest=result.digest,
        )  # fmt: skip

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def make_size(model: str) -> int:
    """Bytes of one step's gradient."""
    return sum(4 * parameter.numel() for parameter in make_job(model).model().parameters())


def fsync_ms(place: Path, nbytes: int) -> float:
    with (place / "fsync").open("wb") as file:
        file.write(os.urandom(nbytes))
        began = time.perf_counter()
        file.flush()
        os.fsync(file.fileno())
        return (time.perf_counter() - began) * 1e3


if __name__ == "__main__":
    main()
