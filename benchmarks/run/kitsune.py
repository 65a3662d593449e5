"""Run Kitsune's evaluation for the pages: Table 2 on both devices, and what hangs on products of odd widths.

python -m benchmarks.run.kitsune        writes results/kitsune.json, kitsune_h200.json and kitsune_widths.json
python -m benchmarks.tables.kitsune_tables

Needs no GPU. The files say which commit they were made from.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import tilestream
from benchmarks.lib.places import RESULTS
from tilestream import devices, simulator
from tilestream.apps.load import load
from tilestream.bench.environment import environment
from tilestream.simulator.library import products
from tilestream.studies.kitsune import design, paper
from tilestream.studies.kitsune.graphs import table2_graph
from tilestream.studies.kitsune.reproduce import VARIANTS, reproduce
from tilestream.studies.kitsune.summary import BASE

COPIES: dict[str, float] = {"half of it": 0.5, "as measured on the H200": 1.0, "twice that": 2.0}
"""Elements that an SM copies in a cycle for products of odd widths, over what was measured."""
ALIGNED = "no cost of alignment"


def write(name: str, data: dict[str, Any]) -> None:
    made = {"environment": environment(), **data}
    (RESULTS / name).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


def widths() -> dict[str, Any]:
    """Speedups of Kitsune over bulk by row of Table 2, at each rate at which bulk's products of odd widths copy; and of
    longer pipelines (``deep``) at the measured one."""
    stock, dual = devices.get("a100"), devices.get("a100+kitsune")
    lines, *others = products.FAMILIES
    settings: dict[str, tuple[products.Family, ...]] = {
        name: (lines, *(replace(f, copies=f.copies * times) for f in others)) for name, times in COPIES.items()
    }
    settings[ALIGNED] = products.aligned()
    found: dict[str, dict[str, float]] = {name: {} for name in settings}
    deep: dict[str, float] = {}
    for row in paper.TABLE2:
        graph = table2_graph(row.app, row.mode)
        for name, kernels in settings.items():
            with products.families(*kernels):
                bulk = simulator.run(design(graph, stock, "bulk").workload, stock).time_s
                found[name][row.label] = bulk / simulator.run(design(graph, dual).workload, dual).time_s
                if COPIES.get(name) == 1.0:
                    joined = design(graph, dual, "deep").workload
                    deep[row.label] = bulk / simulator.run(joined, dual).time_s
    return {"device": "a100", "widths": found, "deep": deep, "planner": planner()}


def planner() -> dict[str, float]:
    """Microseconds of NeRF's batch of Table 2 on an H200 by strategy, as ``explain`` shows them."""
    loaded = load("nerf", 10_240)
    (region,) = tilestream.explain(loaded.module, *loaded.inputs, device="h200").json()["regions"]
    times: dict[str, float] = {}
    for candidate in region["candidates"]:
        if candidate["predicted_us"] is not None:
            before = times.get(candidate["strategy"], candidate["predicted_us"])
            times[candidate["strategy"]] = min(before, candidate["predicted_us"])
    return times


if __name__ == "__main__":
    write("kitsune.json", reproduce(progress=print, variants=tuple(VARIANTS)).json())
    write("kitsune_h200.json", reproduce("h200", progress=print, variants=(BASE,)).json())
    write("kitsune_widths.json", widths())
