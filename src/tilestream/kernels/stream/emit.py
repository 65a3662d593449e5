"""A pipeline's CUDA source: constants, one consumer function a kind of stage, one kernel.

A pipeline with DRAM queues is several launches; ``emit`` takes one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilestream.errors import CompileError
from tilestream.ir.pipeline import Pipeline, Residency, Stage
from tilestream.kernels.parts.mma import specialisation
from tilestream.kernels.parts.params import MAP, Field, Struct, pointers
from tilestream.kernels.parts.source import KernelSource
from tilestream.kernels.parts.templating import rendered
from tilestream.kernels.stream.build import build
from tilestream.kernels.stream.column_loop import halves_of
from tilestream.kernels.stream.consumer import ConsumerEmitter
from tilestream.kernels.stream.layout import SHARED_LIMIT, Layout, lay_out
from tilestream.kernels.stream.model import Schedule, ceil_to
from tilestream.kernels.stream.places import splits_for
from tilestream.kernels.stream.tables import (
    ODD_ROWS,
    TAPPED,
    TAPPED_IN_BULK,
    StageTables,
    StageUse,
    Tables,
    add_queues,
    add_stage,
)

THREADS = 384

ROLES = ("warpgroup 0", "warpgroup 1", "loader 0", "loader 1", "loader 2", "loader 3")
"""Who writes stamps: a CTA's consumer warpgroups and the warps of its loader group, in the order of the kernel."""

COUNTER_BYTES = 16 * len(ROLES)
"""Of shared memory: where each role's next stamp goes."""


@dataclass(frozen=True)
class StageKind:
    """Stages with the same code: layout constants and the consumer's text."""

    index: int
    dtype: str
    layout: Layout
    tiles: int
    tables: StageTables
    resident: bool
    two_publishers: bool
    mixed: bool  # some odd rows are not of the operands' dtype
    boxed: bool  # some pages are of several boxes
    gathers: bool  # some rows are taken through an index
    queued: bool  # it is one of several stages, and all that it loads comes by bulk copies
    taps: str  # how some rows, which are pixels at a tap, come
    declarations: str
    body: str


def argument(tables: Tables, stamped: bool) -> Struct:
    """``Params`` of a kernel with these tables."""
    count = max(len(tables.pointers), 1)
    stamps = (Field("int", "stamp_capacity"), *pointers("stamps", type="char*"))
    each = (
        Field(MAP, "maps", max(len(tables.maps), 1)),
        Field("const void*", "pointers", count),
        Field("long long", "strides", count),
        *pointers("flags", "epoch", type="u64*"),
        *pointers("exits", type="u32*"),
        *pointers("dump", type="Dump*"),
        Field("u64", "limit_ns"),
        Field("int", "rows"),
        *(stamps if stamped else ()),
    )
    return Struct("Params", each)


def emit(pipeline: Pipeline, annotate: bool = False, stamped: bool = False) -> KernelSource:
    """Generate the kernel of a pipeline without DRAM queues.

    Args:
        annotate: add comments for people. Text to be compiled has none.
        stamped: the kernel writes down what its warps do when (``cuda.stamps``). Otherwise nothing of that is in it.

    Raises:
        VerifyError: from the schedule, naming the user's line.
        CompileError: a tile op has no CUDA snippet, or shared memory has no room for the stamps' counters.
    """
    tables = Tables()
    add_queues(tables, pipeline)
    kinds: list[StageKind] = []
    plain: list[StageKind] = []  # the same without comments
    uses: list[StageUse] = []
    products: set[tuple[str, int]] = set()
    shared, registers = 0, 0
    for stage in pipeline.stages:
        schedule = build(stage, pipeline)
        layout = lay_out(schedule)
        shared, registers = max(shared, layout.total), max(registers, schedule.registers)
        at = add_stage(tables, schedule, layout, pipeline)
        at.pointers, at.credits = len(tables.stage_pointers), len(tables.credits)
        emitter = ConsumerEmitter(schedule, layout, pipeline, tables, stamped)
        body = emitter.body()
        kind = StageKind(
            len(kinds), schedule.dtype, layout, stage.tiles_per_step, at, stage.residency is Residency.RESIDENT,
            stage.residency is Residency.RESIDENT and stage.placement.dim == 0,
            any(op[-1] in ODD_ROWS.values() for op in tables.load_ops[at.load_ops :]),
            bool(schedule.loops) or _boxed(tables, at, stage), any(s.index for s in schedule.streams.values()),
            _queued(tables, at),
            _taps(tables, at), emitter.declarations(), body,
        )  # fmt: skip
        same = next((k for k in plain if _same(k, kind)), None)
        if same is None:
            kinds.append(replace(kind, body=emitter.annotated()) if annotate else kind)
            plain.append(kind)
        uses.append(StageUse(stage.name, (same or kind).index, stage.replicas, at))
        products |= _products(schedule, layout)
    tables.stages = uses
    counters = place_counters(shared) if stamped else None
    params = argument(tables, stamped)
    text = rendered(
        "kernel.cu.j2",
        pipeline,
        kinds=kinds,
        stages=uses,
        tables=tables,
        mma=[specialisation(d, b) for d, b in sorted(products)],
        threads=THREADS,
        step=max(s.tiles_per_step for s in pipeline.stages) * max(s.group for s in pipeline.stages),
        group=max(s.group for s in pipeline.stages),
        counters=counters,
        params=params,
    )
    shared = shared if counters is None else counters + COUNTER_BYTES
    return KernelSource(pipeline, text, shared, params, splits_for(registers), tables, stamped)


def _queued(tables: Tables, at: StageTables) -> bool:
    """Whether a stage is one of several joined by queues, and all that it loads comes by bulk copies."""
    loads = tables.load_ops[at.load_ops : at.load_ops + at.loads]
    return bool(tables.queues and loads) and all(op[0] >= 0 for op in loads)


def _boxed(tables: Tables, at: StageTables, stage: Stage) -> bool:
    """Whether chunks of weights share pages: entries of pairs of CTAs, whose pages do not, have their half there."""
    return stage.group == 1 and any(op[-1] for op in tables.page_ops[at.page_ops : at.page_ops + at.pages])


def _taps(tables: Tables, at: StageTables) -> str:
    """How a stage's pixels come, as taps.cuh names it; empty if there are none."""
    told = {op[0] for op in tables.load_ops[at.load_ops : at.load_ops + at.loads]}
    ways = {TAPPED: "BY_LANES", TAPPED_IN_BULK: "IN_BULK"}
    return " | ".join(name for index, name in ways.items() if index in told)


def place_counters(shared_bytes: int) -> int:
    """Where in shared memory the roles' counters go, behind all that a kernel has there.

    Raises:
        CompileError: there is no room.
    """
    at = ceil_to(shared_bytes, 16)
    if at + COUNTER_BYTES > SHARED_LIMIT:
        raise CompileError(
            f"the kernel has {shared_bytes} bytes of shared memory, and stamps need {COUNTER_BYTES} of {SHARED_LIMIT}",
            "measure another strategy",
        )
    return at


def _same(a: StageKind, b: StageKind) -> bool:
    def key(k: StageKind) -> tuple:
        counts = (k.tables.pages, k.tables.loads, k.tables.store_groups)
        return (
            k.dtype,
            k.layout,
            k.tiles,
            counts,
            k.resident,
            k.mixed,
            k.boxed,
            k.gathers,
            k.queued,
            k.taps,
            k.declarations,
            k.body,
        )

    return key(a) == key(b)


def _products(schedule: Schedule, layout: Layout) -> set[tuple[str, int]]:
    """(dtype, blocks) of every product: whole pages and what is left over."""
    page = layout.page_rows // 8
    whole = [s for s in schedule.steps if s.gemm and schedule.loop_of(s) is None]
    widths = [ceil_to(schedule.width(s), 8) // 8 for s in whole]
    sizes = {min(page, w) for w in widths} | {w % page for w in widths if w > page and w % page}
    sizes |= {loop.chunk // 8 // halves_of(schedule) for loop in schedule.loops}
    return {(schedule.dtype, n) for n in sizes}
