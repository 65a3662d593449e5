"""What must hold of every recording, on a GPU and in the host build."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from tilestream.cuda.recording import CONSUMERS, DETAIL, STEP, WAIT, Recording, Slice
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.sizes import tiles_of


def check_complete(pipeline: Pipeline, run: Recording, rows: int) -> None:
    """Every tile of every stage is there once, by one warpgroup or by both."""
    for stage in pipeline.stages:
        steps = [s for s in run.slices if s.stage == stage.name and s.kind == STEP and s.tile < tiles_of(rows, stage)]
        by_rows = stage.placement.dim == 0
        found = Counter((s.tile if by_rows else (s.tile, s.role)) for s in steps)
        wanted = range(tiles_of(rows, stage))
        assert set(found) == (set(wanted) if by_rows else {(t, g) for t in wanted for g in range(CONSUMERS)})
        assert set(found.values()) == {1}, f"{stage.name}: {found}"


def check_order(run: Recording, whole: bool = True) -> None:
    """A role does one thing at a time, its waits lie within what it does, and nothing is outside of the call.

    Args:
        whole: no stamp was dropped. Else what a wait belonged to may be lost.
    """
    by_role: dict[tuple[int, int, int], list[Slice]] = {}
    for s in run.slices:
        assert 0 <= s.start_us <= s.end_us <= run.stamped_us + 1e-6
        by_role.setdefault((s.launch, s.worker, s.role), []).append(s)
    for slices in by_role.values():
        for kind in (STEP, DETAIL, WAIT):
            for a, b in pairwise(s for s in slices if s.kind == kind):
                assert a.end_us <= b.start_us + 1e-6
        details = [s for s in slices if s.kind == DETAIL]
        for wait in (s for s in slices if s.kind == WAIT and whole):
            assert any(d.start_us - 1e-6 <= wait.start_us and wait.end_us <= d.end_us + 1e-6 for d in details)
