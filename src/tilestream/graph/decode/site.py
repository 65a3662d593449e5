"""Finds the decode step of a whole model: decoder layers over a static cache, one token of each of some sequences,
from the embedding to the logits.

What is recognised is the computation, read from the logits backwards through views. What layers may consist of is a
``Form``. Whatever differs is no step, and its reason says where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tilestream.graph.decode.layers import Layer, is_layer, layer_of
from tilestream.graph.decode.norms import norm_of
from tilestream.graph.decode.products import Product, product_of
from tilestream.graph.decode.reading import count_of, dtype_of, either, is_bf16, is_plain, is_same, peeled, shape_of
from tilestream.graph.nodes import Unsupported, aten, packet
from tilestream.kernels.step.form import Form
from tilestream.kernels.step.shape import Shape, sizes_of


@dataclass
class Site:
    """A step: the nodes that its operator takes, as ``op.step`` names them.

    Attributes:
        logits: the node that it replaces, a product.
        updates: what writes the cache, in the order of ``caches``.
        lengths: of each layer the token's place. counts: what makes them one more, where all are arguments that are
            written so; else none.
    """

    logits: fx.Node
    row: fx.Node
    cos: fx.Node | None
    sin: fx.Node | None
    mask: fx.Node | None
    weights: list[fx.Node]
    caches: list[fx.Node]
    updates: list[fx.Node]
    lengths: list[fx.Node]
    counts: list[fx.Node]
    scale: float
    eps: float
    head_eps: float
    times: float
    shape: Shape


def site_of(graph: fx.Graph) -> Site:
    """The step that a functional ATen graph of inference is.

    Raises:
        Unsupported: it is none, and where it differs.
    """
    logits = _logits(graph)
    ends: dict[str, fx.Node] = {}
    head = product_of(logits).noted(ends, "head")
    norm = norm_of(head.x).noted(ends, "norm")
    x, layers = norm.x, list[Layer]()
    while is_layer(x):
        x, layer = layer_of(x)
        layers.insert(0, layer)
    if not layers:
        raise Unsupported("no decoder layer in front of the last norm", logits)
    first = next((layer for layer in layers if layer.form.rotary), layers[0])
    common: dict[str, Any] = {"eps": norm.eps} | first.shared
    form, no_rope = first.form, list[int]()
    for n, layer in enumerate(layers):
        own, shared = layer.form, layer.shared
        if form.rotary and not own.rotary:
            no_rope.append(n)
            own, shared = replace(own, rotary=form.rotary), {**shared, "cos": common["cos"], "sin": common["sin"]}
        if not all(is_same(common[name], v) for name, v in shared.items()):
            raise Unsupported("layers differ in more than their weights", logits)
        if own != form:
            raise Unsupported("layers consist of different operators", logits)
    form = replace(form, no_rope=tuple(no_rope))
    if head.bias is not None:
        form = replace(form, biased=(*form.biased, "head"))
    if norm.kind != form.norm or norm.eps != common["eps"] or head.turned:
        raise Unsupported("the last norm or the head is not of the layers' kind", logits)
    shape = _sizes_of(x, head, layers, common, form)
    weights = [layer.weights[name] for layer in layers for name in form.weights] + [ends[name] for name in form.last]
    caches = [c for layer in layers for c in layer.caches]
    updates = [u for layer in layers for u in layer.updates]
    lengths, counts = _lengths([layer.index for layer in layers])
    heads_eps = common.pop("head_eps", 0.0)
    site = Site(
        logits=logits, row=x, weights=weights, caches=caches, updates=updates, lengths=lengths, counts=counts,
        head_eps=heads_eps, shape=shape, **common,
    )  # fmt: skip
    _check(site)
    return site


def _logits(graph: fx.Graph) -> fx.Node:
    products = [n for n in graph.nodes if packet(n) in (aten.mm, aten.linear, aten.addmm)]
    if not products:
        raise Unsupported("no product")
    return products[-1]


def _sizes_of(row: fx.Node, head: Product, layers: Sequence[Layer], common: dict[str, Any], form: Form) -> Shape:
    first = layers[0]
    batch, key_heads, positions, features = shape_of(first.caches[0])
    query, gate = (shape_of(first.weights[name])[1 if form.turned else 0] for name in ("query", "gate"))
    return Shape(
        layers=len(layers),
        width=count_of(row) // batch,
        hidden=form.hidden(gate),
        heads=form.heads(query, key_heads, features),
        key_heads=key_heads,
        features=features,
        positions=positions,
        vocabulary=head.rows,
        masked=common["mask"] is not None,
        batch=batch,
        form=form,
    )


def _check(site: Site) -> None:
    """Shapes and dtypes of all that the operator takes."""
    s = site.shape
    if s.refusal:
        raise Unsupported(s.refusal, site.logits)
    sizes = sizes_of(s)
    names = s.form.weights * s.layers + s.form.last
    for node, name in zip(site.weights, names, strict=True):
        if shape_of(node) != sizes[name] or not is_plain(node):
            raise Unsupported(
                f"a weight is {shape_of(node)}, and a step needs {sizes[name]}, contiguous, in bf16", node
            )
    for node in site.caches:
        if shape_of(node) != [s.batch, s.key_heads, s.positions, s.features] or not is_plain(node):
            raise Unsupported("caches are not contiguous tensors of bf16, alike in all layers", node)
    for node in (site.cos, site.sin):
        if node is not None and not (_is_of_each(node, s.batch, s.rotary) and is_bf16(node)):
            raise Unsupported("the rotary embedding is not of one position a sequence, in bf16", node)
    if count_of(site.row) != s.batch * s.width or not is_bf16(site.row):
        raise Unsupported("the step is not of one token of each sequence, in bf16", site.row)
    for node in site.lengths:
        if count_of(node) != 1 or dtype_of(node) != torch.int64:
            raise Unsupported("the position in the cache is not one integer of 64 bits", node)
    mask = site.mask
    if mask is not None and not (_is_of_each(mask, s.batch, s.positions) and is_bf16(mask)):
        raise Unsupported("the mask is not a number of bf16 a position of a sequence", mask)
    for cache, update in zip(site.caches, site.updates, strict=True):
        written = [u for u in update.users if u.target is aten.copy_.default and u.args[:2] == (cache, update)]
        if len(written) != 1 or written[0].users:
            raise Unsupported("the cache is not written in place", update)


def _is_of_each(node: fx.Node, batch: int, elements: int) -> bool:
    """Whether a tensor has as many elements, for all sequences or for each."""
    return count_of(node) == elements or (count_of(node) == batch * elements and shape_of(node)[0] == batch)


def _lengths(indices: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The token's place in each layer's cache; and what counts it there, where every layer has a count of its own."""
    lengths, counts = [], []
    for index in indices:
        length = _behind_zero(index)
        written = [u for u in length.users if u.target is aten.copy_.default and u.args[0] is length and not u.users]
        counts += [u for u in written if length.op == "placeholder" and _is_one_more(u.args[1], length)]
        lengths.append(length)
    if len(counts) == len(lengths) == len(set(lengths)):
        return lengths, counts
    return list(indices), []


def _behind_zero(index: fx.Node) -> fx.Node:
    """``length`` of ``arange(1) + length``."""
    if packet(index) is not aten.add or len(index.all_input_nodes) != 2:
        return index
    zero, length = either(index, lambda n: packet(n) is aten.arange)
    is_zero = packet(zero) is aten.arange and (zero.target, zero.args) in (
        (aten.arange.default, (1,)),
        (aten.arange.start, (0, 1)),
    )
    return peeled(length) if is_zero and index.kwargs.get("alpha", 1) == 1 else index


def _is_one_more(node: Any, length: fx.Node) -> bool:
    return packet(node) is aten.add and node.args == (length, 1) and not node.kwargs
