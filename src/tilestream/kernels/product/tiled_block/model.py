"""Many rows: both products of a feed-forward block, or one layer, as tiles of 128 rows by 256 columns over the grid.

``build`` turns a stage in plain form into a ``TiledBlock``. Its hidden layer is wider than a CTA holds and goes through
a ring in device memory that stays in the L2: tiles of the second product follow those of the first by a ``turn``, in
one order that all CTAs know (``walk``). The kernel, the cost model and the planner read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, gcd

from tilestream.errors import IRError, VerifyError
from tilestream.ir.axes import Level
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Stage
from tilestream.kernels.parts.source import Space
from tilestream.kernels.product.block import Block, check_alignment
from tilestream.kernels.product.epilogue import epilogues, vector_words
from tilestream.kernels.product.finder import find_block
from tilestream.kernels.product.written import written_out
from tilestream.kernels.stream.layout import SHARED_LIMIT

ROWS, COLUMNS, DEPTH = 128, 256, 64
NARROW = 192
"""Columns of a narrower tile of the second product."""
STEP_BYTES = (ROWS + COLUMNS) * DEPTH * 2
"""One page of both operands."""
STEPS = 4
SLABS = 2
SLAB_BYTES = 64 * 64 * 2
BARRIER_BYTES = 16 * (STEPS + 4 * SLABS)
THREADS = 384
WIDEST_ROW = 1024
"""Columns of an operand that a warp makes by itself: 32 values a lane and array."""
CLUSTER = 2


@dataclass(frozen=True)
class Walk:
    """The order of units, each a tile of a product for every CTA of a cluster (``struct Walk`` of tiled_order.cuh).

    ``head`` of the first product, then again and again ``seconds`` of the second and ``firsts`` more of the first.

    Attributes:
        all_firsts, all_seconds: units there are.
        slots: tiles of rows in the rings of the hidden layer and of the operand.
        early: tiles of rows whose operand is made by the warps that multiply, before they do.
    """

    all_firsts: int
    all_seconds: int
    head: int
    firsts: int
    seconds: int
    slots: int
    early: int


@dataclass(frozen=True)
class TiledBlock:
    """A feed-forward block on many rows; or one layer, which is the second product alone, of one result or several.

    Attributes:
        clusters: of ``CLUSTER`` CTAs, which take as many tiles of rows and the same columns.
    """

    block: Block
    clusters: int

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return CLUSTER

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return THREADS

    @property
    def hidden_columns(self) -> int:
        """Of the hidden layer, a unit: two products of a gated block share the accumulators."""
        return COLUMNS // max(1, len(self.block.firsts))

    @property
    def hid_blocks(self) -> int:
        """Units of the first product that a pair of row tiles has; none where there is one layer."""
        return 0 if self.block.one_layer else ceil(self.block.sizes[1] / self.hidden_columns)

    @property
    def second_columns(self) -> int:
        """Of a unit of the second product: 256, or 192 where no more units are needed for all columns."""
        b = self.block
        if b.one_layer or b.products > 1 or b.by_columns:
            return COLUMNS
        blocks = ceil(b.sizes[2] / COLUMNS)
        return NARROW if b.sizes[2] <= NARROW * blocks else COLUMNS

    @property
    def result_columns(self) -> int:
        """Of a result, a unit, likewise."""
        return self.second_columns // self.block.products

    @property
    def result_blocks(self) -> tuple[int, ...]:
        """Blocks of columns of each result."""
        return tuple(ceil(last.columns / self.result_columns) for last in self.block.lasts)

    @property
    def direct(self) -> bool:
        """Whether results leave from registers, as those of 32 bits do: a tile of them has no room in shared memory."""
        return DTYPE_BYTES[self.block.output_dtype] > 2

    @property
    def out_blocks(self) -> int:
        return sum(self.result_blocks)

    @property
    def first_steps(self) -> int:
        return ceil(self.block.sizes[0] / DEPTH)

    @property
    def second_steps(self) -> int:
        return ceil(self.block.sizes[1] / DEPTH)

    @property
    def ctas(self) -> int:
        return self.clusters * CLUSTER

    @property
    def turn(self) -> int:
        """Pairs of row tiles between a switch of products: as many as give each cluster a unit of the second."""
        return max(1, self.clusters // self.out_blocks)

    @property
    def ahead(self) -> int:
        """Pairs of row tiles that one unit of each cluster is about: of the first product, where there are two."""
        return ceil(self.clusters / (self.hid_blocks or self.out_blocks))

    @property
    def slots(self) -> int:
        """Tiles of rows in the hidden layer's ring: of a turn, and of two units for each cluster ahead of it.

        One unit would do where all take the same time; measured, it is 2 % slower (docs/wide-layers.md).
        """
        return CLUSTER * (self.turn + 2 * self.ahead)

    @property
    def hidden_bytes(self) -> int:
        return 0 if self.block.one_layer else self.slots * ROWS * self.block.sizes[1] * 2

    @property
    def operand_bytes(self) -> int:
        return self.slots * ROWS * self.block.sizes[0] * 2 if self.block.before else 0

    @property
    def space(self) -> Space:
        """Device memory besides the tensors: flags of CTAs and of slots, the hidden layer's ring, the operand's."""
        slots = self.slots * ((ROWS // 4 if self.block.before else 0) + 2 * self.hid_blocks + 2 * self.out_blocks)
        flags = 8 * (self.ctas + slots)
        parts = (("flags", flags), ("hidden", self.hidden_bytes), ("operand", self.operand_bytes))
        return Space(parts, frozenset(("flags",)))

    def walk(self, rows: int) -> Walk:
        """The order of units for ``rows`` rows."""
        pairs = ceil(rows / (ROWS * CLUSTER))
        firsts, seconds = self.turn * self.hid_blocks, self.turn * self.out_blocks
        # A unit more for each: nobody waits for what was just made. All of the first, where the ring holds all rows.
        head = 0 if self.block.one_layer else firsts + self.clusters
        if CLUSTER * pairs <= self.slots:
            head = max(head, pairs * self.hid_blocks)
        early = min(CLUSTER * pairs, self.slots) if self.block.before else 0
        units = pairs * self.hid_blocks, pairs * self.out_blocks
        return Walk(*units, head, firsts, seconds, self.slots, early)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Names and bytes of what is in shared memory."""
        return (
            ("pages of both operands", STEPS * STEP_BYTES),
            ("tiles on their way out", 2 * SLABS * SLAB_BYTES),
            ("barriers", BARRIER_BYTES),
        )

    @property
    def shared_bytes(self) -> int:
        return sum(size for _, size in self.parts)

    @property
    def registers(self) -> int:
        """An estimate for one thread of a consumer warpgroup: sums, and the rest."""
        return COLUMNS // 2 + 64


def is_tiled(stage: Stage) -> bool:
    """Whether a stage in plain form loops over columns of a product that directions of the grid divide as well."""
    divided = {a for d in stage.mesh if d.level is Level.GRID for a in d.axes}
    made = {a for op in stage.ops if op.kind == "product" for a in op.result_axes}
    return any(loop.axis in divided & made for loop in stage.loops[1:])


@lru_cache(maxsize=1024)
def build(stage: Stage, pipeline: Pipeline, limit: int = SHARED_LIMIT) -> TiledBlock:
    """The schedule of ``stage``, in plain form, within ``limit`` bytes of shared memory.

    Raises:
        VerifyError: the ops are neither a feed-forward block nor one layer, the mesh or a loop is none that they can be
            dealt by, or something does not fit, with the arithmetic.
    """
    block = find_layers(stage, pipeline)
    _loops(stage, block)
    made = _checked(stage.name, block, _clusters(stage, block))
    if made.shared_bytes > limit:
        parts = " + ".join(f"{name} {size}" for name, size in made.parts)
        raise VerifyError(
            f"stage {stage.name!r} needs {parts} = {made.shared_bytes} > {limit} bytes of shared memory",
            "plan for a device with more",
        )
    return made


def is_tileable(program: Pipeline) -> bool:
    """Whether ``program``, one stage of row ops, is a block that such a kernel can be made of, as far as sizes go."""
    try:
        written = written_out(program)
        _checked("", find_layers(written.stages[0], written), 1)
    except (VerifyError, IRError):
        return False
    return True


def _checked(name: str, block: Block, clusters: int) -> TiledBlock:
    widths = [(block.k, block.sizes[0]), (block.hid, block.sizes[1])]
    for axis, size in [*widths, *((last.out, last.columns) for last in block.lasts)]:
        check_alignment(name, axis, size)
    if block.adds:
        raise VerifyError(f"stage {name!r}: results are added in memory, tiles are stored", "store the result (->)")
    if block.before and block.sizes[0] > WIDEST_ROW:
        raise VerifyError(
            f"stage {name!r}: rows of {block.sizes[0]} > {WIDEST_ROW} columns stand in front of the first layer, and a"
            " warp makes them",
            "leave what is in front of the first layer outside",
        )
    return TiledBlock(block, clusters)


def loop_tiles(block: Block) -> dict[str, int]:
    """Axes that a cluster loops over, and what it takes of them at once: rows, and columns of the first product."""
    if block.one_layer:
        return {block.rows: ROWS, **dict.fromkeys(block.outs, COLUMNS // block.products)}
    return {block.rows: ROWS, block.hid: COLUMNS // len(block.firsts)}


def _loops(stage: Stage, block: Block) -> None:
    wanted = loop_tiles(block)
    if stage.blocks != wanted:
        tiles = " and ".join(f"{axis!r} by {tile}" for axis, tile in wanted.items())
        raise VerifyError(f"stage {stage.name!r}: a tiled block loops over {tiles}", "use plan.passes.tile_block")


def _clusters(stage: Stage, block: Block) -> int:
    """Clusters of the mesh: over rows by columns, of two tiles of rows each."""
    sizes = {(d.level, d.axes): d.size for d in stage.mesh if d.size > 1}
    pair = sizes.pop((Level.CLUSTER, (block.rows,)), 1)
    rows = sizes.pop((Level.GRID, (block.rows,)), 1)
    columns = sizes.pop((Level.GRID, block.shared_by_columns), 1)
    if sizes or pair != CLUSTER:
        raise VerifyError(
            f"stage {stage.name!r}: the mesh of a tiled block is rows, ({', '.join(block.shared_by_columns)}), and"
            f" clusters of {CLUSTER} over rows",
            "use plan.passes.tile_block",
        )
    blocks = gcd(*TiledBlock(block, 1).result_blocks)
    if columns != blocks and (not block.one_layer or blocks % columns):
        raise VerifyError(
            f"stage {stage.name!r}: {columns} workers divide {block.sizes[2]} columns, of"
            f" {COLUMNS // block.products} each",
            f"divide them over {blocks}",
        )
    return rows * columns


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
    made = [replace(e, first=0) for e in epilogues(found)[-len(found.lasts) :]]
    read = [vector_words(e, pipeline, "", "c") for e in made]
    if len({(e.body(words.values), *words.loads) for e, words in zip(made, read, strict=True)}) > 1:
        raise VerifyError(
            f"stage {stage.name!r}: what is done to its {len(found.lasts)} results differs: tiles have one epilogue",
            "share a tile, or make them one by one",
        )
    return found
