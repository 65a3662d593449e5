"""From a pipeline to a backward chain of the kind that its widths need."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from tilestream.errors import VerifyError
from tilestream.ir.axes import ROWS, Level
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline
from tilestream.ir.plain import plain
from tilestream.kernels.gradients.backward import model, wide
from tilestream.kernels.gradients.backward.chain import Layer, find_chain
from tilestream.kernels.gradients.backward.model import BULK_BYTES, GROUPS, WIDEST, BackwardChain, Held, read
from tilestream.kernels.gradients.backward.wide import WideChain


@lru_cache(maxsize=1024)
def build(pipeline: Pipeline) -> BackwardChain | WideChain:
    """How the only stage of a launch runs.

    Raises:
        VerifyError: it is no backward chain, a layer is wider than 128, its sums are more than the registers hold, or
            shared memory has no room; the message has the arithmetic.
    """
    written = plain(pipeline)
    (stage,) = written.stages
    chain = find_chain(stage, written)
    where = chain.layers[0].source
    if chain.left:
        raise VerifyError(f"{where}: {chain.left[0][0]!r} leaves between two layers", "cut the chain there")
    if stage.loops[0].tile != TILE_ROWS:
        raise VerifyError(f"{where}: takes {stage.loops[0].tile} rows a step, kernels {TILE_ROWS}", "loop by 64 rows")
    by_level = {level: prod(d.size for d in stage.mesh if d.level is level) for level in Level}
    if any(d.axes != (ROWS.name,) for d in stage.mesh) or by_level[Level.WARPGROUP] != GROUPS:
        raise VerifyError(f"{where}: a backward chain divides rows over the grid and two warpgroups", "divide it so")
    if by_level[Level.CLUSTER] > 1:
        raise VerifyError(f"{where}: rows divided over a cluster have no kernel so far", "divide them over the grid")
    held, slots = room(chain.layers, written)
    splits, streams = by_level[Level.GRID], dict.fromkeys((chain.gradient, *(n for x in chain.layers for n in read(x))))
    odd = tuple(n for n in streams if written.tensor(n).features * DTYPE_BYTES[chain.dtype] % BULK_BYTES)
    if not _is_wide(chain.layers):
        return BackwardChain(stage, chain, splits, slots, held, odd)
    if odd:
        raise VerifyError(
            f"{where}: rows of {odd[0]!r} are no multiple of {BULK_BYTES} bytes, beside layers wider than {WIDEST}",
            "use a row stream and stationary sums",
        )
    return WideChain(stage, chain, splits, slots, held)


def room(layers: Sequence[Layer], pipeline: Pipeline) -> tuple[tuple[Held, ...], int]:
    """The sums of layers, and how many slots a ring has beside what they keep in shared memory.

    Raises:
        VerifyError: one launch has no room for them; the message has the arithmetic.
    """
    for layer in layers:
        bulk = not layer.weight or layer.k * DTYPE_BYTES[pipeline.tensor(layer.weight).dtype] % BULK_BYTES == 0
        widest = max(layer.out, layer.k)
        if widest > wide.WIDEST or not bulk:
            raise VerifyError(
                f"{layer.source}: {layer.k if not bulk else widest} columns; a backward chain takes up to"
                f" {wide.WIDEST}, and weights of rows of a multiple of {BULK_BYTES} bytes",
                "use a row stream and stationary sums",
            )
    return (wide if _is_wide(layers) else model).room(layers, pipeline)


def _is_wide(layers: Sequence[Layer]) -> bool:
    return max(max(layer.out, layer.k) for layer in layers) > WIDEST
