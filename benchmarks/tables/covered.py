"""Which share of the FLOPs of common models runs in regions, as a number to follow: no GPU, nothing downloaded.

    python -m benchmarks.tables.covered           every model, both modes; writes the result and the page's table
    python -m benchmarks.tables.covered resnet18  some models, the result keeps the others

*In regions* is what ``graph/selection`` takes, *chosen* what the planner gives to kernels of ours on an H200 by its
prediction alone (on a GPU times decide). Models are written here in torch alone, in bf16, at published widths and with
few layers, all alike; ``shares.py`` has those of Hugging Face and timm, where these are installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lib.marked import table, with_parts
from benchmarks.lib.places import DOCS, RESULTS
from tilestream import devices
from tilestream.apps import zoo
from tilestream.apps.models import find
from tilestream.cli.progress import Progress
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.analysis import Analysis

RESULT = RESULTS / "covered.json"
PAGE = DOCS / "operators.md"
LARGEST = 2
"""Causes that the table names of each model."""
ROWS = 65_536


class Encoder(nn.Module):
    """BERT's and ViT's layers: attention of ``heads``, a feed-forward block of four widths, norms."""

    def __init__(self, width: int, heads: int, layers: int = 2, first: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, activation="gelu", batch_first=True, norm_first=first
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Basic(nn.Module):
    """ResNet-18's block: two convolutions of 3 x 3 with batch norms, and what goes around them."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(ins, outs, 3, stride, 1, bias=False),
            nn.Conv2d(outs, outs, 3, 1, 1, bias=False),
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(outs) for _ in range(3))
        self.around = nn.Conv2d(ins, outs, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(y + (x if self.around is None else self.norms[2](self.around(x))))


class ResNet18(nn.Module):
    """[n, 3, 224, 224] to [n, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        self.blocks = nn.Sequential(*(Basic(a, b, 1 + (b > a)) for a, b in zip(widths, widths[1:], strict=False)))
        self.head = nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class GCN(nn.Module):
    """Two layers of Kipf and Welling's, by an index. Features [n, f], edges [2, m]."""

    def __init__(self, ins: int = 512, width: int = 256, outs: int = 40) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(ins, width), nn.Linear(width, outs)))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for n, layer in enumerate(self.layers):
            h = layer(x)
            x = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
            x = F.relu(x) if n == 0 else x
        return x


class Conv1d(nn.Module):
    """Three 1-d convolutions, as of speech. [n, 80, t] to [n, 256, t]."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(80, 256, 3, 1, 1), nn.GELU(), nn.Conv1d(256, 256, 3, 1, 1), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


Made = tuple[nn.Module, list[Tensor]]


def _x(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def _app(name: str, **sizes: Any) -> Made:
    module, inputs = find(name).make(device="cpu", **sizes)
    return module, [*inputs]


MODELS: dict[str, Callable[[], Made]] = {
    "nerf": lambda: _app("nerf"),
    "dlrm": lambda: _app("dlrm", max_rows=1000),
    "bert-base": lambda: (Encoder(768, 12).bfloat16(), [_x(8, 128, 768)]),
    "bert-base, 1 x 128": lambda: (Encoder(768, 12).bfloat16(), [_x(1, 128, 768)]),
    "vit-s": lambda: (Encoder(384, 6, first=True).bfloat16(), [_x(8, 197, 384)]),
    "resnet18": lambda: (ResNet18().bfloat16(), [_x(8, 3, 224, 224)]),
    "resnet18, float32": lambda: (ResNet18(), [_x(8, 3, 224, 224).float()]),
    "gcn": lambda: (GCN().bfloat16(), [_x(20_000, 512), torch.randint(20_000, (2, 100_000))]),
    "conv1d": lambda: (Conv1d().bfloat16(), [_x(8, 80, 1500)]),
    "autoencoder": lambda: (zoo.autoencoder().bfloat16(), [_x(ROWS, 256)]),
    "siren": lambda: (zoo.Siren().bfloat16(), [_x(ROWS, 2)]),
    "distance": lambda: (zoo.SignedDistance().bfloat16(), [_x(ROWS, 3)]),
    "policy": lambda: (zoo.PolicyValue().bfloat16(), [_x(ROWS, 376)]),
    "gated": lambda: (zoo.GatedFFN().bfloat16(), [_x(ROWS, 256)]),
    "mixer": lambda: (zoo.ChannelMixer().bfloat16(), [_x(ROWS, 128)]),
    "tabular": lambda: (zoo.TabularResNet().bfloat16(), [_x(ROWS, 128)]),
    "classifier": lambda: (zoo.Classifier().bfloat16(), [_x(ROWS, 128)]),
    "classifier, float32": lambda: (zoo.Classifier(), [_x(ROWS, 128).float()]),
}


@dataclass
class Row:
    """A model in a mode: FLOPs in all, in any region, chosen; and of those that are not chosen, by cause."""

    model: str
    mode: str
    flops: int
    regions: int
    chosen: int
    causes: dict[str, int]


def measured(name: str, training: bool) -> Row:
    """Capture and plan one model."""
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    module.train(training).requires_grad_(training)
    options = Options(cache=False)
    found = analyse(module, inputs, options=options, device=devices.get("h200"), training=training)
    return counted(name, "training" if training else "inference", found)


def counted(name: str, mode: str, found: Analysis) -> Row:
    """The FLOPs of an analysis by what runs them."""
    causes: Counter[str] = Counter()
    regions = chosen = 0
    for region in found.regions:
        regions += region.flops
        if region.plan is not None and region.plan.chosen.pipeline is not None:
            chosen += region.flops
        else:
            causes[region.problem.split(":")[0] or "in a region, Inductor is predicted to be as fast"] += region.flops
    for out in found.exclusions:
        causes[f"`{out.op.removeprefix('aten.')}`: {out.reason}"] += out.flops
    return Row(name, mode, regions + sum(e.flops for e in found.exclusions), regions, chosen, dict(causes))


def share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def medians(rows: list[Row]) -> dict[str, tuple[float, float]]:
    """Of each mode: chosen and in any region, the median of the models."""
    made = {}
    for mode in dict.fromkeys(r.mode for r in rows):
        own = [r for r in rows if r.mode == mode]
        made[mode] = tuple(statistics.median(share(getattr(r, n), r.flops) for r in own) for n in ("chosen", "regions"))
    return made


def written(rows: list[Row]) -> str:
    """The page's table."""
    lines = []
    for r in rows:
        largest = [(why, n) for why, n in Counter(r.causes).most_common(LARGEST) if share(n, r.flops) >= 0.01]
        told = "; ".join(f"{why} ({share(n, r.flops):.0%})" for why, n in largest)
        lines.append([r.model, r.mode, f"{share(r.chosen, r.flops):.2f}", f"{share(r.regions, r.flops):.2f}", told])
    middle = "; ".join(f"{mode} {a:.2f} / {b:.2f}" for mode, (a, b) in medians(rows).items())
    heads = ["model", "mode", "chosen", "in any region", "the rest, by FLOPs"]
    return f"{table(heads, lines)}\n\nMedians, chosen / in any region: {middle}."


def save(rows: dict[tuple[str, str], Row]) -> list[Row]:
    """Write the result, in the order of ``MODELS``, which is returned."""
    ordered = [rows[name, mode] for mode in ("inference", "training") for name in MODELS if (name, mode) in rows]
    RESULT.write_text(json.dumps({"medians": medians(ordered), "rows": [asdict(r) for r in ordered]}, indent=1) + "\n")
    return ordered


def main() -> None:
    wanted = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    wanted.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    wanted.add_argument("--tables", action="store_true", help="the page alone, from the last result")
    given = wanted.parse_args()
    kept = [Row(**row) for row in json.loads(RESULT.read_text())["rows"]] if RESULT.exists() else []
    rows = {(r.model, r.mode): r for r in kept}
    torch.backends.mha.set_fastpath_enabled(False)
    if not given.tables:
        with Progress() as say:
            for name in given.models or MODELS:
                for training in (False, True):
                    rows[name, "training" if training else "inference"] = (made := measured(name, training))
                    say(f"{name}, {made.mode}: {share(made.chosen, made.flops):.2f} chosen")
                    save(rows)
    ordered = save(rows)
    PAGE.write_text(with_parts(PAGE.read_text(), {"coverage": written(ordered)}, "tables/covered.py", PAGE.name))


if __name__ == "__main__":
    main()
