"""Whether tiles over the grid can be made of a stage: two layers of rows, or one whose results are made alike."""

from __future__ import annotations

from tilestream.errors import VerifyError
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.kernels.product.shared_tile import Block, Last, find_block


def find_layers(stage: Stage, pipeline: Pipeline) -> Block:
    """Two layers, or one, of rows; of several results, as queries, keys and values, the same is made.

    Raises:
        VerifyError: the ops of ``stage``, in plain form, are something else.
    """
    found = find_block(stage, pipeline)
    if found.grid is not None:
        raise VerifyError(f"stage {stage.name!r} reads pixels at taps, and tiles are of rows", "share a tile instead")
    if found.one_layer and found.before:
        raise VerifyError(
            f"stage {stage.name!r} has one layer, and a warp that makes rows in front of it is slower than products",
            "leave what is in front outside",
        )
    if len({_epilogue(last, found, pipeline) for last in found.lasts}) > 1:
        raise VerifyError(
            f"stage {stage.name!r}: what is done to its {len(found.lasts)} results differs: tiles have one epilogue",
            "share a tile, or make them one by one",
        )
    return found


def _epilogue(last: Last, block: Block, pipeline: Pipeline) -> tuple[object, ...]:
    """What is done to a sum, by the places of tiles and vectors and not by their names: equal for equal epilogues."""
    places = {last.total: 0}
    vectors = block.vectors(last.after)
    made: list[object] = []
    for op in last.after:
        read = tuple(
            (vectors.index(v), pipeline.tensor(v.of).dtype, tuple((len(at.axes), at.offset) for at in v.at or ()))
            for v in op.views[len(op.tiles) :]
            if v in vectors
        )
        made.append((op.kind, op.attrs, tuple(places[name] for name in op.ins), read))
        if op.out is not None:
            places[op.out.name] = len(places)
    return (*made, places[last.result], pipeline.tensor(last.output).dtype)
