"""C++ of results that are what the rows of each node sum to, rows being in the order of their nodes."""

from __future__ import annotations

from math import ceil

from tilestream.errors import VerifyError
from tilestream.ir.axes import ROWS, Axis
from tilestream.ir.pipeline import TILE_ROWS, Pipeline, Role, Stage, Tensor, TileOp
from tilestream.kernels.stream.layout import CHUNK, SUM_VALUES, SUMS_BYTES
from tilestream.kernels.stream.model import Schedule, Sink
from tilestream.kernels.stream.names import Names
from tilestream.kernels.stream.tables import Tables

RECEIVERS, STARTS, CARRY = "receivers", "starts", "carry"
"""Kinds of pointers; that of starts comes with how many nodes there are."""
HUB = 32
"""Tiles of a node that one warp adds up; more take a launch behind the one that joins others (node_sums.cuh)."""
HOW = {"sum": "Added", "max": "Largest", "min": "Smallest"}


def sums_of(stage: Stage) -> list[TileOp]:
    """The stores of a stage that sum rows to nodes."""
    return [op for op in stage.ops if op.receivers]


def carry(op: TileOp, pipeline: Pipeline) -> Tensor:
    """What tiles leave of nodes that cross them: two rows of numbers a tile."""
    features = pipeline.tensor(op.params[0]).features
    axes = (ROWS, Axis("", ceil(features / (TILE_ROWS // 2))))
    return Tensor(f"{op.params[0]}.{CARRY}", Role.OUTPUT, axes, "f32")


def check_sums(schedule: Schedule) -> None:
    """Raise ``VerifyError`` unless a kernel can sum a stage's rows to nodes."""
    found = sums_of(schedule.stage)
    whole = schedule.stage.placement.dim == 0 and schedule.pass_columns == CHUNK // TILE_ROWS // 2
    if found and (not whole or len({(op.ins, op.params[1:]) for op in found}) > 1):
        raise VerifyError(
            f"stage {schedule.stage.name!r} sums rows to nodes at {found[0].source or found[0].params[0]} under"
            f" Shard({schedule.stage.placement.dim}), by {schedule.pass_columns} columns, from"
            f" {len({op.ins for op in found})} tiles",
            "use Shard(0), products of 16 bits, and one tile and list",
        )


class NodeSums:
    """Of one stage, all of whose sums are of one tile."""

    def __init__(self, names: Names) -> None:
        self.names, self.sums = names, sums_of(names.s.stage)
        _, self.receivers, self.starts = self.sums[0].params if self.sums else ("", "", "")

    def _pointer(self, kind: str, name: str) -> str:
        return f"p.pointers[{self.names.tables.pointer(kind, name)}]"

    def _next(self, tile: str) -> str:
        return f"find_next_runs(runs, p, {self._pointer(RECEIVERS, self.receivers)}, {tile});"

    def declarations(self) -> list[str]:
        return ["Runs runs;", self._next("Units<S::TILES>(p.rows, w).tile(g)")] if self.sums else []

    def begin(self) -> list[str]:
        """As a tile begins: what is asked for now is here when its rows are made."""
        if not self.sums:
            return []
        starts = self._pointer(STARTS, self.starts)
        return [f"find_runs(runs, {starts}, tile);", self._next("tile + u.stride * S::TILES")]

    @property
    def _values(self) -> str:
        return f"smem + {self.names.layout.sums}u + g * {SUMS_BYTES}u"

    @property
    def _runs(self) -> str:
        return f"{self._values} + {SUM_VALUES}u"

    def before(self) -> str:
        """Before the turns of a pass: all warps are done with the tile before, whose last barrier it was."""
        return f"put_runs(runs, {self._runs});"

    def put(self, block: str, a: str, b: str) -> str:
        """A pair of the tile's columns."""
        return f"sts64(sum_addr({self._values}, t, {block}, j), {a}, {b});"

    def after(self, sinks: list[Sink], column: str) -> list[str]:
        """Behind a turn's pairs."""
        barrier = self.names.barrier()
        return [barrier, *(self._call(s.target, column) for s in sinks), barrier]

    def _call(self, target: str, column: str) -> str:
        out, left = self._pointer("output", target), self._pointer(CARRY, f"{target}.{CARRY}")
        given = f"{self._values}, {self._runs}, (void*){out}, (float*){left}, tile, {column}"
        op = next(op for op in self.sums if op.params[0] == target)
        return f"sum_to_nodes<{_types(op, self.names.pipeline)}>({given});"


def joins(pipeline: Pipeline, tables: Tables) -> list[str]:
    """Of the launches behind the first one."""
    lines = []
    for op in (op for stage in pipeline.stages for op in sums_of(stage)):
        out, (_, receivers, starts) = pipeline.tensor(op.params[0]), op.params
        kinds = {"void*": ("output", out.name), "float*": (CARRY, f"{out.name}.{CARRY}")}
        given = [f"({kind})p.pointers[{tables.pointer(*of)}]" for kind, of in kinds.items()]
        lists = [tables.pointer(RECEIVERS, receivers), tables.pointer(STARTS, starts)]
        given += [f"(const int*)p.pointers[{k}]" for k in lists]
        lines.append(
            f"join_nodes<{_types(op, pipeline)}>({', '.join(given)}, (int)p.strides[{lists[1]}], p.rows, p.phase);"
        )
    return lines


def _types(op: TileOp, pipeline: Pipeline) -> str:
    """How the rows of a node are combined, and what they become."""
    out = pipeline.tensor(op.params[0])
    return f"{HOW[op.combine]}, {out.dtype}, {out.features}"
