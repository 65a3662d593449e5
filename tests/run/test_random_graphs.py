"""Random functions through ``torch.compile`` on the reference machine, against eager and float64.

A fast part runs by default; ``-m exhaustive`` runs TILESTREAM_GRAPHS=COUNT@START of them (20000@0 if not set).
"""

from __future__ import annotations

import copy
import os
import warnings

import pytest
import torch
from random_graphs import Graph
from streamed import without_inductor
from torch import Tensor
from torch.utils import _pytree as pytree

from tilestream.run import oracle, prepare
from tilestream.run.backend import tilestream
from tilestream.run.oracle import Float64

BY_DEFAULT = 40


def check(seed: int) -> str:
    """Run the graph of ``seed`` compiled, twice, where its sizes may change also with more rows: what is wrong, if so.

    Raises whatever the compiler raises.
    """
    torch._dynamo.reset()
    made = Graph(seed)
    dynamic = True if made.dynamic is True else None
    options = {"target": "reference", "cache": False}
    mine = copy.deepcopy(made)
    fast = torch.compile(mine, backend=tilestream, options=options, dynamic=dynamic)
    plain, exact = copy.deepcopy(made), copy.deepcopy(made)
    calls = (0, 0, made.rows + 3)
    for k, rows in enumerate(calls):
        try:
            want = _run(plain, plain, rows)
            with Float64():
                best = _run(exact, exact, rows)
        except (RuntimeError, IndexError, ValueError):
            return ""  # not with these rows
        try:
            got = _run(fast, mine, rows)
        except Exception:
            if _torch_fails(made, dynamic, rows):
                return ""
            raise
        for index, (a, b, c) in enumerate(zip(got, want, best, strict=True)):
            if not (wrong := _differs(a, b, c)) or _torch_fails(made, dynamic, rows):
                continue
            if oracle.error(a, c) > 2 * _moved(seed, calls[: k + 1], index, c):
                return f"result {index} with {rows or made.rows} rows: {wrong}"
    return ""


def _moved(seed: int, calls: tuple[int, ...], index: int, exact: Tensor, times: int = 8) -> float:
    """How far an exact result of the last call moves, at most, when each weight is moved by up to half a unit of its
    last place: of a few elements that cancel, eager's own error is small by luck at times."""
    most = 0.0
    for draw in range(times):
        made = Graph(seed)
        generator = torch.Generator().manual_seed(draw)
        for i, weight in enumerate(made.weights):
            shake = 2 * torch.rand(weight.shape, generator=generator, dtype=torch.float64) - 1
            moved = weight.detach().double() * (1 + torch.finfo(weight.dtype).eps / 2 * shake)
            made.weights[i] = torch.nn.Parameter(moved, requires_grad=False)
        with Float64():
            *_, last = (_run(made, made, rows) for rows in calls)
        most = max(most, oracle.error(last[index], exact)) if last[index].is_floating_point() else most
    return most


def _torch_fails(made: Graph, dynamic: bool | None, rows: int) -> bool:
    """Whether torch alone raises or is wrong too: its guards on symbolic sizes have mistakes of their own, and so have
    the strides of a result that is a view of an input."""
    torch._dynamo.reset()
    mine, plain = copy.deepcopy(made), copy.deepcopy(made)
    traced = torch.compile(mine, backend="aot_eager", dynamic=dynamic)
    try:
        for some in (0, rows):
            pairs = zip(_run(traced, mine, some), _run(plain, plain, some), strict=True)
            if any(_differs(a, b, b.double() if b.is_floating_point() else b) for a, b in pairs):
                return True
    except Exception:
        return True
    return False


def _run(function, made: Graph, rows: int) -> list[Tensor]:
    """Results, then what inputs and state are afterwards."""
    inputs = made.inputs(rows)
    with torch.no_grad():
        results = pytree.tree_leaves(function(*inputs))
    return [*results, *inputs, made.state.clone()]


def _differs(mine: Tensor, theirs: Tensor, exact: Tensor) -> str:
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return f"{mine.dtype} {tuple(mine.shape)} for {theirs.dtype} {tuple(theirs.shape)}"
    if not mine.is_floating_point():
        return "" if torch.equal(mine, theirs) else "other integers"
    error, own = oracle.error(mine, exact), oracle.error(theirs, exact)
    if torch.equal(mine, theirs) or error <= max(oracle.tolerance(own, mine.dtype), 0.03):
        return ""
    # Or all that is left is rounding: what the operands were is lost in both.
    return "" if own > 0.05 and error < 20 * own else f"error {error:.2e}, eager's {own:.2e}"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tf32: None, fresh: None):
    without_inductor(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.early
def test_random_graphs():
    for seed in range(BY_DEFAULT):
        assert not (wrong := check(seed)), f"seed {seed}: {wrong}"
    assert sum(len(a.operators) for a in prepare.analyses()) > BY_DEFAULT


@pytest.mark.exhaustive
def test_many_random_graphs():
    count, start = (int(n) for n in os.environ.get("TILESTREAM_GRAPHS", "20000@0").split("@"))
    problems = []
    for seed in range(start, start + count):
        try:
            wrong = check(seed)
        except Exception as failure:
            wrong = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
        problems += [f"seed {seed}: {wrong}"] if wrong else []
    assert not problems, "\n".join(problems)
