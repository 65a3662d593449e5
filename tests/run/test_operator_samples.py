"""Torch's own samples of its operators: alone, between two linear layers, and with gradients.

Every operator and every sample of ``op_db`` of the installed torch. A seeded part runs by default; all of it with
``-m exhaustive`` (SHARD=2/8 in TILESTREAM_SAMPLES runs the second of eight parts).
"""

from __future__ import annotations

import os
import random
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import eager_regions
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tilestream.run import oracle

ROWS = (1, 7, 64, 130)
LARGEST = 20_000  # elements of an operator's input
DTYPES = (torch.bfloat16, torch.float32)
LEFT_OUT = re.compile(
    r"combinations|cartesian|dropout|bernoulli|rand|normal(?!ize)|multinomial|uniform|exponential|cauchy|geometric"
    r"|empty|rrelu|lowrank|fractional"
)
"""Operators whose results grow too fast with the rows; that draw numbers, or leave them to chance."""
ALONE = re.compile(r"lu_unpack|lu_solve|ldl_solve|segment_reduce")
"""Operators that trust the pivots or lengths they are given: with other rows torch writes outside of its memory."""


@dataclass(frozen=True)
class Case:
    """One sample: ``function`` of ``tensors``, which are the sample's, or feed linear layers around the operator."""

    name: str
    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    train: bool = False


@dataclass
class Tally:
    """How many cases ran and what came of them; ``problems`` are those that are wrong or raised, by name."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def run(self, case: Case, seed: int) -> None:
        """Run one case; those that do not run eagerly or in float64 or cannot be traced are only counted."""
        outcome = _outcome(case, seed)
        self.counts.update(["run", *outcome[0]])
        if outcome[1]:
            self.problems.append(f"{case.name} (seed {seed}): {outcome[1]}")


def _outcome(case: Case, seed: int) -> tuple[list[str], str]:
    strategy = eager_regions.strategy_of(seed)
    try:
        with _Draws() as draws:
            plain = pytree.tree_leaves(_eager(case))
        if draws.seen:
            return ["not run"], ""
        with oracle.Float64():
            wide = tuple(x.double() if x.is_floating_point() else x for x in case.tensors)
            exact = pytree.tree_leaves(_eager(replace(case, tensors=wide)))
        run = _traced(case)
        faithful = run("")[0]
        if len(plain) != len(exact) or eager_regions.judge(faithful, plain, exact):
            return ["not run"], ""
    except Exception:
        return ["not run"], ""
    try:
        got, made = run(strategy)
    except Exception as failure:
        where = traceback.format_tb(failure.__traceback__)[-1]
        return ["raised"], f"{type(failure).__name__}: {str(failure)[:300]} {where}"
    outcome = ["taken" if any(m.taken for m in made) else "nothing taken"]
    outcome += ["unplanned"] if any(m.unplanned for m in made) else []
    terms = max((x.numel() for x in case.tensors), default=1)
    wrong = eager_regions.judge(got, plain, exact, case.train, terms)
    if wrong:
        wrong = eager_regions.judge(got, plain, exact, case.train, terms, _moved(case, exact))
    return [*outcome, "wrong"] if wrong else outcome, f"{wrong} with {strategy}" if wrong else ""


def _moved(case: Case, exact: list[Any], times: int = 8) -> list[float]:
    """How far each exact result moves, at most, when every input is moved by up to half a unit of its last place."""

    def shaken(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        return x.double() * (1 + torch.finfo(x.dtype).eps / 2 * (2 * torch.rand(x.shape, dtype=torch.float64) - 1))

    most = [0.0] * len(exact)
    for seed in range(times):
        torch.manual_seed(seed)
        with oracle.Float64():
            found = pytree.tree_leaves(_eager(replace(case, tensors=tuple(map(shaken, case.tensors)))))
        for i, (there, here) in enumerate(zip(found, exact, strict=True)):
            if isinstance(here, Tensor) and here.is_floating_point():
                most[i] = max(most[i], oracle.error(there, here))
    return most


class _Draws(TorchDispatchMode):
    """Whether an operator draws numbers, as dropout inside attention: torch's samples seed it, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _eager(case: Case) -> Any:
    if case.train:
        return eager_regions.gradients(case.function, case.tensors)
    with torch.no_grad():
        return case.function(*case.tensors)


def _traced(case: Case) -> Callable[[str], tuple[list[Any], list[eager_regions.Regions]]]:
    """The case as graphs, to be run with regions of a strategy; with none, operator by operator."""
    if case.train:
        return eager_regions.Trained(case.function, case.tensors).run
    graph = eager_regions.trace(case.function, case.tensors)

    def run(strategy: str) -> tuple[list[Any], list[eager_regions.Regions]]:
        if not strategy:
            with torch.no_grad():
                return graph(*case.tensors), []
        made = eager_regions.Regions(graph, strategy)
        return made(case.tensors), [made]

    return run


def samples(
    chosen: Callable[[], bool], operators: Callable[[], bool] = lambda: True, most: int | None = None
) -> Iterator[Case]:
    """The cases for which ``chosen`` says yes, in a fixed order, of the operators (by dtype) for which ``operators``
    does: to make an operator's samples takes as long as to run one. At most so many of each: a pooling has 1,440
    samples, an addition 9."""
    pytest.importorskip("expecttest", reason="torch's samples need it: pip install 'tilestream[dev]'")
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if LEFT_OUT.search(info.name):
            continue
        for dtype in DTYPES:
            if dtype not in info.supported_dtypes("cpu") or not operators():
                continue
            torch.manual_seed(0)
            try:
                found = _found(info, dtype)
            except Exception:  # samples that this build of torch cannot make
                continue
            made = 0
            for index, sample in enumerate(found):
                title = f"{info.formatted_name} {str(dtype).removeprefix('torch.')} sample {index}"
                for kind, rows in (("alone", 0), ("between", 0), *(("between", r) for r in ROWS), ("train", 0)):
                    if not chosen() or (kind != "alone" and ALONE.search(info.name)):
                        continue
                    if made == most:
                        continue
                    if (case := _case(info.op, sample, f"{title} {kind} {rows}", kind, rows)) is not None:
                        made += 1
                        yield case


def _found(info: Any, dtype: torch.dtype) -> list[Any]:
    """An operator's samples. For each of them torch would look through the stack for a unittest's name, and keep the
    stack for devices that are not there: four fifths of the time of a seeded part."""

    def no_unittest() -> None: ...

    with (
        mock.patch("torch.testing._internal.common_utils.extract_test_fn", no_unittest),
        mock.patch("torch.testing._internal.opinfo.core.extract_test_fn", no_unittest),
        mock.patch("torch.manual_seed", torch.default_generator.manual_seed),
    ):
        return list(info.sample_inputs("cpu", dtype))


def _case(op: Any, sample: Any, name: str, kind: str, rows: int) -> Case | None:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    where = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    tensors = [leaves[i].detach() for i in where]
    if any(x.layout != torch.strided for x in tensors):
        return None

    def plain(*given: Tensor) -> Any:
        mine = list(leaves)
        for i, x in zip(where, given, strict=True):
            mine[i] = x
        first, args, kwargs = pytree.tree_unflatten(mine, spec)
        return op(first, *args, **kwargs)

    if kind == "alone":
        return Case(name, plain, tuple(tensors))
    if not tensors or not tensors[0].is_floating_point() or tensors[0].dim() < 1 or 0 in tensors[0].shape:
        return None
    if rows:
        old = tensors[0].shape[0]
        if rows * tensors[0].numel() > LARGEST * old:
            return None
        index = torch.arange(rows) % old
        tensors = [x[index] if x.dim() == tensors[0].dim() and x.shape[0] == old else x for x in tensors]
    width, dtype = tensors[0].shape[-1], tensors[0].dtype
    # A permutation: the operator sees the sample's own numbers, which may have to be positive.
    weight = torch.eye(width, dtype=dtype)[torch.randperm(width)]

    def between(x: Tensor, w: Tensor, *rest: Tensor) -> Any:
        h = F.linear(x, w)
        out = plain(h, *rest)
        made = [r for r in pytree.tree_leaves(out) if isinstance(r, Tensor)]
        return [h, *made, *(F.linear(r, _weight(r)) for r in made if r.dtype == h.dtype and r.dim() > 0)]

    given = (tensors[0], weight, *tensors[1:])
    return Case(name, between, given, train=kind == "train")


def _weight(result: Tensor) -> Tensor:
    """Five rows of weights, each with a sum: against a cosine alone equal numbers, as indices, cancel to roundings."""
    wide = result.shape[-1]
    waves = 0.5 + torch.cos(torch.arange(5 * wide).reshape(5, wide).float())
    return waves.div(max(1, wide) ** 0.5).to(result.dtype)


@pytest.fixture(autouse=True)
def _quiet(tf32: None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(("size", "moves"), [(1000.0, True), (1.0, False)])
def test_what_a_rounding_of_the_inputs_moves(size: float, moves: bool):
    """Behind a softmax of large scores it is many roundings of the result; else it is about one."""
    torch.manual_seed(0)
    given = (torch.rand(7, 8) * size, 1 + torch.randn(8, 8) / 1000)
    case = Case("softmax", lambda x, w: F.softmax(F.linear(x, w), -1), given)
    exact = [_eager(replace(case, tensors=tuple(x.double() for x in case.tensors)))]
    eps = torch.finfo(torch.float32).eps
    assert (_moved(case, exact)[0] > 20 * eps) == moves
    off = [(x * (1 + 30 * eps * torch.randn(x.shape))).float() for x in exact]
    assert bool(eager_regions.judge(off, [x.float() for x in exact], exact, moved=_moved(case, exact))) != moves
    wrong = [(x * 1.01).float() for x in exact]
    assert eager_regions.judge(wrong, [x.float() for x in exact], exact, moved=_moved(case, exact))


@pytest.mark.parametrize("rows", ROWS)
def test_what_is_behind_an_operator_does_not_cancel(rows: int):
    """Else its error is rounding alone, and whoever sums in another order has several times eager's."""
    from torch.testing._internal.opinfo.core import SampleInput

    sample = SampleInput(torch.randn(3, 5))
    case = _case(lambda x: x.argmax(-1).to(x.dtype), sample, "argmax", "between", rows)
    assert case is not None
    *_, last = _eager(case)
    *_, exact = _eager(replace(case, tensors=tuple(x.double() for x in case.tensors)))
    assert oracle.error(last, exact) < 2 * torch.finfo(torch.float32).eps


def test_a_squeezed_product_of_a_vector_has_two_users():
    tally = Tally()
    vector = Case("vector", lambda x, w: (h := F.linear(x, w), h.amax(0)), (torch.randn(1), torch.randn(1, 1)))
    tally.run(vector, 0)
    assert tally.counts["not run"] == 0 and not tally.problems, tally.problems


@pytest.mark.early
def test_a_seeded_part_of_the_samples():
    draw = random.Random(0)
    tally = Tally()
    for seed, case in enumerate(samples(lambda: draw.random() < 0.004, lambda: draw.random() < 0.2, most=4)):
        tally.run(case, seed)
    assert tally.counts["run"] > 40 and tally.counts["taken"] > 15, tally.counts
    assert not tally.problems, "\n".join(tally.problems)


@pytest.mark.exhaustive
def test_all_samples():
    part, parts = (int(n) for n in os.environ.get("TILESTREAM_SAMPLES", "1/1").split("/"))
    count = iter(range(10**9))
    tally = Tally()
    for seed, case in enumerate(samples(lambda: next(count) % parts == part - 1)):
        tally.run(case, seed)
    print(dict(tally.counts))
    assert not tally.problems, "\n".join(tally.problems)
