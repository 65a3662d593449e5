"""What a launch of one row computes, as its ops in plain form say it: rows in front, products, columns behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilestream.errors import IRError, VerifyError
from tilestream.ir.axes import ROWS, At, View
from tilestream.ir.derive import WRITES
from tilestream.ir.once import once
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, TileOp
from tilestream.ir.plain import plain
from tilestream.ir.tileops import OPS
from tilestream.ir.ways import reached

PIECE = 8
"""Columns of weights that a lane loads at once: 16 bytes."""
MOST_DEPTH = 8192
MOST_PRODUCTS = 8
"""Of one column: their sums are a warp's registers."""


@dataclass(frozen=True)
class Group:
    """Products whose columns go together, and what is made of the sums of each column.

    Attributes:
        axis, columns: of the products.
        behind: elementwise ops and loads, in order, behind products and beside them.
    """

    axis: str
    columns: int
    products: tuple[TileOp, ...]
    behind: tuple[TileOp, ...]
    stores: tuple[TileOp, ...]


@dataclass(frozen=True)
class OneRow:
    """A launch.

    Attributes:
        depth: columns of what products read, of which there are several ``operands``.
        front: loads, reductions and elementwise ops that make rows, in order. ``stores``: of these rows.
        kept: rows, or values of the row, that columns read behind.
    """

    depth: int
    dtype: str
    front: tuple[TileOp, ...]
    stores: tuple[TileOp, ...]
    operands: tuple[str, ...]
    kept: tuple[str, ...]
    groups: tuple[Group, ...]

    @property
    def columns(self) -> int:
        """Of the widest group."""
        return max(group.columns for group in self.groups)


def is_one_row(program: Pipeline) -> bool:
    """Whether a program is what a launch of one row computes."""
    try:
        return bool(find(program))
    except (VerifyError, IRError):
        return False


@once
def find(program: Pipeline) -> OneRow:
    """What the only stage of ``program`` computes.

    Raises:
        VerifyError: it is something else; says what does not fit.
    """
    written = plain(program)
    if len(written.stages) != 1:
        raise _refusal(f"pipeline {program.name!r} has {len(written.stages)} stages")
    ops = written.stages[0].ops
    makers = {op.made.name: op for op in ops if op.out is not None}
    products = [op for op in ops if op.kind == "product"]
    behind: set[str] = set()
    for op in ops:
        if op.out is not None and (op.kind == "product" or not behind.isdisjoint(op.ins)):
            behind.add(op.made.name)
    operands = tuple(dict.fromkeys(op.ins[0] for op in products if op.ins))
    early = [op for op in ops if op.kind in WRITES and op.ins[0] not in behind]

    def inputs(name: str) -> Iterable[str]:
        return makers[name].ins

    front = reached([*operands, *(op.ins[0] for op in early)], inputs)
    beside = {n for op in ops if op.out is None or op.made.name in behind for n in op.ins} - behind - front
    sums = [n for n in reached(beside, inputs) if OPS[makers[n].kind].family == "reduce"]
    front |= reached(sums, inputs)  # a value of the whole row is each CTA's
    beside = reached(beside, inputs) - front
    if not products or not front.isdisjoint(behind):
        raise _refusal("a product reads what is made of another" if products else "it has no product")
    groups = _groups(ops, products, behind, beside, makers)
    kept = {n for g in groups for op in g.behind if op.kind != "load" for n in op.ins if n in front}
    made = OneRow(
        _width(makers[operands[0]]), makers[operands[0]].made.dtype,
        tuple(op for op in ops if op.out is not None and op.made.name in front), tuple(early), operands,
        tuple(n for n in makers if n in kept and makers[n].kind != "load"), groups,
    )  # fmt: skip
    _check(made, written)
    return made


def _width(op: TileOp) -> int:
    return op.made.features


def _groups(
    ops: Iterable[TileOp], products: list[TileOp], behind: set[str], beside: set[str], makers: dict[str, TileOp]
) -> tuple[Group, ...]:
    """Products that one op reads, directly or not, are one group."""
    groups: list[set[str]] = [{op.made.name} for op in products]
    for op in ops:
        mine = [g for g in groups if not g.isdisjoint(op.ins)]
        if mine and op.kind != "product":
            joined = set[str]().union(*mine, {op.made.name} if op.out is not None else ())
            groups = [g for g in groups if g not in mine] + [joined]
    found = []
    for group in sorted(groups, key=lambda g: min([*makers].index(n) for n in g)):
        own = [op for op in products if op.made.name in group]
        private = reached([n for m in group for n in makers[m].ins if n in beside], lambda n: makers[n].ins)
        members = (group | (private & beside)) - {op.made.name for op in own}
        columns = next(a for a in own[0].made.axes if a != ROWS) if own[0].made.features > 1 else None
        if columns is None or columns.size is None or any(_width(op) != columns.size for op in own):
            raise _refusal("products of one group have other columns")
        stores = tuple(op for op in ops if op.kind in WRITES and op.ins[0] in group)
        inside = tuple(op for op in ops if op.out is not None and op.made.name in members)
        found.append(Group(columns.name, columns.size, tuple(own), inside, stores))
    return tuple(found)


def _check(made: OneRow, written: Pipeline) -> None:
    """Refuse what the generator does not write."""
    if made.depth % PIECE or made.depth > MOST_DEPTH:
        raise _refusal(f"its products sum over {made.depth} columns, no multiple of {PIECE} up to {MOST_DEPTH}")
    for op in made.front:
        if _width(op) not in (1, made.depth) or not _fits(op, ("unary", "binary", "reduce")):
            raise _refusal(f"{op.kind} at {op.source} makes {_width(op)} of {made.depth} columns in front")
    for group in made.groups:
        if len(group.products) > MOST_PRODUCTS:
            raise _refusal(f"{len(group.products)} products have one column")
        for op in group.behind:
            if _width(op) not in (1, group.columns) or not _fits(op, ("unary", "binary")):
                raise _refusal(f"{op.kind} at {op.source} makes {_width(op)} of {group.columns} columns behind")
        for op in group.products:
            read = {written.tensor(op.params[0]).dtype, written.tiles()[op.ins[0]].dtype}
            depth = {n: _width_of(written, n) for n in op.ins}
            if len(op.tensors) != 1 or read != {made.dtype} or DTYPE_BYTES[made.dtype] != 2:
                raise _refusal(f"a product reads {' and '.join(sorted(read))}, and not one 16-bit dtype")
            if {*depth.values()} != {made.depth} or op.combine != "sum":
                raise _refusal(f"products sum over {made.depth} and {[*depth.values()]} columns")
    if any(op.kind != "store" for op in (*made.stores, *(s for g in made.groups for s in g.stores))):
        raise _refusal("it adds to memory")


def _width_of(written: Pipeline, tile: str) -> int:
    return written.tiles()[tile].features


def _fits(op: TileOp, families: Iterable[str]) -> bool:
    """Whether an op is a load of rows, or one of ``families`` over whole tiles under their own columns."""
    if op.kind == "load":
        at = op.views[-1].at or ()
        return len(op.tensors) == 1 and len(at) == 2 and not (at[0].index or at[1].offset or at[1].strides)
    return OPS[op.kind].family in families and all(map(_whole, op.views[: len(op.tiles)]))


def _whole(view: View) -> bool:
    return all(at == At(at.axes) for at in view.at or ())


def _refusal(why: str) -> VerifyError:
    return VerifyError(f"{why}: no launch of one row", "run it by tilestream.reference")
