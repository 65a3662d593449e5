"""Networks of edges whose results are summed to nodes: row streams of edges in the order of their receivers.

A row stream that makes a value of each edge, which reductions at the edges' receivers alone read, takes them in: its
rows come in sorted order, through indices that are sorted, and its results are what each node's rows sum to
(``TileOp.receivers``). What a graph saves of edges for its backward half is read by others, so such networks stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from tilestream.graph.lowering import INDEX_STEPS, Binding, dtype_of
from tilestream.graph.nodes import Unsupported, arguments, aten, is_view, packet, value
from tilestream.graph.operators.rules import SHAPES
from tilestream.graph.ragged.lists import Edges, Gather, sorted_lists
from tilestream.graph.ragged.region import SortedIndices
from tilestream.graph.ragged.rules import POINTWISE
from tilestream.graph.region import EdgeArguments, region_of, result_of
from tilestream.graph.rewrites.operators import LOOSE, SEGMENT_REDUCE
from tilestream.graph.selection import Cut
from tilestream.graph.sizes import expression, hint
from tilestream.graph.sums import first_alike
from tilestream.ir.axes import Axis, sizes
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Role, Tensor, TileOp
from tilestream.ir.shapes import BOUNDS, NODE_SUMS
from tilestream.ir.ways import reached

NODES = Axis("nodes")
ORDER, RECEIVERS, STARTS = "order", "receivers", "starts"
"""Tensors of a program that it has besides those of the network alone."""


@dataclass(frozen=True)
class Joined:
    """A network with its sums as ``cut``; what it was: ``network``, and the regions ``around`` its reductions, of which
    operators at nodes are ``left``, the division of a mean."""

    cut: Cut
    network: Cut
    around: tuple[Cut, ...]
    left: tuple[fx.Node, ...]


def edge_networks(owner: fx.GraphModule, cuts: Sequence[Cut], ragged: Sequence[Cut]) -> list[Joined]:
    """The networks among ``cuts`` that can take in all reductions of what they make.

    Args:
        ragged: regions around reductions; what those that are taken in have besides is of nodes, element by element.
    """
    if not owner.graph.find_nodes(op="call_function", target=SEGMENT_REDUCE):
        return []
    same = first_alike(owner.graph)
    whole = [e for e in sorted_lists(owner.graph, same) if not e.starts.meta.get(LOOSE)]
    lists = {e.order: e for e in whole if e.order is not None and e.busy is not None}
    indices, found = SortedIndices(owner.graph), []
    for cut in cuts:
        seeds, views = _reductions(cut, lists)
        around = tuple(c for c in ragged if not set(seeds).isdisjoint(c.nodes))
        results = {_result(seed, seeds): seed for seed in seeds}
        inside = {*cut.nodes, *views, *seeds, *results}
        edges = lists[arguments(seeds[0])[2]] if seeds else None
        left = tuple(n for c in around for n in c.nodes if n not in inside)
        if edges is None or edges.index is None or not all(_is_of_nodes(n, edges) for n in left):
            continue
        if not reached([edges.sort[0]], lambda n: n.all_input_nodes).isdisjoint(cut.nodes):
            continue  # who neighbours are is what the network finds out
        try:
            made = _Network(owner, cut, edges, edges.index, same, indices).with_sums(results, inside)
        except Unsupported:
            continue
        found.append(Joined(made, cut, around, left))
    return found


def _reductions(cut: Cut, lists: Mapping[fx.Node, Edges]) -> tuple[list[fx.Node], list[fx.Node]]:
    """All that reads a network's only result, if those are reductions along one list, and views on the way."""
    views, seeds, left = list[fx.Node](), list[fx.Node](), [u for out in cut.outputs for u in out.users]
    while left:
        user = left.pop()
        (views if is_view(user) else seeds).append(user)
        left += user.users if is_view(user) else ()
    fake = value(cut.outputs[0])
    stores = [op for op in cut.region.program.stages[0].ops if op.kind == "store"]
    if len(cut.outputs) > 1 or len(stores) > 1 or fake is None or fake.dim() != 2:
        return [], []
    if not seeds or not all(_is_seed(seed) and seed.args[2] is seeds[0].args[2] for seed in seeds):
        return [], []
    edges = lists.get(arguments(seeds[0])[2])
    fits = edges is not None and expression(fake.shape[0]) == edges.edges
    return (sorted(seeds), views) if fits else ([], [])


def _is_seed(node: fx.Node) -> bool:
    return node.target is SEGMENT_REDUCE and node.args[0] is None and _how(node) in NODE_SUMS


def _is_of_nodes(node: fx.Node, edges: Edges) -> bool:
    fake = value(node)
    by_element = packet(node) in POINTWISE or packet(node) in SHAPES
    return by_element and fake is not None and fake.dim() > 0 and expression(fake.shape[0]) == edges.nodes


def _how(seed: fx.Node) -> str:
    return str(seed.args[5]) if len(seed.args) > 5 else "sum"


def _result(seed: fx.Node, seeds: Sequence[fx.Node]) -> fx.Node:
    """A reduction, or the ReLU behind a maximum: it is the maximum of ReLUs, and 0 of nothing."""
    users = list(seed.users)
    if _how(seed) == "max" and len(seeds) == len(users) == 1 and packet(users[0]) is aten.relu:
        return users[0]
    return seed


@dataclass
class _Network:
    """A row stream of edges, and what its program reads where they come in sorted order.

    Attributes:
        sources: other lists of edges as they are, sorted, and how many rows they name.
        of_edges: tensors of edges, which become tables.
    """

    owner: fx.GraphModule
    cut: Cut
    edges: Edges
    index: fx.Node
    same: Mapping[fx.Node, fx.Node]
    indices: SortedIndices
    inputs: list[Binding] = field(default_factory=list)
    parameters: list[Binding] = field(default_factory=list)
    sources: list[tuple[fx.Node, fx.Node, int]] = field(default_factory=list)
    of_edges: set[str] = field(default_factory=set)

    def with_sums(self, results: Mapping[fx.Node, fx.Node], inside: set[fx.Node]) -> Cut:
        """The network with its sums as one region.

        Args:
            results: what leaves, and the reduction that it is or is made of.

        Raises:
            Unsupported: it cannot be one.
        """
        receivers = self._bind()
        program = self._program(results, receivers)
        nodes = tuple(n for n in self.owner.graph.nodes if n in inside)
        made = {node: result_of(node, f"y{k}") for k, node in enumerate(results)}
        edges, name = self.edges, self.cut.region.name
        ordered_by, busy_nodes = edges.sort
        beside = [ordered_by, busy_nodes, self.index, *(raw for raw, _, _ in self.sources)]
        rows = hint(ordered_by.meta["val"].shape[0])
        region = region_of(self.owner, name, nodes, made, program, self, rows, beside)
        at = {name: n for n, name in enumerate(region.arguments)}
        order, starts, busy, index = (at[n.name] for n in (ordered_by, edges.starts, busy_nodes, self.index))
        sources = tuple((at[raw.name], at[ordered.name], count) for raw, ordered, count in self.sources)
        lists = EdgeArguments(order, starts, busy, index, sources)
        return Cut(replace(region, edges=lists), nodes, tuple(results))

    def _bind(self) -> str:
        """Bind all that the program reads; the name of the receivers."""
        region, program = self.cut.region, self.cut.region.program
        by_name = {n.name: n for n in self.owner.graph.nodes}
        given = {o.tensor: by_name[region.arguments[o.index]] for o in (*region.inputs, *region.parameters)}
        loads = [op for op in program.stages[0].ops if op.index]
        nodes = self.edges.starts.meta["val"].shape[0] - 1
        receivers = ""
        for operand in region.inputs:
            node, tensor = given[operand.tensor], program.tensor(operand.tensor)
            if tensor.dtype in DTYPE_BYTES:
                self._table(node, tensor)
                continue
            index = self.same.get(node, node)
            table, *others = {given[op.params[0]] for op in loads if op.index == operand.tensor}
            count = table.meta["val"].shape[0]
            if any(expression(other.meta["val"].shape[0]) != expression(count) for other in others):
                raise Unsupported("one index into tables of unlike sizes", node)
            self._index(operand.tensor, index, self.indices.sorted(Gather(table, index), self.edges), hint(count))
            if index is self.index and expression(count) == expression(nodes):
                receivers = operand.tensor
        if not receivers:
            receivers, made = RECEIVERS, self.indices.of(self.index, self.edges, nodes)
            self._index(receivers, self.index, made, hint(nodes))
        if self.of_edges:
            self.inputs.append(Binding(ORDER, self.edges.sort[0], INDEX_STEPS))
        self.parameters += [Binding(o.tensor, given[o.tensor], o.steps) for o in region.parameters]
        self.parameters.append(Binding(STARTS, self.edges.starts, ()))
        return receivers

    def _table(self, node: fx.Node, tensor: Tensor) -> None:
        """A tensor of edges, whose rows are taken through their order."""
        fake = value(node)
        if fake is None or fake.dim() != 2 or tensor.features * DTYPE_BYTES[tensor.dtype] % 16:
            raise Unsupported("rows of edges that cannot be taken through their order", node)
        self.of_edges.add(tensor.name)
        self.parameters.append(Binding(tensor.name, node, ()))

    def _index(self, tensor: str, raw: fx.Node, ordered: fx.Node, count: int) -> None:
        self.inputs.append(Binding(tensor, ordered, INDEX_STEPS))
        self.sources.append((raw, ordered, count))

    def _program(self, results: Mapping[fx.Node, fx.Node], receivers: str) -> Pipeline:
        program = self.cut.region.program
        (stage,) = program.stages
        ops, outputs = list[TileOp](), list[Tensor]()
        for op in stage.ops:
            if op.kind == "load" and op.params[0] in self.of_edges:
                ops.append(replace(op, tensors=(op.params[0], ORDER)))
            elif op.kind == "store":
                for k, (node, seed) in enumerate(results.items()):
                    (made,) = op.ins
                    if node is not seed:
                        tile = program.tiles()[made]
                        ops.append(TileOp("relu", replace(tile, name="summed"), (made,), (), (), op.source))
                        made = "summed"
                    out = program.tensor(op.params[0])
                    outputs.append(Tensor(f"y{k}", Role.OUTPUT, (NODES, *sizes(out.features)), dtype_of(node)))
                    lists = (f"y{k}", receivers, STARTS)
                    ops.append(TileOp("store", None, (made,), lists, (), op.source, combine=_how(seed)))
            else:
                ops.append(op)
        kept = [self._tensor(t) for t in program.tensors if t.role is not Role.OUTPUT]
        known = {t.name for t in kept}
        more = [Tensor.of(b.tensor, Role.INPUT, (), BOUNDS) for b in self.inputs if b.tensor not in known]
        more.append(Tensor(STARTS, Role.PARAMETER, (Axis(f"{STARTS}.rows"),), BOUNDS))
        return replace(program, tensors=(*kept, *more, *outputs), stages=(replace(stage, ops=tuple(ops)),))

    def _tensor(self, t: Tensor) -> Tensor:
        if t.name in self.of_edges:
            return Tensor.table(t.name, None, t.features, t.dtype)
        return t if t.dtype in DTYPE_BYTES else replace(t, dtype=BOUNDS)
