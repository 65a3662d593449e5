"""A pipeline's CUDA source: constants, one consumer function a kind of stage, one kernel.

A pipeline with DRAM queues is several launches; ``emit`` takes one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tilestream.errors import CompileError
from tilestream.ir.pipeline import Pipeline, Residency
from tilestream.kernels.parts.mma import specialisation
from tilestream.kernels.parts.params import MAP, Field, Struct, pointers
from tilestream.kernels.parts.source import KernelSource
from tilestream.kernels.parts.templating import rendered
from tilestream.kernels.stream.build import build
from tilestream.kernels.stream.column_loop import halves_of
from tilestream.kernels.stream.consumer import ConsumerEmitter
from tilestream.kernels.stream.layout import SHARED_LIMIT, Layout, lay_out
from tilestream.kernels.stream.model import Schedule, ceil_to
from tilestream.kernels.stream.node_sums import joins
from tilestream.kernels.stream.places import splits_for
from tilestream.kernels.stream.tables import OWN, StageUse, Tables, add_queues, add_stage, traits

THREADS = 384

ROLES = ("warpgroup 0", "warpgroup 1", "loader 0", "loader 1", "loader 2", "loader 3")
"""Who writes stamps: a CTA's consumer warpgroups and the warps of its loader group, in the order of the kernel."""

COUNTER_BYTES = 16 * len(ROLES)
"""Of shared memory: where each role's next stamp goes."""


@dataclass(frozen=True)
class StageKind:
    """Stages with the same code: layout constants and the consumer's text.

    ``traits``: type, name and value of constants that are as the headers have them where a kind does not say otherwise.
    ``text``: the body as it is shown, with comments for people.
    """

    index: int = field(compare=False)
    dtype: str
    layout: Layout
    tiles: int
    counts: tuple[int, int, int]  # entries of pages and loads, groups of stores
    resident: bool
    two_publishers: bool
    traits: tuple[tuple[str, str, str], ...]
    declarations: str
    body: str
    text: str = field(compare=False)


def argument(tables: Tables, stamped: bool, sums: bool = False) -> Struct:
    """``Params`` of a kernel with these tables; ``sums``: that is launched again for nodes whose rows cross tiles."""
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
        *((Field("int", "phase"),) if sums else ()),
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
        resident = stage.residency is Residency.RESIDENT
        kind = StageKind(
            len(kinds), schedule.dtype, layout, stage.tiles_per_step, (at.pages, at.loads, at.store_groups), resident,
            resident and stage.placement.dim == 0, traits(tables, at, schedule), emitter.declarations(), body,
            emitter.annotated() if annotate else body,
        )  # fmt: skip
        if kind not in kinds:
            kinds.append(kind)
        tables.stages.append(StageUse(stage.name, kinds.index(kind), stage.replicas, at))
        products |= _products(schedule, layout)
    counters = place_counters(shared) if stamped else None
    sums = joins(pipeline, tables)
    params = argument(tables, stamped, bool(sums))
    text = rendered(
        "kernel.cu.j2",
        pipeline,
        kinds=kinds,
        stages=tables.stages,
        tables=tables,
        mma=[specialisation(d, b) for d, b in sorted(products)],
        threads=THREADS,
        step=max(s.tiles_per_step for s in pipeline.stages) * max(s.group for s in pipeline.stages),
        group=max(s.group for s in pipeline.stages),
        sums=sums,
        own_rows=any(op[0] == OWN for op in tables.load_ops),
        counters=counters,
        params=params,
    )
    shared = shared if counters is None else counters + COUNTER_BYTES
    return KernelSource(pipeline, text, shared, params, splits_for(registers), tables, stamped)


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


def _products(schedule: Schedule, layout: Layout) -> set[tuple[str, int]]:
    """(dtype, blocks) of every product: whole pages and what is left over."""
    page = layout.page_rows // 8
    whole = [s for s in schedule.steps if s.gemm and schedule.loop_of(s) is None]
    widths = [ceil_to(schedule.width(s), 8) // 8 for s in whole]
    sizes = {min(page, w) for w in widths} | {w % page for w in widths if w > page and w % page}
    sizes |= {loop.chunk // 8 // halves_of(schedule) for loop in schedule.loops}
    return {(schedule.dtype, n) for n in sizes}
