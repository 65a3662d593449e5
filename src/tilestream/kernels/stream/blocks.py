"""Wide tiles as blocks of columns: an op that makes one becomes an op a block, and whoever wants it whole joins them.

``Loop("a.c", 128, held=True)`` of a stage says which tiles those are (``ir.columns.blocked_tiles``). Rows stay with
their warpgroup, so a tile of any width needs no more registers than a block of it: what is made waits until the tile is
whole, and then becomes the packed operand of the next product (``Place.PARKED``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilestream.errors import VerifyError
from tilestream.ir.axes import Loop
from tilestream.ir.columns import blocked_tiles
from tilestream.ir.pipeline import Tile, TileOp

START = "start"
"""Attribute of an op that makes one block: the block's first column, where its weight rows and vectors begin."""


@dataclass(frozen=True)
class Blocked:
    """The ops of a stage, and of each tile that is made by blocks the names of these, in order."""

    ops: list[TileOp]
    blocks: dict[str, tuple[str, ...]]

    @property
    def names(self) -> frozenset[str]:
        """Of all blocks."""
        return frozenset(name for names in self.blocks.values() for name in names)


def by_blocks(ops: Sequence[TileOp], loops: Sequence[Loop], tiles: Mapping[str, Tile]) -> Blocked:
    """``ops`` with every tile that a loop holds made block by block.

    Args:
        tiles: all that the ops read or make.

    Raises:
        VerifyError: tiles that meet element by element are made in different blocks.
    """
    widths = blocked_tiles(ops, loops)
    if not widths:
        return Blocked(list(ops), {})
    known = {**tiles, **{op.out.name: op.out for op in ops if op.out is not None}}
    return _Blocks(widths, known).run(ops)


@dataclass
class _Blocks:
    widths: Mapping[str, int]
    tiles: Mapping[str, Tile]
    made: list[TileOp] = field(default_factory=list)
    joined: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)

    def run(self, ops: Sequence[TileOp]) -> Blocked:
        for op in ops:
            if op.out is not None and op.out.name in self.widths:
                self._by_blocks(op, op.out)
            elif op.kind in ("sum", "max") and op.ins[0] in self.widths:
                self._reduced(op)
            else:
                self._whole(op.ins)
                self.made.append(op)
        return Blocked(self.made, {t: tuple(_name(t, a) for a, _ in self._parts(t)) for t in self.widths})

    def _parts(self, tile: str) -> list[tuple[int, int]]:
        """(first column, columns) of each block."""
        total, width = self.tiles[tile].features, self.widths[tile]
        return [(a, min(width, total - a)) for a in range(0, total, width)]

    def _whole(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.widths and name not in self.joined:
                self.joined.add(name)
                parts = tuple(_name(name, a) for a, _ in self._parts(name))
                self.made.append(TileOp("cat", self.tiles[name], parts))

    def _by_blocks(self, op: TileOp, out: Tile) -> None:
        if op.kind == "linear":
            self._whole(op.ins)
        for start, width in self._parts(out.name):
            ins = op.ins if op.kind == "linear" else tuple(self._part(i, out, start, width, op) for i in op.ins)
            tile = Tile.of(_name(out.name, start), width, out.dtype)
            self.made.append(replace(op, out=tile, tiles=ins, attrs=(*op.attrs, (START, start))))

    def _part(self, name: str, out: Tile, start: int, width: int, op: TileOp) -> str:
        """The columns of an operand that meet a block of ``out``."""
        tile = self.tiles[name]
        if tile.features == 1:
            return name
        if name in self.widths:
            if self.widths[name] != self.widths[out.name] or tile.features != out.features:
                raise VerifyError(
                    f"{op.kind} at {op.source or name} takes tiles in blocks of {self.widths[name]} and"
                    f" {self.widths[out.name]} columns",
                    "hold them in equal blocks",
                )
            return _name(name, start)
        part = _name(name, start)
        if part not in self.cut:
            self.cut.add(part)
            ends = (("start", start), ("stop", start + width))
            self.made.append(TileOp("slice", Tile.of(part, width, tile.dtype), (name,), (), ends, op.source))
        return part

    def _reduced(self, op: TileOp) -> None:
        """A row's reduction: of each block, then of those, in order."""
        parts = self._parts(op.ins[0])
        total = ""
        for number, (start, _) in enumerate(parts):
            one = op.made.name if len(parts) == 1 else _name(op.made.name, start)
            self.made.append(replace(op, out=replace(op.made, name=one), tiles=(_name(op.ins[0], start),)))
            if number:
                last = op.made.name if number == len(parts) - 1 else f"{one}.so_far"
                kind = "add" if op.kind == "sum" else "maximum"
                self.made.append(TileOp(kind, replace(op.made, name=last), (total, one), (), (), op.source))
                one = last
            total = one


def _name(tile: str, start: int) -> str:
    return f"{tile}@{start}"
