"""C++ of a loop over the columns of a hidden layer: each turn makes a chunk, and adds its product to the sum.

``y += act(x W1[chunk]) W2[chunk]``: the chunk goes from the accumulators of the first product through its epilogue into
the packed registers that are the left operand of the second. While one warpgroup is in its epilogue, the other multiplies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilestream.cuda.epilogue import Epilogue
from tilestream.cuda.text import block, loop
from tilestream.schedule.layout import boxes_of
from tilestream.schedule.model import ColumnLoop, Place, Step, ceil_to

if TYPE_CHECKING:
    from tilestream.cuda.consumer import ConsumerEmitter

KSTEPS = 4  # products of one instruction in a chunk of 128 bytes of depth


def column_loop(e: ConsumerEmitter, over: ColumnLoop) -> list[str]:
    """The loop, then the epilogue of the step that sums, in its fragment."""
    last = e.s.steps[over.sums]
    assert last.gemm is not None
    blocks = ceil_to(e.s.width(last), 8) // 8
    lines = [f"Fragment<{blocks}> sum;", *e.mark("PRODUCT"), e.start(last.gemm, blocks, e.s.width(last), "sum")]
    lines.append("pin(sum);")
    turn = [f"const int col0 = {over.chunk} * c;"]
    e.loop = over
    for index in range(over.first, over.sums):
        turn += block("", _chunk(e, over, e.s.steps[index]))
    e.loop = None
    turn += _awaited(e, _sum(e, over, last, blocks))
    lines += loop("c", over.turns, turn, "#pragma unroll 1")
    lines.append(f"Fragment<{blocks}>& acc = sum;")
    return [*lines, *e.epilogues(last)]


def _chunk(e: ConsumerEmitter, over: ColumnLoop, step: Step) -> list[str]:
    """One product of a turn, and its epilogue."""
    gemm = step.gemm
    assert gemm is not None
    blocks, columns = over.chunk // 8, e.s.chunk_columns
    boxes = boxes_of(e.s, step, e.layout.page_rows)
    lines = [f"Fragment<{blocks}> acc;", e.start(gemm, blocks, over.chunk), "pin(acc);"]
    products = []
    for segment in gemm.segments:
        for c in range(0, segment.chunks(columns), boxes):
            steps = sum(segment.ksteps(k, columns) for k in range(c, min(c + boxes, segment.chunks(columns))))
            for sub, at in e.subs(blocks):
                m = f"Mma<T, {sub}, {at}>, {steps}, {over.chunk * 128}"
                if segment.place is Place.REGISTERS:
                    first = (segment.start + c * columns) // 8
                    products.append(f"product_registers<{m}>(acc, r{e.s.slots[segment.tile]}, {first}, pages.take());")
                else:
                    at_chunk = f"{e.buffer(segment.tile)} + {segment.start // columns + c} * CHUNK_BYTES"
                    products.append(f"product_shared<{m}>(acc, {at_chunk}, pages.take());")
    lines += _awaited(e, products)
    for phase in step.phases:
        lines += block("", Epilogue(e, step, phase, e.operands, 0).lines())
    return lines


def _sum(e: ConsumerEmitter, over: ColumnLoop, step: Step, blocks: int) -> list[str]:
    """The turn's part of the product that sums over the columns."""
    assert step.gemm is not None
    slot, depth = e.s.slots[step.gemm.segments[0].tile], e.s.chunk_columns // 8
    return [
        f"product_registers<Mma<T, {sub}, {at}>, {KSTEPS}>(sum, r{slot}, {c * depth}, pages.take());"
        for c in range(over.chunk // e.s.chunk_columns)
        for sub, at in e.subs(blocks)
    ]


def _awaited(e: ConsumerEmitter, products: list[str]) -> list[str]:
    """Products, a page each, until the last is done.

    None is under way from one turn to the next: ptxas would wait for it where the loop closes (C7517), and spill.
    """
    lines: list[str] = []
    for number, product in enumerate(products):
        lines += [product, "pages.advance();"]
        if not e.lag or number:
            lines.append(f"mma_wait<{e.lag}>(); pages.release();")
    return [*lines, "mma_wait<0>(); pages.release();"] if e.lag else lines
