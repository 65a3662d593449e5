"""Lengths of ragged axes: what is counted from a histogram, and bytes against the reference machine's."""

from __future__ import annotations

import pytest
from ragged_cases import CASES, LENGTHS

from tilestream.errors import InputError
from tilestream.ir.dtypes import ELEMENT_DTYPES
from tilestream.ir.lengths import Lengths, sizes_of
from tilestream.ir.mesh_traffic import mesh_traffic
from tilestream.reference.mesh_machine import Moved, run_meshes
from tilestream.reference.ops import WORKING


def test_a_histogram_says_mean_largest_and_steps() -> None:
    lengths = Lengths.of(LENGTHS)
    assert (lengths.outer, lengths.total, lengths.largest) == (12, 77, 40)
    assert lengths.steps(8) == sum(-(-n // 8) for n in LENGTHS) == 14
    assert lengths.steps_together(8, 1) == 14 and lengths.steps_together(8, 12) == pytest.approx(5, rel=0.5)
    assert lengths.told() == "mean 6.4, largest 40"
    assert Lengths.equal(3, 10).counts == ((3, 2), (4, 1))
    assert Lengths.equal(4, 20).told() == "mean 5.0, largest 5, assumed all equal"
    with pytest.raises(InputError, match="never fall"):
        Lengths.of([1, -1])


def test_neighbours_wait_for_their_longest() -> None:
    ordered = Lengths.of(sorted(LENGTHS))
    assert ordered == Lengths.of(LENGTHS) and ordered.steps_together(8, 4) < Lengths.of(LENGTHS).steps_together(8, 4)
    assert Lengths.of(LENGTHS).steps_together(8, 4) == sum(-(-max(LENGTHS[i : i + 4]) // 8) for i in (0, 4, 8))
    unknown = Lengths(ordered.counts)
    assert ordered.steps_together(8, 4) < unknown.steps_together(8, 4)


@pytest.mark.parametrize(
    ("outer", "total"), [(100_000, 1_100_000), (3, 7), (1, 1), (5, 0), (10, 3), (50, 49), (2, 100_000)]
)
def test_lengths_at_random_are_of_all_positions(outer: int, total: int) -> None:
    drawn = Lengths.at_random(outer, total)
    assert (drawn.outer, drawn.total) == (outer, total) and all(many > 0 for _, many in drawn.counts)
    if outer == 100_000:
        assert sum(many * (n - 11) ** 2 for n, many in drawn.counts) / outer == pytest.approx(11, rel=0.01)


def test_sizes_follow_from_what_is_known() -> None:
    p = CASES["GIN"].pipeline
    assert sizes_of(p, {"nodes": 5})["edges"] == 50
    assert sizes_of(p, {"nodes": 5}).lengths["edges"].told() == "mean 10.0, largest 10, assumed 10 each"
    given = sizes_of(p, {}, {"edges": Lengths.of(LENGTHS)})
    assert (given["nodes"], given["edges"], given["starts.rows"]) == (12, 77, 13)
    with pytest.raises(InputError, match="are of 12 'nodes', and there are 5"):
        sizes_of(p, {"nodes": 5}, {"edges": Lengths.of(LENGTHS)})


@pytest.mark.parametrize("name", ["GIN", "mean", "PNA", "GAT in passes", "GAT by softmax", "embedding bags", "experts"])
def test_bytes_are_those_that_the_machine_moves(name: str) -> None:
    case, moved = CASES[name], Moved()
    given = case.given(LENGTHS)
    p = case.pipeline
    stored = {t.name: given[t.name].to(ELEMENT_DTYPES[t.dtype]) for t in p.tensors if t.name in given}
    run_meshes(p, stored, WORKING, moved)
    sizes = {a.name: n for t in p.tensors if t.name in given for a, n in zip(t.axes, given[t.name].shape, strict=True)}
    assert mesh_traffic(p, sizes_of(p, sizes, {"edges": Lengths.of(LENGTHS)}))["l2"] == moved.bytes["l2"]


def test_two_ragged_axes_of_one_outer_are_long_together() -> None:
    p = CASES["packed sequences"].pipeline
    lengths = Lengths.of(LENGTHS)
    size = sizes_of(p, {}, {"queries": lengths, "keys": lengths})
    assert size.positions(["queries", "keys", "h"]) == 2 * sum(n * n for n in LENGTHS)
    assert size.positions(["seqs", "queries"]) == 77 and size.positions(["seqs", "h"]) == 24
