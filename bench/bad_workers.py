"""One of five workers lies: what becomes of the model, with the defence and without, and how soon the liar is found.

    python bench/bad_workers.py [--quick] [--json FILE]

Digits, an MLP, five workers in one process, every attack of tests/support/attacks.py from the first step on. Shown:
accuracy on held-out digits, its part of the honest run's, the step in which the liar was put out, honest workers
put out, blocks that were computed twice. ``off``: no check at all; ``default``: as it comes.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from report import Report, parser

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.attacks import ATTACKS, Found, run

DEFENCES: dict[str, dict[str, Any]] = {"off": {"norm_gate": 0.0, "audit_fraction": 0.0}, "default": {}}


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    steps, repeats = (100, 1) if arguments.quick else (400, 3)
    report = Report({"steps": steps, "repeats": repeats, "workers": 5, "bad": 1})
    honest: dict[str, float] = {}
    print(f"{'attack':<20}{'defence':<10}{'accuracy':>9}{'of honest':>11}{'found at':>10}{'false':>7}{'audits':>8}")
    for name in ("none", *ATTACKS):
        for defence, config in DEFENCES.items():
            runs = [asyncio.run(run(ATTACKS.get(name), steps=steps, **config)) for _ in range(repeats)]
            key = f"{name.replace(' ', '_')}_{defence}"
            accuracy = report.add(f"{key}_accuracy", [found.accuracy for found in runs])
            if name == "none":
                honest[defence] = accuracy
            report.add(f"{key}_over_honest", [found.accuracy / honest["off"] for found in runs])
            report.add(f"{key}_found_at_step", [float(found.found_at) for found in runs])
            report.add(f"{key}_false_alarms", [float(sum(found.false_alarms for found in runs))])
            show(name, defence, runs, honest["off"])
    report.write(arguments.json)


def show(name: str, defence: str, runs: list[Found], honest: float) -> None:
    accuracies = sorted(found.accuracy for found in runs)
    found_at = "/".join("never" if found.found_at < 0 else str(found.found_at) for found in runs)
    middle = accuracies[len(accuracies) // 2]
    print(
        f"{name:<20}{defence:<10}{middle:>9.3f}{middle / honest:>11.3f}{found_at:>10}"
        f"{sum(found.false_alarms for found in runs):>7}{sum(found.audits for found in runs) // len(runs):>8}",
        flush=True,
    )


if __name__ == "__main__":
    main()
