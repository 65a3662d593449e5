"""What is done to the sums of a layer, as C++ of two neighbouring columns, and what is read beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilestream.ir.axes import View
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, TileOp
from tilestream.kernels.parts.element import Pairs, Value, both
from tilestream.kernels.product.before import row_address, vector_address
from tilestream.kernels.product.block import Block


@dataclass(frozen=True)
class Epilogue:
    """From sums to what is stored, of one layer and result.

    Attributes:
        values: C++ of the tiles that products made, and of those that are loaded.
        vectors: tensors without rows that are read, pointers ``first`` and later of ``Params::vectors``.
        columns: of the layer.
    """

    ops: tuple[TileOp, ...]
    values: Mapping[str, Value]
    result: str
    vectors: tuple[View, ...]
    first: int
    columns: int

    def body(self, reads: Sequence[str]) -> str:
        """Statements of a function of two neighbours; ``reads`` put vector k at ``v[k][0]`` and ``v[k][1]``."""
        array = [f"float v[{len(self.vectors)}][2];", *reads] if self.vectors else []
        made = Pairs(self.values, {view: both(f"v[{k}][e]") for k, view in enumerate(self.vectors)})
        made.run(self.ops)
        last = [f"made[{e}] = {text};" for e, text in enumerate(made.value(self.result))]
        return "\n".join(f"    {line}" for line in [*array, *made.lines, *last])


def epilogues(b: Block) -> tuple[Epilogue, ...]:
    """That of the middle, where there are two layers, and those of the results."""
    sums = {f.tile: f"x[e][{i}]" for i, f in enumerate(b.firsts)}
    parts = [(b.middle, sums, b.hidden, b.sizes[1])] if b.firsts else []
    for last in b.lasts:
        totals = {x.tile: f"y[e][{n}]" for n, x in enumerate(last.products)}
        parts.append((last.after, totals, last.result, last.columns))
    made: list[Epilogue] = []
    first = 0
    for ops, values, result, columns in parts:
        loads = [op.out.name for op in ops if op.kind == "load" and op.out is not None]
        forms = values | {tile: f"r[e][{k}]" for k, tile in enumerate(loads)}
        vectors = b.vectors(ops)
        made.append(Epilogue(ops, {t: both(form) for t, form in forms.items()}, result, vectors, first, columns))
        first += len(vectors)
    return tuple(made)


def vectors_of(b: Block) -> tuple[View, ...]:
    """Tensors without rows, in the order of their pointers: those of the epilogues, then of what is in front."""
    return (*(view for e in epilogues(b) for view in e.vectors), *b.vectors(b.before))


@dataclass
class Words:
    """Pairs of columns ``c`` and ``c + 1`` on their way to an epilogue, as C++ statements.

    Attributes:
        loads: as they lie in memory, to ``count`` words ``w`` of 32 bits.
        values: what those words say.
    """

    loads: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    count: int = 0

    def pair(self, dtype: str, start: str, column: str, made: tuple[str, str], aligned: bool, most: str = "") -> None:
        """Two elements behind ``start``, the first at ``column``; on 4 bytes if ``aligned``, the last one ``most``."""
        w = f"w + {self.count}"
        self.loads.append(f"Pair<{dtype}>::load<{str(aligned).lower()}>({start}, {column}, {w}{most});")
        self.values.append(f"Pair<{dtype}>::values({w}, {made[0]}, {made[1]});")
        self.count += DTYPE_BYTES[dtype] // 2

    def scalar(self, dtype: str, start: str, made: tuple[str, str]) -> None:
        self.loads.append(f"w[{self.count}] = bits_of(Io<{dtype}>::param({start}, 0));")
        self.values.append(f"{made[0]} = {made[1]} = float_of(w[{self.count}]);")
        self.count += 1


def residuals(b: Block, pipeline: Pipeline, column: str, aligned: bool) -> Words:
    """Of row ``row`` of what the last layer's first epilogue loads: ``r[0][k]`` and ``r[1][k]`` of tensor k.

    Args:
        column: C++ of the column to read, ``c`` if it exists.
    """
    words, last = Words(), b.lasts[0]
    most = f", {last.columns - 1}" if last.columns % 2 else ""
    for k, op in enumerate(op for op in last.after if op.kind == "load"):
        dtype = pipeline.tensor(op.params[0]).dtype
        words.pair(dtype, row_address(b, pipeline, op), column, (f"r[0][{k}]", f"r[1][{k}]"), aligned, most)
    return words


def vector_words(e: Epilogue, pipeline: Pipeline, index: str, column: str) -> Words:
    """The vectors of ``e``: ``v[k][0]`` and ``v[k][1]`` of vector k.

    Args:
        index: C++ to add to the number of a pointer in ``Params::vectors``.
    """
    words = Words()
    for k, view in enumerate(e.vectors):
        dtype = pipeline.tensor(view.of).dtype
        start = vector_address(pipeline, view, f"{e.first + k}{index}")
        if any(at.axes for at in view.at or ()):
            even = sum(at.offset for at in view.at or ()) % 2 == 0
            words.pair(dtype, start, column, (f"v[{k}][0]", f"v[{k}][1]"), even)
        else:
            words.scalar(dtype, start, (f"v[{k}][0]", f"v[{k}][1]"))
    return words
