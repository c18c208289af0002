"""How the earlier systems read a batch."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from w5xde_async.compute.block import described
from w5xde_async.job import logits_of, loss_of

logger = logging.getLogger(__name__)

Criterion = Callable[[Any, Any], Tensor]
#: What the target is called in a sample of two parts, whatever the other is called.
_TARGETS = ("labels", "label", "targets", "target", "y")


class BatchLoss:
    """``(model, batch) -> loss``: ``criterion(model(input_ids), labels)``, labels defaulting to the input.

    ``attention_mask`` is passed on to models whose forward takes it. Of two parts without ``input_ids``, ``{"x", "y"}``
    or ``{"image", "label"}``, the model gets the one that is no target. Other batches, such as tuples ``(x, y)``, are
    read as a Job's are.
    """

    def __init__(self, criterion: Criterion) -> None:
        self._criterion = criterion
        self._masked: dict[type, bool] = {}
        self._told = False

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, dict) or "input_ids" not in batch:
            return loss_of(model, _readable(_pair(batch)), self._mean)
        inputs, target = batch["input_ids"], batch.get("labels")
        mask = batch.get("attention_mask")
        output = model(inputs, attention_mask=mask) if mask is not None and self._takes_mask(model) else model(inputs)
        output = logits_of(output)
        if target is None and not self._told:
            self._told = True
            logger.warning(
                "the batches have no labels: input_ids are the target, and the model learns to repeat its input; give "
                "labels (of a language model: input_ids shifted by one)"
            )
        return self._mean(output, inputs.long() if target is None else target)

    def _mean(self, output: Any, target: Any) -> Tensor:
        loss = self._criterion(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"the criterion gave {described(loss)}, not the mean loss: a tensor with one element")
        return loss

    def _takes_mask(self, model: nn.Module) -> bool:
        kind = type(model)
        if kind not in self._masked:
            self._masked[kind] = "attention_mask" in inspect.signature(model.forward).parameters
        return self._masked[kind]


def _pair(batch: Any) -> Any:
    """``(inputs, target)`` for a dict of these two; any other batch as it is."""
    if not isinstance(batch, dict) or len(batch) != 2:
        return batch
    target = next((name for name in _TARGETS if name in batch), None)
    return batch if target is None else (*(value for name, value in batch.items() if name != target), batch[target])


def _readable(batch: Any) -> Any:
    """Raises TypeError, in the facades' words, for a batch without a target."""
    parts = "input_ids and labels, or of one input and one of " + ", ".join(_TARGETS)
    if isinstance(batch, dict):
        if not any(name in batch for name in _TARGETS[:-1]):  # y only beside one input
            raise TypeError(f"samples are dicts of {', '.join(map(str, batch))[:200]}; give dicts of {parts}")
    elif not isinstance(batch, tuple | list) or len(batch) < 2:
        raise TypeError(
            f"samples have no target (a batch is a {type(batch).__name__}); give (x, y), or dicts of {parts}"
        )
    return batch


def class_loss(output: Any, target: Tensor) -> Tensor:
    """Cross entropy with the class axis second, as ``CrossEntropyLoss`` has it, or last, as language models have it.

    Raises TypeError for an output that is no tensor, and ValueError where the shapes fit both: the wrong guess would
    train something else without a word.
    """
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the model gave {described(output)}, not a tensor of scores: give criterion=, a function of output and "
            "target that returns the loss"
        )
    if target.is_floating_point() or output.dim() < 3 or output.dim() != target.dim() + 1:
        return F.cross_entropy(output, target)
    last, second = output.shape[:-1] == target.shape, output.shape[2:] == target.shape[1:]
    if last and second:
        raise ValueError(
            f"an output of {tuple(output.shape)} fits a target of {tuple(target.shape)} in two ways: give criterion="
            "torch.nn.CrossEntropyLoss() for classes on the second axis, or, for classes on the last one, criterion="
            "lambda output, target: torch.nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())"
        )
    return F.cross_entropy(output.flatten(0, -2), target.flatten()) if last else F.cross_entropy(output, target)
