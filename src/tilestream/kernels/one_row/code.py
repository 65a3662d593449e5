"""The generated part of a kernel of one row: what makes rows, and what is made of a column's sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from tilestream.ir.axes import At, View
from tilestream.ir.pipeline import Pipeline, TileOp
from tilestream.kernels.one_row.model import PIECE, Group, OneRow
from tilestream.kernels.parts.element import NEUTRAL, Elements, Value, expressions

MOST_WARPS, LEAST_WARPS = 16, 8
LOADS = 12
"""Of weights that a lane has under way at once, 16 bytes each."""


@dataclass(frozen=True)
class Part:
    """What a CTA has of a group: ``columns`` of them, of which a warp takes ``at_once`` and a lane so many ``pieces``.

    ``at_once``: as many as wanted or as its loads allow.
    """

    group: Group
    columns: int
    depth: int
    wanted: int

    @property
    def at_once(self) -> int:
        return min(self.wanted, max(1, LOADS // (len(self.group.products) * ceil(self.depth / (32 * PIECE)))))

    @property
    def pieces(self) -> int:
        most = max(1, LOADS // (len(self.group.products) * self.at_once))
        return min(most, ceil(self.depth / (32 * PIECE)))

    @property
    def jobs(self) -> int:
        return ceil(self.columns / self.at_once)


def parts(row: OneRow, ctas: int) -> tuple[Part, ...]:
    """Of each group; a warp has as many columns at once as let all warps be there together."""
    made: tuple[Part, ...] = ()
    for wanted in range(1, MOST_WARPS + 1):
        made = tuple(Part(g, ceil(g.columns / ctas), row.depth, wanted) for g in row.groups)
        if sum(part.jobs for part in made) <= MOST_WARPS:
            break
    return made


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

    def element(self, call: str, view: View, index: str, *value: str) -> str:
        """C++ that loads or stores an element of a row, or of a vector; of one column, or a scalar, the only one."""
        at = view.at[-1] if view.at else At()
        place = f"p.tensors[{self.number[view.of]}], {at.offset}{f' + {index}' if at.axes else ''}"
        return f"Io<{self.pipeline.tensor(view.of).dtype}>::{call}({', '.join((place, *value))})"

    def front(self) -> list[str]:
        """Rows that products read, and others, by all threads of a CTA; one CTA stores them."""
        made, depth = _Row(self, self.row.front), self.row.depth
        lines = [*made.loads, *made.lines]
        for n, name in enumerate(self.row.operands):
            lines.append(each(f"lanes::put16(smem + {2 * depth * n} + 2 * i, T::pack({made.value(name)[0]}, 0.0f))"))
        for n, op in enumerate(self.row.kept):
            at = f"smem + {self.kept_at + 4 * depth * n} + 4 * i"
            lines.append(each(f"lanes::put32({at}, bits_of({made.value(op.made.name)[0]}))"))
        for op in self.row.stores:
            (value,) = made.value(op.ins[0])
            only = "" if is_array(value) else "if (i == 0) "
            lines.append(f"if (lanes::block() == 0) {each(only + self.element('put', op.views[-1], 'i', value))}")
        return lines

    def weights(self, group: Group) -> list[tuple[int, int, int]]:
        """Of each product: the weight's number, its first row, and the number of what it is multiplied by."""
        read = [(op.views[-1], self.row.operands.index(op.ins[0])) for op in group.products]
        return [(self.number[view.of], view.at[0].offset if view.at else 0, n) for view, n in read]

    def beside(self, group: Group) -> tuple[list[str], list[str]]:
        """Statements that load what a column reads besides its sums, and those that make and store its results."""
        values: dict[str, Value] = {op.made.name: (f"s[{n}]",) for n, op in enumerate(group.products)}
        for n, op in enumerate(self.row.kept):
            at = f"{self.kept_at + 4 * self.row.depth * n}{' + 4 * c' if op.made.features > 1 else ''}"
            values[op.made.name] = (f"float_of(lanes::get32(smem + {at}))",)
        made = _Column(self, group.behind, values)
        stores = [f"{self.element('put', op.views[-1], 'c', *made.value(op.ins[0]))};" for op in group.stores]
        return made.loads, [*made.lines, *stores]


def each(statement: str) -> str:
    """C++ that does it for the elements of a row that a thread has."""
    return f"each([&](int e, int i) {{ {statement}; }});"


def is_array(value: str) -> bool:
    return "[e]" in value


class _Row(Elements):
    """A thread has every ``THREADS``th element of a row, ``PER`` of them: a value is an array, or one of the row.

    What is read comes first, so that all is on its way.
    """

    def __init__(self, code: Code, ops: Sequence[TileOp], values: Mapping[str, Value] | None = None) -> None:
        super().__init__(values)
        self.code, self.sums = code, 0
        views = dict.fromkeys(view for op in ops for view in op.views[len(op.tiles) :])
        self.vectors = {view: self.loaded(view) for view in views}
        self.loads = self.taken()
        self.values |= {op.made.name: self.vectors[op.views[0]] for op in ops if op.kind == "load"}
        self.run(ops)

    def loaded(self, view: View) -> Value:
        return self._named(self.code.element("param", view, "i"), bool(view.at and view.at[-1].axes))

    def _named(self, text: str, array: bool) -> Value:
        name = f"v{self.number()}"
        if array:
            self.lines += [f"float {name}[PER];", each(f"{name}[e] = {text}")]
        else:
            self.lines.append(f"const float {name} = {text};")
        return (f"{name}[e]" if array else name,)

    def computed(self, op: TileOp, operands: Sequence[Value]) -> Value:
        (text,) = expressions(op, operands)
        return self._named(text, is_array(text))

    def reduced(self, op: TileOp, operands: Sequence[Value]) -> Value:
        ((value,),) = operands
        if not is_array(value):
            return (value,)  # of one column
        self.sums += 1
        total, combine = f"s{self.sums}", "max_nan" if op.kind == "max" else "add"
        scratch = f"smem + {self.code.sums_at + self.sums % 2 * 4 * self.code.warps}"
        self.lines += [f"float {total} = {NEUTRAL[op.kind]};", each(f"{total} = {combine}({total}, {value})")]
        return self._named(f"of_all<WARPS>({total}, {scratch}, {combine})", False)


class _Column(_Row):
    """One column ``c`` of a lane: sums ``s`` by product, what was loaded ``x``, rows that lie in shared memory."""

    def loaded(self, view: View) -> Value:
        name = f"x[{len(self.lines)}]"
        self.lines.append(f"{name} = {self.code.element('param', view, 'c')};")
        return (name,)
