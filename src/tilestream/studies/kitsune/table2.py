"""A row of Table 2: operators, how many of them each kind of fusion takes, and the off-chip traffic that it saves.

Vertical fusion of a training graph is counted as the paper's model has it: an inference engine's kernels of the forward
graph (TensorRT, AStitch, Welder), which write nothing for a backward pass. The paper calls that optimistic. Kitsune's
pipelines write what is saved.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tilestream.studies.kitsune.compiler.operators import Kind, OperatorGraph
from tilestream.studies.kitsune.compiler.patterns import DEEP, VERTICAL
from tilestream.studies.kitsune.compiler.selection import Selection, select
from tilestream.studies.kitsune.compiler.traffic import reduction

SAVED = "vertical, what is saved is written"


@dataclass(frozen=True)
class Row:
    """``traffic_vertical`` and ``traffic_kitsune`` are reductions in percent of the bulk-synchronous traffic."""

    app: str
    mode: str
    operators: int
    fused_vertical: int
    fused_kitsune: int
    traffic_vertical: float
    traffic_kitsune: float

    def json(self) -> dict[str, str | int | float]:
        return asdict(self)


def row(graph: OperatorGraph, complete: bool = False) -> Row:
    """The row of a captured model. It depends on no device: nothing is credited to caches. ``complete`` as in
    ``select``."""
    vertical, spatial = select(graph, VERTICAL, complete=complete), select(graph, complete=complete)
    return Row(
        graph.name,
        graph.mode,
        len(graph),
        vertical.fused,
        spatial.fused,
        _percent(graph, vertical, saves=False),
        _percent(graph, spatial),
    )


def other_counts(graph: OperatorGraph) -> dict[str, float]:
    """What Table 2's traffic of a training graph would be, in percent, were it counted otherwise."""
    vertical, spatial = select(graph, VERTICAL), select(graph)
    kitsune = _percent(graph, spatial)
    sums = [op for node in spatial.nodes for op in map(graph.__getitem__, node.ops) if op.kind is Kind.REDUCTION]
    again = 100 * sum(op.inputs[0].bytes for op in sums if op.over_rows and op.phase == "backward") / graph.bytes
    return {
        SAVED: _percent(graph, vertical),
        "Kitsune, what is saved is not written": _percent(graph, spatial, saves=False),
        "Kitsune, a bias's gradient reads its operand again": kitsune - again,
        "Kitsune, a bias's gradient is a kernel of its own": kitsune - 2 * again,
        "Kitsune, layers of the backward graph joined": _percent(graph, select(graph, DEEP)),
    }


def _percent(graph: OperatorGraph, selection: Selection, saves: bool = True) -> float:
    return 100 * reduction(graph, selection.units(graph), saves)
