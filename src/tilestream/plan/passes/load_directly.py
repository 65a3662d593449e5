"""Rows through an index, loaded by the lanes that compute with them and by no warp of their own."""

from __future__ import annotations

from dataclasses import replace

from tilestream.errors import VerifyError
from tilestream.ir.pipeline import Pipeline, Stage, TileOp


def load_directly(p: Pipeline) -> Pipeline:
    """``own=1`` at every load through an index.

    Raises:
        VerifyError: there is none: the pipeline would be the same.
    """
    if not any(op.index for s in p.stages for op in s.ops):
        raise VerifyError("no rows come through an index", "use it for gathers")
    return p.with_stages(tuple(_direct(s) for s in p.stages))


def _direct(stage: Stage) -> Stage:
    def own(op: TileOp) -> TileOp:
        return replace(op, attrs=(*op.attrs, ("own", 1))) if op.index else op

    return replace(stage, ops=tuple(map(own, stage.ops)))
