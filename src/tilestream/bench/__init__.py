"""``tilestream bench``: one model, four ways to run it, errors against float64, the plan and its predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tilestream import devices
from tilestream.apps.load import Workload
from tilestream.bench import arms as arms_
from tilestream.bench import dram
from tilestream.bench import first_call as first_call_
from tilestream.bench.accuracy import Oracle, repeatable
from tilestream.bench.environment import environment
from tilestream.errors import TilestreamError
from tilestream.ir import traffic
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.analysis import Analysis
from tilestream.plan.parts import RegionAnalysis
from tilestream.plan.predicted import predictions as by_strategy
from tilestream.plan.predicted import replan
from tilestream.report import whole
from tilestream.report.explain import Report
from tilestream.run import prepare
from tilestream.run.timing import Captured
from tilestream.run.whole import measured as measured_whole
from tilestream.run.whole import wholes

SCHEMA = 1
PREDICTED = ("h200", "a100")
ARMS = arms_.ARMS


def run(
    workload: Workload,
    options: Options,
    *,
    arms: Sequence[str] = ARMS,
    predict: Sequence[str] = PREDICTED,
    planned: Workload | None = None,
    counters: Sequence[str] | None = None,
    first_call: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure ``workload`` and return the result as JSON takes it; times in microseconds.

    On a GPU every arm is timed by ``bench.timing``'s protocol and checked. Elsewhere, or with
    ``target="reference"``, tilestream's arm is executed by the reference machine, and only errors and
    predictions are given.

    Args:
        predict: devices to predict times for.
        planned: the model with the rows to plan and predict for, where they are not those that run.
        counters: arguments of ``bench.once`` after the model, to count DRAM bytes; None leaves that out.
        first_call: the same, to time the first call in processes of its own, cold and warm.
        progress: told what is going on, one line at a time.
    """
    on_gpu = workload.tensors[0].is_cuda and options.target != "reference"
    made: dict[str, Any] = {
        "schema": SCHEMA,
        "model": workload.name,
        "rows": workload.rows,
        "dtype": str(workload.dtype).removeprefix("torch."),
        "inputs": [list(x.shape) for x in workload.tensors],
        "environment": environment(),
    }
    torch.compiler.reset()
    compiled = len(prepare.analyses())
    progress("running eager and float64")
    oracle = Oracle(workload.module, workload.inputs, workload.keywords)
    with arms_.planned_anew():
        if on_gpu:
            made |= _on_gpu(workload, options, arms, oracle, progress)
        else:
            made |= _on_reference(workload, options, oracle, progress)
    progress("planning")
    analysis = analysed(planned or workload, options)
    if planned is None:
        analysis = as_used(analysis, prepare.analyses()[compiled:])
    ours, inductors = (made["arms"].get(name, {}).get("us") for name in ("tilestream", "inductor"))
    analysis = replace(analysis, measured_us=ours, inductor_measured_us=inductors)
    made["planned_rows"] = (planned or workload).rows
    made["plan"] = Report(analysis).json()
    made["whole"] = f"{whole.coverage(analysis.coverage)}\n{whole.times(analysis)}"
    made["predictions"] = predictions(analysis, predict)
    counted: dict[str, Any] = {"ir": ir_bytes(analysis)}
    if on_gpu and counters is not None:
        for name in [a for a in ("tilestream", "inductor") if a in arms]:
            progress(f"counting DRAM bytes of {name}")
            counted[name] = dram.measure(name, workload.name, counters)
    made["dram_bytes"] = counted
    if first_call is not None:
        progress("timing the first call, cold and warm")
        made["first_call"] = first_call_.measure(workload.name, first_call)
    return made


def predictions(analysis: Analysis, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Device to strategy to predicted microseconds of the whole model."""
    own = {analysis.device: analysis}
    return {name: by_strategy(own.get(name) or replan(analysis, devices.get(name))) for name in names}


def analysed(workload: Workload, options: Options, training: bool = False) -> Analysis:
    """The analysis of a workload, by its name; without ``training``, as commands run it: under ``torch.no_grad``."""
    with torch.set_grad_enabled(training):
        made = analyse(workload.module, workload.inputs, options, keywords=workload.keywords, training=training)
    return replace(made, model=workload.name)


def measured(workload: Workload, options: Options) -> Analysis:
    """The analysis of a model after it has been compiled and run once, so that candidates have measured times."""
    compiled, graphs = len(prepare.analyses()), len(wholes())
    with arms_.planned_anew():
        arms_.make("tilestream", workload.module, workload.inputs, options, workload.keywords)
    analysis = as_used(analysed(workload, options), prepare.analyses()[compiled:])
    ours, inductors = measured_whole(wholes()[graphs:])
    return replace(analysis, measured_us=ours, inductor_measured_us=inductors)


def as_used(analysis: Analysis, used: Sequence[RegionAnalysis], only: bool = False) -> Analysis:
    """The analysis with the plans that the compiled model runs, which hold what was measured.

    Args:
        only: regions that it did not compile have no plan.
    """
    by_program = {r.program: r for r in used}
    regions = []
    for region in analysis.regions:
        ran = by_program.get(region.program)
        if ran is not None:
            region = replace(region, plan=ran.plan, problem=ran.problem)
        elif only:
            region = replace(region, plan=None, problem="it was not compiled as a region")
        regions.append(region)
    return replace(analysis, regions=tuple(regions))


def ir_bytes(analysis: Analysis) -> dict[str, int] | None:
    """DRAM bytes that the chosen pipelines move by the IR's own count; None where Inductor was chosen."""
    read = written = 0
    for region in analysis.regions:
        if region.plan is None or region.plan.chosen.pipeline is None:
            return None
        counted = traffic.traffic(region.plan.chosen.pipeline, region.rows)
        read, written = read + counted.dram_read, written + counted.dram_written
    return {"read": read, "write": written}


def _on_gpu(
    workload: Workload, options: Options, names: Sequence[str], oracle: Oracle, progress: Callable[[str], None]
) -> dict[str, Any]:
    from tilestream.bench import timing

    captured: dict[str, Captured] = {}
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        progress(f"compiling and capturing {name}")
        try:
            arm = arms_.make(name, workload.module, workload.inputs, options, workload.keywords)
            captured[name] = timing.captured(arm.run)
            accuracy = oracle.judge(timing.poisoned_replay(captured[name]))
        except (RuntimeError, TilestreamError) as failure:
            captured.pop(name, None)
            results[name] = {"us": None, "failed": f"{type(failure).__name__}: {failure}"}
            continue
        results[name] = {
            "us": None,
            "error": accuracy.error,
            "ok": accuracy.ok,
            "repeatable": repeatable(arm.run),
            "compile_s": arm.compile_s,
        }
    progress("timing")
    for name, timed in timing.interleaved(captured).items():
        results[name] |= {"us": timed.us, "us_min": timed.us_min, "us_max": timed.us_max, "calls": timed.calls}
    made = _summary(results, oracle)
    made["protocol"] = timing.PROTOCOL
    return made


def _on_reference(
    workload: Workload, options: Options, oracle: Oracle, progress: Callable[[str], None]
) -> dict[str, Any]:
    progress("executing on the reference machine")
    on_reference = options.with_(target="reference")
    arm = arms_.make("tilestream", workload.module, workload.inputs, on_reference, workload.keywords)
    accuracy = oracle.judge(arm.run())
    results = {
        "tilestream": {
            "us": None,
            "error": accuracy.error,
            "ok": accuracy.ok,
            "repeatable": repeatable(arm.run),
            "compile_s": arm.compile_s,
            "ran_on": "reference machine",
        }
    }
    return _summary(results, oracle)


def _summary(results: dict[str, dict[str, Any]], oracle: Oracle) -> dict[str, Any]:
    mine = results.get("tilestream", {})
    others = {n: r["us"] for n, r in results.items() if n != "tilestream" and r.get("us")}
    best = min(others, key=lambda n: others[n]) if others else None
    us = mine.get("us")
    return {
        "arms": results,
        "error": mine.get("error"),
        "eager_error": oracle.judge(oracle.eager).eager_error,
        "ok": mine.get("ok"),
        "best_alternative": best,
        "speedup": others[best] / us if best is not None and us else None,
    }
