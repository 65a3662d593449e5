"""What stands in front of a product, a norm: a row of it as C++ (``row.cuh``), wherever the row then goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilestream.ir.axes import View
from tilestream.ir.derive import result_axes
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, TileOp
from tilestream.kernels.parts.element import Elements, Value, expressions
from tilestream.kernels.product.block import Block


@dataclass(frozen=True)
class Makers:
    """Who makes a row.

    Attributes:
        threads: how many, together.
        few_registers: they hold a row as it was loaded, and compute anew what they need again.
        late_vectors: the weights of a norm are loaded where they are read; else with the rows, all at once.
    """

    threads: int
    few_registers: bool = False
    late_vectors: bool = False


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
    """The body of ``Kernel::before``: row ``row`` of the tensors becomes a row of the operand, left at ``to``.

    Args:
        first_vector: the pointer in ``Params::vectors`` of the first tensor without rows that it reads.
    """
    row = _Row(b, pipeline, first_vector, makers)
    row.run(b.before)
    lines = [*row.taken(), *row.held, f"R::store<{b.dtype}>({_function(row.value(b.operand)[0])}, to, t);"]
    return "\n".join(f"    {line}" for line in lines)


class _Row(Elements):
    """A row in the registers of threads (``Row`` of row.cuh). Loads are first, so that all are on their way;
    elementwise values are functions of a piece and an element."""

    def __init__(self, b: Block, pipeline: Pipeline, first_vector: int, makers: Makers) -> None:
        super().__init__()
        self.rows, self.makers, self.reductions = b.rows, makers, 0
        self.held: list[str] = []
        self.lines = [f"using R = Row<{b.sizes[0]}, {makers.threads}>;"]
        for n, (op, dtype, at) in enumerate(row_loads(b, pipeline)):
            self.lines += [f"R::Held<{dtype}> x{n};", f"x{n}.load({at}, t);"]
            self.held += [f"x{n}.again();"] if makers.few_registers else []
            self.values[op.made.name] = (f"x{n}.at(c, e)",)
        self.vectors: dict[View, Value] = {}
        self.loads: dict[View, list[str]] = {}
        for n, view in enumerate(b.vectors(b.before)):
            dtype, start = pipeline.tensor(view.of).dtype, vector_address(pipeline, view, str(first_vector + n))
            scalar = is_scalar(view)
            self.vectors[view] = (f"w{n}" if scalar else f"w{n}.at(c, e)",)
            whole = [f"R::Held<{dtype}> w{n};", f"w{n}.load({start}, t);"]
            self.loads[view] = [f"const float w{n} = Io<{dtype}>::param({start}, 0);"] if scalar else whole
        if not makers.late_vectors:
            for view in tuple(self.loads):
                self._load(view)

    def _load(self, view: View) -> None:
        self.lines += self.loads.pop(view, [])

    def vector(self, op: TileOp, view: View) -> Value:
        self._load(view)
        return self.vectors[view]

    def computed(self, op: TileOp, operands: Sequence[Value]) -> Value:
        name, (text,) = f"v{self.number()}", expressions(op, operands)
        if result_axes(op) == (self.rows,):
            self.lines.append(f"const float {name} = {text};")
            return (name,)
        self.lines.append(f"const auto {name} = {_function(text)};")
        return (f"{name}(c, e)",)

    def reduced(self, op: TileOp, operands: Sequence[Value]) -> Value:
        scratch = f"scratch + {self.reductions % 2 * (self.makers.threads // 8)}"  # they take turns with two places
        self.reductions += 1
        name, (text,) = f"v{self.number()}", operands[0]
        self.lines += [*self.held, f"const float {name} = R::{op.kind}({_function(text)}, {scratch}, t);"]
        return (name,)


def _function(value: str) -> str:
    return f"[&](int c, int e) {{ return {value}; }}"
