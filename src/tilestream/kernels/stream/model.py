"""What a schedule is made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tilestream.ir.pipeline import DTYPE_BYTES, Stage, Tile, TileOp
from tilestream.ir.taps import Tap
from tilestream.ir.tileops import OPS

ACC_LIMIT = {0: 256, 1: 512}  # features of a fragment under Shard(0), Shard(1)


def ceil_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def half(features: int) -> int:
    """Of the columns of a tile that two warpgroups share: whole chunks, so that halves never share one."""
    return ceil_to(-(-features // 2), 64)


def share(features: int, dim: int) -> int:
    """Of a warpgroup, of the columns of a tile under ``Shard(dim)``."""
    return features if dim == 0 else min(features, half(features))


def columns_of(dtype: str) -> int:
    """Columns of a chunk in shared memory: rows of 128 bytes, the width of the swizzle."""
    return 128 // DTYPE_BYTES[dtype]


class Place(StrEnum):
    """Where a tile waits for its users."""

    STREAM = "stream"  # in device memory; chunks come through the input ring at every use
    REGISTERS = "registers"  # packed, as the A operand of a later product
    SHARED = "shared"  # a buffer in shared memory
    PARKED = "parked"  # packed as in registers, in shared memory: each lane reads what it wrote
    ROW = "row"  # one value a row, in registers


@dataclass(frozen=True)
class Stream:
    """A tile that comes from an input ``tensor`` or a tile's ``queue``; ``start`` is its first column there.

    ``index`` names the tensor's rows where they do not come in order; ``tap`` says which pixels they are.
    """

    tile: str
    features: int
    dtype: str
    tensor: str = ""
    queue: str = ""
    start: int = 0
    index: str = ""
    tap: Tap | None = None

    def valid(self, column: int) -> int:
        """Of the chunk that begins at ``column``, the columns that are the tile's."""
        return max(0, min(columns_of(self.dtype), self.features - column))

    def in_bulk(self, column: int, features: int) -> bool:
        """Whether bulk copies address the chunk at ``column``, in rows of ``features``: they begin on 16 bytes, as rows
        do, and bring whole chunks, with what follows a slice."""
        size = DTYPE_BYTES[self.dtype]
        whole = self.valid(column) == columns_of(self.dtype) or self.start + self.features == features
        return features * size % 16 == 0 and self.start * size % 16 == 0 and whole


@dataclass(frozen=True)
class Segment:
    """Columns of a product's left operand. ``weight_column`` is where they meet the weight."""

    tile: str
    place: Place
    features: int
    weight_column: int
    start: int = 0

    def chunks(self, chunk_columns: int) -> int:
        return ceil_to(self.features, chunk_columns) // chunk_columns

    def ksteps(self, chunk: int, chunk_columns: int) -> int:
        """Products of one instruction depth (32 bytes) in a chunk; ragged ends round up."""
        left = min(self.features - chunk * chunk_columns, chunk_columns)
        return ceil_to(left, chunk_columns // 4) // (chunk_columns // 4)


@dataclass(frozen=True)
class Gemm:
    """acc[64, features] = concat(segments) @ weight.T + bias, fp32 accumulation on wgmma.

    Of the weight's rows those from ``first`` on. ``part``: where the stage's part of the layer begins, one of several
    that other stages make; stages of different parts share their code, so it is in no code.
    """

    weight: str
    bias: str
    features: int
    segments: tuple[Segment, ...]
    first: int = 0
    part: int = 0


@dataclass(frozen=True)
class Sink:
    """Where a step puts a value: a later step (registers, shared), or away (tensor or queue)."""

    tile: str
    kind: str  # registers | shared | parked | staged | direct | maxima | nodes
    target: str = ""  # buffer, output tensor, or "" for the tile's queue
    column: int = 0  # first column in the target
    dtype: str = ""  # of an output or a queue


@dataclass(frozen=True)
class Phase:
    """One pass over a step's fragment, between row reductions.

    ``nodes`` are evaluated for each pair of columns; ``reduces`` accumulate; ``row_nodes`` are
    computed once a row after the reductions; ``keep`` overwrites the fragment.
    """

    nodes: tuple[TileOp, ...]
    reduces: tuple[TileOp, ...]
    row_nodes: tuple[TileOp, ...]
    sinks: tuple[Sink, ...]
    streams: tuple[str, ...]
    keep: str = ""

    @property
    def used(self) -> set[str]:
        """Tiles that it takes or makes, and something is done with."""
        return {i for n in (*self.nodes, *self.reduces) for i in n.ins} | {sink.tile for sink in self.sinks}


@dataclass(frozen=True)
class Step:
    """One product with its epilogue, or an epilogue alone. ``held`` is the fragment's value at the start."""

    index: int
    features: int
    gemm: Gemm | None
    held: str
    phases: tuple[Phase, ...]
    source: str

    @property
    def copied(self) -> tuple[str, ...]:
        """Tiles that the step does nothing with but to make a packed operand of them: a stream, or blocks in order."""
        nodes = [n for p in self.phases for n in p.nodes] if self.gemm is None else []
        return nodes[0].ins if nodes and nodes[0].kind == "copy" else ()

    @property
    def own_rows(self) -> TileOp | None:
        """The load through an index that the step is, whose rows the lanes load that compute with them."""
        nodes = [n for p in self.phases for n in p.nodes] if self.gemm is None else []
        return nodes[0] if nodes and nodes[0].kind == "load" else None

    def held_before(self, phase: Phase) -> str:
        """The fragment's value as a phase begins."""
        return next((p.keep for p in reversed(self.phases[: self.phases.index(phase)]) if p.keep), self.held)


@dataclass(frozen=True)
class ColumnLoop:
    """Steps ``first`` to ``last`` make ``chunk`` columns a turn; the product of step ``sums`` adds up what comes.

    ``features``: of each of them; the last turn is filled up with zeros.
    """

    first: int
    last: int
    sums: int
    features: int
    chunk: int

    @property
    def turns(self) -> int:
        return -(-self.features // self.chunk)

    @property
    def steps(self) -> range:
        return range(self.first, self.sums + 1)


@dataclass(frozen=True)
class Places:
    """Where each tile waits. Slots are register variables, buffers are in shared memory.

    Attributes:
        slots, buffers: of a tile in registers or shared memory, its variable or buffer.
        parked: of a parked tile, its first column among all that are parked.
    """

    places: dict[str, Place]
    slots: dict[str, int]
    slot_features: tuple[int, ...]
    buffers: dict[str, int]
    buffer_features: tuple[int, ...]
    buffer_dtypes: tuple[str, ...]
    parked: dict[str, int]
    parked_features: int
    registers: int

    @property
    def homes(self) -> dict[str, int]:
        """Of tiles that wait in some place of their own."""
        return self.slots | self.buffers | self.parked


@dataclass(frozen=True)
class Schedule(Places):
    """A stage, ordered.

    ``dtype`` is that of products' operands. Streams, buffers and sinks each have their own; a turn of an epilogue
    goes over ``pass_columns`` columns: 64, two chunks of fp32, or 32 where all of them are fp32.
    """

    stage: Stage
    dtype: str
    pass_columns: int
    steps: tuple[Step, ...]
    tiles: dict[str, Tile]
    streams: dict[str, Stream]
    views: dict[str, tuple[str, int]]  # slices of computed tiles: (tile, first column)
    loops: tuple[ColumnLoop, ...]

    def loop_of(self, step: Step) -> ColumnLoop | None:
        """The loop that makes a step's columns chunk by chunk."""
        return next((loop for loop in self.loops if loop.first <= step.index <= loop.last), None)

    def summed(self, step: Step) -> ColumnLoop | None:
        """The loop over whose chunks a step's product sums."""
        return next((loop for loop in self.loops if loop.sums == step.index), None)

    @property
    def chunk_columns(self) -> int:
        """Columns of a chunk of a product's operand."""
        return columns_of(self.dtype)

    def parts(self, dtype: str) -> int:
        """Chunks of ``dtype`` that one turn of an epilogue takes or makes."""
        return self.pass_columns // columns_of(dtype)

    def taken(self, phase: Phase) -> int:
        """Chunks that one turn of an epilogue takes from the input ring."""
        return sum(self.parts(self.streams[t].dtype) for t in phase.streams)

    def staged(self, phase: Phase) -> int:
        """Chunks that one turn of an epilogue stages on their way out."""
        return sum(self.parts(s.dtype) for s in phase.sinks if s.kind == "staged")

    def width(self, step: Step) -> int:
        """Columns of a step that one warpgroup owns; under Shard(1) the second one may have fewer, or none.

        Of a step in a loop over columns: those of one turn.
        """
        loop = self.loop_of(step)
        return loop.chunk if loop is not None else share(step.features, self.stage.placement.dim)

    def stride(self, step: Step) -> int:
        """First column of the second warpgroup under Shard(1)."""
        return half(step.features)

    def turns(self, step: Step) -> int:
        """Of a pass over a step's columns."""
        return ceil_to(self.width(step), self.pass_columns) // self.pass_columns

    def guarded(self, step: Step) -> bool:
        """Whether some pairs have columns that are not the tile's, but pad a warpgroup's last block."""
        if self.stage.placement.dim == 1:
            return step.features != 2 * self.width(step)
        return step.features % (8 if self.loop_of(step) is None else self.width(step)) != 0

    # -- chunks of input that consumers take, in order: what loader warps ask for, and what is waited for

    def chunks(self) -> list[tuple[str, int]]:
        """(stream, first column) of every chunk of one tile, in order."""
        made = []
        for step in self.steps:
            made += self.product_chunks(step)
            for phase in step.phases:
                made += self.epilogue_chunks(step, phase)
        return made

    def product_chunks(self, step: Step) -> list[tuple[str, int]]:
        """(stream, first column) of every chunk that a step's product takes."""
        segments = step.gemm.segments if step.gemm is not None else ()
        columns = self.chunk_columns
        streamed = [s for s in segments if s.place is Place.STREAM]
        return [(s.tile, c * columns) for s in streamed for c in range(s.chunks(columns))]

    def epilogue_chunks(self, step: Step, phase: Phase) -> list[tuple[str, int]]:
        """(stream, first column) of every chunk that a pass takes, in order; under Shard(1), for either warpgroup."""
        turns = self.turns(step)
        halves = (0, turns) if self.stage.placement.dim == 1 else (0,)
        chunks = []
        for c in range(turns):
            for tile in phase.streams:
                dtype = self.streams[tile].dtype
                for part in range(self.parts(dtype)):
                    chunks += [(tile, (c + h) * self.pass_columns + part * columns_of(dtype)) for h in halves]
        return chunks

    # -- how a pass goes over its columns, a turn at a time

    def ahead(self, step: Step, phase: Phase) -> tuple[str, ...]:
        """Streams of which a lane loads all pairs of a turn before it computes the first, as words of the operands'
        dtype.

        Loads and stores of shared memory keep their order, so that pairs would else go one after another, each as long
        as a load, its special functions and a store: 150 cycles.
        """
        special = any(OPS[n.kind].transcendental for n in phase.nodes)
        if not special or self.dtype == "f32" or self.loop_of(step) is not None:
            return ()
        return tuple(t for t in phase.streams if self.streams[t].dtype == self.dtype)

    def looped(self, step: Step, phase: Phase) -> bool:
        """Whether the turns of a pass that loads ahead are a loop: registers have no index, so those of one that works
        on a fragment or on tiles in registers are unrolled. A softplus of 256 columns is 540 instructions so, and not
        2,160."""
        bases = {self.views.get(tile, (tile, 0))[0] for tile in phase.used}
        in_registers = any(self.places.get(tile) is Place.REGISTERS for tile in bases)
        in_registers |= any(sink.kind == "registers" for sink in phase.sinks)
        fragment = bool(phase.keep) or step.held_before(phase) in phase.used
        return bool(self.ahead(step, phase)) and not in_registers and not fragment

    def __hash__(self) -> int:
        return hash((self.stage, self.dtype))
