"""Local steps (DiLoCo): workers take H optimizer steps of their own; a round averages where they went.

Douillard et al. 2023, arXiv:2311.08105, algorithm 1. A lease is "H inner steps from version v on these leaves"; its
result is Delta = theta_v - theta_local. One round (one version) of the outer optimizer, SGD with Nesterov momentum:

    D     = sum(n_i Delta_i) / sum(n_i)
    m     = beta m + D
    theta = theta - eta (D + beta m)

The inner optimizer and its state are the worker's. A pseudo-gradient is to be made from the version the work began at,
also after a reconnect: against newer parameters it would take back what others did. When a round closes is ``quorum``'s
affair.

Holds: each sample is in one accepted pseudo-gradient (G1); a late pseudo-gradient is refused and its leaves go back, or
it joins the next round with weight (1 + tau)^-exponent where ``max_staleness`` allows. Does not hold: the same bits
(G3), unless the same pseudo-gradients are offered in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from w5xde_async.params.flat import l2_norm
from w5xde_async.updates.admission import Admission, Outcome, check_vector, restore_
from w5xde_async.updates.averages import Average, WeightedMean
from w5xde_async.updates.norm_gate import NormGate


def nesterov_(parameters: Tensor, momentum: Tensor, direction: Tensor, learning_rate: float, beta: float) -> None:
    """m <- beta m + D; theta <- theta - eta (D + beta m), in place. As torch.optim.SGD(nesterov=True) does."""
    momentum.mul_(beta).add_(direction)
    parameters.add_(direction, alpha=-learning_rate).add_(momentum, alpha=-learning_rate * beta)


@dataclass(frozen=True, kw_only=True)
class LocalStepsConfig:
    """Outer ``learning_rate`` (eta) and ``momentum`` (beta): the paper's. ``max_staleness`` in rounds, 0: none late."""

    learning_rate: float = 0.7
    momentum: float = 0.9
    max_staleness: int = 0
    staleness_exponent: float = 0.5


class LocalStepsRule:
    """The outer optimizer over ``parameters``, which it changes in place at ``close``. One thread at a time.

    Memory for n parameters: 8 n bytes (momentum and the round's sum), or 4 n and what another average states.
    """

    def __init__(
        self,
        parameters: Tensor,
        config: LocalStepsConfig,
        *,
        average: Average | None = None,
        gate: NormGate | None = None,
    ) -> None:
        check_vector(parameters)
        self.parameters, self.config = parameters, config
        self.average: Average = WeightedMean(parameters.numel()) if average is None else average
        self.admission = Admission(
            max_staleness=config.max_staleness, exponent=config.staleness_exponent, gate=gate, scale=False
        )  # fmt: skip
        self._momentum = torch.zeros_like(parameters)

    def offer(
        self, pseudo_gradient: Tensor, *, samples: int, path: float | None = None, staleness: int = 0,
        sender: str = "one", present: int = 1, vouched: float = 0.0,
    ) -> Outcome:  # fmt: skip
        """Count one worker's pseudo-gradient, which is used up. ``staleness``: rounds closed since its lease.
        ``path``: see ``Admission.judge``."""
        check_vector(pseudo_gradient, self.parameters.numel())
        outcome = self.admission.judge(
            pseudo_gradient, samples=samples, length=path, staleness=staleness, sender=sender, present=present,
            vouched=vouched,
        )  # fmt: skip
        if outcome.accepted:
            self.average.add(pseudo_gradient, samples=samples, weight=outcome.weight)
        return outcome

    @property
    def pending(self) -> int:
        """Pseudo-gradients in the open round."""
        return self.average.count

    @property
    def full(self) -> bool:
        """Whether the open round has room for no more pseudo-gradients: it is to be closed."""
        return self.average.full

    @torch.no_grad()
    def close(self) -> float | None:
        """End the round: step, and give D's norm. None, and nothing changed, where no pseudo-gradient is in."""
        if not self.average.count:
            return None
        direction = self.average.take()
        nesterov_(self.parameters, self._momentum, direction, self.config.learning_rate, self.config.momentum)
        return l2_norm(direction)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the parameters: plain containers, numbers and tensors, which share memory with this."""
        return {
            "momentum": self._momentum,
            "average": self.average.state_dict(),
            "admission": self.admission.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. Raises ValueError where it belongs to another layout."""
        restore_(self._momentum, state["momentum"], "the outer momentum")
        self.average.load_state_dict(state["average"])
        self.admission.load_state_dict(state["admission"])
