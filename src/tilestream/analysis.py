"""What tilestream makes of a model: captured, partitioned and planned, but not run. Read by ``report``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilestream.options import Options

if TYPE_CHECKING:
    import torch

    from tilestream.devices import Device
    from tilestream.ir import Pipeline
    from tilestream.planner import Plan
    from tilestream.regions import Exclusion


@dataclass(frozen=True)
class RegionAnalysis:
    """One region: its ATen operators, their source lines, and its plan.

    ``rows`` is the number of rows it was planned for. ``plan`` is ``None`` where planning failed,
    and ``problem`` says why.
    """

    name: str
    graph: int
    rows: int
    operators: tuple[str, ...]
    sources: tuple[str, ...]
    program: Pipeline
    plan: Plan | None
    problem: str = ""


@dataclass(frozen=True)
class Analysis:
    """Coverage, regions, exclusions and plans of a model.

    ``operators`` counts the ATen operators that compute (no views, no shape arithmetic), and
    ``covered`` those that lie in a region. ``graphs`` is how many graphs Dynamo made, ``breaks``
    why there is more than one.
    """

    model: str
    device: str
    options: Options
    graphs: int
    operators: int
    covered: int
    regions: tuple[RegionAnalysis, ...]
    exclusions: tuple[Exclusion, ...]
    breaks: tuple[str, ...] = ()

    @property
    def coverage(self) -> float:
        """Share of the operators that lie in a region, 0 to 1."""
        return self.covered / self.operators if self.operators else 0.0


def analyse(
    model: torch.nn.Module | Any,
    inputs: Sequence[Any],
    options: Options | None = None,
    device: Device | None = None,
) -> Analysis:
    """Capture ``model`` with ``inputs`` for inference, select regions, and plan each for ``device``.

    The model runs once, eagerly. ``device=None`` means ``options.device``, else the GPU present,
    else ``h200``.

    Raises:
        CaptureError: Dynamo could not capture the model.
        DeviceError: no device of that name is known.
    """
    from tilestream import capture, regions

    options = options or Options()
    device = device or _device(options)
    found = capture.capture(model, inputs)
    parts = [regions.partition(graph) for graph in found.graphs]
    made = tuple(_plan(region, index, device, options) for index, part in enumerate(parts) for region in part.regions)
    return Analysis(
        model=str(getattr(model, "__name__", type(model).__name__)),
        device=device.name,
        options=options,
        graphs=len(parts),
        operators=sum(p.operators for p in parts),
        covered=sum(len(r.operators) for r in made),
        regions=made,
        exclusions=tuple(e for p in parts for e in p.exclusions),
        breaks=found.breaks,
    )


def _device(options: Options) -> Device:
    from tilestream import devices

    return devices.get(options.device) if options.device else devices.detect() or devices.get("h200")


def _plan(region, index: int, device: Device, options: Options) -> RegionAnalysis:
    from tilestream import planner
    from tilestream.errors import TilestreamError

    plan, problem = None, ""
    try:
        plan = planner.plan(region.program, region.rows, device, options)
    except TilestreamError as failure:
        problem = str(failure)
    return RegionAnalysis(
        name=region.name,
        graph=index,
        rows=region.rows,
        operators=region.operators,
        sources=region.sources,
        program=region.program,
        plan=plan,
        problem=problem,
    )
