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
from tilestream.graph.sentences import indices, norms, parts, products, reductions, views
from tilestream.graph.sentences.shapes import Shapes, sizes
from tilestream.graph.sentences.writer import Ref, Writer, dtype_of, own

aten = torch.ops.aten


@dataclass(frozen=True)
class Sentence:
    """How an operator's dimensions relate, and what it writes."""

    shapes: Callable[[Shapes, fx.Node], None]
    write: Callable[[Writer, fx.Node], object]


def sentence(node: fx.Node) -> Sentence:
    """What ``node`` is.

    Raises:
        Unsupported: nothing over axes; says why.
    """
    kind = packet(node)
    if kind is operator.getitem and packet(node.all_input_nodes[0]) not in views.SPLITS:
        return _RESULT
    if kind not in TABLE:
        raise Unsupported(reason(node), node)
    return TABLE[kind]


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


_RESULT = Sentence(_result_shapes, _result)

TABLE: dict[object, Sentence] = {
    **dict.fromkeys(ELEMENTWISE, Sentence(_elementwise_shapes, _elementwise)),
    **dict.fromkeys(products.PRODUCTS, Sentence(products.shapes, products.write)),
    **{
        op: Sentence(reductions.shapes, lambda w, node, kind=kind: reductions.write(w, node, kind))
        for op, kind in reductions.REDUCTIONS.items()
    },
    aten.native_layer_norm: Sentence(norms.norm_shapes, norms.layer_norm),
    aten._fused_rms_norm: Sentence(norms.norm_shapes, norms.rms_norm),
    aten.rms_norm: Sentence(norms.norm_shapes, norms.rms_norm),
    aten.native_layer_norm_backward: Sentence(norms.norm_backward_shapes, norms.layer_norm_backward),
    aten._fused_rms_norm_backward: Sentence(norms.norm_backward_shapes, norms.rms_norm_backward),
    **dict.fromkeys((aten._softmax, aten._log_softmax), Sentence(norms.softmax_shapes, norms.softmax)),
    **dict.fromkeys(
        (aten._softmax_backward_data, aten._log_softmax_backward_data),
        Sentence(norms.softmax_shapes, norms.softmax_backward),
    ),
    **dict.fromkeys(views.RESHAPES, Sentence(views.reshape_shapes, views.reshape)),
    **dict.fromkeys(views.PERMUTATIONS, Sentence(views.permute_shapes, views.same)),
    **dict.fromkeys(views.COPIES, Sentence(views.copy_shapes, views.copy)),
    **dict.fromkeys((*views.CUTS, operator.getitem), Sentence(views.cut_shapes, views.cut)),
    **dict.fromkeys(views.SPLITS, Sentence(_nothing, _nothing)),
    aten.expand: Sentence(views.expand_shapes, views.expand),
    **dict.fromkeys((aten.slice_backward, aten.select_backward), Sentence(parts.placed_shapes, parts.placed)),
    **dict.fromkeys((aten.cat, aten.stack), Sentence(parts.cat_shapes, parts.cat)),
    **dict.fromkeys(indices.LOOKUPS, Sentence(indices.lookup_shapes, indices.lookup)),
    **dict.fromkeys(indices.SUMS, Sentence(indices.sum_shapes, indices.add_up)),
    **dict.fromkeys(indices.ZEROS, Sentence(indices.zeros_shapes, indices.zeros)),
}
