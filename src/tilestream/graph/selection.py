"""Selection: which operators of a graph become regions, and why the others do not."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import sympy
import torch
from torch import fx

from tilestream.announce import announce_failure, first_line
from tilestream.graph import operators
from tilestream.graph.convexity import Groups, successors
from tilestream.graph.convolutions import is_convolution
from tilestream.graph.facts import Facts
from tilestream.graph.few_rows import WIDEST, hidden, pooled, wide_blocks
from tilestream.graph.kept import pieces
from tilestream.graph.lowering import MAX_FEATURES, Emitter, Value
from tilestream.graph.nodes import (
    Unsupported,
    aten,
    computes,
    is_gather,
    is_ours,
    is_product,
    is_slice,
    is_sym,
    is_view,
    name,
    tensor_of,
    value,
)
from tilestream.graph.one_row import one_row_layers
from tilestream.graph.projections import behind_derivatives, behind_layers, lone_convolutions, lone_layers
from tilestream.graph.provenance import source
from tilestream.graph.region import Region, lower
from tilestream.graph.rewrites.states import WRITE_STATES
from tilestream.graph.sizes import hint
from tilestream.ir.ways import reached
from tilestream.kernels.one_row.model import is_one_row
from tilestream.kernels.product.block import MOST_ROWS
from tilestream.kernels.product.finder import is_block
from tilestream.kernels.product.tiled_block.model import is_tileable

log = logging.getLogger(__name__)

Lowered = tuple[Region, tuple[fx.Node, ...]]
"""A region, and those of its nodes that others use."""

MOST_GATHERED_BYTES = 512
"""Of a row, all that a region takes through indices: more costs the loader warps more than a gather kernel and its
round trip through memory (H200: 2 x 256 bytes, 52 to 56 us against 60; 2 x 1024 bytes, 427 against about 400)."""

ADDED_GATHER = "gathers rows for a sum that is in memory anyway"
WIDE_GATHER = "gathers rows so wide that a kernel of its own is faster"
BLOCK = "part of a feed-forward block or of layers on few rows"
POINTWISE = "nothing to stream: no linear layer beside it (Inductor fuses it as well)"


@dataclass(frozen=True)
class Exclusion:
    """An operator that stays out of every region: ``operators.sort.default``, the user's line, and why."""

    op: str
    source: str
    reason: str


@dataclass(frozen=True)
class Cut:
    """A region, its nodes in the whole graph, and those of them that others use."""

    region: Region
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    def within(self, graph: fx.Graph) -> Cut | None:
        """The same in another graph with nodes of the same names; None where one is not to be found there."""
        by_name = {n.name: n for n in graph.nodes}
        own = (*self.nodes, *self.outputs)
        alike = all(n.name in by_name and by_name[n.name].target == n.target for n in own)
        if not alike or not by_name.keys() >= set(self.region.arguments):
            return None
        nodes, outputs = (tuple(by_name[n.name] for n in some) for some in (self.nodes, self.outputs))
        return Cut(self.region, nodes, outputs)


@dataclass(frozen=True)
class Partition:
    """A graph cut into regions and the rest.

    ``operators`` counts the operators that compute: no views, no arithmetic on sizes, none of our own.
    """

    cuts: tuple[Cut, ...]
    exclusions: tuple[Exclusion, ...]
    operators: int

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(cut.region for cut in self.cuts)


def partition(
    owner: fx.GraphModule,
    prefix: str = "region",
    apart: Mapping[str, str] = MappingProxyType({}),
    training: bool = False,
    backward: bool = False,
    spared: int = 0,
    projections: bool = False,
    held: Sequence[Sequence[fx.Node]] = (),
    pays: Callable[[Region], bool] = lambda _: True,
) -> Partition:
    """Cut a functional ATen graph into convex regions, as large as possible, and the rest.

    Every row-streamed tensor of a region has the same (symbolic) number of rows. A region holds at
    least one linear layer.

    Args:
        prefix: of the regions' names, which end in their number.
        apart: names of nodes that stay out of every region, and why.
        training: whether the graph is half of a training step, whose other half reads what leaves.
        backward: whether it is the second half, where what leaves lives beside all that was saved.
        spared: bytes that were not saved although Inductor would have: so much more may leave at once.
        held: nodes of other regions, beside which these stay convex; they stay out of them, as ``apart`` says.
        projections: whether layers by themselves are regions: on few rows, and on many with a norm in front or
            something elementwise behind.
        pays: whether a feed-forward block on many rows is one region. Where it does not, its layers may be regions by
            themselves, if ``projections`` says so.
    """
    nodes = [n for n in owner.graph.nodes if n.op == "call_function"]
    refused = {n: apart[n.name] for n in nodes if n.name in apart}
    wide = _hidden(nodes)
    blocks = list(_blocks(owner, nodes, refused, wide, projections, backward, pays))
    refused |= {n: BLOCK for group, _ in blocks for n in group}
    examined = _examine(nodes, refused, wide=wide)
    after = successors(nodes)
    streams = _RowStreams(owner, prefix, wide, training)
    while True:  # a node that cannot be lowered where it is leaves its region, and what is left is grouped anew
        facts = replace(examined, reasons=dict(examined.reasons))
        groups = _group(nodes, after, facts, backward, held)
        if backward:
            groups = [piece for group in groups for piece in pieces(group, spared, apart)]
        found = [g for g in groups if _worth(g, facts)]
        lowered, leave = streams.lowered(found, facts.known)
        if not leave:
            break
        refused |= leave
        concerned = _behind(leave)  # all else stays what it is
        streams.forget(concerned)
        examined = _examine(nodes, refused, wide=wide, before=_without(examined, concerned))
    for group, (region, outputs) in blocks:
        found.append(group)
        lowered.append((replace(region, name=f"{prefix}{len(lowered)}"), outputs))
    inside = {node for group in found for node in group}
    compute = [n for n in nodes if computes(n) and not is_ours(n)]
    exclusions = tuple(
        Exclusion(name(n), source(n), facts.reasons.get(n, POINTWISE)) for n in compute if n not in inside
    )
    cuts = tuple(Cut(region, tuple(group), outputs) for (region, outputs), group in zip(lowered, found, strict=True))
    return Partition(cuts, exclusions, len(compute))


class _RowStreams:
    """The regions of groups of nodes: each group is lowered once, however often the graph is grouped anew.

    Args:
        owner, prefix, training: as ``partition`` has them.
        wide: nodes wider than a stage holds that may be in a region.
    """

    def __init__(self, owner: fx.GraphModule, prefix: str, wide: frozenset[fx.Node], training: bool) -> None:
        self._owner, self._prefix, self._wide, self._training = owner, prefix, wide, training
        self._kept: dict[tuple[fx.Node, ...], Lowered] = {}

    def lowered(
        self, groups: Sequence[list[fx.Node]], known: Mapping[fx.Node, Value]
    ) -> tuple[list[Lowered], dict[fx.Node, str]]:
        """The regions of all groups, named in this order; and, of the first group that cannot be one, the nodes that
        must stay outside, and why."""
        made: list[Lowered] = []
        for group in groups:
            title, same = f"{self._prefix}{len(made)}", tuple(group)
            try:
                if same in self._kept:
                    region, outputs = self._kept[same]
                    self._kept[same] = replace(region, name=title), outputs
                else:
                    self._kept[same] = lower(self._owner, group, known, title, wide=self._wide, training=self._training)
            except Unsupported as reason:
                assert reason.node is not None
                log.debug("%s leaves its region: %s", reason.node, reason.reason)
                return made, {reason.node: reason.reason}
            except Exception as failure:
                return made, dict.fromkeys(group, _mistake(group[0], failure))
            made.append(self._kept[same])
        return made, {}

    def forget(self, nodes: set[fx.Node]) -> None:
        """Lower groups with one of these nodes anew."""
        self._kept = {group: made for group, made in self._kept.items() if nodes.isdisjoint(group)}


def _blocks(
    owner: fx.GraphModule,
    nodes: list[fx.Node],
    refused: Mapping[fx.Node, str],
    streamed: frozenset[fx.Node],
    projections: bool,
    backward: bool,
    pays: Callable[[Region], bool],
) -> Iterator[tuple[list[fx.Node], Lowered]]:
    """Feed-forward blocks that are too wide for a row stream: so few rows share a tile, many are dealt as tiles. Then,
    where they are asked for, layers that are left.

    They come before row streams, which would take one of their layers and leave the wide one outside; but for
    ``streamed``, wide nodes that a row stream holds all the same.
    """
    if not _any_wide(nodes) and not any(is_convolution(n) or n.target is WRITE_STATES for n in nodes):
        return
    wide = _examine(nodes, refused, WIDEST)
    inside = {*refused, *streamed}
    left = behind_layers(nodes, wide) if projections else frozenset()
    two_layers = partial(wide_blocks, left=left)
    finds = (one_row_layers, lone_convolutions, two_layers, lone_layers) if projections else (two_layers,)
    for find in (*finds, behind_derivatives) if backward else finds:
        for groups in find(nodes, wide, inside):
            for group in groups:
                if not inside.isdisjoint(group):
                    continue
                try:
                    made = lower(owner, group, wide.known, "block", WIDEST)
                except Unsupported as reason:
                    log.debug("%s is no block: %s", group[-1], reason.reason)
                    continue
                program = made[0].program
                tiles = made[0].rows > MOST_ROWS and find is lone_convolutions
                few = made[0].rows <= MOST_ROWS
                if projections and find is two_layers and not few and not pays(made[0]):
                    continue
                alone = find is one_row_layers and is_one_row(program)
                if alone or (is_block(program) and (few or tiles or is_tileable(program))):
                    inside |= set(group)
                    yield group, made
                    break


def _any_wide(nodes: list[fx.Node]) -> bool:
    """Whether a product makes more columns than a stage holds."""
    last = (f.shape[-1] for n in nodes if is_product(n) and (f := value(n)) is not None and f.dim())
    return any(isinstance(size, int) and size > MAX_FEATURES for size in last)


def _hidden(nodes: list[fx.Node]) -> frozenset[fx.Node]:
    """Nodes wider than a stage holds that may be in a row stream nonetheless."""
    if not _any_wide(nodes):
        return frozenset()
    facts = _examine(nodes, {}, WIDEST)
    return hidden(nodes, facts) | pooled(nodes, facts)


def _examine(
    nodes: list[fx.Node],
    refused: Mapping[fx.Node, str],
    widest: int = MAX_FEATURES,
    wide: frozenset[fx.Node] = frozenset(),
    before: Facts | None = None,
) -> Facts:
    """What each node is; ``widest`` and ``wide`` as ``Emitter``'s.

    Those that ``refused`` names are no tiles, and what reads them sees them as any tensor.

    Args:
        before: of nodes that it tells of, what is known already; added to.
    """
    facts = before or Facts()
    told = {*facts.known, *facts.reasons}
    for node in nodes:
        if is_sym(node) or node in told:
            continue
        check = Emitter(facts.known, widest=widest, wide=wide)
        try:
            if node in refused:
                raise Unsupported(refused[node])
            facts.known[node] = operators.emit(check, node)
        except Unsupported as reason:
            _exclude(facts, node, reason.reason)
        except Exception as failure:
            _exclude(facts, node, _mistake(node, failure))
        else:
            facts.kinds[node] = tuple(op.kind for op in check.ops)
            facts.tiles[node] = frozenset(check.tile_nodes)
            facts.parameters[node] = frozenset(check.parameter_nodes)
    return facts


def _behind(refused: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that may be something else now that these are refused: the tuples that they are part of, and all that comes
    of those."""
    return reached(map(_whole, refused), lambda n: n.users)


def _without(facts: Facts, nodes: Collection[fx.Node]) -> Facts:
    """The facts of all other nodes."""
    return Facts(*({n: fact for n, fact in told.items() if n not in nodes} for told in vars(facts).values()))


def _whole(node: fx.Node) -> fx.Node:
    """The tuple that a node is a part of, or the node itself."""
    return node.args[0] if node.target is operator.getitem and isinstance(node.args[0], fx.Node) else node


def _mistake(node: fx.Node, failure: Exception) -> str:
    """The reason why a node stays out where an exception of ours forbids to take it, which is announced."""
    what = f"{name(node)} ({source(node) or 'no source line'}) goes to Inductor"
    announce_failure(what, failure)
    return f"an exception of ours: {type(failure).__name__}: {first_line(failure)}"


def _exclude(facts: Facts, node: fx.Node, reason: str) -> None:
    """Say why a node is no tile. The parts of a tuple live and die with it: only tensors cross a region's border."""
    whole = _whole(node)
    for each in (whole, *(u for u in whole.users if u.target is operator.getitem)):
        facts.known.pop(each, None)
        facts.tiles.pop(each, None)
        facts.parameters.pop(each, None)
        facts.reasons.setdefault(each, reason)


def _group(
    nodes: list[fx.Node],
    after: Mapping[fx.Node, list[fx.Node]],
    facts: Facts,
    backward: bool,
    held: Sequence[Sequence[fx.Node]],
) -> list[list[fx.Node]]:
    """The largest groups that stay convex; ``after`` as ``convexity.successors`` says."""
    others: dict[fx.Node, frozenset[fx.Node]] = {n: frozenset() for members in held for n in members}
    groups = Groups(after, others | {n: facts.parameters[n] for n in nodes if n in facts.known})
    groups.hold(held)
    for node in nodes:
        whole = node.args[0] if node.target is operator.getitem and node in facts.known else None
        if isinstance(whole, fx.Node):
            groups.merge(whole, node, force=True)
    for _ in range(2):
        for node in nodes:
            for operand in sorted(facts.tiles.get(node, ()), key=groups.position):
                if _same(facts.known, operand, node):
                    groups.merge(operand, node)
        readers: dict[tuple[fx.Node, sympy.Expr], fx.Node] = {}
        for node in nodes:
            for operand in facts.tiles.get(node, ()):
                first = readers.setdefault((operand, facts.known[node].rows), node)
                if first is not node:
                    groups.merge(first, node)
    found = (group for group in groups.all() if group[0] not in others)
    return [trimmed for group in found if (trimmed := _trim(group, facts, backward))]


def _same(known: Mapping[fx.Node, Value], a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes are of the same rows on the same device."""
    return a in known and b in known and known[a].rows == known[b].rows and _device(a) == _device(b)


def _device(node: fx.Node) -> torch.device | None:
    fake = node.meta.get("val")
    first = fake[0] if isinstance(fake, list | tuple) and fake else fake
    return first.device if isinstance(first, torch.Tensor) else None


def _worth(group: list[fx.Node], facts: Facts) -> bool:
    """Whether a group has a product; the nodes of one that has none are told why they stay out."""
    if any(is_product(n) or is_convolution(n) for n in group):
        return True
    for node in group:
        facts.reasons.setdefault(node, POINTWISE)
    return False


def _trim(group: list[fx.Node], facts: Facts, backward: bool) -> list[fx.Node]:
    """Leave the views at the borders outside, where they cost nothing.

    A slice of an input stays: read once, cut in the tile. A slice that leaves the region goes: a
    view of the whole value, as in eager. So do gathers that others use as well: their rows are in memory anyway.
    In a backward graph a gather also goes with the sum that it is for, where others use that: one kernel of Inductor's
    makes it, while loader warps would keep a region waiting that has more to load than any other (an edge's MLP of
    MeshGraphNets: 203 us with the gather, 89 without, and about 25 for the sum by itself; H200).
    """
    members = set(group)
    gathers = [n for n in group if is_gather(n)]
    if sum(_row_bytes(n) for n in gathers) > MOST_GATHERED_BYTES:
        members.difference_update(gathers)
        facts.reasons.update(dict.fromkeys(gathers, WIDE_GATHER))
    for added in _added(gathers, members) if backward else ():
        members.difference_update(added)
        facts.reasons.update(dict.fromkeys(added, ADDED_GATHER))
    changed = True
    while changed:
        changed = False
        for node in [*group, *reversed(group)]:
            if node in members and (is_view(node) or is_gather(node)) and _borders(node, members, facts):
                members.discard(node)
                changed = True
    return [n for n in group if n in members]


def _added(gathers: Iterable[fx.Node], members: set[fx.Node]) -> Iterator[list[fx.Node]]:
    """Gathers that are for a sum alone, which is used outside of the region too; with views between and that sum."""
    for gather in gathers:
        chain = [gather]
        while len(chain[-1].users) == 1 and (is_view(chain[-1]) or chain[-1] is gather):
            chain.append(next(iter(chain[-1].users)))
        *rows, total = chain
        if rows and total.target is aten.add.Tensor and total in members:
            others = set(total.all_input_nodes) - set(rows)
            if others.isdisjoint(members) and not total.users.keys() <= members:
                yield chain


def _row_bytes(node: fx.Node) -> int:
    """Bytes of a row of a node's value."""
    fake = tensor_of(node)
    return hint(fake.shape[-1]) * fake.element_size()


def _borders(node: fx.Node, members: set[fx.Node], facts: Facts) -> bool:
    """Whether a view or gather of ``members`` is at their border, where it can as well stay outside."""
    if not node.users.keys() & members:
        return True
    if is_gather(node):
        return not node.users.keys() <= members
    return not facts.tiles[node] & members and (not is_slice(node) or _thin(node, members))


def _thin(node: fx.Node, members: set[fx.Node]) -> bool:
    """Whether the region uses less than half of what it would load to take this slice."""
    whole = node.args[0]
    fake = value(whole)
    if fake is None or not isinstance(whole, fx.Node) or not isinstance(fake.shape[-1], int):
        return False
    if any(u in members and not is_slice(u) for u in whole.users):
        return False
    parts = {str(u.args[1:]): value(u) for u in whole.users if u in members and is_slice(u)}
    used = sum(p.shape[-1] if p is not None and p.dim() == fake.dim() else 1 for p in parts.values())
    return bool(2 * used < fake.shape[-1])
