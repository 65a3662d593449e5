"""Convolutions of groups of channels, of pictures whose channels lie last: depthwise ones by lanes (``depthwise.py``),
wider groups by tensor cores (``include/grouped.cuh``)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import ceil

from tilestream.kernels.operators import depthwise
from tilestream.kernels.operators.depthwise import PARAMS, Depthwise, Tile, shape_of
from tilestream.kernels.operators.lanes import LaneKernel, text_of

NAME = "tilestream_grouped"
MOST_TAPS = 25
"""Of a window: all that is summed over is unrolled."""
WARPS, OF_WARP = 4, 56
"""Of a CTA, if channels can be divided so; channels that a warp may have, whose weights and sums are registers."""
SUMS, OTHERS, OF_LANE = 64, 80, 248
"""Registers of a lane for sums; besides them, as NVRTC made fourteen kernels; at most."""
SHARED, REGISTERS, MOST_RESIDENT = 227 * 1024, 512, 6
"""Of an SM; for a lane of each scheduler's; CTAs of an SM."""
WEIGHTS, MOST_WEIGHTS = 48 * 1024, 100 * 1024
"""Bytes of a CTA's weights, if channels can be divided so; at most."""
MATRICES, PRODUCT, BEFORE = 4, 2, 1500
"""Cycles of an SM for four matrices from shared memory, and for a product of tensor cores; of a CTA until its pixels
are there. By the hardware's rates, not fitted."""


def can(group: int, channels: int, taps: int) -> bool:
    """Whether a kernel here has groups of so many channels."""
    if group == 1:
        return True
    of_eights = (group % 8 == 0 or group in (2, 4)) and channels % 8 == 0
    return of_eights and taps <= MOST_TAPS and 2 * taps * max(8, group) ** 2 <= MOST_WEIGHTS


def tile_of(conv: Depthwise, images: int, sms: int) -> Tile:
    """The tile that is predicted to take the fewest cycles."""
    if conv.group == 1:
        return depthwise.tile_of(conv, images, sms)
    each = [tile for tile in _tiles(conv) if resident(conv, tile)]
    return min(each, key=lambda tile: cycles(conv, tile, images, sms))


def _tiles(conv: Depthwise) -> Iterator[Tile]:
    """Those without much that sticks out: parts of a picture's sides."""
    height, width = conv.out
    for rows in {ceil(height / n) for n in range(1, height + 1)}:
        for columns in {ceil(width / n) for n in range(1, width // 4 + 2)}:
            if rows * columns <= 256 or columns <= 8:
                yield Tile(rows, columns)


def cycles(conv: Depthwise, tile: Tile, images: int, sms: int) -> float:
    """Of an SM for a launch, whose CTAs take tiles in turn."""
    if conv.group == 1:
        return depthwise.cycles(conv, tile, images, sms)
    warps, by, fours = warps_of(conv), of_warp(conv) // 8, _fours(conv)
    all_, at_once = ceil(tile.rows * tile.columns / 16), at_once_of(conv, tile)
    turns = ceil(all_ / at_once)
    read = 2 * fours * turns * at_once + turns * fours * by
    worked = warps * max(MATRICES * read, PRODUCT * 2 * fours * turns * at_once * by)
    launched = ctas(conv, tile, images, sms)
    rounds = ceil(images * tile.tiles(conv) / (launched // _parts(conv)))
    return rounds * (worked * ceil(launched / sms) + BEFORE)


def ctas(conv: Depthwise, tile: Tile, images: int, sms: int) -> int:
    """Of a launch: as many as the SMs hold, or as have work; a multiple of the parts that the channels make."""
    if conv.group == 1:
        return depthwise.ctas(conv, tile, images, sms)
    held = max(1, sms * resident(conv, tile) // _parts(conv))
    return _parts(conv) * max(1, min(images * tile.tiles(conv), held))


def resident(conv: Depthwise, tile: Tile) -> int:
    """CTAs that an SM holds; 0 where shared memory is too small for one."""
    needed = OTHERS + (at_once_of(conv, tile) + 1) * of_warp(conv) // 8 * 4
    most = min(MOST_RESIDENT, SHARED // (shared_bytes(conv, tile) + 1024)) if needed <= OF_LANE else 0
    fitting = (n for n in range(most, 0, -1) if REGISTERS // ceil(n * warps_of(conv) / 4) >= needed)
    return next(fitting, 0)


def shared_bytes(conv: Depthwise, tile: Tile) -> int:
    """Weights, then pixels, then zeros, as ``grouped.cuh`` has them."""
    channels = warps_of(conv) * of_warp(conv)
    rows, columns = ((n - 1) * conv.stride + k for n, k in zip((tile.rows, tile.columns), conv.kernel, strict=True))
    return channels * _weight_bytes(conv) + rows * columns * 16 * (channels // 8 | 1) + 16


def at_once_of(conv: Depthwise, tile: Tile) -> int:
    """Times 16 pixels whose sums a warp has in registers."""
    all_, most = ceil(tile.rows * tile.columns / 16), max(1, SUMS // (of_warp(conv) // 2))
    return ceil(all_ / ceil(all_ / most))


def wide_of(conv: Depthwise) -> int:
    """Channels that are multiplied together: a group, or as many as make eight."""
    return max(8, conv.group)


def of_warp(conv: Depthwise) -> int:
    """Channels of a warp, which are of one group."""
    return max(n for n in range(8, min(OF_WARP, wide_of(conv)) + 1, 8) if wide_of(conv) % n == 0)


def warps_of(conv: Depthwise) -> int:
    """Of a CTA, whose channels are whole groups and a part of all."""
    of_group, every = wide_of(conv) // of_warp(conv), conv.channels // of_warp(conv)
    fitting = [n for n in range(of_group, every + 1, of_group) if every % n == 0]
    small = (n for n in fitting if n <= WARPS and n * of_warp(conv) * _weight_bytes(conv) <= WEIGHTS)
    return max(small, default=fitting[0])


def _parts(conv: Depthwise) -> int:
    return conv.channels // (warps_of(conv) * of_warp(conv))


def _weight_bytes(conv: Depthwise) -> int:
    """Of a channel."""
    return _fours(conv) * 64 + 16


def _fours(conv: Depthwise) -> int:
    """Of eights of channels, summed over."""
    return ceil(conv.kernel[0] * conv.kernel[1] * wide_of(conv) / 32)


@cache
def kernel(conv: Depthwise, tile: Tile) -> LaneKernel:
    """The kernel of a convolution by tiles."""
    if conv.group == 1:
        return depthwise.kernel(conv, tile)
    warps, size = warps_of(conv), shared_bytes(conv, tile)
    shape = shape_of(conv, tile) | {
        "GROUP": conv.group, "OF_WARP": of_warp(conv), "WARPS": warps, "AT_ONCE": at_once_of(conv, tile),
        "RESIDENT": resident(conv, tile), "SHARED_BYTES": size,
    }  # fmt: skip
    return LaneKernel(NAME, text_of("grouped.cuh", PARAMS, shape), PARAMS, warps, size)
