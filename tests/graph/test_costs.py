"""One table of what ATen operators cost: a number is written once, and everyone reads that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from tilestream.graph.costs import flops
from tilestream.graph.costs.elements import each
from tilestream.graph.costs.table import GEMMS, TABLE, Kind, Row, row
from tilestream.graph.costs.work import gemm, goes_over, reduced, work
from tilestream.graph.operators import ELEMENTWISE
from tilestream.graph.operators.elementwise import UNARY
from tilestream.ir.tileops import OPS

aten = torch.ops.aten


def node_of(
    operator: object, *args: object, result: torch.Tensor | tuple[torch.Tensor, ...], **kwargs: object
) -> fx.Node:
    """One call; tensors among ``args`` become placeholders."""
    graph = fx.Graph()
    given = []
    for i, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            place = graph.placeholder(f"x{i}")
            place.meta["val"] = arg
            given.append(place)
        else:
            given.append(arg)
    node = graph.call_function(operator, tuple(given), kwargs)  # pyright: ignore[reportArgumentType]
    node.meta["val"] = result
    return node


def t(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("op", UNARY, ids=str)
def test_an_operator_costs_what_its_tile_op_issues(op) -> None:
    spec, found = OPS[UNARY[op]], each(node_of(op.default, t(4, 8), result=t(4, 8)))
    assert (found.lanes + found.special, found.special) == (spec.flops, spec.transcendental)


def test_operators_of_several_tile_ops_cost_their_sum() -> None:
    x = t(4, 8)
    gelu = each(node_of(aten.gelu_backward.default, x, x, result=x))
    assert gelu.lanes + gelu.special == OPS["gelu_slope"].flops + OPS["mul"].flops
    cube = each(node_of(aten.pow.Tensor_Scalar, x, 3, result=x))
    assert cube.lanes == OPS["square"].flops + OPS["mul"].flops
    assert each(node_of(aten.add.Tensor, x, x, result=x, alpha=2)).lanes == 2
    assert (
        each(node_of(aten.gelu.default, x, result=x, approximate="tanh")).lanes
        > each(node_of(aten.gelu.default, x, result=x)).lanes
    )


def test_what_has_no_tile_op_costs_its_entry() -> None:
    x = t(4, 8)
    assert each(node_of(aten.pow.Tensor_Scalar, x, 2.5, result=x)).lanes == 1
    c = t(4, 8, dtype=torch.complex64)
    assert each(node_of(aten.mul.Tensor, c, c, result=c)).lanes == 6
    assert each(node_of(aten.add.Tensor, c, c, result=c)).lanes == 1


def test_no_cost_is_written_twice() -> None:
    """An entry of an operator that tile ops are made of names those; it has no numbers of its own."""
    for op, entry in TABLE.items():
        plain = Row(entry.kind, entry.label, entry.tile, per=entry.per, eager=entry.eager)
        if op in ELEMENTWISE or entry.tile:
            assert entry == plain, op
        assert not (op in ELEMENTWISE and entry.tile), op
    assert not [op for op, entry in TABLE.items() if entry.kind is Kind.ELEMENTWISE and entry.label == str(op)[5:]]


def test_families_by_rule() -> None:
    assert row(aten.silu).kind is Kind.ELEMENTWISE and row(aten.silu_backward).label == "silu backward"
    assert row(aten.zeros).kind is Kind.FILL and row(aten.sort).kind is Kind.OTHER
    assert row(aten.where).kind is Kind.ELEMENTWISE
    assert {aten.mm, aten.addmm, aten.linear, aten.bmm, aten.baddbmm} == GEMMS


WORKS: list[tuple[str, Callable[[], fx.Node], tuple[float, float, float]]] = [
    ("a linear", lambda: node_of(aten.linear.default, t(6, 4), t(3, 4), t(3), result=t(6, 3)), (144, 18, 0)),
    ("a product", lambda: node_of(aten.mm.default, t(6, 4), t(4, 3), result=t(6, 3)), (144, 0, 0)),
    ("a sum", lambda: node_of(aten.sum.dim_IntList, t(6, 4), [0], result=t(4)), (0, 24, 0)),
    ("a norm", lambda: node_of(aten.native_layer_norm.default, t(6, 4), result=(t(6, 4), t(6, 1))), (0, 192, 0)),
    ("a lookup", lambda: node_of(aten.embedding.default, t(9, 4), t(5), result=t(5, 4)), (0, 20, 0)),
    (
        "a bag reads every row that it sums",
        lambda: node_of(aten._embedding_bag.default, t(9, 4), t(7), t(2), result=(t(2, 4), t(7))),
        (0, 28, 0),
    ),
    (
        "attention",
        lambda: node_of(
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            *(t(2, 3, n, 4) for n in (8, 16, 16)),
            result=(t(2, 3, 8, 4), t(2, 3, 8)),
        ),
        (4 * 768 * 4, 4 * 768, 768),
    ),
]


@pytest.mark.parametrize(("make", "want"), [w[1:] for w in WORKS], ids=[w[0] for w in WORKS])
def test_work_is_counted_by_hand(make: Callable[[], fx.Node], want: tuple[float, float, float]) -> None:
    node, done = make(), work(make())
    assert (done.flops, done.lanes, done.special) == want
    assert done.flops == flops.of_node(node)


def test_sizes() -> None:
    assert gemm(node_of(aten.linear.default, t(2, 3, 4), t(5, 4), result=t(2, 3, 5))) == (1, 6, 5, 4)
    assert gemm(node_of(aten.baddbmm.default, t(1), t(2, 3, 4), t(2, 4, 5), result=t(2, 3, 5))) == (2, 3, 5, 4)
    assert reduced(node_of(aten.sum.dim_IntList, t(6, 4), [0], result=t(4))) == (6, True)
    assert reduced(node_of(aten.mean.dim, t(6, 4), [-1], result=t(6))) == (4, False)
    assert goes_over(node_of(aten.cat.default, [1], result=t(6, 4))) == 24


@pytest.mark.parametrize(
    ("left", "right", "result", "want"),
    [
        ((64, 32), (4, 32, 16), (64, 16), 64 * 32 * 16),  # rows in groups: experts of a mixture
        ((4, 8, 32), (32, 64), (8, 64), 8 * 32 * 64),  # columns in groups
        ((8, 64), (64, 16), (4, 8, 16), 8 * 64 * 16),  # what is summed in groups: gradients of experts
        ((4, 8, 32), (4, 32, 16), (4, 8, 16), 4 * 8 * 32 * 16),
    ],
)
def test_products_of_groups_count(left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...], want: int):
    node = node_of(aten._grouped_mm.default, t(*left), t(*right), result=t(*result))
    assert flops.of_node(node) == 2 * want
