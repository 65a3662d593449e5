"""Where a model's time goes: regions, weight gradients and what is left to libraries, of each graph, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import RenderableType
from rich.table import Table

from tilestream.plan.analysis import Analysis
from tilestream.plan.shown import total_us
from tilestream.plan.whole import Launch
from tilestream.report.words import microseconds, percent, size

INDUCTOR, EAGER = "left to Inductor", "outside of every graph"


@dataclass(frozen=True)
class Part:
    """Launches of one graph that are alike: ``name`` is ``regions``, ``ragged regions``, ``backward chains``, ``weight
    gradients``, or who runs them."""

    graph: str
    name: str
    launches: tuple[Launch, ...]

    @property
    def flops(self) -> float:
        return sum(launch.flops for launch in self.launches)

    @property
    def predicted_us(self) -> float:
        return sum(launch.predicted_us for launch in self.launches)

    @property
    def measured_us(self) -> float | None:
        """None where one of them was not timed."""
        return total_us(launch.measured_us for launch in self.launches)


def parts(a: Analysis) -> list[Part]:
    """Of the plan of the whole, graph by graph; none where nothing is launched."""
    found: dict[tuple[int, str], list[Launch]] = {}
    for launch in () if a.empty else a.whole.launches:
        found.setdefault((launch.graph, _name(launch)), []).append(launch)
    order = ("regions", "ragged regions", "backward chains", "weight gradients", INDUCTOR, EAGER)
    by_place = sorted(found, key=lambda place: (place[0] < 0, place[0], order.index(place[1])))
    return [Part(_graph(a, number), name, tuple(found[number, name])) for number, name in by_place]


def render(a: Analysis) -> list[RenderableType]:
    """A line a part, with its share of all FLOPs; nothing where one part is all there is."""
    found = parts(a)
    if len(found) < 2:
        return []
    table = Table(title="by part", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    several = len(dict.fromkeys(p.graph for p in found)) > 1
    for heading in ("graph",) * several + ("part",):
        table.add_column(heading)
    for heading in ("launches", "of the FLOPs", "predicted us", "measured us", "DRAM"):
        table.add_column(heading, justify="right", no_wrap=True)
    for p in found:
        table.add_row(*cells(p, a)[not several :], style="" if p.name in (INDUCTOR, EAGER) else "green")
    return [table]


def cells(p: Part, a: Analysis) -> tuple[str, ...]:
    """Its graph, its name, launches, its share of all products' FLOPs, microseconds, bytes."""
    flops = sum(launch.flops for launch in a.whole.launches)
    return (
        p.graph,
        p.name,
        str(len(p.launches)),
        percent(p.flops, flops) if p.flops else "",
        microseconds(p.predicted_us),
        microseconds(p.measured_us),
        size(round(sum(launch.bytes for launch in p.launches))),
    )


def facts(found: Sequence[Part]) -> list[dict[str, object]]:
    """The same as plain data."""
    return [
        {
            "graph": p.graph,
            "part": p.name,
            "launches": len(p.launches),
            "flops": p.flops,
            "predicted_us": p.predicted_us,
            "measured_us": p.measured_us,
        }
        for p in found
    ]


def _name(launch: Launch) -> str:
    if launch.what == "ragged":
        return "ragged regions"
    if launch.what:
        return launch.what if launch.what.endswith("s") else f"{launch.what}s"
    return INDUCTOR if launch.graph >= 0 else EAGER


def _graph(a: Analysis, number: int) -> str:
    if number < 0:
        return ""
    alike = [n for n, g in enumerate(a.graphs) if g.kind == a.graphs[number].kind]
    return a.graphs[number].kind + (f" {alike.index(number)}" if len(alike) > 1 else "")
