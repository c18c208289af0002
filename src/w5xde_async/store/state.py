"""State dicts of optimizers and schedulers as plain JSON and named tensors, and back, losing nothing.

A value is JSON as it stands where JSON keeps it (None, bool, str, ordinary int, finite float, list) and a tagged
object with one key otherwise, so an object in a skeleton is always a tag and never the caller's own dict.
Invariants: ``unpack_state(*pack_state(tree))`` equals ``tree`` in types, order, bits and in which tensors are
one and the same, but for numpy scalars, which come back as the Python numbers of the same value; nothing is executed
while unpacking. Values outside the list are refused, never approximated.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from w5xde_async.errors import CheckpointCorrupt, StoreError
from w5xde_async.store.tensors import DTYPE_NAMES

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]

_MAX_DEPTH = 100
_MAX_PLAIN_INT = 2**53  # what every JSON reader keeps exact
_MAPPING_TAGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_EMPTY: dict[str, Callable[[], dict[Any, Any]]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}


def pack_state(tree: object) -> tuple[JSON, dict[str, Tensor]]:
    """Split ``tree`` into a JSON skeleton and its tensors, named after their places.

    Taken are None, bool, int, float, str, list, tuple, strided tensors, and dict, OrderedDict and Counter with str or
    int keys, exactly these types, and numpy scalars that a Python number holds. The tensors share memory with ``tree``
    where they lie contiguous on the CPU.

    Raises:
        StoreError: a value of another kind; ``path`` is its place in the tree.
    """
    packer = _Packer()
    return packer.pack(tree, ()), packer.tensors


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[object, ...], str] = {}

    def pack(self, value: object, place: tuple[object, ...]) -> JSON:
        if len(place) > _MAX_DEPTH:
            raise StoreError(_dotted(place[:8]) + "...", f"nested deeper than {_MAX_DEPTH}, perhaps inside itself")
        if isinstance(value, np.generic):
            value = value.item()  # schedules computed with numpy leave such numbers; a longdouble stays what it is
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value  # type: ignore[return-value]
        if kind is int:
            assert isinstance(value, int)
            return value if abs(value) <= _MAX_PLAIN_INT else {"int": hex(value)}
        if kind is float:
            assert isinstance(value, float)
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind is list or kind is tuple:
            assert isinstance(value, list | tuple)
            items: list[JSON] = [self.pack(item, (*place, index)) for index, item in enumerate(value)]
            return items if kind is list else {"tuple": items}
        if kind in _MAPPING_TAGS:
            assert isinstance(value, dict)
            return self._pack_mapping(value, _MAPPING_TAGS[kind], place)
        if kind is Tensor or kind is nn.Parameter:
            assert isinstance(value, Tensor)
            return {"tensor": self._pack_tensor(value, place)}
        raise StoreError(_dotted(place), f"a {kind.__module__}.{kind.__qualname__} cannot be stored without loss")

    def _pack_mapping(self, value: dict[Any, Any], tag: str, place: tuple[object, ...]) -> JSON:
        pairs: list[JSON] = []
        for key, item in value.items():
            if type(key) is not str and type(key) is not int:
                raise StoreError(_dotted((*place, key)), f"a key of type {type(key).__qualname__} cannot be stored")
            pairs.append([self.pack(key, place), self.pack(item, (*place, key))])
        return {tag: pairs}

    def _pack_tensor(self, tensor: Tensor, place: tuple[object, ...]) -> str:
        where = _dotted(place)
        if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.dtype not in DTYPE_NAMES:
            shown = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise StoreError(where, f"a tensor of this kind ({shown}) cannot be stored")
        # Two views of the same elements are one tensor; an empty one has no elements to share.
        identity: tuple[object, ...] = (id(tensor),)
        if tensor.numel():
            shape = (tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
            identity = (tensor.device, tensor.data_ptr(), tensor.dtype, *shape)
        known = self._names.get(identity)
        if known is not None:
            return known
        name = where
        while name in self.tensors or name == "__metadata__":
            name += "~"  # {"a": {"b": t}} and {"a.b": t} are different places with one dotted name
        self.tensors[name] = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        self._names[identity] = name
        return name


def _dotted(place: Iterable[object]) -> str:
    return ".".join(map(str, place)) or "value"


def unpack_state(skeleton: JSON, tensors: Mapping[str, Tensor]) -> Any:
    """The tree again. A tensor that stood in several places is one object in all of them.

    Raises:
        CheckpointCorrupt: the skeleton was not made by ``pack_state``, or a tensor is missing.
    """
    try:
        return _unpack(skeleton, tensors)
    except (KeyError, ValueError, TypeError, struct.error, RecursionError) as error:
        raise CheckpointCorrupt("state", f"the skeleton does not fit its tensors ({error!r})") from error


def _unpack(node: JSON, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_unpack(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, content),) = node.items()
    if tag == "tensor" and isinstance(content, str):
        return tensors[content]
    if tag == "tuple" and isinstance(content, list):
        return tuple(_unpack(item, tensors) for item in content)
    if tag == "int" and isinstance(content, str):
        return int(content, 16)
    if tag == "float" and isinstance(content, str):
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if tag in _EMPTY and isinstance(content, list):
        mapping = _EMPTY[tag]()
        for pair in content:
            if not isinstance(pair, list):
                raise TypeError("a mapping's entry is not a pair")
            key, item = pair
            # Set one by one: a Counter built from pairs would count the pairs.
            mapping[_unpack(key, tensors)] = _unpack(item, tensors)
        return mapping
    raise ValueError(f"unknown tag {tag!r}")
