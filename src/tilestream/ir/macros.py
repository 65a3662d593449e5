"""Norms and means as sums and elementwise operations: the pieces that phases are made of."""

from __future__ import annotations

from tilestream.ir.pipeline import Tile, TileOp

JOINING = ("linear", "cat", "slice")
"""Ops of several elements, to which a column is no other than a tile."""


def expand(ops: tuple[TileOp, ...], features_of: dict[str, int], early: bool = False) -> list[TileOp]:
    """Replace layer_norm, rms_norm, softmax and mean; make every broadcast column a row value.

    Row values are the results of reductions, one a row; a column made any other way is summed over
    its single feature first.

    Args:
        early: loaded columns that are broadcast come before all else, so that what an epilogue has need not wait for
            them in shared memory.
    """
    made = _Expansion(features_of)
    loaded = {op.out.name: op for op in ops if op.kind == "load" and op.out is not None and op.out.features == 1}
    broadcast = (
        i for op in ops if op.out is not None and op.out.features > 1 for i in op.ins if op.kind not in JOINING
    )
    first = [loaded[name] for name in dict.fromkeys(broadcast) if early and name in loaded]
    for op in first:
        made.add(op)
        made.row(op.made.name, op.source)
    for op in ops:
        if op not in first:
            made.add(op)
    return made.out


class _Expansion:
    """Ops one after another. ``rows``: names of row values; ``as_row``: of columns, what they are as row values."""

    def __init__(self, features_of: dict[str, int]) -> None:
        self.out: list[TileOp] = []
        self.rows: set[str] = set()
        self.as_row: dict[str, str] = {}
        self.features = dict(features_of)

    def add(self, op: TileOp) -> None:
        """``op``, or what it is made of."""
        if op.out is None:
            self.out.append(op)
            return
        macro = {"mean": self._mean, "layer_norm": self._layer_norm, "rms_norm": self._rms_norm}
        macro |= {"softmax": self._softmax}
        x = op.ins[0] if op.ins else ""
        if op.kind in macro:
            macro[op.kind](op, op.out, x, self.features.get(x, op.out.features))
        else:
            self._plain(op, op.out, x)
        self.features[op.out.name] = op.out.features

    def emit(self, kind: str, name: str, width: int, ins: tuple[str, ...], source: str, params=(), **attrs) -> str:
        if kind in ("sum", "max") and ins[0] in self.rows:  # a row value has one column: nothing to reduce
            kind, attrs = "mul", {"scalar": 1.0}
        self.out.append(TileOp(kind, Tile.of(name, width, "f32"), ins, tuple(params), tuple(attrs.items()), source))
        self.features[name] = width
        if kind in ("sum", "max") or (ins and not params and all(i in self.rows for i in ins)):
            self.rows.add(name)
        return name

    def row(self, name: str, source: str) -> str:
        """The row value that a column is."""
        if name in self.rows:
            return name
        if name not in self.as_row:
            self.as_row[name] = self.emit("sum", f"{name}.row", 1, (name,), source)
        return self.as_row[name]

    def _mean(self, op: TileOp, out: Tile, x: str, width: int) -> None:
        total = self.emit("sum", f"{out.name}.sum", 1, (x,), op.source)
        self.out.append(TileOp("mul", out, (total,), (), (("scalar", 1.0 / width),), op.source))
        self.rows.add(out.name)

    def _layer_norm(self, op: TileOp, out: Tile, x: str, width: int) -> None:
        name, src = out.name, op.source
        total = self.emit("sum", f"{name}.sum", 1, (x,), src)
        mean = self.emit("mul", f"{name}.mean", 1, (total,), src, scalar=1.0 / width)
        centred = self.emit("sub", f"{name}.centred", width, (x, mean), src)
        self._by_spread(op, out, centred, width, str(op.attr("affine", "")))

    def _rms_norm(self, op: TileOp, out: Tile, x: str, width: int) -> None:
        self._by_spread(op, out, x, width, "w" if op.params else "")

    def _by_spread(self, op: TileOp, out: Tile, x: str, width: int, affine: str) -> None:
        """``x`` over the root of the mean of its squares; then its vectors, ``w`` times and ``b`` added."""
        name, src = out.name, op.source
        squares = self.emit("square", f"{name}.squares", width, (x,), src)
        spread = self.emit("sum", f"{name}.spread", 1, (squares,), src)
        mean = self.emit("mul", f"{name}.variance", 1, (spread,), src, scalar=1.0 / width)
        eps = self.emit("add", f"{name}.eps", 1, (mean,), src, scalar=float(op.attr("eps", 1e-5) or 0.0))
        ins = x, self.emit("rsqrt", f"{name}.scale", 1, (eps,), src)
        steps = list(zip(affine, op.params, strict=True))
        if not steps:
            self.out.append(TileOp("mul", out, ins, (), (), src))
            return
        value = self.emit("mul", f"{name}.unit", out.features, ins, src)
        for k, (letter, param) in enumerate(steps):
            kind = "mul" if letter == "w" else "add"
            if k == len(steps) - 1:
                self.out.append(TileOp(kind, out, (value,), (param,), (), src))
            else:
                value = self.emit(kind, f"{name}.weighted", out.features, (value,), src, params=(param,))

    def _softmax(self, op: TileOp, out: Tile, x: str, width: int) -> None:
        name, src = out.name, op.source
        top = self.emit("max", f"{name}.top", 1, (x,), src)
        shifted = self.emit("sub", f"{name}.shifted", width, (x, top), src)
        grown = self.emit("exp", f"{name}.grown", width, (shifted,), src)
        total = self.emit("sum", f"{name}.total", 1, (grown,), src)
        share = self.emit("reciprocal", f"{name}.share", 1, (total,), src)
        self.out.append(TileOp("mul", out, (grown, share), (), (), src))

    def _plain(self, op: TileOp, out: Tile, x: str) -> None:
        """An op that is none of these; a column that meets a wider tile or vector becomes a row value."""
        by_element = op.kind not in JOINING
        if by_element and any(self.features[i] == 1 < out.features for i in op.ins):
            ins = tuple(self.row(i, op.source) if self.features[i] == 1 else i for i in op.ins)
            self.out.append(TileOp(op.kind, out, ins, op.params, op.attrs, op.source))
        elif op.kind in ("sum", "max") and x in self.rows:
            self.out.append(TileOp("mul", out, op.ins, (), (("scalar", 1.0),), op.source))
            self.rows.add(out.name)
        else:
            self.out.append(op)
            of_rows = op.ins and by_element and not op.params and all(i in self.rows for i in op.ins)
            if op.kind in ("sum", "max") or of_rows:
                self.rows.add(out.name)
