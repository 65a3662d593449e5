"""What tilestream makes of a model, captured, partitioned and planned, but not run: the data. Read by ``report``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilestream import devices
from tilestream.devices import Device
from tilestream.graph.eager import EagerOp
from tilestream.options import Options
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.decode import steps_of
from tilestream.plan.parts import Coverage, Excluded, GraphAnalysis, RegionAnalysis, Share
from tilestream.plan.shown import pipelines_us, total_us
from tilestream.plan.whole import WholePlan, inductor_kernels, whole


@dataclass(frozen=True)
class Alternative:
    """A precision, the line that asks for it, and what comes of it; or why nothing does (``problem``)."""

    name: str
    write: str
    coverage: Coverage | None = None
    predicted_us: float | None = None
    inductor_predicted_us: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Analysis:
    """Coverage, regions, exclusions and plans of a model.

    Attributes:
        graphs: those that Dynamo made, in order; ``breaks`` says why there is more than one, or none.
        eager: operators outside of every graph.
        mode: ``eval`` or ``train``, as the module was; empty for a function.
        training: whether gradients were wanted.
        hints: what the user should know of the capture, a line each.
        float32: what lower precisions would give, where float32 keeps layers from streaming.
        plain_graphs: where ``graphs`` hold operators of ours, the same graphs without, which are Inductor's.
        measured_us, inductor_measured_us: one call of the whole model, timed on the device, and the same of Inductor.
    """

    model: str
    device: str
    options: Options
    graphs: tuple[GraphAnalysis, ...]
    regions: tuple[RegionAnalysis, ...] = ()
    exclusions: tuple[Excluded, ...] = ()
    eager: tuple[EagerOp, ...] = ()
    breaks: tuple[str, ...] = ()
    mode: str = ""
    training: bool = False
    hints: tuple[str, ...] = ()
    float32: tuple[Alternative, ...] = ()
    tf32: bool = True
    hardware: Device | None = None
    plain_graphs: tuple[GraphAnalysis, ...] = ()
    measured_us: float | None = None
    inductor_measured_us: float | None = None

    @property
    def coverage(self) -> Coverage:
        """Operators and FLOPs by who runs them."""
        parts = {"dataflow": Share(), "eager": Share(len(self.eager), sum(e.flops for e in self.eager))}
        rest = sum((g.whole for g in self.graphs), Share())
        for region in self.regions:
            runner, share = region.runner, Share(len(region.operators), region.flops)
            if runner != "inductor":
                parts["eager" if runner == "eager" else "dataflow"] += share
                rest -= share
        for step in (step for g in self.graphs for step in steps_of(g.graph)):
            parts["dataflow"] += step.share
            rest -= step.share
        return Coverage(parts["dataflow"], rest, parts["eager"])

    @property
    def empty(self) -> bool:
        """Whether there is nothing to predict a time for: inputs without rows."""
        return any(r.rows == 0 for r in self.regions)

    @cached_property
    def whole(self) -> WholePlan:
        """Launches in order: the regions that run as pipelines, and the kernels of what is left."""
        running = ((r, r.runs) for r in self.regions if r.nodes)
        streamed = [(r, c) for r, c in running if c is not None and c.pipeline is not None and r.rows]
        return whole(self.graphs, streamed, self.eager, self._device, self.tf32)

    @cached_property
    def on_inductor(self) -> WholePlan:
        """The same with every region, and every interaction, on Inductor."""
        return whole(self.plain_graphs or self.graphs, (), self.eager, self._device, self.tf32)

    @property
    def predicted_us(self) -> float | None:
        """Predicted microseconds of one call; None where inputs have no rows."""
        return None if self.empty else self.whole.predicted_us

    @property
    def inductor_predicted_us(self) -> float | None:
        """The same with every region on Inductor."""
        return None if self.empty else self.on_inductor.predicted_us

    def candidate_us(self, region: RegionAnalysis, candidate: Candidate) -> float | None:
        """Predicted microseconds of one candidate of a region, Inductor among them; None of what was refused."""
        if candidate.pipeline is not None:
            us = pipelines_us(region.pipelines(candidate), region.rows, self._device, region.edges)
            return None if us is None else us + region.turned_us
        if region.parts:
            return self._apart_us(region)
        if candidate.strategy != FALLBACK or not region.nodes or not region.rows:
            return None
        return inductor_kernels(region.nodes, self._device, self.tf32, region.graph, not region.alone).predicted_us

    def _apart_us(self, chain: RegionAnalysis) -> float | None:
        """A backward chain's region and sums, each as it would run."""
        runs = [(part, part.runs) for part in chain.parts]
        return total_us(None if candidate is None else self.candidate_us(part, candidate) for part, candidate in runs)

    @property
    def _device(self) -> Device:
        return self.hardware or devices.get(self.device)
