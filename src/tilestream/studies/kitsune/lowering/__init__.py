"""What an ATen operator is over axes: how its dimensions relate, and the ops that it becomes, a family a file.

Elementwise operators have the rules that row programs have (``graph.operators``): they say nothing about dimensions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported, packet
from tilestream.graph.operators import ELEMENTWISE
from tilestream.graph.operators.reasons import reason
from tilestream.studies.kitsune.lowering import indices, norms, parts, products, reductions, views
from tilestream.studies.kitsune.lowering.shapes import Shapes, sizes
from tilestream.studies.kitsune.lowering.writer import Ref, Writer, dtype_of, own

aten = torch.ops.aten


@dataclass(frozen=True)
class Lowering:
    """How an operator's dimensions relate, and what it writes."""

    shapes: Callable[[Shapes, fx.Node], None]
    write: Callable[[Writer, fx.Node], object]


def lowering(node: fx.Node) -> Lowering:
    """What ``node`` is.

    Raises:
        Unsupported: nothing over axes; says why.
    """
    kind = packet(node)
    if kind is operator.getitem and packet(node.all_input_nodes[0]) not in views.SPLITS:
        return _RESULT
    if kind not in LOWERINGS:
        raise Unsupported(reason(node), node)
    return LOWERINGS[kind]


def _elementwise_shapes(s: Shapes, node: fx.Node) -> None:
    dtype_of(node)
    shape = s.dims.new(sizes(node))
    s.make(node, shape)
    s.over(node, shape)
    for operand in node.all_input_nodes:
        s.align(operand, shape)


def _elementwise(w: Writer, node: fx.Node) -> None:
    tile = ELEMENTWISE[packet(node)](w, node)
    w.refs[node, 0] = Ref(tile.name, own(tile).at or (), tile)


def _result_shapes(s: Shapes, node: fx.Node) -> None:
    producer, index = node.args
    s.make(node, s.read(producer, int(index)))  # pyright: ignore[reportArgumentType]


def _result(w: Writer, node: fx.Node) -> None:
    producer, index = node.args
    found = w.refs.get((producer, int(index)))  # pyright: ignore[reportArgumentType]
    if found is None:
        raise Unsupported("a result that its operator does not make")
    w.refs[node, 0] = found


def _nothing(_: object, __: fx.Node) -> None:
    """A tuple of views is none itself: its parts are."""


_RESULT = Lowering(_result_shapes, _result)

LOWERINGS: dict[object, Lowering] = {
    **dict.fromkeys(ELEMENTWISE, Lowering(_elementwise_shapes, _elementwise)),
    **dict.fromkeys(products.PRODUCTS, Lowering(products.shapes, products.write)),
    **{
        op: Lowering(reductions.shapes, lambda w, node, kind=kind: reductions.write(w, node, kind))
        for op, kind in reductions.REDUCTIONS.items()
    },
    aten.native_layer_norm: Lowering(norms.norm_shapes, norms.layer_norm),
    aten._fused_rms_norm: Lowering(norms.norm_shapes, norms.rms_norm),
    aten.rms_norm: Lowering(norms.norm_shapes, norms.rms_norm),
    aten.native_layer_norm_backward: Lowering(norms.norm_backward_shapes, norms.layer_norm_backward),
    aten._fused_rms_norm_backward: Lowering(norms.norm_backward_shapes, norms.rms_norm_backward),
    **dict.fromkeys((aten._softmax, aten._log_softmax), Lowering(norms.softmax_shapes, norms.softmax)),
    **dict.fromkeys(
        (aten._softmax_backward_data, aten._log_softmax_backward_data),
        Lowering(norms.softmax_shapes, norms.softmax_backward),
    ),
    **dict.fromkeys(views.RESHAPES, Lowering(views.reshape_shapes, views.reshape)),
    **dict.fromkeys(views.PERMUTATIONS, Lowering(views.permute_shapes, views.same)),
    **dict.fromkeys(views.COPIES, Lowering(views.copy_shapes, views.copy)),
    **dict.fromkeys((*views.CUTS, operator.getitem), Lowering(views.cut_shapes, views.cut)),
    **dict.fromkeys(views.SPLITS, Lowering(_nothing, _nothing)),
    aten.expand: Lowering(views.expand_shapes, views.expand),
    **dict.fromkeys((aten.slice_backward, aten.select_backward), Lowering(parts.placed_shapes, parts.placed)),
    **dict.fromkeys((aten.cat, aten.stack), Lowering(parts.cat_shapes, parts.cat)),
    **dict.fromkeys(indices.LOOKUPS, Lowering(indices.lookup_shapes, indices.lookup)),
    **dict.fromkeys(indices.SUMS, Lowering(indices.sum_shapes, indices.add_up)),
    **dict.fromkeys(indices.ZEROS, Lowering(indices.zeros_shapes, indices.zeros)),
}
