"""Convolutional graphs with channels last: pixels become rows, channels features.

A tensor in torch's ``channels_last`` format says ``[images, channels, height, width]`` and lies as ``[images, height,
width, channels]``. ``to_pixels`` says the latter throughout: convolutions, and what follows element by element, work on
rows of channels, under views that cost nothing. ``from_pixels`` undoes it for convolutions that no region takes.
Depthwise convolutions that were chosen to be our operator (``graph.depthwise``) become it, with what that takes in.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilestream.graph.convolutions import FIRST, LAST, convolution, pair, why_not
from tilestream.graph.depthwise import DEPTHWISE, TAKEN, Site
from tilestream.graph.nodes import argument, arguments, aten, first_alone, packet, permutation, tensor_of, value
from tilestream.graph.operators import ELEMENTWISE
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.narrow_pixels import narrow, side_by_side
from tilestream.graph.rewrites.operators import JOINED
from tilestream.graph.rewrites.settings import APART, Settings
from tilestream.graph.sizes import expression
from tilestream.graph.squeeze import Site as Squeeze
from tilestream.graph.squeeze import site_of
from tilestream.kernels.operators.depthwise import Tile

CAST = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class Taken:
    """A site that becomes the operator, with the scale and the shift that its norm is, and the gates that become one:
    each with the mean that it is made of."""

    site: Site
    tile: Tile
    scale: fx.Node | None
    shift: fx.Node | None
    gates: tuple[tuple[fx.Node, Squeeze], ...]

    @classmethod
    def of(cls, node: fx.Node, folded: Mapping[fx.Node, tuple[fx.Node, fx.Node]]) -> Taken | None:
        """None where the norm is none of ``folded``, those that are a scale and a shift."""
        site, tile, squeezed = node.meta.pop(TAKEN)
        gates = tuple((m, gate) for m in site.means if squeezed and (gate := site_of(m)) is not None)
        if site.norm is None:
            return cls(site, tile, None, None, gates)
        return cls(site, tile, *folded[site.norm], gates) if site.norm in folded else None

    @property
    def inside(self) -> set[fx.Node]:
        """The nodes that the operators compute."""
        found, node = {self.site.node, *(n for _, gate in self.gates for n in gate.inside)}, self.site.last
        while node not in found:
            found.add(node)
            node = node.all_input_nodes[0]
        return found


def taken_in(taken: Taken, x: fx.Node) -> fx.Node:
    """The operator's result on ``x``, whose channels lie last, where the graph inserts; means of it are replaced."""
    site, node = taken.site, taken.site.node
    weight, bias = node.args[1:3]
    conv, tile = site.conv, [taken.tile.rows, taken.tile.columns]
    slid = (conv.stride, list(conv.padding), conv.activation, tile, conv.pooled)
    made = call(node, DEPTHWISE, x, weight, bias, taken.scale, taken.shift, *slid)
    result = call(node, operator.getitem, made, 0)
    if conv.pooled:
        pooled = call(node, operator.getitem, made, 1)
        gates, pixels = dict(taken.gates), conv.out[0] * conv.out[1]
        for gate in gates.values():
            last = gate.inside[-1]
            with node.graph.inserting_before(last):
                last.replace_all_uses_with(gate.gate(pooled, pixels))
        for mean in (m for m in site.means if m not in gates):
            with node.graph.inserting_before(mean):
                total = call(mean, aten.sum.dim_IntList, pooled, [1])
                share = call(mean, aten.mul.Tensor, total, 1 / pixels)
                share = call(mean, CAST, share, mean.meta["val"].dtype)
                if argument(mean, 2, "keepdim", False):
                    share = call(mean, aten.reshape.default, share, [*share.meta["val"].shape, 1, 1])
            mean.replace_all_uses_with(share)
    return result


PIXELS = "tilestream.pixels"
"""In the meta of linears over pixels."""
FOLDED = "of the vectors that batch norms become, a scale and a shift, for all norms at once: nothing streams"


def to_pixels(graph: fx.Graph, settings: Settings) -> int:
    """Rewrite convolutions of channels-last tensors, and what follows them element by element.

    Where another operator reads a result, a view shows it as before. Batch norms become a scale and a shift.
    """
    lying = {n: n.args[0] for n in graph.nodes if _lies_last(n)}
    pixels: dict[fx.Node, fx.Node] = dict(lying)
    taken = any((packet(n) is aten.convolution and not why_not(n)) or narrow(n) is not None for n in graph.nodes)
    folded = _folded(graph) if taken or any(TAKEN in n.meta for n in graph.nodes) else {}
    done: set[fx.Node] = set(lying)
    for node in list(graph.nodes):
        if node.op != "call_function" or node in done:
            continue
        with graph.inserting_before(node):
            if TAKEN in node.meta and (ours := Taken.of(node, folded)) is not None:
                pixels[ours.site.last] = taken_in(ours, _seen(arguments(ours.site.node)[0], pixels))
                done |= ours.inside
            elif packet(node) is aten.convolution and not why_not(node):
                pixels[node] = _convolution(node, pixels, settings.bulk)
            elif (few := narrow(node)) is not None:
                slid = [list(pair) for pair in (few.window.stride, few.window.padding, few.window.dilation)]
                pixels[node] = call(node, convolution, *side_by_side(few, node), few.bias, *slid, settings.bulk)
            elif packet(node) in ELEMENTWISE and _follows(node, pixels):
                pixels[node] = _elementwise(graph, node, pixels)
            elif node in folded and node.args[0] in pixels:
                _batch_norm(node, pixels, folded[node])
    for node, made in pixels.items():
        if node in lying:
            continue
        with graph.inserting_after(node):
            shown = call(node, aten.permute.default, made, FIRST)
        node.replace_all_uses_with(shown, delete_user_cb=lambda user, made=pixels: user not in made)
    return len(pixels) - len(lying)


@each(convolution)
def from_pixels(node: fx.Node, _: Settings) -> fx.Node:
    """``aten.convolution`` again, under views, in the place of every convolution of pixels."""
    x, *others = node.args[:-1]
    shown = call(node, aten.permute.default, x, FIRST)
    made = call(node, aten.convolution.default, shown, *others, False, [0, 0], 1)
    return call(node, aten.permute.default, made, LAST)


def _lies_last(node: fx.Node) -> bool:
    """Whether a node is a view, with channels first, of what was computed with its channels last."""
    if permutation(node) != FIRST:
        return False
    before = value(node.args[0])
    return before is not None and before.dim() == 4 and before.is_contiguous()


def _is_vector(fake: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether a tensor has one number for each channel of pictures: ``[1, channels, 1, 1]``, as a layer's scale."""
    return list(fake.shape) == [1, like.shape[1], 1, 1]


def _seen(node: fx.Node, pixels: dict[fx.Node, fx.Node]) -> fx.Node:
    """A tensor with its channels last: what was made so, or a view."""
    return pixels.get(node) or call(node, aten.permute.default, node, LAST)


def _convolution(node: fx.Node, pixels: dict[fx.Node, fx.Node], bulk: bool) -> fx.Node:
    x, weight, bias = arguments(node)[:3]
    numbers = [list(pair(argument(node, 3 + k, ""))) for k in range(3)]
    kernel = weight.meta["val"]
    if tuple(kernel.shape[2:]) == (1, 1) and numbers[:2] == [[1, 1], [0, 0]]:  # a linear over pixels
        matrix = call(weight, aten.view.default, weight, [kernel.shape[0], kernel.shape[1]])
        made = call(node, aten.linear.default, _seen(x, pixels), matrix, bias)
        made.meta[PIXELS] = True
        return made
    return call(node, convolution, _seen(x, pixels), weight, bias, *numbers, bulk)


def _follows(node: fx.Node, pixels: dict[fx.Node, fx.Node]) -> bool:
    """Whether an elementwise op works on pixels: all its tensors are equally large, and lie with channels last."""
    operands = [n for n in node.all_input_nodes if value(n) is not None]
    fake = value(node)
    if fake is None or fake.dim() != 4 or not any(n in pixels for n in operands):
        return False
    shape = [expression(d) for d in fake.shape]
    for n in operands:
        other = tensor_of(n)
        if _is_vector(other, fake) and not _is_vector(fake, fake):
            continue
        if n not in pixels and not other.is_contiguous(memory_format=torch.channels_last):
            return False
        if [expression(d) for d in other.shape] != shape:
            return False
    return fake.is_contiguous(memory_format=torch.channels_last)


def _elementwise(graph: fx.Graph, node: fx.Node, pixels: dict[fx.Node, fx.Node]) -> fx.Node:
    fake = node.meta["val"]

    def seen_here(n: fx.Node) -> fx.Node:
        other = n.meta["val"]
        vector = _is_vector(other, fake) and not _is_vector(fake, fake)
        return call(n, aten.reshape.default, n, [other.shape[1]]) if vector else _seen(n, pixels)

    seen = {n: seen_here(n) for n in node.all_input_nodes if value(n) is not None}
    made = graph.node_copy(node, lambda n: seen.get(n, n))
    made.meta = {**node.meta, "val": node.meta["val"].permute(LAST).contiguous()}
    return made


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
    with graph.inserting_before(given[-1].next if given else None):
        for (eps, *_), nodes in groups.items():
            found |= _side_by_side(nodes, eps)
    return found


def _side_by_side(nodes: Sequence[fx.Node], eps: float) -> dict[fx.Node, tuple[fx.Node, fx.Node]]:
    def made(target: Any, *args: Any) -> fx.Node:
        node = call(nodes[0], target, *args)
        node.meta[APART] = FOLDED
        return node

    weight, bias, mean, variance = _joined([[n.args[k] for n in nodes] for k in range(1, 5)], made)
    rstd = made(aten.rsqrt.default, made(aten.add.Tensor, variance, eps))
    scale = made(aten.mul.Tensor, weight, rstd)
    shift = made(aten.sub.Tensor, bias, made(aten.mul.Tensor, mean, scale))
    found, start = {}, 0
    for node in nodes:
        size = int(node.args[1].meta["val"].shape[0])  # pyright: ignore
        found[node] = tuple(made(aten.as_strided.default, v, [size], [1], start) for v in (scale, shift))
        start += size
    return found


def _joined(kinds: list[list[Any]], made: Callable[..., fx.Node]) -> list[fx.Node]:
    """All vectors of each of ``kinds`` in one, fp32. Those of one dtype are joined at once: a kernel fewer each."""
    if len({v.meta["val"].dtype for vectors in kinds for v in vectors}) > 1:
        wide = [made(JOINED, vectors) for vectors in kinds]
    else:
        whole = made(JOINED, [v for vectors in kinds for v in vectors])
        size = whole.meta["val"].shape[0] // len(kinds)
        wide = [made(aten.slice.Tensor, whole, 0, k * size, (k + 1) * size) for k in range(len(kinds))]
    return [made(CAST, v, torch.float32) for v in wide]


def _batch_norm(node: fx.Node, pixels: dict[fx.Node, fx.Node], folded: tuple[fx.Node, fx.Node]) -> None:
    """With running statistics: a scale and a shift, where only its first result is used."""
    if not first_alone(node):
        return
    source, (scale, shift) = arguments(node)[0], folded
    for part in list(node.users):
        with node.graph.inserting_before(part):
            scaled = call(part, aten.mul.Tensor, call(part, CAST, pixels[source], torch.float32), scale)
            pixels[part] = call(part, CAST, call(part, aten.add.Tensor, scaled, shift), node.meta["val"][0].dtype)
