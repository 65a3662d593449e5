"""What a launch of one row computes, as its ops in plain form say it: rows in front, products, columns behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilestream.errors import IRError, VerifyError
from tilestream.ir.axes import At
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
    """Products of so many ``columns``, which go together, and what is made of the sums of each column.

    Attributes:
        behind: elementwise ops and loads, in order, behind products and beside them.
    """

    columns: int
    products: tuple[TileOp, ...]
    behind: tuple[TileOp, ...]
    stores: tuple[TileOp, ...]

    @property
    def axis(self) -> str:
        """Of the columns of its first product."""
        return self.products[0].result_axes[-1]


@dataclass(frozen=True)
class OneRow:
    """A launch.

    Attributes:
        depth: columns of what products read, of which there are several ``operands``.
        front: loads, reductions and elementwise ops that make rows, in order. ``stores``: of these rows.
        kept: what makes rows, or values of the row, that columns read behind.
    """

    depth: int
    dtype: str
    front: tuple[TileOp, ...]
    stores: tuple[TileOp, ...]
    operands: tuple[str, ...]
    kept: tuple[TileOp, ...]
    groups: tuple[Group, ...]


def is_one_row(program: Pipeline) -> bool:
    """Whether a program is what a launch of one row computes."""
    try:
        find(program)
    except (VerifyError, IRError):
        return False
    return True


@once
def find(program: Pipeline) -> OneRow:
    """What the only stage of ``program`` computes.

    Raises:
        VerifyError: it is something else; says what does not fit.
    """
    stage, *others = plain(program).stages
    ops, makers = stage.ops, stage.makers
    products = [op for op in ops if op.kind == "product"]
    if others or not products:
        raise _refusal(f"it has {len(products)} products in {1 + len(others)} stages")
    behind: set[str] = set()
    for name, op in makers.items():
        if op.kind == "product" or not behind.isdisjoint(op.ins):
            behind.add(name)
    early = tuple(op for op in ops if op.kind in WRITES and op.ins[0] not in behind)
    operands = tuple(dict.fromkeys(name for op in products for name in op.ins))
    whole = (name for name, op in makers.items() if OPS[op.kind].family == "reduce")  # each CTA makes all of them
    front = reached([*operands, *(op.ins[0] for op in early), *whole], lambda name: makers[name].ins)

    def again(name: str) -> Iterable[str]:
        """What a column reads for itself; of what is made in front only what is loaded."""
        read = makers[name].ins if name not in front and makers[name].kind != "product" else ()
        return [n for n in read if n not in front or makers[n].kind == "load"]

    groups: list[Group] = []
    for columns in dict.fromkeys(op.made.features for name, op in makers.items() if name in behind):
        inside = reached((n for n in behind if makers[n].made.features == columns), again)
        own = tuple(op for op in products if op.made.features == columns)
        stores = tuple(op for op in ops if op.kind in WRITES and op not in early and op.ins[0] in inside)
        made = tuple(op for name, op in makers.items() if name in inside and op not in own)
        groups.append(Group(columns, own, made, stores))
    read = {name for g in groups for op in g.behind for name in op.ins}
    kept = tuple(op for name, op in makers.items() if name in read & front and op.kind != "load")
    operand = makers[operands[0]].made if operands else products[0].made
    rows = tuple(op for name, op in makers.items() if name in front)
    found = OneRow(operand.features, operand.dtype, rows, early, operands, kept, tuple(groups))
    if not front.isdisjoint(behind):
        raise _refusal("it makes a whole row, or the operand of a product, of a product's result")
    _check(found, program, [op for op in ops if op.kind in WRITES])
    return found


def _check(found: OneRow, program: Pipeline, stores: Iterable[TileOp]) -> None:
    """Refuse what the generator does not write."""
    depth, makers = found.depth, {op.made.name: op for op in found.front}
    if depth % PIECE or depth > MOST_DEPTH:
        raise _refusal(f"its products sum over {depth} columns, no multiple of {PIECE} up to {MOST_DEPTH}")
    for op in found.front:
        _fits(op, depth, ("unary", "binary", "reduce"))
    for g in found.groups:
        for op in g.behind:
            _fits(op, g.columns, ("unary", "binary"))
        if not 1 <= len(g.products) <= MOST_PRODUCTS or g.columns == 1:
            raise _refusal(f"{len(g.products)} products have {g.columns} columns each")
        for op in g.products:
            read = {*(program.tensor(n).dtype for n in op.params), *(makers[n].made.dtype for n in op.ins)}
            if len(op.ins) != 1 or len(op.params) != 1 or read != {found.dtype} or DTYPE_BYTES[found.dtype] != 2:
                raise _refusal(f"a product reads {' and '.join(sorted(read))}, and not one 16-bit dtype")
            if makers[op.ins[0]].made.features != depth or op.combine != "sum":
                raise _refusal(f"products sum over {depth} and {makers[op.ins[0]].made.features} columns")
    if any(op.kind != "store" for op in stores):
        raise _refusal("it adds to memory")


def _fits(op: TileOp, width: int, families: Iterable[str]) -> None:
    """Refuse an op that is no load of rows, and none of ``families`` over tiles under their own columns."""
    load = op.kind == "load"
    plainly = all(at == At(at.axes) for v in (op.views if load else op.views[: len(op.tiles)]) for at in v.at or ())
    if op.made.features not in (1, width) or not plainly or not (load or OPS[op.kind].family in families):
        raise _refusal(f"{op.kind} at {op.source} makes {op.made.features} of {width} columns")


def _refusal(why: str) -> VerifyError:
    return VerifyError(f"{why}: no launch of one row", "run it by tilestream.reference")
