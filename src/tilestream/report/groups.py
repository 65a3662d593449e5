"""Equal regions as one: a model of 15 equal blocks has 15 equal regions, and a reader wants to see one of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tilestream.plan.analysis import Analysis
from tilestream.plan.candidates import FALLBACK
from tilestream.plan.parts import RegionAnalysis
from tilestream.plan.shown import total_us
from tilestream.report.words import count

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
MOST_NAMES = 2
"""Of the modules that a region belongs to, so many are named."""


@dataclass(frozen=True)
class Group:
    """Regions that are equal but for their weights: the same operators, rows, plan and times.

    ``us`` are predicted microseconds of all of them as they run, ``inductor_us`` the same where Inductor runs them;
    None where that is not known. ``graph`` is the kind of theirs, where the model has several.
    """

    regions: tuple[RegionAnalysis, ...]
    strategy: str
    us: float | None
    inductor_us: float | None
    graph: str = ""

    @property
    def first(self) -> RegionAnalysis:
        return self.regions[0]

    @property
    def runs(self) -> bool:
        """Whether they run as pipelines."""
        return self.strategy not in ("inductor", "eager")

    @property
    def title(self) -> str:
        """``15 x blocks.*.edges``; a region of no module has its own name."""
        name = modules(self.regions) or self.first.name
        return name if len(self.regions) == 1 else f"{len(self.regions)} × {name}"

    @property
    def what(self) -> str:
        """What a reader knows each as: ``region of the forward graph, 9 operators, 11,400 rows``."""
        where = f" of the {self.graph} graph" if self.graph else ""
        return f"{self.first.kind}{where}, {count(len(self.first.operators), 'operator')}, {self.first.rows:,} rows"


def groups(a: Analysis) -> list[Group]:
    """All regions: those that run as pipelines first, and of each kind those that take longest."""
    found: dict[object, list[RegionAnalysis]] = {}
    for region in a.regions:
        found.setdefault(_key(region, a), []).append(region)
    made = [_group(members, a) for members in found.values()]
    return sorted(made, key=lambda g: (not g.runs, -(g.us or 0.0)))


def modules(regions: Sequence[RegionAnalysis]) -> str:
    """The modules of regions, with a star for the numbers of layers: ``blocks.*.edges``; empty where none is known."""
    paths = dict.fromkeys(_NUMBER.sub("*", path) for region in regions for path in region.modules if path)
    plain = dict.fromkeys(path.removesuffix(".*") if "." in path else path for path in paths)
    inner = [p for p in plain if not any(other.startswith(f"{p}.") for other in plain)] or list(plain)
    parents = {p.rpartition(".")[0] for p in inner}
    if len(inner) > 1 and len(parents) == 1 and "" not in parents:  # siblings: their block is named
        inner = list(parents)
    names = [p for p in inner if p != "*"] or inner
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _key(region: RegionAnalysis, a: Analysis) -> object:
    chosen = region.runs
    name = None if chosen is None else chosen.name
    return (
        region.kind,
        a.graphs[region.graph].kind if region.graph < len(a.graphs) else "",
        region.operators,
        region.rows,
        region.problem,
        name,
        None if chosen is None else _rounded(chosen.measured_us),
        _rounded(_us(region, a)),
        region.flops,
    )


def _rounded(us: float | None) -> str:
    """Predictions of equal regions differ by what lies in the L2 before them."""
    return "" if us is None else f"{us:.2g}"


def _us(region: RegionAnalysis, a: Analysis) -> float | None:
    chosen = region.runs
    return None if chosen is None else a.candidate_us(region, chosen)


def _inductor_us(region: RegionAnalysis, a: Analysis) -> float | None:
    if region.parts or region.plan is None:  # the fallback of a backward chain is a region and its sums, apart
        return None
    fallback = next((c for c in region.plan.candidates if c.strategy == FALLBACK), None)
    return None if fallback is None else a.candidate_us(region, fallback)


def _group(members: Sequence[RegionAnalysis], a: Analysis) -> Group:
    us, inductor_us = ([f(r, a) for r in members] for f in (_us, _inductor_us))
    graph = a.graphs[members[0].graph].kind if len(a.graphs) > 1 else ""
    return Group(tuple(members), members[0].runner, total_us(us), total_us(inductor_us), graph)
