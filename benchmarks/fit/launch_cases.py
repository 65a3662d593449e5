"""Launches by themselves, as data: regions and weight gradients of training steps, single layers on odd rows.

What is captured needs no GPU; ``launch_truth.py`` times it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from typing import Any

import torch
from torch import fx, nn

from benchmarks.lib.cases import MAIN, OTHERS
from benchmarks.run.gradients import WIDTHS, layers_of
from tilestream import devices
from tilestream.apps import APPS
from tilestream.apps.models import find as find_model
from tilestream.errors import TilestreamError
from tilestream.graph.capture import Kind, capture
from tilestream.graph.region import Operand, Region
from tilestream.graph.selection import partition
from tilestream.ir.pipeline import Role
from tilestream.options import Options, parse
from tilestream.plan import planner
from tilestream.plan.analyse import training_cut
from tilestream.plan.find import find
from tilestream.plan.gradient_launches import gradient_launches
from tilestream.plan.gradients import weight_gradients
from tilestream.run.spec import TENSOR, RegionSpec, ResultSpec, encode, spec_of, sums_spec

TRAINING: dict[str, tuple[str, dict[str, Any]]] = {
    "nerf_65536": ("nerf", {"rows": 65536}),
    "dlrm_32768": ("dlrm", {"batch": 32768, "max_rows": 100_000}),
    "mgn": ("mgn", {"batch": 8}),
    "dlrm_2048": ("dlrm", {"batch": 2048, "max_rows": 100_000}),
    "graphcast_small_4": ("graphcast_small", {"steps": 4}),
}
"""The cases of ``training.py``, smaller ones of the same models left out."""
ODD_COLUMNS = (31, 63, 95, 122, 127, 131, 190, 250, 474)
UNSEEN_COLUMNS = (21, 45, 77, 202, 333)
UNSEEN_NETWORKS = {
    "192-192-192": (192, 192, 192, 192),
    "320-640-64": (320, 640, 64),
    "24-96-96-96-8": (24, 96, 96, 96, 8),
}
ODD_ROWS = (16384, 65160, 262144)
ODD_WIDTH = 256
SUMMED_ROWS = (1024, 16384, 65536, 262144)
BESIDE = 7
"""Columns of a wider matrix that a strided input leaves out."""
EACH = 2
"""Candidates of a region that are timed, the best by prediction."""
H200 = devices.get("h200")


@dataclass(frozen=True)
class Launch:
    """One launch: what it is of, and the ``spec`` that runs it (``run.spec``, as text).

    ``family`` is ``forward``, ``backward``, ``gradients`` or ``odd``, or ``README`` for the cases of its tables; behind
    ``unseen`` where the model was made only to hold predictions against.
    """

    family: str
    model: str
    name: str
    rows: int
    spec: str


class Layer(nn.Module):
    """SiLU of one layer, of the first ``columns`` of what it is given."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.layer, self.columns = nn.Linear(columns, ODD_WIDTH), columns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.layer(x[:, : self.columns]))


def training() -> Iterator[Launch]:
    """Regions of forward and backward graphs, each in its best ways, and the launches of weight gradients."""
    for case, (model, sizes) in TRAINING.items():
        yield from of_model(*find_model(model).make(training=True, **sizes), case, Options())


def of_model(module: nn.Module, inputs: tuple[Any, ...], case: str, options: Options) -> Iterator[Launch]:
    found = capture(module, inputs, {}, True, training_cut(options, H200))
    for graph, kind in zip(found.graphs, found.kinds, strict=True):
        yield from of_graph(graph, case, kind, options)


def of_graph(graph: fx.GraphModule, case: str, kind: Kind, options: Options) -> Iterator[Launch]:
    found = find(graph, kind, options, H200)
    seen = set()
    for cut in found.cuts:
        if cut.region.program not in seen and len(cut.region.operators) > 1:
            seen.add(cut.region.program)
            yield from of_region(cut.region, kind, case, options)
    for launch in gradient_launches(found.sites, H200, [cut.nodes for cut in found.cuts]):
        pipeline = launch.pipeline(H200)
        if pipeline not in seen:
            seen.add(pipeline)
            text = encode(sums_spec(launch, pipeline, "cuda"))
            yield Launch("gradients", case, launch.name, launch.rows, text)


def of_region(region: Region, family: str, case: str, options: Options, most: int = EACH) -> Iterator[Launch]:
    """The candidates of a region that are predicted to be the fastest; strategy ``bulk`` stands for a library's."""
    try:
        found = planner.proposals(region.program, region.rows, H200, options)
    except TilestreamError:
        return
    ours = (c for c in planner.shortlist(found, forced=True) if c.strategy != "bulk")
    for candidate in islice(ours, most):
        assert candidate.pipeline is not None
        text = encode(spec_of(region, candidate.pipeline, "cuda"))
        yield Launch(family, case, f"{region.name} {candidate.name}", region.rows, text)


def odd(widths: tuple[int, ...] = ODD_COLUMNS) -> Iterator[Launch]:
    """A layer on rows that bulk copies cannot address."""
    for columns in widths:
        for rows in ODD_ROWS:
            yield from layer(columns, columns, rows)


def beside() -> Iterator[Launch]:
    """The same on columns of a wider matrix, which are copied first."""
    for columns in (64, 1, 40, 63):
        yield from layer(columns, columns + BESIDE, ODD_ROWS[1])


def layer(columns: int, apart: int, rows: int) -> Iterator[Launch]:
    module, given = Layer(columns).bfloat16(), torch.empty(rows, apart, dtype=torch.bfloat16, device="meta")
    (graph,) = capture(module.to("meta").requires_grad_(False), (given,)).graphs
    for region in partition(graph).regions:
        yield from of_region(region, "odd", f"{columns} of {apart} columns", parse({"strategy": "vertical"}), 1)


def readme() -> Iterator[Launch]:
    """What the planner would run of README's cases, and what comes next."""
    for case in (*MAIN, *OTHERS):
        module, inputs = APPS[case.model].make(case.rows)
        (graph,) = capture(module, inputs).graphs
        for region in partition(graph).regions:
            yield from of_region(region, "README", case.name, parse({"strategy": case.strategy}))


def sums(networks: Mapping[str, tuple[int, ...]] = WIDTHS) -> Iterator[Launch]:
    """Weight gradients of plain networks, from few rows, where the exchange of partial sums is all there is, on."""
    for name, widths in networks.items():
        layers = layers_of(widths)
        pipeline = weight_gradients(name, layers, H200)
        columns = {t: n for layer in layers for t, n in ((layer.gradient, layer.out), (layer.input, layer.k))}
        operands = tuple(Operand(t, index, (), torch.bfloat16) for index, t in enumerate(columns))
        results = tuple(ResultSpec(t.name, t.shape) for t in pipeline.by_role(Role.OUTPUT))
        for rows in SUMMED_ROWS:
            layouts = tuple(((rows, n), (n, 1)) for n in columns.values())
            kinds = (TENSOR,) * len(columns)
            told = RegionSpec("cuda", pipeline, kinds, operands, (), results, (), layouts)
            yield Launch("gradients", name, "gradients0", rows, encode(told))


class Blocks(nn.Module):
    """Two residual blocks: norm, two layers with an activation between them."""

    def __init__(self, width: int, hidden: int, act: type[nn.Module]) -> None:
        super().__init__()
        ends = ((nn.LayerNorm(width), nn.Linear(width, hidden), act(), nn.Linear(hidden, width)) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Sequential(*layers) for layers in ends)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def plain(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Layers of these widths, an activation behind each but the last."""
    made = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), act())]
    return nn.Sequential(*made[:-1])


def unseen() -> Iterator[Launch]:
    """What no constant was fitted on, and no formula chosen by."""
    models = {
        "blocks 192-384 GELU": (Blocks(192, 384, nn.GELU), 192, 65536),
        "blocks 128-256 SiLU": (Blocks(128, 256, nn.SiLU), 128, 131072),
        "96-160-160-160-32 ReLU": (plain(96, 160, 160, 160, 32), 96, 131072),
        "256-384-384-64 Tanh": (plain(256, 384, 384, 64, act=nn.Tanh), 256, 65536),
        "64-256-256-256-8 Softplus": (plain(64, 256, 256, 256, 8, act=nn.Softplus), 64, 32768),
    }
    found = [odd(UNSEEN_COLUMNS), sums(UNSEEN_NETWORKS)]
    for name, (module, columns, rows) in models.items():
        x = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
        found.append(of_model(module.bfloat16().to("meta"), (x,), name, Options()))
    for launch in chain(*found):
        yield replace(launch, family=f"unseen {launch.family}")


ALL = {"seen": (odd, beside, readme, sums, training), "unseen": (unseen,)}
