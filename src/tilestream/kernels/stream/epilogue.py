"""C++ of one pass over a fragment: what a warpgroup does with the accumulators between two row reductions.

A pass takes ``pass_columns`` columns a turn. In a turn every lane goes over its blocks of eight columns, and in each
over its two rows: there it has one pair of neighbouring columns, for which it computes every value of the phase.
"""

from __future__ import annotations

import re

from tilestream.errors import CompileError
from tilestream.ir.pipeline import TileOp
from tilestream.ir.tileops import GROUP
from tilestream.kernels.parts.element import NEUTRAL, registers
from tilestream.kernels.parts.text import UNROLL, block, loop, plus
from tilestream.kernels.stream.model import Phase, Sink, Step, ceil_to, columns_of
from tilestream.kernels.stream.names import Names
from tilestream.kernels.stream.node_sums import NodeSums
from tilestream.kernels.stream.values import Values

COMBINE_BYTES = 512
"""Of scratch that the warpgroups need to reduce a row together. Reductions take turns on two such areas."""


class Epilogue(Values):
    """The text of one phase of a step.

    Args:
        operands: tiles that products of the stage take.
        reductions: how many over both warpgroups the stage has before this phase.
        part: the first of the fragment's blocks that it takes, and where they end; all, unless it is said.
        sums: what the stage sums to nodes.
    """

    def __init__(
        self,
        names: Names,
        step: Step,
        phase: Phase,
        operands: set[str],
        reductions: int,
        part: tuple[int, int] | None = None,
        sums: NodeSums | None = None,
    ) -> None:
        super().__init__(names, step, phase, names.s.turns(step) if part is None else 1)
        self.operands, self.reductions, self.part = operands, reductions, part
        self.blocks = ceil_to(self.width, 8) // 8
        self.columns = names.s.pass_columns
        self.staged = [s for s in phase.sinks if s.kind == "staged"]
        self.shared = [s for s in phase.sinks if s.kind == "shared"]
        self.nodes = [s for s in phase.sinks if s.kind == "nodes"]
        self.sums = sums
        self.ahead = {t: f"{names.chunk_names(t)[0]}_x" for t in names.s.ahead(step, phase)}

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute, and so nothing to take."""
        return not (self.phase.nodes or self.phase.reduces or self.phase.sinks)

    def text(self) -> list[str]:
        if self.empty:
            return self._before()
        turn = self._turn()
        pragma = f"{UNROLL} 1" if self.schedule.looped(self.step, self.phase) else UNROLL
        turns = loop("c", self.turns, turn, pragma) if self.turns > 1 else turn
        return [*self._before(), "TS_PASS", *turns, *self._after()]

    # -- before the turns

    def _before(self) -> list[str]:
        names = self.names
        fills = [f"fill_rows({names.row(op.out.name)}, {NEUTRAL[op.kind]});" for op in self.phase.reduces if op.out]
        lines = [*fills, *self.setup]
        if self.nodes and self.sums is not None:
            lines.append(self.sums.before())
        if self.shared:
            # Whoever still reads the buffer's last tenant must be done.
            if any(names.s.buffers[s.target] == names.layout.out_buffer for s in self.shared):
                lines.append("out.wait_all_empty();")
            lines.append(names.barrier())
        elif self.staged and names.layout.out_buffer >= 0:
            lines.append(f"{names.barrier()}  // both have read the operand whose memory takes the output")
        return lines

    # -- a turn

    def _turn(self) -> list[str]:
        names, schedule, phase = self.names, self.schedule, self.phase
        lines = [line for tile in phase.streams for line in self._take(tile)]
        # Chunks of the second warpgroup that lie beyond the tile have no room in its buffer or staging.
        past = names.split and self.step.features <= self.width + (self.turns - 1) * self.columns
        first = f"col0 + c * {self.columns}" if self.turns > 1 else "col0"
        guard = f"if ({first} < {self.step.features}) " if past else ""
        outs = [f"out{k}" for k in range(schedule.staged(phase))]
        for out in outs:
            if guard:
                lines += [f"u32 {out} = 0;", f"{guard}{{ out.wait_empty(); {out} = out.addr(); out.advance(); }}"]
            else:
                lines.append(f"out.wait_empty(); const u32 {out} = out.addr(); out.advance();")
        lines += [f"Registers<u32, {2 * self._block_count}> {words};" for words in self.ahead.values()]
        lanes = ["const u32 t = TS_PASS_LANE;", *self._ahead(), *self._blocks(outs, guard)]
        if self.staged or schedule.taken(phase):  # copies see stores, and come behind loads of their place
            lanes.append("fence_async_shared();")
        maxima = [s for s in phase.sinks if s.kind == "maxima"]
        lines += [f"Registers<u32, 8> {_most(s)};" for s in maxima]
        lines += block(f"{guard}TS_LANES", lanes)
        for sink in maxima:
            tensor = names.pipeline.tensor(sink.target)
            features = GROUP * tensor.features
            column = plus(f"{self.columns} * c" if self.turns > 1 else "0", sink.column)
            lines.append(f"max_of_rows<{names.element(sink.dtype)}>({_most(sink)});")
            where = f"(void*){self.pointers[sink.target]}"
            lines.append(f"store_maxima<{features}>({where}, {_most(sink)}, tile, {column}, p.rows);")
        if self.nodes and self.sums is not None:
            lines += self.sums.after(self.nodes, f"{self.columns} * c" if self.turns > 1 else "0")
        lines += [f"{guard}group_arrive(out.published());" for _ in outs]
        lines += ["in.release(); in.release();" if names.split else "in.release();"] * schedule.taken(phase)
        return lines

    def _take(self, tile: str) -> list[str]:
        """Chunks of a stream from the input ring; under Shard(1), both warpgroups take those of both."""
        lines = []
        for name in self.names.chunk_names(tile):
            if self.names.split:
                take = f"in.wait_full(); if (h == g) {name} = in.addr(); in.advance();"
                lines += [f"u32 {name} = 0;", f"for (int h = 0; h < 2; ++h) {{ {take} }}"]
            else:
                lines.append(f"in.wait_full(); const u32 {name} = in.addr(); in.advance();")
        return lines

    @property
    def _block_count(self) -> int:
        """Blocks of a turn; the last one may have fewer."""
        return min(self.blocks, self.columns // 8)

    def _ahead(self) -> list[str]:
        """Loads of a turn's pairs."""
        lines = []
        for tile, words in self.ahead.items():
            at = self.names.in_chunk(self.names.chunk_names(tile), self.schedule.dtype, "k")
            pair = loop("j", 2, [f"TS_REG({words}, 2 * k + j) = lds32({at});"])
            lines += loop("k", self._block_count, pair)
        return lines

    def _blocks(self, outs: list[str], guard: str) -> list[str]:
        """A lane's blocks ``i``; where there are several turns, ``k`` counts those of this one."""
        masks = self._masks() if self.masks else []
        rows = [*masks, *loop("j", 2, self._pair(outs, guard))]
        if self.blocks == 1:
            return ["constexpr int i = 0;", *rows]
        if self.part is not None:
            return [UNROLL, *block(f"for (int i = {self.part[0]}; i < {self.part[1]}; ++i)", rows)]
        if self.turns == 1:
            return loop("i", self.blocks, rows)
        each = self.columns // 8
        number = [f"const int i = c * {each} + k;"]
        if self.blocks % each:
            number.append(f"if (i >= {self.blocks}) break;")
        return loop("k", each, [*number, *rows])

    def _masks(self) -> list[str]:
        """``ok0``, ``ok1``: whether the pair's columns are the tile's, or pad its last block."""
        features = self.step.features
        column = f"const int col = {self.names.column};"
        if self.names.shifted:
            return [column, f"const bool ok0 = col < {features}, ok1 = col + 1 < {features};"]
        return [
            column,
            f"const bool whole = 8 * i + 8 <= {features};",
            f"const bool ok0 = whole || col < {features}, ok1 = whole || col + 1 < {features};",
        ]

    def _pair(self, outs: list[str], guard: str) -> list[str]:
        """One pair of columns: every value, then what becomes of it."""
        phase = self.phase
        lines = self.evaluate()
        room = iter(outs)
        for sink in self.staged:
            a, b = self.masked(sink.tile)
            chunks = [next(room) for _ in range(self.schedule.parts(sink.dtype))]
            at = self.names.in_chunk(chunks, sink.dtype, self.block)
            lines.append(f"Io<{self.names.element(sink.dtype)}>::store({at}, {a}, {b});")
        if self.nodes and self.sums is not None:
            lines.append(self.sums.put(self.block, *self.value(self.nodes[0].tile)))
        for sink in phase.sinks:
            if sink.kind not in ("staged", "nodes"):
                mine = guard if sink.kind == "shared" and sink.column % 8 == 0 else ""
                lines += [mine + line for line in self._sink(sink)]
        # Last: sinks may still want the value that it overwrites.
        if phase.keep:
            kept = zip(registers("acc"), self.value(phase.keep), strict=True)
            lines += [f"{register} = {text};" for register, text in kept]
        return lines

    # -- sinks

    def _sink(self, sink: Sink) -> list[str]:
        names = self.names
        packed = f"T::pack({', '.join(self.masked(sink.tile))})"
        if sink.kind == "registers":
            word = plus("2 * i + j", sink.column // 4)
            return [f"TS_REG(r{self.schedule.slots[sink.target]}, {word}) = {packed};"]
        if sink.kind == "parked":
            return [f"sts32(parked_addr({self.names.parked(sink.target)}, t, 2 * i + j), {packed});"]
        if sink.kind == "shared":
            return self._to_buffer(sink)
        if sink.kind == "maxima":
            a, b = self.value(sink.tile)
            e, word = names.element(sink.dtype), f"TS_REG({_most(sink)}, {self.block})"
            return [f"{word} = j == 0 ? {e}::pack({a}, {b}) : {e}::larger({word}, {e}::pack({a}, {b}));"]
        if sink.kind == "direct":
            return self.direct(sink, *self.value(sink.tile))
        raise CompileError(f"sink {sink.kind!r} has no CUDA form", "report this with the pipeline")

    def _to_buffer(self, sink: Sink) -> list[str]:
        names, schedule = self.names, self.schedule
        a, b = self.masked(sink.tile)
        base, dtype = names.buffer(sink.target), names.buffer_dtype(sink.target)
        e = names.element(dtype)
        if schedule.dtype == "f32" and sink.target in self.operands:
            a, b = f"f32::to_tf32({a})", f"f32::to_tf32({b})"  # products would truncate

        def one(value: str, beyond: int) -> str:
            at = f"{base}, (u32)row_of(t, j), (u32)({plus(names.column, sink.column)})" + (" + 1" if beyond else "")
            return f"Io<{e}>::store1(element_addr<{e}>({at}), {value});"

        if sink.column % 8:
            return [self.where(0, one(a, 0)), self.where(1, one(b, 1))]
        # The second warpgroup's columns start on a chunk, so its blocks have the first one's numbers.
        at = f"pair_addr<{e}>({base}{names.own_chunks(dtype)}, t, {plus('i', sink.column // 8)}, j)"
        both = f"Io<{e}>::store({at}, {a}, {b});"
        if sink.target == sink.tile or schedule.tiles[sink.tile].features % 8 == 0 or not self.masks:
            return [both]
        # Columns beyond this part belong to the next part of the concatenation.
        return [f"if (ok1) {{ {both} }} else if (ok0) {one(a, 0)}"]

    # -- after the turns

    def _after(self) -> list[str]:
        names = self.names
        lines = [line for sink in self.phase.sinks for line in self._padding(sink)]
        if self.shared:
            lines += ["fence_async_shared();", names.barrier()]
        for number, op in enumerate(self.phase.reduces):
            lines += self._finish(op, self.reductions + number)
        if self.phase.row_nodes:
            each = loop("j", 2, self.of_rows(), pragma="")
            lines += block("TS_LANES", ["const u32 t = TS_LANE;", "(void)t;", *each])
        return lines

    def _padding(self, sink: Sink) -> list[str]:
        """Zeros behind a tile's last column, as far as products read."""
        names, schedule = self.names, self.schedule
        who = "if (g == 1) " if names.split else ""
        if sink.kind == "registers" and self.blocks % 2 and not sink.column:  # the copy of several blocks pads them all
            return [f"zero_blocks<{self.blocks}, {self.blocks + 1}>(r{schedule.slots[sink.target]});"]
        if sink.kind != "shared":
            return []
        dtype, buffer = names.buffer_dtype(sink.target), names.buffer(sink.target)
        columns, e = columns_of(dtype), names.element(dtype)
        if sink.target == sink.tile:
            full = ceil_to(self.step.features, columns) // 8
            # Else the second warpgroup masks the last chunk.
            if full > self.blocks and self.step.features <= self.width:
                return [f"{who}zero_columns<{e}, {self.blocks}, {full}>({buffer});"]
            return []
        total = schedule.tiles[sink.target].features
        full = ceil_to(total, columns // 4)
        if full > total and sink.column + self.step.features == total:
            return [f"{who}zero_tail<{e}, {total}, {full}>({buffer});"]
        return []

    def _finish(self, op: TileOp, number: int) -> list[str]:
        """A row's reduction over its four lanes, and under Shard(1) over both warpgroups."""
        row = self.names.row(op.made.name)
        lines = [f"row_{op.kind}({row});"]
        if self.names.split:
            scratch = self.names.layout.scratch + COMBINE_BYTES * (number % 2)
            flag = "true" if op.kind == "max" else "false"
            lines.append(f"combine_halves<{flag}>({row}, smem + {scratch}u, g);")
        return lines


def _most(sink: Sink) -> str:
    """The variable of the maxima of a turn: a word for each of its eight blocks."""
    return f"most_{re.sub(r'[^0-9A-Za-z]', '_', sink.target)}"
