"""The generated part of a kernel of one row: what makes rows, and what is made of a column's sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

from tilestream.ir.axes import View
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, TileOp
from tilestream.kernels.one_row.model import PIECE, Group, OneRow
from tilestream.kernels.parts.element import NEUTRAL, Elements, Value, expressions

MOST_WARPS, LEAST_WARPS = 16, 8
LOADS = 12
"""Of weights that a lane has under way at once, 16 bytes each."""


@dataclass(frozen=True)
class Part:
    """What a CTA has of a group: ``columns`` of them, of which a warp takes ``at_once``; jobs from ``first`` on."""

    group: Group
    columns: int
    at_once: int
    pieces: int
    first: int

    @property
    def jobs(self) -> int:
        return ceil(self.columns / self.at_once)


def parts(row: OneRow, ctas: int) -> tuple[Part, ...]:
    """Of each group. A warp has as many columns at once as let all warps be there together, or as its loads allow."""
    pieces = ceil(row.depth / (32 * PIECE))
    columns = [ceil(g.columns / ctas) for g in row.groups]
    most = [max(1, LOADS // (len(g.products) * pieces)) for g in row.groups]
    at_once = 1
    while sum(ceil(c / min(at_once, m)) for c, m in zip(columns, most, strict=True)) > MOST_WARPS > at_once:
        at_once += 1
    taken = [min(at_once, m) for m in most]
    firsts = accumulate((ceil(c / n) for c, n in zip(columns, taken, strict=True)), initial=0)
    batches = [min(pieces, max(1, LOADS // (len(g.products) * n))) for g, n in zip(row.groups, taken, strict=True)]
    return tuple(map(Part, row.groups, columns, taken, batches, firsts))


class Code:
    """C++ of a launch. In shared memory lie what products read, rows that columns read behind, and places for sums."""

    def __init__(self, pipeline: Pipeline, row: OneRow, ctas: int) -> None:
        self.pipeline, self.row, self.parts = pipeline, row, parts(row, ctas)
        self.jobs = sum(part.jobs for part in self.parts)
        self.warps = min(MOST_WARPS, max(LEAST_WARPS, self.jobs))
        self.number = {t.name: n for n, t in enumerate(pipeline.tensors)}
        self.kept_at = 2 * row.depth * len(row.operands)
        self.sums_at = self.kept_at + 4 * row.depth * len(row.kept)
        self.shared_bytes = self.sums_at + 2 * 4 * self.warps

    def address(self, view: View) -> str:
        """C++ of where the row, or the vector, of a tensor begins."""
        offset = view.at[-1].offset if view.at else 0
        return f"p.tensors[{self.number[view.of]}], {offset}"

    def load(self, view: View, index: str) -> str:
        """C++ of an element of a row, or of a vector; of a scalar, or a row of one column, the only one."""
        start, axes = self.address(view), view.at[-1].axes if view.at else ()
        return f"Io<{self.pipeline.tensor(view.of).dtype}>::param({start}{f' + {index}' if axes else ''})"

    def store(self, op: TileOp, index: str, value: str) -> str:
        return f"Io<{self.pipeline.tensor(op.params[0]).dtype}>::put({self.address(op.views[-1])} + {index}, {value});"

    def front(self) -> list[str]:
        """Rows that products read, and others, by all threads of a CTA; one CTA stores them."""
        made, row = _Front(self), self.row
        made.run(row.front)
        lines = made.lines
        for n, name in enumerate(row.operands):
            at = f"smem + {2 * row.depth * n} + 2 * i"
            lines.append(f"each([&](int e, int i) {{ lanes::put16({at}, T::pack({made.value(name)[0]}, 0.0f)); }});")
        for n, name in enumerate(row.kept):
            at = f"smem + {self.kept_at + 4 * row.depth * n} + 4 * i"
            lines.append(f"each([&](int e, int i) {{ lanes::put32({at}, bits_of({made.value(name)[0]})); }});")
        for op in row.stores:
            put = self.store(op, "i", made.value(op.ins[0])[0])
            only = "" if made.is_row(op.ins[0]) else "if (i == 0) "
            lines.append(f"if (lanes::block() == 0) each([&](int e, int i) {{ {only}{put} }});")
        return lines

    def weights(self, part: Part) -> list[tuple[int, int, int]]:
        """Of each product: the weight's number, its first row, and the number of what it is multiplied by."""
        found = []
        for op in part.group.products:
            view = op.views[-1]
            first = view.at[0].offset if view.at else 0
            found.append((self.number[view.of], first, self.row.operands.index(op.ins[0])))
        return found

    def beside(self, part: Part) -> tuple[list[str], list[str]]:
        """Statements that load what a column reads besides its sums, and those that make and store its results."""
        made = _Behind(self, part.group)
        made.run(part.group.behind)
        stores = [self.store(op, "c", made.value(op.ins[0])[0]) for op in part.group.stores]
        loads = [f"x[{n}] = {text};" for n, text in enumerate(made.loads)]
        return loads, [*made.lines, *stores]


class _Front(Elements):
    """A thread has every ``THREADS``th element of a row, ``PER`` of them: a value is an array, or one of the row."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code, self.sums = code, 0
        self.vectors: dict[View, Value] = {}
        for op in code.row.front:  # loads come first, so that all are on their way
            views = op.views[len(op.tiles) :]
            self.vectors |= {view: self._read(view) for view in views if view not in self.vectors}
            if op.kind == "load":
                self.values[op.made.name] = self.vectors[views[0]]

    def is_row(self, tile: str) -> bool:
        return self.values[tile][0].endswith("[e]")

    def _read(self, view: View) -> Value:
        return self._named(self.code.load(view, "i"), whole=not (view.at and view.at[-1].axes))

    def _named(self, text: str, whole: bool) -> Value:
        name = f"v{self.number()}"
        if whole:
            self.lines.append(f"const float {name} = {text};")
            return (name,)
        self.lines += [f"float {name}[PER];", f"each([&](int e, int i) {{ {name}[e] = {text}; }});"]
        return (f"{name}[e]",)

    def vector(self, op: TileOp, view: View) -> Value:
        return self.vectors[view]

    def computed(self, op: TileOp, operands: Sequence[Value]) -> Value:
        (text,) = expressions(op, operands)
        return self._named(text, whole=not any(value[0].endswith("[e]") for value in operands))

    def reduced(self, op: TileOp, operands: Sequence[Value]) -> Value:
        self.sums += 1
        total, name = f"s{self.sums}", f"v{self.number()}"
        combine = "max_nan" if op.kind == "max" else "add"
        scratch = f"smem + {self.code.sums_at + self.sums % 2 * 4 * self.code.warps}"
        self.lines += [
            f"float {total} = {NEUTRAL[op.kind]};",
            f"each([&](int e, int i) {{ {total} = {combine}({total}, {operands[0][0]}); }});",
            f"const float {name} = of_all<WARPS>({total}, {scratch}, {combine});",
        ]
        return (name,)


class _Behind(Elements):
    """One column ``c`` of a lane: sums ``s`` by product, what was loaded ``x``, rows that lie in shared memory."""

    def __init__(self, code: Code, group: Group) -> None:
        products = {op.made.name: (f"s[{n}]",) for n, op in enumerate(group.products)}
        super().__init__(products)
        self.code, self.loads = code, list[str]()
        fronts = {op.made.name: op for op in code.row.front}
        for op in (*fronts.values(), *group.behind):
            if op.kind == "load":
                self.values[op.made.name] = ()
        self.views = {op.made.name: op.views[-1] for op in (*fronts.values(), *group.behind) if op.kind == "load"}

    def value(self, tile: str) -> Value:
        if self.values.get(tile) == ():
            self.values[tile] = self._read(self.views[tile])
        return super().value(tile)

    def fetched(self, tile: str) -> Value:
        row, n = self.code.row, self.code.row.kept.index(tile)
        single = next(op for op in row.front if op.made.name == tile).made.features == 1
        at = self.code.kept_at + 4 * row.depth * n
        return (f"float_of(lanes::get32(smem + {at}{'' if single else ' + 4 * c'}))",)

    def _read(self, view: View) -> Value:
        self.loads.append(self.code.load(view, "c"))
        return (f"x[{len(self.loads) - 1}]",)

    def vector(self, op: TileOp, view: View) -> Value:
        return self._read(view)

    def computed(self, op: TileOp, operands: Sequence[Value]) -> Value:
        name, (text,) = f"v{self.number()}", expressions(op, operands)
        self.lines.append(f"const float {name} = {text};")
        return (name,)

    def reduced(self, op: TileOp, operands: Sequence[Value]) -> Value:
        raise NotImplementedError(f"{op.kind} wants the whole row")


def row_bytes(pipeline: Pipeline, row: OneRow) -> int:
    """Of the weights of a launch."""
    return sum(DTYPE_BYTES[row.dtype] * row.depth * g.columns * len(g.products) for g in row.groups)
