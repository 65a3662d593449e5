"""Parts of a model that was captured and planned, but not run: its graphs, its regions, who runs what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from tilestream.graph.capture import Kind
from tilestream.graph.costs import flops
from tilestream.graph.nodes import computes, is_ours
from tilestream.graph.selection import Cut, Exclusion
from tilestream.ir.pipeline import Pipeline
from tilestream.plan.candidates import Candidate, Plan
from tilestream.plan.find import Found
from tilestream.plan.gradient_launches import GradientLaunch
from tilestream.plan.pairs import Pair


@dataclass(frozen=True)
class Share:
    """A part of a model: ATen operators that compute (no views, no arithmetic on sizes), and ``flops`` as counted by
    ``tilestream.graph.costs.flops``."""

    operators: int = 0
    flops: int = 0

    def __add__(self, other: Share) -> Share:
        return Share(self.operators + other.operators, self.flops + other.flops)

    def __sub__(self, other: Share) -> Share:
        return Share(self.operators - other.operators, self.flops - other.flops)


def share_of(graph: fx.Graph) -> Share:
    """What a graph has in operators that are not ours."""
    compute = [n for n in graph.nodes if computes(n) and not is_ours(n)]
    return Share(len(compute), sum(map(flops.of_node, compute)))


@dataclass(frozen=True)
class Coverage:
    """Who runs a model. A region that Inductor wins is Inductor's; ``eager`` is what no graph holds."""

    dataflow: Share
    inductor: Share
    eager: Share

    @property
    def whole(self) -> Share:
        return self.dataflow + self.inductor + self.eager

    def json(self) -> dict[str, dict[str, int]]:
        parts = {"dataflow": self.dataflow, "inductor": self.inductor, "eager": self.eager}
        return {
            "operators": {name: part.operators for name, part in parts.items()},
            "flops": {name: part.flops for name, part in parts.items()},
        }


RegionKind = Literal["region", "ragged", "weight gradients", "backward chain"]
"""What streams rows, what reduces rows of edges at nodes, what sums over all rows, or the first and the last in one."""


@dataclass(frozen=True)
class RegionAnalysis:
    """One region, or one launch of weight gradients: its ATen operators, their source lines, and its plan.

    ``rows`` is the number of rows it was planned for. ``plan`` is ``None`` where planning failed, and ``problem``
    says why. ``flops`` are those of its operators, ``nodes`` what they are in their graph (empty where the region was
    compiled and not analysed), ``modules`` the paths of the modules that made them. ``turned_us``: of copies of its
    weights before each call, where they lie as no kernel reads them; in no prediction of a candidate. ``launches``:
    of a backward chain, the pipelines that run one after another; its candidate has the first. ``parts``: the region
    and the sums that it is of, which its fallback runs apart. ``alone``: nothing else of its graph streams, so
    without its pipeline the graph is Inductor's as it is, activations apart from products. ``edges``: of a ragged
    region, those of the call that was captured. ``of``: what was found, and is planned here; like ``nodes`` it is gone
    from what is kept after a compilation.
    """

    name: str
    rows: int
    operators: tuple[str, ...]
    sources: tuple[str, ...]
    program: Pipeline
    plan: Plan | None
    problem: str = ""
    graph: int = 0
    flops: int = 0
    nodes: tuple[fx.Node, ...] = field(default=(), repr=False, compare=False)
    modules: tuple[str, ...] = ()
    kind: RegionKind = "region"
    turned_us: float = 0.0
    launches: tuple[Pipeline, ...] = ()
    parts: tuple[RegionAnalysis, ...] = ()
    alone: bool = False
    edges: int = 0
    of: Cut | GradientLaunch | Pair | None = field(default=None, repr=False, compare=False)

    def pipelines(self, candidate: Candidate | None) -> tuple[Pipeline, ...]:
        """What a candidate runs, in order; nothing where it is the fallback."""
        if candidate is None or candidate.pipeline is None:
            return ()
        return self.launches or (candidate.pipeline,)

    @property
    def runs(self) -> Candidate | None:
        """The candidate that runs; ``None`` without a plan."""
        return None if self.plan is None else self.plan.chosen

    @property
    def running(self) -> tuple[Pipeline, ...]:
        """The pipelines that run, in order."""
        return self.pipelines(self.runs)

    @property
    def runner(self) -> str:
        """The strategy of the pipeline that runs; ``inductor`` where none does, ``eager`` where there are no rows."""
        if self.runs is None or self.runs.pipeline is None:
            return "inductor" if self.rows else "eager"
        return self.runs.strategy


@dataclass(frozen=True)
class GraphAnalysis:
    """One graph: ``inference``, ``forward`` or ``backward``, and all its operators."""

    kind: Kind
    whole: Share
    found: Found = field(repr=False, compare=False)

    @property
    def graph(self) -> fx.Graph:
        return self.found.graph.graph


@dataclass(frozen=True)
class Excluded(Exclusion):
    """An operator outside of every region, with the path of its module, its FLOPs and the number of its graph."""

    module: str = ""
    flops: int = 0
    graph: int = 0
