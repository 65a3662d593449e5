"""C++ names of the values of one epilogue pass, for one pair of columns."""

from __future__ import annotations

from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.kernels.parts.snippets import expression
from tilestream.kernels.parts.text import plus
from tilestream.kernels.stream.blocks import START
from tilestream.kernels.stream.model import Phase, Place, Sink, Step, ceil_to
from tilestream.kernels.stream.names import Names


class Values:
    """Evaluates a phase: operands are fetched, expressions named, each once.

    Attributes:
        masks: some pairs have columns that are not the tile's, but pad its last block: ``ok0`` and ``ok1`` say which.
        turns: of the pass; blocks are counted by ``k`` in a turn, and by ``i`` where there is but one.
        ahead: of streams, those whose pairs a lane has all loaded before it computes the first: variables of words.
    """

    def __init__(self, e: Names, step: Step, phase: Phase, width: int) -> None:
        self.e, self.step, self.phase, self.width = e, step, phase, width
        self.masks = step.features != 2 * width if e.split else step.features % (8 if e.loop is None else width) != 0
        self.turns = ceil_to(width, e.s.pass_columns) // e.s.pass_columns
        self.values: dict[str, tuple[str, str]] = {}
        self.lines: list[str] = []
        self.setup: list[str] = []
        self.count = 0
        self.vectors: dict[str, str] = {}
        self.ahead: dict[str, str] = {}
        held = step.held
        for earlier in step.phases:
            if earlier is phase:
                break
            held = earlier.keep or held
        self.held = held
        for op in phase.nodes:
            for name in op.params:
                self._vector(name)
        for sink in phase.sinks:
            if sink.kind in ("direct", "maxima"):
                self._vector(sink.target, "output")

    @property
    def block(self) -> str:
        """The variable that counts the blocks of a turn."""
        return "k" if self.turns > 1 else "i"

    def _vector(self, name: str, kind: str = "vector") -> str:
        if name not in self.vectors:
            var = f"v{len(self.vectors)}"
            self.vectors[name] = var
            self.setup.append(f"const void* {var} = {self.e.pointer(kind, name)};")
        return self.vectors[name]

    def fresh(self, a: str, b: str) -> tuple[str, str]:
        self.count += 1
        x, y = f"a{self.count}", f"b{self.count}"
        self.lines.append(f"const float {x} = {a}, {y} = {b};")
        return x, y

    def fill(self, form: str) -> tuple[str, str]:
        self.count += 1
        x, y = f"a{self.count}", f"b{self.count}"
        self.lines.append(f"float {x}, {y};")
        self.lines.append(form.format(a=x, b=y))
        return x, y

    def evaluate(self) -> list[str]:
        """Lines that compute every value the phase needs."""
        for op in self.phase.nodes:
            assert op.out is not None
            operands = [self.pair(i) for i in op.ins]
            for name in op.params:
                operands.append(self._param(name, int(op.attr(START, 0) or 0)))
            a = expression(op, [x for x, _ in operands])
            b = expression(op, [y for _, y in operands])
            self.values[op.out.name] = self.fresh(a, b)
        for tile in [op.ins[0] for op in self.phase.reduces] + [s.tile for s in self.phase.sinks] + [self.phase.keep]:
            if tile:
                self.pair(tile)
        lines, self.lines = self.lines, []
        return lines

    def pair(self, tile: str) -> tuple[str, str]:
        if tile not in self.values:
            self.values[tile] = self._leaf(tile)
        return self.values[tile]

    def masked(self, tile: str) -> tuple[str, str]:
        """Zero in the columns that pad the last block, so that products may read them."""
        a, b = self.pair(tile)
        return (f"ok0 ? {a} : 0.0f", f"ok1 ? {b} : 0.0f") if self.masks else (a, b)

    def where(self, which: int, statement: str, condition: str = "") -> str:
        """``statement`` if the pair's column ``which`` is the tile's, and ``condition`` holds."""
        conditions = [f"ok{which}"] * self.masks + [condition] * bool(condition)
        return f"if ({' && '.join(conditions)}) {statement}" if conditions else statement

    def _leaf(self, tile: str) -> tuple[str, str]:
        e, s = self.e, self.e.s
        if tile == self.held:
            return "TS_REG(acc, 4 * i + 2 * j)", "TS_REG(acc, 4 * i + 2 * j + 1)"
        if tile in s.streams:
            dtype = s.streams[tile].dtype
            if tile in self.ahead:
                word = f"TS_REG({self.ahead[tile]}, 2 * {self.block} + j)"
                return self.fresh(f"T::low({word})", f"T::high({word})")
            at = e.in_chunk(e.chunk_names(tile), dtype, self.block)
            return self.fill(f"Io<{e.element(dtype)}>::load({at}, {{a}}, {{b}});")
        base, start = s.views.get(tile, (tile, 0))
        place = s.places[base]
        if place is Place.ROW:
            both = f"TS_REG({e.row(base)}, j)"
            return both, both
        if place is Place.REGISTERS:
            word = f"TS_REG(r{s.slots[base]}, 2 * i + j)"
            return self.fresh(f"T::low({word})", f"T::high({word})")
        if place is Place.PARKED:
            word = plus("2 * i + j", start // 4)
            return self.fill(f"Io<T>::load(parked_addr({e.parked(base)}, t, {word}), {{a}}, {{b}});")
        buffer, dtype = e.buffer(base), e.buffer_dtype(base)
        t = e.element(dtype)
        # Columns that pad the last block or chunk of a view may lie past the buffer: nobody wants their values.
        if start % 8 == 0:
            past = start + self._columns() > s.buffer_features[s.buffers[base]]
            block = plus("i", start // 8)
            if past and self.masks:
                block = f"(ok0 ? {block} : 0)"
            at = f"pair_addr<{t}>({buffer}{e.own_chunks(dtype)}, t, {block}, j)"
            return self.fill(f"Io<{t}>::load({at}, {{a}}, {{b}});")
        first, second = plus(e.column, start), plus(e.column, start + 1)
        if self.masks:
            first, second = f"ok0 ? {first} : 0", f"ok1 ? {second} : 0"
        at = f"{buffer}, (u32)row_of(t, j)"
        return self.fresh(*(f"Io<{t}>::load1(element_addr<{t}>({at}, (u32)({column})))" for column in (first, second)))

    def _columns(self) -> int:
        """Columns that the pass goes over, padding included."""
        if not self.e.split:
            return ceil_to(self.width, 8)
        return min(2 * self.width, ceil_to(self.step.features, self.e.s.pass_columns))

    def _param(self, name: str, start: int = 0) -> tuple[str, str]:
        """Elements of a vector, which begins ``start`` elements before the step's first column."""
        tensor = self.e.pipeline.tensor(name)
        var = self.vectors[name]
        if tensor.features == 1:
            return self.fresh(*(f"Io<{tensor.dtype}>::param({var}, 0)",) * 2)
        whole = "true"
        if self.masks:
            whole = "ok1 && ok0" if self.e.shifted else "whole"
        of = f"{tensor.dtype}, {start + self.step.features}"
        return self.fill(f"vector_pair<{of}>({var}, {plus(self.e.column, start)}, {whole}, {{a}}, {{b}});")

    def direct(self, sink: Sink, a: str, b: str) -> list[str]:
        tensor = self.e.pipeline.tensor(sink.target)
        var = self.vectors[sink.target]
        io = f"Io<{tensor.dtype}>"
        at = f"(u64)(tile * ROWS + row_of(t, j)) * {tensor.features} + ({plus(self.e.column, sink.column)})"
        inside = "tile * ROWS + row_of(t, j) < p.rows"
        even = tensor.features % 2 == 0 and sink.column % 2 == 0 and DTYPE_BYTES[tensor.dtype] == 2
        if even and self.step.features % 2 == 0:
            return [self.where(0, f"{io}::global2((void*){var}, {at}, {a}, {b});", inside)]
        return [
            self.where(0, f"{io}::global1((void*){var}, {at}, {a});", inside),
            self.where(1, f"{io}::global1((void*){var}, {at} + 1, {b});", inside),
        ]
