"""Norms and means as sums and elementwise operations: the pieces that phases are made of."""

from __future__ import annotations

from tilestream.ir.pipeline import Tile, TileOp


def expand(ops: tuple[TileOp, ...], features_of: dict[str, int]) -> list[TileOp]:
    """Replace layer_norm, rms_norm, softmax and mean; make every broadcast column a row value.

    Row values are the results of reductions, one a row; a column made any other way is summed over
    its single feature first.
    """
    out: list[TileOp] = []
    rows: set[str] = set()
    as_row: dict[str, str] = {}
    features = dict(features_of)

    def emit(kind: str, name: str, width: int, ins: tuple[str, ...], source: str, params=(), **attrs) -> str:
        if kind in ("sum", "max") and ins[0] in rows:  # a row value has one column: nothing to reduce
            kind, attrs = "mul", {"scalar": 1.0}
        out.append(TileOp(kind, Tile.of(name, width, "f32"), ins, tuple(params), tuple(attrs.items()), source))
        features[name] = width
        if kind in ("sum", "max") or (ins and not params and all(i in rows for i in ins)):
            rows.add(name)
        return name

    def row(name: str, source: str) -> str:
        if name in rows:
            return name
        if name not in as_row:
            as_row[name] = emit("sum", f"{name}.row", 1, (name,), source)
        return as_row[name]

    for op in ops:
        if op.out is None:
            out.append(op)
            continue
        name, n, src = op.out.name, op.out.features, op.source
        x = op.ins[0] if op.ins else ""
        width = features.get(x, n)
        if op.kind == "mean":
            total = emit("sum", f"{name}.sum", 1, (x,), src)
            out.append(TileOp("mul", op.out, (total,), (), (("scalar", 1.0 / width),), src))
            rows.add(name)
        elif op.kind == "layer_norm":
            total = emit("sum", f"{name}.sum", 1, (x,), src)
            mean = emit("mul", f"{name}.mean", 1, (total,), src, scalar=1.0 / width)
            centred = emit("sub", f"{name}.centred", width, (x, mean), src)
            squares = emit("square", f"{name}.squares", width, (centred,), src)
            spread = emit("sum", f"{name}.spread", 1, (squares,), src)
            scaled = _inverse_root(emit, name, spread, width, op, src)
            _affine(out, op, emit, (centred, scaled), str(op.attr("affine", "")))
        elif op.kind == "rms_norm":
            squares = emit("square", f"{name}.squares", width, (x,), src)
            spread = emit("sum", f"{name}.spread", 1, (squares,), src)
            scaled = _inverse_root(emit, name, spread, width, op, src)
            _affine(out, op, emit, (x, scaled), "w" if op.params else "")
        elif op.kind == "softmax":
            top = emit("max", f"{name}.top", 1, (x,), src)
            shifted = emit("sub", f"{name}.shifted", width, (x, top), src)
            grown = emit("exp", f"{name}.grown", width, (shifted,), src)
            total = emit("sum", f"{name}.total", 1, (grown,), src)
            share = emit("reciprocal", f"{name}.share", 1, (total,), src)
            out.append(TileOp("mul", op.out, (grown, share), (), (), src))
        elif op.kind not in ("linear", "cat", "slice") and any(features[i] == 1 < n for i in op.ins):
            # a column that meets a wider tile or vector
            ins = tuple(row(i, src) if features[i] == 1 else i for i in op.ins)
            out.append(TileOp(op.kind, op.out, ins, op.params, op.attrs, src))
        elif op.kind in ("sum", "max") and x in rows:
            out.append(TileOp("mul", op.out, op.ins, (), (("scalar", 1.0),), src))
            rows.add(name)
        else:
            out.append(op)
            if op.kind in ("sum", "max") or (
                op.ins
                and op.kind not in ("linear", "cat", "slice")
                and not op.params
                and all(i in rows for i in op.ins)
            ):
                rows.add(name)
        features[name] = n
    return out


def _inverse_root(emit, name: str, spread: str, width: int, op: TileOp, src: str) -> str:
    mean = emit("mul", f"{name}.variance", 1, (spread,), src, scalar=1.0 / width)
    eps = emit("add", f"{name}.eps", 1, (mean,), src, scalar=float(op.attr("eps", 1e-5) or 0.0))
    return emit("rsqrt", f"{name}.scale", 1, (eps,), src)


def _affine(out: list[TileOp], op: TileOp, emit, ins: tuple[str, str], affine: str) -> None:
    assert op.out is not None
    name, n, src = op.out.name, op.out.features, op.source
    steps = list(zip(affine, op.params, strict=True))
    if not steps:
        out.append(TileOp("mul", op.out, ins, (), (), src))
        return
    value = emit("mul", f"{name}.unit", n, ins, src)
    for k, (letter, param) in enumerate(steps):
        kind = "mul" if letter == "w" else "add"
        if k == len(steps) - 1:
            out.append(TileOp(kind, op.out, (value,), (param,), (), src))
        else:
            value = emit(kind, f"{name}.weighted", n, (value,), src, params=(param,))
