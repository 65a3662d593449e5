"""Kernels whose time is a formula and not events: which they are, and how far off each formula is.

Their CTAs wait for each other in ways that the event loop does not know (a tile shared by columns, units dealt over the
grid, sums that meet in the L2), and were measured as wholes. One table says so to all who ask for a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilestream.devices import Device
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.plain import plain
from tilestream.kernels.gradients.backward import is_backward
from tilestream.kernels.gradients.backward.cost import cost as backward_cost
from tilestream.kernels.gradients.stationary import is_stationary
from tilestream.kernels.gradients.stationary.cost import cost as stationary_cost
from tilestream.kernels.product import shared_tile
from tilestream.kernels.product.shared_tile.cost import SharedTileCost, shared_tile_cost
from tilestream.kernels.product.tiled_block import model as tiled_block
from tilestream.kernels.product.tiled_block.cost import TiledBlockCost, tiled_block_cost
from tilestream.kernels.shape import is_shared_tile, is_tiled_block


@dataclass(frozen=True)
class ClosedForm:
    """``name`` of the kernels, in plural; mean absolute ``error`` of their times on an H200, measured on ``kernels``
    (docs/cost-model.md has where); ``seconds`` of a pipeline at so many rows on a device."""

    name: str
    error: float
    kernels: str
    is_one: Callable[[Pipeline], bool]
    seconds: Callable[[Pipeline, int, Device], float]


def shared_tile_of(pipeline: Pipeline, rows: int, device: Device) -> SharedTileCost:
    """Phases of a launch that is a shared tile."""
    written = plain(pipeline)
    return shared_tile_cost(shared_tile.build(written.stages[0], written, device.shared_bytes_per_cta), rows, device)


def tiled_block_of(pipeline: Pipeline, rows: int, device: Device) -> TiledBlockCost:
    """Parts of a launch that is a tiled block."""
    written = plain(pipeline)
    return tiled_block_cost(tiled_block.build(written.stages[0], written, device.shared_bytes_per_cta), rows, device)


CLOSED_FORMS = (
    ClosedForm(
        "shared tiles",
        0.07,
        "generated kernels of 1 to 512 rows, fitted and not",
        is_shared_tile,
        lambda pipeline, rows, device: shared_tile_of(pipeline, rows, device).total_s,
    ),
    ClosedForm(
        "tiled blocks",
        0.03,
        "the six blocks that it was fitted on",
        is_tiled_block,
        lambda pipeline, rows, device: tiled_block_of(pipeline, rows, device).total_s,
    ),
    ClosedForm(
        "stationary sums",
        0.09,
        "21 launches of training steps that had no part in the fit",
        is_stationary,
        lambda pipeline, rows, device: stationary_cost(pipeline, rows, device).total_s,
    ),
    ClosedForm(
        "backward chains",
        0.21,
        "four chains of layers 64 wide, 16,384 and 262,144 rows",
        is_backward,
        lambda pipeline, rows, device: backward_cost(pipeline, rows, device).total_s,
    ),
)


def closed_form(pipeline: Pipeline) -> ClosedForm | None:
    """What tells the time of ``pipeline``; None where the event loop does."""
    return next((form for form in CLOSED_FORMS if form.is_one(pipeline)), None)
