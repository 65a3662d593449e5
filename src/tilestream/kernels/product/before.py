"""What stands in front of a product, a norm: rows of it as C++ (``row.cuh``), wherever they then go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tilestream.ir.axes import View
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, TileOp
from tilestream.kernels.parts.element import Elements, Value, expressions
from tilestream.kernels.product.block import Block


@dataclass(frozen=True)
class Makers:
    """Who makes rows.

    Attributes:
        threads: how many, together.
        few_registers: they hold rows as they were loaded, and compute anew what they need again.
        late_vectors: the weights of a norm are loaded where they are read; else with the rows, all at once.
    """

    threads: int
    few_registers: bool = False
    late_vectors: bool = False

    def most_rows(self, b: Block, pipeline: Pipeline, words: int) -> int:
        """How many rows, four at most, a thread holds in so many registers beside the weights of a norm, which it has
        as they lie and as float32."""
        pieces = -(-b.sizes[0] // (8 * self.threads))

        def held(dtypes: Iterable[str]) -> int:
            return sum(pieces * 2 * DTYPE_BYTES[dtype] for dtype in dtypes)

        rows = held(dtype for _, dtype, _ in row_loads(b, pipeline))
        vectors = held(pipeline.tensor(v.of).dtype for v in b.vectors(b.before) if not is_scalar(v))
        return next((n for n in (4, 2) if n * rows + 2 * vectors <= words), 1)


def row_loads(b: Block, pipeline: Pipeline) -> Iterator[tuple[TileOp, str, str]]:
    """Of each tensor whose rows are read in front: the op, the dtype, and C++ of where row ``row`` is."""
    for op in b.before:
        if op.kind == "load":
            yield op, pipeline.tensor(op.params[0]).dtype, row_address(b, pipeline, op)


def row_address(b: Block, pipeline: Pipeline, op: TileOp) -> str:
    """C++ of where row ``row`` is of the tensor that ``op`` loads."""
    slot, size = b.loads.index(op), DTYPE_BYTES[pipeline.tensor(op.params[0]).dtype]
    return f"(const char*)p.rows_of[{slot}] + {size} * (u64)row * p.strides_of[{slot}]"


def vector_address(pipeline: Pipeline, view: View, index: str) -> str:
    """C++ of where a vector or scalar begins, pointer ``index`` of ``Params::vectors``."""
    offset = sum(at.offset for at in view.at or ())
    return f"(const char*)p.vectors[{index}] + {DTYPE_BYTES[pipeline.tensor(view.of).dtype] * offset}"


def is_scalar(view: View) -> bool:
    return not any(at.axes for at in view.at or ())


def prefetch_code(b: Block, pipeline: Pipeline) -> str:
    """The body of ``Kernel::prefetch``: row ``row`` of every tensor, to the L2."""
    rows = row_loads(b, pipeline)
    return "\n".join(f"    prefetch_row<{b.sizes[0] * DTYPE_BYTES[dtype]}>({at}, t);" for _, dtype, at in rows)


def row_code(b: Block, pipeline: Pipeline, first_vector: int, makers: Makers) -> str:
    """The body of ``Kernel::before``: ``N`` rows of the tensors, from ``row`` on, become rows of the operand at ``to``.

    Args:
        first_vector: the pointer in ``Params::vectors`` of the first tensor without rows that it reads.
    """
    rows = _Rows(b, pipeline, first_vector, makers)
    rows.run(b.before)
    store = f"R::store<{b.dtype}, N>({_function(rows.value(b.operand)[0])}, to, p.rows - row, t);"
    return "\n".join(f"    {line}" for line in [*rows.taken(), *rows.held, store])


class _Rows(Elements):
    """Rows in the registers of threads (``Row`` of row.cuh). Loads are first, so that all are on their way; elementwise
    values are functions of a row, a piece and an element."""

    def __init__(self, b: Block, pipeline: Pipeline, first_vector: int, makers: Makers) -> None:
        super().__init__()
        self.rows, self.makers, self.reductions = b.rows, makers, 0
        self.held: list[str] = []
        self.lines = [f"using R = Row<{b.sizes[0]}, {'WARP' if makers.threads == 32 else makers.threads}>;"]
        for n, (op, dtype, at) in enumerate(row_loads(b, pipeline)):
            stride = f"{DTYPE_BYTES[dtype]} * p.strides_of[{b.loads.index(op)}]"
            self.lines += [f"R::Held<{dtype}, N> x{n};", f"x{n}.load({at}, {stride}, p.rows - row, t);"]
            self.held += [f"x{n}.again();"] if makers.few_registers else []
            self.values[op.made.name] = (f"x{n}.at(r, c, e)",)
        self.loads: dict[View, list[str]] = {}
        for n, view in enumerate(b.vectors(b.before)):
            dtype, start = pipeline.tensor(view.of).dtype, vector_address(pipeline, view, str(first_vector + n))
            scalar = is_scalar(view)
            self.vectors[view] = (f"w{n}" if scalar else f"w{n}.at(0, c, e)",)
            whole = [f"R::Held<{dtype}> w{n};", f"w{n}.load({start}, 0, 1, t);"]
            self.loads[view] = [f"const float w{n} = Io<{dtype}>::param({start}, 0);"] if scalar else whole
        if not makers.late_vectors:
            for view in tuple(self.loads):
                self._load(view)

    def _load(self, view: View) -> None:
        self.lines += self.loads.pop(view, [])

    def vector(self, op: TileOp, view: View) -> Value:
        self._load(view)
        return super().vector(op, view)

    def computed(self, op: TileOp, operands: Sequence[Value]) -> Value:
        name, (text,) = f"v{self.number()}", expressions(op, operands)
        if op.result_axes == (self.rows,):
            self.lines.append(f"const auto {name} = R::each<N>([&](int r) {{ return {text}; }});")
            return (f"{name}[r]",)
        self.lines.append(f"const auto {name} = {_function(text)};")
        return (f"{name}(r, c, e)",)

    def reduced(self, op: TileOp, operands: Sequence[Value]) -> Value:
        scratch = f"scratch + {self.reductions % 2 * (self.makers.threads // 8)}"  # they take turns with two places
        self.reductions += 1
        name, (text,) = f"v{self.number()}", operands[0]
        self.lines += [*self.held, f"const auto {name} = R::{op.kind}<N>({_function(text)}, {scratch}, t);"]
        return (f"{name}[r]",)


def _function(value: str) -> str:
    return f"[&](int r, int c, int e) {{ return {value}; }}"
