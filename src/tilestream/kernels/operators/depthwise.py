"""Depthwise convolutions of pictures whose channels lie last, in one kernel with what follows each pixel
(``include/depthwise.cuh``); and what describes those of wider groups too (``grouped.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil

from tilestream.kernels.operators.lanes import LaneKernel, text_of
from tilestream.kernels.parts.params import Field, Struct, pointers

NAME = "tilestream_depthwise"
ACTIVATIONS = ("none", "relu", "silu", "gelu", "hardswish", "relu6")
MOST_KERNEL, MOST_CHANNELS = 7, 1 << 14
"""Of a window's side: its taps are unrolled, its weights and sums in registers and shared memory."""
ROWS, COLUMNS = (4, 3, 2, 1), (8, 7, 6, 5, 4)
"""Of output pixels that a lane may have."""
MOST_PAIRS, THREADS, MOST_RESIDENT = 64, 256, 3
"""Of channels that a CTA has; of a CTA; CTAs of an SM, of which a fourth brought nothing."""
REGISTERS, HELD, OTHERS = 65536, 240, 40
"""Of an SM; the most that a lane may need without spills; what it needs besides pixels and sums."""
WIDE = 7
"""Windows from which on multiplications take the time, so that few lanes with large tiles are the best. Smaller ones
want many lanes, whose loads and activations hide each other."""
LOAD, PIXEL, ACTIVATED = 3, 12, 18
"""Issue slots of two channels of a pixel: read and converted; written; with an activation besides. Of machine code."""
ISSUED, ALONE = 0.65, 0.35
"""Instructions a cycle of a scheduler, and of it with two warps. Fitted on an H100 to 16 kernels of 7 x 7 over 96 to
768 channels: 9 to 47 us, 6 % off in the mean. 24 of smaller windows are 17 % off in the mean, most of them slower."""

PARAMS = Struct(
    "DepthwiseParams",
    (
        *pointers("x", type="const char*", notes={"x": "[images, HEIGHT, WIDTH, CHANNELS]"}),
        *pointers(
            "weight",
            "bias",
            type="const char*",
            notes={"weight": "[CHANNELS, TAPS, channels of a group]", "bias": "or null"},
        ),
        *pointers("scale", "shift", type="const float*", notes={"scale": "[CHANNELS], if SCALED"}),
        Field("char*", "out", note="[images, OUT_HEIGHT, OUT_WIDTH, CHANNELS]"),
        Field("float*", "pooled", note="[images, tiles of a picture, CHANNELS], if POOLED"),
        Field("int", "images"),
    ),
)


@dataclass(frozen=True)
class Depthwise:
    """A convolution of groups of channels of pictures, and what follows it.

    Args:
        height, width: of a picture. channels: an even number.
        kernel, padding: (y, x); a kernel of up to 7 x 7, and no tap of it reads padding alone.
        stride: of both sides, 1 or 2.
        scaled: whether channels have a scale and a shift behind the sum. pooled: whether results are also summed.
        activation: one of ``ACTIVATIONS``, behind the shift.
        group: channels of a group, in and out; 1: depthwise.
    """

    height: int
    width: int
    channels: int
    kernel: tuple[int, int]
    stride: int
    padding: tuple[int, int]
    dtype: str = "bf16"
    scaled: bool = False
    activation: str = "none"
    pooled: bool = False
    group: int = 1

    @property
    def out(self) -> tuple[int, int]:
        sizes = zip((self.height, self.width), self.kernel, self.padding, strict=True)
        y, x = ((size + 2 * padding - kernel) // self.stride + 1 for size, kernel, padding in sizes)
        return y, x

    @property
    def pairs(self) -> int:
        """Of channels that a CTA has: as many as divide all, of 32 bytes where that can be."""
        half = self.channels // 2
        divisors = [n for n in range(1, min(half, MOST_PAIRS) + 1) if half % n == 0]
        return max([n for n in divisors if n % 8 == 0] or divisors)


@dataclass(frozen=True)
class Tile:
    """Output pixels of a lane; of a CTA where groups are wider."""

    rows: int
    columns: int

    def grid(self, conv: Depthwise) -> tuple[int, int]:
        """Tiles of a picture, (down, across)."""
        return ceil(conv.out[0] / self.rows), ceil(conv.out[1] / self.columns)

    def tiles(self, conv: Depthwise) -> int:
        down, across = self.grid(conv)
        return down * across

    def read(self, conv: Depthwise) -> int:
        """Pixels of a row of its input."""
        return (self.columns - 1) * conv.stride + conv.kernel[1]

    def resident(self, conv: Depthwise) -> int:
        """CTAs that an SM's registers hold; 0 where a lane would spill."""
        needed = self.rows * 2 * (self.read(conv) + self.columns) + self.read(conv) + OTHERS
        return 0 if needed > HELD else min(MOST_RESIDENT, REGISTERS // (needed * THREADS))

    def slots(self, conv: Depthwise) -> int:
        """Issue slots of a lane for one tile."""
        (ky, kx), made = conv.kernel, self.rows * self.columns
        rows = (self.rows - 1) * conv.stride + ky
        each = PIXEL + (ACTIVATED if conv.activation != "none" else 0)
        return (2 * made * kx + ceil(kx / 2)) * ky + LOAD * rows * self.read(conv) + each * made


def tile_of(conv: Depthwise, images: int, sms: int) -> Tile:
    """The tile that takes the fewest cycles."""
    each = [Tile(r, c) for r in (ROWS if conv.stride == 1 else (1,)) for c in COLUMNS]
    least = 1 if max(conv.kernel) >= WIDE else 2
    held = [tile for tile in each if tile.resident(conv) >= least]
    return min(held, key=lambda tile: cycles(conv, tile, images, sms))


def cycles(conv: Depthwise, tile: Tile, images: int, sms: int) -> float:
    """Of an SM for a launch, whose lanes take tiles in turn."""
    launched, parts = ctas(conv, tile, images, sms), _parts(conv)
    rounds = ceil(images * tile.tiles(conv) / (launched // parts * _at_once(conv)))
    warps = ceil(launched / sms) * THREADS / 32 / 4
    return rounds * tile.slots(conv) * max(warps / ISSUED, 1 / ALONE)


def ctas(conv: Depthwise, tile: Tile, images: int, sms: int) -> int:
    """Of a launch: as many as the SMs hold, or as have work; a multiple of the parts that the channels make."""
    work = ceil(images * tile.tiles(conv) / _at_once(conv))
    return _parts(conv) * max(1, min(work, sms * tile.resident(conv) // _parts(conv)))


def _parts(conv: Depthwise) -> int:
    return conv.channels // 2 // conv.pairs


def _at_once(conv: Depthwise) -> int:
    """Tiles of a CTA."""
    return max(1, THREADS // conv.pairs)


@cache
def kernel(conv: Depthwise, tile: Tile) -> LaneKernel:
    """The kernel of a convolution by tiles."""
    pairs, tiles = conv.pairs, _at_once(conv)
    warps = ceil(tiles * pairs / 32)
    shape = shape_of(conv, tile) | {
        "PAIRS": pairs, "TILES": tiles, "WARPS": warps, "RESIDENT": max(1, tile.resident(conv))
    }  # fmt: skip
    shared_bytes = 16 * conv.kernel[0] * ceil(conv.kernel[1] / 2) * pairs
    return LaneKernel(NAME, text_of("depthwise.cuh", PARAMS, shape), PARAMS, warps, shared_bytes)


def shape_of(conv: Depthwise, tile: Tile) -> dict[str, int | str]:
    """What every kernel for a convolution is compiled for."""
    return {
        "DTYPE": conv.dtype, "CHANNELS": conv.channels, "HEIGHT": conv.height, "WIDTH": conv.width,
        "KERNEL_Y": conv.kernel[0], "KERNEL_X": conv.kernel[1], "STRIDE": conv.stride,
        "PAD_Y": conv.padding[0], "PAD_X": conv.padding[1], "OUT_HEIGHT": conv.out[0], "OUT_WIDTH": conv.out[1],
        "ROWS": tile.rows, "COLUMNS": tile.columns, "SCALED": int(conv.scaled), "POOLED": int(conv.pooled),
        "ACTIVATION": conv.activation,
    }  # fmt: skip
