"""The ragged kernels that the simulator is held against mean what their check says, and are the same every time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.lib.fresh_ragged import RaggedCase, cases
from benchmarks.run.ragged_kernels import TOLERANCE
from benchmarks.tables import ragged_tables
from tilestream import reference
from tilestream.graph.rewrites.operators import segments
from tilestream.kernels.families import kernel_of
from tilestream.run import oracle

EVERY = cases("fresh")


def test_they_are_drawn_by_a_seed_and_all_have_kernels() -> None:
    assert [c.name for c in EVERY] == [c.name for c in cases("fresh")]
    assert not {c.name for c in EVERY} & {c.name for c in cases("validation")}
    assert len({c.pipeline for c in EVERY}) > 30
    assert not [c.name for c in EVERY if kernel_of(c.pipeline).refusal]


@pytest.mark.parametrize("case", EVERY[::4], ids=lambda c: c.name.partition(":")[0])
@pytest.mark.every(6)
def test_values_on_the_reference_machine(case: RaggedCase) -> None:
    small = replace(case, nodes=30, edges=150)
    receivers = small.index("cpu", 1)
    order, starts, busy = segments(receivers, small.nodes)
    given = small.tensors("cpu", order, receivers, 1)
    found = reference.run(small.pipeline, {**given, "starts": starts, "starts.busy": busy})
    wide = {n: t.double() if t.is_floating_point() else t.long() for n, t in given.items()}
    exact = small.exact({**wide, "receivers": receivers[order.long()], "nodes": starts[:-1]})
    for name, wanted in exact.items():
        assert oracle.error(found[name], wanted) < TOLERANCE[case.dtype]


def test_the_page_has_what_was_measured() -> None:
    text = ragged_tables.PAGE.read_text(encoding="utf-8")
    assert ragged_tables.filled(text) == text, "run python -m benchmarks.tables.ragged_tables"
