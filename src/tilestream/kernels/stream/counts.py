"""What each step of a schedule asks of its SM: products, bytes of shared memory, instructions. No device, no time.

The numbers an element are those of the machine code that the emitter's loops become; a test holds the sums against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline, Residency
from tilestream.ir.tileops import OPS
from tilestream.kernels.stream.layout import CHUNK, Layout, pages_of, turns_of
from tilestream.kernels.stream.model import Gemm, Phase, Place, Schedule, Step, ceil_to

WARPGROUP = 128  # threads
K_BYTES = 32  # of an operand's row that one wgmma takes
LEAST_COLUMNS = 32  # a wgmma of fewer takes as long: its left operand takes 16 cycles to come
QUAD_COLUMNS = 8  # of a row that four threads hold side by side, two each
SECTOR = 32  # bytes that the L2 reads and writes at once
PRODUCT = 6.0  # instructions of a warp for one wgmma: descriptors, waits, the ring
BIAS = 1.75  # instructions an element: load a pair, unpack it, set the accumulators of two rows
VECTOR = 2.0  # of a row vector that an operation takes
SHARED_READ, REGISTER_READ = 1.5, 1.0  # of a 16-bit operand: load or not, and unpack
SINKS = {
    "registers": 0.5,
    "shared": 1.5,
    "parked": 1.0,
    "staged": 1.5,
    "direct": 4.0,
    "maxima": 1.7,
    "nodes": 5.5,
}  # round, pack; store; address and test the row
COPIED = 0.5  # of an element of a packed operand: a load of two
OWN = 1.5  # of an element that lanes load through an index: two by one load, whose eight rows the L1 takes one by one
# Where a warpgroup's columns do not end with the tile's, each pair is tested, and what it loads waits in a branch.
GUARDED_BIAS, GUARDED_VECTOR, GUARDED_SUM, GUARDED_SINK = 10.0, 5.0, 2.0, 3.0


@dataclass(frozen=True)
class EpilogueCounts:
    """One pass over a step's fragment by one warp: ``instructions``, how many of them are ``special`` (the special
    function unit's), and ``barriers``: reductions over lanes and meetings of warps. ``turns``: of the loop that it is,
    where it is one."""

    instructions: float
    special: float
    barriers: int
    turns: int = 1


@dataclass(frozen=True)
class StepCounts:
    """One step as the two warpgroups of a CTA do it: each on a tile of its own, or each half of one tile.

    ``flops``: of the tensor cores, padding included. ``shared_bytes``: read and written in
    shared memory while they multiply. ``pages``: of weights, and ``chunks``: of inputs, that one ring gives to the
    product. ``passes``: the epilogue; its first holds the bias.
    ``turns``: of the loop over columns that the product is in, and ``copies`` of the epilogue: one a turn, or one
    behind the loop. All else is of all turns together.
    """

    flops: float
    shared_bytes: int
    pages: int
    chunks: int
    passes: tuple[EpilogueCounts, ...]
    product_instructions: float
    turns: int = 1
    copies: int = 1

    @property
    def instructions(self) -> float:
        return sum(p.instructions for p in self.passes)

    @property
    def special(self) -> float:
        return sum(p.special for p in self.passes)

    @property
    def code(self) -> float:
        """Instructions that are there to be fetched: of a loop, those of one turn."""
        return sum(p.instructions / p.turns for p in self.passes) / self.copies + self.product_instructions / self.turns


def counts(schedule: Schedule, layout: Layout) -> tuple[StepCounts, ...]:
    """Of every step, in order."""
    return tuple(_step(step, schedule, layout) for step in schedule.steps)


def scattered_bytes(schedule: Schedule, pipeline: Pipeline) -> float:
    """Bytes that the L2 moves in a step of a stage for results that go to memory from registers, beyond their own.

    Rows that bulk stores cannot address are stored by the threads that hold them: of a row, an instruction of a warp
    writes one or two elements of each of four threads, a part of a sector, which the L2 reads and writes for it.
    """
    total = 0.0
    for step in schedule.steps:
        for sink in (s for p in step.phases for s in p.sinks if s.kind == "direct"):
            tensor = pipeline.tensor(sink.target)
            size = DTYPE_BYTES[tensor.dtype]
            even = all(n % 2 == 0 for n in (tensor.features, sink.column, step.features)) and size == 2
            stored = 2 * size if even else size  # by one thread
            instructions = ceil(step.features / QUAD_COLUMNS) * (1 if even or step.features == 1 else 2)
            span = QUAD_COLUMNS * size - (2 * size - stored)  # of the four threads' elements
            sectors = 1 + (span - stored) / SECTOR if step.features > 1 else 1.0
            each = instructions * sectors * 2 * SECTOR - step.features * size
            total += TILE_ROWS * max(0.0, each)
    return total * schedule.stage.tiles_per_step


def code_size(schedule: Schedule, layout: Layout) -> float:
    """Instructions of the consumers' code. Equal steps one after another are one loop; all else counts as unrolled, the
    loops over many chunks of a product too, which is at most 1.3 % of a prediction."""
    return sum(n for n, _ in _code(schedule, layout))


def code_apart(schedule: Schedule, layout: Layout) -> float:
    """Instructions that one warpgroup can be ahead of the other: both take the same pages of streamed weights in turn,
    so the one in front waits for the page that a ring's length before the other has not given back yet."""
    code = _code(schedule, layout)
    total = sum(n for n, _ in code)
    if schedule.stage.residency is Residency.RESIDENT or not any(pages for _, pages in code):
        return total
    at, taken = 0.0, []
    for instructions, pages in code:
        taken += [at] * pages
        at += instructions
    ahead = [(k + layout.pages, first) for k, first in enumerate(taken)]
    return min(total, max(total * (k // len(taken)) + taken[k % len(taken)] - first for k, first in ahead))


def _code(schedule: Schedule, layout: Layout) -> list[tuple[float, int]]:
    """Of each run of equal blocks, or of equal pairs of them: instructions of its code, and the pages that going
    through it takes."""
    blocks = _blocks(schedule)
    shapes = [[_shape(step, schedule) for step in block] for block in blocks]
    found: list[tuple[float, int]] = []
    k = 0
    while k < len(blocks):
        period, end = 1, k + 1
        for size in turns_of(schedule):
            first, last = shapes[k : k + size], k + size
            while shapes[last : last + size] == first:
                last += size
            if last > k + size:
                period, end = size, last
        run = [[_step(step, schedule, layout) for step in block] for block in blocks[k:end]]
        code = sum(s.code for block in run[:period] for s in block)
        found.append((code, sum(s.pages for block in run for s in block)))
        k = end
    return found


def _blocks(schedule: Schedule) -> list[list[Step]]:
    """What the emitter may make one turn of a loop of: a step; or one that copies an operand, and all behind it."""
    blocks: list[list[Step]] = []
    for step in schedule.steps:
        if step.copied or not any(s.copied for block in blocks for s in block):
            blocks.append([])
        blocks[-1].append(step)
    return blocks


def _shape(step: Step, schedule: Schedule) -> tuple[object, ...]:
    """Equal for steps of the same code: what they work on is in the same registers, buffers and streams."""

    def place(tile: str) -> tuple[object, ...]:
        return schedule.slots.get(tile), schedule.buffers.get(tile), schedule.parked.get(tile)

    segments = [(s.features, s.place, s.start, place(s.tile)) for s in step.gemm.segments] if step.gemm else []
    passes = [
        (
            [n.kind for n in p.nodes],
            [op.kind for op in p.reduces],
            [(s.kind, place(s.tile)) for s in p.sinks],
            [schedule.streams[t].dtype for t in p.streams],
        )
        for p in step.phases
    ]
    return (step.features, [place(tile) for tile in step.copied], segments, passes)


def _step(step: Step, schedule: Schedule, layout: Layout) -> StepCounts:
    split = schedule.stage.placement.dim == 1
    width = schedule.width(step)
    columns = ceil_to(width, 8)
    loop = schedule.loop_of(step)
    copies = loop.turns if loop is not None else 1
    elements = copies * columns * TILE_ROWS // WARPGROUP  # of one thread
    passes = tuple(_passes(step, schedule, elements, schedule.guarded(step)))
    if step.gemm is None:
        return StepCounts(0.0, 0, 0, 0, passes, 0.0)
    gemm, chunk = step.gemm, schedule.chunk_columns
    depth = {place: _depth(gemm, place, chunk) for place in (Place.STREAM, Place.SHARED, Place.REGISTERS)}
    total = copies * sum(depth.values())
    streamed = [s for s in gemm.segments if s.place is Place.STREAM]
    chunks = sum(s.chunks(chunk) for s in streamed)
    warpgroups = 1 if split and gemm.features <= width else 2
    subs = -(-columns // layout.page_rows)
    weights = total * columns * K_BYTES
    left = (total - copies * depth[Place.REGISTERS]) * TILE_ROWS * K_BYTES * subs
    loaded = 0 if schedule.stage.residency is Residency.RESIDENT else weights * (warpgroups if split else 1)
    shared = warpgroups * (weights + left) + loaded + chunks * CHUNK * (1 if split else 2)
    pages = pages_of(schedule, step, gemm, layout.page_rows)
    k = K_BYTES // DTYPE_BYTES[schedule.dtype]
    flops = 2.0 * TILE_ROWS * max(columns, LEAST_COLUMNS) * k * total * warpgroups
    summed = schedule.summed(step)
    turns = summed.turns if summed is not None else copies
    return StepCounts(flops, shared, pages, chunks, passes, PRODUCT * total * subs, turns, copies)


def _depth(gemm: Gemm, place: Place, chunk: int) -> int:
    """Products of one instruction depth with operands that wait in ``place``."""
    found = [s for s in gemm.segments if s.place is place]
    return sum(s.ksteps(c, chunk) for s in found for c in range(s.chunks(chunk)))


def _passes(step: Step, schedule: Schedule, elements: int, guarded: bool) -> Iterator[EpilogueCounts]:
    bias = (GUARDED_BIAS if guarded else 0.0) + BIAS if step.gemm is not None and step.gemm.bias else 0.0
    for phase in step.phases:
        each = bias + _instructions(phase, schedule, guarded)
        if step.copied or step.own_rows is not None:
            each = COPIED if step.copied else OWN
        special = sum(OPS[n.kind].transcendental for n in phase.nodes)
        barriers = len(phase.reduces) + any(s.kind == "shared" for s in phase.sinks)
        barriers += 2 * schedule.turns(step) * any(s.kind == "nodes" for s in phase.sinks)
        turns = schedule.turns(step) if schedule.looped(step, phase) else 1
        yield EpilogueCounts(each * elements, special * elements, barriers, turns)
        bias = 0.0


def _instructions(phase: Phase, schedule: Schedule, guarded: bool) -> float:
    """Of one element in one pass."""
    vector = VECTOR + guarded * GUARDED_VECTOR
    total = sum(OPS[n.kind].flops + vector * len(n.params) for n in phase.nodes)
    made = {n.out.name for n in phase.nodes if n.out is not None}
    total += sum(_reading(name, schedule) for name in phase.used - made)
    total += len(phase.reduces) * (1 + guarded * GUARDED_SUM)
    return total + sum(SINKS[s.kind] + (guarded and s.kind != "registers") * GUARDED_SINK for s in phase.sinks)


def _reading(tile: str, schedule: Schedule) -> float:
    """Instructions to have one element of a tile; the fragment and row values are there already."""
    place = schedule.places.get(schedule.views.get(tile, (tile, 0))[0])
    if place is Place.REGISTERS:
        return REGISTER_READ
    return SHARED_READ if place in (Place.STREAM, Place.SHARED, Place.PARKED) else 0.0
