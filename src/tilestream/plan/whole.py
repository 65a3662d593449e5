"""The plan of a whole model: its launches in order, each a pipeline or a library's kernel, with what it takes.

The one prediction that is shown of anything: pipelines and kernels as the simulator's event loop runs them. The cost
model and the closed form of library kernels rank candidates, and are shown nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import fx

from tilestream.devices import Device
from tilestream.graph.decode import STEP
from tilestream.graph.eager import EagerOp
from tilestream.graph.nodes import name as target_name
from tilestream.graph.rewrites.epilogues import with_epilogues
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.lengths import sizes_at
from tilestream.ir.plain import by_rows
from tilestream.ir.traffic import levels_of
from tilestream.plan.candidates import Candidate
from tilestream.plan.decode import PLANNED
from tilestream.plan.fusion import units
from tilestream.plan.library import eager_kernel, kernels
from tilestream.plan.parts import GraphAnalysis, RegionAnalysis, RegionKind
from tilestream.plan.shown import pipelines_us, predicted_by
from tilestream.plan.values import Readers, moved
from tilestream.simulator import run
from tilestream.simulator.library import Cache, Kernel, as_inductor_runs, launches
from tilestream.simulator.steps import StepRun
from tilestream.simulator.workload import SimLaunch, Workload


@dataclass(frozen=True)
class Launch:
    """A pipeline with its region, or a kernel of cuBLAS, Inductor or PyTorch.

    Attributes:
        graph: number of its graph; -1 for operators outside of every graph.
        operators: ATen operators, as ``aten.addmm.default``.
        kernels: how many run for it: a pipeline that is cut in DRAM has several.
        predicted_us: microseconds by the simulator; ``measured_us`` on a GPU, where the launch was timed.
        flops: of products; ``bytes`` between DRAM and the chip, nothing cached from before.
        predicted_by: ``simulator``, or ``closed form of ...`` (``kernels.costs.ClosedForm``).
        what: of a pipeline, what it is; ``modules``: the paths of the modules that it belongs to.
        step: of a decode step as one kernel, its stages.
    """

    kind: Literal["pipeline", "library"]
    name: str
    graph: int
    operators: tuple[str, ...]
    source: str
    predicted_us: float
    measured_us: float | None = None
    region: str = ""
    strategy: str = ""
    kernels: int = 1
    flops: float = 0.0
    bytes: float = 0.0
    what: RegionKind | Literal[""] = ""
    modules: tuple[str, ...] = ()
    predicted_by: str = "simulator"
    step: StepRun | None = None

    @property
    def ours(self) -> bool:
        """Whether it is a pipeline or another kernel of this package."""
        return self.kind == "pipeline" or any(op.startswith("tilestream.") for op in self.operators)


@dataclass(frozen=True)
class WholePlan:
    """Launches in the order in which they run on ``device``, one after another."""

    device: str
    launches: tuple[Launch, ...]

    @property
    def predicted_us(self) -> float:
        return sum(launch.predicted_us for launch in self.launches)

    def json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "predicted_us": self.predicted_us,
            "launches": [_facts(launch) for launch in self.launches],
        }


def _facts(launch: Launch) -> dict[str, Any]:
    made = {**asdict(launch), "operators": list(launch.operators)}
    return made if launch.step else {name: v for name, v in made.items() if name != "step"}


@dataclass(frozen=True)
class _Step:
    """A launch to be, and the kernels that the simulator runs for it; a pipeline's time is known."""

    launch: Launch
    simulated: SimLaunch | None


def whole(
    graphs: Sequence[GraphAnalysis],
    streamed: Sequence[tuple[RegionAnalysis, Candidate]],
    eager: Sequence[EagerOp],
    device: Device,
    tf32: bool,
) -> WholePlan:
    """The plan of graphs one after another, then what ran outside of them.

    Args:
        streamed: the regions that run as pipelines, each with the candidate that does.
        tf32: whether tensor cores take float32 products.
    """
    steps: list[_Step] = []
    for number, graph in enumerate(graphs):
        own = [(r, c) for r, c in streamed if r.graph == number]
        steps += _graph_steps(number, list(graph.graph.nodes), own, device, tf32)
    cache = Cache(device)
    for op in eager:
        steps += _library(-1, (eager_kernel(op, tf32),), device, cache)
    return _timed(steps, device)


def inductor_kernels(
    nodes: Sequence[fx.Node], device: Device, tf32: bool, number: int = 0, epilogues: bool = True
) -> WholePlan:
    """Operators of graph ``number``, in the order of their graph, as Inductor runs them without a pipeline.

    Args:
        epilogues: whether activations are epilogues of products (``rewrites.epilogues``), as where something else of
            the graph streams; else the graph is Inductor's as it is.
    """
    cache, readers = Cache(device), Readers(list(nodes[0].graph.nodes))
    steps = [
        step
        for unit in units(nodes, with_epilogues(nodes) if epilogues else {})
        for step in _library(number, kernels(unit.nodes, readers, tf32), device, cache)
    ]
    return _timed(steps, device)


def _graph_steps(
    number: int,
    nodes: Sequence[fx.Node],
    streamed: Sequence[tuple[RegionAnalysis, Candidate]],
    device: Device,
    tf32: bool,
) -> Iterator[_Step]:
    chosen = {region.name: (region, candidate) for region, candidate in streamed}
    cache, readers = Cache(device), Readers(nodes)
    inside = {node for region, _ in chosen.values() for node in region.nodes}
    relus = with_epilogues([n for n in nodes if n not in inside]) if streamed else {}
    for unit in units(nodes, {**relus, **{name: region.nodes for name, (region, _) in chosen.items()}}):
        if unit.nodes[0].target is STEP:
            yield _Step(_decode_step(number, unit.nodes[0], device), None)
            continue
        if unit.region not in chosen:
            yield from _library(number, kernels(unit.nodes, readers, tf32), device, cache)
            continue
        touched = moved(unit.nodes, readers)
        cache.share(touched.reads, touched.writes)
        yield _Step(_pipeline(*chosen[unit.region], device), None)


def _decode_step(number: int, node: fx.Node, device: Device) -> Launch:
    run = node.meta[PLANNED].on(device)
    names, lines = (target_name(node),), run.lines.values()
    made = Launch("library", node.name, number, names, next(iter(lines), ""), run.time_us, bytes=run.bytes, step=run)
    return replace(made, predicted_by="closed form of decode steps")


def _library(number: int, found: Sequence[Kernel], device: Device, cache: Cache) -> Iterator[_Step]:
    found = [part for kernel in found for part in as_inductor_runs(kernel, device)]
    for kernel, simulated in zip(found, launches(found, device, cache), strict=True):
        size = kernel.read + kernel.written
        launch = Launch("library", kernel.name, number, kernel.ops, kernel.source, 0.0, flops=kernel.flops, bytes=size)
        yield _Step(launch, simulated)


def _pipeline(region: RegionAnalysis, candidate: Candidate, device: Device) -> Launch:
    pipelines = region.pipelines(candidate)
    us = pipelines_us(pipelines, region.rows, device, region.edges)
    return Launch(
        "pipeline",
        region.name,
        region.graph,
        region.operators,
        region.sources[0] if region.sources else "",
        (candidate.predicted_us or 0.0) if us is None else us + region.turned_us,
        candidate.measured_us,
        region.name,
        candidate.name,
        sum(len(cut_at_dram(p)) if by_rows(p) else 1 for p in pipelines),
        float(region.flops),
        float(sum(levels_of(p, sizes_at(p, region.rows, region.edges))["dram"] for p in pipelines)),
        region.kind,
        region.modules,
        predicted_by(pipelines),
    )


def _timed(steps: Sequence[_Step], device: Device) -> WholePlan:
    """All library kernels in one run of the simulator, which runs equal ones once."""
    left = tuple(step.simulated for step in steps if step.simulated is not None)
    times = iter([launch.seconds * 1e6 for launch in run(Workload("library kernels", left), device).launches])
    return WholePlan(
        device.name,
        tuple(s.launch if s.simulated is None else replace(s.launch, predicted_us=next(times)) for s in steps),
    )
