"""The directions of a mesh that share a tile: rows, groups that split the hidden axis, CTAs of a group."""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.errors import VerifyError
from tilestream.ir.axes import Level, Spread
from tilestream.ir.pipeline import Stage
from tilestream.kernels.product.block import Block


@dataclass(frozen=True)
class Directions:
    """Sizes and levels. ``columns`` exchange the middle (all-gather), or each makes all of it (not ``divides_middle``);
    ``groups`` add partial results.

    At most one of the two is a cluster: it has no room for the middle of a group and all groups of a column besides.
    """

    row_tiles: int
    groups: int
    columns: int
    groups_at: Level
    columns_at: Level = Level.GRID
    divides_middle: bool = True


def find_directions(stage: Stage, block: Block) -> Directions:
    """What each direction of the mesh is to the block.

    ``(out, hid)`` are the CTAs of a group: they make columns of the middle, gather it, and own columns of the result.
    ``(hid, out)`` are the groups: their partial results are scattered over them, each part added by one. ``(hid,)``
    are groups too, where the partial results are added in memory. ``(out,)`` are the CTAs of a group where each makes
    all columns of the group's middle: nothing is gathered. Of one layer, which has no middle, the former are
    ``(out, ...)`` of all results, and ``hid`` is what it sums over.

    Raises:
        VerifyError: two directions are the same thing, one is none of these, or is at a level without a kernel.
    """
    found: dict[str, Spread] = {}
    for d in stage.mesh:
        if d.level is Level.WARPGROUP:
            if d.axes != (block.rows,):
                raise VerifyError(
                    f"stage {stage.name!r}: warpgroups divide {', '.join(d.axes) or 'columns'}, in a shared tile rows",
                    f"use {block.rows!r}, or leave the direction out",
                )
            continue
        what = _meaning(d, block)
        if not what:
            raise VerifyError(
                f"stage {stage.name!r}: a direction over {', '.join(d.axes) or 'columns'} is none of a shared tile's",
                f"use ({block.rows},), ({', '.join(block.shared_by_columns)}) or ({', '.join(block.shared_by_groups)})",
            )
        if what in found:
            raise VerifyError(f"stage {stage.name!r} has two directions of {what}", "make them one")
        if d.level is Level.CLUSTER and what == "row tiles" and d.size > 1:
            raise VerifyError(
                f"stage {stage.name!r}: {what} over a cluster have no kernel: they exchange nothing", "use Level.GRID"
            )
        found[what] = d
    groups = found.get("groups")
    scattered = groups is None or set(block.outs) <= {*groups.axes}
    if groups is not None and groups.size > 1 and not (scattered or block.adds):
        raise VerifyError(
            f"stage {stage.name!r}: one group would store the sum of {groups.size} partial results",
            f"divide ({', '.join(block.shared_by_groups)}): each group adds a part",
        )

    def size(what: str) -> int:
        return found[what].size if what in found else 1

    def level(what: str) -> Level:
        return found[what].level if size(what) > 1 else Level.GRID

    if level("groups") is level("columns") is Level.CLUSTER:
        raise VerifyError(
            f"stage {stage.name!r}: a cluster of {size('groups')} x {size('columns')} CTAs that gather the middle and"
            " add partial results has no kernel so far",
            "leave one of the two to Level.GRID: through the L2",
        )
    columns = found.get("columns")
    divides = columns is None or block.one_layer or columns.axes != block.outs
    if not divides and level("columns") is Level.CLUSTER:
        raise VerifyError(
            f"stage {stage.name!r}: CTAs of a cluster divide {', '.join(block.outs)} alone, and exchange nothing",
            "use Level.GRID",
        )
    return Directions(size("row tiles"), size("groups"), size("columns"), level("groups"), level("columns"), divides)


def _meaning(d: Spread, block: Block) -> str:
    if d.axes == (block.rows,):
        return "row tiles"
    columns, groups = block.shared_by_columns, block.shared_by_groups
    if d.axes[: len(columns)] == columns or d.axes == block.outs:
        return "columns"
    return "groups" if d.axes in (groups, groups[:1]) else ""
