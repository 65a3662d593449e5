"""C++ names of the values of one epilogue pass, for one pair of columns."""

from __future__ import annotations

from collections.abc import Sequence

from tilestream.ir.axes import View
from tilestream.ir.pipeline import DTYPE_BYTES, TileOp
from tilestream.kernels.parts.element import Elements, Value, expressions, registers
from tilestream.kernels.parts.text import plus
from tilestream.kernels.stream.blocks import START
from tilestream.kernels.stream.model import Phase, Place, Sink, Step, ceil_to
from tilestream.kernels.stream.names import Names


class Values(Elements):
    """Evaluates a phase: a pair of neighbours of each value, ``a1`` and ``b1``, and values of a row.

    Attributes:
        masks: some pairs have columns that are not the tile's, but pad its last block: ``ok0`` and ``ok1`` say which.
        turns: of the pass; blocks are counted by ``k`` in a turn, and by ``i`` where there is but one.
        ahead: of streams, those whose pairs a lane has all loaded before it computes the first: variables of words.
    """

    def __init__(self, names: Names, step: Step, phase: Phase, turns: int) -> None:
        super().__init__()
        self.names, self.schedule, self.step, self.phase, self.turns = names, names.s, step, phase, turns
        self.width, self.masks = names.s.width(step), names.s.guarded(step)
        self.held = step.held_before(phase)
        self.setup: list[str] = []
        self.pointers: dict[str, str] = {}
        self.ahead: dict[str, str] = {}
        for op in phase.nodes:
            for name in op.params:
                self._pointer(name)
        for sink in phase.sinks:
            if sink.kind in ("direct", "maxima"):
                self._pointer(sink.target, "output")

    @property
    def block(self) -> str:
        """The variable that counts the blocks of a turn."""
        return "k" if self.turns > 1 else "i"

    def _pointer(self, name: str, kind: str = "vector") -> str:
        if name not in self.pointers:
            var = f"v{len(self.pointers)}"
            self.pointers[name] = var
            self.setup.append(f"const void* {var} = {self.names.pointer(kind, name)};")
        return self.pointers[name]

    def _names(self) -> Value:
        number = self.number() + 1
        return f"a{number}", f"b{number}"

    def _fresh(self, a: str, b: str) -> Value:
        x, y = self._names()
        self.lines.append(f"const float {x} = {a}, {y} = {b};")
        return x, y

    def _filled(self, form: str) -> Value:
        x, y = self._names()
        self.lines += [f"float {x}, {y};", form.format(a=x, b=y)]
        return x, y

    def evaluate(self) -> list[str]:
        """Lines that compute every value the phase needs, and add to its reductions."""
        self.run(self.phase.nodes)
        for tile in [op.ins[0] for op in self.phase.reduces] + [s.tile for s in self.phase.sinks] + [self.phase.keep]:
            if tile:
                self.value(tile)
        self.run(self.phase.reduces)
        return self.taken()

    def of_rows(self) -> list[str]:
        """Lines that compute what follows from the phase's reductions, once a row."""
        self.run(self.phase.row_nodes)
        return self.taken()

    def computed(self, op: TileOp, operands: Sequence[Value]) -> Value:
        a, b = expressions(op, operands)
        if self.schedule.places.get(op.made.name) is not Place.ROW:
            return self._fresh(a, b)
        row = self._row(op.made.name)
        self.lines.append(f"{row[0]} = {a};")
        return row

    def reduced(self, op: TileOp, operands: Sequence[Value]) -> Value:
        """Of a lane's own pairs; ``Epilogue`` puts lanes and warpgroups together."""
        row = self._row(op.made.name)
        if op.kind == "sum":
            a, b = self.masked(op.ins[0])
            self.lines.append(f"{row[0]} += ({a}) + ({b});" if self.masks else f"{row[0]} += {a} + {b};")
        else:
            self.lines += [self.where(k, f"{row[0]} = max_nan({row[0]}, {x});") for k, x in enumerate(operands[0])]
        return row

    def _row(self, tile: str) -> Value:
        """One number for both columns."""
        return (f"TS_REG({self.names.row(tile)}, j)",) * 2

    def masked(self, tile: str) -> Value:
        """Zero in the columns that pad the last block, so that products may read them."""
        a, b = self.value(tile)
        return (f"ok0 ? {a} : 0.0f", f"ok1 ? {b} : 0.0f") if self.masks else (a, b)

    def where(self, which: int, statement: str, condition: str = "") -> str:
        """``statement`` if the pair's column ``which`` is the tile's, and ``condition`` holds."""
        conditions = [f"ok{which}"] * self.masks + [condition] * bool(condition)
        return f"if ({' && '.join(conditions)}) {statement}" if conditions else statement

    def fetched(self, tile: str) -> Value:
        e, s = self.names, self.schedule
        if tile == self.held:
            return registers("acc")
        if tile in s.streams:
            dtype = s.streams[tile].dtype
            if tile in self.ahead:
                word = f"TS_REG({self.ahead[tile]}, 2 * {self.block} + j)"
                return self._fresh(f"T::low({word})", f"T::high({word})")
            at = e.in_chunk(e.chunk_names(tile), dtype, self.block)
            return self._filled(f"Io<{e.element(dtype)}>::load({at}, {{a}}, {{b}});")
        base, start = s.views.get(tile, (tile, 0))
        place = s.places[base]
        if place is Place.ROW:
            return self._row(base)
        if place is Place.REGISTERS:
            word = f"TS_REG(r{s.slots[base]}, 2 * i + j)"
            return self._fresh(f"T::low({word})", f"T::high({word})")
        if place is Place.PARKED:
            word = plus("2 * i + j", start // 4)
            return self._filled(f"Io<T>::load(parked_addr({e.parked(base)}, t, {word}), {{a}}, {{b}});")
        buffer, dtype = e.buffer(base), e.buffer_dtype(base)
        t = e.element(dtype)
        # Columns that pad the last block or chunk of a view may lie past the buffer: nobody wants their values.
        if start % 8 == 0:
            past = start + self._columns() > s.buffer_features[s.buffers[base]]
            block = plus("i", start // 8)
            if past and self.masks:
                block = f"(ok0 ? {block} : 0)"
            at = f"pair_addr<{t}>({buffer}{e.own_chunks(dtype)}, t, {block}, j)"
            return self._filled(f"Io<{t}>::load({at}, {{a}}, {{b}});")
        first, second = plus(e.column, start), plus(e.column, start + 1)
        if self.masks:
            first, second = f"ok0 ? {first} : 0", f"ok1 ? {second} : 0"
        at = f"{buffer}, (u32)row_of(t, j)"
        return self._fresh(*(f"Io<{t}>::load1(element_addr<{t}>({at}, (u32)({column})))" for column in (first, second)))

    def _columns(self) -> int:
        """Columns that the pass goes over, padding included."""
        if not self.names.split:
            return ceil_to(self.width, 8)
        return min(2 * self.width, ceil_to(self.step.features, self.schedule.pass_columns))

    def vector(self, op: TileOp, view: View) -> Value:
        """Elements of a vector; one of a block of columns begins before the step's first column."""
        tensor, start = self.names.pipeline.tensor(view.of), int(op.attr(START, 0) or 0)
        var = self.pointers[view.of]
        if tensor.features == 1:
            return self._fresh(*(f"Io<{tensor.dtype}>::param({var}, 0)",) * 2)
        whole = "true"
        if self.masks:
            whole = "ok1 && ok0" if self.names.shifted else "whole"
        of = f"{tensor.dtype}, {start + self.step.features}"
        return self._filled(f"vector_pair<{of}>({var}, {plus(self.names.column, start)}, {whole}, {{a}}, {{b}});")

    def direct(self, sink: Sink, a: str, b: str) -> list[str]:
        tensor = self.names.pipeline.tensor(sink.target)
        var = self.pointers[sink.target]
        io = f"Io<{tensor.dtype}>"
        at = f"(u64)(tile * ROWS + row_of(t, j)) * {tensor.features} + ({plus(self.names.column, sink.column)})"
        inside = "tile * ROWS + row_of(t, j) < p.rows"
        even = tensor.features % 2 == 0 and sink.column % 2 == 0 and DTYPE_BYTES[tensor.dtype] == 2
        if even and self.step.features % 2 == 0:
            return [self.where(0, f"{io}::global2((void*){var}, {at}, {a}, {b});", inside)]
        return [
            self.where(0, f"{io}::global1((void*){var}, {at}, {a});", inside),
            self.where(1, f"{io}::global1((void*){var}, {at} + 1, {b});", inside),
        ]
