"""Candidates for a feed-forward block on few rows: shared tiles, the best of each tail by prediction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache, partial

import torch

from tilestream.devices import Device
from tilestream.errors import IRError, VerifyError
from tilestream.ir.pipeline import TILE_ROWS, Pipeline
from tilestream.kernels.one_row.model import is_one_row
from tilestream.kernels.product.block import MOST_ROWS, Block
from tilestream.kernels.product.finder import NARROW, find_block, is_block, is_projection
from tilestream.kernels.product.shared_tile import Tail, build
from tilestream.kernels.product.shared_tile.cost import shared_tile_cost
from tilestream.kernels.product.shared_tile.model import SHORT_TILE
from tilestream.kernels.product.sharing import Middle
from tilestream.kernels.product.written import with_column, written_out
from tilestream.options import Options
from tilestream.plan import margins
from tilestream.plan.passes.divide_columns import divide_columns
from tilestream.plan.passes.share_tile import (
    LONG,
    MOST_TURNS,
    Allowed,
    Split,
    fewer_groups,
    share_tile,
    splits,
    tiles_for,
)
from tilestream.plan.recipes import Recipe

STRATEGY = "shared"
ONE_ROW = "columns of one row"


def in_any_order(options: Options) -> bool:
    """Whether partial results may be added in any order: where that is asked for, and torch is not asked for
    deterministic algorithms."""
    return options.any_order and not torch.are_deterministic_algorithms_enabled()


def by_cluster(options: Options) -> bool:
    """Whether a middle that goes over a cluster may be a candidate: where candidates are timed, as the kernels through
    the L2 are as fast or nearly. Behind a norm they are faster: only ``exhaustive`` asks."""
    return options.cluster_middle and options.measure and options.effort != "model"


def most_timed(options: Options) -> tuple[int, int]:
    """Shared tiles and other candidates of a region that are timed at most."""
    shared = {"model": 1, "measured": margins.SHARED, "exhaustive": 1000}[options.effort]
    return shared, 1 if options.effort == "model" else margins.MEASURED


def patience_s(options: Options) -> float:
    """How long a region's kernels are waited for once one is timed; all of them where a strategy is forced."""
    if options.strategy != "auto":
        return math.inf
    return margins.PATIENT_S if options.effort == "exhaustive" else margins.PATIENCE_S


@lru_cache(maxsize=256)
def bin_of(program: Pipeline, rows: int) -> int:
    """Rows that a plan of a feed-forward block at ``rows`` rows serves; 0 where they make no difference."""
    if rows == 1 and is_one_row(program):
        return 1
    if not 0 < rows <= MOST_ROWS or not is_block(program):
        return 0
    tile, tiles = tiles_for(rows)
    return tile * tiles


def same_bin(program: Pipeline, a: int, b: int) -> bool:
    """Whether what was chosen at ``a`` rows suits ``b`` rows: the tiles of few rows come in sizes, more are alike."""
    return bin_of(program, a) == bin_of(program, b)


def recipes(program: Pipeline, rows: int, device: Device, options: Options) -> list[Recipe]:
    """A candidate for each of ``best_splits``; and of one row one more, whose columns alone are divided."""
    alone = [Recipe(STRATEGY, divide_columns, detail=ONE_ROW, dealt=True)] if rows == 1 and is_one_row(program) else []
    return alone + [recipe_of(split) for split in best_splits(program, rows, device, options)]


def recipe_of(split: Split) -> Recipe:
    """The candidate of a split."""
    return Recipe(STRATEGY, partial(share_tile, split=split), detail=str(split), dealt=True)


def best_splits(program: Pipeline, rows: int, device: Device, options: Options) -> list[Split]:
    """The splits of ``program`` at ``rows`` rows that ``options.effort`` asks for; none if it is no block.

    ``model``: the best by prediction. ``measured``: the best ``margins.SHARED``, some of every kind and of the highest
    tiles among them, and one with fewer groups; of a single layer ``margins.SHARED_ALONE``. ``exhaustive``: all that
    fit, also with fewer groups and other depths of a ring stage. On many rows ``margins.SHARED_TILED``, but of one
    convolution as many as on few: of one layer with nothing in front, whose tiles take turns; and of two where a row
    stream would leave SMs idle.
    """
    block = _block_at(program, rows, device)
    if block is None:
        return []
    thorough = options.effort == "exhaustive"
    gathered = by_cluster(options) and (thorough or not block.before)
    each = options.measure and not block.before
    allowed = Allowed(in_any_order(options), gathered, each, thorough)
    ranked = _ranked(program, splits(block, rows, device, allowed), rows, device)
    if options.effort == "model":
        ranked = ranked[:1]
    elif not thorough and rows > MOST_ROWS and (block.grid is None or not block.one_layer):
        ranked = ranked[: margins.SHARED_TILED]
    elif not thorough:
        alone = block.one_layer
        top, each = (margins.SHARED_ALONE, 1) if alone else (margins.SHARED, margins.SHARED_EACH)
        kinds = [] if alone else [[s for s in ranked if s.row_tiles == tiles_for(rows)[1]]]
        kinds += [[s for s in ranked if _kind(s) == kind] for kind in dict.fromkeys(map(_kind, ranked))]
        best = [some[place] for place in range(each) for some in kinds if len(some) > place]
        kept = [*dict.fromkeys([*best, *ranked])][:top]
        if not alone:
            needed = {*kinds[0][:each], *(some[0] for some in kinds if some)}
            kept = _with_fewer_groups(program, block, sorted(kept, key=ranked.index), needed, rows, device)
        ranked = _ranked(program, kept, rows, device)
    return ranked


def why_none(program: Pipeline, rows: int, device: Device) -> str:
    """Why ``recipes`` has no split of ``program`` at ``rows`` rows."""
    block = _block_at(program, rows, device)
    if block is None:
        return _why_no_block(program, rows, device)
    for split in splits(block, rows, device, Allowed()):
        try:
            made = share_tile(program, split, device)
            build(made.stages[0], made, device.shared_bytes_per_cta)
        except VerifyError as error:
            return f"{split}: {error.cause}"
    k, hidden, out = block.sizes
    if block.one_layer and rows > MOST_ROWS:
        return f"more than {MOST_TURNS} turns of tiles, and its sum is not {LONG} times as long as it is wide"
    return f"{rows} rows, {k} by {hidden} by {out} columns: no way to divide them over {device.sms} SMs"


def _why_no_block(program: Pipeline, rows: int, device: Device) -> str:
    """Why ``_block_at`` finds nothing."""
    try:
        block = _block(program)
    except (VerifyError, IRError) as error:
        return error.cause
    if block.one_layer and max(block.sizes) <= NARROW:
        return f"one layer of {block.sizes[0]} to {block.sizes[2]} columns: an SM holds up to {NARROW} whole"
    if block.before:
        return f"what makes its input is a part of it, which is so on up to {MOST_ROWS} rows, not on {rows}"
    return f"{rows} rows are a tile for every SM of {device.name}: none need be shared"


def _with_fewer_groups(
    program: Pipeline, block: Block, kept: list[Split], needed: set[Split], rows: int, device: Device
) -> list[Split]:
    """``kept``, the fastest first, with the best that has fewer groups of equal parts in place of the last that is not
    ``needed``: each split has as many groups as fit, which is not always the fastest."""
    fewer = [f for s in kept if (f := fewer_groups(block, s)) is not None and f not in kept]
    best, spared = _ranked(program, fewer, rows, device)[:1], [s for s in kept if s not in needed][-1:]
    return [*(s for s in kept if s not in spared), *best] if best and spared else kept


def _kind(split: Split) -> tuple[Middle, Tail, bool]:
    """What the model tells apart less well than it does kernels of one kind; where nothing is exchanged but sums, that
    is whether a tile is high."""
    return split.middle, split.tail, split.middle is Middle.NONE and split.tile_rows > SHORT_TILE


def _block(program: Pipeline) -> Block:
    written = written_out(program)
    return find_block(written.stages[0], written)


def _block_at(program: Pipeline, rows: int, device: Device) -> Block | None:
    """The block that ``program`` is, where shared tiles may be its fastest kernels at ``rows`` rows."""
    if rows <= MOST_ROWS or is_projection(program):
        block = _block(program) if is_block(program) else None
        return None if block is not None and rows > MOST_ROWS and block.before else block
    if rows > TILE_ROWS * device.sms or len(program.stages) != 1:
        return None  # a row stream has a tile for every SM
    try:
        written = with_column(written_out(program))
        block = find_block(written.stages[0], written)
    except (VerifyError, IRError):
        return None
    return None if block.one_layer or block.before else block


def _ranked(program: Pipeline, wanted: Iterable[Split], rows: int, device: Device) -> list[Split]:
    """Those that fit, the fastest by prediction first."""
    found: list[tuple[float, Split]] = []
    for split in wanted:
        try:
            made = share_tile(program, split, device)
            schedule = build(made.stages[0], made, device.shared_bytes_per_cta)
        except VerifyError:
            continue
        found.append((shared_tile_cost(schedule, rows, device).seconds, split))
    return [split for _, split in sorted(found, key=lambda each: each[0])]
