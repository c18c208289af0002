"""Acknowledged error feedback where a fifth of the results is refused: what it keeps, and what is lost without it.

    python bench/feedback.py [--quick] [--json FILE] [--refused 0.2] [--codecs topk:0.01,sign]

Four workers train the digits MLP of ``examples/digits.py`` through codecs with feedback; one process, no network, plain
SGD on the decoded mean, so that nothing but the verdicts differs. A seeded choice decides which results do not count:
another worker computes those leaves. Three worlds: ``clean`` (everything counts), ``told`` (the worker learns its
verdict), ``untold`` (it believes that all it sent has counted, as feedback without verdicts must). Figures, by codec:

- ``{codec}_{world}_loss``, ``_accuracy``: on held-out images at the end, median of ``--seeds`` runs
- ``{codec}_{world}_conservation``: |counted + residuals - computed and not leased again| / |the latter|, as vectors
  of sums over the whole run. Float error alone is about 1e-6
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

from report import Report, parser
from w5xde_async.codecs.codec import BytePool
from w5xde_async.codecs.feedback import Feedback
from w5xde_async.codecs.registry import codec

CODECS = "topk:0.01,topk:0.05,sign,int4"
WORKERS, LEAF = 4, 16
WORLDS = ("clean", "told", "untold")


@dataclass(frozen=True, slots=True)
class Ended:
    loss: float
    accuracy: float
    conservation: float


class Flat:
    """A model whose parameters and gradients are views of two vectors."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        parameters = list(model.parameters())
        self.values = torch.cat([p.detach().flatten() for p in parameters])
        self.gradient = torch.zeros_like(self.values)
        at = 0
        for p in parameters:
            p.data = self.values[at : at + p.numel()].view_as(p)
            p.grad = self.gradient[at : at + p.numel()].view_as(p)
            at += p.numel()


def train(
    name: str, world: str, *, data: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor], steps: int,
    refused: float, seed: int, rate: float = 0.2,
) -> Ended:  # fmt: skip
    """One run."""
    torch.manual_seed(seed)
    flat = Flat(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    chosen, chance = codec(name), Random(f"{seed}:refused")
    pool = BytePool()
    workers = [Feedback(chosen, {0: flat.values.numel()}, pool=pool, decay=1.0) for _ in range(WORKERS)]
    counted = torch.zeros(flat.values.numel(), dtype=torch.float64)
    computed = torch.zeros_like(counted)
    generator = torch.Generator().manual_seed(seed)
    loss_of = nn.functional.cross_entropy
    key = 0
    for _ in range(steps):
        total = torch.zeros_like(flat.values)
        for first in range(WORKERS):
            rows = torch.randint(len(data[0]), (LEAF,), generator=generator)
            worker = first
            while True:
                flat.gradient.zero_()
                loss_of(flat.model(data[0][rows]), data[1][rows]).backward()
                key += 1
                encoded = workers[worker].encode(key, 0, flat.gradient)
                counts = world == "clean" or chance.random() >= refused
                if counts:
                    before = total.clone()
                    encoded.codec.add_to(encoded.data, total)
                    counted += (total - before).double()
                    computed += flat.gradient.double()
                workers[worker].settle(key, applied=counts or world == "untold")
                if counts:
                    break
                worker = (worker + 1) % WORKERS  # leased again, to another
        with torch.no_grad():
            flat.values.add_(total, alpha=-rate / WORKERS)
    for worker in workers:
        residual = worker.residual(0)
        if residual is not None:
            counted += residual.double()
    with torch.no_grad():
        logits = flat.model(held_out[0])
        return Ended(
            loss_of(logits, held_out[1]).item(),
            (logits.argmax(1) == held_out[1]).float().mean().item(),
            float((counted - computed).norm() / computed.norm()),
        )


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--codecs", default=CODECS, help="names, separated by commas")
    flags.add_argument("--refused", type=float, default=0.2, help="part of the results that does not count")
    flags.add_argument("--steps", type=int, default=600)
    flags.add_argument("--seeds", type=int, default=5)
    args = flags.parse_args()
    seeds, steps = (2, 300) if args.quick else (args.seeds, args.steps)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    from digits import digits

    train_set, images, labels = digits()
    data = (train_set.tensors[0], train_set.tensors[1])
    torch.set_num_threads(1)
    report = Report({"codecs": args.codecs, "refused": args.refused, "steps": steps, "seeds": seeds})
    print("| codec | verdicts | loss | accuracy | conservation |\n|---|---|---|---|---|")
    for name in args.codecs.split(","):
        for world in WORLDS:
            runs = [
                train(name, world, data=data, held_out=(images, labels), steps=steps, refused=args.refused, seed=seed)
                for seed in range(seeds)
            ]
            at = f"{name}_{world}"
            loss = report.add(f"{at}_loss", [run.loss for run in runs])
            accuracy = report.add(f"{at}_accuracy", [run.accuracy for run in runs])
            kept = report.add(f"{at}_conservation", [run.conservation for run in runs])
            print(f"| {name} | {world} | {loss:.4f} | {accuracy:.3f} | {kept:.1e} |", flush=True)
    report.write(args.json)


if __name__ == "__main__":
    main()
