"""Rules of ragged axes and of sums with a running maximum, each with what is wrong in the message."""

from __future__ import annotations

from tilestream.errors import VerifyError
from tilestream.ir.axes import COMBINES, At, around, outer_axes
from tilestream.ir.axis_rules import each_op
from tilestream.ir.derive import sums
from tilestream.ir.pipeline import INDEX_BYTES, Pipeline, Role, Transport


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
