"""Where a graph multiplies the vectors of each sample pair by pair, and what it picks of the products.

DLRM's interaction (Naumov et al. 2019, section 2.1.3): rows of tables and the bottom MLP's result are joined to
``Z [batch, vectors, features]``, ``bmm(Z, Z.T)`` is picked from by two index tensors, and what was picked may be joined
to one of the vectors. In a joint graph the gradient of all vectors is ``(G + G.T) Z``, with G what was picked put back.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from tilestream.graph.nodes import argument, arguments, aten, packet, permutation, readers, value
from tilestream.graph.sizes import same_shape, same_size

MOST_VECTORS, MOST_FEATURES, MOST_PAIRS = 64, 256, 4096
PIECE = 8
"""Features come in multiples of so many elements, 16 bytes."""

SAME = {
    *(aten.view, aten._unsafe_view, aten.reshape, aten.expand, aten.clone, aten.detach, aten.alias),
    *(aten.slice, aten.slice_backward),
}
"""Operators whose result is their operand where it has the same shape. Under symbolic batches ``z[:, i, j]`` has a
slice of all samples."""

Step = tuple[torch._ops.OpOverload, tuple[int, ...]]
"""An operator and its arguments behind the first."""


@dataclass(frozen=True)
class Vector:
    """One vector of every sample: a row of ``rows`` that ``index`` names, or, without, the sample's own row.

    Args:
        made: the node that is the vector in the graph, where there is one.
        steps: what makes one row a sample, or one index a sample, of ``index`` or else of ``rows``.
    """

    rows: fx.Node
    index: fx.Node | None = None
    made: fx.Node | None = None
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Gradient:
    """In a joint graph: ``given`` [batch, pairs], gradients of the products, and ``total``, those of all vectors."""

    given: fx.Node
    total: fx.Node


@dataclass(frozen=True)
class Interaction:
    """Vectors, pairs of them, and the node whose value is their products.

    Args:
        features: elements of a vector.
        first, second: integers [pairs], vectors of each pair.
        picked: the products [batch, pairs].
        joined: ``cat([vectors[head], picked], 1)``, where the graph has it; else ``head`` is -1.
    """

    vectors: tuple[Vector, ...]
    features: int
    first: fx.Node
    second: fx.Node
    picked: fx.Node
    joined: fx.Node | None = None
    head: int = -1
    gradient: Gradient | None = None

    @property
    def result(self) -> fx.Node:
        """The node that is replaced."""
        return self.picked if self.joined is None else self.joined


def find_interactions(graph: fx.Graph, joint: bool = False) -> list[Interaction]:
    """The interactions of a functional ATen graph with ``val`` in its nodes' meta.

    Args:
        joint: of forward and backward in one: those whose gradient is there too, and only those.
    """
    found = []
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        site = _site(node)
        if site is not None and joint:
            gradient = _gradient(graph, site)
            site = None if gradient is None else replace(site, gradient=gradient)
        if site is not None:
            found.append(site)
    return found


def _site(picked: fx.Node) -> Interaction | None:
    product, listed = picked.args[0], picked.args[1]
    if not isinstance(product, fx.Node) or not isinstance(listed, list | tuple) or len(listed) != 3:
        return None
    none, first, second = listed
    if none is not None or not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    stack = _square_of(_same(product))
    if stack is None or not _fits(stack, picked, first, second):
        return None
    vectors = tuple(_vectors(stack))
    like = stack.meta["val"]
    if any(v.rows.meta["val"].dtype != like.dtype or v.rows.meta["val"].device != like.device for v in vectors):
        return None
    joined, head = _joined(picked, vectors)
    return Interaction(vectors, stack.meta["val"].shape[2], first, second, picked, joined, head)


def _square_of(product: fx.Node) -> fx.Node | None:
    """Z of ``bmm(Z, Z.T)``."""
    if packet(product) is not aten.bmm:
        return None
    (left, turned), (right, other) = _operands(product)
    return left if left is right and not turned and other else None


def _operands(product: fx.Node) -> list[tuple[fx.Node, bool]]:
    """What a batched product multiplies, looked at through transposes: each with whether it is turned."""
    return [_base(operand) for operand in product.args if isinstance(operand, fx.Node)]


def _base(node: fx.Node) -> tuple[fx.Node, bool]:
    """The [batch, a, b] of which a node is a view, and whether a and b are exchanged."""
    turned = False
    while True:
        node = _same(node)
        if permutation(node) != [0, 2, 1]:
            return node, turned
        node, turned = node.all_input_nodes[0], not turned


def _same(node: fx.Node) -> fx.Node:
    """The node of which another is a view of the same shape, or a copy."""
    while packet(node) in SAME:
        before, after = value(node.all_input_nodes[0]), value(node)
        if before is None or after is None or not same_shape(before, after):
            return node
        node = node.all_input_nodes[0]
    return node


def _fits(stack: fx.Node, picked: fx.Node, first: fx.Node, second: fx.Node) -> bool:
    """Whether kernels take what is multiplied and picked."""
    fake = value(stack)
    if fake is None or fake.dim() != 3 or fake.dtype not in (torch.bfloat16, torch.float16):
        return False
    _, vectors, features = fake.shape
    pairs = picked.meta["val"].shape[-1]
    if not all(isinstance(n, int) for n in (vectors, features, pairs)):
        return False
    names = [value(n) for n in (first, second)]
    if any(n is None or n.dim() != 1 or n.dtype not in (torch.int64, torch.int32) for n in names):
        return False
    same = names[0] is not None and names[1] is not None and names[0].dtype == names[1].dtype
    in_reach = 2 <= vectors <= MOST_VECTORS and 0 < pairs <= MOST_PAIRS
    return same and in_reach and features % PIECE == 0 and PIECE <= features <= MOST_FEATURES


# -- vectors


def _vectors(stack: fx.Node) -> Iterator[Vector]:
    """The vectors that were joined, in order."""
    _, vectors, features = stack.meta["val"].shape
    if packet(stack) is aten.stack and argument(stack, 1, "dim", 0) in (1, -2):
        yield from map(_row, _listed(stack))
        return
    if packet(stack) in (aten.view, aten._unsafe_view, aten.reshape):
        wide = stack.all_input_nodes[0]
        parts = _listed(wide) if packet(wide) is aten.cat and argument(wide, 1, "dim", 0) in (1, -1) else ()
        if parts and all(p.meta["val"].dim() == 2 and p.meta["val"].shape[1] % features == 0 for p in parts):
            for part in parts:
                yield from _slices(part, features)
            return
    if packet(stack) is aten.cat and argument(stack, 1, "dim", 0) in (1, -2):
        for part in _listed(stack):
            yield from _block(part)
        return
    yield from _block(stack)


def _listed(node: fx.Node) -> tuple[fx.Node, ...]:
    return tuple(p for p in arguments(node)[0] if isinstance(p, fx.Node))


def _row(part: fx.Node) -> Vector:
    """[batch, features]: a lookup, or rows that are there."""
    table, index = _lookup(part, 1)
    return Vector(part, made=part) if table is None else Vector(table, index, part)


def _slices(part: fx.Node, features: int) -> Iterator[Vector]:
    """[batch, n * features]."""
    count = part.meta["val"].shape[1] // features
    if count == 1:
        yield _row(part)
        return
    for k in range(count):
        yield Vector(part, steps=((aten.slice.Tensor, (1, k * features, (k + 1) * features)),))


def _block(part: fx.Node) -> Iterator[Vector]:
    """[batch, n, features]: n lookups in one table, or rows that are there."""
    if packet(part) is aten.unsqueeze and part.args[1] in (1, -2):
        yield _row(part.all_input_nodes[0])
        return
    table, index = _lookup(part, 2)
    for k in range(part.meta["val"].shape[1]):
        yield Vector(part if table is None else table, index, steps=((aten.select.int, (1, k)),))


def _lookup(part: fx.Node, dims: int) -> tuple[fx.Node | None, fx.Node | None]:
    """A table and an index of so many dimensions, where a node is rows that were looked up."""
    if packet(part) is not aten.embedding and not _is_bag_of_one(part):
        return None, None
    table, index = arguments(part if packet(part) is aten.embedding else part.all_input_nodes[0])[:2]
    names = value(index)
    good = names is not None and names.dim() == dims and names.dtype in (torch.int64, torch.int32)
    return (table, index) if good else (None, None)


def _is_bag_of_one(part: fx.Node) -> bool:
    """Whether a node is the sums (means, maxima) of bags of one index each: offsets count up from 0 by 1."""
    if part.target is not operator.getitem or part.args[1] != 0:
        return False
    bags = part.all_input_nodes[0]
    if packet(bags) not in (aten._embedding_bag, aten._embedding_bag_forward_only):
        return False
    _, index, offsets = bags.all_input_nodes[:3]
    weights, last, padding = argument(bags, 6, "", None), argument(bags, 7, "", False), argument(bags, 8, "", -1)
    counted = packet(offsets) is aten.arange and offsets.target is aten.arange.start_step
    each = counted and offsets.args[0] == 0 and argument(offsets, 2, "step", 1) == 1
    alike = same_size(index.meta["val"].shape[0], offsets.meta["val"].shape[0])
    return bool(each and alike and weights is None and last is False and padding == -1)


# -- what comes behind


def _joined(picked: fx.Node, vectors: tuple[Vector, ...]) -> tuple[fx.Node | None, int]:
    """``cat([vector, picked], 1)``, where that is all that the products are for, and which vector it is."""
    for user in picked.users:
        if packet(user) is not aten.cat or argument(user, 1, "dim", 0) not in (1, -1) or len(picked.users) != 1:
            continue
        parts = _listed(user)
        if len(parts) == 2 and parts[1] is picked:
            for k, vector in enumerate(vectors):
                if vector.made is not None and vector.made is parts[0]:
                    return user, k
    return None, -1


def _gradient(graph: fx.Graph, site: Interaction) -> Gradient | None:
    stack, _ = _base(_same(site.picked.all_input_nodes[0]).all_input_nodes[0])
    for put in graph.find_nodes(op="call_function", target=aten.index_put.default):
        zeros, listed, given = put.args[:3]
        whole = put.args[3:] == (True,) and isinstance(listed, list | tuple) and len(listed) == 3
        if not whole or listed[0] is not None or list(listed[1:]) != [site.first, site.second]:
            continue
        if packet(zeros) not in (aten.new_zeros, aten.zeros, aten.zeros_like):
            continue
        total = _total(put, stack)
        if total is not None and isinstance(given, fx.Node):
            return Gradient(given, total)
    return None


def _total(put: fx.Node, stack: fx.Node) -> fx.Node | None:
    """``G Z + (Z.T G).T``, where that is all that G is for."""
    products = readers(put, lambda user: _same(user) is put)
    if len(products) != 2 or any(packet(p) is not aten.bmm for p in products):
        return None
    sides = {tuple(_operands(p)): p for p in products}
    right, left = sides.get(((put, False), (stack, False))), sides.get(((stack, True), (put, False)))
    if right is None or left is None:
        return None
    for node in right.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if len(node.args) == 2 and not node.kwargs and all(isinstance(n, fx.Node) for n in node.args):
            parts = {_base(n) for n in node.all_input_nodes}
            if parts == {(right, False), (left, True)}:
                return node
    return None
