"""Backward chains of layers up to 128 wide: both warpgroups of a CTA share the sums.

The gradient of 128 x 128 weights is 128 accumulators a thread of one warpgroup, too many beside a product. Here a
warpgroup has 64 rows of dX, but 64 rows of dW, summed over the rows of both: 64 accumulators a layer. What it makes of
dX the other one reads, so both meet behind each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from tilestream.errors import VerifyError
from tilestream.ir.pipeline import TILE_ROWS, Pipeline
from tilestream.kernels.gradients.backward.chain import Layer
from tilestream.kernels.gradients.backward.model import (
    ACCUMULATORS,
    GROUPS,
    MOST_SLOTS,
    ONES_BYTES,
    OVERHEAD,
    Divided,
    Held,
    check_registers,
    read,
)
from tilestream.kernels.stream.layout import CHUNK, SHARED_LIMIT
from tilestream.kernels.stream.model import ceil_to

WIDEST = 128
COLUMNS = 64
"""Of a chunk, of a product, and rows of dW that a warpgroup has."""
SLOT = GROUPS * CHUNK
"""A chunk's columns of both warpgroups' rows."""
TILES = 2
"""Gradients that are made, in turns: both warpgroups meet before one is overwritten. dX is one of them."""


def chunks(columns: int) -> int:
    """Of 64 columns each."""
    return ceil(columns / COLUMNS)


@dataclass(frozen=True)
class WideChain(Divided):
    """One stage: CTAs of two warpgroups, a tile of 64 rows each, that divide the rows and share all sums.

    Attributes:
        slots: of the CTA's ring, 128 rows of 64 columns each. held: sums, by chunks of columns, layer by layer.
    """

    @property
    def loads(self) -> tuple[tuple[str, int], ...]:
        """What fills the ring's slots, in order: a tensor, and its first column."""
        wide = [(self.chain.gradient, self.chain.layers[0].out)]
        wide += [(name, layer.k) for layer in self.chain.layers for name in read(layer)]
        return tuple((name, COLUMNS * c) for name, columns in wide for c in range(chunks(columns)))

    @property
    def weight_boxes(self) -> tuple[tuple[str, int, int], ...]:
        """Of 64 x 64, which stay in shared memory, in order: a weight, its first column, its first row."""
        return tuple(
            (x.weight, COLUMNS * c, COLUMNS * r)
            for x in self.chain.layers
            if x.weight
            for c in range(chunks(x.k))
            for r in range(chunks(x.out))
        )

    @property
    def registers(self) -> int:
        """A consumer thread."""
        return _registers(self.held)

    @property
    def ring(self) -> int:
        """Its offset, behind the weights."""
        return len(self.weight_boxes) * CHUNK

    @property
    def tiles(self) -> int:
        """Offset of the gradients that are made, of both warpgroups' rows."""
        return self.ring + self.slots * SLOT

    @property
    def tile_chunks(self) -> int:
        """Of the widest gradient that is made."""
        return _tile_chunks(self.chain.layers)

    @property
    def made(self) -> int:
        """Offset of the input that is made of what is loaded, of the layer at hand."""
        return self.tiles + _tiles(self.chain.layers) * self.tile_chunks * SLOT

    @property
    def ones(self) -> int:
        return self.made + _made_chunks(self.chain.layers) * SLOT

    @property
    def bars(self) -> int:
        return self.ones + ONES_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.bars + 16 * (self.slots + 1)

    @property
    def step_bytes(self) -> int:
        """What a tile of each warpgroup moves through an SM's shared memory."""
        rows, total = 2 * GROUPS * TILE_ROWS, 0
        for layer in self.chain.layers:
            out, k = chunks(layer.out), chunks(layer.k)
            total += rows * COLUMNS * k * len(read(layer))  # written by copies
            if layer.weight:
                total += rows * COLUMNS * k * (1 + len(layer.streams))  # dX is written, what its slope takes is read,
            if layer.makes:
                total += rows * COLUMNS * k * (1 + len(layer.sources))
            if layer.weight:
                total += GROUPS * k * out * 2 * CHUNK  # and both operands of its product are,
            total += out * k * rows * 2 * COLUMNS  # as are those of the sum
        return total

    @property
    def footprint(self) -> tuple[tuple[str, int], ...]:
        """Shared memory by name."""
        return (
            ("weights", self.ring),
            (f"ring of {self.slots} x {GROUPS * TILE_ROWS} rows", self.slots * SLOT),
            ("gradients", self.made - self.tiles),
            ("an input made again", self.ones - self.made),
            ("ones and barriers", self.shared_bytes - self.ones),
        )


def room(layers: Sequence[Layer], pipeline: Pipeline) -> tuple[tuple[Held, ...], int]:
    """What a warpgroup holds of layers up to ``WIDEST`` wide, and how many slots the CTA's ring has.

    Raises:
        VerifyError: the sums are more than the registers hold, or shared memory has no room; with the arithmetic.
    """
    where, held = layers[0].source, _held(layers, pipeline)
    check_registers(held, _registers(held), where)
    weights = sum(chunks(x.out) * chunks(x.k) * CHUNK for x in layers if x.weight)
    kept = _tiles(layers) * _tile_chunks(layers) + _made_chunks(layers)
    fixed = weights + kept * SLOT + ONES_BYTES + 64
    slots = min(MOST_SLOTS, (SHARED_LIMIT - fixed) // (SLOT + 16))
    each = [chunks(x.k) * len(read(x)) for x in layers]
    # A layer's slots come back when the next one's first product is over.
    least = max(chunks(layers[0].out) + sum(each[:2]), *(sum(each[n : n + 2]) for n in range(len(each))))
    if slots < least:
        raise VerifyError(
            f"{where}: {fixed} bytes of weights and gradients leave {slots} < {least} slots of {SLOT} bytes",
            "cut the chain",
        )
    return held, slots


def _tiles(layers: Sequence[Layer]) -> int:
    return min(TILES, sum(1 for x in layers if x.weight))


def _made_chunks(layers: Sequence[Layer]) -> int:
    return max((chunks(x.k) for x in layers if x.makes), default=0)


def _tile_chunks(layers: Sequence[Layer]) -> int:
    return max((chunks(x.k) for x in layers if x.weight), default=0)


def _registers(held: Sequence[Held]) -> int:
    return sum(4 * h.blocks for h in held) + ACCUMULATORS + OVERHEAD


def _held(layers: Sequence[Layer], pipeline: Pipeline) -> tuple[Held, ...]:
    """The wider side's columns are rows of a sum, 64 a warpgroup."""
    found: list[Held] = []

    def hold(layer: int, tensor: str, columns: int, turned: bool, is_bias: bool, groups: int) -> None:
        dtype = pipeline.tensor(tensor).dtype
        for chunk in range(chunks(columns)):
            blocks = ceil_to(min(COLUMNS, columns - COLUMNS * chunk), 8) // 8
            first = found[-1].first + found[-1].fours if found else 0
            found.append(Held(layer, tensor, dtype, blocks, turned, is_bias, first, chunk, groups))

    for n, x in enumerate(layers):
        turned = chunks(x.out) < chunks(x.k)
        rows, columns = (x.k, x.out) if turned else (x.out, x.k)
        hold(n, x.weight_gradient, columns, turned, False, chunks(rows))
        if x.bias_gradient:
            hold(n, x.bias_gradient, 1, False, True, chunks(x.out))
    return tuple(found)
