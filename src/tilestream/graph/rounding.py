"""What a training graph saves is what it goes on with.

A kernel keeps values in fp32 from op to op, and rounds them where they leave. In a training graph what leaves is read
again by the other half: statistics of unrounded values beside rounded ones make gradients several times as far off as
eager's (MeshGraphNets: 4.6 times).
"""

from __future__ import annotations

from tilestream.ir.pipeline import Tile, TileOp
from tilestream.ir.tileops import OPS


def round_results(ops: tuple[TileOp, ...]) -> tuple[TileOp, ...]:
    """Where a result of less than fp32 is also read by ops that would see it unrounded, they read it rounded.

    Operands of a linear are rounded anyway, through ``cat`` and ``slice`` too, and so is what was loaded or cast.
    """
    stored = {name for op in ops if op.kind == "store" for name in op.ins}
    made: list[TileOp] = []
    names: dict[str, str] = {}
    for op in ops:
        op = op.reading(names)
        made.append(op)
        out = op.out
        is_exact = op.kind in ("load", "cast") or OPS[op.kind].family == "layout"
        if out is None or out.dtype == "f32" or is_exact:
            continue
        if out.name not in stored or not _unrounded(out.name, ops):
            continue
        rounded = Tile.of(f"rounded{len(names)}", out.features, out.dtype)
        made.append(TileOp("cast", rounded, (out.name,), (), (), op.source))
        names[out.name] = rounded.name
    return tuple(made)


def _unrounded(name: str, ops: tuple[TileOp, ...]) -> bool:
    """Whether an op reads the tile in fp32."""
    for op in ops:
        if name not in op.ins or op.kind in ("store", "linear"):
            continue
        if OPS[op.kind].family != "layout" or (op.out is not None and _unrounded(op.out.name, ops)):
            return True
    return False
