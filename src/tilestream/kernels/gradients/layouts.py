"""Who holds which block of a sum of gradients, and what a CTA keeps in shared memory for it: three layouts.

* Blocks, of one layer whose dX nobody wants: CTAs divide dW along out and k, and share out the rows. The warpgroups of
  a CTA divide its block.
* Narrow, of layers up to 64 wide: a warpgroup has tiles of 64 rows of its own, and whole sums of these.
* Wide, of layers up to 128 wide, whose dW would be 128 accumulators a thread, too many beside a product: a warpgroup
  has 64 rows of dX, and 64 rows of dW, summed over the rows of both. What it makes of dX the other one reads, so both
  meet behind each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, prod

from tilestream.errors import VerifyError
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline
from tilestream.kernels.gradients.chain import Layer
from tilestream.kernels.stream.layout import CHUNK
from tilestream.kernels.stream.model import ceil_to

GROUPS = 2
"""Consumer warpgroups of a CTA."""
COLUMNS = 64
"""Of a chunk of shared memory, of a product with a weight, and rows of dW that a warpgroup has."""
NARROW, WIDEST = 64, 128
"""Columns of a layer beside a product with its weight: of narrow ones, and of any."""
ACCUMULATORS, OPERAND, OVERHEAD = 32, 16, 40
"""Registers a thread: of a product of 64 columns, and of slopes for it where they are kept; of the next one's left
operand; of addresses and temporaries."""
BULK_BYTES = 16
"""What bulk copies ask of the bytes of a row: a multiple."""
ONES_BYTES = 1024
"""Eight rows of ones, which a bias's sum multiplies dY by."""
NARROW_TILES, NARROW_MADE = 4, 2
"""Of each warpgroup: gradients of three layers in turns, and dX; inputs of layers that it makes of what is loaded, in
turns. A warp that runs ahead writes what the sums of two layers ago have read, which all warps know to be over: they
met since."""
WIDE_TILES = 2
"""Gradients that are made, in turns: both warpgroups meet before one is overwritten. dX is one of them."""
NARROW_BYTES = 7 * TILE_ROWS * 128
"""That a layer moves through shared memory for a tile: its input is written, and read by the sum and by the slope; dY
is written, and read by the sum; and what two products read of their other operands."""


class Kind(StrEnum):
    BLOCKS = "blocks"
    NARROW = "narrow"
    WIDE = "wide"


@dataclass(frozen=True)
class Held:
    """A sum that a warpgroup keeps in registers: of dW of a layer, turned where that takes fewer, or db.

    Attributes:
        tensor: where it goes. blocks: of eight columns. turned: whether rows of it are columns of X. first: of its
            partial sums, in fours of floats. chunk: of 64 columns, that it begins at. groups: warpgroups that have a
            part of it each, the next 64 rows or, ``across``, the next columns.
    """

    layer: int
    tensor: str
    dtype: str
    blocks: int
    turned: bool
    is_bias: bool
    first: int
    chunk: int = 0
    groups: int = 1
    across: bool = False

    @property
    def part(self) -> int:
        """Fours of floats that a group leaves of it: of a bias one column."""
        return COLUMNS // 4 if self.is_bias else 128 * self.blocks

    @property
    def fours(self) -> int:
        """Of floats, that all groups leave of it."""
        return self.part * self.groups


@dataclass(frozen=True)
class Box:
    """64 rows x 64 columns of a tensor, a chunk of shared memory, and where they begin."""

    tensor: str
    column: int = 0
    row: int = 0


@dataclass(frozen=True)
class Layout:
    """What a CTA holds.

    Attributes:
        groups: consumer warpgroups that sum. rings: one of the CTA, or one of each warpgroup.
        step_tiles: of 64 rows, that a ring takes at a step. slots: what fills those of a step, ``left`` chunks of
            the first box's tensor, and ``right`` of the second one's: side by side, or of all tiles of a step.
        weights: what stays in shared memory. least: slots that a ring must have.
        tile_chunks: of the widest gradient that is made; ``tiles`` of them stay for a while.
        made_chunks: of the widest input that is made again; ``made`` of them stay.
        operands: registers beside the sums.
    """

    kind: Kind
    held: tuple[Held, ...]
    slots: tuple[tuple[Box, ...], ...]
    operands: int
    least: int
    groups: int = GROUPS
    weights: tuple[Box, ...] = ()
    tiles: int = 0
    tile_chunks: int = 0
    made: int = 0
    made_chunks: int = 0
    step_bytes: int = 0
    left: int = 1
    right: int = 0

    @property
    def rings(self) -> int:
        return GROUPS if self.kind is Kind.NARROW else 1

    @property
    def step_tiles(self) -> int:
        return GROUPS if self.kind is Kind.WIDE else 1

    @property
    def slot_bytes(self) -> int:
        return (self.left + self.right) * CHUNK

    def areas(self, slots: int) -> dict[str, int]:
        """Bytes of shared memory by name, in order, where rings have so many slots."""
        return {
            "weights": len(self.weights) * CHUNK,
            "rings": self.rings * slots * self.slot_bytes,
            "gradients": GROUPS * self.tiles * self.tile_chunks * CHUNK,  # that are made, of both warpgroups' rows
            "inputs": GROUPS * self.made * self.made_chunks * CHUNK,  # that are made of what is loaded
            "ones": ONES_BYTES,
            "barriers": 16 * (self.rings * slots + 1),
        }

    @property
    def registers(self) -> int:
        """A consumer thread."""
        return sum(4 * h.blocks for h in self.held) + self.operands


def chunks(columns: int) -> int:
    """Of 64 columns each."""
    return ceil(columns / COLUMNS)


class _Sums:
    """The sums of a layout, one after another."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.held: list[Held] = []

    def hold(
        self, layer: int, tensor: str, blocks: int, turned: bool = False, is_bias: bool = False, chunk: int = 0,
        groups: int = 1, across: bool = False,
    ) -> None:  # fmt: skip
        first = self.held[-1].first + self.held[-1].fours if self.held else 0
        dtype = self.pipeline.tensor(tensor).dtype
        self.held.append(Held(layer, tensor, dtype, blocks, turned, is_bias, first, chunk, groups, across))


def blocks(gradient: str, layer: Layer, pipeline: Pipeline, groups: tuple[int, int], wide: int) -> Layout:
    """Of CTAs whose warpgroups, ``groups`` along out and k, have ``wide`` chunks of k each."""
    sums = _Sums(pipeline)
    sums.hold(0, layer.weight_gradient, 8 * wide, groups=prod(groups), across=groups[1] > 1)
    if layer.bias_gradient:
        sums.hold(0, layer.bias_gradient, 1, is_bias=True, groups=groups[0])
    return Layout(
        Kind.BLOCKS, tuple(sums.held), ((Box(gradient), Box(layer.input)),), OVERHEAD, 2, prod(groups),
        left=groups[0], right=groups[1] * wide,
    )  # fmt: skip


def chain(gradient: str, layers: Sequence[Layer], pipeline: Pipeline) -> Layout:
    """Of CTAs whose warpgroups have rows of their own, narrow or wide as the layers are.

    Raises:
        VerifyError: a layer is wider than 128, or bulk copies cannot address its weight.
    """
    widest = 0
    for layer in layers:
        bulk = not layer.weight or layer.k * DTYPE_BYTES[pipeline.tensor(layer.weight).dtype] % BULK_BYTES == 0
        own = max(layer.out, layer.k)
        if own > WIDEST or not bulk:
            raise VerifyError(
                f"{layer.source}: {layer.k if not bulk else own} columns; a backward chain takes up to {WIDEST}, and"
                f" weights of rows of a multiple of {BULK_BYTES} bytes",
                "use a row stream and stationary sums",
            )
        widest = max(widest, own)
    return (_narrow if widest <= NARROW else _wide)(gradient, layers, pipeline)


def _narrow(gradient: str, layers: Sequence[Layer], pipeline: Pipeline) -> Layout:
    sums = _Sums(pipeline)
    for n, x in enumerate(layers):
        out, k = (ceil_to(size, 8) // 8 for size in (x.out, x.k))
        sums.hold(n, x.weight_gradient, min(out, k), turned=out < k)
        if x.bias_gradient:
            sums.hold(n, x.bias_gradient, 1, is_bias=True)
    slope = ACCUMULATORS if any(x.slope for x in layers) else 0
    given = max(sum(2048 * h.blocks for h in share) for share in shares(sums.held))
    return Layout(
        Kind.NARROW, tuple(sums.held), ((Box(gradient),), *((Box(name),) for x in layers for name in x.read)),
        ACCUMULATORS + slope + OPERAND + OVERHEAD,
        max(4, 1 + 2 * max(len(x.read) for x in layers), ceil(given / CHUNK)),
        weights=tuple(Box(x.weight) for x in layers if x.weight), tiles=NARROW_TILES, tile_chunks=1,
        made=NARROW_MADE, made_chunks=int(any(x.makes for x in layers)),
        step_bytes=GROUPS * len(layers) * NARROW_BYTES,
    )  # fmt: skip


def _wide(gradient: str, layers: Sequence[Layer], pipeline: Pipeline) -> Layout:
    """The wider side's columns are rows of a sum, 64 a warpgroup."""
    sums = _Sums(pipeline)
    for n, x in enumerate(layers):
        turned = chunks(x.out) < chunks(x.k)
        rows, columns = (x.k, x.out) if turned else (x.out, x.k)
        for c in range(chunks(columns)):
            wide = ceil_to(min(COLUMNS, columns - COLUMNS * c), 8) // 8
            sums.hold(n, x.weight_gradient, wide, turned, chunk=c, groups=chunks(rows))
        if x.bias_gradient:
            sums.hold(n, x.bias_gradient, 1, is_bias=True, groups=chunks(x.out))
    wide = [(gradient, layers[0].out), *((name, x.k) for x in layers for name in x.read)]
    # A layer's slots come back when the next one's first product is over.
    each = [chunks(x.k) * len(x.read) for x in layers]
    least = max(chunks(layers[0].out) + sum(each[:2]), *(sum(each[n : n + 2]) for n in range(len(each))))
    return Layout(
        Kind.WIDE, tuple(sums.held),
        tuple((Box(name, COLUMNS * c),) for name, columns in wide for c in range(chunks(columns))),
        ACCUMULATORS + OVERHEAD, least,
        weights=tuple(
            Box(x.weight, COLUMNS * c, COLUMNS * r)
            for x in layers
            if x.weight
            for c in range(chunks(x.k))
            for r in range(chunks(x.out))
        ),
        tiles=min(WIDE_TILES, sum(1 for x in layers if x.weight)),
        tile_chunks=max((chunks(x.k) for x in layers if x.weight), default=0),
        made=1, made_chunks=max((chunks(x.k) for x in layers if x.makes), default=0),
        step_bytes=sum(map(_wide_bytes, layers)), left=GROUPS,
    )  # fmt: skip


def _wide_bytes(layer: Layer) -> int:
    """What a layer moves through shared memory for a tile of each warpgroup."""
    out, k = chunks(layer.out), chunks(layer.k)
    one = GROUPS * CHUNK * k
    total = one * len(layer.read)  # written by copies
    if layer.weight:  # dX is written, what its slope takes is read, and both operands of its product are,
        total += one * (1 + len(layer.streams)) + 2 * one * out
    if layer.makes:
        total += one * (1 + len(layer.sources))
    return total + 2 * one * out  # as are those of the sum


def shares(held: Sequence[Held]) -> tuple[tuple[Held, ...], tuple[Held, ...]]:
    """The sums that each warpgroup of a narrow chain adds up for both: about half."""
    found: tuple[list[Held], list[Held]] = ([], [])
    size = [0, 0]
    for h in held:
        lighter = 0 if size[0] <= size[1] else 1
        found[lighter].append(h)
        size[lighter] += h.blocks
    return tuple(found[0]), tuple(found[1])
