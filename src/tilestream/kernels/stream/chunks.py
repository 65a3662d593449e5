"""The chunks of input that a stage's consumers take, in order: what loader warps ask for, and what is waited for."""

from __future__ import annotations

from tilestream.kernels.stream.model import Phase, Place, Schedule, Step, columns_of


def all_chunks(schedule: Schedule) -> list[tuple[str, int]]:
    """(stream, first column) of every chunk of one tile, in order."""
    made = []
    for step in schedule.steps:
        made += product_chunks(schedule, step)
        for phase in step.phases:
            made += epilogue_chunks(schedule, step, phase)
    return made


def product_chunks(schedule: Schedule, step: Step) -> list[tuple[str, int]]:
    """(stream, first column) of every chunk that a step's product takes."""
    segments = step.gemm.segments if step.gemm is not None else ()
    columns = schedule.chunk_columns
    streamed = [s for s in segments if s.place is Place.STREAM]
    return [(s.tile, c * columns) for s in streamed for c in range(s.chunks(columns))]


def epilogue_chunks(schedule: Schedule, step: Step, phase: Phase) -> list[tuple[str, int]]:
    """(stream, first column) of every chunk that a pass takes, in order; under Shard(1), for either warpgroup."""
    turns = schedule.turns(step)
    halves = (0, turns) if schedule.stage.placement.dim == 1 else (0,)
    chunks = []
    for c in range(turns):
        for tile in phase.streams:
            dtype = schedule.streams[tile].dtype
            for part in range(schedule.parts(dtype)):
                chunks += [(tile, (c + h) * schedule.pass_columns + part * columns_of(dtype)) for h in halves]
    return chunks
