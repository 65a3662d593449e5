"""Whether the operands and the result of every tile op agree in shape, dtype and role."""

from __future__ import annotations

from collections.abc import Callable

from tilestream.errors import VerifyError
from tilestream.ir.columns import first_column, is_part
from tilestream.ir.pipeline import DTYPE_BYTES, INDEX_BYTES, Pipeline, Role, Tensor, Tile, TileOp
from tilestream.ir.taps import Tap
from tilestream.ir.tileops import GROUP, OPS

NODE_SUMS = ("sum", "max", "min")
"""What rows of a node are summed by where they are stored."""
BOUNDS = "i32"
"""Of what says which rows are whose."""


def check_shapes(pipeline: Pipeline) -> None:
    """Check every tensor and every op of ``pipeline``.

    Raises:
        VerifyError: with the op, the user's line and the sizes that do not agree.
    """
    for tensor in pipeline.tensors:
        _check_tensor(tensor)
    tiles = pipeline.tiles()
    tensors = {t.name: t for t in pipeline.tensors}
    for stage in pipeline.stages:
        for op in stage.ops:
            _Operands(op, [tiles[n] for n in op.ins], [tensors[n] for n in op.params], stage.name).check()


def _check_tensor(t: Tensor) -> None:
    if t.dtype == BOUNDS and t.role is Role.PARAMETER and len(t.axes) == 1:
        return
    if t.dtype in INDEX_BYTES and t.role is Role.INPUT:
        if t.shape or len(t.axes) != 1:
            raise VerifyError(
                f"index {t.name!r} has {len(t.axes)} dimensions, of which {t.shape} are features", "give [rows]"
            )
        return
    if t.dtype not in DTYPE_BYTES:
        raise VerifyError(f"tensor {t.name!r} has dtype {t.dtype!r}", f"use one of {', '.join(DTYPE_BYTES)}")
    if t.role is not Role.PARAMETER and len(t.shape) != 1:
        raise VerifyError(
            f"{t.role.value} {t.name!r} has shape {t.shape}", "give (features,): the number of rows is not part of it"
        )
    if any(n < 1 for n in t.shape):
        raise VerifyError(f"tensor {t.name!r} has shape {t.shape}", "leave empty tensors out of the pipeline")


class _Operands:
    """One op with its operands looked up, and its rule."""

    def __init__(self, op: TileOp, ins: list[Tile], params: list[Tensor], stage: str) -> None:
        self.op = op
        self.ins = ins
        self.params = params
        self.where = f"{op.kind} at {op.source}" if op.source else f"{op.kind} in stage {stage!r}"

    def check(self) -> None:
        roles = {"load": (Role.INPUT,), "store": (Role.OUTPUT,)}.get(self.op.kind, (Role.PARAMETER,))
        if self.op.receivers:
            roles = (Role.OUTPUT, Role.INPUT, Role.PARAMETER)
        if self.op.index:
            roles = (Role.PARAMETER, Role.INPUT)
        if Tap.of(self.op) is not None:
            roles = (Role.PARAMETER,)
        for k, tensor in enumerate(self.params):
            role = roles[min(k, len(roles) - 1)]
            self.need(
                tensor.role is role,
                f"uses {tensor.role.value} {tensor.name!r} where only {_a(role)} can stand",
                "load inputs, store outputs, and give whole operands as parameters",
            )
        _RULES.get(self.op.kind, _RULES.get(OPS[self.op.kind].family, _same_width))(self)

    def need(self, holds: bool, problem: str, remedy: str) -> None:
        if not holds:
            raise VerifyError(f"{self.where}: {problem}", remedy)

    @property
    def out(self) -> Tile:
        return self.op.made

    def result_is(self, features: int, why: str) -> None:
        self.need(
            self.out.features == features,
            f"tile {self.out.name!r} has {self.out.features} features, but {why} makes {features}",
            f"declare {self.out.name!r} with {features} features",
        )


def _a(role: Role) -> str:
    return f"an {role.value}" if role.value[0] in "aeiou" else f"a {role.value}"


def _load(o: _Operands) -> None:
    tensor, tap = o.params[0], Tap.of(o.op)
    what = "table" if o.op.index else "input" if tap is None else "pictures"
    if tap is not None:
        _tapped(o, tensor, tap)
    o.need(
        bool(o.op.index) or tensor.dtype in DTYPE_BYTES,
        f"loads {tensor.name!r} of dtype {tensor.dtype} as rows",
        "load rows of a table through it: load(table, index)",
    )
    if o.op.index:
        _indexed(o, tensor, o.params[1])
    o.result_is(tensor.features, f"{what} {tensor.name!r} of {tensor.features}")
    o.need(
        o.out.dtype == tensor.dtype,
        f"tile {o.out.name!r} is {o.out.dtype}, but {what} {tensor.name!r} is {tensor.dtype}",
        "load it in its own dtype, then cast",
    )


def _tapped(o: _Operands, tensor: Tensor, tap: Tap) -> None:
    """Pixels of 16 bytes and more, of which one lies in the picture at least."""
    o.need(not o.op.index, "takes pixels through an index", "take one or the other")
    o.need(
        len(tensor.axes) == 4,
        f"pictures {tensor.name!r} have {len(tensor.axes)} dimensions",
        "give [images, height, width, channels]",
    )
    least = min(tap.height, tap.width, tap.stride_y, tap.stride_x)
    o.need(
        least >= 1,
        f"makes {tap.height} x {tap.width} pixels at strides of {tap.stride_y} x {tap.stride_x}",
        "use at least 1",
    )
    _in_pieces(o, "pixels of", tensor, "pad the channels")
    sizes = (("rows", tap.y, tap.stride_y, tap.height), ("columns", tap.x, tap.stride_x, tap.width))
    for (what, first, stride, count), size in zip(sizes, tensor.shape[:2], strict=True):
        last = first + stride * (count - 1)
        o.need(
            last >= 0 and first < size,
            f"reads {what} {first} to {first} + {stride} x ({count} - 1) = {last} of pictures {tensor.name!r}, which"
            f" have {size}: nothing but zeros",
            "leave the tap out",
        )


def _indexed(o: _Operands, table: Tensor, index: Tensor) -> None:
    """Rows of 16 bytes and more: that is what one lane copies."""
    o.need(index.dtype in INDEX_BYTES, f"index {index.name!r} is {index.dtype}", f"use one of {', '.join(INDEX_BYTES)}")
    o.need(len(table.axes) == 2, f"table {table.name!r} has {len(table.axes)} dimensions", "give [rows, features]")
    _in_pieces(o, "rows of table", table, "gather them before the pipeline, or pad the table's rows")


def _in_pieces(o: _Operands, what: str, tensor: Tensor, remedy: str) -> None:
    """Rows are whole pieces of 16 bytes."""
    each = DTYPE_BYTES[tensor.dtype]
    row = tensor.features * each
    told = f"{what} {tensor.name!r} have {tensor.features} x {each} = {row} bytes, no multiple of 16"
    o.need(row % 16 == 0, told, remedy)


def _store(o: _Operands) -> None:
    tile, tensor = o.ins[0], o.params[0]
    if o.op.receivers:
        _summed(o)
    if is_part(o.op):
        _part(o, tile.features, tensor.features, f"output {tensor.name!r}")
        return
    o.need(
        tile.features == tensor.features,
        f"tile {tile.name!r} has {tile.features} features, but output {tensor.name!r} has {tensor.features}",
        "make them equal",
    )


def _summed(o: _Operands) -> None:
    """At nodes: by how kernels sum, and whole."""
    o.need(o.op.combine in NODE_SUMS, f"sums to nodes by {o.op.combine}", f"use one of {', '.join(NODE_SUMS)}")
    o.need(not is_part(o.op), "sums a part of the columns to nodes", "sum all of them")
    for tensor in o.params[1:]:
        o.need(
            tensor.dtype == BOUNDS and len(tensor.axes) == 1,
            f"sums to nodes by {tensor.name!r} of dtype {tensor.dtype} and {len(tensor.axes)} dimensions",
            f"give receivers and bounds as lists of {BOUNDS}",
        )


def _linear(o: _Operands) -> None:
    x, weight = o.ins[0], o.params[0]
    o.need(len(weight.shape) == 2, f"weight {weight.name!r} has shape {weight.shape}", "give (out, in)")
    outs, ins = weight.shape
    o.need(
        x.features == ins,
        f"tile {x.name!r} has {x.features} features, but weight {weight.name!r} {weight.shape} takes {ins}",
        "weights are (out, in)",
    )
    o.need(
        x.dtype == weight.dtype,
        f"tile {x.name!r} is {x.dtype}, but weight {weight.name!r} is {weight.dtype}",
        "cast the tile to the dtype of the weight",
    )
    if is_part(o.op):
        _part(o, o.out.features, outs, f"weight {weight.name!r} {weight.shape}")
    else:
        o.result_is(outs, f"weight {weight.name!r} {weight.shape}")
    for bias in o.params[1:]:
        o.need(
            bias.shape == (outs,),
            f"bias {bias.name!r} has shape {bias.shape}, but weight {weight.name!r} makes {outs} features",
            f"give it shape ({outs},)",
        )


def _part(o: _Operands, columns: int, whole: int, what: str) -> None:
    first = first_column(o.op)
    o.need(
        0 <= first and first + columns <= whole,
        f"takes columns {first} to {first} + {columns} of {what}, which has {whole}",
        "take columns that are there",
    )


def _max_rows(o: _Operands) -> None:
    x = o.ins[0]
    o.need(
        x.features % 64 == 0,
        f"tile {x.name!r} has {x.features} features, no multiple of 64",
        "take the maximum over rows outside of the pipeline",
    )
    o.result_is(x.features // GROUP, f"the maximum of every {GROUP} rows of {x.features}")


def _same_width(o: _Operands) -> None:
    o.result_is(o.ins[0].features, f"{o.op.kind} of {o.ins[0].features}")


def _binary(o: _Operands) -> None:
    for vector in o.params:
        o.need(
            len(vector.shape) <= 1,
            f"operand {vector.name!r} has shape {vector.shape}",
            "only a vector or a scalar can be combined with a tile",
        )
    widths = {t.name: t.features for t in (*o.ins, *o.params)}
    wide = max(widths.values())
    o.need(
        all(w in (1, wide) for w in widths.values()),
        "operands " + " and ".join(f"{name!r} of {w}" for name, w in widths.items()) + " features do not broadcast",
        "make them equal, or one of them 1",
    )
    o.result_is(wide, " and ".join(f"{name!r} of {w}" for name, w in widths.items()))


def _cat(o: _Operands) -> None:
    parts = [t.features for t in o.ins]
    o.result_is(sum(parts), "cat of " + " + ".join(map(str, parts)))


def _slice(o: _Operands) -> None:
    width = o.ins[0].features
    start, stop = o.op.attr("start", 0), o.op.attr("stop", width)
    o.need(
        isinstance(start, int) and isinstance(stop, int) and 0 <= start < stop <= width,
        f"slice {start}:{stop} of {width} features",
        "use 0 <= start < stop <= features",
    )
    assert isinstance(start, int) and isinstance(stop, int)
    o.result_is(stop - start, f"slice {start}:{stop}")


def _reduce(o: _Operands) -> None:
    o.result_is(1, f"{o.op.kind} over features")


def _norm(o: _Operands) -> None:
    width = o.ins[0].features
    _same_width(o)
    for vector in o.params:
        o.need(
            vector.shape == (width,),
            f"{vector.name!r} has shape {vector.shape}, but the tile has {width} features",
            f"give it shape ({width},)",
        )
    affine = o.op.attr("affine")
    if affine is not None:
        o.need(
            affine in ("", "w", "b", "wb") and len(str(affine)) == len(o.params),
            f"affine is {affine!r} with {len(o.params)} tensors",
            "say 'wb', 'w', 'b' or '' and give as many tensors",
        )


_RULES: dict[str, Callable[[_Operands], None]] = {
    "load": _load,
    "rows": _max_rows,
    "store": _store,
    "linear": _linear,
    "binary": _binary,
    "cat": _cat,
    "slice": _slice,
    "reduce": _reduce,
    "norm": _norm,
}
