"""Whether a program is what can share a tile, and what it is then."""

from __future__ import annotations

from tilestream.errors import IRError, VerifyError
from tilestream.ir.once import once
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.kernels.product.shared_tile.block import Block
from tilestream.kernels.product.shared_tile.finder import Finder
from tilestream.kernels.product.shared_tile.residual import written_out

NARROW = 512
"""Columns of rows and of layers that a stage of a row stream holds: a layer alone that is no wider stays there."""


def find_block(stage: Stage, pipeline: Pipeline) -> Block:
    """The block that the ops of ``stage``, which are in plain form, make up.

    Raises:
        VerifyError: they are something else; names the op that does not fit.
    """
    return _only_block(pipeline) if pipeline.stages == (stage,) else Finder(stage, pipeline).block()


@once
def _only_block(pipeline: Pipeline) -> Block:
    """The block that a pipeline's only stage is."""
    return Finder(pipeline.stages[0], pipeline).block()


def is_block(program: Pipeline) -> bool:
    """Whether ``program``, one stage of row ops, can share a tile: two layers, or one that no row stream holds."""
    return _found(program) is not None


def is_projection(program: Pipeline) -> bool:
    """Whether it is such a program of one layer."""
    found = _found(program)
    return found is not None and found.one_layer


@once
def _found(program: Pipeline) -> Block | None:
    if len(program.stages) != 1 or all(op.kind != "linear" for op in program.stages[0].ops):
        return None
    try:
        written = written_out(program)
        found = find_block(written.stages[0], written)
    except (VerifyError, IRError):
        return None
    wide = max(found.sizes[0], *(last.columns for last in found.lasts)) > NARROW
    return found if wide or not found.one_layer else None
