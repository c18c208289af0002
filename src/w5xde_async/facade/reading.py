"""How the earlier systems read a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from w5xde_async.job import loss_of

Criterion = Callable[[Any, Any], Tensor]


class BatchLoss:
    """``(model, batch) -> loss``: ``criterion(model(input_ids), labels)``, labels defaulting to the input.

    ``attention_mask`` is passed on to models whose forward takes it. Batches without ``input_ids``, such as tuples
    ``(x, y)``, are read as a Job's are.
    """

    def __init__(self, criterion: Criterion) -> None:
        self._criterion = criterion
        self._masked: dict[type, bool] = {}

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, dict) or "input_ids" not in batch:
            return loss_of(model, batch, self._criterion)
        inputs, target = batch["input_ids"], batch.get("labels")
        mask = batch.get("attention_mask")
        output = model(inputs, attention_mask=mask) if mask is not None and self._takes_mask(model) else model(inputs)
        output = getattr(output, "logits", output)
        return self._criterion(output, inputs.long() if target is None else target)

    def _takes_mask(self, model: nn.Module) -> bool:
        kind = type(model)
        if kind not in self._masked:
            self._masked[kind] = "attention_mask" in inspect.signature(model.forward).parameters
        return self._masked[kind]


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy; over every token where the output has a class axis beyond the target's (batch, sequence)."""
    if output.dim() > 2 and output.dim() == target.dim() + 1:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())
    return F.cross_entropy(output, target)
