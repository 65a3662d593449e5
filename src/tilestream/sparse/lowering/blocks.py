"""Blocked programs: which indices run over blocks, and what each statement does inside a tile.

Values are [b, b] tiles. The two innermost indices of a tensor run along a tile's rows and columns; an index that two
factors and their product share (a batch, a head) stays scalar. A vector's tile repeats it along the other axis.

The last block of an index may hold less than the others. What lies behind the index's end is padding: 0 in what is
read, anything in what is computed, and gone before it is summed over or written.
"""

from __future__ import annotations

from collections.abc import Callable

from tilestream.errors import SparseError
from tilestream.sparse.fusion import Fused, Leaf, Op, View
from tilestream.sparse.lowering.states import StreamLevel, StreamState
from tilestream.sparse.lowering.tiles import Edge, TileFormat
from tilestream.sparse.stream.builder import Builder
from tilestream.sparse.stream.graph import Port

Tile = tuple[str | None, str | None]
"""The indices along a tile's rows and columns; None: the same value all along."""

UNIT = "unit"
"""The index of one block that stands where a result has no index for an axis of its tiles."""


class Blocks:
    """The tiles of a region. Makes the sizes of blocked indices counts of blocks.

    Raises:
        SparseError: operands whose tiles do not fit together.
    """

    def __init__(self, fused: Fused, block: int) -> None:
        self.block = block
        self.blocked = _blocked(fused)
        self.ragged: dict[str, Edge] = {}
        for index in sorted(self.blocked):
            edge = Edge(fused.sizes[index], block)
            if edge.size % block:
                self.ragged[index] = edge
            fused.sizes[index] = edge.blocks
        self.tiles: dict[View, Tile] = {}
        self.inner: dict[Op, tuple[Tile, str]] = {}
        for view in fused.views:
            self.tiles[view] = self._leaf(view, fused) if isinstance(view, Leaf) else self._op(view)

    def format(self, leaf: Leaf, kinds: tuple[str, ...], order: tuple[int, ...], masks: bool) -> TileFormat:
        """How a leaf is stored; ``masks``: it says where something is, so that its blocks have to be full."""
        rows, columns = (None if i is None else leaf.indices.index(i) for i in self.tiles[leaf])
        return TileFormat(kinds, order, self.block, (rows, columns), masks)

    def _leaf(self, leaf: Leaf, fused: Fused) -> Tile:
        own = [i for i in leaf.indices if i in self.blocked]
        if len(own) == 2:
            return own[0], own[1]
        if not own:
            return None, None
        user = next((v for v in fused.views if isinstance(v, Op) and leaf in v.operands), None)
        around = [i for i in (*user.indices, *user.reduced) if i in self.blocked] if user else own
        return (None, own[0]) if around[-1] == own[0] and len(around) > 1 else (own[0], None)

    def _op(self, op: Op) -> Tile:
        """The tile of a result; that of its value before the reduction is kept in ``inner``, with the way to it."""
        tiles = [self.tiles[v] for v in op.operands]
        shared = _factor(op, tiles)
        if shared:
            left, right = ([i for i in t if i not in (shared, None)] for t in tiles)
            tile: Tile = (left[0] if left else None, right[0] if right else None)
        else:
            names = [i for i in dict.fromkeys((*op.indices, *op.reduced)) if i in self.blocked]
            fitting = [t for t in tiles if set(names) <= set(t)]
            tile = fitting[0] if fitting else (names[0], names[1]) if len(names) == 2 else (None, None)
        self.inner[op] = (tile, shared or "")
        rows, columns = tile
        if columns in op.reduced:
            columns = None
        if rows in op.reduced:
            rows, columns = columns, None
        return rows, columns

    def compute(self, build: Builder, op: Op, values: list[Port], edge: Callable[[str], Port]) -> Port:
        """The value of a statement before the reduction over blocks, reduced within the tile.

        ``edge``: the tiles of a ragged index, one an element of the innermost loop (``Edge``).
        """
        statement, source = op.statement, op.statement.source
        (rows, columns), shared = self.inner[op]
        tiles = [self.tiles[v] for v in op.operands]

        def unary(name: str, value: Port) -> Port:
            return build.alu(name, [value], None, op.name, source)

        def without_padding(value: Port, index: str, axis: int, reduction: str = "add") -> Port:
            """The value with what its reduction leaves as it is behind the end of an index."""
            if index not in self.ragged:
                return value
            inside = edge(index) if axis else unary("transpose", edge(index))
            value = build.alu("keep", [value, inside], None, op.name, source)
            if reduction == "max":  # the logarithm of ones and zeros: 0, and minus infinity
                value = build.alu("add", [value, unary("log", inside)], None, op.name, source)
            return value

        if shared:
            values = [
                value if isinstance(view, Leaf) else without_padding(value, shared, tile.index(shared))
                for view, tile, value in zip(op.operands, tiles, values, strict=True)
            ]
            first = values[0] if tiles[0][1] == shared else unary("transpose", values[0])
            product = "matmul" if tiles[1][0] == shared else "matmul_t"
            value = build.alu(product, [first, values[1]], None, op.name, source)
        else:
            fitted = []
            for tile, value in zip(tiles, values, strict=False):
                if not _fits(tile, (rows, columns)):
                    if not _fits((tile[1], tile[0]), (rows, columns)):
                        raise SparseError(f"{statement} ({source}): its tiles do not fit", "use block=1 here")
                    value = unary("transpose", value)
                fitted.append(value)
            plain = statement.op in ("mask", "copy")
            value = fitted[0] if plain else build.alu(statement.op, fitted, statement.scalar, op.name, source)
        across = "rowsum" if statement.reduction == "add" else "rowmax"
        if columns is not None and columns in op.reduced:
            value, columns = unary(across, without_padding(value, columns, 1, statement.reduction)), None
        if rows is not None and rows in op.reduced:
            value = unary(across, unary("transpose", without_padding(value, rows, 0, statement.reduction)))
        return value

    def stored(self, build: Builder, op: Op, state: StreamState) -> StreamState:
        """An output with a level for each axis of its tiles, of one block where it has no index there."""
        levels, value = list(state.levels), state.port
        for axis, index in enumerate(self.tiles[op]):
            if index is None:
                ref = build.root(f"range_{UNIT}")
                for level in levels:
                    ref = build.repeat(ref, level.crd, level.index, op.name)
                crd, _ = build.scan(f"range_{UNIT}", 0, UNIT, ref, op.name)
                value = build.repeat(value, crd, UNIT, op.name)
                levels.append(StreamLevel(f"{UNIT}{axis}", crd, True, True))
        return StreamState(op, tuple(levels), value, 0)

    def dims(self, op: Op) -> tuple[str, ...]:
        """An output's dimensions as it is stored: scalar ones first, then the tile's rows and columns."""
        axes = [index or f"{UNIT}{axis}" for axis, index in enumerate(self.tiles[op])]
        return (*(i for i in op.indices if i not in axes), *axes)


def _fits(tile: Tile, wanted: Tile) -> bool:
    return tile[0] in (wanted[0], None) and tile[1] in (wanted[1], None)


def _factor(op: Op, tiles: list[Tile]) -> str | None:
    """The index that a product of tiles sums over: one that both have and that is reduced, if they differ otherwise."""
    if op.statement.op != "mul" or op.statement.reduction != "add" or len(tiles) != 2:
        return None
    both = [i for i in tiles[0] if i is not None and i in tiles[1] and i in op.reduced]
    rest = [{i for i in t if i not in (*both, None)} for t in tiles]
    return both[0] if len(both) == 1 and not rest[0] & rest[1] else None


def _blocked(fused: Fused) -> set[str]:
    """Indices that run over blocks: at most two a tensor, and one of each kind in a product."""
    blocked = set(fused.sizes)
    for view in fused.views:
        if isinstance(view, Op) and _contracts(view):
            blocked -= set(view.operands[0].indices) & set(view.operands[1].indices) & set(view.indices)
    while True:
        before = len(blocked)
        for view in fused.views:
            if isinstance(view, Op) and _contracts(view):
                left, right = (set(v.indices) for v in view.operands)
                parts = [left - right, right - left, left & right & set(view.reduced)]
                order = (*view.indices, *view.reduced)
                kinds = [[i for i in order if i in part and i in blocked] for part in parts]
                blocked -= {i for kind in kinds for i in kind[:-1]}
            else:
                own = (*view.indices, *view.reduced) if isinstance(view, Op) else view.indices
                blocked -= set([i for i in dict.fromkeys(own) if i in blocked][:-2])
        if len(blocked) == before:
            return blocked


def _contracts(op: Op) -> bool:
    if op.statement.op != "mul" or op.statement.reduction != "add" or len(op.operands) != 2:
        return False
    left, right = (set(v.indices) for v in op.operands)
    return bool(left & right & set(op.reduced))
