"""Few rows: one tile of rows shared by the grid, which splits the hidden axis of a feed-forward block or one layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.once import hand_on, once
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.kernels.product.block import MOST_ROWS, Block
from tilestream.kernels.product.finder import only_block
from tilestream.kernels.product.shared_tile import Tail
from tilestream.kernels.product.shared_tile.model import DEPTHS, TILES
from tilestream.kernels.product.sharing import Middle
from tilestream.kernels.product.written import with_column, written_out

MOST_ROW_TILES = 4
SHORTEST_SIDE_BY_SIDE, MOST_SIDE_BY_SIDE = 16, 8
"""Rows of the shortest tiles that are chosen where a higher one would do, and how many of them at most."""
MOST_GATHERED_ROWS = 64
"""Rows of the tiles whose middle may go over a cluster. At 128 it takes 1.1 times the time of the L2 and more."""
MOST_MADE_BYTES = 128 * 1024
"""Of weights of the first layer that a CTA reads where it makes all of its group's middle: all CTAs of the group read
the same, from the L2."""
MOST_ADDED = 8
"""Partial results that are added in the result's own dtype: each addition rounds, and the error against float64 shall
stay under twice eager's (measured: 1.5 times with 4 groups, 1.9 with 8, 2.8 with 24)."""


WIDTHS = (256, 192, 160, 128, 96, 64, 32)
"""Columns of a tile of one layer on many rows."""
LONG = 4
"""How many times as long as a row of the result is wide the sum is there, at least, where tiles take more than
``MOST_TURNS``. What a tile does behind its sum nothing hides: 256 to 1024 columns, 6,272 rows, took 19 us where a
library's product and a ReLU take 15; 2048 to 512, 1,568 rows, 10.7 us with its norm and ReLU, where these take 12.4."""
MOST_TURNS = 2
"""Tiles that an SM takes one after another, up to which a library's product has little to hide behind each other."""
MOST_TILES = 16
"""Tiles of rows of two layers that a launch on many rows is planned for; it has as many as there are."""
LEAST_SUM = 256
"""Columns that each group of a cluster sums over there, at least."""
MOST_GROUPS = 8
"""That divide the sum of one layer: more partial results cost more than shorter sums save."""


@dataclass(frozen=True)
class Split:
    """How a block is divided: ``groups`` of ``columns`` CTAs for each of ``row_tiles`` tiles of ``tile_rows`` rows.

    Attributes:
        tail: how the groups' partial results become the result.
        middle: what a group hands its middle over through; with DSM its CTAs are a cluster, with none each makes all
            of it.
        depth: columns of the summed axis in a ring stage; None lets the schedule choose.
    """

    groups: int
    columns: int
    tail: Tail = Tail.PARTIALS
    tile_rows: int = TILES[-1]
    row_tiles: int = 1
    depth: int | None = None
    middle: Middle = Middle.L2

    @property
    def ctas(self) -> int:
        return self.row_tiles * self.groups * self.columns

    def __str__(self) -> str:
        rows = f"{self.row_tiles} x {self.tile_rows} rows, " if self.row_tiles > 1 else ""
        how = {
            Tail.NONE: "sums in one place",
            Tail.PARTIALS: "partial sums in order",
            Tail.REDUCE_ADD: "sums added in any order",
            Tail.CLUSTER: "sums over a cluster",
        }[self.tail]
        group = "1 group" if self.groups == 1 else f"{self.groups} groups"
        depth = f", stages of {self.depth}" if self.depth is not None else ""
        middle = {Middle.DSM: ", middle over a cluster", Middle.NONE: ", middle made by each"}.get(self.middle, "")
        return f"{rows}{group} of {self.columns}{middle}, {how}{depth}"


def share_tile(program: Pipeline, split: Split, device: Device | None = None) -> Pipeline:
    """One stage over the mesh that ``split`` says.

    Raises:
        VerifyError: the program is neither a feed-forward block nor one layer; or, of a ``device``, it has too few SMs.
    """
    if device is not None and split.ctas > device.sms:
        raise VerifyError(
            f"{split.row_tiles} x {split.groups} x {split.columns} = {split.ctas} CTAs > {device.sms} SMs of"
            f" {device.name}",
            "use fewer groups",
        )
    written = with_column(written_out(program))
    if len(written.stages) != 1:
        raise VerifyError(f"pipeline {program.name!r} has {len(written.stages)} stages", "share a tile in one")
    block = only_block(written)
    if split.middle is Middle.NONE and split.groups == split.columns == 1:
        raise VerifyError("a CTA that makes all of its tile shares nothing", "cut it as a vertical pipeline")
    mesh = [Spread(Level.GRID, split.row_tiles, (block.rows,))] if split.row_tiles > 1 else []
    level = Level.CLUSTER if split.middle is Middle.DSM else Level.GRID
    if split.columns > 1 or not block.one_layer:
        axes = block.outs if split.middle is Middle.NONE else block.shared_by_columns
        mesh.append(Spread(level, split.columns, axes))
    if split.groups > 1:
        level = Level.CLUSTER if split.tail is Tail.CLUSTER else Level.GRID
        scattered = block.shared_by_groups[:1] if split.tail is Tail.REDUCE_ADD else block.shared_by_groups
        mesh.append(Spread(level, split.groups, scattered))
    loops = [Loop(block.rows, split.tile_rows)]
    if split.depth is not None:
        loops.append(Loop(block.hid if block.one_layer else block.k, split.depth))
    base = _added_in_memory(written) if split.tail is Tail.REDUCE_ADD else written
    made = Stage("shared", base.stages[0].ops, tuple(loops), tuple(mesh))
    return hand_on(only_block, base, replace(base, stages=(made,), strategy="shared tile"))


@once
def _added_in_memory(written: Pipeline) -> Pipeline:
    """``written``, whose results are added to what is there."""
    stage = written.stages[0]
    ops = tuple(replace(op, kind="store_add") if op.kind == "store" else op for op in stage.ops)
    return written.with_stages((replace(stage, ops=ops),))


def tiles_for(rows: int) -> tuple[int, int]:
    """Rows of a tile and tiles side by side for a bin of rows: 8, 16, ... 512, and more in several launches."""
    if rows <= TILES[-1]:
        return next(tile for tile in TILES if rows <= tile), 1
    tiles = 1
    while tiles < MOST_ROW_TILES and tiles * TILES[-1] < rows:
        tiles *= 2
    return TILES[-1], tiles


def tilings(rows: int) -> list[tuple[int, int]]:
    """Rows of a tile and tiles side by side that a bin of rows may be divided into: ``tiles_for``, and shorter tiles.

    Shorter ones read the weights again, from the L2, each by fewer CTAs that exchange less.
    """
    tile_rows, row_tiles = tiles_for(rows)
    made = [(tile_rows, row_tiles)]
    while tile_rows > SHORTEST_SIDE_BY_SIDE and row_tiles < MOST_SIDE_BY_SIDE:
        tile_rows, row_tiles = tile_rows // 2, row_tiles * 2
        made.append((tile_rows, row_tiles))
    return made


@dataclass(frozen=True)
class Allowed:
    """Which splits are wanted.

    Attributes:
        in_any_order: those whose partial results are added in any order.
        by_cluster: those whose middle goes over a cluster.
        made_by_each: those whose CTAs each make all of their group's middle.
        thorough: also fewer groups, down to half of the SMs, and ring stages of every depth.
    """

    in_any_order: bool = False
    by_cluster: bool = False
    made_by_each: bool = False
    thorough: bool = False


def splits(block: Block, rows: int, device: Device, allowed: Allowed) -> Iterator[Split]:
    """Ways to divide ``block`` at ``rows`` rows: as many CTAs as there are SMs, or nearly, in groups of 4 to all."""
    if block.one_layer:
        yield from (_tiles if rows > MOST_ROWS else _one_layer)(block, rows, device, allowed)
        return
    if rows > MOST_ROWS:  # more tiles than are resident: no CTA may wait for one outside of its cluster
        for tile_rows in (TILES[-1], TILES[-2]):
            yield from _made_by_each(block, tile_rows, min(ceil(rows / tile_rows), MOST_TILES), device)
        return
    made: list[Split] = []
    for tile_rows, row_tiles in tilings(rows):
        made += _full(block, tile_rows, row_tiles, device, allowed.in_any_order)
        if allowed.by_cluster and (tile_rows <= MOST_GATHERED_ROWS or allowed.thorough):
            made += _gathered(block, tile_rows, row_tiles, device, allowed.in_any_order)
        if allowed.made_by_each:
            yield from _made_by_each(block, tile_rows, row_tiles, device)
    for split in made:
        yield split
        if allowed.thorough:
            least = split.groups if split.tail is Tail.CLUSTER else max(2, split.groups // 2)
            for groups in range(split.groups, min(least, split.groups) - 1, -1):
                for depth in (None, *DEPTHS):
                    if (groups, depth) != (split.groups, None):
                        yield replace(split, groups=groups, depth=depth)


def fewer_groups(block: Block, split: Split) -> Split | None:
    """``split`` with the next fewer groups, down to half as many, whose CTAs have equal parts of the middle in whole
    blocks of 8: there are fewer partial results to add, and nothing is padded. None if there are no such."""
    if split.tail is not Tail.PARTIALS or split.middle is not Middle.L2 or block.one_layer:
        return None
    blocks = ceil(block.sizes[1] / 8)
    counts = range(split.groups - 1, max(2, ceil(split.groups / 2)) - 1, -1)
    return next((replace(split, groups=g) for g in counts if blocks % (g * split.columns) == 0), None)


def _full(block: Block, tile_rows: int, row_tiles: int, device: Device, in_any_order: bool) -> Iterator[Split]:
    _, hid, out = block.sizes
    seen: set[tuple[int, int, Tail]] = set()
    for columns in (4, 8, 16, 24, 32, 48, 64, 96, 128):
        if columns > min(ceil(out / 8), device.sms // row_tiles):
            continue
        groups = min(device.sms // (row_tiles * columns), ceil(hid / 8) // columns)
        for tail in (Tail.REDUCE_ADD, Tail.PARTIALS, Tail.CLUSTER):
            count = groups
            if tail is Tail.REDUCE_ADD and (not in_any_order or block.after):
                continue
            if tail is Tail.REDUCE_ADD:
                count = min(groups, MOST_ADDED)
            if tail is Tail.CLUSTER:
                count = max((n for n in (2, 4, 6, 8) if _resident(n, columns * row_tiles, groups, device)), default=1)
            if count < 2:
                tail, count = Tail.NONE, 1
            if count >= 1 and (columns, count, tail) not in seen:
                seen.add((columns, count, tail))
                yield Split(count, columns, tail, tile_rows, row_tiles)


def _one_layer(block: Block, rows: int, device: Device, allowed: Allowed) -> Iterator[Split]:
    """Splits of one layer: as few groups as let its columns fill the SMs, and as many as fit."""
    tile_rows, row_tiles = tiles_for(rows)
    counts = [last.columns for last in block.lasts]
    most_groups = MOST_GROUPS if block.products == 1 else 1
    for columns in (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128):
        most = min(device.sms // (row_tiles * columns), ceil(block.sizes[1] / DEPTHS[0]), most_groups)
        most = min(most, min(counts) // columns)  # of a narrow result too, each CTA adds or has a column
        if columns > ceil(max(counts) / 8) or most < 1:
            continue
        for groups in range(1 if allowed.thorough else max(1, most // 2), most + 1):
            if groups == 1:
                yield Split(1, columns, Tail.NONE, tile_rows, row_tiles)
                continue
            yield Split(groups, columns, Tail.PARTIALS, tile_rows, row_tiles)
            if _resident(groups, columns * row_tiles, groups, device):
                yield Split(groups, columns, Tail.CLUSTER, tile_rows, row_tiles)
            if allowed.in_any_order and len(block.lasts) == 1 and not block.after:
                yield Split(groups, columns, Tail.REDUCE_ADD, tile_rows, row_tiles)


def _tiles(block: Block, rows: int, device: Device, allowed: Allowed) -> Iterator[Split]:
    """Splits of one layer on many rows, tiles that take turns: so wide that rows are read again seldom, or narrower so
    that all SMs have one; also with the sum over a cluster. Sums that are not long only where tiles take few turns."""
    del allowed
    counts = [last.columns for last in block.lasts]
    together = sum(counts) * block.products
    is_long = block.sizes[1] >= LONG * max(counts)
    turn = max(1, device.sms // ceil(rows / TILES[-1]))  # columns of which all tiles run at once
    for columns in dict.fromkeys((*(ceil(together / width) for width in WIDTHS), turn)):
        for groups in (1, 2, 4) if block.products == 1 else (1,):
            divided = 1 < columns * groups <= device.sms  # one CTA a tile of rows would be a row stream
            if not divided or (groups > 1 and block.sizes[1] < groups * LEAST_SUM):
                continue
            tail = Tail.CLUSTER if groups > 1 else Tail.NONE
            if not is_long and ceil(rows / TILES[-1]) * columns > MOST_TURNS * _at_once(groups, device):
                continue
            tiles = min(device.sms // (columns * groups), ceil(rows / TILES[-1]))
            if groups == 1 or (tiles := min(tiles, _at_once(groups, device) // columns)):
                yield Split(groups, columns, tail, TILES[-1], tiles)


def _gathered(block: Block, tile_rows: int, row_tiles: int, device: Device, in_any_order: bool) -> Iterator[Split]:
    """Splits whose groups are clusters, as many as the device holds at once."""
    _, hid, out = block.sizes
    for columns in (2, 4, 8, 16):
        if columns > ceil(out / 8):
            continue
        groups = min(_at_once(columns, device) // row_tiles, max(1, ceil(hid / 8) // columns))
        if groups == 1:
            yield Split(1, columns, Tail.NONE, tile_rows, row_tiles, middle=Middle.DSM)
        elif groups > 1:
            yield Split(groups, columns, Tail.PARTIALS, tile_rows, row_tiles, middle=Middle.DSM)
            if in_any_order and not block.after:
                yield Split(min(groups, MOST_ADDED), columns, Tail.REDUCE_ADD, tile_rows, row_tiles, middle=Middle.DSM)


def _made_by_each(block: Block, tile_rows: int, row_tiles: int, device: Device) -> Iterator[Split]:
    """Splits whose CTAs exchange no middle, and the sums of groups over a cluster: as many columns as are resident, and
    fewer. Of stages the shortest: of 12 pairs of kernels that was the faster one in each."""
    k, hid, out = block.sizes
    for groups in (1, 2, 4, 8):  # in clusters of 16 the same takes twice as long
        made = 8 * ceil(ceil(hid / groups) / 8) * len(block.firsts)
        columns = min(_at_once(groups, device) // row_tiles, ceil(out / 8))
        if columns < 1 or 2 * k * made > MOST_MADE_BYTES:
            continue
        tail = Tail.CLUSTER if groups > 1 else Tail.NONE
        for count in dict.fromkeys((columns, 1 << columns.bit_length() - 1, max(1, columns // 2))):
            if groups * count > 1:
                yield Split(groups, count, tail, tile_rows, row_tiles, DEPTHS[0], Middle.NONE)


def _resident(size: int, clusters: int, groups: int, device: Device) -> bool:
    """Whether so many clusters of ``size`` are on the device at once."""
    return size <= groups and clusters <= _at_once(size, device)


def _at_once(size: int, device: Device) -> int:
    """How many groups of ``size`` CTAs, clusters where they are more than one, the device holds; 0 if it has none."""
    if size == 1:
        return device.sms
    return device.resident_clusters(size) if size <= device.largest_cluster else 0
