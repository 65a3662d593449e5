"""C++ names of what the consumers of a stage use: rows, buffers, chunks, pointers in order of use."""

from __future__ import annotations

import re

from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.stream.layout import PARKED_BYTES, Layout
from tilestream.kernels.stream.model import ColumnLoop, Gemm, Schedule, columns_of
from tilestream.kernels.stream.tables import Tables


class Names:
    """Names in the text of one stage, whose tiles are split by columns over both warpgroups or not."""

    def __init__(self, schedule: Schedule, layout: Layout, pipeline: Pipeline, tables: Tables) -> None:
        self.s, self.layout, self.pipeline, self.tables = schedule, layout, pipeline, tables
        self.split = schedule.stage.placement.dim == 1
        self.loop: ColumnLoop | None = None  # that the text being made is in
        self.pointers = 0

    @property
    def shifted(self) -> bool:
        """Whether a fragment's first column is ``col0`` of the tile: a half's, or that of a turn of a loop."""
        return self.split or self.loop is not None

    @property
    def column(self) -> str:
        """The tile's column that is the first of a lane's pair."""
        return "col0 + col_of(t, i)" if self.shifted else "col_of(t, i)"

    def barrier(self) -> str:
        """Waits for all that work on the tile: one warpgroup, or both."""
        return "named_sync(BOTH_GROUPS, 256);" if self.split else "named_sync(GROUP_BARRIER + g, 128);"

    def row(self, tile: str) -> str:
        return "row_" + re.sub(r"\W", "_", tile)

    def pointer(self, kind: str, name: str, first: int = 0) -> str:
        self.tables.stage_pointers.append(self.tables.pointer(kind, name, first))
        self.pointers += 1
        return f"p.pointer(w.pointers@P{self.pointers - 1}@)"

    def buffer(self, tile: str) -> str:
        k = self.s.buffers[tile]
        base = f"smem + {self.layout.buffers[k]}u"
        return base if self.split else f"{base} + g * {self.layout.buffer_bytes[k]}u"

    def parked(self, tile: str) -> str:
        """Where this warpgroup's part of a parked tile begins."""
        at = self.layout.parking + self.s.parked[tile] * PARKED_BYTES
        return f"smem + {at}u + g * {self.layout.parking_bytes}u"

    def element(self, dtype: str) -> str:
        """C++ type; the operands' has a name of its own, so that kernels of one dtype differ in nothing else."""
        return "T" if dtype == self.s.dtype else dtype

    def buffer_dtype(self, tile: str) -> str:
        return self.s.buffer_dtypes[self.s.buffers[tile]]

    def own_chunks(self, dtype: str) -> str:
        """Offset of this warpgroup's columns in a tile of ``dtype``."""
        return f" + (u32)(col0 / {columns_of(dtype)}) * CHUNK_BYTES" if self.split else ""

    def chunk_names(self, tile: str) -> list[str]:
        """Variables that hold the addresses of a stream's chunks for one turn of an epilogue."""
        name = "in_" + re.sub(r"\W", "_", tile)
        parts = self.s.parts(self.s.streams[tile].dtype)
        return [name] if parts == 1 else [f"{name}_{k}" for k in range(parts)]

    def in_chunk(self, chunks: list[str], dtype: str, k: str) -> str:
        """Address of a lane's pair in block ``k`` of a turn that has these chunks of ``dtype``."""
        t = self.element(dtype)
        if len(chunks) == 1:
            return f"pair_addr<{t}>({chunks[0]}, t, {k}, j)"
        blocks = columns_of(dtype) // 8
        return f"pair_addr<{t}>({k} < {blocks} ? {chunks[0]} : {chunks[1]}, t, {k} % {blocks}, j)"

    def start(self, gemm: Gemm, blocks: int, width: int, acc: str = "acc", col0: str = "col0") -> str:
        """Accumulators start from the bias, or from zero; ``col0``: their first column, where it is not always 0."""
        if not gemm.bias:
            return f"clear({acc});"
        parts = 2 if self.split else self.loop.turns if self.loop is not None else 1
        whole = "true" if gemm.features == width * parts and width % 8 == 0 else "false"
        vector = self.pipeline.tensor(gemm.bias)
        bias, first = self.pointer("vector", gemm.bias, gemm.part), col0 if self.shifted else str(gemm.first)
        features = gemm.first + gemm.features
        return f"start_from<{vector.dtype}, {features}, {blocks}, {whole}>({acc}, {bias}, {first});"

    def subs(self, blocks: int) -> list[tuple[int, int]]:
        """(blocks, first block) of each page that a product's columns are spread over."""
        page = self.layout.page_rows // 8
        return [(min(page, blocks - at), at) for at in range(0, blocks, page)]
