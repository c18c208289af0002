"""Delay compensation: what a gradient from old parameters would have been at the present ones, to first order.

Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation" (arXiv:1609.08326), sections 3-4:

    g' = g + lambda * g * g * (theta_now - theta_lease)          elementwise

g * g stands for the diagonal of the Hessian. Adaptive lambda (DC-ASGD-a): lambda = scale / sqrt(EMA(g^2) + 1e-7), the
EMA with decay 0.95 from zero and without bias correction, as in the paper. A fresh result (theta_lease is theta_now)
keeps its bits. No G3: the EMA depends on the order of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from w5xde_async.updates.admission import restore_

__all__ = ["CompensationConfig", "DelayCompensation"]

_EPSILON = 1e-7
_CHUNK = 1 << 16  # elements: three temporaries of 256 KiB stay in cache


@dataclass(frozen=True, kw_only=True)
class CompensationConfig:
    """``scale`` is lambda, or lambda_0 where ``adaptive``; ``decay`` of the mean square. Defaults: the paper's."""

    scale: float = 2.0
    adaptive: bool = True
    decay: float = 0.95

    def __post_init__(self) -> None:
        if not self.scale > 0 or not 0 <= self.decay < 1:
            raise ValueError("scale is above 0 and decay in [0, 1)")


class DelayCompensation:
    """Corrects gradients in place. Memory: 4 n bytes where adaptive, else nothing."""

    def __init__(self, numel: int, config: CompensationConfig) -> None:
        self.config = config
        self._mean_square = torch.zeros(numel if config.adaptive else 0)

    def apply_(self, gradient: Tensor, now: Tensor, leased: Tensor) -> None:
        """Correct ``gradient``, computed at ``leased``, for the present parameters ``now``."""
        scale, decay = self.config.scale, self.config.decay
        for start in range(0, gradient.numel(), _CHUNK):
            piece = gradient[start : start + _CHUNK]
            term = now[start : start + _CHUNK] - leased[start : start + _CHUNK]
            term.mul_(piece).mul_(piece)
            if self.config.adaptive:
                mean_square = self._mean_square[start : start + _CHUNK]
                mean_square.mul_(decay).addcmul_(piece, piece, value=1 - decay)
                term.div_(mean_square.add(_EPSILON).sqrt_())
            piece.add_(term, alpha=scale)

    def state_dict(self) -> dict[str, Any]:
        """The mean square; it shares memory with this."""
        return {"mean_square": self._mean_square}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. Raises ValueError where the layout or ``adaptive`` is another."""
        restore_(self._mean_square, state["mean_square"], "the mean square of delay compensation")
