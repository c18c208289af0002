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
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class BatchLoss:
    """``(model, batch) -> loss``: ``criterion(model(input_ids), labels)``, labels defaulting to the input.

    Labels may have any of the target's names. Whatever else the batch has is passed on by its name to models whose
    forward takes it, such as ``attention_mask``; what it does not take is warned of, once. Of two parts without
    ``input_ids``, ``{"x", "y"}`` or ``{"image", "label"}``, the model gets the one that is no target. Other batches,
    such as tuples ``(x, y)``, are read as a Job's are.
    """

    def __init__(self, criterion: Criterion) -> None:
        self._criterion = criterion
        self._taken: dict[type, tuple[bool, set[str] | None]] = {}
        self._told: set[str] = set()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, dict) or "input_ids" not in batch:
            return loss_of(model, _readable(_pair(batch)), self._mean)
        target = _target_of(batch)
        inputs, named = self._arguments(model, {name: value for name, value in batch.items() if name != target})
        output = logits_of(model(*inputs, **named))
        if target is None:
            self._tell(
                "the batches have no labels: input_ids are the target, and the model learns to repeat its input; give "
                "labels (of a language model: input_ids shifted by one)"
            )
        return self._mean(output, batch["input_ids"].long() if target is None else batch[target])

    def _mean(self, output: Any, target: Any) -> Tensor:
        loss = self._criterion(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"the criterion gave {described(loss)}, not the mean loss: a tensor with one element")
        return loss

    def _arguments(self, model: nn.Module, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """What ``forward`` takes of ``given``: ``input_ids`` first, whatever it is called there, and others by name."""
        kind = type(model)
        if kind not in self._taken:
            self._taken[kind] = _taken_by(model)
        first, names = self._taken[kind]
        unnamed = [given.pop("input_ids")] if first else []
        if names is not None and (left := [name for name in given if name not in names]):
            self._tell(
                f"beside input_ids the batches have {', '.join(left)}, which the model's forward does not take: "
                f"{'they are' if len(left) > 1 else 'it is'} left out"
            )
            given = {name: value for name, value in given.items() if name in names}
        return unnamed, given

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning("%s", text)


def _taken_by(model: nn.Module) -> tuple[bool, set[str] | None]:
    """Whether ``forward`` has ``input_ids`` in its first place, and what else it takes by name; None: anything.

    Of a wrapper that passes on whatever it is given (``torch.compile``, ``nn.DataParallel``), what is inside; where
    that cannot be seen, nothing is known, and it is given ``input_ids`` alone.
    """
    inner: Any = model
    takes = inspect.signature(inner.forward).parameters
    while not any(taken.kind in _BY_NAME for taken in takes.values()) and isinstance(
        within := getattr(inner, "_orig_mod", None) or getattr(inner, "module", None), nn.Module
    ):
        inner = within
        takes = inspect.signature(inner.forward).parameters
    named, first = {name for name, taken in takes.items() if taken.kind in _BY_NAME}, next(iter(takes), "")
    takes_any = any(taken.kind is taken.VAR_KEYWORD for taken in takes.values())
    if not named and all(taken.kind is taken.VAR_KEYWORD for taken in takes.values()):
        return False, None
    positional = "input_ids" not in named or (first == "input_ids" and takes[first].kind is not _BY_NAME[1])
    if takes_any and named:
        return positional, None
    return positional, named - {first} if positional else named


def _target_of(batch: dict[str, Any]) -> str | None:
    return next((name for name in _TARGETS if name in batch), None)


def _pair(batch: Any) -> Any:
    """``(inputs, target)`` for a dict of these two; any other batch as it is."""
    if not isinstance(batch, dict) or len(batch) != 2:
        return batch
    target = _target_of(batch)
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
