"""What stands in front of a tiled block's first layer: a row of it as C++, by a warp that has few registers."""

from __future__ import annotations

from tilestream.ir.axes import View
from tilestream.ir.derive import result_axes
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, TileOp
from tilestream.ir.tileops import OPS
from tilestream.kernels.parts.snippets import expression
from tilestream.kernels.product.shared_tile import Block

STARTS = {"sum": "0.0f", "max": "-__int_as_float(0x7f800000)"}
TAKEN = {"sum": "{0} += {1};", "max": "{0} = max_nan({0}, {1});"}


def row_vectors(b: Block) -> tuple[View, ...]:
    """Tensors without rows that it reads: the weights of norms."""
    return b.vectors(b.before)


def prefetch_code(b: Block, pipeline: Pipeline) -> str:
    """The body of ``Kernel::prefetch``: row ``row`` of every tensor, to the L2."""
    lines = [
        f"    prefetch_row<{b.sizes[0] * DTYPE_BYTES[dtype]}>({at}, t);"
        for _, dtype, at in (_place(b, pipeline, op) for op in b.before if op.kind == "load")
    ]
    return "\n".join(lines)


def row_code(b: Block, pipeline: Pipeline, vectors_before: int) -> str:
    """The body of ``Kernel::before``, from row ``row`` of the tensors to row ``to`` of the operand.

    Rows and vectors stay as they were loaded, all of them on their way at once. Elementwise values are functions of a
    piece and an element, so that reductions and the store compute them anew.

    Args:
        vectors_before: pointers in ``Params::vectors`` in front of those of ``row_vectors``.
    """
    k = b.sizes[0]
    lines = [f"using R = WarpRow<{b.dtype}, {k}>;"]
    values: dict[str, str] = {}
    rows: list[str] = []
    for n, op in enumerate(op for op in b.before if op.kind == "load"):
        assert op.out is not None
        _, dtype, at = _place(b, pipeline, op)
        lines += [f"WarpRow<{dtype}, {k}> x{n};", f"x{n}.load({at}, t);"]
        rows.append(f"x{n}")
        values[op.out.name] = f"x{n}.at(c, e)"
    vectors: dict[View, str] = {}
    for n, view in enumerate(row_vectors(b)):
        dtype = pipeline.tensor(view.of).dtype
        offset = sum(at.offset for at in view.at or ())
        start = f"(const char*)p.vectors[{vectors_before + n}] + {DTYPE_BYTES[dtype] * offset}"
        if any(at.axes for at in view.at or ()):
            lines += [f"WarpRow<{dtype}, {k}> w{n};", f"w{n}.load({start}, t);"]
            vectors[view] = f"w{n}.at(c, e)"
        else:
            lines.append(f"const float w{n} = Io<{dtype}>::param({start}, 0);")
            vectors[view] = f"w{n}"

    def pieces(body: list[str]) -> list[str]:
        """A loop over pieces of eight columns that there are."""
        over = ["#pragma unroll", "for (int c = 0; c < R::PIECES; ++c) {", f"  if (R::column(c, t) >= {k}) continue;"]
        return [*(f"{row}.again();" for row in rows), *over, *body, "}"]

    for n, op in enumerate(op for op in b.before if op.kind != "load"):
        assert op.out is not None
        operands = [values[name] for name in op.ins] + [vectors[v] for v in op.views[len(op.tiles) :]]
        is_scalar = result_axes(op) == (b.rows,)
        if OPS[op.kind].family == "reduce":
            lines.append(f"float s{n} = {STARTS[op.kind]};")
            taken = TAKEN[op.kind].format(f"s{n}", operands[0])
            lines += pieces(["#pragma unroll", f"  for (int e = 0; e < 8; ++e) {taken}"])
            lines.append(f"const float v{n} = warp_{op.kind}(s{n});")
        elif is_scalar:
            lines.append(f"const float v{n} = {expression(op, operands)};")
        else:
            lines.append(f"const auto v{n} = [&](int c, int e) {{ return {expression(op, operands)}; }};")
        values[op.out.name] = f"v{n}" if is_scalar else f"v{n}(c, e)"
    lines.append(f"u16* const made = (u16*)p.operand_data + (u64)to * {k};")
    value = f"[&](int e) {{ return {values[b.operand]}; }}"
    lines += pieces([f"  store_eight<{b.dtype}>(made, R::column(c, t), {value});"])
    return "\n".join(line if line.startswith("#") else f"    {line}" for line in lines)


def _place(b: Block, pipeline: Pipeline, op: TileOp) -> tuple[int, str, str]:
    """Of a load: its number among the block's, the tensor's dtype, and C++ of where row ``row`` is."""
    slot, dtype = b.loads.index(op), pipeline.tensor(op.params[0]).dtype
    at = f"(const char*)p.rows_of[{slot}] + {DTYPE_BYTES[dtype]} * (u64)row * p.strides_of[{slot}]"
    return slot, dtype, at
