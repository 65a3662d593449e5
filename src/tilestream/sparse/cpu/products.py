"""What of a region's loops a library kernel does better: products of dense matrices, and weighted sums of rows."""

from __future__ import annotations

from collections.abc import Collection

from tilestream.sparse.cpu.kernels import LISTED, SUMS
from tilestream.sparse.cpu.making import Making
from tilestream.sparse.cpu.scope import Array, Scope
from tilestream.sparse.fusion import Leaf, Op, View

NARROW = 4
"""Rows of fewer elements are left to plain loops."""


def is_dense(arrays: Collection[str], view: View) -> bool:
    """Whether a view has every element and can be had as an array: a plain one, or made of such by itself."""
    if isinstance(view, Leaf):
        return view.tensor in arrays
    return bool(view.reduced) or all(is_dense(arrays, one) for one in view.operands)


def is_product(arrays: Collection[str], op: Op) -> bool:
    """Whether a view sums products of two dense views over one index that both have."""
    if not _sums_products(op) or len(op.reduced) != 1:
        return False
    return all(op.reduced[0] in one.indices and is_dense(arrays, one) for one in op.operands)


def _sums_products(op: Op) -> bool:
    statement = op.statement
    found = statement.op == "mul" and len(op.operands) == 2 and statement.scalar is None
    return found and bool(op.reduced) and statement.reduction == "add"


def arranged(nests: Making, op: Op, loops: list[str]) -> list[str]:
    """Loops of a view; a product of dense matrices has first what both matrices have, so that each is one product."""
    if not is_product(nests.dense, op):
        return loops
    both = [i for i in loops if all(i in one.indices for one in op.operands) and i not in op.reduced]
    return both + [i for i in loops if i not in both]


def multiply(nests: Making, op: Op, loops: list[str], target: Array, scope: Scope) -> bool:
    """Make what is left of a view as a product of two matrices, if it is one; the order of its loops is the kernel's.

    The factor with the target's innermost index is the right one; it and the target have to lie along that index.
    """
    if not target.dims:
        return False
    column = target.dims[-1]
    rows = [i for i in loops if i != column and i not in op.reduced]
    if column not in loops or scope.range(column) or nests.fused.sizes[column] < NARROW:
        return False
    if len(rows) > 1 or not set(op.reduced) <= set(loops) or not is_product(nests.dense, op):
        return False
    inner = op.reduced[0]
    left, right = op.operands if column in op.operands[1].indices else op.operands[::-1]
    if column in left.indices or column not in right.indices or any(i in right.indices for i in rows):
        return False
    a, b = _array(nests, left, "", scope), _array(nests, right, column, scope)
    if a is None or b is None:
        return False
    layout, count = nests.layout, "1"
    steps = [0, 0]
    if rows:
        tile = scope.range(rows[0])
        count = f"{tile.last} - {tile.first}" if tile else str(nests.fused.sizes[rows[0]])
        steps = [layout.stride(one, rows[0], scope) for one in (a, target)]
    nests.emit(
        f"product({a.name}, {layout.at(a, scope)}, {steps[0]}, {layout.stride(a, inner, scope)}, "
        f"{b.name}, {layout.at(b, scope)}, {layout.stride(b, inner, scope)}, "
        f"{target.name}, {layout.at(target, scope)}, {steps[1]}, "
        f"{count}, {nests.fused.sizes[inner]}, {nests.fused.sizes[column]})"
    )
    return True


def _array(nests: Making, view: View, last: str, scope: Scope) -> Array | None:
    """The array that a dense view is in, with ``last`` innermost; what only is computed on the way is put into one."""
    if isinstance(view, Leaf):
        return nests.plain(view, last)
    if view not in scope.rows and not view.reduced:
        dims = [i for i in view.indices if i not in scope.bound]
        nests.row(view, tuple(sorted(dims, key=lambda i: (i == last, nests.rank[i]))), scope)
    array = scope.rows.get(view)
    return array if array is None or not last or array.dims[-1] == last else None


def sum_rows(nests: Making, op: Op, loops: list[str], target: Array, scope: Scope, fresh: bool) -> bool:
    """Make rows as sums of rows of a dense view, each times a number, if that is what is left of a view.

    The loops list the numbers and where the rows lie; a kernel adds up the rows of many sums, each in registers.
    """
    kept, around, column = _parts(op, loops)
    if not around or not _sums_products(op) or target.dims[-1:] != (column,) or nests.fused.sizes[column] < NARROW:
        return False
    if len(kept) > 1 or (kept and (not fresh or nests.leading(op, kept[0], scope))):
        return False
    factor, rows = op.operands if column in op.operands[1].indices else op.operands[::-1]
    if column in factor.indices:
        return False
    if isinstance(rows, Leaf):
        x = nests.plain(rows, column) if rows.tensor in nests.dense else None
    else:
        x = scope.rows.get(rows)
    if x is None or x.dims[-1] != column:
        return False
    starts, factors = nests.buffer("starts", LISTED, "np.int64"), nests.buffer("factors", LISTED)
    ends = nests.buffer("ends", SUMS, "np.int64")
    at, count = nests.variable(nests.layout.at(target, scope), "at"), nests.variable("0", "count")
    row, more = nests.variable("0", "row"), nests.variable(str(not fresh), "more")
    step = nests.layout.stride(target, kept[0], scope) if kept else 0
    lists = f"{starts}, {factors}, {ends}"
    call = f"sum_rows({target.name}, {at}, {step}, {x.name}, {lists}, {{}}, {nests.fused.sizes[column]}, {more})"
    depth, inner = nests.depth, scope.inner()
    for index in (*kept, *around):
        nests.enter(op, index, inner)
        for kid in op.operands:
            nests.settle(kid, inner)
    nests.emit(f"{starts}[{count}] = {nests.layout.at(x, inner)}")
    nests.emit(f"{factors}[{count}] = {inner.values[factor]}")
    nests.emit(f"{count} += 1")
    nests.emit(f"if {count} == {LISTED}:")
    nests.emit(f"    {ends}[{row}] = {count}")
    nests.emit("    " + call.format(f"{row} + 1"))
    nests.emit(f"    {at}, {count}, {row}, {more} = {at} + {row} * {step}, 0, 0, True")
    nests.depth = depth + len(kept)
    nests.emit(f"{ends}[{row}] = {count}")
    nests.emit(f"{row} += 1")
    if kept:
        nests.emit(f"if {row} == {SUMS}:")
        nests.emit("    " + call.format(row))
        nests.emit(f"    {at}, {count}, {row}, {more} = {at} + {row} * {step}, 0, 0, False")
        nests.depth = depth
        nests.emit(f"if {row}:")
        nests.depth += 1
    nests.emit(call.format(row))
    nests.depth = depth
    return True


def _parts(op: Op, loops: list[str]) -> tuple[list[str], list[str], str]:
    """Loops that a view keeps, then those that it reduces, then one that it keeps; none reduced if it is otherwise."""
    *outer, column = loops
    kept = [i for i in outer if i not in op.reduced]
    around = outer[len(kept) :]
    return (kept, around, column) if outer[: len(kept)] == kept and column not in op.reduced else ([], [], column)
