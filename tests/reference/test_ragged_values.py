"""Ragged axes on the reference machine: values against torch, of nothing too, and bounds that are no bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_cases import CASES, LENGTHS, Case, bounds, ragged, softmax, summed
from random_ragged import random_ragged

from tilestream import reference
from tilestream.errors import InputError
from tilestream.ir.axes import Level, Spread
from tilestream.ir.dtypes import ELEMENT_DTYPES
from tilestream.ir.verify import verify
from tilestream.reference.mesh_machine import run_meshes
from tilestream.reference.ops import FLOAT64
from tilestream.reference.whole import run_whole


def checked(case: Case, lengths) -> None:
    verify(case.pipeline)
    given = case.given(lengths)
    want = case.want(given)
    got = run_meshes(case.pipeline, given, FLOAT64)
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-10)
    if len(case.pipeline.ragged) == 1:
        for name, value in run_whole(case.pipeline, given).items():
            torch.testing.assert_close(value, want[name], rtol=1e-10, atol=1e-10)
    stored = {t.name: given[t.name].to(ELEMENT_DTYPES[t.dtype]) for t in case.pipeline.tensors if t.name in given}
    for run in (reference.run, *([run_whole] if len(case.pipeline.ragged) == 1 else [])):
        for name, value in run(case.pipeline, stored).items():
            assert (value.double() - want[name]).norm() <= 0.03 * want[name].norm(), name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_it_is_what_torch_makes_of_it(name: str) -> None:
    checked(CASES[name], LENGTHS)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0), (1,)], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_of_nothing_and_of_little(name: str, lengths) -> None:
    checked(CASES[name], lengths)


HOW = "m[edges,f] = copy e[edges,f]\n s[nodes,f]:f32 = product m {}\n s -> Y[nodes,f]"
ONE = "e[edges,f] starts[starts.rows]:i32 >Y[nodes,f]", "nodes edges=starts[nodes] starts.rows f=2"


def run(text: str, lengths, values: torch.Tensor, **how) -> torch.Tensor:
    p, given = ragged(text, *ONE, **how), {"e": values, "starts": bounds(lengths)}
    found = run_meshes(p, given, FLOAT64)["Y"]
    torch.testing.assert_close(run_whole(p, given)["Y"], found, equal_nan=True)
    return found


@pytest.mark.parametrize(("how", "torch_how"), [("", "sum"), ("combine=max", "amax"), ("combine=min", "amin")])
def test_not_a_number_is_what_scatter_reduce_makes_of_it(how: str, torch_how: str) -> None:
    values = torch.randn(21, 2).double()
    values[9, 0], values[20, 1], values[0] = torch.nan, torch.inf, -torch.inf
    identity = {"sum": 0.0, "amax": -torch.inf, "amin": torch.inf}[torch_how]
    starts = bounds((1, 0, 19, 1))
    want = summed(values, starts, torch_how, empty=identity)
    torch.testing.assert_close(run(HOW.format(how), (1, 0, 19, 1), values), want, equal_nan=True)
    if how:
        got = run(HOW.format(f"empty=0.0 {how}"), (1, 0, 19, 1), values)
        torch.testing.assert_close(got, summed(values, starts, torch_how), equal_nan=True)


def test_a_softmax_survives_a_part_of_minus_infinities() -> None:
    """All of them give NaN, as ``torch.softmax``; those before or behind finite ones weigh nothing."""
    text = "m[edges,f] = copy e[edges,f]\n s[nodes,f]:f32 = product m m combine=softmax\n s -> Y[nodes,f]"
    lengths = (17, 17, 3, 0)
    values = torch.randn(37, 2).double()
    values[:8] = values[25:34] = values[34:, 0] = -torch.inf
    weights = softmax(values, bounds(lengths))
    finite = torch.where(weights == 0, 0.0, weights * values)
    want = summed(finite, bounds(lengths))
    text = text.replace("product m m", "product m x").replace(
        "s[nodes", "x[edges,f] = maximum m scalar=-1e30\n s[nodes", 1
    )
    for split in ((), (Spread(Level.CLUSTER, 3, ("edges",)),)):
        got = run(text, lengths, values, mesh=split)
        assert got[2, 0].isnan() and want[2, 0].isnan() and got[3].eq(0).all()
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 3, 2, 5], "fall from 3 at position 1 to 2 at 2"),
        ([0, 3, 3, 6], "go from 0 to 6, and 'edges' has 5 positions"),
        ([-1, 3, 3, 5], "go from -1 to 5"),
        ([0, 3, 5], "have 3 entries, and 'nodes' has 3 positions"),
        ([], "have 0 entries, and 'nodes' has 3 positions"),
    ],
    ids=str,
)
def test_bounds_that_are_none_are_refused_with_their_position(starts: list[int], message: str) -> None:
    p = ragged(HOW.format("").replace("s[", "b[nodes,f] = copy n[nodes,f]\n s[", 1), "n[nodes,f] " + ONE[0], ONE[1])
    given = {"e": torch.randn(5, 2), "n": torch.randn(3, 2), "starts": torch.tensor(starts).int()}
    with pytest.raises(InputError, match=message):
        run_meshes(p, given, FLOAT64)


def test_every_edge_of_an_output_is_made_and_stored_once() -> None:
    case = CASES["message passing"]
    given = case.given(LENGTHS)
    with pytest.raises(InputError, match=r"output 'E' has 77 positions .* give 1 to 77"):
        run_meshes(case.pipeline, {**given, "starts": given["starts"].clamp(min=1)}, FLOAT64)
    order = given["order"].clone()
    order[5] = order[2]
    with pytest.raises(InputError, match="at 2 and at 5: the last would win"):
        run_meshes(case.pipeline, {**given, "order": order}, FLOAT64)
    del given["starts"]
    with pytest.raises(InputError, match="bounds 'starts' of axis 'edges' are not given"):
        run_meshes(case.pipeline, given, FLOAT64)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 12), max_size=9))
def test_random_ragged_pipelines(seed: int, lengths: list[int]) -> None:
    checked(random_ragged(seed), lengths)
