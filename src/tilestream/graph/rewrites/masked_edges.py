"""Edges that a mask selects, where their number is known only when the mask has been counted: all of them are kept.

PyG takes loops out of a list and adds one of each node (``add_remaining_self_loops``): ``edges[:, row != col]``. Its
size is the GPU's to say, so that the host waits, and no CUDA graph can hold the model. Here all edges stay, in lists of
a known size, and those that the mask drops are of no node (``DROPPED``): nothing that is reduced reads them. So
reductions have the same values in the same order. It is done where all that reads what was selected keeps rows apart,
and reductions by an index end it; else the graph stays as it is.

A joint graph's gradients are such rows too: gathered from nodes and summed by sender, or put back where the mask took
weights from. So forward and backward have known sizes, and one sort for each end of the edges.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from tilestream.graph import nodes
from tilestream.graph.nodes import ASSERTIONS, MATMULS, Unsupported, argument, arguments, aten, is_result, packet, value
from tilestream.graph.rewrites.insert import call, size
from tilestream.graph.rewrites.operators import DROPPED, LOOSE, SEGMENTS
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.rewrites.sorted_sums import Sorted
from tilestream.graph.signs import SAME_NUMBERS
from tilestream.graph.sizes import expression, same_shape, same_size
from tilestream.graph.sums import Sum, constant, first_alike, part_of

Live = tuple[fx.Node | int | torch.SymInt, ...]
"""Which rows count, piece by piece: a mask's, or so many."""

SIZES = {torch.sym_sum, operator.add, operator.sub, aten.sym_size}
COMPARED = {operator.ge, operator.le, operator.eq, operator.gt, operator.lt, operator.ne}
FILLS = {aten.ones: 0, aten.zeros: 0, aten.full: 0, aten.new_ones: 1, aten.new_zeros: 1, aten.new_full: 1}
"""What makes rows that are alike, and which argument is their shape."""
VIEWS = {
    *(aten.view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.expand, aten.slice, aten.detach, aten.alias),
    *(aten.clone, aten._to_copy, aten.zeros_like, aten.ones_like, aten.full_like, aten.slice_backward),
}
OVER_FEATURES = {aten.sum, aten.mean, aten.amax, aten.amin}
PUT = {aten.scatter_add, aten.scatter_reduce, aten.index_add, aten.index_reduce}


@dataclass(frozen=True)
class Rows:
    """``node``, which has all rows along ``dim``. ``live`` is None where all rows are alike."""

    node: fx.Node
    dim: int
    live: Live | None


def keep_masked_edges(graph: fx.Graph, settings: Settings) -> int:
    """Give what masks select the size of the mask, in a graph whose sums may be sorted; how many reductions end it."""
    if settings.sums is None or not any(_mask(n) for n in graph.nodes):
        return 0
    made = _Kept(graph, first_alike(graph))
    try:
        made.build()
    except Unsupported:
        graph.eliminate_dead_code()  # what was begun
        return 0
    return made.finish()


def _mask(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """What a node selects from, by which mask, along which dimension."""
    fake = value(node)
    if node.target is not aten.index.Tensor or fake is None:
        return None
    of, (*before, mask) = arguments(node)
    if not _is_mask(mask) or any(i is not None for i in before):
        return None
    return (of, mask, len(before)) if free_unbacked_symbols(fake.shape[len(before)]) else None


@dataclass
class _Kept:
    """
    Attributes:
        same: of each integer tensor the first that is computed alike.
        rows, sizes: what stands for nodes whose size was not known, and for those sizes.
        ends: what reduces rows by an index or puts them at one, with what stands for it.
        checks: of sizes.
    """

    graph: fx.Graph
    same: dict[fx.Node, fx.Node]
    rows: dict[fx.Node, Rows] = field(default_factory=dict)
    sizes: dict[fx.Node, Any] = field(default_factory=dict)
    ends: dict[fx.Node, fx.Node] = field(default_factory=dict)
    checks: list[fx.Node] = field(default_factory=list)
    sums: list[tuple[Sum, Live]] = field(default_factory=list)
    masks: dict[Live, fx.Node] = field(default_factory=dict)

    def build(self) -> None:
        """
        Raises:
            Unsupported: who reads what is selected mixes rows, or gives them out.
        """
        for node in list(self.graph.nodes):
            with self.graph.inserting_before(node):
                if (found := _mask(node)) is not None:
                    of, mask, dim = found
                    if of in self.rows or mask in self.rows:
                        raise Unsupported("selected of what is selected", node)
                    self.rows[node] = Rows(of, dim, (self.same.get(mask, mask),))
                elif any(n in self.rows or n in self.sizes or n in self.checks for n in node.all_input_nodes):
                    self._stands_for(node)

    def finish(self) -> int:
        """Let everybody read what stands for what was selected, and sort."""
        for old, new in self.ends.items():
            old.replace_all_uses_with(new)
        new = {r.node for r in self.rows.values()} | set(self.ends.values())
        for old in reversed([*self.graph.nodes]):
            if any(old in each for each in (self.rows, self.sizes, self.ends, self.checks)) and old not in new:
                self.graph.erase_node(old)
        same = first_alike(self.graph)
        together: dict[tuple[Any, ...], list[Sum]] = defaultdict(list)
        for s, live in self.sums:
            index = s.parts[0].index
            together[same.get(index, index), live, expression(s.node.meta["val"].shape[0])].append(s)
        for (_, live, _), found in together.items():
            _Dropping(self.graph, found, self.masks[live], same).replace()
        for node, first in first_alike(self.graph, floats=True).items():  # layers that normalise alike do so once
            if node is not first and not is_result(node):
                node.replace_all_uses_with(first)
        return len(self.ends)

    # -- one node -------------------------------------------------------------------------------

    def _stands_for(self, node: fx.Node) -> None:
        kind = packet(node)
        read = [self.rows[n] for n in node.all_input_nodes if n in self.rows]
        if node.target in ASSERTIONS or kind in ASSERTIONS or node.target in COMPARED:
            self.checks.append(node)
        elif kind in SIZES or node.target in SIZES:
            self._size(node)
        elif kind is aten.cat:
            self._cat(node)
        elif kind is aten.index_put and _puts_at_mask(node):
            self._back(node)
        elif kind in PUT or (kind is aten.index_put and node.args[3:4] == (True,)):
            self._reduced(node)
        elif kind is aten.index_put:
            self._put(node)
        elif kind is aten.slice and node.args[0] in self.rows and _cuts_rows(node, read[0].dim):
            self._pieces(node)
        elif kind is aten.sum and len(read) == 1 and not read[0].dim and 0 in _dims(node):
            self._total(node, read[0])
        elif kind in FILLS:
            self._fill(node)
        elif kind is aten.select:
            (rows,) = read
            dim = _dim(node.args[0], node.args[1])
            if dim == rows.dim:
                raise Unsupported("one row", node)
            self.rows[node] = Rows(self._again(node), rows.dim - (dim < rows.dim), rows.live)
        elif kind in (aten.index, aten.index_select, aten.embedding):
            self._gather(node)
        else:
            self._by_row(node, read)

    def _by_row(self, node: fx.Node, read: list[Rows]) -> None:
        """An operator that makes each row of rows in its place."""
        kind, fake = packet(node), value(node)
        tags = getattr(node.target, "tags", ())
        pointwise = kind in nodes.DERIVATIVES or torch.Tag.pointwise in tags
        pointwise = pointwise and torch.Tag.nondeterministic_seeded not in tags
        if fake is None or not read or any(r.dim for r in read):
            raise Unsupported("rows do not come first", node)
        if kind in OVER_FEATURES:
            if 0 in _dims(node):
                raise Unsupported("rows are added up", node)
        elif kind in MATMULS:
            weights = [n for n in node.all_input_nodes if n in self.rows]
            if weights != [node.args[1 if kind is aten.addmm else 0]] or kind is aten.bmm:
                raise Unsupported("rows are added up", node)
        elif not pointwise and kind not in VIEWS:
            raise Unsupported("rows may be mixed", node)
        if kind not in VIEWS and any(n in self.sizes for n in node.all_input_nodes):
            raise Unsupported("how many rows there are is a number to compute with", node)
        for n in node.all_input_nodes if pointwise else ():
            own = value(n)
            spread = own is None or own.dim() < fake.dim() or same_size(own.shape[0], 1)
            if spread if n in self.rows else not spread:
                raise Unsupported("rows meet what is no row", node)
        new = self._again(node)
        made, had = new.meta["val"], read[0].node.meta["val"]
        old = next(n for n in node.all_input_nodes if n in self.rows).meta["val"]
        if not same_size(made.shape[0], had.shape[0]) or not same_size(fake.shape[0], old.shape[0]):
            raise Unsupported("rows do not stay first", node)
        self.rows[node] = Rows(new, 0, self._one(node, read))

    def _size(self, node: fx.Node) -> None:
        if packet(node) is aten.sym_size:
            of: Any = node.args[0]
            self.sizes[node] = size(node, self.rows[of].node, _dim(of, node.args[1]))
            return
        args: Any = map_arg(node.args, lambda n: self.sizes.get(n, n))
        known = not any(isinstance(x, fx.Node) for x in tree_leaves(args))
        self.sizes[node] = node.target(*args) if known else call(node, node.target, *args)  # pyright: ignore

    def _cat(self, node: fx.Node) -> None:
        parts: Any = node.args[0]
        dim = _dim(node, node.args[1] if len(node.args) > 1 else 0)
        found = [self.rows.get(p) for p in parts]
        if all(r is not None and r.dim != dim for r in found):  # features
            self._by_features(node, [r for r in found if r is not None])
            return
        live: list[Any] = []
        for part, rows in zip(parts, found, strict=True):
            if rows is not None and (rows.dim != dim or rows.live is None):
                raise Unsupported("joined along another dimension", node)
            live += [part.meta["val"].shape[dim]] if rows is None else rows.live or ()
        new = self._again(node)
        self.rows[node] = Rows(new, dim, tuple(live))
        pieces = [self._alive(node, of, new) for of in live]
        self.masks.setdefault(tuple(live), call(node, aten.cat.default, pieces))

    def _by_features(self, node: fx.Node, read: list[Rows]) -> None:
        if any(r.dim for r in read):
            raise Unsupported("rows do not come first", node)
        self.rows[node] = Rows(self._again(node), 0, self._one(node, read))

    def _alive(self, like: fx.Node, of: Any, new: fx.Node) -> fx.Node:
        if isinstance(of, fx.Node):
            return of
        if not isinstance(of, int):
            raise Unsupported("a number of rows that is not known", like)
        return call(like, aten.ones.default, [of], dtype=torch.bool, device=new.meta["val"].device)

    def _gather(self, node: fx.Node) -> None:
        table, index = node.args[0], node.args[-1] if packet(node) is not aten.index else node.args[1][0]  # pyright: ignore
        along = packet(node) is not aten.index_select or _dim(table, node.args[1]) == 0
        alone = packet(node) is not aten.index or len(node.args[1]) == 1  # pyright: ignore
        rows = self.rows.get(index) if isinstance(index, fx.Node) else None
        if table in self.rows or rows is None or rows.dim or not along or not alone or rows.live is None:
            raise Unsupported("not rows of a table", node)
        self.rows[node] = Rows(self._again(node), 0, rows.live)

    def _fill(self, node: fx.Node) -> None:
        shape: Any = node.args[FILLS[packet(node)]]
        new = self._again(node)
        if not any(n in self.sizes for n in shape if isinstance(n, fx.Node)):
            self.ends[node] = new  # of a known size, like rows in its type alone
        elif shape[0] in self.sizes and not any(n in self.sizes for n in shape[1:]):
            self.rows[node] = Rows(new, 0, None)
        else:
            raise Unsupported("rows do not come first", node)

    def _reduced(self, node: fx.Node) -> None:
        read = [n for n in node.all_input_nodes if n in self.rows]
        new = self._again(node)
        part = part_of(new)
        live = self._one(node, [self.rows[n] for n in read])
        if part is None or part.index.meta["val"].dim() != 1 or live is None or node.args[0] in self.rows:
            raise Unsupported("rows are put elsewhere", node)
        self._counted(node, Rows(new, 0, live))
        self.ends[node] = new
        index = part.index
        while isinstance(of := index.args[0], fx.Node) and _alike(of, index):
            index = of
        self.sums.append((Sum(new, part.base, (replace(part, index=index),)), live))

    def _put(self, node: fx.Node) -> None:
        """Rows that are put at an index: those that do not count behind the last one, where nobody looks."""
        base, indices, rows, *rest = node.args
        (index,) = indices if isinstance(indices, list | tuple) and len(indices) == 1 else (None,)
        at, given = self.rows.get(index), self.rows.get(rows)  # pyright: ignore
        fake = value(base)
        if at is None or given is None or rest not in ([], [False]) or fake is None or at.live != given.live:
            raise Unsupported("rows are put elsewhere", node)
        (mask,) = at.live if at.live is not None and len(at.live) == 1 else (None,)
        if not isinstance(mask, fx.Node) or not isinstance(count := fake.shape[0], int) or at.dim or given.dim:
            raise Unsupported("rows are put elsewhere", node)
        wider = call(node, aten.constant_pad_nd.default, base, [0, 0] * (fake.dim() - 1) + [0, 1])
        to = call(node, aten.where.ScalarOther, mask, at.node, count)
        put = call(node, aten.index_put.default, wider, [to], given.node)
        self.ends[node] = call(node, aten.slice.Tensor, put, 0, 0, count)

    def _back(self, node: fx.Node) -> None:
        """Rows that are put where the mask took them: the gradient of what was selected."""
        base, (mask,), given, *_ = arguments(node)
        rows, fake = self.rows.get(given), value(base)
        if rows is None or rows.dim or rows.live != (self.same.get(mask, mask),) or base in self.rows or fake is None:
            raise Unsupported("rows are put elsewhere", node)
        adds = argument(node, 3, "accumulate", False) and constant(base) != 0
        if adds or not same_shape(rows.node.meta["val"], fake):
            raise Unsupported("rows are put elsewhere", node)
        self.ends[node] = call(node, aten.where.self, _wide(node, mask, fake.dim()), rows.node, base)

    def _pieces(self, node: fx.Node) -> None:
        """Some of the lists that were joined, from a border to a border: the gradient of a concatenation."""
        given, dim, first, last, *step = arguments(node)
        rows, at = self.rows[given], [_expression(first), _expression(last)]
        live = rows.live or ()
        known = [n for n in live if isinstance(n, int)]
        masks = [n for n in live if isinstance(n, fx.Node)]
        if len(known) + len(masks) != len(live) or len(set(masks)) != 1 or step not in ([], [1]):
            raise Unsupported("some rows", node)
        selected = (expression(given.meta["val"].shape[rows.dim]) - sum(known)) / len(masks)
        before: list[Any] = [sympy.Integer(0)]
        after: list[Any] = [0]
        for n in live:
            is_mask = isinstance(n, fx.Node)
            before.append(before[-1] + (selected if is_mask else n))
            after.append(_plus(node, after[-1], size(node, n) if is_mask else n))
        if any(n not in before for n in at):
            raise Unsupported("some rows", node)
        a, b = map(before.index, at)
        new = call(node, aten.slice.Tensor, rows.node, dim, after[a], after[b])
        if masks[0] in live[a:b]:
            self.rows[node] = Rows(new, rows.dim, live[a:b])
        else:
            self.ends[node] = new

    def _total(self, node: fx.Node, rows: Rows) -> None:
        """A sum of all rows, as of a bias' gradient: zeros in the place of those that do not count."""
        mask = self._counted(node, rows)
        fake = rows.node.meta["val"]
        known = call(node, aten.where.ScalarOther, _wide(node, mask, fake.dim()), rows.node, 0)
        self.ends[node] = call(node, node.target, known, *node.args[1:], **node.kwargs)

    def _one(self, node: fx.Node, read: list[Rows]) -> Live | None:
        """Which rows of an operator's count: its operands' agree."""
        lives = {r.live for r in read if r.live is not None}
        if len(lives) > 1 or any(r.dim for r in read):
            raise Unsupported("rows of several masks", node)
        return lives.pop() if lives else None

    def _counted(self, node: fx.Node, rows: Rows) -> fx.Node:
        """Which rows count, as a mask."""
        live = rows.live
        if live is None or (live not in self.masks and len(live) != 1):
            raise Unsupported("which rows count is not known", node)
        if live not in self.masks:
            (of,) = live
            self.masks[live] = self._alive(node, of, rows.node)
        return self.masks[live]

    def _again(self, node: fx.Node) -> fx.Node:
        """The same operator on what stands for its operands."""

        def instead(n: fx.Node) -> Any:
            return self.rows[n].node if n in self.rows else self.sizes.get(n, n)

        args, kwargs = map_arg((node.args, node.kwargs), instead)  # pyright: ignore
        return call(node, node.target, *args, **kwargs)


def _alike(before: fx.Node, view: fx.Node) -> bool:
    """Whether a view of rows has the same numbers in the same order."""
    a, b = before.meta["val"], view.meta["val"]
    return packet(view) in (*SAME_NUMBERS, aten.slice) and a.dim() == 1 and same_size(a.shape[0], b.shape[0])


def _puts_at_mask(node: fx.Node) -> bool:
    indices: Any = node.args[1]
    return len(indices) == 1 and _is_mask(indices[0])


def _is_mask(index: Any) -> bool:
    """Whether an index says of each row whether it is meant."""
    fake = value(index)
    return fake is not None and fake.dtype == torch.bool and fake.dim() == 1


def _cuts_rows(part: fx.Node, dim: int) -> bool:
    """Whether a slice has some of what it is of, along ``dim``."""
    given: Any = part.args
    if len(given) < 4:
        return False
    whole = same_shape(part.meta["val"], given[0].meta["val"])
    return not whole and _dim(given[0], given[1]) == dim


def _expression(bound: Any) -> Any:
    found = bound.meta["val"] if isinstance(bound, fx.Node) else bound
    return None if found is None else expression(found)


def _plus(like: fx.Node, a: Any, b: Any) -> Any:
    """Of numbers, or nodes of the graph."""
    return a + b if isinstance(a, int) and isinstance(b, int) else b if a == 0 else call(like, operator.add, a, b)


def _wide(like: fx.Node, mask: fx.Node, dims: int) -> fx.Node:
    """A mask of rows of so many dimensions."""
    return mask if dims == 1 else call(like, aten.view.default, mask, [-1] + [1] * (dims - 1))


def _dims(node: fx.Node) -> list[int]:
    """What a reduction goes over."""
    given: Any = node.args[1] if len(node.args) > 1 else None
    count = node.args[0].meta["val"].dim()  # pyright: ignore
    return [d % count for d in ([given] if isinstance(given, int) else given or range(count))]


def _dim(of: Any, dim: Any) -> int:
    return int(dim) % of.meta["val"].dim()


class _Dropping(Sorted):
    """Sums of the rows that ``live`` says count. ``same``: ``first_alike`` of the graph."""

    def __init__(self, graph: fx.Graph, together: list[Sum], live: fx.Node, same: Mapping[fx.Node, fx.Node]) -> None:
        super().__init__(graph, together, {})
        self._live, self._same = live, same

    def _segments(self, index: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        wrap = self._wraps(self._same)
        named = self._call(aten.clamp_min.default, index, DROPPED + 1)  # no node either, and not `DROPPED`
        known = self._call(aten.where.ScalarOther, self._live, named, DROPPED)
        made = self._call(SEGMENTS, known, self._nodes(), 0, wrap, True)
        order, starts, busy = (self._call(operator.getitem, made, k) for k in range(3))
        starts.meta[LOOSE] = True
        return order, starts, busy
