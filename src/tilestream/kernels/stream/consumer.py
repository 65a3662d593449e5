"""C++ of a stage's consumer warpgroups, one block of text a step, from its schedule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from tilestream.ir.pipeline import Pipeline, TileOp
from tilestream.kernels.parts.text import UNROLL, block, loop, plus
from tilestream.kernels.stream.column_loop import ROW_BYTES, column_loop
from tilestream.kernels.stream.epilogue import Epilogue
from tilestream.kernels.stream.layout import Layout, boxes_of, turns_of
from tilestream.kernels.stream.model import Gemm, Place, Schedule, Segment, Step, ceil_to
from tilestream.kernels.stream.names import Names
from tilestream.kernels.stream.node_sums import NodeSums
from tilestream.kernels.stream.tables import Tables, own_entry

MOST_PAGES, MOST_CHUNKS = 12, 4
"""Of a product whose code is unrolled altogether: pages of weights that it takes beside a stream, and chunks of an
operand that waits in shared memory, whose addresses are constants then. ptxas keeps such from one product to the next,
and spills (716 bytes of four layers 512 wide, of which loops spill 104), and NVRTC takes up to three times as long."""

NEXT_TILE = "tile + u.stride * S::TILES"
_POINTER = re.compile(r"@P(\d+)@")
_CHUNK = re.compile(r"\bin_[A-Za-z]\w*")


class ConsumerEmitter(Names):
    """Emits the loop body of one stage. Pointers and credits go to the tables in order of use,

    so that stages and steps that differ in nothing else have the same text: equal stages share
    code, and runs of equal steps become loops.
    """

    def __init__(
        self, schedule: Schedule, layout: Layout, pipeline: Pipeline, tables: Tables, stamped: bool = False
    ) -> None:
        super().__init__(schedule, layout, pipeline, tables)
        self.stamped = stamped
        self.lag = schedule.stage.in_flight - 1  # products younger than the one whose page is given back
        self.credits = 0
        self.reduces = 0
        self.last_use = self._last_queue_uses()
        self.operands = {seg.tile for step in schedule.steps if step.gemm for seg in step.gemm.segments}
        self.own_rows, self.node_sums = OwnRows(self), NodeSums(self)

    # -- the whole body

    def body(self) -> str:
        """Text of everything inside the loop over units."""
        groups: list[list[str]] = []
        for step in self.s.steps:
            if self._begins(step):
                groups.append([self._step(step)])
            elif self.s.loop_of(step) is None and self.s.summed(step) is None:
                groups[-1].append(self._step(step))
        blocks = ["\n".join(["    {", *texts, "    }"] if len(texts) > 1 else texts) for texts in groups]
        if self.split and self.reduces % 2:
            # Reductions take turns on two scratch areas; an odd number would meet itself in the next tile.
            blocks.append("    named_sync(BOTH_GROUPS, 256);")
        self.blocks = blocks
        return "\n".join([*("    " + line for line in self.node_sums.begin()), *_roll(blocks, turns_of(self.s))])

    def annotated(self) -> str:
        """The text of ``body``, which was made before, with a comment on every step."""
        notes: list[str] = []
        for step in self.s.steps:  # a block has the comments of all its steps
            note = comment(self.s.stage.name, step, self.pipeline)
            notes = [*notes, note] if self._begins(step) else [*notes[:-1], f"{notes[-1]}\n{note}"]
        notes += [""] * (len(self.blocks) - len(notes))
        return "\n".join(_roll(self.blocks, turns_of(self.s), notes))

    def declarations(self) -> str:
        lines = [f"Packed<{f // 8}> r{k};" for k, f in enumerate(self.s.slot_features)]
        rows = sorted(t for t, p in self.s.places.items() if p is Place.ROW)
        lines += [f"RowVector {self.row(t)};" for t in rows] + self.own_rows.declarations()
        lines += self.node_sums.declarations()
        return "\n".join("  " + line for line in lines)

    # -- queues

    def _last_queue_uses(self) -> dict[str, tuple[int, int]]:
        """For each queue taken: the last (step, phase or -1 for the product) that reads it."""
        last: dict[str, tuple[int, int]] = {}
        for step in self.s.steps:
            taken = [(-1, tile) for tile, _ in self.s.product_chunks(step)]
            taken += [(k, tile) for k, phase in enumerate(step.phases) for tile in phase.streams]
            last |= {self.s.streams[tile].queue: (step.index, k) for k, tile in taken}
        last.pop("", None)
        return last

    def _credits(self, step: int, phase: int) -> list[str]:
        lines = []
        for tile, last in sorted(self.last_use.items()):
            if last == (step, phase):
                queue = self.tables.queue(tile)
                consumer = self.tables.queues[queue].consumers.index(self.s.stage.name)
                self.tables.credits.append((queue, consumer))
                who = "group_leader() && g == 0" if self.split else "group_leader()"
                lines.append(f"if ({who}) give_credit(p, sync, {plus('w.credits', self.credits)}, tile);")
                self.credits += 1
        return lines

    # -- a step

    def _begins(self, step: Step) -> bool:
        """Whether a block of text begins with ``step``: a loop over columns is one, with the product that sums. So is
        an operand that is copied, with all that follows up to the next: equal wide layers become loops."""
        loop = self.s.loop_of(step) or self.s.summed(step)
        if loop is not None:
            return step.index == loop.first
        return bool(step.copied) or not any(s.copied for s in self.s.steps[: step.index])

    def _step(self, step: Step) -> str:
        lines = self.own_rows.text(step) if step.own_rows is not None else block("", self._lines(step))
        return "\n".join("    " + line for line in lines)

    def _lines(self, step: Step) -> list[str]:
        loop = self.s.loop_of(step)
        if loop is not None:
            last = self.s.steps[loop.sums]
            return [*self._mark("PRODUCT"), *column_loop(self, loop, self.operands), *self._epilogues(last)]
        if step.copied:
            return [*operand_copy(self, step), *self._credits(step.index, 0)]
        blocks = ceil_to(self.s.width(step), 8) // 8
        lines = [f"Fragment<{blocks}> acc;"]
        if self.split:
            lines.append(f"const int col0 = g * {self.s.stride(step)};")
        if step.gemm is not None:
            lines += [*self._mark("PRODUCT"), *self._gemm(step, step.gemm, blocks)]
        return [*lines, *self._epilogues(step)]

    def _epilogues(self, step: Step) -> list[str]:
        """Every pass over the fragment ``acc``."""
        lines = self._mark("EPILOGUE") if step.phases else []
        for k, phase in enumerate(step.phases):
            made = Epilogue(self, step, phase, self.operands, self.reduces, sums=self.node_sums)
            if self.split:
                self.reduces += len(phase.reduces)
            lines += block("", [*made.text(), *([] if made.empty else self._credits(step.index, k))])
        return lines

    def _mark(self, event: str) -> list[str]:
        return [f"sync.stamps.mark({event}, tile);"] if self.stamped else []

    def _gemm(self, step: Step, gemm: Gemm, blocks: int) -> list[str]:
        width = self.s.width(step)
        lines = [self.start(gemm, blocks, width), "pin(acc);"]
        streamed = [s for s in gemm.segments if s.place is Place.STREAM]
        body: list[str] = []
        first = True
        for count, ksteps in _runs(streamed, self.s.chunk_columns):
            body += self._streamed_chunks(count, ksteps, blocks, first)
            first = False
        was_stream = bool(streamed)
        for seg in gemm.segments:
            if seg.place is Place.STREAM:
                continue
            body += self._resident_chunks(step, seg, blocks, first, was_stream)
            first, was_stream = False, False
        body += self._credits(step.index, -1)
        if self.lag:
            body += ["mma_wait<0>();", *self._release(was_stream)]
        if not self.split or gemm.features > width:
            return [*lines, *body]
        # No columns for the second warpgroup, which still takes its share of the ring.
        chunks = sum(s.chunks(self.s.chunk_columns) for s in streamed)
        skipped = ["in.wait_full(); in.advance(); in.release();"] * min(chunks, 1)
        if chunks > 1:
            skipped = loop("c", chunks, skipped, pragma="")
        return [*lines, *block("if (g == 0)", body), *(block("else", skipped) if skipped else [])]

    def _streamed_chunks(self, count, ksteps, blocks, first) -> list[str]:
        """Chunks that come through the input ring."""
        subs = self.subs(blocks)
        lines = ["const u32 a = in.take();"]
        for n, (sub, at) in enumerate(subs):
            lines.append(f"product_shared<Mma<T, {sub}, {at}>, {ksteps}>(acc, a, pages.take());")
            lines.append("pages.advance();")
            free = self._free(n == (0 if self.lag else len(subs) - 1))
            if n or not first or not self.lag:
                lines.append(free)
            elif count > 1:
                lines.append(f"if (c > 0) {{ {free} }}")
        lines.append("in.advance();")
        return block("", lines) if count == 1 else loop("c", count, lines, _pragma(count * len(subs) <= MOST_PAGES))

    def _release(self, stream: bool) -> list[str]:
        return ["in.release();", "pages.release();"] if stream else ["pages.release();"]

    def _free(self, stream: bool) -> str:
        """Wait for the product ``lag`` behind the one just started, and give back its page (and its input chunk)."""
        return " ".join([f"mma_wait<{self.lag}>();", *self._release(stream)])

    def _resident_chunks(self, step: Step, seg: Segment, blocks: int, first: bool, was_stream: bool) -> list[str]:
        """Chunks of an operand that waits in registers or shared memory, those that share a page as one product."""
        columns, chunks = self.s.chunk_columns, seg.chunks(self.s.chunk_columns)
        boxes = boxes_of(self.s, step, seg, self.layout.page_rows)
        bodies: list[tuple[str, ...]] = []
        for c in range(0, chunks, boxes):
            shared = range(c, min(c + boxes, chunks))
            ksteps = sum(seg.ksteps(k, columns) for k in shared)
            lines = []
            for sub, at in self.subs(blocks):
                m = f"Mma<T, {sub}, {at}>, {ksteps}"
                if seg.place is Place.REGISTERS:
                    block = (seg.start + c * columns) // 8
                    m += f", {sub * 8 * ROW_BYTES}" if len(shared) > 1 else ""
                    lines.append(f"product_registers<{m}>(acc, r{self.s.slots[seg.tile]}, {block}, pages.take());")
                else:
                    lines.append(f"product_shared<{m}>(acc, {self.buffer(seg.tile)}@CHUNK@, pages.take());")
                lines.append("pages.advance();")
                if not first or not self.lag:
                    lines.append(self._free(was_stream and self.lag == 1))
                first, was_stream = False, False
            bodies.append(tuple(lines))
        return _chunk_by_chunk(bodies, seg.start // columns)


def _chunk_by_chunk(bodies: list[tuple[str, ...]], first: int) -> list[str]:
    """Text for each chunk from ``first`` on; many alike are a loop. ``@CHUNK@`` stands for a chunk's offset."""
    lines: list[str] = []
    for body, alike in groupby(enumerate(bodies, first), key=itemgetter(1)):
        chunks = [chunk for chunk, _ in alike]
        if len(chunks) > MOST_CHUNKS:
            offset = f" + (u32)({plus('c', chunks[0])}) * CHUNK_BYTES"
            lines += loop("c", len(chunks), [line.replace("@CHUNK@", offset) for line in body], _pragma(whole=False))
        else:
            offsets = [f" + {chunk} * CHUNK_BYTES" if chunk else "" for chunk in chunks]
            lines += [line.replace("@CHUNK@", offset) for offset in offsets for line in body]
    return lines


def _pragma(whole: bool) -> str:
    return UNROLL if whole else f"{UNROLL} 2"


def _runs(segments: list[Segment], columns: int) -> list[tuple[int, int]]:
    """(chunks, k-steps) of consecutive segments; ragged chunks apart."""
    ksteps = (seg.ksteps(c, columns) for seg in segments for c in range(seg.chunks(columns)))
    return [(len([*alike]), k) for k, alike in groupby(ksteps)]


def _roll(blocks: list[str], sizes: Sequence[int], notes: list[str] | None = None) -> list[str]:
    """Runs of steps with the same text but for consecutive pointers, and for which streams they take, become loops:
    less code to fetch, and to compile. Chunks come through one ring in order, whatever stream they are of.

    ``notes`` stand before the blocks that they belong to. A turn has as many blocks as the last of ``sizes`` that fits.
    """
    out: list[str] = []
    k = 0
    while k < len(blocks):
        period, turns = 1, blocks[k : k + 1]
        for size in sizes:
            if len(found := _turns(blocks[k:], size)) > 1:
                period, turns = size, found
        end = k + period * len(turns)
        out += [note for note in (notes or [])[k:end] if note]
        if len(turns) > 1:
            same = all(_CHUNK.findall(turn) == _CHUNK.findall(turns[0]) for turn in turns)
            count = len(set(_POINTER.findall(turns[0])))
            step = f" + {count} * l" if count > 1 else " + l"
            body = _POINTER.sub(
                lambda m, step=step: plus("", int(m[1])) + step, turns[0] if same else _any_stream(turns[0])
            )
            out.append(f"    #pragma unroll 1\n    for (int l = 0; l < {len(turns)}; ++l)")
            out += [body] if period == 1 else ["    {", body, "    }"]
        else:
            out.append(_POINTER.sub(lambda m: plus("", int(m[1])), blocks[k]))
        k = end
    return out


def _turns(blocks: list[str], period: int) -> list[str]:
    """The first turns, of ``period`` blocks each, that are alike."""
    turns = ["\n".join(blocks[k : k + period]) for k in range(0, len(blocks) - period + 1, period)]
    first, n = _any_stream(turns[0]) if turns else "", 1
    while n < len(turns) and _shifted(first, _any_stream(turns[n]), n):
        n += 1
    return turns[:n]


def _any_stream(block: str) -> str:
    """The block with its chunks' names by their order: ``in_s0``, ``in_s1``."""
    names: dict[str, str] = {}
    return _CHUNK.sub(lambda m: names.setdefault(m[0], f"in_s{len(names)}"), block)


def _shifted(first: str, other: str, n: int) -> bool:
    here, there = _POINTER.findall(first), _POINTER.findall(other)
    if "give_credit" in first or _POINTER.sub("@", first) != _POINTER.sub("@", other):
        return False
    count = len(set(here))
    return [int(a) + n * count for a in here] == [int(b) for b in there]


def comment(stage: str, step: Step, pipeline: Pipeline) -> str:
    """A line on a step, for people: its stage and number, its tile operations, and the user's lines that they come
    from. What is compiled has none: its text is a cache's key.
    """
    ops = [op for phase in step.phases for op in (*phase.nodes, *phase.reduces, *phase.row_nodes)]
    words = [op.kind for op in ops]
    if step.gemm is not None:
        outs, ins = pipeline.tensor(step.gemm.weight).shape
        words.insert(0, f"linear {ins}>{outs}")
    words += [f"store {s.target}" for phase in step.phases for s in phase.sinks if s.kind in ("direct", "staged")]
    sources = dict.fromkeys(s for s in (step.source, *(op.source for op in ops)) if s)
    text = f"    // {stage}, step {step.index}: {' + '.join(words)}" + "".join(f"; {s}" for s in sources)
    return text.replace("\\", "/")  # at the end of a line it would make the next one a comment


def operand_copy(names: Names, step: Step) -> list[str]:
    """A stream, chunk by chunk, or parked blocks: words that no lane changes and, of blocks, that each lane wrote."""
    schedule = names.s
    (sink,) = step.phases[0].sinks
    slot = f"r{schedule.slots[sink.target]}"
    lines: list[str] = []
    blocks = 0
    for tile in step.copied:
        count = ceil_to(schedule.tiles[tile].features, 8) // 8
        if schedule.places[tile] is Place.STREAM:
            chunks = ceil_to(step.features, schedule.chunk_columns) // schedule.chunk_columns
            turn = [
                "in.wait_full();",
                "const u32 a = in.addr();",
                f"pack_chunk<T>({slot}, c, a);",
                "fence_async_shared();  // the loads come before the copy that takes the slot's place",
                "in.advance(); in.release();",
            ]
            lines += loop("c", chunks, turn)
        else:
            lines.append(f"unpark<{blocks}, {count}>({slot}, {names.parked(tile)});")
        blocks += count
    whole = ceil_to(schedule.tiles[sink.target].features, 8) // 8
    if whole % 2:
        lines.append(f"zero_blocks<{whole}, {whole + 1}>({slot});")
    return lines


class OwnRows:
    """C++ of a stage's rows through an index that lanes load themselves: by no ring, into the registers that products
    take. Pointers of tables and indices are placed where they are first named.

    A loader warp copies 64 rows of 128 bytes in 1.6 us, 16 bytes a lane; the 128 lanes that compute with them load the
    same in the latency of one load. Which rows those are is read a tile ahead.
    """

    def __init__(self, names: Names) -> None:
        self.names = names
        self.loads = [step.own_rows for step in names.s.steps if step.own_rows is not None]

    def declarations(self) -> list[str]:
        """Of each index the rows of the next tile, at first of the first one."""
        lines = []
        for op in {self._rows(op): op for op in self.loads}.values():
            first = "Units<S::TILES>(p.rows, w).tile(g)"
            lines += [f"OwnRows {self._rows(op)};", self._find("find_first_rows", op, first)]
        return lines

    def text(self, step: Step) -> list[str]:
        """Of one load: its rows, and if no other load takes the same ones, which those of the next tile are."""
        op = step.own_rows
        assert op is not None
        slot, blocks = f"r{self.names.s.slots[op.made.name]}", op.made.features // 8
        lines = [f"load_own_rows<{blocks}>({slot}, {self._rows(op)}, p, {self._entry(op)});"]
        if blocks % 2:
            lines.append(f"zero_blocks<{blocks}, {blocks + 1}>({slot});")
        later = self.loads[self.loads.index(op) + 1 :]
        if all(self._rows(other) != self._rows(op) for other in later):
            lines.append(self._find("find_own_rows", op, NEXT_TILE))
        return lines

    def _find(self, what: str, op: TileOp, tile: str) -> str:
        return f"{what}({self._rows(op)}, p, {self._entry(op)}, {tile});"

    def _entry(self, op: TileOp) -> str:
        return f"LoadOp{{{', '.join(map(str, own_entry(self.names.tables, op, self.names.pipeline)))}}}"

    def _rows(self, op: TileOp) -> str:
        return f"rows{own_entry(self.names.tables, op, self.names.pipeline)[2]}"
