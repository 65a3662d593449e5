"""The order in which regions are planned: as their kernels are built."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from modules import linear
from torch import nn

from tilestream.devices import get
from tilestream.errors import CompileError, PlanError
from tilestream.graph.capture import capture
from tilestream.graph.region import Region
from tilestream.graph.selection import partition
from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options
from tilestream.plan import margins, planner
from tilestream.plan.candidates import FALLBACK, Candidate, Plan
from tilestream.plan.planner import proposals
from tilestream.run import ahead, collector, gradients, prepare
from tilestream.run.target import Target
from tilestream.run.timer import Timer

TARGET = Target("cuda", torch.device("cpu"), get("h200"))
OPTIONS = Options(cache=False)


def region(width: int, rows: int, layers: int = 2) -> Region:
    linears = [linear(width, width) for _ in range(layers)]
    module = nn.Sequential(linears[0], *(m for later in linears[1:] for m in (nn.ReLU(), later))).bfloat16()
    (graph,) = capture(module, [torch.randn(rows, width).bfloat16()]).graphs
    (found,) = partition(graph).regions
    return found


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch, fresh: None) -> list[Region]:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return [region(64, 512), region(96, 512), region(128, 65_536)]


def watched(monkeypatch: pytest.MonkeyPatch, built: Sequence[int | None]) -> list[str]:
    """What is done in order, where ``built`` says which of the regions that are left is ready each time."""
    done: list[str] = []
    answers = iter(built)

    def first_built(groups: list[list[Pipeline]], kind: str, timeout_s: float, in_turn: bool) -> int | None:
        assert all(groups) and kind == "cuda" and in_turn
        if timeout_s == 0.0:
            return None
        done.append(f"waits {timeout_s:.0f} s for {len(groups)}")
        return next(answers)

    def width(of: Region) -> int:
        return of.program.tensors[0].features

    monkeypatch.setattr(ahead, "first_built", first_built)
    monkeypatch.setattr(ahead, "plan", lambda r, *_: done.append(f"plans {width(r)}"))
    return done


def test_as_they_are_built(regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    done = watched(monkeypatch, [2, 0, 0])
    ahead.plan_as_built([*regions, regions[0]], OPTIONS, TARGET)
    waits = [f"waits {margins.PATIENCE_S:.0f} s for {left}" for left in (3, 2, 1)]
    assert done == [waits[0], "plans 128", waits[1], "plans 64", waits[2], "plans 96"]


def test_gradients_are_planned_among_regions_as_they_are_built(
    regions: list[Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equal launches one; neither waits for the other's kernels, nor fails with one that cannot be planned."""
    done = watched(monkeypatch, [3, 0, 1, 0])

    def launch(name: str, rows: int) -> SimpleNamespace:
        return SimpleNamespace(name=name, rows=rows, pipeline=lambda _: regions[0].program)

    def planned(of: SimpleNamespace, *_: object) -> None:
        done.append(f"plans {of.name}")
        raise PlanError("its results are wrong")

    def refused(_: object) -> Pipeline:
        raise CompileError("no such kernel", "none")

    monkeypatch.setattr(gradients, "plan", planned)
    strange = SimpleNamespace(name="strange", rows=1, pipeline=refused)
    launches = [launch("a", 512), strange, launch("b", 1024), launch("c", 512)]
    ahead.plan_as_built(regions[1:], OPTIONS, TARGET, launches)  # pyright: ignore[reportArgumentType]
    assert [what for what in done if what.startswith("plans")] == ["plans 128", "plans a", "plans 96", "plans b"]
    ahead.plan_as_built([], Options(cache=False, measure=False), TARGET, launches)  # pyright: ignore
    assert len(done) == 8


def test_the_fallback_begins_where_it_will_be_timed(regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is timed, so that Inductor's processes compile its kernels meanwhile."""
    done = watched(monkeypatch, [0, 0, 0])
    monkeypatch.setattr(ahead, "begin_inductors", lambda r: done.append(f"begins {r.rows}"))
    monkeypatch.setattr(margins, "LIKELY", 0.0)
    monkeypatch.setattr(margins, "BEYOND", 0.0)
    ahead.plan_as_built(regions, OPTIONS, TARGET)
    assert done[:3] == ["begins 512", "begins 512", "begins 65536"] and sum("begins" in what for what in done) == 3
    for never in (OPTIONS.with_(strategy="vertical"), OPTIONS):
        monkeypatch.setattr(margins, "LIKELY", 0.0 if never is not OPTIONS else 100.0)
        watched(monkeypatch, [0, 0, 0])
        ahead.plan_as_built(regions, never, TARGET)
    assert sum("begins" in what for what in done) == 3


def test_what_waits_for_a_kernel_collects_once(regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    """And what need not wait does not."""
    done = watched(monkeypatch, [0, 0])
    wait = ahead.first_built
    collected: list[bool] = []
    monkeypatch.setattr(collector.gc, "collect", lambda: collected.append(True))
    ready = iter([0, None, None])

    def first_built(groups: list[list[Pipeline]], kind: str, timeout_s: float, in_turn: bool) -> int | None:
        return next(ready) if timeout_s == 0.0 else wait(groups, kind, timeout_s, in_turn)

    monkeypatch.setattr(ahead, "first_built", first_built)
    ahead.plan_as_built(regions, OPTIONS, TARGET)
    assert len(collected) == 1 and sum("waits" in what for what in done) == 2
    assert [what for what in done if "plans" in what] == ["plans 64", "plans 96", "plans 128"]


def test_the_first_one_where_none_is_built_in_time(regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    done = watched(monkeypatch, [None] * 3)
    ahead.plan_as_built(regions, OPTIONS, TARGET)
    assert [what for what in done if "plans" in what] == ["plans 64", "plans 96", "plans 128"]


def test_one_that_cannot_be_planned_is_left_to_who_says_why(
    regions: list[Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = watched(monkeypatch, [0, 0, 0])

    def plan(r: Region, *_: object) -> None:
        done.append("plans")
        if r is regions[0]:
            raise CompileError("no NVRTC", "install it")

    monkeypatch.setattr(ahead, "plan", plan)
    ahead.plan_as_built(regions, OPTIONS, TARGET)
    assert done.count("plans") == 3


def test_nothing_is_timed_where_times_are_not_taken(regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    done = watched(monkeypatch, [])
    ahead.plan_as_built(regions, Options(cache=False, measure=False), TARGET)
    ahead.plan_as_built(regions, OPTIONS, Target("reference", torch.device("cpu"), get("h200")))
    assert done == []


def test_kernels_are_begun_before_the_next_region_is_looked_at(
    regions: list[Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    look = planner.proposals
    monkeypatch.setattr(planner, "proposals", lambda p, *rest: (done.append(f"looks at {width(p)}"), look(p, *rest))[1])
    monkeypatch.setattr(ahead, "build_ahead", lambda made, _, rank: done.append(f"begins {width(made[0])}, {rank}"))
    ahead.begin(regions[:2], OPTIONS, TARGET)
    first, second = done.index("looks at 64"), done.index("looks at 96")
    assert done[first + 1 : second] and all(what.startswith("begins 64") for what in done[first + 1 : second])
    assert done[first + 1].endswith(" 0") and done[second + 1] == "begins 96, 0"


def test_the_longest_region_begins_first(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """Its kernel is the last to be built; of as long ones that of most rows, since each program has the rows of its
    last region, whatever the order."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    begun: list[int] = []
    monkeypatch.setattr(ahead, "build_ahead", lambda made, _, rank: begun.append(width(made[0])))
    long = region(72, 256, layers=3)
    ahead.begin([region(64, 512), region(96, 4096), region(64, 1024), long], OPTIONS, TARGET)
    assert list(dict.fromkeys(begun)) == [72, 96, 64]


def test_a_region_may_run_unless_nothing_is_timed_or_its_plan_is_inductors(
    regions: list[Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ahead.may_run(regions[0], OPTIONS, TARGET)
    monkeypatch.setattr(ahead, "shortlist", lambda *_: [])
    assert not ahead.may_run(regions[0], OPTIONS, TARGET)
    program, rows = regions[1].program, regions[1].rows
    kernel = next(c for c in proposals(program, rows, TARGET.hardware, OPTIONS) if c.pipeline is not None)
    for chosen, runs in ((kernel, True), (Candidate(FALLBACK, None, 1.0), False)):
        made = Plan("region0", rows, "h200", (chosen,), chosen)
        monkeypatch.setattr(prepare, "_plans", {prepare._key(regions[1], OPTIONS, TARGET): [made]})
        assert ahead.may_run(regions[1], OPTIONS, TARGET) == runs


def width(program: Pipeline) -> int:
    return program.tensors[0].features


def test_what_was_proposed_ahead_is_not_proposed_again(regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    """To run the passes of all candidates takes longer than all else that a plan needs."""
    options, asked, recipes = OPTIONS.with_(queue_depth=6), [], planner.recipes
    monkeypatch.setattr(planner, "recipes", lambda *given: asked.append(given) or recipes(*given))
    monkeypatch.setattr(Timer, "__call__", lambda _, candidates: [c.predicted_us or 1.0 for c in candidates])
    monkeypatch.setattr(ahead, "build_ahead", lambda *_: None)
    ahead.begin(regions[:1], options, TARGET)
    assert prepare.plan(regions[0], options, TARGET).chosen.measured_us is not None and len(asked) == 1
