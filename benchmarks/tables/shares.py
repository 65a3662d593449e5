"""Which share of the FLOPs of real models lies in regions, and why the rest does not: no GPU, nothing computed.

    python -m benchmarks.tables.shares                   every model at its typical numbers of rows
    python -m benchmarks.tables.shares gpt2 --no-tables  some models, the result keeps the others; not the page
    python -m benchmarks.tables.shares --tables          the page alone, from the last result

Captures models of Hugging Face and timm at their published widths (``real_models.py``) with one layer, whose share is
that of every other. *Attention* is what multiplies two activations: scores and values. The projections of queries,
keys, values and the output are not, nor are embeddings, which have no FLOPs. *In regions* is what ``graph/selection``
takes, *run* what the planner gives to a pipeline on an H200 by its prediction alone: on a GPU times decide.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from benchmarks.lib.marked import table, with_parts
from benchmarks.lib.places import DOCS, RESULTS
from benchmarks.lib.real_models import MODELS, RESNET_DEPTH, Case, RealModel, module
from tilestream import devices
from tilestream.bench.environment import environment
from tilestream.graph.costs import flops
from tilestream.graph.nodes import computes
from tilestream.graph.provenance import module_path
from tilestream.kernels.product.finder import is_projection
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.analysis import Analysis
from tilestream.plan.parts import RegionAnalysis

RESULT = RESULTS / "shares.json"
PAGE = DOCS / "blocks.md"

ATTENTION = re.compile(r"(^|\.)(self_attn|attn|attention|attention\.self|rotary_emb)$")
"""Modules whose own products, those of no module inside of them, are scores, values, and angles of positions."""
LAYER = re.compile(r"\b(layers?|h|blocks|layer\d)\.\d+\b")
PARTS = (
    ("q, k, v", re.compile(r"(q_proj|k_proj|v_proj|query|key|value|c_attn|qkv)$")),
    ("output projection", re.compile(r"(o_proj|attn\.c_proj|attention\.output\.dense|attn\.proj)$")),
    ("token mixing", re.compile(r"mlp_tokens")),
    ("convolutions", re.compile(r"conv\d|downsample")),
    ("FFN", LAYER),
    ("head", re.compile(r"lm_head|head|fc$")),
    ("embedding of patches", re.compile(r"patch|stem")),
)
"""Names of parts of a model by the path of the module, the first that matches."""
FASTER = "Inductor is predicted to be as fast"
NO_KERNEL = "no kernel fits: too many rows for so wide a layer"
LONE = "a product by itself: nothing streams into it or out of it, and a library's is as fast"


@dataclass
class Part:
    """FLOPs of a part of a model: all, those in regions, those that run as pipelines, and of the others why not."""

    flops: int = 0
    regions: int = 0
    runs: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: Part) -> Part:
        reasons = dict(Counter(self.reasons) + Counter(other.reasons))
        return Part(self.flops + other.flops, self.regions + other.regions, self.runs + other.runs, reasons)

    def times(self, count: int) -> Part:
        reasons = {why: count * n for why, n in self.reasons.items()}
        return Part(count * self.flops, count * self.regions, count * self.runs, reasons)


@dataclass
class Row:
    """A model at some rows. ``layers`` are the parts of all its layers, ``outside`` those of what is before and behind
    them; attention is in neither."""

    model: str
    batch: int
    tokens: int
    rows: int
    attention: int
    layers: dict[str, Part]
    outside: dict[str, Part]

    @property
    def whole(self) -> Part:
        return sum((*self.layers.values(), *self.outside.values()), Part())

    @property
    def of_layers(self) -> Part:
        return sum(self.layers.values(), Part())


def part_of(path: str) -> str:
    return next((name for name, found in PARTS if found.search(path)), "other")


def in_layers(path: str) -> bool:
    return LAYER.search(path) is not None


def counted(analysis: Analysis) -> Iterator[tuple[str, bool, Part]]:
    """Of every operator with FLOPs: its module, whether it is attention, and itself as a part."""
    for region in analysis.regions:
        why = _idle(region)
        for node in (n for n in region.nodes if computes(n)):
            if count := flops.of_node(node):
                reasons = {why: count} if why else {}
                yield module_path(node), False, Part(count, count, 0 if why else count, reasons)
    for e in analysis.exclusions:
        if e.flops:
            yield e.module, ATTENTION.search(e.module) is not None, Part(e.flops, reasons={e.reason: e.flops})


def _idle(region: RegionAnalysis) -> str:
    """Why a region goes to Inductor, by prediction; empty where it runs as a pipeline."""
    if len(region.operators) == 1 and not is_projection(region.program):
        return LONE
    if region.runner != "inductor":
        return ""
    plan = region.plan
    built = plan is not None and any(c.pipeline is not None for c in plan.candidates)
    return FASTER if built else NO_KERNEL


def row(model: RealModel, case: Case, analysis: Analysis, layers: int) -> Row:
    """A model whose ``layers`` layers are captured in ``analysis``, as if it had all."""
    made = Row(model.name, case.batch, case.tokens, case.rows, 0, {}, {})
    for path, attention, part in counted(analysis):
        inside = in_layers(path)
        part = part.times(model.depth // layers) if inside else part
        if attention:
            made.attention += part.flops
            continue
        group = made.layers if inside else made.outside
        group[part_of(path)] = group.get(part_of(path), Part()) + part
    return made


def measured(model: RealModel, case: Case) -> Row:
    layers = RESNET_DEPTH if model.name == "resnet50" else 1
    options = Options(measure=False, constant_weights=model.constant)
    where = "meta" if model.layout is torch.contiguous_format else "cpu"  # on meta, convolutions lose the layout
    found = analyse(module(model, layers, device=where), model.inputs(case, device=where), options, devices.get("h200"))
    return row(model, case, found, layers)


def read(text: str) -> list[Row]:
    """Rows as ``main`` wrote them."""

    def parts(given: dict[str, Any]) -> dict[str, Part]:
        return {name: Part(**part) for name, part in given.items()}

    return [
        Row(**{**r, "layers": parts(r["layers"]), "outside": parts(r["outside"])}) for r in json.loads(text)["rows"]
    ]


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}" if whole else "-"


HEAD = ("", "rows", "GFLOP", "attention, %", "layers: in regions", "run", "all: in regions", "run")
WHY_HEAD = ("", "rows", "part", "of all", "runs", "why not the rest")


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """The tables of the page, by marker; shares in percent, reasons at the fewest and at the most rows of a model."""
    shares, reasons = [], []
    counts = {r.model: [other.rows for other in rows if other.model == r.model] for r in rows}
    ends = {name: (min(found), max(found)) for name, found in counts.items()}
    for r in rows:
        whole, layers = r.whole, r.of_layers
        everything = whole.flops + r.attention
        cells = [r.model, f"{r.rows:,}", f"{everything / 1e9:,.3g}", percent(r.attention, everything)]
        for part in (layers, whole):
            cells += [percent(part.regions, part.flops), percent(part.runs, part.flops)]
        shares.append(cells)
        if r.rows not in ends[r.model]:
            continue
        for name, part in (*r.layers.items(), *r.outside.items()):
            most = sorted(part.reasons.items(), key=lambda each: -each[1])
            told = "; ".join(reason for reason, count in most[:2] if count > 0.01 * part.flops)
            cells = [percent(part.flops, whole.flops), percent(part.runs, part.flops), told]
            reasons.append([r.model, f"{r.rows:,}", name, *cells])
    return {"shares": table(HEAD, shares), "reasons": table(WHY_HEAD, reasons)}


def filled(text: str, made: dict[str, str]) -> str:
    """The page's ``text`` with every marked part rewritten.

    Raises:
        ValueError: a marker is missing.
    """
    return with_parts(text, made, "tables/shares.py", PAGE.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--tables", action="store_true", help="write the page from the last result")
    parser.add_argument("--no-tables", action="store_true", help="leave the page as it is")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    rows = read(given.out.read_text(encoding="utf-8")) if given.out.exists() else []
    if not given.tables:
        names = given.names or list(MODELS)
        rows = [r for r in rows if r.model not in names]
        rows += [measured(MODELS[n], c) for n in track(names, "counting", transient=True) for c in MODELS[n].cases]
        rows.sort(key=lambda r: list(MODELS).index(r.model))
        kept = {"device": "h200", "environment": environment(), "rows": [asdict(r) for r in rows]}
        given.out.write_text(json.dumps(kept, indent=1) + "\n")
    made = tables(rows)
    print("\n\n".join(made.values()))
    if not given.no_tables:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
