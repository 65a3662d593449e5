"""Blocks of a result in vector registers, for compiled code: rows of vectors of numbers that products are added to.

LLVM would find most of these vectors by itself, were it not for arrays that might overlap: it then reads and writes the
sums in memory at every step. A value of the type ``Registers`` is a local variable of compiled code, and stays in
registers where there are enough of them. Addresses are elements of flat contiguous arrays of one type and are not
checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

_FEATURES = llvmlite.binding.get_host_cpu_features()
BITS = 512 if _FEATURES.get("avx512f") else 256 if _FEATURES.get("avx") else 128
"""Width of a vector of this machine."""
ROWS = 8 if BITS == 512 else 4
"""Rows of a block of two vectors a row such that its sums, a row of factors and a factor fit the registers."""

_INT = ir.IntType(32)


class Registers(types.Type):
    """A block of ``rows`` by ``vectors`` vectors of float32 or float64, as ``bits`` says."""

    def __init__(self, rows: int, vectors: int, bits: int) -> None:
        self.rows, self.vectors, self.bits = rows, vectors, bits
        super().__init__(name=f"Registers({rows}, {vectors}, {bits})")

    @property
    def lanes(self) -> int:
        return BITS // self.bits

    @property
    def vector(self) -> ir.VectorType:
        return ir.VectorType(ir.FloatType() if self.bits == 32 else ir.DoubleType(), self.lanes)


@register_model(Registers)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Registers) -> None:
        super().__init__(manager, kind, ir.ArrayType(kind.vector, kind.rows * kind.vectors))


def instruction(code: Callable[..., Any]) -> Any:
    """A function of compiled code that is given as LLVM code; constants keep their values."""
    return intrinsic(prefer_literal=True)(code)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any, vector: ir.VectorType | None = None) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    pointer = builder.gep(data, [at])
    return builder.bitcast(pointer, vector.as_pointer()) if vector is not None else pointer


def _spread(builder: Any, element: Any, kind: Any) -> Any:
    """A vector with one element in all lanes."""
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, element, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_INT, kind.count), [0] * kind.count))


def _mask(builder: Any, count: Any, vector: int, lanes: int) -> Any:
    """The lanes of a row's ``vector``-th vector that are among the first ``count`` of the row."""
    wide = ir.VectorType(count.type, lanes)
    numbers = ir.Constant(wide, [vector * lanes + n for n in range(lanes)])
    return builder.icmp_signed("<", numbers, _spread(builder, count, wide))


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _load(builder: Any, block: Registers, pointer: Any, count: Any, vector: int) -> Any:
    if count is None:
        return builder.load(pointer, align=block.bits // 8)
    lanes = block.lanes
    zeros, align = ir.Constant(block.vector, [0.0] * lanes), ir.Constant(_INT, block.bits // 8)
    given = [pointer, align, _mask(builder, count, vector, lanes), zeros]
    return _call(builder, f"llvm.masked.load.v{lanes}f{block.bits}.p0", block.vector, given)


def _count(signature: Any, args: Any) -> Any:
    """The last argument, or None where it is that."""
    return None if isinstance(signature.args[-1], types.NoneType) else args[-1]


@instruction
def lanes(typing: Any, a: Any) -> Any:
    """How many of an array's numbers make a vector."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(context.get_value_type(types.intp), BITS // a.dtype.bitwidth)

    return types.intp(a), code


@instruction
def zeros(typing: Any, a: Any, rows: Any, vectors: Any) -> Any:
    """A block of zeros of an array's type."""
    kind = Registers(rows.literal_value, vectors.literal_value, a.dtype.bitwidth)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(context.get_value_type(kind), None)

    return kind(a, rows, vectors), code


@instruction
def read(typing: Any, block: Any, c: Any, at: Any, row: Any, count: Any) -> Any:
    """A block like ``block`` of what is at ``c[at + n * row:]``: ``count`` columns of it; all if that is None."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, array, first, stride, _ = args
        made = args[0]
        for n in range(block.rows):
            for v in range(block.vectors):
                step = builder.add(builder.mul(stride, first.type(n)), first.type(v * block.lanes))
                pointer = _pointer(context, builder, c, array, builder.add(first, step), block.vector)
                one = _load(builder, block, pointer, _count(signature, args), v)
                made = builder.insert_value(made, one, n * block.vectors + v)
        return made

    return block(block, c, at, row, count), code


@instruction
def add_product(typing: Any, block: Any, a: Any, at: Any, row: Any, b: Any, where: Any, count: Any) -> Any:
    """``block[n, :] + a[at + n * row] * b[where:]``; ``count`` columns of it; all if that is None."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made, left, first, stride, right, start, _ = args
        steps = [builder.add(start, start.type(v * block.lanes)) for v in range(block.vectors)]
        pointers = [_pointer(context, builder, b, right, s, block.vector) for s in steps]
        vectors = [_load(builder, block, p, _count(signature, args), v) for v, p in enumerate(pointers)]
        for n in range(block.rows):
            element = builder.add(first, builder.mul(stride, first.type(n)))
            factor = builder.load(_pointer(context, builder, a, left, element))
            factor = _spread(builder, factor, block.vector)
            for v, vector in enumerate(vectors):
                at = n * block.vectors + v
                given = [factor, vector, builder.extract_value(made, at)]
                one = _call(builder, f"llvm.fma.v{block.lanes}f{block.bits}", block.vector, given)
                made = builder.insert_value(made, one, at)
        return made

    return block(block, a, at, row, b, where, count), code


@instruction
def write(typing: Any, block: Any, c: Any, at: Any, row: Any, count: Any) -> Any:
    """Put a block at ``c[at + n * row:]``: ``count`` columns of it; all if that is None."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made, array, first, stride, _ = args
        count = _count(signature, args)
        for n in range(block.rows):
            for v in range(block.vectors):
                step = builder.add(builder.mul(stride, first.type(n)), first.type(v * block.lanes))
                pointer = _pointer(context, builder, c, array, builder.add(first, step), block.vector)
                one = builder.extract_value(made, n * block.vectors + v)
                if count is None:
                    builder.store(one, pointer, align=block.bits // 8)
                else:
                    given = [one, pointer, ir.Constant(_INT, block.bits // 8), _mask(builder, count, v, block.lanes)]
                    name = f"llvm.masked.store.v{block.lanes}f{block.bits}.p0"
                    _call(builder, name, ir.VoidType(), given)
        return context.get_dummy_value()

    return types.void(block, c, at, row, count), code


@instruction
def prefetch(typing: Any, a: Any, at: Any) -> Any:
    """Ask for what is at ``a[at]``, which may lie outside, to be brought near."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, a, *args)
        # for reading, as near as the second-level cache, of data
        how = [ir.Constant(_INT, n) for n in (0, 2, 1)]
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *how])
        return context.get_dummy_value()

    return types.void(a, at), code
