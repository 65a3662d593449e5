"""A row of Table 2: operators, how many of them each kind of fusion takes, and the off-chip traffic that it saves."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tilestream.plan.spatial.operators import OperatorGraph
from tilestream.plan.spatial.patterns import VERTICAL
from tilestream.plan.spatial.selection import Selection, select
from tilestream.plan.spatial.traffic import reduction


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


def row(graph: OperatorGraph) -> Row:
    """The row of a captured model. It depends on no device: nothing is credited to caches."""
    vertical, spatial = select(graph, VERTICAL), select(graph)
    return Row(
        graph.name,
        graph.mode,
        len(graph),
        vertical.fused,
        spatial.fused,
        _percent(graph, vertical),
        _percent(graph, spatial),
    )


def _percent(graph: OperatorGraph, selection: Selection) -> float:
    return 100 * reduction(graph, selection.units(graph))
