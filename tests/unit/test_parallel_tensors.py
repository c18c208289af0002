"""Tensor parallel islands: near what one process gives, and the same bits on every island of the same numerics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import island_jobs, islands
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from w5xde_async.compute.block import LeafSpec
from w5xde_async.compute.engine import LeafError
from w5xde_async.errors import UsageError
from w5xde_async.job import Job
from w5xde_async.parallel.composed import ComposedEngine
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.replica import replica_of
from w5xde_async.parallel.shard_memory import add
from w5xde_async.parallel.tensor_plan import parallelized

BUCKET = islands.BUCKET_BYTES


class Heads(nn.Module):
    """Attention that takes the number of heads from what it is given."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width // 2, bias=False)
        self.v_proj, self.o_proj = nn.Linear(width, width // 2), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in
                   (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        repeated = q.shape[1] // k.shape[1]
        attended = F.scaled_dot_product_attention(q, k.repeat_interleave(repeated, 1), v.repeat_interleave(repeated, 1))
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Heads(width, width // 4)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.after(x)))))


class Model(nn.Module):
    """A transformer with a tied embedding, a mean that is kept, a scalar, and a layer that nobody uses."""

    def __init__(self, width: int = 32, layers: int = 2, vocabulary: int = 256, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(layers))
        self.scale, self.norm = nn.Parameter(torch.tensor(1.5)), nn.BatchNorm1d(width)
        self.unused, self.frozen = nn.Linear(64, 64), nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm((self.frozen(x) * self.scale).transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.head(x)
        return out


def job(**changes: Any) -> Job:
    tokens = torch.randint(256, (96, 7), generator=torch.Generator().manual_seed(1))
    settings: dict[str, Any] = {
        "model": Model, "loss": island_jobs.lm_loss, "batch_size": 64, "microbatch_size": 4, "max_steps": 5, "seed": 2,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    }  # fmt: skip
    return Job(dataset=TensorDataset(tokens[:, :-1], tokens[:, 1:]), **{**settings, **changes})


def _island(given: Job, group: Group, parallelize: Any = parallelized, **axes: int) -> islands.Together:
    mesh = init_device_mesh("cpu", tuple(axes.values()) or (group.size,), mesh_dim_names=tuple(axes) or ("tp",))
    engine = ComposedEngine(replica_of(given, BUCKET), parallelize, LeafSpec.of(given), group, mesh, words="tp")
    return islands.Together(engine, group)


def _near(given: Job, together: islands.Together, *blocks: tuple[int, ...]) -> None:
    alone = islands.Alone(given)
    assert together.engine.layout.fingerprint == alone.layout.fingerprint
    for seed in (5, 6):
        state = islands.changed_state(given, seed)
        together.load(state)
        alone.state.copy_groups(state)
        alone.engine.load(range(len(alone.layout.buckets)))
        for samples in blocks:
            islands.near_block(together, alone, island_jobs.batches(given, samples), samples)
    together.engine.close()
    alone.engine.close()


def _model(group: Group) -> None:
    given = job()
    together = _island(given, group)
    assert together.engine.numerics.startswith("tp ")
    _near(given, together, (4, 4, 4), (4, 4, 3), (4,))


def _accumulates(group: Group) -> None:
    given = job(accumulate_grad_batches=3)
    _near(given, _island(given, group), (12, 12, 7))


def _however_it_is_cut(group: Group) -> None:
    """One block gives what its halves give, added by the tree; and again the same."""
    given = job()
    together = _island(given, group)
    together.load(islands.changed_state(given))
    batches = island_jobs.batches(given, (4, 4, 4, 4))
    _, whole = together.compute(batches, (4, 4, 4, 4))
    _, again = together.compute(batches, (4, 4, 4, 4))
    _, left = together.compute(batches[:2], (4, 4))
    _, right = together.compute(batches[2:], (4, 4), 2)
    for bucket, pieces in whole.items():
        for number, piece in enumerate(pieces):
            assert torch.equal(islands.bits(piece), islands.bits(again[bucket][number]))
            add(left[bucket][number], right[bucket][number])
            assert torch.equal(piece, left[bucket][number])
    together.engine.close()


def _raises(group: Group) -> None:
    given = job()
    together = _island(given, group)
    together.load(islands.changed_state(given))
    batches = island_jobs.batches(given, (4, 4))
    broken = [batches[0], (batches[1][0], batches[1][1] + 1000)]  # no such token
    for _ in range(2):
        with pytest.raises(LeafError, match="leaf 1: "):
            together.compute(broken, (4, 4))
    together.compute(batches, (4, 4))
    together.engine.close()


class Lopsided(nn.Module):
    """Norms over the heads that a rank has: their gradients are parts of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.up, self.inner, self.down = nn.Linear(32, 64), nn.LayerNorm(4), nn.Linear(64, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner(self.up(self.embed(tokens)).unflatten(-1, (-1, 4))).flatten(2)
        out: Tensor = self.down(x)
        return out


def _parts_of_a_sum(group: Group) -> None:
    given = job(model=Lopsided)
    together = _island(given, group)
    together.load(islands.changed_state(given))
    with pytest.raises(UsageError, match=r"'inner.weight' is not the same on ranks"):
        together.compute(island_jobs.batches(given, (4,)), (4,))
    together.engine.close()


CASES: dict[str, islands.Case] = {
    "model": _model, "accumulation": _accumulates, "however it is cut": _however_it_is_cut,
    "raises": _raises, "parts of a sum": _parts_of_a_sum,
}  # fmt: skip
FAST = tuple(CASES)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return islands.outcomes("tests.unit.test_parallel_tensors", 2, tmp_path_factory.mktemp("two"), FAST)


@pytest.mark.processes
@pytest.mark.parametrize("name", FAST)
def test_two_ranks(name: str, two: dict[str, list[str]]) -> None:
    assert two[name] == ["", ""], "\n".join(two[name])
