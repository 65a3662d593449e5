"""How a launch of gradients runs: which CTA has which rows and which block of a sum, and what that takes of an SM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from math import ceil, prod

from tilestream.errors import VerifyError
from tilestream.ir.axes import ROWS, Level
from tilestream.ir.derive import divided, sums
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline, Stage, TileOp
from tilestream.ir.plain import by_rows, plain
from tilestream.kernels.gradients import layouts
from tilestream.kernels.gradients.chain import Chain, Layer, find_chain
from tilestream.kernels.gradients.layouts import BULK_BYTES, COLUMNS, GROUPS, Layout, chunks
from tilestream.kernels.stream.layout import SHARED_LIMIT
from tilestream.kernels.stream.places import REGISTER_LIMIT

MOST_SLOTS = 12
"""Deeper rings hold no more than the memory's latency has under way."""
MOST_CHUNKS = 4
"""Of X, that a warpgroup multiplies a chunk of dY by."""


@dataclass(frozen=True)
class Schedule:
    """One stage: CTAs in order of (split, part of out, part of k), the last one fastest.

    Attributes:
        parts: blocks of the result along out and k, a CTA each. splits: CTAs that share out the rows of a block.
        slots: of a ring. odd: streams whose rows bulk copies cannot address.
    """

    stage: Stage
    chain: Chain
    layout: Layout
    parts: tuple[int, int]
    splits: int
    slots: int
    odd: tuple[str, ...]

    @property
    def dtype(self) -> str:
        return self.chain.dtype

    @property
    def ctas(self) -> int:
        return prod(self.parts) * self.splits

    @property
    def block(self) -> tuple[int, int]:
        """Columns of out and of k that a CTA sums of one layer, whole chunks."""
        return self.layout.left * COLUMNS, self.layout.right * COLUMNS

    @property
    def fours(self) -> int:
        """Partial sums of a CTA, in fours of floats."""
        last = self.layout.held[-1]
        return last.first + last.fours

    @property
    def partial_bytes(self) -> int:
        """Partial sums of a CTA: fp32."""
        return 16 * self.fours

    @property
    def workspace_bytes(self) -> int:
        return self.ctas * self.partial_bytes

    @property
    def streams(self) -> tuple[str, ...]:
        """Tensors that come through the ring: the gradient, then of each layer its input and what its slope reads."""
        return tuple(dict.fromkeys(box.tensor for slot in self.layout.slots for box in slot))

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(layer.weight for layer in self.chain.layers if layer.weight)

    @property
    def footprint(self) -> tuple[tuple[str, int], ...]:
        """Shared memory by name, in order."""
        return tuple(self.layout.areas(self.slots).items())

    @property
    def shared_bytes(self) -> int:
        return sum(size for _, size in self.footprint)

    def at(self, area: str) -> int:
        """Where an area of shared memory begins."""
        return sum(size for _, size in takewhile(lambda named: named[0] != area, self.footprint))


def is_gradients(pipeline: Pipeline) -> bool:
    """Whether every stage has products over the rows that its only loop streams; a chain, which has products row by row
    beside them, is a launch of its own."""
    if by_rows(pipeline) or pipeline.queues:
        return False
    found = [(s, [ROWS.name in sums(op) for op in _products(s)]) for s in plain(pipeline).stages]
    return all([loop.axis for loop in s.loops] == [ROWS.name] and any(over) for s, over in found) and (
        len(found) == 1 or all(all(over) for _, over in found)
    )


def is_chain(pipeline: Pipeline) -> bool:
    """Whether a launch of gradients has products row by row beside the sums."""
    return is_gradients(pipeline) and any(ROWS.name not in sums(op) for op in _products(plain(pipeline).stages[0]))


def _products(stage: Stage) -> list[TileOp]:
    return [op for op in stage.ops if op.kind == "product" and op.out is not None]


@lru_cache(maxsize=1024)
def builds(pipeline: Pipeline) -> tuple[Schedule, ...]:
    """Every stage of a launch.

    Raises:
        VerifyError: as ``build``.
    """
    written = plain(pipeline)
    return tuple(build(stage, written) for stage in written.stages)


def build(stage: Stage, pipeline: Pipeline) -> Schedule:
    """How a stage in plain form (``ir.plain``) runs.

    Raises:
        VerifyError: the stage is no chain of gradients, a layer is too wide, its sums are more than the registers hold,
            or its ring has no room; the message has the arithmetic.
    """
    chain = find_chain(stage, pipeline)
    where = chain.layers[0].source
    if chain.left:
        raise VerifyError(f"{where}: {chain.left[0][0]!r} leaves between two layers", "cut the chain there")
    if stage.loops[0].tile != TILE_ROWS:
        raise VerifyError(f"{where}: takes {stage.loops[0].tile} rows a step, kernels {TILE_ROWS}", "loop by 64 rows")
    if any(d.level is Level.CLUSTER and d.size > 1 for d in stage.mesh):
        raise VerifyError(f"{where}: work divided over a cluster has no kernel so far", "divide it over the grid")
    rows_apart = any(d.level is Level.WARPGROUP and d.axes == (ROWS.name,) for d in stage.mesh)
    layout, parts, splits = (_rows_divided if rows_apart else _columns_divided)(stage, chain, pipeline)
    size = DTYPE_BYTES[chain.dtype]
    streams = dict.fromkeys(box.tensor for slot in layout.slots for box in slot)
    odd = tuple(n for n in streams if pipeline.tensor(n).features * size % BULK_BYTES)
    return Schedule(stage, chain, layout, parts, splits, _slots(layout, where), odd)


def room(layers: Sequence[Layer], pipeline: Pipeline) -> None:
    """Check that one launch has room for these layers of a chain.

    Raises:
        VerifyError: it has none; the message has the arithmetic.
    """
    _slots(layouts.chain("", layers, pipeline), layers[0].source)


def _slots(layout: Layout, where: str) -> int:
    """Of a ring, beside what else is in shared memory."""
    if layout.registers > REGISTER_LIMIT:
        parts = " + ".join(str(4 * h.blocks) for h in layout.held)
        raise VerifyError(
            f"{where}: sums of {parts} + {layout.operands} registers a thread = {layout.registers} > {REGISTER_LIMIT}",
            "cut the chain",
        )
    fixed = sum(layout.areas(0).values())
    slots = min(MOST_SLOTS, (SHARED_LIMIT - fixed) // (layout.rings * (layout.slot_bytes + 16)))
    if slots < layout.least:
        raise VerifyError(
            f"{where}: {fixed} bytes of weights and gradients leave {slots} < {layout.least} slots of"
            f" {layout.slot_bytes} bytes",
            "cut the chain",
        )
    return slots


def _rows_divided(stage: Stage, chain: Chain, pipeline: Pipeline) -> tuple[Layout, tuple[int, int], int]:
    """Warpgroups have rows of their own: the layout, no parts, and splits."""
    by_level = {level: prod(d.size for d in stage.mesh if d.level is level) for level in Level}
    if any(d.axes != (ROWS.name,) for d in stage.mesh) or by_level[Level.WARPGROUP] != GROUPS:
        raise _not_over_rows(chain)
    return layouts.chain(chain.gradient, chain.layers, pipeline), (1, 1), by_level[Level.GRID]


def _not_over_rows(chain: Chain) -> VerifyError:
    where = chain.layers[0].source
    return VerifyError(f"{where}: a backward chain divides rows over the grid and two warpgroups", "divide it so")


def _columns_divided(stage: Stage, chain: Chain, pipeline: Pipeline) -> tuple[Layout, tuple[int, int], int]:
    """Warpgroups and CTAs have blocks of the one layer's sum: the layout, parts along out and k, and splits."""
    layer = chain.layers[0]
    if len(chain.layers) > 1 or layer.weight or layer.makes:
        raise _not_over_rows(chain)
    out, k = (a.name for a in layer.sum.made.axes)
    workers = {axis: dict.fromkeys(Level, 1) for axis in (out, k, ROWS.name)}
    for d in stage.mesh:
        if d.size > 1:
            workers[divided(layer.sum, d, stage)][d.level] *= d.size
    out_parts, k_parts = workers[out][Level.GRID], workers[k][Level.GRID]
    groups = workers[out][Level.WARPGROUP], workers[k][Level.WARPGROUP]
    wide = ceil(chunks(layer.k) / (k_parts * groups[1]))
    _check_part(layer, out, layer.out, out_parts, groups[0], 1, 1)
    _check_part(layer, k, layer.k, k_parts, groups[1], MOST_CHUNKS, wide)
    layout = layouts.blocks(chain.gradient, layer, pipeline, groups, wide)
    return layout, (out_parts, k_parts), workers[ROWS.name][Level.GRID]


def _check_part(layer: Layer, axis: str, size: int, parts: int, groups: int, most: int, wide: int) -> None:
    """Every part of the result is somebody's, fits the registers, and nobody is without one."""
    have = chunks(size)
    a_group = ceil(have / (parts * groups))
    if a_group > most:
        raise VerifyError(
            f"{layer.source}: {axis} {size} over {parts} CTAs x {groups} warpgroups is {a_group} x {COLUMNS} columns a"
            f" warpgroup > {most * COLUMNS}, what its registers hold",
            f"divide it over {ceil(have / (most * groups))} CTAs",
        )
    a_cta = groups * wide
    if (parts - 1) * a_cta >= have:
        raise VerifyError(
            f"{layer.source}: {axis} {size} is {have} chunks of {COLUMNS}; {parts} CTAs of {a_cta} leave one without"
            " any",
            f"divide it over {ceil(have / a_cta)} CTAs",
        )
