"""What a job's model takes, measured on tensors without memory: a model of any size on any machine.

The step runs forward and backward on fake tensors of the CPU, as it would run on one; what is alive after every
operator is counted, storage by storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from w5xde_async.compute.batch import flatten, map_tensors
from w5xde_async.compute.block import autocast
from w5xde_async.compute.program.atoms import Atoms
from w5xde_async.errors import JobError, in_one_line
from w5xde_async.job import Job, StepFunction, build_model, copied_model, require_copyable, state_bytes
from w5xde_async.plan.footprint import Activations
from w5xde_async.users_code import users_code


class _Held(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operators have made and that are still there."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: dict[int, Any] = {}
        for tensor in known:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = storage  # kept: nobody else gets its address

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it would import it: two seconds

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor) and item.layout is torch.strided:  # else its parts are noted
                self._note(item.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: Any) -> None:
            if self._known.pop(key, None) is not None:
                self.now -= nbytes

        self._known[key] = weakref.ref(storage, gone)
        self.now += nbytes
        self.most = max(self.most, self.now)


def model_without_memory(job: Job) -> nn.Module:
    """The job's model in train mode, on the meta device. Raises JobError where it cannot be made there."""
    if isinstance(job.model, nn.Module):
        require_copyable(job.model)
        known = {id(t): t.to("meta") for t in job.model.buffers()}
        for parameter in job.model.parameters():
            known[id(parameter)] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        return copied_model(job.model, known).train()
    try:
        with torch.device("meta"):
            return build_model(job)
    except JobError as error:
        raise JobError("model", f"it cannot be made without memory: {error.reason}") from error


@contextmanager
def faked(model: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """A copy of a model on fake tensors, and these; gradients are there, as an engine has them."""
    model = copied_model(model)
    made: dict[int, Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                held: dict[str, Any] = tensors
                for name, tensor in held.items():
                    if tensor is not None:
                        if id(tensor) not in made:
                            made[id(tensor)] = _fake(tensor)
                        held[name] = made[id(tensor)]
        every = list(made.values())
        for tensor in made.values():
            if tensor.requires_grad:
                tensor.grad = torch.zeros_like(tensor)
                every.append(tensor.grad)
        yield model, every


def _fake(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def activations_of(model: nn.Module, step: StepFunction, batch: Any, precision: str) -> Activations:
    """Of one forward and backward pass. ``model`` is on the meta device; it is copied.

    Raises JobError for a step that needs values.
    """
    with faked(model) as (copied, known):
        given = map_tensors(batch, lambda tensor: torch.empty_like(tensor, device="cpu"))
        known += flatten(given)[1]

        def forward() -> list[Tensor]:
            return [step(copied, given)[0]]

        try:
            with users_code():
                return _measured(forward, known, precision)
        except Exception as error:
            reason = f"what it takes cannot be found without computing it ({in_one_line(error)})"
            raise JobError("step", reason, "w5xde predict measures it, on a machine that has room for it") from error


def activations_of_stages(
    atoms: Atoms, runs: Sequence[range], batch: Sequence[Tensor], precision: str
) -> list[Activations]:
    """Of one microbatch in each of these runs of atoms, what it receives included."""
    sizes = atoms.sizes([(tensor.dtype, tuple(tensor.shape)) for tensor in batch], precision=precision)
    found = []
    for run in runs:
        part = atoms.part(run, lent=atoms.passed(run.start), passed=atoms.passed(run.stop))
        with faked(part) as (copied, known):
            given = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in batch]
            known += given
            lent = [atoms.layout.entries[entry] for entry in part.lent]

            def forward(copied: nn.Module = copied, run: range = run, given: Any = given, lent: Any = lent) -> Any:
                values = [
                    torch.empty(live.shape, dtype=live.dtype, device="cpu").requires_grad_(live.requires_grad)
                    for live in sizes.live[run.start]
                ]
                values += [torch.empty(e.shape, dtype=e.dtype).requires_grad_(e.role == "grad") for e in lent]
                out = copied(values, given, sizes)
                return [out[0]] if run.stop == len(atoms) else list(out)

            found.append(_measured(forward, known, precision))
    return found


def _measured(forward: Callable[[], list[Tensor]], known: Sequence[Tensor], precision: str) -> Activations:
    with _Held(known) as held:
        with (autocast(precision) or nullcontext)():
            out = forward()
        kept = held.now
        roots = [tensor for tensor in out if tensor.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        return Activations(kept, held.most)


def optimizer_bytes(job: Job, model: nn.Module) -> int | None:
    """What the job's optimizer keeps after its first step. None where that cannot be found without memory."""
    with faked(model) as (copied, _):
        try:
            optimizer = job.optimizer(copied)
            optimizer.step()
        except Exception:  # the user's optimizer may read values, which are not there
            return None
        return state_bytes(optimizer)
