"""Search over schedules: pruning is safe, the front and the printed schedule are right, budgets and errors hold."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from places import EXAMPLES

from tilestream.errors import OptionError, SparseError
from tilestream.sparse import Program, Schedule, compile_einsum, kernels, pack
from tilestream.sparse.expected import estimate_program, on_chip_bytes
from tilestream.sparse.search import Space, search


def _operands(n: int = 20, d: int = 4):
    return [pack(name, kernels.hashed(n, d, s), kernels.DCSR) for s, name in enumerate("BCD", 1)]


def _make(schedule: Schedule) -> Program:
    return compile_einsum("ik,kj,jl->il", _operands(), schedule)


def test_the_best_found_is_the_best_there_is() -> None:
    found = search(_make, space=Space(orders=4, factors=(2,)), slack=1e9, budget_s=300)
    assert found.pruned == 0 and found.unsimulated == 0
    again = [_make(p.schedule).run().cycles for p in found.points]
    assert again == [p.cycles for p in found.points]
    assert found.best.cycles == min(again)
    kinds = {p.schedule.fuse if isinstance(p.schedule.fuse, str) else "some" for p in found.points}
    assert {"none", "all"} <= kinds
    assert any(p.schedule.parallel for p in found.points)


def test_pruning_drops_only_what_is_much_worse() -> None:
    space = Space(orders=24, factors=(2,))
    everything = search(_make, space=space, slack=1e9, budget_s=300)
    some = search(_make, space=space, slack=1.5, budget_s=300)
    assert some.pruned > 0 and len(some.points) < len(everything.points)
    assert some.best.cycles == everything.best.cycles


def test_the_printed_schedule_is_code() -> None:
    found = search(_make, space=Space(orders=2, factors=(2,)), budget_s=60)
    pasted = eval(str(found.best.schedule), {"Schedule": Schedule})
    assert pasted == found.best.schedule
    assert _make(pasted).run().cycles == found.best.cycles
    report = found.json()
    assert report["best"] == str(found.best.schedule)
    assert sum(p["pareto"] for p in report["points"]) == len(found.front)
    assert found.plot().count("<circle") == len(found.points)


def test_a_spent_budget_still_gives_an_answer() -> None:
    found = search(_make, space=Space(orders=4), budget_s=0.0)
    assert len(found.points) == 1
    assert found.points[0].estimate.cycles == pytest.approx(found.points[0].cycles, rel=0.5)


def test_bounded_runs_stall_and_deadlocks_are_refused() -> None:
    space = Space(orders=1, factors=())
    free = search(_make, space=space, budget_s=60)
    tight = search(_make, space=space, budget_s=60, depth=4, bounded=True)
    assert tight.best.cycles > free.best.cycles
    with pytest.raises(SparseError, match="cannot go on"):
        search(_make, space=space, budget_s=60, depth=1, bounded=True)


def test_what_does_not_compile_is_counted_with_its_reason() -> None:
    def make(schedule: Schedule) -> Program:
        if schedule.fuse == "all":
            raise SparseError("it is full moon", "wait")
        return _make(schedule)

    found = search(make, space=Space(orders=1, factors=()), budget_s=60)
    assert found.refused["it is full moon"] >= 1

    class Never(Program):
        def run(self, *inputs, **options):
            raise SparseError("it never works", "give up")

    def never(schedule: Schedule) -> Program:
        program = _make(schedule)
        program.__class__ = Never
        return program

    with pytest.raises(SparseError, match="it never works"):
        search(never, space=Space(orders=1, factors=()), budget_s=5)


def test_the_example_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["sparse_gcn.py", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "sparse_gcn.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "a region a layer" in said and "Schedule(" in said
    assert "<svg" in (tmp_path / "gcn.html").read_text(encoding="utf-8")


def test_bad_spaces_are_refused() -> None:
    with pytest.raises(OptionError, match="orders"):
        Space(orders=0)
    with pytest.raises(OptionError, match="factor"):
        Space(factors=(0,))
    with pytest.raises(OptionError, match="slack"):
        search(_make, slack=0.5)


@pytest.mark.parametrize("fuse", ["none", "all"])
def test_programs_are_estimated_region_by_region(fuse: str) -> None:
    program = _make(Schedule(fuse=fuse))  # type: ignore[arg-type]
    expected, ran = estimate_program(program), program.run()
    assert expected.flops == pytest.approx(ran.flops, rel=0.1)
    assert expected.bytes == pytest.approx(ran.bytes, rel=0.1)
    assert expected.cycles == pytest.approx(ran.cycles, rel=0.2)


def test_on_chip_memory_counts_channels_and_accumulators() -> None:
    graph = kernels.matmul("ikj").graph
    ports = sum(len(n.outs) for n in graph.nodes if n.kind != "broadcast")
    outputs = {"X": ((20, 30), kernels.DCSR)}
    one, two = (on_chip_bytes(graph, depth, outputs) for depth in (1, 2))
    assert two - one == 4 * ports
    assert one - 4 * ports == 30 * 8
