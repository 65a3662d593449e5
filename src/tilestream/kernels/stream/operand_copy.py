"""C++ of a step that makes packed registers, which every block of a wide product reads, of what lies elsewhere."""

from __future__ import annotations

from tilestream.kernels.parts.text import loop
from tilestream.kernels.stream.model import Place, Step, ceil_to
from tilestream.kernels.stream.names import Names


def operand_copy(names: Names, step: Step) -> list[str]:
    """A stream, chunk by chunk, or parked blocks: words that no lane changes and, of blocks, that each lane wrote."""
    schedule = names.s
    (sink,) = step.phases[0].sinks
    slot = f"r{schedule.slots[sink.target]}"
    lines: list[str] = []
    blocks = 0
    for tile in step.copied:
        count = ceil_to(schedule.tiles[tile].features, 8) // 8
        if schedule.places[tile] is Place.STREAM:
            chunks = ceil_to(step.features, schedule.chunk_columns) // schedule.chunk_columns
            turn = [
                "in.wait_full();",
                "const u32 a = in.addr();",
                f"pack_chunk<T>({slot}, c, a);",
                "fence_async_shared();  // the loads come before the copy that takes the slot's place",
                "in.advance(); in.release();",
            ]
            lines += loop("c", chunks, turn)
        else:
            lines.append(f"unpark<{blocks}, {count}>({slot}, {names.parked(tile)});")
        blocks += count
    whole = ceil_to(schedule.tiles[sink.target].features, 8) // 8
    if whole % 2:
        lines.append(f"zero_blocks<{whole}, {whole + 1}>({slot});")
    return lines
