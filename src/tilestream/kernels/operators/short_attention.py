"""Attention over at most 256 keys, with what is added to scores (``include/short_attention.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

from tilestream.devices import Device
from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.mesh_traffic import mesh_traffic
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.ir.read import axes, program, tensors
from tilestream.kernels.costs import Amount, Counts
from tilestream.kernels.operators.lanes import LaneKernel, text_of
from tilestream.kernels.parts.params import Field, Struct, pointers

NAME = "tilestream_short_attention"
FEATURES = (16, 32, 64, 128)
"""Of a head: vectors of a row are a power of two."""
MOST_KEYS, MOST_WIDE, MOST_TERMS, LESS = 256, 128, 2, 40
"""A lane has half as many scores in registers as there are keys, and of 128 features room for fewer; of what is added,
a bias and a mask, each takes room of so many."""
MOST_HELD = 64
"""Keys up to which a lane has room for what is added to its scores."""
TILE, WARPS = 16, 4
"""Queries of a warp at a time; warps of a CTA."""
OTHERS, UNHELD, MOST_REGISTERS = 28, 34, 256
"""Registers of a lane besides scores, what is added to them, queries and results; more where that is not held, and
again where it is loaded; that it may have. Of machine code: no case spills."""
REGISTERS, SHARED, MOST_RESIDENT = 65536, 232_448, 8
"""Of an SM; CTAs of it."""
SCORE, SUM, ADDED, PRODUCT, STORED = 4.5, 2.0, 4.0, 1.5, 130.0
"""Issue slots of a lane: of a score; more of one that something is added to, and of reading a number of that; of a
product of matrices with what it reads; of a tile's results, sums and loads. Machine code of four kernels, 3 % off."""
ISSUED, ALONE, LOADED, LATENCY = 0.65, 0.35, 40.0, 1500.0
"""Instructions a cycle of a scheduler, and of it with one warp; bytes a cycle that an SM loads, and cycles from asking
to having them. Assumed, the first two as of depthwise convolutions."""

PARAMS = Struct(
    "ShortAttentionParams",
    (
        *pointers("query", "key", "value", type="const char*"),
        Field("const char*", "added", MOST_TERMS, note="to scores"),
        Field("char*", "out", note="[batches, QUERIES, heads, FEATURES]"),
        Field("long long", "batch_bytes", 3, note="of query, key and value from batch to batch"),
        Field("long long", "head_bytes", 3),
        Field("long long", "added_bytes", 3 * MOST_TERMS, note="of each from group, head, query to the next"),
        Field("int", "row_bytes", 3),
        *(Field("int", name) for name in ("heads", "period", "turns", "each")),
        Field("float", "scale"),
    ),
)


def has_kernel(keys: int, features: int, terms: int) -> bool:
    """Whether there is one for heads like these, with so many terms added to scores."""
    most = MOST_WIDE if features == FEATURES[-1] else MOST_KEYS - LESS * terms
    return features in FEATURES and 0 < keys <= most and terms <= MOST_TERMS


@dataclass(frozen=True)
class Attention:
    """An attention of ``batches`` sequences.

    Args:
        features: of a head, one of ``FEATURES``. keys: at most ``MOST_KEYS``.
        period: sequences from one to the next that has the same added to its scores; divides ``batches``.
        terms: of what is added. paired: two keys of each are a word.
        safe: a row that keeps nothing is zero; else no number.
    """

    batches: int
    heads: int
    queries: int
    keys: int
    features: int
    dtype: str = "bf16"
    period: int = 1
    terms: int = 0
    paired: bool = False
    safe: bool = True

    @property
    def tiles(self) -> int:
        """Of queries of a head."""
        return ceil(self.queries / TILE)

    @property
    def turns(self) -> int:
        """Sequences with the same added to their scores."""
        return self.batches // self.period


@dataclass(frozen=True)
class Grid:
    """How CTAs divide an attention: ``splits`` of a head's queries, ``each`` sequences after one another."""

    splits: int
    each: int
    resident: int

    def ctas(self, a: Attention) -> int:
        return self.splits * a.heads * a.period * ceil(a.turns / self.each)

    def tiles(self, a: Attention) -> int:
        """Of a CTA."""
        return ceil(a.tiles / self.splits)

    def held(self, a: Attention) -> bool:
        """Whether what is added stays in registers."""
        return a.terms > 0 and a.keys <= MOST_HELD and self.tiles(a) <= WARPS

    def loaded(self, a: Attention) -> int:
        """Bytes of shared memory for a sequence's queries, keys and values."""
        return 2 * a.features * TILE * (self.tiles(a) + 2 * ceil(a.keys / TILE))

    def shared_bytes(self, a: Attention) -> int:
        return self.loaded(a) * min(self.each, 2)

    def most_resident(self, a: Attention) -> int:
        """CTAs that an SM's registers and shared memory hold."""
        needed = ceil(a.keys / 8) * (8 if self.held(a) else 4) + a.features**2 // 100 + OTHERS
        needed += 0 if self.held(a) else UNHELD * (1 + (a.terms > 0))
        held = REGISTERS // (ceil(min(needed, MOST_REGISTERS) / 8) * 8 * 32 * WARPS)
        return min(held, SHARED // (self.shared_bytes(a) + 1024), MOST_RESIDENT)

    def cycles(self, a: Attention, sms: int) -> float:
        """Of an SM: its CTAs' instructions or loads, one of which is on its way while a sequence is worked on."""
        beside, rounds = min(self.resident, ceil(self.ctas(a) / sms)), ceil(self.ctas(a) / (sms * self.resident))
        issued = ceil(self.tiles(a) / WARPS) * self.slots(a) * max(beside / ISSUED, 1 / ALONE)
        return rounds * self.each * max(issued, beside * self.loaded(a) / LOADED, LATENCY)

    def slots(self, a: Attention) -> float:
        """Issue slots of a lane for a tile of queries."""
        blocks, steps, features = ceil(a.keys / 8), ceil(a.keys / TILE), a.features // TILE
        added = SUM * (a.terms > 0) + (0 if self.held(a) else a.terms * ADDED / (2 if a.paired else 1))
        return 4 * blocks * (SCORE + added) + (blocks + 4 * steps) * features * PRODUCT + STORED


@cache
def grid_of(a: Attention, sms: int) -> Grid:
    """The grid that takes the fewest cycles."""
    made: list[Grid] = []
    for splits in range(1, a.tiles + 1):
        for resident in range(1, MOST_RESIDENT + 1):
            each = ceil(splits * a.heads * a.batches / (sms * resident))
            made.append(Grid(splits, max(1, min(each, a.turns)), resident))
    held = [grid for grid in made if grid.resident <= grid.most_resident(a)]
    return min(held, key=lambda grid: (grid.cycles(a, sms), grid.splits, -grid.resident))


def pipeline(a: Attention, terms: Sequence[Sequence[int]], scale: float) -> Pipeline:
    """What the kernel computes, on axes: sequences are ``turns`` of ``period``.

    Args:
        terms: shapes [period or 1, heads or 1, queries or 1, keys or 1] of what is added.
    """
    sizes = {"i": a.turns, "w": a.period, "h": a.heads, "q": a.queries, "k": a.keys, "f": a.features}
    known = axes(" ".join(f"{name}={size}" for name, size in sizes.items()))
    views = [f"T{n}[{','.join(x for x, size in zip('whqk', shape, strict=True) if size > 1)}]"
             for n, shape in enumerate(terms)]  # fmt: skip
    ops = ["s[i,w,h,q,k]:f32 = product Q[i,w,q,h,f] K[i,w,k,h,f]", f"t[i,w,h,q,k]:f32 = mul s scalar={scale!r}"]
    ops += [f"t{n}[i,w,h,q,k]:f32 = add {f't{n - 1}' if n else 't'} {view}" for n, view in enumerate(views)]
    ops += [f"y[i,w,h,q,f] = product {f't{len(views) - 1}' if views else 't'} V[i,w,k,h,f] combine=softmax"]
    text = "\n".join([*ops, "y -> Y[i,w,q,h,f]"])
    given = f"Q[i,w,q,h,f] K[i,w,k,h,f] V[i,w,k,h,f] {' '.join(views)} >Y[i,w,q,h,f]"
    loops = (Loop("i", 1), Loop("w", 1), Loop("h", 1), Loop("q", TILE))
    stage = Stage("attention", program(text, known), loops, (Spread(Level.GRID, 1, ("w", "h", "i")),))
    return Pipeline("short attention", tensors(given, known), (stage,))


def counts(a: Attention, terms: Sequence[Sequence[int]], device: Device) -> Counts:
    """What a launch asks for: memory or issue, and a launch. ``terms``: as of ``pipeline``."""
    streams = (
        Amount("dram", mesh_traffic(pipeline(a, terms, 1.0), {})["dram"], device.dram_bytes_per_s),
        Amount("cycles", grid_of(a, device.sms).cycles(a, device.sms), device.clock_hz),
    )
    return Counts("short attention", (Counts("streams", streams, max), Amount("launch", device.launch_s)))


@cache
def kernel(a: Attention, grid: Grid) -> LaneKernel:
    """The kernel of an attention by a grid."""
    shape = {
        "DTYPE": a.dtype, "FEATURES": a.features, "QUERIES": a.queries, "KEYS": a.keys, "TILES": grid.tiles(a),
        "SPLITS": grid.splits, "WARPS": WARPS, "RESIDENT": grid.resident, "BUFFERS": min(grid.each, 2),
        "TERMS": a.terms, "HELD": int(grid.held(a)), "PAIRED": int(a.paired), "SAFE": int(a.safe),
    }  # fmt: skip
    return LaneKernel(NAME, text_of("short_attention.cuh", PARAMS, shape), PARAMS, WARPS, grid.shared_bytes(a))
