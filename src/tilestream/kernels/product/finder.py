"""Finds in a stage's ops what a product's kernel computes: one layer, or two behind each other."""

from __future__ import annotations

from tilestream.errors import IRError, VerifyError
from tilestream.ir.axes import At, View
from tilestream.ir.derive import WRITES, sums
from tilestream.ir.once import once
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Stage, TileOp
from tilestream.ir.taps import Tap
from tilestream.ir.tileops import OPS
from tilestream.kernels.parts.taps import Grid
from tilestream.kernels.product.block import PANEL, Block, Last, Product, made_from
from tilestream.kernels.product.written import written_out

MOST_PRODUCTS = 2
"""Products whose sums one epilogue combines: their accumulators share a thread's registers."""

NARROW = 512
"""Columns of rows and of layers that a stage of a row stream holds: a layer alone that is no wider stays there."""


class Finder:
    """Reads one stage in plain form."""

    def __init__(self, stage: Stage, pipeline: Pipeline) -> None:
        self.stage, self.pipeline = stage, pipeline
        self.makers = stage.makers

    def block(self) -> Block:
        """The block that the stage is.

        Raises:
            VerifyError: it is something else.
        """
        products = [op for op in self.stage.ops if op.kind == "product"]
        stores = [op for op in self.stage.ops if op.kind in WRITES]
        if not products or not stores:
            raise self._refuse(None, f"it has {len(products)} products and stores {len(stores)} results")
        second = self._second(products)
        if second is not None and len(stores) != 1:
            raise self._refuse(None, f"it stores {len(stores)} results of two layers")
        ends = [second] if second is not None else products
        rows, hid = ends[0].result_axes[0], next(iter(sums(ends[0])), "")
        lasts = self._lasts(ends, stores, rows, hid)
        middle, firsts = self._middle(ends[0].ins[0], rows, hid) if second is not None else ((), ())
        k, source, before, grid = self._input([self.makers[f.tile] for f in firsts] or ends, rows)
        sizes = self.pipeline.sizes()
        found = Block(
            rows, k, hid, (sizes[k], sizes[hid], sum(last.columns for last in lasts)),
            self.pipeline.tensor(lasts[0].products[0].weight).dtype, source, before,
            (self.makers[firsts[0].tile] if firsts else ends[0]).ins[0], firsts, middle,
            ends[0].ins[0] if firsts else "", lasts,
            self.pipeline.tensor(lasts[0].output).dtype, any(op.kind == "store_add" for op in stores), grid,
            self._by_columns(products),
        )  # fmt: skip
        self._alike(found)
        self._dtypes(found)
        self._nothing_else(found)
        return found

    def _by_columns(self, products: list[TileOp]) -> bool:
        lying = {self.pipeline.tensor(op.params[0]).by_columns for op in products if op.params}
        if len(lying) > 1:
            raise self._refuse(None, "some of its weights lie by columns and others by rows", "copy the former")
        return True in lying

    def _refuse(self, op: TileOp | None, why: str, remedy: str = "run it by tilestream.reference") -> VerifyError:
        where = (op.source or op.kind) if op is not None else f"stage {self.stage.name!r}"
        return VerifyError(f"{where}: {why}, and a shared tile is act(x W1) W2, or products of one input", remedy)

    def _second(self, products: list[TileOp]) -> TileOp | None:
        """The product that reads another's result; none where there is one layer."""
        for op in products:
            before = made_from(op.ins[0], self.makers) if op.ins else set()
            if any(p is not op and p.out is not None and p.out.name in before for p in products):
                return op
        return None

    def _lasts(self, products: list[TileOp], stores: list[TileOp], rows: str, hid: str) -> tuple[Last, ...]:
        """What is made of ``products``: of each a result, or of two of them the only one."""
        gated = len(stores) == 1 and 1 < len(products) <= MOST_PRODUCTS
        results = [products] if gated else [[op] for op in products]
        return tuple(self._last(some, self._store_of(some, stores, products), rows, hid) for some in results)

    def _store_of(self, own: list[TileOp], stores: list[TileOp], products: list[TileOp]) -> TileOp:
        """The one that stores what is made of ``own``, and of no other of ``products``."""
        for product in own:
            mine = [op for op in stores if product.made.name in made_from(op.ins[0], self.makers)]
            if len(mine) != 1:
                raise self._refuse(product, f"{len(mine)} results are stored of its sum")
        reached = made_from(mine[0].ins[0], self.makers)
        if any(p not in own and p.out is not None and p.out.name in reached for p in products):
            raise self._refuse(own[0], "its result is made of another product as well")
        return mine[0]

    def _last(self, products: list[TileOp], store: TileOp, rows: str, hid: str) -> Last:
        out = products[0].result_axes[-1]
        made: list[Product] = []
        for op in products:
            if len(sums(op)) != 1 or len(op.result_axes) != 2 or op.result_axes[0] != rows:
                raise self._refuse(op, "its last product is not [rows, out] summed over one axis")
            made.append(Product(op.params[0], 0, op.made.name))
            self._weight(op, out, hid, 0)
        after = self._after(products, store, rows, out)
        result = self.makers[store.ins[0]].made.name
        return Last(out, self.pipeline.sizes()[out], tuple(made), after, result, store.params[0])

    def _middle(self, hidden: str, rows: str, hid: str) -> tuple[tuple[TileOp, ...], tuple[Product, ...]]:
        reached = made_from(hidden, self.makers)
        middle: list[TileOp] = []
        firsts: list[Product] = []
        for op in self.stage.ops:
            if op.out is None or op.out.name not in reached or op.result_axes != (rows, hid):
                continue
            if op.kind == "product":
                rows_from = op.views[-1].at or (At(),)
                firsts.append(Product(op.params[0], rows_from[0].offset, op.out.name))
                self._weight(op, hid, next(iter(sums(op)), ""), firsts[-1].offset)
            else:
                self._elementwise(op, rows, hid)
                middle.append(op)
        if not 1 <= len(firsts) <= MOST_PRODUCTS:
            raise self._refuse(None, f"its first layer has {len(firsts)} products, 1 to {MOST_PRODUCTS} can be held")
        return tuple(middle), tuple(firsts)

    def _input(self, makers: list[TileOp], rows: str) -> tuple[str, str, tuple[TileOp, ...], Grid | None]:
        """The columns of what the products ``makers`` read; the tensor that it is, or ops that make it; and at which
        taps it is read, if its rows are pixels."""
        if len({op.tiles for op in makers}) != 1 or makers[0].ins[0] not in self.makers:
            raise self._refuse(makers[0], "its first products do not read one input", "store what they read first")
        operand = self.makers[makers[0].ins[0]].made
        if len(operand.axes) != 2:
            raise self._refuse(makers[0], f"it reads {operand.name!r}, which is not [{rows}, columns]")
        k = operand.axes[1].name
        if makers[0].views[0].at != (At((rows,)), At((next(iter(sums(makers[0])), ""),))):
            raise self._refuse(makers[0], f"it reads {operand.name!r} otherwise than by rows and columns")
        reached = made_from(makers[0].ins[0], self.makers)
        before = tuple(op for op in self.stage.ops if op.out is not None and op.out.name in reached)
        grid = self._grid(before)
        if grid is not None:
            return k, before[0].params[0], (), grid
        for op in before:
            if op.kind == "load":
                if op.views[-1].at != (At((rows,)), At((k,))):
                    raise self._refuse(op, "its input is read otherwise than by rows and columns")
            elif OPS[op.kind].family == "reduce":
                if op.result_axes != (rows,) or op.views[0].at != (At((rows,)), At((k,))):
                    raise self._refuse(op, f"{op.kind} is not over the columns {k!r} of a row")
            else:
                self._elementwise(op, rows, k, of_rows=True)
        if len(before) == 1:
            return k, before[0].params[0], (), None
        return k, "", before, None

    def _grid(self, before: tuple[TileOp, ...]) -> Grid | None:
        """The taps that ``before`` are, loads of one picture's pixels and what sets them side by side; None where they
        are something else."""
        loads = before if len(before) == 1 else before[:-1]
        taps = [tap for op in loads if (tap := Tap.seen(op)) is not None]
        if len(taps) < len(loads) or len({op.params[0] for op in loads}) != 1:
            return None
        height, width, channels = self.pipeline.tensor(loads[0].params[0]).shape
        if len(loads) < len(before):
            joined = before[-1]
            column = joined.made.axes[1].name
            parts = [(op.out.name, At((column,), -n * channels)) for n, op in enumerate(loads) if op.out is not None]
            taken = [(v.of, v.at[1]) for v in joined.views[: len(joined.tiles)] if v.at is not None]
            if joined.kind != "cat" or taken != parts:
                return None
        grid = Grid.of(taps, (height, width))
        reason = f"pixels have {channels} channels, no multiple of {PANEL}" if channels % PANEL else ""
        if grid is not None and (reason := reason or grid.why_not_in_bulk):
            raise self._refuse(loads[0], f"panels of {PANEL} columns are copied in bulk, and {reason}")
        return grid

    def _weight(self, op: TileOp, out: str, depth: str, offset: int) -> None:
        """A product of one tile and one parameter ``[out, depth]``."""
        if len(op.tiles) != 1 or len(op.tensors) != 1 or op.combine != "sum":
            raise self._refuse(op, "it is no product of a tile and a weight")
        if op.views[-1].at != (At((out,), offset), At((depth,))):
            raise self._refuse(op, f"its weight does not lie as [{out}, {depth}]", "transpose it")

    def _after(self, products: list[TileOp], store: TileOp, rows: str, out: str) -> tuple[TileOp, ...]:
        totals = {op.made.name for op in products}
        before = set[str]().union(*(made_from(name, self.makers) for name in totals))
        reached = made_from(store.ins[0], self.makers) - before
        ops = [op for op in self.stage.ops if op.out is not None and op.out.name in reached]
        for op in ops:
            if op.kind == "load" and op.views[-1].at == (At((rows,)), At((out,))):
                continue
            self._elementwise(op, rows, out)
            inner = [name for name in op.ins if name not in reached | totals]
            if inner:
                raise self._refuse(op, f"it reads {inner[0]!r}, which is not [{rows}, {out}]")
        return tuple(ops)

    def _elementwise(self, op: TileOp, rows: str, column: str, of_rows: bool = False) -> None:
        """Of tiles ``[rows, column]``, vectors ``[column]`` and scalars; with ``of_rows`` also of values of a row."""
        value = of_rows and op.result_axes == (rows,)
        allowed = [(At((rows,)),)] * of_rows + [(At((rows,)), At((column,)))] * (not value)
        if OPS[op.kind].family not in ("unary", "binary") or not (value or op.result_axes == (rows, column)):
            raise self._refuse(op, f"{op.kind} is not elementwise over [{rows}, {column}]")
        for view in op.views[: len(op.tiles)]:
            if view.at not in allowed:
                raise self._refuse(op, f"it reads {view.of!r} by other coordinates")
        for view in op.views[len(op.tiles) :]:
            if not _vector(view, column):
                raise self._refuse(op, f"it reads {view.of!r} otherwise than as a vector over {column!r} or a scalar")

    def _alike(self, b: Block) -> None:
        """Several results are stored alike, and none has rows of a tensor beside it."""
        if len(b.lasts) == 1:
            return
        kinds = sorted({self.pipeline.tensor(last.output).dtype for last in b.lasts})
        if len(kinds) != 1 or b.adds:
            raise self._refuse(None, f"it stores {len(b.lasts)} results as {' and '.join(kinds)}, or adds them")
        if len(set(b.outs)) != len(b.lasts):
            raise self._refuse(None, "two of its results have the same columns")
        for op in b.after:
            if op.kind == "load":
                raise self._refuse(op, f"rows of {op.params[0]!r} go with one of {len(b.lasts)} results")

    def _dtypes(self, b: Block) -> None:
        operand = self.makers[b.operand].made
        products = (*b.firsts, *(x for last in b.lasts for x in last.products))
        read = (*(x.weight for x in products), *((b.input,) if b.input else ()))
        others = {self.pipeline.tensor(n).dtype for n in read} | {operand.dtype}
        if others != {b.dtype} or DTYPE_BYTES[b.dtype] != 2:
            raise VerifyError(
                f"stage {self.stage.name!r} multiplies {' and '.join(sorted(others))}: a shared tile's products have"
                " one 16-bit dtype",
                "use bf16 or f16",
            )

    def _nothing_else(self, b: Block) -> None:
        known = {op.out.name for op in (*b.before, *b.middle, *b.after) if op.out is not None}
        known |= {x.tile for x in (*b.firsts, *(x for last in b.lasts for x in last.products))} | {b.operand}
        known |= made_from(b.operand, self.makers) if b.grid is not None else set()
        for op in self.stage.ops:
            if op.out is not None and op.out.name not in known:
                raise self._refuse(op, f"{op.kind} is no part of it")
            if op.kind in WRITES and op.params[0] not in {last.output for last in b.lasts}:
                raise self._refuse(op, f"it stores {op.params[0]!r}, which no product makes")


def _vector(view: View, column: str) -> bool:
    at = view.at or ()
    return len(at) <= 1 and all(not a.index and not a.strides and a.axes in ((column,), ()) for a in at)


def find_block(stage: Stage, pipeline: Pipeline) -> Block:
    """The block that the ops of ``stage``, which are in plain form, make up.

    Raises:
        VerifyError: they are something else; names the op that does not fit.
    """
    return only_block(pipeline) if pipeline.stages == (stage,) else Finder(stage, pipeline).block()


@once
def only_block(pipeline: Pipeline) -> Block:
    """The block that a pipeline's only stage is."""
    return Finder(pipeline.stages[0], pipeline).block()


def is_block(program: Pipeline) -> bool:
    """Whether ``program``, one stage of row ops, can share a tile: two layers, or one that no row stream holds."""
    return _found(program) is not None


def is_projection(program: Pipeline) -> bool:
    """Whether it is such a program of one layer."""
    found = _found(program)
    return found is not None and found.one_layer


@once
def _found(program: Pipeline) -> Block | None:
    if len(program.stages) != 1 or all(op.kind != "linear" for op in program.stages[0].ops):
        return None
    try:
        written = written_out(program)
        found = find_block(written.stages[0], written)
    except (VerifyError, IRError):
        return None
    wide = max(found.sizes[0], *(last.columns for last in found.lasts)) > NARROW
    return found if wide or not found.one_layer else None
