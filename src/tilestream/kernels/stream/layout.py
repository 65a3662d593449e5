"""Shared memory of a CTA, byte by byte."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from tilestream.ir.pipeline import DTYPE_BYTES, Residency
from tilestream.kernels.stream.model import Gemm, Place, Schedule, Segment, Step, ceil_to

CHUNK = 8192  # 64 rows x 128 bytes
OPERAND_SLOTS = 2  # at least, of the input ring, where a tile's operand comes chunk by chunk, each through a slot
BESIDE_TAPS = 6  # pages of weights, at least, before the ring of pixels grows
PARKED_BYTES = 128  # of a column of a parked tile: 64 rows of 16 bits
SUM_VALUES = 64 * 288  # node_sums.cuh: of a warpgroup, 64 columns in fp32,
SUMS_BYTES = SUM_VALUES + 1024  # and whose the rows are
SHARED_LIMIT = 232448  # 227 KiB, what a Hopper CTA can have


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes from the start of shared memory.

    Under Shard(0) the warpgroups share one weight ring and have an input ring each; under Shard(1)
    they share one input ring and have a weight ring each. Both have their own output staging.
    """

    page_rings: int
    page_rows: int
    pages: int
    page_bytes: int
    page_data: int
    in_slots: int
    in_data: int
    out_slots: int
    out_data: int
    out_buffer: int  # tile buffer whose memory the staging uses, or -1
    buffers: tuple[int, ...]
    buffer_bytes: tuple[int, ...]
    parking: int  # of the first warpgroup
    parking_bytes: int  # of each
    page_bars: int
    in_bars: int
    out_bars: int
    scratch: int
    sums: int  # of rows to nodes
    total: int
    parts: tuple[tuple[str, int], ...]


def widest(schedule: Schedule) -> int:
    """Columns of the widest product's share of one warpgroup: the most that a page can hold in rows.

    Where taps feed products, of those alone: deep and narrow, they would fill a part of each of their many pages
    (3 x 3 64-64 in front of 64-256: nine pages of which three quarters are empty, and no room for pixels on their way).
    """
    products = [s for s in schedule.steps if s.gemm is not None]
    return max((ceil_to(schedule.width(s), 8) for s in _tapped(schedule) or products), default=8)


def _tapped(schedule: Schedule) -> list[Step]:
    """Products whose left operand is pixels at taps."""
    taps = {name for name, stream in schedule.streams.items() if stream.tap is not None}
    return [s for s in schedule.steps if s.gemm is not None and any(g.tile in taps for g in s.gemm.segments)]


def boxes_of(schedule: Schedule, step: Step, segment: Segment, rows: int) -> int:
    """Chunks of a segment's depth that share a page of ``rows`` weight rows: as many as have room, where the product is
    narrow and its left operand waits in registers.

    A page is a slot of the ring, whatever it holds: a layer of one column in four pages would keep four slots from the
    wide layers beside it, and with them what one warpgroup may be ahead of the other.
    """
    loop, stage = schedule.loop_of(step), schedule.stage
    if loop is not None:
        return max(1, rows // loop.chunk)
    whole = stage.placement.dim == 0 and stage.group == 1 and stage.residency is Residency.STREAMED
    if segment.place is not Place.REGISTERS or not whole:
        return 1
    if schedule.summed(step) is not None or step.copied or _tapped(schedule):
        return 1
    return max(1, rows // ceil_to(schedule.width(step), 8))


def pages_of(schedule: Schedule, step: Step, gemm: Gemm, rows: int) -> int:
    """Pages of ``rows`` weight rows that one product takes from a weight ring; in a loop over columns, in all turns."""
    subs = -(-ceil_to(schedule.width(step), 8) // rows)
    loop = schedule.loop_of(step)
    columns = schedule.chunk_columns
    chunks = sum(-(-seg.chunks(columns) // boxes_of(schedule, step, seg, rows)) for seg in gemm.segments)
    summed = schedule.summed(step)
    if summed is not None:
        chunks = summed.turns * summed.chunk // columns
    return subs * chunks * (loop.turns if loop is not None else 1)


def _held(schedule: Schedule, rows: int) -> int:
    """Pages that a warpgroup may need at once: two, or in a turn the last of a chunk's and all that sum it up."""
    subs = (-(-ceil_to(schedule.width(schedule.steps[loop.sums]), 8) // rows) for loop in schedule.loops)
    return max(2, *(1 + n for n in subs)) if schedule.loops else 2


def _together(schedule: Schedule, rows: int) -> list[int]:
    """Pages that each product takes before the next one; of a loop over columns, those of a turn."""
    counts: dict[int, int] = {}  # by the step that the pages lead up to
    for step in schedule.steps:
        if step.gemm is None:
            continue
        loop = schedule.loop_of(step) or schedule.summed(step)
        pages = pages_of(schedule, step, step.gemm, rows)
        at = step.index if loop is None else loop.sums
        counts[at] = counts.get(at, 0) + (pages if loop is None else pages // loop.turns)
    return list(counts.values())


def chunks_in(schedule: Schedule) -> int:
    """Input chunks that the products of one tile take; epilogues not counted."""
    return sum(len(schedule.product_chunks(step)) for step in schedule.steps)


def lay_out(schedule: Schedule, limit: int = SHARED_LIMIT) -> Layout:
    """Give every ring and buffer its place; what is left deepens the weight ring, then the input ring.

    Pages as tall as the widest product want the fewest instructions; where too few of them fit to
    load ahead, they are halved. ``limit``: bytes of shared memory to fill; a total beyond it does not fit.
    """
    rows = widest(schedule)
    layout = _lay_out(schedule, rows, limit)
    # Under Shard(1) shared memory's own bandwidth is the limit, and taller pages read the left operand less often
    # (GraphCast's block: 1261 us with two pages of 256 rows, 1298 us with four of 128).
    least = 3 if schedule.stage.placement.dim == 0 else 2
    narrowest = max([64, *(loop.chunk for loop in schedule.loops)])
    while rows > narrowest and schedule.stage.residency is Residency.STREAMED and layout.pages:
        if layout.pages >= least and layout.total <= limit:
            break
        rows = max(narrowest, ceil_to(rows // 2, 64))
        layout = _lay_out(schedule, rows, limit)
    return layout


def _lay_out(schedule: Schedule, page_rows: int, limit: int) -> Layout:
    both = schedule.stage.placement.dim == 1
    rings, page_rings = (1, 2) if both else (2, 1)
    page = page_rows * 128
    page_all = page * page_rings
    total_pages = sum(pages_of(schedule, s, s.gemm, page_rows) for s in schedule.steps if s.gemm)
    # An epilogue holds a chunk of each of its streams at once (under Shard(1), one for each warpgroup).
    streamed = max((schedule.taken(p) for s in schedule.steps for p in s.phases), default=0)
    # A product takes its next chunk before it gives the last one back.
    need_in = max(min(2, chunks_in(schedule)), streamed * (2 if both else 1))
    staged = max((schedule.staged(p) for s in schedule.steps for p in s.phases), default=0)
    # The publisher gives a slot back when it starts the next copy: one more than an epilogue fills at once.
    out_slots = staged + 1 if staged else 0
    out_buffer = _dead_buffer(schedule)
    if out_buffer >= 0:
        out_slots = schedule.buffer_features[out_buffer] // schedule.chunk_columns // 2
    out_bytes = 0 if out_buffer >= 0 else out_slots * 2 * CHUNK
    kinds = zip(schedule.buffer_features, schedule.buffer_dtypes, strict=True)
    buffer_bytes = tuple(ceil_to(f * DTYPE_BYTES[d], 128) * 64 for f, d in kinds)
    parking_bytes = PARKED_BYTES * schedule.parked_features
    if parking_bytes and streamed:
        need_in = max(need_in, OPERAND_SLOTS)
    resident = schedule.stage.residency is Residency.RESIDENT
    sums = 2 * SUMS_BYTES * any(op.receivers for op in schedule.stage.ops)
    reserve = 2048 + sums + (16 * total_pages * page_rings if resident else 0)
    left = limit - (sum(buffer_bytes) + parking_bytes) * rings - out_bytes - reserve
    pages, in_slots = _ring_slots(schedule, page_rows, total_pages, left, need_in)
    each = (
        pages * page_all,
        in_slots * rings * CHUNK,
        out_bytes,
        *(size * rings for size in (*buffer_bytes, parking_bytes)),
    )
    page_data, in_data, out_data, *buffers, parking, page_bars = accumulate(each, initial=0)
    if out_buffer >= 0:
        out_data = buffers[out_buffer]
    in_bars = page_bars + pages * page_rings * 16
    out_bars = in_bars + in_slots * rings * 16
    scratch = ceil_to(out_bars + out_slots * 2 * 16, 128)
    sums_at = scratch + (1024 if both else 0)
    total = sums_at + sums
    parts = (
        ("weights" if resident else "weight ring", pages * page_all),
        ("input ring", in_slots * rings * CHUNK),
        ("output staging", out_bytes),
        ("tile buffers", (sum(buffer_bytes) + parking_bytes) * rings),
        ("sums of nodes", sums),
        ("barriers", sums_at - page_bars),
    )
    return Layout(
        page_rings, page_rows, pages, page, page_data, in_slots, in_data, out_slots, out_data, out_buffer,
        tuple(buffers), buffer_bytes, parking, parking_bytes, page_bars, in_bars, out_bars, scratch, sums_at,
        total, parts,
    )  # fmt: skip


def _ring_slots(schedule: Schedule, page_rows: int, total_pages: int, left: int, need_in: int) -> tuple[int, int]:
    """Pages of weights, and slots of each input ring, that ``left`` bytes hold.

    Args:
        total_pages: that all products take. need_in: slots that a product or an epilogue holds at once.
    """
    rings, page_rings = (1, 2) if schedule.stage.placement.dim == 1 else (2, 1)
    page_all = page_rows * 128 * page_rings
    want_in = max(need_in, min(8, _loads(schedule)))
    if schedule.stage.residency is Residency.RESIDENT or total_pages == 0:
        pages = total_pages
        in_slots = max(need_in, min(want_in, (left - pages * page_all) // (rings * CHUNK))) if want_in else 0
    else:
        # Beyond one layer: the first warpgroup runs ahead by a layer's pages (spikes: 4 pages 586 us, 5 pages 472 us).
        enough = max(2, min(max(_together(schedule, page_rows)) + 1, total_pages))
        if _tapped(schedule):  # a page for each chunk of pixels: neither ring runs ahead of the other
            enough = min(enough, BESIDE_TAPS)
        if schedule.loops:  # inputs come once, weights every turn
            enough = min(2 * max(_together(schedule, page_rows)), total_pages)
        in_slots = need_in
        while in_slots < want_in and (left - (in_slots + 1) * rings * CHUNK) // page_all >= enough:
            in_slots += 1
        if splits(schedule) and (left - need_in * rings * CHUNK) // page_all < enough:
            in_slots = min(want_in, 2 * need_in)  # no page more helps as much as input that is there when a tile begins
        pages = max(_held(schedule, page_rows), min((left - in_slots * rings * CHUNK) // page_all, 64))
        in_slots = max(in_slots, min(want_in, (left - pages * page_all) // (rings * CHUNK)))
    return pages, in_slots


def splits(schedule: Schedule) -> bool:
    """Whether products are of float32 by parts (``ir.float32``): tiles begin by a copy of their input as several
    operands, and epilogues are long. What it decides was timed of such kernels alone."""
    made = [op.out for op in schedule.stage.ops if op.kind == "linear"]
    return schedule.dtype == "bf16" and any(tile is not None and tile.dtype == "f32" for tile in made)


def turns_of(schedule: Schedule) -> tuple[int, ...]:
    """Of how many steps turns of loops over equal ones may be. Pairs of layers are loops where their code would not fit
    the instruction cache; others spill (256 - 256 - 256, ptxas of CUDA 13.0)."""
    return (2, 1) if splits(schedule) else (1,)


def _dead_buffer(schedule: Schedule) -> int:
    """A buffer that the step with the staged output reads last: under Shard(1), room for the whole output.

    Each warpgroup stages into the chunks that it wrote, so it alone must wait before it writes them again.
    """
    steps = [s for s in schedule.steps if any(k.kind == "staged" for p in s.phases for k in p.sinks)]
    if schedule.stage.placement.dim != 1 or len(steps) != 1 or steps[0].gemm is None:
        return -1
    step, segments = steps[0], steps[0].gemm.segments
    sinks = [k for p in step.phases for k in p.sinks]
    if schedule.pass_columns != schedule.chunk_columns:
        return -1
    later = {s.tile for st in schedule.steps if st.index > step.index for s in (st.gemm.segments if st.gemm else ())}
    read = {i for p in step.phases for n in p.nodes for i in n.ins} | {
        n for st in schedule.steps if st.index > step.index for p in st.phases for op in p.nodes for n in op.ins
    }
    if [k.dtype for k in sinks if k.kind == "staged"] != [schedule.dtype] or any(k.kind == "shared" for k in sinks):
        return -1
    if step.features != 2 * schedule.stride(step):
        return -1  # the halves of output and operand would not be the same chunks
    for segment in segments:
        tile = segment.tile
        whole = segment.place is Place.SHARED and segment.features == schedule.tiles[tile].features == step.features
        if whole and tile not in later | read and tile not in {v for v, _ in schedule.views.values()}:
            return schedule.buffers[tile]
    return -1


def _loads(schedule: Schedule) -> int:
    """Chunks that one tile takes in, products and epilogues together."""
    columns = schedule.pass_columns
    total = chunks_in(schedule)
    for step in schedule.steps:
        for phase in step.phases:
            total += schedule.taken(phase) * (ceil_to(step.features, columns) // columns)
    return total
