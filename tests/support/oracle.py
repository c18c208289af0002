"""A job whose model says how often each sample was applied.

There is one weight a sample, the loss of sample i touches weight i alone, and the learning rate is the batch: a step
adds exactly 1 to the weight of each of its samples. So a weight of 2 is a sample that counted twice, and a weight of 0
one that was lost, whatever the ledger says. Two copies of the weights lie in buckets of their own: under ``streaming``
they are two fragments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from w5xde_async.job import Job
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.outer import Contribution, OuterRule

__all__ = ["PLAIN", "Deltas", "applied", "job", "listening"]

BATCH = 8
_ROOM = 16 << 10  # elements of a copy: as many bytes as the smallest bucket has

#: Each rule with the numbers that make a worker's step one step of the model: no momentum, no weights by staleness.
PLAIN: dict[str, UpdateConfig] = {
    "sync": UpdateConfig(),
    "async": UpdateConfig(rule="async", staleness_exponent=0.0),
    "local": UpdateConfig(
        rule="local", inner_steps=3, outer_lr=1.0, outer_momentum=0.0, staleness_exponent=0.0, max_staleness=9
    ),
    # What is kept of the local values: as good as all, so that no step made while a fragment was away is forgotten.
    "streaming": UpdateConfig(
        rule="streaming", inner_steps=4, fragments=2, outer_lr=1.0, outer_momentum=0.0, staleness_exponent=0.0,
        mixing=0.9999, max_staleness=9,
    ),
    "async-local": UpdateConfig(
        rule="async-local", inner_steps=3, outer_lr=1.0, outer_momentum=0.0, results_per_step=1
    ),
}  # fmt: skip


class Weights(nn.Module):
    """Two copies of one weight a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(_ROOM))
        self.second = nn.Parameter(torch.zeros(_ROOM))

    def forward(self, sample: Tensor) -> Tensor:
        return self.first[sample] + self.second[sample]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return -output.mean()


def job(samples: int = 256, *, model: type[nn.Module] = Weights, epochs: int = 1, **changes: Any) -> Job:
    """``samples`` in steps of eight, two leaves each."""
    ids = torch.arange(samples)
    return Job(**{
        "model": model, "dataset": TensorDataset(ids, ids), "loss": _loss, "batch_size": BATCH,
        "microbatch_size": BATCH // 2, "epochs": epochs,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=float(BATCH)), **changes,
    })  # fmt: skip


def applied(model: nn.Module | Path, samples: int = 256) -> list[list[float]]:
    """How often each sample counted, by copy. ``model``: itself, or the file that a run has exported."""
    state = load_file(model) if isinstance(model, Path) else model.state_dict()
    return [[round(float(value), 2) for value in state[name][:samples]] for name in ("first", "second")]


class Deltas:
    """The sum of all Deltas that were accepted: what a round averages, each counted whole."""

    def __init__(self) -> None:
        self.sums = [torch.zeros(_ROOM), torch.zeros(_ROOM)]
        self.refused = self.accepted = 0
        self.largest = 0  # samples in one of them

    def times(self, samples: int = 256) -> list[list[float]]:
        """How often each sample is in them, by copy."""
        return [[round(float(value), 2) for value in piece[:samples]] for piece in self.sums]


@contextmanager
def listening() -> Iterator[Deltas]:
    """Add up what every rule in this process accepts."""
    heard, offer = Deltas(), OuterRule.offer

    def listen(rule: OuterRule, given: Contribution) -> Any:
        whole = given.vector.group(rule.group).clone()
        outcome = offer(rule, given)
        if not outcome.accepted:
            heard.refused += 1
            return outcome
        heard.accepted += 1
        heard.largest = max(heard.largest, given.samples)
        for entry in rule.layout.entries:
            here = all(given.present[b.index] for b in rule.layout.result_buckets if b.offset == entry.offset)
            if here:
                heard.sums[("first", "second").index(entry.name)] -= whole[entry.offset : entry.offset + entry.numel]
        return outcome

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OuterRule, "offer", listen)
        yield heard
