"""The intermediate representation. Everything is a Pipeline.

Every tile op is one indexed reduction: *combine the operands element by element, then sum over each axis that an
operand has and the result lacks*. A product, a bias gradient, a row sum, a split of a hidden layer differ in their
axes alone. Ops of rows (``linear``, ``layer_norm``, ``cat``) are macros of it (``ir.plain``).

Most pipelines stream the rows of ``[rows, features]`` matrices, a tile of rows at a time, through stages that are
resident together. The number of rows is not part of it: one pipeline, and the kernel made from it, serves every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import ceil, prod
from operator import is_
from typing import Any

from tilestream.errors import IRError
from tilestream.ir.axes import ROWS, Axis, Level, Loop, Spread, View, outer_axes, sizes
from tilestream.ir.once import hashed_once
from tilestream.ir.tileops import OPS

TILE_ROWS = 64
"""Rows of a tile unless a stage says otherwise: what one warpgroup multiplies at once."""

DTYPE_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
INDEX_BYTES = {"i32": 4, "i64": 8}
ELEMENT_BYTES = DTYPE_BYTES | INDEX_BYTES


class Role(StrEnum):
    """What a tensor is to its pipeline: streamed in, streamed out, or a whole operand."""

    INPUT = "input"
    OUTPUT = "output"
    PARAMETER = "parameter"


class Transport(StrEnum):
    """Where a queue's ring of tiles lives. DRAM means a whole tensor, with a barrier behind it."""

    DSM = "dsm"
    L2 = "l2"
    DRAM = "dram"


class Residency(StrEnum):
    """Whether a stage's weights are loaded once and kept, or streamed again for every tile."""

    RESIDENT = "resident"
    STREAMED = "streamed"


@dataclass(frozen=True)
class Shard:
    """Placement of the tiles of a row stage over its two consumer warpgroups, read off its mesh.

    ``Shard(0)``: by rows, each warpgroup has a tile of its own, features up to 256 wide.
    ``Shard(1)``: by columns, both share one tile, features up to 512 wide.
    """

    dim: int


@dataclass(frozen=True)
class Tensor:
    """A tensor in device memory: ``axes`` say where each dimension has its size from.

    Attributes:
        dtype: ``bf16``, ``f16`` or ``f32``; of an index ``i32`` or ``i64``.
        by_columns: of a weight, that its first dimension is the contiguous one: ``[out, in]`` that lies ``[in, out]``.
    """

    name: str
    role: Role
    axes: tuple[Axis, ...]
    dtype: str
    by_columns: bool = False

    @staticmethod
    def of(name: str, role: Role, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A tensor of a row pipeline: ``[rows, *shape]`` for inputs and outputs, ``shape`` for parameters.

        An index is an input of no features: ``shape`` is empty.
        """
        rows = () if role is Role.PARAMETER else (ROWS,)
        return Tensor(name, role, (*rows, *sizes(*shape)), dtype)

    @staticmethod
    def table(name: str, rows: int | None, features: int, dtype: str) -> Tensor:
        """Rows that a load takes through an index. A parameter; how many ``rows`` it has may be read at the call."""
        return Tensor(name, Role.PARAMETER, (Axis(f"{name}.rows", rows), *sizes(features)), dtype)

    @staticmethod
    def pictures(name: str, height: int, width: int, channels: int, dtype: str) -> Tensor:
        """``[images, height, width, channels]``, of which loads take a tap (``ir.taps``). A parameter; how many images
        it has is read at the call, and with it the number of rows."""
        return Tensor(name, Role.PARAMETER, (Axis(f"{name}.images"), *sizes(height, width, channels)), dtype)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all dimensions but the rows of inputs and outputs (and others that are read at the call)."""
        return tuple(a.size for a in self.axes if a.size is not None)

    @property
    def features(self) -> int:
        return self.shape[-1] if self.shape else 1


@dataclass(frozen=True)
class Tile:
    """One value; rounded to ``dtype`` when handed on. A worker has one block of it at a time where axes are looped."""

    name: str
    axes: tuple[Axis, ...]
    dtype: str

    @staticmethod
    def of(name: str, features: int, dtype: str) -> Tile:
        """A tile of a row pipeline: rows by ``features`` columns. One column needs no axis of its own."""
        return Tile(name, (ROWS, *(sizes(features) if features != 1 else ())), dtype)

    @cached_property
    def features(self) -> int:
        """Columns: elements for each position of the axes that are read at the call."""
        return prod(a.size for a in self.axes if a.size is not None)

    @property
    def row_bytes(self) -> int:
        """Of one row, or other position of the axes that are read at the call."""
        return self.features * DTYPE_BYTES[self.dtype]


@hashed_once
@dataclass(frozen=True)
class TileOp:
    """One operation on tiles; ``kind`` is a key of ``tileops.OPS``, which gives the signature.

    Attributes:
        tiles: tiles that it reads; a name alone stands for the tile under its own axes.
        tensors: tensors that it reads. A store writes the one it names.
        attrs: names and values, as ``(("eps", 1e-5),)``; docs/ir.md lists those of each kind.
        combine: what summing means here: ``sum``, ``max``, ``min``, ``mul``, or ``softmax``: of a product whose first
            operand is a score, all operands behind it weighted by ``exp(score)`` over the sum of these.
        source: the user's line; it does not make layers of a model different.
    """

    kind: str
    out: Tile | None
    tiles: tuple[View | str, ...] = ()
    tensors: tuple[View | str, ...] = ()
    attrs: tuple[tuple[str, float | int | str], ...] = ()
    source: str = field(default="", compare=False)
    combine: str = "sum"

    @cached_property
    def views(self) -> tuple[View, ...]:
        """All operands, tiles first."""
        return tuple(View(v) if isinstance(v, str) else v for v in (*self.tiles, *self.tensors))

    @cached_property
    def ins(self) -> tuple[str, ...]:
        """Names of the tiles."""
        return tuple(v if isinstance(v, str) else v.of for v in self.tiles)

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(v if isinstance(v, str) else v.of for v in self.tensors)

    @property
    def made(self) -> Tile:
        """What it makes, of an op that is known to make a tile."""
        assert self.out is not None, f"{self.kind} at {self.source} makes no tile"
        return self.out

    @cached_property
    def result_axes(self) -> tuple[str, ...]:
        """Axes of what it makes, or of where it writes."""
        return tuple(a.name for a in self.out.axes) if self.out is not None else self.views[-1].axes

    @cached_property
    def mentions(self) -> frozenset[str]:
        """Every axis that it ranges over."""
        return frozenset(self.result_axes).union(*(v.axes for v in self.views))

    @property
    def index(self) -> str:
        """The tensor that names the rows of a load of ops of rows; empty where rows come in order."""
        return self.params[1] if self.kind == "load" and len(self.params) == 2 else ""

    @property
    def receivers(self) -> str:
        """The tensor that says of which node each row is, ascending, of a store of what each node's rows sum to by
        ``combine``; empty where rows are stored as they are. Behind it comes the one that says where nodes start."""
        return self.params[1] if self.kind == "store" and len(self.params) == 3 else ""

    def attr(self, name: str, default: float | int | str | None = None) -> float | int | str | None:
        return dict(self.attrs).get(name, default)

    @cached_property
    def misfit(self) -> IRError | None:
        """What of its operands or attributes does not fit the signature of its kind. Looked at once: passes make
        pipelines of the same ops again and again."""
        return OPS[self.kind].misfit(self)

    def reading(self, names: dict[str, str]) -> TileOp:
        """The same op of other tiles: ``names`` maps old names to new ones."""
        if all(names.get(n, n) == n for n in self.ins):
            return self

        def renamed(v: View | str) -> View | str:
            return names.get(v, v) if isinstance(v, str) else replace(v, of=names.get(v.of, v.of))

        return replace(self, tiles=tuple(map(renamed, self.tiles)))


@hashed_once
@dataclass(frozen=True)
class Stage:
    """A persistent worker: take tiles, apply ``ops`` in order, hand tiles on.

    Attributes:
        loops: outermost first. Neighbouring ops that mention an axis share its loop (``derive.nest``).
        mesh: the workers, by directions. One CTA a worker of grid and cluster.
        resident: tensors that stay in shared memory or registers; other operands are streamed.
        in_flight: products under way at once in a warpgroup (1 or 2): with 2 the tensor cores never wait for the next,
            with 1 a weight page is free as soon as it was used, and not only when the next page has come.
    """

    name: str
    ops: tuple[TileOp, ...]
    loops: tuple[Loop, ...] = (Loop(ROWS.name, TILE_ROWS),)
    mesh: tuple[Spread, ...] = ()
    resident: tuple[str, ...] = ()
    in_flight: int = 2

    @staticmethod
    def of(
        name: str,
        ops: tuple[TileOp, ...],
        replicas: int = 1,
        placement: Shard = Shard(0),
        residency: Residency = Residency.STREAMED,
        group: int = 1,
        in_flight: int = 2,
    ) -> Stage:
        """A stage that streams rows: ``replicas`` CTAs share them out, and two warpgroups a step's tiles.

        ``group`` replicas form a cluster that loads each weight page once and multicasts it (1 or 2).
        """
        bare = Stage(name, ops, in_flight=in_flight)
        return bare.with_(replicas=replicas, placement=placement, residency=residency, group=group)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: of one step of the loop over them."""
        return self.loops[0].tile

    def with_(self, **words: Any) -> Stage:
        """The same row stage with other ``replicas``, ``placement``, ``residency``, ``group`` or ``in_flight``."""
        replicas = words.get("replicas", self.replicas)
        placement = words.get("placement", self.placement)
        group = words.get("group", self.group)
        rows = (self.loops[0].axis,)
        if group < 1 or replicas % group:
            raise IRError(f"stage {self.name!r} has {replicas} replicas in groups of {group}", "use a multiple of it")
        mesh = [Spread(Level.GRID, replicas // group, rows)]
        if group != 1:
            mesh.append(Spread(Level.CLUSTER, group, rows))
        mesh.append(Spread(Level.WARPGROUP, 2, rows if placement.dim == 0 else ()))
        resident = self.resident
        if "residency" in words:
            operands = dict.fromkeys(n for op in self.ops if op.kind not in ("load", "store") for n in op.params)
            resident = tuple(operands) if words["residency"] is Residency.RESIDENT else ()
        return replace(self, mesh=tuple(mesh), resident=resident, in_flight=words.get("in_flight", self.in_flight))

    def workers(self, level: Level) -> int:
        """Workers at ``level``, of all directions together."""
        return prod(d.size for d in self.mesh if d.level is level)

    @cached_property
    def outer(self) -> dict[str, str]:
        """The axis around each ragged one that its tiles have."""
        return outer_axes(a for tile in self.defined().values() for a in tile.axes)

    @cached_property
    def blocks(self) -> dict[str, int]:
        """Positions of each looped axis that a worker takes a step."""
        return {loop.axis: loop.tile for loop in self.loops}

    def parts(self, axis: str) -> int:
        """Workers that an axis is dealt to."""
        return prod(d.size for d in self.mesh if axis in d.axes)

    def block(self, axis: str, size: Mapping[str, int]) -> int:
        """Positions of an axis that a worker takes at once: of a looped one the loop's tile, else an equal part."""
        return self.blocks.get(axis) or max(1, ceil(size[axis] / self.parts(axis)))

    def rounds(self, axis: str, size: Mapping[str, int]) -> int:
        """Rounds in which all workers together go along an axis, ``size`` being that of every axis."""
        return ceil(size[axis] / (self.block(axis, size) * self.parts(axis)))

    @cached_property
    def replicas(self) -> int:
        """CTAs of the stage."""
        return self.workers(Level.GRID) * self.workers(Level.CLUSTER)

    @cached_property
    def group(self) -> int:
        """CTAs of a cluster."""
        return self.workers(Level.CLUSTER)

    @cached_property
    def placement(self) -> Shard:
        rows = self.loops[0].axis if self.loops else ""
        return Shard(0 if all(rows in d.axes for d in self.mesh if d.level is Level.WARPGROUP) else 1)

    @property
    def residency(self) -> Residency:
        return Residency.RESIDENT if self.resident else Residency.STREAMED

    @cached_property
    def tiles_per_step(self) -> int:
        """Tiles that one replica works on at once: one a warpgroup, or one shared by both."""
        return 2 if self.placement.dim == 0 else 1

    @property
    def source(self) -> str:
        return next((op.source for op in self.ops if op.source), "")

    @cached_property
    def makers(self) -> dict[str, TileOp]:
        """The op that makes each tile, by the tile's name."""
        return {op.out.name: op for op in self.ops if op.out is not None}

    def defined(self) -> dict[str, Tile]:
        return {name: op.made for name, op in self.makers.items()}

    def taken(self) -> tuple[str, ...]:
        """Names of the tiles that ``ops`` use and do not define: they come from queues."""
        return tuple(dict.fromkeys(n for op in self.ops for n in op.ins if n not in self.makers))


@dataclass(frozen=True)
class Queue:
    """A bounded ring of ``depth`` tiles from one stage to one or more (several: multicast).

    Tile ``t`` lives in slot ``t % depth``. A DRAM queue holds every tile and its depth is 0.

    Attributes:
        tile: name of the tile that it carries, which ``producer`` makes; ``producer`` and ``consumers`` name stages.
        depth: tiles that it has room for.
    """

    tile: str
    producer: str
    consumers: tuple[str, ...]
    transport: Transport = Transport.L2
    depth: int = 2
    source: str = field(default="", compare=False)


@hashed_once
@dataclass(frozen=True)
class Pipeline:
    """Stages and queues that are resident together; what a region becomes.

    Names are checked when it is made; whether it is legal, and fits a device, ``ir.verify`` and ``kernels.fits`` say.

    Attributes:
        tensors: all that it reads and writes in device memory.
        queues: those between stages; tiles that a stage makes for itself need none.
        strategy: how it was made, for reports: ``bulk``, ``vertical``, ``spatial`` or ``shared``.

    Raises:
        IRError: a name is defined twice, used before it is made, or not delivered by a queue.
    """

    name: str
    tensors: tuple[Tensor, ...]
    stages: tuple[Stage, ...]
    queues: tuple[Queue, ...] = ()
    strategy: str = "vertical"

    def __post_init__(self) -> None:
        check_names(self)

    def tensor(self, name: str) -> Tensor:
        return find(self.tensors, name, "tensor", self.name)

    def stage(self, name: str) -> Stage:
        return find(self.stages, name, "stage", self.name)

    def tiles(self) -> dict[str, Tile]:
        return {name: tile for stage in self.stages for name, tile in stage.defined().items()}

    @property
    def tile_rows(self) -> int:
        """Rows of a tile, of which all stages of a row pipeline take equally many."""
        return self.stages[0].tile_rows

    def axes(self) -> Iterator[Axis]:
        """Of all tensors and tiles; most come several times."""
        return (a for t in (*self.tensors, *self.tiles().values()) for a in t.axes)

    def sizes(self) -> dict[str, int]:
        """Sizes of the axes that have a name and are not read at the call."""
        return {a.name: a.size for a in self.axes() if a.name and a.size is not None}

    @cached_property
    def ragged(self) -> dict[str, Axis]:
        """Axes whose bounds are read from a tensor, by name."""
        return {a.name: a for a in self.axes() if a.of}

    def by_role(self, role: Role) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if t.role is role)

    def with_stages(self, stages: tuple[Stage, ...], queues: tuple[Queue, ...] | None = None) -> Pipeline:
        """The same pipeline with other stages; itself, of which much may be known, where they are its own."""
        if queues is None and len(stages) == len(self.stages) and all(map(is_, stages, self.stages)):
            return self
        return replace(self, stages=stages, queues=self.queues if queues is None else queues)


def find(items, name: str, what: str, where: str):
    """The item of that name.

    Raises:
        IRError: there is none; the remedy lists the names that there are.
    """
    if (item := next((item for item in items if item.name == name), None)) is not None:
        return item
    known = ", ".join(i.name for i in items) or "none"
    raise IRError(f"pipeline {where!r} has no {what} {name!r}", f"use one of: {known}")


def check_names(p: Pipeline) -> None:
    """Single assignment, every name defined before it is used, every tile delivered by a queue.

    Raises:
        IRError: naming the stage, the operation and the user's line.
    """
    tensors = {t.name: t for t in p.tensors}
    if len(tensors) != len(p.tensors):
        raise IRError(f"pipeline {p.name!r} has two tensors of one name", "give each tensor its own name")
    names = [s.name for s in p.stages]
    if len(set(names)) != len(names):
        raise IRError(f"pipeline {p.name!r} has two stages of one name", "give each stage its own name")
    home: dict[str, str] = {}
    for stage in p.stages:
        for op in stage.ops:
            if op.out is None:
                continue
            if op.out.name in home or op.out.name in tensors:
                raise IRError(
                    f"tile {op.out.name!r} is defined twice ({op.source or stage.name})", "rename one of the two"
                )
            home[op.out.name] = stage.name
    for stage in p.stages:
        have = {q.tile for q in p.queues if stage.name in q.consumers}
        for op in stage.ops:
            where = op.source or f"stage {stage.name!r}"
            if op.kind not in OPS:
                raise IRError(f"unknown tile op {op.kind!r} at {where}", f"use one of: {', '.join(sorted(OPS))}")
            for name in op.ins:
                if name not in have:
                    remedy = (
                        f"add Queue({name!r}, producer={home[name]!r}, consumers=({stage.name!r},))"
                        if home.get(name, stage.name) != stage.name
                        else "define it by an earlier op of the stage"
                    )
                    raise IRError(
                        f"{op.kind} at {where} uses tile {name!r}, which stage {stage.name!r} does not have", remedy
                    )
            for name in op.params:
                if name not in tensors:
                    raise IRError(
                        f"{op.kind} at {where} uses tensor {name!r}, which the pipeline does not have", "add it"
                    )
            if op.misfit is not None:
                raise op.misfit
            if op.out is not None:
                if op.out.features < 1:
                    raise IRError(f"{op.kind} at {where} makes a tile of {op.out.features} features", "use at least 1")
                if op.out.dtype not in DTYPE_BYTES:
                    raise IRError(
                        f"tile {op.out.name!r} has dtype {op.out.dtype!r}", f"use one of {', '.join(DTYPE_BYTES)}"
                    )
                have.add(op.out.name)
    for q in p.queues:
        for stage in (q.producer, *q.consumers):
            find(p.stages, stage, "stage", p.name)
        if home.get(q.tile) != q.producer:
            raise IRError(
                f"queue of {q.tile!r}: stage {q.producer!r} does not define that tile", "name the stage that does"
            )
