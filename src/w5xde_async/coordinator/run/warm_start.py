"""A new run that begins with the weights of a file instead of those that the job's model is made with.

Only safetensors is read, which is data and no program. Workers need no such file: whoever joins is sent the parameters.
Everything here blocks (it reads disks) and runs in an executor.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from w5xde_async.errors import CheckpointCorrupt, UsageError
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.store.filesystem import explain, regular
from w5xde_async.store.rundir import kept_run_id
from w5xde_async.store.tensors import read_tensors

_SHOWN = 3  # differences of each kind that are named
_OF_TORCH_SAVE = (b"PK\x03\x04", b"\x80")  # an archive, or a bare pickle


def begins_anew(run_path: Path | None, resume: str) -> bool:
    """Whether a start there goes on from no checkpoint. Raises StoreError."""
    if run_path is None or resume == "never":
        return True
    return resume == "auto" and not CheckpointStore(run_path / "checkpoints").steps()


def kept_leaf_size(run_path: Path, resume: str) -> tuple[int | None, int]:
    """The microbatch_size that was chosen for the run that goes on, and the operations of a step (0: not counted), as
    its newest checkpoint says them; ``resume``: or that one."""
    store = CheckpointStore(run_path / "checkpoints", run_id=kept_run_id(run_path))
    meta = store.meta(None if resume == "auto" else Path(resume))
    identity = meta.get("identity")
    size = identity.get("microbatch_size") if isinstance(identity, Mapping) else None
    flops = meta.get("step_flops")
    return size if type(size) is int and size > 0 else None, flops if type(flops) is int else 0


def would_begin_with(layout: Layout, saved: Layout) -> bool:
    """Whether ``begin_with`` takes, for a model of ``layout``, what was saved of one of ``saved``."""
    mine, theirs = _tensors(layout), _tensors(saved)
    return mine.keys() == theirs.keys() and all(theirs[name] == like for name, like in mine.items())


def _tensors(layout: Layout) -> dict[str, tuple[tuple[int, ...], bool]]:
    """By each of its names, the shape of a tensor, and whether it is of floats."""
    return {name: (e.shape, e.dtype.is_floating_point) for e in layout.entries for name in e.names}


def begin_with(state: FlatState, path: Path) -> str:
    """Give the parameters and buffers of ``state`` the values in ``path``, cast where needed; what to say of it.

    Raises UsageError, in one line, where the file cannot be read or is not of this model; then nothing has changed.
    """
    found = _read(path)
    entries = state.layout.entries
    sources = [next((found[name] for name in entry.names if name in found), None) for entry in entries]
    known = {name for entry in entries for name in entry.names}
    unlike = [
        f"{entry.name} is {_kind(source)}, the model's is {_kind(view)}"
        for entry, source, view in zip(entries, sources, state.views, strict=True)
        if source is not None and (source.shape != view.shape or source.is_floating_point() != view.is_floating_point())
    ]
    apart = [
        f"{one} and {other}"
        for entry in entries
        for one, other in pairwise(name for name in entry.names if name in found)
        if not _alike(found[one], found[other])
    ]
    differences = [
        _named("it lacks", [entry.name for entry, source in zip(entries, sources, strict=True) if source is None]),
        _named("the model lacks", [name for name in found if name not in known]),
        _named("", unlike),
        _named("one tensor of the model's is two in it:", apart),
    ]
    if any(differences):
        raise _unusable(path, f"is of another model: {'; '.join(filter(None, differences))}")
    with torch.no_grad():
        for view, source in zip(state.views, sources, strict=True):
            assert source is not None
            view.copy_(source)
    return f"the run begins with the weights of {path}"


def _read(path: Path) -> Mapping[str, Tensor]:
    try:
        with open(path, "rb", opener=regular) as file:
            nbytes = file.seek(0, 2)
            file.seek(0)
            # The length of a safetensors header, whose upper bytes are 0.
            if (begin := file.read(8)).startswith(_OF_TORCH_SAVE) and begin[4:] != bytes(4):
                raise _unusable(path, _how_to_convert(path))
            file.seek(0)
            return read_tensors(file, nbytes, lambda _: None)
    except CheckpointCorrupt as error:
        raise _unusable(path, f"is no whole safetensors file ({error.path}: {error.reason})") from error
    except OSError as error:
        raise _unusable(path, f"cannot be read: {explain(error)}") from error


def _how_to_convert(path: Path) -> str:
    source, target = str(path), str(path.with_suffix(".safetensors"))
    return (
        "is a file of torch.save, which may run code when it is opened; where you trust it, convert it: "
        'python -c "import torch, safetensors.torch as s; s.save_file({n: t.clone() for n, t in '
        f'torch.load({source!r}, weights_only=True).items()}}, {target!r})"'
    )


def _unusable(path: Path, reason: str) -> UsageError:
    return UsageError(f"--init-from: {path} {reason}")


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _named(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what} {', '.join(names[:_SHOWN])}{more}".strip()


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
