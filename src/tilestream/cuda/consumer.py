"""C++ of a stage's consumer warpgroups, one block of text a step, from its schedule."""

from __future__ import annotations

import re

from tilestream.cuda.annotate import comments
from tilestream.cuda.names import Names
from tilestream.cuda.snippets import expression, literal
from tilestream.cuda.tables import Tables
from tilestream.cuda.values import Values
from tilestream.errors import CompileError
from tilestream.ir.pipeline import Pipeline, TileOp
from tilestream.schedule.layout import Layout
from tilestream.schedule.model import Gemm, Phase, Place, Schedule, Segment, Step, ceil_to, columns_of

_POINTER = re.compile(r"@P(\d+)@")


class ConsumerEmitter(Names):
    """Emits the loop body of one stage. Pointers and credits go to the tables in order of use,

    so that stages and steps that differ in nothing else have the same text: equal stages share
    code, and runs of equal steps become loops.
    """

    def __init__(self, schedule: Schedule, layout: Layout, pipeline: Pipeline, tables: Tables) -> None:
        super().__init__(schedule, layout, pipeline, tables)
        self.lag = schedule.stage.in_flight - 1  # products younger than the one whose page is given back
        self.credits = 0
        self.reduces = 0
        self.last_use = self._last_queue_uses()
        self.operands = {seg.tile for step in schedule.steps if step.gemm for seg in step.gemm.segments}

    # -- the whole body

    def body(self) -> str:
        """Text of everything inside the loop over units."""
        blocks = [self._step(step) for step in self.s.steps]
        if self.split and self.reduces % 2:
            # Reductions take turns on two scratch areas; an odd number would meet itself in the next tile.
            blocks.append("    named_sync(BOTH_GROUPS, 256);")
        self.blocks = blocks
        return "\n".join(_roll(blocks))

    def annotated(self) -> str:
        """The text of ``body``, which was made before, with a comment on every step."""
        notes = comments(self.s, self.pipeline)
        return "\n".join(_roll(self.blocks, notes + [""] * (len(self.blocks) - len(notes))))

    def declarations(self) -> str:
        lines = [f"Packed<{f // 8}> r{k};" for k, f in enumerate(self.s.slot_features)]
        rows = sorted(t for t, p in self.s.places.items() if p is Place.ROW)
        lines += [f"RowVector {self.row(t)};" for t in rows]
        return "\n".join("  " + line for line in lines)

    # -- queues

    def _last_queue_uses(self) -> dict[str, tuple[int, int, str]]:
        """For each queue taken: the last (step, phase or -1 for the product, stream) that reads it."""
        last: dict[str, tuple[int, int, str]] = {}
        for step in self.s.steps:
            if step.gemm:
                for seg in step.gemm.segments:
                    if seg.place is Place.STREAM and self.s.streams[seg.tile].queue:
                        last[self.s.streams[seg.tile].queue] = (step.index, -1, seg.tile)
            for k, phase in enumerate(step.phases):
                for t in phase.streams:
                    if self.s.streams[t].queue:
                        last[self.s.streams[t].queue] = (step.index, k, t)
        return last

    def _credits(self, step: int, phase: int) -> list[str]:
        lines = []
        for tile, (s, p, _) in sorted(self.last_use.items()):
            if (s, p) == (step, phase):
                queue = self.tables.queue(tile)
                consumer = self.tables.queues[queue].consumers.index(self.s.stage.name)
                self.tables.credits.append((queue, consumer))
                who = "group_leader() && g == 0" if self.split else "group_leader()"
                lines.append(f"if ({who}) give_credit(p, sync, w.credits + {self.credits}, tile);")
                self.credits += 1
        return lines

    # -- a step

    def _step(self, step: Step) -> str:
        out: list[str] = []
        width = self.s.width(step)
        blocks = ceil_to(width, 8) // 8
        out.append("{")
        out.append(f"  Fragment<{blocks}> acc;")
        if self.split:
            out.append(f"  const int col0 = g * {self.s.stride(step)};")
        else:
            out.append("  constexpr int col0 = 0;")
        if step.gemm is not None:
            out += self._gemm(step, step.gemm, blocks, width)
        for k, phase in enumerate(step.phases):
            out += ["  {", *self._phase(step, k, phase, blocks, width), "  }"]
        out.append("}")
        return "\n".join("    " + line for line in out)

    def _gemm(self, step: Step, gemm: Gemm, blocks: int, width: int) -> list[str]:
        out = []
        whole = "true" if gemm.features == width * (2 if self.split else 1) and width % 8 == 0 else "false"
        if gemm.bias:
            vector = self.pipeline.tensor(gemm.bias)
            bias = self.pointer("vector", gemm.bias)
            out.append(f"  start_from<{vector.dtype}, {gemm.features}, {blocks}, {whole}>(acc, {bias}, col0);")
        else:
            out.append("  start_from_zero(acc);")
        out.append("  pin(acc);")
        idle = self.split and gemm.features <= width  # no columns for the second warpgroup
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
            done = 0
            for count, ksteps in _runs([seg], self.s.chunk_columns):
                body += self._resident_chunks(seg, done, count, ksteps, blocks, first, was_stream)
                done += count
                first, was_stream = False, False
        credits = self._credits(step.index, -1)
        tail = ["mma_wait<0>();", *self._release(was_stream)] if self.lag else []
        if idle:
            stream_chunks = sum(s.chunks(self.s.chunk_columns) for s in streamed)
            out.append("  if (g == 0) {")
            out += ["    " + line for line in (*body, *credits, *tail)]
            out.append("  } else {")
            if stream_chunks:
                out.append(
                    f"    for (int c = 0; c < {stream_chunks}; ++c) {{ in.wait_full(); in.advance(); in.release(); }}"
                )
            out.append("  }")
        else:
            out += ["  " + line for line in (*body, *credits, *tail)]
        return out

    def _subs(self, blocks: int) -> list[tuple[int, int]]:
        """(blocks, first block) of each page that a product's columns are spread over."""
        page = self.layout.page_rows // 8
        return [(min(page, blocks - at), at) for at in range(0, blocks, page)]

    def _streamed_chunks(self, count, ksteps, blocks, first) -> list[str]:
        """Chunks that come through the input ring."""
        # Longer runs gain nothing from more copies, and their constants spill.
        unroll = "#pragma unroll" if count <= 16 else "#pragma unroll 4"
        lines = [unroll, f"for (int c = 0; c < {count}; ++c) {{", "  const u32 a = in.take();"]
        subs = self._subs(blocks)
        for n, (sub, at) in enumerate(subs):
            lines.append(f"  product_shared<Mma<T, {sub}, {at}>, {ksteps}>(acc, a, pages.take());")
            lines.append("  pages.advance();")
            free = self._free(n == (0 if self.lag else len(subs) - 1))
            if n or not first or not self.lag:
                lines.append(f"  {free}")
            elif count > 1:
                lines.append(f"  if (c > 0) {{ {free} }}")
        return [*lines, "  in.advance();", "}"]

    def _release(self, stream: bool) -> list[str]:
        return ["in.release();", "pages.release();"] if stream else ["pages.release();"]

    def _free(self, stream: bool) -> str:
        """Wait for the product ``lag`` behind the one just started, and give back its page (and its input chunk)."""
        return " ".join([f"mma_wait<{self.lag}>();", *self._release(stream)])

    def _resident_chunks(self, seg: Segment, done, count, ksteps, blocks, first, was_stream) -> list[str]:
        """Chunks of an operand that waits in registers or shared memory."""
        columns = self.s.chunk_columns
        lines = []
        for c in range(done, done + count):
            for sub, at in self._subs(blocks):
                m = f"Mma<T, {sub}, {at}>, {ksteps}"
                if seg.place is Place.REGISTERS:
                    block = (seg.start + c * columns) // 8
                    lines.append(f"product_registers<{m}>(acc, r{self.s.slots[seg.tile]}, {block}, pages.take());")
                else:
                    at_chunk = f"{self.buffer(seg.tile)} + {seg.start // columns + c} * CHUNK_BYTES"
                    lines.append(f"product_shared<{m}>(acc, {at_chunk}, pages.take());")
                lines.append("pages.advance();")
                if not first or not self.lag:
                    lines.append(self._free(was_stream and self.lag == 1))
                first, was_stream = False, False
        return lines

    # -- an epilogue pass

    def _phase(self, step: Step, index: int, phase: Phase, blocks: int, width: int) -> list[str]:
        columns = self.s.pass_columns
        per_chunk = columns // 8
        chunks = ceil_to(width, columns) // columns
        staged = [s for s in phase.sinks if s.kind == "staged"]
        shared = [s for s in phase.sinks if s.kind == "shared"]
        out = [f"  fill_rows({self.row(op.out.name)}, {self._neutral(op)});" for op in phase.reduces if op.out]
        names = Values(self, step, phase, width)
        out += names.setup
        if shared:
            # Whoever still reads the buffer's last tenant must be done.
            if any(self.s.buffers[s.target] == self.layout.out_buffer for s in shared):
                out.append("  out.wait_all_empty();")
            out.append(f"  {self._barrier()}")
        elif staged and self.layout.out_buffer >= 0:
            out.append(f"  {self._barrier()}  // both have read the operand whose memory takes the output")
        if not (phase.nodes or phase.reduces or phase.sinks):
            return out
        out += ["  TS_PASS", "#pragma unroll", f"  for (int c = 0; c < {chunks}; ++c) {{"]
        for t in phase.streams:
            out += self._take(t)
        # Chunks of the second warpgroup that lie beyond the tile have no room in its buffer or staging.
        past = self.split and step.features <= width + (chunks - 1) * columns
        guard = f"if (col0 + c * {columns} < {step.features}) " if past else ""
        outs = [f"out{k}" for k in range(self.s.staged(phase))]
        for k, _ in enumerate(outs):
            out.append(f"    u32 out{k} = 0;")
            out.append(f"    {guard}{{ out.wait_empty(); out{k} = out.addr(); out.advance(); }}")
        out.append(f"    {guard}TS_LANES {{")
        out.append("      const u32 t = TS_PASS_LANE;")
        out.append("#pragma unroll")
        out.append(f"      for (int k = 0; k < {per_chunk}; ++k) {{")
        out.append(f"        const int i = c * {per_chunk} + k;")
        out.append(f"        if (i >= {blocks}) break;" if blocks % per_chunk else "")
        whole = not self.split and step.features % 8 == 0 or self.split and step.features == 2 * width
        if whole:
            out.append("        constexpr bool ok0 = true, ok1 = true;")
        else:
            out.append(
                f"        const bool whole = {'8 * i + 8 <= ' + str(step.features) if not self.split else 'false'};"
            )
            out.append("        const int col = col0 + col_of(t, i);")
            out.append(
                f"        const bool ok0 = whole || col < {step.features}, ok1 = whole || col + 1 < {step.features};"
            )
        out.append("#pragma unroll")
        out.append("        for (int j = 0; j < 2; ++j) {")
        out += ["          " + line for line in names.evaluate()]
        out += ["          " + line for line in self._reduce_lines(phase, names)]
        room = iter(outs)
        for sink in staged:
            a, b = names.masked(sink.tile)
            at = self.in_chunk([next(room) for _ in range(self.s.parts(sink.dtype))], sink.dtype)
            out.append(f"          Io<{self.element(sink.dtype)}>::store({at}, {a}, {b});")
        for sink in phase.sinks:
            if sink.kind != "staged":
                mine = guard if sink.kind == "shared" and sink.column % 8 == 0 else ""
                out += ["          " + mine + line for line in self._sink(sink, names)]
        # Last: sinks may still want the value that it overwrites.
        if phase.keep:
            a, b = names.pair(phase.keep)
            out.append(f"          TS_REG(acc, 4 * i + 2 * j) = {a};")
            out.append(f"          TS_REG(acc, 4 * i + 2 * j + 1) = {b};")
        out += ["        }", "      }"]
        out.append("      fence_async_shared();" if staged else "")
        out.append("    }")
        for _ in outs:
            out.append(f"    {guard}group_arrive(out.published());")
        for _ in range(self.s.taken(phase)):
            out.append("    in.release();" + (" in.release();" if self.split else ""))
        out.append("  }")
        out += self._after(phase, shared, blocks, width, step)
        out += ["  " + line for line in self._credits(step.index, index)]
        return [line for line in out if line]

    def _take(self, tile: str) -> list[str]:
        lines = []
        for name in self.chunk_names(tile):
            if self.split:
                take = f"in.wait_full(); if (h == g) {name} = in.addr(); in.advance();"
                lines += [f"    u32 {name} = 0;", f"    for (int h = 0; h < 2; ++h) {{ {take} }}"]
            else:
                lines.append(f"    in.wait_full(); const u32 {name} = in.addr(); in.advance();")
        return lines

    def _neutral(self, op: TileOp) -> str:
        return literal(0.0) if op.kind == "sum" else literal(float("-inf"))

    def _reduce_lines(self, phase: Phase, names: Values) -> list[str]:
        lines = []
        for op in phase.reduces:
            assert op.out is not None
            a, b = names.pair(op.ins[0])
            row = f"TS_REG({self.row(op.out.name)}, j)"
            if op.kind == "sum":
                lines.append(f"{row} += (ok0 ? {a} : 0.0f) + (ok1 ? {b} : 0.0f);")
            else:
                lines.append(f"if (ok0) {row} = max_nan({row}, {a});")
                lines.append(f"if (ok1) {row} = max_nan({row}, {b});")
        return lines

    def _sink(self, sink, names: Values) -> list[str]:
        a, b = names.masked(sink.tile)
        if sink.kind == "registers":
            return [f"TS_REG(r{self.s.slots[sink.target]}, 2 * i + j) = T::pack({a}, {b});"]
        if sink.kind == "shared":
            base, dtype = self.buffer(sink.target), self.buffer_dtype(sink.target)
            e = self.element(dtype)
            if self.s.dtype == "f32" and sink.target in self.operands:
                a, b = f"f32::to_tf32({a})", f"f32::to_tf32({b})"  # products would truncate
            at = f"{base}, (u32)row_of(t, j), (u32)(col0 + col_of(t, i) + {sink.column}"
            # The second warpgroup's columns start on a chunk, so its blocks have the first one's numbers.
            if sink.column % 8 == 0:
                own = self.own_chunks(dtype)
                store = f"Io<{e}>::store(pair_addr<{e}>({base}{own}, t, i + {sink.column // 8}, j), {a}, {b});"
                if sink.target == sink.tile or self.s.tiles[sink.tile].features % 8 == 0:
                    return [store]
                # Columns beyond this part belong to the next part of the concatenation.
                return [f"if (ok1) {{ {store} }} else if (ok0) Io<{e}>::store1(element_addr<{e}>({at})), {a});"]
            return [
                f"if (ok0) Io<{e}>::store1(element_addr<{e}>({at})), {a});",
                f"if (ok1) Io<{e}>::store1(element_addr<{e}>({at} + 1)), {b});",
            ]
        if sink.kind == "direct":
            return names.direct(sink, *names.pair(sink.tile))
        raise CompileError(f"sink {sink.kind!r} has no CUDA form", "report this with the pipeline")

    def _barrier(self) -> str:
        return "named_sync(BOTH_GROUPS, 256);" if self.split else "named_sync(GROUP_BARRIER + g, 128);"

    def _after(self, phase: Phase, shared, blocks: int, width: int, step: Step) -> list[str]:
        out = []
        for sink in phase.sinks:
            columns, e = 0, ""
            if sink.kind == "shared":
                dtype = self.buffer_dtype(sink.target)
                columns, e = columns_of(dtype), self.element(dtype)
            if sink.kind == "registers":
                even = ceil_to(blocks, 2)
                if even > blocks:
                    out.append(f"  zero_blocks<{blocks}, {even}>(r{self.s.slots[sink.target]});")
            if sink.kind == "shared" and sink.target == sink.tile:
                full = ceil_to(step.features, columns) // 8
                if full > blocks and step.features <= width:  # else the second warpgroup masks the last chunk
                    who = "if (g == 1) " if self.split else ""
                    out.append(f"  {who}zero_columns<{e}, {blocks}, {full}>({self.buffer(sink.target)});")
            if sink.kind == "shared" and sink.target != sink.tile:
                total = self.s.tiles[sink.target].features
                full = ceil_to(total, columns // 4)  # as far as products read
                if full > total and sink.column + step.features == total:
                    who = "if (g == 1) " if self.split else ""
                    out.append(f"  {who}zero_tail<{e}, {total}, {full}>({self.buffer(sink.target)});")
        if shared:
            out.append("  fence_async_shared();")
            out.append(f"  {self._barrier()}")
        for op in phase.reduces:
            assert op.out is not None
            row = self.row(op.out.name)
            out.append(f"  row_{op.kind}({row});")
            if self.split:
                flag = "true" if op.kind == "max" else "false"
                out.append(
                    f"  combine_halves<{flag}>({row}, smem + {self.layout.scratch + 512 * (self.reduces % 2)}u, g);"
                )
                self.reduces += 1
        if phase.row_nodes:
            out.append("  TS_LANES {")
            out.append("    const u32 t = TS_LANE; (void)t;")
            out.append("    for (int j = 0; j < 2; ++j) {")
            for op in phase.row_nodes:
                assert op.out is not None
                args = [f"TS_REG({self.row(i)}, j)" for i in op.ins]
                out.append(f"      TS_REG({self.row(op.out.name)}, j) = {expression(op, args)};")
            out.append("    }")
            out.append("  }")
        return out


def _runs(segments: list[Segment], columns: int) -> list[tuple[int, int]]:
    """(chunks, k-steps) of consecutive segments; ragged chunks apart."""
    runs: list[tuple[int, int]] = []
    for k in (seg.ksteps(c, columns) for seg in segments for c in range(seg.chunks(columns))):
        if runs and runs[-1][1] == k:
            runs[-1] = (runs[-1][0] + 1, k)
        else:
            runs.append((1, k))
    return runs


def _roll(blocks: list[str], notes: list[str] | None = None) -> list[str]:
    """Runs of steps with the same text but for consecutive pointers become loops: less code to fetch.

    ``notes`` stand before the blocks that they belong to.
    """
    out: list[str] = []
    k = 0
    while k < len(blocks):
        n = 1
        while k + n < len(blocks) and _shifted(blocks[k], blocks[k + n], n):
            n += 1
        out += [note for note in (notes or [])[k : k + n] if note]
        if n > 1:
            count = len(set(_POINTER.findall(blocks[k])))
            out.append(f"#pragma unroll 1\n    for (int l = 0; l < {n}; ++l)")
            out.append(_POINTER.sub(lambda m, c=count: f"{m[1]} + {c} * l", blocks[k]))
        else:
            out.append(_POINTER.sub(lambda m: m[1], blocks[k]))
        k += n
    return out


def _shifted(first: str, other: str, n: int) -> bool:
    here, there = _POINTER.findall(first), _POINTER.findall(other)
    if "give_credit" in first or _POINTER.sub("@", first) != _POINTER.sub("@", other):
        return False
    count = len(set(here))
    return [int(a) + n * count for a in here] == [int(b) for b in there]
