"""Attention among statements: sums weighted by a softmax, and the whole of a masked one, a call of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tilestream.sparse.einsum import Access, Statement


def weighted(makers: Mapping[str, Statement], s: Statement) -> tuple[Access, Access, Access] | None:
    """The scores, the weights and the values where ``s`` sums values by weights that are the softmax of scores.

    Args:
        makers: statements by the names of what they make.
    """
    if s.op != "mul" or s.reduction != "add" or s.scalar is not None or len(s.reduced) != 1 or len(s.operands) != 2:
        return None
    for weights, values in (s.operands, s.operands[::-1]):
        last = makers.get(weights.tensor)
        if last is None or last.op not in ("div", "share") or len(last.operands) != 2 or last.reduced:
            continue
        top, whole = (makers.get(a.tensor) for a in last.operands)
        less = makers.get(top.operands[0].tensor) if top is not None and top.op == "exp" else None
        most = makers.get(less.operands[1].tensor) if less is not None and less.op in ("sub", "shift") else None
        if whole is None or less is None or most is None:
            continue
        if any(s.operands[0].indices != s.indices for s in (last, top, less) if s is not None):
            continue  # turned on its way
        score = less.operands[0]
        at = weights.indices.index(s.reduced[0]) if s.reduced[0] in weights.indices else -1
        if _over(whole, "add", last.operands[0].tensor, at) and _over(most, "max", score.tensor, at):
            return score, weights, values
    return None


def _over(s: Statement, reduction: str, of: str, dim: int) -> bool:
    """Whether a statement reduces one dimension of a tensor, and nothing else."""
    plain = s.op == "copy" and s.reduction == reduction and s.operands[0].tensor == of
    return plain and s.reduced == s.operands[0].indices[dim : dim + 1]


@dataclass(frozen=True)
class Attention:
    """``softmax(scale q k^T where mask) v``.

    Attributes:
        q, k, v: names, and the dimensions of each in the order [batch, rows, features].
        mask: name of a sparse matrix, and whether its rows are the second dimension.
        result: name; ``dims``: where [batch, rows, features] are its dimensions.
    """

    q: tuple[str, tuple[int, ...]]
    k: tuple[str, tuple[int, ...]]
    v: tuple[str, tuple[int, ...]]
    scale: float
    mask: tuple[str, bool]
    result: str
    dims: tuple[int, ...]

    def call(self, stored: torch.Tensor) -> Callable[..., tuple[torch.Tensor, ...]]:
        """PyTorch's attention of q, k and v with a mask of booleans."""
        mask = (stored.t() if self.mask[1] else stored).contiguous()
        back = [self.dims.index(d) for d in range(len(self.dims))]

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
            turned = (x.permute(dims)[None] for x, (_, dims) in zip((q, k, v), (self.q, self.k, self.v), strict=True))
            made = torch.nn.functional.scaled_dot_product_attention(*turned, attn_mask=mask, scale=self.scale)
            return (made[0].permute(back),)

        return run


def attention(statements: Sequence[Statement]) -> Attention | None:
    """Statements that are one masked attention of one batch dimension, and nothing else."""
    makers = {s.name: s for s in statements}
    last = statements[-1]
    found = weighted(makers, last)
    if found is None:
        return None
    score, weights, values = found
    masked = makers.get(score.tensor)
    if masked is None or masked.op != "mask":
        return None
    value, mask = masked.operands
    scale, scaled = 1.0, makers.get(value.tensor)
    count = 8  # of statements without a scale
    while scaled is not None and scaled.op in ("div", "mul") and scaled.scalar is not None:
        scale *= 1 / scaled.scalar if scaled.op == "div" else scaled.scalar
        count, scaled = count + 1, makers.get(scaled.operands[0].tensor)
    if scaled is None or scaled.op != "mul" or len(scaled.reduced) != 1 or len(statements) != count:
        return None
    names = dict(zip(value.indices, scaled.indices, strict=True))  # of the mask's statement, in that of the products
    column_at = weights.indices.index(last.reduced[0])
    column = scaled.indices[column_at]
    row = next((names[i] for i in mask.indices if names.get(i) != column), "")
    batch = [i for i in scaled.indices if i not in (row, column)]
    q = next((a for a in scaled.operands if row in a.indices and column not in a.indices), None)
    k = next((a for a in scaled.operands if column in a.indices and row not in a.indices), None)
    if q is None or k is None or len(batch) != 1 or any(len(a.indices) != 3 for a in (q, k, values)):
        return None
    last_row, last_batch = (weights.indices[scaled.indices.index(i)] for i in (row, batch[0]))
    (features,) = [i for i in values.indices if i not in (last_batch, last.reduced[0])]
    orders = ((q, (batch[0], row, scaled.reduced[0])), (k, (batch[0], column, scaled.reduced[0])))
    orders = (*orders, (values, (last_batch, last.reduced[0], features)))
    if any(set(a.indices) != set(order) for a, order in orders):
        return None
    placed = [(a.tensor, tuple(a.indices.index(i) for i in order)) for a, order in orders]
    turned = names[mask.indices[0]] == column
    dims = tuple(last.indices.index(i) for i in (last_batch, last_row, features))
    return Attention(placed[0], placed[1], placed[2], scale, (mask.tensor, turned), last.name, dims)
