"""Statements over one sparse matrix as a pipeline: its compressed level is a ragged axis, dense levels are axes.

A matrix has ``rows``, and for each row *edges*: the entries that it stores. A statement's index runs along the rows
(its values belong to nodes), along the columns (they belong to edges: what is read there is gathered), or along
features. Which of these an index is follows from the statements that share a value with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tilestream.errors import SparseError
from tilestream.ir.axes import At, Axis, Level, Loop, Spread, View, along
from tilestream.ir.pipeline import Pipeline, Role, Stage, Tensor, Tile, TileOp
from tilestream.sparse.einsum import Access, EinsumProgram, Statement
from tilestream.sparse.lowering.ops import fill_after
from tilestream.sparse.pipelines.attention import weighted

NODES, EDGES = Axis("nodes"), Axis("edges", of="nodes", bounds="starts")
STEP, CTAS = 8, 264
"""Nodes, and edges of one, that a worker of the reference machine takes at once; and workers."""

UNARY = tuple("relu gelu gelu_tanh silu sigmoid tanh exp log sin cos neg abs sqrt rsqrt reciprocal square".split())
BINARY = {"add": "add", "sub": "sub", "mul": "mul", "div": "div", "max": "maximum", "min": "minimum"}
BINARY |= {"shift": "sub", "share": "div"}
"""By operation of a statement, that of a tile: ``shift`` and ``share`` are others only where nothing is stored."""
REVERSED = {"rsub": "sub", "rdiv": "div"}
COMBINES = {"add": "sum", "max": "max"}


class Unfit(Exception):
    """Why statements are no pipeline, in words, and the statement in the way."""

    def __init__(self, reason: str, statement: Statement) -> None:
        super().__init__(reason)
        self.reason, self.statement = reason, statement


class Along(StrEnum):
    """What an index runs along, if not features."""

    ROWS = "rows"
    COLUMNS = "columns"


Dim = Along | Axis


@dataclass(frozen=True)
class Matrix:
    """The sparse matrix that statements share, and which of its two dimensions has the rows."""

    name: str
    rows: int = 0

    @property
    def along(self) -> tuple[Along, Along]:
        return (Along.COLUMNS, Along.ROWS) if self.rows else (Along.ROWS, Along.COLUMNS)


@dataclass(frozen=True)
class Bound:
    """A dense tensor of the program as one of the pipeline: its dimensions ``dims``, in this order."""

    name: str
    tensor: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Lowered:
    """A pipeline, the dense tensors that it reads, and where the program's tensors are in its results.

    Attributes:
        values: whether it reads what the matrix stores, beside where.
        of_edges: names of what is made at each entry.
    """

    matrix: Matrix
    pipeline: Pipeline
    reads: tuple[Bound, ...]
    results: tuple[Bound, ...]
    values: bool
    of_edges: frozenset[str]


@dataclass(frozen=True)
class _Value:
    """What a statement makes: the tile, what its dimensions run along, and what is not stored stands for.

    ``stored``: whether it exists at entries of the matrix alone.
    """

    tile: Tile
    dims: tuple[Dim, ...]
    fill: float
    stored: bool


def lowered(
    program: EinsumProgram,
    members: Sequence[Statement],
    matrix: Matrix,
    read: frozenset[str],
    dtype: str,
    partial: bool = False,
) -> Lowered:
    """The pipeline of statements that share a sparse matrix.

    Args:
        members: in program order; what other statements made that they read is dense.
        read: names of members that others read.
        dtype: of what lies in memory. All is computed in fp32.
        partial: more statements may come, which read what entries have: only what rows have is stored.

    Raises:
        Unfit: with the statement in the way.
    """
    return _Lowering(program, members, matrix, dtype).lowered(read, partial)


class _Lowering:
    def __init__(self, program: EinsumProgram, members: Sequence[Statement], matrix: Matrix, dtype: str) -> None:
        self.program, self.members, self.matrix, self.dtype = program, members, matrix, dtype
        self.makers = {s.name: s for s in members}
        self.values: dict[str, _Value] = {}
        self.ops: list[TileOp] = []
        self.tensors: dict[str, Tensor] = {}
        self.features: list[Axis] = []
        self._reads: dict[tuple[str, tuple[Dim, ...]], tuple[Bound, Tile | View]] = {}
        self._at = members[0]
        self.along = self._roles()

    def lowered(self, read: frozenset[str], partial: bool) -> Lowered:
        for statement in self.members:
            self._at = statement
            self.values[statement.name] = self._made(statement)
        if partial:
            read = frozenset(n for n in read if Along.COLUMNS not in self.values[n].dims)
        results = [self._store(s) for s in self.members if s.name in read]
        ops = _needed(self.ops)
        used = {name for op in ops for name in (*op.params, *(c.index for v in op.views for c in v.at or ()))}
        lists = [Tensor(n, Role.PARAMETER, (Axis(f"{n}.rows"),), "i32") for n in ("starts", "starts.busy")]
        tensors = [t for name, t in self.tensors.items() if name in used]
        if results and not any(EDGES in t.axes for t in tensors):
            self._no("it reads nothing of an entry")
        mesh = (Spread(Level.GRID, CTAS, ("nodes",)),)
        stage = Stage("all", ops, (Loop("nodes", STEP), Loop("edges", STEP)), mesh)
        pipeline = Pipeline("sparse", (*tensors, *lists), (stage,), (), strategy="segments")
        reads = tuple(dict.fromkeys(bound for bound, _ in self._reads.values() if bound.name in used))
        of_edges = frozenset(n for n, v in self.values.items() if Along.COLUMNS in v.dims)
        return Lowered(self.matrix, pipeline, reads, tuple(results), "values" in used, of_edges)

    def _no(self, reason: str) -> None:
        raise Unfit(reason, self._at)

    # -- indices

    def _roles(self) -> dict[str, dict[str, Along]]:
        """Of each member, which of its indices run along rows or columns."""
        dims: dict[str, dict[int, Along]] = {self.matrix.name: dict(enumerate(self.matrix.along))}
        found: dict[str, dict[str, Along]] = {s.name: {} for s in self.members}
        known = -1
        while known != (known := sum(map(len, (*dims.values(), *found.values())))):
            for s in (*self.members, *reversed(self.members)):
                own = [
                    a for a in (*s.operands, Access(s.name, s.indices)) if a.tensor in {*self.makers, self.matrix.name}
                ]
                for access in own:
                    for d, role in dims.get(access.tensor, {}).items():
                        if found[s.name].setdefault(access.indices[d], role) is not role:
                            raise Unfit(f"{access.tensor} is read along the other dimension of {self.matrix.name}", s)
                for access in own:
                    at = dims.setdefault(access.tensor, {})
                    at |= {d: found[s.name][i] for d, i in enumerate(access.indices) if i in found[s.name]}
        for s in self.members:
            if len(set(found[s.name].values())) < len(found[s.name]):
                raise Unfit(f"it reads {self.matrix.name} under two indices for one", s)
        return found

    def _dim(self, index: str) -> Dim:
        """What an index of the statement at hand runs along; features of members are those of their tiles."""
        role = self.along[self._at.name].get(index)
        if role is not None:
            return role
        for access in self._at.operands:
            if access.tensor in self.values and index in access.indices:
                return self.values[access.tensor].dims[access.indices.index(index)]
        return self._fresh[index]

    def _begin(self, statement: Statement) -> None:
        """Axes for features that no member has."""
        self._fresh: dict[str, Axis] = {}
        for access in statement.operands:
            for d, index in enumerate(access.indices):
                if index in self._fresh or index in self.along[statement.name]:
                    continue
                known = (
                    self.values[a.tensor].dims[a.indices.index(index)]
                    for a in statement.operands
                    if a.tensor in self.values and index in a.indices
                )
                if next(known, None) is None:
                    axis = Axis(f"f{len(self.features)}", self.program.shapes[access.tensor][d])
                    self._fresh[index] = axis
                    self.features.append(axis)

    def _axes(self, indices: Sequence[str]) -> tuple[Axis, ...]:
        """The axes of a value under these indices: edges, or nodes, or neither, then features in one order."""
        dims = [self._dim(i) for i in indices]
        rows = (EDGES,) if Along.COLUMNS in dims else (NODES,) if Along.ROWS in dims else ()
        features = {d for d in dims if isinstance(d, Axis)}
        return (*rows, *(f for f in self.features if f in features))

    # -- statements

    def _made(self, s: Statement) -> _Value:
        self._begin(s)
        fill, stored = self._fill(s)
        dims = tuple(self._dim(i) for i in s.indices)
        if s.reduced:
            return _Value(self._reduced(s, fill), dims, fill, stored and Along.COLUMNS in dims)
        if Along.ROWS not in dims and Along.COLUMNS not in dims:
            self._no("it has no rows of the matrix")
        return _Value(self._elementwise(s, s.indices), dims, fill, stored)

    def _fill(self, s: Statement) -> tuple[float, bool]:
        """What stands where nothing is stored, and whether the result exists at entries alone."""
        stored = [self._is_stored(a.tensor) for a in s.operands]
        fills = [self.values[a.tensor].fill if a.tensor in self.values else 0.0 for a in s.operands]
        if not any(stored):
            return 0.0, False
        try:
            fill, complete = fill_after(s, fills)
        except SparseError as error:
            self._no(error.cause)
            raise
        whole = self.makers.get(s.operands[1].tensor) if s.op == "div" and len(stored) == 2 else None
        shares = whole is not None and [a.tensor for a in whole.operands] == [
            s.operands[0].tensor
        ]  # 0 over a sum with it
        joins = all(stored) or s.op in ("mul", "mask") or (stored[0] and (fills[0] != 0 or shares or s.op == "share"))
        if (complete and not shares) or not joins:
            self._no("it makes something of what is not stored")
        if s.reduction == "max" and s.reduced and fill == 0 and self._over_edges(s):
            self._no("a maximum over zeros that are not stored")
        return (0.0 if s.reduced else fill), True

    def _is_stored(self, tensor: str) -> bool:
        return tensor == self.matrix.name or (tensor in self.values and self.values[tensor].stored)

    def _over_edges(self, s: Statement) -> bool:
        return Along.COLUMNS in (self._dim(i) for i in s.reduced)

    def _reduced(self, s: Statement, fill: float) -> Tile:
        if Along.ROWS in (self._dim(i) for i in s.reduced):
            self._no("it sums over rows of the matrix")
        if self._over_edges(s) and not any(self._is_stored(a.tensor) for a in s.operands):
            self._no("it sums over all columns")
        axes = self._axes(s.indices)
        if not axes or axes[0].size is not None:
            self._no("it has no rows of the matrix")
        attrs = (("empty", fill),) if s.reduction == "max" and self._over_edges(s) else ()
        if s.op == "mul" and s.scalar is None:
            found = weighted(self.makers, s) if self._over_edges(s) else None
            if found is not None and found[0].tensor in self.values:
                score, weights, values = found
                operands = [self._operand(Access(score.tensor, weights.indices)), self._operand(values)]
                return self._op("product", axes, operands, combine="softmax")
            return self._op("product", axes, [self._operand(a) for a in s.operands], attrs, COMBINES[s.reduction])
        both = tuple(dict.fromkeys(i for a in s.operands for i in a.indices))
        each = self._elementwise(s, both)
        return self._op("product", axes, [along(each.name, [a.name for a in each.axes])], attrs, COMBINES[s.reduction])

    def _elementwise(self, s: Statement, indices: Sequence[str]) -> Tile:
        axes = self._axes(indices)
        operands = [self._operand(a) for a in s.operands[: 1 if s.op == "mask" else 2]]
        if s.op in ("mask", "copy", "identity") or (s.op == "cast" and s.scalar is not None and s.scalar >= 24):
            if isinstance(operands[0], View) and operands[0].of not in self.tensors:
                return next(op.out for op in self.ops if op.out is not None and op.out.name == operands[0].of)
            return self._op("copy", axes, operands)
        if len(s.operands) == 1 and s.scalar is None:
            if s.op not in UNARY:
                self._no(f"no tile op does {s.op!r}")
            return self._op(s.op, axes, operands)
        kind = BINARY.get(s.op) or (REVERSED.get(s.op) if s.scalar is not None else None)
        if kind is None:
            self._no(f"no tile op does {s.op!r}")
        assert kind is not None
        turned = s.op in REVERSED if s.scalar is not None else self._is_fixed(operands[0])
        attrs = [("scalar", s.scalar)] if s.scalar is not None else []
        return self._op(kind, axes, operands, (*attrs, *([("reversed", 1)] if turned else [])))

    def _is_fixed(self, operand: View) -> bool:
        return operand.of in self.tensors

    def _op(
        self,
        kind: str,
        axes: tuple[Axis, ...],
        operands: Sequence[View],
        attrs: Sequence[tuple[str, float | int | str]] = (),
        combine: str = "sum",
    ) -> Tile:
        tiles = tuple(v for v in operands if not self._is_fixed(v))
        if not tiles and kind != "copy":
            self._no("none of its operands has rows of the matrix")
        made = Tile(f"{kind}{len(self.ops)}", axes, "f32")
        fixed = tuple(v for v in operands if self._is_fixed(v))
        self.ops.append(TileOp(kind, made, tiles, fixed, tuple(attrs), self._at.source or str(self._at), combine))
        return made

    # -- operands

    def _operand(self, access: Access) -> View:
        """What a statement reads: a tile under the statement's axes, or a tensor that has neither rows nor edges."""
        if access.tensor in self.values:
            value = self.values[access.tensor]
            turned = {
                own.name: dim.name
                for own, dim in zip(value.dims, map(self._dim, access.indices), strict=True)
                if isinstance(own, Axis) and isinstance(dim, Axis)
            }
            return along(value.tile.name, [turned.get(a.name, a.name) for a in value.tile.axes])
        if access.tensor == self.matrix.name:
            self.tensors.setdefault("values", Tensor("values", Role.INPUT, (EDGES,), self.dtype))
            return self._load(access.tensor, "values", (), (EDGES,), At(("edges",)))
        dims = tuple(self._dim(i) for i in access.indices)
        if Along.ROWS in dims and Along.COLUMNS in dims:
            self._no(f"{access.tensor} has an element for each row and column")
        places = [d for d in dims if isinstance(d, Axis)]
        features = [f for f in self.features if f in places]
        first = [d for d, dim in enumerate(dims) if isinstance(dim, Along)]
        order = (*first, *(dims.index(f) for f in features))
        if len(order) != len(dims):
            self._no(f"{access.tensor} has a dimension twice")
        title = f"x{len({b.name for b, _ in self._reads.values()})}"
        if not first:
            if (access.tensor, dims) not in self._reads:
                self.tensors[title] = Tensor(title, Role.PARAMETER, tuple(features), self.dtype)
                self._reads[access.tensor, dims] = (
                    Bound(title, access.tensor, order),
                    along(title, [f.name for f in features]),
                )
            found = self._reads[access.tensor, dims][1]
            assert isinstance(found, View)
            return found
        by_edge = Along.COLUMNS in dims
        if by_edge:
            self.tensors.setdefault("columns", Tensor("columns", Role.INPUT, (EDGES,), "i32"))
        rows = At(("edges",), index="columns") if by_edge else At(("nodes",))
        if (access.tensor, dims) not in self._reads:
            known = [b.name for b, _ in self._reads.values() if (b.tensor, b.dims) == (access.tensor, order)]
            name = known[0] if known else title
            if not known:
                self.tensors[name] = Tensor(name, Role.PARAMETER, (Axis(f"{name}.rows"), *features), self.dtype)
            tile = self._load("", name, features, ((EDGES if by_edge else NODES), *features), rows)
            made = next(op.out for op in self.ops if op.out is not None and op.out.name == tile.of)
            self._reads[access.tensor, dims] = Bound(name, access.tensor, order), made
        tile = self._reads[access.tensor, dims][1]
        assert isinstance(tile, Tile)
        return along(tile.name, [a.name for a in tile.axes])

    def _load(self, key: str, name: str, features: Sequence[Axis], axes: tuple[Axis, ...], rows: At) -> View:
        loaded = next((op.out for op in self.ops if key and op.params == (name,)), None)
        if loaded is None:
            loaded = Tile(f"load{len(self.ops)}", axes, self.tensors[name].dtype)
            view = View(name, (rows, *(At((f.name,)) for f in features)))
            self.ops.append(TileOp("copy", loaded, (), (view,), (), self._at.source or str(self._at)))
        return along(loaded.name, [a.name for a in loaded.axes])

    def _store(self, statement: Statement) -> Bound:
        self._at = statement
        value = self.values[statement.name]
        if Along.COLUMNS in value.dims or value.tile.axes[:1] != (NODES,):
            self._no(f"what {statement.name} has at each entry is read by other statements")
        features = [a for a in value.tile.axes if a.size is not None]
        if {d for d in value.dims if isinstance(d, Axis)} != set(features):
            self._no(f"{statement.name} repeats elements")
        name = f"y{sum(op.kind == 'store' for op in self.ops)}"
        self.tensors[name] = Tensor(name, Role.OUTPUT, (NODES, *features), self.dtype)
        own = [a.name for a in value.tile.axes]
        self.ops.append(
            TileOp("store", None, (along(value.tile.name, own),), (along(name, own),), (), statement.source)
        )
        order = (value.dims.index(Along.ROWS), *(value.dims.index(f) for f in features))
        return Bound(name, statement.name, order)


def _needed(ops: Sequence[TileOp]) -> tuple[TileOp, ...]:
    """Those that a store needs."""
    wanted: set[str] = set()
    kept: list[TileOp] = []
    for op in reversed(ops):
        if op.out is None or op.out.name in wanted:
            kept.append(op)
            wanted |= {*op.ins}
    return tuple(reversed(kept))
