"""``powersgd:r``: each matrix of a bucket as the product of two thin ones (PowerSGD, star form).

A worker factors its own M alone: P = M Q, orthonormalised; Q = M^T P; it sends P and Q, and the receiver adds P Q^T. Q
is kept for the next time (it follows the leading directions from step to step: one power iteration a step). The first Q
is drawn from a generator seeded with the matrix's place: the same everywhere.

Encoding, float32 throughout: the values outside of matrices, then P (rows x r) and Q^T (r x columns) of each matrix. A
matrix for which that is no less is sent as it is; r is at most its smaller side. Exactly
4 (dense values + sum of r (rows + columns)) bytes.

Where P is not finite, P and Q are sent as NaN and the state stays as it was. Products that overflow float32 end so too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from w5xde_async.codecs.codec import CHUNK, BytePool, Codec, Encoded, Encoder, Form, Matrix, check_values

__all__ = ["PowerSgd"]

_ROW_VALUES = 4 * CHUNK  # of a product at once: enough for the matrix kernel, and still in cache


class PowerSgd(Codec):
    """Low rank; what is left out stays with the worker."""

    converges_without_feedback = False
    word_bytes = 4

    def __init__(self, rank: int) -> None:
        """Raises ValueError unless 1 <= ``rank`` <= 256."""
        if not 1 <= rank <= 256:
            raise ValueError(f"a rank from 1 to 256, not {rank}")
        self.rank = rank
        self.name = f"powersgd:{rank}"

    def factored(self, form: Form) -> list[tuple[Matrix, int]]:
        """The matrices that are worth factoring, and the rank of each."""
        found = []
        for matrix in form.matrices:
            rank = min(self.rank, matrix.rows, matrix.columns)
            if rank * (matrix.rows + matrix.columns) < matrix.rows * matrix.columns:
                found.append((matrix, rank))
        return found

    def encoded_nbytes(self, form: Form) -> int:
        """Exactly 4 (dense values + sum of r (rows + columns))."""
        count = form.numel
        for matrix, rank in self.factored(form):
            count += rank * (matrix.rows + matrix.columns) - matrix.rows * matrix.columns
        return 4 * count

    def encoder(self, form: Form) -> Encoder:
        return _PowerEncoder(self, form)

    def _write(self, values: Tensor, form: Form, out: Tensor) -> int:
        raise NotImplementedError("its encoder writes")

    def _read(self, data: Tensor, form: Form, target: Tensor, alpha: float | None) -> None:
        floats = data.view(torch.float32)
        at = 0
        for dense in _dense(form, self.factored(form)):
            _land(target[dense], floats[at : at + dense.stop - dense.start], alpha)
            at += dense.stop - dense.start
        for (offset, rows, columns), rank in self.factored(form):
            left = floats[at : at + rows * rank].view(rows, rank)
            at += rows * rank
            right = floats[at : at + columns * rank].view(rank, columns)
            at += columns * rank
            whole = target[offset : offset + rows * columns].view(rows, columns)
            # Decoding goes through the same products as adding: a matrix kernel may give other bits for other shapes.
            height = min(rows, max(1, _ROW_VALUES // columns))
            scratch = torch.empty(height, columns, dtype=torch.float32, device=target.device)
            for row in range(0, rows, height):
                product = scratch[: min(height, rows - row)]
                torch.mm(left[row : row + height], right, out=product)
                _land(whole[row : row + height], product, alpha)


def _land(target: Tensor, values: Tensor, alpha: float | None) -> None:
    if alpha is None:
        target.copy_(values)
    else:
        target.add_(values, alpha=alpha)


def _dense(form: Form, factored: list[tuple[Matrix, int]]) -> list[slice]:
    """What lies between the factored matrices."""
    ends = [0, *[m.offset + m.rows * m.columns for m, _ in factored]]
    starts = [*[m.offset for m, _ in factored], form.numel]
    return [slice(end, start) for end, start in zip(ends, starts, strict=True) if start > end]


class _PowerEncoder(Encoder):
    """Keeps Q of each matrix, transposed: products with it so are four times as fast, and P^T M many times M^T P."""

    codec: PowerSgd

    def __init__(self, codec: PowerSgd, form: Form) -> None:
        super().__init__(codec, form)
        self._q: list[Tensor] = []
        for matrix, rank in codec.factored(form):
            generator = torch.Generator().manual_seed(matrix.offset)
            self._q.append(torch.randn(rank, matrix.columns, generator=generator))

    def encode(self, values: Tensor, pool: BytePool) -> Encoded:
        """As of any encoder; Q moves on."""
        check_values(values, self.form)
        data = pool.take(self.codec.encoded_nbytes(self.form))
        floats = data.view(torch.float32)
        factored = self.codec.factored(self.form)
        at = 0
        for dense in _dense(self.form, factored):
            floats[at : at + dense.stop - dense.start].copy_(values[dense])
            at += dense.stop - dense.start
        for index, ((offset, rows, columns), rank) in enumerate(factored):
            matrix = values[offset : offset + rows * columns].view(rows, columns)
            left = floats[at : at + rows * rank].view(rows, rank)
            at += rows * rank
            right = floats[at : at + columns * rank].view(rank, columns)
            at += columns * rank
            self._factor(index, matrix, left, right)
        return Encoded(self.codec, self.form, data)

    def _factor(self, index: int, matrix: Tensor, left: Tensor, right: Tensor) -> None:
        start = self._q[index].to(matrix.device)
        product = matrix @ start.T
        if not bool(product.isfinite().all()):
            left.fill_(math.nan)
            right.fill_(math.nan)
            return
        left.copy_(torch.linalg.qr(product).Q)
        torch.mm(left.T, matrix, out=right)
        if bool(right.isfinite().all()) and bool(right.any()):  # a matrix of zeros has no direction to follow
            self._q[index] = right.clone()

    def state_dict(self) -> dict[str, Tensor]:
        """Q^T of each matrix."""
        return {f"q{index}": q.clone() for index, q in enumerate(self._q)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where the state is of another rank or form."""
        expected = {f"q{index}": tuple(q.shape) for index, q in enumerate(self._q)}
        if {name: tuple(tensor.shape) for name, tensor in state.items()} != expected:
            raise ValueError(f"state of another {self.codec.name}: its shapes are not {expected}")
        self._q = [state[f"q{index}"].to(torch.float32).clone() for index in range(len(self._q))]
