"""``tilestream demo``: a NeRF from capture to report, on any machine; on a Hopper GPU its kernels run too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from tilestream import bench, cuda
from tilestream.apps.load import Workload, load
from tilestream.bench import accuracy, arms
from tilestream.bench.environment import environment
from tilestream.cli.progress import Progress
from tilestream.errors import CompileError, TilestreamError
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.analysis import Analysis
from tilestream.report import facts, headline, html, timeline, whole
from tilestream.report.explain import REGISTERS, Report, candidates
from tilestream.report.simulation import Simulation
from tilestream.report.words import microseconds, size

STRATEGIES = ("vertical", "spatial", "bulk")
CHECKED_ROWS = 1000  # no multiple of a tile, so that the last tile is short
SMALL_ROWS = 16384


def run(folder: Path, rows: int, out: Console, progress: Progress) -> dict[str, Any]:
    """Run every step, print what it shows, write ``report.html`` and ``timeline.json`` into ``folder``.

    Returns:
        the figures as JSON takes them; ``ok`` is False where a result was outside the tolerance.
    """
    out.print(Rule("1. A NeRF and the rays of a made scene", align="left"))
    workload = load("nerf", CHECKED_ROWS)
    parameters = sum(p.numel() for p in workload.module.parameters())
    out.print(
        f"8 layers of 256, skip after layer 5, view branch: {parameters:,} parameters, bf16\n"
        f"{CHECKED_ROWS:,} points to check results with, {rows:,} to plan for\n"
    )

    out.print(Rule("2. Regions and pipelines", align="left"))
    progress("capturing the model, planning it for an H200")
    planned = {n: replace(_planned_for(n), model="NeRF") for n in (rows, SMALL_ROWS)}
    report = Report(planned[rows])
    out.print(report)

    out.print(Rule("3. Kernels for sm_90a, compiled without a GPU", align="left"))
    kernels = _kernels(planned[rows], progress)
    out.print(_table(kernels) if isinstance(kernels, list) else kernels)
    if isinstance(kernels, list):
        out.print(f"{REGISTERS}\n")

    out.print(Rule("4. Results: the reference machine runs the pipelines tile by tile", align="left"))
    checks = _check(workload, progress)
    out.print(_table([_check_row(c) for c in checks]))

    out.print(Rule("5. Predictions, microseconds", align="left"))
    progress("predicting times for an H200 and an A100")
    times = {n: bench.predictions(of, ("h200", "a100")) for n, of in planned.items()}
    out.print("The simulator's, for the whole model:", _table(_prediction_rows(times)))
    simulation = Simulation.of(planned[rows], progress)
    out.print(simulation)

    measured: list[dict[str, Any]] = []
    if not cuda.available():
        out.print(Rule("6. Measured on this GPU", align="left"))
        measured = [_measure(n, out, progress) for n in (SMALL_ROWS, rows)]
        timed = bench.measured(load("nerf", rows, device="cuda"), Options())
        report = Report(replace(timed, model="NeRF"))
        out.print(*(candidates(timed, r) for r in timed.regions if r.plan is not None))

    progress("writing the report")
    content = html.Content(
        times=_bars(times[rows], measured[-1] if measured else None),
        simulations=simulation.by_region(),
        kernels=kernels if isinstance(kernels, list) else (),
        accuracy=checks,
        environment=environment(),
    )
    page = html.write(folder / "report.html", report, content)
    trace = timeline.write(folder / "timeline.json", simulation.timelines())
    out.print(Rule(align="left"))
    out.print(f"report:   {page} (open it in a browser)")
    out.print(f"timeline: {trace} (open it in ui.perfetto.dev)")
    if not measured:
        out.print("No Hopper GPU here: nothing was timed. On an H100 or H200 the same command also runs the kernels.")
    ok = all(c["ok"] for c in checks) and all(m["ok"] for m in measured)
    return {
        "ok": ok,
        "plan": report.json(),
        "kernels": kernels,
        "checks": checks,
        "predictions": {str(n): by for n, by in times.items()},
        "simulation": simulation.json(),
        "measured": measured,
        "files": [str(page), str(trace)],
    }


def _planned_for(rows: int) -> Analysis:
    """The plan for so many points on an H200; shapes alone, no memory."""
    workload = load("nerf", rows, fake=True)
    return analyse(workload.module, workload.inputs, Options(device="h200"))


def _planned(analysis: Analysis) -> list[tuple[str, str, Pipeline]]:
    """Region, strategy and pipeline of every candidate that is shown."""
    plans = [(r.name, r.plan) for r in analysis.regions if r.plan is not None]
    return [(name, c.strategy, p) for name, plan in plans for c, p in facts.distinct(plan)]


def _kernels(analysis: Analysis, progress: Progress) -> list[dict[str, str]] | str:
    """One row a kernel of every strategy but bulk, whose layers stand for library kernels; or why there is none."""
    rows = []
    for region, strategy, pipeline in _planned(analysis):
        if strategy == "bulk":
            continue
        progress(f"compiling {region}, {strategy}, for sm_90a")
        try:
            reports = cuda.compile_only(pipeline)
        except CompileError as error:
            return f"Not compiled: {error}"
        for launch, made in zip(cut_at_dram(pipeline), reports, strict=True):
            rows.append(
                {
                    "kernel": f"{region} {strategy}",
                    "stages": str(len(launch.stages)),
                    "registers at launch": str(made.registers),
                    "spilled bytes": str(made.spills),
                    "shared memory": size(made.shared_bytes),
                }
            )
    return rows


def _check(workload: Workload, progress: Progress) -> list[dict[str, Any]]:
    progress("running eager and float64")
    oracle = accuracy.Oracle(workload.module, workload.inputs)
    checks = []
    for strategy in STRATEGIES:
        progress(f"reference machine: {strategy}")
        torch.compiler.reset()
        options = Options(target="reference", strategy=strategy, device="h200")
        try:
            arm = arms.make("tilestream", workload.module, workload.inputs, options)
        except (RuntimeError, TilestreamError) as error:
            checks.append(_row(strategy, workload.rows, float("inf"), 0.0, False, str(error).splitlines()[0]))
            continue
        judged = oracle.check(arm.run)
        same = oracle.repeatable(arm.run)
        note = "" if same else "two runs differ"
        checks.append(_row(strategy, workload.rows, judged.error, judged.eager_error, judged.ok and same, note))
    return checks


def _row(what: str, rows: int, error: float, eager_error: float, ok: bool, note: str) -> dict[str, Any]:
    found = {"what": f"{what}, reference machine", "rows": rows, "error": error, "eager_error": eager_error}
    return {**found, "ok": ok, "note": note}


def _check_row(check: Mapping[str, Any]) -> dict[str, str]:
    return {
        "pipeline": check["what"],
        "rows": f"{check['rows']:,}",
        "error": f"{check['error']:.2e}",
        "eager's error": f"{check['eager_error']:.2e}",
        "": check["note"] or ("within tolerance" if check["ok"] else "OUTSIDE TOLERANCE"),
    }


def _prediction_rows(times: Mapping[int, Mapping[str, Mapping[str, float]]]) -> list[dict[str, str]]:
    return [
        {
            "device": device,
            "rows": f"{rows:,}",
            **{s: microseconds(by.get(s)) for s in (*STRATEGIES, "inductor")},
            "": whole.error(device),
        }
        for rows, devices_ in times.items()
        for device, by in devices_.items()
    ]


def _bars(
    predicted: Mapping[str, Mapping[str, float]], measured: Mapping[str, Any] | None
) -> dict[str, list[tuple[str, float, str]]]:
    bars = {device: _device_bars(by) for device, by in predicted.items()}
    if measured is not None:
        arms_ = measured["arms"].items()
        bars["this GPU, measured"] = [(name, arm["us"], "measured") for name, arm in arms_ if arm["us"]]
    return bars


def _device_bars(by: Mapping[str, float]) -> list[tuple[str, float, str]]:
    named = {"inductor": "Inductor", "auto": "tilestream"}
    first = [(label, by[s], "predicted") for s, label in named.items() if s in by]
    return [*first, *headline.forced(by, by.get("auto"))]


def _measure(rows: int, out: Console, progress: Progress) -> dict[str, Any]:
    from tilestream.bench import text

    result = bench.run(load("nerf", rows, device="cuda"), Options(), progress=progress)
    out.print(text.render(result))
    return result


def _table(rows: Sequence[Mapping[str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(rows[0] if rows else ()):
        table.add_column(heading, justify="left" if index == 0 or not heading else "right")
    for row in rows:
        table.add_row(*row.values())
    return table
