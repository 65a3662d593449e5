"""C++ of a loop over the columns of a hidden layer: each turn makes a chunk, and adds its product to the sum.

``y += act(x W1[chunk]) W2[chunk]``: a chunk goes from the accumulators of the first product through its epilogue into
the packed registers that are the left operand of the second. A turn works on halves of the chunk, so that the tensor
cores have the other half, and the sum's first part, while the lanes are in an epilogue. The other warpgroup does the
rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tilestream.kernels.parts.text import block, loop, plus
from tilestream.kernels.stream.epilogue import Epilogue
from tilestream.kernels.stream.layout import boxes_of
from tilestream.kernels.stream.model import ColumnLoop, Place, Schedule, Step, ceil_to
from tilestream.kernels.stream.names import Names

KSTEPS = 4  # products of one instruction in a chunk of 128 bytes of depth
KSTEP_BYTES = 32
ROW_BYTES = 128  # of a page


def halves_of(schedule: Schedule) -> int:
    """Parts of a chunk that are under way one after the other."""
    return schedule.stage.in_flight


@dataclass
class Flight:
    """Products under way, oldest first: how many pages each gives back when it is done."""

    lines: list[str] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    issued: int = 0

    def issue(self, product: str, pages: int) -> int:
        """Start a product; its number, for ``wait``."""
        self.lines.append(product)
        self.pages.append(pages)
        self.issued += 1
        return self.issued

    def wait(self, number: int) -> None:
        """Until product ``number`` and all before it are done."""
        younger = self.issued - number
        done = self.pages[: len(self.pages) - younger]
        if done:
            self.lines.append(f"mma_wait<{younger}>();" + " pages.release();" * sum(done))
            self.pages = self.pages[len(done) :]


def column_loop(e: Names, over: ColumnLoop, operands: set[str]) -> list[str]:
    """The loop; behind it ``acc`` is the sum. ``operands``: tiles that products of the stage take."""
    last = e.s.steps[over.sums]
    first = e.s.steps[over.first].gemm
    assert last.gemm is not None and first is not None
    blocks, chunk = ceil_to(e.s.width(last), 8) // 8, over.chunk // 8
    lines = [f"Fragment<{blocks}> sum;", e.start(last.gemm, blocks, e.s.width(last), "sum")]
    lines.append("pin(sum);")
    e.loop = over
    lines += [f"Fragment<{chunk}> chunk;", e.start(first, chunk, over.chunk, "chunk", "0")]
    turn = [
        f"const int col0 = {over.chunk} * c;",
        f"Fragment<{chunk}>& acc = chunk;",
        *_turn(e, over, last, blocks, operands),
    ]
    e.loop = None
    lines += loop("c", over.turns, turn, "#pragma unroll 1")
    return [*lines, f"Fragment<{blocks}>& acc = sum;"]


def _turn(e: Names, over: ColumnLoop, last: Step, blocks: int, operands: set[str]) -> list[str]:
    halves = halves_of(e.s)
    flight = Flight()
    for index in range(over.first, over.sums):
        step = e.s.steps[index]
        assert step.gemm is not None
        if index != over.first:
            flight.lines.append(e.start(step.gemm, over.chunk // 8, over.chunk))
        flight.lines.append("pin(acc);")
        ready = _products(e, over, step, halves, flight)
        for half, number in enumerate(ready):
            flight.wait(number)
            for phase in step.phases:
                part = (half * over.chunk // 8 // halves, (half + 1) * over.chunk // 8 // halves)
                flight.lines += block("", Epilogue(e, step, phase, operands, 0, part).text())
            if index == over.last:
                _sum(e, over, last, blocks, half, halves, flight)
    # The next chunk's bias comes while the sum is under way. Nothing else may be from one turn to the next: ptxas would
    # wait for it where the loop closes (C7517), and spill.
    first = e.s.steps[over.first].gemm
    assert first is not None
    beyond = f"col0 + {over.chunk} < {over.features} ? col0 + {over.chunk} : 0"
    flight.lines.append(e.start(first, over.chunk // 8, over.chunk, "acc", beyond))
    flight.wait(flight.issued)
    return flight.lines


def _products(e: Names, over: ColumnLoop, step: Step, halves: int, flight: Flight) -> list[int]:
    """The chunk's product, page by page, half by half; the number of each half's last part."""
    assert step.gemm is not None
    columns = e.s.chunk_columns
    wide = over.chunk // 8 // halves
    page, ready = 0, [0] * halves
    for segment in step.gemm.segments:
        boxes = boxes_of(e.s, step, segment, e.layout.page_rows)
        for c in range(0, segment.chunks(columns), boxes):
            ksteps = sum(segment.ksteps(k, columns) for k in range(c, min(c + boxes, segment.chunks(columns))))
            if page:
                flight.wait(ready[-1] - halves)  # the page before is under way, those before it are done
            name = f"w{step.index}_{page}"
            flight.lines.append(f"const u32 {name} = pages.take(); pages.advance();")
            for half in range(halves):
                m = f"Mma<T, {wide}, {half * wide}>, {ksteps}, {over.chunk * ROW_BYTES}"
                at = plus(name, half * wide * 8 * ROW_BYTES)
                if segment.place is Place.REGISTERS:
                    first = (segment.start + c * columns) // 8
                    text = f"product_registers<{m}>(acc, r{e.s.slots[segment.tile]}, {first}, {at});"
                else:
                    chunk = segment.start // columns + c
                    left = e.buffer(segment.tile) + (f" + {chunk} * CHUNK_BYTES" if chunk else "")
                    text = f"product_shared<{m}>(acc, {left}, {at});"
                ready[half] = flight.issue(text, int(half == halves - 1))
            page += 1
    return ready


def _sum(e: Names, over: ColumnLoop, step: Step, blocks: int, half: int, halves: int, flight: Flight) -> None:
    """A half's part of the product that sums over the columns."""
    assert step.gemm is not None
    slot, columns = e.s.slots[step.gemm.segments[0].tile], e.s.chunk_columns
    subs = e.subs(blocks)
    depth = over.chunk // halves  # columns that there are now
    for c in range(over.chunk // columns):
        begin, end = max(c * columns, half * depth), min((c + 1) * columns, (half + 1) * depth)
        if begin >= end:
            continue
        ksteps = (end - begin) * KSTEPS // columns
        skip = (begin - c * columns) * KSTEPS // columns
        for number, (sub, at) in enumerate(subs):
            name = f"v{c}_{number}"
            if begin == c * columns:
                flight.lines.append(f"const u32 {name} = pages.take(); pages.advance();")
            where = plus(name, skip * KSTEP_BYTES)
            text = f"product_registers<Mma<T, {sub}, {at}>, {ksteps}>(sum, r{slot}, {begin // 8}, {where});"
            flight.issue(text, int(end == (c + 1) * columns))
