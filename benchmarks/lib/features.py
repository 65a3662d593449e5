"""What kernels of each family can do: small models, one a feature, at sizes of each family, and what is made of them.

Models have two layers; of a family whose kernels are single layers, the first alone.

A cell works where one launch of the family's does all of the model; where not, it says what stands in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.lib import ragged_features
from tilestream import devices
from tilestream.graph.capture import Kind, capture
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.families import kernel_of
from tilestream.kernels.kernel import Kernel
from tilestream.options import Options
from tilestream.plan.analyse import training_cut
from tilestream.plan.find import find
from tilestream.plan.gradient_launches import gradient_launches
from tilestream.plan.planner import proposals

DEVICE = devices.get("h200")
OPTIONS = Options(cache=False)


@dataclass(frozen=True)
class Size:
    """Rows, and features in front of, between and behind the two layers of a model; ``single``: the first alone."""

    rows: int
    wide: int
    hidden: int
    out: int
    single: bool = False


@dataclass(frozen=True)
class Column:
    """A family, or a scheduler of one. ``families``: what its kernels call themselves. ``ragged``: it is asked by
    ragged pipelines, and not by models of two layers."""

    name: str
    families: tuple[str, ...]
    size: Size
    training: bool = False
    ragged: bool = False


COLUMNS = (
    Column("stream", ("row stream",), Size(65_536, 64, 128, 64)),
    Column("product, few rows", ("shared tile",), Size(8, 1024, 4096, 1024)),
    Column("one row", ("one row",), Size(1, 1024, 1024, 1024, single=True)),
    Column("product, many rows", ("tiled block",), Size(8192, 1024, 2048, 1024)),
    Column("gradients", ("gradients",), Size(65_536, 64, 128, 64), training=True),
    Column("segments", ("segments",), Size(100_000, 64, 64, 64), ragged=True),
)

Inputs = tuple[Tensor, ...]
Made = tuple[nn.Module, Inputs]


class Fn(nn.Module):
    """Two layers inside a function of them and the inputs."""

    def __init__(self, s: Size, forward: Callable[..., object], front: int = 0, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.first = nn.Linear(front or s.wide, s.hidden, dtype=dtype)
        self.second = nn.Linear(s.hidden, s.out, dtype=dtype)
        self.front, self.behind = nn.LayerNorm(s.wide, dtype=dtype), nn.LayerNorm(s.out, dtype=dtype)
        self.told, self.single = forward, s.single

    def forward(self, *inputs: Tensor) -> object:
        return self.told(self, *inputs)

    def block(self, x: Tensor) -> Tensor:
        """With SiLU: a library's product takes in a GELU, and is then the faster one on many rows."""
        y = F.silu(self.first(x))
        return y if self.single else self.second(y)


def rows(s: Size, width: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(s.rows, width or s.wide, dtype=dtype)


def gathered(s: Size) -> Made:
    return Fn(s, lambda m, table, index: m.block(table[index])), (rows(s), torch.randint(s.rows, (s.rows,)))


def concatenated(s: Size) -> Made:
    return Fn(s, lambda m, a, b: m.block(torch.cat([a, b], -1))), (rows(s, s.wide // 2), rows(s, s.wide // 2))


class Taps(nn.Module):
    """A convolution of 3 x 3 pixels and one of single pixels, channels last."""

    def __init__(self, s: Size) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(s.wide, s.hidden, 3, padding=1), nn.Conv2d(s.hidden, s.out, 1)
        self.single = s.single

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return y if self.single else self.second(y)


def taps(s: Size) -> Made:
    edge = max(2, round(min(s.rows, 4096) ** 0.5))
    module = Taps(s).bfloat16().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    x = torch.randn(max(1, s.rows // edge**2), s.wide, edge, edge).bfloat16()
    return module, (x.contiguous(memory_format=torch.channels_last),)


def odd_widths(s: Size) -> Made:
    odd = replace(s, wide=s.wide - 3, hidden=s.hidden - 5, out=s.out - 1)
    return Fn(odd, lambda m, x: m.block(x)), (rows(odd),)


def weights_by_columns(s: Size) -> Made:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(s.wide, s.hidden).bfloat16())
            self.second = nn.Parameter(torch.randn(s.hidden, s.out).bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            y = F.silu(x @ self.first)
            return y if s.single else y @ self.second

    return Turned(), (rows(s),)


def input_by_columns(s: Size) -> Made:
    return Fn(s, lambda m, x: m.block(x.t())), (torch.randn(s.wide, s.rows).bfloat16(),)


def norm_in_front(s: Size) -> Made:
    return Fn(s, lambda m, x: m.block(m.front(x))), (rows(s),)


def norm_behind(s: Size) -> Made:
    return Fn(s, lambda m, x: m.behind(m.block(x))), (rows(s),)


def residual(s: Size) -> Made:
    return Fn(s, lambda m, x: x + m.block(x)), (rows(s),)


def several_results(s: Size) -> Made:
    def both(m: Fn, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.block(x)
        return y, F.relu(y) * 2

    return Fn(s, both), (rows(s),)


def tf32(s: Size) -> Made:
    return Fn(s, lambda m, x: m.block(x), dtype=torch.float32), (rows(s, dtype=torch.float32),)


def wide_residual(s: Size) -> Made:
    return Fn(s, lambda m, x: x + m.block(x.bfloat16()).float()), (rows(s, dtype=torch.float32),)


MODELS: dict[str, Callable[[Size], Made]] = {
    "gathered rows": gathered,
    "parts of a cat": concatenated,
    "taps": taps,
    "odd widths": odd_widths,
    "weights `[in, out]`": weights_by_columns,
    "transposed input": input_by_columns,
    "norm in front": norm_in_front,
    "norm behind": norm_behind,
    "residual": residual,
    "several results": several_results,
    "tf32": tf32,
    "float32 residual stream": wide_residual,
}


def stamps(kernel: Kernel) -> bool:
    return kernel.source(stamped=True).text != kernel.source().text


def lines(kernel: Kernel) -> bool:
    return "features.py" in kernel.source(annotate=True).text


FRAMES: dict[str, tuple[Callable[[Kernel], bool], str]] = {
    "early launch": (lambda k: k.starts_early, "its kernel does not wait for the one in front by itself"),
    "stamps": (stamps, "its kernels have no stamps"),
    "the user's line": (lines, "its source has no comments"),
    "exchange over DSM": (lambda k: k.frame.cluster > 1, "no candidate has clusters"),
}
"""What belongs to the frame around a mainloop: asked of the kernels of two layers."""


def found(module: nn.Module, inputs: Inputs, training: bool) -> tuple[list[Pipeline], str]:
    """Every pipeline that is proposed for the whole of a model, and why there is none."""
    cut = training_cut(OPTIONS, DEVICE) if training else None
    captured = capture(module.train(training), inputs, training=training, partition=cut)
    made: list[Pipeline] = []
    why = ""
    for graph, kind in zip(captured.graphs, captured.kinds, strict=True):
        made_here, why_not = _of_graph(graph, kind)
        if (kind == "backward") == training:
            made, why = made_here, why_not
    return made, why


def _of_graph(graph: torch.fx.GraphModule, kind: Kind) -> tuple[list[Pipeline], str]:
    seen = find(graph, kind, OPTIONS, DEVICE)
    if kind == "backward":
        launches = gradient_launches(seen.sites, DEVICE, ())
        outside = next((e.reason for e in seen.exclusions), "no sum over rows is found")
        return [launch.pipeline(DEVICE) for launch in launches], "" if launches else outside
    inside = len(seen.cuts) == 1 and not seen.exclusions
    made: list[Pipeline] = []
    reasons = [e.reason for e in seen.exclusions] or ["it is several regions"] * (len(seen.cuts) > 1)
    for cut in seen.cuts:
        proposed = proposals(cut.region.program, cut.region.rows, DEVICE, OPTIONS)
        made += [c.pipeline for c in proposed if c.pipeline is not None and not c.rejected]
        reasons += [c.rejected for c in reversed(proposed) if c.rejected]
    return (made if inside else []), reasons[0] if reasons else "nothing of it is a region"


def kernels(column: Column, module: nn.Module, inputs: Inputs) -> tuple[list[Kernel], str]:
    """Kernels of the column's family that a model becomes, each alone; and why there is none."""
    pipelines, why = found(module, inputs, column.training)
    launches = [cut_at_dram(p) for p in pipelines]
    whole = [kernel_of(each[0]) for each in launches if len(each) == 1]
    return [k for k in whole if k.family in column.families and not k.refusal], why or "no candidate is of this family"


def cell(feature: str, column: Column) -> str:
    """Empty if it works, else the reason."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        if feature in FRAMES:
            asked, why = FRAMES[feature]
            made, none = _kernels(column, "", plainly)
            return "" if any(map(asked, made)) else (why if made else none)
        made, why = _kernels(column, feature, MODELS[feature])
        return "" if made else why
    finally:
        torch.set_float32_matmul_precision(before)


def _kernels(column: Column, feature: str, model: Callable[[Size], Made]) -> tuple[list[Kernel], str]:
    return ragged_features.kernels(feature) if column.ragged else kernels(column, *model(column.size))


def plainly(s: Size) -> Made:
    return Fn(s, lambda m, x: m.block(x)), (rows(s),)


def cells() -> Iterator[tuple[str, Column]]:
    for feature in (*MODELS, *FRAMES):
        for column in COLUMNS:
            yield feature, column
