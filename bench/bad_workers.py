"""One of five workers lies: what becomes of the model, with the defence and without, and how soon the liar is found.

    python bench/bad_workers.py [--quick] [--json FILE]

Digits, an MLP, five workers in one process, every attack of tests/support/attacks.py, from the first step on and
("late") from half of the steps on, after as many honest ones. Shown: accuracy on held-out digits, its part of the
honest run's, the step in which the liar was quarantined, honest workers quarantined, blocks that were computed twice.
``off``: no check at all; ``default``: as it comes.

Then what it costs honest workers: a coordinator and two worker processes, exact float32 over loopback, with no check,
with the norms alone, and as it comes, in turn (A B C A B C) in processes that stay; all must end in equal parameters.
``gate_over_off_MODEL`` and ``default_over_off_MODEL`` are medians of the rounds' ratios of steps a second. Models: tiny
(10-20-10, where a step is shortest), mlp (0.67M parameters), gpt (10.9M).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from models import Rig, coordinate, make_job, serve, work
from report import Report, median, parser

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.attacks import ATTACKS, Found, run

DEFENCES: dict[str, dict[str, Any]] = {"off": {"norm_gate": 0.0, "audit_fraction": 0.0}, "default": {}}
COSTS = {**DEFENCES, "gate": {"audit_fraction": 0.0}}
#: Steps of a round and, before them, steps that warm up: (full, quick, warm).
STEPS = {"tiny": (4000, 1000, 200), "mlp": (300, 80, 20), "gpt": (20, 6, 4)}
WORKERS = ("worker-0", "worker-1")


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--attacks", nargs="*", choices=["none", *ATTACKS], help="only these (none given: no attacks)")
    flags.add_argument("--models", nargs="*", choices=STEPS, help="the cost of only these")
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = flags.parse_args()
    if arguments.child:
        serve({"coordinate": coordinate, "work": work})
        return
    steps, repeats = (80, 1) if arguments.quick else (400, 3)
    report = Report({"steps": steps, "repeats": repeats, "workers": 5, "bad": 1})
    names = ["none", *ATTACKS] if arguments.attacks is None else arguments.attacks
    if names:
        attacks(report, names, steps, repeats)
    models = (["mlp"] if arguments.quick else list(STEPS)) if arguments.models is None else arguments.models
    if models:
        with Rig(__file__, ["coordinator", *WORKERS]) as rig:
            for name in models:
                cost(report, rig, name, STEPS[name][int(arguments.quick)], 2 if arguments.quick else 7)
    report.write(arguments.json)


def attacks(report: Report, names: list[str], steps: int, repeats: int) -> None:
    honest = 0.0
    print(f"{'attack':<26}{'defence':<10}{'accuracy':>9}{'of honest':>11}{'found at':>16}{'false':>7}{'audits':>8}")
    kinds = [("none", 0)] + [(name, begins) for name in names if name != "none" for begins in (0, steps // 2)]
    for name, begins in kinds:
        for defence, config in DEFENCES.items():
            attack = ATTACKS.get(name)
            runs = [asyncio.run(run(attack, steps=steps, begins=begins, **config)) for _ in range(repeats)]
            called = f"{name}, late" if begins else name
            key = f"{called.replace(', ', '_').replace(' ', '_')}_{defence}"
            accuracy = report.add(f"{key}_accuracy", [found.accuracy for found in runs])
            honest = honest or accuracy
            report.add(f"{key}_over_honest", [found.accuracy / honest for found in runs])
            report.add(f"{key}_found_at_step", [float(found.found_at) for found in runs])
            report.add(f"{key}_false_alarms", [float(sum(found.false_alarms for found in runs))])
            show(called, defence, runs, honest)


def cost(report: Report, rig: Rig, name: str, steps: int, rounds: int) -> None:
    samples = make_job(name).batch_size
    rates: dict[str, list[float]] = {defence: [] for defence in COSTS}
    for number in range(rounds):
        digests = set()
        for defence in list(COSTS) if number % 2 else reversed(COSTS):
            ended = train(rig, name, steps, COSTS[defence])
            rates[defence].append(ended["rate"] * samples)
            digests.add(ended["digest"])
        if len(digests) != 1:
            raise SystemExit(f"{name}: the parameters differ with and without the defence")
    for defence in ("gate", "default"):
        ratios = [a / b for a, b in zip(rates[defence], rates["off"], strict=True)]
        report.add(f"{defence}_over_off_{name}", ratios)
        print(f"{name}: {defence} {median(ratios):.3f} of off ({min(ratios):.3f} .. {max(ratios):.3f}, n={rounds})")
    report.add(f"off_samples_per_s_{name}", rates["off"])


def train(rig: Rig, name: str, steps: int, config: dict[str, Any]) -> dict[str, Any]:
    warm = STEPS[name][2]
    options = {"steps": steps + warm}
    rig["coordinator"].tell("coordinate", job=name, options=options, workers=2, warm_steps=warm, config=config)
    port = rig["coordinator"].answer()["port"]
    for worker in WORKERS:
        rig[worker].tell("work", port=port, job=name, options=options)
    rig["coordinator"].answer()  # it is warm
    passed = rig["coordinator"].answer()
    ended = rig["coordinator"].answer()
    for worker in WORKERS:
        rig[worker].answer()
    return ended | {"rate": passed["steps"] / passed["seconds"]}


def show(name: str, defence: str, runs: list[Found], honest: float) -> None:
    accuracies = sorted(found.accuracy for found in runs)
    found_at = "/".join("never" if found.found_at < 0 else str(found.found_at) for found in runs)
    middle = accuracies[len(accuracies) // 2]
    print(
        f"{name:<26}{defence:<10}{middle:>9.3f}{middle / honest:>11.3f}{found_at:>16}"
        f"{sum(found.false_alarms for found in runs):>7}{sum(found.audits for found in runs) // len(runs):>8}",
        flush=True,
    )


if __name__ == "__main__":
    main()
