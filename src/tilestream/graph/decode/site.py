"""Finds the decode step of a whole model: decoder layers over a static cache, one token of one sequence, from the
embedding to the logits.

What is recognised is the computation, read from the logits backwards through views: RMSNorm, products without bias,
rotary embedding, perhaps norms of heads, ``index_copy`` into the cache, attention, residuals, a gated feed-forward
block of SiLU. Whatever differs is no step, and its reason says where.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported, packet, value
from tilestream.graph.rewrites.shared_keys import given_to, is_attention, mask_given
from tilestream.graph.sizes import settled
from tilestream.kernels.step.shape import Shape, names_of

aten = torch.ops.aten

SAME = (aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.alias, aten.clone, aten.detach)
"""What leaves elements in their order."""


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
    cos: fx.Node
    sin: fx.Node
    mask: fx.Node | None
    weights: list[fx.Node]
    caches: list[fx.Node]
    updates: list[fx.Node]
    lengths: list[fx.Node]
    counts: list[fx.Node]
    scale: float
    eps: float
    head_eps: float
    shape: Shape


@dataclass
class _Layer:
    weights: dict[str, fx.Node]
    caches: list[fx.Node]
    updates: list[fx.Node]
    index: fx.Node
    shared: dict[str, Any]
    """What all layers have in common."""


def site_of(graph: fx.Graph) -> Site:
    """The step that a functional ATen graph of inference is.

    Raises:
        Unsupported: it is none, and where it differs.
    """
    logits = _logits(graph)
    x, head = _product(logits)
    x, norm, eps = _norm(x)
    layers: list[_Layer] = []
    while packet(_peeled(x)) is aten.add:
        x, layer = _layer(x)
        layers.insert(0, layer)
    if not layers:
        raise Unsupported("no decoder layer in front of the last norm", logits)
    common: dict[str, Any] = {"eps": eps} | layers[0].shared
    for layer in layers:
        if not all(_is_same(common[name], v) for name, v in layer.shared.items()):
            raise Unsupported("layers differ in more than their weights", logits)
        if layer.weights.keys() != layers[0].weights.keys():
            raise Unsupported("some layers have norms of heads", logits)
    names = names_of("query_norm" in layers[0].weights)
    weights = [*(layer.weights[name] for layer in layers for name in names), norm, head]
    caches = [c for layer in layers for c in layer.caches]
    updates = [u for layer in layers for u in layer.updates]
    lengths, counts = _lengths([layer.index for layer in layers])
    heads_eps = common.pop("head_eps", 0.0)
    site = Site(
        logits=logits, row=x, weights=weights, caches=caches, updates=updates, lengths=lengths, counts=counts,
        head_eps=heads_eps, shape=_sizes_of(x, head, layers, common), **common,
    )  # fmt: skip
    _check(site)
    return site


def _logits(graph: fx.Graph) -> fx.Node:
    products = [n for n in graph.nodes if packet(n) in (aten.mm, aten.linear)]
    if not products:
        raise Unsupported("no product")
    return products[-1]


def _sizes_of(row: fx.Node, head: fx.Node, layers: Sequence[_Layer], common: dict[str, Any]) -> Shape:
    first = layers[0]
    _, key_heads, positions, features = _shape(first.caches[0])
    return Shape(
        layers=len(layers),
        width=_count(row),
        hidden=_shape(first.weights["gate"])[0],
        heads=_shape(first.weights["query"])[0] // features,
        key_heads=key_heads,
        features=features,
        positions=positions,
        vocabulary=_shape(head)[0],
        head_norms="query_norm" in first.weights,
        masked=common["mask"] is not None,
    )


def _check(site: Site) -> None:
    """Shapes and dtypes of all that the operator takes."""
    s = site.shape
    if s.refusal:
        raise Unsupported(s.refusal, site.logits)
    query, keys = s.heads * s.features, s.key_heads * s.features
    shapes: dict[str, list[int]] = {
        "query": [query, s.width], "key": [keys, s.width], "value": [keys, s.width], "output": [s.width, query],
        "gate": [s.hidden, s.width], "up": [s.hidden, s.width], "down": [s.width, s.hidden],
        "query_norm": [s.features], "key_norm": [s.features], "norm": [s.width], "middle_norm": [s.width],
    }  # fmt: skip
    wanted = [shapes[name] for name in names_of(s.head_norms)] * s.layers + [[s.width], [s.vocabulary, s.width]]
    for node, shape in zip(site.weights, wanted, strict=True):
        if _shape(node) != shape or not _is_plain(node):
            raise Unsupported(f"a weight is {_shape(node)}, and a step needs {shape}, contiguous, in bf16", node)
    for node in site.caches:
        if _shape(node) != [1, s.key_heads, s.positions, s.features] or not _is_plain(node):
            raise Unsupported("caches are not contiguous tensors of bf16, alike in all layers", node)
    for node in (site.cos, site.sin):
        if _count(node) != s.features or _dtype(node) != torch.bfloat16:
            raise Unsupported("the rotary embedding is not of one position, in bf16", node)
    if _count(site.row) != s.width or _dtype(site.row) != torch.bfloat16:
        raise Unsupported("the step is not of one token of one sequence, in bf16", site.row)
    for node in site.lengths:
        if _count(node) != 1 or _dtype(node) != torch.int64:
            raise Unsupported("the position in the cache is not one integer of 64 bits", node)
    if site.mask is not None and (_count(site.mask) != s.positions or _dtype(site.mask) != torch.bfloat16):
        raise Unsupported("the mask is not a number of bf16 a position", site.mask)
    for cache, update in zip(site.caches, site.updates, strict=True):
        written = [u for u in update.users if u.target is aten.copy_.default and u.args[:2] == (cache, update)]
        if len(written) != 1 or written[0].users:
            raise Unsupported("the cache is not written in place", update)


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
    zero, length = _either(index, lambda n: packet(n) is aten.arange)
    is_zero = packet(zero) is aten.arange and (zero.target, zero.args) in (
        (aten.arange.default, (1,)),
        (aten.arange.start, (0, 1)),
    )
    return _peeled(length) if is_zero and index.kwargs.get("alpha", 1) == 1 else index


def _is_one_more(node: Any, length: fx.Node) -> bool:
    return packet(node) is aten.add and node.args == (length, 1) and not node.kwargs


# -- a layer, backwards


def _layer(out: fx.Node) -> tuple[fx.Node, _Layer]:
    """What goes into a layer whose result is ``out``."""
    weights: dict[str, fx.Node] = {}
    middle, down = _residual(out, lambda n: packet(_peeled(n)) is aten.mul)
    gated, weights["down"] = down
    gate, up = _either(gated, lambda n: packet(_peeled(n)) is aten.silu)
    gate = _only(_peeled(gate))
    x, weights["gate"] = _product(gate)
    other, weights["up"] = _product(up)
    normed, weights["middle_norm"], eps = _norm(x)
    if _norm(other)[0] is not normed or normed is not _peeled(middle):
        raise Unsupported("gate and up do not read the same row, that of the residual", gate)
    x, (attended, weights["output"]) = _residual(middle, lambda n: packet(_peeled(n)) is operator.getitem)
    attention = _only(_peeled(attended))
    if not is_attention(attention):
        raise Unsupported("what the output projection reads is no fused attention", attention)
    given = given_to(attention)
    if given.get("is_causal") or given.get("dropout_p"):
        raise Unsupported("attention is causal by itself, or drops", attention)
    key, values = _update(given["key"]), _update(given["value"])
    turned = [_rotary(n) for n in (given["query"], key.args[3])]
    shared: dict[str, Any] = {"eps": eps}
    if key.args[2] is not values.args[2] or any(
        _peeled(a) is not _peeled(b) for a, b in zip(*(t[1:] for t in turned), strict=True)
    ):
        raise Unsupported("queries, keys and values are not of one position", attention)
    shared["cos"], shared["sin"] = _peeled(turned[0][1]), _peeled(turned[0][2])
    features = _shape(key)[3]
    shared["scale"] = given.get("scale") or features**-0.5
    mask = mask_given(given)
    shared["mask"] = None if mask is None else _narrow(mask)
    rows = []
    for name, node in (("query", turned[0][0]), ("key", turned[1][0]), ("value", values.args[3])):
        if name != "value" and packet(_peeled(node)) is aten.mul:
            node, weights[f"{name}_norm"], shared["head_eps"] = _norm(node)
        row, weights[name] = _product(node)
        row, weights["norm"], first_eps = _norm(row)
        rows.append((row, weights["norm"]))
        if first_eps != eps:
            raise Unsupported("norms of a layer differ", row)
    if len(set(rows)) != 1 or rows[0][0] is not _peeled(x):
        raise Unsupported("queries, keys and values do not read the same row, that of the residual", attention)
    if ("query_norm" in weights) != ("key_norm" in weights):
        raise Unsupported("queries and keys do not both have norms", attention)
    caches: list[Any] = [key.args[0], values.args[0]]
    if any(c.op != "placeholder" for c in caches):
        raise Unsupported("the cache is not an argument of the graph", key)
    return _peeled(x), _Layer(weights, caches, [key, values], _peeled(key.args[2]), shared)


def _residual(out: fx.Node, is_input: Callable[[fx.Node], bool]) -> tuple[fx.Node, tuple[fx.Node, fx.Node]]:
    """Of a sum of a row and a product whose input is of a kind: the row, and the product's input and weight."""
    added = _peeled(out)
    if packet(added) is not aten.add or added.kwargs.get("alpha", 1) != 1 or len(added.all_input_nodes) != 2:
        raise Unsupported("no residual", added)
    for this, other in (added.args, added.args[::-1]):
        try:
            product = _product(this)  # pyright: ignore[reportArgumentType]
        except Unsupported:
            continue
        if is_input(product[0]):
            return other, product  # pyright: ignore[reportReturnType]
    raise Unsupported("a residual has no product that belongs to it", added)


def _product(node: Any) -> tuple[fx.Node, fx.Node]:
    """Input and weight [outputs, inputs] of a product without bias."""
    made = _peeled(node)
    if packet(made) is aten.linear and len(made.args) == 2:
        x, weight = made.args
    elif packet(made) is aten.mm:
        x, weight = made.args
        if packet(weight) in (aten.t, aten.permute, aten.transpose):  # pyright: ignore[reportArgumentType]
            weight = _only(weight)
        else:
            raise Unsupported("the weight of a product does not lie as [outputs, inputs]", made)
    else:
        raise Unsupported(f"{made.target} where a product without bias is wanted", made)
    if weight.op != "placeholder":  # pyright: ignore
        raise Unsupported("a weight is not an argument of the graph", made)
    return x, weight  # pyright: ignore[reportReturnType]


def _norm(node: Any) -> tuple[fx.Node, fx.Node, float]:
    """Input, weight and epsilon of an RMSNorm: ``w * (x * rsqrt(mean(x ** 2) + eps))``, x in float32."""
    x, weight = _either(node, lambda n: packet(_cast(n)) is aten.mul)
    if weight.op != "placeholder":
        raise Unsupported("the weight of a norm is not an argument of the graph", weight)
    wide, rstd = _either(_cast(x), lambda n: packet(_peeled(n)) is not aten.rsqrt)
    if packet(rstd) is not aten.rsqrt:
        raise Unsupported("no reciprocal root where a norm is wanted", x)
    sum_ = _only(rstd)
    if packet(sum_) is not aten.add or not isinstance(sum_.args[1], float):
        raise Unsupported("no epsilon where a norm is wanted", rstd)
    mean = _only(sum_)
    if packet(mean) is not aten.mean or list(mean.args[1]) not in ([-1], [len(_shape(mean)) - 1]):  # pyright: ignore
        raise Unsupported("no mean over features where a norm is wanted", mean)
    square = _only(mean)
    is_square = (packet(square) is aten.pow and square.args[1] == 2) or (
        packet(square) is aten.mul and square.args[0] is square.args[1]
    )
    if not is_square or square.all_input_nodes[0] is not wide or _dtype(wide) != torch.float32:
        raise Unsupported("no squares in float32 where a norm is wanted", square)
    return _peeled(_cast(wide)), weight, sum_.args[1]


def _rotary(node: Any) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Input, cosines and sines of ``x * cos + rotate_half(x) * sin``."""
    added = _peeled(node)
    if packet(added) is not aten.add or len(added.all_input_nodes) != 2:
        raise Unsupported("no rotary embedding", added)
    halves, plain = _either(
        added, lambda n: packet(n) is aten.mul and any(packet(i) is aten.cat for i in n.all_input_nodes)
    )
    joined, sin = _either(halves, lambda n: packet(n) is aten.cat)
    parts: Any = joined.args[0]
    if packet(joined) is not aten.cat or len(parts) != 2 or packet(parts[0]) is not aten.neg:
        raise Unsupported("no rotation of halves", added)
    high, low = parts[0].args[0], parts[1]
    half = _shape(joined)[-1] // 2
    if not (_is_slice(low, 0, half) and _is_slice(high, half, 2 * half)) or low.args[0] is not high.args[0]:
        raise Unsupported("no rotation of halves", joined)
    x, cos = _either(plain, lambda n: n is low.args[0])
    if x is not low.args[0] or packet(plain) is not aten.mul:
        raise Unsupported("no rotary embedding", added)
    return x, cos, sin


def _is_slice(node: fx.Node, start: int, end: int) -> bool:
    if packet(node) is not aten.slice:
        return False
    width = _shape(node.args[0])[-1]
    dim, first, last, *step = [*node.args[1:], *(0, 0, width)[len(node.args) - 1 :]]
    return (
        dim in (-1, len(_shape(node)) - 1) and (first or 0) == start and min(last, width) == end and step in ([], [1])
    )


def _update(node: fx.Node) -> fx.Node:
    """The write into a cache, of keys or values that attention reads, each head perhaps several times."""
    found = _peeled(node)
    while packet(found) in (aten.expand, *SAME):
        found = _only(found)
    if packet(found) is not aten.index_copy or found.args[1] not in (2, -2):
        raise Unsupported("attention does not read a static cache that the token was copied into", found)
    seen, kept = _shape(node), _shape(found)
    if len(kept) != 4 or seen[1] % kept[1] or [seen[0], *seen[2:]] != [kept[0], *kept[2:]]:
        raise Unsupported("attention reads the cache in another shape", node)
    if seen[1] != kept[1] and not _repeats(node, found):
        raise Unsupported("heads of keys are not repeated one by one", node)
    return found


def _repeats(node: fx.Node, single: fx.Node) -> bool:
    """Whether each head of ``single`` comes several times, one behind the other."""
    _, heads, positions, features = _shape(single)
    while packet(node) in SAME and packet(node) is not aten.unsqueeze:
        node = _only(node)
    if packet(node) is not aten.expand:
        return False
    before = _only(node)
    wide = _shape(node)
    return (
        packet(before) is aten.unsqueeze
        and [wide[1], *wide[3:]] == [heads, positions, features]
        and _shape(before)[2] == 1
    )


def _narrow(mask: fx.Node) -> fx.Node:
    """A mask before it was repeated for heads."""
    while packet(mask) in (aten.expand, *SAME):
        mask = _only(mask)
    return mask


# -- nodes


def _is_same(a: Any, b: Any, depth: int = 8) -> bool:
    """Whether two arguments are the same, or computed alike of the same: every layer makes a mask of its own."""
    if a is b or not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return a is b or (not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and a == b)
    if depth == 0 or a.op != "call_function" or (a.target, a.kwargs, len(a.args)) != (b.target, b.kwargs, len(b.args)):
        return False
    return all(_is_same(x, y, depth - 1) for x, y in zip(a.args, b.args, strict=True))


def _peeled(node: Any) -> fx.Node:
    """A node behind views that leave the elements of one token in their order."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        of = packet(node)
        if of not in SAME and not _is_no_move(node):
            break
        node = node.all_input_nodes[0]
    if not isinstance(node, fx.Node):
        raise Unsupported("a number where a tensor is wanted")
    return node


def _is_no_move(node: fx.Node) -> bool:
    """Whether dimensions are exchanged of which one at most has several elements, or a slice takes all."""
    of = packet(node)
    if of is aten.slice:
        return _shape(node) == _shape(node.args[0])
    if of is not aten.transpose:
        return False
    dims: Any = node.args[1:]
    first, second = sorted(d % len(_shape(node)) for d in dims)
    return sum(n != 1 for n in _shape(node)[first : second + 1]) <= 1


def _cast(node: Any) -> fx.Node:
    """A node behind views and conversions."""
    node = _peeled(node)
    while packet(node) is aten._to_copy:
        node = _peeled(node.all_input_nodes[0])
    return node


def _only(node: Any) -> fx.Node:
    """The one tensor that a node is computed of."""
    if not isinstance(node, fx.Node) or len(node.all_input_nodes) != 1:
        raise Unsupported("an operator of one tensor is wanted", node if isinstance(node, fx.Node) else None)
    return node.all_input_nodes[0]


def _either(node: Any, is_first: Callable[[fx.Node], bool]) -> tuple[fx.Node, fx.Node]:
    """Both operands of a node, the one that is of a kind first."""
    made = _peeled(node)
    if len(made.args) < 2 or not all(isinstance(a, fx.Node) for a in made.args[:2]):
        raise Unsupported(f"{made.target} has not two tensors", made)
    first, second = made.args[:2]
    if is_first(first):  # pyright: ignore[reportArgumentType]
        return first, second  # pyright: ignore[reportReturnType]
    return second, first  # pyright: ignore[reportReturnType]


def _shape(node: Any) -> list[int]:
    fake = value(node)
    sizes = [] if fake is None else [settled(n) for n in fake.shape]
    if fake is None or not all(isinstance(n, int) for n in sizes):
        raise Unsupported("sizes are not known", node if isinstance(node, fx.Node) else None)
    return sizes  # pyright: ignore[reportReturnType]


def _count(node: fx.Node) -> int:
    return int(torch.Size(_shape(node)).numel())


def _dtype(node: fx.Node) -> torch.dtype | None:
    fake = value(node)
    return None if fake is None else fake.dtype


def _is_plain(node: fx.Node) -> bool:
    fake = value(node)
    return fake is not None and fake.is_contiguous() and fake.dtype == torch.bfloat16
