"""What runs where, why not in a pipeline, and how long it takes: predicted, measured, and in cycles of streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from tilestream import devices, simulator
from tilestream.sparse.expected import estimate_program
from tilestream.sparse.lowering.build import plan
from tilestream.sparse.pipelines.program import BoundProgram, Step
from tilestream.sparse.schedule import Schedule


def predicted_us(step: Step) -> float | None:
    """Microseconds of a pipeline's kernel by the simulator, from the lengths of its rows; None of other steps.

    On the GPU here, or an H200 where there is none.
    """
    if step.lowered is None or step.rows is None:
        return None
    pipeline, known = step.lowered.pipeline, {"edges": step.rows.lengths}
    device = devices.planned_for(None)
    return simulator.simulate(pipeline, step.rows.sizes, device, spans=False, lengths=known).time_us


def cycles(bound: BoundProgram) -> dict[str, float]:
    """Cycles that each operator of the program is expected to take by itself as streams, at its last statement."""
    program, einsums, schedule = bound.of.program, bound.of.einsums, Schedule(fuse="none")
    alone = program.planned(einsums, schedule, plan(einsums, schedule))
    found: dict[str, float] = {}
    estimate_program(alone, observe=lambda region, one: found.update({region.einsums[-1].name: one.cycles}))
    return found


def told(bound: BoundProgram) -> dict[str, Any]:
    """``us`` of the whole, on a GPU, and ``steps``: of each its statements with why they are in no pipeline and their
    cycles, the lengths of its rows, and its times."""
    expected = cycles(bound)
    whole, each = bound.times_us() if bound.of.target == "cuda" else (None, {})
    made = []
    for step in bound.steps:
        why = step.why or ("",) * len(step.statements)
        made.append(
            {
                "step": step.name,
                "runs": "PyTorch" if step.lowered is None else "pipeline",
                "statements": [
                    {"name": s.name, "statement": str(s), "why": w, "cycles": expected.get(s.name)}
                    for s, w in zip(step.statements, why, strict=True)
                ],
                "edges": step.rows.lengths.told() if step.rows is not None else None,
                "predicted_us": predicted_us(step),
                "us": each.get(step.name),
                "other_us": step.other_us,
            }
        )
    return {"us": whole, "steps": made}


def table(name: str, told: Mapping[str, Any]) -> Table:
    """What was told of a program, for a terminal: a line a statement."""
    steps = told["steps"]
    time = "" if told["us"] is None else f", {told['us']:.1f} us"
    title = f"{name}: {len(steps)} step{'' if len(steps) == 1 else 's'}{time}"
    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("step", "statement", "why not a pipeline"):
        made.add_column(column, overflow="fold")
    for column in ("predicted us", "us", "cycles as streams"):
        made.add_column(column, justify="right")
    for step in steps:
        first = [step["step"], _us(step["predicted_us"]), _us(step["us"])]
        for one in step["statements"]:
            count = "" if one["cycles"] is None else f"{one['cycles']:,.0f}"
            made.add_row(first[0], one["statement"], one["why"], *first[1:], count)
            first = ["", "", ""]
    return made


def _us(x: float | None) -> str:
    return "" if x is None else f"{x:.1f}"
