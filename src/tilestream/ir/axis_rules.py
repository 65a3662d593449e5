"""What a legal pipeline of any axes is (its ops in plain form), ragged ones and sums with a running maximum among them:
rules, each with its arithmetic in the message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import ceil, gcd, prod

from tilestream.errors import VerifyError
from tilestream.ir.axes import COMBINES, At, Axis, Level, around, outer_axes
from tilestream.ir.derive import WRITES, Partial, divided, placement, sums
from tilestream.ir.pipeline import DTYPE_BYTES, INDEX_BYTES, Pipeline, Queue, Role, Stage, TileOp, Transport
from tilestream.ir.rings import at_once, blocks, in_flight, keyed, least_depth
from tilestream.ir.ways import between

MOST_WORKERS = {Level.CLUSTER: 16, Level.WARPGROUP: 2}
"""Hopper's largest cluster (non-portable size), and the consumer warpgroups of a CTA."""


def axes_agree(p: Pipeline) -> None:
    """One size an axis, everywhere, and one way to find its bounds."""
    seen: dict[str, Axis] = {}
    for axis in p.axes():
        first = seen.setdefault(axis.name, axis)
        if first.size != axis.size:
            raise VerifyError(
                f"axis {axis.name!r} has sizes {first.size} and {axis.size}", "give the second another name"
            )
        if first != axis:
            raise VerifyError(
                f"axis {axis.name!r} is {_bounds(first)} here and {_bounds(axis)} there", "give the second another name"
            )


def _bounds(axis: Axis) -> str:
    return f"{axis.bounds}[{axis.of}]" if axis.of else "not ragged"


def axes_are_covered(p: Pipeline) -> None:
    """A view has a coordinate a dimension, inside of it; together the slices of a tensor or tile cover it.

    An axis of a result comes from an operand, and a loop runs over an axis that some op of the stage has.
    """
    size = {a.name: a.size for a in p.axes()}
    dims = {t.name: tuple(a.name for a in t.axes) for t in p.tensors}
    outer, made = outer_axes(p.ragged.values()), p.tiles()
    dims |= {n: tuple(a.name for a in t.axes) for n, t in made.items()}
    slices: dict[tuple[str, int, bool], set[tuple[int, int]]] = defaultdict(set)
    for where, _, op in each_op(p):
        given = around((a for v in op.views for a in v.axes), outer)
        for axis in op.result_axes:
            if axis not in given and size[axis] != 1 and op.kind != "fill":
                raise VerifyError(
                    f"{where}: no operand has axis {axis!r} of the result", "name it in an operand's view"
                )
        for k, view in enumerate(op.views):
            own = dims[view.of]
            if len(view.at or ()) != len(own):
                raise VerifyError(
                    f"{where}: {len(view.at or ())} coordinates of {view.of!r}, and it has {len(own)} dimensions",
                    f"give one for each of {', '.join(own)}",
                )
            for i, (at, dim) in enumerate(zip(view.at or (), own, strict=True)):
                _check_index(p, at.index, where)
                unknown = next((a for a in at.axes if a not in size), None)
                if unknown is not None:
                    raise VerifyError(
                        f"{where} reads {view.of!r} by axis {unknown!r}, which nothing has", "use another"
                    )
                if at.index or len(at.axes) != 1 or at.strides or op.kind == "cat":
                    continue  # a gather, a tap and a part that is shifted to its place: what is outside reads as zero
                by, whole = size[at.axes[0]], size[dim]
                if at.axes[0] in outer.values() and at.axes[0] != dim and view.of not in made:
                    continue  # a table's rows by the nodes' own numbers; it may have more of them
                if at.axes[0] != dim and (by is None or whole is None):
                    raise VerifyError(
                        f"{where} reads {view.of!r} along {dim!r} by {at.axes[0]!r}, another axis of unknown size",
                        f"say by which index, as in {view.of}[index[{at.axes[0]}]]",
                    )
                if by is not None and whole is not None:
                    if at.offset < 0 or at.offset + by > whole:
                        raise VerifyError(
                            f"{where}: {view.of!r} dimension {dim!r}: {at.offset} + {by} = {at.offset + by} > {whole},"
                            " its size",
                            "read what is there",
                        )
                    slices[view.of, i, op.kind in WRITES and k == len(op.views) - 1].add((at.offset, at.offset + by))
    _check_slices(slices, dims, size)
    for stage in p.stages:
        for loop in stage.loops:
            if all(loop.axis not in around(op.mentions, outer) for op in stage.ops):
                raise VerifyError(
                    f"stage {stage.name!r} loops over {loop.axis!r}, which none of its ops has",
                    f"loop over one of: {', '.join(sorted(set().union(*(op.mentions for op in stage.ops))))}",
                )
            if loop.tile < 1:
                raise VerifyError(f"stage {stage.name!r} takes {loop.tile} of {loop.axis!r} a step", "take at least 1")


def _check_index(p: Pipeline, index: str, where: str) -> None:
    if not index:
        return
    tensor = next((t for t in p.tensors if t.name == index), None)
    if tensor is None:
        raise VerifyError(f"{where} gathers by {index!r}, which is no tensor of the pipeline", "add it as an input")
    if tensor.dtype not in INDEX_BYTES or len(tensor.axes) != 1:
        raise VerifyError(
            f"{where} gathers by {index!r} of dtype {tensor.dtype} with {len(tensor.axes)} dimensions",
            f"an index has one dimension and is one of {', '.join(INDEX_BYTES)}",
        )


def _check_slices(slices, dims, size) -> None:
    """Of an output, all must be written; of what is read, parts may be left out."""
    for (name, i, written), parts in slices.items():
        whole, covered, end = size[dims[name][i]], 0, 0
        for start, stop in sorted(parts):
            covered, end = covered + max(0, stop - max(start, end)), max(end, stop)
        if written and covered != whole:
            raise VerifyError(
                f"output {name!r} dimension {i}: stores cover {covered} of {whole}: {sorted(parts)}", "store the rest"
            )


def tensors_have_their_roles(p: Pipeline) -> None:
    """Outputs are written and not read, others read and not written; dtypes are known."""
    for t in p.tensors:
        if t.dtype not in DTYPE_BYTES and (t.dtype not in INDEX_BYTES or t.role is Role.OUTPUT):
            raise VerifyError(f"tensor {t.name!r} has dtype {t.dtype!r}", f"use one of {', '.join(DTYPE_BYTES)}")
    for _, _, op in each_op(p):
        for name in op.params:
            output = p.tensor(name).role is Role.OUTPUT
            if output != (op.kind in WRITES):
                what = "reads output" if output else "writes input or parameter"
                raise VerifyError(f"{op.source or op.kind}: {what} {name!r}", "use a tensor of the other role")


def partial_results_are_summed(p: Pipeline) -> None:
    """What each worker has of a sum is combined before it counts as the sum, and by what combines it."""
    for where, stage, op in each_op(p):
        if op.kind == "store":
            scattered = next((at for at in op.views[-1].at or () if at.index), None)
            if scattered is not None and not p.ragged.keys() & set(scattered.axes):  # those in an order: at the call
                raise VerifyError(
                    f"{where}: several {', '.join(scattered.axes)} can have one {scattered.index}: the last would win",
                    "add them: store_add (+>)",
                )
            lost = sums(op)
            if lost:
                raise VerifyError(
                    f"{where}: a store cannot sum over {', '.join(sorted(lost))}: the last would win",
                    "sum into a tile first, or store_add (+>)",
                )
        if op.kind == "store_add" and (maker := stage.makers.get(op.ins[0])) is not None:
            wrong = {h.combine for d in stage.mesh if isinstance(h := placement(maker, d, stage), Partial)}
            wrong -= {"sum"}
            if wrong:
                raise VerifyError(f"{where} adds in memory what is to be combined by {wrong.pop()}", "store it instead")


def peers_exist(p: Pipeline) -> None:
    """Meshes fit the hardware, and every worker of a direction has a part of what it divides."""
    size = {a.name: a.size for a in p.axes()}
    for stage in p.stages:
        for level, most in MOST_WORKERS.items():
            parts = [d.size for d in stage.mesh if d.level is level]
            if prod(parts) > most:
                raise VerifyError(
                    f"stage {stage.name!r}: {' x '.join(map(str, parts))} = {prod(parts)} > {most} workers at level"
                    f" {level.value!r}",
                    "use fewer",
                )
        for d in stage.mesh:
            if d.size < 1:
                raise VerifyError(
                    f"stage {stage.name!r} has {d.size} workers at level {d.level.value!r}", "use at least 1"
                )
            if not any(divided(op, d, stage) for op in stage.ops) and d.size > 1:
                raise VerifyError(
                    f"stage {stage.name!r}: none of its ops has an axis of the {d.size} workers that divide"
                    f" {', '.join(d.axes) or 'nothing'}: all would do the same",
                    "name an axis that an op has",
                )
        for axis in dict.fromkeys(a for d in stage.mesh for a in d.axes):
            known, workers, tile = size.get(axis), stage.parts(axis), stage.blocks.get(axis, 1)
            blocks = ceil(known / tile) if known is not None else workers
            # A sum of one column has one owner; what the others do is divided by the first axis of their direction.
            one = known == 1 and all(d.axes[0] != axis for d in stage.mesh if axis in d.axes and d.size > 1)
            if blocks < workers and not one:
                raise VerifyError(
                    f"stage {stage.name!r}: {axis} {known} / {tile} = {blocks} blocks < {workers} workers"
                    f" that divide it: {workers - blocks} would have none",
                    "use fewer workers, or a smaller tile",
                )


def rings_hold_what_is_in_flight(p: Pipeline) -> None:
    """A ring on chip holds a step of both ends; and all there is where another way to its consumer sums over it."""
    size = {a.name: a.size for a in p.axes()}
    for q in p.queues:
        if q.transport is Transport.DRAM:
            continue
        _check_steps(p, q)
        for axis, block in keyed(p, q).items():
            for stage in map(p.stage, (q.producer, *q.consumers)):
                if stage.blocks.get(axis, block) != block:
                    raise VerifyError(
                        f"queue of {q.tile!r}: stage {q.producer!r} makes {block} of {axis!r} a tile, stage"
                        f" {stage.name!r} takes {stage.blocks[axis]}",
                        "loop in equal tiles",
                    )
            for consumer in q.consumers:
                for middle in between(p, q.producer, consumer):
                    if not any(axis in sums(op) and op.out is not None for op in p.stage(middle).ops):
                        continue
                    whole = size[axis]
                    need = f"{whole} / {block} = {ceil(whole / block)}" if whole else f"all {axis}"
                    if whole is None or q.depth < ceil(whole / block):
                        raise VerifyError(
                            f"queue of {q.tile!r} has depth {q.depth}, but stage {consumer!r} takes none before stage"
                            f" {middle!r} has summed over {axis!r}: {need} tiles",
                            "let the queue be in DRAM, or make the tile again in a second pass",
                        )


def _check_steps(p: Pipeline, q: Queue) -> None:
    """Both ends of a ring can always make a step."""
    axes, size = keyed(p, q), p.sizes()
    first = at_once(p.stage(q.producer), axes, size) or [1] * len(axes)
    for consumer in q.consumers:
        last = at_once(p.stage(consumer), axes, size)
        if last is None:
            raise VerifyError(
                f"queue of {q.tile!r}: stage {consumer!r} loops over none of {', '.join(axes)}, so it"
                " takes all tiles at once, and how many is not known",
                "let the queue be in DRAM, or loop over it",
            )
        made, taken = in_flight([first, last], blocks(axes, size) if len(axes) > 1 else [])
        need = least_depth(made, taken)
        if q.depth < need:
            raise VerifyError(
                f"queue of {q.tile!r} has depth {q.depth} < {need}: the workers of stage {q.producer!r} make {made} at"
                f" once, those of {consumer!r} take {taken}: {made} + {taken} - {gcd(made, taken)} = {need}",
                f"use a depth of at least {need}",
            )


def each_op(p: Pipeline) -> Iterator[tuple[str, Stage, TileOp]]:
    """Each op with its stage and what messages call it."""
    return ((op.source or f"{op.kind} in stage {s.name!r}", s, op) for s in p.stages for op in s.ops)


def ragged_axes_lie_in_others(p: Pipeline) -> None:
    """Each has an axis around it, bounds to read, and its loop inside of that axis's."""
    known = {a.name for t in p.tensors for a in t.axes}.union(*(op.mentions for s in p.stages for op in s.ops))
    known |= {loop.axis for s in p.stages for loop in s.loops}
    outer = outer_axes(p.ragged.values())
    for axis in p.ragged.values():
        what = f"axis {axis.name!r} lies within {axis.of!r} by {axis.bounds!r}"
        if axis.of not in known:
            raise VerifyError(
                f"{what}, and nothing has axis {axis.of!r}", "name the axis around it, or give a tensor that axis"
            )
        if axis.name in around((axis.of,), outer):
            raise VerifyError(f"{what}, so it lies within itself", "let one of the two not be ragged")
        bounds = next((t for t in p.tensors if t.name == axis.bounds), None)
        if bounds is None:
            raise VerifyError(f"{what}, which is no tensor of the pipeline", "add it as a parameter")
        if bounds.dtype not in INDEX_BYTES or len(bounds.axes) != 1 or bounds.role is Role.OUTPUT:
            raise VerifyError(
                f"{what}, an {bounds.role.value} of dtype {bounds.dtype} with {len(bounds.axes)} dimensions",
                f"bounds have one dimension, are read, and are one of {', '.join(INDEX_BYTES)}",
            )
    for stage in p.stages:
        loops = [loop.axis for loop in stage.loops]
        for i, inner in enumerate(loops):
            later = [axis for axis in loops[i + 1 :] if axis in around((inner,), outer)]
            if later:
                raise VerifyError(
                    f"stage {stage.name!r} loops over {inner!r} outside of {later[0]!r}, in which it lies",
                    "swap the two loops",
                )
    for q in p.queues:
        ragged = [a.name for a in p.tiles()[q.tile].axes if a.of]
        if ragged and q.transport is not Transport.DRAM:
            raise VerifyError(
                f"queue of {q.tile!r}: how many positions of {ragged[0]!r} lie within one of"
                f" {outer[ragged[0]]!r} is read at the call, so how many tiles there are is not known",
                "let the queue be in DRAM, or put both stages into one",
            )


def combines_are_defined(p: Pipeline) -> None:
    """A softmax is of a product: a score that has all that is summed over, and values that it weighs. What stands
    for a maximum or minimum of nothing stands for no sum."""
    for where, _, op in each_op(p):
        if op.attr("empty") is not None and op.combine not in ("max", "min"):
            raise VerifyError(
                f"{where}: attribute 'empty' of a product that is combined by {op.combine}",
                "remove it: only a maximum or a minimum of nothing is not finite",
            )
        if op.combine not in COMBINES:
            raise VerifyError(f"{where} combines by {op.combine!r}", f"use one of {', '.join(COMBINES)}")
        if op.combine != "softmax":
            continue
        if op.kind != "product" or len(op.views) < 2:
            raise VerifyError(
                f"{where}: softmax combines a score and what it weighs, not a {op.kind} of {len(op.views)}",
                "write a product of two operands or three, the score first",
            )
        lacking = sums(op).difference(op.views[0].axes)
        if lacking or not sums(op):
            what = f"lacks {', '.join(sorted(lacking))}" if lacking else "has all axes of the result: nothing is summed"
            raise VerifyError(f"{where}: the score {op.views[0].of!r} {what}", "give it every axis that is summed over")


def edges_stay_with_their_nodes(p: Pipeline) -> None:
    """What is ragged is read and summed by position of the axis around it: nothing reads edges of other nodes."""
    outer = outer_axes(p.ragged.values())
    tiles = p.tiles()
    dims = {t.name: t.axes for t in p.tensors} | {n: t.axes for n, t in tiles.items()}
    from_memory = {q.tile for q in p.queues if q.transport is Transport.DRAM}
    for where, stage, op in each_op(p):
        made = stage.defined()
        for axis in sorted(sums(op)):
            if axis in outer and outer[axis] not in around(op.result_axes, outer):
                raise VerifyError(
                    f"{where} sums over {axis!r} of all {outer[axis]!r} at once",
                    f"sum into a tile that has {outer[axis]!r}, then that",
                )
        for view in op.views:
            for at, dim in zip(view.at or (), dims[view.of], strict=True):
                if dim.of and at != At((dim.name,)) and (view.of in tiles or not at.index):
                    raise VerifyError(
                        f"{where} reads {view.of!r} at {', '.join(at.axes) or at.offset} of {dim.name!r}, which may be"
                        f" of another {dim.of!r}",
                        f"read it at {dim.name}" + (", or through an index" if view.of not in tiles else ""),
                    )
                if at.index and view.of in made and view.of not in from_memory and set(at.axes) & outer.keys():
                    raise VerifyError(
                        f"{where} looks up {view.of!r} through {at.index!r} while other positions of {dim.name!r} are"
                        " yet to be made",
                        "make it in a stage before, with a queue in DRAM",
                    )
