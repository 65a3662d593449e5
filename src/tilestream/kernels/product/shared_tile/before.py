"""What stands in front of a shared tile's first layer: a row of it as C++, in registers of all consumer threads."""

from __future__ import annotations

from tilestream.ir.axes import View
from tilestream.ir.derive import result_axes
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline
from tilestream.ir.tileops import OPS
from tilestream.kernels.parts.snippets import expression
from tilestream.kernels.product.shared_tile import SharedTile

SCRATCHES = 2
"""Reductions take turns with as many places in shared memory."""


def row_vectors(s: SharedTile) -> tuple[View, ...]:
    """Tensors without rows that it reads: the weights of norms."""
    return s.block.vectors(s.block.before)


def row_code(s: SharedTile, pipeline: Pipeline, vectors_before: int) -> str:
    """The body of ``Kernel::before``: loads first, so that all are on their way, then ``block.before`` in order.

    Args:
        vectors_before: pointers in ``Params::vectors`` in front of those of ``row_vectors``.
    """
    b = s.block
    k = b.sizes[0]
    lines = [f"using R = Row<{k}, {32 if s.own_rows else 128 * s.warpgroups}>;"]
    if s.own_rows:
        lines.append("const u32 scratch = 0;  // a warp's own sums need none")
    values: dict[str, str] = {}
    vectors: dict[View, str] = {}
    for n, op in enumerate(op for op in b.before if op.kind == "load"):
        assert op.out is not None
        dtype = pipeline.tensor(op.params[0]).dtype
        slot = b.loads.index(op)
        at = f"(const char*)p.rows_of[{slot}] + {DTYPE_BYTES[dtype]} * (u64)row * p.strides_of[{slot}]"
        lines += [f"float x{n}[R::COUNT];", f"R::load<{dtype}>(x{n}, {at}, t);"]
        values[op.out.name] = f"x{n}[e]"
    loads: dict[View, list[str]] = {}
    for n, view in enumerate(row_vectors(s)):
        dtype = pipeline.tensor(view.of).dtype
        offset = sum(at.offset for at in view.at or ())
        start = f"(const char*)p.vectors[{vectors_before + n}] + {DTYPE_BYTES[dtype] * offset}"
        if any(at.axes for at in view.at or ()):
            loads[view] = [f"float w{n}[R::COUNT];", f"R::load<{dtype}>(w{n}, {start}, t);"]
            vectors[view] = f"w{n}[e]"
        else:
            loads[view] = [f"const float w{n} = Io<{dtype}>::param({start}, 0);"]
            vectors[view] = f"w{n}"
    if not s.own_rows:  # a warp's row takes too many registers for vectors that are not read yet
        lines += [line for each in loads.values() for line in each]
        loads = {}
    reductions = 0
    for n, op in enumerate(op for op in b.before if op.kind != "load"):
        assert op.out is not None
        for view in op.views[len(op.tiles) :]:
            lines += loads.pop(view, [])
        operands = [values[name] for name in op.ins] + [vectors[v] for v in op.views[len(op.tiles) :]]
        if OPS[op.kind].family == "reduce":
            scratch = f"scratch + {reductions % SCRATCHES * 4 * 4 * s.warpgroups}"
            lines.append(f"const float v{n} = R::{op.kind}({operands[0].removesuffix('[e]')}, {scratch}, t);")
            reductions += 1
        elif result_axes(op) == (b.rows,):
            lines.append(f"const float v{n} = {expression(op, operands)};")
        else:
            lines += [f"float v{n}[R::COUNT];", "#pragma unroll"]
            lines.append(f"for (int e = 0; e < R::COUNT; ++e) v{n}[e] = {expression(op, operands)};")
        values[op.out.name] = f"v{n}" if result_axes(op) == (b.rows,) else f"v{n}[e]"
    made = values[b.operand].removesuffix("[e]")
    if s.own_rows:
        panels = f"R::store_panels<{b.dtype}, {s.depth}, {s.tile_rows}>"
        lines.append(f"{panels}({made}, left, local, first, {s.group_columns}, t);")
    else:
        lines.append(f"R::store<{b.dtype}>({made}, (u16*)p.operand_data + (u64)row * {k}, t);")
    return "\n".join(line if line.startswith("#") else f"    {line}" for line in lines)
