"""What stands in front of a product, a norm: a row of it as C++ (``row.cuh``), wherever the row then goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilestream.ir.axes import View
from tilestream.ir.derive import result_axes
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, TileOp
from tilestream.ir.tileops import OPS
from tilestream.kernels.parts.snippets import expression
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

    Loads are first, so that all are on their way. Elementwise values are functions of a piece and an element.

    Args:
        first_vector: the pointer in ``Params::vectors`` of the first tensor without rows that it reads.
    """
    lines = [f"using R = Row<{b.sizes[0]}, {makers.threads}>;"]
    values: dict[str, str] = {}
    held: list[str] = []
    for n, (op, dtype, at) in enumerate(row_loads(b, pipeline)):
        assert op.out is not None
        lines += [f"R::Held<{dtype}> x{n};", f"x{n}.load({at}, t);"]
        held += [f"x{n}.again();"] if makers.few_registers else []
        values[op.out.name] = f"x{n}.at(c, e)"
    vectors: dict[View, str] = {}
    loads: dict[View, list[str]] = {}
    for n, view in enumerate(b.vectors(b.before)):
        dtype, start = pipeline.tensor(view.of).dtype, vector_address(pipeline, view, str(first_vector + n))
        if is_scalar(view):
            vectors[view], loads[view] = f"w{n}", [f"const float w{n} = Io<{dtype}>::param({start}, 0);"]
        else:
            vectors[view], loads[view] = f"w{n}.at(c, e)", [f"R::Held<{dtype}> w{n};", f"w{n}.load({start}, t);"]
    if not makers.late_vectors:
        lines += [line for each in loads.values() for line in each]
        loads = {}
    reductions = 0
    for n, op in enumerate(op for op in b.before if op.kind != "load"):
        assert op.out is not None
        read = op.views[len(op.tiles) :]
        lines += [line for view in read for line in loads.pop(view, [])]
        operands = [values[name] for name in op.ins] + [vectors[view] for view in read]
        of_row = result_axes(op) == (b.rows,)
        if OPS[op.kind].family == "reduce":
            scratch = f"scratch + {reductions % 2 * (makers.threads // 8)}"  # they take turns with two places
            lines += [*held, f"const float v{n} = R::{op.kind}({_function(operands[0])}, {scratch}, t);"]
            reductions += 1
        elif of_row:
            lines.append(f"const float v{n} = {expression(op, operands)};")
        else:
            lines.append(f"const auto v{n} = {_function(expression(op, operands))};")
        values[op.out.name] = f"v{n}" if of_row else f"v{n}(c, e)"
    lines += [*held, f"R::store<{b.dtype}>({_function(values[b.operand])}, to, t);"]
    return "\n".join(f"    {line}" for line in lines)


def _function(value: str) -> str:
    return f"[&](int c, int e) {{ return {value}; }}"
