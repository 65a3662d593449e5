"""Every wide layer on several SMs, each with a part of its columns; layers on different SMs, joined by L2 queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Tile, TileOp, Transport
from tilestream.ir.tileops import FIRST, OPS
from tilestream.plan.passes.segments import Body, body, cut

CHUNK_BYTES = 128
"""Of a row, what a bulk copy writes at once: parts begin on it."""


def split_columns(program: Pipeline, device: Device, columns: int = 128) -> Pipeline:
    """A stage for every ``columns`` columns of every linear, with the ops element by element behind it.

    The parts of a layer read the same tiles and multiply side by side, so that a tile takes a share of the time that
    one SM would, and a part's weights stay in shared memory where the layer's would not fit. Each part is multicast to
    all parts of the layer that reads it, which joins them by ``cat``. Layers with other ops behind them (norms, which
    need whole rows) and layers no wider than ``columns`` are one stage.

    Raises:
        VerifyError: no layer is wider than ``columns``, or the stages are more than the device has SMs.
    """
    parts = body(program)
    pieces = [parts.ops[start:stop] for start, stop in parts.pieces()]
    divided = [_Layer(piece, columns) if _divides(piece, columns) else None for piece in pieces]
    if not any(divided):
        raise VerifyError(
            f"no layer is wider than {columns} columns, with nothing but ops element by element behind it",
            "use layers_per_stage",
        )
    stages = sum(len(layer.starts) if layer else 1 for layer in divided)
    if stages > device.sms:
        raise VerifyError(
            f"layers by {columns} columns are {stages} stages > {device.sms} SMs of {device.name}", "use wider parts"
        )
    whole: dict[str, TileOp] = {}
    ops: list[TileOp] = []
    cuts: list[int] = []
    tiles = program.tiles()
    for piece, layer in zip(pieces, divided, strict=True):
        for made in (piece,) if layer is None else layer.parts(tiles, whole):
            ops += made
            cuts.append(len(ops))
    joined = Body(program, tuple(ops), {**parts.remade, **whole})
    return cut(joined, cuts[:-1], Transport.L2, "spatial")


def _divides(piece: Sequence[TileOp], columns: int) -> bool:
    """Whether every op can be done for some of the columns: a linear, and ops element by element as wide."""
    first = piece[0]
    if first.kind != "linear" or first.out is None or first.out.features <= columns:
        return False
    width = first.out.features
    made = {op.out.name for op in piece if op.out is not None}
    for op in piece[1:]:
        if op.kind == "store":
            if op.ins[0] not in made:
                return False
        elif OPS[op.kind].family not in ("unary", "binary") or op.out is None or op.out.features != width or op.params:
            return False
    return columns * DTYPE_BYTES[first.out.dtype] % CHUNK_BYTES == 0


@dataclass
class _Layer:
    """A linear and the ops behind it, to be done by ``columns``."""

    ops: Sequence[TileOp]
    columns: int
    starts: range = field(init=False)

    def __post_init__(self) -> None:
        self.starts = range(0, self.ops[0].made.features, self.columns)

    @property
    def name(self) -> str:
        return self.ops[0].made.name

    def parts(self, tiles: dict[str, Tile], whole: dict[str, TileOp]) -> list[list[TileOp]]:
        """The ops of each part; ``whole`` gets a concatenation for each tile that others may want whole."""
        made = [op.out for op in self.ops if op.out is not None]
        for tile in made:
            whole[tile.name] = TileOp("cat", tile, tuple(f"{tile.name}@{at}" for at in self.starts))
        beside = {part for op in whole.values() for part in op.ins}
        return [self._part(at, tiles, beside) for at in self.starts]

    def _part(self, at: int, tiles: dict[str, Tile], beside: set[str]) -> list[TileOp]:
        """``beside``: parts that there are of this layer's tiles and of others of the same width."""
        out: list[TileOp] = []
        part = ((FIRST, at),)
        cut_out: set[str] = set()
        for op in self.ops:
            if op.kind == "linear":
                out.append(replace(op, out=self._narrow(op.out, at), attrs=(*op.attrs, *part)))
                continue
            names = {}
            for name in op.ins:
                tile = self._narrow(tiles[name], at)
                if tile.name in beside:
                    names[name] = tile.name
                elif tiles[name].features != 1:
                    names[name] = f"{tile.name}.{self.name}"
                    if names[name] not in cut_out:
                        cut_out.add(names[name])
                        ends = (("start", at), ("stop", at + tile.features))
                        out.append(TileOp("slice", replace(tile, name=names[name]), (name,), (), ends, op.source))
            if op.out is None:
                out.append(replace(op.reading(names), attrs=(*op.attrs, *part)))
            else:
                out.append(replace(op.reading(names), out=self._narrow(op.out, at)))
        return out

    def _narrow(self, tile: Tile | None, at: int) -> Tile:
        assert tile is not None
        return Tile.of(f"{tile.name}@{at}", min(self.columns, tile.features - at), tile.dtype)
