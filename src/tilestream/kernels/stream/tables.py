"""The constant tables that a stage's loader and publisher warps walk, and the tensor maps they use."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tilestream.ir.pipeline import DTYPE_BYTES, INDEX_BYTES, TILE_ROWS, Pipeline, TileOp, Transport
from tilestream.ir.taps import Tap
from tilestream.kernels.parts.taps import corners, lowest
from tilestream.kernels.stream.layout import Layout, boxes_of
from tilestream.kernels.stream.model import Schedule, Sink, Stream, ceil_to, columns_of

TABLE, INDEX = "table", "index of "
"""Kinds of pointers: of a table, with the bytes of its rows; of an index into the named one, with how many it has."""
GATHERED = -2  # a load's tensor map, where rows are taken through an index
OWN = -5  # where consumers take them: the loader looks at the index alone
TAPPED, TAPPED_IN_BULK = -3, -4  # where they are pixels at a tap, copied by lanes or in bulk
CONSTANT_BYTES = 60_000
"""Of a kernel's tables; constant memory has 65,536, of which the compiler and small tables take some."""
ODD_ROWS = {"bf16": 2, "f16": 3, "f32": 4}  # enum Form of roles.cuh: rows that are not of the operands' dtype


@dataclass(frozen=True)
class MapSpec:
    """A tensor map to encode at launch. ``kind``: weight, packed (weight in the arena), input, output, ring, or window,
    of which ``name`` is the number: pixels in the order of output pixels, by the im2col mode. Packed weights and rings
    are parts of the launch's space, of that name and with rows of ``row_bytes``.

    ``dtype`` is that of the memory, or ``tf32``: fp32 operands of products are rounded to that on the way in.
    Boxes are ``box_rows`` x 128 bytes with the 128-byte swizzle; rows and columns outside read as zero.
    """

    kind: str
    name: str
    dtype: str
    columns: int
    box_rows: int
    rows: int = 0  # of weights and rings; inputs and outputs have the launch's rows
    row_bytes: int = 0


@dataclass(frozen=True)
class WindowSpec:
    """Output pixels that are a kernel's rows, and the pictures that its taps read: struct Window of taps.cuh.

    ``lowest``: where all taps of these strides begin. ``size``: of a picture, [height, width, channels].
    ``corners``: of the box of bulk copies (``kernels.parts.taps``).
    """

    tensor: str
    dtype: str
    lowest: Tap
    size: tuple[int, ...]
    pixel_bytes: int
    corners: tuple[tuple[int, int], tuple[int, int]]

    @property
    def entry(self) -> tuple[int, ...]:
        """As the kernel knows it."""
        t = self.lowest
        return (t.height, t.width, t.stride_y, t.stride_x, *self.size[:2], self.pixel_bytes, t.y, t.x)


@dataclass(frozen=True)
class PackSpec:
    """A weight whose rows TMA cannot address, or whose segments must be padded: copied before the kernel.

    ``segments``: (first column in the weight, columns, first column in the copy).
    """

    weight: str
    dtype: str
    rows: int
    columns: int
    segments: tuple[tuple[int, int, int], ...]


class Pointer(NamedTuple):
    """A pointer to encode at launch: to element ``first`` of ``name``; ``kind`` says what it is for."""

    kind: str
    name: str
    first: int = 0


@dataclass(frozen=True)
class QueueSpec:
    """A ring in L2. Its flags are ``depth`` full lines, then ``depth`` free lines a consumer, from ``line``."""

    tile: str
    dtype: str
    features: int  # a multiple of 16 bytes
    depth: int
    consumers: tuple[str, ...]
    line: int
    source: str


@dataclass
class StageTables:
    """Where one stage's entries start, and how many there are."""

    page_ops: int = 0
    pages: int = 0
    load_ops: int = 0
    loads: int = 0
    store_ops: int = 0
    store_groups: int = 0
    pointers: int = 0
    credits: int = 0


@dataclass(frozen=True)
class StageUse:
    """A stage of the launch: which kind of code it runs, and where its entries are."""

    name: str
    kind: int
    replicas: int
    tables: StageTables


@dataclass
class Tables:
    """Everything the kernel's constants and its launch need, in the order of its indices."""

    maps: list[MapSpec] = field(default_factory=list)
    pointers: list[Pointer] = field(default_factory=list)
    packs: list[PackSpec] = field(default_factory=list)
    queues: list[QueueSpec] = field(default_factory=list)
    page_ops: list[tuple[int, ...]] = field(default_factory=list)
    load_ops: list[tuple[int, ...]] = field(default_factory=list)
    store_ops: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    store_bounds: list[int] = field(default_factory=list)
    stage_pointers: list[int] = field(default_factory=list)
    credits: list[tuple[int, int]] = field(default_factory=list)
    windows: list[WindowSpec] = field(default_factory=list)
    stages: list[StageUse] = field(default_factory=list)
    lines: int = 0

    def memory_of(self, table: str) -> str:
        """Where the emitter puts ``table``: in constant memory, as far as all fit there; else in global memory, first
        the pages, which resident weights ask for once."""
        sizes = {name: sum(map(len, getattr(self, name))) * 4 for name in ("page_ops", "load_ops", "store_ops")}
        rest = 4 * (len(self.store_bounds) + len(self.stage_pointers) + 2 * len(self.credits) + 3 * len(self.queues))
        outside = []
        for name in ("page_ops", "load_ops"):
            if sum(size for n, size in sizes.items() if n not in outside) + rest > CONSTANT_BYTES:
                outside.append(name)
        return "TS_GLOBAL" if table in outside else "TS_CONSTANT"

    @property
    def queue_infos(self) -> list[tuple[int, int, int]]:
        """First flag line, depth and number of consumers of every queue."""
        return [(q.line, q.depth, len(q.consumers)) for q in self.queues]

    def map(self, kind: str, name: str, dtype: str, columns: int, box_rows: int = TILE_ROWS, *rows: int) -> int:
        return _place(self.maps, MapSpec(kind, name, dtype, columns, box_rows, *rows))

    def ring(self, queue: int, dtype: str) -> int:
        """The tensor map of a queue's ring."""
        spec = self.queues[queue]
        row_bytes = spec.features * DTYPE_BYTES[spec.dtype]
        return self.map("ring", f"ring {queue}", dtype, spec.features, TILE_ROWS, spec.depth * TILE_ROWS, row_bytes)

    def pointer(self, kind: str, name: str, first: int = 0) -> int:
        return _place(self.pointers, Pointer(kind, name, first))

    def queue(self, tile: str) -> int:
        return next(i for i, q in enumerate(self.queues) if q.tile == tile)


def _place(among: list, spec: object) -> int:
    """Its index ``among`` others, to which it is added where it is new."""
    if spec not in among:
        among.append(spec)
    return among.index(spec)


def add_queues(tables: Tables, pipeline: Pipeline) -> None:
    tiles = pipeline.tiles()
    for q in pipeline.queues:
        if q.transport is Transport.L2:
            tile = tiles[q.tile]
            features = ceil_to(tile.features, 16 // DTYPE_BYTES[tile.dtype])
            tables.queues.append(QueueSpec(q.tile, tile.dtype, features, q.depth, q.consumers, tables.lines, q.source))
            tables.lines += q.depth * (1 + len(q.consumers))


def add_stage(tables: Tables, schedule: Schedule, layout: Layout, pipeline: Pipeline) -> StageTables:
    """Append a stage's pages, loads and stores in the order in which its consumers take them."""
    at = StageTables(len(tables.page_ops), 0, len(tables.load_ops), 0, len(tables.store_bounds))
    left = Counter(schedule.chunks())
    own = (own_entry(tables, step.own_rows, pipeline) for step in schedule.steps if step.own_rows is not None)
    tables.load_ops += dict.fromkeys(own)
    for step in schedule.steps:
        if step.gemm is not None:
            loop = schedule.loop_of(step) or schedule.summed(step)
            if loop is None:
                _weights(tables, schedule, layout, step, pipeline)
            elif step.index == loop.first:
                for turn in range(loop.turns):
                    for inner in loop.steps:
                        _weights(tables, schedule, layout, schedule.steps[inner], pipeline, turn)
        for chunk in schedule.product_chunks(step):
            left[chunk] -= 1
            _load(tables, schedule, *chunk, pipeline, left[chunk], True)
        for phase in step.phases:
            for chunk in schedule.epilogue_chunks(step, phase):
                left[chunk] -= 1
                _load(tables, schedule, *chunk, pipeline, left[chunk], False)
            _stores(tables, schedule, step, phase, pipeline, at)
    at.pages = len(tables.page_ops) - at.page_ops
    at.loads = len(tables.load_ops) - at.load_ops
    return at


def traits(tables: Tables, at: StageTables, schedule: Schedule) -> tuple[tuple[str, str, str], ...]:
    """What a stage has that not all have, as type, name and value of a constant: pages of several boxes; rows through
    an index; only bulk copies, as one of several stages; pixels at taps, and how they come; odd rows that are not of
    the operands' dtype."""
    pages = tables.page_ops[at.page_ops : at.page_ops + at.pages]
    loads = tables.load_ops[at.load_ops : at.load_ops + at.loads]
    told = {op[0] for op in loads}
    # Entries of pairs of CTAs, whose pages are of one box, have their half where others have boxes.
    boxed = schedule.stage.group == 1 and any(op[-1] for op in pages)
    ways = ((TAPPED, "BY_LANES"), (TAPPED_IN_BULK, "IN_BULK"))
    values = {
        "BOXED": "true" if schedule.loops or boxed else "",
        "GATHERS": "true" if GATHERED in told else "",
        "OWN_ROWS": "true" if OWN in told else "",
        "QUEUED": "true" if tables.queues and loads and min(told) >= 0 else "",
        "TAPS": " | ".join(name for index, name in ways if index in told),
        "MIXED": "true" if any(op[-1] in ODD_ROWS.values() for op in loads) else "",
    }
    return tuple(("int" if name == "TAPS" else "bool", name, value) for name, value in values.items() if value)


def _weights(tables: Tables, schedule: Schedule, layout: Layout, step, pipeline: Pipeline, turn: int = 0) -> None:
    """Pages of one product, or of one ``turn`` of a loop over columns."""
    gemm = step.gemm
    columns, width = schedule.chunk_columns, schedule.width(step)
    element = DTYPE_BYTES[schedule.dtype]
    dtype = _loaded(schedule.dtype, True)
    weight = pipeline.tensor(gemm.weight)
    out, depth = weight.shape
    by_column = sorted(gemm.segments, key=lambda s: s.weight_column)
    aligned = depth * element % 16 == 0 and all(s.features % columns == 0 for s in by_column[:-1])
    box = min(ceil_to(width, 8), layout.page_rows)
    # A swizzled tile is cut in halves at multiples of 8 rows only; small weights are loaded by both CTAs.
    half = box // 2 if schedule.stage.group == 2 and box % 16 == 0 else 0
    if aligned:
        start = {s: s.weight_column for s in by_column}
        index = tables.map("weight", gemm.weight, dtype, depth, half or box, out)
    else:
        start, at = {}, 0
        for s in by_column:
            start[s] = at
            at += ceil_to(s.features, columns)
        segments = tuple((s.weight_column, s.features, start[s]) for s in by_column)
        pack = _place(tables.packs, PackSpec(gemm.weight, weight.dtype, out, at, segments))
        index = tables.map("packed", f"packed {pack}", dtype, at, half or box, out, at * DTYPE_BYTES[weight.dtype])
    rows = (0, width) if schedule.stage.placement.dim == 1 and step.features > width else (0,)
    top = turn * width if schedule.loop_of(step) is not None else gemm.part + gemm.first
    summed = schedule.summed(step)
    share = summed.chunk // columns if summed is not None else 0
    for segment in gemm.segments:
        # The last turn takes whole pages too: beyond the weight's columns they are zeros.
        whole = range(segment.chunks(columns)) if summed is None else range(turn * share, (turn + 1) * share)
        boxes = boxes_of(schedule, step, segment, layout.page_rows)
        for c in whole[::boxes]:
            more = min(boxes, len(whole) - whole.index(c)) - 1
            for ring, first in enumerate(rows):
                for sub in range(-(-ceil_to(width, 8) // layout.page_rows)):
                    y = top + first + sub * layout.page_rows
                    tables.page_ops.append((index, start[segment] + c * columns, y, box * 128, ring, half or more))


def _load(
    tables: Tables, schedule: Schedule, tile: str, column: int, pipeline: Pipeline, again: int, product: bool
) -> None:
    """One chunk of a stream, as the operand of a product or of an epilogue.

    ``again``: how many more times this stage takes the chunk; only the last may leave the L2 first.
    """
    stream = schedule.streams[tile]
    columns, element = columns_of(stream.dtype), DTYPE_BYTES[stream.dtype]
    dtype, start, valid = _loaded(stream.dtype, product), stream.start + column, stream.valid(column)
    form = int(dtype == "tf32")
    if stream.queue:
        q = tables.queue(stream.queue)
        tables.load_ops.append((tables.ring(q, dtype), start, q, 0, 0, 0, 0, again, 0))
        return
    tensor = pipeline.tensor(stream.tensor)
    in_bulk = stream.in_bulk(column, tensor.features)
    if stream.tap is not None:
        tap, window = stream.tap, _window(tables, schedule, stream, stream.tap, tensor.shape, dtype)
        begin = tables.windows[window].lowest
        if tap.bulk and in_bulk:
            index = tables.map("window", str(window), dtype, tensor.features)
            op = (TAPPED_IN_BULK, start, tap.y - begin.y, index, tap.x - begin.x, 0, window, again, 0)
        else:
            pointer = tables.pointer("pictures", stream.tensor)
            op = (TAPPED, start * element, tap.y, pointer, tap.x, valid * element, window, again, form)
    elif stream.index:
        table = tables.pointer(TABLE, stream.tensor)
        names = tables.pointer(f"{INDEX}{stream.tensor}", stream.index)
        entry = INDEX_BYTES[pipeline.tensor(stream.index).dtype]
        op = (GATHERED, start * element, names, table, entry, valid * element, 0, again, form)
    elif in_bulk:
        op = (tables.map("input", stream.tensor, dtype, tensor.features), start, -1, 0, 0, 0, 0, again, 0)
    else:
        pointer = tables.pointer("input", stream.tensor)
        padded = min(columns, ceil_to(valid, columns // 4))
        form = form if stream.dtype == schedule.dtype else ODD_ROWS[stream.dtype]
        op = (-1, start, -1, pointer, tensor.features, valid, padded, again, form)
    tables.load_ops.append(op)


def own_entry(tables: Tables, op: TileOp, pipeline: Pipeline) -> tuple[int, ...]:
    """Of a load whose rows consumers take themselves: table, index, bytes of an entry of it."""
    table, index = op.params
    names = tables.pointer(f"{INDEX}{table}", index)
    return (OWN, 0, names, tables.pointer(TABLE, table), INDEX_BYTES[pipeline.tensor(index).dtype], 0, 0, 0, 0)


def _window(tables: Tables, schedule: Schedule, stream: Stream, tap: Tap, shape: tuple[int, ...], dtype: str) -> int:
    """The window that a tap of pictures shares with others."""
    beside = [s.tap for s in schedule.streams.values() if s.tensor == stream.tensor and s.tap is not None]
    begin, pixel_bytes = lowest(tap, beside), shape[2] * DTYPE_BYTES[stream.dtype]
    first = replace(tap, y=begin[0], x=begin[1], bulk=False)
    spec = WindowSpec(stream.tensor, dtype, first, shape, pixel_bytes, corners(tap, begin, (shape[0], shape[1])))
    return _place(tables.windows, spec)


def _loaded(dtype: str, product: bool) -> str:
    """The dtype of a tensor map for memory of ``dtype``: fp32 is rounded to tf32 on its way into a product."""
    return "tf32" if product and dtype == "f32" else dtype


def _stores(tables: Tables, schedule: Schedule, step, phase, pipeline: Pipeline, at: StageTables) -> None:
    staged = [s for s in phase.sinks if s.kind == "staged"]
    if not staged:
        return
    columns, share = schedule.pass_columns, schedule.turns(step)
    chunks = ceil_to(step.features, columns) // columns
    # Under Shard(1) the warpgroups hold the same inputs: their chunks must go out in turn, or each waits
    # for the other. Under Shard(0) they are independent, and a tile is published sooner in one go.
    if schedule.stage.placement.dim == 1:
        groups = [([c], [c + share] if c + share < chunks else []) for c in range(share)]
    else:
        groups = [(list(range(chunks)),) * 2]
    order = [c for group in groups for c in (group[0] + group[1] if schedule.stage.placement.dim == 1 else group[0])]
    for group in groups:
        at.store_groups += 1
        for mine in group:
            tables.store_bounds.append(len(tables.store_ops))
            for c in mine:
                for sink in staged:
                    index, queue = _store_target(tables, sink, pipeline)
                    last = schedule.parts(sink.dtype) - 1
                    for part in range(last + 1):
                        ends = (int(c == order[0] and part == 0), int(c == order[-1] and part == last))
                        column = sink.column + c * columns + part * columns_of(sink.dtype)
                        tables.store_ops.append((index, column, queue, *ends))
        tables.store_bounds.append(len(tables.store_ops))


def _store_target(tables: Tables, sink: Sink, pipeline: Pipeline) -> tuple[int, int]:
    """(tensor map, queue or -1) of a staged sink."""
    if sink.target.startswith("queue:"):
        queue = tables.queue(sink.target.removeprefix("queue:"))
        return tables.ring(queue, tables.queues[queue].dtype), queue
    return tables.map("output", sink.target, sink.dtype, pipeline.tensor(sink.target).features), -1
