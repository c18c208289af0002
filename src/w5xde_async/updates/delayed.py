"""Asynchronous local steps: pseudo-gradients count as they arrive, momentum only at every N-th (delayed Nesterov).

Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling", arXiv:2401.09135
(Delayed Nesterov Update, momentum activation c = 0). Per arrival

    theta = theta - eta Delta / N;   B = B + Delta
    every N-th:   m = beta m + B / N;   theta = theta - eta beta m;   B = 0

and inner steps by speed (DyLU): H_w = floor(v_w / v_max * H), so that all pseudo-gradients come about as often and none
is old. N is the number of workers that are present at the arrival. Each pseudo-gradient has the same weight, however
many samples it has: there is no sum of n to divide by, and DyLU has already made it as long as its share. If all N
arrive against the same parameters, that is one round of ``local``.

Holds: each sample is in one accepted pseudo-gradient (G1); no slow worker is waited for (G16). Does not hold: the same
bits (G3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from w5xde_async.updates.admission import Admission, Outcome, check_vector, restore_
from w5xde_async.updates.norm_gate import NormGate


def inner_steps(speed: float, fastest: float, most: int) -> int:
    """H_w = floor(speed / fastest * most), at least 1. Speeds in any one unit of work per second, as measured."""
    if not 0 < speed <= fastest or most < 1:
        raise ValueError("speeds are above 0, none above the fastest, and most is at least 1")
    return max(1, int(speed / fastest * most))


@dataclass(frozen=True, kw_only=True)
class DelayedNesterovConfig:
    """``period`` is N, None: what each ``offer`` says. ``max_staleness`` in versions (arrivals), None: no bound, and
    exponent 0: the paper's."""

    period: int | None = None
    learning_rate: float = 0.7
    momentum: float = 0.9
    max_staleness: int | None = None
    staleness_exponent: float = 0.0


class DelayedNesterovRule:
    """Every accepted pseudo-gradient changes ``parameters`` in place and is one version. One thread at a time.

    Memory for n parameters: 8 n bytes (momentum and B).
    """

    def __init__(self, parameters: Tensor, config: DelayedNesterovConfig, *, gate: NormGate | None = None) -> None:
        check_vector(parameters)
        self.parameters, self.config = parameters, config
        self.admission = Admission(
            max_staleness=config.max_staleness, exponent=config.staleness_exponent, gate=gate, scale=False
        )  # fmt: skip
        self._momentum = torch.zeros_like(parameters)
        self._buffer = torch.zeros_like(parameters)
        self._arrivals = 0

    @torch.no_grad()
    def offer(
        self, pseudo_gradient: Tensor, *, samples: int, staleness: int, path: float | None = None, workers: int = 1,
        sender: str = "one", present: int = 1, vouched: float = 0.0,
    ) -> Outcome:  # fmt: skip
        """Apply one worker's pseudo-gradient, which is used up. ``workers``: how many there are. ``path``: see
        ``Admission.judge``."""
        check_vector(pseudo_gradient, self.parameters.numel())
        outcome = self.admission.judge(
            pseudo_gradient, samples=samples, length=path, staleness=staleness, sender=sender, present=present,
            vouched=vouched,
        )  # fmt: skip
        if not outcome.accepted:
            return outcome
        period = self.config.period or workers
        learning_rate, beta = self.config.learning_rate, self.config.momentum
        self.parameters.add_(pseudo_gradient, alpha=-learning_rate * outcome.weight / period)
        self._buffer.add_(pseudo_gradient, alpha=outcome.weight)
        self._arrivals += 1
        if self._arrivals >= period:  # more, where workers have left
            self._momentum.mul_(beta).add_(self._buffer, alpha=1.0 / self._arrivals)
            self.parameters.add_(self._momentum, alpha=-learning_rate * beta)
            self._buffer.zero_()
            self._arrivals = 0
        return outcome

    def state_dict(self) -> dict[str, Any]:
        """Everything but the parameters: plain containers, numbers and tensors, which share memory with this."""
        return {
            "momentum": self._momentum,
            "buffer": self._buffer,
            "arrivals": self._arrivals,
            "admission": self.admission.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. Raises ValueError where it belongs to another layout."""
        restore_(self._momentum, state["momentum"], "the outer momentum")
        restore_(self._buffer, state["buffer"], "the buffer")
        self._arrivals = int(state["arrivals"])
        self.admission.load_state_dict(state["admission"])
