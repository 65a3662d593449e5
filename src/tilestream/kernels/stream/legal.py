"""What a stage must be for a kernel of row streams, before its ops are looked at one by one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tilestream.errors import VerifyError
from tilestream.ir.columns import LoopedLayer
from tilestream.ir.pipeline import Pipeline, Residency, Stage, Tile, TileOp
from tilestream.kernels.stream.model import columns_of


def operand_dtype(stage: Stage, pipeline: Pipeline, tiles: Mapping[str, Tile]) -> str:
    """The dtype of all products; without any, that of all loads, or f32 if they differ.

    Raises:
        VerifyError: products differ, or the stage reads nothing.
    """
    products, loads = {}, {}
    for op in stage.ops:
        if op.kind in ("load", "linear"):
            found = loads if op.kind == "load" else products
            found.setdefault(pipeline.tensor(op.params[0]).dtype, op.source or op.kind)
    for name in stage.taken():
        loads.setdefault(tiles[name].dtype, f"queue of {name}")
    if not loads:
        raise VerifyError(f"stage {stage.name!r} reads nothing", "give it a load or a queue")
    if len(products) > 1:
        what = "; ".join(f"{d} at {s}" for d, s in products.items())
        raise VerifyError(
            f"stage {stage.name!r} has products of several dtypes ({what})",
            "cast their tiles and weights to one dtype, or put them in different stages",
        )
    return next(iter(products or loads)) if len(products or loads) == 1 else "f32"


def check_group(s: Stage, pipeline: Pipeline) -> None:
    """Raise ``VerifyError`` unless replicas can share weights in pairs, and products overlap, as the stage says."""
    if s.in_flight not in (1, 2):
        raise VerifyError(f"stage {s.name!r} has {s.in_flight} products in flight", "use 1 or 2")
    if s.group == 1:
        return
    if s.group != 2 or s.residency is not Residency.STREAMED or s.replicas % 2 or len(pipeline.stages) > 1:
        raise VerifyError(
            f"stage {s.name!r} has group {s.group}, {s.replicas} replicas, {s.residency} weights and "
            f"{len(pipeline.stages) - 1} other stages in its launch",
            "use group 1; 2 is for a stage alone in its launch, streamed weights, an even number of replicas",
        )


def check_layers(s: Stage, dtype: str, layer: LoopedLayer) -> None:
    """Raise ``VerifyError`` unless hidden layers, ``layer`` the first of them, can be taken by chunks."""
    depth = columns_of(dtype)
    source = layer.ops[0].source or s.name
    if dtype == "f32":
        raise VerifyError(
            f"the hidden layer at {source} is taken by chunks, which wait in registers: operands of fp32 products"
            " cannot",
            "use bf16 or f16, or take the layer whole",
        )
    if s.placement.dim != 0 or s.group != 1 or s.residency is not Residency.STREAMED:
        raise VerifyError(
            f"the hidden layer at {source} is taken by chunks under Shard({s.placement.dim}), group {s.group},"
            f" {s.residency} weights",
            "use Shard(0), group 1 and streamed weights",
        )
    odd = next((loop for loop in s.loops[1:] if loop.tile % depth), None)
    if odd is not None:
        raise VerifyError(
            f"stage {s.name!r} takes {odd.tile} columns of {odd.axis} a turn",
            f"use a multiple of {depth}: products take rows of 128 bytes",
        )


def check_blocks(s: Stage, pipeline: Pipeline, dtype: str, blocks: Collection[str]) -> None:
    """Raise ``VerifyError`` unless the tiles ``blocks`` can be made block by block of their columns."""
    if dtype == "f32" or s.placement.dim != 0 or s.group != 1:
        raise VerifyError(
            f"stage {s.name!r} makes tiles by blocks under Shard({s.placement.dim}), group {s.group}, with products"
            f" of {dtype}",
            "use Shard(0), group 1 and bf16 or f16",
        )
    odd = next((loop for loop in s.loops if loop.held and loop.tile % 8), None)
    if odd is not None:
        raise VerifyError(
            f"stage {s.name!r} holds {odd.axis} by {odd.tile} columns", "use a multiple of 8: a block of a fragment"
        )
    pushed = [q.tile for q in pipeline.queues if q.producer == s.name and q.tile in blocks]
    if pushed:
        raise VerifyError(
            f"stage {s.name!r} hands {pushed[0]!r} on, which it makes by blocks", "store it, or make it whole"
        )


def check_own(op: TileOp, stage: Stage, dtype: str, operands: str) -> None:
    """Raise ``VerifyError`` unless lanes can load the rows of ``op``, of ``dtype``, as operands of products."""
    if not op.index or stage.placement.dim != 0 or dtype != operands or dtype == "f32":
        raise VerifyError(
            f"load at {op.source or stage.name} lets lanes load rows of {dtype}"
            + ("" if op.index else " that come in order")
            + f", under Shard({stage.placement.dim}), with products of {operands}",
            "use it for rows through an index, Shard(0) and 16 bits like those of products",
        )
