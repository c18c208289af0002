"""What no step may change: which parameters a model has, which of them are trained, what they hold, and
gradients but by backward. It would be lost, or be so in this process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from w5xde_async.compute.block import GRADIENTS_CHANGED
from w5xde_async.job import trained_otherwise
from w5xde_async.params.flat import fingerprints

REPLACED = (
    "parameter {name!r} is another one than when the run began, and what is trained is fixed for a run: make every "
    "layer in the model's constructor, and change values in a hook of the optimizer (register_step_post_hook)"
)
CHANGED = (
    "the step changes parameter {name!r} itself, as for a target network or to clip weights: that would be lost, since "
    "every worker has a copy of its own. Change it after the update, in a hook of the optimizer "
    "(register_step_post_hook, docs/own-model.md), or make it a buffer"
)


class Watched:
    """Parameters, by name, whose values are compared with those before. ``gathered``: by ``fully_shard``."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], device: torch.device, *, gathered: bool = False) -> None:
        found = [(name, tensor) for name, tensor in named if tensor.numel() and _is_tracked(tensor)]
        self._names = [name for name, _ in found]
        self._tensors, self._device, self._gathered = [tensor for _, tensor in found], device, gathered

    def written(self) -> int:
        """How often they have been written, by whoever says so."""
        return sum([tensor._version for tensor in self._tensors])

    def values(self) -> Values:
        marks = fingerprints(self._tensors, self._device, resized=self._gathered)
        return Values([tensor.data_ptr() for tensor in self._tensors], marks, self._names)


class Values(NamedTuple):
    """Of each parameter: where it lies, and what tells whether its values have changed, in whatever way."""

    places: list[int]
    marks: Tensor  # int64, on the device: nothing waits for it before it is compared
    names: Sequence[str]

    def changed(self, before: Values) -> list[str]:
        """Which have."""
        if self.places == before.places and torch.equal(self.marks, before.marks):
            return []
        now, was = (zip(one.places, one.marks.tolist(), strict=True) for one in (self, before))
        return [name for name, one, other in zip(self.names, now, was, strict=True) if one != other]


def looks(blocks: int) -> bool:
    """Whether all values are looked at in the block after so many: seldom, for a large model has thousands of
    parameters, and every value is read."""
    return blocks & (blocks + 1) == 0


def renormed(model: nn.Module) -> set[int]:
    """Ids of parameters that torch's own forward passes change (docs/same-bits.md says what becomes of that)."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return {id(module.weight) for module in embeddings if module.max_norm is not None}


def refuse_others(model: nn.Module, own: Mapping[int, Any] | set[int]) -> None:
    """Raises TypeError for a parameter that is none of its own, by their ids: nobody would train it."""
    for name, parameter in model.named_parameters():
        if id(parameter) not in own:
            raise TypeError(REPLACED.format(name=name))


def refuse_gradients(frozen: Iterable[tuple[Any, str]]) -> None:
    """Raises TypeError where a frozen parameter has a gradient, which nobody would apply."""
    for parameter, name in frozen:
        if parameter.grad is not None:
            raise TypeError(trained_otherwise(name, begun=False))


@contextmanager
def frozen_again(frozen: Sequence[tuple[Any, str]]) -> Iterator[None]:
    """While gradients are exchanged: what a step has melted would be exchanged as well. Raises TypeError where one has
    a gradient."""
    refuse_gradients(frozen)
    melted = [parameter for parameter, _ in frozen if parameter.requires_grad]
    for parameter in melted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in melted:  # else a gradient that comes late would not show
            parameter.requires_grad_(True)


class Held(NamedTuple):
    """A tensor that stands for a parameter: of one that ``fully_shard`` divides there are two, a part and the whole."""

    parameter: Any
    name: str
    trained: bool
    lands: bool = True  # its gradient is what is summed


class FixedParameters:
    """A rank's, whose model is divided. The whole of what ``fully_shard`` has gathered is there while a unit is
    computed: ``units`` and what they compute with.

    ``held`` is all that may stand in the model. ``kept``: what keeps its values from block to block.
    """

    def __init__(
        self, model: nn.Module, held: Sequence[Held], kept: Iterable[tuple[str, Tensor]],
        units: Iterable[tuple[nn.Module, Iterable[tuple[str, Tensor]]]], device: torch.device,
    ) -> None:  # fmt: skip
        self._model = model
        self._held = {id(one.parameter): one for one in held}
        self._landing = [one.parameter for one in held if one.trained and one.lands]
        self._frozen = [(one.parameter, one.name) for one in held if not one.trained]
        self._kept = Watched(kept, device)
        self._units = [(module, Watched(named, device, gathered=True)) for module, named in units]
        self._blocks, self._closely, self._changed = 0, False, ""

    @contextmanager
    def block(self) -> Iterator[Callable[[], None]]:
        """What is given is called at the block's end, and raises TypeError where values have changed that are kept.

        From then on every block fails: the same values, written once more, would not show.
        """
        looking = self._closely or looks(self._blocks)
        written, before = self._written(), self._kept.values() if looking else None
        hooks: list[Any] = []

        def end() -> None:
            self._blocks += 1
            self._closely = self._closely or self._written() != written
            if before is not None:
                self._compare(self._kept.values(), before)

        if looking:
            for module, watched in self._units:
                seen: list[Values] = []
                hooks += _hung(module, partial(self._begins, watched, seen), partial(self._ends, watched, seen))
        try:
            yield end
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step, without backward. Raises TypeError for what it may not do."""
        if self._changed:
            raise TypeError(CHANGED.format(name=self._changed))
        before = [_of_gradient(parameter) for parameter in self._landing]
        yield
        if [_of_gradient(parameter) for parameter in self._landing] != before:
            raise TypeError(GRADIENTS_CHANGED)
        refuse_others(self._model, self._held)
        for parameter in self._model.parameters():
            one = self._held[id(parameter)]
            if one.trained and not parameter.requires_grad:  # frozen ones may be melted, and get no gradient
                raise TypeError(trained_otherwise(one.name, begun=True))

    def close(self) -> None:
        """Let the model go."""
        self._model = nn.Module()
        for held in (self._held, self._landing, self._frozen, self._units):
            held.clear()
        self._kept = Watched((), torch.device("cpu"))

    def refuse_gradients(self) -> None:
        """After backward: raises TypeError where a frozen parameter has got one."""
        refuse_gradients(self._frozen)

    def _written(self) -> int:
        return self._kept.written() + sum([watched.written() for _, watched in self._units])

    def _begins(self, watched: Watched, seen: list[Values], module: nn.Module, inputs: object) -> None:
        seen.append(watched.values())

    def _ends(self, watched: Watched, seen: list[Values], module: nn.Module, inputs: object, outputs: object) -> None:
        self._compare(watched.values(), seen.pop())

    def _compare(self, now: Values, before: Values) -> None:
        if changed := now.changed(before):
            self._changed = changed[0]
            raise TypeError(CHANGED.format(name=self._changed))


def _hung(module: nn.Module, begins: Any, ends: Any) -> list[Any]:
    """Hooks of a unit that come first and last of those that have it whole: the job's may be those that change it."""
    held: Any = module
    state, pre, post = held._get_fsdp_state(), held._forward_pre_hooks, held._forward_hooks
    hung = [module.register_forward_pre_hook(begins), module.register_forward_hook(ends, prepend=True)]
    gathers, gives_up = (getattr(one, "id", None) for one in (
        state._pre_forward_hook_handle, state._post_forward_hook_handle
    ))  # fmt: skip
    if gathers in pre and gives_up in post:  # else it is one of several that are gathered together
        for key in list(pre)[list(pre).index(gathers) + 1 : -1]:
            pre.move_to_end(key)
        post.move_to_end(hung[1].id)
        for key in list(post)[list(post).index(gives_up) : -1]:
            post.move_to_end(key)
    return hung


def _of_gradient(parameter: Any) -> tuple[int, int]:
    """Which one it is, and how often it has been written."""
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def _is_tracked(tensor: Tensor) -> bool:
    """Whether anybody could write into it: torch lets nobody where it was made in inference mode."""
    try:
        return tensor._version >= 0
    except RuntimeError:
        return False
