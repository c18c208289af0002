"""What a step makes of buffers: every leaf starts at the step's values; only changes are summed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from w5xde_async.compute.buffers import BufferMerge
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.updates.buffers import BufferState


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.tensor([1.0, -0.0]))
        self.register_buffer("flags", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("low", torch.tensor([-5], dtype=torch.int32))
        self.register_buffer("narrow", torch.tensor([5, (1 << 16) - 2], dtype=torch.uint16))
        self.register_buffer("middle", torch.tensor([5, (1 << 31) + 5], dtype=torch.uint32))
        self.register_buffer("wide", torch.tensor([5, (1 << 63) + 5, 0], dtype=torch.uint64))
        self.register_buffer("passing", torch.zeros(1), persistent=False)


class Bench:
    def __init__(self) -> None:
        self.model = Model()
        self.layout = Layout.of(self.model)
        self.state = FlatState(self.layout)
        self.state.copy_from(self.model)
        self.merge = BufferMerge(self.layout, self.model, self.state.views)
        self.vector = ResultVector(self.layout)
        self.vector.reset()
        self.names = [entry.name for entry in self.layout.entries]

    def leaf(self, samples: int, *values: object) -> set[str]:
        """Restore, let the caller change something, collect; the names of what changed."""
        changed: set[int] = set()
        self.merge.collect(self.vector, samples, changed)
        return {self.names[index] for index in changed}

    def sum(self, name: str) -> Tensor:
        entry = self.layout.entries[self.names.index(name)]
        return self.vector.group(entry.group)[entry.offset : entry.offset + entry.numel]


STATISTICS = {"norm.running_mean", "norm.running_var"}


def test_changes_are_weighted_by_samples_and_summed() -> None:
    bench = Bench()
    for samples, value in ((2, 3.0), (1, 0.5)):
        bench.merge.restore()
        assert float(bench.model.mean[0]) == 1.0
        bench.model.mean[0] = value
        assert "mean" in bench.leaf(samples)
    assert bench.sum("mean").tolist() == [2 * 2.0 + 1 * -0.5, 0.0]


def test_integers_and_flags_become_the_maximum() -> None:
    bench = Bench()
    for value in (-7, -9):
        bench.merge.restore()
        bench.model.low.fill_(value)
        bench.model.flags[value % 2] = True
        assert bench.leaf(1) >= {"low", "flags"}
    assert bench.sum("low").tolist() == [-7]
    assert bench.sum("flags").tolist() == [0, 1]


UNSIGNED = {
    "narrow": [[4, (1 << 16) - 1], [7, 1]],
    "middle": [[4, (1 << 32) - 1], [7, 1 << 31]],
    "wide": [[4, (1 << 64) - 1, 1 << 63], [7, 9, 1 << 63]],
}


@pytest.mark.parametrize("name", UNSIGNED)
def test_unsigned_integers_become_the_maximum_too(name: str) -> None:
    bench = Bench()
    own = getattr(bench.model, name)
    for values in UNSIGNED[name]:
        bench.merge.restore()
        own.copy_(torch.tensor(values, dtype=own.dtype))
        bench.leaf(1)
    state = BufferState(bench.layout, bench.state)
    for bucket in state.buckets:
        state.write(bucket, bench.vector.buckets[bucket.index], 2)
    expected = [max(pair) for pair in zip(*UNSIGNED[name], strict=True)]
    assert bench.state.views[bench.names.index(name)].tolist() == expected
    for other in UNSIGNED.keys() - {name}:
        assert torch.equal(bench.state.views[bench.names.index(other)], getattr(Model(), other))


def test_a_zero_that_the_maximum_would_miss_is_refused() -> None:
    bench = Bench()
    bench.merge.restore()
    bench.model.wide.zero_()
    with pytest.raises(TypeError, match="uint64 buffer 'wide' to 0"):
        bench.leaf(1)


def test_what_nobody_changes_is_not_named() -> None:
    bench = Bench()
    bench.merge.restore()
    assert bench.leaf(1) <= STATISTICS  # batch norm's own are taken as changed by every leaf
    assert bench.sum("mean").signbit().all()


def test_batch_norm_that_first_runs_in_a_later_leaf_is_seen() -> None:
    """Its kernel changes the statistics without counting; the first leaf shows nothing."""
    bench = Bench()
    bench.merge.restore()
    bench.leaf(1)
    bench.merge.restore()
    x = torch.randn(4, 3)
    bench.model.norm(x)
    after = bench.model.norm.running_mean.clone()
    assert bench.leaf(4) >= {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert torch.equal(bench.sum("norm.running_mean"), after * 4)
    bench.merge.restore()
    assert not bool(bench.model.norm.running_mean.any())


def test_an_operator_that_does_not_count_is_found_in_the_first_leaf() -> None:
    bench = Bench()
    for _ in range(2):
        bench.merge.restore()
        bench.model.mean.data[1] = 4.0  # past autograd's counter
        assert "mean" in bench.leaf(1)
    assert float(bench.sum("mean")[1]) == 8.0


def test_a_new_version_is_taken_up() -> None:
    bench = Bench()
    bench.merge.restore()
    bench.leaf(1)
    bench.state.views[bench.names.index("mean")].fill_(9.0)
    bench.merge.restore()
    assert float(bench.model.mean[0]) == 1.0  # nobody has said so yet
    bench.leaf(1)
    bench.merge.refresh([bench.names.index("mean"), bench.names.index("norm.weight")])
    bench.merge.restore()
    assert float(bench.model.mean[0]) == 9.0


def test_all_that_forward_resized_are_named_and_have_their_shape_again_for_the_next_leaf() -> None:
    bench = Bench()
    for _ in range(2):
        bench.merge.restore()
        bench.model.mean.resize_(3).fill_(1.0)
        bench.model.low.resize_(2).fill_(1)
        with pytest.raises(
            TypeError, match=r"buffer 'mean' from \[2\] to \[3\], 'low' from \[1\] to \[2\]; a buffer keeps"
        ):
            bench.leaf(1)
    bench.merge.restore()
    assert (bench.model.mean.tolist(), bench.model.low.tolist()) == ([1.0, 0.0], [-5])
    assert bench.leaf(1) <= STATISTICS
