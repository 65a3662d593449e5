"""``tilestream.simulate`` as text, JSON and timelines: every strategy of every region, on a device by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilestream import devices
from tilestream.ir.lengths import sizes_at
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.plain import by_rows
from tilestream.plan.analysis import Analysis
from tilestream.plan.candidates import rejections
from tilestream.plan.predicted import by_strategy
from tilestream.report import launches, steps, whole
from tilestream.report.explain import as_text
from tilestream.report.words import microseconds, size
from tilestream.simulator import Simulation as Outcome
from tilestream.simulator import simulate

NOTE = (
    "bulk stands for kernels of libraries, a kernel for each layer. In a whole model's time by one strategy, regions "
    "that have no pipeline of it are Inductor's."
)


@dataclass(frozen=True)
class Run:
    """The pipeline of one region by one strategy, simulated; ``chosen``: it is the one that the plan runs."""

    region: str
    strategy: str
    chosen: bool
    pipeline: Pipeline
    outcome: Outcome


@dataclass(frozen=True)
class Simulation:
    """All runs of a model on one device. ``str()`` is the text, ``json()`` the same as plain data.

    ``whole_us``: microseconds of the whole model by strategy, and with every region on Inductor.
    """

    analysis: Analysis
    runs: tuple[Run, ...]
    whole_us: dict[str, float]

    @classmethod
    def of(cls, analysis: Analysis, progress: Callable[[str], None] = lambda _: None) -> Simulation:
        """Simulate the pipeline of each region by each strategy, on the device the plans are for."""
        runs: list[Run] = []
        whole_us: dict[str, float] = {}
        for strategy, planned in by_strategy(analysis).items():
            progress(f"simulating {strategy} on {analysis.device}")
            if planned.predicted_us is not None:
                whole_us[strategy] = planned.predicted_us
            runs += _runs(planned, planned is analysis, {(r.region, r.strategy) for r in runs})
        if (other := analysis.inductor_predicted_us) is not None:
            whole_us["inductor"] = other
        order = {r.name: i for i, r in enumerate(part for r in analysis.regions for part in (r, *r.parts))}
        return cls(analysis, tuple(sorted(runs, key=lambda r: order[r.region])), whole_us)

    def by_region(self) -> dict[str, dict[str, Outcome]]:
        """Runs that have steps to draw, by region and strategy."""
        found: dict[str, dict[str, Outcome]] = {}
        for run in self.runs:
            if by_rows(run.pipeline) or run.outcome.spans:
                found.setdefault(run.region, {})[run.strategy] = run.outcome
        return found

    def timelines(self) -> dict[str, Outcome]:
        """The same by title, as ``report.timeline`` takes them."""
        return {f"{name} {strategy}": o for name, runs in self.by_region().items() for strategy, o in runs.items()}

    def problems(self) -> list[str]:
        """Why regions have no pipeline on this device."""
        found = []
        for region in self.analysis.regions:
            if region.plan is None:
                found.append(f"{region.name}: {region.problem}")
            else:
                found += [f"{region.name}, {line}" for line in rejections(region.plan.candidates)]
        return found

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> RenderableType:
        rows = " and ".join(dict.fromkeys(f"{run.outcome.rows:,}" for run in self.runs))
        title = Text(f"{self.analysis.model} simulated on {self.analysis.device}", style="bold")
        stepped = steps.render(self.analysis)
        if not self.runs:
            none = [Text("No pipeline to simulate.")]
            shown = [*launches.render(self.analysis), *stepped] if stepped else none
            return Group(title, *shown, *map(Text, self.problems()), Text(whole.float32(self.analysis), style="yellow"))
        title.append(f", {rows} rows")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("", "region", "strategy"):
            table.add_column(heading, no_wrap=True)
        for heading in ("predicted us", "DRAM", "L2", "busy: tensor", "DRAM", "L2"):
            table.add_column(heading, justify="right")
        for run in self.runs:
            o = run.outcome
            table.add_row(
                "*" if run.chosen else "",
                run.region,
                run.strategy,
                microseconds(o.time_us),
                size(o.bytes.get("dram", 0)),
                size(o.bytes.get("l2", 0)),
                *(f"{o.utilisation.get(level, 0):.0%}" if o.utilisation else "" for level in ("tensor", "dram", "l2")),
                style="bold green" if run.chosen else "",
            )
        times = "; ".join(f"{name} {microseconds(us)} us" for name, us in self.whole_us.items())
        device = self.analysis.device
        formulas = whole.formulas((run.pipeline for run in self.runs), device)
        lengths = [f"{run.region}: {run.outcome.note}" for run in self.runs if run.pipeline.ragged]
        notes = [f"{whole.simulator(device)}. {NOTE}", *formulas, *lengths, whole.float32(self.analysis)]
        return Group(
            title,
            *launches.render(self.analysis),
            *stepped,
            table,
            Text(f"whole model: {times}", style="bold"),
            *(Text(note, style="dim") for note in notes if note),
        )

    def json(self) -> dict[str, Any]:
        return {
            "model": self.analysis.model,
            "device": self.analysis.device,
            "predicted_us": self.analysis.predicted_us,
            "inductor_predicted_us": self.analysis.inductor_predicted_us,
            "predictions": dict(self.whole_us),
            "launches": [] if self.analysis.empty else self.analysis.whole.json()["launches"],
            "float32": whole.facts(self.analysis)["float32"],
            "runs": [
                {
                    "region": run.region,
                    "strategy": run.strategy,
                    "chosen": run.chosen,
                    "rows": run.outcome.rows,
                    "predicted_us": run.outcome.time_us,
                    "launches_us": list(run.outcome.launches_us),
                    "bytes": dict(run.outcome.bytes),
                    "utilisation": dict(run.outcome.utilisation),
                    "exact": run.outcome.exact,
                    "note": run.outcome.note,
                }
                for run in self.runs
            ],
        }


def _runs(planned: Analysis, own: bool, known: set[tuple[str, str]]) -> list[Run]:
    """The pipelines that ``planned`` runs, the model's ``own`` plan or another, but for those of a region and strategy
    that are ``known``."""
    made = []
    device = planned.hardware or devices.get(planned.device)
    for region in planned.regions:
        candidate = region.plan.chosen if region.plan is not None else None
        if candidate is None or candidate.pipeline is None or (region.name, candidate.strategy) in known:
            continue
        pipeline = candidate.pipeline
        outcome = simulate(pipeline, sizes_at(pipeline, region.rows, region.edges), device)
        made.append(Run(region.name, candidate.strategy, own, candidate.pipeline, outcome))
    return made
