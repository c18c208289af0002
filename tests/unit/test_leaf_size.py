"""How many samples a leaf has where the job does not say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import TensorDataset

from w5xde_async.compute.leaf_size import (
    WORTH_FLOPS,
    WORTH_FLOPS_A_PARAMETER,
    WORTH_SHARING_FLOPS,
    with_leaf_size,
)
from w5xde_async.job import Job, build_model


def job(make: Callable[[], nn.Module], width: int, batch: int = 64, **given: Any) -> Job:
    data = TensorDataset(torch.randn(128, width), torch.randint(0, 4, (128,)))
    return Job(**{
        "model": make, "dataset": data, "loss": nn.functional.cross_entropy, "batch_size": batch, "epochs": 1,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1), **given,
    })  # fmt: skip


def square(width: int, layers: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)], nn.Linear(width, 4))


def leaves(told: Job) -> int:
    return -(-told.batch_size // told.leaf_samples)


def test_a_job_that_says_it_is_left_alone() -> None:
    """And its step is not tried."""
    given = job(lambda: _Looks(8, 4), 8, microbatch_size=5, step=lambda *_: pytest.fail("it was"), loss=None)
    assert with_leaf_size(given, build_model(given)) == (given, "", 0)


def test_what_all_samples_have_is_not_copied_for_it() -> None:
    words, seen = {number: str(number) for number in range(5000)}, list[Any]()

    def collate(samples: list[Any]) -> Any:
        seen.extend(samples)
        return torch.stack([x for x, _, _ in samples]), torch.tensor([label for _, label, _ in samples])

    given = job(square(8, 1), 8, dataset=[(torch.randn(8), number % 4, words) for number in range(64)], collate=collate)
    assert with_leaf_size(given, build_model(given))[2]
    assert {id(found) for _, _, found in seen} == {id(words)}
    assert len({id(x) for x, _, _ in seen}) == len(seen) > 1


@pytest.mark.parametrize(("layers", "expected"), [(1, 2), (10, 2), (16, 3), (32, 6), (64, 8)])
def test_leaves_follow_from_the_arithmetic(layers: int, expected: int) -> None:
    rows = TensorDataset(torch.randn(128, 16, 256), torch.randint(0, 4, (128,)))
    given = job(square(256, layers), 256, dataset=rows, loss=_of_means)
    flops = 64 * 16 * 2 * (3 * (layers * 256 * 256 + 4 * 256) - 256 * 256)  # the data has no gradient
    assert max(2, min(8, flops // WORTH_FLOPS)) == expected
    with torch.device("meta"):
        model = build_model(given)
    told, why, counted = with_leaf_size(given, model)
    assert counted == flops
    assert leaves(told) == expected
    assert why == f"a step is {flops / 1e9:.3g} GFLOP"


def _of_means(rows: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(rows.mean(1), labels)


@pytest.mark.parametrize(("batch", "expected"), [(32, 1), (59, 1), (64, 2), (1024, 8)])
def test_a_leaf_does_enough_with_each_parameter(batch: int, expected: int) -> None:
    """Its gradient of them all is cleared, written, added and sent."""
    given = job(square(1024, 16), 1024, batch=batch)
    with torch.device("meta"):
        model = build_model(given)
    told, _, counted = with_leaf_size(given, model)
    assert counted > WORTH_SHARING_FLOPS
    assert leaves(told) == expected
    trained = sum(parameter.numel() for parameter in model.parameters())
    assert expected in (1, 8) or counted // expected >= WORTH_FLOPS_A_PARAMETER * trained


def test_parameters_that_are_not_trained_have_no_gradient() -> None:
    def half_frozen() -> nn.Module:
        model = square(1024, 16)()
        for parameter in list(model.parameters())[:-4]:
            parameter.requires_grad_(False)
        return model

    given = job(half_frozen, 1024, batch=48)
    whole = job(square(1024, 16), 1024, batch=48)
    assert leaves(with_leaf_size(given, build_model(given)).job) > leaves(with_leaf_size(whole, build_model(whole)).job)


@pytest.mark.parametrize(("width", "expected"), [(40, 1), (56, 1), (112, 2)])
def test_a_step_that_is_over_before_a_second_worker_has_its_half_is_one_leaf(width: int, expected: int) -> None:
    given = job(square(width, 8), width)
    told, _, counted = with_leaf_size(given, build_model(given))
    assert (counted >= WORTH_SHARING_FLOPS) == (expected == 2)
    assert (leaves(told), told.microbatch_size) == (expected, 64 // expected)


@pytest.mark.parametrize(
    ("batch", "accumulated", "expected"), [(64, 1, 32), (15, 1, 5), (13, 1, 1), (60, 2, 15), (30, 4, 4), (1, 1, 1)]
)
def test_a_batch_that_grows_is_halves_of_whole_leaves(batch: int, accumulated: int, expected: int) -> None:
    """Where there are such: 30 samples are no multiple of four microbatches."""
    given = job(square(8, 1), 8, batch, accumulate_grad_batches=accumulated)
    told, why, _ = with_leaf_size(given, build_model(given), grows=True)
    assert told.microbatch_size == expected
    assert why.endswith("and a batch grows by its halves")
    larger = job(square(256, 40), 256, 64, dataset=TensorDataset(torch.randn(128, 16, 256), torch.zeros(128)))
    model = build_model(larger)
    assert with_leaf_size(larger, model, grows=True).by == with_leaf_size(larger, model).by


def test_leaves_have_whole_microbatches_of_those_that_are_accumulated() -> None:
    given = job(square(512, 1), 512, batch=120, accumulate_grad_batches=5)
    told, _, _ = with_leaf_size(given, build_model(given))
    assert (told.microbatch_size, told.leaf_samples, leaves(told)) == (12, 60, 2)


@pytest.mark.parametrize(("batch", "accumulated", "expected"), [(5, 4, 1), (10, 4, 2), (100, 8, 12), (32, 5, 6)])
def test_no_leaf_is_larger_than_the_batch(batch: int, accumulated: int, expected: int) -> None:
    """One leaf, whose microbatches do not divide the batch."""
    given = job(square(8, 1), 8, batch, accumulate_grad_batches=accumulated)
    assert with_leaf_size(given, build_model(given)).job.microbatch_size == expected


def test_model_batch_and_random_numbers_stay_as_they_were() -> None:
    given = job(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4)), 8)
    model = build_model(given)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    told, why, _ = with_leaf_size(given, model)
    assert leaves(told) == 1
    assert "GFLOP" in why
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert next(model.parameters()).device.type == "cpu"


class _Looks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if float(x.sum()) > 0 else 1.0)


def test_a_model_that_looks_at_its_data_is_counted_by_running_it() -> None:
    given, blind = job(lambda: _Looks(8, 4), 8), job(lambda: nn.Linear(8, 4), 8)
    assert with_leaf_size(given, build_model(given))[1:] == with_leaf_size(blind, build_model(blind))[1:]


def test_a_model_without_memory_that_looks_at_its_data_is_made_and_counted_as_in_a_run() -> None:
    """As a language model of transformers looks whether its mask leaves anything out."""
    given = job(lambda: _Looks(8, 4), 8)
    module = replace(given, model=_Looks(8, 4))
    with torch.device("meta"):
        empty = _Looks(8, 4)
    state = torch.random.get_rng_state()
    assert with_leaf_size(given, empty)[1:] == with_leaf_size(given, build_model(given))[1:]
    assert with_leaf_size(module, empty).step_flops > 0
    assert torch.equal(torch.random.get_rng_state(), state)
    assert next(empty.parameters()).is_meta


class _Series(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 64, batch_first=True), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([len(row) for row in x]), batch_first=True)
        assert packed.data.sum().item()  # as lengths of a batch are read
        return self.head(self.rnn(packed)[1][0][0])


def test_a_recurrence_over_packed_sequences_is_shared() -> None:
    """It was said to be next to nothing: one leaf, for one worker."""
    given = job(_Series, 8, dataset=TensorDataset(torch.randn(64, 40, 8), torch.randint(0, 4, (64,))))
    told, _, counted = with_leaf_size(given, build_model(given))
    assert counted == pytest.approx(64 * 3 * 40 * 2 * 4 * 64 * (64 + 8), rel=0.02)
    assert leaves(told) == 2


def test_somebodys_own_operator_with_weights_has_an_eighth() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.test_leaf_size.times(x, self.weight)  # type: ignore[no-any-return]

    with torch.library._scoped_library("test_leaf_size", "FRAGMENT") as library:
        library.define("times(Tensor x, Tensor weight) -> Tensor")
        library.impl("times", lambda x, weight: x @ weight, "CompositeExplicitAutograd")
        given = job(Own, 8)
        told, why, counted = with_leaf_size(given, build_model(given))
    assert (leaves(told), why, counted) == (8, "operations of the model could not be counted", 0)


def test_what_backward_would_need_is_not_kept() -> None:
    living: list[int] = []

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        rows, labels = model[0](batch[0]), batch[1]  # type: ignore[operator]
        storages = list[StorageWeakRef]()
        for _ in range(8):
            rows = (rows * rows).relu()
            storages.append(StorageWeakRef(rows.untyped_storage()))
        assert rows.sum().item() >= 0
        living.append(sum(not one.expired() for one in storages))
        return nn.functional.cross_entropy(model(rows), labels)

    given = job(square(512, 8), 512, step=step, loss=None)
    _, _, counted = with_leaf_size(given, build_model(given))
    assert counted
    assert living == [1]


def test_a_step_that_looks_at_its_data_and_goes_back_within_itself_is_counted() -> None:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        rows = batch[0].clone().requires_grad_()
        loss = nn.functional.cross_entropy(model(rows), batch[1])
        (slope,) = torch.autograd.grad(loss, rows, create_graph=True)
        return loss + slope.square().sum() if loss.item() > 0 else loss

    given = job(square(512, 8), 512, step=step, loss=None)
    assert with_leaf_size(given, build_model(given)).step_flops


def test_a_step_that_cannot_be_run_has_an_eighth() -> None:
    class Raises(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("not today")

    given = job(lambda: Raises(8, 4), 8)
    told, why, counted = with_leaf_size(given, build_model(given))
    assert (leaves(told), told.microbatch_size) == (8, given.microbatch_samples)
    assert (why, counted) == ("operations of the model could not be counted", 0)


def test_one_sample_is_read() -> None:
    class Rows(list[Any]):
        read: list[int]

        def __getitem__(self, index: Any) -> Any:
            self.read.append(index)
            return super().__getitem__(index)

    rows = Rows((torch.randn(8), 1) for _ in range(64))
    rows.read = []
    given = job(lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), 8, dataset=rows)
    assert with_leaf_size(given, build_model(given)).step_flops > 0
    assert rows.read == [0]


def test_tied_weights_and_shared_buffers_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Embedding(4, 16), nn.Linear(16, 4, bias=False)
            self.out.weight = self.inner.weight

        def forward(self, x: Tensor) -> Tensor:
            assert self.out.weight is self.inner.weight
            return self.out(self.inner(x))

    data = TensorDataset(torch.randint(0, 4, (64,)), torch.randint(0, 4, (64,)))
    given = job(Tied, 1, dataset=data)
    assert with_leaf_size(given, build_model(given)).step_flops > 0
