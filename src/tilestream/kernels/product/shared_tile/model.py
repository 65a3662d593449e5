"""A shared tile as a schedule: who makes which columns, how the middle and the result are exchanged, and the rings.

A CTA ``(r, g, s)`` takes row tile ``r``. Of the middle it makes ``middle_columns`` columns, those of member ``s`` of
group ``g``; then it owns ``out_columns`` columns of the result, summed over the hidden columns of its group alone. So
every byte of a weight is read once for each row tile, the middle moves within a group, and partial results move
between groups.

One layer is the second half of this: there is no middle, and a group sums over its part of the input's columns. A CTA
has columns of each result, side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from tilestream.errors import VerifyError
from tilestream.ir.axes import Level
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.kernels.parts.params import LINE_BYTES
from tilestream.kernels.parts.source import Space
from tilestream.kernels.product.block import PANEL, Block, check_alignment
from tilestream.kernels.product.finder import find_block
from tilestream.kernels.product.shared_tile.directions import Directions, find_directions
from tilestream.kernels.product.sharing import Middle, Tail
from tilestream.kernels.stream.layout import SHARED_LIMIT
from tilestream.kernels.stream.model import ceil_to

SHORT_TILE = 32
"""And up to so many rows: their stages of the left ring are small, and each costs a turn, however little is in it."""
TILES = (8, 16, 32, 64, 128)
"""Rows of a tile. One consumer warpgroup multiplies up to 64, two have 64 each."""
DEPTHS = (64, 128, 256)
"""Columns of the summed axis in a stage of a ring. The deepest is for tiles of few rows, where it is asked for."""
MOST_COLUMNS = 256
"""Columns of one wgmma, and rows of one box of a bulk copy."""
MOST_STAGES = 16
MOST_ACCUMULATORS = 160
"""fp32 sums a consumer thread can hold beside addresses and an epilogue's temporaries."""
LEAST_STAGES = 3
WARP_ROWS = 16
"""Rows of a warp in a product of 64."""
MOST_TAGGED_BYTES = 32 * 1024
"""Of a CTA's partial result, up to which its words say by themselves which launch they are of: no flag and no fence.
Larger ones, and those of tiles of fewer than 64 rows, were not timed."""
SHORT_SUM = 1024
"""Up to this length of the first sum a stage is 128 columns deep: fewer, longer copies when latency rules."""


MOST_OWN_ROWS = 8
"""Of a tile whose CTAs make all of the operand each, a warp a row: 16 rows take longer than their exchange does."""


@dataclass(frozen=True)
class SharedTile:
    """How a stage runs as a shared tile. Bytes are of shared memory, columns of the padded parts.

    Attributes:
        tile_rows: rows of a tile; ``row_tiles`` of them run side by side, and more rows take more launches, or where
            CTAs are ``alone`` more turns of one.
        groups, columns: ``P`` groups of ``S`` CTAs.
        middle_columns: a CTA's part, a multiple of 8; the last CTAs may have less. None where there is one layer.
        widths: of each result, likewise; of weights by columns a multiple of 64.
        depth: columns of the summed axis a ring stage holds.
        left_stages, weight_stages: of the two rings.
    """

    block: Block
    directions: Directions
    tail: Tail
    tile_rows: int
    middle_columns: int
    widths: tuple[int, ...]
    depth: int
    left_stages: int
    weight_stages: int

    @property
    def row_tiles(self) -> int:
        return self.directions.row_tiles

    @property
    def groups(self) -> int:
        return self.directions.groups

    @property
    def columns(self) -> int:
        return self.directions.columns

    @property
    def ctas(self) -> int:
        return self.row_tiles * self.groups * self.columns

    @property
    def alone(self) -> bool:
        """Whether no CTA waits for one outside of its cluster. Then a launch need not be resident at once, and has
        as many tiles as there are rows."""
        handed = not self.block.one_layer and self.middle is not Middle.NONE
        return not handed and not self.block.before and self.tail in (Tail.NONE, Tail.CLUSTER)

    def launched(self, rows: int) -> int:
        """CTAs of a launch for ``rows`` rows, of which one launch has at most so many as there are tiles for."""
        tiles = ceil(rows / self.tile_rows) if self.alone else self.row_tiles
        return tiles * self.groups * self.columns

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        if self.middle is Middle.DSM:
            return self.columns
        return self.groups if self.tail is Tail.CLUSTER else 1

    @property
    def middle(self) -> Middle:
        """What the CTAs of a group hand its middle over through; nothing, where each makes all of it."""
        if not self.directions.divides_middle:
            return Middle.NONE
        return Middle.DSM if self.directions.columns_at is Level.CLUSTER else Middle.L2

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups, up to 64 rows each, or half of the columns of all 64."""
        return 2 if self.halves else ceil(self.tile_rows / PANEL)

    @property
    def halves(self) -> bool:
        """Whether two warpgroups have half of the columns of 64 rows each, where both halves are whole blocks of 8.

        Epilogues and partial sums take half as long, products longer, as each warpgroup reads the rows: of two first
        layers each reads them twice, and it is slower.
        """
        whole = self.middle_columns % 16 == 0 and self.out_columns % 16 == 0 and len(self.block.firsts) == 1
        return self.tagged and whole and self.tile_rows == PANEL

    @property
    def live_threads(self) -> int:
        """Consumer threads that hold sums of rows of the tile: a warp has 16 of the 64 rows that are multiplied."""
        return 256 if self.halves else 32 * ceil(self.tile_rows / WARP_ROWS)

    @property
    def partial_bytes(self) -> int:
        """Of a CTA's partial result in fp32, of as many rows as warps have."""
        return self.out_columns * max(WARP_ROWS, self.tile_rows) * 4

    @property
    def tagged(self) -> bool:
        """Whether words of partial results through the L2 say by themselves which launch they are of."""
        through_l2 = self.tail is Tail.PARTIALS and self.middle is Middle.L2 and not self.block.one_layer
        return through_l2 and self.tile_rows >= PANEL and self.partial_bytes <= MOST_TAGGED_BYTES

    @property
    def threads(self) -> int:
        """Of a CTA, its producer warpgroup included."""
        return 128 * (self.warpgroups + 1)

    @property
    def space(self) -> Space:
        """Device memory besides the tensors. The flags are zero at first, and partial results that say their launch.

        The middle, where it goes through the L2, is ``[row tiles x groups x tile rows, columns of a group]`` in the
        products' dtype; partial results are ``[row tiles, columns, groups, rows x columns of a CTA]`` in fp32, of as
        many rows as warps have; the operand is ``[row tiles x tile rows, k]``.
        """
        through_l2 = self.middle is Middle.L2 and not self.block.one_layer
        middle = self.row_tiles * self.groups * self.tile_rows * self.group_columns * 2 if through_l2 else 0
        partial = self.ctas * self.partial_bytes if self.tail is Tail.PARTIALS else 0
        operand = self.row_tiles * self.tile_rows * self.block.sizes[0] * 2 if self.block.before else 0
        flags = PHASES * self.ctas * LINE_BYTES
        parts = (("flags", flags), ("middle", middle), ("partial", partial), ("operand", operand))
        return Space(parts, frozenset(("flags", "partial") if self.tagged else ("flags",)))

    @property
    def out_columns(self) -> int:
        """Columns of all products of the last layer that a CTA has."""
        return sum(self.product_widths)

    @property
    def product_widths(self) -> tuple[int, ...]:
        """Of each product of the last layer: those of a gated one lie behind each other."""
        return self.widths * self.block.products

    @property
    def starts(self) -> tuple[int, ...]:
        """Where those of each product begin among them."""
        return tuple(sum(self.product_widths[:f]) for f in range(len(self.product_widths)))

    @property
    def group_columns(self) -> int:
        """What a group sums over in the last layer: columns of the middle, padded, or of the input, in whole stages."""
        if self.block.one_layer:
            return self.depth * ceil(ceil(self.block.sizes[1] / self.depth) / self.groups)
        return self.middle_columns * (self.columns if self.directions.divides_middle else 1)

    @property
    def steps(self) -> int:
        """Ring stages that a CTA takes: along ``k``, then along the hidden columns of its group; of one layer along
        its group's part of ``k``."""
        return self.first_steps + ceil(self.group_columns / self.depth)

    @property
    def first_steps(self) -> int:
        """Of the first layer of two alone, along ``k``."""
        return 0 if self.block.one_layer else ceil(self.block.sizes[0] / self.depth)

    @property
    def short_first(self) -> bool:
        """Whether the first product has one stage, which it does not fill."""
        return self.first_steps == 1 and self.block.sizes[0] <= self.depth - 16 and self.block.grid is None

    @property
    def left_steps(self) -> int:
        """Stages of the ring of left operands: a middle that does not come through the L2 has a place of its own."""
        return self.steps if self.middle is Middle.L2 else self.first_steps

    @property
    def own_rows(self) -> bool:
        """Whether each CTA makes all rows of the operand for itself, where its ring of left operands holds them."""
        few = self.block.one_layer and bool(self.block.before) and self.tile_rows <= MOST_OWN_ROWS
        return few and self.left_stages >= self.steps

    @property
    def left_bytes(self) -> int:
        """A stage of the ring of left operands, the input and then the middle."""
        return self.depth * self.tile_rows * 2

    @property
    def first_columns(self) -> int:
        """Of all products of the first layer of two."""
        return self.middle_columns * len(self.block.firsts)

    @property
    def weight_bytes(self) -> int:
        """A stage of the ring of weights, of either layer, whichever is larger. Panels are multiples of 1024 bytes."""
        return self.depth * max(self.first_columns, self.out_columns) * 2

    @property
    def vector_bytes(self) -> int:
        """Vectors and scalars of both epilogues, as fp32."""
        b = self.block
        parts = ((b.middle, self.middle_columns), *zip((last.after for last in b.lasts), self.widths, strict=True))
        return ceil_to(4 * sum(len(b.vectors(ops)) * columns for ops, columns in parts), 128)

    @property
    def scatter_bytes(self) -> int:
        """Where the CTAs of a cluster leave their parts of a partial result: each of ``groups`` sources
        ``ceil(blocks / groups)`` blocks of 8 columns, 16 bytes a thread."""
        blocks = self.out_columns // (2 if self.halves else 1) / 8
        size = self.groups * ceil(blocks / self.groups) * 16 * self.live_threads
        return size if self.tail is Tail.CLUSTER else 0

    @property
    def gather_bytes(self) -> int:
        """Where the middle of the group comes together, up to whole stages, if it does so without the L2.

        It lies between the rings: a product takes 64 rows of it, and what a shorter tile lacks is read of the weights.
        """
        if self.middle is Middle.L2:
            return 0
        return ceil(self.group_columns / self.depth) * self.depth * self.tile_rows * 2

    @property
    def shared_bytes(self) -> int:
        return sum(size for _, size in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Names and bytes of what is in shared memory."""
        return (
            ("left ring", self.left_stages * self.left_bytes),
            ("weight ring", self.weight_stages * self.weight_bytes),
            ("cluster", self.scatter_bytes + self.gather_bytes),
            ("vectors", self.vector_bytes),
            ("barriers", BARRIER_BYTES + self.overread_bytes),
        )

    @property
    def overread_bytes(self) -> int:
        """Beyond all else, so that a product that takes 64 rows from the left ring's last stage stays inside: of a
        shorter tile it multiplies whatever lies behind, in rows that nobody stores."""
        behind = self.weight_stages * self.weight_bytes + self.scatter_bytes + self.vector_bytes + BARRIER_BYTES
        return max(0, PANEL * 128 - self.tile_rows * 128 - behind)

    @property
    def registers(self) -> int:
        """An estimate for one thread of a consumer warpgroup: fp32 sums of the middle, then of the result."""
        held = max(self.first_columns, self.out_columns) // 2
        return held // (2 if self.halves else 1) + 48


PHASES = 4
"""Flags a CTA: result cleared, middle there, partial result there, rows of the operand there (``enum Phase`` of
collectives.cuh)."""
BARRIER_BYTES = 1024
"""Full and empty barriers of both rings, those between the phases, and what the producers hand to the consumers."""


@lru_cache(maxsize=1024)
def build(stage: Stage, pipeline: Pipeline, limit: int = SHARED_LIMIT) -> SharedTile:
    """The schedule of ``stage``, in plain form, within ``limit`` bytes of shared memory.

    Raises:
        VerifyError: the ops are neither a feed-forward block nor one layer, the mesh is none that it can be split by,
            or something does not fit, with the arithmetic.
    """
    block = find_block(stage, pipeline)
    directions = find_directions(stage, block)
    k, hid, out = block.sizes
    tile_rows = _tile_rows(stage, block)
    depths = _depths(stage, block, directions.groups)
    parts = directions.groups * (directions.columns if directions.divides_middle else 1)
    middle = 0 if block.one_layer else _whole(hid, parts)
    whole = PANEL if block.by_columns else 8
    widths = tuple(_whole(last.columns, directions.columns, whole) for last in block.lasts)
    tail = _tail(stage, block, directions)
    for axis, size in ((block.k, k), (block.hid, hid)):
        check_alignment(stage.name, axis, size)
    if tail is Tail.REDUCE_ADD:
        check_alignment(stage.name, block.outs[0], out)
    for what, columns in (("middle", middle * len(block.firsts)), ("result", sum(widths) * block.products)):
        if columns > MOST_COLUMNS or columns // 2 > MOST_ACCUMULATORS:
            most = min(MOST_COLUMNS, 2 * MOST_ACCUMULATORS)
            raise VerifyError(
                f"stage {stage.name!r}: each CTA makes {columns} > {most} columns of the {what}",
                f"divide it over {ceil(columns / most)} times as many CTAs",
            )
    if block.by_columns and not block.one_layer:
        raise VerifyError(
            f"stage {stage.name!r} has two layers, and weights that lie by columns are read by one alone",
            "copy the weights",
        )
    if block.one_layer and directions.columns_at is not Level.GRID:
        raise VerifyError(
            f"stage {stage.name!r}: CTAs of a cluster divide columns, and one layer has no middle to hand over",
            "use Level.GRID",
        )
    made = SharedTile(block, directions, tail, tile_rows, middle, widths, depths[0], 0, 0)
    left, weights = _rings(made, limit)
    if len(depths) > 1 and not _enough(made, left, weights):
        made = replace(made, depth=depths[1])
        left, weights = _rings(made, limit)
    if not _enough(made, left, weights):
        fixed = made.scatter_bytes + made.gather_bytes + made.vector_bytes + BARRIER_BYTES
        ctas = made.columns if directions.divides_middle else 1
        gathered = f" ({made.gather_bytes} of them the middle of {ctas} CTAs)" if made.gather_bytes else ""
        raise VerifyError(
            f"stage {stage.name!r}: {LEAST_STAGES} x ({made.left_bytes} + {made.weight_bytes}) + {fixed} ="
            f" {LEAST_STAGES * (made.left_bytes + made.weight_bytes) + fixed} > {limit} bytes of shared memory"
            + gathered,
            f"loop over {block.k!r} in steps of {DEPTHS[0]}, or divide over more CTAs",
        )
    return replace(made, left_stages=left, weight_stages=weights)


def _whole(columns: int, parts: int, of: int = 8) -> int:
    """Columns of each of ``parts``, a multiple of ``of``."""
    return of * ceil(ceil(columns / parts) / of)


def _tile_rows(stage: Stage, block: Block) -> int:
    tile = next((loop.tile for loop in stage.loops if loop.axis == block.rows), 0)
    if tile not in TILES:
        raise VerifyError(
            f"stage {stage.name!r} takes {tile or 'all'} rows a tile, a shared tile {', '.join(map(str, TILES[:-1]))}"
            f" or {TILES[-1]}",
            f"loop over {block.rows!r} in tiles of {TILES[-1]}",
        )
    return tile


def _depths(stage: Stage, block: Block, groups: int) -> tuple[int, ...]:
    """Depths of a ring stage to try, the first that fits is taken."""
    summed = block.hid if block.one_layer else block.k
    others = [loop.axis for loop in stage.loops if loop.axis not in (block.rows, summed)]
    if others:
        raise VerifyError(
            f"stage {stage.name!r} loops over {others[0]!r}, which its mesh divides",
            f"loop over {block.rows!r}, and over {summed!r} where the depth of a stage matters",
        )
    asked = next((loop.tile for loop in stage.loops if loop.axis == summed), None)
    if asked is None:
        tile = next((loop.tile for loop in stage.loops if loop.axis == block.rows), 0)
        first = block.sizes[0] / (groups if block.one_layer else 1)
        if block.grid is not None and block.sizes[0] % DEPTHS[1]:
            return (DEPTHS[0],)  # behind the last tap there are no pixels to copy
        return (128, 64) if first <= SHORT_SUM or tile <= SHORT_TILE else (64,)
    if asked not in DEPTHS:
        raise VerifyError(
            f"stage {stage.name!r} loops over {summed!r} in steps of {asked}, a ring stage holds"
            f" {', '.join(map(str, DEPTHS[:-1]))} or {DEPTHS[-1]}",
            "use one of these",
        )
    if block.grid is not None and block.sizes[0] % asked:
        raise VerifyError(
            f"stage {stage.name!r}: {block.sizes[0]} columns of taps are no multiple of {asked}", f"use {DEPTHS[0]}"
        )
    return (asked,)


def _tail(stage: Stage, block: Block, d: Directions) -> Tail:
    if block.adds:
        if d.groups_at is not Level.GRID or block.after:
            what = "its groups are a cluster" if d.groups_at is not Level.GRID else "something is done to the sum"
            raise VerifyError(
                f"stage {stage.name!r} adds partial results in memory, but {what}", "store the result (->)"
            )
        return Tail.REDUCE_ADD
    if d.groups == 1:
        return Tail.NONE
    if block.products > 1:
        raise VerifyError(
            f"stage {stage.name!r}: groups add partial sums of one product, and its result is made of two",
            "use one group",
        )
    return Tail.CLUSTER if d.groups_at is Level.CLUSTER else Tail.PARTIALS


def _rings(s: SharedTile, limit: int) -> tuple[int, int]:
    """Stages of both rings: half of the room for the left operands, the rest for weights.

    The first sum needs equally many of both; the ring of weights should be the deeper one, since it is filled while
    the middle is exchanged. More stages than there are steps are useless.
    """
    room = limit - s.scatter_bytes - s.gather_bytes - s.vector_bytes - BARRIER_BYTES
    least = _least(s.steps)
    staging = _stages_for_staging(s)
    if s.block.one_layer:  # each step takes a stage of both; weights have time while rows are made
        left = max(staging, min(MOST_STAGES, s.steps, room // (s.left_bytes + s.weight_bytes)))
        return left, max(0, min(MOST_STAGES, s.steps, (room - left * s.left_bytes) // s.weight_bytes))
    left = max(staging, min(MOST_STAGES, s.left_steps, max(least, round(room / 2 / s.left_bytes))))
    least = min(least, s.left_steps)
    while left > max(least, staging) and (room - left * s.left_bytes) // s.weight_bytes < min(
        LEAST_STAGES + 1, s.steps
    ):
        left -= 1
    weights = min(MOST_STAGES, s.steps, (room - left * s.left_bytes) // s.weight_bytes)
    return left, max(0, weights)


def _stages_for_staging(s: SharedTile) -> int:
    """Stages of the left ring that the rounded middle and the result need on their way out: they are staged there."""
    staged = s.middle is Middle.L2 and not s.block.one_layer
    parts = 2 if s.halves else 1
    middle = max(WARP_ROWS, s.tile_rows) * (2 * s.middle_columns + 16 * parts) if staged else 0
    result = s.tile_rows * 2 * s.out_columns if s.tail is Tail.REDUCE_ADD else 0
    return ceil(max(middle, result) / s.left_bytes)


def _least(steps: int) -> int:
    return min(LEAST_STAGES, steps)


def _enough(s: SharedTile, left: int, weights: int) -> bool:
    return left >= _least(s.left_steps) and weights >= _least(s.steps)
