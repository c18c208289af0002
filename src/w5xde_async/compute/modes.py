"""Which modules train and which only evaluate: every leaf finds them as the model was built.

``model.eval()`` in the middle of a run would last in the process whose leaf has called it and nowhere else: other
workers, and a resumed run, would go on with dropout and batch statistics. What a step switches lasts until its end.
"""

from __future__ import annotations

import logging

from torch import nn

logger = logging.getLogger(__name__)

_ONCE = (
    "a step has switched {name} to {mode} and the next one has not: nothing of that lasts, since no other worker and "
    "no resumed run would know it; switch modules in every step, by a buffer that counts (docs/own-model.md)"
)


class Modes:
    """The modes of one replica's modules, which ``restore`` puts back before each leaf."""

    def __init__(self, model: nn.Module) -> None:
        self._named = list(model.named_modules())
        self._modules = [module for _, module in self._named]
        self._built = [module.training for module in self._modules]
        self._left: list[bool] | None = None  # by the leaf before, where they were others
        self._told = False

    def restore(self) -> None:
        """Put back what the last leaf has switched. A person is told of what was switched once."""
        now = [module.training for module in self._modules]
        if now != self._built:
            self._left = now
            for module, mode in zip(self._modules, self._built, strict=True):
                if module.training is not mode:
                    module.training = mode
        elif self._left is not None:
            self._tell(self._left)
            self._left = None

    def _tell(self, left: list[bool]) -> None:
        if not self._told:
            self._told = True
            at = next(i for i, (one, other) in enumerate(zip(left, self._built, strict=True)) if one != other)
            name = repr(self._named[at][0]) if self._named[at][0] else "the model"
            logger.warning("%s", _ONCE.format(name=name, mode="training" if left[at] else "evaluation"))
