"""A job whose leaves take as long as the environment says: a small MLP and a sleep in its loss.

The sleep stands for an accelerator's time: it uses no core of the machine, so the speeds of several workers add up on
two cores as they would on machines of their own. BENCH_LEAF_S is a leaf's sleep in seconds, BENCH_LEAVES the leaves of
a step. DDP (ddp.py) sleeps as long for as many samples.
"""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import classes
from w5xde_async import Job

LEAF_SAMPLES = 8
INPUTS = 64


def leaves_per_step() -> int:
    return int(os.environ.get("BENCH_LEAVES", "16"))


def sleep_s() -> float:
    """Of one leaf."""
    return float(os.environ.get("BENCH_LEAF_S", "0"))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 128), nn.ReLU(), nn.Linear(128, 10))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def loss(output: Tensor, target: Tensor) -> Tensor:
    time.sleep(sleep_s() * len(target) / LEAF_SAMPLES)
    return functional.cross_entropy(output, target)


def job() -> Job:
    return Job(
        model=model,
        dataset=classes(1 << 13, INPUTS),
        loss=loss,
        optimizer=sgd,
        batch_size=LEAF_SAMPLES * leaves_per_step(),
        microbatch_size=LEAF_SAMPLES,
        max_steps=1 << 40,
    )
