"""What tilestream makes of a model, captured, partitioned and planned, but not run: the data. Read by ``report``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tilestream import devices
from tilestream.devices import Device
from tilestream.graph.capture import Kind
from tilestream.graph.eager import EagerOp
from tilestream.graph.kernels import Kernel
from tilestream.graph.selection import Exclusion
from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options
from tilestream.plan import roofline
from tilestream.plan.planner import Candidate, Plan


@dataclass(frozen=True)
class Share:
    """A part of a model: ATen operators that compute (no views, no arithmetic on sizes), and ``flops`` as counted by
    ``tilestream.graph.flops``."""

    operators: int = 0
    flops: int = 0

    def __add__(self, other: Share) -> Share:
        return Share(self.operators + other.operators, self.flops + other.flops)


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


@dataclass(frozen=True)
class RegionAnalysis:
    """One region: its ATen operators, their source lines, and its plan.

    ``rows`` is the number of rows it was planned for. ``plan`` is ``None`` where planning failed,
    and ``problem`` says why. ``flops`` are those of its operators, ``kernels`` what they would be without tilestream,
    ``modules`` the paths of the modules that made them.
    """

    name: str
    graph: int
    rows: int
    operators: tuple[str, ...]
    sources: tuple[str, ...]
    program: Pipeline
    plan: Plan | None
    problem: str = ""
    flops: int = 0
    kernels: tuple[Kernel, ...] = ()
    modules: tuple[str, ...] = ()

    def runs(self, target: str = "auto") -> Candidate | None:
        """The candidate that runs under option ``target``; ``None`` without a plan.

        The reference machine was asked for, so it never gives way to Inductor.
        """
        if self.plan is None or target != "reference" or self.plan.chosen.pipeline is not None:
            return self.plan.chosen if self.plan is not None else None
        legal = [c for c in self.plan.candidates if c.pipeline is not None and not c.rejected]
        return min(legal, key=lambda c: c.predicted_us or float("inf")) if legal else self.plan.chosen

    def runner(self, target: str = "auto") -> str:
        """The strategy of the pipeline that runs; ``inductor`` where none does, ``eager`` where there are no rows."""
        candidate = self.runs(target)
        if candidate is None or candidate.pipeline is None:
            return "inductor" if self.rows else "eager"
        return candidate.strategy

    @property
    def inductor_us(self) -> float | None:
        """Predicted microseconds of Inductor's code for the region, where there is a prediction."""
        candidates = self.plan.candidates if self.plan is not None else ()
        return next((c.predicted_us for c in candidates if c.strategy == "fallback"), None)


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
class GraphAnalysis:
    """One graph: ``inference``, ``forward`` or ``backward``; all its operators, and the kernels outside of regions."""

    kind: Kind
    whole: Share
    rest: tuple[Kernel, ...] = ()


@dataclass(frozen=True)
class Excluded(Exclusion):
    """An operator outside of every region, with the path of its module, its FLOPs and the number of its graph."""

    module: str = ""
    flops: int = 0
    graph: int = 0


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
        measured_us, inductor_measured_us: one call of the whole model, timed on the device, and the same of Inductor.
    """

    model: str
    device: str
    options: Options
    graphs: tuple[GraphAnalysis, ...]
    regions: tuple[RegionAnalysis, ...]
    exclusions: tuple[Excluded, ...]
    eager: tuple[EagerOp, ...] = ()
    breaks: tuple[str, ...] = ()
    mode: str = ""
    training: bool = False
    hints: tuple[str, ...] = ()
    float32: tuple[Alternative, ...] = ()
    tf32: bool = True
    hardware: Device | None = None
    measured_us: float | None = None
    inductor_measured_us: float | None = None

    @property
    def coverage(self) -> Coverage:
        """Operators and FLOPs by who runs them."""
        parts = {"dataflow": Share(), "eager": Share(len(self.eager), sum(e.flops for e in self.eager))}
        rest = sum((g.whole for g in self.graphs), Share())
        for region in self.regions:
            runner, share = region.runner(self.options.target), Share(len(region.operators), region.flops)
            if runner != "inductor":
                parts["eager" if runner == "eager" else "dataflow"] += share
                rest = Share(rest.operators - share.operators, rest.flops - share.flops)
        return Coverage(parts["dataflow"], rest, parts["eager"])

    @property
    def empty(self) -> bool:
        """Whether there is nothing to predict a time for: inputs without rows."""
        return any(r.rows == 0 for r in self.regions)

    @property
    def predicted_us(self) -> float | None:
        """Predicted microseconds of one call: the pipelines that run, and a roofline of what is left."""
        return self._predicted(lambda r: (c := r.runs(self.options.target)) and c.predicted_us)

    @property
    def inductor_predicted_us(self) -> float | None:
        """The same with every region on Inductor."""
        return self._predicted(lambda r: r.inductor_us)

    def _predicted(self, of: Callable[[RegionAnalysis], float | None]) -> float | None:

        if self.empty:
            return None
        device = self.hardware or devices.get(self.device)

        def left_us(kernels: Sequence[Kernel]) -> float:
            return roofline.time_us(kernels, device, self.tf32)

        left = [*(k for g in self.graphs for k in g.rest), *(e.kernel for e in self.eager)]
        return left_us(left) + sum(us if (us := of(r)) is not None else left_us(r.kernels) for r in self.regions)

    def scaled(self, factor: float) -> Analysis:
        """The same for ``factor`` times the rows, all of which are streamed; plans stay as they are."""

        def flops(share: Share) -> Share:
            return replace(share, flops=round(share.flops * factor))

        def kernels(given: Sequence[Kernel]) -> tuple[Kernel, ...]:
            return tuple(k.scaled(factor) for k in given)

        return replace(
            self,
            graphs=tuple(replace(g, whole=flops(g.whole), rest=kernels(g.rest)) for g in self.graphs),
            regions=tuple(replace(r, flops=round(r.flops * factor), kernels=kernels(r.kernels)) for r in self.regions),
            exclusions=tuple(replace(e, flops=round(e.flops * factor)) for e in self.exclusions),
            eager=tuple(replace(e, flops=round(e.flops * factor), kernel=e.kernel.scaled(factor)) for e in self.eager),
        )
