"""The paper's model of vertical fusion: what TensorRT, AStitch and Welder put into one kernel.

Operators of a group take turns in the same CTAs. That needs whole rows of what passes between them to fit a CTA, so
linears wider than one tile of a GEMM are not joined to each other. Only the forward graph is fused.
"""

from __future__ import annotations

from tilestream.studies.kitsune.operators import OperatorGraph
from tilestream.studies.kitsune.patterns import VERTICAL
from tilestream.studies.kitsune.regions import Selection
from tilestream.studies.kitsune.selection import select


def select_vertical(graph: OperatorGraph) -> Selection:
    """Groups that become one kernel each, and why the rest does not."""
    return select(graph, VERTICAL)
