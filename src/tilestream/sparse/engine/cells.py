"""Loads and stores at an address, for compiled code: the engine's whole state is rows of 8-byte cells.

A row is known by its address, an int64. Every kernel then takes one number and has one signature, tensors are read in
place however large they are, and a channel can grow without anything else moving.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilestream.sparse.engine.jit import kernel


def _access(number: Any, llvm: ir.Type) -> tuple[Any, Any]:
    @intrinsic
    def load(typing: Any, row: Any, cell: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            base = builder.inttoptr(args[0], llvm.as_pointer())
            return builder.load(builder.gep(base, [args[1]]))

        return number(types.int64, types.int64), generate

    @intrinsic
    def store(typing: Any, row: Any, cell: Any, what: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            base = builder.inttoptr(args[0], llvm.as_pointer())
            builder.store(args[2], builder.gep(base, [args[1]]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, number), generate

    return load, store


ld, st = _access(types.int64, ir.IntType(64))
"""``ld(row, cell)`` and ``st(row, cell, value)``: an int64 at ``row + 8 * cell``."""

ldf, stf = _access(types.float64, ir.DoubleType())
"""The same for float64."""


@kernel
def copy_cells(source: int, target: int, cells: int) -> None:
    """``cells`` cells from one address to another (they do not overlap)."""
    for i in range(cells):
        st(target, i, ld(source, i))


@kernel
def zero_cells(target: int, cells: int) -> None:
    for i in range(cells):
        st(target, i, 0)
