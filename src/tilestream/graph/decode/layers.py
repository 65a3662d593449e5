"""A decoder's layer read backwards: residuals, the feed-forward block, attention over a static cache, norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from tilestream.graph.decode.norms import Norm, norm_of
from tilestream.graph.decode.products import Part, Product, part_of, scaled_product_of
from tilestream.graph.decode.reading import SAME, cast, either, only, peeled, shape_of
from tilestream.graph.nodes import Unsupported, aten, packet
from tilestream.graph.own import activation_of as kind_of
from tilestream.graph.rewrites.shared_keys import given_to, is_attention, mask_given
from tilestream.graph.written_gelu import written_gelu
from tilestream.kernels.step.form import ACTIVATIONS, Form


@dataclass(frozen=True)
class TokenAttention:
    """Of one token: ``key`` and ``values`` are its own, ``updates`` what writes them at ``index`` into ``caches``."""

    node: fx.Node
    query: fx.Node
    key: fx.Node
    values: fx.Node
    caches: list[fx.Node]
    updates: list[fx.Node]
    index: fx.Node
    scale: float
    mask: fx.Node | None


@dataclass(frozen=True)
class Rotary:
    """Of ``x``: its first ``features`` of a head are rotated, 0 where none are."""

    x: fx.Node
    features: int = 0
    cos: fx.Node | None = None
    sin: fx.Node | None = None


def attention_of(attended: fx.Node) -> TokenAttention:
    """The attention that an output projection reads.

    Raises:
        Unsupported: it is none over a static cache, and what differs.
    """
    attention = only(peeled(attended))
    if not is_attention(attention):
        raise Unsupported("what the output projection reads is no fused attention", attention)
    given = given_to(attention)
    if given.get("is_causal") or given.get("dropout_p"):
        raise Unsupported("attention is causal by itself, or drops", attention)
    key, values = _update(given["key"]), _update(given["value"])
    if key.args[2] is not values.args[2]:
        raise Unsupported("keys and values are not of one position", attention)
    mask = mask_given(given)
    caches: Any = [key.args[0], values.args[0]]
    if any(c.op != "placeholder" for c in caches):
        raise Unsupported("the cache is not an argument of the graph", key)
    scale, narrow = given.get("scale") or shape_of(key)[3] ** -0.5, None if mask is None else _single(mask)
    own: list[Any] = [given["query"], key.args[3], values.args[3]]
    return TokenAttention(attention, own[0], own[1], own[2], caches, [key, values], peeled(key.args[2]), scale, narrow)


def rotary_of(node: Any) -> Rotary:
    """What queries or keys are before their rotary embedding, of all features or of the first ones, if there is one."""
    made = peeled(node)
    if packet(made) is aten.add:
        x, cos, sin = _rotary(made)
        return Rotary(x, shape_of(made)[-1], cos, sin)
    parts: Any = made.args[0] if packet(made) is aten.cat else ()
    if len(parts) != 2 or packet(peeled(parts[0])) is not aten.add:
        return Rotary(made)
    (x, cos, sin), width = _rotary(parts[0]), shape_of(made)[-1]
    features, rest = shape_of(parts[0])[-1], parts[1]
    source = peeled(x.args[0] if _is_slice(x, 0, features) else x)
    if not _is_slice(rest, features, width) or peeled(rest.args[0]) is not source:
        raise Unsupported("no rotary embedding of a head's first features", made)
    return Rotary(source, features, cos, sin)


def _rotary(node: Any) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Input, cosines and sines of ``x * cos + rotate_half(x) * sin``."""
    added = peeled(node)
    if packet(added) is not aten.add or len(added.all_input_nodes) != 2:
        raise Unsupported("no rotary embedding", added)
    halves, plain = either(
        added, lambda n: packet(n) is aten.mul and any(packet(i) is aten.cat for i in n.all_input_nodes)
    )
    joined, sin = either(halves, lambda n: packet(n) is aten.cat)
    parts: Any = joined.args[0]
    if packet(joined) is not aten.cat or len(parts) != 2 or packet(parts[0]) is not aten.neg:
        raise Unsupported("no rotation of halves", added)
    high, low = parts[0].args[0], parts[1]
    half = shape_of(joined)[-1] // 2
    if not (_is_slice(low, 0, half) and _is_slice(high, half, 2 * half)) or low.args[0] is not high.args[0]:
        raise Unsupported("no rotation of halves", joined)
    x, cos = either(plain, lambda n: n is low.args[0])
    if x is not low.args[0] or packet(plain) is not aten.mul:
        raise Unsupported("no rotary embedding", added)
    return x, cos, sin


def _is_slice(node: fx.Node, start: int, end: int) -> bool:
    if packet(node) is not aten.slice:
        return False
    width = shape_of(node.args[0])[-1]
    dim, first, last, *step = [*node.args[1:], *(0, 0, width)[len(node.args) - 1 :]]
    return (
        dim in (-1, len(shape_of(node)) - 1) and (first or 0) == start and min(last, width) == end and step in ([], [1])
    )


def _update(node: fx.Node) -> fx.Node:
    """The write into a cache, of keys or values that attention reads, each head perhaps several times."""
    found = _single(peeled(node))
    if packet(found) is not aten.index_copy or found.args[1] not in (2, -2):
        raise Unsupported("attention does not read a static cache that the token was copied into", found)
    seen, kept = shape_of(node), shape_of(found)
    if len(kept) != 4 or seen[1] % kept[1] or [seen[0], *seen[2:]] != [kept[0], *kept[2:]]:
        raise Unsupported("attention reads the cache in another shape", node)
    if seen[1] != kept[1] and not _repeats(node, found):
        raise Unsupported("heads of keys are not repeated one by one", node)
    return found


def _repeats(node: fx.Node, single: fx.Node) -> bool:
    """Whether each head of ``single`` comes several times, one behind the other."""
    _, heads, positions, features = shape_of(single)
    while packet(node) in SAME and packet(node) is not aten.unsqueeze:
        node = only(node)
    if packet(node) is not aten.expand:
        return False
    before = only(node)
    wide = shape_of(node)
    return (
        packet(before) is aten.unsqueeze
        and [wide[1], *wide[3:]] == [heads, positions, features]
        and shape_of(before)[2] == 1
    )


def _single(node: fx.Node) -> fx.Node:
    """A mask, keys or values before they were repeated for heads."""
    while packet(node) in (aten.expand, *SAME):
        node = only(node)
    return node


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


def activation_of(node: Any) -> tuple[str, fx.Node]:
    """Which one of ``form.ACTIVATIONS`` a node is, and its input.

    Raises:
        Unsupported: it is none.
    """
    made = peeled(node)
    if (kind := kind_of(made)) in ACTIVATIONS:
        return kind, only(made)
    is_square = packet(made) is aten.pow and made.args[1] == 2
    if is_square or (packet(made) is aten.mul and made.args[0] is made.args[1]):
        root = peeled(only(made))
        if packet(root) is aten.relu:
            return "relu_squared", only(root)
    if (written := written_gelu(made)) is None:
        raise Unsupported("no activation that a step has", made)
    return "gelu_tanh", written[0]
