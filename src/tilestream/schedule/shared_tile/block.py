"""The feed-forward block in a stage's ops: ``y = after(act(x W1, x W3, ...) W2)``, by the axes that they mention."""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.errors import IRError, VerifyError
from tilestream.ir.axes import At, View
from tilestream.ir.derive import WRITES, result_axes, sums
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Stage, TileOp
from tilestream.ir.tileops import OPS
from tilestream.schedule.shared_tile.residual import written_out

MOST_FIRSTS = 2
"""Products whose sums one epilogue combines: their accumulators share a thread's registers."""


MOST_ROWS = 512
"""Beyond that a product keeps all SMs busy by itself, and streams of rows share weights better."""


@dataclass(frozen=True)
class First:
    """A product of the first layer: the weight ``[hid, k]``, from row ``offset`` on, and the tile that it makes."""

    weight: str
    offset: int
    tile: str


@dataclass(frozen=True)
class Block:
    """A feed-forward block: axes with their sizes, operands, and what is done to its two sums.

    Attributes:
        rows, k, hid, out: names of the axes.
        sizes: of ``k``, ``hid`` and ``out``.
        dtype: of the operands of the products.
        input: the tensor that the first products read; empty where ``before`` makes what they read.
        before: ops from rows of tensors to ``operand``, a tile ``[rows, k]``: elementwise, and reductions of a row.
        middle: elementwise ops from the first products' sums to ``hidden``, the second product's operand.
        total: the tile that the second product makes.
        after: elementwise ops, and loads of rows, from ``total`` to ``result``, which is stored.
        adds: whether partial results are added in memory, in any order.
    """

    rows: str
    k: str
    hid: str
    out: str
    sizes: tuple[int, int, int]
    dtype: str
    input: str
    before: tuple[TileOp, ...]
    operand: str
    firsts: tuple[First, ...]
    middle: tuple[TileOp, ...]
    hidden: str
    second: str
    total: str
    after: tuple[TileOp, ...]
    result: str
    output: str
    output_dtype: str
    adds: bool

    def vectors(self, ops: tuple[TileOp, ...]) -> tuple[View, ...]:
        """Tensors without rows that ``ops`` read: biases and scalars."""
        return tuple(dict.fromkeys(v for op in ops if op.kind != "load" for v in op.views[len(op.tiles) :]))

    @property
    def loads(self) -> tuple[TileOp, ...]:
        """Ops of ``after``, then of ``before``, that read rows of a tensor."""
        return tuple(op for op in (*self.after, *self.before) if op.kind == "load")


def find_block(stage: Stage, pipeline: Pipeline) -> Block:
    """The block that the ops of ``stage``, which are in plain form, make up.

    Raises:
        VerifyError: they are something else; names the op that does not fit.
    """
    return _Finder(stage, pipeline).block()


def is_block(program: Pipeline) -> bool:
    """Whether ``program``, one stage of row ops, is a feed-forward block that can share a tile."""
    if len(program.stages) != 1 or sum(op.kind == "linear" for op in program.stages[0].ops) not in (2, 3):
        return False
    try:
        written = written_out(program)
        find_block(written.stages[0], written)
    except (VerifyError, IRError):
        return False
    return True


class _Finder:
    def __init__(self, stage: Stage, pipeline: Pipeline) -> None:
        self.stage, self.pipeline = stage, pipeline
        self.makers = {op.out.name: op for op in stage.ops if op.out is not None}

    def block(self) -> Block:
        store = self._last()
        second = self._second()
        assert second.out is not None
        hidden = second.ins[0]
        rows, out = result_axes(second)
        hid = next(iter(sums(second)))
        middle, firsts = self._middle(hidden, rows, hid)
        k, source, before = self._input(firsts, rows, hid)
        self._weight(second, out, hid, 0)
        after = self._after(second, store, rows, out)
        sizes = self.pipeline.sizes()
        result = self.makers[store.ins[0]].out
        assert result is not None
        dtype = self.pipeline.tensor(second.params[0]).dtype
        found = Block(
            rows, k, hid, out, (sizes[k], sizes[hid], sizes[out]), dtype,
            source, before, self.makers[firsts[0].tile].ins[0], firsts, middle, hidden,
            second.params[0], second.out.name, after, result.name, store.params[0],
            self.pipeline.tensor(store.params[0]).dtype, store.kind == "store_add",
        )  # fmt: skip
        self._dtypes(found)
        self._nothing_else(found, store, second)
        return found

    def _refuse(self, op: TileOp | None, why: str, remedy: str = "run it by tilestream.reference") -> VerifyError:
        where = (op.source or op.kind) if op is not None else f"stage {self.stage.name!r}"
        return VerifyError(f"{where}: {why}, and a shared tile is act(x W1) W2", remedy)

    def _last(self) -> TileOp:
        stores = [op for op in self.stage.ops if op.kind in WRITES]
        if len(stores) != 1:
            raise self._refuse(None, f"it stores {len(stores)} results")
        return stores[0]

    def _second(self) -> TileOp:
        products = [op for op in self.stage.ops if op.kind == "product"]
        for op in products:
            before = self._reached(op.ins[0]) if op.ins else set()
            if any(p is not op and p.out is not None and p.out.name in before for p in products):
                if len(sums(op)) != 1 or len(result_axes(op)) != 2:
                    raise self._refuse(op, "its second product is not [rows, out] summed over one axis")
                return op
        raise self._refuse(None, "none of its products reads another's result")

    def _reached(self, tile: str) -> set[str]:
        """``tile`` and every tile that it is made from."""
        found: set[str] = set()
        todo = [tile]
        while todo:
            name = todo.pop()
            if name not in found and name in self.makers:
                found.add(name)
                todo += self.makers[name].ins
        return found

    def _middle(self, hidden: str, rows: str, hid: str) -> tuple[tuple[TileOp, ...], tuple[First, ...]]:
        reached = self._reached(hidden)
        middle: list[TileOp] = []
        firsts: list[First] = []
        for op in self.stage.ops:
            if op.out is None or op.out.name not in reached or result_axes(op) != (rows, hid):
                continue
            if op.kind == "product":
                firsts.append(First(op.params[0], self._weight_offset(op), op.out.name))
            else:
                self._elementwise(op, rows, hid)
                middle.append(op)
        if not 1 <= len(firsts) <= MOST_FIRSTS:
            raise self._refuse(None, f"its first layer has {len(firsts)} products, 1 to {MOST_FIRSTS} can be held")
        return tuple(middle), tuple(firsts)

    def _weight_offset(self, op: TileOp) -> int:
        at = op.views[-1].at or ()
        return at[0].offset if at else 0

    def _input(self, firsts: tuple[First, ...], rows: str, hid: str) -> tuple[str, str, tuple[TileOp, ...]]:
        """The axis that the first layer sums over, the tensor that it reads, or ops that make what it reads."""
        makers = [self.makers[f.tile] for f in firsts]
        if len({op.ins for op in makers}) != 1 or makers[0].ins[0] not in self.makers:
            raise self._refuse(makers[0], "its first products do not read one input", "store what they read first")
        (k,) = sums(makers[0]) or {""}
        for op, first in zip(makers, firsts, strict=True):
            self._weight(op, hid, k, first.offset)
        reached = self._reached(makers[0].ins[0])
        before = tuple(op for op in self.stage.ops if op.out is not None and op.out.name in reached)
        for op in before:
            if op.kind == "load":
                if op.views[-1].at != (At((rows,)), At((k,))):
                    raise self._refuse(op, "its input is read otherwise than by rows and columns")
            elif OPS[op.kind].family == "reduce":
                if result_axes(op) != (rows,) or op.views[0].at != (At((rows,)), At((k,))):
                    raise self._refuse(op, f"{op.kind} is not over the columns {k!r} of a row")
            else:
                self._elementwise(op, rows, k, of_rows=True)
        if len(before) == 1:
            return k, before[0].params[0], ()
        return k, "", before

    def _weight(self, op: TileOp, out: str, depth: str, offset: int) -> None:
        """A product of one tile and one parameter ``[out, depth]``."""
        if len(op.tiles) != 1 or len(op.tensors) != 1 or op.combine != "sum":
            raise self._refuse(op, "it is no product of a tile and a weight")
        if op.views[-1].at != (At((out,), offset), At((depth,))):
            raise self._refuse(op, f"its weight does not lie as [{out}, {depth}]", "transpose it")

    def _after(self, second: TileOp, store: TileOp, rows: str, out: str) -> tuple[TileOp, ...]:
        assert second.out is not None
        before = self._reached(second.out.name)
        reached = self._reached(store.ins[0]) - before
        ops = [op for op in self.stage.ops if op.out is not None and op.out.name in reached]
        for op in ops:
            if op.kind == "load" and op.views[-1].at == (At((rows,)), At((out,))):
                continue
            self._elementwise(op, rows, out)
            inner = [name for name in op.ins if name not in reached and name != second.out.name]
            if inner:
                raise self._refuse(op, f"it reads {inner[0]!r}, which is not [{rows}, {out}]")
        return tuple(ops)

    def _elementwise(self, op: TileOp, rows: str, column: str, of_rows: bool = False) -> None:
        """Of tiles ``[rows, column]``, vectors ``[column]`` and scalars; with ``of_rows`` also of values of a row."""
        value = of_rows and result_axes(op) == (rows,)
        allowed = [(At((rows,)),)] * of_rows + [(At((rows,)), At((column,)))] * (not value)
        if OPS[op.kind].family not in ("unary", "binary") or not (value or result_axes(op) == (rows, column)):
            raise self._refuse(op, f"{op.kind} is not elementwise over [{rows}, {column}]")
        for view in op.views[: len(op.tiles)]:
            if view.at not in allowed:
                raise self._refuse(op, f"it reads {view.of!r} by other coordinates")
        for view in op.views[len(op.tiles) :]:
            if not _vector(view, column):
                raise self._refuse(op, f"it reads {view.of!r} otherwise than as a vector over {column!r} or a scalar")

    def _dtypes(self, b: Block) -> None:
        operand = self.makers[b.operand].out
        assert operand is not None
        read = (b.second, *(f.weight for f in b.firsts), *((b.input,) if b.input else ()))
        others = {self.pipeline.tensor(n).dtype for n in read} | {operand.dtype}
        if others != {b.dtype} or DTYPE_BYTES[b.dtype] != 2:
            raise VerifyError(
                f"stage {self.stage.name!r} multiplies {' and '.join(sorted(others))}: a shared tile's products have"
                " one 16-bit dtype",
                "use bf16 or f16",
            )

    def _nothing_else(self, b: Block, store: TileOp, second: TileOp) -> None:
        known = {op.out.name for op in (*b.before, *b.middle, *b.after) if op.out is not None}
        known |= {f.tile for f in b.firsts} | {b.total, b.operand}
        for op in self.stage.ops:
            if op is not store and op.out is not None and op.out.name not in known:
                raise self._refuse(op, f"{op.kind} is no part of it")


def _vector(view: View, column: str) -> bool:
    at = view.at or ()
    return len(at) <= 1 and all(not a.index and not a.strides and a.axes in ((column,), ()) for a in at)
