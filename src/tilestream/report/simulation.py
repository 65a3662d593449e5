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
from tilestream.plan.analysis import Analysis
from tilestream.plan.planner import rejections
from tilestream.report import facts, whole
from tilestream.report.explain import as_text
from tilestream.report.words import microseconds, size
from tilestream.simulator import Simulation as Outcome
from tilestream.simulator import simulate

NOTE = (
    f"Two predictions: {whole.SIMULATOR}; cost model, {whole.COST_MODEL_ERROR:.0%}. The cost model ranks candidates; "
    "the simulator adds waits, fill and drain. bulk stands for library kernels, whose time the cost model gives; "
    "--mode simulates each operator by itself instead, so that its bulk differs."
)


@dataclass(frozen=True)
class Run:
    """One candidate of one region, simulated. ``predicted_us`` is the cost model's time for the same."""

    region: str
    strategy: str
    chosen: bool
    predicted_us: float | None
    outcome: Outcome


@dataclass(frozen=True)
class Simulation:
    """All runs of a model on one device. ``str()`` is the text, ``json()`` the same as plain data."""

    analysis: Analysis
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, analysis: Analysis, progress: Callable[[str], None] = lambda _: None) -> Simulation:
        """Simulate the best candidate of each strategy of each region, on the device the plans are for."""
        device = devices.get(analysis.device)
        runs = []
        for region in analysis.regions:
            if region.plan is None:
                continue
            for candidate, pipeline in facts.distinct(region.plan):
                progress(f"simulating {region.name}, {candidate.strategy}, on {device.name}")
                outcome = simulate(pipeline, region.rows, device)
                chosen = candidate == region.plan.chosen
                runs.append(Run(region.name, candidate.strategy, chosen, candidate.predicted_us, outcome))
        return cls(analysis, tuple(runs))

    def by_region(self) -> dict[str, dict[str, Outcome]]:
        found: dict[str, dict[str, Outcome]] = {}
        for run in self.runs:
            found.setdefault(run.region, {})[run.strategy] = run.outcome
        return found

    def timelines(self) -> dict[str, Outcome]:
        """Runs by title, as ``report.timeline`` takes them."""
        return {f"{run.region} {run.strategy}": run.outcome for run in self.runs}

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
        if not self.runs:
            none = Text("No pipeline to simulate.")
            return Group(title, none, *map(Text, self.problems()), Text(whole.float32(self.analysis), style="yellow"))
        title.append(f", {rows} rows")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("", "region", "strategy"):
            table.add_column(heading, no_wrap=True)
        for heading in ("simulated us", "cost model us", "DRAM", "L2", "busy: tensor", "DRAM", "L2"):
            table.add_column(heading, justify="right")
        for run in self.runs:
            o = run.outcome
            table.add_row(
                "*" if run.chosen else "",
                run.region,
                run.strategy,
                microseconds(o.time_us),
                microseconds(run.predicted_us),
                size(o.bytes.get("dram", 0)),
                size(o.bytes.get("l2", 0)),
                *(f"{o.utilisation.get(level, 0):.0%}" for level in ("tensor", "dram", "l2")),
                style="bold green" if run.chosen else "",
            )
        notes = [NOTE, whole.float32(self.analysis)]
        return Group(title, table, *(Text(note, style="dim") for note in notes if note))

    def json(self) -> dict[str, Any]:
        return {
            "model": self.analysis.model,
            "device": self.analysis.device,
            "float32": whole.facts(self.analysis)["float32"],
            "runs": [
                {
                    "region": run.region,
                    "strategy": run.strategy,
                    "chosen": run.chosen,
                    "rows": run.outcome.rows,
                    "simulated_us": run.outcome.time_us,
                    "predicted_us": run.predicted_us,
                    "launches_us": list(run.outcome.launches_us),
                    "bytes": dict(run.outcome.bytes),
                    "utilisation": dict(run.outcome.utilisation),
                    "exact": run.outcome.exact,
                    "note": run.outcome.note,
                }
                for run in self.runs
            ],
        }
