"""How much one node of an ATen graph computes: FLOPs of tensor cores, instructions by pipe, sizes of its product."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from tilestream.graph.costs import flops
from tilestream.graph.costs.elements import each
from tilestream.graph.costs.table import GEMMS, Kind, row
from tilestream.graph.nodes import argument, aten, packet, tensor_of, value
from tilestream.graph.sizes import hint
from tilestream.ir.dtypes import DTYPES


@dataclass(frozen=True)
class Work:
    """``flops``: of products, convolutions and attention. ``lanes`` and ``special``: instructions of all elements."""

    flops: float
    lanes: float
    special: float


def work(node: fx.Node) -> Work:
    """All that ``node`` computes. Of a product, ``lanes`` are the additions of its bias."""
    amount = float(flops.of_node(node))
    entry, cost, count = row(packet(node)), each(node), goes_over(node)
    if entry.kind in (Kind.LINEAR, Kind.BMM):
        has_bias = packet(node) in (aten.addmm, aten.baddbmm) or (packet(node) is aten.linear and len(node.args) > 2)
        return Work(amount, count if has_bias else 0.0, 0.0)
    return Work(amount, cost.lanes * count, cost.special * count)


def goes_over(node: fx.Node) -> float:
    """Elements that a kernel walks: of the largest result, or operand where several make one of a result; those that
    are looked up; scores of attention."""
    entry = row(packet(node))
    if entry.kind is Kind.ATTENTION:
        return scores(node)
    if entry.per == "input":
        return max([elements(node), *map(size, operands(node))])
    return looked_up(node) or elements(node)


def gemm(node: fx.Node) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of one of ``GEMMS``."""
    kind = packet(node)
    assert kind in GEMMS
    first, second = factors(node)
    a, b, out = (tensor_of(n) for n in (first, second, node))
    if kind in (aten.bmm, aten.baddbmm):
        return hint(a.shape[0]), hint(a.shape[1]), hint(b.shape[2]), hint(a.shape[2])
    return 1, prod(hint(d) for d in a.shape[:-1]), hint(out.shape[-1]), hint(a.shape[-1])


def factors(node: fx.Node) -> tuple[object, object]:
    """What one of ``GEMMS`` multiplies."""
    first, second = node.args[1:3] if packet(node) in (aten.addmm, aten.baddbmm) else node.args[:2]
    return first, second


def layout(node: fx.Node) -> str:
    """How a product's operands lie: ``nt`` a linear's, ``tn`` a weight gradient's, else ``nn``."""
    kind = packet(node)
    if kind not in GEMMS:
        return "nn"
    if kind is aten.linear:
        return "nt"
    first, second = factors(node)
    if _transposed(first):
        return "tn"
    return "nt" if _transposed(second) else "nn"


def _transposed(operand: object) -> bool:
    like = value(operand)
    return like is not None and like.dim() >= 2 and hint(like.stride(-2)) == 1 and hint(like.shape[-1]) > 1


def reduced(node: fx.Node) -> tuple[int, bool]:
    """Of a reduction: elements that go into one result, and whether its operand's first dimension is summed over."""
    inputs = operands(node)
    if row(packet(node)).kind is not Kind.REDUCTION or not inputs:
        return 1, False
    dims = argument(node, 1, "dim", None)
    over = {int(d) % max(1, inputs[0].dim()) for d in dims} if isinstance(dims, list | tuple) and dims else {0}
    return max(1, round(size(inputs[0]) / max(1.0, elements(node)))), 0 in over


def looked_up(node: fx.Node) -> float:
    """Elements of a table that a lookup reads, or whose gradient its backward pass makes; 0 for other operators."""
    kind, tensors = packet(node), operands(node)
    if kind in (aten._embedding_bag, aten._embedding_bag_forward_only, aten._embedding_bag_backward):
        return size(tensors[1]) * hint(tensors[0].shape[-1])
    if kind is aten.embedding_dense_backward:
        return size(tensors[0])
    return elements(node) if row(kind).kind is Kind.GATHER else 0.0


def query_key(node: fx.Node) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of fused attention, whose operands are query, key, ... or gradient, query, key, ...; None if they are not."""
    at = 1 if "backward" in str(node.target) else 0
    found = [value(n) for n in node.args[at : at + 2] if isinstance(n, fx.Node)]
    tensors = [t for t in found if t is not None and t.dim() >= 2]
    return (tensors[0], tensors[1]) if len(tensors) == 2 else None


def scores(node: fx.Node) -> float:
    """Elements of the matrix of scores of fused attention."""
    both = query_key(node)
    if both is None:
        return elements(node)
    query, key = both
    return prod(hint(d) for d in query.shape[:-1]) * float(hint(key.shape[-2]))


def elements(node: fx.Node) -> float:
    """Of the largest tensor that an operator makes."""
    return max(map(size, results(node)), default=0.0)


def results(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that an operator makes, fake ones."""
    return [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]


def operands(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that an operator takes, fake ones."""
    return [t for n in node.all_input_nodes if (t := value(n)) is not None]


def dtype_of(value: object) -> str:
    """The dtype of the first floating-point tensor in ``value``: f32 where there is none, torch's name of others."""
    floating = (x.dtype for x in tree_leaves(value) if isinstance(x, torch.Tensor) and x.is_floating_point())
    dtype = next(floating, torch.float32)
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def size(tensor: torch.Tensor) -> float:
    """Elements; symbolic sizes count as they were at the capture."""
    return float(prod(hint(d) for d in tensor.shape))
