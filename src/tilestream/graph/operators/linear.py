"""Linear layers, whole or by some rows of their weight; convolutions, linears over the taps of pixels."""

from __future__ import annotations

from torch import fx

from tilestream.graph import convolutions
from tilestream.graph.convolutions import window_of
from tilestream.graph.lowering import MAX_FEATURES, Emitter, Frame, Steps, dtype_of
from tilestream.graph.nodes import MATMULS, Unsupported, argument, aten, number, packet, permutation, takes_tf32, value
from tilestream.graph.operators import split
from tilestream.graph.operators.rules import rule
from tilestream.graph.sizes import product, same_size
from tilestream.ir.pipeline import Tile
from tilestream.kernels.parts.taps import why_not_in_bulk


def weight(node: object) -> tuple[fx.Node, bool]:
    """The stored matrix behind the second operand of ``mm``, and whether that is ``[out, in]`` already."""
    if not isinstance(node, fx.Node):
        raise Unsupported("the weight is not a tensor")
    order = permutation(node) or [0]
    rank = len(order)
    is_turned = order == [*range(rank - 2), rank - 1, rank - 2]
    return (node.all_input_nodes[0], True) if is_turned else (node, False)


@rule(*MATMULS)
def linear(e: Emitter, node: fx.Node, rows: tuple[int, int] | None = None) -> Tile:
    """``mm``, ``addmm``, ``linear``, and ``bmm`` of a batch of one.

    Args:
        rows: the part of the weight's rows that is taken.
    """
    kind = packet(node)
    bias = node.args[0] if kind is aten.addmm else argument(node, 2, "bias") if kind is aten.linear else None
    x, matrix = node.args[1:3] if kind is aten.addmm else node.args[:2]
    stored, straight = (matrix, True) if kind is aten.linear else weight(matrix)
    if kind is aten.addmm and (number(node, 3, "beta", 1.0) != 1.0 or number(node, 4, "alpha", 1.0) != 1.0):
        raise Unsupported("addmm with alpha or beta")
    assert isinstance(stored, fx.Node)
    fake = value(stored)
    if fake is None or fake.dim() != (3 if kind is aten.bmm else 2):
        raise Unsupported("the weight is not a matrix")
    if kind is aten.bmm and not same_size(fake.shape[0], 1):
        raise Unsupported("a batch of matrices: rows do not share one weight")
    if (given := value(x)) is not None and given.dtype != fake.dtype:
        raise Unsupported(f"a product of {given.dtype} and {fake.dtype}, which torch refuses")
    outs, ins = fake.shape[-2:] if straight else reversed(fake.shape[-2:])
    if not isinstance(outs, int) or not isinstance(ins, int):
        raise Unsupported("the weight's size is dynamic")
    if outs < 1 or ins < 1:
        raise Unsupported("the weight is empty")
    frame = e.matrix(x)
    if ins == 1:
        return _outer(e, node, e.tile(x, frame), stored, bias, outs, rows)
    by_parts = dtype_of(node) == "f32" and not takes_tf32()
    cut, size = _part(outs, rows)
    steps: Steps = cut if straight else (("t",), *cut)
    if kind is aten.bmm:
        steps = (("matrix",), *steps)
    tile = e.tile(x, frame)
    params = () if by_parts else (e.parameter(stored, steps, (size, ins)),)
    late, own = (None, False) if bias is None else _bias(e, bias, frame, outs, rows)
    if by_parts:
        out, own = split.product(e, tile, stored, steps, size), False
    else:
        params = (*params, late) if isinstance(late, str) and own else params
        out = e.emit("linear", size, dtype_of(node), (tile,), params)
    return out if late is None or own else e.binary("add", out, late, dtype_of(node))


def _outer(
    e: Emitter, node: fx.Node, x: Tile, stored: fx.Node, bias: object, outs: int, rows: tuple[int, int] | None
) -> Tile:
    """A linear of one input feature: the column ``x`` times a vector. No product for the tensor cores."""
    cut, width = _part(outs, rows)
    vector = e.parameter(stored, (("vector", outs), *cut), (width,))
    if bias is None:
        return e.binary("mul", x, vector, dtype_of(node))
    late, _ = _bias(e, bias, e.frame(node), outs, rows)
    return e.binary("add", e.binary("mul", x, vector, "f32"), late, dtype_of(node))


def put_off(e: Emitter, node: fx.Node) -> Tile:
    """The value of a linear of which only slices are used: a tile that is never made."""
    fake = value(node)
    outs = fake.shape[-1] if fake is not None else 0
    if not isinstance(outs, int) or outs < 1:
        raise Unsupported("the weight's size is dynamic, or zero")
    if e.members is None:
        linear(e, node, (0, min(outs, MAX_FEATURES)))
    tile = Tile.of(f"{node.name}.whole", outs, dtype_of(node))
    e.deferred[tile.name] = node
    return tile


def _part(outs: int, rows: tuple[int, int] | None) -> tuple[Steps, int]:
    """The step that takes some rows of a weight or of its bias, if not all of them; and how many there are."""
    return ((), outs) if rows is None else ((("rows", *rows),), rows[1] - rows[0])


def _bias(e: Emitter, bias: object, frame: Frame, outs: int, rows: tuple[int, int] | None) -> tuple[Tile | str, bool]:
    """An operand that is added, and whether it is a vector, which the linear adds itself."""
    fake = value(bias)
    if isinstance(bias, fx.Node) and fake is not None and product(fake.shape) == outs:
        if fake.dim() == 1 or (fake.dim() == 2 and fake.shape[0] == 1 and bias not in e.known):
            cut, size = _part(outs, rows)
            return e.parameter(bias, (("vector", outs), *cut), (size,)), True
    operand = e.operand(bias, Frame(frame.rows, outs, False, 2))
    if not isinstance(operand, Tile | str):
        raise Unsupported("a scalar bias")
    if rows is not None:
        raise Unsupported("a sliced linear with a bias that has rows")
    return operand, False


@rule(convolutions.convolution)
def convolution(e: Emitter, node: fx.Node) -> Tile:
    """A linear over the channels of all taps, whose pixels come from memory.

    Raises:
        Unsupported: a size is not known.
    """
    x, weight, bias = node.args[:3]
    picture, kernel = (value(n) for n in (x, weight))
    if picture is None or kernel is None or not isinstance(x, fx.Node):
        raise Unsupported("an operand is not a tensor")
    outs, channels = kernel.shape[:2]
    if not isinstance(outs, int) or not isinstance(channels, int):
        raise Unsupported("the weight's size is dynamic")
    window = window_of(node, picture, kernel, 1)
    taken = window.taps()
    bulk = bool(node.args[6]) and not why_not_in_bulk(taken[0], taken, (window.height, window.width))
    taps = [e.tapped(x, tap, channels) for tap in window.taps(bulk)]
    tile = e.emit("cat", len(taps) * channels, dtype_of(x), tuple(taps)) if len(taps) > 1 else taps[0]
    params = [e.parameter(weight, (("taps",),), (outs, tile.features))]
    if bias is not None:
        params.append(e.parameter(bias, (("vector", outs),), (outs,)))
    return e.emit("linear", outs, dtype_of(node), (tile,), tuple(params))
