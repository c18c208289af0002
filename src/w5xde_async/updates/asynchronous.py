"""The asynchronous rule: results count as they arrive, older ones less, too old ones not at all.

    g_i = G_i / n_i                                       a block's sum of gradients over its samples
    w_i = (1 + tau_i)^-exponent                           tau: versions since the lease; over max_staleness: refused
    g   = sum over K results of w_i n_i g_i / sum n_i     then one optimizer step with g

K = 1 is plain asynchronous SGD (Recht et al. 2011, arXiv:1106.5730; Dean et al. 2012), K > 1 is FedBuff's buffer
(Nguyen et al. 2022, arXiv:2106.06639, algorithm 1; K = 10 there). Options: a norm gate (``norm_gate``), another average
over the buffer (``averages``).

Holds: each sample counts once (G1): a refused result's leaves go back to the ledger, and the buffer is part of the
state_dict. Does not hold: the same bits (G3), for the order of arrival decides; with one worker, K = 1 and no option it
is the synchronous rule's sequence, to the bit. No slow worker is waited for (G16).
Momentum adds its own delay to the results': see ``delay_warning``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from w5xde_async.updates.admission import Admission, Outcome, check_vector
from w5xde_async.updates.averages import Average, WeightedMean
from w5xde_async.updates.norm_gate import NormGate

#: Momentum beta multiplies the step by 1 / (1 - beta) with a delay of its own on top of the results'.
MAX_MOMENTUM = 0.5


@dataclass(frozen=True, kw_only=True)
class AsynchronousConfig:
    """``results_per_step`` is K; ``max_staleness`` in versions."""

    results_per_step: int = 1
    max_staleness: int = 16
    staleness_exponent: float = 0.5


class AsynchronousRule:
    """Makes gradients of results; the optimizer that steps with them, and its state, are the caller's.

    ``offer`` each result as it comes; when ``ready``, ``take`` the gradient, step, count one version. One thread at a
    time. Memory for n parameters: 4 n bytes, or what another average states.
    """

    def __init__(
        self, numel: int, config: AsynchronousConfig, *, average: Average | None = None, gate: NormGate | None = None
    ) -> None:
        self.config, self.numel = config, numel
        self.average: Average = WeightedMean(numel) if average is None else average
        self.admission = Admission(
            max_staleness=config.max_staleness, exponent=config.staleness_exponent, gate=gate
        )  # fmt: skip

    def offer(
        self,
        total: Tensor,
        *,
        samples: int,
        staleness: int,
        sender: str = "one",
        present: int = 1,
        vouched: float = 0.0,
    ) -> Outcome:
        """Count one block's sum of gradients, which is used up.

        Raises ValueError where the vector is not as long as the parameters, or a step is due.
        """
        check_vector(total, self.numel)
        if self.ready:
            raise ValueError("a step is due: take its gradient first")
        if samples > 0:
            total.div_(samples)
        outcome = self.admission.judge(
            total, samples=samples, staleness=staleness, sender=sender, present=present, vouched=vouched
        )
        if outcome.accepted:
            self.average.add(total, samples=samples, weight=outcome.weight)
        return outcome

    @property
    def ready(self) -> bool:
        """Whether K results are in: the next version is due."""
        return self.average.count >= self.config.results_per_step

    def take(self, *, early: bool = False) -> Tensor:
        """The step's gradient, the caller's until the next ``offer``. Raises ValueError unless ``ready``.

        ``early``: of those that are in, because no more will come.
        """
        if not self.ready and not (early and self.average.count):
            raise ValueError(f"{self.average.count} of {self.config.results_per_step} results are in")
        return self.average.take()

    def state_dict(self) -> dict[str, Any]:
        """The buffer and the options' states: plain containers, numbers and tensors, which share memory with this."""
        return {
            "average": self.average.state_dict(),
            "admission": self.admission.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. Raises ValueError where it belongs to other options."""
        self.average.load_state_dict(state["average"])
        self.admission.load_state_dict(state["admission"])


def delay_warning(param_groups: Iterable[Mapping[str, Any]]) -> str | None:
    """What to tell the user where an optimizer's ``param_groups`` are of one that delay does not suit; else None."""
    groups = list(param_groups)
    if any("etas" in group for group in groups):
        return (
            "Rprop lengthens a step while its sign stays the same, which late gradients do for too long: training is "
            "likely to diverge; use another optimizer, or --update sync"
        )
    most = max((float(group.get("momentum", 0.0)) for group in groups), default=0.0)
    if most > MAX_MOMENTUM:
        return f"momentum {most:g} with delayed gradients is likely to diverge; use {MAX_MOMENTUM:g} or less"
    # Adam's average makes steps no longer, but those that come late are of gradients that are older still.
    first = max((float(group["betas"][0]) for group in groups if group.get("betas")), default=0.0)
    if first > MAX_MOMENTUM:
        return (
            f"the optimizer's first beta, {first:g}, averages gradients that are late already: training may swing or "
            f"diverge; with many workers use betas=({MAX_MOMENTUM:g}, ...) or less"
        )
    return None
