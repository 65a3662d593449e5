"""The family of row streams: tiles of rows through stages that stay on their SMs, joined by queues in the L2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import ceil

from tilestream.devices import Device
from tilestream.errors import InputError, TilestreamError, VerifyError
from tilestream.ir.axes import ROWS
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline, Stage, Tensor, TileOp, Transport
from tilestream.ir.plain import by_rows, plain
from tilestream.ir.sizes import tiles_of
from tilestream.kernels.costs import Counts
from tilestream.kernels.kernel import NO_ROW, Footprint, Frame, Kernel, halves
from tilestream.kernels.parts.params import LINE_BYTES, MAP_BYTES, Where, at_least_one
from tilestream.kernels.parts.source import Call, KernelSource, Part, Space
from tilestream.kernels.parts.tensor_maps import MatrixMap, PixelMap
from tilestream.kernels.shape import KernelShape, kernel_shape
from tilestream.kernels.stream.build import build
from tilestream.kernels.stream.cost import cost
from tilestream.kernels.stream.emit import THREADS, emit
from tilestream.kernels.stream.layout import lay_out
from tilestream.kernels.stream.node_sums import HUB, STARTS, carry, sums_of
from tilestream.kernels.stream.tables import INDEX, TABLE, MapSpec, PackSpec, Tables

MOST_ROWS = 2**31 - 1 - 2 * TILE_ROWS
"""Row numbers are 32-bit, and rounded up to a step of tiles."""


def _map(spec: MapSpec, tables: Tables, call: Call, pipeline: Pipeline) -> bytes:
    """A tensor map: of a tensor of the call, of a queue's ring or packed weights in the workspace, of pictures."""
    if spec.kind == "window":
        return _pixels(spec, tables, call)
    if spec.row_bytes:
        address, row_bytes = call.at[spec.name], spec.row_bytes
    else:
        address, stride, _ = call.where[spec.name]
        row_bytes = stride * DTYPE_BYTES[pipeline.tensor(spec.name).dtype]
    rows = spec.rows or call.part.rows
    return call.encode(MatrixMap(spec.dtype, address, spec.columns, rows, row_bytes, spec.box_rows))


def _pixels(spec: MapSpec, tables: Tables, call: Call) -> bytes:
    """The tensor map of pictures whose taps are copied in bulk."""
    w = tables.windows[int(spec.name)]
    sizes = (w.size[2], w.size[1], w.size[0], call.part.rows // w.lowest.pixels)
    strides, address = (w.lowest.stride_x, w.lowest.stride_y), call.where[w.tensor].address
    return call.encode(PixelMap(w.dtype, address, sizes, *w.corners, strides, spec.box_rows))


def _pointer(kind: str, name: str, first: int, where: Mapping[str, Where], pipeline: Pipeline) -> tuple[int, int]:
    """Address and stride of a tensor that is read element by element, from its element ``first``: elements from row
    to row; of a table bytes; of an index the rows of the table that it goes into."""
    address, stride, _ = where[name]
    if first:
        address += first * DTYPE_BYTES[pipeline.tensor(name).dtype]
    if kind == STARTS:
        return address, where[name].rows - 1
    if kind == TABLE:
        return address, stride * DTYPE_BYTES[pipeline.tensor(name).dtype]
    if kind.startswith(INDEX):
        table = kind.removeprefix(INDEX)
        stride = where[table].rows
        if stride > MOST_ROWS:
            what = f"table {table!r} has {stride} rows, more than {MOST_ROWS}"
            raise InputError(what, "gather its rows before the pipeline")
    return address, stride


INDEX_OUTSIDE = 2  # roles.cuh: in the place of waits_for_free, where an index names no row
HEADER = 5
"""64-bit words: claimed | stage, sm | queue, tile | waits_for_free, expected, found, and then every flag line."""


class RowStream(Kernel):
    """The kernel of a launch of stages that stream rows. What no other family takes is refused here."""

    family = "row stream"
    starts_early = True

    @classmethod
    def matches(cls, launch: Pipeline) -> bool:
        return True

    def check(self) -> None:
        reason = _no_stream(self.launch)
        if reason:
            raise VerifyError(reason, "run it by tilestream.reference")

    def footprint(self, stage: Stage, limit: int) -> Footprint:
        schedule = build(stage, self.launch)
        layout = lay_out(schedule, limit)
        return Footprint(layout.total, schedule.registers, layout.parts)

    def cost(self, rows: int, device: Device) -> Counts:
        return cost(self.launch, rows, device)

    def _emit(self, stamped: bool, annotate: bool) -> KernelSource:
        return emit(self.launch, annotate, stamped)

    @cached_property
    def tables(self) -> Tables:
        return self.source().tables

    @cached_property
    def frame(self) -> Frame:
        replicas = [s.replicas for s in self.launch.stages]
        waits = bool(self.tables.queues) or any(kind == TABLE for kind, *_ in self.tables.pointers)
        words = HEADER + max(self.tables.lines, 1) if waits else 0
        told = f"{' + '.join(map(str, replicas))} = {sum(replicas)}"
        return Frame(sum(replicas), told, THREADS, together=len(replicas) > 1, words=words)

    @cached_property
    def sums(self) -> tuple[TileOp, ...]:
        """Stores that sum rows to nodes."""
        return tuple(op for stage in self.launch.stages for op in sums_of(stage))

    @property
    def needs_rows(self) -> bool:
        """Nodes without rows are 0."""
        return not self.sums

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return tuple(carry(op, self.launch) for op in self.sums)

    def parts(self, rows: int) -> list[Part]:
        """All rows; then nodes whose rows cross tiles, which wait for all of those; then those of very many tiles."""
        phases = range(0 if rows else 1, 2 + (rows > HUB * TILE_ROWS) if self.sums else 1)
        return [Part(0, rows, rows, phase) for phase in phases]

    def grid(self, rows: int, sms: int) -> int:
        """Of several stages all that were planned; of one no more than there are steps of tiles, and a multiple of its
        group."""
        stage, *others = self.launch.stages
        if others:
            return self.frame.ctas
        grid = min(sms, self.frame.ctas, ceil(tiles_of(rows, stage) / stage.tiles_per_step))
        grid = max(stage.group, ceil(grid / stage.group) * stage.group)
        return grid - stage.group if grid > sms else grid

    @cached_property
    def space(self) -> Space:
        """The launch's number, who has left, the queues' lines, their rings, weights that are copied."""
        tables = self.tables
        lines = (("epoch", LINE_BYTES), ("exits", LINE_BYTES), ("lines", tables.lines * LINE_BYTES))
        rings = (TILE_ROWS * q.depth * q.features * DTYPE_BYTES[q.dtype] for q in tables.queues)
        packed = (p.rows * p.columns * DTYPE_BYTES[p.dtype] for p in tables.packs)
        parts = (
            *lines,
            *((f"ring {k}", size) for k, size in enumerate(rings)),
            *((f"packed {k}", size) for k, size in enumerate(packed)),
        )
        return Space(parts, frozenset(("epoch", "exits", "lines")))

    @property
    def packs(self) -> Sequence[PackSpec]:
        return self.tables.packs

    def pack(self, source: KernelSource, call: Call) -> bytes:
        """The bytes of ``Params``.

        Raises:
            InputError: pictures or a table have more rows than a kernel can count.
        """
        tables: Tables = source.tables
        pipeline, rows, at = source.pipeline, call.part.rows, call.at
        for w in tables.windows:
            pixels = rows // w.lowest.pixels * w.size[0] * w.size[1]
            if pixels > MOST_ROWS:
                raise InputError(
                    f"pictures {w.tensor!r} have {pixels} pixels, more than {MOST_ROWS}", "give fewer images"
                )
        told = at_least_one([_pointer(*p, call.where, pipeline) for p in tables.pointers], (0, 0))
        encoded = [_map(spec, tables, call, pipeline) for spec in tables.maps]
        phase = {"phase": call.part.phase} if any(p.kind == STARTS for p in tables.pointers) else {}
        stamps = dict(zip(("stamps", "stamp_capacity"), call.stamps, strict=True)) if source.stamped else {}
        return source.params.pack(
            maps=at_least_one(encoded, bytes(MAP_BYTES)),
            pointers=[address for address, _ in told],
            strides=[stride for _, stride in told],
            flags=at["lines"],
            epoch=at["epoch"],
            exits=at["exits"],
            dump=call.dump,
            limit_ns=call.timeout_ns,
            rows=rows,
            **phase,
            **stamps,
        )

    def error(self, words: Sequence[int]) -> TilestreamError:
        """Of a wait that expired, or of an index that names no row of its table."""
        if halves(words, 3)[2][1] == INDEX_OUTSIDE:
            return InputError(self.describe(words), NO_ROW)
        return super().error(words)

    def describe(self, words: Sequence[int]) -> str:
        return told(self.tables, [s.name for s in self.launch.stages], words)


def told(tables: Tables, stages: Sequence[str], words: Sequence[int]) -> str:
    """Which stage waited for which tile of which queue, and where all queues stand."""
    (_, stage), (sm, queue), (tile, free) = halves(words, 3)
    if free == INDEX_OUTSIDE:
        kind, name, _ = tables.pointers[queue]
        table = kind.removeprefix(INDEX)
        return f"index {name!r} is {words[4]} at row {tile}, and table {table!r} has {words[3]} rows"
    q = tables.queues[queue]
    what = "a free slot in tile" if free else "tile"
    lines = [
        f"stage {stages[stage]!r} on SM {sm} waited too long for {what} {tile} of queue {q.tile!r} "
        f"({q.source or 'no source line'}): expected {_ticket(words[3])}, found {_ticket(words[4])}"
    ]
    for spec in tables.queues:
        first, count = HEADER + spec.line, spec.depth * (1 + len(spec.consumers))
        flags = words[first : first + count]
        head = max((f & 0xFFFFFFFF for f in flags[: spec.depth]), default=0)
        tails = [
            f"{c}: {max(f & 0xFFFFFFFF for f in flags[(1 + k) * spec.depth : (2 + k) * spec.depth])}"
            for k, c in enumerate(spec.consumers)
        ]
        lines.append(f"queue {spec.tile!r}: depth {spec.depth}, head {head}, tail {{{', '.join(tails)}}}")
    return "\n  ".join(lines)


def _ticket(word: int) -> str:
    return f"tile {(word & 0xFFFFFFFF) - 1} of launch {(word >> 32) & 0xFFFFFFFF}"


def _no_stream(pipeline: Pipeline) -> str:
    """Why a pipeline is no row stream, as far as axes go; empty if it is one. Widths are the schedule's."""
    for q in pipeline.queues:
        if q.transport is Transport.DSM:
            return f"the queue of {q.tile!r} is in distributed shared memory: kernels have rings in the L2"
    if by_rows(pipeline):
        odd = next((s for s in pipeline.stages if s.tile_rows != TILE_ROWS), None)
        return f"stage {odd.name!r} takes {odd.tile_rows} rows a tile, kernels {TILE_ROWS}" if odd is not None else ""
    for stage in plain(pipeline).stages:
        shape = kernel_shape(stage)
        if shape is KernelShape.CHUNKED_CONTRACTION:
            return f"stage {stage.name!r} is a {shape}: its kernels are made from ops of rows (plan.passes.forms)"
        if shape is not KernelShape.ROW_STREAM:
            return f"stage {stage.name!r} is a {shape}: only a row stream has a kernel so far"
        for op in stage.ops:
            where = op.source or f"{op.kind} in stage {stage.name!r}"
            if any(at.index for v in op.views for at in v.at or ()):
                return f"{where}: a gather or a scatter by index has no kernel so far"
            others = [a for a in op.result_axes if a != ROWS.name]
            if len(others) > 1 or any(at.strides or len(at.axes) > 1 for v in op.views for at in v.at or ()):
                return f"{where}: tiles are rows by columns in kernels so far"
        if [loop.axis for loop in stage.loops] != [ROWS.name]:
            return f"stage {stage.name!r} loops over {', '.join(loop.axis for loop in stage.loops) or 'nothing'}"
    return "its ops have coordinates: kernels are made from ops of rows (linear, cat, layer_norm)"
