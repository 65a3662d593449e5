"""What tilestream makes of a model: captured, partitioned and planned, but not run. Read by ``report``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tilestream.options import Options
from tilestream.regions import Exclusion

if TYPE_CHECKING:
    from torch import fx

    from tilestream.capture import Captured, Kind
    from tilestream.devices import Device
    from tilestream.eager import EagerOp
    from tilestream.ir import Pipeline
    from tilestream.library import Kernel
    from tilestream.planner import Candidate, Plan
    from tilestream.precision import Alternative


@dataclass(frozen=True)
class Share:
    """A part of a model: ATen operators that compute (no views, no arithmetic on sizes), and ``flops`` as counted by
    ``tilestream.flops``."""

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
        from tilestream import devices, library

        if self.empty:
            return None
        device = self.hardware or devices.get(self.device)

        def roofline(kernels: Sequence[Kernel]) -> float:
            return library.time_us(kernels, device, self.tf32)

        left = [*(k for g in self.graphs for k in g.rest), *(e.kernel for e in self.eager)]
        return roofline(left) + sum(us if (us := of(r)) is not None else roofline(r.kernels) for r in self.regions)

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


def analyse(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    options: Options | None = None,
    device: Device | None = None,
    *,
    keywords: Mapping[str, Any] | None = None,
    training: bool = False,
) -> Analysis:
    """Capture ``model(*inputs, **keywords)``, select regions, and plan each for ``device``.

    Nothing is computed, as ``capture.capture`` says. ``device=None`` means ``options.device``, else the GPU present,
    else ``h200``.

    Args:
        training: with gradients: forward and backward graphs.

    Raises:
        CaptureError: Dynamo could not capture the model.
        DeviceError: no device of that name is known.
    """
    from tilestream import capture, precision

    options = options or Options()
    device = device or _device(options)
    found = capture.capture(model, inputs, keywords, training)
    made = of_graphs(model, found, options, device, training)
    return replace(made, float32=precision.alternatives(made, found, model, inputs, keywords or {}))


def of_graphs(
    model: Callable[..., Any], found: Captured, options: Options, device: Device, training: bool = False
) -> Analysis:
    """The analysis of captured graphs."""
    import torch

    from tilestream import flops, library, regions
    from tilestream.capture import module_path

    graphs: list[GraphAnalysis] = []
    made: list[RegionAnalysis] = []
    exclusions: list[Excluded] = []
    for index, (graph, kind) in enumerate(zip(found.graphs, found.kinds, strict=True)):
        part = regions.partition(graph)
        inside = {node for cut in part.cuts for node in cut.nodes}
        nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
        compute = [n for n in nodes if regions.computes(n)]
        outside = [n for n in compute if n not in inside]
        whole = Share(len(compute), sum(map(flops.of_node, compute)))
        graphs.append(GraphAnalysis(kind, whole, library.kernels(nodes, inside)))
        prefix = f"graph{index}." if len(found.graphs) > 1 else ""
        for cut in part.cuts:
            made.append(_region(cut.region, cut.nodes, index, prefix, device, options))
        for node, e in zip(outside, part.exclusions, strict=True):
            exclusions.append(Excluded(e.op, e.source, e.reason, module_path(node), flops.of_node(node), index))
    return Analysis(
        model=str(getattr(model, "__name__", type(model).__name__)),
        device=device.name,
        options=options,
        graphs=tuple(graphs),
        regions=tuple(made),
        exclusions=tuple(exclusions),
        eager=found.eager,
        breaks=found.breaks,
        mode=("train" if model.training else "eval") if isinstance(model, torch.nn.Module) else "",
        training=training,
        hints=_hints(model, found, training),
        tf32=torch.get_float32_matmul_precision() != "highest",
        hardware=device,
    )


def _device(options: Options) -> Device:
    from tilestream import devices

    return devices.get(options.device) if options.device else devices.detect() or devices.get("h200")


def _region(
    region: Any, members: Sequence[fx.Node], index: int, prefix: str, device: Device, options: Options
) -> RegionAnalysis:
    from tilestream import flops, library, planner
    from tilestream.capture import module_path
    from tilestream.errors import TilestreamError
    from tilestream.regions import computes

    plan, problem = None, ""
    try:
        if region.rows:
            plan = planner.plan(region.program, region.rows, device, options)
        else:
            problem = "no rows: nothing is launched"
    except TilestreamError as failure:
        problem = str(failure)
    return RegionAnalysis(
        name=prefix + region.name,
        graph=index,
        rows=region.rows,
        operators=region.operators,
        sources=region.sources,
        program=region.program,
        plan=plan,
        problem=problem,
        flops=sum(flops.of_node(n) for n in members if computes(n)),
        kernels=library.kernels(members),
        modules=tuple(dict.fromkeys(path for n in members if (path := module_path(n)))),
    )


def _hints(model: Callable[..., Any], found: Captured, training: bool) -> tuple[str, ...]:
    """What is special about this capture, with what to do about it."""
    hints = []
    changing = dict.fromkeys(changing_in_training(model))
    if changing and not training:
        hints.append(f"{', '.join(changing)} in train mode: call model.eval() for inference")
    if not training and _wants_gradients(model):
        hints.append(
            "inference graphs, as under torch.no_grad(): called with gradients, the model makes forward and backward "
            "graphs, which training=True shows"
        )
    if found.ran:
        hints.append(f"the model was run to capture it: {found.ran}")
    if not found.graphs:
        hints.append("torch.compile captures nothing of this model: all of it runs eagerly")
    if any("_transformer_encoder_layer_fwd" in str(n.target) for g in found.graphs for n in g.graph.nodes):
        hints.append(
            "nn.TransformerEncoder took its fast path, one operator a layer: "
            "torch.backends.mha.set_fastpath_enabled(False) shows its layers, which can stream"
        )
    return tuple(hints)


def _wants_gradients(model: Callable[..., Any]) -> bool:
    """Whether a call of the model, here and now, would make a training graph."""
    import torch

    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return torch.is_grad_enabled() and any(p.requires_grad for p in parameters)


def changing_in_training(model: Callable[..., Any]) -> list[str]:
    """Types of the modules in train mode that compute something else there: dropout, and batch statistics."""
    from torch import nn
    from torch.nn.modules.batchnorm import _NormBase
    from torch.nn.modules.dropout import _DropoutNd

    return [
        f"nn.{type(m).__name__}"
        for m in (model.modules() if isinstance(model, nn.Module) else ())
        if m.training and (isinstance(m, _NormBase) or (isinstance(m, _DropoutNd) and m.p > 0))
    ]
