"""Convolutional graphs with channels last: pixels become rows, channels features.

A tensor in torch's ``channels_last`` format says ``[images, channels, height, width]`` and lies as ``[images, height,
width, channels]``. ``to_pixels`` says the latter throughout: convolutions, and what follows element by element, work on
rows of channels, under views that cost nothing. ``from_pixels`` undoes it for convolutions that no region takes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from tilestream.graph.convolutions import FIRST, LAST, convolution, is_convolution, pair, why_not
from tilestream.graph.narrow_pixels import COPIED, narrow, side_by_side
from tilestream.graph.nodes import argument, aten, packet, value
from tilestream.graph.operators import ELEMENTWISE
from tilestream.graph.sizes import expression

PIXELS = "tilestream.pixels"
"""In the meta of linears over pixels."""
FOLDED = "of the vectors that batch norms become, a scale and a shift, for all norms at once: nothing streams"


def to_pixels(graph: fx.Graph, bulk: bool) -> dict[str, str]:
    """Rewrite convolutions of channels-last tensors, and what follows them element by element.

    Where another operator reads a result, a view shows it as before. Batch norms become a scale and a shift.

    Args:
        bulk: how kernels copy pixels.

    Returns:
        Names of nodes that are to stay out of every region, and why: what ``selection.partition`` takes as ``apart``.
    """
    pixels: dict[fx.Node, fx.Node] = {}
    taken = any((packet(n) is aten.convolution and not why_not(n)) or narrow(n) is not None for n in graph.nodes)
    folded = _folded(graph) if taken else {}
    apart = {name: FOLDED for both in folded.values() for name in _behind(both)}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        with graph.inserting_before(node):
            if packet(node) is aten.convolution and not why_not(node):
                pixels[node] = _convolution(graph, node, pixels, bulk)
            elif (few := narrow(node)) is not None:
                taken, weight, names = side_by_side(graph, few, node)
                apart |= dict.fromkeys(names, COPIED)
                slid = [list(pair) for pair in (few.window.stride, few.window.padding, few.window.dilation)]
                words = (taken, weight, few.bias, *slid, bulk)
                pixels[node] = _call(graph, convolution, words, node, _rows(node.meta["val"]))
            elif packet(node) in ELEMENTWISE and _follows(node, pixels):
                pixels[node] = _elementwise(graph, node, pixels)
            elif (
                packet(node) is aten._native_batch_norm_legit_no_training and node.args[0] in pixels and node in folded
            ):
                _batch_norm(graph, node, pixels, folded[node])
    for node, made in pixels.items():
        with graph.inserting_after(node):
            shown = _call(graph, aten.permute.default, (made, FIRST), node)
        node.replace_all_uses_with(shown, delete_user_cb=lambda user, made=pixels: user not in made)
    graph.eliminate_dead_code()
    return apart


def from_pixels(graph: fx.Graph) -> None:
    """``aten.convolution`` again, under views, in the place of every convolution of pixels."""
    for node in list(graph.nodes):
        if not is_convolution(node):
            continue
        x, weight, bias, stride, padding, dilation, _ = node.args
        assert isinstance(x, fx.Node)
        with graph.inserting_before(node):
            shown = graph.call_function(aten.permute.default, (x, FIRST))
            shown.meta = {**node.meta, "val": x.meta["val"].permute(FIRST)}
            taken = (shown, weight, bias, stride, padding, dilation, False, [0, 0], 1)
            made = graph.call_function(aten.convolution.default, taken)
            made.meta = {**node.meta, "val": node.meta["val"].permute(FIRST)}
            node.replace_all_uses_with(_call(graph, aten.permute.default, (made, LAST), node, node.meta["val"]))
        graph.erase_node(node)


def _call(graph: fx.Graph, target: object, args: tuple, like: fx.Node, fake: object = None) -> fx.Node:
    """A node with the provenance of ``like``, and its value unless another is given."""
    made = graph.call_function(target, args)  # pyright: ignore[reportArgumentType]
    made.meta = {**like.meta, "val": like.meta["val"] if fake is None else fake}
    return made


def _seen(graph: fx.Graph, node: fx.Node, pixels: dict[fx.Node, fx.Node]) -> fx.Node:
    """A tensor with its channels last: what was made so, or a view."""
    return pixels.get(node) or _call(graph, aten.permute.default, (node, LAST), node, node.meta["val"].permute(LAST))


def _rows(fake: torch.Tensor) -> torch.Tensor:
    """A value ``[images, height, width, channels]`` that lies in this order."""
    return fake.permute(LAST).contiguous()


def _convolution(graph: fx.Graph, node: fx.Node, pixels: dict[fx.Node, fx.Node], bulk: bool) -> fx.Node:
    x, weight, bias = node.args[:3]
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    numbers = [list(pair(argument(node, 3 + k, ""))) for k in range(3)]
    kernel = weight.meta["val"]
    if tuple(kernel.shape[2:]) == (1, 1) and numbers[:2] == [[1, 1], [0, 0]]:  # a linear over pixels
        shape = [kernel.shape[0], kernel.shape[1]]
        matrix = _call(graph, aten.view.default, (weight, shape), weight, kernel.view(shape))
        made = _call(graph, aten.linear.default, (_seen(graph, x, pixels), matrix, bias), node, _rows(node.meta["val"]))
        made.meta[PIXELS] = True
        return made
    return _call(
        graph, convolution, (_seen(graph, x, pixels), weight, bias, *numbers, bulk), node, _rows(node.meta["val"])
    )


def _follows(node: fx.Node, pixels: dict[fx.Node, fx.Node]) -> bool:
    """Whether an elementwise op works on pixels: all its tensors are equally large, and lie with channels last."""
    operands = [n for n in node.all_input_nodes if value(n) is not None]
    fake = value(node)
    if fake is None or fake.dim() != 4 or not any(n in pixels for n in operands):
        return False
    shape = [expression(d) for d in fake.shape]
    for n in operands:
        other = value(n)
        assert other is not None
        if n not in pixels and not other.is_contiguous(memory_format=torch.channels_last):
            return False
        if [expression(d) for d in other.shape] != shape:
            return False
    return fake.is_contiguous(memory_format=torch.channels_last)


def _elementwise(graph: fx.Graph, node: fx.Node, pixels: dict[fx.Node, fx.Node]) -> fx.Node:
    seen = {n: _seen(graph, n, pixels) for n in node.all_input_nodes if value(n) is not None}
    made = graph.node_copy(node, lambda n: seen.get(n, n))
    made.meta = {**node.meta, "val": _rows(node.meta["val"])}
    return made


def _behind(vectors: tuple[fx.Node, ...]) -> set[str]:
    """Names of the nodes that ``vectors`` are made of, themselves included."""
    found: set[str] = set()
    todo = list(vectors)
    while todo:
        node = todo.pop()
        if node.op == "call_function" and node.name not in found:
            found.add(node.name)
            todo += node.all_input_nodes
    return found


def _folded(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, fx.Node]]:
    """Scale and shift, fp32, of batch norms with running statistics whose vectors the graph is given.

    Those of one epsilon and one set of dtypes are computed side by side, once for all: Inductor has what
    ``as_strided`` reads in memory, where slices would be computed by a kernel each.
    """
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    given = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
    for node in graph.nodes:
        vectors = node.args[1:5] if packet(node) is aten._native_batch_norm_legit_no_training else ()
        if vectors and all(isinstance(v, fx.Node) and v in given for v in vectors):
            dtypes = tuple(v.meta["val"].dtype for v in vectors if isinstance(v, fx.Node))
            groups.setdefault((argument(node, 6, "eps", 1e-5), *dtypes), []).append(node)
    found: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for (eps, *_), nodes in groups.items():
        with graph.inserting_after(given[-1]):
            made = _Chain(graph, nodes[0])
            weight, bias, mean, variance = made.joined([[n.args[k] for n in nodes] for k in range(1, 5)])
            rstd = made.call(aten.rsqrt.default, made.call(aten.add.Tensor, variance, eps))
            scale = made.call(aten.mul.Tensor, weight, rstd)
            shift = made.call(aten.sub.Tensor, bias, made.call(aten.mul.Tensor, mean, scale))
            start = 0
            for node in nodes:
                stop = start + int(node.args[1].meta["val"].shape[0])  # pyright: ignore
                parts = [made.call(aten.as_strided.default, v, [stop - start], [1], start) for v in (scale, shift)]
                found[node] = (parts[0], parts[1])
                start = stop
    return found


class _Chain:
    """Nodes one behind the other, with their fake values."""

    def __init__(self, graph: fx.Graph, like: fx.Node) -> None:
        self.graph, self.like = graph, like
        self.last: fx.Node | None = None

    def call(self, target: Any, *args: Any) -> fx.Node:
        fake = target(*tree_map_only(fx.Node, lambda n: n.meta["val"], args))
        if self.last is None:
            made = _call(self.graph, target, args, self.like, fake)
        else:
            with self.graph.inserting_after(self.last):
                made = _call(self.graph, target, args, self.like, fake)
        self.last = made
        return made

    def joined(self, kinds: list[list[Any]]) -> list[fx.Node]:
        """All vectors of each of ``kinds`` in one, fp32. Those of one dtype are joined at once: a kernel fewer each."""
        dtypes = {v.meta["val"].dtype for vectors in kinds for v in vectors}
        if len(dtypes) > 1:
            wide = [self.call(aten.cat.default, vectors) for vectors in kinds]
        else:
            whole = self.call(aten.cat.default, [v for vectors in kinds for v in vectors])
            size = whole.meta["val"].shape[0] // len(kinds)
            wide = [self.call(aten.slice.Tensor, whole, 0, k * size, (k + 1) * size) for k in range(len(kinds))]
        return [self.call(torch.ops.prims.convert_element_type.default, v, torch.float32) for v in wide]


def _batch_norm(
    graph: fx.Graph, node: fx.Node, pixels: dict[fx.Node, fx.Node], folded: tuple[fx.Node, fx.Node]
) -> None:
    """With running statistics: a scale and a shift, where only its first result is used."""
    if any(u.target is not operator.getitem or u.args[1] != 0 for u in node.users):
        return
    source, dtype = node.args[0], node.meta["val"][0].dtype
    assert isinstance(source, fx.Node)
    cast = torch.ops.prims.convert_element_type.default
    for part in list(node.users):
        with graph.inserting_before(part):
            made = _Chain(graph, part)
            wide = made.call(cast, pixels[source], torch.float32)
            scaled = made.call(aten.mul.Tensor, wide, folded[0])
            pixels[part] = made.call(cast, made.call(aten.add.Tensor, scaled, folded[1]), dtype)
