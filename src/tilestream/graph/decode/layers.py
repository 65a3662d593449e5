"""A decoder's layer read backwards: residuals, the feed-forward block, attention over a static cache, norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from tilestream.graph.decode.activations import activation_of
from tilestream.graph.decode.attention import attention_of, rotary_of
from tilestream.graph.decode.norms import Norm, norm_of
from tilestream.graph.decode.products import Part, Product, part_of, scaled_product_of
from tilestream.graph.decode.reading import cast, either, only, peeled, shape_of
from tilestream.graph.nodes import Unsupported, aten, packet
from tilestream.graph.rewrites.shared_keys import is_attention
from tilestream.kernels.step.form import Form


@dataclass
class Layer:
    form: Form
    weights: dict[str, fx.Node]
    caches: list[fx.Node]
    updates: list[fx.Node]
    index: fx.Node
    shared: dict[str, Any]
    """What all layers have in common."""


@dataclass(frozen=True)
class Residuals:
    """Of a layer: its input, what attention and the block add; ``middle``: the sum of the first two, if any."""

    row: fx.Node
    output: Product
    down: Product
    middle: fx.Node | None


def is_layer(out: fx.Node) -> bool:
    """Whether a row is a sum with a product, or with a sum of products."""
    added = peeled(out)
    if packet(added) is not aten.add:
        return False
    inputs = [peeled(n) for n in added.all_input_nodes]
    return any(_product(n) or (packet(n) is aten.add and all(map(_product, n.all_input_nodes))) for n in inputs)


def layer_of(out: fx.Node) -> tuple[fx.Node, Layer]:
    """What goes into a layer whose result is ``out``.

    Raises:
        Unsupported: it is no layer that a step has, and what differs.
    """
    weights: dict[str, fx.Node] = {}
    found = _residuals(out)
    row = peeled(found.row)
    gate, up, activation = _feed_forward(found.down)
    middle_norm = norm_of(gate.product.x).noted(weights, "middle_norm")
    if up is not None and norm_of(up.product.x) != middle_norm:
        raise Unsupported("gate and up do not read the same row", found.down.x)
    parallel = middle_norm.x is row
    if not parallel and (found.middle is None or middle_norm.x is not peeled(found.middle)):
        raise Unsupported("the feed-forward block reads neither the layer's input nor the residual", found.down.x)
    attention = attention_of(found.output.x)
    query, key = rotary_of(attention.query), rotary_of(attention.key)
    shared, other = ({"cos": _peeled(n.cos), "sin": _peeled(n.sin)} for n in (query, key))
    if (query.features, shared) != (key.features, other):
        raise Unsupported("queries and keys are not of one position", attention.node)
    shared: dict[str, Any] = {**shared, "eps": middle_norm.eps}
    heads = [_head_norm(n.x, weights, name) for n, name in ((query, "query_norm"), (key, "key_norm"))]
    parts = [part_of(n) for n in (*(node for node, _ in heads), attention.values)]
    if (heads[0][1] is None) != (heads[1][1] is None):
        raise Unsupported("queries and keys do not both have norms", attention.node)
    norms = [norm_of(part.product.x) for part in parts]
    norms[0].noted(weights, "norm")
    if any(norm != norms[0] for norm in norms) or norms[0].x is not row:
        raise Unsupported("queries, keys and values do not read the same row, that of the residual", attention.node)
    if (norms[0].kind, norms[0].eps) != (middle_norm.kind, middle_norm.eps):
        raise Unsupported("norms of a layer differ", attention.node)
    if (head := heads[0][1]) is not None:
        shared["head_eps"] = head.eps
        if head.kind == "layer" or (norms[0].kind != "layer" and head.kind != norms[0].kind):
            raise Unsupported("norms of heads are of another kind", attention.node)
    products = [*(part.product for part in parts), found.output, gate.product, found.down]
    products += [up.product] if up is not None else []
    if len({p.turned for p in products}) > 1 or found.output.times != found.down.times:
        raise Unsupported("products of a layer are not alike", attention.node)
    qkv = _together(parts, shape_of(attention.query)[1], shape_of(attention.key))
    named = dict(zip(("query",) if qkv else ("query", "key", "value"), (part.product for part in parts), strict=False))
    named |= {"output": found.output, "gate": gate.product, "down": found.down}
    gate_up = "parts" if up is not None and up.product == gate.product else ""
    if up is not None and not gate_up:
        named["up"] = up.product
    for name, product in named.items():
        product.noted(weights, name)
    form = Form(
        norm=norms[0].kind,
        head_norms=head is not None,
        activation=activation,
        gated=up is not None,
        biased=tuple(name for name in ("query", "output", "gate", "down") if f"{name}_bias" in weights),
        turned=found.down.turned,
        qkv=qkv,
        gate_up=gate_up,
        rotary=query.features / shape_of(attention.key)[-1],
        parallel=parallel,
    )
    if set(form.weights) != set(weights):
        raise Unsupported(f"weights of a layer are {', '.join(sorted(weights))}", found.down.x)
    shared |= {"times": found.down.times, "scale": attention.scale, "mask": attention.mask}
    return row, Layer(form, weights, attention.caches, attention.updates, attention.index, shared)


def _peeled(node: fx.Node | None) -> fx.Node | None:
    return None if node is None else peeled(node)


def _product(node: fx.Node) -> Product | None:
    try:
        return scaled_product_of(node)
    except Unsupported:
        return None


def _reads_attention(product: Product) -> bool:
    made = peeled(product.x)
    return len(made.all_input_nodes) == 1 and is_attention(only(made))


def _residuals(out: fx.Node) -> Residuals:
    """``(row + attention) + block``, or ``row + (attention + block)``."""
    added = peeled(out)
    for first, second in _orders(added):
        down = _product(first)
        if down is not None and not _reads_attention(down):
            for attended, row in _orders(peeled(second)):
                if (output := _product(attended)) is not None and _reads_attention(output):
                    return Residuals(row, output, down, second)
        for attended, block in _orders(peeled(first)):
            output, down = _product(attended), _product(block)
            if output is not None and down is not None and _reads_attention(output):
                return Residuals(second, output, down, None)
    raise Unsupported("a residual has no products that belong to it", added)


def _orders(added: fx.Node) -> list[tuple[Any, Any]]:
    """Both orders of what is added; none of other operators."""
    if packet(added) is not aten.add or added.kwargs.get("alpha", 1) != 1 or len(added.all_input_nodes) != 2:
        return []
    first, second = added.args[:2]
    return [(first, second), (second, first)]


def _feed_forward(down: Product) -> tuple[Part, Part | None, str]:
    """The first products of a block, which ``down`` is the last one of, and its activation."""

    def is_activation(node: fx.Node) -> bool:
        try:
            return bool(activation_of(node))
        except Unsupported:
            return False

    made = peeled(down.x)
    if is_activation(made):
        kind, gate = activation_of(made)
        if not part_of(gate).is_all:
            raise Unsupported("the block reads a part of its product", made)
        return part_of(gate), None, kind
    activated, up = either(made, is_activation)
    kind, gate = activation_of(activated)
    first, second = part_of(gate), part_of(up)
    half, rows = first.product.rows // 2, first.product.rows
    if first.product == second.product:
        are_halves = [(p.first, p.count, p.every) for p in (first, second)] == [(0, half, rows), (half, half, rows)]
        if not are_halves:
            raise Unsupported("gate and up are not the halves of one product", made)
    elif not (first.is_all and second.is_all):
        raise Unsupported("gate and up are parts of two products", made)
    return first, second, kind


def _head_norm(node: fx.Node, weights: dict[str, fx.Node], name: str) -> tuple[fx.Node, Norm | None]:
    """What goes into the norm of heads, if there is one, and the norm."""
    if packet(cast(node)) is not aten.mul:
        return node, None
    norm = norm_of(node).noted(weights, name)
    return norm.x, norm


def _together(parts: list[Part], heads: int, keys: list[int]) -> str:
    """How queries, keys and values lie in weights (``form.TOGETHER``). ``keys``: the shape of the token's keys."""
    key_heads, features = keys[1], keys[-1]
    product, every = parts[0].product, parts[0].every
    sizes = [heads * features, key_heads * features, key_heads * features]
    if all(part.is_all for part in parts) and [part.count for part in parts] == sizes:
        return ""
    by_heads = every != product.rows
    if by_heads:
        sizes = [size // key_heads for size in sizes]
    want = [(product, sum(sizes[:n]), size, sum(sizes)) for n, size in enumerate(sizes)]
    if [(p.product, p.first, p.count, p.every) for p in parts] != want:
        raise Unsupported("queries, keys and values are no three parts of one product", product.x)
    return "heads" if by_heads else "parts"
