"""What a unit returns of its own parameters is a copy, and what it casts without gradients nobody finds again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from w5xde_async.errors import UsageError
from w5xde_async.parallel import unit_forward
from w5xde_async.parallel.unit_forward import keep_apart


class Table(nn.Module):
    def __init__(self, result: Callable[[Tensor, Tensor], Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.arange(1.0, 13.0).view(3, 4).to(dtype))
        self.result = result
        keep_apart(self, "tables.0", {"tables.0.rows": self.rows})

    def forward(self, x: Tensor) -> Any:
        return self.result(self.rows, x)


VIEWS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "itself": lambda rows, x: rows,
    "transposed": lambda rows, x: rows.t(),
    "expanded": lambda rows, x: rows[None, 1:].expand(len(x), -1, -1),
    "overlapping": lambda rows, x: rows.view(-1).unfold(0, 6, 2),
    "detached": lambda rows, x: rows.detach()[::2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_parameter_leaves_in_other_memory_with_its_strides_and_gradient(name: str) -> None:
    view, x = VIEWS[name], torch.randn(5, 4)
    unit = Table(lambda rows, x: {"found": [view(rows, x)], "x": x, "new": rows * 2})
    given = unit(x)
    (found,), expected = given["found"], view(unit.rows, x)
    assert torch.equal(found, expected)
    assert (found.stride(), found.requires_grad) == (expected.stride(), expected.requires_grad)
    assert found.untyped_storage().data_ptr() != unit.rows.untyped_storage().data_ptr()
    assert given["x"] is x
    if expected.requires_grad:
        (wanted,) = torch.autograd.grad((expected * 3).sin().sum(), unit.rows)
        assert torch.equal(torch.autograd.grad((found * 3).sin().sum(), unit.rows)[0], wanted)


def test_a_view_that_is_turned_when_it_is_read_leaves_in_other_memory() -> None:
    unit = Table(lambda rows, x: rows.conj(), torch.complex64)
    found = unit(torch.zeros(1))
    assert torch.equal(found, unit.rows.conj())
    assert found.untyped_storage().data_ptr() != unit.rows.untyped_storage().data_ptr()


def test_two_views_of_one_parameter_leave_in_the_same_memory() -> None:
    one, other = Table(lambda rows, x: (rows[:2].detach(), rows[1:].detach()))(torch.zeros(1))
    other.zero_()
    assert one.tolist() == [[1, 2, 3, 4], [0, 0, 0, 0]]


def test_of_a_large_parameter_what_a_view_reaches_is_copied_and_no_more() -> None:
    table = nn.Parameter(torch.randn(3000, 4))
    slices = slice(0, 2), slice(701, 709), slice(705, 2000, 900), slice(2999, 3000), slice(2500, 2500), slice(0, 0)
    unit = nn.Module()
    unit.forward = lambda: [table[rows] for rows in slices]
    keep_apart(unit, "tables.0", {"tables.0.table": table})
    found = unit()
    for one, rows in zip(found, slices, strict=True):
        assert torch.equal(one, table[rows])
        assert one.stride() == table[rows].stride()
        assert (one.storage_offset() - table[rows].storage_offset()) * 4 % 256 == 0
        assert torch.equal(torch.autograd.grad(one.sum(), table)[0], torch.autograd.grad(table[rows].sum(), table)[0])
    sizes = [one.untyped_storage().nbytes() for one in found]
    assert sizes[0] == 32
    assert found[1].untyped_storage().data_ptr() == found[2].untyped_storage().data_ptr()
    assert max(sizes[1:3]) <= (1605 - 701 + 1) * 16 + 256
    assert max(sizes[3:]) <= 16 + 256


def test_what_lies_elsewhere_is_left_as_it_is() -> None:
    made = torch.ones(2), torch.ones(2).to_sparse(), SimpleNamespace(value=torch.ones(1))
    assert all(one is other for one, other in zip(Table(lambda *_: made)(torch.zeros(1)), made, strict=True))


def test_what_cannot_be_copied_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'tables.0' returns its parameter 'tables.0.rows'.*in an object"):
        Table(lambda rows, x: SimpleNamespace(rows=[rows[0]]))(torch.zeros(1))
    unit = Table(lambda rows, x: rows)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UsageError, match="would cast to half precision once"):
        unit(torch.zeros(1))


def test_an_object_that_holds_itself_is_looked_through_once() -> None:
    made: dict[str, Any] = {}
    made["itself"] = [made]
    result = SimpleNamespace(made=made)
    assert Table(lambda rows, x: result)(torch.zeros(1)) is result
    with pytest.raises(UsageError, match="in an object"):
        Table(lambda rows, x: SimpleNamespace(made=made, rows=rows))(torch.zeros(1))


def test_a_bounded_part_of_a_large_object_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Tensor] = []
    place = unit_forward._place
    monkeypatch.setattr(unit_forward, "_place", lambda tensor: (looked_at.append(tensor), place(tensor))[1])
    many = dict.fromkeys(range(5000), torch.ones(1))
    Table(lambda rows, x: SimpleNamespace(many=many))(torch.zeros(1))
    assert len(looked_at) <= 200
    with pytest.raises(UsageError, match="in an object"):
        Table(lambda rows, x: SimpleNamespace(many=many, rows={"of": [rows[0]]}))(torch.zeros(1))


def test_a_pass_without_gradients_leaves_no_casts() -> None:
    unit, x = Table(lambda rows, x: rows @ x), torch.ones(4, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            before = unit(x)
        with torch.no_grad(), pytest.raises(RuntimeError):
            unit(torch.ones(3, 2))
        assert torch.is_autocast_cache_enabled()
        unit.rows.data.mul_(2)
        after, again = unit(x), unit(x)
    assert torch.equal(after, 2 * before)
    assert _cast_of(after) is _cast_of(again)


def _cast_of(result: Tensor) -> Any:
    """The node by which the weight was cast."""
    node: Any = result.grad_fn
    return node.next_functions[0][0]
