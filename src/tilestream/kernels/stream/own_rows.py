"""C++ of rows through an index that lanes load themselves: by no ring, into the registers that products take.

A loader warp copies 64 rows of 128 bytes in 1.6 us, 16 bytes a lane; the 128 lanes that compute with them load the same
in the latency of one load. Which rows those are is read a tile ahead.
"""

from __future__ import annotations

from tilestream.ir.pipeline import TileOp
from tilestream.kernels.stream.model import Step
from tilestream.kernels.stream.names import Names
from tilestream.kernels.stream.tables import own_entry

NEXT = "tile + u.stride * S::TILES"


class OwnRows:
    """Of one stage. Pointers of tables and indices are placed where they are first named."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.loads = [step.own_rows for step in names.s.steps if step.own_rows is not None]

    def declarations(self) -> list[str]:
        """Of each index the rows of the next tile, at first of the first one."""
        lines = []
        for op in {self._rows(op): op for op in self.loads}.values():
            first = "Units<S::TILES>(p.rows, w).tile(g)"
            lines += [f"OwnRows {self._rows(op)};", self._find("find_first_rows", op, first)]
        return lines

    def text(self, step: Step) -> list[str]:
        """Of one load: its rows, and if no other load takes the same ones, which those of the next tile are."""
        op = step.own_rows
        assert op is not None
        slot, blocks = f"r{self.names.s.slots[op.made.name]}", op.made.features // 8
        lines = [f"load_own_rows<{blocks}>({slot}, {self._rows(op)}, p, {self._entry(op)});"]
        if blocks % 2:
            lines.append(f"zero_blocks<{blocks}, {blocks + 1}>({slot});")
        later = self.loads[self.loads.index(op) + 1 :]
        if all(self._rows(other) != self._rows(op) for other in later):
            lines.append(self._find("find_own_rows", op, NEXT))
        return lines

    def _find(self, what: str, op: TileOp, tile: str) -> str:
        return f"{what}({self._rows(op)}, p, {self._entry(op)}, {tile});"

    def _entry(self, op: TileOp) -> str:
        return f"LoadOp{{{', '.join(map(str, own_entry(self.names.tables, op, self.names.pipeline)))}}}"

    def _rows(self, op: TileOp) -> str:
        return f"rows{own_entry(self.names.tables, op, self.names.pipeline)[2]}"
