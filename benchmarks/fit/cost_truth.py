"""The cost model against measurements: what it predicts today beside what an H200 took.

    python -m benchmarks.fit.cost_truth          print the scores; write the tables of docs/cost-model.md
    python -m benchmarks.fit.cost_truth --check  exit code 1 if docs/cost-model.md is not what the model says

The constants of ``devices/device.py`` were fitted on README's cases and the pipelines of ``silicon.json``;
``validation_models.json`` had no part in that, nor had ``candidates.json``, which is shown where ``candidates.py`` was
run. README's cases are those of ``launch_truth.py``: README's own times and predictions are of the day it was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.fit.predicted import Predicted
from benchmarks.lib.cases import MAIN, OTHERS, Case
from benchmarks.lib.marked import table
from benchmarks.lib.places import DOCS, RESULTS
from tilestream import devices
from tilestream.apps import APPS
from tilestream.graph import capture, selection
from tilestream.graph.region import Region
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.serialise import pipeline_from_json
from tilestream.options import parse
from tilestream.plan.candidates import Plan
from tilestream.plan.cost import predict
from tilestream.plan.planner import on_inductor, plan
from tilestream.run.spec import decode

DOC = DOCS / "cost-model.md"
BEGIN, END = "<!-- cost: begin -->", "<!-- cost: end -->"
README, MODELS, KERNELS, KERNELS_VALIDATION = "README's cases", "models", "pipelines", "pipelines, validation"
CANDIDATES = "every way to run ten models"
INDUCTOR, INDUCTOR_MODELS = "Inductor on README's cases", "Inductor on the models"
VALIDATION = (MODELS, KERNELS_VALIDATION, CANDIDATES)
TITLES = {README: "README's cases", MODELS: "models of the validation set"}
H200 = devices.get("h200")


@dataclass(frozen=True)
class Point(Predicted):
    """One kernel or model; microseconds."""

    group: str
    name: str
    rows: int
    measured_us: float
    predicted_us: float


@dataclass(frozen=True)
class Score:
    """Of a group: mean absolute error, mean error, and the largest factor between prediction and measurement."""

    group: str
    count: int
    mean: float
    bias: float
    worst: float

    @classmethod
    def of(cls, group: str, points: Sequence[Point]) -> Score:
        errors = [p.error for p in points]
        ratios = [max(1 + e, 1 / (1 + e)) for e in errors]
        return cls(group, len(errors), sum(map(abs, errors)) / len(errors), sum(errors) / len(errors), max(ratios))


@cache
def region_of(model: str, rows: int) -> Region:
    """The one region of an app."""
    module, inputs = APPS[model].make(rows)
    (graph,) = capture.capture(module, inputs).graphs
    (region,) = selection.partition(graph).regions
    return region


@cache
def planned(case: Case) -> Plan:
    """What the planner makes of a case of README without a GPU."""
    return plan(region_of(case.model, case.rows).program, case.rows, H200, parse({"strategy": case.strategy}))


def inductor_us(program: Pipeline, rows: int) -> float:
    """What Inductor is predicted to take by itself: as it was timed, its ReLUs are no epilogues of products."""
    found = on_inductor(program, rows, H200, epilogues=False).predicted_us
    assert found is not None
    return found


def predicted(made: Plan, name: str) -> float:
    """Microseconds of the candidate of that name, or of the one that it turned out to be the same as."""
    found = next(c for c in made.candidates if c.name == name)
    if found.predicted_us is None and found.rejected.startswith("the same as "):
        return predicted(made, found.rejected.removeprefix("the same as "))
    if found.predicted_us is None:
        raise ValueError(f"{made.region}: {name} has no prediction: {found.rejected}")
    return found.predicted_us


def streamed(made: Plan) -> str:
    """The best candidate but the library, whoever wins: what ``validation_models.json`` measured."""
    legal = [c for c in made.candidates if c.pipeline is not None]
    return min(legal, key=lambda c: c.predicted_us or math.inf).name


def readme() -> Iterator[Point]:
    """The best by prediction as ``launch_truth.py`` timed it, today's kernels, and Inductor as README has it."""
    timed: dict[str, dict[str, Any]] = {}
    for row in json.loads((RESULTS / "launch_truth.json").read_text())["rows"]:
        if row["launch"]["family"] == "README":
            timed.setdefault(row["launch"]["model"], row)
    for case in (*MAIN, *OTHERS):
        row = timed[case.name]
        us = predict(decode(row["launch"]["spec"]).pipeline, case.rows, H200).us
        yield Point(README, case.title, case.rows, row["us"], us)
        if case.strategy != "spatial":
            us = inductor_us(region_of(case.model, case.rows).program, case.rows)
            result = json.loads(case.path.read_text())
            yield Point(INDUCTOR, case.title, case.rows, result["arms"]["inductor"]["us"], us)


def validation() -> Iterator[Point]:
    """Models as the planner would run them, each with Inductor; then single pipelines."""
    data = json.loads((RESULTS / "validation_models.json").read_text())
    for model in data["models"]:
        program = pipeline_from_json(model["program"])
        made = plan(program, model["rows"], H200, parse({"strategy": model["strategy"]}))
        us = predicted(made, streamed(made))
        yield Point(MODELS, model["name"], model["rows"], model["us"]["tilestream"], us)
        us = inductor_us(program, model["rows"])
        yield Point(INDUCTOR_MODELS, model["name"], model["rows"], model["us"]["inductor"], us)
    for row in data["pipelines"]:
        yield _pipeline(KERNELS_VALIDATION, f"{row['name']} {row['strategy']}", row["rows"], row["us"], row["pipeline"])


def kernels() -> Iterator[Point]:
    """The pipelines of ``silicon.json``."""
    for row in json.loads((RESULTS / "silicon.json").read_text())["rows"]:
        if row["kind"] == "pipeline":
            (data,) = row["extra"]["pipelines"]
            shape = row["shape"]
            yield _pipeline(KERNELS, f"{shape['model']} {shape['strategy']}", shape["rows"], row["us"], data)


def candidates() -> Iterator[Point]:
    """What ``candidates.py`` timed, where it was run."""
    path = RESULTS / "candidates.json"
    for row in json.loads(path.read_text())["rows"] if path.exists() else ():
        if row["pipeline"] is not None and row["measured_us"] is not None:
            name = f"{row['model']}: {row['candidate']}"
            yield _pipeline(CANDIDATES, name, row["rows"], row["measured_us"], row["pipeline"])


def _pipeline(group: str, name: str, rows: int, us: float, data: object) -> Point:
    pipeline: Pipeline = pipeline_from_json(data)
    return Point(group, name, rows, us, predict(pipeline, rows, H200).us)


@cache
def points() -> tuple[Point, ...]:
    return (*validation(), *candidates(), *readme(), *kernels())


def scores() -> dict[str, Score]:
    """By group, validation groups first."""
    groups = dict.fromkeys(p.group for p in points())
    order = sorted(groups, key=lambda g: g not in VALIDATION)
    return {g: Score.of(g, [p for p in points() if p.group == g]) for g in order}


def document() -> str:
    """What stands between the markers of docs/cost-model.md."""
    lines = [
        (g, "yes" if g in VALIDATION else "", str(s.count), f"{s.mean:.1%}", f"{s.bias:+.1%}", f"{s.worst:.2f}")
        for g, s in scores().items()
    ]
    heads = ("", "validation", "number", "mean absolute error", "mean error", "worst factor")
    parts = [table(heads, lines, left=2)]
    for ours, theirs in ((MODELS, INDUCTOR_MODELS), (README, INDUCTOR)):
        parts += ["", f"### {TITLES[ours][0].upper()}{TITLES[ours][1:]}", "", _side_by_side(ours, theirs)]
    for group in (KERNELS_VALIDATION, CANDIDATES, KERNELS):
        rows = [
            (p.name, f"{p.rows:,}", f"{p.measured_us:.1f}", f"{p.predicted_us:.1f}", f"{p.error:+.0%}")
            for p in points()
            if p.group == group
        ]
        heads = ("pipeline", "rows", "measured us", "predicted us", "error")
        if rows:
            parts += ["", f"### {group[0].upper()}{group[1:]}", "", table(heads, rows)]
    return "\n".join(parts)


def _side_by_side(ours: str, theirs: str) -> str:
    other = {(p.name, p.rows): p for p in points() if p.group == theirs}

    def cells(p: Point | None) -> tuple[str, str, str]:
        if p is None:
            return "", "", ""
        return f"{p.measured_us:.1f}", f"{p.predicted_us:.1f}", f"{p.error:+.0%}"

    rows = [
        (p.name, f"{p.rows:,}", *cells(p), *cells(other.get((p.name, p.rows)))) for p in points() if p.group == ours
    ]
    heads = ("model", "rows", "measured us", "predicted us", "error", "Inductor us", "predicted us", "error")
    return table(heads, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    text = DOC.read_text()
    before, rest = text.split(BEGIN)
    made = f"{before}{BEGIN}\n\n{document()}\n\n{END}{rest.split(END)[1]}"
    if given.check:
        if made != text:
            print("docs/cost-model.md is not the cost model's: run benchmarks/fit/cost_truth.py", file=sys.stderr)
        return int(made != text)
    for s in scores().values():
        print(f"{s.group:30s} {s.count:3d}  mean {s.mean:6.1%}  bias {s.bias:+6.1%}  worst factor {s.worst:.2f}")
    DOC.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
