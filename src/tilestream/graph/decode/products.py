"""Products of a row and a weight, and parts of their results."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tilestream.graph.decode.reading import Weighted, only, peeled, shape_of
from tilestream.graph.nodes import Unsupported, aten, packet


@dataclass(frozen=True)
class Product(Weighted):
    """``times * (x @ weight.T + bias)``. ``turned``: the weight is [inputs, outputs]."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None = None
    turned: bool = False
    times: float = 1.0

    @property
    def rows(self) -> int:
        """Of the weight as [outputs, inputs]."""
        return shape_of(self.weight)[1 if self.turned else 0]


@dataclass(frozen=True)
class Part:
    """Some of a product's results: ``count`` from ``first`` on of each ``every``, which are all, or a head's."""

    product: Product
    first: int
    count: int
    every: int

    @property
    def is_all(self) -> bool:
        return self.first == 0 and self.count == self.every == self.product.rows


def product_of(node: Any) -> Product:
    """The product that a node is.

    Raises:
        Unsupported: it is none, or its weight is not an argument of the graph.
    """
    made = peeled(node)
    if packet(made) is aten.linear:
        x, weight, *more = made.args
        bias, turned = (more or [None])[0], False
    elif packet(made) in (aten.mm, aten.addmm) and not made.kwargs:
        *more, x, weight = made.args
        bias = more[0] if more else None
        turned = packet(weight) not in (aten.t, aten.permute, aten.transpose)  # pyright: ignore[reportArgumentType]
        weight = weight if turned else only(weight)
    else:
        raise Unsupported(f"{made.target} where a product is wanted", made)
    if any(n is not None and n.op != "placeholder" for n in (weight, bias)):  # pyright: ignore
        raise Unsupported("a weight is not an argument of the graph", made)
    return Product(x, weight, bias, turned)  # pyright: ignore[reportArgumentType]


def scaled_product_of(node: Any) -> Product:
    """A product, perhaps multiplied by a number."""
    made = peeled(node)
    if packet(made) is aten.mul and len(made.args) == 2 and isinstance(made.args[1], float):
        found = product_of(made.args[0])
        return replace(found, times=made.args[1])
    return product_of(made)


def part_of(node: Any) -> Part:
    """What a node has of a product's results: all, a slice, or a part of a split."""
    made = peeled(node)
    if packet(made) is operator.getitem and packet(made.args[0]) in (aten.split, aten.split_with_sizes):  # pyright: ignore
        split: Any = made.args[0]
        source, sizes = split.args[0], split.args[1]
        before = sizes[: made.args[1]] if isinstance(sizes, list) else [sizes] * made.args[1]  # pyright: ignore
        dim, first = (split.args[2:] or (0,))[0], sum(before)
    elif packet(made) is aten.slice and (made.args[4:] or (1,)) == (1,):
        source, dim, first = made.args[0], made.args[1], made.args[2] or 0
    else:
        product = product_of(made)
        return Part(product, 0, product.rows, product.rows)
    every = shape_of(source)
    if dim not in (-1, len(every) - 1):
        raise Unsupported("products are not parted by their results", made)
    return Part(product_of(source), int(first), shape_of(made)[-1], every[-1])  # pyright: ignore[reportArgumentType]
