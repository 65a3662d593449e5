"""A decoder's layer read backwards: the residual, products, norms, rotary embedding, attention over a static cache."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported, packet, value
from tilestream.graph.rewrites.shared_keys import given_to, is_attention, mask_given
from tilestream.graph.sizes import settled

aten = torch.ops.aten

SAME = (aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.alias, aten.clone, aten.detach)
"""What leaves elements in their order."""


@dataclass
class Layer:
    weights: dict[str, fx.Node]
    caches: list[fx.Node]
    updates: list[fx.Node]
    index: fx.Node
    shared: dict[str, Any]
    """What all layers have in common."""


def llama_layer(out: fx.Node) -> tuple[fx.Node, Layer]:
    """What goes into a layer whose result is ``out``."""
    weights: dict[str, fx.Node] = {}
    middle, down = _residual(out, lambda n: packet(peeled(n)) is aten.mul)
    gated, weights["down"] = down
    gate, up = either(gated, lambda n: packet(peeled(n)) is aten.silu)
    gate = _only(peeled(gate))
    x, weights["gate"] = product_of(gate)
    other, weights["up"] = product_of(up)
    normed, weights["middle_norm"], eps = _norm(x)
    if _norm(other)[0] is not normed or normed is not peeled(middle):
        raise Unsupported("gate and up do not read the same row, that of the residual", gate)
    x, (attended, weights["output"]) = _residual(middle, lambda n: packet(peeled(n)) is operator.getitem)
    attention, given, key, values, common = _attention(attended)
    turned = [_rotary(n) for n in (given["query"], key.args[3])]
    if any(peeled(a) is not peeled(b) for a, b in zip(*(t[1:] for t in turned), strict=True)):
        raise Unsupported("queries and keys are not of one position", attention)
    shared = {"eps": eps, "cos": peeled(turned[0][1]), "sin": peeled(turned[0][2])} | common
    rows = []
    for name, node in (("query", turned[0][0]), ("key", turned[1][0]), ("value", values.args[3])):
        if name != "value" and packet(peeled(node)) is aten.mul:
            node, weights[f"{name}_norm"], shared["head_eps"] = _norm(node)
        row, weights[name] = product_of(node)
        row, weights["norm"], first_eps = _norm(row)
        rows.append((row, weights["norm"]))
        if first_eps != eps:
            raise Unsupported("norms of a layer differ", row)
    if len(set(rows)) != 1 or rows[0][0] is not peeled(x):
        raise Unsupported("queries, keys and values do not read the same row, that of the residual", attention)
    if ("query_norm" in weights) != ("key_norm" in weights):
        raise Unsupported("queries and keys do not both have norms", attention)
    return peeled(x), _layer_of(weights, key, values, shared)


def _layer_of(weights: dict[str, fx.Node], key: fx.Node, values: fx.Node, shared: dict[str, Any]) -> Layer:
    caches: list[Any] = [key.args[0], values.args[0]]
    if any(c.op != "placeholder" for c in caches):
        raise Unsupported("the cache is not an argument of the graph", key)
    return Layer(weights, caches, [key, values], peeled(key.args[2]), shared)


def _attention(attended: fx.Node) -> tuple[fx.Node, dict[str, Any], fx.Node, fx.Node, dict[str, Any]]:
    """The attention that an output projection reads, its arguments, what writes keys and values, scale and mask."""
    attention = _only(peeled(attended))
    if not is_attention(attention):
        raise Unsupported("what the output projection reads is no fused attention", attention)
    given = given_to(attention)
    if given.get("is_causal") or given.get("dropout_p"):
        raise Unsupported("attention is causal by itself, or drops", attention)
    key, values = _update(given["key"]), _update(given["value"])
    if key.args[2] is not values.args[2]:
        raise Unsupported("keys and values are not of one position", attention)
    mask = mask_given(given)
    shared = {
        "scale": given.get("scale") or shape_of(key)[3] ** -0.5,
        "mask": None if mask is None else _narrow(mask),
    }
    return attention, given, key, values, shared


def gpt2_layer(out: fx.Node) -> tuple[fx.Node, Layer]:
    """As ``llama_layer``, of GPT-2: LayerNorms, products with biases, GELU by tanh."""
    weights: dict[str, fx.Node] = {}
    middle, gated = _biased_residual(out, weights, "down")
    x, (weights["middle_norm"], weights["middle_norm_bias"]), eps = _layer_norm(_biased(_gelu(gated), weights, "gate"))
    if x is not peeled(middle):
        raise Unsupported("the feed-forward block does not read the residual", middle)
    x, attended = _biased_residual(middle, weights, "output")
    attention, given, key, values, common = _attention(attended)
    parts = [peeled(n) for n in (given["query"], key.args[3], values.args[3])]
    split = _only(parts[0])
    if packet(split) is not aten.split or [(n.args[0], n.args[1]) for n in parts] != [(split, i) for i in range(3)]:
        raise Unsupported("queries, keys and values are no three parts of one product", attention)
    row, (weights["norm"], weights["norm_bias"]), first_eps = _layer_norm(_biased(split.args[0], weights, "query"))
    if row is not peeled(x) or first_eps != eps:
        raise Unsupported("attention does not read the residual, or norms of a layer differ", attention)
    return row, _layer_of(weights, key, values, {"eps": eps, "cos": None, "sin": None} | common)


def is_layer(out: fx.Node) -> bool:
    """Whether a row is a sum with a product."""
    added = peeled(out)
    products = (aten.mm, aten.linear, aten.addmm)
    return packet(added) is aten.add and any(packet(peeled(n)) in products for n in added.all_input_nodes)


def last_norm(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...], float]:
    """Input, weights and epsilon of either kind of norm."""
    if packet(peeled(node)) is operator.getitem:
        return _layer_norm(node)
    x, weight, eps = _norm(node)
    return x, (weight,), eps


def _layer_norm(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, fx.Node], float]:
    made = _only(peeled(node)) if packet(peeled(node)) is operator.getitem else node
    if packet(made) is not aten.native_layer_norm or None in made.args[2:4] or len(made.args[1]) != 1:  # pyright: ignore
        raise Unsupported("no LayerNorm with weight and bias where one is wanted", made)
    x, _, weight, bias, eps = made.args
    if weight.op != "placeholder" or bias.op != "placeholder":  # pyright: ignore
        raise Unsupported("the weight of a norm is not an argument of the graph", made)
    return peeled(x), (weight, bias), eps  # pyright: ignore[reportReturnType]


def _biased(node: Any, weights: dict[str, fx.Node], name: str) -> fx.Node:
    """Input of a product with a weight [inputs, outputs] and a bias, which are noted."""
    made = peeled(node)
    if packet(made) is not aten.addmm or made.kwargs or any(n.op != "placeholder" for n in made.args[::2]):  # pyright: ignore
        raise Unsupported(f"{made.target} where a product with bias is wanted", made)
    weights[f"{name}_bias"], x, weights[name] = made.args  # pyright: ignore[reportArgumentType]
    return x  # pyright: ignore[reportReturnType]


def _biased_residual(out: fx.Node, weights: dict[str, fx.Node], name: str) -> tuple[fx.Node, fx.Node]:
    """Of a sum of a row and a product: the row, and the product's input."""
    if packet(peeled(out)) is not aten.add or peeled(out).kwargs:
        raise Unsupported("no residual", out)
    product, row = either(out, lambda n: packet(peeled(n)) is aten.addmm)
    return row, _biased(product, weights, name)


def _gelu(node: fx.Node) -> fx.Node:
    """Input of a GELU by tanh, as an operator or written out."""
    made = peeled(node)
    if packet(made) is aten.gelu and made.kwargs.get("approximate") == "tanh":
        return _only(made)
    half, grown = either(made, lambda n: n.args[1:] == (0.5,))
    inner = _scaled(_only(_scaled(grown, aten.add, 1.0)), aten.mul, math.sqrt(2 / math.pi))
    x, cubic = either(inner, lambda n: packet(n) is not aten.mul)
    cube = _scaled(cubic, aten.mul, 0.044715)
    is_gelu = packet(made) is aten.mul and packet(inner) is aten.add and packet(_only(grown)) is aten.tanh
    if not is_gelu or _scaled(cube, aten.pow, 3.0) is not x or _scaled(half, aten.mul, 0.5) is not x:
        raise Unsupported("no GELU by tanh", made)
    return x


def _scaled(node: fx.Node, of: Any, number: float) -> fx.Node:
    """Input of an operator of it and a number."""
    if packet(node) is not of or len(node.args) != 2 or node.args[1] != number or node.kwargs:
        raise Unsupported("no GELU by tanh", node)
    return _only(node)


def _residual(out: fx.Node, is_input: Callable[[fx.Node], bool]) -> tuple[fx.Node, tuple[fx.Node, fx.Node]]:
    """Of a sum of a row and a product whose input is of a kind: the row, and the product's input and weight."""
    added = peeled(out)
    if packet(added) is not aten.add or added.kwargs.get("alpha", 1) != 1 or len(added.all_input_nodes) != 2:
        raise Unsupported("no residual", added)
    for this, other in (added.args, added.args[::-1]):
        try:
            product = product_of(this)  # pyright: ignore[reportArgumentType]
        except Unsupported:
            continue
        if is_input(product[0]):
            return other, product  # pyright: ignore[reportReturnType]
    raise Unsupported("a residual has no product that belongs to it", added)


def product_of(node: Any) -> tuple[fx.Node, fx.Node]:
    """Input and weight [outputs, inputs] of a product without bias."""
    made = peeled(node)
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
    x, weight = either(node, lambda n: packet(_cast(n)) is aten.mul)
    if weight.op != "placeholder":
        raise Unsupported("the weight of a norm is not an argument of the graph", weight)
    wide, rstd = either(_cast(x), lambda n: packet(peeled(n)) is not aten.rsqrt)
    if packet(rstd) is not aten.rsqrt:
        raise Unsupported("no reciprocal root where a norm is wanted", x)
    sum_ = _only(rstd)
    if packet(sum_) is not aten.add or not isinstance(sum_.args[1], float):
        raise Unsupported("no epsilon where a norm is wanted", rstd)
    mean = _only(sum_)
    if packet(mean) is not aten.mean or list(mean.args[1]) not in ([-1], [len(shape_of(mean)) - 1]):  # pyright: ignore
        raise Unsupported("no mean over features where a norm is wanted", mean)
    square = _only(mean)
    is_square = (packet(square) is aten.pow and square.args[1] == 2) or (
        packet(square) is aten.mul and square.args[0] is square.args[1]
    )
    if not is_square or square.all_input_nodes[0] is not wide or dtype_of(wide) != torch.float32:
        raise Unsupported("no squares in float32 where a norm is wanted", square)
    return peeled(_cast(wide)), weight, sum_.args[1]


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
    found = peeled(node)
    while packet(found) in (aten.expand, *SAME):
        found = _only(found)
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
        node = _only(node)
    if packet(node) is not aten.expand:
        return False
    before = _only(node)
    wide = shape_of(node)
    return (
        packet(before) is aten.unsqueeze
        and [wide[1], *wide[3:]] == [heads, positions, features]
        and shape_of(before)[2] == 1
    )


def _narrow(mask: fx.Node) -> fx.Node:
    """A mask before it was repeated for heads."""
    while packet(mask) in (aten.expand, *SAME):
        mask = _only(mask)
    return mask


# -- nodes


def is_same(a: Any, b: Any, depth: int = 8) -> bool:
    """Whether two arguments are the same, or computed alike of the same: every layer makes a mask of its own."""
    if a is b or not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return a is b or (not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and a == b)
    if depth == 0 or a.op != "call_function" or (a.target, a.kwargs, len(a.args)) != (b.target, b.kwargs, len(b.args)):
        return False
    return all(is_same(x, y, depth - 1) for x, y in zip(a.args, b.args, strict=True))


def peeled(node: Any) -> fx.Node:
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
        return shape_of(node) == shape_of(node.args[0])
    if of is not aten.transpose:
        return False
    dims: Any = node.args[1:]
    first, second = sorted(d % len(shape_of(node)) for d in dims)
    return sum(n != 1 for n in shape_of(node)[first : second + 1]) <= 1


def _cast(node: Any) -> fx.Node:
    """A node behind views and conversions."""
    node = peeled(node)
    while packet(node) is aten._to_copy:
        node = peeled(node.all_input_nodes[0])
    return node


def _only(node: Any) -> fx.Node:
    """The one tensor that a node is computed of."""
    if not isinstance(node, fx.Node) or len(node.all_input_nodes) != 1:
        raise Unsupported("an operator of one tensor is wanted", node if isinstance(node, fx.Node) else None)
    return node.all_input_nodes[0]


def either(node: Any, is_first: Callable[[fx.Node], bool]) -> tuple[fx.Node, fx.Node]:
    """Both operands of a node, the one that is of a kind first."""
    made = peeled(node)
    if len(made.args) < 2 or not all(isinstance(a, fx.Node) for a in made.args[:2]):
        raise Unsupported(f"{made.target} has not two tensors", made)
    first, second = made.args[:2]
    if is_first(first):  # pyright: ignore[reportArgumentType]
        return first, second  # pyright: ignore[reportReturnType]
    return second, first  # pyright: ignore[reportReturnType]


def shape_of(node: Any) -> list[int]:
    fake = value(node)
    sizes = [] if fake is None else [settled(n) for n in fake.shape]
    if fake is None or not all(isinstance(n, int) for n in sizes):
        raise Unsupported("sizes are not known", node if isinstance(node, fx.Node) else None)
    return sizes  # pyright: ignore[reportReturnType]


def count_of(node: fx.Node) -> int:
    return int(torch.Size(shape_of(node)).numel())


def dtype_of(node: fx.Node) -> torch.dtype | None:
    fake = value(node)
    return None if fake is None else fake.dtype


def is_bf16(node: fx.Node) -> bool:
    return dtype_of(node) == torch.bfloat16


def is_plain(node: fx.Node) -> bool:
    fake = value(node)
    return fake is not None and fake.is_contiguous() and fake.dtype == torch.bfloat16
