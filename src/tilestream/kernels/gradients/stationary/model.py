"""Who has which block of a stationary sum and which rows of the batch, and what that takes of an SM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

from tilestream.errors import VerifyError
from tilestream.ir.axes import ROWS, Level
from tilestream.ir.derive import divided
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline, Stage
from tilestream.ir.plain import by_rows, plain
from tilestream.kernels.gradients.stationary.sums import Sums, find_sums
from tilestream.kernels.stream.layout import CHUNK, SHARED_LIMIT

CHUNK_COLUMNS = 64
"""Columns of a chunk in shared memory; a warpgroup multiplies one of dY by up to four of X."""
MOST_CHUNKS = 4
MOST_SLOTS = 12
"""Deeper rings hold no more than the memory's latency has under way."""
LEAST_SLOTS = 2
ONES_BYTES = 1024
BULK_BYTES = 16
"""What bulk copies ask of the bytes of a row: a multiple."""


@dataclass(frozen=True)
class StationarySum:
    """One stage: CTAs in order of (split, part of out, part of k), the last one fastest.

    Attributes:
        parts: blocks of the result along out and k, a CTA each. splits: CTAs that share out the rows of a block.
        groups: consumer warpgroups of a CTA along out and along k, one of them 1.
        chunks: of 64 columns of k that a warpgroup has. slots: of the ring, 64 rows of both operands each.
        bulk: whether bulk copies can address the rows of left and right.
    """

    stage: Stage
    sums: Sums
    dtype: str
    weight_dtype: str
    bias_dtype: str
    parts: tuple[int, int]
    splits: int
    groups: tuple[int, int]
    chunks: int
    slots: int
    bulk: tuple[bool, bool]

    @property
    def ctas(self) -> int:
        return prod(self.parts) * self.splits

    @property
    def where(self) -> str:
        """The user's line."""
        return self.sums.product.source

    @property
    def block(self) -> tuple[int, int]:
        """Columns of out and of k that a CTA has, whole chunks."""
        return self.groups[0] * CHUNK_COLUMNS, self.groups[1] * self.chunks * CHUNK_COLUMNS

    @property
    def slot_bytes(self) -> int:
        return sum(self.block) // CHUNK_COLUMNS * CHUNK

    @property
    def ones(self) -> int:
        """Offset of the operand of ones, behind the ring."""
        return self.slots * self.slot_bytes

    @property
    def bars(self) -> int:
        return self.ones + ONES_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.bars + 16 * self.slots

    @property
    def registers(self) -> int:
        """A consumer thread: accumulators, of the bias too, and addresses."""
        return 32 * self.chunks + 4 + 40

    @property
    def partial_bytes(self) -> int:
        """Partial results of one split of one block: fp32, and the bias's 64 rows a warpgroup."""
        bias = self.groups[0] * TILE_ROWS * 4 if self.bias_dtype else 0
        return prod(self.groups) * TILE_ROWS * self.chunks * CHUNK_COLUMNS * 4 + bias

    @property
    def workspace_bytes(self) -> int:
        return self.ctas * self.partial_bytes

    @property
    def footprint(self) -> tuple[tuple[str, int], ...]:
        """Shared memory by name."""
        return (
            (f"ring of {self.slots} x {TILE_ROWS} rows", self.ones),
            ("ones", ONES_BYTES),
            ("barriers", 16 * self.slots),
        )


def is_stationary(pipeline: Pipeline) -> bool:
    """Whether every stage sums a product over the rows that its outermost loop streams."""
    if by_rows(pipeline) or pipeline.queues:
        return False
    return all(
        len(s.loops) == 1 and s.loops[0].axis == ROWS.name and _products_over_rows(s) for s in plain(pipeline).stages
    )


def _products_over_rows(stage: Stage) -> bool:
    """Whether a stage has products, all over rows; with others beside them it is a backward chain."""
    made = [{a.name for a in op.out.axes} for op in stage.ops if op.kind == "product" and op.out is not None]
    return bool(made) and not any(ROWS.name in axes for axes in made)


@lru_cache(maxsize=1024)
def builds(pipeline: Pipeline) -> tuple[StationarySum, ...]:
    """Every stage of a launch.

    Raises:
        VerifyError: as ``build``.
    """
    written = plain(pipeline)
    return tuple(build(stage, written) for stage in written.stages)


def build(stage: Stage, pipeline: Pipeline, limit: int = SHARED_LIMIT) -> StationarySum:
    """How a stage in plain form runs.

    Raises:
        VerifyError: the stage is no stationary sum, its blocks are wider than the registers hold, or its ring has no
            room; the message has the arithmetic.
    """
    found = find_sums(stage, pipeline)
    where = found.product.source or f"product in stage {stage.name!r}"
    if stage.loops[0].tile != TILE_ROWS:
        raise VerifyError(f"{where}: takes {stage.loops[0].tile} rows a step, kernels {TILE_ROWS}", "loop by 64 rows")
    workers = {axis: dict.fromkeys(Level, 1) for axis in (*found.axes, ROWS.name)}
    for d in stage.mesh:
        if d.size > 1:
            workers[divided(found.product, d)][d.level] *= d.size
    for axis, by_level in workers.items():
        if by_level[Level.CLUSTER] > 1 or (axis == ROWS.name and by_level[Level.WARPGROUP] > 1):
            raise VerifyError(
                f"{where}: {axis} divided over a cluster, or rows over warpgroups, has no kernel so far",
                "divide rows over the grid, and columns over grid and warpgroups",
            )
    parts = tuple(workers[a][Level.GRID] for a in found.axes)
    groups = tuple(workers[a][Level.WARPGROUP] for a in found.axes)
    out, k = (ceil(n / CHUNK_COLUMNS) for n in found.sizes)
    chunks = ceil(k / (parts[1] * groups[1]))
    _check_block(where, found, (out, k), (parts[0], parts[1]), (groups[0], groups[1]), chunks)
    tensor = pipeline.tensor
    dtype = tensor(found.left).dtype
    size = DTYPE_BYTES[dtype]
    slot = (groups[0] + groups[1] * chunks) * CHUNK
    slots = min(MOST_SLOTS, (limit - ONES_BYTES) // (slot + 16))
    if slots < LEAST_SLOTS:
        raise VerifyError(
            f"{where}: a ring of {LEAST_SLOTS} slots of {slot} bytes is more than {limit} bytes of shared memory",
            "use more parts",
        )
    return StationarySum(
        stage, found, dtype, tensor(found.weight).dtype, tensor(found.bias).dtype if found.bias else "",
        (parts[0], parts[1]), workers[ROWS.name][Level.GRID], (groups[0], groups[1]), chunks, slots,
        (found.sizes[0] * size % BULK_BYTES == 0, found.sizes[1] * size % BULK_BYTES == 0),
    )  # fmt: skip


def _check_block(
    where: str, found: Sums, have: tuple[int, int], parts: tuple[int, int], groups: tuple[int, int], chunks: int
) -> None:
    """Every part of the result is somebody's, fits the registers, and nobody is without one."""
    for axis, size, n, part, group, most in zip(
        found.axes, found.sizes, have, parts, groups, (1, MOST_CHUNKS), strict=True
    ):
        a_group = ceil(n / (part * group))
        if a_group > most:
            raise VerifyError(
                f"{where}: {axis} {size} over {part} CTAs x {group} warpgroups is {a_group} x {CHUNK_COLUMNS} columns a"
                f" warpgroup > {most * CHUNK_COLUMNS}, what its registers hold",
                f"divide it over {ceil(n / (most * group))} CTAs",
            )
        a_cta = group * (1 if most == 1 else chunks)
        if (part - 1) * a_cta >= n:
            raise VerifyError(
                f"{where}: {axis} {size} is {n} chunks of {CHUNK_COLUMNS}; {part} CTAs of {a_cta} leave one without"
                " any",
                f"divide it over {ceil(n / a_cta)} CTAs",
            )
