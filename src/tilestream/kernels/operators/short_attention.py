"""Attention over at most 256 keys, with what is added to scores (``include/short_attention.cuh``), and which kernel has
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

from tilestream.devices import Device
from tilestream.ir.mesh_traffic import mesh_traffic
from tilestream.kernels.costs import Amount, Counts
from tilestream.kernels.operators import head_attention
from tilestream.kernels.operators.few_keys import MOST_TERMS, SHARED, START, TILE, Attention, pipeline
from tilestream.kernels.operators.lanes import LaneKernel, text_of
from tilestream.kernels.parts.params import Field, Struct, pointers

NAME = "tilestream_short_attention"
FEATURES = (16, 32, 64, 128)
"""Of a head: vectors of a row are a power of two."""
MOST_KEYS, MOST_WIDE, LESS = 256, 128, 40
"""A lane has half as many scores in registers as there are keys, and of 128 features room for fewer; each of the
terms that are added takes room of so many."""
MOST_HELD = 64
"""Keys up to which a lane has room for what is added to its scores."""
WARPS = 4
"""Of a CTA."""
OTHERS, UNHELD, MOST_REGISTERS = 28, 34, 256
"""Registers of a lane besides scores, what is added to them, queries and results; more where that is not held, and
again where it is loaded; that it may have. Of machine code: no case spills."""
REGISTERS, MOST_RESIDENT = 65536, 8
"""Of an SM; CTAs of it."""
SCORE, SUM, ADDED, PRODUCT, STORED = 4.5, 2.0, 4.0, 1.5, 130.0
"""Issue slots of a lane: of a score; more of one that something is added to, and of reading a number of that; of a
product of matrices with what it reads; of a tile's results, sums and loads. Machine code of four kernels, 3 % off."""
ISSUED, ALONE, LOADED, LATENCY = 0.5, 0.35, 40.0, 1500.0
"""Instructions a cycle of a scheduler, timed on 12 sizes without terms on an H200, and of it with one warp; bytes a
cycle that an SM loads, and cycles from asking to having them: assumed."""

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


def takes(a: Attention) -> bool:
    """Whether lanes have registers for its scores."""
    most = MOST_WIDE if a.features == FEATURES[-1] else MOST_KEYS - LESS * a.terms
    return a.features in FEATURES and 0 < a.keys <= most and a.terms <= MOST_TERMS


def has_kernel(a: Attention) -> bool:
    """Whether there is one, of lanes or of warpgroups."""
    return takes(a) or (a.keys > 0 and head_attention.takes(a))


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
        return START + rounds * self.each * max(issued, beside * self.loaded(a) / LOADED, LATENCY)

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


def by_groups(a: Attention, sms: int) -> bool:
    """Whether warpgroups compute it, alone or in fewer cycles."""
    if not takes(a):
        return True
    return head_attention.takes(a) and head_attention.cycles(a, sms) < grid_of(a, sms).cycles(a, sms)


def cycles(a: Attention, sms: int) -> float:
    """Of the kernel that has it."""
    return head_attention.cycles(a, sms) if by_groups(a, sms) else grid_of(a, sms).cycles(a, sms)


def counts(a: Attention, terms: Sequence[Sequence[int]], device: Device) -> Counts:
    """What a launch asks for: memory or issue, and a launch. ``terms``: as of ``pipeline``."""
    streams = (
        Amount("dram", mesh_traffic(pipeline(a, terms, 1.0), {})["dram"], device.dram_bytes_per_s),
        Amount("cycles", cycles(a, device.sms), device.clock_hz),
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
