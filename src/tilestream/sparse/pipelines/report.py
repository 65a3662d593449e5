"""What runs where, why not in a pipeline, and how long it takes: predicted, measured, and in cycles of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def told(bound: BoundProgram, us: Mapping[str, float], expected: Mapping[str, float]) -> list[dict[str, Any]]:
    """Of each step: its statements with why they are in no pipeline and their cycles, its lengths, and its times."""
    made = []
    for step in bound.steps:
        ragged = step.lowered is not None
        why = step.why or ("",) * len(step.statements)
        made.append(
            {
                "step": step.name,
                "runs": "pipeline" if ragged else "PyTorch",
                "statements": [
                    {"name": s.name, "statement": str(s), "why": w, "cycles": expected.get(s.name)}
                    for s, w in zip(step.statements, why, strict=True)
                ],
                "edges": step.rows.lengths.told() if step.rows is not None else None,
                "predicted_us": predicted_us(step),
                "us": us.get(step.name),
                "other_us": step.other_us,
            }
        )
    return made


def table(steps: Sequence[Mapping[str, Any]]) -> Table:
    """For a terminal: a line a statement."""
    made = Table(box=None, pad_edge=False)
    for name, right in (("step", 0), ("statement", 0), ("why not a pipeline", 0), ("predicted us", 1), ("us", 1)):
        made.add_column(name, justify="right" if right else "left", overflow="fold")
    made.add_column("cycles as streams", justify="right")
    for step in steps:
        first = [step["step"], _us(step["predicted_us"]), _us(step["us"])]
        for one in step["statements"]:
            count = "" if one["cycles"] is None else f"{one['cycles']:,.0f}"
            made.add_row(first[0], one["statement"], one["why"], *first[1:], count)
            first = ["", "", ""]
    return made


def _us(x: float | None) -> str:
    return "" if x is None else f"{x:.1f}"
