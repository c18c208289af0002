"""Activation checkpointing: a module computes its forward pass once more in backward, to the same bits.

Random numbers are drawn again from where the generators stood, torch's, ``random`` and numpy's. Buffers have had their
change in the first pass, and so have lists and dictionaries that the module was given: the second one works on copies.
Whatever else a module may change or find changed, the second pass packs for backward what the first one packed, or is
refused: all that backward reads of a module, in whatever form it leaves what it computes. What is not packed (shapes,
numbers, the order of operations) backward has of the first pass.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint

from w5xde_async.errors import UsageError
from w5xde_async.params.flat import condensed, fingerprints
from w5xde_async.randomness import PythonGenerators

logger = logging.getLogger(__name__)

_WRITTEN = (
    "what {0} is called with is written into in place, and --checkpoint-activations computes {0} from it once more; "
    "write into a copy (inplace=False, x = x + y for x += y), or leave out --checkpoint-activations"
)
_OVERWRITTEN = (
    "{0} writes in place into what backward needs of it, which torch refuses without --checkpoint-activations, too; "
    "write into a copy (inplace=False, x = x + y for x += y)"
)
#: Of a module that gives something else the second time.
DIFFERS = (
    "{0} does not compute the same a second time, as --checkpoint-activations has it do in backward. What it changes "
    "of what it is called with is changed by then (a cache, an iterator, a torch.Generator of the model's own, an "
    "object that holds a state), or the step has set an attribute or frozen a part of it since: call models of "
    "transformers with use_cache=False, draw from torch's own generators, give and return values; or leave out "
    "--checkpoint-activations. Where it is kernels that add in any order (index_put, scatter_add), --deterministic "
    "takes others"
)
_Buffers = list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]]  # of each module, and what is in them


def checkpointed(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``forward`` of ``module``, keeping only what it is given, and the buffers.

    Raises UsageError, here or in backward, where something has been written into what it is given, or where the second
    pass packs something else than the first: backward would be another function's.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [value for value in leaves if isinstance(value, Tensor) and not value.is_inference()]
    versions = [tensor._version for tensor in tensors]

    first: _Packed | None = None
    written = list[int]()  # how often each thing had been, as the newest pass packed it

    def run(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        nonlocal first, written
        if first is None:
            first = _Packed()
            with _packing(first, looked_at):
                result = forward(*given, **named)
            first.end()
            return result
        given, named = tree_unflatten(leaves, structure)
        second = _Packed()
        try:
            with _packing(second):
                forward(*given, **named)
        except CheckpointError as error:  # more is kept than was
            raise UsageError(DIFFERS.format(_kind(module))) from error
        _require_same(module, first, second)
        written = second.versions
        return None

    def looked_at(index: int, tensor: Tensor) -> Tensor:
        if tensor._version != written[index]:
            raise UsageError(_OVERWRITTEN.format(_kind(module)))
        return tensor

    copies: dict[int, Tensor] = {}
    before: _Buffers = [
        (
            of._buffers,
            {
                name: None if buffer is None else copies.setdefault(id(buffer), buffer.detach().clone())
                for name, buffer in of._buffers.items()
            },
        )
        for of in module.modules()
        if of._buffers
    ]
    drawn_from = PythonGenerators()

    @contextmanager
    def recomputing() -> Iterator[None]:
        for tensor, version in zip(tensors, versions, strict=True):
            if tensor._version != version:
                raise UsageError(_WRITTEN.format(_kind(module)))
        with drawn_from.again(), _with(before):
            yield

    result = checkpoint(  # to the end, and not only to the last thing that is needed: units within it end, too
        run, args, kwargs, use_reentrant=False, early_stop=False, determinism_check="none",
        context_fn=lambda: (nullcontext(), _Again(recomputing)),
    )  # fmt: skip
    for number, tensor in enumerate(tensors):
        if tensor._version != versions[number]:
            if tensor._version != versions[number] + 1 or not _is_repeatable(tensor):
                raise UsageError(_WRITTEN.format(_kind(module)))
            versions[number] = tensor._version
    return result


class _Again:
    """What torch makes once and enters at each recomputation; several backward passes may make some."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make, self._entered = make, list[AbstractContextManager[None]]()

    def __enter__(self) -> None:
        entered = self._make()
        entered.__enter__()
        self._entered.append(entered)

    def __exit__(self, *raised: Any) -> None:
        self._entered.pop().__exit__(*raised)


def _kind(module: nn.Module) -> str:
    """Its class, as the job names it: ``fully_shard`` has put one of its own before it."""
    return next(
        kind.__name__
        for kind in type(module).__mro__
        if issubclass(kind, nn.Module) and not issubclass(kind, FSDPModule)
    )


@contextmanager
def _packing(packed: _Packed, unpacked: Callable[[int, Tensor], Tensor] | None = None) -> Iterator[None]:
    """Note what the pass within packs, by the hooks that torch has set for it. ``unpacked``: is shown what comes in
    the place of each, and returns it."""
    pack, unpack = cast(Any, torch._C._autograd._top_saved_tensors_default_hooks(False))
    unheld = _unheld()

    def noted(tensor: Tensor) -> Any:
        is_held = sys.getrefcount(tensor) > unheld
        packed.add(tensor, is_held)
        kept = pack(tensor.detach())  # itself it would be held from now on
        return kept if unpacked is None else (len(packed.kinds) - 1, kept)

    def given(kept: Any) -> Tensor:
        return unpack(kept) if unpacked is None else unpacked(kept[0], unpack(kept[1]))

    with saved_tensors_hooks(noted, given):
        yield


class _Packed:
    """What a pass packs for backward, in order: what tells it from what another pass packs."""

    def __init__(self) -> None:
        self.kinds: list[tuple[Any, ...]] = []
        self.versions: list[int] = []
        self.counts: dict[torch.device, int] = {}
        self._bits: dict[torch.device, list[Tensor]] = {}  # on the device: nothing waits for them
        self._marks: dict[torch.device, Tensor] | None = None

    @property
    def is_whole(self) -> bool:
        return self._marks is not None

    def end(self) -> None:
        """Nothing more is packed: keep only what is compared."""
        self._marks = self.marks(self.counts)
        self._bits.clear()

    def add(self, tensor: Tensor, is_held: bool) -> None:
        self.versions.append(tensor._version)
        kind = (tensor.device, tensor.dtype, tensor.shape)
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(whole, nn.Parameter):  # need not be read: it says itself whether it has been written
            self.kinds.append((*kind, _Same(whole), whole._version, tensor.stride(), tensor.storage_offset()))
            return
        # What a kernel keeps for itself it need not have filled to the end (LSTM's, CTC's).
        parts = [condensed(part) for part in _parts(tensor)] if tensor.requires_grad or is_held else []
        self.kinds.append((*kind, len(parts)))
        if parts:
            self._bits.setdefault(tensor.device, []).append(torch.cat(parts) if len(parts) > 1 else parts[0])
            self.counts[tensor.device] = self.counts.get(tensor.device, 0) + 1

    def marks(self, counts: Mapping[torch.device, int]) -> dict[torch.device, Tensor]:
        """Of the first so many tensors on each device; of all at the end."""
        if self._marks is not None:
            return self._marks
        return {
            # Views of parameters may be among them, whose memory ``fully_shard`` resizes.
            device: fingerprints([torch.cat(self._bits[device][:count])], device, resized=True)
            for device, count in counts.items()
        }


class _Same:
    """Equal to itself alone, as long as it is held."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    __hash__ = None  # type: ignore[assignment]


@lru_cache(maxsize=1)
def _unheld() -> int:
    """How many references a hook sees to a tensor that is in no variable: to the mean that a kernel keeps."""
    found: list[int] = []

    def counted(tensor: Tensor) -> Tensor:
        found.append(sys.getrefcount(tensor))
        return tensor

    with saved_tensors_hooks(counted, lambda tensor: tensor):
        nn.functional.layer_norm(torch.zeros(1, 1, device="cpu", requires_grad=True), (1,))
    return min(found)


def _parts(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that it is made of, as far as they are known."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = cast(Any, tensor).trigger_wait()
    if is_traceable_wrapper_subclass(tensor):
        for name in cast(Any, tensor).__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # and no mesh
                yield from _parts(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta:
        yield tensor.detach().resolve_conj().resolve_neg()


def _require_same(module: nn.Module, first: _Packed, second: _Packed) -> None:
    """Raises UsageError where the second pass packs something else than the first has, so far; of what a GPU computes
    at the end of backward, for which it waits then.

    Where its kernels may give other bits each time it is told of.
    """
    is_alike = first.kinds == (second.kinds if first.is_whole else second.kinds[: len(first.kinds)])
    counts = first.counts if is_alike else {}
    mine, theirs = first.marks(counts), second.marks(counts)

    def compare() -> None:
        if is_alike and all(torch.equal(mine[device], theirs[device]) for device in counts):
            return
        text = DIFFERS.format(_kind(module))
        if is_on_host or torch.are_deterministic_algorithms_enabled() or not is_alike:
            raise UsageError(text)
        if type(module) not in _told_of:
            _told_of.add(type(module))
            logger.warning("%s", text)

    is_on_host = all(device.type == "cpu" for device in counts)
    if is_on_host or torch._C._current_graph_task_id() < 0:
        compare()
    else:
        cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(compare)


_told_of: set[type[nn.Module]] = set()


def _is_repeatable(written: Tensor) -> bool:
    """Whether what was last written into a tensor is what it would become once more, as of ``ReLU(inplace=True)``."""
    return type(written.grad_fn).__name__ in ("ReluBackward0", "HardtanhBackward0")


def checkpoint_units(units: Iterable[nn.Module]) -> None:
    """Have these modules compute their forward pass once more in backward."""
    for unit in units:
        unit.forward = partial(checkpointed, unit, unit.forward)


@contextmanager
def _with(before: _Buffers) -> Iterator[None]:
    own = [dict(buffers) for buffers, _ in before]
    for buffers, copies in before:
        buffers.update(copies)
    try:
        yield
    finally:
        for (buffers, _), held in zip(before, own, strict=True):
            buffers.update(held)
