"""From statements to regions: what is fused, in which order, and the stream graph of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tilestream.errors import SparseError
from tilestream.sparse.einsum import MASKS, Declared, EinsumProgram, Move, fresh_name
from tilestream.sparse.fusion import Fused, Leaf, NotFusible, Op, fuse
from tilestream.sparse.lowering.blocks import Blocks
from tilestream.sparse.lowering.joins import range_name
from tilestream.sparse.lowering.lower import lower
from tilestream.sparse.lowering.parallel import expand_lanes
from tilestream.sparse.lowering.partition import Group, ancestors, check_names, groups, outputs_of, sequence
from tilestream.sparse.lowering.states import StreamState
from tilestream.sparse.lowering.tiles import Edge, edge_name
from tilestream.sparse.orders.work import extents, ranked
from tilestream.sparse.region import Region, Source
from tilestream.sparse.schedule import LANES, Order, Schedule
from tilestream.sparse.storage import Format
from tilestream.sparse.stream.builder import Builder
from tilestream.sparse.stream.graph import with_broadcasts
from tilestream.sparse.table import fusion_table


def plan(program: EinsumProgram, schedule: Schedule) -> list[Region | Move]:
    """Regions and moves in an order in which they can run.

    Raises:
        SparseError: a schedule that names what is not there, regions that need each other, or an operator without a
            meaning for what its operand does not store.
    """
    known: dict[str, Declared] = dict(program.inputs)
    steps: list[Region | Move] = []
    taken: set[str] = set()
    check_names(program, schedule)
    for step in sequence(program, groups(program, schedule)):
        if isinstance(step, Move):
            known[step.name] = _moved(step, [known[x] for x in step.operands])
            steps.append(step)
        else:
            for region, declared in _regions(program, step, schedule, known):
                known.update(declared)
                steps.append(replace(region, name=fresh_name(region.name, taken)))
    _check_used(schedule, [step for step in steps if isinstance(step, Region)])
    return steps


def _check_used(schedule: Schedule, regions: Sequence[Region]) -> None:
    """Every region and index that a schedule names is there: a misspelt one would change nothing unseen."""
    names = {region.name.split("/")[0] for region in regions} | {region.name for region in regions}
    indices = {index for region in regions for index in region.order}
    order = schedule.order
    given = set(order) if isinstance(order, Mapping) else set()
    given |= {key.rpartition(":")[0] for key in schedule.parallel if ":" in key}
    if unknown := sorted(given - names):
        raise SparseError(f"the schedule names region {unknown[0]!r}", f"use {', '.join(sorted(names))}")
    given = set(order) if isinstance(order, tuple) else set()
    given |= {key.rpartition(":")[2] for key in schedule.parallel}
    if unknown := sorted(given - indices):
        raise SparseError(
            f"the schedule names index {unknown[0]!r}", f"use an index of a region: {', '.join(sorted(indices))}"
        )


_MAKES_ZEROS = ("tril", "triu", "diag_embed", "pad")
"""Moves that leave places without an entry."""
_NEEDS_ZEROS = (*MASKS, "topk_values", "topk_places", "adjacency", *_MAKES_ZEROS)
"""Moves for which what is not stored has to be 0."""


def _moved(move: Move, operands: Sequence[Declared]) -> Declared:
    """How a moved tensor is stored: dense if all that it comes from is, else compressed.

    Raises:
        SparseError: tensors whose absent values stand for different things, or for minus infinity where that is lost.
    """
    if move.eager is not None:
        return Declared(move.shape)
    fills = {x.fill for x in operands}
    if len(fills) > 1 or (fills != {0.0} and move.kind in _NEEDS_ZEROS):
        raise SparseError(
            f"{move} ({move.source}): a tensor that a mask filled with minus infinity is in it",
            "apply softmax or exp to what is masked first, or mask afterwards",
        )
    if move.kind in (*MASKS, "adjacency"):
        return Declared(move.shape, Format(("compressed",) * len(move.shape)))
    if move.kind in ("topk_values", "topk_places"):
        return Declared(move.shape)
    if move.kind not in _MAKES_ZEROS and all(x.format is None or "compressed" not in x.format.levels for x in operands):
        return Declared(move.shape)
    rank = len(move.shape)
    return Declared(move.shape, Format(("compressed",) * rank), fill=operands[0].fill if operands else 0.0)


def _regions(
    program: EinsumProgram, group: Group, schedule: Schedule, known: Mapping[str, Declared]
) -> Iterator[tuple[Region, dict[str, Declared]]]:
    """The region of a group; where a result cannot be streamed in any order, the regions before and after it."""
    outputs = outputs_of(program, group.statements)
    try:
        yield _region(program, group, outputs, schedule, known)
    except NotFusible as cut:
        first = ancestors(group.statements, cut.statement)
        rest = tuple(s for s in group.statements if s not in first)
        if not rest:
            raise SparseError(f"region {group.name!r} cannot be lowered: {cut}", "choose another order") from cut
        note = f"{cut.statement} goes through memory: {cut.why}"
        here = dict(known)
        for part in (
            Group(f"{group.name}/{cut.statement}", first, (), False),
            Group(group.name, rest, (*group.notes, note), False),
        ):
            for region, declared in _regions(program, part, schedule, here):
                here.update(declared)
                yield region, declared


def _region(
    program: EinsumProgram, group: Group, outputs: list[str], schedule: Schedule, known: Mapping[str, Declared]
) -> tuple[Region, dict[str, Declared]]:
    fused = fuse(program, group.statements, outputs, known)
    copies = _break_cycles(fused)
    blocks = Blocks(fused, schedule.block) if schedule.block > 1 else None
    orders = tuple(fused.order.orders(schedule.max_orders))
    chosen = schedule.order_of(group.name)
    chosen = None if isinstance(chosen, int) and not group.whole else chosen  # it numbers the orders of the whole
    lanes = {i: n for i, n in schedule.lanes_of(group.name).items() if i in fused.sizes}
    if math.prod(lanes.values()) > LANES:
        raise SparseError(f"{math.prod(lanes.values()):,} lanes of region {group.name!r}", f"use at most {LANES:,}")
    failed: NotFusible | None = None
    for order in _candidates(fused, orders, chosen, group.name):
        views = _views(fused, order, blocks)
        try:
            build, made = lower(fused, order, views, lanes, schedule, blocks)
        except NotFusible as error:
            failed = failed or error
            continue
        copies += [
            f"{leaf.tensor} is read from a copy in the order {' '.join(_levels(leaf, order))}"
            for leaf in views
            if leaf.declared.format and not leaf.declared.free and leaf.stored != _levels(leaf, order)
        ]
        return _finish(program, group, fused, order, orders, build, made, views, blocks, tuple(dict.fromkeys(copies)))
    assert failed is not None
    raise failed


def _break_cycles(fused: Fused) -> list[str]:
    """Take away the order of the tensor views that no order fits; they are read from permuted copies."""
    notes, last = [], {str(view): n for n, view in enumerate(fused.views)}
    while cycle := fused.order.cycle():
        around = list(zip(cycle, cycle[1:] + cycle[:1], strict=True))
        owners = [owner for edge in around for owner in fused.order.edges.get(edge, ())]
        offender = max((o for o in owners if o not in fused.order.fixed), key=lambda o: last.get(o, -1))
        fused.order = fused.order.without(offender)
        notes.append(f"{offender} is read in another order: {' before '.join(cycle)} before {cycle[0]} is a cycle")
    return notes


def _candidates(
    fused: Fused, orders: tuple[tuple[str, ...], ...], chosen: Order | None, region: str
) -> list[tuple[str, ...]]:
    """The order that was set, or all, cheapest first."""
    if isinstance(chosen, int):
        if not 0 <= chosen < len(orders):
            raise SparseError(f"region {region!r} has {len(orders)} orders, not number {chosen}", "use a smaller one")
        return [orders[chosen]]
    if chosen is not None:
        if unknown := [i for i in fused.sizes if i not in chosen]:
            wanted = ", ".join(fused.sizes)
            raise SparseError(f"the order of region {region!r} lacks index {unknown[0]!r}", f"name all of: {wanted}")
        order = tuple(i for i in chosen if i in fused.sizes)
        if reason := fused.order.broken(order):
            raise SparseError(f"order {' '.join(order)} of region {region!r}: {reason}", "keep that order")
        return [order]
    return ranked(fused, orders)


def _blocked_output(
    program: EinsumProgram, op: Op, state: StreamState, blocks: Blocks
) -> tuple[tuple[int, ...], Format]:
    """Shape and format of a result in blocks: scalar dimensions first, then its tiles' rows and columns."""
    dims = blocks.dims(op)
    sizes = dict(zip(op.indices, program.shapes[op.name], strict=True))
    kinds = tuple("dense" if level.full else "compressed" for level in state.levels)
    order = tuple(dims.index(level.index) for level in state.levels)
    whole = [Edge(sizes[i], blocks.block).blocks * blocks.block if i in blocks.blocked else sizes.get(i) for i in dims]
    return tuple(blocks.block if n is None else n for n in whole), Format(kinds, order, blocks.block)


def _levels(leaf: Leaf, order: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(leaf.indices, key=order.index))


def _views(fused: Fused, order: tuple[str, ...], blocks: Blocks | None) -> dict[Leaf, tuple[str, Format]]:
    """Name and format of every leaf; one tensor in two formats has two names."""
    found: dict[Leaf, tuple[str, Format]] = {}
    taken: dict[str, Format] = {}
    for leaf in fused.views:
        if isinstance(leaf, Leaf):
            base, format = _view(leaf, order, fused, blocks)
            name, n = base, 1
            while taken.setdefault(name, format) != format:
                name, n = f"{base}#{n}", n + 1
            found[leaf] = name, format
    return found


def _view(leaf: Leaf, order: tuple[str, ...], fused: Fused, blocks: Blocks | None) -> tuple[str, Format]:
    """Name and format of a tensor with its levels in a global order."""
    wanted = tuple(leaf.indices.index(i) for i in _levels(leaf, order))
    given = leaf.declared.format or Format(("dense",) * len(leaf.indices))
    kinds = tuple(given.levels[given.order.index(d)] for d in wanted)
    name = leaf.tensor if wanted == given.order else f"{leaf.tensor}-{','.join(map(str, wanted))}"
    if blocks is None:
        return name, Format(kinds, wanted)
    masks = [v for v in fused.views if isinstance(v, Op) and v.statement.op == "mask"]
    return name, blocks.format(leaf, kinds, wanted, any(v.operands[1] is leaf for v in masks))


def _finish(
    program: EinsumProgram,
    group: Group,
    fused: Fused,
    order: tuple[str, ...],
    orders: tuple[tuple[str, ...], ...],
    build: Builder,
    made: Mapping[str, StreamState],
    views: Mapping[Leaf, tuple[str, Format]],
    blocks: Blocks | None,
    notes: tuple[str, ...],
) -> tuple[Region, dict[str, Declared]]:
    """Writers, lanes and broadcasts: the region as a graph."""
    outputs, declared, scalars = {}, {}, {}
    ends: list[str] = []
    guess = extents(fused, order)
    for name, state in made.items():
        op = fused.roots[name]
        for n, level in enumerate(state.levels):
            attrs = (("tensor", name), ("level", n))
            ends.append(build.add(f"write_{name}_{level.index}", "write_crd", (("crd", level.crd),), attrs))
        ends.append(build.add(f"write_{name}_val", "write_val", (("val", state.port),), (("tensor", name),)))
        own = [level for level in state.levels if level.index in op.indices]
        kinds = tuple("dense" if level.full else "compressed" for level in own)
        format = Format(kinds, tuple(op.indices.index(level.index) for level in own))
        shape = program.shapes[name]
        outputs[name] = (shape, format) if blocks is None else _blocked_output(program, op, state, blocks)
        if blocks is not None:
            scalars[name] = (tuple(op.indices.index(i) if i in op.indices else None for i in blocks.dims(op)), format)
        sizes = tuple(guess.get((op, level.index), float(fused.sizes[level.index])) for level in own)
        declared[name] = Declared(shape, format, sizes, op.fill)
    nodes = expand_lanes(build.live(ends))
    graph = with_broadcasts(group.name, nodes, blocks.block if blocks else 1)
    inputs: dict[str, tuple[Source, Format]] = {}
    edges = {edge_name(i): edge for i, edge in blocks.ragged.items()} if blocks else {}
    by_name = {name: (leaf.tensor, format) for leaf, (name, format) in views.items()}
    for tensor in graph.tensors():
        if tensor in by_name:
            inputs[tensor] = by_name[tensor]
        elif tensor in edges:
            inputs[tensor] = (edges[tensor], Format(("dense",), block=graph.block))
        else:
            size = next((n for i, n in fused.sizes.items() if range_name(i) == tensor), 1)
            inputs[tensor] = (size, Format(("dense",), block=graph.block))
    source = "; ".join(dict.fromkeys(s.source for s in group.statements if s.source))
    region = Region(
        group.name,
        group.statements,
        fusion_table(fused, order),
        graph,
        inputs,
        outputs,
        order,
        orders,
        {name: op.fill for name, op in fused.roots.items() if op.fill},
        (*group.notes, *notes),
        source,
        scalars,
        fused,
        views,
    )
    return region, declared
